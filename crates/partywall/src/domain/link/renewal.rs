//! Renewal of a lost connection, unless the broker is gone; and the good-bye, which may need one.
//!
//! Only three observations prove that the broker is gone: no process listens at its socket, another broker answers
//! there, or a process of another protocol does. A broker that does not answer may be stopped, and continues with all
//! its members. A time-out therefore fails calls and proves nothing: a process that ended the waits for its timelines
//! after one would end those of all other processes too.
//!
//! A broker is told from another one by its number, which a refusal contains, too. Its pid would not do: it is not
//! visible in another PID namespace.

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use partywall_os::{lock::IgnorePoison, socket};
use partywall_wire::Call;

use super::{
    super::connect::{self, Greeted, Greeting, Role},
    Link,
};
use crate::error::{Error, Unreachable};

/// A broker that takes longer than this to renew a connection is probably stopped.
const RENEWAL: Duration = Duration::from_secs(10);

/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(20);

/// Pause between two attempts after [`RENEWAL`].
const LATE_RETRY: Duration = Duration::from_millis(250);

/// A connection cannot be renewed.
pub(in super::super) struct NoBroker {
    /// Whether the reason is that the broker is gone.
    pub(in super::super) gone: bool,
}

impl Link {
    /// Connects again as the same member, as often as necessary. Gives up without a proof when `stop` is set, or after
    /// [`RENEWAL`] when `ending` is set.
    pub(in super::super) fn renew(&self, stop: &AtomicBool, ending: &AtomicBool) -> Result<Greeted, NoBroker> {
        let deadline = Instant::now() + RENEWAL;
        loop {
            match self.try_renew() {
                Ok(greeted) => return Ok(greeted),
                Err(Some(no_broker)) => return Err(no_broker),
                Err(None) => {}
            }
            // The broker is alive, stopped, ending or being restarted.
            let is_late = Instant::now() >= deadline;
            if stop.load(Ordering::Acquire) || is_late && ending.load(Ordering::Acquire) {
                return Err(NoBroker { gone: false });
            }
            thread::sleep(if is_late { LATE_RETRY } else { RETRY });
        }
    }

    /// Tries once to connect again as the same member. Returns `Err(None)` if nothing is proved, and another attempt
    /// may succeed.
    fn try_renew(&self) -> Result<Greeted, Option<NoBroker>> {
        let gone = Some(NoBroker { gone: true });
        let answered = match connect::open(&self.location) {
            Ok(call) => connect::greet(call, self.socket_path(), Role::Resumed(self.resume.clone())),
            Err(_) if socket::nobody_listens(self.socket_path()) => return Err(gone),
            Err(error) => Err(error),
        };
        match answered {
            Ok(Greeting { instance, .. }) if instance != self.resume.instance => Err(gone),
            Err(Error::Unreachable(Unreachable::Version { .. })) => Err(gone),
            Ok(Greeting { outcome: Ok(greeted), .. }) if greeted.welcome.resumed => Ok(greeted),
            Ok(Greeting { outcome: Ok(_), .. }) => Err(gone),
            // This broker has dropped this member, and still ends the waits of other members.
            Ok(Greeting { outcome: Err(Error::Unreachable(Unreachable::Refused(_))), .. }) => {
                Err(Some(NoBroker { gone: false }))
            }
            Ok(_) | Err(_) => Err(None),
        }
    }

    /// Leaves the domain. A connection that is lost is renewed for that alone: without the good-bye, a broker that was
    /// restarted would keep the member until its process ends.
    pub(in super::super) fn leave(&self) -> Result<(), Error> {
        // Only before: the service thread may notice the loss at the same time, and then ends the remaining waits.
        self.require_broker()?;
        self.leaving.store(true, Ordering::Relaxed);
        let mut turn = self.turn(false)?;
        let deadline = Instant::now() + turn.calls().timeout();
        // The broker ends a connection whose events socket is closed, even before it has read the good-bye.
        let mut events = None;
        loop {
            if turn.calls().is_connected()
                && let Some(outcome) = self.ask_once(&mut turn, Call::Bye)?
            {
                drop(events);
                return self.accept(outcome).map(drop);
            }
            match self.try_renew() {
                Ok(greeted) => {
                    turn.calls().renew(greeted.call);
                    events = Some(greeted.events);
                }
                // An earlier good-bye has arrived, or there is nothing to leave.
                Err(Some(_)) => return Err(self.gone()),
                Err(None) if Instant::now() >= deadline => return Err(self.gone()),
                Err(None) => thread::sleep(RETRY),
            }
        }
    }

    /// Makes a call whose outcome no thread needs: now, or behind the first answer on a renewed connection. For jobs of
    /// the worker that renews the connection. An ordinary call would wait for the renewal, which is a later job, and
    /// this must not wait for a request that is repeated either. A call beyond `most` pending ones is dropped.
    pub(in super::super) fn call_later(&self, call: Call, most: usize) {
        if let Call::Release { lease } = call {
            self.stale.forget(lease);
        }
        match self.turn(true) {
            Ok(mut turn) => {
                let calls = turn.calls();
                if calls.owed().len() < most {
                    calls.owed().push(call);
                }
                // A silent broker gets the call after its next answer.
                if calls.is_connected() && !calls.is_silent() && !self.is_repeating() {
                    self.return_owed(calls);
                }
            }
            Err(error) => tracing::warn!(?call, %error, "a call is lost"),
        }
    }

    /// Notes that the connection is lost: calls wait until it is renewed.
    pub(in super::super) fn lost(&self) {
        // Without a turn, another thread is in a call and notices the loss by itself.
        if let Ok(mut turn) = self.turn(true) {
            turn.calls().close();
        }
    }

    /// Uses the renewed connection. The broker has forgotten all waits. Returns false if a thread does not release the
    /// old connection.
    pub(in super::super) fn renewed(&self, call: OwnedFd) -> bool {
        let Ok(mut turn) = self.turn(true) else { return false };
        let calls = turn.calls();
        calls.renew(call);
        self.waits.ask_again();
        // A request that has to be repeated comes first; its answer is followed by them.
        if !self.is_repeating() {
            self.return_owed(calls);
        }
        drop(turn);
        self.waits.wake();
        true
    }

    /// Notes that the broker is gone for good.
    pub(in super::super) fn set_gone(&self) {
        self.waits.set_gone();
        self.lost();
        self.waits.wake();
    }

    /// Returns whether a request has to be sent again before any other.
    fn is_repeating(&self) -> bool {
        self.queue.lock().ignore_poison().repeating
    }
}

#[cfg(test)]
mod tests {
    use partywall_harness::{World, wire::Framed};
    use partywall_shm::members::{self, Members};
    use partywall_wire::{
        BrokerHello, LeaseId, Limit, MemberId, Refusal, Token, Welcome,
        handshake::{self, Speaker},
    };

    use super::{super::Repeating, *};
    use crate::Domain;

    /// The pid of a broker says nothing: in another PID namespace, its members see none.
    // Holds 138.
    #[test]
    fn refusal_proves_that_the_broker_is_gone_only_if_another_one_refuses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("broker.sock");
        let listener = socket::listen(&path).unwrap();
        let answer = |instance, outcome, fds: &[&OwnedFd]| {
            socket::wait(&listener, socket::Ready::Read, None).unwrap();
            let mut call = Framed::new(socket::accept(&listener).unwrap().unwrap());
            call.receive().unwrap();
            if let [_, rows] = fds {
                Members::map(rows).unwrap().beat(0, members::now());
            }
            let hello = BrokerHello { instance, outcome };
            assert!(call.send(&handshake::encode(&Speaker::new("test"), &hello, fds.len()).unwrap(), fds));
            call
        };
        let (events, theirs) = socket::pair().unwrap();
        let welcome = Welcome {
            member: MemberId(1),
            row: 0,
            token: Token([0; 16]),
            uid: 0,
            resumed: false,
            max_message: 1 << 18,
        };
        let (domain, call) = thread::scope(|scope| {
            let domain = scope.spawn(|| Domain::options().socket(&path).start(false).connect().unwrap());
            let call = answer(1, Ok(welcome), &[&theirs, &Members::create(16).unwrap()]);
            (domain.join().unwrap(), call)
        });
        let full = || Refusal::Limit { limit: Limit::Fds, allowed: 7, needed: 8, holders: Vec::new() };
        let cases = [(1, Refusal::CannotResume, Some(false)), (1, full(), None), (2, full(), Some(true))];
        for (instance, refusal, gone) in cases.into_iter().chain([(2, Refusal::CannotResume, Some(true))]) {
            let found = thread::scope(|scope| {
                let renewed = scope.spawn(|| domain.link().try_renew());
                answer(instance, Err(refusal.clone()), &[]);
                renewed.join().unwrap().unwrap_err()
            });
            assert_eq!(found.map(|found| found.gone), gone, "{instance}: {refusal:?}");
        }
        // Nobody listens, so the domain does not wait for an answer to its good-bye.
        drop((listener, call, events));
    }

    /// The worker that makes such calls also renews the connection, for which the repeated request waits.
    #[test]
    fn later_call_does_not_wait_for_a_request_that_is_repeated() {
        let world = World::new();
        let domain = Domain::options().socket(world.socket()).start(false).connect().unwrap();
        let link = domain.link();
        let owed = || link.turn(true).unwrap().calls().owed().len();

        let repeating = Repeating::begin(link);
        link.call_later(Call::Release { lease: LeaseId(1) }, 1);
        assert_eq!(owed(), 1);
        drop(repeating);
        domain.ping().unwrap();
        assert_eq!(owed(), 0);
    }
}
