//! Renewal of a lost connection, unless the broker is gone.

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use partywall_os::socket;
use partywall_wire::Call;

use super::{
    super::connect::{self, Greeted, Role},
    Link, MAX_OWED,
};
use crate::error::{Error, Unreachable};

/// For how long a lost connection is renewed before the broker counts as gone.
const RENEWAL: Duration = Duration::from_secs(10);

/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(20);

/// A connection cannot be renewed.
pub(in super::super) struct NoBroker {
    /// Whether the reason is that the broker is gone.
    pub(in super::super) gone: bool,
}

impl Link {
    /// Connects again as the same member. Gives up when `stop` is set.
    pub(in super::super) fn renew(&self, stop: &AtomicBool) -> Result<Greeted, NoBroker> {
        let deadline = Instant::now() + RENEWAL;
        let gone = NoBroker { gone: true };
        loop {
            let greeted = connect::open(&self.location)
                .and_then(|call| connect::greet(call, self.socket_path(), Role::Resumed(self.resume.clone())));
            match greeted {
                Ok(greeted) if greeted.welcome.instance == self.resume.instance && greeted.welcome.resumed => {
                    return Ok(greeted);
                }
                // Another broker, or none listens any more.
                Ok(_) | Err(Error::Unreachable(Unreachable::NoAnswer { .. } | Unreachable::Version { .. })) => {
                    return Err(gone);
                }
                // Another broker, or this broker has dropped this member. In the latter case it still ends the waits of
                // other members.
                Err(Error::Unreachable(Unreachable::Refused(_))) => {
                    return Err(NoBroker { gone: !self.is_our_broker() });
                }
                Err(_) => {}
            }
            // The broker is alive or starting, so the loop retries, but stops immediately when asked to.
            if Instant::now() >= deadline || stop.load(Ordering::Acquire) {
                return Err(gone);
            }
            thread::sleep(RETRY);
        }
    }

    /// Gives back a grant to a caller that no longer waits. Not by an ordinary call, which would wait for the renewal
    /// of the connection: that is a later job of the same worker.
    pub(in super::super) fn give_back(&self, call: Call) {
        match self.turn() {
            Ok(mut turn) => {
                let calls = turn.calls();
                if calls.owed().len() < MAX_OWED {
                    calls.owed().push(call);
                }
                // A silent broker gets the call after its next answer.
                if calls.is_connected() && !calls.is_silent() {
                    self.return_owed(calls);
                }
            }
            Err(error) => tracing::warn!(?call, %error, "a grant without a waiter is lost"),
        }
    }

    /// Notes that the connection is lost: calls wait until it is renewed.
    pub(in super::super) fn lost(&self) {
        // Without a turn, another thread is in a call and notices the loss by itself.
        if let Ok(mut turn) = self.turn() {
            turn.calls().close();
        }
    }

    /// Uses the renewed connection. The broker has forgotten all waits. Returns false if a thread does not release the old
    /// connection.
    pub(in super::super) fn renewed(&self, call: OwnedFd) -> bool {
        let Ok(mut turn) = self.turn() else { return false };
        let calls = turn.calls();
        calls.renew(call);
        self.waits.ask_again();
        self.return_owed(calls);
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

    /// Returns whether the process that listens now is the broker of this connection; false if it cannot be identified.
    fn is_our_broker(&self) -> bool {
        let listening = connect::open(&self.location)
            .and_then(|call| socket::peer(&call).map_err(|errno| Error::system("asking who the broker is", errno)));
        self.broker.is_some() && listening.is_ok_and(|peer| peer.pid == self.broker)
    }
}
