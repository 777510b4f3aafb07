//! The broker as its members meet it: real sockets, real processes, real deaths.
#![allow(clippy::unwrap_used, reason = "the helpers of tests may, as tests may")]

mod bad_input;
mod common;
mod deaths;
mod departures;
mod handshakes;
mod legacy;
mod places;
mod pools;
mod roles;
mod seats;
mod semaphores;
mod serving;
mod simulation;
mod timelines;
mod unread;
