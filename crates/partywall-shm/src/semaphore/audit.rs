//! What a semaphore's words say, counted.

#[cfg(not(loom))]
use super::word::Row;
use super::{
    core::Core,
    word::{Permit, Place, Position},
};

/// Numbers of permits and waiters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Audit {
    /// Permits that anybody may take.
    pub free: u32,
    /// Permits that somebody has.
    pub held: u32,
    /// Permits that are on their way to a waiter.
    pub handed: u32,
    /// Permits that were handed to one who waits no more. Whoever looks for a permit takes them.
    pub stale: u32,
    /// Those who wait.
    pub waiting: u32,
    /// Those who were told of a permit and have not taken it yet.
    pub granted: u32,
    /// Words in a state that nobody may make.
    pub invalid: u32,
}

impl Audit {
    /// Whether nobody has, or waits for, anything.
    pub fn is_idle(&self) -> bool {
        *self == Self { free: self.free, ..Self::default() }
    }
}

impl Core<'_> {
    pub(super) fn audit(self) -> Audit {
        let mut audit = Audit::default();
        for (index, slot) in self.slots.iter().enumerate() {
            *match slot.load().permit() {
                Permit::Free => &mut audit.free,
                Permit::Held(_) => &mut audit.held,
                Permit::Invalid => &mut audit.invalid,
                Permit::Handed(row, tag) => {
                    let position = Position::of_tag(tag, self.ring.len());
                    match self.ring[position.index].load().place(position.lap) {
                        Place::Waiting(waiter) if waiter == row => &mut audit.handed,
                        Place::Granted(waiter, slot) if (waiter, usize::from(slot)) == (row, index) => {
                            &mut audit.handed
                        }
                        _ => &mut audit.stale,
                    }
                }
            } += 1;
        }
        for entry in self.ring {
            let seen = entry.load();
            match seen.place(seen.lap()) {
                Place::Waiting(_) => audit.waiting += 1,
                Place::Granted(..) => audit.granted += 1,
                Place::Invalid => audit.invalid += 1,
                Place::Occupied | Place::Open | Place::Done => {}
            }
        }
        audit
    }

    #[cfg(not(loom))]
    pub(super) fn holders(self) -> Vec<(Row, u32)> {
        let mut counts = std::collections::BTreeMap::new();
        for slot in self.slots {
            if let Permit::Held(row) | Permit::Handed(row, _) = slot.load().permit() {
                *counts.entry(row).or_insert(0) += 1;
            }
        }
        counts.into_iter().collect()
    }
}
