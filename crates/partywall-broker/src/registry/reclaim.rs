//! What happens to the things of a member that has left or is proved dead.
//!
//! It happens in two parts, because a death that is proved of a process is not always the end of its work on a GPU. In
//! the first part the other members are notified, and nothing waits for the member any more. In the second part what it
//! held is given to others, once none of it can be written or read any more.

use std::collections::BTreeSet;

use super::{
    Registry,
    effect::{Effect, Effects, Refused},
    state::{Dead, Eviction, Life, Member, PendingClose, PendingVersion},
    types::{CellEnding, Change, CloseId, Ending, MemberId},
};

/// How a member goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Departure {
    /// It has said good-bye.
    Left,
    /// It is proved dead.
    Died,
    /// It was evicted by this member. It may live on.
    Evicted {
        /// The member that asked for it.
        by: MemberId,
    },
}

impl From<Departure> for CellEnding {
    fn from(departure: Departure) -> Self {
        match departure {
            Departure::Left => Self::Closed,
            Departure::Died => Self::OwnerDied,
            Departure::Evicted { .. } => Self::Evicted,
        }
    }
}

/// Takes one kind of object away from a member that is gone.
type Hook = fn(&mut Registry, MemberId, Departure, &mut Effects);

/// The first part, one hook a kind of object, in the order in which they run. Objects to come add theirs here or below.
///
/// The order matters: the dead must not be granted anything by what follows, so its waits go first; others get its
/// claims before they see its names go, as they would if it had abandoned them; and what others wait for in control
/// memory ends when all names are as they will be, so that a woken waiter finds them so.
const NOTIFY: [(&str, Hook); 5] = [
    ("waits", Registry::end_waits),
    ("claims", |registry, member, _, out| registry.drop_claims(member, out)),
    ("owned names", Registry::drop_owned_names),
    ("timelines", |registry, member, departure, out| registry.end_timelines_of(member, departure.into(), out)),
    ("topics and queues", |registry, member, departure, out| registry.detach_objects(member, departure.into(), out)),
];

/// The second part. Names went before leases, because an owned name is found by its owner's lease; memory goes last,
/// when nothing refers to it.
const GIVE_BACK: [(&str, Hook); 3] = [
    ("cells", |registry, member, departure, _| registry.settle_cells_of(member, departure == Departure::Died)),
    ("leases", |registry, member, _, out| registry.drop_leases(member, out)),
    ("memory", |registry, _, _, out| registry.drop_unreferenced(out)),
];

impl Registry {
    /// The member has said good-bye. That is its word that its work on the memory is over; of one that was evicted, or
    /// whose context is broken, only the end of the process says so.
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

    /// The member is dead, as far as a process can be.
    pub(super) fn bury(&mut self, member: MemberId, out: &mut Effects) {
        self.notify(member, Departure::Died, out);
        let Some(record) = self.members.get_mut(&member) else { return };
        match record.doubt() {
            Some(doubt) if record.all_leases() > 0 || !record.cells.is_empty() => {
                let pid = record.identity.pid;
                let leases = record.all_leases();
                let bytes = record.bytes;
                tracing::warn!(%member, pid, ?doubt, leases, bytes, "is dead, and what it held is in quarantine");
                record.life = Life::Unproven;
                out.push(Effect::Quarantined(member));
            }
            _ => self.give_back(member, Departure::Died, out),
        }
    }

    /// Lets others know that a member is to be reckoned with no more.
    pub(super) fn notify(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        self.run(&NOTIFY, member, departure, out);
    }

    /// Gives what a member held to others, and forgets it as soon as that is closed.
    pub(super) fn give_back(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        let before = self.pending_close.versions.len();
        let begun = out.len();
        self.run(&GIVE_BACK, member, departure, out);
        let Some(Member { identity, since, row, .. }) = self.members.remove(&member) else { return };
        // Else its permits and blocks would be returned once they are those of the row's next member.
        if !out[begun..].iter().any(|effect| matches!(effect, Effect::ClearRow { .. })) {
            self.rows.give_back(row);
        }
        let with_it = &self.pending_close.versions[before..];
        if departure == Departure::Died && !with_it.is_empty() {
            let bytes = with_it.iter().fold(0, |sum: u64, version| sum.saturating_add(version.bytes));
            self.pending_close.dead.insert(member, Dead { identity, since, bytes });
        }
    }

    /// Asks for a confirmation once everything that this event released is closed.
    pub(super) fn ask_for_closing(&mut self, out: &mut Effects) {
        let pending_close = std::mem::take(&mut self.pending_close);
        if !pending_close.versions.is_empty() {
            self.last_close += 1;
            let id = CloseId(self.last_close);
            self.closing.insert(id, pending_close);
            out.push(Effect::Confirm(id));
        }
    }

    /// Holds closes back until everything that dead members had in control memory is with others, and then lets them go.
    pub(super) fn hold_back_closes(&mut self, out: &mut Effects) {
        if self.uncleared == 0 {
            out.append(&mut self.held_back);
        } else {
            let is_close = |effect: &mut Effect| matches!(effect, Effect::Close(_) | Effect::Confirm(_));
            self.held_back.extend(out.extract_if(.., is_close));
        }
    }

    /// Records that released memory is closed: the driver and the kernel have taken it back.
    pub(super) fn closed(&mut self, id: CloseId) {
        let Some(PendingClose { mut versions, dead }) = self.closing.remove(&id) else { return };
        versions.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        for PendingVersion { name, version, named, bytes } in versions {
            self.log(named, &name, Change::Reclaimed { version, bytes });
        }
        for (member, Dead { bytes, .. }) in dead {
            tracing::info!(%member, bytes, "what it held is free");
        }
    }

    fn run(&mut self, hooks: &[(&str, Hook)], member: MemberId, departure: Departure, out: &mut Effects) {
        for (kind, hook) in hooks {
            tracing::trace!(%member, kind, "reclaiming");
            hook(self, member, departure, out);
        }
    }

    fn drop_owned_names(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        let (ending, by) = match departure {
            Departure::Left => (Ending::Withdrawn, member),
            Departure::Died => (Ending::OwnerDied, member),
            Departure::Evicted { by } => (Ending::Removed, by),
        };
        self.withdraw_names(member, ending, by, out);
    }

    /// Drops a member's waits. An evicted member lives on, so its waits are completed with the refusal.
    fn end_waits(&mut self, member: MemberId, departure: Departure, out: &mut Effects) {
        if matches!(departure, Departure::Evicted { .. })
            && let Some(record) = self.members.get(&member)
            && let Some(Eviction { by, at }) = record.eviction
        {
            for ticket in record.waits.keys().copied().collect::<Vec<_>>() {
                self.conclude(member, ticket, Err(Refused::Evicted { by, at }), out);
            }
        }
        self.drop_waits(member);
    }

    /// What others do in a topic or queue no longer depends on the member, whatever it holds there.
    pub(super) fn detach_objects(&self, member: MemberId, ending: CellEnding, out: &mut Effects) {
        let Some(record) = self.members.get(&member) else { return };
        let held = record.leases.iter().filter_map(|lease| self.leases.get(lease));
        let objects = held.filter_map(|lease| self.version(&lease.name, lease.version)?.memory.control?.object);
        let objects: BTreeSet<_> = objects.map(|memory| memory.fd).collect();
        out.extend(objects.into_iter().map(|object| Effect::Detach { object, row: record.row, ending }));
    }

    fn drop_leases(&mut self, member: MemberId, out: &mut Effects) {
        let Some(record) = self.members.get(&member) else { return };
        let row = record.row;
        let holds = record.holds.clone();
        let leases = record.leases.clone();
        let mut control: Vec<_> = holds.into_iter().filter_map(|lease| self.drop_hold(lease, out)).collect();
        let pools = leases.into_iter().filter_map(|lease| self.drop_lease(lease, out));
        control.extend(pools.map(|control| control.slot_table()));
        if !control.is_empty() {
            self.uncleared += 1;
            out.push(Effect::ClearRow { row, control });
        }
    }
}
