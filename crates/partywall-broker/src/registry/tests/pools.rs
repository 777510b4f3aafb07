//! The rules of pools and topics, one by one.

use super::*;

fn commit_call(w: &mut Watched, name: &str, control: Control, lifetime: Lifetime) -> Commit {
    let memory = w.memory(&[10], false, true, lifetime);
    let memory = w.with_control(&memory, control);
    commit(called(name), memory)
}

fn create(w: &mut Watched, member: MemberId, name: &str, control: Control) -> LeaseId {
    let call = commit_call(w, name, control, Lifetime::Shared);
    match w.ask(member, call).1 {
        Ok(Answer::Committed { version: 1, lease }) => lease,
        other => panic!("{other:?}"),
    }
}

fn pool() -> Control {
    control(3, None)
}

fn topic() -> Control {
    control(4, Some(2))
}

/// Returns the effects on control memory, in order.
fn in_control(effects: &[Effect]) -> Vec<&Effect> {
    let is_there =
        |effect: &&Effect| matches!(effect, Effect::Return { .. } | Effect::Detach { .. } | Effect::ClearRow { .. });
    effects.iter().filter(is_there).collect()
}

#[test]
fn shared_name_ends_with_its_last_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    let made = create(&mut w, a, "p", pool());
    let first = w.opened(b, "p");
    let second = w.opened(b, "p");
    assert_eq!(closed(&w.release(a, made)), []);
    assert_eq!(closed(&w.release(b, first.lease)), []);
    assert_eq!(w.opened(a, "p").version, 1, "it is still there");
    assert_eq!(closed(&w.apply(Event::Died { member: a })), []);
    let effects = w.release(b, second.lease);
    assert_eq!(
        (closed(&effects), in_control(&effects)),
        (second.memory.fds(), vec![]),
        "no holder is left to return blocks to"
    );
    assert_eq!(second.memory.fds().len(), 2, "the chunk's and the control memory's");
    assert!(matches!(w.open(b, "p", None, false), Err(Refusal::NotFound { .. })));
}

#[test]
fn blocks_return_with_a_members_last_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    create(&mut w, a, "p", pool());
    let first = w.opened(b, "p");
    let second = w.opened(b, "p");
    assert_eq!(in_control(&w.release(b, first.lease)), [] as [&Effect; 0]);
    let table = second.memory.control.unwrap().slot_table();
    assert_eq!(in_control(&w.release(b, second.lease)), [&Effect::Return { control: table, row: 1 }]);

    let call = commit_call(&mut w, "kept", topic(), Lifetime::Kept);
    let Ok(Answer::Committed { lease, .. }) = w.ask(b, call).1 else { panic!("it is made") };
    let effects = w.release(b, lease);
    assert!(matches!(in_control(&effects)[..], [Effect::Return { row: 1, .. }]), "it stays: {effects:?}");
}

// Holds 190.
#[test]
fn departed_member_is_detached_at_once_and_returns_blocks_when_dead() {
    let (mut w, [a, b, c]) = Watched::with_members();
    create(&mut w, a, "p", pool());
    create(&mut w, a, "t", topic());
    let pool = w.opened(b, "p").memory.control.unwrap().slot_table();
    let topic = w.opened(b, "t").memory.control.unwrap().slot_table();
    let detach = |ending| Effect::Detach { object: topic, row: 1, ending };
    let faulted = w.ask(b, Call::ContextLost { gpu: None }).2;
    assert_eq!(in_control(&faulted), [&detach(TimelineEnding::OwnerFaulted)]);
    let lease = w.registry.people.members()[&b].version_leases.first().copied().unwrap();
    assert_eq!(in_control(&w.release(b, lease)), [] as [&Effect; 0], "only its end proves that its work is over");
    let evicted = w.ask(c, Call::Evict { whom: Whom::Member(b.0), kill: false }).2;
    assert_eq!(in_control(&evicted), [&detach(TimelineEnding::Evicted)]);
    let dead = w.apply(Event::Died { member: b });
    let cleared = Effect::ClearRow { row: 1, control: vec![pool, topic] };
    assert_eq!(in_control(&dead), [&detach(TimelineEnding::OwnerDied), &cleared]);

    w.opened(c, "t");
    let left = w.ask(c, Call::Bye).2;
    let closed = Effect::Detach { object: topic, row: 2, ending: TimelineEnding::Closed };
    assert_eq!(in_control(&left), [&closed, &Effect::ClearRow { row: 2, control: vec![topic] }]);
}

// Holds 185.
#[test]
fn resources_of_unproven_members_stay_in_quarantine_and_keep_the_name() {
    let (mut w, [a]) = Watched::with_members();
    let b = MemberId(9);
    w.apply(Event::Joined { member: b, identity: identity(b, false, false) });
    create(&mut w, b, "t", topic());
    let effects = w.apply(Event::Died { member: b });
    assert!(
        matches!(in_control(&effects)[..], [Effect::Detach { ending: TimelineEnding::OwnerDied, .. }]),
        "{effects:?}"
    );
    let opened = w.opened(a, "t");
    let effects = w.ask(a, Call::FreeUnproven { pid: None }).2;
    let table = opened.memory.control.unwrap().slot_table();
    assert_eq!(in_control(&effects), [&Effect::ClearRow { row: 1, control: vec![table] }]);
    assert_eq!(w.opened(a, "t").version, 1);
}

#[test]
fn pools_and_segments_share_one_namespace() {
    let (mut w, [a, b]) = Watched::with_members();
    let lease = create(&mut w, a, "p", pool());
    let taken = |name, is| Err(Refusal::NameExists { name: called(name), version: 1, is });
    let call = commit_call(&mut w, "p", topic(), Lifetime::Shared);
    let (_, outcome, effects) = w.ask(b, call);
    assert_eq!(
        (outcome, closed(&effects).len()),
        (taken("p", Named::Pool), 3),
        "its memory and its control memory are dropped"
    );
    let segment = w.commit_call("p", false, true);
    assert_eq!(w.ask(b, segment).1, taken("p", Named::Pool));
    w.commit(b, "s", true);
    let call = commit_call(&mut w, "s", pool(), Lifetime::Shared);
    assert_eq!(w.ask(a, call).1, taken("s", Named::Segment));

    let fixed = Refusal::CannotGrow { name: called("p"), version: 1, why: NoGrowth::Fixed };
    assert_eq!(w.grow(a, lease, 0, &[1]).0, Err(fixed));
    let _ = w.ask(b, Call::Remove { name: called("p"), deadline: None });
    assert_eq!(w.commit(b, "p", false).0, 2, "a member that has the pool open keeps it, and the name is free");
}

#[test]
fn pool_fulfils_a_claim_and_waiters_get_its_control_memory() {
    let (mut w, [a, b]) = Watched::with_members();
    let claim = w.claim(a, "p");
    let (ticket, outcome, _) = w.ask(b, Call::OpenOrBuild { name: called("p") });
    assert_eq!(outcome, Ok(Answer::Pending));
    let call = commit_call(&mut w, "p", topic(), Lifetime::Shared);
    let effects = w.ask(a, Asked::from(Commit { claim: Some(claim), ..call })).2;
    let [Effect::Notify { member, ticket: completed, outcome: Ok(Answer::Opened(opened)), fds }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((*member, *completed, fds), (b, ticket, &w.seen(opened.clone()).memory.fds()));
    assert_eq!(fds.len(), 3);
}

#[test]
fn watchers_learn_the_kind_of_a_name() {
    let (mut w, [a, b]) = Watched::with_members();
    let lease = create(&mut w, a, "p", pool());
    create(&mut w, a, "t", topic());
    w.release(a, lease);
    w.close_all();
    let watch = Call::Watch { pattern: "*".into(), after: point(0) };
    let Ok(Answer::Happened(happened)) = w.ask(b, watch).1 else { panic!("something has happened") };
    let changes: Vec<_> = happened.events.iter().map(|event| (event.named, event.change)).collect();
    let created = Change::Created { pid: 101 };
    let withdrawn = Change::Withdrawn { pid: 101 };
    let committed = Change::Committed { version: 1, bytes: 10, pid: 101 };
    let expected = [
        (Named::Pool, created),
        (Named::Pool, committed),
        (Named::Topic, created),
        (Named::Topic, committed),
        (Named::Pool, withdrawn),
        (Named::Pool, Change::Reclaimed { version: 1, bytes: 10 }),
    ];
    assert_eq!(changes, expected);
}
