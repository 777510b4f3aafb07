//! Timelines in event loops.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use partywall_shm::timeline::Progress;
use rustix::event::{EventfdFlags, eventfd};

use super::{Hold, Timeline, waiting::Lookout};
use crate::{
    domain::PollReason,
    error::{Error, Result},
};

/// A file descriptor that becomes readable once a timeline has reached a value, or is known not to
/// ([`Timeline::event`]), and stays so. Poll it for reading; nothing has to be read from it.
///
/// The connection's service thread looks for the value, with pauses of up to 1 ms. Dropping this ends that.
#[derive(Debug)]
pub struct TimelineEvent {
    hold: Hold,
    v: u64,
    fd: Arc<OwnedFd>,
}

impl TimelineEvent {
    /// What came of it; `None` as long as the timeline is on its way.
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
    let mut lookout = Lookout::new(&hold.word, v);
    let watched = Arc::downgrade(&fd);
    let Some(pause) = lookout.look() else {
        ring(&fd);
        return Ok(TimelineEvent { hold, v, fd });
    };
    // As long as the event is there, so is its lease, and the cell is the timeline's.
    domain.poll_tasks().add(pause, move |reason| {
        let fd = watched.upgrade()?;
        let pause = lookout.look();
        if pause.is_none() || reason == PollReason::Closing {
            ring(&fd);
            return None;
        }
        pause
    });
    Ok(TimelineEvent { hold, v, fd })
}

fn ring(fd: &OwnedFd) {
    // It fails only if it is readable already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}
