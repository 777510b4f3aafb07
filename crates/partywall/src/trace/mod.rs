//! Traces: what the processes of a domain publish, receive, submit, claim, signal and wait for, as it happens.

mod chrome;
mod recording;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_shm::{
    members::now_ns,
    trace::{Reader, Traces},
};

pub use self::{chrome::ChromeTrace, recording::Recording};
pub use partywall_shm::trace::{Action, TraceEvent};

use crate::{
    domain::Domain,
    error::Result,
    info::{Named, ObjectInfo},
    recorder::{timeline_object, version_object},
};

/// Reads what the processes of a domain do, from [`Domain::trace`] until it is dropped.
///
/// Processes record only while a tracer reads: call [`read`](Self::read) at least every 2 s, or every few milliseconds
/// to lose no event. A tracer that is killed ends the recording 2 s later.
///
/// While no process traces, a message costs one more load of a shared word. While one does, each event costs 30 to 60
/// ns.
///
/// Several tracers may run at a time. 64 members record into rings of their own, of 4,096 events each; further members
/// share these.
#[derive(Debug)]
pub struct Tracer {
    domain: Domain,
    traces: Arc<Traces>,
    reader: Reader,
    names: BTreeMap<u64, (Named, String)>,
    asked: Option<Instant>,
}

impl Domain {
    /// Begins to trace: from now on the domain's processes record what they publish, receive and release, which tasks
    /// they submit, claim and complete, and what they signal and wait for.
    ///
    /// ```no_run
    /// # use std::{thread::sleep, time::Duration};
    /// # use partywall::Domain;
    /// let mut tracer = Domain::connect()?.trace();
    /// for _ in 0..1000 {
    ///     sleep(Duration::from_millis(5));
    ///     for event in tracer.read() {
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

    /// Returns whether processes of this domain record for a [`Tracer`]. After a tracer was killed, this stays true
    /// until the first process that has something to record finds that no tracer reads.
    pub fn is_traced(&self) -> bool {
        self.recorder().traces.are_on()
    }
}

impl Tracer {
    /// Returns the events since the last call, in no particular order. Never waits for processes that record, but asks
    /// the broker for the names of new objects.
    pub fn read(&mut self) -> Vec<TraceEvent> {
        self.traces.renew(now_ns());
        let mut events = Vec::new();
        self.reader.read(&self.traces, |event| events.push(event));
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= PAUSE);
        if is_due && events.iter().any(|event| !self.names.contains_key(&event.object)) {
            self.asked = Some(Instant::now());
            // Without a broker the names stay unknown. The processes go on, and so does the trace.
            let _ = self.learn_names();
        }
        events
    }

    /// Returns how many events were lost, because they were overwritten before they were read or their process was
    /// killed while it recorded them.
    pub fn lost(&self) -> u64 {
        self.reader.lost()
    }

    /// Returns the kind and the name of an object. Returns `None` if it is not known: it has ended before the tracer
    /// could ask for its name, the broker is gone, or a process that breaks the rules has recorded the event.
    pub fn name(&self, object: u64) -> Option<(Named, &str)> {
        self.names.get(&object).map(|(named, name)| (*named, name.as_str()))
    }

    fn learn_names(&mut self) -> Result<()> {
        for info in self.domain.names()? {
            let Some(latest) = info.latest else { continue };
            let named = Named::of(latest.control.as_ref());
            if matches!(named, Named::Topic | Named::Queue) {
                self.names.insert(version_object(&info.name, latest.version), (named, info.name));
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
