//! Donated file descriptors: their checks and their storage.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
    time::Duration,
};

use partywall_os::fd::{FdKind, classify};
use partywall_wire::{
    self as wire, FdFault, Limit, Refusal,
    limits::{MAX_CHUNKS, MAX_INLINE_TABLE, MAX_TABLE},
};

use crate::{
    registry::{
        FdId,
        types::{ControlMemory, Kind},
    },
    server::{
        ids::IdMap,
        reclaimer::{Donated, Reclaimer},
    },
};

/// File descriptors by their numbers in the registry.
///
/// A pending answer may still need a file descriptor that the registry has closed meanwhile, so descriptors are shared.
#[derive(Debug)]
pub(super) struct FdStore {
    /// Shared with pending answers.
    held: IdMap<FdId, Arc<Donated>>,
    /// The last number that was used.
    last: u64,
    /// Numbers above this one are not recorded yet.
    recorded: u64,
    reclaimer: Reclaimer,
}

impl FdStore {
    pub(super) fn new(reclaimer: Reclaimer) -> Self {
        Self { held: IdMap::default(), last: 0, recorded: 0, reclaimer }
    }

    /// Restores the store of a former process, which had used the numbers up to `last`.
    pub(super) fn restore(reclaimer: Reclaimer, fds: BTreeMap<FdId, OwnedFd>, last: u64) -> Self {
        let held = fds.into_iter().map(|(id, fd)| (id, Arc::new(reclaimer.trust(reclaimer.keep(fd))))).collect();
        Self { held, last, recorded: last, reclaimer }
    }

    /// Returns the registry's and the kernel's numbers of all descriptors.
    pub(super) fn numbers(&self) -> BTreeMap<FdId, RawFd> {
        self.held.iter().filter_map(|(id, fd)| Some((*id, fd.number()?))).collect()
    }

    /// Returns the numbers of the descriptors that came since the last record.
    pub(super) fn unrecorded(&self) -> Vec<(FdId, RawFd)> {
        let new = (self.recorded + 1..=self.last).map(FdId);
        new.filter_map(|id| Some((id, self.held.get(&id)?.number()?))).collect()
    }

    /// Returns the number of descriptors.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Notes that all descriptors are recorded.
    pub(super) fn set_recorded(&mut self) {
        self.recorded = self.last;
    }

    /// Returns the last number that was used.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Takes ownership of a file descriptor. When the result is dropped, the reclaimer closes the descriptor.
    pub(super) fn adopt(&self, fd: OwnedFd) -> Donated {
        self.reclaimer.keep(fd)
    }

    /// Has the reclaimer close unneeded file descriptors.
    pub(super) fn discard(&self, fds: impl IntoIterator<Item = OwnedFd>) {
        fds.into_iter().for_each(|fd| drop(self.adopt(fd)));
    }

    pub(super) fn reclaimer(&self) -> &Reclaimer {
        &self.reclaimer
    }

    /// Closes everything, and waits for that for `timeout` at most.
    pub(super) fn finish(self, timeout: Duration) {
        let Self { held, reclaimer, .. } = self;
        drop(held);
        reclaimer.finish(timeout);
    }

    /// Stores control memory of this many bytes.
    pub(super) fn keep_control(&mut self, fd: OwnedFd, bytes: u64) -> ControlMemory {
        ControlMemory { fd: self.keep(self.adopt(fd)), bytes }
    }

    fn keep(&mut self, fd: Donated) -> FdId {
        self.last += 1;
        let id = FdId(self.last);
        self.held.insert(id, Arc::new(self.reclaimer.trust(fd)));
        id
    }

    /// Checks the file descriptors of a message against its contents, and stores them if they match.
    pub(super) fn take(
        &mut self,
        chunks: &[u64],
        table: &wire::Table,
        fds: Vec<Donated>,
        expected: Expected,
    ) -> Result<Vec<FdId>, Refusal> {
        if chunks.len() > MAX_CHUNKS {
            return Err(Refusal::invalid(format!("{} chunks exceed the limit of {MAX_CHUNKS}", chunks.len())));
        }
        let chunk_fds = if expected.kind == Kind::Legacy { 0 } else { chunks.len() };
        let wanted = chunk_fds + usize::from(matches!(table, wire::Table::Fd { .. }));
        if fds.len() != wanted {
            return Err(Refusal::invalid(format!("{wanted} file descriptors are needed, {} arrived", fds.len())));
        }
        if chunks.iter().try_fold(0_u64, |sum, bytes| sum.checked_add(*bytes)).is_none() {
            return Err(Refusal::invalid("the chunks' lengths overflow"));
        }
        for (index, (bytes, fd)) in chunks.iter().zip(&fds[..chunk_fds]).enumerate() {
            if let Some(fd) = fd.fd() {
                check_chunk(index, fd, *bytes, expected)?;
            }
        }
        match table {
            wire::Table::Inline(bytes) if bytes.len() > MAX_INLINE_TABLE => {
                return Err(Refusal::invalid(format!("a table of {} bytes must be in a memfd", bytes.len())));
            }
            wire::Table::Inline(_) => {}
            wire::Table::Fd { bytes } => {
                if let Some(fd) = fds.last().and_then(Donated::fd) {
                    check_table(chunk_fds, fd, *bytes)?;
                }
            }
        }

        // Nothing is refused from here on, so the store keeps exactly the descriptors that the registry will know.
        Ok(fds.into_iter().map(|fd| self.keep(fd)).collect())
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

/// What a commit states about its chunks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    pub(super) kind: Kind,
    pub(super) mutable: bool,
    /// Whether the member runs on the simulated driver, whose memory consists of memfds.
    pub(super) simulated: bool,
}

/// Checks that the file descriptor at `index` of a message is the chunk that the message states.
fn check_chunk(index: usize, fd: BorrowedFd<'_>, bytes: u64, expected: Expected) -> Result<(), Refusal> {
    let Expected { kind, mutable, simulated } = expected;
    let fault = match (kind, classify(fd)) {
        // The driver exports memory of a GPU and of a NUMA node alike: importers ask the driver where the memory is.
        (Kind::Vmm | Kind::Pinned | Kind::Live, Ok(FdKind::NvidiaControl)) if !simulated => return Ok(()),
        (Kind::Vmm | Kind::Pinned | Kind::Live, Ok(FdKind::Memfd { .. })) if simulated => return Ok(()),
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
fn check_table(index: usize, fd: BorrowedFd<'_>, bytes: u64) -> Result<(), Refusal> {
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

/// Returns the refusal of a message whose file descriptors from `index` on did not arrive.
pub(super) fn missing(index: usize) -> Refusal {
    bad(index, FdFault::Missing)
}

/// Returns the refusal of a request because no file descriptor is free.
pub(super) fn no_fds() -> Refusal {
    let open_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    Refusal::Limit { limit: Limit::Fds, allowed: open_files, needed: open_files.saturating_add(1), holders: Vec::new() }
}

fn bad(index: usize, fault: FdFault) -> Refusal {
    Refusal::BadFd { index: index as u32, fault }
}

fn describe(found: Result<FdKind, partywall_os::Errno>) -> String {
    match found {
        Ok(FdKind::Memfd { .. }) => "a memfd".into(),
        Ok(FdKind::NvidiaControl) => "a file of the NVIDIA driver".into(),
        Ok(FdKind::Other(what)) => what,
        Err(errno) => format!("a file that cannot be examined ({errno})"),
    }
}
