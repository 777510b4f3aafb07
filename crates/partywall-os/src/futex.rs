//! Sleeping on a word of shared memory until some process says that it has changed.
//!
//! Shared futexes, which the kernel finds by the file behind the address: any process that maps the file may sleep and
//! wake. A futex remembers nothing: a wake that meets nobody asleep is lost, which is why a sleeper names the value that
//! it saw, and the kernel does not let it sleep on another. Whoever returns from a sleep has to look again: it may have
//! been woken for nothing.
#![allow(unsafe_code)]

use std::{
    sync::atomic::{AtomicU32, AtomicU64},
    time::Duration,
};

use rustix::{
    io::Errno,
    thread::futex::{self, Flags, Timespec},
};

/// Sleeps while `word` is `seen`, until somebody wakes it, but not longer than `limit`; returns `false` if the time ran
/// out. May return early for no reason, for one when a signal arrives.
pub fn wait(word: &AtomicU32, seen: u32, limit: Duration) -> bool {
    // A number of seconds that the kernel does not take is longer than anybody waits.
    let limit = limit.min(Duration::from_secs(u32::MAX.into()));
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // The flags are empty, not `PRIVATE`. What else it returns is that the word has another value, that a signal has
    // arrived, or that the address is bad, which a reference is not.
    futex::wait(word, Flags::empty(), seen, Some(&limit)) != Err(Errno::TIMEDOUT)
}

/// Wakes at most `count` of those who sleep on `word`; returns how many it were.
pub fn wake(word: &AtomicU32, count: u32) -> usize {
    // More than `i32::MAX` would be taken for a negative number. It fails for bad addresses alone.
    futex::wake(word, Flags::empty(), count.min(i32::MAX as u32)).unwrap_or(0)
}

/// Wakes all who sleep on `word`; returns how many it were.
pub fn wake_all(word: &AtomicU32) -> usize {
    wake(word, u32::MAX)
}

/// The half of a word of 64 bits that [`wait`] and [`wake`] can have: its low 32 bits. To be slept on only, never loaded
/// or stored to.
pub fn low_half(word: &AtomicU64) -> &AtomicU32 {
    const { assert!(cfg!(target_endian = "little"), "the low half comes first") };
    // SAFETY: the first four bytes of eight that are borrowed for as long, aligned for more, and atomics both. Nothing
    // but the kernel loads them at this size, which is what makes mixing sizes harmless.
    unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::{map::SharedMap, memfd::Draft};

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn futex_does_not_sleep_on_another_value_and_times_out() {
        let word = AtomicU32::new(1);
        assert!(wait(&word, 0, LONG));
        assert!(!wait(&word, 1, Duration::from_millis(1)));
        assert!(!wait(&word, 1, Duration::ZERO));
        assert_eq!(wake_all(&word), 0);
    }

    #[test]
    fn two_mappings_of_a_file_are_one_futex() {
        let fd = Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        let ours = SharedMap::writable(&fd).unwrap();
        let theirs = SharedMap::writable(&fd).unwrap();
        let ours = ours.atomics::<AtomicU64>(64, 2).unwrap();
        let theirs = theirs.atomics::<AtomicU64>(64, 2).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while ours[1].load(Ordering::Acquire) != 1 << 32 | 7 {
                    let seen = ours[1].load(Ordering::Acquire) as u32;
                    wait(low_half(&ours[1]), seen, LONG);
                }
            });
            while wake(low_half(&theirs[1]), 1) == 0 {
                std::thread::yield_now();
            }
            theirs[1].store(1 << 32 | 7, Ordering::Release);
            wake_all(low_half(&theirs[1]));
        });
        assert_eq!(ours[0].load(Ordering::Relaxed), 0);
    }
}
