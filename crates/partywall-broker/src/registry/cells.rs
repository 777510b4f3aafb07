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
//! poison that ends the waits, and restores the poison ([`Registry::guarded`]). This stops once the writer has given
//! its lease back and all values that it promised have been stored, before or after the end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::{
    Registry,
    effect::{Effect, Effects},
    people::Owned,
    types::{Bounds, CellAt, CellId, ControlMemory, FdId, LeaseId, Limit, MemberId, Refusal, TimelineEnding, limit},
};

/// All cells.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Cells {
    /// The slabs, by their numbers, which are never used twice. Those of users are never removed, because members have
    /// them mapped.
    pub(super) slabs: BTreeMap<u32, Slab>,
    /// Number of slabs that ever existed.
    last_slab: u32,
    areas: BTreeMap<Area, Free>,
    /// Shared timelines that do not exist any more, by their slabs.
    ended: BTreeSet<u32>,
    #[serde(deserialize_with = "super::coding::ordered")]
    pub(super) used: BTreeMap<CellId, Cell>,
    /// Cells that have ended, but may still be written.
    pub(super) restless: BTreeSet<CellId>,
}

/// A slab.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Slab {
    pub(super) memory: ControlMemory,
    area: Area,
    /// The user to which it is charged.
    pub(super) uid: u32,
}

/// Slabs whose cells the same timelines use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Area {
    /// The timelines of this user that are not shared.
    User(u32),
    /// One shared timeline, by the number of its slab.
    Shared(u32),
}

/// The cells of an area that are not used.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Free {
    /// The area's slabs, in the order in which they are filled.
    slabs: Vec<u32>,
    /// Number of cells that were ever used; the cells behind them are fresh.
    taken: u64,
    /// Cells that may be reused, longest rested first.
    pub(super) resting: VecDeque<CellId>,
}

/// A cell that a process may read or write.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Cell {
    pub(super) incarnation: u32,
    /// The number of leases that led to it, plus one while it is a timeline's present incarnation.
    pub(super) uses: u64,
    pub(super) ended: bool,
    pub(super) writing: Writing,
    /// The lease that writes the cell, or wrote it. Absent once it was given back: nothing new is promised then.
    pub(super) writer: Option<LeaseId>,
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
pub(super) enum Writing {
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
pub(super) enum Source {
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
    /// Returns the area of a timeline; `None` for a shared one that does not exist yet.
    pub(super) fn area(owned: Owned, present: Option<(CellId, &Bounds)>) -> Option<Area> {
        match present {
            _ if !owned.shared => Some(Area::User(owned.uid)),
            Some((cell, bounds)) => Some(Area::Shared((cell.0 / bounds.cells) as u32)),
            None => None,
        }
    }

    /// Returns all resting cells.
    #[cfg(any(test, fuzzing))]
    pub(super) fn resting(&self) -> impl Iterator<Item = CellId> {
        self.areas.values().flat_map(|free| free.resting.iter().copied())
    }

    /// Returns all cells that were ever used, of the slabs that exist.
    #[cfg(any(test, fuzzing))]
    pub(super) fn taken(&self, cells: u64) -> impl Iterator<Item = CellId> {
        let of_area = move |free: &Free| {
            let slabs = free.slabs.clone();
            (0..free.taken).map(move |n| CellId(u64::from(slabs[(n / cells) as usize]) * cells + n % cells))
        };
        self.areas.values().flat_map(of_area)
    }

    /// Returns the area of a cell.
    #[cfg(any(test, fuzzing))]
    pub(super) fn area_of(&self, cell: CellId, cells: u64) -> Option<Area> {
        self.slabs.get(&((cell.0 / cells) as u32)).map(|slab| slab.area)
    }

    /// Counts one more use of a cell.
    pub(super) fn add_use(&mut self, cell: CellId) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses += 1;
        }
    }

    /// Counts one use of a cell less.
    pub(super) fn drop_use(&mut self, cell: CellId, bounds: &Bounds) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses -= 1;
        }
        self.rest_if_idle(cell, bounds);
    }

    fn set_writing(&mut self, cell: CellId, writing: Writing, bounds: &Bounds) {
        if let Some(record) = self.used.get_mut(&cell) {
            record.writing = writing;
        }
        if writing == Writing::Over {
            self.restless.remove(&cell);
        }
        self.rest_if_idle(cell, bounds);
    }

    fn rest_if_idle(&mut self, cell: CellId, bounds: &Bounds) {
        let idle = self.used.get(&cell).is_some_and(|cell| cell.uses == 0 && cell.writing == Writing::Over);
        if idle
            && self.used.remove(&cell).is_some()
            && let Some(slab) = self.slabs.get(&((cell.0 / bounds.cells) as u32))
        {
            self.areas.entry(slab.area).or_default().resting.push_back(cell);
        }
    }
}

impl Registry {
    /// Returns where the next cell of an area would come from; of a new one, if `area` is absent. `slab` is the new
    /// slab, if one has been created for it, and `uid` the user to which it would be charged.
    pub(super) fn cell_source(
        &self,
        area: Option<Area>,
        uid: u32,
        slab: Option<ControlMemory>,
    ) -> Result<Source, Refusal> {
        let free = area.and_then(|area| self.cells.areas.get(&area));
        if let Some(source) = free.and_then(|free| free.source(self.people.bounds())) {
            return Ok(source);
        }
        match self.check_slab(area, free.map_or(0, |free| free.slabs.len() as u64), uid, slab) {
            Ok(()) => Ok(Source::Slab),
            Err(_) if free.is_some_and(|free| !free.resting.is_empty()) => Ok(Source::Resting),
            Err(refused) => Err(refused),
        }
    }

    /// Refuses one more slab of an area that has `slabs` slabs.
    fn check_slab(&self, area: Option<Area>, slabs: u64, uid: u32, slab: Option<ControlMemory>) -> Result<(), Refusal> {
        let most = if let Some(Area::User(_)) = area { self.people.bounds().slabs } else { 1 };
        if slabs >= most {
            let allowed = most * self.people.bounds().cells;
            return Err(Refusal::Limit { limit: Limit::Timelines, allowed, needed: allowed + 1, holders: Vec::new() });
        }
        let bytes = slab.map_or(0, |slab| slab.bytes);
        limit(Limit::Fds, self.people.bounds().fds, self.people.totals().fds + 1)?;
        limit(Limit::Bytes, self.people.bounds().bytes, self.people.totals().bytes().saturating_add(bytes))?;
        self.people.check_memory(uid, 1, bytes)
    }

    /// Takes a cell for an incarnation that begins at the value of the cell `from`. The timeline is its only use at
    /// first.
    ///
    /// `source` is the result of [`Registry::cell_source`]; `slab` is present with [`Source::Slab`].
    pub(super) fn start_cell(
        &mut self,
        (area, uid): (Option<Area>, u32),
        (source, slab): (Source, Option<ControlMemory>),
        from: Option<CellId>,
        incarnation: u32,
        before: &mut Effects,
    ) -> Option<CellId> {
        let area = area.unwrap_or(Area::Shared(self.cells.last_slab));
        if source == Source::Slab {
            let memory = slab?;
            self.people.charge(uid, |totals| totals.add_control(memory));
            let number = self.cells.last_slab;
            self.cells.last_slab += 1;
            self.cells.slabs.insert(number, Slab { memory, area, uid });
            self.cells.areas.entry(area).or_default().slabs.push(number);
        }
        let id = self.cells.areas.get_mut(&area)?.take(source, self.people.bounds())?;
        let at = self.at(id)?;
        before.push(Effect::StartCell { at, from: from.and_then(|from| self.at(from)), incarnation });
        self.cells.used.insert(id, Cell { incarnation, uses: 1, ended: false, writing: Writing::Over, writer: None });
        Some(id)
    }

    /// Has [`Registry::close_unused_slabs`] close the slab of a shared timeline that does not exist any more.
    pub(super) fn end_area(&mut self, present: CellId) {
        if let Some(Area::Shared(slab)) = self.cells.slabs.get(&self.place_in_slab(present).0).map(|slab| slab.area) {
            self.cells.ended.insert(slab);
        }
    }

    /// Closes the slabs of shared timelines that no process can use any more.
    pub(super) fn close_unused_slabs(&mut self, out: &mut Effects) {
        let cells = self.people.bounds().cells;
        let used = &self.cells.used;
        let first = |slab: u32| CellId(u64::from(slab) * cells);
        let is_unused = |slab: &u32| used.range(first(*slab)..first(slab + 1)).next().is_none();
        let unused: Vec<_> = self.cells.ended.iter().copied().filter(is_unused).collect();
        for number in unused {
            self.cells.ended.remove(&number);
            self.cells.areas.remove(&Area::Shared(number));
            if let Some(Slab { memory, uid, .. }) = self.cells.slabs.remove(&number) {
                self.people.charge(uid, |totals| totals.subtract_control(memory));
                out.push(Effect::Close(vec![memory.fd]));
            }
        }
    }

    /// Makes a lease of a member the writer of a cell.
    pub(super) fn begin_writing(&mut self, cell: CellId, member: MemberId, lease: LeaseId) {
        self.cells.set_writing(cell, Writing::By(member), self.people.bounds());
        if let Some(record) = self.cells.used.get_mut(&cell) {
            record.writer = Some(lease);
        }
        self.people.add_cell(member, cell);
    }

    /// Ends an incarnation. Its writer may still store in it, so the server guards it.
    pub(super) fn end_cell(&mut self, id: CellId, ending: TimelineEnding, out: &mut Effects) {
        let Some(at) = self.at(id) else { return };
        let Some(cell) = self.cells.used.get_mut(&id) else { return };
        cell.ended = true;
        if cell.writing != Writing::Over {
            self.cells.restless.insert(id);
        }
        out.push(Effect::EndCell { at, ending });
    }

    /// Ends the writing by a lease that is given back. Values that it promised may still arrive in the cell, but
    /// nothing new is promised.
    pub(super) fn end_writing(&mut self, id: CellId, lease: LeaseId, out: &mut Effects) {
        let at = self.at(id);
        let Some(cell) = self.cells.used.get_mut(&id) else { return };
        if cell.writer.take_if(|writer| *writer == lease).is_some() && cell.writing != Writing::Over {
            out.extend(at.map(Effect::SettleCell));
        }
    }

    /// Records that everything promised in an ended cell has been stored, so nothing more will be written there.
    pub(super) fn settle_cell(&mut self, at: CellAt) {
        let Some(id) = self.number(at) else { return };
        if !self.cells.restless.contains(&id) {
            return;
        }
        if let Some(Writing::By(writer)) = self.cells.used.get(&id).map(|cell| cell.writing) {
            self.people.drop_cell(writer, id);
        }
        self.cells.set_writing(id, Writing::Over, self.people.bounds());
    }

    /// Ends a member's writing in all its cells. A dead member stores nothing more; the streams of one that left may.
    pub(super) fn settle_cells_of(&mut self, member: MemberId, dead: bool) {
        let Some(record) = self.people.member(member) else { return };
        for cell in record.cells.clone() {
            self.people.drop_cell(member, cell);
            let writing = if dead { Writing::Over } else { Writing::Unobserved };
            self.cells.set_writing(cell, writing, self.people.bounds());
        }
    }

    /// Returns the ended cells that may still be written and that matter to a process. For those whose writer's lease
    /// was given back, the server reports when everything promised has been stored.
    pub(crate) fn guarded(&self) -> Vec<Guarded> {
        let guarded = self.cells.restless.iter().filter_map(|id| {
            let cell = self.cells.used.get(id)?;
            let given_back = cell.writer.is_none();
            (cell.uses > 0 || given_back).then_some(Guarded { at: self.at(*id)?, given_back })
        });
        guarded.collect()
    }

    /// Returns the cells that have not ended.
    pub(crate) fn live_cells(&self) -> Vec<CellAt> {
        let live = self.cells.used.iter().filter(|(_, cell)| !cell.ended);
        live.filter_map(|(id, _)| self.at(*id)).collect()
    }

    /// Returns the number of a cell's slab, and the cell's index there.
    pub(super) fn place_in_slab(&self, cell: CellId) -> (u32, u32) {
        // The first is a 32-bit number of a slab, and the second is small: the casts lose nothing.
        ((cell.0 / self.people.bounds().cells) as u32, (cell.0 % self.people.bounds().cells) as u32)
    }

    /// The memory of all slabs.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = FdId> {
        self.cells.slabs.values().map(|slab| slab.memory.fd)
    }

    /// The memory of the slab with this number.
    pub(crate) fn slab(&self, number: u32) -> Option<FdId> {
        self.cells.slabs.get(&number).map(|slab| slab.memory.fd)
    }

    /// Returns the memory of the slab that a cell is in.
    pub(super) fn slab_of(&self, cell: CellId) -> Option<ControlMemory> {
        let (slab, _) = self.place_in_slab(cell);
        self.cells.slabs.get(&slab).map(|slab| slab.memory)
    }

    pub(super) fn at(&self, cell: CellId) -> Option<CellAt> {
        let (slab, index) = self.place_in_slab(cell);
        Some(CellAt { slab: self.slab(slab)?, index })
    }

    fn number(&self, at: CellAt) -> Option<CellId> {
        let (slab, _) = self.cells.slabs.iter().find(|(_, slab)| slab.memory.fd == at.slab)?;
        Some(CellId(u64::from(*slab) * self.people.bounds().cells + u64::from(at.index)))
    }
}
