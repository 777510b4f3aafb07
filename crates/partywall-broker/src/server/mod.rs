//! The I/O side of the broker: sockets, file descriptors, clocks, processes.
//!
//! [`Server`] owns one value of each part. A part changes only its own fields, and does not know the server: it returns
//! what is to be done. Code that concerns several parts, or the registry, is implemented on the server.
//!
//! | part | contains |
//! |---|---|
//! | `event_loop` | the loop and its setup |
//! | `reactor`, `timers` | events of the kernel, and timers |
//! | `acceptor` | the listening socket and unauthenticated connections |
//! | `admission` | new connections and handshakes: members, operators, members that resume |
//! | `audit` | lines of the log about what users are granted and refused |
//! | `peers` | connections, members, and their pending messages |
//! | `connection` | bytes and file descriptors of one client, in and out, within bounds |
//! | `membership` | the identity of clients, and the proof of their deaths |
//! | `in_flight` | descriptors that clients have not read yet |
//! | `turns` | the order in which clients are served |
//! | `requests` | a member's requests on their way to the registry |
//! | `check` | what can be wrong about a request by itself |
//! | `effects` | decides, records and carries out effects |
//! | `control` | control memory, shared with all members |
//! | `fds` | donated file descriptors: checks and storage |
//! | `reclaimer` | closes file descriptors off the loop |
//! | `departures` | ends of connections and exits of processes |
//! | `ending` | the end of the broker: idle, on request, or handing over |
//! | `supervised` | the records of a supervised broker |
//! | `restart` | continues what a former process did |
//! | `replacement` | the check of another program that is to continue |
//! | `memory_checks` | has a child process check memory that may be lost |
//! | `answers` | what only the server knows, for answers of the registry |
//! | `ids` | tables keyed by the broker's own numbers |

mod acceptor;
mod admission;
mod answers;
mod audit;
mod check;
mod connection;
mod control;
mod departures;
mod effects;
mod ending;
mod event_loop;
mod fds;
mod ids;
mod in_flight;
mod membership;
mod memory_checks;
mod peers;
mod reactor;
mod reclaimer;
mod replacement;
mod requests;
mod restart;
mod supervised;
mod timers;
mod turns;

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use crate::{
    Exit,
    config::Resolved,
    registry::Registry,
    server::{
        acceptor::Acceptor, answers::About, audit::Audit, control::Control, fds::FdStore, memory_checks::MemoryChecks,
        peers::Peers, reactor::Reactor, replacement::Replacement,
    },
};

pub(crate) use supervised::{Supervised, check_state};

/// A listening broker.
#[derive(Debug)]
pub(crate) struct Server {
    /// Wakes the loop.
    reactor: Reactor,
    /// The read end of a pipe through which any byte ends the broker. It must stay open because it is watched.
    _stop: OwnedFd,
    stopper: OwnedFd,
    /// Makes all decisions. Its effects are carried out in order: those of an event before the next event is applied,
    /// or queued behind the effects of the previous event.
    registry: Registry,
    acceptor: Acceptor,
    audit: Audit,
    peers: Peers,
    /// The file descriptors that the registry knows by number.
    store: FdStore,
    /// The mappings of control memory.
    control: Control,
    /// Whether a timer is set for guarded cells. It is set while there are any.
    guarding: bool,
    /// How long a dead member's leases stay in quarantine; without a limit if absent.
    unproven_after: Option<Duration>,
    limits: Resolved,
    /// What the broker reports about itself.
    about: About,
    /// Present if a supervisor restarts the broker when it dies.
    supervised: Option<Supervised>,
    /// A request that another program continues.
    replacement: Option<Replacement>,
    memory_checks: MemoryChecks,
    /// Whether effects are being carried out.
    is_carrying_out: bool,
    /// The settle time: how long a process and its connections must have been gone before that counts as proof.
    settle: Duration,
    /// How long the broker must have been idle before it ends; absent if it never ends by itself.
    idle_exit: Option<Duration>,
    /// When the broker became idle. Set only together with a timer.
    idle_since: Option<Instant>,
    /// Why the loop ends. Once set, no further message is read.
    exit: Option<Exit>,
    /// Reused by every read.
    buffer: Vec<u8>,
}
