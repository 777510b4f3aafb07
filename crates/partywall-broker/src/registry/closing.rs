//! Memory that was released, until the server has closed it, and the rows of members until they are cleared.
//!
//! Nothing is closed while a row is being cleared, because the server still returns permits and blocks in control
//! memory.

use std::collections::BTreeMap;
#[cfg(any(test, fuzzing))]
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{
    effect::{Effect, Effects},
    event::Identity,
    people::{Member, Owned},
    types::{CloseId, FdId, MemberId, Millis, Name, Named},
};

/// What the server closes and clears.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Closing {
    /// Memory that the current event released. Empty between events.
    pending: PendingClose,
    /// Memory that was released and is not closed yet.
    unclosed: BTreeMap<CloseId, PendingClose>,
    /// Number of rows that are being cleared.
    uncleared: usize,
    held_back: HeldBack,
    last: u64,
}

/// Memory that one event released, until the server reports that it is closed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PendingClose {
    pub(super) versions: Vec<PendingVersion>,
    /// Dead members whose end released some of the versions.
    pub(super) dead: BTreeMap<MemberId, Dead>,
}

/// Closes and confirmations that wait until no row is being cleared.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct HeldBack {
    pub(super) closes: Vec<FdId>,
    /// Confirmations of these closes and of earlier ones.
    pub(super) confirms: Vec<CloseId>,
}

/// A version whose memory is being closed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PendingVersion {
    pub(super) name: Name,
    pub(super) version: u64,
    pub(super) named: Named,
    pub(super) bytes: u64,
    pub(super) owned: Owned,
}

/// A dead member whose memory is being closed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Dead {
    pub(super) identity: Identity,
    pub(super) since: Millis,
    pub(super) bytes: u64,
}

impl Closing {
    /// Has a released version reported once it is closed.
    pub(super) fn release(&mut self, version: PendingVersion) {
        self.pending.versions.push(version);
    }

    /// Returns the number of versions that the current event has released so far.
    pub(super) fn released(&self) -> usize {
        self.pending.versions.len()
    }

    /// Lists a dead member with those of the released versions that follow the first `before`, until these are closed.
    pub(super) fn bury(&mut self, id: MemberId, member: Member, before: usize) {
        let with_it = &self.pending.versions[before..];
        if !with_it.is_empty() {
            let bytes = with_it.iter().fold(0, |sum: u64, version| sum.saturating_add(version.bytes));
            self.pending.dead.insert(id, Dead { identity: member.identity, since: member.since, bytes });
        }
    }

    /// Asks the server to confirm when everything that this event released is closed.
    pub(super) fn ask(&mut self, out: &mut Effects) {
        let pending = std::mem::take(&mut self.pending);
        if !pending.versions.is_empty() {
            self.last += 1;
            let id = CloseId(self.last);
            self.unclosed.insert(id, pending);
            out.push(Effect::Confirm(id));
        }
    }

    /// Asks the server to return the permits and blocks of a row whose member is gone.
    pub(super) fn clear_row(&mut self, row: u16, control: Vec<FdId>, out: &mut Effects) {
        self.uncleared += 1;
        out.push(Effect::ClearRow { row, control });
    }

    /// Records that a row is cleared.
    pub(super) fn row_cleared(&mut self) {
        self.uncleared -= 1;
    }

    /// Holds closes back while the permits and blocks of a dead member are still being returned, and emits them
    /// afterwards.
    pub(super) fn hold_back(&mut self, out: &mut Effects) {
        if self.uncleared == 0 {
            let HeldBack { closes, confirms } = std::mem::take(&mut self.held_back);
            if !closes.is_empty() {
                out.push(Effect::Close(closes));
            }
            out.extend(confirms.into_iter().map(Effect::Confirm));
        } else {
            let is_close = |effect: &mut Effect| matches!(effect, Effect::Close(_) | Effect::Confirm(_));
            for effect in out.extract_if(.., is_close) {
                match effect {
                    Effect::Close(fds) => self.held_back.closes.extend(fds),
                    Effect::Confirm(id) => self.held_back.confirms.push(id),
                    _ => {}
                }
            }
        }
    }

    /// Records that released memory is closed and back with the driver and the kernel. Returns its versions in order.
    pub(super) fn closed(&mut self, id: CloseId) -> Vec<PendingVersion> {
        let Some(PendingClose { mut versions, dead }) = self.unclosed.remove(&id) else { return Vec::new() };
        for (member, Dead { bytes, .. }) in dead {
            tracing::info!(%member, bytes, "what it held is free");
        }
        versions.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        versions
    }

    /// Returns the dead members whose memory is being closed.
    pub(super) fn dead(&self) -> impl Iterator<Item = (&MemberId, &Dead)> {
        self.unclosed.values().flat_map(|pending| &pending.dead)
    }

    /// Returns the closes that the server was asked to confirm.
    pub(super) fn unconfirmed(&self) -> Vec<CloseId> {
        self.unclosed.keys().copied().filter(|id| !self.held_back.confirms.contains(id)).collect()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn audit(&self, unclosed: &BTreeSet<CloseId>) -> BTreeSet<FdId> {
        assert!(self.pending.versions.is_empty() && self.pending.dead.is_empty());
        let mut unconfirmed = unclosed.clone();
        for id in &self.held_back.confirms {
            assert!(unconfirmed.insert(*id));
        }
        let held_back: BTreeSet<_> = self.held_back.closes.iter().copied().collect();
        assert!(self.uncleared > 0 || held_back.is_empty() && self.held_back.confirms.is_empty());
        assert_eq!(self.unclosed.keys().copied().collect::<BTreeSet<_>>(), unconfirmed);
        held_back
    }
}
