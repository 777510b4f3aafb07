//! Traces: what the processes of a domain publish, receive, release, signal and wait for, as it happens.

use std::{
    cell::Cell,
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_shm::{
    members::now_ns,
    trace::{Event, Reader, Traces, object},
};

pub use partywall_shm::trace::Action;

use crate::{
    Domain,
    error::Result,
    info::{Named, ObjectInfo},
};

/// Records what this process does, while somebody traces the domain.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    traces: Arc<Traces>,
    row: u16,
    pid: u32,
}

impl Recorder {
    pub(crate) fn new(traces: Arc<Traces>, row: u16) -> Self {
        Self { traces, row, pid: std::process::id() }
    }

    /// Returns the time if somebody traces, as the beginning of an action that takes time.
    #[inline]
    pub(crate) fn begin(&self) -> Option<u64> {
        if self.traces.are_on() { Some(now_ns()) } else { None }
    }

    /// Records an action of one moment.
    #[inline]
    pub(crate) fn record(&self, action: Action, object: impl FnOnce() -> u64, value: u64) {
        if let Some(now) = self.begin() {
            self.record_at(action, object(), value, now, now);
        }
    }

    /// Records an action that began at `since`; nothing if nobody traced then.
    #[inline]
    pub(crate) fn record_since(&self, action: Action, object: impl FnOnce() -> u64, value: u64, since: Option<u64>) {
        if let Some(since) = since {
            self.record_at(action, object(), value, since, now_ns());
        }
    }

    #[cold]
    fn record_at(&self, action: Action, object: u64, value: u64, since: u64, at: u64) {
        thread_local! {
            static THREAD: Cell<u32> = const { Cell::new(0) };
        }
        let tid = THREAD.try_with(|thread| {
            if thread.get() == 0 {
                thread.set(rustix::thread::gettid().as_raw_nonzero().get() as u32);
            }
            thread.get()
        });
        let event = Event { since, at, pid: self.pid, tid: tid.unwrap_or(0), action, object, value };
        self.traces.record(self.row, &event);
    }
}

/// Returns the number of a timeline in traces.
pub(crate) fn timeline_object(name: &str) -> u64 {
    object(name, 0)
}

/// Returns the number of a topic in traces.
pub(crate) fn topic_object(name: &str, version: u64) -> u64 {
    object(name, version)
}

/// Reads what the processes of a domain do, from [`Domain::trace`] until it is dropped.
///
/// Processes record only while a tracer reads: [`read`](Self::read) must be called at least every 2 s, and every few
/// milliseconds if nothing is to be lost. A tracer that is killed ends the recording 2 s later. While nobody traces, a message
/// costs one load of a shared word more; while somebody does, each event costs 30 to 60 ns.
///
/// Several tracers may run at a time. 64 members record into rings of their own, of 4,096 events each; further members share
/// these.
#[derive(Debug)]
pub struct Tracer {
    domain: Domain,
    traces: Arc<Traces>,
    reader: Reader,
    names: BTreeMap<u64, (Named, String)>,
    asked: Option<Instant>,
}

/// What a process did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    /// When it began: `CLOCK_MONOTONIC` in nanoseconds.
    pub since: u64,
    /// When it was over. The same as `since` for everything but waits.
    pub at: u64,
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// What the process did.
    pub action: Action,
    /// The number of the topic or timeline; see [`Tracer::name`].
    pub object: u64,
    /// The position of the sample, or the value of the timeline.
    pub value: u64,
}

impl Domain {
    /// Begins to trace: from now on the domain's processes record what they publish, receive, release, signal and wait for.
    ///
    /// ```no_run
    /// # use std::{thread::sleep, time::Duration};
    /// # use partywall::Domain;
    /// let mut tracer = Domain::connect()?.trace();
    /// for _ in 0..1000 {
    ///     sleep(Duration::from_millis(5));
    ///     for event in tracer.read()? {
    ///         println!("{} {:?} {}", event.pid, event.action, event.value);
    ///     }
    /// }
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn trace(&self) -> Tracer {
        let traces = self.recorder().traces.clone();
        let reader = traces.reader();
        traces.renew(now_ns());
        Tracer { domain: self.clone(), traces, reader, names: BTreeMap::new(), asked: None }
    }

    /// Returns whether processes of this domain record for a [`Tracer`]. After a tracer was killed, this is true until the
    /// first process that has something to record finds that nobody reads.
    pub fn is_traced(&self) -> bool {
        self.recorder().traces.are_on()
    }
}

impl Tracer {
    /// Returns the events since the last call, in no particular order. Never waits for processes that record.
    ///
    /// # Errors
    /// Those of every call: asks the broker for the names of objects that are new.
    pub fn read(&mut self) -> Result<Vec<TraceEvent>> {
        self.traces.renew(now_ns());
        let mut events = Vec::new();
        self.reader.read(&self.traces, |event| {
            let Event { since, at, pid, tid, action, object, value } = event;
            events.push(TraceEvent { since, at, pid, tid, action, object, value });
        });
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= PAUSE);
        if is_due && events.iter().any(|event| !self.names.contains_key(&event.object)) {
            self.learn_names()?;
        }
        Ok(events)
    }

    /// Returns how many events were lost, because they were overwritten before they were read or their process was killed
    /// while it recorded them.
    pub fn lost(&self) -> u64 {
        self.reader.lost()
    }

    /// Returns the kind and the name of an object. Returns `None` if it is not known: it has ended before the tracer could ask
    /// for its name, or a process that breaks the rules has recorded the event.
    pub fn name(&self, object: u64) -> Option<(Named, &str)> {
        self.names.get(&object).map(|(named, name)| (*named, name.as_str()))
    }

    fn learn_names(&mut self) -> Result<()> {
        self.asked = Some(Instant::now());
        for info in self.domain.names()? {
            if let Some(latest) = info.latest.filter(|latest| Named::of(latest.control.as_ref()) == Named::Topic) {
                self.names.insert(topic_object(&info.name, latest.version), (Named::Topic, info.name));
            }
        }
        for info in self.domain.objects()? {
            if let ObjectInfo::Timeline(timeline) = info {
                self.names.insert(timeline_object(&timeline.name), (Named::Timeline, timeline.name));
            }
        }
        Ok(())
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // Another tracer asks again when it reads.
        self.traces.stop();
    }
}

/// The least time between two questions for names.
const PAUSE: Duration = Duration::from_millis(200);
