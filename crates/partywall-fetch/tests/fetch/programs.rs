//! The programs: what each contains, and that one starts the other.

use std::{fs, path::Path, process::Command};

use partywall_harness::{Running, Sandbox, binary, copy_program, noise};

use crate::{
    command,
    server::{Reply, Server},
    take,
};

/// Returns which of these are among the symbols of a program.
fn contents(program: &Path) -> [bool; 3] {
    let output = Command::new("nm").arg("--debug-syms").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    ["rustls", "reqwest", "object_store"].map(|name| text.contains(name))
}

// Holds 406.
#[test]
fn program_of_the_broker_contains_no_tls() {
    assert_eq!(contents(&binary()), [false; 3]);
    assert_eq!(contents(Path::new(env!("CARGO_BIN_EXE_partywall-fetch"))), [true; 3]);
}

// Holds 406.
#[test]
fn missing_program_is_named_and_the_broker_is_the_small_one() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path().join("alone");
    fs::create_dir(&folder).unwrap();
    let alone = folder.join("partywall");
    copy_program(&binary(), &alone);
    let file = noise(1000, 1);
    let bytes = file.clone();
    let server = Server::start(move |ask| Reply::file(&bytes, "\"1\"", ask));
    let put = |path: &Path| {
        let mut command = sandbox.program(&alone);
        command.args(["put", &server.url("x.bin"), "x", "--device", "host"]);
        Running::spawn(command.env("PATH", path).env("NO_PROXY", "127.0.0.1").env_remove("PARTYWALL_BIN")).wait()
    };
    let missing = put(Path::new("/nowhere")).expect(3);
    assert!(missing.stderr.contains("`partywall put URL` needs the program partywall-fetch"), "{missing:?}");
    assert!(missing.stderr.contains("cargo install --locked --path crates/partywall-fetch"), "{missing:?}");
    let programs = Path::new(env!("CARGO_BIN_EXE_partywall-fetch")).parent().unwrap();
    put(programs).expect(0);
    // `partywall-fetch` has started it, as any member does.
    let broker = sandbox.json(["status"])["pid"].as_u64().unwrap();
    let program = fs::read_link(format!("/proc/{broker}/exe")).unwrap();
    assert_eq!(program.file_name().unwrap(), "partywall");
    assert_eq!(take(&sandbox), file);
}

/// Returns the kilobytes of a line of `/proc/PID/status`.
fn status(pid: u32, line: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = status.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':')?.strip_suffix(" kB"));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// The file's own bytes are shared memory, which the process may have mapped; the rest is what downloading takes.
// Holds 405.
#[test]
fn private_memory_does_not_grow_with_the_file() {
    let sandbox = Sandbox::new();
    let private = |length: usize| {
        let file = vec![7; length];
        let server = Server::start(move |ask| Reply::file(&file, "\"1\"", ask));
        let url = server.url("x.bin");
        let arguments = ["put", &url, "x", "--device", "host", "--threads", "4", "--hold"];
        let mut holder = Running::spawn(&mut command(&sandbox, &arguments));
        assert!(holder.line().contains("holding it"));
        let private = status(holder.pid(), "VmHWM") - status(holder.pid(), "RssShmem");
        holder.kill();
        private
    };
    let small = private(48 << 20);
    let large = private(256 << 20);
    assert!(small > 0 && large < small + (16 << 10), "{small} kB for 48 MiB, {large} kB for 256 MiB");
}
