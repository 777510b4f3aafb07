//! The class of an error, the advice about it, and its entry in the documentation.
//!
//! A match on an enum of this module has no `_` arm, so that a new variant does not compile without advice. An enum of
//! a crate below is `non_exhaustive`, so a match on it needs one, which serves variants of later releases.

use std::{borrow::Cow, fmt, fs, io};

use partywall_cuda::{CuResult, CudaError};
use partywall_os::process;
use partywall_wire::{Ending, Named};

use rustix::process::{Resource, getrlimit};

use super::Error;
use crate::files::FileProblem;

/// The class of an error. The binary's exit codes have the same classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A comparison or check failed.
    CheckFailed,
    /// The arguments are invalid.
    Usage,
    /// A name, version, tensor or file does not exist.
    NotFound,
    /// There is no broker, or none that this process can use.
    Unreachable,
    /// The operation was refused, or a limit is reached.
    Refused,
    /// The GPU or its driver.
    Device,
    /// An event did not happen in time, or before the wait was cancelled.
    TimedOut,
}

/// The language whose calls the advice names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Language {
    /// Calls of this library.
    Rust,
    /// Calls of the Python package.
    Python,
    /// The `partywall` command.
    Shell,
}

/// What is reported about an error in addition to its message.
pub(super) struct Help {
    kind: ErrorKind,
    /// The entry of `docs/troubleshooting.md`.
    anchor: &'static str,
    /// What to do, as a sentence in the imperative.
    advice: Cow<'static, str>,
}

impl Error {
    /// Returns the class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.help(Language::Rust).kind
    }

    /// Returns what to do about it, as a sentence that names calls of this library.
    pub fn advice(&self) -> String {
        self.advice_in(Language::Rust)
    }

    /// Returns what to do about it, as a sentence that names calls of `language`.
    pub fn advice_in(&self, language: Language) -> String {
        self.help(language).advice.into_owned()
    }

    /// Returns the name of its entry in `docs/troubleshooting.md`.
    pub fn anchor(&self) -> &'static str {
        self.help(Language::Rust).anchor
    }

    fn help(&self, language: Language) -> Help {
        match self {
            Self::InvalidArgument(error) => error.help(language),
            Self::NotFound(error) => error.help(language),
            Self::Mismatch(error) => error.help(language),
            Self::Denied(error) => error.help(language),
            Self::LimitReached(error) => error.help(language),
            Self::Busy(error) => error.help(),
            Self::Timeout { .. } => ErrorKind::TimedOut.help("timeout", "wait longer, or check the process that should have done it: `partywall ps` lists members, `partywall ls` names"),
            Self::Cancelled { .. } => ErrorKind::TimedOut.help("cancelled", "call it again to continue waiting: nothing was taken or lost"),
            Self::Gone(error) => error.help(language),
            Self::InvalidData(error) => error.help(),
            Self::Unreachable(error) => error.help(),
            Self::DeviceFault(error) => error.help(language),
            Self::Mps(error) => error.help(),
            // Not an error of the kernel: mapping control memory of another layout returns it.
            Self::System { source, .. } if source.kind() == io::ErrorKind::InvalidData => ErrorKind::Refused.help("system-call", "run the same Partywall release on both sides"),
            Self::System { source, .. } if source.kind() == io::ErrorKind::NotFound && !process::has_proc() => ErrorKind::Refused.help("no-proc", "mount /proc (`mount -t proc proc /proc`): Partywall opens its own descriptors there"),
            Self::System { .. } => ErrorKind::Refused.help("system-call", "see the kernel's error"),
            Self::File(error) => file_help(&error.problem),
        }
    }
}

impl ErrorKind {
    /// Returns what is reported about an error of this class in addition to its message.
    pub(super) fn help(self, anchor: &'static str, advice: impl Into<Cow<'static, str>>) -> Help {
        Help { kind: self, anchor, advice: advice.into() }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CheckFailed => "check failed",
            Self::Usage => "usage",
            Self::NotFound => "not found",
            Self::Unreachable => "broker unreachable",
            Self::Refused => "refused",
            Self::Device => "device",
            Self::TimedOut => "timed out",
        })
    }
}

/// Returns the name of the entry of `docs/troubleshooting.md` about a failed driver call.
pub fn cuda_anchor(error: &CudaError) -> &'static str {
    match (error.call, error.code) {
        _ if error.is_sticky() => "broken-context",
        ("cuMemHostRegister", CuResult::OUT_OF_MEMORY | CuResult::OPERATING_SYSTEM) => "cannot-page-lock",
        ("cuIpcOpenEventHandle" | "cuIpcGetEventHandle", _) => "event-not-shared",
        (
            "cuStreamWaitValue32" | "cuStreamWaitValue64" | "cuStreamWriteValue32" | "cuStreamWriteValue64",
            CuResult::NOT_SUPPORTED | CuResult::NOT_FOUND,
        ) => "stream-waits-refused",
        (_, CuResult::NOT_SUPPORTED) => "not-supported",
        ("cuMemCreate", CuResult::INVALID_VALUE) => "size-not-aligned",
        ("cuMemFree", CuResult::INVALID_VALUE) => "wrong-clean-up",
        _ => "driver-error",
    }
}

/// Returns the advice for a process that cannot open another file.
pub(super) fn open_files() -> String {
    let limit = getrlimit(Resource::Nofile).current;
    // Counting takes a file descriptor: if there is none, all are in use.
    let open = fs::read_dir("/proc/self/fd").map_or(limit, |all| Some(all.count().saturating_sub(1) as u64));
    match (open, limit) {
        (Some(open), Some(limit)) => {
            format!("this process has {open} files open of {limit}: close some, or raise the limit (`ulimit -n`)")
        }
        (None, _) | (_, None) => "close files, or raise the limit (`ulimit -n`)".into(),
    }
}

/// Returns the advice that names the call to open an object of this kind.
pub(super) fn use_as_it_is(name: &str, is: Named, language: Language) -> String {
    match (language, is) {
        (Language::Rust, Named::Segment) => format!("open it with Domain::open({name:?}, timeout)"),
        (Language::Rust, Named::Pool) => format!("open it with Domain::pool({name:?}).open()"),
        (Language::Rust, Named::Topic) => format!("open it with Domain::topic({name:?}).open()"),
        (Language::Rust, Named::Queue) => format!("open it with Domain::queue({name:?}).open()"),
        (Language::Rust, Named::Timeline) => format!("open it with Domain::timeline({name:?})"),
        (Language::Rust, Named::Semaphore) => format!("open it with Domain::semaphore({name:?}, maximum)"),
        (Language::Python, Named::Semaphore) => format!("open it with d.semaphore({name:?}, maximum)"),
        (Language::Python, Named::Segment) => format!("open it with d.open({name:?})"),
        (Language::Python, Named::Pool | Named::Topic | Named::Queue | Named::Timeline) => {
            format!("open it with d.{}({name:?})", is.name())
        }
        (Language::Shell, Named::Segment) => format!("copy it to a file with `partywall get {name} FILE`"),
        (Language::Shell, Named::Queue) => format!("list its dead letters with `partywall queue ls {name}`"),
        (Language::Shell, Named::Topic) => format!("read its samples with `partywall topic echo {name}`"),
        (Language::Shell, Named::Pool | Named::Timeline | Named::Semaphore) => show(name),
        _ => show(name),
    }
}

fn show(name: &str) -> String {
    format!("look at it with `partywall show {name}`")
}

/// Returns the advice that keeps a name from ending in this way.
pub(super) fn after_the_end(ending: Ending, language: Language) -> &'static str {
    match (ending, language) {
        (Ending::Withdrawn | Ending::OwnerDied, Language::Rust) => {
            "keep the Segment that commit() returned for as long as others need the name, or commit it with kept(true)"
        }
        (Ending::Withdrawn | Ending::OwnerDied, Language::Python) => {
            "let its process run, and its domain and segment open, for as long as others need the name; or pass kept=True"
        }
        (Ending::Withdrawn | Ending::OwnerDied, Language::Shell) => {
            "keep its owner running for as long as others need the name, or create the name as kept"
        }
        (Ending::Unused, _) => "keep it open in one process for as long as others need it, or create it as kept",
        (Ending::Removed, _) => CREATE_AGAIN,
        _ => CREATE_AGAIN,
    }
}

fn file_help(problem: &FileProblem) -> Help {
    let kind = match problem {
        FileProblem::Open(source) | FileProblem::Write(source) if source.kind() == io::ErrorKind::NotFound => {
            ErrorKind::NotFound
        }
        FileProblem::NoSuchTensor { .. } | FileProblem::MissingShard { .. } => ErrorKind::NotFound,
        FileProblem::NotOneTensor { .. }
        | FileProblem::FormatLacksElements { .. }
        | FileProblem::FormatLacksStrides { .. }
        | FileProblem::IsFolder => ErrorKind::Usage,
        FileProblem::Cancelled => ErrorKind::CheckFailed,
        // An error of the memory, to or from which the bytes were copied, has its own entry.
        FileProblem::Sink(source) | FileProblem::Content { source, .. } => match source.downcast_ref::<Error>() {
            Some(cause) => return cause.kind().help(cause.anchor(), problem.advice()),
            None => ErrorKind::Refused,
        },
        problem if problem.lacks_files() => return ErrorKind::Refused.help("no-file-descriptor", open_files()),
        _ => ErrorKind::Refused,
    };
    kind.help("file", problem.advice())
}

const CREATE_AGAIN: &str = "create it again if it is still needed";
