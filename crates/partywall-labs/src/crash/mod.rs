//! `partywall lab crash`: servers, clients and the broker are killed, and the others say what they see of it.
//!
//! | role | process | does |
//! |---|---|---|
//! | waiter | child | waits on the host and on a stream for a timeline, in each scene; is a stage of the chain |
//! | observer | `partywall lab crash` | starts a broker, starts and ends the others, looks at the memory; concludes |
//! | (actor) | children of the witness | the server, the client, the first stage, and the process that waits for an event |
//!
//! A process that waits for the event of a dead one stays blocked, and nothing ends that wait: it is an actor, which
//! the witness kills. All other waits are known to end, or have a limit.

mod actor;
mod chain;
mod observer;
mod scenes;

use std::any::Any;

use partywall::{
    DType, IpcEvent, IpcEventHandle, Segment, Timeline, TimelineWriter,
    cuda::DeviceBuffer,
    error::{DeviceFault, Gone, InvalidData, NotFound, Unreachable},
};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "crash",
    about: "A server, a client and the broker die: who reads on, who wakes, what stays",
    title: "a server, a client and the broker die: who reads on, who wakes, what stays",
    on_host: false,
    broker: true,
    options: |command| command,
    roles: &[
        Role::new(
            "waiter",
            "Wait for those who die",
            "All have died who had to. The witness says which beliefs held.",
            actor::play,
        ),
        Role::hidden("actor", actor::play),
    ],
    observer: Role::new("witness", "Start them, end them, and say what is left", "", observer::play),
    claims: CLAIMS,
};

/// A command of the observer. It is answered when it is done, with `()` unless its documentation says otherwise.
#[derive(Debug, Serialize, Deserialize)]
enum Command {
    /// Share memory of each sort; signal 1 by a stream, and promise 2 behind a wait that does not end. Answered by [`Served`].
    Serve { scene: String },
    /// Wait for a value of the scene's timeline on the host and on a stream. Answered
    /// when it waits, then by [`Woken`].
    Await { scene: String, value: u64 },
    /// Let a stream wait for an event.
    AwaitEvent { handle: Vec<u8> },
    /// Say how that stream is doing. Answered by [`StreamDone`].
    Poll,
    /// Hold the scene's segment, and let a stream wait for its timeline.
    Use { scene: String },
    /// The first stage of the chain: fill its memory behind a wait that does not end, and promise 1.
    FirstStage,
    /// The second one: double what the first one writes, and signal 1 on two timelines.
    SecondStage,
    /// Tell what the second stage finds when the first one is dead.
    TellSecondStage,
    /// abort().
    Abort,
    /// A kernel that writes where nothing is. Answered by [`Faulted`].
    Fault,
}

/// Whether a stream is done; what the driver says if it can do no more.
type StreamDone = Result<bool, String>;

/// What a server shares by hand; the rest has names.
#[derive(Debug, Serialize, Deserialize)]
struct Served {
    /// The handle of an event that is recorded behind the same wait; why there is none.
    event: Result<Vec<u8>, String>,
}

/// How a wait ended.
#[derive(Debug, Serialize, Deserialize)]
struct Woken {
    /// On the host, as [`ending`] says it, and when.
    host: String,
    host_at: Moment,
    /// On the stream: when it went on, if it did.
    stream_at: Option<Moment>,
    /// What `check` says afterwards, and what had really been signalled.
    check: String,
    reached: u64,
}

/// The context of a process is lost.
#[derive(Debug, Serialize, Deserialize)]
struct Faulted {
    at: Moment,
    /// What its own next call says.
    own_call: String,
}

// Names in the lab's own domain. Each scene has its own.
const KEPT: &str = "kept";
const OWNED: &str = "owned";
const LINE: &str = "line";
const BATCH: &str = "chain/batch";
const FIRST: &str = "chain/first";
const RESTING: &str = "chain/second";
const CARELESS: &str = "chain/second-careless";

/// The one tensor of each segment, 1 MiB.
const TENSOR: &str = "data";
const ELEMENTS: u64 = 1 << 18;
/// What a server has allocated and not committed, and what only the broker holds.
const MUCH: u64 = 64 << 20;

/// How long a stream is polled that waits for the event of a dead process.
const POLLED: Duration = Duration::from_secs(1);

claims! {
    MAKER = "maker": "Memory is gone when the process that made it is.",
    LEAK = "leak": "What a killed process had allocated stays allocated.",
    EVENT_WAKES = "event-wakes": "A stream that waits for an event goes on when the recorder dies.",
    HANGS = "hangs": "A process that waits for one that dies waits for ever.",
    VALID = "valid": "A stream that goes on has what it waited for.",
    FAULT_ENDS = "fault-ends": "A process whose kernel faults ends.",
    CLIENT_HARMS = "client-harms": "A client that dies takes the server's memory along.",
    BROKER_MEMORY = "broker-memory": "Memory is gone when the broker that gave it out is.",
    OUTLIVES = "outlives": "What is kept under a name outlives the broker.",
    TRAVELS = "travels": "If the first stage of a chain dies, the last one gets an error.",
}

/// A name of a scene.
fn of(scene: &str, name: &str) -> String {
    format!("{scene}/{name}")
}

/// Returns how a wait or a call ended, in one word if the library has one.
fn ending<T>(result: &partywall::Result<T>) -> String {
    match result {
        Ok(_) => "no error".into(),
        Err(Error::Gone(Gone::Timeline { ending, .. })) => format!("{ending:?}"),
        Err(Error::InvalidData(InvalidData::Tainted { .. })) => "Tainted".into(),
        Err(Error::DeviceFault(DeviceFault::ContextLost { .. })) => "ContextLost".into(),
        Err(Error::Unreachable(Unreachable::Gone { .. })) => "BrokerGone".into(),
        Err(Error::Unreachable(Unreachable::NoAnswer { .. })) => "BrokerUnreachable".into(),
        Err(Error::NotFound(NotFound::Name { .. })) => "NotFound".into(),
        Err(Error::Gone(Gone::OwnerDied { .. })) => "OwnerDied".into(),
        Err(Error::Timeout { .. }) => "Timeout".into(),
        Err(error) => error.to_string(),
    }
}

/// A segment under a name, with the pattern in it.
fn make(domain: &Domain, gpu: &Gpu, name: &str, kept: bool) -> Result<Segment, Failure> {
    let builder = domain.create(name, Place::Gpu(gpu.uuid())).tensor(TENSOR, DType::U32, &[ELEMENTS]).kept(kept);
    let build = builder.allocate()?;
    let range = build.device(TENSOR)?;
    gpu.kernels()?.enqueue_fill(gpu.stream(), range.as_slice()).doing("filling memory by a kernel")?;
    gpu.stream().synchronize().doing("filling memory by a kernel")?;
    Ok(build.commit()?)
}

/// Whether a segment's memory has the pattern times `factor`.
fn has(gpu: &Gpu, segment: &Segment, factor: u32) -> Result<bool, Failure> {
    let range = segment.tensor(TENSOR)?.device()?;
    let bad = gpu.kernels()?.verify(gpu.stream(), range.as_slice(), factor);
    Ok(bad.doing("checking by a kernel")?.is_none())
}
