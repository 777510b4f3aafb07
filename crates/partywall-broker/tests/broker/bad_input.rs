//! Members that send messages that a correct library never sends.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use partywall_os::{
    memfd::{self, Draft},
    socket,
};
use partywall_wire::{
    Access, Answer, Call, ClaimId, Commit, FdFault, Handle, Kind, Limit, MemberState, Open, Place, Refusal, Request,
    RequestId, Table, frame,
    limits::{MAX_CHUNKS, MAX_FDS, MAX_INLINE_TABLE, MAX_MESSAGE, MAX_TABLE},
};

use crate::{
    common::{
        Client, TestBroker, called, eventually, full, host_commit, kept, open, shake_hands, slow_to_close, with_facts,
    },
    roles::{self, SAYS},
};

/// A socket without room for this long counts as full.
const STUCK: Duration = Duration::from_millis(300);

fn frozen(bytes: usize) -> OwnedFd {
    memfd::frozen("partywall:test", &vec![1; bytes]).unwrap()
}

fn fault(client: &mut Client, commit: Commit, fds: &[&OwnedFd]) -> (u32, FdFault) {
    match client.ask_with(Call::Commit(commit), fds).0 {
        Err(Refusal::BadFd { index, fault }) => (index, fault),
        other => panic!("{other:?}"),
    }
}

// Holds 160.
#[test]
fn memory_that_could_change_under_readers_is_refused() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    let sealable = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("partywall:test", sealable).unwrap();
    rustix::fs::ftruncate(&unsealed, 8).unwrap();
    let shared = Draft::create("partywall:test", 8).unwrap().share().unwrap();

    let sealed = |(index, fault)| match fault {
        FdFault::NotSealed { seal } => (index, seal),
        other => panic!("{other:?}"),
    };
    let commit = host_commit("x", &[8, 8]);
    let (index, seal) = sealed(fault(&mut client, commit.clone(), &[&frozen(8), &unsealed]));
    assert!(index == 1 && seal.contains("SHRINK"), "{seal}");
    let (index, seal) = sealed(fault(&mut client, commit.clone(), &[&shared, &frozen(8)]));
    assert!(index == 0 && seal.contains("WRITE"), "{seal}");
    let mutable = with_facts(commit, |facts| facts.mutable = true);
    assert_eq!(sealed(fault(&mut client, mutable.clone(), &[&unsealed, &shared])).0, 0);
    assert!(client.ask_with(Call::Commit(mutable), &[&shared, &shared]).0.is_ok(), "mutable memory may be written");

    let table = Commit { table: Table::Fd { bytes: 8 }, ..host_commit("x", &[]) };
    assert_eq!(sealed(fault(&mut client, table, &[&shared])).0, 0);
    assert_eq!(client.status().names, 1);
}

#[test]
fn memory_of_another_kind_or_length_is_refused() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    let wrong_size = FdFault::WrongSize { said: 9, found: 8 };
    assert_eq!(fault(&mut client, host_commit("x", &[9]), &[&frozen(8)]), (0, wrong_size.clone()));
    let table = Commit { table: Table::Fd { bytes: 9 }, ..host_commit("x", &[8]) };
    assert_eq!(fault(&mut client, table, &[&frozen(8), &frozen(8)]), (1, wrong_size));

    let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let vmm = with_facts(host_commit("x", &[8]), |facts| (facts.kind, facts.place) = (Kind::Vmm, Place::Gpu([1; 16])));
    for (commit, fd, found) in [
        (host_commit("x", &[8]), &file, "a character device 1:3"),
        (host_commit("x", &[8]), &pipe, "a pipe"),
        (vmm, &frozen(8), "a memfd"),
        (Commit { table: Table::Fd { bytes: 8 }, ..host_commit("x", &[]) }, &pipe, "a pipe"),
    ] {
        assert_eq!(fault(&mut client, commit, &[fd]), (0, FdFault::WrongType { found: found.into() }));
    }
    assert_eq!(client.status().fds, 0);
}

#[test]
fn contradictory_commits_are_refused() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    let chunk = frozen(8);
    let inline = |bytes| Table::Inline(vec![0; bytes]);
    let cases: [(Commit, &[&OwnedFd]); 7] = [
        (host_commit("x", &[8, 8]), &[&chunk]),
        (host_commit("x", &[]), &[&chunk]),
        (with_facts(host_commit("x", &[8]), |facts| facts.kind = Kind::Vmm), &[&chunk]),
        (with_facts(host_commit("x", &[8]), |facts| facts.place = Place::Gpu([0; 16])), &[&chunk]),
        (host_commit("x", &[u64::MAX, 8]), &[&chunk, &chunk]),
        (Commit { table: inline(MAX_INLINE_TABLE + 1), ..host_commit("x", &[8]) }, &[&chunk]),
        (Commit { table: Table::Fd { bytes: MAX_TABLE + 1 }, ..host_commit("x", &[]) }, &[&chunk]),
    ];
    for (commit, fds) in cases {
        let outcome = client.ask_with(Call::Commit(commit.clone()), fds).0;
        assert!(matches!(outcome, Err(Refusal::Invalid { .. })), "{commit:?}: {outcome:?}");
    }
    let many = vec![&chunk; MAX_CHUNKS + 1];
    let outcome = client.ask_with(Call::Commit(host_commit("x", &[8; MAX_CHUNKS + 1])), &many).0;
    assert!(matches!(outcome, Err(Refusal::Invalid { .. })));
    let outcome = client.ask_with(Call::Commit(host_commit("x", &[8; MAX_CHUNKS])), &many[1..]).0;
    assert!(outcome.is_ok(), "as many as may be: {outcome:?}");
    assert_eq!(client.status().fds, MAX_CHUNKS as u64);
}

// Holds 366.
#[test]
fn invalid_requests_are_refused() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    let mut other = broker.client();
    for name in ["", "/a", "a b", &"x".repeat(10_000)] {
        assert!(matches!(client.ask_about(name, |name| open(&name, false)), Err(Refusal::BadName { .. })), "{name}");
    }
    let zero = Open { name: called("x"), version: Some(0), access: Access::Read, wait: true };
    assert!(matches!(client.ask(Call::Open(zero)), Err(Refusal::Invalid { .. })));
    assert!(matches!(client.ask_with(Call::Ping, &[&frozen(1)]).0, Err(Refusal::Invalid { .. })));
    let given = Commit { owner: Some(other.welcome.member), ..kept("x", &[1]) };
    let refused = client.ask_with(Call::Commit(given), &[&frozen(1)]).0;
    assert!(matches!(refused, Err(Refusal::Invalid { .. })), "a kept name has no owner: {refused:?}");
    let (_, lease) = other.commit("theirs", b"x", false);
    for call in [Call::Release { lease }, Call::AwaitWithdrawal { lease }, Call::AbandonBuild { claim: ClaimId(1) }] {
        assert!(matches!(client.ask(call), Err(Refusal::Stale { .. })));
    }
    assert!(
        matches!(client.ask(Call::Cancel { ticket: RequestId(77) }), Err(Refusal::Stale { what }) if what == Handle::Ticket)
    );
    assert!(other.open("theirs").0.is_ok());
}

#[test]
fn malformed_message_costs_only_its_senders_connection() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let ping = frame::encode(&Request { id: RequestId(9), call: Call::Ping }, 0, MAX_MESSAGE).unwrap();
    let fd = frozen(1);
    let mut unknown_call = frame::encode(&(9_u64, 200_u32), 0, MAX_MESSAGE).unwrap();
    unknown_call.extend_from_slice(b"and more");
    let mut too_long = ping.clone();
    too_long[..4].copy_from_slice(&(MAX_MESSAGE as u32 + 1).to_le_bytes());
    let mut claims_fds = ping.clone();
    claims_fds[4] = 3;
    let mut claims_many = ping.clone();
    claims_many[4..6].copy_from_slice(&u16::MAX.to_le_bytes());
    let cases: [(&[u8], &[&OwnedFd]); 6] = [
        (&unknown_call, &[]),
        (&too_long, &[]),
        (&claims_fds, &[&fd]),
        (&claims_many, &[]),
        (&ping, &[&fd]),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff", &[]),
    ];
    for (bytes, fds) in cases {
        let mut member = broker.client();
        member.commit("mine", b"x", false);
        member.call.send(bytes, fds);
        while member.call.receive().is_some() {}
        let number = member.welcome.member;
        eventually("it is a suspect", || watcher.state_of(number) == Some(MemberState::Suspect));
        assert!(watcher.open("mine").0.is_ok());
        let mut again = shake_hands(&broker.socket, Some(member.identity())).unwrap();
        again.last = member.last;
        again.ask(Call::Bye).unwrap();
    }
}

#[test]
fn member_dropped_while_sending_does_not_hang() {
    let broker = TestBroker::start();
    let mut member = broker.client();
    let mut head = vec![0xff; 8];
    head.extend_from_slice(&vec![0; 4 << 20]);
    // Blocks if the broker does not read on.
    member.call.send(&head, &[]);
    assert!(member.call.receive().is_none());
}

#[test]
fn client_that_never_reads_blocks_no_other_and_loses_nothing() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let chunk = frozen(1);
    let big = Commit { table: Table::Inline(vec![7; MAX_INLINE_TABLE]), ..kept("big", &[1]) };
    watcher.ask_with(Call::Commit(big), &[&chunk]).0.unwrap();
    let mut deaf = broker.client();
    // Sends until neither requests nor answers fit into the sockets.
    socket::set_nonblocking(&deaf.call.socket).unwrap();
    let mut sent = 0;
    let is_full = |socket: &OwnedFd| !socket::wait(socket, socket::Ready::Write, Some(Instant::now() + STUCK)).unwrap();
    while !is_full(&deaf.call.socket) {
        sent = deaf.send(open("big", false), &[]).0;
    }
    assert_eq!(watcher.ask(Call::Ping), Ok(Answer::Done));
    for id in 1..=sent {
        let (reply, fds) = deaf.reply();
        assert_eq!((reply.id.0, fds.len(), reply.outcome.is_ok()), (id, 1, true));
    }
}

// Holds 163.
#[test]
fn descriptors_of_unfinished_messages_are_few_in_each_process() {
    let broker = TestBroker::start();
    let file = frozen(1);
    let files = [&file; MAX_FDS];
    // Each of these holds as many as a message may have, without an end of the message.
    let mut members: Vec<_> = (0..5).map(|_| broker.client()).collect();
    let mut last = members.pop().unwrap();
    for member in &mut members {
        let head = member.request(Call::Ping, MAX_FDS)[0];
        assert!(member.call.send(&[head], &files));
        assert_eq!(broker.client().ask(Call::Ping), Ok(Answer::Done), "the byte was read before");
    }
    let message = last.request(Call::Ping, MAX_FDS);
    last.call.send(&message[..1], &files);
    assert!(last.call.receive().is_none(), "one more is too many");
    // The others can still end theirs, and then there is room again.
    for member in &mut members {
        let message = member.request(Call::Ping, MAX_FDS);
        assert!(member.call.send(&message[1..], &[]));
        assert!(matches!(member.reply().0.outcome, Err(Refusal::Invalid { .. })));
    }
    let mut next = broker.client();
    let message = next.request(Call::Ping, MAX_FDS);
    assert!(next.call.send(&message[..1], &files));
    assert!(next.call.send(&message[1..], &[]));
    assert!(matches!(next.reply().0.outcome, Err(Refusal::Invalid { .. })));
}

#[test]
fn exceeded_limits_are_answered_by_name() {
    let broker = TestBroker::with(|config| {
        (config.limits.bytes, config.limits.names, config.limits.fds) = (100, 2, Some(3));
        config.limits.message = partywall_wire::limits::MIN_MESSAGE;
    });
    let mut client = broker.client();
    assert_eq!(client.welcome.max_message as usize, partywall_wire::limits::MIN_MESSAGE);
    let mut refused = |commit: Commit, fds: &[&OwnedFd]| match client.ask_with(Call::Commit(commit), fds).0 {
        Err(Refusal::Limit { limit, allowed, needed, .. }) => (limit, allowed, needed),
        other => panic!("{other:?}"),
    };
    let chunk = frozen(1);
    assert_eq!(refused(host_commit("a", &[101]), &[&frozen(101)]), (Limit::Bytes, 100, 101));
    assert_eq!(refused(host_commit("a", &[1; 4]), &[&chunk; 4]), (Limit::Fds, 3, 4));
    client.commit("a", b"x", true);
    client.commit("b", b"x", true);
    let outcome = client.ask_with(Call::Commit(host_commit("c", &[1])), &[&chunk]).0;
    assert_eq!(outcome, Err(full(Limit::Names, 2, 2)));
}

#[test]
fn broker_without_free_fds_refuses_and_continues() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pw/test.sock");
    let mut broker = roles::start_broker(&socket, 64);
    assert_eq!(broker.expect(SAYS), "ready");
    let before = broker.open_files();
    let mut first = Client::join(&socket);

    // More than the broker has room for: some arrive, the rest is lost.
    let chunk = frozen(1);
    let outcome = first.ask_with(Call::Commit(host_commit("x", &[1; 100])), &[&chunk; 100]).0;
    assert!(matches!(outcome, Err(Refusal::BadFd { fault: FdFault::Missing, .. })), "{outcome:?}");
    eventually("what arrived is closed", || broker.open_files() == before + 3);

    let mut members = Vec::new();
    let refusal = loop {
        match shake_hands(&socket, None) {
            Ok(member) => members.push(member),
            Err(refusal) => break refusal,
        }
        assert!(members.len() < 64);
    };
    assert!(matches!(refusal, Refusal::Limit { limit: Limit::Fds, .. }), "{refusal:?}");
    assert!(members.len() > 10);
    assert_eq!(first.ask(Call::Ping), Ok(Answer::Done));
    for mut member in members {
        member.ask(Call::Bye).unwrap();
    }
    Client::join(&socket).ask(Call::Bye).unwrap();
    first.ask(Call::Bye).unwrap();
    eventually("nothing leaks", || broker.open_files() == before);
}

#[test]
fn served_requests_leak_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pw/test.sock");
    let mut broker = roles::start_broker(&socket, 1024);
    assert_eq!(broker.expect(SAYS), "ready");
    let before = broker.open_files();
    let chunk = frozen(8);
    for round in 0..20 {
        let mut client = Client::join(&socket);
        for name in ["a", "b"] {
            client.commit(name, &[0; 8], round % 2 == 0);
            let _ = client.open(name);
        }
        let _ = client.ask_with(Call::Commit(host_commit("bad", &[9])), &[&chunk]);
        let _ = client.ask_with(Call::Commit(Commit { if_absent: true, ..host_commit("a", &[8]) }), &[&chunk]);
        for name in ["a", "b"] {
            client.ask(Call::Remove { name: called(name), deadline: None }).unwrap();
        }
        // An unfinished message with a file descriptor, then the end of the connection or of the membership.
        if round % 3 == 0 {
            client.ask(Call::Bye).unwrap();
        } else {
            client.call.send(&[0, 1, 0, 0, 1, 0, 0, 0, 1], &[&chunk]);
            if let Ok(mut again) = shake_hands(&socket, Some(client.identity())) {
                again.last = client.last;
                again.ask(Call::Bye).unwrap();
            }
        }
    }
    eventually("all is closed", || broker.open_files() == before);
}

#[test]
fn unread_descriptor_of_a_former_client_delays_nobody() {
    let broker = TestBroker::start();
    let mut former = broker.client();
    let (slow, other) = slow_to_close();
    // The broker never reads this socket. The kernel closes what is in it, with the socket.
    assert!(former.events.send(&[0], &[&slow]));
    drop(slow);
    former.ask(Call::Bye).unwrap();
    assert!(former.call.receive().is_none());
    drop(former);
    let mut next = broker.client();
    eventually("its end", || next.members().len() == 1);
    drop(other);
}
