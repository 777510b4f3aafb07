//! A stand-in for the vendor's MPS control program and daemon, for machines without a GPU.
//!
//! It has the interface of the vendor's: `-d` starts a daemon that leaves its parent, requests come on standard input,
//! and the daemon makes a socket `control` and a file with its pid in its directory. Its program is the test's own: a
//! script on `PATH` starts the test `mps_control`, which has to call [`play`].

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::Shutdown,
    os::unix::{
        net::{UnixListener, UnixStream},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio, exit},
    time::Duration,
};

use super::{CONTROL, PIPES};
use crate::{ROLE, write_script};

/// How a daemon behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// As it should.
    Good,
    /// It listens and never answers.
    Mute,
    /// It says why it does not start.
    Refuses,
}

/// The control program in a directory of its own.
#[derive(Debug)]
pub struct StandIn {
    directory: PathBuf,
}

impl StandIn {
    /// Installs it in a directory of the test.
    ///
    /// # Panics
    /// If that cannot be made.
    pub fn new(directory: &Path, manner: Manner) -> Self {
        let directory = directory.join("mps stand-in");
        fs::create_dir_all(directory.join("bin")).unwrap();
        fs::write(directory.join("manner"), format!("{manner:?}")).unwrap();
        fs::write(directory.join("clients"), "").unwrap();
        let test = std::env::current_exe().unwrap();
        // The test harness prints to standard output, so the answers go through another descriptor.
        let script = format!(
            "#!/bin/sh\n{ROLE}=\"mps $*\" STAND_IN='{}' exec '{}' --exact mps_control --nocapture --test-threads=1 3>&1 >/dev/null\n",
            directory.display(),
            test.display()
        );
        write_script(&directory.join("bin").join(CONTROL), &script);
        Self { directory }
    }

    /// Returns the value of `PATH` with which a process finds it.
    ///
    /// # Panics
    /// If `PATH` cannot be extended.
    pub fn path(&self) -> std::ffi::OsString {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::join_paths([self.directory.join("bin")].into_iter().chain(std::env::split_paths(&path))).unwrap()
    }

    /// Sets how daemons behave from now on.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn behave(&self, manner: Manner) {
        fs::write(self.directory.join("manner"), format!("{manner:?}")).unwrap();
    }

    /// Sets which clients the server has.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn clients(&self, pids: &[u32]) {
        let lines: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
        // In one step, because the daemon reads it at any time.
        let next = self.directory.join("clients.next");
        fs::write(&next, lines).unwrap();
        fs::rename(&next, self.directory.join("clients")).unwrap();
    }

    /// Returns what daemons were asked to do, in order: `-d`, requests.
    pub fn asked(&self) -> Vec<String> {
        let log = fs::read_to_string(self.directory.join("asked")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }
}

/// Plays the control program or the daemon, if this process was started as one. Call it in a test named `mps_control`.
///
/// # Panics
/// If a file cannot be used.
pub fn play() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let Some(arguments) = role.strip_prefix("mps ") else { return };
    let state = PathBuf::from(std::env::var_os("STAND_IN").unwrap());
    let pipes = PathBuf::from(std::env::var_os(PIPES).unwrap());
    match arguments {
        "-d" => start(&state, &pipes),
        "daemon" => serve(&state, &pipes),
        "" => ask(&pipes),
        other => finish(&format!("unknown argument {other}"), 1),
    }
}

fn start(state: &Path, pipes: &Path) {
    note(state, "-d");
    if UnixStream::connect(pipes.join("control")).is_ok() {
        finish("An instance of this daemon is already running", 1);
    }
    if manner(state) == "Refuses" {
        finish("Failed to initialize the MPS control daemon", 1);
    }
    let mut daemon = Command::new(std::env::current_exe().unwrap());
    daemon.args(["--exact", "mps_control", "--nocapture", "--test-threads=1"]).env(ROLE, "mps daemon");
    // As a daemon, it keeps none of its starter's streams.
    daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
    while UnixStream::connect(pipes.join("control")).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    exit(0);
}

fn serve(state: &Path, pipes: &Path) {
    let listener = UnixListener::bind(pipes.join("control")).unwrap();
    fs::write(pipes.join("nvidia-cuda-mps-control.pid"), std::process::id().to_string()).unwrap();
    fs::write(state.join("daemon"), std::process::id().to_string()).unwrap();
    let logs = PathBuf::from(std::env::var_os(super::LOGS).unwrap());
    fs::write(logs.join("control.log"), "Start\n").unwrap();
    let mut ignored = Vec::new();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        if manner(state) == "Mute" {
            ignored.push(stream);
            continue;
        }
        let mut request = String::new();
        // A process that only connects, to see whether a daemon listens, sends nothing.
        if BufReader::new(&stream).read_line(&mut request).unwrap_or(0) == 0 {
            continue;
        }
        let request = request.trim();
        note(state, request);
        let clients = fs::read_to_string(state.join("clients")).unwrap();
        let answer = match request.split(' ').next().unwrap() {
            // A server comes with the first client.
            "get_server_list" if clients.is_empty() => String::new(),
            "get_server_list" => format!("{}\n", std::process::id()),
            "get_client_list" => clients,
            "quit" => {
                fs::remove_file(pipes.join("control")).unwrap();
                exit(0);
            }
            _ => "unknown command\n".to_owned(),
        };
        // The program that asked may have been killed.
        let _ = stream.write_all(answer.as_bytes());
    }
}

fn ask(pipes: &Path) {
    let mut request = String::new();
    std::io::stdin().read_line(&mut request).unwrap();
    let Ok(mut stream) = UnixStream::connect(pipes.join("control")) else {
        finish("Cannot find MPS control daemon process", 1);
    };
    stream.write_all(request.as_bytes()).unwrap();
    // Without it the daemon would wait for the request of a program that was killed before it made one.
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    finish(answer.trim_end(), 0);
}

/// Prints and ends.
fn finish(text: &str, code: i32) -> ! {
    let mut out = fs::OpenOptions::new().write(true).open("/proc/self/fd/3").unwrap();
    if !text.is_empty() {
        let _ = writeln!(out, "{text}");
    }
    exit(code);
}

fn manner(state: &Path) -> String {
    fs::read_to_string(state.join("manner")).unwrap()
}

fn note(state: &Path, what: &str) {
    let mut asked = fs::OpenOptions::new().append(true).create(true).open(state.join("asked")).unwrap();
    writeln!(asked, "{what}").unwrap();
}
