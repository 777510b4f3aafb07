//! Finds the socket of a domain, and the program that serves it.

use std::{
    ffi::OsString,
    fmt,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use partywall_os::{dir::Unsafe, environment};
use rustix::fs::Access;

use crate::error::{InvalidArgument, Result, Unreachable};

/// The domain that is used by default.
pub const DEFAULT_DOMAIN: &str = "default";

/// The variable that names the directory of a claim on GPUs.
pub(crate) const CLAIM_DIRECTORY: &str = "NVIDIA_DRA_LOCAL_IPC_DIR";

/// A domain's name and socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The domain's name.
    pub domain: String,
    /// Its socket.
    pub socket: PathBuf,
    /// What chose the socket's directory.
    pub(crate) chosen_by: ChosenBy,
}

/// What chose the directory of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChosenBy {
    /// The caller, or `PARTYWALL_SOCKET`: the socket is not derived from the domain.
    Caller,
    /// `NVIDIA_DRA_LOCAL_IPC_DIR`.
    Claim,
    /// `XDG_RUNTIME_DIR`.
    Session,
    /// Nothing else: it is among the temporary files.
    Default,
}

impl Location {
    /// Finds the socket of `domain`. Arguments take precedence over the environment, and a socket over a name:
    /// `PARTYWALL_SOCKET`, then `PARTYWALL_DOMAIN`. The socket of a name is in this user's directory in
    /// `$NVIDIA_DRA_LOCAL_IPC_DIR` if this process may write there, else in `$XDG_RUNTIME_DIR/partywall`, or otherwise
    /// in this user's directory under the temporary directory. A variable that is empty counts as unset, and so does a
    /// directory that is not an absolute path. No variable counts in a process that gained privileges when it was
    /// executed.
    ///
    /// # Errors
    /// - [`InvalidArgument::Name`] for a domain that cannot be a file name;
    /// - [`Unreachable::UnsafeDirectory`] if `$NVIDIA_DRA_LOCAL_IPC_DIR` belongs to another user than root.
    pub fn find(domain: Option<&str>, socket: Option<&Path>) -> Result<Self> {
        let socket = socket.map(Path::to_owned).or_else(|| match domain {
            None => environment::place("PARTYWALL_SOCKET").map(PathBuf::from),
            Some(_) => None,
        });
        let domain = domain
            .map(OsString::from)
            .or_else(|| environment::place("PARTYWALL_DOMAIN"))
            .map_or_else(|| DEFAULT_DOMAIN.to_owned(), |name| name.to_string_lossy().into_owned());
        check_domain(&domain)?;
        let (socket, chosen_by) = match socket {
            Some(socket) => (std::path::absolute(&socket).unwrap_or(socket), ChosenBy::Caller),
            None => {
                let (directory, chosen_by) = default_directory()?;
                (directory.join(format!("{domain}.sock")), chosen_by)
            }
        };
        Ok(Self { domain, socket, chosen_by })
    }

    /// Returns the directory of the socket.
    pub fn directory(&self) -> &Path {
        self.socket.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Returns where the broker's log may be, the best place first: in this user's folder for state, unless the home
    /// directory does not exist, and else beside the socket. The file is named after the socket's path, with `+` for
    /// `/`, and after the host: several hosts may share a home directory.
    pub fn logs(&self) -> Vec<PathBuf> {
        let state = state_directory(environment::directory("XDG_STATE_HOME"), environment::directory("HOME"));
        let directories = state.into_iter().chain([self.directory().to_owned()]);
        let name = log_name(&self.socket, rustix::system::uname().nodename().to_bytes());
        directories.map(|directory| directory.join(&name)).collect()
    }
}

impl fmt::Display for ChosenBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Caller => "as it was named",
            Self::Claim => "where NVIDIA_DRA_LOCAL_IPC_DIR says",
            Self::Session => "where XDG_RUNTIME_DIR says",
            Self::Default => "the default",
        })
    }
}

/// Returns the directory of sockets that nobody has named.
fn default_directory() -> Result<(PathBuf, ChosenBy)> {
    let user = rustix::process::geteuid().as_raw();
    let own = format!("partywall-{user}");
    Ok(match (claim_directory(user)?, environment::directory("XDG_RUNTIME_DIR")) {
        (Some(claim), _) => (claim.join(own), ChosenBy::Claim),
        (None, Some(session)) => (session.join("partywall"), ChosenBy::Session),
        (None, None) => (environment::temporary_directory().join(own), ChosenBy::Default),
    })
}

/// Returns the directory in which all containers that use one claim on GPUs meet. NVIDIA's driver for Kubernetes'
/// dynamic resource allocation mounts it into them ([pull request 1391]). `None` if there is none that this process may
/// write.
///
/// [pull request 1391]: https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/pull/1391
fn claim_directory(user: u32) -> Result<Option<PathBuf>> {
    let Some(path) = environment::directory(CLAIM_DIRECTORY) else { return Ok(None) };
    let Ok(stat) = rustix::fs::stat(&path) else { return Ok(None) };
    if ![0, user].contains(&stat.st_uid) {
        // That user could replace our directory in it, which no broker and no member of ours would use, and so keep
        // them apart.
        return Err(Unreachable::UnsafeDirectory { path, why: Unsafe::Owner(stat.st_uid).to_string() }.into());
    }
    Ok(rustix::fs::access(&path, Access::WRITE_OK | Access::EXEC_OK).is_ok().then_some(path))
}

/// Returns the directory of the logs in a user's folder for state. `None` if that is in a home directory which does not
/// exist: it is not for this library to create one.
fn state_directory(state: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    let missing_home = home.as_ref().filter(|home| !home.is_dir());
    let state = state.or_else(|| home.as_ref().map(|home| home.join(".local/state")))?;
    let is_usable = missing_home.is_none_or(|home| !state.starts_with(home));
    is_usable.then(|| state.join("partywall"))
}

/// Returns the file name of the log of a broker, which no other one has.
fn log_name(socket: &Path, host: &[u8]) -> OsString {
    let mut name = file_name_of(socket.as_os_str().as_bytes());
    name.push("@");
    name.push(file_name_of(host));
    name.push(".log");
    name
}

/// Returns a file name that no other path has.
fn file_name_of(path: &[u8]) -> OsString {
    let mut name = Vec::new();
    for byte in path {
        match byte {
            b'/' => name.push(b'+'),
            b'+' => name.extend_from_slice(b"%2B"),
            b'%' => name.extend_from_slice(b"%25"),
            byte => name.push(*byte),
        }
    }
    OsString::from_vec(name)
}

fn check_domain(domain: &str) -> Result<()> {
    let bad = |why: &str| Err(InvalidArgument::name(domain, why));
    if domain.is_empty() || domain.len() > 64 {
        return bad("a domain's name has 1 to 64 characters");
    }
    if domain.starts_with('.') || !domain.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
        return bad("a domain's name consists of letters, digits and `._-` and does not begin with a dot");
    }
    Ok(())
}

/// Finds the program to start as broker: `PARTYWALL_BIN`, else `preferred`, else `partywall` beside the running
/// executable, else on `PATH`. In a process that gained privileges when it was executed: `preferred`, else in the usual
/// directories of the system.
///
/// # Errors
/// [`Unreachable::NoProgram`] with every place that was tried.
pub(crate) fn broker_binary(preferred: Option<&Path>) -> Result<PathBuf> {
    let mut tried = Vec::new();
    let mut candidates = Vec::new();
    if let Some(binary) = environment::place("PARTYWALL_BIN") {
        // An explicit choice: if it is wrong, nothing else is started instead.
        candidates.push(PathBuf::from(binary));
    } else {
        candidates.extend(preferred.map(Path::to_owned));
        candidates.extend(environment::program_directories().iter().map(|directory| directory.join("partywall")));
    }
    for candidate in candidates {
        if environment::is_executable(&candidate) {
            // A bare name would be looked for on PATH instead.
            return Ok(std::path::absolute(&candidate).unwrap_or(candidate));
        }
        tried.push(candidate.display().to_string());
    }
    Err(Unreachable::NoProgram { tried }.into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn arguments_take_precedence_over_the_environment() {
        let named = Location::find(Some("a"), Some(Path::new("/run/x/y.sock"))).unwrap();
        assert_eq!(named.socket, Path::new("/run/x/y.sock"));
        assert_eq!(named.directory(), Path::new("/run/x"));
        let named = Location::find(Some("other"), None).unwrap();
        assert!(named.socket.ends_with("other.sock"), "{named:?}");
    }

    // Holds 131.
    #[test]
    fn brokers_at_different_sockets_have_different_logs() {
        let log = |socket: &str| log_name(Path::new(socket), b"here");
        let sockets = ["/run/a/x.sock", "/run/b/x.sock", "/run/a+x.sock", "/run/a%2Bx.sock", "/run/a_x.sock"];
        let logs: BTreeSet<_> = sockets.into_iter().map(log).collect();
        assert_eq!(logs.len(), sockets.len(), "{logs:?}");
        assert_eq!(log("/run/a/x.sock"), "+run+a+x.sock@here.log");
        // Machines of a cluster have one home directory, and sockets of the same path.
        assert_ne!(log_name(Path::new("/run/a"), b"one"), log_name(Path::new("/run/a"), b"two"));
        // The socket of a domain depends on the environment, so its name alone would not do.
        let derived = Location::find(Some("d"), None).unwrap();
        let given = Location::find(None, Some(&derived.socket)).unwrap();
        assert_eq!(derived.logs(), given.logs());
    }

    // Holds 131.
    #[test]
    fn log_is_beside_the_socket_if_there_is_no_home() {
        let home = tempfile::tempdir().unwrap();
        let exists = Some(home.path().to_owned());
        let missing = Some(home.path().join("missing"));
        let folder = home.path().join(".local/state/partywall");
        assert_eq!(state_directory(None, exists.clone()), Some(folder.clone()));
        assert_eq!(state_directory(None, missing.clone()), None);
        assert_eq!(state_directory(None, None), None);
        let state = |path: &Path| Some(path.join("state"));
        let of = |state: Option<PathBuf>| state.map(|state| state.join("partywall"));
        let elsewhere = state(home.path());
        assert_eq!(state_directory(elsewhere.clone(), missing.clone()), of(elsewhere));
        assert_eq!(state_directory(state(missing.as_ref().unwrap()), missing.clone()), None);
        let location = Location::find(None, Some(&home.path().join("x.sock"))).unwrap();
        assert_eq!(location.logs().last().unwrap().parent(), Some(home.path()));
    }

    #[test]
    fn domain_must_be_a_file_name() {
        for bad in ["", "a/b", "..", ".hidden", "a b", &"x".repeat(65)] {
            assert!(Location::find(Some(bad), None).is_err(), "{bad:?}");
        }
    }
}
