//! What a server needs to know of a registry that a former process has left.

use super::{
    Registry,
    state::Life,
    types::{BlockControl, CloseId, FdId, MemberId, Millis, WithdrawalId},
};

impl Registry {
    /// Returns the control memory of pools, topics and queues.
    pub(crate) fn block_controls(&self) -> impl Iterator<Item = BlockControl> {
        self.entries.values().flat_map(|entry| entry.versions.values()).filter_map(|version| version.memory.control)
    }

    /// Returns the memory of semaphores.
    pub(crate) fn semaphore_memory(&self) -> impl Iterator<Item = FdId> {
        self.semaphores.values().map(|semaphore| semaphore.memory.fd)
    }

    /// Returns the attachments of queues: the memory of the queue, and the number.
    pub(crate) fn attachments(&self) -> Vec<(FdId, u32)> {
        let versions = self.entries.values().flat_map(|entry| entry.versions.values());
        let of_version = versions.filter_map(|version| Some((version.memory.control?.object?.fd, &version.attached)));
        of_version.flat_map(|(queue, attached)| attached.segments.keys().map(move |number| (queue, *number))).collect()
    }

    /// Returns the closes that the server was asked to confirm.
    pub(crate) fn unconfirmed(&self) -> Vec<CloseId> {
        self.closing.keys().copied().filter(|id| !self.held_back.confirms.contains(id)).collect()
    }

    /// Returns the numbers of leases and claims, and of members.
    pub(crate) fn given_out(&self) -> (u64, u64) {
        let leases = self.version_leases.len() + self.object_leases.len() + self.claims.len();
        (leases as u64, self.members.len() as u64)
    }

    /// Returns the members in quarantine.
    pub(crate) fn in_quarantine(&self) -> Vec<MemberId> {
        self.members_in(Life::Unproven)
    }

    /// Returns the connected members, without operators.
    pub(crate) fn connected(&self) -> Vec<MemberId> {
        self.members_in(Life::Alive).into_iter().filter(|member| !self.is_operator(*member)).collect()
    }

    /// Returns whether a process, or a child of it, belongs to this member.
    pub(crate) fn has_process(&self, member: MemberId) -> bool {
        self.members.get(&member).is_some_and(|record| record.life != Life::Unproven)
    }

    /// Returns the deadlines of withdrawals.
    pub(crate) fn deadlines(&self) -> Vec<(WithdrawalId, Millis)> {
        self.withdrawals.iter().map(|(id, withdrawal)| (*id, withdrawal.until())).collect()
    }

    fn members_in(&self, life: Life) -> Vec<MemberId> {
        self.members.iter().filter(|(_, record)| record.life == life).map(|(id, _)| *id).collect()
    }
}
