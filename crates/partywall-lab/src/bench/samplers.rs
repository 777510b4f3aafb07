//! Samplers that several subjects use. Their floors, rivals and goals differ.

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

/// How long a sampler waits for a free block.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Times work on the stream of a [`Gpu`] by the GPU's own clock.
#[derive(Debug)]
pub(crate) struct Timer<'a> {
    gpu: &'a Gpu,
    before: Event,
    after: Event,
}

impl<'a> Timer<'a> {
    /// Creates two events.
    ///
    /// # Errors
    /// The driver refuses.
    pub(crate) fn new(gpu: &'a Gpu) -> Result<Self, CudaError> {
        Ok(Self { gpu, before: Event::new(gpu.context())?, after: Event::new(gpu.context())? })
    }

    /// Returns how long the work that `enqueue` enqueues takes.
    ///
    /// # Errors
    /// `enqueue` fails, or the driver refuses.
    pub(crate) fn time(&self, enqueue: impl FnOnce() -> Result<(), Failure>) -> Result<Duration, Failure> {
        let stream = self.gpu.stream();
        self.before.record(stream)?;
        enqueue()?;
        self.after.record(stream)?;
        self.after.synchronize()?;
        Ok(self.after.elapsed_since(&self.before)?)
    }

    /// Returns a sampler of the GB/s of a kernel that reads one part of `size` bytes after the other.
    pub(crate) fn reads<'s>(&'s self, memory: DeviceSlice<'s>, size: u64) -> Sampler<'s> {
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

/// The half of an attachment that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// Until the memory can be used.
    Opening,
    /// Until the memory is given back.
    Closing,
}

impl Half {
    /// Returns a sampler of the microseconds of this half. `open` returns a value, which `check` checks and `close`
    /// closes.
    pub(crate) fn sampler<'a, T>(
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

    /// Returns a sampler of the microseconds that the driver alone takes for this half, with memory that another
    /// process has exported. Each file comes with its number of bytes, and stays open.
    pub(crate) fn of_the_driver<'a>(self, context: &'a Context, files: &'a [(u64, OwnedFd)]) -> Sampler<'a> {
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

/// Returns a sampler of the time of one pair of calls in `unit`, the mean of `count`: a single pair would take no
/// longer than reading the clock.
pub(crate) fn pairs<'a>(unit: Unit, count: u32, mut pair: impl FnMut() -> Result<(), Failure> + 'a) -> Sampler<'a> {
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
pub(crate) fn block(pool: &Pool) -> Result<(), Failure> {
    Ok(pool.alloc(TIMEOUT)?.release()?)
}

/// Allocates memory and frees it in the order of a stream: `cuMemAllocAsync`, `cuMemFreeAsync`. The context is current.
///
/// # Errors
/// The driver refuses.
pub(crate) fn allocation_in_order(gpu: &Gpu, bytes: u64) -> Result<(), Failure> {
    Ok(experiment::allocate_and_free_on(gpu.stream(), bytes as usize)?)
}

/// Allocates memory and frees it: `cuMemAlloc`, `cuMemFree`.
///
/// # Errors
/// The driver refuses.
pub(crate) fn allocation(gpu: &Gpu, bytes: u64) -> Result<(), Failure> {
    Ok(DeviceBuffer::new(gpu.context(), bytes).map(drop)?)
}

/// Allocates private memory from the system's allocator, writes a byte of each page, and frees it. The kernel provides
/// a page only once it is written.
///
/// # Errors
/// None.
pub(crate) fn touched(bytes: u64) -> Result<(), Failure> {
    let mut memory = Vec::<u8>::with_capacity(bytes as usize);
    let pages = memory.spare_capacity_mut().iter_mut().step_by(4096);
    pages.for_each(|byte| {
        byte.write(1);
    });
    std::hint::black_box(&memory);
    Ok(())
}
