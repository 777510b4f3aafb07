// Holds 43.
//! Names as a user of the command sees them: `ls`, `show`, `rm`.

use std::time::Duration;

use partywall::{DType, Domain};
use partywall_harness::{Sandbox, Signal, device, eventually, kind, place};
use serde_json::{Value, json};

/// Commits a name with two tensors, kept.
fn commit(domain: &Domain, name: &str, mutable: bool) -> partywall::Segment {
    let builder = domain.create(name, place()).kept(true).mutable(mutable);
    let builder = builder.tensor("w", DType::BF16, &[3, 5]).tensor("a.bias", DType::F32, &[7]);
    builder.metadata("format", "pt").allocate().unwrap().commit().unwrap()
}

fn names(list: &Value) -> Vec<&str> {
    list["names"].as_array().unwrap().iter().map(|name| name["name"].as_str().unwrap()).collect()
}

#[test]
fn ls_lists_all_or_matching_names() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let nothing = sandbox.run(["ls"]).expect(0);
    assert!(nothing.stdout.is_empty() && nothing.stderr.contains("nothing is shared yet"), "{nothing:?}");
    assert_eq!(sandbox.json(["ls"])["names"], json!([]));

    let domain = sandbox.domain();
    for name in ["llm/a", "llm/b", "other"] {
        let _ = commit(&domain, name, name == "other");
    }
    let held = domain.open("llm/a", Duration::ZERO).unwrap();
    let _ = commit(&domain, "llm/a", false);
    let list = sandbox.json(["ls"]);
    assert_eq!(names(&list), ["llm/a", "llm/b", "other"]);
    assert_eq!(list["socket"], sandbox.socket().to_str().unwrap());
    let first = &list["names"][0];
    assert_eq!((&first["older_versions"], &first["latest"]["version"]), (&json!(1), &json!(2)));
    let latest = &list["names"][2]["latest"];
    let facts = ["kind", "place", "tensors", "lifetime", "mutable", "leases"].map(|key| latest[key].clone());
    assert_eq!(facts, [json!(kind()), json!(place().to_string()), json!(2), json!("kept"), json!(true), json!(0)]);
    let pid = json!(std::process::id());
    assert_eq!((&latest["committer"], &latest["owner"]), (&pid, &pid));
    assert!(latest["bytes"].as_u64().unwrap() >= 58 && latest["committed_at_ms"].as_u64().unwrap() > 1 << 40);

    assert_eq!(names(&sandbox.json(["ls", "llm/*"])), ["llm/a", "llm/b"]);
    assert_eq!(names(&sandbox.json(["ls", "llm/?"])), ["llm/a", "llm/b"]);
    assert_eq!(names(&sandbox.json(["ls", "*e*"])), ["other"]);
    assert_eq!(names(&sandbox.json(["ls", "llm"])), [""; 0]);
    let text = sandbox.run(["ls"]).expect(0).text();
    // What a NUMA node holds follows.
    let lines: Vec<_> = text.lines().take_while(|line| !line.is_empty()).collect();
    assert!(lines[0].starts_with("NAME") && lines.len() == 4, "{text}");
    assert!(lines[3].contains("other") && lines[3].contains("kept, mutable to 64 MiB"), "{text}");

    drop(held);
    sandbox.run(["rm", "llm/a", "llm/b", "other"]).expect(0);
}

#[test]
fn show_prints_all_facts() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _ = commit(&domain, "llm", false);
    let held = domain.open("llm", Duration::ZERO).unwrap();
    let second = commit(&domain, "llm", true);
    second.grow().extend("a.bias", 7).commit().unwrap();

    let show = sandbox.json(["show", "llm"]);
    let pid = std::process::id();
    for (key, value) in [
        ("name", json!("llm")),
        ("version", json!(2)),
        ("latest", json!(true)),
        ("kind", json!(kind())),
        ("place", json!(place().to_string())),
        ("bytes_requested", json!(58)),
        ("lifetime", json!("kept")),
        ("mutable", json!(true)),
        ("reserved", json!(64 << 20)),
        ("growths", json!(1)),
        ("committer", json!(pid)),
        ("leases", json!(1)),
        ("builder", Value::Null),
        ("metadata", json!({ "format": "pt" })),
        ("socket", json!(sandbox.socket().to_str().unwrap())),
    ] {
        assert_eq!(show[key], value, "{key}");
    }
    assert_eq!(show["chunks"].as_array().unwrap().len(), 1);
    assert_eq!(show["chunks"][0], show["bytes"]);
    assert_eq!((&show["holders"][0]["pid"], &show["holders"][0]["leases"]), (&json!(pid), &json!(1)));
    assert!(show["holders"][0]["command"].as_str().unwrap().contains("names"), "{show}");
    let versions: Vec<_> = show["versions"].as_array().unwrap().iter().map(|v| v["version"].clone()).collect();
    assert_eq!(versions, [1, 2]);
    let tensor = &show["tensors"][0];
    assert_eq!((&tensor["name"], &tensor["dtype"]), (&json!("w"), &json!("bfloat16")));
    assert_eq!((&tensor["shape"], &tensor["strides"], &tensor["bytes"]), (&json!([3, 5]), &json!([5, 1]), &json!(30)));
    assert_eq!(show["tensors"][1]["offset"].as_u64().unwrap() % 256, 0);

    let first = sandbox.json(["show", "llm@1"]);
    assert_eq!((&first["version"], &first["latest"], &first["mutable"]), (&json!(1), &json!(false), &json!(false)));
    assert_eq!((&first["reserved"], &first["growths"]), (&json!(0), &json!(0)));
    let text = sandbox.run(["show", "llm"]).expect(0).text();
    for part in
        ["the latest", "58 bytes requested", "kept", "mutable", &format!("{pid}"), "bfloat16", "[3, 5]", "format: pt"]
            .into_iter()
            .chain(["up to 64 MiB", "1 growth so far"])
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = sandbox.run(["show", "llm@1"]).expect(0).text();
    assert!(text.contains("not the latest") && text.contains("frozen"), "{text}");

    let missing = sandbox.run(["show", "llm@7"]).expect(3);
    assert!(missing.stderr.contains("no version 7") && missing.stderr.contains("latest is 2"), "{missing:?}");
    sandbox.run(["show", "llm@x"]).expect(2);
    sandbox.run(["show", "l m"]).expect(2);
    drop((held, second));
}

#[test]
fn show_lists_twenty_tensors_and_all_on_request() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let mut builder = domain.create("many", place()).kept(true);
    for i in 0..50 {
        builder = builder.tensor(&format!("layer.{i}"), DType::U8, &[1]);
    }
    let _ = builder.allocate().unwrap().commit().unwrap();
    let text = sandbox.run(["show", "many"]).expect(0).text();
    assert!(text.contains("50 tensors") && text.contains("layer.19") && !text.contains("layer.20"), "{text}");
    assert!(text.contains("30 more") && text.contains("--all"), "{text}");
    assert!(sandbox.run(["show", "many", "--all"]).expect(0).text().contains("layer.49"));
    assert_eq!(sandbox.json(["show", "many"])["tensors"].as_array().unwrap().len(), 50);
}

#[test]
fn name_under_construction_is_not_found() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _ = commit(&domain, "llm", false);
    assert_eq!(sandbox.json(["show", "llm"])["builder"], Value::Null);
    // No process can build under a claim for a name that exists, so `builder` is null; the JSON still has the key.
    let claim = domain.open_or_build("new", Duration::ZERO).unwrap();
    assert!(matches!(claim, partywall::OpenOrBuild::Build(_)));
    sandbox.run(["show", "new"]).expect(3);
}

#[test]
fn missing_name_says_which_socket_and_what_is_near() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _ = commit(&domain, "llama", false);
    for arguments in [&["show", "lama"][..], &["rm", "lama"], &["get", "lama", "out"]] {
        let missing = sandbox.run(arguments).expect(3);
        let socket = sandbox.socket();
        for part in ["\"lama\"", socket.to_str().unwrap(), "llama", "partywall ls"] {
            assert!(missing.stderr.contains(part), "{part}: {missing:?}");
        }
    }
    let missing = sandbox.run(["show", "lama", "--json"]).expect(3).json();
    assert_eq!((&missing["error"]["code"], &missing["error"]["kind"]), (&json!(3), &json!("not found")));
}

#[test]
fn rm_names_the_remaining_memory_and_its_holders() {
    let sandbox = Sandbox::new();
    sandbox.file("weights.bin", vec![3; 4 << 20]);
    sandbox.run(["put", "weights.bin", "llm", "--device", device()]).expect(0);
    let domain = sandbox.domain();
    let held = domain.open("llm", Duration::ZERO).unwrap();

    let removed = sandbox.run(["rm", "llm"]).expect(0);
    let pid = std::process::id();
    assert!(removed.text().contains("removed \"llm\" (version 1)"), "{removed:?}");
    assert!(removed.text().contains(&format!("4 MiB stay until pid {pid} (")), "{removed:?}");
    assert!(removed.text().contains("drops it"), "{removed:?}");
    // `show` still lists the holders of the memory, but no process can open the name any more.
    let show = sandbox.run(["show", "llm"]).expect(0).text();
    assert!(show.contains("(removed") && show.contains(&format!("{pid}")), "{show}");
    sandbox.run(["get", "llm", "out"]).expect(3);
    assert_eq!(held.tensor("data").unwrap().to_vec().unwrap(), vec![3; 4 << 20]);
    let list = sandbox.json(["ls"]);
    assert_eq!((&list["names"][0]["latest"], &list["names"][0]["older_versions"]), (&Value::Null, &json!(1)));
    assert!(sandbox.run(["ls"]).expect(0).text().contains("removed"));
    drop(held);
    sandbox.run(["show", "llm"]).expect(3);
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));

    sandbox.run(["put", "weights.bin", "llm", "--device", device()]).expect(0);
    assert!(sandbox.run(["rm", "llm"]).expect(0).text().contains("its memory is free"));
}

#[test]
fn rm_tries_every_name_and_reports_each() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    for name in ["a", "b", "c"] {
        let _ = commit(&domain, name, false);
    }
    let output = sandbox.run(["rm", "a", "nope", "b"]).expect(3);
    assert!(output.text().contains("\"a\"") && output.text().contains("\"b\""), "{output:?}");
    assert!(output.stderr.contains("\"nope\""), "{output:?}");
    assert_eq!(names(&sandbox.json(["ls"])), ["c"]);
    let output = sandbox.run(["rm", "--json", "nope", "c"]).expect(3).json();
    assert_eq!((&output["removed"][0]["name"], &output["removed"][0]["bytes_kept"]), (&json!("c"), &json!(0)));
    assert_eq!((&output["failed"][0]["name"], &output["failed"][0]["error"]["code"]), (&json!("nope"), &json!(3)));
    sandbox.run(["rm"]).expect(2);
    sandbox.run(["rm", "a b"]).expect(2);
}

#[test]
fn removing_a_held_name_ends_its_holder() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    let mut holder = sandbox.spawn(["put", "f", "held", "--hold", "--device", device()]);
    assert!(holder.line().contains("holding it"));
    assert!(sandbox.run(["rm", "held"]).expect(0).text().contains(&format!("pid {}", holder.pid())));
    assert!(holder.wait().expect(0).stderr.contains("has been removed"));
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
}

#[test]
fn held_name_ends_with_its_holder() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    sandbox.broker();
    for signal in [Signal::INT, Signal::TERM] {
        let mut holder = sandbox.spawn(["put", "f", "held", "--hold", "--device", device()]);
        holder.line();
        assert_eq!(sandbox.json(["show", "held"])["lifetime"], "owned");
        holder.signal(signal);
        holder.wait().expect(0);
        // The name is removed immediately, because the holder disconnected cleanly.
        sandbox.run(["show", "held"]).expect(3);
    }
    let mut holder = sandbox.spawn(["put", "f", "held", "--hold", "--device", device()]);
    holder.line();
    holder.kill();
    eventually("its death is proved", || sandbox.run(["show", "held"]).code == Some(3));
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
}

#[test]
fn removed_names_and_other_kinds_are_distinguished() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    sandbox.file("f", "x");
    sandbox.run(["put", "f", "x", "--device", "host"]).expect(0);
    sandbox.run(["rm", "--yes", "x"]).expect(0);
    for arguments in [&["get", "x", "out"][..], &["show", "x"], &["rm", "--yes", "x"]] {
        let missing = sandbox.run(arguments).expect(3);
        let printed = missing.stderr.contains("x@1 was removed by pid") && missing.stderr.contains("(partywall), ");
        assert!(printed && missing.stderr.contains("s ago"), "{arguments:?}: {missing:?}");
    }
    let _topic = domain.topic("frames").max_bytes(1).place(partywall::Place::Host).create().unwrap();
    let refused = sandbox.run(["get", "frames", "out"]).expect(2);
    for part in ["\"frames\" is a topic, not a segment", "`partywall topic echo frames`"] {
        assert!(refused.stderr.contains(part), "{part}: {refused:?}");
    }
    let _timeline = domain.timeline("line").unwrap();
    let refused = sandbox.run(["get", "line", "out"]).expect(3);
    for part in ["there is a timeline of that name", "`partywall show line`"] {
        assert!(refused.stderr.contains(part), "{part}: {refused:?}");
    }
}
