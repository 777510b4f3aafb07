//! The I/O side of the broker: sockets, file descriptors, clocks, processes.
//!
//! [`event_loop::Server`] owns one value of each part. A part changes only its own fields. Code that concerns several
//! parts, or the registry, is implemented on the server.
//!
//! | part | contains |
//! |---|---|
//! | [`event_loop`] | the loop and its setup |
//! | `reactor`, `timers` | events of the kernel, and timers |
//! | `acceptor` | the listening socket and unauthenticated connections |
//! | `admission` | handshakes: members, operators, members that resume |
//! | `audit` | lines of the log about what users are granted and refused |
//! | `peers` | connections, members, and their pending messages |
//! | `connection` | bytes and file descriptors of one client, in and out, within bounds |
//! | `membership` | the identity of clients, and the proof of their deaths |
//! | `in_flight` | descriptors that clients have not read yet |
//! | `turns` | the order in which clients are served |
//! | `requests` | a member's requests on their way to the registry |
//! | `check` | what can be wrong about a request by itself |
//! | `runner` | carries out the registry's effects |
//! | `control` | control memory, shared with all members |
//! | `fds` | donated file descriptors: checks and storage |
//! | `reclaimer` | closes file descriptors off the loop |
//! | `departures` | ends of connections and exits of processes |
//! | `ending` | the end of the broker: idle, or on request |
//! | `supervised` | the records of a supervised broker |
//! | `restart` | continues what a former process did |
//! | `replacement` | hands over to another program |
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
mod ending;
pub(crate) mod event_loop;
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
mod runner;
mod supervised;
mod timers;
mod turns;

pub(crate) use supervised::{Supervised, check_state};
