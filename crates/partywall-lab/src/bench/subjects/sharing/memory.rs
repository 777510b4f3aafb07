//! Reading and writing private and shared memory.

use std::{
    cell::{Cell, RefCell},
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use partywall::cuda::experiment::Chains;
use partywall_measure::{Comparison, Sampler, Unit};

use super::{
    LARGEST, Setting, cases, chain,
    peer::{Handle, Order, TENSOR, filled, with_words},
    samplers::Timer,
};
use crate::prelude::*;

/// Links that one sample follows.
const LINKS: u64 = 4096;

/// The memories with a chain through them, or with bytes that are copied.
pub(crate) const OWN: &str = "own memory";
pub(crate) const SHARED: &str = "a Partywall segment of another process";
pub(crate) const LEGACY: &str = "a legacy handle (cuIpcOpenMemHandle) of another process";

pub(crate) fn latency(setting: &Setting<'_>) -> Result<(), Failure> {
    let mut peer = setting.peer()?;
    // Shared ones to read and to write, the own one, and on a GPU one by a legacy handle; there both processes write
    // from the host.
    let copies = if setting.gpu.is_some() { 4 } else { 3 };
    let sizes = [12, 16, 20, 24, 28, 30].map(|power| 1 << power).into_iter().chain([LARGEST]);
    for size in setting.that_fit("latency", sizes, copies, 2) {
        let [frozen, mutable] = [false, true].map(|mutable| format!("chain.{size}.{mutable}"));
        for (name, mutable) in [(&frozen, false), (&mutable, true)] {
            peer.ask::<()>(Order::Commit { name: name.clone(), bytes: size, mutable })?;
        }
        let frozen = setting.domain.opener(&frozen).open()?;
        let mutable = setting.domain.opener(&mutable).read_write().open()?;
        match &setting.gpu {
            None => host_latency(setting, size, &frozen, &mutable)?,
            Some(gpu) => gpu_latency(setting, gpu, &mut peer, size, &frozen, &mutable)?,
        }
        drop((frozen, mutable));
        peer.ask::<()>(Order::Free)?;
    }
    peer.end();
    Ok(())
}

fn host_latency(setting: &Setting<'_>, size: u64, frozen: &Segment, mutable: &Segment) -> Result<(), Failure> {
    let case = |what: &str, name: &str| cases(Unit::Nanoseconds, size, what)(name);
    let own = chain::new(size);
    let shared = frozen.tensor(TENSOR)?.as_slice::<u64>()?;
    if shared != own {
        return Err(unexpected("the peer has written another chain"));
    }
    let follow = |chain: &[u64], at: &Cell<u64>| {
        let start = Instant::now();
        let mut link = at.get();
        for _ in 0..LINKS {
            link = chain[link as usize];
        }
        at.set(black_box(link));
        Ok(start.elapsed().as_nanos() as f64 / LINKS as f64)
    };
    let starts = [(); 2].map(|()| Cell::new(0));
    let comparison = Comparison::new(
        case("latency of a dependent load, one thread", SHARED),
        Box::new(|| follow(shared, &starts[0])),
    )
    .floor(case("latency of a dependent load, one thread", OWN), Box::new(|| follow(&own, &starts[1])));
    setting.run(comparison)?;

    let shared = mutable.tensor(TENSOR)?.shared::<u64>()?;
    // The kernel provides a page when it is first written. The samples must not include that.
    for link in (0..own.len()).step_by(chain::STRIDE) {
        if shared.get(link) != own[link] {
            return Err(unexpected("the peer has written another chain"));
        }
        shared.set(link + 1, 0);
    }
    let own: Vec<AtomicU64> = own.into_iter().map(AtomicU64::new).collect();
    let starts = [(); 2].map(|()| Cell::new(0_u64));
    let write_shared = writes(&starts[0], |word, number| shared.set(word, number), |word| shared.get(word));
    let write_own = writes(
        &starts[1],
        |word, number| own[word].store(number, Ordering::Relaxed),
        |word| own[word].load(Ordering::Relaxed),
    );
    let comparison =
        Comparison::new(case("latency of a write, a fence and a dependent load, one thread", SHARED), write_shared)
            .floor(case("latency of a write, a fence and a dependent load, one thread", OWN), write_own);
    setting.run(comparison)
}

/// Writes behind each link, and follows it after a fence.
fn writes<'a>(at: &'a Cell<u64>, set: impl Fn(usize, u64) + 'a, get: impl Fn(usize) -> u64 + 'a) -> Sampler<'a> {
    Box::new(move || {
        let start = Instant::now();
        let mut link = at.get() as usize;
        for number in 0..LINKS {
            set(link + 1, number);
            fence(Ordering::SeqCst);
            link = get(link) as usize;
        }
        at.set(link as u64);
        Ok(start.elapsed().as_nanos() as f64 / LINKS as f64)
    })
}

fn gpu_latency(
    setting: &Setting<'_>,
    gpu: &Gpu,
    peer: &mut Peer,
    size: u64,
    frozen: &Segment,
    mutable: &Segment,
) -> Result<(), Failure> {
    let own = with_words(gpu, &chain::new(size))?;
    let handle: Handle = peer.ask(Order::Legacy { bytes: size, chain: true })?;
    let legacy = open(gpu, &handle, size)?;
    let chains = Chases::new(gpu)?;
    for (what, segment, writing) in [
        ("latency of a dependent load, one thread", frozen, false),
        ("latency of a write, __threadfence() and a dependent load, one thread", mutable, true),
    ] {
        let shared = segment.tensor(TENSOR)?.device()?;
        for (name, memory) in [(SHARED, shared.as_slice()), (OWN, own.as_slice()), (LEGACY, legacy.as_slice())] {
            chains.check(name, memory, size)?;
        }
        let case = cases(Unit::Nanoseconds, size, what);
        let ends = [(); 3].map(|()| Cell::new(0));
        let comparison = Comparison::new(case(SHARED), chains.sampler(shared.as_slice(), &ends[0], writing))
            .floor(case(OWN), chains.sampler(own.as_slice(), &ends[1], writing))
            .rival(case(LEGACY), chains.sampler(legacy.as_slice(), &ends[2], writing));
        setting.run(comparison)?;
    }
    Ok(())
}

/// Opens memory by the handle of another process.
pub(crate) fn open(gpu: &Gpu, handle: &Handle, bytes: u64) -> Result<IpcMapping, Failure> {
    let handle = handle.as_slice().try_into().map_err(|_| unexpected("the handle has another length"))?;
    IpcMapping::open(gpu.context(), IpcMemoryHandle(handle), bytes, Access::ReadWrite).doing("opening a handle")
}

/// Follows chains with a kernel, timed by the GPU's own clock.
struct Chases<'a> {
    gpu: &'a Gpu,
    kernels: Chains,
    timer: Timer<'a>,
    /// Where the chain begins, and where it ended.
    at: DeviceBuffer,
}

impl<'a> Chases<'a> {
    fn new(gpu: &'a Gpu) -> Result<Self, Failure> {
        Ok(Self {
            gpu,
            kernels: Chains::load(gpu.context()).doing("loading kernels")?,
            timer: Timer::new(gpu).doing("making events")?,
            at: DeviceBuffer::new(gpu.context(), 8).doing("allocating memory")?,
        })
    }

    /// Follows `links` links from a word. Returns where the chain ends, and the nanoseconds of a link.
    fn follow(
        &self,
        chain: DeviceSlice<'_>,
        from: u64,
        links: u64,
        writing: bool,
    ) -> Result<(u64, f64), partywall_measure::Failure> {
        let stream = self.gpu.stream();
        stream.copy_from_host(self.at.as_slice(), &from.to_ne_bytes())?;
        let time =
            self.timer.time(|| Ok(self.kernels.enqueue(stream, chain, links, self.at.as_slice(), writing)?))?;
        let mut end = [0; 8];
        stream.copy_to_host(&mut end, self.at.as_slice())?;
        Ok((u64::from_ne_bytes(end), time.as_nanos() as f64 / links as f64))
    }

    /// Fails if the memory contains another chain than expected.
    fn check(&self, name: &str, chain: DeviceSlice<'_>, bytes: u64) -> Result<(), Failure> {
        let links = chain::links(bytes).min(1 << 16);
        let end = chain::end(bytes, links);
        match self.follow(chain, 0, links, false) {
            Ok((found, _)) if found == end => Ok(()),
            Ok((found, _)) => Err(unexpected(format!("{name}: the chain leads to word {found} and not to {end}"))),
            Err(error) => Err(super::failed(error)),
        }
    }

    fn sampler<'s>(&'s self, chain: DeviceSlice<'s>, at: &'s Cell<u64>, writing: bool) -> Sampler<'s> {
        Box::new(move || {
            let (end, time) = self.follow(chain, at.get(), LINKS, writing)?;
            at.set(end);
            Ok(time)
        })
    }
}

pub(crate) fn bandwidth(setting: &Setting<'_>) -> Result<(), Failure> {
    let mut peer = setting.peer()?;
    let sizes = setting.sizes("bandwidth", 3, 0);
    let Some(largest) = sizes.last() else { return Ok(()) };
    let rotated = setting.rotated(*largest, 3, 0);
    match &setting.gpu {
        None => {
            peer.ask::<()>(Order::Commit { name: DATA.into(), bytes: rotated, mutable: false })?;
            let segment = setting.domain.opener(DATA).open()?;
            let shared = segment.tensor(TENSOR)?.as_slice::<u64>()?;
            let own = chain::new(rotated);
            for size in sizes {
                let sampler = |words| host_reads(words, size);
                let case = cases(Unit::GigabytesPerSecond, size, "bandwidth of reading, one thread");
                let comparison = Comparison::new(case(SHARED), sampler(shared)).floor(case(OWN), sampler(&own));
                setting.run(comparison)?;
            }
        }
        Some(gpu) => {
            peer.ask::<()>(Order::Fill { name: DATA.into(), bytes: rotated })?;
            let handle: Handle = peer.ask(Order::Legacy { bytes: rotated, chain: false })?;
            let segment = setting.domain.opener(DATA).open()?;
            let shared = segment.tensor(TENSOR)?.device()?;
            let legacy = open(gpu, &handle, rotated)?;
            let own = filled(gpu, rotated)?;
            let all = [(SHARED, shared.as_slice()), (OWN, own.as_slice()), (LEGACY, legacy.as_slice())];
            let check = || -> Result<(), Failure> {
                for (name, memory) in all {
                    if gpu.kernels()?.verify(gpu.stream(), memory, 1).doing("checking memory")?.is_some() {
                        return Err(unexpected(format!("{name}: another pattern than was written")));
                    }
                }
                Ok(())
            };
            check()?;
            let timer = Timer::new(gpu).doing("making events")?;
            for size in sizes {
                let case = cases(Unit::GigabytesPerSecond, size, "bandwidth of a kernel that reads");
                let [shared, own, legacy] = all.map(|(_, memory)| timer.reads(memory, size));
                let comparison =
                    Comparison::new(case(SHARED), shared).floor(case(OWN), own).rival(case(LEGACY), legacy);
                setting.run(comparison)?;
            }
            check()?;
        }
    }
    peer.end();
    Ok(())
}

/// The segment that is read.
const DATA: &str = "data";

/// Reads one part after the other and checks the sums.
fn host_reads(words: &[u64], size: u64) -> Sampler<'_> {
    let sum = |part: &[u64]| part.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word));
    let parts: Vec<_> = words.chunks_exact((size / 8) as usize).map(|part| (part, sum(part))).collect();
    let next = RefCell::new(parts.into_iter().cycle());
    Box::new(move || {
        let mut next = next.borrow_mut();
        // A single part may take no longer than reading the clock.
        let count = ((1 << 20) / size).max(1);
        let start = Instant::now();
        for (part, expected) in next.by_ref().take(count as usize) {
            if sum(black_box(part)) != expected {
                return Err("the bytes have changed".into());
            }
        }
        Ok((count * size) as f64 / start.elapsed().as_secs_f64() / 1e9)
    })
}

/// The failure of a peer within a sample.
pub(crate) fn asked<T>(answer: Result<T, Failure>) -> Result<T, partywall_measure::Failure> {
    answer.map_err(|failure| failure.message.into())
}
