//! An eventcount: threads of several processes sleep on it until a condition may have changed.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `count: u32` the notifications that found a sleeper; the futex on which threads sleep | notifiers |
//! | 4 | `sleepers: u32` a hint, the *mark*: 1 if a thread may be asleep | sleepers set it, notifiers clear it |
//!
//! Rules:
//! 1. A sleeper loads `count`, sets the mark, and checks its condition behind a fence. It sleeps if the condition does
//!    not hold and `count` has not changed.
//! 2. A notifier changes the condition, and loads the mark behind a fence. If the mark is set, it clears the mark, adds
//!    to `count` and wakes all sleepers, or as many as its change is for.
//! 3. The mark is cleared before `count` is added to. In the other order a notifier could clear the mark of a sleeper
//!    that has seen the new `count`, and the next notifier would not wake that sleeper.
//! 4. A notifier that wakes only some sleepers leaves the others without a mark. Each thread that has slept therefore
//!    sets the mark for them once it needs no notification any more ([`remark`](EventCount::remark)). Behind a fence it
//!    then checks whether there is something for another sleeper, because a notifier may have found no mark meanwhile.
//!
//! Because of the fences, either the notifier sees the mark, or the thread that set the mark sees the change.
//!
//! If a notifier is killed or stopped between any two steps, or a woken thread before it has followed rule 4, the other
//! sleepers check their conditions after [`MAX_SLEEP`]. If a sleeper is killed or stopped, one later notification wakes
//! no sleeper.

use std::time::Duration;

use crate::{
    MAX_SLEEP,
    crash::point,
    sync::{AtomicU32, FutexWord, Ordering, fence, fence_behind_change},
};

/// See the head of this file.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct EventCount {
    count: FutexWord<AtomicU32>,
    sleepers: AtomicU32,
}

/// The number of notifications when a sleeper announced itself. A later notification ends its sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventKey(u32);

impl EventCount {
    /// Announces a sleeper. Its condition has to be checked afterwards, and before [`sleep`](Self::sleep).
    ///
    /// A sleeper that finds its condition true and does not sleep costs the next notifier one system call.
    pub(crate) fn prepare(&self) -> EventKey {
        // Pairs with the addition in `notify`: a sleeper that sees the count sees that the mark was cleared before.
        let key = EventKey(self.count.load(Ordering::Acquire));
        // Not a store, because loom does not track the order of all stores and would miss this one.
        self.sleepers.swap(1, Ordering::Relaxed);
        // Pairs with the fence in `notify`.
        fence_behind_change();
        point("eventcount: marked as a sleeper, not asleep");
        key
    }

    /// Sleeps until there is a notification after `key`, for at most `limit` and [`MAX_SLEEP`]. May return early.
    pub(crate) fn sleep(&self, key: EventKey, limit: Duration) {
        self.count.sleep(key.0, limit.min(MAX_SLEEP));
    }

    /// Wakes all sleepers to check their conditions again.
    ///
    /// Contains a sequentially consistent fence.
    pub(crate) fn notify(&self) {
        // Pairs with the fence in `prepare`.
        fence(Ordering::SeqCst);
        self.notify_after_fence();
    }

    /// Notifies as [`notify`](Self::notify) does, for a caller whose change was a read-modify-write operation.
    pub(crate) fn notify_behind_change(&self) {
        fence_behind_change();
        self.notify_after_fence();
    }

    /// Notifies as [`notify`](Self::notify) does, for a caller that has executed a sequentially consistent fence since
    /// its change.
    #[inline]
    pub(crate) fn notify_after_fence(&self) {
        self.notify_at_most(u32::MAX);
    }

    /// Wakes at most `most` sleepers, for a caller whose change was a read-modify-write operation. All sleepers have to
    /// follow rule 4.
    pub(crate) fn notify_some(&self, most: u32) {
        // Pairs with the fences in `prepare` and `remark`.
        fence_behind_change();
        self.notify_at_most(most);
    }

    #[inline]
    fn notify_at_most(&self, most: u32) {
        if self.sleepers.load(Ordering::Relaxed) != 0 && self.sleepers.swap(0, Ordering::Relaxed) != 0 {
            self.wake(most);
        }
    }

    /// Wakes all sleepers, those included that have no mark because a process was killed or stopped.
    pub(crate) fn notify_unmarked(&self) {
        self.wake(u32::MAX);
    }

    fn wake(&self, most: u32) {
        point("eventcount: mark cleared, not counted");
        // Pairs with the load in `prepare`.
        self.count.fetch_add(1, Ordering::Release);
        point("eventcount: counted, nobody woken");
        self.count.wake(most);
    }

    /// Sets the mark for threads that may have been left asleep (rule 4). The caller then checks whether there is
    /// something for one of them.
    ///
    /// Contains a sequentially consistent fence.
    pub(crate) fn remark(&self) {
        // A read-modify-write for loom, as in `prepare`.
        self.sleepers.swap(1, Ordering::Relaxed);
        // Pairs with the fence in `notify_some`.
        fence_behind_change();
    }
}

shared!(EventCount { count, sleepers });

#[cfg(all(test, loom))]
impl EventCount {
    pub(crate) fn new() -> Self {
        Self { count: FutexWord::new(AtomicU32::new(0)), sleepers: AtomicU32::new(0) }
    }

    /// Clears the mark, as a notifier does that wakes another sleeper.
    pub(crate) fn clear_mark(&self) {
        self.sleepers.swap(0, Ordering::Relaxed);
    }
}
