//! Opening in asynchronous programs.

use partywall_wire::Access;
use tracing::Instrument;

use super::{OpenOptions, Segment, split_version};
use crate::{domain::Domain, error::Result};

impl Domain {
    /// Opens the latest version of `name`, or `NAME@V`, for reading, as [`open`](Self::open) does. Waits for a version
    /// that does not exist yet, for as long as the future is polled, without blocking a thread. Needs the runtime of
    /// tokio: the exchange with the broker and the mapping of the memory run on its threads for blocking code.
    ///
    /// The future may be dropped at any time: nothing stays open.
    ///
    /// ```no_run
    /// # async fn open(domain: &partywall::Domain) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let weights = tokio::time::timeout(Duration::from_secs(60), domain.open_async("weights")).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open), except [`NotFound::Name`](crate::error::NotFound::Name) and [`Error::Timeout`](crate::Error::Timeout);
    /// [`Error::Cancelled`](crate::Error::Cancelled) if the runtime ends.
    pub async fn open_async(&self, name: &str) -> Result<Segment> {
        self.opener(name).open_async().await
    }
}

impl OpenOptions {
    /// Opens the version as [`Domain::open_async`] does, with these options except the [timeout](Self::timeout).
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::Cancelled`](crate::Error::Cancelled) if the runtime ends.
    pub async fn open_async(&self) -> Result<Segment> {
        let (name, version) = split_version(&self.name)?;
        let access = if self.write { Access::Write } else { Access::Read };
        let options = self.clone();
        let attach = move |opened, fds| options.attach_segment(opened, fds);
        let open = self.domain.open_version(&name, self.version.or(version), access, attach);
        open.instrument(tracing::trace_span!("open", name = self.name.as_str())).await
    }
}
