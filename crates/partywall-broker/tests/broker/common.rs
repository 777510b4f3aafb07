//! A broker in a thread, and a raw client: the wire, nothing around it.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use partywall_broker::{Broker, Config, Exit, StopHandle};
use partywall_os::{memfd, process, socket};
use partywall_shm::members::Members;
use partywall_wire::{
    Access, Answer, BrokerHello, Call, ClientHello, Commit, Event, FrameReader, Kind, Lifetime, MemberInfo,
    MemberState, Open, Opened, Place, Refusal, Reply, Request, Resume, Table, Welcome, WireError, frame,
    handshake::{self, Speaker},
    limits::MAX_MESSAGE,
};

/// Far beyond anything that a test waits for: it only ends a test that hangs.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// A broker in a thread of this process.
pub(crate) struct TestBroker {
    pub(crate) socket: PathBuf,
    stop: StopHandle,
    thread: Option<JoinHandle<Exit>>,
    // Dropped last.
    _dir: tempfile::TempDir,
}

impl TestBroker {
    pub(crate) fn start() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::new(dir.path().join("pw/test.sock"), "test", "0.0.0-test");
        config.settle = Duration::from_millis(20);
        config.idle_exit = None;
        change(&mut config);
        let socket = config.socket.clone();
        let broker = Broker::bind(config).unwrap();
        let stop = broker.stop_handle().unwrap();
        let thread = std::thread::spawn(move || broker.run().unwrap());
        Self { socket, stop, thread: Some(thread), _dir: dir }
    }

    pub(crate) fn client(&self) -> Client {
        Client::join(&self.socket)
    }

    pub(crate) fn stop(&self) {
        self.stop.stop();
    }

    /// Waits for the end.
    pub(crate) fn exit(&mut self) -> Exit {
        let thread = self.thread.take().unwrap();
        eventually("the broker ends", || thread.is_finished());
        thread.join().unwrap()
    }
}

impl Drop for TestBroker {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < deadline, "watchdog: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One socket, framed.
pub(crate) struct Framed {
    pub(crate) socket: OwnedFd,
    reader: FrameReader,
    fds: VecDeque<OwnedFd>,
}

impl Framed {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, reader: FrameReader::new(MAX_MESSAGE), fds: VecDeque::new() }
    }

    /// The next message and its file descriptors, or `None` at the end of the connection.
    pub(crate) fn receive(&mut self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match self.reader.next_frame(self.fds.len()) {
                Ok(frame) => return Some((frame.body, self.fds.drain(..frame.fds).collect())),
                Err(WireError::NeedBytes(_)) => {}
                Err(error) => panic!("{error}"),
            }
            let ready = socket::wait(&self.socket, socket::Ready::Read, Some(Instant::now() + WATCHDOG));
            assert_eq!(ready, Ok(true), "watchdog: nothing comes");
            match socket::recv(&self.socket, &mut buffer, &mut self.fds) {
                Ok(got) if got.bytes == 0 => return None,
                Ok(got) => self.reader.push(&buffer[..got.bytes]),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(rustix::io::Errno::CONNRESET) => return None,
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    pub(crate) fn send(&self, bytes: &[u8], fds: &[&OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        assert_eq!(socket::send(&self.socket, bytes, &fds), Ok(bytes.len()));
    }

    /// Whether a message or the end is there already.
    pub(crate) fn is_ready(&self) -> bool {
        socket::wait(&self.socket, socket::Ready::Read, Some(Instant::now())).unwrap()
    }
}

/// A member.
pub(crate) struct Client {
    pub(crate) call: Framed,
    pub(crate) events: Framed,
    pub(crate) welcome: Welcome,
    pub(crate) last: u64,
}

/// What the broker says to a first message.
pub(crate) fn shake_hands(
    socket: &std::path::Path,
    resume: Option<Resume>,
) -> Result<(Framed, Framed, Welcome), Refusal> {
    shake_hands_as(socket, ClientHello { command: "test client".into(), operator: false, simulated: false, resume })
}

/// As [`shake_hands`], with a first message of the caller's.
pub(crate) fn shake_hands_as(
    socket: &std::path::Path,
    hello: ClientHello,
) -> Result<(Framed, Framed, Welcome), Refusal> {
    let mut call = Framed::new(socket::connect(socket).unwrap());
    let bytes = handshake::encode(&Speaker::new("0.0.0-test"), &hello, 1).unwrap();
    // A broker that has no room says so at once, and may have hung up by now.
    let _ = socket::send(&call.socket, &bytes, &[process::own_pidfd().unwrap().as_fd()]);
    let (body, fds) = call.receive().expect("an answer");
    let hello: BrokerHello = handshake::decode(&body).unwrap().decode().unwrap();
    let welcome = hello.outcome?;
    let [events, rows]: [OwnedFd; 2] = fds.try_into().expect("the events socket and the members' rows");
    assert!(Members::map(rows).unwrap().heartbeat(welcome.row).is_some_and(|beat| beat > 0));
    Ok((call, Framed::new(events), welcome))
}

impl Client {
    pub(crate) fn join(socket: &std::path::Path) -> Self {
        let (call, events, welcome) = shake_hands(socket, None).unwrap();
        Self { call, events, welcome, last: 0 }
    }

    pub(crate) fn identity(&self) -> Resume {
        Resume { instance: self.welcome.instance, member: self.welcome.member, token: self.welcome.token }
    }

    /// Sends a request and returns its number.
    pub(crate) fn send(&mut self, call: Call, fds: &[&OwnedFd]) -> u64 {
        self.last += 1;
        let request = Request { id: self.last, call };
        self.call.send(&frame::encode(&request, fds.len(), MAX_MESSAGE).unwrap(), fds);
        self.last
    }

    pub(crate) fn reply(&mut self) -> (Reply, Vec<OwnedFd>) {
        let (body, fds) = self.call.receive().expect("a reply, not the end");
        let reply: Reply = partywall_wire::Frame { body, fds: fds.len() }.decode().unwrap();
        (reply, fds)
    }

    pub(crate) fn ask_with(&mut self, call: Call, fds: &[&OwnedFd]) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        let id = self.send(call, fds);
        let (reply, fds) = self.reply();
        assert_eq!(reply.id, id);
        (reply.outcome, fds)
    }

    pub(crate) fn ask(&mut self, call: Call) -> Result<Answer, Refusal> {
        self.ask_with(call, &[]).0
    }

    /// The next verdict of a waiting request.
    pub(crate) fn completion(&mut self) -> (u64, Result<Answer, Refusal>, Vec<OwnedFd>) {
        let (body, fds) = self.events.receive().expect("an event, not the end");
        match (partywall_wire::Frame { body, fds: fds.len() }).decode().unwrap() {
            Event::Completion { ticket, outcome } => (ticket, outcome, fds),
            event => panic!("{event:?}"),
        }
    }

    /// Commits one frozen chunk with `contents`.
    pub(crate) fn commit(&mut self, name: &str, contents: &[u8], kept: bool) -> (u64, u64) {
        let chunk = memfd::frozen("partywall:test", contents).unwrap();
        let lifetime = if kept { Lifetime::Kept } else { Lifetime::Owned };
        let commit = Commit { lifetime, ..host_commit(name, &[contents.len() as u64]) };
        match self.ask_with(Call::Commit(commit), &[&chunk]).0 {
            Ok(Answer::Committed { version, lease }) => (version, lease),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn open(&mut self, name: &str) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        self.ask_with(open(name, false), &[])
    }

    pub(crate) fn members(&mut self) -> Vec<MemberInfo> {
        match self.ask(Call::Members { after: None }) {
            Ok(Answer::Members { members, .. }) => members,
            other => panic!("{other:?}"),
        }
    }

    /// What is known of a member's life. Clients of these tests have no heartbeat, which is no difference here.
    pub(crate) fn state_of(&mut self, member: u64) -> Option<MemberState> {
        let state = self.members().into_iter().find(|m| m.member == member)?.state;
        Some(if state == MemberState::Hung { MemberState::Alive } else { state })
    }

    pub(crate) fn status(&mut self) -> partywall_wire::StatusInfo {
        match self.ask(Call::Status) {
            Ok(Answer::Status(status)) => *status,
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn host_commit(name: &str, chunks: &[u64]) -> Commit {
    Commit {
        name: name.into(),
        kind: Kind::Host,
        place: Place::Host,
        chunks: chunks.to_vec(),
        handles: Vec::new(),
        table: Table::Inline(b"table".to_vec()),
        tensors: 1,
        mutable: false,
        reserved: 0,
        lifetime: Lifetime::Owned,
        control: None,
        if_absent: false,
        claim: None,
    }
}

pub(crate) fn open(name: &str, wait: bool) -> Call {
    Call::Open(Open { name: name.into(), version: None, access: Access::Read, wait })
}

pub(crate) fn opened(outcome: Result<Answer, Refusal>) -> Opened {
    match outcome {
        Ok(Answer::Opened(opened)) => opened,
        other => panic!("{other:?}"),
    }
}
