//! Runs the roles as child processes: starts them, relays their output line by line, and ends them together.

use std::{
    io::{BufRead, BufReader, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    process::{Child, Command, ExitStatus, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use partywall::{DeviceChoice, Error, OpenOptions};
use partywall_os::{
    process,
    socket::{self, Ready},
    thread::spawn,
};
use serde_json::{Value, json};

use super::{Options, session::GLANCE};
use crate::{
    Context,
    failure::{self, Failure},
    output::{Output, has_colours},
};

/// The time that the roles may need beyond their waits, to start the driver and a broker.
const OVERHEAD: Duration = Duration::from_secs(60);

/// The largest number of waits in a role.
const WAITS: u32 = 6;

/// Starts and ends the roles.
#[derive(Debug)]
pub(super) struct DemoSupervisor<'a> {
    context: &'a Context,
    start: Instant,
    deadline: Instant,
}

impl<'a> DemoSupervisor<'a> {
    /// Returns a supervisor of roles whose waits take at most `timeout` each.
    pub(super) fn new(context: &'a Context, timeout: Duration) -> Self {
        let start = Instant::now();
        Self { context, start, deadline: start + timeout * WAITS + OVERHEAD }
    }

    /// Starts a role.
    pub(super) fn spawn(
        &self,
        role: &'static str,
        device: DeviceChoice,
        prefix: &str,
        options: &Options,
    ) -> Result<Running, Failure> {
        let system = |what: &'static str| move |source| Error::System { what: format!("{what} the {role}"), source };
        let binary = std::env::current_exe().map_err(system("finding the program of"))?;
        let mut command = Command::new(binary);
        command.args(self.context.arguments());
        command.args(["demo", role, "--with-parent", &std::process::id().to_string(), "--name", prefix]);
        command.args(["--device", &device.to_string(), "--timeout", &options.timeout.as_secs_f64().to_string()]);
        if role == "producer" {
            command.args(options.corrupt.map(|index| format!("--corrupt={index}")));
            let point = options.crash_at.and_then(|point| point.to_possible_value());
            command.args(point.map(|point| format!("--crash-at={}", point.get_name())));
        }
        if self.context.output().is_json() {
            command.arg("--json");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let starting = |source| Error::starting(format!("the {role}"), source);
        let mut child = command.spawn().map_err(starting)?;
        let relay = Relay { output: self.context.output(), role };
        let stdout = child.stdout.take().map(|stdout| spawn("relay", move || relay.lines(stdout, Relay::say)));
        let stderr = child.stderr.take().map(|stderr| spawn("relay", move || relay.lines(stderr, Relay::remark)));
        // Without a thread that reads its output, the child ends when it writes.
        let relays = stdout.into_iter().chain(stderr).collect::<Result<_, _>>().map_err(starting)?;
        // A child that has not been waited for keeps its pid, even if it is dead. Without a pidfd the child ends by
        // itself.
        let pidfd = process::pidfd(child.id()).map_err(|errno| system("watching")(errno.into()))?;
        Ok(Running { role, child, relays, pidfd })
    }

    /// Waits until a name is committed. Returns false if it is not before a role ends, or before the deadline.
    pub(super) fn wait_for(&self, open: &OpenOptions, first: &Running, second: &Running) -> Result<bool, Failure> {
        loop {
            match open.clone().timeout(GLANCE).open() {
                Ok(_) => return Ok(true),
                Err(Error::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            let now = Instant::now();
            let ended = socket::wait_any([first.pidfd.as_fd(), second.pidfd.as_fd()], Some(now));
            if !matches!(ended, Ok(None)) || now >= self.deadline {
                return Ok(false);
            }
        }
    }

    /// Waits for both roles. When one fails, the other is killed; the worse exit code decides.
    pub(super) fn run(self, mut first: Running, mut second: Running) -> Result<Duration, Failure> {
        let ended = socket::wait_any([first.pidfd.as_fd(), second.pidfd.as_fd()], Some(self.deadline));
        if let Ok(Some([false, true])) = ended {
            std::mem::swap(&mut first, &mut second);
        }
        let first = first.end(self.deadline);
        // The failure of the second role is only a consequence, unless it had ended before the first one failed.
        let deadline = if first.is_success() { self.deadline } else { Instant::now() };
        let second = second.end(deadline);
        let worst = [first, second].into_iter().filter(|end| !end.is_success()).max_by_key(End::badness);
        match worst {
            None => Ok(self.start.elapsed()),
            Some(end) => Err(end.failure()),
        }
    }
}

/// The process of a role. Dropping it kills a process that still runs.
#[derive(Debug)]
pub(super) struct Running {
    role: &'static str,
    child: Child,
    relays: Vec<JoinHandle<()>>,
    pidfd: OwnedFd,
}

impl Running {
    /// Kills the process. Returns its pid.
    pub(super) fn kill(mut self) -> u32 {
        let pid = self.child.id();
        self.stop();
        pid
    }

    /// Waits until `deadline` for the process to end, then kills it.
    fn end(mut self, deadline: Instant) -> End {
        let in_time = matches!(socket::wait(&self.pidfd, Ready::Read, Some(deadline)), Ok(true));
        let status = if in_time { self.child.wait().ok() } else { None };
        self.stop();
        End { role: self.role, status }
    }

    fn stop(&mut self) {
        // The pid stays valid until the child has been waited for; `Child` sends nothing afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for relay in self.relays.drain(..) {
            let _ = relay.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How a role ended; without a status it was killed because it was no longer wanted.
#[derive(Debug, Clone, Copy)]
struct End {
    role: &'static str,
    status: Option<ExitStatus>,
}

impl End {
    fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    fn badness(&self) -> i32 {
        self.status.map_or(-1, |status| status.code().unwrap_or(i32::MAX))
    }

    fn failure(&self) -> Failure {
        let role = self.role;
        let (what, advice) = match self.status.map(|status| (status.code(), status.signal())) {
            None => ("did not end in time and was killed".to_owned(), "run `partywall doctor`, which tests each part"),
            Some((Some(code), _)) => (format!("ended with exit code {code}"), "see its message above"),
            Some((None, signal)) => (
                format!("was killed by signal {}", signal.unwrap_or_default()),
                "see the kernel's log (dmesg) for the sender",
            ),
        };
        let code = self.status.and_then(|status| status.code());
        Failure::new(failure::kind_of(code), format!("demo failed: the {role} {what}"), advice)
    }
}

/// Relays a role's lines with its name.
#[derive(Debug, Clone, Copy)]
struct Relay {
    output: Output,
    role: &'static str,
}

impl Relay {
    fn lines(self, from: impl Read, print: fn(Self, &str)) {
        for line in BufReader::new(from).split(b'\n') {
            let Ok(line) = line else { return };
            print(self, &String::from_utf8_lossy(&line));
        }
    }

    fn say(self, line: &str) {
        if !self.output.is_json() {
            return self.output.line(self.prefixed(line, has_colours(&std::io::stdout())));
        }
        // Steps name their role, but errors do not.
        if let Ok(Value::Object(mut object)) = serde_json::from_str(line) {
            object.entry("role").or_insert_with(|| json!(self.role));
            self.output.value(&Value::Object(object));
        }
    }

    fn remark(self, line: &str) {
        self.output.relay(self.prefixed(line, has_colours(&std::io::stderr())));
    }

    fn prefixed(self, line: &str, colour: bool) -> String {
        let (on, off) = match (colour, self.role) {
            (false, _) => ("", ""),
            (true, "producer") => ("\x1b[36m", "\x1b[0m"),
            (true, _) => ("\x1b[33m", "\x1b[0m"),
        };
        format!("{on}{} │{off} {line}", self.role)
    }
}
