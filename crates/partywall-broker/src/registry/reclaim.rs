//! Reclaims what a member held that has left, was evicted or is proved dead.
//!
//! Reclaiming has two steps, because the end of a process does not always end its work on a GPU. The first step
//! notifies the other members, so that nothing waits for the member any more. The second step, once nothing can write
//! or read its memory any more, gives that memory to others.

use std::collections::BTreeSet;

use super::{
    Registry,
    closing::PendingVersion,
    effect::{Effect, Effects},
    names::Version,
    people::{Ender, Eviction},
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
    ("topics and queues", |registry, member, departure, out| registry.detach(member, departure.into(), |_| true, out)),
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
        let Some(record) = self.people.member(member) else { return };
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
        match self.people.die(member) {
            Some((record, doubt)) => {
                let pid = record.identity.pid;
                let leases = record.all_leases();
                let bytes = record.bytes;
                tracing::warn!(%member, pid, ?doubt, leases, bytes, "is dead, and what it held is in quarantine");
                out.push(Effect::Quarantined(member));
            }
            None => self.give_back(member, Departure::Died, out),
        }
    }

    /// Runs the first step: ends everything that other members may wait for from this member.
    pub(super) fn notify(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        self.run(&NOTIFY, member, &departure, out);
    }

    /// Runs the second step: frees what a member held, and forgets the member.
    pub(super) fn give_back(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        let before = self.closing.released();
        let begun = out.len();
        self.run(&GIVE_BACK, member, &departure, out);
        let Some(record) = self.people.forget(member) else { return };
        // A row that is being cleared is freed by `RowCleared`; the row's next member would lose its own permits and
        // blocks otherwise.
        if !out[begun..].iter().any(|effect| matches!(effect, Effect::ClearRow { .. })) {
            self.people.give_back_row(record.row);
        }
        if departure == Departure::Died {
            self.closing.bury(member, record, before);
        }
    }

    /// Logs that released memory is closed.
    pub(super) fn closed(&mut self, id: CloseId) {
        for PendingVersion { name, version, named, bytes, owned } in self.closing.closed(id) {
            self.log(named, &name, owned, Change::Reclaimed { version, bytes });
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
            Departure::Left => (Ending::Withdrawn, self.people.ender(member)),
            Departure::Died => (Ending::OwnerDied, self.people.ender(member)),
            Departure::Evicted { by } => (Ending::Removed, by.clone()),
        };
        self.withdraw_names(member, ending, &by, out);
    }

    /// Drops a member's waits. An evicted member lives on, so its waits are completed with the refusal.
    fn end_waits(&mut self, member: MemberId, departure: &Departure, out: &mut Effects) {
        if matches!(departure, Departure::Evicted { .. })
            && let Some(record) = self.people.member(member)
            && let Some(Eviction { by, at }) = record.eviction
        {
            for ticket in record.waits.keys().copied().collect::<Vec<_>>() {
                self.conclude(member, ticket, Err(Refusal::Evicted { by, at }), out);
            }
        }
        self.drop_waits(member);
    }

    /// Detaches a member from those of its topics and queues for which `is_meant` is true: no process waits for it there
    /// any more. The member keeps its blocks.
    pub(super) fn detach(
        &self,
        member: MemberId,
        ending: TimelineEnding,
        is_meant: impl Fn(&Version) -> bool,
        out: &mut Effects,
    ) {
        let Some(row) = self.people.row(member) else { return };
        let meant = self.versions_of(member).map(|(_, version)| version).filter(|version| is_meant(version));
        let objects: BTreeSet<_> = meant.filter_map(|version| Some(version.memory.control?.object?.fd)).collect();
        out.extend(objects.into_iter().map(|object| Effect::Detach { object, row, ending }));
    }

    fn drop_leases(&mut self, member: MemberId, out: &mut Effects) {
        let Some(record) = self.people.member(member) else { return };
        let row = record.row;
        let holds = record.object_leases.clone();
        let leases = record.version_leases.clone();
        let mut control: Vec<_> = holds.into_iter().filter_map(|lease| self.drop_object_lease(lease, out)).collect();
        let pools = leases.into_iter().filter_map(|lease| self.drop_version_lease(lease, out));
        control.extend(pools.map(|control| control.slot_table()));
        if !control.is_empty() {
            self.closing.clear_row(row, control, out);
        }
    }
}
