//! Copies of memory that other code allocated, which no longer depend on that memory.

use std::time::Duration;

use partywall::{
    DType, Error,
    cuda::{Access, Mapping, PhysicalMemory, PinnedBuffer, PointerKind},
    error::{DeviceFault, InvalidArgument},
    info::Enforcement,
};

use super::world::{TIMEOUT, gpu, kept_by_the_test, publication, simulated, value_of};

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
