//! The identity of a host: its certificate, and what each other host may do here.
//!
//! With `--tls DIR` all links are QUIC with mutual TLS 1.3: a peer without a certificate of the same authority gets no
//! session. The common name of a certificate is the name of its host. Access is denied by default; a host that is
//! allowed may publish and answer under its own name only, and ask only this one.

use std::{
    fs,
    path::{Path, PathBuf},
};

use partywall::ErrorKind;
use partywall_cli::Failure;
use serde_json::{Value, json};
use x509_parser::pem::parse_x509_pem;

use crate::name::check_host;

/// The certificate of a host.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    directory: PathBuf,
    /// The common name.
    pub(crate) host: String,
}

impl Identity {
    /// Reads `ca.pem`, `cert.pem` and `key.pem` of a directory.
    ///
    /// # Errors
    /// If one is missing, or the certificate cannot be used: it names no host, or is not valid now.
    pub(crate) fn read(directory: &Path) -> Result<Self, Failure> {
        let directory = std::path::absolute(directory).map_err(|error| Failure::system("finding --tls", error))?;
        let advice = "--tls takes a directory with ca.pem, cert.pem and key.pem; the common name is the host's name";
        let read = |name: &str| {
            let path = directory.join(name);
            let failed =
                |error| Failure::new(ErrorKind::NotFound, format!("cannot read {}: {error}", path.display()), advice);
            fs::read(&path).map_err(failed)
        };
        read("ca.pem")?;
        read("key.pem")?;
        let pem = read("cert.pem")?;
        let bad = |why: String| {
            let path = directory.join("cert.pem");
            let message = format!("{} cannot be used: {why}", path.display());
            Failure::new(ErrorKind::Usage, message, advice).with_entry("bad-certificate")
        };
        let (_, pem) = parse_x509_pem(&pem).map_err(|error| bad(format!("it is no certificate: {error}")))?;
        let certificate = pem.parse_x509().map_err(|error| bad(format!("it is no certificate: {error}")))?;
        let names: Vec<_> = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok()).collect();
        let [host] = names[..] else { return Err(bad(format!("it has {} common names, not one", names.len()))) };
        let host = check_host(host).map_err(|why| bad(format!("its common name cannot be that of a host: {why}")))?;
        let validity = certificate.validity();
        if !validity.is_valid() {
            let (from, to) = (validity.not_before, validity.not_after);
            return Err(bad(format!("it is valid from {from} to {to}, and not now")));
        }
        Ok(Self { directory, host })
    }

    /// Returns the directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the settings of a session in which these other hosts may take part.
    pub(crate) fn settings(&self, realm: &str, allowed: &[String]) -> Vec<(&'static str, Value)> {
        let file = |name: &str| Value::from(self.directory.join(name).to_string_lossy());
        let mut hosts: Vec<_> = allowed.iter().chain([&self.host]).collect();
        hosts.sort();
        hosts.dedup();
        let key = |rest: &str| format!("pw1/{realm}/{rest}");
        let own = |host: &&String| {
            json!({
                "id": format!("own-{host}"), "permission": "allow", "flows": ["ingress"],
                "messages": ["put", "delete", "reply", "declare_queryable", "liveliness_token"],
                "key_exprs": [key(&format!("*/{host}/**")), key(&format!("data/*/{host}/**"))],
            })
        };
        let mut rules: Vec<_> = hosts.iter().map(own).collect();
        rules.extend([
            json!({
                "id": "ask", "permission": "allow", "flows": ["ingress"], "messages": ["query"],
                "key_exprs": [key(&format!("*/{}/**", self.host))],
            }),
            json!({
                "id": "look", "permission": "allow", "flows": ["ingress"],
                "messages": ["declare_subscriber", "declare_liveliness_subscriber", "liveliness_query"],
                "key_exprs": [key("**")],
            }),
            json!({
                "id": "send", "permission": "allow", "flows": ["egress"], "key_exprs": [key("**")],
                "messages": [
                    "put", "delete", "declare_subscriber", "query", "reply", "declare_queryable", "liveliness_token",
                    "liveliness_query", "declare_liveliness_subscriber",
                ],
            }),
        ]);
        let subjects: Vec<_> = hosts.iter().map(|host| json!({ "id": host, "cert_common_names": [host] })).collect();
        let policy =
            |host: &&String| json!({ "rules": [format!("own-{host}"), "ask", "look", "send"], "subjects": [host] });
        let policies: Vec<_> = hosts.iter().map(policy).collect();
        vec![
            ("transport/link/tls/root_ca_certificate", file("ca.pem")),
            ("transport/link/tls/listen_certificate", file("cert.pem")),
            ("transport/link/tls/listen_private_key", file("key.pem")),
            ("transport/link/tls/connect_certificate", file("cert.pem")),
            ("transport/link/tls/connect_private_key", file("key.pem")),
            ("transport/link/tls/enable_mtls", true.into()),
            ("transport/link/tls/verify_name_on_connect", true.into()),
            ("transport/link/tls/close_link_on_expiration", true.into()),
            (
                "access_control",
                json!({
                    "enabled": true, "default_permission": "deny", "rules": rules, "subjects": subjects,
                    "policies": policies,
                }),
            ),
        ]
    }
}
