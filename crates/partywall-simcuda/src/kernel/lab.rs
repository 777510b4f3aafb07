//! The kernels of `partywall-cuda/kernels/lab.cu`. Every load and store here is one of the CPU, so its values are
//! always recent and in order. Only the loop that a compiler turns into one load loads once.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::{Kernel, aligned, for_words};
use crate::abi::{Code, DevicePtr};
use crate::memory::{self, HostRange, Want};
use crate::queue::Runner;

pub(super) static KERNELS: [Kernel; 10] = [
    Kernel {
        name: "pw_delay",
        parameters: &[8],
        run: |_, parameters| {
            std::thread::sleep(Duration::from_nanos(parameters[0]));
            Ok(())
        },
    },
    Kernel {
        name: "pw_square_roots",
        parameters: &[8, 8, 8],
        run: |runner, parameters| {
            let [from, to, n] = *parameters else { return BAD_CALL };
            square_roots(runner, from, to, n)
        },
    },
    Kernel {
        name: "pw_follow",
        parameters: &[8, 8, 8, 8],
        run: |runner, parameters| {
            let [chain, last, links, at] = *parameters else { return BAD_CALL };
            follow(runner, (chain, last), links, at, false)
        },
    },
    Kernel {
        name: "pw_follow_writing",
        parameters: &[8, 8, 8, 8],
        run: |runner, parameters| {
            let [chain, last, links, at] = *parameters else { return BAD_CALL };
            follow(runner, (chain, last), links, at, true)
        },
    },
    Kernel {
        name: "pw_poll",
        parameters: &[8, 8, 8, 8, 4, 8, 8],
        run: |runner, parameters| {
            let [word, value, started, answer, _how, limit, result] = *parameters else { return BAD_CALL };
            poll(runner, [word, started, answer, result], value, Duration::from_nanos(limit))
        },
    },
    Kernel {
        name: "pw_poll_compiled",
        parameters: &[8, 8, 8, 8, 8, 8],
        run: |runner, parameters| {
            let [word, value, started, answer, rounds, result] = *parameters else { return BAD_CALL };
            poll_compiled(runner, [word, started, answer, result], value, rounds)
        },
    },
    Kernel {
        name: "pw_store",
        parameters: &[8, 8, 8, 4, 8, 8],
        run: |runner, parameters| {
            let [word, value, answer, _how, limit, result] = *parameters else { return BAD_CALL };
            store(runner, [word, answer, result], value, Duration::from_nanos(limit))
        },
    },
    Kernel {
        name: "pw_turns",
        parameters: &[8, 8, 8, 4, 8, 8],
        run: |runner, parameters| {
            let [mine, theirs, last, follows, limit, result] = *parameters else { return BAD_CALL };
            turns(runner, [mine, theirs, result], last, follows != 0, Duration::from_nanos(limit))
        },
    },
    Kernel {
        name: "pw_write_pairs",
        parameters: &[8, 8, 8, 8, 4, 8],
        run: |runner, parameters| {
            let [data, flags, stride, pairs, _how, limit] = *parameters else { return BAD_CALL };
            let pairs = Pairs::new(runner, [data, flags], stride, pairs, Want::Write)?;
            pairs.write(Duration::from_nanos(limit))
        },
    },
    Kernel {
        name: "pw_read_pairs",
        parameters: &[8, 8, 8, 8, 4, 8, 8],
        run: |runner, parameters| {
            let [data, flags, stride, pairs, _how, limit, result] = *parameters else { return BAD_CALL };
            let pairs = Pairs::new(runner, [data, flags], stride, pairs, Want::Read)?;
            pairs.read(runner, Duration::from_nanos(limit), result)
        },
    },
];

/// A launch reads as many parameters as the kernel has.
const BAD_CALL: Result<(), Code> = Err(Code::INVALID_VALUE);

/// A word that a kernel uses.
struct LabWord(HostRange);

impl LabWord {
    fn new(runner: &Runner, address: DevicePtr, want: Want) -> Result<Self, Code> {
        aligned(address, 8)?;
        memory::access(runner.context(), address, 8, want).map(Self)
    }

    fn atomic(&self) -> Result<&AtomicU64, Code> {
        self.0.words64().first().ok_or(Code::ILLEGAL_ADDRESS)
    }

    fn load(&self) -> Result<u64, Code> {
        Ok(self.atomic()?.load(Ordering::Acquire))
    }

    fn store(&self, value: u64) -> Result<(), Code> {
        self.atomic()?.store(value, Ordering::Release);
        Ok(())
    }
}

fn report(runner: &Runner, result: DevicePtr, words: &[u64]) -> Result<(), Code> {
    for (word, address) in words.iter().zip((result..).step_by(8)) {
        LabWord::new(runner, address, Want::Write)?.store(*word)?;
    }
    Ok(())
}

/// Polls until `ready` returns true, at most for `limit`. Returns the number of polls.
fn poll_within(runner: &Runner, limit: Duration, mut ready: impl FnMut() -> Result<bool, Code>) -> Result<u64, Code> {
    let began = Instant::now();
    let mut looks = 0;
    runner.poll(|| {
        looks += 1;
        Ok(ready()? || began.elapsed() > limit)
    })?;
    Ok(looks)
}

fn square_roots(runner: &mut Runner, from: DevicePtr, to: DevicePtr, n: u64) -> Result<(), Code> {
    let range = runner.memory(from, n, 4, Want::Read)?;
    for_words(runner, to, n, Want::Write, |first, roots| {
        for (root, word) in roots.iter().zip(&range.words32()[first as usize..]) {
            root.store(f32::from_bits(word.load(Ordering::Relaxed)).sqrt().to_bits(), Ordering::Relaxed);
        }
    })
}

fn follow(
    runner: &Runner,
    (chain, last): (DevicePtr, u64),
    links: u64,
    at: DevicePtr,
    writing: bool,
) -> Result<(), Code> {
    let bytes = last.saturating_add(2).saturating_mul(8);
    let want = if writing { Want::Write } else { Want::Read };
    aligned(chain, 8)?;
    let memory = memory::access(runner.context(), chain, bytes as usize, want)?;
    let words = memory.words64();
    let place = LabWord::new(runner, at, Want::Write)?;
    let mut link = place.load()?;
    for number in 0..links {
        let Some([here, behind, ..]) = words.get(link as usize..).filter(|_| link <= last) else { break };
        if writing {
            behind.store(number, Ordering::Release);
        }
        link = here.load(Ordering::Acquire);
    }
    place.store(link)
}

fn poll(runner: &Runner, addresses: [DevicePtr; 4], value: u64, limit: Duration) -> Result<(), Code> {
    let [word, started, answer, result] = addresses;
    let began = now();
    LabWord::new(runner, started, Want::Write)?.store(value)?;
    let word = LabWord::new(runner, word, Want::Read)?;
    let mut seen = 0;
    let looks = poll_within(runner, limit, || {
        seen = if word.load()? == value { now() } else { 0 };
        Ok(seen != 0)
    })?;
    if seen != 0 {
        LabWord::new(runner, answer, Want::Write)?.store(value)?;
    }
    report(runner, result, &[looks, began, seen, now()])
}

fn poll_compiled(runner: &Runner, addresses: [DevicePtr; 4], value: u64, rounds: u64) -> Result<(), Code> {
    let [word, started, answer, result] = addresses;
    let began = now();
    let found = LabWord::new(runner, word, Want::Read)?.load()?;
    LabWord::new(runner, started, Want::Write)?.store(value)?;
    if found == value {
        LabWord::new(runner, answer, Want::Write)?.store(value)?;
        return report(runner, result, &[0, began, now(), now()]);
    }
    let mut work = began;
    for _ in 0..rounds {
        work = black_box(work.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
    report(runner, result, &[rounds, began, 0, now(), work])
}

fn store(runner: &Runner, addresses: [DevicePtr; 3], value: u64, limit: Duration) -> Result<(), Code> {
    let [word, answer, result] = addresses;
    let began = now();
    LabWord::new(runner, word, Want::Write)?.store(value)?;
    let answer = LabWord::new(runner, answer, Want::Read)?;
    let mut answered = 0;
    let looks = poll_within(runner, limit, || {
        answered = if answer.load()? == value { now() } else { 0 };
        Ok(answered != 0)
    })?;
    report(runner, result, &[looks, began, answered, now()])
}

fn turns(runner: &Runner, addresses: [DevicePtr; 3], last: u64, follows: bool, limit: Duration) -> Result<(), Code> {
    let [mine, theirs, result] = addresses;
    let mine = LabWord::new(runner, mine, Want::Write)?;
    let theirs = LabWord::new(runner, theirs, Want::Read)?;
    let mut turn = 0;
    let mut first = 0;
    if !follows {
        mine.store(1)?;
    }
    poll_within(runner, limit, || {
        while turn < last && theirs.load()? > turn {
            turn += 1;
            first = if turn == 1 { now() } else { first };
            if follows || turn < last {
                mine.store(if follows { turn } else { turn + 1 })?;
            }
        }
        Ok(turn == last)
    })?;
    report(runner, result, &[turn, first, now()])
}

/// Data words and their flags.
struct Pairs(Vec<[LabWord; 2]>);

impl Pairs {
    fn new(runner: &Runner, [data, flags]: [DevicePtr; 2], stride: u64, count: u64, want: Want) -> Result<Self, Code> {
        let word = |first: DevicePtr, index: u64| LabWord::new(runner, first + index * stride * 8, want);
        (0..count).map(|index| Ok([word(data, index)?, word(flags, index)?])).collect::<Result<_, _>>().map(Self)
    }

    fn write(&self, limit: Duration) -> Result<(), Code> {
        let began = Instant::now();
        let mut round = 0;
        while began.elapsed() <= limit {
            round += 1;
            for [data, flag] in &self.0 {
                data.store(round)?;
                flag.store(round)?;
            }
        }
        Ok(())
    }

    fn read(&self, runner: &Runner, limit: Duration, result: DevicePtr) -> Result<(), Code> {
        let began = Instant::now();
        let mut last = vec![0; self.0.len()];
        let [mut looks, mut changes, mut old, mut worst] = [0; 4];
        while began.elapsed() <= limit {
            for ([data, flag], last) in self.0.iter().zip(&mut last) {
                let seen = flag.load()?;
                let found = data.load()?;
                looks += 1;
                changes += u64::from(seen != *last);
                *last = seen;
                old += u64::from(found < seen);
                worst = worst.max(seen.saturating_sub(found));
            }
        }
        report(runner, result, &[looks, changes, old, worst])
    }
}

/// Returns the clock of the device, the same in all processes.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos() as u64
}
