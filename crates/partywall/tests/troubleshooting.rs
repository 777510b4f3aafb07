//! Each message of the library has its entry in `docs/troubleshooting.md`, and the entry quotes it.
#![allow(clippy::unwrap_used)] // tests

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use partywall::{
    DType, Domain, Ended, Ending, Error, ErrorKind, MemoryLimit, OtherUsers, Place,
    cuda::{CuResult, CudaError, DeviceUuid, PointerKind},
    error::{
        Busy, Denied, DeviceFault, ForeignBroker, Gone, InvalidArgument, InvalidData, LimitHolder, LimitReached,
        Mismatch, MpsFault, NotFound, TopicLimit, Unreachable,
    },
    files::FileProblem,
    info::Named,
};
use partywall_wire::{FdFault, Limit, MemberState, NoReplacement, ObjectKind, TimelineEnding, Whom};

const DOCUMENT: &str = include_str!("../../../docs/troubleshooting.md");
const PYTHON: &str = include_str!("../../../python/src/partywall/_errors.py");

/// The quoted message of an entry.
fn quoted(anchor: &str) -> &'static str {
    let (_, entry) = DOCUMENT.split_once(&format!("\n### {anchor}\n")).unwrap_or_else(|| panic!("no entry {anchor}"));
    entry.lines().find_map(|line| line.strip_prefix("    ")).unwrap_or_else(|| panic!("{anchor} quotes nothing"))
}

/// Returns whether `text` reads like `pattern`, in which `…` stands for anything.
fn reads_like(text: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

fn not_shareable(kind: PointerKind) -> Error {
    Error::DeviceFault(DeviceFault::NotShareable { tensor: "x".into(), address: 0x1000, kind })
}

fn ended(ending: TimelineEnding) -> Error {
    Error::Gone(Gone::Timeline { name: "x".into(), ending, wanted: 5, last: 3 })
}

fn every_error() -> Vec<Error> {
    let name = "x".to_owned();
    let socket = PathBuf::from("/run/pw.sock");
    let io = || std::io::Error::from_raw_os_error(2);
    vec![
        Error::NotFound(NotFound::Name {
            name: name.clone(),
            socket: socket.clone(),
            near: vec!["y".into()],
            is: vec![Named::Timeline],
            ended: None,
        }),
        Error::NotFound(NotFound::Name {
            name: name.clone(),
            socket: socket.clone(),
            near: Vec::new(),
            is: Vec::new(),
            ended: Some(Box::new(Ended {
                version: 1,
                ending: Ending::OwnerDied,
                pid: 7,
                program: "python".into(),
                ago: Duration::from_millis(100),
            })),
        }),
        Error::NotFound(NotFound::Version { name: name.clone(), version: 3, latest: Some(5) }),
        Error::Gone(Gone::OwnerDied { name: name.clone(), pid: 7, ago: Duration::from_secs(1) }),
        Error::Gone(Gone::Withdrawn { name: name.clone(), pid: 7, ago: Duration::from_secs(1) }),
        Error::NotFound(NotFound::Tensor { segment: name.clone(), tensor: name.clone(), near: vec![] }),
        Error::Denied(Denied::NameExists { name: name.clone(), version: 1, is: Named::Segment }),
        Error::Denied(Denied::NameExists { name: name.clone(), version: 1, is: Named::Topic }),
        Error::InvalidArgument(InvalidArgument::Header { topic: name.clone(), bytes: 257 }),
        Error::Denied(Denied::ReadOnly { name: name.clone(), version: 1 }),
        Error::Denied(Denied::Growth { name: name.clone(), version: 1, why: partywall::NoGrowth::Fixed }),
        Error::NotFound(NotFound::Object {
            kind: ObjectKind::Timeline,
            name: name.clone(),
            socket: socket.clone(),
            near: vec![],
            is: vec![],
        }),
        ended(TimelineEnding::OwnerDied),
        ended(TimelineEnding::OwnerFaulted),
        ended(TimelineEnding::Closed),
        ended(TimelineEnding::Abandoned),
        ended(TimelineEnding::BrokerGone),
        ended(TimelineEnding::Evicted),
        Error::Busy(Busy::Writer { name: name.clone(), pid: 7 }),
        Error::InvalidArgument(InvalidArgument::Value { name: name.clone(), value: 3, last: 5 }),
        Error::InvalidData(InvalidData::OtherPlace {
            name: name.clone(),
            place: Place::Pinned(1),
            found: "device 0".into(),
        }),
        Error::InvalidData(InvalidData::Tainted { name: name.clone(), from: 5 }),
        Error::DeviceFault(DeviceFault::NoPinned { name: Some(name.clone()), why: "there is no driver".into() }),
        Error::DeviceFault(DeviceFault::LaunchBlocking { name: name.clone() }),
        Error::DeviceFault(DeviceFault::DeviceLost { name: name.clone(), place: Place::Gpu(DeviceUuid([0; 16])) }),
        Error::Mismatch(Mismatch::Maximum { name: name.clone(), maximum: 3, asked: 5 }),
        Error::InvalidArgument(InvalidArgument::Maximum { name: name.clone(), asked: 0 }),
        Error::Gone(Gone::Permit { name: name.clone() }),
        Error::Mismatch(Mismatch::Object { wanted: Named::Segment, name: name.clone(), is: Named::Topic }),
        Error::Mismatch(Mismatch::Object { wanted: Named::Pool, name: name.clone(), is: Named::Segment }),
        Error::Mismatch(Mismatch::Options {
            of: Named::Pool,
            name: name.clone(),
            why: "it has 3 blocks, not 4".into(),
        }),
        Error::InvalidArgument(InvalidArgument::Options {
            of: Named::Pool,
            name: name.clone(),
            why: "it has 1 to 65536 blocks, not 0".into(),
        }),
        Error::Mismatch(Mismatch::BlockSize { name: name.clone(), of: Named::Topic, has: 3, needed: 4 }),
        Error::Mismatch(Mismatch::Room { what: "input 0".to_owned(), has: 3, needed: 4 }),
        Error::Gone(Gone::Block { block: "x@1#2.3".into() }),
        Error::Mismatch(Mismatch::Object { wanted: Named::Topic, name: name.clone(), is: Named::Segment }),
        Error::Mismatch(Mismatch::Options {
            of: Named::Topic,
            name: name.clone(),
            why: "it has room for 3 publishers, not 4".into(),
        }),
        Error::Mismatch(Mismatch::Sample { topic: name.clone(), has: "uint8 [3]".into(), given: "float32 [3]".into() }),
        Error::InvalidArgument(InvalidArgument::Options {
            of: Named::Topic,
            name: name.clone(),
            why: "it has a depth of 1 to 4096, not 0".into(),
        }),
        Error::LimitReached(LimitReached::UnreadDescriptors { unread: 64, allowed: 64, pids: vec![] }),
        Error::LimitReached(LimitReached::UnreadDescriptors { unread: 512, allowed: 512, pids: vec![7, 8] }),
        Error::LimitReached(LimitReached::DescriptorsInFlight { limit: 1024 }),
        Error::InvalidArgument(InvalidArgument::TooFewBlocks {
            name: name.clone(),
            blocks: 3,
            needed: 48,
            depth: 8,
            publishers: 4,
            loans: 2,
            subscribers: 8,
            held: 4,
        }),
        Error::LimitReached(LimitReached::Topic { topic: name.clone(), limit: TopicLimit::Publishers, most: 4 }),
        Error::LimitReached(LimitReached::Topic { topic: name.clone(), limit: TopicLimit::Subscribers, most: 8 }),
        Error::LimitReached(LimitReached::Topic { topic: name.clone(), limit: TopicLimit::Loans, most: 2 }),
        Error::LimitReached(LimitReached::Topic { topic: name.clone(), limit: TopicLimit::Viewed, most: 6 }),
        Error::LimitReached(LimitReached::Topic { topic: name.clone(), limit: TopicLimit::Held, most: 4 }),
        Error::Gone(Gone::TopicIdle { topic: name.clone() }),
        Error::Busy(Busy::TopicFull {
            topic: name.clone(),
            pid: Some(7),
            state: Some(MemberState::Hung),
            after: Duration::from_secs(1),
        }),
        Error::Busy(Busy::NotReady { topic: name.clone(), position: 3 }),
        Error::InvalidData(InvalidData::SampleFailed {
            topic: name.clone(),
            position: 3,
            publisher: 1,
            ending: TimelineEnding::OwnerDied,
        }),
        Error::InvalidData(InvalidData::SampleTainted { topic: name.clone(), position: 3 }),
        Error::Gone(Gone::Detached { topic: name.clone() }),
        Error::Gone(Gone::HeldBlock { pool: name.clone() }),
        Error::InvalidArgument(InvalidArgument::Name { name: name.clone(), why: "it is empty".into() }),
        Error::InvalidArgument(InvalidArgument::Version { name: name.clone(), version: "y".into() }),
        Error::InvalidArgument(InvalidArgument::Pattern { pattern: "[a]".into(), why: "it has brackets".into() }),
        Error::InvalidArgument(InvalidArgument::Table {
            name: name.clone(),
            source: partywall_shm::TableError::Duplicate("a".into()),
        }),
        Error::Mismatch(Mismatch::DType { what: "tensor \"x\"".into(), has: DType::F32, wanted: "uint8" }),
        Error::Mismatch(Mismatch::Tensors { name: name.clone(), source_name: name.clone(), why: name.clone() }),
        Error::Mismatch(Mismatch::Kind {
            name: name.clone(),
            has: "host",
            wanted: "GPU",
            operation: "a device pointer",
        }),
        Error::InvalidArgument(InvalidArgument::Range { tensor: name.clone(), why: "too long".into() }),
        Error::Denied(Denied::Keeping { name: name.clone() }),
        not_shareable(PointerKind::Device),
        not_shareable(PointerKind::Imported),
        not_shareable(PointerKind::Pool),
        not_shareable(PointerKind::Vmm),
        not_shareable(PointerKind::Managed),
        not_shareable(PointerKind::Pinned),
        not_shareable(PointerKind::Registered),
        not_shareable(PointerKind::Unknown),
        Error::LimitReached(LimitReached::Heap { name: name.clone(), asked: 5 << 20, taken: 3 << 20, limit: 4 << 20 }),
        Error::LimitReached(LimitReached::Memory {
            name: name.clone(),
            place: Place::Host,
            asked: 1 << 40,
            free: None,
            total: None,
            held: None,
        }),
        Error::LimitReached(LimitReached::FileDescriptors("a socket".into())),
        Error::LimitReached(LimitReached::Processes("a thread".into())),
        Error::DeviceFault(DeviceFault::NoDevice { wanted: Some("cuda:0".into()), why: "no driver".into() }),
        Error::DeviceFault(DeviceFault::Remote {
            name: name.clone(),
            owner: "a".into(),
            reader: "b".into(),
            link: "NVLink".into(),
        }),
        Error::Mismatch(Mismatch::Layout {
            name: name.clone(),
            version: 1,
            next: 2,
            differences: vec!["w: shape [2, 3] becomes [3, 2]".into()],
        }),
        Error::DeviceFault(DeviceFault::NotMapped {
            name: name.clone(),
            version: 1,
            source: CudaError::new("cuMemMap", CuResult::OUT_OF_MEMORY),
        }),
        Error::DeviceFault(DeviceFault::ContextLost {
            what: "a copy".into(),
            source: CudaError::new("cuMemcpyAsync", CuResult::ILLEGAL_ADDRESS),
        }),
        Error::DeviceFault(DeviceFault::Captured { what: "waiting for timeline \"x\"".into() }),
        Error::InvalidArgument(InvalidArgument::Graph {
            what: "launching a graph with timelines \"x\"".into(),
            why: "a node is named twice".into(),
        }),
        Error::Mps(MpsFault::NoProgram { program: "nvidia-cuda-mps-control" }),
        Error::Mps(MpsFault::NotStarted { why: "no".into(), advice: None, kind: ErrorKind::Device }),
        Error::Mps(MpsFault::NoAnswer { pipes: "/run/x.mps/pipe".into(), after: Duration::from_secs(10) }),
        Error::Mps(MpsFault::NoDaemon { pipes: "/tmp/nvidia-mps".into() }),
        Error::Mps(MpsFault::User { pipes: "/tmp/nvidia-mps".into(), theirs: 1, ours: 2 }),
        Error::Mps(MpsFault::Initialized),
        Error::Mps(MpsFault::InUse { pipes: "/run/x.mps/pipe".into(), clients: vec![7], held: true }),
        Error::Mps(MpsFault::PathTooLong { pipes: "/run/x.mps/pipe".into(), most: 107 }),
        Error::Timeout { what: "cannot open \"x\": no process committed it".into(), after: Duration::from_secs(1) },
        Error::Cancelled { what: "cannot open \"x\": no process committed it".into() },
        Error::Unreachable(Unreachable::NoProgram { tried: vec!["/bin/partywall".into()] }),
        Error::Unreachable(Unreachable::NotStarted { why: "no".into(), advice: None }),
        Error::Unreachable(Unreachable::NoAnswer { socket: socket.clone(), why: "there is no socket".into() }),
        Error::Unreachable(Unreachable::Gone { socket: socket.clone() }),
        Error::Unreachable(Unreachable::Version {
            socket: socket.clone(),
            ours: "1".into(),
            our_protocol: 1,
            theirs: "2".into(),
            their_protocol: 2,
            pid: 7,
        }),
        Error::Unreachable(Unreachable::Unbound {
            socket: socket.clone(),
            pid: 7,
            directory: "/run/pw".into(),
            why: "it is no directory".into(),
            parent: None,
        }),
        Error::Unreachable(Unreachable::UnsafeDirectory { path: socket.clone(), why: "a link".into() }),
        Error::Unreachable(Unreachable::NoDirectory { path: socket.clone(), parent: "/run".into() }),
        Error::InvalidArgument(InvalidArgument::SocketPath { path: socket.clone() }),
        Error::InvalidData(InvalidData::Table {
            name: name.clone(),
            source: partywall_shm::TableError::Duplicate("a".into()),
        }),
        Error::LimitReached(LimitReached::SystemMemory {
            what: "committing \"x\"".into(),
            limit: MemoryLimit::AddressSpace(1 << 30),
        }),
        Error::LimitReached(LimitReached::SystemMemory {
            what: "committing \"x\"".into(),
            limit: MemoryLimit::Container(1 << 30),
        }),
        Error::LimitReached(LimitReached::SystemMemory {
            what: "committing \"x\"".into(),
            limit: MemoryLimit::FileSize(1 << 30),
        }),
        Error::LimitReached(LimitReached::SystemMemory {
            what: "committing \"x\"".into(),
            limit: MemoryLimit::Unknown,
        }),
        Error::Unreachable(Unreachable::User {
            socket: socket.clone(),
            broker: 0,
            ours: 1000,
            why: ForeignBroker::NotAdmitted,
        }),
        Error::Unreachable(Unreachable::Barred { path: socket.clone(), owner: 0, ours: 1000 }),
        Error::Unreachable(Unreachable::User {
            socket,
            broker: 0,
            ours: 1000,
            why: ForeignBroker::Writable { mode: 0o777 },
        }),
        Error::Denied(Denied::OtherUser { what: OtherUsers::Remove { name: "x".into() }, owner: 0, uid: 1000 }),
        Error::Denied(Denied::OtherUser { what: OtherUsers::Open { name: "x".into() }, owner: 0, uid: 1000 }),
        Error::Denied(Denied::OtherUser { what: OtherUsers::Evict { pid: 7 }, owner: 0, uid: 1000 }),
        Error::Denied(Denied::OtherUser { what: OtherUsers::Create { name: "x".into() }, owner: 0, uid: 1000 }),
        Error::Denied(Denied::Sharing { name: "x".into() }),
        Error::LimitReached(LimitReached::User {
            uid: 1000,
            limit: Limit::Names,
            allowed: 1,
            held: 1,
            needed: 2,
            holders: vec![LimitHolder { pid: 7, uid: 1000, held: 1 }],
        }),
        Error::Unreachable(Unreachable::Driver { socket: "/run/pw.sock".into(), simulated: true }),
        Error::LimitReached(LimitReached::Broker { limit: Limit::Names, allowed: 1, needed: 2, holders: Vec::new() }),
        Error::Unreachable(Unreachable::FileDescriptor { index: 0, fault: FdFault::Missing }),
        Error::NotFound(NotFound::Member { whom: Whom::Pid(7), near: vec![70] }),
        Error::Denied(Denied::NotMember),
        Error::Denied(Denied::Replacement { why: NoReplacement::InProgress }),
        Error::InvalidArgument(InvalidArgument::Yourself),
        Error::Denied(Denied::Unproven { pid: 7 }),
        Error::Denied(Denied::NotUnproven { pid: 7, state: MemberState::Alive }),
        Error::Gone(Gone::Evicted { by: 7, ago: Duration::from_secs(1) }),
        Error::Busy(Busy::QueueFull { queue: name.clone(), tasks: 8, results: 0, outputs_full: false, kept: 0 }),
        Error::Busy(Busy::QueueFull { queue: name.clone(), tasks: 8, results: 8, outputs_full: true, kept: 2 }),
        Error::Busy(Busy::OutputsFull { queue: name.clone(), outputs: 4, results: 4, kept: 0 }),
        Error::Busy(Busy::OutputsFull { queue: name.clone(), outputs: 4, results: 1, kept: 2 }),
        Error::Busy(Busy::OutputsFull { queue: name.clone(), outputs: 4, results: 0, kept: 4 }),
        Error::Busy(Busy::TasksKept { queue: name.clone(), kept: "input block", tasks: 4 }),
        Error::Busy(Busy::TaskRunning { task: name.clone(), attempt: 1 }),
        Error::Busy(Busy::TaskState { task: name.clone(), status: "pending", wanted: "a dead letter" }),
        Error::Busy(Busy::InputsNotReady { task: name.clone() }),
        Error::InvalidData(InvalidData::TaskInputs { task: name.clone() }),
        Error::InvalidData(InvalidData::TaskAttempt { task: name.clone(), attempt: 1 }),
        Error::Gone(Gone::Claim { task: name.clone(), attempt: 1 }),
        Error::Gone(Gone::Attempt { task: name.clone(), attempt: 1 }),
        Error::InvalidArgument(InvalidArgument::Task { task: "task \"k\" for queue \"q\"".into(), why: name.clone() }),
        Error::InvalidArgument(InvalidArgument::Options { of: Named::Queue, name: name.clone(), why: name.clone() }),
        Error::Gone(Gone::Task { task: name.clone() }),
        Error::InvalidData(InvalidData::TaskFailed { task: name.clone(), attempts: 3, reason: name.clone() }),
        Error::Mismatch(Mismatch::Object { wanted: Named::Queue, name: name.clone(), is: Named::Pool }),
        Error::Mismatch(Mismatch::HostTarget { name: name.clone(), pinned: false }),
        Error::Mismatch(Mismatch::Options { of: Named::Queue, name: name.clone(), why: name.clone() }),
        Error::Busy(Busy::AttachmentInUse {
            queue: name.clone(),
            segment: name.clone(),
            tasks: 2,
            first: name.clone(),
        }),
        Error::Gone(Gone::Attachment { queue: name.clone(), attachment: 0 }),
        Error::Denied(Denied::Offering { queue: name.clone() }),
        Error::Denied(Denied::Attaching { name: name.clone(), version: 1 }),
        Error::Busy(Busy::Withdrawing { name: name.clone(), pid: 7, ago: Duration::from_secs(3) }),
        Error::InvalidArgument(InvalidArgument::Deadline { after: Duration::from_secs(1 << 40) }),
        Error::Busy(Busy::BrokerInUse { names: 1, members: 2 }),
        Error::Busy(Busy::StillShared { allocations: 2 }),
        Error::DeviceFault(DeviceFault::Suspended { name: "x".into(), version: 1 }),
        Error::Unreachable(Unreachable::Forked { parent: 7 }),
        Error::Unreachable(Unreachable::NoPidfd("no".into())),
        Error::Unreachable(Unreachable::Clock {
            socket: "/run/pw.sock".into(),
            ahead: true,
            by: Duration::from_secs(86_400),
        }),
        Error::Unreachable(Unreachable::Protocol("nonsense".into())),
        Error::Unreachable(Unreachable::Refused("nonsense".into())),
        Error::System { what: "a call".into(), source: io() },
        Error::File(FileProblem::Open(io()).of("/x")),
        Error::File(
            FileProblem::Remote { what: "cannot be read: the server answered 403 Forbidden".into(), advice: "look" }
                .of("https://example.com/model.safetensors"),
        ),
        Error::File(FileProblem::Open(std::io::Error::from_raw_os_error(13)).of("/x")),
    ]
}

#[test]
fn each_error_is_quoted_by_its_entry() {
    for error in every_error() {
        let message = error.to_string();
        let pattern = quoted(error.anchor());
        assert!(reads_like(&message, pattern), "{}: {message:?} does not read like {pattern:?}", error.anchor());
        assert!(!error.advice().is_empty());
    }
}

#[test]
fn advice_for_missing_file_descriptors_says_how_many_are_open() {
    let source = std::io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
    let error = Error::File(FileProblem::Open(source).of("/x"));
    assert_eq!(error.anchor(), "no-file-descriptor");
    let advice = error.advice();
    assert!(advice.starts_with("this process has ") && advice.contains("ulimit -n"), "{advice}");
}

#[test]
fn reader_is_not_blamed_for_a_damaged_table() {
    let source = partywall_shm::TableError::Duplicate("a".into());
    let error = Error::InvalidData(InvalidData::Table { name: "x".into(), source });
    assert!(error.advice().contains("this one only read it"), "{}", error.advice());
    assert!(!error.advice().contains("correct the tensors"), "{}", error.advice());
}

/// Returns the text of each source file below a folder of the repository.
fn sources(folder: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            all.push(fs::read_to_string(&path).unwrap());
        }
    }
    all
}

/// Returns the entry and the Python class of each error, as the sources of the library name them: `"entry", "Class"`.
fn rows() -> BTreeSet<(String, String)> {
    let mut rows = BTreeSet::new();
    for source in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/error")) {
        let source = source.split_whitespace().collect::<Vec<_>>().join(" ");
        for (at, between) in source.match_indices("\", \"") {
            let entry = source[..at].rsplit('"').next().unwrap();
            let class = source[at + between.len()..].split('"').next().unwrap();
            if entry.chars().all(|c| c.is_ascii_lowercase() || c == '-')
                && class.starts_with(|c: char| c.is_ascii_uppercase())
                && class.chars().all(char::is_alphanumeric)
            {
                rows.insert((entry.to_owned(), class.to_owned()));
            }
        }
    }
    rows
}

/// An error that is added is in [`every_error`], so that the tests above see it, and Python has its class.
#[test]
fn each_row_has_an_example_and_a_python_class() {
    let examples = every_error();
    let examples: BTreeSet<_> = examples.iter().map(|error| (error.anchor(), error.python_class())).collect();
    let without = [
        // Only on machines without /proc.
        ("no-proc", "Error"),
        // Endings of timelines that only later releases have.
        ("writer-died", "TimelineEnded"),
        // The entry quotes another message; see the test above.
        ("no-file-descriptor", "BadFile"),
    ];
    let rows = rows();
    assert!(rows.len() > 100, "{rows:?}");
    for (entry, class) in &rows {
        let row = (entry.as_str(), class.as_str());
        assert!(examples.contains(&row) || without.contains(&row), "no example has {row:?}");
        assert!(PYTHON.contains(&format!("\nclass {class}(")), "{entry}: Python has no class {class}");
    }
}

/// Entries belong to errors of the library, of other programs or of the Python package: their sources name them.
#[test]
fn each_entry_belongs_to_an_error() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path().join("src"));
    let sources: Vec<_> = crates.chain([root.join("python/src")]).flat_map(|folder| sources(&folder)).collect();
    // They are about calls of the driver by other programs than ours.
    let unnamed = ["legacy-refused", "compute-mode", "locked-memory"];
    for heading in DOCUMENT.lines().filter_map(|line| line.strip_prefix("### ")) {
        let name = format!("\"{heading}\"");
        let named = sources.iter().any(|source| source.contains(&name));
        assert!(named || unnamed.contains(&heading), "{heading} belongs to nothing");
    }
}

/// In the examples, it is process 7.
#[test]
fn errors_return_the_process_that_their_message_names() {
    for error in every_error() {
        let message = error.to_string();
        let names = match error {
            // It may be one of the clients, none of which the message names.
            Error::Mps(MpsFault::InUse { .. }) => true,
            // The largest holders are a hint, not what the error is about.
            Error::LimitReached(LimitReached::User { .. }) => false,
            _ => message.contains("pid 7") || message.contains("process 7"),
        };
        assert_eq!(error.pid(), names.then_some(7), "{message}");
    }
}

/// A `main` that returns an error prints its `{:?}`.
// Holds 314.
#[test]
fn main_prints_the_message_and_the_advice() {
    for error in every_error() {
        let printed = format!("{error:?}");
        let expected = format!("{error}\n  → {}\n  more: partywall explain {}", error.advice(), error.anchor());
        assert_eq!(printed, expected);
        let boxed: Box<dyn std::error::Error> = error.into();
        assert_eq!(format!("{boxed:?}"), expected);
    }
    let timeout = Error::Timeout { what: "x".into(), after: Duration::from_secs(3) };
    assert_eq!(format!("{timeout:#?}"), "Timeout {\n    what: \"x\",\n    after: 3s,\n}");
    for (error, begins) in every_error().iter().map(|error| (error, format!("{error:#?}"))) {
        // The advice about a server is a field, because the storage knows it and not the error.
        let is_field = matches!(error, Error::File(error) if matches!(error.problem, FileProblem::Remote { .. }));
        let has_advice = !is_field && begins.contains(&error.advice());
        assert!(begins.starts_with(char::is_uppercase) && !has_advice, "{begins}");
    }
    for (printed, begins) in [
        (
            format!("{:?}", "flaot32".parse::<DType>().unwrap_err()),
            "unknown dtype \"flaot32\"; did you mean \"float32\"?",
        ),
        (format!("{:?}", "GPU-1".parse::<DeviceUuid>().unwrap_err()), "`GPU-1` is not a device UUID"),
        (format!("{:?}", "hots".parse::<partywall::doctor::Scope>().unwrap_err()), "\"hots\" is no GPU"),
        (format!("{:?}", FileProblem::ClosedPipe(std::io::ErrorKind::BrokenPipe.into()).of("x.npy")), "x.npy "),
    ] {
        assert!(printed.starts_with(begins), "{printed}");
    }
}

/// Errors that give a value back are errors as any other: `?` takes them in a function that returns a boxed one.
// Holds 314.
#[test]
fn errors_that_give_a_value_back_print_their_advice() {
    fn is_error<T: std::error::Error + Into<Error> + 'static>() {}
    is_error::<partywall::Failed<partywall::Sample>>();
    let error = || Error::Busy(Busy::Writer { name: "x".into(), pid: 7 });
    let failed = partywall::Failed { error: error(), value: Box::new(7) };
    assert_eq!(format!("{failed:?}"), format!("{:?}", error()));
    assert!(format!("{failed:#?}").starts_with("Failed {\n    error: Busy(\n"), "{failed:#?}");
    assert_eq!((failed.to_string(), Error::from(failed).anchor()), (error().to_string(), error().anchor()));
    let failed = partywall::Unsubmitted { error: error(), tasks: vec![partywall::Task::new("k")], submitted: vec![] };
    let printed = format!("{failed:?}");
    assert_eq!(printed, format!("1 of 1 tasks were not submitted: {:?}", error()));
    assert!(format!("{failed:#?}").starts_with("Unsubmitted {\n    error: Busy(\n"), "{failed:#?}");
    let boxed: Error = Box::new(failed).into();
    assert_eq!(boxed.anchor(), error().anchor());
}

#[test]
fn second_broker_is_quoted() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("sockets/pw.sock");
    let config = || partywall_broker::Config::new(&socket, "test", partywall::VERSION);
    let broker = partywall_broker::Broker::bind(config()).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run().unwrap());
    let message = partywall_broker::Broker::bind(config()).unwrap_err().to_string();
    assert!(reads_like(&message, quoted("socket-exists")), "{message}");
    stop.stop();
    broker.join().unwrap();
}

#[test]
fn broker_with_too_few_files_is_quoted() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = partywall_broker::Config::new(directory.path().join("pw.sock"), "test", partywall::VERSION);
    config.limits.fds = Some(u64::MAX);
    let message = partywall_broker::Broker::bind(config).unwrap_err().to_string();
    assert!(reads_like(&message, quoted("too-few-files")), "{message}");
}

#[test]
fn broker_with_an_impossible_limit_is_quoted() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = partywall_broker::Config::new(directory.path().join("pw.sock"), "test", partywall::VERSION);
    for wrong in [0, 65_536] {
        config.limits.clients = Some(wrong);
        let message = partywall_broker::Broker::bind(config.clone()).unwrap_err().to_string();
        assert!(reads_like(&message, quoted("bad-limit")), "{message}");
    }
}

#[test]
fn socket_that_is_not_taken_is_quoted() {
    let directory = tempfile::tempdir().unwrap();
    let config = partywall_broker::Config::new(directory.path().join("pw.sock"), "test", partywall::VERSION);
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(directory.path(), private).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let message = partywall_broker::supervisor::Supervisor::bind(config, Some(file.into())).unwrap_err().to_string();
    assert!(reads_like(&message, quoted("socket-not-taken")), "{message}");
}

#[test]
fn stale_socket_is_quoted() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pw.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let error = Domain::options().socket(&socket).start(false).connect().unwrap_err();
    assert_eq!(error.anchor(), "connection-refused");
    assert!(error.to_string().contains("connection refused"), "{error}");
}
