//! A model of the registry, as simple as possible: flat lists without redundant state, searched from the front.

use std::{collections::BTreeMap, sync::Arc};

use super::{model_objects::Objects, *};
use crate::registry::{
    log::Happening,
    names::Tombstone,
    people::Life,
    types::{Doubt, Notice, Refusal, Staleness, WithdrawalId},
};

/// The result of one event: the reply to a request, completions of others, and closes. Suggested names are left out.
#[derive(Debug, PartialEq, Default)]
pub(super) struct ModelEffects {
    pub(super) reply: Option<Outcome>,
    pub(super) unread: Unread,
    /// The descriptors of a growth.
    pub(super) grown: Vec<FdId>,
    pub(super) notices: Vec<(MemberId, RequestId, Outcome)>,
    pub(super) closed: Vec<FdId>,
    /// Requests to confirm that released memory is closed.
    pub(super) confirm: Vec<CloseId>,
    pub(super) quarantined: Vec<MemberId>,
    pub(super) disconnect: bool,
    pub(super) hang_up: bool,
    /// The effects on control memory, in order.
    pub(super) control: Vec<Effect>,
    pub(super) stop: bool,
}

#[derive(Debug)]
pub(super) struct ModelMember {
    pub(super) id: MemberId,
    pub(super) life: Life,
    has_pidfd: bool,
    pub(super) mps: Option<Arc<str>>,
    pub(super) lost_context: bool,
    pub(super) evicted: Option<(u32, u64)>,
    pub(super) row: u16,
    pub(super) simulated: bool,
    pub(super) since: u64,
    last_request: u64,
    pub(super) answered: Option<(RequestId, Answer)>,
}

impl ModelMember {
    pub(super) fn pid(&self) -> u32 {
        pid(self.id)
    }

    pub(super) fn state(&self) -> MemberState {
        match (self.life, self.evicted, self.lost_context) {
            (Life::Unproven, ..) => MemberState::Unproven,
            (Life::HeldByChild, ..) => MemberState::HeldByChild,
            (_, Some(_), _) => MemberState::Evicted,
            (Life::Suspect, ..) => MemberState::Suspect,
            (Life::Alive, None, true) => MemberState::LostContext,
            (Life::Alive, None, false) => MemberState::Alive,
        }
    }

    pub(super) fn doubt(&self) -> Option<Doubt> {
        match (self.has_pidfd, self.mps.is_some()) {
            (false, _) => Some(Doubt::NoPidfd),
            (true, true) => Some(Doubt::Mps),
            (true, false) => None,
        }
    }
}

/// Versions whose memory is being closed, and its bytes.
pub(super) type PendingClose = Vec<(Name, u64, Named, u64, (u32, bool))>;

/// A dead member whose memory is being closed.
#[derive(Debug)]
pub(super) struct DeadMember {
    pub(super) id: MemberId,
    pub(super) since: u64,
    pub(super) simulated: bool,
    pub(super) bytes: u64,
    /// The confirmation that it waits for.
    pub(super) until: CloseId,
}

#[derive(Debug)]
pub(super) struct ModelVersion {
    pub(super) name: Name,
    pub(super) number: u64,
    pub(super) memory: Arc<Memory>,
    pub(super) committer: u32,
    pub(super) uid: u32,
    pub(super) at: u64,
    pub(super) owner: Option<LeaseId>,
    pub(super) keeper: Option<MemberId>,
    pub(super) growths: u64,
    pub(super) latest: bool,
    pub(super) withdrawn: bool,
    /// The withdrawal with a deadline that it belongs to.
    pub(super) notice: Option<(WithdrawalId, Notice)>,
    /// Why it allows no new views.
    pub(super) stale: Option<Staleness>,
}

impl ModelVersion {
    pub(super) fn withdrawn_answer(&self) -> Answer {
        Answer::Withdrawn { notice: self.notice.map(|(_, notice)| notice) }
    }

    pub(super) fn check_stale(&self) -> Result<(), Refusal> {
        let name = self.name.clone();
        match self.stale {
            Some(Staleness::Withdrawn(notice)) => Err(Refusal::Withdrawn { name, version: self.number, notice }),
            Some(Staleness::DeviceLost(place)) => Err(Refusal::DeviceLost { name, version: self.number, place }),
            _ => Ok(()),
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        matches!(self.stale, Some(Staleness::DeviceLost(_)))
    }

    /// The descriptor of its first chunk, if it is at the place and not lost.
    pub(super) fn chunk_at(&self, place: Place) -> Option<FdId> {
        let is_there = self.memory.facts.place == place && !self.is_lost();
        self.memory.chunks.first().filter(|_| is_there)?.fd
    }

    pub(super) fn cannot_grow(&self, why: NoGrowth) -> Refusal {
        Refusal::CannotGrow { name: self.name.clone(), version: self.number, why }
    }
}

#[derive(Debug)]
pub(super) struct VersionLease {
    pub(super) id: LeaseId,
    pub(super) member: MemberId,
    pub(super) name: Name,
    pub(super) number: u64,
    pub(super) origin: RequestId,
}

impl VersionLease {
    pub(super) fn is_on(&self, version: &ModelVersion) -> bool {
        self.name == version.name && self.number == version.number
    }
}

/// A segment that a queue holds.
#[derive(Debug)]
pub(super) struct ModelAttachment {
    pub(super) queue: (Name, u64),
    pub(super) number: u32,
    pub(super) segment: (Name, u64),
}

#[derive(Debug)]
pub(super) struct ModelClaim {
    pub(super) id: ClaimId,
    pub(super) member: MemberId,
    pub(super) name: Name,
    pub(super) origin: RequestId,
}

#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) member: MemberId,
    pub(super) ticket: RequestId,
    pub(super) waits_for: WaitFor,
}

#[derive(Debug, Clone)]
pub(super) enum WaitFor {
    Open(Open),
    Build(Name),
    Withdrawal(LeaseId),
    Growth(LeaseId),
    /// Events of names that match this pattern, after this point.
    Watch(partywall_wire::Pattern, u64),
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) bounds: Bounds,
    /// True for users whose member that joined last is simulated.
    pub(super) simulated: BTreeMap<u32, bool>,
    pub(super) members: Vec<ModelMember>,
    pub(super) deaths: u64,
    pub(super) unproven_deaths: u64,
    pub(super) dead_members: Vec<DeadMember>,
    /// The versions that this event has released so far, with their bytes.
    pub(super) pending_close: PendingClose,
    /// Closes and confirmations that wait until no row is being cleared.
    held_back: (Vec<FdId>, Vec<CloseId>),
    closings: u64,
    /// Memory that was released and is not closed yet.
    unclosed: Vec<(CloseId, PendingClose)>,
    /// Everything that ever happened to a name.
    pub(super) history: Vec<Happening>,
    /// The event up to which watchers have been notified.
    pub(super) notified: u64,
    pub(super) versions: Vec<ModelVersion>,
    /// The ends of names that do not exist any more.
    pub(super) ends: Vec<(Name, Tombstone)>,
    /// Withdrawals whose deadlines have not passed, with the members that withdrew the names.
    pub(super) withdrawals: Vec<(WithdrawalId, MemberId)>,
    /// The owners of the names that these withdrew.
    pub(super) withdrawn: BTreeMap<WithdrawalId, (u32, bool)>,
    pub(super) noticed: u64,
    pub(super) now: u64,
    /// The highest version number of each name that has a version.
    pub(super) numbers: BTreeMap<Name, u64>,
    pub(super) version_leases: Vec<VersionLease>,
    /// Segments that queues held.
    pub(super) attachments: Vec<ModelAttachment>,
    /// The numbers that each queue that exists has ever given.
    pub(super) given: Vec<((Name, u64), u32)>,
    pub(super) claims: Vec<ModelClaim>,
    pub(super) waits: Vec<Waiting>,
    pub(super) objects: Objects,
    pub(super) leases: u64,
    granted_claims: u64,
}

impl Model {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            simulated: BTreeMap::new(),
            members: Vec::new(),
            deaths: 0,
            unproven_deaths: 0,
            dead_members: Vec::new(),
            pending_close: Vec::new(),
            held_back: Default::default(),
            closings: 0,
            unclosed: Vec::new(),
            history: Vec::new(),
            notified: 0,
            versions: Vec::new(),
            ends: Vec::new(),
            withdrawals: Vec::new(),
            withdrawn: BTreeMap::new(),
            noticed: 0,
            now: 0,
            numbers: BTreeMap::new(),
            version_leases: Vec::new(),
            attachments: Vec::new(),
            given: Vec::new(),
            claims: Vec::new(),
            waits: Vec::new(),
            objects: Objects::default(),
            leases: 0,
            granted_claims: 0,
        }
    }

    /// Returns whether another member of a user may join.
    pub(super) fn has_room(&self, uid: u32) -> bool {
        let there = self.members.iter().filter(|m| matches!(m.life, Life::Alive | Life::HeldByChild)).count() as u64;
        there < self.bounds.members
            && self.members_of(uid) < self.quota(uid).members
            && ((self.members.len() + self.objects.uncleared.len()) as u64) < self.bounds.rows
    }

    fn members_of(&self, uid: u32) -> u64 {
        self.members.iter().filter(|m| self::uid(m.id) == uid).count() as u64
    }

    /// Returns whether no member or GPU memory of a user uses the other driver.
    pub(super) fn admits(&self, uid: u32, simulated: bool) -> bool {
        let on_a_gpu = |v: &ModelVersion| v.uid == uid && v.memory.facts.place.needs_driver();
        let anything = self.members_of(uid) > 0 || self.versions.iter().any(on_a_gpu);
        !anything || self.is_simulated(uid) == simulated
    }

    pub(super) fn is_simulated(&self, uid: u32) -> bool {
        self.simulated.get(&uid).copied().unwrap_or(false)
    }

    fn quota(&self, uid: u32) -> Quota {
        if uid == 0 { self.bounds.own } else { self.bounds.guests }
    }

    pub(super) fn within(&self, uid: u32, limit: Limit, held: u64, more: u64) -> Result<(), Refusal> {
        let needed = held + more;
        let quota = self.quota(uid);
        let allowed = match limit {
            Limit::Names => quota.names,
            Limit::Fds => quota.fds,
            Limit::Pinned(_) => quota.pinned,
            Limit::Leases => quota.leases,
            Limit::Timelines => quota.timelines,
            Limit::Semaphores => quota.semaphores,
            Limit::Waits => quota.waits,
            _ => quota.bytes,
        };
        if needed > allowed {
            Err(Refusal::Quota { uid, limit, allowed, held, needed, holders: Vec::new() })
        } else {
            Ok(())
        }
    }

    /// Refuses another lease of a member.
    pub(super) fn one_more_lease(&self, member: MemberId) -> Result<(), Refusal> {
        over(Limit::LeasesOfMember, self.bounds.member_leases, self.leases_of(member) + 1)?;
        let holders = self.version_leases.iter().map(|held| held.member);
        let holders: Vec<_> = holders.chain(self.objects.leases.iter().map(|held| held.member)).collect();
        over(Limit::Leases, self.bounds.leases, holders.len() as u64 + 1)?;
        let of_user = holders.iter().filter(|holder| uid(**holder) == uid(member)).count() as u64;
        self.within(uid(member), Limit::Leases, of_user, 1)
    }

    /// Refuses another name of a user.
    pub(super) fn one_more_name(&self, uid: u32) -> Result<(), Refusal> {
        let latest = self.versions.iter().filter(|v| v.latest && v.uid == uid).count();
        let claims = self.claims.iter().filter(|c| self::uid(c.member) == uid).count();
        self.within(uid, Limit::Names, (latest + claims) as u64 + self.timelines_of(uid) + self.semaphores_of(uid), 1)
    }

    /// Refuses more memory of a user.
    pub(super) fn more_memory(&self, uid: u32, fds: u64, bytes: u64) -> Result<(), Refusal> {
        let own = self.versions.iter().filter(|v| v.uid == uid);
        let held: u64 = own.clone().map(|v| v.memory.held_bytes() + v.memory.other_bytes()).sum();
        let held_fds: u64 = own.map(|v| v.memory.fds().len() as u64).sum();
        let (control_fds, control) = self.control_memory(Some(uid));
        self.within(uid, Limit::Bytes, held + control, bytes)?;
        self.within(uid, Limit::Fds, held_fds + control_fds, fds)
    }

    /// Refuses more bytes at a place, and others elsewhere.
    pub(super) fn more_at(&self, uid: u32, place: Place, bytes: u64, others: u64) -> Result<(), Refusal> {
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + bytes + others)?;
        self.more_on_node(uid, place, bytes)?;
        self.more_memory(uid, 0, bytes + others)
    }

    /// Refuses more pinned memory on a node.
    pub(super) fn more_on_node(&self, uid: u32, place: Place, bytes: u64) -> Result<(), Refusal> {
        let Place::Pinned(node) = place else { return Ok(()) };
        let there = self.versions.iter().filter(|v| v.memory.facts.place == place);
        let own = there.clone().filter(|v| v.uid == uid);
        let limit = Limit::Pinned(Some(node));
        over(limit, self.bounds.pinned, there.map(|v| v.memory.held_bytes()).sum::<u64>() + bytes)?;
        self.within(uid, limit, own.map(|v| v.memory.held_bytes()).sum::<u64>(), bytes)
    }

    /// Refuses what only the owner may do.
    pub(super) fn only(&self, member: MemberId, owner: u32, what: OtherUsers) -> Result<(), Refusal> {
        let uid = uid(member);
        if uid == owner { Ok(()) } else { Err(Refusal::OtherUser { what, owner, uid }) }
    }

    /// Refuses a name under one of another user.
    pub(super) fn under_own_names(&self, member: MemberId, name: &Name, is_timeline: bool) -> Result<(), Refusal> {
        let parts: Vec<_> = name.as_str().split('/').collect();
        for end in 1..parts.len() {
            let above = called(&parts[..end].join("/"));
            if let Some(latest) = self.latest(&above)
                && (!is_timeline || self.holds_on(member, |v| v.name == above && v.memory.control.is_some()).is_empty())
            {
                self.only(member, latest.uid, OtherUsers::Create { name: above.to_string() })?;
            }
        }
        Ok(())
    }

    /// Returns the administrator's names to it, and to others their own and shared ones.
    pub(super) fn sees(&self, member: MemberId, owner: u32, shared: bool) -> bool {
        shared || [owner, 0].contains(&uid(member))
    }

    pub(super) fn apply(&mut self, event: &Event, at: u64) -> ModelEffects {
        self.now = at;
        let mut effects = ModelEffects::default();
        match event {
            Event::Joined { member, identity } => {
                self.simulated.insert(identity.uid, identity.simulated);
                let is_free =
                    |row: &u16| !self.objects.uncleared.contains(row) && self.members.iter().all(|m| m.row != *row);
                let row = (0..).find(is_free).unwrap();
                self.members.push(ModelMember {
                    id: *member,
                    row,
                    life: Life::Alive,
                    has_pidfd: identity.has_pidfd,
                    mps: None,
                    lost_context: false,
                    evicted: None,
                    simulated: identity.simulated,
                    since: at,
                    last_request: 0,
                    answered: None,
                });
            }
            Event::Suspected { member } => {
                self.waits.retain(|q| q.member != *member);
                let record = self.member(*member);
                if record.life != Life::HeldByChild {
                    record.life = Life::Suspect;
                }
            }
            Event::Dismissed { .. } => unreachable!("the model has no operators"),
            Event::Resumed { member } => {
                self.member(*member).life = Life::Alive;
                self.notify_stale(*member, |_| true, &mut effects);
            }
            Event::DeadlinePassed { id } => self.deadline_passed(*id, &mut effects),
            Event::DeviceLost { place, chunks } => self.lose(*place, chunks, &mut effects),
            Event::HeldByChild { member } => {
                self.waits.retain(|q| q.member != *member);
                self.abandon_claims(*member, &mut effects);
                self.member(*member).life = Life::HeldByChild;
            }
            Event::Died { member } => {
                self.notify_of(*member, Ending::OwnerDied, *member, &mut effects);
                self.deaths += 1;
                if self.member(*member).doubt().is_some() && (self.leases_of(*member) > 0 || self.writes(*member)) {
                    self.member(*member).life = Life::Unproven;
                    self.unproven_deaths += 1;
                    effects.quarantined.push(*member);
                } else {
                    self.give_back(*member, true, &mut effects);
                }
            }
            Event::Expired { member } => {
                if self.members.iter().any(|m| m.id == *member && m.life == Life::Unproven) {
                    self.give_back(*member, true, &mut effects);
                }
            }
            Event::Closed { id } => {
                self.dead_members.retain(|dead| dead.until != *id);
                let place = self.unclosed.iter().position(|(unclosed, _)| unclosed == id).unwrap();
                let mut closed = self.unclosed.remove(place).1;
                closed.sort_by_key(|(name, version, ..)| (name.clone(), *version));
                for (name, version, named, bytes, owned) in closed {
                    self.note(named, &name, owned, Change::Reclaimed { version, bytes });
                }
            }
            Event::CellSettled { at } => self.settle(*at),
            Event::RowCleared { row } => assert!(self.objects.uncleared.remove(row)),
            Event::TimelineEnded { name } => self.end_timeline(name, TimelineEnding::Abandoned, &mut effects),
            Event::Request { member, request, call, received } => {
                let record = self.member(*member);
                let asks = call.only_asks();
                let repeated = !asks && request.0 <= record.last_request;
                let spared = matches!(call, Call::Bye | Call::UsesGpu { .. } | Call::ContextLost { .. });
                let refused = record.evicted.filter(|_| !spared).map(|(by, at)| Err(Refusal::Evicted { by, at }));
                let known = if repeated { self.known(*member, *request, call).map(Ok) } else { None };
                let settled = refused.or(known);
                if settled.is_some() {
                    effects.closed.extend(received.all());
                }
                let outcome = settled.unwrap_or_else(|| self.call(*member, *request, call, received, &mut effects));
                if !asks
                    && let Ok(answer) = &outcome
                    && let Some(record) = self.members.iter_mut().find(|record| record.id == *member)
                {
                    record.last_request = record.last_request.max(request.0);
                    let is_grant = matches!(
                        answer,
                        Answer::Committed { .. }
                            | Answer::Opened(_)
                            | Answer::Build { .. }
                            | Answer::Timeline(_)
                            | Answer::Semaphore { .. }
                    );
                    let is_present = matches!(answer, Answer::Pending | Answer::Happened(_) | Answer::Withdrawn { .. });
                    if !is_grant && !is_present {
                        record.answered = Some((*request, answer.clone()));
                    }
                }
                effects.reply = Some(outcome);
            }
        }
        self.collect_garbage(&mut effects);
        self.close_unused_slabs(&mut effects);
        let pending_close = std::mem::take(&mut self.pending_close);
        if !pending_close.is_empty() {
            self.closings += 1;
            effects.confirm.push(CloseId(self.closings));
            self.unclosed.push((CloseId(self.closings), pending_close));
        }
        for dead in self.dead_members.iter_mut().filter(|dead| dead.until == CloseId(0)) {
            dead.until = CloseId(self.closings);
        }
        self.notify_watchers(&mut effects);
        let held_back = &mut self.held_back;
        held_back.0.append(&mut effects.closed);
        held_back.1.append(&mut effects.confirm);
        if self.objects.uncleared.is_empty() {
            (effects.closed, effects.confirm) = std::mem::take(held_back);
        }
        effects.closed.sort();
        effects.confirm.sort();
        // The order among them is not promised, only the content of each.
        effects.notices.sort_by_key(|(member, ticket, _)| (*member, *ticket));
        effects
    }

    /// Returns the requests of a member that wait or have granted something.
    pub(super) fn open_requests(&self, member: MemberId) -> Vec<RequestId> {
        let waits = self.waits.iter().map(|q| (q.member, q.ticket));
        let claims = self.claims.iter().map(|claim| (claim.member, claim.origin));
        let leases = self.version_leases.iter().map(|held| (held.member, held.origin));
        let objects = self.objects.leases.iter().map(|held| (held.member, held.origin));
        let all = waits.chain(claims).chain(leases).chain(objects);
        all.filter(|(of, _)| *of == member).map(|(_, request)| request).collect()
    }

    pub(super) fn notify(&mut self, waiting: &Waiting, outcome: Outcome, effects: &mut ModelEffects) {
        self.waits.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
        effects.notices.push((waiting.member, waiting.ticket, outcome));
    }

    pub(super) fn grant_claim(&mut self, member: MemberId, origin: RequestId, name: &Name) -> Answer {
        self.granted_claims += 1;
        let claim = ClaimId(self.granted_claims);
        self.claims.push(ModelClaim { id: claim, member, name: name.clone(), origin });
        Answer::Build { claim }
    }

    pub(super) fn member(&mut self, member: MemberId) -> &mut ModelMember {
        self.members.iter_mut().find(|m| m.id == member).unwrap()
    }

    pub(super) fn names(&self) -> u64 {
        self.versions.iter().filter(|v| v.latest).count() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        let held = self.versions.iter().map(|v| v.memory.held_bytes() + v.memory.other_bytes());
        held.sum::<u64>() + self.control_memory(None).1
    }

    pub(super) fn fds(&self) -> u64 {
        let held = self.versions.iter().map(|v| v.memory.fds().len() as u64);
        held.sum::<u64>() + self.control_memory(None).0
    }

    pub(super) fn leases_of(&self, member: MemberId) -> u64 {
        let objects = self.objects.leases.iter().filter(|g| g.member == member).count();
        (self.version_leases.iter().filter(|h| h.member == member).count() + objects) as u64
    }
}

pub(super) fn named(memory: &Memory) -> Named {
    match memory.facts.control {
        None => Named::Segment,
        Some(Control { topic: Some(_), .. }) => Named::Topic,
        Some(Control { queue: Some(_), .. }) => Named::Queue,
        Some(_) => Named::Pool,
    }
}

/// Returns the user of a member: the broker's, or for every third member another.
pub(super) fn uid(member: MemberId) -> u32 {
    if member.0.is_multiple_of(3) { GUEST } else { 0 }
}

pub(super) fn is_meant(record: &ModelMember, whom: Whom) -> bool {
    match whom {
        Whom::Pid(pid) => record.pid() == pid,
        Whom::Member(id) => record.id.0 == id,
    }
}

pub(super) fn over(limit: Limit, allowed: u64, needed: u64) -> Result<(), Refusal> {
    if needed > allowed { Err(Refusal::Limit { limit, allowed, needed, holders: Vec::new() }) } else { Ok(()) }
}
