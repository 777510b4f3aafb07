//! Everything that can go wrong, in one type: what happened, why, and what to do.

use std::{
    fmt,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use partywall_cuda::{CuResult, CudaError, PointerKind};
use partywall_os::Errno;
use partywall_shm::{DType, TableError};
use partywall_wire::{Ending, FdFault, Limit, NoGrowth, Refusal};

use crate::{files::FileError, place::Place};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. Unless a variant says otherwise, nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No segment has this name. The caller's mistake, or too early.
    #[error("no segment is named {name:?} in the domain at {}{}", socket.display(), near_names(near))]
    NotFound {
        /// The name asked for.
        name: String,
        /// The broker that was asked.
        socket: PathBuf,
        /// Existing names that look like it.
        near: Vec<String>,
    },
    /// The name exists, this version of it does not and never will again: numbers start anew only when no version of a
    /// name is left.
    #[error("{name:?} has no version {version}{}", latest.map_or_else(String::new, |v| format!(" (the latest is {v})")))]
    VersionNotFound {
        /// The name.
        name: String,
        /// The version asked for.
        version: u64,
        /// The latest one, if the name has one.
        latest: Option<u64>,
    },
    /// The process that published the name's memory is dead, and the memory, which nobody else keeps, is gone with it.
    /// What was open before stays readable.
    #[error("{name:?} is gone: its publisher, pid {pid}, died {} ago", seconds(*ago))]
    OwnerDied {
        /// The name.
        name: String,
        /// The publisher.
        pid: u32,
        /// How long ago that was proved.
        ago: Duration,
    },
    /// The name's memory is its publisher's, and is no longer given to anybody: the publisher dropped it, or somebody
    /// removed the name. What was open before stays readable.
    #[error("{name:?} was withdrawn by pid {pid} {} ago", seconds(*ago))]
    Withdrawn {
        /// The name.
        name: String,
        /// The publisher, or whoever removed the name.
        pid: u32,
        /// How long ago.
        ago: Duration,
    },
    /// The segment has no tensor of this name.
    #[error("{segment:?} has no tensor {tensor:?}{}", near_names(near))]
    NoSuchTensor {
        /// The segment.
        segment: String,
        /// The tensor asked for.
        tensor: String,
        /// Tensors that look like it.
        near: Vec<String>,
    },
    /// The name exists and was to be made only if it did not.
    #[error("{name:?} exists already (version {version})")]
    NameExists {
        /// The name.
        name: String,
        /// Its latest version.
        version: u64,
    },
    /// The version is frozen and was opened for writing, or was opened for reading and written.
    #[error("{name:?} version {version} is read-only")]
    ReadOnly {
        /// The name.
        name: String,
        /// The version.
        version: u64,
    },
    /// The version does not become longer, by this call or at all.
    #[error("{name:?} version {version} cannot grow: {}", no_growth(*why))]
    CannotGrow {
        /// The name.
        name: String,
        /// The version.
        version: u64,
        /// Why.
        why: NoGrowth,
    },
    /// The name breaks the rules for names.
    #[error("{name:?} is no segment name: {why}")]
    BadName {
        /// The name.
        name: String,
        /// The rule.
        why: String,
    },
    /// The tensors cannot be laid out, or another process's table is not to be believed.
    #[error("{name:?}: {source}")]
    Table {
        /// The segment.
        name: String,
        /// What is wrong.
        source: TableError,
    },
    /// A tensor was asked for as elements of another type.
    #[error("tensor {tensor:?} has elements of {has}, not {wanted}")]
    WrongDType {
        /// The tensor.
        tensor: String,
        /// Its type.
        has: DType,
        /// The type asked for.
        wanted: &'static str,
    },
    /// The memory is of another kind than the operation works on.
    #[error("{name:?} is {has} memory; {operation} needs {wanted} memory")]
    WrongKind {
        /// The segment.
        name: String,
        /// What it is.
        has: &'static str,
        /// What was needed.
        wanted: &'static str,
        /// For what.
        operation: &'static str,
    },
    /// Bytes were given or asked for that the tensor does not have, or its elements are not where a plain slice has
    /// them.
    #[error("tensor {tensor:?}: {why}")]
    BadRange {
        /// The tensor.
        tensor: String,
        /// What does not fit.
        why: String,
    },
    /// The driver does not share this kind of memory by handle, or not at all.
    #[error("tensor {tensor:?} cannot be published: {address:#x} is {}", pointer_kind(*kind))]
    NotShareable {
        /// The tensor.
        tensor: String,
        /// Its address.
        address: u64,
        /// What the driver says of it.
        kind: PointerKind,
    },
    /// Published memory goes with its publisher, so its name cannot stay.
    #[error("{name:?} cannot be kept: its memory goes with this process")]
    CannotKeep {
        /// The name.
        name: String,
    },
    /// There is not enough memory.
    #[error("{} has no {} for {name:?}{}{}", place, bytes(*asked), free_text(*free, *total), held_text(held))]
    OutOfMemory {
        /// The segment.
        name: String,
        /// Where.
        place: Place,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free, where that is known.
        free: Option<u64>,
        /// Bytes in all.
        total: Option<u64>,
        /// What Partywall holds there: all bytes and the largest names. No tool of the vendor shows that.
        held: Option<Box<Held>>,
    },
    /// The process may not open more files.
    #[error("no file descriptor is free for {0}")]
    NoFileDescriptor(String),
    /// There is no such GPU, or no driver.
    #[error("no GPU {wanted}: {why}")]
    NoDevice {
        /// As asked for.
        wanted: String,
        /// What was found.
        why: String,
    },
    /// The memory is on another GPU than the reader's, and `allow_peer` was not set.
    #[error("{name:?} is on GPU {owner}, this process reads on GPU {reader}: {link}")]
    RemoteDevice {
        /// The segment.
        name: String,
        /// The UUID of the GPU that has the memory.
        owner: String,
        /// The UUID of the reader's.
        reader: String,
        /// How they are linked and what that costs.
        link: String,
    },
    /// The CUDA driver refused a call.
    #[error("{what}: {source}")]
    Cuda {
        /// What it was for.
        what: String,
        /// The call and its code.
        source: CudaError,
    },
    /// It did not happen in time.
    #[error("{what} did not happen within {}", seconds(*after))]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
    },
    /// No broker runs, and no program was found that could be started as one.
    #[error("no broker program was found; tried {}", .tried.join(", "))]
    BrokerNotFound {
        /// Where it was looked for.
        tried: Vec<String>,
    },
    /// A broker could not be started.
    #[error("the broker could not be started: {why}")]
    BrokerNotStarted {
        /// What it said, or what the kernel said.
        why: String,
    },
    /// Nobody answers at the socket, and starting a broker was not wanted.
    #[error("no broker answers at {}: {why}", socket.display())]
    BrokerUnreachable {
        /// The socket.
        socket: PathBuf,
        /// Why.
        why: String,
    },
    /// The broker that this connection belonged to is gone. Memory that is mapped stays readable; names are lost.
    /// A call that was under way may have taken effect.
    #[error("the broker at {} is gone", socket.display())]
    BrokerGone {
        /// Its socket.
        socket: PathBuf,
    },
    /// The broker is another build with another protocol.
    #[error(
        "this is Partywall {ours} (protocol {our_protocol}), the broker with pid {pid} at {} is {theirs} (protocol {their_protocol})", socket.display()
    )]
    VersionMismatch {
        /// The broker's socket.
        socket: PathBuf,
        /// Our release.
        ours: String,
        /// Our protocol.
        our_protocol: u32,
        /// The broker's release.
        theirs: String,
        /// Its protocol.
        their_protocol: u32,
        /// Its pid.
        pid: u32,
    },
    /// The directory of the socket is not safe to use.
    #[error("the directory {} is not used for sockets: {why}", path.display())]
    UnsafeDirectory {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The socket belongs to another user.
    #[error("the broker at {} runs as user {broker}, this process as user {ours}", socket.display())]
    WrongUser {
        /// The socket.
        socket: PathBuf,
        /// The broker's user.
        broker: u32,
        /// Ours.
        ours: u32,
    },
    /// Members on the simulated CUDA driver and on the real one never share a domain.
    #[error("the domain at {} runs on the {} CUDA driver, this process on the {} one", socket.display(), driver_name(*simulated), driver_name(!*simulated))]
    OtherDriver {
        /// The socket.
        socket: PathBuf,
        /// Whether the domain is the simulated one.
        simulated: bool,
    },
    /// A limit of the broker is reached.
    #[error("the broker's limit on {} is {allowed}, this needs {needed}", limit_name(*limit))]
    LimitReached {
        /// Which.
        limit: Limit,
        /// Its value.
        allowed: u64,
        /// What would be needed.
        needed: u64,
    },
    /// The broker found a donated file descriptor to be something else.
    #[error("the broker refused file descriptor {index} of the commit: {}", fd_fault(fault))]
    BadFd {
        /// Its place in the commit.
        index: u32,
        /// What is wrong.
        fault: FdFault,
    },
    /// `stop` without force while something is held.
    #[error("the broker still has {names} names and {members} members")]
    InUse {
        /// Names.
        names: u64,
        /// Members other than the caller.
        members: u64,
    },
    /// The connection was made before a fork and is used in the child.
    #[error("this connection was made before a fork, by process {parent}")]
    Forked {
        /// The process that made it.
        parent: u32,
    },
    /// The broker said something that this library does not understand.
    #[error("the broker broke the protocol: {0}")]
    Protocol(String),
    /// The broker refused for a reason of its own.
    #[error("the broker refused: {0}")]
    Refused(String),
    /// The kernel refused a call.
    #[error("{what}: {source}")]
    System {
        /// What it was for.
        what: String,
        /// errno.
        source: std::io::Error,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// What a broker holds in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// All bytes.
    pub bytes: u64,
    /// The largest names, largest first.
    pub largest: Vec<(String, u64)>,
}

/// What an error is about, in the classes of the binary's exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Something was compared or waited for and is not as expected.
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
}

impl Error {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. }
            | Self::VersionNotFound { .. }
            | Self::OwnerDied { .. }
            | Self::Withdrawn { .. }
            | Self::NoSuchTensor { .. } => ErrorKind::NotFound,
            Self::BadName { .. } | Self::BadRange { .. } | Self::WrongDType { .. } => ErrorKind::Usage,
            Self::BrokerNotFound { .. }
            | Self::BrokerNotStarted { .. }
            | Self::BrokerUnreachable { .. }
            | Self::BrokerGone { .. }
            | Self::VersionMismatch { .. }
            | Self::UnsafeDirectory { .. }
            | Self::WrongUser { .. }
            | Self::Protocol(_)
            | Self::Forked { .. } => ErrorKind::Unreachable,
            Self::NoDevice { .. } | Self::RemoteDevice { .. } | Self::Cuda { .. } => ErrorKind::Device,
            Self::OutOfMemory { place: Place::Gpu(_), .. } => ErrorKind::Device,
            Self::Timeout { .. } => ErrorKind::CheckFailed,
            Self::File(e) => file_kind(e),
            _ => ErrorKind::Refused,
        }
    }

    /// What to do about it, as a sentence.
    pub fn advice(&self) -> String {
        match self {
            Self::NotFound { near, .. } if !near.is_empty() => format!("did you mean {:?}? `partywall ls` lists all names", near[0]),
            Self::NotFound { .. } => "`partywall ls` lists all names; check --domain and PARTYWALL_SOCKET if it should be there".into(),
            Self::VersionNotFound { name, .. } => format!("`partywall show {name}` lists its versions"),
            Self::OwnerDied { .. } => "start its publisher again and wait for it with a time-out; memory that is to outlive its process is committed or published as a copy".into(),
            Self::Withdrawn { .. } => "wait with a time-out if it is to be published again".into(),
            Self::NoSuchTensor { segment, .. } => format!("`partywall show {segment}` lists its tensors"),
            Self::NameExists { name, .. } => format!("`partywall rm {name}` removes it; without if-absent a new version is made"),
            Self::ReadOnly { .. } => "commit a new version, or create the segment as mutable".into(),
            Self::CannotGrow { why: NoGrowth::Behind, .. } => "refresh() the segment, then grow it".into(),
            Self::CannotGrow { why: NoGrowth::Reserved { .. }, .. } => "create it with a larger reserve(), or commit a new version".into(),
            Self::CannotGrow { .. } => "create it as mutable and let its committer grow it, or commit a new version".into(),
            Self::BadName { .. } => "use letters, digits and `._-/`".into(),
            Self::Table { source: TableError::ForeignLayout { .. }, .. } => "run the same Partywall release on both sides".into(),
            Self::Table { .. } => "correct the tensors' names, shapes and dtypes".into(),
            Self::WrongDType { has, .. } => format!("ask for {has}, or for the bytes"),
            Self::WrongKind { wanted, .. } => format!("create it as {wanted} memory, or copy it with read()"),
            Self::BadRange { .. } => "use a range inside the tensor, or read() for a copy".into(),
            Self::NotShareable { kind, .. } => not_shareable(*kind).into(),
            Self::CannotKeep { .. } => "publish a copy (commit_copy()), which the broker keeps; or leave out kept()".into(),
            Self::OutOfMemory { .. } => "free memory there: `partywall status` shows what Partywall holds, `partywall rm NAME` drops it".into(),
            Self::NoFileDescriptor(_) => "raise the limit with `ulimit -n`".into(),
            Self::NoDevice { .. } => "`partywall doctor` says what is missing; host memory works without a GPU (--device host)".into(),
            Self::RemoteDevice { .. } => "open it with allow_peer if the link's cost is acceptable, or read on the owner's GPU".into(),
            Self::Cuda { source, .. } if source.is_sticky() => "the CUDA context of this process is broken: restart this process".into(),
            Self::Cuda { source, .. } if cuda_anchor(source) == "cannot-page-lock" => "raise the limit of locked memory (`ulimit -l`), or pin less".into(),
            Self::Cuda { .. } => "`partywall doctor` checks the driver".into(),
            Self::Timeout { .. } => "wait longer, or look with `partywall ls` and `partywall status` who should have done it".into(),
            Self::BrokerNotFound { .. } => "set PARTYWALL_BIN to the partywall binary, or put it on PATH (cargo install --locked --path crates/partywall-cli)".into(),
            Self::BrokerNotStarted { .. } => "run `partywall serve` to see why, and `partywall doctor`".into(),
            Self::BrokerUnreachable { .. } => "start one with `partywall serve`, or check --domain and PARTYWALL_SOCKET".into(),
            Self::BrokerGone { .. } => "connect again; names are made anew by their owners".into(),
            Self::VersionMismatch { .. } => "run `partywall stop --force` (it drops all names), then try again".into(),
            Self::UnsafeDirectory { path, .. } => format!("make it yours alone (chmod 700 {}), or set PARTYWALL_SOCKET to a socket in another directory", path.display()),
            Self::WrongUser { .. } => "run both as one user, or use another PARTYWALL_SOCKET".into(),
            Self::OtherDriver { simulated: true, .. } => "choose another --domain, or set PARTYWALL_LIBCUDA as its members have".into(),
            Self::OtherDriver { .. } => "choose another --domain, or unset PARTYWALL_LIBCUDA".into(),
            Self::LimitReached { limit: Limit::Chunks | Limit::Growths, .. } => "grow in fewer, larger steps (spare()), or commit a new version".into(),
            Self::LimitReached { .. } => "remove something, or start the broker with a higher limit (`partywall serve --help`)".into(),
            Self::BadFd { fault: FdFault::Missing, .. } => "the broker has no free file descriptor: remove names, or raise its limit".into(),
            Self::BadFd { .. } | Self::Protocol(_) | Self::Refused(_) => "this is a bug of Partywall, or a foreign program at its socket: please report it with the broker's log (`partywall status`)".into(),
            Self::InUse { .. } => "`partywall ls` and `partywall status` show them; `partywall stop --force` drops all".into(),
            Self::Forked { .. } => "connect in the child, or start it with exec (Python: the spawn start method)".into(),
            Self::System { .. } => "see what the kernel says".into(),
            Self::File(e) => e.advice().to_string(),
        }
    }

    /// The entry of `docs/troubleshooting.md` about it.
    pub fn anchor(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not-found",
            Self::VersionNotFound { .. } => "version-not-found",
            Self::OwnerDied { .. } => "owner-died",
            Self::Withdrawn { .. } => "withdrawn",
            Self::NoSuchTensor { .. } => "no-such-tensor",
            Self::NameExists { .. } => "name-exists",
            Self::ReadOnly { .. } => "read-only",
            Self::CannotGrow { .. } => "cannot-grow",
            Self::BadName { .. } => "bad-name",
            Self::Table { .. } => "bad-table",
            Self::WrongDType { .. } => "wrong-dtype",
            Self::WrongKind { .. } => "wrong-kind",
            Self::BadRange { .. } => "bad-range",
            Self::NotShareable { kind, .. } => match kind {
                PointerKind::Device => "no-memory-handles",
                PointerKind::Imported => "imported-memory",
                PointerKind::Pool => "pool-memory",
                PointerKind::Vmm => "vmm-memory",
                PointerKind::Managed => "managed-memory",
                PointerKind::Pinned => "pinned-memory",
                PointerKind::Registered => "registered-memory",
                _ => "unknown-pointer",
            },
            Self::CannotKeep { .. } => "cannot-keep",
            Self::OutOfMemory { .. } => "out-of-memory",
            Self::NoFileDescriptor(_) => "no-file-descriptor",
            Self::NoDevice { .. } => "no-device",
            Self::RemoteDevice { .. } => "remote-device",
            Self::Cuda { source, .. } => cuda_anchor(source),
            Self::Timeout { .. } => "timeout",
            Self::BrokerNotFound { .. } => "broker-not-found",
            Self::BrokerNotStarted { .. } => "broker-not-started",
            Self::BrokerUnreachable { .. } => "connection-refused",
            Self::BrokerGone { .. } => "broker-gone",
            Self::VersionMismatch { .. } => "version-mismatch",
            Self::UnsafeDirectory { .. } => "unsafe-directory",
            Self::WrongUser { .. } => "wrong-user",
            Self::OtherDriver { .. } => "simulated-driver",
            Self::LimitReached { .. } => "limit-reached",
            Self::BadFd { .. } => "bad-fd",
            Self::InUse { .. } => "in-use",
            Self::Forked { .. } => "forked",
            Self::Protocol(_) => "broken-protocol",
            Self::Refused(_) => "refused",
            Self::System { .. } => "system-call",
            // What a file's bytes were copied to or from has an entry of its own.
            Self::File(FileError::Sink { source, .. } | FileError::Content { source, .. }) => {
                source.downcast_ref::<Self>().map_or("file", Self::anchor)
            }
            Self::File(_) => "file",
        }
    }

    pub(crate) fn system(what: impl Into<String>, errno: Errno) -> Self {
        match errno {
            Errno::MFILE | Errno::NFILE => Self::NoFileDescriptor(what.into()),
            _ => Self::System { what: what.into(), source: errno.into() },
        }
    }

    pub(crate) fn refused(refusal: Refusal, socket: &std::path::Path) -> Self {
        match refusal {
            Refusal::NotFound { name, near } => Self::NotFound { name, socket: socket.to_owned(), near },
            Refusal::VersionNotFound { name, version, latest } => Self::VersionNotFound { name, version, latest },
            Refusal::Ended { name, ending, pid, at, .. } => {
                let ago = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(at)).unwrap_or_default();
                match ending {
                    Ending::OwnerDied => Self::OwnerDied { name, pid, ago },
                    Ending::Withdrawn => Self::Withdrawn { name, pid, ago },
                }
            }
            Refusal::NameExists { name, version } => Self::NameExists { name, version },
            Refusal::ReadOnly { name, version } => Self::ReadOnly { name, version },
            Refusal::CannotGrow { name, version, why } => Self::CannotGrow { name, version, why },
            Refusal::BadName { name, why } => Self::BadName { name, why },
            Refusal::BadFd { index, fault } => Self::BadFd { index, fault },
            Refusal::Limit { limit, allowed, needed } => Self::LimitReached { limit, allowed, needed },
            Refusal::WrongUser { broker, peer } => Self::WrongUser { socket: socket.to_owned(), broker, ours: peer },
            Refusal::OtherDriver { simulated } => Self::OtherDriver { socket: socket.to_owned(), simulated },
            Refusal::InUse { names, members } => Self::InUse { names, members },
            Refusal::ShuttingDown | Refusal::CannotResume => Self::BrokerGone { socket: socket.to_owned() },
            other => Self::Refused(format!("{other:?}")),
        }
    }
}

/// The entry of `docs/troubleshooting.md` about a failed driver call.
pub fn cuda_anchor(error: &CudaError) -> &'static str {
    match (error.call, error.code) {
        _ if error.is_sticky() => "broken-context",
        ("cuMemHostRegister", CuResult::OUT_OF_MEMORY | CuResult::OPERATING_SYSTEM) => "cannot-page-lock",
        (_, CuResult::NOT_SUPPORTED) => "not-supported",
        ("cuMemCreate", CuResult::INVALID_VALUE) => "size-not-aligned",
        ("cuMemFree", CuResult::INVALID_VALUE) => "wrong-clean-up",
        _ => "driver-error",
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

fn near_names(near: &[String]) -> String {
    if near.is_empty() { String::new() } else { format!("; there is {}", near.join(", ")) }
}

fn free_text(free: Option<u64>, total: Option<u64>) -> String {
    match (free, total) {
        (Some(free), Some(total)) => format!(": {} of {} are free", bytes(free), bytes(total)),
        _ => String::new(),
    }
}

fn held_text(held: &Option<Box<Held>>) -> String {
    let Some(held) = held else { return String::new() };
    let names: Vec<_> = held.largest.iter().map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
    let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    format!("; Partywall holds {} there{names}", bytes(held.bytes))
}

fn limit_name(limit: Limit) -> &'static str {
    match limit {
        Limit::Bytes => "bytes",
        Limit::Names => "names",
        Limit::Fds => "file descriptors",
        Limit::Clients => "members",
        Limit::Message => "message bytes",
        Limit::Waits => "waiting requests of one member",
        Limit::Leases => "leases of one member",
        Limit::Chunks => "chunks of one version",
        Limit::Growths => "growths of one version",
        _ => "something newer than this library",
    }
}

fn driver_name(simulated: bool) -> &'static str {
    if simulated { "simulated" } else { "real" }
}

fn no_growth(why: NoGrowth) -> String {
    match why {
        NoGrowth::Fixed => "it is not mutable, or of a kind that cannot".into(),
        NoGrowth::NotCommitter => "only the process that committed it can make it longer".into(),
        NoGrowth::CommitterGone => "its committer has dropped it".into(),
        NoGrowth::Behind => "it has grown since this process last looked".into(),
        NoGrowth::Reserved { reserved, needed } => {
            format!("it would have {} and {} are reserved for it", bytes(needed), bytes(reserved))
        }
        _ => "for a reason newer than this library".into(),
    }
}

fn pointer_kind(kind: PointerKind) -> &'static str {
    match kind {
        PointerKind::Device => "device memory for which this driver makes no handles",
        PointerKind::Imported => "memory of another process that was opened here",
        PointerKind::Pool => "memory of a stream-ordered pool (cuMemAllocAsync)",
        PointerKind::Vmm => "mapped by cuMemMap, as torch's expandable segments are",
        PointerKind::Managed => "managed memory (cuMemAllocManaged)",
        PointerKind::Pinned => "page-locked host memory (cuMemHostAlloc)",
        PointerKind::Registered => "registered host memory (cuMemHostRegister)",
        _ => "nothing that the driver knows: ordinary host memory, freed memory, or no address at all",
    }
}

fn not_shareable(kind: PointerKind) -> &'static str {
    match kind {
        PointerKind::Device => "publish a copy (commit_copy()); `partywall doctor` says what this driver lacks",
        PointerKind::Imported => "publish it in the process that allocated it, or publish a copy (commit_copy())",
        PointerKind::Pool => {
            "publish a copy (commit_copy()), or allocate it with cuMemAlloc; torch does with PYTORCH_CUDA_ALLOC_CONF=backend:native"
        }
        PointerKind::Vmm => "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or publish a copy (commit_copy())",
        PointerKind::Managed => "publish a copy (commit_copy()), or allocate it with cuMemAlloc",
        PointerKind::Pinned | PointerKind::Registered => {
            "build a segment in host memory (create() at Place::Host), or copy it to the GPU first"
        }
        _ => "check the address: the memory must be on a GPU and not yet freed",
    }
}

fn fd_fault(fault: &FdFault) -> String {
    match fault {
        FdFault::Missing => "it did not arrive".into(),
        FdFault::WrongType { found } => format!("it is {found}"),
        FdFault::NotSealed { seal } => format!("it is not sealed: {seal}"),
        FdFault::WrongSize { said, found } => format!("it has {found} bytes, not {said}"),
        _ => "for a reason newer than this library".into(),
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// A number of bytes for people: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} bytes");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
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
        })
    }
}
