//! Members, as the registry keeps them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::registry::{
    coding,
    effect::Answer,
    event::Identity,
    types::{CellId, ClaimId, Doubt, LeaseId, MemberState, Millis, Name, RequestId, WaitId},
};

/// A process that has completed the handshake.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) identity: Identity,
    /// Its row in the members' memory, which also identifies it in semaphores.
    pub(crate) row: u16,
    pub(crate) since: Millis,
    pub(crate) life: Life,
    /// The directory of the MPS daemon whose client it is.
    pub(crate) mps: Option<Arc<str>>,
    pub(crate) lost_context: bool,
    pub(crate) eviction: Option<Eviction>,
    /// The highest number of a granted request that did more than ask. A request with this number or a lower one is a
    /// repetition, if it does more than ask.
    pub(crate) last_request: Option<RequestId>,
    /// Leases on versions.
    #[serde(deserialize_with = "coding::ordered")]
    pub(crate) version_leases: BTreeSet<LeaseId>,
    /// Versions whose names it keeps without a lease, until the versions are closed.
    pub(crate) names: BTreeSet<(Name, u64)>,
    /// Leases on timelines and semaphores.
    #[serde(deserialize_with = "coding::ordered")]
    pub(crate) object_leases: BTreeSet<LeaseId>,
    /// Cells that it and its streams may store in.
    #[serde(deserialize_with = "coding::ordered")]
    pub(crate) cells: BTreeSet<CellId>,
    /// The last request that was granted, if it created neither lease nor claim, and its answer.
    pub(crate) answered: Option<(RequestId, Answer)>,
    pub(crate) claims: BTreeSet<ClaimId>,
    #[serde(deserialize_with = "coding::ordered")]
    pub(crate) waits: BTreeMap<RequestId, (WaitId, Waiting)>,
    /// Bytes of the versions it holds leases on, each counted once.
    pub(crate) bytes: u64,
}

impl Member {
    pub(crate) fn new(identity: Identity, row: u16, since: Millis) -> Self {
        Self { identity, row, since, ..Self::default() }
    }

    /// Returns why its end does not prove that its work is over, if so.
    pub(crate) fn doubt(&self) -> Option<Doubt> {
        match self.identity.has_pidfd {
            false => Some(Doubt::NoPidfd),
            true => self.mps.is_some().then_some(Doubt::Mps),
        }
    }

    /// Returns the number of leases of every kind.
    pub(crate) fn all_leases(&self) -> u64 {
        (self.version_leases.len() + self.object_leases.len()) as u64
    }

    /// Returns the state that listings show.
    pub(crate) fn state(&self) -> MemberState {
        match self.life {
            Life::Unproven => MemberState::Unproven,
            Life::HeldByChild => MemberState::HeldByChild,
            _ if self.eviction.is_some() => MemberState::Evicted,
            Life::Suspect => MemberState::Suspect,
            Life::Alive if self.lost_context => MemberState::LostContext,
            Life::Alive => MemberState::Alive,
        }
    }
}

/// The stage of a member's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Life {
    /// Connected.
    #[default]
    Alive,
    /// Disconnected without proof of its death. It keeps its leases, but its waits have ended.
    Suspect,
    /// Exited, while a child still holds its connection.
    HeldByChild,
    /// Gone, while its work may continue. Its leases are in quarantine.
    Unproven,
}

/// The process that ends a name or a membership, as others learn of it. It may be gone by then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ender {
    pub(crate) pid: u32,
    pub(crate) command: Arc<str>,
}

/// The eviction of a member, whose requests are refused from then on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Eviction {
    /// The pid of the member that asked for it.
    pub(crate) by: u32,
    pub(crate) at: Millis,
}

/// Where a request waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Waiting {
    /// In the entry of this name.
    For(Name),
    /// Among the watchers.
    Watching,
}

/// The members' rows. A row is free again only when nothing of its member is left.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rows {
    free: BTreeSet<u16>,
    /// Number of rows that were ever taken.
    taken: u32,
}

impl Rows {
    /// Takes a free row, if any is left.
    pub(crate) fn take(&mut self) -> Option<u16> {
        self.free.pop_first().or_else(|| {
            let fresh = u16::try_from(self.taken).ok()?;
            self.taken += 1;
            Some(fresh)
        })
    }

    pub(crate) fn give_back(&mut self, row: u16) {
        self.free.insert(row);
    }

    /// Returns the number of rows that belong to a member or are not cleared yet.
    pub(crate) fn in_use(&self) -> u64 {
        u64::from(self.taken) - self.free.len() as u64
    }
}
