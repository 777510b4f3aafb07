// Holds 106.
//! Members in trouble: evicted, with a broken context, or dead while their work may continue.

use std::time::Duration;

use partywall_harness::Actor;
use partywall_wire::{
    Answer, Call, Doubt, Evicted, Freed, Kill, Limit, MemberId, MemberInfo, MemberState, Refusal, RequestId, Whom,
};

use crate::{
    common::{Client, TestBroker, called, eventually, full, open, opened, shake_hands},
    roles::{self, SAYS},
    semaphores::User,
};

fn evict(client: &mut Client, whom: Whom, kill: bool) -> Result<Vec<Evicted>, Refusal> {
    match client.ask(Call::Evict { whom, kill })? {
        Answer::Evicted(evicted) => Ok(evicted),
        other => panic!("{other:?}"),
    }
}

fn free(client: &mut Client, pid: Option<u32>) -> Result<Vec<Freed>, Refusal> {
    match client.ask(Call::FreeUnproven { pid })? {
        Answer::Freed { members, more: false } => Ok(members),
        other => panic!("{other:?}"),
    }
}

fn row(client: &mut Client, member: u64) -> Option<MemberInfo> {
    client.members().into_iter().find(|row| row.member == member)
}

/// A process that holds one of every kind of object, and has reported that it is a client of MPS.
fn under_mps(broker: &TestBroker, watcher: &mut Client) -> (Actor, u64) {
    watcher.commit("theirs", b"ours", true);
    let mut holder = roles::start("holder under MPS", &broker.socket);
    let member = holder.expect(SAYS).parse().unwrap();
    (holder, member)
}

// Holds 107.
#[test]
fn evicted_member_gets_nothing_and_keeps_its_memory_until_death() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    watcher.commit("theirs", b"ours", true);
    let mut holder = roles::start("holder", &broker.socket);
    let member: u64 = holder.expect(SAYS).parse().unwrap();
    let lease = opened(watcher.open("owned").0).lease;
    assert_eq!(watcher.ask(Call::AwaitWithdrawal { lease }), Ok(Answer::Pending));
    let withdrawal = watcher.last;
    assert_eq!(watcher.ask(Call::OpenOrBuild { name: called("building") }), Ok(Answer::Pending));

    let evicted = evict(&mut watcher, Whom::Pid(holder.pid()), false).unwrap();
    assert!(matches!(&evicted[..], [one] if one.member == member && one.leases == 3 && one.kill == Kill::NotAsked));
    let completions =
        [watcher.completion(), watcher.completion()].map(|(ticket, outcome, _)| (ticket, outcome.unwrap()));
    assert!(completions.contains(&(withdrawal, Answer::Withdrawn { notice: None })));
    assert!(
        completions.iter().any(|(_, answer)| matches!(answer, Answer::Build { .. })),
        "its claim goes to the member that waits"
    );
    assert!(matches!(watcher.open("owned").0, Err(Refusal::NotFound { .. })));
    let held = row(&mut watcher, member).unwrap();
    assert_eq!((held.state, held.leases), (MemberState::Evicted, 3));
    assert_eq!(evict(&mut watcher, Whom::Member(member), false).unwrap().len(), 1, "a second eviction does no harm");

    holder.kill();
    eventually("its death is proved", || watcher.state_of(MemberId(member)).is_none());
    assert_eq!(watcher.status().leases, 2, "`theirs`, and what it owned, in the hand of the watcher");
}

#[test]
fn evicted_member_is_refused_everything() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut victim = broker.client();
    let number = victim.welcome.member;
    let (_, lease) = victim.commit("mine", b"x", true);
    assert_eq!(victim.ask(open("never", true)), Ok(Answer::Pending));
    let ticket = victim.last;
    evict(&mut watcher, Whom::Member(number.0), false).unwrap();
    let pid = std::process::id();
    let is_evicted =
        |outcome: &Result<Answer, Refusal>| matches!(outcome, Err(Refusal::Evicted { by, .. }) if *by == pid);
    let (completed, outcome, _) = victim.completion();
    assert!(completed == ticket && is_evicted(&outcome), "{outcome:?}");
    for call in [Call::Ping, open("mine", false), Call::Release { lease }, Call::Status, Call::Stop { force: true }] {
        assert!(is_evicted(&victim.ask(call.clone())), "{call:?}");
    }
    let chunk = partywall_os::memfd::frozen("partywall:test", b"x").unwrap();
    let commit = Call::Commit(crate::common::host_commit("more", &[1]));
    assert!(is_evicted(&victim.ask_with(commit, &[&chunk]).0));
    assert_eq!(
        victim.ask(Call::UsesGpu { mps: Some("/pipe".into()) }),
        Ok(Answer::Done),
        "calls that make others safer are accepted"
    );

    // Its `Bye` proves nothing: the process lives, and was evicted.
    assert_eq!(victim.ask(Call::Bye), Ok(Answer::Done));
    assert!(victim.call.receive().is_none());
    assert_eq!(row(&mut watcher, number.0).map(|row| (row.state, row.leases)), Some((MemberState::Evicted, 1)));
    assert!(watcher.open("mine").0.is_ok(), "a kept name stays");
}

#[test]
fn evicting_another_process_than_meant_is_refused() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let own = std::process::id();
    assert_eq!(evict(&mut watcher, Whom::Pid(own), true), Err(Refusal::NotYourself));
    let number = watcher.welcome.member;
    assert_eq!(evict(&mut watcher, Whom::Member(number.0), true), Err(Refusal::NotYourself));
    // One digit is wrong.
    let digits = own.to_string();
    let typed = digits.replacen(digits.as_bytes()[0] as char, if digits.starts_with('9') { "8" } else { "9" }, 1);
    let typed: u32 = typed.parse().unwrap();
    let near = if digits.len() > 2 { vec![own] } else { Vec::new() };
    assert_eq!(
        evict(&mut watcher, Whom::Pid(typed), true),
        Err(Refusal::NoSuchMember { whom: Whom::Pid(typed), near })
    );
    let nobody = Whom::Member(99);
    assert_eq!(evict(&mut watcher, nobody, false), Err(Refusal::NoSuchMember { whom: nobody, near: Vec::new() }));
}

#[test]
fn members_are_listed_with_their_timelines_permits_and_heartbeats() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let user = User::open(&broker.socket, "permits", 5);
    let _first = user.acquire();
    let _second = user.acquire();
    let mut other = User::open(&broker.socket, "permits", 5);
    let _third = other.acquire();
    for (name, writer) in [("a", true), ("b", true), ("c", false)] {
        other.client.ask(Call::OpenTimeline { name: called(name), writer, shared: false }).unwrap();
    }
    let listed = watcher.members();
    let facts = |row: &MemberInfo| (row.leases, row.timelines, row.permits);
    assert_eq!(listed.iter().map(facts).collect::<Vec<_>>(), [(0, 0, Some(0)), (1, 0, Some(2)), (4, 2, Some(1))]);
    assert!(listed.iter().all(|row| row.quiet.is_some()));
    // No process sends heartbeats for these.
    eventually("they seem hung", || watcher.members().iter().all(|row| row.state == MemberState::Hung));
    assert!(watcher.members().iter().all(|row| row.quiet.is_some_and(|quiet| quiet > 2000)));
    let number = other.client.welcome.member;
    evict(&mut watcher, Whom::Member(number.0), false).unwrap();
    assert_eq!(watcher.state_of(number), Some(MemberState::Evicted), "an eviction outranks a late heartbeat");
}

#[test]
fn listing_counts_permits_up_to_a_bound() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut user = broker.client();
    for i in 0..20 {
        user.ask(Call::OpenSemaphore { name: called(&format!("{i}")), maximum: 65_536, shared: false }).unwrap();
    }
    let number = user.welcome.member;
    assert_eq!(row(&mut watcher, number.0).unwrap().permits, None);
}

// Holds 108.
#[test]
fn eviction_can_kill() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    watcher.commit("theirs", b"ours", true);
    let mut holder = roles::start("holder", &broker.socket);
    let member: u64 = holder.expect(SAYS).parse().unwrap();
    let evicted = evict(&mut watcher, Whom::Pid(holder.pid()), true).unwrap();
    assert_eq!(evicted.iter().map(|one| (one.member, one.kill)).collect::<Vec<_>>(), [(member, Kill::Sent)]);
    eventually("its death is proved", || watcher.state_of(MemberId(member)).is_none());
    assert_eq!(watcher.status().leases, 1);
    holder.kill();
}

// Holds 108.
#[test]
fn exited_process_is_not_killed_for_its_child() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut parent = roles::start("parent", &broker.socket);
    let member: u64 = parent.expect(SAYS).parse().unwrap();
    let child = roles::Orphan::of(&parent.expect(SAYS));
    parent.kill();
    eventually("the child is noticed", || watcher.state_of(MemberId(member)) == Some(MemberState::HeldByChild));
    let evicted = evict(&mut watcher, Whom::Pid(parent.pid()), true).unwrap();
    assert_eq!(evicted[0].kill, Kill::Exited);
    // The answer to a repeated request is the same.
    watcher.last = RequestId(watcher.last.0 - 1);
    let evicted = evict(&mut watcher, Whom::Pid(parent.pid()), true).unwrap();
    assert_eq!(evicted[0].kill, Kill::Exited);
    assert_eq!(watcher.state_of(MemberId(member)), Some(MemberState::HeldByChild));
    child.kill();
    eventually("both are gone", || watcher.state_of(MemberId(member)).is_none());
}

#[test]
fn under_mps_holdings_of_the_dead_are_quarantined() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let (mut holder, member) = under_mps(&broker, &mut watcher);
    assert_eq!(row(&mut watcher, member).map(|row| row.doubt), Some(Some(Doubt::Mps)));
    let lease = opened(watcher.open("owned").0).lease;
    assert_eq!(watcher.ask(Call::AwaitWithdrawal { lease }), Ok(Answer::Pending));
    let pid = holder.pid();
    assert!(matches!(free(&mut watcher, Some(pid)), Err(Refusal::NotUnproven { pid: of, .. }) if of == pid));

    holder.kill();
    let (_, outcome, _) = watcher.completion();
    assert_eq!(outcome, Ok(Answer::Withdrawn { notice: None }), "others are notified of the death all the same");
    assert_eq!(watcher.ask(Call::Release { lease }), Ok(Answer::Done));
    let dead = row(&mut watcher, member).unwrap();
    assert_eq!((dead.state, dead.leases, dead.bytes), (MemberState::Unproven, 3, 13));
    let status = watcher.status();
    assert_eq!((status.unproven, status.unproven_bytes, status.versions, status.leases), (1, 13, 3, 4));
    assert_eq!(evict(&mut watcher, Whom::Pid(pid), true), Err(Refusal::IsUnproven { pid }));
    let nobody = u32::MAX;
    assert_eq!(
        free(&mut watcher, Some(nobody)),
        Err(Refusal::NoSuchMember { whom: Whom::Pid(nobody), near: Vec::new() })
    );

    let freed = free(&mut watcher, Some(pid)).unwrap();
    assert!(matches!(&freed[..], [one] if one.member == member && (one.leases, one.bytes) == (3, 13)));
    eventually("its memory is closed", || watcher.state_of(MemberId(member)).is_none());
    let status = watcher.status();
    assert_eq!((status.unproven, status.unproven_bytes, status.versions, status.leases), (0, 0, 2, 1));
    assert_eq!(free(&mut watcher, None), Ok(Vec::new()));
}

// Holds 110.
#[test]
fn quarantine_takes_no_room_from_new_members() {
    let broker = TestBroker::with(|config| config.limits.clients = Some(2));
    let mut watcher = broker.client();
    for _ in 0..2 {
        let (mut holder, member) = under_mps(&broker, &mut watcher);
        holder.kill();
        eventually("it is unproven", || watcher.state_of(MemberId(member)) == Some(MemberState::Unproven));
    }
    let mut operator = broker.client();
    let refused = full(Limit::Clients, 2, 2);
    assert_eq!(shake_hands(&broker.socket, None).err(), Some(refused), "the living count");
    assert_eq!(free(&mut operator, None).unwrap().len(), 2);
}

#[test]
fn quarantine_ends_after_its_configured_time() {
    let broker = TestBroker::with(|config| config.unproven_after = Some(Duration::from_millis(100)));
    let mut watcher = broker.client();
    let (mut holder, member) = under_mps(&broker, &mut watcher);
    holder.kill();
    eventually("it has expired", || watcher.state_of(MemberId(member)).is_none());
    assert_eq!(watcher.status().leases, 1);
}

#[test]
fn goodbye_releases_leases_under_mps() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut member = broker.client();
    member.ask(Call::UsesGpu { mps: Some("/pipe".into()) }).unwrap();
    member.commit("mine", b"x", false);
    assert_eq!(member.ask(Call::Bye), Ok(Answer::Done));
    let status = watcher.status();
    assert_eq!((status.members, status.versions, status.unproven), (0, 0, 0));
}

#[test]
fn member_without_resources_leaves_nothing_in_doubt() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut idler = roles::start("idler under MPS", &broker.socket);
    let member: u64 = idler.expect(SAYS).parse().unwrap();
    idler.kill();
    eventually("it is forgotten", || watcher.state_of(MemberId(member)).is_none());
}

// Holds 109.
#[test]
fn process_with_lost_context_keeps_its_holdings_until_it_ends() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut faulty = roles::start("faulty", &broker.socket);
    let member: u64 = faulty.expect(SAYS).parse().unwrap();
    assert!(watcher.open("owned").0.is_ok());
    faulty.proceed();
    faulty.expect(SAYS);
    assert_eq!(row(&mut watcher, member).map(|row| (row.state, row.leases)), Some((MemberState::LostContext, 1)));
    assert!(matches!(watcher.open("owned").0, Err(Refusal::NotFound { .. })), "what it released is withdrawn");
    faulty.proceed();
    faulty.expect(SAYS);
    assert_eq!(row(&mut watcher, member).map(|row| row.leases), Some(1), "its `Bye` is no proof");
    faulty.kill();
    eventually("its death is proved", || watcher.state_of(MemberId(member)).is_none());
}
