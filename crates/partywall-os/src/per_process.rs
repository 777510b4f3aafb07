//! Global state that a forked child does not share with its parent.
#![allow(unsafe_code)]

use std::{
    ptr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicPtr, Ordering},
    },
};

use crate::{lock::IgnorePoison, process::fork_generation};

/// A value for a `static` that starts as the default in each process, also in a forked child. The parent's value does
/// not apply to the child, and a lock that another thread held during the fork would never be released there.
///
/// A child made by the system call alone is not noticed, as with [`fork_generation`].
#[derive(Debug)]
pub struct PerProcess<T> {
    /// The value of the current generation; null before the first use. Never freed, because guards borrow it for
    /// `'static`.
    current: AtomicPtr<Cell<T>>,
}

#[derive(Debug)]
struct Cell<T> {
    generation: u64,
    value: Mutex<T>,
}

impl<T: Default + Send> PerProcess<T> {
    /// Creates an empty cell.
    pub const fn new() -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Locks this process's value, which is the default at first. A panic of a thread that held the guard is ignored.
    pub fn lock(&'static self) -> MutexGuard<'static, T> {
        let generation = fork_generation();
        loop {
            let found = self.current.load(Ordering::Acquire);
            // SAFETY: null, or a cell from `Box::into_raw` that is never freed once it has been stored here.
            if let Some(cell) = unsafe { found.as_ref() }
                && cell.generation == generation
            {
                return cell.value.lock().ignore_poison();
            }
            let fresh = Box::into_raw(Box::new(Cell { generation, value: Mutex::default() }));
            // The parent's cell is leaked: a thread that does not exist in this process may hold its lock.
            if self.current.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: the box was made above, and its pointer was not stored.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}

impl<T: Default + Send> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_child_begins_anew_even_if_the_lock_is_held() {
        static VALUE: PerProcess<u32> = PerProcess::new();
        *VALUE.lock() = 7;
        let held = VALUE.lock();
        // SAFETY: the child takes only locks that none of its threads holds, and exits without running anything else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let value = *VALUE.lock();
            // SAFETY: ends the child.
            unsafe { libc::_exit(value as i32) };
        }
        let mut status = 0;
        // SAFETY: the status is a live number.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
        drop(held);
        assert_eq!(*VALUE.lock(), 7);
    }

    #[test]
    fn all_threads_see_one_value() {
        static VALUE: PerProcess<u32> = PerProcess::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| *VALUE.lock() += 1);
            }
        });
        assert_eq!(*VALUE.lock(), 8);
    }
}
