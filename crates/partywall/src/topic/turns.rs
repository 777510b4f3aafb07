//! Sending, by more threads through one publisher than it may have loans.
//!
//! A thread that sends needs a loan only briefly. If all loans are taken and some of them are turns, the next thread
//! waits for a turn to end instead of failing.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use partywall_cuda::StreamRef;
use partywall_shm::DType;

use super::{Loan, Published, Publisher};
use crate::{
    error::{Error, LimitReached, Result, TopicLimit},
    wait::Wait,
};

/// A thread's turn to send. It ends when it is dropped.
struct SendTurn<'a>(&'a SendTurns);

/// The turns that have begun and ended. An open turn has one of the publisher's loans, or asks for one.
#[derive(Debug, Default)]
pub(super) struct SendTurns {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Publisher {
    /// Publishes a copy of a tensor's bytes, in any kind of memory. Waits for a block, and for blocking subscribers.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Publisher, Result};
    /// # fn publish(publisher: &Publisher, picture: &[u8]) -> Result<()> {
    /// publisher.send(DType::U8, &[480, 640, 3], picture, Duration::from_secs(1))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`loan`](Self::loan), [`Loan::write`] and [`Filled::publish`](super::Filled::publish). After an error nothing
    /// was published.
    pub fn send<'w>(&self, dtype: DType, shape: &[u64], bytes: &[u8], wait: impl Into<Wait<'w>>) -> Result<Published> {
        self.send_with(dtype, shape, wait, |loan| loan.write(bytes).map(|()| None))
    }

    /// Has `fill` write a sample, and publishes it. If work of a stream completes the sample, `fill` returns that
    /// stream.
    ///
    /// More threads may send through one publisher than it may have loans: a thread that finds all of them taken waits
    /// for another that sends, unless all are held by calls of [`loan`](Self::loan).
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Publisher, Result};
    /// # fn publish(publisher: &Publisher, picture: &[u8]) -> Result<()> {
    /// publisher.send_with(DType::U8, &[480, 640, 3], Duration::from_secs(1), |loan| {
    ///     loan.header(b"camera 3")?;
    ///     loan.write(picture)?;
    ///     Ok(None) // complete: no stream has work to do for it
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`Filled::publish`](super::Filled::publish), or
    /// [`Filled::publish_on`](super::Filled::publish_on) with a stream; those of `fill`. After an error nothing was
    /// published.
    pub fn send_with<'w, 's>(
        &self,
        dtype: DType,
        shape: &[u64],
        wait: impl Into<Wait<'w>>,
        fill: impl FnOnce(&mut Loan) -> Result<Option<StreamRef<'s>>>,
    ) -> Result<Published> {
        let waiting = wait.into().begin();
        let wait = waiting.resume();
        let (_turn, mut loan) = self.await_turns(wait, 1, |wait| {
            self.turns.begun.fetch_add(1, Ordering::SeqCst);
            let turn = SendTurn(&self.turns);
            // A refused thread ends its turn before it waits: otherwise two of them would wait for each other.
            self.loan_now(dtype, shape, wait).map(|loan| (turn, loan))
        })?;
        let published = match fill(&mut loan)? {
            Some(stream) => loan.filled().publish_on(stream, wait),
            None => loan.filled().publish(wait),
        };
        published.map_err(|unpublished| unpublished.error)
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

impl Drop for SendTurn<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// The pause between two attempts: about the time that sending takes.
const PAUSE: Duration = Duration::from_micros(20);
