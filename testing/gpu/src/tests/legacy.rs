//! Memory that other code allocated, published between processes.

use std::{sync::Arc, time::Duration};

use partywall::{
    DType, Domain, Error, Gpu, Place, Segment,
    cuda::{Access, DeviceBuffer, ForeignMemory, Mapping, PhysicalMemory, PinnedBuffer, PointerKind},
    error::{DeviceFault, Gone},
};

use super::world::{TIMEOUT, World, ensure, error_text, first_gpu, ready_and_wait};

/// Large enough to share no block of the driver with another allocation.
const BYTES: u64 = 4 << 20;

/// The roles that this module's tests give to other processes.
pub(crate) fn play(role: &str) -> Result<(), String> {
    let domain = Domain::options().start(false).connect().map_err(error_text)?;
    match role {
        "legacy_publish" => {
            let _published = publish(&domain)?;
            ready_and_wait();
            Ok(())
        }
        other => Err(format!("unknown role {other:?}")),
    }
}

fn gpu(domain: &Domain) -> Result<Arc<Gpu>, String> {
    let Place::Gpu(uuid) = first_gpu()? else { return Err("no GPU".into()) };
    domain.gpu(uuid).map_err(error_text)
}

fn publish(domain: &Domain) -> Result<Segment, String> {
    let gpu = gpu(domain)?;
    let buffer = Arc::new(DeviceBuffer::new(gpu.context(), BYTES).map_err(error_text)?);
    gpu.kernels().map_err(error_text)?.enqueue_fill(gpu.stream(), buffer.as_slice()).map_err(error_text)?;
    let memory = ForeignMemory::try_from(buffer).map_err(error_text)?;
    domain.publish("test/legacy").tensor("x", DType::U8, &[BYTES], &memory).commit().map_err(error_text)
}

fn address(segment: &Segment) -> Result<u64, String> {
    Ok(segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?.device_ptr())
}

fn verify(segment: &Segment) -> Result<(), String> {
    let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
    let gpu = range.gpu();
    match gpu.kernels().map_err(error_text)?.verify(gpu.stream(), range.as_slice(), 1).map_err(error_text)? {
        None => Ok(()),
        Some(index) => Err(format!("word {index} is wrong")),
    }
}

/// A second open shares the mapping of the first. Open memory stays readable when the publisher is killed. A new open
/// then reports the death.
pub(super) fn published_memory_goes_with_its_publisher() -> Result<(), String> {
    let world = World::new()?;
    let mut publisher = world.play("legacy_publish", &[]);
    let first = world.domain.open("test/legacy", TIMEOUT).map_err(error_text)?;
    verify(&first)?;
    let second = world.domain.open("test/legacy", TIMEOUT).map_err(error_text)?;
    let one = address(&first)?;
    let two = address(&second)?;
    ensure(one == two, || format!("it is mapped twice: {one:#x} and {two:#x}"))?;
    drop(first);
    publisher.kill();
    second.wait_withdrawn(TIMEOUT).map_err(error_text)?;
    verify(&second)?;
    drop(second);
    let refused = world.domain.open("test/legacy", Duration::ZERO);
    ensure(matches!(refused, Err(Error::Gone(Gone::OwnerDied { .. }))), || format!("{refused:?}"))
}

/// An open right after a kill, before the broker has proof, reports the death and no other error.
pub(super) fn race_with_death_is_named() -> Result<(), String> {
    let world = World::new()?;
    // Creates the context first, so that the open comes immediately.
    gpu(&world.domain)?;
    for _ in 0..5 {
        let mut publisher = world.play("legacy_publish", &[]);
        publisher.kill();
        let refused = world.domain.open("test/legacy", Duration::ZERO);
        ensure(matches!(refused, Err(Error::Gone(Gone::OwnerDied { .. }))), || format!("{refused:?}"))?;
    }
    Ok(())
}

/// Opening it in its own process returns the same addresses.
pub(super) fn published_memory_opens_where_it_was_made() -> Result<(), String> {
    let world = World::new()?;
    let published = publish(&world.domain)?;
    let opened = world.domain.open("test/legacy", Duration::ZERO).map_err(error_text)?;
    drop(published);
    verify(&opened)?;
    let refused = world.domain.open("test/legacy", Duration::ZERO);
    ensure(matches!(refused, Err(Error::Gone(Gone::Withdrawn { .. }))), || format!("{refused:?}"))
}

/// Memory that has no handle is refused by its kind, and some of it can be copied.
pub(super) fn memory_without_a_handle_is_refused_by_its_kind() -> Result<(), String> {
    let world = World::new()?;
    let gpu = gpu(&world.domain)?;
    let granularity = PhysicalMemory::granularity(gpu.context()).map_err(error_text)?;
    let vmm = PhysicalMemory::create(gpu.context(), granularity).map_err(error_text)?;
    let vmm = Mapping::new(vmm, Access::ReadWrite).map_err(error_text)?;
    gpu.kernels().map_err(error_text)?.enqueue_fill(gpu.stream(), vmm.as_slice()).map_err(error_text)?;
    let pinned = PinnedBuffer::new(gpu.context(), 4096).map_err(error_text)?;
    let plain = vec![0_u8; 4096];
    for (address, kind) in [
        (vmm.device_ptr(), PointerKind::Vmm),
        (pinned.as_ptr() as u64, PointerKind::Pinned),
        (plain.as_ptr() as u64, PointerKind::Unknown),
    ] {
        let memory = kept_by_the_test(&gpu, address)?;
        let refused = world.domain.publish("test/refused").tensor("x", DType::U8, &[16], &memory).commit();
        let as_it_is = matches!(&refused, Err(Error::DeviceFault(DeviceFault::NotShareable { kind: found, .. })) if *found == kind);
        ensure(as_it_is, || format!("{kind:?}: {refused:?}"))?;
    }
    let memory = kept_by_the_test(&gpu, vmm.device_ptr())?;
    let copy = world.domain.publish("test/copy").tensor("x", DType::U8, &[granularity], &memory);
    verify(&copy.commit_copy().map_err(error_text)?)
}

#[allow(unsafe_code)]
fn kept_by_the_test(gpu: &Gpu, address: u64) -> Result<ForeignMemory, String> {
    // SAFETY: the test frees the memory only after everything that uses it is dropped.
    unsafe { ForeignMemory::new(gpu.context(), address, Arc::new(())) }.map_err(error_text)
}
