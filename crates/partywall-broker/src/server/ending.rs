//! How the broker ends.

use std::{
    thread,
    time::{Duration, Instant},
};

use partywall_os::socket::{self, Ready};
use partywall_shm::timeline::Ending;
use partywall_wire::Refusal;

use crate::{
    Exit,
    server::{
        connection::{Channel, Phase, Sent},
        event_loop::Server,
        timers::Timer,
    },
};

impl Server {
    /// Begins to count the time without members and names, or stops counting.
    pub(super) fn note_idleness(&mut self) {
        let Some(idle_exit) = self.idle_exit else { return };
        if !self.registry.is_idle() || !self.peers.connections.is_empty() {
            self.idle_since = None;
        } else if self.idle_since.is_none() {
            self.idle_since = Some(Instant::now());
            self.reactor.set_timer(idle_exit, Timer::Idle);
        }
    }

    /// Leaves if nobody has been here for long enough and nobody is on the way.
    pub(super) fn leave_if_idle(&mut self) {
        let (Some(idle_exit), Some(since)) = (self.idle_exit, self.idle_since) else { return };
        if since.elapsed() < idle_exit {
            return;
        }
        // A process that holds the lock is looking for a broker: it will find this one.
        let Ok(_lock) = self.acceptor.place.file.lock_directory() else {
            self.reactor.set_timer(IDLE_RETRY, Timer::Idle);
            return;
        };
        self.accept();
        if !self.peers.connections.is_empty() {
            return;
        }
        self.acceptor.place.file.remove();
        tracing::info!("leaving: nobody needs this broker");
        self.exit = Some(Exit::Idle);
    }

    /// Leaves nothing behind.
    pub(super) fn finish(mut self) {
        self.acceptor.place.file.remove();
        for cell in self.registry.live_cells() {
            self.runner.control.end(cell, Ending::BrokerGone);
        }
        self.turn_away_the_rest();
        let deadline = Instant::now() + TIMEOUT;
        let unread_until = Instant::now() + UNREAD;
        for connection in self.peers.connections.values_mut() {
            while connection.owes_reply() {
                let is_worth_trying = match connection.flush(Channel::Call, &mut self.peers.in_flight) {
                    Ok(Sent::Blocked) => socket::wait(connection.call(), Ready::Write, Some(deadline)) == Ok(true),
                    // A read cannot be waited for as room can.
                    Ok(Sent::Unread) if Instant::now() < unread_until => {
                        thread::sleep(UNREAD_RETRY);
                        true
                    }
                    _ => false,
                };
                if !is_worth_trying {
                    break;
                }
            }
        }
        let Self { peers, runner, acceptor, .. } = self;
        drop((peers, acceptor));
        runner.finish(TIMEOUT);
        tracing::info!("ended");
    }

    /// Refuses the connections that wait to be accepted: the broker is about to end.
    fn turn_away_the_rest(&mut self) {
        self.acceptor.spare = None;
        while let Ok(Some(call)) = socket::accept(&self.acceptor.place.listener) {
            self.acceptor.refuse(&call, Refusal::ShuttingDown);
        }
        for connection in self.peers.connections.values() {
            if connection.phase() == Phase::Handshake {
                self.acceptor.refuse(connection.call(), Refusal::ShuttingDown);
            }
        }
    }
}

/// How long to wait when somebody is looking for a broker just as this one wants to leave.
const IDLE_RETRY: Duration = Duration::from_secs(1);

/// How long clients may take to read what they were sent, so that they get the rest.
const UNREAD: Duration = Duration::from_millis(200);

/// How often to find out whether they have.
const UNREAD_RETRY: Duration = Duration::from_millis(1);

/// How long the end may take on account of others.
const TIMEOUT: Duration = Duration::from_secs(5);
