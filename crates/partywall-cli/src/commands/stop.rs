//! `partywall stop`: ends the broker; only its log remains.
//!
//! The command ends a broker only if the broker answers. A broker that does not answer may be busy, stopped, or at a
//! limit, and may hold kept names; the refusal names its pid, so that the user can send a signal.
//!
//! With `--json`: `socket`, `stopped` (whether a broker ran), `pid` (or null), `how`: `asked`, `terminated` (SIGTERM),
//! `killed` (SIGKILL), or `nothing`; `stale_socket_removed`. If it refuses, `names`, `timelines`, `semaphores` and
//! `members` beside `error`, as `ls` and `status` have them. A missing broker is not a failure, so a script may stop
//! twice.

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
    dir::{DirAccess, PrivateDir},
    process,
    socket::{self, Ready},
};
use rustix::process::Signal;
use serde_json::json;

use crate::{Context, describe, failure::Failure, text::count};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Stop even while names and members exist: all names are dropped, and mapped memory stays mapped. Ends a broker of
    /// another release by a signal
    #[arg(long)]
    force: bool,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let options = context.options().start(false).operator(true);
    let location = options.location()?;
    let Ended { pid, how } = match options.connect() {
        Ok(domain) => ask(context, &location, &domain, arguments.force)?,
        Err(_) if socket::nobody_listens(&location.socket) => Ended { pid: None, how: "nothing" },
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
    // A broker that ends by itself has removed its socket, unless it is a socket of systemd: looking for a listener
    // there would start the next broker.
    let stale = how != "asked" && remove_stale(&location)?;
    let stopped = how != "nothing";
    let text = match (stopped, stale) {
        (true, _) => format!("{} has ended", broker(pid, &location)),
        (false, false) => format!("no broker runs at {}", location.socket.display()),
        (false, true) => format!("no broker runs at {}; a stale socket was removed", location.socket.display()),
    };
    context.output().line(text);
    context.output().value(&json!({
        "socket": location.socket, "stopped": stopped, "pid": pid, "how": how, "stale_socket_removed": stale,
    }));
    Ok(())
}

/// How a broker ended, or `nothing` if there was none.
struct Ended {
    pid: Option<u32>,
    how: &'static str,
}

/// Returns the refusal to end a broker that does not answer.
fn unresponsive(location: &Location, error: Error) -> Failure {
    // The kernel knows the pid of the listener, unless the queue of connections is full.
    let pid = partywall::broker_pid(location).ok().flatten();
    let (who, end) = match pid {
        // The service manager listens for a broker that has not started: a signal would end the user's session.
        Some(pid) if std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"systemd\n") => {
            (String::new(), "systemd listens for it: `systemctl stop` ends its service and its socket unit".to_owned())
        }
        // The listener is the supervisor. Without it nothing replaces a worker that is stopped.
        Some(pid) => {
            let end = format!("its supervisor replaces it after 30 s; `kill {pid}` ends it");
            (format!(" (pid {pid})"), end)
        }
        None => (String::new(), "end it where it was started".to_owned()),
    };
    let message = format!("{error}{who}; it was not stopped, because it may hold kept names");
    let advice =
        format!("try again in a moment; see `partywall logs` for the reason; {end}, which loses all its names");
    Failure::new(error.kind(), message, advice).with_details(json!({ "pid": pid }))
}

/// Asks the broker to end, and waits for its end.
fn ask(context: &Context, location: &Location, domain: &Domain, force: bool) -> Result<Ended, Failure> {
    let status = domain.status().ok();
    // For people. The pid of a broker in another PID namespace means nothing here, nor does that of a dead supervisor.
    let seen = partywall::broker_pid(location).ok().flatten();
    let has_supervisor = status.as_ref().is_none_or(|status| status.supervisor.is_some());
    let pid = seen.filter(|_| has_supervisor).or(status.map(|status| status.pid));
    // The broker sent them, so they cannot mean another process, as a pid could. The last one ends last: the
    // supervisor, or the broker itself if it has none.
    let processes = domain.broker_processes();
    match domain.stop_broker(force) {
        Ok(()) => {}
        Err(Error::Busy(Busy::BrokerInUse { .. })) => return Err(in_use(location, domain, pid)),
        // The broker has ended meanwhile.
        Err(Error::Unreachable(Unreachable::Gone { .. })) => {}
        Err(error) => return Err(error.into()),
    }
    if wait(processes.last(), location, TIMEOUT) {
        return Ok(Ended { pid, how: "asked" });
    }
    let message = format!("{} has not ended within {} s of the request", broker(pid, location), TIMEOUT.as_secs());
    match processes {
        [_, ..] if force => kill(context, location, processes, pid, &message),
        _ => Err(Failure::new(ErrorKind::Refused, message, "`partywall stop --force` kills it")),
    }
}

/// Kills a broker that has not ended, for the reason that `message` gives: of its processes the supervisor first, which
/// is the last of them and would restart the worker.
fn kill(
    context: &Context,
    location: &Location,
    processes: &[OwnedFd],
    pid: Option<u32>,
    message: &str,
) -> Result<Ended, Failure> {
    context.output().remark(format!("{message}; it is killed (SIGKILL)"));
    for process in processes.iter().rev() {
        // A process that has ended meanwhile cannot be killed any more; the wait shows it.
        let _ = process::kill(process, Signal::KILL);
    }
    if wait(processes.last(), location, TIMEOUT) && wait(None, location, TIMEOUT) {
        return Ok(Ended { pid, how: "killed" });
    }
    Err(Failure::new(ErrorKind::Refused, message, "the kernel does not end it: see `dmesg`"))
}

/// Waits until the process has ended or, if it is not visible here, until its socket has no listener.
fn wait(pidfd: Option<&OwnedFd>, location: &Location, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    if let Some(pidfd) = pidfd {
        return socket::wait(pidfd, Ready::Read, Some(deadline)).unwrap_or(false);
    }
    while Instant::now() < deadline {
        if socket::nobody_listens(&location.socket) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Returns the refusal, with all names and members that prevent the stop.
fn in_use(location: &Location, domain: &Domain, pid: Option<u32>) -> Failure {
    let names = domain.names().unwrap_or_default();
    let members = domain.members().unwrap_or_default();
    let objects = domain.objects().unwrap_or_default();
    let (timelines, semaphores) = describe::apart(&objects);
    let all_names = count((names.len() + objects.len()) as u64, "name");
    let all_members = count(members.len() as u64, "member");
    let mut message = format!("{} still has {all_names} and {all_members}", broker(pid, location));
    let details = json!({
        "names": names.iter().map(describe::name).collect::<Vec<_>>(),
        "timelines": timelines,
        "semaphores": semaphores,
        "members": members,
    });
    let mut list = |what: &str, lines: Vec<String>| {
        message.extend(lines.iter().take(LISTED).map(|line| format!("\n  {what:<9} {line}")));
        if lines.len() > LISTED {
            message.push_str(&format!("\n  … and {} more", lines.len() - LISTED));
        }
    };
    list("name", names.iter().map(describe::name_line).collect());
    list("timeline", timelines.iter().copied().map(describe::timeline_line).collect());
    list("semaphore", semaphores.iter().map(|semaphore| semaphore.name.clone()).collect());
    list("member", members.iter().map(describe::member_line).collect());
    let advice =
        "`partywall rm NAME` removes a name; `partywall stop --force` drops all (memory that is mapped stays mapped)";
    Failure::new(ErrorKind::Refused, message, advice).with_details(details)
}

/// Ends a broker of another release by a signal.
fn signal(context: &Context, location: &Location) -> Result<Ended, Failure> {
    // `broker_pid` has checked with the kernel that the listener runs as this user.
    let Some(pid) = partywall::broker_pid(location)? else {
        let message = format!("the broker at {} runs in another PID namespace", location.socket.display());
        return Err(Failure::new(ErrorKind::Refused, message, "run `partywall stop --force` where it was started"));
    };
    let unknown = || {
        let message = format!("it cannot be told which process serves {}", location.socket.display());
        let advice = format!("check that {pid} is the broker, and end it with `kill {pid}`");
        Failure::new(ErrorKind::Refused, message, advice)
    };
    // Not by the pid: if the supervisor has died and its worker goes on, the pid may belong to another process by now.
    let pidfd = partywall::broker_pidfd(location)?.ok_or_else(unknown)?;
    match process::kill(&pidfd, Signal::TERM) {
        Ok(()) => {}
        Err(Errno::SRCH) => return Err(unknown()),
        Err(errno) => {
            let what = format!("ending the broker with pid {pid}");
            return Err(Error::System { what, source: errno.into() }.into());
        }
    }
    if wait(Some(&pidfd), location, TERM_TIMEOUT) {
        return Ok(Ended { pid: Some(pid), how: "terminated" });
    }
    let message = format!("the broker with pid {pid} has not ended within {} s of SIGTERM", TERM_TIMEOUT.as_secs());
    kill(context, location, &[pidfd], Some(pid), &message)
}

/// Returns a broker: `the broker with pid 5 at /run/user/1000/partywall/default.sock`.
fn broker(pid: Option<u32>, location: &Location) -> String {
    let who = pid.map_or_else(String::new, |pid| format!(" with pid {pid}"));
    format!("the broker{who} at {}", location.socket.display())
}

/// Removes a socket file without a listener, and nothing else.
fn remove_stale(location: &Location) -> Result<bool, Failure> {
    let path = &location.socket;
    match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(false),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => {
            let message = format!("{} is not a socket; it was not changed", path.display());
            return Err(Failure::new(ErrorKind::Refused, message, "remove it yourself, or name another --socket"));
        }
    }
    let unsafe_directory =
        |why: String| Error::Unreachable(Unreachable::UnsafeDirectory { path: location.directory().to_owned(), why });
    // A broker that admitted other users has let them pass through its directory.
    let directory = PrivateDir::open(location.directory(), false)
        .or_else(|why| PrivateDir::open_for(location.directory(), false, DirAccess::Passable).map_err(|_| why))
        .map_err(|why| unsafe_directory(why.to_string()))?;
    let system = |what: &str, errno: Errno| {
        Failure::from(Error::System { what: format!("{what} {}", path.display()), source: errno.into() })
    };
    // The starter of a broker holds this lock, so under the lock a socket without a listener is stale.
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

/// How many names and members a refusal lists.
const LISTED: usize = 20;

/// How long a broker may take to end after the request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long a broker may take to end after SIGTERM.
const TERM_TIMEOUT: Duration = Duration::from_secs(5);
