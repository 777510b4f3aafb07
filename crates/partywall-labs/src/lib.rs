//! `partywall lab`: experiments on the driver that show a mechanism at work, or fail, step by step.
//!
//! A lab is a list of [`Belief`](step::Belief)s and two roles, each a function that tells [`Step`](step::Step)s to a
//! [`Teller`](teller::Teller) and talks to the other role through a [`Peer`](peer::Peer). `partywall lab NAME` plays
//! the second role itself and the first one in a child process, and tells the steps of both in order; with a role it
//! plays that one, for two terminals. Each lab ends by saying which beliefs held on this machine.
//!
//! With `--json` each line is an object: first what it runs on (`lab`, `device`, `simulated`, …), then one a step
//! (`role`, `step`, `values`, `why`, `verdict`: `as-expected`, `different` or `not-tried`, `finding`), and at last
//! `beliefs`, each with its `verdict`: `held`, `did-not-hold`, `open` or `not-tried`. A failure is a line with `error`,
//! as for every command. A belief that did not hold is a result, and the exit code 0.

mod broker;
mod clock;
mod coherency;
mod context;
mod crash;
mod device;
mod errors;
mod events;
mod failure;
mod peer;
mod pipeline;
mod pool;
mod ring;
mod semaphore;
mod step;
mod teller;
pub mod text;
mod vmm;

pub use context::{Console, Context};
pub use failure::Failure;

use clap::{Args, Subcommand};
use partywall::DeviceChoice;
use serde_json::{Value, json};

use self::device::Chosen;

/// The lab that was chosen on the command line, and its options.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Arguments {
    #[command(subcommand)]
    lab: Option<Lab>,
}

#[derive(Debug, Subcommand)]
enum Lab {
    /// Each way in which sharing fails, and what the driver answers
    Errors(errors::Arguments),
    /// A hand-over of memory by file descriptor, call by call
    Vmm(vmm::Arguments),
    /// What a kernel sees of another process's stores, when, and in which order
    Coherency(coherency::Arguments),
    /// Waiting for another process's kernel, by its event and by a timeline
    Events(events::Arguments),
    /// Several processes, a few permits, and what becomes of those of the dead
    Semaphore(semaphore::Arguments),
    /// A server, a client and the broker die: who reads on, who wakes, what stays
    Crash(crash::Arguments),
    /// Blocks that processes take, hand over, and lose by dying
    Pool(pool::Arguments),
    /// Numbers streamed through a ring of blocks, and every one checked
    Ring(ring::Arguments),
    /// Three processes decode, blur and encode images, and one may be killed
    Pipeline(pipeline::Arguments),
}

/// What every lab takes.
#[derive(Debug, Clone, Args)]
struct Options {
    /// The GPU: its number here, or its UUID [default: the first; for the second role of two terminals, that of the
    /// first role]
    #[arg(long, global = true, value_name = "N|UUID")]
    device: Option<Chosen>,
    /// The other role is the process that started this one, which tells our steps.
    #[arg(long, global = true, hide = true)]
    on_standard_input: bool,
}

/// What labs take that work on a GPU and in host memory.
#[derive(Debug, Clone, Args)]
struct MemoryOptions {
    /// Where the memory is: auto, host, cuda, cuda:N, or a GPU's UUID; auto is the first GPU, or host memory where there is
    /// none
    #[arg(long, global = true, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// The other role is the process that started this one, which tells our steps.
    #[arg(long, global = true, hide = true)]
    on_standard_input: bool,
}

impl Options {
    /// The device that was chosen, or the first one.
    fn device(&self) -> Chosen {
        self.device.unwrap_or(Chosen::Ordinal(0))
    }
}

impl Arguments {
    /// Runs the lab, or one role of it. Lists all labs if none was chosen.
    ///
    /// # Errors
    /// What keeps the lab from its end. A claim that does not hold is a result, not an error.
    pub fn run(&self, context: &Context) -> Result<(), Failure> {
        match &self.lab {
            Some(Lab::Errors(arguments)) => errors::run(context, arguments),
            Some(Lab::Vmm(arguments)) => vmm::run(context, arguments),
            Some(Lab::Coherency(arguments)) => coherency::run(context, arguments),
            Some(Lab::Events(arguments)) => events::run(context, arguments),
            Some(Lab::Semaphore(arguments)) => semaphore::run(context, arguments),
            Some(Lab::Crash(arguments)) => crash::run(context, arguments),
            Some(Lab::Pool(arguments)) => pool::run(context, arguments),
            Some(Lab::Ring(arguments)) => ring::run(context, arguments),
            Some(Lab::Pipeline(arguments)) => pipeline::run(context, arguments),
            None => {
                list(context.console);
                Ok(())
            }
        }
    }
}

fn list(console: &dyn Console) {
    let labs: [(&str, &str, &[&str]); 9] = [
        ("errors", errors::TITLE, &errors::ROLES),
        ("vmm", vmm::TITLE, &vmm::ROLES),
        ("coherency", coherency::TITLE, &coherency::ROLES),
        ("events", events::TITLE, &events::ROLES),
        ("semaphore", semaphore::TITLE, &semaphore::ROLES),
        ("crash", crash::TITLE, &crash::ROLES),
        ("pool", pool::TITLE, &pool::ROLES),
        ("ring", ring::TITLE, &ring::ROLES),
        ("pipeline", pipeline::TITLE, &pipeline::ROLES),
    ];
    let rows = labs.map(|(name, title, roles)| vec![name.to_owned(), title.to_owned(), roles.join(", ")]);
    console.table(&["LAB", "SHOWS", "ROLES"], &rows, &["ROLES"]);
    console
        .line("\nRun one with `partywall lab NAME`; or each role in a terminal of its own: `partywall lab NAME ROLE`.");
    console.line("Without a GPU: `partywall lab NAME --simulated`.");
    let values: Vec<Value> =
        labs.iter().map(|(name, title, roles)| json!({ "name": name, "shows": title, "roles": roles })).collect();
    console.value(&json!({ "labs": values }));
}
