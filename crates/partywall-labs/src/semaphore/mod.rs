//! `partywall lab semaphore`: several processes share a few permits, and two of them are killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | worker | child | asks for a permit, lets a kernel run while it has it, gives it back |
//! | watcher | `partywall lab semaphore` | starts a broker and more workers, kills two of them; concludes |

mod watcher;
mod worker;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand, value_parser};
use serde::{Deserialize, Serialize};

use super::{Options, clock::Moment, device, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "several processes, a few permits, and what becomes of those of the dead";

pub(super) const ROLES: [&str; 2] = ["worker", "watcher"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: Options,
    /// How many workers there are, 3 to 32; the watcher starts those that are missing
    #[arg(long, global = true, value_name = "N", default_value_t = 4, value_parser = value_parser!(u8).range(3..=32))]
    workers: u8,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Ask for permits, use the GPU with them, and give them back
    Worker,
    /// Watch the workers, kill two of them, and say what came of it
    Watcher,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, workers, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Worker) => worker::run(context, options, &mut Teller::new(output, LAB, "worker", false)),
        Some(Role::Watcher) => {
            let mut teller = Teller::new(output, LAB, "watcher", false);
            watcher::run(context, options, *workers, Peer::find(context, LAB, "worker")?, &mut teller)
        }
        None => {
            let gpu = device::open(options.device())?;
            let mut teller = Teller::new(output, LAB, "watcher", true);
            let peer = Peer::spawn(LAB, "worker", &gpu.uuid().to_string())?;
            watcher::run(context, options, *workers, peer, &mut teller)
        }
    }
}

/// What a worker says first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    pid: u32,
    uuid: String,
}

/// Where the broker is, and who the worker is among the others: the first one tells what it does.
#[derive(Debug, Serialize, Deserialize)]
struct Meet {
    socket: PathBuf,
    first: bool,
}

/// The worker has opened the semaphore.
#[derive(Debug, Serialize, Deserialize)]
struct Ready;

/// What the watcher wants next.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// Some turns, one after the other; answered by a list of [`Turn`]s, which ends before one for which no permit came.
    Turns(usize),
    /// A permit, to be kept until the worker is killed; answered by [`Ready`].
    Keep,
    /// A permit that a stream gives back, behind a slow kernel; answered by [`Handed`], and by [`Ready`] when the kernel
    /// has ended.
    OnStream,
    /// End.
    End,
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

const LAB: &str = "semaphore";

/// The semaphore, and its permits.
const SEMAPHORE: &str = "gpu";
const PERMITS: u32 = 2;

/// How many turns each takes when all work.
const TURNS: usize = 5;
/// How long the kernel of a turn takes.
const WORK: Duration = Duration::from_millis(10);
/// And a slow one.
const SLOW: Duration = Duration::from_millis(200);
/// How long nothing is waited for, to see that it does not come.
const MOMENT: Duration = Duration::from_millis(100);
/// A wait that must end: far more than it takes, also on a slow day.
const TIMEOUT: Duration = Duration::from_secs(20);

const NEVER_MORE: Belief = belief("never-more", "There are never more holders than permits.");
const IN_TURN: Belief = belief("in-turn", "Who asks first gets a permit first.");
const LOST: Belief = belief("lost", "The permit of a killed process is lost.");
const STUCK: Belief = belief("stuck", "A process that is killed while it waits holds up those behind it.");
const HOST_GIVES: Belief = belief("host-gives", "Only a host that has waited for the GPU can give a permit back.");

const BELIEFS: [Belief; 5] = [NEVER_MORE, IN_TURN, LOST, STUCK, HOST_GIVES];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}
