//! Links with certificates: hosts of one authority that are allowed, and nobody else.

use std::{fs, path::PathBuf};

use partywall_harness::{Running, Sandbox, noise};
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

use crate::{Host, command};

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
    }
    sandbox.broker();
}
