//! A left version: what keeps its memory, and when to let go of it.

use std::mem;

use partywall_wire::{Call, LeaseId, Lifetime};

use super::super::{Facts, Segment};
use crate::{
    domain::Domain,
    error::{Error, Gone, NotFound, Result, Unreachable},
    kind::Memory,
};

/// A version of this process's memory that other processes may read after this process has dropped its segment.
pub(in super::super) struct Version {
    pub(super) domain: Domain,
    pub(super) name: String,
    number: u64,
    /// Tells the version from a later one with the same number: numbers begin anew once all versions of a name have
    /// ended. `None` until the broker has answered. A later version counts as this one if the first answer is about it.
    committed_at: Option<u64>,
}

/// A version, and the memory that is kept for it.
pub(super) struct LeftVersion {
    pub(super) version: Version,
    pub(super) kept: KeptMemory,
}

/// What keeps the memory of a version.
pub(super) enum KeptMemory {
    /// The committer's segment, of kind `legacy`.
    Segment(Segment),
    /// Memory of a heap, whose segment is closed. Its allocator would use it for other tensors.
    Memory(Box<dyn Memory>),
}

/// What becomes of a version.
#[derive(Debug, Clone, Copy)]
enum VersionState {
    /// It is the latest of its name.
    Latest,
    /// It is not, and somebody has a lease on it.
    Leased,
    Ended,
    /// This process cannot find out, and never will.
    Unknown,
}

/// What is to become of the memory of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// Other processes may use it.
    Needed,
    /// No other process uses it.
    Over,
    /// Other processes may use it, and this process will never learn how long.
    Unknown,
}

impl Version {
    /// Returns a segment's version. Asks nobody.
    pub(super) fn of(domain: &Domain, facts: &Facts) -> Self {
        Self { domain: domain.clone(), name: facts.name.clone(), number: facts.version, committed_at: None }
    }

    /// Returns a segment's version, and asks for its identity, while this process still has a lease on it.
    pub(in super::super) fn identified(domain: &Domain, facts: &Facts) -> Self {
        let mut version = Self::of(domain, facts);
        if let Err(error) = version.state() {
            tracing::debug!(name = version.name, %error, "cannot ask when a version was committed");
        }
        version
    }

    /// Keeps memory until the version has ended: it is not the latest, and nobody has a lease on it. Returns at once.
    pub(in super::super) fn keep(mut self, memory: Box<dyn Memory>) {
        if matches!(self.state(), Ok(VersionState::Ended)) {
            return drop(memory);
        }
        LeftVersion { version: self, kept: KeptMemory::Memory(memory) }.keep();
    }

    /// Asks for the state.
    ///
    /// # Errors
    /// The version may exist, and the broker has to be asked again. For instance the broker is stopped.
    fn state(&mut self) -> Result<VersionState> {
        match self.domain.inspect(&format!("{}@{}", self.name, self.number)) {
            Ok(info) => {
                let at = info.version.committed_at;
                Ok(match *self.committed_at.get_or_insert(at) == at {
                    false => VersionState::Ended,
                    true if info.is_latest => VersionState::Latest,
                    true => VersionState::Leased,
                })
            }
            Err(
                Error::NotFound(NotFound::Name { .. } | NotFound::Version { .. })
                | Error::Gone(Gone::OwnerDied { .. } | Gone::Withdrawn { .. })
                // All leases have ended with the broker, or belong to the parent process.
                | Error::Unreachable(Unreachable::Gone { .. } | Unreachable::Forked { .. }),
            ) => Ok(VersionState::Ended),
            // The broker does not answer this process any more.
            Err(Error::Gone(Gone::Evicted { .. })) => Ok(VersionState::Unknown),
            Err(error) => Err(error),
        }
    }
}

impl LeftVersion {
    /// Has the thread of the connection keep the memory.
    pub(super) fn keep(self) {
        let domain = self.version.domain.clone();
        domain.extension::<super::LeftVersions>().add(domain.poll_tasks(), self);
    }

    /// Asks what is to become of the memory. The first answer of the broker has this process give back its lease on a
    /// version that lasts as long as others have it open.
    ///
    /// # Errors
    /// As [`Version::state`].
    pub(super) fn fate(&mut self) -> Result<Fate> {
        let mut state = self.version.state()?;
        let is_shared = match &mut self.kept {
            KeptMemory::Segment(segment) if segment.facts.chosen.lifetime == Lifetime::Shared => {
                if let Some(lease) = segment.lease {
                    leave_to_others(&self.version.domain, lease)?;
                    segment.lease = None;
                    state = self.version.state()?;
                }
                true
            }
            KeptMemory::Segment(_) => false,
            KeptMemory::Memory(_) => true,
        };
        Ok(match (state, &self.kept) {
            (VersionState::Latest, _) => Fate::Needed,
            (VersionState::Leased, _) if is_shared => Fate::Needed,
            (VersionState::Unknown, KeptMemory::Memory(_)) => Fate::Unknown,
            (VersionState::Leased | VersionState::Unknown | VersionState::Ended, _) => Fate::Over,
        })
    }

    /// Gives back the lease, if this process still has one, and then has the user's worker drop the memory.
    pub(super) fn let_go(self) {
        let Self { version, kept } = self;
        let memory = match kept {
            KeptMemory::Segment(mut segment) => segment.memory.take(),
            KeptMemory::Memory(memory) => Some(memory),
        };
        version.domain.workers().user.run(move || drop(memory));
    }

    /// Keeps the memory until this process ends.
    pub(super) fn stay(self) {
        tracing::debug!(name = self.version.name, "published memory stays until this process ends");
        mem::forget(self.kept);
    }
}

/// Gives back a lease, and leaves the name to the processes that have the version open.
///
/// # Errors
/// The broker is stopped, and continues to grant the version afterwards.
fn leave_to_others(domain: &Domain, lease: LeaseId) -> Result<()> {
    match domain.link().call(Call::LeaveName { lease }) {
        Err(error @ Error::Unreachable(Unreachable::NoAnswer { .. })) => Err(error),
        // A refusal means that an earlier call, whose answer did not arrive, has given the lease back. After any other
        // error the broker, or this member, is gone.
        Ok(_) | Err(_) => Ok(()),
    }
}
