//! Timelines and semaphores of the model. The registry chooses the next cell; the model checks that the choice is
//! allowed.

use super::{
    model::{Model, ModelEffects, over},
    *,
};
use crate::registry::{
    effect::{Handle, Holder, ObjectRow, Refused, SemaphoreRow, TimelineRow},
    state::Life,
};

/// The model's control memory.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Rows of departed members whose permits are being returned.
    pub(super) uncleared: BTreeSet<u16>,
    /// The cell that the registry has taken for the current event.
    pub(super) chosen: Option<CellAt>,
    pub(super) leases: Vec<ObjectLease>,
    pub(super) slabs: Vec<FdId>,
    timelines: Vec<ModelTimeline>,
    semaphores: Vec<Semaphore>,
    /// Cells, by number.
    cells: Vec<ModelCell>,
}

/// A lease.
#[derive(Debug)]
pub(super) struct ObjectLease {
    pub(super) id: LeaseId,
    pub(super) member: MemberId,
    origin: RequestId,
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
}

/// A semaphore.
#[derive(Debug)]
struct Semaphore {
    name: Name,
    memory: ControlMemory,
    maximum: u32,
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
            let cell = &mut self.objects.cells[timeline.present as usize];
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
    ) -> Result<(), Refused> {
        over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
        let timeline = self.objects.timelines.iter().find(|timeline| timeline.name == open.name);
        let former = match timeline {
            None => {
                over(Limit::Timelines, self.bounds.timelines, self.objects.timelines.len() as u64 + 1)?;
                None
            }
            Some(ModelTimeline { writer: Some(writer), .. }) if open.writer => {
                let held = self.objects.leases.iter().find(|held| held.id == *writer).unwrap();
                return Err(Refused::WriterExists { name: open.name.clone(), pid: pid(held.member) });
            }
            Some(timeline) if open.writer && self.objects.cells[timeline.present as usize].ended => {
                Some(timeline.present)
            }
            Some(_) => return Ok(()),
        };
        let idle = (0..self.objects.cells.len() as u64).filter(|number| self.is_idle(*number)).count() as u64;
        let is_fresh =
            |objects: &Objects| (objects.cells.len() as u64) < objects.slabs.len() as u64 * self.bounds.cells;
        if idle <= self.bounds.rest && !is_fresh(&self.objects) {
            match self.room_for_slab(slab.map_or(0, |slab| slab.bytes)) {
                Ok(()) => self.objects.slabs.push(slab.take().unwrap().fd),
                Err(refused) if idle == 0 => return Err(refused),
                Err(_) => {}
            }
        }
        let at = self.objects.chosen.unwrap();
        let slab = self.objects.slabs.iter().position(|slab| *slab == at.slab).unwrap() as u64;
        let number = slab * self.bounds.cells + u64::from(at.index);
        let incarnation = former.map_or(0, |former| self.objects.cells[former as usize].incarnation) + 1;
        let cell = ModelCell { incarnation, ended: false, writer: None, unobserved: false, by: None };
        if idle > self.bounds.rest || !is_fresh(&self.objects) {
            assert!(self.is_idle(number), "cell {number} is in use");
            self.objects.cells[number as usize] = cell;
        } else {
            assert_eq!(number, self.objects.cells.len() as u64, "fresh cells are taken in order");
            self.objects.cells.push(cell);
        }
        let from = former.map(|former| self.at(former));
        effects.control.push(Effect::StartCell { at, from, incarnation });
        match self.objects.timelines.iter_mut().find(|timeline| timeline.name == open.name) {
            Some(timeline) => timeline.present = number,
            None => {
                self.objects.timelines.push(ModelTimeline { name: open.name.clone(), present: number, writer: None });
                self.note(Named::Timeline, &open.name, Change::Created { pid: pid(member) });
            }
        }
        Ok(())
    }

    fn room_for_slab(&self, bytes: u64) -> Result<(), Refused> {
        let allowed = self.bounds.slabs * self.bounds.cells;
        over(Limit::Timelines, allowed, (self.objects.slabs.len() as u64 + 1) * self.bounds.cells)
            .map_err(|_| Refused::Limit { limit: Limit::Timelines, allowed, needed: allowed + 1 })?;
        over(Limit::Fds, self.bounds.fds, self.fds() + 1)?;
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + bytes)
    }

    /// Returns whether a cell has neither readers nor a writer.
    fn is_idle(&self, number: u64) -> bool {
        let cell = self.objects.cells[number as usize];
        let is_seen = self.objects.leases.iter().any(|held| held.cells.contains(&number));
        let is_current = self.objects.timelines.iter().any(|timeline| timeline.present == number);
        !is_seen && !is_current && cell.writer.is_none() && !cell.unobserved
    }

    pub(super) fn follow(&mut self, member: MemberId, lease: LeaseId) -> Outcome {
        let stale = Refused::Stale(Handle::Lease);
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
            incarnation: self.objects.cells[number as usize].incarnation,
            writer,
        }))
    }

    pub(super) fn abandon_timeline(&mut self, name: &Name, effects: &mut ModelEffects) -> Outcome {
        if !self.objects.timelines.iter().any(|timeline| timeline.name == *name) {
            let kind = ObjectKind::Timeline;
            return Err(self.no_object(kind, name));
        }
        self.end_timeline(name, TimelineEnding::Abandoned, effects);
        Ok(Answer::Done)
    }

    pub(super) fn end_timeline(&mut self, name: &Name, ending: TimelineEnding, effects: &mut ModelEffects) {
        let Some(timeline) = self.objects.timelines.iter_mut().find(|timeline| timeline.name == *name) else { return };
        let writer = timeline.writer.take();
        let present = timeline.present;
        if !std::mem::replace(&mut self.objects.cells[present as usize].ended, true) {
            effects.control.push(Effect::EndCell { at: self.at(present), ending });
            let pid = writer.map_or(0, |lease| self.holder_pid(lease));
            match ending {
                TimelineEnding::OwnerDied => self.note(Named::Timeline, name, Change::OwnerDied { pid }),
                TimelineEnding::OwnerFaulted => self.note(Named::Timeline, name, Change::OwnerFaulted { pid }),
                _ => {}
            }
        }
    }

    pub(super) fn settle(&mut self, at: CellAt) {
        let slab = self.objects.slabs.iter().position(|slab| *slab == at.slab).unwrap() as u64;
        let cell = &mut self.objects.cells[(slab * self.bounds.cells + u64::from(at.index)) as usize];
        if cell.ended {
            (cell.writer, cell.unobserved) = (None, false);
        }
    }

    /// Returns the ended cells that may still be written.
    pub(super) fn restless(&self) -> Vec<CellAt> {
        let restless = |cell: &ModelCell| cell.ended && (cell.writer.is_some() || cell.unobserved);
        let numbers = (0..).zip(&self.objects.cells).filter(|(_, cell)| restless(cell)).map(|(number, _)| number);
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
    ) -> Result<(), Refused> {
        over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
        let OpenSemaphore { name, maximum, .. } = open;
        match self.objects.semaphores.iter().find(|semaphore| semaphore.name == *name) {
            Some(semaphore) if semaphore.maximum == *maximum => return Ok(()),
            Some(semaphore) => {
                let asked = *maximum;
                let maximum = semaphore.maximum;
                return Err(Refused::WrongMaximum { name: name.clone(), maximum, asked });
            }
            None => {}
        }
        over(Limit::Semaphores, self.bounds.semaphores, self.objects.semaphores.len() as u64 + 1)?;
        over(Limit::Fds, self.bounds.fds, self.fds() + 1)?;
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + created.map_or(0, |created| created.bytes))?;
        self.objects.semaphores.push(Semaphore {
            name: name.clone(),
            memory: created.take().unwrap(),
            maximum: *maximum,
        });
        self.note(Named::Semaphore, name, Change::Created { pid: pid(member) });
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
            let cell = &mut self.objects.cells[number as usize];
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
                self.objects.timelines.retain(|timeline| timeline.name != name);
                self.note(Named::Timeline, &name, Change::Withdrawn { pid: pid(member) });
            }
            ObjectKind::Timeline => {}
            _ => {
                let semaphore = self.objects.semaphores.iter().find(|semaphore| semaphore.name == name).unwrap();
                let semaphore = semaphore.memory.fd;
                if !is_open {
                    effects.closed.push(semaphore);
                    self.objects.semaphores.retain(|semaphore| semaphore.name != name);
                    self.note(Named::Semaphore, &name, Change::Withdrawn { pid: pid(member) });
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
        for cell in self.objects.cells.iter_mut().filter(|cell| cell.writer == Some(member)) {
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
        self.objects.cells.iter().any(|cell| cell.writer == Some(member))
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

    pub(super) fn objects_listed(&self) -> Vec<ObjectRow> {
        let mut timelines: Vec<_> = self.objects.timelines.iter().collect();
        timelines.sort_by_key(|timeline| timeline.name.clone());
        let mut semaphores: Vec<_> = self.objects.semaphores.iter().collect();
        semaphores.sort_by_key(|semaphore| semaphore.name.clone());
        let timelines = timelines.into_iter().map(|timeline| {
            let writer = self.objects.leases.iter().find(|held| timeline.writer == Some(held.id));
            ObjectRow::Timeline(TimelineRow {
                name: timeline.name.clone(),
                at: Some(self.at(timeline.present)),
                incarnation: self.objects.cells[timeline.present as usize].incarnation,
                writer: writer.map(|held| pid(held.member)),
                leases: self.leases_on(ObjectKind::Timeline, &timeline.name).count() as u32,
            })
        });
        let semaphores = semaphores.into_iter().map(|semaphore| {
            ObjectRow::Semaphore(SemaphoreRow {
                name: semaphore.name.clone(),
                memory: semaphore.memory.fd,
                maximum: semaphore.maximum,
                leases: self.leases_on(ObjectKind::Semaphore, &semaphore.name).count() as u32,
            })
        });
        timelines.chain(semaphores).collect()
    }

    fn no_object(&self, kind: ObjectKind, name: &Name) -> Refused {
        Refused::ObjectNotFound { kind, name: name.clone(), near: Vec::new(), is: self.kinds_of(name) }
    }

    pub(super) fn has_object(&self, kind: ObjectKind, name: &Name) -> bool {
        match kind {
            ObjectKind::Timeline => self.objects.timelines.iter().any(|timeline| timeline.name == *name),
            _ => self.objects.semaphores.iter().any(|semaphore| semaphore.name == *name),
        }
    }

    pub(super) fn inspect_object(&self, kind: ObjectKind, name: &Name) -> Outcome {
        let is_it = |row: &&ObjectRow| {
            let of_kind = matches!(row, ObjectRow::Timeline(_)) == (kind == ObjectKind::Timeline);
            of_kind && row.name() == name
        };
        let rows = self.objects_listed();
        let row = rows.iter().find(is_it).ok_or_else(|| self.no_object(kind, name))?.clone();
        let holders = self.members.iter().filter_map(|record| {
            let leases = self.leases_on(kind, name).filter(|held| held.member == record.id).count() as u32;
            let command = command(record.id);
            let pid = pid(record.id);
            let unproven = record.life == Life::Unproven;
            (leases > 0).then_some(Holder { pid, command, leases, unproven, row: record.row })
        });
        Ok(Answer::Object(Box::new((row, holders.collect()))))
    }

    fn leases_on(&self, kind: ObjectKind, name: &Name) -> impl Iterator<Item = &ObjectLease> {
        self.objects.leases.iter().filter(move |held| held.kind == kind && held.name == *name)
    }

    /// Returns the number of slabs and semaphores, and their bytes.
    pub(super) fn control_memory(&self) -> (u64, u64) {
        let slabs = self.objects.slabs.len() as u64;
        let semaphores = &self.objects.semaphores;
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
        let slab = self.objects.slabs[(number / self.bounds.cells) as usize];
        CellAt { slab, index: (number % self.bounds.cells) as u32 }
    }
}
