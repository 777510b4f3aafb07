//! Tensors of other libraries, to be copied or published: any object that supports DLPack or the buffer protocol.
#![allow(unsafe_code)] // memory on another library's word

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use partywall::{
    DType, DeviceRange, DeviceUuid, Error, Publication,
    cuda::{self, Access, AccessError, Context, DeviceSlice, Driver, ForeignMemory, RawStream, StreamRef},
    error::{DeviceFault, InvalidArgument},
};
use pyo3::{
    buffer::PyUntypedBuffer,
    exceptions::{PyBufferError, PyTypeError},
    intern,
    prelude::*,
    types::PyDict,
};

use crate::{
    arguments::Optional,
    dlpack::{self, CPU, CUDA, CUDA_HOST, DLDevice, Exchanged, Managed, ManagedVersioned, Taken, contiguous},
    errors::{Raise, bad_source},
    exchange::Library,
    owner::drain,
    reaper,
    refusal::{self, AddedType},
    stream,
    value::Tuple,
    wait,
};

/// A tensor of another library, which this keeps alive.
#[pyclass(frozen, module = "partywall._native")]
#[derive(Clone)]
pub(crate) struct Source {
    dtype: DType,
    shape: Vec<u64>,
    /// Counted in elements. Negative strides run backwards from the address.
    strides: Vec<i64>,
    address: u64,
    device: DLDevice,
    /// On a GPU: the stream on which the library has the tensor ready.
    stream: RawStream,
    keep: Arc<ForeignTensor>,
}

/// The device, the address, and the type, shape and strides of a tensor.
type Identity = (i32, i32, u64, &'static str, Tuple<u64>, Tuple<i64>);

/// The tensor of the other library, which owns the memory.
#[allow(dead_code, reason = "held, not read")]
enum ForeignTensor {
    Capsule(Taken<Managed>),
    Versioned(Taken<ManagedVersioned>),
    Buffer(ForeignBuffer),
}

/// A buffer, which must be released with the GIL.
struct ForeignBuffer(Option<PyUntypedBuffer>);

impl Drop for ForeignBuffer {
    fn drop(&mut self) {
        let buffer = self.0.take();
        // At the end of the interpreter the buffer cannot be released any more.
        if Python::try_attach(|_| ()).is_some() {
            drop(buffer);
        } else {
            std::mem::forget(buffer);
        }
    }
}

#[pymethods]
impl Source {
    /// Takes a tensor, so that later work on `stream` of its GPU, as Python names it, runs after the library's own
    /// work.
    #[new]
    fn new(py: Python<'_>, object: &Bound<'_, PyAny>, stream: Optional<'_, '_>) -> PyResult<Self> {
        if let Some(source) = Self::of_library(py, object, stream)? {
            return Ok(source);
        }
        if !object.hasattr(intern!(py, "__dlpack__"))? {
            let buffer = PyUntypedBuffer::get(object).map_err(|_| {
                let kind = object.get_type().name().map_or_else(|_| "it".to_owned(), |name| name.to_string());
                bad_source(
                    py,
                    &format!("{kind} is no tensor"),
                    "give an array of numpy, torch, cupy or jax, or a buffer",
                )
            })?;
            return Self::of_buffer(py, buffer);
        }
        Self::of_dlpack(py, object, stream)
    }

    /// The type of the elements.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Elements along each dimension.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// `host`, or `cuda:N` as this process numbers its GPUs.
    #[getter]
    fn device(&self) -> String {
        if self.is_on_host() { "host".to_owned() } else { format!("cuda:{}", self.device.device_id) }
    }

    /// Equal for two tensors that are the same memory; `None` without elements.
    #[getter]
    fn identity(&self) -> Option<Identity> {
        let DLDevice { device_type, device_id } = self.device;
        let shape = Tuple(self.shape.clone());
        let strides = Tuple(self.strides.clone());
        let identity = (device_type, device_id, self.address, self.dtype.name(), shape, strides);
        (self.elements() > 0).then_some(identity)
    }

    /// Whether the elements are adjacent in memory.
    #[getter]
    fn contiguous(&self) -> bool {
        let mut dimensions = self.shape.iter().zip(&self.strides).zip(contiguous(&self.shape));
        self.elements() == 0
            || dimensions.all(|((length, stride), without)| *length <= 1 || u64::try_from(*stride) == Ok(without))
    }
}

impl Source {
    /// Takes a tensor by the library's C interface; `None` if there is none, or if the tensor must be prepared first.
    fn of_library(py: Python<'_>, object: &Bound<'_, PyAny>, stream: Optional<'_, '_>) -> PyResult<Option<Self>> {
        let Some(library) = Library::of(&object.get_type()) else { return Ok(None) };
        // SAFETY: it is the library of the object's type.
        let Some(taken) = (unsafe { library.take(object) }) else { return Ok(None) };
        let dlpack::DLTensor { device, dtype, .. } = taken.get().tensor();
        let mut ready = RawStream::LEGACY_DEFAULT;
        if device.device_type == CUDA {
            ready = stream::named(py, stream, device.device_id)?;
            if library.work_stream(device.device_id) != Some(ready) {
                // One of the two streams has to wait for the other, which `__dlpack__` arranges.
                return Ok(None);
            }
        }
        if dtype.is_complex() {
            // torch may still have to conjugate the tensor, and only `__dlpack__` refuses such tensors.
            return Ok(None);
        }
        Self::of_tensor(object, taken, ready, ForeignTensor::Versioned).map(Some)
    }

    fn of_dlpack(py: Python<'_>, object: &Bound<'_, PyAny>, stream: Optional<'_, '_>) -> PyResult<Self> {
        let device = object.call_method0("__dlpack_device__").and_then(|device| device.extract());
        let (device_type, ordinal): (i32, i32) = match device {
            Ok(device) => device,
            Err(error) => return Self::of_other(py, object, stream, error),
        };
        let arguments = PyDict::new(py);
        let mut ready = RawStream::LEGACY_DEFAULT;
        if device_type == CUDA {
            ready = stream::named(py, stream, ordinal)?;
            arguments.set_item("stream", ready.0)?;
        }
        let legacy = arguments.copy()?;
        arguments.set_item("max_version", (1, 1))?;
        let capsule = match object.call_method("__dlpack__", (), Some(&arguments)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                object.call_method("__dlpack__", (), Some(&legacy))
            }
            capsule => capsule,
        };
        let capsule = match capsule {
            Ok(capsule) => capsule,
            Err(error) => return Self::of_other(py, object, stream, error),
        };
        if let Some(taken) = Taken::<ManagedVersioned>::take(&capsule) {
            let major = taken.get().version.major;
            if major != 1 {
                return Err(bad_source(
                    py,
                    &format!("its DLPack is version {major}"),
                    "use a release of both that agree",
                ));
            }
            return Self::of_tensor(object, taken, ready, ForeignTensor::Versioned);
        }
        match Taken::<Managed>::take(&capsule) {
            Some(taken) => Self::of_tensor(object, taken, ready, ForeignTensor::Capsule),
            None => {
                Err(bad_source(py, "its __dlpack__ gave no DLPack capsule", "report it to the library that made it"))
            }
        }
    }

    /// Takes a tensor in another way than by DLPack, which its library has refused with an exception.
    fn of_other(py: Python<'_>, object: &Bound<'_, PyAny>, stream: Optional<'_, '_>, error: PyErr) -> PyResult<Self> {
        if let Some((dtype, integer)) = AddedType::of(object).and_then(|added| added.known())
            && let Ok(view) = object.call_method1(intern!(py, "view"), (integer.name(),))
        {
            return Ok(Self { dtype, ..Self::new(py, &view, stream)? });
        }
        // NumPy does this for read-only arrays.
        if error.is_instance_of::<PyBufferError>(py)
            && let Ok(source) = PyUntypedBuffer::get(object).and_then(|buffer| Self::of_buffer(py, buffer))
        {
            return Ok(source);
        }
        Err(refusal::not_given(object, error))
    }

    fn of_tensor<M: Exchanged>(
        object: &Bound<'_, PyAny>,
        taken: Taken<M>,
        stream: RawStream,
        keep: impl FnOnce(Taken<M>) -> ForeignTensor,
    ) -> PyResult<Self> {
        let py = object.py();
        let tensor = taken.get().tensor();
        if ![CPU, CUDA, CUDA_HOST].contains(&tensor.device.device_type) {
            let message = format!("its memory is of DLPack's device type {}", tensor.device.device_type);
            return Err(bad_source(py, &message, "copy it to main memory or to a CUDA device first"));
        }
        let dtype = dlpack::dtype(tensor.dtype).ok_or_else(|| refusal::unknown_type(object))?;
        let (shape, strides) = dlpack::extents(tensor)
            .ok_or_else(|| bad_source(py, "its shape is invalid", "report it to the library that made it"))?;
        let extent = check_memory(py, dtype, &shape, &strides, tensor.data as u64, tensor.byte_offset)?;
        if rest_of_storage(object, dtype).is_some_and(|bytes| extent.bytes > bytes) {
            return Err(bad_source(py, "it is longer than the storage that it shows", NO_MEMORY));
        }
        let device = tensor.device;
        Ok(Self { dtype, shape, strides, address: extent.address, device, stream, keep: Arc::new(keep(taken)) })
    }

    fn of_buffer(py: Python<'_>, buffer: PyUntypedBuffer) -> PyResult<Self> {
        let dtype = buffer_type(buffer.format().to_bytes(), buffer.item_size());
        let dtype =
            dtype.ok_or_else(|| bad_source(py, "its elements are of a type that is not known here", UNKNOWN_TYPE))?;
        let item = buffer.item_size() as isize;
        let stride = |bytes: &isize| (bytes % item == 0).then_some((bytes / item) as i64);
        let strides: Option<Vec<i64>> = buffer.strides().iter().map(stride).collect();
        let strides =
            strides.ok_or_else(|| bad_source(py, "its elements are not at whole steps", "make it contiguous first"))?;
        let shape: Vec<u64> = buffer.shape().iter().map(|n| *n as u64).collect();
        let address = check_memory(py, dtype, &shape, &strides, buffer.buf_ptr() as u64, 0)?.address;
        let device = DLDevice { device_type: CPU, device_id: 0 };
        let stream = RawStream::LEGACY_DEFAULT;
        let keep = Arc::new(ForeignTensor::Buffer(ForeignBuffer(Some(buffer))));
        Ok(Self { dtype, shape, strides, address, device, stream, keep })
    }

    pub(crate) fn is_on_host(&self) -> bool {
        self.device.device_type != CUDA
    }

    /// Returns the number of the GPU in this process; `None` for host memory.
    pub(crate) fn ordinal(&self) -> Option<u32> {
        // A negative number is no GPU of this process.
        (!self.is_on_host()).then(|| u32::try_from(self.device.device_id).unwrap_or(u32::MAX))
    }

    fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    fn bytes(&self) -> u64 {
        self.dtype.bytes_for(self.elements()).unwrap_or(0)
    }

    /// Checks whether the tensor can be copied into another one.
    pub(crate) fn check_copy_to(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: DType,
        shape: &[i64],
        is_contiguous: bool,
    ) -> PyResult<()> {
        if self.dtype != dtype || !self.shape.iter().map(|n| *n as i64).eq(shape.iter().copied()) {
            let why = format!("it is {}{:?}, and {name:?} is {dtype}{shape:?}", self.dtype, self.shape);
            return Err(bad_source(py, &why, "convert or reshape it first"));
        }
        if !is_contiguous || !self.is_copyable() {
            let why = format!("it or {name:?} has strides");
            return Err(bad_source(py, &why, "make it contiguous first"));
        }
        Ok(())
    }

    /// Returns the bytes of a tensor in host memory, without gaps.
    pub(crate) fn host_bytes(&self) -> Cow<'_, [u8]> {
        let item = (self.dtype.bits() / 8) as usize;
        let bytes = self.bytes() as usize;
        if bytes == 0 {
            return Cow::Borrowed(&[]);
        }
        let start = self.address as *const u8;
        if self.contiguous() {
            // SAFETY: the other library promises that many bytes at this address, and `keep` keeps them. Not to write
            // them meanwhile is up to the caller, as with every copy in Python.
            return Cow::Borrowed(unsafe { std::slice::from_raw_parts(start, bytes) });
        }
        let mut out = Vec::with_capacity(bytes);
        let mut index = vec![0_u64; self.shape.len()];
        loop {
            let offset: i64 = index.iter().zip(&self.strides).map(|(at, stride)| *at as i64 * stride).sum();
            // SAFETY: an element of the tensor, by the same promise.
            out.extend_from_slice(unsafe {
                std::slice::from_raw_parts(start.offset(offset as isize * item as isize), item)
            });
            // The next index, last dimension fastest.
            let Some(axis) = (0..index.len()).rev().find(|axis| index[*axis] + 1 < self.shape[*axis]) else {
                return Cow::Owned(out);
            };
            index[axis] += 1;
            index[axis + 1..].fill(0);
        }
    }

    /// Returns the type of the elements, and the shape.
    pub(crate) fn layout(&self) -> (DType, &[u64]) {
        (self.dtype, &self.shape)
    }

    /// Returns whether one copy of a GPU can take the tensor. Copies of the CPU take any tensor.
    pub(crate) fn is_copyable(&self) -> bool {
        self.is_on_host() || self.contiguous()
    }

    /// Returns a guard that keeps the memory. The reaper releases it.
    pub(crate) fn held(&self) -> impl Send + Sync + 'static {
        DropWithGil(Some(self.keep.clone()))
    }

    /// Returns the stream on which the library has the tensor ready.
    pub(crate) fn stream(&self) -> RawStream {
        self.stream
    }

    /// Waits for the work on that stream.
    pub(crate) fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let context = py.detach(|| self.context()).or_raise(py)?;
        // SAFETY: as in `device_bytes`.
        wait::for_stream(py, unsafe { StreamRef::borrow(&context, self.stream) })
    }

    /// Returns a copy of a contiguous tensor on a GPU, made behind the work on its stream.
    pub(crate) fn device_bytes(&self) -> partywall::Result<Vec<u8>> {
        let context = self.context()?;
        let mut out = vec![0; self.bytes() as usize];
        // SAFETY: the caller's promise: a stream of that context, which lives for as long as this call.
        let stream = unsafe { StreamRef::borrow(&context, self.stream) };
        stream.copy_to_host(&mut out, self.slice()).map_err(copy_error)?;
        Ok(out)
    }

    /// Returns the UUID of the GPU.
    pub(crate) fn uuid(&self) -> partywall::Result<DeviceUuid> {
        let uuid = self.context()?.device().uuid();
        uuid.map_err(|source| {
            Error::DeviceFault(DeviceFault::Cuda { what: format!("using {}", self.device()), source })
        })
    }

    fn slice(&self) -> DeviceSlice<'_> {
        // SAFETY: the other library's promise, which `keep` keeps: that many bytes of device memory at this address.
        unsafe { DeviceSlice::from_raw(self.address, self.bytes(), Access::ReadOnly) }
    }

    /// Returns the primary context of the GPU, which every library with DLPack uses.
    fn context(&self) -> partywall::Result<Context> {
        let wanted = self.device();
        let driver = Driver::load().map_err(|e| {
            Error::DeviceFault(DeviceFault::NoDevice { wanted: Some(wanted.clone()), why: e.to_string() })
        })?;
        let ordinal = u32::try_from(self.device.device_id).unwrap_or(u32::MAX);
        let context = cuda::Device::by_ordinal(driver, ordinal).and_then(Context::retain);
        context.map_err(|source| Error::DeviceFault(DeviceFault::Cuda { what: format!("using {wanted}"), source }))
    }
}

/// A tensor of another library that a service thread may drop. The drop must not wait for the GIL.
struct DropWithGil(Option<Arc<ForeignTensor>>);

impl Drop for DropWithGil {
    fn drop(&mut self) {
        if let Some(keep) = self.0.take() {
            reaper::with_gil(move || drop(keep));
        }
    }
}

/// Copies a contiguous tensor to memory of the same GPU on `stream`, and waits for the copy.
pub(crate) fn copy_on_device(source: &Source, range: DeviceRange<'_>, stream: StreamRef<'_>) -> partywall::Result<()> {
    enqueue_copy(source, range, stream)?;
    stream.synchronize().map_err(|source| copy_error(source.into()))
}

/// Enqueues the copy of [`copy_on_device`] without waiting for it. The caller keeps the source until the copy is made.
pub(crate) fn enqueue_copy(source: &Source, range: DeviceRange<'_>, stream: StreamRef<'_>) -> partywall::Result<()> {
    let ordinal = range.gpu().context().device().ordinal();
    if i64::from(source.device.device_id) != i64::from(ordinal) {
        let why = format!("it is on cuda:{ordinal}, what is to be copied into it on cuda:{}", source.device.device_id);
        return Err(Error::InvalidArgument(InvalidArgument::Range { tensor: "a tensor on a GPU".into(), why }));
    }
    stream.enqueue_copy(range.as_slice(), source.slice()).map_err(copy_error)
}

fn copy_error(error: AccessError) -> Error {
    let what = "copying a tensor";
    match error {
        AccessError::Driver(source) => Error::DeviceFault(DeviceFault::Cuda { what: what.into(), source }),
        other => Error::InvalidArgument(InvalidArgument::Range { tensor: what.into(), why: other.to_string() }),
    }
}

/// Checks tensors that are to be published, and waits for the work of this process on their GPUs.
pub(crate) fn prepare(py: Python<'_>, sources: &[(String, Source)]) -> PyResult<()> {
    if sources.iter().any(|(_, source)| source.strides.iter().any(|stride| *stride < 0)) {
        return Err(bad_source(py, "its strides run backwards", "make it contiguous first, or put() a copy"));
    }
    // One tensor for each GPU.
    let on_gpus: BTreeMap<_, _> = sources.iter().filter_map(|(_, source)| Some((source.ordinal()?, source))).collect();
    for source in on_gpus.into_values() {
        let context = py.detach(|| source.context()).or_raise(py)?;
        drain(py, &context)?;
    }
    Ok(())
}

/// Adds tensors to a publication, which keeps them from then on.
pub(crate) fn publish(mut publication: Publication, tensors: Vec<(String, Source)>) -> partywall::Result<Publication> {
    for (name, source) in tensors {
        let what = format!("asking the driver about {name:?}");
        let cuda = |source| Error::DeviceFault(DeviceFault::Cuda { what: what.clone(), source });
        if source.is_on_host() {
            let kind = cuda::PointerKind::Unknown;
            return Err(Error::DeviceFault(DeviceFault::NotShareable { tensor: name, address: source.address, kind }));
        }
        let strides = source.strides.iter().map(|n| n.unsigned_abs()).collect::<Vec<_>>();
        let context = source.context()?;
        let keep: Arc<ForeignTensor> = source.keep.clone();
        // SAFETY: `keep` holds the other library's tensor, whose memory stays until it is deleted, by DLPack's rules.
        let memory = unsafe { ForeignMemory::new(&context, source.address, keep) }.map_err(cuda)?;
        publication = publication.tensor_strided(&name, source.dtype, &source.shape, &strides, &memory);
    }
    Ok(publication)
}

/// Returns the type of a buffer's format.
fn buffer_type(format: &[u8], item: usize) -> Option<DType> {
    let code = format.strip_prefix(b"@").or(format.strip_prefix(b"=")).or(format.strip_prefix(b"<")).unwrap_or(format);
    Some(match (code, item) {
        (b"?", 1) => DType::Bool,
        (b"B" | b"c", 1) => DType::U8,
        (b"b", 1) => DType::I8,
        (b"H", 2) => DType::U16,
        (b"h", 2) => DType::I16,
        (b"I" | b"L", 4) => DType::U32,
        (b"i" | b"l", 4) => DType::I32,
        (b"L" | b"Q", 8) => DType::U64,
        (b"l" | b"q", 8) => DType::I64,
        (b"e", 2) => DType::F16,
        (b"f", 4) => DType::F32,
        (b"d", 8) => DType::F64,
        (b"Zf", 8) => DType::C64,
        (b"Zd", 16) => DType::C128,
        _ => return None,
    })
}

/// The memory that the elements of a tensor lie in.
struct Extent {
    /// The address of the first element.
    address: u64,
    /// The bytes from there to the end of the last one in memory; 0 without elements.
    bytes: u64,
}

/// Checks what another library says of a tensor's memory, as far as that can be told without a look at the memory.
fn check_memory(
    py: Python<'_>,
    dtype: DType,
    shape: &[u64],
    strides: &[i64],
    data: u64,
    offset: u64,
) -> PyResult<Extent> {
    let invalid =
        || bad_source(py, "its shape is invalid, or its strides are", "report it to the library that made it");
    let elements = shape.iter().try_fold(1_u64, |all, length| all.checked_mul(*length)).ok_or_else(invalid)?;
    dtype.bytes_for(elements).filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or_else(invalid)?;
    if elements == 0 {
        return Ok(Extent { address: data.wrapping_add(offset), bytes: 0 });
    }
    if data == 0 {
        return Err(bad_source(py, "it has no memory", NO_MEMORY));
    }
    let item = i128::from(dtype.bits() / 8);
    let address = i128::from(data) + i128::from(offset);
    let (mut first, mut end) = (address, address + item);
    for (length, stride) in shape.iter().zip(strides) {
        // No sum overflows: all `(length - 1) * item` together are less than the bytes, which fit in an i64.
        let reach = i128::from(length - 1) * i128::from(*stride) * item;
        first += reach.min(0);
        end += reach.max(0);
    }
    // Distances within the tensor then fit in an i64, too.
    if first <= 0 || end > i128::from(i64::MAX) {
        return Err(invalid());
    }
    Ok(Extent { address: address as u64, bytes: (end - address) as u64 })
}

/// Returns the bytes from the first element of a tensor of torch to the end of its storage; `None` for any other. A
/// storage can be made smaller than its tensors, which torch itself does not notice.
fn rest_of_storage(object: &Bound<'_, PyAny>, dtype: DType) -> Option<u64> {
    let py = object.py();
    let storage = object.getattr_opt(intern!(py, "untyped_storage")).ok()??.call0().ok()?;
    let bytes: u64 = storage.call_method0(intern!(py, "nbytes")).ok()?.extract().ok()?;
    let offset: u64 = object.call_method0(intern!(py, "storage_offset")).ok()?.extract().ok()?;
    Some(bytes.saturating_sub(offset.saturating_mul(dtype.bits() / 8)))
}

const NO_MEMORY: &str = "give a tensor that has data, not one that was freed (FSDP: unshard it first), is fake, or \
                         wraps others (DTensor: to_local())";

const UNKNOWN_TYPE: &str = "give it as plain numbers in this machine's byte order, or as a type of the same size \
                            (numpy: .astype(…), .view(\"uint16\")), and create the tensor with the type it has";
