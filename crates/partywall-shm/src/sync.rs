//! Atomics, fences and futexes: the machine's, or those of the model checker loom, which tries the orders in which
//! threads may run and what each may see of the others' stores.
//!
//! loom knows no futexes. There, a word to sleep on has a lock and a condition variable, which do what the kernel does:
//! it compares the word and goes to sleep under a lock, and wakes under the same one. Time does not pass: a sleep with a
//! limit ends by being woken alone, so that a wake that is lost is a deadlock, which fails the model.

use std::{ops::Deref, time::Duration};

#[cfg(not(loom))]
pub(crate) use partywall_os::{
    cpu::{prefetch, prefetch_to_write},
    map::Part,
};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Words that all threads of a model share.
#[cfg(loom)]
pub(crate) type Part<T> = Vec<T>;

/// A model has no caches.
#[cfg(loom)]
pub(crate) fn prefetch<T>(_: &T) {}

/// As above.
#[cfg(loom)]
pub(crate) fn prefetch_to_write<T>(_: &T) {}

/// An atomic integer to sleep on: an [`AtomicU32`], or the low half of an [`AtomicU64`].
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(crate) struct FutexWord<A> {
    word: A,
    #[cfg(loom)]
    bed: Bed,
}

#[cfg(not(loom))]
impl FutexWord<AtomicU32> {
    /// Sleeps while the word is `seen`, until it is woken, or at most for `limit`. May return early.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        partywall_os::futex::wait(&self.word, seen, limit);
    }

    /// Wakes all sleepers.
    pub(crate) fn wake_all(&self) {
        partywall_os::futex::wake_all(&self.word);
    }
}

#[cfg(not(loom))]
impl FutexWord<AtomicU64> {
    /// As the other, while the low half is `seen`; returns `false` if the time ran out.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) -> bool {
        partywall_os::futex::wait(partywall_os::futex::low_half(&self.word), seen, limit)
    }

    /// Wakes all sleepers.
    pub(crate) fn wake_all(&self) {
        partywall_os::futex::wake_all(partywall_os::futex::low_half(&self.word));
    }
}

impl<A> Deref for FutexWord<A> {
    type Target = A;

    fn deref(&self) -> &A {
        &self.word
    }
}

#[cfg(loom)]
impl FutexWord<AtomicU32> {
    pub(crate) fn sleep(&self, seen: u32, _limit: Duration) {
        self.bed.sleep(|| self.word.load(Ordering::Relaxed) == seen);
    }
}

#[cfg(loom)]
impl FutexWord<AtomicU64> {
    pub(crate) fn sleep(&self, seen: u32, _limit: Duration) -> bool {
        self.bed.sleep(|| self.word.load(Ordering::Relaxed) as u32 == seen);
        true
    }
}

#[cfg(loom)]
impl<A> FutexWord<A> {
    pub(crate) fn wake_all(&self) {
        self.bed.wake_all();
    }

    #[cfg(test)]
    pub(crate) fn new(word: A) -> Self {
        Self { word, bed: Bed::new() }
    }
}

/// Where the threads of a model sleep.
#[cfg(loom)]
#[derive(Debug)]
struct Bed {
    lock: loom::sync::Mutex<()>,
    wake: loom::sync::Condvar,
}

#[cfg(loom)]
impl Bed {
    #[cfg(test)]
    fn new() -> Self {
        Self { lock: loom::sync::Mutex::new(()), wake: loom::sync::Condvar::new() }
    }

    fn sleep(&self, unchanged: impl Fn() -> bool) {
        let lock = self.lock.lock().expect("no thread of a model goes on after a panic");
        if unchanged() {
            drop(self.wake.wait(lock).expect("as above"));
        }
    }

    fn wake_all(&self) {
        let _lock = self.lock.lock().expect("as above");
        self.wake.notify_all();
    }
}
