//! Probe of pinned host memory: written by the CPU here, read by a GPU and by the CPU of another process.

use std::os::fd::{AsFd, OwnedFd};

use partywall_cuda::{Driver, NodeImportError, NodeMapping, NodeMemory, NodeUse, kernels::expected, round_up};

use super::{
    BYTES, Trouble, on_each,
    sharing::{in_context, verify},
};
use crate::{
    doctor::{
        Doctor, Probe,
        exchange::{self, Parcel},
        finding::Finding,
    },
    error::bytes,
};

/// Probes whether another process can use memory that the driver has allocated on the NUMA node of a GPU.
pub(in crate::doctor) fn pinned_memory(doctor: &Doctor) -> Finding {
    on_each(doctor.scope, |device| {
        if !device.supports_node_memory()? {
            return Err(Trouble::Wrong("it says that it cannot allocate pinned memory on a NUMA node".into()));
        }
        let driver = Driver::load()?;
        let node = device.numa_node()?;
        let size = round_up(BYTES, NodeMemory::granularity(driver)?);
        let size = size.ok_or_else(|| Trouble::Wrong("its granularity is 0".into()))?;
        let mut mapping = NodeMapping::new(NodeMemory::create(driver, node, size)?, NodeUse::Draft)?;
        mapping.allow_cpu()?;
        let words = mapping.bytes_mut()?.ok_or_else(no_access)?.as_chunks_mut::<4>().0;
        for (index, word) in words.iter_mut().enumerate() {
            *word = expected(index as u64).to_ne_bytes();
        }
        let descriptor = mapping.memory().export()?;
        let handle = node.to_ne_bytes().to_vec();
        let parcel = Parcel { bytes: size, gpu: device.uuid()?.to_string(), handle };
        let seen = exchange::hand_over(doctor, Probe::TakePinnedMemory, &parcel, Some(descriptor.as_fd()));
        let seen = seen.map_err(Trouble::Wrong)?;
        let size = bytes(size);
        // Measured where control groups could be looked at.
        Ok(format!(
            "{size} on NUMA node {node}, imported by another process: {seen}; the memory limit of a container does not \
             count it"
        ))
    })
    .or(
        "there is no memory of kind pinned here (--device pinned); what falls back is host memory, which pin() registers \
         in each process",
        "update the driver; virtual GPUs (vGPU) and WSL may lack this, and so does a node without free memory",
    )
}

/// Plays the other process of [`pinned_memory`].
pub(in crate::doctor) fn take_pinned_memory(parcel: &Parcel, memory: Option<OwnedFd>) -> Result<String, String> {
    let memory = memory.ok_or("no file descriptor came along")?;
    let node = parcel.handle.as_slice().try_into().map_err(|_| "no NUMA node came along")?;
    let node = u32::from_ne_bytes(node);
    in_context(parcel, |context| {
        let imported = NodeMemory::import(context.device().driver(), node, memory.as_fd(), parcel.bytes);
        let imported = imported.map_err(|error| match error {
            NodeImportError::Driver(error) => Trouble::Cuda(error),
            error => Trouble::Wrong(error.to_string()),
        })?;
        let mapping = NodeMapping::new(imported, NodeUse::Frozen)?;
        mapping.allow_device(context)?;
        verify(context, mapping.slice(context, 0, parcel.bytes)?)?;
        mapping.allow_cpu()?;
        exchange::check(mapping.bytes().ok_or_else(no_access)?).map_err(Trouble::Wrong)?;
        Ok("every word right, by kernel and by the CPU".into())
    })
}

fn no_access() -> Trouble {
    Trouble::Wrong("the CPU has no access to its mapping".into())
}
