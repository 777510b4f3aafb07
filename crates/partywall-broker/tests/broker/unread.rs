//! Clients that do not read the descriptors sent to them. The kernel counts unread descriptors per user.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use partywall_harness::{Actor, hostile::BIG};
use partywall_os::{
    memfd,
    socket::{self, Ready},
};
use partywall_wire::{
    Answer, Call, MemberId, MemberState, Refusal, Request, RequestId, frame,
    limits::{FDS_AT_ONCE, MAX_MESSAGE},
};

use crate::{
    common::{Client, Framed, TestBroker, eventually, kept, open, opened, shake_hands},
    roles::{self, FEW_MEMBERS, SAYS},
};

/// Chunks of the segment that all clients open.
pub(crate) const CHUNKS: usize = 100;

pub(crate) fn publish(client: &mut Client) {
    let chunk = memfd::frozen("partywall:test", b"x").unwrap();
    let commit = kept(BIG, &[1; CHUNKS]);
    client.ask_with(Call::Commit(commit), &[&chunk; CHUNKS]).0.unwrap();
}

fn open_all(client: &mut Client) -> Vec<OwnedFd> {
    let (outcome, fds) = client.open(BIG);
    opened(outcome);
    assert_eq!(fds.len(), CHUNKS);
    fds
}

/// Requests the descriptors of a segment, and reads nothing.
pub(crate) fn ask_and_leave_unread(client: &mut Client) {
    client.send(open(BIG, false), &[]);
    eventually("the answer comes", || client.call.is_ready());
}

#[test]
fn many_descriptors_come_in_groups() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    publish(&mut client);
    client.send(open(BIG, false), &[]);
    eventually("the first group comes", || client.call.is_ready());
    let mut buffer = vec![0; 1 << 16];
    let mut fds = Default::default();
    let received = socket::recv(&client.call.socket, &mut buffer, &mut fds).unwrap();
    assert_eq!((received.bytes, fds.len()), (frame::HEAD, FDS_AT_ONCE));
}

#[test]
fn slow_reader_is_paused_and_gets_all_answers_later() {
    let broker = TestBroker::start();
    let mut deaf = broker.client();
    let mut other = broker.client();
    publish(&mut deaf);
    let leases = other.status().leases;
    let requests: Vec<_> = (0..15).map(|_| deaf.send(open(BIG, false), &[])).collect();
    for _ in 0..3 {
        open_all(&mut other);
        open_all(&mut broker.client());
    }
    assert_eq!(other.status().leases, leases + 7, "one of the unread requests, six of other clients");
    for request in requests {
        let (reply, fds) = deaf.reply();
        assert_eq!((reply.id, fds.len()), (request, CHUNKS));
        opened(reply.outcome);
    }
    assert_eq!(deaf.ask(Call::Ping), Ok(Answer::Done));
}

/// Runs [`others_are_served_beside_unread_answers`] as a user for whom the kernel has limits.
// Holds 122.
#[test]
fn one_connection_locks_out_no_other_of_its_user() {
    let mut child = roles::start_unprivileged("one connection");
    assert_eq!(child.expect(SAYS), "done");
}

/// Leaves 15 answers unread on one connection, in a process that may have as many open files as its broker: 1,024.
pub(crate) fn others_are_served_beside_unread_answers() {
    assert!(!rustix::process::geteuid().is_root(), "the kernel has no such limits for root");
    let broker = TestBroker::with(|config| config.limits.clients = Some(FEW_MEMBERS));
    let mut deaf = broker.client();
    let mut other = broker.client();
    publish(&mut deaf);
    for _ in 0..15 {
        deaf.send(open(BIG, false), &[]);
    }
    eventually("the first answer comes", || deaf.call.is_ready());
    for _ in 0..20 {
        open_all(&mut other);
        let mut late = broker.client();
        open_all(&mut late);
        late.ask(Call::Bye).unwrap();
    }
}

// Holds 123.
#[test]
fn process_at_its_own_bound_is_refused_at_once() {
    let broker = TestBroker::start();
    let mut other = broker.client();
    publish(&mut other);
    let mut hog = roles::start("hog", &broker.socket);
    assert_eq!(hog.expect(SAYS), "4 connections have unread answers");
    // Its next call and its next connection are refused.
    hog.proceed();
    assert_eq!(hog.expect(SAYS), "Some(Unread { unread: 64, allowed: 64, pids: [] })");
    assert_eq!(hog.expect(SAYS), "Some(Unread { unread: 64, allowed: 64, pids: [] })");
    open_all(&mut other);
    open_all(&mut broker.client());
    // Calls without descriptors are answered, and so is everything after it has read.
    hog.proceed();
    assert_eq!(hog.expect(SAYS), "Ok(Done)");
    hog.proceed();
    assert_eq!(hog.expect(SAYS), "all is well");
}

/// Starts as many processes with unread answers as the common bound allows.
fn hogs(broker: &TestBroker) -> Vec<Actor> {
    let mut hogs: Vec<_> = (0..8).map(|_| roles::start("hog", &broker.socket)).collect();
    // The last one may find that there is no room.
    for hog in &mut hogs[..7] {
        assert_eq!(hog.expect(SAYS), "4 connections have unread answers");
    }
    hogs[7].expect(SAYS);
    hogs
}

// Holds 123.
#[test]
fn calls_at_the_common_bound_wait_then_name_processes_that_do_not_read() {
    let broker = TestBroker::start();
    let mut other = broker.client();
    publish(&mut other);
    let mut hogs = hogs(&broker);
    let pids: Vec<_> = hogs.iter().map(Actor::pid).collect();
    let names_a_hog = |refusal: &Refusal| match refusal {
        Refusal::Unread { unread: 480..=512, allowed: 512, pids: named } => {
            !named.is_empty() && named.iter().all(|pid| pids.contains(pid))
        }
        _ => false,
    };
    let refusal = other.open(BIG).0.unwrap_err();
    assert!(names_a_hog(&refusal), "{refusal:?}");
    let refusal = shake_hands(&broker.socket, None).expect_err("a welcome carries descriptors");
    assert!(names_a_hog(&refusal), "{refusal:?}");
    // Calls without descriptors are still answered, and waiting calls are answered once there is room.
    assert_eq!(other.ask(Call::Ping), Ok(Answer::Done));
    let request = other.send(open(BIG, false), &[]);
    hogs.remove(0).kill();
    let (reply, fds) = other.reply();
    assert_eq!((reply.id, fds.len()), (request, CHUNKS));
    opened(reply.outcome);
    drop(hogs);
    eventually("room for all", || shake_hands(&broker.socket, None).is_ok());
    open_all(&mut other);
}

#[test]
fn all_reading_connections_of_one_process_are_answered() {
    let broker = TestBroker::start();
    let mut clients: Vec<_> = (0..8).map(|_| broker.client()).collect();
    publish(&mut clients[0]);
    std::thread::scope(|scope| {
        for client in &mut clients {
            scope.spawn(|| (0..5).for_each(|_| drop(open_all(client))));
        }
    });
}

#[test]
fn broker_stops_reading_from_a_client_whose_call_waits() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    publish(&mut client);
    let _hogs = hogs(&broker);
    client.send(open(BIG, false), &[]);
    let request = Request { id: RequestId(1), call: open(BIG, false) };
    let bytes = frame::encode(&request, 0, MAX_MESSAGE).unwrap().repeat(1000);
    let mut sent = 0;
    while let Ok(true) =
        socket::wait(&client.call.socket, Ready::Write, Some(Instant::now() + Duration::from_millis(50)))
    {
        sent += socket::send(&client.call.socket, &bytes, &[]).unwrap_or(0);
        assert!(sent < 16 << 20, "the broker stores everything it reads");
    }
}

#[test]
fn killed_client_whose_call_waited_is_forgotten() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    publish(&mut client);
    let mut deserter = roles::start("deserter", &broker.socket);
    assert_eq!(deserter.expect(SAYS), "ready");
    let _hogs = hogs(&broker);
    let member = client.members().into_iter().find(|row| row.pid == deserter.pid()).unwrap().member;
    deserter.proceed();
    assert_eq!(deserter.expect(SAYS), "has closed its events socket");
    eventually("the broker hangs up", || client.state_of(MemberId(member)) != Some(MemberState::Alive));
    // By then its call would have waited for too long.
    std::thread::sleep(Duration::from_millis(1500));
    deserter.kill();
    eventually("it is forgotten", || client.state_of(MemberId(member)).is_none());
}

/// Requests descriptors, and closes its events socket while that call waits.
pub(crate) fn deserter(socket: &std::path::Path, say: impl Fn(&str), wait: impl Fn()) {
    let mut client = Client::join(socket);
    say("ready");
    wait();
    client.send(open(BIG, false), &[]);
    let Client { call, events, .. } = client;
    eventually("the broker reads the call", || socket::is_drained(&call.socket));
    drop(events);
    say("has closed its events socket");
    wait();
}

#[test]
fn unread_descriptors_of_a_connection_that_the_broker_ended_still_count() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    publish(&mut client);
    let mut ended: Vec<Framed> = Vec::new();
    for _ in 0..4 {
        let mut hog = broker.client();
        ask_and_leave_unread(&mut hog);
        // Not a message.
        hog.call.send(&[0xff; 64], &[]);
        ended.push(hog.call);
    }
    let own = Some(Refusal::Unread { unread: 64, allowed: 64, pids: Vec::new() });
    assert_eq!(client.open(BIG).0.err(), own);
    ended.pop();
    open_all(&mut client);
}

#[test]
fn broker_ends_although_a_client_does_not_read() {
    let mut broker = TestBroker::start();
    let mut deaf = broker.client();
    publish(&mut deaf);
    ask_and_leave_unread(&mut deaf);
    broker.stop();
    broker.exit();
}

/// Leaves an answer unread on each of four connections. Then makes one more call and one more connection, then a call
/// without descriptors, and finally reads.
pub(crate) fn hog(socket: &std::path::Path, say: impl Fn(&str), wait: impl Fn()) {
    let mut idle = Client::join(socket);
    let mut clients: Vec<_> = (0..4).map(|_| Client::join(socket)).collect();
    clients.iter_mut().for_each(ask_and_leave_unread);
    say("4 connections have unread answers");
    wait();
    say(&format!("{:?}", idle.open(BIG).0.err()));
    say(&format!("{:?}", shake_hands(socket, None).err()));
    wait();
    say(&format!("{:?}", idle.ask(Call::Ping)));
    wait();
    for client in &mut clients {
        let (reply, fds) = client.reply();
        opened(reply.outcome);
        assert_eq!(fds.len(), CHUNKS);
    }
    open_all(&mut idle);
    say("all is well");
    wait();
}
