//! Tasks by queues, one each way: both sides waiting in turn, and one asleep.

use std::cell::RefCell;

use partywall::{ClaimedTask, Domain, Place, Queue, Task, Ticket};
use partywall_measure::Failure;

use super::{
    pair::{Side, Way},
    wakes::{exchange, wake},
};
use crate::process::TIMEOUT;

/// One side's ends of two queues.
pub(super) struct Queues {
    ours: Queue,
    theirs: Queue,
    /// The last task of this side, whose result has not been taken.
    last: RefCell<Option<Ticket>>,
    /// The last task of the other side, which is not complete.
    claimed: RefCell<Option<ClaimedTask>>,
}

pub(super) const WAYS: &[Way] = &[("task-exchange", in_turn), ("task-wake", asleep)];

impl Queues {
    pub(super) fn new(domain: &Domain, first: bool) -> Result<Self, Failure> {
        let queue = |side| domain.queue(if side { "first" } else { "second" }).place(Place::Host).open_or_create();
        let (ours, theirs) = (queue(first)?, queue(!first)?);
        Ok(Self { ours, theirs, last: RefCell::default(), claimed: RefCell::default() })
    }

    fn submit(&self, value: u64) -> Result<(), Failure> {
        let task = Task::new("count").arguments(&value.to_le_bytes());
        let ticket = self.ours.submit(task, TIMEOUT).map_err(|refused| refused.error)?;
        self.last.replace(Some(ticket));
        Ok(())
    }

    fn claim(&self, value: u64) -> Result<(), Failure> {
        let task = self.theirs.claim(TIMEOUT)?;
        if task.arguments() != value.to_le_bytes() {
            return Err(format!("task {:?} instead of {value}", task.arguments()).into());
        }
        self.claimed.replace(Some(task));
        Ok(())
    }

    /// Completes the last task of the other side.
    fn complete(&self) -> Result<(), Failure> {
        Ok(self.claimed.take().map_or(Ok(()), ClaimedTask::complete)?)
    }

    /// Takes the result of the last task of this side.
    fn take(&self) -> Result<(), Failure> {
        if let Some(last) = self.last.take() {
            last.wait(TIMEOUT)?;
        }
        Ok(())
    }
}

fn in_turn(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let queues = side.queues()?;
    let submit = |at| {
        queues.take()?;
        queues.submit(at)
    };
    let claim = |at| {
        queues.claim(at)?;
        queues.complete()
    };
    exchange(side, count, submit, claim)
}

fn asleep(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let queues = side.queues()?;
    let end = || {
        queues.complete()?;
        queues.take()
    };
    let samples = wake(side, count, end, |at| queues.submit(at), |at| queues.claim(at))?;
    end()?;
    Ok(samples)
}
