//! Endings in the model: names are withdrawn, devices lost, members evicted, and what a member had is given back.

use super::{
    model::{DeadMember, Model, ModelEffects, ModelMember, ModelVersion, WaitFor, named, uid},
    *,
};
use crate::registry::{
    names::{REMEMBERED, Tombstone},
    people::{Life, Owned},
    types::{Notice, Refusal, Staleness, Then, WithdrawalId},
};

impl Model {
    /// Withdraws the names that this lease owns.
    pub(super) fn withdraw_owned(&mut self, lease: LeaseId, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        let ends = |v: &&mut ModelVersion| {
            let is_bound = v.memory.facts.lifetime == Lifetime::Owned || v.memory.facts.kind == Kind::Legacy;
            v.owner == Some(lease) && v.keeper.is_none() && is_bound
        };
        if let Some(version) = self.versions.iter_mut().find(ends) {
            if version.latest {
                let name = version.name.clone();
                self.withdraw(&name, ending, by, effects);
            } else if version.memory.facts.kind == Kind::Legacy {
                version.withdrawn = true;
                self.notify_withdrawn(effects);
            }
        }
    }

    pub(super) fn withdraw(&mut self, name: &Name, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        self.withdraw_by(name, ending, by, None, effects);
    }

    pub(super) fn withdraw_by(
        &mut self,
        name: &Name,
        ending: Ending,
        by: MemberId,
        notice: Option<(WithdrawalId, Notice)>,
        effects: &mut ModelEffects,
    ) {
        let latest = self.latest(name).unwrap();
        let named = named(&latest.memory);
        let version = latest.number;
        let legacy = latest.memory.facts.kind == Kind::Legacy;
        let owned = (latest.uid, latest.memory.facts.shared);
        let (pid, command) = match ending {
            Ending::DeviceLost(_) => (0, "".into()),
            _ => (pid(by), command(by)),
        };
        let end = Owned { uid: owned.0, shared: owned.1 };
        self.ends.push((name.clone(), Tombstone { ending, version, pid, command, at: self.now, legacy, owned: end }));
        for version in self.versions.iter_mut().filter(|v| v.name == *name) {
            if !version.withdrawn {
                version.notice = notice;
            }
            (version.latest, version.withdrawn) = (false, true);
        }
        let change = match ending {
            Ending::OwnerDied => Change::OwnerDied { pid },
            Ending::DeviceLost(place) => Change::DeviceLost { place },
            _ => Change::Withdrawn { pid },
        };
        self.note(named, name, owned, change);
        if let Some((_, notice)) = notice {
            self.note(named, name, owned, Change::DeadlineSet { notice });
        }
        self.notify_withdrawn(effects);
    }

    fn notify_withdrawn(&mut self, effects: &mut ModelEffects) {
        for waiting in self.waits.clone() {
            if let WaitFor::Withdrawal(lease) = &waiting.waits_for
                && let Some(held) = self.version_leases.iter().find(|h| h.id == *lease)
                && let Some(version) = self.versions.iter().find(|v| held.is_on(v) && v.withdrawn)
            {
                let answer = version.withdrawn_answer();
                self.notify(&waiting, Ok(answer), effects);
            }
        }
    }

    pub(super) fn notice_of(&self, name: &Name) -> Option<Notice> {
        let noticed = self.versions.iter().filter(|v| v.name == *name && v.notice.is_some());
        noticed.max_by_key(|v| v.number).and_then(|v| v.notice).map(|(_, notice)| notice)
    }

    pub(super) fn deadline_passed(&mut self, id: WithdrawalId, effects: &mut ModelEffects) {
        let of = |v: &ModelVersion| v.notice.is_some_and(|(noticed, _)| noticed == id);
        let Some(place) = self.withdrawals.iter().position(|(withdrawal, _)| *withdrawal == id) else { return };
        let (_, by) = self.withdrawals.remove(place);
        let Some(version) = self.versions.iter().rfind(|v| of(v)) else { return };
        let (_, notice) = version.notice.unwrap();
        let name = version.name.clone();
        let last = self.versions.iter().filter(|v| of(v)).max_by_key(|v| v.number).unwrap();
        let named = named(&last.memory);
        let owned = self.withdrawn[&id];
        if notice.then != Then::Wait {
            let stale = Staleness::Withdrawn(notice);
            self.versions.iter_mut().filter(|v| of(v) && !v.is_lost()).for_each(|v| v.stale = Some(stale));
        }
        let reads = |m: &&ModelMember| !self.holds_on(m.id, of).is_empty();
        let mut readers: Vec<_> = self.members.iter().filter(reads).map(|m| m.id).collect();
        readers.sort();
        self.note(named, &name, owned, Change::DeadlinePassed { then: notice.then, readers: readers.len() as u32 });
        for reader in readers.clone() {
            if self.policy(reader, &notice, owned.0) != Then::Stale {
                continue;
            }
            self.end_views(reader, of, effects);
        }
        for reader in readers {
            let evicts = self.policy(reader, &notice, owned.0) == Then::Evict;
            if evicts && reader != by && !self.is_unproven(reader) {
                self.evict_one(reader, by, effects);
            }
        }
    }

    pub(super) fn lose(&mut self, place: Place, chunks: &[FdId], effects: &mut ModelEffects) {
        let is_lost = |v: &ModelVersion| v.chunk_at(place).is_some_and(|chunk| chunks.contains(&chunk));
        let mut lost = BTreeSet::new();
        for version in self.versions.iter_mut().filter(|v| is_lost(v)) {
            (version.stale, version.withdrawn) = (Some(Staleness::DeviceLost(place)), true);
            lost.insert((version.name.clone(), version.number));
        }
        for (name, number) in &lost {
            if self.latest(name).is_some_and(|latest| latest.number == *number) {
                self.withdraw(name, Ending::DeviceLost(place), MemberId(0), effects);
            }
        }
        self.notify_withdrawn(effects);
        let is_lost = |v: &ModelVersion| lost.contains(&(v.name.clone(), v.number));
        let reads = |m: &&ModelMember| !self.holds_on(m.id, is_lost).is_empty();
        let readers: BTreeSet<_> = self.members.iter().filter(reads).map(|m| m.id).collect();
        for reader in readers {
            self.end_views(reader, is_lost, effects);
        }
    }

    /// Reports stale versions to a reader, and detaches it from topics among them.
    fn end_views(&mut self, reader: MemberId, of: impl Fn(&ModelVersion) -> bool, effects: &mut ModelEffects) {
        self.notify_stale(reader, &of, effects);
        let row = self.members.iter().find(|m| m.id == reader).unwrap().row;
        let held = self.version_leases.iter().filter(|h| h.member == reader);
        let topics = held.map(|h| self.version(&h.name, h.number)).filter(|v| of(v));
        let topics = topics.filter_map(|v| v.memory.control.filter(|_| named(&v.memory) == Named::Topic)?.object);
        let topics: BTreeSet<_> = topics.map(|memory| memory.fd).collect();
        let ending = TimelineEnding::Closed;
        effects.control.extend(topics.into_iter().map(|object| Effect::Detach { object, row, ending }));
    }

    /// Readers of other users are not evicted.
    fn policy(&self, reader: MemberId, notice: &Notice, owner: u32) -> Then {
        if notice.then == Then::Evict && uid(reader) != owner { Then::Stale } else { notice.then }
    }

    pub(super) fn notify_stale(
        &self,
        member: MemberId,
        of: impl Fn(&ModelVersion) -> bool,
        effects: &mut ModelEffects,
    ) {
        let own = self.version_leases.iter().filter(|h| h.member == member);
        let stale = own.filter_map(|h| {
            let version = Some(self.version(&h.name, h.number)).filter(|v| of(v))?;
            let stale = version.stale?;
            let evicts = matches!(stale, Staleness::Withdrawn(notice) if self.policy(member, &notice, version.uid) != Then::Stale);
            (!evicts).then_some((h.id, stale))
        });
        let leases: Vec<_> = stale.collect();
        if !leases.is_empty() {
            effects.control.push(Effect::Stale { member, leases });
        }
    }

    pub(super) fn evict_one(&mut self, id: MemberId, by: MemberId, effects: &mut ModelEffects) {
        let pid = pid(by);
        let at = self.now;
        if self.member(id).evicted.replace((pid, at)).is_none() {
            for waiting in self.waits.clone().iter().filter(|q| q.member == id) {
                self.notify(waiting, Err(Refusal::Evicted { by: pid, at }), effects);
            }
            self.notify_of(id, Ending::Removed, by, effects);
        }
    }

    pub(super) fn end_of(&self, name: &Name, version: Option<u64>) -> Option<Tombstone> {
        let (_, tombstone) = self.ends.iter().find(|(ended, _)| ended == name)?;
        let meant = version.is_none() || version == Some(tombstone.version);
        (meant && self.now < tombstone.at + REMEMBERED).then(|| tombstone.clone())
    }

    pub(super) fn unknown(&self, member: MemberId, name: &Name, version: Option<u64>) -> Refusal {
        let is = self.kinds_of(member, name);
        let name = name.clone();
        let end = self.end_of(&name, version);
        match end.filter(|end| self.sees(member, end.owned.uid, end.owned.shared)) {
            Some(tombstone) if tombstone.legacy || matches!(tombstone.ending, Ending::DeviceLost(_)) => {
                Refusal::Ended { name, end: tombstone.end() }
            }
            ended => Refusal::NotFound { name, near: Vec::new(), is, ended: ended.map(|ended| Box::new(ended.end())) },
        }
    }

    pub(super) fn kinds_of(&self, member: MemberId, name: &Name) -> Vec<Named> {
        let latest = self.latest(name).filter(|latest| self.sees(member, latest.uid, latest.memory.facts.shared));
        let mut kinds: Vec<_> = latest.map(|latest| named(&latest.memory)).into_iter().collect();
        let objects = [(ObjectKind::Timeline, Named::Timeline), (ObjectKind::Semaphore, Named::Semaphore)];
        kinds.extend(
            objects.into_iter().filter(|(kind, _)| self.sees_object(member, *kind, name)).map(|(_, named)| named),
        );
        kinds
    }

    /// Withdraws the names that this member owns.
    pub(super) fn withdraw_all_owned(
        &mut self,
        member: MemberId,
        ending: Ending,
        by: MemberId,
        effects: &mut ModelEffects,
    ) {
        self.holds_of(member).into_iter().for_each(|lease| self.withdraw_owned(lease, ending, by, effects));
        let mut left: Vec<_> =
            self.versions.iter().filter(|v| v.keeper == Some(member)).map(|v| v.name.clone()).collect();
        left.sort();
        left.dedup();
        for name in left {
            if self.latest(&name).is_some_and(|v| v.keeper == Some(member)) {
                self.withdraw(&name, ending, by, effects);
            }
        }
    }

    pub(super) fn notify_of(&mut self, member: MemberId, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        self.waits.retain(|q| q.member != member);
        self.abandon_claims(member, effects);
        self.withdraw_all_owned(member, ending, by, effects);
        let ending = match ending {
            Ending::OwnerDied => TimelineEnding::OwnerDied,
            Ending::Withdrawn => TimelineEnding::Closed,
            _ => TimelineEnding::Evicted,
        };
        self.end_timelines_of(member, ending, effects);
        self.detach(member, ending, effects);
    }

    pub(super) fn pools_open_to(&self, member: MemberId) -> Vec<FdId> {
        let is_open = |v: &&ModelVersion| self.version_leases.iter().any(|h| h.member == member && h.is_on(v));
        let pools = self.versions.iter().filter(is_open).filter_map(|v| Some(v.memory.control?.slot_table()));
        pools.collect::<BTreeSet<_>>().into_iter().collect()
    }

    pub(super) fn detach(&mut self, member: MemberId, ending: TimelineEnding, effects: &mut ModelEffects) {
        let row = self.member(member).row;
        let is_held = |v: &&ModelVersion| self.version_leases.iter().any(|h| h.member == member && h.is_on(v));
        let objects = self.versions.iter().filter(is_held).filter_map(|v| v.memory.control?.object);
        let objects: BTreeSet<_> = objects.map(|memory| memory.fd).collect();
        effects.control.extend(objects.into_iter().map(|object| Effect::Detach { object, row, ending }));
    }

    pub(super) fn give_back(&mut self, member: MemberId, is_dead: bool, effects: &mut ModelEffects) {
        let mut control = self.give_objects_back(member, is_dead, effects);
        for lease in self.holds_of(member) {
            control.extend(self.drop_version_lease(lease, effects).map(|control| control.slot_table()));
        }
        self.clear_row(member, control, effects);
        let before = self.pending_close.len();
        self.collect_garbage(effects);
        let place = self.members.iter().position(|m| m.id == member).unwrap();
        let ModelMember { id, since, simulated, .. } = self.members.remove(place);
        if is_dead && self.pending_close.len() > before {
            let bytes = self.pending_close[before..].iter().map(|(.., bytes, _)| bytes).sum();
            self.dead_members.push(DeadMember { id, since, simulated, bytes, until: CloseId(0) });
        }
    }

    pub(super) fn is_unproven(&self, member: MemberId) -> bool {
        self.members.iter().any(|m| m.id == member && m.life == Life::Unproven)
    }

    /// Returns the bytes of the versions that selected members held, each counted once.
    pub(super) fn bytes_of(&self, is_meant: impl Fn(MemberId) -> bool) -> u64 {
        let held = |v: &&ModelVersion| self.version_leases.iter().any(|h| is_meant(h.member) && h.is_on(v));
        self.versions.iter().filter(held).map(|v| v.memory.bytes()).sum()
    }

    pub(super) fn departed(&self, member: MemberId) -> wire::Freed {
        wire::Freed {
            member: member.0,
            pid: pid(member),
            command: command(member).to_string(),
            leases: self.leases_of(member) as u32,
            bytes: self.bytes_of(|holder| holder == member),
        }
    }

    pub(super) fn abandon_claims(&mut self, member: MemberId, effects: &mut ModelEffects) {
        while let Some(i) = self.claims.iter().position(|c| c.member == member) {
            self.pass_claim_on(i, effects);
        }
    }

    pub(super) fn pass_claim_on(&mut self, claim: usize, effects: &mut ModelEffects) {
        let name = self.claims.remove(claim).name;
        let waiting = self.waits.iter().filter(|q| matches!(&q.waits_for, WaitFor::Build(of) if *of == name));
        for next in waiting.cloned().collect::<Vec<_>>() {
            let allowed = self.under_own_names(next.member, &name, false);
            match allowed.and_then(|_| self.one_more_name(uid(next.member))) {
                Ok(_) => {
                    let answer = self.grant_claim(next.member, next.ticket, &name);
                    return self.notify(&next, Ok(answer), effects);
                }
                Err(refused) => self.notify(&next, Err(refused), effects),
            }
        }
    }

    pub(super) fn collect_garbage(&mut self, effects: &mut ModelEffects) {
        // A closed queue gives up the segments that it holds.
        loop {
            let is_held = |v: &ModelVersion| self.version_leases.iter().any(|h| h.is_on(v));
            let is_needed = |v: &ModelVersion| v.latest || is_held(v) || self.is_attached(v);
            let Some(place) = self.versions.iter().position(|v| !is_needed(v)) else { break };
            let ModelVersion { name, number, memory, uid, .. } = self.versions.remove(place);
            self.pending_close.push((
                name.clone(),
                number,
                named(&memory),
                memory.held_bytes(),
                (uid, memory.facts.shared),
            ));
            effects.closed.extend(memory.fds());
            self.attachments.retain(|a| a.queue != (name.clone(), number));
            self.given.retain(|(queue, _)| *queue != (name.clone(), number));
        }
        let versions = &self.versions;
        self.withdrawals.retain(|(id, _)| versions.iter().any(|v| v.notice.is_some_and(|(of, _)| of == *id)));
        self.numbers.retain(|name, _| versions.iter().any(|v| v.name == *name));
    }
}
