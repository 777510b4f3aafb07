//! The programs: what each contains, and that one starts the other.

use std::{fs, path::Path, process::Command};

use partywall_harness::{Running, Sandbox, binary, copy_program};

use crate::{Host, command};

// Holds 406.
#[test]
fn program_of_the_broker_contains_no_network() {
    let has_zenoh = |program: &Path| {
        let output = Command::new("nm").arg("--debug-syms").arg(program).output().unwrap();
        String::from_utf8(output.stdout).unwrap().contains("zenoh")
    };
    assert!(!has_zenoh(&binary()));
    assert!(has_zenoh(Path::new(env!("CARGO_BIN_EXE_partywall-bridge"))));
}

// Holds 406.
#[test]
fn missing_program_is_named() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path().join("alone");
    fs::create_dir(&folder).unwrap();
    let alone = folder.join("partywall");
    copy_program(&binary(), &alone);
    for arguments in [&["bridge"][..], &["hosts"], &["pull", "//a/llm"], &["ls", "//a"], &["show", "//a/llm"]] {
        let run = |path: &Path| {
            let mut command = sandbox.program(&alone);
            Running::spawn(command.args(arguments).env("PATH", path).env_remove("PARTYWALL_BIN")).wait()
        };
        let missing = run(Path::new("/nowhere")).expect(3);
        assert!(missing.stderr.contains("needs the program partywall-bridge"), "{missing:?}");
        assert!(missing.stderr.contains("cargo install --locked --path crates/partywall-bridge"), "{missing:?}");
    }
    let programs = Path::new(env!("CARGO_BIN_EXE_partywall-bridge")).parent().unwrap();
    let mut command = sandbox.program(&alone);
    let help = Running::spawn(command.args(["help", "pull"]).env("PATH", programs)).wait().expect(0);
    assert!(help.text().contains("--follow"), "{help:?}");
    // Beside it, completions and manual pages describe its commands, too.
    copy_program(Path::new(env!("CARGO_BIN_EXE_partywall-bridge")), &folder.join("partywall-bridge"));
    let run = |arguments: &[&str]| {
        let mut command = sandbox.program(&alone);
        Running::spawn(command.args(arguments).env("PATH", "/nowhere").env_remove("PARTYWALL_BIN")).wait().expect(0)
    };
    assert!(run(&["completions", "bash"]).text().contains("--also"));
    run(&["man", "--out", "pages"]);
    let page = fs::read_to_string(sandbox.path().join("pages/partywall-pull.1")).unwrap();
    assert!(page.contains("\\-\\-also"), "{page}");
}

#[test]
fn bash_completes_hosts_and_their_names() {
    let a = Host::start("a", &[], &["--export", "*"]);
    let b = Host::start("b", &[&a], &[]);
    b.await_state("a", "alive");
    for name in ["llm", "llm2", "other"] {
        let file = a.sandbox.file("put", name);
        a.run(&["put", file.to_str().unwrap(), name, "--device", "host"]).expect(0);
    }
    let folder = b.sandbox.path().join("programs");
    fs::create_dir(&folder).unwrap();
    copy_program(&binary(), &folder.join("partywall"));
    copy_program(Path::new(env!("CARGO_BIN_EXE_partywall-bridge")), &folder.join("partywall-bridge"));
    let mut script = b.sandbox.program(folder.join("partywall"));
    let script = Running::spawn(script.args(["completions", "bash"])).wait().expect(0).text();
    let script = b.sandbox.file("completions", script);
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let complete = |typed: &str| {
        // An answer may take longer than a person would wait.
        let words = format!(
            ". {}; timeout() {{ shift; command \"$@\"; }}; compopt() {{ echo no space; }}; COMP_WORDS=(partywall pull {typed}); COMP_CWORD=2; _partywall partywall {typed} pull; echo \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let mut bash = b.sandbox.program("/bin/bash");
        Running::spawn(bash.args(["-c", &words]).env("PATH", &path)).wait().expect(0).text()
    };
    assert_eq!(complete("//"), "no space\n//a/\n");
    assert_eq!(complete("//a/ll"), "//a/llm //a/llm2\n");
    assert_eq!(complete("//z/"), "\n");
    assert!(complete("--fol").contains("--follow"));
}

/// Returns how many threads of a process have names that begin so.
fn threads(pid: u32, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
    names.filter(|found| found.starts_with(name)).count()
}

#[test]
fn environment_and_files_of_zenoh_change_nothing() {
    let a = Host::start("a", &[], &[]);
    let file =
        a.sandbox.file("home/.zenoh/zenoh.json5", "{ mode: 'client', connect: { endpoints: ['tcp/192.0.2.1:1'] } }");
    for runtime in ["nonsense", "(rx: (worker_threads: 7))"] {
        let sandbox = Sandbox::new();
        let arguments = ["bridge", "--host", "b", "--listen", "127.0.0.1:0", "--connect", &a.endpoint];
        let mut bridge = command(&sandbox, &arguments);
        bridge.env("ZENOH_RUNTIME", runtime).env("ZENOH_CONFIG", &file).env("ZENOH_HOME", file.parent().unwrap());
        let mut bridge = Running::spawn(&mut bridge);
        assert!(bridge.line().starts_with("//b at tcp/127.0.0.1:"));
        a.await_state("b", "alive");
        // As the program chooses them.
        assert_eq!(threads(bridge.pid(), "rx-"), 8, "{runtime}");
        bridge.kill();
    }
}

#[test]
fn every_help_fits_80_columns() {
    for command in ["bridge", "hosts", "pull"] {
        let program = Path::new(env!("CARGO_BIN_EXE_partywall-bridge"));
        let mut help = Command::new(program);
        let help = Running::spawn(help.args([command, "--help"]).env("COLUMNS", "80")).wait().expect(0).text();
        let wide: Vec<_> = help.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{command}: {wide:#?}");
    }
}
