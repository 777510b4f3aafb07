//! The answers of hosts: what they contain, and how they are read. No network is here.
//!
//! An answer is any number of parts. Each says how many there are and the digest of all of them together, so parts of
//! two answers never become one. It begins with the number of the protocol, [`WIRE`].
//!
//! Every function that reads is given bytes of a peer: it returns an error for all that cannot be true, never panics, and
//! allocates no more than a small multiple of what it was given.

use std::{borrow::Cow, fmt};

use blake3::Hash;
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};

/// The number of the protocol. Bridges of other numbers are refused by name.
pub(crate) const WIRE: u32 = 1;

/// The bytes of a piece of content, and the most that one message carries.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// What a host is asked under one of its keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked<'a> {
    /// What it is, see [`HostInfo`].
    Host,
    /// The hosts that it knows, see [`HostView`].
    View,
    /// The names that it exports.
    Names,
    /// The table and the root of a version; 0 is the latest.
    Manifest { name: &'a str, version: u64 },
    /// The manifest of a version with this content.
    Content(Hash),
    /// A piece of the content with this root.
    Piece { root: Hash, piece: u64 },
}

/// What a host says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostInfo {
    /// The release of its bridge.
    #[serde(deserialize_with = "line")]
    pub(crate) release: String,
    /// Where it listens.
    #[serde(deserialize_with = "lines")]
    pub(crate) endpoints: Vec<String>,
    /// For how long its bridge has run, in milliseconds. No host relies on the clock of another.
    pub(crate) uptime_ms: u64,
}

/// A host, as another one knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostView {
    #[serde(deserialize_with = "line")]
    pub(crate) host: String,
    #[serde(deserialize_with = "line")]
    pub(crate) instance: String,
    /// For how many milliseconds it has been unreachable; none if it is there.
    pub(crate) unreachable_ms: Option<u64>,
    /// None as long as it has not answered.
    pub(crate) info: Option<HostInfo>,
    /// Its protocol, if that is another one.
    pub(crate) foreign: Option<u32>,
}

/// A name that a host exports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExportedName {
    #[serde(deserialize_with = "line")]
    pub(crate) name: String,
    /// What it is: a segment, a topic.
    #[serde(deserialize_with = "line")]
    pub(crate) kind: String,
    /// The latest version.
    pub(crate) version: u64,
    #[serde(deserialize_with = "line")]
    pub(crate) place: String,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
}

/// The proof of a piece: the hashes beside its way to the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Proof(pub(crate) Vec<[u8; 32]>);

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// Nobody has answered in time, or nobody is there.
    Silent,
    /// The host refuses.
    Refused(Refusal),
    /// The answer cannot be read.
    Malformed(&'static str),
    /// The host speaks the protocol of this number.
    Foreign(u32),
}

/// Why a host does not answer a question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// It exports no such name. Names that it has and does not export are not told apart.
    NoName,
    /// The name has no such version; this is the latest.
    NoVersion(u64),
    /// The name is no segment but this.
    Kind(#[serde(deserialize_with = "line")] String),
    /// The bytes of the version may change, for this reason.
    NotFrozen(#[serde(deserialize_with = "line")] String),
    /// It has nothing of this root.
    NoContent,
    /// The version was withdrawn.
    Withdrawn,
    /// It cannot read the version, for this reason.
    Unreadable(#[serde(deserialize_with = "line")] String),
    /// Too many questions wait, or a version is hashed first.
    Busy,
}

/// Where a part belongs in an answer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Part {
    wire: u32,
    number: u32,
    parts: u32,
    digest: [u8; 32],
}

/// The parts of an answer that have arrived.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    parts: Vec<Option<Vec<u8>>>,
    missing: usize,
    digest: [u8; 32],
}

impl<'a> Asked<'a> {
    /// Reads a key `pw1/R/WHAT/H/I/…`, which a peer may have written in any way. None if it asks nothing.
    pub(crate) fn parse(key: &'a str) -> Option<Self> {
        let mut parts = key.splitn(6, '/').skip(2);
        let what = parts.next()?;
        let rest = parts.nth(2);
        match what {
            "host" => Some(Self::Host),
            "view" => Some(Self::View),
            "names" => Some(Self::Names),
            "manifest" => {
                let (version, name) = rest?.split_once('/')?;
                Some(Self::Manifest { name, version: version.parse().ok()? })
            }
            "content" => Some(Self::Content(Hash::from_hex(rest?).ok()?)),
            "piece" => {
                let (root, piece) = rest?.split_once('/')?;
                Some(Self::Piece { root: Hash::from_hex(root).ok()?, piece: piece.parse().ok()? })
            }
            _ => None,
        }
    }
}

impl Assembly {
    /// Takes a part. Returns the answer once it is whole.
    ///
    /// # Errors
    /// [`Unanswered`] if the part cannot be read, does not belong to the others, or would make the answer longer than
    /// `limit`.
    pub(crate) fn take(
        &mut self,
        part: &[u8],
        payload: Cow<'_, [u8]>,
        limit: usize,
    ) -> Result<Option<Vec<u8>>, Unanswered> {
        let Part { wire, number, parts, digest } = decode_exact(part)?;
        if wire != WIRE {
            return Err(Unanswered::Foreign(wire));
        }
        if self.parts.is_empty() {
            if parts == 0 || parts as usize > limit / PIECE_BYTES + 1 {
                return Err(Unanswered::Malformed("an answer is too long"));
            }
            self.parts = vec![None; parts as usize];
            self.missing = parts as usize;
            self.digest = digest;
        }
        let same = self.digest == digest && self.parts.len() == parts as usize;
        let Some(slot) = self.parts.get_mut(number as usize).filter(|_| same) else {
            return Err(Unanswered::Malformed("the parts of an answer do not belong together"));
        };
        if payload.len() > PIECE_BYTES || slot.is_some() {
            return Err(Unanswered::Malformed("a part of an answer is too long, or came twice"));
        }
        *slot = Some(payload.into_owned());
        self.missing -= 1;
        if self.missing > 0 {
            return Ok(None);
        }
        let whole: Vec<u8> = std::mem::take(&mut self.parts).into_iter().flatten().flatten().collect();
        if blake3::hash(&whole) != Hash::from_bytes(self.digest) {
            return Err(Unanswered::Malformed("an answer is not what its digest says"));
        }
        Ok(Some(whole))
    }
}

/// Splits an answer into its parts: head and payload of each.
pub(crate) fn parts(whole: &[u8]) -> impl Iterator<Item = (Vec<u8>, &[u8])> {
    let digest = *blake3::hash(whole).as_bytes();
    let payloads = whole.chunks(PIECE_BYTES);
    let parts = payloads.len() as u32;
    (0..).zip(payloads).map(move |(number, payload)| (plain(&Part { wire: WIRE, number, parts, digest }), payload))
}

/// Returns the bytes of a value, after the number of the protocol.
pub(crate) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    plain(&(WIRE, value))
}

fn plain<T: Serialize>(value: &T) -> Vec<u8> {
    // Nothing that is encoded has a length that is not known, which is all that fails.
    postcard::to_stdvec(value).unwrap_or_default()
}

/// Reads a value of a peer.
///
/// # Errors
/// [`Unanswered::Foreign`], [`Unanswered::Malformed`].
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unanswered> {
    let (wire, rest) = postcard::take_from_bytes(bytes).map_err(|_| Unanswered::Malformed("it is cut off"))?;
    if wire != WIRE {
        return Err(Unanswered::Foreign(wire));
    }
    decode_exact(rest)
}

/// Reads a value that is all of `bytes`.
fn decode_exact<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unanswered> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(Unanswered::Malformed("bytes follow its end")),
        Err(_) => Err(Unanswered::Malformed("it is cut off or no such message")),
    }
}

/// Reads a text that people may see: one line of printable ASCII, which neither steers a terminal nor pretends to be
/// another line. What a peer wrote in any other way becomes question marks.
pub(crate) fn line<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| printable(&text))
}

fn lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Vec::<String>::deserialize(deserializer).map(|texts| texts.iter().map(|text| printable(text)).collect())
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' }).collect()
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("does not answer"),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Malformed(why) => write!(f, "sent an answer that cannot be read: {why}"),
            Self::Foreign(wire) => write!(f, "speaks protocol {wire}, and this bridge {WIRE}"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoName => f.write_str("exports no such name"),
            Self::NoVersion(latest) => write!(f, "has no such version; the latest is {latest}"),
            Self::Kind(kind) => write!(f, "has a {kind} of this name, and only frozen segments are pulled"),
            Self::NotFrozen(why) => write!(f, "has a segment of this name that is {why}: its bytes may change"),
            Self::NoContent => f.write_str("has nothing with this content"),
            Self::Withdrawn => f.write_str("has withdrawn the version"),
            Self::Unreadable(why) => write!(f, "cannot read the version: {why}"),
            Self::Busy => f.write_str("is busy: too many questions wait, or it hashes a version first"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_answers_are_put_together_and_checked() {
        let whole = encode(&vec![7_u8; 2 * PIECE_BYTES]);
        let digest = *blake3::hash(&whole).as_bytes();
        let pieces: Vec<_> = whole.chunks(PIECE_BYTES).collect();
        let part = |wire, number, parts| postcard::to_stdvec(&Part { wire, number, parts, digest }).unwrap();
        let limit = 8 * PIECE_BYTES;
        let mut assembly = Assembly::default();
        for number in [2, 0] {
            let taken = assembly.take(&part(WIRE, number, 3), pieces[number as usize].into(), limit);
            assert_eq!(taken, Ok(None));
        }
        assert!(matches!(assembly.take(&part(WIRE, 0, 3), pieces[0].into(), limit), Err(Unanswered::Malformed(_))));
        assert!(matches!(assembly.take(&part(WIRE, 3, 3), pieces[0].into(), limit), Err(Unanswered::Malformed(_))));
        let mut wrong = Assembly { parts: assembly.parts.clone(), ..assembly };
        assert_eq!(assembly.take(&part(WIRE, 1, 3), pieces[1].into(), limit), Ok(Some(whole.clone())));
        assert!(matches!(wrong.take(&part(WIRE, 1, 3), pieces[2].into(), limit), Err(Unanswered::Malformed(_))));
        let mut first = Assembly::default();
        assert_eq!(first.take(&part(9, 0, 1), pieces[0].into(), limit), Err(Unanswered::Foreign(9)));
        assert!(matches!(
            first.take(&part(WIRE, 0, u32::MAX), [0_u8][..].into(), limit),
            Err(Unanswered::Malformed(_))
        ));
        assert_eq!(decode::<Vec<u8>>(&whole).map(|bytes| bytes.len()), Ok(2 * PIECE_BYTES));
    }
}
