//! Memory of NUMA nodes.

use std::io::pipe;

use rustix::io::Errno;

use super::memory::{GRANULE, READ, READ_WRITE, import, peek, poke};
use super::peer::in_a_process;
use super::process::{create as create_on_device, export};
use super::{answer, begin, must};
use crate::abi::{Code, DevicePtr, MemAccessDesc, MemAllocationProp, MemLocation};
use crate::device::{cuDeviceGetAttribute, cuInit};
use crate::memory::mapping::{cuMemAddressReserve, cuMemGetAccess, cuMemMap, cuMemSetAccess, cuMemUnmap};
use crate::memory::physical::{cuMemCreate, cuMemGetAllocationPropertiesFromHandle, cuMemRelease};
use crate::memory::pointer::cuPointerGetAttribute;

const HOST: MemLocation = MemLocation { kind: 2, id: 0 };

fn on_node(id: i32) -> MemLocation {
    MemLocation { kind: 3, id }
}

fn create(node: i32, bytes: usize) -> Result<u64, Code> {
    let mut handle = 0;
    let properties =
        MemAllocationProp { kind: 1, requested_handle_types: 1, location: on_node(node), ..Default::default() };
    answer!(cuMemCreate(&mut handle, bytes, &properties, 0)).ok().map(|()| handle)
}

/// Maps memory without access.
fn map(handle: u64) -> DevicePtr {
    let mut pointer = 0;
    must!(cuMemAddressReserve(&mut pointer, GRANULE, 0, 0, 0));
    must!(cuMemMap(pointer, GRANULE, 0, handle, 0));
    pointer
}

fn set_access(pointer: DevicePtr, rules: &[(MemLocation, u32)]) -> Code {
    let rules: Vec<_> =
        rules.iter().map(|(location, flags)| MemAccessDesc { location: *location, flags: *flags }).collect();
    answer!(cuMemSetAccess(pointer, GRANULE, rules.as_ptr(), rules.len()))
}

/// Returns what the kernel says of reading and of writing the first byte of a mapping, which changes nothing.
fn rights(pointer: DevicePtr) -> [Result<usize, Errno>; 2] {
    let (reader, writer) = pipe().unwrap();
    // SAFETY: the kernel refuses an address that it cannot read.
    let written = unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&writer), pointer as *const _, 1) };
    let readable = usize::try_from(written).map_err(|_| Errno::FAULT);
    rustix::io::write(&writer, &[0]).unwrap();
    // SAFETY: as above; an accessible byte gets the value that it has, or 0, which it has as well.
    let read = unsafe { libc::read(std::os::fd::AsRawFd::as_raw_fd(&reader), pointer as *mut _, 1) };
    [readable, usize::try_from(read).map_err(|_| Errno::FAULT)]
}

#[test]
fn lost_node_refuses_old_memory_and_gives_new() {
    const TEST: &str = "tests::nodes::lost_node_refuses_old_memory_and_gives_new";
    let losses = std::env::temp_dir().join(format!("simcuda-node-losses-{}", std::process::id()));
    if !in_a_process(TEST, &[("SIMCUDA_LOSSES", losses.to_str().unwrap())]) {
        return;
    }
    let losses = std::env::var("SIMCUDA_LOSSES").unwrap();
    begin();
    let descriptor = export(create(1, GRANULE).unwrap());
    // Of a device, and of another node.
    std::fs::write(&losses, "1\nnode 0\n").unwrap();
    assert!(import(descriptor).is_ok());
    std::fs::write(&losses, "node 0\nnode 1\n").unwrap();
    assert_eq!(import(descriptor), Err(Code::UNKNOWN));
    assert!(import(export(create(1, GRANULE).unwrap())).is_ok());
    std::fs::remove_file(losses).unwrap();
}

#[test]
fn each_node_has_memory_of_its_own() {
    const TEST: &str = "tests::nodes::each_node_has_memory_of_its_own";
    if !in_a_process(TEST, &[("SIMCUDA_NODE_MEMORY", "4M")]) {
        return;
    }
    must!(cuInit(0));
    let first = create(0, 2 * GRANULE).unwrap();
    assert_eq!(create(0, GRANULE), Err(Code::OUT_OF_MEMORY), "the other node has room, but was not asked for");
    let other = create(1, GRANULE).unwrap();
    must!(cuMemRelease(first));
    create(0, 2 * GRANULE).unwrap();
    for missing in [-1, 2, i32::MAX] {
        assert_eq!(create(missing, GRANULE), Err(Code::INVALID_VALUE));
    }
    assert_eq!(create(1, 4096), Err(Code::INVALID_VALUE));
    let mut properties = MemAllocationProp::default();
    let imported = import(export(other)).unwrap();
    must!(cuMemGetAllocationPropertiesFromHandle(&mut properties, imported));
    assert_eq!(properties.location, on_node(1));
}

#[test]
fn devices_belong_to_nodes_by_turns() {
    if !in_a_process("tests::nodes::devices_belong_to_nodes_by_turns", &[("SIMCUDA_DEVICES", "3")]) {
        return;
    }
    must!(cuInit(0));
    let attribute = |which, device| {
        let mut value = -1;
        must!(cuDeviceGetAttribute(&mut value, which, device));
        value
    };
    assert_eq!([0, 1, 2].map(|device| attribute(134, device)), [0, 1, 0]);
    assert_eq!(attribute(141, 1), 1);
}

#[test]
fn the_cpu_has_the_access_that_it_was_given() {
    if !in_a_process("tests::nodes::the_cpu_has_the_access_that_it_was_given", &[]) {
        return;
    }
    begin();
    let pointer = map(create(1, GRANULE).unwrap());
    let given = |pointer| {
        let mut flags = 9;
        must!(cuMemGetAccess(&mut flags, &HOST, pointer));
        flags
    };
    let fault = Err(Errno::FAULT);
    assert_eq!((given(pointer), rights(pointer)), (0, [fault, fault]));
    // The CPU is meant, whatever the node.
    assert_eq!(set_access(pointer, &[(on_node(0), READ)]), Code::SUCCESS);
    assert_eq!((given(pointer), rights(pointer)), (1, [Ok(1), fault]));
    assert_eq!(set_access(pointer, &[(HOST, READ_WRITE)]), Code::SUCCESS);
    assert_eq!((given(pointer), rights(pointer)), (3, [Ok(1), Ok(1)]));
    assert_eq!(peek(pointer), Err(Code::ILLEGAL_ADDRESS), "the device has no access yet");
    let device = MemLocation { kind: 1, id: 0 };
    assert_eq!(set_access(pointer, &[(device, READ_WRITE), (HOST, READ)]), Code::SUCCESS);
    poke(pointer, 7).unwrap();
    // SAFETY: mapped for reading since the last call.
    assert_eq!(unsafe { (pointer as *const u8).read_volatile() }, 7);
    let mut memory_type = 9_u32;
    must!(cuPointerGetAttribute((&raw mut memory_type).cast(), 2, pointer));
    assert_eq!(memory_type, 0);
    assert_eq!(set_access(pointer, &[(HOST, 0)]), Code::SUCCESS);
    assert_eq!((given(pointer), rights(pointer)), (0, [fault, fault]));
    assert_eq!(set_access(pointer, &[(HOST, READ_WRITE)]), Code::SUCCESS);
    must!(cuMemUnmap(pointer, GRANULE));
    assert_eq!(rights(pointer), [fault, fault]);
}

#[test]
fn the_cpu_gets_no_access_to_memory_of_a_device() {
    if !in_a_process("tests::nodes::the_cpu_gets_no_access_to_memory_of_a_device", &[]) {
        return;
    }
    must!(cuInit(0));
    let pointer = map(create_on_device(GRANULE).unwrap());
    assert_eq!(set_access(pointer, &[(HOST, READ)]), Code::NOT_SUPPORTED);
    assert_eq!(set_access(pointer, &[(MemLocation { kind: 4, id: 0 }, READ)]), Code::INVALID_VALUE);
}
