//! What the broker does for those who are gone.

use super::{
    Status, TimelineCell,
    core::Core,
    seat::{Occupancy, Seat},
};
use crate::{crash::point, timeline::Ending};

impl Core<'_> {
    /// See [`Topic::part`](super::Topic::part).
    pub(super) fn part(
        self,
        gone: impl Fn(u16) -> bool,
        ending: Ending,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> u32 {
        let mut parted = 0;
        let mut part = |seat: &Seat| {
            // A member changes its seat twice at most; who does more is not one of ours.
            for _ in 0..MOST_ATTEMPTS {
                let seen = seat.load();
                let present = matches!(seen.occupancy(), Occupancy::Taken | Occupancy::Active);
                if !present || !gone(seen.row()) {
                    return;
                }
                if seat.part(seen) {
                    parted += 1;
                    return;
                }
            }
        };
        self.publishers.iter().for_each(|publisher| part(&publisher.seat));
        self.subscribers.iter().for_each(|subscriber| part(&subscriber.seat));
        point("topic: parted, samples not settled");
        self.settle(gone, ending, reached);
        point("topic: parted, nobody told");
        self.header.space.ring();
        self.header.samples.ring();
        parted
    }

    /// Makes the status of what the rows that are `gone` have published final.
    fn settle(self, gone: impl Fn(u16) -> bool, ending: Ending, reached: impl Fn(TimelineCell) -> Option<u64>) {
        for descriptor in self.descriptors {
            let seen = descriptor.status();
            let origin = descriptor.origin();
            if seen.status().is_final() || !gone(origin.row) {
                continue;
            }
            let place = self.publishers.get(usize::from(origin.place));
            let its = place.filter(|publisher| publisher.seat.load().id() == descriptor.publisher());
            let value = its.and_then(|publisher| publisher.timeline()).and_then(&reached);
            // Nobody is left who could say what an unverified one rests on.
            let complete = seen.status() == Status::Timeline && value.is_some_and(|value| descriptor.value() <= value);
            // If it has changed, it is final, or another sample's.
            descriptor.settle(seen, if complete { Status::Done } else { Status::Failed(ending) });
        }
    }
}

const MOST_ATTEMPTS: usize = 8;
