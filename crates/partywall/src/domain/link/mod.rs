//! The connection of one process to one broker.
//!
//! The calling thread itself writes a call to the *call* socket and reads the answer, one call at a time. No other
//! thread is woken, so a round trip costs only the kernel's time. Calls never wait in the broker: a call that has to
//! wait is answered with `Pending`, and its completion arrives on the *events* socket, which the service thread reads.
//!
//! | file | contains |
//! |---|---|
//! | this one | calls, one at a time |
//! | `socket` | one request and its reply |
//! | `waits` | calls that wait for a completion; `waits::pending` those of futures |
//! | `stale` | leases that allow no new views |
//! | `holders` | who holds most of what fills a limit |
//! | `renewal` | the renewal of a lost connection |

mod renewal;
mod socket;
mod stale;
mod waits;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use partywall_os::{lock::IgnorePoison, process::fork_generation};
use partywall_shm::MAX_SLEEP;
use partywall_wire::{Answer, Call, LeaseId, Notice, Refusal, Request, RequestId, Resume, Staleness, frame};

pub(crate) use self::stale::{device_lost, withdrawn};
#[cfg(feature = "tokio")]
pub(crate) use self::waits::PendingCall;
pub(super) use self::{renewal::NoBroker, socket::giving_back, waits::Delivery};
use self::{
    socket::{CallSocket, NoReply},
    stale::StaleLeases,
    waits::PendingCalls,
};
use super::{connect::Greeted, locate::Location, unexpected};
use crate::{
    error::{Error, Result, Unreachable},
    wait::Wait,
};

/// How long a broker may take to answer a call. It answers within microseconds, unless it is stopped.
const TIMEOUT: Duration = Duration::from_secs(10);

/// After one timeout, later calls use this shorter one, so that dropping a hundred segments does not wait a hundred
/// times as long. Any answer restores the full time.
const SHORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum number of grants that wait to be given back. Only a broker that grants without requests reaches it.
pub(super) const MAX_OWED: usize = 4096;

/// An answer and the file descriptors that came with it.
pub(crate) type Answered = (Answer, Vec<OwnedFd>);

/// An answer or a refusal, and the file descriptors that came with it.
type CallOutcome = (Result<Answer, Refusal>, Vec<OwnedFd>);

/// The result of a request.
struct Asked {
    outcome: CallOutcome,
    /// Whether the connection was lost before the answer came, so that this is the answer to a repeated request.
    twice: bool,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Link {
    location: Location,
    resume: Resume,
    /// This process's row in the memory of all members, which also identifies it in semaphores.
    row: u16,
    /// The user of this process, by the broker's number.
    uid: u32,
    owner: u32,
    /// The owner's [`fork_generation`].
    generation: u64,
    max_message: usize,
    /// The queue for `calls`. Separate from `calls`, because a `Mutex` has no lock with a timeout.
    queue: Mutex<CallQueue>,
    freed: Condvar,
    /// Locked only by the thread that has the turn, so it never waits.
    calls: Mutex<CallSocket>,
    waits: PendingCalls,
    stale: StaleLeases,
    leaving: AtomicBool,
}

#[derive(Debug, Default)]
struct CallQueue {
    in_use: bool,
    /// Number of threads that wait for their turn. A needless wake would cost a system call.
    waiting: usize,
    /// Whether a request has to be sent again before any other: the broker knows the answer to the last request only.
    repeating: bool,
    /// Requests that were lost with a connection, and whose callers have stopped waiting for the next one.
    given_up: Vec<RequestId>,
}

/// Keeps other requests of this process behind one that has to be sent again.
struct Repeating<'a>(&'a Link);

/// The use of the call socket, by one thread at a time.
struct CallTurn<'a> {
    link: &'a Link,
    /// An option, because `drop` has to unlock it before it ends the turn.
    calls: Option<MutexGuard<'a, CallSocket>>,
}

impl Link {
    /// Returns a connection, and for its service thread the events socket and the memory of the members' rows.
    pub(super) fn new(location: Location, instance: u64, greeted: Greeted) -> (Self, OwnedFd, OwnedFd) {
        let Greeted { call, events, members, welcome, .. } = greeted;
        let resume = Resume { instance, member: welcome.member, token: welcome.token };
        let link = Self {
            location,
            resume,
            row: welcome.row,
            uid: welcome.uid,
            owner: std::process::id(),
            generation: fork_generation(),
            max_message: welcome.max_message as usize,
            queue: Mutex::default(),
            freed: Condvar::new(),
            calls: Mutex::new(CallSocket::new(call)),
            waits: PendingCalls::default(),
            stale: StaleLeases::default(),
            leaving: AtomicBool::new(false),
        };
        (link, events, members)
    }

    /// Checks that this is the process that connected. In a forked child, a lock may be held by a thread that does not
    /// exist there.
    pub(crate) fn require_ours(&self) -> Result<()> {
        if self.generation == fork_generation() {
            return Ok(());
        }
        Err(Unreachable::Forked { parent: self.owner }.into())
    }

    /// Checks that the broker is not gone for good, as far as is known.
    pub(crate) fn require_broker(&self) -> Result<()> {
        if self.waits.is_gone() { Err(self.gone()) } else { Ok(()) }
    }

    /// Records that versions which this process has open are stale.
    pub(super) fn set_stale(&self, leases: Vec<(LeaseId, Staleness)>) {
        self.stale.add(leases);
    }

    /// Refuses another view of the version `name` that a lease is on, if it is stale.
    #[inline]
    pub(crate) fn check_lease(&self, lease: LeaseId, name: &str) -> Result<()> {
        self.stale.check(lease, name)
    }

    /// Waits until the version that a lease is on is withdrawn. Returns the notice, if it has a deadline.
    pub(crate) fn wait_withdrawn(&self, lease: LeaseId, name: &str, wait: Wait<'_>) -> Result<Option<Notice>> {
        let waiting = wait.begin();
        match self.call_waiting(|| Call::AwaitWithdrawal { lease }, &waiting)? {
            Some((Answer::Withdrawn { notice }, _)) => Ok(notice),
            Some((other, _)) => Err(unexpected(&other)),
            None => Err(waiting.error(format!("{name:?} was not withdrawn"))),
        }
    }

    /// This process's row in the memory of all members, which also identifies it in semaphores.
    pub(crate) fn row(&self) -> u16 {
        self.row
    }

    /// Returns the user of this process by the broker's number.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns this process's number in the domain.
    pub(super) fn member(&self) -> u64 {
        self.resume.member.0
    }

    pub(crate) fn socket_path(&self) -> &Path {
        &self.location.socket
    }

    /// Makes a call and returns the answer.
    pub(crate) fn call(&self, call: Call) -> Result<Answer> {
        Ok(self.call_with(call, &[])?.0)
    }

    /// Makes a call that sends and receives file descriptors.
    pub(crate) fn call_with(&self, call: Call, fds: &[BorrowedFd<'_>]) -> Result<Answered> {
        let gives_back = matches!(
            call,
            Call::Release { .. } | Call::LeaveName { .. } | Call::AbandonBuild { .. } | Call::DetachSegment { .. }
        );
        if let Call::Release { lease } | Call::LeaveName { lease } = call {
            self.stale.forget(lease);
        }
        let Asked { outcome, twice } = self.ask(None, call, fds, |_| ())?;
        let is_gone = matches!(outcome, (Err(Refusal::Stale { .. } | Refusal::NotAttached { .. }), _));
        if gives_back && twice && is_gone {
            return Ok((Answer::Done, Vec::new()));
        }
        self.accept(outcome)
    }

    /// Returns whether the connection is being closed.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Sends a request, and sends it again as often as the connection is lost before the answer comes: the broker may
    /// be restarted meanwhile. For a repeated number the broker answers with the first result, and does not perform the
    /// call twice. `before` is called with the number before each request.
    ///
    /// `again` is the number of an earlier request that is repeated on a renewed connection.
    fn ask(
        &self,
        again: Option<RequestId>,
        call: Call,
        fds: &[BorrowedFd<'_>],
        mut before: impl FnMut(RequestId),
    ) -> Result<Asked> {
        let mut turn = self.connected_turn(false)?;
        let id = again.unwrap_or_else(|| turn.calls().next_id());
        let message = self.encode(id, call, fds.len())?;
        let mut lost = None;
        let mut repeating = None;
        loop {
            before(id);
            if let Some(outcome) = self.exchange(&mut turn, id, &message, fds)? {
                return Ok(Asked { outcome, twice: lost.is_some() });
            }
            if lost.get_or_insert_with(Instant::now).elapsed() >= TIMEOUT {
                self.give_up(id);
                return Err(self.unreachable("it was restarted again and again"));
            }
            // While this thread still has the turn.
            repeating.get_or_insert_with(|| Repeating::begin(self));
            drop(turn);
            turn = self.connected_turn(true).inspect_err(|_| self.give_up(id))?;
        }
    }

    /// Has the next connection give back what a lost request may have been granted.
    fn give_up(&self, id: RequestId) {
        let mut queue = self.queue.lock().ignore_poison();
        if queue.given_up.len() < MAX_OWED {
            queue.given_up.push(id);
        }
    }

    /// Sends a request once. Returns `None` if the connection is lost.
    fn ask_once(&self, turn: &mut CallTurn<'_>, call: Call) -> Result<Option<CallOutcome>> {
        let id = turn.calls().next_id();
        let message = self.encode(id, call, 0)?;
        self.exchange(turn, id, &message, &[])
    }

    /// Turns a refusal into an error.
    fn accept(&self, (outcome, fds): CallOutcome) -> Result<Answered> {
        match outcome {
            Ok(answer) => Ok((answer, fds)),
            Err(refusal) => Err(Error::refused(refusal, self.socket_path())),
        }
    }

    fn encode(&self, id: RequestId, call: Call, fds: usize) -> Result<Vec<u8>> {
        frame::encode(&Request { id, call }, fds, self.max_message)
            .map_err(|error| Error::Unreachable(Unreachable::Refused(error.to_string())))
    }

    /// Sends a request and waits for its answer. `None` if the connection is lost: the service thread renews it.
    fn exchange(
        &self,
        turn: &mut CallTurn<'_>,
        id: RequestId,
        message: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Option<CallOutcome>> {
        let calls = turn.calls();
        match calls.exchange(message, id, fds) {
            Ok((reply, fds)) => {
                self.return_owed(calls);
                Ok(Some((reply.outcome, fds)))
            }
            Err(NoReply::Ended) => {
                calls.close();
                Ok(None)
            }
            Err(NoReply::Silent) => Err(self.unreachable("it did not answer a call in time; is it stopped?")),
            Err(NoReply::InFlight) => Err(Error::descriptors_in_flight()),
            Err(NoReply::Malformed(why)) => {
                calls.close();
                Err(Unreachable::protocol(why))
            }
        }
    }

    /// Makes the calls whose outcomes no thread needs.
    fn return_owed(&self, calls: &mut CallSocket) {
        let given_up = std::mem::take(&mut self.queue.lock().ignore_poison().given_up);
        calls.owed().extend(given_up.into_iter().map(|request| Call::GiveUp { request }));
        while let Some(call) = calls.owed().pop() {
            let id = calls.next_id();
            let Ok(message) = self.encode(id, call.clone(), 0) else { continue };
            match calls.exchange(&message, id, &[]) {
                Ok((reply, _)) => tracing::debug!(?call, outcome = ?reply.outcome, "made a call for no waiter"),
                Err(_) => {
                    // Tried again after the next answer.
                    calls.owed().push(call);
                    return;
                }
            }
        }
    }

    /// Waits for a turn to use the call socket, behind a request that has to be repeated unless `is_first` is set.
    fn turn(&self, is_first: bool) -> Result<CallTurn<'_>> {
        self.require_ours()?;
        let mut queue = self.queue.lock().ignore_poison();
        let must_wait = |queue: &CallQueue| queue.in_use || queue.repeating && !is_first;
        if must_wait(&queue) {
            queue.waiting += 1;
            queue = self.freed.wait_timeout_while(queue, TIMEOUT, |queue| must_wait(queue)).ignore_poison().0;
            queue.waiting -= 1;
            if must_wait(&queue) {
                return Err(self.unreachable("other calls of this process have been waiting for it for too long"));
            }
        }
        queue.in_use = true;
        drop(queue);
        Ok(CallTurn { link: self, calls: Some(self.calls.lock().ignore_poison()) })
    }

    /// Waits for a turn to use a connected call socket, even while the connection is being renewed.
    fn connected_turn(&self, is_first: bool) -> Result<CallTurn<'_>> {
        let mut deadline = None;
        loop {
            let mut turn = self.turn(is_first)?;
            let calls = turn.calls();
            if calls.is_connected() {
                return Ok(turn);
            }
            if self.is_leaving() {
                // The connection is not renewed any more. Leaving has given everything back.
                return Err(self.gone());
            }
            let timeout = calls.timeout();
            if Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + timeout) {
                calls.set_silent();
                return Err(self.unreachable("the connection was lost and could not be renewed yet; is it stopped?"));
            }
            drop(turn);
            self.require_broker()?;
            self.waits.sleep(MAX_SLEEP);
        }
    }

    fn unreachable(&self, why: &str) -> Error {
        Error::Unreachable(Unreachable::NoAnswer { socket: self.location.socket.clone(), why: why.into() })
    }

    fn gone(&self) -> Error {
        Error::Unreachable(Unreachable::Gone { socket: self.location.socket.clone() })
    }
}

impl CallTurn<'_> {
    fn calls(&mut self) -> &mut CallSocket {
        // Only `drop` takes the socket.
        self.calls.as_mut().expect("a turn has the calls until it ends")
    }
}

impl Drop for CallTurn<'_> {
    fn drop(&mut self) {
        self.calls = None;
        let mut queue = self.link.queue.lock().ignore_poison();
        queue.in_use = false;
        let waiting = queue.waiting > 0;
        let repeating = queue.repeating;
        drop(queue);
        if waiting && repeating {
            // Only one of them may have the next turn.
            self.link.freed.notify_all();
        } else if waiting {
            self.link.freed.notify_one();
        }
    }
}

impl<'a> Repeating<'a> {
    fn begin(link: &'a Link) -> Self {
        link.queue.lock().ignore_poison().repeating = true;
        Self(link)
    }
}

impl Drop for Repeating<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().ignore_poison().repeating = false;
        self.0.freed.notify_all();
    }
}
