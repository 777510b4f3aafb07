// Holds 87.
//! Copies between places on the simulated driver: one call of the driver for each chunk, and no slow path.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use partywall::{
    DType, Domain, Error, Gpu, Place, Segment,
    cuda::{Driver, Stream},
    error::{Denied, InvalidArgument, LimitReached, Mismatch},
    files::FileProblem,
    gpu,
};
use partywall_harness::simulated;

const NODE: Place = Place::Pinned(0);

fn gpu_of(domain: &Domain, ordinal: usize) -> Arc<Gpu> {
    domain.gpu(gpu::devices().unwrap()[ordinal].uuid().unwrap()).unwrap()
}

fn on(gpu: &Gpu) -> Place {
    Place::Gpu(gpu.uuid())
}

/// Commits three tensors with gaps between them, and metadata, in two chunks.
fn weights(domain: &Domain, name: &str, place: Place) -> Segment {
    let builder = domain.create(name, place).tensor("a", DType::U8, &[3]).tensor("empty", DType::F32, &[0, 4]);
    let builder = builder.tensor("b", DType::U32, &[7, 11]).tensor("c", DType::U16, &[1 << 20]);
    let mut build = builder.metadata("made by", "a test").chunk_bytes(1 << 20).kept(true).allocate().unwrap();
    for (tensor, bytes) in contents() {
        build.write(tensor, &bytes).unwrap();
    }
    build.commit().unwrap()
}

fn contents() -> [(&'static str, Vec<u8>); 3] {
    let noise = |count: usize, seed: usize| (0..count).map(|index| (index * 7 + seed + (index >> 8)) as u8).collect();
    [("a", noise(3, 1)), ("b", noise(4 * 77, 2)), ("c", noise(2 << 20, 3))]
}

#[track_caller]
fn assert_same(segment: &Segment) {
    for (tensor, bytes) in contents() {
        assert!(segment.tensor(tensor).unwrap().to_vec().unwrap() == bytes, "{tensor} of {segment:?}");
    }
    let metadata: Vec<_> = segment.metadata().collect();
    assert_eq!((segment.len(), metadata), (4, vec![("made by", "a test")]));
}

/// Returns the error of copying.
#[track_caller]
fn refused<T>(copied: partywall::Result<T>) -> Error {
    copied.map(drop).unwrap_err()
}

#[test]
fn gpu_copies_from_and_to_pinned_memory_and_itself() {
    simulated("gpu_copies_from_and_to_pinned_memory_and_itself", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let stream = Stream::new(gpu.context()).unwrap();
        let pinned = weights(&domain, "llm", NODE);
        let copies = Driver::load().unwrap().copies();
        // A call for each chunk: two of the source, and one of each copy. Each commit waits for its copies.
        let on_gpu = pinned.to("on-a-gpu", on(&gpu), stream.as_ref()).unwrap().commit().unwrap();
        let beside = on_gpu.to("beside", on(&gpu), stream.as_ref()).unwrap().commit().unwrap();
        let back = beside.to("back", NODE, stream.as_ref()).unwrap().commit().unwrap();
        assert_eq!((pinned.fd_numbers().len(), on_gpu.fd_numbers().len()), (2, 1));
        assert_eq!(Driver::load().unwrap().copies() - copies, 2 + 1 + 1);
        for segment in [&on_gpu, &beside, &back] {
            assert_same(segment);
        }
        assert!(back.tensor("c").unwrap().as_slice::<u16>().is_ok(), "frozen, for the CPU as well");
    });
}

#[test]
fn commit_waits_for_the_copy() {
    simulated("commit_waits_for_the_copy", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let gate = domain.timeline_writer("gate").unwrap();
        for (round, from, to) in [(1, NODE, on(&gpu)), (2, on(&gpu), NODE)] {
            let source = weights(&domain, "llm", from);
            domain.timeline("gate").unwrap().wait_on(gpu.stream(), round).unwrap();
            let build = source.to("copy", to, gpu.stream()).unwrap();
            let is_open = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // Longer than a commit that does not wait. A slow machine can only hide a mistake.
                    std::thread::sleep(Duration::from_millis(50));
                    is_open.store(true, Ordering::SeqCst);
                    gate.signal(round).unwrap();
                });
                let copy = build.commit().unwrap();
                assert!(is_open.load(Ordering::SeqCst), "the stream has not copied");
                assert_same(&copy);
            });
        }
    });
}

#[test]
fn pinned_memory_is_copied_by_any_gpu() {
    simulated("pinned_memory_is_copied_by_any_gpu", |world| {
        let domain = world.connect();
        // The domain's GPU is the first one.
        let [first, second] = [0, 1].map(|ordinal| gpu_of(&domain, ordinal));
        let pinned = weights(&domain, "llm", NODE);
        let on_second = pinned.to("second", on(&second), second.stream()).unwrap().commit().unwrap();
        assert_same(&on_second);
        let back = on_second.to("back", NODE, second.stream()).unwrap().commit().unwrap();
        assert_same(&back);
        let wrong = refused(on_second.to("third", on(&first), first.stream()));
        assert!(matches!(wrong, Error::InvalidArgument(InvalidArgument::Range { .. })), "{wrong}");
        let wrong = refused(pinned.to("third", on(&first), second.stream()));
        assert!(matches!(wrong, Error::InvalidArgument(InvalidArgument::Range { .. })), "{wrong}");
    });
}

#[test]
fn host_memory_is_copied_once_it_is_pinned() {
    simulated("host_memory_is_copied_once_it_is_pinned", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let host = weights(&domain, "llm", Place::Host);
        let unpinned = refused(host.to("on-a-gpu", on(&gpu), gpu.stream()));
        assert!(matches!(unpinned, Error::Mismatch(Mismatch::Kind { wanted: "pinned or GPU", .. })), "{unpinned}");
        let pin = host.pin(&gpu).unwrap();
        let on_gpu = host.to("on-a-gpu", on(&gpu), gpu.stream()).unwrap().commit().unwrap();
        drop(pin);
        assert_same(&on_gpu);
        assert!(unpinned.to_string().contains("\"llm\"") && unpinned.advice().contains("pin it first"), "{unpinned}");
        // A new version in host memory cannot be pinned before it is committed.
        let mut build = domain.create("back", Place::Host).like(&on_gpu).allocate().unwrap();
        let by_build = refused(build.copy_from(&on_gpu, gpu.stream()));
        for unpinned in [refused(on_gpu.to("back", Place::Host, gpu.stream())), by_build] {
            assert!(matches!(unpinned, Error::Mismatch(Mismatch::HostTarget { .. })), "{unpinned}");
            assert!(
                unpinned.to_string().contains("\"back\"") && unpinned.advice().contains("Put::segment"),
                "{unpinned}"
            );
        }
        assert_same(&domain.put("back", Place::Host).segment(&on_gpu).unwrap());
        drop(build);

        let target = domain.create("target", Place::Host).like(&host).mutable(true).allocate().unwrap();
        let target = target.commit().unwrap();
        let pin = target.pin(&gpu).unwrap();
        target.copy_from(&on_gpu, gpu.stream()).unwrap();
        gpu.stream().synchronize().unwrap();
        assert_same(&target);
        let also = host.pin(&gpu).unwrap();
        let both = refused(target.copy_from(&host, gpu.stream()));
        assert!(matches!(both, Error::Mismatch(Mismatch::HostTarget { .. })), "{both}");
        drop((pin, also));
        assert!(matches!(refused(target.copy_from(&on_gpu, gpu.stream())), Error::Mismatch(Mismatch::Kind { .. })));
    });
}

#[test]
fn copy_needs_the_same_tensors_and_a_writable_target() {
    simulated("copy_needs_the_same_tensors_and_a_writable_target", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let source = weights(&domain, "llm", NODE);
        let build = domain.create("other", on(&gpu)).tensor("a", DType::U8, &[3]).mutable(true);
        let mut build = build.allocate().unwrap();
        let other = refused(build.copy_from(&source, gpu.stream()));
        assert_eq!(
            other.to_string(),
            "the tensors of \"other\" are not those of \"llm\": one has 4 tensors, the other 1"
        );
        let segment = build.commit().unwrap();
        assert!(matches!(refused(segment.copy_from(&source, gpu.stream())), Error::Mismatch(Mismatch::Tensors { .. })));

        // In one chunk, where the source has two.
        let target = domain.create("target", on(&gpu)).like(&source).mutable(true).allocate().unwrap();
        let target = target.commit().unwrap();
        let copies = Driver::load().unwrap().copies();
        target.copy_from(&source, gpu.stream()).unwrap();
        assert_eq!(Driver::load().unwrap().copies() - copies, 2);
        gpu.stream().synchronize().unwrap();
        assert_same(&target);
        let reader = domain.open("target", Duration::ZERO).unwrap();
        assert!(matches!(refused(reader.copy_from(&source, gpu.stream())), Error::Denied(Denied::ReadOnly { .. })));
    });
}

// Holds 88.
#[test]
fn put_copies_a_segment_between_any_places() {
    simulated("put_copies_a_segment_between_any_places", |world| {
        let domain = world.connect();
        let [first, second] = [0, 1].map(|ordinal| gpu_of(&domain, ordinal));
        let places = [Place::Host, NODE, Place::Pinned(1), on(&first), on(&second)];
        for from in places {
            let source = weights(&domain, "source", from);
            for to in places {
                let copied = AtomicU64::new(0);
                let add = |bytes| {
                    copied.fetch_add(bytes, Ordering::Relaxed);
                };
                let copy = domain.put("copy", to).kept(true).threads(3).progress(&add).segment(&source).unwrap();
                assert_same(&copy);
                assert!(copy.is_kept() && copy.place() == to);
                assert!(copied.load(Ordering::Relaxed) >= 2 << 20, "{from} to {to}");
            }
        }
    });
}

#[test]
fn put_copies_a_segment_that_is_used_on_another_gpu() {
    simulated("put_copies_a_segment_that_is_used_on_another_gpu", |world| {
        let domain = world.connect();
        let [first, second] = [0, 1].map(|ordinal| gpu_of(&domain, ordinal));
        let _source = weights(&domain, "source", on(&first));
        let source = domain.opener("source").device(second.uuid()).allow_peer(true).open().unwrap();
        for to in [Place::Host, NODE, on(&first), on(&second)] {
            assert_same(&domain.put("copy", to).kept(true).segment(&source).unwrap());
        }
    });
}

#[test]
fn copy_by_a_gpu_is_cancelled_before_it_is_visible() {
    simulated("copy_by_a_gpu_is_cancelled_before_it_is_visible", |world| {
        let domain = world.connect();
        let gpu = gpu_of(&domain, 0);
        let source = weights(&domain, "llm", NODE);
        let copies = Driver::load().unwrap().copies();
        // Before the copy, and after it.
        for begins_cancelled in [true, false] {
            let cancel = AtomicBool::new(begins_cancelled);
            let copied = |_| cancel.store(true, Ordering::Relaxed);
            let put = domain.put("copy", on(&gpu)).cancel(&cancel).progress(&copied);
            let cancelled = refused(put.segment(&source));
            assert!(matches!(&cancelled, Error::File(error) if matches!(error.problem, FileProblem::Cancelled)));
            assert_eq!(Driver::load().unwrap().copies() == copies, begins_cancelled);
        }
        assert_eq!(refused(domain.open("copy", Duration::ZERO)).kind(), partywall::ErrorKind::NotFound);
    });
}

#[test]
fn cancelled_or_impossible_put_leaves_nothing() {
    simulated("cancelled_or_impossible_put_leaves_nothing", |world| {
        let domain = world.connect();
        let source = weights(&domain, "llm", Place::Host);
        let cancel = AtomicBool::new(true);
        let cancelled = refused(domain.put("copy", NODE).cancel(&cancel).segment(&source));
        assert!(matches!(&cancelled, Error::File(error) if matches!(error.problem, FileProblem::Cancelled)));
        let big = domain.create("big", Place::Host).tensor("x", DType::U8, &[2 << 30]).allocate().unwrap();
        let big = big.commit().unwrap();
        let full = refused(domain.put("copy", NODE).segment(&big));
        assert!(matches!(full, Error::LimitReached(LimitReached::Memory { .. })), "{full}");
        let exists = refused(domain.put("llm", NODE).if_absent(true).segment(&source));
        assert!(matches!(exists, Error::Denied(Denied::NameExists { .. })), "{exists}");
        assert_eq!(refused(domain.open("copy", Duration::ZERO)).kind(), partywall::ErrorKind::NotFound);
    });
}
