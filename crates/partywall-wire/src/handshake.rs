//! The first message each way.
//!
//! Both begin with the same fixed head, which no version may change: eight magic bytes, the protocol number, the
//! sender's pid, and its version as text behind a length byte. Only when the protocols agree is the rest read.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    frame::{self, HEAD, WireError},
    id::MemberId,
    limits::{MAX_MESSAGE, PROTOCOL},
    message::Token,
    refusal::Refusal,
};

const MAGIC: [u8; 8] = *b"PARTYWAL";

/// The process that sends a first message. Every protocol version can read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Speaker {
    /// [`PROTOCOL`] of the speaker.
    pub protocol: u32,
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// Its release, for messages to people.
    pub version: String,
}

impl Speaker {
    /// This process, running release `version`.
    pub fn new(version: &str) -> Self {
        Self { protocol: PROTOCOL, pid: std::process::id(), version: version.to_owned() }
    }
}

/// The first message of a client. The client's pidfd travels with it, if the kernel gives the client one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientHello {
    /// Its command line, shortened, for `show` and `ps`.
    pub command: String,
    /// True if it is an operator, not a member: it can only list, inspect, evict, remove and end the broker. The broker
    /// admits a few operators even when it admits no further member.
    pub operator: bool,
    /// True if it runs on the simulated CUDA driver. Such members and others never share a domain.
    pub simulated: bool,
    /// Set by a member that lost its connection and continues as the same member.
    pub resume: Option<Resume>,
    /// Drawn at random for each attempt to join, and repeated if the connection ends before the welcome; 0 if none.
    pub attempt: u64,
}

/// The identity of a member, as in its [`Welcome`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The broker that it belonged to.
    pub instance: u64,
    /// Its number there.
    pub member: MemberId,
    /// The proof that it is that member.
    pub token: Token,
}

/// The broker's first message. The member's events socket and the memory of the members' rows travel with a welcome.
/// For an operator, pidfds follow: of the process that serves, and of its supervisor. Either may be missing, the
/// supervisor's alone if there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerHello {
    /// Drawn at random when the broker starts. Another number is another broker, which knows no member of this one.
    pub instance: u64,
    /// The welcome, or the reason of the refusal.
    pub outcome: Result<Welcome, Refusal>,
}

/// A member's identity and the broker's limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The member's number in this broker; never used twice.
    pub member: MemberId,
    /// The member's row in the memory that all members share, which also identifies it in semaphores. No other member
    /// gets the row while anything of this member is left.
    pub row: u16,
    /// The proof to send when resuming.
    pub token: Token,
    /// The member's user, by the number that the broker's user namespace has for it.
    pub uid: u32,
    /// True if the client continues as the member that it was.
    pub resumed: bool,
    /// Bytes of the largest message body that the broker accepts.
    pub max_message: u32,
}

/// A first message, split into its fixed head and the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting<'a> {
    /// The sender.
    pub speaker: Speaker,
    rest: &'a [u8],
}

impl Greeting<'_> {
    /// Decodes the rest of a message from a speaker of this [`PROTOCOL`].
    ///
    /// # Errors
    /// [`WireError::Malformed`] if it is not a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        frame::decode(self.rest)
    }
}

/// Encodes a first message with its frame head, to be sent with `fds` file descriptors.
///
/// # Errors
/// [`WireError::Malformed`] if the message is too long.
pub fn encode<T: Serialize>(speaker: &Speaker, rest: &T, fds: usize) -> Result<Vec<u8>, WireError> {
    let version = speaker.version.as_bytes();
    let version = &version[..version.len().min(usize::from(u8::MAX))];
    let mut bytes = vec![0; HEAD];
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&speaker.protocol.to_le_bytes());
    bytes.extend_from_slice(&speaker.pid.to_le_bytes());
    bytes.push(version.len() as u8);
    bytes.extend_from_slice(version);
    let bytes = postcard::to_extend(rest, bytes).map_err(|e| WireError::Malformed(e.to_string()))?;
    frame::with_head(bytes, fds, MAX_MESSAGE)
}

/// Reads the fixed head of a first message's body.
///
/// # Errors
/// [`WireError::Malformed`] if this is no Partywall process at all.
pub fn decode(body: &[u8]) -> Result<Greeting<'_>, WireError> {
    let short = || WireError::Malformed("the first message is too short".into());
    let (magic, body) = body.split_at_checked(8).ok_or_else(short)?;
    if magic != MAGIC {
        return Err(WireError::Malformed("the first message does not begin with PARTYWAL".into()));
    }
    let (protocol, body) = body.split_first_chunk::<4>().ok_or_else(short)?;
    let (pid, body) = body.split_first_chunk::<4>().ok_or_else(short)?;
    let (length, body) = body.split_first().ok_or_else(short)?;
    let (version, rest) = body.split_at_checked(usize::from(*length)).ok_or_else(short)?;
    let speaker = Speaker {
        protocol: u32::from_le_bytes(*protocol),
        pid: u32::from_le_bytes(*pid),
        version: String::from_utf8_lossy(version).into_owned(),
    };
    Ok(Greeting { speaker, rest })
}
