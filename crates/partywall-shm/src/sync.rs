//! Atomics, fences and futexes: the machine's, or those of the model checker loom, which tries the orders in which
//! threads may run and what each may see of the others' stores.
//!
//! loom knows no futexes. There, a word to sleep on has a lock and a condition variable, which do what the kernel does:
//! it compares the word and goes to sleep under a lock, and wakes under the same one. Time does not pass: a sleep with a
//! limit ends by being woken alone, so that a wake that is lost is a deadlock, which fails the model.

use std::{ops::Deref, time::Duration};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// An [`AtomicU32`] to sleep on.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(crate) struct FutexWord {
    word: AtomicU32,
    #[cfg(loom)]
    bed: Bed,
}

impl FutexWord {
    /// Sleeps while the word is `seen`, until it is woken, or at most for `limit`. May return early.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        #[cfg(not(loom))]
        partywall_os::futex::wait(&self.word, seen, limit);
        #[cfg(loom)]
        self.bed.sleep(limit, || self.word.load(Ordering::Relaxed) == seen);
    }

    /// Wakes all who sleep here.
    pub(crate) fn wake_all(&self) {
        #[cfg(not(loom))]
        partywall_os::futex::wake_all(&self.word);
        #[cfg(loom)]
        self.bed.wake_all();
    }
}

impl Deref for FutexWord {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.word
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

    fn sleep(&self, _limit: Duration, unchanged: impl Fn() -> bool) {
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

#[cfg(all(test, loom))]
impl FutexWord {
    pub(crate) fn new(value: u32) -> Self {
        Self { word: AtomicU32::new(value), bed: Bed::new() }
    }
}
