//! Claimed tasks: what a worker reads, writes, completes or fails.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytemuck::PodCastError;
use partywall_cuda::StreamRef;
use partywall_os::borrow::BorrowedBlock;
use partywall_shm::{
    DType, members,
    queue::{AttachedPart, BlockId, Claimed, Contents, Input, NewOutput, Reason, StreamPoint, TaskDescription, Views},
    slots::HeldSlot,
    timeline::Progress,
};

use super::{OpenQueue, QueueControl, TaskMemory, memory::KeptBlocks};
use crate::{
    completion::{Completion, Fence},
    element::Element,
    error::{Busy, Error, Gone, InvalidArgument, InvalidData, Result},
    gpu::{DeviceRange, Gpu},
    pool::{Block, Blocks},
    recorder::Action,
    segment::{PartRange, Segment},
    task_ref::TaskRef,
    timeline::{Order, Timeline},
    wait::Wait,
};

/// A task that this process has claimed, for one attempt. Dropping it gives the task back, which counts as an attempt.
///
/// Once a GPU address of its blocks was handed out, enqueued work of this process may use them. A task that is dropped
/// then keeps its blocks until all work that the process has on that GPU at that moment is done.
///
/// In a forked child the task belongs to the parent, and dropping it does nothing.
#[must_use = "a task that is dropped goes to another worker"]
pub struct ClaimedTask {
    open: Arc<OpenQueue>,
    /// `None` once the attempt is over.
    claimed: Option<Claimed>,
    description: TaskDescription,
    inputs: Vec<TaskInput>,
    /// The block for the output, if the task has an output.
    output: Option<Block>,
    /// The timeline of the submitter, once it is needed.
    submitter: OnceLock<Arc<Timeline>>,
    /// What views of the task share, once there are any.
    kept: OnceLock<KeptBlocks>,
}

/// An input of a claimed task, read in place: a block of the queue, or a part of an attached segment.
pub struct TaskInput {
    source: Source,
    contents: Contents,
    /// Whether its GPU address was handed out, so that enqueued work of this process may use it.
    exposed: AtomicBool,
}

enum Source {
    Block {
        blocks: Arc<Blocks>,
        index: u32,
        offset: u64,
        bytes: OnceLock<Option<BorrowedBlock>>,
    },
    Part {
        open: Arc<OpenQueue>,
        part: AttachedPart,
        /// Set at the first use.
        found: OnceLock<(Arc<Segment>, PartRange)>,
    },
}

impl ClaimedTask {
    /// Returns `None` if the task has been taken back already.
    pub(super) fn new(open: Arc<OpenQueue>, claimed: Claimed, output: Option<Block>) -> Option<Self> {
        let Some(description) = open.queue().describe(claimed.id()) else {
            open.queue().drain(open.pools(), &claimed);
            return None;
        };
        let inputs = description.inputs.iter().filter_map(|input| TaskInput::new(&open, *input)).collect();
        let output = output.map(|block| block.of_output(description.output));
        let submitter = OnceLock::new();
        let kept = OnceLock::new();
        Some(Self { open, claimed: Some(claimed), description, inputs, output, submitter, kept })
    }

    /// Returns the kind of work.
    pub fn kind(&self) -> String {
        String::from_utf8_lossy(&self.description.kind).into_owned()
    }

    /// Returns the arguments.
    pub fn arguments(&self) -> &[u8] {
        &self.description.arguments
    }

    /// Returns the inputs, in the order in which they were added.
    pub fn inputs(&self) -> &[TaskInput] {
        &self.inputs
    }

    /// Returns the block for the output, which only this attempt uses: as many bytes as the submitter asked for, with
    /// the type and shape that it gave. They are the bytes of the block's last user. A worker that writes less says so
    /// with [`Block::set_tensor`] or [`Block::set_range`], and the result has that type, shape and length; a range has
    /// to begin at 0.
    ///
    /// # Errors
    /// [`InvalidArgument::Task`] for a task without output.
    pub fn output_mut(&mut self) -> Result<&mut Block> {
        self.inputs_and_output().map(|(_, output)| output)
    }

    /// Returns the inputs and the block for the output, so that one can be written while the others are read.
    ///
    /// ```no_run
    /// # fn work(task: &mut partywall::ClaimedTask) -> partywall::Result<()> {
    /// let (inputs, output) = task.inputs_and_output()?;
    /// let numbers = inputs[0].as_slice::<f32>()?;
    /// for (root, number) in output.as_mut_slice::<f32>()?.iter_mut().zip(numbers) {
    ///     *root = number.sqrt();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`output_mut`](Self::output_mut).
    pub fn inputs_and_output(&mut self) -> Result<(&[TaskInput], &mut Block)> {
        let task = self.open.reference(self.claimed().id());
        let without = || InvalidArgument::task(format!("task {task}"), "it was submitted without room for an output");
        Ok((&self.inputs, self.output.as_mut().ok_or_else(without)?))
    }

    /// Returns the block for the output, for its address on a GPU.
    ///
    /// # Errors
    /// As [`output_mut`](Self::output_mut).
    pub fn output(&self) -> Result<&Block> {
        let task = || format!("task {}", self.task());
        let without = || InvalidArgument::task(task(), "it was submitted without room for an output");
        self.output.as_ref().ok_or_else(without)
    }

    /// Returns what keeps the inputs for addresses that are used after the attempt is over.
    pub fn inputs_memory(&self) -> TaskMemory {
        self.kept.get_or_init(|| self.new_kept()).view_inputs(&self.open)
    }

    /// Returns what keeps the output for addresses that are used after the attempt is over.
    pub fn output_memory(&self) -> TaskMemory {
        self.kept.get_or_init(|| self.new_kept()).view_output(&self.open)
    }

    /// Returns the bytes of output that the submitter asked for.
    pub fn output_bytes(&self) -> u64 {
        self.description.output.map_or(0, |output| output.bytes())
    }

    /// Returns the number of the attempt, from 1.
    pub fn attempt(&self) -> u8 {
        self.claimed().attempt()
    }

    /// Returns the number of the last attempt that the task may have. A [retry](super::Queue::retry) raises it.
    pub fn max_attempts(&self) -> u8 {
        self.description.max_attempts
    }

    /// Returns the reference of the task, for other processes.
    pub fn task(&self) -> TaskRef {
        self.open.reference(self.claimed().id())
    }

    /// Returns whether the claim still stands. If it has been taken back, further work on the task is wasted.
    pub fn is_claimed(&self) -> bool {
        self.claimed.as_ref().is_some_and(|claimed| self.open.queue().is_claimed(claimed))
    }

    /// Moves the end of the lease to `from_now` from now. In a queue without a [lease](super::QueueOptions::lease) an
    /// attempt never ends in this way, and the call only checks the claim.
    ///
    /// # Errors
    /// [`Gone::Claim`] if the claim has been taken back; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn extend(&self, from_now: Duration) -> Result<()> {
        self.open.require_ours()?;
        let until = members::now().saturating_add(u64::try_from(from_now.as_millis()).unwrap_or(u64::MAX));
        self.open.queue().extend(self.claimed(), until).map_err(|_| self.fenced())
    }

    /// Waits until the submitter's stream has completed the inputs. Returns immediately for inputs that hosts have
    /// written.
    ///
    /// # Errors
    /// [`InvalidData::TaskInputs`] if the submitter ended before that; [`Error::Timeout`], [`Error::Cancelled`]; as
    /// [`Timeline::wait`](crate::Timeline::wait).
    pub fn wait_inputs<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        let Some(ready) = self.description.ready else { return Ok(()) };
        let Some(timeline) = self.timeline(ready)? else {
            let waiting = wait.into().begin();
            while !self.has_inputs()? {
                let not_complete = || format!("the inputs of task {} are not complete", self.task());
                let left = waiting.left(Instant::now()).ok_or_else(|| waiting.error(not_complete()))?;
                std::thread::sleep(left.min(DECIDED));
            }
            return Ok(());
        };
        match timeline.wait(ready.value, wait) {
            Err(Error::Gone(Gone::Timeline { .. })) => Err(self.without_inputs()),
            waited => waited,
        }
    }

    /// Makes `stream` wait until the submitter's stream has completed the inputs. Does not block the host.
    ///
    /// If the submitter ends before that, `stream` continues, and the task cannot be completed.
    ///
    /// # Errors
    /// As [`wait_inputs`](Self::wait_inputs) and [`Timeline::wait_on`](crate::Timeline::wait_on).
    pub fn wait_inputs_on(&self, stream: StreamRef<'_>) -> Result<()> {
        let Some(ready) = self.description.ready else { return Ok(()) };
        let Some(timeline) = self.timeline(ready)? else { return self.has_inputs().map(drop) };
        match timeline.wait_on(stream, ready.value) {
            Err(Error::Gone(Gone::Timeline { .. })) => Err(self.without_inputs()),
            waited => waited,
        }
    }

    /// Completes the task: its output is the result. If a GPU address was handed out, first waits for all work of this
    /// process on that GPU.
    ///
    /// # Errors
    /// [`Gone::Claim`] if the claim has been taken back: the task goes to another worker, or has ended.
    /// [`InvalidData::TaskInputs`] if the inputs were never completed.
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn complete(mut self) -> Result<()> {
        self.open.require_ours()?;
        self.check_inputs()?;
        if self.is_exposed() {
            self.open.inputs.wait_idle()?;
            self.inputs.iter().try_for_each(TaskInput::wait_idle)?;
        }
        let is_exposed = self.is_exposed();
        let contents = self.contents()?;
        let (claimed, held, kept) = self.end();
        let control = &self.open.control;
        let since = control.recorder.begin();
        let output = held.as_ref().map(|held| NewOutput { held, contents });
        let completed = control.queue.complete(control.pools(), &claimed, output, views(kept.as_ref()));
        control.after(completed.is_ok(), claimed, held, kept.map(|kept| (kept, is_exposed)));
        completed.map_err(|_| self.open.fenced(&claimed))?;
        control.record(Action::Complete, claimed.id(), claimed.attempt(), since);
        Ok(())
    }

    /// Completes the task once all work that is on `stream` now is done. Returns immediately. Until then the task is
    /// [enqueued](super::TaskStatus::Enqueued); if this process dies before that, the task goes to another worker.
    ///
    /// # Errors
    /// Returns the task with the error, which is as for [`complete`](Self::complete) and
    /// [`TimelineWriter::signal_on`](crate::TimelineWriter::signal_on).
    pub fn complete_on(mut self, stream: StreamRef<'_>) -> Result<(), Box<(Error, Self)>> {
        let prepared = || {
            self.open.require_ours()?;
            Ok((self.contents()?, self.inputs_order()?, self.open.signal_on(stream)?))
        };
        let (contents, inputs, (order, point)) = match prepared() {
            Ok(prepared) => prepared,
            Err(error) => return Err(Box::new((error, self))),
        };
        // A stream that waited for the inputs continues even if they are never completed.
        let has_inputs =
            move || !inputs.is_some_and(|(order, value)| matches!(order.progress(value), Progress::Ended(_)));
        let claimed = *self.claimed();
        let held = self.output.as_ref().map(Block::held).transpose();
        let since = self.open.control.recorder.begin();
        let enqueued =
            held.map(|held| self.open.queue().enqueue(&claimed, held.map(|held| NewOutput { held, contents }), point));
        match enqueued {
            Ok(Ok(())) => {}
            Ok(Err(_)) => {
                let error = self.fenced();
                return Err(Box::new((error, self)));
            }
            Err(error) => return Err(Box::new((error, self))),
        }
        let is_exposed = self.is_exposed();
        let (claimed, held, kept) = self.end();
        let control = self.open.control.clone();
        control.record(Action::CompleteOn, claimed.id(), claimed.attempt(), since);
        self.open.domain().completions().on(Fence::Timeline(order.word.clone(), point.value), move |completion| {
            // Otherwise it is unknown whether the stream still uses the blocks. The broker decides that when this
            // process ends.
            if completion == Completion::Done {
                let kept = kept.filter(KeptBlocks::is_viewed);
                let is_done = if has_inputs() {
                    control.queue.finish(control.pools(), &claimed, held.as_ref(), views(kept.as_ref())).is_ok()
                } else {
                    let _ = control.queue.fail(control.pools(), &claimed, Reason::Inputs, "", kept.is_none());
                    false
                };
                control.after(is_done, claimed, held, kept.map(|kept| (kept, is_exposed)));
            }
            drop(order);
        });
        Ok(())
    }

    /// Fails the attempt: the task goes to another worker, or becomes a dead letter. Keeps at most 127 bytes of the
    /// reason, a longer one with `…` at its end, until another attempt fails.
    ///
    /// # Errors
    /// [`Gone::Claim`] if the claim has been taken back; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn fail(mut self, reason: &str) -> Result<()> {
        self.open.require_ours()?;
        let error = self.fenced();
        if self.give_up(Reason::Failed, reason) { Ok(()) } else { Err(error) }
    }

    fn claimed(&self) -> &Claimed {
        self.claimed.as_ref().expect("a task is claimed until it is over")
    }

    fn fenced(&self) -> Error {
        self.open.fenced(self.claimed())
    }

    fn without_inputs(&self) -> Error {
        InvalidData::TaskInputs { task: self.task().to_string() }.into()
    }

    /// Returns the timeline that completes the inputs; `None` if it has ended and is closed.
    fn timeline(&self, ready: StreamPoint) -> Result<Option<Arc<Timeline>>> {
        if let Some(timeline) = self.submitter.get() {
            return Ok(Some(timeline.clone()));
        }
        let found = self.open.timeline_of(self.description.submitter, ready)?;
        Ok(found.map(|timeline| self.submitter.get_or_init(|| timeline).clone()))
    }

    /// Returns whether the inputs of a task are complete whose submitter has ended. Returns false until the broker has
    /// decided that.
    fn has_inputs(&self) -> Result<bool> {
        match self.open.queue().describe(self.claimed().id()) {
            Some(now) if now.ready.is_none() => Ok(true),
            Some(_) if self.is_claimed() => Ok(false),
            _ => Err(self.without_inputs()),
        }
    }

    /// Returns what completes the inputs: a timeline and its value; `None` if they are complete.
    fn inputs_order(&self) -> Result<Option<(Order, u64)>> {
        let Some(ready) = self.description.ready else { return Ok(None) };
        match self.timeline(ready)? {
            Some(timeline) => Ok(Some((Order::of(&timeline), ready.value))),
            None if self.has_inputs()? => Ok(None),
            None => Err(self.not_ready()),
        }
    }

    /// Checks that the submitter's stream has completed the inputs, without waiting.
    fn check_inputs(&self) -> Result<()> {
        let Some((order, value)) = self.inputs_order()? else { return Ok(()) };
        match order.progress(value) {
            Progress::Reached => Ok(()),
            Progress::Ended(_) => Err(self.without_inputs()),
            Progress::Pending | Progress::Announced => Err(self.not_ready()),
        }
    }

    fn not_ready(&self) -> Error {
        Busy::InputsNotReady { task: self.task().to_string() }.into()
    }

    fn is_exposed(&self) -> bool {
        self.output.as_ref().is_some_and(Block::is_exposed)
            || self.inputs.iter().any(|input| input.exposed.load(Ordering::Relaxed))
    }

    /// Returns what the output contains, which has to begin where the block does.
    fn contents(&self) -> Result<Contents> {
        match self.output.as_ref().map(Block::contents) {
            None => Ok(Contents::of_bytes(0)),
            Some((0, contents)) => Ok(contents),
            Some((offset, _)) => {
                let why = format!("its output begins at byte {offset} of the block: set a range from 0");
                Err(InvalidArgument::task(format!("task {}", self.task()), why))
            }
        }
    }

    /// Returns what views of the task share.
    fn new_kept(&self) -> KeptBlocks {
        let blocks = self.inputs.iter().filter(|input| matches!(input.source, Source::Block { .. })).count();
        KeptBlocks::new(&self.open, blocks as u32, self.description.output.is_some())
    }

    /// Ends the use of the inputs, and returns the output block, which the caller must free or hand on, and what the
    /// views of the task share, if there are any.
    fn end(&mut self) -> (Claimed, Option<HeldSlot>, Option<KeptBlocks>) {
        self.inputs.iter_mut().for_each(TaskInput::end);
        let held = self.output.take().and_then(Block::into_held);
        let kept = self.kept.take().filter(KeptBlocks::is_viewed);
        (self.claimed.take().expect("a task ends once"), held, kept)
    }

    /// Ends the attempt without a result. Returns false if the claim had been taken back.
    fn give_up(&mut self, reason: Reason, text: &str) -> bool {
        let is_exposed = self.is_exposed();
        let (claimed, held, kept) = self.end();
        // Enqueued work may use the blocks as a view does.
        let kept = kept.or_else(|| is_exposed.then(|| self.new_kept()));
        let control = &self.open.control;
        let since = control.recorder.begin();
        let stands = control.queue.fail(control.pools(), &claimed, reason, text, kept.is_none()).is_ok();
        if stands {
            control.record(Action::Fail, claimed.id(), claimed.attempt(), since);
        }
        control.after(false, claimed, held, kept.map(|kept| (kept, is_exposed)));
        stands
    }
}

impl QueueControl {
    /// Gives back what an attempt has left, or leaves it to the views. The output of a task that is done belongs to the
    /// queue.
    fn after(&self, is_done: bool, claimed: Claimed, held: Option<HeldSlot>, kept: Option<(KeptBlocks, bool)>) {
        let held = held.filter(|_| !is_done);
        match (kept, held) {
            (Some((kept, is_exposed)), held) => kept.leave(claimed, held, is_exposed),
            (None, Some(held)) => _ = self.outputs.free(&held),
            (None, None) => {}
        }
    }
}

impl Drop for ClaimedTask {
    fn drop(&mut self) {
        if self.claimed.is_some() && self.open.is_ours() {
            self.give_up(Reason::Dropped, "");
        }
    }
}

impl fmt::Debug for ClaimedTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let claimed = self.claimed.as_ref().map(|claimed| (self.open.reference(claimed.id()), claimed.attempt()));
        match claimed {
            Some((task, attempt)) => write!(f, "ClaimedTask({task}: {:?}, attempt {attempt})", self.kind()),
            None => write!(f, "ClaimedTask({:?}, over)", self.kind()),
        }
    }
}

impl TaskInput {
    /// Returns `None` for a block, or a part of one, that the queue does not have.
    fn new(open: &Arc<OpenQueue>, input: Input) -> Option<Self> {
        let (source, contents) = match input {
            Input::Block(BlockId { index, .. }, offset, contents) => {
                let blocks = open.inputs.clone();
                let shape = blocks.shape();
                let end = offset.checked_add(contents.bytes());
                let is_there = index < shape.blocks && end.is_some_and(|end| end <= shape.block_bytes);
                let source = Source::Block { blocks, index, offset, bytes: OnceLock::new() };
                (is_there.then_some(source)?, contents)
            }
            Input::Part(part) => (Source::Part { open: open.clone(), part, found: OnceLock::new() }, part.contents),
        };
        Some(Self { source, contents, exposed: AtomicBool::new(false) })
    }

    /// Returns the bytes. Host and pinned memory only. A submitter's stream may still write them:
    /// [`ClaimedTask::wait_inputs`] waits for that.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for GPU memory, and for a part of a mutable segment;
    /// [`Gone::HeldBlock`] if this process writes the block, which it must not; for a part of a segment those of
    /// [`segment`](Self::segment).
    pub fn bytes(&self) -> Result<&[u8]> {
        match &self.source {
            Source::Block { blocks, index, offset, bytes } => {
                let lender = blocks.bytes()?;
                match bytes.get_or_init(|| blocks.borrow(*index)) {
                    Some(borrowed) => Ok(&lender.bytes(borrowed)[*offset as usize..][..self.len() as usize]),
                    None => Err(Gone::HeldBlock { pool: blocks.name().to_owned() }.into()),
                }
            }
            Source::Part { open, part, found } => {
                let (segment, range) = find(open, *part, found)?;
                segment.part_bytes(*range)
            }
        }
    }

    /// Returns as many elements of a type as fit. Host and pinned memory only.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes); [`InvalidArgument::Range`] if length or alignment do not fit the type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let bytes = self.bytes()?;
        let whole = bytes.len() - bytes.len() % size_of::<T>().max(1);
        let not_elements = |error: PodCastError| {
            InvalidArgument::range(self.name(), format!("cannot use the bytes of an input as elements: {error}"))
        };
        bytemuck::try_cast_slice(&bytes[..whole]).map_err(not_elements)
    }

    /// Returns the address in host or pinned memory, for code in other languages, which must only read it. Valid while
    /// the task is claimed.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes), except for a mutable segment, which any process may change at any time.
    pub fn as_ptr(&self) -> Result<*const u8> {
        match &self.source {
            Source::Block { .. } => self.bytes().map(<[u8]>::as_ptr),
            Source::Part { open, part, found } => {
                let (segment, range) = find(open, *part, found)?;
                segment.part_address(*range)
            }
        }
    }

    /// Returns the range on its GPU, or on the GPU that uses pinned memory, for kernels and copies that only read it. A
    /// submitter's stream may still write it: [`ClaimedTask::wait_inputs_on`] orders a stream behind that.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for host memory; for a part of a segment those of
    /// [`segment`](Self::segment).
    pub fn device(&self) -> Result<DeviceRange<'_>> {
        let range = match &self.source {
            Source::Block { blocks, index, offset, .. } => blocks.device(*index)?.slice(*offset, self.len())?,
            Source::Part { open, part, found } => {
                let (segment, range) = find(open, *part, found)?;
                segment.part_device(*range)?
            }
        };
        self.exposed.store(true, Ordering::Relaxed);
        Ok(range.read_only())
    }

    /// Copies bytes from `offset` on into `out`, from any kind of memory. Blocks the host until the copy is complete.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] for more bytes than the input has;
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda); for a part of a segment those of
    /// [`segment`](Self::segment).
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let bytes = out.len() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > self.len()) {
            let why = format!("bytes {offset} + {bytes} are not among the {} of an input", self.len());
            return Err(InvalidArgument::range(self.name(), why));
        }
        match &self.source {
            Source::Block { blocks, index, offset: start, .. } if blocks.gpu().is_some() => {
                let range = blocks.device(*index)?.slice(start + offset, bytes)?;
                range.copy_to_host(range.gpu().stream(), out)
            }
            Source::Block { .. } => {
                out.copy_from_slice(&self.bytes()?[offset as usize..][..out.len()]);
                Ok(())
            }
            Source::Part { open, part, found } => {
                let (segment, range) = find(open, *part, found)?;
                segment.read_part(*range, offset, out)
            }
        }
    }

    /// Returns the segment that the input is a part of, opened for reading; `None` for a block. This process opens an
    /// attached segment once.
    ///
    /// # Errors
    /// [`Gone::Attachment`] if the queue does not hold the segment; [`InvalidArgument::Range`] if the segment has no
    /// such part; those of mapping memory, and of every call.
    pub fn segment(&self) -> Result<Option<Arc<Segment>>> {
        match &self.source {
            Source::Block { .. } => Ok(None),
            Source::Part { open, part, found } => find(open, *part, found).map(|(segment, _)| Some(segment.clone())),
        }
    }

    /// Returns the GPU on which this process uses the input; `None` for host memory.
    ///
    /// # Errors
    /// For a part of a segment those of [`segment`](Self::segment).
    pub fn gpu(&self) -> Result<Option<&Gpu>> {
        match &self.source {
            Source::Block { blocks, .. } => Ok(blocks.gpu()),
            Source::Part { open, part, found } => find(open, *part, found).map(|(segment, _)| segment.gpu()),
        }
    }

    /// Returns the bytes that were submitted. For a part of a segment this is what the submitter has written, until
    /// another method has checked it against the segment.
    pub fn len(&self) -> u64 {
        self.contents.bytes()
    }

    /// Returns whether no bytes were submitted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type of the elements that were submitted: bytes if the submitter gave none.
    pub fn dtype(&self) -> DType {
        self.contents.dtype()
    }

    /// Returns the elements along each dimension.
    pub fn shape(&self) -> &[u64] {
        self.contents.shape()
    }

    /// Waits for the GPU of a segment whose address was handed out.
    fn wait_idle(&self) -> Result<()> {
        match &self.source {
            Source::Part { found, .. } if self.exposed.load(Ordering::Relaxed) => {
                found.get().map_or(Ok(()), |(segment, _)| segment.wait_idle())
            }
            _ => Ok(()),
        }
    }

    fn name(&self) -> &str {
        match &self.source {
            Source::Block { blocks, .. } => blocks.name(),
            Source::Part { open, .. } => open.name(),
        }
    }

    fn end(&mut self) {
        if let Source::Block { blocks, bytes, .. } = &mut self.source {
            blocks.give_back(bytes.take().flatten());
        }
    }
}

/// Returns the segment of a part, and where the part is in it. The submitter wrote the numbers, so they are checked.
fn find<'a>(
    open: &OpenQueue,
    part: AttachedPart,
    found: &'a OnceLock<(Arc<Segment>, PartRange)>,
) -> Result<&'a (Arc<Segment>, PartRange)> {
    if let Some(found) = found.get() {
        return Ok(found);
    }
    let segment = open.attached(part.attachment)?;
    let range = segment.part(part.offset, part.contents.bytes())?;
    Ok(found.get_or_init(|| (segment, range)))
}

impl Drop for TaskInput {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for TaskInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Block { blocks, .. } => write!(f, "TaskInput({}: {} bytes)", blocks.name(), self.len()),
            Source::Part { part: AttachedPart { attachment, offset, .. }, .. } => {
                write!(f, "TaskInput({}: attachment {attachment}, bytes {offset} + {})", self.name(), self.len())
            }
        }
    }
}

/// Returns what is viewed of an attempt.
fn views(kept: Option<&KeptBlocks>) -> Views {
    kept.map_or(Views::None, KeptBlocks::views)
}

/// The interval at which a worker checks whether inputs are complete whose submitter has ended.
const DECIDED: Duration = Duration::from_millis(1);
