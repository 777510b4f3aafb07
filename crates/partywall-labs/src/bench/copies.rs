//! Copies: into shared memory, out of it, and within a GPU, beside the same with memory of this process alone.

use std::{cell::RefCell, hint::black_box, ops::Range};

use partywall::cuda::{DeviceBuffer, DeviceSlice, PinnedBuffer};
use partywall_measure::{Comparison, Sampler, Unit};

use super::{
    Bench, across, chain,
    memory::{ROTATED, open},
    peer::{Handle, Order, TENSOR, bytes_of},
    samplers::Timer,
};
use crate::{peer::Peer, prelude::*};

/// What is copied from or to.
const OWN: &str = "own memory";
const SHARED: &str = "a Partywall segment of another process";
const LEGACY: &str = "a legacy handle (cuIpcOpenMemHandle) of another process";

/// The segment.
const COPIED: &str = "copied";

pub(super) fn run(bench: &Bench<'_>) -> Result<(), Failure> {
    let mut peer = bench.peer()?;
    // On the host: the segment, the block, the source, and three targets. A GPU has fewer, and both processes write from the host.
    let sizes = bench.sizes("copy", 6, 5);
    match &bench.gpu {
        None => on_host(bench, &mut peer, &sizes)?,
        Some(gpu) => {
            for size in sizes {
                peer.ask::<()>(Order::Commit { name: COPIED.into(), bytes: size, mutable: true })?;
                let handle: Handle = peer.ask(Order::Legacy { bytes: size, chain: true })?;
                on_gpu(bench, gpu, &handle, size)?;
                peer.ask::<()>(Order::Free)?;
            }
        }
    }
    peer.end();
    match &bench.gpu {
        None => Ok(()),
        Some(gpu) => across::run(bench, gpu),
    }
}

/// Copies out of a frozen segment; into a block of a pool, which is what processes write. Small ones take turns among parts of
/// larger buffers.
fn on_host(bench: &Bench<'_>, peer: &mut Peer, sizes: &[u64]) -> Result<(), Failure> {
    let Some(largest) = sizes.last() else { return Ok(()) };
    let rotated = if bench.quick { *largest } else { ROTATED.max(*largest) };
    peer.ask::<()>(Order::Commit { name: COPIED.into(), bytes: rotated, mutable: false })?;
    let segment = bench.domain.opener(COPIED).open()?;
    let shared = segment.tensor(TENSOR)?.as_bytes()?;
    let words = chain::new(rotated);
    let own = bytes_of(&words);
    // Each page of a mapping is there once it has been used, which the samples shall not count.
    if shared != own {
        return Err(unexpected("the peer has written another chain"));
    }
    let pool = bench.domain.pool(COPIED_POOL).blocks(1).block_bytes(rotated).place(Place::Host).create()?;
    let mut block = pool.alloc(TIMEOUT)?;
    block.bytes_mut()?.fill(SPOILT);
    let mut targets = [(); 3].map(|()| vec![SPOILT; rotated as usize]);
    for size in sizes {
        let case = |what: &str, name: &str| bench.case(name, Unit::GigabytesPerSecond, *size).parameter("of", what);
        let [first, second, third] = &mut targets;
        let comparison = Comparison::new(case("copies out of", SHARED), copies(shared, first, own, *size))
            .floor(case("copies out of", OWN), copies(own, second, own, *size));
        bench.run("copies", comparison)?;
        let comparison = Comparison::new(case("copies into", SHARED), copies(own, block.bytes_mut()?, own, *size))
            .floor(case("copies into", OWN), copies(own, third, own, *size));
        bench.run("copies", comparison)?;
    }
    drop(block);
    bench.domain.remove(COPIED_POOL)?;
    peer.ask::<()>(Order::Free)
}

const COPIED_POOL: &str = "copied/into";

/// Copies one part of so many bytes after the other to the same place of another buffer. A sample is at least a mebibyte: less
/// would take no longer than a look at the clock.
fn copies<'a>(source: &'a [u8], to: &'a mut [u8], expected: &'a [u8], size: u64) -> Sampler<'a> {
    let size = size as usize;
    let sample = size.max(1 << 20).min(source.len());
    let mut next = 0;
    Box::new(move || {
        let at = next..next + sample;
        next = at.end % source.len();
        let (source, to, expected) = (&source[at.clone()], &mut to[at.clone()], &expected[at]);
        to.chunks_exact_mut(size).for_each(spoil);
        let start = Instant::now();
        for (part, to) in source.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
            black_box(to).copy_from_slice(black_box(part));
        }
        let elapsed = start.elapsed();
        to.chunks_exact(size).zip(expected.chunks_exact(size)).try_for_each(|(to, expected)| same(to, expected))?;
        Ok(rate(sample as u64, elapsed))
    })
}

/// Refuses other bytes. Compares the ends only, so that it takes no longer than the copy; see [`spoil`].
pub(super) fn same(bytes: &[u8], expected: &[u8]) -> Result<(), partywall_measure::Failure> {
    let differs = ends(bytes.len()).into_iter().any(|part| bytes[part.clone()] != expected[part]);
    if differs { Err("the copy differs".into()) } else { Ok(()) }
}

/// Overwrites what [`same`] compares. Without it, a copy that does nothing would find the bytes of the copy before.
fn spoil(bytes: &mut [u8]) {
    for part in ends(bytes.len()) {
        bytes[part].fill(SPOILT);
    }
}

/// No chain has such bytes: a link leads less far.
pub(super) const SPOILT: u8 = 0xFF;

fn ends(bytes: usize) -> [Range<usize>; 2] {
    let part = bytes.min(64);
    [0..part, bytes - part..bytes]
}

fn rate(size: u64, elapsed: Duration) -> f64 {
    size as f64 / elapsed.as_secs_f64() / 1e9
}

fn on_gpu(bench: &Bench<'_>, gpu: &Gpu, handle: &Handle, size: u64) -> Result<(), Failure> {
    let segment = bench.domain.opener(COPIED).read_write().open()?;
    let shared = segment.tensor(TENSOR)?.device()?;
    let legacy = open(gpu, handle, size)?;
    let words = chain::new(size);
    let device = || DeviceBuffer::new(gpu.context(), size).doing("allocating memory");
    let (own, target) = (device()?, device()?);
    gpu.stream().copy_from_host(own.as_slice(), bytes_of(&words)).doing("writing memory")?;
    let mut pinned = PinnedBuffer::new(gpu.context(), size).doing("allocating host memory")?;
    pinned.copy_from_slice(bytes_of(&words));
    let pinned = RefCell::new(pinned);
    let timer = Timer::new(gpu).doing("making events")?;
    let copy = Copies { gpu, timer: &timer, pinned: &pinned, expected: bytes_of(&words), size };
    let all = [shared.as_slice(), own.as_slice(), legacy.as_slice()];
    let case = |what: &str, name: &str| bench.case(name, Unit::GigabytesPerSecond, size).parameter("of", what);
    let what = [
        "copies from page-locked host memory into",
        "copies to page-locked host memory out of",
        "copies within the GPU out of",
    ];
    for (what, samplers) in what.into_iter().zip([
        all.map(|memory| copy.into_device(memory)),
        all.map(|memory| copy.out_of_device(memory)),
        all.map(|memory| copy.within(memory, target.as_slice())),
    ]) {
        let [ours, own, legacy] = samplers;
        let comparison =
            Comparison::new(case(what, SHARED), ours).floor(case(what, OWN), own).rival(case(what, LEGACY), legacy);
        bench.run("copies", comparison)?;
    }
    for (name, memory) in
        [SHARED, OWN, LEGACY, "the target"].into_iter().zip(all.into_iter().chain([target.as_slice()]))
    {
        copy.check(name, memory)?;
    }
    Ok(())
}

/// Copies on a GPU's stream, by its own clock. The host's side is page-locked.
#[derive(Clone, Copy)]
struct Copies<'a> {
    gpu: &'a Gpu,
    timer: &'a Timer<'a>,
    pinned: &'a RefCell<PinnedBuffer>,
    expected: &'a [u8],
    size: u64,
}

impl<'a> Copies<'a> {
    /// Overwrites device memory, so that a copy that does nothing is found.
    fn spoil(&self, memory: DeviceSlice<'_>) -> Result<(), partywall_measure::Failure> {
        Ok(self.gpu.stream().enqueue_set(memory, SPOILT)?)
    }

    /// Refuses memory that differs anywhere from what was copied into it.
    fn check(&self, name: &str, memory: DeviceSlice<'_>) -> Result<(), Failure> {
        let mut pinned = self.pinned.borrow_mut();
        spoil(&mut pinned);
        self.gpu.stream().copy_to_host(&mut pinned, memory).doing("reading memory")?;
        if **pinned == *self.expected { Ok(()) } else { Err(unexpected(&format!("{name}: a copy has changed bytes"))) }
    }

    fn into_device(self, to: DeviceSlice<'a>) -> Sampler<'a> {
        Box::new(move || {
            let mut pinned = self.pinned.borrow_mut();
            self.spoil(to)?;
            let time = self.timer.time(|| Ok(self.gpu.stream().copy_from_host(to, &pinned)?))?;
            self.gpu.stream().copy_to_host(&mut pinned, to)?;
            same(&pinned, self.expected)?;
            Ok(rate(self.size, time))
        })
    }

    fn out_of_device(self, from: DeviceSlice<'a>) -> Sampler<'a> {
        Box::new(move || {
            let mut pinned = self.pinned.borrow_mut();
            spoil(&mut pinned);
            let time = self.timer.time(|| Ok(self.gpu.stream().copy_to_host(&mut pinned, from)?))?;
            same(&pinned, self.expected)?;
            Ok(rate(self.size, time))
        })
    }

    fn within(self, from: DeviceSlice<'a>, to: DeviceSlice<'a>) -> Sampler<'a> {
        Box::new(move || {
            self.spoil(to)?;
            let time = self.timer.time(|| Ok(self.gpu.stream().enqueue_copy(to, from)?))?;
            let mut end = [0; 64];
            let at = self.size - 64;
            self.gpu.stream().copy_to_host(&mut end, to.slice(at, 64)?)?;
            same(&end, &self.expected[at as usize..])?;
            Ok(rate(self.size, time))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_that_does_nothing_is_found() {
        for bytes in [16, 64, 100, 4096] {
            let expected = vec![7; bytes];
            let mut to = expected.clone();
            assert!(same(&to, &expected).is_ok());
            spoil(&mut to);
            assert!(same(&to, &expected).is_err(), "{bytes} bytes");
        }
    }

    #[test]
    fn copies_take_turns_until_all_is_copied() {
        let source: Vec<u8> = (0..4 << 20).map(|byte: u32| byte as u8).collect();
        let mut to = vec![0; source.len()];
        let mut copy = copies(&source, &mut to, &source, 4096);
        for _ in 0..4 {
            assert!(copy().unwrap() > 0.0);
        }
        drop(copy);
        assert!(to == source);
        let (zeros, expected) = (vec![0; 4096], vec![7; 4096]);
        assert!(copies(&zeros, &mut vec![0; 4096], &expected, 4096)().is_err(), "other bytes than expected");
    }

    #[test]
    fn both_ends_are_compared() {
        let expected = vec![7; 4096];
        for place in [0, 63, 4032, 4095] {
            let mut to = expected.clone();
            to[place] = 8;
            assert!(same(&to, &expected).is_err(), "byte {place}");
        }
    }
}
