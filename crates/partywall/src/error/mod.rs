//! All errors of the library: what happened, why, and what to do.
//!
//! [`Error`] has one variant for each reaction that a program can have. Most variants contain an enum in a file of its
//! own, with the messages and, in one row for each error, the advice, the entry of `docs/troubleshooting.md` and the
//! class of the Python package.

mod advice;
mod argument;
mod busy;
mod data;
mod denied;
mod device;
mod gone;
mod limit;
mod memory;
mod mismatch;
mod mps;
mod not_found;
mod text;
mod unreachable;

use std::{
    fmt::{self, Debug, Display},
    path::Path,
    time::Duration,
};

use partywall_os::{Errno, dir::Unsafe, process};
use partywall_wire::Ending;
pub use partywall_wire::LimitHolder;

use self::advice::Help;
pub use self::{
    advice::{ErrorKind, Language, cuda_anchor},
    argument::InvalidArgument,
    busy::Busy,
    data::InvalidData,
    denied::Denied,
    device::DeviceFault,
    gone::Gone,
    limit::{LimitReached, TopicLimit},
    memory::MemoryLimit,
    mismatch::Mismatch,
    mps::MpsFault,
    not_found::NotFound,
    text::bytes,
    unreachable::{ForeignBroker, Unreachable},
};
pub(crate) use self::{
    text::{ago, nothing_came, seconds},
    unreachable::NO_SOCKET,
};
use crate::files::FileError;

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. Unless a variant says otherwise, nothing has changed.
///
/// Match the groups that the program can act on, and single errors in them where the details matter:
///
/// ```
/// use std::time::Duration;
/// use partywall::{Domain, Error, Result, Segment, error::Gone};
///
/// fn weights(domain: &Domain) -> Result<Option<Segment>> {
///     match domain.open("weights", Duration::from_millis(10)) {
///         Ok(segment) => Ok(Some(segment)),
///         // No process has committed it yet.
///         Err(Error::Timeout { .. } | Error::NotFound(_)) => Ok(None),
///         Err(Error::Gone(Gone::OwnerDied { pid, .. })) => {
///             eprintln!("process {pid} took it along");
///             Ok(None)
///         }
///         Err(error) => {
///             eprintln!("{error}: {}", error.advice());
///             Err(error)
///         }
///     }
/// }
/// #
/// # let directory = tempfile::tempdir()?;
/// # let socket = directory.path().join("sockets/doc.sock");
/// # let broker = partywall_broker::Broker::bind(partywall_broker::Config::new(&socket, "doc", partywall::VERSION))?;
/// # let stop = broker.stop_handle()?;
/// # let broker = std::thread::spawn(move || broker.run());
/// # let domain = partywall::Domain::options().socket(&socket).connect()?;
/// # assert!(weights(&domain)?.is_none());
/// # drop(domain);
/// # stop.stop();
/// # broker.join().expect("the broker does not panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `{:?}` is the message with the advice, so that a `main` that returns the error prints both; `{:#?}` is the variant
/// with its fields.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that no call accepts: a name, a number, a range. The caller's mistake.
    #[error(transparent)]
    InvalidArgument(#[from] InvalidArgument),
    /// The object does not exist: no such name, version, tensor or member.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The object exists, but has another kind, type or size.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The operation is not allowed on this object, or for this process.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// A limit of the broker, a topic, this process or the machine is reached.
    #[error(transparent)]
    LimitReached(#[from] LimitReached),
    /// Another process still uses the object; the call may succeed later.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// The event did not happen in time.
    #[error("{what} within {}", seconds(*after))]
    Timeout {
        /// The action, and the event that did not happen: `cannot open "x": no process committed it`.
        what: String,
        /// The time that has passed.
        after: Duration,
    },
    /// The caller cancelled the wait ([`Wait::cancelled_by`](crate::Wait::cancelled_by)).
    #[error("{what} before the wait was cancelled")]
    Cancelled {
        /// The action and the event, as for [`Timeout`](Self::Timeout).
        what: String,
    },
    /// The object has ended: a timeline, a port of a topic, a block, a permit.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// The data must not be used: it is damaged, or work that it rests on has failed.
    #[error(transparent)]
    InvalidData(#[from] InvalidData),
    /// There is no broker, or none that this process can use.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// The GPU or its driver cannot perform the operation.
    #[error(transparent)]
    DeviceFault(#[from] DeviceFault),
    /// This process is not under MPS, or the domain's MPS daemon did not start or stop.
    #[error(transparent)]
    Mps(#[from] MpsFault),
    /// The kernel refused a call.
    #[error("{what}: {source}")]
    System {
        /// The purpose of the call.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return with_advice(f, self, self);
        }
        match self {
            Self::InvalidArgument(error) => f.debug_tuple("InvalidArgument").field(error).finish(),
            Self::NotFound(error) => f.debug_tuple("NotFound").field(error).finish(),
            Self::Mismatch(error) => f.debug_tuple("Mismatch").field(error).finish(),
            Self::Denied(error) => f.debug_tuple("Denied").field(error).finish(),
            Self::LimitReached(error) => f.debug_tuple("LimitReached").field(error).finish(),
            Self::Busy(error) => f.debug_tuple("Busy").field(error).finish(),
            Self::Timeout { what, after } => {
                f.debug_struct("Timeout").field("what", what).field("after", after).finish()
            }
            Self::Cancelled { what } => f.debug_struct("Cancelled").field("what", what).finish(),
            Self::Gone(error) => f.debug_tuple("Gone").field(error).finish(),
            Self::InvalidData(error) => f.debug_tuple("InvalidData").field(error).finish(),
            Self::Unreachable(error) => f.debug_tuple("Unreachable").field(error).finish(),
            Self::DeviceFault(error) => f.debug_tuple("DeviceFault").field(error).finish(),
            Self::Mps(error) => f.debug_tuple("Mps").field(error).finish(),
            Self::System { what, source } => {
                f.debug_struct("System").field("what", what).field("source", source).finish()
            }
            Self::File(error) => f.debug_tuple("File").field(error).finish(),
        }
    }
}

/// Writes a message, what to do, and where to read more.
pub(crate) fn with_advice(f: &mut fmt::Formatter<'_>, message: &dyn Display, error: &Error) -> fmt::Result {
    write!(f, "{message}\n  → {}\n  more: partywall explain {}", error.advice(), error.anchor())
}

/// An error of a call that took a value, with that value: the call can be made again, or the value dropped.
///
/// `?` makes it an [`Error`], and drops the value. Its `{:?}` is for `main`, as that of [`Error`].
///
/// ```no_run
/// # fn publish(filled: partywall::Filled) -> partywall::Result<()> {
/// use std::time::Duration;
///
/// use partywall::{Error, Failed};
///
/// if let Err(Failed { error: Error::Busy(_), value }) = filled.publish(Duration::ZERO) {
///     println!("a subscriber holds all that there is room for");
///     value.publish(Duration::from_secs(1))?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Failed<T> {
    /// The reason.
    pub error: Error,
    /// What the call took.
    pub value: Box<T>,
}

impl<T> Failed<T> {
    pub(crate) fn new(error: Error, value: T) -> Self {
        Self { error, value: Box::new(value) }
    }
}

impl<T> Display for Failed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(&self.error, f)
    }
}

impl<T> Debug for Failed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive();
        }
        Debug::fmt(&self.error, f)
    }
}

impl<T> std::error::Error for Failed<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<T> From<Failed<T>> for Error {
    fn from(failed: Failed<T>) -> Self {
        failed.error
    }
}

/// How a name ended that existed less than a minute ago.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The version that was the latest.
    pub version: u64,
    /// How it ended.
    pub ending: Ending,
    /// The process that ended it: the owner, the remover or the last user.
    pub pid: u32,
    /// The program of that process, without its folder.
    pub program: String,
    /// How long ago.
    pub ago: Duration,
}

/// The memory that a broker holds in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// All bytes.
    pub bytes: u64,
    /// The largest names, largest first.
    pub largest: Vec<(String, u64)>,
}

impl Error {
    /// Returns the error that the directory of a socket cannot be used.
    pub(crate) fn directory(path: &Path, why: Unsafe) -> Self {
        match why {
            Unsafe::NoParent(parent) => Self::Unreachable(Unreachable::NoDirectory { path: path.to_owned(), parent }),
            why => Self::Unreachable(Unreachable::UnsafeDirectory { path: path.to_owned(), why: why.to_string() }),
        }
    }

    /// Returns the error for `ETOOMANYREFS`, the kernel's answer to a message with file descriptors.
    pub(crate) fn descriptors_in_flight() -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        Self::LimitReached(LimitReached::DescriptorsInFlight { limit })
    }

    /// Returns the error that a thread or a process could not be started.
    pub fn starting(what: impl Into<String>, source: std::io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::AGAIN) => Self::LimitReached(LimitReached::Processes(what.into())),
            _ => Self::System { what: format!("starting {}", what.into()), source },
        }
    }

    /// As [`system`](Self::system), of an error of the standard library.
    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(errno) => Self::system(what, errno),
            None => Self::System { what: what.into(), source },
        }
    }

    pub(crate) fn system(what: impl Into<String>, errno: Errno) -> Self {
        match errno {
            Errno::MFILE | Errno::NFILE => Self::LimitReached(LimitReached::FileDescriptors(what.into())),
            Errno::NOMEM => {
                Self::LimitReached(LimitReached::SystemMemory { what: what.into(), limit: MemoryLimit::reached() })
            }
            Errno::FBIG => match process::file_size_limit() {
                Some(limit) => {
                    let limit = MemoryLimit::FileSize(limit);
                    Self::LimitReached(LimitReached::SystemMemory { what: what.into(), limit })
                }
                None => Self::System { what: what.into(), source: errno.into() },
            },
            _ => Self::System { what: what.into(), source: errno.into() },
        }
    }
}
