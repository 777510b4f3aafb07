//! The memory of a version as file descriptors, for code that maps it by other means.

use std::{
    ffi::{CString, c_char, c_int},
    os::fd::{AsFd, AsRawFd},
};

use partywall::{Descriptors, Domain};

use crate::{
    argument::{c_text, store, store_info, store_optional, structs, text, timeout},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
    segment::beyond,
};

/// The memory of a version as file descriptors, and a lease on it. Nothing is mapped, and no driver is loaded. Any thread
/// may use it.
pub struct pw_descriptors {
    _opaque: (),
}

/// Descriptors, with what C was told by address.
struct OpenDescriptors {
    descriptors: Descriptors,
    kind: CString,
    device: CString,
}

object!(OpenDescriptors, pw_descriptors, 10, "descriptors object");
structs!(pw_descriptors_info);

/// What `pw_descriptors_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_descriptors_info {
    /// `sizeof(pw_descriptors_info)`, which the caller sets.
    pub size: usize,
    /// "host", whose descriptors `mmap` takes; "vmm", whose descriptors drivers import; "pinned", whose descriptors only
    /// CUDA imports. Valid until the object is closed.
    pub kind: *const c_char,
    /// Where the memory is: "host", "pinned:0" or the GPU's UUID. Valid until the object is closed.
    pub device: *const c_char,
    /// The version.
    pub version: u64,
    /// How many chunks there are, each with a descriptor.
    pub chunks: u64,
    /// 1 if processes may write the memory. If not, map it for reading only.
    pub is_mutable: u8,
    /// 1 if the version may grow. Map its chunks one after another: tensors may span them, and offsets count from the
    /// beginning of the first.
    pub may_grow: u8,
}

/// Opens the memory of a version as file descriptors, of the latest or of `NAME@V`, and waits up to `timeout_ns` until it
/// exists; negative means without end. The caller owns `*descriptors`, and closes it once the memory is not used any
/// more.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `descriptors` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_descriptors_open(
    domain: *const pw_domain,
    name: *const c_char,
    timeout_ns: i64,
    descriptors: *mut *mut pw_descriptors,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(descriptors, || {
            let domain = handle::get::<Domain>(domain)?;
            let descriptors = domain.descriptors(text(name, "name")?, timeout(timeout_ns))?;
            let kind = c_text(descriptors.kind());
            let device = c_text(&descriptors.place().to_string());
            Ok(OpenDescriptors { descriptors, kind, device })
        })
    })
}

/// Closes the descriptors and gives the lease back. Memory that was mapped or imported stays. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_descriptors_close(descriptors: *mut pw_descriptors) -> pw_status {
    call(|| handle::close::<OpenDescriptors>(descriptors))
}

/// Stores what is known about the memory. Does not block.
///
/// # Safety
/// No other thread closes `descriptors`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_descriptors_info_get(
    descriptors: *const pw_descriptors,
    info: *mut pw_descriptors_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OpenDescriptors { descriptors, kind, device } = handle::get::<OpenDescriptors>(descriptors)?;
        let known = pw_descriptors_info {
            size: 0,
            kind: kind.as_ptr(),
            device: device.as_ptr(),
            version: descriptors.version(),
            chunks: descriptors.chunks().len() as u64,
            is_mutable: descriptors.is_mutable().into(),
            may_grow: descriptors.may_grow().into(),
        };
        store_info(info, known)
    })
}

/// Stores the descriptor of a chunk, counted from 0, and its length as allocated, which is the size to import. The
/// descriptor belongs to the object, closes on exec, and is closed with it.
///
/// # Safety
/// No other thread closes `descriptors`; `fd` may be written; `bytes` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_descriptors_chunk(
    descriptors: *const pw_descriptors,
    index: usize,
    fd: *mut c_int,
    bytes: *mut u64,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let chunks = handle::get::<OpenDescriptors>(descriptors)?.descriptors.chunks();
        let chunk = chunks.get(index).ok_or_else(|| beyond("chunk", index, chunks.len()))?;
        store(fd, chunk.as_fd().as_raw_fd(), "fd")?;
        store_optional(bytes, chunk.bytes());
        Ok(())
    })
}

/// Stores where a tensor is: the chunk, the offset in it and the length in bytes. Each may be null.
///
/// # Safety
/// No other thread closes `descriptors`; `tensor` ends with a zero byte; the others are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_descriptors_tensor(
    descriptors: *const pw_descriptors,
    tensor: *const c_char,
    chunk: *mut usize,
    offset: *mut u64,
    bytes: *mut u64,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (exported, tensor) = (handle::get::<OpenDescriptors>(descriptors)?, text(tensor, "tensor")?);
        let absent = || Failure::argument(format!("there is no tensor {tensor:?}"), "`partywall show NAME` lists them");
        let found = exported.descriptors.table().find(tensor).ok_or_else(absent)?;
        store_optional(chunk, found.chunk());
        store_optional(offset, found.offset());
        store_optional(bytes, found.bytes());
        Ok(())
    })
}
