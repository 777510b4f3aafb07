//! Conversion of the library's errors to Python exceptions.

use std::{convert::Infallible, ffi::CString, fmt::Display, str::FromStr};

use partywall::{
    DType, Error, Language, Place,
    cuda::{CuResult, CudaError},
    error::LimitReached,
};
use pyo3::{
    exceptions::{PyResourceWarning, PyValueError},
    inspect::PyStaticExpr,
    intern,
    prelude::*,
    type_hint_identifier,
    types::PyType,
};

/// Converts the library's errors to Python exceptions.
pub(crate) trait Raise<T> {
    /// Returns the value, or the exception to raise.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> Raise<T> for partywall::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}

/// The return type of a method that always raises.
pub(crate) enum Never {}

impl<'py> IntoPyObject<'py> for Never {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;

    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "NoReturn");

    fn into_pyobject(self, _: Python<'py>) -> Result<Self::Output, Infallible> {
        match self {}
    }
}

/// Returns the exception for an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let refused = std::error::Error::source(error).and_then(|source| source.downcast_ref::<CudaError>());
    let cuda_error = match error {
        Error::LimitReached(LimitReached::Memory { place: Place::Gpu(_), .. }) => Some(CuResult::OUT_OF_MEMORY.0),
        _ => refused.map(|refused| refused.code.0),
    };
    let advice = error.advice_in(Language::Python);
    raise(py, error.python_class(), &error.to_string(), &advice, error.anchor(), cuda_error)
}

/// Returns the exception for the use of a closed object.
pub(crate) fn closed(py: Python<'_>, what: &str) -> PyErr {
    let message = format!("this {what} is closed");
    raise(py, "Closed", &message, "use it before its close(), or inside of its `with`", "closed", None)
}

/// Warns that an object was dropped without being released. For `Drop`, which cannot raise.
pub(crate) fn unclosed(what: &str) {
    // At the end of the interpreter there is no program left to warn.
    Python::try_attach(|py| {
        let raised = PyErr::take(py);
        let text = CString::new(format!("unclosed {what}")).unwrap_or_default();
        if let Err(error) = PyErr::warn(py, &py.get_type::<PyResourceWarning>(), &text, 1) {
            error.write_unraisable(py, None);
        }
        if let Some(raised) = raised {
            raised.restore(py);
        }
    });
}

/// Returns the exception of a call for streams. If there is no GPU, its advice names `call`, which does the same for
/// hosts.
pub(crate) fn for_hosts(py: Python<'_>, error: PyErr, call: impl FnOnce() -> String) -> PyErr {
    if error.get_type(py).name().is_ok_and(|name| name == "NoDevice") {
        let advice = format!("without a GPU use {}; `partywall doctor` says what is missing", call());
        if let Err(raised) = error.value(py).setattr(intern!(py, "advice"), advice) {
            return raised;
        }
    }
    error
}

/// Returns the exception for a number that no timeline can have as its value.
pub(crate) fn bad_value(value: &Bound<'_, PyAny>) -> PyErr {
    let message = format!("values of a timeline are 0 to 2^61, not {value}");
    raise(value.py(), "BadValue", &message, "signal increasing values, up to 2^61", "bad-value", None)
}

/// Returns the exception for signalling through a handle that can only wait.
pub(crate) fn not_writer(py: Python<'_>, name: &str) -> PyErr {
    let message = format!("timeline {name:?} was opened to be waited for");
    raise(py, "NotWriter", &message, "open it with writer=True to signal it", "not-writer", None)
}

/// Returns the exception for handing over a block that arrays still use.
pub(crate) fn still_used(py: Python<'_>, pool: &str) -> PyErr {
    let message = format!("arrays of this block of pool {pool:?} are still used");
    raise(py, "StillUsed", &message, "drop them (`del`) before the block is offered", "still-used", None)
}

/// Returns the exception for a part of a block at which no element of its type can begin.
pub(crate) fn misaligned(py: Python<'_>, dtype: DType, offset: u64, pool: &str) -> PyErr {
    let message = format!("no {dtype} can begin at byte {offset} of a block of '{pool}'");
    let advice = format!("give an offset that is a multiple of {}", dtype.alignment());
    raise(py, "BadTensor", &message, &advice, "bad-range", None)
}

/// Returns the exception for a block that is to be two inputs.
pub(crate) fn input_twice(py: Python<'_>, queue: &str) -> PyErr {
    let message = format!("a task for queue {queue:?}: a block can be one input only, and this one is another already");
    raise(
        py,
        "BadTask",
        &message,
        "copy one of the parts into another block, or make one input of both",
        "bad-task",
        None,
    )
}

/// Returns the exception for one pool of torch more than a process may have.
pub(crate) fn too_many_torch_pools(py: Python<'_>, most: usize) -> PyErr {
    let message = format!("this process has {most} pools of torch_pool, and no room for more");
    let advice = "drop a pool that nothing allocates from any more: its tensors stay";
    raise(py, "LimitReached", &message, advice, "too-many-torch-pools", None)
}

/// Returns the exception for a tensor that cannot be exported in the requested form.
pub(crate) fn no_such_view(py: Python<'_>, tensor: &str, why: &str, advice: &str) -> PyErr {
    raise(py, "NoSuchView", &format!("{tensor:?} cannot be taken so: {why}"), advice, "no-such-view", None)
}

/// Returns the exception for a version that is longer than the addresses reserved for it here.
pub(crate) fn cannot_grow_here(py: Python<'_>, name: &str, version: u64, bytes: u64, reserved: u64) -> PyErr {
    let bytes = partywall::bytes(bytes);
    let reserved = partywall::bytes(reserved);
    let message = format!("{name:?} version {version} cannot grow here: it has {bytes}, and {reserved} are reserved");
    raise(py, "CannotGrow", &message, "open it again", "cannot-grow", None)
}

/// Returns the exception for an object that cannot be copied or published.
pub(crate) fn bad_source(py: Python<'_>, why: &str, advice: &str) -> PyErr {
    raise(py, "BadSource", &format!("this cannot be copied or published: {why}"), advice, "bad-source", None)
}

/// Returns the exception for text of Python that is not UTF-8. `class` is its class in `partywall._errors`.
pub(crate) fn not_utf8(text: &Bound<'_, PyAny>, what: &str, class: &str) -> PyErr {
    let made = text.py().import("partywall._errors").and_then(|module| {
        let class = module.getattr(class)?;
        text.py().import("partywall._arrays")?.call_method1("not_utf8", (class, what, text))
    });
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Returns whether an exception is one of this package.
pub(crate) fn is_own(py: Python<'_>, error: &PyErr) -> bool {
    let class = py.import("partywall._errors").and_then(|module| module.getattr("Error"));
    class.is_ok_and(|class| error.matches(py, class).unwrap_or(false))
}

fn raise(py: Python<'_>, class: &str, message: &str, advice: &str, anchor: &str, cuda_error: Option<u32>) -> PyErr {
    let made = py.import("partywall._errors").and_then(|module| {
        let class = module.getattr(class)?.cast_into::<PyType>()?;
        class.call1((message, advice, anchor, cuda_error))
    });
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Parses a dtype by its full name in NumPy and torch. Short names are refused because they are ambiguous: `i8` is 8
/// bits wide in some libraries and 64 in NumPy.
pub(crate) fn parse_dtype(name: &str) -> PyResult<DType> {
    let dtype: DType = parse(name)?;
    if dtype.name() != name {
        let why = format!("{name:?} is no dtype's full name: say {dtype}, of {} bits, if that is meant", dtype.bits());
        return Err(PyValueError::new_err(why));
    }
    Ok(dtype)
}

/// Parses a value that Python passes as text. The `ValueError` lists the valid values.
pub(crate) fn parse<T: FromStr<Err: Display>>(text: &str) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
}
