//! Adaptive spinning: a waiter polls for a few microseconds before it sleeps, if polling has paid off recently.
//!
//! A thread that sleeps until another process has done something is woken by the kernel, which takes longer than many of
//! the things that are waited for. Polling avoids that, but only pays off where the other process runs on another processor
//! meanwhile. Whether it does shows in whether polling pays off.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

/// Decides for one kind of wait whether to spin, from how often spinning has paid off.
///
/// After [`MOST_CREDIT`] waits in a row for which spinning was in vain it stops, and every [`RETRY`]th wait spins again.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    credit: AtomicU32,
    waits: AtomicU32,
    /// Polls between two looks at the clock.
    batch: u32,
}

impl AdaptiveSpin {
    /// For waits whose polls cost less than a look at the clock, as reading shared memory does.
    pub(crate) fn on_memory() -> Self {
        Self::new(16)
    }

    /// For waits whose polls are system calls.
    pub(crate) fn on_socket() -> Self {
        Self::new(1)
    }

    fn new(batch: u32) -> Self {
        Self { credit: AtomicU32::new(MOST_CREDIT), waits: AtomicU32::new(0), batch }
    }

    /// Polls until `done` returns true; at most for [`MAX_SPIN`], or `timeout`, from `start` on.
    ///
    /// Returns `None` if it is done; otherwise the time at which polling stopped, which spares the caller a look at the clock.
    pub(crate) fn spin(&self, start: Instant, timeout: Duration, mut done: impl FnMut() -> bool) -> Option<Instant> {
        let until = start + MAX_SPIN.min(timeout);
        // Hints: that threads overwrite each other's counts does not matter.
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

/// How long to spin: a few times what it takes to be woken (3.4 µs, measured), or to be answered by the broker (6 µs).
const MAX_SPIN: Duration = Duration::from_micros(20);

/// Waits in a row for which spinning has to be in vain before it stops.
const MOST_CREDIT: u32 = 4;

/// Once spinning has stopped, one wait in so many spins again. With one in 64, spinning in vain was a tenth of the time of a
/// hand-over on one processor (measured); a thousand waits are over within milliseconds.
const RETRY: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn spinning_in_vain_stops_and_is_tried_again() {
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
        // The last wait spun in vain, so the next retry is as far away as it can be.
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
