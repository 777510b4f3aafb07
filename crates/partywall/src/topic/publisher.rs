//! Publishers: who has samples to give.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use partywall_cuda::StreamRef;
use partywall_shm::{
    DType,
    semaphore::{Attempt, Held},
    topic::{MAX_RANK, PortId, PublisherPlace},
};
use partywall_wire::{Named, Participant};

use super::{Loan, Open, Words, in_flight::InFlightSamples, timelines};
use crate::{
    adaptive_spin::AdaptiveSpin,
    backoff::Backoff,
    error::{Error, Result},
    slots::{self, Slots},
    timeline::TimelineWriter,
};

/// Someone who publishes samples. Those of one publisher are received in the order in which it published them.
///
/// Samples that a stream completes ([`Filled::publish_on`](super::Filled::publish_on)) are ordered by a timeline of the
/// publisher's own, and so all come from one stream at a time: changing between streams waits for the former one. For
/// several streams, make several publishers.
///
/// Dropping it takes it out of the topic; what its streams still owe comes all the same. May be used from any thread.
#[derive(Debug)]
#[must_use = "a publisher that is dropped leaves the topic"]
pub struct Publisher {
    joined: Arc<Joined>,
    spin: AdaptiveSpin,
}

/// What a publisher and its loans have.
pub(super) struct Joined {
    port: PortId,
    place: Mutex<PublisherPlace>,
    /// How streams say that samples are complete, once one does.
    writer: Mutex<Option<Writer>>,
    in_flight: Arc<InFlightSamples>,
    /// Last: the connection may end with it.
    pub(super) open: Arc<Open>,
}

/// The timeline of a publisher.
pub(super) struct Writer {
    pub(super) timeline: TimelineWriter,
    pub(super) order: timelines::Order,
    /// The last value that was promised.
    last: u64,
}

impl Publisher {
    pub(super) fn join(open: Arc<Open>) -> Result<Self> {
        let link = open.domain().link();
        link.require_ours()?;
        let Words { topic, .. } = &*open.words;
        let Some(place) = topic.join_as_publisher(link.row()) else {
            // An evicted process finds no place either.
            open.domain().ping()?;
            return Err(Error::TooManyPublishers { topic: open.name().to_owned(), most: topic.shape().publishers });
        };
        let in_flight = InFlightSamples::new(open.words.clone(), place.port(), open.domain());
        let port = place.port();
        let place = Mutex::new(place);
        let writer = Mutex::default();
        let joined = Joined { open, port, place, writer, in_flight: Arc::new(in_flight) };
        Ok(Self { joined: Arc::new(joined), spin: AdaptiveSpin::on_memory() })
    }

    /// Borrows a block for a tensor, and waits for one up to `timeout`. What is in it is what its last user left there.
    ///
    /// A publisher has as many loans at a time as [agreed](super::TopicOptions::loans), whatever threads have them or wait for
    /// one. What is published is no loan any more, even if a stream still writes it. But it waits for its GPU while that and
    /// its loans are as many blocks as the ring keeps, and it may have loans, or more where the topic has
    /// [blocks for that](super::TopicOptions::blocks).
    ///
    /// # Errors
    /// [`Error::TooManyLoans`]; [`Error::BlockTooSmall`]; [`Error::WrongSample`] if the topic's samples are of
    /// another type or shape; [`Error::BadRange`] for a tensor of more than 8 dimensions, or that does not fill whole bytes; [`Error::Timeout`];
    /// [`Error::BrokerGone`] when it has to wait; [`Error::Forked`].
    pub fn loan(&self, dtype: DType, shape: &[u64], timeout: Duration) -> Result<Loan> {
        let bytes = self.joined.bytes(dtype, shape)?;
        let joined = self.joined.one_more()?;
        match self.take_unless(timeout, || false)? {
            Some(held) => Ok(joined.lend(held, dtype, shape, bytes)),
            None => Err(self.joined.no_block(timeout)),
        }
    }

    /// As [`loan`](Self::loan), but gives up when `stop` says so: then it is `None`. While it waits `stop` is asked every
    /// 100 ms at least.
    ///
    /// # Errors
    /// As [`loan`](Self::loan).
    pub fn loan_unless(
        &self,
        dtype: DType,
        shape: &[u64],
        timeout: Duration,
        stop: impl FnMut() -> bool,
    ) -> Result<Option<Loan>> {
        let bytes = self.joined.bytes(dtype, shape)?;
        let joined = self.joined.one_more()?;
        Ok(self.take_unless(timeout, stop)?.map(|held| joined.lend(held, dtype, shape, bytes)))
    }

    fn take_unless(&self, timeout: Duration, mut stop: impl FnMut() -> bool) -> Result<Option<Held>> {
        let Self { joined, spin } = self;
        let late = || joined.no_block(timeout);
        let Some(left) = joined.await_in_flight(timeout, &mut stop)? else { return Ok(None) };
        slots::take_unless(&**joined, joined.open.domain(), spin, left, stop, late)
    }

    /// Borrows a block if one is free.
    ///
    /// # Errors
    /// As [`loan`](Self::loan), but for those of waiting.
    pub fn try_loan(&self, dtype: DType, shape: &[u64]) -> Result<Option<Loan>> {
        let bytes = self.joined.bytes(dtype, shape)?;
        let joined = self.joined.one_more()?;
        if !joined.is_close()? {
            return Ok(None);
        }
        let held = slots::try_take(&*joined, joined.open.domain())?;
        Ok(held.map(|held| joined.lend(held, dtype, shape, bytes)))
    }

    /// Waits up to `timeout` until streams have completed all that it has published. Nothing is published meanwhile.
    ///
    /// # Errors
    /// [`Error::Timeout`]; as [`Timeline::wait`](crate::Timeline::wait).
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        match &*self.joined.writer() {
            Some(Writer { timeline, last, .. }) => timeline.wait(*last, timeout),
            None => Ok(()),
        }
    }

    /// Its number, which no other publisher or subscriber of the topic ever has.
    pub fn id(&self) -> u64 {
        self.joined.id()
    }

    /// Samples that it has published.
    pub fn published(&self) -> u64 {
        // In a forked child the lock on the place may be held by nobody who is still there.
        self.joined.open.words.topic.published_by(self.joined.port)
    }

    /// The topic's name.
    pub fn topic(&self) -> &str {
        self.joined.open.name()
    }
}

impl Joined {
    pub(super) fn id(&self) -> u64 {
        self.port.id()
    }

    pub(super) fn port(&self) -> PortId {
        self.port
    }

    /// Samples are published one after the other.
    pub(super) fn place(&self) -> MutexGuard<'_, PublisherPlace> {
        // What it remembers is right after each step.
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn in_flight(&self) -> &Arc<InFlightSamples> {
        &self.in_flight
    }

    /// Has `stream` say when what is on it now is done. Returns the value that stands for that.
    pub(super) fn signal_on(&self, stream: StreamRef<'_>) -> Result<(timelines::Order, u64)> {
        let mut writer = self.writer();
        let Writer { timeline, order, last } = match &mut *writer {
            Some(writer) => writer,
            none => none.insert(self.begin_timeline()?),
        };
        timeline.signal_on(stream, *last + 1).map_err(|error| match error {
            // Nobody but us has begun it: it is our part in the topic that has ended.
            Error::TimelineEnded { .. } => self.open.parted(),
            other => other,
        })?;
        *last += 1;
        Ok((order.clone(), *last))
    }

    fn writer(&self) -> MutexGuard<'_, Option<Writer>> {
        // What was promised is counted after it was.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its GPU is not further behind than it may be.
    fn is_close(self: &Arc<Self>) -> Result<bool> {
        if self.in_flight.count() == 0 {
            return Ok(true);
        }
        let shape = self.open.words.topic.shape();
        let [depth, publishers, loans] = [shape.depth, shape.publishers, shape.loans].map(u64::from);
        // All others may be stopped when they are so far ahead, and what they have published overwritten in the ring.
        let needed = shape.needed_blocks() + (publishers - 1) * depth;
        let spare = u64::from(shape.blocks).saturating_sub(needed);
        let most = depth + loans + spare / publishers;
        let is_close = || (self.in_flight.count() + self.loans()) as u64 <= most;
        if is_close() {
            return Ok(true);
        }
        self.open.domain().link().require_ours()?;
        self.in_flight.look();
        Ok(is_close())
    }

    /// Waits until it is. Returns how much of the time is left; `None` if it is stopped.
    fn await_in_flight(
        self: &Arc<Self>,
        timeout: Duration,
        stop: &mut impl FnMut() -> bool,
    ) -> Result<Option<Duration>> {
        if self.is_close()? {
            return Ok(Some(timeout));
        }
        let start = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if self.is_close()? {
                return Ok(Some(left));
            }
            if left.is_zero() {
                return Err(self.no_block(timeout));
            }
            if stop() {
                return Ok(None);
            }
            std::thread::sleep(backoff.next().min(left));
        }
    }

    fn begin_timeline(&self) -> Result<Writer> {
        let timeline = self.open.domain().timeline_writer(&timelines::name(&self.open, self.id()))?;
        let order = timelines::Order::of(&timeline);
        let last = timeline.announced();
        self.open.words.topic.set_timeline(&self.place(), order.cell());
        Ok(Writer { timeline, order, last })
    }

    /// Readies a block for the next loan: whoever waits for what has just been published is not kept from it.
    pub(super) fn look_ahead(&self) {
        let Words { topic, pool, .. } = &*self.open.words;
        let next = pool.next_free().or_else(|| {
            topic.sweep(pool);
            pool.next_free()
        });
        if let Some(block) = next {
            topic.prefetch_to_write(block);
            self.open.blocks.prefetch_to_write(block);
        }
    }

    /// For another loan, if it may have one. Counts as such for as long as it lives.
    #[inline]
    fn one_more(self: &Arc<Self>) -> Result<Arc<Self>> {
        let most = self.open.shape.loans as usize;
        loop {
            let joined = self.clone();
            if joined.loans() <= most {
                return Ok(joined);
            }
            drop(joined);
            // Threads that try at the same time are too many together. The last of them that sees so finds the others gone.
            if self.loans() >= most {
                self.open.domain().link().require_ours()?;
                return Err(Error::TooManyLoans { topic: self.open.name().to_owned(), loans: most as u32 });
            }
        }
    }

    /// How many it has, and others try to get.
    fn loans(self: &Arc<Self>) -> usize {
        // Each has one of these, and the publisher: they are counted as it is, without another word that threads share.
        Arc::strong_count(self) - 1
    }

    #[inline]
    fn lend(self: Arc<Self>, held: Held, dtype: DType, shape: &[u64], bytes: u64) -> Loan {
        Loan::new(self, held, dtype, shape, bytes)
    }

    /// Bytes of a tensor that this topic can have.
    fn bytes(&self, dtype: DType, shape: &[u64]) -> Result<u64> {
        let topic = || self.open.name().to_owned();
        let has = self.open.sample_type;
        if !has.accepts(dtype, shape) {
            let given = format!("{dtype} {shape:?}");
            return Err(Error::WrongSample { topic: topic(), has: has.to_string(), given });
        }
        let bad = |why: String| Error::BadRange { tensor: format!("a sample of {:?}", topic()), why };
        if shape.len() > MAX_RANK {
            return Err(bad(format!("it has at most {MAX_RANK} dimensions, not {}", shape.len())));
        }
        let elements = shape.iter().try_fold(1_u64, |all, extent| all.checked_mul(*extent));
        let bytes = elements.and_then(|elements| dtype.bytes_for(elements));
        let needed = bytes.ok_or_else(|| bad(format!("{dtype} {shape:?} does not fill a number of whole bytes")))?;
        let has = self.open.blocks.shape().block_bytes;
        if needed > has {
            return Err(Error::BlockTooSmall { name: topic(), of: Named::Topic, has, needed });
        }
        Ok(needed)
    }

    /// A subscriber has kept us waiting for too long: whose it is, and how that is. Who does not wait for it does not wait
    /// for the broker's answer either.
    pub(super) fn full(&self, subscriber: u64, timeout: Duration, after: Duration) -> Error {
        let known = if timeout.is_zero() { None } else { self.find_subscriber(subscriber) };
        let (pid, state) = known.map_or((None, None), |who| (who.pid, who.state));
        Error::TopicFull { topic: self.open.name().to_owned(), pid, state, after }
    }

    fn find_subscriber(&self, id: u64) -> Option<Participant> {
        let name = format!("{}@{}", self.open.name(), self.open.blocks.version());
        let topic = self.open.domain().inspect(&name).ok()?.control?.topic?;
        topic.subscribers.into_iter().map(|info| info.who).find(|who| who.id == id)
    }

    /// Other publishers were always faster.
    pub(super) fn busy(&self, after: Duration) -> Error {
        let what = format!("cannot publish in topic {:?}: other publishers took every place", self.open.name());
        Error::Timeout { what, after }
    }

    fn no_block(&self, after: Duration) -> Error {
        let what = format!("cannot loan a block of topic {:?}: none became free", self.open.name());
        Error::Timeout { what, after }
    }
}

/// Blocks are found by sweeping.
impl Slots for Joined {
    fn try_take(&self, row: u16) -> Option<Held> {
        let Words { topic, pool, .. } = &*self.open.words;
        pool.try_alloc(row).or_else(|| {
            self.in_flight.look();
            topic.sweep(pool);
            pool.try_alloc(row)
        })
    }

    fn take(&self, row: u16) -> Attempt<'_> {
        let Words { topic, pool, .. } = &*self.open.words;
        let attempt = pool.alloc(row);
        if matches!(attempt, Attempt::Waiting(_)) {
            topic.sweep(pool);
        }
        attempt
    }

    fn look_after(&self) {
        let Words { topic, pool, .. } = &*self.open.words;
        pool.look_after_granted();
        topic.sweep(pool);
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        if self.open.words.are_ours() {
            self.in_flight.leave(self.open.domain());
        }
    }
}

impl fmt::Debug for Joined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joined").field("topic", &self.open.name()).field("id", &self.id()).finish_non_exhaustive()
    }
}
