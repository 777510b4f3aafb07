//! Atomics, fences and futexes: those of the machine, or those of the model checker loom. loom tries all orders in
//! which threads may run, and all stores of others that each thread may see.
//!
//! loom has no futexes. For loom a futex word contains a lock and a condition variable, which imitate the kernel:
//! comparing the word and going to sleep happen under a lock, and waking under the same lock. Time does not pass, so a
//! sleep with a limit ends only when it is woken. A lost wake is therefore a deadlock, which fails the model.

use std::{ops::Deref, time::Duration};

#[cfg(not(loom))]
pub(crate) use partywall_os::{
    cpu::{prefetch, prefetch_to_write},
    map::SharedArray,
};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// A sequentially consistent fence behind a read-modify-write operation of this thread, without a store in between that
/// has to be before the fence.
///
/// On x86-64 such an operation is a locked instruction, which is that fence already: a second one would take as long
/// again. Models and other processors execute the fence.
#[inline]
pub(crate) fn fence_behind_change() {
    if cfg!(all(target_arch = "x86_64", not(loom), not(miri))) {
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// A change of a shared word that was not made, because another thread or process has changed the word since it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stale;

/// Changes a word that was seen as `from`, in one step. Release: a process that sees the change sees what was done
/// before it. Acquire: this process sees what was done before the change that it saw.
pub(crate) fn change(word: &AtomicU64, from: u64, to: u64) -> Result<(), Stale> {
    word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).map(drop).map_err(|_| Stale)
}

/// Words that all threads of a model share.
#[cfg(loom)]
pub(crate) type SharedArray<T> = Vec<T>;

/// Empty, because a model has no caches.
#[cfg(loom)]
pub(crate) fn prefetch<T>(_: &T) {}

/// Empty, as `prefetch`.
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
    /// Sleeps until it is woken, if the word is `seen`, for at most `limit`. May return early.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        partywall_os::futex::wait(&self.word, seen, limit);
    }

    /// Wakes at most `most` sleepers.
    pub(crate) fn wake(&self, most: u32) {
        partywall_os::futex::wake(&self.word, most);
    }
}

#[cfg(not(loom))]
impl FutexWord<AtomicU64> {
    /// Sleeps until it is woken, if the low half is `seen`. Returns `false` if the time ran out.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) -> bool {
        partywall_os::futex::wait(partywall_os::futex::low_half(&self.word), seen, limit)
    }

    /// Wakes all sleepers.
    pub(crate) fn wake_all(&self) {
        partywall_os::futex::wake_all(partywall_os::futex::low_half(&self.word));
    }
}

shared!(FutexWord<AtomicU32> { word });
shared!(FutexWord<AtomicU64> { word });

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
    pub(crate) fn wake(&self, most: u32) {
        self.bed.wake(most);
    }

    pub(crate) fn wake_all(&self) {
        self.wake(u32::MAX);
    }

    #[cfg(test)]
    pub(crate) fn new(word: A) -> Self {
        Self { word, bed: Bed::new() }
    }
}

/// The place where threads of a model sleep.
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
        let lock = self.lock.lock().expect("no thread of a model continues after a panic");
        if unchanged() {
            drop(self.wake.wait(lock).expect("as above"));
        }
    }

    fn wake(&self, most: u32) {
        let _lock = self.lock.lock().expect("as above");
        match most {
            u32::MAX => self.wake.notify_all(),
            _ => (0..most).for_each(|_| self.wake.notify_one()),
        }
    }
}
