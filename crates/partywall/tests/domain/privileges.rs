//! A program that gains privileges when it is executed: the environment of its caller chooses nothing.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::PathBuf,
    process::Command,
};

use partywall::{Domain, Location, cuda::Driver};
use partywall_harness::{Actor, copy_program, say, simulated_driver, write_script};

/// A user without any rights.
const CALLER: u32 = 65_533;

/// Reports what the environment has chosen, and tries to start a broker.
pub(crate) fn play() {
    let directory = PathBuf::from(std::env::var_os("PLACE").unwrap());
    let found = Location::find(None, None).unwrap();
    say(&format!("socket {}", found.socket.display()));
    say(&format!("log {}", found.logs()[0].display()));
    say(&format!("library {}", Driver::load().map_or_else(|error| error.to_string(), |it| it.library().to_owned())));
    let options = Domain::options().socket(directory.join("run/s.sock")).program(directory.join("broker"));
    say(&format!("error {}", options.connect().unwrap_err()));
}

// Holds 154.
#[test]
fn needs_root_program_with_privileges_ignores_the_environment_of_its_caller_in_host_memory() {
    assert!(rustix::process::geteuid().is_root(), "only root makes a program that runs as another user");
    let directory = tempfile::Builder::new().prefix("pw-").tempdir_in("/tmp").unwrap();
    let place = directory.path();
    let out = place.join("out");
    fs::create_dir(&out).unwrap();
    fs::set_permissions(place, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&out, Permissions::from_mode(0o777)).unwrap();
    let evil = place.join("partywall");
    write_script(&evil, &format!("#!/bin/sh\n: > {}/evil\nexit 1\n", out.display()));
    write_script(&place.join("broker"), &format!("#!/bin/sh\nenv > {}/environment\nexit 1\n", out.display()));
    let program = place.join("test");
    copy_program(&std::env::current_exe().unwrap(), &program);

    let run = |mode| {
        fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(&program);
        command.uid(CALLER).gid(CALLER).current_dir("/").env_clear().env("PLACE", place);
        command.env("PARTYWALL_BIN", &evil).env("PATH", place).env("PARTYWALL_LIBCUDA", simulated_driver());
        command.env("PARTYWALL_SOCKET", out.join("caller.sock")).env("PARTYWALL_DOMAIN", "caller");
        for name in ["NVIDIA_DRA_LOCAL_IPC_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME", "TMPDIR"] {
            command.env(name, &out);
        }
        let mut actor = Actor::start(&mut command, "privileged");
        let said = ["socket ", "log ", "library ", "error "].map(|word| actor.expect(word));
        assert!(actor.join().success());
        said
    };

    let [socket, log, library, error] = run(0o4755);
    assert_eq!(socket, "/tmp/partywall-0/default.sock");
    assert!(log.starts_with("/tmp/partywall-0/"), "{log}");
    assert!(library.contains("libcuda.so.1"), "{library}");
    assert!(error.contains(place.join("broker").to_str().unwrap()), "{error}");
    assert!(!out.join("evil").exists());
    let environment = fs::read_to_string(out.join("environment")).unwrap();
    assert!(!environment.contains(out.to_str().unwrap()), "{environment}");
    assert!(!environment.contains("PARTYWALL_"), "{environment}");

    // Without privileges the same environment is the caller's own choice.
    fs::create_dir(place.join("run")).ok();
    std::os::unix::fs::chown(place.join("run"), Some(CALLER), Some(CALLER)).unwrap();
    let [socket, log, ..] = run(0o755);
    assert_eq!(socket, out.join("caller.sock").to_str().unwrap());
    assert!(log.starts_with(out.join("partywall").to_str().unwrap()), "{log}");
    assert!(out.join("evil").exists());
}
