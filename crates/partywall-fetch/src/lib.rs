//! The program `partywall-fetch`: `partywall`, with `put` of what web servers and object stores have. `partywall` starts
//! it for that, so that neither TLS nor a client of a cloud is in the broker or in a program that only shares memory.
//!
//! | module | holds |
//! |---|---|
//! | `storage` | files on a server as [`partywall::files`] reads them: ranges, retries, comparisons |
//! | `transport` | one client for HTTP: TLS, timeouts, refusals, errors that pass |
//! | `web` | `https://`, and `hf://`, whose files are on the web |
//! | `bucket` | `s3://`, `gs://`, `az://` |
//!
//! Each thread that copies has a connection of its own, and reads the bytes of an answer into the memory that becomes
//! the segment. A range that is cut off continues at the byte that was reached. Each answer's ETag and length are
//! compared with those of the first, so what is committed is one version of the file if its ETags or dates tell versions
//! apart.
#![forbid(unsafe_code)]

mod bucket;
mod storage;
mod transport;
mod web;

use std::{borrow::Cow, env, process::ExitCode};

use partywall::ErrorKind;
use partywall_cli::{
    Failure,
    fetch::{Fetch, Opened, Request},
};

use crate::{
    storage::Remote,
    transport::{Rules, Workers},
};

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    partywall_cli::fetch::set(&FETCH);
    partywall_cli::main(None)
}

static FETCH: Fetch = Fetch { open };

/// Opens the storage that a URL names. Returns it with the path of the URL's file or folder there. Sends nothing.
///
/// # Errors
/// If the URL cannot be understood, is of a scheme that is not known, or lacks what its scheme needs.
fn open(request: &Request) -> Result<Opened, Failure> {
    let url = &*resolve(&request.url)?;
    let rules = Rules::of(request);
    let (site, path) = match scheme(url).as_deref() {
        Some("https" | "http") => web::parse(url, &rules)?,
        Some("hf") => web::parse_hub(url)?,
        Some("s3" | "gs" | "az") => bucket::parse(url)?,
        _ => {
            // The rest may contain a password.
            let scheme = url.split("://").next().unwrap_or_default();
            return Err(usage(
                format!("no scheme is called {scheme:?}"),
                "use https://, s3://, gs://, az:// or hf://, or name a file",
            ));
        }
    };
    let remote = Remote::new(site, Workers::new(rules)?, request);
    let remote = remote.map_err(|problem| usage(format!("{} {problem}", path.display()), problem.advice()))?;
    Ok((Box::new(remote), path))
}

/// Returns a URL, or the one in the variable that `env://VARIABLE` names, so that no secret is in the command line.
fn resolve(url: &str) -> Result<Cow<'_, str>, Failure> {
    if scheme(url).is_none_or(|scheme| scheme != "env") {
        return Ok(url.into());
    }
    let variable = &url["env://".len()..];
    let advice = "write env://VARIABLE, and set the variable to a URL in the environment of this command";
    let value = env::var_os(variable).filter(|value| !value.is_empty());
    let value = value.ok_or_else(|| usage(format!("the variable {variable:?} is not set, or is empty"), advice))?;
    // What is no URL may be a secret, and is not repeated.
    let value = value.into_string().ok().filter(|value| scheme(value).is_some_and(|scheme| scheme != "env"));
    Ok(value.ok_or_else(|| usage(format!("the variable {variable:?} contains no URL"), advice))?.into())
}

/// Returns the scheme of a URL.
fn scheme(url: &str) -> Option<String> {
    url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase())
}

/// Returns a failure because of the URL or what belongs to it.
fn usage(message: impl Into<String>, advice: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Usage, message, advice)
}
