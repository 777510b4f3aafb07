//! Who is in a domain, and what is done with those who are to go.

use partywall_wire::{Answer, Call};

use super::{Domain, unexpected};
use crate::{
    error::{Denied, Error, NotFound, Result, Unreachable},
    info::{Evicted, Freed, MemberInfo, Whom},
};

impl Domain {
    /// All members, this process among them, in the order in which they joined.
    ///
    /// # Errors
    /// Those of every call.
    pub fn members(&self) -> Result<Vec<MemberInfo>> {
        let mut all: Vec<MemberInfo> = Vec::new();
        loop {
            let after = all.last().map(|last| last.member);
            match self.link().call(Call::Members { after })? {
                Answer::Members { members, more } => {
                    if members.iter().any(|row| after.is_some_and(|after| row.member <= after)) {
                        return Err(Unreachable::Protocol("its list of members does not go on".into()).into());
                    }
                    let more = more && !members.is_empty();
                    all.extend(members);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// The number of this process among the domain's members.
    pub fn member(&self) -> u64 {
        self.link().member()
    }

    /// Takes from members what they wait for, build and own, and refuses them everything from now on; a pid means all
    /// members with it. What they hold stays in quarantine until their deaths are proved: nobody can take memory away
    /// from a process that has it mapped. With `kill` the broker sends SIGKILL, through the pidfd that it has.
    ///
    /// That a process could not be killed is no error: see [`Evicted::kill`].
    ///
    /// # Errors
    /// [`NotFound::Member`]; [`InvalidArgument::Yourself`](crate::error::InvalidArgument::Yourself) if this process is meant; [`Denied::Unproven`] if it is dead.
    pub fn evict(&self, whom: impl Into<Whom>, kill: bool) -> Result<Vec<Evicted>> {
        match self.link().call(Call::Evict { whom: whom.into(), kill })? {
            Answer::Evicted(evicted) => Ok(evicted),
            other => Err(unexpected(&other)),
        }
    }

    /// Gives back what dead members held of whose work nobody knows that it is over (`MemberState::Unproven`): of all, or
    /// of those with this pid. The caller answers for it that nothing writes to the memory any more.
    ///
    /// # Errors
    /// [`NotFound::Member`]; [`Denied::NotUnproven`] if it is not known to be dead.
    pub fn free_unproven(&self, pid: Option<u32>) -> Result<Vec<Freed>> {
        let mut all = Vec::new();
        loop {
            match self.link().call(Call::FreeUnproven { pid }) {
                Ok(Answer::Freed { members, more }) => {
                    let more = more && !members.is_empty();
                    all.extend(members);
                    if !more {
                        return Ok(all);
                    }
                }
                Ok(other) => return Err(unexpected(&other)),
                // Somebody else has freed the rest meanwhile.
                Err(Error::NotFound(NotFound::Member { .. }) | Error::Denied(Denied::NotUnproven { .. }))
                    if !all.is_empty() =>
                {
                    return Ok(all);
                }
                Err(error) => return Err(error),
            }
        }
    }
}
