//! The timelines by which the streams of publishers complete samples.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::topic::Taken;

use super::{ControlMemory, Open};
use crate::{
    backoff::Backoff,
    error::{Error, Result},
    timeline::{Order, Timeline, TimelineOptions},
};

/// The timelines of publishers that a subscriber has received from.
#[derive(Debug, Default)]
pub(super) struct Timelines(Mutex<BTreeMap<u64, Arc<Timeline>>>);

impl Timelines {
    /// Returns the timeline of a sample's publisher; `None` if the sample is settled by now.
    ///
    /// If the publisher is gone, another process may have created a timeline of that name, which would never reach the
    /// value. So this must be the same incarnation that the publisher writes, which ends with the publisher.
    pub(super) fn of(&self, open: &Open, taken: &Taken, publisher: u64) -> Result<Option<Arc<Timeline>>> {
        let ControlMemory { topic, .. } = &*open.control;
        let what = || format!("sample {} of topic {:?} was not decided", taken.position(), open.name());
        await_settled(what, || {
            if topic.status(taken).is_final() {
                return Ok(Some(None));
            }
            let known = self.0.lock().ignore_poison().get(&publisher).cloned();
            let timeline = match known {
                Some(known) => known,
                None => Arc::new(options(open, publisher).open()?),
            };
            // Otherwise the publisher is gone, and the broker is about to settle its samples.
            let is_its = topic.timeline_of(taken) == Some(Order::of(&timeline).cell());
            Ok(is_its.then(|| Some(self.keep(publisher, timeline))))
        })
    }

    /// Keeps the timeline of a publisher, and drops those of publishers that are gone, so that they are no longer
    /// listed.
    fn keep(&self, publisher: u64, timeline: Arc<Timeline>) -> Arc<Timeline> {
        let is_gone = |_: &u64, known: &mut Arc<Timeline>| Arc::strong_count(known) == 1 && known.ending().is_some();
        let mut all = self.0.lock().ignore_poison();
        let gone: Vec<_> = match all.insert(publisher, timeline.clone()) {
            Some(_) => Vec::new(),
            None => all.extract_if(.., is_gone).collect(),
        };
        drop(all);
        // Dropping them blocks on the broker.
        drop(gone);
        timeline
    }
}

/// Polls until the publisher or the broker has settled a sample whose publisher is gone or about to end. `what` is the
/// message of the timeout.
pub(super) fn await_settled<T>(
    what: impl FnOnce() -> String,
    mut poll: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    let mut backoff = Backoff::new();
    loop {
        if let Some(settled) = poll()? {
            return Ok(settled);
        }
        if start.elapsed() > SETTLING {
            return Err(Error::Timeout { what: what(), after: SETTLING });
        }
        std::thread::sleep(backoff.next());
    }
}

/// Begins to open a publisher's timeline, which other users may open if they may open the topic. Its name contains the
/// topic's version, because a removed topic that is still in use may have a publisher of the same number.
pub(super) fn options(open: &Open, publisher: u64) -> TimelineOptions {
    let name = format!("{}/{}/publisher-{publisher}", open.name(), open.blocks.version());
    open.domain().timeline_options(&name).shared(open.blocks.segment().is_shared())
}

/// How long the broker may take to settle the samples of a publisher that is gone.
const SETTLING: Duration = Duration::from_secs(1);
