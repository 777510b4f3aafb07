//! Timelines and semaphores, the leases on them, and the cells of timelines.
//!
//! The present incarnation of a timeline is in one cell. It ends with its writer, or when it is abandoned. The next
//! writer gets a fresh cell, and members that use the former one follow when they need to. The permits of a semaphore
//! are in control memory alone. It is known here which members have a semaphore open, and therefore whose permits to
//! return. Either name exists while any member has a lease on it.

mod cells;

use std::collections::{BTreeMap, BTreeSet};

use partywall_wire::OpenedTimeline;
use serde::{Deserialize, Serialize};

use super::{
    coding,
    effect::{Answer, Effect, Effects, Granted, Unread},
    people::{Holders, Owned},
    types::{Bounds, CellAt, CellId, ControlMemory, FdId, LeaseId, MemberId, Name, RequestId, TimelineEnding},
};

pub(crate) use cells::Guarded;
pub(super) use cells::{Cells, Source, Writing};

/// The timelines and semaphores that members have open.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Objects {
    #[serde(deserialize_with = "coding::ordered")]
    timelines: BTreeMap<Name, Timeline>,
    semaphores: BTreeMap<Name, Semaphore>,
    #[serde(deserialize_with = "coding::ordered")]
    leases: BTreeMap<LeaseId, ObjectLease>,
    pub(crate) cells: Cells,
}

/// A timeline that a member has open.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Timeline {
    /// The cell of its present incarnation.
    pub(super) present: CellId,
    /// True if that incarnation has ended. It then has no writer.
    pub(super) ended: bool,
    /// The lease that signals.
    pub(super) writer: Option<LeaseId>,
    pub(super) owned: Owned,
    pub(super) holders: Holders,
}

/// A semaphore that a member has open.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Semaphore {
    pub(super) memory: ControlMemory,
    pub(super) maximum: u32,
    pub(super) owned: Owned,
    pub(super) holders: Holders,
}

/// A member's lease on a timeline or semaphore.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ObjectLease {
    pub(super) member: MemberId,
    /// The request that created it.
    pub(super) origin: RequestId,
    pub(super) object: LeasedObject,
}

/// The object of a lease.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LeasedObject {
    /// A timeline, with the cells that this lease has led to. The last cell is the one that the member uses now.
    Timeline { name: Name, cells: Vec<CellId> },
    /// A semaphore.
    Semaphore { name: Name },
}

/// What ends with a lease.
pub(super) enum Ended {
    /// The lease alone.
    Lease,
    /// The member's last lease on this semaphore, so its permits have to be returned.
    Permits(FdId),
    Timeline(Name, Timeline),
    Semaphore(Name, Semaphore),
}

impl Objects {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { cells: Cells::new(bounds), ..Self::default() }
    }

    /// Begins the next incarnation of a timeline, and creates the timeline if there is none. Returns whether there was
    /// a cell for it.
    pub(super) fn begin(
        &mut self,
        name: &Name,
        owned: Owned,
        (source, slab): (Source, Option<ControlMemory>),
        before: &mut Effects,
    ) -> bool {
        let former = self.timelines.get(name).map(|timeline| timeline.present);
        let area = self.cells.area(owned, former);
        let slab = slab.map(|memory| (memory, owned.uid));
        let Some(present) = self.cells.start(area, (source, slab), former, before) else { return false };
        let new = || Timeline { present, ended: false, writer: None, owned, holders: Holders::default() };
        let timeline = self.timelines.entry(name.clone()).or_insert_with(new);
        timeline.present = present;
        timeline.ended = false;
        if let Some(former) = former {
            self.cells.drop_use(former);
        }
        true
    }

    /// Opens a timeline that exists. Returns its cell.
    pub(super) fn open_timeline(
        &mut self,
        lease: LeaseId,
        (member, origin): (MemberId, RequestId),
        name: Name,
        writer: bool,
    ) -> Option<CellId> {
        let timeline = self.timelines.get_mut(&name)?;
        let present = timeline.present;
        timeline.holders.add(member);
        self.cells.add_use(present);
        if writer {
            timeline.writer = Some(lease);
            self.cells.begin_writing(present, member, lease);
        }
        let object = LeasedObject::Timeline { name, cells: vec![present] };
        self.leases.insert(lease, ObjectLease { member, origin, object });
        Some(present)
    }

    /// Leads a lease to the present incarnation of its timeline, for a member that may have seen the former one end.
    pub(super) fn follow(&mut self, member: MemberId, lease: LeaseId) -> Option<Granted> {
        let held = self.leases.get_mut(&lease).filter(|held| held.member == member)?;
        let LeasedObject::Timeline { name, cells } = &mut held.object else { return None };
        let present = self.timelines.get(name)?.present;
        // The lease keeps the former cells, because enqueued work of the member may still wait for them.
        if cells.last() != Some(&present) {
            cells.push(present);
            self.cells.add_use(present);
        }
        self.opened(lease)
    }

    /// Ends the present incarnation of a timeline, if that has not ended. Returns to whom the timeline belongs, and the
    /// lease that signalled.
    pub(super) fn end(
        &mut self,
        name: &Name,
        ending: TimelineEnding,
        out: &mut Effects,
    ) -> Option<(Owned, Option<LeaseId>)> {
        let timeline = self.timelines.get_mut(name).filter(|timeline| !timeline.ended)?;
        timeline.ended = true;
        self.cells.end(timeline.present, ending, out);
        Some((timeline.owned, timeline.writer.take()))
    }

    /// Creates a semaphore.
    pub(super) fn create_semaphore(&mut self, name: Name, memory: ControlMemory, maximum: u32, owned: Owned) {
        self.semaphores.insert(name, Semaphore { memory, maximum, owned, holders: Holders::default() });
    }

    /// Opens a semaphore that exists.
    pub(super) fn open_semaphore(&mut self, lease: LeaseId, (member, origin): (MemberId, RequestId), name: Name) {
        if let Some(semaphore) = self.semaphores.get_mut(&name) {
            semaphore.holders.add(member);
        }
        self.leases.insert(lease, ObjectLease { member, origin, object: LeasedObject::Semaphore { name } });
    }

    /// Drops a lease. Returns its member, and what ends with it.
    pub(super) fn drop_lease(&mut self, id: LeaseId, out: &mut Effects) -> Option<(MemberId, Ended)> {
        let ObjectLease { member, object, .. } = self.leases.remove(&id)?;
        let ended = match object {
            LeasedObject::Timeline { name, cells } => self.drop_timeline_lease(member, id, name, cells, out),
            LeasedObject::Semaphore { name } => self.drop_semaphore_lease(member, name, out),
        };
        Some((member, ended.unwrap_or(Ended::Lease)))
    }

    fn drop_timeline_lease(
        &mut self,
        member: MemberId,
        id: LeaseId,
        name: Name,
        cells: Vec<CellId>,
        out: &mut Effects,
    ) -> Option<Ended> {
        if self.timelines.get(&name).is_some_and(|timeline| timeline.writer == Some(id)) {
            self.end(&name, TimelineEnding::Closed, out);
        }
        for cell in cells {
            self.cells.end_writing(cell, id, out);
            self.cells.drop_use(cell);
        }
        let timeline = self.timelines.get_mut(&name)?;
        timeline.holders.remove(member);
        if !timeline.holders.is_empty() {
            return None;
        }
        // No member is left that could end it, and a stream may still wait although its process has given back its
        // lease.
        self.end(&name, TimelineEnding::Abandoned, out);
        let timeline = self.timelines.remove(&name)?;
        self.cells.drop_use(timeline.present);
        self.cells.end_area(timeline.present);
        Some(Ended::Timeline(name, timeline))
    }

    fn drop_semaphore_lease(&mut self, member: MemberId, name: Name, out: &mut Effects) -> Option<Ended> {
        let semaphore = self.semaphores.get_mut(&name)?;
        let is_last = semaphore.holders.remove(member);
        if !semaphore.holders.is_empty() {
            return is_last.then_some(Ended::Permits(semaphore.memory.fd));
        }
        let semaphore = self.semaphores.remove(&name)?;
        out.push(Effect::Close(vec![semaphore.memory.fd]));
        Some(Ended::Semaphore(name, semaphore))
    }

    /// Returns the answer for a lease, with the memory of its slab or semaphore.
    pub(super) fn opened(&self, lease: LeaseId) -> Option<Granted> {
        let (answer, memory) = match &self.leases.get(&lease)?.object {
            LeasedObject::Timeline { name, cells } => {
                let id = *cells.last()?;
                let incarnation = self.cells.incarnation(id)?;
                let writer = self.timelines.get(name)?.writer == Some(lease);
                let (slab, cell) = self.cells.place_in_slab(id);
                let opened = OpenedTimeline { lease, slab, cell, incarnation, writer };
                (Answer::Timeline(opened), self.cells.slab(slab)?)
            }
            LeasedObject::Semaphore { name } => {
                let semaphore = self.semaphores.get(name)?;
                (Answer::Semaphore { lease, maximum: semaphore.maximum }, semaphore.memory.fd)
            }
        };
        Some(Granted(answer, vec![memory], Unread::Nothing))
    }

    /// Returns the object of a lease, and to whom it belongs.
    pub(super) fn owned(&self, lease: LeaseId) -> Option<(&Name, Owned)> {
        match &self.leases.get(&lease)?.object {
            LeasedObject::Timeline { name, .. } => Some((name, self.timelines.get(name)?.owned)),
            LeasedObject::Semaphore { name } => Some((name, self.semaphores.get(name)?.owned)),
        }
    }

    /// Returns the timeline that a lease signals, if it signals one.
    pub(super) fn written(&self, lease: LeaseId) -> Option<&Name> {
        let LeasedObject::Timeline { name, .. } = &self.leases.get(&lease)?.object else { return None };
        (self.timelines.get(name)?.writer == Some(lease)).then_some(name)
    }

    /// Returns the one of these leases that a request created.
    pub(super) fn lease_of(&self, leases: &BTreeSet<LeaseId>, request: RequestId) -> Option<LeaseId> {
        let is_made = |lease: &&LeaseId| self.leases.get(lease).is_some_and(|held| held.origin == request);
        leases.iter().find(is_made).copied()
    }

    /// Returns the cell of a timeline, if its incarnation has not ended.
    pub(crate) fn live_cell(&self, name: &Name) -> Option<CellAt> {
        self.cells.at(self.timelines.get(name).filter(|timeline| !timeline.ended)?.present)
    }

    /// Returns the memory of semaphores.
    pub(crate) fn semaphore_memory(&self) -> impl Iterator<Item = FdId> {
        self.semaphores.values().map(|semaphore| semaphore.memory.fd)
    }

    pub(super) fn timelines(&self) -> &BTreeMap<Name, Timeline> {
        &self.timelines
    }

    pub(super) fn semaphores(&self) -> &BTreeMap<Name, Semaphore> {
        &self.semaphores
    }

    pub(super) fn leases(&self) -> &BTreeMap<LeaseId, ObjectLease> {
        &self.leases
    }
}
