//! The session with other hosts: where it listens, which endpoints are allowed, questions and answers.
//!
//! A session of zenoh carries ordered bytes, and says which hosts are there. Endpoints are given, nothing is searched
//! for. Everything is sent with `Block` and in messages of at most [`PIECE_BYTES`], so that a congested link delays
//! messages and closes nothing before the lease does.
//!
//! The keys, in which R is the realm, H a host and I an instance, which is one life of its bridge:
//!
//! | key | what |
//! |---|---|
//! | `pw1/R/host/H/I` | the token that says that the host is there; asked, [`HostInfo`](crate::hosts::HostInfo) |
//! | `pw1/R/view/H/I` | asked, all hosts that this one knows |
//! | `pw1/R/names/H/I` | asked, the names that it exports; put when one of them has a new version |
//! | `pw1/R/manifest/H/I/V/NAME` | asked, the table and the root of a version; V is 0 for the latest |
//! | `pw1/R/content/H/I/ROOT` | asked, the manifest of a version with this content |
//! | `pw1/R/piece/H/I/ROOT/N` | asked, piece N of the content whose root that is, and its proof |
//!
//! An answer is any number of parts. Each says how many there are and the digest of all of them together, so parts of
//! two answers never become one. It begins with the number of the protocol, [`WIRE`].

use std::{
    fmt,
    net::{SocketAddr, TcpListener, UdpSocket},
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use blake3::Hash;
use partywall::ErrorKind;
use partywall_cli::Failure;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use zenoh::{
    Config, Session, Wait,
    bytes::ZBytes,
    qos::CongestionControl,
    query::{ConsolidationMode, Query, QueryTarget},
};

use crate::identity::Identity;

/// The number of the protocol. Bridges of other numbers are refused by name.
pub(crate) const WIRE: u32 = 1;

/// The bytes of a piece of content, and the most that one message carries.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Where a session listens and connects.
#[derive(Debug, Clone, Default)]
pub(crate) struct Endpoints {
    pub(crate) listen: Vec<String>,
    pub(crate) connect: Vec<String>,
    /// Whether addresses that are not of this machine may be used without encryption.
    pub(crate) insecure: bool,
    /// The certificate, if all links are encrypted.
    pub(crate) identity: Option<Identity>,
    /// The hosts that may take part, if they need certificates.
    pub(crate) allowed: Vec<String>,
}

/// A session in a realm.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    session: Session,
    realm: String,
}

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
    Kind(String),
    /// The bytes of the version may change, for this reason.
    NotFrozen(String),
    /// It has nothing of this root.
    NoContent,
    /// The version was withdrawn.
    Withdrawn,
    /// It cannot read the version, for this reason.
    Unreadable(String),
    /// Too many questions wait.
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
struct Assembly {
    parts: Vec<Option<Vec<u8>>>,
    missing: usize,
    digest: [u8; 32],
}

impl Endpoints {
    /// Refuses endpoints that cannot be used, and those of other machines without `insecure`. Chooses a port for each
    /// endpoint that listens at port 0.
    ///
    /// # Errors
    /// A usage error that names the endpoint.
    pub(crate) fn check(mut self) -> Result<Self, Failure> {
        let security = match (&self.identity, self.insecure) {
            (Some(_), _) => Security::Encrypted,
            (None, true) => Security::Open,
            (None, false) => Security::Loopback,
        };
        for endpoint in self.listen.iter_mut().chain(&mut self.connect) {
            *endpoint = check_endpoint(endpoint, security)?;
        }
        for endpoint in &mut self.listen {
            *endpoint = with_port(endpoint)?;
        }
        Ok(self)
    }

    /// Returns the settings of a session. Each is in a test, because an option that a release of zenoh no longer reads
    /// would be an error nowhere.
    fn settings(&self, realm: &str) -> Vec<(&'static str, serde_json::Value)> {
        let encryption = self.identity.as_ref().map(|identity| identity.settings(realm, &self.allowed));
        let mut settings = vec![
            ("mode", "peer".into()),
            ("listen/endpoints", self.listen.clone().into()),
            ("listen/exit_on_failure", true.into()),
            ("connect/endpoints", self.connect.clone().into()),
            ("connect/timeout_ms", 0.into()),
            ("connect/exit_on_failure", false.into()),
            (
                "connect/retry",
                serde_json::json!({ "period_init_ms": 100, "period_max_ms": 1000, "period_increase_factor": 2.0 }),
            ),
            ("scouting/multicast/enabled", false.into()),
            ("scouting/gossip/enabled", false.into()),
            ("adminspace/enabled", false.into()),
            ("transport/link/tx/lease", LEASE_MS.into()),
            // In microseconds. The lease ends a dead link long before.
            ("transport/link/tx/queue/congestion_control/block/wait_before_close", 60_000_000.into()),
            ("transport/link/rx/buffer_size", (1 << 20).into()),
            // A hostile peer makes this process keep so much of a message that it never ends.
            ("transport/link/rx/max_message_size", (4 * PIECE_BYTES).into()),
        ];
        settings.extend(encryption.into_iter().flatten());
        settings
    }
}

impl Link {
    /// Opens a session. Endpoints that cannot be reached are tried again in the background.
    ///
    /// # Errors
    /// If an endpoint cannot be listened at.
    pub(crate) fn open(realm: &str, endpoints: &Endpoints) -> Result<Self, Failure> {
        let mut config = Config::default();
        for (key, value) in endpoints.settings(realm) {
            config.insert_json5(key, &value.to_string()).map_err(|error| Failure::system("setting up zenoh", error))?;
        }
        let session = zenoh::open(config).wait().map_err(|error| {
            let message = format!("cannot listen at {}: {error}", endpoints.listen.join(", "));
            Failure::new(ErrorKind::Refused, message, "choose another address or port with --listen")
        })?;
        Ok(Self { session, realm: realm.to_owned() })
    }

    /// Returns the session.
    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the number of this life of the session, as text.
    pub(crate) fn instance(&self) -> String {
        self.session.zid().to_string()
    }

    /// Returns a key of the realm: `pw1/R/REST`.
    pub(crate) fn key(&self, rest: impl fmt::Display) -> String {
        format!("pw1/{}/{rest}", self.realm)
    }

    /// Asks at a key, and waits for the whole answer of at most `limit` bytes.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub(crate) fn ask(&self, key: &str, within: Duration, limit: usize) -> Result<Vec<u8>, Unanswered> {
        self.question(key, within, limit).wait()
    }

    /// Asks at a key. The answer is waited for later, so that several questions are under way.
    pub(crate) fn question(&self, key: &str, within: Duration, limit: usize) -> Question {
        // More than this from a peer that floods is dropped, and the answer then lacks a part.
        let (send, replies) = mpsc::sync_channel(limit / PIECE_BYTES + 4);
        let deadline = Instant::now() + within;
        let get = self.session.get(key).target(QueryTarget::All).consolidation(ConsolidationMode::None);
        let get = get.congestion_control(CongestionControl::Block).timeout(within);
        let get = get.callback(move |reply| drop(send.try_send(reply)));
        // If it cannot be sent, the callback is dropped, which ends the replies.
        let _ = get.wait();
        Question { replies, deadline, limit }
    }
}

/// A question that is under way.
pub(crate) struct Question {
    replies: mpsc::Receiver<zenoh::query::Reply>,
    deadline: Instant,
    limit: usize,
}

impl Question {
    /// Waits for the whole answer.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub(crate) fn wait(self) -> Result<Vec<u8>, Unanswered> {
        let mut assembly = Assembly::default();
        let mut refused = Unanswered::Silent;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let reply = match self.replies.recv_timeout(left) {
                Ok(reply) => reply,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Err(refused),
            };
            match reply.into_result() {
                Ok(sample) => {
                    let part = sample.attachment().ok_or(Unanswered::Malformed("a part says not where it belongs"))?;
                    if let Some(whole) = assembly.take(&part.to_bytes(), sample.payload(), self.limit)? {
                        return Ok(whole);
                    }
                }
                Err(error) => refused = decode::<Refusal>(&error.payload().to_bytes()).map_or_else(|e| e, refusal),
            }
        }
    }
}

impl Question {
    /// Waits for an answer of one message. Returns its payload and its attachment. Ends soon after `is_cancelled`
    /// returns true.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub(crate) fn single(self, is_cancelled: &dyn Fn() -> bool) -> Result<(ZBytes, ZBytes), Unanswered> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let reply = match self.replies.recv_timeout(left.min(CANCELLED_AFTER)) {
                Ok(reply) => reply,
                Err(RecvTimeoutError::Timeout) if !left.is_zero() && !is_cancelled() => continue,
                Err(_) => return Err(Unanswered::Silent),
            };
            return match reply.into_result() {
                Ok(sample) => {
                    let head = sample.attachment().cloned().ok_or(Unanswered::Malformed("it has no head"))?;
                    Ok((sample.payload().clone(), head))
                }
                Err(error) => Err(decode::<Refusal>(&error.payload().to_bytes()).map_or_else(|e| e, refusal)),
            };
        }
    }
}

impl Assembly {
    /// Takes a part. Returns the answer once it is whole.
    fn take(&mut self, part: &[u8], payload: &ZBytes, limit: usize) -> Result<Option<Vec<u8>>, Unanswered> {
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
        *slot = Some(payload.to_bytes().into_owned());
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

/// Answers a question. The answer is decoded by [`decode`].
///
/// # Errors
/// If the asker is gone.
pub(crate) fn answer<T: Serialize>(query: &Query, value: &T) -> zenoh::Result<()> {
    let whole = encode(value);
    let digest = *blake3::hash(&whole).as_bytes();
    let parts = whole.chunks(PIECE_BYTES);
    let count = parts.len() as u32;
    for (number, payload) in (0..).zip(parts) {
        let part = Part { wire: WIRE, number, parts: count, digest };
        reply(query, payload, &postcard::to_stdvec(&part).unwrap_or_default())?;
    }
    Ok(())
}

/// Sends one message as an answer. It waits for the link as the question said.
pub(crate) fn reply(query: &Query, payload: impl Into<ZBytes>, head: &[u8]) -> zenoh::Result<()> {
    query.reply(query.key_expr(), payload).attachment(head).wait()
}

/// Refuses a question. That the asker is gone is nothing to act on.
pub(crate) fn refuse(query: &Query, refusal: &Refusal) {
    let _ = query.reply_err(encode(refusal)).wait();
}

/// Returns the bytes of a value, after the number of the protocol.
pub(crate) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Nothing that is encoded has a length that is not known, which is all that fails.
    postcard::to_stdvec(&(WIRE, value)).unwrap_or_default()
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
pub(crate) fn decode_exact<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unanswered> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(Unanswered::Malformed("bytes follow its end")),
        Err(_) => Err(Unanswered::Malformed("it is cut off or no such message")),
    }
}

fn refusal(refusal: Refusal) -> Unanswered {
    Unanswered::Refused(refusal)
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
            Self::Kind(kind) => write!(f, "has a {kind} of this name, and only frozen segments cross hosts"),
            Self::NotFrozen(why) => write!(f, "has a segment of this name that is {why}: its bytes may change"),
            Self::NoContent => f.write_str("has nothing with this content"),
            Self::Withdrawn => f.write_str("has withdrawn the version"),
            Self::Unreadable(why) => write!(f, "cannot read the version: {why}"),
            Self::Busy => f.write_str("has too many questions waiting"),
        }
    }
}

/// Which addresses may be used, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Security {
    /// Those of this machine, without encryption.
    Loopback,
    /// All, without encryption.
    Open,
    /// All, with certificates.
    Encrypted,
}

/// Returns an endpoint as zenoh reads it. `HOST:PORT` is short for `tcp/HOST:PORT`, or `quic/HOST:PORT` with
/// certificates.
fn check_endpoint(endpoint: &str, security: Security) -> Result<String, Failure> {
    let usage = |message, advice: &str| Failure::new(ErrorKind::Usage, message, advice);
    let wanted = if security == Security::Encrypted { "quic" } else { "tcp" };
    let (protocol, address) = endpoint.split_once('/').unwrap_or((wanted, endpoint));
    match protocol {
        _ if protocol == wanted => {}
        "tcp" => {
            return Err(usage(
                format!("cannot use {endpoint} with --tls: it is not encrypted"),
                "give it as HOST:PORT",
            ));
        }
        "quic" => {
            let advice = "add --tls DIR, with the certificate of this host";
            return Err(usage(format!("cannot use {endpoint} without certificates"), advice));
        }
        "tls" => {
            let message = format!("cannot use {endpoint}: the tls link of zenoh 1.10.2 is unsound (zenoh #2557)");
            return Err(usage(message, "use --tls DIR, whose links are QUIC, or tcp/ over WireGuard"));
        }
        _ => return Err(usage(format!("cannot use {endpoint}: not HOST:PORT"), "give it as HOST:PORT")),
    }
    // What follows `#` or `?` are options of the link, as the name of an interface.
    let bare = address.split(['#', '?']).next().unwrap_or_default();
    let port = bare.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    if port.is_none() {
        return Err(usage(format!("cannot use {endpoint}: it has no port"), "give it as HOST:PORT"));
    }
    if security == Security::Loopback && !is_loopback(bare) {
        let message = format!(
            "{endpoint} is not on this machine, and nothing that crosses would be encrypted: every machine that reaches \
             it could read what is exported, and every one on the way what crosses"
        );
        return Err(usage(message, "add --tls DIR, or --insecure-network if that network is private"));
    }
    Ok(format!("{wanted}/{address}"))
}

/// Returns an endpoint that listens with its port, and refuses one without an address: other hosts are told where this
/// one listens.
fn with_port(endpoint: &str) -> Result<String, Failure> {
    let (protocol, address) = endpoint.split_once('/').unwrap_or(("tcp", endpoint));
    let bare = address.split(['#', '?']).next().unwrap_or_default();
    let found: Option<SocketAddr> = bare.parse().ok();
    if found.is_some_and(|address| address.ip().is_unspecified()) {
        let message = format!("cannot listen at {endpoint}: other hosts are told the address, and this is none");
        let advice = "name an address of this machine; --listen may be repeated";
        return Err(Failure::new(ErrorKind::Usage, message, advice));
    }
    let Some(address) = found.filter(|address| address.port() == 0) else { return Ok(endpoint.to_owned()) };
    let chosen = match protocol {
        "quic" => UdpSocket::bind(address).and_then(|socket| socket.local_addr()),
        _ => TcpListener::bind(address).and_then(|listener| listener.local_addr()),
    };
    let chosen = chosen.map_err(|error| Failure::system(&format!("listening at {endpoint}"), error))?;
    Ok(format!("{protocol}/{chosen}"))
}

/// Returns whether `HOST:PORT` is on this machine for certain.
fn is_loopback(address: &str) -> bool {
    match address.parse::<SocketAddr>() {
        Ok(address) => address.ip().to_canonical().is_loopback(),
        Err(_) => address.rsplit_once(':').is_some_and(|(host, _)| host == "localhost"),
    }
}

/// How late a wait may notice that it was cancelled.
const CANCELLED_AFTER: Duration = Duration::from_millis(100);

/// How long a link may bring nothing. A stopped host or a cut cable is noticed within it.
const LEASE_MS: u64 = 4000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_is_read() {
        let listen = vec!["tcp/127.0.0.1:0".to_owned()];
        let connect = vec!["tcp/127.0.0.1:9".to_owned()];
        let endpoints = Endpoints { listen, connect, ..Endpoints::default() };
        let mut config = Config::default();
        for (key, value) in endpoints.settings("r") {
            let before = config.get_json(key).unwrap();
            config.insert_json5(key, &value.to_string()).unwrap();
            let after: serde_json::Value = serde_json::from_str(&config.get_json(key).unwrap()).unwrap();
            assert_eq!(after, value, "{key} was {before}");
        }
    }

    // Holds 440.
    #[test]
    fn endpoints_of_other_machines_need_the_word_of_the_user() {
        let check = |endpoint: &str, insecure| {
            check_endpoint(endpoint, if insecure { Security::Open } else { Security::Loopback })
        };
        for here in ["127.0.0.1:7447", "tcp/127.0.0.1:0", "tcp/[::1]:7447", "localhost:1", "tcp/[::ffff:127.0.0.1]:1"] {
            assert!(check(here, false).unwrap().starts_with("tcp/"), "{here}");
        }
        for there in ["0.0.0.0:7447", "tcp/10.0.0.2:7447", "[::]:7447", "cam1:7447", "10.0.0.1:7447#iface=wg0"] {
            assert!(check(there, false).unwrap_err().message.contains("could read what is exported"), "{there}");
            assert!(check(there, true).is_ok(), "{there}");
        }
        assert_eq!(check_endpoint("10.0.0.1:1", Security::Encrypted).unwrap(), "quic/10.0.0.1:1");
        assert!(check_endpoint("tcp/127.0.0.1:1", Security::Encrypted).unwrap_err().message.contains("not encrypted"));
        assert!(check("quic/127.0.0.1:1", true).unwrap_err().message.contains("without certificates"));
        assert!(with_port("tcp/0.0.0.0:7447").unwrap_err().message.contains("other hosts are told"));
        assert!(!with_port("tcp/127.0.0.1:0").unwrap().ends_with(":0"));
        assert!(check("tls/127.0.0.1:1", true).unwrap_err().message.contains("#2557"));
        for bad in ["udp/127.0.0.1:1", "127.0.0.1", "tcp/127.0.0.1:x", ""] {
            assert_eq!(check(bad, true).unwrap_err().kind, ErrorKind::Usage, "{bad}");
        }
    }

    #[test]
    fn parts_of_answers_are_put_together_and_checked() {
        let whole = encode(&vec![7_u8; 2 * PIECE_BYTES]);
        let digest = *blake3::hash(&whole).as_bytes();
        let pieces: Vec<_> = whole.chunks(PIECE_BYTES).collect();
        let part = |wire, number, parts| postcard::to_stdvec(&Part { wire, number, parts, digest }).unwrap();
        let limit = 8 * PIECE_BYTES;
        let mut assembly = Assembly::default();
        for number in [2, 0] {
            let taken = assembly.take(&part(WIRE, number, 3), &pieces[number as usize].into(), limit);
            assert_eq!(taken, Ok(None));
        }
        assert!(matches!(assembly.take(&part(WIRE, 0, 3), &pieces[0].into(), limit), Err(Unanswered::Malformed(_))));
        assert!(matches!(assembly.take(&part(WIRE, 3, 3), &pieces[0].into(), limit), Err(Unanswered::Malformed(_))));
        let mut wrong = Assembly { parts: assembly.parts.clone(), ..assembly };
        assert_eq!(assembly.take(&part(WIRE, 1, 3), &pieces[1].into(), limit), Ok(Some(whole.clone())));
        assert!(matches!(wrong.take(&part(WIRE, 1, 3), &pieces[2].into(), limit), Err(Unanswered::Malformed(_))));
        let mut first = Assembly::default();
        assert_eq!(first.take(&part(9, 0, 1), &pieces[0].into(), limit), Err(Unanswered::Foreign(9)));
        assert!(matches!(
            first.take(&part(WIRE, 0, u32::MAX), &[0_u8][..].into(), limit),
            Err(Unanswered::Malformed(_))
        ));
        assert_eq!(decode::<Vec<u8>>(&whole).map(|bytes| bytes.len()), Ok(2 * PIECE_BYTES));
    }
}
