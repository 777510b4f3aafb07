//! Framing: eight bytes in front of each message, `length: u32` and `fds: u16` and two zero bytes, little-endian.
//!
//! A message with many file descriptors is preceded by *carriers*: heads without a body, each with some of the
//! descriptors. They belong to the next message with a body, whose head counts them too.
//!
//! The head never changes between protocol versions: it carries the handshake in which versions are compared.

use serde::{Serialize, de::DeserializeOwned};

use crate::limits::{FDS_AT_ONCE, MAX_FDS};

/// Bytes in front of each body.
pub const HEAD: usize = 8;

/// Why decoding returned no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// At least this many more bytes are needed.
    #[error("{0} more bytes are needed")]
    NeedBytes(usize),
    /// The message is whole, but this many of its file descriptors are missing.
    #[error("{0} more file descriptors are needed")]
    NeedFds(usize),
    /// The peer does not speak this protocol; the connection is of no further use.
    #[error("malformed message: {0}")]
    Malformed(String),
}

/// One message's body and how many of the connection's received file descriptors belong to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The encoded message.
    pub body: Vec<u8>,
    /// File descriptors that belong to it.
    pub fds: usize,
}

impl Frame {
    /// Decodes the body as a `T` that takes up all of it.
    ///
    /// # Errors
    /// [`WireError::Malformed`] if the body is something else, or longer.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        decode(&self.body)
    }
}

/// Encodes `message` with its head, ready to be sent with `fds` file descriptors.
///
/// # Errors
/// [`WireError::Malformed`] if the body exceeds `limit` bytes or `fds` exceeds [`MAX_FDS`].
pub fn encode<T: Serialize>(message: &T, fds: usize, limit: usize) -> Result<Vec<u8>, WireError> {
    // Room for an ordinary message, which would otherwise grow byte by byte.
    let mut bytes = Vec::with_capacity(256);
    bytes.resize(HEAD, 0);
    let bytes = postcard::to_extend(message, bytes).map_err(|e| WireError::Malformed(e.to_string()))?;
    with_head(bytes, fds, limit)
}

/// Encodes a carrier of `fds` file descriptors, at most [`FDS_AT_ONCE`].
pub fn carrier(fds: usize) -> [u8; HEAD] {
    debug_assert!(fds <= FDS_AT_ONCE);
    let mut head = [0; HEAD];
    head[4..6].copy_from_slice(&(fds as u16).to_le_bytes());
    head
}

/// Writes the head into the first [`HEAD`] bytes of `bytes`, whose rest is the body.
pub(crate) fn with_head(mut bytes: Vec<u8>, fds: usize, limit: usize) -> Result<Vec<u8>, WireError> {
    let body = bytes.len() - HEAD;
    if body > limit {
        return Err(WireError::Malformed(format!("a message of {body} bytes exceeds the limit of {limit}")));
    }
    if fds > MAX_FDS {
        return Err(WireError::Malformed(format!("{fds} file descriptors exceed the limit of {MAX_FDS}")));
    }
    bytes[..4].copy_from_slice(&(body as u32).to_le_bytes());
    bytes[4..6].copy_from_slice(&(fds as u16).to_le_bytes());
    Ok(bytes)
}

pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError::Malformed(format!("{} bytes follow the message", rest.len()))),
        Err(e) => Err(WireError::Malformed(e.to_string())),
    }
}

/// Collects received bytes and cuts them into frames.
///
/// It holds at most one body of `limit` bytes and the rest of one read. A head that announces a longer body is refused
/// before any memory is allocated for it.
#[derive(Debug)]
pub struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
    limit: usize,
    /// File descriptors that carriers have brought for the next message.
    carried: usize,
}

impl FrameReader {
    /// Creates a reader for bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), start: 0, limit, carried: 0 }
    }

    /// Changes the limit for the frames that follow.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Appends the bytes of a read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        } else if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns whether no part of an unfinished message has arrived: neither a byte nor a carrier.
    pub fn is_empty(&self) -> bool {
        self.start == self.bytes.len() && self.carried == 0
    }

    /// Returns the next frame. `fds_at_hand` is the number of received file descriptors that belong to no frame yet.
    ///
    /// # Errors
    /// [`WireError::NeedBytes`] and [`WireError::NeedFds`] ask for more input; call again then.
    /// [`WireError::Malformed`] is final.
    pub fn next_frame(&mut self, fds_at_hand: usize) -> Result<Frame, WireError> {
        loop {
            let held = &self.bytes[self.start..];
            let Some((head, rest)) = held.split_at_checked(HEAD) else {
                return Err(WireError::NeedBytes(HEAD - held.len()));
            };
            let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
            let fds = usize::from(u16::from_le_bytes([head[4], head[5]]));
            if head[6..] != [0, 0] {
                return Err(WireError::Malformed("the reserved bytes of the head are not zero".into()));
            }
            if length > self.limit {
                return Err(WireError::Malformed(format!(
                    "a message of {length} bytes exceeds the limit of {}",
                    self.limit
                )));
            }
            let is_carrier = length == 0;
            let total = if is_carrier { self.carried + fds } else { fds };
            if total > MAX_FDS {
                return Err(WireError::Malformed(format!("{total} file descriptors exceed the limit of {MAX_FDS}")));
            }
            if total < self.carried || is_carrier && fds == 0 {
                return Err(WireError::Malformed("a message counts fewer file descriptors than came before it".into()));
            }
            let Some(body) = rest.get(..length) else {
                return Err(WireError::NeedBytes(length - rest.len()));
            };
            if total > fds_at_hand {
                return Err(WireError::NeedFds(total - fds_at_hand));
            }
            if is_carrier {
                self.carried = total;
                self.start += HEAD;
                continue;
            }
            let frame = Frame { body: body.to_vec(), fds };
            self.carried = 0;
            self.start += HEAD + length;
            return Ok(frame);
        }
    }
}
