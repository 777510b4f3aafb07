//! Waiting on the host.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use partywall_shm::timeline::Progress;

use super::Timeline;
use crate::{
    backoff::Backoff,
    error::{Error, Result},
};

/// Whether it pays to look again and again for a while before sleeping, which spares being woken: it does if the signal
/// is a few microseconds away. As with answers of the broker, it stops when it was in vain, and is tried again now and
/// then.
#[derive(Debug)]
pub(super) struct Attention {
    credit: AtomicU32,
    waits: AtomicU32,
}

impl Attention {
    pub(super) fn new() -> Self {
        Self { credit: AtomicU32::new(MOST_CREDIT), waits: AtomicU32::new(0) }
    }

    /// Looks until `done`; whether it was in time.
    fn look(&self, until: Instant, mut done: impl FnMut() -> bool) -> bool {
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

impl Timeline {
    /// Waits until the timeline has come as far as `goal` on the way to `v`: reached it, or only announced it.
    pub(super) fn wait_for(&self, v: u64, goal: Progress, timeout: Duration) -> Result<()> {
        self.domain.link().require_ours()?;
        self.at.check_value(v)?;
        let word = self.at.word();
        let cell = word.cell();
        let is_over = |progress| match progress {
            Progress::Pending => false,
            Progress::Announced => goal == Progress::Announced,
            Progress::Reached | Progress::Ended(_) => true,
        };
        let verdict = |progress| match progress {
            Progress::Ended(ending) => Err(self.at.ended(&word, ending, v)),
            Progress::Reached => {
                word.note_wait(v);
                Ok(())
            }
            // Whoever relies on a promise waits for the value, too.
            Progress::Announced | Progress::Pending => Ok(()),
        };
        let mut progress = cell.progress(v);
        if is_over(progress) {
            return verdict(progress);
        }
        let start = Instant::now();
        let look = || {
            progress = cell.progress(v);
            is_over(progress)
        };
        if self.attention.look(start + LOOK.min(timeout), look) {
            return verdict(progress);
        }
        let mut backoff = Backoff::new();
        loop {
            // Before looking: what happens from now on ends the sleep.
            let seen = cell.wakes();
            let progress = cell.progress(v);
            if is_over(progress) {
                return verdict(progress);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(self.at.too_late(v, goal, timeout));
            }
            // Promised values are stored by a stream, which wakes nobody.
            let pause = if progress == Progress::Announced { backoff.next() } else { left };
            cell.sleep(seen, pause.min(left));
        }
    }
}

impl super::At {
    pub(super) fn too_late(&self, v: u64, goal: Progress, after: Duration) -> Error {
        let what = if goal == Progress::Announced { "the promise of value" } else { "value" };
        Error::Timeout { what: format!("{what} {v} of timeline {:?}", self.name), after }
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
