//! Tasks by queues, one each way: both sides waiting in turn, and one asleep.

use partywall_measure::Failure;

use super::{
    pair::{Side, Way},
    wakes::{exchange, wake},
};

pub(super) const WAYS: &[Way] = &[("task-exchange", in_turn), ("task-wake", asleep)];

fn in_turn(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let queues = side.queues()?;
    exchange(side, count, |at| queues.borrow_mut().send(at), |at| queues.borrow_mut().receive(at))
}

fn asleep(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let queues = side.queues()?;
    let end = || {
        queues.borrow_mut().complete()?;
        queues.borrow_mut().take()
    };
    let submit = |at| queues.borrow_mut().submit(at);
    let samples = wake(side, count, end, submit, |at| queues.borrow_mut().claim(at))?;
    end()?;
    Ok(samples)
}
