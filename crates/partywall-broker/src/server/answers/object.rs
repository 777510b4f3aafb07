//! Timelines and semaphores in answers. The numbers are read from control memory.

use partywall_wire as wire;

use crate::{
    registry::effect::ObjectAt,
    server::control::{Control, SlotTable},
};

/// Adds what is in control memory to a row of a listing.
pub(super) fn read(info: &mut wire::ObjectInfo, at: ObjectAt, control: &Control) {
    match (info, at) {
        (wire::ObjectInfo::Timeline(info), ObjectAt::Timeline(at)) => {
            if let Some(standing) = at.and_then(|at| control.standing(at)) {
                info.value = standing.value;
                info.announced = standing.announced;
                info.ending = standing.ending;
            }
        }
        (wire::ObjectInfo::Semaphore(info), ObjectAt::Semaphore(memory)) => {
            let permits = control.permits(memory);
            // Permits that were handed to a waiter count as held.
            info.held = permits.held + permits.handed;
            info.waiting = permits.waiting;
        }
        _ => {}
    }
}

/// Adds what is in control memory to an inspected object.
pub(super) fn read_detail(detail: &mut wire::ObjectDetail, at: ObjectAt, rows: &[u16], control: &Control) {
    read(&mut detail.info, at, control);
    let ObjectAt::Semaphore(memory) = at else { return };
    let slots = control.slot_table(memory);
    let permits = slots.map(SlotTable::holders).unwrap_or_default();
    let waiters = slots.map(SlotTable::waiters).unwrap_or_default();
    for (held, row) in detail.holders.iter_mut().zip(rows) {
        held.permits = permits.get(row).copied().unwrap_or(0);
        held.holder.waiting = waiters.get(row).copied().unwrap_or(0);
    }
}
