// Holds 69.
//! Copies of memory that other code allocated, which no longer depend on that memory.

use std::time::Duration;

use partywall::{
    DType, Error, Place,
    cuda::{Access, Driver, ForeignMemory, Mapping, PhysicalMemory, PinnedBuffer, PointerKind},
    error::{DeviceFault, InvalidArgument},
    info::Enforcement,
};

use super::world::{TIMEOUT, buffer, gpu, kept_by_the_test, publication, simulated, value_of};

// Holds 87.
#[test]
fn copy_of_a_publication_leaves_its_neighbours_out_on_the_simulated_gpu() {
    simulated("copies::copy_of_a_publication_leaves_its_neighbours_out_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        // Two tensors at the distance that a new version has, too, with bytes of the program between them.
        let memory = buffer(&gpu, 512, 9);
        let second = kept_by_the_test(&gpu, memory.as_slice().device_ptr() + 256);
        let memory = ForeignMemory::try_from(memory).unwrap();
        let theirs = domain.publish("theirs").tensor("a", DType::U8, &[16], &memory);
        let theirs = theirs.tensor("b", DType::U8, &[16], &second).commit().unwrap();
        let place = Place::Gpu(gpu.uuid());
        let copies = Driver::load().unwrap().copies();
        let copy = theirs.to("copy", place, gpu.stream()).unwrap().commit().unwrap();
        assert_eq!(Driver::load().unwrap().copies() - copies, 2, "a copy for each tensor");
        let put = domain.put("put", Place::Host).kept(true).segment(&theirs).unwrap();
        for copy in [&copy, &put] {
            assert_eq!((value_of(copy, "a"), value_of(copy, "b")), (9, 9));
        }
        let a = put.tensor("a").unwrap().as_ptr().unwrap();
        // SAFETY: both tensors are in one chunk, which stays mapped.
        #[allow(unsafe_code)]
        let between = unsafe { std::slice::from_raw_parts(a.add(16), 240) };
        assert!(between.iter().all(|byte| *byte == 0), "{between:?}");
    });
}

#[test]
fn published_copy_survives_its_publisher_on_the_simulated_gpu() {
    simulated("copies::published_copy_survives_its_publisher_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let mut publisher = world.play("copier");
        publisher.kill();
        let opened = domain.open("copy", Duration::ZERO).unwrap();
        assert_eq!((opened.kind(), value_of(&opened, "x")), ("vmm", 6));
        let promises = opened.promises();
        assert_eq!(promises.read_only, Enforcement::Hardware);
        assert!(promises.outlives_publisher && promises.hides_neighbours);
    });
}

#[test]
fn published_copy_does_not_follow_later_writes_on_the_simulated_gpu() {
    simulated("copies::published_copy_does_not_follow_later_writes_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let granularity = PhysicalMemory::granularity(gpu.context()).unwrap();
        let original = PhysicalMemory::create(gpu.context(), granularity).unwrap();
        let original = Mapping::new(original, Access::ReadWrite).unwrap();
        gpu.stream().copy_from_host(original.slice(64, 64).unwrap(), &[4; 64]).unwrap();
        let memory = kept_by_the_test(&gpu, original.device_ptr() + 64);
        let copy = domain.publish("copy").tensor("t", DType::U8, &[64], &memory);
        let copy = copy.tensor("empty", DType::U8, &[0], &memory).commit_copy().unwrap();
        gpu.stream().copy_from_host(original.slice(64, 64).unwrap(), &[5; 64]).unwrap();
        assert_eq!(value_of(&copy, "t"), 4);

        let too_long = domain.publish("x").tensor("t", DType::U8, &[1 << 40], &memory).commit_copy();
        assert!(matches!(too_long, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), "{too_long:?}");
        let pinned = PinnedBuffer::new(gpu.context(), 64).unwrap();
        let pinned = kept_by_the_test(&gpu, pinned.as_ptr() as u64);
        let refused = domain.publish("x").tensor("t", DType::U8, &[64], &pinned).commit_copy();
        assert!(
            matches!(refused, Err(Error::DeviceFault(DeviceFault::NotShareable { kind: PointerKind::Pinned, .. }))),
            "{refused:?}"
        );

        let _publisher = world.play("publisher");
        let opened = domain.open("theirs", TIMEOUT).unwrap();
        let theirs = kept_by_the_test(&gpu, opened.tensor("x").unwrap().device().unwrap().device_ptr());
        let theirs = domain.publish("theirs-too").tensor("x", DType::U8, &[4096], &theirs).commit_copy().unwrap();
        assert_eq!(value_of(&theirs, "x"), 5, "what another process published");
        let kept = publication(&domain, "kept", 8).kept(true).commit_copy().unwrap();
        assert!(kept.is_kept());
        drop(kept);
        assert_eq!(value_of(&domain.open("kept", Duration::ZERO).unwrap(), "x"), 8);
    });
}
