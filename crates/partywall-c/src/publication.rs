//! Publishing memory of a GPU that exists already.

use std::{
    ffi::{c_char, c_void},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall::{DType, Domain, Publication, Segment, cuda::ForeignMemory};

use crate::{
    argument::{self, array, dtype, strides, text, value_text},
    build::{committed, pw_segment_options},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
    segment::{OpenSegment, pw_segment},
};

/// Tensors in memory of a GPU that other code has allocated, to be published. One thread may use it at a time.
pub struct pw_publication {
    _opaque: (),
}

/// A publication that is being described.
pub(crate) struct Publishing {
    domain: Domain,
    /// `None` once it is committed or has failed.
    publication: Option<Publication>,
}

object!(Publishing, pw_publication, 11, "publication");

/// Calls a caller's function once the memory is not used any more.
struct Release {
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    context: *mut c_void,
    /// False until the call that took the memory has succeeded.
    is_ours: AtomicBool,
}

// SAFETY: the context is only passed to the function, which by its contract any thread may call.
unsafe impl Send for Release {}
// SAFETY: as above; a shared reference does nothing with it.
unsafe impl Sync for Release {}

impl Drop for Release {
    fn drop(&mut self) {
        if let Some(function) = self.function
            && *self.is_ours.get_mut()
        {
            // SAFETY: the promise of `foreign`: it may be called once, on any thread.
            unsafe { function(self.context) };
        }
    }
}

/// Returns memory of a caller. `release` is called exactly once, after the last use, if this succeeds; else never.
///
/// # Safety
/// The memory that contains `address` stays until `release` is called, which may happen on any thread.
pub(crate) unsafe fn foreign(
    domain: &Domain,
    address: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    context: *mut c_void,
) -> Result<ForeignMemory, Failure> {
    if address.is_null() {
        return Err(Failure::null("address"));
    }
    let gpu = domain.default_gpu()?;
    let release = Arc::new(Release { function: release, context, is_ours: AtomicBool::new(false) });
    // SAFETY: the caller's promise. Nothing in this library refers to a caller's host memory.
    let memory = unsafe { ForeignMemory::new(gpu.context(), address.addr() as u64, release.clone()) };
    let memory = memory.map_err(|error| {
        Failure::argument(format!("cannot use the memory at {address:p}: {error}"), "pass an address of GPU memory")
    })?;
    release.is_ours.store(true, Ordering::Relaxed);
    Ok(memory)
}

/// Begins to publish memory under a name. `options` may be null. The caller owns `*publication`, and commits or closes
/// it. Does not block.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `publication` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publication_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_segment_options,
    publication: *mut *mut pw_publication,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(publication, || {
            let domain = handle::get::<Domain>(domain)?;
            let options = argument::options(options)?;
            options.refuse_layout("published memory")?;
            if !options.device.is_null() {
                return Err(Failure::argument("published memory is where it is", "leave the device null"));
            }
            let publication = committed!(domain.publish(text(name, "name")?), options);
            Ok(Publishing { domain: domain.clone(), publication: Some(publication) })
        })
    })
}

/// Adds a tensor that begins at `address`, in memory of a GPU. Strides are in elements; null means without gaps. The
/// commit returns errors about the tensor.
///
/// If this succeeds, the memory is not freed before `release(context)` is called: once, on any thread, when neither the
/// publication nor a segment of this process uses it any more. `release` must not throw, jump out or call
/// this library; it may be null for memory that is never freed. On failure it is not called.
///
/// # Safety
/// No other thread uses `publication`; `tensor` ends with a zero byte; `shape`, and `strides` unless null, have `rank`
/// numbers; the memory stays as described.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // the tensor, as C has it
pub unsafe extern "C" fn pw_publication_tensor(
    publication: *mut pw_publication,
    tensor: *const c_char,
    element: u32,
    shape: *const u64,
    strides: *const u64,
    rank: usize,
    address: *mut c_void,
    release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let publishing = handle::get_mut::<Publishing>(publication)?;
        let (tensor, element, shape) = (text(tensor, "tensor")?, dtype(element)?, array(shape, rank, "shape")?);
        let strides = self::strides(strides, shape)?;
        publishing.add(tensor, element, shape, &strides, |domain| foreign(domain, address, release, context))
    })
}

impl Publishing {
    /// Adds a tensor in memory that `memory` returns. If that fails, the publication is as it was.
    pub(crate) fn add(
        &mut self,
        tensor: &str,
        dtype: DType,
        shape: &[u64],
        strides: &[u64],
        memory: impl FnOnce(&Domain) -> Result<ForeignMemory, Failure>,
    ) -> Result<(), Failure> {
        if self.publication.is_none() {
            return Err(over());
        }
        let memory = memory(&self.domain)?;
        self.publication =
            self.publication.take().map(|so_far| so_far.tensor_strided(tensor, dtype, shape, strides, &memory));
        Ok(())
    }
}

fn over() -> Failure {
    Failure::argument("the publication is over: its commit has failed", "close it and create another one")
}

/// Adds a pair of metadata.
///
/// # Safety
/// No other thread uses `publication`; `key` and `value` end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publication_metadata(
    publication: *mut pw_publication,
    key: *const c_char,
    value: *const c_char,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let (key, value) = (text(key, "key")?, value_text(value)?);
        let Publishing { publication, .. } = handle::get_mut::<Publishing>(publication)?;
        *publication = Some(publication.take().ok_or_else(over)?.metadata(key, value));
        Ok(())
    })
}

unsafe fn commit(
    publication: *mut pw_publication,
    segment: *mut *mut pw_segment,
    commit: fn(Publication) -> partywall::Result<Segment>,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(segment, || {
            let publishing = handle::get_mut::<Publishing>(publication)?;
            let committed = commit(publishing.publication.take().ok_or_else(over)?)?;
            handle::close::<Publishing>(publication)?;
            Ok(OpenSegment::from(committed))
        })
    })
}

/// Publishes the memory itself, without a copy. Waits for the work of this process on its GPU. The caller owns
/// `*segment`, and the name ends when it is closed. Readers see later writes, and whole allocations: docs/from-cuda-ipc.md.
///
/// On success the publication is closed. On failure its memory is released, and it can only be closed.
///
/// # Safety
/// No other thread uses `publication`; `segment` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publication_commit(
    publication: *mut pw_publication,
    segment: *mut *mut pw_segment,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { commit(publication, segment, Publication::commit) }
}

/// Copies the tensors once, on their GPU, into a segment that depends on nobody's memory. Waits for the work of this
/// process on the GPU, then for the copies. Otherwise as `pw_publication_commit`.
///
/// # Safety
/// As `pw_publication_commit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publication_commit_copy(
    publication: *mut pw_publication,
    segment: *mut *mut pw_segment,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { commit(publication, segment, Publication::commit_copy) }
}

/// Drops a publication that is not to be committed, and releases its memory. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publication_close(publication: *mut pw_publication) -> pw_status {
    call(|| handle::close::<Publishing>(publication))
}
