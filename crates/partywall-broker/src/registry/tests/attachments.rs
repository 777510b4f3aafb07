//! The rules of segments that queues hold, one by one.

use partywall_shm::queue::{InUse, TaskId};

use super::*;

/// Creates a queue that is not kept, and returns the lease of its creator.
fn create_queue(w: &mut Watched, member: MemberId, name: &str) -> LeaseId {
    let memory = w.memory(&[10], false, true, Lifetime::Shared);
    let memory = w.with_control(&memory, queue());
    match w.ask(member, Asked::from(commit(called(name), memory))).1 {
        Ok(Answer::Committed { version: 1, lease }) => lease,
        other => panic!("{other:?}"),
    }
}

fn attach(w: &mut Watched, member: MemberId, queue: LeaseId, segment: LeaseId) -> Outcome {
    w.ask(member, Call::Attach { queue, segment }).1
}

fn attached(w: &mut Watched, member: MemberId, queue: LeaseId, segment: LeaseId) -> u32 {
    match attach(w, member, queue, segment) {
        Ok(Answer::Attached { attachment }) => attachment,
        other => panic!("{other:?}"),
    }
}

fn detach(w: &mut Watched, member: MemberId, queue: LeaseId, attachment: u32) -> (Outcome, Vec<Effect>) {
    let (_, outcome, effects) = w.ask(member, Call::DetachSegment { queue, attachment });
    (outcome, effects)
}

fn open_attached(w: &mut Watched, member: MemberId, queue: LeaseId, attachment: u32) -> Outcome {
    w.ask(member, Call::OpenAttached { queue, attachment }).1
}

#[test]
fn queue_holds_its_segment_after_the_death_of_its_owner_and_attacher() {
    let (mut w, [owner, attacher, worker]) = Watched::with_members();
    let (_, segment) = w.commit(owner, "weights", false);
    create_queue(&mut w, attacher, "q");
    let queue = w.opened(attacher, "q").lease;
    let at_worker = w.opened(worker, "q").lease;
    let opened = w.opened(attacher, "weights");
    let attachment = attached(&mut w, attacher, queue, opened.lease);
    assert_eq!(closed(&w.release(owner, segment)), []);
    assert_eq!(closed(&w.apply(Event::Died { member: attacher })), []);
    assert!(matches!(w.open(worker, "weights", None, false), Err(Refusal::NotFound { .. })), "its name is gone");
    match open_attached(&mut w, worker, at_worker, attachment) {
        Ok(Answer::Opened(again)) => {
            let again = w.seen(again);
            assert_eq!((&again.memory, again.version), (&opened.memory, 1));
            assert_eq!(closed(&w.release(worker, again.lease)), []);
        }
        other => panic!("{other:?}"),
    }
    let effects = w.apply(Event::Died { member: worker });
    let freed = closed(&effects);
    assert!(opened.memory.fds().iter().all(|fd| freed.contains(fd)), "the segment goes with the queue");
    assert_eq!(w.open_fds.len(), 0);
}

#[test]
fn segment_is_attached_once_and_each_attachment_has_a_number_of_its_own() {
    let (mut w, [a, b]) = Watched::with_members();
    let queue = create_queue(&mut w, a, "q");
    let other = w.opened(b, "q").lease;
    let (_, first) = w.commit(a, "x", true);
    let (_, second) = w.commit(a, "y", true);
    let call = Call::Attach { queue, segment: first };
    let (request, outcome, effects) = w.ask(a, call.clone());
    assert_eq!((outcome, effects.len()), (Ok(Answer::Attached { attachment: 0 }), 1), "and the table says so");
    assert_eq!(w.ask_as(a, request, call), (Ok(Answer::Attached { attachment: 0 }), vec![]));
    let at_b = w.opened(b, "x").lease;
    assert_eq!(attached(&mut w, b, other, at_b), 0, "another member finds it attached");
    assert_eq!(attached(&mut w, a, queue, second), 1);
    assert_eq!(detach(&mut w, b, other, 0).0, Ok(Answer::Done), "any member may end it");
    let gone = Refusal::NotAttached { queue: called("q"), attachment: 0 };
    assert_eq!(open_attached(&mut w, a, queue, 0), Err(gone.clone()));
    assert_eq!(detach(&mut w, a, queue, 0).0, Err(gone));
    assert_eq!(attached(&mut w, a, queue, first), 32, "in the same entry of the table");
}

#[test]
fn detached_segment_is_freed_unless_something_else_keeps_it() {
    let (mut w, [a]) = Watched::with_members();
    let queue = create_queue(&mut w, a, "q");
    let (_, lease) = w.commit(a, "x", false);
    let memory = w.opened(a, "x").memory;
    attached(&mut w, a, queue, lease);
    let again = w.opened(a, "x").lease;
    let removed = w.ask(a, Call::Remove { name: called("x"), deadline: None }).1;
    let Ok(Answer::Removed { bytes_kept: 10, queues, .. }) = removed else { panic!("{removed:?}") };
    assert_eq!((queues.len(), &queues[0].name), (1, &"q".to_owned()));
    let held: Vec<_> =
        w.registry.people.members()[&a].version_leases.iter().copied().filter(|held| *held != queue).collect();
    held.into_iter().for_each(|lease| assert_eq!(closed(&w.release(a, lease)), [], "{again} among them"));
    let in_use = InUse { tasks: 2, first: TaskId { index: 3, generation: 4 } };
    let call = Call::DetachSegment { queue, attachment: 0 };
    assert!(w.registry.to_detach(a, &call).is_some());
    let refused = Refusal::AttachmentInUse {
        queue: called("q"),
        queue_version: 1,
        name: called("x"),
        version: 1,
        tasks: 2,
        first: (3, 4),
    };
    let received = Received { in_use: Some(in_use), ..Received::default() };
    assert_eq!(w.ask(a, Asked { call, received }).1, Err(refused));
    let (outcome, effects) = detach(&mut w, a, queue, 0);
    assert_eq!((outcome, closed(&effects)), (Ok(Answer::Done), memory.fds()));
}

#[test]
fn queue_holds_a_segment_whose_name_ends_with_its_last_user() {
    let (mut w, [a]) = Watched::with_members();
    let queue = create_queue(&mut w, a, "q");
    let memory = w.memory(&[10], false, true, Lifetime::Shared);
    let fds = memory.fds();
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Asked::from(commit(called("x"), memory))).1 else {
        panic!("it is committed")
    };
    let attachment = attached(&mut w, a, queue, lease);
    assert_eq!(closed(&w.release(a, lease)), []);
    assert!(matches!(w.open(a, "x", None, false), Err(Refusal::NotFound { .. })), "nobody has it open");
    let (outcome, effects) = detach(&mut w, a, queue, attachment);
    assert_eq!((outcome, closed(&effects)), (Ok(Answer::Done), fds));
}

#[test]
fn only_segments_that_the_broker_keeps_are_attached() {
    let (mut w, [a, b]) = Watched::with_members();
    let queue = create_queue(&mut w, a, "q");
    let other = create_queue(&mut w, a, "r");
    let (_, segment) = w.commit(a, "x", true);
    let not_a_segment = Refusal::invalid("a queue holds nothing but segments");
    assert_eq!(attach(&mut w, a, queue, other), Err(not_a_segment));
    assert_eq!(attach(&mut w, a, segment, segment), Err(Refusal::invalid("only a queue has segments attached")));
    assert_eq!(
        attach(&mut w, b, queue, segment),
        Err(Refusal::Stale { what: Handle::Lease }),
        "leases of another member"
    );
    let memory = w.memory_of(Kind::Legacy, &[10], false, true, Lifetime::Owned);
    let Ok(Answer::Committed { lease, .. }) = w.ask(a, Asked::from(commit(called("legacy"), memory))).1 else {
        panic!("it is committed")
    };
    let refused = Refusal::CannotHold { name: called("legacy"), version: 1 };
    assert_eq!(attach(&mut w, a, queue, lease), Err(refused));
    for call in [
        Call::DetachSegment { queue: segment, attachment: 0 },
        Call::DetachSegment { queue, attachment: 0 },
        Call::Ping,
    ] {
        assert_eq!(w.registry.to_detach(a, &call), None, "{call:?}");
    }
}

#[test]
fn queue_has_a_limit_of_attachments() {
    let mut w = Watched::new(Bounds { attachments: 1, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    let queue = create_queue(&mut w, a, "q");
    let (_, first) = w.commit(a, "x", true);
    let (_, second) = w.commit(a, "y", true);
    attached(&mut w, a, queue, first);
    let full = Refusal::Limit { limit: Limit::Attachments, allowed: 1, needed: 2, holders: Vec::new() };
    assert_eq!(attach(&mut w, a, queue, second), Err(full));
    assert_eq!(attached(&mut w, a, queue, first), 0, "it is attached already");
}

#[test]
fn listings_say_which_queue_holds_a_segment() {
    let (mut w, [a]) = Watched::with_members();
    let queue = create_queue(&mut w, a, "q");
    let (_, segment) = w.commit(a, "x", true);
    attached(&mut w, a, queue, segment);
    let mut inspect = |name| match w.ask(a, Call::Inspect { name: called(name), version: None }).1 {
        Ok(Answer::Info(info)) => *info,
        other => panic!("{other:?}"),
    };
    let info = inspect("x");
    assert_eq!((info.queues[0].name.as_str(), info.version.leases, info.holders[0].leases), ("q", 2, 1));
    inspect("q");
    let Unread::Version { attached, .. } = &w.unread else { panic!("{:?}", w.unread) };
    let held = &attached[0];
    assert_eq!((held.name.as_str(), held.version, held.bytes, held.attachment), ("x", 1, 10, 0));
}
