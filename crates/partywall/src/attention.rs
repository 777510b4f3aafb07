//! Looking for what other processes do before sleeping until they have done it.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

/// Whether it pays to look again and again for a while before sleeping, which spares being woken: it does if what is
/// waited for is a few microseconds away. As with answers of the broker, it stops when it was in vain, and is tried again now and
/// then.
#[derive(Debug)]
pub(crate) struct Attention {
    credit: AtomicU32,
    waits: AtomicU32,
}

impl Attention {
    pub(crate) fn new() -> Self {
        Self { credit: AtomicU32::new(MOST_CREDIT), waits: AtomicU32::new(0) }
    }

    /// Looks for a while from `start` on, and no longer than `timeout`, until `done`. If it is not in time, says when it
    /// stopped, which spares who sleeps then a look at the clock.
    pub(crate) fn look(&self, start: Instant, timeout: Duration, mut done: impl FnMut() -> bool) -> Option<Instant> {
        let until = start + LOOK.min(timeout);
        // Hints: what several threads lose of each other's counts does not matter.
        let waits = self.waits.load(Ordering::Relaxed).wrapping_add(1);
        self.waits.store(waits, Ordering::Relaxed);
        let credit = self.credit.load(Ordering::Relaxed);
        if credit == 0 && !waits.is_multiple_of(RETRY) {
            return Some(start);
        }
        let stopped = loop {
            // The clock costs more than a look.
            if (0..LOOKS).any(|_| {
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
        let paid = stopped.is_none();
        let credit = if paid { (credit + 1).min(MOST_CREDIT) } else { credit.saturating_sub(1) };
        self.credit.store(credit, Ordering::Relaxed);
        stopped
    }
}

/// For how long to look before sleeping: a few times what it takes to be woken (3.4 µs, measured).
const LOOK: Duration = Duration::from_micros(20);

/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// Waits in a row for which looking has to be in vain before it stops.
const MOST_CREDIT: u32 = 4;

/// Having stopped, one wait in so many looks again. With one in 64, looking in vain was a tenth of what it took to hand
/// over on one processor (measured); a thousand waits are over in some milliseconds.
const RETRY: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn looking_in_vain_stops_and_is_tried_again() {
        let attention = Attention::new();
        let looked = |_: &u32| {
            let mut looked = false;
            let start = Instant::now();
            let stopped = attention.look(start, LONG, || {
                looked = true;
                false
            });
            assert!(stopped.is_some_and(|stopped| if looked { stopped >= start + LOOK } else { stopped == start }));
            looked
        };
        assert_eq!((0..RETRY * 2).filter(looked).count(), MOST_CREDIT as usize + 2);
        // The last look was in vain, so that the next one is as far away as it can be.
        let mut waits = 1..=RETRY;
        assert!(waits.any(|_| attention.look(Instant::now(), LONG, || true).is_none()) && waits.is_empty());
        assert!(attention.look(Instant::now(), LONG, || true).is_none(), "it paid, so it goes on");
    }

    #[test]
    fn nobody_looks_for_longer_than_he_may_wait() {
        let start = Instant::now();
        let mut looks = 0;
        let stopped = Attention::new().look(start, Duration::ZERO, || {
            looks += 1;
            false
        });
        assert!(stopped.is_some_and(|stopped| stopped >= start) && looks == LOOKS);
    }
}
