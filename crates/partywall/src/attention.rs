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

    /// Looks for a while from `start` on, and no longer than `timeout`, until `done`; whether it was in time.
    pub(crate) fn look(&self, start: Instant, timeout: Duration, mut done: impl FnMut() -> bool) -> bool {
        let until = start + LOOK.min(timeout);
        // Hints: what several threads lose of each other's counts does not matter.
        let waits = self.waits.load(Ordering::Relaxed).wrapping_add(1);
        self.waits.store(waits, Ordering::Relaxed);
        let credit = self.credit.load(Ordering::Relaxed);
        if credit == 0 && !waits.is_multiple_of(RETRY) {
            return false;
        }
        let paid = loop {
            // The clock costs more than a look.
            if (0..LOOKS).any(|_| {
                done() || {
                    std::hint::spin_loop();
                    false
                }
            }) {
                break true;
            }
            if Instant::now() >= until {
                break false;
            }
        };
        let credit = if paid { (credit + 1).min(MOST_CREDIT) } else { credit.saturating_sub(1) };
        self.credit.store(credit, Ordering::Relaxed);
        paid
    }
}

/// For how long to look before sleeping: a few times what it takes to be woken (3.4 µs, measured).
const LOOK: Duration = Duration::from_micros(20);

/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// Waits in a row for which looking has to be in vain before it stops.
const MOST_CREDIT: u32 = 4;

/// Having stopped, one wait in so many looks again.
const RETRY: u32 = 64;
