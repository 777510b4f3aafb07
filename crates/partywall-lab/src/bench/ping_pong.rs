//! The raw round trip: bytes to another process over a Unix stream socket and back, by plain blocking reads and writes.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use partywall_measure::{Case, Failure, Sampler, Unit};
use partywall_wire::{Answer, Call, Reply, Request, RequestId, frame, limits::MAX_MESSAGE};

use crate::{
    bench::{
        Bench, clocked, microseconds,
        peer::{self, Order},
    },
    broker::Broker,
    peer::Peer,
};

/// A process that answers. Dropping this ends it.
#[derive(Debug)]
pub(super) struct PingPong {
    socket: UnixStream,
    peer: Peer,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl PingPong {
    /// The name of the case in reports.
    pub(super) const NAME: &str = "raw socket ping-pong";

    /// Starts the process, with messages of the same length as those of a later `ping` to the broker.
    pub(super) fn start(bench: &Bench<'_>, broker: &Broker) -> Result<Self, Failure> {
        let id = RequestId(100_000);
        let request = frame::encode(&Request { id, call: Call::Ping }, 0, MAX_MESSAGE)?;
        let reply = frame::encode(&Reply { id, outcome: Ok(Answer::Done) }, 0, MAX_MESSAGE)?;
        let (socket, theirs) = UnixStream::pair()?;
        let peer = bench.start(broker, peer::ROLE)?;
        peer.say_with(Order::Echo { request: request.len(), reply: reply.len() }, &[theirs.as_fd()])?;
        // Else this process would not notice the end of the other one.
        drop(theirs);
        let mut started = Self { socket, peer, request, reply };
        // The first answer arrives once the process has started.
        started.round_trip()?;
        Ok(started)
    }

    /// Returns the process that answers.
    pub(crate) fn pid(&self) -> u32 {
        self.peer.pid
    }

    fn round_trip(&mut self) -> Result<Duration, Failure> {
        let (elapsed, ()) = clocked(|| {
            self.socket.write_all(&self.request)?;
            self.socket.read_exact(&mut self.reply)
        })?;
        Ok(elapsed)
    }

    pub(crate) fn case(&self) -> Case {
        Case::new(Self::NAME, Unit::Microseconds)
            .parameter("there", self.request.len())
            .parameter("back", self.reply.len())
    }

    /// Returns a sampler of the microseconds of a round trip.
    pub(crate) fn sampler(&mut self) -> Sampler<'_> {
        Box::new(|| self.round_trip().map(microseconds))
    }
}

/// The other side: answers on the socket until the connection ends.
pub(super) fn answer(socket: OwnedFd, request: usize, reply: usize) -> Result<(), Failure> {
    let mut socket = UnixStream::from(socket);
    let mut request = vec![0; request];
    let reply = vec![0; reply];
    while socket.read_exact(&mut request).is_ok() {
        socket.write_all(&reply)?;
    }
    Ok(())
}
