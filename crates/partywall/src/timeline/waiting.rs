//! Waiting on the host.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_os::timer_slack::LeastSlack;
use partywall_shm::timeline::Progress;

use super::Timeline;
use crate::{
    backoff::Backoff,
    domain::{HostWait, Word},
    error::Result,
    wait::Wait,
};

impl Timeline {
    /// Waits until the timeline has reached `v`, or only announced it, depending on `goal`.
    pub(super) fn wait_for(&self, v: u64, goal: Progress, wait: Wait<'_>) -> Result<()> {
        self.domain.link().require_ours()?;
        self.at.check_value(v)?;
        // Includes the lease: another thread may make the handle follow another incarnation meanwhile.
        let (word, keep) = self.at.now();
        let cell = word.cell();
        let is_over = |progress| match progress {
            Progress::Pending => false,
            Progress::Announced => goal == Progress::Announced,
            Progress::Reached | Progress::Ended(_) => true,
        };
        let outcome = |progress| match progress {
            Progress::Ended(ending) => Err(self.at.ended(&word, ending, v)),
            Progress::Reached => {
                word.note_wait(v);
                Ok(())
            }
            // A caller that relies on a promise will wait for the value, too.
            Progress::Announced | Progress::Pending => Ok(()),
        };
        let mut progress = word.progress(v);
        if is_over(progress) {
            return outcome(progress);
        }
        let waiting = wait.begin();
        let poll = || {
            progress = word.progress(v);
            is_over(progress)
        };
        let mut now = self.spin.spin(waiting.start(), waiting.timeout(), poll);
        if now.is_none() {
            return outcome(progress);
        }
        let mut backoff = Backoff::attentive();
        let mut slack = None;
        let mut shown = None;
        loop {
            // Before the last check: what happens from now on ends the sleep.
            let key = cell.prepare();
            let progress = word.progress(v);
            if is_over(progress) {
                return outcome(progress);
            }
            // A woken waiter checks the value before it reads the clock.
            let Some(left) = waiting.left(now.take().unwrap_or_else(Instant::now)) else {
                if let Some(shown) = shown {
                    HostWait::pause(shown);
                }
                return Err(waiting.error(self.at.not_come(v, goal)));
            };
            // A stream stores promised values, and a stream wakes no thread.
            let pause = if progress == Progress::Announced {
                slack.get_or_insert_with(LeastSlack::begin);
                backoff.next()
            } else {
                left
            };
            cell.sleep(key, pause.min(left));
            // Before the next `prepare`, whose mark would cost the next notifier a system call for nothing.
            let progress = word.progress(v);
            if is_over(progress) {
                return outcome(progress);
            }
            // After the first sleep, so that a short wait does not pay for it.
            shown.get_or_insert_with(|| self.domain.host_waits().add(keep.lease(), v, waiting.start()));
        }
    }
}

/// Polls for a value, for callers that cannot sleep until it is reached.
#[derive(Debug)]
pub(super) struct Poller {
    word: Arc<Word>,
    v: u64,
    announced: bool,
    backoff: Backoff,
}

impl Poller {
    pub(super) fn new(word: &Arc<Word>, v: u64) -> Self {
        Self { word: word.clone(), v, announced: false, backoff: Backoff::new() }
    }

    /// Returns how long to wait before the next poll; `None` once the value is reached or the timeline has ended.
    pub(super) fn poll(&mut self) -> Option<Duration> {
        match self.word.progress(self.v) {
            Progress::Reached | Progress::Ended(_) => return None,
            // The timeline has progressed.
            Progress::Announced if !self.announced => {
                self.announced = true;
                self.backoff = Backoff::new();
            }
            Progress::Announced | Progress::Pending => {}
        }
        Some(self.backoff.next())
    }
}

impl super::At {
    /// Returns the message of a wait that timed out.
    pub(super) fn not_come(&self, v: u64, goal: Progress) -> String {
        let what = if goal == Progress::Announced { "promised" } else { "reached" };
        format!("value {v} of timeline {:?} was not {what}", self.name)
    }
}
