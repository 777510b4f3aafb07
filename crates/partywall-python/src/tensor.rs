//! Tensors in shared memory, in the forms in which other libraries take them.
//!
//! Tensors of pinned memory are on the host. `Tensor::on`, and a stream that waits for a sample or an input, give
//! tensors of the GPU at the same address. The CPU gets access when a tensor is first exported to it.
#![allow(unsafe_code)] // buffers, and streams of others

use std::{
    borrow::Cow,
    collections::BTreeMap,
    ffi::{CStr, c_int, c_void},
    sync::Arc,
    time::Duration,
};

use partywall::{
    Block, Build, DType, DeviceRange, Error, Loan, Sample,
    cuda::{RawStream, StreamRef},
    error::Mismatch,
};
use pyo3::{
    IntoPyObjectExt,
    exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError},
    ffi,
    inspect::PyStaticExpr,
    prelude::*,
    type_hint_identifier,
    types::{PyBytes, PyMemoryView},
};

use crate::{
    arguments::{ElementType, Optional, place},
    dlpack::{self, DLDevice, Export, HOST, Managed, ManagedVersioned, contiguous, data_type},
    errors::{Never, Raise, no_such_view},
    hint::{Hint, Hinted},
    owner::Owner,
    ranges,
    source::{self, Source},
    stream,
    value::Tuple,
    wait,
};

/// A tensor in shared memory. It keeps its memory alive, and so do all objects made of it.
#[pyclass(frozen, module = "partywall._native", weakref)]
#[derive(Clone)]
pub(crate) struct Tensor {
    owner: Arc<Owner>,
    name: Cow<'static, str>,
    dtype: DType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    address: usize,
    bytes: u64,
    device: DLDevice,
}

impl Tensor {
    /// Returns a tensor of a segment, which `owner` has.
    pub(crate) fn of_segment(owner: &Arc<Owner>, tensor: &partywall::Tensor<'_>) -> partywall::Result<Self> {
        let address = match (tensor.bytes(), owner.is_on_gpu()) {
            (0, _) => 0,
            (_, false) => tensor.as_ptr()? as usize,
            (_, true) => tensor.device()?.device_ptr() as usize,
        };
        Ok(Self::of_layout(owner, Layout::of(tensor), address))
    }

    /// Returns a tensor of a build. The caller has locked the owner.
    pub(crate) fn of_build(owner: &Arc<Owner>, build: &mut Build, layout: &Layout) -> partywall::Result<Self> {
        let name = &layout.name;
        let address = match (layout.bytes, owner.is_on_gpu()) {
            (0, _) => 0,
            (_, false) => build.as_mut_bytes(name)?.as_mut_ptr() as usize,
            (_, true) => build.device(name)?.device_ptr() as usize,
        };
        Ok(Self::of_layout(owner, layout.clone(), address))
    }

    fn of_layout(owner: &Arc<Owner>, layout: Layout, address: usize) -> Self {
        let Layout { name, dtype, shape, strides, bytes } = layout;
        owner.expose();
        ranges::note(owner, &name, address, bytes);
        let owner = owner.clone();
        let device = owner.device();
        let shape = signed(&shape);
        let strides = signed(&strides);
        Self { owner, name: name.into(), dtype, shape, strides, address, bytes, device }
    }

    /// Returns the beginning of a block as a tensor. The caller has locked the owner.
    pub(crate) fn of_block(owner: &Arc<Owner>, block: &Block, dtype: DType, shape: &[u64]) -> partywall::Result<Self> {
        let pool = block.pool();
        let bytes = fitting(block.len(), dtype, shape, |needed| block.too_small(block.len(), needed))?;
        let address = match owner.is_on_gpu() {
            false => block.as_ptr()? as usize,
            true => block.device()?.device_ptr() as usize,
        };
        owner.expose();
        Ok(Self::dense(owner, format!("{pool}#{}", block.index()), dtype, shape, address, bytes))
    }

    /// Returns the tensor of a loan. The caller has locked the owner.
    pub(crate) fn of_loan(owner: &Arc<Owner>, loan: &mut Loan, name: String) -> partywall::Result<Self> {
        let bytes = loan.len();
        let address = match (bytes, owner.is_on_gpu()) {
            (0, _) => 0,
            (_, false) => loan.bytes_mut()?.as_mut_ptr() as usize,
            (_, true) => loan.device()?.device_ptr() as usize,
        };
        Ok(Self::dense(owner, name, loan.dtype(), loan.shape(), address, bytes))
    }

    /// Returns the tensor of a sample, which is at this address.
    pub(crate) fn of_sample(owner: &Arc<Owner>, sample: &Sample, address: usize) -> Self {
        let name = format!("{} {}", sample.topic(), sample.position());
        Self::dense(owner, name, sample.dtype(), sample.shape(), address, sample.len())
    }

    /// Returns the beginning of a task's input or output, which has `has` bytes at this address, as a tensor.
    pub(crate) fn of_part(
        owner: &Arc<Owner>,
        (queue, name, has): (&str, Cow<'static, str>, u64),
        address: usize,
        dtype: DType,
        shape: &[u64],
    ) -> partywall::Result<Self> {
        let what = || format!("{name} of a task of queue {queue:?}");
        let bytes = fitting(has, dtype, shape, |needed| Mismatch::Room { what: what(), has, needed }.into())?;
        Ok(Self::dense(owner, name, dtype, shape, address, bytes))
    }

    fn dense(
        owner: &Arc<Owner>,
        name: impl Into<Cow<'static, str>>,
        dtype: DType,
        shape: &[u64],
        address: usize,
        bytes: u64,
    ) -> Self {
        let strides = signed(&contiguous(shape));
        let shape = signed(shape);
        let name = name.into();
        ranges::note_if_asked(owner, &name, address, bytes);
        Self { owner: owner.clone(), name, dtype, shape, strides, address, bytes, device: owner.device() }
    }

    /// Returns the tensor as the GPU of `source` writes it; `None` if only the CPU can.
    fn beside(&self, source: &Source) -> partywall::Result<Option<Self>> {
        if !self.is_on_host() {
            return Ok(Some(self.clone()));
        }
        if !self.owner.is_pinned() || !self.owner.is_writable() {
            return Ok(None);
        }
        let device = self.owner.use_on(source.uuid()?, &self.name, self.bytes)?;
        Ok(device.map(|device| Self { device, ..self.clone() }))
    }

    fn is_on_host(&self) -> bool {
        self.device == HOST
    }

    fn is_contiguous(&self) -> bool {
        let shape: Vec<u64> = self.shape.iter().map(|n| n.unsigned_abs()).collect();
        let gaps = self.shape.iter().zip(&self.strides).zip(contiguous(&shape));
        let gaps = gaps.filter(|((length, stride), without)| **length > 1 && stride.unsigned_abs() != *without);
        gaps.count() == 0 || self.shape.contains(&0)
    }

    /// Returns DLPack's form of the type, or an error for types that DLPack lacks.
    fn data_type(&self, py: Python<'_>) -> PyResult<dlpack::DLDataType> {
        data_type(self.dtype).ok_or_else(|| {
            let why = format!("DLPack does not pass on {}, of which several are in a byte", self.dtype);
            no_such_view(py, &self.name, &why, "take the bytes: .view(\"uint8\")")
        })
    }

    fn is_read_only(&self) -> PyErr {
        PyBufferError::new_err(format!("{:?} is read-only", self.name))
    }

    /// Returns the stream of the tensor's GPU that Python names, once all work on it is done.
    fn stream(&self, py: Python<'_>, stream: Optional<'_, '_>) -> PyResult<RawStream> {
        if self.is_on_host() {
            return Ok(RawStream::LEGACY_DEFAULT);
        }
        let stream = stream::named(py, stream, self.device.device_id)?;
        self.drain(py, stream)?;
        Ok(stream)
    }

    /// Waits until everything on a stream of the tensor's GPU is done, or a signal comes.
    fn drain(&self, py: Python<'_>, stream: RawStream) -> PyResult<()> {
        let Some(context) = self.owner.context() else { return Ok(()) };
        // SAFETY: the caller's promise, as in `on_device`.
        wait::for_stream(py, unsafe { StreamRef::borrow(context, stream) })
    }

    /// Calls `work` with the memory on its GPU and with `stream`, while nothing unmaps the memory.
    fn on_device<T>(
        &self,
        stream: RawStream,
        work: impl FnOnce(DeviceRange<'_>, StreamRef<'_>) -> partywall::Result<T>,
    ) -> partywall::Result<T> {
        let mut work = Some(work);
        let mut done = None;
        let context = self.owner.context().expect("the owner of a tensor on a GPU knows its context");
        // SAFETY: the caller's promise: a stream of the primary context of the tensor's GPU that lives for as long as
        // this call, as DLPack's consumers are promised too.
        let stream = unsafe { StreamRef::borrow(context, stream) };
        self.owner.with(|memory| {
            memory.on_device(&self.name, self.bytes, stream, &mut |range| {
                done = work.take().map(|work| work(range, stream)).transpose()?;
                Ok(())
            })
        })?;
        Ok(done.expect("memory has its work done once"))
    }

    /// Gives the CPU access to a tensor on the host. Pinned memory that a GPU used first may have none yet.
    fn allow_cpu(&self, py: Python<'_>) -> PyResult<()> {
        if !self.owner.is_on_gpu() || self.bytes == 0 {
            return Ok(());
        }
        py.detach(|| self.owner.with(|memory| memory.allow_cpu(&self.name))).or_raise(py)
    }

    /// Copies bytes of host memory into the tensor.
    fn write_bytes(&self, bytes: &[u8]) -> partywall::Result<()> {
        self.owner.with(|memory| memory.write(&self.name, bytes, self.is_on_host()))
    }
}

#[pymethods]
impl Tensor {
    /// The tensor's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The type of the elements.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Elements along each dimension.
    #[getter]
    fn shape(&self) -> Tuple<i64> {
        Tuple(self.shape.clone())
    }

    /// Elements from one index to the next along each dimension.
    #[getter]
    fn strides(&self) -> Tuple<i64> {
        Tuple(self.strides.clone())
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Bytes from the first element to the end of the last.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// `host`, or `cuda:N` as this process numbers its GPUs.
    #[getter]
    fn device(&self) -> String {
        if self.is_on_host() { "host".to_owned() } else { format!("cuda:{}", self.device.device_id) }
    }

    /// Whether this process must not write the tensor now.
    #[getter]
    fn readonly(&self) -> bool {
        !self.owner.is_writable()
    }

    /// The address of the first element, on the tensor's device; 0 if the tensor has no bytes.
    #[getter]
    fn data_ptr(&self, py: Python<'_>) -> PyResult<usize> {
        if self.is_on_host() {
            self.allow_cpu(py)?;
        }
        Ok(self.address)
    }

    fn __repr__(&self) -> String {
        let shape: Vec<_> = self.shape.iter().map(i64::to_string).collect();
        let readonly = if self.readonly() { ", read-only" } else { "" };
        let name = &self.name;
        let dtype = self.dtype;
        let bytes = partywall::bytes(self.bytes);
        format!("<partywall.Tensor {name:?}: {dtype}[{}], {bytes} on {}{readonly}>", shape.join(", "), self.device())
    }

    /// The same memory as elements of another type of the same size. Elements of less than a byte become a row of
    /// bytes.
    fn view(&self, dtype: ElementType) -> PyResult<Self> {
        let ElementType(dtype) = dtype;
        let (shape, strides) = match (dtype.item_bytes(), self.dtype.item_bytes()) {
            (Some(1), None) if self.is_contiguous() => (vec![self.bytes as i64], vec![1]),
            (to, from) if to.is_some() && to == from => (self.shape.clone(), self.strides.clone()),
            _ => {
                let why = format!("{:?} has elements of {}, which {dtype} is not as long as", self.name, self.dtype);
                return Err(PyValueError::new_err(why));
            }
        };
        Ok(Self { dtype, shape, strides, ..self.clone() })
    }

    /// The same memory as a tensor of a GPU, which is given to its libraries and streams. Pinned memory only.
    ///
    /// Kernels read it over the bus. The host and the streams that use the memory are not ordered: wait for a stream
    /// before you use the tensor of the host. On a tensor that is on this GPU already, returns the same.
    pub(crate) fn on(&self, py: Python<'_>, device: Bound<'_, PyAny>) -> PyResult<Self> {
        let name = device.str()?;
        let Some(uuid) = place(py, name.to_str()?)?.gpu() else {
            return Err(PyValueError::new_err("a tensor is used on a GPU: device is cuda, cuda:N or a GPU's UUID"));
        };
        let Some(device) = py.detach(|| self.owner.use_on(uuid, &self.name, self.bytes)).or_raise(py)? else {
            let why = format!("this process does not use it on {name}");
            let advice = "open it with device=, before another GPU has used it";
            return Err(no_such_view(py, &self.name, &why, advice));
        };
        Ok(Self { device, ..self.clone() })
    }

    /// Returns a copy of the bytes. On a GPU the copy is made behind the work on `stream`, by default torch's or cupy's
    /// current one, and waited for.
    #[pyo3(signature = (stream = None))]
    pub(crate) fn tobytes<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let stream = self.stream(py, stream.as_ref())?;
        // A signal ends this wait, but cannot end the copy.
        match self.owner.claim() {
            _ if self.is_on_host() || !self.owner.is_awaited() => {}
            Some(claim) => wait::in_slices(py, Duration::MAX, |slice| claim.wait_inputs(slice))?,
            None => {
                py.detach(|| self.on_device(stream, |_, _| Ok(()))).or_raise(py)?;
                self.drain(py, stream)?;
            }
        }
        PyBytes::new_with(py, self.bytes as usize, |out| {
            let copied = py.detach(|| match self.is_on_host() {
                _ if out.is_empty() => Ok(()),
                true => self.owner.with(|memory| memory.read(&self.name, out)),
                false => self.on_device(stream, |range, stream| range.copy_to_host(stream, out)),
            });
            copied.or_raise(py)
        })
    }

    /// Copies a tensor of another library into this one, which has the same type and shape. On a GPU the copy is made
    /// behind the work on `stream`, by default torch's or cupy's current one, and waited for.
    #[pyo3(signature = (tensor, stream = None))]
    pub(crate) fn write<'py>(
        &self,
        py: Python<'py>,
        tensor: Bound<'py, PyAny>,
        stream: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let source = match tensor.cast_into::<Source>() {
            Ok(source) => source,
            Err(other) => {
                let dense = py.import("partywall._arrays")?.call_method1("dense", (other.into_inner(), &stream))?;
                dense.cast_into()?
            }
        };
        let source = source.get();
        if self.owner.is_awaited() {
            // Fails with an error that names the memory.
            return py.detach(|| self.write_bytes(&[])).or_raise(py);
        }
        source.check_copy_to(py, &self.name, self.dtype, &self.shape, self.is_contiguous())?;
        if self.bytes == 0 {
            return Ok(());
        }
        let copied = if source.is_on_host() {
            self.stream(py, stream.as_ref())?;
            py.detach(|| self.write_bytes(&source.host_bytes()))
        } else {
            // The source is ready on its own stream.
            source.drain(py)?;
            py.detach(|| match self.beside(source)? {
                None => self.write_bytes(&source.device_bytes()?),
                Some(there) => {
                    there.on_device(source.stream(), |range, stream| source::copy_on_device(source, range, stream))
                }
            })
        };
        copied.or_raise(py)
    }

    /// Returns a NumPy array. NumPy calls it if there is no buffer, and it then raises the reason.
    #[pyo3(signature = (dtype = None, copy = None))]
    pub(crate) fn __array__<'py>(
        slf: Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("partywall._exchange")?.call_method1("array", (slf, dtype, copy))
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a tensor is not sent to another process: send its segment"))
    }

    /// The device in DLPack's form.
    pub(crate) fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.device_type, self.device.device_id)
    }

    /// Returns a DLPack capsule, versioned if the consumer knows those.
    ///
    /// The stream is checked, and waits for a sample, an input or an enqueued output that another stream still writes.
    /// All other memory needs no wait: committed memory is complete, and before the commit only the caller knows who
    /// writes. A consumer of unversioned capsules is not told that it must not write.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    pub(crate) fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Capsule<'py>> {
        match stream {
            Some(0) => {
                return Err(PyValueError::new_err(
                    "stream 0 is ambiguous: 1 is the legacy default stream, 2 the per-thread one",
                ));
            }
            Some(stream) if self.is_on_host() && stream != -1 => {
                return Err(PyValueError::new_err("host memory has no streams: leave stream out, or None"));
            }
            _ => {}
        }
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            let why = format!("it is on {}, and DLPack copies it nowhere", self.device());
            return Err(no_such_view(py, &self.name, &why, "take it where it is, then copy it"));
        }
        if copy == Some(true) {
            return Err(no_such_view(
                py,
                &self.name,
                "it is shared, not copied",
                "leave copy out, and copy what you get",
            ));
        }
        if self.is_on_host() {
            self.allow_cpu(py)?;
        }
        // Without a stream, the legacy default stream waits; -1 means that none does.
        if let Ok(stream) = u64::try_from(stream.unwrap_or(1))
            && !self.is_on_host()
            && self.owner.is_awaited()
        {
            py.detach(|| self.on_device(RawStream(stream), |_, _| Ok(()))).or_raise(py)?;
        }
        let export = Export {
            address: self.address,
            device: self.device,
            dtype: self.data_type(py)?,
            shape: &self.shape,
            strides: &self.strides,
            read_only: self.readonly(),
        };
        let owner = self.owner.clone();
        let capsule = match max_version {
            Some((major, _)) if major >= 1 => dlpack::capsule::<ManagedVersioned, _>(py, &export, owner),
            _ => dlpack::capsule::<Managed, _>(py, &export, owner),
        };
        capsule.map(Hinted::new)
    }

    /// The CUDA array interface, version 3. Not for host memory, nor for types that the interface lacks.
    #[getter]
    pub(crate) fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<CudaArray<'py>> {
        if self.is_on_host() {
            return Err(PyAttributeError::new_err(
                "host memory has no __cuda_array_interface__: use DLPack or memoryview",
            ));
        }
        let Some((kind, _)) = array_type(self.dtype) else {
            let why = format!("__cuda_array_interface__ has no {}: use DLPack", self.dtype);
            return Err(PyAttributeError::new_err(why));
        };
        let item = (self.dtype.bits() / 8) as i64;
        let order = if item == 1 { '|' } else { '<' };
        let strides = self.strides.iter().map(|stride| stride * item).collect();
        let strides = (!self.is_contiguous()).then_some(Tuple(strides));
        Ok(BTreeMap::from([
            ("version", 3.into_bound_py_any(py)?),
            ("shape", self.shape().into_bound_py_any(py)?),
            ("typestr", format!("{order}{kind}{item}").into_bound_py_any(py)?),
            ("data", (self.address, self.readonly()).into_bound_py_any(py)?),
            ("strides", strides.into_bound_py_any(py)?),
            // A consumer has to wait only for a stream that waits for a sample, an input or an enqueued output; see
            // `__dlpack__`.
            ("stream", self.owner.stream().map(|stream| stream.0).into_bound_py_any(py)?),
        ]))
    }

    /// Returns a `memoryview`. Type checkers look for this method.
    fn __buffer__(slf: Bound<'_, Self>, flags: c_int) -> PyResult<Bound<'_, PyMemoryView>> {
        if flags & ffi::PyBUF_WRITABLE != 0 && slf.get().readonly() {
            return Err(slf.get().is_read_only());
        }
        PyMemoryView::from(&slf)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if !this.is_on_host() {
            let why = format!("{:?} is on a GPU, and has no buffer: use DLPack, or tobytes() for a copy", this.name);
            return Err(PyBufferError::new_err(why));
        }
        let Some((_, format)) = array_type(this.dtype) else {
            let why = format!(
                "buffers have no {}: use DLPack with a library that has it, np.asarray() with the package ml_dtypes, \
                 or view(\"uint8\") or view(\"uint16\")",
                this.dtype
            );
            return Err(PyBufferError::new_err(why));
        };
        if flags & ffi::PyBUF_WRITABLE != 0 && this.readonly() {
            return Err(this.is_read_only());
        }
        let wants = |flag| flags & flag == flag;
        if !wants(ffi::PyBUF_STRIDES) && !this.is_contiguous() {
            return Err(PyBufferError::new_err(format!("{:?} has strides, which the consumer cannot take", this.name)));
        }
        this.allow_cpu(slf.py())?;
        let item = (this.dtype.bits() / 8) as isize;
        let numbers: Vec<isize> =
            this.shape.iter().map(|n| *n as isize).chain(this.strides.iter().map(|n| *n as isize * item)).collect();
        let extents = Box::into_raw(Box::new(Extents(numbers)));
        // SAFETY: Python passes a live view, and hands it to `__releasebuffer__` once. Until then `internal` keeps the
        // shape and the strides, and `obj` keeps the tensor, which keeps the memory.
        unsafe {
            let start = (*extents).0.as_mut_ptr();
            *view = ffi::Py_buffer {
                buf: this.address as *mut c_void,
                obj: slf.clone().into_any().into_ptr(),
                len: (item * this.shape.iter().product::<i64>() as isize),
                itemsize: item,
                readonly: c_int::from(this.readonly()),
                ndim: this.shape.len() as c_int,
                format: if wants(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { std::ptr::null_mut() },
                shape: if wants(ffi::PyBUF_ND) { start } else { std::ptr::null_mut() },
                strides: if wants(ffi::PyBUF_STRIDES) { start.add(this.shape.len()) } else { std::ptr::null_mut() },
                suboffsets: std::ptr::null_mut(),
                internal: extents.cast(),
            };
        }
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: made by `__getbuffer__`, and released once.
        drop(unsafe { Box::from_raw((*view).internal.cast::<Extents>()) });
    }
}

/// A tensor of a build or segment, without its memory.
#[derive(Clone)]
pub(crate) struct Layout {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    /// Counted in elements.
    pub(crate) strides: Vec<u64>,
    pub(crate) bytes: u64,
}

impl Layout {
    pub(crate) fn of(tensor: &partywall::Tensor<'_>) -> Self {
        Self {
            name: tensor.name().to_owned(),
            dtype: tensor.dtype(),
            shape: tensor.shape(),
            strides: tensor.strides(),
            bytes: tensor.bytes(),
        }
    }
}

/// The dictionary of the CUDA array interface.
pub(crate) type CudaArray<'py> = BTreeMap<&'static str, Bound<'py, PyAny>>;

/// A capsule. Type checkers know it by this name also before Python 3.13.
pub(crate) enum CapsuleType {}

impl Hint for CapsuleType {
    const TYPE: PyStaticExpr = type_hint_identifier!("typing_extensions", "CapsuleType");
}

/// A capsule of DLPack.
pub(crate) type Capsule<'py> = Hinted<'py, CapsuleType>;

/// The arrays that a buffer's view points to: the shape, then the strides in bytes.
struct Extents(Vec<isize>);

/// Returns the codes of a type in the array interface and in buffers.
fn array_type(dtype: DType) -> Option<(char, &'static CStr)> {
    Some(match dtype {
        DType::Bool => ('b', c"?"),
        DType::U8 => ('u', c"B"),
        DType::I8 => ('i', c"b"),
        DType::U16 => ('u', c"H"),
        DType::I16 => ('i', c"h"),
        DType::U32 => ('u', c"I"),
        DType::I32 => ('i', c"i"),
        DType::U64 => ('u', c"L"),
        DType::I64 => ('i', c"l"),
        DType::F16 => ('f', c"e"),
        DType::F32 => ('f', c"f"),
        DType::F64 => ('f', c"d"),
        DType::C64 => ('c', c"Zf"),
        DType::C128 => ('c', c"Zd"),
        _ => return None,
    })
}

/// Returns the bytes of a tensor of this type and shape. Fails with `error` of that number if it exceeds `has`.
fn fitting(has: u64, dtype: DType, shape: &[u64], error: impl FnOnce(u64) -> Error) -> partywall::Result<u64> {
    let elements = shape.iter().try_fold(1_u64, |product, length| product.checked_mul(*length));
    let needed = elements.and_then(|elements| dtype.bytes_for(elements)).unwrap_or(u64::MAX);
    if needed > has {
        return Err(error(needed));
    }
    Ok(needed)
}

/// Converts lengths or strides to DLPack's signed numbers.
fn signed(numbers: &[u64]) -> Vec<i64> {
    // Tables limit these numbers to less than 2⁶³.
    numbers.iter().map(|n| *n as i64).collect()
}
