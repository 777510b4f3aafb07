//! Information about the names, members and broker of a domain.

use std::os::fd::OwnedFd;

use partywall_os::map::SealedMap;
pub use partywall_shm::Table;
pub use partywall_wire::{
    Ages, AttachedInfo, Awaited, BlockCounts, Change, Control, ControlInfo, Doubt, Evicted, Freed, HolderInfo, Kill,
    Kind, Lifetime, MemberInfo, MemberState, NameEvent, NameInfo, Named, Notice, ObjectDetail, ObjectHolder,
    ObjectInfo, ObjectKind, Participant, Point, PublisherInfo, QueueHolder, QueueInfo, QueueShape, QueueUsage,
    SampleShape, SemaphoreInfo, StatusInfo, SubscriberInfo, TimelineInfo, TopicInfo, TopicShape, TopicUsage, Usage,
    UserInfo, VersionInfo, WaitInfo, Whom,
};

use crate::error::{Error, InvalidData, LimitReached, Result, Unreachable};

/// The result of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// The version that was the latest.
    pub version: u64,
    /// Bytes that stay allocated until their holders drop them.
    pub bytes_kept: u64,
    /// The members that hold those bytes.
    pub holders: Vec<HolderInfo>,
    /// The queues that hold those bytes.
    pub queues: Vec<QueueHolder>,
    /// The deadline of the readers, if they have [one](crate::Domain::withdraw).
    pub notice: Option<Notice>,
}

/// What a kind of memory promises to readers, in addition to what all kinds promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Promises {
    /// What keeps readers from writing to a version that is not `mutable`.
    pub read_only: Enforcement,
    /// True if it can still be opened after the process that created it has died.
    pub outlives_publisher: bool,
    /// True if readers can reach nothing but the version's own chunks.
    pub hides_neighbours: bool,
}

/// What enforces a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Enforcement {
    /// The kernel, for every process.
    Kernel,
    /// The GPU, and for pinned memory the processor, according to how each process has mapped the memory.
    Hardware,
    /// This library alone, which refuses calls.
    Convention,
}

impl Promises {
    /// Returns the promises of a kind.
    pub fn of(kind: Kind) -> Self {
        let read_only = match kind {
            Kind::Host => Enforcement::Kernel,
            Kind::Vmm | Kind::Pinned => Enforcement::Hardware,
            _ => Enforcement::Convention,
        };
        let shared_by_fd = matches!(kind, Kind::Host | Kind::Vmm | Kind::Pinned | Kind::Live);
        let hides_neighbours = shared_by_fd && kind != Kind::Live;
        Self { read_only, outlives_publisher: shared_by_fd, hides_neighbours }
    }
}

/// Everything about one version of a name.
#[derive(Debug)]
pub struct SegmentInfo {
    /// The name.
    pub name: String,
    /// The version.
    pub version: VersionInfo,
    /// Bytes of each chunk, as allocated.
    pub chunks: Vec<u64>,
    /// The tensors. For a version that may grow, the table treats all chunks as one.
    pub table: Table<TableBytes>,
    /// True if it is the latest.
    pub is_latest: bool,
    /// All versions that exist, in order.
    pub versions: Vec<VersionInfo>,
    /// The members that hold it.
    pub holders: Vec<HolderInfo>,
    /// The queues that hold it.
    pub queues: Vec<QueueHolder>,
    /// The process that builds the next version under a claim.
    pub builder: Option<u32>,
    /// How it is used, if it is a pool or topic.
    pub control: Option<ControlInfo>,
}

/// The bytes of a table, which never change.
#[derive(Debug)]
pub enum TableBytes {
    /// Bytes that arrived in a message.
    Inline(Vec<u8>),
    /// A mapped, sealed memfd.
    Sealed(SealedMap),
}

impl AsRef<[u8]> for TableBytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Inline(bytes) => bytes,
            Self::Sealed(map) => map.bytes(),
        }
    }
}

/// Returns the lengths of the chunks as a table counts them: the consecutive chunks of a version that may grow are one.
pub(crate) fn ranges(reserved: u64, chunks: &[u64]) -> Result<Vec<u64>> {
    if reserved == 0 {
        return Ok(chunks.to_vec());
    }
    let total = chunks.iter().try_fold(0_u64, |sum, bytes| sum.checked_add(*bytes));
    Ok(vec![total.ok_or_else(|| Unreachable::protocol("the chunks' lengths overflow"))?])
}

/// Reads a received table; `fd` is its memfd, if it has one.
pub(crate) fn table(
    name: &str,
    table: partywall_wire::Table,
    fd: Option<OwnedFd>,
    chunks: &[u64],
) -> Result<Table<TableBytes>> {
    let bytes = match (table, fd) {
        (partywall_wire::Table::Inline(bytes), _) => TableBytes::Inline(bytes),
        (partywall_wire::Table::Fd { .. }, Some(fd)) => TableBytes::Sealed(
            SealedMap::new(&fd).map_err(|e| Error::system(format!("mapping the tensor table of {name:?}"), e))?,
        ),
        (partywall_wire::Table::Fd { .. }, None) => {
            return Err(LimitReached::FileDescriptors(format!("the tensor table of {name:?}")).into());
        }
    };
    Table::parse(bytes, chunks)
        .map_err(|source| Error::InvalidData(InvalidData::Table { name: name.to_owned(), source }))
}

pub(crate) fn segment(info: partywall_wire::SegmentInfo, fds: Vec<OwnedFd>) -> Result<SegmentInfo> {
    let ranges = ranges(info.version.reserved, &info.chunks)?;
    let table = table(&info.name, info.table, fds.into_iter().next(), &ranges)?;
    Ok(SegmentInfo {
        name: info.name,
        version: info.version,
        chunks: info.chunks,
        table,
        is_latest: info.is_latest,
        versions: info.versions,
        holders: info.holders,
        queues: info.queues,
        builder: info.builder,
        control: info.control,
    })
}

/// Returns `NAME` or `NAME@V`, quoted.
pub(crate) fn with_version(name: &str, version: Option<u64>) -> String {
    version.map_or_else(|| format!("{name:?}"), |v| format!("\"{name}@{v}\""))
}
