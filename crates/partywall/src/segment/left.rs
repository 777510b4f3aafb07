//! Names that stay when their committers' segments go.

use std::{thread, time::Duration};

use partywall_wire::Call;

use super::Segment;
use crate::error::{Error, Gone, NotFound, Result, Unreachable};

impl Segment {
    /// Unmaps the memory, gives the lease back, and leaves the name to the connection.
    ///
    /// The name goes with the connection, by [`Domain::withdraw_names`](crate::Domain::withdraw_names) or
    /// [`Domain::remove`](crate::Domain::remove); the version also when a newer one follows. Nothing is kept for it in
    /// this process, except memory that was [published](crate::Domain::publish): a thread keeps that until then.
    /// A segment that was opened, or whose name stays anyway, is released.
    ///
    /// # Errors
    /// Those of every call. The memory is unmapped all the same.
    pub fn leave_name(mut self) -> Result<()> {
        if !self.is_published() {
            return self.close(|lease| Call::LeaveName { lease });
        }
        let keep = move || {
            if let Err(error) = self.outlast_name() {
                tracing::debug!(name = self.facts.name, %error, "published memory is let go of before its name");
            }
        };
        let thread = thread::Builder::new().name("partywall-name".into()).spawn(keep);
        thread.map(drop).map_err(|source| Error::System { what: "starting a thread".into(), source })
    }

    /// Waits until this version is not the latest of its name.
    fn outlast_name(&self) -> Result<()> {
        let Self { domain, facts, .. } = self;
        // Before the first question, so that no change is missed.
        let mut watch = domain.watch(&facts.name)?;
        loop {
            match domain.inspect(&facts.name) {
                Ok(info) if info.version.version == facts.version && info.is_latest => {}
                Ok(_)
                | Err(
                    Error::NotFound(NotFound::Name { .. })
                    | Error::Gone(Gone::OwnerDied { .. } | Gone::Withdrawn { .. }),
                ) => {
                    return Ok(());
                }
                // The broker is stopped, for instance: it still has the name.
                Err(error @ Error::Unreachable(Unreachable::Gone { .. } | Unreachable::Forked { .. })) => {
                    return Err(error);
                }
                Err(error) => tracing::debug!(name = facts.name, %error, "asking for the latest version"),
            }
            watch.next(Duration::MAX)?;
        }
    }
}
