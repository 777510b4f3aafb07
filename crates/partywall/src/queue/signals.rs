//! The timelines by which streams signal that inputs and outputs are complete.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use partywall_cuda::{RawStream, StreamRef};
use partywall_os::lock::IgnorePoison;
use partywall_shm::{queue::StreamPoint, timeline::Progress};

use super::Open;
use crate::{
    error::{Error, Result},
    timeline::{Order, Timeline, TimelineOptions, TimelineWriter},
};

/// The timelines of this process in a queue, created when streams need them, and those of other processes, once opened.
/// All handles of the queue share them.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The timelines of this process, by lane.
    writers: Mutex<Vec<Writer>>,
    /// The timelines of other processes, by the rows and lanes of their writers.
    others: Mutex<BTreeMap<(u16, u8), Arc<Timeline>>>,
}

/// The values of one timeline follow the order of one stream, so each stream that works at the same time needs its own.
#[derive(Debug)]
struct Writer {
    signals: TimelineWriter,
    order: Order,
    /// The last promised value.
    last: u64,
    /// The stream that stores the value.
    stream: RawStream,
}

impl Writer {
    fn is_idle(&self) -> bool {
        self.order.progress(self.last) == Progress::Reached
    }
}

impl Open {
    /// Makes `stream` signal once all work that is on it now is done.
    pub(super) fn signal_on(&self, stream: StreamRef<'_>) -> Result<(Order, StreamPoint)> {
        // If a new stream has got the handle of a former one, it only waits for signals of the former one.
        let stream_of = |writer: &Writer| writer.stream == stream.raw();
        let mut writers = self.signals().writers.lock().ignore_poison();
        let its = writers.iter().position(stream_of).or_else(|| writers.iter().position(Writer::is_idle));
        let lane = match its {
            Some(lane) => lane,
            None if writers.len() < MOST_LANES => {
                let writer = self.writer(writers.len() as u8, stream.raw())?;
                writers.push(writer);
                writers.len() - 1
            }
            // The stream then waits for the signals of that lane's former stream.
            None => (0..MOST_LANES).min_by_key(|lane| writers[*lane].last).unwrap_or_default(),
        };
        let writer = &mut writers[lane];
        writer.signals.signal_on(stream, writer.last + 1)?;
        writer.last += 1;
        writer.stream = stream.raw();
        Ok((writer.order.clone(), StreamPoint { lane: lane as u8, cell: writer.order.cell(), value: writer.last }))
    }

    fn writer(&self, lane: u8, stream: RawStream) -> Result<Writer> {
        let signals = self.timeline_options(self.domain().link().row(), lane).writer()?;
        let order = Order::of(signals.timeline());
        let last = signals.timeline().announced();
        Ok(Writer { signals, order, last, stream })
    }

    /// Returns the timeline of a member; `None` if it has ended.
    pub(super) fn timeline_of(&self, row: u16, point: StreamPoint) -> Result<Option<Arc<Timeline>>> {
        let is_it = |timeline: &Arc<Timeline>| Order::of(timeline).cell() == point.cell;
        let its = (row, point.lane);
        let known = self.signals().others.lock().ignore_poison().get(&its).cloned();
        if known.as_ref().is_some_and(is_it) {
            return Ok(known);
        }
        match self.timeline_options(row, point.lane).open() {
            // Another process may have got the row meanwhile, and a timeline of that name.
            Ok(timeline) => Ok(Some(Arc::new(timeline)).filter(is_it).map(|timeline| self.keep(its, timeline))),
            Err(Error::Gone(_)) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// Keeps the timeline of a member, and drops those that have ended, so that listings no longer show them.
    fn keep(&self, its: (u16, u8), timeline: Arc<Timeline>) -> Arc<Timeline> {
        let mut others = self.signals().others.lock().ignore_poison();
        let former = others.insert(its, timeline.clone());
        let has_ended =
            |_: &(u16, u8), known: &mut Arc<Timeline>| Arc::strong_count(known) == 1 && known.ending().is_some();
        let ended: Vec<_> = others.extract_if(.., has_ended).collect();
        drop(others);
        // Blocks on the broker.
        drop((former, ended));
        timeline
    }

    fn signals(&self) -> &Signals {
        self.inputs.signals().expect("a queue has them")
    }

    /// Begins to open a member's timeline, which other users may open if they may open the queue.
    fn timeline_options(&self, row: u16, lane: u8) -> TimelineOptions {
        let name = format!("{}/{}/queue-{row}-{lane}", self.name(), self.inputs.version());
        self.domain().timeline_options(&name).shared(self.inputs.segment().is_shared())
    }
}

/// The number of streams of one process that signal without waiting for each other.
const MOST_LANES: usize = 32;
