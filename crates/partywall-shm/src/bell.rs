//! A counter to sleep on until something changes that several processes look at.
//!
//! | field | written by |
//! |---|---|
//! | `rings: u32` counts what a sleeper may look for; slept on | who rings |
//! | `sleepers: u32` a hint: 1 if somebody may sleep | sleepers set it, who rings clears it |
//!
//! Who changes something that a sleeper may look for does so first, then rings: clears `sleepers`, adds to `rings`, looks
//! at `sleepers` again, and wakes if either look found 1. Who sleeps loads `rings`, looks whether it has to sleep, sets
//! `sleepers`, and sleeps if `rings` is still the same. (Were `sleepers` cleared after `rings` is added to, it might be the
//! mark of a sleeper who has seen the new `rings`, and the next who rings would not wake him.)
//!
//! If who rings is killed or stopped before he has woken, or before he has rung, who sleeps looks again after [`SLICE`].

use std::time::Duration;

use crate::{
    SLICE,
    crash::point,
    sync::{AtomicU32, FutexWord, Ordering, fence},
};

/// See the head of this file.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Bell {
    rings: FutexWord<AtomicU32>,
    sleepers: AtomicU32,
}

/// A moment of a bell, before which nothing is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rings(u32);

impl Bell {
    /// Now: taken before looking whether there is something to wait for.
    pub(crate) fn rings(&self) -> Rings {
        // Pairs with `ring`: who sees the count sees what was counted.
        Rings(self.rings.load(Ordering::Acquire))
    }

    /// Sleeps until somebody has rung since `seen`; not longer than `limit` and [`SLICE`]. May return early: look again.
    pub(crate) fn sleep(&self, seen: Rings, limit: Duration) {
        // Not a store: loom forgets some of what it knows of the order of stores, and finds a mark missing that is there.
        self.sleepers.swap(1, Ordering::Relaxed);
        point("bell: marked as a sleeper, not asleep");
        // Pairs with the one in `ring`: either who rings finds the mark, or the kernel finds `rings` changed.
        fence(Ordering::SeqCst);
        self.rings.sleep(seen.0, limit.min(SLICE));
    }

    /// Wakes all sleepers to look again.
    ///
    /// Behind it, what was stored before it comes before what is loaded after it, for all who fence likewise.
    pub(crate) fn ring(&self) {
        let marked = || self.sleepers.load(Ordering::Relaxed) != 0;
        let cleared = marked() && self.sleepers.swap(0, Ordering::Relaxed) != 0;
        point("bell: sleepers cleared, change not counted");
        // Pairs with `rings`.
        self.rings.fetch_add(1, Ordering::Release);
        // Pairs with the one in `sleep`.
        fence(Ordering::SeqCst);
        if cleared || marked() {
            point("bell: change counted, sleepers not woken");
            self.rings.wake_all();
        }
    }
}

#[cfg(all(test, loom))]
impl Bell {
    pub(crate) fn new() -> Self {
        Self { rings: FutexWord::new(AtomicU32::new(0)), sleepers: AtomicU32::new(0) }
    }
}
