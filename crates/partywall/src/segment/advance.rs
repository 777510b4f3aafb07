//! Advancing: an open segment shows another version of its name, at the same addresses.
//!
//! The other version is opened as a segment of its own first, at addresses of its own: its lease is held, its memory
//! imported and its table checked before anything changes. Then [`Segment::advance`] follows these steps:
//!
//! 1. It compares the layouts: kind, place, GPU, chunks, and each tensor's dtype, shape, strides and place.
//! 2. It waits for the work of the process, because the driver unmaps without waiting.
//! 3. It unmaps each chunk, and maps the other version's allocation there. The reservation of addresses stays with its
//!    owner. If that fails, it maps the former allocations again. Only if the driver refuses that, too, is the segment
//!    no longer mapped whole, which [`Segment::check`] then reports.
//! 4. The two segments exchange their leases and tables. Dropping the other segment then unmaps the addresses at which
//!    the new version was opened, and gives back the lease on the former version.
//!
//! A kill at any point leaves leases and mappings that end with the process. In Rust no tensor of the segment is
//! borrowed during an advance (`&mut self`). Tensors that Python handed out stay: they share an `Owner`, which lets no
//! other call of the segment begin, and waits for those that run.

use std::{mem::swap, sync::Arc};

use partywall_cuda::{AccessError, CudaError, Mapping, PhysicalMemory, ReplaceError, StreamRef};
use partywall_shm::Tensor as Entry;

use super::{Segment, blocks::is_capturing, named};
use crate::{
    error::{DeviceFault, Error, Failed, Gone, Mismatch, Result},
    gpu::{Gpu, access_error, failed_call},
    kind::wrong_kind,
    wait::Wait,
};

/// The work of this process that [`Segment::advance`] waits for. Streams that are being captured into a graph are
/// refused.
#[derive(Debug, Clone, Copy)]
pub enum Drain<'a> {
    /// All work on the GPU, on these streams and any others.
    All(&'a [StreamRef<'a>]),
    /// The work on these streams alone: the caller asserts that no other work uses the segment.
    Only(&'a [StreamRef<'a>]),
}

impl Segment {
    /// Opens the latest version of the name, or `version`, for reading, on the GPU on which this process uses this
    /// segment. Returns `None` if this segment already is that version, or if the name gets no other version before the
    /// wait ends; a name that was withdrawn has none. Without another version, a call that does not wait is one request
    /// to the broker.
    ///
    /// Memory of another GPU is opened only if this segment's is, too.
    ///
    /// # Errors
    /// Those of [`OpenOptions::open`](crate::OpenOptions::open); with `version` also
    /// [`NotFound::Version`](crate::error::NotFound::Version) and [`Error::Timeout`]. [`Error::Cancelled`].
    pub fn newer<'w>(&self, version: Option<u64>, wait: impl Into<Wait<'w>>) -> Result<Option<Self>> {
        let (name, own) = (self.name(), self.version());
        let mut opener = self.domain.opener(name);
        if let Some(gpu) = self.gpu() {
            let is_remote = self.place().gpu().is_some_and(|owner| owner != gpu.uuid());
            opener = opener.device(gpu.uuid()).allow_peer(is_remote);
        }
        let other = |segment: Self| (segment.version() != own).then_some(segment);
        if let Some(version) = version {
            return if version == own { Ok(None) } else { opener.version(version).open_within(wait.into()).map(other) };
        }
        let waiting = wait.into().begin();
        let latest = match self.domain.inspect(name) {
            Ok(info) => info.is_latest.then_some(info.version.version),
            Err(error) if has_ended(&error) => None,
            Err(error) => return Err(error),
        };
        let found = match latest.filter(|latest| *latest != own) {
            Some(_) => opener.open(),
            None if waiting.timeout().is_zero() => return Ok(None),
            None => {
                let wait = waiting.resume();
                match opener.clone().version(own + 1).open_within(wait) {
                    // That version is gone already. The name may have a later one, or get one.
                    Err(error) if has_ended(&error) => opener.open_within(wait),
                    opened => opened,
                }
            }
        };
        match found {
            Ok(segment) => Ok(other(segment)),
            Err(error) if has_ended(&error) || matches!(error, Error::Timeout { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes this segment the version that `next` is, at the addresses that it has: kernels, captured graphs and
    /// tensors of other libraries that know them see the other version from then on. The lease on the former version is
    /// given back.
    ///
    /// First waits for the work that `drain` names. Then no memory is mapped at the addresses for a moment: work that
    /// uses them and still runs, or that another thread enqueues before this returns, faults, which ends CUDA in this
    /// process.
    ///
    /// Both segments are frozen GPU memory, and their tensors and chunks have the same names, types and places. If this
    /// is the segment of an owned name's committer, and its version still the latest, the name is withdrawn, as by
    /// dropping it.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Drain, Result, Segment};
    /// # fn serve(weights: &mut Segment, batch: impl Fn()) -> Result<()> {
    /// loop {
    ///     if let Some(next) = weights.newer(None, Duration::ZERO)? {
    ///         weights.advance(next, Drain::All(&[]))?; // captured graphs stay valid
    ///     }
    ///     batch();
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// Each returns `next` and leaves this segment as it was:
    /// - [`Mismatch::Layout`], with each difference; [`Mismatch::Kind`] for memory that is mutable or not a GPU's;
    /// - [`DeviceFault::Captured`] if one of the streams is being captured into a graph, or if the driver does not wait
    ///   for all work because another one is; [`InvalidArgument::Range`](crate::error::InvalidArgument::Range) for a
    ///   stream of another GPU;
    /// - [`DeviceFault::Cuda`], [`DeviceFault::ContextLost`]; those of [`check`](Self::check).
    ///
    /// Except one: [`DeviceFault::NotMapped`] if the driver refused to map the new memory and then the former one, too.
    /// The addresses may then show either version or nothing, and [`check`](Self::check) returns that error from then
    /// on.
    pub fn advance(&mut self, mut next: Self, drain: Drain<'_>) -> Result<(), Failed<Self>> {
        self.exchange_with(&mut next, drain).map_err(|error| Failed::new(error, next))
    }

    /// Advances, and leaves `next` with the lease on the former version.
    fn exchange_with(&mut self, next: &mut Self, drain: Drain<'_>) -> Result<()> {
        self.check()?;
        next.check()?;
        self.check_layout(next)?;
        let name = self.name().to_owned();
        let is_mutable = self.is_mutable() || next.is_mutable();
        let has = if is_mutable { "mutable" } else { self.kind() };
        let unfit = || named(wrong_kind(has, "frozen GPU", OPERATION), &name);
        let Some(gpu) = self.gpu().filter(|_| !is_mutable) else { return Err(unfit()) };
        self.await_work(gpu, drain, "advancing")?;
        let former = match (self.mappings(), next.mappings()) {
            (Some(own), Some(others)) => exchange(own, others),
            _ => return Err(unfit()),
        };
        let former = former.map_err(|ReplaceError { source, lost }| {
            let version = next.version();
            match lost {
                None => failed_call(&format!("mapping version {version} of {name:?} in place"), source),
                Some(source) => self.lose(*source),
            }
        })?;
        swap(&mut self.domain, &mut next.domain);
        swap(&mut self.lease, &mut next.lease);
        swap(&mut self.facts, &mut next.facts);
        swap(&mut self.first, &mut next.first);
        // The memory of the former version ends here, before its lease, which `next` has now.
        drop(former);
        Ok(())
    }

    fn mappings(&mut self) -> Option<&mut [Mapping]> {
        self.memory.as_deref_mut()?.mappings()
    }

    /// Refuses a version whose tensors and chunks are not the same as this one's.
    fn check_layout(&self, next: &Self) -> Result<()> {
        let mut differences = Vec::new();
        let mut differ = |what: &str, own: String, other: String| {
            if own != other {
                differences.push(format!("{what}{own} becomes {other}"));
            }
        };
        let gpu = |segment: &Self| segment.gpu().map_or_else(|| "none".to_owned(), |gpu| gpu.uuid().to_string());
        differ("kind of memory: ", self.kind().to_owned(), next.kind().to_owned());
        differ("place: ", self.place().to_string(), next.place().to_string());
        differ("GPU of this process: ", gpu(self), gpu(next));
        let (own, other) = (self.stage(), next.stage());
        differ("number of chunks: ", own.chunks.len().to_string(), other.chunks.len().to_string());
        for (chunk, (own, other)) in own.chunks.iter().zip(&other.chunks).enumerate() {
            differ(&format!("bytes of chunk {chunk}: "), own.to_string(), other.to_string());
        }
        for tensor in own.table.iter() {
            let name = tensor.name();
            let Some(found) = other.table.find(name) else {
                differences.push(format!("{name}: missing in the new version"));
                continue;
            };
            let place = |tensor: Entry<'_>| (tensor.dtype(), tensor.chunk(), tensor.offset());
            if place(tensor) == place(found) && tensor.shape().eq(found.shape()) && tensor.strides().eq(found.strides())
            {
                continue;
            }
            let mut differ = |what: &str, of: fn(Entry<'_>) -> String| {
                let (own, other) = (of(tensor), of(found));
                if own != other {
                    differences.push(format!("{name}: {what} {own} becomes {other}"));
                }
            };
            differ("dtype", |tensor| tensor.dtype().to_string());
            differ("shape", |tensor| format!("{:?}", tensor.shape().collect::<Vec<_>>()));
            differ("strides", |tensor| format!("{:?}", tensor.strides().collect::<Vec<_>>()));
            differ("place", |tensor| format!("{} in chunk {}", tensor.offset(), tensor.chunk()));
        }
        let added = other.table.iter().filter(|tensor| own.table.find(tensor.name()).is_none());
        differences.extend(added.map(|tensor| format!("{}: only in the new version", tensor.name())));
        if differences.is_empty() {
            return Ok(());
        }
        let name = self.name().to_owned();
        Err(Mismatch::Layout { name, version: self.version(), next: next.version(), differences }.into())
    }

    /// Waits until work of this process on the GPU is done.
    pub(super) fn await_work(&self, gpu: &Gpu, drain: Drain<'_>, doing: &'static str) -> Result<()> {
        let what = format!("{doing} {:?}", self.name());
        let captured = || Error::DeviceFault(DeviceFault::Captured { what: what.clone() });
        let failed = |error: CudaError| {
            if is_capturing(&error) {
                return captured();
            }
            self.domain.health().note(gpu.uuid(), &error);
            failed_call(&what, error)
        };
        let (Drain::All(streams) | Drain::Only(streams)) = drain;
        for stream in streams {
            if stream.context() != gpu.context() {
                return Err(self.named(access_error(doing)(AccessError::OtherContext)));
            }
            // Asked first: waiting for a stream that is being captured would invalidate the capture.
            if stream.is_capturing().map_err(failed)? {
                return Err(captured());
            }
        }
        let waited = match drain {
            // Relaxed, because otherwise the call would invalidate a graph capture of another thread.
            Drain::All(_) => gpu.context().guard_relaxed().and_then(|_guard| gpu.context().synchronize()),
            Drain::Only(_) => streams.iter().try_for_each(StreamRef::synchronize),
        };
        waited.map_err(failed)
    }
}

/// Returns whether the error says that the name or version does not exist.
fn has_ended(error: &Error) -> bool {
    matches!(error, Error::NotFound(_) | Error::Gone(Gone::OwnerDied { .. } | Gone::Withdrawn { .. }))
}

/// Replaces the memory of all mappings by that of others, or of none. Returns the former memory.
fn exchange(own: &mut [Mapping], others: &[Mapping]) -> Result<Vec<Arc<PhysicalMemory>>, ReplaceError> {
    let mut former: Vec<Arc<PhysicalMemory>> = Vec::with_capacity(own.len());
    for chunk in 0..own.len() {
        match own[chunk].replace(others[chunk].memory()) {
            Ok(memory) => former.push(memory),
            Err(mut failed) => {
                for (mapping, memory) in own.iter_mut().zip(&former).rev() {
                    if let Err(ReplaceError { source, .. }) = mapping.replace(memory) {
                        // Here the new memory is mapped, or none.
                        failed.lost.get_or_insert(Box::new(source));
                    }
                }
                return Err(failed);
            }
        }
    }
    Ok(former)
}

const OPERATION: &str = "advancing in place";
