//! Between the registry and the world: sockets, file descriptors, clocks, processes.
//!
//! | module | contains |
//! |---|---|
//! | [`event_loop`] | the loop: waits for the kernel, feeds the registry, carries out its effects |
//! | `admission` | new connections: accepting, refusing, shaking hands |
//! | `requests` | a member's requests in, the registry's effects out |
//! | `departures` | connections that end, processes that exit, and what they prove together |
//! | `ending` | how the broker ends: idle, or asked to |
//! | `connection` | bytes and file descriptors of one client, in and out, within bounds |
//! | `membership` | who a client is, and the proof that it is dead |
//! | `control` | memory that the broker shares with all members |
//! | `fds` | donated file descriptors: what they are, who keeps them |
//! | `translate` | between the wire's types and the registry's |
//! | `reclaimer` | closes file descriptors off the loop |
//! | `in_flight` | descriptors that clients have not read yet |
//! | `ids` | tables by our own numbers |
//! | `timers` | what is to happen later |

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
mod reclaimer;
mod requests;
mod timers;
mod translate;
