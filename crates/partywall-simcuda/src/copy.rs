//! Copies and fills, in pieces: a killed process leaves a prefix behind, as a stopped device does.
//!
//! The host waits for the copies that the vendor's documentation names ("API synchronization behavior"): all copies of
//! pageable memory, except from a small source, which is staged during the call. Page-locked and registered memory is
//! read and written when the stream reaches the copy, so that reusing a buffer too early shows.

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{Code, DevicePtr, Handle};
use crate::context::{self, Ctx};
use crate::entry::entry_points;
use crate::memory::{self, HostRange, Want};
use crate::queue::{Runner, Ticket};
use crate::stream;

/// One end of a copy.
enum CopyEnd {
    /// Memory that devices can address: device memory, and host memory that is page-locked or registered.
    Mapped { context: Arc<Ctx>, address: DevicePtr },
    /// Host memory that is unknown to the driver.
    Pageable(usize),
    /// A copy that was made during the call.
    Staged(Vec<u8>),
}

/// A piece of an end; the pointer is valid as long as it lives.
struct Piece {
    pointer: *mut u8,
    bytes: usize,
    _keep: Option<HostRange>,
}

impl CopyEnd {
    /// Returns memory of a device, by its address.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the context cannot read all of it. If the context cannot write it, the copy itself fails.
    fn device(context: &Arc<Ctx>, address: DevicePtr, bytes: usize) -> Result<Self, Code> {
        let mut seen = 0;
        while seen < bytes {
            let at = address.checked_add(seen as u64).ok_or(Code::INVALID_VALUE)?;
            seen += memory::access(context, at, bytes - seen, Want::Read).map_err(|_| Code::INVALID_VALUE)?.bytes();
        }
        Ok(Self::Mapped { context: context.clone(), address })
    }

    /// Returns host memory, or the memory of a unified address.
    fn any(context: &Arc<Ctx>, address: DevicePtr, bytes: usize) -> Result<Self, Code> {
        if address == 0 {
            Err(Code::INVALID_VALUE)
        } else if memory::is_known(address) {
            Self::device(context, address, bytes)
        } else {
            Ok(Self::Pageable(address as usize))
        }
    }

    fn is_pageable(&self) -> bool {
        matches!(self, Self::Pageable(_))
    }

    /// Returns the largest contiguous piece from `offset` on, at most `bytes` bytes.
    fn piece(&self, offset: usize, bytes: usize, want: Want) -> Result<Piece, Code> {
        Ok(match self {
            Self::Mapped { context, address } => {
                let range = memory::access(context, address + offset as u64, bytes, want)?;
                Piece { pointer: range.pointer(), bytes: range.bytes(), _keep: Some(range) }
            }
            Self::Pageable(start) => Piece { pointer: (start + offset) as *mut u8, bytes, _keep: None },
            Self::Staged(copy) => Piece { pointer: copy[offset..].as_ptr().cast_mut(), bytes, _keep: None },
        })
    }
}

/// Enqueues a copy, and waits for it if the driver does.
fn enqueue(stream: Handle, to: CopyEnd, from: CopyEnd, bytes: usize, synchronous: bool) -> Result<(), Code> {
    let stream = stream::find(stream)?;
    let from = match from {
        CopyEnd::Pageable(start) if bytes <= STAGED && !to.is_pageable() && !synchronous => {
            // SAFETY: the caller of the copy passes memory of this size.
            CopyEnd::Staged(unsafe { std::slice::from_raw_parts(start as *const u8, bytes) }.to_vec())
        }
        from => from,
    };
    let wait = synchronous || to.is_pageable() || from.is_pageable();
    let ticket = stream.submit(move |runner| copy(runner, &to, &from, bytes))?;
    wait_if(wait, ticket, stream.context())
}

fn wait_if(wait: bool, ticket: Option<Ticket>, context: &Ctx) -> Result<(), Code> {
    let Some(ticket) = ticket.filter(|_| wait) else { return Ok(()) };
    ticket.wait();
    context.check()
}

fn copy(runner: &mut Runner, to: &CopyEnd, from: &CopyEnd, bytes: usize) -> Result<(), Code> {
    in_pieces(runner, bytes, |offset, most| {
        let to = to.piece(offset, most, Want::Write)?;
        let from = from.piece(offset, to.bytes, Want::Read)?;
        // SAFETY: both pieces are memory of this size, kept by themselves or by the caller of the copy until it is
        // done. They may overlap; races with other writers are the program's.
        unsafe { std::ptr::copy(from.pointer, to.pointer, from.bytes) };
        Ok(from.bytes)
    })
}

/// Calls `step` with an offset and a maximum number of bytes until all bytes are done. `step` returns how many it has
/// done.
pub(crate) fn in_pieces(
    runner: &mut Runner,
    bytes: usize,
    mut step: impl FnMut(usize, usize) -> Result<usize, Code>,
) -> Result<(), Code> {
    let mut done = 0;
    while done < bytes {
        if done > 0 {
            runner.pause();
            runner.context().check()?;
        }
        done += step(done, PIECE.min(bytes - done))?;
    }
    Ok(())
}

fn enqueue_fill<const WIDTH: usize>(
    stream: Handle,
    address: DevicePtr,
    value: [u8; WIDTH],
    count: usize,
) -> Result<(), Code> {
    let stream = stream::find(stream)?;
    let bytes = count.checked_mul(WIDTH).ok_or(Code::INVALID_VALUE)?;
    if !address.is_multiple_of(WIDTH as u64) {
        return Err(Code::INVALID_VALUE);
    }
    let to = CopyEnd::device(stream.context(), address, bytes)?;
    let pattern = value.repeat(PIECE / WIDTH);
    stream.submit(move |runner| {
        in_pieces(runner, bytes, |offset, most| {
            let piece = to.piece(offset, most, Want::Write)?;
            // SAFETY: the piece is memory of this size, which is at most that of the pattern.
            unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), piece.pointer, piece.bytes) };
            Ok(piece.bytes)
        })
    })?;
    Ok(())
}

fn host_to_device(
    to: DevicePtr,
    from: *const c_void,
    bytes: usize,
    stream: Handle,
    synchronous: bool,
) -> Result<(), Code> {
    let context = context::current()?;
    let to = CopyEnd::device(&context, to, bytes)?;
    let from = CopyEnd::any(&context, from as DevicePtr, bytes)?;
    enqueue(stream, to, from, bytes, synchronous)
}

fn device_to_host(
    to: *mut c_void,
    from: DevicePtr,
    bytes: usize,
    stream: Handle,
    synchronous: bool,
) -> Result<(), Code> {
    let context = context::current()?;
    let to = CopyEnd::any(&context, to as DevicePtr, bytes)?;
    let from = CopyEnd::device(&context, from, bytes)?;
    enqueue(stream, to, from, bytes, synchronous)
}

fn device_to_device(to: DevicePtr, from: DevicePtr, bytes: usize, stream: Handle) -> Result<(), Code> {
    let context = context::current()?;
    let to = CopyEnd::device(&context, to, bytes)?;
    let from = CopyEnd::device(&context, from, bytes)?;
    enqueue(stream, to, from, bytes, false)
}

fn unified(to: DevicePtr, from: DevicePtr, bytes: usize, stream: Handle, synchronous: bool) -> Result<(), Code> {
    let context = context::current()?;
    let to = CopyEnd::any(&context, to, bytes)?;
    let from = CopyEnd::any(&context, from, bytes)?;
    enqueue(stream, to, from, bytes, synchronous)
}

entry_points! {
    fn cuMemcpyHtoD_v2(to: DevicePtr, from: *const c_void, bytes: usize) { host_to_device(to, from, bytes, 0, true) }
    fn cuMemcpyHtoDAsync_v2(to: DevicePtr, from: *const c_void, bytes: usize, stream: Handle) {
        host_to_device(to, from, bytes, stream, false)
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: DevicePtr, bytes: usize) { device_to_host(to, from, bytes, 0, true) }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: DevicePtr, bytes: usize, stream: Handle) {
        device_to_host(to, from, bytes, stream, false)
    }
    // The host does not wait for a copy within device memory, nor for a fill.
    fn cuMemcpyDtoD_v2(to: DevicePtr, from: DevicePtr, bytes: usize) { device_to_device(to, from, bytes, 0) }
    fn cuMemcpyDtoDAsync_v2(to: DevicePtr, from: DevicePtr, bytes: usize, stream: Handle) {
        device_to_device(to, from, bytes, stream)
    }
    fn cuMemcpy(to: DevicePtr, from: DevicePtr, bytes: usize) { unified(to, from, bytes, 0, true) }
    fn cuMemcpyAsync(to: DevicePtr, from: DevicePtr, bytes: usize, stream: Handle) {
        unified(to, from, bytes, stream, false)
    }
    fn cuMemcpyPeerAsync(
        to: DevicePtr, to_context: Handle, from: DevicePtr, from_context: Handle, bytes: usize, stream: Handle,
    ) {
        let to = CopyEnd::device(&context::live(to_context)?, to, bytes)?;
        let from = CopyEnd::device(&context::live(from_context)?, from, bytes)?;
        enqueue(stream, to, from, bytes, false)
    }
    fn cuMemsetD8_v2(to: DevicePtr, value: u8, count: usize) { enqueue_fill(0, to, [value], count) }
    fn cuMemsetD8Async(to: DevicePtr, value: u8, count: usize, stream: Handle) {
        enqueue_fill(stream, to, [value], count)
    }
    fn cuMemsetD32_v2(to: DevicePtr, value: u32, count: usize) { enqueue_fill(0, to, value.to_ne_bytes(), count) }
    fn cuMemsetD32Async(to: DevicePtr, value: u32, count: usize, stream: Handle) {
        enqueue_fill(stream, to, value.to_ne_bytes(), count)
    }
}

/// The size of the pieces; a kill leaves each piece either complete or unchanged.
pub(crate) const PIECE: usize = 64 << 10;

/// The largest pageable source that the driver copies during the call (vendor's documentation: 64 KiB).
const STAGED: usize = 64 << 10;
