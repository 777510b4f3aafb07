//! A child process that a role forks before it opens CUDA, with memory that both map.

use std::{
    io::{self, Write},
    sync::atomic::AtomicU64,
    thread,
    time::{Duration, Instant},
};

use partywall_os::{map::SharedMap, memfd::Draft, process::fork_alone};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};

use crate::failure::{Doing, Failure};

/// What the child does with the shared memory.
pub(super) type Child = fn(&[AtomicU64]) -> Result<(), Failure>;

/// The parent's view of the child. Dropping it kills the child.
pub(super) struct Forked {
    pid: Pid,
    map: SharedMap,
    /// True if its end was waited for.
    ended: bool,
}

impl Forked {
    /// Forks this process, which has one thread yet.
    pub(super) fn start(child: Child) -> Result<Self, Failure> {
        let draft = Draft::create("partywall:fork", WORDS as u64 * 8);
        let map = draft.and_then(Draft::share).and_then(SharedMap::writable).doing(FORKING)?;
        let pid = fork_alone(|| {
            // Without the signal it would outlive a parent that is killed.
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            match child(words(&map)) {
                Ok(()) => 0,
                Err(failure) => {
                    let _ = writeln!(io::stderr(), "error: the forked child: {}", failure.message);
                    1
                }
            }
        });
        Ok(Self { pid: pid.doing(FORKING)?, map, ended: false })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns the memory that both processes map. At first all words are 0.
    pub(super) fn words(&self) -> &[AtomicU64] {
        words(&self.map)
    }

    /// Waits for the child's end. Returns whether it ended by itself, without a failure, within the limit.
    pub(super) fn ends(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.ended && Instant::now() < deadline {
            match waitpid(Some(self.pid), WaitOptions::NOHANG) {
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                Ok(Some((_, status))) => {
                    self.ended = true;
                    return status.exit_status() == Some(0);
                }
                Err(_) => break,
            }
        }
        false
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if !self.ended {
            // The pid is ours until the child has been waited for.
            let _ = kill_process(self.pid, Signal::KILL);
            let _ = waitpid(Some(self.pid), WaitOptions::empty());
        }
    }
}

fn words(map: &SharedMap) -> &[AtomicU64] {
    map.atomics(0, WORDS).expect("the map is writable and has so many words")
}

const FORKING: &str = "forking a child";

/// The words of the shared memory.
const WORDS: usize = 64;
