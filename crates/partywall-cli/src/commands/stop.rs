//! `partywall stop`: afterwards no process, socket or file of the broker is left but its log.
//!
//! It ends a broker only after it has spoken with it. A broker that does not answer may be busy, stopped, or at a limit,
//! and holds kept names; the refusal names its pid, and whoever wants it gone sends the signal.
//!
//! With `--json`: `socket`, `stopped` (whether a broker ran), `pid` (or null), `how`: `asked`, `terminated` (SIGTERM),
//! `killed` (SIGKILL), or `nothing`; `stale_socket_removed`. If it refuses, `names`, `timelines`, `semaphores` and
//! `members` beside `error`, as `ls` and `status` have them. No broker at all is no failure: there is nothing to stop,
//! and a script may say so twice.

use std::{
    os::fd::OwnedFd,
    os::unix::fs::FileTypeExt,
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{
    Domain, Error, ErrorKind, Location,
    error::{Busy, Unreachable},
};
use partywall_os::{
    Errno,
    dir::PrivateDir,
    process,
    socket::{self, Ready},
};
use rustix::process::Signal;
use serde_json::json;

use crate::{Context, describe, failure::Failure, text::count};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Also while names and members exist: all names are dropped, memory that is mapped stays mapped. A broker of another
    /// release is ended by a signal
    #[arg(long)]
    force: bool,
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let options = context.options().start(false).operator(true);
    let location = options.location()?;
    let how = match options.connect() {
        Ok(domain) => ask(context, &location, &domain, arguments.force)?,
        Err(_) if nobody_listens(&location) => return nothing(context, &location),
        Err(Error::Unreachable(Unreachable::Version { .. })) if arguments.force => signal(context, &location)?,
        Err(
            error @ Error::Unreachable(
                Unreachable::NoAnswer { .. } | Unreachable::Gone { .. } | Unreachable::Protocol(_),
            ),
        ) => {
            return Err(unresponsive(&location, error));
        }
        Err(error) => return Err(error.into()),
    };
    let stale = remove_stale(&location)?;
    let Ended { pid, how } = how;
    let who = pid.map_or_else(String::new, |pid| format!(" with pid {pid}"));
    context.output().line(format!("the broker{who} at {} has ended", location.socket.display()));
    context.output().value(&json!({
        "socket": location.socket, "stopped": true, "pid": pid, "how": how, "stale_socket_removed": stale,
    }));
    Ok(())
}

/// How a broker has ended.
struct Ended {
    pid: Option<u32>,
    how: &'static str,
}

/// The refusal to end a broker that does not answer.
fn unresponsive(location: &Location, error: Error) -> Failure {
    // The kernel knows who listens, unless the queue of connections is full.
    let pid = partywall::broker_pid(location).ok().flatten();
    let (who, end) = match pid {
        Some(pid) => (format!(" (pid {pid})"), format!("`kill {pid}` ends it, or `kill -9 {pid}` if it is stopped")),
        None => (String::new(), "end it where it was started".to_owned()),
    };
    let message = format!("{error}{who}; it has not been ended, because it may hold kept names");
    let advice = format!("try again in a moment, `partywall logs` may say why; {end}: all its names are lost then");
    Failure::new(error.kind(), message, advice).with_details(json!({ "pid": pid }))
}

/// Asks it to end, and waits until it has.
fn ask(context: &Context, location: &Location, domain: &Domain, force: bool) -> Result<Ended, Failure> {
    let said = domain.status().ok().map(|status| status.pid);
    // In another PID namespace the broker has a number that means nothing here.
    let seen = partywall::broker_pid(location).ok().flatten();
    // Opened while it is certainly the broker's: it just answered.
    let pidfd = seen.and_then(|pid| process::pidfd(pid).ok());
    let pid = seen.or(said);
    match domain.stop_broker(force) {
        Ok(()) => {}
        Err(Error::Busy(Busy::BrokerInUse { .. })) => return Err(in_use(location, domain, pid)),
        // It has gone meanwhile, as we wanted.
        Err(Error::Unreachable(Unreachable::Gone { .. })) => {}
        Err(error) => return Err(error.into()),
    }
    if wait(pidfd.as_ref(), location, TIMEOUT) {
        return Ok(Ended { pid, how: "asked" });
    }
    let message = format!(
        "the broker{} at {} was asked to end and has not within {} s",
        pid.map_or_else(String::new, |pid| format!(" with pid {pid}")),
        location.socket.display(),
        TIMEOUT.as_secs()
    );
    match pidfd {
        Some(pidfd) if force => {
            context.output().remark(format!("{message}; it is killed (SIGKILL)"));
            let _ = process::kill(&pidfd, Signal::KILL);
            if wait(Some(&pidfd), location, TIMEOUT) {
                return Ok(Ended { pid, how: "killed" });
            }
            Err(Failure::new(ErrorKind::Refused, message, "the kernel does not end it: see `dmesg`"))
        }
        _ => Err(Failure::new(ErrorKind::Refused, message, "`partywall stop --force` kills it")),
    }
}

/// Waits until the process has ended; where it cannot be seen, until nobody listens.
fn wait(pidfd: Option<&OwnedFd>, location: &Location, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    if let Some(pidfd) = pidfd {
        return socket::wait(pidfd, Ready::Read, Some(deadline)).unwrap_or(false);
    }
    while Instant::now() < deadline {
        if nobody_listens(location) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// The refusal, with everything that is in the way.
fn in_use(location: &Location, domain: &Domain, pid: Option<u32>) -> Failure {
    let names = domain.names().unwrap_or_default();
    let members = domain.members().unwrap_or_default();
    let (timelines, semaphores) = describe::apart(domain.objects().unwrap_or_default());
    let mut message = format!(
        "the broker{} at {} still has {} and {}",
        pid.map_or_else(String::new, |pid| format!(" with pid {pid}")),
        location.socket.display(),
        count((names.len() + timelines.len() + semaphores.len()) as u64, "name"),
        count(members.len() as u64, "member"),
    );
    let details = json!({
        "names": names.iter().map(describe::name).collect::<Vec<_>>(),
        "timelines": timelines.iter().map(describe::timeline).collect::<Vec<_>>(),
        "semaphores": semaphores.iter().map(describe::semaphore).collect::<Vec<_>>(),
        "members": members.iter().map(describe::member).collect::<Vec<_>>(),
    });
    let mut list = |what: &str, lines: Vec<String>| {
        message.extend(lines.iter().take(LISTED).map(|line| format!("\n  {what:<9} {line}")));
        if lines.len() > LISTED {
            message.push_str(&format!("\n  … and {} more", lines.len() - LISTED));
        }
    };
    list("name", names.iter().map(describe::name_line).collect());
    list("timeline", timelines.iter().map(describe::timeline_line).collect());
    list("semaphore", semaphores.iter().map(|semaphore| semaphore.name.clone()).collect());
    list("member", members.iter().map(describe::member_line).collect());
    let advice =
        "`partywall rm NAME` removes a name; `partywall stop --force` drops all (memory that is mapped stays mapped)";
    Failure::new(ErrorKind::Refused, message, advice).with_details(details)
}

/// Ends a broker of another release, which has said so.
fn signal(context: &Context, location: &Location) -> Result<Ended, Failure> {
    // That whoever listens there runs as us, `broker_pid` has found out from the kernel.
    let Some(pid) = partywall::broker_pid(location)? else {
        let message = format!("the broker at {} runs in another PID namespace", location.socket.display());
        return Err(Failure::new(ErrorKind::Refused, message, "run `partywall stop --force` where it was started"));
    };
    let system = |errno: Errno| {
        Failure::from(Error::System { what: format!("ending the broker with pid {pid}"), source: errno.into() })
    };
    let pidfd = process::pidfd(pid).map_err(system)?;
    // If the pid had been given to another process meanwhile, nobody would listen any more, or somebody else.
    if partywall::broker_pid(location)? != Some(pid) {
        let message = format!("another broker listens at {} by now", location.socket.display());
        return Err(Failure::new(ErrorKind::Refused, message, "try again"));
    }
    process::kill(&pidfd, Signal::TERM).map_err(system)?;
    if wait(Some(&pidfd), location, TERM_TIMEOUT) {
        return Ok(Ended { pid: Some(pid), how: "terminated" });
    }
    context.output().remark(format!(
        "the broker with pid {pid} has not ended within {} s of SIGTERM; it is killed (SIGKILL)",
        TERM_TIMEOUT.as_secs()
    ));
    process::kill(&pidfd, Signal::KILL)
        .or_else(|errno| if errno == Errno::SRCH { Ok(()) } else { Err(system(errno)) })?;
    if wait(Some(&pidfd), location, TIMEOUT) {
        return Ok(Ended { pid: Some(pid), how: "killed" });
    }
    let message = format!("the broker with pid {pid} has not ended within {} s of SIGKILL", TIMEOUT.as_secs());
    Err(Failure::new(ErrorKind::Refused, message, "the kernel does not end it: see `dmesg`"))
}

/// Whether there is no socket, or nobody behind it. False if that cannot be found out.
pub(super) fn nobody_listens(location: &Location) -> bool {
    matches!(socket::connect(&location.socket), Err(Errno::NOENT | Errno::NOTDIR | Errno::CONNREFUSED))
}

fn nothing(context: &Context, location: &Location) -> Result<(), Failure> {
    let stale = remove_stale(location)?;
    let what = if stale { "; the socket of one that is gone has been removed" } else { "" };
    context.output().line(format!("no broker runs at {}{what}", location.socket.display()));
    context.output().value(&json!({
        "socket": location.socket, "stopped": false, "pid": null, "how": "nothing", "stale_socket_removed": stale,
    }));
    Ok(())
}

/// Removes a socket file behind which nobody listens. Nothing else is touched.
fn remove_stale(location: &Location) -> Result<bool, Failure> {
    let path = &location.socket;
    match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(false),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => {
            let message = format!("{} is no socket; it has not been touched", path.display());
            return Err(Failure::new(ErrorKind::Refused, message, "remove it yourself, or name another --socket"));
        }
    }
    let unsafe_directory =
        |why: String| Error::Unreachable(Unreachable::UnsafeDirectory { path: location.directory().to_owned(), why });
    let directory = PrivateDir::open(location.directory(), false).map_err(|why| unsafe_directory(why.to_string()))?;
    let system = |what: &str, errno: Errno| {
        Failure::from(Error::System { what: format!("{what} {}", path.display()), source: errno.into() })
    };
    // Whoever starts a broker holds this lock: a socket without a listener is then really one of the past.
    let lock = directory.lock(Instant::now() + TIMEOUT).map_err(|errno| system("locking the directory of", errno))?;
    if lock.is_none() {
        let message = format!("another process is starting a broker at {}", path.display());
        return Err(Failure::new(ErrorKind::Refused, message, "try again"));
    }
    match socket::connect(path) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path).map(|()| true).map_err(|errno| system("removing", errno)),
        _ => Ok(false),
    }
}

/// Names and members that a refusal lists.
const LISTED: usize = 20;

/// How long a broker may take to end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long after SIGTERM.
const TERM_TIMEOUT: Duration = Duration::from_secs(5);
