//! The session with other hosts: where it listens, which endpoints are allowed, questions and answers.
//!
//! A session of zenoh carries ordered bytes, and says which hosts are there. Endpoints are given, nothing is searched
//! for. Everything is sent in messages of at most [`PIECE_BYTES`]. A congested link delays a message, and loses it if it
//! cannot take it within 8 s; only the end of its lease closes a link. Streams do not share a queue with their
//! acknowledgements and with what is for several hosts, so these do not wait for them.
//!
//! The keys, in which R is the realm, H a host and I an instance, which is one life of its bridge:
//!
//! | key | what |
//! |---|---|
//! | `pw1/R/host/H/I` | the token that says that the host is there; asked, [`HostInfo`](crate::message::HostInfo) |
//! | `pw1/R/view/H/I` | asked, all hosts that this one knows |
//! | `pw1/R/names/H/I` | asked, the names that it exports; put when one of them has a new version |
//! | `pw1/R/manifest/H/I/V/NAME` | asked, the table and the root of a version; V is 0 for the latest |
//! | `pw1/R/content/H/I/ROOT` | asked, the manifest of a version with this content |
//! | `pw1/R/piece/H/I/ROOT/N` | asked, piece N of the content whose root that is, and its proof |
//!
//! What the answers contain is in [`message`](crate::message).

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    io::{self, PipeReader, Write},
    net::{SocketAddr, TcpListener, UdpSocket},
    os::fd::AsRawFd,
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use partywall::ErrorKind;
use partywall_cli::Failure;
use serde::Serialize;
use zenoh::{
    Config, Session, Wait,
    bytes::ZBytes,
    qos::{CongestionControl, Priority},
    query::{ConsolidationMode, Query, QueryTarget},
};

use crate::{
    identity::Identity,
    message::{Assembly, PIECE_BYTES, Refusal, Unanswered, decode, encode, parts},
};

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
            // For ever, in the background. With 0, zenoh tries once.
            ("connect/timeout_ms", (-1).into()),
            ("connect/exit_on_failure", false.into()),
            // Two hosts that connect to each other at the same moment refuse each other, so not all try again together.
            (
                "connect/retry",
                serde_json::json!({
                    "period_init_ms": 100, "period_max_ms": 800 + jitter_ms(400), "period_increase_factor": 2.0,
                }),
            ),
            ("scouting/multicast/enabled", false.into()),
            ("scouting/gossip/enabled", false.into()),
            ("adminspace/enabled", false.into()),
            ("transport/link/tx/lease", LEASE_MS.into()),
            // In microseconds: how long one message may wait for its link. A piece passes a link of 1 Mbit/s in that time.
            // A link that is lost meanwhile ends only after it; streams give up a silent host after 15 s by default.
            ("transport/link/tx/queue/congestion_control/drop/wait_before_drop", 8_000_000.into()),
            ("transport/link/tx/queue/congestion_control/drop/max_wait_before_drop_fragments", 0.into()),
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
        let users = users().map_err(|error| Failure::system("setting up zenoh", error))?;
        let settings = endpoints.settings(realm).into_iter().chain(one_link(&users));
        for (key, value) in settings {
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
        self.question(key, within, limit).wait(&|| false)
    }

    /// Asks at a key. The answer is waited for later, so that several questions are under way.
    pub(crate) fn question(&self, key: &str, within: Duration, limit: usize) -> Question {
        // More than this from a peer that floods is dropped, and the answer then lacks a part.
        let (send, replies) = mpsc::sync_channel(limit / PIECE_BYTES + 4);
        let deadline = Instant::now() + within;
        // At its own time-out zenoh answers with an error, which would be read as one of a peer.
        let within = within.saturating_add(Duration::from_secs(1));
        let get = self.session.get(key).target(QueryTarget::All).consolidation(ConsolidationMode::None);
        let get = get.congestion_control(CONGESTION).timeout(within);
        let get = get.callback(move |reply| drop(send.try_send(reply)));
        // If it cannot be sent, the callback is dropped, which ends the replies.
        let _ = get.wait();
        Question { replies, deadline, limit }
    }
}

/// Returns settings that let a session have one link at most to each other one.
///
/// Of two hosts that connect to each other, one may lose its links before the other does. zenoh would add the link that
/// returns to those that the other one still has, and declare nothing anew over it: that host would be unreachable for
/// ever. zenoh refuses a second link in the same direction, and one whose configuration differs from the first. The name
/// of a user is part of the configuration of accepted links only, so with a user the two directions differ, and the
/// returning host is refused until the former link has ended. This is no protection: everybody knows the password.
fn one_link(users: &PipeReader) -> [(&'static str, serde_json::Value); 3] {
    [
        ("transport/auth/usrpwd/user", USER.into()),
        ("transport/auth/usrpwd/password", USER.into()),
        ("transport/auth/usrpwd/dictionary_file", format!("/proc/self/fd/{}", users.as_raw_fd()).into()),
    ]
}

/// Returns the file of the users that may connect.
fn users() -> io::Result<PipeReader> {
    let (users, mut writer) = io::pipe()?;
    writer.write_all(format!("{USER}:{USER}").as_bytes())?;
    Ok(users)
}

/// A question that is under way.
pub(crate) struct Question {
    replies: mpsc::Receiver<zenoh::query::Reply>,
    deadline: Instant,
    limit: usize,
}

impl Question {
    /// Waits for the whole answer. Ends soon after `is_cancelled` returns true.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub(crate) fn wait(self, is_cancelled: &dyn Fn() -> bool) -> Result<Vec<u8>, Unanswered> {
        let mut assembly = Assembly::default();
        let mut refused = Unanswered::Silent;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let reply = match self.replies.recv_timeout(left.min(CANCELLED_AFTER)) {
                Ok(reply) => reply,
                Err(RecvTimeoutError::Timeout) if !left.is_zero() && !is_cancelled() => continue,
                Err(_) => return Err(refused),
            };
            match reply.into_result() {
                Ok(sample) => {
                    let part = sample.attachment().ok_or(Unanswered::Malformed("a part says not where it belongs"))?;
                    if let Some(whole) = assembly.take(&part.to_bytes(), sample.payload().to_bytes(), self.limit)? {
                        return Ok(whole);
                    }
                }
                Err(error) => {
                    refused =
                        decode::<Refusal>(&error.payload().to_bytes()).map_or_else(|error| error, Unanswered::Refused)
                }
            }
        }
    }

    /// Waits so long for an answer of one message. Returns its payload and its attachment; none if it may still come.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub(crate) fn poll(&self, within: Duration) -> Option<Result<(ZBytes, ZBytes), Unanswered>> {
        let reply = match self.replies.recv_timeout(within) {
            Ok(reply) => reply,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => return Some(Err(Unanswered::Silent)),
        };
        Some(match reply.into_result() {
            Ok(sample) => match sample.attachment() {
                Some(head) => Ok((sample.payload().clone(), head.clone())),
                None => Err(Unanswered::Malformed("it has no head")),
            },
            Err(error) => {
                Err(decode::<Refusal>(&error.payload().to_bytes()).map_or_else(|error| error, Unanswered::Refused))
            }
        })
    }
}

/// Answers a question. The answer is decoded by [`decode`].
///
/// # Errors
/// If the asker is gone.
pub(crate) fn answer<T: Serialize>(query: &Query, value: &T) -> zenoh::Result<()> {
    let whole = encode(value);
    parts(&whole).try_for_each(|(head, payload)| reply(query, payload, &head))
}

/// Sends one message as an answer. It waits for the link as the question said.
pub(crate) fn reply(query: &Query, payload: impl Into<ZBytes>, head: &[u8]) -> zenoh::Result<()> {
    query.reply(query.key_expr(), payload).attachment(head).wait()
}

/// Refuses a question. That the asker is gone is nothing to act on.
pub(crate) fn refuse(query: &Query, refusal: &Refusal) {
    let _ = query.reply_err(encode(refusal)).wait();
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
    let bare = bare(address);
    let port = bare.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    if port.is_none() {
        return Err(usage(format!("cannot use {endpoint}: it has no port"), "give it as HOST:PORT"));
    }
    if security == Security::Loopback && !is_loopback(bare) {
        let message = format!(
            "{endpoint} is not on this machine, and nothing that crosses would be encrypted: every machine that reaches \
             it could read what is exported, and every one on the way what crosses"
        );
        let failure = usage(message, "add --tls DIR, or --insecure-network if that network is private");
        return Err(failure.with_entry("not-encrypted"));
    }
    Ok(format!("{wanted}/{address}"))
}

/// Returns an endpoint that listens with its port, and refuses one without an address: other hosts are told where this
/// one listens.
fn with_port(endpoint: &str) -> Result<String, Failure> {
    let (protocol, address) = endpoint.split_once('/').unwrap_or(("tcp", endpoint));
    let found: Option<SocketAddr> = bare(address).parse().ok();
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

/// Returns an endpoint without the options of its link, such as the name of an interface. They are for the host that
/// listens there: from another host they would choose, for example, whose certificates are right.
pub(crate) fn bare(endpoint: &str) -> &str {
    endpoint.split(['#', '?']).next().unwrap_or_default()
}

/// Returns whether `[PROTOCOL/]HOST:PORT` is on this machine for certain.
pub(crate) fn is_loopback(endpoint: &str) -> bool {
    let address = endpoint.split_once('/').map_or(endpoint, |(_, address)| address);
    match address.parse::<SocketAddr>() {
        Ok(address) => address.ip().to_canonical().is_loopback(),
        Err(_) => address.rsplit_once(':').is_some_and(|(host, _)| host == "localhost"),
    }
}

/// Returns a number below `limit` that other processes do not have.
fn jitter_ms(limit: u64) -> u64 {
    RandomState::new().hash_one(()) % limit
}

/// What happens to a message for which its link has no room in time: it is lost, which streams and questions expect.
///
/// With `Block` zenoh 1.10.2 would close the link, and the end of the lease does so as well. The second of the two
/// forgets the link over which the host has returned between them: nothing would be sent to it for ever.
pub(crate) const CONGESTION: CongestionControl = CongestionControl::Drop;

/// The priority of small messages, which have a queue of their own and do not wait for pieces.
pub(crate) const URGENT: Priority = Priority::DataHigh;

/// The user and the password of every session.
const USER: &str = "partywall";

/// How late a wait may notice that it was cancelled.
pub(crate) const CANCELLED_AFTER: Duration = Duration::from_millis(100);

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
        let users = users().unwrap();
        for (key, value) in endpoints.settings("r").into_iter().chain(one_link(&users)) {
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
}
