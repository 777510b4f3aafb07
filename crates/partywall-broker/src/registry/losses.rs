//! GPUs that have lost their memory: by a reset, or by a fault that needs one.
//!
//! The file descriptors stay open, but the driver does not import them any more. The server finds out which ones
//! ([`Event::DeviceLost`](super::Event::DeviceLost)), because no member's word may end another member's names.

use std::collections::BTreeSet;

use super::{
    Registry,
    effect::Effects,
    state::{Ender, Version},
    types::{Ending, FdId, MemberId, Place, Staleness},
};

impl Version {
    /// Returns the descriptor of its first chunk. Legacy memory has none.
    fn first_chunk(&self) -> Option<FdId> {
        self.memory.chunks.first()?.fd
    }

    /// Returns whether its memory was found lost.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.stale, Some(Staleness::DeviceLost(_)))
    }
}

impl Registry {
    /// Returns the first chunk of each version on a GPU that is not known to be lost. A version grows by younger chunks, so
    /// its first chunk is lost if any is.
    pub(crate) fn chunks_on(&self, gpu: [u8; 16]) -> Vec<FdId> {
        let versions = self.entries.values().flat_map(|entry| entry.versions.values());
        let on_gpu = versions.filter(|version| version.memory.place == Place::Gpu(gpu) && !version.is_lost());
        on_gpu.filter_map(Version::first_chunk).collect()
    }

    /// Ends the versions on a GPU that have one of these first chunks: their names, and further views of what members have
    /// open.
    pub(super) fn lose(&mut self, gpu: [u8; 16], chunks: &[FdId], out: &mut Effects) {
        let chunks: BTreeSet<_> = chunks.iter().copied().collect();
        let mut named = Vec::new();
        let mut lost = BTreeSet::new();
        let mut readers: BTreeSet<MemberId> = BTreeSet::new();
        for (name, entry) in &mut self.entries {
            for (number, version) in &mut entry.versions {
                let first = version.first_chunk().filter(|first| chunks.contains(first));
                if let Some(first) = first
                    && version.memory.place == Place::Gpu(gpu)
                    && !version.is_lost()
                {
                    version.stale = Some(Staleness::DeviceLost(gpu));
                    version.withdrawn = true;
                    readers.extend(version.holders.keys().copied());
                    lost.insert(first);
                    named.push((name.clone(), *number));
                }
            }
        }
        let ender = Ender { pid: 0, command: "".into() };
        for (name, number) in named {
            if self.entries.get(&name).is_some_and(|entry| entry.latest == Some(number)) {
                self.withdraw(&name, Ending::DeviceLost(gpu), &ender, None, out);
            } else {
                self.notify_withdrawn(&name, out);
            }
        }
        let is_lost = |version: &Version| version.first_chunk().is_some_and(|first| lost.contains(&first));
        for reader in readers {
            self.report_stale(reader, is_lost, out);
            self.detach_from_topics(reader, is_lost, out);
        }
    }
}
