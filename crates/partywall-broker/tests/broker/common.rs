//! A broker in a thread with a short settle time, and the requests of raw clients.

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use partywall_broker::{Config, Exit};
use partywall_harness::World;
use partywall_os::dir::{DirLock, PrivateDir};
use partywall_wire::{Answer, Commit, Lifetime, Limit, LimitHolder, Opened, Refusal, Table};

pub(crate) use partywall_harness::{
    eventually,
    wire::{Client, Framed, called, open, shake_hands, shake_hands_as, with_facts},
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

    /// Starts a broker that ends once it has been idle for `idle_exit`, but not before the returned lock is dropped.
    /// Without the lock, the broker might be gone before the test's first step.
    pub(crate) fn with_idle_exit(idle_exit: Duration) -> (Self, DirLock) {
        let mut lock = None;
        let broker = Self::with(|config| {
            config.idle_exit = Some(idle_exit);
            config.starter_holds_lock = true;
            let directory = PrivateDir::open(config.socket.parent().unwrap(), true).unwrap();
            lock = directory.lock(Instant::now()).unwrap();
        });
        (broker, lock.expect("the directory is new"))
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

/// A commit as that of [`host_commit`], which stays.
pub(crate) fn kept(name: &str, chunks: &[u64]) -> Commit {
    with_facts(host_commit(name, chunks), |facts| facts.lifetime = Lifetime::Kept)
}

pub(crate) fn opened(outcome: Result<Answer, Refusal>) -> Opened {
    match outcome {
        Ok(Answer::Opened(opened)) => opened,
        other => panic!("{other:?}"),
    }
}

/// Returns the refusal because of a limit of which this process has `held`.
pub(crate) fn full(limit: Limit, allowed: u64, held: u64) -> Refusal {
    let uid = rustix::process::geteuid().as_raw();
    let holder = LimitHolder { pid: std::process::id(), uid, held };
    let holders = if held > 0 { vec![holder] } else { Vec::new() };
    Refusal::Limit { limit, allowed, needed: allowed + 1, holders }
}

/// Returns a socket whose last close lasts until the other end is closed.
pub(crate) fn slow_to_close() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while !matches!(socket.write(&[0; 1 << 16]), Err(error) if error.kind() == ErrorKind::WouldBlock) {}
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(600))).unwrap();
    (socket.into(), other)
}
