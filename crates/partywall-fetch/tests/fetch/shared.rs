//! Several processes that put or want one name, and processes that are killed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use partywall_harness::{Running, Sandbox, Signal, eventually, noise};

use crate::{
    command, put,
    server::{Reply, Server},
    take,
};

const LENGTH: usize = 3 << 20;

fn spawn(sandbox: &Sandbox, url: &str, options: &[&str]) -> Running {
    Running::spawn(&mut command(sandbox, &[&["put", url, "x", "--device", "host"], options].concat()))
}

/// Returns a server whose answers after the first wait until the flag is set.
fn waiting(file: &Arc<[u8]>, go_on: &Arc<AtomicBool>) -> Server {
    let file = file.clone();
    let go_on = go_on.clone();
    Server::start(move |ask| {
        while ask.number > 0 && !go_on.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        Reply::file(&file, "\"1\"", ask)
    })
}

// Holds 404.
#[test]
fn several_that_put_a_url_at_once_download_it_once() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let file: Arc<[u8]> = noise(LENGTH, 1).into();
    let go_on = Arc::default();
    let server = waiting(&file, &go_on);
    let url = server.url("model.bin");
    let downloads: Vec<_> = (0..3).map(|_| spawn(&sandbox, &url, &["--if-absent"])).collect();
    let engine = thread::spawn({
        let domain = domain.clone();
        move || domain.open("x", Duration::from_secs(300)).map(|segment| segment.tensor_bytes())
    });
    // The first has asked twice, and all others wait for the name.
    eventually("all wait", || server.asked().len() == 2 && waits(&sandbox) >= 3);
    go_on.store(true, Ordering::Relaxed);
    let texts: Vec<_> = downloads.into_iter().map(|one| one.wait().expect(0).text()).collect();
    assert_eq!(texts.iter().filter(|text| text.contains("already exists; nothing was done")).count(), 2, "{texts:?}");
    assert_eq!(engine.join().unwrap().unwrap(), LENGTH as u64);
    assert_eq!(server.asked().len(), 2);
    drop(domain);
    assert!(take(&sandbox) == *file);
    // Now the name is there before anything is asked.
    put(&sandbox, &url, &["--if-absent"]).expect(0);
    let asked = server.asked().len();
    assert!(put(&sandbox, &url, &["--if-absent"]).expect(0).text().contains("already exists"));
    assert_eq!(server.asked().len(), asked);
}

/// Returns how many processes wait for a commit of the name.
fn waits(sandbox: &Sandbox) -> usize {
    let members = sandbox.json(["ps"]);
    let waits = members["members"].as_array().unwrap().iter().map(|member| member["waits"].as_array().unwrap());
    waits.filter(|waits| waits.iter().any(|wait| wait["name"] == "x")).count()
}

// Holds 404.
#[test]
fn next_process_takes_over_from_one_that_dies_or_fails() {
    let file: Arc<[u8]> = noise(LENGTH, 2).into();
    for dies in [true, false] {
        let sandbox = Sandbox::new();
        sandbox.broker();
        let bytes = file.clone();
        let failed = AtomicUsize::new(0);
        let go_on: Arc<AtomicBool> = Arc::default();
        let on = go_on.clone();
        // The second request hangs until its process is killed, or is refused.
        let server = Server::start(move |ask| {
            if ask.number == 1 {
                failed.store(1, Ordering::Relaxed);
                while !on.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(5));
                }
                return Reply::new(400, "");
            }
            Reply::file(&bytes, "\"1\"", ask)
        });
        let url = server.url("model.bin");
        let first = spawn(&sandbox, &url, &["--if-absent"]);
        eventually("the first downloads", || server.asked().len() == 2);
        let second = spawn(&sandbox, &url, &["--if-absent"]);
        eventually("the second waits", || waits(&sandbox) == 1);
        if dies {
            first.kill();
            go_on.store(true, Ordering::Relaxed);
        } else {
            go_on.store(true, Ordering::Relaxed);
            assert!(first.wait().expect(5).stderr.contains("400 Bad Request"));
        }
        let text = second.wait().expect(0).text();
        assert!(text.contains("x@1: 3 MiB"), "{text}");
        assert!(take(&sandbox) == *file);
    }
}

// Holds 405.
#[test]
fn killed_or_interrupted_download_leaves_nothing() {
    let file: Arc<[u8]> = noise(40 << 20, 3).into();
    for signal in [Signal::KILL, Signal::INT, Signal::TERM] {
        let sandbox = Sandbox::new();
        sandbox.broker();
        // Of five answers: the head, and a range for each of four pieces.
        for stop_at in 0..4 {
            let bytes = file.clone();
            let server = Server::start(move |ask| {
                let reply = Reply::file(&bytes, "\"1\"", ask);
                if ask.number == stop_at { reply.stall(100_000) } else { reply }
            });
            let download = spawn(&sandbox, &server.url("model.bin"), &["--if-absent", "--threads", "3"]);
            eventually("it waits for the server", || server.asked().len() > stop_at);
            download.signal(signal);
            assert_ne!(download.wait().code, Some(0));
            eventually("nothing is left", || {
                let status = sandbox.json(["status"]);
                status["names"] == 0 && status["bytes"] == serde_json::json!([])
            });
        }
        // The name is free for the next one.
        let bytes = file.clone();
        let server = Server::start(move |ask| Reply::file(&bytes, "\"1\"", ask));
        put(&sandbox, &server.url("model.bin"), &["--if-absent"]).expect(0);
        assert!(take(&sandbox) == *file);
    }
}

// Holds 405.
#[test]
fn options_mean_the_same_as_for_a_file() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(1000, 4).into();
    let server = Server::start(move |ask| Reply::file(&file, "\"1\"", ask));
    let url = server.url("model.bin");
    let json = |options: &[&str]| {
        let arguments = [&["--json", "put", &url, "x", "--device", "host"], options].concat();
        Running::spawn(&mut command(&sandbox, &arguments)).wait().json()
    };
    let kept = json(&["--shared", "--threads", "1"]);
    assert_eq!((&kept["lifetime"], &kept["shared"], &kept["bytes"]), (&"kept".into(), &true.into(), &1000.into()));
    assert_eq!(json(&["--mutable"])["mutable"], true);
    let existing = json(&["--if-absent"]);
    assert_eq!((&existing["existed"], &existing["version"]), (&true.into(), &2.into()));
    let failed = json(&["--owner", "12345"]);
    assert_eq!(failed["error"]["kind"], "not found", "{failed}");
    let mut holder = spawn(&sandbox, &url, &["--hold"]);
    assert!(holder.line().contains("holding it until Ctrl-C"));
    holder.signal(Signal::TERM);
    holder.wait();
    let empty = Server::start(|ask| Reply::file(&[], "\"1\"", ask));
    put(&sandbox, &empty.url("nothing.bin"), &[]).expect(0);
    assert_eq!(take(&sandbox), b"");
}
