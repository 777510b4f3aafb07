//! What the registry talks about.
//!
//! Plain values are those of the wire and of control memory. Messages are not: the server maps them, so that neither
//! side binds the other.

use std::{fmt, sync::Arc};

pub(crate) use partywall_shm::timeline::Ending as CellEnding;
pub(crate) use partywall_wire::{
    Access, Change, Doubt, Ending, Gap, Kind, LegacyHandle, Lifetime, Limit, MemberState, Named, NoGrowth, ObjectKind,
    Place, Whom,
};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) struct $name(pub(crate) u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

ids! {
    /// A member; never used twice by one broker.
    MemberId,
    /// A request of a member, and its ticket if it has to wait.
    RequestId,
    /// A lease on a version.
    LeaseId,
    /// The right to build a name's version.
    ClaimId,
    /// Something that was released and is being closed.
    CloseId,
    /// A file descriptor that the server keeps. The registry never sees the descriptor itself.
    FdId,
    /// A waiting request; the order of these is the order of waiting.
    WaitId,
    /// A cell of a slab, counted through all slabs.
    CellId,
}

/// Milliseconds since 1970, as the server read them.
pub(crate) type Millis = u64;

/// The name of a segment, timeline or semaphore. The caller of [`Name::new`] has checked it by the rules of the wire.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(Arc<str>);

impl Name {
    pub(crate) fn new(checked: impl Into<Arc<str>>) -> Self {
        Self(checked.into())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Its length.
    pub(crate) bytes: u64,
    /// What keeps it alive. Nothing here does so for legacy memory.
    pub(crate) fd: Option<FdId>,
}

/// A tensor table, which the registry keeps and never reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Table {
    /// A small one.
    Inline(Arc<[u8]>),
    /// A large one, in a memfd.
    Fd {
        /// Its length.
        bytes: u64,
        /// What keeps it alive.
        fd: FdId,
    },
}

impl Table {
    fn fd(&self) -> Option<FdId> {
        match self {
            Self::Inline(_) => None,
            Self::Fd { fd, .. } => Some(*fd),
        }
    }
}

/// The file descriptors of chunks, then the table's.
pub(super) fn fds(chunks: &[Chunk], table: &Table) -> Vec<FdId> {
    chunks.iter().filter_map(|chunk| chunk.fd).chain(table.fd()).collect()
}

/// What a version consists of. It never changes: a version that grows gets another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) kind: Kind,
    pub(crate) place: Place,
    pub(crate) chunks: Vec<Chunk>,
    /// One a chunk for legacy memory, else none.
    pub(crate) handles: Vec<LegacyHandle>,
    pub(crate) table: Table,
    pub(crate) tensors: u64,
    pub(crate) mutable: bool,
    /// Bytes that the chunks may have together; 0 if there will never be more of them.
    pub(crate) reserved: u64,
    pub(crate) lifetime: Lifetime,
    /// Of a pool, topic or queue.
    pub(crate) control: Option<BlockControl>,
}

impl Memory {
    /// Its file descriptors: the chunks', the table's, then those of its control memory.
    pub(crate) fn fds(&self) -> Vec<FdId> {
        self.fds_from(0)
    }

    /// As [`Memory::fds`], without the first `chunks` chunks.
    pub(crate) fn fds_from(&self, chunks: usize) -> Vec<FdId> {
        let mut fds = fds(self.chunks.get(chunks..).unwrap_or_default(), &self.table);
        fds.extend(self.control.iter().flat_map(BlockControl::created).map(|created| created.fd));
        fds
    }

    /// The table's file descriptor, if it has one.
    pub(crate) fn table_fd(&self) -> Option<FdId> {
        self.table.fd()
    }

    /// Returns what a name with this memory is a name of.
    pub(crate) fn named(&self) -> Named {
        match self.control {
            None => Named::Segment,
            Some(control) => Named::of(Some(&control.shape)),
        }
    }

    /// Bytes of the chunks. Lengths are numbers that a peer wrote: their sum saturates and then exceeds every limit.
    pub(crate) fn bytes(&self) -> u64 {
        self.chunks.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.bytes))
    }

    /// Bytes of the chunks that are kept by this broker.
    pub(crate) fn held_bytes(&self) -> u64 {
        if self.kind == Kind::Legacy { 0 } else { self.bytes() }
    }

    /// Bytes of main memory that it takes besides the chunks: for a table outside the message, and for control memory.
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

/// What makes a version a pool, topic or queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockControl {
    /// As its members have agreed on it.
    pub(crate) shape: partywall_wire::Control,
    pub(crate) pool: ControlMemory,
    /// The pool of a queue's outputs.
    pub(crate) outputs: Option<ControlMemory>,
    /// Of a topic or queue.
    pub(crate) object: Option<ControlMemory>,
}

impl BlockControl {
    /// Returns its memory: the pools', then the topic's or queue's.
    pub(crate) fn created(&self) -> impl Iterator<Item = ControlMemory> {
        std::iter::once(self.pool).chain(self.outputs).chain(self.object)
    }

    /// Returns the memory with the slot table: the topic's or queue's, if it is one.
    pub(crate) fn slot_table(&self) -> FdId {
        self.object.unwrap_or(self.pool).fd
    }
}

/// Control memory that the server has created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ControlMemory {
    pub(crate) fd: FdId,
    pub(crate) bytes: u64,
}

/// Where the server finds a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CellAt {
    pub(crate) slab: FdId,
    pub(crate) index: u32,
}

/// What the registry refuses to exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Members, without those in quarantine.
    pub(crate) members: u64,
    /// Rows, of members and of those in quarantine.
    pub(crate) rows: u64,
    /// Bytes of all versions together.
    pub(crate) bytes: u64,
    /// Names.
    pub(crate) names: u64,
    /// File descriptors of all versions and of control memory together.
    pub(crate) fds: u64,
    /// Waiting requests of one member.
    pub(crate) waits: u64,
    /// Bytes of events that are kept for watchers.
    pub(crate) log: u64,
    /// Leases of one member.
    pub(crate) leases: u64,
    /// Chunks of one version.
    pub(crate) chunks: u64,
    /// Growths of one version.
    pub(crate) growths: u64,
    /// Timelines.
    pub(crate) timelines: u64,
    /// Slabs.
    pub(crate) slabs: u64,
    /// Cells of one slab.
    pub(crate) cells: u64,
    /// Cells that rest before the first of them is used again, unless no other is left.
    pub(crate) rest: u64,
    /// Semaphores.
    pub(crate) semaphores: u64,
}
