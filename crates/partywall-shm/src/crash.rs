//! Crash points: places between two steps of a change of shared memory at which a test kills or stops a process.
//!
//! Without the feature `crash-points` they are empty functions. With it, they do nothing before `arm` is called.

#[cfg(feature = "crash-points")]
pub use armed::{Callback, arm, disarm, point};

/// Passes the point `name`.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

#[cfg(feature = "crash-points")]
mod armed {
    use std::cell::Cell;

    /// The function to call at a point, with the name of the point.
    pub type Callback = fn(name: &'static str);

    thread_local! {
        static ARMED: Cell<Option<(u64, Callback)>> = const { Cell::new(None) };
    }

    /// Makes this thread pass `before` points and then call `action` at the next one, once.
    pub fn arm(before: u64, action: Callback) {
        ARMED.set(Some((before, action)));
    }

    /// Disarms this thread. Returns the number of points that were still to be passed, or `None` if the action was
    /// called.
    pub fn disarm() -> Option<u64> {
        ARMED.take().map(|(before, _)| before)
    }

    /// Passes the point `name`.
    pub fn point(name: &'static str) {
        match ARMED.take() {
            None => {}
            Some((0, action)) => action(name),
            Some((before, action)) => ARMED.set(Some((before - 1, action))),
        }
    }
}
