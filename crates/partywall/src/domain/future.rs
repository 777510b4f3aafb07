//! Futures: waits that block no thread.
//!
//! A future waits for a condition in shared memory, which other processes change without waking anything in this one. As
//! for the descriptors of event loops, the service thread polls the conditions. It wakes the task of a future directly:
//! an eventfd for each would cost system calls, and a server that waits for a thousand results has no descriptors for
//! them. All conditions of a connection are one poll task, which exists only while there are some.
//!
//! A condition only says that it is worth while to try again. As a thread that sleeps, a future is also woken every
//! [`MAX_SLEEP`], for what its condition does not show: a stale version, or a process that was killed before it notified
//! others. Each future tries without waiting, waits for its condition and repeats that. So what it takes, it takes in
//! the poll that returns it, and a future that is dropped earlier has taken nothing.

use std::{
    fmt,
    os::fd::OwnedFd,
    panic,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, Weak},
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use futures_core::Stream;
use partywall_os::{lock::IgnorePoison, process::fork_generation};
use partywall_shm::MAX_SLEEP;
use partywall_wire::{Access as WireAccess, Answer, Call, Open, Opened};

use super::{
    Domain, PollReason, answered, check_name,
    link::{Answered, PendingCall},
};
use crate::{
    backoff::Backoff,
    completion::contained,
    error::{Error, Result},
};

/// A future that completes once a condition holds, after [`MAX_SLEEP`], or when the broker is gone for good or the
/// connection ends. In a forked child, which has no service thread, it is complete.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub(crate) struct Until {
    state: Arc<Mutex<UntilState>>,
    generation: u64,
}

#[derive(Debug)]
enum UntilState {
    /// With the waker of the task, once it was polled.
    Waiting(Option<Waker>),
    Over,
}

/// The conditions that the futures of a connection wait for.
#[derive(Default)]
struct Conditions(Mutex<ConditionList>);

#[derive(Default)]
struct ConditionList {
    all: Vec<Condition>,
    /// True if some were added since the last poll.
    is_longer: bool,
}

struct Condition {
    /// Says at a given time whether the condition holds.
    holds: Box<dyn FnMut(Instant) -> bool + Send>,
    /// When it does not matter any more whether it holds.
    end: Instant,
    /// Dead once the future is dropped.
    until: Weak<Mutex<UntilState>>,
}

impl Domain {
    /// Returns a future that completes once the service thread finds that `holds`, or for another reason to check. The
    /// caller then checks for itself.
    ///
    /// As every poll task, `holds` must not block. It must not own a connection either.
    pub(crate) fn until(&self, holds: impl FnMut(Instant) -> bool + Send + 'static) -> Until {
        let until = Arc::new(Mutex::new(UntilState::Waiting(None)));
        let conditions = self.extension::<Conditions>();
        let end = Instant::now() + MAX_SLEEP;
        if conditions.add(Condition { holds: Box::new(holds), end, until: Arc::downgrade(&until) }) {
            let link = self.connection.link.clone();
            let mut backoff = Backoff::new();
            self.poll_tasks().add(Duration::ZERO, move |reason| {
                let is_over = reason == PollReason::Closing || link.require_broker().is_err();
                conditions.poll(is_over, &mut backoff)
            });
        }
        Until { state: until, generation: fork_generation() }
    }

    /// Completes after `time`, rounded up to the next poll of the service thread.
    pub(crate) fn pause(&self, time: Duration) -> Until {
        let end = Instant::now() + time;
        self.until(move |now| now >= end)
    }

    /// Makes a call that may have to wait in the broker, and hands the answer to `accept`. Both happen on threads that
    /// may block; no thread waits. If the future is dropped, what the broker grants goes back.
    pub(crate) async fn call_async<T: Send + 'static>(
        &self,
        call: Call,
        mut accept: impl FnOnce(Answered) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut pending = Box::new(PendingCall::new(self.connection.link.clone(), self.workers().broker.clone(), call));
        loop {
            // Whatever this returns, nobody may be there to take it. Dropping it then gives it back.
            let step = blocking(move || match pending.poll()? {
                Some(answered) => accept(answered).map(Step::Over),
                None => Ok(Step::Waits(pending, accept)),
            });
            match step.await? {
                Step::Over(accepted) => return Ok(accepted),
                Step::Waits(same, unused) => {
                    pending = same;
                    accept = unused;
                }
            }
            let is_decided = pending.is_decided();
            self.link().require_ours()?;
            while !is_decided(Instant::now()) {
                self.until(is_decided.clone()).await;
                self.link().require_ours()?;
            }
        }
    }

    /// Opens a version as [`ask_to_open`](Self::ask_to_open) does, and waits for it for as long as it is polled.
    pub(crate) async fn open_version<T: Send + 'static>(
        &self,
        name: &str,
        version: Option<u64>,
        access: WireAccess,
        attach: impl FnOnce(Opened, Vec<OwnedFd>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let call = Call::Open(Open { name: check_name(name)?, version, access, wait: true });
        let accept = move |(answer, fds)| attach(answered!(answer, Answer::Opened(opened) => opened)?, fds);
        self.call_async(call, accept).await
    }
}

enum Step<T, F> {
    Over(T),
    Waits(Box<PendingCall>, F),
}

/// Runs code that blocks on a thread for that.
pub(crate) async fn blocking<T: Send + 'static>(act: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let failed = match tokio::task::spawn_blocking(act).await {
        Ok(outcome) => return outcome,
        Err(failed) => failed,
    };
    match failed.try_into_panic() {
        Ok(panic) => panic::resume_unwind(panic),
        Err(_) => {
            Err(Error::Cancelled { what: "cannot ask the broker: the runtime of tokio ran no thread".to_owned() })
        }
    }
}

/// Returns a stream of the results of the futures that `next` returns, one after another. It ends with the first error,
/// or when a future returns `None`.
pub(crate) fn stream<'a, T, F>(
    next: impl FnMut() -> F + Send + Unpin + 'a,
) -> impl Stream<Item = Result<T>> + Send + Unpin
where
    F: Future<Output = Result<Option<T>>> + Send + 'a,
{
    Results { next, future: None, is_complete: true, is_over: false }
}

struct Results<N, F> {
    next: N,
    /// The future that was polled last. In a box, which all of them use, so that the stream can be moved.
    future: Option<Pin<Box<F>>>,
    /// True if `future` is complete, so that it has to be replaced.
    is_complete: bool,
    is_over: bool,
}

impl<T, F: Future<Output = Result<Option<T>>>, N: FnMut() -> F + Unpin> Stream for Results<N, F> {
    type Item = Result<T>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        let Self { next, future, is_complete, is_over } = self.get_mut();
        if *is_over {
            return Poll::Ready(None);
        }
        let future = match future {
            Some(future) => {
                if *is_complete {
                    future.set(next());
                }
                future
            }
            None => future.insert(Box::pin(next())),
        };
        *is_complete = false;
        let result = ready!(future.as_mut().poll(context)).transpose();
        *is_complete = true;
        *is_over = !matches!(result, Some(Ok(_)));
        Poll::Ready(result)
    }
}

impl Conditions {
    /// Adds a condition. Returns whether it is the only one, so that the caller has to have them polled.
    fn add(&self, condition: Condition) -> bool {
        let mut list = self.lock();
        list.all.push(condition);
        list.is_longer = true;
        list.all.len() == 1
    }

    /// Completes the futures whose conditions hold; all of them if waiting `is_over`. Returns the pause until the next
    /// poll, `None` if no condition is left.
    fn poll(&self, is_over: bool, backoff: &mut Backoff) -> Option<Duration> {
        let mut list = self.lock();
        let now = Instant::now();
        let over: Vec<_> = list.all.extract_if(.., |condition| is_over || condition.is_over(now)).collect();
        if std::mem::take(&mut list.is_longer) || !over.is_empty() {
            *backoff = Backoff::new();
        }
        let is_empty = list.all.is_empty();
        drop(list);
        // Without the lock: waking may run code of the executor, and dropping gives back leases.
        for condition in over {
            if let Some(until) = condition.until.upgrade() {
                end(&until);
            }
        }
        (!is_empty).then(|| backoff.next())
    }

    fn lock(&self) -> MutexGuard<'_, ConditionList> {
        self.0.lock().ignore_poison()
    }
}

impl Condition {
    fn is_over(&mut self, now: Instant) -> bool {
        self.until.strong_count() == 0 || now >= self.end || (self.holds)(now)
    }
}

/// Completes a future, and wakes its task.
fn end(until: &Mutex<UntilState>) {
    let before = std::mem::replace(&mut *until.lock().ignore_poison(), UntilState::Over);
    if let UntilState::Waiting(Some(waker)) = before {
        contained(|| waker.wake());
    }
}

impl Future for Until {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // First, because in a child the lock may be held by a thread that does not exist there.
        if self.generation != fork_generation() {
            return Poll::Ready(());
        }
        match &mut *self.state.lock().ignore_poison() {
            UntilState::Over => Poll::Ready(()),
            UntilState::Waiting(Some(waker)) => {
                waker.clone_from(context.waker());
                Poll::Pending
            }
            UntilState::Waiting(none) => {
                *none = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conditions").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_polled_until_none_is_left() {
        let conditions = Conditions::default();
        let mut backoff = Backoff::new();
        let add = |holds: bool| {
            let until = Arc::new(Mutex::new(UntilState::Waiting(None)));
            let end = Instant::now() + Duration::from_secs(1000);
            let condition = Condition { holds: Box::new(move |_| holds), end, until: Arc::downgrade(&until) };
            (conditions.add(condition), until)
        };
        let is_over = |until: &Arc<Mutex<UntilState>>| matches!(*until.lock().unwrap(), UntilState::Over);
        let (is_first, never) = add(false);
        let (is_first_again, now) = add(true);
        assert_eq!((is_first, is_first_again), (true, false), "one poll task is enough");
        assert!(conditions.poll(false, &mut backoff).is_some());
        assert_eq!((is_over(&never), is_over(&now)), (false, true));
        drop(never);
        assert!(conditions.poll(false, &mut backoff).is_none(), "nothing waits any more");
        let (is_first, last) = add(false);
        assert!(is_first, "there is no poll task any more");
        assert!(conditions.poll(true, &mut backoff).is_none());
        assert!(is_over(&last), "the end of the broker ends it");
    }
}
