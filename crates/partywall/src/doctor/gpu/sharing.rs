//! Probes of sharing between two processes: memory by file descriptor, memory and events by 64-byte handle.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_cuda::{
    Access as CudaAccess, Context, Device, DeviceBuffer, DeviceSlice, DeviceUuid, Driver, IpcEvent, IpcEventHandle,
    IpcMapping, IpcMemoryHandle, Kernels, Mapping, PhysicalMemory, Stream, round_up,
};

use super::{BYTES, Trouble, on_each};
use crate::{
    doctor::{
        Doctor, Probe,
        exchange::{self, Parcel},
        finding::Finding,
    },
    error::bytes,
};

/// The timeout for a stream of the other process that waits for a record that has happened.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The smallest unit that a legacy handle shares: a smaller allocation lies in a block with others, which would be
/// shared too.
const LEGACY_BYTES: u64 = 2 << 20;

/// Probes whether another process can use exported memory.
pub(in crate::doctor) fn vmm(doctor: &Doctor) -> Finding {
    on_each(doctor.scope, |device| {
        if !device.supports_vmm()? || !device.supports_posix_fd()? {
            return Err(Trouble::Wrong("it says that it cannot export memory as file descriptors".into()));
        }
        let (mapping, descriptor) = exported(device)?;
        let size = mapping.as_slice().len();
        let parcel = Parcel { bytes: size, gpu: device.uuid()?.to_string(), handle: Vec::new() };
        let seen = exchange::hand_over(doctor, Probe::TakeVmm, &parcel, Some(descriptor.as_fd()));
        Ok(format!("{} exported, imported by another process: {}", bytes(size), seen.map_err(Trouble::Wrong)?))
    })
    .or(
        "memory of that GPU cannot be shared between processes; what falls back is host memory (--device host), and a \
         copy",
        "virtual GPUs (vGPU) and WSL lack this; else update the driver",
    )
}

/// Allocates memory with the test pattern, and exports it.
pub(in crate::doctor) fn exported(device: Device) -> Result<(Mapping, OwnedFd), Trouble> {
    let context = Context::retain(device)?;
    let granularity = PhysicalMemory::granularity(&context)?;
    let size = round_up(BYTES, granularity).ok_or_else(|| Trouble::Wrong("its granularity is 0".into()))?;
    let mapping = Mapping::new(PhysicalMemory::create(&context, size)?, CudaAccess::ReadWrite)?;
    fill(&context, mapping.as_slice())?;
    let descriptor = mapping.memory().export()?;
    Ok((mapping, descriptor))
}

/// Plays the other process of [`vmm`].
pub(in crate::doctor) fn take_vmm(parcel: &Parcel, memory: Option<OwnedFd>) -> Result<String, String> {
    let memory = memory.ok_or("no file descriptor came along")?;
    in_context(parcel, |context| {
        let imported = PhysicalMemory::import(context, memory.as_fd(), parcel.bytes)?;
        let mapping = Mapping::new(imported, CudaAccess::ReadOnly)?;
        verify(context, mapping.as_slice())?;
        let mut copy = vec![0; parcel.bytes as usize];
        Stream::new(context)?.as_ref().copy_to_host(&mut copy, mapping.as_slice())?;
        exchange::check(&copy).map_err(Trouble::Wrong)?;
        Ok("every word right, by kernel and in a host copy".into())
    })
}

/// Probes whether another process can open memory of `cuMemAlloc`.
pub(in crate::doctor) fn legacy_memory(doctor: &Doctor) -> Finding {
    on_each(doctor.scope, |device| {
        let context = Context::retain(device)?;
        let buffer = DeviceBuffer::new(&context, LEGACY_BYTES)?;
        fill(&context, buffer.as_slice())?;
        let handle = IpcMemoryHandle::of(&context, buffer.as_slice().device_ptr())?;
        let parcel = Parcel { bytes: LEGACY_BYTES, gpu: device.uuid()?.to_string(), handle: handle.0.to_vec() };
        let seen = exchange::hand_over(doctor, Probe::TakeLegacyMemory, &parcel, None).map_err(Trouble::Wrong)?;
        Ok(format!("{} of cuMemAlloc, opened by another process: {seen}", bytes(LEGACY_BYTES)))
    })
    .or(
        "memory that other code allocated (torch's tensors) cannot be published in place; what falls back is a copy \
         into a segment of its own",
        "WSL, Jetson, virtual GPUs (vGPU) and other instances of a MIG device lack this; in containers, share the PID \
         namespace",
    )
}

/// Plays the other process of [`legacy_memory`].
pub(in crate::doctor) fn take_legacy_memory(parcel: &Parcel, _: Option<OwnedFd>) -> Result<String, String> {
    in_context(parcel, |context| {
        let handle = IpcMemoryHandle(bytes_of(parcel)?);
        let mapping = IpcMapping::open(context, handle, parcel.bytes, CudaAccess::ReadOnly)?;
        verify(context, mapping.as_slice())?;
        Ok("every word right, by kernel".into())
    })
}

/// Probes whether another process can open an event.
pub(in crate::doctor) fn legacy_events(doctor: &Doctor) -> Finding {
    on_each(doctor.scope, |device| {
        let context = Context::retain(device)?;
        let stream = Stream::new(&context)?;
        let event = IpcEvent::new(&context)?;
        let handle = event.export()?;
        // Recorded before the other process waits, because a wait is for the last record.
        event.record(stream.as_ref())?;
        let parcel = Parcel { bytes: 0, gpu: device.uuid()?.to_string(), handle: handle.0.to_vec() };
        let seen = exchange::hand_over(doctor, Probe::TakeLegacyEvent, &parcel, None).map_err(Trouble::Wrong)?;
        Ok(format!("recorded here, opened by another process: {seen}"))
    })
    .or(
        "programs that pass CUDA events between processes (torch.multiprocessing) fail; Partywall itself passes none",
        "both processes must be of one user and see one /dev/shm (--ipc=host)",
    )
}

/// Plays the other process of [`legacy_events`].
pub(in crate::doctor) fn take_legacy_event(parcel: &Parcel, _: Option<OwnedFd>) -> Result<String, String> {
    in_context(parcel, |context| {
        let event = IpcEvent::open(context, &IpcEventHandle(bytes_of(parcel)?))?;
        let stream = Stream::new(context)?;
        event.enqueue_wait(stream.as_ref())?;
        let deadline = Instant::now() + TIMEOUT;
        while !stream.as_ref().is_done()? {
            if Instant::now() > deadline {
                return Err(Trouble::Wrong("its stream still waits for an event that has happened".into()));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok("its stream waited for the record".into())
    })
}

/// Calls `action` in the context of the GPU that a parcel names.
pub(super) fn in_context(
    parcel: &Parcel,
    action: impl FnOnce(&Context) -> Result<String, Trouble>,
) -> Result<String, String> {
    let run = || {
        let uuid = parcel.gpu.parse::<DeviceUuid>().map_err(|error| Trouble::Wrong(error.to_string()))?;
        let device = Device::by_uuid(Driver::load()?, uuid)?;
        let device = device.ok_or_else(|| Trouble::Wrong(format!("{uuid} is not visible there")))?;
        action(&Context::retain(device)?)
    };
    run().map_err(|trouble| trouble.to_string())
}

fn fill(context: &Context, memory: DeviceSlice<'_>) -> Result<(), Trouble> {
    let stream = Stream::new(context)?;
    Kernels::load(context)?.enqueue_fill(stream.as_ref(), memory)?;
    Ok(stream.synchronize()?)
}

pub(super) fn verify(context: &Context, memory: DeviceSlice<'_>) -> Result<(), Trouble> {
    match Kernels::load(context)?.verify(Stream::new(context)?.as_ref(), memory, 1)? {
        None => Ok(()),
        Some(index) => Err(Trouble::Wrong(format!("a kernel there found word {index} wrong"))),
    }
}

fn bytes_of(parcel: &Parcel) -> Result<[u8; 64], Trouble> {
    parcel.handle.as_slice().try_into().map_err(|_| Trouble::Wrong("the handle has not 64 bytes".into()))
}
