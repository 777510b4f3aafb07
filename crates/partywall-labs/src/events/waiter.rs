//! The waiter: waits for the recorder's work by event and by timeline, in time and too early, and says which claims
//! held.

use std::{mem, os::fd::AsFd};

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
    let stream = Stream::new(gpu.context()).doing("making a stream")?;
    let obstacle = device::streams_cannot_wait(&gpu);
    broker::prepare(session.domain(), &stream);
    let mut waiter = Waiter { gpu: &gpu, mapping, stream, timeline, recorder, obstacle };

    if let Err(failure) = waiter.make_all(session, events) {
        // If the recorder has died, a stream may wait for its event for ever, and dropping memory waits for streams.
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

/// What came of waiting on a stream.
struct Waited {
    /// What enqueuing the wait took on the host.
    enqueuing: Duration,
    /// From then until the stream had done the work behind it.
    waited: Duration,
    /// Whether that work found what the recorder's work leaves.
    new_bytes: bool,
}

impl Waiter<'_> {
    fn make_all(&mut self, session: &Session, events: Result<Vec<Vec<u8>>, String>) -> Result<(), Failure> {
        self.by_event(session, events)?;
        for experiment in [Self::in_time, Self::early, Self::on_the_host, Self::in_vain] {
            session.tell(experiment(self)?)?;
        }
        Ok(())
    }

    /// The three steps with events.
    fn by_event(&mut self, session: &Session, events: Result<Vec<Vec<u8>>, String>) -> Result<(), Failure> {
        let opened = events.and_then(|handles| {
            let open = |handle: Vec<u8>| {
                let bytes = <[u8; 64]>::try_from(handle).map_err(|_| "a handle has 64 bytes".to_owned())?;
                IpcEvent::open(self.gpu, &IpcEventHandle(bytes)).map_err(|error| error.to_string())
            };
            handles.into_iter().map(open).collect::<Result<Vec<_>, String>>()
        });
        let opened = match opened.as_deref() {
            Ok([first, second]) => Ok([first, second]),
            Ok(_) => Err("the recorder has no two events".to_owned()),
            Err(why) => Err(why.clone()),
        };
        for experiment in [Self::event_in_time, Self::event_early, Self::event_again] {
            session.tell(experiment(self, &opened)?)?;
        }
        Ok(())
    }

    fn event_in_time(&mut self, events: &Result<[&IpcEvent; 2], String>) -> Result<Step, Failure> {
        let step = Step::new(
            "event",
            "The stream waits for an event that was recorded behind the work",
            "The recorder says so when it has recorded; then the wait is enqueued here. Streams of two processes are in \
             order, and no host waits.",
        );
        let [event, _] = match events {
            Ok(events) => events,
            Err(why) => return Ok(step.untried(Some(HOST_WAITS), why)),
        };
        self.clear()?;
        if let Err(why) = self.work(Behind::Event(0))? {
            return Ok(step.untried(Some(HOST_WAITS), why));
        }
        let waited = self.wait(|stream| event.wait(stream))?;
        self.finish()?;
        Ok(waited.in_time(step))
    }

    fn event_early(&mut self, events: &Result<[&IpcEvent; 2], String>) -> Result<Step, Failure> {
        let step = Step::new(
            "event-early",
            "The stream waits for an event that nothing was recorded in yet",
            "A wait is for the record that there is when it is enqueued. There is none: the stream goes on at once, with \
             no error, and reads what was there before. So a message \"I have recorded\" has to come first.",
        );
        match events {
            Ok([_, event]) => self.too_early(step, NEXT_RECORD, event, 1),
            Err(why) => Ok(step.untried(Some(NEXT_RECORD), why)),
        }
    }

    fn event_again(&mut self, events: &Result<[&IpcEvent; 2], String>) -> Result<Step, Failure> {
        let step = Step::new(
            "event-again",
            "The stream waits for the second record of the first event, too early",
            "There is a record, that of the round before, and it is reached. An event knows no rounds: a waiter cannot \
             say which record is meant.",
        );
        match events {
            Ok([event, _]) => self.too_early(step, ROUNDS, event, 0),
            Err(why) => Ok(step.untried(Some(ROUNDS), why)),
        }
    }

    /// Waits for an event before it is recorded.
    fn too_early(&mut self, step: Step, claim: Claim, event: &IpcEvent, index: usize) -> Result<Step, Failure> {
        self.clear()?;
        let enqueued = self.enqueue(|stream| event.wait(stream))?;
        // Should it wait after all, the recorder's work ends that.
        let went_on = self.ends(SLOW)?;
        let found = if went_on { Some(self.new_bytes()?) } else { None };
        let worked = self.work(Behind::Event(index))?;
        self.finish()?;
        self.ends(TIMEOUT)?;
        if let Err(why) = worked {
            return Ok(step.untried(Some(claim), why));
        }
        Ok(step
            .value("waited on the stream", if went_on { "not at all" } else { "until the record came" })
            .value("enqueuing the wait, and work", short(enqueued))
            .value("the work behind the wait found", bytes_text(found == Some(true)))
            .says(claim, !went_on)
            .judge(
                found == Some(false),
                "it waited for nothing: old bytes, and no error",
                "it waited, or found new bytes",
            ))
    }

    fn in_time(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "timeline",
            "The stream waits for a value that was signalled behind the work",
            "signal_on has the recorder's stream write a number behind the work, wait_on has this one wait for it. The \
             number is in host memory that both have; no host waits.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(Some(HOST_WAITS), why));
        }
        self.clear()?;
        if let Err(why) = self.work(Behind::Signal(1))? {
            return Ok(step.untried(Some(HOST_WAITS), why));
        }
        let waited = self.wait(|stream| self.timeline.wait_on(stream, 1))?;
        self.finish()?;
        Ok(waited.in_time(step))
    }

    fn early(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "timeline-early",
            "The stream waits for a value before the work is even launched",
            "A number that only grows has no \"too early\": the wait is for the value, not for what happens to be \
             enqueued. The recorder need not say that it has begun.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(Some(NOT_YET), why));
        }
        self.clear()?;
        let began = Moment::now();
        let enqueuing = self.enqueue(|stream| self.timeline.wait_on(stream, 2))?;
        let waits = !self.ends(MOMENT)?;
        if let Err(why) = self.work(Behind::Signal(2))? {
            // Nothing else would end the wait.
            self.timeline.abandon()?;
            return Ok(step.untried(Some(NOT_YET), why));
        }
        let ended = self.ends(TIMEOUT)?;
        let waited = Moment::now().since(began);
        self.finish()?;
        let new = ended && self.new_bytes()?;
        Ok(step
            .value("enqueuing the wait, and work", short(enqueuing))
            .value("the stream, before the launch", if waits { "waits" } else { "went on" })
            .value("waited on the stream", format!("{}, {} of them before the launch", millis(waited), millis(MOMENT)))
            .value("the work behind the wait found", bytes_text(new))
            .says(NOT_YET, !waits)
            .judge(waits && new, "it waited for what was to come", "it did not wait for the value"))
    }

    /// The host sleeps until the value is reached.
    fn on_the_host(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "timeline-host",
            "The host waits for a value",
            "A number that a GPU writes wakes nobody. wait sleeps until the signal is announced, when the work is \
             enqueued, and looks then, at first often, whether the GPU has reached it. signal_on_and_wake has the driver \
             call the waker: earlier news for a slower stream.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(Some(POLLING), why));
        }
        let mut waits = Vec::new();
        for behind in [Behind::Signal(3), Behind::SignalAndWake(4)] {
            let (Behind::Signal(value) | Behind::SignalAndWake(value)) = behind else { continue };
            if let Err(why) = self.work(behind)? {
                return Ok(step.untried(Some(POLLING), why));
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

    /// Waits for what never comes.
    fn in_vain(&mut self) -> Result<Step, Failure> {
        const NEVER: u64 = 1 << 40;
        let step = Step::new(
            "timeline-limit",
            "Waits with a time limit, for a value that never comes",
            "Nobody can cancel a wait that a stream has begun. So one with a limit is for a word of this process's own, \
             which the service thread writes when the value is there, or the time is over. A wait for an event has no \
             such thing.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(Some(CANCEL), why));
        }
        let host = self.timeline.wait(NEVER, MOMENT);
        let began = Moment::now();
        let limited = self.timeline.wait_on_for(self.stream.as_ref(), NEVER, MOMENT)?;
        let ended = self.ends(TIMEOUT)?;
        let waited = Moment::now().since(began);
        let told = limited.outcome().unwrap_or(Ok(()));
        let step = step.value("the host, limit 100 ms", outcome(&host)).value(
            "the stream, limit 100 ms",
            format!("{} after {}; {}", if ended { "went on" } else { "waits" }, millis(waited), outcome(&told)),
        );
        let timed_out = |result: &partywall::Result<()>| matches!(result, Err(Error::Timeout { .. }));
        Ok(step.says(CANCEL, !ended).judge(
            ended && timed_out(&host) && timed_out(&told),
            "both went on when the time was over",
            "not both went on when the time was over",
        ))
    }

    /// Sets the memory to what was there before.
    fn clear(&self) -> Result<(), Failure> {
        device::set(self.gpu, self.mapping.as_slice(), 0)
    }

    /// Has the recorder enqueue its work; why it could not.
    fn work(&mut self, behind: Behind) -> Result<Enqueued, Failure> {
        self.recorder.ask(Command::Work(behind))
    }

    /// Waits until the recorder's host has seen that its work is done; when that was.
    fn finish(&mut self) -> Result<Moment, Failure> {
        self.recorder.ask(Command::Finish)
    }

    /// Enqueues a wait, and behind it the doubling of the memory; how long that took.
    fn enqueue(&self, wait: impl FnOnce(StreamRef<'_>) -> partywall::Result<()>) -> Result<Duration, Failure> {
        let stream = self.stream.as_ref();
        let began = Moment::now();
        wait(stream)?;
        let double = self.gpu.kernels()?.enqueue_double(stream, self.mapping.as_slice());
        double.doing("doubling by a kernel")?;
        Ok(Moment::now().since(began))
    }

    /// The same, until the stream has done it.
    fn wait(&self, wait: impl FnOnce(StreamRef<'_>) -> partywall::Result<()>) -> Result<Waited, Failure> {
        let began = Moment::now();
        let enqueuing = self.enqueue(wait)?;
        if !self.ends(TIMEOUT)? {
            return Err(Failure::new(
                ErrorKind::Device,
                format!("the stream still waits after {} s", TIMEOUT.as_secs()),
                "see what the recorder says, and start the lab again",
            ));
        }
        let waited = Moment::now().since(began);
        Ok(Waited { enqueuing, waited, new_bytes: self.new_bytes()? })
    }

    /// Whether the stream has done everything within the limit.
    fn ends(&self, limit: Duration) -> Result<bool, Failure> {
        device::ends(self.stream.as_ref(), limit)
    }

    /// Whether the memory is what the recorder's work leaves, doubled.
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
            .judge(self.new_bytes, "it waited, and found what the other process had written", "it found old bytes")
    }
}

fn bytes_text(new: bool) -> &'static str {
    if new { "the new bytes" } else { "the old bytes" }
}

fn outcome(result: &partywall::Result<()>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |()| "no error".into())
}
