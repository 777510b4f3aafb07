//! `partywall lab weights`: serves versions of weights under one `kept` name, while writers are killed half-way.
//!
//! | role | process | does |
//! |---|---|---|
//! | trainer | child | commits a new version once a second; others write half of one, and are killed |
//! | reader | child, several | opens the latest version and checks every word, again and again; or loads a file |
//! | rollout | `partywall lab weights` | starts a broker and the others, kills trainers, restarts readers; concludes |
//!
//! Every tensor of a version is the same pattern times the factor of the version, so that each word identifies its
//! version.

mod file;
mod reader;
mod rollout;
pub(crate) mod tensors;
mod trainer;

use clap::ValueEnum;
use partywall::Build;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "weights",
    title: "weights served to readers that come and go, while writers are killed half-way",
    on_host: true,
    on_pinned: true,
    broker: true,
    options: Order::augment_args,
    roles: &[
        Role::new("trainer", "Commit a new version of the weights once a second", trainer::play),
        Role::hidden("reader", reader::play),
    ],
    observer: Role::new(
        "rollout",
        "Start the readers, kill other trainers, restart readers, and report the results",
        rollout::play,
    ),
    farewell: Some("The rollout has seen enough versions, and reports which beliefs are refuted."),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

#[derive(Debug, Args)]
struct Order {
    /// How many versions the trainer commits, one a second, 3 to 10,000
    #[arg(long, global = true, value_name = "N", default_value_t = 6, value_parser = number_in::<u64>(3..=10_000))]
    versions: u64,
    /// How many processes read, 1 to 32
    #[arg(long, global = true, value_name = "N", default_value_t = 2, value_parser = number_in::<u64>(1..=32))]
    readers: u64,
    /// The size of a version in MiB, 1 to 262,144 [default: 2048 on a GPU, 64 in host memory, 1 on a
    /// simulated GPU]
    #[arg(long, global = true, value_name = "N", value_parser = number_in::<u64>(1..=262_144))]
    mib: Option<u64>,
    /// The process that is killed (SIGKILL) each time [default: trainers, and the broker with the last of them]
    #[arg(long, global = true, value_name = "ROLE", value_enum)]
    kill: Option<Victim>,
}

/// A process that can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Victim {
    /// A trainer that has written half of a version
    Trainer,
    /// Such a trainer, and the broker, which its supervisor restarts
    Broker,
}

/// The instructions to a trainer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Job {
    /// Commit a version once a second, from this number on, until the rollout sends a message.
    Serve { first: u64, mib: u64 },
    /// Write half of a version, report it, and wait to be killed.
    Half { number: u64, mib: u64 },
}

/// A version that the trainer has committed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Committed {
    /// The number that the trainer gave it, from which its factor follows.
    number: u64,
    /// How long allocation and writing took, by kernels or by the CPU; and the commit.
    written_in: Duration,
    committed_in: Duration,
}

/// The instructions to a reader.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Reading {
    /// Open the latest version and check it, until the rollout ends this process. The answer to each `()` of the
    /// rollout is a [`Progress`].
    Name,
    /// Load the file at this path, and end.
    File(PathBuf),
}

/// The moment at which a reader had the addresses of all weights.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ReaderReady {
    at: Moment,
    /// How long that took, without the start of the process, the driver and the connection.
    after: Duration,
}

/// The progress of a reader.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Progress {
    /// Versions opened and checked, the same one again and again if there is no newer one.
    checks: u64,
    /// Checks that found a word of another version.
    mixed: u64,
    /// The number of the newest version.
    newest: u64,
    /// How often a newer version came.
    changes: u64,
    /// How long the slowest open took.
    slowest: Duration,
}

/// The name of the weights.
pub(crate) const NAME: &str = "weights";

/// How often the trainer commits.
const INTERVAL: Duration = Duration::from_secs(1);

beliefs! {
    MIX = "mix": "A reader can see half of one version and half of another.",
    WAIT = "wait": "Readers wait while a new version is written.",
    HALF = "half": "A writer that is killed half-way leaves a name that cannot be used.",
    LOST = "lost": "The weights are lost with the process that wrote them.",
    FILE = "file": "After a restart, a file in the page cache is as fast.",
}
