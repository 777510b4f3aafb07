//! `partywall lab ring`: numbers are streamed through a ring of blocks, and each is checked.
//!
//! | role | process | does |
//! |---|---|---|
//! | writer | child | publishes messages full of numbers; is killed while it does |
//! | reader | `partywall lab ring` | starts a broker, receives by each policy, checks every number; concludes |

mod numbers;
mod reader;
mod writer;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use partywall::{DType, Domain, Place, Topic};
use serde::{Deserialize, Serialize};

use self::numbers::Pattern;
use super::{MemoryOptions, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "numbers streamed through a ring of blocks, and every one checked";

pub(super) const ROLES: [&str; 2] = ["writer", "reader"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: MemoryOptions,
    /// The numbers: fibonacci, or your own with commas between them, which are repeated
    #[arg(long, global = true, value_name = "NUMBERS", default_value = "fibonacci")]
    pattern: Pattern,
    /// How many messages are streamed, of 1,024 numbers each
    #[arg(long, global = true, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Publish numbers
    Writer,
    /// Receive them, check each, kill the writer, and say what came of it
    Reader,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, pattern, messages, role } = arguments;
    let output = context.console;
    let order = reader::Order { pattern: pattern.clone(), messages: *messages };
    match role {
        Some(Role::Writer) => writer::run(context, options, &mut Teller::new(output, LAB, "writer", false)),
        Some(Role::Reader) => {
            let mut teller = Teller::new(output, LAB, "reader", false);
            reader::run(context, order, Peer::find(context, LAB, "writer")?, &mut teller)
        }
        None => {
            let mut teller = Teller::new(output, LAB, "reader", true);
            let place = context.place(options.device)?;
            reader::run(context, order, Peer::spawn(LAB, "writer", &place.to_string())?, &mut teller)
        }
    }
}

/// What the writer says first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    pid: u32,
    /// Where the ring shall be.
    place: String,
}

/// Where the broker is, and what is written. The ring is there.
#[derive(Debug, Serialize, Deserialize)]
struct Meet {
    socket: PathBuf,
    pattern: Pattern,
}

/// The writer is there; or it has published so many messages, the last of which was refused in these words.
#[derive(Debug, Serialize, Deserialize)]
struct Published {
    messages: u64,
    refused: Option<String>,
}

/// What the reader wants next.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// So many messages, each as soon as there is room for it; answered by [`Published`].
    Messages(u64),
    /// Messages until there is no room for a moment; answered by [`Published`].
    UntilFull,
    /// Messages until it is killed; answered by nothing.
    Endless,
    /// End.
    End,
}

const LAB: &str = "ring";

/// The topic, and how many of its messages are kept.
const RING: &str = "numbers";
const DEPTH: u32 = 8;
/// How many of them a late subscriber asks for.
const HISTORY: u32 = 4;

/// Numbers in a message.
const NUMBERS: u64 = 1024;
const DTYPE: DType = DType::U64;

/// How long nothing is waited for, to see that it does not come.
const MOMENT: Duration = Duration::from_millis(100);
/// A wait that must end: far more than it takes, also on a slow day.
const TIMEOUT: Duration = Duration::from_secs(20);

const BRAKE: Belief = belief("brake", "A fast writer overwrites what a slow reader has not read.");
const SLOWED: Belief = belief("slowed", "A slow reader slows the writer, and all other readers.");
const UNNOTICED: Belief = belief("unnoticed", "Messages that a reader misses are missed unnoticed.");
const LATE: Belief = belief("late", "Who comes late has missed what was said before.");
const TORN: Belief = belief("torn", "A writer that is killed leaves half a message, or a ring that nobody can use.");

const BELIEFS: [Belief; 5] = [BRAKE, SLOWED, UNNOTICED, LATE, TORN];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}

fn create(domain: &Domain, place: Place) -> Result<Topic, Failure> {
    let topic = domain.topic(RING).max_bytes(NUMBERS * 8).dtype(DTYPE).depth(DEPTH).place(place);
    Ok(topic.create()?)
}
