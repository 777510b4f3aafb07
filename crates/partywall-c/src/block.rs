//! Blocks that this process holds.

use std::ffi::{c_char, c_void};

use partywall::Block;

use crate::{
    argument::{self, array, array_mut, dtype, store_bytes, store_info, stream_gpu, structs, text_out},
    error::{call, pw_status},
    handle::{self, object},
};

/// The longest text that names a block: a name of 255 bytes, three numbers, their signs and the final zero byte.
pub const PW_BLOCK_TEXT: usize = 320;

/// A block of memory that this process holds, of a pool or a queue. One thread may use it at a time.
pub struct pw_block {
    _opaque: (),
}

pub(crate) struct HeldBlock(pub(crate) Block);

object!(HeldBlock, pw_block, 13, "block");
structs!(pw_block_info);

/// What `pw_block_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_block_info {
    /// `sizeof(pw_block_info)`, which the caller sets.
    pub size: usize,
    /// The elements along each dimension, valid until the block is changed or closed.
    pub shape: *const u64,
    /// The bytes of its range.
    pub bytes: u64,
    /// Changes each time that the block is taken or accepted.
    pub generation: u64,
    /// How many dimensions there are.
    pub rank: u32,
    /// The element type: bytes unless `pw_block_set_tensor` set another.
    pub dtype: u32,
    /// Its number in the pool.
    pub index: u32,
}

/// Stores what is known about a block. Does not block.
///
/// # Safety
/// No other thread changes or closes `block`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_info_get(block: *const pw_block, info: *mut pw_block_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let HeldBlock(block) = handle::get::<HeldBlock>(block)?;
        let known = pw_block_info {
            size: 0,
            shape: block.shape().as_ptr(),
            bytes: block.len(),
            generation: block.generation(),
            rank: block.shape().len() as u32,
            dtype: block.dtype().code().into(),
            index: block.index(),
        };
        store_info(info, known)
    })
}

/// Has all calls use the `length` bytes of the block from `offset` on. Changes no byte.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_set_range(block: *mut pw_block, offset: u64, length: u64) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let HeldBlock(block) = unsafe { handle::get_mut::<HeldBlock>(block) }?;
        Ok(block.set_range(offset..offset.saturating_add(length))?)
    })
}

/// Has the block be a tensor at the beginning of its range, as a task carries it. Changes no byte.
///
/// # Safety
/// No other thread uses `block`; `shape` has `rank` lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_set_tensor(
    block: *mut pw_block,
    element: u32,
    shape: *const u64,
    rank: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (HeldBlock(block), shape) = (handle::get_mut::<HeldBlock>(block)?, array(shape, rank, "shape")?);
        Ok(block.set_tensor(dtype(element)?, shape)?)
    })
}

/// Stores the address and length of a block in host or pinned memory, for reading and writing by the CPU until the block
/// is closed. If `pw_block_device` was called, first waits until the work of this process on that GPU is done.
///
/// # Safety
/// No other thread uses `block`; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_data(block: *mut pw_block, data: *mut *mut c_void, length: *mut usize) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let bytes = handle::get_mut::<HeldBlock>(block)?.0.bytes_mut()?;
        store_bytes(data, bytes.as_mut_ptr().cast(), length, bytes.len() as u64)
    })
}

/// Stores the device address and length of a block, for the caller's kernels and copies until the block is closed. Does
/// not block.
///
/// # Safety
/// As `pw_block_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_device(
    block: *mut pw_block,
    address: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let range = handle::get_mut::<HeldBlock>(block)?.0.device_mut()?;
        store_bytes(address, argument::address(range.device_ptr()), length, range.bytes())
    })
}

/// Copies `length` bytes to the beginning of a block, in any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread uses `block`; `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_write(block: *mut pw_block, bytes: *const c_void, length: usize) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { Ok(handle::get_mut::<HeldBlock>(block)?.0.write(array(bytes.cast(), length, "bytes")?)?) })
}

/// Copies `length` bytes of a block, from `offset` on, to `bytes`, from any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread changes or closes `block`; `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_read(
    block: *const pw_block,
    offset: u64,
    bytes: *mut c_void,
    length: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        Ok(handle::get::<HeldBlock>(block)?.0.read_at(offset, array_mut(bytes.cast(), length, "bytes")?)?)
    })
}

/// Sets all bytes of a block in host or pinned memory to zero.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_zero(block: *mut pw_block) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get_mut::<HeldBlock>(block) }?.0.zero()?))
}

/// Enqueues setting all bytes of a block to zero. Does not block. Null is the legacy default stream.
///
/// # Safety
/// No other thread uses `block`; `stream` is a stream of the primary context of the block's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_zero_on(block: *mut pw_block, stream: *mut c_void) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let HeldBlock(block) = handle::get_mut::<HeldBlock>(block)?;
        let gpu = stream_gpu(block.domain(), block.gpu())?;
        Ok(block.zero_on(argument::stream(&gpu, stream))?)
    })
}

/// Offers a block to the process that passes the text which this stores to `pw_pool_accept`. `PW_BLOCK_TEXT` bytes
/// always suffice. Its bytes are complete; work of a GPU that still uses it is ordered by other means.
///
/// On success the block is closed. If the buffer is too small it is still the caller's; after another failure it is
/// given back.
///
/// # Safety
/// No other thread uses `block`; `text` has `capacity` bytes; `length` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_offer(
    block: *mut pw_block,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        argument::check_out(text, "text")?;
        if capacity < PW_BLOCK_TEXT {
            return Err(argument::too_small(PW_BLOCK_TEXT, capacity));
        }
        let HeldBlock(block) = handle::take::<HeldBlock>(block)?;
        text_out(&block.offer()?.to_string(), text, capacity, length)
    })
}

/// Gives a block back. If `pw_block_device` was called, first waits until the work of this process on that GPU is done.
/// Null is ignored.
///
/// # Safety
/// No other thread uses the handle, and nobody the addresses that it gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_close(block: *mut pw_block) -> pw_status {
    call(|| handle::finish(block, |HeldBlock(block)| Ok(block.give_back()?)))
}

/// Gives a block back once the work that is on `stream` now is done. Does not wait. On failure the block is still the
/// caller's.
///
/// # Safety
/// As `pw_block_close`; `stream` is a stream of the primary context of the block's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_close_on(block: *mut pw_block, stream: *mut c_void) -> pw_status {
    call(|| {
        handle::consume(block, |HeldBlock(block)| {
            let gpu = match stream_gpu(block.domain(), block.gpu()) {
                Ok(gpu) => gpu,
                Err(error) => return Err((error.into(), HeldBlock(block))),
            };
            // SAFETY: the caller's promise.
            let stream = unsafe { argument::stream(&gpu, stream) };
            block.release_on(stream).map_err(|failed| (failed.error.into(), HeldBlock(*failed.value)))
        })
    })
}
