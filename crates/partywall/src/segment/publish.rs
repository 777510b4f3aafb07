//! Publishing memory that other code allocated.

use std::{os::fd::AsFd, sync::Arc};

use partywall_cuda::{DeviceSlice, DeviceUuid, ForeignMemory, PointerKind};
use partywall_shm::{DType, Table, TableBuilder, TableError};
use partywall_wire::{Answer, Call, Commit, Control, Kind as WireKind, VersionFacts, limits::MAX_CHUNKS};

use super::{CommitOptions, Facts, Granted, Segment, build::wire_table, commit_setters, named};
use crate::{
    domain::{Domain, check_name, unexpected},
    error::{Denied, DeviceFault, Error, InvalidArgument, Result},
    gpu::{Gpu, access_error, cuda_error},
    heap::{HeapBlock, block_at},
    info::TableBytes,
    kind::{by_wire, legacy, live},
    place::Place,
};

impl Domain {
    /// Begins the next version of `name` from tensors in GPU memory that other code has allocated. See [`Publication`].
    ///
    /// ```no_run
    /// # use partywall::{DType, Domain, Result, Segment, cuda::ForeignMemory};
    /// # fn publish(domain: &Domain, memory: &ForeignMemory) -> Result<Segment> {
    /// // The name ends with the returned segment; `commit_copy` publishes a copy that may outlive this process.
    /// domain.publish("activations").tensor("x", DType::F32, &[1024], memory).commit()
    /// # }
    /// ```
    pub fn publish(&self, name: &str) -> Publication {
        Publication::new(self.clone(), name)
    }
}

/// Publishes tensors that are already on a GPU, in memory that other code allocated (torch's caching allocator, cupy,
/// `cuMemAlloc`).
///
/// [`Publication::commit`] publishes the memory itself. It copies nothing, and promises less than a segment that was
/// built ([`Segment::promises`]):
///
/// * The memory is not frozen: readers see later writes of the publisher.
/// * A reader maps whole allocations with everything else in them: other tensors of torch, and the neighbours of a
///   small allocation in its 2 MiB.
///
/// Tensors in blocks of a [`Heap`](crate::Heap) become a version of kind `live`, which may be [kept](Self::kept). It
/// outlives its publisher, and readers map it read-only. The publisher keeps the tensors' owners until the last lease
/// on the version has ended, so that their memory is not used for other tensors while it is read.
///
/// Other tensors become a version of kind `legacy`, which promises still less:
///
/// * The hardware does not stop readers from writing.
/// * The memory ends with its publisher. Readers that have it open keep it. A new open returns
///   [`Gone::Withdrawn`](crate::error::Gone::Withdrawn) once the publisher's segment is dropped, and
///   [`Gone::OwnerDied`](crate::error::Gone::OwnerDied) once the publisher is proved dead.
///
/// [`Publication::commit_copy`] copies once on the GPU, into a segment of kind `vmm`, which has none of these limits.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::{sync::Arc, time::Duration};
/// use partywall::{DType, Domain, cuda::{DeviceBuffer, ForeignMemory}};
///
/// let domain = Domain::connect()?;
/// let gpu = domain.gpu(partywall::gpu::devices()?[0].uuid()?)?;
/// // Memory of another library: `unsafe { ForeignMemory::new(context, address, owner) }`.
/// let memory = ForeignMemory::try_from(Arc::new(DeviceBuffer::new(gpu.context(), 4096)?))?;
/// let published = domain.publish("activations").tensor("x", DType::F32, &[1024], &memory).commit()?;
///
/// // In any process, also in this one:
/// let opened = domain.open("activations", Duration::ZERO)?;
/// println!("{} at {:#x}", opened.kind(), opened.tensor("x")?.device()?.device_ptr());
/// drop(published); // no process can open it from now on, and the memory may be freed
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is published until commit() or commit_copy()"]
pub struct Publication {
    domain: Domain,
    name: String,
    table: TableBuilder,
    /// Where each tensor of the table is.
    memory: Vec<ForeignMemory>,
    problem: Option<TableError>,
    commit: CommitOptions,
    control: Option<Control>,
}

impl Publication {
    pub(crate) fn new(domain: Domain, name: &str) -> Self {
        Self {
            domain,
            name: name.to_owned(),
            table: TableBuilder::new(),
            memory: Vec::new(),
            problem: None,
            commit: CommitOptions::default(),
            control: None,
        }
    }

    /// Adds a tensor that begins at `memory`'s address, its elements without gaps, last dimension fastest. The
    /// commit returns errors about the tensor.
    pub fn tensor(mut self, name: &str, dtype: DType, shape: &[u64], memory: &ForeignMemory) -> Self {
        let added = self.table.add(name, dtype, shape);
        self.add(added, memory)
    }

    /// Adds a tensor with these strides, in elements.
    pub fn tensor_strided(
        mut self,
        name: &str,
        dtype: DType,
        shape: &[u64],
        strides: &[u64],
        memory: &ForeignMemory,
    ) -> Self {
        let added = self.table.add_strided(name, dtype, shape, strides);
        self.add(added, memory)
    }

    fn add(mut self, added: Result<(), TableError>, memory: &ForeignMemory) -> Self {
        match added {
            Ok(()) => self.memory.push(memory.clone()),
            Err(problem) => self.problem = self.problem.or(Some(problem)),
        }
        self
    }

    /// Adds a pair of metadata.
    pub fn metadata(mut self, key: &str, value: &str) -> Self {
        let set = self.table.set_metadata(key, value);
        self.problem = self.problem.or(set.err());
        self
    }

    commit_setters!();

    /// Makes the version a pool or topic whose blocks are its first tensor.
    pub(crate) fn control(mut self, control: Control) -> Self {
        self.control = Some(control);
        self.mutable(true)
    }

    /// Makes the memory itself the next version of its name. The returned segment keeps the memory's owners alive. If
    /// this process opens a version of kind `legacy`, that segment has the same addresses and keeps the owners alive,
    /// too.
    ///
    /// After a segment of kind `live` was dropped, this process keeps the owners, and with them the connection, until
    /// the last lease on the version has ended. One thread of the connection waits for the ends of all such versions.
    ///
    /// Host-synchronous: waits for all work of this process on that GPU, so that readers see its results.
    ///
    /// # Errors
    /// - [`DeviceFault::NotShareable`] for memory for which the driver makes no handles, and that is in no heap;
    ///   [`Denied::Keeping`] for memory that is in no heap;
    /// - [`InvalidArgument::Table`] for invalid tensors, or tensors that reach beyond their allocations or lie in more
    ///   than 128 allocations;
    /// - [`InvalidArgument::Range`] for tensors on several GPUs, or some in a heap and others not;
    /// - as [`Build::commit`](crate::Build::commit).
    pub fn commit(self) -> Result<Segment> {
        let uuid = self.check()?;
        let blocks = self.blocks()?;
        if blocks.is_none() && self.commit.kept {
            return Err(Denied::Keeping { name: self.name }.into());
        }
        let Self { domain, name, table, memory, commit, control, .. } = self;
        let CommitOptions { mutable, if_absent, shared, .. } = commit;
        commit.check(&name, control.is_none())?;
        // The blocks of a pool in published memory end with their publisher, too.
        let lifetime = commit.lifetime(&name, true)?;
        let bad_table = |source| Error::InvalidArgument(InvalidArgument::Table { name: name.clone(), source });
        let ranges: Vec<_> = match &blocks {
            Some(blocks) => blocks.iter().map(|block| block.chunk_range()).collect(),
            None => memory.iter().map(|memory| (memory.info().base, memory.info().bytes)).collect(),
        };
        let mut bases = Vec::new();
        let mut chunks = Vec::new();
        let mut allocations: Vec<Vec<ForeignMemory>> = Vec::new();
        let mut places = Vec::new();
        for (memory, (base, bytes)) in memory.into_iter().zip(ranges) {
            let found = bases.iter().position(|known| *known == base);
            let chunk = found.unwrap_or_else(|| {
                bases.push(base);
                chunks.push(bytes);
                allocations.push(Vec::new());
                bases.len() - 1
            });
            places.push((chunk as u32, memory.info().address - base));
            allocations[chunk].push(memory);
        }
        if allocations.len() > MAX_CHUNKS {
            let found = allocations.len() as u64;
            let limit = MAX_CHUNKS as u64;
            return Err(bad_table(TableError::Limit { what: "allocations", found, limit }));
        }
        let table = Table::parse(TableBytes::Inline(table.placed(&places, &chunks)), &chunks).map_err(bad_table)?;

        let gpu = domain.gpu(uuid)?;
        finish_work(&gpu, &name)?;
        let (kind, handles, mut fds, memory) = match blocks {
            Some(blocks) => {
                let tensors = allocations.into_iter().flatten().collect();
                let (fds, memory) =
                    live::publish(tensors, blocks, gpu, mutable).map_err(|error| named(error, &name))?;
                (WireKind::Live, Vec::new(), fds, memory)
            }
            None => {
                let (handles, memory) =
                    legacy::publish(allocations, gpu, mutable).map_err(|error| named(error, &name))?;
                (WireKind::Legacy, handles, Vec::new(), memory)
            }
        };
        let (wire_table, table_fd) = wire_table(&name, table.as_bytes())?;
        fds.extend(table_fd);
        let place = Place::Gpu(uuid).into();
        let chosen = VersionFacts { kind, place, mutable, reserved: 0, lifetime, shared, control };
        let commit = Commit {
            name: check_name(&name)?,
            facts: chosen,
            chunks: chunks.clone(),
            handles,
            table: wire_table,
            tensors: table.len() as u64,
            owner: None,
            if_absent,
            claim: None,
        };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        match domain.link().call_with(Call::Commit(commit), &fds)? {
            (Answer::Committed { version, lease }, control) => {
                let uid = domain.uid();
                let facts = Facts { name, version, chosen, uid, writable: mutable, fd_numbers: Vec::new() };
                let kind = by_wire(kind)?;
                Ok(Granted { domain, lease, kind, memory, facts, chunks, table, growths: 0, control }.into())
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Copies the tensors into a segment of kind `vmm` and makes it the next version of the name. Readers can reach
    /// nothing but the tensors, and the segment does not depend on this process. Any memory on a GPU can be copied.
    ///
    /// Host-synchronous: waits for all work of this process on that GPU, then for the copies.
    ///
    /// # Errors
    /// - [`DeviceFault::NotShareable`] for host memory and addresses that the driver does not know;
    /// - [`InvalidArgument::Range`] for tensors that reach beyond their memory or are on several GPUs;
    /// - as [`Builder::allocate`](crate::Builder::allocate) and [`Build::commit`](crate::Build::commit).
    pub fn commit_copy(self) -> Result<Segment> {
        let uuid = self.check()?;
        let gpu = self.domain.gpu(uuid)?;
        let names: Vec<_> = self.table.names().map(str::to_owned).collect();
        let in_tensor = |name: &str, error| match access_error("copying a tensor")(error) {
            Error::InvalidArgument(InvalidArgument::Range { why, .. }) => InvalidArgument::range(name, why),
            error => error,
        };
        let mut sources = Vec::new();
        for ((name, memory), bytes) in names.iter().zip(&self.memory).zip(self.table.tensor_bytes()) {
            sources.push(memory.pieces(bytes).map_err(|error| in_tensor(name, error))?);
        }
        let builder = self.domain.create(&self.name, Place::Gpu(uuid)).table(self.table);
        let build = builder.commit_options(self.commit).allocate()?;
        finish_work(&gpu, &self.name)?;
        let enqueue = |name: &str, pieces: Vec<DeviceSlice<'_>>| {
            let target = build.device(name)?.as_slice();
            let mut offset = 0;
            for piece in pieces {
                let copied = target.slice(offset, piece.len()).and_then(|part| gpu.stream().enqueue_copy(part, piece));
                copied.map_err(|error| in_tensor(name, error))?;
                offset += piece.len();
            }
            Ok(())
        };
        let mut tensors = names.iter().zip(sources).filter(|(_, pieces)| !pieces.is_empty());
        let enqueued = tensors.try_for_each(|(name, pieces)| enqueue(name, pieces));
        // Waits even if only some copies were enqueued, because the memory may be freed when this returns.
        let copied = gpu.stream().synchronize().map_err(cuda_error("copying the tensors"));
        enqueued.and(copied).map_err(|error| named(error, &self.name))?;
        build.commit()
    }

    /// Checks what both commits need, and returns the GPU that all tensors are on.
    fn check(&self) -> Result<DeviceUuid> {
        check_name(&self.name)?;
        if let Some(source) = self.problem.clone() {
            return Err(InvalidArgument::Table { name: self.name.clone(), source }.into());
        }
        let mut common = None;
        for (index, memory) in self.memory.iter().enumerate() {
            let on_a_gpu =
                !matches!(memory.info().kind, PointerKind::Pinned | PointerKind::Registered | PointerKind::Unknown);
            let Some(device) = memory.info().device.filter(|_| on_a_gpu) else {
                return Err(self.not_shareable(index));
            };
            let uuid = device.uuid().map_err(cuda_error("asking for a GPU's UUID"))?;
            if *common.get_or_insert(uuid) != uuid {
                let why = format!(
                    "it is on GPU {uuid}, others are not; publish the tensors of each GPU under their own name"
                );
                return Err(InvalidArgument::range(self.tensor_name(index), why));
            }
        }
        common.ok_or_else(|| InvalidArgument::range(&self.name, "it has no tensor, and so no GPU"))
    }

    /// Returns the blocks of heaps that contain the tensors; `None` if no tensor is in a heap, and the driver makes
    /// handles of all their memory.
    fn blocks(&self) -> Result<Option<Vec<Arc<HeapBlock>>>> {
        let blocks: Vec<_> = self.memory.iter().map(|memory| block_at(memory.info().address)).collect();
        if blocks.iter().all(Option::is_none) {
            let refused = self.memory.iter().position(|memory| !memory.info().legacy_ipc);
            return refused.map_or(Ok(None), |index| Err(self.not_shareable(index)));
        }
        let elsewhere = |index| {
            let why = "it is in no heap (in Python: in no pool of torch_pool or cupy_pool), others are; publish the \
                       tensors outside under a name of their own, or allocate them there";
            InvalidArgument::range(self.tensor_name(index), why)
        };
        let found = blocks.into_iter().enumerate().map(|(index, block)| block.ok_or_else(|| elsewhere(index)));
        found.collect::<Result<_>>().map(Some)
    }

    fn not_shareable(&self, index: usize) -> Error {
        let info = self.memory[index].info();
        Error::DeviceFault(DeviceFault::NotShareable {
            tensor: self.tensor_name(index),
            address: info.address,
            kind: info.kind,
        })
    }

    fn tensor_name(&self, index: usize) -> String {
        self.table.names().nth(index).unwrap_or_default().to_owned()
    }
}

/// Waits for the work that the publisher has enqueued, so that readers see its results.
fn finish_work(gpu: &Gpu, name: &str) -> Result<()> {
    gpu.context().synchronize().map_err(cuda_error(format!("finishing the publisher's work on {name:?}")))
}
