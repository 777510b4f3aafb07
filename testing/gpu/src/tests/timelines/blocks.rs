// Holds 21, 380.
//! Blocks of pools that a GPU uses. The scenes run on every driver, as in `scenes.rs`.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{thread, time::Duration};

use partywall::{
    Block, Domain, Error, Gpu, Place, Pool, PoolOptions, TimelineWriter,
    cuda::{Access, DeviceSlice, Stream},
    error::{Mismatch, Unreachable},
    info::MemberState,
};

use super::world::{TIMEOUT, World, eventually, gpu, in_a_child, next_order, say};

/// How long to check that something does not happen.
const MOMENT: Duration = Duration::from_millis(50);

/// Carries out the commands of the test, one word each, in order. Streams of this process stop at `stop` until the test
/// opens the gate.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let [stream, other] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    gpu.kernels().unwrap();
    let pool = domain.pool("frames").open().unwrap();
    let gate = domain.timeline("gate").unwrap();
    let filled = domain.timeline_writer("filled").unwrap();
    let mut block: Option<Block> = None;
    say("ready");
    while let Some(order) = next_order() {
        let (what, argument) = order.split_once(' ').unwrap_or((&order, ""));
        match what {
            "alloc" => block = Some(pool.alloc(TIMEOUT).unwrap()),
            "stop" => gate.wait_on(stream.as_ref(), argument.parse().unwrap()).unwrap(),
            "stop-other" => gate.wait_on(other.as_ref(), argument.parse().unwrap()).unwrap(),
            "fill" => fill(&gpu, &stream, block.as_ref().unwrap()),
            "signal" => filled.signal_on(stream.as_ref(), 1).unwrap(),
            "drop" => block = None,
            "release" => block.take().unwrap().release().unwrap(),
            "give" => block.take().unwrap().release_on(stream.as_ref()).unwrap(),
            "offer" => {
                say(&format!("done {}", block.take().unwrap().offer().unwrap()));
                continue;
            }
            "fault" => {
                // SAFETY: the first pages are never mapped, so the write faults on purpose.
                #[allow(unsafe_code)]
                let nowhere = unsafe { DeviceSlice::from_raw(4096, 4, Access::ReadWrite) };
                gpu.kernels().unwrap().enqueue_fill(other.as_ref(), nowhere).unwrap();
                eventually("the loss is detected", || other.synchronize().is_err());
            }
            "refused" => {
                let refused = block.take().unwrap().release_on(stream.as_ref()).unwrap_err();
                say(&format!("done {}", refused.error.anchor()));
                block = Some(*refused.value);
                continue;
            }
            other => panic!("unknown command {other}"),
        }
        say("done");
    }
}

fn fill(gpu: &Gpu, stream: &Stream, block: &Block) {
    gpu.kernels().unwrap().enqueue_fill(stream.as_ref(), block.device().unwrap().as_slice()).unwrap();
}

fn is_filled(gpu: &Gpu, block: &Block) -> bool {
    let found = gpu.kernels().unwrap().verify(gpu.stream(), block.device().unwrap().as_slice(), 1);
    found.unwrap().is_none()
}

/// Creates a pool with this many blocks, and the timeline that streams of other processes wait for.
fn stage(world: &World, blocks: u32) -> (Domain, Pool, TimelineWriter) {
    stage_with(world, |options| options.blocks(blocks))
}

fn stage_with(world: &World, options: impl FnOnce(PoolOptions) -> PoolOptions) -> (Domain, Pool, TimelineWriter) {
    let domain = world.connect();
    let gpu = gpu(&domain);
    gpu.kernels().unwrap();
    let pool = options(domain.pool("frames").block_bytes(4096).place(Place::Gpu(gpu.uuid()))).create().unwrap();
    let gate = domain.timeline_writer("gate").unwrap();
    (domain, pool, gate)
}

fn is_zero(gpu: &Gpu, block: &Block) -> bool {
    let mut bytes = vec![1; 4096];
    block.device().unwrap().copy_to_host(gpu.stream(), &mut bytes).unwrap();
    bytes == [0; 4096]
}

fn is_taken(pool: &Pool) -> bool {
    matches!(pool.alloc(MOMENT), Err(Error::Timeout { .. }))
}

pub(crate) fn a_dropped_block_comes_back_when_the_gpu_is_done_with_it(world: &World) {
    let (domain, pool, gate) = stage(world, 1);
    let mut other = world.play("block");
    for order in ["alloc", "stop 1", "fill", "drop"] {
        other.request(order);
    }
    assert!(is_taken(&pool), "a kernel will still write it");
    gate.signal(1).unwrap();
    let block = pool.alloc(TIMEOUT).unwrap();
    assert!(is_filled(&gpu(&domain), &block), "the kernel wrote it before");
    block.release().unwrap();
    // A block that no kernel can use is freed immediately, whatever streams do.
    for order in ["alloc", "stop 2", "drop"] {
        other.request(order);
    }
    pool.alloc(TIMEOUT).unwrap().release().unwrap();
    gate.signal(2).unwrap();
}

pub(crate) fn a_dropped_block_of_a_pinned_pool_comes_back_when_all_gpus_are_done_with_it(world: &World) {
    let domain = world.connect();
    let pool = domain.pool("batches").block_bytes(4096).blocks(1).place(Place::Host).create().unwrap();
    let gate = domain.timeline_writer("gate").unwrap();
    let waits = domain.timeline("gate").unwrap();
    let gpus: Vec<_> =
        partywall::gpu::devices().unwrap().iter().map(|device| domain.gpu(device.uuid().unwrap()).unwrap()).collect();
    let streams: Vec<_> = gpus.iter().map(|gpu| Stream::new(gpu.context()).unwrap()).collect();
    // Before the pool is pinned no GPU can use an address, whatever streams do.
    waits.wait_on(streams[0].as_ref(), 1).unwrap();
    let block = pool.alloc(TIMEOUT).unwrap();
    block.as_ptr().unwrap();
    drop(block);
    pool.alloc(TIMEOUT).unwrap().release().unwrap();
    gate.signal(1).unwrap();

    pool.pin(&gpus[0]).unwrap();
    pool.pin(&gpus[0]).unwrap();
    for (value, stream) in (2..).zip(&streams) {
        waits.wait_on(stream.as_ref(), value).unwrap();
        let block = pool.alloc(TIMEOUT).unwrap();
        let address = block.as_ptr().unwrap();
        drop(block);
        assert!(is_taken(&pool), "a copy may still read it");
        gate.signal(value).unwrap();
        let block = pool.alloc(TIMEOUT).unwrap();
        assert!(block.device().is_err(), "only its address is for GPUs");
        assert_eq!(block.bytes().unwrap().as_ptr(), address.cast_const());
    }
}

pub(crate) fn many_dropped_blocks_come_back_together(world: &World) {
    let (domain, pool, gate) = stage(world, 64);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    for round in 1..=3 {
        domain.timeline("gate").unwrap().wait_on(stream.as_ref(), round).unwrap();
        for _ in 0..64 {
            let block = pool.alloc(TIMEOUT).unwrap();
            fill(&gpu, &stream, &block);
        }
        assert!(is_taken(&pool));
        gate.signal(round).unwrap();
        eventually("all are free", || pool.stats().free == 64);
    }
}

pub(crate) fn a_block_goes_back_behind_the_work_of_its_stream(world: &World) {
    let (_domain, pool, gate) = stage(world, 1);
    let mut other = world.play("block");
    // Another stream is stopped, which does not matter.
    for order in ["stop-other 2", "alloc", "stop 1", "fill", "give"] {
        other.request(order);
    }
    assert!(is_taken(&pool));
    gate.signal(1).unwrap();
    pool.alloc(TIMEOUT).unwrap().release().unwrap();
    for _ in 0..20 {
        for order in ["alloc", "fill", "give"] {
            other.request(order);
        }
        pool.alloc(TIMEOUT).unwrap().release().unwrap();
    }
    gate.signal(2).unwrap();
    // A block that is released by the host waits for the GPU.
    for order in ["alloc", "fill", "release"] {
        other.request(order);
    }
    assert_eq!(pool.stats().free, 1);
}

pub(crate) fn blocks_of_the_gpu_come_back_when_their_process_is_killed(world: &World) {
    let (_domain, pool, _gate) = stage(world, 2);
    let mut other = world.play("block");
    for order in ["alloc", "stop 1", "fill", "give", "alloc", "fill", "drop"] {
        other.request(order);
    }
    assert!(is_taken(&pool));
    other.kill();
    let both = [(); 2].map(|()| pool.alloc(TIMEOUT).unwrap());
    drop(both);
}

/// The connection ends and the blocks of the process are freed, but not before the GPU is done with them.
pub(crate) fn a_connection_that_ends_keeps_the_blocks_of_the_gpu(world: &World) {
    let (_outside, pool, gate) = stage(world, 1);
    let domain = world.connect();
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    gpu.kernels().unwrap();
    let theirs = domain.pool("frames").open().unwrap();
    let block = theirs.alloc(TIMEOUT).unwrap();
    domain.timeline("gate").unwrap().wait_on(stream.as_ref(), 1).unwrap();
    fill(&gpu, &stream, &block);
    drop((block, theirs));
    let ending = thread::spawn(move || drop(domain));
    assert!(is_taken(&pool));
    gate.signal(1).unwrap();
    ending.join().unwrap();
    let block = pool.alloc(TIMEOUT).unwrap();
    assert!(is_filled(pool.gpu().unwrap(), &block));
}

/// The end of the work cannot be proved.
pub(crate) fn blocks_of_a_lost_context_come_back_with_the_end_of_their_process(world: &World) {
    let (domain, pool, _gate) = stage(world, 3);
    let states = || domain.members().unwrap().iter().map(|member| member.state).collect::<Vec<_>>();
    let mut other = world.play("block");
    // The blocks: released on a stream; dropped; still held, and no longer releasable on a stream.
    for order in ["alloc", "stop 1", "fill", "give", "alloc", "fill", "drop", "alloc", "fault"] {
        other.request(order);
    }
    assert_eq!(other.request("refused"), "broken-context");
    eventually("the loss is reported", || states().contains(&MemberState::LostContext));
    assert!(is_taken(&pool));
    assert_eq!(pool.stats().held, 3);
    other.kill();
    eventually("all are free", || pool.stats().free == 3);
}

/// A kernel of one process fills a block. A kernel of another process reads it, and is enqueued before the first has
/// run.
pub(crate) fn a_block_is_handed_over_while_a_kernel_is_still_to_fill_it(world: &World) {
    let (domain, pool, gate) = stage(world, 1);
    let gpu = gpu(&domain);
    let mut other = world.play("block");
    for order in ["alloc", "stop 1", "fill", "signal"] {
        other.request(order);
    }
    let block = pool.accept(&other.request("offer").parse().unwrap()).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let doubled = block.device().unwrap().as_slice();
    domain.timeline("filled").unwrap().wait_on(stream.as_ref(), 1).unwrap();
    gpu.kernels().unwrap().enqueue_double(stream.as_ref(), doubled).unwrap();
    assert!(!stream.as_ref().is_done().unwrap());
    gate.signal(1).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(gpu.kernels().unwrap().verify(gpu.stream(), doubled, 2).unwrap(), None);
    // The former holder no longer affects it.
    other.kill();
    block.release_on(stream.as_ref()).unwrap();
    eventually("it is free", || pool.stats().free == 1);
}

pub(crate) fn a_block_is_zeroed_on_a_stream(world: &World) {
    let (domain, pool, _gate) = stage(world, 1);
    let gpu = gpu(&domain);
    let mut block = pool.alloc(TIMEOUT).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    fill(&gpu, &stream, &block);
    block.zero_on(stream.as_ref()).unwrap();
    stream.synchronize().unwrap();
    assert!(is_zero(&gpu, &block));
    assert!(matches!(block.bytes_mut(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
}

pub(crate) fn a_zeroed_block_has_no_data_of_earlier_holders(world: &World) {
    let (domain, pool, gate) = stage_with(world, |options| options.blocks(1).zeroed(true));
    let gpu = gpu(&domain);
    let mut other = world.play("block");
    for order in ["alloc", "fill", "release"] {
        other.request(order);
    }
    let block = pool.alloc(TIMEOUT).unwrap();
    assert!(is_zero(&gpu, &block));
    block.release().unwrap();
    for order in ["alloc", "fill"] {
        other.request(order);
    }
    other.kill();
    let stream = Stream::new(gpu.context()).unwrap();
    domain.timeline("gate").unwrap().wait_on(stream.as_ref(), 1).unwrap();
    let block = pool.alloc_on(stream.as_ref(), TIMEOUT).unwrap();
    assert!(!stream.as_ref().is_done().unwrap(), "it is zeroed behind the work on the stream");
    gate.signal(1).unwrap();
    stream.synchronize().unwrap();
    assert!(is_zero(&gpu, &block));
}

pub(crate) fn a_forked_child_gives_no_block_back(world: &World) {
    let (domain, pool, _gate) = stage(world, 1);
    let stream = Stream::new(gpu(&domain).context()).unwrap();
    let mut block = Some(pool.alloc(TIMEOUT).unwrap());
    block.as_ref().unwrap().device().unwrap();
    assert!(in_a_child(|| {
        let Err(refused) = block.take().unwrap().release_on(stream.as_ref()) else { return false };
        matches!(refused.error, Error::Unreachable(Unreachable::Forked { .. }))
            && matches!(refused.value.offer(), Err(Error::Unreachable(Unreachable::Forked { .. })))
            && matches!(pool.try_alloc(), Err(Error::Unreachable(Unreachable::Forked { .. })))
    }));
    assert_eq!(pool.stats().held, 1);
    block.unwrap().release_on(stream.as_ref()).unwrap();
    eventually("it is freed", || pool.stats().free == 1);
}
