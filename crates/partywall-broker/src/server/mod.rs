//! Between the registry and the world: sockets, file descriptors, clocks, processes.
//!
//! [`event_loop::Server`] owns one value of each part. A part changes its own fields alone; what concerns several of
//! them, because the registry has to be asked, is written on the server.
//!
//! | part | contains |
//! |---|---|
//! | [`event_loop`] | the loop, and how it is set up |
//! | `reactor`, `timers` | what the kernel reports, and when the broker wakes up by itself |
//! | `acceptor` | the listening socket and unauthenticated connections |
//! | `admission` | handshakes: seats, operators, members that come back |
//! | `peers` | connections, members, and what waits for them |
//! | `connection` | bytes and file descriptors of one client, in and out, within bounds |
//! | `membership` | who a client is, and the proof that it is dead |
//! | `in_flight` | descriptors that clients have not read yet |
//! | `turns` | whose messages are read and done next |
//! | `requests` | a member's requests on their way to the registry |
//! | `runner` | carries out the registry's effects |
//! | `control` | control memory, which the broker shares with all members |
//! | `fds` | file descriptors: what they are, who keeps them |
//! | `reclaimer` | closes file descriptors off the loop |
//! | `departures` | connections that end, processes that exit, and what they prove together |
//! | `ending` | how the broker ends: idle, or asked to |
//! | `translate` | between the wire's messages and the registry's |
//! | `ids` | tables by our own numbers |

mod acceptor;
mod admission;
mod connection;
mod control;
mod departures;
mod ending;
pub(crate) mod event_loop;
mod fds;
mod ids;
mod in_flight;
mod membership;
mod peers;
mod reactor;
mod reclaimer;
mod requests;
mod runner;
mod timers;
mod translate;
mod turns;
