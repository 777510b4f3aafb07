//! `partywall run`: becomes another program, in this domain, and under MPS on request.
//!
//! The command replaces this process, so its pid, its signals and its exit status are those of the command.

use std::{ffi::OsString, io, os::unix::process::CommandExt, process::Command};

use clap::Args;
use partywall::{
    ErrorKind,
    mps::{self, MpsDaemon},
};

use crate::{Context, failure::Failure};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Start the domain's MPS daemon if it does not run, and make the command's processes its clients
    #[arg(long)]
    mps: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let location = context.options().location()?;
    let [program, rest @ ..] = &arguments.command[..] else {
        return Err(Failure::new(ErrorKind::Usage, "there is no command to run", "name one after the options"));
    };
    let mut command = Command::new(program);
    command.args(rest).env("PARTYWALL_SOCKET", &location.socket).env("PARTYWALL_DOMAIN", &location.domain);
    let mut hold = None;
    if arguments.mps {
        let daemon = MpsDaemon::of(&location);
        let held = daemon.start_held()?;
        // The command holds the daemon until all its processes have ended, even if none ever uses a GPU.
        held.inherit()?;
        hold = Some(held);
        command.env(mps::PIPES, daemon.pipes());
    }
    let error = command.exec();
    drop(hold);
    let (kind, advice) = match error.kind() {
        io::ErrorKind::NotFound => (ErrorKind::NotFound, "check the command's name, and PATH"),
        _ => (ErrorKind::Refused, "check that it is a program, and that you may run it"),
    };
    Err(Failure::new(kind, format!("cannot run {}: {error}", program.display()), advice))
}
