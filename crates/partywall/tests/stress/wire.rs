//! The wire with nothing around it: what a client or a broker could send that is none of ours.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Instant,
};

use partywall_os::{memfd, process, socket};
use partywall_shm::{DType, Layout, TableBuilder};
use partywall_wire::{
    Access, Answer, BrokerHello, Call, ClientHello, Commit, FrameReader, Kind, Lifetime, Open, Place, Refusal, Reply,
    Request, Resume, Table, Welcome, WireError, frame,
    handshake::{self, Speaker},
    limits::MAX_MESSAGE,
};

use super::WATCHDOG;

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
                Err(_) => return None,
            }
        }
    }

    /// Sends what goes; `false` if nobody is there any more.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[&OwnedFd]) -> bool {
        let mut fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut rest = bytes;
        while !rest.is_empty() {
            match socket::send(&self.socket, rest, &fds) {
                Ok(n) => rest = &rest[n..],
                Err(rustix::io::Errno::AGAIN) => {
                    socket::wait(&self.socket, socket::Ready::Write, Some(Instant::now() + WATCHDOG)).unwrap();
                    continue;
                }
                Err(_) => return false,
            }
            fds.clear();
        }
        true
    }
}

/// A member.
pub(crate) struct Client {
    pub(crate) call: Framed,
    pub(crate) events: Framed,
    pub(crate) welcome: Welcome,
    pub(crate) last: u64,
}

/// The bytes of a first message.
pub(crate) fn hello(operator: bool, resume: Option<Resume>) -> Vec<u8> {
    let hello =
        ClientHello { command: "stress".into(), operator, simulated: partywall_harness::device() != "host", resume };
    handshake::encode(&Speaker::new("0.0.0-test"), &hello, 1).unwrap()
}

/// Connects and says who we are, or who we are not.
pub(crate) fn shake_hands(path: &Path, resume: Option<Resume>) -> Result<Client, Refusal> {
    let mut call = Framed::new(socket::connect(path).unwrap());
    call.send(&hello(false, resume), &[&process::own_pidfd().unwrap()]);
    greeted(&mut call).map(|(welcome, events)| Client { call, events, welcome, last: 0 })
}

/// The answer to a first message.
pub(crate) fn greeted(call: &mut Framed) -> Result<(Welcome, Framed), Refusal> {
    let (body, fds) = call.receive().expect("an answer");
    let hello: BrokerHello = handshake::decode(&body).unwrap().decode().unwrap();
    hello.outcome.map(|welcome| (welcome, Framed::new(fds.into_iter().next().expect("the events socket"))))
}

impl Client {
    pub(crate) fn join(path: &Path) -> Self {
        shake_hands(path, None).unwrap()
    }

    pub(crate) fn request(&mut self, call: Call, fds: usize) -> Vec<u8> {
        self.last += 1;
        frame::encode(&Request { id: self.last, call }, fds, MAX_MESSAGE).unwrap()
    }

    pub(crate) fn send(&mut self, call: Call, fds: &[&OwnedFd]) -> bool {
        let bytes = self.request(call, fds.len());
        self.call.send(&bytes, fds)
    }

    pub(crate) fn ask(&mut self, call: Call, fds: &[&OwnedFd]) -> Result<Answer, Refusal> {
        self.ask_with(call, fds).0
    }

    pub(crate) fn ask_with(&mut self, call: Call, fds: &[&OwnedFd]) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        assert!(self.send(call, fds), "nobody listens");
        self.answer()
    }

    pub(crate) fn answer(&mut self) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
        let (body, fds) = self.call.receive().expect("a reply");
        let reply: Reply = partywall_wire::Frame { body, fds: 0 }.decode().unwrap();
        assert_eq!(reply.id, self.last);
        (reply.outcome, fds)
    }
}

/// A commit of one chunk of 4096 bytes with a table that tells of one tensor `x`, in the message or in a memfd.
pub(crate) fn commit(name: &str, kept: bool, table_apart: bool) -> (Commit, Vec<OwnedFd>) {
    let mut builder = TableBuilder::new();
    builder.add("x", DType::U32, &[1024]).unwrap();
    let Layout { table, chunks } = builder.layout(1 << 20, 1).unwrap();
    let mut fds = vec![memfd::frozen("partywall:stress", &[1; 4096]).unwrap()];
    let table = if table_apart {
        fds.push(memfd::frozen("partywall-table:stress", &table).unwrap());
        Table::Fd { bytes: table.len() as u64 }
    } else {
        Table::Inline(table)
    };
    (host(name, kept, chunks, table), fds)
}

/// A commit of host memory.
pub(crate) fn host(name: &str, kept: bool, chunks: Vec<u64>, table: Table) -> Commit {
    Commit {
        name: name.into(),
        kind: Kind::Host,
        place: Place::Host,
        chunks,
        handles: Vec::new(),
        table,
        tensors: 1,
        mutable: false,
        reserved: 0,
        lifetime: if kept { Lifetime::Kept } else { Lifetime::Owned },
        control: None,
        if_absent: false,
        claim: None,
    }
}

/// A request for the latest version of `name`.
pub(crate) fn open(name: &str, wait: bool) -> Call {
    Call::Open(Open { name: name.into(), version: None, access: Access::Read, wait })
}
