//! The program `partywall-lab`: `partywall`, with what nobody needs who only shares memory. `partywall` starts it for
//! `lab` and `bench`, and for the simulated driver; its doctor asks it about Vulkan.
//!
//! | module | holds |
//! |---|---|
//! | `commands` | the arguments of `lab` and `bench` |
//! | `bench` | the benchmarks |
//! | `elsewhere` | the labs that are programs of their own |
//! | all others | the labs and their runner |
//!
//! Labs are experiments that show how the CUDA driver and Partywall share memory, and how sharing fails.
//!
//! A `Lab` is a static description of its options, its roles and the `Belief`s that it tests. Each role is a function
//! that reports `Step`s and talks to the other role through a `Peer`. The runner (`lab`) does everything else: it
//! starts the roles, connects them, prints their steps, and concludes which beliefs are refuted on this machine.
//!
//! A lab may be a program of its own, which passes its [`Lab`] to [`main()`]: `partywall-lab` becomes it. The runner
//! presents it as the others; it brings no access to memory, streams or timelines, which such a program gets from
//! `partywall`.
//!
//! With `--json` each line is an object. The first one describes the machine (`lab`, `device`, `simulated`, …). One
//! follows for each step (`role`, `step`, `values`, `why`, `verdict`: `as-expected`, `different` or `not-tried`,
//! `finding`). The last one has the numbers of `steps`, of steps that are `different` and `not_tried`, the `beliefs`,
//! each with its `verdict` (`refuted`, `true` or `open`), and for some labs counts. A failure is a line with `error`,
//! as for every command. The exit code is 1 if a step is different; a refuted belief is a result.

#![deny(unsafe_code)] // `bench/posix.rs` calls the semaphores of the C library

mod bench;
mod broker;
mod chaos;
mod clock;
mod coherency;
mod commands;
mod context;
mod crash;
mod device;
mod elsewhere;
mod errors;
mod events;
mod failure;
mod fork;
mod forked;
mod handle_file;
mod lab;
mod p2p;
mod peer;
mod pipeline;
mod pool;
mod prelude;
mod reporter;
mod ring;
mod semaphore;
mod step;
mod tour;
mod trace;
mod vmm;
mod weights;
mod work_queue;

use std::{process::ExitCode, sync::OnceLock};

use clap::{ArgMatches, Args, Command, FromArgMatches};
pub use partywall_cli::{Failure, text::number_in};
use serde_json::{Value, json};

use crate::context::Context;
pub use crate::{
    broker::Broker,
    clock::{MOMENT, Moment, TIMEOUT, millis, short, spread},
    device::{open as open_gpu, parse_gpu, under_mps},
    elsewhere::RENDER,
    failure::{Doing, kind_of, unexpected},
    lab::{Lab, Play, Role, Session},
    peer::Peer,
    step::{Belief, Step},
};

/// Runs the command line of this process, on the simulated driver if it chooses that. `own` are the labs that only this
/// program contains, in the places of those with their names.
#[must_use]
pub fn main(own: &'static [&'static Lab]) -> ExitCode {
    OWN.get_or_init(|| own);
    partywall_simcuda::link();
    partywall_cli::main(Some(&commands::LAB))
}

/// The lab that was chosen on the command line, and its arguments.
#[derive(Debug)]
pub(crate) struct Arguments {
    chosen: Option<(String, ArgMatches)>,
}

impl Arguments {
    /// Runs the lab, or one role of it. Lists all labs if none was chosen.
    ///
    /// # Errors
    /// If the lab cannot be finished, or a step is not as expected. A refuted belief is a result, not an error.
    pub(crate) fn run(&self, context: &Context) -> Result<(), Failure> {
        let Some((name, arguments)) = &self.chosen else {
            list(context);
            return Ok(());
        };
        // The peers of a benchmark are started as roles are.
        match labs().chain([&bench::PEER]).find(|lab| lab.name == name) {
            Some(lab) => lab.run(context, arguments),
            None => tour::run(context, arguments),
        }
    }
}

impl Args for Arguments {
    fn augment_args(command: Command) -> Command {
        let command = command.subcommands(labs().map(Lab::command)).subcommand(tour::command());
        command.subcommand(bench::PEER.command().hide(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Arguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let chosen = matches.subcommand().map(|(name, arguments)| (name.to_owned(), arguments.clone()));
        Ok(Self { chosen })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn list(context: &Context) {
    let rows: Vec<_> =
        labs().map(|lab| vec![lab.name.to_owned(), lab.title.to_owned(), lab.listed().join(", ")]).collect();
    let console = context.console;
    console.table(&["LAB", "SHOWS", "ROLES"], &rows, &["ROLES"]);
    console.line("\nRun one with `partywall lab NAME`; or each role in its own terminal: `partywall lab NAME ROLE`.");
    console.line("All of them, with one table of the beliefs that they refute: `partywall lab tour`.");
    console.line("Without a GPU: `partywall lab NAME --simulated`.");
    let value = |lab: &Lab| json!({ "name": lab.name, "shows": lab.title, "roles": lab.listed() });
    console.value(&json!({ "labs": labs().map(value).collect::<Vec<Value>>() }));
}

/// Returns every lab, in the order of the documentation.
fn labs() -> impl Iterator<Item = &'static Lab> {
    let own = OWN.get().copied().unwrap_or_default();
    LABS.into_iter().map(|lab| own.iter().find(|own| own.name == lab.name).copied().unwrap_or(lab))
}

/// The labs that only this program contains.
static OWN: OnceLock<&'static [&'static Lab]> = OnceLock::new();

static LABS: [&Lab; 16] = [
    &errors::LAB,
    &handle_file::LAB,
    &fork::LAB,
    &vmm::LAB,
    &p2p::LAB,
    &coherency::LAB,
    &events::LAB,
    &semaphore::LAB,
    &crash::LAB,
    &pool::LAB,
    &ring::LAB,
    &pipeline::LAB,
    &elsewhere::RENDER,
    &work_queue::LAB,
    &weights::LAB,
    &chaos::LAB,
];
