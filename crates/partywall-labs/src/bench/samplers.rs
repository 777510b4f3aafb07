//! What is timed, and how: `partywall bench` and the project's own benchmarks, which have other floors, rivals and goals, use the
//! same samplers.

use std::{
    cell::Cell,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall::{
    Gpu, Pool,
    cuda::{Access, Context, CudaError, DeviceBuffer, DeviceSlice, Event, Mapping, PhysicalMemory, experiment},
};
use partywall_measure::{Failure, Sampler, Unit};

/// How long a sampler waits for what is free.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Times what is enqueued on the stream of a [`Gpu`], by the GPU's own clock.
#[derive(Debug)]
pub struct Timer<'a> {
    gpu: &'a Gpu,
    before: Event,
    after: Event,
}

impl<'a> Timer<'a> {
    /// Makes two events.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(gpu: &'a Gpu) -> Result<Self, CudaError> {
        Ok(Self { gpu, before: Event::new(gpu.context())?, after: Event::new(gpu.context())? })
    }

    /// Returns how long that takes which `enqueue` enqueues.
    ///
    /// # Errors
    /// Those of `enqueue`, and the driver's.
    pub fn time(&self, enqueue: impl FnOnce() -> Result<(), Failure>) -> Result<Duration, Failure> {
        let stream = self.gpu.stream();
        self.before.record(stream)?;
        enqueue()?;
        self.after.record(stream)?;
        self.after.synchronize()?;
        Ok(self.after.elapsed_since(&self.before)?)
    }

    /// Returns GB/s of a kernel that reads one part of so many bytes after the other.
    pub fn reads<'s>(&'s self, memory: DeviceSlice<'s>, size: u64) -> Sampler<'s> {
        let parts = memory.len() / size;
        let next = Cell::new(0);
        Box::new(move || {
            let part = memory.slice(next.get() % parts * size, size)?;
            next.set(next.get() + 1);
            let time = self.time(|| Ok(self.gpu.kernels()?.enqueue_read(self.gpu.stream(), part)?))?;
            Ok(size as f64 / time.as_secs_f64() / 1e9)
        })
    }
}

/// What of an attachment is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// Until it can be used.
    Opening,
    /// Until it is given back.
    Closing,
}

impl Half {
    /// Returns microseconds of this half. `open` returns what `close` ends; `check` looks at it between the two.
    pub fn sampler<'a, T>(
        self,
        open: impl Fn() -> Result<T, Failure> + 'a,
        check: impl Fn(&T) -> Result<(), Failure> + 'a,
        close: impl Fn(T) -> Result<(), Failure> + 'a,
    ) -> Sampler<'a> {
        Box::new(move || {
            let start = Instant::now();
            let opened = open()?;
            let opening = start.elapsed();
            check(&opened)?;
            let start = Instant::now();
            close(opened)?;
            let closing = start.elapsed();
            let half = match self {
                Self::Opening => opening,
                Self::Closing => closing,
            };
            Ok(half.as_secs_f64() * 1e6)
        })
    }

    /// Returns microseconds of this half, of memory that others have exported: what the driver takes for it. Each file has so many
    /// bytes, and stays open.
    pub fn of_the_driver<'a>(self, context: &'a Context, files: &'a [(u64, OwnedFd)]) -> Sampler<'a> {
        let map = |(bytes, file): &(u64, OwnedFd)| {
            Mapping::new(PhysicalMemory::import(context, file.as_fd(), *bytes)?, Access::ReadOnly)
        };
        self.sampler(
            move || Ok(files.iter().map(map).collect::<Result<Vec<_>, _>>()?),
            |_| Ok(()),
            |mappings| Ok(mappings.into_iter().try_for_each(Mapping::close)?),
        )
    }
}

/// Returns the time of one pair of calls in `unit`, in the mean of `count`: one alone would take no longer than a look at the clock.
pub fn pairs<'a>(unit: Unit, count: u32, mut pair: impl FnMut() -> Result<(), Failure> + 'a) -> Sampler<'a> {
    Box::new(move || {
        let start = Instant::now();
        for _ in 0..count {
            pair()?;
        }
        let time = unit.of_duration(start.elapsed()).ok_or_else(|| format!("{unit} is not a unit of time"))?;
        Ok(time / f64::from(count))
    })
}

/// Takes a block of a pool and gives it back.
///
/// # Errors
/// No block was free in time.
pub fn block(pool: &Pool) -> Result<(), Failure> {
    Ok(pool.alloc(TIMEOUT)?.release()?)
}

/// Allocates memory and frees it in the order of a stream: `cuMemAllocAsync`, `cuMemFreeAsync`. The context is current.
///
/// # Errors
/// The driver's.
pub fn allocation_in_order(gpu: &Gpu, bytes: u64) -> Result<(), Failure> {
    Ok(experiment::allocate_and_free_on(gpu.stream(), bytes as usize)?)
}

/// Allocates memory and frees it: `cuMemAlloc`, `cuMemFree`.
///
/// # Errors
/// The driver's.
pub fn allocation(gpu: &Gpu, bytes: u64) -> Result<(), Failure> {
    Ok(DeviceBuffer::new(gpu.context(), bytes).map(drop)?)
}

/// Allocates memory of this process alone by the system's allocator, writes a byte of each page, and frees it. Without a byte
/// written there would be no memory.
///
/// # Errors
/// None.
pub fn touched(bytes: u64) -> Result<(), Failure> {
    let mut memory = Vec::<u8>::with_capacity(bytes as usize);
    let pages = memory.spare_capacity_mut().iter_mut().step_by(4096);
    pages.for_each(|byte| {
        byte.write(1);
    });
    std::hint::black_box(&memory);
    Ok(())
}
