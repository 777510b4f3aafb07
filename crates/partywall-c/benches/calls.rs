//! What a call through C or C++ costs beside the same call in Rust: `cargo bench -p partywall-c --bench calls`.
//!
//! Each language publishes and receives samples of 64 bytes, and takes and gives back blocks, on one thread, so that no
//! wait is part of the time. The programs take turns; a row has the smallest and the median time of all rounds.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // the outermost functions of a benchmark

use std::{env, hint::black_box, path::Path, process::Command, time::Duration, time::Instant};

use partywall::{DType, Domain, Place, Policy};
use partywall_broker::{Broker, Config};

const ROUNDS: usize = 15;
const CALLS: u32 = 200_000;
const TIMEOUT: Duration = Duration::from_secs(10);

/// The nanoseconds of a sample, and of a block.
type Times = [f64; 2];

fn rust(domain: &Domain) -> Times {
    let topic = domain.topic("calls/rust").max_bytes(64).open_or_create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscribe(Policy::Block).join().unwrap();
    let sample = each(|| {
        let mut loan = publisher.loan(DType::U8, &[64], TIMEOUT).unwrap();
        loan.bytes_mut().unwrap()[0] = 1;
        loan.filled().publish(TIMEOUT).unwrap();
        let sample = subscriber.recv(TIMEOUT).unwrap();
        black_box(sample.bytes().unwrap()[0]);
    });
    let pool = domain.pool("calls/rust/pool").blocks(4).block_bytes(64).place(Place::Host).open_or_create().unwrap();
    let block = each(|| drop(black_box(pool.alloc(TIMEOUT).unwrap())));
    [sample, block]
}

fn each(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

/// Compiles a program against the library beside this one.
fn compile(compiler: &str, source: &str, scratch: &Path) -> Command {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = scratch.join(source);
    let soname = scratch.join("libpartywall.so.0");
    if !soname.exists() {
        std::os::unix::fs::symlink(libraries.join("libpartywall_c.so"), soname).unwrap();
    }
    let compiled = Command::new(compiler)
        .args(["-O2", "-I"])
        .arg(manifest.join("include"))
        .arg(manifest.join("benches").join(source))
        .arg(libraries.join("libpartywall_c.so"))
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(compiled.success());
    let mut command = Command::new(program);
    command.arg(CALLS.to_string()).env("LD_LIBRARY_PATH", scratch);
    command
}

fn run(command: &mut Command) -> Times {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut times = text.split_whitespace().map(|time| time.parse().unwrap());
    [times.next().unwrap(), times.next().unwrap()]
}

fn main() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("sockets/calls.sock");
    let broker = Broker::bind(Config::new(&socket, "calls", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    let domain = Domain::options().socket(&socket).start(false).connect().unwrap();
    let mut c = compile("cc", "calls.c", scratch.path());
    let mut cpp = compile("c++", "calls.cpp", scratch.path());
    let mut times: [Vec<Times>; 3] = Default::default();
    for _ in 0..ROUNDS {
        times[0].push(rust(&domain));
        times[1].push(run(c.env("PARTYWALL_SOCKET", &socket)));
        times[2].push(run(cpp.env("PARTYWALL_SOCKET", &socket)));
    }
    println!("{:<8} {:>24} {:>24}", "", "publish and receive, ns", "take and give back, ns");
    for (language, times) in ["Rust", "C", "C++"].into_iter().zip(times) {
        let of = |n: usize| {
            let mut of: Vec<f64> = times.iter().map(|times| times[n]).collect();
            of.sort_by(f64::total_cmp);
            format!("{:.1} (median {:.1})", of[0], of[of.len() / 2])
        };
        println!("{language:<8} {:>24} {:>24}", of(0), of(1));
    }
    drop(domain);
    stop.stop();
    broker.join().unwrap().unwrap();
}
