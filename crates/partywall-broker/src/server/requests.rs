//! Requests of members: decodes and checks them, and passes them to the registry.

use std::time::Instant;

use partywall_shm::crash::point;
use partywall_wire::{self as wire, BadRequest, Refusal, Reply, Request};

use crate::{
    registry::{Event, MemberId, RequestId},
    server::{
        Server,
        check::check,
        connection::{Channel, Connection, ConnectionId, Message, Phase},
        fds::missing,
        in_flight::Room,
        memory_checks::Memory,
        peers::Parked,
    },
};

impl Server {
    /// Handles a message of a member.
    pub(super) fn on_request(&mut self, id: ConnectionId, member: MemberId, message: Message) {
        let request = match Request::decode(&message.frame.body) {
            Ok(request) => request,
            Err(BadRequest::Refused(request, refusal)) => {
                self.store.discard(message.fds);
                return self.refuse_request(id, member, request, refusal);
            }
            Err(BadRequest::Malformed(error)) => return self.hang_up(id, &error.to_string()),
        };
        let Some(connection) = self.peers.connections.get(&id) else { return };
        if connection.is_closed(Channel::Call) && request.call.only_asks() {
            // The client would not read the answer, and computing it costs time.
            return;
        }
        let begun = self.supervised.as_ref().map_or(Ok(()), |supervised| supervised.begin_request(member, request.id));
        // A request that gives something back is recorded in the memory that is kept for it.
        match begun.and_then(|()| if request.call.takes() { self.make_room() } else { Ok(()) }) {
            Ok(()) => self.handle_request(id, member, request, message),
            Err(refusal) => self.refuse_request(id, member, request.id, refusal),
        }
        if let Some(supervised) = &self.supervised {
            supervised.page.end_request();
        }
    }

    fn handle_request(&mut self, id: ConnectionId, member: MemberId, request: Request, message: Message) {
        let Some(connection) = self.peers.connections.get(&id) else { return };
        if let (wire::Call::Status, Some(supervised)) = (&request.call, &self.supervised) {
            self.about.supervisor = supervised.supervisor();
        }
        let operator = self.peers.members.note_request(member);
        if request.call.may_bring_descriptors() {
            match self.peers.in_flight.room(connection.process(), operator) {
                Room::Free => {}
                Room::Refused(refusal) => return self.refuse_request(id, member, request.id, refusal),
                Room::Later(_) => return self.peers.park(&mut self.reactor, id, message, operator),
            }
        }
        let Message { frame, fds } = message;
        tracing::trace!(%member, request = %request.id, call = ?request.call, "request");
        let arrived = fds.len();
        // If the request is refused, the reclaimer closes the descriptors, because closing GPU memory may stall.
        let fds: Vec<_> = fds.into_iter().map(|fd| self.store.adopt(fd)).collect();
        if let wire::Call::Replace = request.call {
            if let Err(refusal) = self.begin_replacement(id, member, request.id, fds) {
                self.refuse_request(id, member, request.id, refusal);
            }
            return;
        }
        if let wire::Call::CheckMemory { place } = request.call {
            let answer = wire::Answer::MemoryCheck { runs: self.suspect_memory(place) };
            return self.send_reply(id, member, Reply { id: request.id, outcome: Ok(answer) });
        }
        // A context ends with the memory of its GPU, but mostly for other reasons. A reset of the driver ends pinned
        // memory, too. Members that have it open already do not import it again, and so could not report it.
        if let wire::Call::ContextLost { gpu } = request.call {
            let places = gpu.map(wire::Place::Gpu).into_iter().chain(self.registry.nodes());
            places.for_each(|place| _ = self.suspect_memory(place));
        }
        let Request { id: number, mut call } = request;
        let received = if arrived < frame.fds {
            tracing::warn!(%member, arrived, sent = frame.fds, "file descriptors were lost because no descriptor was free");
            Err(missing(arrived))
        } else {
            let simulated = self.registry.people().runs_simulated(member);
            check(&mut call, fds, &mut self.control, &mut self.store, simulated, self.about.highest_node)
        };
        let received = received.and_then(|received| self.provide(member, &call, received));
        point("broker: control memory created, request not decided");
        match received {
            Ok(received) => self.apply(Event::Request { member, request: number, call, received }),
            Err(refusal) => self.refuse_request(id, member, number, refusal),
        }
    }

    fn suspect_memory(&mut self, place: wire::Place) -> bool {
        let memory = Memory { reactor: &mut self.reactor, registry: &self.registry, store: &self.store };
        self.memory_checks.suspect(place, memory)
    }

    pub(super) fn refuse_request(&mut self, id: ConnectionId, member: MemberId, request: RequestId, refusal: Refusal) {
        self.send_reply(id, member, Reply { id: request, outcome: Err(refusal) });
    }

    fn send_reply(&mut self, id: ConnectionId, member: MemberId, reply: Reply) {
        if let Err(broken) = self.peers.send(&mut self.reactor, member, Channel::Call, &reply, Vec::new()) {
            self.hang_up(id, &broken.to_string());
        }
    }

    /// Processes parked messages that can be answered now, and refuses those that have waited for too long.
    pub(super) fn unpark(&mut self) {
        while let Some(front) = self.peers.parked.front() {
            let Parked { connection: id, operator, until, .. } = *front;
            let gone = self.peers.connections.get(&id).is_none_or(|connection| !connection.is_parked);
            let process = self.peers.connections.get(&id).map(Connection::process);
            let room = process.filter(|_| !gone).map(|process| self.peers.in_flight.room(process, operator));
            let is_late = until <= Instant::now();
            if matches!(room, Some(Room::Later(_))) && !is_late {
                return;
            }
            let Some(Parked { message, .. }) = self.peers.parked.pop_front() else { return };
            let Some(connection) = self.peers.connections.get_mut(&id).filter(|_| !gone) else {
                self.store.discard(message.fds);
                continue;
            };
            connection.is_parked = false;
            let phase = connection.phase();
            match (room, phase) {
                (Some(Room::Later(refusal)), Phase::Member(member)) => {
                    self.store.discard(message.fds);
                    if let Ok(request) = Request::decode(&message.frame.body) {
                        self.refuse_request(id, member, request.id, refusal);
                    }
                }
                (Some(Room::Later(refusal)), _) => self.send_away(id, refusal),
                (_, Phase::Member(member)) => self.on_request(id, member, message),
                (_, _) => self.on_hello(id, message),
            }
            self.peers.unfinished.insert(id);
        }
    }
}
