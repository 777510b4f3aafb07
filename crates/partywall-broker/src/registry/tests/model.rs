//! A model of the registry, as simple as possible: flat lists without redundant state, searched from the front.

use std::{collections::BTreeMap, sync::Arc};

use super::{model_objects::Objects, *};
use crate::registry::{
    effect::{
        Counts, Departed, Handle, Happening, Holder, HoldingQueue, MemberRow, NameRow, Opened, Refused, VersionRow,
    },
    event::DetachSegment,
    state::Life,
    tombstones::{REMEMBERED, Tombstone},
    types::{BlockControl, Change, Doubt, Ending, Limit, MemberState, Named, NoGrowth, Whom},
};

/// The result of one event: the reply to a request, completions of others, and closes. Suggested names are left out.
#[derive(Debug, PartialEq, Default)]
pub(super) struct Said {
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
pub(super) struct Person {
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
}

impl Person {
    fn pid(&self) -> u32 {
        100 + self.id.0 as u32
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
type PendingClose = Vec<(Name, u64, Named, u64)>;

/// A dead member whose memory is being closed.
#[derive(Debug)]
struct Corpse {
    id: MemberId,
    since: u64,
    simulated: bool,
    bytes: u64,
    /// The confirmation that it waits for.
    until: CloseId,
}

#[derive(Debug)]
pub(super) struct Edition {
    name: Name,
    number: u64,
    pub(super) memory: Arc<Memory>,
    committer: u32,
    at: u64,
    owner: Option<LeaseId>,
    left_to: Option<MemberId>,
    pub(super) growths: u64,
    grown_by: Option<RequestId>,
    latest: bool,
    withdrawn: bool,
}

impl Edition {
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

/// A segment that a queue holds.
#[derive(Debug)]
struct Tie {
    queue: (Name, u64),
    number: u32,
    segment: (Name, u64),
    origin: (MemberId, RequestId),
}

#[derive(Debug)]
pub(super) struct Right {
    pub(super) id: ClaimId,
    pub(super) member: MemberId,
    name: Name,
    origin: RequestId,
}

#[derive(Debug, Clone)]
pub(super) struct Queued {
    pub(super) member: MemberId,
    pub(super) ticket: RequestId,
    pub(super) for_what: For,
}

#[derive(Debug, Clone)]
pub(super) enum For {
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
    /// Whether the member that joined last is simulated.
    simulated: bool,
    pub(super) people: Vec<Person>,
    deaths: u64,
    unproven_deaths: u64,
    corpses: Vec<Corpse>,
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
    editions: Vec<Edition>,
    /// The ends of names that do not exist any more.
    ends: Vec<(Name, Tombstone)>,
    pub(super) now: u64,
    /// The highest version number of each name that has an edition.
    numbers: BTreeMap<Name, u64>,
    pub(super) version_leases: Vec<VersionLease>,
    /// Segments that queues held.
    ties: Vec<Tie>,
    /// The numbers that each queue that exists has ever given.
    given: Vec<((Name, u64), u32)>,
    pub(super) rights: Vec<Right>,
    pub(super) queue: Vec<Queued>,
    pub(super) objects: Objects,
    pub(super) leases: u64,
    claims: u64,
}

impl Model {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            simulated: false,
            people: Vec::new(),
            deaths: 0,
            unproven_deaths: 0,
            corpses: Vec::new(),
            pending_close: Vec::new(),
            held_back: Default::default(),
            closings: 0,
            unclosed: Vec::new(),
            history: Vec::new(),
            notified: 0,
            editions: Vec::new(),
            ends: Vec::new(),
            now: 0,
            numbers: BTreeMap::new(),
            version_leases: Vec::new(),
            ties: Vec::new(),
            given: Vec::new(),
            rights: Vec::new(),
            queue: Vec::new(),
            objects: Objects::default(),
            leases: 0,
            claims: 0,
        }
    }

    /// Returns whether another member may join.
    pub(super) fn has_room(&self) -> bool {
        let there = self.people.iter().filter(|p| matches!(p.life, Life::Alive | Life::HeldByChild)).count() as u64;
        there < self.bounds.members && ((self.people.len() + self.objects.uncleared.len()) as u64) < self.bounds.rows
    }

    /// Returns whether no member or GPU memory uses the other driver.
    pub(super) fn admits(&self, simulated: bool) -> bool {
        let anything = !self.people.is_empty() || self.editions.iter().any(|e| e.memory.place != Place::Host);
        !anything || self.simulated == simulated
    }

    pub(super) fn apply(&mut self, event: &Event, at: u64) -> Said {
        self.now = at;
        let mut said = Said::default();
        match event {
            Event::Joined { member, identity } => {
                self.simulated = identity.simulated;
                let is_free =
                    |row: &u16| !self.objects.uncleared.contains(row) && self.people.iter().all(|p| p.row != *row);
                let row = (0..).find(is_free).unwrap();
                self.people.push(Person {
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
                });
            }
            Event::Suspected { member } => {
                self.queue.retain(|q| q.member != *member);
                self.person(*member).life = Life::Suspect;
            }
            Event::Dismissed { .. } => unreachable!("the model has no operators"),
            Event::Resumed { member } => self.person(*member).life = Life::Alive,
            Event::HeldByChild { member } => {
                self.queue.retain(|q| q.member != *member);
                self.give_up_claims(*member, &mut said);
                self.person(*member).life = Life::HeldByChild;
            }
            Event::Died { member } => {
                self.notify_of(*member, Ending::OwnerDied, *member, &mut said);
                self.deaths += 1;
                if self.person(*member).doubt().is_some() && (self.leases_of(*member) > 0 || self.writes(*member)) {
                    self.person(*member).life = Life::Unproven;
                    self.unproven_deaths += 1;
                    said.quarantined.push(*member);
                } else {
                    self.give_back(*member, true, &mut said);
                }
            }
            Event::Expired { member } => {
                if self.people.iter().any(|p| p.id == *member && p.life == Life::Unproven) {
                    self.give_back(*member, true, &mut said);
                }
            }
            Event::Closed { id } => {
                self.corpses.retain(|corpse| corpse.until != *id);
                let place = self.unclosed.iter().position(|(unclosed, _)| unclosed == id).unwrap();
                let mut closed = self.unclosed.remove(place).1;
                closed.sort_by_key(|(name, version, ..)| (name.clone(), *version));
                for (name, version, named, bytes) in closed {
                    self.note(named, &name, Change::Reclaimed { version, bytes });
                }
            }
            Event::CellSettled { at } => self.settle(*at),
            Event::RowCleared { row } => assert!(self.objects.uncleared.remove(row)),
            Event::TimelineEnded { name } => self.end_line(name, TimelineEnding::Abandoned, &mut said),
            Event::Request { member, request, call } => {
                let person = self.person(*member);
                let repeated = request.0 <= person.last_request;
                person.last_request = person.last_request.max(request.0);
                let spared = matches!(call, Call::Leave | Call::UsesGpu { .. } | Call::ContextLost);
                let refused = person.evicted.filter(|_| !spared).map(|(by, at)| Err(Refused::Evicted { by, at }));
                let known = if repeated { self.known(*member, *request, call).map(Ok) } else { None };
                let settled = refused.or(known);
                if settled.is_some() {
                    said.closed.extend(call.fds());
                }
                let outcome = settled.unwrap_or_else(|| self.call(*member, *request, call, &mut said));
                said.reply = Some(outcome);
            }
        }
        self.collect_garbage(&mut said);
        let pending_close = std::mem::take(&mut self.pending_close);
        if !pending_close.is_empty() {
            self.closings += 1;
            said.confirm.push(CloseId(self.closings));
            self.unclosed.push((CloseId(self.closings), pending_close));
        }
        for corpse in self.corpses.iter_mut().filter(|corpse| corpse.until == CloseId(0)) {
            corpse.until = CloseId(self.closings);
        }
        self.notify_watchers(&mut said);
        let held_back = &mut self.held_back;
        held_back.0.append(&mut said.closed);
        held_back.1.append(&mut said.confirm);
        if self.objects.uncleared.is_empty() {
            (said.closed, said.confirm) = std::mem::take(held_back);
        }
        said.closed.sort();
        said.confirm.sort();
        // The order among them is not promised, only the content of each.
        said.notices.sort_by_key(|(member, ticket, _)| (*member, *ticket));
        said
    }

    fn call(&mut self, member: MemberId, request: RequestId, call: &Call, said: &mut Said) -> Outcome {
        match call {
            Call::Commit(commit) => {
                let outcome = self.commit(member, request, commit, said);
                if outcome.is_err() {
                    said.closed.extend(commit.memory.fds());
                }
                outcome
            }
            Call::Open(open) => self.open(member, request, open),
            Call::OpenOrBuild { name } => {
                if self.latest(name).is_some() {
                    let open = Open { name: name.clone(), version: None, access: Access::Read, wait: false };
                    self.open(member, request, &open)
                } else if self.rights.iter().any(|r| r.name == *name) {
                    self.enqueue(member, request, For::Build(name.clone()))
                } else {
                    over(Limit::Names, self.bounds.names, self.names() + self.rights.len() as u64 + 1)?;
                    Ok(self.entitle(member, request, name))
                }
            }
            Call::AbandonBuild { claim } => {
                let Some(i) = self.rights.iter().position(|r| r.id == *claim && r.member == member) else {
                    return Err(Refused::Stale(Handle::Claim));
                };
                self.pass_on(i, said);
                Ok(Answer::Done)
            }
            Call::Cancel { ticket } => {
                let Some(i) = self.queue.iter().position(|q| q.member == member && q.ticket == *ticket) else {
                    return Err(Refused::Stale(Handle::Ticket));
                };
                self.queue.remove(i);
                Ok(Answer::Done)
            }
            Call::Release { lease } | Call::LeaveName { lease }
                if self.objects.leases.iter().any(|g| g.id == *lease) =>
            {
                if !self.objects.leases.iter().any(|g| g.id == *lease && g.member == member) {
                    return Err(Refused::Stale(Handle::Lease));
                }
                if self.person(member).lost_context {
                    self.end_line_of(*lease, TimelineEnding::Closed, said);
                } else {
                    self.drop_object_lease(*lease, said);
                }
                Ok(Answer::Done)
            }
            Call::Release { lease } | Call::LeaveName { lease } => {
                if !self.version_leases.iter().any(|h| h.id == *lease && h.member == member) {
                    return Err(Refused::Stale(Handle::Lease));
                }
                let left = self.editions.iter_mut().find(|e| {
                    let is_owned = e.memory.lifetime == Lifetime::Owned && e.memory.kind != Kind::Legacy;
                    matches!(call, Call::LeaveName { .. }) && e.owner == Some(*lease) && e.latest && is_owned
                });
                match left {
                    Some(left) => left.left_to = Some(member),
                    None => self.disown(*lease, Ending::Withdrawn, member, said),
                }
                if !self.person(member).lost_context
                    && let Some(control) = self.let_go(*lease, said)
                {
                    let row = self.person(member).row;
                    said.control.push(Effect::Return { control: control.slot_table(), row });
                }
                Ok(Answer::Done)
            }
            Call::WithdrawNames => {
                self.disown_all(member, Ending::Withdrawn, member, said);
                Ok(Answer::Done)
            }
            Call::AwaitWithdrawal { lease } => {
                let Some(held) = self.version_leases.iter().find(|h| h.id == *lease && h.member == member) else {
                    return Err(Refused::Stale(Handle::Lease));
                };
                let edition = self.editions.iter().find(|e| e.name == held.name && e.number == held.number).unwrap();
                if edition.withdrawn {
                    return Ok(Answer::Withdrawn);
                }
                self.enqueue(member, request, For::Withdrawal(*lease))
            }
            Call::Grow(growth) => {
                let outcome = self.grow(member, request, growth, said);
                if outcome.is_err() {
                    said.closed.extend(growth.fds());
                }
                outcome
            }
            Call::Refresh { lease, growths, chunks } => {
                let edition = self.held(member, *lease)?;
                if edition.growths <= *growths {
                    return Ok(Answer::Done);
                }
                if *chunks > edition.memory.chunks.len() as u64 {
                    return Err(Refused::Invalid("the version never had so many chunks"));
                }
                let chunks = *chunks as usize;
                let memory = Arc::clone(&edition.memory);
                Ok(Answer::Grown { growths: edition.growths, chunks, memory })
            }
            Call::AwaitGrowth { lease, growths } => {
                let edition = self.held(member, *lease)?;
                if edition.growths > *growths {
                    return Ok(Answer::Done);
                }
                if edition.memory.reserved == 0 {
                    return Err(edition.cannot_grow(NoGrowth::Fixed));
                }
                if edition.owner.is_none() {
                    return Err(edition.cannot_grow(NoGrowth::CommitterGone));
                }
                self.enqueue(member, request, For::Growth(*lease))
            }
            Call::Remove { name } => {
                let Some(version) = self.latest(name).map(|e| e.number) else {
                    return Err(self.unknown(name, None));
                };
                self.withdraw(name, Ending::Removed, member, said);
                let held: Vec<_> = self.version_leases.iter().filter(|h| h.name == *name).collect();
                let is_held = |e: &&Edition| held.iter().any(|h| h.number == e.number) || self.is_tied(e);
                let kept = self.editions.iter().filter(|e| e.name == *name).filter(is_held);
                let bytes_kept = kept.map(|e| e.memory.bytes()).sum();
                let holders = self.people.iter().filter_map(|p| {
                    let leases = held.iter().filter(|h| h.member == p.id).count() as u32;
                    let command = format!("member {}", p.id).into();
                    let unproven = p.life == Life::Unproven;
                    (leases > 0).then_some(Holder { pid: p.pid(), command, leases, unproven, row: p.row })
                });
                let mut queues: Vec<_> = self.ties.iter().filter(|tie| tie.segment.0 == *name).collect();
                queues.sort_by_key(|tie| (tie.segment.1, tie.queue.clone()));
                let queues = queues.into_iter().map(|tie| HoldingQueue {
                    name: tie.queue.0.clone(),
                    version: tie.queue.1,
                    attachment: tie.number,
                });
                Ok(Answer::Removed { version, bytes_kept, holders: holders.collect(), queues: queues.collect() })
            }
            Call::List { after: None } => {
                let names = self.numbers.keys().map(|name| {
                    let older: Vec<_> = self.editions.iter().filter(|e| e.name == *name && !e.latest).collect();
                    NameRow {
                        name: name.clone(),
                        latest: self.latest(name).map(|e| self.row(e)),
                        older: older.len() as u32,
                        older_bytes: older.iter().map(|e| e.memory.bytes()).sum(),
                    }
                });
                Ok(Answer::Names { names: names.collect(), more: false })
            }
            Call::Members { after: None } => {
                let rows = self.people.iter().map(|p| MemberRow {
                    member: p.id,
                    pid: p.pid(),
                    uid: 0,
                    command: format!("member {}", p.id).into(),
                    state: p.state(),
                    doubt: p.doubt(),
                    mps: p.mps.clone(),
                    row: Some(p.row),
                    timelines: self.lines_written_by(p.id),
                    semaphores: self.gates_open_to(p.id),
                    pools: self.pools_open_to(p.id),
                    leases: self.leases_of(p.id) as u32,
                    bytes: self.bytes_of(|holder| holder == p.id),
                    since: p.since,
                    simulated: p.simulated,
                });
                let dead = self.corpses.iter().map(|corpse| MemberRow {
                    member: corpse.id,
                    pid: 100 + corpse.id.0 as u32,
                    uid: 0,
                    command: format!("member {}", corpse.id).into(),
                    state: MemberState::Dead,
                    doubt: None,
                    mps: None,
                    row: None,
                    timelines: 0,
                    semaphores: Vec::new(),
                    pools: Vec::new(),
                    leases: 0,
                    bytes: corpse.bytes,
                    since: corpse.since,
                    simulated: corpse.simulated,
                });
                let mut members: Vec<_> = rows.chain(dead).collect();
                members.sort_by_key(|row| row.member);
                Ok(Answer::Members { members, more: false })
            }
            Call::Status => {
                let at = |place| {
                    let chunks =
                        self.editions.iter().filter(|e| e.memory.place == place).map(|e| e.memory.held_bytes());
                    let others = self.editions.iter().filter(|_| place == Place::Host).map(|e| e.memory.other_bytes());
                    let control = if place == Place::Host { self.control_memory().1 } else { 0 };
                    (place, chunks.chain(others).sum::<u64>() + control)
                };
                let mut bytes: Vec<_> = [Place::Host, GPU].map(at).into_iter().filter(|(_, n)| *n > 0).collect();
                bytes.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
                let mut largest: Vec<_> = self
                    .numbers
                    .keys()
                    .map(|name| {
                        let of_name = self.editions.iter().filter(|e| e.name == *name);
                        let newest = of_name.clone().max_by_key(|e| e.number).unwrap();
                        (name.clone(), newest.memory.place, of_name.map(|e| e.memory.held_bytes()).sum::<u64>())
                    })
                    .collect();
                largest.sort_by_key(|(name, _, bytes)| (std::cmp::Reverse(*bytes), name.clone()));
                Ok(Answer::Status(Box::new(Counts {
                    simulated: self.simulated,
                    members: self.people.iter().filter(|p| p.id != member).count() as u64,
                    names: self.names(),
                    versions: self.editions.len() as u64,
                    timelines: self.object_counts().0,
                    semaphores: self.object_counts().1,
                    leases: (self.version_leases.len() + self.objects.leases.len()) as u64,
                    unproven: self.people.iter().filter(|p| p.life == Life::Unproven).count() as u64,
                    unproven_bytes: self.bytes_of(|holder| self.is_unproven(holder)),
                    deaths: self.deaths,
                    unproven_deaths: self.unproven_deaths,
                    fds: self.fds(),
                    bytes,
                    largest,
                })))
            }
            Call::Stop { force } => {
                let (timelines, semaphores) = self.object_counts();
                let names = self.names() + timelines + semaphores;
                let members = self.people.len() as u64 - 1;
                if !force && names + members > 0 {
                    return Err(Refused::InUse { names, members });
                }
                said.stop = true;
                Ok(Answer::Done)
            }
            Call::Leave => {
                let person = self.person(member);
                let is_believed = person.evicted.is_none() && !person.lost_context;
                self.notify_of(member, Ending::Withdrawn, member, said);
                if is_believed {
                    self.give_back(member, false, said);
                }
                (said.disconnect, said.hang_up) = (is_believed, !is_believed);
                Ok(Answer::Done)
            }
            Call::Watch(watch) => self.watch(member, request, watch),
            Call::UsesGpu { mps } => {
                if mps.is_some() {
                    self.person(member).mps.clone_from(mps);
                }
                Ok(Answer::Done)
            }
            Call::ContextLost => {
                self.person(member).lost_context = true;
                self.end_lines_of(member, TimelineEnding::OwnerFaulted, said);
                self.detach(member, TimelineEnding::OwnerFaulted, said);
                Ok(Answer::Done)
            }
            Call::Evict { whom, kill } => {
                let meant: Vec<_> = self.people.iter().filter(|p| is_meant(p, *whom)).map(|p| p.id).collect();
                if meant.is_empty() {
                    return Err(Refused::NoSuchMember { whom: *whom, near: Vec::new() });
                }
                if meant.contains(&member) {
                    return Err(Refused::NotYourself);
                }
                if meant.iter().all(|id| self.is_unproven(*id)) {
                    return Err(Refused::IsUnproven { pid: 100 + meant[0].0 as u32 });
                }
                let by = 100 + member.0 as u32;
                let at = self.now;
                let mut members = Vec::new();
                for id in meant.into_iter().filter(|id| !self.is_unproven(*id)).collect::<Vec<_>>() {
                    if self.person(id).evicted.replace((by, at)).is_none() {
                        for waiting in self.queue.clone().iter().filter(|q| q.member == id) {
                            self.notify(waiting, Err(Refused::Evicted { by, at }), said);
                        }
                        self.notify_of(id, Ending::Removed, member, said);
                    }
                    members.push(self.departed(id));
                }
                if *kill {
                    let kills = members.iter().map(|departed| Effect::Kill(departed.member));
                    said.control.splice(0..0, kills.collect::<Vec<_>>());
                }
                Ok(Answer::Evicted(members))
            }
            Call::FreeUnproven { pid } => {
                let meant: Vec<_> =
                    self.people.iter().filter(|p| pid.is_none_or(|pid| is_meant(p, Whom::Pid(pid)))).collect();
                let unproven: Vec<_> = meant.iter().filter(|p| p.life == Life::Unproven).map(|p| p.id).collect();
                match (pid, meant.first()) {
                    (Some(pid), None) => {
                        return Err(Refused::NoSuchMember { whom: Whom::Pid(*pid), near: Vec::new() });
                    }
                    (Some(pid), Some(person)) if unproven.is_empty() => {
                        return Err(Refused::NotUnproven { pid: *pid, state: person.state() });
                    }
                    _ => {}
                }
                let members = unproven.iter().map(|id| self.departed(*id)).collect();
                unproven.into_iter().for_each(|id| self.give_back(id, true, said));
                Ok(Answer::Freed { members, more: false })
            }
            Call::OpenTimeline(open) => self.open_line(member, request, open, said),
            Call::FollowTimeline { lease, .. } => self.follow(member, *lease),
            Call::AbandonTimeline { name } => self.abandon_line(member, request, name, said),
            Call::OpenSemaphore(open) => self.open_semaphore(member, request, open, said),
            Call::Attach { queue, segment } => self.attach(member, request, *queue, *segment, said),
            Call::DetachSegment(DetachSegment { queue, attachment, in_use }) => {
                let (queue, _) = self.queue_of(member, *queue)?;
                let (name, version) = self.tied(&queue, *attachment)?;
                if let Some(in_use) = *in_use {
                    return Err(Refused::AttachmentInUse { queue, name, version, in_use });
                }
                self.ties.retain(|tie| (&tie.queue, tie.number) != (&queue, *attachment));
                Ok(Answer::Done)
            }
            Call::OpenAttached { queue, attachment } => {
                let (queue, _) = self.queue_of(member, *queue)?;
                let (name, number) = self.tied(&queue, *attachment)?;
                over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
                let lease = self.lease_version(member, &name, number, request);
                let edition = self.edition(&name, number);
                let growths = edition.growths;
                let memory = Arc::clone(&edition.memory);
                Ok(Answer::Opened(Opened { lease, name, version: number, growths, memory }))
            }
            Call::Objects { after: None } => Ok(Answer::Objects { objects: self.objects_listed(), more: false }),
            Call::InspectObject { kind, name } => self.inspect_object(*kind, name),
            Call::Ping => Ok(Answer::Done),
            other => panic!("not in the model: {other:?}"),
        }
    }

    fn commit(&mut self, member: MemberId, request: RequestId, commit: &Commit, said: &mut Said) -> Outcome {
        let Commit { name, memory, if_absent, claim } = commit;
        if let Some(claim) = claim
            && !self.rights.iter().any(|r| r.id == *claim && r.member == member && r.name == *name)
        {
            return Err(Refused::Stale(Handle::Claim));
        }
        if let Some(latest) = self.latest(name)
            && (*if_absent || memory.control.is_some() || latest.memory.control.is_some())
        {
            return Err(Refused::NameExists { name: name.clone(), version: latest.number });
        }
        let names = self.names() + u64::from(self.latest(name).is_none());
        over(Limit::Names, self.bounds.names, names)?;
        over(Limit::Bytes, self.bounds.bytes, self.bytes() + memory.held_bytes() + memory.other_bytes())?;
        over(Limit::Fds, self.bounds.fds, self.fds() + memory.fds().len() as u64)?;
        over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
        let memory = Arc::clone(memory);

        self.ends.retain(|(ended, _)| ended != name);
        let number = self.numbers.entry(name.clone()).or_default();
        *number += 1;
        let number = *number;
        let pid = 100 + member.0 as u32;
        let named = named(&memory);
        if self.latest(name).is_none() {
            self.note(named, name, Change::Created { pid });
        }
        self.note(named, name, Change::Committed { version: number, bytes: memory.bytes(), pid });
        self.editions.iter_mut().filter(|e| e.name == *name).for_each(|e| e.latest = false);
        let lease = self.lease_version(member, name, number, request);
        self.editions.push(Edition {
            name: name.clone(),
            number,
            memory,
            committer: 100 + member.0 as u32,
            at: self.now,
            owner: Some(lease),
            left_to: None,
            growths: 0,
            grown_by: None,
            latest: true,
            withdrawn: false,
        });
        self.rights.retain(|r| Some(r.id) != *claim);
        for waiting in self.queue.clone() {
            let open = match waiting.for_what {
                For::Open(open) if open.name == *name && open.version.is_none_or(|v| v == number) => open,
                For::Build(of) if of == *name => Open { name: of, version: None, access: Access::Read, wait: false },
                _ => continue,
            };
            self.queue.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
            let outcome = self.open(waiting.member, waiting.ticket, &open);
            said.notices.push((waiting.member, waiting.ticket, outcome));
        }
        Ok(Answer::Committed { version: number, lease })
    }

    pub(super) fn held(&self, member: MemberId, lease: LeaseId) -> Result<&Edition, Refused> {
        let held = self.version_leases.iter().find(|h| h.id == lease && h.member == member);
        let held = held.ok_or(Refused::Stale(Handle::Lease))?;
        Ok(self.editions.iter().find(|e| e.name == held.name && e.number == held.number).unwrap())
    }

    fn attach(
        &mut self,
        member: MemberId,
        request: RequestId,
        queue: LeaseId,
        segment: LeaseId,
        said: &mut Said,
    ) -> Outcome {
        let (queue, object) = self.queue_of(member, queue)?;
        let found = self.held(member, segment)?;
        let segment = (found.name.clone(), found.number);
        if found.memory.control.is_some() || found.memory.lifetime == Lifetime::Shared {
            return Err(Refused::Invalid("a queue holds nothing but segments"));
        }
        if found.memory.kind == Kind::Legacy {
            return Err(Refused::CannotHold { name: segment.0, version: segment.1 });
        }
        let own: Vec<_> = self.ties.iter().filter(|tie| tie.queue == queue).collect();
        if let Some(tie) = own.iter().find(|tie| tie.segment == segment) {
            return Ok(Answer::Attached { attachment: tie.number });
        }
        over(Limit::Attachments, self.bounds.attachments.into(), own.len() as u64 + 1)?;
        let entry = (0..).find(|entry| own.iter().all(|tie| tie.number % 32 != *entry)).unwrap();
        let before = self.given.iter().filter(|(of, number)| *of == queue && number % 32 == entry).count() as u32;
        let number = entry + 32 * before;
        self.given.push((queue.clone(), number));
        self.ties.push(Tie { queue, number, segment, origin: (member, request) });
        said.control.push(Effect::Attach { object, attachment: number });
        Ok(Answer::Attached { attachment: number })
    }

    fn queue_of(&self, member: MemberId, lease: LeaseId) -> Result<((Name, u64), FdId), Refused> {
        let edition = self.held(member, lease)?;
        match edition.memory.control {
            Some(BlockControl { shape: Control { queue: Some(_), .. }, object: Some(object), .. }) => {
                Ok(((edition.name.clone(), edition.number), object.fd))
            }
            _ => Err(Refused::Invalid("only a queue has segments attached")),
        }
    }

    fn tied(&self, queue: &(Name, u64), attachment: u32) -> Result<(Name, u64), Refused> {
        let tie = self.ties.iter().find(|tie| tie.queue == *queue && tie.number == attachment);
        let gone = || Refused::NotAttached { queue: queue.0.clone(), attachment };
        tie.map(|tie| tie.segment.clone()).ok_or_else(gone)
    }

    fn is_tied(&self, edition: &Edition) -> bool {
        self.ties.iter().any(|tie| tie.segment.0 == edition.name && tie.segment.1 == edition.number)
    }

    /// The numbers of what is attached to the queue that a member's lease is on.
    pub(super) fn attached_to(&self, member: MemberId, lease: LeaseId) -> Vec<u32> {
        let Ok((queue, _)) = self.queue_of(member, lease) else { return Vec::new() };
        self.ties.iter().filter(|tie| tie.queue == queue).map(|tie| tie.number).collect()
    }

    /// The leases of a member on versions that are meant.
    pub(super) fn holds_on(&self, member: MemberId, is_meant: impl Fn(&Edition) -> bool) -> Vec<LeaseId> {
        let own = self.version_leases.iter().filter(|h| h.member == member);
        own.filter(|h| is_meant(self.edition(&h.name, h.number))).map(|h| h.id).collect()
    }

    fn edition(&self, name: &Name, number: u64) -> &Edition {
        self.editions.iter().find(|e| e.name == *name && e.number == number).unwrap()
    }

    fn grow(&mut self, member: MemberId, request: RequestId, growth: &Growth, said: &mut Said) -> Outcome {
        let edition = self.held(member, growth.lease)?;
        let name = edition.name.clone();
        let number = edition.number;
        let before = Arc::clone(&edition.memory);
        let why = if before.reserved == 0 {
            Some(NoGrowth::Fixed)
        } else if edition.owner.is_none() {
            Some(NoGrowth::CommitterGone)
        } else if edition.owner != Some(growth.lease) {
            Some(NoGrowth::NotCommitter)
        } else if edition.growths != growth.growths {
            Some(NoGrowth::Behind)
        } else {
            None
        };
        if let Some(why) = why {
            return Err(edition.cannot_grow(why));
        }
        if before.kind != growth.kind {
            return Err(Refused::Invalid("a version has one kind of memory"));
        }
        let mut memory = Memory { table: growth.table.clone(), tensors: growth.tensors, ..(*before).clone() };
        memory.chunks.extend(&growth.chunks);
        if memory.bytes() > before.reserved {
            let why = NoGrowth::Reserved { reserved: before.reserved, needed: memory.bytes() };
            return Err(edition.cannot_grow(why));
        }
        over(Limit::Growths, self.bounds.growths, edition.growths + 1)?;
        over(Limit::Chunks, self.bounds.chunks, memory.chunks.len() as u64)?;
        let bytes = |memory: &Memory| memory.bytes() + memory.other_bytes();
        over(Limit::Bytes, self.bounds.bytes, self.bytes() - bytes(&before) + bytes(&memory))?;
        over(Limit::Fds, self.bounds.fds, self.fds() - before.fds().len() as u64 + memory.fds().len() as u64)?;

        said.closed.extend(before.table_fd());
        for edition in self.editions.iter_mut().filter(|e| e.name == name && e.number == number) {
            edition.memory = Arc::new(memory.clone());
            edition.growths += 1;
            edition.grown_by = Some(request);
        }
        self.notify_growth(&name, number, &Ok(Answer::Done), said);
        Ok(Answer::Done)
    }

    fn notify_growth(&mut self, name: &Name, number: u64, outcome: &Outcome, said: &mut Said) {
        for waiting in self.queue.clone() {
            if let For::Growth(lease) = &waiting.for_what
                && self.version_leases.iter().any(|h| h.id == *lease && h.name == *name && h.number == number)
            {
                self.notify(&waiting, outcome.clone(), said);
            }
        }
    }

    fn open(&mut self, member: MemberId, request: RequestId, open: &Open) -> Outcome {
        let Open { name, version, access, wait } = open;
        let latest = self.latest(name).map(|e| e.number);
        let wanted = version.or(latest);
        let found = self.editions.iter().find(|e| e.name == *name && Some(e.number) == wanted && !e.withdrawn);
        if let Some(edition) = found {
            let number = edition.number;
            let growths = edition.growths;
            let memory = Arc::clone(&edition.memory);
            if *access == Access::Write && !memory.mutable {
                return Err(Refused::ReadOnly { name: name.clone(), version: number });
            }
            over(Limit::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
            let lease = self.lease_version(member, name, number, request);
            return Ok(Answer::Opened(Opened { lease, name: name.clone(), version: number, growths, memory }));
        }
        match (self.numbers.get(name), version) {
            (Some(last), Some(v)) if v <= last || !wait => {
                let not_found = Refused::VersionNotFound { name: name.clone(), version: *v, latest };
                Err(self.end_of(name, *version).map_or(not_found, |_| self.unknown(name, *version)))
            }
            _ if *wait => self.enqueue(member, request, For::Open(open.clone())),
            _ => Err(self.unknown(name, *version)),
        }
    }

    fn known(&self, member: MemberId, request: RequestId, call: &Call) -> Option<Answer> {
        let held = self.version_leases.iter().find(|h| h.member == member && h.origin == request);
        match call {
            Call::Commit(_) => held.map(|h| Answer::Committed { version: h.number, lease: h.id }),
            Call::Open(_) | Call::OpenOrBuild { .. } | Call::OpenAttached { .. } => {
                if let Some(h) = held {
                    let edition = self.editions.iter().find(|e| e.name == h.name && e.number == h.number)?;
                    let name = h.name.clone();
                    let growths = edition.growths;
                    let memory = Arc::clone(&edition.memory);
                    return Some(Answer::Opened(Opened { lease: h.id, name, version: h.number, growths, memory }));
                }
                let right = self.rights.iter().find(|r| r.member == member && r.origin == request)?;
                Some(Answer::Build { claim: right.id })
            }
            Call::Grow(growth) => {
                let edition = self.held(member, growth.lease).ok()?;
                (edition.grown_by == Some(request)).then_some(Answer::Done)
            }
            Call::Attach { queue, .. } => {
                let (queue, _) = self.queue_of(member, *queue).ok()?;
                let tie = self.ties.iter().find(|tie| tie.queue == queue && tie.origin == (member, request))?;
                Some(Answer::Attached { attachment: tie.number })
            }
            Call::OpenTimeline(_) => self.known_object(member, request, ObjectKind::Timeline),
            Call::OpenSemaphore(_) => self.known_object(member, request, ObjectKind::Semaphore),
            Call::AbandonTimeline { .. } => self.has_abandoned(member, request).then_some(Answer::Done),
            _ => None,
        }
    }

    pub(super) fn enqueue(&mut self, member: MemberId, ticket: RequestId, for_what: For) -> Outcome {
        if self.queue.iter().any(|q| q.member == member && q.ticket == ticket) {
            return Err(Refused::Invalid("a request with this number is already waiting"));
        }
        let waits = self.queue.iter().filter(|q| q.member == member).count() as u64;
        over(Limit::Waits, self.bounds.waits, waits + 1)?;
        self.queue.push(Queued { member, ticket, for_what });
        Ok(Answer::Pending)
    }

    /// Withdraws the names that this lease owns.
    fn disown(&mut self, lease: LeaseId, ending: Ending, by: MemberId, said: &mut Said) {
        if let Some(edition) =
            self.editions.iter_mut().find(|e| e.owner == Some(lease) && e.memory.lifetime == Lifetime::Owned)
        {
            if edition.latest {
                let name = edition.name.clone();
                self.withdraw(&name, ending, by, said);
            } else if edition.memory.kind == Kind::Legacy {
                edition.withdrawn = true;
                self.notify_withdrawn(said);
            }
        }
    }

    /// Drops a lease. Returns the control memory in which the member's blocks have to be returned.
    fn let_go(&mut self, lease: LeaseId, said: &mut Said) -> Option<BlockControl> {
        for waiting in self.queue.clone() {
            if matches!(waiting.for_what, For::Withdrawal(l) | For::Growth(l) if l == lease) {
                self.notify(&waiting, Err(Refused::Stale(Handle::Lease)), said);
            }
        }
        let place = self.version_leases.iter().position(|h| h.id == lease).unwrap();
        let VersionLease { member, name, number, .. } = self.version_leases.remove(place);
        if let Some(edition) = self.editions.iter_mut().find(|e| e.owner == Some(lease)) {
            edition.owner = None;
            let name = edition.name.clone();
            let number = edition.number;
            let last = Err(edition.cannot_grow(NoGrowth::CommitterGone));
            self.notify_growth(&name, number, &last, said);
        }
        let on_it = |h: &&VersionLease| h.name == name && h.number == number;
        let is_held = self.version_leases.iter().any(|h| on_it(&h));
        let holds_more = self.version_leases.iter().filter(on_it).any(|h| h.member == member);
        let edition = self.editions.iter().find(|e| e.name == name && e.number == number).unwrap();
        let control = edition.memory.control;
        let latest = edition.latest;
        let shared = edition.memory.lifetime == Lifetime::Shared;
        if !is_held && latest && shared {
            self.withdraw(&name, Ending::Unused, member, said);
        }
        control.filter(|_| !holds_more && (is_held || latest && !shared))
    }

    fn withdraw(&mut self, name: &Name, ending: Ending, by: MemberId, said: &mut Said) {
        let latest = self.latest(name).unwrap();
        let named = named(&latest.memory);
        let version = latest.number;
        let legacy = latest.memory.kind == Kind::Legacy;
        let pid = 100 + by.0 as u32;
        let command = format!("member {}", by.0).into();
        self.ends.push((name.clone(), Tombstone { ending, version, pid, command, at: self.now, legacy }));
        for edition in self.editions.iter_mut().filter(|e| e.name == *name) {
            (edition.latest, edition.withdrawn) = (false, true);
        }
        let pid = 100 + by.0 as u32;
        let change = match ending {
            Ending::OwnerDied => Change::OwnerDied { pid },
            _ => Change::Withdrawn { pid },
        };
        self.note(named, name, change);
        self.notify_withdrawn(said);
    }

    fn notify_withdrawn(&mut self, said: &mut Said) {
        for waiting in self.queue.clone() {
            if let For::Withdrawal(lease) = &waiting.for_what
                && let Some(held) = self.version_leases.iter().find(|h| h.id == *lease)
                && self.editions.iter().any(|e| e.name == held.name && e.number == held.number && e.withdrawn)
            {
                self.notify(&waiting, Ok(Answer::Withdrawn), said);
            }
        }
    }

    fn end_of(&self, name: &Name, version: Option<u64>) -> Option<Tombstone> {
        let (_, tombstone) = self.ends.iter().find(|(ended, _)| ended == name)?;
        let meant = version.is_none() || version == Some(tombstone.version);
        (meant && self.now < tombstone.at + REMEMBERED).then(|| tombstone.clone())
    }

    fn unknown(&self, name: &Name, version: Option<u64>) -> Refused {
        let is = self.kinds_of(name);
        let name = name.clone();
        match self.end_of(&name, version) {
            Some(tombstone) if tombstone.legacy => Refused::Ended { name, tombstone },
            ended => Refused::NotFound { name, near: Vec::new(), is, ended },
        }
    }

    pub(super) fn kinds_of(&self, name: &Name) -> Vec<Named> {
        let mut kinds: Vec<_> = self.latest(name).map(|latest| named(&latest.memory)).into_iter().collect();
        kinds.extend(self.has_object(ObjectKind::Timeline, name).then_some(Named::Timeline));
        kinds.extend(self.has_object(ObjectKind::Semaphore, name).then_some(Named::Semaphore));
        kinds
    }

    /// Withdraws the names that this member owns.
    fn disown_all(&mut self, member: MemberId, ending: Ending, by: MemberId, said: &mut Said) {
        self.holds_of(member).into_iter().for_each(|lease| self.disown(lease, ending, by, said));
        let mut left: Vec<_> =
            self.editions.iter().filter(|e| e.left_to == Some(member)).map(|e| e.name.clone()).collect();
        left.sort();
        left.dedup();
        for name in left {
            if self.latest(&name).is_some_and(|e| e.left_to == Some(member)) {
                self.withdraw(&name, ending, by, said);
            }
        }
    }

    fn notify_of(&mut self, member: MemberId, ending: Ending, by: MemberId, said: &mut Said) {
        self.queue.retain(|q| q.member != member);
        self.give_up_claims(member, said);
        self.disown_all(member, ending, by, said);
        let ending = match ending {
            Ending::OwnerDied => TimelineEnding::OwnerDied,
            Ending::Withdrawn => TimelineEnding::Closed,
            _ => TimelineEnding::Evicted,
        };
        self.end_lines_of(member, ending, said);
        self.detach(member, ending, said);
    }

    fn pools_open_to(&self, member: MemberId) -> Vec<FdId> {
        let is_open = |e: &&Edition| {
            self.version_leases.iter().any(|h| h.member == member && h.name == e.name && h.number == e.number)
        };
        let pools = self.editions.iter().filter(is_open).filter_map(|e| Some(e.memory.control?.slot_table()));
        pools.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn detach(&mut self, member: MemberId, ending: TimelineEnding, said: &mut Said) {
        let row = self.person(member).row;
        let is_held = |e: &&Edition| {
            self.version_leases.iter().any(|h| h.member == member && h.name == e.name && h.number == e.number)
        };
        let objects = self.editions.iter().filter(is_held).filter_map(|e| e.memory.control?.object);
        let objects: BTreeSet<_> = objects.map(|memory| memory.fd).collect();
        said.control.extend(objects.into_iter().map(|object| Effect::Detach { object, row, ending }));
    }

    fn give_back(&mut self, member: MemberId, is_dead: bool, said: &mut Said) {
        let mut control = self.give_objects_back(member, is_dead, said);
        for lease in self.holds_of(member) {
            control.extend(self.let_go(lease, said).map(|control| control.slot_table()));
        }
        self.clear_row(member, control, said);
        let before = self.pending_close.len();
        self.collect_garbage(said);
        let place = self.people.iter().position(|p| p.id == member).unwrap();
        let Person { id, since, simulated, .. } = self.people.remove(place);
        if is_dead && self.pending_close.len() > before {
            let bytes = self.pending_close[before..].iter().map(|(.., bytes)| bytes).sum();
            self.corpses.push(Corpse { id, since, simulated, bytes, until: CloseId(0) });
        }
    }

    fn holds_of(&self, member: MemberId) -> Vec<LeaseId> {
        self.version_leases.iter().filter(|h| h.member == member).map(|h| h.id).collect()
    }

    fn is_unproven(&self, member: MemberId) -> bool {
        self.people.iter().any(|p| p.id == member && p.life == Life::Unproven)
    }

    /// Returns the bytes of the versions that selected members held, each counted once.
    fn bytes_of(&self, is_meant: impl Fn(MemberId) -> bool) -> u64 {
        let held = |e: &&Edition| {
            self.version_leases.iter().any(|h| is_meant(h.member) && h.name == e.name && h.number == e.number)
        };
        self.editions.iter().filter(held).map(|e| e.memory.bytes()).sum()
    }

    fn departed(&self, member: MemberId) -> Departed {
        Departed {
            member,
            pid: 100 + member.0 as u32,
            command: format!("member {member}").into(),
            leases: self.leases_of(member) as u32,
            bytes: self.bytes_of(|holder| holder == member),
        }
    }

    fn give_up_claims(&mut self, member: MemberId, said: &mut Said) {
        while let Some(i) = self.rights.iter().position(|r| r.member == member) {
            self.pass_on(i, said);
        }
    }

    fn pass_on(&mut self, right: usize, said: &mut Said) {
        let name = self.rights.remove(right).name;
        let next = self.queue.iter().find(|q| matches!(&q.for_what, For::Build(of) if *of == name)).cloned();
        if let Some(next) = next {
            let answer = self.entitle(next.member, next.ticket, &name);
            self.notify(&next, Ok(answer), said);
        }
    }

    pub(super) fn notify(&mut self, waiting: &Queued, outcome: Outcome, said: &mut Said) {
        self.queue.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
        said.notices.push((waiting.member, waiting.ticket, outcome));
    }

    fn entitle(&mut self, member: MemberId, origin: RequestId, name: &Name) -> Answer {
        self.claims += 1;
        let claim = ClaimId(self.claims);
        self.rights.push(Right { id: claim, member, name: name.clone(), origin });
        Answer::Build { claim }
    }

    fn lease_version(&mut self, member: MemberId, name: &Name, number: u64, origin: RequestId) -> LeaseId {
        self.leases += 1;
        let id = LeaseId(self.leases);
        self.version_leases.push(VersionLease { id, member, name: name.clone(), number, origin });
        id
    }

    fn collect_garbage(&mut self, said: &mut Said) {
        // A queue that goes lets its segments go.
        loop {
            let is_held = |e: &Edition| self.version_leases.iter().any(|h| h.name == e.name && h.number == e.number);
            let is_needed = |e: &Edition| e.latest || is_held(e) || self.is_tied(e);
            let Some(place) = self.editions.iter().position(|e| !is_needed(e)) else { break };
            let Edition { name, number, memory, .. } = self.editions.remove(place);
            self.pending_close.push((name.clone(), number, named(&memory), memory.held_bytes()));
            said.closed.extend(memory.fds());
            self.ties.retain(|tie| tie.queue != (name.clone(), number));
            self.given.retain(|(queue, _)| *queue != (name.clone(), number));
        }
        let editions = &self.editions;
        self.numbers.retain(|name, _| editions.iter().any(|e| e.name == *name));
    }

    fn row(&self, e: &Edition) -> VersionRow {
        VersionRow {
            version: e.number,
            kind: e.memory.kind,
            place: e.memory.place,
            bytes: e.memory.bytes(),
            tensors: 1,
            mutable: e.memory.mutable,
            reserved: e.memory.reserved,
            growths: e.growths,
            lifetime: e.memory.lifetime,
            control: e.memory.control,
            committer: e.committer,
            leases: (self.version_leases.iter().filter(|h| h.name == e.name && h.number == e.number).count()
                + self.ties.iter().filter(|tie| tie.segment == (e.name.clone(), e.number)).count())
                as u32,
            committed_at: e.at,
        }
    }

    pub(super) fn person(&mut self, member: MemberId) -> &mut Person {
        self.people.iter_mut().find(|p| p.id == member).unwrap()
    }

    fn latest(&self, name: &Name) -> Option<&Edition> {
        self.editions.iter().find(|e| e.name == *name && e.latest)
    }

    fn names(&self) -> u64 {
        self.editions.iter().filter(|e| e.latest).count() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        let held = self.editions.iter().map(|e| e.memory.held_bytes() + e.memory.other_bytes());
        held.sum::<u64>() + self.control_memory().1
    }

    pub(super) fn fds(&self) -> u64 {
        let held = self.editions.iter().map(|e| e.memory.fds().len() as u64);
        held.sum::<u64>() + self.control_memory().0
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

fn is_meant(person: &Person, whom: Whom) -> bool {
    match whom {
        Whom::Pid(pid) => person.pid() == pid,
        Whom::Member(id) => person.id.0 == id,
    }
}

pub(super) fn over(limit: Limit, allowed: u64, needed: u64) -> Result<(), Refused> {
    if needed > allowed { Err(Refused::Limit { limit, allowed, needed }) } else { Ok(()) }
}
