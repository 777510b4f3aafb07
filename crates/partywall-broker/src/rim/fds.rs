//! Donated file descriptors: what they are, and who keeps them.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use partywall_os::fd::{FdKind, classify};
use partywall_wire::{FdFault, Refusal, limits::MAX_TABLE};

use crate::{
    registry::{FdId, types::Kind},
    rim::{ids::IdMap, reclaimer::Donated},
};

/// File descriptors by the numbers under which the registry knows them.
///
/// Shared, because an answer on its way out still needs a file descriptor that the registry has given up meanwhile.
#[derive(Debug, Default)]
pub(super) struct FdStore {
    held: IdMap<FdId, Arc<Donated>>,
    last: u64,
}

impl FdStore {
    pub(super) fn keep(&mut self, fd: Donated) -> FdId {
        self.last += 1;
        let id = FdId(self.last);
        self.held.insert(id, Arc::new(fd));
        id
    }

    pub(super) fn close(&mut self, ids: &[FdId]) {
        for id in ids {
            self.held.remove(id);
        }
    }

    pub(super) fn share(&self, ids: &[FdId]) -> Vec<Arc<Donated>> {
        ids.iter().filter_map(|id| self.held.get(id).cloned()).collect()
    }
}

/// What a commit says of a chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    pub(super) kind: Kind,
    pub(super) bytes: u64,
    pub(super) mutable: bool,
    /// Whether its member runs on the simulated driver, whose GPU memory is memfds.
    pub(super) simulated: bool,
}

/// Checks that the file descriptor at `index` of a message is a chunk as it is said to be.
pub(super) fn check_chunk(index: usize, fd: BorrowedFd<'_>, expected: Expected) -> Result<(), Refusal> {
    let Expected { kind, bytes, mutable, simulated } = expected;
    let fault = match (kind, classify(fd)) {
        (Kind::Vmm, Ok(FdKind::NvidiaControl)) if !simulated => return Ok(()),
        (Kind::Vmm, Ok(FdKind::Memfd { .. })) if simulated => return Ok(()),
        (Kind::Host, Ok(FdKind::Memfd { seals, .. })) if !seals.fixed_length() => {
            FdFault::NotSealed { seal: "F_SEAL_SHRINK and F_SEAL_GROW".into() }
        }
        (Kind::Host, Ok(FdKind::Memfd { bytes: found, .. })) if found != bytes => {
            FdFault::WrongSize { said: bytes, found }
        }
        (Kind::Host, Ok(FdKind::Memfd { seals, .. })) if !mutable && !seals.frozen() => {
            FdFault::NotSealed { seal: "F_SEAL_WRITE".into() }
        }
        (Kind::Host, Ok(FdKind::Memfd { .. })) => return Ok(()),
        (_, found) => FdFault::WrongType { found: describe(found) },
    };
    Err(bad(index, fault))
}

/// Checks that the file descriptor at `index` of a message is a table of `bytes` bytes.
pub(super) fn check_table(index: usize, fd: BorrowedFd<'_>, bytes: u64) -> Result<(), Refusal> {
    if bytes > MAX_TABLE {
        return Err(Refusal::Invalid { why: format!("a table of {bytes} bytes exceeds the limit of {MAX_TABLE}") });
    }
    let fault = match classify(fd.as_fd()) {
        Ok(FdKind::Memfd { bytes: found, .. }) if found != bytes => FdFault::WrongSize { said: bytes, found },
        Ok(FdKind::Memfd { seals, .. }) if !seals.frozen() => FdFault::NotSealed { seal: "F_SEAL_WRITE".into() },
        Ok(FdKind::Memfd { .. }) => return Ok(()),
        found => FdFault::WrongType { found: describe(found) },
    };
    Err(bad(index, fault))
}

/// The refusal of a message whose file descriptors from `index` on did not arrive.
pub(super) fn missing(index: usize) -> Refusal {
    bad(index, FdFault::Missing)
}

fn bad(index: usize, fault: FdFault) -> Refusal {
    Refusal::BadFd { index: index as u32, fault }
}

fn describe(found: Result<FdKind, partywall_os::Errno>) -> String {
    match found {
        Ok(FdKind::Memfd { .. }) => "a memfd".into(),
        Ok(FdKind::NvidiaControl) => "a file of the NVIDIA driver".into(),
        Ok(FdKind::Other(what)) => what,
        Err(errno) => format!("nothing that can be examined ({errno})"),
    }
}
