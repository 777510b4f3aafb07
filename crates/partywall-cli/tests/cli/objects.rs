//! Timelines and semaphores as a user of the command sees them: `ls`, `show`, `status`, `stop`, `abandon`.

use std::time::Duration;

use partywall::{DType, Error, TimelineEnding, error::Gone};
use partywall_harness::{Sandbox, eventually, place};
use serde_json::{Value, json};

#[test]
fn semaphores_are_listed_and_shown() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let gate = domain.semaphore("gate", 3).unwrap();
    let other = domain.semaphore("other/gate", 1).unwrap();
    let permits = [gate.acquire(Duration::ZERO).unwrap(), gate.acquire(Duration::ZERO).unwrap()];
    let pid = std::process::id();

    let list = sandbox.json(["ls"]);
    let user = rustix::process::geteuid().as_raw();
    let row = |name: &str, maximum: u32, held: u32| {
        json!({
            "name": name, "maximum": maximum, "held": held, "waiting": 0, "leases": 1, "uid": user, "shared": false,
        })
    };
    assert_eq!(list["semaphores"], json!([row("gate", 3, 2), row("other/gate", 1, 0)]));
    assert_eq!((&list["names"], &list["timelines"]), (&json!([]), &json!([])));
    assert_eq!(sandbox.json(["ls", "other/*"])["semaphores"], json!([row("other/gate", 1, 0)]));
    let text = sandbox.run(["ls"]).expect(0).text();
    let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines[0], ["SEMAPHORE", "PERMITS", "HELD", "WAITING", "LEASES"]);
    assert_eq!(lines[1..], [["gate", "3", "2", "0", "1"], ["other/gate", "1", "0", "0", "1"]]);

    let show = sandbox.json(["show", "gate"]);
    assert_eq!(
        (&show["name"], &show["timeline"], &show["semaphore"]["held"]),
        (&json!("gate"), &Value::Null, &json!(2))
    );
    let holder = &show["semaphore"]["holders"][0];
    assert_eq!((&holder["pid"], &holder["leases"], &holder["permits"]), (&json!(pid), &json!(1), &json!(2)));
    let text = sandbox.run(["show", "gate"]).expect(0).text();
    assert!(text.contains("2 of 3 are held") && text.contains("PERMITS") && text.contains(&pid.to_string()), "{text}");
    assert_eq!(sandbox.json(["status"])["semaphores"], 2);

    let refused = sandbox.run(["stop"]).expect(5);
    assert!(refused.stderr.contains("semaphore gate") && refused.stderr.contains("2 names"), "{refused:?}");
    assert_eq!(sandbox.run(["stop", "--json"]).expect(5).json()["semaphores"].as_array().unwrap().len(), 2);
    let refused = sandbox.run(["rm", "gate"]).expect(5);
    let why = "semaphore \"gate\" cannot be removed: it ends with the last process that has it open";
    assert!(refused.stderr.contains(why) && refused.stderr.contains("partywall show gate"), "{refused:?}");
    drop((permits, gate, other));
    assert_eq!(sandbox.json(["ls"])["semaphores"], json!([]));
    let missing = sandbox.run(["show", "gate"]).expect(3);
    assert!(missing.stderr.contains("no segment, pool, topic or queue is named"), "{missing:?}");
}

#[test]
fn timelines_are_listed_and_shown() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let waiter = domain.timeline("grads").unwrap();
    let user = rustix::process::geteuid().as_raw();
    let row = |value: u64, writer: Value, ending: Value, incarnation: u32, leases: u32| {
        json!([{
            "name": "grads", "incarnation": incarnation, "value": value, "announced": value, "writer": writer,
            "ending": ending, "leases": leases, "uid": user, "shared": false,
        }])
    };
    let pid = json!(std::process::id());
    assert_eq!(sandbox.json(["ls"])["timelines"], row(0, Value::Null, Value::Null, 1, 1));
    assert!(sandbox.run(["show", "grads"]).expect(0).text().contains("none yet"));

    let writer = domain.timeline_writer("grads").unwrap();
    writer.signal(7).unwrap();
    assert_eq!(sandbox.json(["ls"])["timelines"], row(7, pid.clone(), Value::Null, 1, 2));
    let text = sandbox.run(["ls"]).expect(0).text();
    let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines[0], ["TIMELINE", "VALUE", "PROMISED", "LEASES", "WRITER"]);
    assert_eq!(lines[1], ["grads", "7", "7", "2", "pid", &pid.to_string()]);
    assert_eq!(sandbox.json(["status"])["timelines"], 1);
    let refused = sandbox.run(["stop"]).expect(5);
    assert!(refused.stderr.contains(&format!("grads, writer: pid {pid}")), "{refused:?}");
    let mistyped = sandbox.run(["show", "grad"]).expect(3);
    assert!(mistyped.stderr.contains("no timeline is named") && mistyped.stderr.contains("grads"), "{mistyped:?}");

    let refused = sandbox.run(["rm", "grads"]).expect(5);
    assert!(refused.stderr.contains("timeline \"grads\" cannot be removed"), "{refused:?}");
    assert!(refused.stderr.contains("`partywall abandon grads`"), "{refused:?}");

    drop(writer);
    eventually("it is closed", || sandbox.json(["ls"])["timelines"] == row(7, Value::Null, json!("closed"), 1, 1));
    let text = sandbox.run(["show", "grads"]).expect(0).text();
    assert!(text.contains("none: it has closed") && text.contains("holders"), "{text}");
    drop(waiter);
    eventually("it is gone", || sandbox.json(["ls"])["timelines"] == json!([]));
}

#[test]
fn abandon_ends_all_waits_for_a_hung_writer() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let waiter = domain.timeline("t").unwrap();
    let writer = domain.timeline_writer("t").unwrap();
    writer.signal(2).unwrap();
    let waiting = std::thread::spawn(move || waiter.wait(3, Duration::from_secs(60)));
    let text = sandbox.run(["abandon", "t"]).expect(0).text();
    assert!(text.contains("all waits for timeline \"t\" have ended"), "{text}");
    let error = waiting.join().unwrap().unwrap_err();
    assert!(
        matches!(&error, Error::Gone(Gone::Timeline { ending: TimelineEnding::Abandoned, wanted: 3, last: 2, .. })),
        "{error}"
    );
    assert!(writer.signal(3).is_err(), "its turn is over");
    let next = domain.timeline_writer("t").unwrap();
    assert_eq!(next.timeline().value(), 2);

    let abandoned = sandbox.json(["abandon", "t"]);
    assert_eq!((&abandoned["name"], &abandoned["abandoned"]), (&json!("t"), &json!(true)));
    assert_eq!(sandbox.json(["show", "t"])["timeline"]["ending"], "abandoned");
    let missing = sandbox.run(["abandon", "tt"]).expect(3);
    assert!(missing.stderr.contains("no timeline is named \"tt\""), "{missing:?}");
    sandbox.run(["abandon", "t t"]).expect(2);
    sandbox.run(["abandon"]).expect(2);
}

#[test]
fn one_name_is_a_segment_a_timeline_and_a_semaphore() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let build = domain.create("x", place()).tensor("w", DType::U8, &[4]).allocate().unwrap();
    let segment = build.commit().unwrap();
    let timeline = domain.timeline("x").unwrap();
    let semaphore = domain.semaphore("x", 2).unwrap();
    let show = sandbox.json(["show", "x"]);
    assert_eq!((&show["version"], &show["timeline"]["name"]), (&json!(1), &json!("x")));
    assert_eq!(show["semaphore"]["maximum"], 2);
    let text = sandbox.run(["show", "x"]).expect(0).text();
    for part in ["tensor", "timeline   x", "semaphore  x", "0 of 2 are held"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let version = sandbox.json(["show", "x@1"]);
    assert_eq!((&version["timeline"], &version["semaphore"]), (&Value::Null, &Value::Null));
    let text = sandbox.run(["ls"]).expect(0).text();
    assert!(text.starts_with("NAME") && text.contains("\n\nTIMELINE") && text.contains("\n\nSEMAPHORE"), "{text}");
    drop((segment, timeline, semaphore));
}
