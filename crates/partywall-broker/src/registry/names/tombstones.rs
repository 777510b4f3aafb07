//! Tombstones: how names ended that do not exist any more. A request that comes a moment too late is refused with the
//! information that the name existed, and how and by which process it ended.

use std::{collections::BTreeMap, sync::Arc};

use partywall_wire::NameEnd;
use serde::{Deserialize, Serialize};

use crate::registry::{
    people::Owned,
    types::{Ending, Millis, Name},
};

/// The end of a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    pub(crate) ending: Ending,
    /// The version that was the latest.
    pub(crate) version: u64,
    /// The process that ended it: its owner, its remover, the evicting member or its last user.
    pub(crate) pid: u32,
    /// The command line of that process.
    pub(crate) command: Arc<str>,
    pub(crate) at: Millis,
    /// True if its memory was legacy memory, which is gone for all members.
    pub(crate) legacy: bool,
    /// The user to which the name belonged.
    pub(crate) owned: Owned,
}

/// The tombstones of the last minute, at most [`MOST`], of names that do not exist now.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Tombstones {
    by_name: BTreeMap<Name, (u64, Tombstone)>,
    by_age: BTreeMap<u64, Name>,
    last: u64,
}

impl Tombstones {
    pub(crate) fn put(&mut self, name: &Name, tombstone: Tombstone) {
        self.remove(name);
        self.last += 1;
        let now = tombstone.at;
        self.by_name.insert(name.clone(), (self.last, tombstone));
        self.by_age.insert(self.last, name.clone());
        while let Some(oldest) = self.by_age.first_entry() {
            let is_old = self.by_name.get(oldest.get()).is_none_or(|(_, tombstone)| tombstone.is_old(now));
            if !is_old && self.by_name.len() <= MOST {
                break;
            }
            self.by_name.remove(&oldest.remove());
        }
    }

    /// Forgets the end of a name that exists again.
    pub(crate) fn remove(&mut self, name: &Name) {
        if let Some((age, _)) = self.by_name.remove(name) {
            self.by_age.remove(&age);
        }
    }

    /// Returns the end of a name, or of a version of it, that ended less than a minute ago.
    pub(crate) fn find(&self, name: &Name, version: Option<u64>, now: Millis) -> Option<&Tombstone> {
        let (_, tombstone) = self.by_name.get(name)?;
        let meant = version.is_none_or(|version| version == tombstone.version);
        (meant && !tombstone.is_old(now)).then_some(tombstone)
    }
}

impl Tombstone {
    /// Returns the end as a refused request reports it.
    pub(crate) fn end(&self) -> NameEnd {
        let Self { ending, version, pid, at, .. } = *self;
        NameEnd { version, ending, pid, command: self.command.to_string(), at }
    }

    fn is_old(&self, now: Millis) -> bool {
        now.saturating_sub(self.at) >= REMEMBERED
    }
}

/// Maximum number of tombstones.
pub(crate) const MOST: usize = 1024;

/// How long a tombstone is kept, in milliseconds.
pub(crate) const REMEMBERED: Millis = 60_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(i: usize) -> Name {
        Name::new(&format!("{i}")).unwrap()
    }

    fn tombstone(at: Millis) -> Tombstone {
        let owned = Owned { uid: 0, shared: false };
        Tombstone { ending: Ending::OwnerDied, version: 1, pid: 1, command: "".into(), at, legacy: false, owned }
    }

    #[test]
    fn oldest_tombstones_are_forgotten_first() {
        let mut all = Tombstones::default();
        let find = |all: &Tombstones, i, version| all.find(&name(i), version, 0).is_some();
        for i in 0..=MOST {
            all.put(&name(i), tombstone(0));
        }
        assert_eq!((all.by_name.len(), all.by_age.len()), (MOST, MOST));
        assert!(!find(&all, 0, None));
        assert!(find(&all, 1, Some(1)) && !find(&all, 1, Some(2)));

        all.put(&name(1), tombstone(0));
        all.remove(&name(3));
        all.put(&name(MOST + 1), tombstone(0));
        all.put(&name(MOST + 2), tombstone(0));
        assert_eq!((all.by_name.len(), all.by_age.len()), (MOST, MOST));
        assert!(find(&all, 1, None), "it is younger than it was");
        assert!(!find(&all, 2, None));
    }

    #[test]
    fn tombstones_are_forgotten_after_a_minute() {
        let mut all = Tombstones::default();
        all.put(&name(0), tombstone(5));
        all.put(&name(1), tombstone(6));
        assert!(all.find(&name(0), None, 5 + REMEMBERED - 1).is_some());
        assert!(all.find(&name(0), None, 5 + REMEMBERED).is_none());
        assert!(all.find(&name(0), None, 0).is_some(), "the clock may be set back");
        all.put(&name(2), tombstone(5 + REMEMBERED));
        assert_eq!(all.by_name.keys().cloned().collect::<Vec<_>>(), [name(1), name(2)], "old ones take no memory");
        assert_eq!(all.by_age.len(), 2);
    }
}
