//! The members and their users: who is there, what belongs to whom, and what each may use.
//!
//! A member is listed here with the numbers of its leases, claims, waits and cells. What is behind these numbers is not
//! known here.

mod holders;
mod member;
mod users;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use partywall_wire::{Freed, HolderInfo};
use serde::{Deserialize, Serialize};

use super::{
    effect::{Answer, RowOwner},
    event::{Call, Identity},
    near::near_numbers,
    pages::count,
    types::{
        Bounds, CellId, ClaimId, Doubt, LeaseId, Limit, MemberId, Millis, Name, OtherUsers, Refusal, RequestId,
        STALE_TICKET, WaitId, Whom, limit,
    },
};

pub(super) use holders::Holders;
pub(super) use member::{Ender, Eviction, Life, Member, Rows, Waiting};
pub(super) use users::{Owned, Totals, User};

/// The members and their users.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct People {
    bounds: Bounds,
    members: BTreeMap<MemberId, Member>,
    rows: Rows,
    /// Always equal to a recount.
    totals: Totals,
    /// The users of all members, and those to which something belongs or has belonged. Its sums equal a recount.
    users: BTreeMap<u32, User>,
    last_lease: u64,
    last_wait: u64,
    /// Members that died.
    deaths: u64,
    /// Deaths among them that did not prove that the work of the process was over.
    unproven_deaths: u64,
}

impl People {
    pub(crate) fn new(bounds: Bounds) -> Self {
        // Sums of numbers from members saturate at the maximum, so the maximum must exceed every bound.
        let bounds = Bounds { bytes: bounds.bytes.min(u64::MAX - 1), ..bounds };
        Self { bounds, ..Self::default() }
    }

    /// Adds a member, if a row is left. The server has checked that one is.
    pub(crate) fn join(&mut self, id: MemberId, identity: Identity, at: Millis) {
        let Some(row) = self.rows.take() else { return };
        if !identity.operator {
            self.user_mut(identity.uid).simulated = identity.simulated;
        }
        self.members.insert(id, Member::new(identity, row, at));
    }

    /// Forgets a member, which holds nothing any more. Its row is given back separately.
    pub(crate) fn forget(&mut self, id: MemberId) -> Option<Member> {
        self.members.remove(&id)
    }

    /// Frees a row of which nothing is left.
    pub(crate) fn give_back_row(&mut self, row: u16) {
        self.rows.give_back(row);
    }

    /// Counts a death. Returns the member, whose leases are in quarantine from now on, if it does not prove that the
    /// member's work is over.
    pub(crate) fn die(&mut self, id: MemberId) -> Option<(&Member, Doubt)> {
        let record = self.members.get_mut(&id)?;
        self.deaths += 1;
        let doubt = record.doubt().filter(|_| record.all_leases() > 0 || !record.cells.is_empty())?;
        record.life = Life::Unproven;
        self.unproven_deaths += 1;
        Some((record, doubt))
    }

    /// Evicts a member, or replaces the reason of its eviction. Returns whether it was not evicted before.
    pub(crate) fn evict(&mut self, id: MemberId, eviction: Eviction) -> bool {
        self.members.get_mut(&id).is_some_and(|record| record.eviction.replace(eviction).is_none())
    }

    /// Records that a member's CUDA context is broken.
    pub(crate) fn lose_context(&mut self, id: MemberId) {
        self.change(id, |record| record.lost_context = true);
    }

    /// Records that a request was granted which did more than ask, and the answer if that is found only here.
    pub(crate) fn answered(&mut self, id: MemberId, request: RequestId, answer: Option<&Answer>) {
        self.change(id, |record| {
            record.last_request = record.last_request.max(Some(request));
            if let Some(answer) = answer {
                record.answered = Some((request, answer.clone()));
            }
        });
    }

    /// Gives a member a lease on a version.
    pub(crate) fn lease_version(&mut self, id: MemberId) -> LeaseId {
        let lease = self.new_lease(id);
        self.change(id, |record| _ = record.version_leases.insert(lease));
        lease
    }

    /// Ends a lease of a member on a version, of which it has `bytes` fewer bytes open.
    pub(crate) fn drop_version_lease(&mut self, id: MemberId, lease: LeaseId, bytes: u64) {
        self.user_of(id).leases -= 1;
        self.change(id, |record| {
            record.version_leases.remove(&lease);
            record.bytes = record.bytes.saturating_sub(bytes);
        });
    }

    /// Records that a member has more bytes open.
    pub(crate) fn grow(&mut self, id: MemberId, bytes: u64) {
        self.change(id, |record| record.bytes = record.bytes.saturating_add(bytes));
    }

    /// Gives a member a lease on a timeline or semaphore.
    pub(crate) fn lease_object(&mut self, id: MemberId) -> LeaseId {
        let lease = self.new_lease(id);
        self.change(id, |record| _ = record.object_leases.insert(lease));
        lease
    }

    /// Ends a lease of a member on a timeline or semaphore.
    pub(crate) fn drop_object_lease(&mut self, id: MemberId, lease: LeaseId) {
        self.user_of(id).leases -= 1;
        self.change(id, |record| _ = record.object_leases.remove(&lease));
    }

    /// Has a member keep the name of a version without a lease.
    pub(crate) fn keep_name(&mut self, id: MemberId, name: Name, version: u64) {
        self.change(id, |record| _ = record.names.insert((name, version)));
    }

    /// Records that a version is gone whose name a member kept.
    pub(crate) fn drop_name(&mut self, id: MemberId, name: &Name, version: u64) {
        self.change(id, |record| _ = record.names.remove(&(name.clone(), version)));
    }

    /// Gives a member a claim.
    pub(crate) fn add_claim(&mut self, id: MemberId, claim: ClaimId) {
        self.user_of(id).claims += 1;
        self.change(id, |record| _ = record.claims.insert(claim));
    }

    /// Ends a claim of a member.
    pub(crate) fn drop_claim(&mut self, id: MemberId, claim: ClaimId) {
        self.user_of(id).claims -= 1;
        self.change(id, |record| _ = record.claims.remove(&claim));
    }

    /// Lets a member and its streams store in a cell.
    pub(crate) fn add_cell(&mut self, id: MemberId, cell: CellId) {
        self.change(id, |record| _ = record.cells.insert(cell));
    }

    /// Records that neither a member nor its streams store in a cell any more.
    pub(crate) fn drop_cell(&mut self, id: MemberId, cell: CellId) {
        self.change(id, |record| _ = record.cells.remove(&cell));
    }

    /// Returns the cells that a member and its streams may store in, and forgets them.
    pub(crate) fn take_cells(&mut self, id: MemberId) -> BTreeSet<CellId> {
        self.members.get_mut(&id).map(|record| std::mem::take(&mut record.cells)).unwrap_or_default()
    }

    /// Takes a request out of the waits of its member.
    pub(crate) fn drop_wait(&mut self, id: MemberId, ticket: RequestId) -> Option<(WaitId, Waiting)> {
        let wait = self.members.get_mut(&id)?.waits.remove(&ticket)?;
        self.user_of(id).waits -= 1;
        Some(wait)
    }

    pub(crate) fn set_life(&mut self, member: MemberId, life: Life) {
        self.change(member, |record| record.life = life);
    }

    /// Records that the member has opened a GPU.
    pub(crate) fn uses_gpu(&mut self, member: MemberId, mps: Option<String>) {
        if let Some(mps) = mps {
            self.change(member, |record| record.mps = Some(mps.into()));
        }
    }

    /// Records a request among the waits of its member.
    pub(crate) fn enlist(&mut self, member: MemberId, ticket: RequestId, what: Waiting) -> Result<WaitId, Refusal> {
        let record = self.members.get(&member).ok_or(STALE_TICKET)?;
        let uid = record.identity.uid;
        limit(Limit::WaitsOfMember, self.bounds.member_waits, record.waits.len() as u64 + 1)?;
        let of_all: u64 = self.users.values().map(|user| user.waits).sum();
        limit(Limit::Waits, self.bounds.waits, of_all + 1)?;
        self.check_one_more(uid, Limit::Waits, |user| user.waits)?;
        self.last_wait += 1;
        let id = WaitId(self.last_wait);
        self.user_mut(uid).waits += 1;
        self.change(member, |record| _ = record.waits.insert(ticket, (id, what)));
        Ok(id)
    }

    pub(crate) fn members(&self) -> &BTreeMap<MemberId, Member> {
        &self.members
    }

    pub(crate) fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.get(&id)
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn users(&self) -> &BTreeMap<u32, User> {
        &self.users
    }

    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    pub(crate) fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Returns the number of members that died, and how many of these deaths did not prove that the work was over.
    pub(crate) fn deaths(&self) -> (u64, u64) {
        (self.deaths, self.unproven_deaths)
    }
    /// Refuses another member of a user if the maximum number is connected. A member counts while it, or a child that
    /// it forked, is connected. Operators do not count, nor do members that have hung up or are in quarantine, but
    /// those keep their row, and count for their user.
    pub(crate) fn check_room(&self, uid: u32) -> Result<(), Refusal> {
        let is_connected = |member: &&Member| matches!(member.life, Life::Alive | Life::HeldByChild);
        let connected = self.sharing_members().map(|(_, member)| member).filter(is_connected).count();
        limit(Limit::Clients, self.bounds.members, connected as u64 + 1)?;
        self.check_quota(uid, Limit::Clients, self.members_of(uid), 1)?;
        self.check_rows()
    }

    /// Refuses a member if no row is left.
    pub(crate) fn check_rows(&self) -> Result<(), Refusal> {
        limit(Limit::Clients, self.bounds.rows, self.rows.in_use() + 1)
    }

    /// Returns whether a connection is an operator's.
    pub(crate) fn is_operator(&self, member: MemberId) -> bool {
        self.members.get(&member).is_some_and(|record| record.identity.operator)
    }

    /// Returns a member's user, and its row in the memory of that user's members.
    pub(crate) fn row_of(&self, member: MemberId) -> Option<(u32, u16)> {
        self.members.get(&member).map(|member| (member.identity.uid, member.row))
    }

    /// Returns a member's row.
    pub(crate) fn row(&self, member: MemberId) -> Option<u16> {
        self.members.get(&member).map(|member| member.row)
    }

    /// Returns the number of members besides `member`.
    pub(crate) fn others(&self, member: MemberId) -> u64 {
        self.sharing_members().filter(|(id, _)| **id != member).count() as u64
    }

    /// Refuses calls of an operator that only members may make.
    pub(crate) fn check_membership(&self, member: MemberId, call: &Call) -> Result<(), Refusal> {
        if self.is_operator(member) && call.needs_member() { Err(Refusal::NotMember) } else { Ok(()) }
    }

    /// Refuses a member that cannot own a name of this user: it is gone, leaves, or belongs to another user.
    pub(crate) fn check_may_own(&self, owner: MemberId, uid: u32) -> Result<(), Refusal> {
        let may = |record: &Member| {
            let lives = matches!(record.life, Life::Alive | Life::Suspect) && record.eviction.is_none();
            lives && record.identity.uid == uid && !record.identity.operator
        };
        if self.members.get(&owner).is_some_and(may) {
            return Ok(());
        }
        Err(Refusal::NoSuchMember { whom: Whom::Member(owner.0), near: Vec::new() })
    }

    /// Refuses the requests of an evicted member, except those that make other members safer.
    pub(crate) fn check_evicted(&self, member: MemberId, call: &Call) -> Result<(), Refusal> {
        match self.members.get(&member).and_then(|record| record.eviction) {
            Some(Eviction { by, at })
                if !matches!(call, Call::Bye | Call::UsesGpu { .. } | Call::ContextLost { .. }) =>
            {
                Err(Refusal::Evicted { by, at })
            }
            _ => Ok(()),
        }
    }

    /// Returns those of these members that a member may act for. Refuses if all are others': processes of two users may
    /// report the same pid, each in its PID namespace.
    pub(crate) fn own(
        &self,
        member: MemberId,
        meant: Vec<MemberId>,
        what: OtherUsers,
    ) -> Result<Vec<MemberId>, Refusal> {
        let is_own = |id: &MemberId| self.acts_for(member, self.uid_of(*id));
        let (own, others): (Vec<_>, Vec<_>) = meant.into_iter().partition(is_own);
        match others.first() {
            Some(other) if own.is_empty() => self.check_owner(member, self.uid_of(*other), || what).map(|()| own),
            _ => Ok(own),
        }
    }

    pub(crate) fn meant(&self, whom: Whom) -> Vec<MemberId> {
        match whom {
            Whom::Member(id) => {
                let id = MemberId(id);
                let is_meant = self.members.contains_key(&id) && !self.is_operator(id);
                is_meant.then_some(id).into_iter().collect()
            }
            Whom::Pid(pid) => {
                let of_pid = self.sharing_members().filter(|(_, record)| record.identity.pid == pid);
                of_pid.map(|(id, _)| *id).collect()
            }
        }
    }

    pub(crate) fn near_pids(&self, wanted: u32, among: impl Fn(&MemberId) -> bool) -> Vec<u32> {
        let others = self.sharing_members().filter(|(id, _)| among(id)).map(|(_, record)| record.identity.pid);
        near_numbers(others, wanted)
    }

    pub(crate) fn departed(&self, id: MemberId) -> Option<Freed> {
        let record = self.members.get(&id)?;
        Some(Freed {
            member: id.0,
            pid: record.identity.pid,
            command: record.identity.command.to_string(),
            leases: count(record.all_leases()),
            bytes: record.bytes,
        })
    }

    /// Returns a member as others learn of it when it ends something.
    pub(crate) fn ender(&self, member: MemberId) -> Ender {
        match self.members.get(&member) {
            Some(Member { identity, .. }) => Ender { pid: identity.pid, command: Arc::clone(&identity.command) },
            None => Ender { pid: 0, command: "".into() },
        }
    }

    pub(crate) fn pid_of(&self, member: MemberId) -> u32 {
        self.members.get(&member).map_or(0, |record| record.identity.pid)
    }

    /// Returns the members in quarantine.
    pub(crate) fn in_quarantine(&self) -> Vec<MemberId> {
        self.members_in(Life::Unproven)
    }

    /// Returns the connected members, without operators.
    pub(crate) fn connected(&self) -> Vec<MemberId> {
        self.members_in(Life::Alive).into_iter().filter(|member| !self.is_operator(*member)).collect()
    }

    /// Returns whether a member is dead, and its leases are in quarantine.
    pub(crate) fn is_unproven(&self, member: MemberId) -> bool {
        self.members.get(&member).is_some_and(|record| record.life == Life::Unproven)
    }

    /// Returns whether a process, or a child of it, belongs to this member.
    pub(crate) fn has_process(&self, member: MemberId) -> bool {
        self.members.get(&member).is_some_and(|record| record.life != Life::Unproven)
    }

    /// Returns members by row.
    pub(crate) fn rows_of<'a>(&self, holders: impl Iterator<Item = &'a MemberId>) -> BTreeMap<u16, RowOwner> {
        let members = holders.filter_map(|id| self.members.get(id));
        let owner =
            |member: &Member| RowOwner { uid: member.identity.uid, pid: member.identity.pid, state: member.state() };
        members.map(|member| (member.row, owner(member))).collect()
    }

    /// Returns the holders of an object with their rows, given the leases of each member.
    pub(crate) fn holders_of(&self, leases: &BTreeMap<MemberId, u64>) -> (Vec<HolderInfo>, Vec<u16>) {
        let known = leases.iter().filter_map(|(id, leases)| {
            let member = self.members.get(id)?;
            let info = HolderInfo {
                pid: member.identity.pid,
                command: member.identity.command.to_string(),
                leases: count(*leases),
                blocks: 0,
                tasks: 0,
                waiting: 0,
                unproven: member.life == Life::Unproven,
            };
            Some((info, member.row))
        });
        known.take(HOLDERS).unzip()
    }

    fn new_lease(&mut self, id: MemberId) -> LeaseId {
        self.user_of(id).leases += 1;
        self.last_lease += 1;
        LeaseId(self.last_lease)
    }

    fn change(&mut self, id: MemberId, change: impl FnOnce(&mut Member)) {
        if let Some(record) = self.members.get_mut(&id) {
            change(record);
        }
    }

    fn user_of(&mut self, id: MemberId) -> &mut User {
        let uid = self.uid_of(id);
        self.user_mut(uid)
    }

    /// Returns the members that are not operators.
    fn sharing_members(&self) -> impl Iterator<Item = (&MemberId, &Member)> {
        self.members.iter().filter(|(_, member)| !member.identity.operator)
    }

    fn members_in(&self, life: Life) -> Vec<MemberId> {
        self.members.iter().filter(|(_, record)| record.life == life).map(|(id, _)| *id).collect()
    }
}

/// Holders in one answer. With a command line of 256 bytes each, they are the largest part of any answer.
const HOLDERS: usize = 100;
