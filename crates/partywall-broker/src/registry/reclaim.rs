//! Reclaims what a member held that has left, was evicted or is proved dead.
//!
//! Reclaiming has two steps, because the end of a process does not always end its work on a GPU. The first step
//! notifies the other members, so that nothing waits for the member any more. The second step, once nothing can write
//! or read its memory any more, gives that memory to others.

use std::collections::BTreeSet;

use super::{
    Registry,
    effect::{Effect, Effects},
    state::{Dead, Ender, Eviction, HeldBack, Life, Member, PendingClose, PendingVersion},
    types::{Change, CloseId, Ending, MemberId, Refusal, TimelineEnding},
};

/// How a member ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Departure {
    /// It left the domain itself.
    Left,
    /// It is proved dead.
    Died,
    /// Another member evicted it. Its process may still run.
    Evicted {
        /// The process that asked for it.
        by: Ender,
    },
}

impl From<&Departure> for TimelineEnding {
    fn from(departure: &Departure) -> Self {
        match departure {
            Departure::Left => Self::Closed,
            Departure::Died => Self::OwnerDied,
            Departure::Evicted { .. } => Self::Evicted,
        }
    }
}

/// Reclaims one kind of object from a member that is gone.
type Hook = fn(&mut Registry, MemberId, &Departure, &mut Effects);

/// The first step: one hook per kind of object, in the order in which they run. A new kind of object adds its hooks
/// here and below.
///
/// The order matters:
///
/// - Waits go first, so that later hooks cannot grant the member anything.
/// - Claims go before names: other members then see the same order as if the member had abandoned its claims.
/// - Waits in control memory end last, so that a woken waiter finds all names in their final state.
const NOTIFY: [(&str, Hook); 5] = [
    ("waits", Registry::end_waits),
    ("claims", |registry, member, _, out| registry.drop_claims(member, out)),
    ("owned names", Registry::drop_owned_names),
    ("timelines", |registry, member, departure, out| registry.end_timelines_of(member, departure.into(), out)),
    ("topics and queues", |registry, member, departure, out| registry.detach_objects(member, departure.into(), out)),
];

/// The second step. Names were withdrawn before the leases go, because an owned name is found by its owner's lease.
/// Memory goes last, when nothing refers to it.
const GIVE_BACK: [(&str, Hook); 3] = [
    ("cells", |registry, member, departure, _| registry.settle_cells_of(member, *departure == Departure::Died)),
    ("leases", |registry, member, _, out| registry.drop_leases(member, out)),
    ("memory", |registry, _, _, out| registry.drop_unreferenced(out)),
];

impl Registry {
    /// Ends the membership of a member that says it leaves. Leaving asserts that its work on the memory is over. For an
    /// evicted member, or one with a broken context, only the end of the process proves that.
    pub(super) fn leave(&mut self, member: MemberId, out: &mut Effects) {
        let Some(record) = self.members.get(&member) else { return };
        let is_believed = record.eviction.is_none() && !record.lost_context;
        self.notify(member, Departure::Left, out);
        if is_believed {
            self.give_back(member, Departure::Left, out);
            out.push(Effect::Disconnect(member));
        } else {
            out.push(Effect::HangUp(member));
        }
    }

    /// Reclaims a dead member, or puts its leases in quarantine if its work may continue.
    pub(super) fn bury(&mut self, member: MemberId, out: &mut Effects) {
        self.notify(member, Departure::Died, out);
        let Some(record) = self.members.get_mut(&member) else { return };
        self.deaths += 1;
        match record.doubt() {
            Some(doubt) if record.all_leases() > 0 || !record.cells.is_empty() => {
                let pid = record.identity.pid;
                let leases = record.all_leases();
                let bytes = record.bytes;
                tracing::warn!(%member, pid, ?doubt, leases, bytes, "is dead, and what it held is in quarantine");
                record.life = Life::Unproven;
                self.unproven_deaths += 1;
                out.push(Effect::Quarantined(member));
            }
            _ => self.give_back(member, Departure::Died, out),
        }
    }

    /// Runs the first step: ends everything that other members may wait for from this member.
    pub(super) fn notify(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        self.run(&NOTIFY, member, &departure, out);
    }

    /// Runs the second step: frees what a member held, and forgets the member.
    pub(super) fn give_back(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        let before = self.pending_close.versions.len();
        let begun = out.len();
        self.run(&GIVE_BACK, member, &departure, out);
        let Some(Member { identity, since, row, .. }) = self.members.remove(&member) else { return };
        // A row that is being cleared is freed by `RowCleared`; the row's next member would lose its own permits and
        // blocks otherwise.
        if !out[begun..].iter().any(|effect| matches!(effect, Effect::ClearRow { .. })) {
            self.rows.give_back(row);
        }
        let with_it = &self.pending_close.versions[before..];
        if departure == Departure::Died && !with_it.is_empty() {
            let bytes = with_it.iter().fold(0, |sum: u64, version| sum.saturating_add(version.bytes));
            self.pending_close.dead.insert(member, Dead { identity, since, bytes });
        }
    }

    /// Asks the server to confirm when everything that this event released is closed.
    pub(super) fn ask_for_closing(&mut self, out: &mut Effects) {
        let pending_close = std::mem::take(&mut self.pending_close);
        if !pending_close.versions.is_empty() {
            self.last_close += 1;
            let id = CloseId(self.last_close);
            self.closing.insert(id, pending_close);
            out.push(Effect::Confirm(id));
        }
    }

    /// Holds closes back while the permits and blocks of a dead member are still being returned, and emits them
    /// afterwards.
    pub(super) fn hold_back_closes(&mut self, out: &mut Effects) {
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

    /// Records that released memory is closed and back with the driver and the kernel.
    pub(super) fn closed(&mut self, id: CloseId) {
        let Some(PendingClose { mut versions, dead }) = self.closing.remove(&id) else { return };
        versions.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        for PendingVersion { name, version, named, bytes, owned } in versions {
            self.log(named, &name, owned, Change::Reclaimed { version, bytes });
        }
        for (member, Dead { bytes, .. }) in dead {
            tracing::info!(%member, bytes, "what it held is free");
        }
    }

    fn run(&mut self, hooks: &[(&str, Hook)], member: MemberId, departure: &Departure, out: &mut Effects) {
        for (kind, hook) in hooks {
            tracing::trace!(%member, kind, "reclaiming");
            hook(self, member, departure, out);
        }
    }

    fn drop_owned_names(&mut self, member: MemberId, departure: &Departure, out: &mut Effects) {
        let (ending, by) = match departure {
            Departure::Left => (Ending::Withdrawn, self.ender(member)),
            Departure::Died => (Ending::OwnerDied, self.ender(member)),
            Departure::Evicted { by } => (Ending::Removed, by.clone()),
        };
        self.withdraw_names(member, ending, &by, out);
    }

    /// Drops a member's waits. An evicted member lives on, so its waits are completed with the refusal.
    fn end_waits(&mut self, member: MemberId, departure: &Departure, out: &mut Effects) {
        if matches!(departure, Departure::Evicted { .. })
            && let Some(record) = self.members.get(&member)
            && let Some(Eviction { by, at }) = record.eviction
        {
            for ticket in record.waits.keys().copied().collect::<Vec<_>>() {
                self.conclude(member, ticket, Err(Refusal::Evicted { by, at }), out);
            }
        }
        self.drop_waits(member);
    }

    /// Detaches the member from its topics and queues: other members no longer wait for it there. The member keeps its
    /// blocks.
    pub(super) fn detach_objects(&self, member: MemberId, ending: TimelineEnding, out: &mut Effects) {
        let Some(record) = self.members.get(&member) else { return };
        let held = record.version_leases.iter().filter_map(|lease| self.version_leases.get(lease));
        let objects = held.filter_map(|lease| self.version(&lease.name, lease.version)?.memory.control?.object);
        let objects: BTreeSet<_> = objects.map(|memory| memory.fd).collect();
        out.extend(objects.into_iter().map(|object| Effect::Detach { object, row: record.row, ending }));
    }

    fn drop_leases(&mut self, member: MemberId, out: &mut Effects) {
        let Some(record) = self.members.get(&member) else { return };
        let row = record.row;
        let holds = record.object_leases.clone();
        let leases = record.version_leases.clone();
        let mut control: Vec<_> = holds.into_iter().filter_map(|lease| self.drop_object_lease(lease, out)).collect();
        let pools = leases.into_iter().filter_map(|lease| self.drop_version_lease(lease, out));
        control.extend(pools.map(|control| control.slot_table()));
        if !control.is_empty() {
            self.uncleared += 1;
            out.push(Effect::ClearRow { row, control });
        }
    }
}
