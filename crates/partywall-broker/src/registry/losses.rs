//! Memory that is lost: of a GPU by a reset, or by a fault that needs one; of a NUMA node with the driver that pinned
//! it.
//!
//! The file descriptors stay open, but the driver does not import them any more. The server finds out which ones
//! ([`Event::DeviceLost`](super::Event::DeviceLost)), because no member's word may end another member's names. The
//! result is one event, so the journal has all of it or nothing. It names chunks, not versions, because a name may have
//! got another version meanwhile. Lost versions are stale, as after a withdrawal.
//!
//! Memory of kind `legacy` has no descriptor that could be checked. Its publisher's context is lost, and the names end
//! with that process.

use std::collections::BTreeSet;

use super::{
    Registry,
    effect::Effects,
    people::Ender,
    state::Version,
    types::{Ending, FdId, MemberId, Place, Staleness, TimelineEnding},
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
    /// Returns the first chunk of each version at a place of the driver that is not known to be lost. A version grows
    /// by younger chunks, so its first chunk is lost if any is.
    pub(crate) fn chunks_at(&self, place: Place) -> Vec<FdId> {
        let versions = self.entries.values().flat_map(|entry| entry.versions.values());
        let is_there = |version: &&Version| version.memory.facts.place == place && !version.is_lost();
        let there = versions.map(Box::as_ref).filter(|version| place.needs_driver() && is_there(version));
        there.filter_map(Version::first_chunk).collect()
    }

    /// Returns the NUMA nodes with pinned memory.
    pub(crate) fn nodes(&self) -> Vec<Place> {
        self.people.totals().places.keys().copied().filter(|place| matches!(place, Place::Pinned(_))).collect()
    }

    /// Ends the versions at a place that have one of these first chunks: their names, and further views of those that
    /// members have open.
    pub(super) fn lose(&mut self, place: Place, chunks: &[FdId], out: &mut Effects) {
        let chunks: BTreeSet<_> = chunks.iter().copied().collect();
        let mut named = Vec::new();
        let mut lost = BTreeSet::new();
        let mut readers: BTreeSet<MemberId> = BTreeSet::new();
        for (name, entry) in &mut self.entries {
            for (number, version) in &mut entry.versions {
                let first = version.first_chunk().filter(|first| chunks.contains(first));
                if let Some(first) = first
                    && version.memory.facts.place == place
                    && !version.is_lost()
                {
                    version.stale = Some(Staleness::DeviceLost(place));
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
                self.withdraw(&name, Ending::DeviceLost(place), &ender, None, out);
            } else {
                self.notify_withdrawn(&name, out);
            }
        }
        let is_lost = |version: &Version| version.first_chunk().is_some_and(|first| lost.contains(&first));
        for reader in readers {
            self.report_stale(reader, is_lost, out);
            self.detach(reader, TimelineEnding::Closed, |version| is_lost(version) && version.is_topic(), out);
        }
    }
}
