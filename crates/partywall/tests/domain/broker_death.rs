// Holds 11.
//! The broker dies.

use std::time::Duration;

use partywall::{DType, Error, error::Unreachable};
use partywall_harness::place;

use super::{
    TIMEOUT,
    world::{World, commit, eventually, value},
};

#[test]
fn memory_stays_readable_after_the_broker_is_gone() {
    let mut world = World::new();
    let domain = world.connect();
    let segment = commit(&domain, "x", 7, true);
    let build = domain.create("y", place()).tensor("x", DType::U32, &[4]).allocate().unwrap();
    world.end_broker();
    eventually("the news", || matches!(domain.ping(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    assert_eq!(value(&segment), 7);
    assert!(matches!(build.commit(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    assert!(matches!(domain.open("x", TIMEOUT), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    drop(segment);
    assert!(matches!(
        partywall::Domain::options().socket(world.socket()).start(false).connect(),
        Err(Error::Unreachable(Unreachable::NoAnswer { .. }))
    ));
}

#[test]
fn waiting_open_ends_with_the_broker() {
    let mut world = World::new();
    let domain = world.connect();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| domain.open("never", TIMEOUT));
        std::thread::sleep(Duration::from_millis(30));
        world.end_broker();
        assert!(matches!(waiter.join().unwrap(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    });
}

/// Something at the socket that speaks another protocol, as a broker of another release would.
#[test]
fn broker_of_another_protocol_is_named_with_its_pid() {
    use std::io::{Read, Write};

    use partywall_wire::{
        BrokerHello, Refusal,
        handshake::{self, Speaker},
    };

    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pw.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let foreign = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let speaker = Speaker { protocol: 999, version: "9.9.9".into(), pid: 4711 };
        let hello = BrokerHello { instance: 1, outcome: Err(Refusal::Protocol) };
        stream.write_all(&handshake::encode(&speaker, &hello, 0).unwrap()).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = partywall::Domain::options().socket(&socket).start(false).connect().unwrap_err();
    let message = error.to_string();
    assert!(
        matches!(error, Error::Unreachable(Unreachable::Version { their_protocol: 999, pid: 4711, .. })),
        "{message}"
    );
    for part in [partywall::VERSION, "9.9.9", "4711"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(error.advice().contains("partywall stop"));
    foreign.join().unwrap();
}
