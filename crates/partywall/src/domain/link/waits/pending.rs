//! Calls for whose completions futures wait.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_wire::{Call, RequestId};

use super::{
    super::{Answered, Link, MAX_OWED, giving_back},
    Begun, Delivery,
};
use crate::{completion::Worker, error::Result, wait::Wait};

/// A call that waits in the broker while no thread waits for it. Dropping it withdraws the call: what the broker grants
/// meanwhile goes back.
#[derive(Debug)]
pub(crate) struct PendingCall {
    link: Arc<Link>,
    /// The [broker worker](crate::completion::Workers::broker).
    worker: Arc<Worker>,
    call: Call,
    /// The number of the request, while it waits.
    id: Option<RequestId>,
}

impl PendingCall {
    /// Returns a call that was not made yet.
    pub(crate) fn new(link: Arc<Link>, worker: Arc<Worker>, call: Call) -> Self {
        Self { link, worker, call, id: None }
    }

    /// Makes the call, or takes its completion. Returns `None` if it still waits: call this again once
    /// [`is_decided`](Self::is_decided). Blocks for an exchange with the broker.
    pub(crate) fn poll(&mut self) -> Result<Option<Answered>> {
        if let Some(id) = self.id {
            match self.link.completion_within(id, &Wait::from(Duration::ZERO).begin())? {
                None => return Ok(None),
                Some(Delivery::Ended(outcome, fds)) => {
                    self.id = None;
                    return self.link.accept((*outcome, fds)).map(Some);
                }
                Some(Delivery::AskAgain) => {}
            }
        }
        match self.link.ask_to_wait(self.id, self.call.clone())? {
            Begun::Answered(answered) => {
                self.id = None;
                Ok(Some(answered))
            }
            Begun::Waits(id) => {
                self.id = Some(id);
                Ok(None)
            }
        }
    }

    /// Returns a condition for the service thread: whether [`poll`](Self::poll) would not return `None`.
    pub(crate) fn is_decided(&self) -> impl Fn(Instant) -> bool + Clone + Send + 'static {
        let Self { link, id, .. } = self;
        let link = link.clone();
        let id = *id;
        move |_| id.is_none_or(|id| link.waits.is_decided(id))
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        if self.link.require_ours().is_err() || self.link.is_leaving() {
            return;
        }
        let back = match self.link.waits.forget(id) {
            // The service thread gives back what comes from now on.
            Some(Delivery::Ended(outcome, _)) => outcome.ok().as_ref().and_then(giving_back),
            // The broker may have granted the call before it lost the connection.
            None | Some(Delivery::AskAgain) => Some(Call::GiveUp { request: id }),
        };
        if let Some(call) = back {
            let link = self.link.clone();
            // The dropping thread runs tasks and must not block.
            self.worker.run(move || link.call_later(call, MAX_OWED));
        }
    }
}
