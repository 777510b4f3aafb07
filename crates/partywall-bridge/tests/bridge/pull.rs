//! Segments that are pulled: equal to their origins, once a host, despite hosts that end, lie or withdraw.

use std::{fs, io::Read, path::PathBuf, sync::Arc, thread, time::Duration};

use partywall::{
    DType, Domain, Place,
    cuda::{DeviceBuffer, ForeignMemory},
};
use partywall_harness::{Output, Running, Sandbox, Signal, eventually, noise};

use crate::{Host, command};

/// Starts hosts `a`, which exports everything, and `b`, which is connected to it and exports everything, too.
fn pair() -> (Host, Host) {
    let a = Host::start("a", &[], &["--export", "*"]);
    let b = Host::start("b", &[&a], &["--export", "*"]);
    b.await_state("a", "alive");
    (a, b)
}

/// Puts bytes under a name of a host.
fn put(host: &Host, name: &str, bytes: &[u8]) {
    let file = host.sandbox.file("put", bytes);
    host.run(&["put", file.to_str().unwrap(), name, "--device", "host"]).expect(0);
}

/// Pulls into host memory.
fn pull(host: &Host, arguments: &[&str]) -> Output {
    host.run(&[&["--json", "pull"], arguments, &["--device", "host"]].concat())
}

/// Returns everything that a command has printed.
fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &output.stderr
}

/// Returns the bytes of a name of a host.
pub(crate) fn get(host: &Host, name: &str) -> Vec<u8> {
    let file: PathBuf = host.sandbox.path().join("got");
    let _ = fs::remove_file(&file);
    host.run(&["get", name, file.to_str().unwrap()]).expect(0);
    fs::read(file).unwrap()
}

// Holds 444.
#[test]
fn pulled_version_is_its_origin_byte_for_byte() {
    let (a, b) = pair();
    let bytes = noise((5 << 20) + 17, 1);
    put(&a, "llm", &bytes);
    let pulled = pull(&b, &["//a/llm"]).expect(0).json();
    assert_eq!(
        (&pulled["origin"], &pulled["version"], &pulled["lifetime"]),
        (&"//a/llm@1".into(), &1.into(), &"kept".into())
    );
    assert_eq!(pulled["root"], blake3::hash(&bytes).to_hex().as_str());
    assert!(get(&b, "llm") == bytes);
    let copied = format!("copied     from //a/llm@1, root {}", blake3::hash(&bytes).to_hex());
    assert!(b.run(&["show", "llm"]).expect(0).text().lines().any(|line| line == copied));
    let listed = b.run(&["ls", "llm"]).expect(0).text();
    assert!(listed.contains("COPIED FROM") && listed.contains("//a/llm@1"), "{listed}");
    assert!(!a.run(&["ls", "llm"]).expect(0).text().contains("COPIED FROM"));
    assert_eq!(b.run(&["--json", "ls", "llm"]).expect(0).json()["names"][0]["origin"], "//a/llm@1");
    // The same content again is nothing to do.
    assert_eq!(pull(&b, &["//a/llm@1"]).expect(0).json()["existed"], true);
    // Another content is the next version, and another name another name.
    put(&a, "llm", b"second");
    assert_eq!(pull(&b, &["//a/llm"]).expect(0).json()["version"], 2);
    assert!(get(&b, "llm") == b"second");
    pull(&b, &["//a/llm@2", "copy"]).expect(0);
    assert!(get(&b, "copy") == b"second");
    // What it is shows what it was.
    let shown = b.run(&["--json", "show", "//a/llm"]).expect(0).json();
    assert_eq!((&shown["version"], &shown["bytes"]), (&2.into(), &6.into()));
    let listed = b.run(&["--json", "ls", "//a"]).expect(0).json();
    assert_eq!((listed["names"].as_array().unwrap().len(), &listed["names"][0]["name"]), (1, &"llm".into()));
}

#[test]
fn tensors_views_strides_and_metadata_cross() {
    let (a, b) = pair();
    let domain = a.sandbox.domain_of_running();
    let mut build = domain
        .create("m", Place::Host)
        .tensor("w", DType::F32, &[512, 1024])
        .tensor_strided("t", DType::U8, &[2, 3], &[8, 1])
        .view("tied", DType::F32, &[1024, 512], &[1, 1024], ("w", 0))
        .tensor("empty", DType::F16, &[0, 4])
        .metadata("format", "pt")
        .allocate()
        .unwrap();
    build.as_mut_bytes("w").unwrap().copy_from_slice(&noise(2 << 20, 3));
    build.as_mut_bytes("t").unwrap().copy_from_slice(&noise(11, 4));
    let origin = build.commit().unwrap();
    pull(&b, &["//a/m"]).expect(0);
    let replica = b.sandbox.domain_of_running().open("m", Duration::ZERO).unwrap();
    for (ours, theirs) in replica.tensors().iter().zip(origin.tensors()) {
        assert_eq!((ours.name(), ours.dtype(), ours.shape()), (theirs.name(), theirs.dtype(), theirs.shape()));
        assert_eq!(ours.strides(), theirs.strides());
        assert!(ours.to_vec().unwrap() == theirs.to_vec().unwrap(), "{}", ours.name());
    }
    assert_eq!(replica.tensor_bytes(), origin.tensor_bytes());
    let metadata: Vec<_> = replica.metadata().map(|(key, _)| key.to_owned()).collect();
    assert_eq!(metadata, ["format", "origin", "root"]);
}

// Holds 444.
#[test]
fn of_several_pullers_one_pulls() {
    let (a, b) = pair();
    put(&a, "llm", &noise(3 << 20, 1));
    for version in [1, 2] {
        let spawn = |_| Running::spawn(&mut command(&b.sandbox, &["--json", "pull", "//a/llm", "--device", "host"]));
        let pulls: Vec<_> = (0..3).map(spawn).collect();
        let said: Vec<_> = pulls.into_iter().map(|pull| pull.wait().expect(0).json()).collect();
        assert_eq!(said.iter().filter(|said| said["existed"] == false).count(), 1, "{said:?}");
        assert!(said.iter().all(|said| said["version"] == version), "{said:?}");
        put(&a, "llm", &noise(2 << 20, 2));
    }
}

// Holds 446.
#[test]
fn what_cannot_cross_is_refused_by_name() {
    let (a, b) = pair();
    put(&a, "llm", b"bytes");
    let domain = a.sandbox.domain_of_running();
    let mutable = domain.create("weights", Place::Host).tensor("w", DType::U8, &[4]).mutable(true);
    let growing = mutable.allocate().unwrap().commit().unwrap();
    growing.grow().tensor("more", DType::U8, &[4]).commit().unwrap();
    let _pool = domain.pool("kv").blocks(2).block_bytes(4096).create().unwrap();
    let _semaphore = domain.semaphore("gate", 1).unwrap();
    let _timeline = domain.timeline_writer("steps").unwrap();
    let _queue = domain.queue("work").tasks(1).outputs(1, 64).place(Place::Host).create().unwrap();
    let _topic = domain.topic("frames").max_bytes(4096).place(Place::Host).open_or_create().unwrap();
    for (from, code, part) in [
        ("//c/llm", 3, "no host is called //c: there are //a"),
        ("//b/llm", 2, "//b is this host"),
        ("//a/other", 3, "exports no such name"),
        ("//a/llm@7", 3, "has no such version; the latest is 1"),
        ("//a/weights", 5, "is mutable: its bytes may change"),
        ("//a/weights", 5, "copy it to a frozen segment there (`partywall cp`)"),
        ("//a/kv", 5, "has a pool of this name"),
        ("//a/kv", 5, "copy what is in it to a segment there"),
        ("//a/gate", 5, "has a semaphore of this name"),
        ("//a/gate", 5, "use one on each host"),
        ("//a/steps", 5, "has a timeline of this name"),
        ("//a/steps", 5, "send its value with the data"),
        ("//a/work", 5, "has a queue of this name"),
        ("//a/work", 5, "run its workers on that host"),
        ("//a/frames", 5, "has a topic of this name"),
        ("//a/frames", 5, "`partywall bridge --import '//a/frames'`"),
        ("//a/.bridge/default", 3, "exports no such name"),
        ("//a/llm@x", 2, "not a version"),
        ("llm", 2, "does not begin with //HOST/"),
    ] {
        let refused = pull(&b, &[from]);
        assert_eq!(refused.code, Some(code), "{from}: {refused:?}");
        assert!(said(&refused).contains(part), "{from}: {}", said(&refused));
    }
    drop(domain);
}

/// Publishes memory of its own allocation until its input ends: another program than the bridge.
#[allow(clippy::print_stdout, reason = "it is how it talks to the test")]
pub(crate) fn publish_legacy() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap();
    let memory = ForeignMemory::try_from(Arc::new(DeviceBuffer::new(gpu.context(), 4096).unwrap())).unwrap();
    let _published = domain.publish("theirs").tensor("x", DType::U8, &[4096], &memory).commit().unwrap();
    println!("\nready");
    let _ = std::io::stdin().read(&mut [0]);
}

// Holds 446.
#[test]
fn legacy_memory_is_refused_by_name() {
    let a = simulated("a", &[]);
    let b = simulated("b", &[&a]);
    b.await_state("a", "alive");
    let mut program = a.sandbox.program(std::env::current_exe().unwrap());
    program.args(["--exact", "role", "--nocapture"]).env(partywall_harness::ROLE, "legacy");
    let mut publisher = Running::spawn(&mut program);
    while publisher.line() != "ready" {}
    let refused = b.run(&["pull", "//a/theirs", "--device", "host"]).expect(5);
    assert!(refused.stderr.contains("is legacy: its bytes may change"), "{refused:?}");
    assert!(refused.stderr.contains("`partywall cp`"), "{refused:?}");
    publisher.kill();
}

/// Starts a host on the simulated driver, with one GPU, which exports everything.
fn simulated(name: &str, others: &[&Host]) -> Host {
    let sandbox = Sandbox::simulated(1);
    let endpoint = "127.0.0.1:0".into();
    let mut host = Host { sandbox, name: name.into(), bridge: None, endpoint, network: None };
    let connect: Vec<_> = others.iter().map(|other| &other.endpoint[..]).collect();
    host.bridge(&connect, &["--export", "*"]);
    host
}

/// Returns the kilobytes of shared memory that a process has touched.
fn written(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix("RssShmem:")?.strip_suffix(" kB"));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

// Holds 447.
#[test]
fn pull_goes_on_after_its_source_was_started_anew() {
    let (mut a, b) = pair();
    let bytes = noise(64 << 20, 5);
    put(&a, "llm", &bytes);
    // Asked once, so that the version is hashed.
    b.run(&["show", "//a/llm"]).expect(0);
    let puller = Running::spawn(&mut command(&b.sandbox, &["pull", "//a/llm", "--device", "host"]));
    eventually("the pull is under way", || written(puller.pid()) > 8 << 10 || puller.has_ended());
    a.bridge.take().unwrap().kill();
    a.bridge(&[], &["--export", "*"]);
    puller.wait().expect(0);
    assert!(get(&b, "llm") == bytes);
}

// Holds 447.
#[test]
fn commands_wait_for_bridges_that_start_again_or_are_stopped() {
    let (mut a, mut b) = pair();
    put(&a, "llm", b"bytes");
    let mut number = 0;
    let mut begin = |b: &Host| {
        number += 1;
        // Not here yet.
        let name = format!("copy/{number}");
        let pull = b.spawn(&["pull", "//a/llm", &name, "--device", "host", "--timeout", "100"]);
        vec![pull, b.spawn(&["hosts", "--timeout", "100"])]
    };
    // These two have no option for it: if nobody knows a bridge or a host, they wait less long than one may take to start.
    let ask = |b: &Host| vec![b.spawn(&["ls", "//a"]), b.spawn(&["show", "//a/llm"])];
    let succeed = |commands: Vec<Running>| {
        for command in commands {
            let said = command.wait().expect(0).text();
            assert!(said.contains("//a"), "{said}");
        }
    };
    // The other host is started anew.
    a.bridge.take().unwrap().kill();
    let commands = [begin(&b), ask(&b)];
    a.bridge(&[], &["--export", "*"]);
    commands.into_iter().for_each(succeed);
    // This one is.
    b.bridge.take().unwrap().kill();
    let commands = begin(&b);
    b.bridge(&[&a.endpoint], &[]);
    succeed(commands);
    // Either is stopped, for longer than one question waits.
    for stopped in [&a, &b] {
        let bridge = stopped.bridge.as_ref().unwrap();
        bridge.signal(Signal::STOP);
        let commands = [begin(&b), ask(&b)];
        thread::sleep(Duration::from_secs(6));
        bridge.signal(Signal::CONT);
        commands.into_iter().for_each(succeed);
    }
    // Another host comes for the first time.
    let pull = b.spawn(&["pull", "//c/own", "--device", "host", "--timeout", "100"]);
    let endpoint = "127.0.0.1:0".into();
    let mut c = Host { sandbox: Sandbox::new(), name: "c".into(), bridge: None, endpoint, network: None };
    put(&c, "own", b"bytes");
    c.bridge(&[&b.endpoint], &["--export", "*"]);
    pull.wait().expect(0);
    drop(c);
}

// Holds 447.
#[test]
fn source_that_stays_away_ends_the_pull_and_leaves_nothing() {
    let (mut a, b) = pair();
    put(&a, "llm", &noise(1 << 20, 5));
    a.bridge.take().unwrap().kill();
    let lost = pull(&b, &["//a/llm", "--timeout", "1"]).expect(7);
    assert!(said(&lost).contains("//a is unreachable"), "{}", said(&lost));
    assert!(b.run(&["show", "llm"]).expect(3).stderr.contains("llm"));
}

// Holds 448.
#[test]
fn another_host_with_the_content_takes_over() {
    let (mut a, b) = pair();
    let bytes = noise(8 << 20, 6);
    put(&a, "llm", &bytes);
    pull(&b, &["//a/llm", "copy"]).expect(0);
    let c = Host::start("c", &[&a, &b], &[]);
    c.await_state("a", "alive");
    c.await_state("b", "alive");
    let pulled = pull(&c, &["//a/llm", "--also", "b"]).expect(0).json();
    assert_eq!(pulled["root"], blake3::hash(&bytes).to_hex().as_str());
    assert!(get(&c, "llm") == bytes);
    a.bridge.take().unwrap().kill();
    c.run(&["rm", "llm"]).expect(0);
    // By the name that `b` gave it. One that nobody knows is said, and is not needed.
    let pulled = pull(&c, &["//b/copy", "llm", "--also", "nobody"]).expect(0);
    assert!(pulled.stderr.contains("no host is called //nobody"), "{pulled:?}");
    assert!(get(&c, "llm") == bytes);
}

// Holds 446.
#[test]
fn host_whose_address_leads_elsewhere_is_refused() {
    let a = Host::start("a", &[], &[]);
    // It connects to other machines, too, and listens on the loopback: there, its address is that of another bridge.
    let _b = Host::start("b", &[&a], &["--insecure-network", "--connect", "192.0.2.1:7447", "--export", "*"]);
    a.await_state("b", "alive");
    let refused = a.run(&["pull", "//b/llm", "--device", "host"]).expect(5);
    assert!(refused.stderr.contains("//b listens at no address that other hosts reach"), "{refused:?}");
    assert!(refused.stderr.contains("--listen"), "{refused:?}");
}

#[test]
fn content_that_is_here_is_copied_for_another_place_or_lifetime() {
    let a = simulated("a", &[]);
    let b = simulated("b", &[&a]);
    put(&a, "llm", b"bytes");
    for (device, version) in [("host", 1), ("cuda:0", 2), ("host", 3)] {
        let pulled = b.run(&["--json", "pull", "//a/llm", "--device", device]).expect(0).json();
        assert_eq!((&pulled["version"], &pulled["existed"]), (&version.into(), &false.into()), "{device}");
    }
    let mut held = b.spawn(&["pull", "//a/llm", "--device", "host", "--hold"]);
    assert!(held.line().contains("llm@4"));
    held.signal(Signal::TERM);
    held.wait().expect(0);
    // It has ended with its process.
    b.run(&["show", "llm@4"]).expect(3);
}

// Holds 447.
#[test]
fn old_versions_are_closed_although_the_newest_is_asked_for() {
    let (a, b) = pair();
    let versions = || a.run(&["--json", "status"]).expect(0).json()["versions"].as_u64().unwrap();
    put(&a, "llm", b"1");
    let expected = versions();
    for number in 2..=4 {
        // Asked for, so that the bridge opens it.
        b.run(&["show", "//a/llm"]).expect(0);
        put(&a, "llm", number.to_string().as_bytes());
    }
    assert_eq!(versions(), expected + 3);
    eventually("old versions are closed", || {
        b.run(&["show", "//a/llm"]).expect(0);
        versions() == expected
    });
}

// Holds 446.
#[test]
fn too_little_memory_is_said_before_the_first_byte() {
    let a = Host::start("a", &[], &["--export", "*"]);
    put(&a, "llm", &noise(8 << 20, 1));
    let sandbox = Sandbox::new();
    sandbox.run(["serve", "--background", "--max-bytes", "4MiB"]).expect(0);
    let arguments = ["pull", "//a/llm", "--device", "host", "--connect", &a.endpoint];
    let refused = Running::spawn(&mut command(&sandbox, &arguments)).wait().expect(5);
    assert!(refused.stderr.contains("limit"), "{refused:?}");
}

// Holds 450.
#[test]
fn follower_takes_the_newest_version() {
    let (a, b) = pair();
    put(&a, "llm", b"1");
    let mut follower =
        Running::spawn(&mut command(&b.sandbox, &["--json", "pull", "//a/llm", "--follow", "--device", "host"]));
    assert!(follower.line().contains("//a/llm@1"));
    put(&a, "llm", b"two");
    assert!(follower.line().contains("//a/llm@2"));
    assert!(get(&b, "llm") == b"two");
    follower.signal(Signal::TERM);
    follower.wait().expect(0);
}

#[test]
fn segment_crosses_from_gpu_to_gpu_of_the_simulated_driver() {
    let a = simulated("a", &[]);
    let b = simulated("b", &[&a]);
    b.await_state("a", "alive");
    let bytes = noise((3 << 20) + 5, 9);
    let file = a.sandbox.file("put", &bytes);
    a.run(&["put", file.to_str().unwrap(), "llm", "--device", "cuda:0"]).expect(0);
    let pulled = b.run(&["--json", "pull", "//a/llm", "--device", "cuda:0"]).expect(0).json();
    assert_eq!(pulled["kind"], "vmm");
    assert!(get(&b, "llm") == bytes);
}
