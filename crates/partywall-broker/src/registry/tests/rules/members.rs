//! Requests, and members that leave or die.

use super::*;

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
    assert!(w.registry.names.entries()[&name("x")].waits.is_empty());
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
    assert_eq!((w.registry.people.members()[&a].version_leases.len(), w.registry.names.claims().len()), (2, 1));
    assert!(w.open(b, "owned", None, false).is_ok());
    w.apply(Event::Died { member: a });
    assert!(not_found(w.open(b, "owned", None, false)));
    assert!(w.registry.names.claims().is_empty() && !w.registry.people.members().contains_key(&a));
}

#[test]
fn leaving_is_answered_then_ends_the_connection() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", false);
    let (_, outcome, effects) = w.ask(a, Call::Bye);
    assert_eq!(outcome, Ok(Answer::Done));
    assert!(effects.contains(&Effect::Disconnect(a)));
    assert!(not_found(w.open(b, "x", None, false)));
    assert_eq!(w.ask(b, Call::Bye).1, Ok(Answer::Done));
    assert!(w.registry.is_idle());
}

#[test]
fn repeated_request_is_carried_out_once() {
    let (mut w, [a, b]) = Watched::with_members();
    w.last_request = 100;
    let commit = w.commit_call("x", false, true);
    let (request, outcome, _) = w.ask(a, commit);
    w.apply(Event::Suspected { member: a });
    w.apply(Event::Resumed { member: a });
    let again = w.commit_call("x", false, true);
    let fds = again.memory.fds();
    let (repeated, effects) = w.ask_as(a, request, Asked::from(again));
    assert_eq!(repeated, outcome);
    assert_eq!(closed(&effects), fds, "they came a second time");

    // A lost answer is found again under the same number.
    let open = Call::Open(Open { name: name("y"), version: None, access: Access::Read, wait: true });
    let (ticket, ..) = w.ask(a, open.clone());
    let commit = w.commit_call("y", false, true);
    let (.., effects) = w.ask(b, commit);
    w.apply(Event::Suspected { member: a });
    w.apply(Event::Resumed { member: a });
    let (_, _, granted) = notices(&effects).remove(0);
    assert_eq!(w.ask_as(a, ticket, open).0, granted);

    let (request, outcome, _) = w.ask(a, Call::OpenOrBuild { name: name("z") });
    assert_eq!(w.ask_as(a, request, Call::OpenOrBuild { name: name("z") }).0, outcome);

    let (request, outcome, _) = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    assert!(matches!(outcome, Ok(Answer::Removed { .. })));
    let commit = w.commit_call("x", false, true);
    assert!(w.ask(b, commit).1.is_ok());
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
        given_up.push(w.ask(a, commit).0);
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
    assert_eq!(w.ask(a, Call::Stop { force: false }).1, Err(Refusal::InUse { names: 0, members: 1 }));
    w.commit(b, "x", true);
    w.apply(Event::Died { member: b });
    assert_eq!(w.ask(a, Call::Stop { force: false }).1, Err(Refusal::InUse { names: 1, members: 0 }));
    assert_eq!(w.ask(a, Call::Stop { force: true }).2, [Effect::RemoveSocket, Effect::Stop]);
    let _ = w.ask(a, Call::Remove { name: name("x"), deadline: None });
    assert_eq!(w.ask(a, Call::Stop { force: false }).2, [Effect::RemoveSocket, Effect::Stop]);
}
