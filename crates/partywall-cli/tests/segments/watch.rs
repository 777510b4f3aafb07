//! `partywall watch`: its output for people and for programs.

use partywall_harness::{Running, Sandbox, Signal, binary, device, eventually};
use serde_json::{Value, json};

fn next(watch: &mut Running) -> Value {
    serde_json::from_str(&watch.line()).unwrap()
}

fn watch(sandbox: &Sandbox, arguments: &[&str]) -> (Running, Value) {
    let mut command = sandbox.command(["watch", "--json"]);
    let mut watch = Running::spawn(command.args(arguments));
    let first = next(&mut watch);
    assert_eq!((&first["event"], &first["socket"]), (&json!("watching"), &json!(sandbox.socket())));
    (watch, first["point"].clone())
}

/// Returns the facts of an event except its time.
fn facts(event: &Value) -> Vec<Value> {
    ["event", "named", "name", "version", "pid"].map(|key| event[key].clone()).into()
}

fn put(sandbox: &Sandbox, name: &str) {
    sandbox.file("f", "x");
    sandbox.run(["put", "f", name, "--device", device()]).expect(0);
}

#[test]
fn each_event_is_a_line() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let (mut events, _) = watch(&sandbox, &[]);
    put(&sandbox, "llm");
    put(&sandbox, "llm");
    let mut told: Vec<_> = std::iter::repeat_with(|| next(&mut events)).take(4).collect();
    // Removed only after the first reclaim, because a helper thread closes the memory at an unknown time.
    sandbox.run(["rm", "llm"]).expect(0);
    told.extend(std::iter::repeat_with(|| next(&mut events)).take(2));
    let pid = |i: usize| told[i]["pid"].clone();
    let expected = [
        json!(["created", "segment", "llm", null, pid(0)]),
        json!(["committed", "segment", "llm", 1, pid(0)]),
        json!(["committed", "segment", "llm", 2, pid(2)]),
        json!(["reclaimed", "segment", "llm", 1, null]),
        json!(["withdrawn", "segment", "llm", null, pid(4)]),
        json!(["reclaimed", "segment", "llm", 2, null]),
    ];
    assert_eq!(told.iter().map(facts).collect::<Vec<_>>(), expected.map(|event| event.as_array().unwrap().clone()));
    assert!(pid(0).is_u64() && pid(0) != pid(2), "{told:?}");
    assert!(told.iter().all(|event| event["at_ms"].as_u64().unwrap() > 1 << 40));
    assert_eq!(told[1]["bytes"], told[3]["bytes"]);
    events.signal(Signal::INT);
    events.wait().expect(0);
}

#[test]
fn watch_prints_sentences_for_people() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let mut events = sandbox.spawn(["watch", "l*"]);
    // The watch has started once it is a member.
    eventually("it watches", || sandbox.json(["ps"])["members"].as_array().unwrap().len() == 1);
    sandbox.file("f", "x");
    let mut holder = sandbox.spawn(["put", "f", "llm", "--hold", "--device", device()]);
    holder.line();
    put(&sandbox, "other");
    let pid = holder.pid();
    let line = events.line();
    assert!(line.contains(" UTC  created        llm by pid ") && line.ends_with(&pid.to_string()), "{line}");
    let line = events.line();
    assert!(line.contains("committed      llm@1, ") && line.ends_with(&format!("by pid {pid}")), "{line}");
    holder.kill();
    let line = events.line();
    assert!(line.ends_with(&format!("owner died     llm: pid {pid}")), "{line}");
    assert!(events.line().contains("reclaimed      llm@1, "));
    events.signal(Signal::TERM);
    let ended = events.wait().expect(0);
    assert!(ended.stderr.contains("watching names like l*") && ended.stderr.contains("--after"), "{ended:?}");
    assert!(!ended.text().contains("other"), "{ended:?}");
}

#[test]
fn watch_continues_after_the_point_of_an_earlier_one() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    put(&sandbox, "before");
    let (mut events, begin) = watch(&sandbox, &[]);
    put(&sandbox, "a");
    let created = next(&mut events);
    assert_eq!(facts(&created)[..3], [json!("created"), json!("segment"), json!("a")]);
    events.kill();
    put(&sandbox, "b");
    let point = created["point"].as_str().unwrap();
    let (mut events, again) = watch(&sandbox, &["--after", point]);
    assert_eq!(again, created["point"]);
    let told: Vec<_> =
        std::iter::repeat_with(|| next(&mut events)).take(3).map(|event| facts(&event)[..3].to_vec()).collect();
    let expected = [("committed", "a"), ("created", "b"), ("committed", "b")];
    assert_eq!(told, expected.map(|(event, name)| vec![json!(event), json!("segment"), json!(name)]));
    drop(events);
    let (mut events, _) = watch(&sandbox, &["--after", begin.as_str().unwrap(), "b"]);
    assert_eq!(next(&mut events)["name"], "b");
    drop(events);

    // A point of another broker: earlier events are reported as missed, and the events of this broker follow.
    let (mut events, _) = watch(&sandbox, &["--after", "0123456789abcdef-7", "b"]);
    let missed = next(&mut events);
    assert_eq!((&missed["event"], &missed["events"]), (&json!("missed"), &Value::Null));
    assert_eq!(next(&mut events)["event"], "created");
    drop(events);
    let mut text = sandbox.spawn(["watch", "--after", "0123456789abcdef-7"]);
    assert!(text.line().contains("list all names again"));
}

#[test]
fn watch_ends_with_its_broker_and_says_so() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let (events, point) = watch(&sandbox, &[]);
    let text = sandbox.spawn(["watch"]);
    eventually("both watch", || sandbox.json(["ps"])["members"].as_array().unwrap().len() == 2);
    sandbox.run(["stop", "--force"]).expect(0);
    let ended = events.wait().expect(4);
    let last: Value = serde_json::from_str(ended.text().lines().last().unwrap()).unwrap();
    assert_eq!((&last["error"]["entry"], &last["point"]), (&json!("broker-gone"), &point));
    let ended = text.wait().expect(4);
    assert!(ended.stderr.contains("is gone") && ended.stderr.contains("the last point was"), "{ended:?}");
    sandbox.broker();
}

#[test]
fn watch_ends_with_its_reader() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    // No event occurs, so the command never prints.
    let mut shell = sandbox.program("sh");
    shell.args(["-c", "\"$0\" watch --json | head -n 1"]).arg(binary());
    let output = Running::spawn(&mut shell).wait().expect(0);
    assert!(output.text().contains("watching"), "{output:?}");
    eventually("it has left", || sandbox.json(["ps"])["members"] == json!([]));
}

#[test]
fn invalid_patterns_and_points_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    for (arguments, word) in [
        (&["watch", "a b"][..], "a pattern consists of"),
        (&["watch", "[ab]"], "a pattern consists of"),
        (&["watch", ""], "at least one character"),
        (&["watch", "--after", "yesterday"], "no point"),
        (&["ls", "[ab]"], "a pattern consists of"),
    ] {
        let refused = sandbox.run(arguments).expect(2);
        assert!(refused.stderr.contains(word), "{refused:?}");
    }
    sandbox.run(["stop"]).expect(0);
    sandbox.run(["watch"]).expect(4);
    sandbox.broker();
}
