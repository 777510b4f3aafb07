//! Turns: the order in which clients are served, and the number of messages that each may send in a turn.
//!
//! A single request costs one wait, one read and one write. Everything else here is for many requests at once. The loop
//! collects the clients that have sent something, and serves those first whose requests have cost the least recently. A
//! client gets its answer before its next request is read, so answers do not pile up for a client that does not read.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use crate::{
    config::FDS_PER_CLIENT,
    server::{
        Server,
        connection::{Channel, ConnectionId, Phase, Read},
    },
};

impl Server {
    /// Serves clients until the turn is over, those with the lowest recent cost first. A client with occasional
    /// requests therefore waits for one turn at most, even if others send requests without pause.
    pub(super) fn serve(&mut self) {
        if self.peers.unfinished.is_empty() && self.peers.readable.len() <= 1 {
            // A single client needs no order.
            if let Some(id) = self.peers.readable.pop() {
                self.hear(id);
            }
            return;
        }
        let readable: BTreeSet<_> = self.peers.readable.drain(..).collect();
        let now = Instant::now();
        let turn = self.peers.by_cost(&readable, now);
        let mut last = now;
        for (_, id) in turn {
            if readable.contains(&id) {
                self.hear(id);
            } else if self.peers.unfinished.remove(&id) {
                self.process(id);
            }
            let done = Instant::now();
            if let Some(connection) = self.peers.connections.get_mut(&id) {
                connection.charge(done - last, done);
            }
            if done - now >= TURN {
                // The kernel reports the remaining clients again.
                return;
            }
            last = done;
        }
    }

    /// Reads and processes messages of a client. If the client has closed its events socket, the call socket is read to
    /// its end first, because a `Bye` may be pending there.
    pub(super) fn hear(&mut self, id: ConnectionId) {
        let Some(connection) = self.peers.connections.get(&id) else { return };
        let is_half = connection.is_closed(Channel::Events);
        let thoroughness = if is_half { Thoroughness::Final } else { Thoroughness::Usual };
        if self.on_readable(id, thoroughness) && is_half {
            self.hang_up(id, "its events socket has ended");
        }
    }

    /// Reads and processes messages of a client, as many as one turn allows. Returns whether nothing is left to read.
    fn on_readable(&mut self, id: ConnectionId, thoroughness: Thoroughness) -> bool {
        if self.peers.unfinished.remove(&id) && !self.process(id) {
            return false;
        }
        // Taken out of `self`, because processing the messages borrows all of `self`.
        let mut buffer = std::mem::take(&mut self.buffer);
        let drained = self.read_and_process(id, thoroughness, &mut buffer);
        self.buffer = buffer;
        drained
    }

    fn read_and_process(&mut self, id: ConnectionId, thoroughness: Thoroughness, buffer: &mut [u8]) -> bool {
        for _ in 0..READS_IN_TURN {
            let drained = self.read_once(id, thoroughness, buffer);
            // After each, because one read may have filled a quarter of the table of open files.
            self.store.reclaimer().catch_up(self.room_for_files());
            if let Some(drained) = drained {
                return drained;
            }
        }
        false
    }

    /// Reads once, and processes the messages. Returns whether nothing is left to read, or `None` if another read may
    /// find more in this turn.
    fn read_once(&mut self, id: ConnectionId, thoroughness: Thoroughness, buffer: &mut [u8]) -> Option<bool> {
        let Some(connection) = self.peers.connections.get_mut(&id).filter(|connection| !connection.is_busy()) else {
            return Some(true);
        };
        match connection.read(buffer) {
            Ok(Read::Nothing) => Some(true),
            Ok(Read::End) => {
                self.on_end(id);
                Some(true)
            }
            Ok(Read::Bytes { full }) => {
                let is_done = self.process(id);
                while let Some(holder) = self.peers.holds_too_many_unclaimed(id) {
                    self.hang_up(holder, "unfinished messages hold too many file descriptors");
                }
                // Only a full buffer suggests that more is waiting; otherwise another read would most likely be wasted.
                let goes_on = is_done && (full || thoroughness == Thoroughness::Final);
                if goes_on { None } else { Some(false) }
            }
            Err(broken) => {
                self.hang_up(id, &broken.to_string());
                Some(true)
            }
        }
    }

    /// Returns how many open files memory and clients leave of their limits.
    fn room_for_files(&self) -> usize {
        let memory = (self.limits.fds as usize).saturating_sub(self.store.len());
        let clients = (self.limits.clients as usize).saturating_sub(self.peers.connections.len());
        memory + clients * FDS_PER_CLIENT as usize
    }

    /// Processes the messages that have been read, as many as one turn allows. Returns whether none is left.
    fn process(&mut self, id: ConnectionId) -> bool {
        let begun = Instant::now();
        for processed in 0..MESSAGES_IN_TURN {
            let Some(connection) = self.peers.connections.get_mut(&id).filter(|_| self.exit.is_none()) else {
                return true;
            };
            let phase = connection.phase();
            if connection.is_busy() {
                // The next message is processed when this one has been answered.
                return true;
            }
            if matches!(phase, Phase::Lingering(_)) {
                self.store.discard(connection.take_received());
                return true;
            }
            // A correct client has sent one message alone, for which the clock is not read again.
            if processed > 0 && !connection.has_no_input() && begun.elapsed() >= MAX_CLIENT_TURN {
                break;
            }
            match (connection.next_message(), phase) {
                (Ok(None), _) => return true,
                (Ok(Some(message)), Phase::Member(member)) => self.on_request(id, member, message),
                (Ok(Some(message)), _) => self.on_hello(id, message),
                (Err(broken), _) => {
                    self.hang_up(id, &broken.to_string());
                    return true;
                }
            }
        }
        self.peers.unfinished.insert(id);
        false
    }
}

/// When to stop reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thoroughness {
    /// As long as more input is likely.
    Usual,
    /// Until the kernel says that nothing is left.
    Final,
}

/// Full reads of one client in a turn.
const READS_IN_TURN: usize = 8;

/// Messages of one client in a turn. A correct library sends one request and waits for its answer.
const MESSAGES_IN_TURN: usize = 32;

/// The time after which a client's turn ends, between two messages.
const MAX_CLIENT_TURN: Duration = Duration::from_micros(100);

/// The time after which the kernel is polled for input of other clients.
const TURN: Duration = Duration::from_micros(300);
