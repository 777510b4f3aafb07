//! `partywall lab events`: a stream waits for a slow kernel of another process, by CUDA's interprocess event and by
//! Partywall's timeline.
//!
//! | role | process | does |
//! |---|---|---|
//! | recorder | child | creates the memory; runs slow kernels that fill it, then records or signals |
//! | waiter | `partywall lab events` | starts a broker; waits after and before the recording; concludes |
//!
//! No process dies here: see `partywall lab crash` for that.

mod recorder;
mod waiter;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "events",
    title: "waiting for another process's kernel, by its event and by a timeline",
    broker: true,
    traced: true,
    roles: &[Role::new("recorder", "Run slow kernels, then record events and signal values", recorder::play)],
    observer: Role::new("waiter", "Wait for them, after and before they are recorded", waiter::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// The recorder's first message. The file descriptor of its memory comes with it.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    bytes: u64,
    /// The handles of two events without a record, or the reason why events cannot be shared here.
    events: Result<Vec<Vec<u8>>, String>,
}

/// A command of the waiter.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Enqueue the slow work, and a record or signal behind it; answered by [`Enqueued`].
    Work(Behind),
    /// Report when the host saw that the work was done; answered by a [`Moment`].
    Finish,
}

/// What is enqueued behind the work.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Behind {
    /// A record of the event with this index.
    Event(usize),
    /// The signal of this value.
    Signal(u64),
    /// The same, with a host function that wakes waiters.
    SignalAndWake(u64),
}

/// Whether the work was enqueued, or the reason why not.
type Enqueued = Result<(), String>;

/// The timeline of the recorder.
const TIMELINE: &str = "work";

/// How long the slow kernel takes.
const SLOW: Duration = Duration::from_millis(200);

beliefs! {
    HOST_WAITS = "host-waits": "Only the host can wait for another process's kernel.",
    NEXT_RECORD = "next-record": "A stream that waits for an event before it is recorded waits for the record.",
    ROUNDS = "rounds": "One event can be used for one round after the other.",
    NOT_YET = "not-yet": "A stream can only wait for work that has been enqueued already.",
    POLLING = "polling": "A host that waits for another process's kernel has to poll.",
    CANCEL = "cancel": "A stream that waits for a value that never comes waits for ever.",
}
