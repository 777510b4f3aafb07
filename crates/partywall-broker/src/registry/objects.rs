//! The common parts of timelines and semaphores: leases, control memory that the server creates for them, listings.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
};

use partywall_wire::{ObjectDetail, ObjectHolder, ObjectInfo, SemaphoreInfo, TimelineInfo};
use serde::{Deserialize, Serialize};

use super::{
    Answer, Registry,
    cells::Source,
    effect::{Decision, Effect, Effects, Granted, ObjectAt, Unread},
    event::Call,
    near::near,
    pages::{SLOTS_AS_A_BYTE, count, page},
    semaphores::Semaphore,
    timelines::Timeline,
    types::{CellId, FdId, LeaseId, MemberId, Name, ObjectKind, Refusal, RequestId, STALE_LEASE, TimelineEnding},
};

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

/// Control memory that the server has to create before it applies a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlNeeded {
    /// A slab for timelines.
    Slab,
    /// The memory of a semaphore with this many permits.
    Semaphore(u32),
}

impl Registry {
    /// Returns the control memory that the server has to create before it applies a request: a slab if no free cell is
    /// left, or the memory of a new semaphore. `None` if the request needs none, or would be refused.
    pub(crate) fn control_needed(&self, member: MemberId, call: &Call) -> Option<ControlNeeded> {
        self.people.check_evicted(member, call).ok()?;
        match call {
            Call::OpenTimeline { name, writer, shared } => {
                let source = self.check_open_timeline(member, name, *writer, *shared, None);
                (source == Ok(Some(Source::Slab))).then_some(ControlNeeded::Slab)
            }
            Call::OpenSemaphore { name, maximum, .. } => {
                let is_new = self.check_open_semaphore(member, name, *maximum, None);
                (is_new == Ok(true)).then_some(ControlNeeded::Semaphore(*maximum))
            }
            _ => None,
        }
    }

    /// Gives a member a lease on a timeline or semaphore.
    pub(super) fn lease_object(&mut self, member: MemberId, origin: RequestId, object: LeasedObject) -> LeaseId {
        let id = self.people.lease_object(member);
        self.object_leases.insert(id, ObjectLease { member, origin, object });
        id
    }

    /// Gives back a lease on a timeline or semaphore.
    pub(super) fn release_object_lease(&mut self, member: MemberId, lease: LeaseId, out: &mut Effects) -> Decision {
        self.object_leases.get(&lease).filter(|held| held.member == member).ok_or(STALE_LEASE)?;
        if self.people.member(member).is_some_and(|record| record.lost_context) {
            // As with a lease on memory, only the end of the process proves that its work is over.
            self.end_timeline_of(lease, TimelineEnding::Closed, out);
        } else if let (Some(semaphore), Some(row)) = (self.drop_object_lease(lease, out), self.people.row(member)) {
            out.push(Effect::Return { control: semaphore, row });
        }
        Ok(Answer::Done.into())
    }

    /// Drops a lease on a timeline or semaphore. Returns the memory of the semaphore if the member's permits there have
    /// to be returned.
    pub(super) fn drop_object_lease(&mut self, lease: LeaseId, out: &mut Effects) -> Option<FdId> {
        let ObjectLease { member, object, .. } = self.object_leases.remove(&lease)?;
        self.people.drop_object_lease(member, lease);
        match object {
            LeasedObject::Timeline { name, cells } => {
                self.drop_timeline_lease(member, lease, &name, cells, out);
                None
            }
            LeasedObject::Semaphore { name } => self.drop_semaphore_lease(member, &name, out),
        }
    }

    /// Returns the lease on a timeline or semaphore that a request of a member created, if it created one.
    pub(super) fn object_lease_of(&self, member: MemberId, request: RequestId) -> Option<LeaseId> {
        let made = |lease: &&LeaseId| self.object_leases.get(lease).is_some_and(|held| held.origin == request);
        self.people.member(member)?.object_leases.iter().find(made).copied()
    }

    /// Returns the pid of the process that has a lease.
    pub(super) fn holder_pid(&self, lease: LeaseId) -> Option<u32> {
        Some(self.people.members().get(&self.object_leases.get(&lease)?.member)?.identity.pid)
    }

    /// Returns a page of timelines, then of semaphores, that a member sees.
    pub(super) fn list_objects(&self, member: MemberId, after: Option<(ObjectKind, String)>) -> Granted {
        let (timelines, semaphores) = match &after {
            None => (Some(Unbounded), Unbounded),
            Some((ObjectKind::Timeline, name)) => (Some(Excluded(name.as_str())), Unbounded),
            Some((_, name)) => (None, Excluded(name.as_str())),
        };
        let timelines = timelines.into_iter().flat_map(|from| self.timelines.range::<str, _>((from, Unbounded)));
        let timelines = timelines.filter(|(_, timeline)| self.people.sees(member, timeline.owned));
        let semaphores = self.semaphores.range::<str, _>((semaphores, Unbounded));
        let semaphores = semaphores.filter(|(_, semaphore)| self.people.sees(member, semaphore.owned));
        let timelines = timelines.map(|(name, timeline)| self.timeline_row(name, timeline));
        let rows = timelines.chain(semaphores.map(|(name, semaphore)| semaphore_row(name, semaphore)));
        let (objects, more) = page(rows, |(info, _)| {
            // The server counts the permits of each semaphore in the page, which must not delay other members for long.
            let permits =
                if let ObjectInfo::Semaphore(info) = info { info.maximum as usize / SLOTS_AS_A_BYTE } else { 0 };
            info.name().len() + permits
        });
        let (objects, at) = objects.into_iter().unzip();
        Granted(Answer::Objects { objects, more }, Vec::new(), Unread::Objects(at))
    }

    /// Returns everything about one timeline or semaphore.
    pub(super) fn inspect_object(&self, member: MemberId, kind: ObjectKind, name: &Name) -> Decision {
        let found = match kind {
            ObjectKind::Timeline => {
                let timeline = self.timelines.get(name);
                timeline.map(|timeline| (self.timeline_row(name, timeline), &timeline.holders, timeline.owned))
            }
            _ => {
                let semaphore = self.semaphores.get(name);
                semaphore.map(|semaphore| (semaphore_row(name, semaphore), &semaphore.holders, semaphore.owned))
            }
        };
        let Some(((info, at), holders, owned)) = found else {
            let near = match kind {
                ObjectKind::Timeline => {
                    near(&self.timelines, name, |timeline| self.people.sees(member, timeline.owned))
                }
                _ => near(&self.semaphores, name, |semaphore| self.people.sees(member, semaphore.owned)),
            };
            return Err(Refusal::ObjectNotFound { kind, near, is: self.kinds_of(member, name), name: name.clone() });
        };
        self.people.check_sight(member, name, owned)?;
        let (holders, rows) = self.people.holders_of(holders);
        let holders = holders.into_iter().map(|holder| ObjectHolder { holder, permits: 0 }).collect();
        let detail = ObjectDetail { info, holders };
        Ok(Granted(Answer::Object(Box::new(detail)), Vec::new(), Unread::Object(at, rows)))
    }

    fn timeline_row(&self, name: &Name, timeline: &Timeline) -> (ObjectInfo, ObjectAt) {
        let info = TimelineInfo {
            name: name.to_string(),
            incarnation: self.cells.used.get(&timeline.present).map_or(0, |cell| cell.incarnation),
            writer: timeline.writer.and_then(|lease| self.holder_pid(lease)),
            value: 0,
            announced: 0,
            ending: None,
            leases: leases(&timeline.holders),
            uid: timeline.owned.uid,
            shared: timeline.owned.shared,
        };
        (ObjectInfo::Timeline(info), ObjectAt::Timeline(self.at(timeline.present)))
    }
}

fn semaphore_row(name: &Name, semaphore: &Semaphore) -> (ObjectInfo, ObjectAt) {
    let info = SemaphoreInfo {
        name: name.to_string(),
        maximum: semaphore.maximum,
        held: 0,
        waiting: 0,
        leases: leases(&semaphore.holders),
        uid: semaphore.owned.uid,
        shared: semaphore.owned.shared,
    };
    (ObjectInfo::Semaphore(info), ObjectAt::Semaphore(semaphore.memory.fd))
}

fn leases(holders: &BTreeMap<MemberId, u64>) -> u32 {
    count(holders.values().sum())
}
