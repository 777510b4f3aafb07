// Holds 14.
//! A simulated GPU loses its memory, as by a reset.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use partywall::{DType, Domain, Error, Place, Policy, Result, error::DeviceFault};
use partywall_harness::{
    ROLE, Running, Sandbox, WATCHDOG, eventually, kill,
    wire::{Client, hello, shake_hands_as},
};
use partywall_wire::{Answer, Call, ClientHello};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

/// Holds one of every kind of object on the first GPU until all are lost.
#[allow(clippy::print_stdout)] // it is how it talks to the test
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let place = Place::Gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap());
    let build = domain.create("weights", place).tensor("w", DType::U8, &[4]).kept(true).allocate().unwrap();
    let segment = build.commit().unwrap();
    let pool = domain.pool("blocks").blocks(2).block_bytes(64).place(place).create().unwrap();
    let topic = domain.topic("frames").max_bytes(64).depth(2).place(place).create().unwrap();
    let queue = domain.queue("work").tasks(4).inputs(2, 64).outputs(2, 64).place(place).create().unwrap();
    let host = domain.create("host", Place::Host).tensor("w", DType::U8, &[4]).allocate().unwrap().commit().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let receiver = std::thread::spawn(move || subscriber.recv(WATCHDOG).map(drop));
    println!("\nready");
    let is_lost = |checked: Result<()>| matches!(checked, Err(Error::DeviceFault(DeviceFault::DeviceLost { .. })));
    eventually("the loss of all", || {
        is_lost(segment.check()) && is_lost(pool.check()) && is_lost(topic.check()) && is_lost(queue.check())
    });
    host.check().unwrap();
    // The wait is over, and not because nothing came.
    let received = receiver.join().unwrap();
    assert!(!matches!(received, Ok(()) | Err(Error::Timeout { .. })), "{received:?}");
    println!("\nlost");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Two simulated GPUs, with a kept name on each of them and one in host memory.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::simulated(2);
    put_all(&sandbox);
    sandbox
}

fn put_all(sandbox: &Sandbox) {
    sandbox.file("f", "hello");
    for (name, device) in [("first", "cuda:0"), ("second", "cuda:1"), ("host", "host")] {
        sandbox.run(["put", "f", name, "--device", device]).expect(0);
    }
}

#[track_caller]
fn assert_says(output: &str, text: &str) {
    assert!(output.contains(text), "{text:?} is not in {output}");
}

#[track_caller]
fn assert_there(sandbox: &Sandbox, name: &str) {
    assert_eq!(sandbox.run(["get", name, "-"]).expect(0).stdout, b"hello");
}

#[track_caller]
fn assert_lost(sandbox: &Sandbox, name: &str) {
    let refused = sandbox.run(["get", name, "-"]).expect(6);
    assert_says(&refused.stderr, "was reset or has failed, and its memory is gone");
    assert_says(&refused.stderr, "commit the name again");
}

/// A member that can send what the library never sends.
fn member(sandbox: &Sandbox) -> Client {
    let hello = ClientHello { simulated: true, ..hello(false, None) };
    shake_hands_as(&sandbox.socket(), &hello).unwrap()
}

/// Says that the first GPU is lost. Returns whether that begins a check.
fn suspect(member: &mut Client) -> bool {
    let mut gpu = [0; 16];
    gpu[..4].copy_from_slice(&[0x51, 0x30, 0x1c, 0xa7]);
    match member.ask(Call::CheckMemory { place: partywall_wire::Place::Gpu(gpu) }) {
        Ok(Answer::MemoryCheck { runs }) => runs,
        other => panic!("{other:?}"),
    }
}

fn logged(sandbox: &Sandbox, text: &str) -> bool {
    fs::read_to_string(sandbox.log()).unwrap().contains(text)
}

/// Has every process that asks for losses hang in that, until the file is replaced.
fn hang(losses: &Path) {
    let pipe = losses.with_extension("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    fs::rename(pipe, losses).unwrap();
}

/// Returns the children that check GPUs.
fn checkers(sandbox: &Sandbox) -> Vec<u32> {
    let mut running = sandbox.processes();
    let is_checker = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(b"PARTYWALL_HANDOVER=memory "))
    };
    running.retain(is_checker);
    running
}

#[test]
fn names_of_the_lost_gpu_end_and_no_others() {
    let sandbox = sandbox();
    let mut watch = sandbox.spawn(["watch", "--json"]);
    watch.line();
    sandbox.lose_gpu(0);
    // The first process that opens it finds out.
    assert_lost(&sandbox, "first");
    assert_lost(&sandbox, "first");
    assert_there(&sandbox, "second");
    assert_there(&sandbox, "host");
    let event: Value = serde_json::from_str(&watch.line()).unwrap();
    let gpu = "GPU-51301ca7-0000-0000-0000-000000000000";
    assert_eq!((&event["event"], &event["name"], &event["gpu"]), (&json!("device_lost"), &json!("first"), &json!(gpu)));
    let names =
        sandbox.json(["ls"])["names"].as_array().unwrap().iter().map(|row| row["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names, ["host", "second"]);
    let shown = sandbox.run(["show", "first"]).expect(6);
    assert_says(&shown.stderr, "was reset or has failed");
    assert!(logged(&sandbox, "memory is lost: its names have ended"));
    // The GPU works, and the name can have another version.
    sandbox.run(["put", "f", "first", "--device", "cuda:0"]).expect(0);
    assert_there(&sandbox, "first");
}

#[test]
fn open_objects_of_every_kind_report_the_loss() {
    let sandbox = Sandbox::simulated(2);
    sandbox.broker();
    let mut program = sandbox.program(std::env::current_exe().unwrap());
    let mut holder = Running::spawn(program.args(["--exact", "role", "--nocapture"]).env(ROLE, "holder"));
    while holder.line() != "ready" {}
    sandbox.lose_gpu(0);
    // Nobody opens anything: its own context is lost, and that is reason enough to check the GPU.
    while holder.line() != "lost" {}
    let rows = sandbox.json(["ls"]);
    let lost = rows["names"].as_array().unwrap().iter().filter(|row| row["lost"] == true).map(|row| &row["name"]);
    assert_eq!(lost.collect::<Vec<_>>(), ["blocks", "frames", "weights", "work"]);
    assert_says(&sandbox.run(["ls"]).expect(0).text(), "lost");
    for name in ["weights", "blocks", "frames", "work"] {
        assert_says(&sandbox.run(["show", name]).expect(0).text(), "its memory was lost, as by a reset of its GPU");
        assert_eq!(sandbox.json(["show", name])["lost"], true);
        let opened = sandbox.run(["topic", "echo", name]).expect(6);
        assert_says(&opened.stderr, "was reset or has failed");
    }
    sandbox.run(["show", "host"]).expect(0);
    let report = sandbox.run(["doctor", "--json"]).expect(0).json();
    let broker = report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == "broker").unwrap();
    assert_eq!(broker["outcome"], "warning");
    assert_says(broker["detail"].as_str().unwrap(), "4 names have lost their memory");
    drop(holder);
}

/// A name on each NUMA node, besides those of [`sandbox`].
fn sandbox_with_nodes() -> Sandbox {
    let sandbox = sandbox();
    for (name, device) in [("on-0", "pinned:0"), ("on-1", "pinned:1")] {
        sandbox.run(["put", "f", name, "--device", device]).expect(0);
    }
    sandbox
}

// Holds 92.
#[test]
fn loss_of_a_gpu_leaves_pinned_names() {
    let sandbox = sandbox_with_nodes();
    sandbox.lose_gpu(0);
    assert_lost(&sandbox, "first");
    // Suspected, too, and checked by memory of its own.
    let mut member = member(&sandbox);
    for node in [0, 1] {
        let place = partywall_wire::Place::Pinned(node);
        assert_eq!(member.ask(Call::CheckMemory { place }), Ok(Answer::MemoryCheck { runs: true }));
        eventually("the check", || logged(&sandbox, &format!("no memory is lost there place=pinned:{node}")));
    }
    for name in ["on-0", "on-1", "second", "host"] {
        assert_there(&sandbox, name);
    }
}

// Holds 92.
#[test]
fn lost_context_has_pinned_memory_checked() {
    let sandbox = sandbox_with_nodes();
    let mut member = member(&sandbox);
    assert_eq!(member.ask(Call::ContextLost { gpu: None }), Ok(Answer::Done));
    for node in [0, 1] {
        eventually("the check", || logged(&sandbox, &format!("no memory is lost there place=pinned:{node}")));
    }
    assert_there(&sandbox, "on-0");
    sandbox.run(["put", "f", "on-0", "--device", "pinned:0"]).expect(0);
}

// Holds 92.
#[test]
fn lost_pinned_memory_ends_its_names_and_no_others() {
    let sandbox = sandbox_with_nodes();
    let mut watch = sandbox.spawn(["watch", "--json"]);
    watch.line();
    sandbox.lose_node(1);
    let refused = sandbox.run(["get", "on-1", "-"]).expect(6);
    assert_says(&refused.stderr, "its pinned memory on NUMA node 1 is gone");
    assert_says(&refused.stderr, "commit the name again");
    let event: Value = serde_json::from_str(&watch.line()).unwrap();
    let [lost, name] = [&event["event"], &event["name"]];
    assert_eq!((lost, name, &event["node"]), (&json!("device_lost"), &json!("on-1"), &json!(1)));
    for name in ["on-0", "first", "second", "host"] {
        assert_there(&sandbox, name);
    }
    sandbox.run(["put", "f", "on-1", "--device", "pinned:1"]).expect(0);
    assert_there(&sandbox, "on-1");
}

#[test]
fn lying_member_ends_nothing() {
    let sandbox = sandbox();
    let mut liar = member(&sandbox);
    assert!(suspect(&mut liar));
    eventually("the check", || logged(&sandbox, "no memory is lost there"));
    assert!(!suspect(&mut liar), "not again so soon");
    for name in ["first", "second", "host"] {
        assert_there(&sandbox, name);
    }
    // It holds nothing else on a GPU.
    assert_eq!(
        liar.ask(Call::CheckMemory { place: partywall_wire::Place::Gpu([9; 16]) }),
        Ok(Answer::MemoryCheck { runs: false })
    );
}

#[test]
fn hidden_gpu_ends_nothing() {
    let sandbox = Sandbox::simulated(2);
    let mut serve = sandbox.command(["serve", "--background"]);
    Running::spawn(serve.env("CUDA_VISIBLE_DEVICES", "1")).wait().expect(0);
    put_all(&sandbox);
    sandbox.lose_gpu(0);
    let refused = sandbox.run(["get", "first", "-"]).expect(6);
    assert_says(&refused.stderr, "cuMemImportFromShareableHandle failed");
    eventually("the check", || logged(&sandbox, "cannot be found out: no name has ended"));
    assert!(logged(&sandbox, "CUDA_VISIBLE_DEVICES=1"));
    sandbox.run(["show", "first"]).expect(0);
}

#[test]
fn check_ends_with_the_broker_that_it_runs_for() {
    let sandbox = sandbox();
    hang(&sandbox.losses());
    let mut member = member(&sandbox);
    assert!(suspect(&mut member));
    assert!(suspect(&mut member), "it runs");
    eventually("the child", || checkers(&sandbox).len() == 1);
    // The broker does not wait for it.
    sandbox.run(["ls"]).expect(0);
    let worker = sandbox.json(["status"])["pid"].as_u64().unwrap();
    kill(u32::try_from(worker).unwrap());
    eventually("its end", || checkers(&sandbox).is_empty());
    fs::remove_file(sandbox.losses()).unwrap();
    for name in ["first", "second", "host"] {
        assert_there(&sandbox, name);
    }
    sandbox.lose_gpu(0);
    assert_lost(&sandbox, "first");
    // What was found is found for good.
    let worker = sandbox.json(["status"])["pid"].as_u64().unwrap();
    kill(u32::try_from(worker).unwrap());
    assert_lost(&sandbox, "first");
    assert_there(&sandbox, "second");
}

#[test]
fn needs_minutes_check_that_hangs_is_killed() {
    let sandbox = sandbox();
    hang(&sandbox.losses());
    assert!(suspect(&mut member(&sandbox)));
    let until = Instant::now() + 2 * WATCHDOG;
    while !logged(&sandbox, "the child did not answer in time") {
        assert!(Instant::now() < until, "watchdog");
        std::thread::sleep(Duration::from_millis(100));
    }
    eventually("its end", || checkers(&sandbox).is_empty());
    fs::remove_file(sandbox.losses()).unwrap();
    assert_there(&sandbox, "first");
    // Nothing was found out, so the GPU is checked again without another suspicion.
    sandbox.lose_gpu(0);
    eventually("the next check", || logged(&sandbox, "memory is lost: its names have ended"));
    assert_lost(&sandbox, "first");
}
