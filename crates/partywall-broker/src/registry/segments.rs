//! Versions and leases: commit, open, release and withdrawal.

use std::{collections::BTreeMap, sync::Arc};

use partywall_wire::{Commit, Open};

use super::{
    Registry,
    closing::PendingVersion,
    effect::{Answer, Decision, Effect, Effects},
    event::Received,
    names::{Attached, Dropped, Entry, Version, Want},
    near::near,
    people::{Ender, Holders, Owned},
    types::{
        Access, BlockControl, Change, Deadline, Ending, LeaseId, Limit, MemberId, Memory, Name, Named, Notice,
        OtherUsers, Refusal, RequestId, STALE_CLAIM, STALE_LEASE, WithdrawalId, limit,
    },
};

impl Registry {
    /// Creates the next version of a name. All requests that wait for it get a lease in the same step, so they succeed
    /// even if the publisher leaves immediately afterwards.
    pub(super) fn commit(
        &mut self,
        member: MemberId,
        request: RequestId,
        commit: Commit,
        received: Received,
        out: &mut Effects,
    ) -> Decision {
        let memory = Memory::of(&commit, &received.fds, received.blocks).map(Arc::new);
        let checked = memory.and_then(|memory| self.check_commit(member, &commit, &memory).map(|()| memory));
        let memory = checked.inspect_err(|_| out.push(Effect::Close(received.all())))?;
        let Commit { name, claim, owner, .. } = commit;
        let uid = self.people.uid_of(member);
        let owned = Owned { uid, shared: memory.facts.shared };
        self.people.charge(uid, |totals| totals.add(&memory));
        let committer = self.people.pid_of(member);
        let named = memory.facts.named();
        let bytes = memory.bytes();
        let lease = self.people.lease_version(member);
        let version = Version {
            memory,
            committer,
            uid,
            committed_at: self.now,
            owner: Some(lease),
            keeper: owner,
            growths: 0,
            holders: Holders::default(),
            attached: Attached::default(),
            queues: BTreeMap::new(),
            withdrawn: false,
            notice: None,
            stale: None,
        };
        let (number, before) = self.names.add(&name, version);
        if let Some(owner) = owner {
            self.people.keep_name(owner, name.clone(), number);
        }
        if before.is_none() {
            self.people.charge(uid, |totals| totals.names += 1);
            self.log(named, &name, owned, Change::Created { pid: committer });
        }
        self.log(named, &name, owned, Change::Committed { version: number, bytes, pid: committer });
        self.begin_lease(lease, member, &name, number, request);
        if let Some(claim) = claim {
            self.drop_claim(claim);
        }
        self.grant_waiters(&name, number, out);
        self.names.committed_by(lease).ok_or(STALE_LEASE)
    }

    /// Refuses a commit whose name, claim or size does not allow it.
    fn check_commit(&self, member: MemberId, commit: &Commit, memory: &Memory) -> Result<(), Refusal> {
        let name = &commit.name;
        if let Some(claim) = commit.claim {
            let held = self.names.claims().get(&claim).is_some_and(|c| c.member == member && c.name == *name);
            if !held {
                return Err(STALE_CLAIM);
            }
        }
        let uid = self.people.uid_of(member);
        if let Some(owner) = commit.owner {
            self.people.check_may_own(owner, uid)?;
        }
        self.check_replaces(member, name)?;
        let latest = self.names.latest(name);
        // All processes that use a pool by its name must share one pool.
        let alone = commit.if_absent || memory.control.is_some();
        if let Some((version, found)) = latest
            && (alone || found.memory.control.is_some())
        {
            return Err(Refusal::NameExists { name: name.clone(), version, is: found.memory.facts.named() });
        }
        if memory.control.is_some() {
            self.check_names_below(member, name)?;
        }
        let names = self.people.totals().names + u64::from(latest.is_none());
        limit(Limit::Names, self.people.bounds().names, names)?;
        if latest.is_none() && commit.claim.is_none() {
            self.people.check_names(uid)?;
        }
        self.people.check_bytes(uid, memory.facts.place, memory.held_bytes(), memory.other_bytes())?;
        let fds = memory.fds().len() as u64;
        limit(Limit::Fds, self.people.bounds().fds, self.people.totals().fds + fds)?;
        self.people.check_memory(uid, fds, 0)?;
        self.people.check_leases(member)
    }

    /// Opens an existing version, or waits for one that does not exist yet.
    pub(super) fn open(&mut self, member: MemberId, request: RequestId, open: Open) -> Decision {
        let Open { name, version, access, wait } = open;
        let entry = self.names.entry(&name).filter(|entry| !entry.versions.is_empty());
        let (last, latest) = entry.map_or((0, None), |entry| (entry.last, entry.latest));
        let found = match version {
            None => latest,
            // A lost version is refused with the reason.
            Some(v) => {
                let found = entry.and_then(|e| e.versions.get(&v));
                found.filter(|found| !found.withdrawn || found.is_lost()).map(|_| v)
            }
        };
        if let Some(number) = found {
            return self.grant(member, request, &name, number, access);
        }
        match version {
            // The number of a version that is gone is never used again, so waiting would not help.
            Some(version) if entry.is_some() && (version <= last || !wait) => {
                if self.names.ended(&name, Some(version), self.now).is_some() {
                    return Err(self.not_found(member, name, Some(version)));
                }
                let newest = entry.and_then(|entry| entry.versions.last_key_value());
                if let Some((_, newest)) = newest {
                    self.people.check_access(member, &name, newest.owned())?;
                }
                Err(Refusal::VersionNotFound { name, version, latest })
            }
            _ if wait => self.wait(member, request, &name, Want::Open { version, access }),
            _ => Err(self.not_found(member, name, version)),
        }
    }

    /// Grants a lease on an existing version.
    pub(super) fn grant(
        &mut self,
        member: MemberId,
        request: RequestId,
        name: &Name,
        number: u64,
        access: Access,
    ) -> Decision {
        let version = self.names.version(name, number).ok_or(STALE_LEASE)?;
        self.people.check_access(member, name, version.owned())?;
        version.check_stale(name, number)?;
        let simulated = self.people.is_simulated(version.uid);
        if version.memory.facts.place.needs_driver() && simulated != self.people.runs_simulated(member) {
            return Err(Refusal::OtherDriver { simulated });
        }
        let mutable = version.memory.facts.mutable;
        if access == Access::Write && !mutable {
            return Err(Refusal::ReadOnly { name: name.clone(), version: number });
        }
        self.people.check_leases(member)?;
        let lease = self.people.lease_version(member);
        self.begin_lease(lease, member, name, number, request);
        self.names.opened(lease).ok_or(STALE_LEASE)
    }

    /// Drops a lease. Dropping the committer's lease of an owned version withdraws the name, unless `leaves_name` is
    /// set.
    pub(super) fn release(
        &mut self,
        member: MemberId,
        lease: LeaseId,
        leaves_name: bool,
        out: &mut Effects,
    ) -> Decision {
        if self.objects.leases().contains_key(&lease) {
            return self.release_object_lease(member, lease, out);
        }
        self.names.held(member, lease)?;
        let left = if leaves_name { self.names.leave(member, lease) } else { None };
        if let Some((name, number)) = left {
            self.people.keep_name(member, name, number);
        } else {
            self.withdraw_if_owned_by(lease, Ending::Withdrawn, &self.people.ender(member), out);
        }
        // Without its context a process cannot know which of its work still runs. Only its end proves that none does.
        if self.people.member(member).is_none_or(|record| !record.lost_context)
            && let Some(control) = self.drop_version_lease(lease, out)
            && let Some(row) = self.people.row(member)
        {
            out.push(Effect::Return { control: control.slot_table(), row });
        }
        Ok(Answer::Done.into())
    }

    /// Withdraws all names that a member owns.
    pub(super) fn withdraw_names(&mut self, member: MemberId, ending: Ending, by: &Ender, out: &mut Effects) {
        let Some(record) = self.people.member(member) else { return };
        let leases = record.version_leases.clone();
        let names = record.names.clone();
        for lease in leases {
            self.withdraw_if_owned_by(lease, ending, by, out);
        }
        for (name, number) in names {
            if self.names.is_latest(&name, number) {
                self.withdraw(&name, ending, by, None, out);
            }
        }
    }

    /// Removes a name. Its memory stays while any member holds a lease.
    pub(super) fn remove(
        &mut self,
        member: MemberId,
        name: &Name,
        deadline: Option<Deadline>,
        out: &mut Effects,
    ) -> Decision {
        let entry = self.names.entry(name);
        let Some(version) = entry.and_then(|entry| entry.latest) else {
            return Err(match entry.and_then(Entry::notice) {
                Some(notice) => Refusal::Withdrawing { name: name.clone(), notice },
                None => self.not_found(member, name.clone(), None),
            });
        };
        if let Some(found) = self.names.version(name, version) {
            self.people.check_owner(member, found.uid, || OtherUsers::Remove { name: name.to_string() })?;
        }
        let notice = deadline.map(|deadline| self.begin_withdrawal(member, name, deadline, out));
        self.withdraw(name, Ending::Removed, &self.people.ender(member), notice, out);
        let (bytes_kept, holders, _) = self.holders(name, None);
        let queues = self.holding_queues(name, None);
        Ok(Answer::Removed { version, bytes_kept, holders, queues, notice: notice.map(|(_, notice)| notice) }.into())
    }

    /// Withdraws a name: it has no latest version until the next commit, and none of its versions can be opened any
    /// more. The readers of versions that were not withdrawn before get the notice.
    pub(super) fn withdraw(
        &mut self,
        name: &Name,
        ending: Ending,
        by: &Ender,
        notice: Option<(WithdrawalId, Notice)>,
        out: &mut Effects,
    ) {
        let Some((named, owned)) = self.names.withdraw(name, (ending, by, self.now), notice) else { return };
        let pid = by.pid;
        let change = match ending {
            Ending::OwnerDied => Change::OwnerDied { pid },
            Ending::DeviceLost(place) => Change::DeviceLost { place },
            _ => Change::Withdrawn { pid },
        };
        self.people.charge(owned.uid, |totals| totals.names -= 1);
        self.log(named, name, owned, change);
        if let Some((_, notice)) = notice {
            self.log(named, name, owned, Change::DeadlineSet { notice });
        }
        self.notify_withdrawn(name, out);
    }

    /// Withdraws what the committer's lease owns: the name if this is its latest version; or an older version of legacy
    /// memory, because its publisher may free that memory from now on.
    pub(super) fn withdraw_if_owned_by(&mut self, lease: LeaseId, ending: Ending, by: &Ender, out: &mut Effects) {
        let Some((name, number)) = self.names.owned_by(lease) else { return };
        if self.names.is_latest(&name, number) {
            self.withdraw(&name, ending, by, None, out);
        } else if self.names.withdraw_old(&name, number) {
            self.notify_withdrawn(&name, out);
        }
    }

    /// Makes a lease of `member` one on a version that exists.
    fn begin_lease(&mut self, id: LeaseId, member: MemberId, name: &Name, version: u64, origin: RequestId) {
        let bytes = self.names.lease(id, member, name, version, origin);
        self.people.grow(member, bytes);
    }

    /// Ends a lease and refuses the requests that wait by it. Returns the control memory in which the member's blocks
    /// have to be returned.
    pub(super) fn drop_version_lease(&mut self, id: LeaseId, out: &mut Effects) -> Option<BlockControl> {
        let lease = self.names.drop_lease(id)?;
        for ticket in &lease.awaited_by {
            self.conclude(lease.member, *ticket, Err(STALE_LEASE), out);
        }
        let Dropped { owned, is_last, bytes, control } = self.names.let_go(id, &lease).unwrap_or_default();
        self.people.drop_version_lease(lease.member, id, bytes);
        if owned {
            self.notify_last_length(&lease.name, lease.version, out);
        }
        if is_last {
            self.withdraw(&lease.name, Ending::Unused, &self.people.ender(lease.member), None, out);
        }
        let control = control.filter(|_| self.names.is_needed(&lease.name, lease.version));
        self.names.mark_unreferenced(lease.name, lease.version);
        control
    }

    /// Releases the memory of versions that lost their last reference.
    pub(super) fn drop_unreferenced(&mut self, out: &mut Effects) {
        while let Some((name, number, version)) = self.names.take_unreferenced() {
            let memory = &version.memory;
            if let Some(keeper) = version.keeper {
                self.people.drop_name(keeper, &name, number);
            }
            self.people.charge(version.uid, |totals| totals.subtract(memory));
            let fds = memory.fds();
            if !fds.is_empty() {
                out.push(Effect::Close(fds));
            }
            let (named, bytes, owned) = (memory.facts.named(), memory.held_bytes(), version.owned());
            self.closing.release(PendingVersion { name, version: number, named, bytes, owned });
        }
    }

    /// Returns the refusal of a request for a segment, pool, topic or queue that does not exist.
    pub(super) fn not_found(&self, member: MemberId, name: Name, version: Option<u64>) -> Refusal {
        let ended = self.names.ended(&name, version, self.now);
        let ended = ended.filter(|tombstone| self.people.sees(member, tombstone.owned));
        match ended {
            Some(tombstone) if tombstone.legacy || matches!(tombstone.ending, Ending::DeviceLost(_)) => {
                Refusal::Ended { name, end: tombstone.end() }
            }
            _ => {
                let near = match ended {
                    Some(_) => Vec::new(),
                    None => near(self.names.entries(), &name, |entry| {
                        entry.latest().is_some_and(|(_, version)| self.people.sees(member, version.owned()))
                    }),
                };
                Refusal::NotFound {
                    near,
                    is: self.kinds_of(member, &name),
                    ended: ended.map(|ended| Box::new(ended.end())),
                    name,
                }
            }
        }
    }

    /// Returns the kinds of all objects with this name that a member sees.
    pub(super) fn kinds_of(&self, member: MemberId, name: &Name) -> Vec<Named> {
        let latest = self.names.latest(name);
        let segment = latest.map(|(_, version)| (version.memory.facts.named(), version.owned()));
        let timeline = self.objects.timelines().get(name).map(|timeline| (Named::Timeline, timeline.owned));
        let semaphore = self.objects.semaphores().get(name).map(|semaphore| (Named::Semaphore, semaphore.owned));
        let found = [segment, timeline, semaphore].into_iter().flatten();
        found.filter(|(_, owned)| self.people.sees(member, *owned)).map(|(named, _)| named).collect()
    }

    /// Returns the versions that a member has open, by its leases.
    pub(super) fn versions_of(&self, member: MemberId) -> impl Iterator<Item = (LeaseId, &Version)> {
        let leases = self.people.member(member).into_iter().flat_map(|record| &record.version_leases);
        leases.filter_map(|id| {
            let lease = self.names.leases().get(id)?;
            Some((*id, self.names.version(&lease.name, lease.version)?))
        })
    }
}
