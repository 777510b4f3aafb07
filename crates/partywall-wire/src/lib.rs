//! The protocol between a Partywall member and its broker: messages, their framing, and the limits on both.
//!
//! Bytes go in, messages come out. Nothing here opens a socket or reads a clock, and no allocation trusts a length from
//! a peer. A message is checked when it is decoded: a [`Name`] that exists is a valid one. Plain values, such as [`Kind`]
//! and [`MemberState`], exist once and are used everywhere.
//!
//! | module | contains |
//! |---|---|
//! | [`frame`] | a length and a number of file descriptors in front of each message |
//! | [`handshake`] | the first message each way, whose head never changes, so that foreign versions can name each other |
//! | [`request`] | requests, and what a broker answers if one has a bad name |
//! | [`call`] | what a member can request, and what each call may do |
//! | [`message`] | answers, events, versions |
//! | [`id`], [`name`](mod@name) | by which numbers and names both sides speak of things |
//! | [`control`] | pools and topics in messages |
//! | [`object`] | timelines and semaphores in messages |
//! | [`member`] | members in messages |
//! | [`user`] | users in messages |
//! | [`watch`] | events of names in messages |
//! | [`withdrawal`] | the deadlines of withdrawals |
//! | [`refusal`] | every reason for which a broker refuses a request |
//! | [`pattern`] | patterns of names |
//! | [`place`] | kinds and places of memory |
//! | [`near`] | names that look like one that was not found |
//! | [`limits`] | limits that both sides enforce |
//!
//! A connection is a Unix stream socket. After the handshake the member's *call* socket carries one request and its
//! answer at a time; the *events* socket, which the broker hands over in its welcome, carries [`message::Event`]s
//! one way. File descriptors travel in the order that a message's documentation names.
#![forbid(unsafe_code)]

/// Implements `name` for an enum.
macro_rules! names {
    ($type:ident { $($variant:ident => $name:literal,)+ }) => {
        impl $type {
            /// Returns the name that programs see.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $name,)+
                }
            }
        }
    };
}

mod bytes;
pub mod call;
pub mod control;
pub mod frame;
pub mod handshake;
pub mod id;
pub mod limits;
pub mod member;
pub mod message;
pub mod name;
pub mod near;
pub mod object;
pub mod pattern;
pub mod place;
pub mod refusal;
pub mod request;
pub mod user;
pub mod watch;
pub mod withdrawal;

pub use call::Call;
pub use control::{
    Ages, AttachedInfo, BLOCK_ALIGNMENT, BlockCounts, Control, ControlInfo, MAX_RANK, Participant, PublisherInfo,
    QueueInfo, QueueShape, QueueUsage, SampleShape, SubscriberInfo, TopicInfo, TopicShape, TopicUsage, Usage,
};
pub use frame::{Frame, FrameReader, WireError};
pub use handshake::{BrokerHello, ClientHello, Resume, Welcome};
pub use id::{ClaimId, LeaseId, MemberId, RequestId};
pub use member::{Awaited, Doubt, Evicted, Freed, HolderInfo, Kill, MemberInfo, MemberState, WaitInfo, Whom};
pub use message::{
    Access, Answer, ChunkBytes, Commit, Event, Grow, Grown, LegacyHandle, Lifetime, NameInfo, Open, Opened,
    QueueHolder, Reply, SegmentInfo, StatusInfo, Table, Token, VersionFacts, VersionInfo,
};
pub use name::Name;
pub use object::{
    ObjectDetail, ObjectHolder, ObjectInfo, ObjectKind, OpenedTimeline, SemaphoreInfo, TimelineEnding, TimelineInfo,
};
pub use pattern::Pattern;
pub use place::{Kind, Place};
pub use refusal::{Ending, FdFault, Handle, Limit, LimitHolder, NameEnd, NoGrowth, NoReplacement, Refusal};
pub use request::{BadRequest, Request};
pub use user::{OtherUsers, Quota, UserInfo};
pub use watch::{Change, Gap, Happened, NameEvent, Named, Point};
pub use withdrawal::{Deadline, Notice, Staleness, Then};
