//! Growing: the committer of a mutable version adds memory at its end, and other processes map it with a refresh.
//!
//! Existing tensors keep their names, places and addresses in every process, and stay usable during a growth. A process
//! that opens the version reserves as many addresses as the version declares, by default eight times its first length.
//! It maps the first chunks, and later ones behind them: memfds replace `PROT_NONE` pages, and on a GPU one
//! `cuMemAddressReserve` holds all allocations. The tensor table sees the chunks as one, so a tensor may span
//! allocations. A process without room for the reservation maps the version at its present length.
//!
//! The committer grows in these steps ([`Growth::commit`]):
//!
//! 1. It lays out its table again with more at the end, which leaves every existing place unchanged.
//! 2. It allocates what is missing as one chunk and maps it behind its own mapping, not yet published.
//! 3. It sends descriptor and table in one message. The registry replaces the version's memory in one step, refuses a
//!    grower that missed an earlier growth, and wakes the waiters.
//! 4. The reply publishes the grower's own mapping, so nothing can fail after the commit.
//!
//! A reader asks ([`Segment::refresh`]), checks that the new table continues the old one, and maps the rest. The
//! lengths of a segment are a list of [stages](Stage) that only gets longer, so tensors borrowed from an earlier stage
//! stay valid without a lock. Only the committer grows: two growers would each lay out a table without the other's
//! tensors.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{MutexGuard, OnceLock},
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::{DType, Layout, Table, TableBuilder, TableError};
use partywall_wire::{Answer, Call, Grow, Grown, NoGrowth};

use super::{
    Segment,
    build::{wire_table, with_held},
};
use crate::{
    domain::unexpected,
    error::{Denied, Error, InvalidArgument, InvalidData, LimitReached, Result},
    info::{self, TableBytes},
    wait::Wait,
};

/// The chunks and tensors of a version at one length, with a link to the next stage that this process knows.
///
/// Stages are never freed before the segment, so that borrows of old stages stay valid. A broker allows 1,024 growths.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) chunks: Vec<u64>,
    pub(super) table: Table<TableBytes>,
    pub(super) growths: u64,
    next: OnceLock<Box<Stage>>,
}

impl Stage {
    pub(super) fn new(chunks: Vec<u64>, table: Table<TableBytes>, growths: u64) -> Self {
        Self { chunks, table, growths, next: OnceLock::new() }
    }

    /// Returns the present stage.
    pub(super) fn last(&self) -> &Self {
        self.at(u64::MAX)
    }

    /// Returns the stage after `growths` growths, or the present one if this process knows fewer.
    pub(super) fn at(&self, growths: u64) -> &Self {
        let mut stage = self;
        while let Some(next) = stage.next.get().filter(|next| next.growths <= growths) {
            stage = next;
        }
        stage
    }

    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }

    /// Adds the next stage. Only called under the segment's lock.
    fn follow(&self, chunks: &[u64], table: Table<TableBytes>, growths: u64) {
        let chunks = [&self.chunks, chunks].concat();
        let followed = self.next.set(Box::new(Self::new(chunks, table, growths)));
        debug_assert!(followed.is_ok(), "a stage gets one successor, under the segment's lock");
    }
}

/// The outcome of [`Segment::refresh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the segment may still have its old length in this process"]
pub enum Refreshed {
    /// The version has not grown.
    Unchanged,
    /// The version has grown, and all of it is mapped now.
    Grown,
    /// The version has grown beyond the addresses that this process has reserved, so it keeps its old length here. Open
    /// it again to map all of it.
    DoesNotFit {
        /// The version's length in bytes.
        bytes: u64,
        /// Bytes that are reserved in this process.
        reserved: u64,
    },
}

/// A growth that has not been committed; see [`Segment::grow`].
#[derive(Debug)]
#[must_use = "nothing grows until commit()"]
pub struct Growth<'a> {
    segment: &'a Segment,
    longer: Option<(String, u64)>,
    tensors: Vec<(String, DType, Vec<u64>)>,
    spare: u64,
}

impl Growth<'_> {
    /// Gives the last tensor, which must be `tensor`, a first axis of `length`. Its elements keep their places.
    pub fn extend(mut self, tensor: &str, length: u64) -> Self {
        self.longer = Some((tensor.to_owned(), length));
        self
    }

    /// Adds a tensor after the others; see [`Builder::tensor`](crate::Builder::tensor).
    pub fn tensor(mut self, name: &str, dtype: DType, shape: &[u64]) -> Self {
        self.tensors.push((name.to_owned(), dtype, shape.to_vec()));
        self
    }

    /// Leaves this many bytes free after the tensors, for later growths. A growth that fits into them only changes the
    /// table: it allocates no memory, and no process has to map more.
    pub fn spare(mut self, bytes: u64) -> Self {
        self.spare = bytes;
        self
    }

    /// Allocates the missing memory in one chunk and makes the version longer, in one step. The version keeps its
    /// number. Processes that open it afterwards get the new length; a process that has it open keeps the old length
    /// until it refreshes. New memory reads as zero. Processes order their writes themselves, as in all mutable memory.
    ///
    /// If the process is killed before the step, the version keeps the old length; after it, the version has the new
    /// one.
    ///
    /// # Errors
    /// [`Denied::Growth`] for a version that is frozen, was committed by another process, or has grown since this
    /// process last refreshed it; [`InvalidArgument::Table`] for invalid tensors; [`LimitReached::Memory`];
    /// [`LimitReached::Broker`] for a limit of the broker, 128 chunks or 1,024 growths of one version;
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda); those of every call. The segment is then unchanged. Only
    /// if the broker's answer was lost may it have grown; [`Segment::refresh`] then finds the new length.
    pub fn commit(self) -> Result<()> {
        let Self { segment, longer, tensors, spare } = self;
        let Some(lease) = segment.lease else { return Ok(()) };
        let _turn = segment.turn()?;
        segment.check()?;
        let facts = &segment.facts;
        let place = segment.place();
        let stage = segment.stage();
        if facts.chosen.reserved == 0 {
            return Err(segment.cannot_grow(NoGrowth::Fixed));
        }
        let bad_table = |source| Error::InvalidArgument(InvalidArgument::Table { name: facts.name.clone(), source });
        let (table, used) = longer_table(&stage.table, longer, &tensors).map_err(bad_table)?;
        let missing = used.saturating_add(spare).saturating_sub(stage.bytes());
        let reserved = segment.memory().reserved();
        let needed = stage.bytes().saturating_add(missing);
        if needed > reserved {
            return Err(segment.cannot_grow(NoGrowth::Reserved { reserved, needed }));
        }
        let gpus = segment.domain.gpus()?;
        segment.domain.check_pinned(segment.kind, place, &[missing]).map_err(|e| segment.named(e))?;
        let chunk = (missing > 0).then(|| segment.kind.chunk(&facts.name, place, missing, gpus));
        let chunk = chunk.transpose().map_err(|e| with_held(segment.named(e), &segment.domain))?;
        let (chunks, fds): (Vec<u64>, Vec<OwnedFd>) = chunk.into_iter().unzip();
        let ranges = info::ranges(facts.chosen.reserved, &[&stage.chunks[..], &chunks].concat())?;
        let table = Table::parse(TableBytes::Inline(table), &ranges).map_err(bad_table)?;

        // Mapped before the broker is asked, so that nothing can fail after the broker has committed the growth.
        let chunk: Vec<_> = chunks.iter().copied().zip(fds).collect();
        let extension = segment.memory().extend(&chunk).map_err(|e| segment.named(e))?;
        let (wire_table, table_fd) = wire_table(&facts.name, table.as_bytes())?;
        let grow = Grow {
            lease,
            growths: stage.growths,
            kind: segment.kind.wire(),
            chunks: chunks.clone(),
            table: wire_table,
            tensors: table.len() as u64,
        };
        let fds: Vec<_> = chunk.iter().map(|(_, fd)| fd.as_fd()).chain(table_fd.iter().map(AsFd::as_fd)).collect();
        match segment.domain.link().call_with(Call::Grow(grow), &fds)?.0 {
            Answer::Done => {
                extension.publish();
                stage.follow(&chunks, table, stage.growths + 1);
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// Returns the table of the existing tensors, the last of them longer if asked, and of `tensors`; and the bytes they
/// use.
fn longer_table(
    before: &Table<TableBytes>,
    longer: Option<(String, u64)>,
    tensors: &[(String, DType, Vec<u64>)],
) -> Result<(Vec<u8>, u64), TableError> {
    let mut builder = TableBuilder::from_table(before);
    if let Some((tensor, length)) = longer {
        builder.extend_last(&tensor, length)?;
    }
    for (name, dtype, shape) in tensors {
        builder.add(name, *dtype, shape)?;
    }
    let Layout { table, chunks } = builder.layout(u64::MAX, 1)?;
    Ok((table, chunks.iter().sum()))
}

impl Segment {
    /// Begins to grow a mutable version that this segment has committed. Existing bytes stay where they are in every
    /// process, and new bytes follow them without a gap: kernels and tensors may span both.
    ///
    /// ```no_run
    /// # use partywall::{DType, Domain, Place};
    /// let domain = Domain::connect()?;
    /// let builder = domain.create("log", Place::Host).tensor("rows", DType::F32, &[1000, 64]);
    /// let log = builder.mutable(true).reserve(1 << 30).allocate()?.commit()?;
    /// log.grow().extend("rows", 2000).commit()?;
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn grow(&self) -> Growth<'_> {
        Growth { segment: self, longer: None, tensors: Vec::new(), spare: 0 }
    }

    /// Maps the memory that was added to the version since it was opened or last refreshed. Borrows of the segment stay
    /// valid and keep their length; tensors looked up afterwards have the new length.
    ///
    /// # Errors
    /// [`InvalidData::Table`] if the new table describes existing tensors in another way; those of mapping memory, and
    /// of every call. The segment is then unchanged.
    pub fn refresh(&self) -> Result<Refreshed> {
        let Some(lease) = self.lease.filter(|_| self.facts.chosen.reserved > 0) else {
            return Ok(Refreshed::Unchanged);
        };
        let _turn = self.turn()?;
        self.check()?;
        let stage = self.stage();
        let refresh = Call::Refresh { lease, growths: stage.growths, chunks: stage.chunks.len() as u64 };
        match self.domain.link().call_with(refresh, &[])? {
            (Answer::Done, _) => Ok(Refreshed::Unchanged),
            (Answer::Grown(grown), fds) => self.adopt(stage, grown, fds),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Waits until the version has grown beyond the length that this process knows, and refreshes the segment.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Denied::Growth`] for a version that is frozen, or whose committer
    /// has dropped it; as [`Segment::refresh`].
    pub fn wait_growth<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Refreshed> {
        let Some(lease) = self.lease else { return Ok(Refreshed::Unchanged) };
        let waiting = wait.into().begin();
        let growths = self.stage().growths;
        match self.domain.link().call_waiting(|| Call::AwaitGrowth { lease, growths }, &waiting)? {
            Some((Answer::Done, _)) => self.refresh(),
            Some((other, _)) => Err(unexpected(&other)),
            None => Err(waiting.error(format!("{:?} did not grow", self.facts.name))),
        }
    }

    /// Returns the number of bytes that the version can have in this process without moving; 0 if it cannot grow.
    pub fn reserved(&self) -> u64 {
        self.memory().reserved()
    }

    fn adopt(&self, stage: &Stage, grown: Grown, mut fds: Vec<OwnedFd>) -> Result<Refreshed> {
        let Grown { growths, chunks, table } = grown;
        let facts = &self.facts;
        if fds.len() < chunks.len() {
            return Err(LimitReached::FileDescriptors(format!("the chunks of {:?}", facts.name)).into());
        }
        let table_fd = fds.drain(chunks.len()..).next();
        let ranges = info::ranges(facts.chosen.reserved, &[&stage.chunks[..], &chunks].concat())?;
        let bytes = ranges.iter().sum();
        let reserved = self.memory().reserved();
        let table = info::table(&facts.name, table, table_fd, &ranges)?;
        let checked = table.check_growth_of(&stage.table);
        checked.map_err(|source| Error::InvalidData(InvalidData::Table { name: facts.name.clone(), source }))?;
        if bytes > reserved {
            return Ok(Refreshed::DoesNotFit { bytes, reserved });
        }
        let chunk: Vec<_> = chunks.iter().copied().zip(fds).collect();
        self.memory().extend(&chunk).map_err(|e| self.named(e))?.publish();
        stage.follow(&chunks, table, growths);
        Ok(Refreshed::Grown)
    }

    /// Locks the segment against another change of its length in this process.
    fn turn(&self) -> Result<MutexGuard<'_, ()>> {
        self.domain.link().require_ours()?;
        // A panic under the lock leaves no half-done change: a stage is added in one step.
        Ok(self.growing.lock().ignore_poison())
    }

    fn cannot_grow(&self, why: NoGrowth) -> Error {
        Error::Denied(Denied::Growth { name: self.facts.name.clone(), version: self.facts.version, why })
    }
}
