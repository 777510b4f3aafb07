//! Copying the tensors of a plan into memory, by several threads.

use std::{
    fs::File,
    num::NonZeroU64,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use partywall_os::lock::IgnorePoison;
use rustix::fs::{Advice, fadvise};

use crate::{
    error::{FileError, SinkError},
    plan::{Plan, Source, read_exact_at},
};

/// Where a copy goes to. Each thread takes a lane of its own.
pub trait Sink: Sync {
    /// A thread's way into the sink; never leaves its thread.
    type Lane<'a>: Lane
    where
        Self: 'a;

    /// Makes a lane for the calling thread.
    ///
    /// # Errors
    /// Ends the copy as [`FileError::Sink`].
    fn lane(&self) -> Result<Self::Lane<'_>, SinkError>;
}

/// A thread's way into a [`Sink`]. If the copy fails or is cancelled, it may be dropped without [`Lane::finish`].
pub trait Lane {
    /// A free buffer of at least one byte, best of [`BUFFER_BYTES`]; what is in it does not matter. If all of the
    /// lane's buffers are on their way, waits for one.
    ///
    /// # Errors
    /// Ends the copy as [`FileError::Sink`].
    fn buffer(&mut self) -> Result<&mut [u8], SinkError>;

    /// Stores bytes of the buffer that [`Lane::buffer`] has returned last. Pieces lie behind each other in the buffer,
    /// and belong to ascending tensors.
    ///
    /// # Errors
    /// Ends the copy as [`FileError::Sink`].
    fn submit(&mut self, pieces: &[Piece]) -> Result<(), SinkError>;

    /// Waits until everything is stored.
    ///
    /// # Errors
    /// Ends the copy as [`FileError::Sink`].
    fn finish(self) -> Result<(), SinkError>;
}

/// Bytes in a lane's buffer, and where they belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where they begin in the buffer.
    pub start: usize,
    /// How many there are; never 0.
    pub len: usize,
    /// The tensor: its place in [`Plan::tensors`].
    pub tensor: usize,
    /// Where they begin in the tensor.
    pub offset: u64,
}

/// How large a lane's buffers should be: small enough to stay in the cache between being read into and being copied on,
/// large enough that the calls do not count. From 256 KiB to 4 MiB no difference was found.
pub const BUFFER_BYTES: usize = 1 << 20;

/// How many threads to copy with on this machine: one a core, up to 8.
pub fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

impl Plan {
    /// Copies the bytes of all tensors into `sink` by up to `threads` threads, of which the calling one is the first.
    /// Tensors without bytes are not mentioned to the sink.
    ///
    /// `progress` is told how many bytes more have been submitted, by any of the threads. `cancel` ends the copy
    /// within one buffer's time.
    ///
    /// # Errors
    /// [`FileError::Changed`] if a file is not what it was when the plan was made, or at the end is not what it was at
    /// the beginning; [`FileError::Read`]; [`FileError::Sink`]; [`FileError::Cancelled`]. The first of several is
    /// returned, when all threads have ended.
    pub fn copy_to<S: Sink>(
        &self,
        sink: &S,
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
        cancel: &AtomicBool,
    ) -> Result<(), FileError> {
        let items = self.items();
        let job = Job {
            plan: self,
            sink,
            progress,
            cancel,
            items: &items,
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        };
        thread::scope(|scope| {
            for _ in 1..threads.min(items.len()) {
                // If no thread can be had, those that are there do its work.
                let _ = thread::Builder::new().name("partywall-copy".into()).spawn_scoped(scope, || job.work());
            }
            job.work();
        });
        match job.error.into_inner().ignore_poison() {
            Some(error) => Err(error),
            None => self.sources().iter().try_for_each(Source::check),
        }
    }

    /// The bytes of all files, cut into what one thread reads at a time.
    fn items(&self) -> Vec<Item> {
        let mut items = Vec::new();
        for (source, of) in self.sources().iter().enumerate() {
            let Some(last) = of.tensors.clone().next_back() else {
                continue;
            };
            let mut start = self.starts()[of.tensors.start];
            let end = self.starts()[last] + self.tensors()[last].bytes;
            while start < end {
                let len = ITEM_BYTES.min(end - start);
                items.push(Item { source, start, len });
                start += len;
            }
        }
        items
    }
}

/// Bytes of one file.
#[derive(Debug, Clone, Copy)]
struct Item {
    source: usize,
    start: u64,
    len: u64,
}

/// What the threads of one copy share.
struct Job<'a, S> {
    plan: &'a Plan,
    sink: &'a S,
    progress: &'a (dyn Fn(u64) + Sync),
    cancel: &'a AtomicBool,
    items: &'a [Item],
    /// The first item that nobody has taken.
    next: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<FileError>>,
}

impl<S: Sink> Job<'_, S> {
    /// Copies items until there are none, or one has failed.
    fn work(&self) {
        if let Err(error) = self.try_work() {
            self.error.lock().ignore_poison().get_or_insert(error);
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    fn try_work(&self) -> Result<(), FileError> {
        let sources = self.plan.sources();
        let failed = |item: &Item, source| FileError::Sink { file: sources[item.source].path.clone(), source };
        let Some(mut item) = self.take() else {
            return Ok(());
        };
        let mut lane = self.sink.lane().map_err(|e| failed(item, e))?;
        let mut pieces = Vec::new();
        let mut open: Option<(usize, File)> = None;
        loop {
            // Items are taken in the order of the files, so a thread opens each file once.
            let file = match open.take() {
                Some((source, file)) if source == item.source => file,
                _ => sources[item.source].open()?,
            };
            self.copy(item, &file, &mut lane, &mut pieces)?;
            open = Some((item.source, file));
            match self.take() {
                Some(next) => item = next,
                None => return lane.finish().map_err(|e| failed(item, e)),
            }
        }
    }

    /// The next item, if the copy goes on.
    fn take(&self) -> Option<&Item> {
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        self.items.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    fn copy(&self, item: &Item, file: &File, lane: &mut S::Lane<'_>, pieces: &mut Vec<Piece>) -> Result<(), FileError> {
        let path = &self.plan.sources()[item.source].path;
        let failed = |source| FileError::Sink { file: path.clone(), source };
        // The threads jump from item to item, which looks random to the kernel.
        let _ = fadvise(file, item.start, NonZeroU64::new(item.len), Advice::WillNeed);
        let mut at = item.start;
        let end = item.start + item.len;
        while at < end {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(FileError::Cancelled { file: path.clone() });
            }
            let buffer = lane.buffer().map_err(failed)?;
            let len = (end - at).min(buffer.len() as u64) as usize;
            if len == 0 {
                return Err(failed("the sink gave an empty buffer".into()));
            }
            read_exact_at(path, file, &mut buffer[..len], at)?;
            self.pieces(item.source, at, len, pieces);
            lane.submit(pieces).map_err(failed)?;
            at += len as u64;
            (self.progress)(len as u64);
        }
        Ok(())
    }

    /// To which tensors the `len` bytes at `at` of a file belong.
    fn pieces(&self, source: usize, at: u64, len: usize, pieces: &mut Vec<Piece>) {
        pieces.clear();
        let range = self.plan.sources()[source].tensors.clone();
        let starts = self.plan.starts();
        let tensors = self.plan.tensors();
        let end = |tensor: usize| starts[tensor] + tensors[tensor].bytes;
        // The first tensor that ends after `at`; without gaps it also begins before.
        let mut low = range.start;
        let mut high = range.end;
        while low < high {
            let middle = low + (high - low) / 2;
            if end(middle) <= at {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let mut tensor = low;
        let mut start = 0;
        while start < len && tensor < range.end {
            let here = at + start as u64;
            let part = ((end(tensor) - here) as usize).min(len - start);
            if part > 0 {
                pieces.push(Piece { start, len: part, tensor, offset: here - starts[tensor] });
            }
            start += part;
            tensor += 1;
        }
    }
}

/// Bytes of a file that one thread reads in a row.
const ITEM_BYTES: u64 = 8 << 20;

/// A few threads fill the memory's bandwidth. Chosen, not measured: measurements so far are of 2 cores.
const MAX_THREADS: usize = 8;
