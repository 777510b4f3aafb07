//! Pools as a user of the command sees them: `ls`, `show`, `ps`, `watch`, `rm`.

use std::time::Duration;

use partywall::{Error, error::NotFound};
use partywall_harness::{Sandbox, kind, place};
use serde_json::{Value, json};

#[test]
fn pools_are_listed_shown_and_removed() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let pool = domain.pool("frames").blocks(4).block_bytes(1000).place(place()).zeroed(true).create().unwrap();
    let held = pool.alloc(Duration::ZERO).unwrap();
    let offered = pool.alloc(Duration::ZERO).unwrap().offer().unwrap();
    let pid = std::process::id();

    let shape = json!({ "kind": "pool", "blocks": 4, "block_bytes": 1000, "zeroed": true });
    let list = sandbox.json(["ls"]);
    let name = &list["names"][0];
    assert_eq!((&name["name"], &name["usage"]), (&json!("frames"), &json!({ "free": 2 })));
    assert_eq!((&name["latest"]["control"], &name["latest"]["lifetime"]), (&shape, &json!("shared")));
    let text = sandbox.run(["ls"]).expect(0).text();
    let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines[0], ["POOL", "KIND", "PLACE", "BLOCKS", "BYTES", "EACH", "FREE", "LIFETIME", "LEASES", "AGE"]);
    let at = place().to_string();
    assert_eq!(lines[1][..8], ["frames", kind(), &at, "4", "1000", "2", "shared", "1"], "{text}");

    let show = sandbox.json(["show", "frames"]);
    assert_eq!(show["control"], shape);
    assert_eq!((&show["detail"]["audit"], &show["detail"]["waiting"]), (&json!("clean"), &json!(0)));
    let counts = [("free", 2), ("held", 1), ("offered", 1), ("in_ring", 0), ("read", 0), ("unused", 0), ("handed", 0)];
    for (key, count) in counts {
        assert_eq!(show["detail"]["counts"][key], count, "{key}");
    }
    assert_eq!((&show["holders"][0]["pid"], &show["holders"][0]["blocks"]), (&json!(pid), &json!(2)));
    assert_eq!((&show["mutable"], &show["promises"]["read_only"]), (&json!(true), &Value::Null));
    let text = sandbox.run(["show", "frames"]).expect(0).text();
    assert!(!text.contains("frozen"), "it is mutable: {text}");
    for part in [
        "4 blocks of 1000 bytes, zeroed for",
        "2 free, 1 held, 1 offered",
        "audit      clean",
        "BLOCKS",
        "shared: goes with",
    ] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    assert_eq!(sandbox.json(["ps"])["members"][0]["blocks"], 2);
    let text = sandbox.run(["ps"]).expect(0).text();
    assert!(text.lines().next().unwrap().contains("BLOCKS"), "{text}");

    let removed = sandbox.run(["rm", "frames"]).expect(0).text();
    assert!(removed.contains("until pid") && removed.contains(&pid.to_string()), "{removed}");
    assert!(matches!(domain.pool("frames").open(), Err(Error::NotFound(NotFound::Name { .. }))));
    assert_eq!(pool.stats().held, 1, "a process that has it open goes on");
    let gone = sandbox.json(["ls"])["names"][0].clone();
    assert_eq!((&gone["latest"], &gone["usage"]), (&Value::Null, &Value::Null));
    drop((held, offered, pool));
    assert_eq!(sandbox.json(["ls"])["names"], json!([]));
    sandbox.run(["show", "frames"]).expect(3);
    sandbox.run(["rm", "frames"]).expect(3);
}

#[test]
fn put_does_not_replace_a_pool() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _pool = domain.pool("frames").blocks(1).block_bytes(1).place(place()).kept(true).create().unwrap();
    sandbox.file("f", b"contents");
    let refused = sandbox.run(["put", "f", "frames", "--device", "host"]).expect(5);
    assert!(refused.stderr.contains("frames"), "{refused:?}");
    assert_eq!(sandbox.json(["ls"])["names"][0]["latest"]["lifetime"], "kept");
}

#[test]
fn watcher_is_notified_of_a_pool() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let mut watching = sandbox.spawn(["watch", "--json"]);
    assert!(watching.line().contains("watching"));
    let pool = domain.pool("frames").blocks(1).block_bytes(1).place(place()).create().unwrap();
    let created: Value = serde_json::from_str(&watching.line()).unwrap();
    assert_eq!((&created["event"], &created["named"]), (&json!("created"), &json!("pool")));
    drop(pool);
    let rest: Vec<Value> = (0..3).map(|_| serde_json::from_str(&watching.line()).unwrap()).collect();
    let events: Vec<_> = rest.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["committed", "withdrawn", "reclaimed"]);
}
