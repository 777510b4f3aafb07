//! One test per rule.

use super::*;
use crate::registry::{
    effect::{Handle, Refused},
    tombstones::{REMEMBERED, Tombstone},
    users::Owned,
};

fn name(name: &str) -> Name {
    Name::new(name)
}

fn stale(handle: Handle) -> Outcome {
    Err(Refused::Stale(handle))
}

fn not_found(outcome: Outcome) -> bool {
    matches!(outcome, Err(Refused::NotFound { .. }))
}

#[test]
fn versions_count_from_one_while_any_exists() {
    let (mut w, [a, b]) = Watched::with_members();
    assert_eq!(w.commit(a, "x", true).0, 1);
    let held = w.opened(b, "x");
    assert_eq!(w.commit(a, "x", true).0, 2);
    // Version 2 is gone, but version 1 is still held, so numbers continue.
    let _ = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    assert_eq!(w.commit(a, "x", true).0, 3);
    let _ = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    let leases: Vec<_> = w.registry.members[&a].version_leases.iter().copied().collect();
    leases.into_iter().for_each(|lease| drop(w.release(a, lease)));
    w.release(b, held.lease);
    assert_eq!(w.commit(a, "x", true).0, 1, "nothing was left of it");
}

#[test]
fn held_old_version_stays() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, first) = w.commit(a, "x", true);
    let held = w.opened(b, "x");
    w.commit(a, "x", true);
    assert_eq!(w.opened(b, "x").version, 2);
    assert_eq!(closed(&w.release(a, first)), [], "b holds it");
    let Ok(Answer::Opened(again)) = w.open(b, "x", Some(1), false) else { panic!("x@1 is there") };
    assert_eq!(closed(&w.release(b, held.lease)), []);
    assert_eq!(closed(&w.release(b, again.lease)), again.memory.fds());
    let gone = Refused::VersionNotFound { name: name("x"), version: 1, latest: Some(2) };
    assert_eq!(w.open(b, "x", Some(1), true), Err(gone), "waiting for it would be in vain");
}

#[test]
fn owned_name_ends_with_its_owners_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, lease) = w.commit(a, "x", false);
    let held = w.opened(b, "x");
    w.release(a, lease);
    assert!(not_found(w.open(b, "x", None, false)));
    assert_eq!(ended(w.open(b, "x", Some(1), false)).ending, Ending::Withdrawn);
    assert_eq!(closed(&w.release(b, held.lease)), held.memory.fds());
}

#[test]
fn kept_name_outlives_its_committer() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", true);
    assert_eq!(closed(&w.apply(Event::Died { member: a })), []);
    assert_eq!(w.opened(b, "x").version, 1);
}

#[test]
fn owner_of_superseded_version_does_not_end_the_name() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let (_, first) = w.commit(a, "x", false);
    let (_, second) = w.commit(b, "x", false);
    let held = w.opened(c, "x");
    w.release(a, first);
    assert_eq!(w.opened(c, "x").version, held.version);
    w.commit(a, "x", true);
    w.release(b, second);
    assert_eq!(w.opened(c, "x").version, 3);

    let (mut w, [a, b, c]) = Watched::with_members();
    w.commit(a, "x", true);
    w.commit(b, "x", false);
    w.apply(Event::Died { member: b });
    assert!(not_found(w.open(c, "x", None, false)), "version 1 does not come back");
}

#[test]
fn writing_needs_a_mutable_version() {
    let (mut w, [a]) = Watched::with_members();
    w.commit(a, "x", true);
    let write = |n: &str, wait| Call::Open(Open { name: name(n), version: None, access: Access::Write, wait });
    assert_eq!(w.ask(a, write("x", false)).1, Err(Refused::ReadOnly { name: name("x"), version: 1 }));
    let mutable = w.commit_call("y", true, true);
    let _ = w.ask(a, Call::Commit(mutable)).1.unwrap();
    assert!(matches!(w.ask(a, write("y", false)).1, Ok(Answer::Opened(_))));
    // The same holds for members that waited.
    let (ticket, ..) = w.ask(a, write("z", true));
    let frozen = w.commit_call("z", false, true);
    let (.., effects) = w.ask(a, Call::Commit(frozen));
    assert_eq!(notices(&effects), [(a, ticket, Err(Refused::ReadOnly { name: name("z"), version: 1 }))]);
}

#[test]
fn commit_grants_every_waiter_in_one_step() {
    let (mut w, [a, b, c]) = Watched::with_members();
    assert_eq!(w.open(b, "x", None, true), Ok(Answer::Pending));
    assert_eq!(w.open(c, "x", Some(1), true), Ok(Answer::Pending));
    assert_eq!(w.open(c, "x", Some(2), true), Ok(Answer::Pending));
    let commit = w.commit_call("x", false, false);
    let (.., effects) = w.ask(a, Call::Commit(commit));
    let granted = notices(&effects);
    assert_eq!(granted.len(), 2);
    assert!(granted.iter().all(|(.., o)| matches!(o, Ok(Answer::Opened(opened)) if opened.version == 1)));
    assert_eq!(closed(&w.apply(Event::Died { member: a })), [], "both hold it");
    assert_eq!(w.pending.len(), 1, "version 2 may still come");
}

#[test]
fn one_member_builds_and_the_others_open_its_version() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let claim = w.claim(a, "x");
    assert_eq!(w.ask(b, Call::OpenOrBuild { name: name("x") }).1, Ok(Answer::Pending));
    let foreign = Commit { claim: Some(claim), ..w.commit_call("x", false, true) };
    assert_eq!(w.ask(c, Call::Commit(foreign)).1, stale(Handle::Claim));
    let other_name = Commit { claim: Some(claim), ..w.commit_call("y", false, true) };
    assert_eq!(w.ask(a, Call::Commit(other_name)).1, stale(Handle::Claim));
    let commit = Commit { claim: Some(claim), ..w.commit_call("x", false, true) };
    let (_, outcome, effects) = w.ask(a, Call::Commit(commit.clone()));
    assert!(outcome.is_ok());
    assert!(matches!(notices(&effects)[..], [(to, _, Ok(Answer::Opened(_)))] if to == b));
    assert!(matches!(w.ask(c, Call::OpenOrBuild { name: name("x") }).1, Ok(Answer::Opened(_))));
    assert_eq!(w.ask(a, Call::AbandonBuild { claim }).1, stale(Handle::Claim), "it is fulfilled");
}

#[test]
fn any_commit_serves_waiters_for_the_builder() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let claim = w.claim(a, "x");
    let _ = w.ask(b, Call::OpenOrBuild { name: name("x") });
    let commit = w.commit_call("x", false, true);
    let (.., effects) = w.ask(c, Call::Commit(commit));
    assert_eq!(notices(&effects).len(), 1);
    assert_eq!(w.ask(a, Call::AbandonBuild { claim }).1, Ok(Answer::Done), "the claim was still the builder's");
}

#[test]
fn one_waiter_succeeds_a_builder_that_abandons_or_dies() {
    let (mut w, [a, b, c, d]) = Watched::with_members();
    let claim = w.claim(a, "x");
    let wait = |w: &mut Watched, m| w.ask(m, Call::OpenOrBuild { name: name("x") }).0;
    let first = wait(&mut w, b);
    let second = wait(&mut w, c);
    wait(&mut w, d);
    let (.., effects) = w.ask(a, Call::AbandonBuild { claim });
    let next = notices(&effects);
    assert!(matches!(next[..], [(to, of, Ok(Answer::Build { .. }))] if to == b && of == first));
    let next = notices(&w.apply(Event::Died { member: b }));
    assert!(matches!(next[..], [(to, of, Ok(Answer::Build { .. }))] if to == c && of == second));
    let next = notices(&w.apply(Event::HeldByChild { member: c }));
    assert!(matches!(next[..], [(to, _, Ok(Answer::Build { .. }))] if to == d));
}

#[test]
fn suspect_builder_keeps_its_claim() {
    let (mut w, [a, b]) = Watched::with_members();
    let claim = w.claim(a, "x");
    let _ = w.ask(b, Call::OpenOrBuild { name: name("x") });
    assert_eq!(w.apply(Event::Suspected { member: a }), []);
    w.apply(Event::Resumed { member: a });
    let commit = Commit { claim: Some(claim), ..w.commit_call("x", false, true) };
    assert!(w.ask(a, Call::Commit(commit)).1.is_ok());
}

#[test]
fn if_absent_refuses_an_existing_name() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", false);
    let commit = Commit { if_absent: true, ..w.commit_call("x", false, false) };
    let fds = commit.memory.fds();
    let (_, outcome, effects) = w.ask(b, Call::Commit(commit));
    assert_eq!(outcome, Err(Refused::NameExists { name: name("x"), version: 1 }));
    assert_eq!(closed(&effects), fds);
    w.apply(Event::Died { member: a });
    let commit = Commit { if_absent: true, ..w.commit_call("x", false, false) };
    assert!(w.ask(b, Call::Commit(commit)).1.is_ok(), "a withdrawn name does not exist");
}

#[test]
fn ticket_ends_once() {
    let (mut w, [a, b]) = Watched::with_members();
    let open = Call::Open(Open { name: name("x"), version: None, access: Access::Read, wait: true });
    let (ticket, ..) = w.ask(a, open.clone());
    assert_eq!(w.ask(b, Call::Cancel { ticket }).1, stale(Handle::Ticket), "not theirs");
    assert_eq!(w.ask(a, Call::Cancel { ticket }).1, Ok(Answer::Done));
    assert_eq!(w.ask(a, Call::Cancel { ticket }).1, stale(Handle::Ticket));
    let (ticket, ..) = w.ask(a, open);
    w.commit(b, "x", true);
    assert_eq!(w.ask(a, Call::Cancel { ticket }).1, stale(Handle::Ticket), "its answer is on the way");
    assert!(w.registry.entries[&name("x")].waits.is_empty());
}

#[test]
fn withdrawal_notifies_holders_of_every_version() {
    let (mut w, [a, b, c]) = Watched::with_members();
    w.commit(a, "x", true);
    let old = w.opened(b, "x").lease;
    w.commit(a, "x", true);
    let new = w.opened(c, "x").lease;
    let (first, outcome, _) = w.ask(b, Call::AwaitWithdrawal { lease: old });
    assert_eq!(outcome, Ok(Answer::Pending), "a newer version is no withdrawal");
    let (second, ..) = w.ask(c, Call::AwaitWithdrawal { lease: new });
    assert_eq!(w.ask(c, Call::AwaitWithdrawal { lease: old }).1, stale(Handle::Lease), "not theirs");
    let (_, outcome, effects) = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    assert!(
        matches!(outcome, Ok(Answer::Removed { version: 2, bytes_kept: 20, ref holders, .. }) if holders.len() == 3)
    );
    assert_eq!(
        notices(&effects),
        [(b, first, Ok(Answer::Withdrawn { notice: None })), (c, second, Ok(Answer::Withdrawn { notice: None }))]
    );
    w.commit(a, "x", true);
    assert_eq!(
        w.ask(b, Call::AwaitWithdrawal { lease: old }).1,
        Ok(Answer::Withdrawn { notice: None }),
        "it was, before that"
    );
}

#[test]
fn waiting_for_a_withdrawal_ends_with_the_lease() {
    let (mut w, [a]) = Watched::with_members();
    w.commit(a, "x", true);
    let lease = w.opened(a, "x").lease;
    let (ticket, ..) = w.ask(a, Call::AwaitWithdrawal { lease });
    assert_eq!(notices(&w.release(a, lease)), [(a, ticket, stale(Handle::Lease))]);
}

#[test]
fn dead_members_keep_nothing_and_suspects_lose_only_waits() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "owned", false);
    w.commit(b, "kept", true);
    w.opened(a, "kept");
    w.claim(a, "building");
    let _ = w.open(a, "awaited", None, true);
    assert_eq!(w.apply(Event::Suspected { member: a }), []);
    assert_eq!(w.pending.len(), 0);
    assert_eq!((w.registry.members[&a].version_leases.len(), w.registry.claims.len()), (2, 1));
    assert!(w.open(b, "owned", None, false).is_ok());
    w.apply(Event::Died { member: a });
    assert!(not_found(w.open(b, "owned", None, false)));
    assert!(w.registry.claims.is_empty() && !w.registry.members.contains_key(&a));
}

#[test]
fn leaving_is_answered_then_ends_the_connection() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", false);
    let (_, outcome, effects) = w.ask(a, Call::Leave);
    assert_eq!(outcome, Ok(Answer::Done));
    assert!(effects.contains(&Effect::Disconnect(a)));
    assert!(not_found(w.open(b, "x", None, false)));
    assert_eq!(w.ask(b, Call::Leave).1, Ok(Answer::Done));
    assert!(w.registry.is_idle());
}

#[test]
fn exceeded_limits_are_named_and_change_nothing() {
    let bounds = Bounds { bytes: 25, names: 2, fds: 4, waits: 1, leases: 5, ..UNBOUNDED };
    let mut w = Watched::new(bounds);
    let a = MemberId(1);
    w.join(a);
    let over = |limit, allowed, needed| Err(Refused::Limit { limit, allowed, needed });
    let commit = |w: &mut Watched, name: &str, chunks: &[u64], table| {
        let memory = w.memory(chunks, table, false, Lifetime::Kept);
        w.ask(a, Call::Commit(commit(Name::new(name), memory))).1
    };
    assert!(commit(&mut w, "a", &[10], false).is_ok());
    assert_eq!(commit(&mut w, "b", &[10, 3], true), over(Limit::Bytes, 25, 26), "a table counts");
    assert_eq!(commit(&mut w, "b", &[u64::MAX, u64::MAX], false), over(Limit::Bytes, 25, u64::MAX));
    assert_eq!(commit(&mut w, "b", &[0; 4], false), over(Limit::Fds, 4, 5));
    assert!(commit(&mut w, "b", &[10], false).is_ok());
    assert_eq!(commit(&mut w, "c", &[], false), over(Limit::Names, 2, 3));
    assert!(commit(&mut w, "b", &[], false).is_ok(), "an existing name is not one more");
    assert_eq!(w.open(a, "q", None, true), Ok(Answer::Pending));
    assert_eq!(w.open(a, "r", None, true), over(Limit::Waits, 1, 2));
    w.opened(a, "a");
    w.opened(a, "a");
    assert_eq!(w.open(a, "a", None, false), over(Limit::Leases, 5, 6));
    assert_eq!(w.registry.totals.names, 2);
}

#[test]
fn pinned_memory_is_limited_on_each_node() {
    let guests = Quota { pinned: 6, ..NO_QUOTA };
    let mut w = Watched::new(Bounds { pinned: 25, guests, ..UNBOUNDED });
    let [a, b] = [MemberId(1), MemberId(2)];
    w.join(a);
    w.join_as(b, GUEST);
    let over = |needed| Err(Refused::Limit { limit: Limit::Pinned(Some(1)), allowed: 25, needed });
    let commit = |w: &mut Watched, member, name: &str, place, bytes| {
        let memory = w.memory_of(Kind::Pinned, &[bytes], true, true, Lifetime::Kept);
        let memory = Arc::new(Memory { place, ..Memory::clone(&memory) });
        w.ask(member, Call::Commit(commit(Name::new(name), memory))).1
    };
    let Ok(Answer::Committed { lease, .. }) = commit(&mut w, a, "a", NODE, 15) else { panic!("committed") };
    assert_eq!(commit(&mut w, a, "b", NODE, 11), over(26), "the table is elsewhere");
    assert!(commit(&mut w, a, "b", Place::Pinned(0), 25).is_ok(), "another node");
    assert!(commit(&mut w, a, "c", GPU, 100).is_ok(), "memory of a GPU");
    let of_user = |held| Refused::Quota { uid: GUEST, limit: Limit::Pinned(Some(1)), allowed: 6, held, needed: 7 };
    assert_eq!(commit(&mut w, b, "d", NODE, 7), Err(of_user(0)));
    assert!(commit(&mut w, b, "d", NODE, 6).is_ok());
    // The same is said before the memory is allocated, and nothing is reserved by asking.
    let asks = |w: &mut Watched, member, bytes| w.ask(member, Call::CheckBytes { place: NODE, bytes }).1;
    assert_eq!(asks(&mut w, b, 1), Err(of_user(6)));
    assert_eq!(asks(&mut w, a, 5), over(26));
    assert_eq!([asks(&mut w, a, 4), asks(&mut w, a, 4)], [const { Ok(Answer::Done) }; 2]);
    let Ok(Answer::Status(counts)) = w.ask(b, Call::Status).1 else { panic!("a status") };
    let users = counts.users.iter().map(|user| (user.uid, user.pinned.clone(), user.limits[4])).collect::<Vec<_>>();
    assert_eq!(users, [(GUEST, vec![(1, 6)], 6)]);
    let grow = |w: &mut Watched, bytes| {
        let growth = Growth { kind: Kind::Pinned, ..w.growth(lease, 0, &[bytes]) };
        w.ask(a, Call::Grow(growth)).1
    };
    assert_eq!(grow(&mut w, 5), over(26));
    assert!(grow(&mut w, 4).is_ok());
    w.restart();
    assert_eq!(commit(&mut w, a, "b", NODE, 1), over(26));
}

#[test]
fn no_sum_overflows_even_without_a_limit() {
    let mut w = Watched::new(Bounds { bytes: u64::MAX, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    for _ in 0..3 {
        let memory = w.memory(&[u64::MAX, 7], true, false, Lifetime::Kept);
        let commit = commit(name("x"), memory);
        assert!(matches!(w.ask(a, Call::Commit(commit)).1, Err(Refused::Limit { limit: Limit::Bytes, .. })));
    }
}

#[test]
fn repeated_request_is_carried_out_once() {
    let (mut w, [a, b]) = Watched::with_members();
    w.last_request = 100;
    let commit = w.commit_call("x", false, true);
    let (request, outcome, _) = w.ask(a, Call::Commit(commit));
    w.apply(Event::Suspected { member: a });
    w.apply(Event::Resumed { member: a });
    let again = w.commit_call("x", false, true);
    let fds = again.memory.fds();
    let (repeated, effects) = w.ask_as(a, request, Call::Commit(again));
    assert_eq!(repeated, outcome);
    assert_eq!(closed(&effects), fds, "they came a second time");

    // A lost answer is found again under the same number.
    let open = Call::Open(Open { name: name("y"), version: None, access: Access::Read, wait: true });
    let (ticket, ..) = w.ask(a, open.clone());
    let commit = w.commit_call("y", false, true);
    let (.., effects) = w.ask(b, Call::Commit(commit));
    w.apply(Event::Suspected { member: a });
    w.apply(Event::Resumed { member: a });
    let (_, _, granted) = notices(&effects).remove(0);
    assert_eq!(w.ask_as(a, ticket, open).0, granted);

    let (request, outcome, _) = w.ask(a, Call::OpenOrBuild { name: name("z") });
    assert_eq!(w.ask_as(a, request, Call::OpenOrBuild { name: name("z") }).0, outcome);

    let (request, outcome, _) = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    assert!(matches!(outcome, Ok(Answer::Removed { .. })));
    let commit = w.commit_call("x", false, true);
    assert!(w.ask(b, Call::Commit(commit)).1.is_ok());
    assert_eq!(
        w.ask_as(a, request, Call::Remove { name: name("x"), deadline: None }).0,
        outcome,
        "the new name is not meant"
    );
    assert!(w.ask(a, Call::Inspect { name: name("x"), version: None }).1.is_ok());

    // A repeated request that was never carried out is carried out.
    let open = Call::Open(Open { name: name("q"), version: None, access: Access::Read, wait: true });
    let (ticket, ..) = w.ask(a, open.clone());
    assert_eq!(w.ask_as(a, ticket, open.clone()).0, Ok(Answer::Pending), "it is waiting already");
    w.apply(Event::Suspected { member: a });
    w.apply(Event::Resumed { member: a });
    assert_eq!(w.ask_as(a, ticket, open).0, Ok(Answer::Pending));
}

#[test]
fn child_that_closes_a_connection_still_holds_its_parents_memory() {
    let (mut w, [a, b]) = Watched::with_members();
    w.apply(Event::HeldByChild { member: b });
    w.apply(Event::Suspected { member: b });
    let Ok(Answer::Members { members, .. }) = w.ask(a, Call::Members { after: None }).1 else { panic!("members") };
    let states: Vec<_> = members.iter().map(|member| member.state).collect();
    assert_eq!(states, [MemberState::Alive, MemberState::HeldByChild]);
}

#[test]
fn given_up_request_leaves_nothing_behind() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(b, "x", true);
    let open = |of: &str| Call::Open(Open { name: name(of), version: None, access: Access::Read, wait: true });
    let mut given_up = Vec::new();
    for (of, kept) in [("y", true), ("z", false)] {
        let commit = w.commit_call(of, false, kept);
        given_up.push(w.ask(a, Call::Commit(commit)).0);
    }
    given_up.push(w.ask(a, open("x")).0);
    given_up.push(w.ask(a, open("later")).0);
    given_up.push(w.ask(a, Call::OpenOrBuild { name: name("built") }).0);
    given_up.push(w.ask(a, open("nothing")).0);
    let kept = w.ask(a, open("x")).0;
    for request in given_up {
        for _ in 0..2 {
            assert_eq!(w.ask(a, Call::GiveUp { request }).1, Ok(Answer::Done));
        }
    }
    assert!(matches!(w.ask_as(a, kept, open("x")).0, Ok(Answer::Opened(_))), "another request has its lease");
    assert_eq!(w.registry.given_out(), (2, 2), "that lease, and its committer's");
    let build = Call::OpenOrBuild { name: name("built") };
    assert!(matches!(w.ask(b, build).1, Ok(Answer::Build { .. })), "its builder was not that request");
    w.commit(b, "later", true);
    let is_there = |w: &mut Watched, of| w.ask(b, Call::Inspect { name: name(of), version: None }).1.is_ok();
    assert!(is_there(&mut w, "y"), "it is kept");
    assert!(!is_there(&mut w, "z"), "it belonged to the lease");
}

#[test]
fn stop_is_refused_while_anything_is_in_use() {
    let (mut w, [a, b]) = Watched::with_members();
    assert_eq!(w.ask(a, Call::Stop { force: false }).1, Err(Refused::InUse { names: 0, members: 1 }));
    w.commit(b, "x", true);
    w.apply(Event::Died { member: b });
    assert_eq!(w.ask(a, Call::Stop { force: false }).1, Err(Refused::InUse { names: 1, members: 0 }));
    assert_eq!(w.ask(a, Call::Stop { force: true }).2, [Effect::RemoveSocket, Effect::Stop]);
    let _ = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    assert_eq!(w.ask(a, Call::Stop { force: false }).2, [Effect::RemoveSocket, Effect::Stop]);
}

#[test]
fn unknown_name_suggests_near_ones() {
    let (mut w, [a]) = Watched::with_members();
    ["weights", "weights/v2", "Tokens", "other"].iter().for_each(|n| assert_eq!(w.commit(a, n, true).0, 1));
    let near = |w: &mut Watched, wanted| match w.open(a, wanted, None, false) {
        Err(Refused::NotFound { near, .. }) => near.iter().map(Name::to_string).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(near(&mut w, "wieghts"), ["weights"]);
    assert_eq!(near(&mut w, "tokens"), ["Tokens"]);
    assert_eq!(near(&mut w, "wei"), ["weights", "weights/v2"]);
    assert!(near(&mut w, "zzz").is_empty());
}

#[test]
fn listings_come_in_pages_that_fit_a_message() {
    let (mut w, [a]) = Watched::with_members();
    // Applied without the audit, which would make this quadratic.
    for i in 0..1000 {
        let memory = w.memory(&[1], false, false, Lifetime::Kept);
        let name = Name::new(format!("{i:04}{}", "x".repeat(251)));
        let call = Call::Commit(commit(name, memory));
        w.registry.apply(Event::Request { member: a, request: RequestId(i + 1), call }, 0);
    }
    let mut after = None;
    let mut seen = Vec::new();
    let mut pages = 0;
    loop {
        let Answer::Names { names, more } = w.registry.list(a, after.as_ref()) else { panic!("names") };
        assert!(names.len() < 150 && !names.is_empty());
        after = names.last().map(|row| row.name.clone());
        seen.extend(names.into_iter().map(|row| row.name));
        pages += 1;
        if !more {
            break;
        }
    }
    assert_eq!((seen.len(), pages > 5, seen.is_sorted()), (1000, true, true));
}

#[test]
fn inspect_returns_everything_about_a_name() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", true);
    w.opened(b, "x");
    w.commit(b, "x", false);
    let inspect = |w: &mut Watched, version| match w.ask(a, Call::Inspect { name: name("x"), version }).1 {
        Ok(Answer::Info(info)) => *info,
        other => panic!("{other:?}"),
    };
    let info = inspect(&mut w, None);
    assert_eq!((info.version.version, info.is_latest, info.versions.len()), (2, true, 2));
    assert_eq!(info.holders.iter().map(|h| h.pid).collect::<Vec<_>>(), [102]);
    let info = inspect(&mut w, Some(1));
    assert_eq!((info.is_latest, info.holders.len(), info.builder), (false, 2, None));
    w.apply(Event::Died { member: b });
    let info = inspect(&mut w, None);
    assert_eq!((info.version.version, info.is_latest), (1, false), "withdrawn, but a still holds it");
    w.join(MemberId(3));
    w.claim(MemberId(3), "x");
    assert_eq!(inspect(&mut w, None).builder, Some(103));
    assert!(matches!(
        w.ask(a, Call::Inspect { name: name("x"), version: Some(9) }).1,
        Err(Refused::VersionNotFound { .. })
    ));
}

#[test]
fn members_show_their_state_and_what_they_hold() {
    let (mut w, [a, b, c]) = Watched::with_members();
    w.commit(a, "x", true);
    w.opened(a, "x");
    w.apply(Event::Suspected { member: b });
    w.apply(Event::HeldByChild { member: c });
    let (_, outcome, _) = w.ask(a, Call::Members { after: None });
    let Ok(Answer::Members { members, more: false }) = outcome else { panic!("{outcome:?}") };
    let rows: Vec<_> = members.iter().map(|m| (m.state, m.leases, m.bytes)).collect();
    let expected = [(MemberState::Alive, 2, 10), (MemberState::Suspect, 0, 0), (MemberState::HeldByChild, 0, 0)];
    assert_eq!(rows, expected, "a version counts once however many leases there are");
    let (_, outcome, _) = w.ask(a, Call::Members { after: Some(b) });
    assert!(matches!(outcome, Ok(Answer::Members { members, .. }) if members.len() == 1));
}

#[test]
fn version_grows_in_one_step_and_keeps_its_number() {
    let (mut w, [a, b]) = Watched::with_members();
    let commit = w.commit_call("x", true, false);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Call::Commit(commit)).1 else { panic!("committed") };
    let held = w.opened(b, "x");
    let (ticket, pending, _) = w.ask(b, Call::AwaitGrowth { lease: held.lease, growths: 0 });
    assert_eq!(pending, Ok(Answer::Pending));

    let (outcome, effects) = w.grow(a, lease, 0, &[5]);
    assert_eq!(outcome, Ok(Answer::Done));
    assert_eq!(notices(&effects), [(b, ticket, Ok(Answer::Done))]);
    let again = w.opened(b, "x");
    assert_eq!((again.version, again.growths, again.memory.bytes()), (1, 1, 15));
    let Ok(Answer::Grown { growths: 1, chunks: 1, memory }) =
        w.ask(b, Call::Refresh { lease: held.lease, growths: 0, chunks: 1 }).1
    else {
        panic!("it has grown")
    };
    assert_eq!(memory, again.memory);
    assert_eq!(w.ask(b, Call::Refresh { lease: held.lease, growths: 1, chunks: 2 }).1, Ok(Answer::Done));
    assert_eq!(w.registry.members[&b].bytes, 15, "each version counted once");
}

#[test]
fn repeated_growth_happens_once() {
    let (mut w, [a]) = Watched::with_members();
    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Call::Commit(commit)).1 else { panic!("committed") };
    let growth = w.growth(lease, 0, &[5]);
    let (request, outcome, _) = w.ask(a, Call::Grow(growth));
    assert_eq!(outcome, Ok(Answer::Done));
    let growth = w.growth(lease, 0, &[5]);
    let donated = growth.fds();
    let (outcome, effects) = w.ask_as(a, request, Call::Grow(growth));
    assert_eq!((outcome, closed(&effects)), (Ok(Answer::Done), donated));
    assert_eq!(w.opened(a, "x").memory.bytes(), 15);
}

#[test]
fn only_the_committer_repeats_a_growth() {
    let (mut w, [a, b]) = Watched::with_members();
    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Call::Commit(commit)).1 else { panic!("committed") };
    let theirs = w.opened(b, "x").lease;
    let growth = w.growth(lease, 0, &[5]);
    let (request, ..) = w.ask(a, Call::Grow(growth));
    // Different members use the same request numbers.
    assert_eq!(w.ask_as(b, request, Call::Ping).0, Ok(Answer::Done));
    let growth = w.growth(theirs, 1, &[5]);
    let (outcome, _) = w.ask_as(b, request, Call::Grow(growth));
    let why = NoGrowth::NotCommitter;
    assert_eq!(outcome, Err(Refused::CannotGrow { name: Name::new("x"), version: 1, why }));
}

#[test]
fn refused_growths_give_their_reason_and_change_nothing() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, frozen) = w.commit(a, "frozen", true);
    let cannot = |name: &str, why| Err(Refused::CannotGrow { name: Name::new(name), version: 1, why });
    assert_eq!(w.grow(a, frozen, 0, &[1]).0, cannot("frozen", NoGrowth::Fixed));
    assert_eq!(w.ask(a, Call::AwaitGrowth { lease: frozen, growths: 0 }).1, cannot("frozen", NoGrowth::Fixed));

    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Call::Commit(commit)).1 else { panic!("committed") };
    let theirs = w.opened(b, "x").lease;
    assert_eq!(w.grow(b, lease, 0, &[1]).0, stale(Handle::Lease));
    assert_eq!(w.grow(b, theirs, 0, &[1]).0, cannot("x", NoGrowth::NotCommitter));
    assert_eq!(w.grow(a, lease, 1, &[1]).0, cannot("x", NoGrowth::Behind));
    let reserved = NoGrowth::Reserved { reserved: RESERVED, needed: RESERVED + 1 };
    assert_eq!(w.grow(a, lease, 0, &[10, 6]).0, cannot("x", reserved));
    let (request, ..) = w.ask(b, Call::AwaitGrowth { lease: theirs, growths: 0 });
    assert_eq!(w.opened(b, "x").growths, 0);

    // Without its committer a version cannot grow.
    let effects = w.release(a, lease);
    assert_eq!(notices(&effects), [(b, request, cannot("x", NoGrowth::CommitterGone))]);
    assert_eq!(w.grow(b, theirs, 0, &[1]).0, cannot("x", NoGrowth::CommitterGone));
    assert_eq!(w.ask(b, Call::AwaitGrowth { lease: theirs, growths: 0 }).1, cannot("x", NoGrowth::CommitterGone));
}

#[test]
fn growths_are_bounded() {
    let mut w = Watched::new(Bounds { bytes: 20, chunks: 3, growths: 3, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Call::Commit(commit)).1 else { panic!("committed") };
    let over = |limit, allowed, needed| Err(Refused::Limit { limit, allowed, needed });
    assert_eq!(w.grow(a, lease, 0, &[11]).0, over(Limit::Bytes, 20, 21));
    assert_eq!(w.grow(a, lease, 0, &[1, 1, 1]).0, over(Limit::Chunks, 3, 4));
    assert_eq!(w.grow(a, lease, 0, &[1, 1]).0, Ok(Answer::Done));
    assert_eq!(w.grow(a, lease, 1, &[]).0, Ok(Answer::Done), "only the table");
    assert_eq!(w.grow(a, lease, 2, &[]).0, Ok(Answer::Done));
    assert_eq!(w.grow(a, lease, 3, &[]).0, over(Limit::Growths, 3, 4));
}

fn publish(w: &mut Watched, member: MemberId, name: &str) -> (u64, LeaseId) {
    publish_for(w, member, name, Lifetime::Owned)
}

fn publish_for(w: &mut Watched, member: MemberId, name: &str, lifetime: Lifetime) -> (u64, LeaseId) {
    let memory = w.memory_of(Kind::Legacy, &[10], false, false, lifetime);
    let commit = commit(Name::new(name), memory);
    match w.ask(member, Call::Commit(commit)).1 {
        Ok(Answer::Committed { version, lease }) => (version, lease),
        other => panic!("{other:?}"),
    }
}

fn ended(outcome: Outcome) -> Tombstone {
    match outcome {
        Err(Refused::Ended { tombstone, .. }) if tombstone.legacy => tombstone,
        Err(Refused::NotFound { ended: Some(tombstone), .. }) if !tombstone.legacy => *tombstone,
        other => panic!("{other:?}"),
    }
}

/// Returns the tombstone of version 1, ended by the member with this number.
fn tombstone(ending: Ending, member: u32, at: u64, legacy: bool) -> Tombstone {
    let owned = Owned { uid: 0, shared: false };
    Tombstone { ending, version: 1, pid: 100 + member, command: format!("member {member}").into(), at, legacy, owned }
}

#[test]
fn open_of_ended_legacy_memory_says_how_it_ended() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let (_, lease) = publish(&mut w, a, "x");
    let held = w.opened(b, "x");
    w.now = 7;
    w.release(a, lease);
    let withdrawn = tombstone(Ending::Withdrawn, 1, 7, true);
    assert_eq!(ended(w.open(b, "x", None, false)), withdrawn);
    assert_eq!(ended(w.open(b, "x", Some(1), true)), withdrawn, "version 1 never returns");
    assert_eq!(ended(w.ask(b, Call::Remove { name: name("x"), deadline: None }).1), withdrawn);
    assert_eq!(closed(&w.release(b, held.lease)), [], "nothing was kept for it");
    assert_eq!(ended(w.ask(b, Call::Inspect { name: name("x"), version: None }).1), withdrawn);
    assert!(not_found(w.open(b, "x", Some(2), false)));

    publish(&mut w, a, "x");
    w.apply(Event::Died { member: a });
    assert_eq!(ended(w.open(b, "x", None, false)), tombstone(Ending::OwnerDied, 1, 7, true));

    publish(&mut w, b, "x");
    let _ = w.ask(c, Call::Remove { name: name("x"), deadline: None });
    assert_eq!(ended(w.open(b, "x", None, false)), tombstone(Ending::Removed, 3, 7, true));
    publish(&mut w, c, "x");
    let _ = w.ask(c, Call::Leave);
    let second = Tombstone { version: 2, ..tombstone(Ending::Withdrawn, 3, 7, true) };
    assert_eq!(ended(w.open(b, "x", None, false)), second, "b holds 1");

    w.commit(b, "x", false);
    let _ = w.ask(b, Call::Remove { name: name("x"), deadline: None });
    let third = ended(w.open(b, "x", None, false));
    assert!(!third.legacy, "it was of another kind the last time: {third:?}");
}

#[test]
fn shared_legacy_memory_ends_with_its_last_user_and_with_its_publisher() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let (_, lease) = publish_for(&mut w, a, "x", Lifetime::Shared);
    let held = w.opened(b, "x");
    assert_eq!(w.ask(a, Call::LeaveName { lease }).1, Ok(Answer::Done));
    let passed_on = w.opened(c, "x");
    w.release(b, held.lease);
    w.now = 7;
    w.release(c, passed_on.lease);
    assert_eq!(ended(w.open(b, "x", None, false)), tombstone(Ending::Unused, 3, 7, true));

    let (_, lease) = publish_for(&mut w, a, "x", Lifetime::Shared);
    w.opened(b, "x");
    w.release(a, lease);
    assert_eq!(ended(w.open(c, "x", None, false)).ending, Ending::Withdrawn, "it was released, not left");

    for is_left in [false, true] {
        let name = ["y", "z"][usize::from(is_left)];
        let publisher = MemberId(7 + u64::from(is_left));
        w.join(publisher);
        let (_, lease) = publish_for(&mut w, publisher, name, Lifetime::Shared);
        w.opened(b, name);
        if is_left {
            assert_eq!(w.ask(publisher, Call::LeaveName { lease }).1, Ok(Answer::Done));
        }
        w.apply(Event::Died { member: publisher });
        assert_eq!(ended(w.open(c, name, None, false)).ending, Ending::OwnerDied, "left: {is_left}");
    }
}

#[test]
fn open_within_a_minute_says_how_the_name_ended() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let (_, lease) = w.commit(a, "x", false);
    w.now = 7;
    w.release(a, lease);
    let withdrawn = tombstone(Ending::Withdrawn, 1, 7, false);
    w.now = 7 + REMEMBERED - 1;
    assert_eq!(ended(w.open(b, "x", None, false)), withdrawn);
    assert_eq!(ended(w.open(b, "x", Some(1), false)), withdrawn);
    assert_eq!(ended(w.ask(b, Call::Remove { name: name("x"), deadline: None }).1), withdrawn);
    assert_eq!(ended(w.ask(b, Call::Inspect { name: name("x"), version: None }).1), withdrawn);
    assert_eq!(w.open(b, "x", None, true), Ok(Answer::Pending), "it may come again");
    w.now += 1;
    let forgotten = w.open(c, "x", None, false);
    assert!(matches!(forgotten, Err(Refused::NotFound { ended: None, .. })), "{forgotten:?}");

    w.commit(a, "owned", false);
    w.commit(b, "kept", true);
    w.now = 9;
    let held = w.opened(c, "kept");
    w.apply(Event::Died { member: a });
    let _ = w.ask(c, Call::Remove { name: name("kept"), deadline: None });
    assert_eq!(ended(w.open(c, "owned", None, false)), tombstone(Ending::OwnerDied, 1, 9, false));
    assert_eq!(ended(w.open(c, "kept", Some(1), false)), tombstone(Ending::Removed, 3, 9, false), "c has it open");
    w.release(c, held.lease);
    w.commit(b, "kept", true);
    assert!(w.open(c, "kept", None, false).is_ok(), "it is there again");
}

#[test]
fn refusal_names_what_has_the_name_instead() {
    let (mut w, [a, b, _]) = Watched::with_members();
    w.timeline(a, "x", true);
    let is = |outcome: Outcome| match outcome {
        Err(Refused::NotFound { is, .. } | Refused::ObjectNotFound { is, .. }) => is,
        other => panic!("{other:?}"),
    };
    assert_eq!(is(w.open(b, "x", None, false)), [Named::Timeline]);
    assert_eq!(is(w.ask(b, Call::Remove { name: name("x"), deadline: None }).1), [Named::Timeline]);
    assert_eq!(is(w.open(b, "y", None, false)), []);
    w.commit(b, "y", false);
    assert_eq!(is(w.ask(a, Call::AbandonTimeline { name: name("y") }).1), [Named::Segment]);
}

#[test]
fn wait_for_legacy_memory_survives_its_publisher() {
    let (mut w, [a, b, c]) = Watched::with_members();
    assert_eq!(w.open(b, "x", Some(2), true), Ok(Answer::Pending));
    publish(&mut w, a, "x");
    assert_eq!(notices(&w.apply(Event::Died { member: a })), []);
    assert_eq!(w.open(b, "x", None, true), Ok(Answer::Pending));
    assert!(matches!(w.open(c, "x", None, false), Err(Refused::Ended { .. })));
    publish(&mut w, c, "x");
    assert_eq!(w.registry.version_leases.len(), 2, "one waiting member has got it");
}

#[test]
fn older_legacy_version_ends_with_its_publisher() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, lease) = publish(&mut w, a, "x");
    let held = w.opened(b, "x");
    let (awaits, outcome, _) = w.ask(b, Call::AwaitWithdrawal { lease: held.lease });
    assert_eq!(outcome, Ok(Answer::Pending));
    w.commit(b, "x", false);
    let effects = w.release(a, lease);
    assert_eq!(notices(&effects), [(b, awaits, Ok(Answer::Withdrawn { notice: None }))]);
    assert!(matches!(w.open(a, "x", Some(1), false), Err(Refused::VersionNotFound { latest: Some(2), .. })));
    assert_eq!(w.opened(a, "x").version, 2);
}

#[test]
fn legacy_memory_counts_toward_no_limit() {
    let mut w = Watched::new(Bounds { bytes: 5, fds: 0, ..UNBOUNDED });
    w.join(MemberId(1));
    publish(&mut w, MemberId(1), "x");
    let Ok(Answer::Status(counts)) = w.ask(MemberId(1), Call::Status).1 else { panic!("a status") };
    assert_eq!((counts.versions, counts.fds, &counts.bytes), (1, 0, &Vec::new()));
}

#[test]
fn name_ends_with_the_member_that_owns_it() {
    let (mut w, [a, b]) = Watched::with_members();
    let given = |w: &mut Watched, owner| Commit { owner: Some(owner), ..w.commit_call("x", false, false) };
    let call = given(&mut w, b);
    let lease = match w.ask(a, Call::Commit(call)).1 {
        Ok(Answer::Committed { lease, .. }) => lease,
        other => panic!("{other:?}"),
    };
    w.ask(a, Call::WithdrawNames).1.unwrap();
    w.ask(a, Call::Release { lease }).1.unwrap();
    w.opened(a, "x");
    w.apply(Event::Died { member: a });
    assert_eq!(w.registry.totals.names, 1, "the committer's end does not end it");
    w.apply(Event::Died { member: b });
    assert_eq!(w.registry.totals.names, 0);
    assert_eq!(w.registry.totals.fds, 0);

    w.join(MemberId(3));
    let call = given(&mut w, b);
    let refused = w.ask(MemberId(3), Call::Commit(call)).1;
    assert_eq!(refused, Err(Refused::NoSuchMember { whom: Whom::Member(b.0), near: Vec::new() }));
}
