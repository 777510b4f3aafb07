//! Pinned host memory: segments, pools, topics and queues on a NUMA node of the simulated driver.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // tests, their helpers included

use std::{os::fd::AsFd, os::unix::process::ExitStatusExt, process::Command, sync::Arc, time::Duration};

use partywall::{
    Access, DType, DeviceChoice, Domain, Error, Gpu, Place, Policy, Segment, Task, TimelineWriter,
    cuda::{AccessError, Driver, NodeMapping, NodeMemory, NodeUse, kernels::expected},
    error::{Denied, DeviceFault, InvalidArgument, InvalidData, LimitReached, Mismatch, Unreachable},
    files::Sink as _,
    gpu,
};
use partywall_harness::{ROLE, Running, WATCHDOG as TIMEOUT, World, linger, next_order, say, simulated, wire};
use partywall_wire::{Call, ClientHello, Kind, Lifetime, Limit, Table};

/// The node of the first simulated GPU.
const NODE: Place = Place::Pinned(0);

/// Elements of a chunk: 2 MiB, the granularity.
const ELEMENTS: u64 = 1 << 19;

/// Runs the other processes of the tests. It is no test itself.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let domain = Domain::options().start(false).connect().unwrap();
    match role.as_str() {
        "maker" => {
            let build = domain.create("weights", NODE).tensor("x", DType::U32, &[ELEMENTS]).kept(true);
            let mut build = build.allocate().unwrap();
            build.as_mut_slice("x").unwrap().fill(7_u32);
            let segment = build.commit().unwrap();
            assert!(segment.gpu().is_none());
            linger();
        }
        "reader" => {
            let weights = domain.open("weights", Duration::ZERO).unwrap();
            assert!(weights.tensor("x").unwrap().as_slice::<u32>().unwrap().iter().all(|value| *value == 7));
            say("read");
        }
        "reader that names a GPU" => {
            let gpu = gpu::devices().unwrap()[1].uuid().unwrap();
            let weights = domain.opener("weights").device(gpu).access(Access::Cpu).open().unwrap();
            assert!(weights.tensor("x").unwrap().as_slice::<u32>().unwrap().iter().all(|value| *value == 7));
            assert!(weights.gpu().is_none());
        }
        "reader of a lie" => match domain.open("lie", TIMEOUT) {
            Err(error @ Error::InvalidData(InvalidData::OtherPlace { .. })) => say(&error.to_string()),
            other => panic!("{other:?}"),
        },
        "writer of frozen memory" => {
            let weights = domain.open("weights", Duration::ZERO).unwrap();
            let first = weights.tensor("x").unwrap().as_ptr().unwrap();
            say("ready");
            // SAFETY: the address is mapped, read-only: the store ends this process, which is the test.
            #[allow(unsafe_code)]
            unsafe {
                first.write_volatile(1)
            };
            say("stored");
        }
        "blocks" => {
            let pool = domain.pool("frames").open().unwrap();
            let mut block = pool.alloc(TIMEOUT).unwrap();
            block.bytes_mut().unwrap().fill(3);
            say("ready");
            next_order();
            say(&format!("done {}", block.offer().unwrap()));
            next_order();
        }
        "camera" => {
            let topic = domain.topic("camera").open().unwrap();
            let publisher = topic.publisher().unwrap();
            let mut loan = publisher.loan(DType::U8, &[4096], TIMEOUT).unwrap();
            loan.bytes_mut().unwrap().fill(5);
            loan.filled().publish(TIMEOUT).unwrap();
            assert!(topic.gpu().is_none(), "the CPU alone needs no context");
            say("ready");
            next_order();
        }
        "without a GPU" => {
            let why = no_pinned(domain.open("weights", Duration::ZERO));
            assert!(why.contains("CUDA_ERROR_NO_DEVICE"), "{why}");
            linger();
        }
        "without a driver" => {
            let why = no_pinned(domain.create("x", NODE).tensor("x", DType::U8, &[1]).allocate());
            assert!(why.contains("/nothing.so") && why.contains("\"x\""), "{why}");
            assert!(no_pinned(gpu::resolve(DeviceChoice::Pinned(Some(0)))).contains("/nothing.so"));
            assert_eq!(gpu::resolve(DeviceChoice::Auto).unwrap().0, Place::Host);
            linger();
        }
        "parent" => {
            let _initialised = domain.open("weights", Duration::ZERO).unwrap();
            let socket = domain.socket().to_owned();
            let is_told = in_a_child(|| {
                let domain = Domain::options().socket(socket).start(false).connect().unwrap();
                no_pinned(domain.open("weights", Duration::ZERO)).contains("spawn")
            });
            assert!(is_told);
            linger();
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Returns why a call cannot use pinned memory.
fn no_pinned<T>(refused: partywall::Result<T>) -> String {
    match refused {
        Err(error @ Error::DeviceFault(DeviceFault::NoPinned { .. })) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it has succeeded"),
    }
}

/// Returns whether `body` returns true in a forked child, which then ends.
#[allow(unsafe_code)]
fn in_a_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the locks that the child needs are its own; it ends without unwinding into the parent's code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: the status is a live number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Runs a role to its end. Returns what it said, and the calls of the driver that it made.
fn calls_of(world: &World, role: &str) -> (String, String) {
    let calls = world.directory().join("calls");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture"]).env(ROLE, role).env("PARTYWALL_SOCKET", world.socket());
    let ended = Running::spawn(command.env("SIMCUDA_CALLS", &calls)).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let made = std::fs::read_to_string(&calls).unwrap();
    std::fs::remove_file(calls).unwrap();
    (String::from_utf8(ended.stdout).unwrap(), made)
}

/// The GPU with this number.
fn gpu_of(domain: &Domain, ordinal: usize) -> Arc<Gpu> {
    domain.gpu(gpu::devices().unwrap()[ordinal].uuid().unwrap()).unwrap()
}

/// Opens a gate when the caller would be done if it did not wait. A slow machine can only hide a mistake.
fn opens_later<'scope>(scope: &'scope std::thread::Scope<'scope, '_>, gate: &'scope TimelineWriter) {
    scope.spawn(|| {
        std::thread::sleep(Duration::from_millis(50));
        gate.signal(1).unwrap();
    });
}

/// Commits a tensor `x` whose elements are all 7, written by the CPU.
fn sevens(domain: &Domain, name: &str) -> Segment {
    let build = domain.create(name, NODE).tensor("x", DType::U32, &[ELEMENTS]).kept(true);
    let mut build = build.allocate().unwrap();
    build.write("x", bytemuck::cast_slice(&vec![7_u32; ELEMENTS as usize])).unwrap();
    build.commit().unwrap()
}

/// Returns the elements as a GPU reads them.
fn on_gpu(segment: &Segment) -> Vec<u8> {
    let range = segment.tensor("x").unwrap().device().unwrap();
    let mut out = vec![0; range.bytes() as usize];
    range.copy_to_host(range.gpu().stream(), &mut out).unwrap();
    out
}

#[test]
fn pinned_memory_is_on_the_node_of_the_gpu() {
    simulated("pinned_memory_is_on_the_node_of_the_gpu", |_| {
        let resolve = |text: &str| gpu::resolve(text.parse().unwrap()).unwrap().0;
        assert_eq!((resolve("pinned"), resolve("pinned:1")), (Place::Pinned(0), Place::Pinned(1)));
        assert!(resolve("auto").gpu().is_some(), "auto never chooses it");
    });
}

// Holds 81.
#[test]
fn cpu_and_every_gpu_read_a_frozen_version_in_place() {
    simulated("cpu_and_every_gpu_read_a_frozen_version_in_place", |world| {
        let domain = world.connect();
        let committed = sevens(&domain, "weights");
        assert_eq!((committed.place(), committed.kind()), (NODE, "pinned"));
        let bytes = 7_u32.to_ne_bytes().repeat(ELEMENTS as usize);
        for ordinal in [0, 1] {
            let reader = world.connect();
            let gpu = gpu_of(&reader, ordinal);
            // Without `allow_peer`, although the memory is closer to the first GPU.
            let segment = reader.opener("weights").device(gpu.uuid()).open().unwrap();
            assert_eq!(on_gpu(&segment), bytes);
            assert!(!segment.tensor("x").unwrap().device().unwrap().is_writable());
            // The other side is added on first use, at the same address.
            let x = segment.tensor("x").unwrap();
            assert!(x.as_slice::<u32>().unwrap().iter().all(|value| *value == 7));
            assert_eq!(x.as_ptr().unwrap() as u64, x.device().unwrap().device_ptr());
        }
        let both = world.connect().opener("weights").access(Access::Both).open().unwrap();
        assert!(both.gpu().is_some());
        let x = committed.tensor("x").unwrap();
        assert!(matches!(x.shared::<u32>(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
        assert!(matches!(x.write_at(0, &[1]), Err(Error::Denied(_))), "it is frozen");
        let to_write = domain.opener("weights").read_write().open().unwrap_err();
        assert!(matches!(to_write, Error::Denied(Denied::ReadOnly { .. })), "{to_write}");
    });
}

// Holds 82.
#[test]
fn process_that_uses_the_cpu_alone_uses_no_gpu() {
    simulated("process_that_uses_the_cpu_alone_uses_no_gpu", |world| {
        let domain = world.connect();
        let _segment = sevens(&domain, "weights");
        for role in ["reader", "reader that names a GPU"] {
            let (_, calls) = calls_of(world, role);
            assert!(calls.contains("cuMemImportFromShareableHandle") && !calls.contains("Ctx"), "{calls}");
        }
    });
}

// Holds 83.
#[test]
fn gpu_writes_a_build_that_the_cpu_reads() {
    simulated("gpu_writes_a_build_that_the_cpu_reads", |world| {
        let domain = world.connect();
        let mut build = domain.create("x", NODE).tensor("x", DType::U32, &[ELEMENTS]).allocate().unwrap();
        build.as_mut_slice::<u32>("x").unwrap().fill(1);
        let gpu = gpu_of(&domain, 1);
        let range = build.device("x").unwrap();
        assert_eq!(range.gpu().uuid(), gpu.uuid(), "the GPU that this domain has opened");
        gpu.kernels().unwrap().enqueue_fill(gpu.stream(), range.as_slice()).unwrap();
        // The commit waits for the kernel.
        let segment = build.commit().unwrap();
        let x = segment.tensor("x").unwrap();
        let written = x.as_slice::<u32>().unwrap().iter().enumerate();
        assert!(written.map(|(index, value)| (index as u64, *value)).all(|(index, value)| value == expected(index)));
        assert!(!x.device().unwrap().is_writable(), "the builder's mapping is frozen in place");
    });
}

// Holds 83.
#[test]
fn forked_child_writes_nothing_of_a_build() {
    simulated("forked_child_writes_nothing_of_a_build", |world| {
        let domain = world.connect();
        let mut build = domain.create("x", NODE).tensor("x", DType::U32, &[ELEMENTS]).allocate().unwrap();
        build.as_mut_slice::<u32>("x").unwrap().fill(7);
        let is_forked = |refused: Error| matches!(refused, Error::Unreachable(Unreachable::Forked { .. }));
        let is_refused = in_a_child(|| {
            is_forked(build.as_mut_slice::<u32>("x").map(drop).unwrap_err())
                && is_forked(build.write("x", &vec![1; 4 * ELEMENTS as usize]).unwrap_err())
                && build.uploader().unwrap().lane().is_err_and(|error| is_forked(*error.downcast().unwrap()))
        });
        assert!(is_refused);
        let segment = build.commit().unwrap();
        assert!(segment.tensor("x").unwrap().as_slice::<u32>().unwrap().iter().all(|value| *value == 7));
    });
}

// Holds 83.
#[test]
fn forked_child_has_no_draft() {
    simulated("forked_child_has_no_draft", |_| {
        let driver = Driver::load().unwrap();
        let memory = NodeMemory::create(driver, 0, 4 * ELEMENTS).unwrap();
        let mut draft = NodeMapping::new(memory, NodeUse::Draft).unwrap();
        draft.allow_cpu().unwrap();
        let has_nothing = in_a_child(|| {
            draft.share();
            draft.bytes_mut().unwrap().is_none() && draft.writer().is_none() && draft.shared().is_none()
        });
        assert!(has_nothing);
        assert!(draft.bytes_mut().unwrap().is_some());
    });
}

// Holds 81.
#[test]
fn cpu_writes_a_build_after_the_gpu() {
    simulated("cpu_writes_a_build_after_the_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let gate = domain.timeline_writer("gate").unwrap();
        let mut build = domain.create("x", NODE).tensor("x", DType::U8, &[64]).allocate().unwrap();
        domain.timeline("gate").unwrap().wait_on(gpu.stream(), 1).unwrap();
        gpu.stream().enqueue_set(build.device("x").unwrap().as_slice(), 9).unwrap();
        std::thread::scope(|scope| {
            opens_later(scope, &gate);
            let bytes = build.as_mut_bytes("x").unwrap();
            assert!(bytes.iter().all(|byte| *byte == 9), "the stream has written it");
            bytes[0] = 1;
        });
        let segment = build.commit().unwrap();
        assert_eq!(segment.tensor("x").unwrap().to_vec().unwrap()[..2], [1, 9]);
    });
}

// Holds 83.
#[test]
fn mutable_version_is_written_by_the_cpu_and_grows_in_place() {
    simulated("mutable_version_is_written_by_the_cpu_and_grows_in_place", |world| {
        let domain = world.connect();
        let builder = domain.create("log", NODE).tensor("x", DType::U32, &[ELEMENTS]).mutable(true);
        let log = builder.reserve(64 << 20).allocate().unwrap().commit().unwrap();
        let reader = world.connect().opener("log").access(Access::Both).open().unwrap();
        log.tensor("x").unwrap().shared::<u32>().unwrap().set(0, 5);
        let before = reader.tensor("x").unwrap();
        assert_eq!(before.shared::<u32>().unwrap().get(0), 5);
        let start = before.as_ptr().unwrap();
        log.grow().extend("x", 3 * ELEMENTS).commit().unwrap();
        log.tensor("x").unwrap().write_at(4 * ELEMENTS - 4, &[8; 8]).unwrap();
        assert_eq!(reader.refresh().unwrap(), partywall::Refreshed::Grown);
        let x = reader.tensor("x").unwrap();
        assert_eq!((x.elements(), x.as_ptr().unwrap()), (3 * ELEMENTS, start));
        let seam = 4 * ELEMENTS as usize - 4..4 * ELEMENTS as usize + 4;
        assert_eq!((&on_gpu(&reader)[seam.clone()], &x.to_vec().unwrap()[seam]), (&[8; 8][..], &[8; 8][..]));
        let beyond = log.grow().extend("x", 100 * ELEMENTS).commit().unwrap_err();
        assert!(matches!(beyond, Error::Denied(_)), "{beyond}");
    });
}

// Holds 83.
#[test]
fn version_outlives_its_killed_maker_and_cannot_be_written() {
    simulated("version_outlives_its_killed_maker_and_cannot_be_written", |world| {
        let mut maker = world.play("maker");
        maker.kill();
        world.play_until("reader", "read").finish();
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let segment = domain.opener("weights").device(gpu.uuid()).open().unwrap();
        assert_eq!(on_gpu(&segment)[..4], 7_u32.to_ne_bytes());
        let mut writer = world.play_until("writer of frozen memory", "ready");
        let ended = writer.join().signal();
        assert_eq!(ended, Some(libc::SIGSEGV));
    });
}

// Holds 81.
#[test]
fn pool_is_used_by_cpu_and_gpu() {
    simulated("pool_is_used_by_cpu_and_gpu", |world| {
        let domain = world.connect();
        let options = domain.pool("frames").blocks(2).block_bytes(4096).place(NODE);
        let pool = options.zeroed(true).create().unwrap();
        let mut other = world.play("blocks");
        let block = pool.accept(&other.request("offer").parse().unwrap()).unwrap();
        let gpu = gpu_of(&domain, 0);
        let mut out = [0; 4096];
        block.device().unwrap().copy_to_host(gpu.stream(), &mut out).unwrap();
        assert_eq!(out, [3; 4096]);
        assert_eq!(block.bytes().unwrap(), out);
        assert!(pool.gpu().is_some());
        block.release_on(gpu.stream()).unwrap();
        let block = pool.alloc(TIMEOUT).unwrap();
        assert_eq!(block.bytes().unwrap(), [0; 4096], "zeroed");
        block.release().unwrap();
    });
}

// Holds 81.
#[test]
fn bytes_of_a_block_wait_for_the_gpu() {
    simulated("bytes_of_a_block_wait_for_the_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let pool = domain.pool("frames").blocks(1).block_bytes(64).place(NODE).create().unwrap();
        let gate = domain.timeline_writer("gate").unwrap();
        let mut block = pool.alloc(TIMEOUT).unwrap();
        block.bytes_mut().unwrap().fill(1);
        domain.timeline("gate").unwrap().wait_on(gpu.stream(), 1).unwrap();
        gpu.stream().enqueue_set(block.device_mut().unwrap().as_slice(), 9).unwrap();
        std::thread::scope(|scope| {
            opens_later(scope, &gate);
            assert_eq!(block.bytes().unwrap(), [9; 64]);
        });
        let read_only = gpu.stream().enqueue_set(block.device().unwrap().as_slice(), 2);
        assert_eq!(read_only, Err(AccessError::ReadOnly), "the bytes may be in use");
        gpu.stream().enqueue_set(block.device_mut().unwrap().as_slice(), 2).unwrap();
        assert_eq!(block.bytes_mut().unwrap(), [2; 64]);
        block.zero_on(gpu.stream()).unwrap();
        assert_eq!(block.bytes().unwrap(), [0; 64]);
    });
}

// Holds 81.
#[test]
fn topic_carries_samples_from_cpu_to_gpu_and_back() {
    simulated("topic_carries_samples_from_cpu_to_gpu_and_back", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        gpu.kernels().unwrap();
        let topic = domain.topic("camera").dtype(DType::U8).shape(&[4096]).place(NODE).create().unwrap();
        let reader = topic.subscribe(Policy::Block).join().unwrap();
        let camera = world.play("camera");
        let sample = reader.recv(TIMEOUT).unwrap();
        let range = sample.device_on(gpu.stream()).unwrap();
        let mut out = [0; 4096];
        range.copy_to_host(gpu.stream(), &mut out).unwrap();
        assert_eq!(out, [5; 4096], "CPU to GPU");
        sample.release_on(gpu.stream()).unwrap();
        camera.finish();

        let publisher = topic.publisher().unwrap();
        let gate = domain.timeline_writer("gate").unwrap();
        domain.timeline("gate").unwrap().wait_on(gpu.stream(), 1).unwrap();
        let loan = publisher.loan(DType::U8, &[4096], TIMEOUT).unwrap();
        gpu.stream().enqueue_set(loan.device().unwrap().as_slice(), 9).unwrap();
        loan.filled().publish_on(gpu.stream(), TIMEOUT).unwrap();
        let sample = reader.recv(TIMEOUT).unwrap();
        assert!(sample.bytes().is_err(), "the stream has not written it");
        gate.signal(1).unwrap();
        sample.wait(TIMEOUT).unwrap();
        assert_eq!(sample.bytes().unwrap(), [9; 4096], "GPU to CPU");
        sample.release().unwrap();
    });
}

// Holds 81.
#[test]
fn first_stream_chooses_the_gpu_of_a_subscriber() {
    simulated("first_stream_chooses_the_gpu_of_a_subscriber", |world| {
        let domain = world.connect();
        let [first, second] = [0, 1].map(|ordinal| gpu_of(&domain, ordinal));
        let topic = domain.topic("camera").dtype(DType::U8).shape(&[16]).place(NODE).create().unwrap();
        let reader = topic.subscribe(Policy::Block).join().unwrap();
        let mut loan = topic.publisher().unwrap().loan(DType::U8, &[16], TIMEOUT).unwrap();
        loan.bytes_mut().unwrap().fill(4);
        loan.filled().publish(TIMEOUT).unwrap();
        let sample = reader.recv(TIMEOUT).unwrap();
        let mut out = [0; 16];
        let range = sample.device_on(second.stream()).unwrap();
        range.copy_to_host(second.stream(), &mut out).unwrap();
        assert_eq!((out, range.gpu().uuid()), ([4; 16], second.uuid()));
        assert!(!range.is_writable(), "a sample does not change");
        let other = sample.device_on(first.stream()).unwrap_err();
        assert!(matches!(other, Error::InvalidArgument(InvalidArgument::Range { .. })), "{other}");
    });
}

// Holds 81.
#[test]
fn subscriber_on_a_gpu_reads_by_the_cpu_later() {
    simulated("subscriber_on_a_gpu_reads_by_the_cpu_later", |world| {
        let domain = world.connect();
        let topic = domain.topic("camera").dtype(DType::U8).shape(&[16]).place(NODE).create().unwrap();
        let other = world.connect();
        let gpu = gpu_of(&other, 1);
        let opened = other.topic("camera").device(gpu.uuid()).open().unwrap();
        assert_eq!(opened.gpu().unwrap().uuid(), gpu.uuid());
        let reader = opened.subscribe(Policy::Block).join().unwrap();
        let mut loan = topic.publisher().unwrap().loan(DType::U8, &[16], TIMEOUT).unwrap();
        loan.bytes_mut().unwrap().fill(4);
        loan.filled().publish(TIMEOUT).unwrap();
        // It is received before the CPU has access.
        let sample = reader.recv(TIMEOUT).unwrap();
        assert_eq!(sample.bytes().unwrap(), [4; 16]);
    });
}

// Holds 81.
#[test]
fn queue_takes_inputs_of_the_cpu_to_a_worker_on_a_gpu() {
    simulated("queue_takes_inputs_of_the_cpu_to_a_worker_on_a_gpu", |world| {
        let domain = world.connect();
        let options = domain.queue("work").tasks(2).inputs(2, 64).outputs(2, 64);
        let queue = options.place(NODE).create().unwrap();
        let mut input = queue.inputs().alloc(TIMEOUT).unwrap();
        input.bytes_mut().unwrap().fill(6);
        let ticket = queue.submit(Task::new("copy").input(input).output(64), TIMEOUT).unwrap();
        let gpu = gpu_of(&domain, 0);
        let mut task = queue.claim(TIMEOUT).unwrap();
        let source = task.inputs()[0].device().unwrap();
        let mut out = [0; 64];
        source.copy_to_host(gpu.stream(), &mut out).unwrap();
        assert_eq!(out, [6; 64]);
        task.output_mut().unwrap().bytes_mut().unwrap().fill(8);
        task.complete().unwrap();
        let result = ticket.wait(TIMEOUT).unwrap();
        assert_eq!(result.output().unwrap().bytes().unwrap()[..64], [8; 64]);
    });
}

#[test]
fn range_of_a_result_is_for_reading_after_the_cpu_has_it() {
    simulated("range_of_a_result_is_for_reading_after_the_cpu_has_it", |world| {
        let domain = world.connect();
        let queue = domain.queue("work").tasks(1).outputs(1, 64).place(NODE).create().unwrap();
        let ticket = queue.submit(Task::new("fill").output(64), TIMEOUT).unwrap();
        let mut task = queue.claim(TIMEOUT).unwrap();
        task.output_mut().unwrap().bytes_mut().unwrap().fill(8);
        task.complete().unwrap();
        let gpu = gpu_of(&domain, 0);
        let enqueued = ticket.wait_on(gpu.stream(), TIMEOUT).unwrap();
        let range = enqueued.device().unwrap();
        let result = enqueued.take(TIMEOUT).unwrap();
        let bytes = result.output().unwrap().bytes().unwrap();
        assert_eq!(gpu.stream().enqueue_set(range.as_slice(), 1), Err(AccessError::ReadOnly));
        gpu.stream().synchronize().unwrap();
        assert_eq!(bytes[..64], [8; 64]);
    });
}

// Holds 85.
#[test]
fn missing_node_and_missing_memory_are_said_before_the_first_byte() {
    simulated("missing_node_and_missing_memory_are_said_before_the_first_byte", |world| {
        let domain = world.connect();
        let create = |place, bytes| domain.create("x", place).tensor("x", DType::U8, &[bytes]).allocate().unwrap_err();
        let missing = create(Place::Pinned(7), 100);
        assert!(matches!(missing, Error::DeviceFault(DeviceFault::NoPinned { .. })), "{missing}");
        match create(NODE, 1 << 40) {
            Error::LimitReached(LimitReached::Memory { place: NODE, asked, .. }) => assert_eq!(asked, 1 << 40),
            other => panic!("{other}"),
        }
        assert!(domain.status().unwrap().bytes.is_empty());
    });
}

// Holds 84.
#[test]
fn memory_of_another_place_is_refused_before_it_is_mapped() {
    simulated("memory_of_another_place_is_refused_before_it_is_mapped", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let build = domain.create("on-gpu", Place::Gpu(gpu.uuid())).tensor("x", DType::U32, &[ELEMENTS]);
        let _both = [build.allocate().unwrap().commit().unwrap(), sevens(&domain, "on-node")];
        let hello = ClientHello { simulated: true, ..wire::hello(false, None) };
        let mut liar = wire::shake_hands_as(world.socket(), &hello).unwrap();
        for (truth, found) in [("on-gpu", "device 0"), ("on-node", "NUMA node 0")] {
            let memory = domain.descriptors(truth, TIMEOUT).unwrap();
            let table = Table::Inline(memory.table().as_bytes().to_vec());
            let commit = wire::host_commit("lie", Lifetime::Kept, vec![memory.chunks()[0].bytes()], table);
            let place = partywall_wire::Place::Pinned(1);
            let commit = wire::with_facts(commit, |facts| (facts.kind, facts.place) = (Kind::Pinned, place));
            let fd = memory.chunks()[0].as_fd().try_clone_to_owned().unwrap();
            liar.ask_with(Call::Commit(commit), &[&fd]).0.unwrap();
            let (said, calls) = calls_of(world, "reader of a lie");
            assert!(said.contains(found), "{said}");
            assert!(calls.contains("cuMemImportFromShareableHandle") && !calls.contains("cuMemMap"), "{calls}");
        }
    });
}

// Holds 86.
#[test]
fn bytes_on_a_node_are_counted_and_limited() {
    let body = |_: &World| {
        let world = World::with(|config| config.limits.pinned = Some(5 << 20));
        let domain = world.connect();
        let _two = sevens(&domain, "two");
        let held = |place: Place| {
            let status = domain.status().unwrap();
            status.bytes.iter().find(|(at, _)| Place::from(*at) == place).map(|(_, bytes)| *bytes)
        };
        assert_eq!(held(NODE), Some(2 << 20));
        let four = |place| domain.create("four", place).tensor("x", DType::U8, &[4 << 20]).allocate();
        let over = |refused: &Error| match refused {
            Error::LimitReached(LimitReached::Broker { limit: Limit::Pinned(Some(0)), allowed, needed, .. }) => {
                assert_eq!((*allowed, *needed), (5 << 20, 6 << 20));
            }
            other => panic!("{other}"),
        };
        let refused = four(NODE).unwrap_err();
        over(&refused);
        assert!(refused.to_string().contains("pinned memory on NUMA node 0") && refused.advice().contains("pinned:N"));
        let _elsewhere = four(Place::Pinned(1)).unwrap().commit().unwrap();
        // Both fit until the first is committed.
        let more = || domain.create("more", NODE).tensor("x", DType::U8, &[1]).mutable(true).reserve(64 << 20);
        let [first, second] = [(); 2].map(|()| more().allocate().unwrap());
        let first = first.commit().unwrap();
        over(&second.commit().unwrap_err());
        over(&first.grow().extend("x", (2 << 20) + 1).commit().unwrap_err());
        assert_eq!(held(NODE), Some(4 << 20));
    };
    simulated("bytes_on_a_node_are_counted_and_limited", body);
}

// Holds 86.
#[test]
fn share_of_a_user_is_refused_before_anything_is_allocated() {
    let body = |_: &World| {
        let world = World::with(|config| config.limits.per_uid.pinned = Some(5 << 20));
        let domain = world.connect();
        let two = domain.create("two", NODE).tensor("x", DType::U8, &[1]).mutable(true).reserve(64 << 20);
        let two = two.allocate().unwrap().commit().unwrap();
        let over = |refused: &Error, bytes| match refused {
            Error::LimitReached(LimitReached::User {
                uid,
                limit: Limit::Pinned(Some(0)),
                allowed,
                held,
                needed,
                ..
            }) => {
                assert_eq!((*uid, *allowed, *held, *needed), (domain.uid(), 5 << 20, 2 << 20, bytes));
            }
            other => panic!("{other}"),
        };
        let create = |bytes| domain.create("x", NODE).tensor("x", DType::U8, &[bytes]).allocate();
        // As allocated: a byte takes 2 MiB.
        let refused = create((2 << 20) + 1).unwrap_err();
        over(&refused, 6 << 20);
        for part in ["pinned memory on NUMA node 0", "5242880", "2097152 in use", "6291456"] {
            assert!(refused.to_string().contains(part), "{refused}");
        }
        assert!(refused.advice().contains("--max-pinned-bytes-per-uid"), "{}", refused.advice());
        over(&two.grow().extend("x", (4 << 20) + 1).commit().unwrap_err(), 6 << 20);
        let _fits = create(2 << 20).unwrap().commit().unwrap();
        let _elsewhere = domain.create("y", Place::Pinned(1)).tensor("x", DType::U8, &[4 << 20]).allocate().unwrap();
    };
    simulated("share_of_a_user_is_refused_before_anything_is_allocated", body);
}

// Holds 85.
#[test]
fn process_without_a_driver_is_told_why() {
    simulated("process_without_a_driver_is_told_why", |world| {
        let _segment = sevens(&world.connect(), "weights");
        let hidden = |command: &mut Command| _ = command.env("CUDA_VISIBLE_DEVICES", "");
        world.play_with("without a GPU", hidden).finish();
    });
    let missing = |command: &mut Command| _ = command.env(Driver::LIBRARY_VARIABLE, "/nothing.so");
    World::new().play_with("without a driver", missing).finish();
}

// Holds 85.
#[test]
fn forked_child_is_told_to_spawn() {
    simulated("forked_child_is_told_to_spawn", |world| {
        let _segment = sevens(&world.connect(), "weights");
        world.play("parent").finish();
    });
}
