//! The queue of a stream and the thread that runs its work: in order, and asynchronously to the enqueuing thread.
//!
//! `SIMCUDA_DELAY` (microseconds) is the longest pause before each operation and between the pieces of a large one. The
//! pauses make missing synchronization show as wrong data; `SIMCUDA_SEED` repeats the pauses.
//!
//! When the context is lost, the remaining work is removed without running: its waiters wake and see the
//! context's error, and no work writes memory any more.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use partywall_os::lock::IgnorePoison;

use crate::abi::Code;
use crate::context::Ctx;
use crate::{entry, threads};

/// One operation of a stream.
pub(crate) type Work = Box<dyn FnOnce(&mut Runner) -> Result<(), Code> + Send>;

/// Work that may be done several times: a graph does it at each launch.
pub(crate) type SharedWork = Arc<dyn Fn(&mut Runner) -> Result<(), Code> + Send + Sync>;

/// One stream's work. The thread ends when the queue is closed and empty.
pub(crate) struct Queue {
    context: Arc<Ctx>,
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    pending: VecDeque<Work>,
    enqueued: u64,
    done: u64,
    closed: bool,
}

/// A point in a queue, reached when all work that was enqueued before it is done.
#[derive(Clone)]
pub(crate) struct Ticket {
    queue: Arc<Queue>,
    number: u64,
}

/// The thread of a queue, as the work sees it.
pub struct Runner {
    queue: Arc<Queue>,
    random: Random,
}

/// A generator for each stream (xorshift64*), so that the pauses of one do not depend on the others.
struct Random(u64);

impl Queue {
    /// Returns an empty queue with its thread.
    pub(crate) fn start(context: &Arc<Ctx>) -> Arc<Self> {
        let queue = Arc::new(Self { context: context.clone(), state: Mutex::default(), changed: Condvar::new() });
        let runner = Runner { queue: queue.clone(), random: Random::of_next_stream() };
        threads::spawn("simcuda-stream", move || runner.run());
        queue
    }

    pub(crate) fn enqueue(self: &Arc<Self>, work: Work) -> Ticket {
        let mut state = self.lock();
        state.pending.push_back(work);
        state.enqueued += 1;
        self.changed.notify_all();
        Ticket { queue: self.clone(), number: state.enqueued }
    }

    /// Returns the point after all work that is enqueued now.
    pub(crate) fn tail(self: &Arc<Self>) -> Ticket {
        Ticket { queue: self.clone(), number: self.lock().enqueued }
    }

    /// Lets the thread end once the queue is empty.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_finished(&self) -> bool {
        let state = self.lock();
        state.closed && state.done == state.enqueued
    }

    pub(crate) fn context(&self) -> &Arc<Ctx> {
        &self.context
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().ignore_poison()
    }

    fn next(&self) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.pending.pop_front() {
                return Some(work);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).ignore_poison();
        }
    }
}

impl Ticket {
    pub(crate) fn is_reached(&self) -> bool {
        self.queue.lock().done >= self.number
    }

    /// Blocks until the point is reached, or the context was lost and the queue emptied.
    pub(crate) fn wait(&self) {
        let mut state = self.queue.lock();
        while state.done < self.number {
            state = self.queue.changed.wait(state).ignore_poison();
        }
    }
}

impl Runner {
    /// Pauses before an operation or between the pieces of a large one, so that other streams may get ahead.
    pub(crate) fn pause(&mut self) {
        let longest = SETTINGS.delay;
        if longest > Duration::ZERO {
            thread::sleep(self.random.up_to(longest));
        }
    }

    /// Polls until `ready` returns true, because a plain store by another process wakes no thread. Ends with the
    /// context's error if the context is lost.
    pub(crate) fn poll(&self, mut ready: impl FnMut() -> Result<bool, Code>) -> Result<(), Code> {
        poll(|| {
            self.context().check()?;
            ready()
        })
    }

    pub(crate) fn context(&self) -> &Arc<Ctx> {
        self.queue.context()
    }

    fn run(mut self) {
        entry::forbid_calls();
        while let Some(work) = self.queue.next() {
            if self.context().check().is_ok() {
                self.pause();
            }
            // Not before the pause alone: a fault on another stream meanwhile stops this one too.
            if self.context().check().is_ok()
                && let Err(code) = work(&mut self)
            {
                self.context().fault(code);
            }
            self.queue.lock().done += 1;
            self.queue.changed.notify_all();
        }
    }
}

/// Calls `ready` until it returns true, at first in short intervals.
pub(crate) fn poll(mut ready: impl FnMut() -> Result<bool, Code>) -> Result<(), Code> {
    let mut nap = SHORTEST_NAP;
    while !ready()? {
        thread::sleep(nap);
        nap = (nap * 2).min(LONGEST_NAP);
    }
    Ok(())
}

impl Random {
    fn of_next_stream() -> Self {
        static STREAMS: AtomicU64 = AtomicU64::new(1);
        let index = STREAMS.fetch_add(1, Ordering::Relaxed);
        // The odd factor spreads neighbouring indices over all bits; the state must not be 0.
        Self((SETTINGS.seed ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15)).max(1))
    }

    /// Returns a duration from nothing up to `longest`.
    fn up_to(&mut self, longest: Duration) -> Duration {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32;
        longest.mul_f64(f64::from(high) / f64::from(u32::MAX))
    }
}

struct Settings {
    delay: Duration,
    seed: u64,
}

static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let number = |name: &str| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => 0,
    };
    Settings { delay: Duration::from_micros(number("SIMCUDA_DELAY")), seed: number("SIMCUDA_SEED") }
});

const SHORTEST_NAP: Duration = Duration::from_micros(10);
const LONGEST_NAP: Duration = Duration::from_micros(500);
