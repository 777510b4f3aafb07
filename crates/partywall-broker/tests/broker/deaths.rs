//! Members that die, and members that only seem to have died.

use partywall_wire::{Answer, Call, MemberId, MemberState, Refusal, RequestId};

use crate::{
    common::{Client, TestBroker, called, eventually, kept, open, opened, shake_hands},
    roles::{self, Orphan, SAYS},
};

#[test]
fn resources_of_a_killed_process_are_reclaimed() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let (_, theirs) = watcher.commit("theirs", b"ours", false);
    let mut holder = roles::start("holder", &broker.socket);
    let member: u64 = holder.expect(SAYS).parse().unwrap();
    assert_eq!(watcher.state_of(MemberId(member)), Some(MemberState::Alive));

    let lease = opened(watcher.open("owned").0).lease;
    assert_eq!(watcher.ask(Call::AwaitWithdrawal { lease }), Ok(Answer::Pending));
    let withdrawal = watcher.last;
    assert_eq!(watcher.ask(Call::OpenOrBuild { name: called("building") }), Ok(Answer::Pending));
    let build = watcher.last;
    assert_eq!(watcher.status().leases, 5);

    holder.kill();
    let mut completions =
        [watcher.completion(), watcher.completion()].map(|(ticket, outcome, _)| (ticket, outcome.unwrap()));
    completions.sort_by_key(|(ticket, _)| *ticket);
    assert_eq!(completions[0], (withdrawal, Answer::Withdrawn { notice: None }));
    assert!(matches!(completions[1], (ticket, Answer::Build { .. }) if ticket == build));

    eventually("it is gone", || watcher.state_of(MemberId(member)).is_none());
    assert!(matches!(watcher.open("owned").0, Err(Refusal::NotFound { .. })));
    assert!(watcher.open("kept").0.is_ok());
    assert_eq!(watcher.ask(Call::Release { lease: theirs }), Ok(Answer::Done));
    assert_eq!(watcher.status().leases, 2, "of the watcher alone: `owned` and `kept`");
}

#[test]
fn child_that_holds_the_connection_holds_the_memory() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut parent = roles::start("parent", &broker.socket);
    let member: u64 = parent.expect(SAYS).parse().unwrap();
    let child = Orphan::of(&parent.expect(SAYS));
    assert_eq!(watcher.ask(Call::OpenOrBuild { name: called("building") }), Ok(Answer::Pending));

    parent.kill();
    eventually("the child is noticed", || watcher.state_of(MemberId(member)) == Some(MemberState::HeldByChild));
    let (_, outcome, _) = watcher.completion();
    assert!(matches!(outcome, Ok(Answer::Build { .. })), "the builder has exited");
    assert!(watcher.open("owned").0.is_ok(), "the child may still have it mapped");

    child.kill();
    eventually("both are gone", || watcher.state_of(MemberId(member)).is_none());
    assert!(matches!(watcher.open("owned").0, Err(Refusal::NotFound { .. })));
}

#[test]
fn lost_connection_is_no_death() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut leaver = roles::start("leaver", &broker.socket);
    let member: u64 = leaver.expect(SAYS).parse().unwrap();
    leaver.proceed();
    leaver.expect(SAYS);
    eventually("it is a suspect", || watcher.state_of(MemberId(member)) == Some(MemberState::Suspect));
    assert!(watcher.open("owned").0.is_ok());
    leaver.kill();
    eventually("its death is proved", || watcher.state_of(MemberId(member)).is_none());
}

#[test]
fn suspect_resumes_as_the_same_member() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut member = broker.client();
    let (_, lease) = member.commit("mine", b"x", false);
    let identity = member.identity();
    let number = member.welcome.member;
    assert_eq!(member.ask(open("lost", true)), Ok(Answer::Pending));
    drop(member);
    eventually("it is a suspect", || watcher.state_of(number) == Some(MemberState::Suspect));
    watcher.commit("lost", b"x", true);

    let mut member = shake_hands(&broker.socket, Some(identity.clone())).unwrap();
    assert!(member.welcome.resumed);
    assert_eq!((member.welcome.member, member.welcome.token), (number, identity.token));
    member.last = RequestId(2);
    assert_eq!(watcher.state_of(number), Some(MemberState::Alive));
    assert!(member.ask(open("lost", true)).is_ok(), "its request is asked again, and served");
    assert_eq!(member.ask(Call::Release { lease }), Ok(Answer::Done));
    assert!(matches!(watcher.open("mine").0, Err(Refusal::NotFound { .. })));
}

#[test]
fn new_connection_replaces_the_old_one() {
    let broker = TestBroker::start();
    let mut old = broker.client();
    old.commit("mine", b"x", false);
    for _ in 0..10 {
        let mut new = shake_hands(&broker.socket, Some(old.identity())).unwrap();
        new.last = old.last;
        assert!(old.call.receive().is_none() && old.events.receive().is_none());
        assert_eq!(new.ask(Call::Ping), Ok(Answer::Done));
        // Both connections stay open: an old one ends nothing.
        std::mem::forget(std::mem::replace(&mut old, new));
    }
    assert!(old.open("mine").0.is_ok());
    assert_eq!(old.members().len(), 1);
}

#[test]
fn no_member_resumes_as_another() {
    let broker = TestBroker::start();
    let client = broker.client();
    let right = client.identity();
    for wrong in [
        partywall_wire::Resume { instance: right.instance ^ 1, ..right.clone() },
        partywall_wire::Resume { member: MemberId(right.member.0 + 1), ..right.clone() },
        partywall_wire::Resume { token: partywall_wire::Token([0; 16]), ..right.clone() },
    ] {
        assert_eq!(shake_hands(&broker.socket, Some(wrong)).err(), Some(Refusal::CannotResume));
    }
}

#[test]
fn commit_with_lost_answer_is_carried_out_once() {
    let broker = TestBroker::start();
    let mut member = broker.client();
    let chunk = partywall_os::memfd::frozen("partywall:test", b"x").unwrap();
    let commit = Call::Commit(kept("x", &[1]));
    let (first, _) = member.ask_with(commit.clone(), &[&chunk]);
    let mut again = shake_hands(&broker.socket, Some(member.identity())).unwrap();
    again.last = RequestId(member.last.0 - 1);
    assert_eq!(again.ask_with(commit, &[&chunk]).0, first);
    assert_eq!(again.status().fds, 1);
}

#[test]
fn needs_namespaces_members_are_identified_by_pidfds() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pw/test.sock");
    let mut broker = roles::start_broker_elsewhere(&socket).expect("PID namespaces are allowed here");
    assert_eq!(broker.expect(SAYS), "ready");
    let mut watcher = Client::join(&socket);
    watcher.commit("theirs", b"x", true);
    let own = watcher.members().remove(0);
    assert_eq!(own.pid, std::process::id(), "the pid that it reports is shown to people");
    let mut holder = roles::start("holder", &socket);
    let member: u64 = holder.expect(SAYS).parse().unwrap();
    holder.kill();
    eventually("its death is proved", || watcher.state_of(MemberId(member)).is_none());
    assert!(matches!(watcher.open("owned").0, Err(Refusal::NotFound { .. })));
}
