//! Timelines: names with one writer at a time, and their cells.
//!
//! The present incarnation of a timeline is in one cell. It ends with its writer, or when it is abandoned. The next
//! writer gets a fresh cell, and members that use the former one follow when they need to. The name exists while any
//! member has a lease on it.

use std::collections::BTreeMap;

use partywall_wire::OpenedTimeline;
use serde::{Deserialize, Serialize};

use super::{
    Answer, Registry,
    cells::{Cells, Source},
    effect::{Decision, Effect, Effects, Granted, Unread},
    near::near,
    objects::LeasedObject,
    people::Owned,
    types::{
        CellAt, CellId, Change, ControlMemory, LeaseId, Limit, MemberId, Name, Named, ObjectKind, OtherUsers, Refusal,
        RequestId, STALE_LEASE, TimelineEnding, limit,
    },
};

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
    /// Leases by member.
    pub(super) holders: BTreeMap<MemberId, u64>,
}

impl Registry {
    /// Opens a timeline, and creates it if there is none. `slab` is a new one, if one was needed.
    pub(super) fn open_timeline(
        &mut self,
        (member, request): (MemberId, RequestId),
        (name, writer, shared): (Name, bool, bool),
        slab: Option<ControlMemory>,
        before: &mut Effects,
        out: &mut Effects,
    ) -> Decision {
        let source = self.check_open_timeline(member, &name, writer, shared, slab);
        if let Some(unused) = slab.filter(|_| source != Ok(Some(Source::Slab))) {
            out.push(Effect::Close(vec![unused.fd]));
        }
        if let Some(source) = source? {
            let former = self.timelines.get(&name).map(|timeline| timeline.present);
            let incarnation = former.and_then(|cell| self.cells.used.get(&cell)).map_or(0, |cell| cell.incarnation);
            let owned = self
                .timelines
                .get(&name)
                .map_or(Owned { uid: self.people.uid_of(member), shared }, |found| found.owned);
            let area = Cells::area(owned, former.map(|cell| (cell, self.people.bounds())));
            let incarnation = incarnation.wrapping_add(1);
            let started = self.start_cell((area, owned.uid), (source, slab), former, incarnation, before);
            let present = started.ok_or(Refusal::invalid("no cell was created for the timeline"))?;
            match self.timelines.get_mut(&name) {
                Some(timeline) => {
                    timeline.present = present;
                    timeline.ended = false;
                }
                None => {
                    let timeline = Timeline { present, ended: false, writer: None, owned, holders: BTreeMap::new() };
                    self.timelines.insert(name.clone(), timeline);
                    self.people.user_mut(owned.uid).timelines += 1;
                    let pid = self.people.pid_of(member);
                    self.log(Named::Timeline, &name, owned, Change::Created { pid });
                }
            }
            if let Some(former) = former {
                self.cells.drop_use(former, self.people.bounds());
            }
        }
        let Some(timeline) = self.timelines.get_mut(&name) else { return Err(STALE_LEASE) };
        let present = timeline.present;
        *timeline.holders.entry(member).or_default() += 1;
        self.cells.add_use(present);
        let lease =
            self.lease_object(member, request, LeasedObject::Timeline { name: name.clone(), cells: vec![present] });
        if writer {
            self.begin_writing(present, member, lease);
            if let Some(timeline) = self.timelines.get_mut(&name) {
                timeline.writer = Some(lease);
            }
        }
        self.opened_timeline(lease).ok_or(STALE_LEASE)
    }

    /// Returns the source of the cell that opening this timeline needs, or `None` if it needs none.
    pub(super) fn check_open_timeline(
        &self,
        member: MemberId,
        name: &Name,
        writer: bool,
        shared: bool,
        slab: Option<ControlMemory>,
    ) -> Result<Option<Source>, Refusal> {
        self.people.check_leases(member)?;
        let found = self.timelines.get(name);
        let owned = found.map_or(Owned { uid: self.people.uid_of(member), shared }, |timeline| timeline.owned);
        let begins = match found {
            None => {
                limit(Limit::Timelines, self.people.bounds().timelines, self.timelines.len() as u64 + 1)?;
                self.check_new_timeline(member, name)?;
                self.people.check_names(owned.uid)?;
                self.people.check_one_more(owned.uid, Limit::Timelines, |user| user.timelines)?;
                true
            }
            Some(timeline) => {
                self.people.check_access(member, name, owned)?;
                if writer && let Some(writer) = timeline.writer {
                    let pid = self.holder_pid(writer).unwrap_or(0);
                    return Err(Refusal::WriterExists { name: name.clone(), pid });
                }
                writer && timeline.ended
            }
        };
        let area = Cells::area(owned, found.map(|timeline| (timeline.present, self.people.bounds())));
        if begins { self.cell_source(area, owned.uid, slab).map(Some) } else { Ok(None) }
    }

    /// Returns the present incarnation of a timeline, for a member that may have seen the former one end.
    pub(super) fn follow_timeline(&mut self, member: MemberId, lease: LeaseId) -> Decision {
        let held = self.object_leases.get_mut(&lease).filter(|held| held.member == member).ok_or(STALE_LEASE)?;
        let LeasedObject::Timeline { name, cells } = &mut held.object else { return Err(STALE_LEASE) };
        let present = self.timelines.get(name).ok_or(STALE_LEASE)?.present;
        // The lease keeps the former cells, because enqueued work of the member may still wait for them.
        if cells.last() != Some(&present) {
            cells.push(present);
            self.cells.add_use(present);
        }
        self.opened_timeline(lease).ok_or(STALE_LEASE)
    }

    /// Ends all waits for values that a timeline has not reached.
    pub(super) fn abandon_timeline(&mut self, member: MemberId, name: &Name, before: &mut Effects) -> Decision {
        let Some(timeline) = self.timelines.get(name) else {
            let near = near(&self.timelines, name, |timeline| self.people.sees(member, timeline.owned));
            let is = self.kinds_of(member, name);
            return Err(Refusal::ObjectNotFound { kind: ObjectKind::Timeline, name: name.clone(), near, is });
        };
        self.people.check_owner(member, timeline.owned.uid, || OtherUsers::Abandon { name: name.to_string() })?;
        self.end_timeline(name, TimelineEnding::Abandoned, before);
        Ok(Answer::Done.into())
    }

    /// Ends the incarnations that a member writes.
    pub(super) fn end_timelines_of(&mut self, member: MemberId, ending: TimelineEnding, out: &mut Effects) {
        let Some(record) = self.people.member(member) else { return };
        for lease in record.object_leases.iter().copied().collect::<Vec<_>>() {
            self.end_timeline_of(lease, ending, out);
        }
    }

    /// Ends the incarnation that a lease signals, if it signals one.
    pub(super) fn end_timeline_of(&mut self, lease: LeaseId, ending: TimelineEnding, out: &mut Effects) {
        let Some(LeasedObject::Timeline { name, .. }) = self.object_leases.get(&lease).map(|held| &held.object) else {
            return;
        };
        if self.timelines.get(name).is_some_and(|timeline| timeline.writer == Some(lease)) {
            let name = name.clone();
            self.end_timeline(&name, ending, out);
        }
    }

    /// Drops a lease on a timeline.
    pub(super) fn drop_timeline_lease(
        &mut self,
        member: MemberId,
        lease: LeaseId,
        name: &Name,
        cells: Vec<CellId>,
        out: &mut Effects,
    ) {
        if self.timelines.get(name).is_some_and(|timeline| timeline.writer == Some(lease)) {
            self.end_timeline(name, TimelineEnding::Closed, out);
        }
        for cell in cells {
            self.end_writing(cell, lease, out);
            self.cells.drop_use(cell, self.people.bounds());
        }
        let Some(timeline) = self.timelines.get_mut(name) else { return };
        if let Some(held) = timeline.holders.get_mut(&member) {
            *held -= 1;
            if *held == 0 {
                timeline.holders.remove(&member);
            }
        }
        if timeline.holders.is_empty() {
            // No member is left that could end it, and a stream may still wait although its process has given back its
            // lease.
            self.end_timeline(name, TimelineEnding::Abandoned, out);
            if let Some(timeline) = self.timelines.remove(name) {
                self.cells.drop_use(timeline.present, self.people.bounds());
                self.end_area(timeline.present);
                self.people.user_mut(timeline.owned.uid).timelines -= 1;
                let pid = self.people.pid_of(member);
                self.log(Named::Timeline, name, timeline.owned, Change::Withdrawn { pid });
            }
        }
    }

    /// Returns the cell of a timeline, if its incarnation has not ended.
    pub(crate) fn live_cell(&self, name: &Name) -> Option<CellAt> {
        self.at(self.timelines.get(name).filter(|timeline| !timeline.ended)?.present)
    }

    pub(super) fn end_timeline(&mut self, name: &Name, ending: TimelineEnding, out: &mut Effects) {
        let Some(timeline) = self.timelines.get_mut(name).filter(|timeline| !timeline.ended) else { return };
        timeline.ended = true;
        let writer = timeline.writer.take();
        let present = timeline.present;
        let owned = timeline.owned;
        self.end_cell(present, ending, out);
        let pid = writer.and_then(|lease| self.holder_pid(lease)).unwrap_or(0);
        match ending {
            TimelineEnding::OwnerDied => self.log(Named::Timeline, name, owned, Change::OwnerDied { pid }),
            TimelineEnding::OwnerFaulted => self.log(Named::Timeline, name, owned, Change::OwnerFaulted { pid }),
            _ => {}
        }
    }

    /// Returns the answer for a lease on a timeline, with its slab.
    pub(super) fn opened_timeline(&self, lease: LeaseId) -> Option<Granted> {
        let LeasedObject::Timeline { name, cells } = &self.object_leases.get(&lease)?.object else { return None };
        let id = *cells.last()?;
        let incarnation = self.cells.used.get(&id)?.incarnation;
        let writer = self.timelines.get(name)?.writer == Some(lease);
        let (slab, cell) = self.place_in_slab(id);
        let opened = OpenedTimeline { lease, slab, cell, incarnation, writer };
        Some(Granted(Answer::Timeline(opened), vec![self.slab(slab)?], Unread::Nothing))
    }
}
