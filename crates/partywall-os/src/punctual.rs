//! Short sleeps that end when they should.

use std::{marker::PhantomData, num::NonZeroU64};

use rustix::thread::{current_timer_slack, set_current_timer_slack};

/// Has what this thread sleeps end in time. The kernel lets sleeps last 50 µs longer, so that it wakes for several at once,
/// which is too long for who looks for something every 20 µs. Dropping it makes that as it was; where it may not be changed,
/// nothing is.
#[derive(Debug)]
pub struct Punctual {
    before: Option<u64>,
    /// It is the thread's.
    _not_send: PhantomData<*const ()>,
}

impl Punctual {
    /// From now on.
    #[must_use = "it ends when it is dropped"]
    pub fn begin() -> Self {
        let before = current_timer_slack().ok().filter(|_| set_current_timer_slack(Some(LEAST)).is_ok());
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for Punctual {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // The call has worked before. Zero, as threads in real time have it, is what the thread began with.
            let _ = set_current_timer_slack(NonZeroU64::new(before));
        }
    }
}

/// Nanoseconds.
const LEAST: NonZeroU64 = NonZeroU64::MIN;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_punctual_for_a_while() {
        let before = current_timer_slack().unwrap();
        assert_ne!(before, LEAST.get(), "otherwise this shows nothing");
        let outer = Punctual::begin();
        drop(Punctual::begin());
        assert_eq!(current_timer_slack().unwrap(), LEAST.get());
        drop(outer);
        assert_eq!(current_timer_slack().unwrap(), before);
    }
}
