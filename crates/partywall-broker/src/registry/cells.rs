//! Cells: each holds one incarnation of a timeline, in slabs that all members map.
//!
//! A cell is reused for another timeline only when no process can read it or store in it any more:
//!
//! - no lease that led to it is left, and it is no timeline's present incarnation;
//! - its writer is proved dead, or has given its lease back and has stored every value that it promised.
//!
//! Even then the cell rests for a while.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::{
    Registry,
    effect::{Effect, Effects, Refused},
    segments::limit,
    types::{Bounds, CellAt, CellId, ControlMemory, FdId, LeaseId, Limit, MemberId, TimelineEnding},
};

/// All cells.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Cells {
    /// The slabs, in the order of their numbers. Never removed, because members have them mapped.
    pub(super) slabs: Vec<FdId>,
    /// Number of cells that were ever used; the cells behind them are fresh.
    pub(super) taken: u64,
    pub(super) used: BTreeMap<CellId, Cell>,
    /// Cells that may be reused, longest rested first.
    pub(super) resting: VecDeque<CellId>,
    /// Cells that have ended, but may still be written.
    pub(super) restless: BTreeSet<CellId>,
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

impl Cells {
    /// Returns the source of a cell that exists already.
    fn source(&self, bounds: &Bounds) -> Option<Source> {
        if self.resting.len() as u64 > bounds.rest {
            return Some(Source::Resting);
        }
        (self.taken < self.slabs.len() as u64 * bounds.cells).then_some(Source::Fresh)
    }

    fn take(&mut self, source: Source) -> Option<CellId> {
        match source {
            Source::Resting => self.resting.pop_front(),
            Source::Fresh | Source::Slab => {
                self.taken += 1;
                Some(CellId(self.taken - 1))
            }
        }
    }

    /// Counts one more use of a cell.
    pub(super) fn add_use(&mut self, cell: CellId) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses += 1;
        }
    }

    /// Counts one use of a cell less.
    pub(super) fn drop_use(&mut self, cell: CellId) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses -= 1;
        }
        self.rest_if_idle(cell);
    }

    fn set_writing(&mut self, cell: CellId, writing: Writing) {
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
        if idle && self.used.remove(&cell).is_some() {
            self.resting.push_back(cell);
        }
    }
}

impl Registry {
    /// Returns where the next cell would come from. `slab` is the new slab, if one has been created for it.
    pub(super) fn cell_source(&self, slab: Option<ControlMemory>) -> Result<Source, Refused> {
        if let Some(source) = self.cells.source(&self.bounds) {
            return Ok(source);
        }
        match self.check_slab(slab) {
            Ok(()) => Ok(Source::Slab),
            Err(_) if !self.cells.resting.is_empty() => Ok(Source::Resting),
            Err(refused) => Err(refused),
        }
    }

    fn check_slab(&self, slab: Option<ControlMemory>) -> Result<(), Refused> {
        if self.cells.slabs.len() as u64 >= self.bounds.slabs {
            let allowed = self.bounds.slabs * self.bounds.cells;
            return Err(Refused::Limit { limit: Limit::Timelines, allowed, needed: allowed + 1 });
        }
        limit(Limit::Fds, self.bounds.fds, self.totals.fds + 1)?;
        limit(Limit::Bytes, self.bounds.bytes, self.totals.bytes().saturating_add(slab.map_or(0, |slab| slab.bytes)))
    }

    /// Takes a cell for an incarnation that begins at the value of the cell `from`. The timeline is its only use at
    /// first.
    ///
    /// `source` is the result of [`Registry::cell_source`]; `slab` is present with [`Source::Slab`].
    pub(super) fn start_cell(
        &mut self,
        source: Source,
        slab: Option<ControlMemory>,
        from: Option<CellId>,
        incarnation: u32,
        before: &mut Effects,
    ) -> Option<CellId> {
        if source == Source::Slab {
            let slab = slab?;
            self.totals.add_control(slab);
            self.cells.slabs.push(slab.fd);
        }
        let id = self.cells.take(source)?;
        let at = self.at(id)?;
        before.push(Effect::StartCell { at, from: from.and_then(|from| self.at(from)), incarnation });
        self.cells.used.insert(id, Cell { incarnation, uses: 1, ended: false, writing: Writing::Over, writer: None });
        Some(id)
    }

    /// Makes a lease of a member the writer of a cell.
    pub(super) fn begin_writing(&mut self, cell: CellId, member: MemberId, lease: LeaseId) {
        self.cells.set_writing(cell, Writing::By(member));
        if let Some(record) = self.cells.used.get_mut(&cell) {
            record.writer = Some(lease);
        }
        if let Some(record) = self.members.get_mut(&member) {
            record.cells.insert(cell);
        }
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
        if let Some(Writing::By(writer)) = self.cells.used.get(&id).map(|cell| cell.writing)
            && let Some(record) = self.members.get_mut(&writer)
        {
            record.cells.remove(&id);
        }
        self.cells.set_writing(id, Writing::Over);
    }

    /// Ends a member's writing in all its cells. A dead member stores nothing more; the streams of one that left may.
    pub(super) fn settle_cells_of(&mut self, member: MemberId, dead: bool) {
        let Some(record) = self.members.get_mut(&member) else { return };
        for cell in std::mem::take(&mut record.cells) {
            self.cells.set_writing(cell, if dead { Writing::Over } else { Writing::Unobserved });
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
        // Both numbers are small, so the casts lose nothing.
        ((cell.0 / self.bounds.cells) as u32, (cell.0 % self.bounds.cells) as u32)
    }

    /// The slabs, in the order of their numbers.
    pub(crate) fn slabs(&self) -> &[FdId] {
        &self.cells.slabs
    }

    pub(super) fn at(&self, cell: CellId) -> Option<CellAt> {
        let (slab, index) = self.place_in_slab(cell);
        Some(CellAt { slab: *self.cells.slabs.get(slab as usize)?, index })
    }

    fn number(&self, at: CellAt) -> Option<CellId> {
        let slab = self.cells.slabs.iter().position(|slab| *slab == at.slab)?;
        Some(CellId(slab as u64 * self.bounds.cells + u64::from(at.index)))
    }
}
