//! `partywall lab`, on the simulated driver and without one.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Command,
};

use partywall_harness::{Output, Running, Sandbox, eventually, simulated_driver};
use serde_json::Value;

/// `partywall lab` on the simulated driver.
fn lab(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    let mut command = sandbox.command(["lab"]);
    command.args(arguments).env("PARTYWALL_LIBCUDA", simulated_driver());
    command
}

/// The JSON output of a lab: its header, its steps by name, and its claims by name.
struct Report {
    header: Value,
    steps: Vec<Value>,
    claims: BTreeMap<String, Value>,
}

impl Report {
    fn of(output: &Output) -> Self {
        let lines: Vec<Value> = output.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (header, rest) = lines.split_first().unwrap();
        let (last, steps) = rest.split_last().unwrap();
        let claims = last["claims"].as_array().unwrap().iter();
        let claims = claims.map(|claim| (claim["claim"].as_str().unwrap().to_owned(), claim.clone()));
        Self { header: header.clone(), steps: steps.to_vec(), claims: claims.collect() }
    }

    fn step(&self, name: &str) -> &Value {
        self.steps.iter().find(|step| step["step"] == name).unwrap_or_else(|| panic!("no step {name:?}"))
    }

    /// The claims with a verdict.
    fn with(&self, verdict: &str) -> Vec<&str> {
        let with = self.claims.iter().filter(|(_, claim)| claim["verdict"] == verdict);
        with.map(|(name, _)| name.as_str()).collect()
    }

    /// The steps with a verdict.
    fn steps_with(&self, verdict: &str) -> Vec<&str> {
        let with = self.steps.iter().filter(|step| step["verdict"] == verdict);
        with.map(|step| step["step"].as_str().unwrap()).collect()
    }
}

/// Fails if a process has left something on the device, or if another number of processes ended by themselves.
#[track_caller]
fn assert_nothing_left(ledger: &Path, processes: usize) {
    let files: Vec<_> = std::fs::read_dir(ledger).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), processes, "{files:?}");
    for file in files {
        let left = std::fs::read_to_string(file).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), Value::Array(Vec::new()), "{left}");
    }
}

#[test]
fn each_way_to_fail_is_shown_and_nothing_is_left_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let mut command = lab(&sandbox, &["errors", "--json"]);
    let report = Report::of(&Running::spawn(command.env("SIMCUDA_LEDGER", &ledger)).wait().expect(0));
    assert_nothing_left(&ledger, 3);
    assert_eq!(report.header["simulated"], true);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), ["other-boot"]);
    assert_eq!(report.with("held"), ["closed-once"]);
    assert_eq!(report.with("not-tried"), [""; 0]);
    for (step, code) in [
        ("host-pointer", 1),
        ("freed", 1),
        ("uninitialised", 1),
        ("pinned", 1),
        ("managed", 1),
        ("pool", 1),
        ("vmm", 1),
        ("vmm-size", 1),
        ("event-timing", 1),
        ("same-process", 201),
        ("exporter-gone", 400),
        ("garbage", 1),
        ("free-mapping", 1),
    ] {
        assert_eq!(report.step(step)["refusal"], code, "{step}");
    }
    for (step, role) in [("pool", "exporter"), ("too-early", "opener"), ("neighbour", "intruder")] {
        assert_eq!(report.step(step)["role"], role);
    }
    assert_eq!(report.step("too-early")["values"]["read while the work waited"], "0x44");
}

#[test]
fn handles_in_files_are_too_early_stale_and_right_on_the_simulated_gpu() {
    // The two killed producers do not end by themselves.
    let report = report_of("handle-file", 2);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("did-not-hold").len(), 6, "{:?}", report.claims);
    for (step, label, found) in [
        ("half-file", "read", "32 of 64 bytes"),
        ("too-early", "read from the memory", "0x0d in 4194304 of 4194304 bytes"),
        ("opened", "read from the memory", "0x5a in 4194304 of 4194304 bytes"),
        ("freed", "file", "unchanged"),
        ("name-waits", "read from the memory", "0x5a in 4194304 of 4194304 bytes"),
        ("name-ends", "read from the memory that is open", "0x5a in 4194304 of 4194304 bytes"),
    ] {
        assert_eq!(report.step(step)["values"][label], found, "{step}");
    }
    assert_eq!(report.step("stale-file")["refusal"], 400);
    assert!(report.step("name-ends")["values"]["open"].as_str().unwrap().contains("ended with its owner"));
}

#[test]
fn child_forked_first_changes_memory_and_later_ones_have_no_cuda_on_the_simulated_gpu() {
    let report = report_of("fork", 2);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("did-not-hold"), ["addresses", "copy", "harms", "survives"]);
    assert_eq!(report.step("changed")["values"]["read by the parent"], "0x22 in 4194304 of 4194304 bytes");
    assert_eq!(report.step("address")["refusal"], 1);
    assert_eq!(report.step("forked-later")["refusal"], 3);
    assert_eq!(report.step("parent")["values"]["memory written and read again"], "0x11");
}

#[test]
fn death_of_the_forked_child_ends_the_lab() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["fork"]);
    // Only the child opens a handle.
    let output = Running::spawn(command.env("SIMCUDA_FAULTS", "cuIpcOpenMemHandle:1=kill")).wait().expect(1);
    assert!(output.stderr.contains("the forked child did not do its work"), "{}", output.stderr);
    eventually("no process is left", || processes_of(&sandbox).is_empty());
}

#[test]
fn vmm_lab_shows_the_hand_over_call_by_call_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let uuid = "GPU-51301ca7-0000-0000-0000-000000000001";
    let mut command = lab(&sandbox, &["vmm", "--json", "--device", uuid]);
    command.env("SIMCUDA_DEVICES", "2").env("SIMCUDA_LEDGER", &ledger);
    let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
    assert_nothing_left(&ledger, 2);
    assert_eq!(report.header["uuid"], uuid);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    for step in ["map-offset", "map-half"] {
        assert_eq!(report.step(step)["refusal"], 801);
    }
    for claim in ["one-address", "parts", "consumed", "fd-holds", "copy", "passed-on", "maker"] {
        assert_eq!(report.claims[claim]["verdict"], "did-not-hold", "{claim}");
    }
}

#[test]
fn memory_of_another_gpu_is_used_even_if_that_is_hidden_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let run = |devices: &str, more: &[&str]| {
        let mut command = lab(&sandbox, &["p2p", "--json"]);
        command.args(more).env("SIMCUDA_DEVICES", devices).env("SIMCUDA_LEDGER", &ledger);
        Report::of(&Running::spawn(&mut command).wait().expect(0))
    };
    let report = run("2", &["--device", "1"]);
    assert_nothing_left(&ledger, 3);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("did-not-hold"), ["own-only", "silent", "visible"]);
    assert_eq!(report.with("open"), ["alike"]);
    for (step, sees) in [("handle", "2"), ("descriptor", "2"), ("handle-hidden", "1"), ("descriptor-hidden", "1")] {
        let values = &report.step(step)["values"];
        assert_eq!(values["GPUs that this process sees"], sees, "{step}");
        assert!(values["owner's GPU, reader's"].as_str().unwrap().ends_with("000000000000"), "{values}");
    }

    let alone = run("1", &[]);
    assert_eq!(alone.steps_with("not-tried"), ["one-gpu"]);
    assert_eq!(alone.with("not-tried").len(), 4);
    assert!(alone.claims["visible"]["evidence"].as_str().unwrap().contains("only one GPU is visible"));
}

#[test]
fn coherency_lab_shows_stores_of_other_kernels_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let mut command = lab(&sandbox, &["coherency", "--json"]);
    let report = Report::of(&Running::spawn(command.env("SIMCUDA_LEDGER", &ledger)).wait().expect(0));
    assert_nothing_left(&ledger, 2);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), ["mps"]);
    assert_eq!(report.with("not-tried"), [""; 0]);
    // Whether a plain load sees the store within its time limit depends on timing here.
    for (claim, verdict) in [
        ("loop", "did-not-hold"),
        ("kernel-end", "did-not-hold"),
        ("side-by-side", "open"),
        ("in-order", "open"),
        ("volatile", "open"),
        ("writer-fence", "open"),
        ("block", "open"),
        ("scoped", "held"),
    ] {
        assert_eq!(report.claims[claim]["verdict"], verdict, "{claim}");
    }
    for id in ["stores", "stores-host"] {
        let stores = report.step(id)["values"].as_object().unwrap();
        assert_eq!(stores.values().filter(|text| text.as_str().unwrap().starts_with("seen after")).count(), 8);
    }
    assert_eq!(report.step("turns")["values"]["turns"], "20 of 20");
    assert!(report.step("order")["values"]["both volatile"].as_str().unwrap().contains("none with old data"));
}

/// Returns a lab's report, after checking that its processes, of which there are `processes`, left nothing on the device.
#[track_caller]
fn report_of(name: &str, processes: usize) -> Report {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let mut command = lab(&sandbox, &[name, "--json"]);
    let report = Report::of(&Running::spawn(command.env("SIMCUDA_LEDGER", &ledger)).wait().expect(0));
    assert_nothing_left(&ledger, processes);
    report
}

#[test]
fn events_lab_shows_waits_recorded_in_time_and_too_early_on_the_simulated_gpu() {
    let report = report_of("events", 2);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("did-not-hold").len(), 6, "{:?}", report.claims);
    for (step, found) in [
        ("event", "the new bytes"),
        ("event-early", "the old bytes"),
        ("event-again", "the old bytes"),
        ("timeline", "the new bytes"),
        ("timeline-early", "the new bytes"),
    ] {
        assert_eq!(report.step(step)["values"]["the work behind the wait found"], found, "{step}");
    }
}

#[test]
fn permits_of_killed_processes_come_back_on_the_simulated_gpu() {
    // The two killed processes do not end by themselves.
    let report = report_of("semaphore", 3);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("held"), ["in-turn", "never-more"]);
    assert_eq!(report.with("did-not-hold"), ["host-gives", "lost", "stuck"]);
    assert_eq!(report.step("order")["values"]["got a permit"], "1, 2, 3, 4");
    assert_eq!(report.step("whole")["values"]["free permits"], "2, of 2");
}

#[test]
fn permits_of_killed_processes_come_back_without_a_gpu() {
    let sandbox = Sandbox::new();
    let report = Report::of(&sandbox.run(["lab", "semaphore", "--json", "--device", "host"]).expect(0));
    assert_eq!(report.header["device"], "host");
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), ["stream"]);
    assert_eq!(report.with("held"), ["in-turn", "never-more"]);
    assert_eq!(report.with("did-not-hold"), ["lost", "stuck"]);
    assert_eq!(report.claims["host-gives"]["evidence"], "it needs a GPU: --device cuda");
}

#[test]
fn deaths_of_server_client_and_broker_are_shown_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let report = Report::of(&Running::spawn(&mut lab(&sandbox, &["crash", "--json"])).wait().expect(0));
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("held"), [""; 0]);
    assert_eq!(report.with("open"), ["leak", "outlives"]);
    for (step, printed) in [
        ("server-killed", "OwnerDied after"),
        ("server-aborted", "OwnerDied after"),
        ("server-faulted", "OwnerFaulted after"),
    ] {
        let values = &report.step(step)["values"];
        assert!(values["waiter, on the host"].as_str().unwrap().starts_with(printed), "{values}");
        assert_eq!(values["memory open since before"], "readable, every word as written");
    }
    for step in ["server-killed", "server-aborted"] {
        let values = &report.step(step)["values"];
        assert!(values["process that waits for its event"].as_str().unwrap().starts_with("still blocked"), "{values}");
    }
    for step in ["server-faulted", "client-faulted"] {
        assert_eq!(report.step(step)["values"]["its own next call"], "ContextLost");
    }
    let values = &report.step("third-stage")["values"];
    assert_eq!(
        (&values["check, with rests_on"], &values["check, without rests_on"]),
        (&"Tainted".into(), &"no error".into())
    );
    let values = &report.step("broker-killed")["values"];
    assert!(values["waiter, on the host"].as_str().unwrap().starts_with("BrokerGone after"), "{values}");
    assert_eq!(values["process that waits for an event"], "continued");
    let left: Vec<_> = std::fs::read_dir(sandbox.path().join("run/partywall")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn deaths_of_server_client_and_broker_are_shown_without_a_gpu() {
    let sandbox = Sandbox::new();
    let report = Report::of(&sandbox.run(["lab", "crash", "--json", "--device", "host"]).expect(0));
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), ["streams"]);
    assert_eq!(report.with("did-not-hold"), ["broker-memory", "client-harms", "hangs", "maker"]);
    assert_eq!(report.claims["travels"]["evidence"], "it needs a GPU: --device cuda");
    for step in ["server-killed", "server-aborted"] {
        let values = &report.step(step)["values"];
        assert!(values["waiter"].as_str().unwrap().starts_with("OwnerDied after"), "{values}");
        assert_eq!(values["memory under a kept name"], "readable, every word as written");
    }
    for step in ["client-killed", "client-aborted"] {
        assert!(report.step(step)["values"]["its lease"].as_str().unwrap().starts_with("gone after"));
    }
    let waiter = &report.step("broker-killed")["values"]["waiter"];
    assert!(waiter.as_str().unwrap().starts_with("BrokerGone after"), "{waiter}");
    assert_eq!(report.step("woken-server-killed")["role"], "waiter");
}

#[test]
fn under_mps_faults_are_left_out_and_leases_of_the_dead_stay_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["crash", "--json"]);
    let report = Report::of(&Running::spawn(command.env("SIMCUDA_MPS", "1")).wait().expect(0));
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), ["server-faulted", "client-faulted"]);
    for step in ["server-killed", "server-aborted"] {
        let values = &report.step(step)["values"];
        assert!(
            values["process that waits for its event"].as_str().unwrap().starts_with("not tried: under MPS"),
            "{values}"
        );
    }
    for step in ["client-killed", "client-aborted"] {
        let values = &report.step(step)["values"];
        assert_eq!(
            (&values["its lease"], &values["its lease, after rm --unproven"]),
            (&"there".into(), &"gone".into())
        );
    }
}

#[test]
fn recorder_dead_while_a_stream_waits_for_its_event_ends_the_lab_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut running = Running::spawn(&mut lab(&sandbox, &["events"]));
    while !running.line().contains("slow enough to be waited for") {}
    // The next step is the wait for the event, after a kernel of 200 ms. The lab has to end, whenever the recorder dies.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let recorder = processes_of(&sandbox).into_iter().find(|(_, command)| command.contains("\0recorder\0")).unwrap().0;
    rustix::process::kill_process(recorder, rustix::process::Signal::KILL).unwrap();
    let output = running.wait();
    let printed =
        output.stderr.contains("the stream still waits") || output.stderr.contains("the recorder does not answer");
    assert!(printed && matches!(output.code, Some(1 | 6)), "{:?}: {}", output.code, output.stderr);
}

#[test]
fn number_of_workers_is_chosen_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["semaphore", "--json", "--workers", "3"]);
    let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.step("order")["values"]["got a permit"], "1, 2, 3");
    let few = Running::spawn(&mut lab(&sandbox, &["semaphore", "--workers", "2"])).wait().expect(2);
    assert!(few.stderr.contains("2 is not in 3..=32"), "{}", few.stderr);
}

#[test]
fn blocks_are_handed_over_and_reclaimed_from_the_dead_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    for device in ["host", "cuda"] {
        let mut command = lab(&sandbox, &["pool", "--json", "--device", device]);
        let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
        assert_eq!(report.header["simulated"], device == "cuda");
        assert_eq!(report.steps_with("different"), [""; 0]);
        assert_eq!(report.steps_with("not-tried"), [""; 0]);
        assert_eq!(report.with("did-not-hold"), ["asks", "copied", "lost", "stale", "twice"]);
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
        assert_eq!(report.with("did-not-hold"), ["brake", "late", "slowed", "torn", "unnoticed"]);
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
        assert_eq!(report.with("not-tried").len(), if device == "host" { 3 } else { 2 });
        for claim in ["falls", "again"] {
            assert_eq!(report.claims[claim]["evidence"], "nothing was killed: --kill STAGE does it");
        }
        if device == "host" {
            assert_eq!(report.claims["pixels"]["evidence"], "it needs a GPU: --device cuda");
        }
        for stage in ["decode", "filter", "encode"] {
            assert_eq!(report.step(stage)["values"]["frames"], "60");
        }
        for stage in ["decode", "filter", "encode"] {
            let report = run(device, out, &["--kill", stage]);
            assert_eq!(report.steps_with("different"), [""; 0], "{stage} on {device}");
            assert_eq!(report.claims["falls"]["verdict"], "did-not-hold", "{stage} on {device}");
            assert_ne!(report.claims["again"]["verdict"], "held", "{stage} on {device}: nothing lost shows nothing");
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
        assert_eq!(Report::of(&quiet).with("not-tried"), ["half", "lost", "twice"]);

        // Even in a short run: one task, during which its only worker is killed.
        for (workers, tasks) in [("1", "1"), ("3", "200")] {
            let killed = run(&["--workers", workers, "--tasks", tasks, "--kill"]);
            let tasks: u64 = tasks.parse().unwrap();
            assert_eq!(counts(&killed, &names[..5]), [tasks, tasks, 0, 0, 0], "{device}: {}", killed.text());
            assert!(counts(&killed, &names[5..]).iter().all(|count| *count >= 1), "{device}: {}", killed.text());
            let report = Report::of(&killed);
            assert_eq!(report.steps_with("different"), [""; 0]);
            assert_eq!(report.with("did-not-hold"), ["half", "lost", "textbook", "twice"]);
            let last: Value = serde_json::from_str(killed.text().lines().last().unwrap()).unwrap();
            assert!(last["textbook"]["lost"].as_u64().unwrap() >= 1, "the task that its worker had: {last}");
            assert_eq!((&last["textbook"]["tasks"], &last["textbook"]["kills"]), (&tasks.into(), &1.into()));
        }
    }
}

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
        (&["ring", "writer", "--device", "host", "--trace", "t.json"], 2, "partywall lab ring reader --trace t.json"),
        (&["vmm", "--trace", "t.json"], 2, "unexpected argument '--trace'"),
    ] {
        let refused = Running::spawn(&mut lab(&sandbox, arguments)).wait().expect(code);
        assert!(refused.stderr.contains(what), "{}", refused.stderr);
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
    for (option, range) in [("--workers", "1..=64"), ("--tasks", "1..=1000000")] {
        let refused = Running::spawn(&mut lab(&sandbox, &["work-queue", option, "0"])).wait().expect(2);
        assert!(refused.stderr.contains(option) && refused.stderr.contains(range), "{}", refused.stderr);
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
fn broker_of_an_ended_lab_ends() {
    let sandbox = Sandbox::new();
    let directory = sandbox.path().join("lab");
    let mut command = sandbox.command(["serve", "--of-a-lab"]);
    command.arg((std::process::id() + 1).to_string()).arg("--socket").arg(directory.join("broker.sock"));
    Running::spawn(&mut command).wait().expect(0);
    assert!(!directory.exists());
}

/// The processes that were started in the sandbox, with their command lines.
fn processes_of(sandbox: &Sandbox) -> Vec<(rustix::process::Pid, String)> {
    let place = sandbox.path().to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let directory = entry.unwrap().path();
        let pid = directory.file_name()?.to_str()?.parse().ok().and_then(rustix::process::Pid::from_raw)?;
        let text = |file| std::fs::read(directory.join(file)).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text("environ").ok().filter(|environment| environment.contains(place))?;
        Some((pid, text("cmdline").ok()?))
    });
    processes.collect()
}

#[test]
fn labs_about_waits_say_that_streams_cannot_wait_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    for (name, untried) in [("events", 4), ("semaphore", 1), ("crash", 1)] {
        let mut command = lab(&sandbox, &[name, "--json"]);
        command.env("SIMCUDA_FAULTS", "cuStreamWaitValue32:1=801");
        let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
        let steps = report.steps_with("not-tried");
        assert_eq!(steps.len(), untried, "{steps:?}");
        for step in steps {
            let finding = report.step(step)["finding"].as_str().unwrap();
            assert!(finding.contains("streams cannot wait for words of memory here"), "{finding}");
        }
    }
}

#[test]
fn lab_is_readable_at_100_columns_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let labs = [
        ("errors", "each way in which"),
        ("handle-file", "through a file"),
        ("fork", "does not survive"),
        ("vmm", "by file descriptor"),
        ("p2p", "of another GPU"),
        ("coherency", "in which order"),
        ("events", "by its event"),
        ("semaphore", "a few permits"),
        ("crash", "memory stays"),
        ("pool", "lose when they die"),
        ("ring", "every one checked"),
    ];
    for (name, title) in labs {
        let text = Running::spawn(&mut lab(&sandbox, &[name])).wait().expect(0).text().to_owned();
        assert!(text.lines().next().unwrap().contains(title), "{text}");
        assert!(text.contains("The driver is SIMULATED"), "{text}");
        assert!(text.contains("Claims, and whether they held in the simulation"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}

#[test]
fn untried_steps_say_why_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["errors", "--json"]);
    command.env("SIMCUDA_FAULTS", "cuStreamWaitValue32:1=801,cuMemAllocManaged:1=801");
    let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
    assert_eq!(report.steps_with("not-tried"), ["managed", "too-early", "other-boot"]);
    assert_eq!(report.with("not-tried"), ["waits"]);
    let evidence = report.claims["waits"]["evidence"].as_str().unwrap();
    assert!(evidence.contains("streams cannot wait for words of memory here"), "{evidence}");
    assert!(report.step("managed")["finding"].as_str().unwrap().contains("CUDA_ERROR_NOT_SUPPORTED"));
}

#[test]
fn role_that_dies_ends_the_lab_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["errors"]);
    let output = Running::spawn(command.env("SIMCUDA_FAULTS", "cuIpcGetMemHandle:5=kill")).wait().expect(1);
    assert!(output.stderr.contains("the exporter does not answer: it has ended"), "{}", output.stderr);
    let mut command = lab(&sandbox, &["vmm"]);
    let output = Running::spawn(command.env("SIMCUDA_FAULTS", "cuMemExportToShareableHandle:1=2")).wait().expect(6);
    assert!(output.stderr.contains("the export: exporting memory"), "{}", output.stderr);
    assert!(output.stderr.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{}", output.stderr);
    assert_eq!(output.stderr.matches("error:").count(), 1, "told once: {}", output.stderr);
}

#[test]
fn death_of_the_intruder_is_a_result_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["errors", "--json"]);
    // Only the intruder opens so many handles.
    let report =
        Report::of(&Running::spawn(command.env("SIMCUDA_FAULTS", "cuIpcOpenMemHandle:30=kill")).wait().expect(0));
    let unharmed = report.step("unharmed");
    assert_eq!(unharmed["verdict"], "as-expected");
    assert!(unharmed["values"]["the intruder"].as_str().unwrap().contains("has ended"), "{unharmed}");
    assert_eq!(report.with("not-tried"), ["closed-once", "only-shared", "reader-frees"]);
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
            assert_eq!(report.with("not-tried"), [""; 0], "claims rest on the steps of both");
            let printed = waiting.wait().expect(0).text().to_owned();
            assert!(printed.contains(&format!("{first:<10} │ ")), "{printed}");
        }
        let left = sandbox.path().join(format!("run/partywall/default.lab-{name}"));
        assert!(!left.exists());
    }
}

/// Two tests for each lab, because some take long.
macro_rules! labs_run_without_a_gpu {
    ($($lab:ident),*) => {
        const LABS: &[&str] = &[$(stringify!($lab)),*];
        $(
            mod $lab {
                #[test]
                fn demo_runs_on_one_simulated_gpu() {
                    super::runs_without_a_gpu(stringify!($lab), "1");
                }

                #[test]
                fn demo_runs_on_two_simulated_gpus() {
                    super::runs_without_a_gpu(stringify!($lab), "2");
                }
            }
        )*
    };
}

labs_run_without_a_gpu!(
    errors,
    handle_file,
    fork,
    vmm,
    p2p,
    coherency,
    events,
    semaphore,
    crash,
    pool,
    ring,
    pipeline,
    render,
    work_queue,
    weights,
    chaos
);

fn runs_without_a_gpu(name: &str, devices: &str) {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["lab", &name.replace('_', "-"), "--simulated", "--json"]);
    let report = Report::of(&Running::spawn(command.env("SIMCUDA_DEVICES", devices)).wait().expect(0));
    assert_eq!(report.header["simulated"], true);
    assert_eq!(report.steps_with("different"), [""; 0]);
}

#[test]
fn every_lab_runs_simulated_without_a_gpu() {
    let listed = Sandbox::new().json(["lab"])["labs"].as_array().unwrap().len();
    assert_eq!(LABS.len(), listed, "a lab is missing in these tests");
}

#[test]
fn every_lab_is_on_the_pages() {
    let path = include_str!("../../../docs/learn/index.md");
    let page = include_str!("../../../docs/labs.md");
    for lab in Sandbox::new().json(["lab"])["labs"].as_array().unwrap() {
        let name = lab["name"].as_str().unwrap();
        assert!(page.contains(&format!("\n## `{name}`\n")), "docs/labs.md has no section about {name}");
        let row = format!("\n| `partywall lab {name}");
        assert!(path.contains(&row), "the path through the labs in docs/learn/index.md leaves out {name}");
    }
}

#[test]
fn tour_shows_the_claims_of_every_lab_on_the_simulated_gpu() {
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
    let claims = last["claims"].as_array().unwrap();
    assert!(names.iter().all(|name| claims.iter().any(|claim| claim["lab"] == **name)));
    // These claims are reported only by labs that kill a process.
    assert!(claims.iter().any(|claim| claim["claim"] == "falls" && claim["verdict"] == "did-not-hold"));
}

#[test]
fn tour_continues_after_a_lab_that_fails() {
    let sandbox = Sandbox::new();
    let mut tour = sandbox.spawn(["lab", "tour", "--device", "host"]);
    while !tour.line().starts_with("pool ") {}
    let ring = || processes_of(&sandbox).into_iter().find(|(_, command)| command.contains("\0lab\0ring\0--json"));
    eventually("the lab ring runs", || ring().is_some());
    rustix::process::kill_process(ring().unwrap().0, rustix::process::Signal::KILL).unwrap();
    let output = tour.wait().expect(1);
    let text = output.text();
    assert!(text.contains("ring         did not run to its end (signal: 9 (SIGKILL))"), "{text}");
    assert!(output.stderr.contains("labs did not run to their end: ring"), "{}", output.stderr);
    assert!(text.contains("did not hold  work-queue"), "the labs behind it ran: {text}");
    assert!(!text.contains("  vmm "), "labs that need a GPU are left out: {text}");
}

#[test]
fn killed_tour_leaves_no_process() {
    let sandbox = Sandbox::new();
    let mut tour = sandbox.spawn(["lab", "tour", "--simulated"]);
    while !tour.line().starts_with("errors ") {}
    tour.kill();
    eventually("everything that the tour started is gone", || processes_of(&sandbox).is_empty());
}

#[test]
fn simulated_labs_leave_untestable_claims_open() {
    let coherency = Report::of(&Sandbox::new().run(["lab", "coherency", "--simulated", "--json"]).expect(0));
    assert_ne!(coherency.steps_with("not-tried"), [""; 0]);
    assert_ne!(coherency.with("open"), [""; 0]);
}

#[test]
fn simulated_lab_says_so_in_each_step() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["lab", "--simulated", "vmm"]).expect(0);
    let text = output.text();
    assert!(text.contains("The driver is SIMULATED: what follows"), "{text}");
    let findings: Vec<_> = text.lines().filter(|line| line.contains("│   ✓") || line.contains("│   ≠")).collect();
    assert!(findings.len() > 5 && findings.iter().all(|line| line.contains(" SIMULATED: ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("SIMULATED: ")), "its last lines say so, too: {text}");
    assert!(text.contains("whether they held in the simulation"), "{text}");
    let on_a_gpu = Running::spawn(&mut lab(&sandbox, &["vmm"])).wait().expect(0);
    assert!(on_a_gpu.text().contains(" SIMULATED: "), "so does one on another simulated driver");
}

#[test]
fn roles_of_a_simulated_lab_meet_in_two_terminals() {
    let sandbox = Sandbox::new();
    let missing = sandbox.run(["lab", "pool", "taker", "--simulated"]).expect(3);
    assert!(missing.stderr.contains("`partywall lab pool holder --simulated`"), "{}", missing.stderr);
    let mut first = sandbox.spawn(["lab", "pool", "holder", "--simulated"]);
    let printed = loop {
        let line = first.line();
        if line.starts_with("Waiting for") {
            break line;
        }
    };
    assert!(printed.contains("`partywall lab pool taker --simulated`"), "{printed}");
    sandbox.run(["lab", "pool", "taker", "--simulated"]).expect(0);
    first.wait().expect(0);
}

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
    assert!(host.stderr.contains("so the memory is on the host"), "{}", host.stderr);
    assert!(without(&["lab", "vmm", "--device", "host"]).expect(2).stderr.contains("labs run on GPUs only"));
    assert!(without(&["lab", "errors", "--handle", "00"]).expect(2).stderr.contains("128 hexadecimal digits"));
}

#[test]
fn kept_handle_is_tried_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let report = |arguments: &[&str]| Report::of(&Running::spawn(&mut lab(&sandbox, arguments)).wait().expect(0));
    let first = report(&["errors", "--json"]);
    let handle = first.step("same-process")["values"]["handle"].as_str().unwrap();
    let second = report(&["errors", "--json", "--handle", handle]);
    assert_eq!(second.step("other-boot")["verdict"], "as-expected");
    assert!(!second.step("other-boot")["refusal"].is_null());
    assert!(second.claims["keeps"]["evidence"].as_str().unwrap().contains("other-boot"));
}
