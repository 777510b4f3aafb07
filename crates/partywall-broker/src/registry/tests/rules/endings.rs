// Holds 68.
//! What is said of names that have ended, and memory that ends with its publisher.

use super::*;
use crate::registry::names::REMEMBERED;

fn publish(w: &mut Watched, member: MemberId, name: &str) -> (u64, LeaseId) {
    publish_for(w, member, name, Lifetime::Owned)
}

fn publish_for(w: &mut Watched, member: MemberId, name: &str, lifetime: Lifetime) -> (u64, LeaseId) {
    let memory = w.memory_of(Kind::Legacy, &[10], false, false, lifetime);
    let commit = commit(called(name), memory);
    match w.ask(member, commit).1 {
        Ok(Answer::Committed { version, lease }) => (version, lease),
        other => panic!("{other:?}"),
    }
}

/// Returns the end of version 1, ended by the member with this number.
fn end(ending: Ending, member: u32, at: u64, legacy: bool) -> (bool, NameEnd) {
    (legacy, NameEnd { ending, version: 1, pid: 100 + member, command: format!("member {member}"), at })
}

#[test]
fn open_of_ended_legacy_memory_says_how_it_ended() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let (_, lease) = publish(&mut w, a, "x");
    let held = w.opened(b, "x");
    w.now = 7;
    w.release(a, lease);
    let withdrawn = end(Ending::Withdrawn, 1, 7, true);
    assert_eq!(ended(w.open(b, "x", None, false)), withdrawn);
    assert_eq!(ended(w.open(b, "x", Some(1), true)), withdrawn, "version 1 never returns");
    assert_eq!(ended(w.ask(b, Call::Remove { name: name("x"), deadline: None }).1), withdrawn);
    assert_eq!(closed(&w.release(b, held.lease)), [], "nothing was kept for it");
    assert_eq!(ended(w.ask(b, Call::Inspect { name: name("x"), version: None }).1), withdrawn);
    assert!(not_found(w.open(b, "x", Some(2), false)));

    publish(&mut w, a, "x");
    w.apply(Event::Died { member: a });
    assert_eq!(ended(w.open(b, "x", None, false)), end(Ending::OwnerDied, 1, 7, true));

    publish(&mut w, b, "x");
    let _ = w.ask(c, Call::Remove { name: name("x"), deadline: None });
    assert_eq!(ended(w.open(b, "x", None, false)), end(Ending::Removed, 3, 7, true));
    publish(&mut w, c, "x");
    let _ = w.ask(c, Call::Bye);
    let second = (true, NameEnd { version: 2, ..end(Ending::Withdrawn, 3, 7, true).1 });
    assert_eq!(ended(w.open(b, "x", None, false)), second, "b holds 1");

    w.commit(b, "x", false);
    let _ = w.ask(b, Call::Remove { name: name("x"), deadline: None });
    let third = ended(w.open(b, "x", None, false));
    assert!(!third.0, "it was of another kind the last time: {third:?}");
}

// Holds 72.
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
    assert_eq!(ended(w.open(b, "x", None, false)), end(Ending::Unused, 3, 7, true));

    let (_, lease) = publish_for(&mut w, a, "x", Lifetime::Shared);
    w.opened(b, "x");
    w.release(a, lease);
    assert_eq!(ended(w.open(c, "x", None, false)).1.ending, Ending::Withdrawn, "it was released, not left");

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
        assert_eq!(ended(w.open(c, name, None, false)).1.ending, Ending::OwnerDied, "left: {is_left}");
    }
}

// Holds 42.
#[test]
fn open_within_a_minute_says_how_the_name_ended() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let (_, lease) = w.commit(a, "x", false);
    w.now = 7;
    w.release(a, lease);
    let withdrawn = end(Ending::Withdrawn, 1, 7, false);
    w.now = 7 + REMEMBERED - 1;
    assert_eq!(ended(w.open(b, "x", None, false)), withdrawn);
    assert_eq!(ended(w.open(b, "x", Some(1), false)), withdrawn);
    assert_eq!(ended(w.ask(b, Call::Remove { name: name("x"), deadline: None }).1), withdrawn);
    assert_eq!(ended(w.ask(b, Call::Inspect { name: name("x"), version: None }).1), withdrawn);
    assert_eq!(w.open(b, "x", None, true), Ok(Answer::Pending), "it may come again");
    w.now += 1;
    let forgotten = w.open(c, "x", None, false);
    assert!(matches!(forgotten, Err(Refusal::NotFound { ended: None, .. })), "{forgotten:?}");

    w.commit(a, "owned", false);
    w.commit(b, "kept", true);
    w.now = 9;
    let held = w.opened(c, "kept");
    w.apply(Event::Died { member: a });
    let _ = w.ask(c, Call::Remove { name: name("kept"), deadline: None });
    assert_eq!(ended(w.open(c, "owned", None, false)), end(Ending::OwnerDied, 1, 9, false));
    assert_eq!(ended(w.open(c, "kept", Some(1), false)), end(Ending::Removed, 3, 9, false), "c has it open");
    w.release(c, held.lease);
    w.commit(b, "kept", true);
    assert!(w.open(c, "kept", None, false).is_ok(), "it is there again");
}

#[test]
fn refusal_names_what_has_the_name_instead() {
    let (mut w, [a, b, _]) = Watched::with_members();
    w.timeline(a, "x", true);
    let is = |outcome: Outcome| match outcome {
        Err(Refusal::NotFound { is, .. } | Refusal::ObjectNotFound { is, .. }) => is,
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
    assert!(matches!(w.open(c, "x", None, false), Err(Refusal::Ended { .. })));
    publish(&mut w, c, "x");
    assert_eq!(w.registry.names.leases().len(), 2, "one waiting member has got it");
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
    assert!(matches!(w.open(a, "x", Some(1), false), Err(Refusal::VersionNotFound { latest: Some(2), .. })));
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
