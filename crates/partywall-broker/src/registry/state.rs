//! The objects of the registry, and the sums over them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    Answer,
    attachments::{Attached, QueueId},
    event::Identity,
    types::{
        Access, CellId, ClaimId, CloseId, ControlMemory, Doubt, FdId, Kind, LeaseId, Lifetime, MemberId, MemberState,
        Memory, Millis, Name, Named, Notice, Place, RequestId, Staleness, WaitId, WithdrawalId,
    },
    users::Owned,
};

/// A process that has completed the handshake.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) identity: Identity,
    /// Its row in the members' memory, which also identifies it in semaphores.
    pub(super) row: u16,
    pub(super) since: Millis,
    pub(super) life: Life,
    /// The directory of the MPS daemon whose client it is.
    pub(super) mps: Option<Arc<str>>,
    pub(super) lost_context: bool,
    pub(super) eviction: Option<Eviction>,
    /// The highest number of a granted request that did more than ask. A request with this number or a lower one is a
    /// repetition, if it does more than ask.
    pub(super) last_request: RequestId,
    /// Leases on versions.
    #[serde(deserialize_with = "super::coding::ordered")]
    pub(super) version_leases: BTreeSet<LeaseId>,
    /// Versions whose names it keeps without a lease, until the versions are closed.
    pub(super) names: BTreeSet<(Name, u64)>,
    /// Leases on timelines and semaphores.
    #[serde(deserialize_with = "super::coding::ordered")]
    pub(super) object_leases: BTreeSet<LeaseId>,
    /// Cells that it and its streams may store in.
    #[serde(deserialize_with = "super::coding::ordered")]
    pub(super) cells: BTreeSet<CellId>,
    /// The last request that was granted, if it created neither lease nor claim, and its answer.
    pub(super) answered: Option<(RequestId, Answer)>,
    pub(super) claims: BTreeSet<ClaimId>,
    #[serde(deserialize_with = "super::coding::ordered")]
    pub(super) waits: BTreeMap<RequestId, (WaitId, Waiting)>,
    /// Bytes of the versions it holds leases on, each counted once.
    pub(super) bytes: u64,
}

impl Member {
    pub(super) fn new(identity: Identity, row: u16, since: Millis) -> Self {
        Self {
            identity,
            row,
            since,
            life: Life::Alive,
            mps: None,
            lost_context: false,
            eviction: None,
            last_request: RequestId(0),
            version_leases: BTreeSet::new(),
            names: BTreeSet::new(),
            object_leases: BTreeSet::new(),
            cells: BTreeSet::new(),
            answered: None,
            claims: BTreeSet::new(),
            waits: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// Returns why its end does not prove that its work is over, if so.
    pub(super) fn doubt(&self) -> Option<Doubt> {
        match self.identity.has_pidfd {
            false => Some(Doubt::NoPidfd),
            true => self.mps.is_some().then_some(Doubt::Mps),
        }
    }

    /// Returns the number of leases of every kind.
    pub(super) fn all_leases(&self) -> u64 {
        (self.version_leases.len() + self.object_leases.len()) as u64
    }

    /// Returns the state that listings show.
    pub(super) fn state(&self) -> MemberState {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Life {
    /// Connected.
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
pub(super) struct Ender {
    pub(super) pid: u32,
    pub(super) command: Arc<str>,
}

/// The eviction of a member, whose requests are refused from then on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Eviction {
    /// The pid of the member that asked for it.
    pub(super) by: u32,
    pub(super) at: Millis,
}

/// Memory that one event released, until the server reports that it is closed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PendingClose {
    pub(super) versions: Vec<PendingVersion>,
    /// Dead members whose end released some of the versions.
    pub(super) dead: BTreeMap<MemberId, Dead>,
}

/// Closes and confirmations that wait until no row is being cleared.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct HeldBack {
    pub(super) closes: Vec<FdId>,
    /// Confirmations of these closes and of earlier ones.
    pub(super) confirms: Vec<CloseId>,
}

/// A version whose memory is being closed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PendingVersion {
    pub(super) name: Name,
    pub(super) version: u64,
    pub(super) named: Named,
    pub(super) bytes: u64,
    pub(super) owned: Owned,
}

/// A dead member whose memory is being closed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Dead {
    pub(super) identity: Identity,
    pub(super) since: Millis,
    pub(super) bytes: u64,
}

/// The members' rows. A row is free again only when nothing of its member is left.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Rows {
    free: BTreeSet<u16>,
    /// Number of rows that were ever taken.
    taken: u32,
}

impl Rows {
    /// Takes a free row, if any is left.
    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop_first().or_else(|| {
            let fresh = u16::try_from(self.taken).ok()?;
            self.taken += 1;
            Some(fresh)
        })
    }

    pub(super) fn give_back(&mut self, row: u16) {
        self.free.insert(row);
    }

    /// Returns the number of rows that belong to a member or are not cleared yet.
    pub(super) fn in_use(&self) -> u64 {
        u64::from(self.taken) - self.free.len() as u64
    }
}

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
    pub(super) leases: u64,
    /// Leases by member; their sum is `leases`.
    pub(super) holders: BTreeMap<MemberId, u64>,
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
    /// Leases of members and of queues.
    pub(super) fn all_leases(&self) -> u64 {
        self.leases + self.queues.len() as u64
    }

    /// Returns whether its memory is legacy memory, which only its publisher keeps.
    pub(super) fn is_legacy(&self) -> bool {
        self.memory.facts.kind == Kind::Legacy
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

/// Where a request waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Waiting {
    /// In the entry of this name.
    For(Name),
    /// Among the watchers.
    Watching,
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

/// Sums over all entries and control memory. Limits are checked against them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Totals {
    /// Entries with a latest version.
    pub(super) names: u64,
    pub(super) versions: u64,
    pub(super) fds: u64,
    /// Bytes by place: chunks count where they are, tables and control memory in main memory. Empty places are absent.
    pub(super) places: BTreeMap<Place, u64>,
}

impl Totals {
    /// Returns the bytes in all places. The sum cannot overflow, because no commit exceeds the limit.
    pub(super) fn bytes(&self) -> u64 {
        self.places.values().sum()
    }

    pub(super) fn add(&mut self, memory: &Memory) {
        self.versions += 1;
        self.fds += memory.fds().len() as u64;
        self.charge(memory.facts.place, memory.held_bytes());
        self.charge(Place::Host, memory.other_bytes());
    }

    pub(super) fn subtract(&mut self, memory: &Memory) {
        self.versions -= 1;
        self.fds -= memory.fds().len() as u64;
        self.discharge(memory.facts.place, memory.held_bytes());
        self.discharge(Place::Host, memory.other_bytes());
    }

    pub(super) fn add_control(&mut self, memory: ControlMemory) {
        self.fds += 1;
        self.charge(Place::Host, memory.bytes);
    }

    pub(super) fn subtract_control(&mut self, memory: ControlMemory) {
        self.fds -= 1;
        self.discharge(Place::Host, memory.bytes);
    }

    fn charge(&mut self, place: Place, bytes: u64) {
        if bytes > 0 {
            *self.places.entry(place).or_default() += bytes;
        }
    }

    fn discharge(&mut self, place: Place, bytes: u64) {
        if let Some(held) = self.places.get_mut(&place) {
            *held -= bytes;
        }
        self.places.retain(|_, bytes| *bytes > 0);
    }
}
