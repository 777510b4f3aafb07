//! Copies between places: all tensors of a segment into a new version, or into memory with the same tensors.

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use partywall_cuda::{AccessError, DeviceSlice, HostRegistration, StreamRef};
use partywall_os::{lock::IgnorePoison, thread::spawn_scoped};
use partywall_shm::{Table, TableBuilder, Tensor as Entry};
use partywall_wire::Kind as WireKind;

use super::{Build, Builder, Segment, named};
use crate::{
    error::{Denied, Error, Mismatch, Result},
    files::FileProblem,
    gpu::{Gpu, access_error},
    info::TableBytes,
    kind::{Copy, Memory, Uploads, wrong_kind},
    place::Place,
};

impl Builder {
    /// Replaces the tensors and metadata added so far by those of a segment.
    pub fn like(self, segment: &Segment) -> Self {
        self.table(TableBuilder::from_table(&segment.stage().table))
    }
}

impl Segment {
    /// Begins a version of `name` at `place` with the same tensors and metadata, and enqueues a copy of their contents
    /// on `stream`. [`Build::commit`] waits for the copy. Use [`Builder::like`] and [`Build::copy_from`] to set other
    /// options.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Place, Result, gpu};
    /// # fn main() -> Result<()> {
    /// let domain = Domain::connect()?;
    /// let (place @ Place::Gpu(uuid), _) = gpu::resolve("cuda:0".parse().expect("a device"))? else { return Ok(()) };
    /// let gpu = domain.gpu(uuid)?;
    /// let weights = domain.open("llm", Duration::ZERO)?;
    /// let _pinned = weights.pin(&gpu)?; // if it is host memory
    /// let on_gpu = weights.to("llm-gpu", place, gpu.stream())?.commit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Mismatch::HostTarget`] for [`Place::Host`], which no stream can copy to before it is committed: use
    /// [`Put::segment`](crate::Put::segment). As [`Builder::allocate`] and [`Build::copy_from`].
    pub fn to(&self, name: &str, place: Place, stream: StreamRef<'_>) -> Result<Build> {
        if place == Place::Host {
            return Err(host_target(name, false));
        }
        let mut build = self.domain.create(name, place).like(self).allocate()?;
        build.copy_from(self, stream)?;
        Ok(build)
    }

    /// Enqueues a copy of all tensors of `source`, as [`Build::copy_from`] does. Not ordered with accesses of other
    /// processes: use a timeline, or wait for the stream.
    ///
    /// # Errors
    /// As [`Build::copy_from`]; [`Denied::ReadOnly`] unless the segment was opened for writing; [`Mismatch::Kind`] for
    /// a segment in host memory that is not pinned; [`Mismatch::HostTarget`] if both are in host memory.
    pub fn copy_from(&self, source: &Self, stream: StreamRef<'_>) -> Result<()> {
        if !self.facts.writable {
            return Err(Denied::ReadOnly { name: self.facts.name.clone(), version: self.facts.version }.into());
        }
        let memory = self.view()?;
        let side = |gpu: &Gpu, run: &Run| {
            side_of(memory, gpu, run.to_chunk, run.to_offset, run.bytes).map_err(|e| self.named(e))
        };
        enqueue(source, (&self.stage().table, Gaps::of(&[source, self])), &self.facts.name, stream, side)
    }
}

impl Build {
    /// Enqueues a copy of all tensors of `source`, whose tensors must be the same. As few calls of the driver as the
    /// memory has chunks, and no call waits for the copy. The commit waits for it, and so does dropping the source,
    /// whose lease stays until then.
    ///
    /// `stream` belongs to the GPU on which this process uses the source or the build. The other side is on the same
    /// GPU, pinned memory, or a host segment that is [pinned](Segment::pin): there is no slow path. Keep the pin until
    /// the copy is done.
    ///
    /// # Errors
    /// [`Mismatch::Tensors`] unless both have the same tensors; [`Mismatch::Kind`] for a source in host memory that is
    /// not pinned; [`Mismatch::HostTarget`] for a build in host memory;
    /// [`InvalidArgument::Range`](crate::error::InvalidArgument::Range) if the stream is captured or belongs to another
    /// GPU; [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda). Part of the copy may have been enqueued then.
    pub fn copy_from(&mut self, source: &Segment, stream: StreamRef<'_>) -> Result<()> {
        self.allocate_chunks(usize::MAX)?;
        let draft = &*self.draft;
        let side = |gpu: &Gpu, run: &Run| {
            let slice = draft.device_on(gpu, run.to_chunk, run.to_offset, run.bytes);
            slice.map(CopyEnd::Device).map_err(|error| match error {
                Error::Mismatch(Mismatch::Kind { has: "host", .. }) => host_target(&self.name, false),
                error => named(error, &self.name),
            })
        };
        enqueue(source, (&self.table, Gaps::of(&[source])), &self.name, stream, side)
    }

    /// Copies all tensors of `source`, whose tensors are the same, through buffers of this process.
    pub(crate) fn copy_by_cpu(
        &mut self,
        source: &Segment,
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
        cancel: &AtomicBool,
    ) -> Result<()> {
        self.allocate_chunks(usize::MAX)?;
        let runs = runs(&source.stage().table, &self.table, Gaps::of(&[source]))
            .map_err(|why| other_tensors(source, &self.name, why))?;
        let pieces: Vec<_> = runs.iter().flat_map(Run::pieces).collect();
        let job = CopyJob {
            source: source.view()?,
            uploads: &*self.draft.uploads(),
            pieces: &pieces,
            next: AtomicUsize::new(0),
            progress,
            cancel,
            error: Mutex::default(),
        };
        thread::scope(|scope| {
            for _ in 1..threads.min(pieces.len()) {
                // If no thread can be started, the existing ones do its work.
                let _ = spawn_scoped(scope, "partywall-copy", || job.work());
            }
            job.work();
        });
        match job.error.into_inner().ignore_poison() {
            Some(error) => Err(named(error, &self.name)),
            None if cancel.load(Ordering::Relaxed) => Err(FileProblem::Cancelled.of(source.name()).into()),
            None => Ok(()),
        }
    }
}

/// Bytes that lie together on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    from_chunk: usize,
    from_offset: u64,
    to_chunk: usize,
    to_offset: u64,
    bytes: u64,
}

impl Run {
    /// Adds `next` if it follows on both sides at the same distance, and the bytes between them may be copied.
    fn join(&mut self, next: &Self, gaps: Gaps) -> bool {
        let together = (gaps == Gaps::Padding || next.to_offset <= self.to_offset + self.bytes)
            && self.from_chunk == next.from_chunk
            && self.to_chunk == next.to_chunk
            && next.from_offset.checked_sub(self.from_offset) == next.to_offset.checked_sub(self.to_offset);
        if together {
            self.bytes = self.bytes.max(next.to_offset - self.to_offset + next.bytes);
        }
        together
    }

    /// Returns whether `next`, which begins behind it in the target, begins within it there.
    fn overlaps(&self, next: &Self) -> bool {
        self.to_chunk == next.to_chunk && next.to_offset < self.to_offset + self.bytes
    }

    /// Divides it into pieces that one thread copies.
    fn pieces(&self) -> impl Iterator<Item = Self> {
        let run @ Self { from_offset, to_offset, bytes, .. } = *self;
        let piece = move |start: u64| Self {
            from_offset: from_offset + start,
            to_offset: to_offset + start,
            bytes: PIECE.min(bytes - start),
            ..run
        };
        (0..bytes).step_by(PIECE as usize).map(piece)
    }
}

/// What lies between the tensors of source and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gaps {
    /// Bytes for the alignment of the next tensor.
    Padding,
    /// Perhaps memory of the program that published the tensors: a copy neither reads nor writes it.
    Unknown,
}

impl Gaps {
    fn of(segments: &[&Segment]) -> Self {
        let is_shared_in_place = |segment: &&Segment| matches!(segment.kind.wire(), WireKind::Legacy | WireKind::Live);
        if segments.iter().any(is_shared_in_place) { Self::Unknown } else { Self::Padding }
    }
}

/// Returns what to copy, in the order of the target; or which tensor differs.
fn runs(from: &Table<TableBytes>, to: &Table<TableBytes>, gaps: Gaps) -> Result<Vec<Run>, String> {
    if from.len() != to.len() {
        return Err(format!("one has {} tensors, the other {}", from.len(), to.len()));
    }
    let pair = |target: Entry<'_>| {
        let name = target.name();
        let entry = from.find(name).ok_or_else(|| format!("only one has a tensor {name:?}"))?;
        let same = entry.dtype() == target.dtype()
            && entry.shape().eq(target.shape())
            && entry.strides().eq(target.strides())
            && entry.bytes() == target.bytes();
        same.then(|| Run {
            from_chunk: entry.chunk(),
            from_offset: entry.offset(),
            to_chunk: target.chunk(),
            to_offset: target.offset(),
            bytes: target.bytes(),
        })
        .ok_or_else(|| format!("tensor {name:?} has another type or shape"))
    };
    let mut pairs = to.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
    pairs.retain(|run| run.bytes > 0);
    pairs.sort_by_key(|run| (run.to_chunk, run.to_offset));
    let mut runs: Vec<Run> = Vec::new();
    for run in pairs {
        if let Some(last) = runs.last_mut() {
            if last.join(&run, gaps) {
                continue;
            }
            // One tensor would get the elements of another.
            if last.overlaps(&run) {
                let is_there = |tensor: &Entry<'_>| (tensor.chunk(), tensor.offset()) == (run.to_chunk, run.to_offset);
                let tensor = to.iter().find(is_there);
                let name = tensor.as_ref().map_or("", Entry::name);
                return Err(format!("tensor {name:?} shares memory with another only in the target"));
            }
        }
        runs.push(run);
    }
    Ok(runs)
}

/// One side of a copy, as the driver reaches it.
enum CopyEnd<'a> {
    Device(DeviceSlice<'a>),
    /// Registered host memory, from an offset on.
    Host(Registered<'a>, u64),
}

/// The registration of a chunk, which goes back through its memory: the last owner must not end it beside a new pin.
struct Registered<'a> {
    memory: &'a dyn Memory,
    /// `None` only while this is dropped.
    registration: Option<Arc<HostRegistration>>,
}

impl Deref for Registered<'_> {
    type Target = HostRegistration;

    fn deref(&self) -> &HostRegistration {
        self.registration.as_ref().expect("it is registered until this is dropped")
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.memory.unpin(self.registration.take().into_iter().collect());
    }
}

/// Returns part of a segment's chunk.
fn side_of<'a>(memory: &'a dyn Memory, gpu: &Gpu, chunk: usize, offset: u64, bytes: u64) -> Result<CopyEnd<'a>> {
    match memory.registration(chunk) {
        Some(registration) => Ok(CopyEnd::Host(Registered { memory, registration: Some(registration) }, offset)),
        None => memory.device_on(gpu, chunk, offset, bytes).map(CopyEnd::Device).map_err(not_host),
    }
}

fn enqueue<'a>(
    source: &Segment,
    (table, gaps): (&Table<TableBytes>, Gaps),
    name: &str,
    stream: StreamRef<'_>,
    target: impl Fn(&Gpu, &Run) -> Result<CopyEnd<'a>>,
) -> Result<()> {
    let failed = |error| named(access_error("copying between places")(error), name);
    if stream.is_capturing().map_err(|error| failed(error.into()))? {
        // A graph could be launched after the lease is given back.
        return Err(failed(AccessError::Capturing));
    }
    let runs = runs(&source.stage().table, table, gaps).map_err(|why| other_tensors(source, name, why))?;
    let memory = source.view()?;
    let device = stream.context().device();
    let gpu = source.domain.gpu(device.uuid().map_err(|error| failed(error.into()))?)?;
    for run in &runs {
        let from =
            side_of(memory, &gpu, run.from_chunk, run.from_offset, run.bytes).map_err(|error| source.named(error))?;
        let enqueued = match (from, target(&gpu, run)?) {
            (CopyEnd::Device(from), CopyEnd::Device(to)) => stream.enqueue_copy(to, from),
            (CopyEnd::Host(from, offset), CopyEnd::Device(to)) => from.enqueue_copy_to(stream, offset, to),
            (CopyEnd::Device(from), CopyEnd::Host(to, offset)) => to.enqueue_copy_from(stream, offset, from),
            (CopyEnd::Host(..), CopyEnd::Host(..)) => return Err(host_target(name, true)),
        };
        enqueued.map_err(failed)?;
    }
    Ok(())
}

/// Says of host memory what a copy by a stream needs instead.
fn not_host(error: Error) -> Error {
    match error {
        Error::Mismatch(Mismatch::Kind { has: "host", .. }) => {
            wrong_kind("host", "pinned or GPU", "a copy by a stream")
        }
        other => other,
    }
}

/// Returns the error that a stream cannot copy to a target in host memory.
fn host_target(name: &str, pinned: bool) -> Error {
    Mismatch::HostTarget { name: name.to_owned(), pinned }.into()
}

fn other_tensors(source: &Segment, name: &str, why: String) -> Error {
    Mismatch::Tensors { name: name.to_owned(), source_name: source.name().to_owned(), why }.into()
}

/// The state that the threads of a copy by the CPU share.
struct CopyJob<'a> {
    source: &'a dyn Memory,
    uploads: &'a dyn Uploads,
    pieces: &'a [Run],
    /// The first piece that no thread has taken.
    next: AtomicUsize,
    progress: &'a (dyn Fn(u64) + Sync),
    cancel: &'a AtomicBool,
    error: Mutex<Option<Error>>,
}

impl CopyJob<'_> {
    /// Copies pieces until none are left, one has failed, or the copy is cancelled.
    fn work(&self) {
        if let Err(error) = self.copy() {
            self.error.lock().ignore_poison().get_or_insert(error);
        }
    }

    fn copy(&self) -> Result<()> {
        let mut upload = self.uploads.start()?;
        while let Some(piece) = self.take() {
            let mut done = 0;
            while done < piece.bytes {
                let buffer = upload.buffer()?;
                let len = (piece.bytes - done).min(buffer.len() as u64) as usize;
                self.source.read(piece.from_chunk, piece.from_offset + done, &mut buffer[..len])?;
                upload.submit(&[Copy { start: 0, len, chunk: piece.to_chunk, offset: piece.to_offset + done }])?;
                done += len as u64;
                (self.progress)(len as u64);
            }
        }
        upload.finish()
    }

    fn take(&self) -> Option<&Run> {
        if self.cancel.load(Ordering::Relaxed) || self.error.lock().ignore_poison().is_some() {
            return None;
        }
        self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// Bytes that one thread copies in a row.
const PIECE: u64 = 8 << 20;

#[cfg(test)]
mod tests {
    use partywall_shm::{DType, Layout};

    use super::*;

    fn table(names: &[(&str, u64)], chunk_bytes: u64) -> Table<TableBytes> {
        let mut builder = TableBuilder::new();
        for (name, elements) in names {
            builder.add(name, DType::U8, &[*elements]).unwrap();
        }
        let Layout { table, chunks } = builder.layout(chunk_bytes, 64).unwrap();
        Table::parse(TableBytes::Inline(table), &chunks).unwrap()
    }

    // Holds 87.
    #[test]
    fn equal_layouts_are_copied_chunk_by_chunk() {
        let tensors = [("a", 100), ("empty", 0), ("b", 300), ("c", 1000)];
        let one = table(&tensors, 1 << 20);
        let all = Run { from_chunk: 0, from_offset: 0, to_chunk: 0, to_offset: 0, bytes: 768 + 1000 };
        assert_eq!(runs(&one, &one, Gaps::Padding).unwrap(), [all]);
        let split = table(&tensors, 1024);
        let copied = runs(&split, &split, Gaps::Padding).unwrap();
        assert_eq!(copied.iter().map(|run| run.bytes).collect::<Vec<_>>(), [556, 1000]);
        let apart = runs(&one, &one, Gaps::Unknown).unwrap();
        assert_eq!(apart.iter().map(|run| run.bytes).collect::<Vec<_>>(), [100, 300, 1000]);
        // Of different layouts, what lies together on both sides.
        let copied = runs(&one, &split, Gaps::Padding).unwrap();
        assert_eq!(copied.iter().map(|run| (run.from_offset, run.bytes)).collect::<Vec<_>>(), [(0, 556), (768, 1000)]);
    }

    #[test]
    fn shared_memory_of_the_target_is_shared_in_the_source_too() {
        let tied = |chunk_bytes| {
            let mut builder = TableBuilder::new();
            builder.add("a", DType::U8, &[512]).unwrap();
            builder.add_view("b", DType::U8, &[256], &[1], "a", 256).unwrap();
            let Layout { table, chunks } = builder.layout(chunk_bytes, 64).unwrap();
            Table::parse(TableBytes::Inline(table), &chunks).unwrap()
        };
        let [tied, split] = [1 << 20, 256].map(tied);
        let apart = table(&[("a", 512), ("b", 256)], 256);
        let copied = |from, to| runs(from, to, Gaps::Padding).map(|runs| runs.len());
        assert_eq!(copied(&tied, &split), Ok(1));
        assert_eq!(copied(&tied, &apart), Ok(2));
        let why = "tensor \"b\" shares memory with another only in the target";
        assert_eq!(copied(&apart, &tied), Err(why.to_owned()));
    }

    #[test]
    fn tensors_are_found_by_name_and_compared() {
        let one = table(&[("a", 256), ("b", 256)], 1 << 20);
        let swapped = runs(&one, &table(&[("b", 256), ("a", 256)], 1 << 20), Gaps::Padding).unwrap();
        assert_eq!(
            swapped.iter().map(|run| (run.from_offset, run.to_offset)).collect::<Vec<_>>(),
            [(256, 0), (0, 256)]
        );
        for (other, why) in [
            (vec![("a", 256)], "one has 2 tensors, the other 1"),
            (vec![("a", 256), ("c", 256)], "only one has a tensor \"c\""),
            (vec![("a", 256), ("b", 257)], "tensor \"b\" has another type or shape"),
        ] {
            assert_eq!(runs(&one, &table(&other, 1 << 20), Gaps::Padding).unwrap_err(), why);
        }
    }

    #[test]
    fn pieces_are_the_whole() {
        let run = Run { from_chunk: 1, from_offset: 7, to_chunk: 0, to_offset: 9, bytes: 2 * PIECE + 5 };
        let pieces: Vec<_> = run.pieces().collect();
        assert_eq!(pieces.iter().map(|piece| piece.bytes).collect::<Vec<_>>(), [PIECE, PIECE, 5]);
        assert_eq!((pieces[2].from_offset, pieces[2].to_offset), (7 + 2 * PIECE, 9 + 2 * PIECE));
    }
}
