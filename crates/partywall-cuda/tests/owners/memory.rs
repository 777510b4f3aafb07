//! Memory, mappings and modules: everything is freed, whichever call fails.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use partywall_cuda::{
    Access, AccessError, Context, CuResult, Device, DeviceBuffer, DeviceUuid, Event, Kernels, Mapping, MemoryPlace,
    Module, PhysicalMemory, PinnedBuffer, ReplaceError, Stream, StreamRef,
};

use crate::{GRANULARITY, call_of, is_failed, on_the_simulated_gpu, while_capturing};

#[test]
fn devices_are_found_by_their_identity_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let driver = context.driver();
        assert!(driver.is_simulated());
        let all = Device::all(driver).unwrap();
        assert_eq!(all.iter().map(Device::ordinal).collect::<Vec<_>>(), [0, 1]);
        let second = Device::by_uuid(driver, all[1].uuid().unwrap()).unwrap().unwrap();
        assert_eq!((second.ordinal(), second.name().unwrap().as_str()), (1, "Simulated GPU"));
        assert!(Device::by_uuid(driver, DeviceUuid([9; 16])).unwrap().is_none());
        assert!(second.supports_vmm().unwrap() && second.supports_posix_fd().unwrap());
        assert_eq!(Device::by_ordinal(driver, 2).unwrap_err().code, CuResult::INVALID_DEVICE);
        assert_eq!(
            Device::by_ordinal(driver, u32::MAX).unwrap_err().to_string(),
            "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101): device 4294967295"
        );
    });
}

#[test]
fn all_memory_is_freed_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let memory = PhysicalMemory::create(context, GRANULARITY).unwrap();
        let mapping = Mapping::new(memory, Access::ReadOnly).unwrap();
        let again = Mapping::new(mapping.memory().clone(), Access::ReadWrite).unwrap();
        let descriptor = mapping.memory().export().unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&descriptor).unwrap(), rustix::io::FdFlags::CLOEXEC);
        let imported = PhysicalMemory::import(context, descriptor.as_fd(), GRANULARITY).unwrap();
        assert!(imported.is_imported());
        assert_eq!(imported.place().unwrap(), MemoryPlace::Device(0));
        let owners = (Stream::new(context).unwrap(), Event::new(context).unwrap());
        let buffers = (DeviceBuffer::new(context, 64).unwrap(), PinnedBuffer::new(context, 64).unwrap());
        again.close().unwrap();
        drop((mapping, imported, owners, buffers));
    });
}

#[test]
fn failed_mapping_leaves_nothing_on_the_simulated_gpu() {
    let steps = ["cuMemCreate:1=999", "cuMemAddressReserve:1=999", "cuMemMap:1=999", "cuMemSetAccess:1=999"];
    on_the_simulated_gpu(&steps, &[], |context, step| {
        let memory = PhysicalMemory::create(context, GRANULARITY);
        let error = memory.and_then(|memory| Mapping::new(memory, Access::ReadWrite)).unwrap_err();
        assert!(is_failed(&error, call_of(step), CuResult::UNKNOWN), "{error}");
    });
}

#[test]
fn memory_is_mapped_contiguously_or_not_at_all_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuMemMap:2=2", "cuMemSetAccess:2=2"], &[], |context, step| {
        let memory = || PhysicalMemory::create(context, GRANULARITY).unwrap();
        let mapping = Mapping::with_reservation(memory(), Access::ReadWrite, 4 * GRANULARITY).unwrap();
        let before = mapping.as_slice();
        let failed = mapping.extend([memory()]).map(drop);
        assert!(matches!(&failed, Err(AccessError::Driver(error)) if error.call == call_of(step)), "{failed:?}");
        assert_eq!((mapping.len(), mapping.reserved()), (GRANULARITY, 4 * GRANULARITY));
        mapping.extend([memory(), memory()]).unwrap().publish();
        assert_eq!((mapping.len(), before.len()), (3 * GRANULARITY, GRANULARITY));

        let across = mapping.slice(GRANULARITY - 4, 8).unwrap();
        assert_eq!(across.device_ptr(), before.device_ptr() + GRANULARITY - 4);
        let stream = Stream::new(context).unwrap();
        stream.as_ref().copy_from_host(across, &[7; 8]).unwrap();
        let mut bytes = [0; 8];
        stream.as_ref().copy_to_host(&mut bytes, across).unwrap();
        assert_eq!(bytes, [7; 8]);

        // The first one fits. The second does not, and the first is then unmapped again.
        let refused = mapping.extend([memory(), memory()]).unwrap_err();
        let offset = 4 * GRANULARITY;
        let available = 4 * GRANULARITY;
        assert_eq!(refused, AccessError::OutOfRange { offset, len: GRANULARITY, available });
        drop(mapping.extend([memory()]).unwrap());
        assert_eq!(mapping.len(), 3 * GRANULARITY);
        mapping.close().unwrap();
    });
}

/// Runs a replacement in which the first two mappings are the memories' own, so that `cuMemMap:3` maps the new memory.
fn replacement(context: &Context, check: impl FnOnce(&mut Mapping, Result<u8, ReplaceError>, u64)) {
    let stream = Stream::new(context).unwrap();
    let filled = |byte: u8| {
        let mapping = Mapping::new(PhysicalMemory::create(context, GRANULARITY).unwrap(), Access::ReadWrite).unwrap();
        stream.as_ref().copy_from_host(mapping.slice(0, 1).unwrap(), &[byte]).unwrap();
        mapping
    };
    let mut mapping = filled(1);
    let other = filled(2);
    let address = mapping.device_ptr();
    let replaced = mapping.replace(other.memory()).map(|_| 2);
    drop(other);
    check(&mut mapping, replaced, address);
}

fn first_byte(mapping: &Mapping) -> u8 {
    let mut byte = [0];
    Stream::new(mapping.context()).unwrap().as_ref().copy_to_host(&mut byte, mapping.slice(0, 1).unwrap()).unwrap();
    byte[0]
}

// Holds 272.
#[test]
fn replaced_memory_keeps_its_address_or_stays_on_the_simulated_gpu() {
    let steps = ["", "cuMemUnmap:1=999", "cuMemMap:3=999", "cuMemSetAccess:3=999"];
    on_the_simulated_gpu(&steps, &[], |context, step| {
        replacement(context, |mapping, replaced, address| {
            let shown = match replaced {
                Ok(new) => {
                    assert_eq!(step, "");
                    new
                }
                Err(ReplaceError { source, lost: None }) => {
                    assert!(is_failed(&source, call_of(step), CuResult::UNKNOWN), "{source}");
                    1
                }
                Err(error) => panic!("{error:?}"),
            };
            assert_eq!((first_byte(mapping), mapping.device_ptr()), (shown, address));
            // Replaced again, and back.
            let other = Arc::new(PhysicalMemory::create(context, GRANULARITY).unwrap());
            let former = mapping.replace(&other).unwrap();
            assert_eq!(first_byte(mapping), 0);
            mapping.replace(&former).unwrap();
            assert_eq!((first_byte(mapping), mapping.device_ptr()), (shown, address));
        });
    });
}

// Holds 272.
#[test]
fn memory_that_cannot_be_mapped_again_is_lost_on_the_simulated_gpu() {
    let steps = ["cuMemMap:3=999,cuMemMap:4=2", "cuMemMap:3=999,cuMemSetAccess:3=2"];
    on_the_simulated_gpu(&steps, &[], |context, _| {
        replacement(context, |mapping, replaced, address| {
            let error = replaced.unwrap_err();
            assert_eq!(error.to_string(), "cannot map other memory in place, nor the former memory again");
            let ReplaceError { source, lost } = error;
            assert!(is_failed(&source, "cuMemMap", CuResult::UNKNOWN), "{source}");
            assert_eq!(lost.map(|error| error.code), Some(CuResult::OUT_OF_MEMORY));
            assert_eq!((mapping.len(), mapping.is_empty(), mapping.device_ptr()), (0, true, address));
            assert!(matches!(mapping.slice(0, 1), Err(AccessError::OutOfRange { available: 0, .. })));
            let another =
                Mapping::new(PhysicalMemory::create(context, GRANULARITY).unwrap(), Access::ReadOnly).unwrap();
            assert_ne!(another.device_ptr(), address, "the addresses stay reserved");
            // A later replacement ends the loss.
            let next = Arc::new(PhysicalMemory::create(context, GRANULARITY).unwrap());
            let former = mapping.replace(&next).unwrap();
            assert_eq!((mapping.len(), mapping.device_ptr(), first_byte(mapping)), (GRANULARITY, address, 0));
            mapping.replace(&former).unwrap();
            assert_eq!(first_byte(mapping), 1);
        });
    });
}

#[test]
fn memory_of_another_size_or_context_replaces_nothing_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let memory = |bytes| Arc::new(PhysicalMemory::create(context, bytes).unwrap());
        let mut mapping = Mapping::with_reservation(memory(GRANULARITY), Access::ReadOnly, 4 * GRANULARITY).unwrap();
        let error = mapping.replace(&memory(2 * GRANULARITY)).unwrap_err();
        assert!(is_failed(&error.source, "cuMemMap", CuResult::INVALID_VALUE) && error.lost.is_none(), "{error:?}");
        let second = Context::retain(Device::by_ordinal(context.driver(), 1).unwrap()).unwrap();
        let error = mapping.replace(&Arc::new(PhysicalMemory::create(&second, GRANULARITY).unwrap())).unwrap_err();
        assert!(is_failed(&error.source, "cuMemMap", CuResult::INVALID_CONTEXT) && error.lost.is_none(), "{error:?}");
        mapping.extend([memory(GRANULARITY)]).unwrap().publish();
        let error = mapping.replace(&memory(GRANULARITY)).unwrap_err();
        assert!(is_failed(&error.source, "cuMemMap", CuResult::NOT_SUPPORTED) && error.lost.is_none(), "{error:?}");
        assert_eq!(mapping.len(), 2 * GRANULARITY);
    });
}

#[test]
fn mapping_without_a_reservation_works_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let memory = PhysicalMemory::create(context, GRANULARITY).unwrap();
        let mapping = Mapping::with_reservation(memory, Access::ReadOnly, 1 << 50).unwrap();
        assert_eq!(mapping.reserved(), GRANULARITY);
    });
}

#[test]
fn every_step_of_loading_the_kernels_may_fail_on_the_simulated_gpu() {
    let steps = [
        "cuModuleLoadData:1=2",
        "cuModuleGetFunction:4=2",
        "cuMemAlloc:1=2",
        "cuMemHostAlloc:1=2",
        "cuStreamCreate:1=2",
        "cuLaunchKernel:4=2",
        "cuMemsetD8Async:1=2",
        "cuMemcpyDtoHAsync:1=2",
        "cuStreamSynchronize:1=2",
    ];
    on_the_simulated_gpu(&steps, &[], |context, step| {
        let error = Kernels::load(context).unwrap_err();
        assert!(is_failed(&error, call_of(step), CuResult::OUT_OF_MEMORY), "{error}");
        Kernels::load(context).unwrap();
    });
}

#[test]
fn drop_waits_again_if_its_first_wait_fails_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuCtxSynchronize:1=999,cuCtxSynchronize:3=999"], &[], |context, _| {
        let mapping = Mapping::new(PhysicalMemory::create(context, GRANULARITY).unwrap(), Access::ReadWrite).unwrap();
        let _ = mapping.device_ptr();
        drop(mapping);
        assert!(is_failed(&context.take_drop_error().unwrap(), "cuCtxSynchronize", CuResult::UNKNOWN));
        assert!(context.synchronize().is_err(), "its first call is the third");
    });
}

#[test]
fn failed_drop_is_reported_once_without_panic_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuMemUnmap:1=700,cuMemUnmap:2=700"], &[], |context, _| {
        let map = || Mapping::new(PhysicalMemory::create(context, GRANULARITY).unwrap(), Access::ReadWrite).unwrap();
        drop(map());
        let error = context.take_drop_error().unwrap();
        assert_eq!(error.to_string(), "cuMemUnmap failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        assert!(error.is_sticky());
        assert_eq!(context.take_drop_error(), None);
        assert_eq!(map().close().unwrap_err().code, CuResult::ILLEGAL_ADDRESS);
    });
}

#[test]
fn out_of_memory_error_states_the_total_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let error = PhysicalMemory::create(context, 1 << 40).unwrap_err();
        assert_eq!(error.memory, Some(context.memory_info().unwrap()));
        assert_eq!(
            error.to_string(),
            "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2): 1099511627776 bytes on device 0 (1073741824 of \
             1073741824 bytes are free)"
        );
        assert_eq!(PhysicalMemory::create(context, 4096).unwrap_err().code, CuResult::INVALID_VALUE);
        assert_eq!(DeviceBuffer::new(context, 0).unwrap_err().code, CuResult::INVALID_VALUE);
    });
}

#[test]
fn sharing_calls_do_not_invalidate_captures_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let stream = Stream::new(context).unwrap();
        let whole = while_capturing(context, &stream, || {
            let memory = PhysicalMemory::create(context, GRANULARITY).unwrap();
            let descriptor = memory.export().unwrap();
            drop(PhysicalMemory::import(context, descriptor.as_fd(), GRANULARITY).unwrap());
            drop(Mapping::new(memory, Access::ReadWrite).unwrap());
        });
        assert!(whole);
    });
}

#[test]
fn driver_without_capture_modes_works_on_the_simulated_gpu() {
    let missing = "cuThreadExchangeStreamCaptureMode:1=500,cuThreadExchangeStreamCaptureMode:2=500";
    on_the_simulated_gpu(&[missing], &[], |context, _| {
        drop(PhysicalMemory::create(context, GRANULARITY).unwrap());
    });
}

#[test]
fn refused_access_change_keeps_the_former_access_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuMemSetAccess:2=1"], &[], |context, _| {
        let memory = PhysicalMemory::create(context, GRANULARITY).unwrap();
        let mut mapping = Mapping::new(memory, Access::ReadWrite).unwrap();
        mapping.set_access(Access::ReadOnly).unwrap_err();
        assert_eq!(mapping.access(), Access::ReadWrite);
        let stream = StreamRef::legacy_default(context);
        stream.copy_from_host(mapping.slice(0, 4).unwrap(), &[1; 4]).unwrap();
        mapping.set_access(Access::ReadOnly).unwrap();
        let slice = mapping.slice(0, 4).unwrap();
        assert_eq!(stream.copy_from_host(slice, &[0; 4]), Err(AccessError::ReadOnly));
        assert_eq!(stream.enqueue_set(slice, 0), Err(AccessError::ReadOnly));
        assert!(matches!(mapping.slice(1, GRANULARITY), Err(AccessError::OutOfRange { .. })));
        assert_eq!(mapping.slice(4096, 16).unwrap().device_ptr(), mapping.device_ptr() + 4096);
    });
}

#[test]
fn page_locked_memory_begins_as_zero_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let mut buffer = PinnedBuffer::new(context, 16).unwrap();
        assert_eq!(&buffer[..], [0; 16]);
        buffer[3] = 7;
        assert_eq!(buffer.iter().sum::<u8>(), 7);
    });
}

#[test]
fn time_does_not_run_backwards_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let earlier = Event::new(context).unwrap();
        let later = Event::new(context).unwrap();
        let stream = StreamRef::legacy_default(context);
        for event in [&earlier, &later] {
            event.record(stream).unwrap();
            event.synchronize().unwrap();
        }
        assert!(later.elapsed_since(&earlier).unwrap() > Duration::ZERO);
        assert_eq!(earlier.elapsed_since(&later), Ok(Duration::ZERO));
    });
}

#[test]
fn binary_images_are_not_taken_for_text_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let error = Module::from_ptx(context, c"\x7fELF\x02").unwrap_err();
        assert_eq!(error.code, CuResult::INVALID_IMAGE);
    });
}
