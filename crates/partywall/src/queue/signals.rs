//! The timelines by which streams signal that inputs and outputs are complete.

use std::sync::Arc;

use partywall_cuda::StreamRef;
use partywall_shm::queue::StreamPoint;

use super::OpenQueue;
use crate::{
    error::{Error, Result},
    timeline::{Lanes, OpenLanes, Order, StreamSignal, Timeline, TimelineOptions},
};

/// The lanes of this process in a queue, and those of other processes, by their rows. All handles of the queue share
/// them.
#[derive(Debug, Default)]
pub(super) struct Signals {
    lanes: Lanes,
    others: OpenLanes<u16>,
}

impl OpenQueue {
    /// Makes `stream` signal once all work that is on it now is done.
    pub(super) fn signal_on(&self, stream: StreamRef<'_>) -> Result<(Order, StreamPoint)> {
        let row = self.domain().link().row();
        let create = |lane| self.timeline_options(row, lane).writer();
        let StreamSignal { lane, order, value } = self.shared.signals.lanes.signal_on(stream, create)?;
        let cell = order.cell();
        Ok((order, StreamPoint { lane, cell, value }))
    }

    /// Returns the timeline of a member; `None` if it has ended.
    pub(super) fn timeline_of(&self, row: u16, point: StreamPoint) -> Result<Option<Arc<Timeline>>> {
        let StreamPoint { lane, cell, .. } = point;
        match self.shared.signals.others.find((row, lane), cell, || self.timeline_options(row, lane)) {
            Err(Error::Gone(_)) => Ok(None),
            found => found,
        }
    }

    /// Begins to open a member's timeline, which other users may open if they may open the queue.
    fn timeline_options(&self, row: u16, lane: u8) -> TimelineOptions {
        let name = format!("{}/{}/queue-{row}-{lane}", self.name(), self.inputs.version());
        self.domain().timeline_options(&name).shared(self.inputs.segment().is_shared())
    }
}
