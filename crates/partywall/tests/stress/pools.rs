//! Pools whose processes are killed and stopped while they take blocks, write them, hand them over, give them back, and
//! create the pool.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    time::Duration,
};

use partywall::{
    Block, BlockRef, DType, DeviceRange, Domain, Error, Place as At, Pool, PoolOptions, SharedSlice, error::Gone,
};
use partywall_harness::{device, place};

use super::{
    Dice, WATCHDOG, eventually,
    place::{Actor, Place, linger, say},
    rounds,
};

/// The number of blocks in the pool.
const BLOCKS: u32 = 4;
pub(crate) const BYTES: usize = 512;
/// The number of places where processes leave references to offered blocks for each other.
const MAIL: usize = 3;

pub(crate) fn play(words: &[&str]) {
    let domain = Domain::options().start(false).connect().unwrap();
    match words[0] {
        "churning" => {
            let pool = domain.pool("frames").timeout(WATCHDOG).open().unwrap();
            let mail = domain.opener("mail").read_write().timeout(WATCHDOG).open().unwrap();
            let mail = mail.tensor("x").unwrap().shared::<u64>().unwrap();
            let mut churn = Churn { pool: &pool, mail, dice: Dice(words[1].parse().unwrap()), offered: None };
            say("ready");
            loop {
                churn.turn();
            }
        }
        "making" => {
            let pool = frames(&domain).open_or_create().unwrap();
            drop(pool.alloc(WATCHDOG).unwrap());
            say("ready");
            linger();
        }
        other => panic!("{other}"),
    }
}

fn frames(domain: &Domain) -> PoolOptions {
    domain.pool("frames").blocks(BLOCKS).block_bytes(BYTES as u64).place(place()).timeout(WATCHDOG)
}

/// A process that calls all operations of pools.
struct Churn<'a> {
    pool: &'a Pool,
    mail: SharedSlice<'a, u64>,
    dice: Dice,
    /// Offered blocks that may not have been accepted. The giver takes them back.
    offered: Option<BlockRef>,
}

impl Churn<'_> {
    fn turn(&mut self) {
        if let Some(offered) = self.offered.take() {
            match self.pool.accept(&offered) {
                Ok(block) => return block.release().unwrap(),
                Err(Error::Gone(Gone::Block { .. })) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let block = match self.dice.below(5) {
            0 => self.pool.try_alloc().unwrap(),
            1 => match self.pool.alloc(Duration::from_micros(self.dice.below(300))) {
                Ok(block) => Some(block),
                Err(Error::Timeout { .. }) => None,
                Err(error) => panic!("{error}"),
            },
            2 => self.take_over(),
            _ => Some(self.pool.alloc(WATCHDOG).unwrap()),
        };
        let Some(mut block) = block else { return };
        // No other process writes the block meanwhile.
        let mark = self.dice.below(256) as u8;
        write(&mut block, &[mark; BYTES]);
        if self.dice.below(20) == 0 {
            std::thread::sleep(Duration::from_micros(self.dice.below(2000)));
        }
        assert_eq!(read(&block), [mark; BYTES]);
        match self.dice.below(3) {
            // On a GPU the block would be free only later, so that a stopped process might have all blocks.
            0 if device() == "host" => drop(block),
            0 | 1 => block.release().unwrap(),
            _ => {
                let offered = block.offer().unwrap();
                // Generations of these tests have fewer than 48 bits, and indices fewer than 16.
                let letter = u64::from(offered.index()) << 48 | offered.generation();
                self.mail.set(self.dice.below(MAIL as u64) as usize, letter + 1);
                self.offered = Some(offered);
            }
        }
    }

    fn take_over(&mut self) -> Option<Block> {
        let letter = self.mail.get(self.dice.below(MAIL as u64) as usize).checked_sub(1)?;
        let index = letter >> 48;
        let generation = letter & ((1 << 48) - 1);
        let text = format!("frames@{}#{index}.{generation}", self.pool.version());
        match self.pool.accept(&text.parse().unwrap()) {
            Ok(block) => Some(block),
            Err(Error::Gone(Gone::Block { .. })) => None,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Fills a block of host memory or of a GPU.
pub(crate) fn write(block: &mut Block, bytes: &[u8]) {
    if device() == "host" {
        return block.bytes_mut().unwrap().copy_from_slice(bytes);
    }
    let range = block.device_mut().unwrap();
    range.copy_from_host(range.gpu().stream(), bytes).unwrap();
}

/// Returns the bytes of a block of host memory or of a GPU.
pub(crate) fn read(block: &Block) -> Vec<u8> {
    if device() == "host" { block.bytes().unwrap().to_vec() } else { copy(&block.device().unwrap()) }
}

/// Returns the bytes of a block on a GPU.
pub(crate) fn copy(range: &DeviceRange<'_>) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    range.copy_to_host(range.gpu().stream(), &mut bytes).unwrap();
    bytes
}

/// Returns a domain with the pool and the mail, and this many processes that use them.
fn stage(place: &Place, count: usize) -> (Domain, Pool, partywall::Segment, Vec<Actor>) {
    let domain = place.connect();
    let pool = frames(&domain).create().unwrap();
    let mail = domain.create("mail", At::Host).tensor("x", DType::U64, &[MAIL as u64]).mutable(true);
    let mail = mail.allocate().unwrap().commit().unwrap();
    let actors = (0..count).map(|i| place.play(&format!("pool churning {i}"))).collect();
    (domain, pool, mail, actors)
}

/// Holders, givers, takers and waiters are killed at any moment. All their blocks are freed, and no block ever belongs
/// to two processes.
#[test]
fn processes_killed_at_any_moment_take_no_block_along() {
    let place = Place::new();
    let (_domain, pool, mail, mut victims) = stage(&place, 3);
    let done = AtomicBool::new(false);
    let kills = rounds(60);
    let mut turns = 0;
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| {
            let mail = mail.tensor("x").unwrap().shared::<u64>().unwrap();
            let mut churn = Churn { pool: &pool, mail, dice: Dice(1), offered: None };
            let mut turns = 0;
            while !done.load(Ordering::Relaxed) {
                churn.turn();
                turns += 1;
            }
            if let Some(offered) = churn.offered {
                drop(pool.accept(&offered));
            }
            turns
        });
        let mut dice = Dice(3);
        for kill in 0..kills {
            std::thread::sleep(Duration::from_micros(dice.below(20_000)));
            let victim = dice.below(3) as usize;
            victims[victim].kill();
            victims[victim] = place.play(&format!("pool churning {}", 100 + kill));
        }
        drop(victims);
        done.store(true, Ordering::Relaxed);
        turns = survivor.join().unwrap();
    });
    eventually("the blocks of the dead come back", || pool.stats().free == BLOCKS);
    assert_eq!(pool.stats().waiting, 0);
    eprintln!("{kills} kills, {turns} turns of the survivor");
}

/// One process at a time is stopped, with a block or two; the others continue with the remaining blocks.
#[test]
fn processes_stopped_at_any_moment_block_no_other() {
    let place = Place::new();
    let (_domain, pool, _mail, mut actors) = stage(&place, 2);
    let mut dice = Dice(5);
    for round in 0..rounds(30) {
        std::thread::sleep(Duration::from_micros(dice.below(5_000)));
        let stopped = dice.below(2) as usize;
        actors[stopped].stop();
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    pool.alloc(WATCHDOG).unwrap().release().unwrap();
                }
                sender.send(()).unwrap();
            });
            receiver.recv_timeout(WATCHDOG).expect("the stopped one is in the way");
        });
        // One process is never continued.
        if round == 10 {
            actors[stopped].kill();
            actors[stopped] = place.play("pool churning 99");
        } else {
            actors[stopped].resume();
        }
    }
    drop(actors);
    eventually("the blocks of the dead come back", || pool.stats().free == BLOCKS);
}

/// Creators are killed in the first milliseconds: another process can always create the pool under that name.
#[test]
fn maker_killed_at_any_moment_leaves_a_usable_name() {
    let place = Place::new();
    let domain = place.connect();
    let mut dice = Dice(7);
    for _ in 0..rounds(40) {
        let mut makers: Vec<_> = (0..2).map(|_| place.start("pool making")).collect();
        std::thread::sleep(Duration::from_micros(dice.below(30_000)));
        makers[0].kill();
        makers[1].expect("ready");
        let pool = frames(&domain).open_or_create().unwrap();
        eventually("what the dead had comes back", || pool.stats().free == BLOCKS);
        drop(makers);
        drop(pool);
        eventually("it goes with the last", || domain.names().unwrap().is_empty());
    }
}
