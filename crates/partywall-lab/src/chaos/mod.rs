//! `partywall lab chaos`: members of every kind, struck at random moments, and a record of what they were promised.
//!
//! A strike kills, stops or evicts a member, shuts down its connections, or leaves it without descriptors or memory for
//! a while; or it kills the broker.
//!
//! | role | process | does |
//! |---|---|---|
//! | writer, reader | child | commits versions of one kept name; opens the latest and checks every word |
//! | builder | child | builds an owned name, or opens what another one has built |
//! | watcher | child | notes each version that the broker reports |
//! | publisher, subscriber | child | publishes numbered messages; receives each (`block`) |
//! | viewer | child | joins the topic, holds messages, may miss some, and leaves |
//! | submitter, worker | child | submits tasks and takes their results; does them |
//! | holder | child | acquires a permit, and releases it |
//! | taker | child | takes a block of a pool, marks it, and gives it back or to another taker |
//! | maker | child | creates a pool or a topic, or opens that of another maker |
//! | observer | `partywall lab chaos` | starts a broker and the others, strikes them by a plan, checks the history |
//!
//! Each process appends what it begins and what it was promised to one file, the history (`history.rs`). Only the
//! checker (`check.rs`) judges it, and only by that file.

mod check;
mod history;
mod members;
mod observer;
mod plan;
mod strikes;

use self::{
    history::{History, Progress, Resource, What},
    plan::SplitMix,
};
use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "chaos",
    title: "members of every kind are killed, stopped and left without what they need, and nothing is lost",
    about: Some("Members of every kind are killed at random moments, and a record of what was promised is checked"),
    on_host: true,
    on_pinned: true,
    broker: true,
    traced: true,
    options: Order::augment_args,
    roles: &[
        Role::hidden("writer", |session| members::play(session, true, members::writer)),
        Role::hidden("reader", |session| members::play(session, true, members::reader)),
        Role::hidden("publisher", |session| members::play(session, true, members::publisher)),
        Role::hidden("subscriber", |session| members::play(session, true, members::subscriber)),
        Role::hidden("submitter", |session| members::play(session, true, members::submitter)),
        Role::hidden("worker", |session| members::play(session, true, members::worker)),
        Role::hidden("holder", |session| members::play(session, false, members::holder)),
        Role::hidden("taker", |session| members::play(session, true, members::taker)),
        Role::hidden("watcher", |session| members::play(session, false, members::watcher)),
        Role::hidden("viewer", |session| members::play(session, true, members::viewer)),
        Role::hidden("builder", |session| members::play(session, true, members::builder)),
        Role::hidden("maker", |session| members::play(session, true, members::maker)),
    ],
    observer: Role::new("observer", "Strike the members, and check the history", observer::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

#[derive(Debug, Args)]
struct Order {
    /// The plan of what happens to whom follows from this number
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = number_in::<u64>(0..=u64::MAX))]
    seed: u64,
    /// How long members are killed, 1 to 400
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = number_in::<u64>(1..=400))]
    duration: u64,
    /// End once this many members were killed
    #[arg(long, value_name = "N", value_parser = number_in::<u64>(1..=u64::MAX))]
    kills: Option<u64>,
    /// Write the history to this file, which must not exist [default: a new file beside other temporary files]
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// Start nothing, and check this history again
    #[arg(long, value_name = "HISTORY", conflicts_with_all = ["seed", "duration", "kills", "history"])]
    check: Option<PathBuf>,
}

/// The observer's instructions to a member.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Job {
    /// Its number, which no other process of the lab has.
    number: u32,
    history: PathBuf,
}

/// The names of the objects.
const WEIGHTS: &str = crate::weights::NAME;
const MESSAGES: &str = "messages";
const TASKS: &str = "tasks";
const PERMITS: &str = "permits";
const BLOCKS: &str = "blocks";
/// The segment that all tasks name, and the one with references to offered blocks.
const CONSTANTS: &str = "constants";
const MAIL: &str = "mail";
/// The owned name that builders build, a name that is never committed, and the objects that makers create.
const BUILT: &str = "built";
const NEVER: &str = "never";
const MADE_POOL: &str = "made-pool";
const MADE_TOPIC: &str = "made-topic";

/// How many permits, blocks, and tasks exist: fewer permits than holders, and as many blocks as takers.
const PERMITS_MOST: u32 = 2;
const BLOCKS_MOST: u32 = 3;
const TASKS_MOST: u32 = 32;

/// The words of the mail.
const MAIL_WORDS: u64 = 3;

/// Each word of the constants.
const CONSTANT: u64 = 77;

/// The words of a message, a block, an input and an output.
const WORDS: u64 = 512;

/// How long an attempt at a task may take. Some members are stopped, or work, for longer.
const LEASE: Duration = Duration::from_millis(50);

/// What a worker adds to each word of its input.
const DONE: u64 = 1 << 63;

/// The limit of every wait of a member.
const LIMIT: Duration = Duration::from_secs(2);

beliefs! {
    MIXED = "mixed": "A reader can see data of a version that a killed writer had not finished.",
    MESSAGE = "message": "A message is lost, or arrives twice, when processes are killed.",
    TASK = "task": "A task is lost, or has two results, when processes are killed.",
    PERMIT = "permit": "Permits and blocks of killed processes are lost, or have two holders.",
    STOPPED = "stopped": "A stopped process holds up the others with its permit, its block or its task.",
    RESOURCES = "resources": "The broker grows with every member that is killed.",
}
