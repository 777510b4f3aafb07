//! Which hosts are there: names, deaths, returns, refusals.

use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall_harness::{Running, Sandbox, Signal, eventually};
use serde_json::json;
use zenoh::Wait;

use crate::{Host, assert_quoted, command, raw};

// Holds 441.
#[test]
fn hosts_know_each_other_and_a_lost_one_is_unreachable() {
    let a = Host::start("a", &[], &["--export", "llm"]);
    let mut b = Host::start("b", &[&a], &[]);
    let first = a.await_state("b", "alive");
    eventually("its address is known", || b.view("a")["endpoints"][0] == a.endpoint);
    assert_eq!(b.view("b"), serde_json::Value::Null);
    b.bridge.take().unwrap().kill();
    assert!(a.await_state("b", "unreachable")["unreachable_seconds"].is_number());
    // It returns as another instance.
    b.bridge(&[&a.endpoint.clone()], &[]);
    let second = a.await_state("b", "alive");
    assert_ne!(first["instance"], second["instance"]);
    // A bridge that ends by itself says so at once.
    let ended = b.bridge.take().unwrap();
    ended.signal(Signal::TERM);
    ended.wait().expect(0);
    a.await_state("b", "unreachable");
    // Without a bridge the addresses are given, and without those the error says how.
    let missing = b.run(&["hosts", "--timeout", "0"]).expect(3);
    assert!(missing.stderr.contains("--connect HOST:PORT"), "{missing:?}");
    let seen = b.run(&["--json", "hosts", "--connect", &a.endpoint]).expect(0).json();
    assert_eq!(seen["hosts"][0]["host"], "a");
}

// Holds 441.
#[test]
fn watch_tells_of_a_lost_host_and_of_its_return() {
    let a = Host::start("a", &[], &[]);
    let mut watch = Running::spawn(&mut command(&a.sandbox, &["watch", ".bridge/*/*"]));
    let mut says = |what: &str| while !watch.line().ends_with(what) {};
    // Begun before `b` is.
    eventually("the watch is there", || a.run(&["ps"]).text().contains("watch"));
    let mut b = Host::start("b", &[&a], &[]);
    says("host found     //b");
    let listed = a.run(&["--json", "show", ".bridge/default/b"]).expect(0).json();
    assert_eq!(listed["metadata"]["instance"], a.view("b")["instance"]);
    b.bridge.take().unwrap().kill();
    says("host lost      //b");
    b.bridge(&[&a.endpoint.clone()], &[]);
    says("host found     //b");
    watch.kill();
}

// Holds 441.
#[test]
fn host_that_returns_before_its_former_link_has_ended_is_told_everything() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("tcp/127.0.0.1:{port}");
    let id = ("id", json!("c0ffee"));
    let former = raw::session(&[id.clone(), ("listen/endpoints", json!([endpoint]))]);
    let sandbox = Sandbox::new();
    let mut a = Host { sandbox, name: "a".into(), bridge: None, endpoint: "127.0.0.1:0".into(), network: None };
    a.bridge(&[&endpoint], &[]);
    eventually("the bridge has connected", || former.info().peers_zid().wait().count() == 1);
    // It connects itself now, while the bridge still has the link that it opened.
    let returned = raw::session(&[id, ("connect/endpoints", json!([a.endpoint]))]);
    let is_told = Arc::new(AtomicBool::new(false));
    let told = is_told.clone();
    let tokens = returned.liveliness().declare_subscriber("pw1/default/host/a/*").history(true);
    tokens.callback(move |_| told.store(true, Ordering::Relaxed)).background().wait().unwrap();
    former.close().wait().unwrap();
    eventually("it finds the bridge", || is_told.load(Ordering::Relaxed));
    let answers = returned.get("pw1/default/host/a/*").wait().unwrap();
    assert!(answers.recv().unwrap().result().is_ok());
}

// Holds 442.
#[test]
fn second_bridge_and_second_host_of_a_name_are_refused() {
    let a = Host::start("a", &[], &[]);
    let pid = a.bridge.as_ref().unwrap().pid().to_string();
    let second = a.run(&["bridge", "--host", "c", "--listen", "127.0.0.1:0"]).expect(5);
    assert!(second.stderr.contains(&format!("this domain has a bridge: process {pid}, as //a")), "{second:?}");
    assert_quoted(&second);
    // Another realm is another network.
    let arguments = ["bridge", "--host", "a", "--listen", "127.0.0.1:0", "--realm", "r2"];
    let mut other = Running::spawn(&mut command(&a.sandbox, &arguments));
    assert!(other.line().contains("//a at tcp/127.0.0.1:"));
    other.kill();
    let twin = partywall_harness::Sandbox::new();
    let arguments = ["bridge", "--host", "a", "--listen", "127.0.0.1:0", "--connect", &a.endpoint];
    let twin = Running::spawn(&mut command(&twin, &arguments)).wait().expect(5);
    assert!(twin.stderr.contains("another host is called //a"), "{twin:?}");
    assert_quoted(&twin);
    for (arguments, part) in [
        (&["bridge", "--listen", "0.0.0.0:7447"][..], "could read what is exported"),
        (&["bridge", "--connect", "tls/127.0.0.1:7447"], "#2557"),
        (&["hosts", "--connect", "10.1.2.3:7447"], "--insecure-network"),
        (&["bridge", "--host", "a b"], "letters, digits"),
        (&["bridge", "--import", "frames"], "//HOST/"),
    ] {
        let refused = a.run(arguments).expect(2);
        assert!(refused.stderr.contains(part), "{refused:?}");
    }
}
