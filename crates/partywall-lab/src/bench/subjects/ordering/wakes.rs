//! Hand-offs between the hosts of two processes: both polling, both waiting, and one asleep.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use partywall_measure::{Case, Comparison, Failure, Unit};

use super::pair::{Pair, STAMP, Side, VALUE, WAKE, Way};
use crate::{
    bench::{
        Bench,
        board::{now, sleep_until, spin_until},
        placement::Placement,
        turns::{self, Turn, in_turn, store_and_wake},
    },
    broker::Broker,
    prelude::TIMEOUT,
};

pub(crate) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let pair = Pair::start(bench, broker, None, None)?;
    // With both on one processor, the second polls only after the first has used up its time slice.
    if pair.place(Placement::TwoProcessors)? {
        let placement = Placement::TwoProcessors;
        let (plan, batch) = Pair::plan(bench, 2_000);
        let unit = Unit::Nanoseconds;
        let comparison =
            Comparison::new(placement.of(Case::new(POLLING, unit)), pair.sampler("look-timeline", unit, batch))
                .floor(placement.of(Case::new("shared cache line", unit)), pair.sampler("look-raw", unit, batch))
                .rival(placement.of(Case::new("wait instead of polling", unit)), pair.sampler(EXCHANGE, unit, batch));
        bench.run(comparison, plan)?;
    }
    for placement in [Placement::OneProcessor, Placement::TwoProcessors, Placement::Free] {
        if !pair.place(placement)? {
            continue;
        }
        let (plan, batch) = Pair::plan(bench, 2_000);
        let case = |what: &str| placement.of(Case::new(what, Unit::Microseconds));
        let sampler = |way| pair.sampler(way, Unit::Microseconds, batch);
        let comparison =
            Comparison::new(case("hand-off of the host, signal and wait, both ways in turn"), sampler(EXCHANGE))
                .floor(case("futex, both ways in turn"), sampler("exchange-raw"))
                .rival(case("futex with a time limit"), sampler("exchange-limited"));
        bench.run(comparison, plan)?;
        let comparison = Comparison::new(case("signal to wake of a sleeper"), sampler("wake-timeline"))
            .floor(case("futex to wake of a sleeper"), sampler("wake-raw"))
            .rival(case("futex to wake of a sleeper with a time limit"), sampler("wake-limited"));
        bench.run(comparison, plan)?;
    }
    Ok(())
}

const POLLING: &str = "hand-off of the host, both polling the value";
const EXCHANGE: &str = "exchange-timeline";

/// Hand-offs in one sample. A single one would be too short: reading the clock takes as long.
const EXCHANGES: u64 = 100;

/// Longer than a waiter spins before it sleeps.
const TO_FALL_ASLEEP: Duration = Duration::from_micros(500);

pub(super) const WAYS: &[Way] = &[
    ("look-raw", |side, count| {
        let [ours, theirs] = side.sides(VALUE).map(|line| side.board.word(line));
        let give = |at| {
            ours.store(at, Ordering::Release);
            Ok(())
        };
        let take = |at| {
            spin_until(theirs, at);
            Ok(())
        };
        exchange(side, count, give, take)
    }),
    ("look-timeline", |side, count| {
        let give = |at| Ok(side.ours.signal(at)?);
        let take = |at| {
            while side.theirs.value() < at {}
            Ok(())
        };
        exchange(side, count, give, take)
    }),
    ("exchange-raw", |side, count| exchange_by_futex(side, count, sleep_until)),
    ("exchange-limited", |side, count| exchange_by_futex(side, count, sleep_until_within_limit)),
    ("exchange-timeline", |side, count| {
        let give = |at| Ok(side.ours.signal(at)?);
        let take = |at| Ok(side.theirs.wait(at, TIMEOUT)?);
        exchange(side, count, give, take)
    }),
    ("wake-raw", |side, count| wake_by_futex(side, count, sleep_until)),
    ("wake-limited", |side, count| wake_by_futex(side, count, sleep_until_within_limit)),
    ("wake-timeline", |side, count| {
        wake(side, count, || Ok(()), |at| Ok(side.ours.signal(at)?), |at| Ok(side.theirs.wait(at, TIMEOUT)?))
    }),
];

fn sleep_until_within_limit(word: &AtomicU32, value: u32) {
    turns::sleep_until(word, value);
}

fn exchange_by_futex(side: &Side, count: usize, sleep: fn(&AtomicU32, u32)) -> Result<Vec<f64>, Failure> {
    let [ours, theirs] = side.sides(WAKE).map(|line| side.board.futex(line));
    let give = |at| {
        store_and_wake(ours, at as u32, 1);
        Ok(())
    };
    let take = |at| {
        sleep(theirs, at as u32);
        Ok(())
    };
    exchange(side, count, give, take)
}

fn wake_by_futex(side: &Side, count: usize, sleep: fn(&AtomicU32, u32)) -> Result<Vec<f64>, Failure> {
    let word = side.board.futex(WAKE[0]);
    let give = |at| {
        store_and_wake(word, at as u32, 1);
        Ok(())
    };
    let take = |at| {
        sleep(word, at as u32);
        Ok(())
    };
    wake(side, count, || Ok(()), give, take)
}

/// Returns the nanoseconds of one hand-off, the mean of a hundred round trips.
pub(super) fn exchange(
    side: &Side,
    count: usize,
    give: impl Fn(u64) -> Result<(), Failure>,
    take: impl Fn(u64) -> Result<(), Failure>,
) -> Result<Vec<f64>, Failure> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let steps = (0..EXCHANGES / 2).map(|_| side.step());
        let time = in_turn(side.first, steps, |turn, at| match turn {
            Turn::Send => give(at),
            Turn::Receive => take(at),
        })?;
        samples.push(time.as_nanos() as f64 / EXCHANGES as f64);
    }
    Ok(samples)
}

/// Returns the nanoseconds from the first side's signal until the second side, which sleeps, runs again. They include
/// the second side's reading of the clock, but not what both sides do `before` a signal.
pub(super) fn wake(
    side: &Side,
    count: usize,
    before: impl Fn() -> Result<(), Failure>,
    give: impl Fn(u64) -> Result<(), Failure>,
    take: impl Fn(u64) -> Result<(), Failure>,
) -> Result<Vec<f64>, Failure> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let at = side.step();
        before()?;
        side.meet()?;
        if side.first {
            thread::sleep(TO_FALL_ASLEEP);
            let start = now();
            give(at)?;
            side.meet()?;
            samples.push(side.board.word(STAMP).load(Ordering::Acquire).saturating_sub(start) as f64);
        } else {
            take(at)?;
            side.board.word(STAMP).store(now(), Ordering::Release);
            side.meet()?;
        }
    }
    Ok(samples)
}
