//! `partywall lab weights`: versions of weights, killed writers, and readers that come and go.

use partywall_harness::{Output, Running, Sandbox, simulated_driver};
use serde_json::Value;

fn weights(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(["lab", "weights"]);
    Running::spawn(command.args(arguments).env("PARTYWALL_LIBCUDA", simulated_driver())).wait()
}

/// Trainers are killed half-way and readers restarted: every check finds one version, and no reader waits.
#[track_caller]
fn no_reader_sees_a_mix(device: &str, more: &[&str], broker_kills: u64) {
    let sandbox = Sandbox::new();
    let arguments = ["--device", device, "--mib", "2", "--versions", "4", "--readers", "3", "--json"];
    let output = weights(&sandbox, &[&arguments, more].concat()).expect(0);
    let lines: Vec<Value> = output.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().all(|line| line["verdict"] != "different"), "{}", output.text());
    let last = lines.last().unwrap();
    let counts = ["mixed", "kills", "broker_kills"].map(|count| last[count].as_u64());
    assert_eq!(counts, [Some(0), Some(2), Some(broker_kills)]);
    assert!(last["versions"].as_u64() >= Some(4) && last["checks"].as_u64() > Some(10), "{last}");
    let beliefs = last["beliefs"].as_array().unwrap();
    for refuted in ["mix", "wait", "half", "lost"] {
        let belief = beliefs.iter().find(|belief| belief["belief"] == refuted).unwrap();
        assert_eq!(belief["verdict"], "refuted", "{belief}");
    }
    for way in ["by_name", "by_file"] {
        assert!(last[way]["ready_ms"].as_f64() >= last[way]["alone_ms"].as_f64(), "{last}");
    }
    let left: Vec<_> = std::fs::read_dir(sandbox.path().join("run/partywall")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

// Holds 48.
#[test]
fn no_reader_sees_a_mix_of_versions_in_host_memory() {
    no_reader_sees_a_mix("host", &[], 1);
}

// Holds 48.
#[test]
fn no_reader_sees_a_mix_of_versions_on_the_simulated_gpu() {
    no_reader_sees_a_mix("cuda", &["--kill", "trainer"], 0);
}

// Holds 48.
#[test]
fn no_reader_sees_a_mix_of_versions_in_pinned_memory() {
    no_reader_sees_a_mix("pinned:1", &[], 1);
}

#[test]
fn no_reader_sees_a_mix_while_the_broker_is_killed() {
    no_reader_sees_a_mix("host", &["--kill", "broker"], 2);
}
