//! The waiter: waits for the recorder's work by event and by timeline, after and before the recording, and reports
//! which beliefs are refuted.

use std::mem;

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let mut recorder = session.partner();
    let Offer { bytes, events } = recorder.hear()?;
    let memory = PhysicalMemory::import(gpu.context(), recorder.take_fd()?.as_fd(), bytes);
    let mapping = Mapping::new(memory.doing("importing memory")?, Access::ReadWrite).doing("mapping memory")?;
    let timeline = session.domain().timeline(TIMELINE)?;
    // Before anything waits.
    gpu.kernels()?;
    let stream = Stream::new(gpu.context()).doing("creating a stream")?;
    let obstacle = device::streams_cannot_wait(&gpu);
    broker::prepare(session.domain(), &stream);
    let mut waiter = Waiter { gpu: &gpu, mapping, stream, timeline, recorder, obstacle };

    if let Err(failure) = waiter.make_all(session, events) {
        // If the recorder has died, a stream may wait for its event without end, and freeing memory waits for streams.
        mem::forget(waiter);
        mem::forget((session.domain().clone(), gpu));
        return Err(failure);
    }
    waiter.recorder.end();
    Ok(())
}

struct Waiter<'a> {
    gpu: &'a Gpu,
    mapping: Mapping,
    stream: Stream,
    timeline: Timeline,
    recorder: Peer,
    /// Why streams cannot wait for values here.
    obstacle: Option<String>,
}

/// The result of a wait on a stream.
struct Waited {
    /// How long the host took to enqueue the wait.
    enqueuing: Duration,
    /// The time from that start until the stream had done the work behind the wait.
    waited: Duration,
    /// True if that work found the output of the recorder's work.
    new_bytes: bool,
}

impl Waiter<'_> {
    fn make_all(&mut self, session: &Session, events: Result<Vec<Vec<u8>>, String>) -> Result<(), Failure> {
        let events = self.open(events);
        for experiment in [Self::event_in_time, Self::event_early, Self::event_again] {
            session.report(experiment(self, &events)?)?;
        }
        for experiment in [Self::in_time, Self::early, Self::on_the_host, Self::in_vain] {
            session.report(experiment(self)?)?;
        }
        Ok(())
    }

    /// Opens the recorder's events.
    fn open(&self, handles: Result<Vec<Vec<u8>>, String>) -> Result<[IpcEvent; 2], String> {
        let open = |handle: Vec<u8>| {
            let bytes = <[u8; 64]>::try_from(handle).map_err(|_| "a handle has 64 bytes".to_owned())?;
            IpcEvent::open(self.gpu, &IpcEventHandle(bytes)).map_err(|error| error.to_string())
        };
        let events = handles?.into_iter().map(open).collect::<Result<Vec<_>, String>>()?;
        events.try_into().map_err(|_| "the recorder did not send two events".to_owned())
    }

    fn event_in_time(&mut self, events: &Result<[IpcEvent; 2], String>) -> Result<Step, Failure> {
        let step = Step::new(
            "event",
            "The stream waits for an event that was recorded behind the work",
            "The recorder sends a message when it has recorded; then the wait is enqueued here. The streams of the two \
             processes are ordered, and no host waits.",
        );
        let [event, _] = match events {
            Ok(events) => events,
            Err(why) => return Ok(step.untried(&[HOST_WAITS], why)),
        };
        self.clear()?;
        if let Err(why) = self.work(Behind::Event(0))? {
            return Ok(step.untried(&[HOST_WAITS], why));
        }
        let waited = self.wait(|stream| event.wait(stream))?;
        self.finish()?;
        Ok(waited.in_time(step))
    }

    fn event_early(&mut self, events: &Result<[IpcEvent; 2], String>) -> Result<Step, Failure> {
        let step = Step::new(
            "event-early",
            "The stream waits for an event that was not recorded yet",
            "A wait is for the record that exists when the wait is enqueued. There is none, so the stream continues \
             immediately, without an error, and reads the old bytes. The recorder therefore has to send a message \
             first.",
        );
        match events {
            Ok([_, event]) => self.too_early(step, NEXT_RECORD, event, 1),
            Err(why) => Ok(step.untried(&[NEXT_RECORD], why)),
        }
    }

    fn event_again(&mut self, events: &Result<[IpcEvent; 2], String>) -> Result<Step, Failure> {
        let step = Step::new(
            "event-again",
            "The stream waits for the second record of the first event, too early",
            "The record of the previous round exists and is reached. An event has no rounds: a waiter cannot name the \
             record that it means.",
        );
        match events {
            Ok([event, _]) => self.too_early(step, ROUNDS, event, 0),
            Err(why) => Ok(step.untried(&[ROUNDS], why)),
        }
    }

    /// Waits for an event before it is recorded.
    fn too_early(&mut self, step: Step, belief: Belief, event: &IpcEvent, index: usize) -> Result<Step, Failure> {
        self.clear()?;
        let enqueued = self.enqueue(|stream| event.wait(stream))?;
        // If the stream does wait, the recorder's work ends the wait.
        let went_on = self.ends(SLOW)?;
        let found = if went_on { Some(self.new_bytes()?) } else { None };
        let worked = self.work(Behind::Event(index))?;
        self.finish()?;
        self.ends(TIMEOUT)?;
        if let Err(why) = worked {
            return Ok(step.untried(&[belief], why));
        }
        Ok(step
            .value("waited on the stream", if went_on { "not at all" } else { "until the record came" })
            .value("enqueuing the wait, and work", short(enqueued))
            .value("the work behind the wait found", bytes_text(found == Some(true)))
            .says(belief, !went_on)
            .judge(found == Some(false), "it did not wait: old bytes, and no error", "it waited, or found new bytes"))
    }

    fn in_time(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "timeline",
            "The stream waits for a value that was signalled behind the work",
            "signal_on makes the recorder's stream write a number behind the work, and wait_on makes this stream wait \
             for the number. The number is in host memory that both processes map. No host waits.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(&[HOST_WAITS], why));
        }
        self.clear()?;
        if let Err(why) = self.work(Behind::Signal(1))? {
            return Ok(step.untried(&[HOST_WAITS], why));
        }
        let waited = self.wait(|stream| self.timeline.wait_on(stream, 1))?;
        self.finish()?;
        Ok(waited.in_time(step))
    }

    fn early(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "timeline-early",
            "The stream waits for a value before the work is even launched",
            "The wait is for a value of a growing number, whatever is enqueued already, so it cannot come too early. \
             The recorder need not send a message first.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(&[NOT_YET], why));
        }
        self.clear()?;
        let began = Moment::now();
        let enqueuing = self.enqueue(|stream| self.timeline.wait_on(stream, 2))?;
        let waits = !self.ends(MOMENT)?;
        if let Err(why) = self.work(Behind::Signal(2))? {
            // No signal will come, so the wait has to be ended.
            self.timeline.abandon()?;
            return Ok(step.untried(&[NOT_YET], why));
        }
        let ended = self.ends(TIMEOUT)?;
        let waited = Moment::now().since(began);
        self.finish()?;
        let new = ended && self.new_bytes()?;
        Ok(step
            .value("enqueuing the wait, and work", short(enqueuing))
            .value("the stream, before the launch", if waits { "waits" } else { "continued" })
            .value("waited on the stream", format!("{}, {} of them before the launch", millis(waited), millis(MOMENT)))
            .value("the work behind the wait found", bytes_text(new))
            .says(NOT_YET, !waits)
            .judge(waits && new, "it waited for work that was launched later", "it did not wait for the value"))
    }

    /// Makes the host sleep until the value is reached.
    fn on_the_host(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "timeline-host",
            "The host waits for a value",
            "A write by the GPU wakes no thread. wait sleeps until the signal is announced, which happens when the \
             work is enqueued. Then it polls, at first often, until the GPU has reached the value. signal_on_and_wake \
             makes the driver call the waker: the host wakes sooner, and the stream is slower.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(&[POLLING], why));
        }
        let mut waits = Vec::new();
        for behind in [Behind::Signal(3), Behind::SignalAndWake(4)] {
            let (Behind::Signal(value) | Behind::SignalAndWake(value)) = behind else { continue };
            if let Err(why) = self.work(behind)? {
                return Ok(step.untried(&[POLLING], why));
            }
            let began = Moment::now();
            let waited = self.timeline.wait(value, TIMEOUT);
            let woken = Moment::now();
            let ended = self.finish()?;
            waits.push((waited, woken.since(began), woken.since(ended)));
        }
        let mut step = step;
        for (label, (_, waited, late)) in ["signal_on", "signal_on_and_wake"].iter().zip(&waits) {
            step = step
                .value(format!("{label}: waited"), millis(*waited))
                .value(format!("{label}: later than the recorder"), short(*late));
        }
        let woken = waits.iter().all(|(waited, ..)| waited.is_ok());
        Ok(step.says(POLLING, !woken).judge(woken, "it slept until the value was reached", "a wait failed"))
    }

    /// Waits for a value that never comes.
    fn in_vain(&mut self) -> Result<Step, Failure> {
        const NEVER: u64 = 1 << 40;
        let step = Step::new(
            "timeline-limit",
            "Waits with a timeout for a value that never comes",
            "A wait that a stream has begun cannot be cancelled. A wait with a timeout is therefore for a private word \
             of this process, which the service thread writes when the value is reached or the time is over. Events \
             have no timeout.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(&[CANCEL], why));
        }
        let host = self.timeline.wait(NEVER, MOMENT);
        let began = Moment::now();
        let limited = self.timeline.wait_on_for(self.stream.as_ref(), NEVER, MOMENT)?;
        let ended = self.ends(TIMEOUT)?;
        let waited = Moment::now().since(began);
        let limited = limited.outcome().unwrap_or(Ok(()));
        let step = step.value("the host, limit 100 ms", outcome(&host)).value(
            "the stream, limit 100 ms",
            format!("{} after {}; {}", if ended { "continued" } else { "waits" }, millis(waited), outcome(&limited)),
        );
        let timed_out = |result: &partywall::Result<()>| matches!(result, Err(Error::Timeout { .. }));
        Ok(step.says(CANCEL, !ended).judge(
            ended && timed_out(&host) && timed_out(&limited),
            "both continued when the time was over",
            "not both continued when the time was over",
        ))
    }

    /// Resets the memory.
    fn clear(&self) -> Result<(), Failure> {
        device::set(self.gpu, self.mapping.as_slice(), 0)
    }

    /// Has the recorder enqueue its work.
    fn work(&mut self, behind: Behind) -> Result<Enqueued, Failure> {
        self.recorder.ask(Command::Work(behind))
    }

    /// Waits until the recorder's host has seen that its work is done. Returns when it saw that.
    fn finish(&mut self) -> Result<Moment, Failure> {
        self.recorder.ask(Command::Finish)
    }

    /// Enqueues a wait, and behind it a kernel that doubles the memory. Returns how long that took.
    fn enqueue(&self, wait: impl FnOnce(StreamRef<'_>) -> partywall::Result<()>) -> Result<Duration, Failure> {
        let stream = self.stream.as_ref();
        let began = Moment::now();
        wait(stream)?;
        let double = self.gpu.kernels()?.enqueue_double(stream, self.mapping.as_slice());
        double.doing("doubling by a kernel")?;
        Ok(Moment::now().since(began))
    }

    /// Does the same, and waits until the stream has done it.
    fn wait(&self, wait: impl FnOnce(StreamRef<'_>) -> partywall::Result<()>) -> Result<Waited, Failure> {
        let began = Moment::now();
        let enqueuing = self.enqueue(wait)?;
        if !self.ends(TIMEOUT)? {
            return Err(Failure::new(
                ErrorKind::Device,
                format!("the stream still waits after {} s", TIMEOUT.as_secs()),
                "read the output of the recorder, then start the lab again",
            ));
        }
        let waited = Moment::now().since(began);
        Ok(Waited { enqueuing, waited, new_bytes: self.new_bytes()? })
    }

    /// Returns whether the stream has done everything within the limit.
    fn ends(&self, limit: Duration) -> Result<bool, Failure> {
        device::ends(self.stream.as_ref(), limit)
    }

    /// Returns whether the memory is the output of the recorder's work, doubled.
    fn new_bytes(&self) -> Result<bool, Failure> {
        let bad = self.gpu.kernels()?.verify(self.gpu.stream(), self.mapping.as_slice(), 2);
        Ok(bad.doing("checking by a kernel")?.is_none())
    }
}

impl Waited {
    fn in_time(self, step: Step) -> Step {
        step.value("enqueuing the wait, and work", short(self.enqueuing))
            .value("waited on the stream", millis(self.waited))
            .value("the work behind the wait found", bytes_text(self.new_bytes))
            .says(HOST_WAITS, !self.new_bytes)
            .judge(self.new_bytes, "it waited, and found the other process's output", "it found old bytes")
    }
}

fn bytes_text(new: bool) -> &'static str {
    if new { "the new bytes" } else { "the old bytes" }
}

fn outcome(result: &partywall::Result<()>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |()| "no error".into())
}
