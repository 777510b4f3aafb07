//! Names and published memory that remain after their committers have dropped the segments.
//!
//! One thread of a connection keeps the memory, however many versions were left ([`LeftVersions`]). It watches all
//! their names by one pattern ([`WatchedVersions`]), and asks the broker about a version only after an event of its
//! name. It exists only while there are left versions.
//!
//! A name that is committed `until_unused` (`Lifetime::Shared`, as those of pools and topics) ends with the last
//! process that has it open. A publisher that leaves such a name gives its lease back at once, so the leases of the
//! readers decide how long the memory is kept. For kind `legacy` the registry records the publisher as the keeper, so
//! that the name still ends with the publisher's death. A kill between any two steps leaves either a lease or no name.

mod version;
mod watched;

use std::{
    fmt, io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall_os::{lock::IgnorePoison, thread};
use partywall_wire::Call;

pub(super) use self::version::Version;
use self::{
    version::{KeptMemory, LeftVersion},
    watched::WatchedVersions,
};
use super::Segment;
use crate::{
    domain::{PollReason, PollTasks},
    error::Result,
};

/// The pause before something is tried again that has failed: a start of the thread, or a call of the broker.
const RETRY: Duration = Duration::from_millis(250);

impl Segment {
    /// Unmaps the memory, gives the lease back, and leaves the name to the connection.
    ///
    /// The name ends with the connection, or by [`Domain::withdraw_names`](crate::Domain::withdraw_names) or
    /// [`Domain::remove`](crate::Domain::remove). The version also ends when a newer one follows. This process keeps
    /// nothing for the name, except memory that was [published](crate::Domain::publish): it keeps that memory, and the
    /// connection, until the name ends, and memory of a [`Heap`](crate::Heap) until the last lease has ended, too. One
    /// thread of the connection waits for the ends of all such names. If this segment was opened, or its name remains
    /// anyway, this only releases the segment.
    ///
    /// A version that was committed with [`until_unused`](crate::Publication::until_unused) is left to the processes
    /// that have it open, and its name ends with the last of them. [Published](crate::Domain::publish) memory is kept
    /// until then.
    ///
    /// # Errors
    /// The errors of every call. The memory is unmapped even then.
    pub fn leave_name(mut self) -> Result<()> {
        self.domain.link().require_ours()?;
        if !self.is_published() || self.is_live() {
            return self.close(|lease| Call::LeaveName { lease });
        }
        LeftVersion { version: Version::of(&self.domain, &self.facts), kept: KeptMemory::Segment(self) }.keep();
        Ok(())
    }
}

/// The left versions of a connection whose memory this process still keeps, and the thread that waits for their ends.
///
/// Each of them has a handle of the connection, so the connection does not end before them. A forked child lacks the
/// thread, and so drops no memory of its parent.
#[derive(Default)]
pub(crate) struct LeftVersions {
    state: Mutex<LeftState>,
    /// True if versions were added since the thread took the last ones. Ends its wait for events.
    has_added: AtomicBool,
}

#[derive(Default)]
struct LeftState {
    added: Vec<LeftVersion>,
    is_running: bool,
    /// True if a poll task starts the thread, which could not be started before.
    is_retried: bool,
}

impl LeftVersions {
    /// Keeps the memory of a version until the version has ended. If the thread cannot be started, this keeps the
    /// memory nevertheless, because other processes may use it, and the service thread tries again.
    fn add(self: &Arc<Self>, poll_tasks: &PollTasks, left: LeftVersion) {
        let mut state = self.state.lock().ignore_poison();
        state.added.push(left);
        self.has_added.store(true, Ordering::Release);
        let Err(error) = self.start(&mut state) else { return };
        if std::mem::replace(&mut state.is_retried, true) {
            return;
        }
        drop(state);
        tracing::warn!(%error, "published memory stays until a thread can be started that waits for its readers");
        let versions = self.clone();
        poll_tasks.add(RETRY, move |reason| {
            let mut state = versions.state.lock().ignore_poison();
            state.is_retried = reason == PollReason::Due && versions.start(&mut state).is_err();
            state.is_retried.then_some(RETRY)
        });
    }

    /// Starts the thread, if there are versions for it and it does not run.
    fn start(self: &Arc<Self>, state: &mut LeftState) -> io::Result<()> {
        if !state.is_running && !state.added.is_empty() {
            let versions = self.clone();
            thread::spawn("partywall-name", move || versions.run())?;
            state.is_running = true;
        }
        Ok(())
    }

    fn run(&self) {
        let mut watched = WatchedVersions::default();
        while let Some(added) = self.take_added(watched.is_empty()) {
            watched.extend(added);
            watched.step(&self.has_added);
        }
    }

    /// Returns the added versions. If there are none, and the thread has no others (`is_idle`), returns `None`: the
    /// next version needs another thread.
    fn take_added(&self, is_idle: bool) -> Option<Vec<LeftVersion>> {
        let mut state = self.state.lock().ignore_poison();
        self.has_added.store(false, Ordering::Release);
        state.is_running = !(is_idle && state.added.is_empty());
        state.is_running.then(|| std::mem::take(&mut state.added))
    }
}

impl fmt::Debug for LeftVersions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeftVersions").finish_non_exhaustive()
    }
}
