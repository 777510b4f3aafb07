//! Withdrawals with a deadline.
//!
//! The name ends at once, as with every withdrawal. Readers may go on until the deadline. Then the requested policy
//! applies to those that still have a withdrawn version open. A withdrawal belongs to the versions that it withdrew,
//! and ends with the last of them: a version that is committed under the name later is not affected.
//!
//! The registry has no clock: an effect asks the server for the event of the deadline, as for the end of a quarantine.

use super::{
    Registry,
    effect::{Effect, Effects},
    names::{Version, Withdrawal},
    pages::count,
    people::Owned,
    types::{Change, Deadline, LeaseId, MemberId, Name, Notice, Staleness, Then, TimelineEnding, WithdrawalId},
};

impl Registry {
    /// Sets a deadline. The caller withdraws the versions in the same event.
    pub(super) fn begin_withdrawal(
        &mut self,
        by: MemberId,
        name: &Name,
        deadline: Deadline,
        out: &mut Effects,
    ) -> (WithdrawalId, Notice) {
        let ender = self.people.ender(by);
        let Deadline { after, then } = deadline;
        let notice = Notice { pid: ender.pid, at: self.now, until: self.now.saturating_add(after), then };
        let owned = self.names.latest(name).map(|(_, version)| version.owned());
        let owned = owned.unwrap_or(Owned { uid: self.people.uid_of(by), shared: false });
        let id = self.names.begin_withdrawal(Withdrawal { name: name.clone(), by, ender, owned, notice });
        out.push(Effect::AwaitDeadline { id, after });
        (id, notice)
    }

    /// Returns whether a withdrawal still waits for its deadline.
    pub(crate) fn awaits(&self, id: WithdrawalId) -> bool {
        self.names.withdrawals().contains_key(&id)
    }

    /// Applies the policy of a withdrawal to its readers.
    pub(super) fn deadline_passed(&mut self, id: WithdrawalId, out: &mut Effects) {
        let Some((withdrawal, named, readers)) = self.names.end_withdrawal(id) else { return };
        let Withdrawal { name, by, ender, owned, notice } = withdrawal;
        let left = count(readers.len() as u64);
        self.log(named, &name, owned, Change::DeadlinePassed { then: notice.then, readers: left });
        let mut evicted = Vec::new();
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
                Then::Evict if reader != by && self.people.has_process(reader) => evicted.push(reader),
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
