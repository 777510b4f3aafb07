//! What is not there.

use std::path::PathBuf;

use partywall_wire::{Named, ObjectKind, Whom};

use super::{
    Ended, Language,
    advice::{after_the_end, use_as_it_is},
    text::{ended_text, near_names, near_pids, object_kind, other_kinds, which_member},
};

/// What was asked for is not there. The caller's mistake, too early or too late.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotFound {
    /// No segment, pool or topic has this name. The caller's mistake, too early or too late.
    #[error(
        "no segment, pool or topic is named {name:?} in the domain at {}{}{}{}", socket.display(), ended_text(name, ended),
        other_kinds(is), near_names(near)
    )]
    Name {
        /// The name asked for.
        name: String,
        /// The broker that was asked.
        socket: PathBuf,
        /// Existing names that look like it.
        near: Vec<String>,
        /// Objects of other kinds that have this very name.
        is: Vec<Named>,
        /// How the name ended, if it was there less than a minute ago.
        ended: Option<Box<Ended>>,
    },
    /// The name exists, this version of it does not and never will again: numbers start anew only when no version of a
    /// name is left.
    #[error("{name:?} has no version {version}{}", latest.map_or_else(String::new, |v| format!(" (the latest is {v})")))]
    Version {
        /// The name.
        name: String,
        /// The version asked for.
        version: u64,
        /// The latest one, if the name has one.
        latest: Option<u64>,
    },
    /// The segment has no tensor of this name.
    #[error("{segment:?} has no tensor {tensor:?}{}", near_names(near))]
    Tensor {
        /// The segment.
        segment: String,
        /// The tensor asked for.
        tensor: String,
        /// Tensors that look like it.
        near: Vec<String>,
    },
    /// No timeline or semaphore has this name.
    #[error(
        "no {} is named {name:?} in the domain at {}{}{}", object_kind(*kind), socket.display(), other_kinds(is),
        near_names(near)
    )]
    Object {
        /// What was asked for.
        kind: ObjectKind,
        /// The name asked for.
        name: String,
        /// The broker that was asked.
        socket: PathBuf,
        /// Existing names that look like it.
        near: Vec<String>,
        /// Objects of other kinds that have this very name.
        is: Vec<Named>,
    },
    /// No member is meant by this pid or number. The caller's mistake, or too late: it is gone.
    #[error("no member has {}{}", which_member(*whom), near_pids(near))]
    Member {
        /// Which was meant.
        whom: Whom,
        /// Pids of members that look like it.
        near: Vec<u32>,
    },
}

impl NotFound {
    /// What to do about it, as a sentence that names calls of `language`.
    pub(super) fn advice(&self, language: Language) -> String {
        match self {
            Self::Name { ended: Some(ended), .. } => after_the_end(ended.ending, language).into(),
            Self::Name { name, is, .. } | Self::Object { name, is, .. } if !is.is_empty() => {
                use_as_it_is(name, is[0], language)
            }
            Self::Name { near, .. } if !near.is_empty() => {
                format!("did you mean {:?}? `partywall ls` lists all names", near[0])
            }
            Self::Name { .. } => {
                "`partywall ls` lists all names; check --domain and PARTYWALL_SOCKET if it should be there".into()
            }
            Self::Version { name, .. } => format!("`partywall show {name}` lists its versions"),
            Self::Tensor { segment, .. } => format!("`partywall show {segment}` lists its tensors"),
            Self::Object { near, .. } if !near.is_empty() => {
                format!("did you mean {:?}? `partywall ls` lists all names", near[0])
            }
            Self::Object { .. } => {
                "`partywall ls` lists all names; check --domain and PARTYWALL_SOCKET if it should be there".into()
            }
            Self::Member { near, .. } if !near.is_empty() => {
                format!("did you mean {}? `partywall ps` lists all members", near[0])
            }
            Self::Member { .. } => {
                "`partywall ps` lists all members; check --domain and PARTYWALL_SOCKET if it should be there".into()
            }
        }
    }

    /// The entry of `docs/troubleshooting.md` about it.
    pub(super) fn anchor(&self) -> &'static str {
        match self {
            Self::Name { .. } => "not-found",
            Self::Version { .. } => "version-not-found",
            Self::Tensor { .. } => "no-such-tensor",
            Self::Object { .. } => "object-not-found",
            Self::Member { .. } => "no-such-member",
        }
    }
}
