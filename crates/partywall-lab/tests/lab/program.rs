//! The programs: what each contains, and that together they are one for their user.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use partywall_harness::{Running, Sandbox, binary, copy_program, eventually};

use super::processes_of;

/// The program of this crate.
fn lab() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_partywall-lab"))
}

/// Returns a copy of a program in a folder of its own.
fn alone(sandbox: &Sandbox, program: &Path) -> PathBuf {
    let folder = sandbox.path().join("alone");
    fs::create_dir(&folder).unwrap();
    let copy = folder.join("partywall");
    copy_program(program, &copy);
    copy
}

/// Returns the names of the symbols that `nm` lists.
fn symbols(program: &Path, flag: &str) -> Vec<String> {
    let output = Command::new("nm").args([flag, "--defined-only"]).arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split_whitespace().last().map(str::to_owned)).collect()
}

/// A library that the program loads would use such symbols instead of the vendor's.
// Holds 324.
#[test]
fn programs_have_no_symbol_of_the_vendors_driver() {
    let is_the_drivers = |name: &&String| {
        name.starts_with("simcuda") || (name.starts_with("cu") && name[2..].starts_with(char::is_uppercase))
    };
    for program in [&binary(), lab()] {
        for flag in ["--extern-only", "--dynamic"] {
            let names = symbols(program, flag);
            assert_eq!(names.iter().filter(is_the_drivers).collect::<Vec<_>>(), [""; 0], "{flag}");
        }
    }
}

/// What nobody needs who only shares memory.
// Holds 324.
#[test]
fn program_that_shares_memory_contains_no_lab() {
    let crates = ["partywall_lab", "partywall_measure", "partywall_simcuda", "partywall_vulkan", "plotters"];
    let of = |program: &Path| {
        let names = symbols(program, "--debug-syms");
        crates.map(|name| names.iter().any(|symbol| symbol.contains(name)))
    };
    assert_eq!(of(&binary()), [false; 5]);
    assert_eq!(of(lab()), [true; 5]);
}

// Holds 324, 326.
#[test]
fn help_and_completions_of_both_programs_are_the_same() {
    let sandbox = Sandbox::new();
    for arguments in [
        &["--help"][..],
        &["help", "lab"],
        &["lab", "--help"],
        &["--json", "lab", "--help"],
        &["lab", "vmm", "-h"],
        &["lab", "render", "--help"],
        &["bench", "--help"],
        &["help", "bench"],
        &["help", "bench", "compare"],
        &["help", "lab", "vmm"],
        &["help", "lab", "ring", "writer"],
        &["help", "lab", "render"],
        &["--json", "help", "lab", "ring"],
        &["completions", "bash"],
        &["man"],
        &["lab"],
        &["--version"],
    ] {
        let mut command = sandbox.program(lab());
        let of_the_lab = Running::spawn(command.args(arguments)).wait().expect(0).text();
        assert_eq!(sandbox.run(arguments).expect(0).text(), of_the_lab, "{arguments:?}");
        assert!(!of_the_lab.contains("partywall-lab "), "{of_the_lab}");
    }
    for (help, option) in [
        (&["help", "lab", "ring"][..], &["lab", "ring", "--help"][..]),
        (&["help", "lab", "render"], &["lab", "render", "--help"]),
        (&["help", "bench"], &["bench", "--help"]),
    ] {
        assert_eq!(sandbox.run(help).expect(0).text(), sandbox.run(option).expect(0).text());
    }
    assert!(sandbox.run(["help", "lab", "nosuch"]).expect(2).stderr.contains("unrecognized subcommand 'nosuch'"));
}

/// A copy of `partywall` in a folder of its own, and no `PATH`.
// Holds 324.
#[test]
fn missing_lab_is_named_with_the_way_to_get_it() {
    let sandbox = Sandbox::new();
    let program = alone(&sandbox, &binary());
    let run = |arguments: &[&str], simulated: bool| {
        let mut command = sandbox.program(&program);
        command.args(arguments).env("PATH", "/nonexistent").env_remove("PARTYWALL_BIN");
        if simulated {
            command.env("PARTYWALL_LIBCUDA", "simulated");
        }
        Running::spawn(&mut command).wait()
    };
    for (arguments, what) in [
        (&["lab", "vmm"][..], "`partywall lab`"),
        (&["bench", "--help"], "`partywall bench`"),
        (&["help", "bench"], "`partywall bench`"),
        (&["help", "lab"], "`partywall lab`"),
        (&["help", "lab", "ring"], "`partywall lab`"),
        (&["demo", "--simulated"], "`--simulated`"),
    ] {
        let refused = run(arguments, false).expect(3);
        let text = &refused.stderr;
        assert!(text.contains(&format!("{what} needs the program partywall-lab")), "{text}");
        assert!(text.contains("cargo install --locked --path crates/partywall-lab"), "{text}");
    }
    let help = run(&["help"], false).expect(0).text();
    assert!(help.contains("  bench ") && help.contains("  lab "), "{help}");
    assert!(run(&["completions", "zsh"], false).expect(0).text().contains("bench"));

    // Only what needs the driver needs the lab.
    sandbox.file("f", "hello");
    run(&["put", "f", "x", "--device", "host"], false).expect(0);
    assert_eq!(run(&["get", "x", "-"], true).expect(0).stdout, b"hello");
    let refused = run(&["put", "f", "y", "--device", "cuda"], true).expect(6);
    assert!(refused.stderr.contains("the program partywall-lab contains it"), "{}", refused.stderr);
    let doctor = run(&["doctor", "--json"], false).json();
    let probes = doctor["probes"].as_array().unwrap();
    let vulkan = probes.iter().find(|probe| probe["name"].as_str().unwrap().contains("Vulkan")).unwrap();
    assert_eq!(vulkan["outcome"], "skipped");
    assert!(vulkan["detail"].as_str().unwrap().contains("partywall-lab"), "{vulkan}");
}

/// A copy of this program in a folder of its own, and no `PATH`.
// Holds 326.
#[test]
fn lab_of_another_program_is_listed_and_named_with_the_way_to_get_it() {
    let sandbox = Sandbox::new();
    let program = alone(&sandbox, lab());
    let run = |arguments: &[&str]| {
        let mut command = sandbox.program(&program);
        Running::spawn(command.args(arguments).env("PATH", "/nonexistent").env_remove("PARTYWALL_BIN")).wait()
    };
    for arguments in [
        &["lab", "render", "--frames", "3"][..],
        &["lab", "render", "geometry"],
        &["lab", "render", "-h"],
        &["help", "lab", "render"],
    ] {
        let refused = run(arguments).expect(3);
        let text = &refused.stderr;
        assert!(text.contains("`partywall lab render` needs the program partywall-render"), "{text}");
        assert!(text.contains("cargo install --locked --path examples/render"), "{text}");
    }
    for arguments in [&["lab"][..], &["lab", "--json"]] {
        assert_eq!(run(arguments).expect(0).text(), sandbox.run(arguments).expect(0).text());
    }
    for arguments in [&["lab", "--help"][..], &["completions", "bash"]] {
        assert!(run(arguments).expect(0).text().contains("render"), "{arguments:?}");
    }
}

// Holds 326.
#[test]
fn needs_minutes_tour_leaves_out_a_missing_program_and_continues_after_a_lab_that_fails() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.program(alone(&sandbox, lab()));
    let mut tour = Running::spawn(command.args(["lab", "tour", "--device", "host"]).env("PATH", "/nonexistent"));
    while !tour.line().starts_with("pool ") {}
    let mut ring = None;
    eventually("the lab ring runs", || {
        ring = processes_of(&sandbox).into_iter().find(|(_, command)| command.contains("\0lab\0ring\0--json"));
        ring.is_some()
    });
    rustix::process::kill_process(ring.unwrap().0, rustix::process::Signal::KILL).unwrap();
    let output = tour.wait().expect(1);
    let text = output.text();
    assert!(text.contains("ring         did not run to its end (signal: 9 (SIGKILL))"), "{text}");
    assert!(output.stderr.contains("labs did not run to their end: ring"), "{}", output.stderr);
    assert!(text.contains("refuted  work-queue"), "the labs behind it ran: {text}");
    assert!(text.contains("needs the program partywall-render: install it"), "{text}");
    assert!(!text.contains("  vmm "), "labs that need a GPU are left out: {text}");
}

// Holds 324.
#[test]
fn lab_is_found_on_path() {
    let sandbox = Sandbox::new();
    let program = alone(&sandbox, &binary());
    let mut command = sandbox.program(&program);
    command.args(["lab"]).env("PATH", lab().parent().unwrap());
    let text = Running::spawn(&mut command).wait().expect(0).text();
    assert!(text.contains("handle-file"), "{text}");
}
