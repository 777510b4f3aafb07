//! Memory that the broker shares with all members, and what it does there.
//!
//! Every member can write every byte of it. What is done here ends whatever the bytes are, and nothing that is read is
//! believed: it is shown to people, or handed on as a number.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::Arc,
};

use partywall_os::{Errno, memfd};
use partywall_shm::{
    members::{self, Members},
    semaphore::{Audit, MAX_WAITERS, Semaphore},
    timeline::{Cell, Ending, Slab},
};

use crate::{
    registry::{
        FdId, Lack,
        effect::CellEnding,
        types::{CellAt, Made},
    },
    rim::{
        fds::FdStore,
        ids::IdMap,
        reclaimer::{Donated, Reclaimer},
    },
};

/// Everything that is mapped.
#[derive(Debug)]
pub(super) struct Control {
    rows: Members,
    rows_fd: Arc<Donated>,
    slabs: IdMap<FdId, Slab>,
    semaphores: IdMap<FdId, Semaphore>,
    /// The highest value that was stored in a cell after its end, and undone.
    undone: BTreeMap<CellAt, u64>,
    /// Rows whose members are gone, with the semaphores that may have permits of them.
    clearing: VecDeque<(u16, Vec<FdId>)>,
    /// How many slots were looked at for these in this turn of the loop.
    looked_at: u32,
}

/// What a timeline stands at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) value: u64,
    pub(super) announced: u64,
    pub(super) ending: Option<Ending>,
}

impl Control {
    pub(super) fn create(reclaimer: &Reclaimer) -> Result<Self, Errno> {
        // As many as there can be, of which only those that are in use take memory.
        let fd = Members::create(members::MAX_ROWS)?;
        let rows = Members::map(&fd)?;
        Ok(Self {
            rows,
            rows_fd: Arc::new(reclaimer.keep(fd)),
            slabs: IdMap::default(),
            semaphores: IdMap::default(),
            undone: BTreeMap::new(),
            clearing: VecDeque::new(),
            looked_at: 0,
        })
    }

    /// The member of a row begins, or begins again: it is well until it has had time to say so itself.
    pub(super) fn begin_row(&self, row: u16) {
        self.rows.beat(row, members::now());
    }

    /// When the member of a row was well for the last time, in milliseconds of `CLOCK_MONOTONIC`.
    pub(super) fn heartbeat(&self, row: u16) -> Option<u64> {
        self.rows.heartbeat(row)
    }

    /// The memory of the members' rows.
    pub(super) fn rows_fd(&self) -> Arc<Donated> {
        Arc::clone(&self.rows_fd)
    }

    /// Makes and maps what a request needs.
    pub(super) fn make(&mut self, lack: Lack, store: &mut FdStore, reclaimer: &Reclaimer) -> io::Result<Made> {
        let fd = match lack {
            Lack::Slab => Slab::create()?,
            Lack::Semaphore(maximum) => Semaphore::create(maximum)?,
        };
        let bytes = memfd::len(&fd)?;
        let (slab, semaphore) = match lack {
            Lack::Slab => (Some(Slab::map(&fd)?), None),
            Lack::Semaphore(_) => (None, Some(Semaphore::map(&fd)?)),
        };
        let fd = store.keep(reclaimer.keep(fd));
        self.slabs.extend(slab.map(|slab| (fd, slab)));
        self.semaphores.extend(semaphore.map(|semaphore| (fd, semaphore)));
        Ok(Made { fd, bytes })
    }

    /// Unmaps what is closed.
    pub(super) fn forget(&mut self, fds: &[FdId]) {
        for fd in fds {
            self.slabs.remove(fd);
            self.semaphores.remove(fd);
        }
    }

    /// Makes a cell the beginning of an incarnation.
    pub(super) fn start(&mut self, at: CellAt, from: Option<CellAt>, incarnation: u32) {
        self.undone.remove(&at);
        let from = from.and_then(|from| self.cell(from)).map_or(0, Cell::value);
        if let Some(cell) = self.cell(at) {
            cell.start(from, incarnation);
        }
    }

    /// Ends an incarnation and wakes who waits for it.
    pub(super) fn end(&self, at: CellAt, ending: Ending) {
        if let Some(cell) = self.cell(at) {
            cell.end(ending);
        }
    }

    /// Undoes what has been stored in a cell after its end.
    pub(super) fn guard(&mut self, at: CellAt) {
        if let Some(value) = self.cell(at).and_then(Cell::guard) {
            tracing::debug!(slab = %at.slab, cell = at.index, value, "undid a store to a timeline that has ended");
            let highest = self.undone.entry(at).or_default();
            *highest = value.max(*highest);
        }
    }

    /// Whether all that was promised in a cell has been stored, before its end or after it.
    pub(super) fn is_complete(&self, at: CellAt) -> bool {
        let undone = self.undone.get(&at).copied().unwrap_or(0);
        self.cell(at).is_none_or(|cell| cell.value().max(undone) >= cell.announced())
    }

    /// Whether somebody has ended an incarnation.
    pub(super) fn has_ended(&self, at: CellAt) -> bool {
        self.cell(at).is_some_and(|cell| cell.ending().is_some())
    }

    /// What a cell says.
    pub(super) fn standing(&self, at: CellAt) -> Option<Standing> {
        let cell = self.cell(at)?;
        Some(Standing { value: cell.value(), announced: cell.announced(), ending: cell.ending() })
    }

    /// Gives all permits of a row to others.
    pub(super) fn return_permits(&self, semaphore: FdId, row: u16) {
        let Some(mapped) = self.semaphores.get(&semaphore) else { return };
        let permits = mapped.recover(|other| other == row);
        if permits > 0 {
            tracing::info!(%semaphore, row, permits, "gave permits back");
        }
    }

    /// The member of a row is gone: its permits are to go back.
    pub(super) fn clear_row(&mut self, row: u16, semaphores: Vec<FdId>) {
        self.clearing.push_back((row, semaphores));
    }

    /// Gives permits of such rows back, as many as one turn of the loop allows. Returns the rows that have none any more.
    pub(super) fn clear_rows(&mut self) -> Vec<u16> {
        let mut cleared = Vec::new();
        while self.looked_at < SLOTS_IN_TURN
            && let Some((row, semaphores)) = self.clearing.front_mut()
        {
            let row = *row;
            if let Some(semaphore) = semaphores.pop() {
                self.looked_at += self.slots(semaphore) + MAX_WAITERS;
                self.return_permits(semaphore, row);
            } else {
                self.clearing.pop_front();
                cleared.push(row);
            }
        }
        cleared
    }

    /// The loop begins another turn.
    pub(super) fn begin_turn(&mut self) {
        self.looked_at = 0;
    }

    /// Whether there are such rows.
    pub(super) fn is_clearing(&self) -> bool {
        !self.clearing.is_empty()
    }

    /// How many permits of a semaphore are where.
    pub(super) fn permits(&self, semaphore: FdId) -> Audit {
        self.semaphores.get(&semaphore).map(Semaphore::audit).unwrap_or_default()
    }

    /// How many permits a semaphore may have, and so how much it takes to count them.
    pub(super) fn slots(&self, semaphore: FdId) -> u32 {
        self.semaphores.get(&semaphore).map_or(0, Semaphore::maximum)
    }

    /// How many permits of a semaphore each row has, without those that have none.
    pub(super) fn permits_by_row(&self, semaphore: FdId) -> BTreeMap<u16, u32> {
        self.semaphores.get(&semaphore).map(Semaphore::holders).unwrap_or_default().into_iter().collect()
    }

    fn cell(&self, at: CellAt) -> Option<&Cell> {
        self.slabs.get(&at.slab)?.cell(at.index)
    }
}

/// Slots of semaphores that are looked at for the dead before others have their turn: it takes about a millisecond.
const SLOTS_IN_TURN: u32 = 1 << 16;

impl From<CellEnding> for Ending {
    fn from(ending: CellEnding) -> Self {
        match ending {
            CellEnding::OwnerDied => Self::OwnerDied,
            CellEnding::OwnerFaulted => Self::OwnerFaulted,
            CellEnding::Closed => Self::Closed,
            CellEnding::Abandoned => Self::Abandoned,
            CellEnding::Evicted => Self::Evicted,
        }
    }
}
