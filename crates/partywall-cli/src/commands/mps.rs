//! `partywall mps`: NVIDIA's MPS daemon in a directory of its own beside the domain's socket, see [`partywall::mps`].
//!
//! With `--json`: `start` prints `pipes` and `logs` (directories), `already` (whether it ran), `watcher` (a pid or
//! null). `stop` prints `pipes` and `stopped` (whether it ran). `status` prints `pipes`, `logs`, `runs`, `watcher`,
//! `held` (whether a command of `run --mps` or a process with `connect(mps=True)` runs), and `servers`, a list of `pid`
//! and `clients` (pids). A missing daemon is a failure of neither `stop` nor `status`.

use std::time::Duration;

use clap::{Args, Subcommand};
use partywall::{
    WhenSome,
    error::MpsFault,
    mps::{self, MpsDaemon, MpsServer},
};
use serde_json::json;

use crate::{
    Context,
    commands::serve::{
        IdleExit,
        daemon::{daemonize, report},
        parse_idle,
    },
    failure::Failure,
    output::Output,
    text::parse_seconds,
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start the daemon, and wait until it answers
    Start(Start),
    /// Stop the daemon
    Stop {
        /// Stop even while it has clients: CUDA ends in all of them
        #[arg(long)]
        force: bool,
    },
    /// Show the daemon, its servers and their clients
    Status,
    /// Start the daemon and watch it. Used only by `start`, `run --mps` and the libraries: the process becomes the
    /// watcher
    #[command(hide = true)]
    Watch(Start),
}

#[derive(Debug, Args)]
struct Start {
    /// Stop the daemon after this many seconds without clients and commands, or never
    #[arg(long, value_name = "SECONDS|never", default_value = "60", value_parser = parse_idle)]
    idle_exit: IdleExit,
    /// Seconds until a daemon that does not answer counts as failed
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    timeout: Duration,
}

impl Start {
    fn daemon(&self, daemon: MpsDaemon) -> MpsDaemon {
        daemon.idle_exit(self.idle_exit.0).timeout(self.timeout)
    }
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let daemon = MpsDaemon::of(&context.options().location()?);
    match &arguments.action {
        Action::Start(options) => start(context.output(), &options.daemon(daemon)),
        Action::Stop { force } => stop(context.output(), &daemon, *force),
        Action::Status => status(context.output(), &daemon),
        Action::Watch(options) => watch(&options.daemon(daemon)),
    }
}

fn start(output: Output, daemon: &MpsDaemon) -> Result<(), Failure> {
    let started = daemon.start()?;
    let pipes = daemon.pipes();
    let how = if started.already { "runs already" } else { "runs" };
    output.line(format!("the MPS daemon {how} at {}; logs in {}", pipes.display(), daemon.logs().display()));
    output.line(format!(
        "start its clients with `partywall run --mps COMMAND`, with connect(mps=True) in Python, or with\n  export {}={}",
        mps::PIPES,
        pipes.display()
    ));
    output.line(PRICE);
    let others = mps::pipes();
    if others != pipes && mps::is_served(&others) {
        output.note(format!(
            "another MPS daemon listens at {}: its clients and those of this one take turns on a GPU",
            others.display()
        ));
    }
    output.value(&json!({
        "pipes": pipes, "logs": daemon.logs(), "already": started.already, "watcher": started.watcher,
    }));
    Ok(())
}

fn stop(output: Output, daemon: &MpsDaemon, force: bool) -> Result<(), Failure> {
    let stopped = daemon.stop(force).map_err(|error| {
        let clients = match &error {
            partywall::Error::Mps(MpsFault::InUse { clients, .. }) => Some(json!({ "clients": clients })),
            _ => None,
        };
        Failure::from(error).when_some(clients, Failure::with_details)
    })?;
    let pipes = daemon.pipes();
    let what = if stopped { "the MPS daemon has ended" } else { "no MPS daemon ran" };
    output.line(format!("{what} at {}", pipes.display()));
    output.value(&json!({ "pipes": pipes, "stopped": stopped }));
    Ok(())
}

fn status(output: Output, daemon: &MpsDaemon) -> Result<(), Failure> {
    let status = daemon.status()?;
    let pipes = daemon.pipes();
    if status.runs && !status.answers {
        return Err(daemon.silent().into());
    }
    output.value(&json!({
        "pipes": pipes,
        "logs": daemon.logs(),
        "runs": status.runs,
        "watcher": status.watcher,
        "held": status.held,
        "servers": status.servers.iter().map(|MpsServer { pid, clients, .. }| json!({ "pid": pid, "clients": clients }))
            .collect::<Vec<_>>(),
    }));
    let fact = |what: &str, value: String| output.line(format!("{what:<8} {value}"));
    if status.runs {
        fact("daemon", format!("runs at {}", pipes.display()));
        fact("logs", daemon.logs().display().to_string());
        let watcher = match status.watcher {
            Some(pid) => format!("pid {pid}, stops the daemon when no process needs it"),
            None => "none: the daemon runs until `partywall mps stop`, or until a start gives it a watcher".into(),
        };
        fact("watcher", watcher);
        if status.held {
            fact("held", "by commands of `run --mps`, or by processes with connect(mps=True)".into());
        }
        if status.servers.is_empty() {
            fact("servers", "none, because it has had no client".into());
        }
        for server in &status.servers {
            fact("server", format!("pid {}, {}", server.pid, clients(&server.clients)));
        }
    } else {
        fact("daemon", format!("none runs at {}; `partywall mps start` starts one", pipes.display()));
    }
    output.line(PRICE);
    Ok(())
}

fn clients(pids: &[u32]) -> String {
    match pids {
        [] => "no clients".into(),
        pids => format!("clients {}", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Becomes the watcher. Its starter reads why it cannot.
fn watch(daemon: &MpsDaemon) -> Result<(), Failure> {
    let mut starter = Some(daemonize()?);
    let watched = daemon.watch(|| {
        if let Some(starter) = starter.take() {
            starter.ready("");
        }
    });
    watched.map(drop).map_err(|error| {
        let why = match &error {
            // The starter says that the daemon could not be started.
            partywall::Error::Mps(MpsFault::NotStarted { why, .. }) => why.clone(),
            other => other.to_string(),
        };
        let mut failure = Failure::from(error);
        failure.message = why;
        if let Some(starter) = starter.take() {
            report(starter, &failure);
        }
        // A daemon's standard streams have no reader.
        Failure::silent(failure.kind)
    })
}

/// The gain and the price of MPS. The figures are those of `docs/costs.md`.
const PRICE: &str = "\
gain     kernels of several processes run at the same time: on an H200 a hand-off takes 5.6 µs instead of 143 µs
price    a fault, or a kill in a long kernel, ends CUDA in all clients of a server; a client's death does not prove that
         its GPU work is over, so its memory goes to quarantine (`partywall rm --unproven`)";
