//! Cells: each holds one incarnation of a timeline, in slabs that members map.
//!
//! Every process that maps a slab can write all of it. The timelines of a user that are not shared are therefore in
//! slabs of that user, which no other user gets. A shared timeline has a slab of its own, which is closed when no
//! process can use the timeline any more. The number of a slab is never used again, so a topic or a queue can name a
//! cell of any user.
//!
//! A cell is reused for another timeline only when no process can read it or store in it any more:
//!
//! - no lease that led to it is left, and it is no timeline's present incarnation;
//! - its writer is proved dead, or has given its lease back and has stored every value that it promised.
//!
//! Even then the cell rests for a while.
//!
//! A lease keeps every cell that it has led to, because a stream may still wait there. The library therefore follows a
//! timeline to its next incarnation by another lease.
//!
//! A stream of a writer that was evicted, or whose timeline was abandoned, may still store a value. As long as the
//! process of that writer is not proved dead, the server checks every 100 ms whether such a store has overwritten the
//! poison that ends the waits, and restores the poison ([`Cells::guarded`]). This stops once the writer has given
//! its lease back and all values that it promised have been stored, before or after the end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::registry::{
    coding,
    effect::{Effect, Effects},
    people::Owned,
    types::{Bounds, CellAt, CellId, ControlMemory, FdId, LeaseId, Limit, MemberId, Refusal, TimelineEnding, limit},
};

/// All cells.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cells {
    bounds: Bounds,
    /// The slabs, by their numbers, which are never used twice. Those of users are never removed, because members have
    /// them mapped.
    slabs: BTreeMap<u32, Slab>,
    /// Number of slabs that ever existed.
    last_slab: u32,
    areas: BTreeMap<Area, Free>,
    /// Shared timelines that do not exist any more, by their slabs.
    ended: BTreeSet<u32>,
    #[serde(deserialize_with = "coding::ordered")]
    used: BTreeMap<CellId, Cell>,
    /// Cells that have ended, but may still be written.
    restless: BTreeSet<CellId>,
}

/// A slab.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Slab {
    pub(crate) memory: ControlMemory,
    area: Area,
    /// The user to which it is charged.
    pub(crate) uid: u32,
}

/// Slabs whose cells the same timelines use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Area {
    /// The timelines of this user that are not shared.
    User(u32),
    /// One shared timeline, by the number of its slab.
    Shared(u32),
}

/// The cells of an area that are not used.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Free {
    /// The area's slabs, in the order in which they are filled.
    slabs: Vec<u32>,
    /// Number of cells that were ever used; the cells behind them are fresh.
    taken: u64,
    /// Cells that may be reused, longest rested first.
    pub(crate) resting: VecDeque<CellId>,
}

/// A cell that a process may read or write.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) incarnation: u32,
    /// The number of leases that led to it, plus one while it is a timeline's present incarnation.
    pub(crate) uses: u64,
    pub(crate) ended: bool,
    pub(crate) writing: Writing,
    /// The lease that writes the cell, or wrote it. Absent once it was given back: nothing new is promised then.
    pub(crate) writer: Option<LeaseId>,
}

/// A cell that the server guards: it restores the ending if a late store overwrites it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Guarded {
    pub(crate) at: CellAt,
    /// True if its writer's lease was given back.
    pub(crate) given_back: bool,
}

/// The member that may store in a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Writing {
    /// No member: the cell has no writer, or its writer has finished.
    Over,
    /// This member and its streams.
    By(MemberId),
    /// A process that left the domain before its streams had finished. The broker will not learn of its death, so the
    /// cell can be reused only after all promised values have been stored.
    Unobserved,
}

/// The source of the next cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A cell that was used before.
    Resting,
    /// A cell of an existing slab that was never used.
    Fresh,
    /// The first cell of a slab that has to be created.
    Slab,
}

impl Free {
    /// Returns the source of a cell that exists already.
    fn source(&self, bounds: &Bounds) -> Option<Source> {
        if self.resting.len() as u64 > bounds.rest {
            return Some(Source::Resting);
        }
        (self.taken < self.slabs.len() as u64 * bounds.cells).then_some(Source::Fresh)
    }

    fn take(&mut self, source: Source, bounds: &Bounds) -> Option<CellId> {
        match source {
            Source::Resting => self.resting.pop_front(),
            Source::Fresh | Source::Slab => {
                let slab = *self.slabs.get(usize::try_from(self.taken / bounds.cells).ok()?)?;
                let cell = CellId(u64::from(slab) * bounds.cells + self.taken % bounds.cells);
                self.taken += 1;
                Some(cell)
            }
        }
    }
}

impl Cells {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// Returns the area of a timeline; `None` for a shared one that does not exist yet.
    pub(crate) fn area(&self, owned: Owned, present: Option<CellId>) -> Option<Area> {
        match present {
            _ if !owned.shared => Some(Area::User(owned.uid)),
            Some(cell) => Some(Area::Shared(self.place_in_slab(cell).0)),
            None => None,
        }
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn parts(&self) -> (&BTreeMap<CellId, Cell>, &BTreeSet<CellId>, &BTreeMap<u32, Slab>) {
        (&self.used, &self.restless, &self.slabs)
    }

    /// Returns all resting cells.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn resting(&self) -> impl Iterator<Item = CellId> {
        self.areas.values().flat_map(|free| free.resting.iter().copied())
    }

    /// Returns all cells that were ever used, of the slabs that exist.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn taken(&self) -> impl Iterator<Item = CellId> {
        let cells = self.bounds.cells;
        let of_area = move |free: &Free| {
            let slabs = free.slabs.clone();
            (0..free.taken).map(move |n| CellId(u64::from(slabs[(n / cells) as usize]) * cells + n % cells))
        };
        self.areas.values().flat_map(of_area)
    }

    /// Returns the area of a cell.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn area_of(&self, cell: CellId) -> Option<Area> {
        self.slabs.get(&self.place_in_slab(cell).0).map(|slab| slab.area)
    }

    /// Counts one more use of a cell.
    pub(crate) fn add_use(&mut self, cell: CellId) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses += 1;
        }
    }

    /// Counts one use of a cell less.
    pub(crate) fn drop_use(&mut self, cell: CellId) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses -= 1;
        }
        self.rest_if_idle(cell);
    }

    pub(crate) fn set_writing(&mut self, cell: CellId, writing: Writing) {
        if let Some(record) = self.used.get_mut(&cell) {
            record.writing = writing;
        }
        if writing == Writing::Over {
            self.restless.remove(&cell);
        }
        self.rest_if_idle(cell);
    }

    fn rest_if_idle(&mut self, cell: CellId) {
        let idle = self.used.get(&cell).is_some_and(|cell| cell.uses == 0 && cell.writing == Writing::Over);
        if idle
            && self.used.remove(&cell).is_some()
            && let Some(slab) = self.slabs.get(&self.place_in_slab(cell).0)
        {
            self.areas.entry(slab.area).or_default().resting.push_back(cell);
        }
    }

    /// Returns where the next cell of an area would come from; of a new one, if `area` is absent. `room` refuses a new
    /// slab.
    pub(crate) fn source(
        &self,
        area: Option<Area>,
        room: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<Source, Refusal> {
        let free = area.and_then(|area| self.areas.get(&area));
        if let Some(source) = free.and_then(|free| free.source(&self.bounds)) {
            return Ok(source);
        }
        let slabs = free.map_or(0, |free| free.slabs.len() as u64);
        match self.check_slabs(area, slabs).and_then(|()| room()) {
            Ok(()) => Ok(Source::Slab),
            Err(_) if free.is_some_and(|free| !free.resting.is_empty()) => Ok(Source::Resting),
            Err(refused) => Err(refused),
        }
    }

    /// Refuses one more slab of an area that has `slabs` slabs.
    fn check_slabs(&self, area: Option<Area>, slabs: u64) -> Result<(), Refusal> {
        let most = if let Some(Area::User(_)) = area { self.bounds.slabs } else { 1 };
        let allowed = most * self.bounds.cells;
        limit(Limit::Timelines, allowed, if slabs < most { allowed } else { allowed + 1 })
    }

    /// Takes a cell for an incarnation that begins at the value of the cell `from`. The timeline is its only use at
    /// first.
    ///
    /// `source` is the result of [`Cells::source`]; `slab` is present with [`Source::Slab`], with the user to which it
    /// is charged.
    pub(crate) fn start(
        &mut self,
        area: Option<Area>,
        (source, slab): (Source, Option<(ControlMemory, u32)>),
        from: Option<CellId>,
        before: &mut Effects,
    ) -> Option<CellId> {
        let area = area.unwrap_or(Area::Shared(self.last_slab));
        if source == Source::Slab {
            let (memory, uid) = slab?;
            let number = self.last_slab;
            self.last_slab += 1;
            self.slabs.insert(number, Slab { memory, area, uid });
            self.areas.entry(area).or_default().slabs.push(number);
        }
        let id = self.areas.get_mut(&area)?.take(source, &self.bounds)?;
        let at = self.at(id)?;
        let former = from.and_then(|from| self.used.get(&from)).map_or(0, |cell| cell.incarnation);
        let incarnation = former.wrapping_add(1);
        before.push(Effect::StartCell { at, from: from.and_then(|from| self.at(from)), incarnation });
        self.used.insert(id, Cell { incarnation, uses: 1, ended: false, writing: Writing::Over, writer: None });
        Some(id)
    }

    /// Has [`Cells::close_unused`] close the slab of a shared timeline that does not exist any more.
    pub(crate) fn end_area(&mut self, present: CellId) {
        if let Some(Area::Shared(slab)) = self.slabs.get(&self.place_in_slab(present).0).map(|slab| slab.area) {
            self.ended.insert(slab);
        }
    }

    /// Closes the slabs of shared timelines that no process can use any more, and returns them.
    pub(crate) fn close_unused(&mut self, out: &mut Effects) -> Vec<Slab> {
        let cells = self.bounds.cells;
        let used = &self.used;
        let first = |slab: u32| CellId(u64::from(slab) * cells);
        let is_unused = |slab: &u32| used.range(first(*slab)..first(slab + 1)).next().is_none();
        let unused: Vec<_> = self.ended.iter().copied().filter(is_unused).collect();
        let close = |number: u32| {
            self.ended.remove(&number);
            self.areas.remove(&Area::Shared(number));
            let slab = self.slabs.remove(&number)?;
            out.push(Effect::Close(vec![slab.memory.fd]));
            Some(slab)
        };
        unused.into_iter().filter_map(close).collect()
    }

    /// Makes a lease of a member the writer of a cell.
    pub(crate) fn begin_writing(&mut self, cell: CellId, member: MemberId, lease: LeaseId) {
        self.set_writing(cell, Writing::By(member));
        if let Some(record) = self.used.get_mut(&cell) {
            record.writer = Some(lease);
        }
    }

    /// Ends an incarnation. Its writer may still store in it, so the server guards it.
    pub(crate) fn end(&mut self, id: CellId, ending: TimelineEnding, out: &mut Effects) {
        let Some(at) = self.at(id) else { return };
        let Some(cell) = self.used.get_mut(&id) else { return };
        cell.ended = true;
        if cell.writing != Writing::Over {
            self.restless.insert(id);
        }
        out.push(Effect::EndCell { at, ending });
    }

    /// Ends the writing by a lease that is given back. Values that it promised may still arrive in the cell, but
    /// nothing new is promised.
    pub(crate) fn end_writing(&mut self, id: CellId, lease: LeaseId, out: &mut Effects) {
        let at = self.at(id);
        let Some(cell) = self.used.get_mut(&id) else { return };
        if cell.writer.take_if(|writer| *writer == lease).is_some() && cell.writing != Writing::Over {
            out.extend(at.map(Effect::SettleCell));
        }
    }

    /// Records that everything promised in an ended cell has been stored, so nothing more will be written there.
    /// Returns the cell, and the member that might store in it until now.
    pub(crate) fn settle(&mut self, at: CellAt) -> Option<(CellId, MemberId)> {
        let id = self.number(at).filter(|id| self.restless.contains(id))?;
        let writing = self.used.get(&id)?.writing;
        self.set_writing(id, Writing::Over);
        if let Writing::By(writer) = writing { Some((id, writer)) } else { None }
    }

    /// Returns the ended cells that may still be written and that matter to a process. For those whose writer's lease
    /// was given back, the server reports when everything promised has been stored.
    pub(crate) fn guarded(&self) -> Vec<Guarded> {
        let guarded = self.restless.iter().filter_map(|id| {
            let cell = self.used.get(id)?;
            let given_back = cell.writer.is_none();
            (cell.uses > 0 || given_back).then_some(Guarded { at: self.at(*id)?, given_back })
        });
        guarded.collect()
    }

    /// Returns the cells that have not ended.
    pub(crate) fn live(&self) -> Vec<CellAt> {
        let live = self.used.iter().filter(|(_, cell)| !cell.ended);
        live.filter_map(|(id, _)| self.at(*id)).collect()
    }

    /// Returns the number of a cell's slab, and the cell's index there.
    pub(crate) fn place_in_slab(&self, cell: CellId) -> (u32, u32) {
        // The first is a 32-bit number of a slab, and the second is small: the casts lose nothing.
        ((cell.0 / self.bounds.cells) as u32, (cell.0 % self.bounds.cells) as u32)
    }

    /// The memory of all slabs.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = FdId> {
        self.slabs.values().map(|slab| slab.memory.fd)
    }

    /// The memory of the slab with this number.
    pub(crate) fn slab(&self, number: u32) -> Option<FdId> {
        self.slabs.get(&number).map(|slab| slab.memory.fd)
    }

    /// Returns the number of the incarnation in a cell.
    pub(crate) fn incarnation(&self, cell: CellId) -> Option<u32> {
        Some(self.used.get(&cell)?.incarnation)
    }

    /// Returns the memory of the slab that a cell is in.
    pub(crate) fn slab_of(&self, cell: CellId) -> Option<ControlMemory> {
        let (slab, _) = self.place_in_slab(cell);
        self.slabs.get(&slab).map(|slab| slab.memory)
    }

    pub(crate) fn at(&self, cell: CellId) -> Option<CellAt> {
        let (slab, index) = self.place_in_slab(cell);
        Some(CellAt { slab: self.slab(slab)?, index })
    }

    fn number(&self, at: CellAt) -> Option<CellId> {
        let (slab, _) = self.slabs.iter().find(|(_, slab)| slab.memory.fd == at.slab)?;
        Some(CellId(u64::from(*slab) * self.bounds.cells + u64::from(at.index)))
    }
}
