//! Links with certificates: hosts of one authority that are allowed, and nobody else.

use std::{fs, path::PathBuf};

use partywall_harness::{Running, Sandbox, noise};
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use zenoh::Wait;

use crate::{Host, assert_quoted, command, raw};

/// An authority, which makes certificates in a folder.
struct Authority {
    folder: Sandbox,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { folder: Sandbox::new(), pem, issuer: Issuer::new(params, key) }
    }

    /// Returns a directory with the certificate of a host, which is valid up to a year.
    fn host(&self, name: &str, until: i32) -> String {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |part: &str, text: String| self.folder.file(&format!("{name}-{until}/{part}"), text);
        file("ca.pem", self.pem.clone());
        file("key.pem", key.serialize_pem());
        let path: PathBuf = file("cert.pem", certificate.pem());
        path.parent().unwrap().to_str().unwrap().to_owned()
    }
}

// Holds 452.
#[test]
fn allowed_hosts_with_certificates_pull_and_others_get_nothing() {
    let authority = Authority::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| authority.host(name, 4000));
    let a = Host::start("a", &[], &["--export", "*", "--tls", &a, "--allow", "b"]);
    assert!(a.endpoint.starts_with("quic/127.0.0.1:"));
    let b = Host::start("b", &[&a], &["--tls", &b, "--allow", "a"]);
    b.await_state("a", "alive");
    let bytes = noise((2 << 20) + 3, 1);
    let file = a.sandbox.file("put", &bytes);
    a.run(&["put", file.to_str().unwrap(), "llm", "--device", "host"]).expect(0);
    b.run(&["pull", "//a/llm", "--device", "host"]).expect(0);
    let got = b.sandbox.path().join("got");
    b.run(&["get", "llm", got.to_str().unwrap()]).expect(0);
    assert!(fs::read(got).unwrap() == bytes);
    // A host of the same authority that is not allowed, one of another authority, and one without a certificate.
    let others = Authority::new();
    let other = others.host("b", 4000);
    let sandbox = Sandbox::new();
    let pull = |options: &[&str]| {
        let arguments = ["pull", "//a/llm", "--device", "host", "--timeout", "2", "--connect"];
        Running::spawn(&mut command(&sandbox, &[&arguments[..], options].concat())).wait()
    };
    for directory in [&c, &other] {
        let refused = pull(&[&a.endpoint, "--tls", directory]);
        assert_eq!(refused.code, Some(7), "{refused:?}");
    }
    let plain = a.endpoint.replace("quic/", "tcp/");
    pull(&[&plain]).expect(7);
    assert!(pull(&[&a.endpoint]).expect(2).stderr.contains("without certificates"));
    sandbox.broker();
}

// Holds 452.
#[test]
fn certificates_that_cannot_be_used_are_refused_at_the_start() {
    let authority = Authority::new();
    let right = authority.host("a", 4000);
    let expired = authority.host("a", 2021);
    let missing = authority.folder.path().to_str().unwrap().to_owned();
    let sandbox = Sandbox::new();
    for (directory, host, code, part) in
        [(&right, "b", 2, "is of host a, not of b"), (&expired, "a", 2, "and not now"), (&missing, "a", 3, "ca.pem")]
    {
        let arguments = ["bridge", "--host", host, "--listen", "127.0.0.1:0", "--tls", directory];
        let refused = Running::spawn(&mut command(&sandbox, &arguments)).wait().expect(code);
        assert!(refused.stderr.contains(part), "{refused:?}");
        if directory == &expired {
            assert_quoted(&refused);
        }
    }
    sandbox.broker();
}

/// Returns the settings of a session with the certificate in a directory.
fn certified(directory: &str) -> Vec<(&'static str, Value)> {
    let file = |name: &str| json!(format!("{directory}/{name}"));
    vec![
        ("transport/link/tls/root_ca_certificate", file("ca.pem")),
        ("transport/link/tls/connect_certificate", file("cert.pem")),
        ("transport/link/tls/connect_private_key", file("key.pem")),
        ("transport/link/tls/enable_mtls", json!(true)),
    ]
}

// Holds 452.
#[test]
fn certificate_that_expired_elsewhere_opens_nothing() {
    let authority = Authority::new();
    let a = Host::start("a", &[], &["--tls", &authority.host("a", 4000), "--allow", "b"]);
    let tokens = |directory: &str| {
        let connect = ("connect/endpoints", json!([a.endpoint]));
        let session = raw::session(&[certified(directory), vec![connect]].concat());
        let (send, found) = std::sync::mpsc::channel();
        let tokens = session.liveliness().declare_subscriber("pw1/default/host/**").history(true);
        let _tokens = tokens.callback(move |_| _ = send.send(())).wait().unwrap();
        found.recv_timeout(std::time::Duration::from_secs(2)).is_ok()
    };
    assert!(tokens(&authority.host("b", 4000)));
    assert!(!tokens(&authority.host("b", 2021)));
}

// Holds 452.
#[test]
fn allowed_host_speaks_for_itself_only() {
    let authority = Authority::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| authority.host(name, 4000));
    let a = Host::start("a", &[], &["--tls", &a, "--allow", "b", "--allow", "c"]);
    let connect = ("connect/endpoints", json!([a.endpoint]));
    let mallory = raw::session(&[certified(&b), vec![connect]].concat());
    let zid = mallory.zid();
    let declare = |key: String| mallory.liveliness().declare_token(format!("pw1/default/{key}")).wait().unwrap();
    // As itself, as an allowed host that is not there, and as one that is nowhere.
    let _tokens = [format!("host/c/{zid}"), format!("host/d/{zid}"), format!("host/b/{zid}")].map(declare);
    a.await_state("b", "alive");
    assert_eq!((a.view("c"), a.view("d")), (Value::Null, Value::Null));
    // Nor is it asked what another one is.
    let (send, asked) = std::sync::mpsc::channel();
    let answers = mallory.declare_queryable("pw1/default/host/c/*");
    let _answers = answers.callback(move |_| _ = send.send(())).wait().unwrap();
    let c = Host::start("c", &[&a], &["--tls", &c, "--allow", "a"]);
    assert_eq!(a.await_state("c", "alive")["endpoints"][0], c.endpoint);
    assert!(asked.try_recv().is_err());
}
