//! Whose messages are read and done next, and how many of them.
//!
//! One request costs one wait, one read and one write; everything else here is for when many ask at once.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use crate::server::{
    connection::{Channel, ConnectionId, Phase, Read},
    event_loop::Server,
};

impl Server {
    /// Does what clients ask for, those first that have cost the least recently, until the turn is over. So a client
    /// that asks now and then waits for one turn at most, however many others ask without pause.
    pub(super) fn serve(&mut self) {
        if self.peers.unfinished.is_empty() && self.peers.readable.len() <= 1 {
            // With nobody else to be answered the order is no question.
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
                self.go_on(id);
            }
            let done = Instant::now();
            if let Some(connection) = self.peers.connections.get_mut(&id) {
                connection.charge(done - last, done);
            }
            if done - now >= TURN {
                // The kernel reports those again that still have something to be read.
                return;
            }
            last = done;
        }
    }

    /// Reads what a client has sent and does it. One that has closed its events socket may have said good-bye on the
    /// other one before; as long as it goes on there, it is a client like others.
    pub(super) fn hear(&mut self, id: ConnectionId) {
        let Some(connection) = self.peers.connections.get(&id) else { return };
        let is_half = connection.is_closed(Channel::Events);
        let thoroughness = if is_half { Thoroughness::Final } else { Thoroughness::Usual };
        if self.on_readable(id, thoroughness) && is_half {
            self.hang_up(id, "its events socket has ended");
        }
    }

    /// Reads what a client has sent and does it, as much as one turn allows. Whether nothing is left to read.
    fn on_readable(&mut self, id: ConnectionId, thoroughness: Thoroughness) -> bool {
        if self.peers.unfinished.remove(&id) && !self.go_on(id) {
            return false;
        }
        // Taken out for the time of its use, because what it brings concerns all of `self`.
        let mut buffer = std::mem::take(&mut self.buffer);
        let drained = self.read_and_do(id, thoroughness, &mut buffer);
        self.buffer = buffer;
        drained
    }

    fn read_and_do(&mut self, id: ConnectionId, thoroughness: Thoroughness, buffer: &mut [u8]) -> bool {
        for _ in 0..READS_IN_TURN {
            let Some(connection) = self.peers.connections.get_mut(&id) else { return true };
            if connection.is_busy() {
                return true;
            }
            match connection.read(buffer) {
                Ok(Read::Nothing) => return true,
                Ok(Read::End) => {
                    self.on_end(id);
                    return true;
                }
                Ok(Read::Bytes { full }) => {
                    if !self.go_on(id) {
                        return false;
                    }
                    // A full buffer is the sign that more is waiting; else asking would cost a call for nothing.
                    if !full && thoroughness == Thoroughness::Usual {
                        return false;
                    }
                }
                Err(broken) => {
                    self.hang_up(id, &broken.to_string());
                    return true;
                }
            }
        }
        false
    }

    /// Does what the messages say that have been read, as many as one turn allows. Whether that was all.
    fn go_on(&mut self, id: ConnectionId) -> bool {
        let begun = Instant::now();
        for _ in 0..MESSAGES_IN_TURN {
            let Some(connection) = self.peers.connections.get_mut(&id).filter(|_| self.exit.is_none()) else {
                return true;
            };
            let phase = connection.phase();
            if connection.is_busy() {
                // Its next message has its turn when this one is answered.
                return true;
            }
            if matches!(phase, Phase::Lingering(_)) {
                self.runner.store.discard(connection.take_received());
                return true;
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
            if begun.elapsed() >= SLICE {
                break;
            }
        }
        self.peers.unfinished.insert(id);
        false
    }
}

/// How far to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thoroughness {
    /// As far as is likely to bring something.
    Usual,
    /// Until the kernel says that nothing is left.
    Final,
}

/// Full reads of one client before others have their turn.
const READS_IN_TURN: usize = 8;

/// Messages of one client before others have their turn. A correct library sends one, and waits for its answer.
const MESSAGES_IN_TURN: usize = 32;

/// After this long others have their turn, however much the messages of a client cost.
const SLICE: Duration = Duration::from_micros(100);

/// After this long the kernel is asked which other clients have sent something.
const TURN: Duration = Duration::from_micros(300);
