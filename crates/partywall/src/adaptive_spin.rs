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
/// After [`USELESS`] useless spins in a row it stops spinning, and then only every [`RETRY`]th wait spins.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    credit: AtomicU32,
    waits: AtomicU32,
    /// Number of polls between two reads of the clock.
    batch: u32,
    /// The longest spin.
    limit: Duration,
    /// The credit that a useless spin takes away. A useful one adds 1, up to [`USELESS`] times as much.
    loss: u32,
}

impl AdaptiveSpin {
    /// Returns a spin for waits whose polls cost less than reading the clock, such as reads of shared memory. It lasts
    /// for a few times as long as a wake-up takes (3.4 µs, measured).
    pub(crate) fn on_memory() -> Self {
        Self::new(16, Duration::from_micros(20), 1)
    }

    /// Returns a spin for answers of the broker, whose polls are system calls.
    ///
    /// An answer takes 4 µs from a broker that runs, and 13 to 24 µs on the host of an H200 from one that has slept for
    /// 30 to 100 µs, as long as the driver takes to map memory (measured). A client that sleeps meanwhile gets it 5 to
    /// 9 µs later. A useless spin costs several times what a useful one saves, so four of five must pay off: they do not
    /// where the broker waits for the processor that spins.
    pub(crate) fn on_socket() -> Self {
        Self::new(1, Duration::from_micros(50), 4)
    }

    fn new(batch: u32, limit: Duration, loss: u32) -> Self {
        Self { credit: AtomicU32::new(USELESS * loss), waits: AtomicU32::new(0), batch, limit, loss }
    }

    /// Polls until `done` returns true, for at most the limit or `timeout` from `start` on.
    ///
    /// Returns `None` if `done` was true; otherwise the time at which polling stopped, so that the caller need not read
    /// the clock.
    pub(crate) fn spin(&self, start: Instant, timeout: Duration, mut done: impl FnMut() -> bool) -> Option<Instant> {
        let until = start + self.limit.min(timeout);
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
        let credit = if paid_off { (credit + 1).min(USELESS * self.loss) } else { credit.saturating_sub(self.loss) };
        self.credit.store(credit, Ordering::Relaxed);
        stopped
    }
}

/// Number of spins in a row without success before spinning stops.
const USELESS: u32 = 4;

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
            let spun = start + adaptive.limit;
            assert!(stopped.is_some_and(|stopped| if polled { stopped >= spun } else { stopped == start }));
            polled
        };
        assert_eq!((0..RETRY * 2).filter(polled).count(), USELESS as usize + 2);
        // The last wait spun without success, so the next retry is as far away as possible.
        let mut waits = 1..=RETRY;
        assert!(waits.any(|_| adaptive.spin(Instant::now(), LONG, || true).is_none()) && waits.is_empty());
        assert!(adaptive.spin(Instant::now(), LONG, || true).is_none(), "it paid off, so it goes on");
    }

    #[test]
    fn spinning_on_a_socket_stops_unless_four_of_five_pay_off() {
        // The shares of useful spins, and how many of the waits spin.
        for (share, spins) in [(5, true), (3, false)] {
            let adaptive = AdaptiveSpin::on_socket();
            let spun = (0..RETRY - 1).filter(|wait| {
                let mut polled = false;
                adaptive.spin(Instant::now(), Duration::ZERO, || {
                    polled = true;
                    wait % share > 0
                });
                polled
            });
            assert_eq!(spun.count() == RETRY as usize - 1, spins, "{share}");
        }
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
