//! Names, their versions, and who builds them.

use super::*;

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
    let leases: Vec<_> = w.registry.people.members()[&a].version_leases.iter().copied().collect();
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
    let again = w.seen(again);
    assert_eq!(closed(&w.release(b, held.lease)), []);
    assert_eq!(closed(&w.release(b, again.lease)), again.memory.fds());
    let gone = Refusal::VersionNotFound { name: name("x"), version: 1, latest: Some(2) };
    assert_eq!(w.open(b, "x", Some(1), true), Err(gone), "waiting for it would be in vain");
}

#[test]
fn owned_name_ends_with_its_owners_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, lease) = w.commit(a, "x", false);
    let held = w.opened(b, "x");
    w.release(a, lease);
    assert!(not_found(w.open(b, "x", None, false)));
    assert_eq!(ended(w.open(b, "x", Some(1), false)).1.ending, Ending::Withdrawn);
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

// Holds 47.
#[test]
fn name_ends_with_the_member_that_owns_it() {
    let (mut w, [a, b]) = Watched::with_members();
    let given = |w: &mut Watched, owner| Commit { owner: Some(owner), ..w.commit_call("x", false, false) };
    let call = given(&mut w, b);
    let lease = match w.ask(a, call).1 {
        Ok(Answer::Committed { lease, .. }) => lease,
        other => panic!("{other:?}"),
    };
    w.ask(a, Call::WithdrawNames).1.unwrap();
    w.ask(a, Call::Release { lease }).1.unwrap();
    w.opened(a, "x");
    w.apply(Event::Died { member: a });
    assert_eq!(w.registry.people.totals().names, 1, "the committer's end does not end it");
    w.apply(Event::Died { member: b });
    assert_eq!(w.registry.people.totals().names, 0);
    assert_eq!(w.registry.people.totals().fds, 0);

    w.join(MemberId(3));
    let call = given(&mut w, b);
    let refused = w.ask(MemberId(3), Asked::from(call)).1;
    assert_eq!(refused, Err(Refusal::NoSuchMember { whom: Whom::Member(b.0), near: Vec::new() }));
}

#[test]
fn writing_needs_a_mutable_version() {
    let (mut w, [a]) = Watched::with_members();
    w.commit(a, "x", true);
    let write = |n: &str, wait| Call::Open(Open { name: name(n), version: None, access: Access::Write, wait });
    assert_eq!(w.ask(a, write("x", false)).1, Err(Refusal::ReadOnly { name: name("x"), version: 1 }));
    let mutable = w.commit_call("y", true, true);
    let _ = w.ask(a, mutable).1.unwrap();
    assert!(matches!(w.ask(a, write("y", false)).1, Ok(Answer::Opened(_))));
    // The same holds for members that waited.
    let (ticket, ..) = w.ask(a, write("z", true));
    let frozen = w.commit_call("z", false, true);
    let (.., effects) = w.ask(a, frozen);
    assert_eq!(notices(&effects), [(a, ticket, Err(Refusal::ReadOnly { name: name("z"), version: 1 }))]);
}

#[test]
fn commit_grants_every_waiter_in_one_step() {
    let (mut w, [a, b, c]) = Watched::with_members();
    assert_eq!(w.open(b, "x", None, true), Ok(Answer::Pending));
    assert_eq!(w.open(c, "x", Some(1), true), Ok(Answer::Pending));
    assert_eq!(w.open(c, "x", Some(2), true), Ok(Answer::Pending));
    let commit = w.commit_call("x", false, false);
    let (.., effects) = w.ask(a, commit);
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
    assert_eq!(w.ask(c, foreign).1, stale(Handle::Claim));
    let other_name = Commit { claim: Some(claim), ..w.commit_call("y", false, true) };
    assert_eq!(w.ask(a, other_name).1, stale(Handle::Claim));
    let commit = Commit { claim: Some(claim), ..w.commit_call("x", false, true) };
    let (_, outcome, effects) = w.ask(a, Asked::from(commit.clone()));
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
    let (.., effects) = w.ask(c, commit);
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
    assert!(w.ask(a, commit).1.is_ok());
}

#[test]
fn if_absent_refuses_an_existing_name() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", false);
    let commit = Commit { if_absent: true, ..w.commit_call("x", false, false) };
    let fds = commit.memory.fds();
    let (_, outcome, effects) = w.ask(b, commit);
    assert_eq!(outcome, Err(Refusal::NameExists { name: name("x"), version: 1, is: Named::Segment }));
    assert_eq!(closed(&effects), fds);
    w.apply(Event::Died { member: a });
    let commit = Commit { if_absent: true, ..w.commit_call("x", false, false) };
    assert!(w.ask(b, commit).1.is_ok(), "a withdrawn name does not exist");
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
