//! The raw round trip: bytes to another process over a Unix stream socket and back, by plain blocking reads and writes.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Stdio},
    time::Duration,
};

use partywall_measure::{Case, Failure, Sampler, Unit};
use partywall_wire::{Answer, Call, Reply, Request, frame, limits::MAX_MESSAGE};

use crate::{
    bench::{clocked, microseconds},
    role,
};

/// The name of the case in reports.
const NAME: &str = "raw socket ping-pong";

/// A process that answers. Dropping this ends it.
#[derive(Debug)]
pub(crate) struct PingPong {
    socket: UnixStream,
    child: Child,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl PingPong {
    /// Starts the process, with messages of the same length as those of a later `ping` to the broker.
    pub(crate) fn start() -> Result<Self, Failure> {
        let id = 100_000;
        let request = frame::encode(&Request { id, call: Call::Ping }, 0, MAX_MESSAGE)?;
        let reply = frame::encode(&Reply { id, outcome: Ok(Answer::Done) }, 0, MAX_MESSAGE)?;
        let (socket, theirs) = UnixStream::pair()?;
        let child = role::command(role::ECHO, [request.len().to_string(), reply.len().to_string()])?
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()?;
        let mut started = Self { socket, child, request, reply };
        // The first answer arrives once the process has started.
        started.round_trip()?;
        Ok(started)
    }

    /// Returns the process that answers.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn round_trip(&mut self) -> Result<Duration, Failure> {
        let (elapsed, ()) = clocked(|| {
            self.socket.write_all(&self.request)?;
            self.socket.read_exact(&mut self.reply)
        })?;
        Ok(elapsed)
    }

    pub(crate) fn case(&self) -> Case {
        Case::new(NAME, Unit::Microseconds).parameter("there", self.request.len()).parameter("back", self.reply.len())
    }

    /// Returns a sampler of the microseconds of a round trip.
    pub(crate) fn sampler(&mut self) -> Sampler<'_> {
        Box::new(|| self.round_trip().map(microseconds))
    }
}

impl Drop for PingPong {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// The other side: answers on the socket that is its standard input, until the connection ends.
pub(crate) fn answer(request: usize, reply: usize) -> Result<(), Failure> {
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut request = vec![0; request];
    let reply = vec![0; reply];
    while socket.read_exact(&mut request).is_ok() {
        socket.write_all(&reply)?;
    }
    Ok(())
}
