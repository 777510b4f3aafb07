//! `partywall lab work-queue`: a master distributes arrays to workers, which compute square roots and may be killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | worker | child | claims tasks, writes the square roots of the input into its own output, completes them |
//! | textbook | child | a worker of the textbook queue, in host memory |
//! | master | `partywall lab work-queue` | starts a broker and more workers, submits tasks, kills workers, verifies every element |

mod master;
mod textbook;
mod worker;

use partywall::{ClaimedTask, Queue, Task, Ticket, cuda::experiment::SquareRoots};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "work-queue",
    title: "a master distributes tasks to workers, and workers may be killed",
    on_host: true,
    broker: true,
    traced: true,
    kills_by: &["--kill"],
    options: Order::augment_args,
    roles: &[
        Role::new("worker", "Claim tasks and compute square roots, until the master has all results", worker::play),
        Role::hidden("textbook", textbook::play),
    ],
    observer: Role::new("master", "Submit tasks, verify every result, and report the counts", master::play),
    farewell: Some("The master has all results, and reports which beliefs are refuted."),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

#[derive(Debug, Args)]
struct Order {
    /// The number of workers, 1 to 64; the master starts those that are missing
    #[arg(long, global = true, value_name = "N", default_value_t = 4, value_parser = number_in::<u8>(1..=64))]
    workers: u8,
    /// The number of arrays, 1 to 1,000,000
    #[arg(long, global = true, value_name = "M", default_value_t = 400, value_parser = number_in::<u32>(1..=1_000_000))]
    tasks: u32,
    /// Kill workers (SIGKILL) throughout, the first one in the middle of a task, and replace them; not under MPS
    #[arg(long, global = true)]
    kill: bool,
}

/// The job of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Job {
    /// Do tasks until the kind of a task is `LAST`. One worker reports its work.
    Work {
        /// Whether it is this worker.
        reports: bool,
    },
    /// Do half of one task. The master then kills the worker.
    Half,
}

/// The queue, and the number of tasks in it that have no result yet.
const QUEUE: &str = "square-roots";
const WINDOW: u32 = 64;
/// Additional blocks, for those of dead workers until their death is proved.
const SPARE: u32 = 16;

/// The kinds of tasks: an array whose square roots are wanted, and the end of one worker's job.
const ROOTS: &str = "sqrt";
const LAST: &str = "last";

/// Elements of an array, each of 32 bits.
const ELEMENTS: usize = 4096;
const BYTES: u64 = ELEMENTS as u64 * 4;

/// Returns an element of the array of a task: a whole number below 2^24, which a float represents exactly.
fn element(task: u32, index: usize) -> f32 {
    let mixed = (u64::from(task) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as f32
}

beliefs! {
    LOST = "lost": "The task of a killed worker is lost.",
    TWICE = "twice": "A task that is repeated has two results.",
    TEXTBOOK = "textbook": "A ring of volatile words in shared memory is enough.",
    HALF = "half": "Half-written output of a killed worker reaches a result.",
}
