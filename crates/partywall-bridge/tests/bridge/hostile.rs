//! Hosts that lie, change their mind, speak another protocol or send nonsense: what they say is refused, and they harm
//! nobody else.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use blake3::{
    Hasher,
    hazmat::{ChainingValue, HasherExt},
};
use partywall::{DType, TableBuilder};
use partywall_harness::{Output, Running, Sandbox, eventually, noise};
use zenoh::{Wait, query::Query};

use crate::{
    Host, assert_quoted, command,
    raw::{RawHost, answer, refuse},
};

const MIB: usize = 1 << 20;

/// The numbers of refusals.
const NO_CONTENT: u8 = 4;
const WITHDRAWN: u8 = 5;

/// Answers with the manifest of a version with these bytes.
fn manifest(query: &Query, bytes: &[u8]) {
    manifest_of(query, bytes.len() as u64, *blake3::hash(bytes).as_bytes());
}

fn manifest_of(query: &Query, length: u64, root: [u8; 32]) {
    let mut table = TableBuilder::new();
    table.add("w", DType::U8, &[length]).unwrap();
    let layout = table.layout(1 << 50, 8).unwrap();
    answer(query, 1, &("llm", 1_u64, "host memory", length, root, layout.chunks, layout.table));
}

/// Returns the number of the piece that is asked for.
fn asked(query: &Query) -> usize {
    query.key_expr().as_str().rsplit('/').next().unwrap().parse().unwrap()
}

/// Answers with a piece of two, in which a bit is changed on request.
fn piece(query: &Query, bytes: &[u8], is_wrong: bool) {
    let pieces: Vec<_> = bytes.chunks(MIB).collect();
    let number = asked(query);
    let beside = 1 - number;
    let mut hasher = Hasher::new();
    hasher.set_input_offset((beside * MIB) as u64);
    let beside: ChainingValue = hasher.update(pieces[beside]).finalize_non_root();
    let mut payload = pieces[number].to_vec();
    payload[3] ^= u8::from(is_wrong);
    let proof = postcard::to_stdvec(&(1_u32, vec![beside])).unwrap();
    query.reply(query.key_expr(), payload).attachment(proof).wait().unwrap();
}

/// Pulls into a sandbox, straight from a host's address.
fn pull(sandbox: &Sandbox, from: &RawHost, options: &[&str]) -> Output {
    let name = format!("//{}/llm", from.name);
    let arguments = ["pull", &name, "llm", "--connect", &from.endpoint];
    Running::spawn(&mut command(sandbox, &[&arguments[..], options].concat())).wait()
}

// Holds 448.
#[test]
fn source_that_lies_withdraws_or_changes_in_the_middle_leaves_nothing() {
    let bytes = noise(MIB + 5, 1);
    let sandbox = Sandbox::new();
    for (name, expected) in [
        ("liar", "//liar sent a wrong piece 1"),
        ("quitter", "//quitter has withdrawn the version"),
        ("changer", "//changer has another content under this name and version by now"),
        ("stranger", "//stranger speaks protocol 9"),
    ] {
        let source = RawHost::start(name, &[]);
        let (content, manifests) = (bytes.clone(), AtomicUsize::new(0));
        source.answers("manifest", "/**", move |query| match name {
            // Asked by the command, and once more before the first piece.
            "changer" if manifests.fetch_add(1, Ordering::Relaxed) >= 2 => manifest(query, b"another content"),
            _ => manifest(query, &content),
        });
        let content = bytes.clone();
        source.answers("piece", "/**", move |query| match (asked(query), name) {
            (0, _) => piece(query, &content, false),
            (_, "liar") => piece(query, &content, true),
            (_, "quitter") => refuse(query, WITHDRAWN),
            (_, "changer") => refuse(query, NO_CONTENT),
            _ => query.reply_err(vec![9, 0]).wait().unwrap(),
        });
        let refused = pull(&sandbox, &source, &["--device", "host", "--timeout", "20"]).expect(5);
        assert!(refused.stderr.contains(expected), "{refused:?}");
        assert!(sandbox.run(["show", "llm"]).expect(3).stderr.contains("llm"));
    }
    let source = RawHost::start("honest", &[]);
    let content = bytes.clone();
    source.answers("manifest", "/**", move |query| manifest(query, &content));
    let content = bytes.clone();
    source.answers("piece", "/**", move |query| piece(query, &content, false));
    pull(&sandbox, &source, &["--device", "host"]).expect(0);
    let got = sandbox.path().join("got");
    sandbox.run(["get", "llm", got.to_str().unwrap()]).expect(0);
    assert!(fs::read(got).unwrap() == bytes);
}

// Holds 446.
#[test]
fn too_little_memory_of_any_place_is_said_before_the_first_byte() {
    let bytes = noise(8 * MIB, 1);
    let source = RawHost::start("big", &[]);
    source.answers("manifest", "/**", move |query| manifest(query, &bytes));
    let pieces = Arc::new(AtomicUsize::new(0));
    let count = pieces.clone();
    source.answers("piece", "/**", move |_| _ = count.fetch_add(1, Ordering::Relaxed));
    let host = Sandbox::new();
    host.run(["serve", "--background", "--max-bytes", "4MiB"]).expect(0);
    let refused = pull(&host, &source, &["--device", "host"]).expect(5);
    assert!(refused.stderr.contains("limit"), "{refused:?}");
    for (device, variable) in [("cuda", "SIMCUDA_MEMORY"), ("pinned", "SIMCUDA_NODE_MEMORY")] {
        let sandbox = Sandbox::simulated(1);
        let arguments = ["pull", "//big/llm", "--device", device, "--connect", &source.endpoint];
        let mut command = command(&sandbox, &arguments);
        let refused = Running::spawn(command.env(variable, "4M")).wait().expect(6);
        assert!(refused.stderr.contains("8 MiB") && refused.stderr.contains("memory"), "{refused:?}");
        assert!(sandbox.run(["show", "llm"]).expect(3).stderr.contains("llm"));
    }
    // More than the machine has: host memory is given only as it is written.
    let vast = RawHost::start("vast", &[]);
    vast.answers("manifest", "/**", |query| manifest_of(query, 1 << 43, [0; 32]));
    let count = pieces.clone();
    vast.answers("piece", "/**", move |_| _ = count.fetch_add(1, Ordering::Relaxed));
    let refused = pull(&Sandbox::new(), &vast, &["--device", "host"]).expect(5);
    assert!(refused.stderr.contains("cannot allocate 8 TiB") && refused.stderr.contains("host"), "{refused:?}");
    assert_eq!(pieces.load(Ordering::Relaxed), 0);
}

// Holds 446.
#[test]
fn host_of_another_protocol_is_refused_by_name_and_others_go_on() {
    let old = RawHost::start("old", &[]);
    old.answers("manifest", "/**", |query| answer(query, 2, &()));
    let refused = pull(&Sandbox::new(), &old, &["--device", "host"]).expect(5);
    assert!(refused.stderr.contains("//old speaks protocol 2, and this bridge 1"), "{refused:?}");
    assert!(refused.stderr.contains("the same release of Partywall on both hosts"), "{refused:?}");

    // Its answer about itself is of that protocol, too.
    let a = Host::start("a", &[], &["--export", "*"]);
    let file = a.sandbox.file("put", "bytes");
    a.run(&["put", file.to_str().unwrap(), "llm", "--device", "host"]).expect(0);
    let foreign = RawHost::speaking(2, "foreign", &[]);
    let b = Host::start("b", &[&a], &["--connect", &foreign.endpoint]);
    eventually("the protocol is known", || b.view("foreign")["protocol"] == 2);
    assert!(b.run(&["hosts"]).expect(0).text().contains("speaks protocol 2"));
    let refused = b.run(&["pull", "//foreign/llm", "--device", "host"]).expect(5);
    assert!(refused.stderr.contains("//foreign speaks protocol 2"), "{refused:?}");
    assert_quoted(&refused);
    b.run(&["pull", "//a/llm", "--device", "host"]).expect(0);
}

#[test]
fn what_is_no_name_is_not_listed() {
    let a = Host::start("a", &[], &[]);
    let mallory = RawHost::start("mallory", &[&a.endpoint]);
    mallory.answers("names", "", |query| {
        let name = |name: &str| (name.to_owned(), "segment".to_owned(), 1u64, "host".to_owned(), 8u64, 1u64);
        // A shell would run the first one where it completes names.
        answer(query, 1, &Vec::from(["$(touch harm)", "../llm", "llm"].map(name)));
    });
    a.await_state("mallory", "alive");
    let listed = a.run(&["--json", "ls", "//mallory"]).expect(0).json();
    let names: Vec<_> = listed["names"].as_array().unwrap().iter().map(|name| &name["name"]).collect();
    assert_eq!(names, ["llm"]);
}

/// Returns the megabytes of memory that a process uses.
fn resident(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
}

// Holds 456.
#[test]
fn nonsense_of_a_peer_harms_nobody() {
    let a = Host::start("a", &[], &["--export", "*", "--import", "//mallory/*"]);
    let file = a.sandbox.file("put", noise(2 * MIB, 2));
    a.run(&["put", file.to_str().unwrap(), "llm", "--device", "host"]).expect(0);
    let mallory = RawHost::start("mallory", &[&a.endpoint]);
    let instance = a.await_state("mallory", "alive")["instance"].clone();
    assert_eq!(instance, mallory.session.zid().to_string());
    let seen = a.run(&["--json", "hosts", "--connect", &a.endpoint]).expect(0).json();
    let of_a = seen["hosts"].as_array().unwrap().iter().find(|host| host["host"] == "a").unwrap()["instance"].clone();
    let of_a = of_a.as_str().unwrap();
    let session = &mallory.session;
    let garbage = noise(8 * 1024, 3);
    for (number, bytes) in garbage.chunks(61).enumerate() {
        let to = number % 2 == 0;
        let (payload, head) = bytes.split_at(if to { 1 } else { 40 });
        for key in [
            format!("names/mallory/{}", session.zid()),
            format!("credit/mallory/{of_a:0>32}/{:0>32}/llm", session.zid().to_string()),
            format!("data/{of_a:0>32}/mallory/{:0>32}/llm", session.zid().to_string()),
        ] {
            session.put(format!("pw1/default/{key}"), payload).attachment(head).wait().unwrap();
        }
        let root = blake3::hash(bytes).to_hex();
        for key in [
            "manifest/a/*/**".to_owned(),
            format!("manifest/a/{of_a}/-1/llm"),
            format!("manifest/a/{of_a}/0/*"),
            format!("content/a/{of_a}/{root}"),
            format!("content/a/{of_a}/{}", &root[..7]),
            format!("piece/a/{of_a}/{root}/{number}"),
            format!("piece/a/{of_a}/**"),
            format!("view/a/{of_a}"),
        ] {
            session.get(format!("pw1/default/{key}")).payload(payload).callback(drop).wait().unwrap();
        }
        // Tokens that name no host, and such that come and go.
        for host in ["a,b", &"x".repeat(65), &format!("m{}", number % 100)] {
            let token = session.liveliness().declare_token(format!("pw1/default/host/{host}/{number}"));
            token.wait().unwrap().undeclare().wait().unwrap();
        }
    }
    let b = Host::start("b", &[&a], &[]);
    b.await_state("a", "alive");
    b.run(&["pull", "//a/llm", "--device", "host"]).expect(0);
    let bridge = a.bridge.as_ref().unwrap();
    assert!(resident(bridge.pid()) < 400, "{} MB", resident(bridge.pid()));
}
