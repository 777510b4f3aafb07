//! `partywall lab semaphore`: several processes share a few permits, and two of them are killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | worker | child | acquires a permit, works while it holds it (on a GPU by a kernel), releases it |
//! | watcher | `partywall lab semaphore` | starts a broker and more workers, kills two of them; concludes |

mod watcher;
mod worker;

use partywall::{Permit, Semaphore};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "semaphore",
    title: "several processes share a few permits, and some die with theirs",
    on_host: true,
    broker: true,
    options: Workers::augment_args,
    roles: &[Role::new("worker", "Acquire permits, work while holding them, and release them", worker::play)],
    observer: Role::new("watcher", "Watch the workers, kill two of them, and report the results", watcher::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

#[derive(Debug, Args)]
struct Workers {
    /// The number of workers, 3 to 32; the watcher starts those that are missing
    #[arg(long, global = true, value_name = "N", default_value_t = 4, value_parser = number_in::<u8>(3..=32))]
    workers: u8,
}

/// A command of the watcher. It is answered with `()` when it is done, unless stated otherwise.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Take this many turns, one after the other, and report them if the flag is set; answered by a list of [`Turn`]s,
    /// which ends before a turn without a permit.
    Turns(usize, bool),
    /// Acquire a permit, and keep it until the worker is killed.
    Keep,
    /// Let a stream release a permit behind a slow kernel; answered by [`Handed`], and again when the kernel has ended.
    OnStream,
}

/// The times of one turn with a permit.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Turn {
    asked: Moment,
    got: Moment,
    gave: Moment,
}

/// The start and end of the call that made a stream release a permit.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Handed {
    before: Moment,
    after: Moment,
}

/// The semaphore, and its permits.
const SEMAPHORE: &str = "gpu";
const PERMITS: u32 = 2;

/// How many turns each worker takes when all work.
const TURNS: usize = 5;
/// How long the work of a turn takes.
const WORK: Duration = Duration::from_millis(10);
/// How long a slow kernel takes.
const SLOW: Duration = Duration::from_millis(200);

beliefs! {
    NEVER_MORE = "never-more": "There are never more holders than permits.",
    IN_TURN = "in-turn": "The process that asks first gets a permit first.",
    LOST = "lost": "The permit of a killed process is lost.",
    STUCK = "stuck": "A process that is killed while it waits holds up those behind it.",
    HOST_GIVES = "host-gives": "Only a host that has waited for the GPU can give a permit back.",
}
