//! Members on the simulated driver and on the real one, which never share a domain.

use std::os::fd::OwnedFd;

use partywall_os::memfd;
use partywall_wire::{Answer, Call, ClientHello, Commit, FdFault, Kind, Lifetime, Place, Refusal};

use crate::common::{Client, TestBroker, host_commit, open, shake_hands, shake_hands_as};

fn join(broker: &TestBroker, simulated: bool) -> Result<Client, Refusal> {
    let hello = ClientHello { command: "test client".into(), operator: false, simulated, resume: None, attempt: 0 };
    shake_hands_as(&broker.socket, &hello)
}

fn is_refused(broker: &TestBroker, simulated: bool) {
    // The refusal states the driver of the domain, not that of the refused member.
    assert_eq!(join(broker, simulated).err(), Some(Refusal::OtherDriver { simulated: !simulated }));
}

/// Returns a commit of GPU memory, which is a memfd here.
fn gpu_commit(name: &str) -> (Commit, OwnedFd) {
    let commit =
        Commit { kind: Kind::Vmm, place: Place::Gpu([1; 16]), lifetime: Lifetime::Kept, ..host_commit(name, &[8]) };
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
fn gpu_memory_keeps_a_domain_simulated_and_host_memory_does_not() {
    let broker = TestBroker::start();
    let mut member = join(&broker, true).unwrap();
    let (commit, memory) = gpu_commit("gpu");
    member.ask_with(Call::Commit(commit), &[&memory]).0.unwrap();
    member.commit("host", b"x", true);
    member.ask(Call::Bye).unwrap();
    is_refused(&broker, false);

    let mut member = join(&broker, true).unwrap();
    member.ask(Call::Remove { name: "gpu".into(), deadline: None }).unwrap();
    member.ask(Call::Bye).unwrap();
    let mut member = join(&broker, false).unwrap();
    assert!(matches!(member.ask(open("host", false)), Ok(Answer::Opened(_))));
}

#[test]
fn only_simulated_members_pass_a_memfd_as_gpu_memory() {
    let broker = TestBroker::start();
    let (commit, memory) = gpu_commit("x");
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
