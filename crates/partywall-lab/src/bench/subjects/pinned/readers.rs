//! What is read fastest: kernels and the CPU read pinned memory, a memfd, and memory of the GPU, in
//! place and by a copy.

use std::{cell::Cell, hint::black_box, time::Instant};

use partywall::{
    Access, Place,
    cuda::{DeviceBuffer, DeviceSlice, PinnedBuffer},
};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use super::{Setting, rate};
use crate::{
    bench::{Bench, samplers::Timer, size, subjects::gpu_open},
    broker::Broker,
};

const TENSOR: &str = "tensor.0";

/// Sizes that are read at once, as parts of a unit of the setting, in which successive samples read successive parts.
const PARTS: [u64; 3] = [1024, 16, 1];

pub(crate) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let setting = Setting::new(bench, broker)?;
    let Setting { domain, gpu, unit, .. } = &setting;
    let unit = *unit;
    // Pinned memory, two memfds, private memory, and a page-locked buffer.
    if !setting.fits(bench, "readers", 5 * unit) {
        return Ok(());
    }
    gpu_open::commit(bench, broker, "pinned", setting.place(), 1, unit)?;
    let pinned = domain.opener("pinned").device(gpu.uuid()).access(Access::Both).open()?;
    let private = pinned.tensor(TENSOR)?.to_vec()?;
    let mut build = domain.create("memfd", Place::Host).like(&pinned).allocate()?;
    build.as_mut_bytes(TENSOR)?.copy_from_slice(&private);
    let memfd = build.commit()?;
    // Another memfd for kernels: not every GPU can register a frozen one.
    let mutable = domain.create("registered", Place::Host).like(&pinned).mutable(true).allocate()?.commit()?;
    let registered = mutable.pin(gpu)?;
    let local = DeviceBuffer::new(gpu.context(), unit)?;
    for memory in [registered.device(TENSOR)?.as_slice(), local.as_slice()] {
        gpu.kernels()?.enqueue_fill(gpu.stream(), memory)?;
    }
    gpu.stream().synchronize()?;

    let by_gpu = [pinned.tensor(TENSOR)?.device()?.as_slice(), registered.device(TENSOR)?.as_slice(), local.as_slice()];
    for memory in by_gpu {
        if gpu.kernels()?.verify(gpu.stream(), memory, 1)?.is_some() {
            return Err("a memory has other contents than were written".into());
        }
    }
    let [pinned_on_gpu, registered_on_gpu, _] = by_gpu;
    let copy = DeviceBuffer::new(gpu.context(), unit)?;
    let timer = Timer::new(gpu)?;
    for parts in PARTS {
        let bytes = unit / parts;
        let case = |memory: &str| {
            Case::new(format!("a kernel reads {memory}"), Unit::GigabytesPerSecond).parameter("size", size(bytes))
        };
        let next = part_after_part(parts);
        let copied: Sampler<'_> = Box::new(|| {
            let from = pinned_on_gpu.slice(next() * bytes, bytes)?;
            let to = copy.slice(0, bytes)?;
            let time = timer.time(|| {
                gpu.stream().enqueue_copy(to, from)?;
                Ok(gpu.kernels()?.enqueue_read(gpu.stream(), to)?)
            })?;
            Ok(rate(bytes, time))
        });
        let comparison = Comparison::new(case("pinned memory over the bus"), timer.reads(pinned_on_gpu, bytes))
            .floor(case("memory of the GPU"), timer.reads(local.as_slice(), bytes))
            .rival(case("a registered memfd over the bus"), timer.reads(registered_on_gpu, bytes))
            .rival(case("pinned memory after a copy to the GPU"), copied);
        let plan = bench.plan(30);
        bench.run(comparison, plan)?;
    }

    let by_cpu = [pinned.tensor(TENSOR)?.as_bytes()?, memfd.tensor(TENSOR)?.as_bytes()?, &private];
    let mut page_locked = PinnedBuffer::new(gpu.context(), unit)?;
    for parts in PARTS {
        let bytes = unit / parts;
        let case = |memory: &str| {
            Case::new(format!("the CPU reads {memory}, one thread"), Unit::GigabytesPerSecond)
                .parameter("size", size(bytes))
        };
        let [pinned, memfd, private] = by_cpu.map(|memory| reads(memory, parts));
        let copied = reads_by_copy(&setting, local.as_slice(), &mut page_locked, parts);
        let comparison = Comparison::new(case("pinned memory"), pinned)
            .floor(case("private memory"), private)
            .rival(case("a memfd"), memfd)
            .rival(case("memory of the GPU after a copy to the host"), copied);
        let plan = bench.plan(30);
        bench.run(comparison, plan)?;
    }
    Ok(())
}

/// Returns a sampler of the GB/s at which one thread reads one part after the other.
fn reads(memory: &[u8], parts: u64) -> Sampler<'_> {
    let next = part_after_part(parts);
    let bytes = memory.len() / parts as usize;
    Box::new(move || {
        let part = &memory[next() as usize * bytes..][..bytes];
        let start = Instant::now();
        black_box(sum(black_box(part)));
        Ok(rate(bytes as u64, start.elapsed()))
    })
}

/// Returns a sampler as [`reads`] does, of memory of the GPU: each part is first copied into page-locked memory.
fn reads_by_copy<'a>(
    setting: &'a Setting,
    memory: DeviceSlice<'a>,
    page_locked: &'a mut PinnedBuffer,
    parts: u64,
) -> Sampler<'a> {
    let next = part_after_part(parts);
    let bytes = setting.unit / parts;
    Box::new(move || {
        let part = memory.slice(next() * bytes, bytes)?;
        let buffer = &mut page_locked[..bytes as usize];
        let start = Instant::now();
        setting.gpu.stream().copy_to_host(buffer, part)?;
        black_box(sum(buffer));
        Ok(rate(bytes, start.elapsed()))
    })
}

fn sum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks();
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

/// Returns a function that returns the numbers below `parts`, again and again: no cache contains the part that follows.
fn part_after_part(parts: u64) -> impl Fn() -> u64 {
    let next = Cell::new(0);
    move || next.replace((next.get() + 1) % parts)
}
