//! Options to create and open topics.

use std::{sync::Arc, time::Duration};

use partywall_cuda::{DeviceUuid, ForeignMemory};
use partywall_shm::{
    DType,
    pool::MAX_BLOCKS,
    topic::{MAX_DEPTH, MAX_HELD, MAX_LOANS, MAX_PUBLISHERS, MAX_SUBSCRIBERS, TopicLimits},
};
use partywall_wire::{Control, MAX_RANK, Named, SampleShape, TopicShape};

use super::{OpenTopic, SampleType, Topic};
use crate::{
    domain::Domain,
    error::{InvalidArgument, Result},
    place::Place,
    pool::{Wanted, wanted_setters},
};

/// Options to create or open a topic; see [`Domain::topic`].
///
/// An existing topic must agree with every option that is set.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until create(), open() or open_or_create()"]
pub struct TopicOptions {
    pub(super) wanted: Wanted,
    max_bytes: Option<u64>,
    dtype: Option<DType>,
    shape: Option<Vec<Option<u64>>>,
    depth: Option<u32>,
    history: Option<u32>,
    publishers: Option<u32>,
    loans: Option<u32>,
    subscribers: Option<u32>,
    held: Option<u32>,
    blocks: Option<u32>,
    pub(super) stamps: bool,
}

impl TopicOptions {
    pub(super) fn new(domain: Domain, name: &str) -> Self {
        Self {
            wanted: Wanted::new(domain, Named::Topic, name, OpenTopic::map),
            max_bytes: None,
            dtype: None,
            shape: None,
            depth: None,
            history: None,
            publishers: None,
            loans: None,
            subscribers: None,
            held: None,
            blocks: None,
            stamps: true,
        }
    }

    /// Sets the bytes of the largest sample. Required to create a topic, unless [`dtype`](Self::dtype) and
    /// [`shape`](Self::shape) determine it. Without those two, samples may have any type and shape.
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = Some(bytes);
        self
    }

    /// Sets the element type of all samples; publishing another type fails with
    /// [`Mismatch::Sample`](crate::error::Mismatch::Sample). By default each sample may have its own type.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets the shape of all samples; publishing another shape fails with
    /// [`Mismatch::Sample`](crate::error::Mismatch::Sample). By default each sample may have its own shape.
    pub fn shape(mut self, shape: &[u64]) -> Self {
        self.shape = Some(shape.iter().copied().map(Some).collect());
        self
    }

    /// Sets the shape of all samples, where a dimension of `None` may have any length. Creating such a topic requires
    /// [`max_bytes`](Self::max_bytes), too.
    ///
    /// ```no_run
    /// # use partywall::{DType, Domain};
    /// # let domain = Domain::connect()?;
    /// let strips = domain.topic("strips").dtype(DType::U8).varying_shape(&[None, Some(640), Some(3)]).max_bytes(1 << 20);
    /// # strips.create()?;
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn varying_shape(mut self, shape: &[Option<u64>]) -> Self {
        self.shape = Some(shape.to_vec());
        self
    }

    /// Sets how many samples the ring keeps, which is how far subscribers may be behind. The default is 4. Rounded up
    /// to a power of two that is larger than the [history](Self::history).
    pub fn depth(mut self, samples: u32) -> Self {
        self.depth = Some(samples);
        self
    }

    /// Sets how many samples published before it joined a subscriber gets, unless its own options say otherwise. The
    /// default is 0.
    pub fn history(mut self, samples: u32) -> Self {
        self.history = Some(samples);
        self
    }

    /// Sets how many publishers there may be at a time. The default is 2.
    pub fn publishers(mut self, most: u32) -> Self {
        self.publishers = Some(most);
        self
    }

    /// Sets how many blocks each publisher may have on loan at a time, which it has not published. The default is 2:
    /// one that it fills while another waits for subscribers. More loans are
    /// [refused](crate::error::TopicLimit::Loans).
    pub fn loans(mut self, most: u32) -> Self {
        self.loans = Some(most);
        self
    }

    /// Sets how many subscribers there may be at a time. The default is 4.
    pub fn subscribers(mut self, most: u32) -> Self {
        self.subscribers = Some(most);
        self
    }

    /// Sets how many samples each subscriber may hold at a time. The default is 2.
    pub fn held(mut self, samples: u32) -> Self {
        self.held = Some(samples);
        self
    }

    /// Sets the number of blocks. The default, and the minimum, is depth + publishers · loans + subscribers · held:
    /// 4 + 2 · 2 + 4 · 2 = 16 with all defaults. That is enough as long as every process keeps running.
    ///
    /// A publisher may be depth + loans samples ahead of its GPU, and their blocks are in use until the GPU is done.
    /// With depth · (publishers − 1) more blocks, one publisher can continue even if all others are stopped in that
    /// state. Each publisher may be further ahead by its share of any blocks beyond those.
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Sets whether publishers of this handle stamp samples with the time, which costs one reading of the clock. The
    /// default is true. Samples without a stamp have no [age](super::Sample::age) and are in no statistics of ages.
    /// Other handles of the same topic, in this process or in others, are not affected.
    pub fn stamps(mut self, stamps: bool) -> Self {
        self.stamps = stamps;
        self
    }

    wanted_setters!("topic", "samples");

    /// Creates the topic.
    ///
    /// # Errors
    /// [`Denied::NameExists`](crate::error::Denied::NameExists); [`InvalidArgument::Options`],
    /// [`InvalidArgument::TooFewBlocks`]; as [`Builder::allocate`](crate::Builder::allocate) and
    /// [`Build::commit`](crate::Build::commit).
    pub fn create(&self) -> Result<Topic> {
        Topic::new(self.wanted.create(self.control()?)?, self.stamps)
    }

    /// Creates the topic in GPU memory that other code allocated, as kind `legacy`.
    /// [`PoolOptions::create_in`](crate::PoolOptions::create_in) describes what such memory promises. The memory must
    /// have room for all blocks, each with [`max_bytes`](Self::max_bytes) rounded up to a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`InvalidArgument::Options`], [`InvalidArgument::TooFewBlocks`]; as
    /// [`PoolOptions::create_in`](crate::PoolOptions::create_in).
    pub fn create_in(&self, memory: &ForeignMemory) -> Result<Topic> {
        Topic::new(self.wanted.create_in(memory, self.control()?)?, self.stamps)
    }

    /// Opens the topic.
    ///
    /// # Errors
    /// - [`NotFound::Name`](crate::error::NotFound::Name) without a timeout, [`Error::Timeout`](crate::Error::Timeout)
    ///   with one;
    /// - [`Mismatch::Object`](crate::error::Mismatch::Object) if the name is not a topic,
    ///   [`Mismatch::Options`](crate::error::Mismatch::Options) if the topic differs from these options;
    /// - as [`OpenOptions::open`](crate::OpenOptions::open).
    pub fn open(&self) -> Result<Topic> {
        Topic::new(self.wanted.open(|control| self.check(control))?, self.stamps)
    }

    /// Opens the topic, or creates it if it does not exist. If several processes call this at once, one of them creates
    /// the topic; if it dies, another does.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) while another process creates it; as [`create`](Self::create) and
    /// [`open`](Self::open), except [`Denied::NameExists`](crate::error::Denied::NameExists) and
    /// [`NotFound::Name`](crate::error::NotFound::Name).
    pub fn open_or_create(&self) -> Result<Topic> {
        Topic::new(self.wanted.open_or_create(self.control()?, |control| self.check(control))?, self.stamps)
    }

    /// Returns the shape of the topic to create.
    fn control(&self) -> Result<Control> {
        let bad = |why: String| self.wanted.invalid(why);
        let sample_type = self.sample_type()?;
        let block_bytes = self.block_bytes(&sample_type).map_err(bad)?;
        if self.wanted.name.len() > MAX_NAME {
            return Err(bad(format!(
                "its name has at most {MAX_NAME} bytes, for its publishers' timelines have longer ones"
            )));
        }
        let depth = self.depth.unwrap_or(DEPTH);
        let history = self.history.unwrap_or(0);
        let publishers = self.publishers.unwrap_or(PUBLISHERS);
        let loans = self.loans.unwrap_or(LOANS);
        let subscribers = self.subscribers.unwrap_or(SUBSCRIBERS);
        let held = self.held.unwrap_or(HELD);
        let limits = [
            ("a depth of", depth, MAX_DEPTH),
            ("a history and one more, of", history.saturating_add(1), MAX_DEPTH),
            ("room for publishers:", publishers, MAX_PUBLISHERS),
            ("loans of a publisher:", loans, MAX_LOANS),
            ("room for subscribers:", subscribers, MAX_SUBSCRIBERS),
            ("samples that a subscriber may hold:", held, MAX_HELD),
        ];
        for (what, number, most) in limits {
            if !(1..=most).contains(&number) {
                return Err(bad(format!("it has {what} 1 to {most}, not {number}")));
            }
        }
        let depth = depth.max(history + 1).next_power_of_two();
        let mut limits = TopicLimits { blocks: 0, depth, publishers, loans, subscribers, held };
        let needed = limits.needed_blocks();
        if needed > MAX_BLOCKS.into() {
            return Err(bad(format!("it would need {needed} blocks, and has at most {MAX_BLOCKS}")));
        }
        let blocks = self.blocks.unwrap_or(needed as u32);
        if u64::from(blocks) < needed {
            let name = self.wanted.name.clone();
            let few =
                InvalidArgument::TooFewBlocks { name, blocks, needed, depth, publishers, loans, subscribers, held };
            return Err(few.into());
        }
        limits.blocks = blocks;
        if !limits.is_possible() {
            return Err(bad(format!("it has at most {MAX_BLOCKS} blocks, not {blocks}")));
        }
        let SampleType { dtype, shape } = sample_type;
        let dtype = dtype.map(DType::code);
        let topic = TopicShape { depth, history, publishers, loans, subscribers, held, dtype, shape };
        let control = Control { blocks, block_bytes, zeroed: false, topic: Some(topic), queue: None };
        match control.data_bytes() {
            Some(bytes) if bytes > 0 => Ok(control),
            Some(_) => Err(bad("its largest sample has at least one byte".into())),
            None => Err(bad(format!("{blocks} blocks of {block_bytes} bytes are more than can be counted"))),
        }
    }

    /// Returns the type and shape that the options set for all samples.
    fn sample_type(&self) -> Result<SampleType> {
        let shape = self.shape.as_ref().map(|shape| {
            let why = || format!("samples have at most {MAX_RANK} dimensions, not {}", shape.len());
            SampleShape::new(shape).ok_or_else(|| self.wanted.invalid(why()))
        });
        Ok(SampleType { dtype: self.dtype, shape: shape.transpose()? })
    }

    /// Returns the bytes of a block, or why they are unknown.
    fn block_bytes(&self, samples: &SampleType) -> Result<u64, String> {
        match (self.max_bytes, samples.bytes()) {
            (_, Some(None)) => Err(format!("a sample of {samples} does not fill a number of whole bytes below 2⁶⁴")),
            (Some(most), Some(Some(bytes))) if bytes > most => {
                Err(format!("a sample of {samples} has {bytes} bytes, more than the {most} of the largest one"))
            }
            (Some(most), _) => Ok(most),
            (None, Some(Some(bytes))) => Ok(bytes),
            (None, None) => Err(format!("samples of {samples} may have any size, and max_bytes is not given")),
        }
    }

    /// Refuses a topic that differs from the options.
    pub(super) fn check(&self, control: &Control) -> Result<()> {
        let Some(topic) = &control.topic else { return Ok(()) };
        let differs = |why: String| Err(self.wanted.differs(why));
        let asked = self.sample_type()?;
        let has = SampleType::of(topic);
        if asked.dtype.is_some() && asked.dtype != has.dtype || asked.shape.is_some() && asked.shape != has.shape {
            return differs(format!("its samples are of {has}, not of {asked}"));
        }
        let numbers = [
            ("samples of at most", "bytes", self.max_bytes, control.block_bytes),
            ("a history of", "samples", self.history.map(u64::from), topic.history.into()),
            ("room for", "publishers", self.publishers.map(u64::from), topic.publishers.into()),
            ("publishers that have at most", "loans", self.loans.map(u64::from), topic.loans.into()),
            ("room for", "subscribers", self.subscribers.map(u64::from), topic.subscribers.into()),
            ("subscribers that hold at most", "samples", self.held.map(u64::from), topic.held.into()),
            ("a pool of", "blocks", self.blocks.map(u64::from), control.blocks.into()),
        ];
        for (what, unit, asked, has) in numbers {
            if let Some(asked) = asked.filter(|asked| *asked != has) {
                return differs(format!("it has {what} {has} {unit}, not {asked}"));
            }
        }
        // Rounded up as at the creation.
        if let Some(asked) = self.depth.filter(|asked| *asked > topic.depth) {
            return differs(format!("its ring keeps {} samples, not {asked}", topic.depth));
        }
        Ok(())
    }
}

impl Topic {
    pub(super) fn new(blocks: Arc<crate::pool::Blocks>, stamps: bool) -> Result<Self> {
        OpenTopic::new(blocks, stamps).map(|open| Self { open: Arc::new(open) })
    }
}

/// The most bytes of a topic's name. The names of its [`timelines`](super::timelines) are longer, and still within the
/// limit for names.
const MAX_NAME: usize = 200;
const DEPTH: u32 = 4;
const PUBLISHERS: u32 = 2;
const LOANS: u32 = 2;
const SUBSCRIBERS: u32 = 4;
const HELD: u32 = 2;
