//! Commit options that building, publishing and putting share.

use partywall_wire::{Lifetime, Named};

use crate::error::{Denied, InvalidArgument, Result};

/// How a version is committed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CommitOptions {
    pub(crate) mutable: bool,
    pub(crate) kept: bool,
    pub(crate) until_unused: bool,
    pub(crate) if_absent: bool,
    pub(crate) shared: bool,
    /// The member with which the name ends, instead of the committer.
    pub(crate) owner: Option<u64>,
}

impl CommitOptions {
    /// Refuses to share a mutable segment, and a name with several ends. `is_segment` is false for a pool, topic or
    /// queue, whose users write it.
    pub(crate) fn check(&self, name: &str, is_segment: bool) -> Result<()> {
        if self.shared && self.mutable && is_segment {
            return Err(Denied::Sharing { name: name.to_owned() }.into());
        }
        self.lifetime(name, is_segment).map(drop)
    }

    /// Returns when the name ends. A pool, topic or queue has users rather than an owner.
    ///
    /// # Errors
    /// [`InvalidArgument::Options`] if more than one end is asked for.
    pub(super) fn lifetime(&self, name: &str, is_segment: bool) -> Result<Lifetime> {
        match (self.kept, self.until_unused, self.owner.is_some()) {
            (true, false, false) => Ok(Lifetime::Kept),
            (false, true, false) => Ok(Lifetime::Shared),
            (false, false, _) => Ok(if is_segment { Lifetime::Owned } else { Lifetime::Shared }),
            _ => {
                let why = "a name has one end: give at most one of kept, until_unused and owner".to_owned();
                Err(InvalidArgument::Options { of: Named::Segment, name: name.to_owned(), why }.into())
            }
        }
    }
}

/// Defines the setters of a builder whose field `commit` is [`CommitOptions`].
macro_rules! commit_setters {
    () => {
        /// Lets processes open the version for writing after the commit. They order their access themselves. The
        /// committer of a version that it has built can also make it longer ([`Segment::grow`](crate::Segment::grow)).
        pub fn mutable(mut self, mutable: bool) -> Self {
            self.commit.mutable = mutable;
            self
        }

        /// Keeps the name after its committer has ended, until it is removed, the broker ends, the machine restarts or
        /// the GPU is reset. By default a name is *owned* and ends with its committer. Memory that is published without
        /// a copy cannot be kept, unless it is in a [`Heap`](crate::Heap).
        pub fn kept(mut self, kept: bool) -> Self {
            self.commit.kept = kept;
            self
        }

        /// Ends the name with the last process that has the version open, rather than with its committer.
        ///
        /// Memory that is published without a copy needs its publisher, too, unless it is in a
        /// [`Heap`](crate::Heap): it ends when the publisher dies or drops the segment.
        /// [`leave_name`](crate::Segment::leave_name) gives up the segment and keeps the memory until the name ends.
        pub fn until_unused(mut self, until_unused: bool) -> Self {
            self.commit.until_unused = until_unused;
            self
        }

        /// Lets processes of other users open the version, where the broker admits them. They can only read it: a
        /// mutable version cannot be shared. By default only processes of this user can open it.
        pub fn shared(mut self, shared: bool) -> Self {
            self.commit.shared = shared;
            self
        }

        /// Refuses the commit if the name already exists. [`Put`](crate::Put) also checks this before it reads a file.
        pub fn if_absent(mut self, if_absent: bool) -> Self {
            self.commit.if_absent = if_absent;
            self
        }
    };
}

pub(crate) use commit_setters;
