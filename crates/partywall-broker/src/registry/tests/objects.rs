// Holds 174.
//! The rules of timelines, semaphores and cells, one by one.

use partywall_wire::ObjectInfo;

use super::*;
use crate::registry::effect::ObjectAt;

const STALE: Outcome = Err(Refusal::Stale { what: Handle::Lease });

/// Returns the ends of cells, in order.
fn ends(effects: &[Effect]) -> Vec<(CellAt, TimelineEnding)> {
    let end = |effect: &Effect| match effect {
        Effect::EndCell { at, ending } => Some((*at, *ending)),
        _ => None,
    };
    effects.iter().filter_map(end).collect()
}

fn starts(effects: &[Effect]) -> Vec<(CellAt, Option<CellAt>, u32)> {
    let start = |effect: &Effect| match effect {
        Effect::StartCell { at, from, incarnation } => Some((*at, *from, *incarnation)),
        _ => None,
    };
    effects.iter().filter_map(start).collect()
}

fn returned(effects: &[Effect]) -> Vec<(FdId, u16)> {
    let permits = |effect: &Effect| match effect {
        Effect::Return { control, row } => vec![(*control, *row)],
        Effect::ClearRow { row, control } => control.iter().map(|semaphore| (*semaphore, *row)).collect(),
        _ => vec![],
    };
    effects.iter().flat_map(permits).collect()
}

/// Returns the guarded cells.
fn guarded(w: &Watched) -> Vec<CellAt> {
    w.registry.objects.cells.guarded().iter().map(|guarded| guarded.at).collect()
}

fn abandon(name: &str) -> Call {
    Call::AbandonTimeline { name: called(name) }
}

fn place(opened: &OpenedTimeline) -> (u32, u32) {
    (opened.slab, opened.cell)
}

#[test]
fn first_waiter_and_first_writer_share_a_cell() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let waiter = w.timeline(a, "x", false);
    let writer = w.timeline(b, "x", true);
    let late = w.timeline(c, "x", false);
    assert_eq!((place(&waiter), waiter.incarnation, waiter.writer), (place(&writer), 1, false));
    assert_eq!((place(&late), late.incarnation, writer.writer, late.writer), (place(&writer), 1, true, false));
    let exists = Err(Refusal::WriterExists { name: called("x"), pid: 102 });
    assert_eq!(w.open_timeline(a, "x", true), exists);
    assert_eq!(w.open_timeline(b, "x", true), exists, "also for the same process");
    assert_eq!(w.commit(a, "x", true).0, 1, "segments have names of their own");
}

#[test]
fn cell_is_initialised_before_it_is_announced() {
    let (mut w, [a]) = Watched::with_members();
    let open = Call::OpenTimeline { name: called("x"), writer: true, shared: false };
    let Asked { call, received } = w.provide(a, open);
    let effects = w.apply(Event::Request { member: a, request: RequestId(1), call, received });
    assert!(matches!(&effects[..], [Effect::StartCell { from: None, incarnation: 1, .. }, Effect::Reply { .. }]));
}

#[test]
fn writers_death_ends_waits_and_next_writer_continues() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let reader = w.timeline(a, "x", false);
    w.timeline(b, "x", true);
    assert_eq!(ends(&w.apply(Event::Suspected { member: b })), [], "a lost connection proves nothing");
    assert_eq!(ends(&w.apply(Event::HeldByChild { member: b })), []);
    let [(first, TimelineEnding::OwnerDied)] = ends(&w.apply(Event::Died { member: b }))[..] else { panic!("one end") };
    assert_eq!(w.follow(a, reader.lease).incarnation, 1, "there is no next one yet");

    let (_, outcome, effects) = w.ask(c, Call::OpenTimeline { name: called("x"), writer: true, shared: false });
    let Ok(Answer::Timeline(second)) = outcome else { panic!("{outcome:?}") };
    let [(at, Some(from), 2)] = starts(&effects)[..] else { panic!("{effects:?}") };
    assert!(from == first && at != first);
    let followed = w.follow(a, reader.lease);
    assert_eq!((place(&followed), followed.incarnation, followed.writer), (place(&second), 2, false));
    assert_eq!(
        ends(&w.apply(Event::Died { member: c })),
        [(at, TimelineEnding::OwnerDied)],
        "a second death behaves like the first"
    );
}

#[test]
fn writer_that_releases_or_leaves_has_closed() {
    let (mut w, [a, b, c]) = Watched::with_members();
    w.timeline(a, "x", false);
    let opened = w.timeline(b, "x", true);
    let effects = w.release(b, opened.lease);
    assert!(matches!(ends(&effects)[..], [(_, TimelineEnding::Closed)]));
    assert_eq!(w.ask(b, Call::Release { lease: opened.lease }).1, STALE);
    let again = w.timeline(c, "x", true);
    assert_eq!(again.incarnation, 2);
    let effects = w.ask(c, Call::Bye).2;
    assert!(matches!(ends(&effects)[..], [(_, TimelineEnding::Closed)]));
}

#[test]
fn timeline_ends_with_its_last_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    let one = w.timeline(a, "x", false);
    let two = w.timeline(b, "x", false);
    assert_eq!(ends(&w.release(a, one.lease)), []);
    let effects = w.release(b, two.lease);
    assert!(matches!(ends(&effects)[..], [(_, TimelineEnding::Abandoned)]), "a forgotten wait of a stream ends");
    assert!(w.registry.objects.timelines().is_empty());
    assert_eq!(w.timeline(a, "x", true).incarnation, 1);
}

#[test]
fn abandoning_ends_waits_and_the_writers_turn() {
    let (mut w, [a, b, c]) = Watched::with_members();
    let near = vec![];
    let is = vec![];
    let missing = Refusal::ObjectNotFound { kind: ObjectKind::Timeline, name: called("y"), near, is };
    assert_eq!(w.ask(a, abandon("y")).1, Err(missing));
    w.timeline(a, "wanted", false);
    let near = Refusal::ObjectNotFound {
        kind: ObjectKind::Timeline,
        name: called("wantde"),
        near: vec![called("wanted")],
        is: vec![],
    };
    assert_eq!(w.ask(a, abandon("wantde")).1, Err(near));

    let old = w.timeline(b, "x", true);
    let (_, outcome, effects) = w.ask(c, abandon("x"));
    assert_eq!(outcome, Ok(Answer::Done));
    assert!(matches!(ends(&effects)[..], [(_, TimelineEnding::Abandoned)]));
    assert_eq!(ends(&w.ask(c, abandon("x")).2), [], "it has ended");
    assert!(!w.follow(b, old.lease).writer);

    let new = w.timeline(c, "x", true);
    assert_eq!((new.incarnation, place(&new) == place(&old)), (2, false));
    assert_eq!(ends(&w.release(b, old.lease)), [], "the former writer is a reader");
    assert!(w.follow(c, new.lease).writer);
}

#[test]
fn repeated_request_gives_the_same_lease_and_abandons_once() {
    let (mut w, [a, b]) = Watched::with_members();
    let open = || Call::OpenTimeline { name: called("x"), writer: true, shared: false };
    let (request, first, _) = w.ask(a, open());
    assert_eq!(w.ask_as(a, request, open()).0, first);
    let open = || Call::OpenSemaphore { name: called("s"), maximum: 3, shared: false };
    let (request, first, _) = w.ask(a, open());
    assert_eq!(w.ask_as(a, request, open()).0, first);
    assert_eq!(w.registry.objects.leases().len(), 2);

    let (request, _, effects) = w.ask(b, abandon("x"));
    assert_eq!(ends(&effects).len(), 1);
    w.timeline(a, "x", true);
    let (outcome, effects) = w.ask_as(b, request, abandon("x"));
    assert_eq!((outcome, ends(&effects)), (Ok(Answer::Done), vec![]), "the new writer is not meant");
}

#[test]
fn cell_is_reused_only_when_no_process_can_see_or_write_it() {
    let bounds = Bounds { slabs: 1, rest: 0, ..UNBOUNDED };
    let mut w = Watched::new(bounds);
    let [a, b, c] = std::array::from_fn(|i| MemberId(i as u64 + 1));
    [a, b, c].into_iter().for_each(|member| w.join(member));
    let full = Err(Refusal::Limit { limit: Limit::Timelines, allowed: 4, needed: 5, holders: Vec::new() });

    // Three cells of four: a reader that does not follow keeps the cells that it had.
    let reader = w.timeline(a, "x", false);
    w.timeline(b, "x", true);
    w.apply(Event::Died { member: b });
    w.timeline(c, "x", true);
    let [(second, _)] = ends(&w.ask(a, abandon("x")).2)[..] else { panic!("one end") };
    let third = w.timeline(a, "x", true);
    assert_eq!((reader.cell, third.cell), (0, 2));
    w.timeline(a, "y", false);
    assert_eq!(w.open_timeline(a, "z", false), full);

    // The first cell has no readers any more.
    w.release(a, reader.lease);
    assert_eq!(w.timeline(a, "z", false).cell, 0);
    // c has a lease on the second, and its streams may still store in it.
    assert_eq!(w.open_timeline(a, "more", false), full);
    assert_eq!(guarded(&w), [second]);
    w.apply(Event::CellSettled { at: second });
    assert_eq!((w.open_timeline(a, "more", false), guarded(&w)), (full, vec![]));
    let lease = *w.registry.people.members()[&c].object_leases.first().unwrap();
    w.release(c, lease);
    assert_eq!(w.timeline(a, "more", false).cell, 1);
}

#[test]
fn writer_that_released_its_lease_promises_nothing_new() {
    let (mut w, [a, b]) = Watched::with_members();
    let settled = |effects: &[Effect]| effects.iter().any(|effect| matches!(effect, Effect::SettleCell(_)));
    w.timeline(a, "x", false);
    let reader = w.timeline(b, "x", false).lease;
    let writer = w.timeline(b, "x", true).lease;
    let [(cell, _)] = ends(&w.ask(a, abandon("x")).2)[..] else { panic!("one end") };
    assert!(!settled(&w.release(b, reader)));
    assert_eq!(w.registry.objects.cells.guarded(), [Guarded { at: cell, given_back: false }]);
    assert!(settled(&w.release(b, writer)), "an abandoned cell settles, too");
    assert_eq!(w.registry.objects.cells.guarded(), [Guarded { at: cell, given_back: true }]);
    w.apply(Event::CellSettled { at: cell });
    assert_eq!(w.registry.objects.cells.guarded(), []);
}

#[test]
fn cell_is_not_reused_before_its_writer_is_proved_dead() {
    let (mut w, [a, b]) = Watched::with_members();
    w.timeline(a, "x", false);
    let lease = w.timeline(b, "x", true).lease;
    let [(cell, _)] = ends(&w.release(b, lease))[..] else { panic!("one end") };
    assert_eq!(guarded(&w), [cell]);
    w.apply(Event::Suspected { member: b });
    w.apply(Event::Resumed { member: b });
    assert_eq!(guarded(&w), [cell]);
    w.apply(Event::Died { member: b });
    assert_eq!(guarded(&w), []);
}

#[test]
fn cell_of_departed_writer_is_reused_when_its_streams_are_done() {
    let mut w = Watched::new(Bounds { slabs: 1, cells: 2, rest: 0, ..UNBOUNDED });
    let [a, b] = [MemberId(1), MemberId(2)];
    w.join(a);
    w.join(b);
    let reader = w.timeline(a, "x", false);
    w.timeline(b, "x", true);
    let [(cell, _)] = ends(&w.ask(b, Call::Bye).2)[..] else { panic!("one end") };
    assert_eq!(guarded(&w), [cell]);
    w.release(a, reader.lease);
    assert_eq!(w.timeline(a, "y", false).cell, 1);
    assert!(matches!(w.open_timeline(a, "z", false), Err(Refusal::Limit { limit: Limit::Timelines, .. })));
    w.apply(Event::CellSettled { at: cell });
    assert_eq!(w.timeline(a, "z", false).cell, 0);
}

#[test]
fn writers_eviction_or_lost_context_ends_waits() {
    let (mut w, [a, b, c]) = Watched::with_members();
    w.timeline(a, "x", false);
    let lease = w.timeline(b, "x", true).lease;
    let evict = Call::Evict { whom: Whom::Member(b.0), kill: false };
    let [(evicted, TimelineEnding::Evicted)] = ends(&w.ask(a, evict).2)[..] else { panic!("one end") };
    assert!(matches!(w.ask(b, Call::Release { lease }).1, Err(Refusal::Evicted { .. })));
    assert_eq!(
        w.registry.control_needed(b, &Call::OpenSemaphore { name: called("s"), maximum: 1, shared: false }),
        None
    );
    let lease = w.timeline(c, "x", true).lease;
    let [(faulted, TimelineEnding::OwnerFaulted)] = ends(&w.ask(c, Call::ContextLost { gpu: None }).2)[..] else {
        panic!("one end")
    };
    assert_eq!(guarded(&w), [evicted, faulted], "both live on");

    // It cannot know whether its streams still wait; only its end proves that they do not.
    assert_eq!(w.ask(c, Call::Release { lease }).1, Ok(Answer::Done));
    assert!(w.registry.objects.leases().contains_key(&lease));
    w.apply(Event::Died { member: b });
    w.apply(Event::Died { member: c });
    assert_eq!((guarded(&w), w.registry.objects.leases().len()), (vec![], 1));
}

#[test]
fn unproven_death_quarantines_cells_and_permits() {
    let (mut w, [a, b]) = Watched::with_members();
    w.timeline(a, "x", false);
    w.semaphore(a, "s", 2);
    w.ask(b, Call::UsesGpu { mps: Some("/pipe".into()) }).1.unwrap();
    w.timeline(b, "x", true);
    w.semaphore(b, "s", 2);
    let row = w.registry.people.row(b).unwrap();
    let effects = w.apply(Event::Died { member: b });
    let [(cell, TimelineEnding::OwnerDied)] = ends(&effects)[..] else { panic!("waits end at once") };
    assert!(effects.contains(&Effect::Quarantined(b)) && returned(&effects).is_empty());
    assert_eq!(guarded(&w), [cell], "its kernels may run on");
    w.join(MemberId(3));
    assert_ne!(w.registry.people.row(MemberId(3)), Some(row), "the row still belongs to the dead member");

    w.clears_later = true;
    let effects = w.apply(Event::Expired { member: b });
    assert_eq!((returned(&effects).len(), guarded(&w)), (1, vec![]));
    w.join(MemberId(4));
    assert_ne!(w.registry.people.row(MemberId(4)), Some(row), "its permits are still being returned");
    w.apply(Event::RowCleared { row });
    w.join(MemberId(5));
    assert_eq!(w.registry.people.row(MemberId(5)), Some(row));
}

#[test]
fn cells_rest_before_they_are_used_again() {
    let mut w = Watched::new(Bounds { slabs: 2, cells: 3, rest: 2, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    let cells: Vec<_> = (0..9)
        .map(|_| {
            let opened = w.timeline(a, "x", false);
            w.release(a, opened.lease);
            opened.slab * 3 + opened.cell
        })
        .collect();
    assert_eq!(cells, [0, 1, 2, 0, 1, 2, 0, 1, 2], "the third is the first that rests long enough");
    let mut held = || w.timeline(a, &format!("{}", w.last_request), false);
    let held: Vec<_> = (0..6).map(|_| held()).map(|opened| opened.slab * 3 + opened.cell).collect();
    assert_eq!(held, [0, 3, 4, 5, 1, 2], "no other is left in the end");
}

#[test]
fn answer_brings_the_slab_of_the_timeline() {
    let (mut w, [a, b]) = Watched::with_members();
    let opened: Vec<_> = (0..9).map(|i| w.timeline(a, &format!("{i}"), false)).collect();
    assert_eq!(opened.iter().map(|o| o.slab).collect::<Vec<_>>(), [0, 0, 0, 0, 1, 1, 1, 1, 2]);
    for opened in &opened {
        let open =
            Call::OpenTimeline { name: called(&format!("{}", opened.lease.0 - 1)), writer: false, shared: false };
        w.last_request += 1;
        let request = RequestId(w.last_request);
        let effects = w.apply(Event::Request { member: b, request, call: open, received: Received::default() });
        let [Effect::Reply { outcome: Ok(_), fds, .. }] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!(*fds, [w.registry.objects.cells.slab(opened.slab).unwrap()]);
    }
}

#[test]
fn permits_return_with_a_members_last_lease() {
    let (mut w, [a, b]) = Watched::with_members();
    let ours = w.semaphore(a, "s", 3);
    let more = w.semaphore(a, "s", 3);
    let wrong = Refusal::WrongMaximum { name: called("s"), maximum: 3, asked: 4 };
    assert_eq!(w.open_semaphore(b, "s", 4), Err(wrong));
    w.semaphore(b, "s", 3);
    let memory = w.registry.objects.semaphores()[&called("s")].memory.fd;
    assert_eq!(returned(&w.release(a, ours)), []);
    assert_eq!(returned(&w.release(a, more)), [(memory, w.registry.people.row(a).unwrap())]);
    let row = w.registry.people.row(b).unwrap();
    w.semaphore(a, "s", 3);
    w.apply(Event::Suspected { member: b });
    assert_eq!(returned(&w.apply(Event::Died { member: b })), [(memory, row)]);
}

#[test]
fn semaphore_memory_is_freed_with_its_last_lease() {
    let (mut w, [a]) = Watched::with_members();
    let lease = w.semaphore(a, "s", 3);
    let memory = w.registry.objects.semaphores()[&called("s")].memory.fd;
    let effects = w.release(a, lease);
    assert_eq!((closed(&effects), returned(&effects)), (vec![memory], vec![]));
    w.semaphore(a, "s", 4);
}

#[test]
fn timelines_and_semaphores_are_bounded() {
    let mut w = Watched::new(Bounds { timelines: 1, semaphores: 1, fds: 2, member_leases: 3, bytes: 8, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    let over = |limit, allowed, needed| Err(Refusal::Limit { limit, allowed, needed, holders: Vec::new() });
    assert_eq!(w.open_semaphore(a, "s", 9), over(Limit::Bytes, 8, 9));
    w.semaphore(a, "s", 4);
    assert_eq!(w.open_semaphore(a, "t", 4), over(Limit::Semaphores, 1, 2));
    assert_eq!(w.open_timeline(a, "x", false), over(Limit::Bytes, 8, 4 + SLAB_BYTES));
    w.apply(Event::Died { member: a });
    w.join(a);
    w.timeline(a, "x", false);
    assert_eq!(w.open_timeline(a, "y", false), over(Limit::Timelines, 1, 2));
    w.semaphore(a, "s", 1);
    w.timeline(a, "x", false);
    assert_eq!(w.open_timeline(a, "x", false), over(Limit::LeasesOfMember, 3, 4));

    let mut w = Watched::new(Bounds { fds: 1, ..UNBOUNDED });
    w.join(a);
    w.timeline(a, "x", false);
    assert_eq!(w.open_semaphore(a, "s", 1), over(Limit::Fds, 1, 2));
    for i in 0..3 {
        w.timeline(a, &format!("{i}"), false);
    }
    assert_eq!(w.open_timeline(a, "y", false), over(Limit::Fds, 1, 2));
}

#[test]
fn timelines_and_semaphores_count_as_in_use() {
    let (mut w, [a, b]) = Watched::with_members();
    w.timeline(b, "x", true);
    w.semaphore(b, "s", 1);
    assert_eq!(w.ask(a, Call::Stop { force: false }).1, Err(Refusal::InUse { names: 2, members: 1 }));
    let Ok(Answer::Status(counts)) = w.ask(a, Call::Status).1 else { panic!("a status") };
    assert_eq!((counts.timelines, counts.semaphores, counts.leases, counts.fds), (1, 1, 2, 2));
    let Ok(Answer::Members { members, .. }) = w.ask(a, Call::Members { after: None }).1 else { panic!("members") };
    assert_eq!(members.iter().map(|row| row.leases).collect::<Vec<_>>(), [0, 2]);
    w.apply(Event::Died { member: b });
    assert_eq!(w.ask(a, Call::Stop { force: false }).2, [Effect::RemoveSocket, Effect::Stop]);
}

#[test]
fn listing_continues_from_timelines_to_semaphores() {
    let (mut w, [a, b]) = Watched::with_members();
    w.timeline(a, "t2", true);
    w.timeline(b, "t1", false);
    w.timeline(b, "t2", false);
    w.semaphore(a, "s", 2);
    let list = |w: &mut Watched, after: Option<(ObjectKind, &str)>| {
        let after = after.map(|(kind, name)| (kind, name.to_owned()));
        match w.ask(a, Call::Objects { after }).1 {
            Ok(Answer::Objects { objects, more: false }) => objects,
            other => panic!("{other:?}"),
        }
    };
    let names = |objects: Vec<ObjectInfo>| objects.iter().map(|row| row.name().to_string()).collect::<Vec<_>>();
    assert_eq!(names(list(&mut w, None)), ["t1", "t2", "s"]);
    assert_eq!(names(list(&mut w, Some((ObjectKind::Timeline, "t1")))), ["t2", "s"]);
    assert_eq!(names(list(&mut w, Some((ObjectKind::Timeline, "t2")))), ["s"]);
    assert!(list(&mut w, Some((ObjectKind::Semaphore, "s"))).is_empty());

    let inspect = |w: &mut Watched, kind, name| w.ask(b, Call::InspectObject { kind, name: called(name) }).1;
    let Ok(Answer::Object(detail)) = inspect(&mut w, ObjectKind::Timeline, "t2") else { panic!("it is there") };
    let ObjectInfo::Timeline(row) = detail.info else { panic!("a timeline") };
    let holders: Vec<_> = detail.holders.into_iter().map(|held| held.holder).collect();
    assert_eq!((row.writer, row.leases, row.incarnation), (Some(101), 2, 1));
    assert_eq!(holders, [holder(101, "member 1", 1, false), holder(102, "member 2", 1, false)]);
    assert!(matches!(&w.unread, Unread::Object(ObjectAt::Timeline(Some(_)), rows) if *rows == [0, 1]));
    let missing = inspect(&mut w, ObjectKind::Semaphore, "t2");
    assert!(matches!(missing, Err(Refusal::ObjectNotFound { kind: ObjectKind::Semaphore, .. })));
}

#[test]
fn pages_of_objects_fit_a_message_and_are_complete() {
    let (mut w, [a]) = Watched::with_members();
    // Applied without the audit, which would make this quadratic.
    for i in 0..600 {
        let name = called(&format!("{i:04}{}", "x".repeat(251)));
        let call = match i % 2 {
            0 => Call::OpenTimeline { name, writer: false, shared: false },
            _ => Call::OpenSemaphore { name, maximum: 1, shared: false },
        };
        let Asked { call, received } = w.provide(a, call);
        w.registry.apply(Event::Request { member: a, request: RequestId(i + 1), call, received }, 0);
    }
    let mut after = None;
    let mut seen = Vec::new();
    loop {
        let Granted(answer, ..) = w.registry.list_objects(a, after.clone());
        let Answer::Objects { objects, more } = answer else { panic!("objects") };
        assert!(objects.len() < 150 && !objects.is_empty());
        after = objects.last().map(|info| (info.kind(), info.name().to_owned()));
        seen.extend(after.clone().into_iter().map(|(kind, _)| kind));
        seen.resize(seen.len() + objects.len() - 1, ObjectKind::Timeline);
        if !more {
            break;
        }
    }
    assert_eq!(seen.len(), 600);
}
