//! Segments: names with versions, each a table of tensors over a few chunks of memory.

mod advance;
mod blocks;
mod build;
mod copy;
mod growth;
mod ipc;
mod left;
mod open;
mod options;
mod parts;
mod pin;
mod publish;
mod suspend;
mod tensor;

use std::{
    fmt, mem,
    os::fd::{OwnedFd, RawFd},
    sync::Mutex,
};

use partywall_cuda::CudaError;
use partywall_shm::Table;
use partywall_wire::{
    Call, Control, Kind as WireKind, LeaseId, Lifetime, Notice, VersionFacts,
    near::{NEAR, nearest},
};

use self::growth::Stage;
pub use self::{
    advance::Drain,
    build::{Build, Builder, Claim, UploadLane, Uploader},
    growth::{Growth, Refreshed},
    ipc::IpcHandle,
    open::{OpenOptions, OpenOrBuild},
    pin::Pinned,
    publish::Publication,
    suspend::check_suspended,
    tensor::Tensor,
};
pub(crate) use self::{
    open::{ReceivedMemory, give_back},
    options::{CommitOptions, commit_setters},
    parts::{PartRange, no_part},
};
use crate::{
    domain::Domain,
    error::{DeviceFault, Error, Mismatch, NotFound, Result, Unreachable},
    gpu::Gpu,
    info::{Promises, TableBytes},
    kind::{Kind, Memory},
    place::Place,
    wait::Wait,
};

/// An open version of a name: its memory, mapped into this process, and a lease that keeps it openable by others.
///
/// Dropping a segment unmaps its memory and then gives the lease back, waiting for the broker's answer: microseconds,
/// but up to twenty seconds if the broker is stopped. [`Segment::release`] does the same and returns errors. Unmapping
/// GPU memory waits for all work of this process on that GPU, so kernels may still use the memory when the segment is
/// dropped. Do not drop a segment while a stream waits for another process.
///
/// The committer of an `owned` version holds the name with its segment: dropping the segment withdraws the name, unless
/// [`Segment::leave_name`] leaves it to the connection. [Published](Domain::publish) memory is released only after
/// that. `Send` and `Sync`.
#[must_use = "dropping the committer's segment withdraws the name"]
pub struct Segment {
    // Unmapped before the lease is given back.
    memory: Option<Box<dyn Memory>>,
    lease: Option<LeaseId>,
    domain: Domain,
    kind: &'static dyn Kind,
    facts: Facts,
    first: Box<Stage>,
    /// Held while this process changes the segment's length.
    growing: Mutex<()>,
    /// The control memory of a pool, topic or queue, until it is taken.
    control: Vec<OwnedFd>,
    /// Why the memory is not mapped whole, if it is not.
    not_mapped: Option<Box<NotMapped>>,
}

/// The properties of a version that do not change when it grows.
#[derive(Debug)]
struct Facts {
    name: String,
    version: u64,
    /// What its committer has chosen. This process may have room for fewer bytes than are reserved.
    chosen: VersionFacts,
    /// The user to which it belongs.
    uid: u32,
    writable: bool,
    /// The numbers that the chunks' file descriptors had. They are closed: the numbers are for display only.
    fd_numbers: Vec<RawFd>,
}

/// Why a segment's memory is not mapped.
enum NotMapped {
    /// It was [suspended](Segment::suspend).
    Suspended,
    /// The driver refused, for good.
    Lost(CudaError),
}

/// The parts of a segment that the broker has granted.
struct Granted {
    domain: Domain,
    lease: LeaseId,
    kind: &'static dyn Kind,
    memory: Box<dyn Memory>,
    facts: Facts,
    chunks: Vec<u64>,
    table: Table<TableBytes>,
    /// How often it has grown.
    growths: u64,
    /// The control memory of a pool, then of its topic or queue.
    control: Vec<OwnedFd>,
}

impl From<Granted> for Segment {
    fn from(granted: Granted) -> Self {
        let Granted { domain, lease, kind, memory, facts, chunks, table, growths, control } = granted;
        Self {
            memory: Some(memory),
            lease: Some(lease),
            domain,
            kind,
            facts,
            first: Box::new(Stage::new(chunks, table, growths)),
            growing: Mutex::default(),
            control,
            not_mapped: None,
        }
    }
}

impl Segment {
    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// Returns the version.
    pub fn version(&self) -> u64 {
        self.facts.version
    }

    /// Returns where the memory is.
    pub fn place(&self) -> Place {
        self.facts.chosen.place.into()
    }

    /// Returns the GPU on which this process uses the memory; `None` for host memory, and for pinned memory that no GPU
    /// has used here yet.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.memory().gpu()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Returns the kind of memory: `host`, `vmm`, `legacy`, `pinned` or `live`.
    pub fn kind(&self) -> &'static str {
        self.kind.wire().name()
    }

    /// Returns what this kind of memory promises.
    pub fn promises(&self) -> Promises {
        Promises::of(self.kind.wire())
    }

    /// Returns whether processes may open it for writing.
    pub fn is_mutable(&self) -> bool {
        self.facts.chosen.mutable
    }

    /// Returns whether this process may write it.
    pub fn is_writable(&self) -> bool {
        self.facts.writable
    }

    /// Returns whether the name stays when its committer and all users are gone.
    pub fn is_kept(&self) -> bool {
        self.facts.chosen.lifetime == Lifetime::Kept
    }

    /// Returns the user to which the name belongs: the one whose process committed it.
    pub fn owner(&self) -> u32 {
        self.facts.uid
    }

    /// Returns whether processes of other users may open it.
    pub fn is_shared(&self) -> bool {
        self.facts.chosen.shared
    }

    /// Returns how many bytes are mapped, including alignment.
    pub fn bytes(&self) -> u64 {
        self.stage().bytes()
    }

    /// Returns the bytes of all tensors. Bytes that several tensors share count once.
    pub fn tensor_bytes(&self) -> u64 {
        self.stage().table.tensor_bytes()
    }

    /// Returns the numbers that the chunks' file descriptors had in this process, for display. The descriptors were
    /// closed after the commit had sent them, or the open had mapped them.
    pub fn fd_numbers(&self) -> &[RawFd] {
        &self.facts.fd_numbers
    }

    /// Returns the metadata.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.stage().table.metadata()
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.stage().table.len()
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.stage().table.is_empty()
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`NotFound::Tensor`] with similar names.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        let table = &self.stage().table;
        match table.find(name) {
            Some(entry) => Ok(Tensor::new(self, entry)),
            None => Err(no_such_tensor(&self.facts.name, name, table)),
        }
    }

    /// Returns all tensors, in the order in which they were added.
    pub fn tensors(&self) -> Vec<Tensor<'_>> {
        self.stage().table.in_given_order().into_iter().map(|entry| Tensor::new(self, entry)).collect()
    }

    /// Takes the control memory of a pool or topic.
    pub(crate) fn take_control(&mut self) -> Option<(Control, Vec<OwnedFd>)> {
        Some((self.facts.chosen.control?, mem::take(&mut self.control)))
    }

    /// Waits until the name is removed or ends with its owner. A newer version does not end the wait. Returns the
    /// notice if the withdrawal has a [deadline](Domain::withdraw): the time until which to drop this segment, and what
    /// happens then.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; those of every call.
    pub fn wait_withdrawn<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Option<Notice>> {
        let Some(lease) = self.lease else { return Ok(None) };
        self.domain.link().wait_withdrawn(lease, &self.facts.name, wait.into())
    }

    /// Returns whether the segment may still be used. Takes nanoseconds: the broker reports the end by itself.
    ///
    /// # Errors
    /// [`Gone::Withdrawn`](crate::error::Gone::Withdrawn) once the deadline of a withdrawal with
    /// [`Then::Stale`](crate::Then::Stale) has passed. New views of tensors then fail with the same error; slices,
    /// addresses and arrays that exist stay valid until the segment is dropped. [`DeviceFault::DeviceLost`] once the
    /// memory is lost, of which nothing is valid then; [`DeviceFault::Suspended`] while it is
    /// [suspended](Self::suspend); [`DeviceFault::NotMapped`] after an [`advance`](Self::advance) that failed so.
    pub fn check(&self) -> Result<()> {
        if let Some(why) = &self.not_mapped {
            return Err(self.unmapped(why));
        }
        self.lease.map_or(Ok(()), |lease| self.domain.link().check_lease(lease, &self.facts.name))
    }

    /// Returns the memory for another view of it.
    fn view(&self) -> Result<&dyn Memory> {
        self.check().map(|()| self.memory())
    }

    /// Unmaps the memory and gives the lease back.
    ///
    /// # Errors
    /// The errors of every call. The memory is unmapped even then.
    pub fn release(mut self) -> Result<()> {
        self.close(|lease| Call::Release { lease })
    }

    fn close(&mut self, give_back: fn(LeaseId) -> Call) -> Result<()> {
        // Memory that other processes open must stay until the broker stops granting it.
        let published = self.memory.take_if(|memory| memory.is_published());
        self.memory = None;
        let Some(lease) = self.lease.take() else { return Ok(()) };
        let left =
            (published.is_some() && self.is_live()).then(|| left::Version::identified(&self.domain, &self.facts));
        let released = self.domain.link().call(give_back(lease)).map(drop);
        match (left, published) {
            // The leases of other processes matter, too: an allocator would use the memory for other tensors.
            (Some(left), Some(published)) => left.keep(published),
            (_, published) => drop(published),
        }
        released
    }

    /// Returns whether the version is memory of an allocator that its publisher keeps while there are leases.
    fn is_live(&self) -> bool {
        self.kind.wire() == WireKind::Live
    }

    /// Returns the present stage.
    fn stage(&self) -> &Stage {
        self.first.last()
    }

    fn memory(&self) -> &dyn Memory {
        // Only `close` takes it, and nothing can be called afterwards.
        self.memory.as_deref().expect("a segment is mapped until it is closed")
    }

    /// Adds the segment's name to an error of its kind of memory.
    fn named(&self, error: Error) -> Error {
        named(error, &self.facts.name)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        match self.close(|lease| Call::Release { lease }) {
            // In a forked child the lease belongs to the parent; without a broker there is no lease.
            Ok(()) | Err(Error::Unreachable(Unreachable::Forked { .. } | Unreachable::Gone { .. })) => {}
            Err(error) => tracing::warn!(name = self.facts.name, %error, "a lease could not be given back"),
        }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { name, version, .. } = &self.facts;
        let place = self.place();
        write!(f, "Segment({name}@{version}: {} tensors, {} bytes on {place})", self.len(), self.bytes())
    }
}

fn named(error: Error, name: &str) -> Error {
    match error {
        Error::Mismatch(Mismatch::Kind { has, wanted, operation, .. }) => {
            Error::Mismatch(Mismatch::Kind { name: name.to_owned(), has, wanted, operation })
        }
        Error::DeviceFault(DeviceFault::NoPinned { name: None, why }) => {
            Error::DeviceFault(DeviceFault::NoPinned { name: Some(name.to_owned()), why })
        }
        Error::DeviceFault(DeviceFault::Cuda { what, source }) if !what.contains(&format!("{name:?}")) => {
            Error::DeviceFault(DeviceFault::Cuda { what: format!("{what} for {name:?}"), source })
        }
        other => other,
    }
}

/// Returns the error for an unknown tensor, with the names of tensors that look like it or contain it.
fn no_such_tensor(segment: &str, tensor: &str, table: &Table<TableBytes>) -> Error {
    let names = || table.iter().map(|entry| entry.name());
    let mut near = nearest(names(), tensor);
    if near.is_empty() {
        near = names().filter(|name| name.contains(tensor) || tensor.contains(name)).take(NEAR).collect();
    }
    let near = near.into_iter().map(str::to_owned).collect();
    Error::NotFound(NotFound::Tensor { segment: segment.to_owned(), tensor: tensor.to_owned(), near })
}
