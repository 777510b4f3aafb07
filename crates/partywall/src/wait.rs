//! How long calls wait, and what ends a wait early.

use std::{
    cell::Cell,
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use crate::error::Error;

/// How long a call waits, and what cancels the wait.
///
/// Every call that waits takes one. A [`Duration`] is a timeout, an [`Instant`] a deadline; either can be cancelled by
/// a flag or a closure. A timeout that the clock cannot represent, such as [`Duration::MAX`], never ends.
///
/// ```no_run
/// use std::{sync::atomic::AtomicBool, time::{Duration, Instant}};
/// use partywall::{Error, Subscriber, Wait};
///
/// # fn receive(subscriber: &Subscriber, interrupted: &AtomicBool) -> partywall::Result<()> {
/// let sample = subscriber.recv(Duration::from_secs(1))?;
/// let sample = subscriber.recv(Instant::now() + Duration::from_secs(1))?;
/// match subscriber.recv(Wait::from(Duration::MAX).cancelled_by(interrupted)) {
///     Err(Error::Cancelled { .. }) => println!("interrupted"),
///     received => drop(received?),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
#[must_use = "a wait does nothing until a call takes it"]
pub struct Wait<'a> {
    limit: WaitLimit,
    cancel: Option<&'a dyn Cancel>,
}

/// Something that cancels a [`Wait`]: a flag that is set, or a closure that returns true.
pub trait Cancel {
    /// Returns whether the wait is cancelled. A waiting call asks at least every 100 ms, on the waiting thread and
    /// without holding locks; once this has returned true, the call does not ask again.
    fn is_cancelled(&self) -> bool;
}

#[derive(Debug, Clone, Copy)]
enum WaitLimit {
    Timeout(Duration),
    Deadline(Instant),
    /// A wait that began earlier and goes on.
    Begun(Instant, Duration),
}

/// A wait that has begun.
pub(crate) struct Waiting<'a> {
    start: Instant,
    timeout: Duration,
    cancel: Option<&'a dyn Cancel>,
    /// `cancel` has returned true.
    cancelled: Cell<bool>,
}

impl<'a> Wait<'a> {
    /// Ends the wait with [`Error::Cancelled`] as soon as `cancel` returns true. A call that does not have to wait does
    /// not ask `cancel`.
    pub fn cancelled_by(mut self, cancel: &'a impl Cancel) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// Starts the timeout.
    pub(crate) fn begin(self) -> Waiting<'a> {
        let now = Instant::now();
        let (start, timeout) = match self.limit {
            WaitLimit::Timeout(timeout) => (now, timeout),
            WaitLimit::Deadline(deadline) => (now, deadline.saturating_duration_since(now)),
            WaitLimit::Begun(start, timeout) => (start, timeout),
        };
        Waiting { start, timeout, cancel: self.cancel, cancelled: Cell::new(false) }
    }
}

impl<'a> Waiting<'a> {
    /// Returns how much time is left at `now`; `None` once the wait is over or cancelled.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        let left = self.timeout.saturating_sub(now.saturating_duration_since(self.start));
        (!left.is_zero() && !self.is_cancelled()).then_some(left)
    }

    /// Returns the error of a wait that is over; `what` names the event that did not happen.
    pub(crate) fn error(&self, what: String) -> Error {
        if self.cancelled.get() { Error::Cancelled { what } } else { Error::Timeout { what, after: self.timeout } }
    }

    /// Returns whether [`left`](Self::left) has found the wait cancelled.
    pub(crate) fn was_cancelled(&self) -> bool {
        self.cancelled.get()
    }

    /// Returns when the wait began.
    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    /// Returns the timeout of the whole wait.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the rest of the wait, for the next call.
    pub(crate) fn resume(self) -> Wait<'a> {
        Wait { limit: WaitLimit::Begun(self.start, self.timeout), cancel: self.cancel }
    }

    fn is_cancelled(&self) -> bool {
        if !self.cancelled.get() {
            self.cancelled.set(self.cancel.is_some_and(Cancel::is_cancelled));
        }
        self.cancelled.get()
    }
}

impl From<Duration> for Wait<'_> {
    fn from(timeout: Duration) -> Self {
        Self { limit: WaitLimit::Timeout(timeout), cancel: None }
    }
}

impl From<Instant> for Wait<'_> {
    fn from(deadline: Instant) -> Self {
        Self { limit: WaitLimit::Deadline(deadline), cancel: None }
    }
}

impl<F: Fn() -> bool> Cancel for F {
    fn is_cancelled(&self) -> bool {
        self()
    }
}

impl Cancel for AtomicBool {
    fn is_cancelled(&self) -> bool {
        self.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Wait<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait").field("limit", &self.limit).field("can_be_cancelled", &self.cancel.is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn wait_ends_at_its_timeout() {
        let waiting = Wait::from(LONG).begin();
        assert!(waiting.left(waiting.start()).is_some_and(|left| left == LONG));
        assert!(waiting.left(waiting.start() + LONG).is_none());
        assert!(matches!(waiting.error(String::new()), Error::Timeout { after: LONG, .. }));
        let waiting = Wait::from(Instant::now()).begin();
        assert!(waiting.left(Instant::now()).is_none(), "the deadline has passed");
        assert!(Wait::from(Duration::MAX).begin().left(Instant::now() + LONG).is_some(), "this one never ends");
    }

    #[test]
    fn cancelled_wait_stays_cancelled() {
        let once = Cell::new(true);
        let cancel = || once.take();
        let waiting = Wait::from(LONG).cancelled_by(&cancel).begin();
        assert!(waiting.left(Instant::now()).is_none() && waiting.left(Instant::now()).is_none());
        assert!(matches!(waiting.error(String::new()), Error::Cancelled { .. }));
    }

    #[test]
    fn resumed_wait_keeps_its_start() {
        let flag = AtomicBool::new(false);
        let waiting = Wait::from(LONG).cancelled_by(&flag).begin();
        let start = waiting.start();
        let resumed = waiting.resume();
        let resumed = resumed.begin();
        assert_eq!(resumed.left(start), Some(LONG));
        flag.store(true, Ordering::Relaxed);
        assert_eq!(resumed.left(start), None);
    }
}
