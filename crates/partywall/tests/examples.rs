//! The examples run, in host memory; the one in C also on the simulated GPU.
#![allow(clippy::unwrap_used)] // tests

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use partywall::{DType, Domain, Place, Result, cuda::Driver};
use partywall_harness::{World, binary, simulated_driver};
use serde_json::Value;

#[cfg(feature = "tokio")]
#[allow(dead_code, reason = "its `main` connects to the user's own domain")]
#[path = "../examples/async_queue.rs"]
mod async_queue;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/pool.rs"]
mod pool;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/square_roots.rs"]
mod square_roots;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/timeline.rs"]
mod timeline;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/topic.rs"]
mod topic;

/// Runs an example on two connections to a broker of its own.
fn runs(example: fn(&Domain, &Domain) -> Result<()>) {
    with_broker(|socket| {
        let connect = || Domain::options().socket(socket).start(false).connect().unwrap();
        example(&connect(), &connect()).unwrap();
    });
}

/// Runs a test beside a broker at a socket.
fn with_broker(test: impl FnOnce(&Path)) {
    test(World::new().socket());
}

/// Returns the command of an example, which Cargo builds with the tests of this package.
fn program(name: &str, socket: &Path) -> Command {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "there is no {}: cargo build -p partywall --examples", path.display());
    let mut command = Command::new(path);
    command.env("PARTYWALL_SOCKET", socket).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

#[test]
fn consumer_example_waits_for_its_producer() {
    with_broker(|socket| {
        let mut consumer = program("consumer", socket).spawn().unwrap();
        let mut producer = program("producer", socket).arg("host").spawn().unwrap();
        let mut line = String::new();
        BufReader::new(producer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("example@1 is there"), "{line}");
        assert!(consumer.wait().unwrap().success());
        drop(producer.stdin.take());
        assert!(producer.wait().unwrap().success());
    });
}

/// Compiles the example in C.
fn compiled(directory: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/descriptors.c");
    let text = std::fs::read_to_string(&source).unwrap();
    assert!(text.lines().count() <= 100, "an example to read at once");
    let program = directory.join("descriptors");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(source)
        .arg("-ldl");
    assert!(cc.status().unwrap().success());
    program
}

/// FNV-1a, as the example in C computes it.
fn hash(bytes: &[u8]) -> String {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}\n", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Starts the producer at a place, and returns what a command prints beside it.
fn beside_a_producer(socket: &Path, device: &str, driver: Option<&Path>, command: &mut Command) -> Output {
    let set = |command: &mut Command| _ = driver.map(|driver| command.env(Driver::LIBRARY_VARIABLE, driver));
    let mut producer = program("producer", socket);
    set(&mut producer);
    let mut producer = producer.arg(device).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(producer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("example@1 is there"), "{line}");
    set(command);
    let output = command.output().unwrap();
    drop(producer.stdin.take());
    assert!(producer.wait().unwrap().success());
    output
}

// Holds 222.
#[test]
fn program_in_c_reads_a_segment_of_host_memory_by_its_descriptors() {
    let values: Vec<u8> = (0..1024 * 1024).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    with_broker(|socket| {
        let c = compiled(socket.parent().unwrap());
        let mut command = program("descriptors", socket);
        let output = beside_a_producer(socket, "host", None, command.arg(&c).args(["example", "x"]));
        assert_eq!(String::from_utf8_lossy(&output.stdout), hash(&values), "{output:?}");

        // A tensor that is not in the first chunk.
        let domain = Domain::options().socket(socket).start(false).connect().unwrap();
        let builder = domain.create("chunks", Place::Host).chunk_bytes(4096);
        let builder = ["a", "b"].into_iter().fold(builder, |builder, name| builder.tensor(name, DType::U8, &[4096]));
        let mut build = builder.tensor("c", DType::U8, &[100]).allocate().unwrap();
        build.as_mut_bytes("c").unwrap().fill(7);
        let _segment = build.commit().unwrap();
        let output = program("descriptors", socket).arg(&c).args(["chunks", "c"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), hash(&[7; 100]), "{output:?}");

        // Descriptors that were not passed, and numbers that do not fit.
        let not_passed = Command::new(&c).args(["host", "0", "0", "1", "77:4096"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&not_passed.stderr), "descriptors: mmap: Bad file descriptor\n");
        let too_long = Command::new(&c).args(["host", "0", "4000", "97", "77:4096"]).output().unwrap();
        assert!(String::from_utf8_lossy(&too_long.stderr).contains("97 bytes at 4000 are not within a chunk of 4096"));
        assert_eq!(Command::new(&c).arg("host").status().unwrap().code(), Some(2));
    });
}

// Holds 222.
#[test]
fn program_in_c_reads_a_segment_of_a_simulated_gpu_by_its_descriptors() {
    let values: Vec<u8> = (0..1024 * 1024).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    let driver = simulated_driver();
    with_broker(|socket| {
        let c = compiled(socket.parent().unwrap());
        let mut command = program("descriptors", socket);
        let output = beside_a_producer(socket, "cuda", Some(&driver), command.arg(&c).args(["example", "x"]));
        assert_eq!(String::from_utf8_lossy(&output.stdout), hash(&values), "{output:?}");

        let other = "GPU-00000000-0000-0000-0000-000000000000";
        let words = [other, "0", "0", "1", "77:4096"];
        let elsewhere = Command::new(&c).args(words).env(Driver::LIBRARY_VARIABLE, &driver).output().unwrap();
        let said = String::from_utf8_lossy(&elsewhere.stderr).into_owned();
        assert_eq!(said, format!("descriptors: none of the 1 GPUs that this process sees is {other}\n"));
        let absent = Command::new(&c).args(words).env(Driver::LIBRARY_VARIABLE, "/nothing.so").output().unwrap();
        let said = String::from_utf8_lossy(&absent.stderr).into_owned();
        assert!(said.starts_with("descriptors: there is no CUDA driver: /nothing.so"), "{said}");
    });
}

/// The library of the simulated driver is beside Cargo's programs.
// Holds 325.
#[test]
fn program_of_the_library_finds_the_simulated_driver_by_its_name() {
    assert!(simulated_driver().exists());
    with_broker(|socket| {
        let mut show = Command::new(binary());
        show.args(["show", "example", "--json"]).env("PARTYWALL_SOCKET", socket);
        let output = beside_a_producer(socket, "cuda", Some(Path::new(Driver::SIMULATED)), &mut show);
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(shown["place"].as_str().is_some_and(|place| place.starts_with("GPU-")), "{shown}");
    });
}

#[test]
fn pipeline_of_kernels_finds_every_spot() {
    with_broker(|socket| {
        let mut pipeline = program("pipeline_gpu", socket);
        let output = pipeline.arg("40").env(Driver::LIBRARY_VARIABLE, simulated_driver()).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.starts_with("40 of 40 spots are right"), "{out}{err}");
    });
}

/// Runs an exercise, and expects parts of its output as often as they are given with.
fn exercise(name: &str, expected: &[(&str, usize)]) {
    with_broker(|socket| {
        let output = program(name, socket).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        for (part, count) in expected {
            assert_eq!(text.matches(part).count(), *count, "{part}: {text}");
        }
    });
}

#[test]
fn exercise_pattern_checks_every_number() {
    exercise("exercise_pattern", &[("262144 of 262144 numbers are right", 1), (": exit status: 0", 2)]);
}

#[test]
fn exercise_early_consumer_sees_no_half_array() {
    let expected = [
        ("the array is there: false", 2),
        ("1048576 of 1048576 bytes are written", 1),
        ("the first producer: signal: 6", 1),
        ("the second producer: exit status: 0", 1),
    ];
    exercise("exercise_early_consumer", &expected);
}

#[test]
fn exercise_ring_loses_and_tears_nothing() {
    let expected = [("40 samples received, 40 of them whole, 0 missed", 1), ("the producer: exit status: 0", 1)];
    exercise("exercise_ring", &expected);
}

#[test]
fn exercise_work_queue_does_the_task_of_a_dead_worker_again() {
    let expected = [("the first worker: signal: 6", 1), ("16 of 16 results are right, 1 of them", 1)];
    exercise("exercise_work_queue", &expected);
}

#[test]
fn exercise_crash_finds_its_weights_after_two_crashes() {
    let expected = [(": loading", 2), (": the weights are there", 1), ("every weight is right: true", 2)];
    exercise("exercise_crash", &expected);
}

#[test]
fn spans_example_puts_both_processes_on_one_time_line() {
    with_broker(|socket| {
        let path = socket.with_file_name("spans.json");
        let output = program("spans", socket).arg(&path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let events: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let pid = |of: &str| {
            let names = |event: &&Value| event["ph"] == "M" && event["args"]["name"] == of;
            &events.iter().find(names).unwrap()["pid"]
        };
        let spans = |name: &str, pid: &Value| -> Vec<(f64, f64)> {
            let of = |event: &&Value| event["name"] == name && event["pid"] == *pid;
            let times = |event: &Value| {
                assert_eq!(event["args"]["topic"], "example/spans");
                (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())
            };
            events.iter().filter(of).map(times).collect()
        };
        let published = spans("publish", pid("producer"));
        let received = spans("receive", pid("consumer"));
        // The last span finds that the producer has left.
        assert_eq!((published.len(), received.len()), (10, 11));
        for ((publish, _), (receive, waited)) in published.iter().zip(&received) {
            assert!(*publish <= receive + waited, "received before it was published: {events:?}");
        }
    });
}

#[cfg(feature = "tokio")]
#[test]
fn async_queue_example_runs_in_host_memory() {
    runs(|one, other| tokio::runtime::Runtime::new().unwrap().block_on(async_queue::run(one, other)));
}

#[test]
fn pool_example_runs_in_host_memory() {
    runs(pool::run);
}

#[test]
fn square_roots_example_runs_in_host_memory() {
    runs(square_roots::run);
}

#[test]
fn timeline_example_runs_in_host_memory() {
    runs(timeline::run);
}

#[test]
fn topic_example_runs_in_host_memory() {
    runs(topic::run);
}

#[test]
fn index_lists_each_example() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let index = std::fs::read_to_string(folder.join("README.md")).unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.ends_with(".rs") || index.contains(&format!("({name})")), "{name}");
    }
}
