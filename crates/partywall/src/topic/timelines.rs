//! The timelines by which the streams of publishers complete samples.
//!
//! A subscriber trusts a publisher's timeline only if it is the very incarnation that the topic names. Another timeline
//! that was created under the same name would never reach the value.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_shm::topic::HeldSample;

use super::OpenTopic;
use crate::{
    backoff::Backoff,
    error::{Error, Result},
    timeline::{OpenLanes, Timeline, TimelineOptions},
};

/// Returns the timeline that completes a sample, on a lane of its publisher; `None` if the sample is settled by now.
/// `known` are the timelines of publishers that the subscriber has received from.
pub(super) fn find(
    known: &OpenLanes<u64>,
    open: &OpenTopic,
    taken: &HeldSample,
    (publisher, lane): (u64, u8),
) -> Result<Option<Arc<Timeline>>> {
    let topic = &open.control.topic;
    let what = || format!("sample {} of topic {:?} was not decided", taken.position(), open.name());
    await_settled(what, || {
        if topic.status(taken).is_final() {
            return Ok(Some(None));
        }
        // Without it the publisher is gone, and the broker is about to settle its samples.
        let Some(cell) = topic.timeline_of(taken) else { return Ok(None) };
        Ok(known.find((publisher, lane), cell, || options(open, publisher, lane))?.map(Some))
    })
}

/// Polls until the publisher or the broker has settled a sample whose publisher is gone or about to end. `what` is the
/// message of the timeout.
pub(super) fn await_settled<T>(
    what: impl FnOnce() -> String,
    mut poll: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    let mut backoff = Backoff::new();
    loop {
        if let Some(settled) = poll()? {
            return Ok(settled);
        }
        if start.elapsed() > SETTLING {
            return Err(Error::Timeout { what: what(), after: SETTLING });
        }
        std::thread::sleep(backoff.next());
    }
}

/// Begins to open the timeline of a publisher's lane, which other users may open if they may open the topic. Its name
/// contains the topic's version, because a removed topic that is still in use may have a publisher of the same number.
pub(super) fn options(open: &OpenTopic, publisher: u64, lane: u8) -> TimelineOptions {
    let name = format!("{}/{}/publisher-{publisher}-{lane}", open.name(), open.blocks.version());
    open.domain().timeline_options(&name).shared(open.blocks.segment().is_shared())
}

/// How long the broker may take to settle the samples of a publisher that is gone.
pub(super) const SETTLING: Duration = Duration::from_secs(1);
