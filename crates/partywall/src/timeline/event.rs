//! Timelines in event loops.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use partywall_shm::timeline::Progress;
use partywall_wire::LeaseId;
use rustix::event::{EventfdFlags, eventfd};

use super::{Hold, Timeline, waiting::Poller};
use crate::{
    domain::PollReason,
    error::{Error, Result},
};

/// A file descriptor that becomes readable, and stays readable, once a timeline has reached a value or has ended before
/// it ([`Timeline::event`]). Poll it for reading; there is nothing to read from it.
///
/// The connection's service thread polls the timeline, with pauses of up to 1 ms, until this is dropped.
#[derive(Debug)]
pub struct TimelineEvent {
    hold: Hold,
    v: u64,
    fd: Arc<OwnedFd>,
}

impl TimelineEvent {
    /// Returns the outcome; `None` until the timeline has reached the value or ended.
    ///
    /// # Errors
    /// As [`Timeline::wait`].
    pub fn outcome(&self) -> Option<Result<()>> {
        let Hold { at, word, .. } = &self.hold;
        match word.progress(self.v) {
            Progress::Pending | Progress::Announced => None,
            Progress::Reached => Some(Ok(())),
            Progress::Ended(ending) => Some(Err(at.ended(word, ending, self.v))),
        }
    }
}

impl AsFd for TimelineEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub(super) fn watch(timeline: &Timeline, v: u64) -> Result<TimelineEvent> {
    let Timeline { at, domain, .. } = timeline;
    domain.link().require_ours()?;
    at.check_value(v)?;
    let hold = timeline.hold();
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|errno| Error::system(format!("an event of timeline {:?}", at.name), errno))?;
    let fd = Arc::new(fd);
    let mut poller = Poller::new(&hold.word, v);
    let watched = Arc::downgrade(&fd);
    let Some(pause) = poller.poll() else {
        ring(&fd);
        return Ok(TimelineEvent { hold, v, fd });
    };
    let waits = domain.host_waits().clone();
    let lease = hold.keep.as_ref().map_or(LeaseId(0), |keep| keep.lease());
    let start = Instant::now();
    let mut shown = None;
    // The event holds a lease, so the cell belongs to the timeline for as long as the event exists.
    domain.poll_tasks().add(pause, move |reason| {
        let fd = watched.upgrade()?;
        let pause = poller.poll();
        if pause.is_none() || reason == PollReason::Closing {
            ring(&fd);
            return None;
        }
        shown.get_or_insert_with(|| waits.add(lease, v, start));
        pause
    });
    Ok(TimelineEvent { hold, v, fd })
}

fn ring(fd: &OwnedFd) {
    // The write fails only if the descriptor is already readable.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}
