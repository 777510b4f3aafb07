//! Withdrawals with a deadline.
//!
//! The name ends at once, as with every withdrawal. Readers may go on until the deadline. Then the requested policy
//! applies to those that still have a withdrawn version open. A withdrawal belongs to the versions that it withdrew,
//! and ends with the last of them: a version that is committed under the name later is not affected.
//!
//! The registry has no clock: an effect asks the server for the event of the deadline, as for the end of a quarantine.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{
    Answer, Registry,
    effect::{Effect, Effects},
    pages::count,
    people::{Ender, Life, Owned},
    state::{Entry, Version},
    types::{
        Change, Deadline, LeaseId, MemberId, Millis, Name, Named, Notice, Refusal, Staleness, Then, TimelineEnding,
        WithdrawalId,
    },
};

/// A withdrawal whose deadline has not passed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Withdrawal {
    pub(super) name: Name,
    /// The member that withdrew the name. It is not evicted at the deadline, and may have left.
    by: MemberId,
    ender: Ender,
    /// The user to which the name belonged.
    owned: Owned,
    notice: Notice,
}

impl Withdrawal {
    pub(super) fn until(&self) -> Millis {
        self.notice.until
    }
}

impl Version {
    /// Returns whether the version belongs to a withdrawal.
    pub(super) fn is_part_of(&self, id: WithdrawalId) -> bool {
        self.notice.is_some_and(|(of, _)| of == id)
    }

    /// Returns the answer to a reader that waits for its withdrawal.
    pub(super) fn withdrawn_answer(&self) -> Answer {
        Answer::Withdrawn { notice: self.notice.map(|(_, notice)| notice) }
    }

    /// Refuses a further view if the version is stale.
    pub(super) fn check_stale(&self, name: &Name, version: u64) -> Result<(), Refusal> {
        let name = || name.clone();
        match self.stale {
            Some(Staleness::Withdrawn(notice)) => Err(Refusal::Withdrawn { name: name(), version, notice }),
            Some(Staleness::DeviceLost(place)) => Err(Refusal::DeviceLost { name: name(), version, place }),
            Some(_) | None => Ok(()),
        }
    }
}

impl Entry {
    /// Returns the notice of the latest withdrawal with a deadline that still has a version.
    pub(super) fn notice(&self) -> Option<Notice> {
        self.versions.values().rev().find_map(|version| version.notice).map(|(_, notice)| notice)
    }
}

impl Registry {
    /// Sets a deadline. The caller withdraws the versions in the same event.
    pub(super) fn begin_withdrawal(
        &mut self,
        by: MemberId,
        name: &Name,
        deadline: Deadline,
        out: &mut Effects,
    ) -> (WithdrawalId, Notice) {
        self.last_withdrawal += 1;
        let id = WithdrawalId(self.last_withdrawal);
        let ender = self.people.ender(by);
        let Deadline { after, then } = deadline;
        let notice = Notice { pid: ender.pid, at: self.now, until: self.now.saturating_add(after), then };
        let owned = self.entries.get(name).and_then(Entry::latest).map(|(_, version)| version.owned());
        let owned = owned.unwrap_or(Owned { uid: self.people.uid_of(by), shared: false });
        self.withdrawals.insert(id, Withdrawal { name: name.clone(), by, ender, owned, notice });
        out.push(Effect::AwaitDeadline { id, after });
        (id, notice)
    }

    /// Returns whether a withdrawal still waits for its deadline.
    pub(crate) fn awaits(&self, id: WithdrawalId) -> bool {
        self.withdrawals.contains_key(&id)
    }

    /// Forgets a withdrawal if none of its versions is left.
    pub(super) fn forget_withdrawal_without_versions(&mut self, id: WithdrawalId) {
        let Some(withdrawal) = self.withdrawals.get(&id) else { return };
        let entry = self.entries.get(&withdrawal.name);
        if !entry.is_some_and(|entry| entry.versions.values().any(|version| version.is_part_of(id))) {
            self.withdrawals.remove(&id);
        }
    }

    /// Applies the policy of a withdrawal to its readers.
    pub(super) fn deadline_passed(&mut self, id: WithdrawalId, out: &mut Effects) {
        let Some(Withdrawal { name, by, ender, owned, notice }) = self.withdrawals.remove(&id) else { return };
        let Some(entry) = self.entries.get_mut(&name) else { return };
        let mut named = Named::Segment;
        let mut readers = BTreeSet::new();
        for version in entry.versions.values_mut().filter(|version| version.is_part_of(id)) {
            named = version.memory.facts.named();
            if notice.then != Then::Wait {
                version.stale.get_or_insert(Staleness::Withdrawn(notice));
            }
            readers.extend(version.holders.keys().copied());
        }
        let left = count(readers.len() as u64);
        self.log(named, &name, owned, Change::DeadlinePassed { then: notice.then, readers: left });
        let mut evicted = Vec::new();
        let is_there = |id: &MemberId| self.people.member(*id).is_some_and(|record| record.life != Life::Unproven);
        for reader in readers {
            match self.policy(reader, &notice, owned.uid) {
                Then::Wait => {}
                Then::Stale => {
                    self.report_stale(reader, |version| version.is_part_of(id), out);
                    self.detach(
                        reader,
                        TimelineEnding::Closed,
                        |version| version.is_part_of(id) && version.is_topic(),
                        out,
                    );
                }
                Then::Evict if reader != by && is_there(&reader) => evicted.push(reader),
                Then::Evict => {}
            }
        }
        for reader in evicted {
            self.evict_one(reader, &ender, out);
        }
    }

    /// Returns what the deadline does to a reader. A user does not evict members of another one: for those, a
    /// withdrawal that evicts makes the versions stale.
    fn policy(&self, reader: MemberId, notice: &Notice, owner: u32) -> Then {
        match notice.then {
            Then::Evict if self.people.uid_of(reader) != owner => Then::Stale,
            then => then,
        }
    }

    /// Reports its stale leases again to a member that has resumed, because it may have missed the first report.
    pub(super) fn remind(&self, member: MemberId, out: &mut Effects) {
        self.report_stale(member, |_| true, out);
    }

    /// Reports the leases on stale versions for which `is_meant` is true.
    pub(super) fn report_stale(&self, member: MemberId, is_meant: impl Fn(&Version) -> bool, out: &mut Effects) {
        let stale = |(lease, version): (LeaseId, &Version)| {
            let stale = version.stale.filter(|_| is_meant(version))?;
            // The others are evicted.
            let is_told = match stale {
                Staleness::Withdrawn(notice) => self.policy(member, &notice, version.uid) == Then::Stale,
                _ => true,
            };
            is_told.then_some((lease, stale))
        };
        let leases: Vec<_> = self.versions_of(member).filter_map(stale).collect();
        out.extend(leases.chunks(LEASES).map(|leases| Effect::Stale { member, leases: leases.to_vec() }));
    }
}

/// The most leases in one message, so that it stays far below the smallest message limit.
const LEASES: usize = 1024;
