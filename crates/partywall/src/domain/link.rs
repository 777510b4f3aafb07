//! The connection of one process to one broker: calls and their answers, waits and their verdicts.
//!
//! A call is written and answered on the *call* socket by the calling thread itself, one at a time: no other thread
//! is woken, so a round trip costs what the kernel takes. Calls never wait in the broker. What has to wait is
//! answered with `Pending`, and the verdict arrives on the *events* socket, which the service thread reads.

use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    process::fork_generation,
    socket::{self, Ready},
};
use partywall_shm::MAX_SLEEP;
use partywall_wire::{Answer, Call, Refusal, Reply, Request, Resume, WireError, frame};

use super::{
    connect::{self, Greeted},
    inbox::Inbox,
    locate::Location,
};
use crate::{
    adaptive_spin::AdaptiveSpin,
    error::{Error, Result, Unreachable},
    wait::{Wait, Waiting},
};

/// How long a broker may take to answer a call. It answers within microseconds, unless it is stopped.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long it may take for the next one, once it has not answered in time: whoever drops a hundred segments is not to
/// wait a hundred times as long. It has its full time again when it has answered anything.
const SHORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Grants that wait to be given back. Only a broker that grants what nobody asked for comes near.
const MAX_OWED: usize = 4096;

/// An answer and the file descriptors that came with it.
pub(crate) type Answered = (Answer, Vec<OwnedFd>);

/// An answer or a refusal, and the file descriptors that came with it.
type Outcome = (Result<Answer, Refusal>, Vec<OwnedFd>);

/// What the service thread brings to a waiting caller.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The end of the wait.
    Ended(Box<Result<Answer, Refusal>>, Vec<OwnedFd>),
    /// The connection was renewed, and the broker has forgotten the wait: ask again.
    AskAgain,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) location: Location,
    pub(super) resume: Resume,
    /// Our row in the memory of all members, and our mark in semaphores.
    row: u16,
    /// The broker's pid, as far as it can be told.
    broker: Option<u32>,
    owner: u32,
    /// The owner's [`fork_generation`].
    generation: u64,
    max_message: usize,
    /// Who uses `calls`. Apart from them, because nobody waits for a `Mutex` with a time limit.
    queue: Mutex<Queue>,
    freed: Condvar,
    /// Locked only by whoever has the turn, and so without waiting.
    calls: Mutex<Calls>,
    waits: Mutex<Waits>,
    changed: Condvar,
    leaving: AtomicBool,
}

#[derive(Debug)]
struct Calls {
    /// Absent while the connection is lost.
    socket: Option<OwnedFd>,
    inbox: Inbox,
    spin: AdaptiveSpin,
    next: u64,
    /// A call was not answered in time, and nothing has come since.
    silent: bool,
    /// Calls that gave up waiting for their answers.
    unanswered: Vec<u64>,
    /// What gives back grants that came when nobody waited for them any more.
    owed: Vec<Call>,
}

#[derive(Debug, Default)]
struct Queue {
    in_use: bool,
    /// Threads that wait for their turn. Waking nobody would cost a system call.
    waiting: usize,
}

/// The use of [`Calls`], by one thread at a time.
struct Turn<'a> {
    link: &'a Link,
    /// An option, because it ends before the turn does, and fields are dropped only after `drop`.
    calls: Option<MutexGuard<'a, Calls>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.calls = None;
        let mut queue = lock(&self.link.queue);
        queue.in_use = false;
        let waiting = queue.waiting > 0;
        drop(queue);
        if waiting {
            self.link.freed.notify_one();
        }
    }
}

#[derive(Debug, Default)]
struct Waits {
    /// Callers that wait, and their verdicts once they are there.
    tickets: HashMap<u64, Option<Verdict>>,
    /// The broker is gone for good.
    gone: bool,
}

impl Link {
    /// A connection, and what its service thread needs of it: the events socket and the memory of the members' rows.
    pub(super) fn new(location: Location, greeted: Greeted) -> (Self, OwnedFd, OwnedFd) {
        let Greeted { call, events, members, welcome } = greeted;
        let resume = Resume { instance: welcome.instance, member: welcome.member, token: welcome.token };
        let broker = socket::peer(&call).ok().and_then(|peer| peer.pid);
        let link = Self {
            location,
            resume,
            row: welcome.row,
            broker,
            owner: std::process::id(),
            generation: fork_generation(),
            max_message: welcome.max_message as usize,
            queue: Mutex::default(),
            freed: Condvar::new(),
            calls: Mutex::new(Calls::new(call)),
            waits: Mutex::default(),
            changed: Condvar::new(),
            leaving: AtomicBool::new(false),
        };
        (link, events, members)
    }

    /// That this is the process that connected, and not a forked child of it, where a lock may be held by nobody who is
    /// still there.
    pub(crate) fn require_ours(&self) -> Result<()> {
        if self.generation == fork_generation() {
            Ok(())
        } else {
            Err(Error::Unreachable(Unreachable::Forked { parent: self.owner }))
        }
    }

    /// That the broker is not gone for good, as far as is known.
    pub(crate) fn require_broker(&self) -> Result<()> {
        if lock(&self.waits).gone { Err(self.gone()) } else { Ok(()) }
    }

    /// Our row in the memory of all members, and our mark in semaphores.
    pub(crate) fn row(&self) -> u16 {
        self.row
    }

    /// Whether the one who listens now is the broker that we had. Where that cannot be told it is not.
    pub(super) fn is_our_broker(&self) -> bool {
        let listening = connect::open(&self.location)
            .and_then(|call| socket::peer(&call).map_err(|errno| Error::system("asking who the broker is", errno)));
        self.broker.is_some() && listening.is_ok_and(|peer| peer.pid == self.broker)
    }

    pub(crate) fn socket_path(&self) -> &Path {
        &self.location.socket
    }

    /// Asks, and returns the answer.
    pub(crate) fn call(&self, call: Call) -> Result<Answer> {
        Ok(self.call_with(call, &[])?.0)
    }

    /// Asks, sending and receiving file descriptors.
    pub(crate) fn call_with(&self, call: Call, fds: &[BorrowedFd<'_>]) -> Result<Answered> {
        let gives_back = matches!(call, Call::Release { .. } | Call::LeaveName { .. } | Call::AbandonBuild { .. });
        let mut turn = self.connected_turn()?;
        let id = turn.calls().next_id();
        let message = self.encode(id, call, fds.len())?;
        let mut outcome = self.exchange(&mut turn, id, &message, fds)?;
        if outcome.is_none() {
            // The connection was lost before the answer came. Asked again under its number, the broker answers what
            // came of it, and does not do it twice.
            drop(turn);
            turn = self.connected_turn()?;
            outcome = self.exchange(&mut turn, id, &message, fds)?;
            if gives_back && matches!(outcome, Some((Err(Refusal::Stale { .. }), _))) {
                return Ok((Answer::Done, Vec::new()));
            }
        }
        drop(turn);
        self.accept(outcome.ok_or_else(|| self.gone())?)
    }

    /// Turns a refusal into an error.
    fn accept(&self, (outcome, fds): Outcome) -> Result<Answered> {
        match outcome {
            Ok(answer) => Ok((answer, fds)),
            Err(refusal) => Err(Error::refused(refusal, self.socket_path())),
        }
    }

    /// Says good-bye. The connection ends, and is not renewed: if it is lost already, there is nobody to say it to.
    pub(super) fn leave(&self) -> Result<()> {
        self.leaving.store(true, Ordering::Relaxed);
        let mut turn = self.turn()?;
        let id = turn.calls().next_id();
        let message = self.encode(id, Call::Bye, 0)?;
        match self.exchange(&mut turn, id, &message, &[])? {
            Some(outcome) => self.accept(outcome).map(drop),
            None => Err(self.gone()),
        }
    }

    /// Whether the end of the connection is wanted.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Asks for something that may have to wait; `None` once the wait is over. `call` makes the request anew where it has
    /// to be asked again.
    pub(crate) fn call_waiting(&self, call: impl Fn() -> Call, waiting: &Waiting<'_>) -> Result<Option<Answered>> {
        loop {
            let mut turn = self.connected_turn()?;
            let id = turn.calls().next_id();
            let message = self.encode(id, call(), 0)?;
            // Registered before the question, so that a verdict cannot overtake it.
            lock(&self.waits).tickets.insert(id, None);
            let mut outcome = self.exchange(&mut turn, id, &message, &[]);
            drop(turn);
            if matches!(outcome, Ok(None)) {
                // As in `call_with`.
                outcome = self.connected_turn().and_then(|mut turn| {
                    lock(&self.waits).tickets.insert(id, None);
                    self.exchange(&mut turn, id, &message, &[])
                });
            }
            if !matches!(outcome, Ok(Some((Ok(Answer::Pending), _)))) {
                lock(&self.waits).tickets.remove(&id);
                return self.accept(outcome?.ok_or_else(|| self.gone())?).map(Some);
            }
            match self.await_verdict(id, waiting)? {
                Some(Verdict::Ended(outcome, fds)) => return self.accept((*outcome, fds)).map(Some),
                Some(Verdict::AskAgain) => {}
                None => return Ok(None),
            }
        }
    }

    fn await_verdict(&self, id: u64, waiting: &Waiting<'_>) -> Result<Option<Verdict>> {
        if let Some(verdict) = self.verdict_within(id, waiting)? {
            return Ok(Some(verdict));
        }
        let cancelled = self.connected_turn().and_then(|mut turn| {
            let cancel = turn.calls().next_id();
            let message = self.encode(cancel, Call::Cancel { ticket: id }, 0)?;
            self.exchange(&mut turn, cancel, &message, &[])
        });
        let verdict = match cancelled {
            // The verdict was sent before we took the question back: it is ours, with the lease that it carries.
            Ok(Some((Err(Refusal::Stale { .. }), _))) => self.verdict_within(id, &Wait::from(TIMEOUT).begin())?,
            // With the connection the broker has forgotten the question.
            Ok(None) => None,
            Ok(Some(outcome)) => self.accept(outcome).map(|_| None)?,
            Err(error) => {
                lock(&self.waits).tickets.remove(&id);
                return Err(error);
            }
        };
        // Whatever comes from now on is given back by the service thread.
        let late = lock(&self.waits).tickets.remove(&id).flatten();
        Ok(verdict.or(late.filter(|verdict| matches!(verdict, Verdict::Ended(..)))))
    }

    fn verdict_within(&self, id: u64, waiting: &Waiting<'_>) -> Result<Option<Verdict>> {
        loop {
            // Not under the lock: this may ask the caller whether the wait is cancelled.
            let left = waiting.left(Instant::now());
            let mut waits = lock(&self.waits);
            if waits.tickets.get(&id).is_some_and(Option::is_some) {
                return Ok(waits.tickets.remove(&id).flatten());
            }
            if waits.gone {
                waits.tickets.remove(&id);
                return Err(self.gone());
            }
            let Some(left) = left else { return Ok(None) };
            drop(self.changed.wait_timeout(waits, left.min(MAX_SLEEP)));
        }
    }

    fn encode(&self, id: u64, call: Call, fds: usize) -> Result<Vec<u8>> {
        frame::encode(&Request { id, call }, fds, self.max_message).map_err(too_large)
    }

    /// Sends a request and waits for its answer. `None` if the connection is lost: the service thread renews it.
    fn exchange(
        &self,
        turn: &mut Turn<'_>,
        id: u64,
        message: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Option<Outcome>> {
        let calls = turn.calls();
        match calls.exchange(message, id, fds) {
            Ok((reply, fds)) => {
                self.pay(calls);
                Ok(Some((reply.outcome, fds)))
            }
            Err(Lost::Ended) => {
                // Closing it lets the broker and the service thread notice, if they have not yet.
                calls.socket = None;
                Ok(None)
            }
            Err(Lost::Silent) => Err(self.unreachable("it did not answer a call in time; is it stopped?")),
            Err(Lost::InFlight) => Err(Error::descriptors_in_flight()),
            Err(Lost::Malformed(why)) => {
                calls.socket = None;
                Err(Error::Unreachable(Unreachable::Protocol(why)))
            }
        }
    }

    /// Gives back what was granted too late.
    fn pay(&self, calls: &mut Calls) {
        while let Some(call) = calls.owed.pop() {
            let id = calls.next_id();
            let Ok(message) = self.encode(id, call.clone(), 0) else { continue };
            match calls.exchange(&message, id, &[]) {
                Ok((reply, _)) => tracing::debug!(?call, outcome = ?reply.outcome, "gave back a late grant"),
                Err(_) => {
                    // Once there is an answer again.
                    calls.owed.push(call);
                    return;
                }
            }
        }
    }

    /// The use of the call side, after those who came before.
    fn turn(&self) -> Result<Turn<'_>> {
        self.require_ours()?;
        let mut queue = lock(&self.queue);
        if queue.in_use {
            queue.waiting += 1;
            let waited = self.freed.wait_timeout_while(queue, TIMEOUT, |queue| queue.in_use);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            queue.waiting -= 1;
            if queue.in_use {
                return Err(self.unreachable("other calls of this process have been waiting for it for too long"));
            }
        }
        queue.in_use = true;
        drop(queue);
        Ok(Turn { link: self, calls: Some(lock(&self.calls)) })
    }

    /// The use of the call side of a connection that exists; waits for one that is being renewed.
    fn connected_turn(&self) -> Result<Turn<'_>> {
        let mut deadline = None;
        loop {
            let mut turn = self.turn()?;
            let calls = turn.calls();
            if calls.socket.is_some() {
                return Ok(turn);
            }
            if self.is_leaving() {
                // Nobody renews it any more; what was to be given back has gone back with the good-bye.
                return Err(self.gone());
            }
            let timeout = if calls.silent { SHORT_TIMEOUT } else { TIMEOUT };
            if Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + timeout) {
                calls.silent = true;
                return Err(self.unreachable("the connection was lost and could not be renewed yet; is it stopped?"));
            }
            drop(turn);
            let waits = lock(&self.waits);
            if waits.gone {
                return Err(self.gone());
            }
            drop(self.changed.wait_timeout(waits, Duration::from_millis(100)));
        }
    }

    fn unreachable(&self, why: &str) -> Error {
        Error::Unreachable(Unreachable::NoAnswer { socket: self.location.socket.clone(), why: why.into() })
    }

    fn gone(&self) -> Error {
        Error::Unreachable(Unreachable::Gone { socket: self.location.socket.clone() })
    }

    /// Hands a verdict to its waiter. A verdict that nobody waits for is returned: what it carries must be given back.
    pub(super) fn deliver(&self, ticket: u64, verdict: Verdict) -> Option<Verdict> {
        match lock(&self.waits).tickets.get_mut(&ticket) {
            Some(place) => *place = Some(verdict),
            None => return Some(verdict),
        }
        self.changed.notify_all();
        None
    }

    /// Gives back what a verdict granted to somebody who no longer waits. Not by an ordinary call: that would wait for
    /// the connection to be renewed, which comes after the caller among the background jobs.
    pub(super) fn give_back(&self, call: Call) {
        match self.turn() {
            Ok(mut turn) => {
                let calls = turn.calls();
                if calls.owed.len() < MAX_OWED {
                    calls.owed.push(call);
                }
                // A broker that says nothing gets it after its next answer.
                if calls.socket.is_some() && !calls.silent {
                    self.pay(calls);
                }
            }
            Err(error) => tracing::warn!(?call, %error, "a grant that nobody waited for is lost"),
        }
    }

    /// The connection is lost: calls wait until it is renewed.
    pub(super) fn lost(&self) {
        // Without a turn somebody is asking right now, and notices by itself.
        if let Ok(mut turn) = self.turn() {
            turn.calls().socket = None;
        }
    }

    /// The connection is renewed; the broker has forgotten all waits. `false` if somebody does not let go of the old
    /// one.
    pub(super) fn renewed(&self, call: OwnedFd) -> bool {
        let Ok(mut turn) = self.turn() else { return false };
        let calls = turn.calls();
        *calls = Calls { next: calls.next, owed: std::mem::take(&mut calls.owed), ..Calls::new(call) };
        for place in lock(&self.waits).tickets.values_mut().filter(|place| place.is_none()) {
            *place = Some(Verdict::AskAgain);
        }
        self.pay(calls);
        drop(turn);
        self.changed.notify_all();
        true
    }

    /// The broker is gone for good.
    pub(super) fn set_gone(&self) {
        lock(&self.waits).gone = true;
        self.lost();
        self.changed.notify_all();
    }
}

/// Why no reply came.
enum Lost {
    /// The connection ended.
    Ended,
    /// Nothing came in time. The connection can be used further, if no message was sent in part.
    Silent,
    /// The kernel lets nobody of this user send file descriptors. Nothing was sent, and the connection can be used further.
    InFlight,
    /// Nonsense came.
    Malformed(String),
}

impl Turn<'_> {
    fn calls(&mut self) -> &mut Calls {
        // Only `drop` takes it.
        self.calls.as_mut().expect("a turn has the calls until it ends")
    }
}

impl Calls {
    fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Some(socket),
            inbox: Inbox::new(),
            spin: AdaptiveSpin::on_socket(),
            next: 1,
            silent: false,
            unanswered: Vec::new(),
            owed: Vec::new(),
        }
    }

    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn exchange(&mut self, message: &[u8], id: u64, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), Lost> {
        let deadline = Instant::now() + if self.silent { SHORT_TIMEOUT } else { TIMEOUT };
        self.send(message, fds, deadline)?;
        let socket = self.socket.as_ref().ok_or(Lost::Ended)?.as_fd();
        loop {
            // Usually the socket's own time limit is enough, and spares us a call.
            let in_time = !self.silent || socket::wait(socket, Ready::Read, Some(deadline)) == Ok(true);
            match if in_time { self.inbox.read_soon(&self.spin, socket) } else { Err(Errno::AGAIN) } {
                Ok(true) => {}
                Err(Errno::AGAIN) => break,
                _ => return Err(Lost::Ended),
            }
            while let Some((frame, fds)) = self.inbox.next().map_err(Lost::Malformed)? {
                let reply: Reply = frame.decode().map_err(malformed)?;
                self.silent = false;
                if reply.id == id {
                    return Ok((reply, fds));
                }
                // The late answer to a call that gave up waiting; its file descriptors are closed here.
                let late = self.unanswered.iter().position(|asked| *asked == reply.id);
                let late = late.ok_or_else(|| Lost::Malformed("an answer to what was not asked".into()))?;
                self.unanswered.swap_remove(late);
                self.owed.extend(returning(reply));
            }
            // It has something to say for ever, but no answer.
            if Instant::now() >= deadline {
                break;
            }
        }
        self.silent = true;
        self.unanswered.push(id);
        Err(Lost::Silent)
    }

    /// Sends all of a message. If only a part of it goes, nothing can be sent after it: the connection ends.
    fn send(&mut self, message: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<(), Lost> {
        let socket = self.socket.as_ref().ok_or(Lost::Ended)?.as_fd();
        let (mut rest, mut fds): (&[u8], &[BorrowedFd<'_>]) = (message, fds);
        while !rest.is_empty() {
            let in_time = !self.silent || socket::wait(socket, Ready::Write, Some(deadline)) == Ok(true);
            match if in_time { connect::send(socket, rest, fds) } else { Err(Errno::AGAIN) } {
                Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
                Err(Errno::AGAIN) => {
                    self.silent = true;
                    if rest.len() < message.len() {
                        self.socket = None;
                    }
                    return Err(Lost::Silent);
                }
                Err(Errno::TOOMANYREFS) => return Err(Lost::InFlight),
                Err(_) => return Err(Lost::Ended),
            }
        }
        Ok(())
    }
}

/// What gives back what a reply grants that nobody waits for.
fn returning(reply: Reply) -> Option<Call> {
    match reply.outcome {
        Ok(Answer::Pending) => Some(Call::Cancel { ticket: reply.id }),
        Ok(answer) => giving_back(&answer),
        Err(_) => None,
    }
}

/// What gives back what an answer grants.
pub(super) fn giving_back(answer: &Answer) -> Option<Call> {
    match answer {
        Answer::Opened(opened) => Some(Call::Release { lease: opened.lease }),
        Answer::Committed { lease, .. } => Some(Call::Release { lease: *lease }),
        Answer::Build { claim } => Some(Call::AbandonBuild { claim: *claim }),
        Answer::Timeline(opened) => Some(Call::Release { lease: opened.lease }),
        Answer::Semaphore { lease, .. } => Some(Call::Release { lease: *lease }),
        _ => None,
    }
}

fn malformed(error: WireError) -> Lost {
    Lost::Malformed(error.to_string())
}

fn too_large(error: WireError) -> Error {
    Error::Unreachable(Unreachable::Refused(error.to_string()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done behind these locks: a thread that panicked while holding one did so between steps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
