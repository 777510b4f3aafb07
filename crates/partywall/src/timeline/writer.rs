//! Writing: values signalled by the host or by one stream at a time.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use partywall_cuda::{AccessError, CurrentStream, DeviceSlice, StreamId, StreamRef};
use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::{Cell, Ending, Progress, Refused};

use super::{
    At, Timeline,
    enqueue::Work,
    inputs::{Fate, Input},
    waiting::Lookout,
};
use crate::{
    completion::Fence,
    domain::{LeaseGuard, PollReason, Word},
    error::{Error, InvalidArgument, InvalidData, Result},
};

/// The one writer of a timeline. Waiting is what its [`timeline`](Self::timeline) does.
///
/// Values are signalled by the host ([`signal`](Self::signal)) or by a stream behind its work
/// ([`signal_on`](Self::signal_on)), by one at a time: who changes between streams, or from a stream to the host, waits
/// until what the former stream owes is there, but not longer than 10 s.
///
/// Dropping it closes the timeline: who waits for more than was promised hears so at once, and streams that do go on once
/// what was promised is there. May be used from any thread; its signals come one after the other.
#[derive(Debug)]
pub struct TimelineWriter {
    writer: Arc<Writer>,
    /// Last, so that its lease goes back at once if nobody else keeps it.
    timeline: Timeline,
}

/// What poll tasks share with a writer: no connection, and nothing of the driver's.
#[derive(Debug)]
struct Writer {
    /// So that the word stays ours.
    _keep: Arc<LeaseGuard>,
    at: Arc<At>,
    word: Arc<Word>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The stream that has signalled last, if it was none of the host's signals.
    stream: Option<StreamId>,
    inputs: Vec<Input>,
}

impl TimelineWriter {
    pub(super) fn new(timeline: Timeline) -> Self {
        let (word, keep) = timeline.at.now();
        let writer = Arc::new(Writer { _keep: keep, at: timeline.at.clone(), word, state: Mutex::default() });
        Self { writer, timeline }
    }

    /// Signals `v` from the host: everything that this thread did before is visible to whoever has waited for it.
    ///
    /// If a stream owes a value still, waits for that first, for at most 10 s.
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
    /// [`MAX_VALUE`](super::MAX_VALUE); [`Gone::Timeline`](crate::error::Gone::Timeline) if the timeline was ended, by
    /// [`abandon`](Timeline::abandon) for instance; [`InvalidData::Tainted`] if the value rests on an input that has failed
    /// ([`rests_on`](Self::rests_on)); [`Error::Timeout`] for what a stream owes; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn signal(&self, v: u64) -> Result<()> {
        self.timeline.domain.link().require_ours()?;
        let mut state = self.writer.lock();
        self.writer.check(&mut state, v)?;
        loop {
            match self.cell().signal(v) {
                Ok(()) => break,
                Err(Refused::Owed(owed)) => self.drain(owed)?,
                Err(refused) => return Err(self.refused(refused, v)),
            }
        }
        state.signalled(v, None);
        Ok(())
    }

    /// Has `stream` signal `v` when everything that is on it now is done; who waits for it then sees what that work did.
    /// Returns at once, and says to those who want to know ([`wait_announced`](Timeline::wait_announced)) that `v` is on
    /// its way. Hosts that sleep until `v` look for it themselves from then on.
    ///
    /// If another stream owes a value still, waits for that first, for at most 10 s.
    ///
    /// ```no_run
    /// # use partywall::{Gpu, Result, TimelineWriter};
    /// # fn signal(frames: &TimelineWriter, gpu: &Gpu) -> Result<()> {
    /// let stream = gpu.stream(); // or a stream of the caller's own
    /// // … kernels that write frame 1 are enqueued on `stream` …
    /// frames.signal_on(stream, 1)?; // returns at once; the GPU signals behind them
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`signal`](Self::signal); [`DeviceFault::Captured`](crate::error::DeviceFault::Captured), [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn signal_on(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        self.enqueue(stream, v, |stream, word| stream.enqueue_write_u64(word, v))
    }

    /// As [`signal_on`](Self::signal_on), and wakes hosts that sleep until `v` as soon as it is there, by a host function
    /// behind the signal. That keeps the stream until a thread of the driver's has run it, tens of microseconds as a rule.
    ///
    /// # Errors
    /// As [`signal_on`](Self::signal_on). If only the host function is refused, `v` is signalled all the same.
    pub fn signal_on_and_wake(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        self.signal_on(stream, v)?;
        let place = self.writer.word.place.clone();
        let work = Work { domain: &self.timeline.domain, stream, what: &|| self.signalling() };
        work.run(|stream| Ok(stream.enqueue_host_function(move || place.cell().notify())?))
    }

    /// Says that a kernel which is on `stream` already will store `v` ([`Timeline::device_ptr`]), and that nothing else
    /// will before. Without it hosts that sleep until `v` find it up to 100 ms late.
    ///
    /// # Errors
    /// As [`signal_on`](Self::signal_on).
    pub fn promise_on(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        self.enqueue(stream, v, |_, _| Ok(()))
    }

    /// Says that values from now on rest on what is waited for through `input`: that they are made of what that timeline
    /// stands for.
    ///
    /// A stream that waits goes on when the timeline it waits for fails, and then signals what it has made of garbage.
    /// Poison does not travel by itself. Of an input this process remembers which value of its own was signalled after
    /// which wait. When the input ends before such a wait, or is tainted itself, the values that were promised behind it
    /// are marked as [tainted](InvalidData::Tainted), which their waiters' [`check`](Timeline::check) says, and further ones are
    /// refused. That is found with the next signal, or by the service thread within 250 ms.
    ///
    /// Waits of host and streams through this very handle count, also after it [follows](Timeline::follow); what kernels
    /// look at by themselves does not.
    pub fn rests_on(&self, input: &Timeline) {
        let mut state = self.writer.lock();
        let first = state.inputs.is_empty();
        state.inputs.push(Input::new(input));
        drop(state);
        if first {
            let writer = Arc::downgrade(&self.writer);
            self.timeline.domain.poll_tasks().add(LOOK, move |reason| {
                writer.upgrade()?.look_at_inputs();
                (reason == PollReason::Due).then_some(LOOK)
            });
        }
    }

    /// The timeline, for waiting for it and asking it.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Closes the timeline, as dropping does. Returns at once; what streams owe comes all the same.
    pub fn close(self) {}

    fn enqueue(
        &self,
        stream: StreamRef<'_>,
        v: u64,
        store: impl FnOnce(&CurrentStream<'_>, DeviceSlice<'_>) -> Result<(), AccessError>,
    ) -> Result<()> {
        let Timeline { domain, .. } = &self.timeline;
        let Word { place, slab, .. } = &*self.writer.word;
        domain.link().require_ours()?;
        let mut state = self.writer.lock();
        self.writer.check(&mut state, v)?;
        self.cell().check_next(v).map_err(|refused| self.refused(refused, v))?;
        let work = Work { domain, stream, what: &|| self.signalling() };
        let id = work.run(|stream| {
            let slab = work.ready(*slab)?;
            let id = stream.id()?;
            if state.stream.is_some_and(|last| last != id) {
                self.drain(self.cell().announced())?;
            }
            let track = domain.stream_waits().track(id);
            let mut waits = track.lock();
            store(stream, slab.word(place)?)?;
            waits.mark(place, v);
            Ok(id)
        })?;
        state.signalled(v, Some(id));
        // Last: who hears of it may rely on it.
        self.cell().announce(v);
        Ok(())
    }

    /// Waits until a stream has stored what it owes.
    fn drain(&self, owed: u64) -> Result<()> {
        let start = Instant::now();
        let mut lookout = Lookout::new(&self.writer.word, owed);
        while let Some(pause) = lookout.look() {
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
            // What ended it says more than that it has ended.
            Refused::Ended(Ending::OwnerFaulted) => {
                self.timeline.domain.health().check().err().unwrap_or_else(|| at.ended(word, Ending::OwnerFaulted, v))
            }
            Refused::Ended(ending) => at.ended(word, ending, v),
            Refused::Closing => at.ended(word, Ending::Closed, v),
            Refused::OutOfRange | Refused::NotLarger(_) | Refused::Owed(_) => {
                InvalidArgument::Value { name: at.name.clone(), value: v, last: word.cell().announced() }.into()
            }
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
        // A wait for more than was promised ends at once.
        let owed = writer.word.cell().begin_close();
        // The writer keeps the lease until then: without it the broker would end what a stream still owes.
        domain.completions().on(Fence::Timeline(writer.word.clone(), owed), move |_| writer.end());
    }
}

impl Writer {
    /// Ends the timeline as closed, unless it has ended.
    fn end(&self) {
        self.look_at_inputs();
        self.word.cell().end(Ending::Closed);
    }

    /// Marks what rests on inputs that have failed. Does not wait: who signals at the moment looks by itself.
    fn look_at_inputs(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            self.taint(&mut state);
        }
    }

    /// That there is a broker, and that the next value, `v`, would rest on nothing that has failed.
    fn check(&self, state: &mut State, v: u64) -> Result<()> {
        let suspect = self.taint(state);
        if self.word.ending() == Some(Ending::BrokerGone) {
            return Err(self.at.ended(&self.word, Ending::BrokerGone, v));
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

    /// Marks what rests on inputs that have failed; whether the next value would.
    fn taint(&self, state: &mut State) -> bool {
        let mut suspect = false;
        for input in &mut state.inputs {
            match input.look() {
                Fate::Sound => {}
                Fate::Suspect => suspect = true,
                Fate::Failed(from) => self.word.cell().taint(from),
            }
        }
        suspect
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked with it has signalled, or has not.
        self.state.lock().ignore_poison()
    }
}

impl State {
    fn signalled(&mut self, v: u64, stream: Option<StreamId>) {
        self.stream = stream;
        self.inputs.iter_mut().for_each(|input| input.signalled(v));
    }
}

/// How long to wait for what another stream owes.
const DRAIN: Duration = Duration::from_secs(10);

/// How often the service thread looks at inputs.
const LOOK: Duration = Duration::from_millis(250);
