//! In-flight samples: samples that were published before it was known that they are complete and valid.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use partywall_shm::{
    semaphore::Held,
    timeline::Progress,
    topic::{PortId, Status},
};

use super::{
    ControlMemory,
    loan::Kept,
    sample::{Reading, Validity},
};
use crate::{
    completion::{Completion, Completions, Fence},
    domain::Domain,
    timeline::Order,
};

/// A publisher's port. It is free for others once neither the publisher nor an in-flight sample has it. Nothing here has a
/// connection.
pub(super) struct PublisherPort {
    control: Arc<ControlMemory>,
    id: PortId,
    /// A sample was not settled. The port stays until the broker takes it back.
    lost: AtomicBool,
}

/// A sample that was published and is not settled.
pub(super) struct InFlight {
    port: Arc<PublisherPort>,
    block: u32,
    generation: u64,
    /// The samples that it was made of.
    inputs: Vec<Arc<Reading>>,
}

/// What a stream still writes.
pub(super) struct Written {
    /// The block, which is retired once the stream is done.
    pub(super) held: Held,
    pub(super) order: Order,
    /// The value that the timeline reaches behind the stream's work.
    pub(super) value: u64,
    /// What the stream uses.
    pub(super) used: Kept,
}

impl PublisherPort {
    pub(super) fn new(control: Arc<ControlMemory>, id: PortId) -> Arc<Self> {
        Arc::new(Self { control, id, lost: AtomicBool::new(false) })
    }

    pub(super) fn id(&self) -> PortId {
        self.id
    }

    /// How many samples are in flight. Each has the port, and so has the publisher.
    pub(super) fn in_flight(self: &Arc<Self>) -> usize {
        Arc::strong_count(self) - 1
    }
}

impl Drop for PublisherPort {
    fn drop(&mut self) {
        if self.control.are_ours() && !self.lost.load(Ordering::Acquire) {
            self.control.topic.leave_as_publisher(self.id);
        }
    }
}

impl InFlight {
    pub(super) fn new(port: Arc<PublisherPort>, held: &Held, inputs: Vec<Arc<Reading>>) -> Self {
        Self { port, block: held.index(), generation: held.generation(), inputs }
    }

    /// Settles the sample once its stream is done and its inputs are.
    pub(super) fn settle_after(self, written: Written, domain: &Domain) {
        let Written { held, order, value, used } = written;
        let user = domain.workers().user.clone();
        let completions = domain.completions().clone();
        domain.completions().on(Fence::Timeline(order.word.clone(), value), move |completion| {
            match (completion, order.progress(value)) {
                (Completion::Done, _) => {
                    self.port.control.topic.retire(&self.port.control.pool, &held);
                    self.settle(&completions);
                }
                // Nobody knows what the stream still does: the block stays held until this process ends.
                (Completion::Unknown, Progress::Ended(ending)) => self.settle_as(Status::Failed(ending)),
                (Completion::Unknown, _) => self.lose(),
            }
            if !used.is_empty() {
                user.run(move || drop(used));
            }
        });
    }

    /// Settles the sample once its inputs are.
    pub(super) fn settle(self, completions: &Arc<Completions>) {
        let sample = Arc::new(self);
        let awaited = sample.clone();
        let is_known = move || awaited.status().is_some();
        completions.on(Fence::Condition(Box::new(is_known)), move |_| match sample.status() {
            Some(status) => sample.settle_as(status),
            None => sample.lose(),
        });
    }

    /// What the sample is, as far as its inputs say.
    fn status(&self) -> Option<Status> {
        match Validity::of(&self.inputs) {
            Validity::Valid => Some(Status::Done),
            Validity::Invalid => Some(Status::Tainted),
            Validity::Undecided => None,
        }
    }

    fn settle_as(&self, status: Status) {
        self.port.control.topic.settle(self.block, self.generation, status);
    }

    /// Leaves it to the broker to settle the sample.
    fn lose(&self) {
        self.port.lost.store(true, Ordering::Release);
    }
}
