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
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::Name { ended: Some(ended), .. } => ErrorKind::NotFound
                .help("not-found", "NameNotFound", after_the_end(ended.ending, language))
                .about(ended.pid),
            Self::Name { name, is, near, .. } => {
                ErrorKind::NotFound.help("not-found", "NameNotFound", other_name(name, is, near, language))
            }
            Self::Version { name, .. } => ErrorKind::NotFound.help(
                "version-not-found",
                "VersionNotFound",
                format!("`partywall show {name}` lists its versions"),
            ),
            Self::Tensor { segment, near, .. } => {
                let near = near.first().map_or_else(String::new, |near| format!("did you mean {near:?}? "));
                let advice = format!("{near}`partywall show {segment}` lists its tensors");
                ErrorKind::NotFound.help("no-such-tensor", "TensorNotFound", advice)
            }
            Self::Object { name, is, near, .. } => {
                ErrorKind::NotFound.help("object-not-found", "NameNotFound", other_name(name, is, near, language))
            }
            Self::Member { whom, near } => {
                let advice = match near.first() {
                    Some(near) => format!("did you mean {near}? `partywall ps` lists all members"),
                    None => format!("`partywall ps` lists all members; {IF_THERE}"),
                };
                let pid = match whom {
                    Whom::Pid(pid) => Some(*pid),
                    Whom::Member(_) => None,
                };
                ErrorKind::NotFound.help("no-such-member", "NoSuchMember", advice).about(pid)
            }
        }
    }
}

/// Says what `name` is, or which name was meant.
fn other_name(name: &str, is: &[Named], near: &[String], language: Language) -> String {
    match (is, near) {
        ([is, ..], _) => use_as_it_is(name, *is, language),
        ([], [near, ..]) => format!("did you mean {near:?}? `partywall ls` lists all names"),
        ([], []) => format!("`partywall ls` lists all names; {IF_THERE}"),
    }
}

const IF_THERE: &str = "check --domain and PARTYWALL_SOCKET if it should be there";
