//! Clients that misbehave, for the test and the benchmark of what others notice of them.

use std::{
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use partywall_os::{
    memfd, process,
    socket::{self, Ready},
};
use partywall_wire::{Call, Lifetime, ObjectKind, Table};
use rustix::{io::Errno, process::Signal};

use crate::wire::{Client, Framed, called, encoded, greeting, hello, host_commit, open};

/// A way to misbehave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hostile {
    /// Sends as many descriptors as the kernel takes with each byte, again and again.
    FloodsDescriptors,
    /// Opens [`BIG`] on as many connections as it gets, and reads none of the descriptors.
    OpensAndNeverReads,
    /// Sends requests without waiting for answers, as fast as the broker takes them.
    Pipelines,
    /// Has many connections, and sends one byte a minute on each.
    SendsOneByteAMinute,
    /// Is killed in the middle of each kind of message, and right after it.
    DiesAtEachMessage,
}

/// The name of a segment that [`Hostile::OpensAndNeverReads`] opens. The more chunks it has, the more it hurts.
pub const BIG: &str = "big";

impl Hostile {
    /// All ways.
    pub const ALL: [Self; 5] = [
        Self::FloodsDescriptors,
        Self::OpensAndNeverReads,
        Self::Pipelines,
        Self::SendsOneByteAMinute,
        Self::DiesAtEachMessage,
    ];

    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FloodsDescriptors => "floods-descriptors",
            Self::OpensAndNeverReads => "opens-and-never-reads",
            Self::Pipelines => "pipelines",
            Self::SendsOneByteAMinute => "sends-one-byte-a-minute",
            Self::DiesAtEachMessage => "dies-at-each-message",
        }
    }

    /// Returns the way with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|way| way.name() == name)
    }

    /// Misbehaves until this process is killed. Calls `begun` once the broker has its first share of it. `again`
    /// returns the command of a process that calls this method with the same arguments.
    ///
    /// # Panics
    /// If this process cannot have what it misbehaves with.
    pub fn play(self, socket: &Path, begun: impl FnOnce(), again: impl Fn() -> Command) -> ! {
        match self {
            Self::FloodsDescriptors => flood(socket, begun),
            Self::OpensAndNeverReads => never_read(socket, begun),
            Self::Pipelines => pipeline(socket, begun),
            Self::SendsOneByteAMinute => trickle(socket, begun),
            Self::DiesAtEachMessage => die(socket, begun, again),
        }
    }
}

fn flood(path: &Path, begun: impl FnOnce()) -> ! {
    let file = memfd::frozen("partywall:hostile", &[1; 8]).unwrap();
    let files = vec![&file; socket::MAX_FDS];
    let mut begun = Some(begun);
    loop {
        let Some(mut client) = join(path) else { continue };
        for byte in client.request(Call::Ping, 5) {
            if !client.call.send(&[byte], &files) {
                break;
            }
        }
        if let Some(begun) = begun.take() {
            begun();
        }
    }
}

fn never_read(path: &Path, begun: impl FnOnce()) -> ! {
    let mut begun = Some(begun);
    let mut unread = Vec::new();
    loop {
        if let Some(mut client) = join(path) {
            let requests: Vec<u8> = (0..15).flat_map(|_| client.request(open(BIG, false), 0)).collect();
            client.call.send(&requests, &[]);
            unread.push(client);
            continue;
        }
        // It has all connections that it gets.
        if let Some(begun) = begun.take() {
            begun();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn pipeline(path: &Path, begun: impl FnOnce()) -> ! {
    let mut client = join(path).expect("a member");
    let requests: Vec<u8> = (0..1000).flat_map(|_| client.request(Call::Status, 0)).collect();
    let call = client.call;
    thread::scope(|scope| {
        // Ends with the connection, so that a panic below ends this process.
        scope.spawn(|| while call.send(&requests, &[]) {});
        let mut answers = vec![0; 1 << 16];
        let mut fds = Default::default();
        let mut begun = Some(begun);
        loop {
            let _ = socket::wait(&call.socket, Ready::Read, None);
            match socket::recv(&call.socket, &mut answers, &mut fds) {
                Ok(read) if read.bytes > 0 => {}
                Err(Errno::AGAIN) => {}
                ended => panic!("the broker has ended the connection: {ended:?}"),
            }
            if let Some(begun) = begun.take() {
                begun();
            }
        }
    })
}

fn trickle(path: &Path, begun: impl FnOnce()) -> ! {
    let message = encoded(&hello(false, None));
    let mut begun = Some(begun);
    let mut connections: Vec<(Framed, usize)> = Vec::new();
    loop {
        connections.retain(|(connection, _)| !connection.is_ready());
        let missing = CONNECTIONS - connections.len();
        connections.extend((0..missing).filter_map(|_| Some((Framed::new(socket::connect(path).ok()?), 0))));
        for (connection, sent) in &mut connections {
            let byte = message[*sent % message.len()];
            *sent += usize::from(connection.send(&[byte], &[]));
        }
        if let Some(begun) = begun.take() {
            begun();
        }
        thread::sleep(Duration::from_secs(60));
    }
}

fn die(path: &Path, begun: impl FnOnce(), again: impl Fn() -> Command) -> ! {
    if let Ok(moment) = std::env::var(MOMENT) {
        send_until(path, moment.parse().expect("a number"));
        let _ = process::kill(process::own_pidfd().unwrap(), Signal::KILL);
        unreachable!("it was killed");
    }
    let mut begun = Some(begun);
    loop {
        for moment in 0..2 * (1 + messages(0).len()) {
            let mut again = again();
            again.env(MOMENT, moment.to_string()).stdin(Stdio::null()).stdout(Stdio::null());
            again.status().expect("this program starts");
        }
        if let Some(begun) = begun.take() {
            begun();
        }
    }
}

/// Sends half of message `moment / 2`, or all of it if `moment` is odd. The first message makes this process a member.
fn send_until(path: &Path, moment: usize) {
    let file = memfd::frozen("partywall:hostile", &[1; 8]).unwrap();
    let end = |bytes: &[u8]| if moment.is_multiple_of(2) { bytes.len() / 2 } else { bytes.len() };
    let Some(index) = (moment / 2).checked_sub(1) else {
        let Ok(socket) = socket::connect(path) else { return };
        let message = encoded(&hello(false, None));
        Framed::new(socket).send(&message[..end(&message)], &[&process::own_pidfd().unwrap()]);
        return;
    };
    let Some(mut client) = join(path) else { return };
    let (call, fds) = messages(std::process::id()).swap_remove(index);
    let message = client.request(call, fds);
    client.call.send(&message[..end(&message)], &vec![&file; fds]);
}

/// One message of each kind that makes the broker keep something, and how many descriptors it carries.
fn messages(pid: u32) -> Vec<(Call, usize)> {
    let name = || called(&format!("hostile/{pid}"));
    let commit = |lifetime| host_commit(&name(), lifetime, vec![8], Table::Inline(b"table".to_vec()));
    vec![
        (Call::Ping, 0),
        (Call::Commit(commit(Lifetime::Owned)), 1),
        (open(BIG, false), 0),
        (open(&name(), true), 0),
        (Call::OpenOrBuild { name: name() }, 0),
        (Call::OpenTimeline { name: name(), writer: true, shared: false }, 0),
        (Call::OpenSemaphore { name: name(), maximum: 2, shared: false }, 0),
        (Call::InspectObject { kind: ObjectKind::Semaphore, name: name() }, 0),
        (Call::Watch { pattern: "*".into(), after: None }, 0),
        (Call::UsesGpu { mps: None }, 0),
        (Call::Status, 0),
        (Call::Bye, 0),
    ]
}

/// Becomes a member, unless the broker refuses.
fn join(path: &Path) -> Option<Client> {
    let mut call = Framed::new(socket::connect(path).ok()?);
    if !call.send(&encoded(&hello(false, None)), &[&process::own_pidfd().unwrap()]) {
        return None;
    }
    let (body, fds) = call.receive()?;
    greeting(call, &body, fds).ok()
}

/// How many connections send one byte a minute.
const CONNECTIONS: usize = 200;

/// The environment variable with the moment at which a process dies.
const MOMENT: &str = "PARTYWALL_TEST_MOMENT";
