//! Limits.

use partywall_wire::Refusal;

use super::*;

#[test]
fn exceeded_limits_are_named_and_change_nothing() {
    let bounds =
        Bounds { bytes: 25, names: 2, fds: 4, waits: 2, member_waits: 1, leases: 6, member_leases: 5, ..UNBOUNDED };
    let mut w = Watched::new(bounds);
    let a = MemberId(1);
    w.join(a);
    let over = |limit, allowed, needed| Err(Refusal::Limit { limit, allowed, needed, holders: Vec::new() });
    let commit = |w: &mut Watched, name: &str, chunks: &[u64], table| {
        let memory = w.memory(chunks, table, false, Lifetime::Kept);
        w.ask(a, Asked::from(commit(called(name), memory))).1
    };
    assert!(commit(&mut w, "a", &[10], false).is_ok());
    assert_eq!(commit(&mut w, "b", &[10, 3], true), over(Limit::Bytes, 25, 26), "a table counts");
    assert_eq!(commit(&mut w, "b", &[u64::MAX, u64::MAX], false), over(Limit::Bytes, 25, u64::MAX));
    assert_eq!(commit(&mut w, "b", &[0; 4], false), over(Limit::Fds, 4, 5));
    assert!(commit(&mut w, "b", &[10], false).is_ok());
    assert_eq!(commit(&mut w, "c", &[], false), over(Limit::Names, 2, 3));
    assert!(commit(&mut w, "b", &[], false).is_ok(), "an existing name is not one more");
    assert_eq!(w.open(a, "q", None, true), Ok(Answer::Pending));
    assert_eq!(w.open(a, "r", None, true), over(Limit::WaitsOfMember, 1, 2));
    w.opened(a, "a");
    w.opened(a, "a");
    assert_eq!(w.open(a, "a", None, false), over(Limit::LeasesOfMember, 5, 6));
    let b = MemberId(2);
    w.join(b);
    assert_eq!(w.open(b, "q", None, true), Ok(Answer::Pending));
    let c = MemberId(3);
    w.join(c);
    assert_eq!(w.open(c, "q", None, true), over(Limit::Waits, 2, 3));
    w.opened(b, "a");
    assert_eq!(w.open(b, "a", None, false), over(Limit::Leases, 6, 7));
    assert_eq!(w.registry.people.totals().names, 2);
}

// Holds 86.
#[test]
fn pinned_memory_is_limited_on_each_node() {
    let guests = Quota { pinned: 6, ..NO_QUOTA };
    let mut w = Watched::new(Bounds { pinned: 25, guests, ..UNBOUNDED });
    let [a, b] = [MemberId(1), MemberId(2)];
    w.join(a);
    w.join_as(b, GUEST);
    let over = |needed| Err(Refusal::Limit { limit: Limit::Pinned(Some(1)), allowed: 25, needed, holders: Vec::new() });
    let commit = |w: &mut Watched, member, name: &str, place, bytes| {
        let memory = w.memory_of(Kind::Pinned, &[bytes], true, true, Lifetime::Kept);
        let memory = Arc::new(Memory { facts: VersionFacts { place, ..memory.facts }, ..Memory::clone(&memory) });
        w.ask(member, Asked::from(commit(called(name), memory))).1
    };
    let Ok(Answer::Committed { lease, .. }) = commit(&mut w, a, "a", NODE, 15) else { panic!("committed") };
    assert_eq!(commit(&mut w, a, "b", NODE, 11), over(26), "the table is elsewhere");
    assert!(commit(&mut w, a, "b", Place::Pinned(0), 25).is_ok(), "another node");
    assert!(commit(&mut w, a, "c", GPU, 100).is_ok(), "memory of a GPU");
    let of_user = |held| Refusal::Quota {
        uid: GUEST,
        limit: Limit::Pinned(Some(1)),
        allowed: 6,
        held,
        needed: 7,
        holders: Vec::new(),
    };
    assert_eq!(commit(&mut w, b, "d", NODE, 7), Err(of_user(0)));
    assert!(commit(&mut w, b, "d", NODE, 6).is_ok());
    // The same is said before the memory is allocated, and nothing is reserved by asking.
    let asks = |w: &mut Watched, member, bytes| w.ask(member, Call::CheckBytes { place: NODE, bytes }).1;
    assert_eq!(asks(&mut w, b, 1), Err(of_user(6)));
    assert_eq!(asks(&mut w, a, 5), over(26));
    assert_eq!([asks(&mut w, a, 4), asks(&mut w, a, 4)], [const { Ok(Answer::Done) }; 2]);
    let Ok(Answer::Status(counts)) = w.ask(b, Call::Status).1 else { panic!("a status") };
    let users = counts.users.iter().map(|user| (user.uid, user.pinned.clone(), user.limits.pinned)).collect::<Vec<_>>();
    assert_eq!(users, [(GUEST, vec![(1, 6)], 6)]);
    let grow = |w: &mut Watched, bytes| {
        let growth = Growth { kind: Kind::Pinned, ..w.growth(lease, 0, &[bytes]) };
        w.ask(a, growth).1
    };
    assert_eq!(grow(&mut w, 5), over(26));
    assert!(grow(&mut w, 4).is_ok());
    w.restart();
    assert_eq!(commit(&mut w, a, "b", NODE, 1), over(26));
}

// Holds 152.
#[test]
fn refusal_names_the_processes_that_have_most_and_none_that_its_reader_may_not_see() {
    let mut w = Watched::new(UNBOUNDED);
    let [a, b, c] = [1, 2, 3].map(MemberId);
    w.join(a);
    w.join_as(b, GUEST);
    w.join_as(c, GUEST);
    let memory = |w: &mut Watched, bytes| w.memory(&[bytes], true, false, Lifetime::Kept);
    for (member, name, bytes) in [(a, "a", 7), (b, "b", 5), (b, "b2", 5), (c, "c", 30)] {
        let commit = Commit { shared: true, ..commit(called(name), memory(&mut w, bytes)) };
        w.ask(member, commit).1.unwrap();
    }
    let node = w.memory_of(Kind::Pinned, &[9], true, true, Lifetime::Kept);
    let node = Arc::new(Memory { facts: VersionFacts { place: NODE, ..node.facts }, ..Memory::clone(&node) });
    w.ask(c, Asked::from(commit(called("n"), node))).1.unwrap();
    // Others have these open, too: but only processes of their user can close them.
    for (member, name) in [(b, "t"), (c, "t"), (c, "t2"), (a, "t2")] {
        let open = Call::OpenTimeline { name: called(name), writer: false, shared: true };
        w.ask(member, open).1.unwrap();
    }
    for (member, name) in [(b, "s"), (b, "s2")] {
        w.open_semaphore(member, name, 1).unwrap();
    }
    w.claim(b, "building");
    w.open(b, "later", None, true).unwrap();
    w.open(c, "later", None, true).unwrap();
    w.open(c, "much/later", None, true).unwrap();
    let named = |w: &Watched, limit, of: Option<u32>, asker| {
        let refusal = match of {
            Some(uid) => Refusal::Quota { uid, limit, allowed: 1, held: 1, needed: 2, holders: Vec::new() },
            None => Refusal::Limit { limit, allowed: 1, needed: 2, holders: Vec::new() },
        };
        let (Refusal::Quota { holders, .. } | Refusal::Limit { holders, .. }) = w.registry.with_holders(refusal, asker)
        else {
            panic!()
        };
        holders.into_iter().map(|holder| (holder.pid, holder.uid, holder.held)).collect::<Vec<_>>()
    };
    let [a, b, c] = [(pid(a), 0), (pid(b), GUEST), (pid(c), GUEST)];
    let of_guests = |limit, first: ((u32, u32), u64), second: ((u32, u32), u64)| {
        let row = |((pid, uid), held)| (pid, uid, held);
        assert_eq!(named(&w, limit, Some(GUEST), GUEST), [row(first), row(second)], "{limit:?}");
        assert_eq!(
            named(&w, limit, None, GUEST),
            [row(first), row(second)],
            "{limit:?}: the other user's are not shown"
        );
        assert_eq!(named(&w, limit, Some(GUEST), 0), [row(first), row(second)], "{limit:?}");
        let all = named(&w, limit, None, 0);
        assert!(all.contains(&row(first)) && all.contains(&row(second)), "{limit:?}: {all:?}");
    };
    of_guests(Limit::Names, (b, 6), (c, 4));
    // Chunks, tables of 3 bytes, slabs, and semaphores of a byte.
    of_guests(Limit::Bytes, (c, 39 + 2 * 3 + 2 * SLAB_BYTES), (b, 10 + 2 * 3 + SLAB_BYTES + 2));
    of_guests(Limit::Fds, (b, 7), (c, 6));
    of_guests(Limit::Timelines, (c, 2), (b, 1));
    of_guests(Limit::Waits, (c, 2), (b, 1));
    of_guests(Limit::Leases, (b, 5), (c, 4));
    of_guests(Limit::Clients, (b, 1), (c, 1));
    assert_eq!(named(&w, Limit::Semaphores, None, GUEST), [(b.0, b.1, 2)]);
    assert_eq!(named(&w, Limit::Pinned(Some(1)), Some(GUEST), GUEST), [(c.0, c.1, 9)]);
    assert_eq!(named(&w, Limit::Pinned(Some(0)), None, 0), []);
    assert_eq!(named(&w, Limit::Names, Some(0), 0), [(a.0, a.1, 1)]);
    for limit in [Limit::Chunks, Limit::LeasesOfMember, Limit::WaitsOfMember, Limit::Message] {
        assert_eq!(named(&w, limit, None, 0), [], "a limit of one process or object");
    }
}

#[test]
fn no_sum_overflows_even_without_a_limit() {
    let mut w = Watched::new(Bounds { bytes: u64::MAX, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    for _ in 0..3 {
        let memory = w.memory(&[u64::MAX, 7], true, false, Lifetime::Kept);
        let commit = commit(name("x"), memory);
        assert!(matches!(w.ask(a, commit).1, Err(Refusal::Limit { limit: Limit::Bytes, .. })));
    }
}
