//! Words that processes share without the library, for the floors of ordering.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use partywall_measure::Failure;
use partywall_os::{map::SharedMap, memfd};
use rustix::{
    thread::futex as plain,
    time::{ClockId, clock_gettime},
};

use crate::prelude::TIMEOUT;

/// The size of a board, equal to the memory that the library registers with CUDA.
const BYTES: u64 = 64 << 10;

/// A file of words, each in a cache line of its own, and all zero at first.
#[derive(Debug, Clone)]
pub(crate) struct Board {
    map: Arc<SharedMap>,
}

impl Board {
    /// Bytes of a cache line.
    pub(crate) const LINE: usize = 64;

    /// Returns a new board, and its file for other processes.
    pub(crate) fn create() -> Result<(Self, OwnedFd), Failure> {
        let fd = memfd::Draft::create("partywall-bench:board", BYTES)?.share()?;
        Ok((Self::open(&fd)?, fd))
    }

    pub(crate) fn open(fd: &OwnedFd) -> Result<Self, Failure> {
        Ok(Self { map: Arc::new(SharedMap::writable(fd)?) })
    }

    pub(crate) fn map(&self) -> Arc<SharedMap> {
        Arc::clone(&self.map)
    }

    /// Returns the offset of a word in bytes.
    pub(crate) fn offset(line: usize) -> u64 {
        (line * Self::LINE) as u64
    }

    pub(crate) fn word(&self, line: usize) -> &AtomicU64 {
        &self.map.atomics(line * Self::LINE, 1).expect("a board has a thousand lines")[0]
    }

    /// Returns a word that can be slept on. Use each line either as this or as an ordinary word.
    pub(crate) fn futex(&self, line: usize) -> &AtomicU32 {
        &self.map.atomics(line * Self::LINE, 1).expect("a board has a thousand lines")[0]
    }
}

/// Polls `word` until it is at least `value`.
pub(crate) fn spin_until(word: &AtomicU64, value: u64) {
    while word.load(Ordering::Acquire) < value {}
}

/// Polls `word` until it is at least `value`, and yields the processor between polls. For waits that are not measured.
///
/// # Errors
/// The other process does not arrive in time.
pub(crate) fn yield_until(word: &AtomicU64, value: u64) -> Result<(), Failure> {
    let deadline = Instant::now() + TIMEOUT;
    while word.load(Ordering::Acquire) < value {
        if Instant::now() > deadline {
            return Err("the other process does not come".into());
        }
        thread::yield_now();
    }
    Ok(())
}

/// Sleeps on `word` until it is at least `value`. It has no timeout, which would cost a timer for each sleep; with one
/// it is [`turns::sleep_until`](crate::bench::turns::sleep_until).
pub(crate) fn sleep_until(word: &AtomicU32, value: u32) {
    loop {
        let seen = word.load(Ordering::Acquire);
        if seen >= value {
            return;
        }
        // The wait ends by a wake, because the word has changed already, or by a signal, so the word is checked again.
        let _ = plain::wait(word, plain::Flags::empty(), seen, None);
    }
}

/// Returns the clock that all processes share, in nanoseconds.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use crate::bench::turns::store_and_wake;

    use super::*;

    #[test]
    fn two_mappings_are_one_board() {
        let (board, fd) = Board::create().unwrap();
        let other = Board::open(&fd).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                sleep_until(other.futex(1), 1);
                other.word(2).store(7, Ordering::Release);
            });
            store_and_wake(board.futex(1), 1, 1);
            yield_until(board.word(2), 7).unwrap();
        });
        assert!(now() <= now());
    }
}
