//! Events that wait for the thread of a stream.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use partywall_os::lock::IgnorePoison;

/// A queue with a bound for what peers send. What does not fit is lost, as in the network: streams recover from that.
#[derive(Debug)]
pub(crate) struct Inbox<T> {
    waiting: Mutex<Waiting<T>>,
    arrived: Condvar,
    most_bytes: u64,
}

#[derive(Debug)]
struct Waiting<T> {
    items: VecDeque<(T, u64)>,
    bytes: u64,
    is_closed: bool,
}

impl<T> Inbox<T> {
    /// Creates an inbox for as many bytes of messages.
    pub(crate) fn new(most_bytes: u64) -> Self {
        let waiting = Waiting { items: VecDeque::new(), bytes: 0, is_closed: false };
        Self { waiting: Mutex::new(waiting), arrived: Condvar::new(), most_bytes }
    }

    /// Adds a message of a peer. Returns false if there is no room, or nobody reads any more.
    pub(crate) fn offer(&self, item: T, bytes: u64) -> bool {
        let mut waiting = self.waiting.lock().ignore_poison();
        let bytes = bytes + MESSAGE_COST;
        if waiting.is_closed || waiting.bytes + bytes > self.most_bytes {
            return false;
        }
        waiting.bytes += bytes;
        waiting.items.push_back((item, bytes));
        self.arrived.notify_one();
        true
    }

    /// Adds an event of this process. Returns false if nobody reads any more.
    pub(crate) fn push(&self, item: T) -> bool {
        let mut waiting = self.waiting.lock().ignore_poison();
        if waiting.is_closed {
            return false;
        }
        waiting.items.push_back((item, 0));
        self.arrived.notify_one();
        true
    }

    /// Takes the oldest item. Waits until `deadline` for one.
    pub(crate) fn pop(&self, deadline: Option<Instant>) -> Option<T> {
        let mut waiting = self.waiting.lock().ignore_poison();
        loop {
            if let Some((item, bytes)) = waiting.items.pop_front() {
                waiting.bytes -= bytes;
                return Some(item);
            }
            let left = deadline.map_or(LONGEST, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            waiting = self.arrived.wait_timeout(waiting, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Refuses all that comes from now on, if nothing waits. Returns whether it does.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut waiting = self.waiting.lock().ignore_poison();
        waiting.is_closed |= waiting.items.is_empty();
        waiting.is_closed
    }
}

/// What a message without a payload costs.
const MESSAGE_COST: u64 = 1024;

/// After this an inbox looks again, whether or not it was notified.
const LONGEST: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_send_is_bounded_and_events_are_not() {
        let inbox = Inbox::new(4 * MESSAGE_COST);
        assert!(inbox.offer(1, MESSAGE_COST));
        assert!(!inbox.offer(2, 2 * MESSAGE_COST));
        assert!(inbox.offer(3, MESSAGE_COST));
        assert!(!inbox.offer(4, 0));
        assert!(inbox.push(5));
        assert!(!inbox.close_if_empty());
        let now = Some(Instant::now());
        assert_eq!([inbox.pop(now), inbox.pop(now), inbox.pop(now), inbox.pop(now)], [Some(1), Some(3), Some(5), None]);
        assert!(inbox.offer(6, 0));
        assert_eq!(inbox.pop(None), Some(6));
        assert!(inbox.close_if_empty());
        assert!(!inbox.offer(7, 0) && !inbox.push(8));
    }
}
