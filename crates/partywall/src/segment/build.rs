//! Building a version: layout, allocation, writing, commit.

use std::{
    collections::VecDeque,
    fmt,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
};

use partywall_os::memfd;
use partywall_shm::{DType, Layout, Table, TableBuilder, TableError, Tensor as Entry};
use partywall_wire::{
    Answer, Call, ClaimId, Commit, Control, LeaseId, Lifetime, MemberId, VersionFacts,
    limits::{MAX_CHUNKS, MAX_INLINE_TABLE},
};

use super::{CommitOptions, Facts, Granted, Segment, commit_setters, named, no_such_tensor};
use crate::{
    domain::{Domain, answered, check_name, unexpected},
    element::{Element, elements_mut},
    error::{Error, Failed, Held, InvalidArgument, LimitReached, Mismatch, Result},
    files::{self, Piece, SinkError},
    gpu::{DeviceRange, Gpu},
    info::TableBytes,
    kind::{self, Copy, Draft, Kind, Upload, Uploads},
    place::Place,
};

/// The largest chunk, unless one tensor alone is larger.
const CHUNK_BYTES: u64 = 16 << 30;

impl Domain {
    /// Begins the next version of `name`, in memory at `place`. Other processes do not see the version before
    /// [`Build::commit`](crate::Build::commit).
    ///
    /// ```no_run
    /// # use partywall::{DType, Domain, Place};
    /// # let domain = Domain::connect()?;
    /// let mut build = domain.create("weights", Place::Host).tensor("w", DType::F32, &[1024]).allocate()?;
    /// build.as_mut_slice::<f32>("w")?.fill(0.5);
    /// let segment = build.commit()?; // from here on other processes can open it, and it cannot change
    /// # drop(segment);
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn create(&self, name: &str, place: Place) -> Builder {
        Builder::new(self.clone(), name, place)
    }

    /// Refuses pinned memory beyond the broker's limits and the user's. Only the commit decides, but an allocation
    /// takes 0.25 s a GiB, and is then filled, before that.
    pub(super) fn check_pinned(&self, kind: &dyn Kind, place: Place, chunks: &[u64]) -> Result<()> {
        if !matches!(place, Place::Pinned(_)) {
            return Ok(());
        }
        let bytes =
            chunks.iter().try_fold(0, |sum: u64, chunk| kind.allocated(*chunk).map(|n| sum.saturating_add(n)))?;
        let call = Call::CheckBytes { place: place.into(), bytes };
        answered!(self.link().call(call)?, Answer::Done => ())
    }
}

/// The right to build a name that other processes wait for. Dropping it passes the right on to one of them.
#[derive(Debug)]
#[must_use = "dropping a claim passes it on to another process"]
pub struct Claim {
    domain: Domain,
    name: String,
    id: Option<ClaimId>,
}

impl Claim {
    pub(crate) fn new(domain: Domain, name: &str, id: ClaimId) -> Self {
        Self { domain, name: name.to_owned(), id: Some(id) }
    }

    /// Returns the name to build.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins the version that fulfils the claim when it is committed, in memory at `place`.
    pub fn create(self, place: Place) -> Builder {
        let mut builder = self.domain.create(&self.name, place);
        builder.claim = Some(self);
        builder
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(claim) = self.id.take()
            && let Err(error) = self.domain.link().call(Call::AbandonBuild { claim })
        {
            tracing::debug!(name = self.name, %error, "a claim could not be given back");
        }
    }
}

/// Collects the tensors and options of a new version; see [`Domain::create`].
#[derive(Debug)]
#[must_use = "nothing is allocated until allocate()"]
pub struct Builder {
    domain: Domain,
    name: String,
    place: Place,
    table: TableBuilder,
    problem: Option<TableError>,
    chunk_bytes: u64,
    on_demand: bool,
    commit: CommitOptions,
    reserve: Option<u64>,
    claim: Option<Claim>,
    control: Option<Control>,
}

impl Builder {
    pub(crate) fn new(domain: Domain, name: &str, place: Place) -> Self {
        Self {
            domain,
            name: name.to_owned(),
            place,
            table: TableBuilder::new(),
            problem: None,
            chunk_bytes: CHUNK_BYTES,
            on_demand: false,
            commit: CommitOptions::default(),
            reserve: None,
            claim: None,
            control: None,
        }
    }

    /// Adds a tensor whose elements follow each other without gaps, last dimension fastest. Its first element is
    /// aligned to 256 bytes. [`Builder::allocate`] returns errors about the tensor.
    pub fn tensor(mut self, name: &str, dtype: DType, shape: &[u64]) -> Self {
        let added = self.table.add(name, dtype, shape);
        self.problem = self.problem.or(added.err());
        self
    }

    /// Adds a tensor with these strides, in elements, as [`Builder::tensor`] does.
    pub fn tensor_strided(mut self, name: &str, dtype: DType, shape: &[u64], strides: &[u64]) -> Self {
        let added = self.table.add_strided(name, dtype, shape, strides);
        self.problem = self.problem.or(added.err());
        self
    }

    /// Adds a tensor that shows memory of the tensor `of`, which was added before, from `offset` bytes on: the memory
    /// exists once. Strides are in elements. [`Builder::allocate`] returns errors about the tensor.
    pub fn view(mut self, name: &str, dtype: DType, shape: &[u64], strides: &[u64], (of, offset): (&str, u64)) -> Self {
        let added = self.table.add_view(name, dtype, shape, strides, of, offset);
        self.problem = self.problem.or(added.err());
        self
    }

    /// Adds a pair of metadata.
    pub fn metadata(mut self, key: &str, value: &str) -> Self {
        let set = self.table.set_metadata(key, value);
        self.problem = self.problem.or(set.err());
        self
    }

    /// Replaces the tensors and metadata added so far by those of `table`.
    pub fn table(mut self, table: TableBuilder) -> Self {
        self.table = table;
        self
    }

    commit_setters!();

    /// Sets how many bytes a mutable version may grow to. Each process that opens it reserves that many addresses,
    /// which costs no memory; a process without room for them maps only the present length. By default eight times the
    /// initial length, at least 64 MiB and at most 256 GiB.
    pub fn reserve(mut self, bytes: u64) -> Self {
        self.reserve = Some(bytes);
        self
    }

    /// Gives the name to another member of the same user, by its [`Domain::member`]: the name ends with that member,
    /// and not with this process. A name that is [`kept`](Self::kept) has no owner. If the member is gone,
    /// [`Build::commit`] returns [`NotFound::Member`](crate::error::NotFound::Member).
    pub fn owner(mut self, member: u64) -> Self {
        self.commit.owner = Some(member);
        self
    }

    /// Sets how the version is committed.
    pub(crate) fn commit_options(mut self, commit: CommitOptions) -> Self {
        self.commit = commit;
        self
    }

    /// Makes the version a pool or topic whose blocks are the first chunk. It is mutable and of fixed length, and its
    /// name ends with its last user unless it is kept.
    pub(crate) fn control(mut self, control: Control) -> Self {
        self.control = Some(control);
        self.mutable(true)
    }

    /// Sets the largest chunk in bytes; a chunk of a single tensor may be larger. A mutable version begins as one
    /// chunk.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// Allocates each chunk only when [`Build::allocate_for`] needs it, in the order of the tensors; the commit
    /// allocates the rest. Memory that is given up meanwhile can thus become the next chunk. Without effect on a
    /// mutable version.
    ///
    /// ```no_run
    /// # use partywall::{DType, Domain, Place};
    /// let domain = Domain::connect()?;
    /// let builder = domain.create("llm", Place::Host).chunk_bytes(1 << 30).on_demand(true);
    /// let mut build = builder.tensor("a", DType::U8, &[1 << 30]).tensor("b", DType::U8, &[1 << 30]).allocate()?;
    /// build.write("a", &vec![1; 1 << 30])?; // allocates the first chunk
    /// build.write("b", &vec![2; 1 << 30])?; // and the second
    /// let llm = build.commit()?;
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn on_demand(mut self, on_demand: bool) -> Self {
        self.on_demand = on_demand;
        self
    }

    /// Allocates the memory, which reads as zero. No other process can see it.
    ///
    /// # Errors
    /// [`InvalidArgument::Name`]; [`InvalidArgument::Table`] for invalid tensors; [`LimitReached::Memory`];
    /// [`LimitReached::Broker`] or [`LimitReached::User`] if the broker would refuse as much pinned memory;
    /// [`DeviceFault::NoDevice`](crate::error::DeviceFault::NoDevice),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn allocate(self) -> Result<Build> {
        check_name(&self.name)?;
        let mutable = self.commit.mutable;
        self.commit.check(&self.name, self.control.is_none())?;
        let lifetime = self.commit.lifetime(&self.name, self.control.is_none())?;
        let bad_table = |source| Error::InvalidArgument(InvalidArgument::Table { name: self.name.clone(), source });
        if let Some(source) = self.problem {
            return Err(bad_table(source));
        }
        let (chunk_bytes, max_chunks) = if mutable { (u64::MAX, 1) } else { (self.chunk_bytes, MAX_CHUNKS) };
        let Layout { table, mut chunks } = self.table.layout(chunk_bytes, max_chunks).map_err(bad_table)?;
        let table = Table::parse(TableBytes::Inline(table), &chunks).map_err(bad_table)?;
        let grows = mutable && self.control.is_none();
        let reserve = grows.then(|| {
            // A growth follows an existing chunk, so even a version without tensors needs one.
            if chunks.is_empty() {
                chunks.push(1);
            }
            self.reserve.unwrap_or_else(|| default_reservation(chunks[0]))
        });
        let kind = kind::native(self.place)?;
        self.domain.check_pinned(kind, self.place, &chunks).map_err(|e| named(e, &self.name))?;
        let later = if self.on_demand && !mutable { std::mem::take(&mut chunks) } else { Vec::new() };
        let draft = kind
            .allocate(&self.name, self.place, &chunks, reserve, self.domain.gpus()?)
            .map_err(|e| with_held(named(e, &self.name), &self.domain))?;
        Ok(Build {
            chunks: draft.chunk_bytes(),
            later: later.into(),
            draft,
            kind,
            table,
            domain: self.domain,
            name: self.name,
            place: self.place,
            commit: self.commit,
            lifetime,
            claim: self.claim,
            control: self.control,
        })
    }
}

/// Returns how many bytes are reserved for a mutable version of `bytes` bytes.
fn default_reservation(bytes: u64) -> u64 {
    bytes.saturating_mul(8).clamp(64 << 20, 256 << 30).max(bytes)
}

/// Returns a table as it is sent, with a file descriptor if the table is large.
pub(super) fn wire_table(name: &str, encoded: &[u8]) -> Result<(partywall_wire::Table, Option<OwnedFd>)> {
    if encoded.len() <= MAX_INLINE_TABLE {
        return Ok((partywall_wire::Table::Inline(encoded.to_vec()), None));
    }
    let sealed = memfd::frozen(&format!("partywall-table:{name}"), encoded);
    let sealed = sealed.map_err(|e| Error::system(format!("making the tensor table of {name:?}"), e))?;
    Ok((partywall_wire::Table::Fd { bytes: encoded.len() as u64 }, Some(sealed)))
}

/// Adds Partywall's own holdings to an out-of-memory error, because no other tool shows them.
pub(super) fn with_held(error: Error, domain: &Domain) -> Error {
    let Error::LimitReached(LimitReached::Memory { name, place, asked, free, total, .. }) = error else {
        return error;
    };
    let held = domain.status().ok().map(|status| {
        let at = partywall_wire::Place::from(place);
        let bytes = status.bytes.iter().filter(|(p, _)| *p == at).map(|(_, n)| n).sum();
        let largest = status.largest.into_iter().filter(|(_, p, _)| *p == at).map(|(name, _, n)| (name, n)).take(3);
        Box::new(Held { bytes, largest: largest.collect() })
    });
    Error::LimitReached(LimitReached::Memory { name, place, asked, free, total, held })
}

/// Memory that is being written and that no other process sees. Dropping it frees the memory.
#[must_use = "no other process sees it until commit()"]
pub struct Build {
    pub(super) draft: Box<dyn Draft>,
    kind: &'static dyn Kind,
    pub(super) table: Table<TableBytes>,
    chunks: Vec<u64>,
    /// The bytes of chunks that are not allocated yet.
    later: VecDeque<u64>,
    domain: Domain,
    pub(super) name: String,
    place: Place,
    commit: CommitOptions,
    lifetime: Lifetime,
    claim: Option<Claim>,
    control: Option<Control>,
}

impl Build {
    /// Refuses what has no room: in the broker's limits, and in host memory, which the kernel gives only as it is
    /// written. Only the commit decides, but before it all bytes are copied.
    pub(crate) fn check_room(&self) -> Result<()> {
        let bytes = self.chunks.iter().sum();
        let call = Call::CheckBytes { place: self.place.into(), bytes };
        answered!(self.domain.link().call(call)?, Answer::Done => ()).map_err(|error| named(error, &self.name))?;
        match kind::host_memory().filter(|(free, _)| self.place == Place::Host && bytes > *free) {
            Some(memory) => {
                let error = LimitReached::memory(&self.name, self.place, bytes, Some(memory));
                Err(with_held(error, &self.domain))
            }
            None => Ok(()),
        }
    }

    /// Allocates the chunk of a tensor and all chunks before it, unless they are allocated already: of a build whose
    /// chunks are allocated [on demand](Builder::on_demand). The methods that take `&mut self` do it, too.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor); as [`Builder::allocate`];
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked): the build belongs to the parent.
    pub fn allocate_for(&mut self, tensor: &str) -> Result<()> {
        if self.later.is_empty() {
            return Ok(());
        }
        let entry = find(&self.name, &self.table, tensor)?;
        let needed = if entry.bytes() == 0 { 0 } else { entry.chunk() + 1 };
        self.allocate_chunks(needed)
    }

    /// Returns whether a tensor's memory is allocated already, so that its use allocates nothing.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor).
    pub fn is_allocated(&self, tensor: &str) -> Result<bool> {
        let entry = find(&self.name, &self.table, tensor)?;
        Ok(entry.bytes() == 0 || entry.chunk() < self.chunks.len())
    }

    /// Allocates chunks until there are `count`, or all.
    pub(super) fn allocate_chunks(&mut self, count: usize) -> Result<()> {
        while self.chunks.len() < count
            && let Some(bytes) = self.later.front()
        {
            self.domain.link().require_ours()?;
            let pushed = self.draft.push(&self.name, self.place, *bytes, self.domain.gpus()?);
            pushed.map_err(|e| with_held(named(e, &self.name), &self.domain))?;
            self.later.pop_front();
            self.chunks = self.draft.chunk_bytes();
        }
        Ok(())
    }

    /// Returns a tensor's elements for writing by the CPU, as [`as_mut_bytes`](Self::as_mut_bytes) returns its bytes.
    ///
    /// # Errors
    /// As [`as_mut_bytes`](Self::as_mut_bytes); [`Mismatch::DType`].
    pub fn as_mut_slice<T: Element>(&mut self, tensor: &str) -> Result<&mut [T]> {
        let entry = find(&self.name, &self.table, tensor)?;
        if entry.dtype() != T::DTYPE {
            let wanted = T::DTYPE.name();
            return Err(Mismatch::DType { what: format!("tensor {tensor:?}"), has: entry.dtype(), wanted }.into());
        }
        let bytes = self.as_mut_bytes(tensor)?;
        elements_mut(bytes)
            .map_err(|e| InvalidArgument::range(tensor, format!("cannot use its bytes as elements: {e}")))
    }

    /// Returns a tensor's bytes for writing by the CPU. Host and pinned memory only. If a GPU was given addresses of
    /// pinned memory, first waits until all work of this process on that GPU is done, because that work may write the
    /// bytes.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor), [`Mismatch::Kind`];
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked): the build belongs to the parent.
    pub fn as_mut_bytes(&mut self, tensor: &str) -> Result<&mut [u8]> {
        self.domain.link().require_ours()?;
        self.allocate_for(tensor)?;
        let entry = find(&self.name, &self.table, tensor)?;
        if entry.bytes() == 0 {
            return Ok(&mut []);
        }
        let bytes = self.draft.host_mut(entry.chunk(), entry.offset(), entry.bytes());
        bytes.map_err(|e| named(e, &self.name))
    }

    /// Returns a tensor's range on its GPU, for the caller's kernels and copies. The caller must enqueue all of them
    /// before the commit, which waits for them.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor), [`Mismatch::Kind`]; [`InvalidArgument::Range`] for a
    /// tensor without bytes.
    pub fn device(&self, tensor: &str) -> Result<DeviceRange<'_>> {
        let entry = find(&self.name, &self.table, tensor)?;
        if entry.bytes() == 0 {
            return Err(InvalidArgument::range(tensor, "it has no bytes, and so no address"));
        }
        if !self.is_allocated(tensor)? {
            return Err(InvalidArgument::range(tensor, "its memory is not allocated yet: call allocate_for first"));
        }
        self.draft.device(entry.chunk(), entry.offset(), entry.bytes()).map_err(|e| named(e, &self.name))
    }

    /// Returns where the memory is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Returns the GPU that has the memory, or that uses pinned memory; `None` for memory that no GPU uses here.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.draft.gpu()
    }

    /// Copies `bytes` into a tensor in memory of any kind. Host-synchronous, but in pinned memory not ordered with work
    /// that was enqueued on a GPU.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor); [`InvalidArgument::Range`] if the tensor has another
    /// number of bytes; [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn write(&mut self, tensor: &str, mut bytes: &[u8]) -> Result<()> {
        self.domain.link().require_ours()?;
        self.allocate_for(tensor)?;
        let entry = find(&self.name, &self.table, tensor)?;
        if entry.bytes() != bytes.len() as u64 {
            return Err(InvalidArgument::range(
                tensor,
                format!("it has {} bytes, but {} were given", entry.bytes(), bytes.len()),
            ));
        }
        let chunk = entry.chunk();
        let mut offset = entry.offset();
        let failed = |error| named(error, &self.name);
        let uploads = self.draft.uploads();
        let mut upload = uploads.start().map_err(failed)?;
        while !bytes.is_empty() {
            let buffer = upload.buffer().map_err(failed)?;
            let len = bytes.len().min(buffer.len());
            buffer[..len].copy_from_slice(&bytes[..len]);
            upload.submit(&[Copy { start: 0, len, chunk, offset }]).map_err(failed)?;
            bytes = &bytes[len..];
            offset += len as u64;
        }
        upload.finish().map_err(failed)
    }

    /// Writes many tensors from several threads; see [`files::Plan::copy_to`].
    ///
    /// # Errors
    /// As [`Build::allocate_for`].
    pub fn uploader(&mut self) -> Result<Uploader<'_>> {
        self.allocate_chunks(usize::MAX)?;
        Ok(Uploader {
            domain: &self.domain,
            name: &self.name,
            uploads: self.draft.uploads(),
            entries: self.table.in_given_order(),
        })
    }

    /// Returns the number of bytes allocated.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }

    /// Returns the bytes of each chunk, as allocated.
    pub fn chunks(&self) -> &[u64] {
        &self.chunks
    }

    /// Makes the build the next version of its name, in one step. Unless it is mutable, it is frozen from then on.
    ///
    /// If the commit fails, the memory is freed and the name is unchanged.
    ///
    /// # Errors
    /// [`Denied::NameExists`](crate::error::Denied::NameExists) with [`if_absent`](Builder::if_absent);
    /// [`LimitReached::Broker`]; those of every call.
    pub fn commit(self) -> Result<Segment> {
        self.commit_or_keep().map_err(|failed| failed.error)
    }

    /// Commits as [`Build::commit`] does, for callers that have passed addresses to other code. Addresses from
    /// [`Build::as_mut_bytes`] and [`Build::device`] stay valid for as long as the segment lives, or the build that a
    /// failure returns. Unless the version is mutable they are read-only afterwards: a write ends the process, or on a
    /// GPU its context.
    ///
    /// # Errors
    /// As [`Build::commit`].
    pub fn commit_or_keep(mut self) -> Result<Segment, Failed<Self>> {
        match self.publish() {
            Ok(committed) => Ok(self.into_segment(committed)),
            Err(error) => Err(Failed::new(error, self)),
        }
    }

    /// Freezes the memory and commits it with the broker.
    fn publish(&mut self) -> Result<Committed> {
        // Freezing changes memory that a forked child shares with its parent.
        self.domain.link().require_ours()?;
        self.allocate_chunks(usize::MAX)?;
        let CommitOptions { mutable, if_absent, shared, owner, .. } = self.commit;
        self.draft.freeze(mutable).map_err(|e| named(e, &self.name))?;
        let mut fds = self.draft.fds();
        let fd_numbers = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let (table, table_fd) = wire_table(&self.name, self.table.as_bytes())?;
        fds.extend(table_fd.as_ref().map(AsFd::as_fd));
        let facts = VersionFacts {
            kind: self.kind.wire(),
            place: self.place.into(),
            mutable,
            reserved: self.draft.reserved(),
            lifetime: self.lifetime,
            shared,
            control: self.control,
        };
        let commit = Commit {
            name: check_name(&self.name)?,
            facts,
            chunks: self.chunks.clone(),
            handles: Vec::new(),
            table,
            tensors: self.table.len() as u64,
            owner: owner.map(MemberId),
            if_absent,
            claim: self.claim.as_ref().and_then(|claim| claim.id),
        };
        match self.domain.link().call_with(Call::Commit(commit), &fds)? {
            (Answer::Committed { version, lease }, control) => {
                Ok(Committed { version, lease, facts, fd_numbers, control })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn into_segment(self, committed: Committed) -> Segment {
        let Self { draft, kind, table, chunks, domain, name, claim, .. } = self;
        let Committed { version, lease, facts: chosen, fd_numbers, control } = committed;
        // The commit has fulfilled the claim.
        if let Some(mut claim) = claim {
            claim.id = None;
        }
        let uid = domain.uid();
        let facts = Facts { name, version, chosen, uid, writable: chosen.mutable, fd_numbers };
        let memory = draft.into_memory();
        Granted { domain, lease, kind, memory, facts, chunks, table, growths: 0, control }.into()
    }
}

/// The broker's answer to a commit.
struct Committed {
    version: u64,
    lease: LeaseId,
    /// As committed.
    facts: VersionFacts,
    /// The numbers that the sent file descriptors had in this process.
    fd_numbers: Vec<RawFd>,
    /// File descriptors of the control memory.
    control: Vec<OwnedFd>,
}

impl fmt::Debug for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Build({}: {} tensors, {} bytes on {})", self.name, self.table.len(), self.bytes(), self.place)
    }
}

/// Writes tensors of a [`Build`] from several threads.
pub struct Uploader<'a> {
    domain: &'a Domain,
    name: &'a str,
    uploads: Box<dyn Uploads + 'a>,
    entries: Vec<Entry<'a>>,
}

impl files::Sink for Uploader<'_> {
    type Lane<'a>
        = UploadLane<'a>
    where
        Self: 'a;

    fn lane(&self) -> Result<UploadLane<'_>, SinkError> {
        self.domain.link().require_ours()?;
        let upload = self.uploads.start().map_err(|error| named(error, self.name))?;
        Ok(UploadLane { name: self.name, upload, entries: &self.entries, copies: Vec::new() })
    }
}

/// One thread's share of an [`Uploader`].
pub struct UploadLane<'a> {
    name: &'a str,
    upload: Box<dyn Upload + 'a>,
    entries: &'a [Entry<'a>],
    copies: Vec<Copy>,
}

impl files::Lane for UploadLane<'_> {
    fn buffer(&mut self) -> Result<&mut [u8], SinkError> {
        Ok(self.upload.buffer().map_err(|error| named(error, self.name))?)
    }

    fn submit(&mut self, pieces: &[Piece]) -> Result<(), SinkError> {
        self.copies.clear();
        for piece in pieces {
            let entry = &self.entries[piece.tensor];
            if piece.offset.checked_add(piece.len as u64).is_none_or(|end| end > entry.bytes()) {
                let why = format!("bytes {} + {} are outside its {} bytes", piece.offset, piece.len, entry.bytes());
                return Err(InvalidArgument::range(entry.name(), why).into());
            }
            let offset = entry.offset() + piece.offset;
            self.copies.push(Copy { start: piece.start, len: piece.len, chunk: entry.chunk(), offset });
        }
        Ok(self.upload.submit(&self.copies).map_err(|error| named(error, self.name))?)
    }

    fn finish(self) -> Result<(), SinkError> {
        Ok(self.upload.finish().map_err(|error| named(error, self.name))?)
    }
}

fn find<'a>(name: &str, table: &'a Table<TableBytes>, tensor: &str) -> Result<Entry<'a>> {
    table.find(tensor).ok_or_else(|| no_such_tensor(name, tensor, table))
}
