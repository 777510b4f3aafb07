//! Copying the tensors of a plan into memory, by several threads.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use partywall_os::{lock::IgnorePoison, thread::spawn_scoped};

use crate::{
    error::{FileError, FileProblem, SinkError},
    plan::Plan,
    storage::FileReader,
};

/// The target of a copy. Each thread uses a lane of its own.
pub trait Sink: Sync {
    /// The lane of a thread, which is used only on that thread.
    type Lane<'a>: Lane
    where
        Self: 'a;

    /// Creates a lane for the calling thread.
    ///
    /// # Errors
    /// Ends the copy as [`FileProblem::Sink`].
    fn lane(&self) -> Result<Self::Lane<'_>, SinkError>;
}

/// Copies the bytes of one thread into a [`Sink`]. If the copy fails or is cancelled, the lane is dropped without
/// [`Lane::finish`].
pub trait Lane {
    /// Returns a free buffer of at least one byte, ideally of `BUFFER_BYTES`, with any content. Waits if all buffers
    /// of the lane are in use.
    ///
    /// # Errors
    /// Ends the copy as [`FileProblem::Sink`].
    fn buffer(&mut self) -> Result<&mut [u8], SinkError>;

    /// Stores bytes of the buffer that [`Lane::buffer`] has returned last. The pieces follow each other in the buffer
    /// and belong to ascending tensors.
    ///
    /// # Errors
    /// Ends the copy as [`FileProblem::Sink`].
    fn submit(&mut self, pieces: &[Piece]) -> Result<(), SinkError>;

    /// Waits until everything is stored.
    ///
    /// # Errors
    /// Ends the copy as [`FileProblem::Sink`].
    fn finish(self) -> Result<(), SinkError>;
}

/// Bytes in a lane's buffer, and their target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The offset in the buffer.
    pub start: usize,
    /// The number of bytes; never 0.
    pub len: usize,
    /// The index of the tensor in [`Plan::tensors`].
    pub tensor: usize,
    /// The offset in the tensor.
    pub offset: u64,
}

/// Returns how many threads should copy on this machine: one for each core, up to 8.
pub fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

impl Plan {
    /// Copies the bytes of all tensors into `sink` by up to `threads` threads, including the calling one. Skips tensors
    /// without bytes.
    ///
    /// Each thread calls `progress` with the number of bytes that it has submitted. `cancel` ends the copy within one
    /// buffer's time.
    ///
    /// # Errors
    /// [`FileProblem::Changed`] if a file has changed since the plan was made, or during the copy;
    /// [`FileProblem::Read`]; [`FileProblem::Sink`]; [`FileProblem::Cancelled`]. The first error is returned once all
    /// threads have ended.
    pub fn copy_to<S: Sink>(
        &self,
        sink: &S,
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
        cancel: &AtomicBool,
    ) -> Result<(), FileError> {
        let items = self.items(threads);
        let job = CopyJob {
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
                // If no thread can be started, the existing ones do its work.
                let _ = spawn_scoped(scope, "partywall-copy", || job.work());
            }
            job.work();
        });
        match job.error.into_inner().ignore_poison() {
            Some(error) => Err(error),
            None => self.sources.iter().try_for_each(|of| of.file.check().map_err(|problem| problem.of(&of.path))),
        }
    }

    /// Returns the bytes of all files, divided into items that one thread reads.
    fn items(&self, threads: usize) -> Vec<Item> {
        let mut items = Vec::new();
        for (source, of) in self.sources.iter().enumerate() {
            let Some(last) = of.tensors.clone().next_back() else {
                continue;
            };
            let mut start = self.starts[of.tensors.start];
            let end = self.starts[last] + self.tensors()[last].bytes;
            let run = of.file.run_bytes(end - start, threads);
            while start < end {
                let len = run.min(end - start);
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

/// The state that the threads of one copy share.
struct CopyJob<'a, S> {
    plan: &'a Plan,
    sink: &'a S,
    progress: &'a (dyn Fn(u64) + Sync),
    cancel: &'a AtomicBool,
    items: &'a [Item],
    /// The first item that no thread has taken.
    next: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<FileError>>,
}

impl<S: Sink> CopyJob<'_, S> {
    /// Copies items until none are left, or one has failed.
    fn work(&self) {
        if let Err(error) = self.try_work() {
            self.error.lock().ignore_poison().get_or_insert(error);
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    fn try_work(&self) -> Result<(), FileError> {
        let sources = &self.plan.sources;
        let failed = |item: &Item, source| FileProblem::Sink(source).of(&sources[item.source].path);
        let Some(mut item) = self.take() else {
            return Ok(());
        };
        let mut lane = self.sink.lane().map_err(|e| failed(item, e))?;
        let mut pieces = Vec::new();
        let is_cancelled = || self.cancel.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed);
        let mut open: Option<(usize, Box<dyn FileReader + '_>)> = None;
        loop {
            // Items are taken in the order of the files, so a thread opens each file once.
            let mut reader = match open.take() {
                Some((source, reader)) if source == item.source => reader,
                _ => {
                    let source = &sources[item.source];
                    source.file.reader(&is_cancelled).map_err(|problem| problem.of(&source.path))?
                }
            };
            self.copy(item, &mut *reader, &mut lane, &mut pieces)?;
            open = Some((item.source, reader));
            match self.take() {
                Some(next) => item = next,
                None => return lane.finish().map_err(|e| failed(item, e)),
            }
        }
    }

    /// Takes the next item, unless the copy has ended.
    fn take(&self) -> Option<&Item> {
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        self.items.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    fn copy(
        &self,
        item: &Item,
        reader: &mut dyn FileReader,
        lane: &mut S::Lane<'_>,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), FileError> {
        let path = &self.plan.sources[item.source].path;
        let failed = |source| FileProblem::Sink(source).of(path);
        let mut at = item.start;
        let end = item.start + item.len;
        reader.begin(at..end).map_err(|problem| problem.of(path))?;
        while at < end {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(FileProblem::Cancelled.of(path));
            }
            let buffer = lane.buffer().map_err(failed)?;
            let len = (end - at).min(buffer.len() as u64) as usize;
            if len == 0 {
                return Err(failed("the sink gave an empty buffer".into()));
            }
            reader.read_exact(&mut buffer[..len]).map_err(|problem| problem.of(path))?;
            self.pieces(item.source, at, len, pieces);
            lane.submit(pieces).map_err(failed)?;
            at += len as u64;
            (self.progress)(len as u64);
        }
        Ok(())
    }

    /// Finds the tensors that the `len` bytes at `at` of a file belong to.
    fn pieces(&self, source: usize, at: u64, len: usize, pieces: &mut Vec<Piece>) {
        pieces.clear();
        let range = self.plan.sources[source].tensors.clone();
        let starts = &self.plan.starts;
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

/// A few threads fill the memory's bandwidth. Chosen, not measured: measurements so far are of 2 cores.
const MAX_THREADS: usize = 8;
