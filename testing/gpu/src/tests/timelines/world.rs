//! The world of the scenes: their own broker, and this program as another process that follows commands.

use std::{process::Command, sync::Arc, time::Duration};

use partywall::{Domain, Gpu};
use partywall_harness::Actor;

use crate::tests::world::{self, Broker};

pub(crate) use partywall_harness::{eventually, next_order};
pub(crate) use world::say;

/// The timeout of short steps. A test that takes longer is killed with its processes.
pub(crate) const TIMEOUT: Duration = world::TIMEOUT;

/// A broker without members. Dropping it ends the broker.
pub(crate) struct World(Broker);

impl World {
    pub(crate) fn new() -> Self {
        let broker = Broker::new();
        // Starts the broker.
        broker.connect().unwrap();
        Self(broker)
    }

    pub(crate) fn connect(&self) -> Domain {
        Domain::options().socket(self.0.socket()).start(false).connect().unwrap()
    }

    /// Starts this program as another process that plays `role`, and waits until it is ready.
    pub(crate) fn play(&self, role: &str) -> Actor {
        self.play_with(role, |_| ())
    }

    /// Starts a process as [`World::play`] does, after a change to the command.
    pub(crate) fn play_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Actor {
        self.0.play(&format!("{}{role}", super::ROLE), &[], change)
    }
}

/// Returns the first GPU of this process.
pub(crate) fn gpu(domain: &Domain) -> Arc<Gpu> {
    domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap()
}

/// Returns whether `body` returns true in a forked child, which then exits.
pub(crate) fn in_a_child(body: impl FnOnce() -> bool) -> bool {
    crate::raw::in_fork(|| u8::from(body())).unwrap() == 1
}
