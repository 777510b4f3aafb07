//! Poll tasks: the service thread polls them periodically, for words whose changes wake no thread.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use partywall_os::lock::IgnorePoison;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};

/// A task that is polled until it is over.
///
/// Each call returns the pause until the next call, or `None` when the task is over. After [`PollReason::Closing`] the
/// task is over in any case.
///
/// A poll task must not block on a lock that is held for long, on the broker, or on the driver, because streams of this
/// process may wait for the service thread. Blocking work is a [background job](crate::completion::Worker).
type PollTask = Box<dyn FnMut(PollReason) -> Option<Duration> + Send>;

/// Why a task is polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollReason {
    /// Its pause is over.
    Due,
    /// The connection ends, so no thread may wait for the task any longer.
    Closing,
}

/// The poll tasks of a connection, as seen by threads that add one.
pub(crate) struct PollTasks {
    added: Mutex<Added>,
    /// Readable while a wake-up of the service thread is pending.
    wake: OwnedFd,
}

#[derive(Default)]
struct Added {
    tasks: Vec<Scheduled>,
    /// True if the service thread has ended, or will end without reading this again.
    is_over: bool,
}

struct Scheduled {
    at: Instant,
    task: PollTask,
}

/// The poll tasks that the service thread has taken over.
#[derive(Default)]
pub(crate) struct Schedule(Vec<Scheduled>);

impl PollTasks {
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("making the service thread's eventfd", e))?;
        Ok(Self { added: Mutex::default(), wake })
    }

    /// Makes the service thread poll `task`, for the first time after `pause`. Once the connection has ended, polls it
    /// here, once.
    pub(crate) fn add(&self, pause: Duration, mut task: impl FnMut(PollReason) -> Option<Duration> + Send + 'static) {
        let mut added = self.lock();
        if added.is_over {
            drop(added);
            task(PollReason::Closing);
            return;
        }
        added.tasks.push(Scheduled { at: Instant::now() + pause, task: Box::new(task) });
        drop(added);
        self.wake();
    }

    /// Wakes the service thread.
    pub(super) fn wake(&self) {
        // Fails only if so many wake-ups are pending that the thread wakes up in any case.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Readable while a wake-up of the service thread is pending.
    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Clears all wake-ups so far.
    pub(super) fn clear_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn lock(&self) -> MutexGuard<'_, Added> {
        self.added.lock().ignore_poison()
    }
}

impl fmt::Debug for PollTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollTasks").finish_non_exhaustive()
    }
}

impl Schedule {
    /// Polls the tasks that are due. Returns the time at which the next one is due.
    pub(crate) fn run(&mut self, poll_tasks: &PollTasks) -> Option<Instant> {
        self.0.append(&mut poll_tasks.lock().tasks);
        // Only the tasks that are due at this moment, so that a task that is always due does not occupy the thread.
        let now = Instant::now();
        self.0.retain_mut(|Scheduled { at, task }| {
            if *at > now {
                return true;
            }
            let pause = task(PollReason::Due);
            *at = Instant::now() + pause.unwrap_or_default();
            pause.is_some()
        });
        self.0.iter().map(|scheduled| scheduled.at).min()
    }

    /// Polls every task for the last time. A task that is added later is polled immediately, by the thread that adds
    /// it.
    pub(crate) fn end(mut self, poll_tasks: &PollTasks) {
        let mut added = poll_tasks.lock();
        added.is_over = true;
        self.0.append(&mut added.tasks);
        drop(added);
        for Scheduled { mut task, .. } in self.0 {
            task(PollReason::Closing);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use partywall_os::socket;

    use super::*;

    #[test]
    fn tasks_are_polled_until_they_are_over() {
        let poll_tasks = PollTasks::new().unwrap();
        let mut schedule = Schedule::default();
        let (sender, receiver) = mpsc::channel();
        for name in ["late", "early"] {
            let sender = sender.clone();
            let mut times = 0;
            let pause = if name == "late" { Duration::from_secs(1000) } else { Duration::ZERO };
            poll_tasks.add(pause, move |reason| {
                times += 1;
                sender.send((name, reason)).unwrap();
                (times < 2).then_some(Duration::ZERO)
            });
        }
        assert!(schedule.run(&poll_tasks).is_some());
        schedule.run(&poll_tasks);
        let next = schedule.run(&poll_tasks).unwrap();
        assert!(next > Instant::now() + Duration::from_secs(500), "only the late one is left");
        schedule.end(&poll_tasks);
        poll_tasks.add(Duration::from_secs(1000), move |reason| {
            sender.send(("too late", reason)).unwrap();
            None
        });
        let polls: Vec<_> = receiver.try_iter().collect();
        let due = PollReason::Due;
        let closing = PollReason::Closing;
        assert_eq!(polls, [("early", due), ("early", due), ("late", closing), ("too late", closing)]);
    }

    #[test]
    fn always_due_task_does_not_occupy_the_thread() {
        let poll_tasks = PollTasks::new().unwrap();
        let mut schedule = Schedule::default();
        poll_tasks.add(Duration::ZERO, |_| Some(Duration::ZERO));
        for _ in 0..10 {
            assert!(schedule.run(&poll_tasks).unwrap() <= Instant::now());
        }
    }

    #[test]
    fn adding_a_task_wakes_the_thread() {
        let poll_tasks = Arc::new(PollTasks::new().unwrap());
        let is_woken = || socket::wait_any([poll_tasks.wake_fd()], Some(Instant::now())).unwrap().is_some();
        assert!(!is_woken());
        poll_tasks.add(Duration::ZERO, |_| None);
        assert!(is_woken());
        poll_tasks.clear_wake();
        assert!(!is_woken());
    }
}
