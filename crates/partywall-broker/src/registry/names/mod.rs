//! Names: their versions, the leases on versions, and the right to build one.
//!
//! Memory is not released here. A method that takes the last reference from a version lists the version, and
//! [`Names::take_unreferenced`] returns it.

mod entry;
mod tombstones;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use partywall_wire::Opened;
use serde::{Deserialize, Serialize};

use super::{
    coding,
    effect::{Answer, Granted, Unread},
    people::{Ender, Owned},
    types::{
        BlockControl, ClaimId, Ending, FdId, LeaseId, Lifetime, Limit, MemberId, Memory, Millis, Name, Named, Notice,
        Place, Refusal, RequestId, STALE_LEASE, Staleness, Then, WaitId, WithdrawalId, limit,
    },
};

pub(super) use entry::{Attached, Attachment, Claim, Entry, QueueId, Version, VersionLease, Wait, Want, Withdrawal};
#[cfg(any(test, fuzzing))]
pub(super) use tombstones::REMEMBERED;
pub(super) use tombstones::Tombstone;
use tombstones::Tombstones;

/// The names of segments, pools, topics and queues.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Names {
    /// Entries with a version, a claim or a waiting request; others are removed.
    #[serde(deserialize_with = "coding::ordered")]
    entries: BTreeMap<Name, Entry>,
    #[serde(deserialize_with = "coding::ordered")]
    leases: BTreeMap<LeaseId, VersionLease>,
    claims: BTreeMap<ClaimId, Claim>,
    /// The ends of names that have no latest version now.
    tombstones: Tombstones,
    /// Withdrawals whose deadline has not passed, and of which a version is left.
    withdrawals: BTreeMap<WithdrawalId, Withdrawal>,
    /// Versions that may have lost their last reference. Empty between events.
    maybe_unreferenced: VecDeque<(Name, u64)>,
    last_claim: u64,
    last_withdrawal: u64,
}

/// What ends with a lease on a version.
#[derive(Default)]
pub(super) struct Dropped {
    /// True if no member can grow the version any more.
    pub(super) owned: bool,
    /// True if the version is its name's latest, and was to last as long as members have it open.
    pub(super) is_last: bool,
    /// Bytes of the version, if the member has no other lease on it.
    pub(super) bytes: u64,
    /// The control memory in which the member's blocks have to be returned.
    pub(super) control: Option<BlockControl>,
}

/// Versions whose memory is lost.
#[derive(Default)]
pub(super) struct Lost {
    pub(super) versions: Vec<(Name, u64)>,
    pub(super) readers: BTreeSet<MemberId>,
    /// Their first chunks.
    pub(super) chunks: BTreeSet<FdId>,
}

impl Names {
    /// Adds the next version of a name. Returns its number, and that of the version that was the latest.
    pub(super) fn add(&mut self, name: &Name, version: Version) -> (u64, Option<u64>) {
        self.tombstones.remove(name);
        let entry = self.entries.entry(name.clone()).or_default();
        entry.last += 1;
        let number = entry.last;
        let before = entry.latest.replace(number);
        entry.versions.insert(number, Box::new(version));
        self.maybe_unreferenced.extend(before.map(|before| (name.clone(), before)));
        (number, before)
    }

    /// Replaces the memory of a version by a longer one. Returns the former memory, and the members that have the
    /// version open.
    pub(super) fn grow(
        &mut self,
        name: &Name,
        number: u64,
        memory: Arc<Memory>,
    ) -> Option<(Arc<Memory>, Vec<MemberId>)> {
        let version = self.version_mut(name, number)?;
        version.growths += 1;
        let holders = version.holders.keys().copied().collect();
        Some((std::mem::replace(&mut version.memory, memory), holders))
    }

    /// Adds a lease on a version. Returns the bytes of the version if the member had no lease on it.
    pub(super) fn lease(&mut self, id: LeaseId, member: MemberId, name: &Name, version: u64, origin: RequestId) -> u64 {
        let lease = VersionLease { member, name: name.clone(), version, origin, awaited_by: Vec::new() };
        self.leases.insert(id, lease);
        let Some(found) = self.version_mut(name, version) else { return 0 };
        if found.holders.add(member) { found.memory.bytes() } else { 0 }
    }

    /// Ends a lease. The version keeps it until [`Names::let_go`].
    pub(super) fn drop_lease(&mut self, id: LeaseId) -> Option<VersionLease> {
        self.leases.remove(&id)
    }

    /// Takes a lease that has ended from its version.
    pub(super) fn let_go(&mut self, id: LeaseId, lease: &VersionLease) -> Option<Dropped> {
        let is_latest = self.is_latest(&lease.name, lease.version);
        let version = self.version_mut(&lease.name, lease.version)?;
        let is_gone = version.holders.remove(lease.member);
        Some(Dropped {
            owned: version.owner.take_if(|owner| *owner == id).is_some(),
            is_last: is_latest && version.holders.is_empty() && version.memory.facts.lifetime == Lifetime::Shared,
            bytes: if is_gone { version.memory.bytes() } else { 0 },
            control: version.memory.control.filter(|_| is_gone),
        })
    }

    /// Makes the member itself keep the name of a version whose committer's lease it gives back. Returns the version;
    /// `None` if the lease owns no name, or if that is a name of owned legacy memory: its publisher may free the memory
    /// with the lease. The publisher of *shared* legacy memory keeps it until the name ends.
    pub(super) fn leave(&mut self, member: MemberId, lease: LeaseId) -> Option<(Name, u64)> {
        let (name, number) = self.owned_by(lease).filter(|(name, number)| self.is_latest(name, *number))?;
        let version = self.version_mut(&name, number)?;
        if version.is_legacy() && version.is_owned() {
            return None;
        }
        version.keeper = Some(member);
        Some((name, number))
    }

    /// Returns the version that ends with a lease, if one does.
    pub(super) fn owned_by(&self, lease: LeaseId) -> Option<(Name, u64)> {
        let held = self.leases.get(&lease)?;
        let version = self.version(&held.name, held.version)?;
        version.ends_with(lease).then(|| (held.name.clone(), held.version))
    }

    /// Withdraws a name: it has no latest version until the next commit, and none of its versions can be opened any
    /// more. The readers of versions that were not withdrawn before get the notice. Returns what the name was, and to
    /// whom it belonged.
    pub(super) fn withdraw(
        &mut self,
        name: &Name,
        (ending, by, at): (Ending, &Ender, Millis),
        notice: Option<(WithdrawalId, Notice)>,
    ) -> Option<(Named, Owned)> {
        let entry = self.entries.get_mut(name)?;
        let number = entry.latest.take()?;
        let latest = entry.versions.get(&number)?;
        let named = latest.memory.facts.named();
        let legacy = latest.is_legacy();
        let owned = latest.owned();
        let Ender { pid, command } = by.clone();
        self.tombstones.put(name, Tombstone { ending, version: number, pid, command, at, legacy, owned });
        for (number, version) in &mut entry.versions {
            if !std::mem::replace(&mut version.withdrawn, true) {
                version.notice = notice;
            }
            self.maybe_unreferenced.push_back((name.clone(), *number));
        }
        Some((named, owned))
    }

    /// Withdraws a version of legacy memory that is not its name's latest. Returns false for other memory.
    pub(super) fn withdraw_old(&mut self, name: &Name, number: u64) -> bool {
        let legacy = self.version_mut(name, number).filter(|version| version.is_legacy());
        legacy.map(|version| version.withdrawn = true).is_some()
    }

    /// Returns how a name ended, or a version of it, if that was less than a minute ago.
    pub(super) fn ended(&self, name: &Name, version: Option<u64>, now: Millis) -> Option<&Tombstone> {
        self.tombstones.find(name, version, now)
    }

    /// Adds a withdrawal.
    pub(super) fn begin_withdrawal(&mut self, withdrawal: Withdrawal) -> WithdrawalId {
        self.last_withdrawal += 1;
        let id = WithdrawalId(self.last_withdrawal);
        self.withdrawals.insert(id, withdrawal);
        id
    }

    /// Forgets a withdrawal if none of its versions is left.
    fn forget_withdrawal_without_versions(&mut self, id: WithdrawalId) {
        let Some(withdrawal) = self.withdrawals.get(&id) else { return };
        let entry = self.entries.get(&withdrawal.name);
        if !entry.is_some_and(|entry| entry.versions.values().any(|version| version.is_part_of(id))) {
            self.withdrawals.remove(&id);
        }
    }

    /// Ends a withdrawal, whose deadline has passed. Returns it with what its versions are, and their readers.
    pub(super) fn end_withdrawal(&mut self, id: WithdrawalId) -> Option<(Withdrawal, Named, BTreeSet<MemberId>)> {
        let withdrawal = self.withdrawals.remove(&id)?;
        let entry = self.entries.get_mut(&withdrawal.name)?;
        let mut named = Named::Segment;
        let mut readers = BTreeSet::new();
        for version in entry.versions.values_mut().filter(|version| version.is_part_of(id)) {
            named = version.memory.facts.named();
            if withdrawal.notice.then != Then::Wait {
                version.stale.get_or_insert(Staleness::Withdrawn(withdrawal.notice));
            }
            readers.extend(version.holders.keys().copied());
        }
        Some((withdrawal, named, readers))
    }

    /// Makes the versions at a place stale that have one of these first chunks.
    pub(super) fn lose(&mut self, place: Place, chunks: &BTreeSet<FdId>) -> Lost {
        let mut lost = Lost::default();
        for (name, entry) in &mut self.entries {
            for (number, version) in &mut entry.versions {
                let first = version.first_chunk().filter(|first| chunks.contains(first));
                if let Some(first) = first
                    && version.memory.facts.place == place
                    && !version.is_lost()
                {
                    version.stale = Some(Staleness::DeviceLost(place));
                    version.withdrawn = true;
                    lost.readers.extend(version.holders.keys().copied());
                    lost.chunks.insert(first);
                    lost.versions.push((name.clone(), *number));
                }
            }
        }
        lost
    }

    /// Lets a member build a name.
    pub(super) fn claim(&mut self, member: MemberId, origin: RequestId, name: &Name) -> ClaimId {
        self.last_claim += 1;
        let id = ClaimId(self.last_claim);
        self.entries.entry(name.clone()).or_default().claim = Some(id);
        self.claims.insert(id, Claim { member, name: name.clone(), origin });
        id
    }

    /// Ends a claim.
    pub(super) fn drop_claim(&mut self, id: ClaimId) -> Option<Claim> {
        let claim = self.claims.remove(&id)?;
        if let Some(entry) = self.entries.get_mut(&claim.name) {
            entry.claim = None;
        }
        self.maybe_unreferenced.push_back((claim.name.clone(), 0));
        Some(claim)
    }

    /// Adds a waiting request.
    pub(super) fn add_wait(&mut self, name: &Name, id: WaitId, wait: Wait) {
        if let Want::Withdrawal(lease) | Want::Growth(lease) = wait.want
            && let Some(lease) = self.leases.get_mut(&lease)
        {
            lease.awaited_by.push(wait.ticket);
        }
        self.entries.entry(name.clone()).or_default().waits.insert(id, wait);
    }

    /// Ends the wait of a request.
    pub(super) fn drop_wait(&mut self, name: Name, id: WaitId) -> Option<()> {
        let wait = self.entries.get_mut(&name)?.waits.remove(&id)?;
        if let Want::Withdrawal(lease) | Want::Growth(lease) = wait.want
            && let Some(lease) = self.leases.get_mut(&lease)
        {
            lease.awaited_by.retain(|awaiting| *awaiting != wait.ticket);
        }
        self.maybe_unreferenced.push_back((name, 0));
        Some(())
    }

    /// Has a queue, which may hold as many segments as `entries`, hold a further one. Returns the number of the
    /// attachment.
    pub(super) fn attach(&mut self, queue: QueueId, name: Name, version: u64, entries: u32) -> Result<u32, Refusal> {
        let attached = &mut self.version_mut(&queue.0, queue.1).ok_or(STALE_LEASE)?.attached;
        let present = attached.segments.len() as u64;
        limit(Limit::Attachments, entries.into(), present + 1)?;
        // Without a number left, no entry is free for good.
        let full =
            Refusal::Limit { limit: Limit::Attachments, allowed: present, needed: present + 1, holders: Vec::new() };
        let attachment = attached.take_number(entries).ok_or(full)?;
        attached.segments.insert(attachment, Attachment { name: name.clone(), version });
        if let Some(found) = self.version_mut(&name, version) {
            found.queues.insert(queue, attachment);
        }
        Ok(attachment)
    }

    /// Ends an attachment.
    pub(super) fn detach(&mut self, queue: &QueueId, attachment: u32) {
        let held = self.version_mut(&queue.0, queue.1).and_then(|holder| holder.attached.segments.remove(&attachment));
        if let Some(Attachment { name, version }) = held {
            self.let_segment_go(queue, name, version);
        }
    }

    fn let_segment_go(&mut self, queue: &QueueId, name: Name, version: u64) {
        if let Some(found) = self.version_mut(&name, version) {
            found.queues.remove(queue);
        }
        self.maybe_unreferenced.push_back((name, version));
    }

    /// Lists a version that may have lost its last reference.
    pub(super) fn mark_unreferenced(&mut self, name: Name, version: u64) {
        self.maybe_unreferenced.push_back((name, version));
    }

    /// Removes the next version that has lost its last reference, and its name if that is empty. Memory is released
    /// only by the caller, and only here do versions and names end: what drops a reference lists the version.
    pub(super) fn take_unreferenced(&mut self) -> Option<(Name, u64, Box<Version>)> {
        while let Some((name, number)) = self.maybe_unreferenced.pop_front() {
            let is_needed = self.is_needed(&name, number);
            let Some(entry) = self.entries.get_mut(&name) else { continue };
            let version = if is_needed { None } else { entry.versions.remove(&number) };
            if entry.versions.is_empty() {
                entry.last = 0;
            }
            if entry.is_empty() {
                self.entries.remove(&name);
            }
            let Some(mut version) = version else { continue };
            // A queue that goes takes its attachments with it.
            let queue = (name, number);
            for Attachment { name, version, .. } in std::mem::take(&mut version.attached).segments.into_values() {
                self.let_segment_go(&queue, name, version);
            }
            if let Some((id, _)) = version.notice {
                self.forget_withdrawal_without_versions(id);
            }
            let (name, number) = queue;
            return Some((name, number, version));
        }
        None
    }

    /// Returns whether a version is its name's latest or has leases.
    pub(super) fn is_needed(&self, name: &Name, number: u64) -> bool {
        self.is_latest(name, number) || self.version(name, number).is_some_and(Version::is_held)
    }

    /// Returns whether a version is its name's latest.
    pub(super) fn is_latest(&self, name: &Name, number: u64) -> bool {
        self.entries.get(name).is_some_and(|entry| entry.latest == Some(number))
    }

    /// Returns the answer to a commit.
    pub(super) fn committed_by(&self, lease: LeaseId) -> Option<Granted> {
        let held = self.leases.get(&lease)?;
        let control = self.version(&held.name, held.version)?.memory.control;
        let fds = control.iter().flat_map(BlockControl::created).map(|created| created.fd).collect();
        Some(Granted(Answer::Committed { version: held.version, lease }, fds, Unread::Nothing))
    }

    /// Returns the answer for a lease.
    pub(super) fn opened(&self, id: LeaseId) -> Option<Granted> {
        let lease = self.leases.get(&id)?;
        let version = self.version(&lease.name, lease.version)?;
        let memory = &version.memory;
        let opened = Opened {
            lease: id,
            name: lease.name.clone(),
            version: lease.version,
            facts: memory.facts,
            uid: version.uid,
            chunks: memory.chunk_bytes(),
            handles: memory.handles.clone(),
            table: memory.table.sent(),
            growths: version.growths,
        };
        Some(Granted(Answer::Opened(opened), memory.fds(), Unread::Nothing))
    }

    pub(super) fn entry(&self, name: &Name) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// Returns the latest version of a name, and its number.
    pub(super) fn latest(&self, name: &Name) -> Option<(u64, &Version)> {
        self.entries.get(name)?.latest()
    }

    pub(super) fn version(&self, name: &Name, number: u64) -> Option<&Version> {
        self.entries.get(name)?.versions.get(&number).map(Box::as_ref)
    }

    fn version_mut(&mut self, name: &Name, number: u64) -> Option<&mut Version> {
        self.entries.get_mut(name)?.versions.get_mut(&number).map(Box::as_mut)
    }

    /// Returns all versions of all names.
    pub(super) fn versions(&self) -> impl Iterator<Item = &Version> {
        self.entries.values().flat_map(|entry| entry.versions.values()).map(Box::as_ref)
    }

    /// Returns a member's lease on a version.
    pub(super) fn held(&self, member: MemberId, lease: LeaseId) -> Result<(&VersionLease, &Version), Refusal> {
        let lease = self.leases.get(&lease).filter(|held| held.member == member).ok_or(STALE_LEASE)?;
        Ok((lease, self.version(&lease.name, lease.version).ok_or(STALE_LEASE)?))
    }

    pub(super) fn entries(&self) -> &BTreeMap<Name, Entry> {
        &self.entries
    }

    pub(super) fn leases(&self) -> &BTreeMap<LeaseId, VersionLease> {
        &self.leases
    }

    pub(super) fn claims(&self) -> &BTreeMap<ClaimId, Claim> {
        &self.claims
    }

    pub(super) fn withdrawals(&self) -> &BTreeMap<WithdrawalId, Withdrawal> {
        &self.withdrawals
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn is_settled(&self) -> bool {
        self.maybe_unreferenced.is_empty()
    }
}
