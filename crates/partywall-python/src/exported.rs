//! Objects that other libraries take as an array.

use std::sync::OnceLock;

use pyo3::{PyClass, prelude::*, types::PyBytes};

use crate::tensor::{Capsule, CudaArray, Tensor};

/// The base class of objects that other libraries take as an array.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Exported {
    /// Returns the tensor of an object, which is of the class that this base was created for.
    tensor: fn(&Bound<'_, Self>) -> PyResult<Tensor>,
    /// Keeps the memory once `__cuda_array_interface__` was read: consumers of that keep this object, and nothing else.
    given: OnceLock<Tensor>,
}

/// A class that derives from [`Exported`].
pub(crate) trait Export: PyClass<BaseType = Exported> {
    /// Returns the tensor that other libraries receive.
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor>;

    /// Converts this to a Python object.
    fn into_object(self, py: Python<'_>) -> PyResult<Bound<'_, Self>> {
        let tensor = |object: &Bound<'_, Exported>| object.cast::<Self>()?.borrow().exported(object.py());
        let base = Exported { tensor, given: OnceLock::new() };
        Bound::new(py, PyClassInitializer::from(base).add_subclass(self))
    }
}

impl Exported {
    fn tensor(slf: &Bound<'_, Self>) -> PyResult<Tensor> {
        (slf.get().tensor)(slf)
    }
}

#[pymethods]
impl Exported {
    /// Returns a copy of its bytes, as `Tensor.tobytes`.
    #[pyo3(signature = (stream = None))]
    fn tobytes<'py>(slf: &Bound<'py, Self>, stream: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyBytes>> {
        Self::tensor(slf)?.tobytes(slf.py(), stream)
    }

    /// Returns its tensor as one of a GPU, as `Tensor.on`.
    fn on(slf: &Bound<'_, Self>, device: Bound<'_, PyAny>) -> PyResult<Tensor> {
        Self::tensor(slf)?.on(slf.py(), device)
    }

    fn __dlpack_device__(slf: &Bound<'_, Self>) -> PyResult<(i32, i32)> {
        Ok(Self::tensor(slf)?.__dlpack_device__())
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Capsule<'py>> {
        Self::tensor(slf)?.__dlpack__(slf.py(), stream, max_version, dl_device, copy)
    }

    /// Arrays that are made of it keep this object, which keeps the memory from then on.
    #[getter]
    fn __cuda_array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<CudaArray<'py>> {
        let tensor = Self::tensor(slf)?;
        let array = tensor.__cuda_array_interface__(slf.py())?;
        slf.get().given.get_or_init(|| tensor);
        Ok(array)
    }

    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Tensor::__array__(Bound::new(slf.py(), Self::tensor(slf)?)?, dtype, copy)
    }
}
