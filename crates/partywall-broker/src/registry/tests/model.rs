//! A model of the registry, as simple as possible: flat lists without redundant state, searched from the front.

use std::{collections::BTreeMap, sync::Arc};

use super::{model_objects::Objects, *};
use crate::registry::{
    effect::{
        Counts, Departed, Handle, Happening, Holder, HoldingQueue, MemberRow, NameRow, Opened, Refused, VersionRow,
        WaitRow,
    },
    event::DetachSegment,
    state::Life,
    tombstones::{REMEMBERED, Tombstone},
    types::{
        Awaited, BlockControl, Change, Deadline, Doubt, Ending, Limit, MemberState, Named, NoGrowth, Notice, Staleness,
        Then, Whom, WithdrawalId,
    },
    users::Owned,
};

/// The result of one event: the reply to a request, completions of others, and closes. Suggested names are left out.
#[derive(Debug, PartialEq, Default)]
pub(super) struct ModelEffects {
    pub(super) reply: Option<Outcome>,
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
    mps: Option<Arc<str>>,
    lost_context: bool,
    pub(super) evicted: Option<(u32, u64)>,
    pub(super) row: u16,
    simulated: bool,
    since: u64,
    last_request: u64,
    answered: Option<(RequestId, Answer)>,
}

impl ModelMember {
    fn pid(&self) -> u32 {
        pid(self.id)
    }

    fn state(&self) -> MemberState {
        match (self.life, self.evicted, self.lost_context) {
            (Life::Unproven, ..) => MemberState::Unproven,
            (Life::HeldByChild, ..) => MemberState::HeldByChild,
            (_, Some(_), _) => MemberState::Evicted,
            (Life::Suspect, ..) => MemberState::Suspect,
            (Life::Alive, None, true) => MemberState::LostContext,
            (Life::Alive, None, false) => MemberState::Alive,
        }
    }

    fn doubt(&self) -> Option<Doubt> {
        match (self.has_pidfd, self.mps.is_some()) {
            (false, _) => Some(Doubt::NoPidfd),
            (true, true) => Some(Doubt::Mps),
            (true, false) => None,
        }
    }
}

/// Versions whose memory is being closed, and its bytes.
type PendingClose = Vec<(Name, u64, Named, u64, (u32, bool))>;

/// A dead member whose memory is being closed.
#[derive(Debug)]
struct DeadMember {
    id: MemberId,
    since: u64,
    simulated: bool,
    bytes: u64,
    /// The confirmation that it waits for.
    until: CloseId,
}

#[derive(Debug)]
pub(super) struct ModelVersion {
    name: Name,
    number: u64,
    pub(super) memory: Arc<Memory>,
    committer: u32,
    uid: u32,
    shared: bool,
    at: u64,
    owner: Option<LeaseId>,
    left_to: Option<MemberId>,
    pub(super) growths: u64,
    latest: bool,
    withdrawn: bool,
    /// The withdrawal with a deadline that it belongs to.
    notice: Option<(WithdrawalId, Notice)>,
    /// Why it allows no new views.
    stale: Option<Staleness>,
}

impl ModelVersion {
    fn withdrawn_answer(&self) -> Answer {
        Answer::Withdrawn { notice: self.notice.map(|(_, notice)| notice) }
    }

    fn check_stale(&self) -> Result<(), Refused> {
        let name = self.name.clone();
        match self.stale {
            Some(Staleness::Withdrawn(notice)) => Err(Refused::Withdrawn { name, version: self.number, notice }),
            Some(Staleness::DeviceLost(gpu)) => Err(Refused::DeviceLost { name, version: self.number, gpu }),
            _ => Ok(()),
        }
    }

    fn is_lost(&self) -> bool {
        matches!(self.stale, Some(Staleness::DeviceLost(_)))
    }

    /// The descriptor of its first chunk, if it is on the GPU and not lost.
    pub(super) fn chunk_on(&self, gpu: [u8; 16]) -> Option<FdId> {
        let is_there = self.memory.place == Place::Gpu(gpu) && !self.is_lost();
        self.memory.chunks.first().filter(|_| is_there)?.fd
    }

    fn cannot_grow(&self, why: NoGrowth) -> Refused {
        Refused::CannotGrow { name: self.name.clone(), version: self.number, why }
    }
}

#[derive(Debug)]
pub(super) struct VersionLease {
    pub(super) id: LeaseId,
    pub(super) member: MemberId,
    name: Name,
    number: u64,
    origin: RequestId,
}

impl VersionLease {
    fn is_on(&self, version: &ModelVersion) -> bool {
        self.name == version.name && self.number == version.number
    }
}

/// A segment that a queue holds.
#[derive(Debug)]
struct ModelAttachment {
    queue: (Name, u64),
    number: u32,
    segment: (Name, u64),
}

#[derive(Debug)]
pub(super) struct ModelClaim {
    pub(super) id: ClaimId,
    pub(super) member: MemberId,
    name: Name,
    origin: RequestId,
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
    Watch(Pattern, u64),
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) bounds: Bounds,
    /// True for users whose member that joined last is simulated.
    simulated: BTreeMap<u32, bool>,
    pub(super) members: Vec<ModelMember>,
    deaths: u64,
    unproven_deaths: u64,
    dead_members: Vec<DeadMember>,
    /// The versions that this event has released so far, with their bytes.
    pending_close: PendingClose,
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
    ends: Vec<(Name, Tombstone)>,
    /// Withdrawals whose deadlines have not passed, with the members that withdrew the names.
    pub(super) withdrawals: Vec<(WithdrawalId, MemberId)>,
    /// The owners of the names that these withdrew.
    withdrawn: BTreeMap<WithdrawalId, (u32, bool)>,
    noticed: u64,
    pub(super) now: u64,
    /// The highest version number of each name that has a version.
    numbers: BTreeMap<Name, u64>,
    pub(super) version_leases: Vec<VersionLease>,
    /// Segments that queues held.
    attachments: Vec<ModelAttachment>,
    /// The numbers that each queue that exists has ever given.
    given: Vec<((Name, u64), u32)>,
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
        let on_a_gpu = |v: &ModelVersion| v.uid == uid && v.memory.place != Place::Host;
        let anything = self.members_of(uid) > 0 || self.versions.iter().any(on_a_gpu);
        !anything || self.is_simulated(uid) == simulated
    }

    fn is_simulated(&self, uid: u32) -> bool {
        self.simulated.get(&uid).copied().unwrap_or(false)
    }

    fn quota(&self, uid: u32) -> Quota {
        if uid == 0 { self.bounds.own } else { self.bounds.guests }
    }

    pub(super) fn within(&self, uid: u32, limit: Limit, needed: u64) -> Result<(), Refused> {
        let Quota { names, fds, bytes, .. } = self.quota(uid);
        let allowed = match limit {
            Limit::Names => names,
            Limit::Fds => fds,
            _ => bytes,
        };
        if needed > allowed { Err(Refused::Quota { uid, limit, allowed, needed }) } else { Ok(()) }
    }

    /// Refuses another name of a user.
    pub(super) fn one_more_name(&self, uid: u32) -> Result<(), Refused> {
        let latest = self.versions.iter().filter(|v| v.latest && v.uid == uid).count();
        let claims = self.claims.iter().filter(|c| self::uid(c.member) == uid).count();
        self.within(uid, Limit::Names, (latest + claims) as u64 + self.objects_of(uid) + 1)
    }

    /// Refuses more memory of a user.
    pub(super) fn more_memory(&self, uid: u32, fds: u64, bytes: u64) -> Result<(), Refused> {
        let own = self.versions.iter().filter(|v| v.uid == uid);
        let held: u64 = own.clone().map(|v| v.memory.held_bytes() + v.memory.other_bytes()).sum();
        let held_fds: u64 = own.map(|v| v.memory.fds().len() as u64).sum();
        let (control_fds, control) = self.control_memory(Some(uid));
        self.within(uid, Limit::Bytes, held + control + bytes)?;
        self.within(uid, Limit::Fds, held_fds + control_fds + fds)
    }

    /// Refuses what only the owner may do.
    pub(super) fn only(&self, member: MemberId, owner: u32, what: OtherUsers) -> Result<(), Refused> {
        let uid = uid(member);
        if uid == owner { Ok(()) } else { Err(Refused::OtherUser { what, owner, uid }) }
    }

    /// Refuses a name under one of another user.
    pub(super) fn under_own_names(&self, member: MemberId, name: &Name, is_timeline: bool) -> Result<(), Refused> {
        let parts: Vec<_> = name.as_str().split('/').collect();
        for end in 1..parts.len() {
            let above = Name::new(parts[..end].join("/"));
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
            Event::DeviceLost { gpu, chunks } => self.lose(*gpu, chunks, &mut effects),
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
            Event::Request { member, request, call } => {
                let record = self.member(*member);
                let asks = call.only_asks();
                let repeated = !asks && request.0 <= record.last_request;
                let spared = matches!(call, Call::Leave | Call::UsesGpu { .. } | Call::ContextLost);
                let refused = record.evicted.filter(|_| !spared).map(|(by, at)| Err(Refused::Evicted { by, at }));
                let known = if repeated { self.known(*member, *request, call).map(Ok) } else { None };
                let settled = refused.or(known);
                if settled.is_some() {
                    effects.closed.extend(call.fds());
                }
                let outcome = settled.unwrap_or_else(|| self.call(*member, *request, call, &mut effects));
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

    fn call(&mut self, member: MemberId, request: RequestId, call: &Call, effects: &mut ModelEffects) -> Outcome {
        match call {
            Call::Commit(commit) => {
                let outcome = self.commit(member, request, commit, effects);
                if outcome.is_err() {
                    effects.closed.extend(commit.memory.fds());
                }
                outcome
            }
            Call::Open(open) => self.open(member, request, open),
            Call::OpenOrBuild { name } => {
                if self.latest(name).is_some() {
                    let open = Open { name: name.clone(), version: None, access: Access::Read, wait: false };
                    self.open(member, request, &open)
                } else if self.claims.iter().any(|c| c.name == *name) {
                    self.enqueue(member, request, WaitFor::Build(name.clone()))
                } else {
                    over(Limit::Names, self.bounds.names, self.names() + self.claims.len() as u64 + 1)?;
                    self.under_own_names(member, name, false)?;
                    self.one_more_name(uid(member))?;
                    Ok(self.grant_claim(member, request, name))
                }
            }
            Call::AbandonBuild { claim } => {
                let Some(i) = self.claims.iter().position(|c| c.id == *claim && c.member == member) else {
                    return Err(Refused::Stale(Handle::Claim));
                };
                self.pass_claim_on(i, effects);
                Ok(Answer::Done)
            }
            Call::Cancel { ticket } => {
                let Some(i) = self.waits.iter().position(|q| q.member == member && q.ticket == *ticket) else {
                    return Err(Refused::Stale(Handle::Ticket));
                };
                self.waits.remove(i);
                Ok(Answer::Done)
            }
            Call::GiveUp { request: given_up } => {
                self.waits.retain(|q| q.member != member || q.ticket != *given_up);
                if let Some(i) = self.claims.iter().position(|c| c.member == member && c.origin == *given_up) {
                    self.pass_claim_on(i, effects);
                }
                let of_versions = self.version_leases.iter().map(|held| (held.member, held.origin, held.id));
                let of_objects = self.objects.leases.iter().map(|held| (held.member, held.origin, held.id));
                let made = |(of, origin, _): &(_, _, _)| (*of, *origin) == (member, *given_up);
                match of_versions.chain(of_objects).find(made) {
                    Some((.., lease)) => self.call(member, request, &Call::Release { lease }, effects),
                    None => Ok(Answer::Done),
                }
            }
            Call::Release { lease } | Call::LeaveName { lease }
                if self.objects.leases.iter().any(|g| g.id == *lease) =>
            {
                if !self.objects.leases.iter().any(|g| g.id == *lease && g.member == member) {
                    return Err(Refused::Stale(Handle::Lease));
                }
                if self.member(member).lost_context {
                    self.end_timeline_of(*lease, TimelineEnding::Closed, effects);
                } else {
                    self.drop_object_lease(*lease, effects);
                }
                Ok(Answer::Done)
            }
            Call::Release { lease } | Call::LeaveName { lease } => {
                if !self.version_leases.iter().any(|h| h.id == *lease && h.member == member) {
                    return Err(Refused::Stale(Handle::Lease));
                }
                let left = self.versions.iter_mut().find(|v| {
                    let is_owned = v.memory.lifetime == Lifetime::Owned && v.memory.kind != Kind::Legacy;
                    matches!(call, Call::LeaveName { .. }) && v.owner == Some(*lease) && v.latest && is_owned
                });
                match left {
                    Some(left) => left.left_to = Some(member),
                    None => self.withdraw_owned(*lease, Ending::Withdrawn, member, effects),
                }
                if !self.member(member).lost_context
                    && let Some(control) = self.drop_version_lease(*lease, effects)
                {
                    let row = self.member(member).row;
                    effects.control.push(Effect::Return { control: control.slot_table(), row });
                }
                Ok(Answer::Done)
            }
            Call::WithdrawNames => {
                self.withdraw_all_owned(member, Ending::Withdrawn, member, effects);
                Ok(Answer::Done)
            }
            Call::AwaitWithdrawal { lease } => {
                let Some(held) = self.version_leases.iter().find(|h| h.id == *lease && h.member == member) else {
                    return Err(Refused::Stale(Handle::Lease));
                };
                let version = self.version(&held.name, held.number);
                if version.withdrawn {
                    return Ok(version.withdrawn_answer());
                }
                self.enqueue(member, request, WaitFor::Withdrawal(*lease))
            }
            Call::Grow(growth) => {
                let outcome = self.grow(member, growth, effects);
                if outcome.is_err() {
                    effects.closed.extend(growth.fds());
                }
                outcome
            }
            Call::Refresh { lease, growths, chunks } => {
                let version = self.held(member, *lease)?;
                if version.growths <= *growths {
                    return Ok(Answer::Done);
                }
                version.check_stale()?;
                if *chunks > version.memory.chunks.len() as u64 {
                    return Err(Refused::Invalid("the version never had so many chunks"));
                }
                let chunks = *chunks as usize;
                let memory = Arc::clone(&version.memory);
                Ok(Answer::Grown { growths: version.growths, chunks, memory })
            }
            Call::AwaitGrowth { lease, growths } => {
                let version = self.held(member, *lease)?;
                if version.growths > *growths {
                    return Ok(Answer::Done);
                }
                if version.memory.reserved == 0 {
                    return Err(version.cannot_grow(NoGrowth::Fixed));
                }
                if version.owner.is_none() {
                    return Err(version.cannot_grow(NoGrowth::CommitterGone));
                }
                self.enqueue(member, request, WaitFor::Growth(*lease))
            }
            Call::Remove { name, deadline } => {
                let Some((version, owner)) = self.latest(name).map(|v| (v.number, v.uid)) else {
                    return Err(match self.notice_of(name) {
                        Some(notice) => Refused::Withdrawing { name: name.clone(), notice },
                        None => self.unknown(member, name, None),
                    });
                };
                self.only(member, owner, OtherUsers::Remove { name: name.to_string() })?;
                let notice = deadline.map(|Deadline { after, then }| {
                    self.noticed += 1;
                    let id = WithdrawalId(self.noticed);
                    self.withdrawals.push((id, member));
                    let latest = self.latest(name).unwrap();
                    self.withdrawn.insert(id, (latest.uid, latest.shared));
                    effects.control.push(Effect::AwaitDeadline { id, after });
                    (id, Notice { pid: pid(member), at: self.now, until: self.now + after, then })
                });
                self.withdraw_by(name, Ending::Removed, member, notice, effects);
                let held: Vec<_> = self.version_leases.iter().filter(|h| h.name == *name).collect();
                let is_held = |v: &&ModelVersion| held.iter().any(|h| h.number == v.number) || self.is_attached(v);
                let kept = self.versions.iter().filter(|v| v.name == *name).filter(is_held);
                let bytes_kept = kept.map(|v| v.memory.bytes()).sum();
                let holders = self.members.iter().filter_map(|m| {
                    let leases = held.iter().filter(|h| h.member == m.id).count() as u32;
                    let command = command(m.id);
                    let unproven = m.life == Life::Unproven;
                    (leases > 0).then_some(Holder { pid: m.pid(), command, leases, unproven, row: m.row })
                });
                let mut queues: Vec<_> = self.attachments.iter().filter(|a| a.segment.0 == *name).collect();
                queues.sort_by_key(|a| (a.segment.1, a.queue.clone()));
                let queues = queues.into_iter().map(|a| HoldingQueue {
                    name: a.queue.0.clone(),
                    version: a.queue.1,
                    attachment: a.number,
                });
                let (holders, queues) = (holders.collect(), queues.collect());
                Ok(Answer::Removed { version, bytes_kept, holders, queues, notice: notice.map(|(_, notice)| notice) })
            }
            Call::List { after: None } => {
                let is_seen = |name: &&Name| {
                    let newest = self.versions.iter().filter(|v| v.name == **name).max_by_key(|v| v.number);
                    newest.is_some_and(|v| self.sees(member, v.uid, v.shared))
                };
                let names = self.numbers.keys().filter(is_seen).map(|name| {
                    let older: Vec<_> = self.versions.iter().filter(|v| v.name == *name && !v.latest).collect();
                    NameRow {
                        name: name.clone(),
                        latest: self.latest(name).map(|v| self.row(v)),
                        older: older.len() as u32,
                        older_bytes: older.iter().map(|v| v.memory.bytes()).sum(),
                        notice: self.notice_of(name),
                        lost: self.latest(name).is_none()
                            && older.iter().max_by_key(|v| v.number).is_some_and(|v| v.is_lost()),
                    }
                });
                Ok(Answer::Names { names: names.collect(), more: false })
            }
            Call::Members { after: None } => {
                let is_seen = |id: MemberId| self.sees(member, uid(id), false);
                let rows = self.members.iter().filter(|m| is_seen(m.id)).map(|m| MemberRow {
                    member: m.id,
                    pid: m.pid(),
                    uid: uid(m.id),
                    command: command(m.id),
                    state: m.state(),
                    doubt: m.doubt(),
                    mps: m.mps.clone(),
                    row: Some(m.row),
                    timelines: self.timelines_written_by(m.id),
                    semaphores: self.semaphores_open_to(m.id),
                    pools: self.pools_open_to(m.id),
                    leases: self.leases_of(m.id) as u32,
                    bytes: self.bytes_of(|holder| holder == m.id),
                    since: m.since,
                    waits: self.waits_of(m.id),
                    simulated: m.simulated,
                });
                let dead = self.dead_members.iter().filter(|dead| is_seen(dead.id)).map(|dead| MemberRow {
                    member: dead.id,
                    pid: pid(dead.id),
                    uid: uid(dead.id),
                    command: command(dead.id),
                    state: MemberState::Dead,
                    doubt: None,
                    mps: None,
                    row: None,
                    timelines: 0,
                    semaphores: Vec::new(),
                    pools: Vec::new(),
                    leases: 0,
                    bytes: dead.bytes,
                    since: dead.since,
                    waits: Vec::new(),
                    simulated: dead.simulated,
                });
                let mut members: Vec<_> = rows.chain(dead).collect();
                members.sort_by_key(|row| row.member);
                Ok(Answer::Members { members, more: false })
            }
            Call::Status => {
                let at = |place| {
                    let chunks =
                        self.versions.iter().filter(|v| v.memory.place == place).map(|v| v.memory.held_bytes());
                    let others = self.versions.iter().filter(|_| place == Place::Host).map(|v| v.memory.other_bytes());
                    let control = if place == Place::Host { self.control_memory(None).1 } else { 0 };
                    (place, chunks.chain(others).sum::<u64>() + control)
                };
                let mut bytes: Vec<_> = [Place::Host, GPU].map(at).into_iter().filter(|(_, n)| *n > 0).collect();
                bytes.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
                let mut largest: Vec<_> = self
                    .numbers
                    .keys()
                    .filter_map(|name| {
                        let of_name = self.versions.iter().filter(|v| v.name == *name);
                        let newest = of_name.clone().max_by_key(|v| v.number).unwrap();
                        self.sees(member, newest.uid, newest.shared).then_some(())?;
                        Some((name.clone(), newest.memory.place, of_name.map(|v| v.memory.held_bytes()).sum::<u64>()))
                    })
                    .collect();
                largest.sort_by_key(|(name, _, bytes)| (std::cmp::Reverse(*bytes), name.clone()));
                Ok(Answer::Status(Box::new(Counts {
                    simulated: self.is_simulated(uid(member)),
                    members: self.members.iter().filter(|m| m.id != member).count() as u64,
                    names: self.names(),
                    versions: self.versions.len() as u64,
                    timelines: self.object_counts().0,
                    semaphores: self.object_counts().1,
                    leases: (self.version_leases.len() + self.objects.leases.len()) as u64,
                    unproven: self.members.iter().filter(|m| m.life == Life::Unproven).count() as u64,
                    unproven_bytes: self.bytes_of(|holder| self.is_unproven(holder)),
                    deaths: self.deaths,
                    unproven_deaths: self.unproven_deaths,
                    fds: self.fds(),
                    bytes,
                    largest,
                    // The audit recounts what each user has.
                    users: Vec::new(),
                })))
            }
            Call::Stop { force } => {
                self.only(member, 0, OtherUsers::Stop)?;
                let (timelines, semaphores) = self.object_counts();
                let names = self.names() + timelines + semaphores;
                let members = self.members.len() as u64 - 1;
                if !force && names + members > 0 {
                    return Err(Refused::InUse { names, members });
                }
                effects.stop = true;
                Ok(Answer::Done)
            }
            Call::Leave => {
                let record = self.member(member);
                let is_believed = record.evicted.is_none() && !record.lost_context;
                self.notify_of(member, Ending::Withdrawn, member, effects);
                if is_believed {
                    self.give_back(member, false, effects);
                }
                (effects.disconnect, effects.hang_up) = (is_believed, !is_believed);
                Ok(Answer::Done)
            }
            Call::Watch(watch) => self.watch(member, request, watch),
            Call::UsesGpu { mps } => {
                if mps.is_some() {
                    self.member(member).mps.clone_from(mps);
                }
                Ok(Answer::Done)
            }
            Call::ContextLost => {
                self.member(member).lost_context = true;
                self.end_timelines_of(member, TimelineEnding::OwnerFaulted, effects);
                self.detach(member, TimelineEnding::OwnerFaulted, effects);
                Ok(Answer::Done)
            }
            Call::Evict { whom, kill } => {
                let meant: Vec<_> = self.members.iter().filter(|m| is_meant(m, *whom)).map(|m| m.id).collect();
                if meant.is_empty() {
                    return Err(Refused::NoSuchMember { whom: *whom, near: Vec::new() });
                }
                if uid(member) != 0 {
                    self.only(member, uid(meant[0]), OtherUsers::Evict { pid: pid(meant[0]) })?;
                }
                if meant.contains(&member) {
                    return Err(Refused::NotYourself);
                }
                if meant.iter().all(|id| self.is_unproven(*id)) {
                    return Err(Refused::IsUnproven { pid: pid(meant[0]) });
                }
                let mut members = Vec::new();
                for id in meant.into_iter().filter(|id| !self.is_unproven(*id)).collect::<Vec<_>>() {
                    self.evict_one(id, member, effects);
                    members.push(self.departed(id));
                }
                if *kill {
                    let kills = members.iter().map(|departed| Effect::Kill(departed.member));
                    effects.control.extend(kills);
                }
                Ok(Answer::Evicted(members))
            }
            Call::FreeUnproven { pid } => {
                let meant: Vec<_> =
                    self.members.iter().filter(|m| pid.is_none_or(|pid| is_meant(m, Whom::Pid(pid)))).collect();
                let meant: Vec<_> =
                    meant.into_iter().filter(|m| pid.is_some() || self.sees(member, uid(m.id), false)).collect();
                let unproven: Vec<_> = meant.iter().filter(|m| m.life == Life::Unproven).map(|m| m.id).collect();
                if let (Some(pid), Some(first)) = (pid, meant.first())
                    && uid(member) != 0
                {
                    self.only(member, uid(first.id), OtherUsers::Free { pid: *pid })?;
                }
                match (pid, meant.first()) {
                    (Some(pid), None) => {
                        return Err(Refused::NoSuchMember { whom: Whom::Pid(*pid), near: Vec::new() });
                    }
                    (Some(pid), Some(record)) if unproven.is_empty() => {
                        return Err(Refused::NotUnproven { pid: *pid, state: record.state() });
                    }
                    _ => {}
                }
                let members = unproven.iter().map(|id| self.departed(*id)).collect();
                unproven.into_iter().for_each(|id| self.give_back(id, true, effects));
                Ok(Answer::Freed { members, more: false })
            }
            Call::OpenTimeline(open) => self.open_timeline(member, request, open, effects),
            Call::FollowTimeline { lease, .. } => self.follow(member, *lease),
            Call::AbandonTimeline { name } => self.abandon_timeline(member, name, effects),
            Call::OpenSemaphore(open) => self.open_semaphore(member, request, open, effects),
            Call::Attach { queue, segment } => self.attach(member, *queue, *segment, effects),
            Call::DetachSegment(DetachSegment { queue, attachment, in_use }) => {
                let (queue, _) = self.queue_of(member, *queue)?;
                let (name, version) = self.attached_segment(&queue, *attachment)?;
                if let Some(in_use) = *in_use {
                    return Err(Refused::AttachmentInUse { queue, name, version, in_use });
                }
                self.attachments.retain(|a| (&a.queue, a.number) != (&queue, *attachment));
                Ok(Answer::Done)
            }
            Call::OpenAttached { queue, attachment } => {
                let (queue, _) = self.queue_of(member, *queue)?;
                let (name, number) = self.attached_segment(&queue, *attachment)?;
                self.grant(member, request, &name, number, Access::Read)
            }
            Call::Objects { after: None } => Ok(Answer::Objects { objects: self.objects_listed(member), more: false }),
            Call::InspectObject { kind, name } => self.inspect_object(member, *kind, name),
            Call::Ping => Ok(Answer::Done),
            other => panic!("not in the model: {other:?}"),
        }
    }

    fn commit(&mut self, member: MemberId, request: RequestId, commit: &Commit, effects: &mut ModelEffects) -> Outcome {
        let Commit { name, memory, if_absent, claim, shared } = commit;
        let uid = uid(member);
        if let Some(claim) = claim
            && !self.claims.iter().any(|c| c.id == *claim && c.member == member && c.name == *name)
        {
            return Err(Refused::Stale(Handle::Claim));
        }
        match self.latest(name) {
            Some(latest) => self.only(member, latest.uid, OtherUsers::Create { name: name.to_string() })?,
            None => self.under_own_names(member, name, false)?,
        }
        if let Some(latest) = self.latest(name)
            && (*if_absent || memory.control.is_some() || latest.memory.control.is_some())
        {
            return Err(Refused::NameExists { name: name.clone(), version: latest.number });
        }
        if memory.control.is_some()
            && let Some((name, owner)) = self.foreign_timeline_under(uid, name)
        {
            return Err(Refused::OtherUser { what: OtherUsers::Create { name: name.to_string() }, owner, uid });
        }
        let names = self.names() + u64::from(self.latest(name).is_none());
        over(Limit::Names, self.bounds.names, names)?;
        if self.latest(name).is_none() && claim.is_none() {
            self.one_more_name(uid)?;
        }
        let bytes = memory.held_bytes() + memory.other_bytes();
        let fds = memory.fds().len() as u64;
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + bytes)?;
        over(Limit::Fds, self.bounds.fds, self.fds() + fds)?;
        self.more_memory(uid, fds, bytes)?;
        over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
        let memory = Arc::clone(memory);

        self.ends.retain(|(ended, _)| ended != name);
        let number = self.numbers.entry(name.clone()).or_default();
        *number += 1;
        let number = *number;
        let pid = pid(member);
        let named = named(&memory);
        if self.latest(name).is_none() {
            self.note(named, name, (uid, *shared), Change::Created { pid });
        }
        self.note(named, name, (uid, *shared), Change::Committed { version: number, bytes: memory.bytes(), pid });
        self.versions.iter_mut().filter(|v| v.name == *name).for_each(|v| v.latest = false);
        let lease = self.lease_version(member, name, number, request);
        self.versions.push(ModelVersion {
            name: name.clone(),
            number,
            memory,
            committer: pid,
            uid,
            shared: *shared,
            at: self.now,
            owner: Some(lease),
            left_to: None,
            growths: 0,
            latest: true,
            withdrawn: false,
            notice: None,
            stale: None,
        });
        self.claims.retain(|r| Some(r.id) != *claim);
        for waiting in self.waits.clone() {
            let open = match waiting.waits_for {
                WaitFor::Open(open) if open.name == *name && open.version.is_none_or(|v| v == number) => open,
                WaitFor::Build(of) if of == *name => {
                    Open { name: of, version: None, access: Access::Read, wait: false }
                }
                _ => continue,
            };
            self.waits.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
            let outcome = self.open(waiting.member, waiting.ticket, &open);
            effects.notices.push((waiting.member, waiting.ticket, outcome));
        }
        Ok(Answer::Committed { version: number, lease })
    }

    pub(super) fn held(&self, member: MemberId, lease: LeaseId) -> Result<&ModelVersion, Refused> {
        let held = self.version_leases.iter().find(|h| h.id == lease && h.member == member);
        let held = held.ok_or(Refused::Stale(Handle::Lease))?;
        Ok(self.version(&held.name, held.number))
    }

    fn attach(&mut self, member: MemberId, queue: LeaseId, segment: LeaseId, effects: &mut ModelEffects) -> Outcome {
        let (queue, object) = self.queue_of(member, queue)?;
        let found = self.held(member, segment)?;
        let segment = (found.name.clone(), found.number);
        if found.memory.control.is_some() || found.memory.lifetime == Lifetime::Shared {
            return Err(Refused::Invalid("a queue holds nothing but segments"));
        }
        if found.memory.kind == Kind::Legacy {
            return Err(Refused::CannotHold { name: segment.0, version: segment.1 });
        }
        let own: Vec<_> = self.attachments.iter().filter(|a| a.queue == queue).collect();
        if let Some(existing) = own.iter().find(|a| a.segment == segment) {
            return Ok(Answer::Attached { attachment: existing.number });
        }
        over(Limit::Attachments, self.bounds.attachments.into(), own.len() as u64 + 1)?;
        let entry = (0..).find(|entry| own.iter().all(|a| a.number % 32 != *entry)).unwrap();
        let before = self.given.iter().filter(|(of, number)| *of == queue && number % 32 == entry).count() as u32;
        let number = entry + 32 * before;
        self.given.push((queue.clone(), number));
        self.attachments.push(ModelAttachment { queue, number, segment });
        effects.control.push(Effect::Attach { object, attachment: number });
        Ok(Answer::Attached { attachment: number })
    }

    fn queue_of(&self, member: MemberId, lease: LeaseId) -> Result<((Name, u64), FdId), Refused> {
        let version = self.held(member, lease)?;
        match version.memory.control {
            Some(BlockControl { shape: Control { queue: Some(_), .. }, object: Some(object), .. }) => {
                Ok(((version.name.clone(), version.number), object.fd))
            }
            _ => Err(Refused::Invalid("only a queue has segments attached")),
        }
    }

    fn attached_segment(&self, queue: &(Name, u64), attachment: u32) -> Result<(Name, u64), Refused> {
        let found = self.attachments.iter().find(|a| a.queue == *queue && a.number == attachment);
        let gone = || Refused::NotAttached { queue: queue.0.clone(), attachment };
        found.map(|a| a.segment.clone()).ok_or_else(gone)
    }

    fn is_attached(&self, version: &ModelVersion) -> bool {
        self.attachments.iter().any(|a| a.segment.0 == version.name && a.segment.1 == version.number)
    }

    /// Returns the numbers of the attachments of the queue that a member's lease is on.
    pub(super) fn attached_to(&self, member: MemberId, lease: LeaseId) -> Vec<u32> {
        let Ok((queue, _)) = self.queue_of(member, lease) else { return Vec::new() };
        self.attachments.iter().filter(|a| a.queue == queue).map(|a| a.number).collect()
    }

    /// Returns the leases of a member on versions for which `is_meant` is true.
    pub(super) fn holds_on(&self, member: MemberId, is_meant: impl Fn(&ModelVersion) -> bool) -> Vec<LeaseId> {
        let own = self.version_leases.iter().filter(|h| h.member == member);
        own.filter(|h| is_meant(self.version(&h.name, h.number))).map(|h| h.id).collect()
    }

    fn version(&self, name: &Name, number: u64) -> &ModelVersion {
        self.versions.iter().find(|v| v.name == *name && v.number == number).unwrap()
    }

    fn grow(&mut self, member: MemberId, growth: &Growth, effects: &mut ModelEffects) -> Outcome {
        let version = self.held(member, growth.lease)?;
        let name = version.name.clone();
        let number = version.number;
        let before = Arc::clone(&version.memory);
        let why = if before.reserved == 0 {
            Some(NoGrowth::Fixed)
        } else if version.owner.is_none() {
            Some(NoGrowth::CommitterGone)
        } else if version.owner != Some(growth.lease) {
            Some(NoGrowth::NotCommitter)
        } else if version.growths != growth.growths {
            Some(NoGrowth::Behind)
        } else {
            None
        };
        if let Some(why) = why {
            return Err(version.cannot_grow(why));
        }
        if before.kind != growth.kind {
            return Err(Refused::Invalid("a version has one kind of memory"));
        }
        let mut memory = Memory { table: growth.table.clone(), tensors: growth.tensors, ..(*before).clone() };
        memory.chunks.extend(&growth.chunks);
        if memory.bytes() > before.reserved {
            let why = NoGrowth::Reserved { reserved: before.reserved, needed: memory.bytes() };
            return Err(version.cannot_grow(why));
        }
        over(Limit::Growths, self.bounds.growths, version.growths + 1)?;
        over(Limit::Chunks, self.bounds.chunks, memory.chunks.len() as u64)?;
        let bytes = |memory: &Memory| memory.bytes() + memory.other_bytes();
        over(Limit::Bytes, self.bounds.bytes, self.bytes() - bytes(&before) + bytes(&memory))?;
        over(Limit::Fds, self.bounds.fds, self.fds() - before.fds().len() as u64 + memory.fds().len() as u64)?;
        let more = memory.fds().len().saturating_sub(before.fds().len()) as u64;
        let grown = memory.bytes() - before.bytes() + memory.other_bytes().saturating_sub(before.other_bytes());
        self.more_memory(uid(member), more, grown)?;

        effects.closed.extend(before.table_fd());
        for version in self.versions.iter_mut().filter(|v| v.name == name && v.number == number) {
            version.memory = Arc::new(memory.clone());
            version.growths += 1;
        }
        self.notify_growth(&name, number, &Ok(Answer::Done), effects);
        Ok(Answer::Done)
    }

    fn notify_growth(&mut self, name: &Name, number: u64, outcome: &Outcome, effects: &mut ModelEffects) {
        for waiting in self.waits.clone() {
            if let WaitFor::Growth(lease) = &waiting.waits_for
                && self.version_leases.iter().any(|h| h.id == *lease && h.name == *name && h.number == number)
            {
                self.notify(&waiting, outcome.clone(), effects);
            }
        }
    }

    fn open(&mut self, member: MemberId, request: RequestId, open: &Open) -> Outcome {
        let Open { name, version, access, wait } = open;
        let latest = self.latest(name).map(|v| v.number);
        let wanted = version.or(latest);
        let found = self.versions.iter().find(|v| v.name == *name && Some(v.number) == wanted);
        let found = found.filter(|v| !v.withdrawn || version.is_some() && v.is_lost());
        if let Some(version) = found {
            return self.grant(member, request, name, version.number, *access);
        }
        match (self.numbers.get(name), version) {
            (Some(last), Some(v)) if v <= last || !wait => {
                let not_found = Refused::VersionNotFound { name: name.clone(), version: *v, latest };
                if self.end_of(name, *version).is_some() {
                    return Err(self.unknown(member, name, *version));
                }
                let newest = self.versions.iter().filter(|v| v.name == *name).max_by_key(|v| v.number).unwrap();
                if !newest.shared {
                    self.only(member, newest.uid, OtherUsers::Open { name: name.to_string() })?;
                }
                Err(not_found)
            }
            _ if *wait => self.enqueue(member, request, WaitFor::Open(open.clone())),
            _ => Err(self.unknown(member, name, *version)),
        }
    }

    fn grant(&mut self, member: MemberId, request: RequestId, name: &Name, number: u64, access: Access) -> Outcome {
        let version = self.version(name, number);
        if !version.shared {
            self.only(member, version.uid, OtherUsers::Open { name: name.to_string() })?;
        }
        version.check_stale()?;
        let simulated = self.is_simulated(version.uid);
        if version.memory.place != Place::Host && simulated != self.is_simulated(uid(member)) {
            return Err(Refused::OtherDriver { simulated });
        }
        if access == Access::Write && !version.memory.mutable {
            return Err(Refused::ReadOnly { name: name.clone(), version: number });
        }
        over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
        let lease = self.lease_version(member, name, number, request);
        Ok(self.opened(lease))
    }

    fn opened(&self, lease: LeaseId) -> Answer {
        let held = self.version_leases.iter().find(|h| h.id == lease).unwrap();
        let version = self.version(&held.name, held.number);
        Answer::Opened(Opened {
            lease,
            name: held.name.clone(),
            version: held.number,
            growths: version.growths,
            memory: Arc::clone(&version.memory),
            uid: version.uid,
            shared: version.shared,
        })
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

    fn known(&self, member: MemberId, request: RequestId, call: &Call) -> Option<Answer> {
        if self.waits.iter().any(|q| q.member == member && q.ticket == request) {
            return Some(Answer::Pending);
        }
        let record = self.members.iter().find(|record| record.id == member)?;
        if let Some((_, answer)) = record.answered.as_ref().filter(|(answered, _)| *answered == request) {
            return Some(answer.clone());
        }
        let held = self.version_leases.iter().find(|h| h.member == member && h.origin == request);
        match call {
            Call::Commit(_) => held.map(|h| Answer::Committed { version: h.number, lease: h.id }),
            Call::Open(_) | Call::OpenOrBuild { .. } | Call::OpenAttached { .. } => {
                if let Some(h) = held {
                    return Some(self.opened(h.id));
                }
                let claim = self.claims.iter().find(|c| c.member == member && c.origin == request)?;
                Some(Answer::Build { claim: claim.id })
            }
            Call::OpenTimeline(_) => self.known_object(member, request, ObjectKind::Timeline),
            Call::OpenSemaphore(_) => self.known_object(member, request, ObjectKind::Semaphore),
            _ => None,
        }
    }

    /// Returns the first four waits of a member for names.
    fn waits_of(&self, member: MemberId) -> Vec<WaitRow> {
        let pid_of_lease = |id| self.version_leases.iter().find(|h| h.id == id).map(|h| pid(h.member));
        let builder = |name: &Name| self.claims.iter().find(|c| c.name == *name).map(|c| pid(c.member));
        let held = |id: LeaseId| self.version_leases.iter().find(|h| h.id == id).unwrap();
        let mut waits: Vec<_> = self.waits.iter().filter(|q| q.member == member).collect();
        waits.sort_by_key(|q| q.ticket);
        let rows = waits.iter().filter_map(|q| {
            let (on, name, version, by) = match &q.waits_for {
                WaitFor::Open(open) => (Awaited::Commit, &open.name, open.version, builder(&open.name)),
                WaitFor::Build(name) => (Awaited::Commit, name, None, builder(name)),
                WaitFor::Withdrawal(id) => (Awaited::Withdrawal, &held(*id).name, Some(held(*id).number), None),
                WaitFor::Growth(id) => {
                    let version = self.version(&held(*id).name, held(*id).number);
                    let owner = version.owner.and_then(pid_of_lease);
                    (Awaited::Growth, &version.name, Some(version.number), owner)
                }
                WaitFor::Watch(..) => return None,
            };
            Some(WaitRow { on, name: name.clone(), version, by })
        });
        rows.take(4).collect()
    }

    pub(super) fn enqueue(&mut self, member: MemberId, ticket: RequestId, waits_for: WaitFor) -> Outcome {
        let waits = self.waits.iter().filter(|q| q.member == member).count() as u64;
        over(Limit::Waits, self.bounds.waits, waits + 1)?;
        self.waits.push(Waiting { member, ticket, waits_for });
        Ok(Answer::Pending)
    }

    /// Withdraws the names that this lease owns.
    fn withdraw_owned(&mut self, lease: LeaseId, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        if let Some(version) =
            self.versions.iter_mut().find(|v| v.owner == Some(lease) && v.memory.lifetime == Lifetime::Owned)
        {
            if version.latest {
                let name = version.name.clone();
                self.withdraw(&name, ending, by, effects);
            } else if version.memory.kind == Kind::Legacy {
                version.withdrawn = true;
                self.notify_withdrawn(effects);
            }
        }
    }

    /// Drops a lease. Returns the control memory in which the member's blocks have to be returned.
    fn drop_version_lease(&mut self, lease: LeaseId, effects: &mut ModelEffects) -> Option<BlockControl> {
        for waiting in self.waits.clone() {
            if matches!(waiting.waits_for, WaitFor::Withdrawal(l) | WaitFor::Growth(l) if l == lease) {
                self.notify(&waiting, Err(Refused::Stale(Handle::Lease)), effects);
            }
        }
        let place = self.version_leases.iter().position(|h| h.id == lease).unwrap();
        let VersionLease { member, name, number, .. } = self.version_leases.remove(place);
        if let Some(version) = self.versions.iter_mut().find(|v| v.owner == Some(lease)) {
            version.owner = None;
            let name = version.name.clone();
            let number = version.number;
            let last = Err(version.cannot_grow(NoGrowth::CommitterGone));
            self.notify_growth(&name, number, &last, effects);
        }
        let on_it = |h: &&VersionLease| h.name == name && h.number == number;
        let is_held = self.version_leases.iter().any(|h| on_it(&h));
        let holds_more = self.version_leases.iter().filter(on_it).any(|h| h.member == member);
        let version = self.version(&name, number);
        let control = version.memory.control;
        let latest = version.latest;
        let shared = version.memory.lifetime == Lifetime::Shared;
        if !is_held && latest && shared {
            self.withdraw(&name, Ending::Unused, member, effects);
        }
        control.filter(|_| !holds_more && (is_held || latest && !shared))
    }

    fn withdraw(&mut self, name: &Name, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        self.withdraw_by(name, ending, by, None, effects);
    }

    fn withdraw_by(
        &mut self,
        name: &Name,
        ending: Ending,
        by: MemberId,
        notice: Option<(WithdrawalId, Notice)>,
        effects: &mut ModelEffects,
    ) {
        let latest = self.latest(name).unwrap();
        let named = named(&latest.memory);
        let version = latest.number;
        let legacy = latest.memory.kind == Kind::Legacy;
        let owned = (latest.uid, latest.shared);
        let (pid, command) = match ending {
            Ending::DeviceLost(_) => (0, "".into()),
            _ => (pid(by), command(by)),
        };
        let end = Owned { uid: owned.0, shared: owned.1 };
        self.ends.push((name.clone(), Tombstone { ending, version, pid, command, at: self.now, legacy, owned: end }));
        for version in self.versions.iter_mut().filter(|v| v.name == *name) {
            if !version.withdrawn {
                version.notice = notice;
            }
            (version.latest, version.withdrawn) = (false, true);
        }
        let change = match ending {
            Ending::OwnerDied => Change::OwnerDied { pid },
            Ending::DeviceLost(gpu) => Change::DeviceLost { gpu },
            _ => Change::Withdrawn { pid },
        };
        self.note(named, name, owned, change);
        if let Some((_, notice)) = notice {
            self.note(named, name, owned, Change::DeadlineSet { notice });
        }
        self.notify_withdrawn(effects);
    }

    fn notify_withdrawn(&mut self, effects: &mut ModelEffects) {
        for waiting in self.waits.clone() {
            if let WaitFor::Withdrawal(lease) = &waiting.waits_for
                && let Some(held) = self.version_leases.iter().find(|h| h.id == *lease)
                && let Some(version) = self.versions.iter().find(|v| held.is_on(v) && v.withdrawn)
            {
                let answer = version.withdrawn_answer();
                self.notify(&waiting, Ok(answer), effects);
            }
        }
    }

    fn notice_of(&self, name: &Name) -> Option<Notice> {
        let noticed = self.versions.iter().filter(|v| v.name == *name && v.notice.is_some());
        noticed.max_by_key(|v| v.number).and_then(|v| v.notice).map(|(_, notice)| notice)
    }

    fn deadline_passed(&mut self, id: WithdrawalId, effects: &mut ModelEffects) {
        let of = |v: &ModelVersion| v.notice.is_some_and(|(noticed, _)| noticed == id);
        let Some(place) = self.withdrawals.iter().position(|(withdrawal, _)| *withdrawal == id) else { return };
        let (_, by) = self.withdrawals.remove(place);
        let Some(version) = self.versions.iter().rfind(|v| of(v)) else { return };
        let (_, notice) = version.notice.unwrap();
        let name = version.name.clone();
        let last = self.versions.iter().filter(|v| of(v)).max_by_key(|v| v.number).unwrap();
        let named = named(&last.memory);
        let owned = self.withdrawn[&id];
        if notice.then != Then::Wait {
            let stale = Staleness::Withdrawn(notice);
            self.versions.iter_mut().filter(|v| of(v) && !v.is_lost()).for_each(|v| v.stale = Some(stale));
        }
        let reads = |m: &&ModelMember| !self.holds_on(m.id, of).is_empty();
        let mut readers: Vec<_> = self.members.iter().filter(reads).map(|m| m.id).collect();
        readers.sort();
        self.note(named, &name, owned, Change::DeadlinePassed { then: notice.then, readers: readers.len() as u32 });
        for reader in readers.clone() {
            if self.policy(reader, &notice, owned.0) != Then::Stale {
                continue;
            }
            self.end_views(reader, of, effects);
        }
        for reader in readers {
            let evicts = self.policy(reader, &notice, owned.0) == Then::Evict;
            if evicts && reader != by && !self.is_unproven(reader) {
                self.evict_one(reader, by, effects);
            }
        }
    }

    fn lose(&mut self, gpu: [u8; 16], chunks: &[FdId], effects: &mut ModelEffects) {
        let is_lost = |v: &ModelVersion| v.chunk_on(gpu).is_some_and(|chunk| chunks.contains(&chunk));
        let mut lost = BTreeSet::new();
        for version in self.versions.iter_mut().filter(|v| is_lost(v)) {
            (version.stale, version.withdrawn) = (Some(Staleness::DeviceLost(gpu)), true);
            lost.insert((version.name.clone(), version.number));
        }
        for (name, number) in &lost {
            if self.latest(name).is_some_and(|latest| latest.number == *number) {
                self.withdraw(name, Ending::DeviceLost(gpu), MemberId(0), effects);
            }
        }
        self.notify_withdrawn(effects);
        let is_lost = |v: &ModelVersion| lost.contains(&(v.name.clone(), v.number));
        let reads = |m: &&ModelMember| !self.holds_on(m.id, is_lost).is_empty();
        let readers: BTreeSet<_> = self.members.iter().filter(reads).map(|m| m.id).collect();
        for reader in readers {
            self.end_views(reader, is_lost, effects);
        }
    }

    /// Reports stale versions to a reader, and detaches it from topics among them.
    fn end_views(&mut self, reader: MemberId, of: impl Fn(&ModelVersion) -> bool, effects: &mut ModelEffects) {
        self.notify_stale(reader, &of, effects);
        let row = self.members.iter().find(|m| m.id == reader).unwrap().row;
        let held = self.version_leases.iter().filter(|h| h.member == reader);
        let topics = held.map(|h| self.version(&h.name, h.number)).filter(|v| of(v));
        let topics = topics.filter_map(|v| v.memory.control.filter(|c| c.shape.topic.is_some())?.object);
        let topics: BTreeSet<_> = topics.map(|memory| memory.fd).collect();
        let ending = TimelineEnding::Closed;
        effects.control.extend(topics.into_iter().map(|object| Effect::Detach { object, row, ending }));
    }

    /// Readers of other users are not evicted.
    fn policy(&self, reader: MemberId, notice: &Notice, owner: u32) -> Then {
        if notice.then == Then::Evict && uid(reader) != owner { Then::Stale } else { notice.then }
    }

    fn notify_stale(&self, member: MemberId, of: impl Fn(&ModelVersion) -> bool, effects: &mut ModelEffects) {
        let own = self.version_leases.iter().filter(|h| h.member == member);
        let stale = own.filter_map(|h| {
            let version = Some(self.version(&h.name, h.number)).filter(|v| of(v))?;
            let stale = version.stale?;
            let evicts = matches!(stale, Staleness::Withdrawn(notice) if self.policy(member, &notice, version.uid) != Then::Stale);
            (!evicts).then_some((h.id, stale))
        });
        let leases: Vec<_> = stale.collect();
        if !leases.is_empty() {
            effects.control.push(Effect::Stale { member, leases });
        }
    }

    fn evict_one(&mut self, id: MemberId, by: MemberId, effects: &mut ModelEffects) {
        let pid = pid(by);
        let at = self.now;
        if self.member(id).evicted.replace((pid, at)).is_none() {
            for waiting in self.waits.clone().iter().filter(|q| q.member == id) {
                self.notify(waiting, Err(Refused::Evicted { by: pid, at }), effects);
            }
            self.notify_of(id, Ending::Removed, by, effects);
        }
    }

    fn end_of(&self, name: &Name, version: Option<u64>) -> Option<Tombstone> {
        let (_, tombstone) = self.ends.iter().find(|(ended, _)| ended == name)?;
        let meant = version.is_none() || version == Some(tombstone.version);
        (meant && self.now < tombstone.at + REMEMBERED).then(|| tombstone.clone())
    }

    fn unknown(&self, member: MemberId, name: &Name, version: Option<u64>) -> Refused {
        let is = self.kinds_of(member, name);
        let name = name.clone();
        let end = self.end_of(&name, version);
        match end.filter(|end| self.sees(member, end.owned.uid, end.owned.shared)) {
            Some(tombstone) if tombstone.legacy || matches!(tombstone.ending, Ending::DeviceLost(_)) => {
                Refused::Ended { name, tombstone }
            }
            ended => Refused::NotFound { name, near: Vec::new(), is, ended: ended.map(Box::new) },
        }
    }

    pub(super) fn kinds_of(&self, member: MemberId, name: &Name) -> Vec<Named> {
        let latest = self.latest(name).filter(|latest| self.sees(member, latest.uid, latest.shared));
        let mut kinds: Vec<_> = latest.map(|latest| named(&latest.memory)).into_iter().collect();
        let objects = [(ObjectKind::Timeline, Named::Timeline), (ObjectKind::Semaphore, Named::Semaphore)];
        kinds.extend(
            objects.into_iter().filter(|(kind, _)| self.sees_object(member, *kind, name)).map(|(_, named)| named),
        );
        kinds
    }

    /// Withdraws the names that this member owns.
    fn withdraw_all_owned(&mut self, member: MemberId, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        self.holds_of(member).into_iter().for_each(|lease| self.withdraw_owned(lease, ending, by, effects));
        let mut left: Vec<_> =
            self.versions.iter().filter(|v| v.left_to == Some(member)).map(|v| v.name.clone()).collect();
        left.sort();
        left.dedup();
        for name in left {
            if self.latest(&name).is_some_and(|v| v.left_to == Some(member)) {
                self.withdraw(&name, ending, by, effects);
            }
        }
    }

    fn notify_of(&mut self, member: MemberId, ending: Ending, by: MemberId, effects: &mut ModelEffects) {
        self.waits.retain(|q| q.member != member);
        self.abandon_claims(member, effects);
        self.withdraw_all_owned(member, ending, by, effects);
        let ending = match ending {
            Ending::OwnerDied => TimelineEnding::OwnerDied,
            Ending::Withdrawn => TimelineEnding::Closed,
            _ => TimelineEnding::Evicted,
        };
        self.end_timelines_of(member, ending, effects);
        self.detach(member, ending, effects);
    }

    fn pools_open_to(&self, member: MemberId) -> Vec<FdId> {
        let is_open = |v: &&ModelVersion| self.version_leases.iter().any(|h| h.member == member && h.is_on(v));
        let pools = self.versions.iter().filter(is_open).filter_map(|v| Some(v.memory.control?.slot_table()));
        pools.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn detach(&mut self, member: MemberId, ending: TimelineEnding, effects: &mut ModelEffects) {
        let row = self.member(member).row;
        let is_held = |v: &&ModelVersion| self.version_leases.iter().any(|h| h.member == member && h.is_on(v));
        let objects = self.versions.iter().filter(is_held).filter_map(|v| v.memory.control?.object);
        let objects: BTreeSet<_> = objects.map(|memory| memory.fd).collect();
        effects.control.extend(objects.into_iter().map(|object| Effect::Detach { object, row, ending }));
    }

    fn give_back(&mut self, member: MemberId, is_dead: bool, effects: &mut ModelEffects) {
        let mut control = self.give_objects_back(member, is_dead, effects);
        for lease in self.holds_of(member) {
            control.extend(self.drop_version_lease(lease, effects).map(|control| control.slot_table()));
        }
        self.clear_row(member, control, effects);
        let before = self.pending_close.len();
        self.collect_garbage(effects);
        let place = self.members.iter().position(|m| m.id == member).unwrap();
        let ModelMember { id, since, simulated, .. } = self.members.remove(place);
        if is_dead && self.pending_close.len() > before {
            let bytes = self.pending_close[before..].iter().map(|(.., bytes, _)| bytes).sum();
            self.dead_members.push(DeadMember { id, since, simulated, bytes, until: CloseId(0) });
        }
    }

    fn holds_of(&self, member: MemberId) -> Vec<LeaseId> {
        self.version_leases.iter().filter(|h| h.member == member).map(|h| h.id).collect()
    }

    fn is_unproven(&self, member: MemberId) -> bool {
        self.members.iter().any(|m| m.id == member && m.life == Life::Unproven)
    }

    /// Returns the bytes of the versions that selected members held, each counted once.
    fn bytes_of(&self, is_meant: impl Fn(MemberId) -> bool) -> u64 {
        let held = |v: &&ModelVersion| self.version_leases.iter().any(|h| is_meant(h.member) && h.is_on(v));
        self.versions.iter().filter(held).map(|v| v.memory.bytes()).sum()
    }

    fn departed(&self, member: MemberId) -> Departed {
        Departed {
            member,
            pid: pid(member),
            command: command(member),
            leases: self.leases_of(member) as u32,
            bytes: self.bytes_of(|holder| holder == member),
        }
    }

    fn abandon_claims(&mut self, member: MemberId, effects: &mut ModelEffects) {
        while let Some(i) = self.claims.iter().position(|c| c.member == member) {
            self.pass_claim_on(i, effects);
        }
    }

    fn pass_claim_on(&mut self, claim: usize, effects: &mut ModelEffects) {
        let name = self.claims.remove(claim).name;
        let waiting = self.waits.iter().filter(|q| matches!(&q.waits_for, WaitFor::Build(of) if *of == name));
        for next in waiting.cloned().collect::<Vec<_>>() {
            let allowed = self.under_own_names(next.member, &name, false);
            match allowed.and_then(|_| self.one_more_name(uid(next.member))) {
                Ok(_) => {
                    let answer = self.grant_claim(next.member, next.ticket, &name);
                    return self.notify(&next, Ok(answer), effects);
                }
                Err(refused) => self.notify(&next, Err(refused), effects),
            }
        }
    }

    pub(super) fn notify(&mut self, waiting: &Waiting, outcome: Outcome, effects: &mut ModelEffects) {
        self.waits.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
        effects.notices.push((waiting.member, waiting.ticket, outcome));
    }

    fn grant_claim(&mut self, member: MemberId, origin: RequestId, name: &Name) -> Answer {
        self.granted_claims += 1;
        let claim = ClaimId(self.granted_claims);
        self.claims.push(ModelClaim { id: claim, member, name: name.clone(), origin });
        Answer::Build { claim }
    }

    fn lease_version(&mut self, member: MemberId, name: &Name, number: u64, origin: RequestId) -> LeaseId {
        self.leases += 1;
        let id = LeaseId(self.leases);
        self.version_leases.push(VersionLease { id, member, name: name.clone(), number, origin });
        id
    }

    fn collect_garbage(&mut self, effects: &mut ModelEffects) {
        // A closed queue gives up the segments that it holds.
        loop {
            let is_held = |v: &ModelVersion| self.version_leases.iter().any(|h| h.is_on(v));
            let is_needed = |v: &ModelVersion| v.latest || is_held(v) || self.is_attached(v);
            let Some(place) = self.versions.iter().position(|v| !is_needed(v)) else { break };
            let ModelVersion { name, number, memory, uid, shared, .. } = self.versions.remove(place);
            self.pending_close.push((name.clone(), number, named(&memory), memory.held_bytes(), (uid, shared)));
            effects.closed.extend(memory.fds());
            self.attachments.retain(|a| a.queue != (name.clone(), number));
            self.given.retain(|(queue, _)| *queue != (name.clone(), number));
        }
        let versions = &self.versions;
        self.withdrawals.retain(|(id, _)| versions.iter().any(|v| v.notice.is_some_and(|(of, _)| of == *id)));
        self.numbers.retain(|name, _| versions.iter().any(|v| v.name == *name));
    }

    fn row(&self, v: &ModelVersion) -> VersionRow {
        VersionRow {
            version: v.number,
            kind: v.memory.kind,
            place: v.memory.place,
            bytes: v.memory.bytes(),
            tensors: 1,
            mutable: v.memory.mutable,
            reserved: v.memory.reserved,
            growths: v.growths,
            lifetime: v.memory.lifetime,
            control: v.memory.control,
            committer: v.committer,
            uid: v.uid,
            shared: v.shared,
            leases: (self.version_leases.iter().filter(|h| h.is_on(v)).count()
                + self.attachments.iter().filter(|a| a.segment == (v.name.clone(), v.number)).count())
                as u32,
            notice: v.notice.map(|(_, notice)| notice),
            lost: v.is_lost(),
            committed_at: v.at,
        }
    }

    pub(super) fn member(&mut self, member: MemberId) -> &mut ModelMember {
        self.members.iter_mut().find(|m| m.id == member).unwrap()
    }

    fn latest(&self, name: &Name) -> Option<&ModelVersion> {
        self.versions.iter().find(|v| v.name == *name && v.latest)
    }

    fn names(&self) -> u64 {
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

fn named(memory: &Memory) -> Named {
    match memory.control.map(|control| control.shape) {
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

fn is_meant(record: &ModelMember, whom: Whom) -> bool {
    match whom {
        Whom::Pid(pid) => record.pid() == pid,
        Whom::Member(id) => record.id.0 == id,
    }
}

pub(super) fn over(limit: Limit, allowed: u64, needed: u64) -> Result<(), Refused> {
    if needed > allowed { Err(Refused::Limit { limit, allowed, needed }) } else { Ok(()) }
}
