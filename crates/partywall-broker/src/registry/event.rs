//! Events: the input of the registry.
//!
//! A request arrives as the [`Call`] of the wire. All in it is a peer's word. Names are valid by their type, and the
//! server has checked numbers that are out of range or contradict each other. The registry checks ids, which may be
//! anybody's, and parses patterns.

use std::sync::Arc;

use partywall_shm::queue::InUse;
use serde::{Deserialize, Serialize};

use super::types::{
    BlockControl, CellAt, CloseId, ControlMemory, FdId, MemberId, Name, Place, RequestId, WithdrawalId,
};

pub(crate) use partywall_wire::Call;

/// Something that happened at the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "one event exists at a time")]
pub(crate) enum Event {
    /// A process became a member.
    Joined { member: MemberId, identity: Identity },
    /// A member's connection ended without proof of its death.
    Suspected { member: MemberId },
    /// A suspect came back.
    Resumed { member: MemberId },
    /// A member has exited, but a child that it forked holds its connection.
    HeldByChild { member: MemberId },
    /// An operator's connection must make room for another.
    Dismissed { member: MemberId },
    /// A member is proved dead. For a member without a pidfd this says only that its connection has ended for good.
    Died { member: MemberId },
    /// A dead member's leases have been in quarantine for the configured time.
    Expired { member: MemberId },
    /// The deadline of a withdrawal has passed.
    DeadlinePassed { id: WithdrawalId },
    /// The driver works at a place, but cannot import these chunks any more, each the first of its version.
    DeviceLost { place: Place, chunks: Vec<FdId> },
    /// Everything that was to be closed before this confirmation is closed.
    Closed { id: CloseId },
    /// Everything promised in an ended cell has been stored, so nothing more will be written there.
    CellSettled { at: CellAt },
    /// The permits and blocks of a row whose member is gone have been returned.
    RowCleared { row: u16 },
    /// A timeline's cell has ended without the broker: members end it themselves if the broker is silent for too long.
    TimelineEnded { name: Name },
    /// A member sent a request. The server has checked what the call says of itself.
    Request { member: MemberId, request: RequestId, call: Call, received: Received },
}

/// A member's process, as people see it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: Arc<str>,
    pub(crate) simulated: bool,
    /// True if it is an operator, which can only list, inspect, and remove what members hold.
    pub(crate) operator: bool,
    /// True if the broker can see the end of its process.
    pub(crate) has_pidfd: bool,
}

/// What came with a request, and what only the server knows about it. The server has checked all of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Received {
    /// The descriptors of a commit or growth, in the order of its message: one per chunk unless it is legacy memory, then
    /// the table's if that is in a memfd. None is missing, and each is of the kind and length that the call states.
    pub(crate) fds: Vec<FdId>,
    /// The control memory of a pool, topic or queue that a commit makes. Its shape depends on the call alone.
    pub(crate) blocks: Option<BlockControl>,
    /// A new slab or the memory of a new semaphore, if [`Registry::control_needed`](super::Registry::control_needed)
    /// asked for it.
    pub(crate) created: Option<ControlMemory>,
    /// Tasks that name an attachment which is to end, if the server has found any
    /// ([`Registry::to_detach`](super::Registry::to_detach)).
    ///
    /// The request is then refused, and refused requests are not recorded.
    #[serde(skip)]
    pub(crate) in_use: Option<InUse>,
}

impl Received {
    /// Returns all descriptors.
    pub(crate) fn all(&self) -> Vec<FdId> {
        let created = self.blocks.iter().flat_map(BlockControl::created).chain(self.created);
        self.fds.iter().copied().chain(created.map(|created| created.fd)).collect()
    }
}
