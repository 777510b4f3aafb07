//! Loans, filled samples and published samples. They are three types, so that a half-written sample cannot be published
//! and a published sample cannot be written.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use partywall_cuda::StreamRef;
use partywall_os::{borrow::BorrowedBlockMut, spare::Spare};
use partywall_shm::{
    DType, members, pool as shm_pool,
    slots::{HeldSlot, Stale},
    topic::{MAX_RANK, Message, NO_STAMP, Status, Unpublished},
};

use super::{
    MAX_HEADER, TopicControl,
    in_flight::{InFlight, UserValues, Written},
    memory::{LoanMemory, LoanViews},
    publisher::PublisherShared,
    sample::{Reading, Sample, Validity, check_dtype, not_elements},
};
use crate::{
    completion::{Completion, Fence},
    domain::Domain,
    element::{Element, elements_mut},
    error::{Error, Failed, Gone, InvalidArgument, Result},
    gpu::{DeviceRange, Gpu},
    pool::{Block, Blocks},
    recorder::Action,
    timeline::StreamSignal,
    wait::Wait,
};

/// A block of a topic that this process fills and no other process sees. Dropping it gives the block back.
///
/// If [`device`](Self::device) was called, work that this process has enqueued may still use the block. Dropping the
/// loan then frees the block once all work is done that the process has on that GPU at that moment.
#[must_use = "a loan that is dropped gives its block back"]
pub struct Loan {
    inner: Box<LoanInner>,
}

/// What a loan consists of. It is moved as one address, and the publisher's [reserve](PublisherShared::reserve) uses the same
/// allocation for the next loan: moving 224 bytes from call to call took a fifth of the time of a sample.
pub(super) struct LoanInner {
    publisher: Arc<PublisherShared>,
    /// The borrowed bytes, after the first call that uses them. Given back before the block.
    borrowed: Option<BorrowedBlockMut>,
    /// The block; `None` once it is given back, or published.
    held: Option<HeldSlot>,
    /// True if the GPU address was handed out, so that work of this process may use the block.
    exposed: AtomicBool,
    dtype: DType,
    rank: usize,
    shape: [u64; MAX_RANK],
    bytes: u64,
    header: Vec<u8>,
    inputs: Vec<Arc<Reading>>,
    used: UserValues,
    views: LoanViews,
}

/// Shows other processes that a publisher waits for a subscriber. A guard, because a panic may end the wait, too.
struct Blocked<'a> {
    publisher: &'a PublisherShared,
    since: u64,
}

/// A sample that is filled, or that enqueued work of a stream will fill. Its bytes can no longer be written.
#[must_use = "a filled sample that is dropped is not published"]
pub struct Filled(Loan);

/// The numbers of a published sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The number of samples that its publisher had published or [skipped](super::Publisher::skip) before.
    pub sequence: u64,
    /// The number of samples that had been published in the topic before.
    pub position: u64,
}

impl Loan {
    pub(super) fn new(publisher: Arc<PublisherShared>, held: HeldSlot) -> Self {
        let inner = LoanInner {
            publisher,
            borrowed: None,
            held: Some(held),
            exposed: AtomicBool::new(false),
            dtype: DType::U8,
            rank: 0,
            shape: [0; MAX_RANK],
            bytes: 0,
            header: Vec::new(),
            inputs: Vec::new(),
            used: UserValues::default(),
            views: LoanViews::default(),
        };
        Self { inner: Box::new(inner) }
    }

    /// Makes this a loan for a tensor.
    pub(super) fn of(mut self, dtype: DType, extents: &[u64], bytes: u64) -> Self {
        self.inner.dtype = dtype;
        self.inner.rank = extents.len();
        self.inner.shape[..extents.len()].copy_from_slice(extents);
        self.inner.bytes = bytes;
        self
    }

    /// Returns the loan that was in reserve, if this process still holds its block.
    pub(super) fn of_reserve(mut inner: Box<LoanInner>, pool: &shm_pool::Pool) -> Option<Self> {
        let is_held = inner.held.as_ref().is_some_and(|held| pool.is_current(held.index(), held.generation()));
        if is_held {
            return Some(Self { inner });
        }
        inner.held = None;
        None
    }

    /// Turns the loan into its publisher's reserve, with another block; its former block is published.
    fn refill(self) {
        let mut inner = self.inner;
        let Some(held) = inner.publisher.take_ahead() else { return };
        inner.borrowed = inner.publisher.open.blocks.borrow_mut(held.index());
        inner.held = Some(held);
        *inner.exposed.get_mut() = false;
        inner.header.clear();
        inner.inputs.clear();
        inner.views = LoanViews::default();
        // Refused if there is a loan already, or the publisher is gone.
        drop(Spare::put(inner, |inner| &inner.publisher.reserve));
    }

    /// Returns the bytes for writing by the CPU. Host and pinned memory only. If [`device`](Self::device) was called,
    /// first waits until all work of this process on that GPU is done, because that work may write the bytes.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for GPU memory; [`Gone::HeldBlock`] if the broker took this process for dead and freed the
    /// block; [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        borrow(
            &mut self.inner.borrowed,
            &self.inner.publisher,
            &self.inner.held,
            *self.inner.exposed.get_mut(),
            self.inner.bytes,
        )
    }

    /// Fills the sample with a copy of `bytes`, in any kind of memory. If [`device`](Self::device) was called, first
    /// waits as [`bytes_mut`](Self::bytes_mut) does. Host-synchronous. [`Publisher::send`](super::Publisher::send) does
    /// this and publishes.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] unless the sample has as many bytes; otherwise as [`bytes_mut`](Self::bytes_mut) in
    /// main memory, and [`DeviceFault`](crate::error::DeviceFault) on a GPU.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let has = self.len();
        if bytes.len() as u64 != has {
            let why = format!("it has {has} bytes, and {} were given", bytes.len());
            return Err(InvalidArgument::range(format!("a sample of {:?}", self.topic()), why));
        }
        self.write_at(0, bytes)
    }

    /// Copies bytes into the sample from `offset` on, in any kind of memory, as [`write`](Self::write) does: for a
    /// sample that comes in parts. [`Sample::read_at`] is the opposite.
    ///
    /// ```no_run
    /// # fn fill(loan: &mut partywall::Loan, parts: &[Vec<u8>]) -> partywall::Result<()> {
    /// let mut offset = 0;
    /// for part in parts {
    ///     loan.write_at(offset, part)?;
    ///     offset += part.len() as u64;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] for bytes that the sample does not have; otherwise as [`write`](Self::write).
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let LoanInner { publisher, bytes: has, exposed, .. } = &*self.inner;
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > *has) {
            let why = format!("bytes {offset} + {} are not among its {has}", bytes.len());
            return Err(InvalidArgument::range(format!("a sample of {:?}", self.topic()), why));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let is_exposed = exposed.load(Ordering::Relaxed);
        let Some(range) = publisher.open.blocks.on_gpu(self.held().index(), offset, bytes.len(), is_exposed)? else {
            self.bytes_mut()?[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            return Ok(());
        };
        // A copy that has failed may go on.
        range.copy_from_host(range.gpu().stream(), bytes).inspect_err(|_| exposed.store(true, Ordering::Relaxed))
    }

    /// Returns the elements for writing by the CPU, as [`bytes_mut`](Self::bytes_mut) returns the bytes.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut); [`Mismatch::DType`](crate::error::Mismatch::DType).
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let topic = || self.inner.publisher.open.name();
        check_dtype::<T>(topic, self.inner.dtype)?;
        let exposed = *self.inner.exposed.get_mut();
        let bytes =
            borrow(&mut self.inner.borrowed, &self.inner.publisher, &self.inner.held, exposed, self.inner.bytes)?;
        elements_mut(bytes).map_err(|error| not_elements(topic(), error))
    }

    /// Returns the block's range on its GPU, or on the GPU that uses pinned memory, for the caller's kernels and
    /// copies.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for host memory.
    pub fn device(&self) -> Result<DeviceRange<'_>> {
        let range = self.inner.publisher.open.blocks.device(self.held().index())?;
        self.inner.exposed.store(true, Ordering::Relaxed);
        range.slice(0, self.inner.bytes)
    }

    /// Adds a header of up to [`MAX_HEADER`] bytes to the sample.
    ///
    /// # Errors
    /// [`InvalidArgument::Header`] for a longer header.
    pub fn header(&mut self, header: &[u8]) -> Result<()> {
        if header.len() > MAX_HEADER {
            let topic = self.inner.publisher.open.name().to_owned();
            return Err(InvalidArgument::Header { topic, bytes: header.len() }.into());
        }
        self.inner.header = header.to_vec();
        Ok(())
    }

    /// Notes that the sample is made from `input`. If `input` turns out to have failed, for instance because its
    /// publisher died before it was complete, this sample has failed, too: for its receivers, [`check`](Sample::check)
    /// returns [`InvalidData::SampleTainted`](crate::error::InvalidData::SampleTainted). The block of `input` is kept
    /// until it is known whether `input` is valid.
    ///
    /// # Errors
    /// As [`Domain::timeline`](crate::Domain::timeline), because this opens the timeline of the other sample.
    pub fn rests_on(&mut self, input: &Sample) -> Result<()> {
        self.inner.inputs.push(input.input()?);
        Ok(())
    }

    /// Keeps a value that work on a stream needs to fill the sample, such as memory that is copied from, until that
    /// work is done.
    ///
    /// A dedicated thread of the connection then drops the value. Dropping it may block, and the value may be the last
    /// owner of the connection; values that are dropped later wait for it.
    pub fn keep(&mut self, thing: impl Any + Send + Sync) {
        self.inner.used.0.push(Box::new(thing));
    }

    /// Returns a guard that keeps the block for views that outlive the loan, such as arrays of another language.
    pub fn keep_memory(&mut self) -> LoanMemory {
        self.inner.views.view()
    }

    /// Declares that the sample is filled. If a stream fills it, all work for that must already be enqueued.
    #[inline]
    pub fn filled(self) -> Filled {
        Filled(self)
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.inner.dtype
    }

    /// Returns the shape.
    pub fn shape(&self) -> &[u64] {
        &self.inner.shape[..self.inner.rank]
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.inner.bytes
    }

    /// Returns whether the sample has no bytes.
    pub fn is_empty(&self) -> bool {
        self.inner.bytes == 0
    }

    /// Returns the GPU on which this process uses the sample; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.inner.publisher.open.blocks.gpu()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.inner.publisher.open.domain()
    }

    pub(crate) fn memory(&self) -> &Arc<Blocks> {
        &self.inner.publisher.open.blocks
    }

    pub(crate) fn index(&self) -> u32 {
        self.held().index()
    }

    fn topic(&self) -> &str {
        self.inner.publisher.open.name()
    }

    fn held(&self) -> &HeldSlot {
        // Only publishing and giving back take it, and nothing can be called afterwards.
        self.inner.held.as_ref().expect("a loan is held until it is published")
    }
}

impl LoanInner {
    fn take_used(&mut self) -> UserValues {
        std::mem::take(&mut self.used)
    }

    /// Ends the borrow of the bytes, so that the next holder can borrow them.
    fn end_writing(&mut self) {
        self.publisher.open.blocks.give_back_mut(self.borrowed.take());
    }

    /// Returns the block as one that is not to be published; `None` if views keep it.
    fn take_back(&mut self) -> Option<Block> {
        self.end_writing();
        let held = self.held.take()?;
        if !self.views.exist() {
            return Some(self.block(held));
        }
        let port = self.publisher.port.clone();
        self.leave_to_views(held, move |held| port.free(held));
        None
    }

    /// Leaves the block to its views. The last of them has `release` give it back.
    fn leave_to_views(
        &mut self,
        held: HeldSlot,
        release: impl FnOnce(&HeldSlot) -> Result<(), Stale> + Send + Sync + 'static,
    ) {
        let block = self.block(held).released_by(Box::new(release));
        self.views.leave(block, self.publisher.port.view());
    }

    fn block(&self, held: HeldSlot) -> Block {
        Block::exposed(self.publisher.open.blocks.clone(), held, self.exposed.load(Ordering::Relaxed))
    }
}

impl Drop for LoanInner {
    fn drop(&mut self) {
        drop(self.take_back());
        let used = self.take_used();
        if used.is_empty() {
            return;
        }
        // Streams that were to fill the sample may still use these.
        let domain = self.publisher.open.domain();
        let user = domain.workers().user.clone();
        let idle = Fence::DeviceIdle(self.publisher.open.blocks.clone());
        domain.completions().on(idle, move |completion| match completion {
            Completion::Done => user.run(move || drop(used)),
            Completion::Unknown => std::mem::forget(used),
        });
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        self.publisher.open.control.topic.set_blocked(self.publisher.port.id(), None);
    }
}

impl Filled {
    /// Returns the GPU on which this process uses the sample; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.0.gpu()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.0.domain()
    }

    /// Gives the block back without publishing it. If its GPU address was handed out, first waits until all work of
    /// this process on that GPU is done; dropping the sample does not wait. If there is a
    /// [memory](Loan::keep_memory) of it, that gives the block back.
    ///
    /// # Errors
    /// As [`Block::release`].
    pub fn release(mut self) -> Result<()> {
        self.0.inner.take_back().map_or(Ok(()), Block::release)
    }

    /// Publishes the sample, and waits for blocking subscribers. The contents must be complete: written by the CPU, or
    /// by streams that the caller has waited for.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Error, Result, error::Busy};
    /// # fn publish(filled: partywall::Filled) -> Result<()> {
    /// match filled.publish(Duration::from_millis(10)) {
    ///     Ok(published) => println!("sample {} of this publisher", published.sequence),
    ///     // A subscriber that misses nothing is too slow: the sample is dropped here, or published later.
    ///     Err(unpublished) if matches!(unpublished.error, Error::Busy(Busy::TopicFull { .. })) => drop(unpublished.value),
    ///     Err(unpublished) => return Err(unpublished.error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error contains the sample.
    /// - [`Busy::TopicFull`](crate::error::Busy::TopicFull); [`Error::Timeout`] if other publishers took every position;
    ///   [`Error::Cancelled`];
    /// - [`Unreachable::Gone`](crate::error::Unreachable::Gone) if it has to wait;
    ///   [`Unreachable::Forked`](crate::error::Unreachable::Forked);
    /// - [`Gone::HeldBlock`] if the broker took this process for dead and freed the block;
    /// - [`Gone::Evicted`], [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`Gone::Detached`].
    pub fn publish<'w>(self, wait: impl Into<Wait<'w>>) -> Result<Published, Failed<Self>> {
        let _span = tracing::trace_span!("publish", topic = self.0.inner.publisher.open.name()).entered();
        self.publish_within(wait.into())
    }

    fn publish_within(mut self, wait: Wait<'_>) -> Result<Published, Failed<Self>> {
        let status = match self.validity() {
            Validity::Valid => Status::Ready,
            Validity::Undecided => Status::Unverified,
            Validity::Invalid => Status::Tainted,
        };
        let (published, held, is_viewed) = match self.give(status, None, wait) {
            Ok(given) => given,
            Err(error) => return Err(Failed::new(error, self)),
        };
        drop(self.0.inner.take_used());
        if status == Status::Unverified {
            let inputs = std::mem::take(&mut self.0.inner.inputs);
            let PublisherShared { open, port, .. } = &*self.0.inner.publisher;
            if !is_viewed {
                port.retire(&held);
            }
            InFlight::new(port.clone(), &held, inputs).settle(open.domain().completions());
        }
        if is_viewed {
            self.leave_published(held);
        }
        self.0.refill();
        Ok(published)
    }

    /// Publishes the sample with the contents that it has once all work on `stream` is done. Does not wait for that
    /// work: subscribers make their own streams wait for it ([`Sample::device_on`]). Waits for blocking subscribers.
    ///
    /// Until the stream has completed that work, the block is not used for anything else, even if the sample is
    /// dropped.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Filled, Gpu, Result};
    /// # fn publish(filled: Filled, gpu: &Gpu) -> Result<()> {
    /// let stream = gpu.stream(); // or a stream of the caller's own
    /// // … kernels that write the sample are enqueued on `stream` …
    /// filled.publish_on(stream, Duration::from_millis(10)).map_err(|unpublished| unpublished.error)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`publish`](Self::publish) and [`TimelineWriter::signal_on`](crate::TimelineWriter::signal_on). The error
    /// contains the sample.
    pub fn publish_on<'w>(self, stream: StreamRef<'_>, wait: impl Into<Wait<'w>>) -> Result<Published, Failed<Self>> {
        let _span =
            tracing::trace_span!("publish", topic = self.0.inner.publisher.open.name(), on_stream = true).entered();
        self.publish_on_within(stream, wait.into())
    }

    fn publish_on_within(mut self, stream: StreamRef<'_>, wait: Wait<'_>) -> Result<Published, Failed<Self>> {
        let signal = match self.0.inner.publisher.signal_on(stream) {
            Ok(signal) => signal,
            Err(error) => return Err(Failed::new(error, self)),
        };
        let is_sound = self.validity() == Validity::Valid;
        let status = if is_sound { Status::Timeline } else { Status::Unverified };
        let (published, held, is_viewed) = match self.give(status, Some(&signal), wait) {
            Ok(given) => given,
            Err(error) => return Err(Failed::new(error, self)),
        };
        let inputs = std::mem::take(&mut self.0.inner.inputs);
        let used = self.0.inner.take_used();
        let PublisherShared { open, port, .. } = &*self.0.inner.publisher;
        let sample = InFlight::new(port.clone(), &held, inputs);
        let (held, viewed) = if is_viewed { (None, Some(held)) } else { (Some(held), None) };
        sample.settle_after(Written { held, signal, used }, open.domain());
        if let Some(held) = viewed {
            // Then the block also waits for the stream.
            *self.0.inner.exposed.get_mut() = true;
            self.leave_published(held);
        }
        self.0.inner.publisher.prefetch_next();
        Ok(published)
    }

    /// Publishes the sample. Returns its block, and whether views keep it. The caller holds the block if they do, or if
    /// the status is not final.
    fn give(
        &mut self,
        status: Status,
        signal: Option<&StreamSignal>,
        wait: Wait<'_>,
    ) -> Result<(Published, HeldSlot, bool)> {
        self.0.inner.end_writing();
        let is_viewed = self.0.inner.views.exist();
        // The sample keeps its block until it is published: if the caller's cancel function panics, the block is freed.
        let published = self.put(self.0.held(), is_viewed, status, signal, wait)?;
        let held = self.0.inner.held.take().expect("a loan is held until it is published");
        Ok((published, held, is_viewed))
    }

    /// Leaves the block of the published sample to its views.
    fn leave_published(&mut self, held: HeldSlot) {
        let port = self.0.inner.publisher.port.clone();
        self.0.inner.leave_to_views(held, move |held| {
            port.retire(held);
            Ok(())
        });
    }

    /// Puts the sample into the ring.
    fn put(
        &self,
        held: &HeldSlot,
        is_viewed: bool,
        status: Status,
        signal: Option<&StreamSignal>,
        wait: Wait<'_>,
    ) -> Result<Published> {
        let LoanInner { publisher, dtype, bytes, header, .. } = &*self.0.inner;
        let control = &*publisher.open.control;
        let TopicControl { topic, pool, .. } = control;
        publisher.open.require_ours()?;
        if !pool.is_current(held.index(), held.generation()) {
            return Err(Gone::HeldBlock { pool: publisher.open.name().to_owned() }.into());
        }
        let dtype = dtype.code();
        let shape = self.0.shape();
        let (lane, value) = signal.map_or((0, 0), |signal| (signal.lane, signal.value));
        let try_it = || {
            // The lock is taken for one attempt at a time: another thread may have a shorter timeout, or none.
            let mut handle = publisher.handle();
            let since = control.recorder.begin();
            let sequence = handle.sequence();
            // Stamped again at each attempt: the time in which the publisher waits is not the sample's age.
            let stamp = if publisher.open.stamps { members::now_ns() } else { NO_STAMP };
            let message = Message { status, lane, value, stamp, dtype, shape, bytes: *bytes, header };
            let position = match is_viewed {
                true => topic.publish_viewed(pool, &mut handle, held, &message)?,
                false => topic.publish(pool, &mut handle, held, &message)?,
            };
            control.recorder.record_since(Action::Publish, || control.object, position, since);
            Ok(Published { sequence, position })
        };
        // Most publications do not wait, and reading the clock would be a good part of their cost.
        if let Ok(published) = try_it() {
            return Ok(published);
        }
        let waiting = wait.begin();
        let mut blocked = None;
        loop {
            let seen = match try_it() {
                Ok(published) => return Ok(published),
                // Bounded: in a ring that a broken process has damaged this would never end.
                Err(Unpublished::Busy) if waiting.left(Instant::now()).is_none() => {
                    let name = publisher.open.name();
                    let what = format!("cannot publish in topic {name:?}: other publishers took every position");
                    return Err(waiting.error(what));
                }
                Err(Unpublished::Busy) => continue,
                Err(Unpublished::Detached) => return Err(publisher.open.detached()),
                // Announced before the next attempt.
                Err(Unpublished::Blocked { .. }) => topic.prepare_for_space(),
            };
            let id = match try_it() {
                Ok(published) => return Ok(published),
                Err(Unpublished::Blocked { id, .. }) => id,
                Err(Unpublished::Busy | Unpublished::Detached) => continue,
            };
            let Some(left) = waiting.left(Instant::now()) else { return Err(publisher.full(id, &waiting)) };
            publisher.open.blocks.require_live()?;
            let blocked = blocked.get_or_insert_with(|| Blocked { publisher, since: members::now() });
            topic.set_blocked(publisher.port.id(), Some((id, blocked.since)));
            topic.sleep_for_space(seen, left);
        }
    }

    /// Returns what is known about the inputs.
    fn validity(&self) -> Validity {
        Validity::of(&self.0.inner.inputs)
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let topic = self.inner.publisher.open.name();
        write!(f, "Loan({topic}: {} {:?}, publisher {})", self.inner.dtype, self.shape(), self.inner.publisher.id())
    }
}

impl fmt::Debug for Filled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Filled").field(&self.0).finish()
    }
}

/// Returns the first `bytes` bytes of a block, which the first call borrows from the mapping. Work of a GPU may write
/// them if they are `exposed`, and is finished first.
fn borrow<'a>(
    borrowed: &'a mut Option<BorrowedBlockMut>,
    publisher: &'a PublisherShared,
    held: &Option<HeldSlot>,
    exposed: bool,
    bytes: u64,
) -> Result<&'a mut [u8]> {
    let blocks = &publisher.open.blocks;
    let shown = blocks.bytes()?;
    if exposed {
        blocks.wait_idle()?;
    }
    if let (None, Some(held)) = (&borrowed, held) {
        *borrowed = blocks.borrow_mut(held.index());
    }
    let borrowed = borrowed.as_mut().ok_or_else(|| Error::Gone(Gone::HeldBlock { pool: blocks.name().to_owned() }))?;
    // `Publisher::loan` has checked that it fits.
    Ok(&mut shown.bytes_mut(borrowed)[..bytes as usize])
}
