// Holds 309.
//! Members on the simulated driver and on the real one, which never share a domain.

use std::{fs, os::fd::OwnedFd};

use partywall_os::memfd;
use partywall_wire::{Answer, Call, ClientHello, Commit, FdFault, Kind, Place, Refusal};

use crate::common::{
    Client, TestBroker, called, eventually, kept, open, shake_hands, shake_hands_as, slow_to_close, with_facts,
};

fn join(broker: &TestBroker, simulated: bool) -> Result<Client, Refusal> {
    let hello = ClientHello { command: "test client".into(), operator: false, simulated, resume: None, attempt: 0 };
    shake_hands_as(&broker.socket, &hello)
}

fn is_refused(broker: &TestBroker, simulated: bool) {
    // The refusal states the driver of the domain, not that of the refused member.
    assert_eq!(join(broker, simulated).err(), Some(Refusal::OtherDriver { simulated: !simulated }));
}

/// The memory of a driver: on a GPU, and on a NUMA node.
const DRIVER_MEMORY: [(Kind, Place); 2] = [(Kind::Vmm, Place::Gpu([1; 16])), (Kind::Pinned, Place::Pinned(0))];

/// Returns a commit of a driver's memory, which is a memfd here.
fn driver_commit(name: &str, (kind, place): (Kind, Place)) -> (Commit, OwnedFd) {
    let commit = with_facts(kept(name, &[8]), |facts| (facts.kind, facts.place) = (kind, place));
    (commit, memfd::frozen("partywall:test", &[1; 8]).unwrap())
}

#[test]
fn first_member_decides_whether_a_domain_is_simulated() {
    let broker = TestBroker::start();
    for simulated in [true, false, true] {
        let mut first = join(&broker, simulated).unwrap();
        is_refused(&broker, !simulated);
        let mut second = join(&broker, simulated).unwrap();
        assert_eq!(second.status().simulated, simulated);
        assert!(second.members().iter().all(|member| member.simulated == simulated));
        first.ask(Call::Bye).unwrap();
        is_refused(&broker, !simulated);
        second.ask(Call::Bye).unwrap();
    }
}

#[test]
fn memory_of_the_driver_keeps_a_domain_simulated_and_host_memory_does_not() {
    DRIVER_MEMORY.into_iter().for_each(keeps_simulated);
}

fn keeps_simulated(memory: (Kind, Place)) {
    let broker = TestBroker::start();
    let mut member = join(&broker, true).unwrap();
    let (commit, memory) = driver_commit("driver", memory);
    member.ask_with(Call::Commit(commit), &[&memory]).0.unwrap();
    member.commit("host", b"x", true);
    member.ask(Call::Bye).unwrap();
    is_refused(&broker, false);

    let mut member = join(&broker, true).unwrap();
    member.ask(Call::Remove { name: called("driver"), deadline: None }).unwrap();
    member.ask(Call::Bye).unwrap();
    let mut member = join(&broker, false).unwrap();
    assert!(matches!(member.ask(open("host", false)), Ok(Answer::Opened(_))));
}

#[test]
fn only_simulated_members_pass_a_memfd_as_memory_of_the_driver() {
    DRIVER_MEMORY.into_iter().for_each(only_simulated_members_pass_a_memfd);
}

fn only_simulated_members_pass_a_memfd(memory: (Kind, Place)) {
    let broker = TestBroker::start();
    let (commit, memory) = driver_commit("x", memory);
    let fault = |member: &mut Client, fd: &OwnedFd| match member.ask_with(Call::Commit(commit.clone()), &[fd]).0 {
        Err(Refusal::BadFd { fault: FdFault::WrongType { found }, .. }) => Some(found),
        Ok(Answer::Committed { .. }) => None,
        other => panic!("{other:?}"),
    };
    let mut real = join(&broker, false).unwrap();
    assert_eq!(fault(&mut real, &memory).as_deref(), Some("a memfd"));
    real.ask(Call::Bye).unwrap();
    let mut simulated = join(&broker, true).unwrap();
    let device: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    assert_eq!(fault(&mut simulated, &device).as_deref(), Some("a character device 1:3"));
    assert_eq!(fault(&mut simulated, &memory), None);
}

#[test]
fn resumed_member_keeps_its_identity() {
    let broker = TestBroker::start();
    let member = join(&broker, true).unwrap();
    assert!(shake_hands(&broker.socket, Some(member.identity())).is_ok());
    is_refused(&broker, false);
}

/// Closing the last descriptor of 8 GiB of pinned memory takes the driver 137 ms.
// Holds 93.
#[test]
fn memory_of_the_driver_is_closed_beside_the_loop() {
    DRIVER_MEMORY.into_iter().for_each(is_closed_beside_the_loop);
}

fn is_closed_beside_the_loop(memory: (Kind, Place)) {
    let broker = TestBroker::start();
    let mut member = join(&broker, true).unwrap();
    let (commit, _) = driver_commit("x", memory);
    let released = memfd::frozen("partywall-released", &[1; 8]).unwrap();
    let Ok(Answer::Committed { lease, .. }) = member.ask_with(Call::Commit(commit.clone()), &[&released]).0 else {
        panic!("committed");
    };
    drop(released);
    // One thread is busy with a descriptor that was refused, and closes no other one.
    let (slow, other) = slow_to_close();
    let message = member.request(Call::Commit(commit), 1);
    assert!(member.call.send(&message[..1], &[&slow]));
    drop(slow);
    assert!(member.call.send(&message[1..], &[]));
    assert!(matches!(member.reply().0.outcome, Err(Refusal::BadFd { .. })));

    member.ask(Call::Remove { name: called("x"), deadline: None }).unwrap();
    member.ask(Call::Release { lease }).unwrap();
    assert!(member.status().bytes.is_empty());
    eventually("it is closed by another thread", || !is_open("/memfd:partywall-released"));
    drop(other);
}

// Holds 86.
#[test]
fn invented_numa_nodes_are_refused_and_leave_nothing() {
    let of_machine = partywall_os::numa::highest_node();
    // The simulated driver has two nodes on any machine.
    for (simulated, highest) in [(false, of_machine), (true, of_machine.max(1))] {
        let broker = TestBroker::start();
        let mut member = join(&broker, simulated).unwrap();
        let beyond = (0..32).map(|bit| 1_u32 << bit).filter(|node| *node > highest);
        for node in beyond.chain([highest + 1, u32::MAX]) {
            let place = Place::Pinned(node);
            let refused = Err(Refusal::NoSuchNode { node, highest });
            let (commit, _) = driver_commit("x", (Kind::Pinned, place));
            let fd = memfd::frozen("partywall-invented", &[1; 8]).unwrap();
            assert_eq!(member.ask_with(Call::Commit(commit), &[&fd]).0, refused);
            assert_eq!(member.ask(Call::CheckBytes { place, bytes: 1 }), refused);
        }
        let place = Place::Pinned(highest);
        assert_eq!(member.ask(Call::CheckBytes { place, bytes: 1 }), Ok(Answer::Done));
        assert!(member.status().bytes.is_empty());
        eventually("the descriptors are closed", || !is_open("/memfd:partywall-invented"));
    }
}

/// Returns whether this process, and so the broker, has a file open whose name begins so.
fn is_open(name: &str) -> bool {
    let files = fs::read_dir("/proc/self/fd").unwrap();
    // One may be closed meanwhile.
    let mut links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    links.any(|link| link.to_string_lossy().starts_with(name))
}
