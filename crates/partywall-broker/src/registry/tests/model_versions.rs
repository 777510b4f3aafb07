//! Versions in the model: how they are committed, opened, grown and attached to queues.

use super::{
    model::{Model, ModelAttachment, ModelEffects, ModelMember, ModelVersion, VersionLease, WaitFor, named, over, uid},
    *,
};
use crate::registry::types::joined;

impl Model {
    pub(super) fn commit(
        &mut self,
        member: MemberId,
        request: RequestId,
        commit: &wire::Commit,
        received: &Received,
        effects: &mut ModelEffects,
    ) -> Outcome {
        let wire::Commit { name, facts, if_absent, owner, claim, .. } = commit;
        let shared = facts.shared;
        let memory = Arc::new(Memory::of(commit, &received.fds, received.blocks).unwrap());
        let uid = uid(member);
        if let Some(claim) = claim
            && !self.claims.iter().any(|c| c.id == *claim && c.member == member && c.name == *name)
        {
            return Err(Refusal::Stale { what: Handle::Claim });
        }
        if let Some(owner) = owner {
            let may = |m: &ModelMember| {
                matches!(m.state(), MemberState::Alive | MemberState::LostContext | MemberState::Suspect)
            };
            if super::model::uid(*owner) != uid || !self.members.iter().any(|m| m.id == *owner && may(m)) {
                return Err(Refusal::NoSuchMember { whom: Whom::Member(owner.0), near: Vec::new() });
            }
        }
        match self.latest(name) {
            Some(latest) => self.only(member, latest.uid, OtherUsers::Create { name: name.to_string() })?,
            None => self.under_own_names(member, name, false)?,
        }
        if let Some(latest) = self.latest(name)
            && (*if_absent || memory.control.is_some() || latest.memory.control.is_some())
        {
            return Err(Refusal::NameExists {
                name: name.clone(),
                version: latest.number,
                is: latest.memory.facts.named(),
            });
        }
        if memory.control.is_some()
            && let Some((name, owner)) = self.foreign_timeline_under(uid, name)
        {
            return Err(Refusal::OtherUser { what: OtherUsers::Create { name: name.to_string() }, owner, uid });
        }
        let names = self.names() + u64::from(self.latest(name).is_none());
        over(Limit::Names, self.bounds.names, names)?;
        if self.latest(name).is_none() && claim.is_none() {
            self.one_more_name(uid)?;
        }
        self.more_at(uid, memory.facts.place, memory.held_bytes(), memory.other_bytes())?;
        let fds = memory.fds().len() as u64;
        over(Limit::Fds, self.bounds.fds, self.fds() + fds)?;
        self.more_memory(uid, fds, 0)?;
        self.one_more_lease(member)?;

        self.ends.retain(|(ended, _)| ended != name);
        let number = self.numbers.entry(name.clone()).or_default();
        *number += 1;
        let number = *number;
        let pid = pid(member);
        let named = named(&memory);
        if self.latest(name).is_none() {
            self.note(named, name, (uid, shared), Change::Created { pid });
        }
        self.note(named, name, (uid, shared), Change::Committed { version: number, bytes: memory.bytes(), pid });
        self.versions.iter_mut().filter(|v| v.name == *name).for_each(|v| v.latest = false);
        let lease = self.lease_version(member, name, number, request);
        self.versions.push(ModelVersion {
            name: name.clone(),
            number,
            memory,
            committer: pid,
            uid,
            at: self.now,
            owner: Some(lease),
            keeper: *owner,
            growths: 0,
            latest: true,
            withdrawn: false,
            notice: None,
            stale: None,
        });
        self.claims.retain(|r| Some(r.id) != *claim);
        for waiting in self.waits.clone() {
            let open = match waiting.waits_for {
                WaitFor::Open(open) if open.name == *name && open.version.is_none_or(|v| v == number) => open,
                WaitFor::Build(of) if of == *name => {
                    Open { name: of, version: None, access: Access::Read, wait: false }
                }
                _ => continue,
            };
            self.waits.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
            let outcome = self.open(waiting.member, waiting.ticket, &open);
            effects.notices.push((waiting.member, waiting.ticket, outcome));
        }
        Ok(Answer::Committed { version: number, lease })
    }

    pub(super) fn held(&self, member: MemberId, lease: LeaseId) -> Result<&ModelVersion, Refusal> {
        let held = self.version_leases.iter().find(|h| h.id == lease && h.member == member);
        let held = held.ok_or(Refusal::Stale { what: Handle::Lease })?;
        Ok(self.version(&held.name, held.number))
    }

    pub(super) fn attach(
        &mut self,
        member: MemberId,
        queue: LeaseId,
        segment: LeaseId,
        effects: &mut ModelEffects,
    ) -> Outcome {
        let (queue, object) = self.queue_of(member, queue)?;
        let found = self.held(member, segment)?;
        let segment = (found.name.clone(), found.number);
        if found.memory.control.is_some() {
            return Err(Refusal::invalid("a queue holds nothing but segments"));
        }
        if found.memory.facts.kind == Kind::Legacy {
            return Err(Refusal::CannotHold { name: segment.0, version: segment.1 });
        }
        let own: Vec<_> = self.attachments.iter().filter(|a| a.queue == queue).collect();
        if let Some(existing) = own.iter().find(|a| a.segment == segment) {
            return Ok(Answer::Attached { attachment: existing.number });
        }
        over(Limit::Attachments, self.bounds.attachments.into(), own.len() as u64 + 1)?;
        let entry = (0..).find(|entry| own.iter().all(|a| a.number % 32 != *entry)).unwrap();
        let before = self.given.iter().filter(|(of, number)| *of == queue && number % 32 == entry).count() as u32;
        let number = entry + 32 * before;
        self.given.push((queue.clone(), number));
        self.attachments.push(ModelAttachment { queue, number, segment });
        effects.control.push(Effect::Attach { object, attachment: number });
        Ok(Answer::Attached { attachment: number })
    }

    pub(super) fn queue_of(&self, member: MemberId, lease: LeaseId) -> Result<((Name, u64), FdId), Refusal> {
        let version = self.held(member, lease)?;
        match version.memory.control {
            Some(BlockControl { object: Some(object), .. }) if named(&version.memory) == Named::Queue => {
                Ok(((version.name.clone(), version.number), object.fd))
            }
            _ => Err(Refusal::invalid("only a queue has segments attached")),
        }
    }

    pub(super) fn attached_segment(&self, queue: &(Name, u64), attachment: u32) -> Result<(Name, u64), Refusal> {
        let found = self.attachments.iter().find(|a| a.queue == *queue && a.number == attachment);
        let gone = || Refusal::NotAttached { queue: queue.0.clone(), attachment };
        found.map(|a| a.segment.clone()).ok_or_else(gone)
    }

    pub(super) fn is_attached(&self, version: &ModelVersion) -> bool {
        self.attachments.iter().any(|a| a.segment.0 == version.name && a.segment.1 == version.number)
    }

    /// Returns the numbers of the attachments of the queue that a member's lease is on.
    pub(super) fn attached_to(&self, member: MemberId, lease: LeaseId) -> Vec<u32> {
        let Ok((queue, _)) = self.queue_of(member, lease) else { return Vec::new() };
        self.attachments.iter().filter(|a| a.queue == queue).map(|a| a.number).collect()
    }

    /// Returns the leases of a member on versions for which `is_meant` is true.
    pub(super) fn holds_on(&self, member: MemberId, is_meant: impl Fn(&ModelVersion) -> bool) -> Vec<LeaseId> {
        let own = self.version_leases.iter().filter(|h| h.member == member);
        own.filter(|h| is_meant(self.version(&h.name, h.number))).map(|h| h.id).collect()
    }

    pub(super) fn version(&self, name: &Name, number: u64) -> &ModelVersion {
        self.versions.iter().find(|v| v.name == *name && v.number == number).unwrap()
    }

    pub(super) fn grow(
        &mut self,
        member: MemberId,
        growth: &wire::Grow,
        received: &Received,
        effects: &mut ModelEffects,
    ) -> Outcome {
        let version = self.held(member, growth.lease)?;
        let name = version.name.clone();
        let number = version.number;
        let before = Arc::clone(&version.memory);
        let why = if before.facts.reserved == 0 {
            Some(NoGrowth::Fixed)
        } else if version.owner.is_none() {
            Some(NoGrowth::CommitterGone)
        } else if version.owner != Some(growth.lease) {
            Some(NoGrowth::NotCommitter)
        } else if version.growths != growth.growths {
            Some(NoGrowth::Behind)
        } else {
            None
        };
        if let Some(why) = why {
            return Err(version.cannot_grow(why));
        }
        if before.facts.kind != growth.kind {
            return Err(Refusal::invalid("a version has one kind of memory"));
        }
        let (chunks, table) = joined(growth.kind, &growth.chunks, &growth.table, &received.fds).unwrap();
        let mut memory = Memory { table, tensors: growth.tensors, ..(*before).clone() };
        memory.chunks.extend(chunks);
        if memory.bytes() > before.facts.reserved {
            let why = NoGrowth::Reserved { reserved: before.facts.reserved, needed: memory.bytes() };
            return Err(version.cannot_grow(why));
        }
        over(Limit::Growths, self.bounds.growths, version.growths + 1)?;
        over(Limit::Chunks, self.bounds.chunks, memory.chunks.len() as u64)?;
        let bytes = |memory: &Memory| memory.bytes() + memory.other_bytes();
        over(Limit::Bytes, self.bounds.bytes, self.bytes() - bytes(&before) + bytes(&memory))?;
        over(Limit::Fds, self.bounds.fds, self.fds() - before.fds().len() as u64 + memory.fds().len() as u64)?;
        self.more_on_node(uid(member), memory.facts.place, memory.bytes() - before.bytes())?;
        let more = memory.fds().len().saturating_sub(before.fds().len()) as u64;
        let grown = memory.bytes() - before.bytes() + memory.other_bytes().saturating_sub(before.other_bytes());
        self.more_memory(uid(member), more, grown)?;

        effects.closed.extend(before.table_fd());
        for version in self.versions.iter_mut().filter(|v| v.name == name && v.number == number) {
            version.memory = Arc::new(memory.clone());
            version.growths += 1;
        }
        self.notify_growth(&name, number, &Ok(Answer::Done), effects);
        Ok(Answer::Done)
    }

    fn notify_growth(&mut self, name: &Name, number: u64, outcome: &Outcome, effects: &mut ModelEffects) {
        for waiting in self.waits.clone() {
            if let WaitFor::Growth(lease) = &waiting.waits_for
                && self.version_leases.iter().any(|h| h.id == *lease && h.name == *name && h.number == number)
            {
                self.notify(&waiting, outcome.clone(), effects);
            }
        }
    }

    pub(super) fn open(&mut self, member: MemberId, request: RequestId, open: &Open) -> Outcome {
        let Open { name, version, access, wait } = open;
        let latest = self.latest(name).map(|v| v.number);
        let wanted = version.or(latest);
        let found = self.versions.iter().find(|v| v.name == *name && Some(v.number) == wanted);
        let found = found.filter(|v| !v.withdrawn || version.is_some() && v.is_lost());
        if let Some(version) = found {
            return self.grant(member, request, name, version.number, *access);
        }
        match (self.numbers.get(name), version) {
            (Some(last), Some(v)) if v <= last || !wait => {
                let not_found = Refusal::VersionNotFound { name: name.clone(), version: *v, latest };
                if self.end_of(name, *version).is_some() {
                    return Err(self.unknown(member, name, *version));
                }
                let newest = self.versions.iter().filter(|v| v.name == *name).max_by_key(|v| v.number).unwrap();
                if !newest.memory.facts.shared {
                    self.only(member, newest.uid, OtherUsers::Open { name: name.to_string() })?;
                }
                Err(not_found)
            }
            _ if *wait => self.enqueue(member, request, WaitFor::Open(open.clone())),
            _ => Err(self.unknown(member, name, *version)),
        }
    }

    pub(super) fn grant(
        &mut self,
        member: MemberId,
        request: RequestId,
        name: &Name,
        number: u64,
        access: Access,
    ) -> Outcome {
        let version = self.version(name, number);
        if !version.memory.facts.shared {
            self.only(member, version.uid, OtherUsers::Open { name: name.to_string() })?;
        }
        version.check_stale()?;
        let simulated = self.is_simulated(version.uid);
        if version.memory.facts.place.needs_driver() && simulated != self.is_simulated(uid(member)) {
            return Err(Refusal::OtherDriver { simulated });
        }
        if access == Access::Write && !version.memory.facts.mutable {
            return Err(Refusal::ReadOnly { name: name.clone(), version: number });
        }
        self.one_more_lease(member)?;
        let lease = self.lease_version(member, name, number, request);
        Ok(self.opened(lease))
    }

    pub(super) fn opened(&self, lease: LeaseId) -> Answer {
        let held = self.version_leases.iter().find(|h| h.id == lease).unwrap();
        let version = self.version(&held.name, held.number);
        let memory = &version.memory;
        let (chunks, table, _) = apart(&memory.chunks, &memory.table);
        Answer::Opened(Opened {
            lease,
            name: held.name.clone(),
            version: held.number,
            facts: memory.facts,
            uid: version.uid,
            chunks,
            handles: memory.handles.clone(),
            table,
            growths: version.growths,
        })
    }

    /// Drops a lease. Returns the control memory in which the member's blocks have to be returned.
    pub(super) fn drop_version_lease(&mut self, lease: LeaseId, effects: &mut ModelEffects) -> Option<BlockControl> {
        for waiting in self.waits.clone() {
            if matches!(waiting.waits_for, WaitFor::Withdrawal(l) | WaitFor::Growth(l) if l == lease) {
                self.notify(&waiting, Err(Refusal::Stale { what: Handle::Lease }), effects);
            }
        }
        let place = self.version_leases.iter().position(|h| h.id == lease).unwrap();
        let VersionLease { member, name, number, .. } = self.version_leases.remove(place);
        if let Some(version) = self.versions.iter_mut().find(|v| v.owner == Some(lease)) {
            version.owner = None;
            let name = version.name.clone();
            let number = version.number;
            let last = Err(version.cannot_grow(NoGrowth::CommitterGone));
            self.notify_growth(&name, number, &last, effects);
        }
        let on_it = |h: &&VersionLease| h.name == name && h.number == number;
        let is_held = self.version_leases.iter().any(|h| on_it(&h));
        let holds_more = self.version_leases.iter().filter(on_it).any(|h| h.member == member);
        let version = self.version(&name, number);
        let control = version.memory.control;
        let latest = version.latest;
        let shared = version.memory.facts.lifetime == Lifetime::Shared;
        if !is_held && latest && shared {
            self.withdraw(&name, Ending::Unused, member, effects);
        }
        control.filter(|_| !holds_more && (is_held || latest && !shared))
    }

    pub(super) fn holds_of(&self, member: MemberId) -> Vec<LeaseId> {
        self.version_leases.iter().filter(|h| h.member == member).map(|h| h.id).collect()
    }

    fn lease_version(&mut self, member: MemberId, name: &Name, number: u64, origin: RequestId) -> LeaseId {
        self.leases += 1;
        let id = LeaseId(self.leases);
        self.version_leases.push(VersionLease { id, member, name: name.clone(), number, origin });
        id
    }

    pub(super) fn info(&self, v: &ModelVersion) -> wire::VersionInfo {
        wire::VersionInfo {
            version: v.number,
            kind: v.memory.facts.kind,
            place: v.memory.facts.place,
            bytes: v.memory.bytes(),
            tensors: 1,
            mutable: v.memory.facts.mutable,
            reserved: v.memory.facts.reserved,
            growths: v.growths,
            lifetime: v.memory.facts.lifetime,
            control: v.memory.facts.control,
            committer: v.committer,
            owner: v.keeper.filter(|id| self.members.iter().any(|m| m.id == *id)).map_or(v.committer, pid),
            uid: v.uid,
            shared: v.memory.facts.shared,
            leases: (self.version_leases.iter().filter(|h| h.is_on(v)).count()
                + self.attachments.iter().filter(|a| a.segment == (v.name.clone(), v.number)).count())
                as u32,
            notice: v.notice.map(|(_, notice)| notice),
            lost: v.is_lost(),
            committed_at: v.at,
        }
    }

    pub(super) fn latest(&self, name: &Name) -> Option<&ModelVersion> {
        self.versions.iter().find(|v| v.name == *name && v.latest)
    }
}
