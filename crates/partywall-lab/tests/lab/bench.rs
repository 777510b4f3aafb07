//! `partywall bench`: its cases and its reports, and that it leaves nothing behind.

use std::{fs, path::Path};

use partywall_harness::{Output, Sandbox, binary, eventually};
use rustix::process::Signal;
use serde_json::{Value, json};

fn bench(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    sandbox.run([&["bench"], arguments].concat())
}

/// Fails the test unless a measurement has all its percentiles, in ascending order, and at least five samples (or one,
/// if it counts something).
fn assert_ordered(measurement: &Value) {
    let number = |name: &str| measurement["percentiles"][name].as_f64().unwrap();
    let all = ["min", "p25", "p50", "p75", "p90", "p99", "max"].map(number);
    let is_counted = ["B", "count"].contains(&measurement["unit"].as_str().unwrap());
    assert!(all.is_sorted() && number("n") >= if is_counted { 1.0 } else { 5.0 }, "{measurement}");
}

/// Returns the questions that a report answers, each once.
fn questions(report: &Value) -> Vec<&str> {
    let comparisons = report["comparisons"].as_array().unwrap();
    let mut questions: Vec<_> =
        comparisons.iter().map(|result| result["measured"]["parameters"]["of"].as_str().unwrap()).collect();
    questions.sort_unstable();
    questions.dedup();
    questions
}

#[test]
fn all_cases_are_measured_in_host_memory() {
    let sandbox = Sandbox::new();
    let report = sandbox.json(["bench", "all", "--device", "host", "--quick"]);
    assert_eq!(
        questions(&report),
        [
            "a segment of 2 MiB",
            "bandwidth of reading, one thread",
            "closing shared memory",
            "copies on the host into",
            "copies on the host out of",
            "latency of a dependent load, one thread",
            "latency of a write, a fence and a dependent load, one thread",
            "memory that a further process, and a further mapping, takes",
            "one process notifies another",
            "one process notifies several by a timeline, and each answers",
            "one process notifies several by a topic, and each answers",
            "opening shared memory",
            "taking a block and giving it back",
            "the harness itself",
        ]
    );
    for result in report["comparisons"].as_array().unwrap() {
        let beside = result["rivals"].as_array().into_iter().flatten().chain(result.get("floor"));
        beside.chain([&result["measured"]]).for_each(assert_ordered);
    }
    let hand_offs: Vec<_> =
        report["comparisons"].as_array().unwrap().iter().map(|result| &result["measured"]).collect();
    let hand_offs = hand_offs.iter().filter(|case| case["parameters"]["of"] == "one process notifies another");
    let ways: Vec<_> = hand_offs.map(|case| case["name"].as_str().unwrap()).collect();
    let block = "block of a pool, and its reference through a Unix socket";
    assert_eq!(ways, ["timeline", "topic", "queue", block, "semaphore"]);
    let notes = report["notes"].to_string();
    assert!(notes.contains("host memory: no GPU has a part in it"), "{notes}");
    assert!(notes.contains("one segment was opened 200 times"), "{notes}");
    assert_eq!(report["machine"].get("gpu"), None);
    let comparisons = report["comparisons"].as_array().unwrap();
    let openings = comparisons.iter().find(|result| result["measured"]["name"] == "openings in one process").unwrap();
    assert_eq!(openings["measured"]["percentiles"]["n"], 1, "counted once");
}

#[test]
fn all_cases_are_measured_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let report = sandbox.json(["bench", "--simulated", "--quick"]);
    let questions = questions(&report).join("\n");
    for part in [
        "__threadfence()",
        "a kernel that reads",
        "memory that a further process, and a further mapping, takes",
        "copies within the GPU",
        "copies out of another GPU",
        "copies out of another GPU, which the reader does not see",
        "bandwidth of a kernel that reads another GPU",
        "one process notifies another, time-sliced",
        "a stream of one process notifies a stream of another, time-sliced",
        "one process notifies several by a topic, and each answers, time-sliced",
    ] {
        assert!(questions.contains(part), "{part}: {questions}");
    }
    let text = report.to_string();
    for part in [
        "SIMULATED",
        "cuIpcOpenMemHandle",
        "cuIpcOpenEventHandle",
        "topic in GPU memory",
        "queue in GPU memory, from stream to stream",
        "block of a pool, and its reference through a Unix socket",
        "block of a pool in GPU memory, from stream to stream",
        "semaphore, from a stream to the host of the other one",
        "cuMemAllocAsync",
        "under MPS are left out",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn report_is_a_file_for_programs_and_a_page_for_people() {
    let sandbox = Sandbox::new();
    let out = sandbox.path().join("new/out");
    let folder = out.to_str().unwrap();
    let printed = sandbox.json(["bench", "latency", "--device", "host", "--quick", "--out", folder]);
    let written: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(printed, written);
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.len() < 1 << 20 && page.contains("<svg") && !page.contains("http") && !page.contains("<script"));
}

#[test]
fn report_is_written_also_if_nobody_reads_the_tables() {
    let sandbox = Sandbox::new();
    let out = sandbox.path().join("out");
    let mut shell = sandbox.program("sh");
    shell.arg("-c").arg(r#""$0" bench alloc --device host --quick --out "$1" | true"#).arg(binary()).arg(&out);
    assert!(shell.status().unwrap().success());
    assert!(out.join("report.json").exists() && out.join("report.html").exists());
}

#[test]
fn bytes_have_their_unit_in_the_table() {
    let text = Sandbox::new().run(["bench", "latency", "--device", "host", "--quick"]).expect(0).text();
    let copy = text.lines().rfind(|line| line.contains("a copy of its own")).unwrap();
    assert!(copy.contains(" 1 MiB ") && !copy.contains("1048576"), "{copy}");
}

fn compared(sandbox: &Sandbox, before: &Path, after: &Path, more: &[&str]) -> Output {
    let files = [before.to_str().unwrap(), after.to_str().unwrap()];
    bench(sandbox, &[&["compare", files[0], files[1], "--json"], more].concat())
}

#[test]
fn reports_are_compared_and_other_machines_refused() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path().to_str().unwrap().to_owned();
    let mut value = sandbox.json(["bench", "alloc", "--device", "host", "--quick", "--out", &folder]);
    let report = Path::new(&folder).join("report.json");
    let former = fs::read(&report).unwrap();
    let refused = bench(&sandbox, &["all", "--device", "host", "--out", &folder]).expect(5);
    assert!(refused.stderr.contains("report.json already exists") && refused.stderr.contains("--force"), "{refused:?}");
    assert_eq!(fs::read(&report).unwrap(), former);
    bench(&sandbox, &["alloc", "--device", "host", "--quick", "--force", "--out", &folder]).expect(0);
    fs::write(&report, former).unwrap();
    let before = sandbox.path().join("report.json");
    let same = compared(&sandbox, &before, &before, &[]).expect(0).json();
    assert_eq!((&same["changed"], &same["missing"]), (&json!([]), &json!([])));
    assert!(same["unchanged"].as_u64().unwrap() > 1);

    let slower = value["comparisons"][1]["measured"]["percentiles"].as_object_mut().unwrap();
    for (name, number) in slower.iter_mut().filter(|(name, _)| *name != "n") {
        *number = json!(number.as_f64().unwrap() * 100.0 + 1.0 + f64::from(u8::from(name == "max")));
    }
    let after = sandbox.path().join("after.json");
    fs::write(&after, value.to_string()).unwrap();
    let changed = compared(&sandbox, &before, &after, &[]).expect(0).json();
    assert_eq!(changed["changed"].as_array().unwrap().len(), 1, "{changed}");

    value["machine"]["cpu"] = json!("another");
    fs::write(&after, value.to_string()).unwrap();
    let refused = compared(&sandbox, &before, &after, &[]);
    let error = refused.expect(5).json();
    assert!(error["error"]["message"].as_str().unwrap().contains("another"), "{error}");
    compared(&sandbox, &before, &after, &["--force"]).expect(0);
    compared(&sandbox, &before, &sandbox.path().join("nothing.json"), &[]).expect(3);
}

/// The sandbox fails the test if a process or a file remains.
#[test]
fn interrupted_run_leaves_nothing() {
    for (arguments, processes) in [
        // The command, its broker and a peer.
        (["bench", "all", "--device=host", "--quiet"], 3),
        // The command, its broker and nine that hand over to each other.
        (["bench", "fanout", "--device=host", "--quiet"], 11),
        (["bench", "fanout", "--simulated", "--quiet"], 11),
    ] {
        let sandbox = Sandbox::new();
        let out = sandbox.path().join("old/../new/out");
        let run = sandbox.spawn(arguments.iter().copied().chain(["--out", out.to_str().unwrap()]));
        eventually("its broker and peers run", || sandbox.processes().len() >= processes);
        run.signal(Signal::INT);
        assert_eq!(run.wait().code, None);
        eventually("all are gone", || sandbox.processes().is_empty());
        assert!(!sandbox.path().join("new").exists() && !sandbox.path().join("old").exists());
    }
}

#[test]
fn bad_input_is_refused() {
    let sandbox = Sandbox::new();
    for (arguments, code) in [
        (&["speed"] as &[&str], 2),
        (&["latency", "--device", "tpu"], 2),
        (&["latency", "--device", "host", "--out", "/dev/null/x"], 5),
        (&["compare", "a.json"], 2),
    ] {
        bench(&sandbox, arguments).expect(code);
    }
}
