//! `partywall lab chaos`: members killed at random moments, and the check of their history.

use std::{fs, path::PathBuf};

use partywall_harness::{Output, Running, Sandbox, simulated_driver};
use serde_json::{Value, json};

fn chaos(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(["lab", "chaos"]);
    command.env("TMPDIR", sandbox.path()).env("PARTYWALL_LIBCUDA", simulated_driver());
    Running::spawn(command.args(arguments)).wait()
}

fn last(output: &Output) -> Value {
    serde_json::from_str(output.text().lines().last().unwrap()).unwrap()
}

/// Runs chaos on a device, and returns its history.
#[track_caller]
fn nothing_is_lost(sandbox: &Sandbox, device: &str) -> PathBuf {
    let output = chaos(sandbox, &["--device", device, "--seed", "12", "--duration", "4", "--json"]).expect(0);
    let last = last(&output);
    assert_eq!(last["violations"], 0, "{}", output.text());
    // By this seed the broker is killed after three members.
    assert!(last["broker_kills"].as_u64() >= Some(1), "{last}");
    assert!(last["kills"].as_u64() >= Some(5), "{last}");
    let history = PathBuf::from(last["history"].as_str().unwrap());
    let text = fs::read_to_string(&history).unwrap();
    let stops = text.matches(r#""what":"stopped""#).count();
    assert!(stops > 0 && last["stops"] == stops, "{last}");
    for what in ["read", "got", "result", "acquired", "giving", "saw", "killed", "left"] {
        let line = format!("\"what\":\"{what}\"");
        assert!(text.contains(&line), "no {what}");
    }
    let left: Vec<_> = fs::read_dir(sandbox.path().join("run/partywall")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    history
}

#[test]
fn nothing_is_lost_on_the_simulated_gpu() {
    nothing_is_lost(&Sandbox::new(), "cuda");
}

/// The CPU and the simulated GPU take turns at writing, and both read.
#[test]
fn nothing_is_lost_in_pinned_memory() {
    nothing_is_lost(&Sandbox::new(), "pinned:1");
}

/// Each damage is one that the product must never do: the check of the damaged history fails, and says so.
#[test]
fn nothing_is_lost_in_host_memory_and_damaged_histories_are_found() {
    let sandbox = Sandbox::new();
    let history = nothing_is_lost(&sandbox, "host");
    let text = fs::read_to_string(&history).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let check = |lines: &[Value]| {
        let damaged: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let path = sandbox.path().join("damaged.jsonl");
        fs::write(&path, damaged).unwrap();
        chaos(&sandbox, &["--device", "host", "--check", path.to_str().unwrap()])
    };
    assert!(check(&lines).expect(0).text().contains("as promised"));

    let find = |what: &str| lines.iter().position(|line| line["what"] == what).unwrap();
    let changed = |index: usize, key: &str, value: Value| {
        let mut lines = lines.clone();
        lines[index][key] = value;
        lines
    };
    let doubled = |index: usize| {
        let mut lines = lines.clone();
        lines.insert(index, lines[index].clone());
        lines
    };
    let without = |index: usize| {
        let mut lines = lines.clone();
        lines.remove(index);
        lines
    };
    // A message between two others of its publisher, and one at the end of what a living subscriber got.
    let living = lines.iter().filter(|line| line["what"] == "left").map(|line| &line["member"]);
    let living: Vec<_> = living.collect();
    let got = |line: &&Value| line["what"] == "got" && living.contains(&&line["member"]);
    let owed = lines.iter().rfind(got).unwrap();
    let owed = lines.iter().position(|line| line == owed).unwrap();
    let has = |of: &Value, message: u64| {
        let same = |line: &&Value| line["what"] == "got" && line["member"] == of["member"];
        lines.iter().filter(same).any(|line| line["message"] == message)
    };
    let is_between = |line: &&Value| {
        let message = line["message"].as_u64().unwrap_or(0);
        line["what"] == "got" && has(line, message - 1) && has(line, message + 1)
    };
    let between = lines.iter().find(is_between).unwrap();
    let between = lines.iter().position(|line| line == between).unwrap();
    let lacking = |of: &str| {
        let mut lines = lines.clone();
        let acquired = find("acquired");
        let line = json!({
            "at": lines[acquired]["at"], "began": lines[acquired]["at"], "member": lines[acquired]["member"],
            "what": "lacked", "call": "acquire", "of": of,
        });
        lines.insert(acquired, line);
        lines
    };
    let is_permits = |line: &Value| line["what"] == "counted" && line["of"] == "permits";
    let permits = lines.iter().position(is_permits).unwrap();
    for (damaged, said) in [
        (without(between), "lost a message before"),
        (without(owed), "lost message"),
        (doubled(find("got")), "got message"),
        (changed(find("got"), "whole", json!(false)), "got a mix of messages"),
        (changed(find("read"), "number", json!(12345)), "nobody wrote the number 12345"),
        (changed(find("read"), "whole", json!(false)), "read a mix"),
        (without(find("saw")), "did not see version"),
        (doubled(find("result")), "has two results"),
        (without(find("result")), "is lost"),
        (changed(find("result"), "right", json!(false)), "is wrong"),
        (changed(find("giving"), "whole", json!(false)), "changed while member"),
        (doubled(find("took")), "had block"),
        (lacking("memory"), "had no Memory, which it was not left without"),
        (without(find("left")), "did not come to its end"),
        (without(find("killed")), "did not come to its end"),
        (changed(permits, "found", json!(1)), "permits: 1, not 2 to 2"),
    ] {
        let judged = check(&damaged).expect(1).text();
        assert!(judged.contains(said), "{said}: {judged}");
    }
    let judged = check(&lines[..lines.len() - 1]).expect(1);
    assert!(judged.stderr.contains("its last line is not the end of a run"), "{}", judged.stderr);
}

#[test]
fn unusable_histories_and_numbers_are_refused() {
    let sandbox = Sandbox::new();
    let path = sandbox.path().join("history.jsonl");
    let path = path.to_str().unwrap();
    let missing = chaos(&sandbox, &["--device", "host", "--check", path]).expect(3);
    assert!(missing.stderr.contains("cannot use the history"), "{}", missing.stderr);
    fs::write(path, "{\"at\":1}\n").unwrap();
    let damaged = chaos(&sandbox, &["--device", "host", "--check", path]).expect(1);
    assert!(damaged.stderr.contains("is damaged: line 1: missing field"), "{}", damaged.stderr);
    // A file that exists is never overwritten.
    let exists = chaos(&sandbox, &["--device", "host", "--history", path]).expect(5);
    assert!(exists.stderr.contains("cannot create the history"), "{}", exists.stderr);
    let nowhere = chaos(&sandbox, &["--device", "host", "--history", "/missing/h.jsonl"]).expect(5);
    assert!(nowhere.stderr.contains("cannot create the history /missing/h.jsonl"), "{}", nowhere.stderr);
    assert_eq!(fs::read_to_string(path).unwrap(), "{\"at\":1}\n");
    for arguments in [["--duration", "0"], ["--duration", "401"], ["--seed", "-1"], ["--seed", "x"]] {
        chaos(&sandbox, &arguments).expect(2);
    }
}

/// Takes a minute or two, so only `cargo xtask test --long` runs it.
#[test]
fn needs_minutes_nothing_is_lost_by_a_thousand_kills() {
    let sandbox = Sandbox::new();
    for device in ["host", "cuda", "pinned"] {
        let mut kills = 0;
        let mut others = [0; 4];
        for seed in 1.. {
            let arguments = ["--device", device, "--seed", &seed.to_string(), "--duration", "30", "--json"];
            let output = chaos(&sandbox, &arguments).expect(0);
            let last = last(&output);
            assert_eq!(last["violations"], 0, "{}", output.text());
            let more = last["kills"].as_u64().unwrap();
            assert!(more > 0, "{last}");
            kills += more;
            let strikes = ["broker_kills", "sockets_closed", "descriptors_filled", "memory_taken"];
            others.iter_mut().zip(strikes).for_each(|(sum, strike)| *sum += last[strike].as_u64().unwrap());
            if kills >= 1000 {
                break;
            }
        }
        // Memory is taken in host memory alone.
        assert!(others[..3].iter().all(|sum| *sum > 0) && (others[3] > 0) == (device == "host"), "{others:?}");
    }
}
