//! Pauses between two polls of a word that a GPU writes, which wakes no thread.

use std::time::Duration;

/// Pauses that grow from [`SHORTEST`] to [`LONGEST`]: early events are seen early, and late ones cost few polls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backoff {
    next: Duration,
    /// Each pause grows by one part in this many. A poll is therefore late by at most about this fraction of the time
    /// waited.
    part: u32,
}

impl Backoff {
    /// Returns the pauses for polls that are not urgent.
    pub(crate) const fn new() -> Self {
        Self { next: SHORTEST, part: 2 }
    }

    /// Returns the pauses for a thread that only waits.
    pub(crate) const fn attentive() -> Self {
        Self { next: SHORTEST, part: 8 }
    }

    /// Returns the next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause + pause / self.part).min(LONGEST);
        pause
    }
}

/// A few times the duration of a poll.
const SHORTEST: Duration = Duration::from_micros(20);

/// A thousand polls per second take less than a hundredth of a processor.
const LONGEST: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit() {
        let mut backoff = Backoff::new();
        let pauses: Vec<_> = std::iter::repeat_with(|| backoff.next()).take(20).collect();
        assert_eq!((pauses[0], pauses[1], pauses[19]), (SHORTEST, SHORTEST * 3 / 2, LONGEST));
        assert!(pauses.is_sorted());
        let mut backoff = Backoff::attentive();
        let pauses: Vec<_> = std::iter::repeat_with(|| backoff.next()).take(50).collect();
        assert_eq!((pauses[0], pauses[1], pauses[49]), (SHORTEST, SHORTEST * 9 / 8, LONGEST));
    }
}
