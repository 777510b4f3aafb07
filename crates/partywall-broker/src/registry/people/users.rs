//! Users: who may do what to things of others, and what each may use.
//!
//! The broker's own user sees all, and may evict members of others and free what dead ones have left; it can end the
//! broker anyway. What a version or an object takes is charged to the user to which it belongs, until it is closed.
//!
//! The server only says which user a connection has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Member, People};
use crate::registry::types::{
    ControlMemory, Limit, MemberId, Memory, Name, OtherUsers, Place, Quota, Refusal, UserInfo, limit,
};

/// What one user has.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct User {
    pub(crate) totals: Totals,
    pub(crate) timelines: u64,
    pub(crate) semaphores: u64,
    /// Its claims, each of which may become a name.
    pub(crate) claims: u64,
    /// Leases of its members, those in quarantine among them.
    pub(crate) leases: u64,
    /// Waiting requests of its members.
    pub(crate) waits: u64,
    /// True if its members run on the simulated driver, or the last one did if it has none now.
    pub(crate) simulated: bool,
}

impl User {
    /// Returns the names that count for its quota.
    pub(crate) fn names(&self) -> u64 {
        self.totals.names + self.timelines + self.semaphores + self.claims
    }
}

/// The user to which something belongs, and whether other users may open it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owned {
    pub(crate) uid: u32,
    pub(crate) shared: bool,
}

/// Sums over all entries and control memory. Limits are checked against them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// Entries with a latest version.
    pub(crate) names: u64,
    pub(crate) versions: u64,
    pub(crate) fds: u64,
    /// Bytes by place: chunks count where they are, tables and control memory in main memory. Empty places are absent.
    pub(crate) places: BTreeMap<Place, u64>,
}

impl Totals {
    /// Returns the bytes in all places. The sum cannot overflow, because no commit exceeds the limit.
    pub(crate) fn bytes(&self) -> u64 {
        self.places.values().sum()
    }

    pub(crate) fn add(&mut self, memory: &Memory) {
        self.versions += 1;
        self.fds += memory.fds().len() as u64;
        self.charge(memory.facts.place, memory.held_bytes());
        self.charge(Place::Host, memory.other_bytes());
    }

    pub(crate) fn subtract(&mut self, memory: &Memory) {
        self.versions -= 1;
        self.fds -= memory.fds().len() as u64;
        self.discharge(memory.facts.place, memory.held_bytes());
        self.discharge(Place::Host, memory.other_bytes());
    }

    pub(crate) fn add_control(&mut self, memory: ControlMemory) {
        self.fds += 1;
        self.charge(Place::Host, memory.bytes);
    }

    pub(crate) fn subtract_control(&mut self, memory: ControlMemory) {
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

impl People {
    /// Changes the sums, those of the user and those of all.
    pub(crate) fn charge(&mut self, uid: u32, change: impl Fn(&mut Totals)) {
        change(&mut self.totals);
        change(&mut self.users.entry(uid).or_default().totals);
    }

    /// Returns the record of a user.
    pub(crate) fn user_mut(&mut self, uid: u32) -> &mut User {
        self.users.entry(uid).or_default()
    }

    /// Returns a member's user.
    pub(crate) fn uid_of(&self, member: MemberId) -> u32 {
        self.members.get(&member).map_or(NOBODY, |record| record.identity.uid)
    }

    /// Returns whether a member belongs to a user, or may act for it.
    pub(crate) fn acts_for(&self, member: MemberId, uid: u32) -> bool {
        [uid, self.bounds.user].contains(&self.uid_of(member))
    }

    /// Returns whether listings show something to a member.
    pub(crate) fn sees(&self, member: MemberId, owned: Owned) -> bool {
        owned.shared || self.acts_for(member, owned.uid)
    }

    /// Refuses a member of another user than `owner`.
    pub(crate) fn check_owner(
        &self,
        member: MemberId,
        owner: u32,
        what: impl FnOnce() -> OtherUsers,
    ) -> Result<(), Refusal> {
        let uid = self.uid_of(member);
        if uid == owner { Ok(()) } else { Err(Refusal::OtherUser { what: what(), owner, uid }) }
    }

    /// Refuses to open something that belongs to another user and is not shared.
    pub(crate) fn check_access(&self, member: MemberId, name: &Name, owned: Owned) -> Result<(), Refusal> {
        if owned.shared {
            return Ok(());
        }
        self.check_owner(member, owned.uid, || OtherUsers::Open { name: name.to_string() })
    }

    /// Refuses to show something that belongs to another user and is not shared.
    pub(crate) fn check_sight(&self, member: MemberId, name: &Name, owned: Owned) -> Result<(), Refusal> {
        if self.sees(member, owned) {
            return Ok(());
        }
        self.check_owner(member, owned.uid, || OtherUsers::Inspect { name: name.to_string() })
    }

    /// Refuses what would exceed the user's share of a limit.
    pub(super) fn check_quota(&self, uid: u32, limit: Limit, held: u64, more: u64) -> Result<(), Refusal> {
        let needed = held.saturating_add(more);
        let quota = self.quota_of(uid);
        let allowed = match limit {
            Limit::Names => quota.names,
            Limit::Fds => quota.fds,
            Limit::Bytes => quota.bytes,
            Limit::Pinned(_) => quota.pinned,
            Limit::Leases => quota.leases,
            Limit::Timelines => quota.timelines,
            Limit::Semaphores => quota.semaphores,
            Limit::Waits => quota.waits,
            _ => quota.members,
        };
        if needed > allowed {
            Err(Refusal::Quota { uid, limit, allowed, held, needed, holders: Vec::new() })
        } else {
            Ok(())
        }
    }

    /// Refuses another name of a user, of any kind.
    pub(crate) fn check_names(&self, uid: u32) -> Result<(), Refusal> {
        self.check_one_more(uid, Limit::Names, User::names)
    }

    /// Refuses one more of what `held` counts.
    pub(crate) fn check_one_more(&self, uid: u32, limit: Limit, held: impl Fn(&User) -> u64) -> Result<(), Refusal> {
        self.check_quota(uid, limit, self.users.get(&uid).map_or(0, held), 1)
    }

    /// Refuses further descriptors and bytes of a user.
    pub(crate) fn check_memory(&self, uid: u32, fds: u64, bytes: u64) -> Result<(), Refusal> {
        let (held_fds, held_bytes) = self.users.get(&uid).map_or((0, 0), |user| (user.totals.fds, user.totals.bytes()));
        self.check_quota(uid, Limit::Bytes, held_bytes, bytes)?;
        self.check_quota(uid, Limit::Fds, held_fds, fds)
    }

    /// Refuses further control memory of a user.
    pub(crate) fn check_control(&self, uid: u32, bytes: u64) -> Result<(), Refusal> {
        limit(Limit::Fds, self.bounds.fds, self.totals.fds + 1)?;
        limit(Limit::Bytes, self.bounds.bytes, self.totals.bytes().saturating_add(bytes))?;
        self.check_memory(uid, 1, bytes)
    }

    /// Refuses further bytes of a user at a place, and `others` beside them that are elsewhere.
    pub(crate) fn check_bytes(&self, uid: u32, place: Place, bytes: u64, others: u64) -> Result<(), Refusal> {
        let all = bytes.saturating_add(others);
        limit(Limit::Bytes, self.bounds.bytes, self.totals.bytes().saturating_add(all))?;
        self.check_node(uid, place, bytes)?;
        self.check_memory(uid, 0, all)
    }

    /// Refuses further bytes of a user at a place, if it is the pinned memory of a NUMA node.
    pub(crate) fn check_node(&self, uid: u32, place: Place, bytes: u64) -> Result<(), Refusal> {
        let Place::Pinned(node) = place else { return Ok(()) };
        let there = |totals: &Totals| totals.places.get(&place).copied().unwrap_or(0);
        limit(Limit::Pinned(Some(node)), self.bounds.pinned, there(&self.totals).saturating_add(bytes))?;
        let of_user = self.users.get(&uid).map_or(0, |user| there(&user.totals));
        self.check_quota(uid, Limit::Pinned(Some(node)), of_user, bytes)
    }

    /// Returns the number of a user's members, those in quarantine among them.
    pub(crate) fn members_of(&self, uid: u32) -> u64 {
        self.sharing_members().filter(|(_, member)| member.identity.uid == uid).count() as u64
    }

    /// Returns whether a user's members run on the simulated driver.
    pub(crate) fn is_simulated(&self, uid: u32) -> bool {
        self.users.get(&uid).is_some_and(|user| user.simulated)
    }

    /// Returns whether a member runs on the simulated driver.
    pub(crate) fn runs_simulated(&self, member: MemberId) -> bool {
        self.is_simulated(self.uid_of(member))
    }

    /// Refuses another lease of a member.
    pub(crate) fn check_leases(&self, member: MemberId) -> Result<(), Refusal> {
        let held = self.members.get(&member).map_or(0, Member::all_leases);
        limit(Limit::LeasesOfMember, self.bounds.member_leases, held + 1)?;
        limit(Limit::Leases, self.bounds.leases, self.all_leases() + 1)?;
        let uid = self.uid_of(member);
        self.check_one_more(uid, Limit::Leases, |user| user.leases)
    }

    /// Returns the number of leases of all members.
    pub(crate) fn all_leases(&self) -> u64 {
        self.users.values().map(|user| user.leases).sum()
    }

    /// Returns the users that have something, of those that a member may act for.
    pub(crate) fn users_seen_by(&self, asker: MemberId) -> Vec<UserInfo> {
        let mut members = BTreeMap::<u32, u64>::new();
        let mut seats = BTreeMap::<u32, u64>::new();
        for (_, member) in self.members.iter().filter(|(id, _)| **id != asker) {
            let counted = if member.identity.operator { &mut seats } else { &mut members };
            *counted.entry(member.identity.uid).or_default() += 1;
        }
        let users = self.users.iter().filter(|(uid, _)| self.acts_for(asker, **uid)).map(|(uid, user)| {
            let on_node = |(place, held): (&Place, &u64)| match place {
                Place::Pinned(node) => Some((*node, *held)),
                Place::Host | Place::Gpu(_) => None,
            };
            let mut nodes: Vec<_> = user.totals.places.iter().filter_map(on_node).collect();
            nodes.sort_by_key(|(node, held)| (std::cmp::Reverse(*held), *node));
            nodes.truncate(NODES);
            UserInfo {
                uid: *uid,
                members: members.get(uid).copied().unwrap_or(0),
                names: user.names(),
                fds: user.totals.fds,
                bytes: user.totals.bytes(),
                leases: user.leases,
                timelines: user.timelines,
                semaphores: user.semaphores,
                waits: user.waits,
                pinned: nodes,
                seats: seats.get(uid).copied().unwrap_or(0),
                limits: self.quota_of(*uid),
            }
        });
        users.take(USERS).collect()
    }

    /// Returns the limits of a user.
    fn quota_of(&self, uid: u32) -> Quota {
        if uid == self.bounds.user { self.bounds.own } else { self.bounds.guests }
    }
}

/// The user of no member: no process has this number.
const NOBODY: u32 = u32::MAX;

/// Users in a status.
const USERS: usize = 100;

/// NUMA nodes listed for each user.
const NODES: usize = 16;
