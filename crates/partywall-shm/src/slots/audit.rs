//! Counts for observers.

use super::{
    Slots,
    word::{SlotState, WaiterPosition, WaiterState},
};
use crate::members::{NOBODY, Row};

/// Numbers of slots and waiters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotAudit {
    /// Permits or blocks that any member may take.
    pub free: u32,
    /// Permits or blocks that members hold.
    pub held: u32,
    /// Blocks that their holder offers to members that know their generation.
    pub offered: u32,
    /// Blocks of a topic that are in its ring, or that readers hold.
    pub published: u32,
    /// Permits or blocks that are on their way to a waiter.
    pub handed: u32,
    /// Permits or blocks that were handed to a waiter that has left. The next member that searches for one takes them.
    pub stale: u32,
    /// Waiters.
    pub waiting: u32,
    /// Waiters that were granted a permit or block and have not taken it yet.
    pub granted: u32,
    /// Words in a state that no correct member writes.
    pub invalid: u32,
}

impl SlotAudit {
    /// Returns whether everything is free and no member waits.
    pub fn is_idle(&self) -> bool {
        *self == Self { free: self.free, ..Self::default() }
    }
}

impl Slots {
    /// Counts the slots and waiters. While members use them, the numbers do not belong to a single moment.
    pub fn audit(&self) -> SlotAudit {
        let mut audit = SlotAudit::default();
        for (index, slot) in self.slots.iter().enumerate() {
            *match slot.load().state() {
                SlotState::Free => &mut audit.free,
                SlotState::Held(NOBODY) => &mut audit.published,
                SlotState::Held(_) => &mut audit.held,
                SlotState::Offered(_) => &mut audit.offered,
                SlotState::Invalid => &mut audit.invalid,
                SlotState::Handed(row, tag) => {
                    let position = WaiterPosition::of_tag(tag, self.ring.len());
                    match self.ring[position.index].load().state(position.lap) {
                        WaiterState::Waiting(waiter) if waiter == row => &mut audit.handed,
                        WaiterState::Granted(waiter, slot) if (waiter, usize::from(slot)) == (row, index) => {
                            &mut audit.handed
                        }
                        _ => &mut audit.stale,
                    }
                }
            } += 1;
        }
        for entry in self.ring.iter() {
            let seen = entry.load();
            match seen.state(seen.lap()) {
                WaiterState::Waiting(_) => audit.waiting += 1,
                WaiterState::Granted(..) => audit.granted += 1,
                WaiterState::Invalid => audit.invalid += 1,
                WaiterState::Occupied | WaiterState::Open | WaiterState::Done => {}
            }
        }
        audit
    }

    /// Returns the number of waiters of each row, without rows that have none.
    pub fn waiters(&self) -> Vec<(Row, u32)> {
        let mut counts = std::collections::BTreeMap::new();
        for entry in self.ring.iter() {
            let seen = entry.load();
            if let WaiterState::Waiting(row) = seen.state(seen.lap()) {
                *counts.entry(row).or_insert(0) += 1;
            }
        }
        counts.into_iter().collect()
    }

    /// Returns the number of slots that each row holds or offers, without rows that have none.
    pub fn holders(&self) -> Vec<(Row, u32)> {
        let mut counts = std::collections::BTreeMap::new();
        for slot in self.slots.iter() {
            if let SlotState::Held(row) | SlotState::Offered(row) | SlotState::Handed(row, _) = slot.load().state()
                && row != NOBODY
            {
                *counts.entry(row).or_insert(0) += 1;
            }
        }
        counts.into_iter().collect()
    }
}
