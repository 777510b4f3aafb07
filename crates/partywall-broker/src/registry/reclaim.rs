//! What happens to the things of a member that has left or is proved dead.
//!
//! It happens in two parts, because a death that is proved of a process is not always the end of its work on a GPU. In
//! the first part others learn of it, and nobody waits for the member any more. In the second what it held is given to
//! others: only when nothing of it can be written or read any more.

use super::{Registry, effect::Effect, tombstones::Ending, types::MemberId};

/// How a member goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parting {
    /// It has said good-bye.
    Left,
    /// It is proved dead.
    Died,
}

/// Takes one kind of object away from a member that is gone.
type Hook = fn(&mut Registry, MemberId, Parting, &mut Vec<Effect>);

/// The first part, one hook a kind of object, in the order in which they run. Objects to come (pools, …) add theirs
/// here or below.
///
/// The order matters: the dead must not be granted anything by what follows, so its waits go first; others get its
/// claims before they see its names go, as they would if it had abandoned them; and what others wait for in control
/// memory ends when all names are as they will be, so that who is woken finds them so.
const TELL: [(&str, Hook); 3] = [
    ("waits", |registry, member, _, _| registry.drop_waits(member)),
    ("claims", |registry, member, _, out| registry.drop_claims(member, out)),
    ("owned names", Registry::drop_owned_names),
];

/// The second part. Names went before leases, because an owned name is found by its owner's lease; memory goes last, when
/// nothing refers to it.
const GIVE_BACK: [(&str, Hook); 2] = [
    ("leases", |registry, member, _, out| registry.drop_leases(member, out)),
    ("memory", |registry, _, _, out| registry.sweep(out)),
];

impl Registry {
    /// Runs all hooks and forgets the member.
    pub(super) fn reclaim(&mut self, member: MemberId, parting: Parting, out: &mut Vec<Effect>) {
        self.run(&TELL, member, parting, out);
        self.run(&GIVE_BACK, member, parting, out);
        if let Some(record) = self.members.remove(&member) {
            self.rows.give_back(record.row);
        }
    }

    fn run(&mut self, hooks: &[(&str, Hook)], member: MemberId, parting: Parting, out: &mut Vec<Effect>) {
        for (kind, hook) in hooks {
            tracing::trace!(%member, kind, "reclaiming");
            hook(self, member, parting, out);
        }
    }

    fn drop_owned_names(&mut self, member: MemberId, parting: Parting, out: &mut Vec<Effect>) {
        let ending = match parting {
            Parting::Left => Ending::Withdrawn,
            Parting::Died => Ending::OwnerDied,
        };
        let Some(record) = self.members.get(&member) else { return };
        for lease in record.leases.iter().copied().collect::<Vec<_>>() {
            self.withdraw_if_owned_by(lease, ending, out);
        }
    }

    fn drop_leases(&mut self, member: MemberId, out: &mut Vec<Effect>) {
        let Some(record) = self.members.get(&member) else { return };
        for lease in record.leases.iter().copied().collect::<Vec<_>>() {
            self.drop_lease(lease, out);
        }
    }
}
