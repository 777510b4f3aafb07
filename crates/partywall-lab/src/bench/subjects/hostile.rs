//! What others notice of a client that misbehaves: their calls, beside each way of it in turn and beside none. The
//! clients are those of the tests, in a program of their own (`testing/harness/src/bin/partywall-hostile.rs`).

use std::{env, path::PathBuf, process::Command};

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{Bench, program::Program},
    broker::Broker,
};

/// The ways to misbehave, and a broker without such a client.
const WAYS: [&str; 6] = [
    "nobody",
    "floods-descriptors",
    "opens-and-never-reads",
    "pipelines",
    "sends-one-byte-a-minute",
    "dies-at-each-message",
];

/// The calls that are measured.
const CALLS: [&str; 3] = ["round trip", "open and release", "connect"];

/// Samples that are asked for together, so that the program does not sleep before each.
const BLOCK: usize = 50;

pub(super) fn run(bench: &Bench<'_>, _: &Broker) -> Result<(), Failure> {
    let Some(program) = program()? else {
        bench.note("hostile: skipped: there is no partywall-hostile beside this program; PARTYWALL_HOSTILE names one");
        return Ok(());
    };
    for way in WAYS {
        let mut command = Command::new(&program);
        command.arg(way).env("PARTYWALL_BIN", env::current_exe()?);
        let mut others = Program::spawn(format!("partywall-hostile {way}"), &mut command)?;
        others.await_ready()?;
        for call in CALLS {
            let case = Case::new(call, Unit::Microseconds).parameter("beside", way);
            let plan = bench.plan(2_000).block(BLOCK);
            bench.run(Comparison::new(case, others.sampler_of(call, BLOCK)), plan)?;
        }
    }
    Ok(())
}

/// Returns the program that `PARTYWALL_HOSTILE` names, else the one beside this program.
fn program() -> Result<Option<PathBuf>, Failure> {
    if let Some(named) = env::var_os("PARTYWALL_HOSTILE").filter(|value| !value.is_empty()) {
        return Ok(Some(named.into()));
    }
    let beside = env::current_exe()?.with_file_name("partywall-hostile");
    Ok(beside.is_file().then_some(beside))
}
