//! Versions that grow.

use super::*;

#[test]
fn version_grows_in_one_step_and_keeps_its_number() {
    let (mut w, [a, b]) = Watched::with_members();
    let commit = w.commit_call("x", true, false);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, commit).1 else { panic!("committed") };
    let held = w.opened(b, "x");
    let (ticket, pending, _) = w.ask(b, Call::AwaitGrowth { lease: held.lease, growths: 0 });
    assert_eq!(pending, Ok(Answer::Pending));

    let (outcome, effects) = w.grow(a, lease, 0, &[5]);
    assert_eq!(outcome, Ok(Answer::Done));
    assert_eq!(notices(&effects), [(b, ticket, Ok(Answer::Done))]);
    let again = w.opened(b, "x");
    assert_eq!((again.version, again.growths, again.memory.bytes()), (1, 1, 15));
    let grown = wire::Grown { growths: 1, chunks: vec![5], table: again.table.clone() };
    let refresh = Call::Refresh { lease: held.lease, growths: 0, chunks: 1 };
    assert_eq!(w.ask(b, refresh).1, Ok(Answer::Grown(grown)));
    assert_eq!(w.ask(b, Call::Refresh { lease: held.lease, growths: 1, chunks: 2 }).1, Ok(Answer::Done));
    assert_eq!(w.registry.people.members()[&b].bytes, 15, "each version counted once");
    // What a suspended segment asks for.
    let whole = wire::Grown { growths: 1, chunks: vec![10, 5], table: again.table.clone() };
    assert_eq!(w.ask(b, Call::Refresh { lease: held.lease, growths: 1, chunks: 0 }).1, Ok(Answer::Grown(whole)));
}

#[test]
fn repeated_growth_happens_once() {
    let (mut w, [a]) = Watched::with_members();
    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, commit).1 else { panic!("committed") };
    let growth = w.growth(lease, 0, &[5]);
    let (request, outcome, _) = w.ask(a, growth);
    assert_eq!(outcome, Ok(Answer::Done));
    let growth = w.growth(lease, 0, &[5]);
    let growth = Asked::from(growth);
    let donated = growth.received.all();
    let (outcome, effects) = w.ask_as(a, request, growth);
    assert_eq!((outcome, closed(&effects)), (Ok(Answer::Done), donated));
    assert_eq!(w.opened(a, "x").memory.bytes(), 15);
}

#[test]
fn only_the_committer_repeats_a_growth() {
    let (mut w, [a, b]) = Watched::with_members();
    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, commit).1 else { panic!("committed") };
    let theirs = w.opened(b, "x").lease;
    let growth = w.growth(lease, 0, &[5]);
    let (request, ..) = w.ask(a, growth);
    // Different members use the same request numbers.
    assert_eq!(w.ask_as(b, request, Call::Ping).0, Ok(Answer::Done));
    let growth = w.growth(theirs, 1, &[5]);
    let (outcome, _) = w.ask_as(b, request, Asked::from(growth));
    let why = NoGrowth::NotCommitter;
    assert_eq!(outcome, Err(Refusal::CannotGrow { name: called("x"), version: 1, why }));
}

#[test]
fn refused_growths_give_their_reason_and_change_nothing() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, frozen) = w.commit(a, "frozen", true);
    let cannot = |name: &str, why| Err(Refusal::CannotGrow { name: called(name), version: 1, why });
    assert_eq!(w.grow(a, frozen, 0, &[1]).0, cannot("frozen", NoGrowth::Fixed));
    assert_eq!(w.ask(a, Call::AwaitGrowth { lease: frozen, growths: 0 }).1, cannot("frozen", NoGrowth::Fixed));

    let commit = w.commit_call("x", true, true);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, commit).1 else { panic!("committed") };
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
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, commit).1 else { panic!("committed") };
    let over = |limit, allowed, needed| Err(Refusal::Limit { limit, allowed, needed, holders: Vec::new() });
    assert_eq!(w.grow(a, lease, 0, &[11]).0, over(Limit::Bytes, 20, 21));
    assert_eq!(w.grow(a, lease, 0, &[1, 1, 1]).0, over(Limit::Chunks, 3, 4));
    assert_eq!(w.grow(a, lease, 0, &[1, 1]).0, Ok(Answer::Done));
    assert_eq!(w.grow(a, lease, 1, &[]).0, Ok(Answer::Done), "only the table");
    assert_eq!(w.grow(a, lease, 2, &[]).0, Ok(Answer::Done));
    assert_eq!(w.grow(a, lease, 3, &[]).0, over(Limit::Growths, 3, 4));
}
