//! The timelines by which streams say that inputs and outputs are complete.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use partywall_cuda::StreamRef;
use partywall_os::lock::IgnorePoison;
use partywall_shm::{queue::StreamPoint, topic::TimelineCell};

use super::Open;
use crate::{
    error::{Error, Result},
    timeline::{Order, Timeline, TimelineWriter},
};

/// The timeline of this process in a queue, once a stream needs it, and those of others, once they were asked for. All handles
/// of the queue share them.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    writer: Mutex<Option<Writer>>,
    /// By the rows of their writers.
    others: Mutex<BTreeMap<u16, Arc<Timeline>>>,
}

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
        let mut writer = self.signals().writer.lock().ignore_poison();
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
        let is_it = |timeline: &Arc<Timeline>| Order::of(timeline).cell() == cell;
        let known = self.signals().others.lock().ignore_poison().get(&row).cloned();
        if known.as_ref().is_some_and(is_it) {
            return Ok(known);
        }
        match self.domain().timeline(&self.timeline_name(row)) {
            // Another process may have the row by now, and a timeline of that name.
            Ok(timeline) => Ok(Some(Arc::new(timeline)).filter(is_it).map(|timeline| self.keep(row, timeline))),
            Err(Error::Gone(_)) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// Keeps the timeline of a member, and forgets those that have ended, so that nobody finds them listed.
    fn keep(&self, row: u16, timeline: Arc<Timeline>) -> Arc<Timeline> {
        let mut others = self.signals().others.lock().ignore_poison();
        let former = others.insert(row, timeline.clone());
        let has_ended = |_: &u16, known: &mut Arc<Timeline>| Arc::strong_count(known) == 1 && known.ending().is_some();
        let ended: Vec<_> = others.extract_if(.., has_ended).collect();
        drop(others);
        // Blocks on the broker.
        drop((former, ended));
        timeline
    }

    fn signals(&self) -> &Signals {
        self.inputs.signals().expect("a queue has them")
    }

    fn timeline_name(&self, row: u16) -> String {
        format!("{}/{}/queue-{row}", self.name(), self.inputs.version())
    }
}
