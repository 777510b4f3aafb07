// Holds 208.
//! Samples on standard output, for programs in other languages: `topic cat`, and `topic record NAME -`.

use std::{
    io::{BufRead, BufReader, Read},
    process::Stdio,
    time::Duration,
};

use partywall::{DType, Domain, Policy, Publisher, Topic};
use partywall_harness::{Running, Sandbox, Signal, Terminal, eventually, place};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(60);

fn topic(domain: &Domain) -> Topic {
    domain.topic("camera").max_bytes(64).depth(16).place(place()).create().unwrap()
}

fn publish(publisher: &Publisher, bytes: &[u8], header: &[u8]) {
    let sent = publisher.send_with(DType::U16, &[bytes.len() as u64 / 2], LONG, |loan| {
        loan.header(header)?;
        loan.write(bytes).map(|()| None)
    });
    sent.unwrap();
}

fn listening(sandbox: &Sandbox, topic: &Topic, arguments: &[&str]) -> Running {
    let before = topic.stats().subscribers.len();
    let running = sandbox.spawn(arguments);
    eventually("it has subscribed", || topic.stats().subscribers.len() > before);
    running
}

#[test]
fn cat_writes_the_bytes_of_samples_until_the_publishers_have_left() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain);
    let all = listening(&sandbox, &camera, &["topic", "cat", "camera"]);
    let two = listening(&sandbox, &camera, &["topic", "cat", "camera", "--count", "2"]);
    let publisher = camera.publisher().unwrap();
    for bytes in [&b"one "[..], b"", b"two!", b"3 of 3"] {
        publish(&publisher, bytes, b"");
    }
    assert_eq!(two.wait().expect(0).stdout, b"one ");
    drop(publisher);
    let all = all.wait().expect(0);
    assert_eq!(all.stdout, b"one two!3 of 3");
    assert!(all.stderr.contains("4 samples; 0 missed, 0 failed"), "{}", all.stderr);
}

#[test]
fn header_of_each_sample_says_how_many_bytes_follow() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain);
    let cat = listening(&sandbox, &camera, &["topic", "cat", "camera", "--header"]);
    let publisher = camera.publisher().unwrap();
    // A sample may contain what looks like the end of a line.
    let samples = [(&b"{}\n\n"[..], &b"left"[..]), (b"", b""), (b"\nx", b"\n")];
    for (bytes, header) in samples {
        publish(&publisher, bytes, header);
    }
    drop(publisher);
    let stream = cat.wait().expect(0).stdout;
    let mut stream = BufReader::new(&stream[..]);
    for (number, (bytes, header)) in samples.into_iter().enumerate() {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        // The size comes first, for programs that have no parser.
        assert!(line.starts_with(&format!(r#"{{"bytes":{},"#, bytes.len())), "{line}");
        let head: Value = serde_json::from_str(&line).unwrap();
        for (key, value) in [
            ("dtype", json!("uint16")),
            ("shape", json!([bytes.len() / 2])),
            ("position", json!(number)),
            ("sequence", json!(number)),
            ("missed", json!(0)),
            ("header", json!(header.iter().map(|byte| format!("{byte:02x}")).collect::<String>())),
        ] {
            assert_eq!(head[key], value, "{key}");
        }
        let mut sample = vec![0; bytes.len()];
        stream.read_exact(&mut sample).unwrap();
        assert_eq!(sample, bytes);
    }
    assert_eq!(stream.fill_buf().unwrap(), b"");
}

#[test]
fn cat_misses_samples_rather_than_delay_publishers_and_says_so() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = domain.topic("camera").max_bytes(64).depth(2).place(place()).create().unwrap();
    let cat = listening(&sandbox, &camera, &["topic", "cat", "camera", "--header"]);
    cat.signal(Signal::STOP);
    eventually("it is stopped", || cat.is_stopped());
    let publisher = camera.publisher().unwrap();
    for number in 0..40_u8 {
        publish(&publisher, &[number, 0], b"");
    }
    drop(publisher);
    cat.signal(Signal::CONT);
    let ended = cat.wait().expect(0);
    let heads = ended.text();
    let missed = heads
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.trim_matches(|c| c != '{' && c != '}')).ok());
    let missed: u64 = missed.map(|head| head["missed"].as_u64().unwrap()).sum();
    assert!(missed > 0 && ended.stderr.contains(&format!("{missed} missed")), "{ended:?}");
}

#[test]
fn reader_that_has_enough_ends_the_command() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain);
    let publisher = camera.publisher().unwrap();
    for arguments in [&["topic", "cat", "camera"][..], &["topic", "record", "camera", "-"]] {
        let mut command = sandbox.command(arguments);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("it has subscribed", || camera.stats().subscribers.len() == 1);
        let mut reader = child.stdout.take().unwrap();
        if arguments[1] == "cat" {
            publish(&publisher, b"abcd", b"");
            let mut first = [0; 2];
            reader.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"ab");
        }
        // Nothing more is published: it notices without writing.
        drop(reader);
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
        assert!(!String::from_utf8_lossy(&ended.stderr).contains("error"), "{ended:?}");
        eventually("it has left the topic", || camera.stats().subscribers.is_empty());
    }
    let status = sandbox.json(["status"]);
    assert_eq!(status["deaths"]["all"], json!(0), "{status}");
}

#[test]
fn signal_ends_a_command_whose_reader_has_stopped_reading() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let large = domain.topic("camera").max_bytes(1 << 20).place(place()).create().unwrap();
    let publisher = large.publisher().unwrap();
    let mut command = sandbox.command(["topic", "cat", "camera"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    eventually("it has subscribed", || large.stats().subscribers.len() == 1);
    publisher.loan(DType::U8, &[1 << 20], LONG).unwrap().filled().publish(LONG).unwrap();
    let mut reader = child.stdout.take().unwrap();
    reader.read_exact(&mut [0; 1]).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    drop(reader);
}

#[test]
fn recording_on_standard_output_is_a_whole_file() {
    for path in ["-", "/dev/stdout"] {
        assert_whole(path);
    }
}

fn assert_whole(path: &str) {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain);
    let record = listening(&sandbox, &camera, &["topic", "record", "camera", path, "--until-idle", "--json"]);
    let publisher = camera.publisher().unwrap();
    publish(&publisher, b"one ", b"left");
    publish(&publisher, b"two!", b"");
    drop(publisher);
    let recorded = record.wait().expect(0);
    let messages: Vec<_> = mcap::MessageStream::new(&recorded.stdout).unwrap().map(Result::unwrap).collect();
    assert!(messages.len() == 2 && messages[0].data.ends_with(b"one ") && messages[1].data.ends_with(b"two!"));
    assert!(mcap::Summary::read(&recorded.stdout).unwrap().is_some(), "it has its index");
    let said: Value = serde_json::from_str(recorded.stderr.trim()).unwrap();
    assert_eq!((&said["samples"], &said["file"]), (&json!(2), &json!(path)));
    let path = sandbox.file("piped.mcap", recorded.stdout);
    let arguments = ["topic", "play", path.to_str().unwrap(), "camera", "--json"];
    let subscriber = camera.subscriber(Policy::Block).unwrap();
    assert_eq!(sandbox.run(arguments).expect(0).json()["samples"], 2);
    assert_eq!(subscriber.recv(LONG).unwrap().header(), b"left");
}

#[test]
fn streams_of_samples_say_what_they_cannot_do() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain);
    let json = sandbox.run(["topic", "cat", "camera", "--json"]).expect(2).text();
    assert!(json.contains("--header") && json.contains("topic echo"), "{json}");
    assert!(sandbox.run(["topic", "cat", "missing"]).expect(3).stderr.contains("missing"));
    for (arguments, advice) in [
        (&["topic", "cat", "camera"][..], "partywall topic cat camera | xxd | head; or partywall topic echo camera"),
        (&["topic", "record", "camera", "-"], "name a file, or use a pipe"),
    ] {
        let (code, screen) = Terminal::spawn(sandbox.command(arguments), 200).wait();
        assert_eq!(code, Some(2), "{screen}");
        assert!(screen.contains("is a terminal") && screen.contains(advice), "{screen}");
    }
    let publisher = camera.publisher().unwrap();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = sandbox.command(["topic", "cat", "camera"]);
    let child = command.stdin(Stdio::null()).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    eventually("it has subscribed", || camera.stats().subscribers.len() == 1);
    publish(&publisher, b"ab", b"");
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(5) && said.contains("make room"), "{ended:?}");
}
