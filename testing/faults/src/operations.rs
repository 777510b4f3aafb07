// Holds 15, 103, 272.
//! The public operations that touch the driver. A new one is a function and a line in [`OPERATIONS`].

use std::sync::{Arc, atomic::AtomicBool};
use std::time::{Duration, Instant};

use partywall::cuda::{self, DeviceBuffer, DeviceUuid, ForeignMemory, Stream};
use partywall_harness::WATCHDOG;

use partywall::{
    DType, Domain, Drain, Error, Gpu, Heap, IpcEvent, OpenOrBuild, Place, Policy, Pool, PoolOptions, Refreshed,
    Segment, Task, Timeline, TimelineWriter,
    error::{Busy, Denied, DeviceFault},
};

/// Where an operation runs.
pub(crate) struct Setting {
    pub(crate) domain: Domain,
    /// A name that only this process uses; errors about objects of the operation contain it.
    pub(crate) name: String,
    /// A directory of this process's own.
    pub(crate) directory: std::path::PathBuf,
}

pub(crate) type Outcome = Result<(), Error>;

/// One public operation, which drops everything that it creates, so that all its driver calls belong to it.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    /// A description for people.
    pub(crate) what: &'static str,
    /// What the process has done before, so that these calls are not part of every operation.
    pub(crate) before: Before,
    /// The operation. It panics if memory holds other bytes than it should.
    pub(crate) run: fn(&Setting) -> Outcome,
}

/// What a process has done before an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Before {
    /// Nothing but connecting.
    Nothing,
    /// Used its first GPU.
    Gpu,
    /// Loaded Partywall's kernels on it, too.
    Kernels,
    /// Registered the words of timelines with the GPU. That probes whether streams wait for words, and polls until
    /// these waits end, so the number of calls varies between runs.
    Words,
}

/// All operations.
pub(crate) static OPERATIONS: &[Operation] = &[
    Operation { name: "first use", what: "open a GPU, load the kernels", before: Before::Nothing, run: first_use },
    on_gpu("devices", "list the GPUs", devices),
    on_gpu("create and drop", "allocate a version and drop it unfinished", create_and_drop),
    on_gpu("create and commit", "allocate, write through the host, commit, read back", create_and_commit),
    on_gpu("leave a name", "unmap a version whose name stays, open it again, remove the name", leave_a_name),
    on_gpu("create in chunks", "a version of several chunks", create_in_chunks),
    on_gpu("create on demand", "a version whose chunks are allocated one after the other", create_on_demand),
    on_gpu("create mutable", "a mutable version, written after the commit", create_mutable),
    Operation { name: "kernels", what: "fill and verify by kernels", before: Before::Kernels, run: kernels },
    on_gpu("open", "open another process's version and read it", open),
    on_gpu("open to write", "open another process's mutable version and write it", open_to_write),
    on_gpu("open on another GPU", "map a version of another GPU", open_on_another_gpu),
    on_gpu("open or build", "build a name that does not exist, open it", open_or_build),
    on_gpu("find lost memory", "whether a GPU has lost the memory of another process's version", find_lost),
    on_gpu("put and get", "put a file, write it out again", put_and_get),
    on_gpu("grow", "a mutable version grows by a chunk, and by spare room", grow),
    on_gpu("advance", "an open version shows the next one at the same addresses", advance),
    on_gpu("refresh", "a reader maps what a version has grown by", refresh),
    on_gpu("pin", "a host version is registered, and copied to and from a GPU", pin),
    on_gpu("pin a pool", "a host pool is registered, and a block given back whose address a GPU could use", pin_a_pool),
    on_gpu("publish", "memory of cuMemAlloc by handle, opened where it was made", publish),
    on_gpu("publish a copy", "memory of cuMemAlloc, copied into a version", publish_a_copy),
    on_gpu("publish from a heap", "a block of a heap, published and read, and used again", publish_from_a_heap),
    on_gpu("memory operations", "a stream writes words and waits for them", memory_operations),
    on_gpu("make an event", "an event for other processes: made, exported, recorded, waited for", make_an_event),
    on_words("signal and wait", "streams wait for a timeline and signal it, hosts too", signal_and_wait),
    on_words("launch a graph", "a graph waits for a timeline and signals one, at two launches", crate::graphs::launch),
    on_words("a limited wait", "a stream waits for a timeline until the time is over", a_limited_wait),
    on_words("a permit behind a stream", "a stream gives a permit of a semaphore back", a_permit_behind_a_stream),
    on_gpu("make a pool", "a pool, and a block of it that is zeroed and given back", make_a_pool),
    on_gpu(
        "make a pool of memory",
        "a pool in memory of cuMemAlloc, and a block of it that is zeroed",
        make_a_pool_of_memory,
    ),
    on_gpu("a zeroed block", "a block of a pool that zeroes blocks when they are taken", a_zeroed_block),
    on_gpu("open a pool", "another process's pool, and a block of it that is written and given back", open_a_pool),
    on_words("a block behind a stream", "a stream gives a block of a pool back", a_block_behind_a_stream),
    on_words("a sample of a stream", "a stream fills samples of a topic, and reads one", a_sample_of_a_stream),
    on_gpu("a part of a segment", "a worker opens a segment that a queue holds, and reads a part", a_part_of_a_segment),
    Operation {
        name: "create pinned",
        what: "pinned memory, written and read by the CPU alone",
        before: Before::Nothing,
        run: create_pinned,
    },
    Operation {
        name: "open pinned",
        what: "another process's pinned memory, for the CPU alone",
        before: Before::Nothing,
        run: open_pinned,
    },
    on_gpu("open pinned on a GPU", "another process's pinned memory, for a GPU and then the CPU", open_pinned_on_a_gpu),
    Operation {
        name: "find lost pinned memory",
        what: "whether the pinned memory of another process's version is lost",
        before: Before::Nothing,
        run: find_lost_pinned,
    },
    on_gpu("grow pinned", "mutable pinned memory grows, and a reader maps the growth", grow_pinned),
    on_gpu("a pinned block", "a pool in pinned memory, whose block the GPU writes and the CPU reads", a_pinned_block),
    on_gpu("copy between places", "pinned memory to a GPU and back by a stream", copy_between_places),
    on_gpu("open by handle", "open another process's memory of cuMemAlloc", open_by_handle),
];

const fn on_gpu(name: &'static str, what: &'static str, run: fn(&Setting) -> Outcome) -> Operation {
    Operation { name, what, before: Before::Gpu, run }
}

const fn on_words(name: &'static str, what: &'static str, run: fn(&Setting) -> Outcome) -> Operation {
    Operation { name, what, before: Before::Words, run }
}

/// Returns the operations whose names contain `filter`.
pub(crate) fn matching(filter: &str) -> impl Iterator<Item = &'static Operation> {
    OPERATIONS.iter().filter(move |operation| operation.name.contains(filter))
}

/// Driver calls whose failure an operation may ignore: no error reports it, and the context stores no failure
/// ([`cuda::Context::take_drop_error`]). Each with the reason.
pub(crate) static MAY_GO_UNNOTICED: &[(&str, &str)] = &[
    ("cuMemGetInfo", "only adds to the text of an error"),
    ("cuDeviceGetAttribute", "whether MPS serves this process shows in its daemon's socket, too"),
    ("cuThreadExchangeStreamCaptureMode", "only protects a capture of the caller from being invalidated"),
    ("cuDevicePrimaryCtxRelease", "the context that would store the failure is the one that ends"),
];

/// Names that the bystander holds for operations that open something.
pub(crate) mod held {
    /// The beginning of each of these names.
    pub(crate) const PREFIX: &str = "held/";
    pub(crate) const FROZEN: &str = "held/frozen";
    pub(crate) const MUTABLE: &str = "held/mutable";
    pub(crate) const BY_HANDLE: &str = "held/by-handle";
    pub(crate) const PINNED: &str = "held/pinned";
    pub(crate) const POOL: &str = "held/pool";
    /// A timeline. The memory of all of them stays with the broker once it has been made.
    pub(crate) const TIMELINE: &str = "held/timeline";
}

/// The simulated GPUs.
pub(crate) const FIRST_GPU: DeviceUuid = simulated(0);
pub(crate) const SECOND_GPU: DeviceUuid = simulated(1);

pub(crate) const GPU: Place = Place::Gpu(FIRST_GPU);

/// The NUMA node of the first GPU.
const NODE: Place = Place::Pinned(0);

const fn simulated(ordinal: u8) -> DeviceUuid {
    DeviceUuid([0x51, 0x30, 0x1c, 0xa7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ordinal])
}

/// Bytes of the tensor `data` in each name that the bystander holds.
pub(crate) const HELD_BYTES: usize = 200 << 10;

/// Returns the bystander's objects.
pub(crate) fn hold(domain: &Domain) -> Result<(Vec<Segment>, Pool, Timeline), Error> {
    let one = |name: &str, place: Place, mutable: bool| {
        let shape = [HELD_BYTES as u64];
        let mut build = domain.create(name, place).tensor("data", DType::U8, &shape).mutable(mutable).allocate()?;
        build.write("data", &noise(HELD_BYTES))?;
        build.commit()
    };
    let memory = foreign(&*domain.gpu(FIRST_GPU)?, held::BY_HANDLE)?;
    let by_handle = domain.publish(held::BY_HANDLE).tensor("data", DType::U8, &[HELD_BYTES as u64], &memory);
    let segments = vec![
        one(held::FROZEN, GPU, false)?,
        one(held::MUTABLE, GPU, true)?,
        one(held::PINNED, NODE, false)?,
        by_handle.commit()?,
    ];
    Ok((segments, pool(domain, held::POOL).create()?, domain.timeline(held::TIMELINE)?))
}

/// Checks that the bystander's objects are unchanged.
pub(crate) fn check_held(segments: &[Segment]) -> Outcome {
    let bytes = noise(HELD_BYTES);
    segments.iter().try_for_each(|segment| expect(segment, &bytes))
}

fn first_use(setting: &Setting) -> Outcome {
    setting.domain.gpu(FIRST_GPU)?.kernels().map(drop)
}

fn devices(_: &Setting) -> Outcome {
    assert_eq!(partywall::gpu::devices()?.len(), 2);
    Ok(())
}

fn find_lost(setting: &Setting) -> Outcome {
    let held = setting.domain.descriptors(held::FROZEN, Duration::ZERO)?;
    setting.domain.gpu(FIRST_GPU)?.find_lost(held.chunks())?.into_iter().flatten().next().map_or(Ok(()), Err)
}

fn find_lost_pinned(setting: &Setting) -> Outcome {
    let held = setting.domain.descriptors(held::PINNED, Duration::ZERO)?;
    partywall::gpu::find_lost_on_node(0, held.chunks())?.into_iter().flatten().next().map_or(Ok(()), Err)
}

fn create_and_drop(setting: &Setting) -> Outcome {
    let builder = setting.domain.create(&setting.name, GPU);
    builder.tensor("data", DType::F32, &[700, 1000]).allocate().map(drop)
}

fn create_and_commit(setting: &Setting) -> Outcome {
    let mut build = setting.domain.create(&setting.name, GPU).tensor("data", DType::U8, &[5000]).allocate()?;
    build.write("data", &noise(5000))?;
    expect(&build.commit()?, &noise(5000))
}

fn leave_a_name(setting: &Setting) -> Outcome {
    let mut build = setting.domain.create(&setting.name, GPU).tensor("data", DType::U8, &[5000]).allocate()?;
    build.write("data", &noise(5000))?;
    let left = build.commit()?.leave_name();
    let opened = setting.domain.open(&setting.name, Duration::ZERO).and_then(|opened| expect(&opened, &noise(5000)));
    // The name stays until it is removed: the bystander, which runs this operation too, keeps its connection for its
    // other names.
    setting.domain.remove(&setting.name)?;
    left.and(opened)
}

fn create_in_chunks(setting: &Setting) -> Outcome {
    let mut builder = setting.domain.create(&setting.name, GPU).chunk_bytes(2 << 20);
    for name in ["data", "more", "most"] {
        builder = builder.tensor(name, DType::U8, &[2 << 20]);
    }
    let mut build = builder.allocate()?;
    assert_eq!(build.chunks().len(), 3);
    build.write("data", &noise(2 << 20))?;
    expect(&build.commit()?, &noise(2 << 20))
}

fn create_on_demand(setting: &Setting) -> Outcome {
    let mut builder = setting.domain.create(&setting.name, GPU).chunk_bytes(2 << 20).on_demand(true);
    for name in ["data", "more", "most"] {
        builder = builder.tensor(name, DType::U8, &[2 << 20]);
    }
    let mut build = builder.allocate()?;
    build.allocate_for("data")?;
    build.write("data", &noise(2 << 20))?;
    build.allocate_for("more")?;
    assert_eq!(build.chunks().len(), 2);
    expect(&build.commit()?, &noise(2 << 20))
}

fn create_mutable(setting: &Setting) -> Outcome {
    let segment = mutable(setting)?;
    segment.tensor("data")?.write_at(0, &noise(4096))?;
    expect(&segment, &noise(4096))
}

fn kernels(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let build = setting.domain.create(&setting.name, GPU).tensor("data", DType::U32, &[5000]).allocate()?;
    gpu.kernels()?
        .enqueue_fill(gpu.stream(), build.device("data")?.as_slice())
        .map_err(|error| of(setting, fits(error)))?;
    let segment = build.commit()?;
    let found = gpu.kernels()?.verify(gpu.stream(), segment.tensor("data")?.device()?.as_slice(), 1);
    assert_eq!(found.map_err(|error| of(setting, fits(error)))?, None);
    Ok(())
}

fn open(setting: &Setting) -> Outcome {
    expect(&setting.domain.open(held::FROZEN, Duration::ZERO)?, &noise(HELD_BYTES))
}

fn open_to_write(setting: &Setting) -> Outcome {
    let segment = setting.domain.opener(held::MUTABLE).read_write().open()?;
    // Writes the bytes that are there already, so that the bystander's check holds even if this write is interrupted.
    segment.tensor("data")?.write_at(0, &noise(HELD_BYTES))?;
    expect(&segment, &noise(HELD_BYTES))
}

fn open_on_another_gpu(setting: &Setting) -> Outcome {
    let opener = setting.domain.opener(held::FROZEN).device(SECOND_GPU).allow_peer(true);
    expect(&opener.open()?, &noise(HELD_BYTES))
}

fn open_or_build(setting: &Setting) -> Outcome {
    let OpenOrBuild::Build(claim) = setting.domain.open_or_build(&setting.name, Duration::ZERO)? else {
        panic!("{} was there already", setting.name);
    };
    let mut build = claim.create(GPU).tensor("data", DType::U8, &[10]).allocate()?;
    build.write("data", &noise(10))?;
    let built = build.commit()?;
    let OpenOrBuild::Opened(again) = setting.domain.open_or_build(&setting.name, Duration::ZERO)? else {
        panic!("{} is not there", setting.name);
    };
    expect(&built, &noise(10))?;
    expect(&again, &noise(10))
}

fn put_and_get(setting: &Setting) -> Outcome {
    let from = setting.directory.join("from.bin");
    let to = setting.directory.join("to.bin");
    let bytes = noise(100_000);
    std::fs::write(&from, &bytes).expect("a file of one's own can be written");
    let segment = setting.domain.put(&setting.name, GPU).threads(1).path(&from)?;
    segment.write_to_path(None, &to, true, &|_| (), &AtomicBool::new(false))?;
    assert!(std::fs::read(&to).expect("it was written") == bytes, "what was put is not what came out");
    Ok(())
}

fn grow(setting: &Setting) -> Outcome {
    let segment = mutable(setting)?;
    segment.grow().extend("data", 3 << 20).commit()?;
    segment.grow().tensor("more", DType::U8, &[100]).commit()?;
    segment.tensor("data")?.write_at(0, &noise(3 << 20))?;
    assert_eq!(segment.len(), 2);
    expect(&segment, &noise(3 << 20))
}

fn advance(setting: &Setting) -> Outcome {
    let version = |bytes: &[u8]| {
        let mut build = setting.domain.create(&setting.name, GPU).tensor("data", DType::U8, &[5000]).allocate()?;
        build.write("data", bytes)?;
        build.commit()
    };
    let _first = version(&noise(5000))?;
    let mut open = setting.domain.open(&setting.name, Duration::ZERO)?;
    let _second = version(&[7; 5000])?;
    let next = open.newer(None, Duration::ZERO)?.expect("the second version was committed");
    match open.advance(next, Drain::All(&[])) {
        Ok(()) => expect(&open, &[7; 5000]),
        Err(failed) => expect(&open, &noise(5000)).and(Err(failed.error)),
    }
}

fn refresh(setting: &Setting) -> Outcome {
    let segment = mutable(setting)?;
    let reader = setting.domain.open(&setting.name, Duration::ZERO)?;
    segment.grow().extend("data", 3 << 20).commit()?;
    segment.tensor("data")?.write_at(0, &noise(3 << 20))?;
    assert_eq!(reader.refresh()?, Refreshed::Grown);
    expect(&reader, &noise(3 << 20))
}

fn pin(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let mut host = setting.domain.create(&setting.name, Place::Host).tensor("data", DType::U8, &[5000]).allocate()?;
    host.write("data", &noise(5000))?;
    let host = host.commit()?;
    let device = setting.domain.create(&format!("{}-gpu", setting.name), GPU);
    let device = device.tensor("data", DType::U8, &[5000]).allocate()?;
    let pinned = host.pin(&gpu)?;
    let enqueued = pinned.enqueue_copy_to("data", gpu.stream(), device.device("data")?.as_slice());
    // Waits in every case: the pin must not be dropped while the stream works.
    let copied = gpu.stream().synchronize().map_err(|error| of(setting, error));
    enqueued.and(copied)?;
    expect(&device.commit()?, &noise(5000))
}

fn pin_a_pool(setting: &Setting) -> Outcome {
    let pool = setting.domain.pool(&setting.name).blocks(1).block_bytes(4096).place(Place::Host).create()?;
    pool.pin(&*setting.domain.gpu(FIRST_GPU)?)?;
    let block = pool.alloc(WATCHDOG)?;
    block.as_ptr()?;
    block.release()
}

fn publish(setting: &Setting) -> Outcome {
    let memory = foreign(&*setting.domain.gpu(FIRST_GPU)?, &setting.name)?;
    let shape = [HELD_BYTES as u64];
    let published = setting.domain.publish(&setting.name).tensor("data", DType::U8, &shape, &memory).commit()?;
    let opened = setting.domain.open(&setting.name, Duration::ZERO)?;
    drop(published);
    expect(&opened, &noise(HELD_BYTES))
}

fn publish_a_copy(setting: &Setting) -> Outcome {
    let memory = foreign(&*setting.domain.gpu(FIRST_GPU)?, &setting.name)?;
    let publication = setting.domain.publish(&setting.name).tensor("data", DType::U8, &[HELD_BYTES as u64], &memory);
    expect(&publication.commit_copy()?, &noise(HELD_BYTES))
}

fn publish_from_a_heap(setting: &Setting) -> Outcome {
    let heap = setting.domain.heap(&setting.name, FIRST_GPU, 2 << 20)?;
    let block = HeapBlock::new(&heap)?;
    let memory = block.memory(&heap).map_err(|error| of(setting, error))?;
    let published = setting.domain.publish(&setting.name).tensor("data", DType::U8, &[HELD_BYTES as u64], &memory);
    let published = published.mutable(true).commit()?;
    published.tensor("data")?.write_at(0, &noise(HELD_BYTES))?;
    expect(&setting.domain.open(&setting.name, Duration::ZERO)?, &noise(HELD_BYTES))?;
    drop(published);
    drop(memory);
    // The heap is full then, and waits until the GPU has finished with the freed block.
    let _second = HeapBlock::new(&heap)?;
    drop(block);
    HeapBlock::new(&heap).map(drop)
}

/// Half of a heap of 2 MiB.
struct HeapBlock(u64);

impl HeapBlock {
    fn new(heap: &Heap) -> Result<Self, Error> {
        heap.allocate(1 << 20).map(Self)
    }

    #[allow(unsafe_code)]
    fn memory(&self, heap: &Heap) -> Result<ForeignMemory, cuda::CudaError> {
        // SAFETY: the operation drops the memory before the block; a heap keeps what is published.
        unsafe { ForeignMemory::new(heap.gpu().context(), self.0, Arc::new(())) }
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        assert!(Heap::free(self.0));
    }
}

fn open_by_handle(setting: &Setting) -> Outcome {
    let first = setting.domain.open(held::BY_HANDLE, Duration::ZERO)?;
    let second = setting.domain.open(held::BY_HANDLE, Duration::ZERO)?;
    drop(first);
    expect(&second, &noise(HELD_BYTES))
}

fn create_pinned(setting: &Setting) -> Outcome {
    let mut build = setting.domain.create(&setting.name, NODE).tensor("data", DType::U8, &[5000]).allocate()?;
    build.write("data", &noise(5000))?;
    expect(&build.commit()?, &noise(5000))
}

fn open_pinned(setting: &Setting) -> Outcome {
    expect(&setting.domain.open(held::PINNED, Duration::ZERO)?, &noise(HELD_BYTES))
}

fn open_pinned_on_a_gpu(setting: &Setting) -> Outcome {
    let segment = setting.domain.opener(held::PINNED).device(SECOND_GPU).open()?;
    let range = segment.tensor("data")?.device()?;
    let mut found = vec![0; HELD_BYTES];
    range.copy_to_host(range.gpu().stream(), &mut found)?;
    assert!(found == noise(HELD_BYTES), "a GPU finds other bytes than were written");
    expect(&segment, &noise(HELD_BYTES))
}

fn grow_pinned(setting: &Setting) -> Outcome {
    let builder = setting.domain.create(&setting.name, NODE).tensor("data", DType::U8, &[4096]);
    let segment = builder.mutable(true).allocate()?.commit()?;
    let reader = setting.domain.open(&setting.name, Duration::ZERO)?;
    segment.grow().extend("data", 3 << 20).commit()?;
    segment.tensor("data")?.write_at(0, &noise(3 << 20))?;
    assert_eq!(reader.refresh()?, Refreshed::Grown);
    expect(&reader, &noise(3 << 20))
}

fn a_pinned_block(setting: &Setting) -> Outcome {
    let pool = setting.domain.pool(&setting.name).blocks(1).block_bytes(4096).place(NODE).create()?;
    let mut block = pool.alloc(WATCHDOG)?;
    let range = block.device_mut()?;
    let copied = range.copy_from_host(range.gpu().stream(), &noise(4096));
    let read = copied.and_then(|()| {
        assert!(block.bytes()? == noise(4096), "the CPU reads other bytes than the GPU has written");
        Ok(())
    });
    // A dropped block would keep the pool until the GPU is idle.
    read.and(block.release())
}

fn copy_between_places(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let source = setting.domain.open(held::PINNED, Duration::ZERO)?;
    let on_gpu = source.to(&setting.name, GPU, gpu.stream())?.commit()?;
    expect(&on_gpu, &noise(HELD_BYTES))?;
    let back = on_gpu.to(&format!("{}-back", setting.name), NODE, gpu.stream())?.commit()?;
    expect(&back, &noise(HELD_BYTES))
}

fn memory_operations(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let stream = gpu.stream();
    let words = DeviceBuffer::new(gpu.context(), 16).map_err(|error| of(setting, error))?;
    let enqueue = || {
        let short = words.as_slice().slice(0, 4)?;
        let long = words.as_slice().slice(8, 8)?;
        stream.enqueue_write_u32(short, 7)?;
        stream.enqueue_wait_u32(short, 7)?;
        stream.enqueue_write_u64(long, 8)?;
        stream.enqueue_wait_u64(long, 8)
    };
    let enqueued = enqueue().map_err(|error| of(setting, fits(error)));
    // Waits in every case: the words must not be dropped while the stream works.
    let done = stream.synchronize().map_err(|error| of(setting, error));
    enqueued.and(done)
}

fn make_an_event(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let event = IpcEvent::create(&gpu)?;
    event.export()?;
    event.record(gpu.stream())?;
    event.wait(gpu.stream())?;
    // Waits for the stream first, so that the event is queried once and each run makes the same calls.
    gpu.stream().synchronize().map_err(|error| of(setting, error))?;
    event.synchronize(Duration::ZERO)
}

fn signal_and_wait(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let waiting = Stream::new(gpu.context()).map_err(|error| of(setting, error))?;
    let writer = next_writer(setting, &setting.name)?;
    let timeline = setting.domain.timeline(&setting.name)?;
    let passed = next_writer(setting, &format!("{}/passed", setting.name))?;
    // After a failure the names may still exist when this runs again, because the stream may not have passed its waits.
    let last = writer.timeline().value();
    let known = passed.timeline().value();
    let enqueue = || {
        timeline.wait_on(waiting.as_ref(), last + 1)?;
        writer.signal_on(gpu.stream(), last + 1)?;
        timeline.wait(last + 1, WATCHDOG)?;
        timeline.wait_on(waiting.as_ref(), last + 2)?;
        writer.signal_on_and_wake(gpu.stream(), last + 2)?;
        passed.signal_on(waiting.as_ref(), known + 1)?;
        passed.timeline().wait(known + 1, WATCHDOG)
    };
    let enqueued = enqueue();
    // Dropping the writer releases, in every case, a stream that waits for a value that was not signalled.
    drop(writer);
    let done = [gpu.stream(), waiting.as_ref()].map(|stream| stream.synchronize().map_err(|error| of(setting, error)));
    done.into_iter().fold(enqueued, Result::and)
}

/// Returns the writer of a timeline. The writer before it ends once a thread has seen that its streams stored the
/// promised values, so this may have to wait.
pub(crate) fn next_writer(setting: &Setting, name: &str) -> Result<TimelineWriter, Error> {
    let deadline = Instant::now() + WATCHDOG;
    loop {
        match setting.domain.timeline_writer(name) {
            Err(Error::Busy(Busy::Writer { .. })) if Instant::now() < deadline => std::thread::yield_now(),
            opened => return opened,
        }
    }
}

fn a_limited_wait(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let timeline = setting.domain.timeline(&setting.name)?;
    let wait = timeline.wait_on_for(gpu.stream(), 1, Duration::ZERO)?;
    gpu.stream().synchronize().map_err(|error| of(setting, error))?;
    while !wait.is_over() {
        std::thread::yield_now();
    }
    assert!(matches!(wait.outcome(), Some(Err(Error::Timeout { .. }))));
    Ok(())
}

fn a_permit_behind_a_stream(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let semaphore = setting.domain.semaphore(&setting.name, 1)?;
    let permit = semaphore.acquire(WATCHDOG)?;
    // A refused permit is given back immediately: no work uses it.
    let released = permit.release_on(gpu.stream()).map_err(|unreleased| unreleased.error);
    gpu.stream().synchronize().map_err(|error| of(setting, error))?;
    released?;
    semaphore.acquire(WATCHDOG)?.release()
}

fn make_a_pool(setting: &Setting) -> Outcome {
    zero_a_block(setting, &pool(&setting.domain, &setting.name).create()?)
}

fn make_a_pool_of_memory(setting: &Setting) -> Outcome {
    let memory = foreign(&*setting.domain.gpu(FIRST_GPU)?, &setting.name)?;
    zero_a_block(setting, &pool(&setting.domain, &setting.name).create_in(&memory)?)
}

fn zero_a_block(setting: &Setting, pool: &Pool) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let mut block = pool.alloc(WATCHDOG)?;
    let zeroed = block.zero_on(gpu.stream());
    // Dropping it would have another thread wait for the GPU, and keep the pool meanwhile.
    zeroed.and(block.release())
}

fn a_zeroed_block(setting: &Setting) -> Outcome {
    let options = pool(&setting.domain, &setting.name).zeroed(true);
    // A block whose zeroing failed is dropped, which has another thread wait for the GPU and keep the pool meanwhile.
    let pool = once_gone(|| options.create())?;
    let block = pool.alloc(WATCHDOG)?;
    let mut found = vec![1; BLOCK_BYTES];
    let read = block.device().and_then(|range| range.copy_to_host(range.gpu().stream(), &mut found));
    let released = block.release();
    read?;
    assert!(found == [0; BLOCK_BYTES], "a block holds what was there before");
    released
}

fn open_a_pool(setting: &Setting) -> Outcome {
    // If giving a block back failed, other processes can take it only after this process's lease has ended.
    let pool = setting.domain.pool(held::POOL).open()?;
    let mut block = pool.alloc(WATCHDOG)?;
    let mut copy = || {
        let bytes = noise(BLOCK_BYTES);
        block.write(&bytes)?;
        let mut found = vec![0; BLOCK_BYTES];
        block.read_at(0, &mut found)?;
        assert!(found == bytes, "a block holds other bytes than were written");
        Ok(())
    };
    let copied = copy();
    // Dropping it would have another thread wait for the GPU, and keep what it uses meanwhile.
    copied.and(block.release())
}

fn a_part_of_a_segment(setting: &Setting) -> Outcome {
    let options = setting.domain.queue(&setting.name).tasks(1).place(Place::Host);
    let queue = once_gone(|| options.create())?;
    let segment = setting.domain.open(held::FROZEN, WATCHDOG)?;
    let part = queue.attach(&segment)?.tensor(&segment.tensor("data")?)?;
    segment.release()?;
    queue.submit(Task::new("read").part(part), WATCHDOG).map_err(|refused| refused.error)?;
    let task = queue.claim(WATCHDOG)?;
    let mut found = vec![0; HELD_BYTES];
    task.inputs()[0].device()?;
    task.inputs()[0].read_at(0, &mut found)?;
    assert!(found == noise(HELD_BYTES), "a part holds other bytes than were written");
    task.complete()
}

fn a_block_behind_a_stream(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let options = pool(&setting.domain, &setting.name);
    let pool = once_gone(|| options.create())?;
    let block = pool.alloc(WATCHDOG)?;
    let set = gpu.stream().enqueue_set(block.device()?.as_slice(), 7).map_err(|error| of(setting, fits(error)));
    if let Err(error) = set {
        // Dropping it would have another thread wait for the GPU, and keep the pool meanwhile.
        let _ = block.release();
        return Err(error);
    }
    let released = block.release_on(gpu.stream()).map_err(|unreleased| {
        // No other work uses the block, so it is given back without a stream.
        let _ = unreleased.value.release();
        unreleased.error
    });
    gpu.stream().synchronize().map_err(|error| of(setting, error))?;
    released?;
    pool.alloc(WATCHDOG)?.release()
}

fn a_sample_of_a_stream(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    // As few blocks as possible, so that a lost block shows.
    let topic = setting.domain.topic(&setting.name).max_bytes(BLOCK_BYTES as u64).place(GPU);
    let options = topic.depth(1).publishers(1).subscribers(1).held(1);
    let topic = once_gone(|| options.create())?;
    let publisher = topic.publisher()?;
    let subscriber = topic.subscriber(Policy::Block)?;
    let publish = || {
        let loan = publisher.loan(DType::U8, &[BLOCK_BYTES as u64], WATCHDOG)?;
        let set = gpu.stream().enqueue_set(loan.device()?.as_slice(), 7).map_err(|error| of(setting, fits(error)));
        // Dropping it would have another thread wait for the GPU, and keep the topic meanwhile.
        let filled = loan.filled();
        if let Err(error) = set {
            let _ = filled.release();
            return Err(error);
        }
        filled.publish_on(gpu.stream(), WATCHDOG).map_err(|unpublished| {
            let _ = unpublished.value.release();
            unpublished.error
        })
    };
    publish()?;
    let sample = subscriber.recv(WATCHDOG)?;
    // Without this wait, whether the stream has to wait would depend on timing.
    sample.wait(WATCHDOG)?;
    sample.device_on(gpu.stream())?;
    sample.release_on(gpu.stream()).map_err(|unreleased| {
        let _ = unreleased.value.release();
        unreleased.error
    })?;
    publish()?;
    let sample = subscriber.recv(WATCHDOG)?;
    sample.wait(WATCHDOG)?;
    sample.check()?;
    sample.release()
}

const BLOCK_BYTES: usize = 5000;

/// Creates an object whose name a former one may still have. A stream that has yet to release the former object keeps
/// it for a moment.
fn once_gone<T>(make: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    let started = Instant::now();
    loop {
        match make() {
            Err(Error::Denied(Denied::NameExists { .. })) if started.elapsed() < WATCHDOG => {
                std::thread::sleep(Duration::from_millis(1))
            }
            made => return made,
        }
    }
}

/// Returns the options of a pool with a single block, so that a lost block shows.
fn pool(domain: &Domain, name: &str) -> PoolOptions {
    domain.pool(name).blocks(1).block_bytes(BLOCK_BYTES as u64).place(GPU)
}

fn mutable(setting: &Setting) -> Result<Segment, Error> {
    let builder = setting.domain.create(&setting.name, GPU).tensor("data", DType::U8, &[4096]);
    builder.mutable(true).allocate()?.commit()
}

/// Returns memory as another library allocates it, filled with [`noise`].
fn foreign(gpu: &Gpu, name: &str) -> Result<ForeignMemory, Error> {
    let cuda =
        |source| Error::DeviceFault(DeviceFault::Cuda { what: format!("memory to be published as {name:?}"), source });
    let buffer = DeviceBuffer::new(gpu.context(), HELD_BYTES as u64).map_err(cuda)?;
    let copied = gpu.stream().copy_from_host(buffer.as_slice(), &noise(HELD_BYTES));
    copied.map_err(|error| cuda(fits(error)))?;
    ForeignMemory::try_from(Arc::new(buffer)).map_err(cuda)
}

fn expect(segment: &Segment, bytes: &[u8]) -> Outcome {
    let mut found = vec![0; bytes.len()];
    segment.tensor("data")?.read_at(0, &mut found)?;
    assert!(found == bytes, "{} holds other bytes than were written", segment.name());
    Ok(())
}

/// Returns the driver's part of an error of a range that fits.
fn fits(error: cuda::AccessError) -> cuda::CudaError {
    match error {
        cuda::AccessError::Driver(source) => source,
        other => panic!("{other}"),
    }
}

/// Returns the error of a driver call that this program makes itself, with the name of the operation's object.
pub(crate) fn of(setting: &Setting, source: cuda::CudaError) -> Error {
    Error::DeviceFault(DeviceFault::Cuda { what: setting.name.clone(), source })
}

fn noise(bytes: usize) -> Vec<u8> {
    partywall_harness::noise(bytes, 7)
}
