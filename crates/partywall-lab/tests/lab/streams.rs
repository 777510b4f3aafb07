//! Labs in which data flows: `pool`, `ring`, `pipeline`, `work-queue`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use partywall_harness::{Output, Running, Sandbox};
use serde_json::Value;

use super::{Report, lab};

#[test]
fn blocks_are_handed_over_and_reclaimed_from_the_dead_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    for device in ["host", "cuda"] {
        let mut command = lab(&sandbox, &["pool", "--json", "--device", device]);
        let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
        assert_eq!(report.header["simulated"], device == "cuda");
        assert_eq!(report.steps_with("different"), [""; 0]);
        assert_eq!(report.steps_with("not-tried"), [""; 0]);
        assert_eq!(report.with("refuted"), ["asks", "copied", "lost", "stale", "twice"]);
        assert_eq!(report.step("offer")["role"], "holder");
        assert_eq!(report.step("hand-over")["values"]["first byte, read here"], "0x5a");
        assert_eq!(report.step("whole")["values"]["free blocks"], "8, of 8");
    }
}

#[test]
fn numbers_stream_through_a_ring_and_are_checked_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    for (device, pattern) in [("host", "fibonacci"), ("cuda", "3,1,4,1,5")] {
        let arguments = ["ring", "--json", "--device", device, "--messages", "300", "--pattern", pattern];
        let report = Report::of(&Running::spawn(&mut lab(&sandbox, &arguments)).wait().expect(0));
        assert_eq!(report.steps_with("different"), [""; 0]);
        assert_eq!(report.steps_with("not-tried"), [""; 0]);
        assert_eq!(report.with("refuted"), ["brake", "late", "slowed", "torn", "unnoticed"]);
        assert_eq!(report.step("stream")["values"]["messages received, in order"], "300");
        assert_eq!(report.step("slow-latest")["values"]["missed, according to the message"], "79");
    }
    let wrong = Running::spawn(&mut lab(&sandbox, &["ring", "--pattern", "1,x"])).wait().expect(2);
    assert!(wrong.stderr.contains("comma-separated numbers"), "{}", wrong.stderr);
}

#[test]
fn pipeline_continues_without_its_killed_stage_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let images = sandbox.path().join("images");
    let results = ["host", "cuda"].map(|place| sandbox.path().join(place));
    std::fs::create_dir(&images).unwrap();
    for (name, width, height) in [("a.png", 60, 40), ("b.jpg", 20, 50), ("c.png", 1, 1)] {
        let image = image::RgbImage::from_fn(width, height, |x, y| image::Rgb([x as u8 * 4, y as u8 * 5, 9]));
        image.save(images.join(name)).unwrap();
    }
    let run = |device: &str, out: &Path, more: &[&str]| {
        let mut command = lab(&sandbox, &["pipeline", "--json", "--device", device, "--frames", "60", "--width", "30"]);
        command.arg("--images").arg(&images).arg("--out").arg(out).args(more);
        Report::of(&Running::spawn(&mut command).wait().expect(0))
    };
    for (device, out) in ["host", "cuda"].into_iter().zip(&results) {
        let report = run(device, out, &[]);
        assert_eq!(report.steps_with("different"), [""; 0]);
        assert_eq!(report.step("frames")["values"]["frames"], "60 of 60, 0 lost, 0 written twice");
        assert_eq!(report.with("open").len(), if device == "host" { 3 } else { 2 });
        for belief in ["falls", "again"] {
            assert_eq!(report.beliefs[belief]["evidence"], "nothing was killed: --kill STAGE does it");
        }
        if device == "host" {
            assert_eq!(report.beliefs["pixels"]["evidence"], "it needs a GPU: --device cuda");
        }
        for stage in ["decode", "filter", "encode"] {
            assert_eq!(report.step(stage)["values"]["frames"], "60");
        }
        for stage in ["decode", "filter", "encode"] {
            let report = run(device, out, &["--kill", stage]);
            assert_eq!(report.steps_with("different"), [""; 0], "{stage} on {device}");
            assert_eq!(report.beliefs["falls"]["verdict"], "refuted", "{stage} on {device}");
            assert_ne!(report.beliefs["again"]["verdict"], "true", "{stage} on {device}: nothing lost shows nothing");
        }
    }
    let [host, cuda] = results.map(|folder| {
        let files = ["a.png", "b.jpg", "c.png"].map(|name| std::fs::read(folder.join(name)).unwrap());
        assert_eq!(image::open(folder.join("a.png")).unwrap().width(), 30);
        files
    });
    assert!(host == cuda, "kernels and the CPU make the same pixels");
    let empty = Running::spawn(lab(&sandbox, &["pipeline", "--images"]).arg(sandbox.path())).wait().expect(3);
    assert!(empty.stderr.contains("it contains neither PNG nor JPEG files"), "{}", empty.stderr);
    let nowhere = Running::spawn(&mut lab(&sandbox, &["pipeline", "--out", "/dev/null"])).wait().expect(5);
    assert!(nowhere.stderr.contains("cannot create the folder /dev/null"), "{}", nowhere.stderr);
}

/// Returns the counts in the last line of `partywall lab work-queue --json`.
fn counts(output: &Output, names: &[&str]) -> Vec<u64> {
    let last: Value = serde_json::from_str(output.text().lines().last().unwrap()).unwrap();
    names.iter().map(|name| last[name].as_u64().unwrap()).collect()
}

// Holds 358.
#[test]
fn tasks_of_killed_workers_are_done_once_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    for device in ["host", "cuda"] {
        let run = |more: &[&str]| {
            let mut command = lab(&sandbox, &["work-queue", "--json", "--device", device]);
            Running::spawn(command.args(more)).wait().expect(0)
        };
        let quiet = run(&["--workers", "3", "--tasks", "100"]);
        let names = ["tasks", "right", "wrong", "lost", "twice", "kills", "redelivered"];
        assert_eq!(counts(&quiet, &names), [100, 100, 0, 0, 0, 0, 0]);
        let quiet = Report::of(&quiet);
        for belief in ["half", "lost", "twice"] {
            assert_eq!(quiet.beliefs[belief]["evidence"], "nothing was killed: --kill does it");
        }

        // Even in a short run: one task, during which its only worker is killed.
        for (workers, tasks) in [("1", "1"), ("3", "200")] {
            let killed = run(&["--workers", workers, "--tasks", tasks, "--kill"]);
            let tasks: u64 = tasks.parse().unwrap();
            assert_eq!(counts(&killed, &names[..5]), [tasks, tasks, 0, 0, 0], "{device}: {}", killed.text());
            assert!(counts(&killed, &names[5..]).iter().all(|count| *count >= 1), "{device}: {}", killed.text());
            let report = Report::of(&killed);
            assert_eq!(report.steps_with("different"), [""; 0]);
            assert_eq!(report.with("refuted"), ["half", "lost", "textbook", "twice"]);
            let last: Value = serde_json::from_str(killed.text().lines().last().unwrap()).unwrap();
            assert!(last["textbook"]["lost"].as_u64().unwrap() >= 1, "the task that its worker had: {last}");
            assert_eq!((&last["textbook"]["tasks"], &last["textbook"]["kills"]), (&tasks.into(), &1.into()));
        }
    }
}

#[test]
fn worker_in_another_terminal_is_not_killed() {
    let sandbox = Sandbox::new();
    let alone = ["work-queue", "master", "--device", "host"];
    let missing = Running::spawn(&mut lab(&sandbox, &alone)).wait().expect(3);
    assert!(missing.stderr.contains("partywall lab work-queue worker"), "{}", missing.stderr);
    let mut worker = Running::spawn(&mut lab(&sandbox, &["work-queue", "worker", "--device", "host"]));
    while !worker.line().starts_with("Waiting for") {}
    let mut master = lab(&sandbox, &alone);
    let master = Running::spawn(master.args(["--workers", "2", "--tasks", "300", "--kill", "--json"])).wait().expect(0);
    assert_eq!(counts(&master, &["tasks", "right", "lost", "twice"]), [300, 300, 0, 0]);
    assert!(counts(&master, &["kills"]) >= vec![1]);
    let printed = worker.wait().expect(0).text().to_owned();
    assert!(printed.contains("The tasks of the first worker"), "{printed}");
}

#[test]
fn work_without_workers_or_tasks_is_refused() {
    let sandbox = Sandbox::new();
    for option in ["--workers", "--tasks"] {
        let refused = Running::spawn(&mut lab(&sandbox, &["work-queue", option, "0"])).wait().expect(2);
        assert!(refused.stderr.contains(option) && refused.stderr.contains("use 1 or more"), "{}", refused.stderr);
    }
}

// Holds 315.
#[test]
fn trace_of_a_lab_in_host_memory_has_arrows_between_its_processes() {
    let sandbox = Sandbox::new();
    let labs: [(&[&str], &str); 3] = [
        (&["work-queue", "--tasks", "50", "--workers", "2", "--kill"], "task"),
        (&["pipeline", "--frames", "5"], "sample"),
        (&["ring"], "sample"),
    ];
    for (arguments, category) in labs {
        let name = arguments[0];
        let file = sandbox.path().join(format!("{name}.json"));
        let path = file.to_str().unwrap();
        let run =
            || Running::spawn(lab(&sandbox, arguments).args(["--device", "host", "--json", "--trace", path])).wait();
        let printed: Value = serde_json::from_str(run().expect(0).text().lines().last().unwrap()).unwrap();
        // A busy machine may lose events of a ring; then the count says so.
        assert!(printed["trace"]["lost"].is_u64(), "{printed}");
        assert_eq!(printed["trace"]["out"], path, "{printed}");
        let document: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let events = document["traceEvents"].as_array().unwrap();
        let mut arrows: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for point in events.iter().filter(|event| event["cat"] == category) {
            arrows.entry(point["id"].as_u64().unwrap()).or_default().insert(point["pid"].as_u64().unwrap());
        }
        assert!(arrows.values().any(|pids| pids.len() > 1), "{name}: {arrows:?}");
        let again = run().expect(5).text().to_owned();
        assert!(again.contains("already exists"), "{again}");
        // A killed worker leaves its task to the next one.
        let is_second = |event: &Value| event["args"]["attempt"] == 2 && event["cat"] == "queue";
        assert_eq!(events.iter().any(is_second), name == "work-queue");
    }
    for (arguments, code, what) in [
        (&["ring", "--device", "host", "--trace", "/missing/t.json"][..], 5, "cannot create /missing/t.json"),
        (&["ring", "--device", "host", "--trace", "-"], 2, "standard output, which has the lines of the lab"),
        (&["ring", "writer", "--device", "host", "--trace", "t.json"], 2, "partywall lab ring reader --trace t.json"),
        (&["vmm", "--trace", "t.json"], 2, "the lab vmm records no trace"),
        (&["pool", "--trace", "t.json"], 2, "it is an option of events, crash, ring, pipeline"),
        (&["work-queue", "worker", "--device", "host", "--kill"], 2, "partywall lab work-queue master --kill`"),
        (&["work-queue", "worker", "--device", "host", "--tasks", "7"], 2, "work-queue master --tasks …`"),
        (&["work-queue", "--tasks", "7", "worker"], 2, "--tasks is an option of the role master, not of worker"),
    ] {
        let refused = Running::spawn(&mut lab(&sandbox, arguments)).wait().expect(code);
        assert!(refused.stderr.contains(what), "{}", refused.stderr);
    }
}
