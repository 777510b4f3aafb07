//! What a server needs to know of a registry that a former process has left.

use super::{
    Registry,
    types::{BlockControl, CloseId, FdId, Millis, WithdrawalId},
};

impl Registry {
    /// Returns the control memory of pools, topics and queues.
    pub(crate) fn block_controls(&self) -> impl Iterator<Item = BlockControl> {
        self.names.versions().filter_map(|version| version.memory.control)
    }

    /// Returns the attachments of queues: the memory of the queue, and the number.
    pub(crate) fn attachments(&self) -> Vec<(FdId, u32)> {
        let of_version =
            self.names.versions().filter_map(|version| Some((version.memory.control?.object?.fd, &version.attached)));
        of_version.flat_map(|(queue, attached)| attached.segments.keys().map(move |number| (queue, *number))).collect()
    }

    /// Returns the closes that the server was asked to confirm.
    pub(crate) fn unconfirmed(&self) -> Vec<CloseId> {
        self.closing.unconfirmed()
    }

    /// Returns the numbers of leases and claims, and of members.
    pub(crate) fn given_out(&self) -> (u64, u64) {
        let leases = self.names.leases().len() + self.objects.leases().len() + self.names.claims().len();
        (leases as u64, self.people.members().len() as u64)
    }

    /// Returns the deadlines of withdrawals.
    pub(crate) fn deadlines(&self) -> Vec<(WithdrawalId, Millis)> {
        self.names.withdrawals().iter().map(|(id, withdrawal)| (*id, withdrawal.until())).collect()
    }
}
