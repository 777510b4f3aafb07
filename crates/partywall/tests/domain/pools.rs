// Holds 20, 185.
//! Pools: blocks that go round between processes, and come back when one of them dies.

use std::{
    io::{BufRead, Read},
    sync::mpsc::channel,
    time::Duration,
};

use partywall::{
    Block, BlockRef, Domain, Error, MAX_BLOCKS, Place, Pool, PoolOptions, Wait,
    error::{Denied, Gone, InvalidArgument, LimitReached, Mismatch, NotFound, Unreachable},
    info::{MemberState, Named},
};
use partywall_harness::{device, linger, place};

use super::{
    TIMEOUT, pidfds,
    world::{World, commit, eventually},
};

const BYTES: usize = 1000;

/// The roles of processes that are killed, or that a block is handed to.
#[allow(clippy::print_stdout)] // it is how a role talks to the test
pub(crate) fn play(role: &str) {
    if role == "pool sandboxed" {
        pidfds::forbid();
    }
    let domain = Domain::options().start(false).connect().unwrap();
    let pool = || domain.pool("frames").timeout(TIMEOUT).open().unwrap();
    match role {
        "pool holder" | "pool sandboxed" => {
            let pool = pool();
            let _block = pool.alloc(TIMEOUT).unwrap();
            linger();
        }
        // Says good-bye with a block that it has forgotten.
        "pool loser" => {
            let pool = pool();
            std::mem::forget(pool.alloc(TIMEOUT).unwrap());
            linger();
        }
        "pool giver" => {
            let pool = pool();
            let mut block = pool.alloc(TIMEOUT).unwrap();
            write(&mut block, 7);
            println!("offer {}", block.offer().unwrap());
            linger();
        }
        // Accepts the block whose reference it receives, and holds it.
        "pool taker" => {
            let pool = pool();
            println!("ready");
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line).unwrap();
            let block = pool.accept(&line.trim().parse().unwrap()).unwrap();
            println!("byte {}", read(&block));
            let _ = std::io::stdin().read(&mut [0]);
        }
        "pool maker" => {
            let pool = frames(&domain, 3).open_or_create().unwrap();
            println!("version {}", pool.version());
            linger();
        }
        _ => panic!("{role}"),
    }
}

fn frames(domain: &Domain, blocks: u32) -> PoolOptions {
    domain.pool("frames").blocks(blocks).block_bytes(BYTES as u64).place(place())
}

/// Writes all of a block, wherever it is.
fn write(block: &mut Block, value: u8) {
    block.write(&[value; BYTES]).unwrap();
}

/// The value of all bytes of a block.
fn read(block: &Block) -> u8 {
    let mut bytes = vec![0; BYTES];
    block.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

fn counts(pool: &Pool) -> (u32, u32, u32) {
    let stats = pool.stats();
    assert_eq!((stats.blocks, stats.free + stats.held + stats.offered), (pool.blocks(), pool.blocks()));
    (stats.free, stats.held, stats.offered)
}

// Holds 183.
#[test]
fn block_is_written_once_and_read_in_place() {
    let world = World::new();
    let one = world.connect();
    let other = world.connect();
    let ours = frames(&one, 3).create().unwrap();
    let theirs = other.pool("frames").open().unwrap();
    let facts = |pool: &Pool| (pool.name().to_owned(), pool.version(), pool.blocks(), pool.block_bytes(), pool.place());
    assert_eq!(facts(&ours), facts(&theirs));
    assert_eq!((theirs.blocks(), theirs.block_bytes(), theirs.place()), (3, BYTES as u64, place()));
    let mut blocks = Vec::new();
    for value in 1..=3 {
        let mut block = ours.alloc(Duration::ZERO).unwrap();
        assert_eq!(read(&block), 0, "no process has had it yet");
        write(&mut block, value);
        blocks.push(block.offer().unwrap());
    }
    assert_eq!(counts(&theirs), (0, 0, 3));
    assert!(ours.try_alloc().unwrap().is_none());
    assert!(matches!(theirs.alloc(Duration::from_millis(20)), Err(Error::Timeout { .. })));
    for (value, reference) in (1..).zip(&blocks) {
        let reference: BlockRef = reference.to_string().parse().unwrap();
        let block = theirs.accept(&reference).unwrap();
        assert_eq!((read(&block), block.index()), (value, reference.index()));
        assert_eq!((block.pool(), block.len()), ("frames", BYTES as u64));
        assert!(matches!(ours.accept(&reference), Err(Error::Gone(Gone::Block { .. }))), "it was taken over");
        block.release().unwrap();
    }
    eventually("all are free", || counts(&ours) == (3, 0, 0));
    // A block keeps its contents unless the pool zeroes it.
    let block = ours.alloc(TIMEOUT).unwrap();
    assert!((1..=3).contains(&read(&block)));
}

#[test]
fn elements_and_zeros_in_host_memory() {
    let world = World::new();
    let domain = world.connect();
    let pool = domain.pool("small").blocks(2).block_bytes(10).place(partywall::Place::Host).create().unwrap();
    let mut block = pool.alloc(Duration::ZERO).unwrap();
    block.as_mut_slice::<u32>().unwrap().copy_from_slice(&[1, 2]);
    block.bytes_mut().unwrap()[9] = 3;
    assert_eq!((block.as_slice::<u64>().unwrap(), block.bytes().unwrap().len()), (&[1 | 2 << 32][..], 10));
    assert!(matches!(block.device(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
    let error = domain
        .pool("tiny")
        .blocks(1)
        .block_bytes(7)
        .place(partywall::Place::Host)
        .create()
        .unwrap()
        .try_alloc()
        .unwrap()
        .unwrap();
    assert!(matches!(error.as_slice::<u64>(), Err(Error::Mismatch(Mismatch::BlockSize { has: 7, needed: 8, .. }))));
    block.zero().unwrap();
    assert_eq!(block.bytes().unwrap(), [0; 10]);
    // The first use of the bytes, by two threads at the same time.
    let block = pool.alloc(Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(block.bytes().unwrap().len(), 10));
        }
    });
}

/// This holds for the data of dead holders too, and without another thread's work in between.
// Holds 188.
#[test]
fn zeroed_block_has_no_data_of_earlier_holders() {
    let world = World::new();
    let domain = world.connect();
    let pool = frames(&domain, 1).zeroed(true).create().unwrap();
    assert!(pool.is_zeroed() && domain.pool("frames").open().unwrap().is_zeroed());
    let mut block = pool.alloc(Duration::ZERO).unwrap();
    write(&mut block, 7);
    block.release().unwrap();
    let mut block = pool.try_alloc().unwrap().unwrap();
    assert_eq!(read(&block), 0);
    write(&mut block, 7);
    // A process that accepts a block gets its contents.
    let block = pool.accept(&block.offer().unwrap()).unwrap();
    assert_eq!(read(&block), 7);
    block.release().unwrap();
    let (mut giver, _) = world.play_after("pool giver", "offer ");
    assert_eq!(counts(&pool), (0, 0, 1));
    giver.kill();
    let block = pool.alloc(TIMEOUT).unwrap();
    assert_eq!(read(&block), 0);
    // Dropped instead, it would keep the pool until the GPU is idle.
    block.release().unwrap();

    let wrong = |zeroed| domain.pool("frames").zeroed(zeroed).open();
    assert!(
        matches!(wrong(false), Err(Error::Mismatch(Mismatch::Options { of: Named::Pool, why, .. })) if why.contains("are zeroed"))
    );
    drop(pool);
    let _pool = frames(&domain, 1).create().unwrap();
    assert!(
        matches!(wrong(true), Err(Error::Mismatch(Mismatch::Options { of: Named::Pool, why, .. })) if why.contains("are not zeroed"))
    );
}

#[test]
fn waiters_are_served_in_order() {
    let world = World::new();
    let pool = frames(&world.connect(), 1).create().unwrap();
    let block = pool.alloc(TIMEOUT).unwrap();
    let (sender, order) = channel();
    std::thread::scope(|scope| {
        for number in 0..5 {
            let pool = world.connect().pool("frames").open().unwrap();
            let sender = sender.clone();
            scope.spawn(move || {
                let block = pool.alloc(TIMEOUT).unwrap();
                sender.send(number).unwrap();
                drop(block);
            });
            eventually("it waits", || world.connect().pool("frames").open().unwrap().stats().waiting == number + 1);
        }
        let wait = Wait::from(TIMEOUT).cancelled_by(&|| true);
        assert!(matches!(pool.alloc(wait), Err(Error::Cancelled { .. })));
        drop(block);
    });
    assert!(order.try_iter().eq(0..5));
}

#[test]
fn impossible_pools_are_refused() {
    let world = World::new();
    let domain = world.connect();
    let bad = |options: PoolOptions| match (options.create(), options.open_or_create()) {
        (
            Err(Error::InvalidArgument(InvalidArgument::Options { of: Named::Pool, why, .. })),
            Err(Error::InvalidArgument(InvalidArgument::Options { of: Named::Pool, .. })),
        ) => why,
        other => panic!("{other:?}"),
    };
    bad(domain.pool("x"));
    bad(domain.pool("x").blocks(1));
    assert!(bad(frames(&domain, 0)).contains("not 0"));
    assert!(bad(frames(&domain, MAX_BLOCKS + 1)).contains("65536"));
    bad(frames(&domain, 1).block_bytes(0));
    bad(frames(&domain, 2).block_bytes(u64::MAX));
    bad(frames(&domain, 3).block_bytes(u64::MAX / 2));
    let error = frames(&domain, 1).block_bytes(1 << 60).create().unwrap_err();
    assert!(matches!(error, Error::LimitReached(LimitReached::Memory { .. } | LimitReached::Broker { .. })), "{error}");
    assert!(matches!(
        domain.pool("").blocks(1).block_bytes(1).create(),
        Err(Error::InvalidArgument(InvalidArgument::Name { .. }))
    ));
    assert!(matches!(domain.pool("x").open(), Err(Error::NotFound(NotFound::Name { .. }))));
    let waited = domain.pool("x").timeout(Duration::from_millis(20)).open();
    assert!(matches!(waited, Err(Error::Timeout { .. })));
    assert_eq!(domain.names().unwrap().len(), 0);
}

#[test]
fn openers_may_state_the_options() {
    let world = World::new();
    let domain = world.connect();
    let _pool = frames(&domain, 3).create().unwrap();
    frames(&world.connect(), 3).open().unwrap();
    let wrong = |options: PoolOptions| match (options.open(), options.open_or_create()) {
        (
            Err(Error::Mismatch(Mismatch::Options { of: Named::Pool, why, .. })),
            Err(Error::Mismatch(Mismatch::Options { of: Named::Pool, .. })),
        ) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(wrong(frames(&domain, 4)), "it has 3 blocks, not 4");
    assert_eq!(wrong(frames(&domain, 3).block_bytes(999)), "its blocks have 1000 bytes each, not 999");
    if device() != "host" {
        assert!(wrong(frames(&domain, 3).place(Place::Host)).contains("not on host"));
    }
    assert!(matches!(frames(&domain, 3).create(), Err(Error::Denied(Denied::NameExists { .. }))));
    let _segment = commit(&domain, "weights", 1, false);
    for error in [domain.pool("weights").open(), domain.pool("weights").blocks(1).block_bytes(1).open_or_create()] {
        assert!(
            matches!(error, Err(Error::Mismatch(Mismatch::Object { wanted: Named::Pool, is: Named::Segment, .. }))),
            "{error:?}"
        );
    }
    assert!(matches!(
        domain.pool("weights").blocks(1).block_bytes(1).create(),
        Err(Error::Denied(Denied::NameExists { .. }))
    ));
    // None of that has left a lease behind.
    assert_eq!(domain.status().unwrap().leases, 2);
}

#[test]
fn block_of_another_pool_is_refused() {
    let world = World::new();
    let domain = world.connect();
    let pool = frames(&domain, 1).create().unwrap();
    let offered = pool.alloc(Duration::ZERO).unwrap().offer().unwrap();
    let other = domain.pool("other").blocks(1).block_bytes(1).place(partywall::Place::Host).create().unwrap();
    assert!(matches!(other.accept(&offered), Err(Error::Mismatch(Mismatch::Options { of: Named::Pool, .. }))));
    // The reference ends with its pool: another pool of the same name has other blocks.
    drop(pool);
    assert!(matches!(domain.pool("frames").open(), Err(Error::NotFound(NotFound::Name { .. }))));
    let keeper = frames(&domain, 1).kept(true).create().unwrap();
    let reference = keeper.alloc(Duration::ZERO).unwrap().offer().unwrap();
    domain.remove("frames").unwrap();
    let new = frames(&domain, 1).create().unwrap();
    assert!(new.version() > keeper.version());
    assert!(matches!(new.accept(&reference), Err(Error::Mismatch(Mismatch::Options { of: Named::Pool, .. }))));
    // Its giver takes it back.
    assert_eq!(keeper.accept(&reference).unwrap().index(), reference.index());
    assert!(matches!(keeper.accept(&reference), Err(Error::Gone(Gone::Block { .. }))));
}

/// The version's number is used again once no process has the pool open.
// Holds 183.
#[test]
fn reference_does_not_match_the_next_pool_of_the_name() {
    let world = World::new();
    let domain = world.connect();
    let offer = |pool: &Pool| {
        let mut block = pool.alloc(TIMEOUT).unwrap();
        write(&mut block, 7);
        block.offer().unwrap()
    };
    let pool = frames(&domain, 1).create().unwrap();
    let old = offer(&pool);
    drop(pool);
    eventually("the pool is gone", || domain.names().unwrap().is_empty());
    let pool = frames(&domain, 1).create().unwrap();
    let new = offer(&pool);
    assert!(matches!(pool.accept(&old), Err(Error::Gone(Gone::Block { .. }))), "{old} {new}");
    pool.accept(&new).unwrap().release().unwrap();
}

// Holds 186.
#[test]
fn pool_is_mapped_once_for_all_handles() {
    let world = World::new();
    let domain = world.connect();
    // Other tests in this process have pools, too.
    let name = "mapped-once";
    let made = domain.pool(name).blocks(1).block_bytes(BYTES as u64).place(place()).create().unwrap();
    let opened: Vec<_> = (0..20).map(|_| domain.pool(name).open().unwrap()).collect();
    let block = opened[7].alloc(Duration::ZERO).unwrap();
    assert!(made.try_alloc().unwrap().is_none());
    assert_eq!(domain.status().unwrap().leases, 1);
    if device() == "host" {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ours = maps.lines().filter(|line| line.contains(name)).count();
        assert!((1..=2).contains(&ours), "of its making, and as what was committed: {maps}");
    }
    drop((made, opened));
    assert_eq!(block.pool(), name, "a block keeps its pool");
    assert_eq!(domain.status().unwrap().leases, 1);
    drop((block, domain));
    let other = world.connect();
    eventually("it goes with the last block", || other.names().unwrap().is_empty());
}

// Holds 187.
#[test]
fn one_process_of_many_creates_the_pool() {
    let world = World::new();
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..4).map(|_| scope.spawn(|| world.play_after("pool maker", "version ").1)).collect();
        let ours = frames(&world.connect(), 3).open_or_create().unwrap();
        let block = ours.alloc(Duration::ZERO).unwrap();
        let versions: Vec<_> = makers.into_iter().map(|maker| maker.join().unwrap()).collect();
        assert!(versions.iter().all(|version| *version == ours.version().to_string()), "{versions:?}");
        assert_eq!(counts(&ours), (2, 1, 0));
        drop(block);
    });
}

#[test]
fn blocks_of_the_dead_come_back() {
    let world = World::new();
    let pool = frames(&world.connect(), 1).create().unwrap();
    for _ in 0..3 {
        let mut holder = world.play("pool holder");
        assert_eq!(counts(&pool), (0, 1, 0));
        holder.kill();
        pool.alloc(TIMEOUT).unwrap().release().unwrap();
    }
    let mut loser = world.play("pool loser");
    loser.proceed();
    pool.alloc(TIMEOUT).unwrap().release().unwrap();
}

// Holds 183.
#[test]
fn offered_block_is_freed_when_its_giver_dies() {
    let world = World::new();
    let pool = frames(&world.connect(), 1).create().unwrap();
    let (mut giver, offered) = world.play_after("pool giver", "offer ");
    assert_eq!(counts(&pool), (0, 0, 1));
    giver.kill();
    pool.alloc(TIMEOUT).unwrap().release().unwrap();
    assert!(matches!(pool.accept(&offered.parse().unwrap()), Err(Error::Gone(Gone::Block { .. }))));
}

#[test]
fn accepted_block_survives_its_giver() {
    let world = World::new();
    let pool = frames(&world.connect(), 2).create().unwrap();
    let (mut giver, offered) = world.play_after("pool giver", "offer ");
    let mut taker = world.play("pool taker");
    taker.send(&offered);
    assert_eq!(taker.expect("byte "), "7");
    giver.kill();
    // The giver's death is known once another block that it held, and had not offered, is free.
    let mut holder = world.play("pool holder");
    holder.kill();
    eventually("only what was taken over is held", || counts(&pool) == (1, 1, 0));
    taker.kill();
    eventually("all are free", || counts(&pool) == (2, 0, 0));
}

#[test]
fn without_a_proof_of_death_blocks_are_in_quarantine() {
    let world = World::prepared(|_| (), super::pidfds::forbid);
    let domain = world.connect();
    let pool = frames(&domain, 1).create().unwrap();
    let mut holder = world.play("pool sandboxed");
    holder.kill();
    let states = || domain.members().unwrap().iter().map(|member| member.state).collect::<Vec<_>>();
    eventually("it is unproven", || states().contains(&MemberState::Unproven));
    assert!(matches!(pool.alloc(Duration::from_millis(50)), Err(Error::Timeout { .. })));
    domain.free_unproven(Some(holder.pid())).unwrap();
    pool.alloc(TIMEOUT).unwrap().release().unwrap();
}

// Holds 187.
#[test]
fn pool_ends_with_its_last_user_unless_kept() {
    let world = World::new();
    let domain = world.connect();
    let mut holder = {
        let _pool = frames(&domain, 1).create().unwrap();
        world.play("pool holder")
    };
    // Not with its maker.
    let pool = domain.pool("frames").open().unwrap();
    assert_eq!(counts(&pool), (0, 1, 0));
    drop(pool);
    holder.kill();
    eventually("it is gone", || matches!(domain.pool("frames").open(), Err(Error::NotFound(NotFound::Name { .. }))));
    drop(frames(&domain, 1).kept(true).create().unwrap());
    let mut holder = world.play("pool holder");
    holder.kill();
    domain.pool("frames").open().unwrap().alloc(TIMEOUT).unwrap().release().unwrap();
    domain.remove("frames").unwrap();
    assert!(domain.names().unwrap().is_empty());
}

#[test]
fn without_a_broker_waits_end_and_free_permits_are_passed_on() {
    let mut world = World::new();
    let domain = world.connect();
    let pool = frames(&domain, 2).create().unwrap();
    let held = pool.alloc(Duration::ZERO).unwrap();
    world.end_broker();
    for _ in 0..10 {
        let block = pool.alloc(Duration::ZERO).unwrap();
        assert!(matches!(pool.alloc(TIMEOUT), Err(Error::Unreachable(Unreachable::Gone { .. }))));
        let block = pool.accept(&block.offer().unwrap()).unwrap();
        block.release().unwrap();
    }
    drop(held);
    assert_eq!(counts(&pool), (2, 0, 0));
}
