//! What happens to the things of a member that has left or is proved dead.

use super::{Registry, effect::Effect, tombstones::Ending, types::MemberId};

/// Takes one kind of object away from a member that is gone.
type Hook = fn(&mut Registry, MemberId, Ending, &mut Vec<Effect>);

/// One hook a kind of object, in the order in which they run. Objects to come (timelines, pools, …) add theirs here.
///
/// The order matters: the dead must not be granted anything by what follows, so its waits go first; others get its
/// claims before they see its names go, as they would if it had abandoned them; names go before leases, because an
/// owned name is found by its owner's lease; and memory goes last, when nothing refers to it.
const HOOKS: [(&str, Hook); 5] = [
    ("waits", |registry, member, _, _| registry.drop_waits(member)),
    ("claims", |registry, member, _, out| registry.drop_claims(member, out)),
    ("owned names", Registry::drop_owned_names),
    ("leases", |registry, member, _, out| registry.drop_leases(member, out)),
    ("memory", |registry, _, _, out| registry.sweep(out)),
];

impl Registry {
    /// Runs all hooks and forgets the member. `ending` is what its going means for those who miss something of it.
    pub(super) fn reclaim(&mut self, member: MemberId, ending: Ending, out: &mut Vec<Effect>) {
        for (kind, hook) in HOOKS {
            tracing::trace!(%member, kind, "reclaiming");
            hook(self, member, ending, out);
        }
        self.members.remove(&member);
    }

    fn drop_owned_names(&mut self, member: MemberId, ending: Ending, out: &mut Vec<Effect>) {
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
