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
    names::Version,
    people::Ender,
    types::{Ending, FdId, Place, TimelineEnding},
};

impl Registry {
    /// Returns the first chunk of each version at a place of the driver that is not known to be lost. A version grows
    /// by younger chunks, so its first chunk is lost if any is.
    pub(crate) fn chunks_at(&self, place: Place) -> Vec<FdId> {
        let is_there = |version: &&Version| version.memory.facts.place == place && !version.is_lost();
        let there = self.names.versions().filter(|version| place.needs_driver() && is_there(version));
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
        let lost = self.names.lose(place, &chunks);
        let ender = Ender { pid: 0, command: "".into() };
        for (name, number) in lost.versions {
            if self.names.is_latest(&name, number) {
                self.withdraw(&name, Ending::DeviceLost(place), &ender, None, out);
            } else {
                self.notify_withdrawn(&name, out);
            }
        }
        let is_lost = |version: &Version| version.first_chunk().is_some_and(|first| lost.chunks.contains(&first));
        for reader in lost.readers {
            self.report_stale(reader, is_lost, out);
            self.detach(reader, TimelineEnding::Closed, |version| is_lost(version) && version.is_topic(), out);
        }
    }
}
