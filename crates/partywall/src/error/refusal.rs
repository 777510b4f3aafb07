//! The broker's refusals as errors of the library.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use partywall_wire::{Ending, NameEnd, Refusal};

use super::{Ended, Error};

impl Error {
    pub(crate) fn refused(refusal: Refusal, socket: &Path) -> Self {
        match refusal {
            Refusal::NotFound { name, near, is, ended } => {
                let ended = ended.map(|end| Box::new(ended_of(end)));
                Self::NotFound { name, socket: socket.to_owned(), near, is, ended }
            }
            Refusal::VersionNotFound { name, version, latest } => Self::VersionNotFound { name, version, latest },
            Refusal::Ended { name, end: NameEnd { ending, pid, at, .. } } => match ending {
                Ending::OwnerDied => Self::OwnerDied { name, pid, ago: ago(at) },
                _ => Self::Withdrawn { name, pid, ago: ago(at) },
            },
            Refusal::NameExists { name, version } => Self::NameExists { name, version },
            Refusal::ReadOnly { name, version } => Self::ReadOnly { name, version },
            Refusal::CannotGrow { name, version, why } => Self::CannotGrow { name, version, why },
            Refusal::ObjectNotFound { kind, name, near, is } => {
                Self::ObjectNotFound { kind, name, socket: socket.to_owned(), near, is }
            }
            Refusal::WriterExists { name, pid } => Self::WriterExists { name, pid },
            Refusal::WrongMaximum { name, maximum, asked } => Self::WrongMaximum { name, maximum, asked },
            Refusal::BadName { name, why } => Self::BadName { name, why },
            Refusal::BadPattern { pattern, why } => Self::BadPattern { pattern, why },
            Refusal::BadFd { index, fault } => Self::BadFd { index, fault },
            Refusal::Limit { limit, allowed, needed } => Self::LimitReached { limit, allowed, needed },
            Refusal::Unread { unread, allowed, pids } => Self::UnreadDescriptors { unread, allowed, pids },
            Refusal::WrongUser { broker, peer } => Self::WrongUser { socket: socket.to_owned(), broker, ours: peer },
            Refusal::OtherDriver { simulated } => Self::OtherDriver { socket: socket.to_owned(), simulated },
            Refusal::System { what, errno } => {
                Self::System { what: format!("the broker, {what}"), source: std::io::Error::from_raw_os_error(errno) }
            }
            Refusal::NoSuchMember { whom, near } => Self::NoSuchMember { whom, near },
            Refusal::NeedsSeat => Self::NeedsSeat,
            Refusal::NotYourself => Self::NotYourself,
            Refusal::IsUnproven { pid } => Self::Unproven { pid },
            Refusal::NotUnproven { pid, state } => Self::NotUnproven { pid, state },
            Refusal::Evicted { by, at } => Self::Evicted { by, ago: ago(at) },
            Refusal::InUse { names, members } => Self::InUse { names, members },
            Refusal::ShuttingDown | Refusal::CannotResume => Self::BrokerGone { socket: socket.to_owned() },
            other => Self::Refused(format!("{other:?}")),
        }
    }
}

fn ended_of(end: NameEnd) -> Ended {
    let NameEnd { version, ending, pid, command, at } = end;
    let program = command.split_whitespace().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    Ended { version, ending, pid, program, ago: ago(at) }
}

/// How long ago a moment was, given in milliseconds since 1970.
fn ago(at: u64) -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(at)).unwrap_or_default()
}
