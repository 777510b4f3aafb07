//! The memory of a version as file descriptors, for code that maps it by other means than this library.

use std::{
    fmt,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    process::Command,
    sync::Arc,
    time::Duration,
};

use partywall_os::process::inherit;
use partywall_shm::Table;
use partywall_wire::{Access as WireAccess, Answer, Call, Kind as WireKind, LeaseId, Named, Opened};

use crate::{
    domain::{Domain, answered, split_version},
    error::{Error, Mismatch, Result, Unreachable},
    info::TableBytes,
    kind::kind_name,
    place::Place,
    pool::{Block, Blocks, Pool},
    segment::{ReceivedMemory, give_back},
    topic::{Loan, Sample, Topic},
    wait::Wait,
};

/// A version's memory as file descriptors, its tensor table, and a lease on it. Nothing is mapped and no driver is
/// loaded.
///
/// Any API that imports memory by file descriptor can use the version in place: CUDA's
/// `cuMemImportFromShareableHandle`, Vulkan's `OPAQUE_FD`, OpenGL and HIP for `vmm` memory, CUDA for `pinned` memory,
/// `mmap` for `host` memory. So can programs in other languages: [`pass_to`](Self::pass_to) hands the descriptors to a
/// child process.
///
/// - The descriptors close on exec, and belong to this object.
/// - An importer maps a *frozen* version (not [mutable](Self::is_mutable)) for reading only. The kernel enforces that
///   in host memory, whose descriptors are read-only. A GPU's driver lets each importer choose, in `pinned` memory,
///   too.
/// - A version that [may grow](Self::may_grow) has the chunks that it had at the time of the call. Map them one after
///   another: a tensor may span two chunks, and offsets count from the beginning of the first.
///
/// Dropping this closes the descriptors and gives the lease back; [`release`](Self::release) also returns errors.
/// Memory that was mapped or imported stays usable afterwards. Without a lease, however, the broker forgets a version
/// that is not the latest, and its memory is no longer counted; keep this object for as long as the memory is in use.
/// In a forked child the descriptors work, and dropping closes the child's copies only.
///
/// The memory of a pool or topic that is open ([`Pool::descriptors`], [`Topic::descriptors`]) is one chunk with all
/// blocks. [`HeldBlock::range_in`] returns where a block is that this process holds. Use no other block.
///
/// ```no_run
/// # use std::{process::Command, time::Duration};
/// # use partywall::{Domain, Result};
/// # fn hand_over(domain: &Domain) -> Result<()> {
/// let weights = domain.descriptors("weights", Duration::from_secs(10))?;
/// for tensor in weights.table().iter() {
///     println!("{} at byte {} of chunk {}", tensor.name(), tensor.offset(), tensor.chunk());
/// }
/// let mut program = Command::new("./renderer");
/// for (fd, chunk) in weights.pass_to(&mut program)?.into_iter().zip(weights.chunks()) {
///     program.arg(format!("{fd}:{}", chunk.bytes())); // the child inherits the descriptor with this number
/// }
/// let status = program.status(); // `weights`, and with it the lease, lives until the child has ended
/// # Ok(())
/// # }
/// ```
pub struct Descriptors {
    // Closed before the lease is given back.
    chunks: Vec<ChunkDescriptor>,
    /// `None` once it is given back.
    lease: Option<LeaseId>,
    domain: Domain,
    name: String,
    version: u64,
    kind: WireKind,
    place: Place,
    mutable: bool,
    may_grow: bool,
    table: Table<TableBytes>,
    /// The open pool or topic whose memory this is. Keeps it open.
    blocks: Option<Arc<Blocks>>,
}

/// A block that this process holds: a [`Block`] of a pool, or a [`Loan`] or [`Sample`] of a topic. Only these implement
/// it.
pub trait HeldBlock: sealed::Sealed {
    /// Returns where the bytes of the block are in the first chunk of the memory of its pool or topic.
    ///
    /// # Errors
    /// [`Mismatch::Options`] for the memory of anything else, or of the same pool or topic opened for another GPU.
    fn range_in(&self, memory: &Descriptors) -> Result<Range<u64>>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::pool::Block {}
    impl Sealed for crate::topic::Loan {}
    impl Sealed for crate::topic::Sample {}
}

/// One chunk of a version's memory.
#[derive(Debug)]
pub struct ChunkDescriptor {
    bytes: u64,
    fd: OwnedFd,
}

impl ChunkDescriptor {
    /// Returns the length of the chunk in bytes, as allocated. On a GPU and in pinned memory this is the size to
    /// import, a multiple of the driver's granularity (2 MiB).
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl AsFd for ChunkDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Domain {
    /// Returns the memory of the latest version of `name`, or `NAME@V`, as file descriptors. Waits for a version that
    /// does not exist yet. See [`Descriptors`].
    ///
    /// # Errors
    /// As [`Domain::open`] up to mapping; [`Mismatch::Kind`] for `legacy` memory, which has no file descriptors;
    /// [`LimitReached::FileDescriptors`](crate::error::LimitReached::FileDescriptors).
    pub fn descriptors<'w>(&self, name: &str, wait: impl Into<Wait<'w>>) -> Result<Descriptors> {
        let (name, version) = split_version(name)?;
        let (answer, fds) = self.ask_to_open(&name, version, WireAccess::Read, wait.into())?;
        let opened = answered!(answer, Answer::Opened(opened) => opened)?;
        let lease = opened.lease;
        Descriptors::new(self, opened, fds, None).inspect_err(|_| give_back(self, lease))
    }
}

impl Pool {
    /// Returns the memory of all blocks as file descriptors, for other APIs. The pool stays open as long as the result.
    ///
    /// # Errors
    /// As [`Domain::descriptors`]; [`NotFound::Name`](crate::error::NotFound::Name) or
    /// [`NotFound::Version`](crate::error::NotFound::Version) once the pool is removed.
    pub fn descriptors(&self) -> Result<Descriptors> {
        Descriptors::of_blocks(self.memory())
    }
}

impl Topic {
    /// Returns the memory of all blocks as file descriptors, for other APIs. The topic stays open as long as the
    /// result.
    ///
    /// # Errors
    /// As [`Pool::descriptors`].
    pub fn descriptors(&self) -> Result<Descriptors> {
        Descriptors::of_blocks(self.memory())
    }
}

impl Descriptors {
    fn of_blocks(blocks: &Arc<Blocks>) -> Result<Self> {
        let domain = blocks.domain();
        let version = Some(blocks.version());
        let (answer, fds) = domain.ask_to_open(blocks.name(), version, WireAccess::Read, Duration::ZERO.into())?;
        let opened = answered!(answer, Answer::Opened(opened) => opened)?;
        let lease = opened.lease;
        Self::new(domain, opened, fds, Some(blocks.clone())).inspect_err(|_| give_back(domain, lease))
    }

    fn new(domain: &Domain, mut opened: Opened, fds: Vec<OwnedFd>, blocks: Option<Arc<Blocks>>) -> Result<Self> {
        let is = opened.facts.named();
        if blocks.is_none() && is != Named::Segment {
            return Err(Mismatch::Object { name: opened.name.into(), is, wanted: Named::Segment }.into());
        }
        let ReceivedMemory { table, fds, handles, .. } = ReceivedMemory::sort(&mut opened, fds)?;
        if !handles.is_empty() {
            let has = kind_name(opened.facts.kind);
            let wanted = "host, pinned or vmm";
            return Err(Mismatch::Kind { name: opened.name.into(), has, wanted, operation: "a file descriptor" }.into());
        }
        let chunks = opened.chunks.iter().zip(fds).map(|(bytes, fd)| ChunkDescriptor { bytes: *bytes, fd }).collect();
        Ok(Self {
            chunks,
            lease: Some(opened.lease),
            domain: domain.clone(),
            name: opened.name.into(),
            version: opened.version,
            kind: opened.facts.kind,
            place: opened.facts.place.into(),
            mutable: opened.facts.mutable,
            may_grow: opened.facts.reserved > 0,
            table,
            blocks,
        })
    }

    /// Returns whether this is the memory of a pool or topic, of which only [held blocks](HeldBlock::range_in) may be
    /// used.
    pub fn has_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    /// Lets the process that `command` starts inherit the chunks' descriptors. Returns the number that each has there,
    /// in the order of the chunks. `command` keeps duplicates, which no other child inherits.
    ///
    /// # Errors
    /// [`LimitReached::FileDescriptors`](crate::error::LimitReached::FileDescriptors).
    pub fn pass_to(&self, command: &mut Command) -> Result<Vec<RawFd>> {
        let fds: Vec<_> = self.chunks.iter().map(AsFd::as_fd).collect();
        let what = || format!("duplicating the descriptors of {:?} for a child process", self.name);
        inherit(command, &fds).map_err(|errno| Error::system(what(), errno))
    }

    /// Closes the descriptors and gives the lease back. Waits for the broker's answer.
    ///
    /// # Errors
    /// The errors of every call. The descriptors are closed even then.
    pub fn release(mut self) -> Result<()> {
        self.close()
    }

    /// Returns the chunks, in order.
    pub fn chunks(&self) -> &[ChunkDescriptor] {
        &self.chunks
    }

    /// Returns the tensors and the metadata. A tensor begins at an offset in a chunk.
    pub fn table(&self) -> &Table<TableBytes> {
        &self.table
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the kind of memory: `host`, whose descriptors `mmap` takes, `vmm`, whose descriptors drivers import, or
    /// `pinned`, whose descriptors only CUDA imports.
    pub fn kind(&self) -> &'static str {
        kind_name(self.kind)
    }

    /// Returns where the memory is: host memory, a NUMA node, or the UUID of the GPU on which to import it.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Returns whether processes may write the memory. If not, map it for reading only.
    pub fn is_mutable(&self) -> bool {
        self.mutable
    }

    /// Returns whether the version may grow, so that tensors may span chunks.
    pub fn may_grow(&self) -> bool {
        self.may_grow
    }

    /// Returns the bytes of all chunks.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.bytes).fold(0, u64::saturating_add)
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    fn range_of(&self, blocks: &Arc<Blocks>, index: u32, bytes: u64) -> Result<Range<u64>> {
        if self.blocks.as_ref().is_none_or(|own| !Arc::ptr_eq(own, blocks)) {
            let of = Named::of(Some(blocks.shape()));
            let why = format!("a block of it is not in the imported memory, which is that of {:?}", self.name);
            return Err(Mismatch::Options { of, name: blocks.name().to_owned(), why }.into());
        }
        let start = blocks.offset(index);
        Ok(start..start + bytes)
    }

    fn close(&mut self) -> Result<()> {
        self.chunks.clear();
        match self.lease.take() {
            Some(lease) => self.domain.link().call(Call::Release { lease }).map(drop),
            None => Ok(()),
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        match self.close() {
            // In a forked child the lease belongs to the parent; without a broker there is no lease.
            Ok(()) | Err(Error::Unreachable(Unreachable::Forked { .. } | Unreachable::Gone { .. })) => {}
            Err(error) => tracing::warn!(name = self.name, %error, "a lease could not be given back"),
        }
    }
}

impl HeldBlock for Block {
    fn range_in(&self, memory: &Descriptors) -> Result<Range<u64>> {
        memory.range_of(self.memory(), self.index(), self.len())
    }
}

impl HeldBlock for Loan {
    fn range_in(&self, memory: &Descriptors) -> Result<Range<u64>> {
        memory.range_of(self.memory(), self.index(), self.len())
    }
}

impl HeldBlock for Sample {
    fn range_in(&self, memory: &Descriptors) -> Result<Range<u64>> {
        memory.range_of(self.memory(), self.index(), self.len())
    }
}

impl fmt::Debug for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, version, place, chunks, .. } = self;
        write!(f, "Descriptors({name}@{version}: {} chunks, {} bytes on {place})", chunks.len(), self.bytes())
    }
}
