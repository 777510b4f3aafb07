//! Timelines and semaphores in answers. The numbers are read from control memory.

use partywall_wire as wire;

use crate::{
    registry::effect::{Holder, ObjectRow, OpenedTimeline},
    server::{
        control::{Control, SlotTable},
        translate::holder,
    },
};

pub(super) fn opened(opened: OpenedTimeline) -> wire::OpenedTimeline {
    let OpenedTimeline { lease, slab, cell, incarnation, writer } = opened;
    wire::OpenedTimeline { lease, slab, cell, incarnation, writer }
}

pub(super) fn row(row: &ObjectRow, control: &Control) -> wire::ObjectInfo {
    match row {
        ObjectRow::Timeline(row) => {
            let standing = row.at.and_then(|at| control.standing(at));
            wire::ObjectInfo::Timeline(wire::TimelineInfo {
                name: row.name.to_string(),
                incarnation: row.incarnation,
                writer: row.writer,
                value: standing.map_or(0, |standing| standing.value),
                announced: standing.map_or(0, |standing| standing.announced),
                ending: standing.and_then(|standing| standing.ending),
                leases: row.leases,
                uid: row.uid,
                shared: row.shared,
            })
        }
        ObjectRow::Semaphore(row) => {
            let permits = control.permits(row.memory);
            wire::ObjectInfo::Semaphore(wire::SemaphoreInfo {
                name: row.name.to_string(),
                maximum: row.maximum,
                // Permits that were handed to a waiter count as held.
                held: permits.held + permits.handed,
                waiting: permits.waiting,
                leases: row.leases,
                uid: row.uid,
                shared: row.shared,
            })
        }
    }
}

pub(super) fn detail(row: &ObjectRow, holders: &[Holder], control: &Control) -> wire::ObjectDetail {
    let slots = match row {
        ObjectRow::Semaphore(row) => control.slot_table(row.memory),
        ObjectRow::Timeline(_) => None,
    };
    let permits = slots.map(SlotTable::holders).unwrap_or_default();
    let waiters = slots.map(SlotTable::waiters).unwrap_or_default();
    let holders = holders.iter().map(|held| wire::ObjectHolder {
        holder: wire::HolderInfo { waiting: waiters.get(&held.row).copied().unwrap_or(0), ..holder(held) },
        permits: permits.get(&held.row).copied().unwrap_or(0),
    });
    wire::ObjectDetail { info: self::row(row, control), holders: holders.collect() }
}
