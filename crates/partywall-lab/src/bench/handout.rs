//! Requests the file descriptors of a version from the broker without the library, so that a floor uses the same
//! memory.

use std::{collections::VecDeque, os::fd::OwnedFd, path::Path};

use partywall_measure::Failure;
use partywall_os::{process, socket};
use partywall_wire::{
    Access, Answer, BrokerHello, Call, ClientHello, Frame, FrameReader, Name, Open, Reply, Request, RequestId,
    WireError, frame,
    handshake::{self, Speaker},
    limits::MAX_MESSAGE,
};
use std::os::fd::AsFd;

/// A minimal member.
struct Client {
    call: OwnedFd,
    frames: FrameReader,
    fds: VecDeque<OwnedFd>,
}

/// Returns the size and the file descriptor of each chunk of the latest version of `name`, whose memory is on a
/// simulated GPU or on a real one. The lease ends immediately; the file descriptors keep the memory.
pub(crate) fn chunks(path: &Path, name: &str, simulated: bool) -> Result<Vec<(u64, OwnedFd)>, Failure> {
    let mut client =
        Client { call: socket::connect(path)?, frames: FrameReader::new(MAX_MESSAGE), fds: VecDeque::new() };
    let hello = ClientHello {
        command: "partywall-bench without the library".into(),
        operator: false,
        simulated,
        resume: None,
        attempt: 0,
    };
    let hello = handshake::encode(&Speaker::new(partywall::VERSION), &hello, 1)?;
    let welcome = client.exchange(&hello, Some(process::own_pidfd()?))?;
    handshake::decode(&welcome.body)?.decode::<BrokerHello>()?.outcome.map_err(|refusal| format!("{refusal:?}"))?;
    // The events socket, and the members' rows.
    client.fds.clear();

    let open = Open { name: Name::new(name)?, version: None, access: Access::Read, wait: false };
    let request = frame::encode(&Request { id: RequestId(1), call: Call::Open(open) }, 0, MAX_MESSAGE)?;
    match client.exchange(&request, None)?.decode::<Reply>()?.outcome {
        Ok(Answer::Opened(opened)) => Ok(opened.chunks.into_iter().zip(client.fds).collect()),
        other => Err(format!("the broker does not open {name:?}: {other:?}").into()),
    }
}

impl Client {
    /// Sends a message and waits for the answer, whose file descriptors are appended to `fds`.
    fn exchange(&mut self, message: &[u8], fd: Option<OwnedFd>) -> Result<Frame, Failure> {
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        // The socket blocks, and messages this short go out whole.
        if socket::send(&self.call, message, &fds)? != message.len() {
            return Err("a short message was cut".into());
        }
        let mut buffer = [0; 16 * 1024];
        loop {
            match self.frames.next_frame(self.fds.len()) {
                Ok(frame) => return Ok(frame),
                Err(WireError::Malformed(why)) => return Err(why.into()),
                Err(_) => {}
            }
            match socket::recv(&self.call, &mut buffer, &mut self.fds)?.bytes {
                0 => return Err("the broker hung up".into()),
                n => self.frames.push(&buffer[..n]),
            }
        }
    }
}
