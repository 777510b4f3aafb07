//! What the name `.bridge/REALM` says about the bridge of a domain, by which its commands find it.

use std::path::{Path, PathBuf};

use crate::name::{check_host, is_instance};

/// The bridge of a domain, as the metadata of its name says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BridgeRecord {
    pub(crate) host: String,
    pub(crate) instance: String,
    /// Where it listens.
    pub(crate) endpoints: Vec<String>,
    pub(crate) insecure: bool,
    /// The directory of its certificate, if it has one.
    pub(crate) tls: Option<PathBuf>,
}

impl BridgeRecord {
    /// Returns the metadata.
    pub(crate) fn to_metadata(&self) -> [(&'static str, String); 5] {
        let Self { host, instance, endpoints, insecure, tls } = self;
        let tls = tls.as_deref().map(Path::to_string_lossy).unwrap_or_default();
        [
            (HOST, host.clone()),
            (INSTANCE, instance.clone()),
            (ENDPOINTS, endpoints.join(" ")),
            (INSECURE, insecure.to_string()),
            (TLS, tls.into_owned()),
        ]
    }

    /// Reads metadata, which any process of the domain may have written. None if it is not that of a bridge.
    pub(crate) fn read<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Option<Self> {
        let host = check_host(value(HOST)?).ok()?;
        let instance = value(INSTANCE).filter(|instance| is_instance(instance))?.to_owned();
        let endpoints: Vec<_> = value(ENDPOINTS)?.split(' ').map(str::to_owned).collect();
        let insecure = value(INSECURE)?.parse().ok()?;
        let tls = Some(value(TLS)?).filter(|directory| !directory.is_empty()).map(PathBuf::from);
        Some(Self { host, instance, endpoints, insecure, tls })
    }
}

const HOST: &str = "host";
const INSTANCE: &str = "instance";
const ENDPOINTS: &str = "endpoints";
const INSECURE: &str = "insecure";
const TLS: &str = "tls";
