//! Memory of NUMA nodes: the uses of a mapping, and everything is freed, whichever call fails.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use partywall_cuda::{
    Access, AccessError, Context, CuResult, Device, Driver, Kernels, MemoryPlace, NodeImportError, NodeMapping,
    NodeMemory, NodeUse, PhysicalMemory, PointerInfo, PointerKind, Stream,
};
use partywall_os::borrow::BlockBorrows;

use crate::{GRANULARITY, call_of, is_failed, on_the_simulated_gpu, while_capturing, without_a_context};

fn driver() -> &'static Driver {
    Driver::load().unwrap()
}

fn memory() -> NodeMemory {
    NodeMemory::create(driver(), 0, GRANULARITY).unwrap()
}

fn map(used_as: NodeUse) -> NodeMapping {
    NodeMapping::new(memory(), used_as).unwrap()
}

/// Returns the rights of the process to memory, as the kernel reports them.
fn rights(bytes: &[u8]) -> String {
    let address = format!("{:x}-", bytes.as_ptr() as usize);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&address)).unwrap();
    line.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn nodes_are_asked_of_the_devices_on_the_simulated_gpu() {
    without_a_context(&[""], &[], |_| {
        let all = Device::all(driver()).unwrap();
        assert_eq!(all.iter().map(|device| device.numa_node().unwrap()).collect::<Vec<_>>(), [0, 1]);
        assert!(all[1].supports_node_memory().unwrap());
        assert_eq!(NodeMemory::granularity(driver()).unwrap(), GRANULARITY);
        assert_eq!(
            NodeMemory::create(driver(), 7, GRANULARITY).unwrap_err().to_string(),
            "cuMemCreate failed: CUDA_ERROR_INVALID_VALUE (1): 2097152 bytes on NUMA node 7 (is there such a node?)"
        );
        assert_eq!(
            NodeMemory::create(driver(), 1, 1 << 40).unwrap_err().to_string(),
            "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2): 1099511627776 bytes on NUMA node 1"
        );
    });
}

#[test]
fn older_driver_has_no_nodes_on_the_simulated_gpu() {
    let unknown = "cuDeviceGetAttribute:1=1,cuDeviceGetAttribute:2=1";
    without_a_context(&[unknown], &[], |_| {
        let device = Device::by_ordinal(driver(), 1).unwrap();
        assert_eq!((device.numa_node().unwrap(), device.supports_node_memory().unwrap()), (0, false));
    });
}

#[test]
fn draft_is_written_and_frozen_without_a_context_on_the_simulated_gpu() {
    without_a_context(&["", "cuMemSetAccess:2=1"], &[], |faults| {
        let mut draft = map(NodeUse::Draft);
        assert!(draft.bytes_mut().unwrap().is_none() && draft.writer().is_none(), "the CPU has no access yet");
        draft.allow_cpu().unwrap();
        draft.allow_cpu().unwrap();
        assert!(draft.bytes().is_none() && draft.shared().is_none());
        draft.bytes_mut().unwrap().unwrap()[0] = 1;
        let writer = draft.writer().unwrap();
        std::thread::scope(|scope| {
            for part in 0..4_u64 {
                let writer = &writer;
                scope.spawn(move || writer.write(1 + part * 1000, &[part as u8 + 2; 1000]).unwrap());
            }
        });
        assert_eq!(
            writer.write(GRANULARITY, &[1]),
            Err(AccessError::OutOfRange { offset: GRANULARITY, len: 1, available: GRANULARITY })
        );
        if !faults.is_empty() {
            draft.freeze().unwrap_err();
            draft.bytes_mut().unwrap().unwrap()[1] = 2;
        }
        draft.freeze().unwrap();
        draft.freeze().unwrap();
        assert!(draft.bytes_mut().unwrap().is_none() && draft.writer().is_none() && draft.shared().is_none());
        let bytes = draft.bytes().unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[1001], bytes[4000], bytes[4001]), (1, 2, 3, 5, 0));
        assert_eq!(draft.access(), Access::ReadOnly);

        assert_eq!(rights(bytes), "r--s");
        assert!(!Device::by_ordinal(driver(), 0).unwrap().primary_context_active().unwrap());
    });
}

#[test]
fn importer_refuses_memory_of_another_place_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let import = |memory: &NodeMemory, node| {
            NodeMemory::import(driver(), node, memory.export().unwrap().as_fd(), GRANULARITY)
        };
        let imported = import(&memory(), 0).unwrap();
        assert_eq!((imported.node(), imported.len()), (0, GRANULARITY));
        assert_eq!(imported.export().unwrap_err().code, CuResult::INVALID_VALUE);
        let wrong = import(&memory(), 1).unwrap_err();
        assert_eq!(wrong, NodeImportError::OtherPlace { wanted: 1, found: MemoryPlace::Node(0) });
        let on_device = PhysicalMemory::create(context, GRANULARITY).unwrap().export().unwrap();
        let wrong = NodeMemory::import(driver(), 0, on_device.as_fd(), GRANULARITY).unwrap_err();
        assert_eq!(wrong.to_string(), "the descriptor is memory of device 0, not of NUMA node 0");
        let on_node = memory().export().unwrap();
        let wrong = PhysicalMemory::import(context, on_node.as_fd(), GRANULARITY).unwrap_err();
        assert_eq!(
            wrong.to_string(),
            "cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_DEVICE (101): the memory lies on NUMA node 0, not \
             on a device"
        );
        let file = File::open("/dev/null").unwrap();
        let wrong = NodeMemory::import(driver(), 0, file.as_fd(), GRANULARITY).unwrap_err();
        assert!(matches!(wrong, NodeImportError::Driver(error) if error.code == CuResult::UNKNOWN));
    });
}

#[test]
fn devices_and_the_cpu_use_one_address_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let other = Context::retain(Device::by_ordinal(driver(), 1).unwrap()).unwrap();
        let mapping = map(NodeUse::Writable);
        mapping.allow_device(context).unwrap();
        mapping.allow_device(context).unwrap();
        let kernels = Kernels::load(context).unwrap();
        let stream = Stream::new(context).unwrap();
        kernels.enqueue_fill(stream.as_ref(), mapping.slice(context, 0, GRANULARITY).unwrap()).unwrap();
        assert!(mapping.shared().is_none());
        assert_eq!(mapping.slice(&other, 0, 4).unwrap_err(), AccessError::NoAccess { device: 1 });
        assert!(matches!(mapping.slice(context, 1, GRANULARITY), Err(AccessError::OutOfRange { .. })));

        // Added while the stream works.
        mapping.allow_cpu().unwrap();
        mapping.allow_device(&other).unwrap();
        mapping.synchronize().unwrap();
        let view = mapping.shared().unwrap();
        let word = partywall_cuda::kernels::expected(5);
        assert_eq!(view.slice::<u32>(20, 1).unwrap().get(0), word);
        view.slice::<u32>(20, 1).unwrap().set(0, 7);
        let mut seen = [0; 4];
        let stream = Stream::new(&other).unwrap();
        stream.as_ref().copy_to_host(&mut seen, mapping.slice(&other, 20, 4).unwrap()).unwrap();
        assert_eq!(u32::from_ne_bytes(seen), 7);
        let info = PointerInfo::of(context, mapping.slice(context, 0, 4).unwrap().device_ptr()).unwrap();
        assert!(info.kind == PointerKind::Vmm && info.device.is_none());
    });
}

#[test]
fn readable_memory_is_written_by_nobody_here_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let memory = Arc::new(memory());
        let writer = NodeMapping::new(memory.clone(), NodeUse::Writable).unwrap();
        let mut reader = NodeMapping::new(memory, NodeUse::Readable).unwrap();
        for mapping in [&writer, &reader] {
            mapping.allow_cpu().unwrap();
            mapping.allow_device(context).unwrap();
        }
        writer.shared().unwrap().write_bytes(3, &[1, 2, 3]).unwrap();
        assert!(!reader.shared().unwrap().is_writable());
        assert_eq!(reader.shared().unwrap().slice::<u8>(5, 1).unwrap().get(0), 3);
        let stream = Stream::new(context).unwrap();
        let refused = stream.as_ref().copy_from_host(reader.slice(context, 0, 4).unwrap(), &[0; 4]);
        assert_eq!(refused, Err(AccessError::ReadOnly));
        assert!(reader.bytes().is_none() && reader.bytes_mut().unwrap().is_none());
        reader.share();
        assert_eq!(reader.freeze().unwrap_err().code, CuResult::INVALID_VALUE);
        assert_eq!(reader.access(), Access::ReadOnly);
    });
}

#[test]
fn mapping_grows_for_everybody_or_not_at_all_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["", "cuMemMap:2=2", "cuMemSetAccess:3=2"], &[], |context, step| {
        let mapping = NodeMapping::with_reservation(memory(), NodeUse::Writable, 4 * GRANULARITY).unwrap();
        mapping.allow_cpu().unwrap();
        mapping.allow_device(context).unwrap();
        let view = mapping.shared().unwrap();
        if !step.is_empty() {
            let failed = mapping.extend([memory()]).map(drop);
            assert!(matches!(&failed, Err(AccessError::Driver(error)) if error.call == call_of(step)), "{failed:?}");
        }
        drop(mapping.extend([memory()]).unwrap());
        assert_eq!((mapping.len(), view.len() as u64), (GRANULARITY, GRANULARITY));
        mapping.extend([memory(), memory()]).unwrap().publish();
        assert_eq!((mapping.len(), view.len() as u64), (3 * GRANULARITY, 3 * GRANULARITY));
        assert_eq!((mapping.reserved(), view.reserved() as u64), (4 * GRANULARITY, 4 * GRANULARITY));
        view.write_bytes(GRANULARITY as usize - 4, &[9; 8]).unwrap();
        let stream = Stream::new(context).unwrap();
        let mut seen = [0; 8];
        stream.as_ref().copy_to_host(&mut seen, mapping.slice(context, GRANULARITY - 4, 8).unwrap()).unwrap();
        assert_eq!(seen, [9; 8]);
        let available = 4 * GRANULARITY;
        let refused = mapping.extend([memory(), memory()]).unwrap_err();
        assert_eq!(refused, AccessError::OutOfRange { offset: available, len: GRANULARITY, available });
    });
}

#[test]
fn blocks_keep_the_memory_on_the_simulated_gpu() {
    without_a_context(&[""], &[], |_| {
        let mut draft = map(NodeUse::Draft);
        draft.allow_cpu().unwrap();
        draft.share();
        let blocks = BlockBorrows::new(draft.shared().unwrap().clone(), 0, 4096, 4096, 8).unwrap();
        drop(draft);
        let mut block = blocks.borrow_mut(7).unwrap();
        blocks.bytes_mut(&mut block).fill(3);
        blocks.give_back_mut(block);
        let block = blocks.borrow(7).unwrap();
        assert_eq!(blocks.bytes(&block)[4095], 3);
        blocks.give_back(block);
    });
}

#[test]
fn failed_step_leaves_nothing_on_the_simulated_gpu() {
    let steps = [
        "cuMemCreate:1=999",
        "cuMemExportToShareableHandle:1=999",
        "cuMemImportFromShareableHandle:1=999",
        "cuMemGetAllocationPropertiesFromHandle:1=999",
        "cuMemAddressReserve:1=999",
        "cuMemMap:1=999",
        "cuMemSetAccess:1=999",
    ];
    without_a_context(&steps, &[], |step| {
        let run = || -> Result<(), NodeImportError> {
            let memory = NodeMemory::create(driver(), 1, GRANULARITY)?;
            let imported = NodeMemory::import(driver(), 1, memory.export()?.as_fd(), GRANULARITY)?;
            Ok(NodeMapping::new(imported, NodeUse::Frozen)?.allow_cpu()?)
        };
        match run().unwrap_err() {
            NodeImportError::Driver(error) => assert!(is_failed(&error, call_of(step), CuResult::UNKNOWN), "{error}"),
            other => panic!("{other}"),
        }
    });
}

#[test]
fn failed_drop_of_node_memory_is_reported_once_on_the_simulated_gpu() {
    without_a_context(&["cuMemUnmap:1=700"], &[], |_| {
        drop(map(NodeUse::Draft));
        assert_eq!(driver().take_drop_error().unwrap().call, "cuMemUnmap");
        assert_eq!(driver().take_drop_error(), None);
    });
}

#[test]
fn node_memory_is_used_during_captures_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let stream = Stream::new(context).unwrap();
        let whole = while_capturing(context, &stream, || {
            let mapping = map(NodeUse::Writable);
            mapping.allow_cpu().unwrap();
            mapping.allow_device(context).unwrap();
            let descriptor = mapping.memory().export().unwrap();
            drop(NodeMemory::import(driver(), 0, descriptor.as_fd(), GRANULARITY).unwrap());
        });
        assert!(whole);
    });
}
