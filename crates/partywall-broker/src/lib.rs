//! The Partywall broker: a daemon that keeps names, versions, leases and memory alive for the processes that share
//! them, and takes back what the dead held.
//!
//! It holds file descriptors and knows what they are for. It never maps, reads or writes the memory that members give
//! it, and there is no CUDA in it: no fault of a GPU can reach it, and it runs the same on a machine without one. What
//! it maps is of its own making, and small: the words of timelines and semaphores, in which it ends the waits for the
//! dead and gives their permits back. The data path does not pass through it. It serves one user, over a Unix socket in
//! a directory that only this user enters.
//!
//! | module | contains | rule |
//! |---|---|---|
//! | `registry` | names, versions, leases, claims, waiting requests, timelines, semaphores, members | pure: events in, effects out |
//! | `server` | sockets, file descriptors, control memory, clocks, proofs of death | no decision that the registry could take |
//! | `bind` | the place where members look for the broker | replaces only what is provably dead |
//! | [`log`] | a log file that cannot grow beyond its size | knows nothing of the rest |
//!
//! One thread does everything but closing file descriptors, because the GPU's driver may stall in that; a second
//! thread does nothing else.
//!
//! ```no_run
//! use partywall_broker::{Broker, Config};
//!
//! let broker = Broker::bind(Config::new("/run/user/1000/partywall/default.sock", "default", "0.1.0"))?;
//! let exit = broker.run()?;
//! # let _ = exit;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod bind;
mod config;
pub mod log;
mod registry;
mod server;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

pub use bind::StartError;
pub use config::{Config, Limits};

/// A broker that listens. Dropping it without [`Broker::run`] leaves the socket's file behind, as a crash would.
#[derive(Debug)]
pub struct Broker {
    server: server::event_loop::Server,
}

impl Broker {
    /// Takes the place at which members look for the broker of `config`'s domain, and listens. The process's limit of
    /// open files is raised as far as it can be.
    ///
    /// # Errors
    /// [`StartError`] if another broker listens there, or the place must not be used; nothing has changed then.
    pub fn bind(config: Config) -> Result<Self, StartError> {
        Ok(Self { server: server::event_loop::Server::bind(config)? })
    }

    /// Serves until a member or a [`StopHandle`] ends it, or nobody needs it any more. The socket's file is gone then.
    ///
    /// # Errors
    /// [`RunError`] if the kernel no longer tells of events.
    pub fn run(self) -> Result<Exit, RunError> {
        self.server.run()
    }

    /// A handle by which another thread or a signal handler ends the broker.
    ///
    /// # Errors
    /// As dup(2).
    pub fn stop_handle(&self) -> io::Result<StopHandle> {
        Ok(StopHandle(self.server.stopper().try_clone_to_owned()?))
    }

    /// The number by which members recognise this broker, drawn at random.
    pub fn instance(&self) -> u64 {
        self.server.instance()
    }
}

/// Ends a broker from outside: as [`StopHandle::stop`], or by any byte written to the file descriptor, which never
/// blocks. `signal_hook::low_level::pipe::register` takes it as it is.
#[derive(Debug)]
pub struct StopHandle(OwnedFd);

impl StopHandle {
    /// Ends the broker, whatever is held. Does nothing if it has ended.
    pub fn stop(&self) {
        // A full pipe has been asked already, a broken one has no broker.
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &[0]));
    }
}

impl AsFd for StopHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<StopHandle> for OwnedFd {
    fn from(handle: StopHandle) -> Self {
        handle.0
    }
}

/// Why a broker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// A member asked for it.
    Stopped,
    /// A [`StopHandle`] was used.
    Signalled,
    /// Nobody needed it for as long as [`Config::idle_exit`] says.
    Idle,
}

/// The kernel no longer tells of events, so a broker could not go on.
#[derive(Debug, thiserror::Error)]
#[error("waiting for events: {0}")]
pub struct RunError(#[source] io::Error);
