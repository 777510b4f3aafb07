//! Writing: values signalled by the host or by one stream at a time.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use partywall_cuda::{AccessError, CurrentStream, DeviceSlice, StreamId, StreamRef};
use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::{Cell, Progress, Refused, TimelineEnding};

use super::{
    At, Timeline,
    enqueue::Work,
    inputs::{InputState, TimelineInput},
    waiting::Poller,
};
use crate::{
    completion::Fence,
    domain::{LeaseGuard, PollReason, Word},
    error::{Error, InvalidArgument, InvalidData, Result},
    recorder::{Action, timeline_object},
};

/// The only writer of a timeline. To wait for values, use its [`timeline`](Self::timeline).
///
/// Values are signalled by the host ([`signal`](Self::signal)) or by a stream behind its work
/// ([`signal_on`](Self::signal_on)), from one of them at a time. A call that changes the stream, or from a stream to
/// the host, first waits until the former stream has stored its promised values, for at most 10 s.
///
/// Dropping the writer closes the timeline. Waits on the host for values beyond the promised ones end immediately;
/// waits on streams end once the promised values are stored. May be used from any thread; signals are serialized.
#[derive(Debug)]
pub struct TimelineWriter {
    writer: Arc<Writer>,
    /// Last, so that its lease is given back immediately if this is its last owner.
    timeline: Timeline,
}

/// The part of a writer that poll tasks share. It has no connection and no driver objects.
#[derive(Debug)]
struct Writer {
    /// The lease, without which the word may become another timeline's.
    _keep: Arc<LeaseGuard>,
    at: Arc<At>,
    word: Arc<Word>,
    state: Mutex<SignalState>,
}

#[derive(Debug, Default)]
struct SignalState {
    /// The stream of the last signal; `None` if the host signalled last.
    stream: Option<StreamId>,
    inputs: Vec<TimelineInput>,
}

impl TimelineWriter {
    pub(super) fn new(timeline: Timeline) -> Self {
        let (word, keep) = timeline.at.now();
        let writer = Arc::new(Writer { _keep: keep, at: timeline.at.clone(), word, state: Mutex::default() });
        Self { writer, timeline }
    }

    /// Signals `v` from the host. Everything that this thread did before is visible to waiters for `v`.
    ///
    /// If a stream has not stored a promised value yet, waits for that first, for at most 10 s.
    ///
    /// ```no_run
    /// # use partywall::{Result, TimelineWriter};
    /// # fn signal(frames: &TimelineWriter, fill: impl Fn(u64)) -> Result<()> {
    /// for frame in 1..=100 {
    ///     fill(frame);
    ///     frames.signal(frame)?; // waiters for `frame` see what was written before
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument::Value`] unless `v` is larger than every value before and no larger than
    /// [`MAX_VALUE`](super::MAX_VALUE); [`Gone::Timeline`](crate::error::Gone::Timeline) if the timeline was ended, for
    /// example by [`abandon`](Timeline::abandon); [`InvalidData::Tainted`] if the value rests on an input that has
    /// failed ([`rests_on`](Self::rests_on)); [`Error::Timeout`] if a stream does not store its promised value in time;
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn signal(&self, v: u64) -> Result<()> {
        self.timeline.domain.link().require_ours()?;
        let recorder = self.timeline.domain.recorder();
        let mut state = self.writer.lock();
        self.writer.check(&mut state, v)?;
        let since = recorder.begin();
        loop {
            match self.cell().signal(v) {
                Ok(()) => break,
                Err(Refused::Owed(owed)) => self.drain(owed)?,
                Err(refused) => return Err(self.refused(refused, v)),
            }
        }
        state.signalled(v, None);
        recorder.record_since(Action::Signal, || timeline_object(self.timeline.name()), v, since);
        Ok(())
    }

    /// Makes `stream` signal `v` once all work that is on it now is done. Waiters for `v` then see the results of that
    /// work. Returns immediately, and announces `v` ([`wait_announced`](Timeline::wait_announced)). Hosts that wait for
    /// `v` poll for it from then on.
    ///
    /// If another stream has not stored a promised value yet, waits for that first, for at most 10 s.
    ///
    /// ```no_run
    /// # use partywall::{Gpu, Result, TimelineWriter};
    /// # fn signal(frames: &TimelineWriter, gpu: &Gpu) -> Result<()> {
    /// let stream = gpu.stream(); // or a stream of the caller's own
    /// // … kernels that write frame 1 are enqueued on `stream` …
    /// frames.signal_on(stream, 1)?; // does not wait; the GPU signals after the kernels
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`signal`](Self::signal); [`DeviceFault::Captured`](crate::error::DeviceFault::Captured),
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn signal_on(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        self.enqueue(stream, v, |stream, word| stream.enqueue_write_u64(word, v))
    }

    /// Makes `stream` signal `v` as [`signal_on`](Self::signal_on) does, and wakes hosts that wait for `v` as soon as
    /// it is stored, by a host function after the signal. The stream waits until a driver thread has run that function,
    /// usually tens of microseconds.
    ///
    /// # Errors
    /// As [`signal_on`](Self::signal_on). If only the host function is refused, `v` is still signalled.
    pub fn signal_on_and_wake(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        self.signal_on(stream, v)?;
        let cell = self.writer.word.cell.clone();
        let work = Work { domain: &self.timeline.domain, stream, what: &|| self.signalling() };
        work.run(|stream| Ok(stream.enqueue_host_function(move || cell.get().notify())?))
    }

    /// Announces that a kernel already on `stream` will store `v` ([`Timeline::device_ptr`]), and nothing else before
    /// it. Without this call, hosts that wait for `v` find it up to 100 ms late.
    ///
    /// # Errors
    /// As [`signal_on`](Self::signal_on).
    pub fn promise_on(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        self.enqueue(stream, v, |_, _| Ok(()))
    }

    /// Declares that values signalled from now on rest on the values waited for through `input`.
    ///
    /// A stream that waits for a failed timeline continues, and then signals values made of garbage. Such a failure
    /// does not spread by itself. For each input, this process remembers which of its own values was signalled after
    /// which wait. When the input ends before such a wait, or is tainted itself, the values promised behind the wait
    /// are marked as [tainted](InvalidData::Tainted): [`check`](Timeline::check) reports it to their waiters, and
    /// further signals are refused. The next signal finds the failure, or the service thread within 250 ms.
    ///
    /// Only waits of the host and of streams through this handle count, including those after a
    /// [`follow`](Timeline::follow). Values that kernels read themselves do not count.
    pub fn rests_on(&self, input: &Timeline) {
        let mut state = self.writer.lock();
        let first = state.inputs.is_empty();
        state.inputs.push(TimelineInput::new(input));
        drop(state);
        if first {
            let writer = Arc::downgrade(&self.writer);
            self.timeline.domain.poll_tasks().add(CHECK_INTERVAL, move |reason| {
                writer.upgrade()?.check_inputs();
                (reason == PollReason::Due).then_some(CHECK_INTERVAL)
            });
        }
    }

    /// Returns the timeline, to wait for its values and to read them.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Closes the timeline, as dropping does. Returns immediately; streams still store their promised values.
    pub fn close(self) {}

    fn enqueue(
        &self,
        stream: StreamRef<'_>,
        v: u64,
        store: impl FnOnce(&CurrentStream<'_>, DeviceSlice<'_>) -> Result<(), AccessError>,
    ) -> Result<()> {
        let Timeline { domain, .. } = &self.timeline;
        let Word { cell, slab, .. } = &*self.writer.word;
        let turn = self.turn([v])?;
        let work = Work { domain, stream, what: &|| self.signalling() };
        let id = work.run(|stream| {
            let slab = work.ready(*slab)?;
            let id = stream.id()?;
            turn.follow(id)?;
            let track = domain.stream_waits().track(id);
            let mut waits = track.lock();
            store(stream, slab.word(cell)?)?;
            waits.mark(cell, v);
            Ok(id)
        })?;
        turn.promise(id, [v]);
        Ok(())
    }

    /// Begins to order a stream to store `values`, which grow. Other signals wait until the result is dropped.
    pub(super) fn turn(&self, values: impl IntoIterator<Item = u64>) -> Result<SignalGuard<'_>> {
        self.timeline.domain.link().require_ours()?;
        let mut state = self.writer.lock();
        let mut before = None;
        for v in values {
            self.writer.check(&mut state, v)?;
            self.cell().check_next(v).map_err(|refused| self.refused(refused, v))?;
            if let Some(last) = before.filter(|before| v <= *before) {
                return Err(InvalidArgument::Value { name: self.writer.at.name.clone(), value: v, last }.into());
            }
            before = Some(v);
        }
        Ok(SignalGuard { writer: self, state })
    }

    /// Returns whether both are the same writer.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.writer, &other.writer)
    }

    /// Returns a key by which all threads can lock several writers in the same order.
    pub(super) fn lock_order(&self) -> usize {
        Arc::as_ptr(&self.writer) as usize
    }

    /// Returns the shared word.
    pub(super) fn word(&self) -> &Word {
        &self.writer.word
    }

    /// Waits until a stream has stored the promised value `owed`.
    fn drain(&self, owed: u64) -> Result<()> {
        let start = Instant::now();
        let mut poller = Poller::new(&self.writer.word, owed);
        while let Some(pause) = poller.poll() {
            if start.elapsed() > DRAIN {
                return Err(Error::Timeout { what: self.writer.at.not_come(owed, Progress::Reached), after: DRAIN });
            }
            self.timeline.domain.health().check()?;
            std::thread::sleep(pause);
        }
        Ok(())
    }

    fn cell(&self) -> &Cell {
        self.writer.word.cell()
    }

    fn signalling(&self) -> String {
        format!("signalling timeline {:?} on a stream", self.writer.at.name)
    }

    fn refused(&self, refused: Refused, v: u64) -> Error {
        let Writer { at, word, .. } = &*self.writer;
        match refused {
            // Reports the cause, which says more than the ending.
            Refused::Ended(TimelineEnding::OwnerFaulted) => self
                .timeline
                .domain
                .health()
                .check()
                .err()
                .unwrap_or_else(|| at.ended(word, TimelineEnding::OwnerFaulted, v)),
            Refused::Ended(ending) => at.ended(word, ending, v),
            Refused::Closing => at.ended(word, TimelineEnding::Closed, v),
            Refused::OutOfRange | Refused::NotLarger(_) | Refused::Owed(_) => {
                InvalidArgument::Value { name: at.name.clone(), value: v, last: word.cell().announced() }.into()
            }
        }
    }
}

/// A writer that orders a stream to store values. Other threads cannot signal meanwhile.
#[derive(Debug)]
pub(super) struct SignalGuard<'a> {
    writer: &'a TimelineWriter,
    state: MutexGuard<'a, SignalState>,
}

impl SignalGuard<'_> {
    /// Waits until the values of another stream than `stream` are stored.
    pub(super) fn follow(&self, stream: StreamId) -> Result<()> {
        if self.state.stream.is_some_and(|last| last != stream) {
            self.writer.drain(self.writer.cell().announced())?;
        }
        Ok(())
    }

    /// Promises `values`, which `stream` has been ordered to store.
    pub(super) fn promise(mut self, stream: StreamId, values: impl IntoIterator<Item = u64>) {
        let recorder = self.writer.timeline.domain.recorder();
        for v in values {
            self.state.signalled(v, Some(stream));
            let since = recorder.begin();
            // Last: a process that sees the announcement may rely on it.
            self.writer.cell().announce(v);
            recorder.record_since(Action::SignalOn, || timeline_object(self.writer.timeline.name()), v, since);
        }
    }
}

impl Drop for TimelineWriter {
    fn drop(&mut self) {
        let Timeline { domain, .. } = &self.timeline;
        if domain.link().require_ours().is_err() {
            return;
        }
        let writer = self.writer.clone();
        // Waits for values beyond the promised ones end immediately.
        let owed = writer.word.cell().begin_close();
        // The writer keeps the lease until then: without it the broker would end the timeline before the promised
        // values.
        domain.completions().on(Fence::Timeline(writer.word.clone(), owed), move |_| writer.end());
    }
}

impl Writer {
    /// Ends the timeline as closed, unless it has ended.
    fn end(&self) {
        self.check_inputs();
        self.word.cell().end(TimelineEnding::Closed);
    }

    /// Taints values that rest on failed inputs. Skips a locked writer: a signal that holds the lock does the same.
    fn check_inputs(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            self.taint(&mut state);
        }
    }

    /// Checks that the broker runs, and that the next value, `v`, would rest on no failed input.
    fn check(&self, state: &mut SignalState, v: u64) -> Result<()> {
        let suspect = self.taint(state);
        if self.word.ending() == Some(TimelineEnding::BrokerGone) {
            return Err(self.at.ended(&self.word, TimelineEnding::BrokerGone, v));
        }
        let name = || self.at.name.clone();
        match self.word.cell().tainted() {
            Some(from) => Err(InvalidData::Tainted { name: name(), from }.into()),
            None if suspect => {
                Err(InvalidData::Tainted { name: name(), from: self.word.cell().announced() + 1 }.into())
            }
            None => Ok(()),
        }
    }

    /// Taints values that rest on failed inputs. Returns whether the next value would rest on one.
    fn taint(&self, state: &mut SignalState) -> bool {
        let mut suspect = false;
        for input in &mut state.inputs {
            match input.check() {
                InputState::Sound => {}
                InputState::Suspect => suspect = true,
                InputState::Failed(from) => self.word.cell().taint(from),
            }
        }
        suspect
    }

    fn lock(&self) -> MutexGuard<'_, SignalState> {
        // A thread that panicked under the lock leaves no half-done signal.
        self.state.lock().ignore_poison()
    }
}

impl SignalState {
    fn signalled(&mut self, v: u64, stream: Option<StreamId>) {
        self.stream = stream;
        self.inputs.iter_mut().for_each(|input| input.signalled(v));
    }
}

/// How long to wait until another stream has stored its promised values.
const DRAIN: Duration = Duration::from_secs(10);

/// How often the service thread checks the inputs.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
