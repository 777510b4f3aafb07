//! `partywall lab crash`: servers, clients and the broker are killed, and the other processes report the effects.
//!
//! | role | process | does |
//! |---|---|---|
//! | waiter | child | waits for a timeline on the host and on a stream in each scene; is a stage of the chain |
//! | observer | `partywall lab crash` | starts a broker, starts and kills the others, checks the memory; concludes |
//! | (actor) | children of the observer | the server, the client, the first stage, and the process that waits for an event |
//!
//! A process that waits for the event of a dead process stays blocked for good. Such a process is an actor, which the
//! observer kills. All other waits end or have a limit.

mod actor;
mod chain;
mod host;
mod observer;
mod scenes;

use std::any::Any;

use partywall::error::{DeviceFault, Gone, InvalidData, NotFound, Unreachable};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "crash",
    title: "a server, a client and the broker die: which memory stays, which waits end",
    on_host: true,
    broker: true,
    traced: true,
    roles: &[Role::new("waiter", "Wait for processes that die", actor::play), Role::hidden("actor", actor::play)],
    observer: Role::new("observer", "Start and kill processes, and report what is left", observer::play),
    farewell: Some("All experiments are done. The observer reports which beliefs are refuted."),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// A command of the observer. It is answered when it is done, with `()` unless stated otherwise.
#[derive(Debug, Serialize, Deserialize)]
enum Command {
    /// Share memory of each kind; signal 1 on a stream, and promise 2 behind a wait that does not end. Answered by
    /// [`Served`].
    Serve { scene: String },
    /// Wait for a value of the scene's timeline on the host and on a stream. Answered when the waits have begun, then
    /// by [`Woken`].
    Await { scene: String, value: u64 },
    /// Make a stream wait for an event.
    AwaitEvent { handle: Vec<u8> },
    /// Report whether that stream is done. Answered by [`StreamDone`].
    Poll,
    /// Hold the scene's segment, and make a stream wait for its timeline.
    Use { scene: String },
    /// The first stage of the chain: fill its memory behind a wait that does not end, and promise 1.
    FirstStage,
    /// The second stage: double the output of the first stage, and signal 1 on two timelines.
    SecondStage,
    /// Report what the second stage observes when the first stage is dead.
    DescribeSecondStage,
    /// Call abort().
    Abort,
    /// Launch a kernel that writes to an illegal address. Answered by [`Faulted`].
    Fault,
}

/// Whether a stream is done, or the driver's error.
type StreamDone = Result<bool, String>;

/// The handle of an event that a server has recorded behind the endless wait, or the reason why there is none.
type Served = Result<Vec<u8>, String>;

/// How a wait ended.
#[derive(Debug, Serialize, Deserialize)]
struct Woken {
    /// The result on the host, in the words of [`ending`], and its time.
    host: String,
    host_at: Moment,
    /// When the stream continued, if it did.
    stream_at: Option<Moment>,
    /// The result of `check` afterwards, and the value that was really signalled.
    check: String,
    reached: u64,
}

/// The loss of a process's CUDA context.
#[derive(Debug, Serialize, Deserialize)]
struct Faulted {
    at: Moment,
    /// The result of its own next call.
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
/// Bytes that a server has allocated and not committed, and bytes that only the broker holds.
const MUCH: u64 = 64 << 20;

/// How long to poll a stream that waits for the event of a dead process.
const POLLED: Duration = Duration::from_secs(1);

beliefs! {
    MAKER = "maker": "Memory is gone when the process that created it is gone.",
    LEAK = "leak": "Memory that a killed process had allocated stays allocated.",
    EVENT_WAKES = "event-wakes": "A stream that waits for an event continues when the recorder dies.",
    HANGS = "hangs": "A process that waits for a dead process waits for ever.",
    VALID = "valid": "A stream that continues has the data that it waited for.",
    FAULT_ENDS = "fault-ends": "A process whose kernel faults ends.",
    CLIENT_HARMS = "client-harms": "A client that dies damages the server's memory.",
    BROKER_MEMORY = "broker-memory": "Memory is gone when the broker that handed it out is gone.",
    OUTLIVES = "outlives": "Memory under a kept name outlives the broker.",
    TRAVELS = "travels": "If the first stage of a chain dies, the last stage gets an error.",
}

/// Returns a name of a scene.
fn of(scene: &str, name: &str) -> String {
    format!("{scene}/{name}")
}

/// Returns how a wait or a call ended, in one word if possible.
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

/// Creates a named segment that contains the pattern, on a GPU or in host memory.
fn make(domain: &Domain, gpu: Option<&Gpu>, name: &str, kept: bool) -> Result<Segment, Failure> {
    let place = gpu.map_or(Place::Host, |gpu| Place::Gpu(gpu.uuid()));
    let mut build = domain.create(name, place).tensor(TENSOR, DType::U32, &[ELEMENTS]).kept(kept).allocate()?;
    match gpu {
        None => build.as_mut_slice(TENSOR)?.iter_mut().zip(0_u32..).for_each(|(word, number)| *word = number),
        Some(gpu) => {
            let range = build.device(TENSOR)?;
            gpu.kernels()?.enqueue_fill(gpu.stream(), range.as_slice()).doing("filling memory by a kernel")?;
            gpu.stream().synchronize().doing("filling memory by a kernel")?;
        }
    }
    Ok(build.commit()?)
}

/// Returns whether a segment contains the pattern times `factor`.
fn has(gpu: Option<&Gpu>, segment: &Segment, factor: u32) -> Result<bool, Failure> {
    let tensor = segment.tensor(TENSOR)?;
    let Some(gpu) = gpu else {
        return Ok(tensor.as_slice::<u32>()?.iter().zip(0..).all(|(word, number)| *word == number * factor));
    };
    let bad = gpu.kernels()?.verify(gpu.stream(), tensor.device()?.as_slice(), factor);
    Ok(bad.doing("checking by a kernel")?.is_none())
}

fn intact_text(intact: bool) -> &'static str {
    if intact { "readable, every word as written" } else { "not what was written" }
}
