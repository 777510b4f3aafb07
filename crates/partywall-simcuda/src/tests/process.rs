//! State of a whole process: its settings, its start and its end.

use std::ffi::{CStr, c_int};
use std::fs;
use std::os::unix::process::ExitStatusExt;

use super::memory::{READ, map};
use super::peer::{hear, heard, in_a_process, say, start};
use super::{answer, begin, device_memory, must, new_stream, role};
use crate::abi::{Code, MemAllocationProp};
use crate::copy::cuMemsetD8Async;
use crate::device::{
    cuDeviceGet, cuDeviceGetCount, cuDeviceGetName, cuDeviceGetUuid_v2, cuGetErrorName, cuGetErrorString, cuInit,
};
use crate::memory::physical::{cuMemCreate, cuMemExportToShareableHandle, cuMemRelease};
use crate::memory::plain::{cuMemAlloc_v2, cuMemFree_v2, cuMemGetInfo_v2};
use crate::primary::{cuCtxSynchronize, cuDevicePrimaryCtxRelease_v2};

const MIB: usize = 1 << 20;

/// Calls `cuMemCreate` on device 0, for exportable memory.
pub(super) fn create(bytes: usize) -> Result<u64, Code> {
    let mut handle = 0;
    answer!(cuMemCreate(&mut handle, bytes, &exportable(), 0)).ok().map(|()| handle)
}

pub(super) fn exportable() -> MemAllocationProp {
    let mut properties = MemAllocationProp { kind: 1, requested_handle_types: 1, ..Default::default() };
    properties.location.kind = 1;
    properties
}

pub(super) fn export(handle: u64) -> c_int {
    let mut descriptor: c_int = -1;
    must!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, 1, 0));
    descriptor
}

#[test]
fn nothing_works_before_init() {
    if !in_a_process("tests::process::nothing_works_before_init", &[]) {
        return;
    }
    let mut count = 0;
    assert_eq!(answer!(cuDeviceGetCount(&mut count)), Code::NOT_INITIALIZED);
    assert_eq!(answer!(cuInit(1)), Code::INVALID_VALUE);
    must!(cuInit(0));
    must!(cuDeviceGetCount(&mut count));
    assert_eq!(count, 1);
}

#[test]
fn forked_child_has_no_driver() {
    if !in_a_process("tests::process::forked_child_has_no_driver", &[]) {
        return;
    }
    begin();
    // SAFETY: the child calls only functions that touch no lock there, and ends without running anything else.
    match unsafe { libc::fork() } {
        0 => {
            let answers = [answer!(cuInit(0)), answer!(cuCtxSynchronize())];
            let right = answers == [Code::NOT_INITIALIZED; 2];
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        child => {
            let mut status = -1;
            // SAFETY: the status is live.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    must!(cuCtxSynchronize());
}

#[test]
fn environment_selects_the_devices() {
    const TEST: &str = "tests::process::environment_selects_the_devices";
    if role().is_some() {
        let code = answer!(cuInit(0));
        let mut count = 0;
        let mut uuid = [0; 16];
        let mut name = [0; 16];
        if code == Code::SUCCESS {
            must!(cuDeviceGetCount(&mut count));
            must!(cuDeviceGetUuid_v2(&mut uuid, 0));
            must!(cuDeviceGetName(name.as_mut_ptr(), 16, 0));
            // SAFETY: the driver ends the text.
            assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"Simulated GPU");
        }
        let mut device = 0;
        assert_ne!(answer!(cuDeviceGet(&mut device, count)), Code::SUCCESS);
        return say(format!("{} {count} {}", code.0, uuid[15]));
    }
    let second = "GPU-51301ca7-0000-0000-0000-000000000001";
    for (visible, answer) in [("0,1", "0 2 0"), ("1", "0 1 1"), (second, "0 1 1"), ("", "100 0 0"), ("1,5,0", "0 1 1")]
    {
        let mut peer = start(TEST, "ask", &[("SIMCUDA_DEVICES", "2"), ("CUDA_VISIBLE_DEVICES", visible)]);
        assert_eq!(hear(&mut peer), answer, "CUDA_VISIBLE_DEVICES={visible}");
        peer.finish();
    }
}

#[test]
fn device_has_only_its_configured_memory() {
    if !in_a_process("tests::process::device_has_only_its_configured_memory", &[("SIMCUDA_MEMORY", "8M")]) {
        return;
    }
    begin();
    let free = || {
        let mut free = 0;
        let mut total = 0;
        must!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(total, 8 * MIB);
        free
    };
    let plain = device_memory(3 * MIB);
    let handle = create(4 * MIB).unwrap();
    assert_eq!(free(), 0, "memory goes in blocks of 2 MiB");
    let mut more = 0;
    assert_eq!(answer!(cuMemAlloc_v2(&mut more, 1)), Code::OUT_OF_MEMORY);
    assert_eq!(create(2 * MIB), Err(Code::OUT_OF_MEMORY));
    must!(cuMemRelease(handle));
    assert_eq!(free(), 4 * MIB);
    must!(cuMemFree_v2(plain));
    assert_eq!(free(), 8 * MIB);
    let small: Vec<_> = (0..3).map(|_| device_memory(1000)).collect();
    assert_eq!(free(), 6 * MIB, "small allocations share a block");
    small.into_iter().for_each(|pointer| must!(cuMemFree_v2(pointer)));
    assert_eq!(free(), 8 * MIB);
}

#[test]
fn calls_fail_and_kill_as_configured_and_are_logged() {
    const TEST: &str = "tests::process::calls_fail_and_kill_as_configured_and_are_logged";
    if role().is_some() {
        begin();
        let answers: Vec<_> = (0..3).map(|_| create(2 * MIB).map(drop)).collect();
        assert_eq!(answers, [Ok(()), Err(Code::OUT_OF_MEMORY), Ok(())]);
        let mut text = std::ptr::null();
        must!(cuGetErrorName(Code::OUT_OF_MEMORY, &mut text));
        // SAFETY: the driver's static text.
        assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(answer!(cuGetErrorString(Code(9999), &mut text)), Code::INVALID_VALUE);
        assert!(text.is_null());
        must!(cuCtxSynchronize());
        unreachable!("killed");
    }
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("calls");
    let settings = [("SIMCUDA_FAULTS", "cuMemCreate:2=2,*:7=kill"), ("SIMCUDA_CALLS", log.to_str().unwrap())];
    let mut peer = start(TEST, "call", &settings);
    let pid = peer.pid();
    assert_eq!(peer.join().signal(), Some(libc::SIGKILL));
    let expected = [
        "1 cuInit 0",
        "2 cuDevicePrimaryCtxRetain 0",
        "3 cuCtxSetCurrent 0",
        "4 cuMemCreate 0",
        "5 cuMemCreate 2",
        "6 cuMemCreate 0",
        "7 cuCtxSynchronize kill",
    ];
    let expected: Vec<_> = expected.iter().map(|call| format!("{pid} {call}")).collect();
    assert_eq!(fs::read_to_string(&log).unwrap().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn ending_process_writes_its_ledger() {
    const TEST: &str = "tests::process::ending_process_writes_its_ledger";
    if let Some(role) = role() {
        begin();
        let freed = device_memory(5000);
        let handle = create(2 * MIB).unwrap();
        // SAFETY: made by the driver for this process, which owns it.
        drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(export(handle)) });
        if role == "untidy" {
            device_memory(3 * MIB);
            export(handle);
            // Frees the allocation, too, which is nevertheless a leak.
            must!(cuDevicePrimaryCtxRelease_v2(0));
            return;
        }
        if role == "faulty" {
            export(handle);
            must!(cuMemsetD8Async(map(handle, 2 * MIB, READ), 1, 16, new_stream()));
            assert_eq!(answer!(cuMemFree_v2(freed)), Code::ILLEGAL_ADDRESS);
            return;
        }
        must!(cuMemFree_v2(freed));
        must!(cuMemRelease(handle));
        must!(cuDevicePrimaryCtxRelease_v2(0));
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let left = |role| {
        let peer = start(TEST, role, &[("SIMCUDA_LEDGER", directory.path().to_str().unwrap())]);
        let path = directory.path().join(format!("{}.json", peer.pid()));
        peer.finish();
        let list: Vec<serde_json::Value> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let one = |left: &serde_json::Value| {
            format!("{} {} {} {}", left["kind"], left["bytes"], left["call"], left["index"]).replace('"', "")
        };
        let mut list: Vec<_> = list.iter().map(one).collect();
        list.sort();
        list
    };
    assert_eq!(left("tidy"), [""; 0]);
    let expected = [
        "allocation 3145728 cuMemAlloc 7",
        "allocation 5000 cuMemAlloc 4",
        "exported fd 2097152 cuMemExportToShareableHandle 8",
        "handle 2097152 cuMemCreate 5",
    ];
    assert_eq!(left("untidy"), expected);
    assert_eq!(
        left("faulty"),
        ["exported fd 2097152 cuMemExportToShareableHandle 7"],
        "it could give nothing else back"
    );
}

#[test]
fn host_access_to_a_device_address_crashes() {
    const TEST: &str = "tests::process::host_access_to_a_device_address_crashes";
    if role().is_some() {
        begin();
        let pointer = device_memory(4096);
        let follow = heard();
        if follow == "freed" {
            must!(cuMemFree_v2(pointer));
        }
        // SAFETY: none: this is the crash that the test is about.
        let value = unsafe { (pointer as *const u8).read_volatile() };
        unreachable!("read {value}");
    }
    for state in ["live", "freed"] {
        let mut peer = start(TEST, "follow", &[]);
        peer.send(state);
        assert_eq!(peer.join().signal(), Some(libc::SIGSEGV));
    }
}
