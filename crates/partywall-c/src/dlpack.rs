//! Tensors in the form of DLPack, both ways.

use std::{
    ffi::{c_char, c_void},
    slice,
};

use partywall::{
    DType, Error, Gpu,
    cuda::AccessError,
    dlpack::{self, CPU, CUDA, DLDataType, DLDevice, Exchanged, Export, ManagedVersioned},
    error::DeviceFault,
};

use crate::{
    argument::{self, check_out, store, stream_gpu, text},
    block::{HeldBlock, pw_block},
    error::{Failure, call, pw_status},
    handle,
    publication::{Publishing, foreign, pw_publication},
    publisher::{Stage, pw_loan},
    segment::{OpenSegment, pw_segment},
    subscriber::{pw_sample, sample},
};

/// A tensor in the form of `dlpack.h` 1.x, which has this struct; include that header to look into it.
pub struct DLManagedTensorVersioned {
    _opaque: (),
}

/// What a consumer is told about a tensor.
struct Shown<'a> {
    address: usize,
    device: DLDevice,
    dtype: DLDataType,
    shape: &'a [u64],
    strides: &'a [u64],
    read_only: bool,
}

impl Shown<'_> {
    /// Returns the tensor, which keeps `owner` until its deleter is called.
    fn keep<O: Send>(&self, owner: O) -> *mut DLManagedTensorVersioned {
        let [shape, strides] = [self.shape, self.strides].map(|all| all.iter().map(|n| *n as i64).collect::<Vec<_>>());
        let Self { address, device, dtype, read_only, .. } = *self;
        let export = Export { address, device, dtype, shape: &shape, strides: &strides, read_only };
        Box::into_raw(export.keep(owner, delete::<O>)).cast()
    }
}

/// Called once by the consumer, on any thread.
unsafe extern "C" fn delete<O>(managed: *mut ManagedVersioned) {
    // Nothing unwinds into the consumer.
    call(|| {
        // SAFETY: `managed` is the first field of a `Kept` that `keep` has leaked.
        drop(unsafe { Box::from_raw(managed.cast::<dlpack::Kept<ManagedVersioned, O>>()) });
        Ok(())
    });
}

/// Returns DLPack's form of a type.
fn data_type(dtype: DType) -> Result<DLDataType, Failure> {
    let unknown = || Failure::argument(format!("DLPack has no {dtype}"), "pass the address instead");
    dlpack::data_type(dtype).ok_or_else(unknown)
}

fn device_of(gpu: Option<&Gpu>) -> DLDevice {
    match gpu {
        Some(gpu) => DLDevice { device_type: CUDA, device_id: gpu.context().device().ordinal() as i32 },
        None => DLDevice { device_type: CPU, device_id: 0 },
    }
}

/// Stores a tensor of a segment in the form of DLPack. It keeps the segment's memory, also after `pw_segment_close`, until
/// its consumer calls its deleter, which any thread may do. Read-only unless the segment `is_writable`. Does not block.
///
/// # Safety
/// No other thread closes `segment`; `tensor` ends with a zero byte; `managed` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_segment_to_dlpack(
    segment: *const pw_segment,
    tensor: *const c_char,
    managed: *mut *mut DLManagedTensorVersioned,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        check_out(managed, "managed")?;
        let OpenSegment { segment, .. } = handle::get::<OpenSegment>(segment)?;
        let tensor = segment.tensor(text(tensor, "tensor")?)?;
        let on_gpu = segment.place().gpu().is_some();
        let address = match on_gpu {
            true if tensor.bytes() > 0 => tensor.device()?.device_ptr() as usize,
            true => 0,
            false => tensor.as_ptr()?.addr(),
        };
        let shown = Shown {
            address,
            device: device_of(segment.gpu().filter(|_| on_gpu)),
            dtype: data_type(tensor.dtype())?,
            shape: &tensor.shape(),
            strides: &tensor.strides(),
            read_only: !segment.is_writable(),
        };
        store(managed, shown.keep(segment.clone()), "managed")
    })
}

/// Makes a sample a read-only tensor in the form of DLPack, for work on `stream` if it is on a GPU: that waits there for
/// the publisher's stream. Fails with `PW_BUSY` while a stream still writes a sample in host or pinned memory:
/// `pw_sample_wait` waits for it. The block stays as it is until the tensor's deleter is called, which any thread may do:
/// it does what `pw_sample_close` does. On success the sample is closed; on failure it is still the caller's.
///
/// # Safety
/// No other thread uses `sample`; `stream` is a stream of the primary context of the topic's GPU; `managed` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_to_dlpack(
    sample: *mut pw_sample,
    stream: *mut c_void,
    managed: *mut *mut DLManagedTensorVersioned,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        check_out(managed, "managed")?;
        let (address, device, dtype) = {
            let sample = self::sample(sample)?;
            let (address, on_gpu) = if sample.place().is_cpu_reachable() {
                (sample.bytes()?.as_ptr().addr(), None)
            } else {
                let gpu = stream_gpu(sample.domain(), sample.gpu())?;
                (sample.device_on(argument::stream(&gpu, stream))?.device_ptr() as usize, sample.gpu())
            };
            (address, device_of(on_gpu), data_type(sample.dtype())?)
        };
        let sample = handle::take::<partywall::Sample>(sample)?;
        let shape = sample.shape().to_vec();
        let strides = dlpack::contiguous(&shape);
        let shown = Shown { address, device, dtype, shape: &shape, strides: &strides, read_only: true };
        store(managed, shown.keep(sample), "managed")
    })
}

/// Makes a block a tensor in the form of DLPack, of the type and shape that `pw_block_set_tensor` set. The block is held
/// until the tensor's deleter is called, which any thread may do: it does what `pw_block_close` does. On success the block
/// is closed; on failure it is still the caller's. Does not wait for work of a GPU.
///
/// # Safety
/// No other thread uses `block`; `managed` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_block_to_dlpack(
    block: *mut pw_block,
    managed: *mut *mut DLManagedTensorVersioned,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        check_out(managed, "managed")?;
        let (address, device, dtype) = {
            let HeldBlock(block) = handle::get_mut::<HeldBlock>(block)?;
            let (address, on_gpu) = match block.as_ptr() {
                Ok(address) => (address.addr(), false),
                Err(Error::Mismatch(_)) => (block.device_mut()?.device_ptr() as usize, true),
                Err(error) => return Err(error.into()),
            };
            (address, device_of(block.gpu().filter(|_| on_gpu)), data_type(block.dtype())?)
        };
        let HeldBlock(block) = handle::take(block)?;
        let shape = block.shape().to_vec();
        let strides = dlpack::contiguous(&shape);
        let shown = Shown { address, device, dtype, shape: &shape, strides: &strides, read_only: false };
        store(managed, shown.keep(block), "managed")
    })
}

/// A tensor of another library.
struct Given {
    address: *mut c_void,
    on_gpu: bool,
    dtype: DType,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl Given {
    /// Reads what the other library says.
    ///
    /// # Safety
    /// `managed` is null or what `dlpack.h` describes.
    unsafe fn read(managed: *const DLManagedTensorVersioned) -> Result<Self, Failure> {
        let refused =
            |why: &str| Failure::argument(format!("cannot take the DLPack tensor: {why}"), "convert it first");
        // SAFETY: the caller's promise. The version is first, whatever it is.
        let version =
            unsafe { managed.cast::<dlpack::DLPackVersion>().as_ref() }.ok_or_else(|| Failure::null("managed"))?;
        if version.major != 1 {
            return Err(refused("its version is not 1.x"));
        }
        // SAFETY: the caller's promise, for this version.
        let tensor = unsafe { &*managed.cast::<ManagedVersioned>() }.tensor();
        let on_gpu = match tensor.device.device_type {
            CUDA => true,
            CPU | dlpack::CUDA_HOST => false,
            _ => return Err(refused("it is neither in host memory nor on a CUDA device")),
        };
        let dtype = dlpack::dtype(tensor.dtype).ok_or_else(|| refused("its element type is not known here"))?;
        // SAFETY: DLPack's rule: `shape`, and `strides` unless null, have `ndim` numbers.
        let extents = dlpack::extents(tensor, |numbers, count| unsafe { slice::from_raw_parts(numbers, count) });
        let (shape, strides) = extents.ok_or_else(|| refused("its shape is not valid"))?;
        let strides: Option<_> = strides.into_iter().map(|stride| u64::try_from(stride).ok()).collect();
        let strides = strides.ok_or_else(|| refused("it has negative strides"))?;
        let address = tensor.data.wrapping_byte_add(tensor.byte_offset as usize);
        Ok(Self { address, on_gpu, dtype, shape, strides })
    }
}

/// Calls the deleter of a tensor.
unsafe extern "C" fn release(managed: *mut c_void) {
    let managed = managed.cast::<ManagedVersioned>();
    // SAFETY: a tensor that `Given::read` has read, and that nothing uses any more.
    if let Some(deleter) = unsafe { &*managed }.deleter() {
        // SAFETY: called once, as DLPack says.
        unsafe { deleter(managed) };
    }
}

/// Adds a tensor of another library, on a GPU, to a publication. On success the publication owns it, and its deleter is
/// called once, on any thread, when neither the publication nor a segment of this process uses it any more. It must not
/// throw or jump out. On failure the tensor is still the caller's.
///
/// # Safety
/// No other thread uses `publication`; `tensor` ends with a zero byte; `managed` is what `dlpack.h` describes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publication_dlpack(
    publication: *mut pw_publication,
    tensor: *const c_char,
    managed: *mut DLManagedTensorVersioned,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let publishing = handle::get_mut::<Publishing>(publication)?;
        let (tensor, given) = (text(tensor, "tensor")?, Given::read(managed)?);
        if !given.on_gpu {
            return Err(Failure::argument("the DLPack tensor is in host memory", "build a segment and copy it"));
        }
        let memory = |domain: &_| foreign(domain, given.address, Some(release), managed.cast());
        publishing.add(tensor, given.dtype, &given.shape, &given.strides, memory)
    })
}

/// Fills a loan with a copy of a tensor of another library, which has its type and shape, and no gaps. The tensor stays
/// the caller's. From host memory this blocks until the bytes are copied. From a GPU, into a loan on that GPU, the copy is
/// enqueued on `stream`, behind which `pw_loan_publish_on` publishes it: the tensor stays as it is until then.
///
/// # Safety
/// No other thread uses `loan`; `managed` is what `dlpack.h` describes; `stream` is a stream of the primary context of the
/// topic's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_copy_dlpack(
    loan: *mut pw_loan,
    managed: *const DLManagedTensorVersioned,
    stream: *mut c_void,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let loan = handle::get_mut::<Stage>(loan)?.writing()?;
        let given = Given::read(managed)?;
        let refused =
            |why: String| Failure::argument(format!("cannot copy the DLPack tensor: {why}"), "convert it first");
        if (given.dtype, &given.shape[..]) != (loan.dtype(), loan.shape()) {
            let why = format!("it is {}{:?}, the loan {}{:?}", given.dtype, given.shape, loan.dtype(), loan.shape());
            return Err(refused(why));
        }
        let dense = dlpack::contiguous(&given.shape);
        let has_gaps =
            given.shape.iter().zip(given.strides.iter().zip(dense)).any(|(n, (has, of))| *n > 1 && *has != of);
        if has_gaps && !loan.is_empty() {
            return Err(refused("it has gaps".into()));
        }
        if !given.on_gpu {
            let bytes = argument::array(given.address.cast::<u8>(), loan.len() as usize, "the tensor's data")?;
            return Ok(loan.write(bytes)?);
        }
        let range = loan.device()?;
        let domain = loan.domain();
        let gpu = stream_gpu(domain, loan.gpu())?;
        let copied = |error| match error {
            AccessError::Driver(source) => {
                let what = "copying a DLPack tensor".to_owned();
                Error::DeviceFault(DeviceFault::Cuda { what, source }).into()
            }
            other => refused(other.to_string()),
        };
        let source = foreign(domain, given.address, None, std::ptr::null_mut())?;
        let stream = argument::stream(&gpu, stream);
        let mut offset = 0;
        for piece in source.pieces(loan.len()).map_err(copied)? {
            let part = range.slice(offset, piece.len())?;
            offset += piece.len();
            stream.enqueue_copy(part.as_slice(), piece).map_err(copied)?;
        }
        Ok(())
    })
}
