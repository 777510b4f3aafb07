// Holds 206.
//! Topics as a user of the command sees them: `topic echo`, `topic record`, `topic play`, `ls`, `show`, `evict`.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, BufWriter, Lines, Write},
    ops::Range,
    path::Path,
    process::{ChildStderr, Stdio},
    time::Duration,
};

use mcap::records::MessageHeader;
use partywall::{
    DType, Domain, Policy, Publisher, Subscriber, Topic,
    files::{Message, TensorInfo, safetensors_header, safetensors_message},
};
use partywall_harness::{Running, Sandbox, Signal, device, eventually, kind, place};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(60);

fn topic(domain: &Domain, name: &str) -> Topic {
    domain.topic(name).max_bytes(64).depth(16).place(place()).create().unwrap()
}

fn publish(publisher: &Publisher, values: &[f32], header: &[u8]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let sent = publisher.send_with(DType::F32, &[values.len() as u64], LONG, |loan| {
        loan.header(header)?;
        loan.write(&bytes).map(|()| None)
    });
    sent.unwrap();
}

fn receive(subscriber: &Subscriber) -> (Vec<f32>, Vec<u8>) {
    let sample = subscriber.recv(LONG).unwrap();
    let mut bytes = vec![0; sample.len() as usize];
    sample.read_at(0, &mut bytes).unwrap();
    (bytes.chunks(4).map(|item| f32::from_le_bytes(item.try_into().unwrap())).collect(), sample.header())
}

/// Returns a process that has subscribed.
fn listening(sandbox: &Sandbox, topic: &Topic, arguments: &[&str]) -> Running {
    let before = topic.stats().subscribers.len();
    let running = sandbox.spawn(arguments);
    eventually("it has subscribed", || topic.stats().subscribers.len() > before);
    running
}

/// Writes a file of these messages: channel, time in nanoseconds, contents.
pub(super) fn messages(path: &Path, messages: &[(&str, u64, Vec<u8>)]) {
    messages_of(path, &[("max_bytes", "64")], messages);
}

/// Writes a file that says this about its channels.
pub(super) fn messages_of(path: &Path, facts: &[(&str, &str)], messages: &[(&str, u64, Vec<u8>)]) {
    let facts = facts.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let options = mcap::WriteOptions::new().compression(None);
    let mut writer = options.create(BufWriter::new(File::create(path).unwrap())).unwrap();
    for (sequence, (topic, log_time, message)) in messages.iter().enumerate() {
        let channel_id = writer.add_channel(0, topic, "safetensors", &facts).unwrap();
        let header = MessageHeader { channel_id, sequence: sequence as u32, log_time: *log_time, publish_time: 0 };
        writer.write_to_known_channel(&header, message).unwrap();
    }
    writer.finish().unwrap();
}

pub(super) fn message(shape: &[u64], header: &str, bytes: &[u8]) -> Vec<u8> {
    let tensor = TensorInfo::contiguous("x", DType::F32, shape.to_vec()).unwrap();
    let metadata = [("header".to_owned(), header.to_owned())];
    [&safetensors_header(&tensor, &metadata).unwrap()[..], bytes].concat()
}

/// Writes a file of samples of one number: channel, time in nanoseconds, number.
fn file(path: &Path, samples: &[(&'static str, u64, f32)]) {
    let one = |(topic, at, number): &(&'static str, u64, f32)| (*topic, *at, message(&[1], "", &number.to_le_bytes()));
    messages(path, &samples.iter().map(one).collect::<Vec<_>>());
}

/// Returns the byte range of the first chunk of a file.
fn first_chunk(bytes: &[u8]) -> Range<usize> {
    let mut at = mcap::MAGIC.len();
    loop {
        let end = at + 9 + u64::from_le_bytes(bytes[at + 1..at + 9].try_into().unwrap()) as usize;
        if bytes[at] == mcap::records::op::CHUNK {
            return at..end;
        }
        at = end;
    }
}

pub(super) fn play<'a>(file: &'a Path, rest: &[&'a str]) -> Vec<&'a str> {
    let file = file.to_str().unwrap();
    [&["topic", "play", file][..], rest, &["--device", device()]].concat()
}

#[test]
fn recording_is_played_unchanged() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain, "camera");
    let publisher = camera.publisher().unwrap();
    let path = sandbox.path().join("camera.mcap");
    let arguments = ["topic", "record", "camera", path.to_str().unwrap(), "--count", "3", "--json"];
    let recording = listening(&sandbox, &camera, &arguments);
    let samples: [(&[f32], &[u8]); 3] = [(&[1.0, 2.0], b"first"), (&[3.0], b""), (&[4.0, 5.0, 6.0], &[0, 0xff])];
    for (values, header) in samples {
        publish(&publisher, values, header);
    }
    let printed = recording.wait().expect(0).json();
    for (key, value) in [("name", json!("camera")), ("samples", json!(3)), ("missed", json!(0)), ("bytes", json!(24))] {
        assert_eq!(printed[key], value, "{key}");
    }

    // The file as any MCAP reader sees it.
    let bytes = fs::read(&path).unwrap();
    let messages: Vec<_> = mcap::MessageStream::new(&bytes).unwrap().map(Result::unwrap).collect();
    assert_eq!(messages.len(), 3);
    for (message, (values, header)) in messages.iter().zip(samples) {
        assert_eq!(
            (message.channel.topic.as_str(), message.channel.message_encoding.as_str()),
            ("camera", "safetensors")
        );
        assert_eq!(message.channel.metadata["max_bytes"], "64");
        assert!(message.log_time > 1 << 60, "nanoseconds since 1970");
        let Message { tensor, metadata, bytes: data } = safetensors_message(&message.data).unwrap();
        assert_eq!((tensor.dtype, &tensor.shape[..]), (DType::F32, &[values.len() as u64][..]));
        assert_eq!(data, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
        let hex: String = header.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(metadata.contains(&("header".to_owned(), hex)));
    }

    let again = topic(&domain, "again");
    let subscriber = again.subscriber(Policy::Block).unwrap();
    let played = sandbox.run(play(&path, &["again", "--json"])).expect(0).json();
    assert_eq!(
        (&played["samples"], &played["cut_off"], &played["channel"]),
        (&json!(3), &json!(false), &json!("camera"))
    );
    for (values, header) in samples {
        assert_eq!(receive(&subscriber), (values.to_vec(), header.to_vec()));
    }
    let text = sandbox.run(play(&path, &["fresh"])).expect(0).text();
    assert!(text.contains("played 3 samples"), "a topic that was not there is made: {text}");
    assert!(domain.topic("fresh").open().is_err(), "and goes with the player");
}

// Holds 194.
#[test]
fn played_topic_is_created_with_its_recorded_type() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let strips = domain.topic("strips").dtype(DType::F32).varying_shape(&[None, Some(2)]).max_bytes(64).place(place());
    let strips = strips.create().unwrap();
    let path = sandbox.path().join("strips.mcap");
    let arguments = ["topic", "record", "strips", path.to_str().unwrap(), "--count", "1"];
    let recording = listening(&sandbox, &strips, &arguments);
    let publisher = strips.publisher().unwrap();
    publisher.loan(DType::F32, &[1, 2], LONG).unwrap().filled().publish(LONG).unwrap();
    recording.wait().expect(0);
    let player = sandbox.spawn(play(&path, &["again", "--loop"]));
    let again = domain.topic("again").timeout(LONG).open().unwrap();
    assert_eq!((again.dtype(), again.shape()), (Some(DType::F32), strips.shape()));
    player.signal(Signal::INT);
    player.wait().expect(0);
}

// Holds 204.
#[test]
fn publishing_command_says_once_that_its_topic_was_removed_and_goes_on() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let publisher = sandbox.spawn(publishing(&["camera", "--dtype", "uint8", "--shape", "1", "--rate", "50"]));
    let camera = domain.topic("camera").timeout(LONG).open().unwrap();
    let subscriber = camera.subscriber(Policy::Latest).unwrap();
    domain.remove("camera").unwrap();
    // It checks once in a second, and says it once.
    let first = subscriber.recv(LONG).unwrap().sequence();
    eventually("it has checked more than once", || subscriber.recv(LONG).unwrap().sequence() > first + 150);
    publisher.signal(Signal::INT);
    let ended = publisher.wait().expect(0);
    assert_eq!(ended.stderr.matches("camera@1 was removed by pid").count(), 1, "{}", ended.stderr);
}

/// Runs `partywall topic pub` on the device of the tests.
fn publishing<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["topic", "pub"][..], arguments, &["--device", device()]].concat()
}

#[test]
fn numbers_are_published_listed_shown_and_measured() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let arguments =
        ["camera", "--dtype", "float32", "--shape", "2,3", "--rate", "200", "--depth", "8", "--header", "left"];
    let publisher = sandbox.spawn(publishing(&arguments));
    let camera = domain.topic("camera").timeout(LONG).open().unwrap();
    assert_eq!((camera.dtype(), camera.shape()), (Some(DType::F32), Some(&[Some(2), Some(3)][..])));
    assert_eq!((camera.depth(), camera.place()), (8, place()));
    let subscriber = camera.subscriber(Policy::Block).unwrap();
    let sequence = subscriber.recv(LONG).unwrap().sequence();
    for number in sequence + 1..sequence + 4 {
        assert_eq!(receive(&subscriber), (vec![number as f32; 6], b"left".to_vec()));
    }
    drop(subscriber);

    // A process that measures nothing until another one asks.
    let receiver = std::thread::spawn({
        let subscriber = camera.subscribe(Policy::Latest).until_idle(true).join().unwrap();
        move || {
            for sample in &subscriber {
                drop(sample.unwrap());
            }
        }
    });
    let shown = sandbox.json(["show", "camera"]);
    let ages = &shown["detail"]["subscribers"][0]["ages"];
    assert!(ages["count"].as_u64() > Some(0) && ages["max_ns"].as_u64() >= ages["p50_ns"].as_u64(), "{shown}");
    let wide = Running::spawn(sandbox.command(["show", "camera"]).env("COLUMNS", "200"));
    let text = wide.wait().expect(0).text();
    assert!(text.contains("AGE P50") && text.contains("s  "), "{text}");

    let listed = sandbox.json(["topic", "ls", "cam*"]);
    let topic = &listed["topics"][0];
    for (key, value) in [
        ("name", json!("camera")),
        ("dtype", json!("float32")),
        ("shape", json!([2, 3])),
        ("max_bytes", json!(24)),
        ("publishers", json!(1)),
    ] {
        assert_eq!(topic[key], value, "{key}");
    }
    assert!(topic["rate"].as_f64().unwrap() > 0.0, "{topic}");
    assert_eq!(sandbox.json(["topic", "ls", "x*"])["topics"], json!([]));
    let narrow = Running::spawn(sandbox.command(["topic", "ls"]).env("COLUMNS", "80"));
    let text = narrow.wait().expect(0).text();
    assert!(text.contains("float32 [2, 3]") && text.lines().all(|line| line.chars().count() <= 80), "{text}");

    let wide = domain.topic("a-longer-name").dtype(DType::U8).shape(&[480, 640, 3]).place(place()).create().unwrap();
    for command in [&["topic", "ls"][..], &["ls"], &["ps"]] {
        let narrow = Running::spawn(sandbox.command(command).env("COLUMNS", "60"));
        let text = narrow.wait().expect(0).text();
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        if command != ["ps"] {
            assert!(text.contains("uint8 [480, 640, 3]") && text.contains("SUBSCRIBERS"), "{text}");
        }
    }
    drop(wide);

    let shown = sandbox.json(["topic", "info", "camera"]);
    assert_eq!((&shown["name"], &shown["detail"]["publishers"][0]["pid"]), (&json!("camera"), &json!(publisher.pid())));
    for command in [&["topic", "info", "camera"][..], &["show", "camera"]] {
        let text = sandbox.run(command).expect(0).text();
        let sum = "20 = depth 8 + 2 publishers × 2 loans + 4 subscribers × 2 held";
        for part in ["topic      camera", "samples    float32 [2, 3]", sum, "/s", "publishers\n"] {
            assert!(text.contains(part), "{part:?} is missing: {text}");
        }
        assert!(!text.contains("chunks") && !text.contains("tensors"), "nothing of its insides: {text}");
    }

    for command in ["hz", "bw"] {
        let measured =
            sandbox.run(["topic", command, "camera", "--count", "40", "--window", "0.05", "--json"]).expect(0);
        let lines: Vec<Value> = measured.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (end, windows) = lines.split_last().unwrap();
        assert!(windows.iter().all(|window| window["event"] == "window") && !windows.is_empty(), "{lines:?}");
        assert_eq!((&end["event"], &end["samples"], &end["bytes"]), (&json!("end"), &json!(40), &json!(40 * 24)));
        assert!(
            end["rate"].as_f64().unwrap() > 0.0 && end["gap"]["max"].as_f64() >= end["gap"]["min"].as_f64(),
            "{end}"
        );
        assert_eq!((&end["size"]["mean"], &end["size"]["std"]), (&json!(24.0), &json!(0.0)));
    }
    let text = sandbox.run(["topic", "hz", "camera", "--for", "0.2"]).expect(0).text();
    assert!(text.contains("GAP MEAN") && text.contains(" ms") && text.contains("all "), "{text}");
    publisher.signal(Signal::INT);
    let printed = publisher.wait().expect(0).text();
    assert!(printed.contains("published ") && printed.contains(" to camera"), "{printed}");
    receiver.join().unwrap();
}

#[test]
fn files_and_standard_input_are_published_as_samples() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let two = domain.topic("two").dtype(DType::F32).shape(&[2]).depth(16).place(place()).create().unwrap();
    let subscriber = two.subscriber(Policy::Block).unwrap();
    let floats: Vec<u8> = (0..6).flat_map(|number| (number as f32).to_le_bytes()).collect();
    let path = sandbox.file("three.raw", &floats);
    let path = path.to_str().unwrap();
    let printed = sandbox.run(publishing(&["two", path, "--count", "4", "--json"])).expect(0).json();
    assert_eq!((&printed["samples"], &printed["bytes"]), (&json!(4), &json!(32)));
    for sample in [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [0.0, 1.0]] {
        assert_eq!(receive(&subscriber).0, sample);
    }
    let mut piped = sandbox.spawn(publishing(&["two", "-"]));
    let mut input = piped.stdin();
    input.write_all(&floats[..12]).unwrap();
    assert_eq!(receive(&subscriber).0, [0.0, 1.0], "as it comes");
    input.write_all(&floats[..8]).unwrap();
    drop(input);
    assert_eq!(receive(&subscriber).0, [2.0, 0.0]);
    let cut = piped.wait().expect(2).stderr;
    assert!(cut.contains("after 4 of 8 bytes"), "{cut}");
    // A typed file, whatever the case of its suffix, determines the type of the new topic.
    let header = format!("{:<69}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }");
    let npy = [&b"\x93NUMPY\x01\x00\x46\x00"[..], header.as_bytes(), &floats].concat();
    let npy = sandbox.file("frame.NPY", npy);
    let publisher = sandbox.spawn(publishing(&["frame", npy.to_str().unwrap(), "--wait-subscribers", "1"]));
    let frame = domain.topic("frame").timeout(LONG).open().unwrap();
    assert_eq!((frame.dtype(), frame.shape()), (Some(DType::F32), Some(&[Some(2), Some(3)][..])));
    let frames = frame.subscriber(Policy::Block).unwrap();
    assert_eq!(receive(&frames).0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    publisher.wait().expect(0);

    let refused = |arguments: &[&str], code| sandbox.run(publishing(arguments)).expect(code).stderr;
    assert!(refused(&["two", "--dtype", "uint8"], 2).contains("float32 [2]"));
    let odd = sandbox.file("odd.raw", [0; 9]);
    assert!(refused(&["two", odd.to_str().unwrap()], 2).contains("9 bytes"));
    assert!(refused(&["new", "--shape", "4x3"], 2).contains("any"));
    assert!(refused(&["new", "--dtype", "uint8"], 2).contains("max_bytes"));
    refused(&["two", "/nowhere"], 3);
    let late = refused(&["two", path, "--wait-subscribers", "2", "--wait", "0.05"], 7);
    assert!(late.contains("2 subscribers"), "{late}");
    refused(&["two", path, "--wait", "1"], 2);
}

// Holds 207.
#[test]
fn topic_of_a_player_has_room_for_the_largest_sample_of_the_file() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let path = sandbox.path().join("growing.mcap");
    let sample = |values: u64| ("x", values, message(&[values], "", &vec![0; 4 * values as usize]));
    let growing = [sample(1), sample(20), sample(3000), ("other", 9, message(&[9000], "", &[0; 36_000])), sample(2)];
    let create = |arguments: &[&str]| {
        let player = sandbox.spawn(play(&path, &[&["again", "--channel", "x", "--loop"], arguments].concat()));
        let again = domain.topic("again").timeout(LONG).open().unwrap();
        let subscriber = again.subscriber(Policy::Block).unwrap();
        while receive(&subscriber).0.len() != 3000 {}
        player.signal(Signal::INT);
        player.wait().expect(0);
        again
    };
    // What the file says is too little, is missing, or is more than the file can hold.
    for facts in [&[("max_bytes", "64")][..], &[], &[("max_bytes", "1099511627776"), ("depth", "4096")]] {
        messages_of(&path, facts, &growing);
        let again = create(&[]);
        assert_eq!((again.max_bytes(), again.depth()), (12_000, 4), "{facts:?}");
    }
    let wrong = [("dtype", "uint8"), ("shape", "1000000,1000000"), ("depth", "32")];
    messages_of(&path, &wrong, &growing);
    let again = create(&[]);
    assert_eq!((again.dtype(), again.shape(), again.max_bytes(), again.depth()), (None, None, 12_000, 32));
    drop(again);
    assert_eq!(create(&["--max-bytes", "64KiB"]).max_bytes(), 64 << 10);
    let small = sandbox.run(play(&path, &["again", "--channel", "x", "--max-bytes", "80"])).expect(2).stderr;
    assert!(small.contains("12000"), "{small}");
}

/// The process may not have more memory than a few times the file. Drivers of GPUs reserve far more addresses.
// Holds 207.
#[test]
fn host_memory_for_what_a_damaged_file_claims_is_not_allocated() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let path = sandbox.path().join("f.mcap");
    file(&path, &[("x", 0, 1.0)]);
    let whole = fs::read(&path).unwrap();
    let huge = 0x7f00_0000_u32.to_le_bytes();
    let chunk = first_chunk(&whole);
    // A length of a text in the header and in the channel, in the name of a chunk's compression, and of a record.
    let topic = whole.windows(5).position(|bytes| bytes == [1, 0, 0, 0, b'x']).unwrap();
    let encoding = whole.windows(11).position(|bytes| bytes == b"safetensors").unwrap() - 4;
    let key = whole.windows(9).position(|bytes| bytes == b"max_bytes").unwrap() - 4;
    for (at, code, why) in [
        (mcap::MAGIC.len() + 9, 0, ""),
        (topic, 5, "is damaged"),
        (encoding, 5, "is damaged"),
        (key, 5, "is damaged"),
        (key + 13, 5, "is damaged"),
        (chunk.start + 9 + 28, 5, "is damaged"),
        (chunk.start + 9 + 32, 5, "is damaged"),
        (chunk.start + 1, 3, "has no samples"),
        (chunk.start + 9 + 40 + 1, 5, "is damaged"),
    ] {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&huge);
        // Without a checksum the chunk is read as it is.
        bytes[chunk.start + 9 + 24..chunk.start + 9 + 28].fill(0);
        fs::write(&path, bytes).unwrap();
        let mut limited = sandbox.program("sh");
        limited.args(["-c", "ulimit -v 2000000; exec \"$0\" \"$@\""]).arg(partywall_harness::binary());
        let printed = Running::spawn(limited.args(play(&path, &["t"]))).wait();
        assert!(printed.code == Some(code) && printed.stderr.contains(why), "{at}: {printed:?}");
    }
}

#[test]
fn player_waits_for_subscribers() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let path = sandbox.path().join("f.mcap");
    file(&path, &[("x", 0, 1.0), ("x", 1, 2.0)]);
    let screen = topic(&domain, "screen");
    let late = sandbox.run(play(&path, &["screen", "--wait-subscribers", "1", "--wait", "0.05"])).expect(7).stderr;
    assert!(late.contains("cannot begin: topic \"screen\" did not have 1 subscriber within"), "{late}");
    assert_eq!(screen.stats().published, 0);
    let player = sandbox.spawn(play(&path, &["screen", "--wait-subscribers", "2"]));
    let first = screen.subscriber(Policy::Block).unwrap();
    eventually("it waits", || !screen.stats().publishers.is_empty());
    let second = screen.subscriber(Policy::Block).unwrap();
    for subscriber in [&first, &second] {
        assert_eq!([receive(subscriber).0, receive(subscriber).0], [[1.0], [2.0]]);
    }
    player.wait().expect(0);
}

#[test]
fn echo_says_what_it_waits_for_and_ends_with_an_idle_topic() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain, "camera");
    let echo = |more: &[&str]| {
        let mut command = sandbox.command([&["topic", "echo", "camera"][..], more].concat());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let remarks = BufReader::new(child.stderr.take().unwrap()).lines();
        (child, remarks)
    };
    let expect = |remarks: &mut Lines<BufReader<ChildStderr>>, part: &str| {
        let remark = remarks.next().unwrap_or_else(|| panic!("it ends before {part:?}")).unwrap();
        assert!(remark.contains(part), "{part:?} is not in {remark:?}");
    };
    let (mut idle, mut of_idle) = echo(&["--until-idle", "--block"]);
    let (mut patient, mut of_patient) = echo(&["--count", "3"]);
    expect(&mut of_idle, "waiting for a publisher of camera; Ctrl-C ends it");
    expect(&mut of_patient, "waiting for a publisher of camera; Ctrl-C ends it");
    let publisher = camera.publisher().unwrap();
    publish(&publisher, &[1.0], b"");
    publish(&publisher, &[2.0], b"");
    expect(&mut of_patient, "camera has 1 publisher now");
    drop(publisher);
    expect(&mut of_patient, "the last publisher of camera has left; waiting for another");
    assert!(idle.wait().unwrap().success());
    let rest: Vec<String> = of_idle.map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line == "the last publisher of camera has left"), "{rest:?}");
    assert!(rest.last().unwrap().contains("2 samples in"), "{rest:?}");
    publish(&camera.publisher().unwrap(), &[3.0], b"");
    assert!(patient.wait().unwrap().success());
    // A subscriber that starts too late.
    let end = sandbox.json(["topic", "echo", "camera", "--until-idle"]);
    assert_eq!((&end["event"], &end["samples"]), (&json!("end"), &json!(0)));
}

#[test]
fn name_of_another_kind_is_refused_with_the_command_for_it() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _segment = domain.create("weights", place()).tensor("w", DType::U8, &[4]).allocate().unwrap().commit().unwrap();
    let _pool = domain.pool("pool").blocks(1).block_bytes(64).place(place()).create().unwrap();
    let _timeline = domain.timeline_writer("clock").unwrap();
    for command in ["echo", "hz", "bw", "info"] {
        for (name, code, is, advice) in [
            ("weights", 2, "is a segment, not a topic", "partywall get weights FILE"),
            ("pool", 2, "is a pool, not a topic", "partywall show pool"),
            ("clock", 3, "timeline", "partywall show clock"),
        ] {
            let printed = sandbox.run(["topic", command, name]).expect(code).stderr;
            assert!(printed.contains(is) && printed.contains(advice), "{command}: {printed}");
        }
        let printed = sandbox.run(["topic", command, "missing"]).expect(3).stderr;
        assert!(
            printed.contains("is named \"missing\"") && printed.contains("`partywall ls` lists"),
            "{command}: {printed}"
        );
    }
}

#[test]
fn echo_prints_samples_as_they_arrive() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain, "camera");
    let publisher = camera.publisher().unwrap();
    let mut echo = listening(&sandbox, &camera, &["topic", "echo", "camera", "--count", "2", "--json"]);
    publish(&publisher, &[0.5, 2.0], b"left");
    publish(&publisher, &[], b"");
    let lines: Vec<Value> = (0..3).map(|_| serde_json::from_str(&echo.line()).unwrap()).collect();
    for (key, value) in [
        ("event", json!("sample")),
        ("position", json!(0)),
        ("sequence", json!(0)),
        ("missed", json!(0)),
        ("dtype", json!("float32")),
        ("shape", json!([2])),
        ("bytes", json!(8)),
        ("header", json!("6c656674")),
        ("values", json!([0.5, 2.0])),
        ("values_left_out", json!(0)),
        ("error", Value::Null),
    ] {
        assert_eq!(lines[0][key], value, "{key}");
    }
    assert!(lines[0]["age_ns"].as_u64() > Some(0), "{}", lines[0]);
    let ages = &lines[2]["ages"];
    let [p50, p99, max] = ["p50_ns", "p99_ns", "max_ns"].map(|key| ages[key].as_u64().unwrap());
    assert!(ages["count"] == 2 && p50 > 0 && p50 <= p99 && p99 <= max, "{ages}");
    assert_eq!((&lines[1]["position"], &lines[1]["values"]), (&json!(1), &json!([])));
    assert_eq!((&lines[2]["event"], &lines[2]["samples"], &lines[2]["failed"]), (&json!("end"), &json!(2), &json!(0)));
    echo.wait().expect(0);

    let echo = listening(&sandbox, &camera, &["topic", "echo", "camera", "--count", "1"]);
    publish(&publisher, &[0.5; 9], b"left");
    let printed = echo.wait().expect(0);
    for part in ["float32 [9]", "header \"left\"", "0.5, 0.5 and 1 more", "lag 0"] {
        assert!(printed.text().contains(part), "{part:?} is missing: {printed:?}");
    }
    assert!(
        printed.stderr.contains("1 sample in") && printed.stderr.contains("age when received: median "),
        "{printed:?}"
    );
    let nothing = sandbox.json(["topic", "echo", "camera", "--for", "0.1"]);
    assert_eq!((&nothing["event"], &nothing["samples"]), (&json!("end"), &json!(0)));
    assert_eq!(nothing["ages"], Value::Null);

    let interrupted = listening(&sandbox, &camera, &["topic", "echo", "camera"]);
    interrupted.signal(Signal::INT);
    assert!(interrupted.wait().expect(0).stderr.contains("0 samples in"));
}

#[test]
fn play_keeps_or_scales_the_recorded_pace_once_or_in_a_loop() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let path = sandbox.path().join("f.mcap");
    file(&path, &[("x", 5_000_000_000, 1.0), ("x", 5_300_000_000, 2.0)]);
    let screen = topic(&domain, "screen");
    let subscriber = screen.subscriber(Policy::Block).unwrap();
    let played = sandbox.run(play(&path, &["screen", "--json"])).expect(0).json();
    assert!(played["seconds"].as_f64().unwrap() >= 0.3, "{played}");
    let played = sandbox.run(play(&path, &["screen", "--json", "--rate", "0.5"])).expect(0).json();
    assert!(played["seconds"].as_f64().unwrap() >= 0.6, "{played}");
    for number in [1.0, 2.0, 1.0, 2.0] {
        assert_eq!(receive(&subscriber).0, [number]);
    }
    let endless = sandbox.spawn(play(&path, &["screen", "--rate", "1000", "--loop"]));
    for turn in 0..20 {
        assert_eq!(receive(&subscriber).0, [1.0 + (turn % 2) as f32]);
    }
    endless.signal(Signal::INT);
    endless.wait().expect(0);
}

#[test]
fn killed_recorder_leaves_its_written_samples() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain, "camera");
    let publisher = camera.publisher().unwrap();
    let path = sandbox.path().join("camera.mcap");
    let recording = listening(&sandbox, &camera, &["topic", "record", "camera", path.to_str().unwrap()]);
    publish(&publisher, &[1.0], b"");
    publish(&publisher, &[2.0], b"");
    let is_written = || fs::metadata(&path).is_ok_and(|file| file.len() > 300);
    eventually("what has come is written, although that was little", is_written);
    recording.kill();
    let again = topic(&domain, "again");
    let subscriber = again.subscriber(Policy::Block).unwrap();
    let played = sandbox.run(play(&path, &["again", "--json"])).expect(0).json();
    assert_eq!((&played["cut_off"], &played["samples"]), (&json!(true), &json!(2)));
    assert_eq!(receive(&subscriber).0, [1.0]);
}

/// The other process may read the former file.
#[test]
fn recording_replaces_a_file_in_one_step() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera = topic(&domain, "camera");
    let publisher = camera.publisher().unwrap();
    let path = sandbox.file("camera.mcap", "former");
    let former = fs::File::open(&path).unwrap();
    let arguments = ["topic", "record", "camera", path.to_str().unwrap(), "--force", "--count", "1"];
    let recording = listening(&sandbox, &camera, &arguments);
    publish(&publisher, &[1.0], b"");
    recording.wait().expect(0);
    assert_eq!(std::io::read_to_string(former).unwrap(), "former");
    assert!(fs::read(&path).unwrap().starts_with(mcap::MAGIC));
}

/// A file can be truncated, for example if the disk was full after half of the file was written.
#[test]
fn whole_chunks_of_a_truncated_file_are_played() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let path = sandbox.path().join("f.mcap");
    let large = message(&[1 << 16], "", &[0; 4 << 16]);
    messages(&path, &[("x", 0, message(&[1], "", &1.0_f32.to_le_bytes()))]);
    let first = fs::read(&path).unwrap();
    messages(&path, &[("x", 0, large)]);
    let second = fs::read(&path).unwrap();
    // The first file including its first chunk, then half of the first chunk of the second file.
    let whole = first_chunk(&first);
    let torn = first_chunk(&second);
    let half = torn.start..torn.start + torn.len() / 2;
    fs::write(&path, [&first[..whole.end], &second[half]].concat()).unwrap();
    let screen = topic(&domain, "screen");
    let played = sandbox.run(play(&path, &["screen", "--json"])).expect(0).json();
    assert_eq!((&played["cut_off"], &played["samples"]), (&json!(true), &json!(1)));
    assert_eq!(screen.stats().published, 1);
}

#[test]
fn files_that_cannot_be_played_say_why() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let screen = topic(&domain, "screen");
    let refused = |path: &Path, rest: &[&str], code: i32| sandbox.run(play(path, rest)).expect(code).stderr;
    let missing = refused(&sandbox.path().join("missing"), &["screen"], 3);
    assert!(missing.contains("cannot be opened"), "{missing}");
    sandbox.file("text", b"no such thing, but longer than a magic number is");
    assert!(refused(&sandbox.path().join("text"), &["screen"], 5).contains("not an MCAP file"));
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    sandbox.file("pointer.mcap", pointer);
    let pointer = refused(&sandbox.path().join("pointer.mcap"), &["screen"], 5);
    assert!(pointer.contains("Git LFS") && pointer.contains("git lfs pull"), "{pointer}");
    sandbox.file("empty", b"");
    assert!(refused(&sandbox.path().join("empty"), &["screen"], 5).contains("not an MCAP file"));
    assert!(refused(sandbox.path(), &["screen"], 5).contains("not a regular file"));

    // Other tools compress chunks by default. The name of the compression follows a chunk's times, length and checksum.
    let path = sandbox.path().join("compressed.mcap");
    file(&path, &[("x", 0, 1.0)]);
    let mut bytes = fs::read(&path).unwrap();
    let chunk = first_chunk(&bytes);
    let name = chunk.start + 9 + 3 * 8 + 4;
    assert_eq!(bytes[name..name + 4], [0; 4], "it has none");
    bytes.splice(name..name + 4, [&4_u32.to_le_bytes()[..], b"zstd"].concat());
    let longer = (chunk.len() - 9 + 4) as u64;
    bytes[chunk.start + 1..chunk.start + 9].copy_from_slice(&longer.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let compressed = refused(&path, &["screen"], 5);
    assert!(compressed.contains("is compressed (zstd)") && compressed.contains("--compression none"), "{compressed}");

    let two = sandbox.path().join("two.mcap");
    file(&two, &[("a", 0, 1.0), ("b", 0, 2.0)]);
    let choose = refused(&two, &["screen"], 2);
    assert!(choose.contains("of a and of b") && choose.contains("--channel"), "{choose}");
    let subscriber = screen.subscriber(Policy::Block).unwrap();
    sandbox.run(play(&two, &["screen", "--channel", "b"])).expect(0);
    while receive(&subscriber).0 != [2.0] {}
    drop(subscriber);
    let unknown = refused(&two, &["screen", "--channel", "c"], 3);
    assert!(unknown.contains("no samples of c") && unknown.contains("--channel: a, b"), "{unknown}");

    let whole = fs::read(&two).unwrap();
    for end in (0..whole.len()).step_by(23) {
        fs::write(sandbox.path().join("cut"), &whole[..end]).unwrap();
        let printed = sandbox.run(play(&sandbox.path().join("cut"), &["screen", "--channel", "a"]));
        assert!([Some(0), Some(3), Some(5)].contains(&printed.code), "cut off at {end}: {printed:?}");
    }
    let chunk = whole.windows(4).position(|bytes| bytes == 1.0_f32.to_le_bytes()).unwrap();
    let mut damaged = whole.clone();
    damaged[chunk] ^= 1;
    fs::write(sandbox.path().join("damaged"), damaged).unwrap();
    assert!(refused(&sandbox.path().join("damaged"), &["screen"], 5).contains("damaged"));

    let one = 1.0_f32.to_le_bytes();
    for (message, code, why) in [
        (b"none".to_vec(), 5, "truncated"),
        (message(&[2], "", &one), 5, "truncated"),
        (message(&[1], "0", &one), 5, "not hexadecimal text"),
        (message(&[1], &"00".repeat(257), &one), 2, "256 bytes"),
        (message(&[1; 9], "", &one), 2, "8 dimensions"),
    ] {
        let path = sandbox.path().join("odd");
        messages(&path, &[("a", 0, message)]);
        let printed = refused(&path, &["screen"], code);
        assert!(
            printed.contains(why) && (code == 2 || printed.contains("sample 1 of")),
            "{why:?} is missing: {printed}"
        );
    }

    let small = domain.topic("small").max_bytes(2).place(place()).create().unwrap();
    assert!(refused(&two, &["small", "--channel", "a"], 2).contains("small"));
    let other = domain.topic("other").max_bytes(64).dtype(DType::U8).place(place()).create().unwrap();
    let wrong = refused(&two, &["other", "--channel", "a"], 2);
    assert!(wrong.contains("float32") && wrong.contains("uint8"), "{wrong}");
    drop((small, other));
    let _pool = domain.pool("pool").blocks(1).block_bytes(64).place(place()).create().unwrap();
    refused(&two, &["pool", "--channel", "a"], 2);
    refused(&two, &["screen", "--rate", "0"], 2);
    refused(&two, &["a b"], 2);
}

#[test]
fn refused_recording_says_why() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _camera = topic(&domain, "camera");
    let record = |name: &str, file: &str, more: &[&str]| {
        sandbox.run([&["topic", "record", name, file, "--for", "0.1"][..], more].concat())
    };
    let file = sandbox.path().join("f.mcap");
    let file = file.to_str().unwrap();
    assert!(record("missing", file, &[]).expect(3).stderr.contains("missing"));
    assert!(!Path::new(file).exists(), "nothing is made for nothing");
    record("camera", file, &[]).expect(0);
    let there = record("camera", file, &[]).expect(5).stderr;
    assert!(there.contains("already exists") && there.contains("--force"), "{there}");
    record("camera", file, &["--force"]).expect(0);
    record("camera", "/nowhere/f", &[]).expect(3);
    record("camera", file, &["--count", "0"]).expect(2);
    sandbox.run(["topic", "echo", "missing"]).expect(3);
    sandbox.run(["topic", "echo", "camera", "--for", "x"]).expect(2);
    sandbox.run(["topic"]).expect(2);

    let full = domain.topic("full").max_bytes(64).subscribers(1).place(place()).create().unwrap();
    let subscriber = full.subscriber(Policy::Latest).unwrap();
    let recorded = fs::read(file).unwrap();
    record("full", file, &["--force"]).expect(5);
    assert_eq!(fs::read(file).unwrap(), recorded, "nothing is replaced by nothing");
    drop(subscriber);
    let publisher = full.publisher().unwrap();
    let complex = sandbox.path().join("complex.mcap");
    let recording = listening(&sandbox, &full, &["topic", "record", "full", complex.to_str().unwrap()]);
    publisher.loan(DType::C128, &[1], LONG).unwrap().filled().publish(LONG).unwrap();
    let refused = recording.wait().expect(5).stderr;
    assert!(refused.contains("complex128") && refused.contains("float64"), "{refused}");

    let _semaphore = domain.semaphore("gate", 1).unwrap();
    let gate = sandbox.run(["topic", "echo", "gate"]).expect(3).stderr;
    assert!(gate.contains("semaphore") && gate.contains("partywall show gate"), "{gate}");

    let full = record("camera", "/dev/full", &["--force"]).expect(5).stderr;
    assert!(full.contains("/dev/full cannot be written") && full.contains("make room"), "{full}");
}

#[test]
fn blocking_subscriber_is_listed_shown_and_evicted() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let camera =
        domain.topic("camera").max_bytes(64).depth(2).dtype(DType::F32).shape(&[1]).place(place()).create().unwrap();
    let publisher = camera.publisher().unwrap();
    let stopped = listening(&sandbox, &camera, &["topic", "echo", "camera", "--block"]);
    stopped.signal(Signal::STOP);
    let loan = || publisher.loan(DType::F32, &[1], LONG).unwrap().filled();
    // Publishes until the subscriber is as far behind as it may be; it may also be receiving one more sample.
    while loan().publish(Duration::from_millis(300)).is_ok() {}

    let list = sandbox.json(["ls"]);
    let name = &list["names"][0];
    let shape = &name["latest"]["control"];
    assert_eq!(shape["shape"], json!([1]));
    assert_eq!((&shape["kind"], &shape["depth"], &shape["dtype"]), (&json!("topic"), &json!(2), &json!("float32")));
    assert_eq!((&name["usage"]["publishers"], &name["usage"]["subscribers"]), (&json!(1), &json!(1)));
    let text = sandbox.run(["ls"]).expect(0).text();
    let cells: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(cells[..9], ["camera", kind(), &place().to_string(), "float32", "[1]", "2", "64", "1", "1"], "{text}");

    let pid = stopped.pid();
    eventually("it is hung", || sandbox.json(["show", "camera"])["detail"]["subscribers"][0]["state"] == "hung");
    let waiting = std::thread::spawn({
        let filled = loan();
        move || filled.publish(LONG).map(|_| ()).map_err(|failed| failed.error)
    });
    let mut shown = Value::Null;
    eventually("a publisher waits for it", || {
        shown = sandbox.json(["show", "camera"])["detail"].clone();
        shown["subscribers"][0]["stalled_ms"].is_u64()
    });
    let subscriber = &shown["subscribers"][0];
    assert_eq!(
        (&subscriber["pid"], &subscriber["policy"], &subscriber["lag"]),
        (&json!(pid), &json!("block"), &json!(2))
    );
    assert_eq!((&shown["audit"], &shown["publishers"][0]["blocked_by"]), (&json!("clean"), &subscriber["id"]));
    let text = sandbox.run(["show", "camera"]).expect(0).text();
    for part in [
        "samples    float32 [1]\n",
        "blocks     14 = depth 2 + 2 publishers × 2 loans + 4 subscribers × 2 held\n",
        "audit      clean",
        "hung",
        "block",
        "for subscriber",
    ] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    sandbox.run(["evict", &pid.to_string(), "--kill"]).expect(0);
    assert!(waiting.join().unwrap().is_ok(), "no process waits for it any more");
    stopped.kill();
}
