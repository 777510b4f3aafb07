//! Messages by topics, one each way: both sides polling, both waiting, one asleep; with kernels at both ends; and many
//! messages in a row.

use std::{fs, time::Instant};

use partywall::{DType, Sample};
use partywall_measure::Failure;
use rustix::time::{ClockId, clock_gettime};

use super::{
    pair::{Side, VALUE, WAKE, Way},
    streams::SHORT,
    wakes::{exchange, wake},
};
use crate::{
    bench::{
        board::sleep_until,
        turns::{Topics, store_and_wake},
    },
    prelude::TIMEOUT,
};

pub(super) const WAYS: &[Way] = &[
    ("topic-look-1", look::<1>),
    ("topic-look-2", look::<2>),
    ("topic-look-4", look::<4>),
    ("topic-look-8", look::<8>),
    ("topic-exchange-1", wait::<1>),
    ("topic-exchange-2", wait::<2>),
    ("topic-exchange-4", wait::<4>),
    ("topic-exchange-8", wait::<8>),
    ("topic-wake-1", sleep::<1>),
    ("topic-wake-2", sleep::<2>),
    ("topic-wake-4", sleep::<4>),
    ("topic-wake-8", sleep::<8>),
    ("kernels-raw-1", kernels_raw::<1>),
    ("kernels-raw-2", kernels_raw::<2>),
    ("kernels-raw-4", kernels_raw::<4>),
    ("kernels-raw-8", kernels_raw::<8>),
    ("kernels-topic-1", kernels_topic::<1>),
    ("kernels-topic-2", kernels_topic::<2>),
    ("kernels-topic-4", kernels_topic::<4>),
    ("kernels-topic-8", kernels_topic::<8>),
    ("many-time", |side, count| many(side, count, |before, after| after.time - before.time)),
    ("many-copies", |side, count| many(side, count, |before, after| after.copies - before.copies)),
    ("many-memory", |side, count| many(side, count, |before, after| after.memory - before.memory)),
];

const BYTES: u64 = 8;

fn look<const SUBSCRIBERS: usize>(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let ends = side.ends(SUBSCRIBERS, BYTES)?;
    exchange(side, count, |at| ends.send(at), |at| ends.poll(at))
}

fn wait<const SUBSCRIBERS: usize>(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let ends = side.ends(SUBSCRIBERS, BYTES)?;
    exchange(side, count, |at| ends.send(at), |at| ends.receive(at))
}

fn sleep<const SUBSCRIBERS: usize>(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let ends = side.ends(SUBSCRIBERS, BYTES)?;
    wake(side, count, || Ok(()), |at| ends.send(at), |at| ends.receive(at))
}

/// Returns the nanoseconds of one hand-off, half of a round trip. The first side enqueues a kernel and sends a message;
/// the second side enqueues a kernel for each subscriber after it, and answers in the same way; then the host waits for
/// the last kernel. `done` releases the received samples: on the first side after the measurement, on the second after
/// the answer.
fn round_trips<T>(
    side: &Side,
    count: usize,
    send: impl Fn(u64) -> Result<(), Failure>,
    receive: impl Fn(u64) -> Result<T, Failure>,
    done: impl Fn(T) -> Result<(), Failure>,
) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let at = side.step();
        if side.first {
            let start = Instant::now();
            send(at)?;
            let received = receive(at)?;
            device.stream.synchronize()?;
            samples.push(start.elapsed().as_nanos() as f64 / 2.0);
            done(received)?;
        } else {
            let received = receive(at)?;
            send(at)?;
            done(received)?;
        }
    }
    device.stream.synchronize()?;
    Ok(samples)
}

fn kernels_raw<const SUBSCRIBERS: usize>(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let device = side.device()?;
    let kernels = device.gpu.kernels()?;
    let data = device.shared()?;
    let [(our_word, our_futex), (their_word, their_futex)] =
        side.sides([0, 1].map(|index| (VALUE[index], side.board.futex(WAKE[index]))));
    let send = |at| {
        kernels.enqueue_fill(device.stream(), data.as_slice())?;
        device.stream().enqueue_write_u64(device.word(our_word)?, at)?;
        store_and_wake(our_futex, at as u32, 1);
        Ok(())
    };
    let receive = |at| {
        sleep_until(their_futex, at as u32);
        for _ in 0..SUBSCRIBERS {
            device.stream().enqueue_wait_u64(device.word(their_word)?, at)?;
            kernels.enqueue_read(device.stream(), data.as_slice())?;
        }
        Ok(())
    };
    round_trips(side, count, send, receive, Ok)
}

fn kernels_topic<const SUBSCRIBERS: usize>(side: &Side, count: usize) -> Result<Vec<f64>, Failure> {
    let ends = side.ends(SUBSCRIBERS, SHORT * 4)?;
    round_trips(
        side,
        count,
        |_| publish_on(side, &ends, SHORT),
        |_| receive_on(side, &ends),
        |all| release_on(side, all),
    )
}

/// Publishes a message that a kernel writes.
fn publish_on(side: &Side, ends: &Topics, words: u64) -> Result<(), Failure> {
    let device = side.device()?;
    let loan = ends.publisher.loan(DType::U32, &[words], TIMEOUT)?;
    device.gpu.kernels()?.enqueue_fill(device.stream(), loan.device()?.as_slice())?;
    loan.filled().publish_on(device.stream(), TIMEOUT).map_err(|refused| refused.error)?;
    Ok(())
}

/// Receives a message by each subscriber, and has a kernel read it.
fn receive_on(side: &Side, ends: &Topics) -> Result<Vec<Sample>, Failure> {
    let device = side.device()?;
    let mut samples = Vec::with_capacity(ends.subscribers.len());
    for subscriber in &ends.subscribers {
        let sample = subscriber.recv(TIMEOUT)?;
        device.gpu.kernels()?.enqueue_read(device.stream(), sample.device_on(device.stream())?.as_slice())?;
        samples.push(sample);
    }
    Ok(samples)
}

fn release_on(side: &Side, samples: Vec<Sample>) -> Result<(), Failure> {
    let device = side.device()?;
    samples
        .into_iter()
        .try_for_each(|sample| Ok(sample.release_on(device.stream()).map_err(|refused| refused.error)?))
}

/// The resources that a process has used.
struct Used {
    /// Processor time of its threads in nanoseconds.
    time: f64,
    /// Its resident memory in bytes.
    memory: f64,
    /// Copies that it has requested from the driver.
    copies: f64,
}

impl Used {
    fn now(side: &Side) -> Result<Self, Failure> {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let pages = fs::read_to_string("/proc/self/statm")?;
        let pages: f64 = pages.split(' ').nth(1).ok_or("statm has other words")?.parse()?;
        let copies = side.device().map_or(0, |device| device.gpu.context().driver().copies());
        let time = time.tv_sec as f64 * 1e9 + time.tv_nsec as f64;
        Ok(Self { time, memory: pages * 4096.0, copies: copies as f64 })
    }
}

/// The number of messages in one sample.
const MANY: u64 = 1_000;

const LARGE: u64 = 4 << 20;

/// Returns what the first side uses for one message, the mean of a thousand messages of 4 MiB. On a GPU a kernel writes
/// all of a message; in host memory only its first word changes.
fn many(side: &Side, count: usize, used: fn(&Used, &Used) -> f64) -> Result<Vec<f64>, Failure> {
    let ends = side.ends(1, LARGE)?;
    let on_gpu = side.device().is_ok();
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let before = Used::now(side)?;
        for _ in 0..MANY {
            let at = side.step();
            match (side.first, on_gpu) {
                (true, true) => publish_on(side, &ends, LARGE / 4)?,
                (false, true) => release_on(side, receive_on(side, &ends)?)?,
                (true, false) => ends.send(at)?,
                (false, false) => ends.receive(at)?,
            }
        }
        samples.push(used(&before, &Used::now(side)?) / MANY as f64);
    }
    if let Ok(device) = side.device() {
        device.stream.synchronize()?;
    }
    Ok(samples)
}
