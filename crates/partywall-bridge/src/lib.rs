//! The program `partywall-bridge`: `partywall`, with what crosses from host to host. `partywall` starts it for that, so
//! that no network code is in the broker or in a program that only shares memory.
//!
//! | module | holds |
//! |---|---|
//! | [`attempts`] | how long commands wait for what does not answer |
//! | [`commands`] | `bridge`, `hosts`, `pull`, and `ls` and `show` of other hosts |
//! | [`content`] | the bytes of a version, their root, and the proof of a piece |
//! | [`hosts`] | which hosts are there |
//! | [`identity`] | certificates, and what other hosts may do here |
//! | [`link`] | the session with them: endpoints, questions and answers |
//! | [`manifest`] | what a host says about a version |
//! | [`message`] | the answers of hosts, and how they are read |
//! | [`name`] | `//HOST/NAME[@V]` |
//! | [`presence`] | names that tell which hosts are there |
//! | [`pull`] | the content of another host, as `put` reads it |
//! | [`record`] | the name by which the bridge of a domain is found |
//! | [`remote`] | the commands that ask one host: `pull`, `ls`, `show` |
//! | [`serve`] | the answers about exported segments |
//! | [`topic`] | the samples of topics, from host to host |
//!
//! A bridge is a member like any other: its death is a member's death. Everything that a peer sends is checked before
//! it is used, and a peer can harm its own streams only.
#![forbid(unsafe_code)]

mod attempts;
mod commands;
mod content;
mod hosts;
mod identity;
mod link;
mod manifest;
mod message;
mod name;
mod presence;
mod pull;
mod record;
mod remote;
mod serve;
mod topic;

use std::{
    env,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
    time::Instant,
};

use partywall::{Domain, Pattern};
use partywall_cli::bridge::Bridge as Contents;
use partywall_os::environment;

use crate::{hosts::Hosts, link::Link, name::RemotePattern};

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    choose_threads();
    partywall_cli::bridge::set(&CONTENTS);
    partywall_cli::main(None)
}

/// Becomes this program anew with the threads that a bridge needs, which zenoh takes from its environment alone. So no
/// other value counts, of which some would be a panic in every command.
fn choose_threads() {
    if env::var_os(RUNTIME).is_some_and(|found| found == THREADS) {
        return;
    }
    let Ok(program) = env::current_exe() else { return };
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_else(|| "partywall".into());
    let mut command = Command::new(program);
    // Returns only if it fails, which it does not for a program that has just been started.
    let _ = environment::shield(&mut command).env(RUNTIME, THREADS).arg0(name).args(arguments).exec();
}

const RUNTIME: &str = "ZENOH_RUNTIME";

/// A peer that asks and does not read the answers may hold up a receiving thread; a link that ends while a message waits
/// for it, a sending one until that wait is over. Closing a connection with unsent bytes to a lost peer holds up any
/// thread for ten seconds, and those of `net` and `acc` accept and open the links of all hosts.
const THREADS: &str =
    "(rx: (worker_threads: 8), tx: (worker_threads: 8), net: (worker_threads: 8), acc: (worker_threads: 8))";

static CONTENTS: Contents = Contents { commands: commands::COMMANDS, ls: remote::ls, show: remote::show };

/// A running bridge.
#[derive(Debug)]
pub(crate) struct Bridge {
    pub(crate) domain: Domain,
    pub(crate) link: Link,
    pub(crate) hosts: Hosts,
    /// The name of this host.
    pub(crate) host: String,
    /// Where other hosts reach it, as far as it knows.
    pub(crate) endpoints: Vec<String>,
    pub(crate) start: Instant,
    /// The names that other hosts may read.
    pub(crate) exports: Vec<Pattern>,
    /// The topics of other hosts that come here.
    pub(crate) imports: Vec<RemotePattern>,
}

impl Bridge {
    /// Returns the key `pw1/R/WHAT/H/I` of this host, with `rest` after it.
    pub(crate) fn own_key(&self, what: &str, rest: &str) -> String {
        self.link.key(format_args!("{what}/{}/{}{rest}", self.host, self.link.instance()))
    }

    /// Returns whether other hosts may read a name. Those of bridges and pullers begin with a dot, and stay here.
    pub(crate) fn exports(&self, name: &str) -> bool {
        !name.starts_with('.') && self.exports.iter().any(|pattern| pattern.matches(name))
    }
}

/// The names of bridges begin with this; the realm follows.
pub(crate) const BRIDGES: &str = ".bridge/";
