//! The messages between the two sides of a stream.
//!
//! Each is a version number and a message in postcard; the bytes of a piece travel beside it. Decoding checks everything
//! that can be checked in a message alone, before memory is allocated for it. Numbers that only a stream can judge are
//! checked by its state machine.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::PIECE_BYTES;

/// A start of a bridge: 128 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Instance(pub(crate) u128);

/// A stream of a topic. All its messages name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct StreamId {
    pub(crate) origin: Instance,
    pub(crate) receiver: Instance,
    /// Chosen by the receiver, greater than the number of each earlier stream of the topic between the two.
    pub(crate) number: u64,
}

/// A message of a topic's receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ToOrigin {
    pub(crate) stream: StreamId,
    pub(crate) body: FromReceiver,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromReceiver {
    /// Begins the stream. Repeated until it is answered.
    Join(Join),
    Acknowledge(Acknowledgement),
    /// Ends the stream. Not answered.
    Leave,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) policy: StreamPolicy,
    /// The samples from before the join; `None` for the topic's own number.
    pub(crate) history: Option<u32>,
    pub(crate) window: Window,
    pub(crate) resume: Option<Resume>,
}

/// What happens to samples for which there is no credit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StreamPolicy {
    Block,
    DropOldest,
    Latest,
}

/// The most that may be on its way. A sample is taken while there is less, so one sample of any size always may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Window {
    /// Samples that are not published at the receiver.
    pub(crate) samples: u32,
    /// Bytes that are not written there.
    pub(crate) bytes: u64,
}

impl Window {
    /// Returns what both windows allow: at least one sample and one byte, so that nothing waits for ever.
    pub(crate) fn within(self, other: Self) -> Self {
        Self { samples: self.samples.min(other.samples).max(1), bytes: self.bytes.min(other.bytes).max(1) }
    }
}

/// Where an earlier stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Resume {
    pub(crate) ring: RingId,
    /// The first position of which the receiver does not know what has become.
    pub(crate) position: u64,
}

/// The identity of a topic's ring, whose positions another ring's have nothing to do with. The same after the bridge of
/// its host was started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct RingId(pub(crate) u128);

/// The state of a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Acknowledgement {
    /// Greater than that of each earlier acknowledgement of the stream.
    pub(crate) serial: u64,
    /// All samples before this one are published, or counted as missed; of it, this many pieces are written.
    pub(crate) written: Cursor,
    /// The next piece that the receiver accepts.
    pub(crate) arrived: Cursor,
    /// Pieces from there on were lost.
    pub(crate) resend: bool,
    /// The receiver wants to be answered.
    pub(crate) asks: bool,
}

/// A place in a stream: a sample's number, and a piece of it. The piece after the last one is that sample's end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Cursor {
    pub(crate) number: u64,
    pub(crate) piece: u64,
}

/// A message of a topic's origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ToReceiver {
    pub(crate) stream: StreamId,
    pub(crate) body: FromOrigin,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromOrigin {
    /// Answers a join. The position is that of the first sample which the ring gives to a stream that does not resume.
    Joined { ring: RingId, position: u64, topic: TopicInfo },
    /// The first pieces of samples in a row. If there are several, each is its sample's only one.
    First { number: u64, samples: Bounded<SampleHead, MAX_BATCH> },
    /// A later piece of the sample that is arriving.
    Next(Cursor),
    /// Asks for an acknowledgement. Everything before this place was sent.
    Probe { sent: Cursor },
    /// The stream is over. As many samples were missed after its last one.
    End { reason: EndReason, missed: u64 },
}

/// What a topic is at its origin, so that one like it can be created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicInfo {
    pub(crate) max_bytes: u64,
    pub(crate) depth: u32,
    pub(crate) history: u32,
    pub(crate) publishers: u32,
    pub(crate) subscribers: u32,
    pub(crate) held: u32,
    pub(crate) dtype: Option<Text<MAX_DTYPE>>,
    pub(crate) shape: Option<Bounded<Option<u64>, MAX_RANK>>,
}

/// Why an origin has ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EndReason {
    /// The receiver was unreachable for longer than the timeout. It may join again.
    Detached,
    /// The origin knows no such stream. It may join again.
    Unknown,
    /// The topic was removed, or nobody but the bridge uses it. Everything before was acknowledged.
    TopicOver,
    /// The topic is not exported to this host, or does not exist.
    NotExported,
    /// The topic has no room for another subscriber.
    Full,
    /// The bridge of the origin stops.
    Stopped,
    /// The receiver has broken the protocol.
    Violation,
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Detached => "this host was unreachable for too long",
            Self::Unknown => "there is no such import",
            Self::TopicOver => "the topic has ended there",
            Self::NotExported => "there is no such topic, or it is not exported",
            Self::Full => "the topic has no room for another subscriber there, or the bridge none for another export",
            Self::Stopped => "its bridge stops, or cannot read the topic any more",
            Self::Violation => "it does not accept what this bridge says",
        })
    }
}

/// Describes a sample, or a change of the topic between two samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SampleHead {
    pub(crate) kind: SampleKind,
    /// Its position in the origin's ring; that of the next sample if it is none itself.
    pub(crate) position: u64,
    /// Its publisher there, and that one's number for it.
    pub(crate) publisher: u64,
    pub(crate) sequence: u64,
    /// Samples that this stream has missed between the previous sample and this one.
    pub(crate) missed: u64,
    pub(crate) dtype: Text<MAX_DTYPE>,
    pub(crate) shape: Bounded<u64, MAX_RANK>,
    pub(crate) bytes: u64,
    pub(crate) header: Bounded<u8, MAX_HEADER>,
}

/// What a number of a stream stands for. Only whole samples have bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SampleKind {
    Whole,
    /// The publisher died before the sample was complete.
    Failed,
    /// No sample: the topic has no publisher any more.
    Idle,
    /// No sample: it has one again.
    Busy,
}

impl SampleKind {
    pub(crate) fn is_sample(self) -> bool {
        matches!(self, Self::Whole | Self::Failed)
    }
}

impl SampleHead {
    /// Returns what is no sample.
    pub(crate) fn change(kind: SampleKind, position: u64, missed: u64) -> Self {
        Self {
            kind,
            position,
            missed,
            publisher: 0,
            sequence: 0,
            dtype: Text::default(),
            shape: Bounded::default(),
            bytes: 0,
            header: Bounded::default(),
        }
    }

    /// Returns the first position that a later sample may have.
    pub(crate) fn next_position(&self) -> u64 {
        self.position + u64::from(self.kind.is_sample())
    }

    /// Returns the number of its pieces. A sample without bytes has one, too.
    pub(crate) fn pieces(&self) -> u64 {
        self.bytes.div_ceil(PIECE_BYTES).max(1)
    }

    /// Returns the length of a piece.
    pub(crate) fn piece_bytes(&self, piece: u64) -> u64 {
        self.bytes.saturating_sub(piece.saturating_mul(PIECE_BYTES)).min(PIECE_BYTES)
    }
}

/// At most `MOST` values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Bounded<T, const MOST: usize>(Vec<T>);

impl<T, const MOST: usize> Default for Bounded<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MOST: usize> Bounded<T, MOST> {
    /// Returns `None` for more values.
    pub(crate) fn new(values: Vec<T>) -> Option<Self> {
        (values.len() <= MOST).then_some(Self(values))
    }
}

impl<T, const MOST: usize> std::ops::Deref for Bounded<T, MOST> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Bounded<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values<T, const MOST: usize>(Vec<T>);

        impl<'de, T: Deserialize<'de>, const MOST: usize> de::Visitor<'de> for Values<T, MOST> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MOST} values")
            }

            // The length that the peer claims allocates nothing.
            fn visit_seq<A: de::SeqAccess<'de>>(mut self, mut values: A) -> Result<Vec<T>, A::Error> {
                while let Some(value) = values.next_element()? {
                    if self.0.len() == MOST {
                        return Err(de::Error::invalid_length(MOST + 1, &self));
                    }
                    self.0.push(value);
                }
                Ok(self.0)
            }
        }

        deserializer.deserialize_seq(Values::<T, MOST>(Vec::new())).map(Self)
    }
}

/// At most `MOST` bytes of UTF-8.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Text<const MOST: usize>(Box<str>);

impl<const MOST: usize> Text<MOST> {
    /// Returns `None` for a longer text.
    pub(crate) fn new(text: &str) -> Option<Self> {
        (text.len() <= MOST).then(|| Self(text.into()))
    }
}

impl<const MOST: usize> std::ops::Deref for Text<MOST> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de, const MOST: usize> Deserialize<'de> for Text<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Borrowed: its length is checked before it is copied.
        let text = <&str>::deserialize(deserializer)?;
        Self::new(text).ok_or_else(|| de::Error::invalid_length(text.len(), &"a shorter text"))
    }
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Of another version of the protocol.
    Version(u8),
    /// Longer than any message.
    Long(usize),
    Invalid,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(theirs) => {
                write!(f, "it speaks version {theirs} of the protocol of topics, and this bridge version {VERSION}")
            }
            Self::Long(bytes) => write!(f, "it has {bytes} bytes, more than any message"),
            Self::Invalid => f.write_str("its bytes are no message"),
        }
    }
}

/// A message that can be sent.
pub(crate) trait Message: Serialize + for<'de> Deserialize<'de> {
    /// The most bytes of a message, without those of its pieces.
    const MOST: usize;

    /// Returns its bytes.
    fn encode(&self) -> Vec<u8> {
        // Of bounded types only, and into memory: `encoded_messages_have_their_bound` tests the length.
        postcard::to_extend(self, vec![VERSION]).expect("a message of plain values can be encoded")
    }

    /// Reads a message that fills `bytes`.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > Self::MOST {
            return Err(Malformed::Long(bytes.len()));
        }
        let (&version, rest) = bytes.split_first().ok_or(Malformed::Invalid)?;
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        match postcard::take_from_bytes(rest) {
            Ok((message, [])) => Ok(message),
            _ => Err(Malformed::Invalid),
        }
    }
}

impl Message for ToOrigin {
    const MOST: usize = 256;
}

impl Message for ToReceiver {
    const MOST: usize = 32 << 10;
}

/// Of the protocol: changed with each change of a message.
const VERSION: u8 = 2;
/// The most samples of a message.
pub(crate) const MAX_BATCH: usize = 64;
/// The most bytes of a type's name.
pub(crate) const MAX_DTYPE: usize = 64;
/// The most dimensions of a sample.
pub(crate) const MAX_RANK: usize = 8;
/// The most bytes of a sample's header.
pub(crate) const MAX_HEADER: usize = 256;
