//! Samples, as a subscriber receives them.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall_cuda::StreamRef;
use partywall_os::borrow::BorrowedBlock;
use partywall_shm::{
    DType,
    timeline::Progress,
    topic::{Description, Status, Taken},
};

use super::{
    Open,
    loan::{check_dtype, not_elements},
    subscriber::{Joined, Port},
    timelines::await_settled,
};
use crate::{
    completion::{Completion, Fence},
    error::{Busy, Error, Gone, InvalidData, Result},
    gpu::{DeviceRange, Gpu},
    segment::{Element, elements},
    timeline::{Order, Timeline},
    wait::Wait,
};

/// A sample, read in place. It stays as it is, and its block is used for nothing else, until this is dropped.
///
/// If its GPU address was asked for, work that this process has enqueued may still read it. The block of a dropped sample is
/// then free when everything is over that the process runs on that GPU at that moment: a thread waits for the GPU. That is
/// always right, and often later than necessary: [`release_on`](Self::release_on) waits for one stream.
///
/// In a forked child it is the parent's, and dropping it there does nothing.
#[must_use = "a sample that is dropped is gone"]
pub struct Sample {
    /// `None` once it is released.
    taken: Option<Taken>,
    /// The hold, once it is shared: the last owner releases it.
    shared: OnceLock<Arc<Reading>>,
    description: Description,
    /// Its bytes in host memory. `None` on a GPU, and if this process writes them, which it must not.
    bytes: Option<BorrowedBlock>,
    /// The timeline that says when it is complete, once it was asked for.
    timeline: OnceLock<Arc<Timeline>>,
    /// Whether its GPU address was handed out: then work of this process may use it.
    exposed: AtomicBool,
    /// Last: the connection may end with it.
    joined: Arc<Joined>,
}

/// A sample that could not be given to a stream.
#[derive(Debug)]
pub struct UnreleasedSample {
    /// Why.
    pub error: Error,
    /// The sample.
    pub sample: Box<Sample>,
}

/// A hold on a block, which its last owner releases. Nothing here has a connection.
pub(super) struct Reading {
    /// The subscriber's port, to which the hold belongs.
    port: Arc<Port>,
    taken: Taken,
    /// What the publisher's timeline has to reach.
    value: u64,
    /// That timeline, once it was asked for.
    order: OnceLock<Order>,
    /// It is unknown when the GPU is done with it.
    lost: AtomicBool,
}

/// What is known of what a sample contains, from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Validity {
    /// It is as its publisher wanted it.
    Valid,
    /// It is not yet known.
    Undecided,
    /// It is garbage, or made of garbage.
    Invalid,
}

impl Validity {
    /// What is known of a sample that is made of these.
    pub(super) fn of(inputs: &[Arc<Reading>]) -> Self {
        inputs.iter().map(|input| input.validity()).max().unwrap_or(Self::Valid)
    }
}

impl Sample {
    pub(super) fn new(joined: Arc<Joined>, taken: Taken) -> Self {
        let Open { control, blocks, .. } = &*joined.open;
        let description = control.topic.describe(&taken).checked(blocks.shape().block_bytes);
        // Always, because most ask for them: doing it when the first does takes as long again.
        let bytes = blocks.borrow(taken.block());
        let taken = Some(taken);
        let shared = OnceLock::new();
        let timeline = OnceLock::new();
        Self { joined, taken, shared, description, bytes, timeline, exposed: AtomicBool::new(false) }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        // A caller that reads bytes knows what they mean.
        DType::from_code(self.description.dtype).unwrap_or(DType::U8)
    }

    /// Its shape.
    pub fn shape(&self) -> &[u64] {
        self.description.shape()
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.description.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What its publisher has put beside it.
    pub fn header(&self) -> Vec<u8> {
        self.open().control.topic.header(self.taken())
    }

    /// Its publisher's number.
    pub fn publisher(&self) -> u64 {
        self.description.publisher
    }

    /// How many samples its publisher had published before.
    pub fn sequence(&self) -> u64 {
        self.description.sequence
    }

    /// How many samples there had been in the topic before.
    pub fn position(&self) -> u64 {
        self.taken().position()
    }

    /// How many samples of the topic this subscriber has missed between the one before, or the time when it joined, and
    /// this one.
    pub fn missed(&self) -> u64 {
        self.taken().missed()
    }

    /// Its bytes in host memory.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for memory of a GPU; [`Busy::NotReady`] as long as a stream writes it;
    /// [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`].
    pub fn bytes(&self) -> Result<&[u8]> {
        if self.is_empty() {
            return Ok(&[]);
        }
        if !self.is_complete()? {
            return Err(self.not_ready());
        }
        let shown = self.open().blocks.bytes()?;
        let borrowed =
            self.bytes.as_ref().ok_or_else(|| Error::Gone(Gone::HeldBlock { pool: self.topic().to_owned() }))?;
        // As long as a block at most.
        Ok(&shown.bytes(borrowed)[..self.len() as usize])
    }

    /// Its elements in host memory.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes); [`Mismatch::DType`](crate::error::Mismatch::DType).
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        check_dtype::<T>(|| self.topic(), self.dtype())?;
        elements(self.bytes()?).map_err(|error| not_elements(self.topic(), error))
    }

    /// Waits until it is complete. One that its publisher's CPU has written always is.
    ///
    /// # Errors
    /// [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`]; [`Error::Timeout`], [`Error::Cancelled`].
    pub fn wait<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        let Some(timeline) = self.pending()? else { return Ok(()) };
        match timeline.wait(self.description.value, wait) {
            Err(Error::Gone(Gone::Timeline { .. })) => self.settled(),
            waited => waited,
        }
    }

    /// Where it is on its GPU, for what is enqueued on `stream` from now on, which waits for the publisher's stream. Nothing
    /// is enqueued if the sample is complete already. Returns at once.
    ///
    /// If the publisher dies before it has completed the sample, `stream` goes on, and [`check`](Self::check) says so.
    ///
    /// # Errors
    /// [`InvalidData::SampleFailed`], [`InvalidData::SampleTainted`]; [`Mismatch::Kind`](crate::error::Mismatch::Kind) for host memory; as
    /// [`Timeline::wait_on`](crate::Timeline::wait_on).
    pub fn device_on(&self, stream: StreamRef<'_>) -> Result<DeviceRange<'_>> {
        let range = self.open().blocks.device(self.taken().block())?.slice(0, self.len())?;
        if let Some(timeline) = self.pending()? {
            match timeline.wait_on(stream, self.description.value) {
                Err(Error::Gone(Gone::Timeline { .. })) => self.settled()?,
                waited => waited?,
            }
        }
        self.exposed.store(true, Ordering::Relaxed);
        Ok(range)
    }

    /// Whether it is valid: to be asked when the work that has read it is done, before its results are used.
    ///
    /// If the sample was made of others ([`Loan::rests_on`](super::Loan::rests_on)), it waits up to 1 s until it is known
    /// whether these were.
    ///
    /// # Errors
    /// [`InvalidData::SampleFailed`]: its publisher ended before it was complete. [`InvalidData::SampleTainted`]: it was made of one that
    /// had failed. [`Busy::NotReady`] as long as a stream writes it. [`Error::Timeout`].
    pub fn check(&self) -> Result<()> {
        let what = || format!("cannot check {}: its inputs were not decided", self.named());
        await_settled(what, || {
            if !self.is_complete()? {
                return Err(self.not_ready());
            }
            Ok((self.status() != Status::Unverified).then_some(()))
        })
    }

    /// Lets go of it. If its address on the GPU was asked for, waits first until everything is over that this process runs
    /// there.
    ///
    /// # Errors
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): its block stays until this process ends.
    pub fn release(mut self) -> Result<()> {
        let Some(reading) = self.let_go() else { return Ok(()) };
        if self.is_exposed()
            && let Err(error) = self.open().blocks.wait_idle()
        {
            // Kernels may still read it.
            reading.lose();
            return Err(error);
        }
        Ok(())
    }

    /// Lets go of it when everything that is on `stream` now is done. Returns at once.
    ///
    /// The stream writes a word behind its work, which the connection's service thread polls with pauses of up to 1 ms.
    /// If the process is killed before, the block is free when its death is proved. If its CUDA context is lost, nobody
    /// knows whether the work is over, and the block is free with the process's end.
    ///
    /// # Errors
    /// The sample comes back with the error: [`DeviceFault::Captured`](crate::error::DeviceFault::Captured), [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release_on(mut self, stream: StreamRef<'_>) -> Result<(), UnreleasedSample> {
        let what = || format!("giving a sample of topic {:?} to a stream", self.topic());
        let fence = match self.open().domain().fence_on(stream, what) {
            Ok(fence) => fence,
            Err(error) => return Err(UnreleasedSample { error, sample: Box::new(self) }),
        };
        self.let_go_after(fence);
        Ok(())
    }

    /// The GPU that this process uses it on; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.open().blocks.gpu()
    }

    /// The topic's name.
    pub fn topic(&self) -> &str {
        self.open().name()
    }

    /// The topic's version.
    pub fn version(&self) -> u64 {
        self.open().blocks.version()
    }

    /// Returns the hold, for a sample that is made of this one. Finds out first by which timeline this one is complete, because
    /// the other sample cannot.
    pub(super) fn input(&self) -> Result<Arc<Reading>> {
        self.timeline()?;
        Ok(self.shared.get_or_init(|| self.share(self.taken().again())).clone())
    }

    /// The timeline that is to be waited for; `None` if the sample is complete.
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

    /// Whether it is complete, whatever it is made of.
    fn is_complete(&self) -> Result<bool> {
        if matches!(self.status(), Status::Ready | Status::Done) {
            return Ok(true);
        }
        let Some(timeline) = self.pending()? else { return Ok(true) };
        match Order::of(timeline).progress(self.description.value) {
            Progress::Reached => Ok(true),
            Progress::Pending | Progress::Announced => Ok(false),
            Progress::Ended(_) => self.settled().map(|()| true),
        }
    }

    /// The timeline by which it is complete, if a stream writes it and that is not known to be over.
    fn timeline(&self) -> Result<Option<&Timeline>> {
        if self.description.value == 0 || self.status().is_final() {
            return Ok(None);
        }
        if let Some(known) = self.timeline.get() {
            return Ok(Some(known));
        }
        let found = self.joined.timelines.of(self.open(), self.taken(), self.publisher())?;
        let Some(found) = found else { return Ok(None) };
        let known = self.timeline.get_or_init(|| found);
        if let Some(shared) = self.shared.get() {
            shared.order.get_or_init(|| Order::of(known));
        }
        Ok(Some(known))
    }

    /// Refuses the sample as what the publisher or the broker settles it as, after its timeline has ended before its value.
    fn settled(&self) -> Result<()> {
        let what = || format!("{} was not decided", self.named());
        await_settled(what, || Ok(self.status().is_final().then_some(())))?;
        self.refuse_failed()
    }

    fn named(&self) -> String {
        format!("sample {} of topic {:?}", self.position(), self.topic())
    }

    fn status(&self) -> Status {
        // Most samples are final when they are received, and the copy is closer.
        if self.description.status.is_final() {
            return self.description.status;
        }
        self.open().control.topic.status(self.taken())
    }

    fn not_ready(&self) -> Error {
        Error::Busy(Busy::NotReady { topic: self.topic().to_owned(), position: self.position() })
    }

    fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Relaxed)
    }

    fn open(&self) -> &Open {
        &self.joined.open
    }

    fn taken(&self) -> &Taken {
        // Only `let_go` takes it, and nothing can be called afterwards.
        self.taken.as_ref().expect("a sample is held until it is released")
    }

    /// Ends the use of its bytes.
    fn end_reading(&mut self) {
        let borrowed = self.bytes.take();
        self.open().blocks.give_back(borrowed);
    }

    fn let_go(&mut self) -> Option<Arc<Reading>> {
        self.end_reading();
        let taken = self.taken.take()?;
        Some(self.shared.take().unwrap_or_else(|| self.share(taken)))
    }

    /// Lets go of it once `fence` is reached.
    fn let_go_after(&mut self, fence: Fence) {
        let Some(reading) = self.let_go() else { return };
        self.open().domain().completions().on(fence, move |completion| {
            if completion == Completion::Unknown {
                reading.lose();
            }
        });
    }

    fn share(&self, taken: Taken) -> Arc<Reading> {
        let order = self.timeline.get().map_or_else(OnceLock::new, |known| OnceLock::from(Order::of(known)));
        let port = self.joined.port.clone();
        let value = self.description.value;
        let lost = AtomicBool::new(false);
        Arc::new(Reading { port, taken, value, order, lost })
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if !self.is_exposed() && self.shared.get().is_none() {
            // The hold is not shared.
            self.end_reading();
            if let Some(taken) = self.taken.take() {
                self.joined.port.release(&taken);
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
    /// What is known of it. Does not wait.
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

    /// Leaves its block as it is until the broker takes back what this process has.
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
