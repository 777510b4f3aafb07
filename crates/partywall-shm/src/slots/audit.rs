//! What the words say, counted.

#[cfg(not(loom))]
use super::word::Row;
use super::{
    core::Core,
    word::{Place, Position, State},
};
use crate::members::NOBODY;

/// Numbers of slots and waiters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Audit {
    /// Permits or blocks that anybody may take.
    pub free: u32,
    /// Those that somebody has.
    pub held: u32,
    /// Blocks that their holder offers to whoever knows of them.
    pub offered: u32,
    /// Blocks of a topic that are in its ring, or in the hands of readers.
    pub published: u32,
    /// Those that are on their way to a waiter.
    pub handed: u32,
    /// Those that were handed to one who waits no more. Whoever looks for one takes them.
    pub stale: u32,
    /// Those who wait.
    pub waiting: u32,
    /// Those who were told of one and have not taken it yet.
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
    pub(crate) fn audit(self) -> Audit {
        let mut audit = Audit::default();
        for (index, slot) in self.slots.iter().enumerate() {
            *match slot.load().state() {
                State::Free => &mut audit.free,
                State::Held(NOBODY) => &mut audit.published,
                State::Held(_) => &mut audit.held,
                State::Offered(_) => &mut audit.offered,
                State::Invalid => &mut audit.invalid,
                State::Handed(row, tag) => {
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
    pub(crate) fn holders(self) -> Vec<(Row, u32)> {
        let mut counts = std::collections::BTreeMap::new();
        for slot in self.slots {
            if let State::Held(row) | State::Offered(row) | State::Handed(row, _) = slot.load().state()
                && row != NOBODY
            {
                *counts.entry(row).or_insert(0) += 1;
            }
        }
        counts.into_iter().collect()
    }
}
