//! The Partywall broker: a daemon that keeps names, versions, leases and memory alive for the processes that share
//! them, and reclaims what dead processes held.
//!
//! The broker holds file descriptors. It never maps, reads or writes the memory that members donate, and it links no
//! CUDA. A GPU fault cannot reach it, and it runs on machines without a GPU. It maps only the control memory that it
//! creates itself. There it ends waits for dead writers and returns the permits and blocks of dead members. The data
//! path does not pass through it. It serves its own user, and others only if [`Config::admission`] names them. It
//! listens at a Unix socket in a directory that only its own user can change.
//!
//! | module | contains | rule |
//! |---|---|---|
//! | `registry` | names, versions, leases, claims, waiting requests, timelines, semaphores, members | pure: events in, effects out |
//! | `server` | sockets, file descriptors, control memory, clocks, proofs of death | no decision that the registry could make |
//! | [`supervisor`] | the process that restarts a broker which dies | one thread; allocates and opens nothing once the worker runs |
//! | [`replacement`] | another program continues as the broker | refused before anything changes, or the former program can still go on |
//! | [`memory_check`] | a child process finds out whether the memory of a GPU or of a NUMA node is lost | the only code of the broker's program that needs CUDA runs there |
//! | `page` | words that the supervisor shares with its workers | each has one writer at a time |
//! | `journal` | what a restarted broker continues with | knows neither the registry nor the server |
//! | `bind` | the place where members look for the broker | replaces only what is provably dead |
//! | [`log`] | a log file of bounded size | independent of the rest |
//!
//! One thread does everything except closing file descriptors. Closing may stall in the GPU's driver, so a second
//! thread does it. A broker that is served by [`Broker::bind`] ends with its process. Under a
//! [`Supervisor`](supervisor::Supervisor) another process continues what a dead one did.
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
mod journal;
pub mod log;
pub mod memory_check;
mod page;
mod registry;
pub mod replacement;
mod server;
pub mod supervisor;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use partywall_os::supervision::LeftOpen;

pub use bind::StartError;
pub use config::{Admission, Config, Limits, UserLimits};
pub use page::{Exit, RunError};

/// A listening broker. Dropping it without [`Broker::run`] leaves the socket's file behind, as a crash would.
#[derive(Debug)]
pub struct Broker {
    server: server::Server,
}

impl Broker {
    /// Listens where members look for the broker of `config`'s domain. Raises the process's limit of open files to its
    /// maximum.
    ///
    /// # Errors
    /// [`StartError`] if another broker listens there or the place is unsafe. A failed bind changes nothing.
    pub fn bind(config: Config) -> Result<Self, StartError> {
        let limits = config.limits.resolve(partywall_os::process::raise_fd_limit())?;
        let bound = bind::BoundSocket::for_broker(&config, None)?;
        Ok(Self { server: server::Server::new(config, limits, bound, None)? })
    }

    /// Serves what a supervisor has bound.
    fn of_worker(
        config: Config,
        limits: config::Resolved,
        bound: bind::BoundSocket,
        supervised: server::Supervised,
        left: LeftOpen,
    ) -> Result<Self, StartError> {
        let server = server::Server::new(config, limits, bound, Some((supervised, left)))?;
        Ok(Self { server })
    }

    /// Checks whether [`Broker::bind`] can succeed, and changes nothing except the limit of open files.
    ///
    /// # Errors
    /// As [`Broker::bind`].
    pub fn check(config: &Config) -> Result<(), StartError> {
        config.limits.resolve(partywall_os::process::raise_fd_limit())?;
        bind::check(&config.socket, config.admission.entry(bind::own_user()))
    }

    /// Serves until a member or a [`StopHandle`] ends the broker, or until it has been idle for [`Config::idle_exit`].
    /// Then removes the socket's file.
    ///
    /// # Errors
    /// [`RunError`] if waiting for events fails.
    pub fn run(self) -> Result<Exit, RunError> {
        self.server.run()
    }

    /// Returns a handle by which another thread or a signal handler ends the broker.
    ///
    /// # Errors
    /// As dup(2).
    pub fn stop_handle(&self) -> io::Result<StopHandle> {
        Ok(StopHandle(self.server.stopper().try_clone_to_owned()?))
    }

    /// Returns the random number by which members recognise this broker.
    pub fn instance(&self) -> u64 {
        self.server.instance()
    }
}

/// Ends a broker from outside: by [`StopHandle::stop`], or by writing any byte to the file descriptor, which never
/// blocks. `signal_hook::low_level::pipe::register` accepts the handle directly.
#[derive(Debug)]
pub struct StopHandle(OwnedFd);

impl StopHandle {
    /// Ends the broker, even if members and names exist. Does nothing if it has ended.
    pub fn stop(&self) {
        // If the pipe is full, a request is pending; if it is broken, the broker has ended.
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
