//! What a call through C or C++ costs beside the same call in Rust:
//! `cargo bench -p partywall-c --profile dist --bench calls`, with `-- --iceoryx2` beside iceoryx2's C binding, too.
//!
//! Each language publishes and receives samples of 64 bytes, and takes and gives back blocks, on one thread of this
//! process, so that no wait is part of the time. They take turns of a millisecond. A row has the smallest and the
//! median time of all turns, and the median difference from Rust's turn just before. Then programs in Rust and C that
//! open a name take turns, from the start of the process to its end.
#![allow(unsafe_code)] // functions of loaded libraries
#![allow(clippy::unwrap_used, clippy::print_stdout)] // the outermost functions of a benchmark

use std::{
    env,
    ffi::c_int,
    fs,
    hint::black_box,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use libloading::{Library, Symbol};
use partywall::{DType, Domain, Place, Policy, Pool, Publisher, Result, Subscriber};
use partywall_broker::{Broker, Config};

const TURNS: usize = 2_000;
const CALLS: c_int = 2_000;
const STARTS: usize = 300;
const TIMEOUT: Duration = Duration::from_secs(10);
/// The segment that programs open; `open.c` has it, too.
const SEGMENT: &str = "calls/segment";
/// The argument with which this program opens it.
const OPEN: &str = "--open";
/// The workspace of the rival.
const RIVAL: &str = "benches/iceoryx2";

/// The nanoseconds of a sample, and of a block.
type Times = [f64; 2];

/// A language, and what measures a turn in it.
struct Language<'a> {
    name: &'static str,
    measure: Box<dyn Fn() -> Times + 'a>,
}

struct Rust {
    publisher: Publisher,
    subscriber: Subscriber,
    pool: Pool,
}

impl Rust {
    fn open(domain: &Domain) -> Result<Self> {
        let topic = domain.topic("calls/rust").max_bytes(64).open_or_create()?;
        let pool = domain.pool("calls/rust/pool").blocks(4).block_bytes(64).place(Place::Host).open_or_create()?;
        Ok(Self { publisher: topic.publisher()?, subscriber: topic.subscribe(Policy::Block).join()?, pool })
    }

    fn measure(&self) -> Times {
        let sample = each(|| {
            let mut loan = self.publisher.loan(DType::U8, &[64], TIMEOUT).unwrap();
            loan.bytes_mut().unwrap()[0] = 1;
            loan.filled().publish(TIMEOUT).unwrap();
            let sample = self.subscriber.recv(TIMEOUT).unwrap();
            black_box(sample.bytes().unwrap()[0]);
            sample.release().unwrap();
        });
        let block = each(|| self.pool.alloc(TIMEOUT).unwrap().release().unwrap());
        [sample, block]
    }
}

fn each(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

fn manifest() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of what is built with the profile of this program, such as `target/dist`.
fn built() -> PathBuf {
    env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned()
}

fn cargo(arguments: &[&str]) {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).current_dir(manifest()).args(arguments).status().unwrap();
    assert!(status.success(), "{arguments:?}");
}

/// Compiles a source of this folder against a library.
fn compile(compiler: &str, options: &[&str], source: &str, include: &Path, library: &Path, scratch: &Path) -> PathBuf {
    let result = scratch.join(source).with_extension(format!("{compiler}.out"));
    let mut command = Command::new(compiler);
    command.arg("-O2").args(options).arg("-I").arg(include).arg(manifest().join("benches").join(source)).arg(library);
    let rpath = format!("-Wl,-rpath,{}", library.parent().unwrap().display());
    assert!(command.arg(rpath).arg("-o").arg(&result).status().unwrap().success(), "{source}");
    result
}

/// Loads a library with the functions `calls_open` and `calls_measure`, and opens its objects.
fn load(name: &'static str, library: &Path) -> Language<'static> {
    // SAFETY: the library is one of this folder, and its initialisers are those of the C and C++ libraries.
    let library: &Library = Box::leak(Box::new(unsafe { Library::new(library) }.unwrap()));
    // SAFETY: calls.c, calls.cpp and iceoryx2.c have these functions.
    let (open, measure): (Symbol<'_, extern "C" fn() -> c_int>, Symbol<'_, extern "C" fn(c_int, *mut f64) -> c_int>) =
        unsafe { (library.get(b"calls_open").unwrap(), library.get(b"calls_measure").unwrap()) };
    assert_eq!(open(), 0, "{name}");
    let measure = Box::new(move || {
        let mut times = [0.0; 2];
        assert_eq!(measure(CALLS, times.as_mut_ptr()), 0, "{name}");
        times
    });
    Language { name, measure }
}

/// Builds iceoryx2's C binding, and a library that measures it.
fn rival(scratch: &Path) -> PathBuf {
    let target = built().with_file_name("iceoryx2-c");
    let workspace = format!("{RIVAL}/Cargo.toml");
    let folder = target.to_str().unwrap();
    cargo(&["build", "--release", "--locked", "--quiet", "--manifest-path", &workspace, "--target-dir", folder]);
    let release = target.join("release");
    let library = release.join("libpartywall_peer_iceoryx2_c.so");
    let include = release.join("iceoryx2-ffi-cbindgen/include");
    compile("cc", &["-shared", "-fPIC"], "iceoryx2.c", &include, &library, scratch)
}

fn sorted(times: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut times: Vec<_> = times.collect();
    times.sort_by(f64::total_cmp);
    times
}

fn compare_calls(languages: &[Language<'_>]) {
    let turns: Vec<Vec<Times>> =
        (0..TURNS).map(|_| languages.iter().map(|language| (language.measure)()).collect()).collect();
    for (row, what) in ["publish and receive, ns", "take and give back, ns"].into_iter().enumerate() {
        println!("{what:<24} {:>8} {:>8} {:>16}", "least", "median", "beyond Rust");
        for (index, language) in languages.iter().enumerate() {
            let times = sorted(turns.iter().map(|turn| turn[index][row]));
            let beyond = sorted(turns.iter().map(|turn| turn[index][row] - turn[0][row]));
            let (least, median, beyond) = (times[0], times[TURNS / 2], beyond[TURNS / 2]);
            println!("{:<24} {least:>8.1} {median:>8.1} {beyond:>16.1}", language.name);
        }
    }
}

/// Opens the segment, as `open.c` does.
fn open() -> ExitCode {
    let domain = Domain::connect().unwrap();
    let segment = domain.open(SEGMENT, TIMEOUT).unwrap();
    let tensor = segment.tensor("x").unwrap();
    ExitCode::from(tensor.as_slice::<u8>().unwrap()[0])
}

fn compare_starts(programs: &mut [(&str, Command)]) {
    let mut times = vec![Vec::new(); programs.len()];
    for _ in 0..STARTS {
        for ((name, program), times) in programs.iter_mut().zip(&mut times) {
            let start = Instant::now();
            assert!(program.status().unwrap().success(), "{name}");
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    println!("{:<24} {:>8} {:>8} {:>16}", "start, open and end, µs", "least", "median", "of Rust's median");
    let medians: Vec<_> = times.iter().map(|times| sorted(times.iter().copied())[STARTS / 2]).collect();
    for (((name, _), times), median) in programs.iter().zip(&times).zip(&medians) {
        let least = sorted(times.iter().copied())[0];
        println!("{name:<24} {least:>8.0} {median:>8.0} {:>16.2}", median / medians[0]);
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().collect();
    if arguments.iter().any(|argument| argument == OPEN) {
        return open();
    }
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("sockets/calls.sock");
    // SAFETY: this process has one thread yet.
    unsafe { env::set_var("PARTYWALL_SOCKET", &socket) };
    let broker = Broker::bind(Config::new(&socket, "calls", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    let domain = Domain::connect().unwrap();

    // By itself: Cargo leaves link-time optimisation out if the same command builds an `rlib`.
    let built = built();
    let profile = built.file_name().unwrap().to_str().unwrap();
    cargo(&["rustc", "--quiet", "--profile", profile, "--lib", "--crate-type", "cdylib,staticlib"]);
    let library = scratch.path().join("libpartywall.so");
    fs::copy(built.join("libpartywall_c.so"), &library).unwrap();
    symlink("libpartywall.so", scratch.path().join("libpartywall.so.0")).unwrap();
    let header = manifest().join("include");
    let shared = ["-shared", "-fPIC"];
    let c = compile("cc", &shared, "calls.c", &header, &library, scratch.path());
    let cpp = compile("c++", &[&shared[..], &["-std=c++17"]].concat(), "calls.cpp", &header, &library, scratch.path());

    let rust = Rust::open(&domain).unwrap();
    let rust = Language { name: "Rust", measure: Box::new(|| rust.measure()) };
    let mut languages = vec![rust, load("C", &c), load("C++", &cpp)];
    if arguments.iter().any(|argument| argument == "--iceoryx2") {
        languages.push(load("iceoryx2 in C", &rival(scratch.path())));
    }
    compare_calls(&languages);

    let segment = domain.create(SEGMENT, Place::Host).tensor("x", DType::U8, &[64]).allocate().unwrap();
    let segment = segment.commit().unwrap();
    let mut rust = Command::new(env::current_exe().unwrap());
    rust.arg(OPEN);
    let shared = Command::new(compile("cc", &[], "open.c", &header, &library, scratch.path()));
    let archive = built.join("libpartywall_c.a");
    let linked = compile("gcc", &["-pthread", "-lm", "-ldl"], "open.c", &header, &archive, scratch.path());
    compare_starts(&mut [("Rust", rust), ("C", shared), ("C, static library", Command::new(linked))]);
    drop((segment, languages, domain));
    stop.stop();
    broker.join().unwrap().unwrap();
    ExitCode::SUCCESS
}
