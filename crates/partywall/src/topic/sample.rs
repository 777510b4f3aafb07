//! Samples that a subscriber has received.

#[cfg(feature = "tokio")]
use std::time::Instant;
use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytemuck::PodCastError;
use partywall_cuda::StreamRef;
use partywall_os::borrow::BorrowedBlock;
use partywall_shm::{
    DType, members,
    timeline::Progress,
    topic::{HeldSample, NO_STAMP, SampleDescription, Status},
};

#[cfg(feature = "tokio")]
use super::timelines::SETTLING;
use super::{
    OpenTopic,
    subscriber::{SubscriberPort, SubscriberShared},
    timelines::{self, await_settled},
};
use crate::{
    completion::{Completion, Fence},
    domain::Domain,
    element::{Element, elements},
    error::{Busy, Error, Failed, Gone, InvalidArgument, InvalidData, Mismatch, Result},
    gpu::{DeviceRange, Gpu},
    place::Place,
    pool::Blocks,
    timeline::{Order, Timeline},
    wait::Wait,
};

/// A sample, read in place. Until it is dropped, its contents do not change and its block is not used again.
///
/// If [`device_on`](Self::device_on) was called, work that this process has enqueued may still read the sample.
/// Dropping it then frees the block once all work is done that the process has on that GPU at that moment; a helper
/// thread waits for the GPU. That is always correct but often later than necessary: [`release_on`](Self::release_on)
/// waits for one stream only.
///
/// In a forked child the sample belongs to the parent, and dropping it does nothing.
#[must_use = "a sample that is dropped is gone"]
pub struct Sample {
    got: Box<Got>,
}

/// What a sample consists of. It is moved as one address.
struct Got {
    /// `None` once it is released.
    taken: Option<HeldSample>,
    /// The hold, once it is shared: the last owner releases it.
    shared: OnceLock<Arc<Reading>>,
    description: SampleDescription,
    /// The bytes, if the CPU had access when the sample was received.
    bytes: Option<BorrowedBlock>,
    /// The bytes, once the CPU has access. `None` if this process writes them, which it must not.
    late_bytes: OnceLock<Option<BorrowedBlock>>,
    /// The timeline that says when it is complete, once it was asked for.
    timeline: OnceLock<Arc<Timeline>>,
    /// True if the GPU address was handed out, so that work of this process may read the sample.
    exposed: AtomicBool,
    /// Last: the connection may end with it.
    subscriber: Arc<SubscriberShared>,
}

/// A hold on a block, which its last owner releases. Nothing here has a connection.
pub(super) struct Reading {
    /// The subscriber's port, to which the hold belongs.
    port: Arc<SubscriberPort>,
    taken: HeldSample,
    /// The value that completes the sample on the publisher's timeline.
    value: u64,
    /// The timeline of the publisher, once it was asked for.
    order: OnceLock<Order>,
    /// It is unknown when the GPU is done with the block.
    lost: AtomicBool,
}

/// What is known about a sample's contents, from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Validity {
    /// The sample is complete and valid.
    Valid,
    /// It is not yet known whether the sample is valid.
    Undecided,
    /// The sample is garbage, or made from garbage.
    Invalid,
}

impl Validity {
    /// Returns what is known about a sample that is made from these.
    pub(super) fn of(inputs: &[Arc<Reading>]) -> Self {
        inputs.iter().map(|input| input.validity()).max().unwrap_or(Self::Valid)
    }
}

impl Sample {
    pub(super) fn new(subscriber: Arc<SubscriberShared>, taken: HeldSample) -> Self {
        let OpenTopic { control, blocks, .. } = &*subscriber.open;
        let block_bytes = blocks.shape().block_bytes;
        // Borrows the bytes now, because most callers use them; doing that at the first use would cost as much again.
        let bytes = blocks.borrow(taken.block());
        // Built in its allocation: moving it there would take as long as four locked instructions.
        let mut got = Box::write(
            Box::new_uninit(),
            Got {
                description: control.topic.describe(&taken),
                taken: Some(taken),
                shared: OnceLock::new(),
                bytes,
                late_bytes: OnceLock::new(),
                timeline: OnceLock::new(),
                exposed: AtomicBool::new(false),
                subscriber,
            },
        );
        got.description.check(block_bytes);
        Self { got }
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        // A caller that reads bytes knows what they mean.
        DType::from_code(self.got.description.dtype).unwrap_or(DType::U8)
    }

    /// Returns the shape.
    pub fn shape(&self) -> &[u64] {
        self.got.description.shape()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.got.description.bytes
    }

    /// Returns whether the sample has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the header that the publisher has added.
    pub fn header(&self) -> Vec<u8> {
        self.open().control.topic.header(self.taken())
    }

    /// Returns the publisher's number.
    pub fn publisher(&self) -> u64 {
        self.got.description.publisher
    }

    /// Returns how many samples its publisher had published or [skipped](super::Publisher::skip) before.
    pub fn sequence(&self) -> u64 {
        self.got.description.sequence
    }

    /// Returns how many samples had been published in the topic before.
    pub fn position(&self) -> u64 {
        self.taken().position()
    }

    /// Returns how many samples of the topic this subscriber has missed between the previous sample, or the time when
    /// it joined, and this sample. Those that publishers have [skipped](super::Publisher::skip) count.
    pub fn missed(&self) -> u64 {
        self.taken().missed()
    }

    /// Returns the time since the sample was published. For a sample that a stream fills, this is the time since
    /// [`publish_on`](super::Filled::publish_on), not since the stream was done. Reads the clock.
    ///
    /// Returns `None` if the publisher did not [stamp](super::TopicOptions::stamps) it.
    ///
    /// All processes use the clock of the machine, also those in time namespaces (time_namespaces(7)). An age is never
    /// negative.
    pub fn age(&self) -> Option<Duration> {
        let stamp = Some(self.got.description.stamp).filter(|stamp| *stamp != NO_STAMP);
        stamp.map(|stamp| Duration::from_nanos(members::now_ns().saturating_sub(stamp)))
    }

    /// Returns the bytes in host or pinned memory.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for GPU memory; [`Busy::NotReady`] while a stream still writes
    /// it; [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`].
    pub fn bytes(&self) -> Result<&[u8]> {
        if self.is_empty() {
            return Ok(&[]);
        }
        if !self.is_complete()? {
            return Err(self.not_ready());
        }
        let shown = self.open().blocks.bytes()?;
        let late = || self.got.late_bytes.get_or_init(|| self.open().blocks.borrow(self.taken().block())).as_ref();
        let borrowed = self.got.bytes.as_ref().or_else(late);
        let borrowed = borrowed.ok_or_else(|| Error::Gone(Gone::HeldBlock { pool: self.topic().to_owned() }))?;
        // As long as a block at most.
        Ok(&shown.bytes(borrowed)[..self.len() as usize])
    }

    /// Returns the elements in host or pinned memory.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes); [`Mismatch::DType`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        check_dtype::<T>(|| self.topic(), self.dtype())?;
        elements(self.bytes()?).map_err(|error| not_elements(self.topic(), error))
    }

    /// Copies bytes from `offset` on into `out`, from any kind of memory. Host-synchronous.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Result, Sample};
    /// # fn bytes_of(sample: &Sample) -> Result<Vec<u8>> {
    /// sample.wait(Duration::from_secs(1))?; // until the publisher's stream has written it
    /// let mut bytes = vec![0; sample.len() as usize];
    /// sample.read_at(0, &mut bytes)?;
    /// # Ok(bytes)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] for more bytes than the sample has; [`Busy::NotReady`] while a stream still writes
    /// it; [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`];
    /// [`DeviceFault`](crate::error::DeviceFault).
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.len()) {
            let why = format!("bytes {offset} + {} are not among its {}", out.len(), self.len());
            return Err(InvalidArgument::range(self.named(), why));
        }
        if out.is_empty() {
            return Ok(());
        }
        if !self.is_complete()? {
            return Err(self.not_ready());
        }
        let Some(range) = self.open().blocks.on_gpu(self.taken().block(), offset, out.len(), false)? else {
            out.copy_from_slice(&self.bytes()?[offset as usize..][..out.len()]);
            return Ok(());
        };
        let copied = range.copy_to_host(range.gpu().stream(), out);
        // A copy that has failed may go on.
        copied.inspect_err(|_| self.got.exposed.store(true, Ordering::Relaxed))
    }

    /// Waits until the sample is complete. A sample that the publisher's CPU has written is always complete.
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `wait_async` blocks none.
    ///
    /// # Errors
    /// [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`]; [`Error::Timeout`], [`Error::Cancelled`].
    pub fn wait<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        let Some(timeline) = self.pending()? else { return Ok(()) };
        match timeline.wait(self.got.description.value, wait) {
            Err(Error::Gone(Gone::Timeline { .. })) => self.settled(),
            waited => waited,
        }
    }

    /// Waits as [`wait`](Self::wait) does, without blocking a thread. Runs on any executor. The future may be dropped at
    /// any time. Only for the first sample of a publisher's stream this asks the broker, on the thread that polls.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), except [`Error::Cancelled`]. [`Error::Timeout`] if the broker does not settle the sample
    /// of a publisher that has ended.
    #[cfg(feature = "tokio")]
    pub async fn wait_async(&self) -> Result<()> {
        let Some(timeline) = self.pending()? else { return Ok(()) };
        match timeline.wait_async(self.got.description.value).await {
            Err(Error::Gone(Gone::Timeline { .. })) => {}
            waited => return waited,
        }
        let start = Instant::now();
        while !self.status().is_final() {
            self.open().blocks.require_live()?;
            if start.elapsed() > SETTLING {
                return Err(Error::Timeout { what: format!("{} was not decided", self.named()), after: SETTLING });
            }
            self.domain().pause(Duration::from_millis(1)).await;
        }
        self.refuse_failed()
    }

    /// Returns the sample's range on the GPU of `stream`, for work that is enqueued on it from now on. In pinned memory
    /// the first stream chooses the GPU on which this process uses the topic, unless its opener did. Makes `stream`
    /// wait for the publisher's stream; enqueues nothing if the sample is already complete. Does not block the host.
    ///
    /// If the publisher dies before it has completed the sample, `stream` continues, and [`check`](Self::check) reports
    /// that.
    ///
    /// # Errors
    /// [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`];
    /// [`Mismatch::Kind`] for host memory;
    /// [`InvalidArgument::Range`] for a stream of another GPU; as
    /// [`Timeline::wait_on`](crate::Timeline::wait_on).
    pub fn device_on(&self, stream: StreamRef<'_>) -> Result<DeviceRange<'_>> {
        let range = self.open().blocks.device_on(self.taken().block(), stream)?.slice(0, self.len())?.read_only();
        if let Some(timeline) = self.pending()? {
            match timeline.wait_on(stream, self.got.description.value) {
                Err(Error::Gone(Gone::Timeline { .. })) => self.settled()?,
                waited => waited?,
            }
        }
        self.got.exposed.store(true, Ordering::Relaxed);
        Ok(range)
    }

    /// Checks that the sample is valid. Call this once the work that has read the sample is done, before you use its
    /// results.
    ///
    /// If the sample was made from others ([`Loan::rests_on`](super::Loan::rests_on)), this waits up to 1 s until it is
    /// known whether those are valid.
    ///
    /// # Errors
    /// - [`InvalidData::SampleFailed`] if its publisher ended before it was complete;
    /// - [`InvalidData::SampleTainted`] if it was made from a sample that has failed;
    /// - [`Busy::NotReady`] while a stream still writes it; [`Error::Timeout`].
    pub fn check(&self) -> Result<()> {
        let what = || format!("cannot check {}: its inputs were not decided", self.named());
        await_settled(what, || {
            if !self.is_complete()? {
                return Err(self.not_ready());
            }
            Ok((self.status() != Status::Unverified).then_some(()))
        })
    }

    /// Releases the sample. If [`device_on`](Self::device_on) was called, first waits until all work of this process on
    /// that GPU is done.
    ///
    /// # Errors
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): its block stays until this process ends;
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release(mut self) -> Result<()> {
        self.open().require_ours()?;
        if !self.is_exposed() {
            return Ok(()); // dropping it releases it
        }
        let Some(reading) = self.let_go() else { return Ok(()) };
        // Kernels may still read it if this fails.
        self.open().blocks.wait_idle().inspect_err(|_| reading.lose())
    }

    /// Releases the sample once all work that is on `stream` now is done. Does not wait.
    ///
    /// After that work the stream writes a word, which the connection's service thread polls with pauses of up to 1 ms.
    /// If the process is killed first, the block is free once its death is proved. If the CUDA context is lost, it is
    /// unknown whether the work is over, and the block is free when the process ends.
    ///
    /// # Errors
    /// The error contains the sample: [`DeviceFault::Captured`](crate::error::DeviceFault::Captured),
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release_on(mut self, stream: StreamRef<'_>) -> Result<(), Failed<Self>> {
        let what = || format!("giving a sample of topic {:?} to a stream", self.topic());
        let fence = match self.open().domain().fence_on(stream, what) {
            Ok(fence) => fence,
            Err(error) => return Err(Failed::new(error, self)),
        };
        self.let_go_after(fence);
        Ok(())
    }

    /// Returns where the sample is.
    pub fn place(&self) -> Place {
        self.open().blocks.segment().place()
    }

    /// Returns the GPU on which this process uses the sample; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.open().blocks.gpu()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.open().domain()
    }

    /// Returns the topic's name.
    pub fn topic(&self) -> &str {
        self.open().name()
    }

    /// Returns the topic's version.
    pub fn version(&self) -> u64 {
        self.open().blocks.version()
    }

    /// Returns the hold, for a sample that is made from this one. First looks up the timeline that completes this
    /// sample, because the other sample cannot do that.
    pub(super) fn input(&self) -> Result<Arc<Reading>> {
        self.timeline()?;
        Ok(self.got.shared.get_or_init(|| self.share(self.taken().again())).clone())
    }

    /// Returns the timeline to wait for; `None` if the sample is complete.
    fn pending(&self) -> Result<Option<&Timeline>> {
        self.refuse_failed()?;
        let timeline = self.timeline()?;
        if timeline.is_none() {
            self.refuse_failed()?;
        }
        Ok(timeline)
    }

    fn refuse_failed(&self) -> Result<()> {
        let topic = || self.topic().to_owned();
        match self.status() {
            Status::Failed(ending) => Err(InvalidData::SampleFailed {
                topic: topic(),
                position: self.position(),
                publisher: self.publisher(),
                ending,
            }
            .into()),
            Status::Tainted => Err(InvalidData::SampleTainted { topic: topic(), position: self.position() }.into()),
            Status::Ready | Status::Timeline | Status::Unverified | Status::Done => Ok(()),
        }
    }

    /// Returns whether the sample is complete, regardless of its inputs.
    fn is_complete(&self) -> Result<bool> {
        if matches!(self.status(), Status::Ready | Status::Done) {
            return Ok(true);
        }
        let Some(timeline) = self.pending()? else { return Ok(true) };
        match Order::of(timeline).progress(self.got.description.value) {
            Progress::Reached => Ok(true),
            Progress::Pending | Progress::Announced => Ok(false),
            Progress::Ended(_) => self.settled().map(|()| true),
        }
    }

    /// Returns the timeline that completes the sample, if a stream may still write it.
    fn timeline(&self) -> Result<Option<&Timeline>> {
        if self.got.description.value == 0 || self.status().is_final() {
            return Ok(None);
        }
        if let Some(known) = self.got.timeline.get() {
            return Ok(Some(known));
        }
        let lane = (self.publisher(), self.got.description.lane);
        let found = timelines::find(&self.got.subscriber.timelines, self.open(), self.taken(), lane)?;
        let Some(found) = found else { return Ok(None) };
        let known = self.got.timeline.get_or_init(|| found);
        if let Some(shared) = self.got.shared.get() {
            shared.order.get_or_init(|| Order::of(known));
        }
        Ok(Some(known))
    }

    /// Refuses the sample as what the publisher or the broker settles it as, after its timeline has ended before its
    /// value.
    fn settled(&self) -> Result<()> {
        let what = || format!("{} was not decided", self.named());
        await_settled(what, || Ok(self.status().is_final().then_some(())))?;
        self.refuse_failed()
    }

    fn named(&self) -> String {
        format!("sample {} of topic {:?}", self.position(), self.topic())
    }

    fn status(&self) -> Status {
        // Most samples are settled when they are received, and the copy is closer in memory.
        if self.got.description.status.is_final() {
            return self.got.description.status;
        }
        self.open().control.topic.status(self.taken())
    }

    fn not_ready(&self) -> Error {
        Error::Busy(Busy::NotReady { topic: self.topic().to_owned(), position: self.position() })
    }

    fn is_exposed(&self) -> bool {
        self.got.exposed.load(Ordering::Relaxed)
    }

    pub(crate) fn memory(&self) -> &Arc<Blocks> {
        &self.open().blocks
    }

    pub(crate) fn index(&self) -> u32 {
        self.taken().block()
    }

    fn open(&self) -> &OpenTopic {
        &self.got.subscriber.open
    }

    fn taken(&self) -> &HeldSample {
        // Only `let_go` takes the hold, and nothing can be called afterwards.
        self.got.taken.as_ref().expect("a sample is held until it is released")
    }

    /// Ends the borrow of the bytes.
    fn end_reading(&mut self) {
        let borrowed = self.got.bytes.take().or_else(|| self.got.late_bytes.take().flatten());
        self.open().blocks.give_back(borrowed);
    }

    fn let_go(&mut self) -> Option<Arc<Reading>> {
        self.end_reading();
        let taken = self.got.taken.take()?;
        Some(self.got.shared.take().unwrap_or_else(|| self.share(taken)))
    }

    /// Releases the hold once `fence` is reached.
    fn let_go_after(&mut self, fence: Fence) {
        let Some(reading) = self.let_go() else { return };
        self.open().domain().completions().on(fence, move |completion| {
            if completion == Completion::Unknown {
                reading.lose();
            }
        });
    }

    fn share(&self, taken: HeldSample) -> Arc<Reading> {
        let order = self.got.timeline.get().map_or_else(OnceLock::new, |known| OnceLock::from(Order::of(known)));
        let port = self.got.subscriber.port.clone();
        let value = self.got.description.value;
        let lost = AtomicBool::new(false);
        Arc::new(Reading { port, taken, value, order, lost })
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if !self.is_exposed() && self.got.shared.get().is_none() {
            // The hold is not shared.
            self.end_reading();
            if let Some(taken) = self.got.taken.take() {
                self.got.subscriber.port.release(&taken);
            }
        } else if self.is_exposed() {
            self.let_go_after(Fence::DeviceIdle(self.open().blocks.clone()));
        } else {
            self.let_go();
        }
    }
}

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sample({} {}: {} {:?})", self.topic(), self.position(), self.dtype(), self.shape())
    }
}

impl Reading {
    /// Returns what is known about the sample. Does not wait.
    pub(super) fn validity(&self) -> Validity {
        match self.port.control.topic.status(&self.taken) {
            Status::Ready | Status::Done => Validity::Valid,
            Status::Failed(_) | Status::Tainted => Validity::Invalid,
            Status::Unverified => Validity::Undecided,
            Status::Timeline => match self.order.get().map(|order| order.progress(self.value)) {
                Some(Progress::Reached) => Validity::Valid,
                Some(Progress::Ended(_)) => Validity::Invalid,
                Some(Progress::Pending | Progress::Announced) | None => Validity::Undecided,
            },
        }
    }

    /// Leaves the block held until the broker frees this process's blocks.
    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.port.lose();
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.lost.load(Ordering::Acquire) {
            self.port.release(&self.taken);
        }
    }
}

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reading").field(&self.taken).finish()
    }
}

/// Checks that the elements of a sample have type `T`.
pub(super) fn check_dtype<'a, T: Element>(topic: impl FnOnce() -> &'a str, has: DType) -> Result<()> {
    if T::DTYPE == has {
        return Ok(());
    }
    Err(Mismatch::DType { what: format!("a sample of topic {:?}", topic()), has, wanted: T::DTYPE.name() }.into())
}

pub(super) fn not_elements(topic: &str, error: PodCastError) -> Error {
    let why = format!("cannot use its bytes as elements: {error}");
    InvalidArgument::range(format!("a sample of {topic:?}"), why)
}
