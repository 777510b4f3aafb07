//! Recording what this process does, for tracers.

use std::{cell::Cell, sync::Arc};

pub(crate) use partywall_shm::trace::Action;
use partywall_shm::{
    members::now_ns,
    queue::TaskId,
    trace::{TraceEvent, Traces, object},
};

/// Records what this process does while a tracer reads the domain.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    pub(crate) traces: Arc<Traces>,
    row: u16,
    pid: u32,
}

impl Recorder {
    pub(crate) fn new(traces: Arc<Traces>, row: u16) -> Self {
        Self { traces, row, pid: std::process::id() }
    }

    /// Returns the time at which an action begins, or `None` if no process traces.
    #[inline]
    pub(crate) fn begin(&self) -> Option<u64> {
        if self.traces.are_on() { Some(now_ns()) } else { None }
    }

    /// Records an action of one moment.
    #[inline]
    pub(crate) fn record(&self, action: Action, object: impl FnOnce() -> u64, value: u64) {
        if let Some(now) = self.begin() {
            self.record_at(action, object(), value, 0, now, now);
        }
    }

    /// Records what this process does with an attempt of a task, which began at `since`. Records nothing if no process
    /// traced then.
    #[inline]
    pub(crate) fn record_task(&self, action: Action, queue: u64, task: TaskId, attempt: u8, since: Option<u64>) {
        if let Some(since) = since {
            self.record_at(action, queue, task.number(), attempt, since, now_ns());
        }
    }

    /// Records an action that began at `since`. Records nothing if no process traced then.
    #[inline]
    pub(crate) fn record_since(&self, action: Action, object: impl FnOnce() -> u64, value: u64, since: Option<u64>) {
        if let Some(since) = since {
            self.record_at(action, object(), value, 0, since, now_ns());
        }
    }

    #[cold]
    fn record_at(&self, action: Action, object: u64, value: u64, attempt: u8, since: u64, at: u64) {
        thread_local! {
            static THREAD: Cell<u32> = const { Cell::new(0) };
        }
        let tid = THREAD.try_with(|thread| {
            if thread.get() == 0 {
                thread.set(rustix::thread::gettid().as_raw_nonzero().get() as u32);
            }
            thread.get()
        });
        let event = TraceEvent { since, at, pid: self.pid, tid: tid.unwrap_or(0), action, object, value, attempt };
        self.traces.record(self.row, &event);
    }
}

/// Returns the number of a timeline in traces.
pub(crate) fn timeline_object(name: &str) -> u64 {
    object(name, 0)
}

/// Returns the number of a topic or queue in traces.
pub(crate) fn version_object(name: &str, version: u64) -> u64 {
    object(name, version)
}
