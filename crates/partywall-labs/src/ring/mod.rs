//! `partywall lab ring`: numbers are streamed through a ring of blocks, and each is checked.
//!
//! | role | process | does |
//! |---|---|---|
//! | writer | child | publishes messages full of numbers; is killed while it does |
//! | reader | `partywall lab ring` | starts a broker, receives by each policy, checks every number; concludes |

mod numbers;
mod reader;
mod writer;

use std::mem;

use clap::{Args, value_parser};
use partywall::{DType, Policy, Publisher, Sample, Subscriber, Topic, error::Busy};

use self::numbers::{Numbers, Pattern};
use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "ring",
    about: "Numbers streamed through a ring of blocks, and every one checked",
    title: "numbers streamed through a ring of blocks, and every one checked",
    on_host: true,
    broker: true,
    options: Order::augment_args,
    roles: &[Role::new(
        "writer",
        "Publish numbers",
        "The reader has seen enough, and says which beliefs held.",
        writer::play,
    )],
    observer: Role::new(
        "reader",
        "Receive them, check each, kill the writer, and say what came of it",
        "",
        reader::play,
    ),
    claims: CLAIMS,
};

/// The stream that the user asked for.
#[derive(Debug, Args)]
struct Order {
    /// The numbers: fibonacci, or your own with commas between them, which are repeated
    #[arg(long, global = true, value_name = "NUMBERS", default_value = "fibonacci")]
    pattern: Pattern,
    /// How many messages are streamed, of 1,024 numbers each
    #[arg(long, global = true, value_name = "N", default_value_t = 10_000, value_parser = value_parser!(u64).range(1..))]
    messages: u64,
}

/// The writer has published so many messages; the next one was refused in these words.
#[derive(Debug, Serialize, Deserialize)]
struct Published {
    messages: u64,
    refused: Option<String>,
}

/// A command of the reader.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// So many messages, each as soon as there is room for it; answered by [`Published`].
    Messages(u64),
    /// Messages until there is no room for a moment; answered by [`Published`].
    UntilFull,
    /// Messages until it is killed; answered by nothing.
    Endless,
}

/// The topic, and how many of its messages are kept.
const RING: &str = "numbers";
const DEPTH: u32 = 8;
/// How many of them a late subscriber asks for.
const HISTORY: u32 = 4;

/// Numbers in a message.
const NUMBERS: u64 = 1024;
const DTYPE: DType = DType::U64;

claims! {
    BRAKE = "brake": "A fast writer overwrites what a slow reader has not read.",
    SLOWED = "slowed": "A slow reader slows the writer, and all other readers.",
    UNNOTICED = "unnoticed": "Messages that a reader misses are missed unnoticed.",
    LATE = "late": "A subscriber that comes late has missed what was published before.",
    TORN = "torn": "A writer that is killed leaves half a message, or a ring that nobody can use.",
}
