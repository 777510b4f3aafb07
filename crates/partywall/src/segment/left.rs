//! Names that remain after their committers have dropped the segments.

use std::{thread, time::Duration};

use partywall_wire::Call;

use super::Segment;
use crate::error::{Error, Gone, NotFound, Result, Unreachable};

impl Segment {
    /// Unmaps the memory, gives the lease back, and leaves the name to the connection.
    ///
    /// The name ends with the connection, or by [`Domain::withdraw_names`](crate::Domain::withdraw_names) or
    /// [`Domain::remove`](crate::Domain::remove). The version also ends when a newer one follows. This process keeps
    /// nothing for the name, except memory that was [published](crate::Domain::publish): a thread keeps that memory until
    /// the name ends. If this segment was opened, or its name remains anyway, this only releases the segment.
    ///
    /// # Errors
    /// The errors of every call. The memory is unmapped even then.
    pub fn leave_name(mut self) -> Result<()> {
        if !self.is_published() {
            return self.close(|lease| Call::LeaveName { lease });
        }
        let keep = move || {
            if let Err(error) = self.outlast_name() {
                tracing::debug!(name = self.facts.name, %error, "published memory is released before its name has ended");
            }
        };
        let thread = thread::Builder::new().name("partywall-name".into()).spawn(keep);
        thread.map(drop).map_err(|source| Error::System { what: "starting a thread".into(), source })
    }

    /// Waits until this version is no longer the latest of its name.
    fn outlast_name(&self) -> Result<()> {
        let Self { domain, facts, .. } = self;
        // The watch begins before the first inspection, so that no change is missed.
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
                // The name has ended with the broker, or belongs to the parent process.
                Err(error @ Error::Unreachable(Unreachable::Gone { .. } | Unreachable::Forked { .. })) => {
                    return Err(error);
                }
                // For instance the broker is stopped: it still has the name.
                Err(error) => tracing::debug!(name = facts.name, %error, "cannot ask for the latest version"),
            }
            watch.next(Duration::MAX)?;
        }
    }
}
