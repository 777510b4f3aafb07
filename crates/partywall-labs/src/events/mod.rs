//! `partywall lab events`: a stream waits for a slow kernel of another process, by CUDA's interprocess event and by
//! Partywall's timeline.
//!
//! | role | process | does |
//! |---|---|---|
//! | recorder | child | makes the memory; runs slow kernels that fill it, and records or signals behind them |
//! | waiter | `partywall lab events` | starts a broker; waits, in time and too early; concludes |
//!
//! Nobody dies here: see `partywall lab crash` for that.

mod recorder;
mod waiter;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use super::{Options, clock::Moment, device, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "waiting for another process's kernel, by its event and by a timeline";

pub(super) const ROLES: [&str; 2] = ["recorder", "waiter"];

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
    /// Run slow kernels, and record events and signal values behind them
    Recorder,
    /// Wait for them, in time and too early
    Waiter,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Recorder) => recorder::run(context, options, &mut Teller::new(output, LAB, "recorder", false)),
        Some(Role::Waiter) => {
            let mut teller = Teller::new(output, LAB, "waiter", false);
            waiter::run(context, options, Peer::find(context, LAB, "recorder")?, &mut teller)
        }
        None => {
            let gpu = device::open(options.device())?;
            let mut teller = Teller::new(output, LAB, "waiter", true);
            let peer = Peer::spawn(LAB, "recorder", &gpu.uuid().to_string())?;
            waiter::run(context, options, peer, &mut teller)
        }
    }
}

/// What the recorder says first. The file descriptor of the memory comes with it.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    uuid: String,
    bytes: u64,
}

/// Where the broker is.
#[derive(Debug, Serialize, Deserialize)]
struct Meet {
    socket: PathBuf,
}

/// What the recorder answers to that: its events' handles.
#[derive(Debug, Serialize, Deserialize)]
struct Ready {
    /// Nothing was recorded in either. Why there is none, if events cannot be shared here.
    events: Result<Vec<Vec<u8>>, String>,
}

/// What the waiter wants next.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// Enqueue the slow work, and behind it what tells of its end; answered by [`Enqueued`].
    Work(Behind),
    /// Say when the host saw that the work was done; answered by [`Over`].
    Finish,
    /// End.
    End,
}

/// What stands behind the work.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Behind {
    /// A record of the event with this index.
    Event(usize),
    /// The signal of this value.
    Signal(u64),
    /// The same, with a host function that wakes.
    SignalAndWake(u64),
}

/// The work is enqueued, or why it could not be.
type Enqueued = Result<(), String>;

/// The work is done.
#[derive(Debug, Serialize, Deserialize)]
struct Over {
    at: Moment,
}

const LAB: &str = "events";

/// The timeline of the recorder.
const TIMELINE: &str = "work";

/// How long the slow kernel takes.
const SLOW: Duration = Duration::from_millis(200);
/// How long nothing is waited for, to see that it does not come.
const MOMENT: Duration = Duration::from_millis(100);
/// A wait that must end: far more than it takes, also on a slow day.
const TIMEOUT: Duration = Duration::from_secs(20);

const HOST_WAITS: Belief = belief("host-waits", "To wait for another process's kernel, the host has to wait.");
const NEXT_RECORD: Belief = belief("next-record", "Who waits for an event too early waits until it is recorded.");
const ROUNDS: Belief = belief("rounds", "One event can stand for one round after the other.");
const NOT_YET: Belief = belief("not-yet", "A stream can only wait for work that has been enqueued already.");
const POLLING: Belief = belief("polling", "A host that waits for another process's kernel has to poll.");
const CANCEL: Belief = belief("cancel", "A stream that waits for what never comes waits for ever.");

const BELIEFS: [Belief; 6] = [HOST_WAITS, NEXT_RECORD, ROUNDS, NOT_YET, POLLING, CANCEL];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}
