//! Building a version of a segment: its tensors, its memory, their contents, the commit.

use std::ffi::{c_char, c_void};

use partywall::{Build, Builder, Domain};

use crate::{
    argument::{self, array, dtype, place, store_bytes, strides, structs, text, value_text},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
    segment::{OpenSegment, pw_segment},
};

/// A version of a segment that no other process sees yet. One thread may use it at a time.
pub struct pw_build {
    _opaque: (),
}

/// The states of a build.
#[allow(clippy::large_enum_variant)] // a build becomes allocated soon
enum Building {
    /// Its tensors are listed. `None` once its memory could not be allocated.
    Listed(Option<Builder>),
    Allocated(Build),
}

object!(Building, pw_build, 7, "build");
structs!(pw_segment_options);

impl Building {
    fn list(&mut self, add: impl FnOnce(Builder) -> Builder) -> Result<(), Failure> {
        match self {
            Self::Listed(builder) => {
                *builder = Some(add(builder.take().ok_or_else(not_allocatable)?));
                Ok(())
            }
            Self::Allocated(_) => Err(Failure::argument(
                "the build has its memory: pw_build_allocate was called",
                "add tensors and metadata before it",
            )),
        }
    }

    fn allocated(&mut self) -> Result<&mut Build, Failure> {
        match self {
            Self::Allocated(build) => Ok(build),
            Self::Listed(_) => Err(not_allocated()),
        }
    }
}

fn not_allocatable() -> Failure {
    Failure::argument("the memory of the build could not be allocated", "close it and create another one")
}

fn not_allocated() -> Failure {
    Failure::argument("the build has no memory yet", "call pw_build_allocate first")
}

/// How a version of a segment is made. What is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_segment_options {
    /// `sizeof(pw_segment_options)`.
    pub size: usize,
    /// Where the memory is: "host", "pinned", "cuda:0", a GPU's UUID, "auto"; null for host memory. Not for published
    /// memory.
    pub device: *const c_char,
    /// The largest chunk in bytes. For a build alone.
    pub chunk_bytes: u64,
    /// The bytes that a version with `is_mutable` may grow to. For a build alone.
    pub reserve: u64,
    /// Nonzero: processes may write it after the commit, and its committer may make it longer.
    pub is_mutable: u8,
    /// Nonzero: the name stays until it is removed or the broker ends. By default it ends with its committer.
    pub kept: u8,
    /// Nonzero: the name ends with the last process that has it open.
    pub until_unused: u8,
    /// Nonzero: other users whom the broker admits may open it.
    pub shared: u8,
    /// Nonzero: the commit fails if the name exists.
    pub if_absent: u8,
}

/// Sets what builds, publications and files have in common: three types without a common trait.
macro_rules! committed {
    ($known:expr, $options:expr) => {
        $known
            .mutable($options.is_mutable != 0)
            .kept($options.kept != 0)
            .until_unused($options.until_unused != 0)
            .shared($options.shared != 0)
            .if_absent($options.if_absent != 0)
    };
}
pub(crate) use committed;

impl pw_segment_options {
    /// Fails for options that only builds have.
    pub(crate) fn refuse_layout(&self, what: &str) -> Result<(), Failure> {
        if self.chunk_bytes == 0 && self.reserve == 0 {
            return Ok(());
        }
        Err(Failure::argument(format!("{what} has no chunk_bytes and no reserve"), "leave them zero"))
    }
}

/// Begins the next version of a name. `options` may be null. The caller owns `*build`, and commits or closes it. Does not
/// block.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `build` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_segment_options,
    build: *mut *mut pw_build,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(build, || {
            let (domain, name) = (handle::get::<Domain>(domain)?, text(name, "name")?);
            let options = argument::options(options)?;
            let mut builder = committed!(domain.create(name, place(options.device)?), options);
            if options.chunk_bytes != 0 {
                builder = builder.chunk_bytes(options.chunk_bytes);
            }
            if options.reserve != 0 {
                builder = builder.reserve(options.reserve);
            }
            Ok(Building::Listed(Some(builder)))
        })
    })
}

/// Adds a tensor. Strides are in elements; null means without gaps, last dimension fastest. `pw_build_allocate` returns
/// errors about the tensor.
///
/// # Safety
/// No other thread uses `build`; `tensor` ends with a zero byte; `shape`, and `strides` unless null, have `rank` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_tensor(
    build: *mut pw_build,
    tensor: *const c_char,
    element: u32,
    shape: *const u64,
    strides: *const u64,
    rank: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (build, tensor) = (handle::get_mut::<Building>(build)?, text(tensor, "tensor")?);
        let (element, shape) = (dtype(element)?, array(shape, rank, "shape")?);
        let strides = self::strides(strides, shape)?;
        build.list(|builder| builder.tensor_strided(tensor, element, shape, &strides))
    })
}

/// Adds a tensor that shows memory of the tensor `of`, which was added before, from `offset` bytes on. Otherwise as
/// `pw_build_tensor`.
///
/// # Safety
/// As `pw_build_tensor`; `of` ends with a zero byte.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // two tensors, as C has them
pub unsafe extern "C" fn pw_build_view(
    build: *mut pw_build,
    tensor: *const c_char,
    element: u32,
    shape: *const u64,
    strides: *const u64,
    rank: usize,
    of: *const c_char,
    offset: u64,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let build = handle::get_mut::<Building>(build)?;
        let (tensor, of) = (text(tensor, "tensor")?, text(of, "of")?);
        let (element, shape) = (dtype(element)?, array(shape, rank, "shape")?);
        let strides = self::strides(strides, shape)?;
        build.list(|builder| builder.view(tensor, element, shape, &strides, (of, offset)))
    })
}

/// Adds a pair of metadata.
///
/// # Safety
/// No other thread uses `build`; `key` and `value` end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_metadata(
    build: *mut pw_build,
    key: *const c_char,
    value: *const c_char,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (key, value) = (text(key, "key")?, value_text(value)?);
        handle::get_mut::<Building>(build)?.list(|builder| builder.metadata(key, value))
    })
}

/// Allocates the memory of all tensors, which reads as zero, unless it has it. If this fails, the build can only be closed. Blocks while
/// the kernel or the driver allocates.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_allocate(build: *mut pw_build) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let build = unsafe { handle::get_mut::<Building>(build) }?;
        let builder = match build {
            Building::Listed(builder) => builder.take().ok_or_else(not_allocatable)?,
            Building::Allocated(_) => return Ok(()),
        };
        *build = Building::Allocated(builder.allocate()?);
        Ok(())
    })
}

/// Fills a tensor with a copy of `length` bytes, as many as it has, in any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread uses `build`; `tensor` ends with a zero byte; `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_write(
    build: *mut pw_build,
    tensor: *const c_char,
    bytes: *const c_void,
    length: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (build, tensor) = (handle::get_mut::<Building>(build)?, text(tensor, "tensor")?);
        Ok(build.allocated()?.write(tensor, array(bytes.cast(), length, "bytes")?)?)
    })
}

/// Stores the address and length of a tensor in host or pinned memory, for writing by the CPU until the commit. If
/// `pw_build_device` was called, first waits until the work of this process on that GPU is done.
///
/// # Safety
/// No other thread uses `build`; `tensor` ends with a zero byte; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_data(
    build: *mut pw_build,
    tensor: *const c_char,
    data: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (build, tensor) = (handle::get_mut::<Building>(build)?, text(tensor, "tensor")?);
        let bytes = build.allocated()?.as_mut_bytes(tensor)?;
        store_bytes(data, bytes.as_mut_ptr().cast(), length, bytes.len() as u64)
    })
}

/// Stores the device address and length of a tensor, for the caller's kernels and copies, all enqueued before the
/// commit. Does not block.
///
/// # Safety
/// As `pw_build_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_device(
    build: *mut pw_build,
    tensor: *const c_char,
    address: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (build, tensor) = (handle::get_mut::<Building>(build)?, text(tensor, "tensor")?);
        let range = build.allocated()?.device(tensor)?;
        store_bytes(address, argument::address(range.device_ptr()), length, range.bytes())
    })
}

/// Makes a build the next version of its name, which other processes can open from now on. Waits for the work of this
/// process on the GPU that has it. The caller owns `*segment` and closes it with `pw_segment_close`: a name that is not
/// kept ends with it.
///
/// On success the build is closed. On failure it is still the caller's, who may commit it again.
///
/// # Safety
/// No other thread uses `build`; `segment` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_commit(build: *mut pw_build, segment: *mut *mut pw_segment) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(segment, || {
            let committed = handle::consume(build, |build: Building| match build {
                Building::Allocated(build) => {
                    build.commit_or_keep().map_err(|failed| (failed.error.into(), Building::Allocated(*failed.value)))
                }
                listed => Err((not_allocated(), listed)),
            })?;
            Ok(OpenSegment::from(committed))
        })
    })
}

/// Frees a build that is not to be committed. Null is ignored.
///
/// # Safety
/// No other thread uses the handle; enqueued work that writes the memory is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_build_close(build: *mut pw_build) -> pw_status {
    call(|| handle::close::<Building>(build))
}
