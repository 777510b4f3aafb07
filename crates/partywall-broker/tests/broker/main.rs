// Holds 35.
//! Tests of the broker over real sockets, with real processes and real deaths.
#![allow(clippy::unwrap_used, reason = "test helpers may unwrap, as tests may")]

mod admission;
mod attachments;
mod bad_input;
mod common;
mod deaths;
mod departures;
mod handshakes;
mod hostile;
mod legacy;
mod places;
mod pools;
mod roles;
mod semaphores;
mod serving;
mod simulation;
mod timelines;
mod unread;
