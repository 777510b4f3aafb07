//! Requests in the model: what each is answered at once, and which of them wait.

use partywall_shm::queue::{InUse, TaskId};
use partywall_wire::{Kill, MemberInfo, NameInfo, QueueHolder, StatusInfo, WaitInfo};

use super::{
    model::{Model, ModelEffects, ModelVersion, WaitFor, Waiting, is_meant, over, uid},
    model_objects::{OpenSemaphore, OpenTimeline},
    *,
};
use crate::registry::{
    effect::MemberAt,
    people::Life,
    types::{Awaited, Deadline, Handle, Notice, Refusal, WithdrawalId},
};

impl Model {
    pub(super) fn call(
        &mut self,
        member: MemberId,
        request: RequestId,
        call: &Call,
        received: &Received,
        effects: &mut ModelEffects,
    ) -> Outcome {
        match call {
            Call::Commit(commit) => {
                let outcome = self.commit(member, request, commit, received, effects);
                if outcome.is_err() {
                    effects.closed.extend(received.all());
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
                    return Err(Refusal::Stale { what: Handle::Claim });
                };
                self.pass_claim_on(i, effects);
                Ok(Answer::Done)
            }
            Call::Cancel { ticket } => {
                let Some(i) = self.waits.iter().position(|q| q.member == member && q.ticket == *ticket) else {
                    return Err(Refusal::Stale { what: Handle::Ticket });
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
                    Some((.., lease)) => self.call(member, request, &Call::Release { lease }, received, effects),
                    None => Ok(Answer::Done),
                }
            }
            Call::Release { lease } | Call::LeaveName { lease }
                if self.objects.leases.iter().any(|g| g.id == *lease) =>
            {
                if !self.objects.leases.iter().any(|g| g.id == *lease && g.member == member) {
                    return Err(Refusal::Stale { what: Handle::Lease });
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
                    return Err(Refusal::Stale { what: Handle::Lease });
                }
                let left = self.versions.iter_mut().find(|v| {
                    let kept_by = match v.memory.facts.kind {
                        Kind::Legacy => Lifetime::Shared,
                        _ => Lifetime::Owned,
                    };
                    let is_left = v.owner == Some(*lease) && v.keeper.is_none() && v.latest;
                    let is_left = is_left && v.memory.facts.lifetime == kept_by;
                    matches!(call, Call::LeaveName { .. }) && is_left
                });
                match left {
                    Some(left) => left.keeper = Some(member),
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
                    return Err(Refusal::Stale { what: Handle::Lease });
                };
                let version = self.version(&held.name, held.number);
                if version.withdrawn {
                    return Ok(version.withdrawn_answer());
                }
                self.enqueue(member, request, WaitFor::Withdrawal(*lease))
            }
            Call::Grow(growth) => {
                let outcome = self.grow(member, growth, received, effects);
                if outcome.is_err() {
                    effects.closed.extend(received.all());
                }
                outcome
            }
            Call::Refresh { lease, growths, chunks } => {
                let version = self.held(member, *lease)?;
                if version.growths <= *growths && *chunks >= version.memory.chunks.len() as u64 {
                    return Ok(Answer::Done);
                }
                if *chunks > 0 {
                    version.check_stale()?;
                }
                if *chunks > version.memory.chunks.len() as u64 {
                    return Err(Refusal::invalid("the version never had so many chunks"));
                }
                let chunks = *chunks as usize;
                effects.grown = version.memory.fds_from(chunks);
                Ok(Answer::Grown(wire::Grown {
                    growths: version.growths,
                    chunks: version.memory.chunks[chunks..].iter().map(|chunk| chunk.bytes).collect(),
                    table: apart(&[], &version.memory.table).1,
                }))
            }
            Call::AwaitGrowth { lease, growths } => {
                let version = self.held(member, *lease)?;
                if version.growths > *growths {
                    return Ok(Answer::Done);
                }
                if version.memory.facts.reserved == 0 {
                    return Err(version.cannot_grow(NoGrowth::Fixed));
                }
                if version.owner.is_none() {
                    return Err(version.cannot_grow(NoGrowth::CommitterGone));
                }
                self.enqueue(member, request, WaitFor::Growth(*lease))
            }
            Call::CheckBytes { place, bytes } => self.more_at(uid(member), *place, *bytes, 0).map(|()| Answer::Done),
            Call::Remove { name, deadline } => {
                let Some((version, owner)) = self.latest(name).map(|v| (v.number, v.uid)) else {
                    return Err(match self.notice_of(name) {
                        Some(notice) => Refusal::Withdrawing { name: name.clone(), notice },
                        None => self.unknown(member, name, None),
                    });
                };
                self.only(member, owner, OtherUsers::Remove { name: name.to_string() })?;
                let notice = deadline.map(|Deadline { after, then }| {
                    self.noticed += 1;
                    let id = WithdrawalId(self.noticed);
                    self.withdrawals.push((id, member));
                    let latest = self.latest(name).unwrap();
                    self.withdrawn.insert(id, (latest.uid, latest.memory.facts.shared));
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
                    (leases > 0).then_some(holder(m.pid(), &command, leases, unproven))
                });
                let mut queues: Vec<_> = self.attachments.iter().filter(|a| a.segment.0 == *name).collect();
                queues.sort_by_key(|a| (a.segment.1, a.queue.clone()));
                let queues = queues.into_iter().map(|a| QueueHolder {
                    name: a.queue.0.to_string(),
                    version: a.queue.1,
                    attachment: a.number,
                });
                let (holders, queues) = (holders.collect(), queues.collect());
                Ok(Answer::Removed { version, bytes_kept, holders, queues, notice: notice.map(|(_, notice)| notice) })
            }
            Call::List { after: None } => {
                let is_seen = |name: &&Name| {
                    let newest = self.versions.iter().filter(|v| v.name == **name).max_by_key(|v| v.number);
                    newest.is_some_and(|v| self.sees(member, v.uid, v.memory.facts.shared))
                };
                let names = self.numbers.keys().filter(is_seen).map(|name| {
                    let older: Vec<_> = self.versions.iter().filter(|v| v.name == *name && !v.latest).collect();
                    let info = NameInfo {
                        name: name.to_string(),
                        latest: self.latest(name).map(|v| self.info(v)),
                        usage: None,
                        older: older.len() as u32,
                        older_bytes: older.iter().map(|v| v.memory.bytes()).sum(),
                        notice: self.notice_of(name),
                        lost: self.latest(name).is_none()
                            && older.iter().max_by_key(|v| v.number).is_some_and(|v| v.is_lost()),
                    };
                    (info, self.latest(name).and_then(|v| Some(v.memory.control?.slot_table())))
                });
                let (names, slots) = names.unzip();
                effects.unread = Unread::Names(slots);
                Ok(Answer::Names { names, more: false })
            }
            Call::Members { after: None } => {
                let is_seen = |id: MemberId| self.sees(member, uid(id), false);
                let rows = self.members.iter().filter(|m| is_seen(m.id)).map(|m| {
                    let info = MemberInfo {
                        state: m.state(),
                        doubt: m.doubt(),
                        mps: m.mps.as_deref().map(str::to_owned),
                        timelines: self.timelines_written_by(m.id),
                        leases: self.leases_of(m.id) as u32,
                        waits: self.waits_of(m.id),
                        ..bare(m.id, self.bytes_of(|holder| holder == m.id), m.since, m.simulated)
                    };
                    let (semaphores, pools) = (self.semaphores_open_to(m.id), self.pools_open_to(m.id));
                    (info, MemberAt { row: Some(m.row), semaphores, pools })
                });
                let dead = self.dead_members.iter().filter(|dead| is_seen(dead.id));
                let dead = dead.map(|dead| bare(dead.id, dead.bytes, dead.since, dead.simulated));
                let dead = dead.map(|info| (info, MemberAt::default()));
                let mut members: Vec<_> = rows.chain(dead).collect();
                members.sort_by_key(|(info, _)| info.member);
                let (members, at) = members.into_iter().unzip();
                effects.unread = Unread::Members(at);
                Ok(Answer::Members { members, more: false })
            }
            Call::Status => {
                let at = |place| {
                    let chunks =
                        self.versions.iter().filter(|v| v.memory.facts.place == place).map(|v| v.memory.held_bytes());
                    let others = self.versions.iter().filter(|_| place == Place::Host).map(|v| v.memory.other_bytes());
                    let control = if place == Place::Host { self.control_memory(None).1 } else { 0 };
                    (place, chunks.chain(others).sum::<u64>() + control)
                };
                let mut bytes: Vec<_> = [Place::Host, GPU, NODE].map(at).into_iter().filter(|(_, n)| *n > 0).collect();
                bytes.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
                let mut largest: Vec<_> = self
                    .numbers
                    .keys()
                    .filter_map(|name| {
                        let of_name = self.versions.iter().filter(|v| v.name == *name);
                        let newest = of_name.clone().max_by_key(|v| v.number).unwrap();
                        self.sees(member, newest.uid, newest.memory.facts.shared).then_some(())?;
                        Some((
                            name.to_string(),
                            newest.memory.facts.place,
                            of_name.map(|v| v.memory.held_bytes()).sum::<u64>(),
                        ))
                    })
                    .collect();
                largest.sort_by_key(|(name, _, bytes)| (std::cmp::Reverse(*bytes), name.clone()));
                Ok(Answer::Status(Box::new(StatusInfo {
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
                    ..StatusInfo::default()
                })))
            }
            Call::Stop { force } => {
                self.only(member, 0, OtherUsers::Stop)?;
                let (timelines, semaphores) = self.object_counts();
                let names = self.names() + timelines + semaphores;
                let members = self.members.len() as u64 - 1;
                if !force && names + members > 0 {
                    return Err(Refusal::InUse { names, members });
                }
                effects.stop = true;
                Ok(Answer::Done)
            }
            Call::Bye => {
                let record = self.member(member);
                let is_believed = record.evicted.is_none() && !record.lost_context;
                self.notify_of(member, Ending::Withdrawn, member, effects);
                if is_believed {
                    self.give_back(member, false, effects);
                }
                (effects.disconnect, effects.hang_up) = (is_believed, !is_believed);
                Ok(Answer::Done)
            }
            Call::Watch { pattern, after } => self.watch(member, request, pattern, *after),
            Call::UsesGpu { mps } => {
                if let Some(mps) = mps {
                    self.member(member).mps = Some(mps.as_str().into());
                }
                Ok(Answer::Done)
            }
            Call::ContextLost { .. } => {
                self.member(member).lost_context = true;
                self.end_timelines_of(member, TimelineEnding::OwnerFaulted, effects);
                self.detach(member, TimelineEnding::OwnerFaulted, effects);
                Ok(Answer::Done)
            }
            Call::Evict { whom, kill } => {
                let meant: Vec<_> = self.members.iter().filter(|m| is_meant(m, *whom)).map(|m| m.id).collect();
                if meant.is_empty() {
                    return Err(Refusal::NoSuchMember { whom: *whom, near: Vec::new() });
                }
                if uid(member) != 0 {
                    self.only(member, uid(meant[0]), OtherUsers::Evict { pid: pid(meant[0]) })?;
                }
                if meant.contains(&member) {
                    return Err(Refusal::NotYourself);
                }
                if meant.iter().all(|id| self.is_unproven(*id)) {
                    return Err(Refusal::IsUnproven { pid: pid(meant[0]) });
                }
                let mut members = Vec::new();
                for id in meant.into_iter().filter(|id| !self.is_unproven(*id)).collect::<Vec<_>>() {
                    self.evict_one(id, member, effects);
                    members.push(self.departed(id));
                }
                if *kill {
                    let kills = members.iter().map(|departed| Effect::Kill(MemberId(departed.member)));
                    effects.control.extend(kills);
                }
                let kill = if *kill { Kill::Sent } else { Kill::NotAsked };
                let evicted = members.into_iter().map(|departed| {
                    let wire::Freed { member, pid, command, leases, bytes } = departed;
                    wire::Evicted { member, pid, command, leases, bytes, kill }
                });
                Ok(Answer::Evicted(evicted.collect()))
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
                        return Err(Refusal::NoSuchMember { whom: Whom::Pid(*pid), near: Vec::new() });
                    }
                    (Some(pid), Some(record)) if unproven.is_empty() => {
                        return Err(Refusal::NotUnproven { pid: *pid, state: record.state() });
                    }
                    _ => {}
                }
                let members = unproven.iter().map(|id| self.departed(*id)).collect();
                unproven.into_iter().for_each(|id| self.give_back(id, true, effects));
                Ok(Answer::Freed { members, more: false })
            }
            Call::OpenTimeline { name, writer, shared } => {
                let (writer, shared, slab) = (*writer, *shared, received.created);
                self.open_timeline(member, request, &OpenTimeline { name: name.clone(), writer, shared, slab }, effects)
            }
            Call::FollowTimeline { lease, .. } => self.follow(member, *lease),
            Call::AbandonTimeline { name } => self.abandon_timeline(member, name, effects),
            Call::OpenSemaphore { name, maximum, shared } => {
                let (maximum, shared, memory) = (*maximum, *shared, received.created);
                let open = OpenSemaphore { name: name.clone(), maximum, shared, memory };
                self.open_semaphore(member, request, &open, effects)
            }
            Call::Attach { queue, segment } => self.attach(member, *queue, *segment, effects),
            Call::DetachSegment { queue, attachment } => {
                let (queue, _) = self.queue_of(member, *queue)?;
                let (name, version) = self.attached_segment(&queue, *attachment)?;
                if let Some(in_use) = received.in_use {
                    let InUse { tasks, first: TaskId { index, generation } } = in_use;
                    let (queue, queue_version) = queue;
                    let first = (index, generation);
                    return Err(Refusal::AttachmentInUse { queue, queue_version, name, version, tasks, first });
                }
                self.attachments.retain(|a| (&a.queue, a.number) != (&queue, *attachment));
                Ok(Answer::Done)
            }
            Call::OpenAttached { queue, attachment } => {
                let (queue, _) = self.queue_of(member, *queue)?;
                let (name, number) = self.attached_segment(&queue, *attachment)?;
                self.grant(member, request, &name, number, Access::Read)
            }
            Call::Objects { after: None } => {
                let (objects, at) = self.objects_listed(member).into_iter().unzip();
                effects.unread = Unread::Objects(at);
                Ok(Answer::Objects { objects, more: false })
            }
            Call::InspectObject { kind, name } => self.inspect_object(member, *kind, name, effects),
            Call::Ping => Ok(Answer::Done),
            other => panic!("not in the model: {other:?}"),
        }
    }

    pub(super) fn known(&self, member: MemberId, request: RequestId, call: &Call) -> Option<Answer> {
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
            Call::OpenTimeline { .. } => self.known_object(member, request, ObjectKind::Timeline),
            Call::OpenSemaphore { .. } => self.known_object(member, request, ObjectKind::Semaphore),
            _ => None,
        }
    }

    /// Returns the first four waits of a member for names.
    fn waits_of(&self, member: MemberId) -> Vec<WaitInfo> {
        let pid_of_lease = |id| self.version_leases.iter().find(|h| h.id == id).map(|h| pid(h.member));
        let builder = |name: &Name| self.claims.iter().find(|c| c.name == *name).map(|c| pid(c.member));
        let held = |id: LeaseId| self.version_leases.iter().find(|h| h.id == id).unwrap();
        let mut waits: Vec<_> = self.waits.iter().filter(|q| q.member == member).collect();
        waits.sort_by_key(|q| q.ticket);
        let rows = waits.iter().filter_map(|q| {
            let (on, name, target, by) = match &q.waits_for {
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
            Some(WaitInfo { on, name: name.to_string(), target, by, ms: None })
        });
        rows.take(4).collect()
    }

    pub(super) fn enqueue(&mut self, member: MemberId, ticket: RequestId, waits_for: WaitFor) -> Outcome {
        let waits = self.waits.iter().filter(|q| q.member == member).count() as u64;
        over(Limit::WaitsOfMember, self.bounds.member_waits, waits + 1)?;
        over(Limit::Waits, self.bounds.waits, self.waits.len() as u64 + 1)?;
        let of_user = self.waits.iter().filter(|q| uid(q.member) == uid(member)).count() as u64;
        self.within(uid(member), Limit::Waits, of_user, 1)?;
        self.waits.push(Waiting { member, ticket, waits_for });
        Ok(Answer::Pending)
    }
}

/// Returns what a listing says of a dead member.
fn bare(id: MemberId, bytes: u64, since: u64, simulated: bool) -> MemberInfo {
    MemberInfo {
        member: id.0,
        pid: pid(id),
        uid: uid(id),
        command: command(id).to_string(),
        state: MemberState::Dead,
        doubt: None,
        mps: None,
        quiet: None,
        leases: 0,
        timelines: 0,
        permits: Some(0),
        blocks: Some(0),
        tasks: Some(0),
        bytes,
        since,
        waits: Vec::new(),
        simulated,
    }
}
