//! Topics: streams of samples between processes, written once and read in place.

mod event;
#[cfg(feature = "tokio")]
mod future;
mod in_flight;
mod loan;
mod memory;
mod options;
mod publisher;
mod sample;
mod sample_type;
mod subscriber;
mod timelines;
mod turns;

use std::{sync::Arc, time::Duration};

use partywall_os::process::fork_generation;
use partywall_shm::{
    DType, members, pool as shm_pool,
    topic::{self as shm, PublisherState, SubscriberState},
};
use partywall_wire::{Control, Notice, SampleShape, Then, TopicShape};

pub use self::{
    event::SubscriberEvent,
    loan::{Filled, Loan, Published},
    memory::LoanMemory,
    options::TopicOptions,
    publisher::Publisher,
    sample::Sample,
    sample_type::SampleType,
    subscriber::{Policy, Samples, Subscriber, SubscriberOptions, SubscriberStats},
};
use crate::{
    domain::{Domain, LeaseGuard, withdrawn},
    error::{Error, Gone, LimitReached, Result, TopicLimit, Unreachable},
    gpu::Gpu,
    place::Place,
    pool::{Blocks, Object, Parts},
    recorder::{Action, Recorder, version_object},
    wait::Wait,
};

/// The maximum number of bytes of a sample's header, which is separate from its data.
pub const MAX_HEADER: usize = shm::MAX_HEADER;

/// A named stream of samples: several publishers, several subscribers, joining and leaving at any time.
///
/// A sample is one tensor in a block of the topic's pool, of the topic's [type](TopicOptions::dtype) and
/// [shape](TopicOptions::shape). Its publisher borrows a block ([`Publisher::loan`]), fills it, by
/// the CPU or by a GPU, and publishes it; every subscriber receives it and reads it in place. Nothing is copied.
/// Everything happens in shared memory: the broker is not involved, and from a stream to a stream no host waits.
///
/// # Order
///
/// All subscribers see the samples of all publishers in the same order, and the samples of one publisher in the order
/// of publication. A sample has the number of samples that were [missed](Sample::missed) before it, and its number
/// among its publisher's samples ([`Sample::sequence`]).
///
/// # Subscribers that are slow
///
/// Each subscriber chooses a [`Policy`]. Publishers wait only for subscribers that *block*, once those are
/// [depth](TopicOptions::depth) samples behind. A held sample keeps one block, and each subscriber may hold only as
/// many as [agreed](TopicOptions::held). A subscriber that is stopped or hangs therefore delays others only if it
/// blocks: [`Busy::TopicFull`](crate::error::Busy::TopicFull) names its process, and `partywall evict` ends the wait.
///
/// # Deaths
///
/// Samples that a process published before it was killed stay. If its GPU had not completed a sample by then, the
/// sample has [failed](crate::error::InvalidData::SampleFailed) for its receivers. Blocks that the process was filling,
/// and samples that it held, are free once its death is proved, and no publisher waits for it any longer. A stopped
/// process keeps its blocks and samples. If the broker is gone, samples are still published and received, but waits end
/// with [`Unreachable::Gone`], and samples that streams have not completed fail, because the timelines of publishers
/// end.
///
/// The topic ends with the last process that has it open, unless it is [kept](TopicOptions::kept). Cheap to clone; may
/// be used from any thread.
#[derive(Debug, Clone)]
pub struct Topic {
    open: Arc<OpenTopic>,
}

/// An open topic.
#[derive(Debug)]
struct OpenTopic {
    control: Arc<TopicControl>,
    shape: TopicShape,
    sample_type: SampleType,
    /// Whether publishers stamp samples.
    stamps: bool,
    /// Last: the connection may end with it.
    blocks: Arc<Blocks>,
}

/// The control memory of a topic. It may be used after the connection has ended, and by the library's own threads.
#[derive(Debug)]
struct TopicControl {
    topic: Arc<shm::Topic>,
    pool: Arc<shm_pool::Pool>,
    recorder: Recorder,
    /// The topic's number in traces.
    object: u64,
    /// The lease, without which the broker frees this process's blocks.
    _keep: Option<Arc<LeaseGuard>>,
    /// The generation of the process that opened it: in a forked child everything belongs to the parent.
    generation: u64,
}

/// The state of a topic. While other threads use the topic, the numbers are not a consistent snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicStats {
    /// Samples published so far.
    pub published: u64,
    /// Blocks that are free, or no longer in use.
    pub free: u32,
    /// Blocks that publishers have: on loan, in reserve for the next loan, or in a published sample that a stream still
    /// writes.
    pub held: u32,
    /// Blocks that are in the ring.
    pub in_ring: u32,
    /// Blocks that have left the ring but that subscribers still hold.
    pub read: u32,
    /// The publishers.
    pub publishers: Vec<PublisherState>,
    /// The subscribers.
    pub subscribers: Vec<SubscriberState>,
}

impl Domain {
    /// Returns options to create or open the topic `name`.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Domain, Place, Policy};
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// # let domain = Domain::connect()?;
    /// let frames = domain.topic("frames").max_bytes(4 << 20).place(Place::Host).open_or_create()?;
    /// let publisher = frames.publisher()?;
    /// publisher.wait_for_subscribers(1, Duration::from_secs(60))?; // it begins with the next sample
    /// let mut loan = publisher.loan(DType::U8, &[480, 640, 3], SECOND)?;
    /// loan.as_mut_slice::<u8>()?.fill(7);
    /// loan.filled().publish(SECOND)?;
    ///
    /// // In another process:
    /// let frames = domain.topic("frames").timeout(Duration::from_secs(60)).open()?;
    /// let subscriber = frames.subscriber(Policy::Latest)?;
    /// let sample = subscriber.recv(SECOND)?;
    /// assert_eq!(sample.as_slice::<u8>()?[0], 7);
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn topic(&self, name: &str) -> TopicOptions {
        TopicOptions::new(self.clone(), name)
    }
}

impl Topic {
    /// Joins the topic as a publisher.
    ///
    /// # Errors
    /// [`TopicLimit::Publishers`]; [`Gone::Evicted`]; [`Unreachable::Forked`].
    pub fn publisher(&self) -> Result<Publisher> {
        Publisher::join(self.open.clone())
    }

    /// Joins the topic as a subscriber that first receives the topic's [history](TopicOptions::history).
    ///
    /// # Errors
    /// [`TopicLimit::Subscribers`]; [`Gone::Evicted`]; [`Unreachable::Forked`].
    pub fn subscriber(&self, policy: Policy) -> Result<Subscriber> {
        self.subscribe(policy).join()
    }

    /// Returns options to join the topic as a subscriber.
    pub fn subscribe(&self, policy: Policy) -> SubscriberOptions {
        SubscriberOptions::new(self.open.clone(), policy)
    }

    /// Waits until the topic is removed. Returns the notice if that has a [deadline](Domain::withdraw): until when this
    /// process is to drop the topic, and what happens then.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; those of every call.
    pub fn wait_withdrawn<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Option<Notice>> {
        self.open.blocks.wait_withdrawn(wait.into())
    }

    /// Returns whether the topic may still be used. Takes nanoseconds.
    ///
    /// # Errors
    /// [`Gone::Withdrawn`] once the deadline of a withdrawal with [`Then::Stale`] has passed. Samples
    /// and loans that this process holds stay valid; its publishers and subscribers get the same error.
    /// [`DeviceFault::DeviceLost`](crate::error::DeviceFault::DeviceLost) once the memory is lost.
    pub fn check(&self) -> Result<()> {
        self.open.blocks.check()
    }

    /// Returns the topic's state. The time grows with the number of blocks. Makes subscribers
    /// [measure ages](SubscriberOptions::measure_ages) for the next minute.
    pub fn stats(&self) -> TopicStats {
        self.open.control.ask_for_ages();
        let TopicControl { topic, pool, .. } = &*self.open.control;
        let audit = topic.audit(pool);
        TopicStats {
            published: topic.published(),
            free: audit.free + audit.unused,
            held: audit.held + audit.handed,
            in_ring: audit.in_ring,
            read: audit.read,
            publishers: topic.publishers(),
            subscribers: topic.subscribers(),
        }
    }

    /// Returns the bytes of the largest sample.
    pub fn max_bytes(&self) -> u64 {
        self.open.blocks.shape().block_bytes
    }

    /// Returns the type of all samples; `None` if samples may have any type.
    pub fn dtype(&self) -> Option<DType> {
        self.open.sample_type.dtype
    }

    /// Returns the shape of all samples, where a dimension of `None` may have any length; `None` if samples may have
    /// any shape.
    pub fn shape(&self) -> Option<&[Option<u64>]> {
        self.open.sample_type.shape.as_ref().map(SampleShape::extents)
    }

    /// Returns the type and shape of all samples.
    pub fn sample_type(&self) -> SampleType {
        self.open.sample_type
    }

    /// Returns how many samples the ring keeps.
    pub fn depth(&self) -> u32 {
        self.open.shape.depth
    }

    /// Returns how many loans each publisher may have at a time.
    pub fn loans(&self) -> u32 {
        self.open.shape.loans
    }

    /// Returns how many samples each subscriber may hold at a time.
    pub fn held(&self) -> u32 {
        self.open.shape.held
    }

    /// Returns where the samples are.
    pub fn place(&self) -> Place {
        self.open.blocks.segment().place()
    }

    /// Returns the GPU on which this process uses the samples; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.open.blocks.gpu()
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.open.name()
    }

    /// Returns the version. A topic that is removed and created again has another version.
    pub fn version(&self) -> u64 {
        self.open.blocks.version()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.open.blocks.domain()
    }

    pub(crate) fn memory(&self) -> &Arc<Blocks> {
        &self.open.blocks
    }
}

impl OpenTopic {
    /// Maps the control memory of a topic, apart from that of its blocks.
    fn map(parts: &mut Parts<'_>) -> Result<Object> {
        let topic = parts.map(shm::Topic::map)?;
        if topic.limits().blocks == parts.shape.blocks { Ok(Arc::new(topic)) } else { Err(parts.wrong()) }
    }

    fn new(blocks: Arc<Blocks>, stamps: bool) -> Result<Self> {
        let name = blocks.name();
        let foreign = || Unreachable::protocol(format!("it gave {name:?} without the control memory of a topic"));
        let &Control { topic: shape, .. } = blocks.shape();
        let shape = shape.ok_or_else(foreign)?;
        let topic = blocks.object().ok_or_else(foreign)?;
        let pool = blocks.control().clone();
        let recorder = blocks.domain().recorder().clone();
        let object = version_object(blocks.name(), blocks.version());
        let generation = fork_generation();
        let control = TopicControl { topic, pool, recorder, object, _keep: blocks.keep(), generation };
        Ok(Self { control: Arc::new(control), sample_type: SampleType::of(&shape), shape, stamps, blocks })
    }

    fn name(&self) -> &str {
        self.blocks.name()
    }

    fn domain(&self) -> &Domain {
        self.blocks.domain()
    }

    /// Fails in a forked child. Checks without a system call if possible.
    fn require_ours(&self) -> Result<()> {
        if self.control.are_ours() { Ok(()) } else { self.domain().link().require_ours() }
    }

    /// Returns why this process is no longer a publisher or subscriber. Asks the broker for the reason.
    fn detached(&self) -> Error {
        let domain = self.domain();
        let asked = domain.ping().and_then(|()| domain.health().check()).and_then(|()| {
            // The broker detaches before its report of the withdrawal is read. Where it evicts processes of the name's
            // user, it detaches those of others.
            match self.blocks.wait_withdrawn(Duration::ZERO.into()) {
                Ok(Some(notice)) if notice.then != Then::Wait => Err(withdrawn(self.name(), &notice)),
                _ => Ok(()),
            }
        });
        asked.err().unwrap_or_else(|| Error::Gone(Gone::Detached { topic: self.name().to_owned() }))
    }

    /// Returns the error that a limit of the topic is reached.
    fn at_limit(&self, limit: TopicLimit) -> Error {
        let most = match limit {
            TopicLimit::Publishers => self.shape.publishers,
            TopicLimit::Subscribers => self.shape.subscribers,
            TopicLimit::Loans => self.shape.loans,
            TopicLimit::Viewed => self.control.topic.limits().most_in_use(),
            TopicLimit::Held => self.shape.held,
        };
        LimitReached::Topic { topic: self.name().to_owned(), limit, most }.into()
    }
}

impl TopicControl {
    /// Records what this process does with the sample at a position, while a tracer reads.
    #[inline]
    fn record(&self, action: Action, position: u64) {
        self.recorder.record(action, || self.object, position);
    }

    /// Makes subscribers measure ages for a while. Does nothing in a forked child.
    fn ask_for_ages(&self) {
        if self.are_ours() {
            self.topic.ask_for_ages(members::now_ns());
        }
    }

    /// Returns whether this is the process that opened the topic, not a forked child.
    fn are_ours(&self) -> bool {
        self.generation == fork_generation()
    }
}

// They move from call to call, so what they consist of is behind an address.
const _: () = assert!(size_of::<Loan>() <= 64 && size_of::<Filled>() <= 64 && size_of::<Sample>() <= 64);
