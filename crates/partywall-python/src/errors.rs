//! Conversion of the library's errors to Python exceptions.

use std::{convert::Infallible, ffi::CString, fmt::Display, str::FromStr};

use partywall::{
    DType, Error, ErrorKind, Language, Place, TimelineEnding,
    cuda::CuResult,
    error::{
        Busy, Denied, DeviceFault, Gone, InvalidArgument, InvalidData, LimitReached, Mismatch, NotFound, TopicLimit,
        Unreachable,
    },
    info::Named,
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
    let cuda_error = match error {
        Error::DeviceFault(
            DeviceFault::Cuda { source, .. }
            | DeviceFault::ContextLost { source, .. }
            | DeviceFault::NotMapped { source, .. },
        ) => Some(source.code.0),
        Error::LimitReached(LimitReached::Memory { place: Place::Gpu(_), .. }) => Some(CuResult::OUT_OF_MEMORY.0),
        _ => None,
    };
    raise(py, class(error), &error.to_string(), &error.advice_in(Language::Python), error.anchor(), cuda_error)
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
        module.getattr("not_utf8")?.call1((class, what, text))
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

/// Returns the name of the error's class in `partywall._errors`.
fn class(error: &Error) -> &'static str {
    match error {
        Error::NotFound(NotFound::Name { .. } | NotFound::Object { .. }) => "NameNotFound",
        Error::NotFound(NotFound::Version { .. }) => "VersionNotFound",
        Error::Gone(Gone::OwnerDied { .. }) => "OwnerDied",
        Error::Gone(Gone::Withdrawn { .. }) => "Withdrawn",
        Error::NotFound(NotFound::Tensor { .. }) => "TensorNotFound",
        Error::Denied(Denied::NameExists { .. }) => "NameExists",
        Error::Denied(Denied::ReadOnly { .. }) => "ReadOnly",
        Error::Denied(Denied::Growth { .. }) => "CannotGrow",
        Error::Gone(Gone::Timeline { ending, .. }) => match ending {
            TimelineEnding::OwnerDied => "WriterDied",
            TimelineEnding::OwnerFaulted => "WriterFaulted",
            TimelineEnding::Closed => "WriterClosed",
            TimelineEnding::Abandoned => "Abandoned",
            TimelineEnding::BrokerGone => "TimelineLost",
            TimelineEnding::Evicted => "WriterEvicted",
            _ => "TimelineEnded",
        },
        Error::Busy(Busy::Writer { .. }) => "WriterExists",
        Error::InvalidArgument(InvalidArgument::Value { .. }) => "BadValue",
        Error::InvalidData(InvalidData::Tainted { .. } | InvalidData::SampleTainted { .. }) => "Tainted",
        Error::DeviceFault(DeviceFault::LaunchBlocking { .. }) => "LaunchBlocking",
        Error::DeviceFault(DeviceFault::Captured { .. }) => "Captured",
        Error::Mismatch(Mismatch::Maximum { .. }) | Error::InvalidArgument(InvalidArgument::Maximum { .. }) => {
            "WrongMaximum"
        }
        Error::Gone(Gone::Permit { .. } | Gone::HeldBlock { .. }) => "NotHeld",
        Error::InvalidArgument(InvalidArgument::Options { of: Named::Segment, .. }) => "CannotKeep",
        Error::Mismatch(Mismatch::Object { wanted: of, .. } | Mismatch::Options { of, .. })
        | Error::InvalidArgument(InvalidArgument::Options { of, .. }) => match of {
            Named::Pool => "WrongPool",
            Named::Topic => "WrongTopic",
            Named::Queue => "WrongQueue",
            _ => "WrongKind",
        },
        Error::Mismatch(Mismatch::BlockSize { .. } | Mismatch::Room { .. }) => "BlockTooSmall",
        Error::Gone(Gone::Block { .. }) => "StaleBlock",
        Error::InvalidArgument(InvalidArgument::TooFewBlocks { .. }) => "WrongTopic",
        Error::Mismatch(Mismatch::Sample { .. }) => "WrongSample",
        Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Loans | TopicLimit::Viewed, .. }) => {
            "TooManyLoans"
        }
        Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Held, .. }) => "TooManyHeld",
        Error::Busy(Busy::TopicFull { .. }) => "TopicFull",
        Error::Busy(Busy::QueueFull { .. }) => "QueueFull",
        Error::Busy(Busy::OutputsFull { .. }) => "OutputsFull",
        Error::Busy(Busy::TasksKept { .. }) => "StillUsed",
        Error::Busy(Busy::TaskRunning { .. }) => "TaskRunning",
        Error::Busy(Busy::TaskState { .. }) => "WrongTaskState",
        Error::Busy(Busy::InputsNotReady { .. }) => "InputsNotReady",
        Error::Gone(Gone::Claim { .. } | Gone::Attempt { .. }) => "ClaimLost",
        Error::Gone(Gone::Attachment { .. }) => "NotAttached",
        Error::Busy(Busy::Withdrawing { .. }) => "BeingWithdrawn",
        Error::InvalidArgument(InvalidArgument::Deadline { .. }) => "BadDeadline",
        Error::InvalidArgument(InvalidArgument::Graph { .. }) => "BadGraph",
        Error::InvalidArgument(InvalidArgument::Task { .. }) => "BadTask",
        Error::Busy(Busy::AttachmentInUse { .. }) => "SegmentInUse",
        Error::Denied(Denied::Attaching { .. }) => "CannotAttach",
        Error::Denied(Denied::Offering { .. }) => "WrongKind",
        Error::Gone(Gone::Task { .. }) => "TaskGone",
        Error::InvalidData(InvalidData::TaskFailed { .. }) => "TaskFailed",
        Error::InvalidData(InvalidData::TaskInputs { .. }) => "InputsLost",
        Error::InvalidData(InvalidData::TaskAttempt { .. }) => "AttemptFailed",
        Error::Gone(Gone::TopicIdle { .. }) => "TopicIdle",
        Error::Busy(Busy::NotReady { .. }) => "NotReady",
        Error::InvalidData(InvalidData::SampleFailed { .. }) => "SampleFailed",
        Error::Gone(Gone::Detached { .. }) => "Detached",
        Error::NotFound(NotFound::Member { .. }) => "NoSuchMember",
        Error::InvalidArgument(InvalidArgument::Yourself) => "NotYourself",
        Error::Denied(Denied::Unproven { .. } | Denied::NotUnproven { .. }) => "Unproven",
        Error::Gone(Gone::Evicted { .. }) => "Evicted",
        Error::InvalidArgument(
            InvalidArgument::Name { .. } | InvalidArgument::Version { .. } | InvalidArgument::SocketPath { .. },
        ) => "BadName",
        Error::InvalidArgument(InvalidArgument::Pattern { .. }) => "BadPattern",
        Error::InvalidArgument(
            InvalidArgument::Table { .. } | InvalidArgument::Range { .. } | InvalidArgument::Header { .. },
        ) => "BadTensor",
        Error::Mismatch(
            Mismatch::DType { .. } | Mismatch::Kind { .. } | Mismatch::HostTarget { .. } | Mismatch::Tensors { .. },
        ) => "WrongKind",
        Error::Mismatch(Mismatch::Layout { .. }) => "LayoutChanged",
        Error::DeviceFault(DeviceFault::NotShareable { .. }) => "NotShareable",
        Error::Denied(Denied::Keeping { .. }) => "CannotKeep",
        Error::Denied(Denied::Sharing { .. }) => "CannotShare",
        Error::Denied(Denied::OtherUser { .. }) => "OtherUser",
        Error::LimitReached(
            LimitReached::Memory { .. } | LimitReached::SystemMemory { .. } | LimitReached::Heap { .. },
        ) => "OutOfMemory",
        Error::LimitReached(_) => "LimitReached",
        Error::DeviceFault(DeviceFault::NoDevice { .. } | DeviceFault::NoPinned { .. }) => "NoDevice",
        Error::DeviceFault(DeviceFault::Remote { .. }) => "RemoteDevice",
        Error::DeviceFault(DeviceFault::Cuda { .. } | DeviceFault::NotMapped { .. }) => "CudaError",
        Error::DeviceFault(DeviceFault::ContextLost { .. }) => "ContextLost",
        Error::DeviceFault(DeviceFault::DeviceLost { .. }) => "DeviceLost",
        Error::Mps(_) => "NotUnderMps",
        Error::Timeout { .. } | Error::Cancelled { .. } => "TimeoutError",
        Error::Unreachable(Unreachable::Gone { .. }) => "BrokerGone",
        Error::Unreachable(
            Unreachable::NoProgram { .. }
            | Unreachable::NotStarted { .. }
            | Unreachable::NoAnswer { .. }
            | Unreachable::NoPidfd(_)
            | Unreachable::Clock { .. }
            | Unreachable::Unbound { .. }
            | Unreachable::NoDirectory { .. },
        ) => "BrokerUnreachable",
        Error::Unreachable(Unreachable::Version { .. }) => "VersionMismatch",
        Error::InvalidData(InvalidData::Table { .. }) => "BadTensor",
        Error::Unreachable(
            Unreachable::UnsafeDirectory { .. }
            | Unreachable::User { .. }
            | Unreachable::Barred { .. }
            | Unreachable::Driver { .. },
        ) => "AccessDenied",
        Error::Unreachable(Unreachable::Forked { .. }) => "Forked",
        Error::File(_) if error.kind() == ErrorKind::NotFound => "FileNotFound",
        Error::File(_) => "BadFile",
        _ => "Error",
    }
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
