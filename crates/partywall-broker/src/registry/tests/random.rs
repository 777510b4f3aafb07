// Holds 36, 42, 47, 58, 112, 118, 174, 187.
//! Random sequences of events, against the model.

use partywall_shm::queue::{InUse, TaskId};
use proptest::prelude::*;

use super::{
    model::{Model, ModelEffects, uid},
    *,
};
use crate::registry::{
    names::REMEMBERED,
    people::Life,
    types::{BlockControl, Deadline, Refusal, Then, Whom},
};

/// An event whose objects are positions in lists, so that their meaning depends on earlier events.
#[derive(Debug, Clone)]
enum Step {
    /// On the simulated driver or on the real one, with a pidfd or without.
    Join(bool, bool),
    Suspect(usize),
    Resume(usize),
    HeldByChild(usize),
    Die(usize),
    Expire(usize),
    /// The oldest released memory is closed.
    Closed,
    Ask(usize, Ask),
    /// The connection is lost with the last answer; the member resumes and repeats its request.
    AskAgain(usize),
    /// The broker is restarted; the member repeats its last request if it can.
    Restart(usize),
    /// The permits of a departed member's row have been returned.
    Clear(usize),
    /// Everything promised in an ended cell has been stored.
    Settle(usize),
    /// A member has ended a timeline by itself.
    EndLine(usize),
    /// The deadline of a withdrawal passes.
    Overdue(usize),
    /// The GPU has lost the memory of some versions, or of all.
    LoseGpu(usize),
    /// This many milliseconds pass.
    Pass(u64),
}

#[derive(Debug, Clone)]
enum Ask {
    Commit {
        name: usize,
        kind: Kind,
        chunks: Vec<u64>,
        table: bool,
        mutable: bool,
        lifetime: Lifetime,
        if_absent: bool,
        claim: Option<usize>,
        control: Option<Control>,
        shared: bool,
        owner: Option<usize>,
    },
    Open {
        name: usize,
        version: Option<u64>,
        write: bool,
        wait: bool,
    },
    OpenOrBuild(usize),
    Abandon(usize),
    Cancel(usize),
    GiveUp(usize),
    Release(usize),
    LeaveName(usize),
    WithdrawNames,
    AwaitWithdrawal(usize),
    Grow {
        lease: usize,
        kind: Kind,
        behind: bool,
        chunks: Vec<u64>,
        table: bool,
    },
    Refresh(usize, u64, u64),
    AwaitGrowth(usize, u64),
    Remove(usize, Option<(u64, Then)>),
    /// As its writer or not, shared or not.
    OpenTimeline(usize, bool, bool),
    Follow(usize),
    AbandonTimeline(usize),
    OpenSemaphore(usize, u32, bool),
    /// A queue and a segment, by leases.
    Attach(usize, usize),
    /// A queue, one of its attachments, and whether tasks name it.
    Detach(usize, usize, bool),
    OpenAttached(usize, usize),
    Objects,
    InspectObject(ObjectKind, usize),
    List,
    Members,
    /// From now, from a point of another broker, or from an event before or after the last one.
    Watch(usize, Option<Option<u64>>),
    UsesGpu(bool),
    ContextLost,
    CheckBytes(Kind, u64),
    /// By pid, or by number.
    Evict(usize, bool),
    FreeUnproven(Option<usize>),
    Status,
    Stop(bool),
    Leave,
}

fn step() -> impl Strategy<Value = Step> {
    let who = 0..8_usize;
    prop_oneof![
        3 => (prop::bool::weighted(0.2), prop::bool::weighted(0.8)).prop_map(|(simulated, pidfd)| Step::Join(simulated, pidfd)),
        2 => who.clone().prop_map(Step::Suspect),
        2 => who.clone().prop_map(Step::Resume),
        1 => who.clone().prop_map(Step::HeldByChild),
        2 => who.clone().prop_map(Step::Die),
        1 => who.clone().prop_map(Step::Expire),
        2 => who.clone().prop_map(Step::Overdue),
        1 => who.clone().prop_map(Step::LoseGpu),
        3 => Just(Step::Closed),
        3 => who.clone().prop_map(Step::AskAgain),
        3 => who.clone().prop_map(Step::Restart),
        3 => who.clone().prop_map(Step::Settle),
        2 => who.clone().prop_map(Step::Clear),
        1 => (0..3_usize).prop_map(Step::EndLine),
        1 => (0..2 * REMEMBERED).prop_map(Step::Pass),
        40 => (who, ask()).prop_map(|(who, ask)| Step::Ask(who, ask)),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    let name = 0..3_usize;
    let then = prop_oneof![Just(Then::Wait), Just(Then::Stale), Just(Then::Evict)];
    let pick = 0..8_usize;
    let version = prop_oneof![2 => Just(None), 1 => (1..5_u64).prop_map(Some)];
    let commit = (
        name.clone(),
        prop_oneof![3 => Just(Kind::Host), 1 => Just(Kind::Vmm), 1 => Just(Kind::Pinned), 2 => Just(Kind::Legacy)],
        prop::collection::vec(0..10_u64, 0..3),
        any::<bool>(),
        any::<bool>(),
        prop_oneof![Just(Lifetime::Owned), Just(Lifetime::Kept), Just(Lifetime::Shared)],
        prop::bool::weighted(0.2),
        (
            prop::option::weighted(0.4, pick.clone()),
            prop::option::weighted(
                0.4,
                prop_oneof![
                    (1..3_u32, prop::option::of(1..3_u32)).prop_map(|(blocks, depth)| control(blocks, depth)),
                    Just(queue()),
                ],
            ),
            any::<bool>(),
            prop::option::weighted(0.7, 0..8_usize),
        ),
    );
    let growth = (
        pick.clone(),
        prop_oneof![3 => Just(Kind::Host), 1 => Just(Kind::Vmm), 1 => Just(Kind::Pinned)],
        prop::bool::weighted(0.1),
        prop::collection::vec(0..10_u64, 0..3),
        any::<bool>(),
    );
    prop_oneof![
        8 => commit.prop_map(|commit| {
            let (name, kind, chunks, table, mutable, lifetime, if_absent, (claim, control, shared, owner)) = commit;
            Ask::Commit { name, kind, chunks, table, mutable, lifetime, if_absent, claim, control, shared, owner }
        }),
        8 => (name.clone(), version, prop::bool::weighted(0.3), any::<bool>())
            .prop_map(|(name, version, write, wait)| Ask::Open { name, version, write, wait }),
        6 => name.clone().prop_map(Ask::OpenOrBuild),
        2 => pick.clone().prop_map(Ask::Abandon),
        2 => pick.clone().prop_map(Ask::Cancel),
        2 => pick.clone().prop_map(Ask::GiveUp),
        6 => pick.clone().prop_map(Ask::Release),
        4 => pick.clone().prop_map(Ask::LeaveName),
        1 => Just(Ask::WithdrawNames),
        4 => pick.clone().prop_map(Ask::AwaitWithdrawal),
        8 => growth.prop_map(|(lease, kind, behind, chunks, table)| Ask::Grow { lease, kind, behind, chunks, table }),
        4 => (pick.clone(), 0..3_u64, 0..4_u64).prop_map(|(lease, growths, chunks)| Ask::Refresh(lease, growths, chunks)),
        24 => (pick.clone(), pick.clone()).prop_map(|(queue, segment)| Ask::Attach(queue, segment)),
        4 => (pick.clone(), 0..3_usize, prop::bool::weighted(0.2)).prop_map(|(queue, which, used)| Ask::Detach(queue, which, used)),
        4 => (pick.clone(), 0..3_usize).prop_map(|(queue, which)| Ask::OpenAttached(queue, which)),
        4 => (pick, 0..3_u64).prop_map(|(lease, growths)| Ask::AwaitGrowth(lease, growths)),
        3 => (name.clone(), prop::option::weighted(0.8, (0..9_u64, then))).prop_map(|(of, deadline)| Ask::Remove(of, deadline)),
        12 => (name.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(name, writer, shared)| Ask::OpenTimeline(name, writer, shared)),
        4 => (0..8_usize).prop_map(Ask::Follow),
        3 => name.clone().prop_map(Ask::AbandonTimeline),
        6 => (name.clone(), 1..3_u32, any::<bool>())
            .prop_map(|(name, maximum, shared)| Ask::OpenSemaphore(name, maximum, shared)),
        1 => Just(Ask::Objects),
        1 => (prop_oneof![Just(ObjectKind::Timeline), Just(ObjectKind::Semaphore)], name)
            .prop_map(|(kind, name)| Ask::InspectObject(kind, name)),
        1 => Just(Ask::List),
        1 => Just(Ask::Members),
        8 => (0..4_usize, prop::option::weighted(0.9, prop::option::weighted(0.95, 0..12_u64)))
            .prop_map(|(pattern, back)| Ask::Watch(pattern, back)),
        2 => any::<bool>().prop_map(Ask::UsesGpu),
        1 => Just(Ask::ContextLost),
        2 => (prop_oneof![Just(Kind::Host), Just(Kind::Pinned)], 0..30_u64)
            .prop_map(|(kind, bytes)| Ask::CheckBytes(kind, bytes)),
        1 => (0..8_usize, any::<bool>()).prop_map(|(who, by_pid)| Ask::Evict(who, by_pid)),
        1 => prop::option::of(0..8_usize).prop_map(Ask::FreeUnproven),
        1 => Just(Ask::Status),
        1 => any::<bool>().prop_map(Ask::Stop),
        1 => Just(Ask::Leave),
    ]
}

/// Two members have a queue open, which holds a segment.
fn attach() -> Vec<Step> {
    let commit = |name, control| Ask::Commit {
        name,
        kind: Kind::Host,
        chunks: vec![1],
        table: false,
        mutable: false,
        lifetime: Lifetime::Owned,
        if_absent: false,
        claim: None,
        control,
        shared: false,
        owner: None,
    };
    let open = Ask::Open { name: 0, version: None, write: false, wait: false };
    let asks = [(0, commit(0, Some(queue()))), (0, commit(1, None)), (1, open), (0, Ask::Attach(0, 0))];
    let asks = asks.map(|(who, ask)| Step::Ask(who, ask));
    [Step::Join(false, true), Step::Join(false, true)].into_iter().chain(asks).collect()
}

struct Run {
    watched: Watched,
    model: Model,
    last_member: u64,
    last_asked: Vec<(MemberId, RequestId, Ask)>,
}

impl Run {
    fn new() -> Self {
        let bounds = Bounds {
            user: 0,
            own: Quota { names: 3, ..NO_QUOTA },
            guests: Quota {
                members: 2,
                names: 3,
                fds: 8,
                bytes: 35,
                pinned: 15,
                leases: 9,
                timelines: 1,
                semaphores: 1,
                waits: 2,
            },
            members: 4,
            rows: 6,
            bytes: 60,
            pinned: 30,
            names: 2,
            fds: 16,
            waits: 4,
            member_waits: 3,
            leases: 14,
            member_leases: 6,
            chunks: 5,
            growths: 3,
            timelines: 2,
            slabs: 3,
            cells: 2,
            rest: 1,
            semaphores: 2,
            attachments: 2,
            log: 500,
        };
        let twin = Some(Registry::new(bounds, INSTANCE));
        let watched = Watched { clears_later: true, twin, ..Watched::new(bounds) };
        Self { watched, model: Model::new(bounds), last_member: 0, last_asked: Vec::new() }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Join(simulated, has_pidfd) => {
                // The next one is of the other user, whether it is admitted or not.
                self.last_member += 1;
                let member = MemberId(self.last_member);
                let uid = uid(member);
                let has_room = self.model.has_room(uid);
                assert_eq!(self.watched.registry.people.check_room(uid).is_ok(), has_room);
                let admitted = self.model.admits(uid, *simulated);
                assert_eq!(self.watched.registry.admits(uid, *simulated), admitted);
                if !has_room || !admitted {
                    return;
                }
                let identity = Identity { uid, ..identity(member, *simulated, *has_pidfd) };
                self.both(Event::Joined { member, identity });
            }
            Step::Suspect(who) => {
                self.if_in(*who, Life::Alive, |member| Event::Suspected { member });
                // Its child has closed a connection.
                self.if_in(*who, Life::HeldByChild, |member| Event::Suspected { member });
            }
            Step::Resume(who) => self.if_in(*who, Life::Suspect, |member| Event::Resumed { member }),
            Step::HeldByChild(who) => self.if_in(*who, Life::Alive, |member| Event::HeldByChild { member }),
            Step::Die(who) => {
                if let Some((member, life)) = self.member(*who)
                    && life != Life::Unproven
                {
                    self.both(Event::Died { member });
                }
            }
            Step::Expire(who) => {
                if let Some((member, _)) = self.member(*who) {
                    self.both(Event::Expired { member });
                }
            }
            Step::Closed => {
                if let Some(id) = self.watched.unclosed.first() {
                    self.both(Event::Closed { id: *id });
                }
            }
            Step::Ask(who, ask) => {
                if let Some((member, life)) = self.member(*who)
                    && !matches!(life, Life::Suspect | Life::Unproven)
                {
                    self.watched.last_request += 1;
                    self.ask(member, RequestId(self.watched.last_request), ask.clone());
                }
            }
            Step::AskAgain(who) => {
                if let Some((member, Life::Alive)) = self.member(*who)
                    && let Some((_, request, ask)) = self.last_asked.iter().rfind(|(m, ..)| *m == member).cloned()
                {
                    self.both(Event::Suspected { member });
                    self.both(Event::Resumed { member });
                    self.ask(member, request, ask);
                }
            }
            Step::Restart(who) => {
                self.watched.restart();
                if let Some((member, Life::Alive)) = self.member(*who)
                    && let Some((_, request, ask)) = self.last_asked.iter().rfind(|(m, ..)| *m == member).cloned()
                {
                    self.ask(member, request, ask);
                }
            }
            Step::Overdue(pick) => {
                let withdrawals = &self.model.withdrawals;
                if let Some((id, _)) = withdrawals.get(pick % withdrawals.len().max(1)) {
                    self.both(Event::DeadlinePassed { id: *id });
                }
            }
            Step::LoseGpu(pick) => {
                let place = [GPU, NODE][pick % 2];
                let mut chunks: Vec<_> = self.model.versions.iter().filter_map(|v| v.chunk_at(place)).collect();
                chunks.sort();
                let mut found = self.watched.registry.chunks_at(place);
                found.sort();
                assert_eq!(found, chunks);
                // Another version's chunk, or one that is gone, may be among them.
                chunks.truncate(*pick);
                chunks.extend([FdId(1), FdId(999_999)]);
                self.both(Event::DeviceLost { place, chunks });
            }
            Step::Pass(time) => self.watched.now += time,
            Step::EndLine(of) => self.both(Event::TimelineEnded { name: called(["a", "b", "a/b"][*of]) }),
            Step::Clear(pick) => {
                let rows: Vec<_> = self.model.objects.uncleared.iter().copied().collect();
                if let Some(row) = rows.get(pick % rows.len().max(1)) {
                    self.both(Event::RowCleared { row: *row });
                }
            }
            Step::Settle(pick) => {
                let restless = self.model.restless();
                if let Some(at) = restless.get(pick % restless.len().max(1)) {
                    self.both(Event::CellSettled { at: *at });
                }
            }
        }
    }

    fn ask(&mut self, member: MemberId, request: RequestId, ask: Ask) {
        let asked = self.call(member, &ask);
        let Asked { call, received } = self.watched.provide(member, asked);
        self.last_asked.retain(|(m, ..)| *m != member);
        self.last_asked.push((member, request, ask));
        self.both(Event::Request { member, request, call, received });
    }

    fn both(&mut self, event: Event) {
        let request = match &event {
            Event::Request { member, request, .. } => Some((*member, *request)),
            _ => None,
        };
        let effects = self.watched.apply(event.clone());
        self.model.objects.chosen = effects.iter().find_map(|effect| match effect {
            Effect::StartCell { at, .. } => Some(*at),
            _ => None,
        });
        let expected = self.model.apply(&event, self.watched.now);
        let mut actual = ModelEffects::default();
        for effect in effects {
            match effect {
                Effect::Reply { member, request: of, outcome, fds, unread } => {
                    assert_eq!((Some((member, of)), &actual.reply), (request, &None));
                    check_fds(&outcome, &fds, &self.model);
                    if let Ok(Answer::Grown(_)) = outcome {
                        actual.grown = fds;
                    }
                    actual.unread = unread;
                    actual.reply = Some(without_near(outcome));
                }
                Effect::Notify { member, ticket, outcome, fds } => {
                    check_fds(&outcome, &fds, &self.model);
                    actual.notices.push((member, ticket, outcome));
                }
                Effect::Close(fds) => actual.closed.extend(fds),
                // Always together with `Stop`.
                Effect::RemoveSocket => {}
                // What users are granted and refused is in the outcome.
                Effect::Audit(_) => {}
                Effect::Stop => actual.stop = true,
                Effect::Confirm(id) => actual.confirm.push(id),
                Effect::Quarantined(member) => actual.quarantined.push(member),
                Effect::Disconnect(member) => {
                    assert_eq!(request.map(|(asker, _)| asker), Some(member));
                    actual.disconnect = true;
                }
                Effect::HangUp(member) => {
                    assert_eq!(request.map(|(asker, _)| asker), Some(member));
                    actual.hang_up = true;
                }
                Effect::Attach { .. }
                | Effect::StartCell { .. }
                | Effect::EndCell { .. }
                | Effect::SettleCell(_)
                | Effect::Return { .. }
                | Effect::Detach { .. }
                | Effect::AwaitDeadline { .. }
                | Effect::Stale { .. }
                | Effect::Kill(_)
                | Effect::ClearRow { .. } => {
                    actual.control.push(effect);
                }
            }
        }
        actual.closed.sort();
        actual.confirm.sort();
        actual.notices.sort_by_key(|(member, ticket, _)| (*member, *ticket));
        assert_eq!(actual, expected);
    }

    fn call(&mut self, member: MemberId, ask: &Ask) -> Asked {
        let name = |i: usize| called(["a", "b", "a/b"][i]);
        // Mostly one of the member's own leases, sometimes another member's, sometimes one that does not exist.
        let lease = |model: &Model, i: usize| {
            let mut own: Vec<_> =
                model.version_leases.iter().filter(|h| h.member == member || i == 7).map(|h| h.id).collect();
            own.extend(model.objects.leases.iter().filter(|g| g.member == member || i == 7).map(|g| g.id));
            own.get(i % own.len().max(1)).copied().unwrap_or(LeaseId(999))
        };
        let claim = |model: &Model, i: usize| {
            let own: Vec<_> = model.claims.iter().filter(|r| r.member == member || i == 7).map(|r| r.id).collect();
            own.get(i % own.len().max(1)).copied().unwrap_or(ClaimId(999))
        };
        self.watched.now += 1;
        let call = match ask {
            Ask::Commit {
                name: of,
                kind,
                chunks,
                table,
                mutable,
                lifetime,
                if_absent,
                claim: by,
                control,
                shared,
                owner,
            } => {
                // The server refuses any other lifetime for legacy memory.
                let lifetime = match (kind, lifetime, control) {
                    (Kind::Legacy, Lifetime::Shared, None) => Lifetime::Shared,
                    (Kind::Legacy, ..) => Lifetime::Owned,
                    _ => *lifetime,
                };
                let mut memory = self.watched.memory_of(*kind, chunks, *table, *mutable, lifetime);
                if let Some(shape) = control {
                    memory = self.watched.with_control(&memory, *shape);
                }
                // The server refuses an owner for anything else.
                let may_be_given = *kind != Kind::Legacy && lifetime == Lifetime::Owned && control.is_none();
                let chosen = owner.filter(|_| may_be_given).map(|who| match who {
                    7 => MemberId(999),
                    _ => self.member(who).map_or(member, |(id, _)| id),
                });
                return Asked::from(Commit {
                    name: name(*of),
                    memory,
                    owner: chosen,
                    if_absent: *if_absent,
                    claim: by.map(|i| claim(&self.model, i)),
                    shared: *shared,
                });
            }
            Ask::Open { name: of, version, write, wait } => Call::Open(Open {
                name: name(*of),
                version: *version,
                access: if *write { Access::Write } else { Access::Read },
                wait: *wait,
            }),
            Ask::OpenOrBuild(of) => Call::OpenOrBuild { name: name(*of) },
            Ask::Abandon(i) => Call::AbandonBuild { claim: claim(&self.model, *i) },
            Ask::Cancel(i) => {
                let own: Vec<_> = self.model.waits.iter().filter(|q| q.member == member || *i == 7).collect();
                Call::Cancel { ticket: own.get(i % own.len().max(1)).map_or(RequestId(999_999), |q| q.ticket) }
            }
            Ask::GiveUp(i) => {
                let own = self.model.open_requests(member);
                Call::GiveUp { request: own.get(i % own.len().max(1)).copied().unwrap_or(RequestId(999_999)) }
            }
            Ask::Release(i) => Call::Release { lease: lease(&self.model, *i) },
            Ask::LeaveName(i) => Call::LeaveName { lease: lease(&self.model, *i) },
            Ask::WithdrawNames => Call::WithdrawNames,
            Ask::AwaitWithdrawal(i) => Call::AwaitWithdrawal { lease: lease(&self.model, *i) },
            Ask::Grow { lease: of, kind, behind, chunks, table } => {
                let lease = lease(&self.model, *of);
                let growths = self.model.held(member, lease).map_or(0, |edition| edition.growths);
                let (chunks, table) = self.watched.donate(Kind::Host, chunks, *table);
                let growths = growths + u64::from(*behind);
                return Growth { lease, growths, kind: *kind, chunks, table }.into();
            }
            Ask::Refresh(of, growths, chunks) => {
                Call::Refresh { lease: lease(&self.model, *of), growths: *growths, chunks: *chunks }
            }
            Ask::AwaitGrowth(of, growths) => Call::AwaitGrowth { lease: lease(&self.model, *of), growths: *growths },
            Ask::Remove(of, deadline) => {
                let deadline = deadline.map(|(after, then)| Deadline { after, then });
                Call::Remove { name: name(*of), deadline }
            }
            Ask::OpenTimeline(of, writer, shared) => {
                Call::OpenTimeline { name: name(*of), writer: *writer, shared: *shared }
            }
            Ask::Follow(of) => {
                let leases: Vec<_> =
                    self.model.objects.leases.iter().filter(|g| g.member == member || *of == 7).collect();
                let lease = leases.get(of % leases.len().max(1)).map_or(LeaseId(999), |held| held.id);
                Call::FollowTimeline { lease }
            }
            Ask::AbandonTimeline(of) => Call::AbandonTimeline { name: name(*of) },
            Ask::OpenSemaphore(of, maximum, shared) => {
                let maximum = *maximum;
                Call::OpenSemaphore { name: name(*of), maximum, shared: *shared }
            }
            Ask::Attach(queue, segment) => {
                // Mostly a queue and a segment.
                let pick = |i: usize, is_queue: bool| {
                    let of_kind = self.model.holds_on(member, |e| (e.memory.facts.named() == Named::Queue) == is_queue);
                    if i < 6 {
                        of_kind.get(i % of_kind.len().max(1)).copied().unwrap_or(LeaseId(999))
                    } else {
                        lease(&self.model, i)
                    }
                };
                Call::Attach { queue: pick(*queue, true), segment: pick(*segment, false) }
            }
            Ask::Detach(queue, which, used) => {
                let (queue, attachment) = self.attachment(member, *queue, *which);
                let first = TaskId { index: 1, generation: 2 };
                let in_use = used.then_some(InUse { tasks: 3, first });
                let received = Received { in_use, ..Received::default() };
                return Asked { call: Call::DetachSegment { queue, attachment }, received };
            }
            Ask::OpenAttached(queue, which) => {
                let (queue, attachment) = self.attachment(member, *queue, *which);
                Call::OpenAttached { queue, attachment }
            }
            Ask::Objects => Call::Objects { after: None },
            Ask::InspectObject(kind, of) => Call::InspectObject { kind: *kind, name: name(*of) },
            Ask::List => Call::List { after: None },
            Ask::Members => Call::Members { after: None },
            Ask::Watch(pattern, back) => {
                let last = self.model.history.len() as u64;
                let after = match back {
                    None => None,
                    Some(None) => ELSEWHERE,
                    Some(Some(11)) => point(last + 1),
                    // Mostly the last event, so that nothing is new.
                    Some(Some(back)) => point(last.saturating_sub(back.saturating_sub(6) * 3)),
                };
                Call::Watch { pattern: ["*", "a", "a/*", "?"][*pattern].into(), after }
            }
            Ask::UsesGpu(mps) => Call::UsesGpu { mps: mps.then(|| "/pipe".into()) },
            Ask::ContextLost => Call::ContextLost { gpu: None },
            Ask::CheckBytes(kind, bytes) => {
                let place = if *kind == Kind::Pinned { NODE } else { Place::Host };
                Call::CheckBytes { place, bytes: *bytes }
            }
            Ask::Evict(who, by_pid) => {
                // A present member, or one that never existed.
                let member = self.member(*who).filter(|_| *who < 6).map_or(MemberId(999), |(member, _)| member);
                let whom = if *by_pid { Whom::Pid(pid(member)) } else { Whom::Member(member.0) };
                Call::Evict { whom, kill: *by_pid }
            }
            Ask::FreeUnproven(who) => {
                let pid = |who: usize| self.member(who).map_or(999, |(member, _)| pid(member));
                Call::FreeUnproven { pid: who.map(pid) }
            }
            Ask::Status => Call::Status,
            Ask::Stop(force) => Call::Stop { force: *force },
            Ask::Leave => Call::Bye,
        };
        call.into()
    }

    /// A member's lease on a queue, mostly, and one of the queue's attachments, mostly.
    fn attachment(&self, member: MemberId, queue: usize, which: usize) -> (LeaseId, u32) {
        let queues = self.model.holds_on(member, |e| e.memory.facts.named() == Named::Queue);
        let queue = queues.get(queue % queues.len().max(1)).copied().unwrap_or(LeaseId(999));
        let attached = self.model.attached_to(member, queue);
        (queue, attached.get(which).copied().unwrap_or(77))
    }

    fn if_in(&mut self, who: usize, wanted: Life, event: impl FnOnce(MemberId) -> Event) {
        if let Some((member, life)) = self.member(who)
            && life == wanted
        {
            self.both(event(member));
        }
    }

    fn member(&self, who: usize) -> Option<(MemberId, Life)> {
        let members = &self.model.members;
        members.get(who % members.len().max(1)).map(|p| (p.id, p.life))
    }

    /// Ends a run: all members die, and everything that is not kept must be gone.
    fn end(mut self) {
        while let Some((member, life)) = self.member(0) {
            self.both(if life == Life::Unproven { Event::Expired { member } } else { Event::Died { member } });
        }
        while let Some(row) = self.model.objects.uncleared.first().copied() {
            self.both(Event::RowCleared { row });
        }
        while let Some(id) = self.watched.unclosed.first().copied() {
            self.both(Event::Closed { id });
        }
        self.watched.restart();
        let registry = &self.watched.registry;
        assert!(
            registry.names.leases().is_empty()
                && registry.names.claims().is_empty()
                && registry.objects.leases().is_empty()
        );
    }
}

/// Checks the file descriptors of an answer. An opened version comes with all of its descriptors, a commit with its
/// control memory, a growth with the new descriptors, a timeline with its slab, a semaphore with its
/// memory, and everything else with none.
fn check_fds(outcome: &Outcome, fds: &[FdId], model: &Model) {
    match outcome {
        Ok(Answer::Timeline(opened)) => assert_eq!(fds, [model.slab(opened.slab)]),
        Ok(Answer::Semaphore { .. }) => assert_eq!(fds.len(), 1),
        Ok(Answer::Opened(opened)) => assert_eq!(fds, model.version(&opened.name, opened.version).memory.fds()),
        Ok(Answer::Committed { lease, .. }) => {
            let member = model.version_leases.iter().find(|hold| hold.id == *lease).unwrap().member;
            let control = model.held(member, *lease).unwrap().memory.control;
            assert_eq!(
                fds,
                control.iter().flat_map(BlockControl::created).map(|created| created.fd).collect::<Vec<_>>()
            );
        }
        // Compared with the model's.
        Ok(Answer::Grown(_)) => {}
        _ => assert_eq!(fds, []),
    }
}

fn without_near(outcome: Outcome) -> Outcome {
    match outcome {
        Err(Refusal::NotFound { name, is, ended, .. }) => Err(Refusal::NotFound { name, near: Vec::new(), is, ended }),
        Err(Refusal::NoSuchMember { whom, .. }) => Err(Refusal::NoSuchMember { whom, near: Vec::new() }),
        Err(Refusal::ObjectNotFound { kind, name, is, .. }) => {
            Err(Refusal::ObjectNotFound { kind, name, near: Vec::new(), is })
        }
        // The audit recounts what each user has.
        Ok(Answer::Status(counts)) => Ok(Answer::Status(Box::new(wire::StatusInfo { users: Vec::new(), ..*counts }))),
        other => other,
    }
}

/// Does what the bytes of a fuzzer stand for: each two are the seed of one step, so that a fuzzer can add, drop and
/// repeat steps.
#[cfg(fuzzing)]
pub(crate) fn run_steps(input: &[u8]) {
    use proptest::{
        strategy::ValueTree,
        test_runner::{RngAlgorithm, TestRng, TestRunner},
    };

    // A sequence takes time by the square of its length, because each event is audited.
    const MOST_STEPS: usize = 200;
    let steps = step();
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let mut run = Run::new();
    for bytes in input.chunks_exact(2).take(MOST_STEPS) {
        let mut seed = [0; 32];
        seed[..2].copy_from_slice(bytes);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let step = steps.new_tree(&mut TestRunner::new_with_rng(config.clone(), rng));
        run.step(&step.expect("no step is filtered out").current());
    }
    run.end();
}

/// Reads bytes as the contents of a journal: an event, or a whole registry. Its encoding must be decoded to the same
/// value.
#[cfg(fuzzing)]
pub(crate) fn read_journal(input: &[u8]) {
    fn again<T: serde::Serialize + serde::de::DeserializeOwned>(input: &[u8]) {
        if let Ok(read) = postcard::from_bytes::<T>(input) {
            let written = postcard::to_stdvec(&read).unwrap();
            let read: T = postcard::from_bytes(&written).expect("our own encoding is decoded");
            assert_eq!(postcard::to_stdvec(&read).unwrap(), written);
        }
    }
    again::<Event>(input);
    again::<Registry>(input);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    // Holds 216.
    #[test]
    fn registry_matches_its_model(attached in any::<bool>(), steps in prop::collection::vec(step(), 1..120)) {
        let mut run = Run::new();
        let begin = if attached { attach() } else { Vec::new() };
        for step in begin.iter().chain(&steps) {
            run.step(step);
        }
        run.end();
    }
}
