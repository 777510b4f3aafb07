//! `partywall lab semaphore`: several processes share a few permits, and two of them are killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | worker | child | asks for a permit, lets a kernel run while it has it, gives it back |
//! | watcher | `partywall lab semaphore` | starts a broker and more workers, kills two of them; concludes |

mod watcher;
mod worker;

use clap::{Args, value_parser};
use partywall::{Permit, Semaphore};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "semaphore",
    about: "Several processes, a few permits, and what becomes of those of the dead",
    title: "several processes, a few permits, and what becomes of those of the dead",
    on_host: false,
    broker: true,
    options: Workers::augment_args,
    roles: &[Role::new(
        "worker",
        "Ask for permits, use the GPU with them, and give them back",
        "The watcher has seen enough, and says which beliefs held.",
        worker::play,
    )],
    observer: Role::new("watcher", "Watch the workers, kill two of them, and say what came of it", "", watcher::play),
    claims: CLAIMS,
};

#[derive(Debug, Args)]
struct Workers {
    /// How many workers there are, 3 to 32; the watcher starts those that are missing
    #[arg(long, global = true, value_name = "N", default_value_t = 4, value_parser = value_parser!(u8).range(3..=32))]
    workers: u8,
}

/// A command of the watcher. A command without an answer of its own is answered with `()` when it is done.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Some turns, one after the other, and whether to tell of them; answered by a list of [`Turn`]s, which ends before one for which no permit came.
    Turns(usize, bool),
    /// A permit, to be kept until the worker is killed.
    Keep,
    /// A permit that a stream gives back, behind a slow kernel; answered by [`Handed`], and again when the
    /// kernel has ended.
    OnStream,
}

/// A permit was had.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Turn {
    asked: Moment,
    got: Moment,
    gave: Moment,
}

/// A permit was given to a stream to give back: from when to when that call took.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Handed {
    before: Moment,
    after: Moment,
}

/// The semaphore, and its permits.
const SEMAPHORE: &str = "gpu";
const PERMITS: u32 = 2;

/// How many turns each takes when all work.
const TURNS: usize = 5;
/// How long the kernel of a turn takes.
const WORK: Duration = Duration::from_millis(10);
/// And a slow one.
const SLOW: Duration = Duration::from_millis(200);

claims! {
    NEVER_MORE = "never-more": "There are never more holders than permits.",
    IN_TURN = "in-turn": "The process that asks first gets a permit first.",
    LOST = "lost": "The permit of a killed process is lost.",
    STUCK = "stuck": "A process that is killed while it waits holds up those behind it.",
    HOST_GIVES = "host-gives": "Only a host that has waited for the GPU can give a permit back.",
}
