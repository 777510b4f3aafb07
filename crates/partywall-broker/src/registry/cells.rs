//! Cells: one incarnation of a timeline each, in slabs that all members map.
//!
//! A cell is given to another timeline only when nobody can read it any more and nothing can be stored in it any
//! more: no lease has led to it, no timeline stands at it, and its writer is proved dead, or has given its lease
//! back and been seen to have stored all that it had promised. Even then it rests for a while.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{
    Registry,
    effect::{Effect, Effects, Refused},
    segments::limit,
    types::{Bounds, CellAt, CellEnding, CellId, ControlMemory, FdId, LeaseId, Limit, MemberId},
};

/// All cells.
#[derive(Debug, Default)]
pub(super) struct Cells {
    /// The slabs, in the order of their numbers. They stay: members have them mapped.
    pub(super) slabs: Vec<FdId>,
    /// Cells that have ever been given out; those behind them are fresh.
    pub(super) taken: u64,
    pub(super) used: BTreeMap<CellId, Cell>,
    /// Cells that may be used again, the one that has rested longest first.
    pub(super) resting: VecDeque<CellId>,
    /// Cells that have ended and may still be written.
    pub(super) restless: BTreeSet<CellId>,
}

/// A cell that somebody may read or write.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) incarnation: u32,
    /// Leases that have led to it, and the timeline that stands at it.
    pub(super) uses: u64,
    pub(super) ended: bool,
    pub(super) writing: Writing,
    /// The lease that writes, or has written. Once it is given back, nothing new is promised.
    pub(super) writer: Option<LeaseId>,
}

/// A cell that the server guards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Guarded {
    pub(crate) at: CellAt,
    /// No lease writes it any more.
    pub(crate) given_back: bool,
}

/// The member that may store in a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writing {
    /// Nobody: it has no writer, or that one is done.
    Over,
    /// This member and its streams.
    By(MemberId),
    /// A process that has left the domain before its streams were done. Nobody will tell us of its death: only that all
    /// that was promised has been stored makes the cell another's.
    Unobserved,
}

/// Where the next cell comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// It was used before.
    Resting,
    /// It was not, and its slab is there.
    Fresh,
    /// Its slab has to be created.
    Slab,
}

impl Cells {
    /// A cell that is there.
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

    /// Somebody else has it.
    pub(super) fn add_use(&mut self, cell: CellId) {
        if let Some(cell) = self.used.get_mut(&cell) {
            cell.uses += 1;
        }
    }

    /// Somebody has it no longer.
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

    /// Takes a cell for an incarnation that begins where `from` stands. It has one use: the timeline's.
    ///
    /// `source` is what [`Registry::cell_source`] says; `slab` comes with [`Source::Slab`].
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

    /// From now on this lease of a member's stores in a cell.
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
    pub(super) fn end_cell(&mut self, id: CellId, ending: CellEnding, out: &mut Effects) {
        let Some(at) = self.at(id) else { return };
        let Some(cell) = self.cells.used.get_mut(&id) else { return };
        cell.ended = true;
        if cell.writing != Writing::Over {
            self.cells.restless.insert(id);
        }
        out.push(Effect::EndCell { at, ending });
    }

    /// A lease is given back. What it has promised in a cell may be on its way still, but nothing new will be.
    pub(super) fn end_writing(&mut self, id: CellId, lease: LeaseId, out: &mut Effects) {
        let at = self.at(id);
        let Some(cell) = self.cells.used.get_mut(&id) else { return };
        if cell.writer.take_if(|writer| *writer == lease).is_some() && cell.writing != Writing::Over {
            out.extend(at.map(Effect::SettleCell));
        }
    }

    /// All that was promised in a cell that has ended has been stored: nothing more comes.
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

    /// Nothing is stored any more by a member whose death is proved. By one that has left something may.
    pub(super) fn settle_cells_of(&mut self, member: MemberId, dead: bool) {
        let Some(record) = self.members.get_mut(&member) else { return };
        for cell in std::mem::take(&mut record.cells) {
            self.cells.set_writing(cell, if dead { Writing::Over } else { Writing::Unobserved });
        }
    }

    /// Cells that have ended, may still be written, and may be waited for. Of those that no lease writes any more it is
    /// wanted to know when all that was promised in them has been stored.
    pub(crate) fn guarded(&self) -> Vec<Guarded> {
        let guarded = self.cells.restless.iter().filter_map(|id| {
            let cell = self.cells.used.get(id)?;
            let given_back = cell.writer.is_none();
            (cell.uses > 0 || given_back).then_some(Guarded { at: self.at(*id)?, given_back })
        });
        guarded.collect()
    }

    /// Cells that have not ended.
    pub(crate) fn live_cells(&self) -> Vec<CellAt> {
        let live = self.cells.used.iter().filter(|(_, cell)| !cell.ended);
        live.filter_map(|(id, _)| self.at(*id)).collect()
    }

    /// The number of the slab that a cell is in, and its place there.
    pub(super) fn place_in_slab(&self, cell: CellId) -> (u32, u32) {
        // Slabs are few, and so are a slab's cells.
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
