//! In-flight samples: samples that were published before it was known that they are complete and valid.
//!
//! A block that a stream is writing stays held by its publisher's row although it is in the ring, until the publisher's
//! service thread has seen the stream finish. After a death it is therefore in quarantine as any held block is. A word
//! of the sample's descriptor says whether the sample is valid. Its publisher settles that word; for a publisher that
//! is gone the broker does, by the last value that the publisher's timeline really reached.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall_shm::{
    slots::{HeldSlot, Stale},
    timeline::Progress,
    topic::{PortId, Status},
};

use super::{
    TopicControl,
    sample::{Reading, Validity},
};
use crate::{
    completion::{Completion, Completions, Fence, contained},
    domain::Domain,
    timeline::StreamSignal,
};

/// A publisher's port. It is free for others once neither the publisher nor an in-flight sample uses it. It contains no
/// reference to a connection.
pub(super) struct PublisherPort {
    control: Arc<TopicControl>,
    id: PortId,
    /// A sample was not settled. The port stays until the broker takes it back.
    lost: AtomicBool,
    /// Cloned for each block that only views keep.
    views: Arc<()>,
}

/// A sample that was published and is not settled yet.
pub(super) struct InFlight {
    port: Arc<PublisherPort>,
    block: u32,
    generation: u64,
    /// The samples that it was made from.
    inputs: Vec<Arc<Reading>>,
}

/// The part of an in-flight sample that a stream still writes.
pub(super) struct Written {
    /// The block, which is retired once the stream is done; `None` if views keep it.
    pub(super) held: Option<HeldSlot>,
    /// What the stream gives after its work.
    pub(super) signal: StreamSignal,
    /// Values that the stream's work needs.
    pub(super) used: UserValues,
}

/// Values of the user. If dropping one of them panics, the others are still dropped.
#[derive(Default)]
pub(super) struct UserValues(pub(super) Vec<Box<dyn Any + Send + Sync>>);

impl PublisherPort {
    pub(super) fn new(control: Arc<TopicControl>, id: PortId) -> Arc<Self> {
        Arc::new(Self { control, id, lost: AtomicBool::new(false), views: Arc::default() })
    }

    pub(super) fn id(&self) -> PortId {
        self.id
    }

    /// Returns how many blocks are in flight, because a stream or views use them after the loan. Each has a reference
    /// to the port, and so has the publisher.
    pub(super) fn in_flight(self: &Arc<Self>) -> usize {
        Arc::strong_count(self) - 1
    }

    /// Returns how many of them only views keep.
    pub(super) fn viewed(&self) -> usize {
        Arc::strong_count(&self.views) - 1
    }

    /// Returns the reference of a block that only views keep.
    pub(super) fn view(&self) -> Arc<()> {
        self.views.clone()
    }

    /// Releases a published block, which then belongs to the topic.
    pub(super) fn retire(&self, held: &HeldSlot) {
        self.control.topic.retire(&self.control.pool, held);
    }

    /// Frees a block that was not published.
    pub(super) fn free(&self, held: &HeldSlot) -> Result<(), Stale> {
        self.control.pool.free(held)
    }
}

impl Drop for PublisherPort {
    fn drop(&mut self) {
        if self.control.are_ours() && !self.lost.load(Ordering::Acquire) {
            self.control.topic.leave_as_publisher(self.id);
        }
    }
}

impl UserValues {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Drop for UserValues {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|thing| contained(|| drop(thing)));
    }
}

impl InFlight {
    pub(super) fn new(port: Arc<PublisherPort>, held: &HeldSlot, inputs: Vec<Arc<Reading>>) -> Self {
        Self { port, block: held.index(), generation: held.generation(), inputs }
    }

    /// Settles the sample once its stream is done and its inputs are.
    pub(super) fn settle_after(self, written: Written, domain: &Domain) {
        let Written { held, signal: StreamSignal { order, value, .. }, used } = written;
        let user = domain.workers().user.clone();
        let completions = domain.completions().clone();
        domain.completions().on(Fence::Timeline(order.word.clone(), value), move |completion| {
            match (completion, order.progress(value)) {
                (Completion::Done, _) => {
                    if let Some(held) = held {
                        self.port.retire(&held);
                    }
                    self.settle(&completions);
                }
                // It is unknown what the stream still does, so the block stays held until this process ends.
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

    /// Returns the sample's status as far as its inputs determine it.
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

    /// Leaves the sample to the broker, which settles it.
    fn lose(&self) {
        self.port.lost.store(true, Ordering::Release);
    }
}
