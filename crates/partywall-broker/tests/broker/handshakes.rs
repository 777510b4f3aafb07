//! Handshakes: valid, malformed, slow, and of the wrong process.

use std::{os::fd::OwnedFd, time::Duration};

use partywall_os::{map::SharedMap, process, socket};
use partywall_shm::members::Members;
use partywall_wire::{
    BrokerHello, Call, ClientHello, Doubt, Limit, Refusal,
    handshake::{self, Speaker},
};

use crate::{
    common::{Client, Framed, TestBroker, eventually, full, shake_hands},
    roles::Orphan,
};

fn hello() -> Vec<u8> {
    hello_of(&Speaker::new("0.0.0-test"), 1)
}

fn hello_of(speaker: &Speaker, fds: usize) -> Vec<u8> {
    handshake::encode(
        speaker,
        &ClientHello { command: "test".into(), operator: false, simulated: false, resume: None, attempt: 0 },
        fds,
    )
    .unwrap()
}

fn connect(broker: &TestBroker) -> Framed {
    Framed::new(socket::connect(&broker.socket).unwrap())
}

fn answer(connection: &mut Framed) -> (Speaker, Result<partywall_wire::Welcome, Refusal>) {
    let (body, _fds) = connection.receive().expect("an answer, not the end");
    let greeting = handshake::decode(&body).unwrap();
    let hello: BrokerHello = greeting.decode().unwrap();
    (greeting.speaker, hello.outcome)
}

/// Returns the refusal of a handshake with `fds` instead of a pidfd.
fn refusal_of(broker: &TestBroker, fds: &[&OwnedFd]) -> Refusal {
    let mut connection = connect(broker);
    connection.send(&hello_of(&Speaker::new("0.0.0-test"), fds.len()), fds);
    let refusal = answer(&mut connection).1.unwrap_err();
    assert!(connection.receive().is_none());
    refusal
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let broker = TestBroker::start();
    let mut member = broker.client();
    let mut reserved = hello();
    reserved[7] = 1;
    let mut oversized = hello();
    oversized[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut not_a_hello = hello();
    not_a_hello.truncate(not_a_hello.len() - 1);
    not_a_hello[0] -= 1;
    let inputs: [&[u8]; 5] =
        [b"GET / HTTP/1.1\r\n\r\n", &reserved, &oversized, &not_a_hello, b"\x08\0\0\0\0\0\0\0PARTYWAX"];
    for input in inputs {
        let mut connection = connect(&broker);
        connection.send(input, &[]);
        assert!(connection.receive().is_none(), "{input:?}");
    }
    assert_eq!(member.members().len(), 1);
}

#[test]
fn silent_connection_is_dropped() {
    let broker = TestBroker::with(|config| config.handshake_timeout = Duration::from_millis(30));
    let mut member = broker.client();
    let mut silent = connect(&broker);
    let mut stuck = connect(&broker);
    stuck.send(&hello()[..20], &[&process::own_pidfd().unwrap()]);
    assert!(silent.receive().is_none());
    assert!(stuck.receive().is_none());
    assert_eq!(member.ask(Call::Ping), Ok(partywall_wire::Answer::Done));
}

#[test]
fn slow_handshake_is_dropped_by_a_busy_broker() {
    let broker = TestBroker::with(|config| config.handshake_timeout = Duration::from_millis(50));
    let slow = connect(&broker);
    // Never a complete handshake.
    let mut bytes = hello().into_iter().cycle().take(30);
    eventually("it is dropped", || {
        if let Some(byte) = bytes.next() {
            let _ = socket::send(&slow.socket, &[byte], &[]);
        }
        slow.is_ready()
    });
}

#[test]
fn slow_handshake_in_time_succeeds() {
    let broker = TestBroker::with(|config| config.handshake_timeout = Duration::from_secs(60));
    let mut connection = connect(&broker);
    let pidfd = process::own_pidfd().unwrap();
    for (i, byte) in hello().into_iter().enumerate() {
        connection.send(&[byte], &[&pidfd][..usize::from(i == 0)]);
    }
    assert!(answer(&mut connection).1.is_ok());
}

#[test]
fn other_protocol_learns_the_brokers() {
    let broker = TestBroker::start();
    let mut connection = connect(&broker);
    let speaker = Speaker { protocol: 999, pid: 1, version: "9.9.9".into() };
    connection.send(&hello_of(&speaker, 1), &[&process::own_pidfd().unwrap()]);
    let (speaker, outcome) = answer(&mut connection);
    assert_eq!(outcome, Err(Refusal::Protocol));
    assert_eq!(speaker.protocol, partywall_wire::limits::PROTOCOL);
    assert_eq!((speaker.version.as_str(), speaker.pid), ("0.0.0-test", std::process::id()));
    assert!(connection.receive().is_none());
}

#[test]
fn handshake_takes_only_the_own_pidfd() {
    let broker = TestBroker::start();
    let is_no_pidfd = |refusal| matches!(refusal, Refusal::NoPidfd { .. });
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    assert!(is_no_pidfd(refusal_of(&broker, &[&pipe])));
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let foreign = process::pidfd(child.id()).unwrap();
    let guard = Orphan::of(&child.id().to_string());
    assert!(is_no_pidfd(refusal_of(&broker, &[&foreign])));
    guard.kill();
    child.wait().unwrap();
    assert!(is_no_pidfd(refusal_of(&broker, &[&foreign])), "a pidfd of a dead process is refused, too");
}

#[test]
fn client_without_pidfd_is_admitted_and_distinguished() {
    let broker = TestBroker::start();
    let mut connection = connect(&broker);
    // Newer kernels give the broker a pidfd.
    let kernel_gives_pidfd = process::peer_pidfd(&connection.socket).is_some();
    connection.send(&hello_of(&Speaker::new("0.0.0-test"), 0), &[]);
    let member = answer(&mut connection).1.unwrap().member;
    let row = broker.client().members().into_iter().find(|row| row.member == member.0).unwrap();
    assert_eq!(row.doubt, (!kernel_gives_pidfd).then_some(Doubt::NoPidfd));
}

#[test]
fn unauthenticated_connections_do_not_exhaust_fds() {
    let broker = TestBroker::start();
    let own = process::own_pidfd().unwrap();
    let mut connection = connect(&broker);
    connection.send(&hello_of(&Speaker::new("0.0.0-test"), 2), &[&own, &own]);
    assert!(connection.receive().is_none());
}

#[test]
fn full_broker_refuses_clients_until_a_goodbye() {
    let broker = TestBroker::with(|config| config.limits.clients = Some(2));
    let mut a = broker.client();
    let b = broker.client();
    assert_eq!(shake_hands(&broker.socket, None).err(), Some(full(Limit::Clients, 2, 2)));
    assert!(shake_hands(&broker.socket, Some(b.identity())).is_ok(), "an admitted member may resume");
    a.ask(Call::Bye).unwrap();
    Client::join(&broker.socket);
}

/// Every member of a user writes the memory of the members' rows.
// Holds 365.
#[test]
fn rows_whose_beginning_a_member_has_overwritten_keep_nobody_from_joining() {
    let broker = TestBroker::start();
    let mut member = connect(&broker);
    member.send(&hello(), &[&process::own_pidfd().unwrap()]);
    let (_, fds) = member.receive().unwrap();
    let rows = &fds[1];
    assert!(Members::map(rows).is_ok());
    SharedMap::writable(rows).unwrap().write_bytes(0, &[0xff; 64]).unwrap();
    assert!(Members::map(rows).is_err());
    // The harness maps the rows, as every member does.
    shake_hands(&broker.socket, None).unwrap();
}

#[test]
fn thousand_members_are_served() {
    let open_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let count = (open_files / 16).min(1000) as usize;
    // One process may have a quarter of the members.
    let broker = TestBroker::with(|config| config.limits.clients = Some(4 * count as u64));
    let mut members: Vec<_> = (0..count).map(|_| broker.client()).collect();
    members[0].commit("shared", b"x", true);
    for member in &mut members {
        assert!(member.open("shared").0.is_ok());
    }
    let status = members[0].status();
    assert_eq!((status.members as usize, status.leases as usize), (count - 1, count + 1));
    let mut last = members.pop().unwrap();
    for mut member in members {
        member.ask(Call::Bye).unwrap();
    }
    assert_eq!(last.members().len(), 1);
}
