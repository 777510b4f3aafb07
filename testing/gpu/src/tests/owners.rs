//! The owning types of `partywall-cuda` on a real device, as far as one process can test them.
#![allow(clippy::unwrap_used)] // a test fails by a panic

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use partywall_cuda::{
    Access, AccessError, Context, CuResult, Device, DeviceBuffer, Driver, DriverVersion, Event, Kernels, Mapping,
    MemoryPlace, PhysicalMemory, PinnedBuffer, Stream, StreamRef, kernels, round_up,
};

const MIB: u64 = 1 << 20;

fn context() -> Context {
    let driver = Driver::load().unwrap();
    Context::retain(Device::by_ordinal(driver, 0).unwrap()).unwrap()
}

fn memory(context: &Context, bytes: u64) -> PhysicalMemory {
    let granularity = PhysicalMemory::granularity(context).unwrap();
    PhysicalMemory::create(context, round_up(bytes, granularity).unwrap()).unwrap()
}

pub(crate) fn device_reports_its_properties() -> Result<(), String> {
    let driver = Driver::load().unwrap();
    assert!(driver.version().unwrap() >= DriverVersion { major: 12, minor: 4 });
    let device = Device::by_ordinal(driver, 0).unwrap();
    let name = device.name().unwrap();
    assert!(name.contains("NVIDIA") || name == "Simulated GPU", "{name}");
    assert!(device.compute_capability().unwrap() >= (7, 0));
    assert!(device.total_memory().unwrap() >= 1 << 30);
    assert!(device.supports_vmm().unwrap() && device.supports_posix_fd().unwrap());
    assert!(device.can_access_peer(&device).unwrap());
    let again = Device::by_uuid(driver, device.uuid().unwrap()).unwrap().unwrap();
    assert_eq!(again.ordinal(), 0);
    assert_eq!(Device::by_ordinal(driver, 4096).unwrap_err().code, CuResult::INVALID_DEVICE);
    assert!(CuResult::OUT_OF_MEMORY.description().is_some());
    let context = Context::retain(device).unwrap();
    assert!(device.primary_context_active().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(Device::current(driver).unwrap().is_none());
            context.make_current().unwrap();
            assert_eq!(Device::current(driver).unwrap().unwrap().ordinal(), 0);
        });
    });
    let memory = context.memory_info().unwrap();
    assert!(memory.free > 0 && memory.free <= memory.total);
    Ok(())
}

pub(crate) fn an_import_is_the_same_memory() -> Result<(), String> {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    let stream = Stream::new(&context).unwrap();
    let ours = Mapping::new(memory(&context, 64 * MIB), Access::ReadWrite).unwrap();
    let theirs = {
        let descriptor = ours.memory().export().unwrap();
        let imported = PhysicalMemory::import(&context, descriptor.as_fd(), ours.len()).unwrap();
        assert_eq!(imported.place().unwrap(), MemoryPlace::Device(0));
        assert_eq!(imported.export().unwrap_err().code, CuResult::INVALID_VALUE);
        Mapping::new(imported, Access::ReadOnly).unwrap()
    };
    assert_ne!(ours.device_ptr(), theirs.device_ptr());

    kernels.enqueue_fill(stream.as_ref(), ours.as_slice()).unwrap();
    assert_eq!(kernels.verify(stream.as_ref(), theirs.as_slice(), 1).unwrap(), None);
    kernels.enqueue_double(stream.as_ref(), ours.as_slice()).unwrap();
    assert_eq!(kernels.verify(stream.as_ref(), theirs.as_slice(), 2).unwrap(), None);
    assert_eq!(kernels.verify(stream.as_ref(), theirs.as_slice(), 1).unwrap(), Some(0));

    let word = 12_345_678_u64;
    stream.as_ref().copy_from_host(ours.slice(word * 4, 4).unwrap(), &[1, 2, 3, 4]).unwrap();
    assert_eq!(kernels.verify(stream.as_ref(), theirs.as_slice(), 2).unwrap(), Some(word));

    let mut bytes = [0; 8];
    stream.as_ref().copy_to_host(&mut bytes, theirs.slice((word - 1) * 4, 8).unwrap()).unwrap();
    assert_eq!(bytes[..4], kernels::expected(word - 1).wrapping_mul(2).to_ne_bytes());
    assert_eq!(bytes[4..], [1, 2, 3, 4]);
    assert_eq!(kernels.enqueue_fill(stream.as_ref(), theirs.as_slice()), Err(AccessError::ReadOnly));

    // The creator's mapping and handle may be dropped first.
    drop(ours);
    assert_eq!(kernels.verify(stream.as_ref(), theirs.as_slice(), 2).unwrap(), Some(word));
    theirs.close().unwrap();
    assert_eq!(context.take_drop_error(), None);
    Ok(())
}

pub(crate) fn memory_comes_back() -> Result<(), String> {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    // All of them together are far more than the device has.
    let bytes = context.memory_info().unwrap().total / 16;
    for _ in 0..100 {
        let mapping = Mapping::new(memory(&context, bytes), Access::ReadWrite).unwrap();
        let descriptor = mapping.memory().export().unwrap();
        let imported = PhysicalMemory::import(&context, descriptor.as_fd(), mapping.len()).unwrap();
        let second = Mapping::new(imported, Access::ReadOnly).unwrap();
        // Only part of the memory is written, because a simulated GPU uses a page of host memory for each written page.
        stream.as_ref().enqueue_set(mapping.slice(0, 4 * MIB).unwrap(), 7).unwrap();
        stream.synchronize().unwrap();
        drop((mapping, second));
    }
    assert_eq!(context.take_drop_error(), None);
    Ok(())
}

pub(crate) fn a_refusal_says_why() -> Result<(), String> {
    let context = context();
    let too_much = PhysicalMemory::create(&context, 1 << 45).unwrap_err();
    assert_eq!(too_much.code, CuResult::OUT_OF_MEMORY);
    assert!(too_much.memory.is_some_and(|memory| memory.total > 0));
    assert_eq!(PhysicalMemory::create(&context, 4096).unwrap_err().code, CuResult::INVALID_VALUE);

    let memory = memory(&context, 4 * MIB);
    let descriptor = memory.export().unwrap();
    let wrong = PhysicalMemory::import(&context, descriptor.as_fd(), 2 * MIB)
        .and_then(|part| Mapping::new(part, Access::ReadOnly));
    assert!(wrong.is_err(), "a part of an allocation cannot be mapped");
    let wrong = PhysicalMemory::import(&context, descriptor.as_fd(), 8 * MIB)
        .and_then(|more| Mapping::new(more, Access::ReadOnly));
    assert!(wrong.is_err(), "more than the allocation cannot be mapped");
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(PhysicalMemory::import(&context, file.as_fd(), 2 * MIB).is_err());
    assert_eq!(context.take_drop_error(), None);
    Ok(())
}

pub(crate) fn any_thread_works_and_keeps_its_own_context() -> Result<(), String> {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let stream = Stream::new(&context).unwrap();
                let buffer = DeviceBuffer::new(&context, MIB).unwrap();
                for _ in 0..20 {
                    kernels.enqueue_fill(stream.as_ref(), buffer.as_slice()).unwrap();
                    assert_eq!(kernels.verify(stream.as_ref(), buffer.as_slice(), 1).unwrap(), None);
                }
                drop((stream, buffer));
                assert!(Device::current(context.driver()).unwrap().is_none());
            });
        }
    });
    assert_eq!(context.take_drop_error(), None);
    Ok(())
}

pub(crate) fn copies_and_times() -> Result<(), String> {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    let stream = StreamRef::legacy_default(&context);
    let mut host = PinnedBuffer::new(&context, MIB).unwrap();
    for (index, byte) in host.iter_mut().enumerate() {
        *byte = index as u8;
    }
    let first = DeviceBuffer::new(&context, MIB).unwrap();
    let second = DeviceBuffer::new(&context, MIB).unwrap();
    stream.copy_from_host(first.as_slice(), &host).unwrap();
    stream.enqueue_copy(second.as_slice(), first.as_slice()).unwrap();
    let mut back = vec![0; host.len()];
    stream.copy_to_host(&mut back, second.as_slice()).unwrap();
    assert_eq!(back, &host[..]);
    assert!(!stream.is_capturing().unwrap() && stream.is_done().unwrap());

    let large = Mapping::new(memory(&context, 256 * MIB), Access::ReadWrite).unwrap();
    let start = Event::new(&context).unwrap();
    let end = Event::new(&context).unwrap();
    kernels.enqueue_read(stream, large.as_slice()).unwrap();
    start.record(stream).unwrap();
    kernels.enqueue_read(stream, large.as_slice()).unwrap();
    end.record(stream).unwrap();
    end.synchronize().unwrap();
    assert!(end.elapsed_since(&start).unwrap() > Duration::ZERO);
    Ok(())
}
