//! The objects of the registry, and the sums over them.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    attachments::{Attached, QueueId},
    people::Holders,
    types::{
        Access, ClaimId, Kind, LeaseId, Lifetime, MemberId, Memory, Millis, Name, Named, Notice, RequestId, Staleness,
        WaitId, WithdrawalId,
    },
};

/// A name and all that belongs to it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The highest version number used; 0 again once no version is left.
    pub(super) last: u64,
    /// The version that an open without a number returns. Always in `versions`.
    pub(super) latest: Option<u64>,
    /// Versions whose memory is held: the latest, and those with leases of members or queues. In boxes, because a map
    /// has room for eleven values even if it has one, as most names do.
    pub(super) versions: BTreeMap<u64, Box<Version>>,
    /// The claim of the member that builds. Requests wait to build only while this is set and `latest` is absent.
    pub(super) claim: Option<ClaimId>,
    /// Waiting requests, in order of arrival.
    pub(super) waits: BTreeMap<WaitId, Wait>,
}

impl Entry {
    /// Returns the latest version and its number.
    pub(super) fn latest(&self) -> Option<(u64, &Version)> {
        let number = self.latest?;
        Some((number, self.versions.get(&number)?))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.versions.is_empty() && self.claim.is_none() && self.waits.is_empty()
    }
}

/// One version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Version {
    pub(super) memory: Arc<Memory>,
    pub(super) committer: u32,
    /// The user to which it belongs.
    pub(super) uid: u32,
    pub(super) committed_at: Millis,
    /// The committer's lease, which owns an owned name and allows growth. Absent once it was given back.
    pub(super) owner: Option<LeaseId>,
    /// The member with which an owned name ends, in place of `owner`: one that the commit named, or the committer after
    /// it gave back its lease.
    pub(super) keeper: Option<MemberId>,
    pub(super) growths: u64,
    pub(super) holders: Holders,
    /// The segments that a queue holds; empty for other objects.
    pub(super) attached: Attached,
    /// The queues that hold a segment.
    pub(super) queues: BTreeMap<QueueId, u32>,
    /// True if its name was withdrawn. Its holders keep it, and no other member can open it.
    pub(super) withdrawn: bool,
    /// The withdrawal, if it has a deadline.
    pub(super) notice: Option<(WithdrawalId, Notice)>,
    /// Why it allows no new views, if so: the deadline has passed, or its memory is lost.
    pub(super) stale: Option<Staleness>,
}

impl Version {
    /// Returns whether it has leases.
    pub(super) fn is_held(&self) -> bool {
        !self.holders.is_empty() || !self.queues.is_empty()
    }

    /// Returns the number of leases of members and of queues.
    pub(super) fn all_leases(&self) -> u64 {
        self.holders.leases() + self.queues.len() as u64
    }

    /// Returns whether its memory is legacy memory, which only its publisher keeps.
    pub(super) fn is_legacy(&self) -> bool {
        self.memory.facts.kind == Kind::Legacy
    }

    pub(super) fn is_topic(&self) -> bool {
        self.memory.facts.named() == Named::Topic
    }

    /// Returns whether its name ends with a member.
    pub(super) fn is_owned(&self) -> bool {
        self.memory.facts.lifetime == Lifetime::Owned
    }

    /// Returns whether its name ends with this lease of its committer.
    pub(super) fn ends_with(&self, lease: LeaseId) -> bool {
        (self.is_owned() || self.is_legacy()) && self.owner == Some(lease) && self.keeper.is_none()
    }
}

/// A member's lease on a version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct VersionLease {
    pub(super) member: MemberId,
    pub(super) name: Name,
    pub(super) version: u64,
    /// The request that created it.
    pub(super) origin: RequestId,
    /// Requests of the same member that wait for this version's withdrawal or growth.
    pub(super) awaited_by: Vec<RequestId>,
}

/// The right to build a name's version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) member: MemberId,
    pub(super) name: Name,
    /// The request that created it.
    pub(super) origin: RequestId,
}

/// A waiting request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wait {
    pub(super) member: MemberId,
    pub(super) ticket: RequestId,
    pub(super) want: Want,
}

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Want {
    /// A version that does not exist yet; any version, if no number is given.
    Open { version: Option<u64>, access: Access },
    /// The version that another member builds, or its claim if it fails.
    Build,
    /// The withdrawal of the version behind a lease.
    Withdrawal(LeaseId),
    /// The next growth of the version behind a lease.
    Growth(LeaseId),
}
