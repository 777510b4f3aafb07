//! Segments that the tasks of a queue name as inputs.
//!
//! The broker keeps an attached segment for the queue. A submitter needs only its number and length. A worker asks the
//! broker for the segment at the first use of an input that names it, and keeps it open for later tasks. Each claim
//! closes segments that were detached meanwhile.

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Bound, RangeBounds},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::queue::{self as shm, Contents};
use partywall_wire::{Answer, Call, Named};

use super::{OpenQueue, Queue, QueueCondition};
use crate::{
    domain::answered,
    error::{Busy, Error, Mismatch, Result},
    place::Place,
    pool::Blocks,
    segment::{OpenOptions, PartRange, Segment, Tensor, no_part},
    wait::Wait,
};

/// A segment that is attached to a queue: tasks of the queue name [parts](Self::part) of it as inputs. See
/// [`Queue::attach`].
///
/// Clones refer to the same attachment, and so does the attachment that another process gets for the same version.
/// Dropping it changes nothing: the queue keeps the segment until it is [detached](Queue::detach) or the queue ends.
#[derive(Clone)]
pub struct Attachment(Arc<Attached>);

struct Attached {
    /// The input blocks of the queue.
    inputs: Arc<Blocks>,
    number: u32,
    name: String,
    version: u64,
    /// The lengths of the segment's chunks at the time of the attachment, in bytes.
    ranges: Vec<u64>,
}

/// A part of an attached segment, as an input of any number of tasks.
#[derive(Debug, Clone)]
pub struct SegmentPart {
    of: Attachment,
    offset: u64,
    contents: Contents,
}

/// The attached segments that this process has open. All handles of the queue share them.
#[derive(Debug, Default)]
pub(super) struct Attachments {
    open: Mutex<BTreeMap<u32, Arc<Segment>>>,
    /// The queue's count of ended attachments when this process last looked for segments to close.
    detached: AtomicU64,
}

impl Queue {
    /// Attaches a segment, so that tasks can name [parts](Attachment::part) of it as inputs. The queue keeps the
    /// segment until it is [detached](Self::detach) or the queue ends, even if this process dies or the segment's name
    /// is removed. Attaching a version again returns the same attachment. At most 32 segments are attached at a time.
    ///
    /// Each worker opens the segment once, for reading, and reads it in place. The segment may be frozen or mutable, in
    /// host memory or on a GPU. Nothing orders a worker's reads of a mutable segment with the writes of other
    /// processes.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Task};
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// # fn submit(domain: &Domain, queue: &partywall::Queue) -> partywall::Result<()> {
    /// let model = domain.open("model", SECOND)?;
    /// let weights = queue.attach(&model)?;
    /// let layer = weights.tensor(&model.tensor("layers.0")?)?;
    /// for number in 0..1000_u32 {
    ///     let task = Task::new("infer").part(layer.clone()).arguments(&number.to_le_bytes());
    ///     queue.submit(task, SECOND).map_err(|refused| refused.error)?;
    /// }
    /// queue.detach(&weights, Duration::MAX)?; // when the last task is done
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Denied::Attaching`](crate::error::Denied::Attaching) for memory that ends with its publisher;
    /// [`LimitReached::Broker`](crate::error::LimitReached::Broker); [`Mismatch::Options`] for a segment of another
    /// connection; those of every call.
    pub fn attach(&self, segment: &Segment) -> Result<Attachment> {
        self.open.require_ours()?;
        let ours = std::ptr::eq(self.domain().link(), segment.domain().link());
        let Some(lease) = segment.lease().filter(|_| ours) else {
            return Err(self.open.refuses(format!("segment {:?} was opened by another connection", segment.name())));
        };
        let attached = self.domain().link().call(Call::Attach { queue: self.open.lease()?, segment: lease })?;
        let number = answered!(attached, Answer::Attached { attachment } => attachment)?;
        Ok(Attachment(Arc::new(Attached {
            inputs: self.open.inputs.clone(),
            number,
            name: segment.name().to_owned(),
            version: segment.version(),
            ranges: segment.ranges()?,
        })))
    }

    /// Detaches a segment once no task names it. Waits until all tasks that name it are done, cancelled or purged, and
    /// until no attempt that was taken back may still read it. Dead letters name it, too. The segment's memory is freed
    /// if nothing else keeps it.
    ///
    /// # Errors
    /// [`Busy::AttachmentInUse`] if tasks still name it at the end of the wait; [`Error::Cancelled`];
    /// [`Gone::Attachment`](crate::error::Gone::Attachment) if it was detached before; [`Mismatch::Options`] for one of
    /// another queue; those of every call.
    pub fn detach<'w>(&self, attachment: &Attachment, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.open.require_ours()?;
        self.open.check_attachment(attachment)?;
        let number = attachment.0.number;
        let queue = self.open.lease()?;
        let detach = || self.domain().link().call(Call::DetachSegment { queue, attachment: number }).map(drop);
        let waiting = wait.into().begin();
        loop {
            let in_use = match detach() {
                Err(error @ Error::Busy(Busy::AttachmentInUse { .. })) => error,
                detached => {
                    self.open.close_detached();
                    return detached;
                }
            };
            // Only a hint: the broker decides whether a task still names the segment.
            let unused = || Ok((!self.open.queue().is_named(number)).then_some(()));
            if self.open.await_event(QueueCondition::Result, &self.spin, &waiting, unused)?.is_none() {
                let what = || format!("cannot detach {attachment:?}: tasks name it");
                return Err(if waiting.was_cancelled() { waiting.error(what()) } else { in_use });
            }
        }
    }
}

impl Attachment {
    /// Returns a part of the segment, as a range of bytes from the beginning of its memory. A part lies within one
    /// chunk, as every tensor does.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`](crate::error::InvalidArgument::Range) for an empty range, and for one that is not
    /// within the segment as it was at the time of the attachment.
    pub fn part(&self, range: impl RangeBounds<u64>) -> Result<SegmentPart> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.bytes(),
        };
        self.part_at(start, Contents::of_bytes(end.saturating_sub(start)))
    }

    /// Returns a tensor of the segment as a part. The worker gets its type and shape, too; of a tensor with gaps, which
    /// is not dense, the bytes alone.
    ///
    /// # Errors
    /// As [`part`](Self::part); [`Mismatch::Options`] for a tensor of another segment.
    pub fn tensor(&self, tensor: &Tensor<'_>) -> Result<SegmentPart> {
        let segment = tensor.segment();
        if (segment.name(), segment.version()) != (self.name(), self.version()) {
            let why = format!("tensor {:?} is one of {segment:?}, not of {self:?}", tensor.name());
            return Err(Mismatch::Options { of: Named::Queue, name: self.0.inputs.name().to_owned(), why }.into());
        }
        let (offset, bytes) = tensor.place()?;
        let dense = Contents::of_tensor(tensor.dtype(), &tensor.shape()).filter(|dense| dense.bytes() == bytes);
        let dense = dense.filter(|_| tensor.is_contiguous());
        self.part_at(offset, dense.unwrap_or(Contents::of_bytes(bytes)))
    }

    fn part_at(&self, offset: u64, contents: Contents) -> Result<SegmentPart> {
        let bytes = contents.bytes();
        match PartRange::find(&self.0.ranges, offset, bytes) {
            Some(_) => Ok(SegmentPart { of: self.clone(), offset, contents }),
            None => Err(no_part(self.name(), offset, bytes, self.bytes())),
        }
    }

    /// Returns the segment's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the segment's version.
    pub fn version(&self) -> u64 {
        self.0.version
    }

    /// Returns the segment's bytes, including alignment, at the time of the attachment.
    pub fn bytes(&self) -> u64 {
        self.0.ranges.iter().sum()
    }
}

/// `NAME@VERSION`
impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attachment({}@{})", self.name(), self.version())
    }
}

impl SegmentPart {
    /// Returns the attachment.
    pub fn attachment(&self) -> &Attachment {
        &self.of
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.contents.bytes()
    }

    pub(super) fn named(&self) -> shm::AttachedPart {
        shm::AttachedPart { attachment: self.of.0.number, offset: self.offset, contents: self.contents }
    }
}

impl OpenQueue {
    /// Refuses an attachment of another queue.
    pub(super) fn check_attachment(&self, attachment: &Attachment) -> Result<()> {
        let of = &attachment.0.inputs;
        let ours = std::ptr::eq(of.domain().link(), self.domain().link());
        // Another handle of the queue may use it on another GPU.
        if ours && (of.name(), of.version()) == (self.name(), self.inputs.version()) {
            return Ok(());
        }
        Err(self.refuses(format!("{attachment:?} is attached to another queue; attach it to this one")))
    }

    /// Returns whether a task may name an attachment. If the broker may be about to refuse a detach, waits for its
    /// decision.
    pub(super) fn is_attached(&self, number: u32) -> Result<bool> {
        if self.queue().is_attached(number) {
            return Ok(true);
        }
        self.domain().ping()?;
        Ok(self.queue().is_attached(number))
    }

    /// Returns an attached segment, opened for reading.
    pub(super) fn attached(&self, number: u32) -> Result<Arc<Segment>> {
        self.require_ours()?;
        self.close_detached();
        // Locked until the segment is mapped. Otherwise two threads could both map it.
        let mut open = self.shared.attachments.open.lock().ignore_poison();
        if let Some(segment) = open.get(&number) {
            return Ok(segment.clone());
        }
        let call = Call::OpenAttached { queue: self.lease()?, attachment: number };
        let (answer, fds) = self.domain().link().call_with(call, &[])?;
        let opened = answered!(answer, Answer::Opened(opened) => opened)?;
        let segment = Arc::new(self.opener(&opened.name).attach_segment(opened, fds)?);
        open.insert(number, segment.clone());
        Ok(segment)
    }

    /// Closes segments that have been detached since the last call, unless claimed tasks use them.
    pub(super) fn close_detached(&self) {
        let Attachments { open, detached } = &self.shared.attachments;
        let now = self.queue().detached();
        // Each claim calls this. Usually there is nothing to do, and nothing is written.
        if detached.load(Ordering::Relaxed) == now {
            return;
        }
        detached.store(now, Ordering::Relaxed);
        let mut open = open.lock().ignore_poison();
        let closed: Vec<_> = open.extract_if(.., |number, _| !self.queue().is_attached(*number)).collect();
        drop(open);
        if !closed.is_empty() {
            // GPU memory is unmapped once all streams are done. One of them may wait for what the caller is about to
            // do.
            self.domain().workers().gpu.run(move || drop(closed));
        }
    }

    /// Returns how this process opens an attached segment: on the GPU on which it uses the queue, if the segment is on
    /// another one.
    fn opener(&self, name: &str) -> OpenOptions {
        let opener = self.domain().opener(name);
        let gpu = self.inputs.gpu().map(|gpu| gpu.uuid());
        match gpu.filter(|gpu| Place::Gpu(*gpu) != self.inputs.segment().place()) {
            Some(gpu) => opener.device(gpu).allow_peer(true),
            None => opener,
        }
    }

    /// Returns the error that an object does not belong to this queue.
    pub(super) fn refuses(&self, why: String) -> Error {
        Mismatch::Options { of: Named::Queue, name: self.name().to_owned(), why }.into()
    }
}
