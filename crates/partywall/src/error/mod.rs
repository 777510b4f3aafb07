//! Everything that can go wrong, in one type: what happened, why, and what to do.

mod advice;
mod memory;
mod refusal;
mod text;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use partywall_cuda::{CudaError, PointerKind};
use partywall_os::{Errno, dir::Unsafe};
use partywall_shm::{DType, TableError};
use partywall_wire::{Ending, FdFault, Limit, MemberState, Named, NoGrowth, ObjectKind, TimelineEnding, Whom};

pub(crate) use self::text::nothing_came;
use self::text::{
    bad_value, beginning, driver_name, ended_text, fd_fault, free_text, held_text, limit_name, member_state,
    near_names, near_pids, no_growth, object_kind, other_kinds, pointer_kind, publisher_ending, seconds,
    subscriber_text, timeline_ending, unread_text, which_member,
};
pub use self::{
    advice::{ErrorKind, Language, cuda_anchor},
    memory::MemoryLimit,
    text::bytes,
};
use crate::{
    files::FileError,
    place::Place,
    pool::UnreleasedBlock,
    segment::Uncommitted,
    semaphore::Unreleased,
    topic::{UnpublishedSample, UnreleasedSample},
};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. Unless a variant says otherwise, nothing has changed.
///
/// Match the variants that the program can act on, and the [`kind`](Self::kind) of the rest:
///
/// ```
/// use std::time::Duration;
/// use partywall::{Domain, Error, ErrorKind, Result, Segment};
///
/// fn weights(domain: &Domain) -> Result<Option<Segment>> {
///     match domain.open("weights", Duration::from_millis(10)) {
///         Ok(segment) => Ok(Some(segment)),
///         // Nobody has committed it yet.
///         Err(Error::Timeout { .. }) => Ok(None),
///         Err(error) => {
///             match error.kind() {
///                 ErrorKind::Unreachable => eprintln!("is a broker running? {}", error.advice()),
///                 ErrorKind::Device => eprintln!("run `partywall doctor`: {error}"),
///                 _ => eprintln!("{error}: {}", error.advice()),
///             }
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
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No segment, pool or topic has this name. The caller's mistake, too early or too late.
    #[error(
        "no segment, pool or topic is named {name:?} in the domain at {}{}{}{}", socket.display(), ended_text(name, ended),
        other_kinds(is), near_names(near)
    )]
    NotFound {
        /// The name asked for.
        name: String,
        /// The broker that was asked.
        socket: PathBuf,
        /// Existing names that look like it.
        near: Vec<String>,
        /// Objects of other kinds that have this very name.
        is: Vec<Named>,
        /// How the name ended, if it was there less than a minute ago.
        ended: Option<Box<Ended>>,
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
    /// No timeline or semaphore has this name.
    #[error(
        "no {} is named {name:?} in the domain at {}{}{}", object_kind(*kind), socket.display(), other_kinds(is),
        near_names(near)
    )]
    ObjectNotFound {
        /// What was asked for.
        kind: ObjectKind,
        /// The name asked for.
        name: String,
        /// The broker that was asked.
        socket: PathBuf,
        /// Existing names that look like it.
        near: Vec<String>,
        /// Objects of other kinds that have this very name.
        is: Vec<Named>,
    },
    /// The timeline ended before it reached the value. What was signalled until then is valid.
    #[error("timeline {name:?} ended at {last}, before {wanted}: {}", timeline_ending(*ending))]
    TimelineEnded {
        /// The timeline.
        name: String,
        /// How it ended.
        ending: TimelineEnding,
        /// The value that was waited for, or was to be signalled.
        wanted: u64,
        /// The last value that was signalled.
        last: u64,
    },
    /// Another lease signals this timeline: of this process, or of a living one.
    #[error("timeline {name:?} has a writer, pid {pid}")]
    WriterExists {
        /// The timeline.
        name: String,
        /// The writer.
        pid: u32,
    },
    /// The value cannot be signalled, or never be reached.
    #[error("{value} is not a valid next value for timeline {name:?}: {}", bad_value(*value, *last))]
    BadValue {
        /// The timeline.
        name: String,
        /// The value.
        value: u64,
        /// The highest value that was signalled or promised.
        last: u64,
    },
    /// The value was promised on the strength of another timeline, and that one has ended before it got there: what is
    /// behind it may be garbage.
    #[error("timeline {name:?} is tainted from value {from} on: a timeline that these values rest on has failed")]
    Tainted {
        /// The timeline.
        name: String,
        /// The first value that rests on the failed input.
        from: u64,
    },
    /// `CUDA_LAUNCH_BLOCKING` makes a process wait for each kernel: a stream that waits for another process would stop
    /// it for as long.
    #[error("this process runs with CUDA_LAUNCH_BLOCKING: waiting on a stream for timeline {name:?} would stop it")]
    LaunchBlocking {
        /// The timeline.
        name: String,
    },
    /// The semaphore has another number of permits.
    #[error("semaphore {name:?} has {maximum} permits, not {asked}")]
    WrongMaximum {
        /// The semaphore.
        name: String,
        /// Permits that it has.
        maximum: u32,
        /// Permits that it was opened with.
        asked: u32,
    },
    /// No semaphore has so many permits, or none.
    #[error("semaphore {name:?} cannot have {asked} permits: it has 1 to {}", crate::MAX_PERMITS)]
    BadMaximum {
        /// The semaphore.
        name: String,
        /// Permits that were asked for.
        asked: u32,
    },
    /// A permit was given back that is not held any more, or never was.
    #[error("this permit of semaphore {name:?} is not held")]
    NotHeld {
        /// The semaphore.
        name: String,
    },
    /// The name is a pool's or a topic's, not a segment's.
    #[error("{name:?} is a {}, not a segment", is.name())]
    NotASegment {
        /// The name.
        name: String,
        /// What it is.
        is: Named,
    },
    /// The name is not a pool's.
    #[error("{name:?} is a {}, not a pool", is.name())]
    NotAPool {
        /// The name.
        name: String,
        /// What it is.
        is: Named,
    },
    /// The pool is not as the caller said, or not the one that was meant.
    #[error("pool {name:?} is not as asked: {why}")]
    WrongPool {
        /// The pool.
        name: String,
        /// What differs.
        why: String,
    },
    /// No pool is as it was to be made.
    #[error("cannot make pool {name:?}: {why}")]
    BadPool {
        /// The pool.
        name: String,
        /// The rule that it breaks.
        why: String,
    },
    /// What was to be in a block does not fit.
    #[error("a block of {} {name:?} has {has} bytes, and {needed} are needed", of.name())]
    BlockTooSmall {
        /// The pool or topic.
        name: String,
        /// Which of the two.
        of: Named,
        /// Bytes of a block.
        has: u64,
        /// Bytes that were asked for.
        needed: u64,
    },
    /// A reference to a block that is not offered any more: it was taken over, taken back, or came back with its holder's
    /// death. What the block contains now is somebody else's.
    #[error("{block} is not offered any more")]
    StaleBlock {
        /// The reference.
        block: String,
    },
    /// A block was given back that is not held any more, or never was.
    #[error("this block of pool {pool:?} is not held")]
    BlockNotHeld {
        /// The pool.
        pool: String,
    },
    /// The name is not a topic's.
    #[error("{name:?} is a {}, not a topic", is.name())]
    NotATopic {
        /// The name.
        name: String,
        /// What it is.
        is: Named,
    },
    /// The topic is not as the caller said.
    #[error("topic {name:?} is not as asked: {why}")]
    WrongTopic {
        /// The topic.
        name: String,
        /// What differs.
        why: String,
    },
    /// A sample is of another type or shape than the topic's.
    #[error("topic {topic:?} has samples of {has}, not of {given}")]
    WrongSample {
        /// The topic.
        topic: String,
        /// What its samples are.
        has: String,
        /// What was to be published.
        given: String,
    },
    /// No topic is as it was to be made.
    #[error("cannot make topic {name:?}: {why}")]
    BadTopic {
        /// The topic.
        name: String,
        /// The rule that it breaks.
        why: String,
    },
    /// A topic was to be made with fewer blocks than it promises to publishers and subscribers.
    #[error(
        "{blocks} blocks are too few for topic {name:?}: {depth} in its ring + {loans} for each of {publishers} \
         publishers + {held} for each of {subscribers} subscribers are {needed}"
    )]
    PoolTooSmall {
        /// The topic.
        name: String,
        /// Blocks that it was to have.
        blocks: u32,
        /// Blocks that it needs.
        needed: u64,
        /// Samples in its ring.
        depth: u32,
        /// Publishers at a time.
        publishers: u32,
        /// Loans that a publisher may have.
        loans: u32,
        /// Subscribers at a time.
        subscribers: u32,
        /// Samples that a subscriber may hold.
        held: u32,
    },
    /// The topic has as many publishers as it may have.
    #[error("topic {topic:?} has {most} publishers, and no room for more")]
    TooManyPublishers {
        /// The topic.
        topic: String,
        /// How many there may be at a time.
        most: u32,
    },
    /// The topic has as many subscribers as it may have.
    #[error("topic {topic:?} has {most} subscribers, and no room for more")]
    TooManySubscribers {
        /// The topic.
        topic: String,
        /// How many there may be at a time.
        most: u32,
    },
    /// The publisher has as many loans as it may have.
    #[error("this publisher of topic {topic:?} has as many loans as it may, {loans}")]
    TooManyLoans {
        /// The topic.
        topic: String,
        /// How many it may have at a time.
        loans: u32,
    },
    /// The subscriber holds as many samples as it may.
    #[error("this subscriber of topic {topic:?} holds as many samples as it may, {held}")]
    TooManyHeld {
        /// The topic.
        topic: String,
        /// How many a subscriber may hold.
        held: u32,
    },
    /// The topic's last publisher has left, and the subscriber has received everything: an end that the subscriber
    /// [asked for](crate::SubscriberOptions::until_idle).
    #[error("topic {topic:?} is idle: its last publisher has left, and all samples were received")]
    TopicIdle {
        /// The topic.
        topic: String,
    },
    /// A sample was not published in time, because a subscriber that is to miss nothing does not read.
    #[error("topic {topic:?} is full: {} has not consumed the oldest sample for {}", subscriber_text(*pid, *state), seconds(*after))]
    TopicFull {
        /// The topic.
        topic: String,
        /// The subscriber's process, if it is known. Who does not wait is not told: it would wait for the broker.
        pid: Option<u32>,
        /// What is known of that.
        state: Option<MemberState>,
        /// For how long the publisher has waited.
        after: Duration,
    },
    /// The sample is not complete yet: a stream of its publisher still writes it.
    #[error("sample {position} of topic {topic:?} is not complete yet")]
    NotReady {
        /// The topic.
        topic: String,
        /// Which sample of the topic.
        position: u64,
    },
    /// The sample's publisher ended before a stream had completed it: what it contains is garbage.
    #[error("sample {position} of topic {topic:?} was never completed: publisher {publisher} {}", publisher_ending(*ending))]
    SampleFailed {
        /// The topic.
        topic: String,
        /// Which sample of the topic.
        position: u64,
        /// The publisher's number.
        publisher: u64,
        /// How the publisher ended.
        ending: TimelineEnding,
    },
    /// The sample was made of one that had failed: what it contains is garbage.
    #[error("sample {position} of topic {topic:?} was made of a sample that has failed")]
    SampleTainted {
        /// The topic.
        topic: String,
        /// Which sample of the topic.
        position: u64,
    },
    /// The broker has taken this publisher or subscriber out of the topic.
    #[error("this process is detached from topic {topic:?}")]
    Parted {
        /// The topic.
        topic: String,
    },
    /// The name breaks the rules for names.
    #[error("{} is not a name: {why}", beginning(name))]
    BadName {
        /// The name.
        name: String,
        /// The rule.
        why: String,
    },
    /// What stands behind the `@` of `NAME@VERSION` is not a version.
    #[error("{} is not a version of {name:?}: versions are numbers from 1", beginning(version))]
    BadVersion {
        /// The name.
        name: String,
        /// What stands behind the `@`.
        version: String,
    },
    /// No name would be like the pattern.
    #[error("{pattern:?} is not a pattern: {why}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// The rule that it breaks.
        why: String,
    },
    /// The table of tensors that another process has committed is damaged, or of another release.
    #[error("the tensor table of {name:?} is damaged: {source}")]
    DamagedTable {
        /// The segment.
        name: String,
        /// What is wrong.
        source: TableError,
    },
    /// The tensors cannot be laid out.
    #[error("{name:?}: {source}")]
    Table {
        /// The segment.
        name: String,
        /// What is wrong.
        source: TableError,
    },
    /// Elements were asked for as another type than theirs.
    #[error("{what} is {has}, and {wanted} was asked for")]
    WrongDType {
        /// The tensor or sample: `tensor "x"`.
        what: String,
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
    #[error("cannot allocate {} for {name:?} on {place}{}{}", bytes(*asked), free_text(*free, *total), held_text(held))]
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
    /// A kernel of this process, or under MPS one of a neighbour's, has ended the CUDA context: this process can do
    /// nothing on a GPU any more. Others are told: its timelines end as [`TimelineEnding::OwnerFaulted`].
    #[error("{what}: the CUDA context of this process is lost ({source})")]
    ContextLost {
        /// What was being done, or which GPU it was found on.
        what: String,
        /// The call that found it, and its code.
        source: CudaError,
    },
    /// A stream is being captured into a CUDA graph, whose launches would wait and signal again and again.
    #[error("{what}: the stream is being captured into a CUDA graph, which this cannot be part of")]
    Captured {
        /// What was to be enqueued.
        what: String,
    },
    /// It did not happen in time.
    #[error("{what} within {}", seconds(*after))]
    Timeout {
        /// What was to be done, and what did not happen: `cannot open "x": no process committed it`.
        what: String,
        /// How long.
        after: Duration,
    },
    /// The caller cancelled the wait ([`Wait::cancelled_by`](crate::Wait::cancelled_by)).
    #[error("{what} before the wait was cancelled")]
    Cancelled {
        /// What was to be done, and what did not happen, as for [`Timeout`](Self::Timeout).
        what: String,
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
        /// What the broker advised, if it said anything.
        advice: Option<String>,
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
    #[error("cannot use the directory {} for sockets: {why}", path.display())]
    UnsafeDirectory {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The directory of the socket does not exist, and its parent does not either.
    #[error("cannot make the directory {}: its parent directory {} does not exist", path.display(), parent.display())]
    NoDirectory {
        /// The directory.
        path: PathBuf,
        /// Its parent.
        parent: PathBuf,
    },
    /// The socket's path does not fit into a socket's address.
    #[error("the socket's path {} has {} bytes, and the limit is 107", path.display(), path.as_os_str().len())]
    PathTooLong {
        /// The path.
        path: PathBuf,
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
    /// File descriptors that the broker has sent are not read: by this process, or by others, and then the call has waited
    /// for them in vain. They count against the limit of the whole user.
    #[error("{}", unread_text(*unread, *allowed, pids))]
    UnreadDescriptors {
        /// How many are unread.
        unread: u64,
        /// How many may be.
        allowed: u64,
        /// Pids of processes that have not read for longest. Empty if it is this process.
        pids: Vec<u32>,
    },
    /// The kernel refuses to send file descriptors because processes of this user have not read too many of them
    /// (`ETOOMANYREFS`, unix(7)).
    #[error("this user has more than {limit} file descriptors in flight")]
    DescriptorsInFlight {
        /// This process's limit of open files, which is what the kernel compares with.
        limit: u64,
    },
    /// The broker found a donated file descriptor to be something else.
    #[error("the broker refused file descriptor {index} of the commit: {}", fd_fault(fault))]
    BadFd {
        /// Its place in the commit.
        index: u32,
        /// What is wrong.
        fault: FdFault,
    },
    /// No member is meant by this pid or number. The caller's mistake, or too late: it is gone.
    #[error("no member has {}{}", which_member(*whom), near_pids(near))]
    NoSuchMember {
        /// Which was meant.
        whom: Whom,
        /// Pids of members that look like it.
        near: Vec<u32>,
    },
    /// A process is among those that it wants to be evicted.
    #[error("a process cannot evict itself")]
    NotYourself,
    /// The connection has no seat in the domain ([`DomainOptions::operator`](crate::DomainOptions::operator)).
    #[error("this connection has no seat in the domain: it can only list, show, evict, remove, and end the broker")]
    NeedsSeat,
    /// The member is dead, and what it held is in quarantine, because nobody knows whether its work on a GPU is over.
    #[error("pid {pid} is dead already, and what it held is in quarantine")]
    Unproven {
        /// The member's pid.
        pid: u32,
    },
    /// Nothing of the member is in quarantine, because it is not known to be dead.
    #[error("nothing of pid {pid} is in quarantine: it {}", member_state(*state))]
    NotUnproven {
        /// The member's pid.
        pid: u32,
        /// What is known of it.
        state: MemberState,
    },
    /// This process was evicted from the domain: names that it owned are withdrawn, and it gets nothing any more. What it
    /// has mapped stays mapped.
    #[error("this process was evicted by pid {by} {} ago", seconds(*ago))]
    Evicted {
        /// Who wanted it.
        by: u32,
        /// How long ago.
        ago: Duration,
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
    /// The kernel has no memory or addresses for the call.
    #[error("{what}: {limit}")]
    NoMemory {
        /// What it was for.
        what: String,
        /// Which limit is reached, as far as that can be told.
        limit: MemoryLimit,
    },
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

/// For `?` where the operation is not to be tried again: what the error gives back is dropped, as it is when it goes out of
/// scope.
macro_rules! from_what_gives_something_back {
    ($($type:ty),+ $(,)?) => {$(
        impl From<$type> for Error {
            fn from(failed: $type) -> Self {
                failed.error
            }
        }
    )+};
}

from_what_gives_something_back!(UnpublishedSample, UnreleasedSample, UnreleasedBlock, Unreleased, Uncommitted);

/// How a name ended that was there less than a minute ago.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The version that was the latest.
    pub version: u64,
    /// How it ended.
    pub ending: Ending,
    /// The process that ended it: the owner, the remover or the last user.
    pub pid: u32,
    /// That process's program, without its folder.
    pub program: String,
    /// How long ago.
    pub ago: Duration,
}

/// What a broker holds in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// All bytes.
    pub bytes: u64,
    /// The largest names, largest first.
    pub largest: Vec<(String, u64)>,
}

impl Error {
    /// Why the directory of a socket is not used.
    pub(crate) fn directory(path: &Path, why: Unsafe) -> Self {
        match why {
            Unsafe::NoParent(parent) => Self::NoDirectory { path: path.to_owned(), parent },
            why => Self::UnsafeDirectory { path: path.to_owned(), why: why.to_string() },
        }
    }

    /// The kernel answered a message with file descriptors with `ETOOMANYREFS`.
    pub(crate) fn descriptors_in_flight() -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        Self::DescriptorsInFlight { limit }
    }

    pub(crate) fn system(what: impl Into<String>, errno: Errno) -> Self {
        match errno {
            Errno::MFILE | Errno::NFILE => Self::NoFileDescriptor(what.into()),
            Errno::NOMEM => Self::NoMemory { what: what.into(), limit: MemoryLimit::reached() },
            _ => Self::System { what: what.into(), source: errno.into() },
        }
    }
}
