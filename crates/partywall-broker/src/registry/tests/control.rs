//! Invariants of timelines, semaphores and their memory between any two events, recomputed from scratch.

use std::collections::{BTreeMap, BTreeSet};

use crate::registry::{
    Registry,
    objects::{LeasedObject, Writing},
    people::Holders,
    types::{CellAt, CellId, Name},
};

/// Panics if `registry` contradicts itself or the effects that it has returned so far.
pub(super) fn audit(registry: &Registry, live_cells: &BTreeSet<CellAt>) {
    let cells = &registry.objects.cells;
    let (used, restless, _) = cells.parts();
    let mut uses = BTreeMap::<CellId, u64>::new();
    let mut timelines = BTreeMap::<&Name, Holders>::new();
    let mut semaphores = BTreeMap::<&Name, Holders>::new();
    for (id, hold) in registry.objects.leases() {
        assert!(registry.people.members()[&hold.member].object_leases.contains(id), "lease {id} has no holder");
        assert!(!registry.names.leases().contains_key(id), "lease {id} is on two things");
        let holders = match &hold.object {
            LeasedObject::Timeline { name, cells } => {
                assert!(!cells.is_empty() && cells.iter().collect::<BTreeSet<_>>().len() == cells.len());
                cells.iter().for_each(|cell| *uses.entry(*cell).or_default() += 1);
                timelines.entry(name).or_default()
            }
            LeasedObject::Semaphore { name } => semaphores.entry(name).or_default(),
        };
        holders.add(hold.member);
    }
    let held: usize = registry.people.members().values().map(|member| member.object_leases.len()).sum();
    assert_eq!(held, registry.objects.leases().len());

    assert!(
        timelines.keys().copied().eq(registry.objects.timelines().keys()),
        "a timeline is there as long as a lease is"
    );
    for (name, timeline) in registry.objects.timelines() {
        assert_eq!(timeline.holders, timelines[name]);
        *uses.entry(timeline.present).or_default() += 1;
        let present = &used[&timeline.present];
        assert_eq!(timeline.ended, present.ended);
        if let Some(writer) = timeline.writer {
            assert!(!timeline.ended);
            let hold = &registry.objects.leases()[&writer];
            assert_eq!(present.writing, Writing::By(hold.member));
            assert!(matches!(&hold.object, LeasedObject::Timeline { cells, .. } if cells.contains(&timeline.present)));
        } else {
            assert!(timeline.ended || present.writing == Writing::Over, "{name} has no writer");
        }
    }
    assert!(
        semaphores.keys().copied().eq(registry.objects.semaphores().keys()),
        "a semaphore is there as long as a lease is"
    );
    for (name, semaphore) in registry.objects.semaphores() {
        assert_eq!(semaphore.holders, semaphores[name]);
    }

    let resting: BTreeSet<_> = cells.resting().collect();
    assert_eq!(resting.len(), cells.resting().count(), "a cell rests twice");
    let taken: BTreeSet<_> = cells.taken().collect();
    for id in &taken {
        assert_ne!(used.contains_key(id), resting.contains(id), "cell {id} is used or rests");
    }
    assert_eq!(used.len() + resting.len(), taken.len());
    for (name, timeline) in registry.objects.timelines() {
        let area = cells.area(timeline.owned, Some(timeline.present));
        assert_eq!(area, cells.area_of(timeline.present), "{name} is in the right slab");
    }
    for (id, cell) in used {
        assert_eq!(cell.uses, uses.get(id).copied().unwrap_or(0), "uses of cell {id}");
        assert!(cell.uses > 0 || cell.writing != Writing::Over, "cell {id} ought to rest");
        assert_eq!(restless.contains(id), cell.ended && cell.writing != Writing::Over);
        let written_by = registry.people.members().iter().filter(|(_, member)| member.cells.contains(id));
        let written_by: Vec<_> = written_by.map(|(member, _)| Writing::By(*member)).collect();
        match cell.writing {
            Writing::By(_) => assert_eq!(written_by, [cell.writing]),
            Writing::Over | Writing::Unobserved => assert_eq!(written_by, []),
        }
        assert!(cell.ended || cell.writing != Writing::Unobserved);
        if let Some(lease) = cell.writer {
            assert!(
                matches!(&registry.objects.leases()[&lease].object, LeasedObject::Timeline { cells, .. } if cells.contains(id))
            );
        }
    }
    assert!(uses.keys().all(|id| used.contains_key(id)));
    assert!(registry.people.members().values().flat_map(|member| &member.cells).all(|id| used.contains_key(id)));
    let not_ended = used.iter().filter(|(_, cell)| !cell.ended).filter_map(|(id, _)| cells.at(*id));
    assert_eq!(not_ended.collect::<BTreeSet<_>>(), *live_cells, "cells that have not ended, here and at the server");
}
