//! The program `partywall-bridge`: `partywall`, with what crosses from host to host. `partywall` starts it for that, so
//! that no network code is in the broker or in a program that only shares memory.
//!
//! | module | holds |
//! |---|---|
//! | [`commands`] | `bridge`, `hosts`, `pull`, and `ls` and `show` of other hosts |
//! | [`content`] | the bytes of a version, their root, and the proof of a piece |
//! | [`hosts`] | which hosts are there |
//! | [`identity`] | certificates, and what other hosts may do here |
//! | [`link`] | the session with them: endpoints, questions and answers |
//! | [`manifest`] | what a host says about a version |
//! | [`name`] | `//HOST/NAME[@V]` |
//! | [`pull`] | the content of another host, as `put` reads it |
//! | [`remote`] | the commands that ask one host: `pull`, `ls`, `show` |
//! | [`serve`] | the answers about exported segments |
//! | [`topic`] | the samples of topics, from host to host |
//!
//! A bridge is a member like any other: its death is a member's death. Everything that a peer sends is checked before
//! it is used, and a peer can harm its own streams only.
#![forbid(unsafe_code)]

mod commands;
mod content;
mod hosts;
mod identity;
mod link;
mod manifest;
mod name;
mod pull;
mod remote;
mod serve;
mod topic;

use std::process::ExitCode;

use partywall::{Domain, Pattern};
use partywall_cli::bridge::Bridge as Contents;

use crate::{hosts::Hosts, link::Link, name::RemotePattern};

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    partywall_cli::bridge::set(&CONTENTS);
    partywall_cli::main(None)
}

static CONTENTS: Contents = Contents { commands: commands::COMMANDS, ls: remote::ls, show: remote::show };

/// A running bridge.
#[derive(Debug)]
pub(crate) struct Bridge {
    pub(crate) domain: Domain,
    pub(crate) link: Link,
    pub(crate) hosts: Hosts,
    /// The name of this host.
    pub(crate) host: String,
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

    /// Returns whether other hosts may read a name. Nobody learns of the bridge itself by a pattern such as `*`.
    pub(crate) fn exports(&self, name: &str) -> bool {
        !name.starts_with(BRIDGES) && self.exports.iter().any(|pattern| pattern.matches(name))
    }
}

/// The names of bridges begin with this; the realm follows.
pub(crate) const BRIDGES: &str = ".bridge/";
