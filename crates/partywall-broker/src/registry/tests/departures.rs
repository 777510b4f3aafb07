// Holds 105.
//! The order in which the holdings of a departed member are released.

use super::*;

/// A visible step of a departure, in the order in which the server carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// A request that waited for its build, or for the end of its name, is completed.
    WaitersNotified,
    TimelinesRescued,
    HoldingsReturned,
    MemoryFreed,
    Asked,
    Quarantined,
}

fn steps(effects: &[Effect]) -> Vec<Step> {
    let step = |effect: &Effect| match effect {
        Effect::Notify { .. } => Some(Step::WaitersNotified),
        Effect::EndCell { .. } => Some(Step::TimelinesRescued),
        Effect::Return { .. } | Effect::ClearRow { .. } => Some(Step::HoldingsReturned),
        Effect::Close(_) => Some(Step::MemoryFreed),
        Effect::Confirm(_) => Some(Step::Asked),
        Effect::Quarantined(_) => Some(Step::Quarantined),
        _ => None,
    };
    effects.iter().filter_map(step).collect()
}

/// A member that holds one of every kind of object, and another that waits for it.
fn busy(has_pidfd: bool) -> (Watched, MemberId, MemberId) {
    let (mut w, [_, survivor]) = Watched::with_members();
    let victim = MemberId(9);
    w.apply(Event::Joined { member: victim, identity: identity(victim, false, has_pidfd) });
    w.commit(victim, "owned", false);
    w.commit(victim, "kept", true);
    w.claim(victim, "building");
    let held = w.opened(survivor, "owned");
    for name in ["b", "a"] {
        let open = |writer| Call::OpenTimeline { name: called(name), writer, shared: false };
        let _ = w.ask(survivor, open(false));
        let _ = w.ask(victim, open(true));
        let semaphore = || Call::OpenSemaphore { name: called(name), maximum: 2, shared: false };
        let _ = w.ask(survivor, semaphore());
        let _ = w.ask(victim, semaphore());
    }
    w.commit(victim, "private", false);
    let _ = w.ask(survivor, Call::AwaitWithdrawal { lease: held.lease });
    let _ = w.ask(survivor, Call::OpenOrBuild { name: called("building") });
    (w, victim, survivor)
}

const NOTIFIED: [Step; 4] =
    [Step::WaitersNotified, Step::WaitersNotified, Step::TimelinesRescued, Step::TimelinesRescued];
const GIVEN_BACK: [Step; 3] = [Step::HoldingsReturned, Step::MemoryFreed, Step::Asked];

#[test]
fn death_notifies_waiters_ends_timelines_returns_holdings_then_frees_memory() {
    let (mut w, victim, _) = busy(true);
    let effects = w.apply(Event::Died { member: victim });
    assert_eq!(steps(&effects), [&NOTIFIED[..], &GIVEN_BACK].concat());
}

#[test]
fn goodbye_keeps_the_order_of_a_death() {
    let (mut w, victim, _) = busy(true);
    let (.., effects) = w.ask(victim, Call::Bye);
    assert_eq!(steps(&effects), [&NOTIFIED[..], &GIVEN_BACK].concat());
}

#[test]
fn unproven_death_notifies_others_and_quarantines_the_rest() {
    let (mut w, victim, survivor) = busy(false);
    let effects = w.apply(Event::Died { member: victim });
    assert_eq!(steps(&effects), [&NOTIFIED[..], &[Step::Quarantined]].concat());
    let (.., effects) = w.ask(survivor, Call::FreeUnproven { pid: None });
    assert_eq!(steps(&effects), GIVEN_BACK);

    let (mut w, victim, _) = busy(false);
    w.apply(Event::Died { member: victim });
    let effects = w.apply(Event::Expired { member: victim });
    assert_eq!(steps(&effects), GIVEN_BACK);
    assert_eq!(w.apply(Event::Expired { member: victim }), [], "once");
}

#[test]
fn eviction_notifies_at_once_and_returns_holdings_at_death() {
    let (mut w, victim, survivor) = busy(true);
    let (.., effects) = w.ask(survivor, Call::Evict { whom: Whom::Member(victim.0), kill: false });
    assert_eq!(steps(&effects), NOTIFIED);
    let effects = w.apply(Event::Died { member: victim });
    assert_eq!(steps(&effects), GIVEN_BACK);
}

#[test]
fn eviction_is_answered_after_it_has_taken_effect() {
    let (mut w, victim, survivor) = busy(true);
    let call = Call::Evict { whom: Whom::Member(victim.0), kill: true };
    let received = Received::default();
    let request = Event::Request { member: survivor, request: RequestId(1000), call, received };
    let effects = w.apply(request.clone());
    assert_eq!(steps(&effects), NOTIFIED);
    assert!(matches!(&effects[..], [.., Effect::Kill(_), Effect::Reply { .. }]), "{effects:?}");
    let repeated = w.apply(request);
    assert_eq!(repeated, effects[effects.len() - 1..], "the answer says again that the process was killed");
}

#[test]
fn lost_context_ends_timelines_at_once_and_the_rest_at_death() {
    let (mut w, victim, _) = busy(true);
    let (.., effects) = w.ask(victim, Call::ContextLost { gpu: None });
    assert_eq!(steps(&effects), NOTIFIED[2..]);
    let effects = w.apply(Event::Died { member: victim });
    assert_eq!(steps(&effects), [&NOTIFIED[..2], &GIVEN_BACK].concat());
}
