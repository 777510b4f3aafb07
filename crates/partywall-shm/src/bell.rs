//! A counter to sleep on until something changes that several processes look at.
//!
//! | field | written by |
//! |---|---|
//! | `rings: u32` counts changes that were told; slept on | who rings |
//! | `sleepers: u32` a hint: 1 if somebody may sleep | who is about to sleep sets it, who rings clears it |
//!
//! Who may have to sleep loads `rings`, sets `sleepers`, looks behind a fence whether he has to, and sleeps if `rings` is
//! still the same. Who changes something that others may look for does so first, then looks behind a fence at `sleepers`;
//! if he finds 1 he clears it, adds to `rings` and wakes all. One of the two sees what the other did. (Were `sleepers`
//! cleared after `rings` is added to, it might be the mark of one who has seen the new `rings`, and the next who rings
//! would not wake him.)
//!
//! If who rings is killed or stopped before he has woken all, they look again after [`MAX_SLEEP`].

use std::time::Duration;

use crate::{
    MAX_SLEEP,
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
pub struct Rings(u32);

impl Bell {
    /// Announces that we may sleep. What we have to sleep for is to be looked at after it.
    pub(crate) fn expect(&self) -> Rings {
        // Pairs with `ring`: who sees the count sees that the mark was cleared before it.
        let seen = Rings(self.rings.load(Ordering::Acquire));
        // Not a store: loom forgets some of what it knows of the order of stores, and finds a mark missing that is there.
        self.sleepers.swap(1, Ordering::Relaxed);
        // Pairs with the one in `ring`.
        fence(Ordering::SeqCst);
        point("bell: marked as a sleeper, not asleep");
        seen
    }

    /// Sleeps until somebody has rung since `seen`; not longer than `limit` and [`MAX_SLEEP`]. May return early: look again.
    pub(crate) fn sleep(&self, seen: Rings, limit: Duration) {
        self.rings.sleep(seen.0, limit.min(MAX_SLEEP));
    }

    /// Wakes all who sleep to look again.
    ///
    /// Behind it, what was stored before it comes before what is loaded after it, for all who fence likewise.
    pub(crate) fn ring(&self) {
        // Pairs with the one in `expect`.
        fence(Ordering::SeqCst);
        self.ring_behind_fence();
    }

    /// The same for one who has fenced behind what he changed.
    #[inline]
    pub(crate) fn ring_behind_fence(&self) {
        if self.sleepers.load(Ordering::Relaxed) != 0 && self.sleepers.swap(0, Ordering::Relaxed) != 0 {
            point("bell: mark cleared, not counted");
            // Pairs with `expect`.
            self.rings.fetch_add(1, Ordering::Release);
            point("bell: counted, nobody woken");
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
