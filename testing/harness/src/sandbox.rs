//! A private directory and domain for a test.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use partywall::{Domain, Location};
use partywall_os::{process, socket};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    WATCHDOG,
    place::device,
    process::{Output, Running, pidfd_of},
};

/// A temporary directory, mode 0700, with a domain in it. Programs that are started through it see no other domain.
#[derive(Debug)]
pub struct Sandbox {
    directory: tempfile::TempDir,
    /// The number of simulated GPUs for programs that are started through it.
    gpus: Option<usize>,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Sandbox {
    /// Creates a sandbox without a broker.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new() -> Self {
        // A socket's path has at most 107 bytes, and TMPDIR may be long.
        let directory = tempfile::Builder::new().prefix("pw-").tempdir_in("/tmp").unwrap();
        for part in ["run", "state", "home"] {
            fs::DirBuilder::new().mode(0o700).create(directory.path().join(part)).unwrap();
        }
        Self { directory, gpus: None }
    }

    /// Returns a new sandbox, in which everything runs on the simulated driver, with that many GPUs.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn simulated(gpus: usize) -> Self {
        let mut sandbox = Self::new();
        sandbox.gpus = Some(gpus);
        sandbox
    }

    /// Returns the file that says which simulated memory is lost: a line for each loss, as the simulated driver reads
    /// it.
    pub fn losses(&self) -> PathBuf {
        self.path().join("losses")
    }

    /// Has a simulated GPU lose its memory, as by a reset.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn lose_gpu(&self, number: usize) {
        self.lose(&number.to_string());
    }

    /// Has the pinned memory of a simulated NUMA node be lost.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn lose_node(&self, number: u32) {
        self.lose(&format!("node {number}"));
    }

    fn lose(&self, place: &str) {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(self.losses()).unwrap();
        file.write_all(format!("{place}\n").as_bytes()).unwrap();
    }

    /// Returns the directory of the sandbox, for files of the test.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Writes a file into the directory, and returns its path.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Returns the socket of its domain `default`.
    pub fn socket(&self) -> PathBuf {
        self.path().join("run/partywall/default.sock")
    }

    /// Returns the log of its domain `default`.
    ///
    /// # Panics
    /// If the path of the socket is none.
    pub fn log(&self) -> PathBuf {
        let location = Location::find(None, Some(&self.socket())).unwrap();
        self.path().join("state/partywall").join(location.logs()[0].file_name().unwrap())
    }

    /// Returns the command of any program, in this sandbox.
    pub fn program(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            // If the place is a GPU, the driver of this test process is used too.
            let kept = device() != "host" && name == "PARTYWALL_LIBCUDA";
            if name.as_encoded_bytes().starts_with(b"PARTYWALL_") && !kept {
                command.env_remove(name);
            }
        }
        command.current_dir(self.path()).env("PARTYWALL_BIN", binary());
        command.env_remove("NVIDIA_DRA_LOCAL_IPC_DIR").env("XDG_RUNTIME_DIR", self.path().join("run"));
        command.env("XDG_STATE_HOME", self.path().join("state"));
        command.env("HOME", self.path().join("home"));
        // What a program leaves there by intent, as a lab its history, goes with the sandbox.
        command.env("TMPDIR", self.path());
        if let Some(gpus) = self.gpus {
            command.env("PARTYWALL_LIBCUDA", simulated_driver()).env("SIMCUDA_DEVICES", gpus.to_string());
            command.env("SIMCUDA_LOSSES", self.losses());
        }
        command
    }

    /// Returns the command `partywall` with these arguments.
    pub fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = self.program(binary());
        command.args(arguments);
        command
    }

    /// Runs `partywall` to its end, with nothing on standard input.
    pub fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        self.spawn(arguments).wait()
    }

    /// Runs `partywall --json` to its end, and returns its output. It must succeed.
    ///
    /// # Panics
    /// If the exit code is not 0 or there is no JSON.
    #[track_caller]
    pub fn json<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Value {
        Running::spawn(self.command(["--json"]).args(arguments)).wait().expect(0).json()
    }

    /// Starts `partywall`.
    pub fn spawn<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Running {
        Running::spawn(&mut self.command(arguments))
    }

    /// Starts the broker if it does not run, and returns its pid.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn broker(&self) -> u32 {
        let started = self.run(["serve", "--background"]);
        assert!(matches!(started.code, Some(0 | 5)), "{started:?}");
        self.json(["status"])["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid")
    }

    /// Kills the running broker for good: its supervisor, which would restart it, and then its worker.
    ///
    /// # Panics
    /// If it does not run, or does not end.
    pub fn kill_broker(&self) {
        let status = self.json(["status"]);
        let pidfds = ["supervisor", "pid"].map(|role| {
            let pid = status[role].as_u64().and_then(|pid| u32::try_from(pid).ok());
            pidfd_of(pid.unwrap_or_else(|| panic!("no {role} in {status}")))
        });
        for pidfd in &pidfds {
            process::kill(pidfd, Signal::KILL).unwrap();
        }
        for pidfd in &pidfds {
            assert_eq!(socket::wait(pidfd, socket::Ready::Read, Some(Instant::now() + WATCHDOG)), Ok(true));
        }
    }

    /// Returns a connection of this process to the sandbox's broker, which is started if it does not run.
    ///
    /// # Panics
    /// If it cannot connect.
    pub fn domain(&self) -> Domain {
        self.broker();
        self.domain_of_running()
    }

    /// Returns a connection of this process to the sandbox's broker, which must be running.
    ///
    /// # Panics
    /// If it cannot connect.
    pub fn domain_of_running(&self) -> Domain {
        Domain::options().socket(self.socket()).start(false).connect().unwrap()
    }

    /// Returns the running processes that were started in this sandbox, directly or not.
    pub fn processes(&self) -> Vec<u32> {
        let mark = [b"XDG_RUNTIME_DIR=", self.path().join("run").as_os_str().as_encoded_bytes()].concat();
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // A process that has ended and was not reaped yet has no environment.
        let ours = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark)
        };
        pids.filter(ours).collect()
    }

    /// Returns the files that remain after the broker was asked to end.
    fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        // A process that another test has forked has a listener of this one, too, until it ends.
        let watchdog = Instant::now() + WATCHDOG;
        while !self.socket().exists() && socket::listener_of(&self.socket()).is_some() && Instant::now() < watchdog {
            std::thread::sleep(Duration::from_millis(5));
        }
        let stopped = self.run(["stop", "--force"]);
        if stopped.code != Some(0) {
            left.push(format!("`partywall stop --force` fails: {stopped:?}"));
        }
        for pid in self.processes() {
            // Checked again: children of a test that has ended may be about to end by themselves.
            let Ok(pidfd) = process::pidfd(pid) else { continue };
            let ended = socket::wait(&pidfd, socket::Ready::Read, Some(Instant::now() + WATCHDOG));
            if ended == Ok(true) || !self.processes().contains(&pid) {
                continue;
            }
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            left.push(format!("process {pid}: {}", String::from_utf8_lossy(&command).replace('\0', " ")));
            let _ = process::kill(&pidfd, Signal::KILL);
        }
        let sockets = fs::read_dir(self.path().join("run/partywall")).into_iter().flatten().flatten();
        left.extend(sockets.map(|entry| format!("file {}", entry.path().display())));
        left
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The test has failed already. The log is more useful than a second panic, which would abort the process.
            let log = fs::read_to_string(self.log()).unwrap_or_default();
            let tail: Vec<_> = log.lines().rev().take(40).collect();
            eprintln!("the broker's log:\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.leftovers()));
            eprintln!("left: {outcome:?}");
            return;
        }
        let left = self.leftovers();
        assert!(left.is_empty(), "the sandbox leaves {left:#?}");
    }
}

/// Returns the `partywall` binary: `PARTYWALL_BIN`, else the one that Cargo has built for this test, else the one
/// beside it.
///
/// # Panics
/// If there is none.
pub fn binary() -> PathBuf {
    let named = |variable| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(binary) = named("PARTYWALL_BIN").or_else(|| named("CARGO_BIN_EXE_partywall")) {
        return binary;
    }
    near("partywall", "partywall-cli")
}

/// Copies a program to where every user can start it. Another process writes the copy: a process that a thread of this
/// one starts meanwhile would inherit the open file, and the kernel starts no program that is open for writing.
///
/// # Panics
/// If it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status();
    assert!(copied.is_ok_and(|status| status.success()), "{} was not copied", from.display());
}

/// Writes a script that every user can start, in the way of [`copy_program`].
///
/// # Panics
/// If it cannot be written.
pub fn write_script(path: &Path, text: &str) {
    let draft = path.with_added_extension("draft");
    fs::write(&draft, text).unwrap();
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).unwrap();
    copy_program(&draft, path);
    fs::remove_file(draft).unwrap();
}

/// Returns the simulated CUDA driver, for `PARTYWALL_LIBCUDA`: the one that was built beside this test.
///
/// # Panics
/// If there is none.
pub fn simulated_driver() -> PathBuf {
    near("libsimcuda.so", "partywall-simcuda-library")
}

/// Returns the program `partywall-relay`, the line between two hosts: the one that was built beside this test.
///
/// # Panics
/// If there is none.
pub fn relay() -> PathBuf {
    near("partywall-relay", "partywall-harness")
}

/// Returns a file that Cargo built beside this test.
fn near(file: &str, package: &str) -> PathBuf {
    // target/debug/deps/test-0123 → target/debug/FILE
    let test = std::env::current_exe().unwrap();
    let found = test.ancestors().skip(1).take(3).map(|directory| directory.join(file)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("there is no {file} near {}: cargo build -p {package}", test.display()))
}
