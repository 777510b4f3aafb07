//! Connections, their members, and their pending messages.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::AsRawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_wire::{frame, limits::MAX_MESSAGE};

use crate::{
    registry::MemberId,
    server::{
        connection::{Broken, Channel, Connection, ConnectionId, Message, Phase, Sent},
        fds::FdStore,
        ids::IdMap,
        in_flight::InFlight,
        membership::{MemberFiles, Membership},
        reactor::{EventSource, Reactor},
        reclaimer::Donated,
        timers::Timer,
    },
};

/// All clients.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// Every watched connection, including unauthenticated ones.
    pub(super) connections: IdMap<ConnectionId, Connection>,
    /// Members that are not proved dead. A connection of a member stays in `connections` until no process holds its
    /// other end.
    pub(super) members: Membership,
    /// Descriptors that clients have not read yet, including those of former connections.
    pub(super) in_flight: InFlight,
    /// Connections that have sent something since their last turn. A connection that has ended meanwhile is skipped.
    pub(super) readable: Vec<ConnectionId>,
    /// Connections with messages that were read but not processed.
    pub(super) unfinished: BTreeSet<ConnectionId>,
    /// Messages that wait until their answers can carry descriptors, in order of arrival. Their connections are marked
    /// ([`Connection::is_parked`]). A missing mark means that the client has closed its end, and the message is
    /// discarded.
    pub(super) parked: VecDeque<Parked>,
    /// Whether a timer is set for unread descriptors. It is set while there are any.
    watching_unread: bool,
    /// How many descriptors of unfinished messages the broker keeps.
    max_unclaimed: usize,
}

/// A message that waits until its answer can carry descriptors.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) connection: ConnectionId,
    pub(super) message: Message,
    pub(super) operator: bool,
    pub(super) until: Instant,
}

impl Peers {
    pub(super) fn new(members: Membership, max_unclaimed: usize) -> Self {
        Self { members, max_unclaimed, ..Self::default() }
    }

    /// Sends a message to a member over its current connection. A suspect gets nothing; it will repeat its request.
    pub(super) fn send<T: serde::Serialize>(
        &mut self,
        reactor: &mut Reactor,
        member: MemberId,
        channel: Channel,
        message: &T,
        fds: Vec<Arc<Donated>>,
    ) -> Result<(), Broken> {
        let Some(id) = self.members.current(member) else { return Ok(()) };
        let bytes = frame::encode(message, fds.len(), MAX_MESSAGE).map_err(|e| Broken::Malformed(e.to_string()))?;
        self.send_bytes(reactor, id, channel, bytes, fds)
    }

    pub(super) fn send_bytes(
        &mut self,
        reactor: &mut Reactor,
        id: ConnectionId,
        channel: Channel,
        bytes: Vec<u8>,
        fds: Vec<Arc<Donated>>,
    ) -> Result<(), Broken> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let sent = connection.send(channel, bytes, fds, &mut self.in_flight)?;
        self.after_sending(reactor, id, channel, sent)
    }

    /// Sends pending output of a client.
    pub(super) fn flush(&mut self, reactor: &mut Reactor, id: ConnectionId, channel: Channel) -> Result<(), Broken> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let sent = connection.flush(channel, &mut self.in_flight)?;
        self.after_sending(reactor, id, channel, sent)?;
        if channel == Channel::Call {
            // Requests that arrived meanwhile were left unprocessed.
            self.unfinished.insert(id);
        }
        Ok(())
    }

    /// Discards the pending output of a client that no longer reads.
    pub(super) fn discard(&mut self, reactor: &mut Reactor, id: ConnectionId, channel: Channel) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.discard(channel, &mut self.in_flight);
        // The client is treated as if it had read everything. The socket is registered with epoll, so this does not
        // fail.
        let _ = self.after_sending(reactor, id, channel, Sent::All);
    }

    /// Parks a message until other processes have read their descriptors, for [`PARKED`] at most.
    pub(super) fn park(&mut self, reactor: &mut Reactor, id: ConnectionId, message: Message, operator: bool) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.is_parked = true;
        self.parked.push_back(Parked { connection: id, message, operator, until: Instant::now() + PARKED });
        // Nothing has to be sent. This only stops the kernel from reporting further input of the client. The socket is
        // registered with epoll, so this does not fail.
        let _ = self.after_sending(reactor, id, Channel::Call, Sent::All);
    }

    /// Sets a timer to check for read descriptors, while any are unread.
    pub(super) fn watch_unread(&mut self, reactor: &mut Reactor) {
        self.watching_unread = !self.in_flight.is_empty();
        if self.watching_unread {
            reactor.set_timer(SETTLE_UNREAD, Timer::Unread);
        }
    }

    /// Describes all members for the journal.
    pub(super) fn files(&self) -> BTreeMap<MemberId, MemberFiles> {
        self.members.ids().filter_map(|member| Some((member, self.files_of(member)?))).collect()
    }

    /// Describes a member for the journal.
    pub(super) fn files_of(&self, member: MemberId) -> Option<MemberFiles> {
        self.members.files(member, |id| Some(self.connections.get(id)?.call().as_raw_fd()))
    }

    /// Forgets a connection.
    pub(super) fn drop_connection(&mut self, reactor: &Reactor, store: &FdStore, id: ConnectionId) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        for socket in [Channel::Call, Channel::Events].into_iter().filter_map(|channel| connection.socket(channel)) {
            reactor.unwatch(socket);
        }
        connection.close(&mut self.in_flight);
        store.discard(connection.take_received());
    }

    /// Returns the connection to close if unfinished messages hold more descriptors than the broker keeps, after `last`
    /// has sent something.
    ///
    /// A process that holds too many alone loses its last connection. Otherwise the message that has been unfinished
    /// for longest is lost, of another user than the broker's if there is one: a message of the library is finished
    /// soon.
    pub(super) fn holds_too_many_unclaimed(&self, last: ConnectionId) -> Option<ConnectionId> {
        let key = self.connections.get(&last).filter(|connection| connection.unclaimed() > 0)?.process().key;
        let is_heard = |connection: &Connection| !matches!(connection.phase(), Phase::Lingering(_));
        let holding = || self.connections.iter().filter(|(_, held)| held.unclaimed() > 0 && is_heard(held));
        let count = |of_process: bool| -> usize {
            let counted = holding().filter(|(_, connection)| !of_process || connection.process().key == key);
            counted.map(|(_, connection)| connection.unclaimed()).sum()
        };
        if count(false) <= self.max_unclaimed {
            return None;
        }
        if count(true) > self.max_unclaimed {
            return Some(last);
        }
        let first = |(_, connection): &(_, &Connection)| (!connection.process().is_guest, connection.unclaimed_since());
        holding().min_by_key(first).map(|(id, _)| *id)
    }

    /// Returns the connections with work to do, those with the lowest recent cost first.
    pub(super) fn by_cost(&mut self, readable: &BTreeSet<ConnectionId>, now: Instant) -> Vec<(Duration, ConnectionId)> {
        let cost = |id: &ConnectionId| Some((self.connections.get(id)?.recent_cost(now), *id));
        let mut turn: Vec<_> = readable.union(&self.unfinished).filter_map(cost).collect();
        turn.sort_unstable();
        self.unfinished.retain(|id| self.connections.contains_key(id));
        turn
    }

    /// Arranges for the rest to be sent, if any.
    fn after_sending(
        &mut self,
        reactor: &mut Reactor,
        id: ConnectionId,
        channel: Channel,
        sent: Sent,
    ) -> Result<(), Broken> {
        if !self.watching_unread {
            self.watch_unread(reactor);
        }
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        if sent == Sent::NoRoom && !std::mem::replace(&mut connection.awaits_retry, true) {
            reactor.set_timer(RETRY, Timer::Flush(id));
        }
        if let Some(interest) = connection.change_of_interest(channel, sent)
            && let Some(socket) = connection.socket(channel)
        {
            reactor.change(socket, EventSource::Socket(channel, id), interest)?;
        }
        Ok(())
    }
}

/// How long a message waits for descriptors of other processes to be read.
const PARKED: Duration = Duration::from_secs(1);

/// How often to check whether parked messages can be answered.
pub(super) const UNPARK: Duration = Duration::from_millis(5);

/// How often to check which descriptors have been read while nothing waits for that.
const SETTLE_UNREAD: Duration = Duration::from_secs(1);

/// How long to wait before a retry when the kernel does not report that it has room again.
pub(super) const RETRY: Duration = Duration::from_millis(100);
