//! Tasks by queues, one each way, to a side that sleeps.

use partywall_measure::Failure;

use super::{
    pair::{Side, Way},
    wakes::wake,
};

pub(super) const WAYS: &[Way] = &[("task-wake", asleep)];

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
