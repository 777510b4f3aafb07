//! Receives messages from a broker: takes bytes and file descriptors, returns complete messages.

use std::{
    collections::VecDeque,
    fmt,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    socket::{self, Received},
};
use partywall_wire::{
    Frame, FrameReader, WireError,
    limits::{MAX_FDS, MAX_MESSAGE},
};

use crate::adaptive_spin::AdaptiveSpin;

/// The receiving side of a socket.
pub(super) struct Inbox {
    frames: FrameReader,
    fds: VecDeque<OwnedFd>,
    /// True if the kernel dropped file descriptors since the last complete message because this process had none free.
    fds_lost: bool,
    /// Reused by every read, because zeroing a new buffer would cost more than reading.
    buffer: Vec<u8>,
}

/// Omits the buffer, which every handle of a connection would print.
impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("fds", &self.fds).field("fds_lost", &self.fds_lost).finish_non_exhaustive()
    }
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            frames: FrameReader::new(MAX_MESSAGE),
            fds: VecDeque::new(),
            fds_lost: false,
            buffer: vec![0; READ_BYTES],
        }
    }

    /// Reads once. Returns `false` at the end of the connection.
    ///
    /// # Errors
    /// As [`socket::recv`].
    pub(super) fn read(&mut self, socket: impl AsFd) -> Result<bool, Errno> {
        let received = socket::recv(socket, &mut self.buffer, &mut self.fds)?;
        Ok(self.take_in(received))
    }

    /// Reads as [`Inbox::read`] does, but polls the socket for a while from `start` on before it sleeps.
    ///
    /// # Errors
    /// As [`socket::recv`].
    pub(super) fn read_soon(&mut self, spin: &AdaptiveSpin, start: Instant, socket: impl AsFd) -> Result<bool, Errno> {
        let mut read = Err(Errno::AGAIN);
        spin.spin(start, Duration::MAX, || {
            read = socket::recv_now(&socket, &mut self.buffer, &mut self.fds);
            !matches!(read, Err(Errno::AGAIN))
        });
        match read {
            Err(Errno::AGAIN) => self.read(socket),
            read => read.map(|received| self.take_in(received)),
        }
    }

    fn take_in(&mut self, received: Received) -> bool {
        self.fds_lost |= received.fds_lost;
        self.frames.push(&self.buffer[..received.bytes]);
        received.bytes > 0
    }

    /// Returns the next complete message and its file descriptors. There are fewer than the message states if this
    /// process had none free.
    ///
    /// # Errors
    /// Returns what is malformed; nothing after it can be decoded.
    pub(super) fn next(&mut self) -> Result<Option<(Frame, Vec<OwnedFd>)>, String> {
        let at_hand = if self.fds_lost { usize::MAX } else { self.fds.len() };
        match self.frames.next_frame(at_hand) {
            Ok(frame) => {
                let arrived = self.fds.len().min(frame.fds);
                self.fds_lost = false;
                Ok(Some((frame, self.fds.drain(..arrived).collect())))
            }
            Err(WireError::NeedBytes(_)) if self.frames.is_empty() && !self.fds.is_empty() => {
                Err(format!("{} file descriptors belong to no message", self.fds.len()))
            }
            Err(WireError::NeedBytes(_)) if self.fds.len() > MAX_FDS => {
                Err(format!("{} file descriptors came with one message", self.fds.len()))
            }
            Err(WireError::NeedBytes(_)) => Ok(None),
            // Descriptors travel with the first byte of their message, so missing ones never come.
            Err(WireError::NeedFds(n)) => Err(format!("{n} file descriptors were not sent")),
            Err(WireError::Malformed(why)) => Err(why),
        }
    }
}

/// Bytes of one read. Nearly every message fits.
const READ_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_leaves_the_buffer_out() {
        assert!(format!("{:?}", Inbox::new()).len() < 100);
    }

    #[test]
    fn message_after_the_spin_is_read() {
        let (peer, ours) = socket::pair().unwrap();
        let spin = AdaptiveSpin::on_socket();
        let mut inbox = Inbox::new();
        for _ in 0..10 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(2));
                    socket::send(&peer, b"x", &[]).unwrap();
                });
                assert_eq!(inbox.read_soon(&spin, Instant::now(), &ours), Ok(true));
            });
        }
        drop(peer);
        assert_eq!(inbox.read_soon(&spin, Instant::now(), &ours), Ok(false));
    }
}
