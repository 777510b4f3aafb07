//! The watcher: the process that starts a domain's MPS daemon, and stops it when no process needs it any more.
//!
//! It stops the daemon once the daemon has had no client and no [hold](super::MpsHold) for a while. To stop it, the
//! watcher takes the lock of the directory and the one that excludes holds, and checks once more: a process that holds
//! the daemon afterwards waits, finds no daemon, and starts one.
//!
//! A watcher that is killed leaves the daemon running, with all its clients. The next start finds a daemon without a
//! watcher and gives it a new one. A watcher whose daemon ends, or is killed, removes the daemon's sockets and ends.

use std::{
    fs,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};

use super::{
    CONTROL_SOCKET,
    control::{PROGRAM, end_of},
    daemon::MpsDaemon,
    directory::WatcherLock,
    is_served,
};
use crate::error::{Error, ErrorKind, MpsFault, Result, seconds};

/// How a watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Watched {
    /// Another process watches the daemon.
    ByAnother,
    /// The daemon had neither clients nor holds, and was stopped.
    Idle,
    /// The daemon has ended.
    Ended,
}

impl MpsDaemon {
    /// Starts the daemon if it does not run, and watches it until it ends or has been idle for `idle_exit`. Calls
    /// `ready` when the daemon answers. For the program `partywall`, in a process that has no other children: it waits
    /// for all, and a daemon that does not answer is killed with them.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn watch(&self, ready: impl FnOnce()) -> Result<Watched> {
        // The daemon and its servers leave their parents, and then become children of this process.
        set_child_subreaper(Some(getpid())).map_err(|errno| Error::system("adopting the daemon", errno))?;
        let lock = self.directory.lock(Instant::now() + self.timeout)?;
        let control = self.directory.control();
        let watcher = if is_served(&control.pipes) {
            self.answer(&control)?;
            match self.directory.watcher() {
                Some(_) => None,
                None => self.directory.lock_watcher()?,
            }
        } else {
            self.directory.prepare()?;
            self.begin().inspect_err(|_| {
                kill_children();
                // An error of this leaves files of a daemon that has ended, which the next start clears.
                let _ = self.directory.remove();
            })?;
            self.directory.lock_watcher()?
        };
        drop(lock);
        ready();
        match watcher {
            Some(watcher) => self.keep(watcher),
            None => Ok(Watched::ByAnother),
        }
    }

    /// Starts the daemon in its empty directory, and waits until it answers.
    fn begin(&self) -> Result<()> {
        let control = self.directory.control();
        control.start(Instant::now() + self.timeout)?;
        self.answer(&control).map_err(|error| match &error {
            Error::Mps(MpsFault::NoAnswer { after, .. }) => {
                let said = end_of(&control.logs.join("control.log"));
                let said =
                    if said.is_empty() { "its log is empty".to_owned() } else { format!("its log ends: {said}") };
                let why = format!("it does not answer {PROGRAM} within {}; {said}", seconds(*after));
                let advice = "try a longer --timeout; `nvidia-smi` must work first".to_owned();
                MpsFault::NotStarted { why, advice: Some(advice), kind: ErrorKind::TimedOut }.into()
            }
            _ => error,
        })
    }

    /// Watches a daemon that runs.
    fn keep(&self, watcher: WatcherLock) -> Result<Watched> {
        let control = self.directory.control();
        let mut idle_since: Option<Instant> = None;
        let mut next = Instant::now();
        loop {
            std::thread::sleep(STEP);
            let is_bereaved = reap();
            let is_gone = !control.pipes.join(CONTROL_SOCKET).exists();
            if (is_gone || is_bereaved) && !is_served(&control.pipes) {
                return Ok(self.leave(watcher));
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + POLL;
            match self.is_idle() {
                Some(true) => {
                    let since = *idle_since.get_or_insert_with(Instant::now);
                    if self.idle.is_some_and(|idle| since.elapsed() >= idle) && self.retire()? {
                        return Ok(Watched::Idle);
                    }
                }
                Some(false) => idle_since = None,
                // It does not answer.
                None if !is_served(&control.pipes) => return Ok(self.leave(watcher)),
                None => idle_since = None,
            }
        }
    }

    /// Returns whether the daemon has neither clients nor holds; `None` if it does not answer.
    fn is_idle(&self) -> Option<bool> {
        // The cheap question first: the other one starts programs.
        if self.directory.is_held() {
            return Some(false);
        }
        let status = self.status().ok().filter(|status| status.answers)?;
        Some(status.clients().is_empty())
    }

    /// Stops the daemon, unless a process needs it now. Returns whether it was stopped.
    fn retire(&self) -> Result<bool> {
        let Some(_lock) = self.directory.try_lock(Instant::now() + POLL)? else { return Ok(false) };
        let Some(unheld) = self.directory.lock_holds()? else { return Ok(false) };
        if !self.status().is_ok_and(|status| status.answers && status.clients().is_empty()) {
            return Ok(false);
        }
        self.end()?;
        reap();
        // `remove` takes the lock of the holds by itself. A process that comes in between holds a daemon that has
        // ended, keeps the directory, and starts another one once the lock of the directory is free.
        drop(unheld);
        self.directory.remove()?;
        Ok(true)
    }

    /// Clears the directory of a daemon that has ended by itself, unless another one is being started there.
    fn leave(&self, watcher: WatcherLock) -> Watched {
        // First, so that a start which waits for the lock gets a watcher.
        drop(watcher);
        let cleared = self.directory.exists().then(|| self.directory.try_lock(Instant::now()));
        if let Some(Ok(Some(_lock))) = cleared
            && !is_served(&self.pipes())
        {
            // The logs stay: they may say why. The next start clears them, and whatever stays here.
            let _ = self.directory.remove_pipes();
        }
        Watched::Ended
    }
}

/// Reaps children that have ended. Returns whether there were any.
fn reap() -> bool {
    let mut any = false;
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {
        any = true;
    }
    any
}

/// Kills all children: a daemon that did not answer, and its servers, which become children when it dies.
fn kill_children() {
    let deadline = Instant::now() + POLL;
    while Instant::now() < deadline {
        reap();
        let children = children();
        if children.is_empty() {
            return;
        }
        for child in children {
            // It was not reaped, so the pid is its own.
            let _ = kill_process(child, Signal::KILL);
        }
        std::thread::sleep(STEP);
    }
}

/// Returns the children of this process that were not reaped.
fn children() -> Vec<Pid> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids = lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// How often the watcher checks that its daemon runs.
const STEP: Duration = Duration::from_millis(100);

/// How often it asks the daemon for its clients.
const POLL: Duration = Duration::from_secs(1);
