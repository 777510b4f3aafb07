//! The system's own exclusion between processes: a mutex of three states on a futex, and POSIX semaphores.
#![allow(unsafe_code)] // sem_init and its companions

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
};

use partywall_measure::Failure;
use rustix::thread::futex::{self, Flags};

use crate::bench::board::Board;

/// A mutex as Drepper describes it ("Futexes Are Tricky", 2011, mutex 2): 0 is free, 1 is held, 2 is held and there may
/// be sleepers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FutexMutex<'a>(pub(crate) &'a AtomicU32);

impl FutexMutex<'_> {
    pub(crate) fn lock(self) {
        let Err(mut seen) = self.0.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed) else { return };
        if seen != 2 {
            seen = self.0.swap(2, Ordering::Acquire);
        }
        while seen != 0 {
            // The state is checked again, whatever has ended the wait.
            let _ = futex::wait(self.0, Flags::empty(), 2, None);
            seen = self.0.swap(2, Ordering::Acquire);
        }
    }

    pub(crate) fn unlock(self) {
        if self.0.swap(0, Ordering::Release) == 2 {
            let _ = futex::wake(self.0, Flags::empty(), 1);
        }
    }
}

/// A semaphore of the C library (sem_overview(7)), in shared memory.
#[derive(Debug)]
pub(crate) struct PosixSemaphore {
    board: Board,
    line: usize,
}

impl PosixSemaphore {
    /// Creates a semaphore with `permits` permits, on a cache line that nothing else uses. One process creates it, and
    /// the others open it.
    pub(crate) fn create(board: &Board, line: usize, permits: u32) -> Result<Self, Failure> {
        let semaphore = Self::open(board, line);
        // SAFETY: a line is 64 bytes, aligned to 64, and mapped while the board is held. The 1 shares it
        // between processes.
        check(unsafe { libc::sem_init(semaphore.address(), 1, permits) })?;
        Ok(semaphore)
    }

    /// Opens a semaphore that another process has created.
    pub(crate) fn open(board: &Board, line: usize) -> Self {
        const { assert!(size_of::<libc::sem_t>() <= Board::LINE && align_of::<libc::sem_t>() <= Board::LINE) };
        Self { board: board.clone(), line }
    }

    pub(crate) fn wait(&self) -> Result<(), Failure> {
        loop {
            // SAFETY: `create` has initialised a semaphore at this address, which is mapped while the board is held.
            match check(unsafe { libc::sem_wait(self.address()) }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return Ok(other?),
            }
        }
    }

    pub(crate) fn post(&self) -> Result<(), Failure> {
        // SAFETY: as for `wait`.
        Ok(check(unsafe { libc::sem_post(self.address()) })?)
    }

    fn address(&self) -> *mut libc::sem_t {
        self.board.word(self.line).as_ptr().cast()
    }
}

fn check(answer: i32) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_exclude_and_none_is_lost() {
        let (board, _fd) = Board::create().unwrap();
        let semaphore = PosixSemaphore::create(&board, 3, 1).unwrap();
        let mutex = FutexMutex(board.futex(0));
        let counts = [board.word(1), board.word(2)];
        let add_one = |count: &std::sync::atomic::AtomicU64| {
            let seen = count.load(Ordering::Relaxed);
            std::thread::yield_now();
            count.store(seen + 1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..1_000 {
                        mutex.lock();
                        add_one(counts[0]);
                        mutex.unlock();
                        semaphore.wait().unwrap();
                        add_one(counts[1]);
                        semaphore.post().unwrap();
                    }
                });
            }
        });
        assert_eq!(counts.map(|count| count.load(Ordering::Relaxed)), [3_000; 2]);
    }
}
