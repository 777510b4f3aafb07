//! Segments as file descriptors, and processes that use nothing else of them.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    process::Command,
    time::Duration,
};

use partywall::{
    DType, Descriptors, Domain, Error, Place,
    cuda::{Access, Driver, Mapping, NodeMapping, NodeMemory, NodeUse, PhysicalMemory},
    error::{Gone, Mismatch, NotFound, Unreachable},
    gpu,
    info::Named,
};
use partywall_harness::{kind, next_order, place, say};
use partywall_os::map::{SealedMap, SharedMap};

use super::{
    TIMEOUT,
    world::{World, alone, commit, eventually},
};

/// The environment variable with the numbers and lengths of a child's descriptors: `FD:BYTES`, a space between two.
const CHUNKS: &str = "PARTYWALL_TEST_CHUNKS";

/// Returns the first `bytes` bytes of a chunk, mapped without the library's segments.
fn read(chunk: BorrowedFd<'_>, chunk_bytes: u64, bytes: usize) -> Vec<u8> {
    let uuid = match place() {
        Place::Gpu(uuid) => uuid,
        Place::Pinned(node) => {
            let memory = NodeMemory::import(Driver::load().unwrap(), node, chunk, chunk_bytes).unwrap();
            let mapping = NodeMapping::new(memory, NodeUse::Frozen).unwrap();
            mapping.allow_cpu().unwrap();
            return mapping.bytes().unwrap()[..bytes].to_vec();
        }
        Place::Host => {
            let mut read = vec![0; bytes];
            SharedMap::new([chunk], 0, false).unwrap().slice(0, bytes).unwrap().copy_to_slice(&mut read);
            return read;
        }
    };
    let gpu = gpu::Gpu::open(uuid).unwrap();
    let memory = PhysicalMemory::import(gpu.context(), chunk, chunk_bytes).unwrap();
    let mapping = Mapping::new(memory, Access::ReadOnly).unwrap();
    let mut read = vec![0; bytes];
    gpu.stream().copy_to_host(&mut read, mapping.slice(0, bytes as u64).unwrap()).unwrap();
    read
}

fn seen(descriptors: &Descriptors) -> Vec<u8> {
    let tensor = descriptors.table().find("x").unwrap();
    assert_eq!((tensor.chunk(), tensor.offset(), tensor.bytes()), (0, 0, 16));
    let chunk = &descriptors.chunks()[0];
    read(chunk.as_fd(), chunk.bytes(), 16)
}

/// The links of this process's descriptors that are memory of segments.
fn memory_files() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    links.map(|link| link.to_string_lossy().into_owned()).filter(|link| link.contains("memfd:")).collect()
}

/// The files that this process has mapped.
fn mapped_files() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter_map(|line| line.split_once('/')).map(|(_, file)| file.to_owned()).collect()
}

/// The roles of other processes.
#[allow(unsafe_code, clippy::print_stdout, reason = "descriptors that a parent names by number")]
pub(crate) fn play(role: &str) {
    match role {
        // Knows neither the domain nor the name.
        "descriptors inherited" => {
            let chunks = std::env::var(CHUNKS).unwrap();
            assert_eq!(memory_files().len(), chunks.split_whitespace().count(), "{:?}", memory_files());
            for chunk in chunks.split_whitespace() {
                let (fd, bytes) = chunk.split_once(':').unwrap();
                // SAFETY: the parent has passed this descriptor, and nothing else in this process uses it.
                let fd = unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
                println!("read {}", read(fd.as_fd(), bytes.parse().unwrap(), 16)[0]);
            }
            say("ready");
        }
        "descriptors not inherited" => {
            assert_eq!(memory_files(), <[&str; 0]>::default());
            say("ready");
        }
        "descriptors evicted" => {
            let domain = Domain::options().start(false).connect().unwrap();
            let descriptors = domain.descriptors("x", TIMEOUT).unwrap();
            say("ready");
            next_order();
            eventually("the eviction", || matches!(domain.ping(), Err(Error::Gone(Gone::Evicted { .. }))));
            let refused = domain.descriptors("x", Duration::ZERO).unwrap_err();
            assert!(matches!(refused, Error::Gone(Gone::Evicted { .. })), "{refused}");
            assert_eq!(seen(&descriptors)[0], 7);
            drop(descriptors);
            say("done");
        }
        "descriptors without a driver" => {
            let domain = Domain::options().start(false).connect().unwrap();
            let calls = || std::fs::read_to_string(std::env::var("SIMCUDA_CALLS").unwrap()).unwrap_or_default();
            let before = (calls(), mapped_files());
            let descriptors = domain.descriptors("x", TIMEOUT).unwrap();
            assert_eq!((descriptors.kind(), descriptors.chunks().len()), (kind(), 1));
            assert_eq!((calls(), mapped_files()), before);
            assert_eq!(seen(&descriptors)[0], 7);
            assert_eq!(calls() != before.0, place() != Place::Host, "the log of calls works");
            say("ready");
        }
        other => panic!("no role is called {other:?}"),
    }
}

#[test]
fn descriptors_are_the_memory_of_a_segment() {
    alone(|| {
        let world = World::new();
        let ours = world.connect();
        let _segment = commit(&ours, "x", 7, false);
        let theirs = world.connect();
        let before = memory_files().len();
        let descriptors = theirs.descriptors("x@1", Duration::ZERO).unwrap();
        assert_eq!(memory_files().len(), before + 1, "one descriptor for each chunk");
        assert_eq!((descriptors.name(), descriptors.version(), descriptors.kind()), ("x", 1, kind()));
        assert_eq!((descriptors.place(), descriptors.is_mutable(), descriptors.may_grow()), (place(), false, false));
        assert_eq!((descriptors.bytes(), descriptors.table().len()), (descriptors.chunks()[0].bytes(), 1));
        assert_eq!(descriptors.table().find("x").unwrap().dtype(), DType::U32);
        let flags = rustix::io::fcntl_getfd(&descriptors.chunks()[0]).unwrap();
        assert_eq!(flags, rustix::io::FdFlags::CLOEXEC);
        let shown = format!("{descriptors:?}");
        assert!(shown.starts_with("Descriptors(x@1: 1 chunks, "), "{shown}");
        assert_eq!(seen(&descriptors), 7_u32.to_ne_bytes().repeat(4));
    });
}

#[test]
fn several_chunks_of_host_memory_are_several_descriptors() {
    alone(|| {
        let world = World::new();
        let domain = world.connect();
        let builder = domain.create("many", Place::Host).chunk_bytes(256).metadata("k", "v");
        let builder = (0..40).fold(builder, |builder, i| builder.tensor(&format!("{i:02}"), DType::U8, &[256]));
        let mut build = builder.allocate().unwrap();
        (0..40).for_each(|i| build.as_mut_bytes(&format!("{i:02}")).unwrap().fill(i));
        let _segment = build.commit().unwrap();
        let before = memory_files().len();
        let descriptors = domain.descriptors("many", Duration::ZERO).unwrap();
        assert_eq!(memory_files().len(), before + 40);
        assert_eq!(descriptors.table().metadata().collect::<Vec<_>>(), [("k", "v")]);
        for (i, tensor) in descriptors.table().iter().enumerate() {
            let map = SealedMap::new(&descriptors.chunks()[tensor.chunk()]).unwrap();
            let start = tensor.offset() as usize;
            assert_eq!(map.bytes()[start..start + 256], [i as u8; 256]);
        }
        descriptors.release().unwrap();
        assert_eq!(memory_files().len(), before);
    });
}

// Holds 224.
#[test]
fn frozen_host_memory_cannot_be_mapped_for_writing_by_its_descriptor() {
    let world = World::new();
    let domain = world.connect();
    let mut build = domain.create("x", Place::Host).tensor("x", DType::U8, &[16]).allocate().unwrap();
    build.as_mut_bytes("x").unwrap().fill(7);
    let _segment = build.commit().unwrap();
    let descriptors = domain.descriptors("x", Duration::ZERO).unwrap();
    let chunk = &descriptors.chunks()[0];
    assert_eq!(SharedMap::new([chunk.as_fd()], 0, true).unwrap_err(), rustix::io::Errno::ACCESS);
    assert_eq!(rustix::io::pwrite(chunk, &[1], 0), Err(rustix::io::Errno::BADF));
    // By its path the memory can be opened for writing, but is sealed.
    let path = format!("/proc/self/fd/{}", chunk.as_fd().as_raw_fd());
    let again = std::fs::File::options().read(true).write(true).open(path).unwrap();
    assert_eq!(SharedMap::new([again.as_fd()], 0, true).unwrap_err(), rustix::io::Errno::PERM);
    assert_eq!(rustix::io::pwrite(&again, &[1], 0), Err(rustix::io::Errno::PERM));
    assert_eq!(SealedMap::new(chunk).unwrap().bytes()[..16], [7; 16]);
}

#[test]
fn mutable_host_memory_is_written_by_its_descriptor() {
    let world = World::new();
    let domain = world.connect();
    let builder = domain.create("x", Place::Host).tensor("x", DType::U8, &[16]).mutable(true).reserve(1 << 20);
    let segment = builder.allocate().unwrap().commit().unwrap();
    let descriptors = domain.descriptors("x", Duration::ZERO).unwrap();
    assert!(descriptors.is_mutable() && descriptors.may_grow());
    let map = SharedMap::new([descriptors.chunks()[0].as_fd()], 0, true).unwrap();
    map.slice::<u8>(0, 16).unwrap().set(3, 9);
    assert_eq!(segment.tensor("x").unwrap().shared::<u8>().unwrap().get(3), 9);

    segment.grow().extend("x", 100_000).commit().unwrap();
    assert_eq!(descriptors.chunks().len(), 1, "what was asked for before stays as it was");
    let grown = domain.descriptors("x", Duration::ZERO).unwrap();
    let fds: Vec<_> = grown.chunks().iter().map(AsFd::as_fd).collect();
    let map = SharedMap::new(&fds, 0, false).unwrap();
    let tensor = grown.table().find("x").unwrap();
    assert_eq!((fds.len(), tensor.offset(), tensor.bytes()), (2, 0, 100_000));
    segment.tensor("x").unwrap().write_at(99_999, &[5]).unwrap();
    let whole = map.slice::<u8>(0, 100_000).unwrap();
    assert_eq!((whole.get(3), whole.get(99_999)), (9, 5));
}

// Holds 225.
#[test]
fn descriptors_hold_a_lease_until_they_are_dropped() {
    let world = World::new();
    let domain = world.connect();
    let first = commit(&domain, "x", 1, true);
    let old = domain.descriptors("x", Duration::ZERO).unwrap();
    drop(first);
    let _second = commit(&domain, "x", 2, true);
    let new = domain.descriptors("x", Duration::ZERO).unwrap();
    assert_eq!((old.version(), new.version()), (1, 2));
    assert_eq!((seen(&old)[0], seen(&new)[0]), (1, 2));
    assert_eq!(domain.descriptors("x@1", Duration::ZERO).unwrap().version(), 1);
    assert_eq!(domain.status().unwrap().versions, 2);
    drop(old);
    assert_eq!(domain.status().unwrap().versions, 1);
    let gone = domain.descriptors("x@1", Duration::ZERO).unwrap_err();
    assert!(matches!(gone, Error::NotFound(NotFound::Version { .. })), "{gone}");
    new.release().unwrap();
    assert_eq!(domain.status().unwrap().leases, 1, "the committer's");
}

#[test]
fn descriptors_of_a_name_that_does_not_exist_yet_are_waited_for() {
    let world = World::new();
    let domain = world.connect();
    let missing = domain.descriptors("later", Duration::ZERO).unwrap_err();
    assert!(matches!(missing, Error::NotFound(NotFound::Name { .. })), "{missing}");
    let late = domain.descriptors("later", Duration::from_millis(10)).unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| seen(&domain.descriptors("later", TIMEOUT).unwrap())[0]);
        std::thread::sleep(Duration::from_millis(20));
        let _segment = commit(&world.connect(), "later", 3, false);
        assert_eq!(waiter.join().unwrap(), 3);
    });
}

#[test]
fn descriptors_of_other_objects_are_refused_without_a_lease() {
    alone(|| {
        let world = World::new();
        let domain = world.connect();
        let _pool = domain.pool("pool").blocks(1).block_bytes(1).place(place()).create().unwrap();
        let _topic = domain.topic("topic").max_bytes(1).place(place()).create().unwrap();
        let _queue = domain.queue("queue").tasks(1).place(place()).create().unwrap();
        let leases = domain.status().unwrap().leases;
        let files = memory_files().len();
        for (name, kind) in [("pool", Named::Pool), ("topic", Named::Topic), ("queue", Named::Queue)] {
            let error = domain.descriptors(name, Duration::ZERO).unwrap_err();
            let refused =
                matches!(&error, Error::Mismatch(Mismatch::Object { wanted: Named::Segment, is, .. }) if *is == kind);
            assert!(refused, "{error:?}");
        }
        assert_eq!(memory_files().len(), files);
        let timeline = domain.timeline("line").unwrap();
        let error = domain.descriptors("line", Duration::ZERO).unwrap_err();
        assert!(error.to_string().ends_with("; there is a timeline of that name"), "{error}");
        assert!(matches!(domain.descriptors("a\nb", Duration::ZERO), Err(Error::InvalidArgument(_))));
        drop(timeline);
        assert_eq!(domain.status().unwrap().leases, leases);
    });
}

// Holds 222, 223.
#[test]
fn child_process_maps_inherited_descriptors() {
    alone(|| {
        let world = World::new();
        let domain = world.connect();
        let first = commit(&domain, "x", 7, false);
        let descriptors = domain.descriptors("x", Duration::ZERO).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        let before = memory_files().len();
        let numbers = descriptors.pass_to(&mut command).unwrap();
        let chunks = numbers.iter().zip(descriptors.chunks()).map(|(fd, chunk)| format!("{fd}:{}", chunk.bytes()));
        command.env(CHUNKS, chunks.collect::<Vec<_>>().join(" "));
        assert_eq!(memory_files().len(), before + 1);
        // Another child inherits nothing, and a newer version changes nothing.
        world.play("descriptors not inherited").finish();
        drop(first);
        let _second = commit(&domain, "x", 8, false);
        let mut actor = partywall_harness::Actor::start(&mut command, "descriptors inherited");
        assert_eq!(actor.expect("read"), "7");
        actor.expect("ready");
        actor.finish();
        assert!(numbers.iter().all(|number| *number > 2 && descriptors.chunks()[0].as_fd().as_raw_fd() != *number));
        let before = memory_files().len();
        drop(command);
        assert_eq!(memory_files().len(), before - 1, "the duplicates go with the command");
    });
}

// Holds 223.
#[test]
fn descriptors_call_no_driver_and_map_nothing() {
    let world = World::new();
    let _segment = commit(&world.connect(), "x", 7, false);
    let log = world.directory().join("calls");
    world.play_with("descriptors without a driver", |command| _ = command.env("SIMCUDA_CALLS", log)).finish();
}

// Holds 225.
#[test]
fn descriptors_stay_usable_when_the_broker_is_gone() {
    let mut world = World::new();
    let domain = world.connect();
    let _segment = commit(&domain, "x", 7, true);
    let descriptors = domain.descriptors("x", Duration::ZERO).unwrap();
    let other = domain.descriptors("x", Duration::ZERO).unwrap();
    world.end_broker();
    eventually("the news", || matches!(domain.ping(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    assert_eq!(seen(&descriptors)[0], 7);
    assert!(matches!(domain.descriptors("x", TIMEOUT), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    assert!(matches!(other.release(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    drop(descriptors);
}

// Holds 225.
#[test]
fn evicted_process_keeps_its_descriptors_and_gets_no_more() {
    let world = World::new();
    let domain = world.connect();
    let _segment = commit(&domain, "x", 7, true);
    let mut holder = world.play("descriptors evicted");
    domain.evict(holder.pid(), false).unwrap();
    holder.proceed();
    holder.expect("done");
    holder.finish();
}

#[test]
fn descriptors_of_published_memory_are_refused_with_the_reason() {
    partywall_harness::simulated("descriptors::descriptors_of_published_memory_are_refused_with_the_reason", |world| {
        let domain = world.connect();
        let gpu = domain.gpu(gpu::devices().unwrap()[0].uuid().unwrap()).unwrap();
        let buffer = std::sync::Arc::new(partywall::cuda::DeviceBuffer::new(gpu.context(), 4096).unwrap());
        let memory = partywall::cuda::ForeignMemory::try_from(buffer).unwrap();
        let publication = || domain.publish("x").tensor("x", DType::U8, &[4096], &memory);
        let published = publication().commit().unwrap();
        let leases = domain.status().unwrap().leases;
        let error = domain.descriptors("x", Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Mismatch(Mismatch::Kind { has: "legacy", .. })), "{error:?}");
        assert_eq!(error.to_string(), r#""x" is legacy memory; a file descriptor needs host, pinned or vmm memory"#);
        assert!(error.advice().contains("commit_copy") && error.advice().contains("put"), "{}", error.advice());
        assert_eq!(domain.status().unwrap().leases, leases);
        drop(published);
        let gone = domain.descriptors("x", Duration::ZERO).unwrap_err();
        assert!(matches!(gone, Error::Gone(Gone::Withdrawn { .. })), "{gone}");
        let copy = publication().commit_copy().unwrap();
        assert_eq!(domain.descriptors("x", Duration::ZERO).unwrap().version(), copy.version());
    });
}
