//! Recovery: the broker detaches members that are gone, and frees their resources.

use std::cell::Cell;

use super::{
    Status, TimelineCell, Topic,
    port::{Occupancy, PortSlot, PortWord},
};
use crate::{
    crash::point,
    members::NOBODY,
    slots::{SlotState, SlotWord, Slots},
    sync::Ordering,
    timeline::TimelineEnding,
};

impl Topic {
    /// Detaches the `gone` rows, which ended with `ending`: no process waits for their subscribers any more, and the
    /// samples of their publishers get a final status. `reached` returns the value that an ended incarnation of a
    /// timeline really reached.
    ///
    /// The rows keep their blocks and holds. The call terminates for any bytes, and may be repeated. Returns the number
    /// of detached ports.
    pub fn detach(
        &self,
        gone: impl Fn(u16) -> bool,
        ending: TimelineEnding,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> u32 {
        let mut detached = 0;
        let mut detach = |port: &PortSlot| {
            // A member changes its port at most twice; a process that changes it more often breaks the rules.
            for _ in 0..MOST_ATTEMPTS {
                let seen = port.load();
                let present = matches!(seen.occupancy(), Occupancy::Taken | Occupancy::Active);
                if !present || !gone(seen.row()) {
                    return;
                }
                if port.detach(seen).is_ok() {
                    detached += 1;
                    return;
                }
            }
        };
        self.publishers.iter().for_each(|publisher| detach(&publisher.port));
        self.subscribers.iter().for_each(|subscriber| detach(&subscriber.port));
        point("topic: detached, samples not settled");
        self.settle_samples_of(&gone, ending, reached);
        point("topic: detached, nobody notified");
        self.control().space.notify();
        self.control().samples.notify();
        detached
    }

    /// Frees everything of the `dead` rows: ports, holds, blocks, and their positions in the queue for a block. Returns
    /// the number of blocks that they held. Call this instead of [`Slots::recover`], once the rows' processes are
    /// proved dead.
    ///
    /// Terminates for any bytes, and may be repeated.
    pub fn recover(&self, slots: &Slots, dead: impl Fn(u16) -> bool) -> u32 {
        // Otherwise the status of their samples would never become final.
        self.detach(&dead, TimelineEnding::OwnerDied, |_| None);
        for (index, subscriber) in self.subscribers.iter().enumerate() {
            let seen = subscriber.port.load();
            if is_lost(seen, &dead) {
                for hold in self.holds_of(index) {
                    hold.store(0, Ordering::Release);
                }
                point("topic: holds of the dead cleared, port not free");
                // Stale only if a process breaks the rules.
                let _ = subscriber.port.free(seen);
            }
        }
        for publisher in self.publishers.iter() {
            let seen = publisher.port.load();
            if is_lost(seen, &dead) {
                // As above.
                let _ = publisher.port.free(seen);
            }
        }
        point("topic: ports of the dead free, blocks not taken");
        // Whether a block is in the ring does not matter: it becomes the topic's, and a sweep finds it in the ring or
        // unused.
        let taken = Cell::new(0);
        let publish = |_, seen: SlotWord| {
            taken.set(taken.get() + u32::from(seen.state() != SlotState::Held(NOBODY)));
            true
        };
        // Published blocks stay published. Nothing else belongs to `NOBODY`.
        let freed = slots.recover_or_publish(|row| row == NOBODY || dead(row), publish);
        point("topic: blocks of the dead taken, not free");
        self.sweep(slots);
        freed + taken.get()
    }

    /// Makes the status of samples of the `gone` rows final.
    fn settle_samples_of(
        &self,
        gone: impl Fn(u16) -> bool,
        ending: TimelineEnding,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) {
        for (block, descriptor) in self.descriptors.iter().enumerate() {
            let seen = descriptor.status();
            let origin = descriptor.origin();
            if seen.status().is_final() || !gone(origin.row) {
                continue;
            }
            let value = self.timeline_of_block(block).and_then(&reached);
            // The process that knew the inputs of an unverified sample is gone.
            let complete = seen.status() == Status::Timeline && value.is_some_and(|value| descriptor.value() <= value);
            // A status that has changed is final, or another sample's.
            let _ = descriptor.settle(seen, if complete { Status::Done } else { Status::Failed(ending) });
        }
    }
}

/// Returns whether a port belongs to a dead member, or is in an invalid state.
fn is_lost(port: PortWord, dead: impl Fn(u16) -> bool) -> bool {
    match port.occupancy() {
        Occupancy::Free => false,
        Occupancy::Taken | Occupancy::Active | Occupancy::Detached => dead(port.row()),
        Occupancy::Invalid => true,
    }
}

const MOST_ATTEMPTS: usize = 8;
