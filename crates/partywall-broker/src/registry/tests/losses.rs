// Holds 14.
//! GPUs that have lost their memory.

use partywall_wire::Happened;

use super::*;
use crate::registry::types::{Change, Ending, Staleness};

const LOST: Place = GPU;

fn on_gpu(w: &mut Watched, member: MemberId, name: &str, control: Option<Control>) -> FdId {
    let memory = w.memory_of(Kind::Vmm, &[10], false, control.is_some(), Lifetime::Kept);
    let memory = control.map_or(Arc::clone(&memory), |shape| w.with_control(&memory, shape));
    let chunk = memory.chunks[0].fd.unwrap();
    w.ask(member, Asked::from(commit(called(name), memory))).1.unwrap();
    chunk
}

fn lose(w: &mut Watched, chunks: &[FdId]) -> Vec<Effect> {
    w.apply(Event::DeviceLost { place: LOST, chunks: chunks.to_vec() })
}

fn stale(effects: &[Effect]) -> Vec<(MemberId, LeaseId)> {
    let stale = effects.iter().filter_map(|effect| match effect {
        Effect::Stale { member, leases } => Some(leases.iter().map(|(lease, why)| {
            assert_eq!(*why, Staleness::DeviceLost(LOST));
            (*member, *lease)
        })),
        _ => None,
    });
    stale.flatten().collect()
}

#[test]
fn lost_names_end_with_the_reason_and_others_go_on() {
    let (mut w, [a, b]) = Watched::with_members();
    let lost = on_gpu(&mut w, a, "lost", None);
    on_gpu(&mut w, a, "found", None);
    w.commit(a, "host", true);
    let lease = w.opened(b, "lost").lease;
    w.opened(b, "found");
    let effects = lose(&mut w, &[lost]);
    assert_eq!(stale(&effects).len(), 2, "the committer's and the reader's: {effects:?}");
    assert!(stale(&effects).contains(&(b, lease)));
    let ended = w.open(b, "lost", None, false);
    assert!(matches!(&ended, Err(Refusal::Ended { end, .. }) if end.ending == Ending::DeviceLost(LOST)), "{ended:?}");
    let refused = Refusal::DeviceLost { name: called("lost"), version: 1, place: LOST };
    assert_eq!(w.open(b, "lost", Some(1), false), Err(refused));
    w.opened(b, "found");
    w.opened(b, "host");
    assert_eq!(lose(&mut w, &[lost]), [], "once");
    // The name can have another version, on the same GPU.
    let again = on_gpu(&mut w, a, "lost", None);
    assert_eq!(w.opened(b, "lost").version, 2);
    assert_eq!(w.registry.chunks_at(LOST).len(), 2);
    assert!(w.registry.chunks_at(LOST).contains(&again));
}

#[test]
fn waits_for_the_withdrawal_of_a_lost_version_end() {
    let (mut w, [a, b]) = Watched::with_members();
    let old = on_gpu(&mut w, a, "x", None);
    let lease = w.opened(b, "x").lease;
    on_gpu(&mut w, a, "x", None);
    let (ticket, pending, _) = w.ask(b, Call::AwaitWithdrawal { lease });
    assert_eq!(pending, Ok(Answer::Pending));
    // Not the latest version, so the name goes on.
    let effects = lose(&mut w, &[old]);
    assert_eq!(notices(&effects), [(b, ticket, Ok(Answer::Withdrawn { notice: None }))]);
    assert_eq!(w.opened(b, "x").version, 2);
    assert!(matches!(w.open(b, "x", Some(1), false), Err(Refusal::DeviceLost { version: 1, .. })));
}

#[test]
fn readers_of_a_lost_topic_are_detached() {
    let (mut w, [a, b]) = Watched::with_members();
    let lost = on_gpu(&mut w, a, "topic", Some(control(4, Some(1))));
    w.opened(b, "topic");
    let effects = lose(&mut w, &[lost]);
    assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::Detach { .. })).count(), 2, "{effects:?}");
}

#[test]
fn memory_of_a_lost_version_is_closed_with_its_last_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    let lost = on_gpu(&mut w, a, "x", None);
    let lease = w.opened(b, "x").lease;
    let effects = lose(&mut w, &[lost]);
    assert_eq!(closed(&effects), []);
    w.apply(Event::Died { member: a });
    assert_eq!(closed(&w.release(b, lease)), [lost]);
    assert_eq!(w.registry.chunks_at(LOST), []);
}

#[test]
fn members_that_resume_learn_of_the_loss_again() {
    let (mut w, [a, b]) = Watched::with_members();
    let lost = on_gpu(&mut w, a, "x", None);
    let lease = w.opened(b, "x").lease;
    w.apply(Event::Suspected { member: b });
    lose(&mut w, &[lost]);
    w.restart();
    assert_eq!(stale(&w.apply(Event::Resumed { member: b })), [(b, lease)]);
}

#[test]
fn watchers_learn_of_the_loss() {
    let (mut w, [a, b]) = Watched::with_members();
    let lost = on_gpu(&mut w, a, "x", None);
    let watch = Call::Watch { pattern: "*".into(), after: point(2) };
    let (ticket, pending, _) = w.ask(b, watch);
    assert_eq!(pending, Ok(Answer::Pending));
    let effects = lose(&mut w, &[lost]);
    let notices = notices(&effects);
    let [(_, of, Ok(Answer::Happened(Happened { events, .. })))] = &notices[..] else { panic!("{effects:?}") };
    assert_eq!((*of, events[0].change), (ticket, Change::DeviceLost { place: LOST }));
}
