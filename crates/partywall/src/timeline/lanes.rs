//! Lanes: the timelines by which the streams of a process signal for a topic or a queue.
//!
//! The values of one timeline follow the order of one stream, so each stream that works at the same time has a lane of
//! its own, with a timeline. A lane's timeline is created when a stream first needs it, and ends with its writer.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use partywall_cuda::{RawStream, StreamRef};
use partywall_os::lock::IgnorePoison;
use partywall_shm::{
    timeline::Progress,
    topic::{LANES, TimelineCell},
};

use super::{Order, Timeline, TimelineOptions, TimelineWriter};
use crate::{error::Result, wait::Wait};

/// The lanes of a writer, in this process.
#[derive(Debug, Default)]
pub(crate) struct Lanes(Mutex<Vec<Lane>>);

#[derive(Debug)]
struct Lane {
    signals: TimelineWriter,
    order: Order,
    /// The last promised value.
    last: u64,
    /// The stream that stores the value.
    stream: RawStream,
}

/// A signal that a stream gives once its work is done.
pub(crate) struct StreamSignal {
    pub(crate) lane: u8,
    pub(crate) order: Order,
    pub(crate) value: u64,
}

impl Lanes {
    /// Makes `stream` signal once all work that is on it now is done. `create` creates the timeline of a lane, if no
    /// lane is idle.
    pub(crate) fn signal_on(
        &self,
        stream: StreamRef<'_>,
        create: impl FnOnce(u8) -> Result<TimelineWriter>,
    ) -> Result<StreamSignal> {
        // If a new stream has got the handle of a former one, it only waits for signals of the former one.
        let stream_of = |lane: &Lane| lane.stream == stream.raw();
        let mut lanes = self.0.lock().ignore_poison();
        let its = lanes.iter().position(stream_of).or_else(|| lanes.iter().position(Lane::is_idle));
        let its = match its {
            Some(its) => its,
            None if lanes.len() < LANES => {
                let signals = create(lanes.len() as u8)?;
                lanes.push(Lane::new(signals, stream.raw()));
                lanes.len() - 1
            }
            // The stream then waits for the signals of that lane's former stream.
            None => (0..LANES).min_by_key(|its| lanes[*its].last).unwrap_or_default(),
        };
        let lane = &mut lanes[its];
        lane.signals.signal_on(stream, lane.last + 1)?;
        lane.last += 1;
        lane.stream = stream.raw();
        Ok(StreamSignal { lane: its as u8, order: lane.order.clone(), value: lane.last })
    }

    /// Waits until the streams have given all signals. No stream can be made to signal meanwhile.
    pub(crate) fn wait(&self, wait: Wait<'_>) -> Result<()> {
        let mut wait = wait;
        for lane in &*self.0.lock().ignore_poison() {
            let waiting = wait.begin();
            wait = waiting.resume();
            lane.signals.timeline().wait(lane.last, wait)?;
        }
        Ok(())
    }
}

impl Lane {
    fn new(signals: TimelineWriter, stream: RawStream) -> Self {
        let order = Order::of(signals.timeline());
        let last = signals.timeline().announced();
        Self { signals, order, last, stream }
    }

    fn is_idle(&self) -> bool {
        self.order.progress(self.last) == Progress::Reached
    }
}

/// The timelines of other processes' lanes that this process has opened, by their writers and lanes.
#[derive(Debug)]
pub(crate) struct OpenLanes<K>(Mutex<BTreeMap<(K, u8), Arc<Timeline>>>);

impl<K: Ord + Copy> OpenLanes<K> {
    /// Returns the timeline of a lane. `None` if the name has another timeline than the one in `cell`: that has ended
    /// with its writer, and another process may have got the name.
    pub(crate) fn find(
        &self,
        its: (K, u8),
        cell: TimelineCell,
        options: impl FnOnce() -> TimelineOptions,
    ) -> Result<Option<Arc<Timeline>>> {
        let is_it = |timeline: &Arc<Timeline>| Order::of(timeline).cell() == cell;
        let known = self.0.lock().ignore_poison().get(&its).cloned();
        if let Some(known) = known.filter(is_it) {
            return Ok(Some(known));
        }
        let opened = Some(Arc::new(options().open()?)).filter(is_it);
        Ok(opened.map(|timeline| self.keep(its, timeline)))
    }

    /// Keeps a timeline, and drops those that have ended, so that listings no longer show them.
    fn keep(&self, its: (K, u8), timeline: Arc<Timeline>) -> Arc<Timeline> {
        let mut all = self.0.lock().ignore_poison();
        let former = all.insert(its, timeline.clone());
        let has_ended =
            |_: &(K, u8), known: &mut Arc<Timeline>| Arc::strong_count(known) == 1 && known.ending().is_some();
        let ended: Vec<_> = all.extract_if(.., has_ended).collect();
        drop(all);
        // Blocks on the broker.
        drop((former, ended));
        timeline
    }
}

impl<K> Default for OpenLanes<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}
