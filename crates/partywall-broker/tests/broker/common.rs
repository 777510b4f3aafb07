//! A broker in a thread with a short settle time, and the requests of raw clients.

use std::path::PathBuf;
use std::time::Duration;

use partywall_broker::{Config, Exit};
use partywall_harness::World;
use partywall_wire::{Answer, Commit, Lifetime, Opened, Refusal, Table};

pub(crate) use partywall_harness::{
    eventually,
    wire::{Client, Framed, open, shake_hands, shake_hands_as},
};

/// A broker in a thread of this process.
pub(crate) struct TestBroker {
    pub(crate) socket: PathBuf,
    world: World,
}

impl TestBroker {
    pub(crate) fn start() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Self {
        let world = World::with(|config| {
            config.settle = Duration::from_millis(20);
            config.version = "0.0.0-test".into();
            change(config);
        });
        Self { socket: world.socket().to_path_buf(), world }
    }

    pub(crate) fn client(&self) -> Client {
        Client::join(&self.socket)
    }

    pub(crate) fn stop(&self) {
        self.world.stop();
    }

    /// Waits until the broker ends.
    pub(crate) fn exit(&mut self) -> Exit {
        self.world.exit()
    }
}

/// A commit of a table of five bytes that a client owns.
pub(crate) fn host_commit(name: &str, chunks: &[u64]) -> Commit {
    let table = Table::Inline(b"table".to_vec());
    partywall_harness::wire::host_commit(name, Lifetime::Owned, chunks.to_vec(), table)
}

pub(crate) fn opened(outcome: Result<Answer, Refusal>) -> Opened {
    match outcome {
        Ok(Answer::Opened(opened)) => opened,
        other => panic!("{other:?}"),
    }
}
