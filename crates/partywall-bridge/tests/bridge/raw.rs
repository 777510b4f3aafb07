//! A host that a test plays itself: a session of zenoh that says what it likes.

use std::{
    io::{self, Write},
    net::TcpListener,
    os::fd::AsRawFd,
};

use serde::Serialize;
use serde_json::{Value, json};
use zenoh::{Config, Session, Wait, liveliness::LivelinessToken, query::Query};

/// The host.
pub(crate) struct RawHost {
    pub(crate) session: Session,
    pub(crate) name: String,
    pub(crate) endpoint: String,
    _token: LivelinessToken,
}

impl RawHost {
    /// Opens a session that listens without encryption, and connects to other hosts. It says of itself what hosts say.
    pub(crate) fn start(name: &str, connect: &[&str]) -> Self {
        Self::speaking(1, name, connect)
    }

    /// Does the same in a protocol of this number.
    pub(crate) fn speaking(wire: u32, name: &str, connect: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let endpoint = format!("tcp/127.0.0.1:{port}");
        let session = session(&[("listen/endpoints", json!([endpoint])), ("connect/endpoints", json!(connect))]);
        let key = format!("pw1/default/host/{name}/{}", session.zid());
        let info = ("0.0.0", vec![endpoint.clone()], 1_u64);
        let react = move |query: Query| answer(&query, wire, &info);
        session.declare_queryable(&key).callback(react).background().wait().unwrap();
        let token = session.liveliness().declare_token(key).wait().unwrap();
        Self { session, name: name.into(), endpoint, _token: token }
    }

    /// Answers questions of a sort.
    pub(crate) fn answers(&self, what: &str, rest: &str, react: impl Fn(&Query) + Send + Sync + 'static) {
        let key = format!("pw1/default/{what}/{}/{}{rest}", self.name, self.session.zid());
        self.session.declare_queryable(key).callback(move |query| react(&query)).background().wait().unwrap();
    }
}

/// Opens a session in which hosts do not search for each other.
pub(crate) fn session(settings: &[(&str, Value)]) -> Session {
    let mut config = Config::default();
    // As bridges have them. They are read once.
    let (users, mut writer) = io::pipe().unwrap();
    writer.write_all(b"partywall:partywall").unwrap();
    drop(writer);
    let common = [
        ("mode", json!("peer")),
        ("scouting/multicast/enabled", json!(false)),
        ("scouting/gossip/enabled", json!(false)),
        ("transport/auth/usrpwd/user", json!("partywall")),
        ("transport/auth/usrpwd/password", json!("partywall")),
        ("transport/auth/usrpwd/dictionary_file", json!(format!("/proc/self/fd/{}", users.as_raw_fd()))),
    ];
    for (key, value) in common.iter().chain(settings) {
        config.insert_json5(key, &value.to_string()).unwrap();
    }
    zenoh::open(config).wait().unwrap()
}

/// Answers with a value of one part, in this protocol.
pub(crate) fn answer(query: &Query, wire: u32, value: &impl Serialize) {
    let whole = postcard::to_stdvec(&(wire, value)).unwrap();
    let part = (wire, 0_u32, 1_u32, *blake3::hash(&whole).as_bytes());
    let part = postcard::to_stdvec(&part).unwrap();
    query.reply(query.key_expr(), whole).attachment(part).wait().unwrap();
}

/// Refuses a question, for the reason with this number.
pub(crate) fn refuse(query: &Query, reason: u8) {
    query.reply_err(vec![1, reason]).wait().unwrap();
}
