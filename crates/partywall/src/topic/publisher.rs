//! Publishers: they borrow blocks and publish samples in them.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use partywall_cuda::StreamRef;
use partywall_os::{lock::IgnorePoison, spare::Spare};
use partywall_shm::{
    DType,
    slots::{Attempt, HeldSlot},
    topic::{MAX_RANK, PublisherHandle},
};
use partywall_wire::{Named, Participant};

use super::{Loan, OpenTopic, TopicControl, in_flight::PublisherPort, loan::LoanInner, timelines, turns::SendTurns};
use crate::{
    adaptive_spin::AdaptiveSpin,
    backoff::Backoff,
    error::{Busy, Error, Gone, InvalidArgument, Mismatch, NotFound, Result, TopicLimit},
    slots::{self, SlotSource},
    timeline::{Lanes, Order, StreamSignal},
    wait::{Wait, Waiting},
};

/// Publishes samples in a topic. Subscribers receive the samples of one publisher in the order of publication.
///
/// Streams complete samples ([`Filled::publish_on`](super::Filled::publish_on)) without waiting for each other. Only if
/// 32 of them do so at the same time, the next one waits for the signals of another.
///
/// Dropping a publisher detaches it from the topic. Samples that its streams still write are completed nevertheless.
/// May be used from any thread.
#[derive(Debug)]
#[must_use = "a publisher that is dropped leaves the topic"]
pub struct Publisher {
    shared: Arc<PublisherShared>,
    spin: AdaptiveSpin,
    pub(super) turns: SendTurns,
}

/// The state that a publisher and its loans share.
pub(super) struct PublisherShared {
    pub(super) port: Arc<PublisherPort>,
    handle: Mutex<PublisherHandle>,
    /// The timelines on which streams complete samples.
    lanes: Lanes,
    /// The next loan, whose block the publisher takes while receivers read the sample that it has just published. It
    /// takes the place of the published loan and counts among the publisher's loans, so the topic still has enough
    /// blocks for everything that it promises. The loan has a reference to this, so the publisher closes the reserve when
    /// it is dropped.
    pub(super) reserve: Spare<LoanInner>,
    /// Last: the connection may end with it.
    pub(super) open: Arc<OpenTopic>,
}

impl Publisher {
    pub(super) fn join(open: Arc<OpenTopic>) -> Result<Self> {
        let link = open.domain().link();
        link.require_ours()?;
        open.blocks.check()?;
        let TopicControl { topic, .. } = &*open.control;
        let Some(handle) = topic.join_as_publisher(link.row()) else {
            // An evicted process finds no free port either.
            open.domain().ping()?;
            return Err(open.at_limit(TopicLimit::Publishers));
        };
        let port = PublisherPort::new(open.control.clone(), handle.port());
        let handle = Mutex::new(handle);
        let shared = PublisherShared { open, port, handle, lanes: Lanes::default(), reserve: Spare::default() };
        Ok(Self { shared: Arc::new(shared), spin: AdaptiveSpin::on_memory(), turns: SendTurns::default() })
    }

    /// Borrows a block for a tensor, and waits if none is free. The block contains what its last user left in it.
    ///
    /// A publisher holds at most as many loans as [agreed](super::TopicOptions::loans), in all its threads together.
    /// One more fails immediately, unless another thread is about to [send](Self::send). A
    /// published sample no longer counts as a loan, even if a stream still writes it. `loan` blocks while in-flight
    /// samples plus loans reach `depth + loans`, or more if the topic has [blocks for
    /// that](super::TopicOptions::blocks). A block that a [memory](super::LoanMemory) keeps counts as an in-flight
    /// sample; `loan` fails immediately if there are as many of them and of loans.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Publisher, Result};
    /// # fn publish(publisher: &Publisher) -> Result<()> {
    /// let mut loan = publisher.loan(DType::F32, &[1024], Duration::from_secs(1))?;
    /// loan.as_mut_slice::<f32>()?.fill(0.5);
    /// loan.filled().publish(Duration::from_secs(1))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`TopicLimit::Loans`], [`TopicLimit::Viewed`]; [`Mismatch::BlockSize`]; [`Mismatch::Sample`] if the topic's
    /// samples are of another type or shape; [`InvalidArgument::Range`] for a tensor of more than 8 dimensions, or that
    /// does not fill whole bytes; [`Error::Timeout`], [`Error::Cancelled`];
    /// [`Unreachable::Gone`](crate::error::Unreachable::Gone) when it has to wait;
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn loan<'w>(&self, dtype: DType, shape: &[u64], wait: impl Into<Wait<'w>>) -> Result<Loan> {
        let bytes = self.shared.bytes(dtype, shape)?;
        // Without the detour that a thread takes which may have to wait.
        if let Some(loan) = self.shared.take_reserve() {
            return Ok(loan.of(dtype, shape, bytes));
        }
        self.await_turns(wait.into(), 0, |wait| self.loan_now(dtype, shape, wait))
    }

    pub(super) fn loan_now(&self, dtype: DType, shape: &[u64], wait: Wait<'_>) -> Result<Loan> {
        let bytes = self.shared.bytes(dtype, shape)?;
        if let Some(loan) = self.shared.take_reserve() {
            return Ok(loan.of(dtype, shape, bytes));
        }
        let shared = self.shared.one_more()?;
        let wait = shared.await_in_flight(wait)?;
        let live = || shared.open.blocks.require_live();
        let held = slots::take(&*shared, shared.open.domain(), &self.spin, wait, live, || shared.no_block())?;
        Ok(Loan::new(shared, held).of(dtype, shape, bytes))
    }

    /// Borrows a block if one is free.
    ///
    /// # Errors
    /// As [`loan`](Self::loan), except the errors of waiting.
    pub fn try_loan(&self, dtype: DType, shape: &[u64]) -> Result<Option<Loan>> {
        let bytes = self.shared.bytes(dtype, shape)?;
        if let Some(loan) = self.shared.take_reserve() {
            return Ok(Some(loan.of(dtype, shape, bytes)));
        }
        let shared = self.shared.one_more()?;
        if !shared.is_close()? {
            return Ok(None);
        }
        let held = slots::try_take(&*shared, shared.open.domain())?;
        Ok(held.map(|held| Loan::new(shared, held).of(dtype, shape, bytes)))
    }

    /// Waits until the topic has at least `least` subscribers, so that each of them receives what is published next.
    ///
    /// A subscriber begins with the next sample unless it asks for [history](super::SubscriberOptions::history), so a
    /// publisher that starts first and does not wait publishes for nobody. A subscriber counts from the end of its
    /// [`join`](super::SubscriberOptions::join) until it is dropped, or its death is proved.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Publisher, Result};
    /// # fn publish(publisher: &Publisher) -> Result<()> {
    /// publisher.wait_for_subscribers(1, Duration::from_secs(60))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`TopicLimit::Subscribers`] if the topic has no room for so many;
    /// [`Unreachable::Gone`](crate::error::Unreachable::Gone) when it has to wait;
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn wait_for_subscribers<'w>(&self, least: u32, wait: impl Into<Wait<'w>>) -> Result<()> {
        let open = &self.shared.open;
        open.domain().link().require_ours()?;
        if least > open.shape.subscribers {
            return Err(open.at_limit(TopicLimit::Subscribers));
        }
        let topic = &open.control.topic;
        let waiting = wait.into().begin();
        loop {
            // Announced before the count, so that a subscriber that joins after the count wakes this thread.
            let seen = topic.prepare_for_space();
            let joined = topic.subscribers().iter().filter(|subscriber| !subscriber.detached).count();
            if joined >= least as usize {
                return Ok(());
            }
            let Some(left) = waiting.left(Instant::now()) else {
                let name = open.name();
                let what = format!("cannot wait for subscribers of topic {name:?}: {joined} of {least} joined");
                return Err(waiting.error(what));
            };
            open.blocks.require_live()?;
            topic.sleep_for_space(seen, left);
        }
    }

    /// Waits until streams have completed everything that this publisher has published. Other threads cannot publish
    /// on a stream meanwhile.
    ///
    /// # Errors
    /// As [`Timeline::wait`](crate::Timeline::wait).
    pub fn drain<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.shared.lanes.wait(wait.into())
    }

    /// Skips numbers of this publisher's samples, because samples that it was to pass on are lost. Receivers of its next
    /// sample have [missed](super::Sample::missed) as many, and see the gap in
    /// [`Sample::sequence`](super::Sample::sequence). Samples that wait to be published in other threads may get
    /// numbers before or after the gap.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] if the next number would be more than 2⁶²; then none is skipped.
    pub fn skip(&self, numbers: u64) -> Result<()> {
        let open = &self.shared.open;
        open.require_ours()?;
        if open.control.topic.skip(&mut self.shared.handle(), numbers) {
            return Ok(());
        }
        let why = format!("it cannot skip {numbers} numbers: they end at 2⁶²");
        Err(InvalidArgument::range(format!("a publisher of {:?}", open.name()), why))
    }

    /// Checks that other processes can find the topic by its name, and that this publisher can publish. Asks the
    /// broker.
    ///
    /// A publisher of a topic that was removed can go on: subscribers that have the topic open receive its samples.
    /// Processes that open the name from now on do not find the topic, or find another one.
    ///
    /// # Errors
    /// [`NotFound::Name`] if the name was removed, which says by whom within a minute after that; [`NotFound::Version`]
    /// if the name was used again since; [`Gone::Detached`], [`Gone::Evicted`];
    /// [`DeviceFault::DeviceLost`](crate::error::DeviceFault::DeviceLost); those of every call.
    pub fn check(&self) -> Result<()> {
        let PublisherShared { open, port, .. } = &*self.shared;
        open.domain().link().require_ours()?;
        open.blocks.check()?;
        if !open.control.topic.is_publisher(port.id()) {
            return Err(open.detached());
        }
        let name = open.name();
        let version = open.blocks.version();
        let domain = open.domain();
        if domain.inspect(&format!("{name}@{version}"))?.is_latest {
            return Ok(());
        }
        let latest = match domain.topic(name).open() {
            Err(error @ Error::NotFound(NotFound::Name { .. })) => return Err(error),
            // The name was used again.
            found => found.ok().map(|topic| topic.version()),
        };
        Err(NotFound::Version { name: name.to_owned(), version, latest }.into())
    }

    /// Returns the publisher's number, which no other publisher or subscriber of the topic ever has.
    pub fn id(&self) -> u64 {
        self.shared.id()
    }

    /// Returns how many samples the publisher has published.
    pub fn published(&self) -> u64 {
        // In a forked child the lock on the handle may be held by a thread that does not exist there.
        self.shared.open.control.topic.published_by(self.shared.port.id())
    }

    /// Returns the topic's name.
    pub fn topic(&self) -> &str {
        self.shared.open.name()
    }
}

impl PublisherShared {
    pub(super) fn id(&self) -> u64 {
        self.port.id().id()
    }

    /// Its lock makes threads publish one after another.
    pub(super) fn handle(&self) -> MutexGuard<'_, PublisherHandle> {
        self.handle.lock().ignore_poison()
    }

    /// Makes `stream` signal once all work that is on it now is done.
    pub(super) fn signal_on(&self, stream: StreamRef<'_>) -> Result<StreamSignal> {
        let create = |lane| {
            let signals = timelines::options(&self.open, self.id(), lane).writer()?;
            // Before the first sample of the lane.
            self.open.control.topic.set_timeline(self.port.id(), lane, Order::of(signals.timeline()).cell());
            Ok(signals)
        };
        self.lanes.signal_on(stream, create).map_err(|error| match error {
            // Only this process writes these timelines, so the broker has detached the publisher from the topic.
            Error::Gone(Gone::Timeline { .. }) => self.open.detached(),
            other => other,
        })
    }

    /// Returns whether the publisher is no further ahead of its GPU than allowed.
    fn is_close(self: &Arc<Self>) -> Result<bool> {
        if self.port.in_flight() == 0 {
            return Ok(true);
        }
        let most = self.open.control.topic.limits().most_in_use() as usize;
        let is_close = || self.port.in_flight() + self.loans() <= most;
        if is_close() {
            return Ok(true);
        }
        self.open.domain().link().require_ours()?;
        self.open.domain().completions().poll();
        if is_close() {
            return Ok(true);
        }
        // Only the program can end its views, so a wait could last for ever.
        if self.port.viewed() + self.loans() > most {
            return Err(self.open.at_limit(TopicLimit::Viewed));
        }
        Ok(false)
    }

    /// Waits until the publisher is [close](Self::is_close) to its GPU. Returns the rest of the wait.
    fn await_in_flight<'w>(self: &Arc<Self>, wait: Wait<'w>) -> Result<Wait<'w>> {
        if self.is_close()? {
            return Ok(wait);
        }
        let waiting = wait.begin();
        let mut backoff = Backoff::new();
        loop {
            if self.is_close()? {
                return Ok(waiting.resume());
            }
            let Some(left) = waiting.left(Instant::now()) else { return Err(waiting.error(self.no_block())) };
            std::thread::sleep(backoff.next().min(left));
        }
    }

    /// Prepares a block for the next loan, while receivers read the sample that was just published.
    pub(super) fn prefetch_next(&self) {
        let TopicControl { topic, pool, .. } = &*self.open.control;
        let next = pool.next_free().or_else(|| {
            topic.sweep(pool);
            pool.next_free()
        });
        if let Some(block) = next {
            topic.prefetch_to_write(block);
            self.open.blocks.prefetch_to_write(block);
        }
    }

    /// Takes the loan in reserve, unless the broker has freed its block.
    fn take_reserve(&self) -> Option<Loan> {
        let TopicControl { pool, .. } = &*self.open.control;
        // In a forked child the loan belongs to the parent.
        if !self.open.control.are_ours() {
            return None;
        }
        Loan::of_reserve(self.reserve.take()?, pool)
    }

    /// Takes a block for the reserve, if one is free and the publisher is not ahead of its GPU. The reserve takes the
    /// place of the caller's loan; it and the blocks that views keep are no more than the loans of the publisher.
    pub(super) fn take_ahead(self: &Arc<Self>) -> Option<HeldSlot> {
        let viewed = self.port.viewed();
        if self.port.in_flight() > viewed || viewed > 0 && viewed + self.loans() > self.open.shape.loans as usize {
            return None;
        }
        let held = self.try_take(self.open.domain().link().row())?;
        self.open.control.topic.prefetch_to_write(held.index());
        self.open.blocks.prefetch_to_write(held.index());
        Some(held)
    }

    /// Returns the reference for one more loan. It counts as a loan while it lives.
    #[inline]
    fn one_more(self: &Arc<Self>) -> Result<Arc<Self>> {
        let most = self.open.shape.loans as usize;
        loop {
            let shared = self.clone();
            if shared.loans() <= most {
                return Ok(shared);
            }
            drop(shared);
            // Threads that try at the same time may exceed the limit together. The last one to drop its clone finds the
            // others gone.
            if self.loans() >= most {
                self.open.domain().link().require_ours()?;
                return Err(self.open.at_limit(TopicLimit::Loans));
            }
        }
    }

    /// Returns the number of loans, including attempts to get one.
    fn loans(self: &Arc<Self>) -> usize {
        // Each loan has a reference, and so has the publisher. Counting references needs no further shared word.
        Arc::strong_count(self) - 1
    }

    /// Returns the bytes of a tensor, if the topic accepts its type and shape.
    fn bytes(&self, dtype: DType, shape: &[u64]) -> Result<u64> {
        let topic = || self.open.name().to_owned();
        let has = &self.open.sample_type;
        if !has.accepts(dtype, shape) {
            let given = format!("{dtype} {shape:?}");
            return Err(Mismatch::Sample { topic: topic(), has: has.to_string(), given }.into());
        }
        let bad = |why: String| InvalidArgument::range(format!("a sample of {:?}", topic()), why);
        if shape.len() > MAX_RANK {
            return Err(bad(format!("it has at most {MAX_RANK} dimensions, not {}", shape.len())));
        }
        let elements = shape.iter().try_fold(1_u64, |all, extent| all.checked_mul(*extent));
        let bytes = elements.and_then(|elements| dtype.bytes_for(elements));
        let needed =
            bytes.ok_or_else(|| bad(format!("{dtype} {shape:?} does not fill a number of whole bytes below 2⁶⁴")))?;
        let has = self.open.blocks.shape().block_bytes;
        if needed > has {
            return Err(Mismatch::BlockSize { name: topic(), of: Named::Topic, has, needed }.into());
        }
        Ok(needed)
    }

    /// Returns the error of a wait for a blocking subscriber. A publisher without a timeout does not wait for the
    /// broker's answer about the subscriber either.
    pub(super) fn full(&self, subscriber: u64, waiting: &Waiting<'_>) -> Error {
        let topic = self.open.name();
        if waiting.was_cancelled() {
            let what = format!("cannot publish in topic {topic:?}: a subscriber did not consume the oldest sample");
            return waiting.error(what);
        }
        let known = if waiting.timeout().is_zero() { None } else { self.find_subscriber(subscriber) };
        let (pid, state) = known.map_or((None, None), |who| (who.pid, who.state));
        Error::Busy(Busy::TopicFull { topic: topic.to_owned(), pid, state, after: waiting.start().elapsed() })
    }

    fn find_subscriber(&self, id: u64) -> Option<Participant> {
        let name = format!("{}@{}", self.open.name(), self.open.blocks.version());
        let topic = self.open.domain().inspect(&name).ok()?.control?.topic?;
        topic.subscribers.into_iter().map(|info| info.who).find(|who| who.id == id)
    }

    fn no_block(&self) -> String {
        let views = match self.port.viewed() {
            0 => String::new(),
            viewed => {
                format!("; arrays of published samples, or of loans that are over, keep {viewed} of this publisher")
            }
        };
        format!("cannot loan a block of topic {:?}: none became free{views}", self.open.name())
    }
}

/// Sweeps find free blocks.
impl SlotSource for PublisherShared {
    fn try_take(&self, row: u16) -> Option<HeldSlot> {
        let TopicControl { topic, pool, .. } = &*self.open.control;
        pool.try_take(row).or_else(|| {
            topic.sweep(pool);
            pool.try_take(row)
        })
    }

    fn take(&self, row: u16) -> Attempt<'_> {
        let TopicControl { topic, pool, .. } = &*self.open.control;
        let attempt = pool.take(row);
        if matches!(attempt, Attempt::Waiting(_)) {
            topic.sweep(pool);
        }
        attempt
    }

    fn rescue(&self) {
        let TopicControl { topic, pool, .. } = &*self.open.control;
        pool.revoke_overdue();
        topic.sweep(pool);
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.shared.open.control.are_ours() {
            drop(self.shared.reserve.close());
        }
    }
}

impl Drop for PublisherShared {
    fn drop(&mut self) {
        if self.open.control.are_ours() {
            self.open.control.topic.detach_publisher(self.port.id());
            // Samples that streams have completed no longer keep the port.
            self.open.domain().completions().poll();
        }
    }
}

impl fmt::Debug for PublisherShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublisherShared")
            .field("topic", &self.open.name())
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}
