//! `partywall lab events`: a stream waits for a slow kernel of another process, by CUDA's interprocess event and by
//! Partywall's timeline.
//!
//! | role | process | does |
//! |---|---|---|
//! | recorder | child | makes the memory; runs slow kernels that fill it, and records or signals behind them |
//! | waiter | `partywall lab events` | starts a broker; waits, in time and too early; concludes |
//!
//! No process dies here: see `partywall lab crash` for that.

mod recorder;
mod waiter;

use partywall::{IpcEvent, IpcEventHandle, Timeline, TimelineWriter};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "events",
    about: "Waiting for another process's kernel, by its event and by a timeline",
    title: "waiting for another process's kernel, by its event and by a timeline",
    on_host: false,
    broker: true,
    options: |command| command,
    roles: &[Role::new(
        "recorder",
        "Run slow kernels, and record events and signal values behind them",
        "The waiter has what it waited for, and says which beliefs held.",
        recorder::play,
    )],
    observer: Role::new("waiter", "Wait for them, in time and too early", "", waiter::play),
    claims: CLAIMS,
};

/// What the recorder says first. The file descriptor of its memory comes with it.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    bytes: u64,
    /// The handles of two events, in which nothing was recorded; why there are none, if events cannot be shared here.
    events: Result<Vec<Vec<u8>>, String>,
}

/// A command of the waiter.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Enqueue the slow work, and behind it what tells of its end; answered by [`Enqueued`].
    Work(Behind),
    /// Say when the host saw that the work was done; answered by its [`Moment`].
    Finish,
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

/// Whether the work is enqueued; if not, the reason.
type Enqueued = Result<(), String>;

/// The timeline of the recorder.
const TIMELINE: &str = "work";

/// How long the slow kernel takes.
const SLOW: Duration = Duration::from_millis(200);

claims! {
    HOST_WAITS = "host-waits": "To wait for another process's kernel, the host has to wait.",
    NEXT_RECORD = "next-record": "A stream that waits for an event too early waits until it is recorded.",
    ROUNDS = "rounds": "One event can stand for one round after the other.",
    NOT_YET = "not-yet": "A stream can only wait for work that has been enqueued already.",
    POLLING = "polling": "A host that waits for another process's kernel has to poll.",
    CANCEL = "cancel": "A stream that waits for what never comes waits for ever.",
}
