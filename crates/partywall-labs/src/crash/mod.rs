//! `partywall lab crash`: servers, clients and the broker are killed, and the others say what they see of it.
//!
//! | role | process | does |
//! |---|---|---|
//! | waiter | child | waits on the host and on a stream for a timeline, in each scene; is a stage of the chain |
//! | witness | `partywall lab crash` | starts a broker, starts and ends the others, looks at the memory; concludes |
//! | (actor) | children of the witness | the server, the client, the first stage, and who waits for an event |
//!
//! Whoever waits for the event of a dead process stays blocked, and cannot be helped: that is an actor, which the
//! witness kills. All other waits are known to end, or have a limit.

mod actor;
mod chain;
mod scenes;
mod witness;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use partywall::{
    DType, Domain, Error, Gpu, Place, Segment,
    error::{DeviceFault, Gone, InvalidData, NotFound, Unreachable},
};
use serde::{Deserialize, Serialize};

use super::{
    Options,
    clock::Moment,
    device::{self, copy_failed, failed},
    peer::Peer,
    step::Belief,
    teller::Teller,
};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "a server, a client and the broker die: who reads on, who wakes, what stays";

pub(super) const ROLES: [&str; 2] = ["waiter", "witness"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Wait for those who die
    Waiter,
    /// Start them, end them, and say what is left
    Witness,
    #[command(hide = true)]
    Actor,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Waiter) => actor::run(context, options, &mut Teller::new(output, LAB, "waiter", false)),
        Some(Role::Actor) => actor::run_actor(options, &mut Teller::new(output, LAB, "actor", false)),
        Some(Role::Witness) => {
            let mut teller = Teller::new(output, LAB, "witness", false);
            witness::run(context, options, Peer::find(context, LAB, "waiter")?, &mut teller)
        }
        None => {
            let gpu = device::open(options.device())?;
            let mut teller = Teller::new(output, LAB, "witness", true);
            let peer = Peer::spawn(LAB, "waiter", &gpu.uuid().to_string())?;
            witness::run(context, options, peer, &mut teller)
        }
    }
}

/// What a process says first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    pid: u32,
    uuid: String,
}

/// Where the broker is.
#[derive(Debug, Serialize, Deserialize)]
struct Meet {
    socket: PathBuf,
}

/// What the witness wants of a process. Each is answered by [`Ready`] when it stands, or by what is said here.
#[derive(Debug, Serialize, Deserialize)]
enum Task {
    /// Share memory of each sort; signal 1 by a stream, and promise 2 behind a wait that nobody ends. Answered by [`Served`].
    Serve { scene: String },
    /// Wait for a value of the scene's timeline on the host and on a stream. Answered by [`Ready`], then by [`Woken`].
    Await { scene: String, value: u64 },
    /// Let a stream wait for an event.
    AwaitEvent { handle: Vec<u8> },
    /// How that stream is doing. Answered by [`Looked`].
    Look,
    /// Hold the scene's segment, and let a stream wait for its timeline.
    Use { scene: String },
    /// The first stage of the chain: fill its memory behind a wait that nobody ends, and promise 1.
    FirstStage,
    /// The second one: double what the first one writes, and signal 1 on two timelines.
    SecondStage,
    /// Say what the second stage finds when the first one is dead. Answered by [`Ready`].
    SecondLook,
    /// abort().
    Abort,
    /// A kernel that writes where nothing is. Answered by [`Faulted`].
    Fault,
    /// End.
    End,
}

#[derive(Debug, Serialize, Deserialize)]
struct Ready;

/// Whether a stream is done; what the driver says if it can do no more.
type Looked = Result<bool, String>;

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

const LAB: &str = "crash";

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

/// How long a stream is looked at that waits for the event of a dead process.
const LOOK: Duration = Duration::from_secs(1);
/// A wait that must end: far more than it takes, also on a slow day.
const TIMEOUT: Duration = Duration::from_secs(15);
/// How long nothing is waited for, to see that it does not come.
const MOMENT: Duration = Duration::from_millis(100);

const MAKER: Belief = belief("maker", "Memory is gone when the process that made it is.");
const LEAK: Belief = belief("leak", "What a killed process had allocated stays allocated.");
const EVENT_WAKES: Belief = belief("event-wakes", "A stream that waits for an event goes on when the recorder dies.");
const HANGS: Belief = belief("hangs", "Who waits for a process that dies waits for ever.");
const VALID: Belief = belief("valid", "A stream that goes on has what it waited for.");
const FAULT_ENDS: Belief = belief("fault-ends", "A process whose kernel faults ends.");
const CLIENT_HARMS: Belief = belief("client-harms", "A client that dies takes the server's memory along.");
const BROKER_MEMORY: Belief = belief("broker-memory", "Memory is gone when the broker that gave it out is.");
const OUTLIVES: Belief = belief("outlives", "What is kept under a name outlives the broker.");
const TRAVELS: Belief = belief("travels", "If the first stage of a chain dies, the last one gets an error.");

const BELIEFS: [Belief; 10] =
    [MAKER, LEAK, EVENT_WAKES, HANGS, VALID, FAULT_ENDS, CLIENT_HARMS, BROKER_MEMORY, OUTLIVES, TRAVELS];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}

/// A name of a scene.
fn of(scene: &str, name: &str) -> String {
    format!("{scene}/{name}")
}

/// How a wait or a call came out, in a word where the library has one.
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
    gpu.kernels()?.enqueue_fill(gpu.stream(), range.as_slice()).map_err(copy_failed("filling memory by a kernel"))?;
    gpu.stream().synchronize().map_err(failed("filling memory by a kernel"))?;
    Ok(build.commit()?)
}

/// Whether a segment's memory has the pattern times `factor`.
fn has(gpu: &Gpu, segment: &Segment, factor: u32) -> Result<bool, Failure> {
    let range = segment.tensor(TENSOR)?.device()?;
    let bad = gpu.kernels()?.verify(gpu.stream(), range.as_slice(), factor);
    Ok(bad.map_err(copy_failed("checking by a kernel"))?.is_none())
}
