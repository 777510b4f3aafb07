//! Runs callbacks once the GPU has reached a point.
//!
//! The point is a [`Fence`], the callback gets a [`Completion`]:
//!
//! | fence | how it is detected | where the callback runs |
//! |---|---|---|
//! | [`PrivateWord`](Fence::PrivateWord), [`Timeline`](Fence::Timeline), [`Condition`](Fence::Condition) | polled: a write by the GPU wakes no thread | on the service thread, or on a thread that calls [`Completions::poll`] |
//! | [`DeviceIdle`](Fence::DeviceIdle) | a call that blocks in the driver | on the [gpu worker](Workers::gpu) |
//!
//! All polled fences together are one [poll task](crate::domain::PollTasks) of the service thread, which polls with
//! pauses of up to 1 ms. Only the first pending fence has to wake the thread. A caller that needs resources that
//! callbacks release calls [`Completions::poll`] instead of waiting for the thread.
//!
//! **Order.** One poll runs the callbacks of all fences that were reached by then, in the order in which they were
//! added. Two concurrent polls, or a poll and the gpu worker, may overlap.
//!
//! **What a callback may do.** It runs without a lock of this module, and may add a further fence. The callback of a
//! polled fence must not block on the broker, on the driver or on values of the user, because streams of this process
//! may wait for the service thread. It hands values of the user to the [user worker](Workers::user). It must not own a
//! handle of the connection, because the connection would then not end before the fence is reached.
//!
//! **Panics.** A panic ends only the callback.
//!
//! **Ends.** Every polled callback runs exactly once. Callbacks that are pending when the connection ends get
//! [`Completion::Unknown`], and so do those of private words when a CUDA context is lost. A callback of an idle device
//! keeps the connection until it has run.
//!
//! **Forks.** In a forked child everything belongs to the parent: no callback runs, and nothing is dropped.

mod worker;

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use partywall_cuda::DeviceUuid;
use partywall_os::{lock::IgnorePoison, process::fork_generation};
use partywall_shm::timeline::Progress;

pub(crate) use self::worker::{Worker, Workers, contained};
use crate::{
    backoff::Backoff,
    domain::{Lost, PollReason, PollTasks, PrivateWord, Word},
    error::Result,
};

/// A point that the work of the GPU reaches.
pub(crate) enum Fence {
    /// A stream stores the word's value. No other code waits for the word.
    PrivateWord(PrivateWord),
    /// A stream of this process signals the value on the timeline. The callback keeps the lease on the word.
    Timeline(Arc<Word>, u64),
    /// A condition on shared memory. It runs under the lock of this module and must only read.
    Condition(Box<dyn Fn() -> bool + Send>),
    /// All work that this process has enqueued so far on the GPUs of this memory is done. For host memory that no GPU
    /// uses it is reached immediately.
    DeviceIdle(Arc<dyn GpuMemory>),
}

/// Memory that work of a GPU may use.
pub(crate) trait GpuMemory: Send + Sync {
    /// Returns on which GPUs this process uses it.
    fn users(&self) -> Users;

    /// Waits until all work is done that this process has there now.
    fn wait_idle(&self) -> Result<()>;
}

/// The GPUs on which this process uses some memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Users {
    /// None: it is host memory.
    Nobody,
    /// The only one that reaches it, or the only one on which it was asked for.
    Gpu(DeviceUuid),
    /// Any of them, because the memory is registered with CUDA.
    EveryGpu,
}

/// The outcome of a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    /// It was reached.
    Done,
    /// It cannot be determined whether it is reached: the context is lost, the timeline has ended, or the connection
    /// ends.
    Unknown,
}

/// The pending fences of a connection, and their callbacks.
pub(crate) struct Completions {
    poll_tasks: Arc<PollTasks>,
    gpu: Arc<Worker>,
    /// The lost context, if any.
    lost: Arc<OnceLock<Lost>>,
    polled: Mutex<PolledFences>,
    idle: Mutex<Vec<Idle>>,
    /// The number of timelines that are pending or have a callback that has not returned.
    owed: AtomicUsize,
    /// The [`fork_generation`] of the owning process.
    generation: u64,
}

#[derive(Default)]
struct PolledFences {
    pending: Vec<Pending>,
    /// True if fences were added since the service thread polled last.
    is_fresh: bool,
    /// True if the service thread polls them.
    is_watched: bool,
}

type Callback = Box<dyn FnOnce(Completion) + Send>;

struct Pending {
    fence: Fence,
    callback: Callback,
    /// The outcome, once it is known.
    completion: Option<Completion>,
}

/// A callback that waits until the users of its memory are idle.
struct Idle {
    users: Users,
    memory: Arc<dyn GpuMemory>,
    callback: Callback,
}

impl Completions {
    pub(crate) fn new(poll_tasks: Arc<PollTasks>, gpu: Arc<Worker>, lost: Arc<OnceLock<Lost>>) -> Self {
        let polled = Mutex::default();
        let idle = Mutex::default();
        Self { poll_tasks, gpu, lost, polled, idle, owed: AtomicUsize::new(0), generation: fork_generation() }
    }

    /// Runs `callback` once the outcome of `fence` is known. If it is known already, runs it here.
    pub(crate) fn on(self: &Arc<Self>, fence: Fence, callback: impl FnOnce(Completion) + Send + 'static) {
        if !self.is_ours() {
            // Dropping them would release resources of the parent.
            return std::mem::forget((fence, callback));
        }
        let callback: Callback = Box::new(callback);
        if let Fence::DeviceIdle(memory) = fence {
            return match memory.users() {
                Users::Nobody => contained(|| callback(Completion::Done)),
                users => self.on_idle(Idle { users, memory, callback }),
            };
        }
        if let Fence::Timeline(..) = fence {
            self.owed.fetch_add(1, Ordering::AcqRel);
        }
        let mut pending = Pending { fence, callback, completion: None };
        if pending.is_decided(&self.lost, PollReason::Due) {
            return self.finish(pending);
        }
        let mut polled = self.polled.lock().ignore_poison();
        polled.pending.push(pending);
        polled.is_fresh = true;
        if std::mem::replace(&mut polled.is_watched, true) {
            return;
        }
        drop(polled);
        let completions = self.clone();
        let mut backoff = Backoff::new();
        self.poll_tasks.add(backoff.next(), move |reason| {
            let mut polled = completions.polled.lock().ignore_poison();
            let decided = polled.take_decided(&completions.lost, reason);
            polled.is_watched = !polled.pending.is_empty();
            let is_watched = polled.is_watched;
            if std::mem::take(&mut polled.is_fresh) || !decided.is_empty() {
                backoff = Backoff::new();
            }
            drop(polled);
            decided.into_iter().for_each(|pending| completions.finish(pending));
            is_watched.then(|| backoff.next())
        });
    }

    /// Runs the callbacks of all polled fences that have been reached. Does not block.
    pub(crate) fn poll(&self) {
        if self.is_ours() {
            let decided = self.polled.lock().ignore_poison().take_decided(&self.lost, PollReason::Due);
            decided.into_iter().for_each(|pending| self.finish(pending));
        }
    }

    /// Returns whether streams of this process still have to store promised values, or a callback of such a value has
    /// not returned.
    pub(crate) fn are_owed(&self) -> bool {
        self.owed.load(Ordering::Acquire) > 0
    }

    /// Waits until streams have stored all promised values, for at most `timeout`.
    pub(crate) fn await_owed(&self, timeout: Duration) {
        let start = Instant::now();
        let mut backoff = Backoff::new();
        while self.are_owed() {
            if start.elapsed() > timeout {
                tracing::warn!("a timeline is closed before its streams have stored all promised values");
                return;
            }
            std::thread::sleep(backoff.next());
        }
    }

    fn finish(&self, pending: Pending) {
        let Pending { fence, callback, completion } = pending;
        let is_owed = matches!(fence, Fence::Timeline(..));
        let completion = completion.unwrap_or(Completion::Unknown);
        if let (Fence::PrivateWord(word), Completion::Done) = (fence, completion) {
            word.give_back();
        }
        contained(|| callback(completion));
        if is_owed {
            self.owed.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Has the gpu worker wait for all callbacks of the same users together.
    fn on_idle(self: &Arc<Self>, waiting: Idle) {
        let users = waiting.users;
        let mut idle = self.idle.lock().ignore_poison();
        let has_job = idle.iter().any(|other| other.users == users);
        idle.push(waiting);
        drop(idle);
        if !has_job {
            let completions = self.clone();
            self.gpu.run(move || completions.await_idle(users));
        }
    }

    fn await_idle(&self, users: Users) {
        // Taken before the wait, because resources that are added later may be used by work that this does not wait
        // for.
        let waiting: Vec<Idle> =
            self.idle.lock().ignore_poison().extract_if(.., |waiting| waiting.users == users).collect();
        let Some(Idle { memory, .. }) = waiting.first() else { return };
        let completion = match memory.wait_idle() {
            Ok(()) => Completion::Done,
            Err(error) => {
                tracing::warn!(?users, %error, "resources that a GPU may use stay held until this process ends");
                Completion::Unknown
            }
        };
        for Idle { memory, callback, .. } in waiting {
            contained(|| {
                callback(completion);
                // The last of them may end the connection.
                drop(memory);
            });
        }
    }

    fn is_ours(&self) -> bool {
        self.generation == fork_generation()
    }
}

impl PolledFences {
    fn take_decided(&mut self, lost: &OnceLock<Lost>, reason: PollReason) -> Vec<Pending> {
        self.pending.extract_if(.., |pending| pending.is_decided(lost, reason)).collect()
    }
}

impl Pending {
    /// Returns whether the outcome of the fence is known.
    fn is_decided(&mut self, lost: &OnceLock<Lost>, reason: PollReason) -> bool {
        let (is_reached, is_over) = match &self.fence {
            Fence::PrivateWord(word) => (word.is_reached(), lost.get().is_some()),
            // A timeline ends when its writer's context is lost.
            Fence::Timeline(word, value) => match word.progress(*value) {
                Progress::Reached => (true, true),
                Progress::Ended(_) => (false, true),
                Progress::Pending | Progress::Announced => (false, false),
            },
            Fence::Condition(is_met) => (is_met(), false),
            Fence::DeviceIdle(_) => (false, false),
        };
        self.completion = match is_reached {
            true => Some(Completion::Done),
            false if is_over || reason == PollReason::Closing => Some(Completion::Unknown),
            false => None,
        };
        self.completion.is_some()
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
