//! Timer slack: by how much the kernel may extend a thread's sleep.

use std::{marker::PhantomData, num::NonZeroU64};

use rustix::thread::{current_timer_slack, set_current_timer_slack};

/// Reduces the calling thread's timer slack to the minimum until dropped.
///
/// By default a sleep may last 50 µs longer than asked, so that the kernel can wake for several sleeps at once. That is
/// too long for a thread that polls every 20 µs. If the slack cannot be changed, it stays as it is.
#[derive(Debug)]
pub struct LeastSlack {
    before: Option<u64>,
    /// The slack belongs to the thread.
    _not_send: PhantomData<*const ()>,
}

impl LeastSlack {
    /// Reduces the slack from now on.
    #[must_use = "the slack is restored when this is dropped"]
    pub fn begin() -> Self {
        let before = current_timer_slack().ok().filter(|_| set_current_timer_slack(Some(LEAST)).is_ok());
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for LeastSlack {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // The call has succeeded before, so it does not fail here. Real-time threads have slack 0, for which `None`
            // restores the thread's default.
            let _ = set_current_timer_slack(NonZeroU64::new(before));
        }
    }
}

/// The least slack that a thread can have: 1 ns.
const LEAST: NonZeroU64 = NonZeroU64::MIN;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slack_is_least_until_the_outer_guard_is_dropped() {
        let before = current_timer_slack().unwrap();
        assert_ne!(before, LEAST.get(), "otherwise this shows nothing");
        let outer = LeastSlack::begin();
        drop(LeastSlack::begin());
        assert_eq!(current_timer_slack().unwrap(), LEAST.get());
        drop(outer);
        assert_eq!(current_timer_slack().unwrap(), before);
    }
}
