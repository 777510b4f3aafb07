//! Open versions of segments: their tensors, other versions, growth.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_char, c_void},
    path::Path,
    ptr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use partywall::{Domain, Drain, Refreshed, Segment, Tensor};

use crate::{
    argument::{
        self, array, array_mut, c_text, device_gpu, place, store, store_bytes, store_info, structs, text, timeout,
    },
    build::{committed, pw_segment_options},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
};

/// The version has not grown.
pub const PW_UNCHANGED: u32 = 0;
/// The version has grown, and all of it is mapped now.
pub const PW_GROWN: u32 = 1;
/// The version has grown beyond the addresses that this process has reserved, and keeps its former length here. Open it
/// again to map all of it.
pub const PW_DOES_NOT_FIT: u32 = 2;

/// An open version of a name: its memory, mapped into this process. Any thread may use it, except for
/// `pw_segment_advance` and closing.
pub struct pw_segment {
    _opaque: (),
}

/// A segment, with what C was told by address.
pub(crate) struct OpenSegment {
    /// Shared with tensors that other libraries have.
    pub(crate) segment: Arc<Segment>,
    kind: CString,
    device: CString,
    metadata: OnceLock<Vec<(CString, CString)>>,
    tensors: Mutex<Described>,
}

object!(OpenSegment, pw_segment, 8, "segment");
structs!(pw_ipc_handle, pw_open_options, pw_segment_info, pw_tensor_info);

/// Descriptions of tensors. What they own is not changed or dropped before the segment, because C may have its addresses.
#[derive(Default)]
struct Described {
    /// The names in the order in which they were added, as far as they were asked for.
    order: Vec<String>,
    /// A tensor that grew has several.
    of: HashMap<String, Vec<Description>>,
}

#[derive(PartialEq)]
struct Description {
    name: CString,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl From<Segment> for OpenSegment {
    fn from(segment: Segment) -> Self {
        let kind = c_text(segment.kind());
        let device = c_text(&segment.place().to_string());
        Self { segment: Arc::new(segment), kind, device, metadata: OnceLock::new(), tensors: Mutex::default() }
    }
}

impl OpenSegment {
    fn metadata(&self) -> &[(CString, CString)] {
        self.metadata.get_or_init(|| self.segment.metadata().map(|(key, value)| (c_text(key), c_text(value))).collect())
    }

    /// Returns the name of the tensor that was added at this place.
    fn name_at(&self, index: usize) -> Result<String, Failure> {
        let count = self.segment.len();
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        if tensors.order.len() < count {
            tensors.order = self.segment.tensors().iter().map(|tensor| tensor.name().to_owned()).collect();
        }
        tensors.order.get(index).cloned().ok_or_else(|| beyond("tensor", index, count))
    }

    fn describe(&self, tensor: &Tensor<'_>) -> pw_tensor_info {
        let description = Description { name: c_text(tensor.name()), shape: tensor.shape(), strides: tensor.strides() };
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        let of = tensors.of.entry(tensor.name().to_owned()).or_default();
        let index = of.iter().position(|known| *known == description).unwrap_or_else(|| {
            of.push(description);
            of.len() - 1
        });
        pw_tensor_info {
            size: 0,
            name: of[index].name.as_ptr(),
            shape: of[index].shape.as_ptr(),
            strides: of[index].strides.as_ptr(),
            rank: of[index].shape.len() as u32,
            dtype: tensor.dtype().code().into(),
            bytes: tensor.bytes(),
        }
    }
}

/// The failure that a list has no such place.
pub(crate) fn beyond(what: &str, index: usize, count: usize) -> Failure {
    Failure::argument(format!("there is no {what} {index}: there are {count}, counted from 0"), "ask for fewer")
}

/// How a version is opened. What is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_open_options {
    /// `sizeof(pw_open_options)`.
    pub size: usize,
    /// The version; 0 for the latest.
    pub version: u64,
    /// The bytes that the version may grow to in this process, if fewer than its committer has reserved.
    pub reserve: u64,
    /// The GPU on which this process uses the memory: "cuda:0", a UUID; null for the GPU that has it.
    pub device: *const c_char,
    /// Nonzero: open a version with `is_mutable` for writing.
    pub read_write: u8,
    /// Nonzero: map memory of another GPU, which each access then reaches over the link between them.
    pub allow_peer: u8,
}

/// What `pw_segment_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_segment_info {
    /// `sizeof(pw_segment_info)`, which the caller sets.
    pub size: usize,
    /// The kind of memory: "host", "vmm", "pinned", "legacy", "live". Valid until the segment is closed.
    pub kind: *const c_char,
    /// Where the memory is: "host", "pinned:0" or a GPU's UUID. Valid until the segment is closed.
    pub device: *const c_char,
    /// The version.
    pub version: u64,
    /// The bytes that are mapped.
    pub bytes: u64,
    /// The bytes of all tensors.
    pub tensor_bytes: u64,
    /// The bytes that it may grow to in this process; 0 if it cannot grow.
    pub reserved: u64,
    /// How many tensors there are.
    pub tensors: u64,
    /// How many pairs of metadata there are.
    pub metadata: u64,
    /// 1 if processes may write it.
    pub is_mutable: u8,
    /// 1 if this process may write it.
    pub is_writable: u8,
    /// 1 if the name stays without its committer.
    pub is_kept: u8,
    /// 1 if other users may open it.
    pub is_shared: u8,
}

/// What is known about a tensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_tensor_info {
    /// `sizeof(pw_tensor_info)`, which the caller sets.
    pub size: usize,
    /// The name. Valid until the segment is closed, as are shape and strides.
    pub name: *const c_char,
    /// The elements along each dimension.
    pub shape: *const u64,
    /// The distance from one index to the next along each dimension, in elements.
    pub strides: *const u64,
    /// How many dimensions there are.
    pub rank: u32,
    /// The element type.
    pub dtype: u32,
    /// The bytes from the first element to the end of the last.
    pub bytes: u64,
}

/// Opens a version of a name, the latest unless the options or `NAME@V` say another, and waits up to `timeout_ns` until
/// it exists; negative means without end. `options` may be null. The caller owns `*segment` and closes it with
/// `pw_segment_close`. Mapping takes microseconds for host memory, up to some milliseconds a GiB for other memory.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `segment` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_open_options,
    timeout_ns: i64,
    segment: *mut *mut pw_segment,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(segment, || {
            let options = argument::options(options)?;
            let mut opener = handle::get::<Domain>(domain)?.opener(text(name, "name")?).timeout(timeout(timeout_ns));
            opener = opener.allow_peer(options.allow_peer != 0);
            if options.version != 0 {
                opener = opener.version(options.version);
            }
            if options.reserve != 0 {
                opener = opener.reserve(options.reserve);
            }
            if options.read_write != 0 {
                opener = opener.read_write();
            }
            if let Some(gpu) = device_gpu(options.device)? {
                opener = opener.device(gpu);
            }
            Ok(OpenSegment::from(opener.open()?))
        })
    })
}

/// Puts a model file, a folder of shards or an index under a name, as its next version: .safetensors, .npy and the other
/// formats of `partywall put`. `options` may be null. The caller owns `*segment`. Blocks until all is read, by several
/// threads.
///
/// # Safety
/// As `pw_segment_open`; `path` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_put_file(
    domain: *const pw_domain,
    name: *const c_char,
    path: *const c_char,
    options: *const pw_segment_options,
    segment: *mut *mut pw_segment,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(segment, || {
            let (domain, name) = (handle::get::<Domain>(domain)?, text(name, "name")?);
            let options = argument::options(options)?;
            options.refuse_layout("a file")?;
            let put = committed!(domain.put(name, place(options.device)?), options);
            Ok(OpenSegment::from(put.path(Path::new(text(path, "path")?))?))
        })
    })
}

/// Closes a segment: unmaps its memory, after the work of this process on its GPU, and gives its lease back. The
/// committer of a name that is not kept ends the name in this way. DLPack tensors of it delay both until they are deleted.
/// Null is ignored.
///
/// # Safety
/// No other thread uses the handle, and nobody the addresses that it gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_close(segment: *mut pw_segment) -> pw_status {
    call(|| {
        if segment.is_null() {
            return Ok(());
        }
        let OpenSegment { segment, .. } = handle::take(segment)?;
        Arc::into_inner(segment).map_or(Ok(()), |segment| Ok(segment.release()?))
    })
}

/// Stores what is known about a segment. Does not block.
///
/// # Safety
/// No other thread closes `segment`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_info_get(segment: *const pw_segment, info: *mut pw_segment_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let opened = handle::get::<OpenSegment>(segment)?;
        let segment = &opened.segment;
        let known = pw_segment_info {
            size: 0,
            kind: opened.kind.as_ptr(),
            device: opened.device.as_ptr(),
            version: segment.version(),
            bytes: segment.bytes(),
            tensor_bytes: segment.tensor_bytes(),
            reserved: segment.reserved(),
            tensors: segment.len() as u64,
            metadata: segment.metadata().len() as u64,
            is_mutable: segment.is_mutable().into(),
            is_writable: segment.is_writable().into(),
            is_kept: segment.is_kept().into(),
            is_shared: segment.is_shared().into(),
        };
        store_info(info, known)
    })
}

/// Stores what is known about the tensor that was added at this place, from 0. Does not block.
///
/// # Safety
/// As `pw_segment_info_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_tensor_at(
    segment: *const pw_segment,
    index: usize,
    info: *mut pw_tensor_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let opened = handle::get::<OpenSegment>(segment)?;
        let name = opened.name_at(index)?;
        store_info(info, opened.describe(&opened.segment.tensor(&name)?))
    })
}

/// Stores what is known about a tensor. Fails with `PW_NOT_FOUND` if there is none of that name. Does not block.
///
/// # Safety
/// As `pw_segment_info_get`; `tensor` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_tensor_get(
    segment: *const pw_segment,
    tensor: *const c_char,
    info: *mut pw_tensor_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let opened = handle::get::<OpenSegment>(segment)?;
        store_info(info, opened.describe(&opened.segment.tensor(text(tensor, "tensor")?)?))
    })
}

/// Stores the address and length of a tensor in host or pinned memory; null for a tensor without bytes. Valid until the
/// segment is closed. Write there only if the segment `is_writable`: otherwise the process gets a signal.
///
/// # Safety
/// No other thread closes `segment`; `tensor` ends with a zero byte; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_data(
    segment: *const pw_segment,
    tensor: *const c_char,
    data: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let tensor = handle::get::<OpenSegment>(segment)?.segment.tensor(text(tensor, "tensor")?)?;
        store_bytes(data, tensor.as_ptr()?.cast(), length, tensor.bytes())
    })
}

/// Stores the device address and length of a tensor, for the caller's kernels and copies. Valid until the segment is
/// closed.
///
/// # Safety
/// As `pw_segment_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_device(
    segment: *const pw_segment,
    tensor: *const c_char,
    address: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let tensor = handle::get::<OpenSegment>(segment)?.segment.tensor(text(tensor, "tensor")?)?;
        let range = tensor.device()?;
        store_bytes(address, argument::address(range.device_ptr()), length, range.bytes())
    })
}

/// A tensor for programs that open memory by a 64-byte handle.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_ipc_handle {
    /// `sizeof(pw_ipc_handle)`, which the caller sets.
    pub size: usize,
    /// The bytes of the `cudaIpcMemHandle_t` of the allocation that contains the tensor.
    pub handle: [u8; 64],
    /// Where the tensor begins in the allocation.
    pub offset: u64,
    /// The bytes from the first element to the end of the last.
    pub bytes: u64,
    /// The number of the GPU in this process. Another process may number it differently.
    pub device: u32,
}

/// Stores the handle of a tensor that this process has published, for programs such as inference servers. Fails with
/// `PW_MISMATCH` for other memory. The memory stays until the segment is closed: have the other program close the handle
/// before that, because it would see whatever uses the memory next. Does not block.
///
/// # Safety
/// No other thread closes `segment`; `tensor` ends with a zero byte; `handle` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_ipc_handle(
    segment: *const pw_segment,
    tensor: *const c_char,
    handle: *mut pw_ipc_handle,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OpenSegment { segment, .. } = handle::get::<OpenSegment>(segment)?;
        let found = segment.tensor(text(tensor, "tensor")?)?.ipc_handle()?;
        let known = pw_ipc_handle {
            size: 0,
            handle: found.handle().0,
            offset: found.offset(),
            bytes: found.bytes(),
            device: found.gpu().context().device().ordinal(),
        };
        store_info(handle, known)
    })
}

/// Copies `length` bytes of a tensor, from `offset` on, to `bytes`, from any kind of memory. Blocks until they are
/// copied.
///
/// # Safety
/// No other thread closes `segment`; `tensor` ends with a zero byte; `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_read(
    segment: *const pw_segment,
    tensor: *const c_char,
    offset: u64,
    bytes: *mut c_void,
    length: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let tensor = handle::get::<OpenSegment>(segment)?.segment.tensor(text(tensor, "tensor")?)?;
        Ok(tensor.read_at(offset, array_mut(bytes.cast(), length, "bytes")?)?)
    })
}

/// Copies `length` bytes into a tensor of a segment that `is_writable`, from `offset` on, in any kind of memory. Blocks
/// until they are copied. Other processes see them at any moment: the processes order their accesses themselves.
///
/// # Safety
/// As `pw_segment_read`; `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_write(
    segment: *const pw_segment,
    tensor: *const c_char,
    offset: u64,
    bytes: *const c_void,
    length: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let tensor = handle::get::<OpenSegment>(segment)?.segment.tensor(text(tensor, "tensor")?)?;
        Ok(tensor.write_at(offset, array(bytes.cast(), length, "bytes")?)?)
    })
}

/// Stores the value of a key of the metadata; null if there is no such key. Valid until the segment is closed or
/// advanced.
///
/// # Safety
/// No other thread closes `segment`; `key` ends with a zero byte; `value` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_metadata_get(
    segment: *const pw_segment,
    key: *const c_char,
    value: *mut *const c_char,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (opened, key) = (handle::get::<OpenSegment>(segment)?, text(key, "key")?);
        let found = opened.metadata().iter().find(|(known, _)| known.to_bytes() == key.as_bytes());
        store(value, found.map_or(ptr::null(), |(_, value)| value.as_ptr()), "value")
    })
}

/// Stores a pair of the metadata, counted from 0. Valid until the segment is closed or advanced.
///
/// # Safety
/// No other thread closes `segment`; `key` and `value` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_metadata_at(
    segment: *const pw_segment,
    index: usize,
    key: *mut *const c_char,
    value: *mut *const c_char,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let metadata = handle::get::<OpenSegment>(segment)?.metadata();
        let (found, its) = metadata.get(index).ok_or_else(|| beyond("pair of metadata", index, metadata.len()))?;
        store(key, CStr::as_ptr(found), "key")?;
        store(value, CStr::as_ptr(its), "value")
    })
}

/// Fails if the segment must not be used any more: its name was withdrawn with a deadline that has passed, or its memory
/// is lost. Takes nanoseconds.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_check(segment: *const pw_segment) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<OpenSegment>(segment) }?.segment.check()?))
}

/// Opens a version of the segment's name that it is not itself: the latest, or `version` unless that is 0. Waits for it
/// up to `timeout_ns`; negative means without end. Stores null if there is none in time. The caller owns `*newer`.
///
/// # Safety
/// No other thread closes `segment`; `newer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_newer(
    segment: *const pw_segment,
    version: u64,
    timeout_ns: i64,
    newer: *mut *mut pw_segment,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give_some(newer, || {
            let version = (version != 0).then_some(version);
            let newer = handle::get::<OpenSegment>(segment)?.segment.newer(version, timeout(timeout_ns))?;
            Ok(newer.map(OpenSegment::from))
        })
    })
}

/// Makes a segment on a GPU the version that `next` is, at the addresses that it has: kernels, captured graphs and
/// tensors that know them see that version from then on. First waits for the work of this process on the GPU. On success
/// `next` is closed; on failure it is still the caller's.
///
/// # Safety
/// No other thread uses `segment` or `next`, or enqueues work that uses the addresses of `segment`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_advance(segment: *mut pw_segment, next: *mut pw_segment) -> pw_status {
    call(|| {
        if segment == next {
            return Err(Failure::argument("a segment cannot advance to itself", "pass what pw_segment_newer stored"));
        }
        let in_use = || Failure::argument("a DLPack tensor shows the segment", "call its deleter first");
        // SAFETY: the caller's promise; it is another object than `next`.
        let opened = unsafe { handle::get_mut::<OpenSegment>(segment) }?;
        let advanced = Arc::get_mut(&mut opened.segment).ok_or_else(in_use)?;
        handle::consume(next, |OpenSegment { segment, kind, device, metadata, tensors }| {
            let back = |failure, segment| (failure, OpenSegment { segment, kind, device, metadata, tensors });
            match Arc::try_unwrap(segment) {
                Ok(version) => advanced
                    .advance(version, Drain::All(&[]))
                    .map_err(|failed| back(failed.error.into(), Arc::new(*failed.value))),
                Err(shared) => Err(back(in_use(), shared)),
            }
        })?;
        opened.metadata = OnceLock::new();
        Ok(())
    })
}

fn refreshed(result: Refreshed) -> u32 {
    match result {
        Refreshed::Unchanged => PW_UNCHANGED,
        Refreshed::Grown => PW_GROWN,
        Refreshed::DoesNotFit { .. } => PW_DOES_NOT_FIT,
    }
}

/// Maps what was added to the version since it was opened or refreshed, and stores `PW_UNCHANGED`, `PW_GROWN` or
/// `PW_DOES_NOT_FIT`. Addresses stay. If `timeout_ns` is not 0, first waits that long for a growth; negative means
/// without end.
///
/// # Safety
/// No other thread closes `segment`; `result` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_refresh(
    segment: *const pw_segment,
    timeout_ns: i64,
    result: *mut u32,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        argument::check_out(result, "result")?;
        let OpenSegment { segment, .. } = handle::get::<OpenSegment>(segment)?;
        let timeout = timeout(timeout_ns);
        let found = if timeout == Duration::ZERO { segment.refresh()? } else { segment.wait_growth(timeout)? };
        store(result, refreshed(found), "result")
    })
}
