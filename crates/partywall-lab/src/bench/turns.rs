//! Hand-offs in turn, and the objects by which hosts hand over. Several subjects use them.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use partywall::{ClaimedTask, DType, Domain, Place, Policy, Publisher, Queue, Sample, Subscriber, Task, Ticket};
use partywall_measure::Failure;
use partywall_os::futex;

use crate::prelude::TIMEOUT;

/// What one of two processes does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It sends the other process a value.
    Send,
    /// It waits for the value.
    Receive,
}

/// Sends and receives each value. The first process sends first. Returns how long it took.
///
/// # Errors
/// Those of `act`.
pub(crate) fn in_turn(
    first: bool,
    values: impl IntoIterator<Item = u64>,
    mut act: impl FnMut(Turn, u64) -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    let order = if first { [Turn::Send, Turn::Receive] } else { [Turn::Receive, Turn::Send] };
    let start = Instant::now();
    for value in values {
        act(order[0], value)?;
        act(order[1], value)?;
    }
    Ok(start.elapsed())
}

/// Writes a value and wakes at most `sleepers` threads.
pub(crate) fn store_and_wake(word: &AtomicU32, value: u32, sleepers: u32) {
    word.store(value, Ordering::Release);
    futex::wake(word, sleepers);
}

/// Sleeps until a word is at least `value`, with a timeout, as the library's waits do. Returns the present value, which
/// is lower after the timeout.
pub(crate) fn sleep_until(word: &AtomicU32, value: u32) -> u32 {
    let mut waits = true;
    loop {
        let found = word.load(Ordering::Acquire);
        if found >= value || !waits {
            return found;
        }
        waits = futex::wait(word, found, TIMEOUT);
    }
}

/// Checks that the received value is the one that was sent.
///
/// # Errors
/// It is another value.
pub(crate) fn same(found: u64, value: u64) -> Result<(), Failure> {
    if found == value { Ok(()) } else { Err(format!("{found} was received instead of {value}").into()) }
}

/// Publishes a number, the one element of a sample.
///
/// # Errors
/// Those of the library.
pub(crate) fn publish(publisher: &Publisher, value: u64) -> Result<(), Failure> {
    let mut loan = publisher.loan(DType::U64, &[1], TIMEOUT)?;
    loan.as_mut_slice()?[0] = value;
    loan.filled().publish(TIMEOUT).map_err(|refused| refused.error)?;
    Ok(())
}

/// One side's ends of two topics: its publisher, and its subscribers of the other topic. Each sample is a number.
#[derive(Debug)]
pub(crate) struct Topics {
    /// Of this side's topic.
    pub(crate) publisher: Publisher,
    /// Of the other side's topic.
    pub(crate) subscribers: Vec<Subscriber>,
}

impl Topics {
    /// Opens both topics, or creates them. A sample has at most `bytes` bytes, and each side has `subscribers`
    /// subscribers.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn new(
        domain: &Domain,
        [ours, theirs]: [&str; 2],
        place: Place,
        subscribers: usize,
        bytes: u64,
    ) -> Result<Self, Failure> {
        let topic = |name: &str| {
            let topic = domain.topic(name).place(place).max_bytes(bytes).publishers(1);
            topic.subscribers(subscribers as u32).open_or_create()
        };
        let ours = topic(ours)?;
        let theirs = topic(theirs)?;
        let subscribers = (0..subscribers).map(|_| theirs.subscriber(Policy::Block)).collect::<Result<_, _>>()?;
        Ok(Self { publisher: ours.publisher()?, subscribers })
    }

    /// Publishes a number.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn send(&self, value: u64) -> Result<(), Failure> {
        publish(&self.publisher, value)
    }

    /// Waits until each subscriber has received a number.
    ///
    /// # Errors
    /// Those of the library, or it is another number.
    pub(crate) fn receive(&self, value: u64) -> Result<(), Failure> {
        self.receive_by(value, |subscriber| subscriber.recv(TIMEOUT).map(Some))
    }

    /// Polls until each subscriber has received a number.
    ///
    /// # Errors
    /// Those of the library, or it is another number.
    pub(crate) fn poll(&self, value: u64) -> Result<(), Failure> {
        self.receive_by(value, Subscriber::try_recv)
    }

    fn receive_by(
        &self,
        value: u64,
        receive: impl Fn(&Subscriber) -> partywall::Result<Option<Sample>>,
    ) -> Result<(), Failure> {
        for subscriber in &self.subscribers {
            let sample = loop {
                if let Some(sample) = receive(subscriber)? {
                    break sample;
                }
            };
            same(sample.as_slice::<u64>()?[0], value)?;
        }
        Ok(())
    }
}

/// One side's ends of two queues in host memory: it submits to one and works on the other. The argument of a task is a
/// number.
#[derive(Debug)]
pub(crate) struct Queues {
    ours: Queue,
    theirs: Queue,
    /// The last task of this side, if its result has not been taken.
    last: Option<Ticket>,
    /// The last task of the other side, if it is not complete.
    claimed: Option<ClaimedTask>,
}

impl Queues {
    /// Opens both queues, or creates them.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn new(domain: &Domain, [ours, theirs]: [&str; 2]) -> Result<Self, Failure> {
        let queue = |name: &str| domain.queue(name).place(Place::Host).open_or_create();
        Ok(Self { ours: queue(ours)?, theirs: queue(theirs)?, last: None, claimed: None })
    }

    /// Submits a task.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn submit(&mut self, value: u64) -> Result<(), Failure> {
        let task = Task::new("count").arguments(&value.to_ne_bytes()).cancel_with_submitter(true);
        self.last = Some(self.ours.submit(task, TIMEOUT).map_err(|refused| refused.error)?);
        Ok(())
    }

    /// Claims the next task of the other side.
    ///
    /// # Errors
    /// Those of the library, or it has another number.
    pub(crate) fn claim(&mut self, value: u64) -> Result<(), Failure> {
        let task = self.theirs.claim(TIMEOUT)?;
        let found = task.arguments().try_into().map_or(0, u64::from_ne_bytes);
        self.claimed = Some(task);
        same(found, value)
    }

    /// Completes the last task of the other side, if it is claimed.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn complete(&mut self) -> Result<(), Failure> {
        Ok(self.claimed.take().map_or(Ok(()), ClaimedTask::complete)?)
    }

    /// Takes the result of the last task of this side, if it has not been taken.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn take(&mut self) -> Result<(), Failure> {
        if let Some(last) = self.last.take() {
            last.wait(TIMEOUT)?;
        }
        Ok(())
    }

    /// Submits a task for the other side, and takes the result of the previous task, which is complete by then.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`take`](Self::take).
    pub(crate) fn send(&mut self, value: u64) -> Result<(), Failure> {
        self.take()?;
        self.submit(value)
    }

    /// Claims the task of the other side, and completes it.
    ///
    /// # Errors
    /// As [`claim`](Self::claim) and [`complete`](Self::complete).
    pub(crate) fn receive(&mut self, value: u64) -> Result<(), Failure> {
        self.claim(value)?;
        self.complete()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn each_value_goes_there_and_back() {
        let words = [const { AtomicU32::new(0) }; 2];
        let play = |first: bool| {
            let side = usize::from(!first);
            in_turn(first, 1..=100, |turn, value| match turn {
                Turn::Send => {
                    store_and_wake(&words[side], value as u32, 1);
                    Ok(())
                }
                Turn::Receive => same(sleep_until(&words[1 - side], value as u32).into(), value),
            })
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| play(false));
            play(true).unwrap();
            other.join().unwrap().unwrap();
        });
        assert_eq!(words.map(AtomicU32::into_inner), [100, 100]);
    }

    #[test]
    fn failure_ends_the_turns() {
        let received = in_turn(false, 1..=3, |turn, value| match (turn, value) {
            (Turn::Receive, 2) => same(1, value),
            _ => Ok(()),
        });
        assert_eq!(received.unwrap_err().to_string(), "1 was received instead of 2");
    }
}
