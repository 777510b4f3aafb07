//! Labs about order and deaths: `coherency`, `events`, `semaphore`, `crash`.

use partywall_harness::{Running, Sandbox};

use super::{Report, assert_nothing_left, lab, processes_of, report_of};

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
    // Whether a plain load sees the store within its time limit depends on timing here.
    for (belief, verdict) in [
        ("loop", "refuted"),
        ("kernel-end", "refuted"),
        ("side-by-side", "open"),
        ("in-order", "open"),
        ("volatile", "open"),
        ("writer-fence", "open"),
        ("block", "open"),
        ("scoped", "true"),
    ] {
        assert_eq!(report.beliefs[belief]["verdict"], verdict, "{belief}");
    }
    for id in ["stores", "stores-host"] {
        let stores = report.step(id)["values"].as_object().unwrap();
        assert_eq!(stores.values().filter(|text| text.as_str().unwrap().starts_with("seen after")).count(), 8);
    }
    assert_eq!(report.step("turns")["values"]["turns"], "20 of 20");
    assert!(report.step("order")["values"]["both volatile"].as_str().unwrap().contains("none with old data"));
}

#[test]
fn events_lab_shows_waits_recorded_in_time_and_too_early_on_the_simulated_gpu() {
    let report = report_of("events", 2);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("refuted").len(), 6, "{:?}", report.beliefs);
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
fn recorder_dead_while_a_stream_waits_for_its_event_ends_the_lab_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut running = Running::spawn(&mut lab(&sandbox, &["events"]));
    while !running.line().contains("slow enough to be waited for") {}
    let recorder = processes_of(&sandbox).into_iter().find(|(_, command)| command.contains("\0recorder\0")).unwrap().0;
    // The next step is the wait for the event, after a kernel of 200 ms. The lab has to end, whenever the recorder
    // dies.
    std::thread::sleep(std::time::Duration::from_millis(100));
    rustix::process::kill_process(recorder, rustix::process::Signal::KILL).unwrap();
    let output = running.wait();
    let printed =
        output.stderr.contains("the stream still waits") || output.stderr.contains("the recorder does not answer");
    assert!(printed && matches!(output.code, Some(1 | 6)), "{:?}: {}", output.code, output.stderr);
}

#[test]
fn permits_of_killed_processes_come_back_on_the_simulated_gpu() {
    // The two killed processes do not end by themselves.
    let report = report_of("semaphore", 3);
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("true"), ["in-turn", "never-more"]);
    assert_eq!(report.with("refuted"), ["host-gives", "lost", "stuck"]);
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
    assert_eq!(report.with("true"), ["in-turn", "never-more"]);
    assert_eq!(report.with("refuted"), ["lost", "stuck"]);
    assert_eq!(report.beliefs["host-gives"]["evidence"], "it needs a GPU: --device cuda");
}

#[test]
fn number_of_workers_is_chosen_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let mut command = lab(&sandbox, &["semaphore", "--json", "--workers", "3"]);
    let report = Report::of(&Running::spawn(&mut command).wait().expect(0));
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.step("order")["values"]["got a permit"], "1, 2, 3");
    let few = Running::spawn(&mut lab(&sandbox, &["semaphore", "--workers", "2"])).wait().expect(2);
    assert!(few.stderr.contains("2 is too small: use 3 or more"), "{}", few.stderr);
}

#[test]
fn deaths_of_server_client_and_broker_are_shown_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let report = Report::of(&Running::spawn(&mut lab(&sandbox, &["crash", "--json"])).wait().expect(0));
    assert_eq!(report.steps_with("different"), [""; 0]);
    assert_eq!(report.steps_with("not-tried"), [""; 0]);
    assert_eq!(report.with("true"), [""; 0]);
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
    assert_eq!(report.with("refuted"), ["broker-memory", "client-harms", "hangs", "maker"]);
    assert_eq!(report.beliefs["travels"]["evidence"], "it needs a GPU: --device cuda");
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
