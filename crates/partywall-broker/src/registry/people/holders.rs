//! The members that have something open.

use std::{collections::BTreeMap, ops::Deref};

use serde::{Deserialize, Serialize};

use crate::registry::types::MemberId;

/// The number of leases that each member has on something. Members without a lease are absent.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holders(BTreeMap<MemberId, u64>);

impl Holders {
    /// Adds a lease of a member. Returns whether it is the member's only one.
    pub(crate) fn add(&mut self, member: MemberId) -> bool {
        let leases = self.0.entry(member).or_default();
        *leases += 1;
        *leases == 1
    }

    /// Drops a lease of a member. Returns whether it was the member's last one.
    pub(crate) fn remove(&mut self, member: MemberId) -> bool {
        let Some(leases) = self.0.get_mut(&member) else { return false };
        *leases -= 1;
        *leases == 0 && self.0.remove(&member).is_some()
    }

    /// Returns the number of leases of all members.
    pub(crate) fn leases(&self) -> u64 {
        self.0.values().sum()
    }
}

impl Deref for Holders {
    type Target = BTreeMap<MemberId, u64>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
