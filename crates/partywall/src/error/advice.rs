//! What an error is about, what to do about it, and where more is said of it.

use std::{fmt, fs, io};

use partywall_cuda::{CuResult, CudaError, PointerKind};
use partywall_wire::{Ending, Named};

use rustix::process::{Resource, getrlimit};

use super::Error;
use crate::files::FileError;

/// What an error is about, in the classes of the binary's exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Something was compared or checked and is not as expected.
    CheckFailed,
    /// The arguments make no sense.
    Usage,
    /// A name, version, tensor or file does not exist.
    NotFound,
    /// No broker, or not one that we can talk to.
    Unreachable,
    /// Refused, or at a limit.
    Refused,
    /// The GPU or its driver.
    Device,
    /// Something that was waited for did not happen in time, or before the wait was cancelled.
    TimedOut,
}

/// Whose calls an advice names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Language {
    /// Those of this library.
    Rust,
    /// Those of the Python package.
    Python,
    /// Those of the `partywall` command.
    Shell,
}

impl Error {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidArgument(error) => error.kind(),
            Self::NotFound(_) => ErrorKind::NotFound,
            Self::Mismatch(error) => error.kind(),
            Self::Denied(_) | Self::System { .. } => ErrorKind::Refused,
            Self::LimitReached(error) => error.kind(),
            Self::Busy(error) => error.kind(),
            Self::Timeout { .. } | Self::Cancelled { .. } => ErrorKind::TimedOut,
            Self::Gone(error) => error.kind(),
            Self::InvalidData(error) => error.kind(),
            Self::Unreachable(error) => error.kind(),
            Self::DeviceFault(error) => error.kind(),
            Self::File(error) => file_kind(error),
        }
    }

    /// What to do about it, as a sentence that names calls of this library.
    pub fn advice(&self) -> String {
        self.advice_in(Language::Rust)
    }

    /// What to do about it, as a sentence that names calls of `language`.
    pub fn advice_in(&self, language: Language) -> String {
        match self {
            Self::InvalidArgument(error) => error.advice(),
            Self::NotFound(error) => error.advice(language),
            Self::Mismatch(error) => error.advice(language),
            Self::Denied(error) => error.advice(),
            Self::LimitReached(error) => error.advice(language),
            Self::Busy(error) => error.advice(),
            Self::Timeout { .. } => "wait longer, or check the process that should have done it: `partywall ps` lists members, `partywall ls` names".into(),
            Self::Cancelled { .. } => "call it again to wait further: what it waited for was neither taken nor lost".into(),
            Self::Gone(error) => error.advice(language),
            Self::InvalidData(error) => error.advice(),
            Self::Unreachable(error) => error.advice(),
            Self::DeviceFault(error) => error.advice(),
            // The kernel never says so: it is what maps control memory of another layout.
            Self::System { source, .. } if source.kind() == io::ErrorKind::InvalidData => {
                "run the same Partywall release on both sides".into()
            }
            Self::System { .. } => "see what the kernel says".into(),
            Self::File(error) if error.lacks_files() => open_files(),
            Self::File(error) => error.advice().to_string(),
        }
    }

    /// The entry of `docs/troubleshooting.md` about it.
    pub fn anchor(&self) -> &'static str {
        match self {
            Self::InvalidArgument(error) => error.anchor(),
            Self::NotFound(error) => error.anchor(),
            Self::Mismatch(error) => error.anchor(),
            Self::Denied(error) => error.anchor(),
            Self::LimitReached(error) => error.anchor(),
            Self::Busy(error) => error.anchor(),
            Self::Timeout { .. } => "timeout",
            Self::Cancelled { .. } => "cancelled",
            Self::Gone(error) => error.anchor(),
            Self::InvalidData(error) => error.anchor(),
            Self::Unreachable(error) => error.anchor(),
            Self::DeviceFault(error) => error.anchor(),
            Self::System { .. } => "system-call",
            // What a file's bytes were copied to or from has an entry of its own.
            Self::File(FileError::Sink { source, .. } | FileError::Content { source, .. }) => {
                source.downcast_ref::<Self>().map_or("file", Self::anchor)
            }
            Self::File(error) if error.lacks_files() => "no-file-descriptor",
            Self::File(_) => "file",
        }
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

/// The entry of `docs/troubleshooting.md` about a failed driver call.
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

/// What to do in a process that cannot open another file.
pub(super) fn open_files() -> String {
    let limit = getrlimit(Resource::Nofile).current;
    // Counting takes a file descriptor: if there is none, all are in use.
    let open = fs::read_dir("/proc/self/fd").map_or(limit, |all| Some(all.count().saturating_sub(1) as u64));
    match (open, limit) {
        (Some(open), Some(limit)) => {
            format!("this process has {open} files open of {limit}: close some, or raise the limit (`ulimit -n`)")
        }
        _ => "close files, or raise the limit (`ulimit -n`)".into(),
    }
}

/// Which call takes a name of this kind.
pub(super) fn use_as_it_is(name: &str, is: Named, language: Language) -> String {
    match (language, is) {
        (Language::Rust, Named::Segment) => format!("open it with Domain::open({name:?}, timeout)"),
        (Language::Rust, Named::Pool) => format!("open it with Domain::pool({name:?}).open()"),
        (Language::Rust, Named::Topic) => format!("open it with Domain::topic({name:?}).open()"),
        (Language::Rust, Named::Timeline) => format!("open it with Domain::timeline({name:?})"),
        (Language::Rust, Named::Semaphore) => format!("open it with Domain::semaphore({name:?}, maximum)"),
        (Language::Python, Named::Semaphore) => format!("open it with d.semaphore({name:?}, maximum)"),
        (Language::Python, Named::Segment) => format!("open it with d.open({name:?})"),
        (Language::Python, _) => format!("open it with d.{}({name:?})", is.name()),
        (Language::Shell, Named::Segment) => format!("copy it to a file with `partywall get {name} FILE`"),
        (Language::Shell, Named::Topic) => format!("read its samples with `partywall topic echo {name}`"),
        _ => format!("look at it with `partywall show {name}`"),
    }
}

/// What keeps a name from ending in this way.
pub(super) fn after_the_end(ending: Ending, language: Language) -> &'static str {
    match (ending, language) {
        (Ending::Withdrawn | Ending::OwnerDied, Language::Rust) => {
            "keep the Segment that commit() returned for as long as others need the name, or commit it with kept(true)"
        }
        (Ending::Withdrawn | Ending::OwnerDied, Language::Python) => {
            "let its process run, and its domain and segment open, for as long as others need the name; or pass kept=True"
        }
        (Ending::Withdrawn | Ending::OwnerDied, Language::Shell) => {
            "let its owner run for as long as others need the name, or have it make the name as kept"
        }
        (Ending::Unused, _) => "keep it open in one process for as long as others need it, or make it as kept",
        _ => "make it again if it is still needed",
    }
}

fn file_kind(error: &FileError) -> ErrorKind {
    match error {
        FileError::Open { source, .. } if source.kind() == std::io::ErrorKind::NotFound => ErrorKind::NotFound,
        FileError::NoSuchTensor { .. } => ErrorKind::NotFound,
        FileError::NotOneTensor { .. }
        | FileError::FormatLacksElements { .. }
        | FileError::FormatLacksStrides { .. }
        | FileError::IsFolder { .. } => ErrorKind::Usage,
        FileError::Cancelled { .. } => ErrorKind::CheckFailed,
        FileError::Sink { source, .. } | FileError::Content { source, .. } => {
            source.downcast_ref::<Error>().map_or(ErrorKind::Refused, Error::kind)
        }
        _ => ErrorKind::Refused,
    }
}

/// How a topic is made that allows more than `most` of something.
pub(super) fn more_room(what: &str, most: u32, language: Language) -> String {
    let more = most.saturating_add(1);
    match language {
        Language::Rust => format!("make the topic with more: {what}({more})"),
        Language::Python => format!("make the topic with more: {what}={more}"),
        Language::Shell => format!("make the topic with more, as `partywall topic pub --{what} {more}` does"),
    }
}

pub(super) fn not_shareable(kind: PointerKind) -> &'static str {
    match kind {
        PointerKind::Device => {
            "publish a copy (commit_copy(), in Python put()); `partywall doctor` says what this driver lacks"
        }
        PointerKind::Imported => {
            "publish it in the process that allocated it, or publish a copy (commit_copy(), in Python put())"
        }
        PointerKind::Pool => {
            "publish a copy (commit_copy(), in Python put()), or allocate it with cuMemAlloc; torch does with PYTORCH_CUDA_ALLOC_CONF=backend:native"
        }
        PointerKind::Vmm => {
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or publish a copy (commit_copy(), in Python put())"
        }
        PointerKind::Managed => "publish a copy (commit_copy(), in Python put()), or allocate it with cuMemAlloc",
        PointerKind::Pinned | PointerKind::Registered => {
            "build a segment in host memory (create() at Place::Host, device `host`), or copy it to the GPU first"
        }
        _ => "check the address: the memory must be on a GPU and not yet freed",
    }
}
