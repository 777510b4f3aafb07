//! A name: its versions, and the requests that wait for it.

use std::{collections::BTreeMap, sync::Arc};

use partywall_shm::queue::{MAX_ATTACHMENTS, attachment_number};
use serde::{Deserialize, Serialize};

use crate::registry::{
    effect::Answer,
    people::{Ender, Holders, Owned},
    types::{
        Access, ClaimId, FdId, Kind, LeaseId, Lifetime, MemberId, Memory, Millis, Name, Named, Notice, Refusal,
        RequestId, Staleness, WaitId, WithdrawalId,
    },
};

/// A name and all that belongs to it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The highest version number used; 0 again once no version is left.
    pub(crate) last: u64,
    /// The version that an open without a number returns. Always in `versions`.
    pub(crate) latest: Option<u64>,
    /// Versions whose memory is held: the latest, and those with leases of members or queues. In boxes, because a map
    /// has room for eleven values even if it has one, as most names do.
    pub(crate) versions: BTreeMap<u64, Box<Version>>,
    /// The claim of the member that builds. Requests wait to build only while this is set and `latest` is absent.
    pub(crate) claim: Option<ClaimId>,
    /// Waiting requests, in order of arrival.
    pub(crate) waits: BTreeMap<WaitId, Wait>,
}

impl Entry {
    /// Returns the user to which the name belongs, if it has a version that can be opened.
    pub(crate) fn owner(&self) -> Option<u32> {
        self.latest().map(|(_, version)| version.uid)
    }

    /// Returns the notice of the latest withdrawal with a deadline that still has a version.
    pub(crate) fn notice(&self) -> Option<Notice> {
        self.versions.values().rev().find_map(|version| version.notice).map(|(_, notice)| notice)
    }

    /// Returns the latest version and its number.
    pub(crate) fn latest(&self) -> Option<(u64, &Version)> {
        let number = self.latest?;
        Some((number, self.versions.get(&number)?))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.versions.is_empty() && self.claim.is_none() && self.waits.is_empty()
    }
}

/// One version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Version {
    pub(crate) memory: Arc<Memory>,
    pub(crate) committer: u32,
    /// The user to which it belongs.
    pub(crate) uid: u32,
    pub(crate) committed_at: Millis,
    /// The committer's lease, which owns an owned name and allows growth. Absent once it was given back.
    pub(crate) owner: Option<LeaseId>,
    /// The member with which an owned name ends, in place of `owner`: one that the commit named, or the committer after
    /// it gave back its lease.
    pub(crate) keeper: Option<MemberId>,
    pub(crate) growths: u64,
    pub(crate) holders: Holders,
    /// The segments that a queue holds; empty for other objects.
    pub(crate) attached: Attached,
    /// The queues that hold a segment.
    pub(crate) queues: BTreeMap<QueueId, u32>,
    /// True if its name was withdrawn. Its holders keep it, and no other member can open it.
    pub(crate) withdrawn: bool,
    /// The withdrawal, if it has a deadline.
    pub(crate) notice: Option<(WithdrawalId, Notice)>,
    /// Why it allows no new views, if so: the deadline has passed, or its memory is lost.
    pub(crate) stale: Option<Staleness>,
}

impl Version {
    /// Returns whether the version belongs to a withdrawal.
    pub(crate) fn is_part_of(&self, id: WithdrawalId) -> bool {
        self.notice.is_some_and(|(of, _)| of == id)
    }

    /// Returns the answer to a reader that waits for its withdrawal.
    pub(crate) fn withdrawn_answer(&self) -> Answer {
        Answer::Withdrawn { notice: self.notice.map(|(_, notice)| notice) }
    }

    /// Refuses a further view if the version is stale.
    pub(crate) fn check_stale(&self, name: &Name, version: u64) -> Result<(), Refusal> {
        let name = || name.clone();
        match self.stale {
            Some(Staleness::Withdrawn(notice)) => Err(Refusal::Withdrawn { name: name(), version, notice }),
            Some(Staleness::DeviceLost(place)) => Err(Refusal::DeviceLost { name: name(), version, place }),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns the descriptor of its first chunk. Legacy memory has none.
    pub(crate) fn first_chunk(&self) -> Option<FdId> {
        self.memory.chunks.first()?.fd
    }

    /// Returns whether its memory was found lost.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.stale, Some(Staleness::DeviceLost(_)))
    }

    pub(crate) fn owned(&self) -> Owned {
        Owned { uid: self.uid, shared: self.memory.facts.shared }
    }

    /// Returns whether it has leases.
    pub(crate) fn is_held(&self) -> bool {
        !self.holders.is_empty() || !self.queues.is_empty()
    }

    /// Returns the number of leases of members and of queues.
    pub(crate) fn all_leases(&self) -> u64 {
        self.holders.leases() + self.queues.len() as u64
    }

    /// Returns whether its memory is legacy memory, which only its publisher keeps.
    pub(crate) fn is_legacy(&self) -> bool {
        self.memory.facts.kind == Kind::Legacy
    }

    pub(crate) fn is_topic(&self) -> bool {
        self.memory.facts.named() == Named::Topic
    }

    /// Returns whether its name ends with a member.
    pub(crate) fn is_owned(&self) -> bool {
        self.memory.facts.lifetime == Lifetime::Owned
    }

    /// Returns whether its name ends with this lease of its committer.
    pub(crate) fn ends_with(&self, lease: LeaseId) -> bool {
        (self.is_owned() || self.is_legacy()) && self.owner == Some(lease) && self.keeper.is_none()
    }
}

/// A member's lease on a version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VersionLease {
    pub(crate) member: MemberId,
    pub(crate) name: Name,
    pub(crate) version: u64,
    /// The request that created it.
    pub(crate) origin: RequestId,
    /// Requests of the same member that wait for this version's withdrawal or growth.
    pub(crate) awaited_by: Vec<RequestId>,
}

/// The right to build a name's version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Claim {
    pub(crate) member: MemberId,
    pub(crate) name: Name,
    /// The request that created it.
    pub(crate) origin: RequestId,
}

/// A waiting request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Wait {
    pub(crate) member: MemberId,
    pub(crate) ticket: RequestId,
    pub(crate) want: Want,
}

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Want {
    /// A version that does not exist yet; any version, if no number is given.
    Open { version: Option<u64>, access: Access },
    /// The version that another member builds, or its claim if it fails.
    Build,
    /// The withdrawal of the version behind a lease.
    Withdrawal(LeaseId),
    /// The next growth of the version behind a lease.
    Growth(LeaseId),
}

/// A queue: its name and version.
pub(crate) type QueueId = (Name, u64);

/// The segments that a queue holds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Attached {
    /// The attachments by their numbers, which tasks name.
    pub(crate) segments: BTreeMap<u32, Attachment>,
    /// How many attachments each entry of the table in control memory has had.
    given: Vec<u32>,
}

/// A queue's hold on a segment.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Attachment {
    pub(crate) name: Name,
    pub(crate) version: u64,
}

impl Attached {
    /// Takes a number that no attachment of the queue has had, in one of the first entries of the table that is free.
    pub(crate) fn take_number(&mut self, entries: u32) -> Option<u32> {
        self.given.resize(entries as usize, 0);
        let is_used = |entry: u32| self.segments.keys().any(|number| number % MAX_ATTACHMENTS == entry);
        let (entry, number) = (0..entries)
            .filter(|entry| !is_used(*entry))
            .find_map(|entry| Some((entry, attachment_number(entry, *self.given.get(entry as usize)?)?)))?;
        self.given[entry as usize] += 1;
        Some(number)
    }
}

/// A withdrawal whose deadline has not passed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Withdrawal {
    pub(crate) name: Name,
    /// The member that withdrew the name. It is not evicted at the deadline, and may have left.
    pub(crate) by: MemberId,
    pub(crate) ender: Ender,
    /// The user to which the name belonged.
    pub(crate) owned: Owned,
    pub(crate) notice: Notice,
}

impl Withdrawal {
    pub(crate) fn until(&self) -> Millis {
        self.notice.until
    }
}
