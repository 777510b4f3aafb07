//! Bytes and file descriptors of one client, in and out, within bounds.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use partywall_os::{Errno, socket};
use partywall_wire::{
    FrameReader, WireError,
    limits::{MAX_FDS, MIN_MESSAGE},
};
use rustix::{
    event::epoll::EventFlags,
    net::{Shutdown, shutdown},
};

use crate::{registry::MemberId, rim::reclaimer::Donated};

/// A connection; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionId(pub(super) u64);

/// How far a connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has not said yet who it is.
    Handshake,
    /// It speaks for this member.
    Member(MemberId),
    /// We no longer talk to this member here. The socket stays because its end tells that nobody holds the other end
    /// any more, also no child of the member's process: a proof of death needs that. What still comes is read and
    /// thrown away, or the member would hang in the middle of sending a request.
    Lingering(MemberId),
}

/// One of the two sockets of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    /// Requests and replies.
    Call,
    /// Events, one way.
    Events,
}

/// What a read brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// Bytes; more may be waiting if the buffer is full.
    Bytes { full: bool },
    /// Nothing at present.
    Nothing,
    /// The peer has hung up.
    End,
}

/// A whole message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) frame: partywall_wire::Frame,
    /// In the order of sending; fewer than the frame says if the kernel lost some for lack of free ones.
    pub(super) fds: Vec<OwnedFd>,
}

/// Why a connection cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    #[error("{0}")]
    Malformed(String),
    #[error("the peer does not read: {bytes} bytes and {fds} file descriptors wait for it")]
    Overflow { bytes: usize, fds: usize },
    #[error("{0}")]
    Errno(#[from] Errno),
}

/// What became of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// Nothing waits.
    All,
    /// The rest waits until the peer has read something.
    Blocked,
    /// The rest waits until the kernel has room again, which it does not announce.
    NoRoom,
}

/// One client.
#[derive(Debug)]
pub(super) struct Connection {
    call: OwnedFd,
    events: Option<OwnedFd>,
    phase: Phase,
    reader: FrameReader,
    received: VecDeque<OwnedFd>,
    /// The kernel dropped file descriptors since the last whole message.
    fds_lost: bool,
    replies: OutQueue,
    notices: OutQueue,
}

impl Connection {
    pub(super) fn new(call: OwnedFd) -> Self {
        Self {
            call,
            events: None,
            phase: Phase::Handshake,
            reader: FrameReader::new(MIN_MESSAGE),
            received: VecDeque::new(),
            fds_lost: false,
            replies: OutQueue::default(),
            notices: OutQueue::default(),
        }
    }

    /// The client has become a member.
    pub(super) fn admit(&mut self, member: MemberId, events: OwnedFd, max_message: usize) {
        self.phase = Phase::Member(member);
        self.events = Some(events);
        self.reader.set_limit(max_message);
    }

    /// Tells the peer that the connection is over and forgets everything but the call socket.
    pub(super) fn linger(&mut self, member: MemberId) {
        self.phase = Phase::Lingering(member);
        // The peer may be gone already.
        let _ = shutdown(&self.call, Shutdown::Write);
        self.events = None;
        self.reader = FrameReader::new(0);
        self.replies = OutQueue::default();
        self.notices = OutQueue::default();
    }

    /// Reads once.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<Read, Broken> {
        match socket::recv(&self.call, buffer, &mut self.received) {
            Ok(got) => {
                self.fds_lost |= got.fds_lost;
                if got.bytes == 0 {
                    return Ok(Read::End);
                }
                if self.phase == Phase::Handshake && self.received.len() > 1 {
                    // Nobody whom we do not know yet may fill our table of open files.
                    return Err(Broken::Malformed("more than one file descriptor came with the handshake".into()));
                }
                if !matches!(self.phase, Phase::Lingering(_)) {
                    self.reader.push(&buffer[..got.bytes]);
                }
                Ok(Read::Bytes { full: got.bytes == buffer.len() })
            }
            Err(Errno::AGAIN) => Ok(Read::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => Ok(Read::End),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Cuts off the next whole message, if there is one.
    pub(super) fn next_message(&mut self) -> Result<Option<Message>, Broken> {
        let at_hand = if self.fds_lost { usize::MAX } else { self.received.len() };
        match self.reader.next_frame(at_hand) {
            Ok(frame) => {
                let arrived = self.received.len().min(frame.fds);
                let fds = self.received.drain(..arrived).collect();
                self.fds_lost = false;
                Ok(Some(Message { frame, fds }))
            }
            Err(WireError::NeedBytes(_)) if self.reader.is_empty() && !self.received.is_empty() => {
                Err(Broken::Malformed(format!("{} file descriptors belong to no message", self.received.len())))
            }
            Err(WireError::NeedBytes(_)) if self.received.len() > MAX_FDS => {
                Err(Broken::Malformed(format!("{} file descriptors came with one message", self.received.len())))
            }
            Err(WireError::NeedBytes(_)) => Ok(None),
            // File descriptors travel with the first byte of their message: what is not here will not come.
            Err(WireError::NeedFds(n)) => Err(Broken::Malformed(format!("{n} file descriptors were not sent"))),
            Err(WireError::Malformed(why)) => Err(Broken::Malformed(why)),
        }
    }

    /// Sends a message, or keeps it until the peer has room.
    pub(super) fn send(&mut self, channel: Channel, bytes: Vec<u8>, fds: Vec<Arc<Donated>>) -> Result<Sent, Broken> {
        match channel {
            Channel::Call => self.replies.send(&self.call, bytes, fds),
            Channel::Events => match &self.events {
                Some(events) => self.notices.send(events, bytes, fds),
                None => Ok(Sent::All),
            },
        }
    }

    /// Goes on sending what waits.
    pub(super) fn flush(&mut self, channel: Channel) -> Result<Sent, Broken> {
        match (channel, &self.events) {
            (Channel::Call, _) => self.replies.flush(&self.call),
            (Channel::Events, Some(events)) => self.notices.flush(events),
            (Channel::Events, None) => Ok(Sent::All),
        }
    }

    /// What the kernel is to tell of a socket from now on, if that is not what it tells already: requests, and room
    /// while something waits for it. The end of a connection is told in any case.
    pub(super) fn change_of_interest(&mut self, channel: Channel, sent: Sent) -> Option<EventFlags> {
        let (queue, always) = match channel {
            Channel::Call => (&mut self.replies, EventFlags::IN),
            Channel::Events => (&mut self.notices, EventFlags::empty()),
        };
        let wants_room = sent == Sent::Blocked;
        if std::mem::replace(&mut queue.wants_room, wants_room) == wants_room {
            return None;
        }
        Some(if wants_room { always | EventFlags::OUT } else { always })
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    pub(super) fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    pub(super) fn socket(&self, channel: Channel) -> Option<BorrowedFd<'_>> {
        match channel {
            Channel::Call => Some(self.call.as_fd()),
            Channel::Events => self.events.as_ref().map(AsFd::as_fd),
        }
    }

    /// Whether a reply waits for the peer.
    pub(super) fn owes_reply(&self) -> bool {
        !self.replies.waiting.is_empty()
    }

    /// File descriptors that came and were not used.
    pub(super) fn take_received(&mut self) -> VecDeque<OwnedFd> {
        std::mem::take(&mut self.received)
    }
}

/// Messages that a peer had no room for yet.
#[derive(Debug, Default)]
struct OutQueue {
    waiting: VecDeque<Outgoing>,
    bytes: usize,
    fds: usize,
    /// Whether the kernel tells when the socket has room.
    wants_room: bool,
}

#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// They go with the first byte; empty from then on.
    fds: Vec<Arc<Donated>>,
}

impl OutQueue {
    fn send(&mut self, socket: &OwnedFd, bytes: Vec<u8>, fds: Vec<Arc<Donated>>) -> Result<Sent, Broken> {
        self.bytes += bytes.len();
        self.fds += fds.len();
        let blocked = !self.waiting.is_empty();
        self.waiting.push_back(Outgoing { bytes, sent: 0, fds });
        let sent = if blocked { Sent::Blocked } else { self.flush(socket)? };
        if self.bytes > MAX_WAITING_BYTES || self.fds > MAX_WAITING_FDS {
            return Err(Broken::Overflow { bytes: self.bytes, fds: self.fds });
        }
        Ok(sent)
    }

    fn flush(&mut self, socket: &OwnedFd) -> Result<Sent, Broken> {
        while let Some(next) = self.waiting.front_mut() {
            let fds: Vec<_> = next.fds.iter().filter_map(|fd| fd.fd()).collect();
            match socket::send(socket, &next.bytes[next.sent..], &fds) {
                Ok(n) => {
                    self.bytes -= n;
                    self.fds -= next.fds.len();
                    next.sent += n;
                    next.fds.clear();
                    if next.sent == next.bytes.len() {
                        self.waiting.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(Sent::Blocked),
                // Too many file descriptors are on their way to peers that do not read, or memory is short. The
                // socket counts as writable all the while, so waiting for that would spin.
                Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => return Ok(Sent::NoRoom),
                // Nobody reads any more, but what the peer sent before is still to be taken in; then comes the end.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.waiting.clear();
                    (self.bytes, self.fds) = (0, 0);
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(Sent::All)
    }
}

/// A client asks one thing at a time: nobody who reads comes anywhere near these.
const MAX_WAITING_BYTES: usize = 4 << 20;
const MAX_WAITING_FDS: usize = 1024;
