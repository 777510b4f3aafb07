//! The processes that have most of what a limit counts. A refusal names them, so that its reader knows what to end.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use partywall_wire::{LimitHolder, Refusal};

use super::{
    Registry,
    names::Version,
    people::{Holders, Life, Owned},
    types::{ControlMemory, Limit, MemberId, Place},
};

/// What processes have, by user and pid.
type Held = BTreeMap<(u32, u32), u64>;

impl Registry {
    /// Adds the processes that have most to a refusal because of a limit: those that a user may see, which are its own,
    /// or all for the broker's user.
    pub(crate) fn with_holders(&self, mut refusal: Refusal, asker: u32) -> Refusal {
        match &mut refusal {
            Refusal::Limit { limit, holders, .. } if holders.is_empty() => {
                *holders = self.limit_holders(*limit, None, asker);
            }
            Refusal::Quota { uid, limit, holders, .. } if holders.is_empty() => {
                *holders = self.limit_holders(*limit, Some(*uid), asker);
            }
            _ => {}
        }
        refusal
    }

    /// Returns the processes that have most of what a limit counts, of one user or of all.
    fn limit_holders(&self, limit: Limit, of: Option<u32>, asker: u32) -> Vec<LimitHolder> {
        let mut held = Held::new();
        match limit {
            Limit::Names => {
                self.count_versions(&mut held, |is_latest, _| u64::from(is_latest));
                self.count_objects(&mut held, |_, _| 1);
                for claim in self.names.claims().values() {
                    self.count_member(&mut held, claim.member, 1);
                }
            }
            Limit::Bytes => {
                self.count_versions(&mut held, |_, version| {
                    version.memory.held_bytes().saturating_add(version.memory.other_bytes())
                });
                self.count_objects(&mut held, |_, memory| memory.map_or(0, |memory| memory.bytes));
            }
            Limit::Pinned(node) => self.count_versions(&mut held, |_, version| match version.memory.facts.place {
                Place::Pinned(at) if node.is_none_or(|node| node == at) => version.memory.held_bytes(),
                _ => 0,
            }),
            Limit::Fds => {
                self.count_versions(&mut held, |_, version| version.memory.fds().len() as u64);
                self.count_objects(&mut held, |_, memory| memory.map_or(0, |_| 1));
            }
            Limit::Timelines => self.count_objects(&mut held, |is_timeline, _| u64::from(is_timeline)),
            Limit::Semaphores => self.count_objects(&mut held, |is_timeline, _| u64::from(!is_timeline)),
            Limit::Clients | Limit::Operators | Limit::Leases | Limit::Waits => {
                for member in self.people.members().values() {
                    let is_operator = member.identity.operator;
                    let amount = match limit {
                        Limit::Operators => u64::from(is_operator),
                        Limit::Leases => member.all_leases(),
                        Limit::Waits => member.waits.len() as u64,
                        // Members that have hung up count for their user alone.
                        _ if of.is_none() && !matches!(member.life, Life::Alive | Life::HeldByChild) => 0,
                        _ => u64::from(!is_operator),
                    };
                    *held.entry((member.identity.uid, member.identity.pid)).or_default() += amount;
                }
            }
            // Limits of one process or one object.
            _ => {}
        }
        let counts = |uid: u32| of.is_none_or(|of| of == uid) && [uid, self.people.bounds().user].contains(&asker);
        largest(held.into_iter().filter(|((uid, _), amount)| *amount > 0 && counts(*uid)))
    }

    /// Counts versions for the processes that have committed them. `amount` gets whether the version is its name's
    /// latest.
    fn count_versions(&self, held: &mut Held, amount: impl Fn(bool, &Version) -> u64) {
        for entry in self.names.entries().values() {
            for (number, version) in &entry.versions {
                let amount = amount(entry.latest == Some(*number), version);
                *held.entry((version.uid, version.committer)).or_default() += amount;
            }
        }
    }

    /// Counts timelines and semaphores for each process that has them open and belongs to their user: these could
    /// close them. `amount` gets whether the object is a timeline, and the memory that it brings: timelines that share
    /// a slab bring it once.
    fn count_objects(&self, held: &mut Held, amount: impl Fn(bool, Option<ControlMemory>) -> u64) {
        let its = |owned: Owned, holders: &Holders| {
            let members = holders.keys().copied();
            members.filter(|member| self.people.uid_of(*member) == owned.uid).collect::<Vec<_>>()
        };
        let mut slabs = BTreeSet::new();
        for timeline in self.objects.timelines().values() {
            let slab = self.objects.cells.slab_of(timeline.present);
            for member in its(timeline.owned, &timeline.holders) {
                let slab = slab.filter(|slab| slabs.insert((member, slab.fd)));
                self.count_member(held, member, amount(true, slab));
            }
        }
        for semaphore in self.objects.semaphores().values() {
            for member in its(semaphore.owned, &semaphore.holders) {
                self.count_member(held, member, amount(false, Some(semaphore.memory)));
            }
        }
    }

    fn count_member(&self, held: &mut Held, member: MemberId, amount: u64) {
        if let Some(record) = self.people.member(member) {
            *held.entry((record.identity.uid, record.identity.pid)).or_default() += amount;
        }
    }
}

/// Returns those that have most, of what processes have by user and pid.
pub(crate) fn largest(amounts: impl IntoIterator<Item = ((u32, u32), u64)>) -> Vec<LimitHolder> {
    let mut holders: Vec<_> = amounts.into_iter().map(|((uid, pid), held)| LimitHolder { pid, uid, held }).collect();
    holders.sort_by_key(|holder| Reverse(holder.held));
    holders.truncate(SHOWN);
    holders
}

/// The most processes that a refusal names.
const SHOWN: usize = 3;
