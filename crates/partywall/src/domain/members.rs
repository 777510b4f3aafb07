//! The members of a domain: listing, evicting and freeing them.

use partywall_wire::{Answer, Call, MemberId};

use super::{Domain, answered, pages, unexpected};
use crate::{
    error::{Denied, Error, NotFound, Result},
    info::{Evicted, Freed, MemberInfo, Whom},
};

impl Domain {
    /// Returns all members, including this process, in the order in which they joined.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn members(&self) -> Result<Vec<MemberInfo>> {
        let ask = |after| answered!(self.link().call(Call::Members { after })?, Answer::Members { members, more } => (members, more));
        pages("members", |row: &MemberInfo| MemberId(row.member), ask)
    }

    /// Returns the number of this process among the domain's members.
    pub fn member(&self) -> u64 {
        self.link().member()
    }

    /// Returns the user of this process by the broker's number, as [`members`](Self::members) and names have it. In a
    /// user namespace of its own, this process has another number for its user.
    pub fn uid(&self) -> u32 {
        self.link().uid()
    }

    /// Evicts members: ends their waits, builds and owned names, and refuses all their further calls. A pid selects all
    /// members of that process.
    ///
    /// Blocks and memory that an evicted member holds stay in quarantine until its death is proved, because memory
    /// cannot be taken from a process that has it mapped. With `kill` the broker also sends SIGKILL, through its pidfd.
    /// A process that could not be killed is not an error: see [`Evicted::kill`].
    ///
    /// # Errors
    /// [`NotFound::Member`]; [`InvalidArgument::Yourself`](crate::error::InvalidArgument::Yourself) if this process is
    /// meant; [`Denied::Unproven`] if it is dead.
    pub fn evict(&self, whom: impl Into<Whom>, kill: bool) -> Result<Vec<Evicted>> {
        answered!(self.link().call(Call::Evict { whom: whom.into(), kill })?, Answer::Evicted(evicted) => evicted)
    }

    /// Frees the quarantined resources of dead members whose work on a GPU may not be over (`MemberState::Unproven`):
    /// of all such members, or of those with this pid. The caller guarantees that nothing writes to the memory any
    /// more.
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
                // Another process has freed the rest meanwhile.
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
