//! Copies and reads of another GPU's memory, by a process that sees the owner's GPU and by one that does not.
//!
//! This process owns the memory. The reader is another process on another GPU, whose clock times the work.

use std::cell::RefCell;

use partywall_measure::{Comparison, Sampler, Unit};

use super::{
    Setting, cases, chain,
    copies::{Turns, rate, same_on, spoil_on},
    memory::{asked, open},
    peer::{Handle, Order, TENSOR, bytes_of, with_words},
    samplers::Timer,
};
use crate::prelude::*;

/// How a reader opens the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    Segment,
    /// The driver's own import and mapping.
    Descriptor,
    Legacy,
}

const WAYS: [Way; 3] = [Way::Segment, Way::Descriptor, Way::Legacy];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Segment => "a Partywall segment",
            Self::Descriptor => "the driver's import of a descriptor",
            Self::Legacy => "a legacy handle (cuIpcOpenMemHandle)",
        }
    }
}

/// The memory that a reader opens. The descriptor comes with it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    handle: Handle,
    bytes: u64,
}

pub(crate) fn run(setting: &Setting<'_>, owner: &Gpu) -> Result<(), Failure> {
    let reader = match other(owner)? {
        Ok(reader) => reader,
        Err(why) => {
            setting.note(format!("copies out of another GPU are left out: {why}"));
            return Ok(());
        }
    };
    let seen = reader.to_string();
    for hidden in [false, true] {
        let environment: &[_] = if hidden { &[("CUDA_VISIBLE_DEVICES", seen.as_str())] } else { &[] };
        let what = match hidden {
            false => "another GPU",
            true => "another GPU, which the reader does not see",
        };
        let peer = RefCell::new(setting.peer_on(Place::Gpu(reader), environment)?);
        let sizes = setting.sizes(&format!("copies out of {what}"), BUFFERS, HOST_BUFFERS);
        if let Some(largest) = sizes.last() {
            let rotated = setting.rotated(*largest, BUFFERS, HOST_BUFFERS);
            by_size(setting, owner, &peer, what, &sizes, rotated)?;
        }
        peer.into_inner().end();
    }
    Ok(())
}

/// The number of buffers on a GPU, and on the host.
const BUFFERS: u64 = 4;
const HOST_BUFFERS: u64 = 4;

/// Returns another GPU that reaches this one's memory, or why there is none.
fn other(owner: &Gpu) -> Result<Result<DeviceUuid, &'static str>, Failure> {
    let mut why = "only one GPU is visible";
    for device in gpu::devices()? {
        let uuid = device.uuid().doing("asking for a UUID")?;
        if uuid == owner.uuid() {
            continue;
        }
        if device.can_access_peer(&owner.context().device()).doing("asking about a link")? {
            return Ok(Ok(uuid));
        }
        why = "no other GPU reaches this one's memory";
    }
    Ok(Err(why))
}

fn by_size(
    setting: &Setting<'_>,
    gpu: &Gpu,
    peer: &RefCell<Peer>,
    what: &str,
    sizes: &[u64],
    rotated: u64,
) -> Result<(), Failure> {
    let words = chain::new(rotated);
    let plain = with_words(gpu, &words)?;
    let handle = IpcMemoryHandle::of(gpu.context(), plain.as_slice().device_ptr()).doing("making a handle")?;
    let memory = PhysicalMemory::create(gpu.context(), whole(gpu, rotated)?).doing("making memory")?;
    let descriptor = memory.export().doing("exporting memory")?;
    let mapping = Mapping::new(memory, Access::ReadWrite).doing("mapping memory")?;
    let inside = mapping.as_slice().slice(0, rotated).doing("writing memory")?;
    gpu.stream().copy_from_host(inside, bytes_of(&words)).doing("writing memory")?;
    let build = setting.domain.create(SEGMENT, setting.place).tensor(TENSOR, partywall::DType::U64, &[rotated / 8]);
    let mut build = build.allocate()?;
    build.write(TENSOR, bytes_of(&words))?;
    let segment = build.commit()?;

    let offer = Order::Across(Offer { handle: handle.0.to_vec(), bytes: rotated });
    peer.borrow_mut().say_with(offer, &[descriptor.as_fd()])?;
    let refusals: Vec<Option<String>> = peer.borrow_mut().hear()?;
    let mut opened = Vec::new();
    for (way, refusal) in WAYS.into_iter().zip(refusals) {
        match refusal {
            None => opened.push(way),
            Some(why) => setting.note(format!("copies out of {what}: {} was refused: {why}", way.name())),
        }
    }
    let Some((first, others)) = opened.split_first() else { return Ok(()) };
    for size in sizes {
        let case = |name: &str, of: &str| cases(Unit::GigabytesPerSecond, *size, format!("{of} {what}"))(name);
        let rate = |order: fn(Way, u64) -> Order, way: Way| -> Sampler<'_> {
            Box::new(move || asked(peer.borrow_mut().ask(order(way, *size))))
        };
        let copy = |way| rate(|way, bytes| Order::CopyAcross { way, bytes }, way);
        let of = |way: Way| case(way.name(), "copies out of");
        let copies = others.iter().fold(Comparison::new(of(*first), copy(*first)), |copies, way| match way {
            Way::Descriptor => copies.floor(of(*way), copy(*way)),
            _ => copies.rival(of(*way), copy(*way)),
        });
        setting.run(copies)?;

        let read = |way| rate(|way, bytes| Order::ReadAcross { way: Some(way), bytes }, way);
        let of = |name: &str| case(name, "bandwidth of a kernel that reads");
        let own: Sampler<'_> = Box::new(|| asked(peer.borrow_mut().ask(Order::ReadAcross { way: None, bytes: *size })));
        let reads = Comparison::new(of(first.name()), read(*first)).floor(of("the reader's own memory"), own);
        let reads = others.iter().fold(reads, |reads, way| reads.rival(of(way.name()), read(*way)));
        setting.run(reads)?;
    }
    peer.borrow_mut().ask::<()>(Order::Free)?;
    segment.release()?;
    Ok(())
}

const SEGMENT: &str = "across";

/// Returns the size of an allocation that has room for `bytes` bytes.
fn whole(gpu: &Gpu, bytes: u64) -> Result<u64, Failure> {
    let granule = PhysicalMemory::granularity(gpu.context()).doing("asking for the granularity")?;
    Ok(bytes.next_multiple_of(granule))
}

/// A reader's mappings of the owner's memory, and its own memory.
pub(crate) struct Reader {
    gpu: Arc<Gpu>,
    segment: Result<Segment, String>,
    descriptor: Result<Mapping, String>,
    legacy: Result<IpcMapping, String>,
    target: DeviceBuffer,
    expected: Vec<u64>,
    bytes: u64,
    turns: Turns,
}

impl Reader {
    pub(crate) fn new(session: &mut Session, offer: &Offer) -> Result<Self, Failure> {
        let descriptor = session.parent().take_fd()?;
        let Place::Gpu(uuid) = session.place else { return Err(unexpected("host memory is on no GPU")) };
        let gpu = session.domain().gpu(uuid)?;
        let bytes = offer.bytes;
        let opener = session.domain().opener(SEGMENT).device(gpu.uuid()).allow_peer(true);
        let import = PhysicalMemory::import(gpu.context(), descriptor.as_fd(), whole(&gpu, bytes)?)
            .and_then(|memory| Mapping::new(memory, Access::ReadOnly));
        Ok(Self {
            segment: opener.open().map_err(|error| error.to_string()),
            descriptor: import.map_err(|error| error.to_string()),
            legacy: open(&gpu, &offer.handle, bytes).map_err(|failure| failure.message),
            target: DeviceBuffer::new(gpu.context(), bytes).doing("allocating memory")?,
            expected: chain::new(bytes),
            gpu,
            bytes,
            turns: Turns::new(bytes),
        })
    }

    /// Returns for each way why it was refused, if it was. Compares all bytes of the memory that was opened.
    pub(crate) fn refusals(&self) -> Result<Vec<Option<String>>, Failure> {
        let refusals = [self.segment.as_ref().err(), self.descriptor.as_ref().err(), self.legacy.as_ref().err()];
        for (way, refusal) in WAYS.into_iter().zip(refusals) {
            if refusal.is_none() {
                self.copy(way, self.bytes).map_err(super::failed)?;
                let mut copied = vec![0; self.bytes as usize];
                self.gpu.stream().copy_to_host(&mut copied, self.target.as_slice()).doing("reading memory")?;
                if copied != bytes_of(&self.expected) {
                    return Err(unexpected(format!("{}: other bytes than the owner has written", way.name())));
                }
            }
        }
        Ok(refusals.map(|refusal| refusal.cloned()).to_vec())
    }

    /// Copies the next `bytes` bytes of the owner's memory. Returns GB/s.
    pub(crate) fn copy(&self, way: Way, bytes: u64) -> Result<f64, partywall_measure::Failure> {
        let stream = self.gpu.stream();
        let at = self.turns.part(bytes);
        let target = self.target.slice(at, bytes)?;
        spoil_on(stream, target)?;
        let time = self.timed(way, |memory| Ok(stream.enqueue_copy(target, memory.slice(at, bytes)?)?))?;
        let expected = &bytes_of(&self.expected)[at as usize..(at + bytes) as usize];
        same_on(stream, target, expected)?;
        Ok(rate(bytes, time))
    }

    /// Has a kernel read the next `bytes` bytes of the owner's memory, or of this process's own. Returns GB/s.
    pub(crate) fn read(&self, way: Option<Way>, bytes: u64) -> Result<f64, partywall_measure::Failure> {
        let at = self.turns.part(bytes);
        let read = |memory: DeviceSlice<'_>| {
            Ok(self.gpu.kernels()?.enqueue_read(self.gpu.stream(), memory.slice(at, bytes)?)?)
        };
        let time = match way {
            Some(way) => self.timed(way, read)?,
            None => Timer::new(&self.gpu)?.time(|| read(self.target.as_slice()))?,
        };
        Ok(rate(bytes, time))
    }

    /// Returns how long work on the owner's memory takes.
    fn timed(
        &self,
        way: Way,
        work: impl Fn(DeviceSlice<'_>) -> Result<(), partywall_measure::Failure>,
    ) -> Result<Duration, partywall_measure::Failure> {
        let timer = Timer::new(&self.gpu)?;
        let timed = |memory| timer.time(|| work(memory));
        match way {
            Way::Segment => timed(self.segment.as_ref().map_err(String::as_str)?.tensor(TENSOR)?.device()?.as_slice()),
            Way::Descriptor => timed(self.descriptor.as_ref().map_err(String::as_str)?.as_slice()),
            Way::Legacy => timed(self.legacy.as_ref().map_err(String::as_str)?.as_slice()),
        }
    }
}
