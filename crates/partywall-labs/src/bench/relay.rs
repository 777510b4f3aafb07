//! Hand-offs between streams that pass a byte on, so that a stream that did not wait is found.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use partywall::{
    DType, IpcEvent, IpcEventHandle, Policy, Publisher, Sample, Segment, Subscriber, Timeline, TimelineWriter,
};
use partywall_measure::Failure as Sampled;

use super::{
    copies::SPOILT,
    group::{MAKING, TURNS, same},
    handoff::Behind,
    peer::TENSOR,
    system,
};
use crate::prelude::*;

/// Streams that pass a byte on: each copies, once it may, what the other one has copied. One that came too early would pass on
/// [`SPOILT`], up to the end.
pub(super) struct Relay {
    behind: Behind,
    ours: TimelineWriter,
    theirs: Timeline,
    /// Of this process, and of the other one.
    events: Option<[IpcEvent; 2]>,
    stream: Stream,
    /// One slot for each turn of an exchange, of this process and of the other one.
    slots: [Segment; 2],
}

/// Bytes of a slot.
const SLOT: u64 = 8;

impl Relay {
    pub(super) fn new(
        domain: &Domain,
        place: Place,
        [name, other]: [String; 2],
        behind: Behind,
        ours: TimelineWriter,
        theirs: Timeline,
        mut socket: UnixStream,
    ) -> Result<Self, Failure> {
        let Place::Gpu(uuid) = place else { return Err(unexpected("host memory has no streams")) };
        let gpu = domain.gpu(uuid)?;
        let stream = stream(domain, place)?;
        let events = match behind {
            Behind::Event => {
                let event = IpcEvent::create(&gpu)?;
                let mut handle = event.export()?;
                socket.write_all(&handle.0).and_then(|()| socket.read_exact(&mut handle.0)).map_err(system(MAKING))?;
                Some([event, IpcEvent::open(&gpu, &IpcEventHandle(handle.0))?])
            }
            Behind::Timeline | Behind::Topic | Behind::Hosts => None,
        };
        let build = domain.create(&name, place).mutable(true).tensor(TENSOR, DType::U8, &[SLOT * TURNS]).allocate()?;
        let slots = [build.commit()?, domain.opener(&other).timeout(TIMEOUT).open()?];
        Ok(Self { behind, ours, theirs, events, stream, slots })
    }

    /// Spoils the slots of this process.
    pub(super) fn begin(&self) -> Result<(), Sampled> {
        self.stream.as_ref().enqueue_set(self.slots[0].tensor(TENSOR)?.device()?.as_slice(), SPOILT)?;
        Ok(self.stream.synchronize()?)
    }

    pub(super) fn tell(&self, value: u64, first: bool) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        let [ours, theirs] = [self.slots[0].tensor(TENSOR)?.device()?, self.slots[1].tensor(TENSOR)?.device()?];
        let turn = (value - 1) % TURNS;
        let slot = ours.as_slice().slice(turn * SLOT, SLOT)?;
        match (first, turn) {
            (true, 0) => stream.enqueue_set(slot, byte(value))?,
            (true, turn) => stream.enqueue_copy(slot, theirs.as_slice().slice((turn - 1) * SLOT, SLOT)?)?,
            (false, turn) => stream.enqueue_copy(slot, theirs.as_slice().slice(turn * SLOT, SLOT)?)?,
        }
        match &self.events {
            None if self.behind == Behind::Timeline => return Ok(self.ours.signal_on(stream, value)?),
            None => self.stream.synchronize()?,
            Some([event, _]) => event.record(stream)?,
        }
        Ok(self.ours.signal(value)?)
    }

    pub(super) fn hear(&self, value: u64) -> Result<(), Sampled> {
        if self.behind == Behind::Timeline {
            return Ok(self.theirs.wait_on(self.stream.as_ref(), value)?);
        }
        self.theirs.wait(value, TIMEOUT)?;
        match &self.events {
            Some([_, event]) => Ok(event.wait(self.stream.as_ref())?),
            None => Ok(()),
        }
    }

    /// Waits for the stream.
    pub(super) fn finish(&self) -> Result<(), Sampled> {
        self.stream.synchronize()?;
        Ok(self.theirs.check()?)
    }

    /// Refuses another byte than this side, the first one, has sent on its way.
    pub(super) fn check(&self, last: u64) -> Result<(), Sampled> {
        let mut slot = [0; SLOT as usize];
        let theirs = self.slots[1].tensor(TENSOR)?.device()?;
        self.stream.as_ref().copy_to_host(&mut slot, theirs.as_slice().slice((TURNS - 1) * SLOT, SLOT)?)?;
        same(slot[0].into(), byte(last).into())
    }
}

/// Returns the byte of an exchange. It differs from that of the exchange before.
fn byte(value: u64) -> u8 {
    ((value - 1) / TURNS % u64::from(SPOILT)) as u8
}

/// The same by samples of two topics: each stream copies the byte of the sample that it has received into the next.
pub(super) struct Samples {
    stream: Stream,
    ours: Publisher,
    theirs: Subscriber,
    received: Option<Sample>,
}

impl Samples {
    pub(super) fn new(domain: &Domain, place: Place, [name, other]: [String; 2]) -> Result<Self, Failure> {
        let stream = stream(domain, place)?;
        let topic = |name: &str| domain.topic(name).dtype(DType::U8).shape(&[SLOT]).place(place).open_or_create();
        let theirs = topic(&other)?.subscribe(Policy::Block).join()?;
        Ok(Self { stream, ours: topic(&name)?.publisher()?, theirs, received: None })
    }

    /// Publishes what was received last, or the byte of an exchange that begins.
    pub(super) fn tell(&mut self, value: u64) -> Result<(), Sampled> {
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

    pub(super) fn hear(&mut self) -> Result<(), Sampled> {
        self.received = Some(self.theirs.recv(TIMEOUT)?);
        Ok(())
    }

    /// Waits for the stream.
    pub(super) fn finish(&self) -> Result<(), Sampled> {
        Ok(self.stream.synchronize()?)
    }

    /// Refuses another byte than this side, the first one, has sent on its way.
    pub(super) fn check(&mut self, last: u64) -> Result<(), Sampled> {
        let sample = self.received.take().ok_or("no sample came back")?;
        let mut slot = [SPOILT; SLOT as usize];
        self.stream.as_ref().copy_to_host(&mut slot, sample.device_on(self.stream.as_ref())?.as_slice())?;
        same(slot[0].into(), byte(last).into())
    }
}

fn stream(domain: &Domain, place: Place) -> Result<Stream, Failure> {
    let Place::Gpu(uuid) = place else { return Err(unexpected("host memory has no streams")) };
    let stream = Stream::new(domain.gpu(uuid)?.context()).doing("making a stream")?;
    broker::prepare(domain, &stream);
    Ok(stream)
}
