//! The broker's refusals as errors of the library.

use std::path::Path;

use partywall_shm::queue::TaskId;
use partywall_wire::{Ending, NameEnd, Refusal};

use super::link::{device_lost, withdrawn};
use crate::{
    error::{
        Busy, Denied, Ended, Error, ForeignBroker, Gone, InvalidArgument, LimitReached, Mismatch, NotFound,
        Unreachable, ago,
    },
    gpu::no_pinned,
    info::with_version,
    task_ref::TaskRef,
};

impl Error {
    pub(crate) fn refused(refusal: Refusal, socket: &Path) -> Self {
        match refusal {
            Refusal::NotFound { name, near, is, ended } => {
                let ended = ended.map(|end| Box::new(ended_of(*end)));
                NotFound::Name {
                    name: name.into(),
                    socket: socket.to_owned(),
                    near: near.into_iter().map(String::from).collect(),
                    is,
                    ended,
                }
                .into()
            }
            Refusal::VersionNotFound { name, version, latest } => {
                NotFound::Version { name: name.into(), version, latest }.into()
            }
            Refusal::Ended { name, end: NameEnd { ending, pid, at, .. } } => match ending {
                Ending::OwnerDied => Gone::OwnerDied { name: name.into(), pid, ago: ago(at) }.into(),
                Ending::DeviceLost(place) => device_lost(&name, place),
                Ending::Withdrawn | Ending::Removed | Ending::Unused => {
                    Gone::Withdrawn { name: name.into(), pid, ago: ago(at) }.into()
                }
                _ => Gone::Withdrawn { name: name.into(), pid, ago: ago(at) }.into(),
            },
            Refusal::Withdrawing { name, notice } => {
                Busy::Withdrawing { name: name.into(), pid: notice.pid, ago: ago(notice.at) }.into()
            }
            Refusal::Withdrawn { name, version, notice } => withdrawn(&with_version(&name, Some(version)), &notice),
            Refusal::DeviceLost { name, version, place } => device_lost(&with_version(&name, Some(version)), place),
            Refusal::NameExists { name, version, is } => Denied::NameExists { name: name.into(), version, is }.into(),
            Refusal::ReadOnly { name, version } => Denied::ReadOnly { name: name.into(), version }.into(),
            Refusal::CannotGrow { name, version, why } => Denied::Growth { name: name.into(), version, why }.into(),
            Refusal::ObjectNotFound { kind, name, near, is } => NotFound::Object {
                kind,
                name: name.into(),
                socket: socket.to_owned(),
                near: near.into_iter().map(String::from).collect(),
                is,
            }
            .into(),
            Refusal::WriterExists { name, pid } => Busy::Writer { name: name.into(), pid }.into(),
            Refusal::WrongMaximum { name, maximum, asked } => {
                Mismatch::Maximum { name: name.into(), maximum, asked }.into()
            }
            Refusal::NotAttached { queue, attachment } => Gone::Attachment { queue: queue.into(), attachment }.into(),
            Refusal::AttachmentInUse { queue, queue_version, name, version, tasks, first: (index, generation) } => {
                let first = TaskRef::new(&queue, queue_version, TaskId { index, generation }).to_string();
                Busy::AttachmentInUse { queue: queue.into(), segment: with_version(&name, Some(version)), tasks, first }
                    .into()
            }
            Refusal::CannotHold { name, version } => Denied::Attaching { name: name.into(), version }.into(),
            Refusal::BadName { name, why } => InvalidArgument::Name { name, why }.into(),
            Refusal::BadPattern { pattern, why } => InvalidArgument::Pattern { pattern, why }.into(),
            Refusal::BadFd { index, fault } => Unreachable::FileDescriptor { index, fault }.into(),
            Refusal::NoSuchNode { node, highest } => {
                no_pinned(format!("this machine has no NUMA node {node}: its nodes have numbers up to {highest}"))
            }
            Refusal::NoPidfd { why } => Unreachable::NoPidfd(why).into(),
            Refusal::Limit { limit, allowed, needed, holders } => {
                LimitReached::Broker { limit, allowed, needed, holders }.into()
            }
            Refusal::Quota { uid, limit, allowed, held, needed, holders } => {
                LimitReached::User { uid, limit, allowed, held, needed, holders }.into()
            }
            Refusal::OtherUser { what, owner, uid } => Denied::OtherUser { what, owner, uid }.into(),
            Refusal::Unread { unread, allowed, pids } => {
                LimitReached::UnreadDescriptors { unread, allowed, pids }.into()
            }
            Refusal::WrongUser { broker, peer } => {
                Unreachable::User { socket: socket.to_owned(), broker, ours: peer, why: ForeignBroker::NotAdmitted }
                    .into()
            }
            Refusal::OtherDriver { simulated } => Unreachable::Driver { socket: socket.to_owned(), simulated }.into(),
            Refusal::System { what, errno } => {
                Self::System { what: format!("the broker, {what}"), source: std::io::Error::from_raw_os_error(errno) }
            }
            Refusal::NoSuchMember { whom, near } => NotFound::Member { whom, near }.into(),
            Refusal::NotMember => Denied::NotMember.into(),
            Refusal::NotYourself => InvalidArgument::Yourself.into(),
            Refusal::IsUnproven { pid } => Denied::Unproven { pid }.into(),
            Refusal::NotUnproven { pid, state } => Denied::NotUnproven { pid, state }.into(),
            Refusal::Evicted { by, at } => Gone::Evicted { by, ago: ago(at) }.into(),
            Refusal::NotReplaced { why } => Denied::Replacement { why }.into(),
            Refusal::InUse { names, members } => Busy::BrokerInUse { names, members }.into(),
            Refusal::ShuttingDown | Refusal::CannotResume => Unreachable::Gone { socket: socket.to_owned() }.into(),
            other => Unreachable::Refused(format!("{other:?}")).into(),
        }
    }
}

fn ended_of(end: NameEnd) -> Ended {
    let NameEnd { version, ending, pid, command, at } = end;
    let program = command.split_whitespace().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    Ended { version, ending, pid, program, ago: ago(at) }
}
