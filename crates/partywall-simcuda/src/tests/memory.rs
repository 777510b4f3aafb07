//! Memory within one process, and what work on a device may access.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::peer::in_a_process;
use super::process::{create, export, exportable};
use super::{
    SharedWords, answer, begin, context_handle, device_memory, make_current, must, new_stream, pinned, synchronize,
};
use crate::abi::{Code, DevicePtr, MemAccessDesc, MemLocation};
use crate::context::{self, cuCtxEnablePeerAccess};
use crate::memop::cuStreamWaitValue64_v2;
use crate::memory::host::{
    cuMemAllocManaged, cuMemFreeHost, cuMemHostGetFlags, cuMemHostRegister_v2, cuMemHostUnregister,
};
use crate::memory::mapping::{
    cuMemAddressFree, cuMemAddressReserve, cuMemGetAccess, cuMemMap, cuMemSetAccess, cuMemUnmap,
};
use crate::memory::physical::{
    cuMemCreate, cuMemExportToShareableHandle, cuMemGetAllocationPropertiesFromHandle, cuMemImportFromShareableHandle,
    cuMemRelease, cuMemRetainAllocationHandle,
};
use crate::memory::plain::{cuMemAlloc_v2, cuMemFree_v2};
use crate::memory::pointer::{cuMemGetAddressRange_v2, cuPointerGetAttribute, cuPointerGetAttributes};
use crate::memory::pool::{cuMemAllocAsync, cuMemFreeAsync};
use crate::memory::{Want, access};
use crate::primary::{cuCtxSynchronize, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRetain};

pub(super) const GRANULE: usize = 2 << 20;
pub(super) const READ: u32 = 1;
pub(super) const READ_WRITE: u32 = 3;

/// Maps a whole allocation; `flags` are the rights of device 0.
pub(super) fn map(handle: u64, bytes: usize, flags: u32) -> DevicePtr {
    let mut pointer = 0;
    must!(cuMemAddressReserve(&mut pointer, bytes, 0, 0, 0));
    must!(cuMemMap(pointer, bytes, 0, handle, 0));
    must!(cuMemSetAccess(pointer, bytes, &rule(0, flags), 1));
    pointer
}

fn rule(device: i32, flags: u32) -> MemAccessDesc {
    MemAccessDesc { location: MemLocation { kind: 1, id: device }, flags }
}

/// Returns the first byte at an address as work in the current context reads it.
pub(super) fn peek(pointer: DevicePtr) -> Result<u8, Code> {
    let range = access(&*context::current()?, pointer, 1, Want::Read)?;
    // SAFETY: one byte lies there for as long as `range` lives.
    Ok(unsafe { range.pointer().read_volatile() })
}

/// Writes the first byte at an address as work in the current context does.
pub(super) fn poke(pointer: DevicePtr, value: u8) -> Result<(), Code> {
    let range = access(&*context::current()?, pointer, 1, Want::Write)?;
    // SAFETY: as for `peek`.
    unsafe { range.pointer().write_volatile(value) };
    Ok(())
}

pub(super) fn import(descriptor: i32) -> Result<u64, Code> {
    let mut handle = 0;
    answer!(cuMemImportFromShareableHandle(&mut handle, descriptor as usize, 1)).ok().map(|()| handle)
}

#[test]
fn physical_memory_comes_in_granules_and_is_mapped_whole() {
    if !in_a_process("tests::memory::physical_memory_comes_in_granules_and_is_mapped_whole", &[]) {
        return;
    }
    begin();
    for bytes in [0, 1, 4096, GRANULE + 1] {
        assert_eq!(create(bytes), Err(Code::INVALID_VALUE));
    }
    let handle = create(2 * GRANULE).unwrap();
    let mut pointer = 0;
    must!(cuMemAddressReserve(&mut pointer, 4 * GRANULE, 0, 0, 0));
    assert_eq!(answer!(cuMemMap(pointer, GRANULE, 0, handle, 0)), Code::NOT_SUPPORTED);
    assert_eq!(answer!(cuMemMap(pointer, GRANULE, GRANULE, handle, 0)), Code::NOT_SUPPORTED);
    assert_eq!(answer!(cuMemMap(pointer, 3 * GRANULE, 0, handle, 0)), Code::NOT_SUPPORTED);
    assert_eq!(answer!(cuMemMap(pointer + 4096, 2 * GRANULE, 0, handle, 0)), Code::INVALID_VALUE);
    must!(cuMemMap(pointer, 2 * GRANULE, 0, handle, 0));
    assert_eq!(peek(pointer), Err(Code::ILLEGAL_ADDRESS), "no access was set");
    must!(cuMemSetAccess(pointer, 2 * GRANULE, &rule(0, READ_WRITE), 1));
    assert_eq!(peek(pointer + 2 * GRANULE as u64 - 1), Ok(0), "fresh memory is zero");
    assert_eq!(answer!(cuMemMap(pointer, 2 * GRANULE, 0, handle, 0)), Code::INVALID_VALUE, "in use");
    assert_eq!(answer!(cuMemAddressFree(pointer, 4 * GRANULE)), Code::INVALID_VALUE, "still mapped");
    assert_eq!(answer!(cuMemFree_v2(pointer)), Code::INVALID_VALUE);
    must!(cuMemRelease(handle));
    assert_eq!(answer!(cuMemRelease(handle)), Code::INVALID_VALUE);
    poke(pointer, 9).unwrap();
    assert_eq!(answer!(cuMemUnmap(pointer, GRANULE)), Code::INVALID_VALUE, "a part");
    // Memory that a stream uses stays until the stream is done with it.
    let held = access(&context::current().unwrap(), pointer, 1, Want::Read).unwrap();
    must!(cuMemUnmap(pointer, 2 * GRANULE));
    // SAFETY: one byte, kept by `held`.
    assert_eq!(unsafe { held.pointer().read() }, 9);
    assert_eq!(peek(pointer), Err(Code::ILLEGAL_ADDRESS));
    must!(cuMemUnmap(pointer, 2 * GRANULE));
    must!(cuMemAddressFree(pointer, 4 * GRANULE));
    assert_eq!(answer!(cuMemUnmap(pointer, 2 * GRANULE)), Code::INVALID_VALUE, "not reserved");
}

#[test]
fn an_import_is_the_same_memory_and_cannot_be_exported() {
    if !in_a_process("tests::memory::an_import_is_the_same_memory_and_cannot_be_exported", &[]) {
        return;
    }
    begin();
    let handle = create(GRANULE).unwrap();
    let descriptor = export(handle);
    let first = map(handle, GRANULE, READ_WRITE);
    let imported = import(descriptor).unwrap();
    let second = map(imported, GRANULE, READ);
    poke(first, 42).unwrap();
    assert_eq!((peek(second), poke(second, 1)), (Ok(42), Err(Code::ILLEGAL_ADDRESS)));
    let mut flags = 0;
    must!(cuMemGetAccess(&mut flags, &MemLocation { kind: 1, id: 0 }, second));
    assert_eq!(flags, u64::from(READ));
    let mut again = -1;
    let exported = answer!(cuMemExportToShareableHandle((&raw mut again).cast(), imported, 1, 0));
    assert_eq!(exported, Code::INVALID_VALUE);
    let mut retained = 0;
    let mut properties = exportable();
    must!(cuMemRetainAllocationHandle(&mut retained, (second + 4096) as *mut c_void));
    must!(cuMemGetAllocationPropertiesFromHandle(&mut properties, retained));
    assert_eq!(properties, exportable());
    let memfd = rustix::fs::memfd_create("no memory of a device", MemfdFlags::empty()).unwrap();
    use std::os::fd::AsRawFd;
    assert_eq!([import(memfd.as_raw_fd()), import(9999)], [Err(Code::UNKNOWN); 2]);
    let mut nowhere = exportable();
    nowhere.location.id = 7;
    assert_eq!(answer!(cuMemCreate(&mut retained, GRANULE, &nowhere, 0)), Code::INVALID_DEVICE);
}

#[test]
fn fault_stays_until_the_process_ends() {
    if !in_a_process("tests::memory::fault_stays_until_the_process_ends", &[("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    begin();
    let pointer = map(create(GRANULE).unwrap(), GRANULE, READ);
    let stream = new_stream();
    must!(crate::copy::cuMemsetD8Async(pointer, 1, 16, stream));
    assert_eq!(answer!(cuCtxSynchronize()), Code::ILLEGAL_ADDRESS);
    let mut other = 0;
    assert_eq!(answer!(cuMemAlloc_v2(&mut other, 16)), Code::ILLEGAL_ADDRESS);
    must!(cuMemUnmap(pointer, GRANULE));
    let first = context_handle();
    must!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(answer!(cuCtxSynchronize()), Code::CONTEXT_IS_DESTROYED);
    let mut again = 0;
    must!(cuDevicePrimaryCtxRetain(&mut again, 0));
    assert_ne!(again, first);
    make_current(again);
    assert_eq!(answer!(cuCtxSynchronize()), Code::ILLEGAL_ADDRESS, "a new context does not cure it");
    must!(cuDevicePrimaryCtxRetain(&mut again, 1));
    make_current(again);
    must!(cuCtxSynchronize());
}

#[test]
fn another_device_needs_access_rights() {
    if !in_a_process("tests::memory::another_device_needs_access_rights", &[("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    begin();
    let first = context_handle();
    let mut second = 0;
    let plain = device_memory(64);
    let mapped = map(create(GRANULE).unwrap(), GRANULE, READ_WRITE);
    must!(cuDevicePrimaryCtxRetain(&mut second, 1));
    make_current(second);
    assert_eq!([peek(plain), peek(mapped)], [Err(Code::ILLEGAL_ADDRESS); 2]);
    must!(cuCtxEnablePeerAccess(first, 0));
    assert_eq!(answer!(cuCtxEnablePeerAccess(first, 0)), Code::PEER_ACCESS_ALREADY_ENABLED);
    assert_eq!([peek(plain), peek(mapped)], [Ok(0), Err(Code::ILLEGAL_ADDRESS)]);
    must!(cuMemSetAccess(mapped, GRANULE, &rule(1, READ), 1));
    assert_eq!((peek(mapped), poke(mapped, 1)), (Ok(0), Err(Code::ILLEGAL_ADDRESS)));
    make_current(first);
    poke(mapped, 1).unwrap();
}

/// Maps shared memory with these rights.
fn shared(bytes: usize, rights: ProtFlags) -> *mut c_void {
    let file = rustix::fs::memfd_create("test", MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&file, bytes as u64).unwrap();
    // SAFETY: a new mapping.
    unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, rights, MapFlags::SHARED, &file, 0) }.unwrap()
}

#[test]
fn host_memory_is_registered_once() {
    if !in_a_process("tests::memory::host_memory_is_registered_once", &[]) {
        return;
    }
    begin();
    let memory = shared(8192, ProtFlags::READ | ProtFlags::WRITE);
    assert_eq!(answer!(cuMemHostUnregister(memory)), Code::HOST_MEMORY_NOT_REGISTERED);
    assert_eq!(answer!(cuMemHostRegister_v2(memory, 0, 2)), Code::INVALID_VALUE);
    must!(cuMemHostRegister_v2(memory, 8192, 2));
    let part = memory.wrapping_byte_add(4096);
    assert_eq!(answer!(cuMemHostUnregister(part)), Code::INVALID_VALUE);
    assert_eq!(answer!(cuMemHostRegister_v2(part, 4096, 2)), Code::HOST_MEMORY_ALREADY_REGISTERED);
    poke(part as u64, 7).unwrap();
    // SAFETY: mapped above; nothing else writes.
    assert_eq!(unsafe { part.cast::<u8>().read_volatile() }, 7);
    // A program that unmaps too early takes no memory from the device, because the memory is pinned.
    // SAFETY: mapped above; no reference was made to it.
    unsafe { rustix::mm::munmap(memory, 8192) }.unwrap();
    assert_eq!(peek(part as u64), Ok(7));
    must!(cuMemHostUnregister(memory));
    assert_eq!(peek(part as u64), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(answer!(cuMemHostRegister_v2(memory, 8192, 2)), Code::INVALID_VALUE, "not mapped");

    let memory = shared(4096, ProtFlags::READ);
    assert_eq!(answer!(cuMemHostRegister_v2(memory, 4096, 2)), Code::INVALID_VALUE);
    must!(cuMemHostRegister_v2(memory, 4096, 2 | 8));
    assert_eq!((peek(memory as u64), poke(memory as u64, 1)), (Ok(0), Err(Code::ILLEGAL_ADDRESS)));
    must!(cuMemHostUnregister(memory));
}

#[test]
fn pointer_attributes_name_the_kind() {
    if !in_a_process("tests::memory::pointer_attributes_name_the_kind", &[]) {
        return;
    }
    begin();
    let stream = new_stream();
    let plain = device_memory(1000);
    let mapped = map(create(GRANULE).unwrap(), GRANULE, READ_WRITE);
    let pinned = pinned(4096) as u64;
    let mut managed = 0;
    let mut pooled = 0;
    must!(cuMemAllocManaged(&mut managed, 4096, 1));
    must!(cuMemAllocAsync(&mut pooled, 4096, stream));
    let registered = shared(4096, ProtFlags::READ | ProtFlags::WRITE);
    must!(cuMemHostRegister_v2(registered, 4096, 2));
    let registered = registered as u64;

    let attributes = |pointer: u64| -> BTreeMap<u32, u64> {
        let mut names: Vec<u32> = vec![2, 8, 9, 10, 11, 12, 14];
        let mut values = vec![0_u64; names.len()];
        let mut places: Vec<*mut c_void> = values.iter_mut().map(|value| ptr::from_mut(value).cast()).collect();
        must!(cuPointerGetAttributes(names.len() as u32, names.as_mut_ptr(), places.as_mut_ptr(), pointer));
        names.into_iter().zip(values).collect()
    };
    let known = |kind: u64, managed: u64, legacy: u64, start: u64, bytes: u64, handles: u64| {
        BTreeMap::from([(2, kind), (8, managed), (9, 0), (10, legacy), (11, start), (12, bytes), (14, handles)])
    };
    assert_eq!(attributes(plain + 999), known(2, 0, 1, plain, 1000, 0));
    assert_eq!(attributes(mapped + 5), known(2, 0, 0, mapped, GRANULE as u64, 1));
    assert_eq!(attributes(pinned + 5), known(1, 0, 0, pinned, 4096, 0));
    assert_eq!(attributes(registered + 5), known(1, 0, 0, registered, 4096, 0));
    assert_eq!(attributes(managed + 5), known(2, 1, 0, managed, 4096, 0));
    assert_eq!(attributes(pooled + 5), known(2, 0, 0, pooled, 4096, 0));
    let mut value = 0_u64;
    let mut one = |which, pointer| answer!(cuPointerGetAttribute((&raw mut value).cast(), which, pointer));
    let host = Box::new(0_u8);
    for unknown in [plain + 1000, 0, &raw const *host as u64] {
        assert_eq!(one(2, unknown), Code::INVALID_VALUE);
        // -2 means no device.
        let nothing =
            BTreeMap::from([(2, 0), (8, 0), (9, u64::from(u32::MAX - 1)), (10, 0), (11, 0), (12, 0), (14, 0)]);
        assert_eq!(attributes(unknown), nothing);
    }
    let mut base = 0;
    let mut bytes = 0;
    let mut flags = 0;
    must!(cuMemGetAddressRange_v2(&mut base, &mut bytes, plain + 500));
    assert_eq!((base, bytes), (plain, 1000));
    must!(cuMemHostGetFlags(&mut flags, pinned as *mut c_void));
    assert_eq!(answer!(cuMemHostGetFlags(&mut flags, registered as *mut c_void)), Code::INVALID_VALUE);

    must!(cuMemFreeAsync(pooled, stream));
    synchronize(stream);
    assert_eq!(one(2, pooled), Code::INVALID_VALUE);
    must!(cuMemFree_v2(managed));
    assert_eq!(answer!(cuMemFree_v2(pinned)), Code::INVALID_VALUE);
    must!(cuMemFreeHost(pinned as *mut c_void));
    assert_eq!(answer!(cuMemFreeHost(pinned as *mut c_void)), Code::INVALID_VALUE);
}

#[test]
fn stream_has_memory_again_that_it_will_free() {
    if !in_a_process("tests::memory::stream_has_memory_again_that_it_will_free", &[]) {
        return;
    }
    begin();
    let words = SharedWords::new(4096);
    let stream = new_stream();
    let allocate = |stream| {
        let mut pointer = 0;
        must!(cuMemAllocAsync(&mut pointer, 4 * GRANULE, stream));
        pointer
    };
    let first = allocate(stream);
    must!(cuStreamWaitValue64_v2(stream, words.device, 1, 0));
    must!(cuMemFreeAsync(first, stream));
    assert_ne!(allocate(new_stream()), first, "another stream is not behind the work that uses it");
    assert_eq!(allocate(stream), first);
    assert_ne!(allocate(stream), first, "once");
    words.store(0, 1);
    synchronize(stream);
    assert_eq!(poke(first, 1), Ok(()), "it is allocated, although the stream has come to the first free");
    must!(cuMemFreeAsync(first, stream));
    synchronize(stream);
    assert_eq!(poke(first, 1), Err(Code::ILLEGAL_ADDRESS));
}

#[test]
fn addresses_are_reserved_where_they_fit() {
    if !in_a_process("tests::memory::addresses_are_reserved_where_they_fit", &[]) {
        return;
    }
    begin();
    let mut first = 0;
    let mut second = 0;
    for (bytes, alignment) in [(0, 0), (4096, 0), (GRANULE, 3)] {
        assert_eq!(answer!(cuMemAddressReserve(&mut first, bytes, alignment, 0, 0)), Code::INVALID_VALUE);
    }
    for (bytes, alignment) in [(1 << 43, 0), (!(GRANULE - 1), 0), (GRANULE, 1 << 63)] {
        assert_eq!(answer!(cuMemAddressReserve(&mut first, bytes, alignment, 0, 0)), Code::OUT_OF_MEMORY);
    }
    must!(cuMemAddressReserve(&mut first, 2 * GRANULE, 1 << 30, 0, 0));
    assert!(first.is_multiple_of(1 << 30));
    must!(cuMemAddressReserve(&mut second, GRANULE, 0, first + GRANULE as u64, 0));
    assert!(!(first..first + 2 * GRANULE as u64).contains(&second), "the wish is taken");
    must!(cuMemAddressFree(second, GRANULE));
    assert_eq!(answer!(cuMemAddressFree(first, GRANULE)), Code::INVALID_VALUE, "a half");
    must!(cuMemAddressFree(first, 2 * GRANULE));
    must!(cuMemAddressReserve(&mut second, GRANULE, 0, first, 0));
    assert_eq!(second, first, "the wish is free");
    must!(cuMemAddressFree(second, GRANULE));
}

#[test]
fn stream_copies_across_adjacent_mappings() {
    begin();
    let mut pointer = 0;
    must!(cuMemAddressReserve(&mut pointer, 2 * GRANULE, 0, 0, 0));
    for half in [pointer, pointer + GRANULE as u64] {
        must!(cuMemMap(half, GRANULE, 0, create(GRANULE).unwrap(), 0));
    }
    must!(cuMemSetAccess(pointer, 2 * GRANULE, &rule(0, READ_WRITE), 1));
    let stream = new_stream();
    let border = pointer + GRANULE as u64;
    must!(crate::copy::cuMemsetD8Async(border - 8, 3, 16, stream));
    synchronize(stream);
    let around = [border - 9, border - 8, border - 1, border, border + 7, border + 8].map(peek);
    assert_eq!(around, [0, 3, 3, 3, 3, 0].map(Ok));
    must!(cuMemUnmap(pointer, 2 * GRANULE));
    must!(cuMemAddressFree(pointer, 2 * GRANULE));
}
