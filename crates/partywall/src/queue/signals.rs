//! The timeline by which the streams of this process say that inputs and outputs are complete.

use std::sync::{Arc, Mutex};

use partywall_cuda::StreamRef;
use partywall_os::lock::IgnorePoison;
use partywall_shm::{queue::StreamPoint, topic::TimelineCell};

use super::Open;
use crate::{
    error::{Error, Result},
    timeline::{Order, Timeline, TimelineWriter},
};

/// The timeline of this process in a queue, once a stream needs it. All handles of the queue share it.
#[derive(Debug, Default)]
pub(crate) struct Signals(Mutex<Option<Writer>>);

#[derive(Debug)]
struct Writer {
    signals: TimelineWriter,
    order: Order,
    /// The last value that was promised.
    last: u64,
}

impl Open {
    /// Has `stream` signal once it is done with what is on it now.
    pub(super) fn signal_on(&self, stream: StreamRef<'_>) -> Result<(Order, StreamPoint)> {
        let signals = self.inputs.signals().expect("a queue has them");
        let mut writer = signals.0.lock().ignore_poison();
        let Writer { signals, order, last } = match &mut *writer {
            Some(writer) => writer,
            none => {
                let signals = self.domain().timeline_writer(&self.timeline_name(self.domain().link().row()))?;
                let (order, last) = (Order::of(signals.timeline()), signals.timeline().announced());
                none.insert(Writer { signals, order, last })
            }
        };
        signals.signal_on(stream, *last + 1)?;
        *last += 1;
        Ok((order.clone(), StreamPoint { cell: order.cell(), value: *last }))
    }

    /// Returns the timeline of a member; `None` if it has ended.
    pub(super) fn timeline_of(&self, row: u16, cell: TimelineCell) -> Result<Option<Arc<Timeline>>> {
        match self.domain().timeline(&self.timeline_name(row)) {
            // Another process may have the row by now, and a timeline of that name.
            Ok(timeline) => Ok((Order::of(&timeline).cell() == cell).then(|| Arc::new(timeline))),
            Err(Error::Gone(_)) => Ok(None),
            Err(other) => Err(other),
        }
    }

    fn timeline_name(&self, row: u16) -> String {
        format!("{}/{}/queue-{row}", self.name(), self.inputs.version())
    }
}
