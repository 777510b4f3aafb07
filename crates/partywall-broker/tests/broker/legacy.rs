//! Legacy memory, which only its publisher keeps: the broker knows its handles, and how it ended.

use partywall_wire::{Answer, Call, Commit, Ending, Kind, LegacyHandle, Lifetime, NameEnd, Place, Refusal};

use crate::{
    common::{Client, TestBroker, eventually, host_commit, open, opened, with_facts},
    roles::{self, SAYS},
};

const HANDLE: LegacyHandle = LegacyHandle { origin: [1; 16], driver: [[2; 32], [3; 32]] };

pub(crate) fn commit(name: &str) -> Commit {
    let commit = Commit { handles: vec![HANDLE; 2], ..host_commit(name, &[8, 9]) };
    with_facts(commit, |facts| {
        facts.kind = Kind::Legacy;
        facts.place = Place::Gpu([7; 16]);
    })
}

fn publish(client: &mut Client, name: &str) -> u64 {
    match client.ask(Call::Commit(commit(name))) {
        Ok(Answer::Committed { lease, .. }) => lease.0,
        other => panic!("{other:?}"),
    }
}

#[test]
fn legacy_handles_arrive_unchanged() {
    let broker = TestBroker::start();
    let mut publisher = broker.client();
    let mut reader = broker.client();
    publish(&mut publisher, "x");
    let (outcome, fds) = reader.open("x");
    let found = opened(outcome);
    assert_eq!((found.facts.kind, &found.handles, &found.chunks), (Kind::Legacy, &vec![HANDLE; 2], &vec![8, 9]));
    assert!(fds.is_empty());
    let status = reader.status();
    assert_eq!((status.fds, status.bytes, status.versions), (0, Vec::new(), 1));
}

#[test]
fn contradictory_legacy_commits_are_refused() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    let fd = partywall_os::memfd::frozen("partywall:test", &[0; 8]).unwrap();
    for bad in [
        Commit { handles: vec![HANDLE], ..commit("x") },
        with_facts(commit("x"), |facts| facts.place = Place::Host),
        with_facts(commit("x"), |facts| facts.lifetime = Lifetime::Kept),
        with_facts(commit("x"), |facts| {
            facts.lifetime = Lifetime::Shared;
            facts.mutable = true;
            facts.reserved = 64;
        }),
        Commit { handles: vec![HANDLE; 2], ..host_commit("x", &[8, 9]) },
        Commit { chunks: vec![u64::MAX, 1], ..commit("x") },
    ] {
        let outcome = client.ask(Call::Commit(bad.clone()));
        assert!(matches!(outcome, Err(Refusal::Invalid { .. })), "{bad:?}: {outcome:?}");
    }
    let outcome = client.ask_with(Call::Commit(commit("x")), &[&fd]).0;
    assert!(matches!(outcome, Err(Refusal::Invalid { .. })), "it needs no file descriptor: {outcome:?}");
}

#[test]
fn killed_publisher_is_distinguished_from_one_that_leaves() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut leaver = broker.client();
    publish(&mut leaver, "left");
    leaver.ask(Call::Bye).unwrap();
    let ending = |client: &mut Client, name: &str| match client.open(name).0 {
        Err(Refusal::Ended { end: NameEnd { version: 1, ending, pid, at, .. }, .. }) => (ending, pid, at > 0),
        other => panic!("{other:?}"),
    };
    assert_eq!(ending(&mut watcher, "left"), (Ending::Withdrawn, std::process::id(), true));

    let mut killed = roles::start("publisher", &broker.socket);
    assert_eq!(killed.expect(SAYS), "published");
    let pid = killed.pid();
    assert!(watcher.open("theirs").0.is_ok());
    killed.kill();
    eventually("its death is proved", || watcher.open("theirs").0.is_err());
    assert_eq!(ending(&mut watcher, "theirs"), (Ending::OwnerDied, pid, true));
    assert_eq!(watcher.ask(open("theirs", true)), Ok(Answer::Pending), "it may be published again");
}
