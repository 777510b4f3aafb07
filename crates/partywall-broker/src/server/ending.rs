//! The end of the broker.

use std::{
    thread,
    time::{Duration, Instant},
};

use partywall_os::socket::{self, Ready};
use partywall_wire::Refusal;
use partywall_wire::TimelineEnding;

use crate::{
    Exit,
    server::{
        connection::{Channel, Phase, Sent},
        event_loop::Server,
        timers::Timer,
    },
};

impl Server {
    /// Starts or stops the idle time: the time without members, names and connections.
    pub(super) fn note_idleness(&mut self) {
        let Some(idle_exit) = self.idle_exit else { return };
        if !self.registry.is_idle() || !self.peers.connections.is_empty() {
            self.idle_since = None;
        } else if self.idle_since.is_none() {
            self.idle_since = Some(Instant::now());
            self.reactor.set_timer(idle_exit, Timer::Idle);
        }
    }

    /// Ends the broker if it has been idle for long enough and no process is looking for it.
    pub(super) fn leave_if_idle(&mut self) {
        let (Some(idle_exit), Some(since)) = (self.idle_exit, self.idle_since) else { return };
        if since.elapsed() < idle_exit {
            return;
        }
        // A process that holds the lock is looking for a broker, and must find this one.
        let Ok(_lock) = self.acceptor.lock_directory() else {
            self.reactor.set_timer(IDLE_RETRY, Timer::Idle);
            return;
        };
        self.accept();
        if !self.peers.connections.is_empty() {
            return;
        }
        self.set_ending();
        self.acceptor.bound.file.remove();
        tracing::info!("ending: the broker is idle");
        self.exit = Some(Exit::Idle);
    }

    /// Removes the socket, sends pending output and closes everything.
    pub(super) fn finish(mut self) {
        self.set_ending();
        self.acceptor.bound.file.remove();
        for cell in self.registry.objects().cells.live() {
            self.runner.control.end(cell, TimelineEnding::BrokerGone);
        }
        self.turn_away_the_rest();
        let deadline = Instant::now() + TIMEOUT;
        let unread_until = Instant::now() + UNREAD;
        for connection in self.peers.connections.values_mut() {
            while connection.owes_reply() {
                let is_worth_trying = match connection.flush(Channel::Call, &mut self.peers.in_flight) {
                    Ok(Sent::Blocked) => socket::wait(connection.call(), Ready::Write, Some(deadline)) == Ok(true),
                    // The kernel does not report when a client has read.
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

    /// Notes that the domain ends: no worker follows this one, even if it is killed before the end.
    pub(super) fn set_ending(&self) {
        if let Some(supervised) = &self.supervised {
            supervised.page.set_ending();
        }
    }

    /// Refuses the connections that wait to be accepted, because the broker is about to end.
    fn turn_away_the_rest(&mut self) {
        self.acceptor.spare = None;
        while let Ok(Some(call)) = socket::accept(&self.acceptor.bound.listener) {
            self.acceptor.refuse(&call, Refusal::ShuttingDown);
        }
        for connection in self.peers.connections.values() {
            if connection.phase() == Phase::Handshake {
                self.acceptor.refuse(connection.call(), Refusal::ShuttingDown);
            }
        }
    }
}

/// How long to postpone the end when a process is looking for a broker.
const IDLE_RETRY: Duration = Duration::from_secs(1);

/// How long to wait for clients to read sent messages, so that they get the rest.
const UNREAD: Duration = Duration::from_millis(200);

/// How often to check whether clients have read.
const UNREAD_RETRY: Duration = Duration::from_millis(1);

/// The longest that the broker waits for other processes before it exits.
const TIMEOUT: Duration = Duration::from_secs(5);
