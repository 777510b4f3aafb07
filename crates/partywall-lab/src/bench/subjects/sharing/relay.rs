//! Hand-offs between streams that pass a byte on, which reveals a stream that did not wait.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use partywall::{ClaimedTask, EnqueuedResult, Queue, Task, Ticket};
use partywall_measure::Failure as Sampled;

use super::{
    copies::SPOILT,
    group::{MAKING, TURNS},
    handoff::{Behind, Permits},
    peer::TENSOR,
    turns::same,
};
use crate::prelude::*;

/// Streams that pass a byte on: each copies the byte that the other one has copied. A stream that does not wait would
/// pass on [`SPOILT`] to the end.
pub(crate) struct Relay {
    behind: Behind,
    signals: Signals,
    /// The event of this process, and of the other one.
    events: Option<[IpcEvent; 2]>,
    stream: Stream,
    /// One slot for each turn of an exchange, of this process and of the other one.
    slots: [Segment; 2],
}

/// The objects by which the hosts or the streams notify each other.
pub(crate) enum Signals {
    Timelines { ours: TimelineWriter, theirs: Timeline },
    Permits(Permits),
}

/// Bytes of a slot.
pub(crate) const SLOT: u64 = 8;

impl Relay {
    pub(crate) fn new(
        domain: &Domain,
        place: Place,
        [name, other]: [&str; 2],
        behind: Behind,
        signals: Signals,
        mut socket: UnixStream,
    ) -> Result<Self, Failure> {
        let Place::Gpu(uuid) = place else { return Err(unexpected("host memory has no streams")) };
        let gpu = domain.gpu(uuid)?;
        let stream = stream(domain, place)?;
        let events = match behind {
            Behind::Event => {
                let event = IpcEvent::create(&gpu)?;
                let mut handle = event.export()?;
                socket.write_all(&handle.0).and_then(|()| socket.read_exact(&mut handle.0)).doing(MAKING)?;
                Some([event, IpcEvent::open(&gpu, &IpcEventHandle(handle.0))?])
            }
            Behind::Timeline | Behind::Topic | Behind::Queue | Behind::Pool | Behind::Semaphore | Behind::Hosts => None,
        };
        let build = domain.create(name, place).mutable(true).tensor(TENSOR, DType::U8, &[SLOT * TURNS]).allocate()?;
        let slots = [build.commit()?, domain.opener(other).timeout(TIMEOUT).open()?];
        Ok(Self { behind, signals, events, stream, slots })
    }

    /// Spoils the slots of this process.
    pub(crate) fn begin(&self) -> Result<(), Sampled> {
        self.stream.as_ref().enqueue_set(self.slots[0].tensor(TENSOR)?.device()?.as_slice(), SPOILT)?;
        Ok(self.stream.synchronize()?)
    }

    pub(crate) fn send(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        let [ours, theirs] = [self.slots[0].tensor(TENSOR)?.device()?, self.slots[1].tensor(TENSOR)?.device()?];
        let turn = (value - 1) % TURNS;
        let slot = ours.as_slice().slice(turn * SLOT, SLOT)?;
        match (first, turn) {
            (true, 0) => stream.enqueue_set(slot, byte(value))?,
            (true, turn) => stream.enqueue_copy(slot, theirs.as_slice().slice((turn - 1) * SLOT, SLOT)?)?,
            (false, turn) => stream.enqueue_copy(slot, theirs.as_slice().slice(turn * SLOT, SLOT)?)?,
        }
        match &mut self.signals {
            Signals::Permits(permits) => {
                let permit = permits.give(value, first)?;
                permit.release_on(stream).map_err(|refused| refused.error)?;
                Ok(())
            }
            Signals::Timelines { ours, .. } => {
                match &self.events {
                    None if self.behind == Behind::Timeline => return Ok(ours.signal_on(stream, value)?),
                    None => self.stream.synchronize()?,
                    Some([event, _]) => event.record(stream)?,
                }
                Ok(ours.signal(value)?)
            }
        }
    }

    pub(crate) fn receive(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        let theirs = match &mut self.signals {
            Signals::Permits(permits) => return permits.take(value, first),
            Signals::Timelines { theirs, .. } => theirs,
        };
        if self.behind == Behind::Timeline {
            return Ok(theirs.wait_on(self.stream.as_ref(), value)?);
        }
        theirs.wait(value, TIMEOUT)?;
        match &self.events {
            Some([_, event]) => Ok(event.wait(self.stream.as_ref())?),
            None => Ok(()),
        }
    }

    /// Waits for the stream.
    pub(crate) fn finish(&self) -> Result<(), Sampled> {
        self.stream.synchronize()?;
        match &self.signals {
            Signals::Timelines { theirs, .. } => Ok(theirs.check()?),
            Signals::Permits(_) => Ok(()),
        }
    }

    /// Fails if the byte is not the one that this side, the first one, has sent.
    pub(crate) fn check(&self, last: u64) -> Result<(), Sampled> {
        let theirs = self.slots[1].tensor(TENSOR)?.device()?;
        came_back(&self.stream, theirs.as_slice().slice((TURNS - 1) * SLOT, SLOT)?, last)
    }
}

/// Returns the byte of an exchange. It differs from the byte of the previous exchange.
pub(crate) fn byte(value: u64) -> u8 {
    ((value - 1) / TURNS % u64::from(SPOILT)) as u8
}

/// A relay by samples of two topics: each stream copies the byte of the received sample into the next one.
pub(crate) struct Samples {
    stream: Stream,
    ours: Publisher,
    theirs: Subscriber,
    received: Option<Sample>,
}

impl Samples {
    pub(crate) fn new(domain: &Domain, place: Place, [name, other]: [&str; 2]) -> Result<Self, Failure> {
        let stream = stream(domain, place)?;
        let topic = |name: &str| domain.topic(name).dtype(DType::U8).shape(&[SLOT]).place(place).open_or_create();
        let theirs = topic(other)?.subscribe(Policy::Block).join()?;
        Ok(Self { stream, ours: topic(name)?.publisher()?, theirs, received: None })
    }

    /// Publishes the byte that was received last, or the byte of a new exchange.
    pub(crate) fn send(&mut self, value: u64) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        let loan = self.ours.loan(DType::U8, &[SLOT], TIMEOUT)?;
        match self.received.take() {
            None => stream.enqueue_set(loan.device()?.as_slice(), byte(value))?,
            Some(sample) => {
                stream.enqueue_copy(loan.device()?.as_slice(), sample.device_on(stream)?.as_slice())?;
                sample.release_on(stream).map_err(|refused| refused.error)?;
            }
        }
        loan.filled().publish_on(stream, TIMEOUT).map_err(|refused| refused.error)?;
        Ok(())
    }

    pub(crate) fn receive(&mut self) -> Result<(), Sampled> {
        self.received = Some(self.theirs.recv(TIMEOUT)?);
        Ok(())
    }

    /// Waits for the stream.
    pub(crate) fn finish(&self) -> Result<(), Sampled> {
        Ok(self.stream.synchronize()?)
    }

    /// Fails if the byte is not the one that this side, the first one, has sent.
    pub(crate) fn check(&mut self, last: u64) -> Result<(), Sampled> {
        let sample = self.received.take().ok_or("no sample came back")?;
        came_back(&self.stream, sample.device_on(self.stream.as_ref())?.as_slice(), last)
    }
}

/// A relay by a queue: the first side submits the byte as the input of a task, and the other side copies it into the
/// output. No host waits for a stream before an exchange ends.
pub(crate) struct Tasks {
    stream: Stream,
    queue: Queue,
    side: Side,
}

/// The pending objects of each side.
enum Side {
    /// The task that was submitted last, the outputs of this exchange, and the last of them once it has ended.
    Submitter {
        ticket: Option<Ticket>,
        results: Vec<EnqueuedResult>,
        last: Option<Block>,
    },
    Worker {
        task: Option<ClaimedTask>,
    },
}

impl Tasks {
    pub(crate) fn new(domain: &Domain, place: Place, name: &str, first: bool) -> Result<Self, Failure> {
        let stream = stream(domain, place)?;
        // The streams give blocks back later: an exchange must not wait for blocks of the previous one.
        let blocks = 2 * TURNS as u32;
        let queue = domain.queue(name).tasks(blocks).inputs(blocks, SLOT).outputs(blocks, SLOT).place(place);
        let side = match first {
            true => Side::Submitter { ticket: None, results: Vec::new(), last: None },
            false => Side::Worker { task: None },
        };
        Ok(Self { stream, queue: queue.open_or_create()?, side })
    }

    pub(crate) fn send(&mut self, value: u64) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        match &mut self.side {
            Side::Submitter { ticket, results, .. } => {
                let block = self.queue.inputs().alloc(TIMEOUT)?;
                match results.last() {
                    None => stream.enqueue_set(slot(block.device()?.as_slice())?, byte(value))?,
                    Some(result) => {
                        let output = slot(result.device()?.as_slice())?;
                        stream.enqueue_copy(slot(block.device()?.as_slice())?, output)?;
                    }
                }
                let task = Task::new("pass on").arguments(&value.to_ne_bytes()).input(block).output(SLOT);
                let submitted = self.queue.submit_on(task.cancel_with_submitter(true), stream, TIMEOUT);
                *ticket = Some(submitted.map_err(|refused| refused.error)?);
            }
            Side::Worker { task } => {
                let mut task = task.take().ok_or("no task is claimed")?;
                let (inputs, output) = task.inputs_and_output()?;
                let input = inputs.first().ok_or("the task has no input")?;
                stream.enqueue_copy(slot(output.device()?.as_slice())?, slot(input.device()?.as_slice())?)?;
                task.complete_on(stream).map_err(|refused| refused.0)?;
            }
        }
        Ok(())
    }

    pub(crate) fn receive(&mut self, value: u64) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        match &mut self.side {
            Side::Submitter { ticket, results, .. } => {
                let ticket = ticket.take().ok_or("no task was submitted")?;
                results.push(ticket.wait_on(stream, TIMEOUT)?);
                Ok(())
            }
            Side::Worker { task } => {
                let claimed = self.queue.claim(TIMEOUT)?;
                let found = claimed.arguments().try_into().map_or(0, u64::from_ne_bytes);
                claimed.wait_inputs_on(stream)?;
                *task = Some(claimed);
                same(found, value)
            }
        }
    }

    /// Waits for the stream and takes the results, which proves that they are valid.
    pub(crate) fn finish(&mut self) -> Result<(), Sampled> {
        self.stream.synchronize()?;
        let Side::Submitter { results, last, .. } = &mut self.side else { return Ok(()) };
        for result in results.drain(..) {
            let output = result.take(TIMEOUT)?.into_output().ok_or("a task has no output")?;
            if let Some(before) = last.replace(output) {
                before.release_on(self.stream.as_ref()).map_err(|refused| refused.error)?;
            }
        }
        Ok(())
    }

    /// Fails if the byte is not the one that this side, the first one, has sent.
    pub(crate) fn check(&mut self, last: u64) -> Result<(), Sampled> {
        let Side::Submitter { last: output, .. } = &mut self.side else { return Ok(()) };
        let output = output.take().ok_or("no result came back")?;
        let checked = came_back(&self.stream, output.device()?.as_slice(), last);
        output.release_on(self.stream.as_ref()).map_err(|refused| refused.error)?;
        checked
    }
}

/// Fails if the first byte of memory is not the one that this side, the first one, has sent.
pub(crate) fn came_back(stream: &Stream, memory: DeviceSlice<'_>, last: u64) -> Result<(), Sampled> {
    let mut bytes = [SPOILT; SLOT as usize];
    stream.as_ref().copy_to_host(&mut bytes, slot(memory)?)?;
    same(bytes[0].into(), byte(last).into())
}

/// Returns the first bytes of a block, as many as a slot has.
pub(crate) fn slot(block: DeviceSlice<'_>) -> Result<DeviceSlice<'_>, Sampled> {
    Ok(block.slice(0, SLOT)?)
}

pub(crate) fn stream(domain: &Domain, place: Place) -> Result<Stream, Failure> {
    let Place::Gpu(uuid) = place else { return Err(unexpected("host memory has no streams")) };
    let stream = Stream::new(domain.gpu(uuid)?.context()).doing("making a stream")?;
    broker::prepare(domain, &stream);
    Ok(stream)
}
