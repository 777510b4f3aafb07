//! Leases on timelines and semaphores: who opens them, and what ends with a lease.

use super::{
    Registry,
    effect::{Answer, Decision, Effect, Effects},
    event::Call,
    near::near,
    objects::{Ended, Source, Writing},
    people::Owned,
    types::{
        CellAt, Change, ControlMemory, FdId, LeaseId, Limit, MemberId, Name, Named, ObjectKind, OtherUsers, Refusal,
        RequestId, STALE_LEASE, TimelineEnding, limit,
    },
};

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
            let found = self.objects.timelines().get(&name).map(|timeline| timeline.owned);
            let owned = found.unwrap_or(Owned { uid: self.people.uid_of(member), shared });
            if !self.objects.begin(&name, owned, (source, slab), before) {
                return Err(Refusal::invalid("no cell was created for the timeline"));
            }
            if let Some(memory) = slab.filter(|_| source == Source::Slab) {
                self.people.charge(owned.uid, |totals| totals.add_control(memory));
            }
            if found.is_none() {
                self.people.user_mut(owned.uid).timelines += 1;
                self.log(Named::Timeline, &name, owned, Change::Created { pid: self.people.pid_of(member) });
            }
        }
        let lease = self.people.lease_object(member);
        let present = self.objects.open_timeline(lease, (member, request), name, writer);
        if let Some(present) = present.filter(|_| writer) {
            self.people.add_cell(member, present);
        }
        self.objects.opened(lease).ok_or(STALE_LEASE)
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
        let found = self.objects.timelines().get(name);
        let owned = found.map_or(Owned { uid: self.people.uid_of(member), shared }, |timeline| timeline.owned);
        let begins = match found {
            None => {
                limit(Limit::Timelines, self.people.bounds().timelines, self.objects.timelines().len() as u64 + 1)?;
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
        let area = self.objects.cells.area(owned, found.map(|timeline| timeline.present));
        let room = || self.people.check_control(owned.uid, slab.map_or(0, |slab| slab.bytes));
        if begins { self.objects.cells.source(area, room).map(Some) } else { Ok(None) }
    }

    /// Ends all waits for values that a timeline has not reached.
    pub(super) fn abandon_timeline(&mut self, member: MemberId, name: &Name, before: &mut Effects) -> Decision {
        let Some(timeline) = self.objects.timelines().get(name) else {
            let near = near(self.objects.timelines(), name, |timeline| self.people.sees(member, timeline.owned));
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
        let written = record.object_leases.iter().filter_map(|lease| self.objects.written(*lease).cloned());
        for name in written.collect::<Vec<_>>() {
            self.end_timeline(&name, ending, out);
        }
    }

    pub(super) fn end_timeline(&mut self, name: &Name, ending: TimelineEnding, out: &mut Effects) {
        let Some((owned, writer)) = self.objects.end(name, ending, out) else { return };
        let pid = writer.and_then(|lease| self.holder_pid(lease)).unwrap_or(0);
        match ending {
            TimelineEnding::OwnerDied => self.log(Named::Timeline, name, owned, Change::OwnerDied { pid }),
            TimelineEnding::OwnerFaulted => self.log(Named::Timeline, name, owned, Change::OwnerFaulted { pid }),
            _ => {}
        }
    }

    /// Opens a semaphore, and creates it if there is none, in `memory`.
    pub(super) fn open_semaphore(
        &mut self,
        (member, request): (MemberId, RequestId),
        (name, maximum, shared): (Name, u32, bool),
        memory: Option<ControlMemory>,
        out: &mut Effects,
    ) -> Decision {
        let is_new = self.check_open_semaphore(member, &name, maximum, memory);
        if let Some(unused) = memory.filter(|_| is_new != Ok(true)) {
            out.push(Effect::Close(vec![unused.fd]));
        }
        if is_new? {
            let memory = memory.ok_or(Refusal::invalid("no memory was created for the semaphore"))?;
            let uid = self.people.uid_of(member);
            let owned = Owned { uid, shared };
            self.people.charge(uid, |totals| totals.add_control(memory));
            self.people.user_mut(uid).semaphores += 1;
            self.objects.create_semaphore(name.clone(), memory, maximum, owned);
            self.log(Named::Semaphore, &name, owned, Change::Created { pid: self.people.pid_of(member) });
        }
        let lease = self.people.lease_object(member);
        self.objects.open_semaphore(lease, (member, request), name);
        self.objects.opened(lease).ok_or(STALE_LEASE)
    }

    /// Returns whether opening this semaphore creates it, in `memory` if that has been created already.
    pub(super) fn check_open_semaphore(
        &self,
        member: MemberId,
        name: &Name,
        maximum: u32,
        memory: Option<ControlMemory>,
    ) -> Result<bool, Refusal> {
        self.people.check_leases(member)?;
        if let Some(semaphore) = self.objects.semaphores().get(name) {
            self.people.check_access(member, name, semaphore.owned)?;
            if semaphore.maximum != maximum {
                let has = semaphore.maximum;
                return Err(Refusal::WrongMaximum { name: name.clone(), maximum: has, asked: maximum });
            }
            return Ok(false);
        }
        limit(Limit::Semaphores, self.people.bounds().semaphores, self.objects.semaphores().len() as u64 + 1)?;
        limit(Limit::Fds, self.people.bounds().fds, self.people.totals().fds + 1)?;
        let bytes = memory.map_or(0, |memory| memory.bytes);
        limit(Limit::Bytes, self.people.bounds().bytes, self.people.totals().bytes().saturating_add(bytes))?;
        self.check_new_name(member, name)?;
        let uid = self.people.uid_of(member);
        self.people.check_names(uid)?;
        self.people.check_one_more(uid, Limit::Semaphores, |user| user.semaphores)?;
        self.people.check_memory(uid, 1, bytes)?;
        Ok(true)
    }

    /// Gives back a lease on a timeline or semaphore.
    pub(super) fn release_object_lease(&mut self, member: MemberId, lease: LeaseId, out: &mut Effects) -> Decision {
        self.objects.leases().get(&lease).filter(|held| held.member == member).ok_or(STALE_LEASE)?;
        if self.people.member(member).is_some_and(|record| record.lost_context) {
            // As with a lease on memory, only the end of the process proves that its work is over.
            if let Some(name) = self.objects.written(lease).cloned() {
                self.end_timeline(&name, TimelineEnding::Closed, out);
            }
        } else if let (Some(semaphore), Some(row)) = (self.drop_object_lease(lease, out), self.people.row(member)) {
            out.push(Effect::Return { control: semaphore, row });
        }
        Ok(Answer::Done.into())
    }

    /// Drops a lease on a timeline or semaphore. Returns the memory of the semaphore if the member's permits there have
    /// to be returned.
    pub(super) fn drop_object_lease(&mut self, lease: LeaseId, out: &mut Effects) -> Option<FdId> {
        let (member, ended) = self.objects.drop_lease(lease, out)?;
        self.people.drop_object_lease(member, lease);
        let (name, named, owned) = match ended {
            Ended::Lease => return None,
            Ended::Permits(semaphore) => return Some(semaphore),
            Ended::Timeline(name, timeline) => {
                self.people.user_mut(timeline.owned.uid).timelines -= 1;
                (name, Named::Timeline, timeline.owned)
            }
            Ended::Semaphore(name, semaphore) => {
                self.people.charge(semaphore.owned.uid, |totals| totals.subtract_control(semaphore.memory));
                self.people.user_mut(semaphore.owned.uid).semaphores -= 1;
                (name, Named::Semaphore, semaphore.owned)
            }
        };
        self.log(named, &name, owned, Change::Withdrawn { pid: self.people.pid_of(member) });
        None
    }

    /// Records that everything promised in an ended cell has been stored.
    pub(super) fn settle_cell(&mut self, at: CellAt) {
        if let Some((cell, writer)) = self.objects.cells.settle(at) {
            self.people.drop_cell(writer, cell);
        }
    }

    /// Ends a member's writing in all its cells. A dead member stores nothing more; the streams of one that left may.
    pub(super) fn settle_cells_of(&mut self, member: MemberId, dead: bool) {
        let writing = if dead { Writing::Over } else { Writing::Unobserved };
        for cell in self.people.take_cells(member) {
            self.objects.cells.set_writing(cell, writing);
        }
    }

    /// Closes the slabs of shared timelines that no process can use any more.
    pub(super) fn close_unused_slabs(&mut self, out: &mut Effects) {
        for slab in self.objects.cells.close_unused(out) {
            self.people.charge(slab.uid, |totals| totals.subtract_control(slab.memory));
        }
    }

    /// Returns the pid of the process that has a lease.
    pub(super) fn holder_pid(&self, lease: LeaseId) -> Option<u32> {
        Some(self.people.member(self.objects.leases().get(&lease)?.member)?.identity.pid)
    }
}
