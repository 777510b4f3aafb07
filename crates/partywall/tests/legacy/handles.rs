//! Handles of published tensors, which processes open that know no broker.

use std::{io::Read, sync::Arc, time::Duration};

use partywall::{
    DType, Error, Gpu, Place, Tensor,
    cuda::{Access, ForeignMemory, IpcMapping, IpcMemoryHandle},
    error::{InvalidArgument, Mismatch},
    gpu::devices,
};
use partywall_harness::say;

use super::world::{TIMEOUT, buffer, gpu, kept_by_the_test, publish, simulated};

/// Opens a handle, given by its bytes in hexadecimal and the tensor's place in the allocation. Says the tensor's bytes
/// for each byte that it reads.
pub(crate) fn play(role: &str) {
    let [handle, offset, bytes] = *role.split(' ').collect::<Vec<_>>() else { panic!("{role}") };
    let handle = std::array::from_fn(|i| u8::from_str_radix(&handle[2 * i..2 * i + 2], 16).unwrap());
    let (offset, bytes) = (offset.parse::<u64>().unwrap(), bytes.parse::<u64>().unwrap());
    let gpu = Gpu::open(devices().unwrap()[0].uuid().unwrap()).unwrap();
    let opened = IpcMapping::open(gpu.context(), IpcMemoryHandle(handle), offset + bytes, Access::ReadOnly).unwrap();
    say("ready");
    while std::io::stdin().read(&mut [0]).unwrap() > 0 {
        let mut seen = vec![0; bytes as usize];
        gpu.stream().copy_to_host(&mut seen, opened.slice(offset, bytes).unwrap()).unwrap();
        say(&format!("done {seen:?}"));
    }
}

/// Returns the role that opens a tensor's handle.
fn opener(tensor: &Tensor<'_>) -> String {
    let ipc = tensor.ipc_handle().unwrap();
    let handle: String = ipc.handle().0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("handle: {handle} {} {}", ipc.offset(), ipc.bytes())
}

// Holds 430.
#[test]
fn handle_shows_the_tensor_to_a_process_without_a_broker_on_the_simulated_gpu() {
    simulated("handles::handle_shows_the_tensor_to_a_process_without_a_broker_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let memory = buffer(&gpu, 4096, 7);
        let inner = kept_by_the_test(&gpu, memory.as_slice().device_ptr() + 256);
        gpu.stream().copy_from_host(memory.slice(256, 3).unwrap(), &[1, 2, 3]).unwrap();
        let published = domain.publish("x").tensor("t", DType::U8, &[3], &inner).commit().unwrap();
        let tensor = published.tensor("t").unwrap();
        let ipc = tensor.ipc_handle().unwrap();
        assert_eq!((ipc.offset(), ipc.bytes(), ipc.end()), (256, 3, 259));
        assert_eq!(Place::Gpu(ipc.gpu().uuid()), published.place());
        let mut other = world.play(&opener(&tensor));
        assert_eq!(other.request(""), "[1, 2, 3]");
        gpu.stream().copy_from_host(memory.slice(257, 1).unwrap(), &[9]).unwrap();
        assert_eq!(other.request(""), "[1, 9, 3]", "it is the same memory");
        // Another segment of this process keeps the memory, too.
        let again = domain.open("x", Duration::ZERO).unwrap();
        assert_eq!(opener(&again.tensor("t").unwrap()), opener(&tensor));
    });
}

// Holds 430.
#[test]
fn handle_of_memory_that_this_process_does_not_keep_is_refused_on_the_simulated_gpu() {
    simulated("handles::handle_of_memory_that_this_process_does_not_keep_is_refused_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let refused = |name: &str, tensor: &str, kind: &str| {
            let opened = domain.open(name, TIMEOUT).unwrap();
            match opened.tensor(tensor).unwrap().ipc_handle() {
                Err(Error::Mismatch(Mismatch::Kind { name: named, has, wanted: "published legacy", .. })) => {
                    assert_eq!((named.as_str(), has), (name, kind));
                }
                other => panic!("{name}: {other:?}"),
            }
        };
        let _publisher = world.play("publisher");
        refused("theirs", "x", "opened legacy");
        let uuid = gpu(&domain).uuid();
        for (name, place) in [("host", Place::Host), ("vmm", Place::Gpu(uuid)), ("pinned", Place::Pinned(0))] {
            let build = domain.create(name, place).tensor("x", DType::U8, &[16]).allocate().unwrap();
            let _committed = build.commit().unwrap();
            refused(name, "x", name);
        }
        let memory = ForeignMemory::try_from(buffer(&gpu(&domain), 16, 1)).unwrap();
        let published = domain.publish("x").tensor("empty", DType::U8, &[0], &memory).commit().unwrap();
        let empty = published.tensor("empty").unwrap().ipc_handle();
        assert!(matches!(empty, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), "{empty:?}");
    });
}

// Holds 431.
#[test]
fn memory_stays_as_long_as_the_segment_of_its_handle_on_the_simulated_gpu() {
    simulated("handles::memory_stays_as_long_as_the_segment_of_its_handle_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let memory = buffer(&gpu(&domain), 4096, 7);
        let freed = Arc::downgrade(&memory);
        let memory = ForeignMemory::try_from(memory).unwrap();
        let published = domain.publish("x").tensor("x", DType::U8, &[4], &memory).commit().unwrap();
        drop(memory);
        let tensor = published.tensor("x").unwrap();
        let mut other = world.play(&opener(&tensor));
        // Neither the end of the name nor a newer version ends the memory.
        let _newer = publish(&domain, "x", 8);
        domain.remove("x").unwrap();
        assert_eq!(other.request(""), "[7, 7, 7, 7]");
        assert_eq!(tensor.ipc_handle().unwrap().bytes(), 4);
        assert!(freed.upgrade().is_some());
        drop(other);
        drop(published);
        assert!(freed.upgrade().is_none());
    });
}
