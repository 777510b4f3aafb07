// Holds 315.
//! `partywall trace`, as its user sees it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use partywall::{DType, Domain, Place, Policy, Publisher, Task};
use partywall_harness::{Running, Sandbox, Signal, eventually};
use serde_json::Value;

const LONG: Duration = Duration::from_secs(60);

/// The events of a file.
fn events(path: &Path) -> Vec<Value> {
    let document: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    document["traceEvents"].as_array().unwrap().clone()
}

fn publish(publisher: &Publisher) {
    publisher.loan(DType::U8, &[1], LONG).unwrap().filled().publish(LONG).unwrap();
}

/// Returns a publisher, once a process of its own receives its samples.
fn topic(domain: &Domain) -> (partywall::Topic, Publisher) {
    let topic = domain.topic("frames").max_bytes(64).depth(4).place(Place::Host).create().unwrap();
    let publisher = topic.publisher().unwrap();
    (topic, publisher)
}

#[test]
fn arrows_connect_the_events_of_processes() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let (topic, publisher) = topic(&domain);
    let echo = sandbox.spawn(["topic", "echo", "frames", "--block", "--until-idle", "--quiet"]);
    eventually("it subscribes", || topic.stats().subscribers.len() == 1);
    let ours = topic.subscriber(Policy::Latest).unwrap();
    let writer = domain.timeline_writer("steps").unwrap();
    let steps = domain.timeline("steps").unwrap();
    let file = sandbox.path().join("t.json");
    let path = file.to_str().unwrap();
    let tracer = sandbox.spawn(["trace", "--seconds", "60", "--out", path, "--json"]);
    eventually("it traces", || domain.is_traced());
    let waiter = std::thread::spawn(move || steps.wait(5, LONG));
    for value in 1..=5 {
        publish(&publisher);
        drop(ours.recv(LONG).unwrap());
        writer.signal(value).unwrap();
    }
    waiter.join().unwrap().unwrap();
    eventually("the other process has received all", || topic.stats().subscribers[0].received == 5);
    drop(publisher);
    let peer = echo.pid();
    echo.wait().expect(0);
    // What it has recorded is read by the tracer's last reading.
    tracer.signal(Signal::INT);
    let printed: Value = serde_json::from_str(&tracer.wait().expect(0).text()).unwrap();
    assert_eq!((&printed["lost"], &printed["processes"]), (&Value::from(0), &Value::from(2)), "{printed}");
    assert!(!domain.is_traced());

    let events = events(&file);
    let pid = std::process::id();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    for part in ["publish frames 0", "receive frames 4", "release frames 4", "signal steps 5", "wait steps 5"] {
        assert!(slices.iter().any(|slice| slice["name"] == part), "{part} is missing: {slices:#?}");
    }
    let mut arrows: BTreeMap<u64, Vec<&Value>> = BTreeMap::new();
    for event in &events {
        if let Some(number) = event["id"].as_u64() {
            arrows.entry(number).or_default().push(event);
        }
    }
    assert_eq!(printed["arrows"], arrows.len());
    // Each has one start and one end, and leads through time; each point is in a slice of its thread.
    let mut from_us_to = BTreeSet::new();
    for points in arrows.values() {
        let kinds: String = points.iter().map(|point| point["ph"].as_str().unwrap()).collect();
        assert!(["sf", "stf"].contains(&kinds.as_str()), "{points:?}");
        assert!(points.is_sorted_by_key(|point| point["ts"].as_f64()), "{points:?}");
        for point in points {
            let at = point["ts"].as_f64().unwrap();
            let is_around = |slice: &&&Value| {
                let [from, dur] = ["ts", "dur"].map(|key| slice[key].as_f64().unwrap());
                (&slice["pid"], &slice["tid"]) == (&point["pid"], &point["tid"]) && from <= at && at <= from + dur
            };
            assert!(slices.iter().find(is_around).is_some(), "{point}");
        }
        let cat = points[0]["cat"].as_str().unwrap();
        assert_eq!(points[0]["pid"], pid);
        from_us_to.insert((cat, points[1]["pid"].as_u64().unwrap() as u32, kinds));
    }
    let sample = |pid| ("sample", pid, "stf".to_owned());
    let expected = BTreeSet::from([sample(pid), sample(peer), ("timeline", pid, "sf".to_owned())]);
    assert_eq!(from_us_to, expected);
    assert_eq!(arrows.len(), 5 + 5 + 1);
    let heads: Vec<_> = events.iter().filter(|event| event["ph"] == "M").collect();
    let head = heads.iter().find(|head| head["pid"] == peer).unwrap();
    assert!(head["args"]["name"].as_str().unwrap().contains("topic echo frames"), "{heads:?}");
}

#[test]
fn arrow_leads_a_task_through_its_attempts() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = domain.queue("jobs").tasks(4).inputs(1, 64).outputs(2, 64).place(Place::Host).open_or_create().unwrap();
    let file = sandbox.path().join("t.json");
    let path = file.to_str().unwrap();
    let tracer = sandbox.spawn(["trace", "jobs", "--seconds", "60", "--out", path, "--json"]);
    eventually("it traces", || domain.is_traced());
    let ticket = queue.submit(Task::new("true"), LONG).unwrap();
    queue.claim(LONG).unwrap().fail("not today").unwrap();
    queue.claim(LONG).unwrap().complete().unwrap();
    ticket.wait(LONG).unwrap();
    tracer.signal(Signal::INT);
    let printed: Value = serde_json::from_str(&tracer.wait().expect(0).text()).unwrap();
    assert_eq!((&printed["lost"], &printed["arrows"]), (&0.into(), &1.into()), "{printed}");

    let events = events(&file);
    let names = |event: &Value| event["name"].as_str().unwrap().split_once(' ').unwrap().0.to_owned();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    let seen: Vec<_> = slices.iter().map(|slice| (names(slice), slice["args"]["attempt"].as_u64().unwrap())).collect();
    let expected = [("submit", 0), ("claim", 1), ("fail", 1), ("claim", 2), ("complete", 2), ("take", 2)];
    assert!(seen.iter().map(|(name, attempt)| (name.as_str(), *attempt)).eq(expected), "{seen:?}");
    let points: Vec<_> = events.iter().filter(|event| event["cat"] == "task").collect();
    let kinds: String = points.iter().map(|point| point["ph"].as_str().unwrap()).collect();
    assert_eq!(kinds, "sttttf");
    // Each point is in the slice of its event.
    for (point, slice) in points.iter().zip(&slices) {
        let [from, dur] = ["ts", "dur"].map(|key| slice[key].as_f64().unwrap());
        let at = point["ts"].as_f64().unwrap();
        assert!(point["pid"] == slice["pid"] && from <= at && at < from + dur, "{point} {slice}");
    }
}

#[test]
fn only_names_that_match_are_traced_and_no_more_events_than_wanted() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let (_topic, publisher) = topic(&domain);
    let writer = domain.timeline_writer("steps").unwrap();
    let file = sandbox.path().join("t.json");
    let path = file.to_str().unwrap();
    let trace = |more: &[&str], action: &dyn Fn()| -> Value {
        let tracer = sandbox.spawn([&["trace", "--seconds", "60", "--out", path, "--json"][..], more].concat());
        eventually("it traces", || domain.is_traced());
        action();
        tracer.signal(Signal::INT);
        serde_json::from_str(&tracer.wait().expect(0).text()).unwrap()
    };
    let printed = trace(&["fra*"], &|| {
        publish(&publisher);
        writer.signal(1).unwrap();
    });
    assert_eq!((&printed["events"], &printed["lost"]), (&Value::from(1), &Value::from(0)), "{printed}");
    let printed = trace(&["--force", "--max-events", "3"], &|| (0..5).for_each(|_| publish(&publisher)));
    assert_eq!((&printed["events"], &printed["lost"]), (&Value::from(3), &Value::from(2)), "{printed}");
}

// Holds 305.
#[test]
fn killed_tracer_leaves_nothing_on() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let (_topic, publisher) = topic(&domain);
    let tracer = sandbox.spawn(["trace", "--seconds", "60", "--out", sandbox.path().join("t.json").to_str().unwrap()]);
    eventually("it traces", || domain.is_traced());
    tracer.kill();
    assert!(domain.is_traced(), "its lease lasts longer");
    assert!(!sandbox.path().join("t.json").exists(), "an incomplete file");
    eventually("no process records any more", || {
        publish(&publisher);
        !domain.is_traced()
    });
}

#[test]
fn wrong_file_is_refused_before_anything_is_traced() {
    let sandbox = Sandbox::new();
    let file = sandbox.path().join("t.json");
    let path = file.to_str().unwrap();
    sandbox.run(["trace", "--out", path]).expect(4);
    assert!(!file.exists(), "there is no domain");
    sandbox.broker();
    fs::write(&file, "mine").unwrap();
    let refused = sandbox.run(["trace", "--out", path]).expect(5);
    assert!(refused.stderr.contains("already exists") && refused.stderr.contains("--force"), "{refused:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    // Ended by the end of its terminal, and not only by Ctrl-C, it replaces the file.
    let domain = sandbox.domain();
    let tracer = sandbox.spawn(["trace", "--seconds", "60", "--force", "--out", path]);
    eventually("it traces", || domain.is_traced());
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    tracer.signal(Signal::HUP);
    tracer.wait().expect(0);
    assert_eq!(events(&file), [Value::Null; 0]);
    let lost = sandbox.run(["trace", "--out", "/missing/t.json"]).expect(3);
    assert!(lost.stderr.contains("cannot create /missing/t.json") && lost.stderr.contains("--out"), "{lost:?}");
    sandbox.run(["trace", "a b"]).expect(2);
}

// Holds 306.
#[test]
fn standard_output_has_the_trace_alone() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    for (out, json) in [("-", &[][..]), ("/dev/stdout", &[]), ("-", &["--json"])] {
        let printed = sandbox.run([&["trace", "--seconds", "0.01", "--out", out][..], json].concat()).expect(0);
        let trace: Value = serde_json::from_str(&printed.text()).unwrap();
        assert!(trace["traceEvents"].is_array() && printed.stderr.contains("lost"), "{printed:?}");
    }
    assert!(!Path::new("-").exists());
    // A reader that has enough is not a failure.
    let shell = "\"$0\" trace --seconds 0.01 --out - 2>/dev/null | true; echo ${PIPESTATUS[0]}";
    let mut piped = sandbox.program("bash");
    piped.args(["-c", shell]).arg(partywall_harness::binary());
    assert_eq!(Running::spawn(&mut piped).wait().expect(0).text(), "0\n");
}

#[test]
fn name_of_nothing_is_refused_before_anything_is_traced() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let (_topic, _publisher) = topic(&domain);
    let _line = domain.timeline_writer("steps").unwrap();
    let _pool = domain.pool("pool").blocks(1).block_bytes(8).place(partywall::Place::Host).create().unwrap();
    let file = sandbox.path().join("t.json");
    let path = file.to_str().unwrap();
    for (names, unknown) in [(&["frmes"][..], "frmes"), (&["frames", "step", "steps"], "step"), (&["p*"], "p*")] {
        let refused = sandbox.run([&["trace", "--out", path][..], names].concat()).expect(3);
        let sentence = format!("no topic, queue or timeline matches {unknown:?}");
        assert!(refused.stderr.contains(&sentence) && refused.stderr.contains("partywall ls"), "{refused:?}");
        assert!(!file.exists() && !domain.is_traced());
    }
    sandbox.run(["trace", "frames", "steps", "--seconds", "0.01", "--out", path]).expect(0);
}
