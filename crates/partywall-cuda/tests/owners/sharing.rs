//! Handles of another process, registrations, and kinds of pointers.

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;

use partywall_cuda::experiment::{UnshareableMemory, beyond, close_twice, free_mapping};
use partywall_cuda::{
    Access, AccessError, CuResult, CudaError, DeviceBuffer, HostRegistration, IpcMapping, IpcMemoryHandle, Mapping,
    PhysicalMemory, PinnedBuffer, PointerInfo, PointerKind, Stream,
};
use partywall_harness::Actor;
use partywall_os::map::{SealedMap, SharedMap};
use partywall_os::memfd;

use crate::{GRANULARITY, ROLE, call_of, context, is_failed, on_the_simulated_gpu, while_capturing};

/// Another process, which has allocated memory and prints its handles. It is no test itself.
#[test]
fn exporter() {
    if std::env::var(ROLE).is_ok_and(|role| role == "exporter") {
        let context = context();
        let buffers = [(), ()].map(|()| DeviceBuffer::new(&context, GRANULARITY).unwrap());
        for buffer in &buffers {
            let handle = IpcMemoryHandle::of(&context, buffer.as_slice().device_ptr()).unwrap();
            println!("\nhandle {}", handle.0.map(|byte| format!("{byte:02x}")).concat());
        }
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
}

/// Starts [`exporter`] on the device of the machine with this number.
fn start_exporter(device: &str) -> (Actor, [IpcMemoryHandle; 2]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "sharing::exporter", "--nocapture"]).env(ROLE, "exporter");
    command.env("CUDA_VISIBLE_DEVICES", device).env_remove("SIMCUDA_FAULTS");
    let mut exporter = Actor::spawn(&mut command);
    let handles = [(), ()].map(|()| {
        let digits = exporter.expect("handle ");
        let byte = |index: usize| u8::from_str_radix(&digits[2 * index..][..2], 16).unwrap();
        IpcMemoryHandle(std::array::from_fn(byte))
    });
    (exporter, handles)
}

#[test]
fn second_open_shares_the_mapping_and_last_drop_closes_it_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let (exporter, [first_handle, other_handle]) = start_exporter("0");
        let open = |handle, bytes, access| IpcMapping::open(context, handle, bytes, access).unwrap();
        let first = open(first_handle, GRANULARITY, Access::ReadOnly);
        let second = open(first_handle, 4096, Access::ReadWrite);
        assert_eq!((first.device_ptr(), first.len(), second.len()), (second.device_ptr(), GRANULARITY, 4096));
        assert_eq!((first.as_slice().access(), second.as_slice().access()), (Access::ReadOnly, Access::ReadWrite));
        let other = open(other_handle, 4096, Access::ReadOnly);
        assert_ne!(other.device_ptr(), first.device_ptr());

        let kind = |address| PointerInfo::of(context, address).unwrap().kind;
        let address = first.device_ptr();
        let other_address = other.device_ptr();
        drop((first, other));
        assert_eq!((kind(address), kind(other_address)), (PointerKind::Imported, PointerKind::Unknown));
        drop(second);
        assert_eq!(kind(address), PointerKind::Unknown);

        let again = open(first_handle, 4096, Access::ReadOnly);
        assert_eq!(again.slice(4000, 96).unwrap().len(), 96);
        assert!(matches!(again.slice(4000, 97), Err(AccessError::OutOfRange { .. })));
        let inside = PointerInfo::of(context, again.device_ptr() + 64).unwrap();
        let expected = (PointerKind::Imported, again.device_ptr(), 64, false);
        assert_eq!((inside.kind, inside.base, inside.offset(), inside.legacy_ipc), expected);
        drop(again);
        exporter.finish();
    });
}

#[test]
fn wrong_stated_size_is_refused_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuMemGetAddressRange:1=500"], &[], |context, _| {
        let (exporter, [handle, _]) = start_exporter("0");
        let error = IpcMapping::open(context, handle, 1, Access::ReadOnly).unwrap_err();
        assert!(is_failed(&error, "cuMemGetAddressRange", CuResult::NOT_FOUND), "{error}");
        for bytes in [0, GRANULARITY + 1, u64::MAX] {
            let error = IpcMapping::open(context, handle, bytes, Access::ReadOnly).unwrap_err();
            assert!(is_failed(&error, "cuIpcOpenMemHandle", CuResult::INVALID_VALUE), "{error}");
            assert!(error.to_string().ends_with("the driver reports 2097152"), "{error}");
        }
        exporter.finish();
    });
}

#[test]
fn refusal_to_open_explains_the_cause_on_the_simulated_gpu() {
    let codes = ["201", "400", "205", "1", "217"].map(|code| format!("cuIpcOpenMemHandle:1={code}"));
    on_the_simulated_gpu(&codes.each_ref().map(String::as_str), &[], |context, fault| {
        let handle = IpcMemoryHandle([0xAB; 64]);
        let error = IpcMapping::open(context, handle, 1, Access::ReadOnly).unwrap_err().to_string();
        let meaning = match fault.split_once('=').unwrap().1 {
            "201" => "this process made the handle itself",
            "400" => "the process that created the handle has ended",
            "205" => "name no memory that can be mapped here",
            "1" => "not a handle of this driver",
            _ => "a GPU that this one cannot reach",
        };
        assert!(error.contains(meaning), "{error}");
        assert_eq!(format!("{handle:?}"), "IpcMemoryHandle(abababab…)", "short enough for a log");
    });
}

#[test]
fn failed_close_is_stored_in_the_context_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuIpcCloseMemHandle:1=700"], &[], |context, _| {
        let (exporter, [handle, _]) = start_exporter("0");
        drop(IpcMapping::open(context, handle, 1, Access::ReadOnly).unwrap());
        assert_eq!(context.take_drop_error().unwrap().call, "cuIpcCloseMemHandle");
        exporter.finish();
    });
}

#[test]
fn experiments_on_a_mapping_do_not_affect_its_owner_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let (exporter, [handle, _]) = start_exporter("0");
        let open = || IpcMapping::open(context, handle, 4096, Access::ReadOnly).unwrap();
        let mapping = open();
        assert_eq!(free_mapping(&mapping).unwrap_err().code, CuResult::INVALID_VALUE);
        assert_eq!(beyond(&mapping, 8192, 16).unwrap().device_ptr(), mapping.device_ptr() + 8192);
        assert!(matches!(beyond(&mapping, GRANULARITY - 8, 16), Err(AccessError::OutOfRange { .. })));
        assert_eq!(close_twice(mapping).unwrap_err().call, "cuIpcCloseMemHandle");
        drop(open());
        exporter.finish();
    });
}

fn shared_memfd() -> OwnedFd {
    memfd::Draft::create("registration", 5000).unwrap().share().unwrap()
}

#[test]
fn registration_keeps_its_mapping_and_access_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let fd = shared_memfd();
        let frozen = memfd::Draft::create("registration", 4096).unwrap().freeze().unwrap();
        let frozen = Arc::new(SealedMap::new(&frozen).unwrap());
        let check = |registration: Result<HostRegistration, CudaError>, access| {
            let registration = registration.unwrap();
            assert_eq!((registration.access(), registration.as_slice().access()), (access, access));
            assert_eq!(registration.slice(8, 8).unwrap().device_ptr(), registration.device_ptr() + 8);
        };
        // The driver refuses to register memory for writing that is mapped for reading.
        let shared = |map| HostRegistration::shared(context, Arc::new(map));
        check(shared(SharedMap::writable(&fd).unwrap()), Access::ReadWrite);
        check(shared(SharedMap::readable(&fd).unwrap()), Access::ReadOnly);
        check(HostRegistration::frozen(context, Arc::clone(&frozen)), Access::ReadOnly);
        let registration = HostRegistration::frozen(context, Arc::clone(&frozen)).unwrap();
        assert_eq!(Arc::strong_count(&frozen), 2);
        let error = HostRegistration::frozen(context, frozen).unwrap_err();
        assert_eq!(error.code, CuResult::HOST_MEMORY_ALREADY_REGISTERED);
        assert!(error.to_string().contains("registered in this process already"), "{error}");
        drop(registration);
    });
}

#[test]
fn graph_never_captures_a_registration_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let map = Arc::new(SharedMap::writable(shared_memfd()).unwrap());
        let registration = HostRegistration::shared(context, map).unwrap();
        let buffer = DeviceBuffer::new(context, 8).unwrap();
        let stream = Stream::new(context).unwrap();
        assert!(while_capturing(context, &stream, || {
            let refused = registration.enqueue_copy_to(stream.as_ref(), 0, buffer.as_slice());
            assert_eq!(refused, Err(AccessError::Capturing));
            let refused = registration.enqueue_copy_from(stream.as_ref(), 0, buffer.as_slice());
            assert_eq!(refused, Err(AccessError::Capturing));
        }));
    });
}

#[test]
fn failed_registration_leaves_nothing_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuMemHostRegister:1=2", "cuMemHostGetDevicePointer:1=2"], &[], |context, step| {
        let map = Arc::new(SharedMap::writable(shared_memfd()).unwrap());
        let error = HostRegistration::shared(context, map).unwrap_err();
        assert!(is_failed(&error, call_of(step), CuResult::OUT_OF_MEMORY), "{error}");
        assert_eq!(error.to_string().contains("ulimit -l"), call_of(step) == "cuMemHostRegister");
    });
}

#[test]
fn pointer_kinds_are_distinguished_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let of = |address: u64| {
            let info = PointerInfo::of(context, address + 64).unwrap();
            assert!(info.kind == PointerKind::Unknown || (info.base, info.offset()) == (address, 64), "{info:?}");
            info
        };
        let ordinal = |info: &PointerInfo| info.device.map(|device| device.ordinal());
        let buffer = DeviceBuffer::new(context, 1000).unwrap();
        let device = of(buffer.as_slice().device_ptr());
        assert_eq!((device.kind, device.bytes, ordinal(&device)), (PointerKind::Device, 1000, Some(0)));
        assert!(device.legacy_ipc && !device.posix_fd && device.buffer_id != 0);
        let memory = PhysicalMemory::create(context, GRANULARITY).unwrap();
        let mapping = Mapping::new(memory, Access::ReadWrite).unwrap();
        let vmm = of(mapping.device_ptr());
        assert_eq!((vmm.kind, vmm.bytes, ordinal(&vmm)), (PointerKind::Vmm, GRANULARITY, Some(0)));
        assert!(!vmm.legacy_ipc && vmm.posix_fd);

        let unshareable =
            |memory: &UnshareableMemory| (of(memory.device_ptr()).kind, of(memory.device_ptr()).legacy_ipc);
        let pooled = UnshareableMemory::pooled(context, 4096).unwrap();
        assert_eq!(unshareable(&pooled), (PointerKind::Pool, false));
        let managed = UnshareableMemory::managed(context, 4096).unwrap();
        assert_eq!(unshareable(&managed), (PointerKind::Managed, false));
        let pinned = PinnedBuffer::new(context, 4096).unwrap();
        let on_host = of(pinned.as_ptr() as u64);
        assert!(on_host.kind == PointerKind::Pinned && on_host.device.is_none());
        let map = Arc::new(SharedMap::writable(shared_memfd()).unwrap());
        let registration = HostRegistration::shared(context, map).unwrap();
        assert_eq!(of(registration.device_ptr()).kind, PointerKind::Registered);

        let plain = vec![0_u8; 4096];
        let unknown = of(plain.as_ptr() as u64);
        assert_eq!((unknown.kind, unknown.base, unknown.bytes), (PointerKind::Unknown, unknown.address, 0));
        assert!(unknown.device.is_none() && unknown.offset() == 0);
    });
}

#[test]
fn memory_of_a_hidden_device_has_no_device_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        for (device, ordinal) in [("1", Some(1)), ("2", None)] {
            let (exporter, [handle, _]) = start_exporter(device);
            let mapping = IpcMapping::open(context, handle, 1, Access::ReadOnly).unwrap();
            let info = PointerInfo::of(context, mapping.device_ptr()).unwrap();
            assert_eq!((info.kind, info.device.map(|device| device.ordinal())), (PointerKind::Imported, ordinal));
            drop(mapping);
            exporter.finish();
        }
    });
}

#[test]
fn pointer_kind_is_an_error_in_a_lost_context_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuPointerGetAttributes:1=700", "cuMemRetainAllocationHandle:1=700"], &[], |context, _| {
        assert_eq!(PointerInfo::of(context, 1).unwrap_err().code, CuResult::ILLEGAL_ADDRESS);
    });
}
