//! Timelines and semaphores as a user of the command sees them: `ls`, `show`, `status`, `stop`, `abandon`.

use std::time::Duration;

use partywall_harness::Sandbox;
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
    let row = |name: &str, maximum: u32, held: u32| json!({ "name": name, "maximum": maximum, "held": held, "waiting": 0, "leases": 1 });
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
    drop((permits, gate, other));
    assert_eq!(sandbox.json(["ls"])["semaphores"], json!([]));
    let missing = sandbox.run(["show", "gate"]).expect(3);
    assert!(missing.stderr.contains("no segment is named"), "{missing:?}");
}
