//! Calls that have to wait: the broker answers them with `Pending`, and later completes them on the events socket.

#[cfg(feature = "tokio")]
mod pending;

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::MAX_SLEEP;
use partywall_wire::{Answer, Call, Refusal, RequestId};

#[cfg(feature = "tokio")]
pub(crate) use self::pending::PendingCall;
use super::{Answered, Asked, Link, TIMEOUT};
use crate::{
    error::Result,
    wait::{Wait, Waiting},
};

/// A message of the service thread to a waiting caller.
#[derive(Debug)]
pub(in super::super) enum Delivery {
    /// The end of the wait.
    Ended(Box<Result<Answer, Refusal>>, Vec<OwnedFd>),
    /// The connection was renewed and the broker has forgotten the wait, so the caller must ask again.
    AskAgain,
}

/// What has become of a call that may have to wait.
enum Begun {
    /// The broker has answered it.
    Answered(Answered),
    /// It waits for its completion.
    Waits(RequestId),
}

/// Callers that wait for completions.
#[derive(Debug, Default)]
pub(super) struct PendingCalls {
    state: Mutex<Tickets>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Tickets {
    /// The completions by the numbers of their calls; `None` until a completion has come.
    tickets: HashMap<RequestId, Option<Delivery>>,
    /// Whether the broker is gone for good.
    gone: bool,
}

impl PendingCalls {
    /// Registers a call that waits for its completion.
    fn register(&self, id: RequestId) {
        self.state.lock().ignore_poison().tickets.insert(id, None);
    }

    /// Forgets a call. Returns its completion, if it has come.
    fn forget(&self, id: RequestId) -> Option<Delivery> {
        self.state.lock().ignore_poison().tickets.remove(&id).flatten()
    }

    /// Hands a completion to its waiter. Returns it if no caller waits for it: its grant must then be given back.
    fn deliver(&self, id: RequestId, completion: Delivery) -> Option<Delivery> {
        match self.state.lock().ignore_poison().tickets.get_mut(&id) {
            Some(waiting) => *waiting = Some(completion),
            None => return Some(completion),
        }
        self.changed.notify_all();
        None
    }

    /// Returns whether a completion has come, or will not come because the broker is gone.
    #[cfg(feature = "tokio")]
    fn is_decided(&self, id: RequestId) -> bool {
        let state = self.state.lock().ignore_poison();
        state.gone || state.tickets.get(&id).is_none_or(Option::is_some)
    }

    /// Makes all waiters ask again, on a renewed connection.
    pub(super) fn ask_again(&self) {
        for waiting in self.state.lock().ignore_poison().tickets.values_mut().filter(|waiting| waiting.is_none()) {
            *waiting = Some(Delivery::AskAgain);
        }
    }

    /// Wakes all waiters.
    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    pub(super) fn set_gone(&self) {
        self.state.lock().ignore_poison().gone = true;
    }

    pub(super) fn is_gone(&self) -> bool {
        self.state.lock().ignore_poison().gone
    }

    /// Sleeps until something changes, for at most `limit`. Returns immediately if the broker is gone.
    pub(super) fn sleep(&self, limit: Duration) {
        let state = self.state.lock().ignore_poison();
        if !state.gone {
            drop(self.changed.wait_timeout(state, limit));
        }
    }
}

impl Link {
    /// Makes a call that may have to wait. Returns `None` once the wait is over. `call` builds the request, again if it
    /// has to be repeated: under its number, so that the broker recognises it if it has granted it meanwhile.
    pub(crate) fn call_waiting(&self, call: impl Fn() -> Call, waiting: &Waiting<'_>) -> Result<Option<Answered>> {
        let mut again = None;
        loop {
            let id = match self.ask_to_wait(again, call())? {
                Begun::Answered(answered) => return Ok(Some(answered)),
                Begun::Waits(id) => id,
            };
            match self.await_completion(id, waiting)? {
                Some(Delivery::Ended(outcome, fds)) => return self.accept((*outcome, fds)).map(Some),
                Some(Delivery::AskAgain) => again = Some(id),
                None => return Ok(None),
            }
        }
    }

    /// Sends a call that may have to wait, again under its number if it has one.
    fn ask_to_wait(&self, again: Option<RequestId>, call: Call) -> Result<Begun> {
        let mut registered = None;
        // Registered before the request is sent, so that the completion cannot come first.
        let asked = self.ask(again, call, &[], |id| {
            self.waits.register(id);
            registered = Some(id);
        });
        match (registered, asked) {
            (Some(id), Ok(Asked { outcome: (Ok(Answer::Pending), _), .. })) => Ok(Begun::Waits(id)),
            (registered, asked) => {
                registered.and_then(|id| self.waits.forget(id));
                self.accept(asked?.outcome).map(Begun::Answered)
            }
        }
    }

    /// Hands a completion to its waiter. Returns it if no caller waits for it: its grant must then be given back.
    pub(in super::super) fn deliver(&self, ticket: RequestId, completion: Delivery) -> Option<Delivery> {
        self.waits.deliver(ticket, completion)
    }

    /// Waits for a completion. If the wait is over before it comes, cancels the call.
    fn await_completion(&self, id: RequestId, waiting: &Waiting<'_>) -> Result<Option<Delivery>> {
        if let Some(completion) = self.completion_within(id, waiting)? {
            return Ok(Some(completion));
        }
        let cancelled =
            self.connected_turn(false).and_then(|mut turn| self.ask_once(&mut turn, Call::Cancel { ticket: id }));
        let completion = match cancelled {
            // The completion was sent before the call was cancelled, so this caller owns it and its lease.
            Ok(Some((Err(Refusal::Stale { .. }), _))) => self.completion_within(id, &Wait::from(TIMEOUT).begin())?,
            // The broker has forgotten the wait with the connection, but it may have granted the call before.
            Ok(None) => Some(Delivery::AskAgain),
            Ok(Some(outcome)) => self.accept(outcome).map(|_| None)?,
            Err(error) => {
                self.waits.forget(id);
                return Err(error);
            }
        };
        // The service thread gives back later grants.
        let late = self.waits.forget(id);
        Ok(completion.or(late.filter(|completion| matches!(completion, Delivery::Ended(..)))))
    }

    fn completion_within(&self, id: RequestId, waiting: &Waiting<'_>) -> Result<Option<Delivery>> {
        loop {
            // Without the lock, because this may call the caller's cancellation check.
            let left = waiting.left(Instant::now());
            let mut state = self.waits.state.lock().ignore_poison();
            if state.tickets.get(&id).is_some_and(Option::is_some) {
                return Ok(state.tickets.remove(&id).flatten());
            }
            if state.gone {
                state.tickets.remove(&id);
                return Err(self.gone());
            }
            let Some(left) = left else { return Ok(None) };
            drop(self.waits.changed.wait_timeout(state, left.min(MAX_SLEEP)));
        }
    }
}
