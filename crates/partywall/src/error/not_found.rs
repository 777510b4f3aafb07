//! Objects that do not exist.

use std::path::PathBuf;

use partywall_wire::{Named, ObjectKind, Whom};

use super::{
    Ended, ErrorKind, Help, Language,
    advice::{after_the_end, use_as_it_is},
    text::{ended_text, near_names, near_pids, object_kind, other_kinds, which_member},
};

/// The object does not exist: a mistake of the caller, or a call too early or too late.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotFound {
    /// No segment, pool, topic or queue has this name.
    #[error(
        "no segment, pool, topic or queue is named {name:?} in the domain at {}{}{}{}", socket.display(), ended_text(name, ended),
        other_kinds(is), near_names(near)
    )]
    Name {
        /// The name asked for.
        name: String,
        /// The broker that was asked.
        socket: PathBuf,
        /// Existing names that look like it.
        near: Vec<String>,
        /// The kinds of other objects with this name.
        is: Vec<Named>,
        /// How the name ended, if it was there less than a minute ago.
        ended: Option<Box<Ended>>,
    },
    /// The name exists, but this version does not. It never will again: numbers start anew only when no version of a
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
        /// The kind of the object.
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
    /// No member has this pid or number, or it is gone.
    #[error("no member has {}{}", which_member(*whom), near_pids(near))]
    Member {
        /// The pid or number.
        whom: Whom,
        /// Pids of members that look like it.
        near: Vec<u32>,
    },
}

impl NotFound {
    /// Returns the class of the error, its entry of the documentation, and what to do about it.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::Name { ended: Some(ended), .. } => {
                ErrorKind::NotFound.help("not-found", after_the_end(ended.ending, language))
            }
            Self::Name { name, is, near, .. } => {
                ErrorKind::NotFound.help("not-found", other_name(name, is, near, language))
            }
            Self::Version { name, .. } => {
                ErrorKind::NotFound.help("version-not-found", format!("`partywall show {name}` lists its versions"))
            }
            Self::Tensor { segment, near, .. } if !near.is_empty() => ErrorKind::NotFound.help(
                "no-such-tensor",
                format!("did you mean {:?}? `partywall show {segment}` lists its tensors", near[0]),
            ),
            Self::Tensor { segment, .. } => {
                ErrorKind::NotFound.help("no-such-tensor", format!("`partywall show {segment}` lists its tensors"))
            }
            Self::Object { name, is, near, .. } => {
                ErrorKind::NotFound.help("object-not-found", other_name(name, is, near, language))
            }
            Self::Member { near, .. } if !near.is_empty() => ErrorKind::NotFound
                .help("no-such-member", format!("did you mean {}? `partywall ps` lists all members", near[0])),
            Self::Member { .. } => ErrorKind::NotFound.help(
                "no-such-member",
                "`partywall ps` lists all members; check --domain and PARTYWALL_SOCKET if it should be there",
            ),
        }
    }
}

/// Says what `name` is, or which name was meant.
fn other_name(name: &str, is: &[Named], near: &[String], language: Language) -> String {
    match (is, near) {
        ([is, ..], _) => use_as_it_is(name, *is, language),
        ([], [near, ..]) => format!("did you mean {near:?}? `partywall ls` lists all names"),
        ([], []) => "`partywall ls` lists all names; check --domain and PARTYWALL_SOCKET if it should be there".into(),
    }
}
