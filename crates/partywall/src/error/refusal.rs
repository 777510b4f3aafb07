//! The broker's refusals as errors of the library.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use partywall_wire::{Ending, NameEnd, Refusal};

use super::{Busy, Denied, Ended, Error, Gone, InvalidArgument, LimitReached, Mismatch, NotFound, Unreachable};

impl Error {
    pub(crate) fn refused(refusal: Refusal, socket: &Path) -> Self {
        match refusal {
            Refusal::NotFound { name, near, is, ended } => {
                let ended = ended.map(|end| Box::new(ended_of(end)));
                Self::NotFound(NotFound::Name { name, socket: socket.to_owned(), near, is, ended })
            }
            Refusal::VersionNotFound { name, version, latest } => {
                Self::NotFound(NotFound::Version { name, version, latest })
            }
            Refusal::Ended { name, end: NameEnd { ending, pid, at, .. } } => match ending {
                Ending::OwnerDied => Self::Gone(Gone::OwnerDied { name, pid, ago: ago(at) }),
                _ => Self::Gone(Gone::Withdrawn { name, pid, ago: ago(at) }),
            },
            Refusal::NameExists { name, version } => Self::Denied(Denied::NameExists { name, version }),
            Refusal::ReadOnly { name, version } => Self::Denied(Denied::ReadOnly { name, version }),
            Refusal::CannotGrow { name, version, why } => Self::Denied(Denied::Growth { name, version, why }),
            Refusal::ObjectNotFound { kind, name, near, is } => {
                Self::NotFound(NotFound::Object { kind, name, socket: socket.to_owned(), near, is })
            }
            Refusal::WriterExists { name, pid } => Self::Busy(Busy::Writer { name, pid }),
            Refusal::WrongMaximum { name, maximum, asked } => {
                Self::Mismatch(Mismatch::Maximum { name, maximum, asked })
            }
            Refusal::BadName { name, why } => Self::InvalidArgument(InvalidArgument::Name { name, why }),
            Refusal::BadPattern { pattern, why } => Self::InvalidArgument(InvalidArgument::Pattern { pattern, why }),
            Refusal::BadFd { index, fault } => Self::Unreachable(Unreachable::FileDescriptor { index, fault }),
            Refusal::Limit { limit, allowed, needed } => {
                Self::LimitReached(LimitReached::Broker { limit, allowed, needed })
            }
            Refusal::Unread { unread, allowed, pids } => {
                Self::LimitReached(LimitReached::UnreadDescriptors { unread, allowed, pids })
            }
            Refusal::WrongUser { broker, peer } => {
                Self::Unreachable(Unreachable::User { socket: socket.to_owned(), broker, ours: peer })
            }
            Refusal::OtherDriver { simulated } => {
                Self::Unreachable(Unreachable::Driver { socket: socket.to_owned(), simulated })
            }
            Refusal::System { what, errno } => {
                Self::System { what: format!("the broker, {what}"), source: std::io::Error::from_raw_os_error(errno) }
            }
            Refusal::NoSuchMember { whom, near } => Self::NotFound(NotFound::Member { whom, near }),
            Refusal::NeedsSeat => Self::Denied(Denied::NoSeat),
            Refusal::NotYourself => Self::InvalidArgument(InvalidArgument::Yourself),
            Refusal::IsUnproven { pid } => Self::Denied(Denied::Unproven { pid }),
            Refusal::NotUnproven { pid, state } => Self::Denied(Denied::NotUnproven { pid, state }),
            Refusal::Evicted { by, at } => Self::Gone(Gone::Evicted { by, ago: ago(at) }),
            Refusal::InUse { names, members } => Self::Busy(Busy::BrokerInUse { names, members }),
            Refusal::ShuttingDown | Refusal::CannotResume => {
                Self::Unreachable(Unreachable::Gone { socket: socket.to_owned() })
            }
            other => Self::Unreachable(Unreachable::Refused(format!("{other:?}"))),
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
