//! Admission: which processes become members, and what works without being one.

use std::path::Path;

use partywall_os::socket;
use partywall_wire::{Answer, Call, ClientHello, Kill, Limit, MemberId, Refusal, Whom};

use crate::{
    common::{Client, Framed, TestBroker, called, eventually, open, shake_hands, shake_hands_as},
    roles::{self, SAYS},
};

fn join(socket: &Path) -> Result<Client, Refusal> {
    shake_hands(socket, None)
}

fn operator(socket: &Path) -> Result<Client, Refusal> {
    let hello = ClientHello { command: "operator".into(), operator: true, simulated: true, resume: None, attempt: 0 };
    shake_hands_as(socket, &hello)
}

fn refused(result: Result<Client, Refusal>) -> (Limit, u64) {
    match result.err() {
        Some(Refusal::Limit { limit, allowed, .. }) => (limit, allowed),
        other => panic!("{other:?}"),
    }
}

/// Reports whether another process is admitted.
pub(crate) fn joiner(socket: &Path, say: impl Fn(&str)) {
    match join(socket) {
        Ok(mut client) => {
            client.commit("joiner", b"x", false);
            say("is admitted");
        }
        Err(refusal) => say(&format!("{refusal:?}")),
    }
}

fn other_process_is_admitted(broker: &TestBroker) {
    assert_eq!(roles::start("joiner", &broker.socket).expect(SAYS), "is admitted");
}

// Holds 124.
#[test]
fn operators_are_admitted_beside_all_members() {
    let mut broker = TestBroker::with(|config| config.limits.clients = Some(2));
    let mut a = broker.client();
    let b = broker.client();
    a.commit("name", b"x", true);
    assert_eq!(refused(join(&broker.socket)), (Limit::Clients, 2));
    let mut operator = operator(&broker.socket).unwrap();
    assert_eq!(operator.status().members, 2);
    let pids: Vec<_> = operator.members().iter().map(|row| MemberId(row.member)).collect();
    assert_eq!(pids, [a.welcome.member, b.welcome.member], "operators are not listed");
    assert!(matches!(operator.ask(Call::List { after: None }), Ok(Answer::Names { names, .. }) if names.len() == 1));
    assert!(operator.ask(Call::Inspect { name: called("name"), version: None }).is_ok());
    let refusals = [open("name", false), Call::Watch { pattern: "*".into(), after: None }]
        .map(|call| operator.ask(call).unwrap_err());
    assert_eq!(refusals, [Refusal::NotMember, Refusal::NotMember]);
    match operator.ask(Call::Evict { whom: Whom::Member(b.welcome.member.0), kill: false }) {
        Ok(Answer::Evicted(evicted)) => assert_eq!((evicted.len(), evicted[0].kill), (1, Kill::NotAsked)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(operator.ask(Call::Remove { name: called("name"), deadline: None }), Ok(Answer::Removed { .. })));
    assert_eq!(operator.ask(Call::Stop { force: true }), Ok(Answer::Done));
    broker.exit();
}

#[test]
fn departed_operator_leaves_nothing_behind() {
    let broker = TestBroker::start();
    let mut member = broker.client();
    for _ in 0..40 {
        // Without a `Bye`.
        drop(operator(&broker.socket).unwrap());
        eventually("its place is free", || operator(&broker.socket).is_ok());
    }
    assert_eq!(member.members().len(), 1);
    assert_eq!(member.status().members, 0);
}

#[test]
fn idle_operators_make_room_for_others() {
    let broker = TestBroker::start();
    let mut idle: Vec<_> = (0..4).map(|_| operator(&broker.socket).unwrap()).collect();
    assert_eq!(refused(operator(&broker.socket)), (Limit::Operators, 4));
    let mut others: Vec<_> = (0..4).map(|_| roles::start("operators", &broker.socket)).collect();
    for other in &mut others[..3] {
        assert_eq!(other.expect(SAYS), "4 operators");
    }
    // It retries until operators that have been idle for a second make room.
    assert_eq!(others[3].expect(SAYS), "4 operators");
    assert!(idle.iter_mut().all(|client| client.call.receive().is_none()), "they are dismissed");
}

/// Opens four operators' connections as soon as there is room.
pub(crate) fn operators(socket: &Path, say: impl Fn(&str), wait: impl Fn()) {
    let mut clients = Vec::new();
    eventually("there is room", || {
        clients.extend(operator(socket));
        clients.len() == 4
    });
    say("4 operators");
    wait();
}

// Holds 125.
#[test]
fn one_process_gets_a_quarter_of_the_members() {
    let broker = TestBroker::with(|config| config.limits.clients = Some(24));
    let mut members: Vec<_> = (0..6).map(|_| join(&broker.socket).unwrap()).collect();
    assert_eq!(refused(join(&broker.socket)), (Limit::ClientsOfProcess, 6));
    other_process_is_admitted(&broker);
    members.pop().unwrap().ask(Call::Bye).unwrap();
    assert!(join(&broker.socket).is_ok());
}

// Holds 125.
#[test]
fn process_that_hangs_up_does_not_keep_others_out() {
    let broker = TestBroker::with(|config| config.limits.clients = Some(20));
    let mut watcher = broker.client();
    let hung_up = |watcher: &mut Client| watcher.members().len() - 1;
    for count in 1..=16 {
        drop(join(&broker.socket).unwrap());
        eventually("it has hung up", || hung_up(&mut watcher) == count);
    }
    eventually("all have hung up", || {
        matches!(join(&broker.socket), Err(Refusal::Limit { limit: Limit::HungUp, allowed: 16, .. }))
    });
    other_process_is_admitted(&broker);
    assert!(operator(&broker.socket).is_ok());
}

// Holds 125.
#[test]
fn needs_namespaces_processes_of_other_pid_namespaces_are_distinguished() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pw/test.sock");
    let mut broker = roles::start_broker_elsewhere(&socket).expect("this machine lets us make namespaces");
    assert_eq!(broker.expect(SAYS), "ready");
    let mut watcher = Client::join(&socket);
    for count in 1..=16 {
        drop(join(&socket).unwrap());
        eventually("it has hung up", || watcher.members().len() - 1 == count);
    }
    // Before Linux 6.9 the broker cannot distinguish the processes, and counts each connection as a process.
    if partywall_os::process::pidfd_inode(partywall_os::process::own_pidfd().unwrap()).is_some() {
        eventually("all have hung up", || join(&socket).is_err());
    }
    assert_eq!(roles::start("joiner", &socket).expect(SAYS), "is admitted");
}

// Holds 125.
#[test]
fn silent_connections_do_not_count_as_members() {
    let broker = TestBroker::with(|config| config.handshake_timeout = std::time::Duration::from_secs(600));
    let mut silent = Vec::new();
    for _ in 0..1100 {
        match socket::connect(&broker.socket) {
            Ok(connection) => silent.push(Framed::new(connection)),
            Err(errno) => panic!("{errno} after {}", silent.len()),
        }
    }
    other_process_is_admitted(&broker);
    let mut client = broker.client();
    assert_eq!(client.ask(Call::Ping), Ok(Answer::Done));
    assert!(silent[0].receive().is_none(), "the oldest had to go");
}

#[test]
fn many_threads_of_one_process_connect_at_once() {
    let broker = TestBroker::with(|config| config.limits.clients = Some(1024));
    let threads: Vec<_> = (0..100)
        .map(|_| {
            let socket = broker.socket.clone();
            std::thread::spawn(move || {
                let mut client = join(&socket).unwrap();
                client.ask(Call::Ping).unwrap();
                client
            })
        })
        .collect();
    let clients: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(clients.len(), 100);
}
