//! Turns, which allow more threads to send through one publisher than it may have loans.
//!
//! A thread that sends needs a loan only briefly. If all loans are taken and some of them are turns, the next thread
//! waits for a turn to end instead of failing.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use partywall_shm::DType;

use super::{Loan, Publisher};
use crate::{
    error::{Error, LimitReached, Result, TopicLimit},
    wait::Wait,
};

/// A thread's turn to send ([`Publisher::loan_in_turn`]). Drop it once the sample is published.
#[derive(Debug)]
#[must_use = "the turn ends when it is dropped"]
pub struct Turn<'a>(&'a Turns);

/// The turns that have begun and ended. An open turn has one of the publisher's loans, or asks for one.
#[derive(Debug, Default)]
pub(super) struct Turns {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Publisher {
    /// Borrows a block as [`loan`](Self::loan) does, for a sample that this thread publishes immediately.
    ///
    /// While the returned [`Turn`] lives, other threads that find all loans taken wait for it.
    ///
    /// # Errors
    /// As [`loan`](Self::loan).
    pub fn loan_in_turn<'w>(&self, dtype: DType, shape: &[u64], wait: impl Into<Wait<'w>>) -> Result<(Turn<'_>, Loan)> {
        self.await_turns(wait.into(), 1, |wait| {
            self.turns.begun.fetch_add(1, Ordering::SeqCst);
            let turn = Turn(&self.turns);
            // A refused thread ends its turn before it waits: otherwise two of them would wait for each other.
            self.loan_now(dtype, shape, wait).map(|loan| (turn, loan))
        })
    }

    /// Asks again while the limit of loans is reached and other threads have turns. `own` is the number of turns that
    /// `loan` itself begins, and ends if it is refused.
    pub(super) fn await_turns<'w, T>(
        &self,
        mut wait: Wait<'w>,
        own: u64,
        mut loan: impl FnMut(Wait<'w>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let ended = self.turns.ended.load(Ordering::SeqCst);
            let refused = match loan(wait) {
                Err(refused @ Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Loans, .. })) => refused,
                outcome => return outcome,
            };
            // A turn that ended since may have given its loan back after we asked.
            let is_hopeless = self.turns.begun.load(Ordering::SeqCst) - ended == own;
            let waiting = wait.begin();
            if is_hopeless || waiting.left(Instant::now()).is_none() {
                return Err(refused);
            }
            std::thread::sleep(PAUSE);
            wait = waiting.resume();
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// The pause between two attempts: about the time that sending takes.
const PAUSE: Duration = Duration::from_micros(20);
