//! `cuIpc*` for memory: a handle names an allocation of another process; opening it maps the block it lies in.

use std::collections::BTreeMap;

use super::{Backing, Kind, Region, Tables};
use crate::abi::{Code, DevicePtr, IpcHandle};
use crate::context::Ctx;
use crate::entry::{entry_points, store};
use crate::ipc::{self, Payload};
use crate::{capture, context, device, ledger, stream};

/// A handle that this process has opened.
pub(super) struct Opened {
    /// The address of the block that contains the allocation.
    block: DevicePtr,
    /// How often it was opened, minus how often it was closed.
    count: u32,
}

/// The opened handles, by the address that the caller received.
pub(super) type Openings = BTreeMap<DevicePtr, Opened>;

/// Returns a handle's description of memory: the number of the device on the machine, and the offset in the block.
fn payload(device: u8, offset: u64) -> Payload {
    let mut payload = [0; 32];
    payload[..8].copy_from_slice(&offset.to_ne_bytes());
    payload[8] = ipc::MEMORY;
    payload[9] = device;
    payload
}

/// Creates a handle of the allocation that contains the address.
fn export(address: DevicePtr) -> Result<IpcHandle, Code> {
    context::current()?;
    let memory = &mut *super::lock();
    let (base, region) = memory.region(address).ok_or(Code::INVALID_VALUE)?;
    let (Kind::Plain, Some(device)) = (&region.kind, region.device) else { return Err(Code::INVALID_VALUE) };
    if let Some(handle) = memory.exports.get(&base) {
        return Ok(*handle);
    }
    let file = region.backing.file().expect("memory of a device is a file");
    let descriptor = file.try_clone_to_owned().map_err(|_| Code::OPERATING_SYSTEM)?;
    let handle = ipc::serve(descriptor, payload(device::all()[device].physical, region.offset))?;
    memory.exports.insert(base, handle);
    Ok(handle)
}

/// Maps the block of another process's allocation, or counts another open if it is mapped. Returns the address of the
/// allocation.
fn open(context: &Ctx, handle: IpcHandle) -> Result<DevicePtr, Code> {
    // Also if the block is already mapped, because every open requires that the exporter lives.
    let (file, payload) = ipc::fetch(&handle)?;
    let offset = u64::from_ne_bytes(payload[..8].try_into().expect("eight bytes"));
    if payload[8] != ipc::MEMORY {
        return Err(Code::INVALID_VALUE);
    }
    let inode = rustix::fs::fstat(&file).map_err(|_| Code::OPERATING_SYSTEM)?.st_ino;
    let memory = &mut *super::lock();
    let mapped = memory.regions.iter().find(|(_, region)| match region.kind {
        Kind::Opened { inode: mapped, .. } => mapped == inode,
        _ => false,
    });
    let block = match mapped.map(|(block, _)| *block) {
        Some(block) => block,
        None => {
            let backing = Backing::import(file)?;
            let bytes = backing.bytes() as u64;
            if offset >= bytes {
                return Err(Code::INVALID_VALUE);
            }
            let device = device::all().iter().position(|device| device.physical == payload[9]);
            let address = memory.space.take(bytes, 0)?;
            let id = memory.number();
            let kind = Kind::Opened { by: context.device, inode };
            let region = Region { bytes, backing, offset: 0, kind, device, context: context.handle, id };
            memory.regions.insert(address, region);
            address
        }
    };
    let opened = memory.openings.entry(block + offset).or_insert(Opened { block, count: 0 });
    opened.count += 1;
    ledger::record(OPENING, block + offset, memory.regions[&block].bytes);
    Ok(block + offset)
}

impl Tables {
    fn close(&mut self, address: DevicePtr) -> Result<(), Code> {
        let opened = self.openings.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
        ledger::remove(OPENING, address);
        opened.count -= 1;
        if opened.count > 0 {
            return Ok(());
        }
        let block = opened.block;
        self.openings.remove(&address);
        if self.openings.values().all(|other| other.block != block) {
            self.regions.remove(&block);
            self.space.give_back(block);
        }
        Ok(())
    }
}

entry_points! {
    fn cuIpcGetMemHandle(handle: *mut IpcHandle, pointer: DevicePtr) { store(handle, export(pointer)?) }
    fn cuIpcOpenMemHandle_v2(pointer: *mut DevicePtr, handle: IpcHandle, flags: u32) {
        let context = context::current()?;
        capture::unsafe_call()?;
        if pointer.is_null() || flags != LAZY_ENABLE_PEER_ACCESS { return Err(Code::INVALID_VALUE); }
        store(pointer, open(&context, handle)?)
    }
    // Waits for the work of the context, as the driver's does.
    fn cuIpcCloseMemHandle(pointer: DevicePtr) {
        let context = context::current()?;
        capture::unsafe_call()?;
        stream::synchronize(&context)?;
        super::lock().close(pointer)
    }
}

const OPENING: &str = "ipc mapping";
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
