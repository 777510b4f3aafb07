//! Types, shapes, places and numbers as Python passes them.

use std::str::FromStr;

use partywall::{Access, DType, DeviceChoice, DeviceUuid, MAX_TASKS, Place};
use pyo3::{
    exceptions::{PyOverflowError, PyTypeError, PyValueError},
    inspect::PyStaticExpr,
    intern,
    prelude::*,
    pybacked::PyBackedStr,
    type_hint_identifier, type_hint_subscript, type_hint_union,
    types::{PyBytes, PyString, PyTuple},
};

use crate::errors::{Raise, bad_value, not_utf8, parse, parse_dtype};

/// The type of elements: a name, or an object of numpy, torch or jax.
#[derive(Clone, Copy)]
pub(crate) struct ElementType(pub(crate) DType);

/// The name of a device, or an object that converts to it.
pub(crate) struct DeviceName(pub(crate) String);

/// Elements along each dimension. For one dimension Python may pass a number.
pub(crate) struct Shape(pub(crate) Vec<u64>);

/// The output of a task: a number of bytes, or a shape and a type.
pub(crate) enum Room {
    Bytes(u64),
    Tensor(Vec<u64>, DType),
}

/// A number of bytes or elements.
pub(crate) struct Count(pub(crate) u64);

/// Bytes, or an object that Python's `bytes` accepts.
pub(crate) struct Bytes<'py>(pub(crate) Bound<'py, PyBytes>);

/// An object of any type that Python may leave out, or pass as `None`.
pub(crate) type Optional<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// How often a task may be attempted.
pub(crate) struct Attempts(pub(crate) u8);

/// What needs access to pinned memory from the start.
#[derive(Clone, Copy)]
pub(crate) struct Needs(pub(crate) Access);

/// Whether a task ends with its submitter.
pub(crate) struct Cancels(pub(crate) bool);

/// Defines text that Python passes for one use: a type, what its errors call it, and their class for text that is not
/// UTF-8.
macro_rules! text {
    ($(#[$doc:meta])* $type:ident, $what:literal, $class:literal) => {
        $(#[$doc])*
        pub(crate) struct $type(pub(crate) PyBackedStr);

        impl<'py> FromPyObject<'_, 'py> for $type {
            type Error = PyErr;

            const INPUT_TYPE: PyStaticExpr = <&str>::INPUT_TYPE;

            fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
                match object.extract() {
                    Ok(text) => Ok(Self(text)),
                    Err(_) if object.is_instance_of::<PyString>() => Err(not_utf8(&object, $what, $class)),
                    Err(_) => Err(PyTypeError::new_err(format!("{} is a string, not {:?}", $what, *object))),
                }
            }
        }
    };
}

text! {
    /// A name.
    Name, "a name", "BadName"
}

text! {
    /// The name of a tensor to be found.
    TensorName, "the name of a tensor", "TensorNotFound"
}

text! {
    /// The kind of a task.
    Kind, "the kind of a task", "BadTask"
}

text! {
    /// A pattern of names.
    Pattern, "a pattern", "BadPattern"
}

/// Defines a number that Python passes for one use: a type, and the exception for a number beyond its integer. Which of
/// the others are valid, the library says.
macro_rules! number {
    ($(#[$doc:meta])* $type:ident($integer:ty), $beyond:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $type(pub(crate) $integer);

        impl<'py> FromPyObject<'_, 'py> for $type {
            type Error = PyErr;

            const INPUT_TYPE: PyStaticExpr = <$integer>::INPUT_TYPE;

            fn extract(number: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
                number.extract().map(Self).map_err(|error: PyErr| {
                    if error.is_instance_of::<PyOverflowError>(number.py()) { $beyond(&number) } else { error }
                })
            }
        }
    };
}

number! {
    /// A value of a timeline.
    Value(u64), bad_value
}

number! {
    /// The number of permits of a semaphore.
    Permits(u32), |number: &Bound<'_, PyAny>| {
        PyValueError::new_err(format!("a semaphore has 1 to 65,536 permits, not {number}"))
    }
}

number! {
    /// The number of tasks for which a queue has room.
    Places(u32), |number: &Bound<'_, PyAny>| {
        PyValueError::new_err(format!("a queue has room for 1 to {MAX_TASKS} tasks, not {number}"))
    }
}

number! {
    /// The number of blocks for the inputs or outputs of a queue.
    QueueBlocks(u32), |number: &Bound<'_, PyAny>| {
        PyValueError::new_err(format!("a queue has 1 to 65,536 blocks of inputs or outputs, not {number}"))
    }
}

number! {
    /// One of a topic's numbers.
    Number(u32), |number: &Bound<'_, PyAny>| {
        PyValueError::new_err(format!("numbers of a topic are 0 to 4,294,967,295, not {number}"))
    }
}

number! {
    /// The number of blocks of a pool.
    Blocks(u32), |number: &Bound<'_, PyAny>| {
        PyValueError::new_err(format!("a pool has 1 to 65,536 blocks, not {number}"))
    }
}

impl ElementType {
    /// Returns type and shape of a view of what another process has described: each is that of the description if there
    /// is none. With another type and no shape, of as many elements as fit into its bytes.
    pub(crate) fn view(
        dtype: Option<Self>,
        shape: Option<Shape>,
        (of, lengths, bytes): (DType, &[u64], u64),
    ) -> (Self, Vec<u64>) {
        let dtype = dtype.unwrap_or(Self(of));
        match shape {
            None if dtype.0 == of => (dtype, lengths.to_vec()),
            shape => (dtype, dtype.shape_within(shape, bytes)),
        }
    }

    /// Returns the shape; if there is none, that of as many elements as fit into a number of bytes, or for elements
    /// smaller than a byte that of all bytes.
    pub(crate) fn shape_within(self, shape: Option<Shape>, bytes: u64) -> Vec<u64> {
        shape.map_or_else(|| vec![bytes / self.0.item_bytes().unwrap_or(1)], |Shape(lengths)| lengths)
    }
}

impl<'py> FromPyObject<'_, 'py> for DeviceName {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.str()?.extract().map(Self)
    }
}

impl<'py> FromPyObject<'_, 'py> for ElementType {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // Full names take a shortcut: a call of Python takes longer than creating the tensor.
        if let Ok(name) = object.extract::<&str>()
            && let Ok(dtype) = DType::from_str(name)
            && dtype.name() == name
        {
            return Ok(Self(dtype));
        }
        let name: String =
            arrays(object.py())?.call_method1(intern!(object.py(), "dtype_name"), (object,))?.extract()?;
        parse_dtype(&name).map(Self)
    }
}

impl<'py> FromPyObject<'_, 'py> for Shape {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("typing", "SupportsIndex"),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Iterable"),
            type_hint_identifier!("typing", "SupportsIndex")
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let lengths = arrays(object.py())?.call_method1(intern!(object.py(), "dimensions"), (object,))?;
        Ok(Self(lengths.extract()?))
    }
}

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = u64::INPUT_TYPE;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number = object.extract::<u64>().or_else(|_| {
            let counted = arrays(object.py())?.call_method1(intern!(object.py(), "count"), (object,))?;
            counted.extract()
        });
        number.map(Self)
    }
}

impl<'py> FromPyObject<'_, 'py> for Room {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(pair) = object.cast::<PyTuple>() else {
            return object.extract::<Count>().map(|Count(bytes)| Self::Bytes(bytes));
        };
        match pair.extract::<(Shape, ElementType)>() {
            Ok((Shape(shape), ElementType(dtype))) => Ok(Self::Tensor(shape, dtype)),
            Err(error) if pair.len() == 2 => Err(error),
            Err(_) => Err(PyTypeError::new_err(format!("output is a number of bytes or (shape, dtype), not {pair:?}"))),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Bytes<'py> {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "bytes");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.cast::<PyBytes>() {
            Ok(bytes) => Ok(Self(bytes.to_owned())),
            Err(_) => Ok(Self(object.py().get_type::<PyBytes>().call1((object,))?.cast_into()?)),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Attempts {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = u8::INPUT_TYPE;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok(attempts @ 1..) => Ok(Self(attempts)),
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => Err(error),
            _ => Err(PyValueError::new_err(format!("a task is attempted 1 to 255 times, not {}", *object))),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Cancels {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = <&str>::INPUT_TYPE;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok("keep") => Ok(Self(false)),
            Ok("cancel") => Ok(Self(true)),
            _ => Err(PyValueError::new_err(format!("on_death is 'keep' or 'cancel', not {}", object.repr()?))),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Needs {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = <&str>::INPUT_TYPE;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok("cpu") => Ok(Self(Access::Cpu)),
            Ok("gpu") => Ok(Self(Access::Gpu)),
            Ok("both") => Ok(Self(Access::Both)),
            _ => Err(PyValueError::new_err(format!("access is 'cpu', 'gpu' or 'both', not {}", object.repr()?))),
        }
    }
}

/// Returns the place that Python names, for the calling thread: `cuda`, or `gpu`, is its current device, as in torch
/// and cupy.
pub(crate) fn place(py: Python<'_>, device: &str) -> PyResult<Place> {
    let choice = parse(device)?;
    let is_current = matches!(device, "cuda" | "gpu");
    let resolve = || match partywall::gpu::resolve(if is_current { DeviceChoice::Auto } else { choice })? {
        // The selection of a default reports why there is none.
        (Place::Host, Some(_)) if is_current => partywall::gpu::resolve(choice),
        resolved => Ok(resolved),
    };
    Ok(py.detach(resolve).or_raise(py)?.0)
}

/// Returns the GPU for which host memory is to be pinned.
pub(crate) fn pinning(py: Python<'_>, device: &str) -> PyResult<DeviceUuid> {
    match place(py, device)? {
        Place::Gpu(uuid) => Ok(uuid),
        _ => Err(PyValueError::new_err("memory is pinned for a GPU: device is cuda, cuda:N or a GPU's UUID")),
    }
}

/// Returns the place that Python names; `None` if it names none, or `auto`.
pub(crate) fn named_place(py: Python<'_>, device: Option<&str>) -> PyResult<Option<Place>> {
    device.filter(|device| *device != "auto").map(|device| place(py, device)).transpose()
}

/// The Python module that reads arguments.
fn arrays(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "partywall._arrays"))
}
