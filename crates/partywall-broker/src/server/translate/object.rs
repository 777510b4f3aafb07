//! Timelines and semaphores in answers. The numbers are read from control memory.

use partywall_wire as wire;

use crate::{
    registry::effect::{Holder, ObjectRow, Row},
    server::control::{Control, SlotTable},
};

pub(super) fn info(row: ObjectRow, control: &Control) -> wire::ObjectInfo {
    match row {
        ObjectRow::Timeline(Row { info, at }) => {
            let standing = at.and_then(|at| control.standing(at));
            wire::ObjectInfo::Timeline(wire::TimelineInfo {
                value: standing.map_or(0, |standing| standing.value),
                announced: standing.map_or(0, |standing| standing.announced),
                ending: standing.and_then(|standing| standing.ending),
                ..info
            })
        }
        ObjectRow::Semaphore(Row { info, at }) => {
            let permits = control.permits(at);
            // Permits that were handed to a waiter count as held.
            let held = permits.held + permits.handed;
            wire::ObjectInfo::Semaphore(wire::SemaphoreInfo { held, waiting: permits.waiting, ..info })
        }
    }
}

pub(super) fn detail(row: ObjectRow, holders: Vec<Holder>, control: &Control) -> wire::ObjectDetail {
    let slots = match &row {
        ObjectRow::Semaphore(semaphore) => control.slot_table(semaphore.at),
        ObjectRow::Timeline(_) => None,
    };
    let permits = slots.map(SlotTable::holders).unwrap_or_default();
    let waiters = slots.map(SlotTable::waiters).unwrap_or_default();
    let holders = holders.into_iter().map(|Row { info, at: row }| wire::ObjectHolder {
        holder: wire::HolderInfo { waiting: waiters.get(&row).copied().unwrap_or(0), ..info },
        permits: permits.get(&row).copied().unwrap_or(0),
    });
    wire::ObjectDetail { holders: holders.collect(), info: info(row, control) }
}
