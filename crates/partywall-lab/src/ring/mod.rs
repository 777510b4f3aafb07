//! `partywall lab ring`: streams numbers through a ring of blocks, and checks each of them.
//!
//! | role | process | does |
//! |---|---|---|
//! | writer | child | publishes messages full of numbers; is killed meanwhile |
//! | reader | `partywall lab ring` | starts a broker, receives with each policy, checks every number; concludes |

mod numbers;
mod reader;
mod writer;

use std::mem;

use partywall::error::Busy;

use self::numbers::{Numbers, Pattern};
use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "ring",
    title: "numbers streamed through a ring of blocks, and every one checked",
    on_host: true,
    broker: true,
    traced: true,
    options: Order::augment_args,
    roles: &[Role::new("writer", "Publish numbers", writer::play)],
    observer: Role::new("reader", "Receive them, check each, kill the writer, and report the results", reader::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// The stream that the user asked for.
#[derive(Debug, Args)]
struct Order {
    /// The numbers: fibonacci, or a comma-separated list that is repeated
    #[arg(long, global = true, value_name = "NUMBERS", default_value = "fibonacci")]
    pattern: Pattern,
    /// How many messages are streamed, of 1,024 numbers each
    #[arg(long, global = true, value_name = "N", default_value_t = 10_000, value_parser = number_in::<u64>(1..=u64::MAX))]
    messages: u64,
}

/// The number of messages that the writer has published, and the error of the next message if it was refused.
#[derive(Debug, Serialize, Deserialize)]
struct Published {
    messages: u64,
    refused: Option<String>,
}

/// A command of the reader.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Publish this many messages, each as soon as there is room for it; answered by [`Published`].
    Messages(u64),
    /// Publish messages until there is no room for a moment; answered by [`Published`].
    UntilFull,
    /// Publish messages until the writer is killed; not answered.
    Endless,
}

/// The topic, and its depth.
const RING: &str = "numbers";
const DEPTH: u32 = 8;
/// The history that a late subscriber requests.
const HISTORY: u32 = 4;

/// Numbers in a message.
const NUMBERS: u64 = 1024;
const DTYPE: DType = DType::U64;

beliefs! {
    BRAKE = "brake": "A fast writer overwrites messages that a slow reader has not read.",
    SLOWED = "slowed": "A slow reader slows the writer, and all other readers.",
    UNNOTICED = "unnoticed": "A reader does not notice that it has missed messages.",
    LATE = "late": "A late subscriber has missed all earlier messages.",
    TORN = "torn": "A killed writer leaves half a message, or a ring that no process can use.",
}
