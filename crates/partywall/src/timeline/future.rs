//! Timelines in asynchronous programs.

use std::time::{Duration, Instant};

use partywall_shm::timeline::Progress;
use tracing::Instrument;

use super::Timeline;
use crate::{
    error::{Error, Result},
    recorder::{Action, timeline_object},
};

impl Timeline {
    /// Waits until the timeline has reached `v`, as [`wait`](Self::wait) does, without blocking a thread. Runs on any
    /// executor.
    ///
    /// The value is noticed within a millisecond or so: while a future waits, the connection's service thread polls the
    /// timeline, as for [`event`](Self::event). The future may be dropped at any time.
    ///
    /// ```no_run
    /// # async fn wait(frames: &partywall::Timeline) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// tokio::time::timeout(Duration::from_secs(1), frames.wait_async(7)).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`wait`](Self::wait), except [`Error::Timeout`] and [`Error::Cancelled`].
    pub async fn wait_async(&self, v: u64) -> Result<()> {
        let wait = async {
            let start = Instant::now();
            let recorder = self.domain.recorder();
            let since = recorder.begin();
            let mut shown = None;
            loop {
                match self.wait_for(v, Progress::Reached, Duration::ZERO.into()) {
                    Err(Error::Timeout { .. }) => {}
                    waited => {
                        waited?;
                        recorder.record_since(Action::Wait, || timeline_object(self.name()), v, since);
                        return Ok(());
                    }
                }
                // The lease is held for as long as the word is polled.
                let (word, keep) = self.at.now();
                shown.get_or_insert_with(|| self.domain.host_waits().add(keep.lease(), v, start));
                let is_over = move |_| matches!(word.progress(v), Progress::Reached | Progress::Ended(_));
                self.domain.until(is_over).await;
                drop(keep);
            }
        };
        wait.instrument(tracing::trace_span!("wait", timeline = self.name(), value = v)).await
    }
}
