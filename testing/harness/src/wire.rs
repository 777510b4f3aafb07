//! Raw connections: messages that any client or broker could send, without the library.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Instant,
};

use partywall_os::{memfd, process, socket};
use partywall_shm::members::Members;
use partywall_wire::{
    Access, Answer, BrokerHello, Call, ClientHello, Commit, Event, Frame, FrameReader, Kind, LeaseId, Lifetime,
    MemberId, MemberInfo, MemberState, Name, Open, Place, Refusal, Reply, Request, RequestId, Resume, StatusInfo,
    Table, VersionFacts, Welcome, WireError, frame,
    handshake::{self, Speaker},
    limits::MAX_MESSAGE,
};
use rustix::io::Errno;

use crate::{WATCHDOG, device};

/// One socket that carries frames.
#[derive(Debug)]
pub struct Framed {
    /// The socket.
    pub socket: OwnedFd,
    reader: FrameReader,
    fds: VecDeque<OwnedFd>,
}

impl Framed {
    /// Frames a connected socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, reader: FrameReader::new(MAX_MESSAGE), fds: VecDeque::new() }
    }

    /// Returns the next message and its file descriptors, or `None` at the end of the connection.
    ///
    /// # Panics
    /// If the bytes are not a frame, or the watchdog ends the wait.
    pub fn receive(&mut self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match self.reader.next_frame(self.fds.len()) {
                Ok(frame) => return Some((frame.body, self.fds.drain(..frame.fds).collect())),
                Err(WireError::NeedBytes(_)) => {}
                Err(error) => panic!("{error}"),
            }
            let ready = socket::wait(&self.socket, socket::Ready::Read, Some(Instant::now() + WATCHDOG));
            assert_eq!(ready, Ok(true), "watchdog: nothing arrives");
            match socket::recv(&self.socket, &mut buffer, &mut self.fds) {
                Ok(got) if got.bytes == 0 => return None,
                Ok(got) => self.reader.push(&buffer[..got.bytes]),
                Err(Errno::AGAIN) => {}
                Err(Errno::CONNRESET | Errno::PIPE) => return None,
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    /// Sends all bytes, the file descriptors with the first of them. Returns false if the connection has ended.
    ///
    /// # Panics
    /// If the watchdog ends the wait for room.
    pub fn send(&self, bytes: &[u8], fds: &[&OwnedFd]) -> bool {
        let mut fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut rest = bytes;
        while !rest.is_empty() {
            match socket::send(&self.socket, rest, &fds) {
                Ok(n) => {
                    rest = &rest[n..];
                    fds.clear();
                }
                Err(Errno::AGAIN) => {
                    let ready = socket::wait(&self.socket, socket::Ready::Write, Some(Instant::now() + WATCHDOG));
                    assert_eq!(ready, Ok(true), "watchdog: nothing is read");
                }
                Err(_) => return false,
            }
        }
        true
    }

    /// Returns whether a message or the end of the connection has already arrived.
    ///
    /// # Panics
    /// If the kernel does not report it.
    pub fn is_ready(&self) -> bool {
        socket::wait(&self.socket, socket::Ready::Read, Some(Instant::now())).unwrap()
    }
}

/// A member.
#[derive(Debug)]
pub struct Client {
    /// The socket of its requests and their replies.
    pub call: Framed,
    /// The socket of its events.
    pub events: Framed,
    /// The broker's number.
    pub instance: u64,
    /// The broker's first message.
    pub welcome: Welcome,
    /// The number of its last request.
    pub last: RequestId,
}

/// Returns a first message that asks to be a member, or an operator.
pub fn hello(operator: bool, resume: Option<Resume>) -> ClientHello {
    ClientHello { command: "test client".into(), operator, simulated: device() != "host", resume, attempt: 0 }
}

/// Returns the bytes of a first message.
///
/// # Panics
/// If it is too long.
pub fn encoded(hello: &ClientHello) -> Vec<u8> {
    handshake::encode(&Speaker::new("0.0.0-test"), hello, 1).unwrap()
}

/// Becomes a new member, or resumes a membership. Returns the reason if the broker refuses.
///
/// # Panics
/// If there is no answer.
pub fn shake_hands(path: &Path, resume: Option<Resume>) -> Result<Client, Refusal> {
    shake_hands_as(path, &hello(false, resume))
}

/// Connects with a first message and returns the member, or the reason if the broker refuses.
///
/// # Panics
/// If there is no answer.
pub fn shake_hands_as(path: &Path, hello: &ClientHello) -> Result<Client, Refusal> {
    let call = Framed::new(socket::connect(path).unwrap());
    // A broker that has no room refuses immediately, and may have closed the connection already.
    let _ = call.send(&encoded(hello), &[&process::own_pidfd().unwrap()]);
    greeted(call)
}

/// Becomes a member by the answer to a first message.
///
/// # Panics
/// If there is none.
pub fn greeted(mut call: Framed) -> Result<Client, Refusal> {
    let (body, fds) = call.receive().expect("an answer");
    greeting(call, &body, fds)
}

/// Becomes a member by an answer to a first message, which contains `body` and `fds`.
///
/// # Panics
/// If it is no such answer.
pub(crate) fn greeting(call: Framed, body: &[u8], fds: Vec<OwnedFd>) -> Result<Client, Refusal> {
    let BrokerHello { instance, outcome } = handshake::decode(body).unwrap().decode().unwrap();
    let welcome = outcome?;
    // An operator gets pidfds, too.
    let mut fds = fds.into_iter();
    let events = fds.next().expect("the events socket");
    let rows = fds.next().expect("the members' rows");
    assert!(Members::map(rows).unwrap().heartbeat(welcome.row).is_some_and(|beat| beat > 0));
    Ok(Client { call, events: Framed::new(events), instance, welcome, last: RequestId(0) })
}

impl Client {
    /// Becomes a member.
    ///
    /// # Panics
    /// If the broker refuses.
    pub fn join(path: &Path) -> Self {
        shake_hands(path, None).unwrap()
    }

    /// Returns the identity with which a client can resume this membership.
    pub fn identity(&self) -> Resume {
        Resume { instance: self.instance, member: self.welcome.member, token: self.welcome.token }
    }

    /// Returns the bytes of its next request.
    ///
    /// # Panics
    /// If it is too long.
    pub fn request(&mut self, call: Call, fds: usize) -> Vec<u8> {
        self.last = RequestId(self.last.0 + 1);
        frame::encode(&Request { id: self.last, call }, fds, MAX_MESSAGE).unwrap()
    }

    /// Sends a request. Returns false if the connection has ended.
    pub fn try_send(&mut self, call: Call, fds: &[&OwnedFd]) -> bool {
        let bytes = self.request(call, fds.len());
        self.call.send(&bytes, fds)
    }

    /// Sends a request and returns its number.
    ///
    /// # Panics
    /// If the connection has ended.
    pub fn send(&mut self, call: Call, fds: &[&OwnedFd]) -> RequestId {
        assert!(self.try_send(call, fds), "nobody listens");
        self.last
    }

    /// Returns the next reply.
    ///
    /// # Panics
    /// If the connection has ended.
    pub fn reply(&mut self) -> (Reply, Vec<OwnedFd>) {
        let (body, fds) = self.call.receive().expect("a reply, not the end");
        let reply: Reply = Frame { body, fds: fds.len() }.decode().unwrap();
        (reply, fds)
    }

    /// Returns the reply to the last request.
    ///
    /// # Panics
    /// If there is none, or another one comes.
    pub fn answer(&mut self) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        let (reply, fds) = self.reply();
        assert_eq!(reply.id, self.last);
        (reply.outcome, fds)
    }

    /// Sends a request with file descriptors, and returns the reply with its file descriptors.
    ///
    /// # Panics
    /// If there is none.
    pub fn ask_with(&mut self, call: Call, fds: &[&OwnedFd]) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        self.send(call, fds);
        self.answer()
    }

    /// Sends a request and returns its reply.
    ///
    /// # Panics
    /// If there is none.
    pub fn ask(&mut self, call: Call) -> Result<Answer, Refusal> {
        self.ask_with(call, &[]).0
    }

    /// Sends a request that has `text` in the place of its name, and returns the reply.
    ///
    /// # Panics
    /// If there is none.
    pub fn ask_about(&mut self, text: &str, call: impl FnOnce(Name) -> Call) -> Result<Answer, Refusal> {
        const PLACE: &str = "the/place/of/a/name";
        let request = self.request(call(called(PLACE)), 0);
        let at = request.windows(PLACE.len()).position(|bytes| bytes == PLACE.as_bytes()).expect("a name");
        // The length of the name, in one byte.
        let (before, after) = (&request[frame::HEAD..at - 1], &request[at + PLACE.len()..]);
        let text = frame::encode(&text, 0, MAX_MESSAGE).unwrap();
        let body = [before, &text[frame::HEAD..], after].concat();
        let length = u32::try_from(body.len()).unwrap().to_le_bytes();
        self.call.send(&[&length, &request[4..frame::HEAD], &body].concat(), &[]);
        self.answer().0
    }

    /// Returns the outcome of a waiting request: the next event.
    ///
    /// # Panics
    /// If another event comes, or none.
    pub fn completion(&mut self) -> (RequestId, Result<Answer, Refusal>, Vec<OwnedFd>) {
        let (body, fds) = self.events.receive().expect("an event, not the end");
        match (Frame { body, fds: fds.len() }).decode().unwrap() {
            Event::Completion { ticket, outcome } => (ticket, outcome, fds),
            event => panic!("{event:?}"),
        }
    }

    /// Commits one frozen chunk with `contents`, and returns its version and lease.
    ///
    /// # Panics
    /// If the broker refuses.
    pub fn commit(&mut self, name: &str, contents: &[u8], kept: bool) -> (u64, LeaseId) {
        let chunk = memfd::frozen("partywall:test", contents).unwrap();
        let lifetime = if kept { Lifetime::Kept } else { Lifetime::Owned };
        let commit = host_commit(name, lifetime, vec![contents.len() as u64], Table::Inline(b"table".to_vec()));
        match self.ask_with(Call::Commit(commit), &[&chunk]).0 {
            Ok(Answer::Committed { version, lease }) => (version, lease),
            other => panic!("{other:?}"),
        }
    }

    /// Opens the latest version of a name.
    ///
    /// # Panics
    /// If there is no reply.
    pub fn open(&mut self, name: &str) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        self.ask_with(open(name, false), &[])
    }

    /// Returns all members.
    ///
    /// # Panics
    /// If the broker refuses.
    pub fn members(&mut self) -> Vec<MemberInfo> {
        match self.ask(Call::Members { after: None }) {
            Ok(Answer::Members { members, .. }) => members,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the state of a member, or `None` if it is unknown. These clients have no heartbeat, so a state of hung
    /// counts as alive.
    ///
    /// # Panics
    /// If the broker refuses.
    pub fn state_of(&mut self, member: MemberId) -> Option<MemberState> {
        let state = self.members().into_iter().find(|m| m.member == member.0)?.state;
        Some(if state == MemberState::Hung { MemberState::Alive } else { state })
    }

    /// Returns the broker's status.
    ///
    /// # Panics
    /// If the broker refuses.
    pub fn status(&mut self) -> StatusInfo {
        match self.ask(Call::Status) {
            Ok(Answer::Status(status)) => *status,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns a name by its text.
///
/// # Panics
/// If it is none.
pub fn called(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// Returns a commit of chunks of host memory with a table.
pub fn host_commit(name: &str, lifetime: Lifetime, chunks: Vec<u64>, table: Table) -> Commit {
    Commit {
        name: called(name),
        facts: VersionFacts {
            kind: Kind::Host,
            place: Place::Host,
            mutable: false,
            reserved: 0,
            lifetime,
            shared: false,
            control: None,
        },
        chunks,
        handles: Vec::new(),
        table,
        tensors: 1,
        owner: None,
        if_absent: false,
        claim: None,
    }
}

/// Returns a commit with other facts.
pub fn with_facts(commit: Commit, change: impl FnOnce(&mut VersionFacts)) -> Commit {
    let mut changed = commit;
    change(&mut changed.facts);
    changed
}

/// Returns a request for the latest version of `name`.
pub fn open(name: &str, wait: bool) -> Call {
    Call::Open(Open { name: called(name), version: None, access: Access::Read, wait })
}
