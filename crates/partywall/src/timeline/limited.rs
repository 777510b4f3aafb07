//! Waits of a stream that end after a time of their own.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use partywall_cuda::StreamRef;
use partywall_shm::timeline::Progress;

use super::{
    Hold, Timeline,
    enqueue::{self, Work},
    waiting::Lookout,
};
use crate::{
    domain::PollReason,
    error::{Error, Result},
};

/// A wait of a stream with a time limit ([`Timeline::wait_on_for`]). Dropping it changes nothing for the stream.
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
    /// The time was over.
    Over,
}

impl LimitedWait {
    /// Whether the stream has been told to go on.
    pub fn is_over(&self) -> bool {
        self.end.get().is_some()
    }

    /// How it ended; `None` as long as it has not.
    ///
    /// # Errors
    /// [`Error::Timeout`]: the stream went on because the time was over; as [`Timeline::check`]
    /// otherwise.
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
    // Of the incarnation that the stream waits for, should others follow meanwhile.
    let hold = Hold { at: at.clone(), word: word.clone(), keep: Some(keep.clone()), _domain: domain.clone() };
    let work = Work { domain, stream, what: &|| format!("waiting on a stream for timeline {:?}", at.name) };
    let private = work.run(|stream| {
        let (private, slab) = work.take_private()?;
        if let Err(error) = stream.enqueue_wait_u64(slab.word(&private.place)?, private.target) {
            // Should it wait all the same, it does not wait long.
            private.store();
            return Err(error.into());
        }
        Ok(private)
    })?;
    word.note_wait(v);
    let told = end.clone();
    let mut lookout = Lookout::new(&word, v);
    // A time-out too large for the clock is none.
    let deadline = Instant::now().checked_add(limit);
    let mut private = Some(private);
    domain.poll_tasks().add(Duration::ZERO, move |reason| {
        let _kept = &keep;
        let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        let pause = lookout.look();
        if let Some(pause) = pause
            && reason == PollReason::Due
            && !left.is_zero()
        {
            return Some(pause.min(left));
        }
        let _ = told.set(if pause.is_some() { End::Over } else { End::Decided });
        if let Some(private) = private.take() {
            private.store();
        }
        None
    });
    Ok(LimitedWait { hold, v, limit, end })
}
