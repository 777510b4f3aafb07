//! What goes into the registry.

use std::sync::Arc;

use super::types::{Access, ClaimId, LeaseId, MemberId, Memory, Millis, Name, RequestId};

/// Something that happened at the rim.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A process became a member.
    Joined { member: MemberId, identity: Identity, at: Millis },
    /// A member's connection ended without proof of its death.
    Suspected { member: MemberId },
    /// A suspect came back.
    Resumed { member: MemberId },
    /// A member has exited, but a child that it forked holds its connection.
    HeldByChild { member: MemberId },
    /// A member is proved dead.
    Died { member: MemberId },
    /// A member asks for something.
    Request { member: MemberId, request: RequestId, call: Call },
}

/// Who a member is, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: Arc<str>,
    pub(crate) simulated: bool,
}

/// What a member asks for.
#[derive(Debug, Clone)]
pub(crate) enum Call {
    Ping,
    Commit(Commit),
    Open(Open),
    OpenOrBuild { name: Name },
    AbandonBuild { claim: ClaimId },
    Cancel { ticket: RequestId },
    Release { lease: LeaseId },
    AwaitWithdrawal { lease: LeaseId },
    Remove { name: Name },
    Inspect { name: Name, version: Option<u64> },
    List { after: Option<Name> },
    Members { after: Option<MemberId> },
    Status,
    Stop { force: bool },
    Leave,
}

/// A built version. The rim has checked its file descriptors and given them numbers that nothing else has.
#[derive(Debug, Clone)]
pub(crate) struct Commit {
    pub(crate) name: Name,
    pub(crate) memory: Arc<Memory>,
    pub(crate) if_absent: bool,
    pub(crate) claim: Option<ClaimId>,
    pub(crate) at: Millis,
}

/// Which version to open.
#[derive(Debug, Clone)]
pub(crate) struct Open {
    pub(crate) name: Name,
    pub(crate) version: Option<u64>,
    pub(crate) access: Access,
    pub(crate) wait: bool,
}
