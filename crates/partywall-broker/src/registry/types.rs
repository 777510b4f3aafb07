//! The values of the registry: ids, memory, bounds. Ids and names that members know are those of the wire.

use std::{fmt, sync::Arc};

use partywall_wire as wire;
use serde::{Deserialize, Serialize};

pub(crate) use partywall_wire::{
    Access, Awaited, Change, ClaimId, Deadline, Doubt, Ending, Gap, Handle, Kind, LeaseId, LegacyHandle, Lifetime,
    Limit, MemberId, MemberState, Name, Named, NoGrowth, Notice, ObjectKind, OtherUsers, Place, Quota, Refusal,
    RequestId, Staleness, Then, TimelineEnding, UserInfo, VersionFacts, Whom,
};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub(crate) struct $name(pub(crate) u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

ids! {
    /// A withdrawal with a deadline.
    WithdrawalId,
    /// Something that was released and is being closed.
    CloseId,
    /// A file descriptor that the server keeps. The registry never sees the descriptor itself.
    FdId,
    /// A waiting request. Ids follow the order of arrival.
    WaitId,
    /// A cell, numbered across all slabs.
    CellId,
}

/// Milliseconds since 1970, by the server's clock.
pub(crate) type Millis = u64;

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Chunk {
    /// Its length.
    pub(crate) bytes: u64,
    /// The descriptor that keeps it alive. Legacy memory has none: its publisher keeps it.
    pub(crate) fd: Option<FdId>,
}

/// A tensor table, which the registry keeps and never reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Table {
    /// A small table.
    Inline(#[serde(with = "super::coding::bytes")] Arc<[u8]>),
    /// A large table, in a memfd.
    Fd {
        /// Its length.
        bytes: u64,
        /// The descriptor that keeps it alive.
        fd: FdId,
    },
}

impl Table {
    /// Returns the table as a message has it. Its descriptor, if it has one, goes beside.
    pub(crate) fn sent(&self) -> wire::Table {
        match self {
            Self::Inline(bytes) => wire::Table::Inline(bytes.to_vec()),
            Self::Fd { bytes, .. } => wire::Table::Fd { bytes: *bytes },
        }
    }

    fn fd(&self) -> Option<FdId> {
        match self {
            Self::Inline(_) => None,
            Self::Fd { fd, .. } => Some(*fd),
        }
    }
}

/// Joins what a message says of chunks and of their table with the descriptors that came with it.
pub(super) fn joined(
    kind: Kind,
    chunks: &[u64],
    table: &wire::Table,
    fds: &[FdId],
) -> Result<(Vec<Chunk>, Table), Refusal> {
    let missing = || Refusal::invalid("the file descriptors do not belong to the message");
    let mut fds = fds.iter().copied();
    let chunk = |bytes: &u64| match kind {
        Kind::Legacy => Ok(Chunk { bytes: *bytes, fd: None }),
        _ => Ok(Chunk { bytes: *bytes, fd: Some(fds.next().ok_or_else(missing)?) }),
    };
    let chunks = chunks.iter().map(chunk).collect::<Result<_, Refusal>>()?;
    let table = match table {
        wire::Table::Inline(bytes) => Table::Inline(bytes.as_slice().into()),
        wire::Table::Fd { bytes } => Table::Fd { bytes: *bytes, fd: fds.next().ok_or_else(missing)? },
    };
    if fds.next().is_none() { Ok((chunks, table)) } else { Err(missing()) }
}

/// Returns the file descriptors of chunks, then the table's.
pub(super) fn fds(chunks: &[Chunk], table: &Table) -> Vec<FdId> {
    chunks.iter().filter_map(|chunk| chunk.fd).chain(table.fd()).collect()
}

/// The memory of a version. Immutable: growth replaces it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) facts: VersionFacts,
    pub(crate) chunks: Vec<Chunk>,
    /// One per chunk for legacy memory, otherwise none.
    pub(crate) handles: Vec<LegacyHandle>,
    pub(crate) table: Table,
    pub(crate) tensors: u64,
    /// Present for a pool, topic or queue, whose shape is one of the facts.
    pub(crate) control: Option<BlockControl>,
}

impl Memory {
    /// Returns the memory of a commit.
    pub(super) fn of(commit: &wire::Commit, fds: &[FdId], control: Option<BlockControl>) -> Result<Self, Refusal> {
        let (chunks, table) = joined(commit.facts.kind, &commit.chunks, &commit.table, fds)?;
        Ok(Self {
            facts: commit.facts,
            chunks,
            handles: commit.handles.clone(),
            table,
            tensors: commit.tensors,
            control,
        })
    }

    /// Returns the file descriptors: the chunks', the table's, then those of its control memory.
    pub(crate) fn fds(&self) -> Vec<FdId> {
        self.fds_from(0)
    }

    /// Returns the file descriptors as [`Memory::fds`] does, without the first `chunks` chunks.
    pub(crate) fn fds_from(&self, chunks: usize) -> Vec<FdId> {
        let mut fds = fds(self.chunks.get(chunks..).unwrap_or_default(), &self.table);
        fds.extend(self.control.iter().flat_map(BlockControl::created).map(|created| created.fd));
        fds
    }

    /// Returns the lengths of the chunks.
    pub(crate) fn chunk_bytes(&self) -> wire::ChunkBytes {
        self.chunks.iter().map(|chunk| chunk.bytes).collect()
    }

    /// Returns the table's file descriptor, if it has one.
    pub(crate) fn table_fd(&self) -> Option<FdId> {
        self.table.fd()
    }

    /// Returns the bytes of the chunks. A peer wrote their lengths, so the sum saturates, and then exceeds every limit.
    pub(crate) fn bytes(&self) -> u64 {
        self.chunks.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.bytes))
    }

    /// Returns the bytes of the chunks that this broker keeps alive.
    pub(crate) fn held_bytes(&self) -> u64 {
        if self.facts.kind == Kind::Legacy { 0 } else { self.bytes() }
    }

    /// Returns the bytes of main memory besides the chunks: a table in a memfd, and control memory.
    pub(crate) fn other_bytes(&self) -> u64 {
        let table = match self.table {
            Table::Inline(_) => 0,
            Table::Fd { bytes, .. } => bytes,
        };
        self.control
            .iter()
            .flat_map(BlockControl::created)
            .fold(table, |sum, created| sum.saturating_add(created.bytes))
    }
}

/// The control memory of a pool, topic or queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockControl {
    pub(crate) pool: ControlMemory,
    /// The pool of a queue's output blocks.
    pub(crate) outputs: Option<ControlMemory>,
    /// The memory of the topic or queue itself.
    pub(crate) object: Option<ControlMemory>,
}

impl BlockControl {
    /// Returns all pieces of control memory: the pools', then the topic's or queue's.
    pub(crate) fn created(&self) -> impl Iterator<Item = ControlMemory> {
        std::iter::once(self.pool).chain(self.outputs).chain(self.object)
    }

    /// Returns the memory with the slot table: that of the topic or queue, or else of the pool.
    pub(crate) fn slot_table(&self) -> FdId {
        self.object.unwrap_or(self.pool).fd
    }
}

/// Control memory that the server has created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ControlMemory {
    pub(crate) fd: FdId,
    pub(crate) bytes: u64,
}

/// The location of a cell, for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CellAt {
    pub(crate) slab: FdId,
    pub(crate) index: u32,
}

/// The limits that the registry enforces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bounds {
    /// The broker's user.
    pub(crate) user: u32,
    /// The limits on that user.
    pub(crate) own: Quota,
    /// The limits on every other user.
    pub(crate) guests: Quota,
    /// Members, without those in quarantine.
    pub(crate) members: u64,
    /// Rows, including those of members in quarantine.
    pub(crate) rows: u64,
    /// Bytes of all versions together.
    pub(crate) bytes: u64,
    /// Bytes of pinned memory on each NUMA node.
    pub(crate) pinned: u64,
    /// Names.
    pub(crate) names: u64,
    /// File descriptors of all versions and of control memory together.
    pub(crate) fds: u64,
    /// Waiting requests of all members together.
    pub(crate) waits: u64,
    /// Waiting requests of one member.
    pub(crate) member_waits: u64,
    /// Bytes of events that are kept for watchers.
    pub(crate) log: u64,
    /// Leases of all members together.
    pub(crate) leases: u64,
    /// Leases of one member.
    pub(crate) member_leases: u64,
    /// Chunks of one version.
    pub(crate) chunks: u64,
    /// Growths of one version.
    pub(crate) growths: u64,
    /// Timelines.
    pub(crate) timelines: u64,
    /// Slabs of one user's own timelines.
    pub(crate) slabs: u64,
    /// Cells of one slab.
    pub(crate) cells: u64,
    /// Number of resting cells before the first of them is reused, unless no other cell is left.
    pub(crate) rest: u64,
    /// Semaphores.
    pub(crate) semaphores: u64,
    /// Segments attached to one queue; at most [`MAX_ATTACHMENTS`](partywall_shm::queue::MAX_ATTACHMENTS).
    pub(crate) attachments: u32,
}

/// Refuses a request that would exceed a bound.
pub(crate) fn limit(limit: Limit, allowed: u64, needed: u64) -> Result<(), Refusal> {
    if needed > allowed { Err(Refusal::Limit { limit, allowed, needed, holders: Vec::new() }) } else { Ok(()) }
}

pub(crate) const STALE_LEASE: Refusal = Refusal::Stale { what: Handle::Lease };
pub(crate) const STALE_CLAIM: Refusal = Refusal::Stale { what: Handle::Claim };
pub(crate) const STALE_TICKET: Refusal = Refusal::Stale { what: Handle::Ticket };
