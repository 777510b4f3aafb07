//! The connection to one client: bounded input and output of bytes and file descriptors.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_os::{Errno, socket};
use partywall_wire::{
    FrameReader, WireError, frame,
    limits::{FDS_AT_ONCE, MAX_FDS, MIN_MESSAGE},
};
use rustix::{
    event::epoll::EventFlags,
    net::{Shutdown, shutdown},
};
use serde::{Deserialize, Serialize};

use crate::{
    registry::MemberId,
    server::{
        in_flight::{InFlight, Port, Process},
        reclaimer::{ClientSocket, Donated},
    },
};

/// The number of a connection; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct ConnectionId(pub(super) u64);

/// The phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is unauthenticated.
    Handshake,
    /// It belongs to this member.
    Member(MemberId),
    /// The broker no longer talks to this member here. The socket stays open because its end-of-file proves that no
    /// process, such as a child of the member's, holds the other end. A proof of death needs that. Further input is
    /// read and discarded; otherwise the member would block while sending a request.
    Lingering(MemberId),
}

/// One of the two sockets of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Channel {
    /// Requests and replies.
    Call,
    /// Events, one way.
    Events,
}

/// The result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// Bytes; more may be waiting if the buffer is full.
    Bytes { full: bool },
    /// No bytes at present.
    Nothing,
    /// The peer has hung up.
    End,
}

/// A complete message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) frame: partywall_wire::Frame,
    /// In the order of sending. Fewer than the frame states if the kernel dropped some because no descriptor was free.
    pub(super) fds: Vec<OwnedFd>,
}

/// Why a connection cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    #[error("{0}")]
    Malformed(String),
    #[error("the peer does not read: {bytes} bytes are pending")]
    Overflow { bytes: usize },
    #[error("{0}")]
    Errno(#[from] Errno),
}

/// The result of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// Everything was sent.
    All,
    /// The rest waits until the socket has room.
    Blocked,
    /// The rest waits until the peer has read everything that was sent.
    Unread,
    /// The rest waits until other processes read their descriptors or the kernel has memory again. The kernel reports
    /// neither.
    NoRoom,
}

/// One client.
#[derive(Debug)]
pub(super) struct Connection {
    id: ConnectionId,
    process: Process,
    call: Arc<ClientSocket>,
    events: Option<Arc<ClientSocket>>,
    phase: Phase,
    /// The processing time of its messages, and when that was measured.
    cost: (Duration, Instant),
    /// Whether its next message is parked until the answer can carry descriptors.
    pub(super) is_parked: bool,
    /// Whether a timer is set to send pending output.
    pub(super) awaits_retry: bool,
    reader: FrameReader,
    received: VecDeque<OwnedFd>,
    /// Since when the first of `received` has been there.
    received_since: Instant,
    /// Whether the kernel dropped file descriptors since the last complete message.
    fds_lost: bool,
    replies: OutQueue,
    notices: OutQueue,
}

impl Connection {
    pub(super) fn new(id: ConnectionId, call: ClientSocket, process: Process) -> Self {
        Self {
            id,
            process,
            call: Arc::new(call),
            events: None,
            phase: Phase::Handshake,
            cost: (Duration::ZERO, Instant::now()),
            is_parked: false,
            awaits_retry: false,
            reader: FrameReader::new(MIN_MESSAGE),
            received: VecDeque::new(),
            received_since: Instant::now(),
            fds_lost: false,
            replies: OutQueue::default(),
            notices: OutQueue::default(),
        }
    }

    /// Turns the connection into that of a member.
    pub(super) fn admit(&mut self, member: MemberId, events: ClientSocket, max_message: usize) {
        self.phase = Phase::Member(member);
        self.events = Some(Arc::new(events));
        self.reader.set_limit(max_message);
    }

    /// Shuts down the connection and drops everything except the call socket.
    pub(super) fn linger(&mut self, member: MemberId, in_flight: &mut InFlight) {
        self.phase = Phase::Lingering(member);
        self.discard(Channel::Call, in_flight);
        self.discard(Channel::Events, in_flight);
        // The peer may be gone already.
        let _ = shutdown(&self.call, Shutdown::Write);
        if let Some(events) = self.events.take() {
            close(&events);
        }
        self.reader = FrameReader::new(0);
    }

    /// Ends the connection. Its sockets stay open, unwatched, while the peer has unread descriptors.
    pub(super) fn close(&mut self, in_flight: &mut InFlight) {
        self.discard(Channel::Call, in_flight);
        self.discard(Channel::Events, in_flight);
        close(&self.call);
        self.events.take().as_deref().map(close);
    }

    /// Reads once.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<Read, Broken> {
        let had_none = self.received.is_empty();
        match socket::recv(&self.call, buffer, &mut self.received) {
            Ok(got) => {
                if had_none && !self.received.is_empty() {
                    self.received_since = Instant::now();
                }
                self.fds_lost |= got.fds_lost;
                if got.bytes == 0 {
                    return Ok(Read::End);
                }
                if self.phase == Phase::Handshake && self.received.len() > 1 {
                    // An unauthenticated connection must not fill the broker's table of open files.
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

    /// Returns whether nothing of another message has been read.
    pub(super) fn has_no_input(&self) -> bool {
        self.reader.is_empty()
    }

    /// Returns the next complete message, if there is one.
    pub(super) fn next_message(&mut self) -> Result<Option<Message>, Broken> {
        let at_hand = if self.fds_lost { usize::MAX } else { self.received.len() };
        match self.reader.next_frame(at_hand) {
            Ok(frame) => {
                let arrived = self.received.len().min(frame.fds);
                let fds = self.received.drain(..arrived).collect();
                if !self.received.is_empty() {
                    self.received_since = Instant::now();
                }
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
            // File descriptors travel with the first byte of their message. A missing one never comes.
            Err(WireError::NeedFds(n)) => Err(Broken::Malformed(format!("{n} file descriptors were not sent"))),
            Err(WireError::Malformed(why)) => Err(Broken::Malformed(why)),
        }
    }

    /// Sends a message, or queues it until the peer has room.
    pub(super) fn send(
        &mut self,
        channel: Channel,
        bytes: Vec<u8>,
        fds: Vec<Arc<Donated>>,
        in_flight: &mut InFlight,
    ) -> Result<Sent, Broken> {
        if channel == Channel::Events && self.events.is_none() {
            return Ok(Sent::All);
        }
        let queue = self.queue(channel);
        let blocked = !queue.waiting.is_empty();
        queue.bytes += bytes.len();
        queue.waiting.push_back(Outgoing { bytes, sent: 0, fds, has_slots: false });
        let sent = if blocked { queue.last } else { self.flush(channel, in_flight)? };
        match self.queue(channel).bytes {
            bytes if bytes > MAX_WAITING_BYTES => Err(Broken::Overflow { bytes }),
            _ => Ok(sent),
        }
    }

    /// Sends pending output.
    pub(super) fn flush(&mut self, channel: Channel, in_flight: &mut InFlight) -> Result<Sent, Broken> {
        let port = (self.id, channel);
        let (queue, socket) = match (channel, &self.events) {
            (Channel::Call, _) => (&mut self.replies, &self.call),
            (Channel::Events, Some(events)) => (&mut self.notices, events),
            (Channel::Events, None) => return Ok(Sent::All),
        };
        queue.last = queue.flush(port, socket, self.process, in_flight)?;
        Ok(queue.last)
    }

    /// Discards pending output after the peer has closed its end. A parked message is dropped with its call socket.
    pub(super) fn discard(&mut self, channel: Channel, in_flight: &mut InFlight) {
        in_flight.finish((self.id, channel));
        if channel == Channel::Call {
            self.is_parked = false;
        }
        let queue = self.queue(channel);
        queue.waiting.clear();
        queue.bytes = 0;
        queue.is_closed = true;
    }

    /// Returns whether the peer has closed its end.
    pub(super) fn is_closed(&self, channel: Channel) -> bool {
        match channel {
            Channel::Call => self.replies.is_closed,
            Channel::Events => self.notices.is_closed,
        }
    }

    /// Returns the new interest in a socket, if it changes: requests, or room for pending output. A client gets its
    /// answer before its next request is read. The end of a connection is always reported.
    pub(super) fn change_of_interest(&mut self, channel: Channel, sent: Sent) -> Option<EventFlags> {
        let interest = match (sent, channel) {
            (Sent::All, Channel::Call) if !self.is_parked => EventFlags::IN,
            (Sent::All | Sent::NoRoom, _) => EventFlags::empty(),
            (Sent::Blocked, _) => EventFlags::OUT,
            // The socket counts as writable even while data is unread. Edge-triggered, each read by the peer is an
            // event.
            (Sent::Unread, _) => EventFlags::OUT | EventFlags::ET,
        };
        let queue = self.queue(channel);
        let before = queue.interest.replace(interest);
        let initial = if channel == Channel::Call { EventFlags::IN } else { EventFlags::empty() };
        (before.unwrap_or(initial) != interest).then_some(interest)
    }

    fn queue(&mut self, channel: Channel) -> &mut OutQueue {
        match channel {
            Channel::Call => &mut self.replies,
            Channel::Events => &mut self.notices,
        }
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
            Channel::Events => self.events.as_deref().map(AsFd::as_fd),
        }
    }

    /// Returns the recent processing time of its messages. A quarter of the elapsed time is deducted.
    pub(super) fn recent_cost(&self, now: Instant) -> Duration {
        let (cost, at) = self.cost;
        cost.saturating_sub(now.saturating_duration_since(at) / 4)
    }

    /// Adds to the processing time of its messages.
    pub(super) fn charge(&mut self, cost: Duration, now: Instant) {
        self.cost = ((self.recent_cost(now) + cost).min(MAX_COST), now);
    }

    /// Returns whether an earlier message of the peer is parked, or its reply waits to be sent. Until then no further
    /// message is read, so the peer cannot make the broker's memory grow.
    pub(super) fn is_busy(&self) -> bool {
        self.is_parked || self.owes_reply()
    }

    /// Returns whether a reply waits to be sent.
    pub(super) fn owes_reply(&self) -> bool {
        !self.replies.waiting.is_empty()
    }

    /// Returns the process that connected.
    pub(super) fn process(&self) -> Process {
        self.process
    }

    /// Returns how many file descriptors have arrived with an unfinished message.
    pub(super) fn unclaimed(&self) -> usize {
        self.received.len()
    }

    /// Returns since when the first of them has been there.
    pub(super) fn unclaimed_since(&self) -> Instant {
        self.received_since
    }

    /// Takes the received file descriptors that no message claimed.
    pub(super) fn take_received(&mut self) -> VecDeque<OwnedFd> {
        std::mem::take(&mut self.received)
    }
}

fn close(socket: &ClientSocket) {
    // The peer may be gone already.
    let _ = shutdown(socket, Shutdown::Both);
}

/// Output that the socket has no room for yet.
#[derive(Debug)]
struct OutQueue {
    waiting: VecDeque<Outgoing>,
    bytes: usize,
    /// The result of the last attempt to send.
    last: Sent,
    /// The socket's present interest, once it was changed.
    interest: Option<EventFlags>,
    is_closed: bool,
}

impl Default for OutQueue {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), bytes: 0, last: Sent::All, interest: None, is_closed: false }
    }
}

#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// Unsent descriptors. The last group is sent with the first byte, the other groups before it.
    fds: Vec<Arc<Donated>>,
    /// Whether in-flight slots are reserved for its descriptors.
    has_slots: bool,
}

impl OutQueue {
    fn flush(
        &mut self,
        port: Port,
        socket: &Arc<ClientSocket>,
        process: Process,
        in_flight: &mut InFlight,
    ) -> Result<Sent, Broken> {
        while let Some(next) = self.waiting.front_mut() {
            if !next.fds.is_empty() {
                if !socket::is_drained(socket) {
                    return Ok(Sent::Unread);
                }
                if next.has_slots {
                    in_flight.renew(port);
                } else {
                    next.has_slots = in_flight.reserve(port, socket, process, next.fds.len().min(FDS_AT_ONCE));
                    if !next.has_slots {
                        return Ok(Sent::NoRoom);
                    }
                }
            }
            let group = next.fds.len().min(FDS_AT_ONCE);
            let is_last = group == next.fds.len();
            let fds: Vec<_> = next.fds[..group].iter().filter_map(|fd| fd.fd()).collect();
            let carrier = frame::carrier(group);
            let bytes = if is_last { &next.bytes[next.sent..] } else { &carrier };
            match socket::send(socket, bytes, &fds) {
                Ok(n) => {
                    next.fds.drain(..group);
                    if !is_last {
                        // The socket was empty, so it had room for these few bytes.
                        debug_assert_eq!(n, bytes.len());
                        continue;
                    }
                    if next.has_slots {
                        in_flight.finish(port);
                    }
                    self.bytes -= n;
                    next.sent += n;
                    if next.sent == next.bytes.len() {
                        self.waiting.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(Sent::Blocked),
                // Too many file descriptors of this user are in flight, or memory is short. The socket counts as
                // writable meanwhile, so waiting for room would spin.
                Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => return Ok(Sent::NoRoom),
                // The peer no longer reads. Its earlier input is still read, up to the end-of-file.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    in_flight.finish(port);
                    self.waiting.clear();
                    self.bytes = 0;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(Sent::All)
    }
}

/// The maximum recorded cost of a client.
const MAX_COST: Duration = Duration::from_millis(100);

/// The maximum pending output of a client. A client has one call at a time, so a client that reads stays far below.
const MAX_WAITING_BYTES: usize = 4 << 20;
