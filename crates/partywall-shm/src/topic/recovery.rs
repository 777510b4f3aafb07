//! What the broker does for those who are gone.

use std::cell::Cell;

use super::{
    Status, TimelineCell,
    core::Core,
    port::{Occupancy, PortSlot, PortWord},
};
use crate::{
    crash::point,
    members::NOBODY,
    slots::{self, SlotWord, State},
    sync::Ordering,
    timeline::Ending,
};

impl Core<'_> {
    /// See [`Topic::detach`](super::Topic::detach).
    pub(super) fn detach(
        self,
        gone: impl Fn(u16) -> bool,
        ending: Ending,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> u32 {
        let mut detached = 0;
        let mut detach = |port: &PortSlot| {
            // A member changes its port twice at most; who does more is not one of ours.
            for _ in 0..MOST_ATTEMPTS {
                let seen = port.load();
                let present = matches!(seen.occupancy(), Occupancy::Taken | Occupancy::Active);
                if !present || !gone(seen.row()) {
                    return;
                }
                if port.detach(seen) {
                    detached += 1;
                    return;
                }
            }
        };
        self.publishers.iter().for_each(|publisher| detach(&publisher.port));
        self.subscribers.iter().for_each(|subscriber| detach(&subscriber.port));
        point("topic: detached, samples not settled");
        self.settle(&gone, ending, reached);
        point("topic: detached, nobody notified");
        self.header.space.notify();
        self.header.samples.notify();
        detached
    }

    /// See [`Topic::recover`](super::Topic::recover).
    pub(super) fn recover(self, slots: slots::Core<'_>, dead: impl Fn(u16) -> bool) -> u32 {
        // Were it not done before, nobody would ever say what became of their samples.
        self.detach(&dead, Ending::OwnerDied, |_| None);
        for (index, subscriber) in self.subscribers.iter().enumerate() {
            let seen = subscriber.port.load();
            if is_lost(seen, &dead) {
                for hold in self.holds_of(index) {
                    hold.store(0, Ordering::Release);
                }
                point("topic: holds of the dead cleared, port not free");
                subscriber.port.free(seen);
            }
        }
        for publisher in self.publishers {
            let seen = publisher.port.load();
            if is_lost(seen, &dead) {
                publisher.port.free(seen);
            }
        }
        point("topic: ports of the dead free, blocks not taken");
        // Whether they had put a block into the ring nobody needs to know: it becomes the topic's, and who sweeps finds it
        // in the ring, or in no use.
        let taken = Cell::new(0);
        let publish = |_, seen: SlotWord| {
            taken.set(taken.get() + u32::from(seen.state() != State::Held(NOBODY)));
            true
        };
        // What is published stays so. Nothing else can be nobody's.
        let freed = slots.recover(|row| row == NOBODY || dead(row), publish);
        point("topic: blocks of the dead taken, not free");
        self.sweep(slots);
        freed + taken.get()
    }

    /// Makes the status of what the rows that are `gone` have published final.
    fn settle(self, gone: impl Fn(u16) -> bool, ending: Ending, reached: impl Fn(TimelineCell) -> Option<u64>) {
        for (block, descriptor) in self.descriptors.iter().enumerate() {
            let seen = descriptor.status();
            let origin = descriptor.origin();
            if seen.status().is_final() || !gone(origin.row) {
                continue;
            }
            let value = self.timeline_of(block).and_then(&reached);
            // Nobody is left who could say what an unverified one rests on.
            let complete = seen.status() == Status::Timeline && value.is_some_and(|value| descriptor.value() <= value);
            // If it has changed, it is final, or another sample's.
            descriptor.settle(seen, if complete { Status::Done } else { Status::Failed(ending) });
        }
    }
}

/// Whether a port is a dead member's, or in a state that nobody may make.
fn is_lost(port: PortWord, dead: impl Fn(u16) -> bool) -> bool {
    match port.occupancy() {
        Occupancy::Free => false,
        Occupancy::Taken | Occupancy::Active | Occupancy::Detached => dead(port.row()),
        Occupancy::Invalid => true,
    }
}

const MOST_ATTEMPTS: usize = 8;
