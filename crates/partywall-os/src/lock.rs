//! Locks whose data stays valid when a thread panics.

use std::sync::PoisonError;

/// Ignores that a lock is poisoned.
///
/// A standard lock is poisoned when a thread panics while it holds the lock. All of Partywall's locks guard data that
/// is valid between any two statements, so the next thread can go on with it.
pub trait IgnorePoison {
    /// The guard, or the data.
    type Guarded;

    /// Returns the guard, or the data, whether or not the lock is poisoned.
    fn ignore_poison(self) -> Self::Guarded;
}

impl<T> IgnorePoison for Result<T, PoisonError<T>> {
    type Guarded = T;

    fn ignore_poison(self) -> T {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}
