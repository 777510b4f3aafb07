//! Topics from host to host.
//!
//! | module | holds |
//! |---|---|
//! | [`exchange`] | what exports and imports share: keys, windows, which samples are the bridge's own |
//! | [`export`] | the streams to other hosts: takes samples from rings, and sends them |
//! | [`import`] | the streams from other hosts: publishes what arrives |
//! | [`inbox`] | what has arrived for a stream's thread |
//! | [`receiver`], [`sender`] | the two sides of a stream, as state machines |
//! | [`wire`] | their messages |
//!
//! [`Sender`](sender::Sender) is the origin's side, [`Receiver`](receiver::Receiver) the other one. Both are pure state
//! machines: events in, effects out, time as a parameter, no I/O. [`wire`] has the messages between them.
//!
//! # The protocol
//!
//! The receiver begins a *stream* ([`Join`](wire::Join)), under a [number](wire::StreamId) that it has not used before.
//! The sender joins the topic's ring with the receiver's policy, and numbers the samples that it takes from there 0, 1,
//! 2, …. A sample is sent in pieces of [`PIECE_BYTES`], and the receiver accepts pieces in order only: its state is one
//! [cursor](wire::Cursor). An [acknowledgement](wire::Acknowledgement) says the whole state, so it may be lost, doubled
//! or late. It is the credit as well: the sender may have as many samples unpublished and as many bytes unwritten as the
//! [window](wire::Window) says, and takes nothing more from the ring before. What is dropped is therefore dropped in the
//! ring, by the topic's policy, and counted there.
//!
//! The transport is expected to keep the order, but nothing depends on it. A piece that comes too early makes the
//! receiver ask for those before it. If an acknowledgement does not come, the sender [probes](wire::FromOrigin::Probe)
//! once a [`RETRY`], and a silent receiver of samples [asks](wire::Acknowledgement::asks) once a [`KEEPALIVE`].
//!
//! Small samples share a message: all that are in the ring when one is taken, up to [`BATCH_BYTES`](sender::BATCH_BYTES).
//! Nothing waits for more of them.
//!
//! # Ends
//!
//! There is a publisher here as long as there is one at the origin and that is reachable, so waits for samples end here
//! as they do there. A change is a number of the stream, between the samples: it is neither lost nor early. Publishers
//! of the origin's bridge do not count: two hosts that import from each other would wait for each other.
//!
//! A stream belongs to two instances of bridges. If one of them is replaced, the stream is over; its messages are
//! dropped by their [`StreamId`](wire::StreamId). If the hosts only lose sight of each other, the sender keeps what is
//! not acknowledged for the *timeout*, then detaches: no publisher waits for a cable for ever. A new stream
//! [resumes](wire::Resume) at a position of the ring, so the samples between are counted as missed, exactly if the ring
//! is the same one. Exception: samples that the origin's own bridge has published, and that the ring no longer keeps.

mod exchange;
mod export;
mod import;
mod inbox;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;
mod wire;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_cli::{Failure, Output};

pub(crate) use self::exchange::{TopicOptions, policy};
use self::{exchange::OwnPublishers, export::TopicExports, import::TopicImports};
use crate::{Bridge, message};

/// The exports and imports of a bridge.
#[derive(Debug)]
pub(crate) struct Topics {
    exports: Arc<TopicExports>,
    imports: Arc<TopicImports>,
}

impl Topics {
    /// Begins to export and import topics.
    ///
    /// # Errors
    /// If the session has ended, no thread can be started, or the broker does not answer.
    pub(crate) fn start(bridge: &Arc<Bridge>, options: TopicOptions, output: Output) -> Result<Self, Failure> {
        let own = OwnPublishers::new(&bridge.domain)?;
        let exports = TopicExports::start(bridge, options, &own)?;
        let imports = TopicImports::start(bridge, options, &own, output)?;
        Ok(Self { exports, imports })
    }

    /// Tells other hosts that the streams end, so that nobody waits out the timeout.
    pub(crate) fn stop(&self) {
        self.imports.stop();
        self.exports.stop();
        let deadline = Instant::now() + STOP;
        while Instant::now() < deadline && !(self.imports.have_ended() && self.exports.have_ended()) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The time since some moment before the first event. It only grows.
pub(crate) type Time = Duration;

/// The bytes of each piece of a sample but the last.
pub(crate) const PIECE_BYTES: u64 = message::PIECE_BYTES as u64;

/// How long a side waits for an answer before it asks again.
const RETRY: Duration = Duration::from_secs(1);

/// How long a receiver hears nothing before it asks whether its stream still exists.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// How long an ending bridge waits until its streams have ended.
const STOP: Duration = Duration::from_secs(1);

/// The earliest of some deadlines.
fn earliest(deadlines: impl IntoIterator<Item = Option<Time>>) -> Option<Time> {
    deadlines.into_iter().flatten().min()
}
