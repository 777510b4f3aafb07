//! Labs with `--simulated`.

use partywall_harness::{Output, Running, Sandbox};

use super::{Report, lab};

/// Two tests for each lab, because some take long.
macro_rules! labs_run_without_a_gpu {
    ($($lab:ident),*) => {
        const LABS: &[&str] = &[$(stringify!($lab)),*];
        $(
            mod $lab {
                #[test]
                fn demo_is_readable_on_one_simulated_gpu() {
                    super::is_readable_without_a_gpu(stringify!($lab));
                }

                #[test]
                fn demo_runs_on_two_simulated_gpus() {
                    super::runs_without_a_gpu(stringify!($lab));
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

/// Runs a lab on so many simulated GPUs.
fn simulated(name: &str, devices: &str, more: &[&str]) -> Output {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["lab", &name.replace('_', "-"), "--simulated"]);
    // The default would compress five times as many pictures, by code that tests do not optimise.
    let few = ["--frames", "24"];
    command.args(few.iter().filter(|_| name == "pipeline")).args(more).env("SIMCUDA_DEVICES", devices);
    Running::spawn(&mut command).wait().expect(0)
}

fn runs_without_a_gpu(name: &str) {
    let report = Report::of(&simulated(name, "2", &["--json"]));
    assert_eq!(report.header["simulated"], true);
    assert_eq!(report.steps_with("different"), [""; 0]);
}

fn is_readable_without_a_gpu(name: &str) {
    let output = simulated(name, "1", &[]);
    let text = output.text();
    assert!(text.starts_with(&format!("Lab `{}`: ", name.replace('_', "-"))), "{text}");
    assert!(text.contains("The driver is SIMULATED"), "{text}");
    assert!(text.contains("Beliefs, and whether they are true in the simulation"), "{text}");
    assert!(!text.contains("│   ≠"), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("SIMULATED: ") && last.contains(" as expected"), "{last}");
    assert!(!last.contains("different"), "the exit code says that all is as expected: {last}");
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

// Holds 37, 327.
#[test]
fn every_lab_runs_simulated_without_a_gpu() {
    let listed = Sandbox::new().json(["lab"])["labs"].as_array().unwrap().len();
    assert_eq!(LABS.len(), listed, "a lab is missing in these tests");
}

#[test]
fn simulated_labs_leave_untestable_beliefs_open() {
    let coherency = Report::of(&Sandbox::new().run(["lab", "coherency", "--simulated", "--json"]).expect(0));
    assert_ne!(coherency.steps_with("not-tried"), [""; 0]);
    assert_ne!(coherency.with("open"), [""; 0]);
}

// Holds 37.
#[test]
fn simulated_lab_says_so_in_each_step() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["lab", "--simulated", "vmm"]).expect(0);
    let text = output.text();
    assert!(text.contains("The driver is SIMULATED: what follows"), "{text}");
    let findings: Vec<_> = text.lines().filter(|line| line.contains("│   ✓") || line.contains("│   ≠")).collect();
    assert!(findings.len() > 5 && findings.iter().all(|line| line.contains(" SIMULATED: ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("SIMULATED: ")), "its last lines say so, too: {text}");
    assert!(text.contains("whether they are true in the simulation"), "{text}");
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
