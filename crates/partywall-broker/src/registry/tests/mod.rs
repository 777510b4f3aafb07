// Holds 117.
//! Tests of the registry: rule by rule, and at random against a model.

#![allow(clippy::unwrap_used, reason = "as in other tests: a fuzzer runs some of these")]

mod attachments;
mod audit;
mod control;
mod departures;
mod losses;
mod model;
mod model_calls;
mod model_endings;
mod model_objects;
mod model_versions;
mod model_watch;
mod objects;
mod pools;
mod random;
mod rules;
#[cfg(test)]
mod sample;
mod users;
mod watching;

use std::{collections::BTreeSet, ops::Deref, sync::Arc};

use partywall_wire::{
    self as wire, Control, HolderInfo, LegacyHandle, Open, Opened, OpenedTimeline, Point, QueueShape, TopicShape,
};

use super::{
    Answer, Bounds, Call, CloseId, ControlNeeded, Effect, Event, FdId, Guarded, MemberId, Outcome, Registry, RequestId,
    effect::{Granted, Unread},
    event::{Identity, Received},
    types::{
        Access, BlockControl, CellAt, Change, Chunk, ClaimId, ControlMemory, Ending, Gap, Handle, Kind, LeaseId,
        Lifetime, Limit, MemberState, Memory, Name, Named, NoGrowth, ObjectKind, OtherUsers, Place, Quota, Refusal,
        Table, TimelineEnding, VersionFacts, Whom,
    },
};

#[cfg(test)]
pub(crate) use sample::sample;

/// Runs the registry against its model by the bytes of a fuzzer: mostly steps, otherwise what a journal holds.
#[cfg(fuzzing)]
pub(crate) fn fuzz(input: &[u8]) {
    match input.split_first() {
        Some((0..32, journal)) => random::read_journal(journal),
        Some((_, steps)) => random::run_steps(steps),
        None => {}
    }
}

/// Returns a name by its text.
fn called(text: &str) -> Name {
    Name::new(text).unwrap()
}

const NO_QUOTA: Quota = Quota {
    members: u64::MAX,
    names: u64::MAX,
    fds: u64::MAX,
    bytes: u64::MAX,
    pinned: u64::MAX,
    leases: u64::MAX,
    timelines: u64::MAX,
    semaphores: u64::MAX,
    waits: u64::MAX,
};

/// A user that is not the broker's.
const GUEST: u32 = 7;

const UNBOUNDED: Bounds = Bounds {
    user: 0,
    own: NO_QUOTA,
    guests: NO_QUOTA,
    members: 1 << 16,
    rows: 1 << 16,
    bytes: u64::MAX,
    pinned: u64::MAX,
    names: 1 << 20,
    fds: 1 << 20,
    waits: 1 << 20,
    member_waits: 1 << 20,
    leases: 1 << 20,
    member_leases: 1 << 20,
    chunks: 1 << 20,
    growths: 1 << 20,
    timelines: 1 << 20,
    slabs: 1 << 20,
    cells: 4,
    rest: 2,
    semaphores: 1 << 20,
    attachments: 32,
    log: 1 << 20,
};

/// Bytes of a slab.
const SLAB_BYTES: u64 = 5;

/// Bytes that mutable memory may grow to.
const RESERVED: u64 = 25;

const HANDLE: LegacyHandle = LegacyHandle { origin: [1; 16], driver: [[2; 32]; 2] };

const GPU: Place = Place::Gpu([7; 16]);
const NODE: Place = Place::Pinned(1);

/// The number of the broker.
const INSTANCE: u64 = 5;

/// A point of another broker.
const ELSEWHERE: Option<Point> = Some(Point { instance: INSTANCE + 1, sequence: 0 });

/// Returns the point after an event of this broker.
fn point(sequence: u64) -> Option<Point> {
    Some(Point { instance: INSTANCE, sequence })
}

/// A call, and what comes with it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) call: Call,
    pub(crate) received: Received,
}

impl From<Call> for Asked {
    fn from(call: Call) -> Self {
        Self { call, received: Received::default() }
    }
}

/// A commit, with the memory that it leads to.
#[derive(Debug, Clone)]
pub(crate) struct Commit {
    pub(crate) name: Name,
    pub(crate) memory: Arc<Memory>,
    pub(crate) if_absent: bool,
    pub(crate) owner: Option<MemberId>,
    pub(crate) claim: Option<ClaimId>,
    pub(crate) shared: bool,
}

impl From<Commit> for Asked {
    fn from(commit: Commit) -> Self {
        let Commit { name, memory, if_absent, owner, claim, shared } = commit;
        let (chunks, table, fds) = apart(&memory.chunks, &memory.table);
        let call = Call::Commit(wire::Commit {
            name,
            facts: VersionFacts { shared, ..memory.facts },
            chunks,
            handles: memory.handles.clone(),
            table,
            tensors: memory.tensors,
            owner,
            if_absent,
            claim,
        });
        Self { call, received: Received { fds, blocks: memory.control, ..Received::default() } }
    }
}

/// A growth, with the chunks and the table that it leads to.
#[derive(Debug, Clone)]
struct Growth {
    lease: LeaseId,
    growths: u64,
    kind: Kind,
    chunks: Vec<Chunk>,
    table: Table,
}

impl From<Growth> for Asked {
    fn from(Growth { lease, growths, kind, chunks, table }: Growth) -> Self {
        let (chunks, table, fds) = apart(&chunks, &table);
        let call = Call::Grow(wire::Grow { lease, growths, kind, chunks, table, tensors: 1 });
        Self { call, received: Received { fds, ..Received::default() } }
    }
}

/// Separates chunks and a table from their descriptors, as they arrive.
fn apart(chunks: &[Chunk], table: &Table) -> (Vec<u64>, wire::Table, Vec<FdId>) {
    let mut fds: Vec<_> = chunks.iter().filter_map(|chunk| chunk.fd).collect();
    let table = match table {
        Table::Inline(bytes) => wire::Table::Inline(bytes.to_vec()),
        Table::Fd { bytes, fd } => {
            fds.push(*fd);
            wire::Table::Fd { bytes: *bytes }
        }
    };
    (chunks.iter().map(|chunk| chunk.bytes).collect(), table, fds)
}

/// Returns a member that holds leases on something, and has nothing in control memory.
fn holder(pid: u32, command: &str, leases: u32, unproven: bool) -> HolderInfo {
    HolderInfo { pid, command: command.to_owned(), leases, blocks: 0, tasks: 0, waiting: 0, unproven }
}

/// What a member has opened, and its memory as the registry knows it.
#[derive(Debug)]
struct Seen {
    opened: Opened,
    memory: Arc<Memory>,
}

impl Deref for Seen {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

/// A registry that is audited after each event, with the file descriptors and tickets that a server would know.
struct Watched {
    registry: Registry,
    open_fds: BTreeSet<FdId>,
    /// Cells that have been started and not ended.
    live_cells: BTreeSet<CellAt>,
    pending: BTreeSet<(MemberId, RequestId)>,
    unclosed: BTreeSet<CloseId>,
    /// True if the test itself sends the events that clear rows; otherwise they are sent immediately.
    clears_later: bool,
    last_fd: u64,
    last_request: u64,
    now: u64,
    /// A registry that learns only what a journal records.
    twin: Option<Registry>,
    /// All events, as a journal records them.
    recorded: Vec<u8>,
    /// What is unread in the last reply.
    unread: Unread,
}

impl Watched {
    fn new(bounds: Bounds) -> Self {
        Self {
            registry: Registry::new(bounds, INSTANCE),
            open_fds: BTreeSet::new(),
            live_cells: BTreeSet::new(),
            pending: BTreeSet::new(),
            unclosed: BTreeSet::new(),
            clears_later: false,
            last_fd: 0,
            last_request: 0,
            now: 0,
            twin: None,
            recorded: Vec::new(),
            unread: Unread::Nothing,
        }
    }

    /// Continues with a registry that was written and read again.
    fn restart(&mut self) {
        let written = postcard::to_stdvec(&self.registry).unwrap();
        if let Some(twin) = &self.twin {
            assert_eq!(postcard::to_stdvec(twin).unwrap(), written, "the records lead to the same state");
        }
        self.registry = postcard::from_bytes(&written).unwrap();
    }

    /// Confirms that all released memory is closed.
    fn close_all(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        while let Some(id) = self.unclosed.first().copied() {
            effects.extend(self.apply(Event::Closed { id }));
        }
        effects
    }

    /// `count` members, numbered from 1, with pids from 101.
    fn with_members<const N: usize>() -> (Self, [MemberId; N]) {
        let mut watched = Self::new(UNBOUNDED);
        let ids = std::array::from_fn(|i| MemberId(i as u64 + 1));
        ids.iter().for_each(|id| watched.join(*id));
        (watched, ids)
    }

    fn join(&mut self, member: MemberId) {
        self.join_as(member, 0);
    }

    fn join_as(&mut self, member: MemberId, uid: u32) {
        let identity = Identity { uid, ..identity(member, false, true) };
        assert_eq!(self.apply(Event::Joined { member, identity }), []);
    }

    fn apply(&mut self, event: Event) -> Vec<Effect> {
        match &event {
            Event::Suspected { member } | Event::HeldByChild { member } | Event::Died { member } => {
                self.pending.retain(|(waiting, _)| waiting != member);
            }
            Event::Closed { id } => assert!(self.unclosed.remove(id), "closed without a request"),
            Event::Request { member, call: Call::Bye, .. } => self.pending.retain(|(waiting, _)| waiting != member),
            _ => {}
        }
        let is_repeated = match &event {
            Event::Request { member, request, .. } => {
                self.registry.people.member(*member).is_some_and(|record| Some(*request) <= record.last_request)
            }
            _ => false,
        };
        let cancelled = match &event {
            Event::Request { member, call: Call::Cancel { ticket }, .. } => Some((*member, *ticket)),
            _ => None,
        };
        let given_up = match &event {
            Event::Request { member, call: Call::GiveUp { request }, .. } => Some((*member, *request)),
            _ => None,
        };
        let only_asks = matches!(&event, Event::Request { call, .. } if call.only_asks());
        let brings = matches!(&event, Event::Request { received, .. } if !received.all().is_empty());
        let record = postcard::to_stdvec(&event).unwrap();
        self.recorded.extend(&record);
        let mut effects = self.registry.apply(event, self.now);
        let refused = |effect: &Effect| matches!(effect, Effect::Reply { outcome: Err(_), .. });
        if let Some(twin) = &mut self.twin
            && !only_asks
            && (brings || !effects.iter().any(refused))
        {
            assert_eq!(twin.apply(postcard::from_bytes(&record).unwrap(), self.now), effects);
        }
        if !self.clears_later {
            let rows: Vec<_> = effects
                .iter()
                .filter_map(|effect| match effect {
                    Effect::ClearRow { row, .. } => Some(*row),
                    _ => None,
                })
                .collect();
            effects.extend(rows.into_iter().flat_map(|row| self.registry.apply(Event::RowCleared { row }, self.now)));
        }
        for effect in &effects {
            match effect {
                Effect::Reply { member, request, outcome: Ok(Answer::Pending), .. } => {
                    let is_new = self.pending.insert((*member, *request));
                    assert!(is_new || is_repeated, "pending twice");
                }
                Effect::Reply { outcome: Ok(Answer::Done), .. } if cancelled.is_some() && !is_repeated => {
                    assert!(cancelled.is_some_and(|ticket| self.pending.remove(&ticket)), "cancelled without waiting");
                }
                Effect::Reply { outcome: Ok(Answer::Done), .. } if !is_repeated => {
                    given_up.map(|request| self.pending.remove(&request));
                }
                Effect::Notify { member, ticket, outcome, .. } => {
                    assert_ne!(outcome, &Ok(Answer::Pending));
                    assert!(self.pending.remove(&(*member, *ticket)), "an answer without a request");
                }
                Effect::Confirm(id) => assert!(self.unclosed.insert(*id), "asked for twice"),
                Effect::StartCell { at, .. } => assert!(self.live_cells.insert(*at), "{at:?} is in use"),
                Effect::EndCell { at, .. } => assert!(self.live_cells.remove(at), "{at:?} has ended"),
                Effect::Close(fds) => {
                    for fd in fds {
                        assert!(self.open_fds.remove(fd), "{fd} is closed twice, or was never ours");
                    }
                }
                _ => {}
            }
        }
        audit::audit(&self.registry, &self.open_fds, &self.pending, &self.unclosed);
        control::audit(&self.registry, &self.live_cells);
        effects
    }

    fn memory(&mut self, chunks: &[u64], table: bool, mutable: bool, lifetime: Lifetime) -> Arc<Memory> {
        self.memory_of(Kind::Host, chunks, table, mutable, lifetime)
    }

    fn memory_of(&mut self, kind: Kind, chunks: &[u64], table: bool, mutable: bool, lifetime: Lifetime) -> Arc<Memory> {
        let (chunks, table) = self.donate(kind, chunks, table);
        let reserved = if mutable && kind != Kind::Legacy { RESERVED } else { 0 };
        let place = match kind {
            Kind::Host => Place::Host,
            Kind::Pinned => NODE,
            _ => GPU,
        };
        let handles = if kind == Kind::Legacy { vec![HANDLE; chunks.len()] } else { Vec::new() };
        let facts = VersionFacts { kind, place, mutable, reserved, lifetime, shared: false, control: None };
        Arc::new(Memory { facts, chunks, handles, table, tensors: 1, control: None })
    }

    /// A version's memory with the control memory of a pool or topic, as the server creates it.
    fn with_control(&mut self, memory: &Memory, shape: Control) -> Arc<Memory> {
        let mut create = |bytes: u32| ControlMemory { fd: self.create_fd(), bytes: u64::from(bytes) };
        let pool = create(shape.blocks);
        let outputs = shape.queue.map(|queue| create(queue.outputs));
        let object = shape.topic.map(|topic| topic.depth).or(shape.queue.map(|queue| queue.tasks)).map(create);
        let facts = VersionFacts { mutable: true, reserved: 0, control: Some(shape), ..memory.facts };
        Arc::new(Memory { facts, control: Some(BlockControl { pool, outputs, object }), ..memory.clone() })
    }

    fn create_fd(&mut self) -> FdId {
        self.last_fd += 1;
        self.open_fds.insert(FdId(self.last_fd));
        FdId(self.last_fd)
    }

    fn donate(&mut self, kind: Kind, chunks: &[u64], table: bool) -> (Vec<Chunk>, Table) {
        let mut fd = || self.create_fd();
        let chunks: Vec<_> =
            chunks.iter().map(|bytes| Chunk { bytes: *bytes, fd: (kind != Kind::Legacy).then(&mut fd) }).collect();
        let table = if table { Table::Fd { bytes: 3, fd: fd() } } else { Table::Inline(Arc::from([])) };
        (chunks, table)
    }

    fn growth(&mut self, lease: LeaseId, growths: u64, chunks: &[u64]) -> Growth {
        let (chunks, table) = self.donate(Kind::Host, chunks, false);
        Growth { lease, growths, kind: Kind::Host, chunks, table }
    }

    fn grow(&mut self, member: MemberId, lease: LeaseId, growths: u64, chunks: &[u64]) -> (Outcome, Vec<Effect>) {
        let growth = self.growth(lease, growths, chunks);
        let (_, outcome, effects) = self.ask(member, growth);
        (outcome, effects)
    }

    fn commit_call(&mut self, name: &str, mutable: bool, kept: bool) -> Commit {
        let lifetime = if kept { Lifetime::Kept } else { Lifetime::Owned };
        let memory = self.memory(&[10], false, mutable, lifetime);
        self.now += 1;
        commit(called(name), memory)
    }

    fn ask(&mut self, member: MemberId, asked: impl Into<Asked>) -> (RequestId, Outcome, Vec<Effect>) {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        let (outcome, effects) = self.ask_as(member, request, asked);
        (request, outcome, effects)
    }

    fn ask_as(&mut self, member: MemberId, request: RequestId, asked: impl Into<Asked>) -> (Outcome, Vec<Effect>) {
        let Asked { call, received } = self.provide(member, asked);
        let evicts = matches!(call, Call::Evict { .. });
        let mut effects = self.apply(Event::Request { member, request, call, received });
        let is_reported = |effect: &Effect| match effect {
            Effect::Attach { .. } | Effect::StartCell { .. } | Effect::EndCell { .. } | Effect::RemoveSocket => true,
            Effect::Notify { .. } | Effect::Detach { .. } | Effect::Kill(_) => evicts,
            _ => false,
        };
        let first = effects.iter().position(|effect| !is_reported(effect)).unwrap_or(0);
        match effects.remove(first) {
            Effect::Reply { member: to, request: of, outcome, unread, .. } if to == member && of == request => {
                self.unread = unread;
                (outcome, effects)
            }
            effect => panic!("the reply comes first, but for what it says has happened, not {effect:?}"),
        }
    }

    /// Creates the memory that a request needs, as the server does.
    fn provide(&mut self, member: MemberId, asked: impl Into<Asked>) -> Asked {
        let mut asked = asked.into();
        if let Some(needed) = self.registry.control_needed(member, &asked.call) {
            let bytes = match needed {
                ControlNeeded::Slab => SLAB_BYTES,
                ControlNeeded::Semaphore(permits) => u64::from(permits),
            };
            asked.received.created = Some(ControlMemory { fd: self.create_fd(), bytes });
        }
        asked
    }

    fn commit(&mut self, member: MemberId, name: &str, kept: bool) -> (u64, LeaseId) {
        let commit = self.commit_call(name, false, kept);
        match self.ask(member, commit).1 {
            Ok(Answer::Committed { version, lease }) => (version, lease),
            other => panic!("{other:?}"),
        }
    }

    fn open(&mut self, member: MemberId, name: &str, version: Option<u64>, wait: bool) -> Outcome {
        let open = Open { name: called(name), version, access: Access::Read, wait };
        self.ask(member, Call::Open(open)).1
    }

    /// Returns what an answer has opened, with its memory.
    fn seen(&self, opened: Opened) -> Seen {
        let memory = Arc::clone(&self.registry.names.version(&opened.name, opened.version).unwrap().memory);
        Seen { opened, memory }
    }

    fn opened(&mut self, member: MemberId, name: &str) -> Seen {
        match self.open(member, name, None, false) {
            Ok(Answer::Opened(opened)) => self.seen(opened),
            other => panic!("{other:?}"),
        }
    }

    fn release(&mut self, member: MemberId, lease: LeaseId) -> Vec<Effect> {
        let (_, outcome, effects) = self.ask(member, Call::Release { lease });
        assert_eq!(outcome, Ok(Answer::Done));
        effects
    }

    fn open_timeline(&mut self, member: MemberId, name: &str, writer: bool) -> Outcome {
        let open = Call::OpenTimeline { name: called(name), writer, shared: false };
        self.ask(member, open).1
    }

    fn timeline(&mut self, member: MemberId, name: &str, writer: bool) -> OpenedTimeline {
        match self.open_timeline(member, name, writer) {
            Ok(Answer::Timeline(opened)) => opened,
            other => panic!("{other:?}"),
        }
    }

    fn follow(&mut self, member: MemberId, lease: LeaseId) -> OpenedTimeline {
        match self.ask(member, Call::FollowTimeline { lease }).1 {
            Ok(Answer::Timeline(opened)) => opened,
            other => panic!("{other:?}"),
        }
    }

    fn open_semaphore(&mut self, member: MemberId, name: &str, maximum: u32) -> Outcome {
        let open = Call::OpenSemaphore { name: called(name), maximum, shared: false };
        self.ask(member, open).1
    }

    fn semaphore(&mut self, member: MemberId, name: &str, maximum: u32) -> LeaseId {
        match self.open_semaphore(member, name, maximum) {
            Ok(Answer::Semaphore { lease, .. }) => lease,
            other => panic!("{other:?}"),
        }
    }

    fn claim(&mut self, member: MemberId, name: &str) -> ClaimId {
        match self.ask(member, Call::OpenOrBuild { name: called(name) }).1 {
            Ok(Answer::Build { claim }) => claim,
            other => panic!("{other:?}"),
        }
    }
}

fn commit(name: Name, memory: Arc<Memory>) -> Commit {
    Commit { name, memory, if_absent: false, owner: None, claim: None, shared: false }
}

/// A pool; with a depth, a topic.
fn control(blocks: u32, depth: Option<u32>) -> Control {
    let topic = |depth| TopicShape {
        depth,
        history: 0,
        publishers: 1,
        loans: 2,
        subscribers: 1,
        held: 1,
        dtype: None,
        shape: None,
    };
    Control { blocks, block_bytes: 1, zeroed: false, topic: depth.map(topic), queue: None }
}

fn queue() -> Control {
    let queue = QueueShape { tasks: 2, outputs: 1, output_bytes: 1, lease: 0 };
    Control { queue: Some(queue), ..control(1, None) }
}

fn identity(member: MemberId, simulated: bool, has_pidfd: bool) -> Identity {
    Identity { pid: pid(member), uid: 0, command: command(member), simulated, operator: false, has_pidfd }
}

fn pid(member: MemberId) -> u32 {
    100 + member.0 as u32
}

fn command(member: MemberId) -> Arc<str> {
    format!("member {member}").into()
}

/// Returns the completions, in order.
fn notices(effects: &[Effect]) -> Vec<(MemberId, RequestId, Outcome)> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Notify { member, ticket, outcome, .. } => Some((*member, *ticket, outcome.clone())),
            _ => None,
        })
        .collect()
}

/// Returns the closed file descriptors.
fn closed(effects: &[Effect]) -> Vec<FdId> {
    let mut fds: Vec<_> = effects
        .iter()
        .flat_map(|effect| match effect {
            Effect::Close(fds) => fds.clone(),
            _ => Vec::new(),
        })
        .collect();
    fds.sort();
    fds
}
