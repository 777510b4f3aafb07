//! Limits.

use super::*;

#[test]
fn exceeded_limits_are_named_and_change_nothing() {
    let bounds = Bounds { bytes: 25, names: 2, fds: 4, waits: 1, leases: 6, member_leases: 5, ..UNBOUNDED };
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
    assert_eq!(w.open(a, "a", None, false), over(Limit::LeasesOfMember, 5, 6));
    let b = MemberId(2);
    w.join(b);
    w.opened(b, "a");
    assert_eq!(w.open(b, "a", None, false), over(Limit::Leases, 6, 7));
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
    let users = counts.users.iter().map(|user| (user.uid, user.pinned.clone(), user.limits[5])).collect::<Vec<_>>();
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
