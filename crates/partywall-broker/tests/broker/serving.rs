//! Members that behave.

use crate::common::{Client, TestBroker, host_commit, open, opened};
use partywall_os::{map::SealedMap, memfd};
use partywall_wire::{Answer, Call, Commit, Refusal, Table};

#[test]
fn committed_segment_is_mapped_by_another_member() {
    let broker = TestBroker::start();
    let mut producer = broker.client();
    let mut consumer = broker.client();
    assert_eq!(producer.ask(Call::Ping), Ok(Answer::Done));

    let chunks = [memfd::frozen("partywall:a", b"first").unwrap(), memfd::frozen("partywall:a", b"second").unwrap()];
    let table = memfd::frozen("partywall:a", b"the table").unwrap();
    let commit = Commit { table: Table::Fd { bytes: 9 }, ..host_commit("a/b", &[5, 6]) };
    let (committed, _) = producer.ask_with(Call::Commit(commit), &[&chunks[0], &chunks[1], &table]);
    assert!(matches!(committed, Ok(Answer::Committed { version: 1, .. })), "{committed:?}");

    let (outcome, fds) = consumer.open("a/b");
    let got = opened(outcome);
    assert_eq!((got.version, got.chunks, got.table), (1, vec![5, 6], Table::Fd { bytes: 9 }));
    let bytes: Vec<_> = fds.iter().map(|fd| SealedMap::new(fd).unwrap().bytes().to_vec()).collect();
    assert_eq!(bytes, [b"first".to_vec(), b"second".to_vec(), b"the table".to_vec()]);
}

#[test]
fn waiter_gets_the_name_once_it_is_committed() {
    let broker = TestBroker::start();
    let mut producer = broker.client();
    let mut consumer = broker.client();
    assert_eq!(consumer.ask(open("soon", true)), Ok(Answer::Pending));
    let ticket = consumer.last;
    producer.commit("soon", b"here", true);
    // The publisher may be gone before the waiter reads its answer.
    assert_eq!(producer.ask(Call::Bye), Ok(Answer::Done));
    let (answered, outcome, fds) = consumer.completion();
    assert_eq!((answered, opened(outcome).version), (ticket, 1));
    assert_eq!(SealedMap::new(&fds[0]).unwrap().bytes(), b"here");
}

#[test]
fn goodbye_ends_owned_names_and_the_connection() {
    let broker = TestBroker::start();
    let mut owner = broker.client();
    let mut other = broker.client();
    owner.commit("mine", b"x", false);
    owner.commit("ours", b"x", true);
    assert_eq!(owner.ask(Call::Bye), Ok(Answer::Done));
    assert!(owner.call.receive().is_none());
    assert!(owner.events.receive().is_none());
    assert!(matches!(other.open("mine").0, Err(Refusal::NotFound { .. })));
    assert!(other.open("ours").0.is_ok());
    assert_eq!(other.members().len(), 1);
}

#[test]
fn goodbye_counts_although_its_answer_is_not_read() {
    let broker = TestBroker::start();
    let mut other = broker.client();
    for _ in 0..50 {
        let mut hasty = broker.client();
        hasty.send(Call::Bye, &[]);
        drop(hasty);
    }
    crate::common::eventually("all are gone, none is a suspect", || other.members().len() == 1);
}

#[test]
fn status_has_limits_and_sums() {
    let broker = TestBroker::start();
    let (mut a, _b): (Client, Client) = (broker.client(), broker.client());
    a.commit("x", &[0; 100], true);
    let status = a.status();
    assert_eq!((status.members, status.names, status.versions, status.leases, status.fds), (1, 1, 1, 1, 1));
    assert_eq!(status.instance, a.instance);
    assert_eq!(status.bytes, [(partywall_wire::Place::Host, 100)]);
    assert!(status.limits.iter().any(|(limit, _)| *limit == partywall_wire::Limit::Clients));
}
