//! Handles, registrations and pointers on the functions above.

use std::sync::Arc;

use partywall_os::map::{SealedMap, SharedMap};
use partywall_os::memfd;

use super::*;
use crate::experiment::{UnshareableMemory, beyond, close_twice, event_handle, free_mapping, map_part};
use crate::{CudaError, HostRegistration, IpcMapping, IpcMemoryHandle, PointerInfo, PointerKind};

/// Handles differ between tests, because the registry of open mappings belongs to the process.
fn handle(test: u8) -> IpcMemoryHandle {
    IpcMemoryHandle([test; 64])
}

fn imports() -> usize {
    STATE.with_borrow(|state| state.live.iter().filter(|(kind, _)| *kind == "import").count())
}

#[test]
fn a_second_open_shares_the_first_and_the_last_drop_closes() {
    let context = context();
    let first = IpcMapping::open(&context, handle(1), GRANULARITY as u64, Access::ReadOnly).unwrap();
    let second = IpcMapping::open(&context, handle(1), 4096, Access::ReadWrite).unwrap();
    assert_eq!((first.device_ptr(), first.len(), second.len()), (second.device_ptr(), GRANULARITY as u64, 4096));
    assert_eq!((first.as_slice().access(), second.as_slice().access()), (Access::ReadOnly, Access::ReadWrite));
    let other = IpcMapping::open(&context, handle(2), 4096, Access::ReadOnly).unwrap();
    assert_ne!(other.device_ptr(), first.device_ptr());
    assert_eq!(imports(), 2);
    drop((first, other));
    assert_eq!(imports(), 1);
    drop(second);
    assert_all_given_back();
    let again = IpcMapping::open(&context, handle(1), 4096, Access::ReadOnly).unwrap();
    assert_eq!((again.slice(4000, 96).unwrap().len(), imports()), (96, 1));
    assert!(matches!(again.slice(4000, 97), Err(AccessError::OutOfRange { .. })));
    drop(again);
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
}

#[test]
fn a_size_that_the_driver_does_not_confirm_is_refused_and_nothing_stays_open() {
    let context = context();
    for bytes in [0, GRANULARITY as u64 + 1, u64::MAX] {
        let error = IpcMapping::open(&context, handle(3), bytes, Access::ReadOnly).unwrap_err();
        assert_eq!((error.call, error.code), ("cuIpcOpenMemHandle", CuResult::INVALID_VALUE));
        assert!(error.to_string().ends_with("the driver that it has 2097152"), "{error}");
        assert_all_given_back();
    }
    fail("cuMemGetAddressRange_v2", 500);
    let error = IpcMapping::open(&context, handle(3), 1, Access::ReadOnly).unwrap_err();
    assert_eq!((error.call, error.code), ("cuMemGetAddressRange", CuResult::NOT_FOUND));
    assert_all_given_back();
}

#[test]
fn a_refusal_to_open_says_what_it_means() {
    let context = context();
    for (code, meaning) in [
        (201, "this process made the handle itself"),
        (400, "the process that made the handle is gone"),
        (205, "name no memory that can be mapped here"),
        (1, "no handle of this driver"),
        (217, "a GPU that this one cannot reach"),
    ] {
        fail("cuIpcOpenMemHandle_v2", code);
        let error = IpcMapping::open(&context, handle(4), 1, Access::ReadOnly).unwrap_err();
        assert!(error.code == CuResult(code) && error.to_string().contains(meaning), "{error}");
    }
    fail_nothing();
    assert_all_given_back();
}

#[test]
fn a_close_that_fails_is_kept_for_the_context() {
    let context = context();
    let mapping = IpcMapping::open(&context, handle(5), 1, Access::ReadOnly).unwrap();
    fail("cuIpcCloseMemHandle", 700);
    drop(mapping);
    fail_nothing();
    assert_eq!(context.take_drop_error().unwrap().call, "cuIpcCloseMemHandle");
}

#[test]
fn a_handle_in_a_log_is_short() {
    let handle = IpcMemoryHandle::of(&context(), 0xAB << ADDRESS_SHIFT).unwrap();
    assert_eq!(handle, IpcMemoryHandle([0xAB; 64]));
    assert_eq!(format!("{handle:?}"), "IpcMemoryHandle(abababab…)");
}

fn shared_memfd() -> std::os::fd::OwnedFd {
    memfd::Draft::create("registration", 5000).unwrap().share().unwrap()
}

#[test]
fn a_registration_has_the_access_of_its_mapping_and_keeps_it() {
    let context = context();
    let fd = shared_memfd();
    let frozen = memfd::Draft::create("registration", 4096).unwrap().freeze().unwrap();
    let frozen = Arc::new(SealedMap::new(&frozen).unwrap());
    let check = |registration: Result<HostRegistration, CudaError>, access, flags| {
        let registration = registration.unwrap();
        assert_eq!((registration.access(), registration.as_slice().access()), (access, access));
        STATE.with_borrow(|state| assert_eq!(state.register_flags, flags));
        assert_eq!(registration.slice(8, 8).unwrap().device_ptr(), registration.device_ptr() + 8);
    };
    let shared = |map| HostRegistration::shared(&context, Arc::new(map));
    check(shared(SharedMap::writable(&fd).unwrap()), Access::ReadWrite, 3);
    check(shared(SharedMap::readable(&fd).unwrap()), Access::ReadOnly, 11);
    check(HostRegistration::frozen(&context, Arc::clone(&frozen)), Access::ReadOnly, 11);
    let registration = HostRegistration::frozen(&context, Arc::clone(&frozen)).unwrap();
    assert_eq!(Arc::strong_count(&frozen), 2);
    let error = HostRegistration::frozen(&context, frozen).unwrap_err();
    assert_eq!(error.code, CuResult::HOST_MEMORY_ALREADY_REGISTERED);
    assert!(error.to_string().contains("registered in this process already"), "{error}");
    drop(registration);
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
}

#[test]
fn a_graph_never_gets_the_address_of_a_registration() {
    let context = context();
    let map = Arc::new(SharedMap::writable(shared_memfd()).unwrap());
    let registration = HostRegistration::shared(&context, map).unwrap();
    let (buffer, stream) = (DeviceBuffer::new(&context, 8).unwrap(), Stream::new(&context).unwrap());
    STATE.with_borrow_mut(|state| state.capturing = true);
    let refused = registration.enqueue_copy_to(stream.as_ref(), 0, buffer.as_slice());
    assert_eq!(refused, Err(AccessError::Capturing));
    let refused = registration.enqueue_copy_from(stream.as_ref(), 0, buffer.as_slice());
    assert_eq!(refused, Err(AccessError::Capturing));
}

#[test]
fn a_registration_that_fails_half_way_leaves_nothing() {
    let context = context();
    for step in ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"] {
        fail(step, 2);
        let map = Arc::new(SharedMap::writable(shared_memfd()).unwrap());
        let error = HostRegistration::shared(&context, map).unwrap_err();
        assert_eq!((error.call, error.code), (step.trim_end_matches("_v2"), CuResult::OUT_OF_MEMORY));
        assert_eq!(error.to_string().contains("ulimit -l"), step == "cuMemHostRegister_v2");
        fail_nothing();
        assert_all_given_back();
    }
}

const MEMORY_TYPE: u32 = 2;
const BUFFER_ID: u32 = 7;
const IS_MANAGED: u32 = 8;
const ORDINAL: u32 = 9;
const LEGACY: u32 = 10;
const START: u32 = 11;
const SIZE: u32 = 12;
const HANDLE_TYPES: u32 = 14;
const POOL: u32 = 17;

/// What an address is when the driver answers this.
fn classify(attributes: &[(u32, u64)], mapped: bool, driver_host: bool) -> PointerInfo {
    STATE.with_borrow_mut(|state| {
        state.pointer = attributes.iter().copied().collect();
        (state.range, state.mapped, state.driver_host) = ((0x8000, 0x4000), mapped, driver_host);
    });
    let info = PointerInfo::of(&context(), 0x9100).unwrap();
    assert_all_given_back();
    info
}

#[test]
fn a_pointer_is_told_from_every_other_kind() {
    let range = [(START, 0x9000), (SIZE, 0x1000)];
    let with = |more: &[(u32, u64)]| [&range[..], more].concat();
    let device = classify(&with(&[(MEMORY_TYPE, 2), (LEGACY, 1), (BUFFER_ID, 77), (ORDINAL, 1)]), false, false);
    assert_eq!((device.kind, device.base, device.bytes, device.offset()), (PointerKind::Device, 0x9000, 0x1000, 0x100));
    assert_eq!((device.buffer_id, device.legacy_ipc, device.posix_fd), (77, true, false));
    assert_eq!(device.device.unwrap().ordinal(), 1);
    let hidden = classify(&with(&[(MEMORY_TYPE, 2), (ORDINAL, u64::from(u32::MAX - 1))]), false, false);
    assert!(hidden.kind == PointerKind::Device && !hidden.legacy_ipc && hidden.device.is_none());

    let pool = classify(&with(&[(MEMORY_TYPE, 2), (POOL, 5)]), false, false);
    assert_eq!((pool.kind, pool.legacy_ipc), (PointerKind::Pool, false));
    let managed = classify(&with(&[(MEMORY_TYPE, 2), (IS_MANAGED, 1), (LEGACY, 1)]), false, false);
    assert_eq!((managed.kind, managed.legacy_ipc), (PointerKind::Managed, false));
    let pinned = classify(&with(&[(MEMORY_TYPE, 1)]), false, true);
    assert!(pinned.kind == PointerKind::Pinned && pinned.device.is_none());
    assert_eq!(classify(&with(&[(MEMORY_TYPE, 1)]), false, false).kind, PointerKind::Registered);

    let unknown = classify(&[], false, false);
    assert_eq!((unknown.kind, unknown.base, unknown.bytes), (PointerKind::Unknown, 0x9100, 0));
    assert!(unknown.device.is_none() && unknown.offset() == 0);
}

#[test]
fn an_address_inside_a_mapping_is_known_although_its_memory_type_reads_zero() {
    let inside = classify(&[(HANDLE_TYPES, 1)], true, false);
    assert_eq!((inside.kind, inside.base, inside.bytes), (PointerKind::Vmm, 0x8000, 0x4000));
    assert!(!inside.posix_fd, "the properties of the memory decide, which here ask for no handle type");
    assert_eq!(inside.device.unwrap().ordinal(), 1);
}

#[test]
fn memory_that_this_process_opened_is_not_taken_for_its_own() {
    let context = context();
    let mapping = IpcMapping::open(&context, handle(6), 1, Access::ReadOnly).unwrap();
    STATE.with_borrow_mut(|state| state.pointer = [(MEMORY_TYPE, 2), (LEGACY, 1)].into());
    let info = PointerInfo::of(&context, mapping.device_ptr() + 64).unwrap();
    assert_eq!((info.kind, info.base, info.legacy_ipc), (PointerKind::Imported, mapping.device_ptr(), false));
    drop(mapping);
    assert_eq!(PointerInfo::of(&context, info.address).unwrap().kind, PointerKind::Device);
}

#[test]
fn a_lost_context_is_no_classification() {
    let context = context();
    for call in ["cuPointerGetAttributes", "cuMemRetainAllocationHandle"] {
        fail(call, 700);
        assert_eq!(PointerInfo::of(&context, 1).unwrap_err().code, CuResult::ILLEGAL_ADDRESS);
        fail_nothing();
    }
}

#[test]
fn experiments_give_back_what_they_took_whatever_the_driver_answers() {
    let context = context();
    for make in [UnshareableMemory::managed, UnshareableMemory::pooled] {
        let memory = make(&context, 4096).unwrap();
        assert_ne!(memory.device_ptr(), 0);
        drop(memory);
        assert_eq!(make(&context, 0).unwrap_err().code, CuResult::INVALID_VALUE);
    }
    let memory = PhysicalMemory::create(&context, GRANULARITY as u64).unwrap();
    assert_eq!(map_part(&memory, 4096, 4096).unwrap_err().code, CuResult(801));
    map_part(&memory, 0, 4096).unwrap();
    assert!(event_handle(&context, true, false).is_ok());
    assert_eq!(event_handle(&context, true, true).unwrap_err().call, "cuEventCreate");
    fail("cuIpcGetEventHandle", 400);
    assert_eq!(event_handle(&context, false, true).unwrap_err().code, CuResult::INVALID_HANDLE);
    fail_nothing();
    drop(memory);
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
}

#[test]
fn experiments_on_a_mapping_leave_its_owner_in_order() {
    let context = context();
    let open = || IpcMapping::open(&context, handle(7), 4096, Access::ReadOnly).unwrap();
    let mapping = open();
    assert_eq!(free_mapping(&mapping).unwrap_err().code, CuResult::INVALID_VALUE);
    assert_eq!(beyond(&mapping, 8192, 16).unwrap().device_ptr(), mapping.device_ptr() + 8192);
    assert!(matches!(beyond(&mapping, GRANULARITY as u64 - 8, 16), Err(AccessError::OutOfRange { .. })));
    assert_eq!(close_twice(mapping).unwrap_err().call, "cuIpcCloseMemHandle");
    drop(open());
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
}
