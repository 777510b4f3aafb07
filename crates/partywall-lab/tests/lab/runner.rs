//! What the runner does for all labs: lists, two terminals, ends, the tour.

use std::path::Path;

use partywall_harness::{Running, Sandbox, eventually};
use serde_json::Value;

use super::{Report, lab, processes_of};

#[test]
fn labs_are_listed_and_need_a_gpu() {
    let sandbox = Sandbox::new();
    let without = |arguments: &[&str]| {
        Running::spawn(sandbox.command(arguments).env("PARTYWALL_LIBCUDA", "/nonexistent/libcuda.so.1")).wait()
    };
    let list = without(&["lab"]).expect(0);
    assert!(list.text().contains("errors") && list.text().contains("export, import"), "{}", list.text());
    assert_eq!(without(&["lab", "--json"]).expect(0).json()["labs"][3]["roles"][0], "export");
    for arguments in [&["lab", "errors"][..], &["lab", "vmm", "export"], &["lab", "errors", "--device", "1"]] {
        let output = without(arguments).expect(6);
        assert!(output.stderr.contains("a lab is about a GPU's driver"), "{}", output.stderr);
        assert!(output.stderr.contains("add --simulated"), "{}", output.stderr);
        assert_eq!(output.text(), "");
    }
    let host = without(&["lab", "pool", "--json"]).expect(0);
    assert_eq!(host.stderr, "", "what `auto` means is in the result");
    assert!(without(&["lab", "vmm", "--device", "host"]).expect(2).stderr.contains("labs run on GPUs only"));
    assert!(without(&["lab", "errors", "--handle", "00"]).expect(2).stderr.contains("128 hexadecimal digits"));
}

#[test]
fn only_labs_that_are_listed_are_suggested() {
    let sandbox = Sandbox::new();
    let told = |arguments: &[&str]| sandbox.run(arguments).expect(2).stderr;
    for unknown in ["nosuch", "benchh"] {
        let stderr = told(&["lab", unknown]);
        assert!(stderr.contains(unknown) && !stderr.contains("'bench'"), "{stderr}");
    }
    assert!(told(&["lab", "simaphore"]).contains("'semaphore'"));
    assert!(told(&["benchh"]).contains("'bench'"), "it is a command of its own");
}

#[test]
fn every_lab_is_on_the_pages() {
    let path = include_str!("../../../../docs/learn/index.md");
    let page = include_str!("../../../../docs/labs.md");
    for lab in Sandbox::new().json(["lab"])["labs"].as_array().unwrap() {
        let name = lab["name"].as_str().unwrap();
        assert!(page.contains(&format!("\n## `{name}`\n")), "docs/labs.md has no section about {name}");
        let row = format!("\n| `partywall lab {name}");
        assert!(path.contains(&row), "the path through the labs in docs/learn/index.md leaves out {name}");
    }
}

/// What the steps show is tested with each lab.
#[test]
fn steps_on_the_page_of_mistakes_are_steps_of_their_labs() {
    let page = include_str!("../../../../docs/learn/mistakes.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sources = root.join("crates/partywall-lab/src");
    let source = |lab: &str| {
        let folders = [sources.join(lab.replace('-', "_")), root.join("examples").join(lab).join("src")];
        let in_folders = folders.iter().flat_map(std::fs::read_dir).flatten().flatten().map(|entry| entry.path());
        let files = in_folders.chain([sources.join(format!("{}.rs", lab.replace('-', "_")))]);
        files.filter_map(|file| std::fs::read_to_string(file).ok()).collect::<String>()
    };
    let mut checked = 0;
    for command in page.split("`partywall lab ").skip(1) {
        let (command, rest) = command.split_once('`').unwrap();
        let source = source(command.split_whitespace().next().unwrap());
        assert!(!source.is_empty(), "there is no lab {command}");
        // The steps follow the command, within its cell of the table or up to the next command.
        let cell = rest.split(['|', ';']).next().unwrap();
        let named = cell.strip_prefix(", step").map_or("", |steps| steps.trim_start_matches('s'));
        for step in named.split('`').skip(1).step_by(2) {
            assert!(source.contains(&format!("\"{step}\"")), "lab {command} has no step {step}");
            checked += 1;
        }
    }
    assert!(checked >= 20, "only {checked} steps were found on the page");
}

#[test]
fn roles_meet_in_two_terminals_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    for (name, first, second) in [
        ("errors", "exporter", "opener"),
        ("handle-file", "producer", "consumer"),
        ("vmm", "export", "import"),
        ("coherency", "writer", "reader"),
        ("events", "recorder", "waiter"),
        ("semaphore", "worker", "watcher"),
        ("crash", "waiter", "observer"),
        ("pool", "holder", "taker"),
        ("ring", "writer", "reader"),
    ] {
        let missing = Running::spawn(&mut lab(&sandbox, &[name, second])).wait().expect(3);
        assert!(missing.stderr.contains(&format!("partywall lab {name} {first}")), "{}", missing.stderr);

        // A killed role leaves its socket behind, which must not hinder the next one.
        for killed in [true, false] {
            let mut waiting = Running::spawn(&mut lab(&sandbox, &[name, first]));
            while !waiting.line().starts_with("Waiting for") {}
            if killed {
                waiting.kill();
                continue;
            }
            let another = Running::spawn(&mut lab(&sandbox, &[name, first])).wait().expect(5);
            assert!(another.stderr.contains("another terminal waits"), "{}", another.stderr);

            let report = Report::of(&Running::spawn(&mut lab(&sandbox, &[name, second, "--json"])).wait().expect(0));
            assert!(report.steps.iter().all(|step| step["role"] != first), "each terminal has its own steps");
            assert!(report.beliefs.values().all(|belief| belief["evidence"] != "its step was not reached"));
            let printed = waiting.wait().expect(0).text().to_owned();
            assert!(printed.contains(&format!("{first:<10} │ ")), "{printed}");
        }
        let left = sandbox.path().join(format!("run/partywall/default.lab-{name}"));
        assert!(!left.exists());
    }
}

#[test]
fn killed_lab_leaves_no_process_and_no_directory_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut running = Running::spawn(&mut lab(&sandbox, &["crash"]));
    while !running.line().contains("server-killed") {}
    assert!(processes_of(&sandbox).len() > 2, "a broker, the waiter, and others");
    running.kill();
    let left = || std::fs::read_dir(sandbox.path().join("run/partywall")).unwrap().count();
    eventually("everything that the lab started is gone", || processes_of(&sandbox).is_empty() && left() == 0);
}

#[test]
fn killed_lab_leaves_no_files() {
    let sandbox = Sandbox::new();
    let run = sandbox.path().join("run/partywall");
    let entries = || std::fs::read_dir(&run).into_iter().flatten().flatten().map(|entry| entry.path());
    let running = Running::spawn(&mut lab(&sandbox, &["pipeline", "--device", "host"]));
    eventually("the lab has painted images", || entries().any(|path| path.join("images/image-0.png").exists()));
    running.kill();
    eventually("everything that it made is gone", || processes_of(&sandbox).is_empty() && entries().count() == 0);
}

#[test]
fn broker_of_an_ended_lab_ends() {
    let sandbox = Sandbox::new();
    let directory = sandbox.path().join("lab");
    let mut command = sandbox.command(["serve", "--of-a-lab"]);
    command.arg((std::process::id() + 1).to_string()).arg("--socket").arg(directory.join("broker.sock"));
    Running::spawn(&mut command).wait().expect(0);
    assert!(!directory.exists());
}

// Holds 37.
#[test]
fn needs_minutes_tour_shows_the_beliefs_of_every_lab_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["lab", "tour", "--simulated", "--json"]).expect(0);
    let lines: Vec<Value> = output.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (header, rest) = lines.split_first().unwrap();
    let (last, labs) = rest.split_last().unwrap();
    assert_eq!((&header["lab"], &header["simulated"]), (&"tour".into(), &true.into()));
    let listed = sandbox.json(["lab"]);
    let names: Vec<_> = listed["labs"].as_array().unwrap().iter().map(|lab| &lab["name"]).collect();
    assert_eq!(labs.iter().map(|lab| &lab["lab"]).collect::<Vec<_>>(), names);
    let went_well = |lab: &&Value| lab["different"] == 0 && lab["steps"].as_u64() > Some(0) && lab["error"].is_null();
    let bad: Vec<_> = labs.iter().filter(|lab| !went_well(lab)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!((&last["labs"], &last["different"]), (&names.len().into(), &0.into()));
    assert_eq!(last["failed"], Value::Array(Vec::new()));
    let beliefs = last["beliefs"].as_array().unwrap();
    assert!(names.iter().all(|name| beliefs.iter().any(|belief| belief["lab"] == **name)));
    // These beliefs are reported only by labs that kill a process.
    assert!(beliefs.iter().any(|belief| belief["belief"] == "falls" && belief["verdict"] == "refuted"));
}

#[test]
fn killed_tour_leaves_no_process() {
    let sandbox = Sandbox::new();
    let mut tour = sandbox.spawn(["lab", "tour", "--simulated"]);
    while !tour.line().starts_with("errors ") {}
    tour.kill();
    eventually("everything that the tour started is gone", || processes_of(&sandbox).is_empty());
}
