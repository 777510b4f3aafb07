//! Renewal of a lost connection, unless the broker is gone; and the good-bye, which may need one.
//!
//! Only three observations prove that the broker is gone: no process listens at its socket, another broker answers
//! there, or a process of another protocol does. A broker that does not answer may be stopped, and continues with all its
//! members. A time-out therefore fails calls and proves nothing: a process that ended the waits for its timelines after
//! one would end those of all other processes too.

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use partywall_os::{Errno, lock::IgnorePoison, socket};
use partywall_wire::Call;

use super::{
    super::connect::{self, Greeted, Role},
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

    /// Tries once to connect again as the same member. Returns `Err(None)` if nothing is proved, and another attempt may
    /// succeed.
    fn try_renew(&self) -> Result<Greeted, Option<NoBroker>> {
        let gone = Some(NoBroker { gone: true });
        let mut is_ours = false;
        let greeted = match connect::open(&self.location) {
            Ok(call) => {
                is_ours = self.is_our_broker(&call);
                connect::greet(call, self.socket_path(), Role::Resumed(self.resume.clone()))
            }
            Err(_) if self.nobody_listens() => return Err(gone),
            Err(error) => Err(error),
        };
        match greeted {
            Ok(greeted) if greeted.welcome.instance == self.resume.instance && greeted.welcome.resumed => Ok(greeted),
            // Another broker.
            Ok(_) | Err(Error::Unreachable(Unreachable::Version { .. })) => Err(gone),
            // Another broker, or this broker has dropped this member. In the latter case it still ends the waits of other
            // members.
            Err(Error::Unreachable(Unreachable::Refused(_))) => Err(Some(NoBroker { gone: !is_ours })),
            Err(_) => Err(None),
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

    /// Makes a call whose outcome no thread needs: now, or behind the first answer on a renewed connection. For jobs of the
    /// worker that renews the connection. An ordinary call would wait for the renewal, which is a later job, and this must
    /// not wait for a request that is repeated either. A call beyond `most` pending ones is dropped.
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

    /// Uses the renewed connection. The broker has forgotten all waits. Returns false if a thread does not release the old
    /// connection.
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

    /// Returns whether it is certain that no process listens where the broker did.
    fn nobody_listens(&self) -> bool {
        let connected = socket::connect_within(self.socket_path(), RETRY);
        matches!(connected, Err(Errno::NOENT | Errno::NOTDIR | Errno::CONNREFUSED))
    }

    /// Returns whether a connection leads to the broker of this one; false if it cannot be identified.
    fn is_our_broker(&self, call: &OwnedFd) -> bool {
        self.broker.is_some() && socket::peer(call).is_ok_and(|peer| peer.pid == self.broker)
    }
}

#[cfg(test)]
mod tests {
    use partywall_harness::World;

    use super::{super::Repeating, *};
    use crate::Domain;

    /// The worker that makes such calls also renews the connection, for which the repeated request waits.
    #[test]
    fn later_call_does_not_wait_for_a_request_that_is_repeated() {
        let world = World::new();
        let domain = Domain::options().socket(world.socket()).start(false).connect().unwrap();
        let link = domain.link();
        let owed = || link.turn(true).unwrap().calls().owed().len();

        let repeating = Repeating::begin(link);
        link.call_later(Call::Release { lease: 1 }, 1);
        assert_eq!(owed(), 1);
        drop(repeating);
        domain.ping().unwrap();
        assert_eq!(owed(), 0);
    }
}
