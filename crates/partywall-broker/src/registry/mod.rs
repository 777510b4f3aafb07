//! The registry: members, names and versions, and the members that hold, build and wait for them.
//!
//! The registry is a pure state machine. [`Registry::apply`] takes one [`Event`] and returns the [`Effect`]s that the
//! server carries out in order. An event is applied whole; a refused request changes nothing. The registry has no
//! clock, no randomness, no I/O and no file descriptors. Time comes with the events, and descriptors are numbers
//! ([`FdId`]) that the server keeps and closes by an effect.
//!
//! Requests, answers and refusals are those of the wire. The types of `partywall-wire` are checked when a message is
//! decoded, the server checks the rest ([`event`] says what), and ids may be any member's: the registry looks each up
//! for the member that sent it.
//!
//! The state can be written and read again (serde). Applying the same events at the same times leads to the same state
//! and the same effects, so a journal of events restores it. Requests that only ask need no record, nor do refused ones
//! that brought no descriptors. A new event or call needs `Serialize` and a step in `tests::random`, where registries
//! are restored between any two events.
//!
//! The state is in five machines. Nothing but a machine changes its fields. The modules after them contain the rules:
//! methods of [`Registry`], which has one machine of each kind, for requests and events. Only there a change in one
//! machine leads to a change in another.
//!
//! | module | contains |
//! |---|---|
//! | [`types`] | ids, memory, bounds |
//! | [`event`] | the input: events, and requests with what came with them |
//! | [`effect`] | the output: effects, and what the server adds to answers |
//! | `coding` | encodings of values in the journal |
//! | `near` | suggestions for names that were not found |
//! | `pages` | pages of listings |
//! | **machines** | |
//! | `people` | members and users: what belongs to whom, and what each may use |
//! | `names` | names, and the versions, leases, claims and waiting requests of each |
//! | `objects` | timelines and semaphores, and the cells of timelines |
//! | `closing` | memory that was released, until it is closed |
//! | `log` | the events of names, and the requests that wait for them |
//! | **rules** | |
//! | `segments` | commit, open, release, withdrawal, and the one place where memory is released |
//! | `withdrawals` | withdrawals with a deadline |
//! | `losses` | GPUs that have lost their memory |
//! | `growth` | versions that grow, and requests that wait for growth |
//! | `claims` | the right to build a name that does not exist |
//! | `waits` | requests that wait, and their completion |
//! | `object_leases` | leases on timelines and semaphores: who opens them, and what ends with a lease |
//! | `attachments` | segments that queues hold |
//! | `reclaim` | reclaims what a member held that is gone |
//! | `users` | which names a user may create, and what is written down of what users do to each other |
//! | `limits` | the processes that a refusal because of a limit names |
//! | `members` | members in trouble: evicted, with a broken CUDA context, or dead while their work may continue |
//! | `report` | listings |
//! | `restart` | what a server needs to continue after a restart |
//! | `watch` | requests for events of names |

pub(crate) mod effect;
pub(crate) mod event;
pub(crate) mod types;

mod attachments;
mod claims;
mod closing;
mod coding;
mod growth;
mod limits;
mod log;
mod losses;
mod members;
mod names;
mod near;
mod object_leases;
mod objects;
mod pages;
mod people;
mod reclaim;
mod report;
mod restart;
mod segments;
#[cfg(any(test, fuzzing))]
mod tests;
mod users;
mod waits;
mod watch;
mod withdrawals;

use serde::{Deserialize, Serialize};

pub(crate) use effect::{Effect, Effects, Outcome, Unread};
pub(crate) use event::{Call, Event, Received};
pub(crate) use limits::largest;
pub(crate) use object_leases::ControlNeeded;
pub(crate) use objects::Guarded;
pub(crate) use partywall_wire::Answer;
#[cfg(fuzzing)]
pub(crate) use tests::fuzz;
#[cfg(test)]
pub(crate) use tests::{Asked, Commit, sample};
pub(crate) use types::{Bounds, CloseId, FdId, MemberId, RequestId};

use closing::Closing;
use effect::{Decision, Granted, split};
use log::Log;
use names::Names;
use objects::Objects;
use people::{Life, People};
use types::{ClaimId, Ending, LeaseId, Millis, OtherUsers, Refusal, STALE_LEASE, TimelineEnding};

/// All state of a broker that is not tied to its process.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Registry {
    people: People,
    names: Names,
    objects: Objects,
    closing: Closing,
    /// The events of names.
    log: Log,
    /// The time of the current event.
    #[serde(skip)]
    now: Millis,
}

/// Returns whether the answer to a repeated request cannot be found again in the registry's state. Answers that carry
/// leases and claims can, and the others describe the present state.
fn is_found_only_here(answer: &Answer) -> bool {
    matches!(
        answer,
        Answer::Done | Answer::Removed { .. } | Answer::Evicted(_) | Answer::Freed { .. } | Answer::Attached { .. }
    )
}

impl Registry {
    /// Creates the registry of the broker with this number.
    pub(crate) fn new(bounds: Bounds, instance: u64) -> Self {
        let log = Log::new(instance, bounds.log);
        Self { people: People::new(bounds), objects: Objects::new(bounds), log, ..Self::default() }
    }

    /// Applies one event, which happened at this time.
    pub(crate) fn apply(&mut self, event: Event, at: Millis) -> Effects {
        self.now = at;
        let mut out = Vec::new();
        match event {
            Event::Joined { member, identity } => self.people.join(member, identity, at),
            // An operator holds nothing, so nothing has to wait for its death.
            Event::Suspected { member } if self.people.is_operator(member) => self.leave(member, &mut out),
            Event::Suspected { member } => {
                self.drop_waits(member);
                // A child of a member that has exited still holds its memory if it only closes a connection, as it does
                // when it executes another program.
                if self.people.member(member).is_some_and(|record| record.life == Life::Alive) {
                    self.people.set_life(member, Life::Suspect);
                }
            }
            Event::Resumed { member } => {
                self.people.set_life(member, Life::Alive);
                self.remind(member, &mut out);
            }
            Event::HeldByChild { member } => {
                // The process that would read completions and build is gone. Only memory that the child may still have
                // mapped is kept: the leases, and the names that they own.
                self.drop_waits(member);
                self.drop_claims(member, &mut out);
                self.people.set_life(member, Life::HeldByChild);
            }
            Event::Dismissed { member } => self.leave(member, &mut out),
            Event::Died { member } => self.bury(member, &mut out),
            Event::Expired { member } => self.expire(member, &mut out),
            Event::DeadlinePassed { id } => self.deadline_passed(id, &mut out),
            Event::DeviceLost { place, chunks } => self.lose(place, &chunks, &mut out),
            Event::Closed { id } => self.closed(id),
            Event::CellSettled { at } => self.settle_cell(at),
            Event::RowCleared { row } => {
                self.closing.row_cleared();
                self.people.give_back_row(row);
            }
            Event::TimelineEnded { name } => self.end_timeline(&name, TimelineEnding::Abandoned, &mut out),
            Event::Request { member, request, call, received } => {
                self.request(member, request, call, received, &mut out);
            }
        }
        self.drop_unreferenced(&mut out);
        self.close_unused_slabs(&mut out);
        self.closing.ask(&mut out);
        self.notify_watchers(&mut out);
        self.closing.hold_back(&mut out);
        out
    }

    /// Returns the number of the broker.
    pub(crate) fn instance(&self) -> u64 {
        self.log.instance()
    }

    /// Returns the members and their users.
    pub(crate) fn people(&self) -> &People {
        &self.people
    }

    /// Returns the timelines and semaphores.
    pub(crate) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Returns whether a process of a user may join. Members on the simulated driver and on the real one cannot share
    /// memory. The first member of a user decides which of the two all its members use, for as long as it has a member
    /// or GPU memory.
    pub(crate) fn admits(&self, uid: u32, simulated: bool) -> bool {
        simulated == self.people.is_simulated(uid) || self.people.members_of(uid) == 0 && !self.has_driver_memory(uid)
    }

    /// Returns whether no member, name, timeline or semaphore exists.
    pub(crate) fn is_idle(&self) -> bool {
        self.people.members().is_empty()
            && self.names.entries().is_empty()
            && self.objects.timelines().is_empty()
            && self.objects.semaphores().is_empty()
    }

    fn request(&mut self, member: MemberId, request: RequestId, call: Call, received: Received, out: &mut Effects) {
        let Some(record) = self.people.member(member) else { return };
        let only_asks = call.only_asks();
        let repeated = !only_asks && Some(request) <= record.last_request;

        // Most effects of a call come after its reply, because the caller waits for the answer. Only effects that the
        // reply reports as done come before it.
        let mut before = Vec::new();
        let mut rest = Vec::new();
        let settled =
            match self.people.check_evicted(member, &call).and_then(|()| self.people.check_membership(member, &call)) {
                Ok(()) => repeated.then(|| self.outcome_of_repeated(member, request, &call)).flatten().map(Ok),
                Err(refused) => Some(Err(refused)),
            };
        let granted = match settled {
            Some(settled) => {
                let fds = received.all();
                if !fds.is_empty() {
                    rest.push(Effect::Close(fds));
                }
                settled
            }
            None => self.call(member, request, call, received, &mut before, &mut rest),
        };
        let (outcome, fds, unread) = split(granted);
        if !only_asks && let Ok(answer) = &outcome {
            self.people.answered(member, request, Some(answer).filter(|answer| is_found_only_here(answer)));
        }
        out.append(&mut before);
        let audited = self.audited(member, &outcome);
        out.push(Effect::Reply { member, request, outcome, fds, unread });
        out.extend(audited);
        out.append(&mut rest);
    }

    fn call(
        &mut self,
        member: MemberId,
        request: RequestId,
        call: Call,
        received: Received,
        before: &mut Effects,
        out: &mut Effects,
    ) -> Decision {
        match call {
            Call::Ping => Ok(Answer::Done.into()),
            Call::Commit(commit) => self.commit(member, request, commit, received, out),
            Call::Open(open) => self.open(member, request, open),
            Call::OpenOrBuild { name } => self.open_or_build(member, request, name),
            Call::AbandonBuild { claim } => self.abandon(member, claim, out),
            Call::Cancel { ticket } => self.cancel(member, ticket),
            Call::GiveUp { request } => self.give_up(member, request, out),
            Call::Release { lease } => self.release(member, lease, false, out),
            Call::LeaveName { lease } => self.release(member, lease, true, out),
            Call::WithdrawNames => {
                self.withdraw_names(member, Ending::Withdrawn, &self.people.ender(member), out);
                Ok(Answer::Done.into())
            }
            Call::AwaitWithdrawal { lease } => self.await_withdrawal(member, request, lease),
            Call::Grow(growth) => self.grow(member, growth, received, out),
            Call::Refresh { lease, growths, chunks } => self.refresh(member, lease, growths, chunks),
            Call::AwaitGrowth { lease, growths } => self.await_growth(member, request, lease, growths),
            Call::Remove { name, deadline } => self.remove(member, &name, deadline, out),
            Call::Inspect { name, version } => self.inspect(member, &name, version),
            Call::List { after } => Ok(self.list(member, after.as_deref())),
            Call::Members { after } => Ok(self.list_members(member, after)),
            Call::OpenTimeline { name, writer, shared } => {
                self.open_timeline((member, request), (name, writer, shared), received.created, before, out)
            }
            Call::FollowTimeline { lease } => self.objects.follow(member, lease).ok_or(STALE_LEASE),
            Call::AbandonTimeline { name } => self.abandon_timeline(member, &name, before),
            Call::OpenSemaphore { name, maximum, shared } => {
                self.open_semaphore((member, request), (name, maximum, shared), received.created, out)
            }
            Call::Attach { queue, segment } => self.attach(member, queue, segment, before),
            Call::DetachSegment { queue, attachment } => {
                self.detach_segment(member, queue, attachment, received.in_use)
            }
            Call::OpenAttached { queue, attachment } => self.open_attached(member, request, queue, attachment),
            Call::Objects { after } => Ok(self.list_objects(member, after)),
            Call::InspectObject { kind, name } => self.inspect_object(member, kind, &name),
            Call::Status => Ok(self.status(member).into()),
            Call::Stop { force } => self.stop(member, force, before, out),
            Call::UsesGpu { mps } => {
                self.people.uses_gpu(member, mps);
                Ok(Answer::Done.into())
            }
            Call::ContextLost { .. } => Ok(self.context_lost(member, out).into()),
            Call::CheckBytes { place, bytes } => {
                let uid = self.people.uid_of(member);
                self.people.check_bytes(uid, place, bytes, 0).map(|()| Answer::Done.into())
            }
            Call::Watch { pattern, after } => self.watch(member, request, &pattern, after),
            Call::Evict { whom, kill } => self.evict(member, whom, kill, before),
            Call::FreeUnproven { pid } => self.free_unproven(member, pid, out),
            Call::Bye => {
                self.leave(member, out);
                Ok(Answer::Done.into())
            }
            // The server's own business, or a call that is newer than this release.
            _ => Err(Refusal::invalid("this broker does not know the request")),
        }
    }

    /// Returns the answer to a repeated request that was already carried out. A member that lost its connection, or
    /// whose broker was restarted, repeats its last request and those that wait, each under its number. If only the
    /// answer was lost, a second execution would commit twice or grant a lease that the member never learns of.
    ///
    /// Leases and claims are found by the request that created them, other answers are kept until the member's next
    /// request. Requests that were refused are simply executed again: they changed nothing.
    fn outcome_of_repeated(&self, member: MemberId, request: RequestId, call: &Call) -> Option<Granted> {
        let record = self.people.member(member)?;
        if record.waits.contains_key(&request) {
            return Some(Answer::Pending.into());
        }
        if let Some((_, answer)) = record.answered.as_ref().filter(|(answered, _)| *answered == request) {
            return Some(answer.clone().into());
        }
        let made = |lease: &&LeaseId| self.names.leases().get(lease).is_some_and(|l| l.origin == request);
        match call {
            Call::Commit(_) => self.names.committed_by(*record.version_leases.iter().find(made)?),
            Call::Open(_) | Call::OpenOrBuild { .. } | Call::OpenAttached { .. } => {
                if let Some(id) = record.version_leases.iter().find(made) {
                    return self.names.opened(*id);
                }
                let made = |id: &&ClaimId| self.names.claims().get(id).is_some_and(|c| c.origin == request);
                record.claims.iter().find(made).map(|id| Answer::Build { claim: *id }.into())
            }
            Call::OpenTimeline { .. } | Call::OpenSemaphore { .. } => {
                self.objects.opened(self.objects.lease_of(&record.object_leases, request)?)
            }
            _ => None,
        }
    }

    fn stop(&mut self, member: MemberId, force: bool, before: &mut Effects, out: &mut Effects) -> Decision {
        self.people.check_owner(member, self.people.bounds().user, || OtherUsers::Stop)?;
        let names =
            self.people.totals().names + (self.objects.timelines().len() + self.objects.semaphores().len()) as u64;
        let members = self.people.others(member);
        if !force && (names > 0 || members > 0) {
            return Err(Refusal::InUse { names, members });
        }
        before.push(Effect::RemoveSocket);
        out.push(Effect::Stop);
        Ok(Answer::Done.into())
    }
}
