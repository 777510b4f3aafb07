// Holds 70.
//! Pools and topics in memory that other code allocated.

use std::{io::Read, sync::Arc, time::Duration};

use partywall::{
    Block, DType, Domain, Error, Place, Policy, Pool, PoolOptions, Sample, Topic,
    cuda::PinnedBuffer,
    error::{Denied, DeviceFault, Gone, InvalidArgument, Mismatch, NotFound},
};
use partywall_harness::eventually;

use super::world::{TIMEOUT, World, buffer, gpu, kept_by_the_test, simulated};

const BLOCKS: u32 = 4;
const BYTES: u64 = 1000;
/// The offset of the blocks in their allocation.
const BEGIN: u64 = 512;
/// The bytes of all blocks, each at a multiple of 256 bytes.
const LENGTH: u64 = BLOCKS as u64 * 1024;

fn blocks(domain: &Domain) -> PoolOptions {
    domain.pool("blocks").blocks(BLOCKS).block_bytes(BYTES)
}

/// Creates a pool in the middle of an allocation.
fn make(domain: &Domain) -> Pool {
    let gpu = gpu(domain);
    let memory = buffer(&gpu, BEGIN + LENGTH, 1);
    let begin = memory.as_slice().device_ptr() + BEGIN;
    // Kept for as long as the process lives.
    std::mem::forget(memory);
    blocks(domain).create_in(&kept_by_the_test(&gpu, begin)).unwrap()
}

fn write(block: &Block, value: u8) {
    let range = block.device().unwrap();
    range.copy_from_host(range.gpu().stream(), &[value; BYTES as usize]).unwrap();
}

fn read(block: &Block) -> u8 {
    let range = block.device().unwrap();
    let mut bytes = [0; BYTES as usize];
    range.copy_to_host(range.gpu().stream(), &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
    bytes[0]
}

fn value_of(sample: &Sample) -> u8 {
    let stream = sample.gpu().unwrap().stream();
    let mut bytes = [0; 64];
    sample.device_on(stream).unwrap().copy_to_host(stream, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
    bytes[0]
}

fn publish(topic: &Topic, publisher: &partywall::Publisher, value: u8) {
    let loan = publisher.loan(DType::U8, &[64], TIMEOUT).unwrap();
    let stream = topic.gpu().unwrap().stream();
    loan.device().unwrap().copy_from_host(stream, &[value; 64]).unwrap();
    loan.filled().publish_on(stream, TIMEOUT).unwrap();
}

#[allow(clippy::print_stdout)] // it is how they talk to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let linger = |kept: &dyn std::fmt::Debug| {
        println!("\nready\n{kept:?}");
        let _ = std::io::stdin().read(&mut [0]);
    };
    match role {
        "maker" => {
            let pool = make(&domain);
            let held = pool.alloc(TIMEOUT).unwrap();
            let given = pool.alloc(TIMEOUT).unwrap();
            write(&given, 7);
            let given = given.offer().unwrap();
            println!("\nready\n{given}");
            let _ = std::io::stdin().read(&mut [0]);
            drop(held);
        }
        "taker" => {
            let pool = blocks(&domain).timeout(TIMEOUT).open().unwrap();
            let all = [(); BLOCKS as usize].map(|()| pool.alloc(TIMEOUT).unwrap());
            all.iter().for_each(|block| write(block, 9));
            linger(&all);
        }
        "publisher" => {
            let topic = domain.topic("frames").open().unwrap();
            let publisher = topic.publisher().unwrap();
            publish(&topic, &publisher, 5);
            linger(&publisher);
        }
        other => panic!("no role is called {other:?}"),
    }
}

fn is_free(pool: &Pool) -> bool {
    pool.stats().free == BLOCKS
}

#[test]
fn held_blocks_outlive_their_creator_on_the_simulated_gpu() {
    simulated("pools::held_blocks_outlive_their_creator_on_the_simulated_gpu", |world: &World| {
        let domain = world.connect();
        let mut maker = world.play("pool: maker");
        let given = maker.line().parse().unwrap();
        let pool = blocks(&domain).open().unwrap();
        let info = domain.inspect("blocks").unwrap();
        assert_eq!((info.version.kind, info.version.committer), (partywall_wire::Kind::Legacy, maker.pid()));
        let taken = pool.accept(&given).unwrap();
        assert_eq!(read(&taken), 7, "it is read where it was written");
        write(&taken, 8);
        assert_eq!((pool.stats().held, pool.stats().free), (2, 2));
        let pid = maker.pid();
        maker.kill();
        eventually("the blocks that its creator held come back", || pool.stats().free == BLOCKS - 1);
        assert_eq!(read(&taken), 8, "a process that has the pool open keeps its memory");
        drop(taken);
        let all = [(); BLOCKS as usize].map(|()| pool.alloc(TIMEOUT).unwrap());
        all.iter().for_each(|block| write(block, 3));
        assert!(all.iter().all(|block| read(block) == 3));
        let refused = world.connect().pool("blocks").open();
        assert!(matches!(refused, Err(Error::Gone(Gone::OwnerDied { pid: dead, .. })) if dead == pid), "{refused:?}");
    });
}

#[test]
fn pool_in_foreign_memory_ends_with_its_makers_last_handle_on_the_simulated_gpu() {
    simulated(
        "pools::pool_in_foreign_memory_ends_with_its_makers_last_handle_on_the_simulated_gpu",
        |world: &World| {
            let domain = world.connect();
            let other = world.connect();
            let gpu = gpu(&domain);
            let memory = buffer(&gpu, LENGTH, 1);
            let begin = memory.as_slice().device_ptr();
            let freed = Arc::downgrade(&memory);
            let pool = blocks(&domain).create_in(&memory.try_into().unwrap()).unwrap();
            let first = pool.alloc(TIMEOUT).unwrap();
            assert_eq!((first.device().unwrap().device_ptr(), read(&first)), (begin, 1), "nothing was copied");
            let again = blocks(&other).open().unwrap();
            let second = again.alloc(TIMEOUT).unwrap();
            assert_eq!(second.device().unwrap().device_ptr(), begin + 1024, "this process needs no handle");
            first.release().unwrap();
            second.release().unwrap();
            let mut taker = world.play("pool: taker");
            taker.kill();
            eventually("what it had comes back", || is_free(&pool));
            assert_eq!(read(&pool.alloc(TIMEOUT).unwrap()), 9, "another process has written here");
            eventually("the GPU is done with it", || is_free(&pool));
            drop(pool);
            assert!(matches!(blocks(&domain).open(), Err(Error::Gone(Gone::Withdrawn { .. }))));
            assert!(freed.upgrade().is_some(), "the other handle keeps the memory");
            drop(again);
            eventually("no owner is left", || freed.upgrade().is_none());
        },
    );
}

#[test]
fn topic_in_foreign_memory_on_the_simulated_gpu() {
    simulated("pools::topic_in_foreign_memory_on_the_simulated_gpu", |world: &World| {
        let domain = world.connect();
        let options = domain.topic("frames").max_bytes(64).depth(2).publishers(1).subscribers(1).held(1);
        let memory = buffer(&gpu(&domain), 5 * 256, 0).try_into().unwrap();
        let topic = options.create_in(&memory).unwrap();
        let subscriber = topic.subscriber(Policy::Block).unwrap();
        let mut publisher = world.play("pool: publisher");
        let sample = subscriber.recv(TIMEOUT).unwrap();
        assert_eq!(value_of(&sample), 5);
        sample.check().unwrap();
        sample.release().unwrap();
        publisher.kill();
        eventually("its port is free", || topic.stats().publishers.is_empty());
        let ours = topic.publisher().unwrap();
        publish(&topic, &ours, 6);
        assert_eq!(value_of(&subscriber.recv(TIMEOUT).unwrap()), 6);
        let small = buffer(&gpu(&domain), 4 * 256, 0).try_into().unwrap();
        let refused =
            domain.topic("small").max_bytes(64).depth(2).publishers(1).subscribers(1).held(1).create_in(&small);
        assert!(
            matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Table { .. }))),
            "five blocks are needed: {refused:?}"
        );
    });
}

#[test]
fn memory_unfit_for_a_pool_is_refused_on_the_simulated_gpu() {
    simulated("pools::memory_unfit_for_a_pool_is_refused_on_the_simulated_gpu", |world: &World| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let memory = buffer(&gpu, LENGTH, 0);
        let begin = memory.as_slice().device_ptr();
        let at = |address| kept_by_the_test(&gpu, address);
        let refused = blocks(&domain).create_in(&at(begin + 8));
        assert!(
            matches!(&refused, Err(Error::InvalidArgument(InvalidArgument::Options { why, .. })) if why.contains("256")),
            "{refused:?}"
        );
        let refused = blocks(&domain).create_in(&at(begin + 256));
        assert!(
            matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Table { .. }))),
            "it reaches beyond its allocation: {refused:?}"
        );
        let refused = blocks(&domain).kept(true).create_in(&at(begin));
        assert!(matches!(refused, Err(Error::Denied(Denied::Keeping { .. }))), "{refused:?}");
        let other = Place::Gpu(partywall::gpu::devices().unwrap()[1].uuid().unwrap());
        for place in [Place::Host, other] {
            let refused = blocks(&domain).place(place).create_in(&at(begin));
            assert!(
                matches!(&refused, Err(Error::InvalidArgument(InvalidArgument::Options { why, .. })) if why.contains("not on")),
                "{refused:?}"
            );
        }
        let pinned = PinnedBuffer::new(gpu.context(), LENGTH).unwrap();
        let refused = blocks(&domain).create_in(&at(pinned.as_ptr() as u64));
        assert!(matches!(refused, Err(Error::DeviceFault(DeviceFault::NotShareable { .. }))), "{refused:?}");
        assert!(
            matches!(
                domain.pool("blocks").create_in(&at(begin)),
                Err(Error::InvalidArgument(InvalidArgument::Options { .. }))
            ),
            "no numbers"
        );
        assert!(
            matches!(blocks(&domain).open(), Err(Error::NotFound(NotFound::Name { .. }))),
            "nothing came of any of them"
        );
        let _pool = blocks(&domain).place(Place::Gpu(gpu.uuid())).create_in(&at(begin)).unwrap();
        let refused = blocks(&domain).create_in(&at(begin));
        assert!(matches!(refused, Err(Error::Denied(Denied::NameExists { .. }))), "{refused:?}");
        let wrong = domain.pool("blocks").blocks(1).timeout(Duration::ZERO).open();
        assert!(matches!(wrong, Err(Error::Mismatch(Mismatch::Options { .. }))), "{wrong:?}");
    });
}
