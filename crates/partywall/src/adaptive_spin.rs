//! Adaptive spinning: a waiter polls for a few microseconds before it sleeps, if polling has paid off recently.
//!
//! Waking a sleeping thread takes the kernel longer than many of the awaited events take. Polling avoids that, but pays
//! off only if the other process runs on another processor meanwhile. The only evidence for that is whether recent
//! polling has paid off.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

/// Decides for one kind of wait whether to spin, from how often spinning has paid off.
///
/// After [`MOST_CREDIT`] useless spins in a row it stops spinning, and then only every [`RETRY`]th wait spins.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    credit: AtomicU32,
    waits: AtomicU32,
    /// Number of polls between two reads of the clock.
    batch: u32,
}

impl AdaptiveSpin {
    /// Returns a spin for waits whose polls cost less than reading the clock, such as reads of shared memory.
    pub(crate) fn on_memory() -> Self {
        Self::new(16)
    }

    /// Returns a spin for waits whose polls are system calls.
    pub(crate) fn on_socket() -> Self {
        Self::new(1)
    }

    fn new(batch: u32) -> Self {
        Self { credit: AtomicU32::new(MOST_CREDIT), waits: AtomicU32::new(0), batch }
    }

    /// Polls until `done` returns true, for at most [`MAX_SPIN`] or `timeout` from `start` on.
    ///
    /// Returns `None` if `done` was true; otherwise the time at which polling stopped, so that the caller need not read
    /// the clock.
    pub(crate) fn spin(&self, start: Instant, timeout: Duration, mut done: impl FnMut() -> bool) -> Option<Instant> {
        let until = start + MAX_SPIN.min(timeout);
        // The counts are hints, so it does not matter if threads overwrite each other's counts.
        let waits = self.waits.load(Ordering::Relaxed).wrapping_add(1);
        self.waits.store(waits, Ordering::Relaxed);
        let credit = self.credit.load(Ordering::Relaxed);
        if credit == 0 && !waits.is_multiple_of(RETRY) {
            return Some(start);
        }
        let stopped = loop {
            if (0..self.batch).any(|_| {
                done() || {
                    std::hint::spin_loop();
                    false
                }
            }) {
                break None;
            }
            let now = Instant::now();
            if now >= until {
                break Some(now);
            }
        };
        let paid_off = stopped.is_none();
        let credit = if paid_off { (credit + 1).min(MOST_CREDIT) } else { credit.saturating_sub(1) };
        self.credit.store(credit, Ordering::Relaxed);
        stopped
    }
}

/// The longest spin: a few times as long as a wake-up (3.4 µs, measured) or an answer of the broker (6 µs) takes.
const MAX_SPIN: Duration = Duration::from_micros(20);

/// Number of waits in a row without success before spinning stops.
const MOST_CREDIT: u32 = 4;

/// Once spinning has stopped, one in this many waits spins again. With one in 64, useless spinning took a tenth of the
/// time of a hand-over on one processor (measured). A thousand waits are over within milliseconds.
const RETRY: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn useless_spinning_stops_and_is_retried() {
        let adaptive = AdaptiveSpin::on_memory();
        let polled = |_: &u32| {
            let mut polled = false;
            let start = Instant::now();
            let stopped = adaptive.spin(start, LONG, || {
                polled = true;
                false
            });
            assert!(stopped.is_some_and(|stopped| if polled { stopped >= start + MAX_SPIN } else { stopped == start }));
            polled
        };
        assert_eq!((0..RETRY * 2).filter(polled).count(), MOST_CREDIT as usize + 2);
        // The last wait spun without success, so the next retry is as far away as possible.
        let mut waits = 1..=RETRY;
        assert!(waits.any(|_| adaptive.spin(Instant::now(), LONG, || true).is_none()) && waits.is_empty());
        assert!(adaptive.spin(Instant::now(), LONG, || true).is_none(), "it paid off, so it goes on");
    }

    #[test]
    fn spinning_ends_with_the_timeout() {
        for adaptive in [AdaptiveSpin::on_memory(), AdaptiveSpin::on_socket()] {
            let start = Instant::now();
            let mut polls = 0;
            let stopped = adaptive.spin(start, Duration::ZERO, || {
                polls += 1;
                false
            });
            assert!(stopped.is_some_and(|stopped| stopped >= start) && polls == adaptive.batch);
        }
    }
}
