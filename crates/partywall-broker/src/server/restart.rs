//! Continues what a former worker did, of this program or of another one.
//!
//! The next worker replays the journal and takes the descriptors that the journal names. All others are closed: before
//! anything is opened, those whose close never waits, because the table may be full; then sockets, on a thread of their
//! own; memory once members are served.
//!
//! Effects that the former worker may not have finished are carried out again. All members count as disconnected. Each
//! of them resumes when it notices that its connection has ended, and repeats the request that was not answered. The
//! registry answers a repeated request from its state. If the caller has stopped waiting meanwhile, the library sends
//! `GiveUp` instead. The former connections stay open until their other ends close, because the proof of a death needs
//! that.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{OwnedFd, RawFd},
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    fd::{FdKind, classify},
    supervision::LeftOpen,
};
use partywall_shm::crash::point;
use rustix::event::epoll::EventFlags;

use crate::{
    StartError,
    journal::Contents,
    page::lack,
    registry::{CloseId, Effect, Event, FdId, MemberId, Registry},
    server::{
        Server,
        connection::{Channel, Connection, ConnectionId},
        control::Clearing,
        in_flight::Process,
        membership::{MemberFiles, TO_RESUME},
        reactor::EventSource,
        supervised::{Record, State},
        timers::{Timer, now},
    },
};

/// What a former worker knew, and its descriptors.
#[derive(Debug)]
pub(super) struct Past {
    pub(super) state: State<Registry>,
    /// Effects that it may not have carried out.
    redo: Vec<Effect>,
    pub(super) rows: BTreeMap<u32, OwnedFd>,
    pub(super) fds: BTreeMap<FdId, OwnedFd>,
    /// The pidfd and the call sockets of each member.
    members: BTreeMap<MemberId, (Option<OwnedFd>, Vec<OwnedFd>)>,
    /// What belongs to nothing that the journal names.
    rest: Vec<OwnedFd>,
}

impl Past {
    /// Reads a journal, and takes the descriptors that it names.
    pub(super) fn read(contents: &Contents, mut left: LeftOpen) -> Result<Self, StartError> {
        let broken = |why: String| StartError::Journal { why };
        let unreadable = |error: postcard::Error| broken(error.to_string());
        let mut state = State::decode(contents.snapshot()).map_err(broken)?;
        let mut redo = Vec::new();
        for record in contents.records() {
            state.replay(record.map_err(unreadable)?, &mut redo);
        }
        let lost = |number: RawFd| broken(format!("descriptor {number}, which it names, is not open"));
        let rows = state.rows.iter().map(|(uid, number)| Ok((*uid, left.take(*number).ok_or_else(|| lost(*number))?)));
        let rows = rows.collect::<Result<_, _>>()?;
        let taken = state.fds.iter().map(|(id, number)| Ok((*id, left.take(*number).ok_or_else(|| lost(*number))?)));
        let fds = taken.collect::<Result<_, _>>()?;
        state.members.retain(|member, _| state.registry.people().has_process(*member));
        let files = state.members.iter().map(|(member, files)| {
            let pidfd = files.pidfd.and_then(|number| left.take(number));
            (*member, (pidfd, files.calls.iter().filter_map(|number| left.take(*number)).collect()))
        });
        let members = files.collect();
        let rest = left.take_rest();
        point("broker: former state read, rest still open");
        Ok(Self { redo, rows, fds, members, rest: close_at_once(rest), state })
    }
}

impl State<Registry> {
    /// Repeats what a record says. `redo` collects the effects of the events since the former worker was last done.
    fn replay(&mut self, record: Record<Event>, redo: &mut Vec<Effect>) {
        match record {
            Record::Event { at, begins, fds, event } => {
                if begins {
                    redo.clear();
                }
                for (id, number) in fds {
                    self.fds.insert(id, number);
                    self.last_fd = self.last_fd.max(id.0);
                }
                match &event {
                    Event::Died { member } => _ = self.members.remove(member),
                    Event::RowCleared { row } => {
                        self.clearing.retain(|step| !matches!(step, Clearing::Row { row: of, .. } if of == row));
                    }
                    _ => {}
                }
                let effects = self.registry.apply(event, at);
                effects.into_iter().for_each(|effect| self.repeat(effect, redo));
            }
            Record::Rows { uid, number } => _ = self.rows.insert(uid, number),
            Record::Joined(files) => {
                self.last_member = self.last_member.max(files.member.0);
                self.members.insert(files.member, files);
            }
            Record::Connected { member, call } => {
                if let Some(files) = self.members.get_mut(&member) {
                    files.calls.push(call);
                }
            }
            Record::Disconnected { member, call } => {
                if let Some(files) = self.members.get_mut(&member) {
                    files.calls.retain(|other| *other != call);
                }
            }
            Record::Exited { member } => {
                if let Some(files) = self.members.get_mut(&member) {
                    files.pidfd = None;
                }
            }
            Record::Detached => {
                let first = self.clearing.iter().position(|step| matches!(step, Clearing::Detach { .. }));
                first.map(|index| self.clearing.remove(index));
            }
            Record::Undone { at, value } => {
                let highest = self.undone.entry(at).or_default();
                *highest = value.max(*highest);
            }
        }
    }

    /// Repeats what an effect does to this state.
    fn repeat(&mut self, effect: Effect, redo: &mut Vec<Effect>) {
        match effect {
            Effect::Close(fds) => fds.iter().for_each(|fd| _ = self.fds.remove(fd)),
            Effect::Detach { object, row, ending } => self.clearing.push_back(Clearing::Detach { object, row, ending }),
            Effect::ClearRow { row, control } => self.clearing.push_back(Clearing::Row { row, tables: control }),
            Effect::Disconnect(member) => _ = self.members.remove(&member),
            Effect::StartCell { at, .. } => _ = self.undone.remove(&at),
            Effect::EndCell { .. }
            | Effect::Attach { .. }
            | Effect::Return { .. }
            | Effect::Kill(_)
            | Effect::RemoveSocket
            | Effect::Stop => redo.push(effect),
            // Members repeat their requests and waits. Timers and confirmations follow from the registry's state, and
            // all connections end.
            Effect::Reply { .. }
            | Effect::Notify { .. }
            | Effect::Confirm(_)
            | Effect::SettleCell(_)
            | Effect::HangUp(_)
            | Effect::Quarantined(_)
            | Effect::Audit(_)
            | Effect::AwaitDeadline { .. }
            | Effect::Stale { .. } => {}
        }
    }
}

/// What a former worker has left to do, once the server has its state.
#[derive(Debug)]
pub(super) struct Unfinished {
    redo: Vec<Effect>,
    clearing: VecDeque<Clearing>,
    members: Vec<(MemberFiles, Option<OwnedFd>, Vec<OwnedFd>)>,
    rest: Vec<OwnedFd>,
}

/// Released memory that a former worker has left open, and the closes that it had not confirmed.
#[derive(Debug)]
pub(super) struct Left {
    memory: Vec<OwnedFd>,
    unconfirmed: Vec<CloseId>,
}

impl Past {
    /// Separates the state that the server is made of from what is left to do.
    pub(super) fn split(mut self) -> (State<Registry>, BTreeMap<u32, OwnedFd>, BTreeMap<FdId, OwnedFd>, Unfinished) {
        let clearing = std::mem::take(&mut self.state.clearing);
        let of_members = std::mem::take(&mut self.state.members).into_values().map(|files| {
            let (pidfd, calls) = self.members.remove(&files.member).unwrap_or_default();
            (files, pidfd, calls)
        });
        let members = of_members.collect();
        let unfinished = Unfinished { redo: self.redo, clearing, members, rest: self.rest };
        (self.state, self.rows, self.fds, unfinished)
    }
}

impl Server {
    /// Continues where a former worker was killed. Returns what to close once members are served again: memory may take
    /// long to be freed.
    pub(super) fn resume_service(&mut self, unfinished: Unfinished) -> Left {
        let begun = Instant::now();
        let Unfinished { redo, clearing, members, rest } = unfinished;
        // Clients wait for the end of their sockets.
        let (memory, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(is_memory);
        self.store.discard(others);
        point("broker: rest closed but memory, members not restored");
        let number = members.len();
        for (files, pidfd, calls) in members {
            self.restore_member(&files, pidfd, calls);
        }
        self.control.set_clearing(clearing);
        for (queue, attachment) in self.registry.attachments() {
            // The former worker may have begun to detach it, for a request that its member repeats.
            self.control.attach(queue, attachment);
        }
        point("broker: members restored, effects not repeated");
        self.carry_out(redo);
        let left = Left { memory, unconfirmed: self.registry.unconfirmed() };
        for member in self.registry.people().in_quarantine() {
            self.await_end_of_quarantine(member);
        }
        for (id, until) in self.registry.deadlines() {
            self.reactor.set_timer(Duration::from_millis(until.saturating_sub(now())), Timer::Deadline(id));
        }
        if !self.guarding {
            let effects = self.guard_cells();
            self.carry_out(effects);
        }
        for member in self.registry.people().connected() {
            self.apply(Event::Suspected { member });
        }
        if let Some(supervised) = &mut self.supervised {
            if let Some((member, request)) = supervised.page.twice_fatal() {
                tracing::error!(
                    member,
                    request,
                    "two brokers died while they handled this request: it is refused from now on"
                );
                supervised.fatal = Some((MemberId(member), crate::registry::RequestId(request)));
            }
            let took = begun.elapsed();
            let lacks = supervised.page.take_lacks();
            if lacks > 0 {
                tracing::warn!(lacks, "workers lacked a process, a thread, memory or file descriptors before this one");
            }
            match supervised.page.take_handover() {
                None => {
                    let (restarts, death) = supervised.page.restarts();
                    let death = death.map_or_else(String::new, |death| death.to_string());
                    tracing::warn!(
                        restarts,
                        death,
                        members = number,
                        ?took,
                        "continuing after the death of the former worker"
                    );
                }
                Some(Ok(())) => tracing::info!(members = number, ?took, "continuing for another program"),
                Some(Err(Errno::CANCELED)) => {
                    tracing::error!(
                        "continuing again: the program that was to replace this one ended before it served"
                    );
                }
                Some(Err(errno)) => {
                    tracing::error!(%errno, "continuing: the program that was to replace this one was not executed");
                }
            }
        }
        left
    }

    /// Has the memory closed that a former worker had released.
    pub(super) fn close_left(&self, left: Left) {
        let Left { memory, unconfirmed } = left;
        self.store.discard(memory);
        unconfirmed.into_iter().for_each(|id| self.store.reclaimer().report(id));
    }

    /// Restores a member. Its connections have ended for the library, which sees that and resumes; they stay open here,
    /// because the end of a process is proved by their ends.
    fn restore_member(&mut self, files: &MemberFiles, pidfd: Option<OwnedFd>, calls: Vec<OwnedFd>) {
        let member = files.member;
        let mut held = Vec::new();
        for call in calls {
            let id = self.acceptor.next_id();
            let process = Process::new(files.who.process, Some(files.who.pid), files.who.uid);
            self.reactor
                .watch(&call, EventSource::Socket(Channel::Call, id), EventFlags::IN)
                .unwrap_or_else(|errno| lack(&StartError::errno("watch a connection of a member")(errno)));
            self.peers.connections.insert(id, self.lingering(id, call, process, member));
            held.push(id);
        }
        if let Some(pidfd) = &pidfd {
            self.reactor
                .watch(pidfd, EventSource::Exit(member), EventFlags::IN)
                .unwrap_or_else(|errno| lack(&StartError::errno("watch the process of a member")(errno)));
        }
        self.peers.members.restore(files, pidfd, held);
        self.reactor.set_timer(self.settle, Timer::Settle(member));
        self.reactor.set_timer(TO_RESUME + self.settle, Timer::Settle(member));
    }

    fn lingering(&self, id: ConnectionId, call: OwnedFd, process: Process, member: MemberId) -> Connection {
        let call = self.store.reclaimer().keep_socket(call);
        let mut connection = Connection::new(id, call, process);
        connection.linger(member, &mut Default::default());
        connection
    }
}

/// Closes those descriptors that belong to nothing the journal names and whose close never waits: locks of directories,
/// for which other processes wait, pipes, epoll instances and eventfds. What this worker has to open may need their
/// numbers.
///
/// Returns the others: sockets of clients that had not introduced themselves, events sockets, descriptors of requests
/// that were not decided, memory that was released. With a socket the kernel closes what was sent through it and not
/// read, which may be memory, and a client may have sent any file.
fn close_at_once(rest: Vec<OwnedFd>) -> Vec<OwnedFd> {
    let closes_at_once = |fd: &OwnedFd| match classify(fd) {
        Ok(FdKind::Other(what)) => AT_ONCE.contains(&&*what),
        _ => false,
    };
    rest.into_iter().filter(|fd| !closes_at_once(fd)).collect()
}

fn is_memory(fd: &OwnedFd) -> bool {
    matches!(classify(fd), Ok(FdKind::Memfd { .. } | FdKind::NvidiaControl))
}

/// What [`classify`] says of files whose close never waits.
const AT_ONCE: [&str; 4] = ["a directory", "a pipe", "anon_inode:[eventpoll]", "anon_inode:[eventfd]"];
