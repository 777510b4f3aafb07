//! `mps` and `run --mps`, with a stand-in for the vendor's daemon. What only the vendor's daemon can show is tested on
//! GPUs.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::ExitStatusExt,
    },
    path::PathBuf,
    process::Command,
};

use partywall_harness::{
    Output, Running, Sandbox, Signal, eventually,
    mps::{self, Manner, StandIn},
};
use partywall_os::process;
use serde_json::{Value, json};

/// A sandbox whose programs find the stand-in.
struct Place {
    sandbox: Sandbox,
    stand_in: StandIn,
}

impl Place {
    fn new(manner: Manner) -> Self {
        let sandbox = Sandbox::new();
        let stand_in = StandIn::new(sandbox.path(), manner);
        Self { sandbox, stand_in }
    }

    fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = self.sandbox.command(arguments);
        command.env("PATH", self.stand_in.path()).env_remove(mps::PIPES);
        command
    }

    fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        Running::spawn(&mut self.command(arguments)).wait()
    }

    fn json<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Value {
        Running::spawn(self.command(["--json"]).args(arguments)).wait().expect(0).json()
    }

    fn root(&self) -> PathBuf {
        self.sandbox.path().join("run/partywall/default.mps")
    }

    fn starts(&self) -> usize {
        self.stand_in.asked().iter().filter(|asked| *asked == "-d").count()
    }

    fn status(&self) -> Value {
        self.json(["mps", "status"])
    }

    fn kill(&self, pid: u64) {
        let pidfd = process::pidfd(u32::try_from(pid).unwrap()).unwrap();
        process::kill(&pidfd, Signal::KILL).unwrap();
        eventually("it has ended", || {
            partywall_os::socket::wait(&pidfd, partywall_os::socket::Ready::Read, Some(std::time::Instant::now()))
                .unwrap()
        });
    }

    fn daemon(&self) -> u64 {
        fs::read_to_string(self.sandbox.path().join("mps stand-in/daemon")).unwrap().parse().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A daemon that is left would fail the test when the sandbox is dropped.
        let stopped = self.run(["mps", "stop", "--force"]);
        assert!(std::thread::panicking() || stopped.code == Some(0), "{stopped:?}");
    }
}

// Holds 232.
#[test]
fn daemon_starts_answers_and_stops() {
    let place = Place::new(Manner::Good);
    let status = place.status();
    assert_eq!((&status["runs"], &status["watcher"], &status["servers"]), (&json!(false), &Value::Null, &json!([])));

    let text = place.run(["mps", "start"]).expect(0).text();
    let pipes = place.root().join("pipe");
    assert!(text.contains(&format!("export CUDA_MPS_PIPE_DIRECTORY={}", pipes.display())), "{text}");
    assert!(text.contains("price") && text.contains("ends CUDA in all clients"), "{text}");
    for path in [place.root(), pipes.clone(), place.root().join("log")] {
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700, "{}", path.display());
    }
    let again = place.json(["mps", "start"]);
    assert_eq!((&again["already"], &again["pipes"]), (&json!(true), &json!(pipes)));
    assert!(again["watcher"].is_u64(), "{again}");
    assert_eq!(place.starts(), 1);

    let text = place.run(["mps", "status"]).expect(0).text();
    assert!(text.contains("servers  none") && text.contains("stops the daemon when no process needs it"), "{text}");
    place.stand_in.clients(&[12, 34]);
    assert_eq!(place.status()["servers"], json!([{ "pid": place.daemon(), "clients": [12, 34] }]));
    assert!(place.run(["mps", "status"]).expect(0).text().contains("clients 12, 34"));

    let refused = Running::spawn(place.command(["--json"]).args(["mps", "stop"])).wait().expect(5).json();
    assert_eq!(refused["clients"], json!([12, 34]));
    assert_eq!(refused["error"]["entry"], "mps-in-use");
    assert_eq!(place.json(["mps", "stop", "--force"])["stopped"], true);
    assert!(!place.root().exists());
    assert_eq!(place.json(["mps", "stop"])["stopped"], false);
}

// Holds 232.
#[test]
fn starts_at_once_are_one_start() {
    let place = Place::new(Manner::Good);
    let starts: Vec<_> = (0..6).map(|_| Running::spawn(&mut place.command(["mps", "start"]))).collect();
    for start in starts {
        start.wait().expect(0);
    }
    assert_eq!(place.starts(), 1);
    assert!(place.status()["watcher"].is_u64());
}

// Holds 234.
#[test]
fn watcher_stops_the_daemon_when_it_has_no_clients() {
    let place = Place::new(Manner::Good);
    place.stand_in.clients(&[12]);
    place.run(["mps", "start", "--idle-exit", "0.1"]).expect(0);
    let asks = || place.stand_in.asked().iter().filter(|asked| asked.starts_with("get_client_list")).count();
    eventually("the watcher has asked for clients several times", || asks() >= 2);
    assert_eq!(place.status()["runs"], true);
    place.stand_in.clients(&[]);
    eventually("the daemon has ended", || !place.root().exists());
    assert!(place.stand_in.asked().iter().any(|asked| asked.starts_with("quit")));
    eventually("no process is left", || place.sandbox.processes().is_empty());
}

// Holds 234.
#[test]
fn command_runs_under_mps_and_keeps_the_daemon() {
    let place = Place::new(Manner::Good);
    place.run(["mps", "start", "--idle-exit", "0.1"]).expect(0);
    let script = "echo $CUDA_MPS_PIPE_DIRECTORY; echo $PARTYWALL_SOCKET; read line; exit 9";
    let mut command = Running::spawn(&mut place.command(["run", "--mps", "sh", "-c", script]));
    let pid = command.pid();
    assert_eq!(command.line(), place.root().join("pipe").to_str().unwrap());
    assert_eq!(command.line(), place.sandbox.socket().to_str().unwrap());
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).unwrap(), "sh\n", "it replaces the process");
    let status = place.status();
    // The daemon may have been idle for so long before that this is another one.
    assert_eq!((&status["runs"], &status["held"]), (&json!(true), &json!(true)));
    let refused = place.run(["mps", "stop"]).expect(5).stderr;
    assert!(refused.contains("held for processes that may still become clients"), "{refused}");
    command.wait().expect(9);
    assert_eq!(place.status()["held"], false);
}

#[test]
fn run_starts_the_daemon_and_the_last_command_ends_it() {
    let place = Place::new(Manner::Good);
    let out = place.run(["run", "--mps", "--", "sh", "-c", "echo \"$@\"", "sh", "--json", "-x"]).expect(0);
    assert_eq!(out.text(), "--json -x\n", "options behind the command belong to the command");
    assert_eq!(place.starts(), 1);
    // SIGKILL leaves no hold behind either.
    let mut command = Running::spawn(&mut place.command(["run", "--mps", "sh", "-c", "echo ready; read line"]));
    assert_eq!(command.line(), "ready");
    assert_eq!(place.status()["held"], true);
    command.signal(Signal::KILL);
    assert_eq!(command.wait().code, None);
    assert_eq!(place.status()["held"], false);
    assert_eq!(place.starts(), 1);
}

// Holds 236.
#[test]
fn signals_and_exit_codes_of_the_command_pass_through() {
    let place = Place::new(Manner::Good);
    for code in [0, 1, 77] {
        place.run(["run", "sh", "-c", &format!("exit {code}")]).expect(code);
    }
    let status = place.command(["run", "sh", "-c", "kill -TERM $$"]).status().unwrap();
    assert_eq!(status.signal(), Some(15));
    let unset = place.run(["run", "sh", "-c", "echo ${CUDA_MPS_PIPE_DIRECTORY-unset}"]).expect(0);
    assert_eq!(unset.text(), "unset\n", "without --mps nothing changes");
    assert_eq!(place.starts(), 0);
    let limits = place.command(["run", "sh", "-c", "ulimit -Sn"]);
    let direct = place.sandbox.program("sh").args(["-c", "ulimit -Sn"]).output().unwrap().stdout;
    assert_eq!(Running::spawn(&mut { limits }).wait().expect(0).stdout, direct, "it has the limits of its starter");
}

// Holds 235.
#[test]
fn killed_watcher_leaves_the_daemon_and_the_next_start_replaces_it() {
    let place = Place::new(Manner::Good);
    let first = place.json(["mps", "start"])["watcher"].as_u64().unwrap();
    place.kill(first);
    let status = place.status();
    assert_eq!((&status["runs"], &status["watcher"]), (&json!(true), &Value::Null));
    assert!(place.run(["mps", "status"]).expect(0).text().contains("none: the daemon runs until"));
    let second = place.json(["mps", "start", "--idle-exit", "0.1"]);
    assert_eq!(second["already"], false);
    assert_ne!(second["watcher"].as_u64(), Some(first));
    assert_eq!(place.starts(), 1, "the daemon is the same");
    eventually("the new watcher stops it", || !place.root().exists());
}

// Holds 235.
#[test]
fn killed_daemon_ends_the_watcher_and_the_next_start_starts_another() {
    let place = Place::new(Manner::Good);
    let watcher = place.json(["mps", "start"])["watcher"].as_u64().unwrap();
    place.kill(place.daemon());
    eventually("the watcher has ended", || !place.sandbox.processes().contains(&u32::try_from(watcher).unwrap()));
    assert_eq!(place.status()["runs"], false);
    assert!(place.root().join("log/control.log").exists(), "its log may say why it ended");
    assert!(!place.root().join("pipe").exists());
    assert_eq!(place.json(["mps", "start"])["already"], false);
    assert_eq!(place.starts(), 2);
}

// Holds 235.
#[test]
fn stale_directory_is_recognised_and_cleared() {
    let place = Place::new(Manner::Good);
    let watcher = place.json(["mps", "start"])["watcher"].as_u64().unwrap();
    place.kill(watcher);
    place.kill(place.daemon());
    let stale = place.root().join("pipe/stale");
    fs::write(&stale, "").unwrap();
    assert!(place.root().join("pipe/control").exists() && !place.status()["runs"].as_bool().unwrap());
    assert_eq!(place.json(["mps", "start"])["already"], false);
    assert!(!stale.exists());
    assert_eq!(place.status()["runs"], true);
}

// Holds 233.
#[test]
fn missing_program_and_command_are_named() {
    let place = Place::new(Manner::Good);
    for arguments in [&["mps", "start"][..], &["run", "--mps", "true"]] {
        let output = Running::spawn(place.command(arguments).env("PATH", "/nonexistent")).wait().expect(3);
        assert!(output.stderr.contains("nvidia-cuda-mps-control: there is no such program on PATH"), "{output:?}");
        assert!(output.stderr.contains("go on without MPS"), "{output:?}");
        assert!(!place.root().exists());
    }
    let output = place.run(["run", "no-such-command-here"]).expect(3);
    assert!(output.stderr.contains("cannot run no-such-command-here"), "{output:?}");
    let output = place.run(["run", "/etc/passwd"]).expect(5);
    assert!(output.stderr.contains("cannot run /etc/passwd: Permission denied"), "{output:?}");
    place.run(["run"]).expect(2);
    place.run(["run", "--mps"]).expect(2);
}

// Holds 233.
#[test]
fn daemon_that_does_not_answer_is_killed_and_reported() {
    let place = Place::new(Manner::Mute);
    let output = place.run(["mps", "start", "--timeout", "0.5"]).expect(7);
    assert!(
        output.stderr.contains("does not answer nvidia-cuda-mps-control within 0.5 s; its log ends: Start"),
        "{output:?}"
    );
    assert!(!place.root().exists());
    eventually("its process is gone", || place.sandbox.processes().is_empty());
}

#[test]
fn daemon_that_stops_answering_is_reported_and_left_alone() {
    let place = Place::new(Manner::Good);
    place.run(["mps", "start"]).expect(0);
    place.stand_in.behave(Manner::Mute);
    let output = place.run(["mps", "start", "--timeout", "0.3"]).expect(7);
    assert!(output.stderr.contains("does not answer within 0.3 s"), "{output:?}");
    assert_eq!(place.starts(), 1);
    place.stand_in.behave(Manner::Good);
    assert_eq!(place.status()["runs"], true);
}

// Holds 233.
#[test]
fn daemon_that_does_not_start_says_why() {
    let place = Place::new(Manner::Refuses);
    for arguments in [&["run", "--mps", "true"][..], &["mps", "start"]] {
        let output = place.run(arguments).expect(6);
        let said = "the MPS daemon could not be started: Failed to initialize the MPS control daemon";
        assert!(output.stderr.contains(said), "{output:?}");
        assert!(output.stderr.contains("nvidia-smi") && !output.stderr.contains("`partywall mps start`"), "{output:?}");
        assert!(!place.root().exists());
    }
}

// Holds 233.
#[test]
fn unsafe_and_impossible_directories_are_refused() {
    let place = Place::new(Manner::Good);
    let parent = place.root().parent().unwrap().to_owned();
    for path in [parent.clone(), place.root()] {
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&parent, PermissionsExt::from_mode(0o700)).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let output = place.run(["mps", "start"]).expect(4);
        assert!(output.stderr.contains("its mode is 0755") && output.stderr.contains("chmod 700"), "{output:?}");
    }
    fs::remove_dir(place.root()).unwrap();
    let nowhere = Running::spawn(place.command(["mps", "start"]).env("XDG_RUNTIME_DIR", "/dev/null")).wait();
    assert!(nowhere.expect(4).stderr.contains("/dev/null/partywall"));
    let long = format!("/tmp/{}/x.sock", "x".repeat(90));
    let output = place.run(["mps", "start", "--socket", &long]).expect(2);
    assert!(output.stderr.contains("at most 107 bytes"), "{output:?}");
    assert_eq!(place.starts(), 0);
}
