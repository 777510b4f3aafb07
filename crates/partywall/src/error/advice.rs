//! What is reported about an error beside its message: its class, its entry in the documentation, its Python class, the
//! advice, and the process that it is about. Each error has all of it in one arm of the `help` of its group.
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

/// The class of an error. Its number is the exit code of a `partywall` command that fails so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A comparison or check failed.
    CheckFailed = 1,
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
    /// Calls of the C library.
    C,
}

/// What is reported about an error beside its message.
pub(super) struct Help {
    kind: ErrorKind,
    /// The entry of `docs/troubleshooting.md`.
    anchor: &'static str,
    /// The class in `python/src/partywall/_errors.py`.
    python_class: &'static str,
    /// What to do, as a sentence in the imperative.
    advice: Cow<'static, str>,
    /// The process that the error is about.
    pid: Option<u32>,
}

impl Help {
    /// Sets the process that the error is about.
    pub(super) fn about(self, pid: impl Into<Option<u32>>) -> Self {
        Self { pid: pid.into(), ..self }
    }
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

    /// Returns the name of its class in the Python package.
    pub fn python_class(&self) -> &'static str {
        self.help(Language::Rust).python_class
    }

    /// Returns the pid of the process that the error is about: the one that has the object, ended it, or keeps this
    /// call from succeeding. If there are several, it is the first that the message names.
    ///
    /// `None` if the error is about no process, or about this one only, or the process is not known.
    pub fn pid(&self) -> Option<u32> {
        self.help(Language::Rust).pid
    }

    fn help(&self, language: Language) -> Help {
        match self {
            Self::InvalidArgument(error) => error.help(language),
            Self::NotFound(error) => error.help(language),
            Self::Mismatch(error) => error.help(language),
            Self::Denied(error) => error.help(language),
            Self::LimitReached(error) => error.help(language),
            Self::Busy(error) => error.help(),
            Self::Timeout { .. } => ErrorKind::TimedOut.help("timeout", "TimeoutError", "wait longer, or check the process that should have done it: `partywall ps` lists members, `partywall ls` names"),
            Self::Cancelled { .. } => ErrorKind::TimedOut.help("cancelled", "TimeoutError", "call it again to continue waiting: nothing was taken or lost"),
            Self::Gone(error) => error.help(language),
            Self::InvalidData(error) => error.help(),
            Self::Unreachable(error) => error.help(),
            Self::DeviceFault(error) => error.help(language),
            Self::Mps(error) => error.help(),
            // Not an error of the kernel: mapping control memory of another layout returns it.
            Self::System { source, .. } if source.kind() == io::ErrorKind::InvalidData => ErrorKind::Refused.help("system-call", "Error", "run the same Partywall release on both sides"),
            Self::System { source, .. } if source.kind() == io::ErrorKind::NotFound && !process::has_proc() => ErrorKind::Refused.help("no-proc", "Error", "mount /proc (`mount -t proc proc /proc`): Partywall opens its own descriptors there"),
            Self::System { .. } => ErrorKind::Refused.help("system-call", "Error", "see the kernel's error"),
            Self::File(error) => file_help(&error.problem),
        }
    }
}

impl ErrorKind {
    /// Returns what is reported about an error of this class beside its message: its entry of
    /// `docs/troubleshooting.md`, its Python class, and what to do about it.
    pub(super) fn help(
        self,
        anchor: &'static str,
        python_class: &'static str,
        advice: impl Into<Cow<'static, str>>,
    ) -> Help {
        Help { kind: self, anchor, python_class, advice: advice.into(), pid: None }
    }

    /// Returns the exit code of a `partywall` command that fails with an error of this class.
    pub fn exit_code(self) -> u8 {
        self as u8
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
        (
            Language::C,
            Named::Segment | Named::Pool | Named::Topic | Named::Queue | Named::Timeline | Named::Semaphore,
        ) => format!("open it with pw_{}_open", is.name()),
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
        (Ending::Withdrawn | Ending::OwnerDied, Language::C) => {
            "keep the segment that the commit stored open for as long as others need the name, or commit it with `kept`"
        }
        (Ending::Unused, _) => "keep it open in one process for as long as others need it, or create it as kept",
        (Ending::Removed, _) => CREATE_AGAIN,
        _ => CREATE_AGAIN,
    }
}

fn file_help(problem: &FileProblem) -> Help {
    let advice = problem.advice();
    match problem {
        FileProblem::Open(source) | FileProblem::Write(source) if source.kind() == io::ErrorKind::NotFound => {
            ErrorKind::NotFound.help("file", "FileNotFound", advice)
        }
        FileProblem::NoSuchTensor { .. } | FileProblem::MissingShard { .. } => {
            ErrorKind::NotFound.help("file", "FileNotFound", advice)
        }
        FileProblem::NotOneTensor { .. }
        | FileProblem::FormatLacksElements { .. }
        | FileProblem::FormatLacksStrides { .. }
        | FileProblem::IsFolder => ErrorKind::Usage.help("file", "BadFile", advice),
        FileProblem::Remote { .. } => ErrorKind::Refused.help("url", "BadFile", advice),
        FileProblem::Cancelled => ErrorKind::CheckFailed.help("file", "BadFile", advice),
        // An error of the memory, to or from which the bytes were copied, has its own entry.
        FileProblem::Sink(source) | FileProblem::Content { source, .. } => match source.downcast_ref::<Error>() {
            Some(cause) => cause.kind().help(cause.anchor(), "BadFile", advice).about(cause.pid()),
            None => ErrorKind::Refused.help("file", "BadFile", advice),
        },
        _ if problem.lacks_files() => ErrorKind::Refused.help("no-file-descriptor", "BadFile", open_files()),
        _ => ErrorKind::Refused.help("file", "BadFile", advice),
    }
}

const CREATE_AGAIN: &str = "create it again if it is still needed";
