//! The protocol between systemd, or another service manager, and a service (sd_listen_fds(3), sd_notify(3)).

use std::{
    env, io,
    os::{
        fd::{OwnedFd, RawFd},
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

use partywall::ErrorKind;
use partywall_os::{environment, process};

use crate::{failure::Failure, output::Output};

/// Returns the listening socket that the service manager has passed, or `None` if it has passed none to this process.
pub(super) fn listener(output: Output) -> Result<Option<OwnedFd>, Failure> {
    let (Some(pid), Some(count)) = (env::var_os("LISTEN_PID"), env::var_os("LISTEN_FDS")) else { return Ok(None) };
    let refused = |message: String| {
        let advice = "a socket unit needs exactly one ListenStream=; otherwise unset LISTEN_PID and LISTEN_FDS";
        Failure::new(ErrorKind::Refused, message, advice)
    };
    let Some(pid) = pid.to_str().and_then(|pid| pid.parse::<u32>().ok()) else {
        return Err(refused(format!("LISTEN_PID is {pid:?}, not a pid")));
    };
    if pid != std::process::id() {
        // Descendants of an activated process inherit the variables, but not the sockets.
        output.remark(format!("LISTEN_PID names process {pid}, not this one: no socket is taken from it"));
        return Ok(None);
    }
    match count.to_str().and_then(|count| count.parse::<u32>().ok()) {
        Some(1) => {}
        Some(0) => return Ok(None),
        Some(count) => return Err(refused(format!("the service manager has passed {count} sockets, not one"))),
        None => return Err(refused(format!("LISTEN_FDS is {count:?}, not a number"))),
    }
    let listener = process::inherited(FIRST)
        .map_err(|errno| refused(format!("the service manager has passed no socket as descriptor {FIRST}: {errno}")))?;
    Ok(Some(listener))
}

/// Tells the service manager the state of this process, if there is one that wants to know.
pub(super) fn notify(output: Output, state: &str) {
    let Some(path) = environment::place("NOTIFY_SOCKET") else { return };
    let send = || -> io::Result<()> {
        let address = match path.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&path)?,
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not stop the broker.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state.as_bytes(), &address).map(drop)
    };
    if let Err(error) = send() {
        output.remark(format!("the service manager was not notified: {}: {error}", path.to_string_lossy()));
    }
}

/// The first descriptor that a service manager passes (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;
