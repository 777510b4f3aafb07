//! Sleeping on a word of shared memory until a process wakes its sleepers.
//!
//! The futexes are shared: the kernel finds them by the file behind the address, so any process that maps the file may
//! sleep and wake. A futex has no memory: a wake without a sleeper is lost. A sleeper therefore passes the value that
//! it saw, and the kernel lets it sleep only if the word still has that value. After a sleep, check the word again: a
//! wake may be spurious.
#![allow(unsafe_code)]

use std::{
    sync::atomic::{AtomicU32, AtomicU64},
    time::Duration,
};

use rustix::{
    io::Errno,
    thread::futex::{self, Flags, Timespec},
};

/// Sleeps until another thread wakes it, if `word` equals `seen`. Returns `false` if `limit` ran out. May return early
/// for no reason, for example when a signal arrives.
pub fn wait(word: &AtomicU32, seen: u32, limit: Duration) -> bool {
    // The kernel refuses a larger number of seconds, and no caller waits that long.
    let limit = limit.min(Duration::from_secs(u32::MAX.into()));
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // The flags are empty, not `PRIVATE`. The other errors mean that the word has another value, that a signal has
    // arrived, or that the address is bad, which a reference never is.
    futex::wait(word, Flags::empty(), seen, Some(&limit)) != Err(Errno::TIMEDOUT)
}

/// Wakes at most `count` sleepers of `word`, and returns the number woken.
pub fn wake(word: &AtomicU32, count: u32) -> usize {
    // The kernel takes more than `i32::MAX` for a negative number. The call fails only for bad addresses.
    futex::wake(word, Flags::empty(), count.min(i32::MAX as u32)).unwrap_or(0)
}

/// Wakes all sleepers of `word`, and returns the number woken.
pub fn wake_all(word: &AtomicU32) -> usize {
    wake(word, u32::MAX)
}

/// Returns the low 32 bits of a 64-bit word, for [`wait`] and [`wake`] alone. Never load or store them.
pub fn low_half(word: &AtomicU64) -> &AtomicU32 {
    const { assert!(cfg!(target_endian = "little"), "the low half comes first") };
    // SAFETY: these are the first four of eight bytes that are borrowed for as long and aligned for more, and both
    // types are atomics. Only the kernel loads them at this size, so no accesses of mixed sizes race.
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
