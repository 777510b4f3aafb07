//! The registry again, as plainly as it can be said: flat lists, searched from the front, nothing kept twice.

use std::{collections::BTreeMap, sync::Arc};

use super::*;
use crate::registry::{
    effect::{Counts, Handle, Holder, MemberRow, MemberState, NameRow, NoGrowth, Opened, Refused, VersionRow},
    tombstones::{Ending, Tombstone},
    types::Bound,
};

/// What came of one event: the reply to a request, the verdicts of others, what was closed. Near names are left out.
#[derive(Debug, PartialEq, Default)]
pub(super) struct Said {
    pub(super) reply: Option<Outcome>,
    pub(super) notices: Vec<(MemberId, RequestId, Outcome)>,
    pub(super) closed: Vec<FdId>,
    pub(super) stop: bool,
}

#[derive(Debug)]
pub(super) struct Person {
    pub(super) id: MemberId,
    pub(super) state: MemberState,
    simulated: bool,
    since: u64,
    last_request: u64,
}

#[derive(Debug)]
pub(super) struct Edition {
    name: Name,
    number: u64,
    memory: Arc<Memory>,
    committer: u32,
    at: u64,
    owner: Option<LeaseId>,
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
pub(super) struct Hold {
    pub(super) id: LeaseId,
    pub(super) member: MemberId,
    name: Name,
    number: u64,
    origin: RequestId,
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
    for_what: For,
}

#[derive(Debug, Clone)]
enum For {
    Open(Open),
    Build(Name),
    Withdrawal(LeaseId),
    Growth(LeaseId),
}

#[derive(Debug)]
pub(super) struct Model {
    bounds: Bounds,
    /// Whether the member that joined last is.
    simulated: bool,
    pub(super) people: Vec<Person>,
    editions: Vec<Edition>,
    /// The ends of names of legacy memory that are not there.
    ends: Vec<(Name, Tombstone)>,
    now: u64,
    /// The highest number given to each name that has an edition.
    numbers: BTreeMap<Name, u64>,
    pub(super) holds: Vec<Hold>,
    pub(super) rights: Vec<Right>,
    pub(super) queue: Vec<Queued>,
    leases: u64,
    claims: u64,
}

impl Model {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            simulated: false,
            people: Vec::new(),
            editions: Vec::new(),
            ends: Vec::new(),
            now: 0,
            numbers: BTreeMap::new(),
            holds: Vec::new(),
            rights: Vec::new(),
            queue: Vec::new(),
            leases: 0,
            claims: 0,
        }
    }

    /// Whether there is nothing of the other sort.
    pub(super) fn admits(&self, simulated: bool) -> bool {
        let anything = !self.people.is_empty() || self.editions.iter().any(|e| e.memory.place != Place::Host);
        !anything || self.simulated == simulated
    }

    pub(super) fn apply(&mut self, event: &Event, at: u64) -> Said {
        self.now = at;
        let mut said = Said::default();
        match event {
            Event::Joined { member, identity } => {
                let (state, simulated) = (MemberState::Alive, identity.simulated);
                self.people.push(Person { id: *member, state, simulated, since: at, last_request: 0 });
                self.simulated = simulated;
            }
            Event::Suspected { member } => {
                self.queue.retain(|q| q.member != *member);
                self.person(*member).state = MemberState::Suspect;
            }
            Event::Resumed { member } => self.person(*member).state = MemberState::Alive,
            Event::HeldByChild { member } => {
                self.queue.retain(|q| q.member != *member);
                self.give_up_claims(*member, &mut said);
                self.person(*member).state = MemberState::HeldByChild;
            }
            Event::Died { member } => self.bury(*member, Ending::OwnerDied, &mut said),
            Event::Request { member, request, call } => {
                let person = self.person(*member);
                let repeated = request.0 <= person.last_request;
                person.last_request = person.last_request.max(request.0);
                let known = if repeated { self.known(*member, *request, call) } else { None };
                if known.is_some() {
                    said.closed.extend(call.fds());
                }
                let outcome = known.map_or_else(|| self.call(*member, *request, call, &mut said), Ok);
                said.reply = Some(outcome);
            }
        }
        self.collect_garbage(&mut said);
        said.closed.sort();
        // Their order among each other is no promise; what each says is.
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
                    over(Bound::Names, self.bounds.names, self.names() + self.rights.len() as u64 + 1)?;
                    Ok(self.entitle(member, request, name))
                }
            }
            Call::AbandonBuild { claim } => {
                let Some(i) = self.rights.iter().position(|r| r.id == *claim && r.member == member) else {
                    return Err(Refused::Stale(Handle::Claim));
                };
                self.pass_on(i, said);
                Ok(Verdict::Done)
            }
            Call::Cancel { ticket } => {
                let Some(i) = self.queue.iter().position(|q| q.member == member && q.ticket == *ticket) else {
                    return Err(Refused::Stale(Handle::Ticket));
                };
                self.queue.remove(i);
                Ok(Verdict::Done)
            }
            Call::Release { lease } => {
                if !self.holds.iter().any(|h| h.id == *lease && h.member == member) {
                    return Err(Refused::Stale(Handle::Lease));
                }
                self.let_go(*lease, Ending::Withdrawn, said);
                Ok(Verdict::Done)
            }
            Call::AwaitWithdrawal { lease } => {
                let Some(hold) = self.holds.iter().find(|h| h.id == *lease && h.member == member) else {
                    return Err(Refused::Stale(Handle::Lease));
                };
                let edition = self.editions.iter().find(|e| e.name == hold.name && e.number == hold.number).unwrap();
                if edition.withdrawn {
                    return Ok(Verdict::Withdrawn);
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
                    return Ok(Verdict::Done);
                }
                if *chunks > edition.memory.chunks.len() as u64 {
                    return Err(Refused::Invalid("the version never had so many chunks"));
                }
                let (chunks, memory) = (*chunks as usize, Arc::clone(&edition.memory));
                Ok(Verdict::Grown { growths: edition.growths, chunks, memory })
            }
            Call::AwaitGrowth { lease, growths } => {
                let edition = self.held(member, *lease)?;
                if edition.growths > *growths {
                    return Ok(Verdict::Done);
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
                self.withdraw(name, Ending::Withdrawn, member, said);
                let held: Vec<_> = self.holds.iter().filter(|h| h.name == *name).collect();
                let kept =
                    self.editions.iter().filter(|e| held.iter().any(|h| h.name == e.name && h.number == e.number));
                let bytes_kept = kept.map(|e| e.memory.bytes()).sum();
                let holders = self.people.iter().filter_map(|p| {
                    let leases = held.iter().filter(|h| h.member == p.id).count() as u32;
                    let command = format!("member {}", p.id).into();
                    (leases > 0).then_some(Holder { pid: 100 + p.id.0 as u32, command, leases })
                });
                Ok(Verdict::Removed { version, bytes_kept, holders: holders.collect() })
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
                Ok(Verdict::Names { names: names.collect(), more: false })
            }
            Call::Members { after: None } => {
                let rows = self.people.iter().map(|p| MemberRow {
                    member: p.id,
                    pid: 100 + p.id.0 as u32,
                    uid: 0,
                    command: format!("member {}", p.id).into(),
                    state: p.state,
                    leases: self.holds.iter().filter(|h| h.member == p.id).count() as u32,
                    bytes: self
                        .editions
                        .iter()
                        .filter(|e| {
                            self.holds.iter().any(|h| h.member == p.id && h.name == e.name && h.number == e.number)
                        })
                        .map(|e| e.memory.bytes())
                        .sum(),
                    since: p.since,
                    simulated: p.simulated,
                });
                Ok(Verdict::Members { members: rows.collect(), more: false })
            }
            Call::Status => {
                let at = |place| {
                    let chunks =
                        self.editions.iter().filter(|e| e.memory.place == place).map(|e| e.memory.held_bytes());
                    let tables = self.editions.iter().filter(|_| place == Place::Host).map(|e| e.memory.table_bytes());
                    (place, chunks.chain(tables).sum::<u64>())
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
                Ok(Verdict::Status(Box::new(Counts {
                    simulated: self.simulated,
                    members: self.people.iter().filter(|p| p.id != member).count() as u64,
                    names: self.names(),
                    versions: self.editions.len() as u64,
                    leases: self.holds.len() as u64,
                    fds: self.fds(),
                    bytes,
                    largest,
                })))
            }
            Call::Stop { force } => {
                let (names, members) = (self.names(), self.people.len() as u64 - 1);
                if !force && names + members > 0 {
                    return Err(Refused::InUse { names, members });
                }
                said.stop = true;
                Ok(Verdict::Done)
            }
            Call::Leave => {
                self.bury(member, Ending::Withdrawn, said);
                Ok(Verdict::Done)
            }
            Call::Ping => Ok(Verdict::Done),
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
        if let (true, Some(latest)) = (if_absent, self.latest(name)) {
            return Err(Refused::NameExists { name: name.clone(), version: latest.number });
        }
        let names = self.names() + u64::from(self.latest(name).is_none());
        over(Bound::Names, self.bounds.names, names)?;
        over(Bound::Bytes, self.bounds.bytes, self.bytes() + memory.held_bytes() + memory.table_bytes())?;
        over(Bound::Fds, self.bounds.fds, self.fds() + memory.fds().len() as u64)?;
        over(Bound::Leases, self.bounds.leases, self.leases_of(member) + 1)?;

        self.ends.retain(|(ended, _)| ended != name);
        let number = self.numbers.entry(name.clone()).or_default();
        *number += 1;
        let number = *number;
        self.editions.iter_mut().filter(|e| e.name == *name).for_each(|e| e.latest = false);
        let lease = self.hold(member, name, number, request);
        self.editions.push(Edition {
            name: name.clone(),
            number,
            memory: Arc::clone(memory),
            committer: 100 + member.0 as u32,
            at: self.now,
            owner: Some(lease),
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
        Ok(Verdict::Committed { version: number, lease })
    }

    pub(super) fn held(&self, member: MemberId, lease: LeaseId) -> Result<&Edition, Refused> {
        let hold = self.holds.iter().find(|h| h.id == lease && h.member == member);
        let hold = hold.ok_or(Refused::Stale(Handle::Lease))?;
        Ok(self.editions.iter().find(|e| e.name == hold.name && e.number == hold.number).unwrap())
    }

    fn grow(&mut self, member: MemberId, request: RequestId, growth: &Growth, said: &mut Said) -> Outcome {
        let edition = self.held(member, growth.lease)?;
        let (name, number, before) = (edition.name.clone(), edition.number, Arc::clone(&edition.memory));
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
        over(Bound::Growths, self.bounds.growths, edition.growths + 1)?;
        over(Bound::Chunks, self.bounds.chunks, memory.chunks.len() as u64)?;
        let bytes = |memory: &Memory| memory.bytes() + memory.table_bytes();
        over(Bound::Bytes, self.bounds.bytes, self.bytes() - bytes(&before) + bytes(&memory))?;
        over(Bound::Fds, self.bounds.fds, self.fds() - before.fds().len() as u64 + memory.fds().len() as u64)?;

        said.closed.extend(before.table_fd());
        for edition in self.editions.iter_mut().filter(|e| e.name == name && e.number == number) {
            edition.memory = Arc::new(memory.clone());
            edition.growths += 1;
            edition.grown_by = Some(request);
        }
        self.tell_growth(&name, number, &Ok(Verdict::Done), said);
        Ok(Verdict::Done)
    }

    fn tell_growth(&mut self, name: &Name, number: u64, outcome: &Outcome, said: &mut Said) {
        for waiting in self.queue.clone() {
            if let For::Growth(lease) = &waiting.for_what
                && self.holds.iter().any(|h| h.id == *lease && h.name == *name && h.number == number)
            {
                self.tell(&waiting, outcome.clone(), said);
            }
        }
    }

    fn open(&mut self, member: MemberId, request: RequestId, open: &Open) -> Outcome {
        let Open { name, version, access, wait } = open;
        let latest = self.latest(name).map(|e| e.number);
        let wanted = version.or(latest);
        let found = self.editions.iter().find(|e| e.name == *name && Some(e.number) == wanted && !e.withdrawn);
        if let Some(edition) = found {
            let (number, growths, memory) = (edition.number, edition.growths, Arc::clone(&edition.memory));
            if *access == Access::Write && !memory.mutable {
                return Err(Refused::ReadOnly { name: name.clone(), version: number });
            }
            over(Bound::Leases, self.bounds.leases, self.leases_of(member) + 1)?;
            let lease = self.hold(member, name, number, request);
            return Ok(Verdict::Opened(Opened { lease, name: name.clone(), version: number, growths, memory }));
        }
        match (self.numbers.get(name), version) {
            (Some(last), Some(v)) if v <= last || !wait => {
                let not_found = Refused::VersionNotFound { name: name.clone(), version: *v, latest };
                Err(self.end_of(name, *version).unwrap_or(not_found))
            }
            _ if *wait => self.enqueue(member, request, For::Open(open.clone())),
            _ => Err(self.unknown(name, *version)),
        }
    }

    fn known(&self, member: MemberId, request: RequestId, call: &Call) -> Option<Verdict> {
        let hold = self.holds.iter().find(|h| h.member == member && h.origin == request);
        match call {
            Call::Commit(_) => hold.map(|h| Verdict::Committed { version: h.number, lease: h.id }),
            Call::Open(_) | Call::OpenOrBuild { .. } => {
                if let Some(h) = hold {
                    let edition = self.editions.iter().find(|e| e.name == h.name && e.number == h.number)?;
                    let (name, growths) = (h.name.clone(), edition.growths);
                    let memory = Arc::clone(&edition.memory);
                    return Some(Verdict::Opened(Opened { lease: h.id, name, version: h.number, growths, memory }));
                }
                let right = self.rights.iter().find(|r| r.member == member && r.origin == request)?;
                Some(Verdict::Build { claim: right.id })
            }
            Call::Grow(growth) => {
                let edition = self.held(member, growth.lease).ok()?;
                (edition.grown_by == Some(request)).then_some(Verdict::Done)
            }
            _ => None,
        }
    }

    fn enqueue(&mut self, member: MemberId, ticket: RequestId, for_what: For) -> Outcome {
        if self.queue.iter().any(|q| q.member == member && q.ticket == ticket) {
            return Err(Refused::Invalid("a request with this number is already waiting"));
        }
        let waits = self.queue.iter().filter(|q| q.member == member).count() as u64;
        over(Bound::Waits, self.bounds.waits, waits + 1)?;
        self.queue.push(Queued { member, ticket, for_what });
        Ok(Verdict::Pending)
    }

    fn let_go(&mut self, lease: LeaseId, ending: Ending, said: &mut Said) {
        let hold = self.holds.iter().find(|h| h.id == lease).unwrap();
        let (name, owner) = (hold.name.clone(), hold.member);
        if let Some(edition) = self.editions.iter_mut().find(|e| e.owner == Some(lease) && !e.memory.kept) {
            if edition.latest {
                self.withdraw(&name, ending, owner, said);
            } else if edition.memory.kind == Kind::Legacy {
                edition.withdrawn = true;
                self.tell_withdrawn(said);
            }
        }
        for waiting in self.queue.clone() {
            if matches!(waiting.for_what, For::Withdrawal(l) | For::Growth(l) if l == lease) {
                self.tell(&waiting, Err(Refused::Stale(Handle::Lease)), said);
            }
        }
        self.holds.retain(|h| h.id != lease);
        if let Some(edition) = self.editions.iter_mut().find(|e| e.owner == Some(lease)) {
            edition.owner = None;
            let (name, number) = (edition.name.clone(), edition.number);
            let last = Err(edition.cannot_grow(NoGrowth::CommitterGone));
            self.tell_growth(&name, number, &last, said);
        }
    }

    fn withdraw(&mut self, name: &Name, ending: Ending, by: MemberId, said: &mut Said) {
        if let Some(latest) = self.latest(name).filter(|e| e.memory.kind == Kind::Legacy) {
            let tombstone = Tombstone { ending, version: latest.number, pid: 100 + by.0 as u32, at: self.now };
            self.ends.push((name.clone(), tombstone));
        }
        for edition in self.editions.iter_mut().filter(|e| e.name == *name) {
            (edition.latest, edition.withdrawn) = (false, true);
        }
        self.tell_withdrawn(said);
    }

    fn tell_withdrawn(&mut self, said: &mut Said) {
        for waiting in self.queue.clone() {
            if let For::Withdrawal(lease) = &waiting.for_what
                && let Some(hold) = self.holds.iter().find(|h| h.id == *lease)
                && self.editions.iter().any(|e| e.name == hold.name && e.number == hold.number && e.withdrawn)
            {
                self.tell(&waiting, Ok(Verdict::Withdrawn), said);
            }
        }
    }

    fn end_of(&self, name: &Name, version: Option<u64>) -> Option<Refused> {
        let (_, tombstone) = self.ends.iter().find(|(ended, _)| ended == name)?;
        let meant = version.is_none() || version == Some(tombstone.version);
        meant.then(|| Refused::Ended { name: name.clone(), tombstone: *tombstone })
    }

    fn unknown(&self, name: &Name, version: Option<u64>) -> Refused {
        let not_found = Refused::NotFound { name: name.clone(), near: Vec::new() };
        self.end_of(name, version).unwrap_or(not_found)
    }

    fn bury(&mut self, member: MemberId, ending: Ending, said: &mut Said) {
        self.queue.retain(|q| q.member != member);
        self.give_up_claims(member, said);
        let holds: Vec<_> = self.holds.iter().filter(|h| h.member == member).map(|h| h.id).collect();
        holds.into_iter().for_each(|lease| self.let_go(lease, ending, said));
        self.people.retain(|p| p.id != member);
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
            let verdict = self.entitle(next.member, next.ticket, &name);
            self.tell(&next, Ok(verdict), said);
        }
    }

    fn tell(&mut self, waiting: &Queued, outcome: Outcome, said: &mut Said) {
        self.queue.retain(|q| (q.member, q.ticket) != (waiting.member, waiting.ticket));
        said.notices.push((waiting.member, waiting.ticket, outcome));
    }

    fn entitle(&mut self, member: MemberId, origin: RequestId, name: &Name) -> Verdict {
        self.claims += 1;
        let claim = ClaimId(self.claims);
        self.rights.push(Right { id: claim, member, name: name.clone(), origin });
        Verdict::Build { claim }
    }

    fn hold(&mut self, member: MemberId, name: &Name, number: u64, origin: RequestId) -> LeaseId {
        self.leases += 1;
        let id = LeaseId(self.leases);
        self.holds.push(Hold { id, member, name: name.clone(), number, origin });
        id
    }

    fn collect_garbage(&mut self, said: &mut Said) {
        let holds = &self.holds;
        self.editions.retain(|e| {
            let needed = e.latest || holds.iter().any(|h| h.name == e.name && h.number == e.number);
            if !needed {
                said.closed.extend(e.memory.fds());
            }
            needed
        });
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
            kept: e.memory.kept,
            committer: e.committer,
            leases: self.holds.iter().filter(|h| h.name == e.name && h.number == e.number).count() as u32,
            committed_at: e.at,
        }
    }

    fn person(&mut self, member: MemberId) -> &mut Person {
        self.people.iter_mut().find(|p| p.id == member).unwrap()
    }

    fn latest(&self, name: &Name) -> Option<&Edition> {
        self.editions.iter().find(|e| e.name == *name && e.latest)
    }

    fn names(&self) -> u64 {
        self.editions.iter().filter(|e| e.latest).count() as u64
    }

    fn bytes(&self) -> u64 {
        self.editions.iter().map(|e| e.memory.held_bytes() + e.memory.table_bytes()).sum()
    }

    fn fds(&self) -> u64 {
        self.editions.iter().map(|e| e.memory.fds().len() as u64).sum()
    }

    fn leases_of(&self, member: MemberId) -> u64 {
        self.holds.iter().filter(|h| h.member == member).count() as u64
    }
}

fn over(bound: Bound, allowed: u64, needed: u64) -> Result<(), Refused> {
    if needed > allowed { Err(Refused::Limit { bound, allowed, needed }) } else { Ok(()) }
}
