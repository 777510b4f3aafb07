//! Timelines and semaphores of the model. The registry chooses the next cell; the model checks that the choice is
//! allowed.

use partywall_wire::{ObjectDetail, ObjectHolder, ObjectInfo, SemaphoreInfo, TimelineInfo};

use super::{
    model::{Model, ModelEffects, over, uid},
    *,
};
use std::collections::BTreeMap;

use crate::registry::{effect::ObjectAt, people::Life};

/// The model's control memory.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Rows of departed members whose permits are being returned.
    pub(super) uncleared: BTreeSet<u16>,
    /// The cell that the registry has taken for the current event.
    pub(super) chosen: Option<CellAt>,
    pub(super) leases: Vec<ObjectLease>,
    /// The slabs that exist, with their numbers.
    pub(super) slabs: Vec<(u32, ModelSlab)>,
    slabs_created: u32,
    timelines: Vec<ModelTimeline>,
    semaphores: Vec<Semaphore>,
    /// Cells that were ever used, by number, in slabs that exist.
    cells: BTreeMap<u64, ModelCell>,
}

/// A slab of one user's own timelines, or of one shared timeline.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelSlab {
    pub(super) fd: FdId,
    uid: u32,
    shared: bool,
}

/// A lease.
#[derive(Debug)]
pub(super) struct ObjectLease {
    pub(super) id: LeaseId,
    pub(super) member: MemberId,
    pub(super) origin: RequestId,
    kind: ObjectKind,
    name: Name,
    /// The cells that it has led to.
    cells: Vec<u64>,
}

/// A timeline.
#[derive(Debug)]
struct ModelTimeline {
    name: Name,
    present: u64,
    writer: Option<LeaseId>,
    uid: u32,
    shared: bool,
}

/// A semaphore.
#[derive(Debug)]
struct Semaphore {
    name: Name,
    memory: ControlMemory,
    maximum: u32,
    uid: u32,
    shared: bool,
}

#[derive(Debug, Clone, Copy)]
struct ModelCell {
    incarnation: u32,
    ended: bool,
    writer: Option<MemberId>,
    /// True if its writer has left, so that the end of its stores is unknown.
    unobserved: bool,
    /// The lease that signals or signalled the timeline, until it is given back.
    by: Option<LeaseId>,
}

/// Which timeline to open, and the slab that was created for that.
pub(super) struct OpenTimeline {
    pub(super) name: Name,
    pub(super) writer: bool,
    pub(super) shared: bool,
    pub(super) slab: Option<ControlMemory>,
}

/// Which semaphore to open, and the memory that was created for that.
pub(super) struct OpenSemaphore {
    pub(super) name: Name,
    pub(super) maximum: u32,
    pub(super) shared: bool,
    pub(super) memory: Option<ControlMemory>,
}

impl Model {
    pub(super) fn open_timeline(
        &mut self,
        member: MemberId,
        request: RequestId,
        open: &OpenTimeline,
        effects: &mut ModelEffects,
    ) -> Outcome {
        let mut unused = open.slab;
        let begun = self.begin_timeline(member, open, &mut unused, effects);
        effects.closed.extend(unused.map(|created| created.fd));
        begun?;
        let lease = self.lease_object(member, request, ObjectKind::Timeline, &open.name);
        let timeline = self.objects.timelines.iter_mut().find(|timeline| timeline.name == open.name).unwrap();
        if open.writer {
            timeline.writer = Some(lease);
            let cell = self.objects.cells.get_mut(&timeline.present).unwrap();
            (cell.writer, cell.by) = (Some(member), Some(lease));
        }
        let present = timeline.present;
        self.objects.leases.last_mut().unwrap().cells.push(present);
        Ok(self.timeline_of(lease).unwrap())
    }

    /// Begins an incarnation of a timeline in a cell that the registry has chosen.
    fn begin_timeline(
        &mut self,
        member: MemberId,
        open: &OpenTimeline,
        slab: &mut Option<ControlMemory>,
        effects: &mut ModelEffects,
    ) -> Result<(), Refusal> {
        self.one_more_lease(member)?;
        let timeline = self.objects.timelines.iter().find(|timeline| timeline.name == open.name);
        let owner = timeline.map_or(uid(member), |timeline| timeline.uid);
        let shared = timeline.map_or(open.shared, |timeline| timeline.shared);
        let former = match timeline {
            None => {
                over(Limit::Timelines, self.bounds.timelines, self.objects.timelines.len() as u64 + 1)?;
                self.under_own_names(member, &open.name, true)?;
                self.one_more_name(owner)?;
                self.within(owner, Limit::Timelines, self.timelines_of(owner), 1)?;
                None
            }
            Some(timeline) => {
                if !timeline.shared {
                    self.only(member, timeline.uid, OtherUsers::Open { name: open.name.to_string() })?;
                }
                match timeline.writer {
                    Some(writer) if open.writer => {
                        let held = self.objects.leases.iter().find(|held| held.id == writer).unwrap();
                        return Err(Refusal::WriterExists { name: open.name.clone(), pid: pid(held.member) });
                    }
                    _ if open.writer && self.objects.cells[&timeline.present].ended => Some(timeline.present),
                    _ => return Ok(()),
                }
            }
        };
        // The slabs in which the timeline may be.
        let of_timeline = former.map(|former| (former / self.bounds.cells) as u32);
        let is_its = |number: u32, slab: &ModelSlab| {
            if shared { Some(number) == of_timeline } else { !slab.shared && slab.uid == owner }
        };
        let its: Vec<_> = self
            .objects
            .slabs
            .iter()
            .filter(|(number, slab)| is_its(*number, slab))
            .map(|(number, _)| *number)
            .collect();
        let cells = self.bounds.cells;
        let numbers = |slab: u32| u64::from(slab) * cells..u64::from(slab + 1) * cells;
        let taken: Vec<_> =
            its.iter().flat_map(|slab| self.objects.cells.range(numbers(*slab)).map(|(number, _)| *number)).collect();
        let idle = taken.iter().filter(|number| self.is_idle(**number)).count() as u64;
        let is_full = taken.len() as u64 == its.len() as u64 * cells;
        let rests = idle > self.bounds.rest;
        let mut created = None;
        if !rests && is_full {
            match self.room_for_slab(its.len() as u64, (owner, shared), slab.map_or(0, |slab| slab.bytes)) {
                Ok(()) => {
                    let number = self.objects.slabs_created;
                    let fd = slab.take().unwrap().fd;
                    self.objects.slabs.push((number, ModelSlab { fd, uid: owner, shared }));
                    self.objects.slabs_created += 1;
                    created = Some(number);
                }
                Err(refused) if idle == 0 => return Err(refused),
                Err(_) => {}
            }
        }
        let at = self.objects.chosen.unwrap();
        let number = self.number(at);
        let incarnation = former.map_or(0, |former| self.objects.cells[&former].incarnation) + 1;
        let cell = ModelCell { incarnation, ended: false, writer: None, unobserved: false, by: None };
        if rests || is_full && created.is_none() {
            assert!(taken.contains(&number) && self.is_idle(number), "cell {number} is in use");
        } else {
            let slab = created.or(its.last().copied()).unwrap();
            let fresh = numbers(slab).find(|number| !self.objects.cells.contains_key(number));
            assert_eq!(Some(number), fresh, "fresh cells are taken in order");
        }
        self.objects.cells.insert(number, cell);
        let from = former.map(|former| self.at(former));
        effects.control.push(Effect::StartCell { at, from, incarnation });
        match self.objects.timelines.iter_mut().find(|timeline| timeline.name == open.name) {
            Some(timeline) => timeline.present = number,
            None => {
                let timeline =
                    ModelTimeline { name: open.name.clone(), present: number, writer: None, uid: owner, shared };
                self.objects.timelines.push(timeline);
                self.note(Named::Timeline, &open.name, (owner, shared), Change::Created { pid: pid(member) });
            }
        }
        Ok(())
    }

    /// Refuses one more slab for a timeline that may be in `slabs` slabs.
    fn room_for_slab(&self, slabs: u64, (owner, shared): (u32, bool), bytes: u64) -> Result<(), Refusal> {
        let most = if shared { 1 } else { self.bounds.slabs };
        if slabs == most {
            let allowed = most * self.bounds.cells;
            return Err(Refusal::Limit { limit: Limit::Timelines, allowed, needed: allowed + 1, holders: Vec::new() });
        }
        over(Limit::Fds, self.bounds.fds, self.fds() + 1)?;
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + bytes)?;
        self.more_memory(owner, 1, bytes)
    }

    /// Closes slabs of shared timelines that do not exist any more and of which no cell is used.
    pub(super) fn close_unused_slabs(&mut self, effects: &mut ModelEffects) {
        let cells = self.bounds.cells;
        let numbers = |slab: u32| u64::from(slab) * cells..u64::from(slab + 1) * cells;
        let is_unused = |(number, slab): &(u32, ModelSlab)| {
            let is_present = self.objects.timelines.iter().any(|t| numbers(*number).contains(&t.present));
            slab.shared
                && !is_present
                && self.objects.cells.range(numbers(*number)).all(|(cell, _)| self.is_idle(*cell))
        };
        let unused: Vec<_> = self.objects.slabs.iter().copied().filter(is_unused).collect();
        for (number, slab) in unused {
            self.objects.slabs.retain(|(other, _)| *other != number);
            self.objects.cells.retain(|cell, _| !numbers(number).contains(cell));
            effects.closed.push(slab.fd);
        }
    }

    /// Returns whether a cell has neither readers nor a writer.
    fn is_idle(&self, number: u64) -> bool {
        let cell = self.objects.cells[&number];
        let is_seen = self.objects.leases.iter().any(|held| held.cells.contains(&number));
        let is_current = self.objects.timelines.iter().any(|timeline| timeline.present == number);
        !is_seen && !is_current && cell.writer.is_none() && !cell.unobserved
    }

    pub(super) fn follow(&mut self, member: MemberId, lease: LeaseId) -> Outcome {
        let stale = Refusal::Stale { what: Handle::Lease };
        let held = self.objects.leases.iter_mut().find(|held| held.id == lease && held.member == member);
        let held = held.filter(|held| held.kind == ObjectKind::Timeline).ok_or(stale)?;
        let present = self.objects.timelines.iter().find(|timeline| timeline.name == held.name).unwrap().present;
        if !held.cells.contains(&present) {
            held.cells.push(present);
        }
        Ok(self.timeline_of(lease).unwrap())
    }

    pub(super) fn timeline_of(&self, lease: LeaseId) -> Option<Answer> {
        let held = self.objects.leases.iter().find(|held| held.id == lease)?;
        let number = *held.cells.last()?;
        let writer = self.objects.timelines.iter().any(|timeline| timeline.writer == Some(lease));
        Some(Answer::Timeline(OpenedTimeline {
            lease,
            slab: (number / self.bounds.cells) as u32,
            cell: (number % self.bounds.cells) as u32,
            incarnation: self.objects.cells[&number].incarnation,
            writer,
        }))
    }

    pub(super) fn abandon_timeline(&mut self, member: MemberId, name: &Name, effects: &mut ModelEffects) -> Outcome {
        let Some(timeline) = self.objects.timelines.iter().find(|timeline| timeline.name == *name) else {
            return Err(self.no_object(member, ObjectKind::Timeline, name));
        };
        self.only(member, timeline.uid, OtherUsers::Abandon { name: name.to_string() })?;
        self.end_timeline(name, TimelineEnding::Abandoned, effects);
        Ok(Answer::Done)
    }

    pub(super) fn end_timeline(&mut self, name: &Name, ending: TimelineEnding, effects: &mut ModelEffects) {
        let Some(timeline) = self.objects.timelines.iter_mut().find(|timeline| timeline.name == *name) else { return };
        let writer = timeline.writer.take();
        let present = timeline.present;
        let owned = (timeline.uid, timeline.shared);
        if !std::mem::replace(&mut self.objects.cells.get_mut(&present).unwrap().ended, true) {
            effects.control.push(Effect::EndCell { at: self.at(present), ending });
            let pid = writer.map_or(0, |lease| self.holder_pid(lease));
            match ending {
                TimelineEnding::OwnerDied => self.note(Named::Timeline, name, owned, Change::OwnerDied { pid }),
                TimelineEnding::OwnerFaulted => self.note(Named::Timeline, name, owned, Change::OwnerFaulted { pid }),
                _ => {}
            }
        }
    }

    pub(super) fn settle(&mut self, at: CellAt) {
        let number = self.number(at);
        let cell = self.objects.cells.get_mut(&number).unwrap();
        if cell.ended {
            (cell.writer, cell.unobserved) = (None, false);
        }
    }

    /// Returns the ended cells that may still be written.
    pub(super) fn restless(&self) -> Vec<CellAt> {
        let restless = |cell: &ModelCell| cell.ended && (cell.writer.is_some() || cell.unobserved);
        let numbers = self.objects.cells.iter().filter(|(_, cell)| restless(cell)).map(|(number, _)| *number);
        numbers.map(|number| self.at(number)).collect()
    }

    pub(super) fn open_semaphore(
        &mut self,
        member: MemberId,
        request: RequestId,
        open: &OpenSemaphore,
        effects: &mut ModelEffects,
    ) -> Outcome {
        let mut unused = open.memory;
        let created = self.create_semaphore(member, open, &mut unused);
        effects.closed.extend(unused.map(|created| created.fd));
        created?;
        let lease = self.lease_object(member, request, ObjectKind::Semaphore, &open.name);
        Ok(Answer::Semaphore { lease, maximum: open.maximum })
    }

    fn create_semaphore(
        &mut self,
        member: MemberId,
        open: &OpenSemaphore,
        created: &mut Option<ControlMemory>,
    ) -> Result<(), Refusal> {
        self.one_more_lease(member)?;
        let OpenSemaphore { name, maximum, shared, .. } = open;
        let found = self.objects.semaphores.iter().find(|semaphore| semaphore.name == *name);
        if let Some(semaphore) = found.filter(|semaphore| !semaphore.shared) {
            self.only(member, semaphore.uid, OtherUsers::Open { name: name.to_string() })?;
        }
        match self.objects.semaphores.iter().find(|semaphore| semaphore.name == *name) {
            Some(semaphore) if semaphore.maximum == *maximum => return Ok(()),
            Some(semaphore) => {
                let asked = *maximum;
                let maximum = semaphore.maximum;
                return Err(Refusal::WrongMaximum { name: name.clone(), maximum, asked });
            }
            None => {}
        }
        over(Limit::Semaphores, self.bounds.semaphores, self.objects.semaphores.len() as u64 + 1)?;
        over(Limit::Fds, self.bounds.fds, self.fds() + 1)?;
        let bytes = created.map_or(0, |created| created.bytes);
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + bytes)?;
        let uid = uid(member);
        self.under_own_names(member, name, false)?;
        self.one_more_name(uid)?;
        self.within(uid, Limit::Semaphores, self.semaphores_of(uid), 1)?;
        self.more_memory(uid, 1, bytes)?;
        self.objects.semaphores.push(Semaphore {
            name: name.clone(),
            memory: created.take().unwrap(),
            maximum: *maximum,
            uid,
            shared: *shared,
        });
        self.note(Named::Semaphore, name, (uid, *shared), Change::Created { pid: pid(member) });
        Ok(())
    }

    pub(super) fn known_object(&self, member: MemberId, request: RequestId, kind: ObjectKind) -> Option<Answer> {
        let since = |held: &&ObjectLease| held.member == member && held.origin == request && held.kind == kind;
        let held = self.objects.leases.iter().find(since)?;
        match kind {
            ObjectKind::Timeline => self.timeline_of(held.id),
            _ => {
                let semaphore = self.objects.semaphores.iter().find(|semaphore| semaphore.name == held.name)?;
                Some(Answer::Semaphore { lease: held.id, maximum: semaphore.maximum })
            }
        }
    }

    fn lease_object(&mut self, member: MemberId, origin: RequestId, kind: ObjectKind, name: &Name) -> LeaseId {
        self.leases += 1;
        let id = LeaseId(self.leases);
        self.objects.leases.push(ObjectLease { id, member, origin, kind, name: name.clone(), cells: Vec::new() });
        id
    }

    /// Gives a lease back.
    pub(super) fn drop_object_lease(&mut self, lease: LeaseId, effects: &mut ModelEffects) {
        let index = self.objects.leases.iter().position(|held| held.id == lease).unwrap();
        let kind = self.objects.leases[index].kind;
        let name = self.objects.leases[index].name.clone();
        self.end_timeline_of(lease, TimelineEnding::Closed, effects);
        let ObjectLease { member, cells, .. } = self.objects.leases.remove(index);
        for number in cells {
            let cell = self.objects.cells.get_mut(&number).unwrap();
            if cell.by == Some(lease) {
                cell.by = None;
                if cell.writer.is_some() || cell.unobserved {
                    effects.control.push(Effect::SettleCell(self.at(number)));
                }
            }
        }
        let on_it = |held: &&ObjectLease| held.kind == kind && held.name == name;
        let is_open = self.objects.leases.iter().any(|held| on_it(&held));
        match kind {
            ObjectKind::Timeline if !is_open => {
                self.end_timeline(&name, TimelineEnding::Abandoned, effects);
                let timeline = self.objects.timelines.iter().find(|timeline| timeline.name == name).unwrap();
                let owned = (timeline.uid, timeline.shared);
                self.objects.timelines.retain(|timeline| timeline.name != name);
                self.note(Named::Timeline, &name, owned, Change::Withdrawn { pid: pid(member) });
            }
            ObjectKind::Timeline => {}
            _ => {
                let semaphore = self.objects.semaphores.iter().find(|semaphore| semaphore.name == name).unwrap();
                let owned = (semaphore.uid, semaphore.shared);
                let semaphore = semaphore.memory.fd;
                if !is_open {
                    effects.closed.push(semaphore);
                    self.objects.semaphores.retain(|semaphore| semaphore.name != name);
                    self.note(Named::Semaphore, &name, owned, Change::Withdrawn { pid: pid(member) });
                } else if !self.objects.leases.iter().filter(on_it).any(|held| held.member == member) {
                    effects.control.push(Effect::Return { control: semaphore, row: self.member(member).row });
                }
            }
        }
    }

    /// Ends the timelines that a member writes.
    pub(super) fn end_timelines_of(&mut self, member: MemberId, ending: TimelineEnding, effects: &mut ModelEffects) {
        for lease in self.object_leases_of(member) {
            self.end_timeline_of(lease, ending, effects);
        }
    }

    /// Ends the timeline that a lease writes.
    pub(super) fn end_timeline_of(&mut self, lease: LeaseId, ending: TimelineEnding, effects: &mut ModelEffects) {
        let written = self.objects.timelines.iter().find(|timeline| timeline.writer == Some(lease));
        if let Some(name) = written.map(|timeline| timeline.name.clone()) {
            self.end_timeline(&name, ending, effects);
        }
    }

    /// Drops the leases of a member that is gone. Returns the semaphores in which its permits have to be returned.
    pub(super) fn give_objects_back(
        &mut self,
        member: MemberId,
        is_dead: bool,
        effects: &mut ModelEffects,
    ) -> Vec<FdId> {
        for cell in self.objects.cells.values_mut().filter(|cell| cell.writer == Some(member)) {
            (cell.writer, cell.unobserved) = (None, !is_dead);
        }
        let before = effects.control.len();
        self.object_leases_of(member).into_iter().for_each(|lease| self.drop_object_lease(lease, effects));
        let is_return = |effect: &mut Effect| matches!(effect, Effect::Return { .. });
        let returns: Vec<_> = effects.control.extract_if(before.., is_return).collect();
        let semaphores = returns.into_iter().filter_map(|effect| match effect {
            Effect::Return { control, .. } => Some(control),
            _ => None,
        });
        semaphores.collect()
    }

    /// Records that the permits and blocks of a departed member in this memory are being returned.
    pub(super) fn clear_row(&mut self, member: MemberId, control: Vec<FdId>, effects: &mut ModelEffects) {
        let row = self.member(member).row;
        if !control.is_empty() {
            self.objects.uncleared.insert(row);
            effects.control.push(Effect::ClearRow { row, control });
        }
    }

    /// Returns whether a member may still store in some cell.
    pub(super) fn writes(&self, member: MemberId) -> bool {
        self.objects.cells.values().any(|cell| cell.writer == Some(member))
    }

    pub(super) fn timelines_written_by(&self, member: MemberId) -> u32 {
        let writers = self.objects.timelines.iter().filter_map(|timeline| timeline.writer);
        writers
            .filter(|lease| self.objects.leases.iter().any(|held| held.id == *lease && held.member == member))
            .count() as u32
    }

    pub(super) fn semaphores_open_to(&self, member: MemberId) -> Vec<FdId> {
        let open = |semaphore: &&Semaphore| {
            let mut leases = self.leases_on(ObjectKind::Semaphore, &semaphore.name);
            leases.any(|held| held.member == member)
        };
        let mut semaphores: Vec<_> =
            self.objects.semaphores.iter().filter(open).map(|semaphore| semaphore.memory.fd).collect();
        semaphores.sort();
        semaphores
    }

    fn holder_pid(&self, lease: LeaseId) -> u32 {
        pid(self.objects.leases.iter().find(|held| held.id == lease).unwrap().member)
    }

    fn object_leases_of(&self, member: MemberId) -> Vec<LeaseId> {
        self.objects.leases.iter().filter(|held| held.member == member).map(|held| held.id).collect()
    }

    pub(super) fn objects_listed(&self, member: MemberId) -> Vec<(ObjectInfo, ObjectAt)> {
        let mut timelines: Vec<_> =
            self.objects.timelines.iter().filter(|t| self.sees(member, t.uid, t.shared)).collect();
        timelines.sort_by_key(|timeline| timeline.name.clone());
        let mut semaphores: Vec<_> =
            self.objects.semaphores.iter().filter(|s| self.sees(member, s.uid, s.shared)).collect();
        semaphores.sort_by_key(|semaphore| semaphore.name.clone());
        let timelines = timelines.into_iter().map(|timeline| {
            let writer = self.objects.leases.iter().find(|held| timeline.writer == Some(held.id));
            let info = TimelineInfo {
                name: timeline.name.to_string(),
                incarnation: self.objects.cells[&timeline.present].incarnation,
                writer: writer.map(|held| pid(held.member)),
                value: 0,
                announced: 0,
                ending: None,
                leases: self.leases_on(ObjectKind::Timeline, &timeline.name).count() as u32,
                uid: timeline.uid,
                shared: timeline.shared,
            };
            (ObjectInfo::Timeline(info), ObjectAt::Timeline(Some(self.at(timeline.present))))
        });
        let semaphores = semaphores.into_iter().map(|semaphore| {
            let info = SemaphoreInfo {
                name: semaphore.name.to_string(),
                maximum: semaphore.maximum,
                held: 0,
                waiting: 0,
                leases: self.leases_on(ObjectKind::Semaphore, &semaphore.name).count() as u32,
                uid: semaphore.uid,
                shared: semaphore.shared,
            };
            (ObjectInfo::Semaphore(info), ObjectAt::Semaphore(semaphore.memory.fd))
        });
        timelines.chain(semaphores).collect()
    }

    fn no_object(&self, member: MemberId, kind: ObjectKind, name: &Name) -> Refusal {
        Refusal::ObjectNotFound { kind, name: name.clone(), near: Vec::new(), is: self.kinds_of(member, name) }
    }

    fn owner_of(&self, kind: ObjectKind, name: &Name) -> Option<(u32, bool)> {
        match kind {
            ObjectKind::Timeline => self.objects.timelines.iter().find(|t| t.name == *name).map(|t| (t.uid, t.shared)),
            _ => self.objects.semaphores.iter().find(|s| s.name == *name).map(|s| (s.uid, s.shared)),
        }
    }

    pub(super) fn sees_object(&self, member: MemberId, kind: ObjectKind, name: &Name) -> bool {
        self.owner_of(kind, name).is_some_and(|(owner, shared)| self.sees(member, owner, shared))
    }

    /// Returns a timeline under a name that belongs to another user than `uid`.
    pub(super) fn foreign_timeline_under(&self, uid: u32, name: &Name) -> Option<(Name, u32)> {
        let below = format!("{name}/");
        let is_it = |t: &&ModelTimeline| t.name.as_str().starts_with(&below) && t.uid != uid;
        self.objects.timelines.iter().filter(is_it).min_by_key(|t| t.name.clone()).map(|t| (t.name.clone(), t.uid))
    }

    /// Returns the number of a user's timelines.
    pub(super) fn timelines_of(&self, uid: u32) -> u64 {
        self.objects.timelines.iter().filter(|t| t.uid == uid).count() as u64
    }

    /// Returns the number of a user's semaphores.
    pub(super) fn semaphores_of(&self, uid: u32) -> u64 {
        self.objects.semaphores.iter().filter(|s| s.uid == uid).count() as u64
    }

    pub(super) fn inspect_object(
        &self,
        member: MemberId,
        kind: ObjectKind,
        name: &Name,
        effects: &mut ModelEffects,
    ) -> Outcome {
        let is_it = |(info, _): &&(ObjectInfo, ObjectAt)| info.kind() == kind && info.name() == name.as_str();
        if let Some((owner, _)) = self.owner_of(kind, name)
            && !self.sees_object(member, kind, name)
        {
            self.only(member, owner, OtherUsers::Inspect { name: name.to_string() })?;
        }
        let rows = self.objects_listed(member);
        let (info, at) = rows.iter().find(is_it).ok_or_else(|| self.no_object(member, kind, name))?.clone();
        let holders = self.members.iter().filter_map(|record| {
            let leases = self.leases_on(kind, name).filter(|held| held.member == record.id).count() as u32;
            let command = command(record.id);
            let pid = pid(record.id);
            let unproven = record.life == Life::Unproven;
            let holder = holder(pid, &command, leases, unproven);
            (leases > 0).then_some((ObjectHolder { holder, permits: 0 }, record.row))
        });
        let (holders, rows) = holders.unzip();
        effects.unread = Unread::Object(at, rows);
        Ok(Answer::Object(Box::new(ObjectDetail { info, holders })))
    }

    fn leases_on(&self, kind: ObjectKind, name: &Name) -> impl Iterator<Item = &ObjectLease> {
        self.objects.leases.iter().filter(move |held| held.kind == kind && held.name == *name)
    }

    /// Returns the number of slabs and semaphores, and their bytes: those of one user, or all.
    pub(super) fn control_memory(&self, of: Option<u32>) -> (u64, u64) {
        let is_meant = |uid: u32| of.is_none_or(|of| of == uid);
        let slabs = self.objects.slabs.iter().filter(|(_, slab)| is_meant(slab.uid)).count() as u64;
        let semaphores: Vec<_> = self.objects.semaphores.iter().filter(|semaphore| is_meant(semaphore.uid)).collect();
        (
            slabs + semaphores.len() as u64,
            slabs * SLAB_BYTES + semaphores.iter().map(|semaphore| semaphore.memory.bytes).sum::<u64>(),
        )
    }

    /// Returns the numbers of timelines and semaphores.
    pub(super) fn object_counts(&self) -> (u64, u64) {
        (self.objects.timelines.len() as u64, self.objects.semaphores.len() as u64)
    }

    fn at(&self, number: u64) -> CellAt {
        CellAt { slab: self.slab((number / self.bounds.cells) as u32), index: (number % self.bounds.cells) as u32 }
    }

    /// Returns the memory of a slab.
    pub(super) fn slab(&self, number: u32) -> FdId {
        self.objects.slabs.iter().find(|(other, _)| *other == number).unwrap().1.fd
    }

    fn number(&self, at: CellAt) -> u64 {
        let (slab, _) = self.objects.slabs.iter().find(|(_, slab)| slab.fd == at.slab).unwrap();
        u64::from(*slab) * self.bounds.cells + u64::from(at.index)
    }
}
