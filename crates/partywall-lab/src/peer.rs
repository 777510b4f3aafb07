//! The connection to the other role of a lab, a child process or another terminal: JSON lines and file descriptors over
//! a Unix socket.

use std::{
    collections::VecDeque,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::Once,
    thread,
    time::{Duration, Instant},
};

use partywall::{DeviceChoice, ErrorKind, Place};
use partywall_cli::simulation;
use partywall_os::{
    Errno,
    dir::DirLock,
    process,
    socket::{self, Ready},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Signal, getpid, kill_process, set_parent_process_death_signal},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Context,
    context::open_directory,
    failure::{Doing, Failure},
    lab::Lab,
    reporter::Reporter,
    step::Step,
};

/// How long the other role may take for one message. Starting the driver takes longest.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How long a lab may take once both roles run.
const MOST: Duration = Duration::from_secs(600);

/// How long a role waits for the user to start the other one in another terminal.
const TIMEOUT_FOR_PEOPLE: Duration = Duration::from_secs(600);

/// A message between two roles.
#[derive(Debug, Serialize, Deserialize)]
enum Message<T> {
    /// The sender's process id, and where its memory is.
    Hello(u32, String),
    /// A step, to be stored and, if this process reports all steps, printed.
    Step(Step),
    /// A message of the lab itself.
    Say(T),
    /// The sender has failed: the message and the advice.
    Failed(String, String),
    /// The receiver must end.
    End,
}

/// The other role.
#[derive(Debug)]
pub struct Peer {
    role: &'static str,
    /// The process id of the role. Only the observer's peers send it and the place of their memory.
    pub pid: u32,
    pub(super) place: DeviceChoice,
    reporter: Reporter,
    socket: OwnedFd,
    received: Vec<u8>,
    fds: VecDeque<OwnedFd>,
    /// True if it is the parent process, which reports the failure of this one.
    is_parent: bool,
    /// The child process that plays it, unless it has its own terminal. Dropping the peer kills the child.
    child: Option<Running>,
}

#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The pid is ours until the child has been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    fn new(role: &'static str, reporter: &Reporter, socket: OwnedFd) -> Self {
        Self {
            role,
            pid: 0,
            place: DeviceChoice::default(),
            reporter: reporter.clone(),
            socket,
            received: Vec::new(),
            fds: VecDeque::new(),
            is_parent: false,
            child: None,
        }
    }

    /// Starts this program as a child that plays `role` and communicates through its standard input.
    pub(super) fn spawn(
        lab: &str,
        role: &'static str,
        place: Place,
        environment: &[(&str, &str)],
        reporter: &Reporter,
    ) -> Result<Self, Failure> {
        let starting = format!("starting the {role} as a child process");
        let (ours, theirs) = socket::pair().doing(&starting)?;
        let mut command = Command::new(std::env::current_exe().doing(&starting)?);
        command.args(["lab", lab, role, "--device", &place.to_string(), "--on-standard-input"]);
        command.envs(environment.iter().copied());
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
        let child = command.spawn().doing(&starting)?;
        // `command` also holds the other end and would hide the child's death.
        drop(command);
        Self { child: Some(Running(child)), ..Self::new(role, reporter, ours) }.met()
    }

    /// Returns the parent process as a peer.
    pub(super) fn on_standard_input(role: &'static str, reporter: &Reporter) -> Result<Self, Failure> {
        let socket = io::stdin().as_fd().try_clone_to_owned().doing("taking standard input")?;
        // Without the signal, a drop in this process could wait without end for a role that is killed together with the
        // parent. If the parent has ended already, the socket reports it.
        set_parent_process_death_signal(Some(Signal::KILL)).doing("asking for a signal")?;
        Ok(Self { is_parent: true, ..Self::new(role, reporter, socket) })
    }

    /// Waits in this terminal until the other role has been started in another one.
    pub(super) fn wait(
        context: &Context,
        lab: &Lab,
        own_role: &str,
        role: &'static str,
        reporter: &Reporter,
    ) -> Result<Self, Failure> {
        let place = Rendezvous::new(context, &lab.meeting_point(own_role))?;
        let lab = lab.name;
        reporter
            .remark(&format!("Waiting for `partywall lab {lab} {role}{}` in another terminal.", simulation::flag()));
        let deadline = Instant::now() + TIMEOUT_FOR_PEOPLE;
        let waiting = format!("waiting for the {role}");
        loop {
            if !socket::wait(&place.listener, Ready::Read, Some(deadline)).doing(&waiting)? {
                return Err(Failure::new(
                    ErrorKind::TimedOut,
                    format!("the {role} was not started within {} minutes", TIMEOUT_FOR_PEOPLE.as_secs() / 60),
                    format!(
                        "run `partywall lab {lab} {role}{}` in another terminal while this one waits",
                        simulation::flag()
                    ),
                ));
            }
            if let Some(socket) = socket::accept(&place.listener).doing(&waiting)? {
                return Ok(Self::new(role, reporter, socket));
            }
        }
    }

    /// Connects to the other role, which waits in another terminal.
    pub(super) fn find(context: &Context, lab: &Lab, role: &'static str, reporter: &Reporter) -> Result<Self, Failure> {
        let path = context.lab_directory(&lab.meeting_point(role))?.join(SOCKET);
        let socket = socket::connect(&path).map_err(|errno| {
            let lab = lab.name;
            Failure::new(
                ErrorKind::NotFound,
                format!("no {role} waits at {}: {errno}", path.display()),
                format!(
                    "start `partywall lab {lab} {role}{simulated}` in another terminal first; or `partywall lab \
                     {lab}{simulated}` alone",
                    simulated = simulation::flag()
                ),
            )
        })?;
        Self::new(role, reporter, socket).met()
    }

    /// Connects to a role that waits in another terminal, if there is one.
    pub(super) fn waiting(
        context: &Context,
        lab: &Lab,
        role: &'static str,
        reporter: &Reporter,
    ) -> Result<Option<Self>, Failure> {
        let path = context.lab_directory(&lab.meeting_point(role))?.join(SOCKET);
        socket::connect(&path).ok().map(|socket| Self::new(role, reporter, socket).met()).transpose()
    }

    /// Sends the process id and the place of this process.
    pub(super) fn introduce(&self, place: Place) -> Result<(), Failure> {
        self.send(&Message::<()>::Hello(std::process::id(), place.to_string()), &[])
    }

    /// Waits for the process id and the place of the other role.
    fn met(mut self) -> Result<Self, Failure> {
        match self.receive::<()>()? {
            Message::Hello(pid, place) => {
                let place = place.parse().map_err(|why| self.broken(format!("{place:?}: {why}")))?;
                Ok(Self { pid, place, ..self })
            }
            Message::Failed(message, advice) => Err(self.failed(&message, advice)),
            _ => Err(self.broken("its first message is not an introduction".into())),
        }
    }

    /// Returns whether the role is played by a child of this process, not in another terminal.
    pub fn is_child(&self) -> bool {
        self.child.is_some()
    }

    /// Kills the child that plays the role (SIGKILL) and waits for its end.
    pub fn kill(&mut self) {
        self.child = None;
    }

    /// Returns how the child that plays the role has ended, or `None` if it runs.
    pub(super) fn ending(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.0.try_wait().ok()?
    }

    /// Returns whether an unread message has arrived, or the role has ended.
    pub fn has_spoken(&self) -> Result<bool, Failure> {
        let is_readable = || socket::wait(&self.socket, Ready::Read, Some(Instant::now()));
        Ok(!self.received.is_empty() || is_readable().map_err(|errno| self.broken(errno.to_string()))?)
    }

    /// Waits until a peer has an unread message or has ended. Returns the places of all such peers, none after the
    /// limit.
    pub fn wait_any(peers: &[&Self], limit: Duration) -> Result<Vec<usize>, Failure> {
        let is_waiting = |place: &usize| !peers[*place].received.is_empty();
        let waiting: Vec<usize> = (0..peers.len()).filter(is_waiting).collect();
        if !waiting.is_empty() {
            return Ok(waiting);
        }
        let mut polled: Vec<_> = peers.iter().map(|peer| PollFd::new(&peer.socket, PollFlags::IN)).collect();
        let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut polled, Some(&limit)) {
            Err(Errno::INTR) => {}
            polled => drop(polled.doing("waiting for roles")?),
        }
        Ok((0..peers.len()).filter(|place| !polled[*place].revents().is_empty()).collect())
    }

    /// Ends the role. Waits for the end of a child.
    pub fn end(self) {
        // A role that has ended needs no message.
        let _ = self.send(&Message::<()>::End, &[]);
        if let Some(child) = &self.child {
            has_ended(child.0.id());
        }
    }

    /// Sends a message of the lab.
    pub fn say(&self, what: impl Serialize) -> Result<(), Failure> {
        self.say_with(what, &[])
    }

    /// Sends a message of the lab with file descriptors.
    pub fn say_with(&self, what: impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        self.send(&Message::Say(what), fds)
    }

    pub(super) fn send_step(&self, step: &Step) -> Result<(), Failure> {
        self.send(&Message::<()>::Step(step.clone()), &[])
    }

    /// Sends a message of the lab and returns the answer.
    pub fn ask<T: DeserializeOwned>(&mut self, what: impl Serialize) -> Result<T, Failure> {
        self.say(what)?;
        self.hear()
    }

    /// Reports the failure of this process to the other role. If that is the parent, only the exit code remains to be
    /// reported here.
    pub(super) fn give_up(&self, failure: Failure) -> Failure {
        // A role that has ended needs no message.
        let _ = self.send(&Message::<()>::Failed(failure.message.clone(), failure.advice.clone()), &[]);
        if self.is_parent { Failure::silent(failure.kind) } else { failure }
    }

    /// Returns the next message of the lab. Steps before it go to the reporter.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.next()?.ok_or_else(|| self.broken("it ended before its next message".into()))
    }

    /// Returns the next message of the lab, or `None` if this role must end.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        loop {
            match self.receive()? {
                Message::Step(step) => self.reporter.take(step),
                Message::Say(what) => return Ok(Some(what)),
                Message::End => return Ok(None),
                Message::Failed(message, advice) => return Err(self.failed(&message, advice)),
                Message::Hello(..) => return Err(self.broken("it introduced itself twice".into())),
            }
        }
    }

    /// Returns the next received file descriptor.
    pub fn take_fd(&mut self) -> Result<OwnedFd, Failure> {
        self.fds.pop_front().ok_or_else(|| self.broken("a file descriptor is missing".into()))
    }

    fn send<T: Serialize>(&self, message: &Message<T>, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(message).map_err(|error| self.broken(error.to_string()))?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        let mut fds = fds;
        let deadline = Instant::now() + TIMEOUT;
        while !rest.is_empty() {
            match socket::send(&self.socket, rest, fds) {
                Err(Errno::AGAIN) => self.wait_until(Ready::Write, deadline, "received")?,
                sent => {
                    rest = &rest[sent.map_err(|errno| self.broken(errno.to_string()))?..];
                    fds = &[];
                }
            }
        }
        Ok(())
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<Message<T>, Failure> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|error| self.broken(error.to_string()));
            }
            self.wait_until(Ready::Read, deadline, "sent")?;
            let mut buffer = [0; 4096];
            match socket::recv_now(&self.socket, &mut buffer, &mut self.fds) {
                Ok(received) if received.bytes == 0 => return Err(self.broken("it has ended".into())),
                Ok(received) => self.received.extend_from_slice(&buffer[..received.bytes]),
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(self.broken(errno.to_string())),
            }
        }
    }

    /// Waits until the role has `done` something.
    fn wait_until(&self, ready: Ready, deadline: Instant, done: &str) -> Result<(), Failure> {
        match socket::wait(&self.socket, ready, Some(deadline)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.broken(format!("it {done} nothing for {} s", TIMEOUT.as_secs()))),
            Err(errno) => Err(self.broken(errno.to_string())),
        }
    }

    fn failed(&self, message: &str, advice: String) -> Failure {
        Failure::new(ErrorKind::Device, format!("the {}: {message}", self.role), advice)
    }

    fn broken(&self, why: String) -> Failure {
        Failure::new(
            ErrorKind::CheckFailed,
            format!("the {} does not answer: {why}", self.role),
            "read its output, then start the lab again",
        )
    }
}

/// Kills this process, and so its children, if it runs longer than any lab. A stream that waits for the event of a dead
/// process never continues, and freeing memory waits for streams, so the process might otherwise never end.
pub(super) fn limit_this_process() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        thread::spawn(|| {
            thread::sleep(MOST);
            let minutes = MOST.as_secs() / 60;
            let _ = writeln!(io::stderr(), "error: the lab has not ended after {minutes} minutes, and is killed");
            let _ = kill_process(getpid(), Signal::KILL);
        });
    });
}

/// Waits for the end of the process with this pid. Returns false after the timeout.
pub(super) fn has_ended(pid: u32) -> bool {
    match process::pidfd(pid) {
        Ok(pidfd) => matches!(socket::wait(pidfd, Ready::Read, Some(Instant::now() + TIMEOUT)), Ok(true)),
        // `ESRCH`: it was reaped already.
        Err(errno) => errno == Errno::SRCH,
    }
}

/// The meeting point of roles in two terminals: a directory with a socket, locked by the role that waits there.
#[derive(Debug)]
struct Rendezvous {
    directory: PathBuf,
    listener: OwnedFd,
    _lock: DirLock,
}

impl Rendezvous {
    fn new(context: &Context, lab: &str) -> Result<Self, Failure> {
        let directory = context.lab_directory(lab)?;
        let opened = open_directory(&directory)?;
        let listening = format!("listening in {}", directory.display());
        let Some(lock) = opened.lock(Instant::now()).doing(&listening)? else {
            return Err(Failure::new(
                ErrorKind::Refused,
                format!("another terminal waits in {} already", directory.display()),
                "end that process, or give both roles another --domain",
            ));
        };
        let path = directory.join(SOCKET);
        // Under the lock, an existing socket belongs to a killed process.
        let _ = std::fs::remove_file(&path);
        let listener = socket::listen(&path).doing(&listening)?;
        Ok(Self { directory, listener, _lock: lock })
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.directory.join(SOCKET));
        let _ = std::fs::remove_dir(&self.directory);
    }
}

const SOCKET: &str = "socket";
