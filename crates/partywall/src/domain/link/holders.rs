//! The processes that hold most of what fills a limit of the broker.

use std::collections::BTreeMap;

use partywall_wire::{Answer, Call, Limit, MemberInfo, NameInfo};

use super::Link;
use crate::{
    domain::{answered, pages},
    error::{Error, Holder, LimitReached, Result},
    place::Place,
};

impl Link {
    /// Adds the processes that hold most to an error that a limit is reached. It asks the broker for what listings show
    /// this process, so the names of others stay private.
    pub(super) fn with_holders(&self, mut error: Error) -> Error {
        if let Error::LimitReached(reached) = &mut error {
            match reached {
                LimitReached::Broker { limit, holders, .. } => {
                    *holders = self.holders(*limit, None).unwrap_or_default();
                }
                LimitReached::User { limit, uid, holders, .. } => {
                    *holders = self.holders(*limit, Some(*uid)).unwrap_or_default();
                }
                _ => {}
            }
        }
        error
    }

    /// Returns the processes that hold most of a limit, of one user or of all.
    fn holders(&self, limit: Limit, uid: Option<u32>) -> Result<Vec<Holder>> {
        let is_counted = |owner: u32| uid.is_none_or(|uid| uid == owner);
        let mut held = BTreeMap::<(u32, u32), u64>::new();
        match limit {
            Limit::Leases => {
                let ask = |after| answered!(self.call(Call::Members { after })?, Answer::Members { members, more } => (members, more));
                for member in pages("members", |row: &MemberInfo| row.member, ask)? {
                    if is_counted(member.uid) {
                        *held.entry((member.uid, member.pid)).or_default() += u64::from(member.leases);
                    }
                }
            }
            Limit::Bytes | Limit::Pinned(_) | Limit::Names | Limit::Fds => {
                let ask =
                    |after| answered!(self.call(Call::List { after })?, Answer::Names { names, more } => (names, more));
                for row in pages("names", |row: &NameInfo| row.name.clone(), ask)? {
                    let Some(latest) = row.latest.filter(|latest| is_counted(latest.uid)) else { continue };
                    let amount = match limit {
                        Limit::Pinned(node) => match Place::from(latest.place) {
                            Place::Pinned(at) if node.is_none_or(|node| node == at) => latest.bytes + row.older_bytes,
                            _ => 0,
                        },
                        Limit::Bytes => latest.bytes + row.older_bytes,
                        _ => 1,
                    };
                    *held.entry((latest.uid, latest.committer)).or_default() += amount;
                }
            }
            _ => return Ok(Vec::new()),
        }
        let holders = held.into_iter().filter(|(_, held)| *held > 0);
        let mut holders: Vec<_> = holders.map(|((uid, pid), held)| Holder { uid, pid, held }).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.held));
        holders.truncate(SHOWN);
        Ok(holders)
    }
}

/// The most holders that an error names.
const SHOWN: usize = 3;
