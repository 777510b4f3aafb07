//! Commit options that building, publishing and putting share.

use crate::error::{Denied, Result};

/// How a version is committed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CommitOptions {
    pub(crate) mutable: bool,
    pub(crate) kept: bool,
    pub(crate) if_absent: bool,
    pub(crate) shared: bool,
}

impl CommitOptions {
    /// Refuses to share a mutable segment. `is_segment` is false for a pool, topic or queue, whose users write it.
    pub(super) fn check(&self, name: &str, is_segment: bool) -> Result<()> {
        if self.shared && self.mutable && is_segment {
            return Err(Denied::Sharing { name: name.to_owned() }.into());
        }
        Ok(())
    }
}

/// Defines the setters of a builder whose field `commit` is [`CommitOptions`].
macro_rules! commit_setters {
    () => {
        /// Lets processes open the version for writing after the commit. They order their access themselves. The committer
        /// of a version that it has built can also make it longer ([`Segment::grow`](crate::Segment::grow)).
        pub fn mutable(mut self, mutable: bool) -> Self {
            self.commit.mutable = mutable;
            self
        }

        /// Keeps the name after its committer has ended, until it is removed, the broker ends, the machine restarts or the
        /// GPU is reset. By default a name is *owned* and ends with its committer. Memory that is published without a copy
        /// cannot be kept.
        pub fn kept(mut self, kept: bool) -> Self {
            self.commit.kept = kept;
            self
        }

        /// Lets processes of other users open the version, where the broker admits them. They can only read it: a mutable
        /// version cannot be shared. By default only processes of this user can open it.
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
