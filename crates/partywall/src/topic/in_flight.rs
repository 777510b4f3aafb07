//! Samples that were published before it was known that they are complete and sound.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use partywall_shm::{
    semaphore::Held,
    timeline::Progress,
    topic::{PortId, Status},
};

use super::{
    Words,
    loan::Kept,
    sample::{Reading, Validity},
    timelines::Order,
};
use crate::{
    backoff::Backoff,
    completion::Worker,
    domain::{Domain, Lost, PollReason},
};

/// Those of one publisher. They outlive it; nothing here has a connection.
pub(super) struct InFlightSamples {
    words: Arc<Words>,
    port: PortId,
    lost: Arc<OnceLock<Lost>>,
    /// Where the service thread has dropped what streams used.
    user_worker: Arc<Worker>,
    all: Mutex<All>,
    /// How many there are, for those who need not know exactly.
    count: AtomicUsize,
}

#[derive(Default)]
struct All {
    in_flight: VecDeque<InFlightSample>,
    /// The service thread looks at them.
    watched: bool,
    /// The publisher is gone.
    leaving: bool,
}

/// One of them.
pub(super) struct InFlightSample {
    pub(super) block: u32,
    pub(super) generation: u64,
    /// What a stream still writes.
    pub(super) written: Option<Written>,
    /// What it rests on.
    pub(super) inputs: Vec<Arc<Reading>>,
}

/// A block that a stream writes.
pub(super) struct Written {
    pub(super) held: Held,
    pub(super) order: Order,
    /// What the timeline has to reach.
    pub(super) value: u64,
    /// What the stream uses.
    pub(super) used: Kept,
}

impl InFlightSamples {
    pub(super) fn new(words: Arc<Words>, port: PortId, domain: &Domain) -> Self {
        let lost = domain.health().lost();
        let user_worker = domain.user_worker().clone();
        Self { words, port, lost, user_worker, all: Mutex::default(), count: AtomicUsize::new(0) }
    }

    /// Has the service thread look after another one.
    pub(super) fn add(self: &Arc<Self>, domain: &Domain, sample: InFlightSample) {
        let mut all = self.lock();
        all.in_flight.push_back(sample);
        self.count.store(all.in_flight.len(), Ordering::Relaxed);
        if !std::mem::replace(&mut all.watched, true) {
            drop(all);
            self.watch(domain);
        }
    }

    /// How many are not known to be decided.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Looks which are decided by now. Does not wait.
    pub(super) fn look(&self) {
        let over = self.all.try_lock().map(|mut all| self.look_at(&mut all));
        drop(over);
    }

    /// The publisher is gone. Its place is free once its last sample is decided.
    pub(super) fn leave(self: &Arc<Self>, domain: &Domain) {
        self.words.topic.detach_publisher(self.port);
        let mut all = self.lock();
        all.leaving = true;
        let over = self.look_at(&mut all);
        let is_unwatched = !all.in_flight.is_empty() && !std::mem::replace(&mut all.watched, true);
        drop(all);
        if is_unwatched {
            self.watch(domain);
        }
        drop(over);
    }

    fn watch(self: &Arc<Self>, domain: &Domain) {
        let in_flight = self.clone();
        let mut backoff = Backoff::new();
        domain.poll_tasks().add(backoff.next(), move |reason| {
            let mut all = in_flight.lock();
            let before = all.in_flight.len();
            let over = in_flight.look_at(&mut all);
            if !over.is_empty() || all.in_flight.len() != before {
                backoff = Backoff::new();
            }
            all.watched = !all.in_flight.is_empty() && reason != PollReason::Closing;
            let again = all.watched;
            drop(all);
            if over.iter().any(|written| !written.used.is_empty()) {
                in_flight.user_worker.run(move || drop(over));
            }
            again.then(|| backoff.next())
        });
    }

    /// Returns what streams write no more. To be dropped without the lock: what they used is the user's, who may drop, or
    /// even use, this publisher with it.
    fn look_at(&self, all: &mut All) -> Vec<Written> {
        let mut over = Vec::new();
        all.in_flight.retain_mut(|sample| {
            let stays = self.is_undecided(sample, &mut over);
            if !stays {
                over.extend(sample.written.take());
            }
            stays
        });
        self.count.store(all.in_flight.len(), Ordering::Relaxed);
        if all.leaving && all.in_flight.is_empty() {
            self.words.topic.leave_as_publisher(self.port);
        }
        over
    }

    fn is_undecided(&self, sample: &mut InFlightSample, over: &mut Vec<Written>) -> bool {
        let Words { topic, pool, .. } = &*self.words;
        let InFlightSample { block, generation, written, inputs } = sample;
        if let Some(Written { held, order, value, .. }) = written {
            match order.progress(*value) {
                Progress::Reached => topic.retire(pool, held),
                // Nobody knows what its stream still does: the block stays held until this process ends.
                Progress::Ended(ending) => {
                    topic.settle(*block, *generation, Status::Failed(ending));
                    return false;
                }
                Progress::Pending | Progress::Announced => return self.lost.get().is_none(),
            }
            over.extend(written.take());
        }
        let mut validity = Validity::Valid;
        for input in &*inputs {
            validity = validity.and(input.validity());
        }
        let status = match validity {
            Validity::Valid => Status::Done,
            Validity::Invalid => Status::Tainted,
            Validity::Undecided => return true,
        };
        topic.settle(*block, *generation, status);
        false
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        // Each sample is as far as it was brought.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for InFlightSamples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightSamples").finish_non_exhaustive()
    }
}
