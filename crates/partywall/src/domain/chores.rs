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
/// [errand](super::errands).
pub(crate) trait Chore: Send {
    /// Does it once. Returns when to do it again, or `None` when it is over. After [`Look::Last`] it is over.
    fn look(&mut self, look: Look) -> Option<Duration>;
}

impl<F: FnMut(Look) -> Option<Duration> + Send> Chore for F {
    fn look(&mut self, look: Look) -> Option<Duration> {
        self(look)
    }
}

/// Why a chore is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// It is time.
    InTurn,
    /// The connection ends: whoever waits for it must not wait any longer.
    Last,
}

/// The chores of a connection, as those see them who hand them in.
pub(crate) struct Chores {
    new: Mutex<New>,
    /// Rung to have the service thread look up.
    bell: OwnedFd,
}

#[derive(Default)]
struct New {
    chores: Vec<Due>,
    /// The service thread has ended, or will without looking here again.
    over: bool,
}

struct Due {
    at: Instant,
    chore: Box<dyn Chore>,
}

/// The chores that the service thread has taken over, the most urgent one first.
#[derive(Default)]
pub(super) struct Schedule {
    due: BinaryHeap<Due>,
}

impl Chores {
    pub(super) fn new() -> Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("making the service thread's eventfd", e))?;
        Ok(Self { new: Mutex::default(), bell })
    }

    /// Has the service thread do `chore`, for the first time after `pause`.
    pub(crate) fn add(&self, pause: Duration, mut chore: impl Chore + 'static) {
        let mut new = self.lock();
        if new.over {
            drop(new);
            chore.look(Look::Last);
            return;
        }
        new.chores.push(Due { at: Instant::now() + pause, chore: Box::new(chore) });
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

impl fmt::Debug for Chores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chores").finish_non_exhaustive()
    }
}

impl Schedule {
    /// Does what is due; returns when there is something to do again.
    pub(super) fn run(&mut self, chores: &Chores) -> Option<Instant> {
        self.due.extend(std::mem::take(&mut chores.lock().chores));
        // What is due at this moment, and not what becomes due while it is done: nobody may keep the thread.
        let now = Instant::now();
        let mut again = Vec::new();
        while self.due.peek().is_some_and(|due| due.at <= now) {
            let Some(Due { mut chore, .. }) = self.due.pop() else { break };
            if let Some(pause) = chore.look(Look::InTurn) {
                again.push(Due { at: Instant::now() + pause, chore });
            }
        }
        self.due.extend(again);
        self.due.peek().map(|due| due.at)
    }

    /// Does everything for the last time, and whatever is handed in from now on at once.
    pub(super) fn end(mut self, chores: &Chores) {
        let mut new = chores.lock();
        new.over = true;
        self.due.extend(std::mem::take(&mut new.chores));
        drop(new);
        for mut due in self.due {
            due.chore.look(Look::Last);
        }
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap gives the largest first.
        other.at.cmp(&self.at)
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Due {}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use partywall_os::socket;

    use super::*;

    #[test]
    fn they_are_done_in_turn_until_they_are_over() {
        let chores = Chores::new().unwrap();
        let mut schedule = Schedule::default();
        let (sender, receiver) = mpsc::channel();
        for name in ["late", "early"] {
            let sender = sender.clone();
            let mut times = 0;
            let pause = if name == "late" { Duration::from_secs(1000) } else { Duration::ZERO };
            chores.add(pause, move |look| {
                times += 1;
                sender.send((name, look)).unwrap();
                (times < 2).then_some(Duration::ZERO)
            });
        }
        assert!(schedule.run(&chores).is_some());
        schedule.run(&chores);
        let next = schedule.run(&chores).unwrap();
        assert!(next > Instant::now() + Duration::from_secs(500), "only the late one is left");
        schedule.end(&chores);
        chores.add(Duration::from_secs(1000), move |look| {
            sender.send(("too late", look)).unwrap();
            None
        });
        let looks: Vec<_> = receiver.try_iter().collect();
        let in_turn = Look::InTurn;
        let last = Look::Last;
        assert_eq!(looks, [("early", in_turn), ("early", in_turn), ("late", last), ("too late", last)]);
    }

    #[test]
    fn one_that_is_always_due_keeps_nobody() {
        let chores = Chores::new().unwrap();
        let mut schedule = Schedule::default();
        chores.add(Duration::ZERO, |_| Some(Duration::ZERO));
        for _ in 0..10 {
            assert!(schedule.run(&chores).unwrap() <= Instant::now());
        }
    }

    #[test]
    fn handing_one_in_rings_the_bell() {
        let chores = Arc::new(Chores::new().unwrap());
        let rung = || socket::wait_any([chores.bell()], Some(Instant::now())).unwrap().is_some();
        assert!(!rung());
        chores.add(Duration::ZERO, |_| None);
        assert!(rung());
        chores.heard();
        assert!(!rung());
    }
}
