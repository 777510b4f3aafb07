//! The processes of a run: an actor, which runs an operation under faults, and a bystander in the same domain.

use std::io::BufRead as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use partywall::{Domain, Error, cuda::Driver, info::StatusInfo};
use serde::{Deserialize, Serialize};

use crate::operations::{self, Before, Operation, Setting};

/// The option that makes this program play a role.
pub(crate) const ROLE: &str = "--role";
/// The role that runs an operation twice.
pub(crate) const ACTOR: &str = "actor";
/// The role that holds the objects that operations open, and runs operations on command.
pub(crate) const BYSTANDER: &str = "bystander";

/// The order that asks a bystander what the broker holds; every other order names an operation.
pub(crate) const HOLDINGS: &str = "holdings";

/// The environment variable of the simulated driver's log of calls.
pub(crate) const CALLS: &str = "SIMCUDA_CALLS";

/// The name of threads whose calls the simulated driver does not count: Partywall's thread that checks contexts
/// periodically, and a thread here that makes a varying number of calls.
pub(crate) const APART: &str = "partywall-gpu";

/// The messages of an actor, one on each line.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Line {
    /// The operation begins, after this number of driver calls.
    Begins(usize),
    /// The operation has ended, after this number of driver calls in all.
    Ended(usize, Result<(), ReportedError>),
    /// The failures of drops, which the contexts have stored.
    Kept(Vec<String>),
    /// The outcome of running the operation once more.
    Again(Result<(), ReportedError>),
}

/// What a broker holds; the members do not include the bystander.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holdings {
    members: u64,
    names: u64,
    versions: u64,
    leases: u64,
    fds: u64,
    bytes: u64,
}

/// An error as a caller sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ReportedError {
    pub(crate) text: String,
    pub(crate) advice: String,
}

/// Plays a role to its end.
pub(crate) fn play(role: &str, arguments: &[String]) -> Result<(), String> {
    match (role, arguments) {
        (ACTOR, [operation, socket, directory]) => actor(find(operation)?, Path::new(socket), directory.into()),
        (BYSTANDER, [socket, directory]) => bystander(Path::new(socket), directory.into()),
        _ => Err("no such role".to_owned()),
    }
}

fn actor(operation: &Operation, socket: &Path, directory: PathBuf) -> Result<(), String> {
    let calls = PathBuf::from(std::env::var_os(CALLS).ok_or("no log of calls")?);
    let calls = || -> Result<usize, String> {
        let text = std::fs::read_to_string(&calls).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(String::new()),
            _ => Err(format!("{}: {error}", calls.display())),
        })?;
        Ok(text.lines().count())
    };
    let setting = setting(operation.name, socket, directory, operation.before)?;
    say(&Line::Begins(calls()?));
    let outcome = attempt(operation, &setting);
    say(&Line::Ended(calls()?, outcome));
    say(&Line::Kept(kept(&setting.domain)));
    say(&Line::Again(attempt(operation, &setting)));
    Ok(())
}

/// Returns the failures of drops that the driver and the contexts of the GPUs have stored.
fn kept(domain: &Domain) -> Vec<String> {
    let gpus = [operations::FIRST_GPU, operations::SECOND_GPU].into_iter().filter_map(|uuid| domain.gpu(uuid).ok());
    let of_nodes = Driver::load().ok().and_then(Driver::take_drop_error);
    let errors = gpus.filter_map(|gpu| gpu.context().take_drop_error()).chain(of_nodes);
    errors.map(|error| error.to_string()).collect()
}

fn bystander(socket: &Path, directory: PathBuf) -> Result<(), String> {
    let setting = setting("bystander", socket, directory, Before::Kernels)?;
    let (segments, _pool, _timeline) = operations::hold(&setting.domain).map_err(|error| reported(&error).text)?;
    let holdings = || holdings(&setting.domain).map_err(|error| reported(&error).text);
    say(&holdings()?);
    for line in std::io::stdin().lock().lines() {
        let order = line.map_err(|error| error.to_string())?;
        if order == HOLDINGS {
            say(&holdings()?);
        } else {
            let outcome = attempt(find(&order)?, &setting);
            say(&outcome.and_then(|()| caught(|| operations::check_held(&segments))));
        }
    }
    Ok(())
}

fn holdings(domain: &Domain) -> Result<Holdings, Error> {
    let status = domain.status()?;
    let bytes = status.bytes.iter().map(|(_, bytes)| bytes).sum();
    let StatusInfo { members, names, versions, leases, fds, .. } = status;
    Ok(Holdings { members, names, versions, leases, fds, bytes })
}

fn setting(name: &str, socket: &Path, directory: PathBuf, before: Before) -> Result<Setting, String> {
    let domain = Domain::options().socket(socket).start(false).connect().map_err(|error| reported(&error).text)?;
    let prepare = || match before {
        Before::Nothing => Ok(()),
        Before::Gpu => domain.gpu(operations::FIRST_GPU).map(drop),
        Before::Kernels => domain.gpu(operations::FIRST_GPU)?.kernels().map(drop),
        Before::Words => {
            let gpu = domain.gpu(operations::FIRST_GPU)?;
            let timeline = domain.timeline(operations::held::TIMELINE)?;
            std::thread::scope(|scope| {
                let apart = std::thread::Builder::new().name(APART.to_owned());
                let prepare = apart.spawn_scoped(scope, || timeline.device_ptr(&gpu).map(drop));
                prepare.expect("a thread can be started").join().expect("it does not panic")
            })
        }
    };
    prepare().map_err(|error| reported(&error).text)?;
    let name = format!("{}/{}", name.replace(' ', "-"), std::process::id());
    Ok(Setting { domain, name, directory })
}

fn attempt(operation: &Operation, setting: &Setting) -> Result<(), ReportedError> {
    caught(|| (operation.run)(setting))
}

fn caught(run: impl FnOnce() -> operations::Outcome) -> Result<(), ReportedError> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(outcome) => outcome.map_err(|error| reported(&error)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err(ReportedError { text: format!("panicked: {}", text.unwrap_or_default()), advice: String::new() })
        }
    }
}

fn reported(error: &Error) -> ReportedError {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        // Some errors print their cause themselves.
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    ReportedError { text, advice: error.advice() }
}

fn find(name: &str) -> Result<&'static Operation, String> {
    let found = operations::OPERATIONS.iter().find(|operation| operation.name == name);
    found.ok_or_else(|| format!("there is no operation {name:?}"))
}

fn say(line: &impl Serialize) {
    println!("{}", serde_json::to_string(line).expect("plain data can be written as JSON"));
}
