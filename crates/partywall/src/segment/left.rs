//! Names and published memory that remain after their committers have dropped the segments.

use std::{mem::ManuallyDrop, thread, time::Duration};

use partywall_wire::{Call, Lifetime};

use super::{Facts, Segment};
use crate::{
    domain::{Domain, Watch},
    error::{Error, Gone, NotFound, Result, Unreachable},
    kind::Memory,
};

/// How often to ask where no event reports the change: whether a version that is no longer the latest still has leases.
const ASK: Duration = Duration::from_millis(250);

impl Segment {
    /// Unmaps the memory, gives the lease back, and leaves the name to the connection.
    ///
    /// The name ends with the connection, or by [`Domain::withdraw_names`](crate::Domain::withdraw_names) or
    /// [`Domain::remove`](crate::Domain::remove). The version also ends when a newer one follows. This process keeps
    /// nothing for the name, except memory that was [published](crate::Domain::publish): a thread keeps that memory until
    /// the name ends, and memory of a [`Heap`](crate::Heap) until the last lease has ended, too. If this segment was
    /// opened, or its name remains anyway, this only releases the segment.
    ///
    /// A version that was committed with [`until_unused`](crate::Publication::until_unused) is left to the processes that
    /// have it open, and its name ends with the last of them. [Published](crate::Domain::publish) memory is kept until
    /// then.
    ///
    /// # Errors
    /// The errors of every call. The memory is unmapped even then.
    pub fn leave_name(mut self) -> Result<()> {
        if !self.is_published() || self.is_live() {
            return self.close(|lease| Call::LeaveName { lease });
        }
        let keep = move || {
            if let Err(error) = self.leave_to_others().and_then(|()| self.outlast_name()) {
                tracing::debug!(name = self.facts.name, %error, "published memory is released before its name has ended");
            }
        };
        let thread = thread::Builder::new().name("partywall-name".into()).spawn(keep);
        thread.map(drop).map_err(|source| Error::System { what: "starting a thread".into(), source })
    }

    /// Gives back the lease on a version that lasts as long as others have it open.
    fn leave_to_others(&mut self) -> Result<()> {
        let Some(lease) = self.lease.take_if(|_| self.facts.lifetime == Lifetime::Shared) else { return Ok(()) };
        loop {
            match self.domain.link().call(Call::LeaveName { lease }) {
                // The broker is stopped, and continues to grant the version afterwards.
                Err(Error::Unreachable(Unreachable::NoAnswer { .. })) => {}
                Err(error @ Error::Unreachable(Unreachable::Gone { .. } | Unreachable::Forked { .. })) => {
                    return Err(error);
                }
                // A refusal means that an earlier call, whose answer did not arrive, has given the lease back.
                Ok(_) | Err(_) => return Ok(()),
            }
        }
    }

    /// Waits until this version is no longer the latest of its name.
    fn outlast_name(&self) -> Result<()> {
        let Self { domain, facts, .. } = self;
        let mut watch = None;
        loop {
            // The watch begins before the inspection, so that no change is missed.
            watch = watch.or_else(|| domain.watch(&facts.name).ok());
            match domain.inspect(&facts.name) {
                Ok(info) if info.version.version == facts.version && info.is_latest => {}
                Ok(_)
                | Err(
                    Error::NotFound(NotFound::Name { .. })
                    | Error::Gone(Gone::OwnerDied { .. } | Gone::Withdrawn { .. }),
                ) => {
                    return Ok(());
                }
                // The name has ended with the broker or this member, or belongs to the parent process.
                Err(
                    error @ (Error::Unreachable(Unreachable::Gone { .. } | Unreachable::Forked { .. })
                    | Error::Gone(Gone::Evicted { .. })),
                ) => {
                    return Err(error);
                }
                // For instance the broker is stopped: it still has the name.
                Err(error) => tracing::debug!(name = facts.name, %error, "cannot ask for the latest version"),
            }
            await_change(&mut watch, Duration::MAX);
        }
    }
}

/// Waits for the next event of a watch, for at most `pause`. If the broker does not answer, or has no room for another
/// wait, drops the watch and pauses: that does not end what the caller waits for.
fn await_change(watch: &mut Option<Watch>, pause: Duration) {
    let waited = watch.as_mut().map(|watch| watch.next(pause));
    if !matches!(waited, Some(Ok(_))) {
        *watch = None;
        thread::sleep(ASK);
    }
}

/// A version of this process's memory that other processes may read after this process has given its lease back.
#[derive(Debug)]
pub(super) struct LeftVersion {
    domain: Domain,
    name: String,
    version: u64,
    /// Tells the version from a later one with the same number: numbers begin anew once all versions of a name have
    /// ended.
    /// `None` if the broker did not answer; a later version then counts as this one.
    committed_at: Option<u64>,
}

impl LeftVersion {
    /// Asks for the identity of a segment's version, on which this process still has a lease.
    pub(super) fn of(domain: &Domain, facts: &Facts) -> Self {
        let Facts { name, version, .. } = facts;
        let info = domain.inspect(&format!("{name}@{version}"));
        let committed_at = info.ok().map(|info| info.version.committed_at);
        Self { domain: domain.clone(), name: name.clone(), version: *version, committed_at }
    }

    /// Keeps memory until the version has ended: it is not the latest, and nobody has a lease on it. Returns at once; a
    /// thread waits.
    pub(super) fn keep(self, memory: Box<dyn Memory>) {
        if matches!(self.state(), State::Ended) {
            return drop(memory);
        }
        // A thread that cannot be started drops nothing: readers may still use the memory.
        let memory = ManuallyDrop::new(memory);
        let keep = move || {
            if self.outlast_leases() {
                drop(ManuallyDrop::into_inner(memory));
            } else {
                tracing::debug!(name = self.name, "published memory stays until this process ends");
            }
        };
        if let Err(error) = thread::Builder::new().name("partywall-name".into()).spawn(keep) {
            tracing::warn!(%error, "published memory stays until this process ends: no thread waits for its readers");
        }
    }

    /// Waits until the version has ended. Returns false if this process will never know.
    fn outlast_leases(&self) -> bool {
        let mut watch = None;
        loop {
            // The watch begins before the inspection, so that no change is missed.
            watch = watch.or_else(|| self.domain.watch(&self.name).ok());
            let pause = match self.state() {
                State::Ended => return true,
                State::Unknown => return false,
                State::Latest => Duration::MAX,
                State::Leased => ASK,
            };
            await_change(&mut watch, pause);
        }
    }

    fn state(&self) -> State {
        let Self { domain, name, version, committed_at } = self;
        match domain.inspect(&format!("{name}@{version}")) {
            Ok(info) if committed_at.is_some_and(|at| at != info.version.committed_at) => State::Ended,
            Ok(info) if info.is_latest => State::Latest,
            Ok(_) => State::Leased,
            Err(
                Error::NotFound(NotFound::Name { .. } | NotFound::Version { .. })
                | Error::Gone(Gone::OwnerDied { .. } | Gone::Withdrawn { .. })
                // All leases have ended with the broker, or belong to the parent process.
                | Error::Unreachable(Unreachable::Gone { .. } | Unreachable::Forked { .. }),
            ) => State::Ended,
            // The broker does not answer this process any more.
            Err(Error::Gone(Gone::Evicted { .. })) => State::Unknown,
            Err(error) => {
                tracing::debug!(name, %error, "cannot ask for the leases on published memory");
                State::Leased
            }
        }
    }
}

/// What becomes of a version.
#[derive(Debug, Clone, Copy)]
enum State {
    /// It is the latest of its name.
    Latest,
    /// It is not, and somebody has a lease on it.
    Leased,
    Ended,
    /// This process cannot find out, and never will.
    Unknown,
}
