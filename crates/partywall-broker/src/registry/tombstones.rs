//! What became of names of legacy memory. Who asks for one after its end is told how it ended, not just that nothing
//! is there: its publisher's death is the usual reason, and the asker is the one who suffers from it.

use std::collections::BTreeMap;

use super::{
    effect::Refused,
    types::{Millis, Name},
};

/// How a name of legacy memory ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its publisher dropped it or left, or somebody removed it.
    Withdrawn,
    /// Its publisher is proved dead.
    OwnerDied,
}

/// The end of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tombstone {
    pub(crate) ending: Ending,
    /// The version that was the latest.
    pub(crate) version: u64,
    /// Who ended it: the remover, else the publisher.
    pub(crate) pid: u32,
    pub(crate) at: Millis,
}

/// The ends of names that are not there now, the last [`MOST`] of them.
#[derive(Debug, Default)]
pub(super) struct Tombstones {
    by_name: BTreeMap<Name, (u64, Tombstone)>,
    by_age: BTreeMap<u64, Name>,
    last: u64,
}

impl Tombstones {
    pub(super) fn put(&mut self, name: &Name, tombstone: Tombstone) {
        self.remove(name);
        self.last += 1;
        self.by_name.insert(name.clone(), (self.last, tombstone));
        self.by_age.insert(self.last, name.clone());
        if self.by_age.len() > MOST
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.by_name.remove(&oldest);
        }
    }

    /// The name is there again.
    pub(super) fn remove(&mut self, name: &Name) {
        if let Some((age, _)) = self.by_name.remove(name) {
            self.by_age.remove(&age);
        }
    }

    /// The refusal of opening a name, or a version of it, that has ended.
    pub(super) fn refusal(&self, name: &Name, version: Option<u64>) -> Option<Refused> {
        let (_, tombstone) = self.by_name.get(name)?;
        let meant = version.is_none_or(|version| version == tombstone.version);
        meant.then(|| Refused::Ended { name: name.clone(), tombstone: *tombstone })
    }
}

/// How many are kept.
const MOST: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut all = Tombstones::default();
        let name = |i: usize| Name::new(format!("{i}"));
        let tombstone = Tombstone { ending: Ending::OwnerDied, version: 1, pid: 1, at: 0 };
        for i in 0..=MOST {
            all.put(&name(i), tombstone);
        }
        assert_eq!((all.by_name.len(), all.by_age.len()), (MOST, MOST));
        assert_eq!(all.refusal(&name(0), None), None);
        assert!(all.refusal(&name(1), Some(1)).is_some() && all.refusal(&name(1), Some(2)).is_none());

        all.put(&name(1), tombstone);
        all.remove(&name(3));
        all.put(&name(MOST + 1), tombstone);
        all.put(&name(MOST + 2), tombstone);
        assert_eq!((all.by_name.len(), all.by_age.len()), (MOST, MOST));
        assert!(all.refusal(&name(1), None).is_some(), "it is younger than it was");
        assert_eq!(all.refusal(&name(2), None), None);
    }
}
