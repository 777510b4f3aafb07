//! The library's errors as Python's.

use std::{fmt::Display, str::FromStr};

use partywall::{DType, Error, ErrorKind, Language, Place, TimelineEnding, cuda::CuResult};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyType};

/// Makes Python exceptions of the library's errors.
pub(crate) trait Raise<T> {
    /// The value, or the exception to raise.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> Raise<T> for partywall::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}

/// The exception that stands for an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let cuda_error = match error {
        Error::Cuda { source, .. } | Error::ContextLost { source, .. } => Some(source.code.0),
        Error::OutOfMemory { place: Place::Gpu(_), .. } => Some(CuResult::OUT_OF_MEMORY.0),
        _ => None,
    };
    raise(py, class(error), &error.to_string(), &error.advice_in(Language::Python), error.anchor(), cuda_error)
}

/// The exception of using what is closed.
pub(crate) fn closed(py: Python<'_>, what: &str) -> PyErr {
    let message = format!("this {what} is closed");
    raise(py, "Closed", &message, "use it before its close(), or inside of its `with`", "closed", None)
}

/// The exception of signalling through a handle that only waits.
pub(crate) fn not_writer(py: Python<'_>, name: &str) -> PyErr {
    let message = format!("timeline {name:?} was opened to be waited for");
    raise(py, "NotWriter", &message, "open it with writer=True to signal it", "not-writer", None)
}

/// The exception of handing over a block that arrays still look at.
pub(crate) fn still_used(py: Python<'_>, pool: &str) -> PyErr {
    let message = format!("arrays of this block of pool {pool:?} are still used");
    raise(py, "StillUsed", &message, "drop them (`del`) before the block is offered", "still-used", None)
}

/// The exception of a tensor that cannot be taken in the way that was asked for.
pub(crate) fn no_such_view(py: Python<'_>, tensor: &str, why: &str, advice: &str) -> PyErr {
    raise(py, "NoSuchView", &format!("{tensor:?} cannot be taken so: {why}"), advice, "no-such-view", None)
}

/// The exception of a version that is longer than there is room for here.
pub(crate) fn cannot_grow_here(py: Python<'_>, name: &str, version: u64, bytes: u64, reserved: u64) -> PyErr {
    let bytes = partywall::bytes(bytes);
    let reserved = partywall::bytes(reserved);
    let message = format!("{name:?} version {version} cannot grow here: it has {bytes}, and {reserved} are reserved");
    raise(py, "CannotGrow", &message, "open it again", "cannot-grow", None)
}

/// The exception of something that cannot be put or published.
pub(crate) fn bad_source(py: Python<'_>, why: &str, advice: &str) -> PyErr {
    raise(py, "BadSource", &format!("this cannot be copied or published: {why}"), advice, "bad-source", None)
}

fn raise(py: Python<'_>, class: &str, message: &str, advice: &str, anchor: &str, cuda_error: Option<u32>) -> PyErr {
    let made = py.import("partywall._errors").and_then(|module| {
        let class = module.getattr(class)?.cast_into::<PyType>()?;
        class.call1((message, advice, anchor, cuda_error))
    });
    made.map_or_else(|error| error, PyErr::from_value)
}

/// The name of its class in `partywall._errors`.
fn class(error: &Error) -> &'static str {
    match error {
        Error::NotFound { .. } | Error::ObjectNotFound { .. } => "NameNotFound",
        Error::VersionNotFound { .. } => "VersionNotFound",
        Error::OwnerDied { .. } => "OwnerDied",
        Error::Withdrawn { .. } => "Withdrawn",
        Error::NoSuchTensor { .. } => "TensorNotFound",
        Error::NameExists { .. } => "NameExists",
        Error::ReadOnly { .. } => "ReadOnly",
        Error::CannotGrow { .. } => "CannotGrow",
        Error::TimelineEnded { ending, .. } => match ending {
            TimelineEnding::OwnerDied => "WriterDied",
            TimelineEnding::OwnerFaulted => "WriterFaulted",
            TimelineEnding::Closed => "WriterClosed",
            TimelineEnding::Abandoned => "Abandoned",
            TimelineEnding::BrokerGone => "TimelineLost",
            TimelineEnding::Evicted => "WriterEvicted",
            _ => "TimelineEnded",
        },
        Error::WriterExists { .. } => "WriterExists",
        Error::BadValue { .. } => "BadValue",
        Error::Tainted { .. } | Error::SampleTainted { .. } => "Tainted",
        Error::LaunchBlocking { .. } => "LaunchBlocking",
        Error::Captured { .. } => "Captured",
        Error::WrongMaximum { .. } | Error::BadMaximum { .. } => "WrongMaximum",
        Error::NotHeld { .. } | Error::BlockNotHeld { .. } => "NotHeld",
        Error::NotAPool { .. } | Error::WrongPool { .. } | Error::BadPool { .. } => "WrongPool",
        Error::BlockTooSmall { .. } => "BlockTooSmall",
        Error::StaleBlock { .. } => "StaleBlock",
        Error::NotATopic { .. } | Error::WrongTopic { .. } | Error::BadTopic { .. } | Error::PoolTooSmall { .. } => {
            "WrongTopic"
        }
        Error::WrongSample { .. } => "WrongSample",
        Error::TooManyPublishers { .. } | Error::TooManySubscribers { .. } => "LimitReached",
        Error::TooManyLoans { .. } => "TooManyLoans",
        Error::TooManyHeld { .. } => "TooManyHeld",
        Error::TopicFull { .. } => "TopicFull",
        Error::TopicIdle { .. } => "TopicIdle",
        Error::NotReady { .. } => "NotReady",
        Error::SampleFailed { .. } => "SampleFailed",
        Error::Parted { .. } => "Parted",
        Error::NoSuchMember { .. } => "NoSuchMember",
        Error::NeedsSeat => "Error",
        Error::NotYourself => "NotYourself",
        Error::Unproven { .. } | Error::NotUnproven { .. } => "Unproven",
        Error::Evicted { .. } => "Evicted",
        Error::BadName { .. } | Error::BadVersion { .. } => "BadName",
        Error::BadPattern { .. } => "BadPattern",
        Error::Table { .. } | Error::BadRange { .. } => "BadTensor",
        Error::WrongDType { .. } | Error::WrongKind { .. } | Error::NotASegment { .. } => "WrongKind",
        Error::NotShareable { .. } => "NotShareable",
        Error::CannotKeep { .. } => "CannotKeep",
        Error::OutOfMemory { .. } => "OutOfMemory",
        Error::LimitReached { .. }
        | Error::NoFileDescriptor(_)
        | Error::UnreadDescriptors { .. }
        | Error::DescriptorsInFlight { .. } => "LimitReached",
        Error::NoDevice { .. } => "NoDevice",
        Error::RemoteDevice { .. } => "RemoteDevice",
        Error::Cuda { .. } => "CudaError",
        Error::ContextLost { .. } => "ContextLost",
        Error::Timeout { .. } | Error::Cancelled { .. } => "TimeoutError",
        Error::BrokerGone { .. } => "BrokerGone",
        Error::BrokerNotFound { .. } | Error::BrokerNotStarted { .. } | Error::BrokerUnreachable { .. } => {
            "BrokerUnreachable"
        }
        Error::VersionMismatch { .. } => "VersionMismatch",
        Error::NoDirectory { .. } => "BrokerUnreachable",
        Error::PathTooLong { .. } => "BadName",
        Error::NoMemory { .. } => "OutOfMemory",
        Error::DamagedTable { .. } => "BadTensor",
        Error::UnsafeDirectory { .. } | Error::WrongUser { .. } | Error::OtherDriver { .. } => "AccessDenied",
        Error::Forked { .. } => "Forked",
        Error::File(_) if error.kind() == ErrorKind::NotFound => "FileNotFound",
        Error::File(_) => "BadFile",
        _ => "Error",
    }
}

/// A dtype under the name that it has in NumPy and torch. Short names are none: `i8` has 8 bits to some, and to NumPy 64.
pub(crate) fn parse_dtype(name: &str) -> PyResult<DType> {
    let dtype: DType = parse(name)?;
    if dtype.name() != name {
        let why = format!("{name:?} is no dtype's full name: say {dtype}, of {} bits, if that is meant", dtype.bits());
        return Err(PyValueError::new_err(why));
    }
    Ok(dtype)
}

/// A value that Python gives as text; a `ValueError` says what it may be.
pub(crate) fn parse<T: FromStr<Err: Display>>(text: &str) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
}
