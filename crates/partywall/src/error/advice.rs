//! What an error is about, what to do about it, and where more is said of it.

use std::{fmt, fs, io};

use partywall_cuda::{CuResult, CudaError, PointerKind};
use partywall_shm::TableError;
use partywall_wire::{Ending, FdFault, Limit, Named, NoGrowth, TimelineEnding};

use rustix::process::{Resource, getrlimit};

use super::{Error, MemoryLimit};
use crate::{files::FileError, place::Place};

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
            Self::NotFound { .. }
            | Self::VersionNotFound { .. }
            | Self::OwnerDied { .. }
            | Self::Withdrawn { .. }
            | Self::ObjectNotFound { .. }
            | Self::NoSuchTensor { .. }
            | Self::NoSuchMember { .. } => ErrorKind::NotFound,
            Self::TimelineEnded { .. } | Self::Tainted { .. } => ErrorKind::CheckFailed,
            Self::BadValue { .. } | Self::WrongMaximum { .. } | Self::BadMaximum { .. } => ErrorKind::Usage,
            Self::NotASegment { .. } => ErrorKind::Usage,
            Self::NotAPool { .. } | Self::WrongPool { .. } | Self::BadPool { .. } | Self::BlockTooSmall { .. } => {
                ErrorKind::Usage
            }
            Self::NotATopic { .. }
            | Self::WrongTopic { .. }
            | Self::WrongSample { .. }
            | Self::BadTopic { .. }
            | Self::PoolTooSmall { .. } => ErrorKind::Usage,
            Self::SampleFailed { .. } | Self::SampleTainted { .. } | Self::NotReady { .. } | Self::TopicIdle { .. } => {
                ErrorKind::CheckFailed
            }
            Self::StaleBlock { .. } => ErrorKind::NotFound,
            Self::NotYourself
            | Self::PathTooLong { .. }
            | Self::BadName { .. }
            | Self::BadVersion { .. }
            | Self::BadPattern { .. }
            | Self::BadRange { .. }
            | Self::WrongDType { .. } => ErrorKind::Usage,
            Self::BrokerNotFound { .. }
            | Self::BrokerNotStarted { .. }
            | Self::BrokerUnreachable { .. }
            | Self::BrokerGone { .. }
            | Self::VersionMismatch { .. }
            | Self::UnsafeDirectory { .. }
            | Self::NoDirectory { .. }
            | Self::WrongUser { .. }
            | Self::Protocol(_)
            | Self::Forked { .. } => ErrorKind::Unreachable,
            Self::NoDevice { .. } | Self::RemoteDevice { .. } | Self::Cuda { .. } | Self::ContextLost { .. } => {
                ErrorKind::Device
            }
            Self::Captured { .. } => ErrorKind::Usage,
            Self::OutOfMemory { place: Place::Gpu(_), .. } => ErrorKind::Device,
            Self::Timeout { .. } | Self::Cancelled { .. } => ErrorKind::TimedOut,
            Self::File(e) => file_kind(e),
            _ => ErrorKind::Refused,
        }
    }

    /// What to do about it, as a sentence that names calls of this library.
    pub fn advice(&self) -> String {
        self.advice_in(Language::Rust)
    }

    /// What to do about it, as a sentence that names calls of `language`.
    pub fn advice_in(&self, language: Language) -> String {
        match self {
            Self::NotFound { ended: Some(ended), .. } => after_the_end(ended.ending, language).into(),
            Self::NotFound { name, is, .. } | Self::ObjectNotFound { name, is, .. } if !is.is_empty() => use_as_it_is(name, is[0], language),
            Self::NotASegment { name, is } | Self::NotAPool { name, is } | Self::NotATopic { name, is } => {
                format!("{}, or choose another name", use_as_it_is(name, *is, language))
            }
            Self::NotFound { near, .. } if !near.is_empty() => format!("did you mean {:?}? `partywall ls` lists all names", near[0]),
            Self::NotFound { .. } => "`partywall ls` lists all names; check --domain and PARTYWALL_SOCKET if it should be there".into(),
            Self::VersionNotFound { name, .. } => format!("`partywall show {name}` lists its versions"),
            Self::OwnerDied { .. } => "start its publisher again and wait for it with a time-out; memory that is to outlive its process is committed or published as a copy".into(),
            Self::Withdrawn { .. } => "wait with a time-out if it is to be published again".into(),
            Self::NoSuchTensor { segment, .. } => format!("`partywall show {segment}` lists its tensors"),
            Self::NameExists { name, .. } => format!("`partywall rm {name}` removes it; without if-absent a segment gets a new version, a pool or topic does not"),
            Self::ReadOnly { .. } => "commit a new version, or create the segment as mutable and open it for writing".into(),
            Self::CannotGrow { why: NoGrowth::Behind, .. } => "refresh() the segment, then grow it".into(),
            Self::CannotGrow { why: NoGrowth::Reserved { .. }, .. } => "create it with a larger reserve(), or commit a new version".into(),
            Self::CannotGrow { .. } => "create it as mutable and let its committer grow it, or commit a new version".into(),
            Self::ObjectNotFound { near, .. } if !near.is_empty() => format!("did you mean {:?}? `partywall ls` lists all names", near[0]),
            Self::ObjectNotFound { .. } => "`partywall ls` lists all names; check --domain and PARTYWALL_SOCKET if it should be there".into(),
            Self::TimelineEnded { ending: TimelineEnding::OwnerDied | TimelineEnding::OwnerFaulted | TimelineEnding::Evicted, .. } => "start its writer again, then follow() the timeline: the next writer goes on from the last value; treat work enqueued behind this wait as garbage".into(),
            Self::TimelineEnded { ending: TimelineEnding::Closed, .. } => "wait for values that its writer signals, or follow() the timeline when it has another writer".into(),
            Self::TimelineEnded { ending: TimelineEnding::Abandoned, .. } => "its writer opens it again to go on from the last value; waiters then follow()".into(),
            Self::TimelineEnded { .. } => "connect again; timelines are made anew by whoever opens them".into(),
            Self::WriterExists { .. } => "one writer at a time: use another name, close that writer, or end its waits with `partywall abandon NAME`".into(),
            Self::BadValue { .. } => "signal values that grow, up to 2^61".into(),
            Self::Tainted { .. } => "do the work again from its inputs; a new writer of the timeline starts without the mark".into(),
            Self::LaunchBlocking { .. } => "unset CUDA_LAUNCH_BLOCKING, or wait on the host".into(),
            Self::WrongMaximum { .. } => "open it with the number that it has, or use another name; it goes with the last process that has it open".into(),
            Self::BadMaximum { .. } => "open it with a number in that range".into(),
            Self::NotHeld { .. } => "give each permit back once, by the process that acquired it".into(),
            Self::WrongPool { name, .. } => format!("open it as it is, or use another name; `partywall show {name}` says how it is"),
            Self::BadPool { .. } => "give the number of blocks and their bytes, within that range".into(),
            Self::BlockTooSmall { of: Named::Topic, .. } => "make the topic with a larger max_bytes, or publish smaller samples".into(),
            Self::BlockTooSmall { .. } => "make the pool with larger blocks (block_bytes), or put in less".into(),
            Self::StaleBlock { .. } => "accept each reference once, while the process that offered it lives and has the pool open".into(),
            Self::BlockNotHeld { .. } => "give each block back once, by the process that has it, and use it no more".into(),
            Self::WrongTopic { name, .. } => format!("open it as it is, or use another name; `partywall show {name}` says how it is"),
            Self::WrongSample { .. } => "publish samples of the topic's type, or make the topic with another dtype and shape; one that is made with max_bytes alone takes any".into(),
            Self::BadTopic { .. } => "give dtype and shape, or max_bytes for samples that vary, and numbers within that range".into(),
            Self::PoolTooSmall { needed, .. } => format!("leave the number of blocks out, or give at least {needed}; or promise less"),
            Self::TooManyPublishers { topic, most } => format!("close one of them, `partywall show {topic}` lists them; or {}", more_room("publishers", *most, language)),
            Self::TooManySubscribers { topic, most } => format!("close one of them and drop its samples, `partywall show {topic}` lists them; or {}", more_room("subscribers", *most, language)),
            Self::TooManyLoans { loans, .. } => format!("publish or drop loans before taking more; or {}", more_room("loans", *loans, language)),
            Self::TooManyHeld { held, .. } => format!("drop samples before receiving more; or {}", more_room("held", *held, language)),
            Self::TopicIdle { .. } => match language {
                Language::Rust => "stop receiving; to wait for further publishers subscribe without until_idle()",
                Language::Python => "stop receiving; to wait for further publishers subscribe without until=\"idle\"",
                Language::Shell => "stop receiving; to wait for further publishers leave out --until-idle",
            }.into(),
            Self::TopicFull { pid: Some(pid), .. } => format!("wait for it, or end its part in the topic with `partywall evict {pid}`; a subscriber that may miss samples keeps nobody waiting"),
            Self::TopicFull { topic, .. } => format!("`partywall show {topic}` says which; `partywall evict PID` ends its part in the topic; a subscriber that may miss samples keeps nobody waiting"),
            Self::NotReady { .. } => "wait() for it on the host, or order a stream behind it with device_on()".into(),
            Self::SampleFailed { .. } => "drop it, and what was made of it; later samples of other publishers are not concerned".into(),
            Self::SampleTainted { .. } => "drop it; make it again from samples whose check() says that they are valid".into(),
            Self::Parted { .. } => "join the topic again".into(),
            Self::BadVersion { name, .. } => format!("`partywall show {name}` lists its versions; without `@` it means the latest"),
            Self::PathTooLong { .. } => "name a shorter socket (--socket, PARTYWALL_SOCKET); one that is derived from the domain's name lies in $XDG_RUNTIME_DIR, else in $TMPDIR: shorten that".into(),
            Self::NoDirectory { parent, .. } => format!("make it with `mkdir -p {}`, or check --socket, PARTYWALL_SOCKET and XDG_RUNTIME_DIR", parent.display()),
            Self::DamagedTable { source: TableError::ForeignLayout { .. }, .. } => "run the same Partywall release on both sides".into(),
            Self::DamagedTable { name, .. } => format!("commit {name:?} again: the process that committed it wrote a bad table, this one only read it; `partywall show {name}` names that process"),
            Self::NoMemory { limit: MemoryLimit::AddressSpace(_), .. } => "raise the limit (`ulimit -v`, RLIMIT_AS), or share less at a time".into(),
            Self::NoMemory { limit: MemoryLimit::Container(_), .. } => "raise the container's memory limit, or remove names (`partywall ls`): host memory counts against the container that wrote it, for as long as the name is there".into(),
            Self::NoMemory { .. } => "free memory or addresses, or check the container's limits".into(),
            Self::BadName { .. } => "choose a name of letters, digits and `._-`".into(),
            Self::BadPattern { .. } => "`*` stands for any characters and `?` for one, the rest is as in a name".into(),
            Self::Table { source: TableError::ForeignLayout { .. }, .. } => "run the same Partywall release on both sides".into(),
            Self::Table { .. } => "correct the tensors' names, shapes and dtypes".into(),
            Self::WrongDType { has, .. } => format!("use it as {has}, or use its bytes"),
            Self::WrongKind { wanted, .. } => format!("create it as {wanted} memory, or copy it with read(), in Python tobytes()"),
            Self::BadRange { .. } => "use a range inside the tensor, or read(), in Python tobytes(), for a copy".into(),
            Self::NotShareable { kind, .. } => not_shareable(*kind).into(),
            Self::CannotKeep { .. } => "publish a copy (commit_copy(), in Python put()), which the broker keeps; or leave out kept()".into(),
            Self::OutOfMemory { .. } => "free memory there: `partywall status` shows what Partywall holds, `partywall rm NAME` drops it".into(),
            Self::NoFileDescriptor(_) => open_files(),
            Self::NoDevice { .. } => "`partywall doctor` says what is missing; host memory works without one (device `host`)".into(),
            Self::RemoteDevice { .. } => "open it with allow_peer if the link's cost is acceptable, or read on the owner's GPU".into(),
            Self::ContextLost { .. } => "restart this process; nothing else brings its CUDA context back".into(),
            Self::Cuda { source, .. } if source.is_sticky() => "the CUDA context of this process is broken: restart this process".into(),
            Self::Captured { .. } => "wait for timelines and signal them outside of the graph, before and after its launch".into(),
            Self::Cuda { source, .. } if cuda_anchor(source) == "cannot-page-lock" => "raise the limit of locked memory (`ulimit -l`), or pin less".into(),
            Self::Cuda { source, .. } if cuda_anchor(source) == "event-not-shared" => "both processes need one /dev/shm and one user, and the maker keeps the event; a timeline needs none of this".into(),
            Self::Cuda { .. } => "`partywall doctor` checks the driver".into(),
            Self::Timeout { .. } => "wait longer, or check the process that should have done it: `partywall ps` lists members, `partywall ls` names".into(),
            Self::Cancelled { .. } => "call it again to wait further: what it waited for was neither taken nor lost".into(),
            Self::BrokerNotFound { .. } => "set PARTYWALL_BIN to the partywall binary, or put it on PATH (cargo install --locked --path crates/partywall-cli)".into(),
            Self::BrokerNotStarted { advice: Some(advice), .. } => advice.clone(),
            Self::BrokerNotStarted { .. } => "run `partywall serve` to see why, and `partywall doctor`".into(),
            Self::BrokerUnreachable { .. } => "start one with `partywall serve`, or check --domain and PARTYWALL_SOCKET".into(),
            Self::BrokerGone { .. } => "connect again; names are made anew by their owners".into(),
            Self::VersionMismatch { .. } => "run `partywall stop --force` (it drops all names), then try again".into(),
            Self::UnsafeDirectory { path, .. } => format!("make it yours alone (chmod 700 {}), or set PARTYWALL_SOCKET to a socket in another directory", path.display()),
            Self::WrongUser { .. } => "run both as one user, or use another PARTYWALL_SOCKET".into(),
            Self::OtherDriver { simulated: true, .. } => "choose another --domain, or set PARTYWALL_LIBCUDA as its members have".into(),
            Self::OtherDriver { .. } => "choose another --domain, or run without PARTYWALL_LIBCUDA and --simulated".into(),
            Self::LimitReached { limit: Limit::Chunks | Limit::Growths, .. } => "grow in fewer, larger steps (spare()), or commit a new version".into(),
            Self::LimitReached { limit: Limit::ClientsOfProcess, .. } => "share one connection among the threads of the process, or start the broker with a higher --max-clients".into(),
            Self::LimitReached { limit: Limit::HungUp, .. } => "close connections with a good-bye (drop the Domain, in Python close()); restart the process to forget the others".into(),
            Self::LimitReached { limit: Limit::Operators, .. } => "try again in a second; `partywall logs` shows which process connects so often".into(),
            Self::LimitReached { limit: Limit::Clients, .. } => "`partywall ps` lists them; `partywall rm --unproven` forgets those that are dead without proof; or start the broker with a higher --max-clients".into(),
            Self::LimitReached { .. } => "remove something, or start the broker with a higher limit (`partywall serve --help`)".into(),
            Self::UnreadDescriptors { pids, .. } if pids.is_empty() => "have the threads of this process that wait for the broker read their answers, or close those connections".into(),
            Self::UnreadDescriptors { pids, .. } => format!("see whether those processes are stopped (`partywall ps`); `partywall evict {} --kill` ends one", pids[0]),
            Self::DescriptorsInFlight { .. } => "end the processes of this user that do not read what they are sent, or raise the limit with `ulimit -n`".into(),
            Self::BadFd { fault: FdFault::Missing, .. } => "the broker has no free file descriptor: remove names, or raise its limit".into(),
            Self::BadFd { .. } | Self::Protocol(_) | Self::Refused(_) => "this is a bug of Partywall, or a foreign program at its socket: please report it with the broker's log (`partywall status`)".into(),
            Self::NoSuchMember { near, .. } if !near.is_empty() => format!("did you mean {}? `partywall ps` lists all members", near[0]),
            Self::NoSuchMember { .. } => "`partywall ps` lists all members; check --domain and PARTYWALL_SOCKET if it should be there".into(),
            Self::NeedsSeat => "connect without operator(true)".into(),
            Self::NotYourself => "drop the Domain to leave, or name another process".into(),
            Self::Unproven { pid } => format!("`partywall rm --unproven {pid}` gives it back, once nothing of it runs on a GPU any more"),
            Self::NotUnproven { pid, .. } => format!("`partywall evict {pid} --kill` ends it; what it holds comes back when it is dead"),
            Self::Evicted { .. } => "restart this process, or connect anew: a new connection is a new member".into(),
            Self::InUse { .. } => "`partywall ls` and `partywall status` show them; `partywall stop --force` drops all".into(),
            Self::Forked { .. } => "connect in the child, or start it with exec (Python: the spawn start method)".into(),
            // The kernel never says so: it is what maps words of another layout.
            Self::System { source, .. } if source.kind() == io::ErrorKind::InvalidData => {
                "run the same Partywall release on both sides".into()
            }
            Self::System { .. } => "see what the kernel says".into(),
            Self::File(e) if e.lacks_files() => open_files(),
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
            Self::ObjectNotFound { .. } => "object-not-found",
            Self::TimelineEnded { ending, .. } => match ending {
                TimelineEnding::OwnerFaulted => "writer-faulted",
                TimelineEnding::Closed => "timeline-closed",
                TimelineEnding::Abandoned => "timeline-abandoned",
                TimelineEnding::BrokerGone => "timeline-lost",
                TimelineEnding::Evicted => "writer-evicted",
                _ => "writer-died",
            },
            Self::WriterExists { .. } => "writer-exists",
            Self::BadValue { .. } => "bad-value",
            Self::Tainted { .. } => "tainted",
            Self::LaunchBlocking { .. } => "launch-blocking",
            Self::WrongMaximum { .. } => "wrong-maximum",
            Self::BadMaximum { .. } => "bad-maximum",
            Self::NotHeld { .. } => "not-held",
            Self::NotASegment { .. } => "not-a-segment",
            Self::NotAPool { .. } => "not-a-pool",
            Self::WrongPool { .. } => "wrong-pool",
            Self::BadPool { .. } => "bad-pool",
            Self::BlockTooSmall { .. } => "block-too-small",
            Self::StaleBlock { .. } => "stale-block",
            Self::BlockNotHeld { .. } => "block-not-held",
            Self::NotATopic { .. } => "not-a-topic",
            Self::WrongTopic { .. } => "wrong-topic",
            Self::WrongSample { .. } => "wrong-sample",
            Self::BadTopic { .. } => "bad-topic",
            Self::PoolTooSmall { .. } => "pool-too-small",
            Self::TooManyPublishers { .. } => "too-many-publishers",
            Self::TooManySubscribers { .. } => "too-many-subscribers",
            Self::TooManyLoans { .. } => "too-many-loans",
            Self::TooManyHeld { .. } => "too-many-held",
            Self::TopicIdle { .. } => "topic-idle",
            Self::TopicFull { .. } => "topic-full",
            Self::NotReady { .. } => "not-ready",
            Self::SampleFailed { .. } => "sample-failed",
            Self::SampleTainted { .. } => "sample-tainted",
            Self::Parted { .. } => "parted",
            Self::PathTooLong { .. } => "path-too-long",
            Self::NoDirectory { .. } => "no-directory",
            Self::DamagedTable { .. } => "damaged-table",
            Self::NoMemory { .. } => "no-memory",
            Self::BadName { .. } => "bad-name",
            Self::BadVersion { .. } => "bad-version",
            Self::BadPattern { .. } => "bad-pattern",
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
            Self::ContextLost { .. } => "broken-context",
            Self::Captured { .. } => "captured",
            Self::Timeout { .. } => "timeout",
            Self::Cancelled { .. } => "cancelled",
            Self::BrokerNotFound { .. } => "broker-not-found",
            Self::BrokerNotStarted { .. } => "broker-not-started",
            Self::BrokerUnreachable { .. } => "connection-refused",
            Self::BrokerGone { .. } => "broker-gone",
            Self::VersionMismatch { .. } => "version-mismatch",
            Self::UnsafeDirectory { .. } => "unsafe-directory",
            Self::WrongUser { .. } => "wrong-user",
            Self::OtherDriver { .. } => "simulated-driver",
            Self::LimitReached { .. } => "limit-reached",
            Self::UnreadDescriptors { .. } => "unread-descriptors",
            Self::DescriptorsInFlight { .. } => "descriptors-in-flight",
            Self::BadFd { .. } => "bad-fd",
            Self::NoSuchMember { .. } => "no-such-member",
            Self::NeedsSeat => "needs-seat",
            Self::NotYourself => "not-yourself",
            Self::Unproven { .. } => "unproven",
            Self::NotUnproven { .. } => "not-unproven",
            Self::Evicted { .. } => "evicted",
            Self::InUse { .. } => "in-use",
            Self::Forked { .. } => "forked",
            Self::Protocol(_) => "broken-protocol",
            Self::Refused(_) => "refused",
            Self::System { .. } => "system-call",
            // What a file's bytes were copied to or from has an entry of its own.
            Self::File(FileError::Sink { source, .. } | FileError::Content { source, .. }) => {
                source.downcast_ref::<Self>().map_or("file", Self::anchor)
            }
            Self::File(e) if e.lacks_files() => "no-file-descriptor",
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
fn open_files() -> String {
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
fn use_as_it_is(name: &str, is: Named, language: Language) -> String {
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
fn after_the_end(ending: Ending, language: Language) -> &'static str {
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
fn more_room(what: &str, most: u32, language: Language) -> String {
    let more = most.saturating_add(1);
    match language {
        Language::Rust => format!("make the topic with more: {what}({more})"),
        Language::Python => format!("make the topic with more: {what}={more}"),
        Language::Shell => format!("make the topic with more, as `partywall topic pub --{what} {more}` does"),
    }
}

fn not_shareable(kind: PointerKind) -> &'static str {
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
