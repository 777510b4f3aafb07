//! Operations that are not allowed.

use partywall_wire::{MemberState, Named, NoGrowth, NoReplacement, OtherUsers};

use super::{
    ErrorKind, Help, Language,
    advice::use_as_it_is,
    text::{member_state, no_growth, no_replacement, other_users},
};

/// The operation is not allowed on this object or for this process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Denied {
    /// The name exists, and the call was to create it only if it did not.
    #[error("{name:?} already exists{} (version {version})", unless_segment(*is))]
    NameExists {
        /// The name.
        name: String,
        /// Its latest version.
        version: u64,
        /// What it is. Only a segment gets a new version from a commit.
        is: Named,
    },
    /// The version is frozen and was opened for writing, or was opened for reading and written.
    #[error("{name:?} version {version} is read-only")]
    ReadOnly {
        /// The name.
        name: String,
        /// The version.
        version: u64,
    },
    /// The version cannot grow, by this call or at all.
    #[error("{name:?} version {version} cannot grow: {}", no_growth(*why))]
    Growth {
        /// The name.
        name: String,
        /// The version.
        version: u64,
        /// Why.
        why: NoGrowth,
    },
    /// Published memory ends with its publisher, so its name cannot be kept.
    #[error("{name:?} cannot be kept: its memory ends with this process")]
    Keeping {
        /// The name.
        name: String,
    },
    /// A mutable segment is not shared with other users, because its readers could write it.
    #[error("{name:?} cannot be shared with other users: it is mutable, so its readers could write it")]
    Sharing {
        /// The name.
        name: String,
    },
    /// The output of a task cannot be offered: no pool could accept it.
    #[error("the output of a task of queue {queue:?} cannot be offered")]
    Offering {
        /// The queue.
        queue: String,
    },
    /// Published memory ends with its publisher, so no queue can hold it.
    #[error("no queue can hold {name:?} version {version}: its memory ends with its publisher")]
    Attaching {
        /// The name.
        name: String,
        /// The version.
        version: u64,
    },
    /// The connection is not a member of the domain ([`DomainOptions::operator`](crate::DomainOptions::operator)).
    #[error("this connection is not a member of the domain: it can only list, show, evict, remove, and end the broker")]
    NotMember,
    /// It belongs to another user.
    #[error("cannot {}: {} belongs to user {owner}, and this process runs as user {uid}", other_users(what).0, other_users(what).1)]
    OtherUser {
        /// What was asked for.
        what: OtherUsers,
        /// The user to which it belongs.
        owner: u32,
        /// This process's user.
        uid: u32,
    },
    /// The member is dead, and its memory is in quarantine, because its work on a GPU may not be over.
    #[error("pid {pid} is already dead, and its memory is in quarantine")]
    Unproven {
        /// The member's pid.
        pid: u32,
    },
    /// The member has nothing in quarantine, because it is not known to be dead.
    #[error("pid {pid} has nothing in quarantine: it {}", member_state(*state))]
    NotUnproven {
        /// The member's pid.
        pid: u32,
        /// The member's state.
        state: MemberState,
    },
    /// The broker goes on as it was, and no other program continues for it.
    #[error("the broker was not replaced: {}", no_replacement(why))]
    Replacement {
        /// Why.
        why: NoReplacement,
    },
}

impl Denied {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::NameExists { name, is: Named::Segment, .. } => ErrorKind::Refused.help("name-exists", "NameExists", format!("`partywall rm {name}` removes it; without if-absent it gets a new version")),
            Self::NameExists { name, is, .. } => ErrorKind::Refused.help("name-exists", "NameExists", format!("choose another name, or {}; `partywall rm {name}` removes it", use_as_it_is(name, *is, language))),
            Self::ReadOnly { .. } => ErrorKind::Refused.help("read-only", "ReadOnly", "commit a new version, or create the segment as mutable and open it for writing"),
            Self::Growth { why, .. } => ErrorKind::Refused.help("cannot-grow", "CannotGrow", match why {
                NoGrowth::Behind => "refresh() the segment, then grow it",
                NoGrowth::Reserved { .. } => "create it with a larger reserve(), or commit a new version",
                _ => "create it as mutable and let its committer grow it, or commit a new version",
            }),
            Self::Keeping { .. } => ErrorKind::Refused.help("cannot-keep", "CannotKeep", "publish a copy (commit_copy(), in Python put()), which the broker keeps; or create the tensors in a Heap (in Python torch_pool() or cupy_pool()); or leave out kept()"),
            Self::Sharing { .. } => ErrorKind::Usage.help("cannot-share", "CannotShare", "leave out mutable, or share a pool or topic"),
            Self::Offering { .. } => ErrorKind::Refused.help("cannot-offer", "WrongKind", "send the reference of the task, whose result any process can take, or copy the output into a block of a pool"),
            Self::Attaching { .. } => ErrorKind::Refused.help("cannot-attach", "CannotAttach", "publish a copy (commit_copy(), in Python put()), or commit a segment, and attach that"),
            Self::NotMember => ErrorKind::Refused.help("not-a-member", "Error", "connect without operator(true)"),
            Self::OtherUser { what, owner, uid } => {
                let advice = match what {
                    OtherUsers::Open { .. } | OtherUsers::Inspect { .. } => format!("create it shared, as user {owner}: shared(true), in Python shared=True, in the shell --shared"),
                    OtherUsers::Create { .. } => "choose another name".into(),
                    OtherUsers::Evict { .. } | OtherUsers::Free { .. } => format!("run this as user {owner}, or as the user of the broker"),
                    OtherUsers::Replace => format!("run this as user {owner}"),
                    _ => format!("run this as user {owner}; `--allow-uid {uid}` of `partywall serve` admits a user, and gives it nothing of others"),
                };
                let pid = match what {
                    OtherUsers::Evict { pid } | OtherUsers::Free { pid } => Some(*pid),
                    _ => None,
                };
                ErrorKind::Refused.help("other-user", "OtherUser", advice).about(pid)
            }
            Self::Unproven { pid } => ErrorKind::Refused.help("unproven", "Unproven", format!("`partywall rm --unproven {pid}` frees it; run this once no work of the process is left on a GPU")).about(*pid),
            Self::Replacement { why } => ErrorKind::Refused.help("not-replaced", "Error", match why {
                NoReplacement::InProgress => "`partywall status` shows the release that serves; try again if it is not the one you want",
                NoReplacement::Elsewhere { .. } => "run `partywall serve --replace` where the broker runs, not in another container",
                _ => "everything goes on as before; to start the other program anew, end this broker with `partywall stop`, which drops all names",
            }),
            Self::NotUnproven { pid, .. } => ErrorKind::Refused.help("not-unproven", "Unproven", format!("`partywall evict {pid} --kill` ends it; its memory is freed once it is dead")).about(*pid),
        }
    }
}

/// Says what a name is that a commit cannot replace.
fn unless_segment(is: Named) -> String {
    if is == Named::Segment { String::new() } else { format!(": it is a {}", is.name()) }
}
