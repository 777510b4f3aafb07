//! `partywall bench`: its cases and its reports, and that it leaves nothing behind.

use std::{fs, path::Path};

use partywall_harness::{
    Output, Running, Sandbox, binary, eventually,
    mps::{Manner, PIPES, StandIn},
};
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

// Holds 332.
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

// Holds 334.
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

/// The names of the subjects of a choice.
fn subjects_of(sandbox: &Sandbox, choice: &str) -> Vec<String> {
    let listed = sandbox.json(["bench", "--list"]);
    let of = listed["subjects"].as_array().unwrap().iter().filter(|subject| subject["of"] == choice);
    of.map(|subject| subject["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn all_subjects_are_listed_each_once() {
    let sandbox = Sandbox::new();
    assert_eq!(
        subjects_of(&sandbox, "all"),
        ["latency", "bandwidth", "copy", "handoff", "attach", "alloc", "fanout"],
        "what is measured without arguments"
    );
    let mut names: Vec<_> = ["all", "floors", "peers"].iter().flat_map(|of| subjects_of(&sandbox, of)).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    let text = bench(&sandbox, &["--list"]).expect(0).text();
    assert!(names.iter().all(|name| text.contains(name.as_str())), "{text}");
}

/// Each subject has a broker, processes and files of its own. The sandbox fails the test if one of them remains.
// Holds 335.
#[test]
fn subjects_are_measured_beside_their_floors_and_judged() {
    let sandbox = Sandbox::new();
    let out = sandbox.path().join("out");
    let subjects = ["round_trip", "pools", "ordering_wakes", "ordering_permits", "queues", "ordering_deaths", "put"];
    let arguments = [&subjects[..], &["--device", "host", "--quick", "--out", out.to_str().unwrap()]].concat();
    let text = bench(&sandbox, &arguments).expect(0).text();
    let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    let comparisons = report["comparisons"].as_array().unwrap();
    let judged: Vec<_> = comparisons.iter().filter(|result| result.get("verdict").is_some()).collect();
    for (name, goal) in [
        ("round trip", "<= 1.3x floor"),
        ("take a permit and give it back, alone", "<= 150 ns"),
        ("submit, claim, complete and take, in one process", "<= 1.5x floor"),
        ("end to the end of its lease", "<= 1 s"),
        ("put", "<= 1.25x floor"),
    ] {
        let result = judged.iter().find(|result| result["measured"]["name"] == name);
        assert_eq!(result.unwrap()["verdict"]["goal"], goal, "{name}");
        assert!(text.contains(&format!("{goal} (here ")), "{goal}: {text}");
    }
    let notes = report["notes"].to_string();
    assert!(!notes.contains("failed") && !notes.contains("not judged"), "{notes}");
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("&lt;= 1.3x floor (here "), "{page}");
    // A missed goal is a result, and an error only where that was asked for.
    let strict = bench(&sandbox, &["put", "--device", "host", "--quick", "--strict", "--json"]);
    let text = String::from_utf8_lossy(&strict.stdout);
    let met = text.contains("\"met\": true") || text.contains("\"met\":true");
    assert_eq!(strict.code, Some(if met { 0 } else { 1 }), "{strict:?}");
}

#[test]
fn subjects_of_gpus_are_measured_on_the_simulated_one() {
    let sandbox = Sandbox::new();
    let report = sandbox.json(["bench", "gpu_open", "ordering_mps", "ordering_gpu_deaths", "--simulated", "--quick"]);
    let text = report.to_string();
    for part in ["import and map", "with a stream that waits", "ordering_mps: without MPS", "SIMULATED"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// The sandbox fails the test if the daemon or its directory remains.
#[test]
fn server_of_mps_runs_as_long_as_its_subject() {
    let sandbox = Sandbox::new();
    let stand_in = StandIn::new(sandbox.path(), Manner::Good);
    let mut command = sandbox.command(["--json", "bench", "ordering_mps", "--simulated", "--quick"]);
    command.env("PATH", stand_in.path()).env_remove(PIPES).env("SIMCUDA_MPS", "1");
    let report = Running::spawn(&mut command).wait().expect(0).json();
    let comparisons = report["comparisons"].as_array().unwrap();
    let under_mps = comparisons.iter().filter(|result| result["measured"]["parameters"]["gpu"] == "MPS");
    assert!(under_mps.count() > 3, "{report}");
    let asked = stand_in.asked();
    assert!(asked.contains(&"-d".to_owned()) && asked.iter().any(|asked| asked.starts_with("quit")), "{asked:?}");
}

// Holds 336.
#[test]
fn subject_that_needs_a_gpu_is_refused_by_its_name_and_left_out_of_a_choice() {
    let sandbox = Sandbox::new();
    let refused = bench(&sandbox, &["gpu_open", "--device", "host", "--quick"]).expect(6);
    assert!(refused.stderr.contains("gpu_open needs a GPU") && refused.stderr.contains("--simulated"), "{refused:?}");
    let other = bench(&sandbox, &["peer_gpu_open", "--device", "cuda:1", "--simulated", "--quick"]).expect(6);
    assert!(other.stderr.contains("peer_gpu_open uses the first GPU alone"), "{other:?}");
    let out = sandbox.path().join("out");
    let run = sandbox.spawn([
        "bench",
        "alloc",
        "fanout",
        "floors",
        "--device=host",
        "--quick",
        "--save-each",
        "--out",
        out.to_str().unwrap(),
    ]);
    eventually("it has measured a subject", || out.join("report.json").exists());
    run.signal(Signal::INT);
    run.wait();
    eventually("all are gone", || sandbox.processes().is_empty());
    let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    assert!(questions(&report).contains(&"taking a block and giving it back"), "{report}");
}

// Holds 336.
#[test]
fn other_subjects_are_measured_if_one_fails() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path().join("out");
    let mut command = sandbox.command(["bench", "alloc", "peer_host_open", "--device", "host", "--quick", "--out"]);
    command.arg(&folder).env("PARTYWALL_PYTHON", "/nonexistent/python");
    let output = Running::spawn(&mut command).wait().expect(1);
    assert!(output.stderr.contains("peer_host_open") && output.stderr.contains("/nonexistent/python"), "{output:?}");
    let report: Value = serde_json::from_slice(&fs::read(folder.join("report.json")).unwrap()).unwrap();
    assert!(questions(&report).contains(&"taking a block and giving it back"), "{report}");
    assert!(report["notes"].to_string().contains("peer_host_open: failed"), "{report}");
}

/// The sandbox fails the test if a process or a file remains.
// Holds 331.
#[test]
fn interrupted_run_leaves_nothing() {
    for (arguments, processes) in [
        // The command, its broker and a peer.
        (["bench", "all", "--device=host", "--quiet"], 3),
        // The command, its broker and nine that hand over to each other.
        (["bench", "fanout", "--device=host", "--quiet"], 11),
        (["bench", "fanout", "--simulated", "--quiet"], 11),
        // The command, its broker, and the processes that share a queue.
        (["bench", "queues", "--device=host", "--quiet"], 4),
        // It has a file of 2 GiB, to which a link in the directory of its broker leads.
        (["bench", "put", "--device=host", "--quiet"], 2),
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
        (&["latency", "speed"], 2),
        (&["latency", "--save-each"], 2),
        (&["latency", "--device", "host", "--out", "/dev/null/x"], 5),
        (&["latency", "--device", "host", "--socket", "/dev/null/broker.sock"], 5),
        (&["compare", "a.json"], 2),
    ] {
        bench(&sandbox, arguments).expect(code);
    }
}
