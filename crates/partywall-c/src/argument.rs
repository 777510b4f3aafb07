//! Arguments as C passes them: texts, arrays, times, places to store results, structs of another release.

use std::{
    borrow::Cow,
    ffi::{CString, c_char, c_void},
    slice,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use partywall::{
    DType, DeviceChoice, DeviceUuid, Domain, Gpu, Place,
    cuda::{RawStream, StreamRef},
    dlpack, gpu,
};

use crate::error::Failure;

/// A timeout that never ends, as every negative number does.
pub const PW_FOREVER: i64 = -1;

/// The longest text that is read, without its end: names have up to 255 bytes, paths up to 4,095.
const MAX_TEXT: usize = 4095;
/// The longest value of metadata that is read: a table has room for no longer one.
const MAX_VALUE: usize = 1 << 20;
/// The bytes that a struct may be larger than this library knows.
const MAX_STRUCT: usize = 4096;

/// Returns a text, which ends with a zero byte.
///
/// # Safety
/// `text` is null, or its bytes up to the first zero byte, at most 4,096, may be read and do not change during `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(text, what) }?.ok_or_else(|| Failure::null(what))
}

/// Returns a text, or `None` for null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    // SAFETY: the caller's promise.
    unsafe { bounded_text(text, what, MAX_TEXT) }
}

/// Returns a value of metadata, which may be longer than other texts.
///
/// # Safety
/// As [`text`], for 1 MiB.
pub(crate) unsafe fn value_text<'a>(text: *const c_char) -> Result<&'a str, Failure> {
    // SAFETY: the caller's promise.
    unsafe { bounded_text(text, "value", MAX_VALUE) }?.ok_or_else(|| Failure::null("value"))
}

/// Returns a text of at most this many bytes, or `None` for null.
///
/// # Safety
/// As [`text`], for one byte more.
unsafe fn bounded_text<'a>(text: *const c_char, what: &str, most: usize) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: by the caller's promise each byte up to the first zero byte may be read.
    let length = (0..=most).find(|n| unsafe { *text.add(*n) } == 0).ok_or_else(|| {
        Failure::argument(format!("{what} has no zero byte within {} bytes", most + 1), "end the text with '\\0'")
    })?;
    // SAFETY: these bytes were read just now.
    let bytes = unsafe { slice::from_raw_parts(text.cast::<u8>(), length) };
    let start = bytes[..length.min(64)].escape_ascii();
    let not_utf8 = |_| Failure::argument(format!("{what} is not UTF-8: {start}"), "encode it as UTF-8");
    str::from_utf8(bytes).map(Some).map_err(not_utf8)
}

/// Returns an array.
///
/// # Safety
/// `data` is null, or `length` elements there may be read and do not change during `'a`.
pub(crate) unsafe fn array<'a, T>(data: *const T, length: usize, what: &str) -> Result<&'a [T], Failure> {
    if length == 0 {
        return Ok(&[]);
    }
    check_array(data, length, what)?;
    // SAFETY: the address is not null and aligned, the length does not overflow, and the rest is the caller's promise.
    Ok(unsafe { slice::from_raw_parts(data, length) })
}

/// Returns an array to store into.
///
/// # Safety
/// `data` is null, or `length` elements there are used by nobody else during `'a`, and are initialised.
pub(crate) unsafe fn array_mut<'a, T>(data: *mut T, length: usize, what: &str) -> Result<&'a mut [T], Failure> {
    if length == 0 {
        return Ok(&mut []);
    }
    check_array(data, length, what)?;
    // SAFETY: as in `array`.
    Ok(unsafe { slice::from_raw_parts_mut(data, length) })
}

fn check_array<T>(data: *const T, length: usize, what: &str) -> Result<(), Failure> {
    if data.is_null() {
        return Err(Failure::null(what));
    }
    let end = length.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
    if !data.is_aligned() || end.is_none_or(|bytes| data.addr().checked_add(bytes).is_none()) {
        let why = format!("{what} is not an array of {length} elements: it is not aligned or ends beyond all memory");
        return Err(Failure::argument(why, "check the address and the length"));
    }
    Ok(())
}

/// Copies `from` to a caller's `capacity` bytes at `to`, as many as fit, and stores how many there are.
///
/// # Safety
/// `to` has `capacity` bytes or is null; `length` is null or may be written.
pub(crate) unsafe fn copy_out(from: &[u8], to: *mut u8, capacity: usize, length: *mut usize) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let out = unsafe { array_mut(to, capacity, "the buffer") }?;
    let copied = from.len().min(out.len());
    out[..copied].copy_from_slice(&from[..copied]);
    // SAFETY: the caller's promise.
    unsafe { store(length, from.len(), "length") }
}

/// Copies a text with its final zero byte to a caller's buffer, or fails if it is too small; stores the length of the
/// text without that byte, also then.
///
/// # Safety
/// As [`copy_out`].
pub(crate) unsafe fn text_out(text: &str, to: *mut c_char, capacity: usize, length: *mut usize) -> Result<(), Failure> {
    let text = c_text(text);
    let bytes = text.as_bytes_with_nul();
    // SAFETY: the caller's promise.
    unsafe { store_optional(length, text.count_bytes()) };
    if capacity < bytes.len() {
        return Err(too_small(bytes.len(), capacity));
    }
    // SAFETY: the caller's promise.
    unsafe { array_mut(to.cast(), bytes.len(), "the buffer") }?.copy_from_slice(bytes);
    Ok(())
}

/// The failure that a caller's buffer is too small.
pub(crate) fn too_small(needed: usize, capacity: usize) -> Failure {
    Failure::argument(format!("a text of {needed} bytes does not fit into {capacity}"), "pass a larger buffer")
}

/// Returns a text as C has it. Names have no zero byte.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// Stores an address and a length of bytes.
///
/// # Safety
/// `data` is null or may be written, and so may `length`.
pub(crate) unsafe fn store_bytes<P>(data: *mut P, address: P, length: *mut usize, bytes: u64) -> Result<(), Failure> {
    check_out(data, "the place for the address")?;
    // SAFETY: the caller's promise.
    unsafe {
        store_optional(length, bytes as usize);
        store(data, address, "the place for the address")
    }
}

/// Stores a result.
///
/// # Safety
/// `out` is null or may be written.
pub(crate) unsafe fn store<T>(out: *mut T, value: T, what: &str) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// Stores a result that the caller may not want.
///
/// # Safety
/// As [`store`].
pub(crate) unsafe fn store_optional<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { out.write(value) };
    }
}

/// Fails for a place to store a result that is null, before anything is done that would then be lost.
pub(crate) fn check_out<T>(out: *mut T, what: &str) -> Result<(), Failure> {
    if out.is_null() { Err(Failure::null(what)) } else { Ok(()) }
}

/// A struct of options or information, whose first member is its size as the caller knows it. All zero bytes are valid.
///
/// # Safety
/// `repr(C)`; the first member is a `usize`; every pattern of bytes that C can store is a value of it.
pub(crate) unsafe trait Struct: Copy {
    const NAME: &'static str;
}

/// Makes types [`Struct`]s.
macro_rules! structs {
    ($($type:ty),*) => {
        $(
            const _: () = assert!(std::mem::offset_of!($type, size) == 0);
            // SAFETY: the size is first; the types are `repr(C)`, and consist of pointers and numbers, which have no
            // invalid patterns.
            unsafe impl $crate::argument::Struct for $type {
                const NAME: &'static str = stringify!($type);
            }
        )*
    };
}
pub(crate) use structs;

/// Returns the options of a caller, with zero for what an older caller does not know; null means all defaults.
///
/// # Safety
/// `options` is null or points to a struct of as many bytes as its first member says, or fewer bytes than 8.
pub(crate) unsafe fn options<T: Struct>(options: *const T) -> Result<T, Failure> {
    // SAFETY: all zero bytes are a value of it.
    let mut known = unsafe { std::mem::zeroed::<T>() };
    if options.is_null() {
        return Ok(known);
    }
    // SAFETY: its first member is its size.
    let size = unsafe { struct_size(options)? };
    let copied = size.min(size_of::<T>());
    // SAFETY: the caller has `size` bytes there, and `known` has at least `copied`.
    unsafe { (&raw mut known).cast::<u8>().copy_from_nonoverlapping(options.cast::<u8>(), copied) };
    // SAFETY: the caller has `size` bytes there.
    let rest = unsafe { slice::from_raw_parts(options.cast::<u8>().add(copied), size - copied) };
    if rest.iter().any(|byte| *byte != 0) {
        let why = format!("{} is of a later release of Partywall, and sets options that this one lacks", T::NAME);
        return Err(Failure::argument(why, "install the release of libpartywall that the program was compiled with"));
    }
    Ok(known)
}

/// Stores information into a caller's struct, as much as it has room for.
///
/// # Safety
/// `out` is null or points to a struct of as many bytes as its first member says, which may be written.
pub(crate) unsafe fn store_info<T: Struct>(out: *mut T, info: T) -> Result<(), Failure> {
    check_out(out, T::NAME)?;
    // SAFETY: its first member is its size.
    let size = unsafe { struct_size(out)? };
    let head = size_of::<usize>();
    let copied = size.min(size_of::<T>());
    // SAFETY: the caller has `size` bytes there, which is at least `copied`; the size itself stays. What is behind
    // `copied` is set to zero.
    unsafe {
        let from = (&raw const info).cast::<u8>().add(head);
        out.cast::<u8>().add(head).copy_from_nonoverlapping(from, copied - head);
        out.cast::<u8>().add(copied).write_bytes(0, size - copied);
    }
    Ok(())
}

/// Fails for a struct that [`store_info`] would refuse, before anything is done that would then be lost.
///
/// # Safety
/// As [`store_info`].
pub(crate) unsafe fn check_info<T: Struct>(out: *mut T) -> Result<(), Failure> {
    check_out(out, T::NAME)?;
    // SAFETY: the caller's promise.
    unsafe { struct_size(out) }.map(drop)
}

/// Returns the size that a struct says it has.
///
/// # Safety
/// `at` points to a `usize` at least.
unsafe fn struct_size<T: Struct>(at: *const T) -> Result<usize, Failure> {
    if !at.is_aligned() {
        return Err(Failure::argument(format!("{} is not aligned", T::NAME), "pass the address of a variable"));
    }
    // SAFETY: the caller's promise.
    let size = unsafe { *at.cast::<usize>() };
    if size < size_of::<usize>() || size > MAX_STRUCT {
        let why = format!("the size in {} is {size}", T::NAME);
        return Err(Failure::argument(why, "set its first member to its sizeof, as PW_INIT does"));
    }
    Ok(size)
}

/// Returns how long a call waits: negative numbers of nanoseconds mean without end.
pub(crate) fn timeout(nanoseconds: i64) -> Duration {
    u64::try_from(nanoseconds).map_or(Duration::MAX, Duration::from_nanos)
}

/// Returns an element type by its number.
pub(crate) fn dtype(code: u32) -> Result<DType, Failure> {
    let known = u8::try_from(code).ok().and_then(DType::from_code);
    known.ok_or_else(|| Failure::argument(format!("{code} is no element type"), "pass a constant PW_DTYPE_…"))
}

/// Returns strides; for null those of a tensor without gaps.
///
/// # Safety
/// `strides` is null, or has as many numbers as `shape`, which may be read and do not change during `'a`.
pub(crate) unsafe fn strides<'a>(strides: *const u64, shape: &[u64]) -> Result<Cow<'a, [u64]>, Failure> {
    if strides.is_null() {
        return Ok(dlpack::contiguous(shape).into());
    }
    // SAFETY: the caller's promise.
    unsafe { array(strides, shape.len(), "strides") }.map(Cow::from)
}

/// Returns the place that a device's name means; `unset` for null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn place_or(device: *const c_char, unset: Option<Place>) -> Result<Option<Place>, Failure> {
    if device.is_null() {
        return Ok(unset);
    }
    // SAFETY: the caller's promise.
    unsafe { place(device) }.map(Some)
}

/// Returns the place that a device's name means; host memory for null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn place(device: *const c_char) -> Result<Place, Failure> {
    // SAFETY: the caller's promise.
    let Some(device) = (unsafe { optional_text(device, "device") })? else { return Ok(Place::Host) };
    let choice = DeviceChoice::from_str(device)
        .map_err(|error| Failure::argument(error.to_string(), "`nvidia-smi -L` lists the GPUs of the machine"))?;
    Ok(gpu::resolve(choice)?.0)
}

/// Returns the GPU that a device's name means; `None` for null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn device_gpu(device: *const c_char) -> Result<Option<DeviceUuid>, Failure> {
    if device.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let place = unsafe { place(device) }?;
    let not_a_gpu = || Failure::argument(format!("the device is {place}, which is no GPU"), "name a GPU: \"cuda:0\"");
    place.gpu().map(Some).ok_or_else(not_a_gpu)
}

/// Returns the GPU of a caller's stream: the one that has the memory, or, for pinned memory that this process uses with no
/// GPU so far, the one that "auto" means.
pub(crate) fn stream_gpu(domain: &Domain, gpu: Option<&Gpu>) -> partywall::Result<Arc<Gpu>> {
    gpu.map_or_else(|| domain.default_gpu(), |gpu| domain.gpu(gpu.uuid()))
}

/// Returns a caller's stream; null is the legacy default stream, as in CUDA's run-time API.
///
/// # Safety
/// `stream` is a stream of the primary context of `gpu`, and stays one for `'a`.
pub(crate) unsafe fn stream(gpu: &Gpu, stream: *mut c_void) -> StreamRef<'_> {
    let raw = if stream.is_null() { RawStream::LEGACY_DEFAULT } else { RawStream(stream.addr() as u64) };
    // SAFETY: the caller's promise.
    unsafe { StreamRef::borrow(gpu.context(), raw) }
}

/// Returns a device address as C has it.
pub(crate) fn address(device: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(device as usize)
}
