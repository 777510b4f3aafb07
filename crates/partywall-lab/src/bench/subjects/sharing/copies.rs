//! Copies into shared memory, out of it, and within a GPU, compared with private memory.

use std::{
    cell::{Cell, RefCell},
    hint::black_box,
    ops::Range,
};

use partywall::cuda::PinnedBuffer;
use partywall_measure::{Comparison, Sampler, Unit};

use super::{
    Setting, across, cases, chain,
    memory::{LEGACY, OWN, SHARED, open},
    peer::{Handle, Order, TENSOR, bytes_of, with_words},
    samplers::Timer,
};
use crate::prelude::*;

/// The segment.
const COPIED: &str = "copied";

pub(crate) fn run(setting: &Setting<'_>) -> Result<(), Failure> {
    let mut peer = setting.peer()?;
    let sizes = setting.sizes("copy", BUFFERS, HOST_BUFFERS);
    if let Some(largest) = sizes.last() {
        let rotated = setting.rotated(*largest, BUFFERS, HOST_BUFFERS);
        match &setting.gpu {
            None => on_host(setting, &mut peer, &sizes, rotated)?,
            Some(gpu) => {
                peer.ask::<()>(Order::Commit { name: COPIED.into(), bytes: rotated, mutable: true })?;
                let handle: Handle = peer.ask(Order::Legacy { bytes: rotated, chain: true })?;
                on_gpu(setting, gpu, &handle, &sizes, rotated)?;
                peer.ask::<()>(Order::Free)?;
            }
        }
    }
    peer.end();
    match &setting.gpu {
        None => Ok(()),
        Some(gpu) => across::run(setting, gpu),
    }
}

/// Buffers where the memory is: on the host the segment, the block, the source, and three targets. A GPU has fewer.
const BUFFERS: u64 = 6;

/// Buffers on the host beside those of a GPU, of both processes.
const HOST_BUFFERS: u64 = 5;

/// Copies out of a frozen segment; into a block of a pool, which is what processes write.
fn on_host(setting: &Setting<'_>, peer: &mut Peer, sizes: &[u64], rotated: u64) -> Result<(), Failure> {
    peer.ask::<()>(Order::Commit { name: COPIED.into(), bytes: rotated, mutable: false })?;
    let segment = setting.domain.opener(COPIED).open()?;
    let shared = segment.tensor(TENSOR)?.as_bytes()?;
    let words = chain::new(rotated);
    let own = bytes_of(&words);
    // The kernel provides a page when it is first used. The samples must not include that.
    if shared != own {
        return Err(unexpected("the peer has written another chain"));
    }
    let pool = setting.domain.pool(COPIED_POOL).blocks(1).block_bytes(rotated).place(Place::Host).create()?;
    let mut block = pool.alloc(TIMEOUT)?;
    block.bytes_mut()?.fill(SPOILT);
    let mut targets = [(); 3].map(|()| vec![SPOILT; rotated as usize]);
    let turns = Turns::new(rotated);
    for size in sizes {
        let case = |what: &str, name: &str| cases(Unit::GigabytesPerSecond, *size, what)(name);
        let [first, second, third] = &mut targets;
        let comparison =
            Comparison::new(case("copies on the host out of", SHARED), copies(shared, first, own, *size, &turns))
                .floor(case("copies on the host out of", OWN), copies(own, second, own, *size, &turns));
        setting.run(comparison)?;
        let block = block.bytes_mut()?;
        let comparison =
            Comparison::new(case("copies on the host into", SHARED), copies(own, block, own, *size, &turns))
                .floor(case("copies on the host into", OWN), copies(own, third, own, *size, &turns));
        setting.run(comparison)?;
    }
    drop(block);
    setting.domain.remove(COPIED_POOL)?;
    peer.ask::<()>(Order::Free)
}

const COPIED_POOL: &str = "copied/into";

/// Makes the samples of a comparison take turns among the parts of buffers. All cases share it, because a part that one
/// case has just used would be in a cache for the next case.
pub(crate) struct Turns {
    bytes: u64,
    next: Cell<u64>,
}

impl Turns {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, next: Cell::new(0) }
    }

    /// Returns where the next part of this length begins. The length divides that of the buffers.
    pub(crate) fn part(&self, bytes: u64) -> u64 {
        let at = self.next.get().next_multiple_of(bytes) % self.bytes;
        self.next.set(at + bytes);
        at
    }
}

/// Copies one part after the other to the same place of another buffer. A sample is at least a mebibyte, because less
/// would take no longer than reading the clock.
fn copies<'a>(source: &'a [u8], to: &'a mut [u8], expected: &'a [u8], size: u64, turns: &'a Turns) -> Sampler<'a> {
    let size = size as usize;
    let sample = size.max(1 << 20).min(source.len());
    Box::new(move || {
        let start = turns.part(sample as u64) as usize;
        let at = start..start + sample;
        let source = &source[at.clone()];
        let to = &mut to[at.clone()];
        let expected = &expected[at];
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

/// Fails if the bytes differ. Compares only the ends, so that it takes no longer than the copy; see [`spoil`].
pub(crate) fn same(bytes: &[u8], expected: &[u8]) -> Result<(), partywall_measure::Failure> {
    let differs = ends(bytes.len()).into_iter().any(|part| bytes[part.clone()] != expected[part]);
    if differs { Err("the copy differs".into()) } else { Ok(()) }
}

/// Overwrites the bytes that [`same`] compares. Otherwise a copy that does nothing would find the bytes of an earlier
/// copy.
fn spoil(bytes: &mut [u8]) {
    for part in ends(bytes.len()) {
        bytes[part].fill(SPOILT);
    }
}

/// A byte that no chain contains, because no link leads so far.
pub(crate) const SPOILT: u8 = 0xFF;

/// Bytes at either end that are compared.
const END: usize = 64;

fn ends(bytes: usize) -> [Range<usize>; 2] {
    let part = bytes.min(END);
    [0..part, bytes - part..bytes]
}

pub(crate) fn rate(size: u64, elapsed: Duration) -> f64 {
    size as f64 / elapsed.as_secs_f64() / 1e9
}

fn on_gpu(setting: &Setting<'_>, gpu: &Gpu, handle: &Handle, sizes: &[u64], rotated: u64) -> Result<(), Failure> {
    let segment = setting.domain.opener(COPIED).read_write().open()?;
    let shared = segment.tensor(TENSOR)?.device()?;
    let legacy = open(gpu, handle, rotated)?;
    let words = chain::new(rotated);
    let own = with_words(gpu, &words)?;
    let target = with_words(gpu, &words)?;
    let mut pinned = PinnedBuffer::new(gpu.context(), rotated).doing("allocating host memory")?;
    pinned.copy_from_slice(bytes_of(&words));
    let pinned = RefCell::new(pinned);
    let timer = Timer::new(gpu).doing("making events")?;
    let all = [shared.as_slice(), own.as_slice(), legacy.as_slice()];
    let turns = Turns::new(rotated);
    for size in sizes {
        let copy =
            Copies { gpu, timer: &timer, pinned: &pinned, expected: bytes_of(&words), size: *size, turns: &turns };
        let case = |what: &str, name: &str| cases(Unit::GigabytesPerSecond, *size, what)(name);
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
            setting.run(comparison)?;
        }
    }
    let mut pinned = pinned.borrow_mut();
    for (name, memory) in
        [SHARED, OWN, LEGACY, "the target"].into_iter().zip(all.into_iter().chain([target.as_slice()]))
    {
        spoil(&mut pinned);
        gpu.stream().copy_to_host(&mut pinned, memory).doing("reading memory")?;
        if **pinned != *bytes_of(&words) {
            return Err(unexpected(format!("{name}: a copy has changed bytes")));
        }
    }
    Ok(())
}

/// Copies on a GPU's stream, timed by its own clock. The host's side is page-locked. All memory contains the expected
/// bytes beforehand.
#[derive(Clone, Copy)]
struct Copies<'a> {
    gpu: &'a Gpu,
    timer: &'a Timer<'a>,
    pinned: &'a RefCell<PinnedBuffer>,
    expected: &'a [u8],
    size: u64,
    turns: &'a Turns,
}

impl<'a> Copies<'a> {
    /// Returns where the next part of each buffer is.
    fn part(&self) -> Range<usize> {
        let at = self.turns.part(self.size) as usize;
        at..at + self.size as usize
    }

    fn into_device(self, memory: DeviceSlice<'a>) -> Sampler<'a> {
        Box::new(move || {
            let stream = self.gpu.stream();
            let part = self.part();
            let to = memory.slice(part.start as u64, self.size)?;
            spoil_on(stream, to)?;
            let pinned = self.pinned.borrow();
            let time = self.timer.time(|| Ok(stream.copy_from_host(to, &pinned[part.clone()])?))?;
            same_on(stream, to, &self.expected[part])?;
            Ok(rate(self.size, time))
        })
    }

    fn out_of_device(self, memory: DeviceSlice<'a>) -> Sampler<'a> {
        Box::new(move || {
            let part = self.part();
            let from = memory.slice(part.start as u64, self.size)?;
            let to = &mut self.pinned.borrow_mut()[part.clone()];
            spoil(to);
            let time = self.timer.time(|| Ok(self.gpu.stream().copy_to_host(to, from)?))?;
            same(to, &self.expected[part])?;
            Ok(rate(self.size, time))
        })
    }

    fn within(self, memory: DeviceSlice<'a>, target: DeviceSlice<'a>) -> Sampler<'a> {
        Box::new(move || {
            let stream = self.gpu.stream();
            let part = self.part();
            let from = memory.slice(part.start as u64, self.size)?;
            let to = target.slice(part.start as u64, self.size)?;
            spoil_on(stream, to)?;
            let time = self.timer.time(|| Ok(stream.enqueue_copy(to, from)?))?;
            same_on(stream, to, &self.expected[part])?;
            Ok(rate(self.size, time))
        })
    }
}

/// Like [`spoil`], on a GPU.
pub(crate) fn spoil_on(stream: StreamRef<'_>, memory: DeviceSlice<'_>) -> Result<(), partywall_measure::Failure> {
    for part in ends(memory.len() as usize) {
        stream.enqueue_set(memory.slice(part.start as u64, part.len() as u64)?, SPOILT)?;
    }
    Ok(())
}

/// Like [`same`], on a GPU.
pub(crate) fn same_on(
    stream: StreamRef<'_>,
    memory: DeviceSlice<'_>,
    expected: &[u8],
) -> Result<(), partywall_measure::Failure> {
    for part in ends(expected.len()) {
        let mut bytes = [0; END];
        let bytes = &mut bytes[..part.len()];
        stream.copy_to_host(bytes, memory.slice(part.start as u64, part.len() as u64)?)?;
        same(bytes, &expected[part])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 332.
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
        let turns = Turns::new(4 << 20);
        let mut copy = copies(&source, &mut to, &source, 4096, &turns);
        for _ in 0..4 {
            assert!(copy().unwrap() > 0.0);
        }
        drop(copy);
        assert!(to == source);
        let (zeros, expected) = (vec![0; 4096], vec![7; 4096]);
        let turns = Turns::new(4096);
        assert!(copies(&zeros, &mut vec![0; 4096], &expected, 4096, &turns)().is_err(), "other bytes than expected");
    }

    #[test]
    fn parts_of_any_size_are_within_the_buffers_and_take_turns() {
        let turns = Turns::new(64);
        let parts = [16, 16, 32, 64, 16, 16, 32, 32].map(|bytes| turns.part(bytes));
        assert_eq!(parts, [0, 16, 32, 0, 0, 16, 32, 0]);
    }

    // Holds 332.
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
