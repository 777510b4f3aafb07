//! The timelines by which publishers' streams say that samples are complete.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use partywall_shm::{
    timeline::Progress,
    topic::{Taken, TimelineCell},
};

use super::{Open, Words};
use crate::{
    backoff::Backoff,
    domain::{LeaseGuard, Word},
    error::{Error, Result},
    timeline::Timeline,
};

/// Those that a subscriber has met.
#[derive(Debug, Default)]
pub(super) struct Timelines(Mutex<BTreeMap<u64, Arc<Timeline>>>);

/// One incarnation of a publisher's timeline, for those who look at it later.
#[derive(Debug, Clone)]
pub(super) struct Order {
    pub(super) word: Arc<Word>,
    /// So that the word stays the publisher's.
    _keep: Arc<LeaseGuard>,
}

impl Order {
    pub(super) fn of(timeline: &Timeline) -> Self {
        let (word, keep) = timeline.present();
        Self { word, _keep: keep }
    }

    pub(super) fn progress(&self, value: u64) -> Progress {
        self.word.progress(value)
    }

    pub(super) fn cell(&self) -> TimelineCell {
        let Word { slab, incarnation, ref place, .. } = *self.word;
        TimelineCell { slab, cell: place.index(), incarnation }
    }
}

impl Timelines {
    /// The timeline of the one who has published a sample; `None` if by now it is known without it what became of that.
    ///
    /// A timeline of that name that others have made meanwhile, because the publisher is gone, would never come to the
    /// value. So it has to be the very incarnation that the publisher writes, and that is ended with it.
    pub(super) fn of(&self, open: &Open, taken: &Taken, publisher: u64) -> Result<Option<Arc<Timeline>>> {
        let Words { topic, .. } = &*open.words;
        let start = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            if topic.status(taken).is_final() {
                return Ok(None);
            }
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&publisher).cloned();
            let timeline = match known {
                Some(known) => known,
                None => Arc::new(open.domain().timeline(&name(open, publisher))?),
            };
            if topic.timeline_of(taken) == Some(Order::of(&timeline).cell()) {
                let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                if all.contains_key(&publisher) {
                    return Ok(Some(timeline));
                }
                // Those of publishers that are gone are forgotten, so that nobody finds them listed.
                let is_needed =
                    |timeline: &Arc<Timeline>| Arc::strong_count(timeline) > 1 || timeline.ending().is_none();
                let (needed, gone) = std::mem::take(&mut *all).into_iter().partition(|(_, known)| is_needed(known));
                *all = needed;
                all.insert(publisher, timeline.clone());
                drop(all);
                // Waits for the broker.
                drop::<BTreeMap<_, _>>(gone);
                return Ok(Some(timeline));
            }
            // Its publisher is gone, and the broker is about to say what became of its samples.
            if start.elapsed() > SETTLING {
                let what = format!("sample {} of topic {:?} was not decided", taken.position(), open.name());
                return Err(Error::Timeout { what, after: SETTLING });
            }
            std::thread::sleep(backoff.next());
        }
    }
}

/// What a publisher's timeline is called. With the version: one that was removed and is still used may have a publisher
/// of the same number.
pub(super) fn name(open: &Open, publisher: u64) -> String {
    format!("{}/{}/publisher-{publisher}", open.name(), open.blocks.version())
}

/// How long the broker may take to say what became of the samples of one that is gone.
pub(super) const SETTLING: Duration = Duration::from_secs(1);
