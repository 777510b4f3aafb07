//! `partywall lab chaos`: members killed at random moments, and the check of their history. The damages that the check
//! finds are among the tests beside it.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

use std::{fs, path::PathBuf};

use partywall_harness::{Output, Running, Sandbox, device, simulated_driver};
use serde_json::Value;

fn chaos(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(["lab", "chaos"]);
    command.env("TMPDIR", sandbox.path()).env("PARTYWALL_LIBCUDA", simulated_driver());
    Running::spawn(command.args(arguments)).wait()
}

/// Runs chaos on a device until this many members were killed, or for half a minute, and returns the last line.
#[track_caller]
fn nothing_is_lost(sandbox: &Sandbox, device: &str, seed: u64, kills: u64) -> Value {
    let (seed, most) = (seed.to_string(), kills.to_string());
    let arguments = ["--device", device, "--seed", &seed, "--duration", "30", "--kills", &most, "--json"];
    let output = chaos(sandbox, &arguments).expect(0);
    let last: Value = serde_json::from_str(output.text().lines().last().unwrap()).unwrap();
    assert_eq!(last["violations"], 0, "{}", output.text());
    assert!(last["kills"].as_u64() > Some(0), "{last}");
    let left: Vec<_> = fs::read_dir(sandbox.path().join("run/partywall")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    last
}

// Holds 9, 10, 20, 180, 185, 193, 195, 216.
#[test]
fn nothing_is_lost_by_random_kills() {
    let sandbox = Sandbox::new();
    let last = nothing_is_lost(&sandbox, device(), 12, 150);
    let strikes = ["broker_kills", "stops", "outlasted", "evictions", "sockets_closed", "descriptors_filled"];
    for strike in strikes {
        assert!(last[strike].as_u64() > Some(0), "no {strike}: {last}");
    }
    let history = PathBuf::from(last["history"].as_str().unwrap());
    let text = fs::read_to_string(&history).unwrap();
    for what in [
        "read", "saw", "got", "viewed", "idle", "result", "acquired", "giving", "accepted", "claimed", "opened",
        "made", "killed", "left",
    ] {
        let line = format!("\"what\":\"{what}\"");
        assert!(text.contains(&line), "no {what}");
    }
    let check = |text: &str| {
        fs::write(&history, text).unwrap();
        chaos(&sandbox, &["--device", "host", "--check", history.to_str().unwrap()])
    };
    assert!(check(&text).expect(0).text().contains("as promised"));
    let damaged = text.replacen(r#""what":"got""#, r#""what":"gap""#, 1);
    assert!(check(&damaged).expect(1).text().contains("lost"));
    let (whole, _) = text.trim_end().rsplit_once('\n').unwrap();
    let judged = check(whole).expect(1);
    assert!(judged.stderr.contains("its last line is not the end of a run"), "{}", judged.stderr);
}

#[test]
fn unusable_histories_and_numbers_are_refused_with_host_memory() {
    let sandbox = Sandbox::new();
    let path = sandbox.path().join("history.jsonl");
    let path = path.to_str().unwrap();
    let missing = chaos(&sandbox, &["--device", "host", "--check", path]).expect(3);
    assert!(missing.stderr.contains("cannot use the history"), "{}", missing.stderr);
    fs::write(path, "{\"at\":1}\n").unwrap();
    let damaged = chaos(&sandbox, &["--device", "host", "--check", path]).expect(1);
    assert!(damaged.stderr.contains("is damaged: line 1: missing field"), "{}", damaged.stderr);
    // A line without an end is not read to memory's.
    let endless = chaos(&sandbox, &["--device", "host", "--check", "/dev/zero"]).expect(1);
    assert!(endless.stderr.contains("is damaged: line 1 has more than 256 bytes"), "{}", endless.stderr);
    // A file that exists is never overwritten.
    let exists = chaos(&sandbox, &["--device", "host", "--history", path]).expect(5);
    assert!(exists.stderr.contains("cannot create the history"), "{}", exists.stderr);
    let nowhere = chaos(&sandbox, &["--device", "host", "--history", "/missing/h.jsonl"]).expect(5);
    assert!(nowhere.stderr.contains("cannot create the history /missing/h.jsonl"), "{}", nowhere.stderr);
    assert_eq!(fs::read_to_string(path).unwrap(), "{\"at\":1}\n");
    for arguments in [["--duration", "0"], ["--duration", "401"], ["--kills", "0"], ["--seed", "-1"], ["--seed", "x"]] {
        chaos(&sandbox, &arguments).expect(2);
    }
}

// Holds 10.
#[test]
fn needs_minutes_nothing_is_lost_by_a_thousand_kills_in_host_memory() {
    // No driver gets along without memory, so that it is taken here alone.
    assert!(nothing_is_lost_by_a_thousand_kills("host") > 0);
}

// Holds 10.
#[test]
fn needs_minutes_nothing_is_lost_by_a_thousand_kills_on_the_simulated_gpu() {
    nothing_is_lost_by_a_thousand_kills("cuda");
}

/// The CPU and the simulated GPU take turns at writing, and both read.
// Holds 10.
#[test]
fn needs_minutes_nothing_is_lost_by_a_thousand_kills_in_pinned_memory() {
    nothing_is_lost_by_a_thousand_kills("pinned");
}

/// Returns how often members were left without memory.
#[track_caller]
fn nothing_is_lost_by_a_thousand_kills(device: &str) -> u64 {
    let sandbox = Sandbox::new();
    let mut kills = 0;
    let mut memory_taken = 0;
    for seed in 1.. {
        let last = nothing_is_lost(&sandbox, device, seed, 1000 - kills);
        kills += last["kills"].as_u64().unwrap();
        memory_taken += last["memory_taken"].as_u64().unwrap();
        fs::remove_file(last["history"].as_str().unwrap()).unwrap();
        if kills >= 1000 {
            break;
        }
    }
    memory_taken
}
