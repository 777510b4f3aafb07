// Holds 36.
//! What belongs to which user.

use super::*;
use crate::registry::effect::Audited;

/// Two members of the broker's user, and two of another one.
fn two_users() -> (Watched, [MemberId; 2], [MemberId; 2]) {
    two_users_within(UNBOUNDED)
}

fn two_users_within(bounds: Bounds) -> (Watched, [MemberId; 2], [MemberId; 2]) {
    let mut w = Watched::new(bounds);
    let own = [MemberId(1), MemberId(2)];
    let guests = [MemberId(3), MemberId(4)];
    own.into_iter().for_each(|member| w.join(member));
    guests.into_iter().for_each(|member| w.join_as(member, GUEST));
    (w, own, guests)
}

fn other(what: OtherUsers, owner: u32, uid: u32) -> Refusal {
    Refusal::OtherUser { what, owner, uid }
}

fn named(name: &str) -> String {
    name.to_owned()
}

fn commit_as(w: &mut Watched, member: MemberId, name: &str, shared: bool) -> Outcome {
    let commit = Commit { shared, ..w.commit_call(name, false, true) };
    w.ask(member, commit).1
}

fn timeline_as(w: &mut Watched, member: MemberId, name: &str, writer: bool, shared: bool) -> Outcome {
    let open = Call::OpenTimeline { name: called(name), writer, shared };
    w.ask(member, open).1
}

fn semaphore_as(w: &mut Watched, member: MemberId, name: &str, shared: bool) -> Outcome {
    let open = Call::OpenSemaphore { name: called(name), maximum: 1, shared };
    w.ask(member, open).1
}

fn remove(w: &mut Watched, member: MemberId, name: &str) -> Outcome {
    w.ask(member, Call::Remove { name: called(name), deadline: None }).1
}

fn audited(effects: &[Effect]) -> Vec<&Audited> {
    effects.iter().filter_map(|effect| if let Effect::Audit(audited) = effect { Some(audited) } else { None }).collect()
}

#[test]
fn only_shared_names_are_opened_by_other_users() {
    let (mut w, [a, _], [b, c]) = two_users();
    commit_as(&mut w, b, "private", false).unwrap();
    commit_as(&mut w, b, "shared", true).unwrap();
    let open = OtherUsers::Open { name: named("private") };
    assert_eq!(w.open(a, "private", None, false), Err(other(open.clone(), GUEST, 0)));
    assert_eq!(w.open(a, "private", None, true), Err(other(open, GUEST, 0)), "waiting would not help");
    assert_eq!(w.opened(c, "private").uid, GUEST, "another process of the user");
    let opened = w.opened(a, "shared");
    assert_eq!((opened.uid, opened.facts.shared), (GUEST, true));
    // The next version need not be shared; the reader keeps its own.
    commit_as(&mut w, b, "shared", false).unwrap();
    let open = OtherUsers::Open { name: named("shared") };
    assert_eq!(w.open(a, "shared", None, false), Err(other(open.clone(), GUEST, 0)));
    assert_eq!(w.open(a, "shared", Some(7), false), Err(other(open, GUEST, 0)), "nor which versions there are");
    w.release(a, opened.lease);
}

#[test]
fn only_the_owner_replaces_and_removes() {
    let (mut w, [a, _], [b, c]) = two_users();
    for (owner, thief, uids) in [(a, b, (0, GUEST)), (b, a, (GUEST, 0))] {
        for (name, shared) in [("x", false), ("y", true)] {
            commit_as(&mut w, owner, name, shared).unwrap();
            let create = other(OtherUsers::Create { name: named(name) }, uids.0, uids.1);
            assert_eq!(commit_as(&mut w, thief, name, true), Err(create));
            let removal = other(OtherUsers::Remove { name: named(name) }, uids.0, uids.1);
            assert_eq!(remove(&mut w, thief, name), Err(removal));
            remove(&mut w, owner, name).unwrap();
        }
    }
    commit_as(&mut w, b, "x", false).unwrap();
    remove(&mut w, c, "x").unwrap();
    commit_as(&mut w, a, "x", false).expect("the name is free again");
}

#[test]
fn waiting_open_is_refused_when_the_name_becomes_private() {
    let (mut w, [a, _], [b, _]) = two_users();
    for name in ["x", "y"] {
        assert_eq!(w.open(a, name, None, true), Ok(Answer::Pending));
    }
    let commit = w.commit_call("x", false, true);
    let effects = w.ask(b, commit).2;
    let [(to, _, outcome)] = &notices(&effects)[..] else { panic!("{effects:?}") };
    let open = OtherUsers::Open { name: named("x") };
    assert_eq!((*to, outcome), (a, &Err(other(open, GUEST, 0))));
    let commit = Commit { shared: true, ..w.commit_call("y", false, true) };
    let effects = w.ask(b, commit).2;
    assert!(matches!(&notices(&effects)[..], [(_, _, Ok(Answer::Opened(_)))]), "{effects:?}");
}

#[test]
fn names_under_a_name_belong_to_its_user() {
    let (mut w, [a, _], [b, _]) = two_users();
    commit_as(&mut w, b, "m", true).unwrap();
    let create = || Err(other(OtherUsers::Create { name: named("m") }, GUEST, 0));
    assert_eq!(commit_as(&mut w, a, "m/x", false), create());
    assert_eq!(timeline_as(&mut w, a, "m/1/t", true, true), create());
    assert_eq!(semaphore_as(&mut w, a, "m/s", true), create());
    assert_eq!(w.ask(a, Call::OpenOrBuild { name: called("m/x") }).1, create());
    commit_as(&mut w, a, "mx", false).expect("another name");
    let lease = w.opened(a, "m").lease;
    assert_eq!(timeline_as(&mut w, a, "m/1/t", true, true), create(), "a reader of a segment needs no names");
    w.release(a, lease);

    // A publisher of a shared topic has a timeline under it, and nothing else.
    let memory = w.memory(&[8], false, true, Lifetime::Shared);
    let memory = w.with_control(&memory, control(2, Some(2)));
    let commit = Commit { shared: true, ..commit(called("t"), memory) };
    w.ask(b, commit).1.unwrap();
    let create = || Err(other(OtherUsers::Create { name: named("t") }, GUEST, 0));
    assert_eq!(timeline_as(&mut w, a, "t/1/publisher-1", true, true), create());
    w.opened(a, "t");
    timeline_as(&mut w, a, "t/1/publisher-1", true, true).unwrap();
    assert_eq!(semaphore_as(&mut w, a, "t/1/s", true), create());
}

#[test]
fn topic_is_not_created_above_timelines_of_another_user() {
    let (mut w, [a, b], [c, _]) = two_users();
    timeline_as(&mut w, c, "t/1/publisher-1", true, false).unwrap();
    let topic = |w: &mut Watched, member| {
        let memory = w.memory(&[8], false, true, Lifetime::Shared);
        let memory = w.with_control(&memory, control(2, Some(2)));
        w.ask(member, Asked::from(commit(called("t"), memory))).1
    };
    let create = OtherUsers::Create { name: named("t/1/publisher-1") };
    assert_eq!(topic(&mut w, a), Err(other(create, GUEST, 0)));
    topic(&mut w, c).unwrap();
    let open = OtherUsers::Open { name: named("t") };
    assert_eq!(w.open(b, "t", None, false), Err(other(open, GUEST, 0)));
}

#[test]
fn objects_are_opened_by_others_only_if_shared() {
    let (mut w, [a, _], [b, _]) = two_users();
    timeline_as(&mut w, b, "t", true, false).unwrap();
    semaphore_as(&mut w, b, "t", false).unwrap();
    let open = || Err(other(OtherUsers::Open { name: named("t") }, GUEST, 0));
    assert_eq!(timeline_as(&mut w, a, "t", false, true), open());
    assert_eq!(semaphore_as(&mut w, a, "t", true), open());
    let abandon = OtherUsers::Abandon { name: named("t") };
    assert_eq!(w.ask(a, Call::AbandonTimeline { name: called("t") }).1, Err(other(abandon, GUEST, 0)));
    timeline_as(&mut w, b, "u", true, true).unwrap();
    semaphore_as(&mut w, b, "u", true).unwrap();
    timeline_as(&mut w, a, "u", false, false).unwrap();
    semaphore_as(&mut w, a, "u", false).unwrap();
    let abandon = OtherUsers::Abandon { name: named("u") };
    assert_eq!(w.ask(a, Call::AbandonTimeline { name: called("u") }).1, Err(other(abandon, GUEST, 0)));
}

// Holds 149.
#[test]
fn slab_is_shared_by_timelines_of_one_user_alone() {
    let (mut w, [a, b], [c, _]) = two_users();
    let slab = |w: &mut Watched, member, name: &str, shared| match timeline_as(w, member, name, false, shared) {
        Ok(Answer::Timeline(opened)) => opened.slab,
        other => panic!("{other:?}"),
    };
    let own = slab(&mut w, a, "a", false);
    assert_eq!(slab(&mut w, b, "b", false), own);
    let theirs = slab(&mut w, c, "c", false);
    let shared = slab(&mut w, a, "s", true);
    let other = slab(&mut w, a, "t", true);
    assert_eq!(BTreeSet::from([own, theirs, shared, other]).len(), 4);
    assert_eq!(slab(&mut w, c, "s", false), shared);
}

// Holds 149.
#[test]
fn slab_of_a_shared_timeline_is_closed_with_its_last_user() {
    let (mut w, [a, _], [b, _]) = two_users();
    let opened = |outcome| match outcome {
        Ok(Answer::Timeline(opened)) => (opened.lease, opened.slab),
        other => panic!("{other:?}"),
    };
    let (writer, slab) = opened(timeline_as(&mut w, a, "s", true, true));
    let (reader, _) = opened(timeline_as(&mut w, b, "s", false, false));
    let memory = w.registry.objects.cells.slab(slab).unwrap();
    assert_eq!(closed(&w.release(a, writer)), []);
    assert_eq!(closed(&w.release(b, reader)), [], "a stream of its writer may still store in it");
    let at = w.registry.objects.cells.guarded()[0].at;
    assert_eq!(closed(&w.apply(Event::CellSettled { at })), [memory]);
    assert_eq!(w.registry.objects.cells.slab(slab), None);
    let (lease, next) = opened(timeline_as(&mut w, a, "s", false, true));
    assert_ne!(next, slab, "no number is used twice");
    assert_eq!(closed(&w.release(a, lease)).len(), 1);
}

#[test]
fn listings_show_own_and_shared_names_and_everything_to_the_brokers_user() {
    let (mut w, [a, _], [b, _]) = two_users();
    commit_as(&mut w, a, "a-private", false).unwrap();
    commit_as(&mut w, a, "a-shared", true).unwrap();
    commit_as(&mut w, b, "b-private", false).unwrap();
    timeline_as(&mut w, a, "a-private", true, false).unwrap();
    timeline_as(&mut w, a, "a-shared", true, true).unwrap();
    semaphore_as(&mut w, b, "b-private", false).unwrap();
    let names = |w: &mut Watched, member| {
        let Ok(Answer::Names { names, .. }) = w.ask(member, Call::List { after: None }).1 else { panic!("no names") };
        names.iter().map(|row| row.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&mut w, a), ["a-private", "a-shared", "b-private"]);
    assert_eq!(names(&mut w, b), ["a-shared", "b-private"]);
    let objects = |w: &mut Watched, member| {
        let Ok(Answer::Objects { objects, .. }) = w.ask(member, Call::Objects { after: None }).1 else { panic!() };
        objects.iter().map(|row| row.name().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(objects(&mut w, b), ["a-shared", "b-private"]);
    let members = |w: &mut Watched, member| {
        let Ok(Answer::Members { members, .. }) = w.ask(member, Call::Members { after: None }).1 else { panic!() };
        members.iter().map(|row| row.uid).collect::<Vec<_>>()
    };
    assert_eq!(members(&mut w, a), [0, 0, GUEST, GUEST]);
    assert_eq!(members(&mut w, b), [GUEST, GUEST]);
    let name = called("a-private");
    let inspect = || Err(other(OtherUsers::Inspect { name: named("a-private") }, 0, GUEST));
    assert_eq!(w.ask(b, Call::Inspect { name: name.clone(), version: None }).1, inspect());
    let timeline = Call::InspectObject { kind: ObjectKind::Timeline, name };
    assert_eq!(w.ask(b, timeline).1, inspect());
    let Ok(Answer::Status(counts)) = w.ask(b, Call::Status).1 else { panic!() };
    assert_eq!(counts.largest.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["a-shared", "b-private"]);
    assert_eq!(
        counts.users.iter().map(|user| (user.uid, user.names, user.members)).collect::<Vec<_>>(),
        [(GUEST, 2, 1)]
    );
    let Err(Refusal::NotFound { near, .. }) = w.open(b, "a-privatf", None, false) else { panic!() };
    assert!(!near.contains(&called("a-private")), "a name of another user is not suggested: {near:?}");
}

#[test]
fn watchers_see_own_and_shared_names() {
    let (mut w, [a, _], [b, _]) = two_users();
    commit_as(&mut w, a, "private", false).unwrap();
    commit_as(&mut w, a, "shared", true).unwrap();
    let watch = |after| Call::Watch { pattern: "*".into(), after };
    let after = point(0);
    for (member, expected) in [(a, vec!["private", "private", "shared", "shared"]), (b, vec!["shared", "shared"])] {
        let Ok(Answer::Happened(happened)) = w.ask(member, watch(after)).1 else { panic!() };
        assert_eq!(happened.events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn members_of_others_are_evicted_and_freed_by_the_brokers_user_alone() {
    let (mut w, [a, _], [b, c]) = two_users();
    let evict = |member| Call::Evict { whom: Whom::Pid(pid(member)), kill: false };
    assert_eq!(w.ask(b, evict(a)).1, Err(other(OtherUsers::Evict { pid: pid(a) }, 0, GUEST)));
    assert!(matches!(w.ask(b, evict(c)).1, Ok(Answer::Evicted { .. })));
    let (_, outcome, effects) = w.ask(a, evict(b));
    assert!(matches!(outcome, Ok(Answer::Evicted { .. })));
    let line = Audited::OtherUser {
        uid: 0,
        pid: pid(a),
        what: OtherUsers::Evict { pid: pid(b) },
        owner: GUEST,
        granted: true,
    };
    assert_eq!(audited(&effects), [&line]);

    let (mut w, [a, _], [b, _]) = two_users();
    let dead = MemberId(9);
    w.apply(Event::Joined { member: dead, identity: identity(dead, false, false) });
    commit_as(&mut w, dead, "x", false).unwrap();
    w.apply(Event::Died { member: dead });
    let free = |pid| Call::FreeUnproven { pid };
    assert_eq!(w.ask(b, free(Some(pid(dead)))).1, Err(other(OtherUsers::Free { pid: pid(dead) }, 0, GUEST)));
    let Ok(Answer::Freed { members, .. }) = w.ask(b, free(None)).1 else { panic!() };
    assert!(members.is_empty());
    let Ok(Answer::Freed { members, .. }) = w.ask(a, free(None)).1 else { panic!() };
    assert_eq!(members.len(), 1);
}

#[test]
fn broker_is_stopped_by_its_user_alone() {
    let (mut w, [a, _], [b, _]) = two_users();
    for force in [false, true] {
        assert_eq!(w.ask(b, Call::Stop { force }).1, Err(other(OtherUsers::Stop, 0, GUEST)));
    }
    assert_eq!(w.ask(a, Call::Stop { force: true }).1, Ok(Answer::Done));
}

#[test]
fn withdrawal_does_not_evict_readers_of_other_users() {
    use crate::registry::types::{Deadline, Refusal, Then};
    let (mut w, [a, a2], [b, _]) = two_users();
    commit_as(&mut w, a, "x", true).unwrap();
    let own = w.opened(a2, "x").lease;
    let theirs = w.opened(b, "x").lease;
    let deadline = Some(Deadline { after: 5, then: Then::Evict });
    let effects = w.ask(a, Call::Remove { name: called("x"), deadline }).2;
    let id =
        effects.iter().find_map(|effect| if let Effect::AwaitDeadline { id, .. } = effect { Some(*id) } else { None });
    let effects = w.apply(Event::DeadlinePassed { id: id.unwrap() });
    let stale: Vec<_> =
        effects.iter().filter(|effect| matches!(effect, Effect::Stale { member, .. } if *member == b)).collect();
    assert_eq!(stale.len(), 1, "{effects:?}");
    assert_eq!(w.ask(b, Call::Ping).1, Ok(Answer::Done));
    assert!(matches!(w.ask(a2, Call::Ping).1, Err(Refusal::Evicted { .. })));
    w.release(b, theirs);
    let _ = own;
}

// Holds 150.
#[test]
fn each_user_has_a_share_of_leases_that_holds_after_a_restart() {
    let guests = Quota { leases: 3, ..NO_QUOTA };
    let (mut w, [a, _], [b, c]) = two_users_within(Bounds { guests, ..UNBOUNDED });
    let full = Refusal::Quota { uid: GUEST, limit: Limit::Leases, allowed: 3, held: 3, needed: 4, holders: Vec::new() };
    commit_as(&mut w, a, "x", true).unwrap();
    w.opened(b, "x");
    timeline_as(&mut w, c, "t", true, false).unwrap();
    semaphore_as(&mut w, c, "s", false).unwrap();
    for refused in [
        w.open(b, "x", None, false),
        commit_as(&mut w, b, "y", false),
        timeline_as(&mut w, b, "u", true, false),
        semaphore_as(&mut w, c, "v", false),
    ] {
        assert_eq!(refused, Err(full.clone()));
    }
    w.restart();
    assert_eq!(w.open(c, "x", None, false), Err(full.clone()));
    w.opened(a, "x");
    let Answer::Status(counts) = w.ask(b, Call::Status).1.unwrap() else { panic!() };
    let [user] = &counts.users[..] else { panic!("{counts:?}") };
    assert_eq!((user.uid, user.leases, user.limits.leases), (GUEST, 3, 3));

    // A request that waits is granted a lease later, and refused then.
    assert_eq!(w.open(b, "later", None, true), Ok(Answer::Pending));
    let commit = Commit { shared: true, ..w.commit_call("later", false, true) };
    let (_, _, effects) = w.ask(a, commit);
    let refused = |effect: &Effect| matches!(effect, Effect::Notify { outcome: Err(refused), .. } if *refused == full);
    assert!(effects.iter().any(refused), "{effects:?}");

    let leases: Vec<_> = w.registry.people.members()[&b].version_leases.iter().copied().collect();
    for lease in leases {
        w.release(b, lease);
    }
    w.opened(c, "x");
}

// Holds 150.
#[test]
fn each_user_has_a_share_of_waits_timelines_and_semaphores_that_holds_after_a_restart() {
    let guests = Quota { waits: 2, timelines: 1, semaphores: 1, ..NO_QUOTA };
    let (mut w, [a, _], [b, c]) = two_users_within(Bounds { guests, ..UNBOUNDED });
    let full = |limit, allowed| {
        Err(Refusal::Quota { uid: GUEST, limit, allowed, held: allowed, needed: allowed + 1, holders: Vec::new() })
    };
    let watch = || {
        let after = point(0);
        Call::Watch { pattern: "*".into(), after }
    };
    assert_eq!(w.open(b, "x", None, true), Ok(Answer::Pending));
    assert_eq!(w.ask(c, watch()).1, Ok(Answer::Pending));
    for _ in 0..2 {
        assert_eq!(w.open(c, "x", None, true), full(Limit::Waits, 2));
        assert_eq!(w.ask(b, watch()).1, full(Limit::Waits, 2));
        assert_eq!(w.open(a, "x", None, true), Ok(Answer::Pending), "the broker's user");
        w.restart();
    }
    // A wait that ends makes room, however it ends.
    w.apply(Event::Suspected { member: b });
    assert_eq!(w.open(c, "x", None, true), Ok(Answer::Pending));
    assert_eq!(w.open(c, "y", None, true), full(Limit::Waits, 2));
    commit_as(&mut w, a, "x", true).unwrap();
    let Answer::Status(counts) = w.ask(c, Call::Status).1.unwrap() else { panic!() };
    assert_eq!((counts.users[0].waits, counts.users[0].limits.waits), (0, 2));

    timeline_as(&mut w, c, "t", true, false).unwrap();
    semaphore_as(&mut w, c, "s", false).unwrap();
    for _ in 0..2 {
        assert_eq!(timeline_as(&mut w, c, "t2", true, false), full(Limit::Timelines, 1));
        assert_eq!(semaphore_as(&mut w, c, "s2", false), full(Limit::Semaphores, 1));
        w.restart();
    }
    timeline_as(&mut w, c, "t", false, false).expect("it exists");
    let Answer::Status(counts) = w.ask(c, Call::Status).1.unwrap() else { panic!() };
    assert_eq!((counts.users[0].timelines, counts.users[0].semaphores), (1, 1));
    timeline_as(&mut w, a, "t2", true, false).unwrap();
    semaphore_as(&mut w, a, "s2", false).unwrap();
}

// Holds 150.
#[test]
fn each_user_has_quotas_that_hold_after_a_restart() {
    let guests = Quota { members: 2, names: 2, fds: 3, bytes: 35, ..NO_QUOTA };
    let (mut w, [a, _], [b, c]) = two_users_within(Bounds { guests, ..UNBOUNDED });
    let quota =
        |limit, allowed, held, needed| Refusal::Quota { uid: GUEST, limit, allowed, held, needed, holders: Vec::new() };
    assert_eq!(w.registry.people.check_room(GUEST), Err(quota(Limit::Clients, 2, 2, 3)));
    assert!(w.registry.people.check_room(0).is_ok());
    commit_as(&mut w, b, "x", false).unwrap();
    timeline_as(&mut w, c, "t", true, false).unwrap();
    w.restart();
    for refused in [
        commit_as(&mut w, b, "y", false),
        timeline_as(&mut w, c, "y", true, false),
        semaphore_as(&mut w, b, "y", false),
        w.ask(c, Call::OpenOrBuild { name: called("y") }).1,
    ] {
        assert_eq!(refused, Err(quota(Limit::Names, 2, 2, 3)));
    }
    // 10 bytes and a slab of 5; then 20 and 5: the first version is charged to its creator as long as a lease keeps it.
    commit_as(&mut w, b, "x", false).unwrap();
    assert_eq!(commit_as(&mut w, b, "x", false), Err(quota(Limit::Fds, 3, 3, 4)));
    w.restart();
    assert_eq!(commit_as(&mut w, b, "x", false), Err(quota(Limit::Fds, 3, 3, 4)));
    commit_as(&mut w, a, "y", false).expect("the broker's user has other limits");
    remove(&mut w, b, "x").unwrap();
    let leases: Vec<_> = w.registry.people.members()[&b].version_leases.iter().copied().collect();
    for lease in leases {
        w.release(b, lease);
    }
    let memory = w.memory(&[31], false, false, Lifetime::Kept);
    let (_, outcome, effects) = w.ask(b, Asked::from(commit(called("x"), memory)));
    assert_eq!(outcome, Err(quota(Limit::Bytes, 35, 5, 36)));
    let line = Audited::Quota { uid: GUEST, pid: pid(b), limit: Limit::Bytes, allowed: 35, needed: 36 };
    assert_eq!(audited(&effects), [&line]);
}

#[test]
fn claims_count_as_names_until_they_become_names() {
    let guests = Quota { names: 1, ..NO_QUOTA };
    let (mut w, _, [b, c]) = two_users_within(Bounds { guests, ..UNBOUNDED });
    let claim = w.claim(b, "x");
    let build = |w: &mut Watched| w.ask(c, Call::OpenOrBuild { name: called("y") }).1;
    assert!(matches!(build(&mut w), Err(Refusal::Quota { .. })));
    let commit = Commit { claim: Some(claim), ..w.commit_call("x", false, true) };
    assert!(w.ask(b, commit).1.is_ok());
    assert!(matches!(build(&mut w), Err(Refusal::Quota { .. })));
    remove(&mut w, b, "x").unwrap();
    assert!(matches!(build(&mut w), Ok(Answer::Build { .. })));
}

#[test]
fn claim_is_handed_on_to_a_user_that_may_have_the_name() {
    let guests = Quota { names: 1, ..NO_QUOTA };
    let (mut w, [first, last], [b, c]) = two_users_within(Bounds { guests, ..UNBOUNDED });
    let claim = w.claim(first, "x/y");
    for member in [b, c, last] {
        let waits = w.ask(member, Call::OpenOrBuild { name: called("x/y") }).1;
        assert_eq!(waits, Ok(Answer::Pending));
    }
    commit_as(&mut w, b, "z", false).unwrap();
    let effects = w.ask(first, Call::AbandonBuild { claim }).2;
    let full = Refusal::Quota { uid: GUEST, limit: Limit::Names, allowed: 1, held: 1, needed: 2, holders: Vec::new() };
    let [(to_b, _, of_b), (to_c, _, of_c), (to_last, _, Ok(Answer::Build { claim }))] = &notices(&effects)[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((*to_b, of_b, *to_c, of_c, *to_last), (b, &Err(full.clone()), c, &Err(full), last));

    // The name above has become another user's meanwhile.
    let claim = *claim;
    remove(&mut w, b, "z").unwrap();
    assert_eq!(w.ask(b, Call::OpenOrBuild { name: called("x/y") }).1, Ok(Answer::Pending));
    commit_as(&mut w, first, "x", true).unwrap();
    let effects = w.ask(last, Call::AbandonBuild { claim }).2;
    let above = other(OtherUsers::Create { name: named("x") }, 0, GUEST);
    assert!(matches!(&notices(&effects)[..], [(to, _, Err(refused))] if *to == b && *refused == above), "{effects:?}");
}

// Holds 153.
#[test]
fn grants_and_refusals_across_users_are_audited() {
    let (mut w, [a, _], [b, _]) = two_users();
    commit_as(&mut w, a, "x", true).unwrap();
    let open = |name: &str| Call::Open(Open { name: called(name), version: None, access: Access::Read, wait: false });
    let line = |what, granted| Audited::OtherUser { uid: GUEST, pid: pid(b), what, owner: 0, granted };
    let (_, _, effects) = w.ask(b, open("x"));
    assert_eq!(audited(&effects), [&line(OtherUsers::Open { name: named("x") }, true)]);
    let (_, _, effects) = w.ask(a, open("x"));
    assert_eq!(audited(&effects), [] as [&Audited; 0], "its own");
    assert_eq!(w.open(b, "y", None, true), Ok(Answer::Pending));
    let commit = Commit { shared: true, ..w.commit_call("y", false, true) };
    let (_, _, effects) = w.ask(a, commit);
    assert_eq!(audited(&effects), [&line(OtherUsers::Open { name: named("y") }, true)], "it has waited for that");
    let (_, _, effects) = w.ask(b, Call::Remove { name: called("x"), deadline: None });
    assert_eq!(audited(&effects), [&line(OtherUsers::Remove { name: named("x") }, false)]);
}

#[test]
fn each_user_runs_on_one_driver() {
    let mut w = Watched::new(UNBOUNDED);
    let real = MemberId(1);
    let simulated = MemberId(2);
    w.join(real);
    assert!(!w.registry.admits(0, true) && w.registry.admits(GUEST, true));
    let identity = Identity { uid: GUEST, ..identity(simulated, true, true) };
    w.apply(Event::Joined { member: simulated, identity });
    assert!(!w.registry.admits(GUEST, false) && w.registry.admits(0, false), "it decides nothing for others");
    let memory = w.memory_of(Kind::Vmm, &[1], false, false, Lifetime::Kept);
    let commit = Commit { shared: true, ..commit(called("x"), memory) };
    assert!(w.ask(simulated, commit).1.is_ok());
    assert_eq!(w.open(real, "x", None, false), Err(Refusal::OtherDriver { simulated: true }));
}
