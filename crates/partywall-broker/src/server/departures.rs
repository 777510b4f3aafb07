//! Ends of connections and exits of processes, and the proof of death that they give together.

use std::os::fd::AsRawFd;

use rustix::event::epoll::EventFlags;

use crate::{
    registry::{Effect, Event, MemberId},
    server::{
        Server,
        connection::{Channel, ConnectionId, Phase},
        membership::Proof,
        reactor::EventSource,
        supervised::Record,
        timers::Timer,
    },
};

impl Server {
    /// Handles the end of a connection: no process holds the other end.
    pub(super) fn on_end(&mut self, id: ConnectionId) {
        let Some(connection) = self.peers.connections.get(&id) else { return };
        let phase = connection.phase();
        self.drop_connection(id);
        if let Phase::Member(member) | Phase::Lingering(member) = phase {
            self.peers.members.closed(member, id);
            if self.peers.members.suspend(member, id) {
                tracing::info!(%member, "disconnected without leaving");
                self.apply(Event::Suspected { member });
            }
            if self.peers.members.ends_with_its_connections(member) {
                self.reactor.set_timer(self.settle, Timer::Settle(member));
            }
        }
    }

    /// Handles the exit of a member's process.
    pub(super) fn on_exit(&mut self, member: MemberId) {
        if let Some(pidfd) = self.peers.members.exited(member) {
            self.record(&Record::Exited { member });
            self.reactor.unwatch(&pidfd);
        }
        // The ends of its sockets may be reported in the same batch or a moment later, so the timer checks the proof.
        self.reactor.set_timer(self.settle, Timer::Settle(member));
    }

    /// Acts on the proof about a member's end.
    pub(super) fn weigh(&mut self, member: MemberId) {
        if self.peers.members.is_lost_operator(member) {
            return self.apply(Event::Suspected { member });
        }
        match self.peers.members.proof(member, self.settle) {
            Proof::None => {}
            Proof::HeldByChild if self.peers.members.note_child(member) => {
                tracing::info!(%member, "has exited, but a child holds its connection");
                self.apply(Event::HeldByChild { member });
            }
            Proof::HeldByChild => {}
            Proof::Dead => {
                tracing::info!(%member, "is proved dead");
                // Recorded before its descriptors are closed.
                self.apply(Event::Died { member });
                self.forget(member);
            }
        }
    }

    /// Drops everything that the server keeps for a member.
    pub(super) fn forget(&mut self, member: MemberId) {
        let Some((pidfd, connections)) = self.peers.members.remove(member) else { return };
        if let Some(pidfd) = pidfd {
            self.reactor.unwatch(&pidfd);
        }
        for id in connections {
            self.drop_connection(id);
        }
    }

    /// Ends a connection that cannot continue. Its member, if it has one, becomes a suspect.
    pub(super) fn hang_up(&mut self, id: ConnectionId, why: &str) {
        let effects = self.hang_up_quietly(id, why);
        self.carry_out(effects);
    }

    /// Ends a connection as [`Server::hang_up`] does, but returns the resulting effects to the caller.
    pub(super) fn hang_up_quietly(&mut self, id: ConnectionId, why: &str) -> Vec<Effect> {
        let Some(connection) = self.peers.connections.get_mut(&id) else { return Vec::new() };
        let Phase::Member(member) = connection.phase() else {
            if connection.phase() == Phase::Handshake {
                tracing::warn!(connection = id.0, why, "dropped an unauthenticated connection");
                self.drop_connection(id);
            }
            return Vec::new();
        };
        tracing::warn!(%member, why, "disconnected");
        self.store.discard(connection.take_received());
        if let Some(events) = connection.socket(Channel::Events) {
            self.reactor.unwatch(events);
        }
        connection.linger(member, &mut self.peers.in_flight);
        // Nothing can be done if the kernel refuses; the member's exit is still noticed.
        let _ = self.reactor.change(connection.call(), EventSource::Socket(Channel::Call, id), EventFlags::IN);
        let suspended = self.peers.members.suspend(member, id);
        if let Some(oldest) = self.peers.members.surplus(member) {
            self.drop_connection(oldest);
            self.peers.members.closed(member, oldest);
        }
        if suspended { self.decide(Event::Suspected { member }) } else { Vec::new() }
    }

    /// Drops a connection.
    pub(super) fn drop_connection(&mut self, id: ConnectionId) {
        self.acceptor.forget(id);
        if let Some(connection) = self.peers.connections.get(&id)
            && let Phase::Member(member) | Phase::Lingering(member) = connection.phase()
            && self.peers.members.holds(member, id)
        {
            let call = connection.call().as_raw_fd();
            self.record(&Record::Disconnected { member, call });
        }
        self.peers.drop_connection(&self.reactor, &self.store, id);
    }
}
