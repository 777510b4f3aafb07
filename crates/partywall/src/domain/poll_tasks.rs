//! What the service thread does by the clock: looking at words that wake nobody, and whatever follows from them.

use std::{
    collections::BinaryHeap,
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};

/// Something that is done now and then until it is over.
///
/// It must not wait: not for a lock that is held for long, not for the broker, not for the driver. What has to is an
/// [background job](crate::completion::Worker).
pub(crate) trait PollTask: Send {
    /// Does it once. Returns when to do it again, or `None` when it is over. After [`PollReason::Closing`] it is over.
    fn poll(&mut self, reason: PollReason) -> Option<Duration>;
}

impl<F: FnMut(PollReason) -> Option<Duration> + Send> PollTask for F {
    fn poll(&mut self, reason: PollReason) -> Option<Duration> {
        self(reason)
    }
}

/// Why a task is polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollReason {
    /// It is time.
    Due,
    /// The connection ends: whoever waits for it must not wait any longer.
    Closing,
}

/// The poll tasks of a connection, as those see them who hand them in.
pub(crate) struct PollTasks {
    new: Mutex<New>,
    /// Rung to have the service thread look up.
    bell: OwnedFd,
}

#[derive(Default)]
struct New {
    tasks: Vec<Scheduled>,
    /// The service thread has ended, or will without looking here again.
    over: bool,
}

struct Scheduled {
    at: Instant,
    task: Box<dyn PollTask>,
}

/// The poll tasks that the service thread has taken over, the most urgent one first.
#[derive(Default)]
pub(super) struct Schedule {
    due: BinaryHeap<Scheduled>,
}

impl PollTasks {
    pub(crate) fn new() -> Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("making the service thread's eventfd", e))?;
        Ok(Self { new: Mutex::default(), bell })
    }

    /// Has the service thread do `task`, for the first time after `pause`.
    pub(crate) fn add(&self, pause: Duration, mut task: impl PollTask + 'static) {
        let mut new = self.lock();
        if new.over {
            drop(new);
            task.poll(PollReason::Closing);
            return;
        }
        new.tasks.push(Scheduled { at: Instant::now() + pause, task: Box::new(task) });
        drop(new);
        self.ring();
    }

    /// Has the service thread look up from its sleep.
    pub(super) fn ring(&self) {
        // It fails only when it has been rung so often that it rings anyway.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Readable when it was rung.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Makes the bell silent again.
    pub(super) fn heard(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    fn lock(&self) -> MutexGuard<'_, New> {
        self.new.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PollTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollTasks").finish_non_exhaustive()
    }
}

impl Schedule {
    /// Does what is due; returns when there is something to do again.
    pub(super) fn run(&mut self, poll_tasks: &PollTasks) -> Option<Instant> {
        self.due.extend(std::mem::take(&mut poll_tasks.lock().tasks));
        // What is due at this moment, and not what becomes due while it is done: nobody may keep the thread.
        let now = Instant::now();
        let mut again = Vec::new();
        while self.due.peek().is_some_and(|due| due.at <= now) {
            let Some(Scheduled { mut task, .. }) = self.due.pop() else { break };
            if let Some(pause) = task.poll(PollReason::Due) {
                again.push(Scheduled { at: Instant::now() + pause, task });
            }
        }
        self.due.extend(again);
        self.due.peek().map(|due| due.at)
    }

    /// Does everything for the last time, and whatever is handed in from now on at once.
    pub(super) fn end(mut self, poll_tasks: &PollTasks) {
        let mut new = poll_tasks.lock();
        new.over = true;
        self.due.extend(std::mem::take(&mut new.tasks));
        drop(new);
        for mut due in self.due {
            due.task.poll(PollReason::Closing);
        }
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap gives the largest first.
        other.at.cmp(&self.at)
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Scheduled {}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use partywall_os::socket;

    use super::*;

    #[test]
    fn they_are_done_in_turn_until_they_are_over() {
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
    fn one_that_is_always_due_keeps_nobody() {
        let poll_tasks = PollTasks::new().unwrap();
        let mut schedule = Schedule::default();
        poll_tasks.add(Duration::ZERO, |_| Some(Duration::ZERO));
        for _ in 0..10 {
            assert!(schedule.run(&poll_tasks).unwrap() <= Instant::now());
        }
    }

    #[test]
    fn handing_one_in_rings_the_bell() {
        let poll_tasks = Arc::new(PollTasks::new().unwrap());
        let rung = || socket::wait_any([poll_tasks.bell()], Some(Instant::now())).unwrap().is_some();
        assert!(!rung());
        poll_tasks.add(Duration::ZERO, |_| None);
        assert!(rung());
        poll_tasks.heard();
        assert!(!rung());
    }
}
