//! Hand-offs between streams of two processes: enqueued ahead, message by message, and to a host that waits.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use partywall::{
    DType, DeviceRange, DeviceUuid, Domain, Gpu, Place, Segment,
    cuda::{DeviceAttribute, DeviceBuffer, DeviceSlice, Event, HostRegistration, Stream, StreamRef},
};
use partywall_measure::{Case, Comparison, Failure, Unit};

use super::{
    pair::{GATE, Pair, Side, VALUE, WAKE, Way},
    wakes::wake,
};
use crate::{
    bench::{
        Bench,
        board::{Board, sleep_until, spin_until},
        mps::Mps,
        turns::store_and_wake,
    },
    broker::Broker,
    prelude::TIMEOUT,
};

/// Measures with time-slicing: the two processes take turns on the GPU, which is the default.
pub(crate) fn time_sliced(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let pair = Pair::start(bench, broker, Some((bench.gpu()?, large(bench))), None)?;
    if pair.is_under_mps() {
        return Err("an MPS daemon already serves this machine, so nothing is time-sliced".into());
    }
    measure(bench, &pair, "time-sliced")
}

/// Measures with both processes as clients of an MPS server that runs only for this subject.
pub(crate) fn under_mps(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let Some(mps) = Mps::start(bench, broker)? else { return Ok(()) };
    // Declared after the server, so that it is dropped before the server.
    let pair = Pair::start(bench, broker, Some((bench.gpu()?, large(bench))), Some(&mps))?;
    if !pair.is_under_mps() {
        return Err("the processes were started as clients of an MPS server, but are not clients".into());
    }
    measure(bench, &pair, "MPS")
}

fn measure(bench: &Bench<'_>, pair: &Pair, sharing: &str) -> Result<(), Failure> {
    let case = |what: &str| Case::new(what, Unit::Microseconds).parameter("gpu", sharing);

    let (plan, batch) = Pair::plan(bench, 200);
    let sampler = |way| pair.sampler(way, Unit::Microseconds, batch);
    let comparison = Comparison::new(case("kernel to kernel, enqueued ahead"), sampler("ahead-timeline"))
        .floor(case("the same by the driver alone"), sampler("ahead-raw"));
    bench.run(comparison, plan)?;

    let (plan, batch) = Pair::plan(bench, 2_000);
    let sampler = |way| pair.sampler(way, Unit::Microseconds, batch);
    let comparison = Comparison::new(case("kernel to kernel, an announced wake each"), sampler("message-timeline"))
        .floor(case("the same by the driver and a futex"), sampler("message-raw"));
    bench.run(comparison, plan)?;

    let (plan, batch) = Pair::plan(bench, 500);
    let sampler = |way| pair.sampler(way, Unit::Microseconds, batch);
    for (kernel, [ours, asked, floor, looking]) in [
        ("short", ["short-timeline", "short-host-function", "short-futex", "short-line"]),
        ("long", ["long-timeline", "long-host-function", "long-futex", "long-line"]),
    ] {
        let case = |what| case(what).parameter("kernel", kernel);
        let comparison = Comparison::new(case("kernel to a host that waits for its end"), sampler(ours))
            .floor(case("host sync, then a futex"), sampler(floor))
            .rival(case("host sync, then a cache line that the waiter polls"), sampler(looking))
            .rival(case("signal and wake by a host function"), sampler(asked));
        bench.run(comparison, plan)?;
    }
    for (what, ours, floor) in [
        ("host time of signal_on", "signal-on-timeline", "signal-on-raw"),
        ("host time of wait_on", "wait-on-timeline", "wait-on-raw"),
    ] {
        let comparison =
            Comparison::new(case(what), sampler(ours)).floor(case("host time of the driver's call"), sampler(floor));
        bench.run(comparison, plan)?;
    }
    Ok(())
}

/// Returns the number of bytes that the long kernel reads, which takes a quarter of a millisecond on an H200.
fn large(bench: &Bench<'_>) -> u64 {
    if bench.quick { 16 << 20 } else { 1 << 30 }
}

/// The number of words that the short kernel doubles.
pub(super) const SHORT: u64 = 32;

/// Hand-offs each way that are enqueued before the first one may begin.
const AHEAD: u64 = 64;

/// Calls in one sample. A single call would be too short: reading the clock takes a considerable part of its time.
const CALLS: u64 = 32;

/// One side's objects on the GPU.
pub(super) struct Device {
    pub(super) gpu: Arc<Gpu>,
    pub(super) stream: Stream,
    /// The board as streams access it.
    words: HostRegistration,
    /// The memory that the short kernel doubles, which both sides share.
    shared: Segment,
    /// The memory that the long kernel reads, private to this side.
    large: DeviceBuffer,
    from: Event,
    to: Event,
}

impl Device {
    pub(super) fn new(
        domain: &Domain,
        uuid: DeviceUuid,
        large: u64,
        first: bool,
        board: &Board,
    ) -> Result<Self, Failure> {
        let gpu = domain.gpu(uuid)?;
        let context = gpu.context();
        // A thread that enqueues work usually has a current context, so making it current is not measured.
        context.make_current()?;
        gpu.kernels()?;
        let shared = if first {
            let builder = domain.create(SHARED, Place::Gpu(uuid)).mutable(true).tensor(SHARED, DType::U32, &[SHORT]);
            builder.allocate()?.commit()?
        } else {
            domain.opener(SHARED).read_write().timeout(TIMEOUT).open()?
        };
        Ok(Self {
            stream: Stream::new(context)?,
            words: HostRegistration::shared(context, board.map())?,
            shared,
            large: DeviceBuffer::new(context, large)?,
            from: Event::new(context)?,
            to: Event::new(context)?,
            gpu,
        })
    }

    /// Returns whether this process is a client of an MPS server.
    pub(super) fn is_under_mps(&self) -> Result<bool, Failure> {
        Ok(self.gpu.context().device().attribute(DeviceAttribute::MPS_ENABLED)? != 0)
    }

    /// Returns the place of the GPU.
    pub(super) fn place(&self) -> Place {
        Place::Gpu(self.gpu.uuid())
    }

    pub(super) fn stream(&self) -> StreamRef<'_> {
        self.stream.as_ref()
    }

    /// Returns the memory that both sides share.
    pub(super) fn shared(&self) -> Result<DeviceRange<'_>, Failure> {
        Ok(self.shared.tensor(SHARED)?.device()?)
    }

    fn launch(&self, kernel: Kernel) -> Result<(), Failure> {
        let kernels = self.gpu.kernels()?;
        match kernel {
            Kernel::Short => {
                kernels.enqueue_double(self.stream(), self.shared()?.as_slice())?;
            }
            Kernel::Long => kernels.enqueue_read(self.stream(), self.large.as_slice())?,
        }
        Ok(())
    }

    pub(super) fn word(&self, line: usize) -> Result<DeviceSlice<'_>, Failure> {
        Ok(self.words.slice(Board::offset(line), 8)?)
    }
}

const SHARED: &str = "shared";

#[derive(Clone, Copy)]
enum Kernel {
    Short,
    Long,
}

/// The mechanism that orders the streams.
#[derive(Clone, Copy)]
enum By {
    /// Memory operations on words of the board, and futexes.
    Driver,
    Timeline,
}

/// How a host learns that a kernel is done.
#[derive(Clone, Copy)]
enum Notice {
    /// The first side waits for its stream and wakes the second.
    Futex,
    /// The first side waits for its stream and stores a word, which the second polls.
    Line,
    /// The stream signals a timeline, and the second waits for it.
    Timeline,
    /// The stream signals a timeline and has a host function wake the second.
    HostFunction,
}

pub(super) const WAYS: &[Way] = &[
    ("ahead-raw", |side, count| ahead(side, count, By::Driver)),
    ("ahead-timeline", |side, count| ahead(side, count, By::Timeline)),
    ("message-raw", |side, count| messages(side, count, By::Driver)),
    ("message-timeline", |side, count| messages(side, count, By::Timeline)),
    ("short-futex", |side, count| completed(side, count, Kernel::Short, Notice::Futex)),
    ("short-line", |side, count| completed(side, count, Kernel::Short, Notice::Line)),
    ("short-timeline", |side, count| completed(side, count, Kernel::Short, Notice::Timeline)),
    ("short-host-function", |side, count| completed(side, count, Kernel::Short, Notice::HostFunction)),
    ("long-futex", |side, count| completed(side, count, Kernel::Long, Notice::Futex)),
    ("long-line", |side, count| completed(side, count, Kernel::Long, Notice::Line)),
    ("long-timeline", |side, count| completed(side, count, Kernel::Long, Notice::Timeline)),
    ("long-host-function", |side, count| completed(side, count, Kernel::Long, Notice::HostFunction)),
    ("signal-on-raw", |side, count| signal_calls(side, count, By::Driver)),
    ("signal-on-timeline", |side, count| signal_calls(side, count, By::Timeline)),
    ("wait-on-raw", |side, count| wait_calls(side, count, By::Driver)),
    ("wait-on-timeline", |side, count| wait_calls(side, count, By::Timeline)),
];

/// Performs each operation of the ways once, so that the driver and the library have created what they create on first
/// use.
pub(super) fn warm_up(side: &Side) -> Result<(), Failure> {
    let device = side.device()?;
    device.launch(Kernel::Short)?;
    device.launch(Kernel::Long)?;
    let at = side.step();
    signal_on(side, By::Driver, at)?;
    signal_on(side, By::Timeline, at)?;
    device.stream.synchronize()?;
    wait_on(side, By::Driver, at)?;
    wait_on(side, By::Timeline, at)?;
    Ok(device.stream.synchronize()?)
}

/// Returns the nanoseconds of one hand-off by the GPU's clock: kernels of both sides in turn, all enqueued before the
/// first one may begin.
fn ahead(side: &Side, count: usize, by: By) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let gate = side.step();
        if side.first {
            device.stream().enqueue_wait_u64(device.word(GATE)?, gate)?;
            device.from.record(device.stream())?;
            for _ in 0..AHEAD {
                let at = side.step();
                device.launch(Kernel::Short)?;
                signal_on(side, by, at)?;
                wait_on(side, by, at)?;
            }
            device.to.record(device.stream())?;
            side.meet()?;
            side.board.word(GATE).store(gate, Ordering::Release);
            device.stream.synchronize()?;
            samples.push(device.to.elapsed_since(&device.from)?.as_nanos() as f64 / (2 * AHEAD) as f64);
        } else {
            for _ in 0..AHEAD {
                let at = side.step();
                wait_on(side, by, at)?;
                device.launch(Kernel::Short)?;
                signal_on(side, by, at)?;
            }
            side.meet()?;
            device.stream.synchronize()?;
        }
    }
    Ok(samples)
}

/// Returns the nanoseconds of one hand-off, half of a round trip. The first side enqueues a kernel and announces it;
/// the second side enqueues a kernel after it, and answers in the same way; then the host waits for the last kernel.
fn messages(side: &Side, count: usize, by: By) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let at = side.step();
        if side.first {
            let start = Instant::now();
            device.launch(Kernel::Short)?;
            send(side, by, at)?;
            receive(side, by, at)?;
            device.launch(Kernel::Short)?;
            device.stream.synchronize()?;
            samples.push(start.elapsed().as_nanos() as f64 / 2.0);
        } else {
            receive(side, by, at)?;
            device.launch(Kernel::Short)?;
            send(side, by, at)?;
        }
    }
    device.stream.synchronize()?;
    Ok(samples)
}

/// Returns the nanoseconds from before the first side launches a kernel until the host of the second side knows that
/// the kernel is done.
fn completed(side: &Side, count: usize, kernel: Kernel, notice: Notice) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let futex = side.board.futex(WAKE[0]);
    let line = side.board.word(VALUE[0]);
    let give = |at| {
        device.launch(kernel)?;
        match notice {
            Notice::Futex => {
                device.stream.synchronize()?;
                store_and_wake(futex, at as u32, 1);
            }
            Notice::Line => {
                device.stream.synchronize()?;
                line.store(at, Ordering::Release);
            }
            Notice::Timeline => side.ours.signal_on(device.stream(), at)?,
            Notice::HostFunction => side.ours.signal_on_and_wake(device.stream(), at)?,
        }
        Ok(())
    };
    let take = |at| {
        match notice {
            Notice::Futex => sleep_until(futex, at as u32),
            Notice::Line => spin_until(line, at),
            Notice::Timeline | Notice::HostFunction => side.theirs.wait(at, TIMEOUT)?,
        }
        Ok(())
    };
    let samples = wake(side, count, || Ok(()), give, take)?;
    device.stream.synchronize()?;
    Ok(samples)
}

/// Returns the host's nanoseconds for one signal, the mean of [`CALLS`].
fn signal_calls(side: &Side, count: usize, by: By) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let from = side.at.get();
        side.at.set(from + CALLS);
        if side.first {
            let start = Instant::now();
            for call in 1..=CALLS {
                signal_on(side, by, from + call)?;
            }
            samples.push(start.elapsed().as_nanos() as f64 / CALLS as f64);
            device.stream.synchronize()?;
        }
    }
    Ok(samples)
}

/// Returns the host's nanoseconds for enqueuing one wait, the mean of [`CALLS`].
fn wait_calls(side: &Side, count: usize, by: By) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let from = side.at.get();
        side.at.set(from + CALLS);
        if side.first {
            let start = Instant::now();
            for call in 1..=CALLS {
                wait_on(side, by, from + call)?;
            }
            samples.push(start.elapsed().as_nanos() as f64 / CALLS as f64);
            side.meet()?;
            device.stream.synchronize()?;
        } else {
            // The other side has enqueued all its signals.
            side.meet()?;
            match by {
                By::Driver => side.board.word(VALUE[1]).store(from + CALLS, Ordering::Release),
                By::Timeline => side.ours.signal(from + CALLS)?,
            }
        }
    }
    Ok(samples)
}

fn signal_on(side: &Side, by: By, at: u64) -> Result<(), Failure> {
    let device = side.device()?;
    match by {
        By::Driver => device.stream().enqueue_write_u64(device.word(side.sides(VALUE)[0])?, at)?,
        By::Timeline => side.ours.signal_on(device.stream(), at)?,
    }
    Ok(())
}

fn wait_on(side: &Side, by: By, at: u64) -> Result<(), Failure> {
    let device = side.device()?;
    match by {
        By::Driver => device.stream().enqueue_wait_u64(device.word(side.sides(VALUE)[1])?, at)?,
        By::Timeline => side.theirs.wait_on(device.stream(), at)?,
    }
    Ok(())
}

/// Enqueues a signal on the stream, and wakes the process that waits until the signal is enqueued.
fn send(side: &Side, by: By, at: u64) -> Result<(), Failure> {
    signal_on(side, by, at)?;
    if let By::Driver = by {
        store_and_wake(side.board.futex(side.sides(WAKE)[0]), at as u32, 1);
    }
    Ok(())
}

/// Sleeps until the other side has enqueued its signal, then has the stream wait for it.
fn receive(side: &Side, by: By, at: u64) -> Result<(), Failure> {
    match by {
        By::Driver => sleep_until(side.board.futex(side.sides(WAKE)[1]), at as u32),
        By::Timeline => side.theirs.wait_announced(at, TIMEOUT)?,
    }
    wait_on(side, by, at)
}
