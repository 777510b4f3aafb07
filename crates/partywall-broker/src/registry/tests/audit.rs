//! Invariants of the registry between any two events, recomputed from scratch.

use std::collections::{BTreeMap, BTreeSet};

use super::SLAB_BYTES;
use crate::registry::{
    CloseId, FdId, MemberId, Registry, RequestId,
    names::Want,
    people::{Holders, Life, Totals, User, Waiting},
    types::{ControlMemory, LeaseId, Lifetime, Named},
};

/// Panics if `registry` contradicts itself or the effects that it has returned so far.
pub(super) fn audit(
    registry: &Registry,
    open_fds: &BTreeSet<FdId>,
    pending: &BTreeSet<(MemberId, RequestId)>,
    unclosed: &BTreeSet<CloseId>,
) {
    assert!(registry.names.is_settled());
    let held_back = registry.closing.audit(unclosed);
    let mut totals = Totals::default();
    let mut users = BTreeMap::<u32, User>::new();
    let mut fds = BTreeSet::new();
    let mut waiting = BTreeSet::new();
    let mut claims = BTreeSet::new();
    let mut noticed = BTreeSet::new();
    for (name, entry) in registry.names.entries() {
        assert!(!entry.is_empty(), "{name} holds nothing");
        assert!(entry.latest.is_none_or(|latest| entry.versions.contains_key(&latest) && latest == entry.last));
        totals.names += u64::from(entry.latest.is_some());
        if let Some((_, latest)) = entry.latest() {
            users.entry(latest.uid).or_default().totals.names += 1;
        }
        if entry.versions.is_empty() {
            assert_eq!(entry.last, 0, "a name without versions counts from 1 again");
        }
        for (number, version) in &entry.versions {
            assert!((1..=entry.last).contains(number));
            assert!(entry.latest == Some(*number) || version.all_leases() > 0, "{name}@{number} has no holder");
            for (attachment, held) in &version.attached.segments {
                let segment = &registry.names.entries()[&held.name].versions[&held.version];
                assert_eq!(segment.queues[&(name.clone(), *number)], *attachment);
                assert!(version.memory.facts.named() == Named::Queue);
                assert!(segment.memory.control.is_none() && !segment.is_legacy());
            }
            for ((queue, of), attachment) in &version.queues {
                let held = &registry.names.entries()[queue].versions[of].attached.segments[attachment];
                assert_eq!((&held.name, held.version), (name, *number));
            }
            assert!(entry.latest != Some(*number) || !version.withdrawn);
            assert!(version.withdrawn || version.notice.is_none());
            if let Some((id, _)) = version.notice {
                noticed.insert(id);
            }
            totals.add(&version.memory);
            users.entry(version.uid).or_default().totals.add(&version.memory);
            for fd in version.memory.fds() {
                assert!(fds.insert(fd), "{fd} belongs to two versions");
            }
            let memory = &version.memory;
            assert!(version.growths == 0 || (memory.facts.mutable && memory.bytes() <= memory.facts.reserved));
            if let Some(owner) = version.owner {
                let lease = registry.names.leases().get(&owner).expect("a lease that is given back owns nothing");
                assert!(lease.name == *name && lease.version == *number);
            }
            let mut holders = Holders::default();
            for lease in registry.names.leases().values().filter(|l| l.name == *name && l.version == *number) {
                holders.add(lease.member);
            }
            assert_eq!(version.holders, holders);
            if entry.latest == Some(*number) && version.memory.facts.lifetime == Lifetime::Owned {
                let is_kept =
                    |keeper: MemberId| registry.people.members()[&keeper].names.contains(&(name.clone(), *number));
                assert!(version.keeper.map_or(version.owner.is_some(), is_kept), "{name}@{number} outlived its owner");
            }
            if entry.latest == Some(*number) && version.memory.facts.lifetime == Lifetime::Shared {
                assert!(!version.holders.is_empty(), "{name}@{number} outlived its users");
            }
        }
        if let Some(claim) = entry.claim {
            assert_eq!(registry.names.claims()[&claim].name, *name);
            claims.insert(claim);
        }
        for (id, wait) in &entry.waits {
            assert!(waiting.insert((wait.member, wait.ticket)));
            assert_eq!(registry.people.members()[&wait.member].waits[&wait.ticket], (*id, Waiting::For(name.clone())));
            match wait.want {
                Want::Open { version: None, .. } => assert_eq!(entry.latest, None),
                Want::Open { version: Some(version), .. } => assert!(version > entry.last),
                Want::Build => assert!(entry.latest.is_none() && entry.claim.is_some()),
                Want::Withdrawal(lease) => {
                    let lease = &registry.names.leases()[&lease];
                    assert!(lease.member == wait.member && lease.name == *name);
                    assert!(lease.awaited_by.contains(&wait.ticket));
                    assert!(!entry.versions[&lease.version].withdrawn);
                }
                Want::Growth(lease) => {
                    let lease = &registry.names.leases()[&lease];
                    assert!(lease.member == wait.member && lease.name == *name);
                    assert!(lease.awaited_by.contains(&wait.ticket));
                    let version = &entry.versions[&lease.version];
                    assert!(version.owner.is_some() && version.memory.facts.reserved > 0, "nothing to wait for");
                }
            }
        }
    }
    for slab in registry.objects.cells.parts().2.values() {
        let memory = ControlMemory { fd: slab.memory.fd, bytes: SLAB_BYTES };
        totals.add_control(memory);
        users.entry(slab.uid).or_default().totals.add_control(memory);
        assert!(fds.insert(memory.fd), "{} is in two places", memory.fd);
    }
    for semaphore in registry.objects.semaphores().values() {
        totals.add_control(semaphore.memory);
        let user = users.entry(semaphore.owned.uid).or_default();
        user.totals.add_control(semaphore.memory);
        user.semaphores += 1;
        assert!(fds.insert(semaphore.memory.fd), "{} is in two places", semaphore.memory.fd);
    }
    for (id, watcher) in registry.log.watchers() {
        assert!(waiting.insert((watcher.member, watcher.ticket)));
        assert_eq!(registry.people.members()[&watcher.member].waits[&watcher.ticket], (*id, Waiting::Watching));
    }
    assert!(
        registry.names.withdrawals().keys().all(|id| noticed.contains(id)),
        "a withdrawal ends with its last version"
    );
    for timeline in registry.objects.timelines().values() {
        users.entry(timeline.owned.uid).or_default().timelines += 1;
    }
    for claim in registry.names.claims().values() {
        users.entry(registry.people.uid_of(claim.member)).or_default().claims += 1;
    }
    for (id, member) in registry.people.members() {
        if member.all_leases() > 0 {
            users.entry(registry.people.uid_of(*id)).or_default().leases += member.all_leases();
        }
        if !member.waits.is_empty() {
            users.entry(registry.people.uid_of(*id)).or_default().waits += member.waits.len() as u64;
        }
    }
    assert_eq!(*registry.people.totals(), totals);
    for (uid, user) in registry.people.users() {
        let counted = users.remove(uid).unwrap_or_default();
        assert_eq!(*user, User { simulated: user.simulated, ..counted }, "what user {uid} has");
    }
    assert!(users.is_empty());
    assert!(fds.is_disjoint(&held_back));
    fds.extend(held_back);
    assert_eq!(fds, *open_fds, "file descriptors in versions and control memory, and those that the server holds");
    assert_eq!(waiting, *pending, "requests that wait, and requests that were answered with `Pending`");
    assert_eq!(registry.names.claims().keys().copied().collect::<BTreeSet<_>>(), claims, "one claim per name");

    let rows: BTreeSet<_> = registry.people.members().values().map(|member| member.row).collect();
    assert_eq!(rows.len(), registry.people.members().len(), "one row per member");
    let mut leases = 0;
    let mut claimed = 0;
    let mut waits = 0;
    for (id, member) in registry.people.members() {
        leases += member.version_leases.len();
        claimed += member.claims.len();
        waits += member.waits.len();
        assert!(member.version_leases.iter().all(|lease| registry.names.leases()[lease].member == *id));
        assert!(member.claims.iter().all(|claim| registry.names.claims()[claim].member == *id));
        assert!(
            !matches!(member.life, Life::Suspect | Life::Unproven) || member.waits.is_empty(),
            "a member without a connection waits for nothing"
        );
        assert!(member.eviction.is_none() || member.waits.is_empty() && member.claims.is_empty());
        if member.life == Life::Unproven {
            assert!(member.doubt().is_some() && member.claims.is_empty());
        }
        let owns = |lease: &LeaseId| {
            let held = &registry.names.leases()[lease];
            let version = &registry.names.entries()[&held.name].versions[&held.version];
            version.ends_with(*lease) && !version.withdrawn
        };
        let is_latest = |lease: &LeaseId| {
            let held = &registry.names.leases()[lease];
            registry.names.entries()[&held.name].latest == Some(held.version)
        };
        if member.eviction.is_some() || member.life == Life::Unproven {
            assert!(
                !member.version_leases.iter().any(|lease| owns(lease) && is_latest(lease)),
                "it owns nothing any more"
            );
        }
        let held: BTreeMap<_, _> = member
            .version_leases
            .iter()
            .map(|lease| &registry.names.leases()[lease])
            .map(|l| ((&l.name, l.version), registry.names.entries()[&l.name].versions[&l.version].memory.bytes()))
            .collect();
        assert_eq!(member.bytes, held.values().sum::<u64>());
    }
    // Every lease, claim and wait belongs to a member, because the numbers agree.
    assert_eq!((leases, claimed, waits), (registry.names.leases().len(), registry.names.claims().len(), waiting.len()));
    let awaited: usize = registry.names.leases().values().map(|lease| lease.awaited_by.len()).sum();
    let awaiting = registry
        .names
        .entries()
        .values()
        .flat_map(|e| e.waits.values())
        .filter(|w| matches!(w.want, Want::Withdrawal(_) | Want::Growth(_)));
    assert_eq!(awaited, awaiting.count());
}
