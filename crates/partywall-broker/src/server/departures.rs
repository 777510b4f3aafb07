//! Connections that end, processes that exit, and what they prove together.

use std::time::Instant;

use rustix::event::epoll::{self, EventFlags};

use crate::{
    registry::{Effect, Event, MemberId},
    server::{
        connection::{Channel, ConnectionId, Phase},
        event_loop::{Server, Source, now},
        membership::Proof,
        timers::Timer,
    },
};

impl Server {
    /// Nobody holds the other end of a connection any more.
    pub(super) fn on_end(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let phase = connection.phase();
        self.drop_connection(id);
        if let Phase::Member(member) | Phase::Lingering(member) = phase {
            self.members.closed(member, id);
            if self.members.suspend(member, id) {
                tracing::info!(%member, "hung up");
                self.apply(Event::Suspected { member });
            }
            if self.members.ends_with_its_connections(member) {
                self.timers.set(Instant::now() + self.settle, Timer::Settle(member));
            }
        }
    }

    /// A member's process has exited.
    pub(super) fn on_exit(&mut self, member: MemberId) {
        if let Some(pidfd) = self.members.exited(member) {
            // The client has this file open too: closing ours would not end the watching.
            let _ = epoll::delete(&self.epoll, &pidfd);
        }
        // Its sockets may be reported in the same breath or a moment later: what counts is what is true then.
        self.timers.set(Instant::now() + self.settle, Timer::Settle(member));
    }

    /// Acts on what is proved of a member by now.
    pub(super) fn weigh(&mut self, member: MemberId) {
        match self.members.proof(member, self.settle) {
            Proof::None => {}
            Proof::HeldByChild if self.members.note_child(member) => {
                tracing::info!(%member, "has exited, but a child holds its connection");
                self.apply(Event::HeldByChild { member });
            }
            Proof::HeldByChild => {}
            Proof::Dead => {
                tracing::info!(%member, "is proved dead");
                self.forget(member);
                self.apply(Event::Died { member });
            }
        }
    }

    /// Gives up all that the server has of a member.
    pub(super) fn forget(&mut self, member: MemberId) {
        let Some((pidfd, connections)) = self.members.remove(member) else { return };
        if let Some(pidfd) = pidfd {
            let _ = epoll::delete(&self.epoll, &pidfd);
        }
        for id in connections {
            self.drop_connection(id);
        }
    }

    /// Ends a connection that cannot go on. Its member, if it has one, becomes a suspect.
    pub(super) fn hang_up(&mut self, id: ConnectionId, why: &str) {
        let effects = self.hang_up_quietly(id, why);
        self.carry_out(effects);
    }

    /// As [`Server::hang_up`], leaving what follows to the caller.
    pub(super) fn hang_up_quietly(&mut self, id: ConnectionId, why: &str) -> Vec<Effect> {
        let Some(connection) = self.connections.get_mut(&id) else { return Vec::new() };
        let Phase::Member(member) = connection.phase() else {
            if connection.phase() == Phase::Handshake {
                tracing::warn!(connection = id.0, why, "dropped a connection that is nobody's");
                self.drop_connection(id);
            }
            return Vec::new();
        };
        tracing::warn!(%member, why, "disconnected");
        connection.take_received().into_iter().for_each(|fd| drop(self.reclaimer.keep(fd)));
        if let Some(events) = connection.socket(Channel::Events) {
            // It may stay open for what the client has not read.
            let _ = epoll::delete(&self.epoll, events);
        }
        connection.linger(member, &mut self.in_flight);
        // Nothing can be done if the kernel refuses; the member's exit is still noticed.
        let data = Source::Socket(Channel::Call, id).data();
        let _ = epoll::modify(&self.epoll, connection.call(), data, EventFlags::IN);
        let suspended = self.members.suspend(member, id);
        if let Some(oldest) = self.members.surplus(member) {
            self.drop_connection(oldest);
            self.members.closed(member, oldest);
        }
        if suspended { self.registry.apply(Event::Suspected { member }, now()) } else { Vec::new() }
    }

    /// Forgets a connection, whoever speaks through it.
    pub(super) fn drop_connection(&mut self, id: ConnectionId) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        self.unauthenticated.remove(&id);
        for socket in [Channel::Call, Channel::Events].into_iter().filter_map(|channel| connection.socket(channel)) {
            // It may stay open for what the client has not read.
            let _ = epoll::delete(&self.epoll, socket);
        }
        connection.close(&mut self.in_flight);
        connection.take_received().into_iter().for_each(|fd| drop(self.reclaimer.keep(fd)));
    }
}
