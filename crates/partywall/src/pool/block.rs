//! Blocks of a pool: using them, giving them back, and offering them to other processes.
//!
//! A block whose GPU address was handed out is freed once the GPU has finished with it: behind a stream, or behind
//! everything that this process runs there ([`Fence::DeviceIdle`]). That wait is a job of the gpu worker, which keeps
//! the connection meanwhile, because a GPU may take as long as it likes.

use std::{
    fmt,
    ops::{Bound, RangeBounds},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use bytemuck::PodCastError;
use partywall_cuda::{AccessError, StreamRef};
use partywall_os::borrow::BorrowedBlockMut;
use partywall_shm::{
    DType, pool,
    queue::Contents,
    slots::{HeldSlot, Stale},
};

use super::{BlockRef, Blocks};
use crate::{
    completion::{Completion, Fence},
    domain::Domain,
    element::Element,
    error::{Denied, Error, Failed, Gone, InvalidArgument, Mismatch, Result},
    gpu::{DeviceRange, Gpu, failed_call},
    place::Place,
};
use partywall_wire::Named;

/// A block of a [`Pool`](super::Pool) that only its holder uses. Dropping it gives it back.
///
/// If [`device`](Self::device) or [`device_mut`](Self::device_mut) was called, work that this process has enqueued may
/// still use the block. Dropping it then frees it once all work is done that the process has on that GPU at that
/// moment; a helper thread waits for the GPU. That is always correct but often later than necessary:
/// [`release_on`](Self::release_on) waits for one stream only.
///
/// In a forked child the block belongs to the parent, and dropping it does nothing.
#[must_use = "a block is given back when it is dropped"]
pub struct Block {
    blocks: Arc<Blocks>,
    /// `None` once the block is given back, offered or handed to a queue.
    held: Option<HeldSlot>,
    /// The borrowed bytes, after the first call that uses them.
    bytes: OnceLock<Option<BorrowedBlockMut>>,
    /// True if the GPU address was handed out, so that work of this process may use the block.
    exposed: AtomicBool,
    /// Gives the block back instead of freeing it, if others may still use it.
    release: Option<Release>,
    /// Where the part begins that is used.
    offset: u64,
    /// What is in that part.
    contents: Contents,
    /// The bytes that may be used: those of the block, or of a task's output.
    room: u64,
    /// Whether it is the output of a task, which is in no pool.
    is_output: bool,
}

/// Gives a block back.
type Release = Box<dyn FnOnce(&HeldSlot) -> Result<(), Stale> + Send + Sync>;

impl Block {
    pub(crate) fn new(blocks: Arc<Blocks>, held: HeldSlot) -> Self {
        Self::exposed(blocks, held, false)
    }

    /// Returns a block whose GPU address may have been handed out.
    pub(crate) fn exposed(blocks: Arc<Blocks>, held: HeldSlot, exposed: bool) -> Self {
        let room = blocks.shape().block_bytes;
        let bytes = OnceLock::new();
        let exposed = AtomicBool::new(exposed);
        let contents = Contents::of_bytes(room);
        Self { blocks, held: Some(held), bytes, exposed, release: None, offset: 0, contents, room, is_output: false }
    }

    /// Makes the block the output of a task: limited to what another process says that it contains.
    pub(crate) fn of_output(mut self, contents: Option<Contents>) -> Self {
        let bytes = contents.map_or(0, |contents| contents.bytes()).min(self.room);
        self.contents = contents.filter(|contents| contents.bytes() == bytes).unwrap_or(Contents::of_bytes(bytes));
        self.room = bytes;
        self.is_output = true;
        self
    }

    /// Has this be the bytes of a range of the block: all methods use that range, and a task that it is an input of
    /// gets that range. The whole block is `..`; of a task's output, the bytes that the submitter asked for. Changes no
    /// byte.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Task};
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// # fn submit(queue: &partywall::Queue) -> partywall::Result<()> {
    /// let mut input = queue.inputs().alloc(SECOND)?;
    /// input.set_range(64..)?;
    /// input.set_tensor(DType::F32, &[2, 3])?; // 24 bytes, from byte 64 on
    /// input.as_mut_slice::<f32>()?.copy_from_slice(&[1.0; 6]);
    /// queue.submit(Task::new("sum").input(input), SECOND).map_err(|refused| refused.error)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] for a range that the block does not have.
    pub fn set_range(&mut self, range: impl RangeBounds<u64>) -> Result<()> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.room,
        };
        if start > end || end > self.room {
            let why = format!("bytes {start} to {end} are not among the {} of the block", self.room);
            return Err(InvalidArgument::range(self.pool(), why));
        }
        self.offset = start;
        self.contents = Contents::of_bytes(end - start);
        Ok(())
    }

    /// Has this be a tensor at the beginning of the [range](Self::set_range). A task that it is an input of, or the
    /// output of, carries type and shape. A worker that writes less than it was asked for says so in this way. Changes
    /// no byte.
    ///
    /// # Errors
    /// [`Mismatch::BlockSize`] for a larger tensor than there is room for, [`Mismatch::Room`] in the output of a task;
    /// [`InvalidArgument::Range`] for one of more than 8 dimensions, that does not fill whole bytes, or whose beginning
    /// is not aligned for its type.
    pub fn set_tensor(&mut self, dtype: DType, shape: &[u64]) -> Result<()> {
        let contents = tensor(self.pool(), dtype, shape)?;
        let has = self.room - self.offset;
        if contents.bytes() > has {
            return Err(self.too_small(has, contents.bytes()));
        }
        let alignment = dtype.alignment();
        if !self.offset.is_multiple_of(alignment) {
            let why = format!("it begins at byte {}, and {dtype} begins at a multiple of {alignment}", self.offset);
            return Err(InvalidArgument::range(self.pool(), why));
        }
        self.contents = contents;
        Ok(())
    }

    /// Returns the type of the elements: bytes unless a [tensor](Self::set_tensor) was set.
    pub fn dtype(&self) -> DType {
        self.contents.dtype()
    }

    /// Returns the elements along each dimension.
    pub fn shape(&self) -> &[u64] {
        self.contents.shape()
    }

    pub(crate) fn contents(&self) -> (u64, Contents) {
        (self.offset, self.contents)
    }

    /// Has `release` give the block back.
    pub(crate) fn released_by(mut self, release: Release) -> Self {
        self.release = Some(release);
        self
    }

    /// Returns the bytes for writing by the CPU. Host and pinned memory only. If the block's range on a GPU was
    /// returned, first waits until all work of this process on that GPU is done, because that work may use the bytes.
    ///
    /// # Errors
    /// - [`Mismatch::Kind`] for a block on a GPU;
    /// - [`Gone::HeldBlock`] if the broker took this process for dead and freed the block, and another thread of this
    ///   process has it now;
    /// - [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    ///   [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) if that work has failed.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.borrow()?;
        self.finish_work()?;
        match self.bytes.get_mut() {
            Some(Some(borrowed)) => {
                let all = self.blocks.bytes()?.bytes_mut(borrowed);
                Ok(&mut all[self.offset as usize..][..self.contents.bytes() as usize])
            }
            _ => Err(Gone::HeldBlock { pool: self.blocks.name().to_owned() }.into()),
        }
    }

    /// Returns the bytes for reading by the CPU, and waits as [`bytes_mut`](Self::bytes_mut) does.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut).
    pub fn bytes(&self) -> Result<&[u8]> {
        let borrowed = self.borrow()?;
        self.finish_work()?;
        let all = self.blocks.bytes()?.bytes_of_mut(borrowed);
        Ok(&all[self.offset as usize..][..self.contents.bytes() as usize])
    }

    /// Copies `bytes` to the beginning of the block, in any kind of memory. If the block's range on a GPU was returned,
    /// first waits as [`bytes_mut`](Self::bytes_mut) does. Host-synchronous.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Pool, Result};
    /// # fn fill(pool: &Pool) -> Result<()> {
    /// let mut block = pool.alloc(Duration::from_secs(1))?; // in main memory or on a GPU
    /// block.write(b"hello")?;
    /// let mut back = [0; 5];
    /// block.read_at(0, &mut back)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] for more bytes than the block has; otherwise as [`bytes_mut`](Self::bytes_mut) in
    /// main memory, and [`DeviceFault`](crate::error::DeviceFault) on a GPU.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.check_inside(0, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let Some(range) = self.blocks.on_gpu(self.index(), self.offset, bytes.len(), self.is_exposed())? else {
            self.bytes_mut()?[..bytes.len()].copy_from_slice(bytes);
            return Ok(());
        };
        // A copy that has failed may go on.
        range.copy_from_host(range.gpu().stream(), bytes).inspect_err(|_| self.expose())
    }

    /// Copies bytes from `offset` on into `out`, from any kind of memory. Waits as [`write`](Self::write) does.
    /// Host-synchronous.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check_inside(offset, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let at = self.offset + offset;
        let Some(range) = self.blocks.on_gpu(self.index(), at, out.len(), self.is_exposed())? else {
            out.copy_from_slice(&self.bytes()?[offset as usize..][..out.len()]);
            return Ok(());
        };
        range.copy_to_host(range.gpu().stream(), out).inspect_err(|_| self.expose())
    }

    /// Notes that work of this process on a GPU may use the block.
    fn expose(&self) {
        self.exposed.store(true, Ordering::Relaxed);
    }

    fn check_inside(&self, offset: u64, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes as u64).is_none_or(|end| end > self.len()) {
            let why = format!("bytes {offset} + {bytes} are not among its {}", self.len());
            return Err(InvalidArgument::range(format!("a block of {:?}", self.pool()), why));
        }
        Ok(())
    }

    /// Returns the bytes as elements of type `T`, as many as fit, for writing by the CPU; see
    /// [`bytes_mut`](Self::bytes_mut).
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut); [`Mismatch::BlockSize`] if the block is smaller than one element.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let len = self.elements::<T>()?;
        let pool = self.blocks.clone();
        bytemuck::try_cast_slice_mut(&mut self.bytes_mut()?[..len]).map_err(|e| not_elements(&pool, e))
    }

    /// Returns the bytes as elements of type `T`, as many as fit, for reading by the CPU; see
    /// [`bytes`](Self::bytes).
    ///
    /// # Errors
    /// As [`as_mut_slice`](Self::as_mut_slice).
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let len = self.elements::<T>()?;
        bytemuck::try_cast_slice(&self.bytes()?[..len]).map_err(|e| not_elements(&self.blocks, e))
    }

    /// Returns the block's address in host memory or pinned memory, for code in other languages. It is valid while the
    /// block is held. Does not wait for work of a GPU. If this process has [pinned](super::Pool::pin) the pool, work of its GPUs
    /// may use the address, and the block is given back as if [`device_mut`](Self::device_mut) was called.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut).
    pub fn as_ptr(&self) -> Result<*mut u8> {
        let address = self.blocks.bytes()?.as_ptr(self.borrow()?).wrapping_add(self.offset as usize);
        if self.blocks.is_pinned() {
            self.expose();
        }
        Ok(address)
    }

    /// Returns the block's range on its GPU, or on the GPU that uses pinned memory, for the caller's kernels and
    /// copies. In pinned memory the range is for reading, because the CPU may have the [`bytes`](Self::bytes) at the
    /// same time; [`device_mut`](Self::device_mut) returns one for writing.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for host memory.
    pub fn device(&self) -> Result<DeviceRange<'_>> {
        let range = self.range()?;
        Ok(if matches!(self.blocks.segment().place(), Place::Pinned(_)) { range.read_only() } else { range })
    }

    /// Returns the block's range as [`device`](Self::device) does, also for writing. [`bytes`](Self::bytes) waits for
    /// the work that was enqueued with it.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn device_mut(&mut self) -> Result<DeviceRange<'_>> {
        self.range()
    }

    /// Sets all bytes to zero. Host and pinned memory only.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut).
    pub fn zero(&mut self) -> Result<()> {
        self.bytes_mut().map(|bytes| bytes.fill(0))
    }

    /// Enqueues setting all bytes to zero. Does not wait.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for host memory; [`InvalidArgument::Range`] for a stream of another GPU;
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn zero_on(&mut self, stream: StreamRef<'_>) -> Result<()> {
        let range = self.range()?;
        stream.enqueue_set(range.as_slice(), 0).map_err(|error| self.not_zeroed(error))
    }

    /// Sets all bytes to zero, in host memory or on a GPU, and waits until that is done.
    pub(super) fn zeroed(mut self) -> Result<Self> {
        let blocks = self.blocks.clone();
        let Some(gpu) = blocks.gpu() else {
            self.zero()?;
            return Ok(self);
        };
        let stream = gpu.stream();
        let set = stream.enqueue_set(blocks.device(self.index())?.as_slice(), 0);
        set.map_err(|error| self.not_zeroed(error))?;
        // A failure drops the block: it must then be freed only after the GPU's work. After a success no work uses it.
        self.exposed = true.into();
        stream.synchronize().map_err(|error| self.not_zeroed(AccessError::Driver(error)))?;
        self.exposed = false.into();
        Ok(self)
    }

    /// Gives the block back. If its range on a GPU was returned, first waits until all work of this process on that GPU
    /// is done.
    ///
    /// # Errors
    /// - [`Gone::HeldBlock`] if the broker took this process for dead and has freed the block;
    /// - [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    ///   [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): the block is freed when this process ends;
    /// - [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release(mut self) -> Result<()> {
        self.give_back()
    }

    /// Gives the block back as [`release`](Self::release) does, without moving it, which takes the C library longer than
    /// all else.
    #[doc(hidden)]
    pub fn give_back(&mut self) -> Result<()> {
        self.blocks.domain().link().require_ours()?;
        let Some(held) = self.let_go() else { return Ok(()) };
        if self.is_exposed() {
            self.blocks.wait_idle()?;
        }
        self.free(&held).map_err(|_| self.not_held())
    }

    /// Gives the block back once all work that is on `stream` now is done. Does not wait.
    ///
    /// After that work the stream writes a word, which the connection's service thread polls with pauses of up to 1 ms.
    /// If the process is killed first, the block is freed once its death is proved. If the CUDA context is lost, it is
    /// unknown whether the work is over, and the block is freed when the process ends.
    ///
    /// # Errors
    /// The error contains the block, which is still held:
    /// [`DeviceFault::Captured`](crate::error::DeviceFault::Captured),
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release_on(mut self, stream: StreamRef<'_>) -> Result<(), Failed<Self>> {
        let domain = self.blocks.domain();
        let fence = match domain.fence_on(stream, || format!("giving a block of pool {:?} to a stream", self.pool())) {
            Ok(fence) => fence,
            Err(error) => return Err(Failed::new(error, self)),
        };
        let Some(held) = self.let_go() else { return Ok(()) };
        let free = self.freeing();
        // Without the lease the broker would free the block immediately.
        let keep = self.blocks.keep();
        self.blocks.domain().completions().on(fence, move |completion| {
            if completion == Completion::Done {
                _ = free(&held);
            }
            drop(keep);
        });
        Ok(())
    }

    /// Offers the block to the process that receives the reference and [accepts](super::Pool::accept) it. Until then it
    /// belongs to this process: it is freed if this process dies or closes its last handle of the pool. The block's
    /// bytes must be complete.
    ///
    /// Does not wait for the GPU. If GPU work still uses the block, the process that accepts it must wait for that
    /// work, for example with a [`Timeline`](crate::Timeline).
    ///
    /// ```no_run
    /// # use std::{io::Write, time::Duration};
    /// # use partywall::Pool;
    /// # fn send(frames: &Pool, mut peer: impl Write) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut frame = frames.alloc(Duration::from_secs(1))?;
    /// frame.bytes_mut()?.fill(7);
    /// writeln!(peer, "{}", frame.offer()?)?; // by a pipe, a socket or a queue: a reference is text
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Denied::Offering`] for the output of a task, which is given back; [`Gone::HeldBlock`],
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn offer(mut self) -> Result<BlockRef> {
        self.blocks.domain().link().require_ours()?;
        if self.is_output {
            return Err(Denied::Offering { queue: self.pool().to_owned() }.into());
        }
        let reference = self.reference();
        match self.let_go() {
            Some(held) if self.blocks.control().offer(&held).is_ok() => Ok(reference),
            _ => Err(self.not_held()),
        }
    }

    /// Returns the block's index in the pool, from 0.
    pub fn index(&self) -> u32 {
        self.held.as_ref().map_or(0, HeldSlot::index)
    }

    /// Returns the block's generation, which changes each time that the block is taken or accepted.
    pub fn generation(&self) -> u64 {
        self.held.as_ref().map_or(0, HeldSlot::generation)
    }

    /// Returns the length in bytes: that of the block, unless a [range](Self::set_range) or a
    /// [tensor](Self::set_tensor) was set, or it is the output of a task.
    pub fn len(&self) -> u64 {
        self.contents.bytes()
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the pool's name.
    pub fn pool(&self) -> &str {
        self.blocks.name()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.blocks.domain()
    }

    /// Returns the block's range on a GPU, and notes that work of this process may use it.
    fn range(&self) -> Result<DeviceRange<'_>> {
        let range = self.blocks.device(self.index())?;
        self.expose();
        range.slice(self.offset, self.len())
    }

    fn reference(&self) -> BlockRef {
        let pool = self.blocks.name().to_owned();
        let version = self.blocks.version();
        BlockRef { pool, version, index: self.index(), generation: self.generation() }
    }

    /// Returns the bytes, which the first call borrows from the mapping.
    fn borrow(&self) -> Result<&BorrowedBlockMut> {
        // Before the borrow: the CPU may not have access yet.
        self.blocks.bytes()?;
        // Threads that call this at the same time must share one borrow: a second one would be refused.
        let borrowed = self.bytes.get_or_init(|| self.blocks.borrow_mut(self.index())).as_ref();
        borrowed.ok_or_else(|| self.not_held())
    }

    /// Returns the number of bytes of all elements of type `T` that fit.
    fn elements<T: Element>(&self) -> Result<usize> {
        let has = self.len();
        let needed = size_of::<T>() as u64;
        if 0 < has && has < needed {
            return Err(self.too_small(has, needed));
        }
        Ok((has - has % needed.max(1)) as usize)
    }

    /// Returns the error that more bytes are needed than the block, or what it contains, has.
    #[doc(hidden)]
    pub fn too_small(&self, has: u64, needed: u64) -> Error {
        let name = self.pool().to_owned();
        match self.is_output {
            true => Mismatch::Room { what: format!("output of a task of queue {name:?}"), has, needed }.into(),
            false => Mismatch::BlockSize { name, of: Named::Pool, has, needed }.into(),
        }
    }

    /// Returns whether it is the output of a task, which cannot be [offered](Self::offer).
    pub fn is_output(&self) -> bool {
        self.is_output
    }

    /// Returns the GPU on which this process uses the block; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.blocks.gpu()
    }

    pub(crate) fn memory(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    /// Returns whether this is one of these blocks.
    pub(crate) fn is_of(&self, blocks: &Arc<Blocks>) -> bool {
        Arc::ptr_eq(&self.blocks, blocks)
    }

    /// Returns the hold, for a queue to take over.
    pub(crate) fn held(&self) -> Result<&HeldSlot> {
        let is_current = |held: &&HeldSlot| self.blocks.control().is_current(held.index(), held.generation());
        self.held.as_ref().filter(is_current).ok_or_else(|| self.not_held())
    }

    /// Ends the borrow of the bytes and returns the hold, which stays this process's.
    pub(crate) fn into_held(mut self) -> Option<HeldSlot> {
        self.let_go()
    }

    pub(crate) fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Relaxed)
    }

    /// Waits for work on a GPU that may write the bytes.
    fn finish_work(&self) -> Result<()> {
        if self.is_exposed() { self.blocks.wait_idle() } else { Ok(()) }
    }

    /// Ends the borrow of the bytes, so that the next holder can borrow them. The next call that uses them borrows them
    /// again.
    pub(crate) fn end_use(&mut self) {
        self.blocks.give_back_mut(self.bytes.take().flatten());
    }

    fn let_go(&mut self) -> Option<HeldSlot> {
        self.end_use();
        self.held.take()
    }

    /// Gives the block back. Returns false if it was not held.
    fn free(&mut self, held: &HeldSlot) -> Result<(), Stale> {
        free(self.blocks.control(), self.release.take(), held)
    }

    /// Returns the call that gives the block back later.
    fn freeing(&mut self) -> impl FnOnce(&HeldSlot) -> Result<(), Stale> + Send + use<> {
        let control = self.blocks.control().clone();
        let release = self.release.take();
        move |held| free(&control, release, held)
    }

    fn not_zeroed(&self, error: AccessError) -> Error {
        match error {
            AccessError::Driver(source) => failed_call(&format!("zeroing a block of {:?}", self.pool()), source),
            other => InvalidArgument::range(self.pool(), other.to_string()),
        }
    }

    fn not_held(&self) -> Error {
        Error::Gone(Gone::HeldBlock { pool: self.pool().to_owned() })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(held) = self.let_go() else { return };
        if self.blocks.domain().link().require_ours().is_err() {
            return;
        }
        if self.is_exposed() {
            let free = self.freeing();
            let fence = Fence::DeviceIdle(self.blocks.clone());
            return self.blocks.domain().completions().on(fence, move |completion| {
                if completion == Completion::Done {
                    _ = free(&held);
                }
            });
        }
        if self.free(&held).is_err() {
            let error = self.not_held();
            tracing::warn!(%error, "a dropped block was no longer held");
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({}: {} bytes)", self.reference(), self.len())
    }
}

fn free(control: &pool::Pool, release: Option<Release>, held: &HeldSlot) -> Result<(), Stale> {
    release.map_or_else(|| control.free(held), |release| release(held))
}

/// Returns contents that are a tensor, for a block of a pool or a task of a queue.
pub(crate) fn tensor(name: &str, dtype: DType, shape: &[u64]) -> Result<Contents> {
    let why = || format!("a tensor of {shape:?} {dtype} does not fill whole bytes, or has more than 8 dimensions");
    Contents::of_tensor(dtype, shape).ok_or_else(|| InvalidArgument::range(name, why()))
}

fn not_elements(blocks: &Blocks, error: PodCastError) -> Error {
    InvalidArgument::range(blocks.name(), format!("cannot use the block's bytes as elements: {error}"))
}
