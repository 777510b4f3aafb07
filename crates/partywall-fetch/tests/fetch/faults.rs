//! What servers do wrong: what passes is tried again, and what does not is one sentence.

use std::{process::Command, sync::Arc, thread, time::Duration};

use partywall_harness::{Sandbox, noise};

use crate::{
    put,
    server::{Ask, Reply, Server},
    take,
};

const LENGTH: usize = 3 << 20;

/// Bytes of the file that come with the first answer.
const HEAD: usize = 256 << 10;

type Answer = fn(&[u8], &Ask) -> Reply;

fn right(file: &[u8], ask: &Ask) -> Reply {
    Reply::file(file, "\"1\"", ask)
}

/// Returns whether a request is not the first one of the file.
fn is_later(ask: &Ask) -> bool {
    ask.range.is_none_or(|(from, _)| from > 0)
}

// Holds 401.
#[test]
fn faults_that_pass_are_tried_again_and_the_bytes_are_right() {
    let cases: [(&str, Answer); 10] = [
        (
            "503 twice",
            |file, ask| if ask.number < 2 { Reply::new(503, "").with("Retry-After", "0") } else { right(file, ask) },
        ),
        ("429 half-way", |file, ask| if ask.number == 1 { Reply::new(429, "") } else { right(file, ask) }),
        ("500 half-way", |file, ask| if ask.number == 1 { Reply::new(500, "no") } else { right(file, ask) }),
        ("every answer cut", |file, ask| if ask.number < 3 { right(file, ask).cut(700_001) } else { right(file, ask) }),
        (
            "cut before the first byte",
            |file, ask| if ask.number == 1 { right(file, ask).cut(0) } else { right(file, ask) },
        ),
        ("stalled half-way", |file, ask| if ask.number == 1 { right(file, ask).stall(5000) } else { right(file, ask) }),
        ("drips half-way", |file, ask| if ask.number == 1 { right(file, ask).drip(5000) } else { right(file, ask) }),
        ("no ranges", |file, _| Reply::whole(file)),
        (
            "no ranges, and cut",
            |file, ask| {
                if ask.number == 1 { Reply::whole(file).cut(2_000_003) } else { Reply::whole(file) }
            },
        ),
        ("neither ETag nor date", |file, ask| right(file, ask).without("ETag")),
    ];
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(LENGTH, 1).into();
    for (what, answer) in cases {
        let bytes = file.clone();
        let server = Server::start(move |ask| answer(&bytes, ask));
        let output = put(&sandbox, &server.url("model.bin"), &["--timeout", "1"]);
        assert_eq!(output.code, Some(0), "{what}: {output:?}");
        assert!(take(&sandbox) == *file, "{what}");
    }
}

// Holds 433.
#[test]
fn file_whose_changes_cannot_be_noticed_is_read_at_once_and_named() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(20 << 20, 6).into();
    let cases: [(&str, Answer, usize); 4] = [
        ("only a weak ETag", |file, ask| Reply::file(file, "W/\"1\"", ask), 1),
        ("neither ETag nor date", |file, ask| right(file, ask).without("ETag"), 1),
        ("", right, 3),
        ("", |file, ask| right(file, ask).without("ETag").with("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"), 3),
    ];
    for (says, answer, requests) in cases {
        let bytes = file.clone();
        let server = Server::start(move |ask| answer(&bytes, ask));
        let output = put(&sandbox, &server.url("model.bin"), &["--threads", "4"]).expect(0);
        assert_eq!(output.stderr.matches("a change while it is read").count(), usize::from(!says.is_empty()));
        assert!(output.stderr.contains(says), "{output:?}");
        // After the head.
        assert_eq!(server.asked().len() - 1, requests, "{says}");
        assert!(take(&sandbox) == *file, "{says}");
    }
    // The first answer had all of it.
    let server = Server::start(|ask| Reply::file(&[7; 1000], "\"1\"", ask).without("ETag"));
    let output = put(&sandbox, &server.url("small.bin"), &[]).expect(0);
    assert!(!output.stderr.contains("a change while it is read"), "{output:?}");
}

// Holds 401.
#[test]
fn server_says_when_to_try_again() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(1000, 7).into();
    for is_date in [false, true] {
        let bytes = file.clone();
        let server = Server::start(move |ask| match ask.number {
            0 if is_date => Reply::new(503, "").with("Retry-After", in_three_seconds()),
            0 => Reply::new(503, "").with("Retry-After", "2"),
            _ => right(&bytes, ask),
        });
        let output = put(&sandbox, &server.url("model.bin"), &[]).expect(0);
        let (_, rest) = output.stderr.split_once("trying again in ").unwrap();
        // The first wait would be 0.75 s at most, and a date has no fractions.
        let seconds: f64 = rest.split(' ').next().unwrap().parse().unwrap();
        assert!((0.8..=3.0).contains(&seconds), "{output:?}");
        assert!(take(&sandbox) == *file);
    }
}

/// Returns the time three seconds from now as HTTP writes it.
fn in_three_seconds() -> String {
    let output =
        Command::new("date").args(["-u", "-d", "3 seconds", "+%a, %d %b %Y %T GMT"]).env("LC_ALL", "C").output();
    String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
}

// Holds 401.
#[test]
fn cut_answer_goes_on_at_the_byte_that_was_reached() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(LENGTH, 2).into();
    let bytes = file.clone();
    let server = Server::start(move |ask| match ask.number {
        1 => right(&bytes, ask).cut(1_000_000),
        _ => right(&bytes, ask),
    });
    put(&sandbox, &server.url("model.bin"), &[]).expect(0);
    let starts: Vec<_> = server.asked().iter().map(|ask| ask.range.unwrap().0).collect();
    assert_eq!(starts, [0, HEAD, HEAD + 1_000_000]);
    assert!(take(&sandbox) == *file);
}

// Holds 402.
#[test]
fn faults_that_remain_are_said_and_leave_nothing() {
    let cases: [(&str, Answer, &str, i32); 23] = [
        (
            "always 503",
            |_, _| Reply::new(503, ""),
            "the server answered 503 Service Unavailable; 2 requests in a row",
            5,
        ),
        ("never 501", |_, _| Reply::new(501, ""), "cannot be read: the server answered 501 Not Implemented", 5),
        (
            "always cut",
            |file, ask| right(file, ask).cut(if is_later(ask) { 0 } else { HEAD }),
            "2 requests in a row",
            5,
        ),
        (
            "truncated",
            |file, ask| {
                let end = file.len() - 100;
                let cut = ask.range.map(|(from, to)| end.saturating_sub(from).min(to + 1 - from));
                right(file, ask).cut(cut.unwrap())
            },
            "the connection was cut",
            5,
        ),
        ("drips", |file, ask| right(file, ask).drip(0), "bytes in 0.5 s; 2 requests in a row have brought nothing", 5),
        (
            "drips half-way",
            |file, ask| right(file, ask).drip(if is_later(ask) { 0 } else { HEAD }),
            "bytes in 0.5 s; 2 requests in a row have brought only ",
            5,
        ),
        ("silent", |file, ask| right(file, ask).stall(0), "the server sent nothing for 0.5 s", 5),
        (
            "another ETag",
            |file, ask| Reply::file(file, if is_later(ask) { "\"2\"" } else { "\"1\"" }, ask),
            "has changed while it was read: its ETag or date was \"1\" and is \"2\"",
            5,
        ),
        (
            "no ETag any more",
            |file, ask| if is_later(ask) { right(file, ask).without("ETag") } else { right(file, ask) },
            "its ETag or date was \"1\" and is missing",
            5,
        ),
        (
            "another length",
            |file, ask| Reply::file(&file[..file.len() - usize::from(is_later(ask))], "\"1\"", ask),
            "has changed while it was read: it had 3145728 bytes and has 3145727",
            5,
        ),
        (
            "shorter than the range",
            |file, ask| Reply::file(&file[..if is_later(ask) { 9 } else { file.len() }], "\"1\"", ask),
            "it had 3145728 bytes and has 9",
            5,
        ),
        (
            "gone half-way",
            |file, ask| if is_later(ask) { Reply::new(404, "") } else { right(file, ask) },
            "it is gone",
            5,
        ),
        (
            "wrong range",
            |file, ask| {
                let reply = right(file, ask);
                if is_later(ask) { reply.with("Content-Range", format!("bytes 7-9/{}", file.len())) } else { reply }
            },
            "asked for the bytes from 262144 on, the server sent those from 7 on",
            5,
        ),
        (
            "no range in the answer",
            |file, ask| right(file, ask).without("Content-Range"),
            "describes a range as \"nothing\"",
            5,
        ),
        ("compressed", |file, ask| right(file, ask).with("Content-Encoding", "gzip"), "compressed (gzip)", 5),
        (
            "no length",
            |file, _| Reply::whole(file).without("Content-Length").cut(LENGTH),
            "does not say how long it is",
            5,
        ),
        (
            "404",
            |_, _| Reply::new(404, ""),
            "the server has no such file\n  → check the URL, the revision, and whether it is private",
            3,
        ),
        ("401", |_, _| Reply::new(401, ""), "set PARTYWALL_URL_TOKEN", 5),
        ("403", |_, _| Reply::new(403, ""), "the server answered 403 Forbidden", 5),
        ("400", |_, _| Reply::new(400, ""), "the server answered 400 Bad Request", 5),
        (
            "redirects without end",
            |_, ask| Reply::new(302, "").with("Location", format!("{}x", ask.path)),
            "points on more than 10 times",
            5,
        ),
        ("redirect to nowhere", |_, _| Reply::new(302, ""), "without a place to go on to", 5),
        (
            "redirect to another scheme",
            |_, _| Reply::new(302, "").with("Location", "file:///etc/passwd"),
            "scheme \"file\"",
            5,
        ),
    ];
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(LENGTH, 3).into();
    sandbox.broker();
    for (what, answer, says, code) in cases {
        let bytes = file.clone();
        let server = Server::start(move |ask| answer(&bytes, ask));
        let output = put(&sandbox, &server.url("model.bin?secret=1"), &["--timeout", "0.5", "--retries", "1"]);
        assert_eq!(output.code, Some(code), "{what}: {output:?}");
        assert!(output.stderr.contains(says), "{what}: {says:?} is not in {output:?}");
        assert!(output.stderr.contains("→") && !output.stderr.contains("secret"), "{what}: {output:?}");
        assert_eq!(sandbox.json(["ls"])["names"], serde_json::json!([]), "{what}");
    }
}

// Holds 402.
#[test]
fn unreachable_server_is_an_error_at_once() {
    let sandbox = Sandbox::new();
    let server = Server::start(|_| Reply::new(503, ""));
    let once = put(&sandbox, &server.url("model.bin"), &["--retries", "0"]).expect(5);
    assert!(once.stderr.contains("; 1 request has brought nothing\n"), "{once:?}");
    let refused = put(&sandbox, "http://127.0.0.1:9/model.bin", &[]).expect(5);
    assert!(refused.stderr.contains("check the name of the host"), "{refused:?}");
    assert!(!refused.stderr.contains("trying again"), "{refused:?}");
}

// Holds 402.
#[test]
fn other_threads_end_with_the_first_error() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(40 << 20, 4).into();
    let server = Server::start(move |ask| match ask.range {
        Some((0, _)) => right(&file, ask),
        // The others would wait for the whole timeout, an hour.
        Some((from, _)) if from > HEAD => right(&file, ask).stall(10),
        _ => {
            thread::sleep(Duration::from_millis(300));
            Reply::new(400, "")
        }
    });
    let output = put(&sandbox, &server.url("model.bin"), &["--timeout", "3600", "--threads", "4"]).expect(5);
    assert!(output.stderr.contains("400 Bad Request"), "{output:?}");
}

// Holds 403.
#[test]
fn plain_http_to_other_machines_is_refused_unless_allowed() {
    let sandbox = Sandbox::new();
    for (url, options, says) in [
        ("http://192.0.2.1/x.bin", &[][..], "http://192.0.2.1 is not encrypted"),
        ("http://example.invalid/x.bin", &["--allow-http"], "check the name of the host"),
        ("https://example.invalid/", &[], "names a folder, which a web server does not list"),
        ("ftp://example.invalid/x", &[], "no scheme is called \"ftp\""),
        ("https://", &[], "the URL cannot be read"),
        ("hf://model", &[], "names no repository"),
        ("hf://a/b@", &[], "names no repository"),
        ("hf://datasets/org/data", &[], "one of the datasets of the Hub"),
        ("hf://spaces/org/space", &[], "one of the spaces of the Hub"),
        ("s3:///key", &[], "names no bucket"),
        ("az://container/key", &[], "Account must be specified"),
        ("env://PARTYWALL_NO_SUCH_VARIABLE", &[], "the variable \"PARTYWALL_NO_SUCH_VARIABLE\" is not set"),
        ("env://", &[], "the variable \"\" is not set"),
        ("env://a=b", &[], "the variable \"a=b\" is not set"),
    ] {
        let output = put(&sandbox, url, &[options, &["--timeout", "1"]].concat());
        assert!(output.stderr.contains(says), "{url}: {output:?}");
        assert!(matches!(output.code, Some(2 | 5)), "{url}: {output:?}");
    }
}

// Holds 403.
#[test]
fn credentials_do_not_follow_a_redirect_to_another_host() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(LENGTH, 5).into();
    let bytes = file.clone();
    let elsewhere = Server::start(move |ask| right(&bytes, ask));
    let to = elsewhere.url("there.bin");
    let server = Server::start(move |ask| match ask.path.as_str() {
        "/first.bin" => Reply::new(307, "").with("Location", "/second.bin"),
        _ => Reply::new(302, "").with("Location", to.clone()),
    });
    let mut command = crate::command(&sandbox, &["put", &server.url("first.bin"), "x", "--device", "host"]);
    partywall_harness::Running::spawn(command.env("PARTYWALL_URL_TOKEN", "abc")).wait().expect(0);
    assert!(
        server.asked().iter().all(|ask| ask.authorization.as_deref() == Some("Bearer abc")),
        "{:?}",
        server.asked()
    );
    assert!(elsewhere.asked().iter().all(|ask| ask.authorization.is_none()), "{:?}", elsewhere.asked());
    assert!(take(&sandbox) == *file);
}
