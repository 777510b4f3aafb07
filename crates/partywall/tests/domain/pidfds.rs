// Holds 106.
//! A sandbox without pidfds, like some containers: the death of a process cannot be proved there.

use std::io::Read;

use partywall::{
    Domain, Error,
    error::Denied,
    info::{Doubt, MemberState},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use super::{
    TIMEOUT,
    world::{Actor, World, commit, eventually, value},
};

/// Makes all system calls that return a pidfd fail, for this thread and the threads that it starts.
pub(crate) fn forbid() {
    const SO_PEERPIDFD: u64 = 77;
    let option = SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, SO_PEERPIDFD).unwrap();
    let rules =
        [(libc::SYS_pidfd_open, Vec::new()), (libc::SYS_getsockopt, vec![SeccompRule::new(vec![option]).unwrap()])];
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    let filter =
        SeccompFilter::new(rules.into(), SeccompAction::Allow, unknown, std::env::consts::ARCH.try_into().unwrap());
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// The roles of the other processes.
#[allow(clippy::print_stdout)] // it is how they talk to the test
pub(crate) fn play() {
    forbid();
    let domain = Domain::options().start(false).connect().unwrap();
    let owned = commit(&domain, "owned", 1, false);
    let kept = domain.open("kept", TIMEOUT).unwrap();
    println!("ready");
    let _ = std::io::stdin().read(&mut [0]);
    drop((owned, kept, domain));
    println!("gone");
    let _ = std::io::stdin().read(&mut [0; 2]);
}

fn world() -> (World, Domain) {
    let world = World::prepared(|_| (), forbid);
    let domain = world.connect();
    drop(commit(&domain, "kept", 2, true));
    (world, domain)
}

fn states(domain: &Domain, actor: &Actor) -> Option<(MemberState, Option<Doubt>, u32)> {
    let all = domain.members().unwrap().into_iter();
    all.filter(|member| member.pid == actor.pid()).map(|member| (member.state, member.doubt, member.leases)).next()
}

#[test]
fn without_a_pidfd_a_death_is_unproven() {
    let (world, domain) = world();
    let mut actor = world.play("sandboxed");
    let alive = Some((MemberState::Alive, Some(Doubt::NoPidfd), 2));
    eventually("it is well", || states(&domain, &actor) == alive);
    let reader = domain.open("owned", TIMEOUT).unwrap();
    let pid = actor.pid();
    assert!(matches!(domain.free_unproven(Some(pid)), Err(Error::Denied(Denied::NotUnproven { .. }))));

    actor.kill();
    reader.wait_withdrawn(TIMEOUT).unwrap();
    eventually("it is unproven", || states(&domain, &actor).is_some_and(|(state, ..)| state == MemberState::Unproven));
    assert_eq!(states(&domain, &actor), Some((MemberState::Unproven, Some(Doubt::NoPidfd), 2)));
    assert_eq!(value(&reader), 1, "a reader keeps what it has");
    assert_eq!(value(&domain.open("kept", TIMEOUT).unwrap()), 2);
    drop(reader);
    let status = domain.status().unwrap();
    assert_eq!((status.unproven, status.versions, status.leases), (1, 2, 2));

    let freed = domain.free_unproven(Some(pid)).unwrap();
    assert_eq!(freed.iter().map(|freed| (freed.pid, freed.leases)).collect::<Vec<_>>(), [(pid, 2)]);
    eventually("its memory is given back", || states(&domain, &actor).is_none());
    let status = domain.status().unwrap();
    assert_eq!((status.unproven, status.versions, status.leases), (0, 1, 0));
}

#[test]
fn good_bye_suffices_without_a_pidfd() {
    let (world, domain) = world();
    let mut actor = world.play("sandboxed");
    actor.proceed();
    actor.expect("gone");
    assert_eq!(states(&domain, &actor), None);
    assert_eq!(domain.status().unwrap().leases, 0);
}
