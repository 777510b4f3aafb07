//! Waits of a stream that have a timeout.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use partywall_cuda::StreamRef;
use partywall_shm::timeline::Progress;

use super::{
    Hold, Timeline,
    enqueue::{self, Work},
    waiting::Poller,
};
use crate::{
    domain::PollReason,
    error::{Error, Result},
};

/// A wait of a stream with a timeout ([`Timeline::wait_on_for`]). Dropping it changes nothing for the stream.
#[derive(Debug)]
pub struct LimitedWait {
    hold: Hold,
    v: u64,
    limit: Duration,
    end: Arc<OnceLock<End>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The timeline has reached the value, or ended.
    Decided,
    /// The timeout has passed.
    Over,
}

impl LimitedWait {
    /// Returns whether the wait is over, so that the stream continues.
    pub fn is_over(&self) -> bool {
        self.end.get().is_some()
    }

    /// Returns how the wait ended; `None` until it has.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the stream continued because the timeout passed; otherwise as [`Timeline::check`].
    pub fn outcome(&self) -> Option<Result<()>> {
        let Hold { at, word, .. } = &self.hold;
        self.end.get().map(|end| match end {
            End::Decided => at.check(word, self.v),
            End::Over => Err(Error::Timeout { what: at.not_come(self.v, Progress::Reached), after: self.limit }),
        })
    }
}

pub(super) fn wait(timeline: &Timeline, stream: StreamRef<'_>, v: u64, limit: Duration) -> Result<LimitedWait> {
    let Timeline { at, domain, .. } = timeline;
    let end = Arc::new(OnceLock::new());
    let Some((word, keep)) = enqueue::begin(timeline, v)? else {
        let _ = end.set(End::Decided);
        return Ok(LimitedWait { hold: timeline.hold(), v, limit, end });
    };
    // This lease is for the incarnation that the stream waits for, even if the handle follows another one meanwhile.
    let hold = Hold { at: at.clone(), word: word.clone(), keep: Some(keep.clone()), _domain: domain.clone() };
    let work = Work { domain, stream, what: &|| format!("waiting on a stream for timeline {:?}", at.name) };
    let private = work.run(|stream| {
        let (private, slab) = work.take_private()?;
        if let Err(error) = stream.enqueue_wait_u64(slab.word(&private.cell)?, private.target) {
            // If the wait was enqueued in spite of the error, it must end soon.
            private.store();
            return Err(error.into());
        }
        Ok(private)
    })?;
    word.note_wait(v);
    let outcome = end.clone();
    let mut poller = Poller::new(&word, v);
    // A timeout that the clock cannot represent never ends.
    let deadline = Instant::now().checked_add(limit);
    let mut private = Some(private);
    let shown = domain.host_waits().add(keep.lease(), v, Instant::now());
    domain.poll_tasks().add(Duration::ZERO, move |reason| {
        let _kept = (&keep, &shown);
        let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        let pause = poller.poll();
        if let Some(pause) = pause
            && reason == PollReason::Due
            && !left.is_zero()
        {
            return Some(pause.min(left));
        }
        let _ = outcome.set(if pause.is_some() { End::Over } else { End::Decided });
        if let Some(private) = private.take() {
            private.store();
        }
        None
    });
    Ok(LimitedWait { hold, v, limit, end })
}
