//! Topics: streams of samples between processes, written once and read in place.

mod in_flight;
mod loan;
mod options;
mod publisher;
mod reserve;
mod sample;
mod sample_type;
mod subscriber;
mod timelines;
mod turns;

use std::sync::Arc;

use partywall_os::process::fork_generation;
use partywall_shm::{
    DType, pool as shm_pool,
    topic::{self as shm, PublisherState, SubscriberState},
};
use partywall_wire::{Control, SampleShape, TopicShape};

pub use self::{
    loan::{Filled, Loan, Published, UnpublishedSample},
    options::TopicOptions,
    publisher::Publisher,
    sample::{Sample, UnreleasedSample},
    sample_type::SampleType,
    subscriber::{Policy, Samples, Subscriber, SubscriberEvent, SubscriberOptions, SubscriberStats},
    turns::Turn,
};
use crate::{
    domain::{Domain, LeaseGuard},
    error::{Error, Gone, LimitReached, Result, TopicLimit, Unreachable},
    gpu::Gpu,
    place::Place,
    pool::Blocks,
};

/// The most bytes of a header that a sample can have besides its data.
pub const MAX_HEADER: usize = shm::MAX_HEADER;

/// A named stream of samples: several publishers, several subscribers, joining and leaving at any time.
///
/// A sample is one tensor in a block of the topic's pool, of the topic's [type](TopicOptions::dtype) and
/// [shape](TopicOptions::shape). Its publisher borrows a block ([`Publisher::loan`]), fills it, by
/// the CPU or by a GPU, and publishes it; every subscriber receives it and reads it in place. Nothing is copied. All of it
/// happens in shared memory: neither the broker nor, on the way from a stream to a stream, any host waits.
///
/// # Order
///
/// All subscribers see the samples of all publishers in one order, and those of one publisher in the order in which it
/// published them. A sample says how many were [missed](Sample::missed) before it, and which of its publisher's it is
/// ([`Sample::sequence`]).
///
/// # Subscribers that are slow
///
/// Each chooses a [`Policy`]. Publishers wait for those that *block*, once they are [depth](TopicOptions::depth) samples
/// behind, and for no others. A sample that is held keeps one block, and each subscriber may hold as many as
/// [agreed](TopicOptions::held); so a subscriber that is stopped, or hangs, takes nothing from the others, but for one that
/// blocks: [`Busy::TopicFull`](crate::error::Busy::TopicFull) says whose process it is, and `partywall evict` ends the wait.
///
/// # Deaths
///
/// Samples that a process had published before it was killed stay. Those that its GPU had not finished by then have
/// [failed](crate::error::InvalidData::SampleFailed) for their receivers. Blocks that it was filling and samples that it held
/// are free for others when its death is proved; no wait is for it from then on. A process that is stopped keeps what it has. When the
/// broker is gone, samples are published and received as before, but waits end with [`Unreachable::Gone`], and with the
/// timelines of publishers what streams complete.
///
/// The topic goes with the last process that has it open, unless it is [kept](TopicOptions::kept). Cheap to clone; may be
/// used from any thread.
#[derive(Debug, Clone)]
pub struct Topic {
    open: Arc<Open>,
}

/// A topic that is open.
#[derive(Debug)]
struct Open {
    control: Arc<ControlMemory>,
    shape: TopicShape,
    sample_type: SampleType,
    /// Last: the connection may end with it.
    blocks: Arc<Blocks>,
}

/// The control memory of a topic, which may be used after the connection has ended, and by the library's own threads.
#[derive(Debug)]
struct ControlMemory {
    topic: Arc<shm::Topic>,
    pool: Arc<shm_pool::Pool>,
    /// Without the lease the broker gives to others what this process has.
    _keep: Option<Arc<LeaseGuard>>,
    /// In a forked child all of it is the parent's.
    generation: u64,
}

/// What is going on in a topic. While others use it the numbers are of no single moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicStats {
    /// Samples that have been published.
    pub published: u64,
    /// Blocks that anybody may take for a new sample, or that are in no use any more.
    pub free: u32,
    /// Blocks that publishers have: to fill them, in reserve for their next loan, or while a stream writes a published sample.
    pub held: u32,
    /// Blocks that are in the ring.
    pub in_ring: u32,
    /// Blocks that have left the ring, and that subscribers hold.
    pub read: u32,
    /// The publishers.
    pub publishers: Vec<PublisherState>,
    /// The subscribers.
    pub subscribers: Vec<SubscriberState>,
}

impl Domain {
    /// Topic `name`: to make it, or to open what another process has made.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Domain, Policy};
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// # let domain = Domain::connect()?;
    /// let frames = domain.topic("frames").max_bytes(4 << 20).open_or_create()?;
    /// let publisher = frames.publisher()?;
    /// let mut loan = publisher.loan(DType::U8, &[480, 640, 3], SECOND)?;
    /// loan.as_mut_slice::<u8>()?.fill(7);
    /// loan.filled().publish(SECOND)?;
    ///
    /// // In another process, which had subscribed before:
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
    /// Becomes a publisher.
    ///
    /// # Errors
    /// [`TopicLimit::Publishers`](crate::error::TopicLimit::Publishers); [`Gone::Evicted`]; [`Unreachable::Forked`].
    pub fn publisher(&self) -> Result<Publisher> {
        Publisher::join(self.open.clone())
    }

    /// Becomes a subscriber, as the topic's [history](TopicOptions::history) says.
    ///
    /// # Errors
    /// [`TopicLimit::Subscribers`](crate::error::TopicLimit::Subscribers); [`Gone::Evicted`]; [`Unreachable::Forked`].
    pub fn subscriber(&self, policy: Policy) -> Result<Subscriber> {
        self.subscribe(policy).join()
    }

    /// Becomes a subscriber in another way.
    pub fn subscribe(&self, policy: Policy) -> SubscriberOptions {
        SubscriberOptions::new(self.open.clone(), policy)
    }

    /// What is going on in it. Takes as long as looking at all blocks.
    pub fn stats(&self) -> TopicStats {
        let ControlMemory { topic, pool, .. } = &*self.open.control;
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

    /// Bytes of the largest sample.
    pub fn max_bytes(&self) -> u64 {
        self.open.blocks.shape().block_bytes
    }

    /// The type of all samples, if they have one.
    pub fn dtype(&self) -> Option<DType> {
        self.open.sample_type.dtype
    }

    /// The shape of all samples, in each dimension a length or any, if they have one.
    pub fn shape(&self) -> Option<&[Option<u64>]> {
        self.open.sample_type.shape.as_ref().map(SampleShape::extents)
    }

    /// Type and shape together.
    pub fn sample_type(&self) -> SampleType {
        self.open.sample_type
    }

    /// How many samples the ring keeps.
    pub fn depth(&self) -> u32 {
        self.open.shape.depth
    }

    /// How many loans each publisher may have at a time.
    pub fn loans(&self) -> u32 {
        self.open.shape.loans
    }

    /// How many samples each subscriber may hold at a time.
    pub fn held(&self) -> u32 {
        self.open.shape.held
    }

    /// Where its samples are.
    pub fn place(&self) -> Place {
        self.open.blocks.segment().place()
    }

    /// The GPU that this process uses them on; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.open.blocks.gpu()
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.open.name()
    }

    /// Which topic of that name it is: of one that was removed and made again there is another.
    pub fn version(&self) -> u64 {
        self.open.blocks.version()
    }

    /// The domain.
    pub fn domain(&self) -> &Domain {
        self.open.blocks.domain()
    }
}

impl Open {
    fn new(blocks: Arc<Blocks>) -> Result<Self> {
        let name = blocks.name();
        let foreign = || Unreachable::protocol(format!("it gave {name:?} without the control memory of a topic"));
        let &Control { topic: shape, .. } = blocks.shape();
        let shape = shape.ok_or_else(foreign)?;
        let topic = blocks.topic().ok_or_else(foreign)?;
        let topic = topic.clone();
        let pool = blocks.control().clone();
        let control = ControlMemory { topic, pool, _keep: blocks.keep(), generation: fork_generation() };
        Ok(Self { control: Arc::new(control), sample_type: SampleType::of(&shape), shape, blocks })
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
        let asked = domain.ping().and_then(|()| domain.health().check());
        asked.err().unwrap_or_else(|| Error::Gone(Gone::Detached { topic: self.name().to_owned() }))
    }

    /// Returns the error that a limit of the topic is reached.
    fn at_limit(&self, limit: TopicLimit) -> Error {
        let most = match limit {
            TopicLimit::Publishers => self.shape.publishers,
            TopicLimit::Subscribers => self.shape.subscribers,
            TopicLimit::Loans => self.shape.loans,
            TopicLimit::Held => self.shape.held,
        };
        LimitReached::Topic { topic: self.name().to_owned(), limit, most }.into()
    }
}

impl ControlMemory {
    /// Not in a forked child.
    fn are_ours(&self) -> bool {
        self.generation == fork_generation()
    }
}
