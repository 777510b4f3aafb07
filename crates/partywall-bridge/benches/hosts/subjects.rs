//! What is measured.

use std::{cell::RefCell, fs, net::TcpStream, process::Command, thread};

use partywall::{DType, Place};
use partywall_harness::{Running, Signal, eventually, noise};
use partywall_measure::{Case, Comparison, Failure, Unit};
use partywall_os::clock::monotonic_ns;

use crate::{
    Bench, case,
    pair::{Pair, Stream},
    rate,
    raw_tcp::Connection,
    raw_zenoh::{Peers, Settings},
    sampler,
};

type Measure = fn(&mut Bench) -> Result<(), Failure>;

/// The subjects, in their order.
pub(super) const SUBJECTS: [(&str, Measure); 4] =
    [("latency", latency), ("rate", rates), ("pull", pull), ("gone", gone)];

/// From publish at one host until a subscriber at the other has the sample.
fn latency(bench: &mut Bench) -> Result<(), Failure> {
    let pair = Pair::new();
    for (bytes, samples) in [(1 << 10, 1000), (64 << 10, 1000), (1 << 20, 300), (12_000_000, 50), (100_000_000, 20)] {
        let unit = Unit::Microseconds;
        let comparison = beside(bench, &pair, bytes, 1, unit, |nanoseconds| nanoseconds as f64 / 1e3)?;
        comparison.run(bench, "latency", "publish until received", samples)?;
    }
    Ok(())
}

/// Samples that are published one right after the other.
fn rates(bench: &mut Bench) -> Result<(), Failure> {
    let pair = Pair::new();
    for (bytes, count, samples) in [(1 << 10, 20_000, 20), (1 << 20, 400, 20), (100_000_000, 6, 10)] {
        let (unit, of) = rate(bytes, count);
        let comparison = beside(bench, &pair, bytes, count, unit, of)?;
        comparison.run(bench, "rate", "samples one after the other", samples)?;
    }
    Ok(())
}

/// A stream of ours, and the same bytes by other ways.
struct Beside<F> {
    stream: Stream,
    tcp: Connection,
    zenoh: Peers,
    /// Absent if what it loses makes its times meaningless.
    default: Option<Peers>,
    bytes: usize,
    count: usize,
    unit: Unit,
    of: F,
}

fn beside<F: Fn(u64) -> f64 + Copy>(
    bench: &mut Bench,
    pair: &Pair,
    bytes: usize,
    count: usize,
    unit: Unit,
    of: F,
) -> Result<Beside<F>, Failure> {
    let mut default = Peers::new(&pair.switch, Settings::Default, bytes);
    let arriving = (0..TRIES).map(|_| default.arriving(count)).sum::<usize>();
    let loses = arriving < TRIES * count;
    if loses {
        let all = TRIES * count;
        bench.report.note(format!("zenoh's defaults: {arriving} of {all} messages of {bytes} bytes arrive"));
    }
    Ok(Beside {
        stream: pair.stream(bytes)?,
        tcp: Connection::new(&pair.switch, bytes)?,
        zenoh: Peers::new(&pair.switch, Settings::Bridge, bytes),
        // Larger ones arrive at times only.
        default: (!loses && bytes <= 1 << 20).then_some(default),
        bytes,
        count,
        unit,
        of,
    })
}

impl<F: Fn(u64) -> f64 + Copy> Beside<F> {
    fn run(mut self, bench: &mut Bench, subject: &str, name: &str, samples: usize) -> Result<(), Failure> {
        let Self { stream, tcp, zenoh, default, bytes, count, unit, of } = &mut self;
        let (bytes, count, unit, of) = (*bytes, *count, *unit, *of);
        let ours = sampler(|| {
            thread::scope(|scope| {
                let publishing = scope.spawn(|| stream.publish(count));
                let ended = stream.receive(count)?;
                Ok(of(ended - publishing.join().unwrap()?))
            })
        });
        let mut comparison = Comparison::new(case(name, unit, bytes), ours);
        comparison = comparison.floor(case("TCP", unit, bytes), sampler(|| Ok(of(tcp.send(count)?))));
        comparison = comparison.rival(case("zenoh", unit, bytes), sampler(|| Ok(of(zenoh.send(count)?))));
        if let Some(default) = default {
            let sampler = sampler(|| Ok(of(default.send(count)?)));
            comparison = comparison.rival(case("zenoh, its defaults", unit, bytes), sampler);
        }
        bench.run(subject, comparison, samples)
    }
}

/// How often it is tried whether zenoh's defaults lose messages.
const TRIES: usize = 5;

/// A segment that is pulled into fresh host memory, from the start of the command to its end.
fn pull(bench: &mut Bench) -> Result<(), Failure> {
    const BYTES: usize = 1 << 30;
    let pair = Pair::new();
    let content = noise(BYTES, 1);
    let domain = pair.a.domain_of_running();
    let mut build = domain.create("llm", Place::Host).tensor("w", DType::U8, &[BYTES as u64]).allocate()?;
    build.as_mut_bytes("w")?.copy_from_slice(&content);
    let _segment = build.commit()?;
    let file = pair.a.file("module/content", &content);
    drop(content);
    // The origin hashes the version once, when it is first asked for it.
    eventually("the version is known", || pair.spawn(1, &["show", "//a/llm"]).wait().code == Some(0));
    let of = |nanoseconds: u64| BYTES as f64 / nanoseconds as f64;
    let timed = |running: Running, began: u64| -> Result<f64, Failure> {
        let ended = running.wait();
        let taken = monotonic_ns() - began;
        match ended.code {
            Some(0) => Ok(of(taken)),
            _ => Err(ended.text().into()),
        }
    };
    let ours = sampler(|| {
        let began = monotonic_ns();
        let taken = timed(pair.spawn(1, &["pull", "//a/llm", "--device", "host"]), began)?;
        pair.b.run(["rm", "llm"]).expect(0);
        Ok(taken)
    });
    let mut tcp = Connection::new(&pair.switch, BYTES)?;
    let unit = Unit::GigabytesPerSecond;
    let mut comparison = Comparison::new(case("pull", unit, BYTES), ours);
    comparison =
        comparison.floor(case("TCP into a fresh memfd", unit, BYTES), sampler(|| Ok(of(tcp.send_into_fresh_file()?))));
    let has_rsync = Command::new("rsync").arg("--version").output().is_ok();
    let served = has_rsync.then(|| {
        let folder = file.parent().unwrap().display();
        let config = pair.a.file("rsyncd.conf", format!("use chroot = no\nuid = root\n[m]\npath = {folder}\n"));
        let mut command = Command::new("rsync");
        command.args(["--daemon", "--no-detach", "--port", "7600", "--config"]).arg(config);
        let daemon = pair.switch.hosts()[0].run(|| Running::spawn(&mut command));
        let connect = || pair.switch.hosts()[1].run(|| TcpStream::connect((pair.switch.hosts()[0].address(), 7600)));
        eventually("rsync listens", || connect().is_ok());
        daemon
    });
    match &served {
        Some(_) => {
            let sampler = sampler(|| {
                let from = format!("rsync://{}:7600/m/content", pair.switch.hosts()[0].address());
                let to = pair.b.path().join("content");
                let began = monotonic_ns();
                let mut command = Command::new("rsync");
                let copying =
                    pair.switch.hosts()[1].run(|| Running::spawn(command.arg("--whole-file").arg(from).arg(&to)));
                let taken = timed(copying, began)?;
                fs::remove_file(to)?;
                Ok(taken)
            });
            comparison = comparison.rival(case("rsync", unit, BYTES), sampler);
        }
        None => bench.report.note("rsync is not installed here"),
    }
    let done = bench.run("pull", comparison, 12);
    drop(served);
    done
}

/// From the end or the stop of a bridge until the other one says that the host is unreachable.
fn gone(bench: &mut Bench) -> Result<(), Failure> {
    let pair = RefCell::new(Pair::new());
    let unit = Unit::Milliseconds;
    let await_line = |pair: &mut Pair, part: &str| {
        while !pair.said().contains(part) {}
        monotonic_ns()
    };
    let noticed = |signal: Signal| {
        let mut pair = pair.borrow_mut();
        let bridge = pair.take_bridge();
        let began = monotonic_ns();
        bridge.signal(signal);
        let noticed = await_line(&mut pair, "//a is unreachable");
        bridge.kill();
        pair.put_bridge();
        await_line(&mut pair, "//a is there");
        Ok((noticed - began) as f64 / 1e6)
    };
    let killed = Comparison::new(Case::new("a killed bridge is noticed", unit), sampler(|| noticed(Signal::KILL)));
    bench.run("killed", killed, 20)?;
    let stopped = Comparison::new(Case::new("a stopped bridge is noticed", unit), sampler(|| noticed(Signal::STOP)));
    bench.run("stopped", stopped, 10)
}
