//! Probes of the features that every machine needs.

use std::{
    fs::OpenOptions,
    io::ErrorKind,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use partywall_cuda::kernels::expected;
use partywall_os::{
    Errno,
    dir::{DirAccess, PrivateDir, Unsafe},
    map::SealedMap,
    memfd,
    process::{self, PidfdInfo},
    socket::{self, Ready},
};
use rustix::process::Resource;

use super::{
    Doctor, Probe,
    exchange::{self, Parcel},
    finding::{Finding, Outcome},
};
use crate::{
    domain::{CLAIM_DIRECTORY, ChosenBy, DomainOptions, Location, check_foreign, own_user},
    error::{Error, Unreachable, bytes},
};

/// The oldest kernel that is supported.
const KERNEL: (u32, u32) = (5, 10);

/// A limit on open files below this is reached by a handful of models and members.
const FEW_FILES: u64 = 4096;

/// The longest path of a Unix socket.
const SOCKET_PATH: usize = 107;

/// Probes the kernel's version.
pub(super) fn kernel() -> Finding {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let machine = uname.machine().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let detail = format!("Linux {release} on {machine}");
    if version < KERNEL {
        let (major, minor) = KERNEL;
        return Finding::failed(detail)
            .means(format!("Partywall needs Linux {major}.{minor} or newer, for pidfds and closing ranges of files"))
            .fix("run a newer kernel");
    }
    if machine != "x86_64" {
        return Finding::warning(detail)
            .means("Partywall is tested on x86-64 only")
            .fix("try `partywall demo`, and report how it went");
    }
    Finding::ok(detail)
}

/// Probes whether the end of a process can be proved.
pub(super) fn processes() -> Finding {
    let fix = "mount /proc; if this is a sandbox (gVisor, an old seccomp profile), allow pidfd_open";
    let means = "without pidfds the broker cannot prove that a process died, and takes nothing back from it";
    let failed = |what: &str, error: String| Finding::failed(format!("{what}: {error}")).means(means).fix(fix);
    let own = match process::own_pidfd() {
        Ok(own) => own,
        Err(errno) => return failed("pidfd_open", errno.to_string()),
    };
    if process::pidfd_info(&own) != Some(PidfdInfo::Process(std::process::id())) {
        return failed(
            "/proc/self/fdinfo",
            "it does not say whose a pidfd is; /proc is not mounted, or another's".into(),
        );
    }
    let child =
        process::spawn(Command::new("/proc/self/exe").arg("--version").stdin(Stdio::null()).stdout(Stdio::null()));
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return failed("starting a process", error.to_string()),
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    let seen = process::pidfd(child.id()).and_then(|pidfd| socket::wait(pidfd, Ready::Read, Some(deadline)));
    let _ = child.wait();
    match seen {
        Ok(true) => {}
        Ok(false) => return failed("a pidfd", "it did not report the end of its process".into()),
        Err(errno) => return failed("a pidfd", errno.to_string()),
    }
    let peer = socket::pair().ok().and_then(|(a, _b)| process::peer_pidfd(a));
    let peer = if peer.is_some() { "; the kernel gives the pidfd of a socket's peer" } else { "" };
    Finding::ok(format!("a pidfd reports the end of its process; /proc is mounted{peer}"))
}

/// Probes the limits of this process.
pub(super) fn limits() -> Finding {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let text = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string());
    let locked = rustix::process::getrlimit(Resource::Memlock).current.map_or_else(|| "unlimited".to_owned(), bytes);
    let current = text(limit.current);
    let maximum = text(limit.maximum);
    let detail = format!("open files: {current} (hard limit {maximum}); locked memory: {locked}");
    if limit.maximum.is_some_and(|maximum| maximum < FEW_FILES) {
        return Finding::warning(detail)
            .means("the broker holds one open file for each 16 GiB of each version, and three for each member")
            .fix(format!("raise the hard limit to {FEW_FILES} or more (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"));
    }
    Finding::ok(detail)
}

/// Probes whether another process can use memory of this process.
pub(super) fn memory(doctor: &Doctor) -> Finding {
    const BYTES: u64 = 1 << 20;
    let share = || -> Result<String, String> {
        let failed = |what: &'static str| move |errno: Errno| format!("{what}: {errno}");
        let mut draft = memfd::Draft::create("partywall:doctor", BYTES).map_err(failed("making a memfd"))?;
        let words = draft.bytes_mut().map_err(failed("mapping it"))?.as_chunks_mut::<4>().0;
        for (index, word) in words.iter_mut().enumerate() {
            *word = expected(index as u64).to_ne_bytes();
        }
        let memory = draft.freeze().map_err(failed("sealing it"))?;
        let parcel = Parcel { bytes: BYTES, ..Parcel::default() };
        exchange::hand_over(doctor, Probe::TakeHostMemory, &parcel, Some(memory.as_fd()))
    };
    match share() {
        Ok(seen) => Finding::ok(format!("a sealed memfd of 1 MiB, passed to another process: {seen}")),
        Err(error) => Finding::failed(error)
            .means("host memory cannot be shared here")
            .fix("a sandbox may forbid memfd_create or passing files over sockets (look at vm.memfd_noexec, too)"),
    }
}

/// Plays the other process of [`memory`].
pub(super) fn take(parcel: &Parcel, memory: Option<OwnedFd>) -> Result<String, String> {
    let memory = memory.ok_or("no file descriptor came along")?;
    let map = SealedMap::new(&memory).map_err(|errno| format!("mapping what came: {errno}"))?;
    if map.bytes().len() as u64 != parcel.bytes {
        return Err(format!("{} bytes came instead of {}", map.bytes().len(), parcel.bytes));
    }
    exchange::check(map.bytes())?;
    // The descriptor is read-only; opening it again must not allow writing either.
    let again = OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", memory.as_raw_fd()));
    match again.and_then(|file| file.write_at(&[0], 0)) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Ok("every word right, and writing is refused".into())
        }
        Err(error) => Ok(format!("every word right, and writing fails ({error})")),
        Ok(_) => Err("the seal against writing does not hold".into()),
    }
}

/// Probes the directory of the broker's socket.
pub(super) fn socket_directory(options: &DomainOptions) -> Finding {
    let location = match options.location() {
        Ok(location) => location,
        Err(error) => return Finding::failed(error.to_string()).fix(error.advice()),
    };
    let path = location.directory();
    let shown = format!("{} ({})", path.display(), location.chosen_by);
    let finding = socket_directory_at(&location, path, &shown);
    match partywall_os::environment::directory(CLAIM_DIRECTORY) {
        Some(claim)
            if finding.outcome == Outcome::Ok
                && matches!(location.chosen_by, ChosenBy::Session | ChosenBy::Default) =>
        {
            Finding::warning(finding.detail)
                .means(format!(
                    "{CLAIM_DIRECTORY} is set, but this process may not write in {}, where the containers of the claim \
                     meet",
                    claim.display()
                ))
                .fix("let this user write there, or set PARTYWALL_SOCKET in all of them")
        }
        _ => finding,
    }
}

fn socket_directory_at(location: &Location, path: &Path, shown: &str) -> Finding {
    let other = "or set PARTYWALL_SOCKET to a socket in another directory";
    if location.socket.as_os_str().len() > SOCKET_PATH {
        return Finding::failed(format!("{} is longer than {SOCKET_PATH} bytes", location.socket.display()))
            .means("the kernel has no room for the path of such a socket")
            .fix("set PARTYWALL_SOCKET to a shorter path");
    }
    match PrivateDir::open(path, false) {
        Ok(_) => Finding::ok(format!("{shown} is ours alone (0700)")),
        Err(_) if PrivateDir::open_for(path, false, DirAccess::Passable).is_ok() => {
            Finding::ok(format!("{shown} is ours, and others pass through it (0711), for a broker with --allow-uid"))
        }
        Err(Unsafe::Errno(Errno::NOENT)) => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            match rustix::fs::access(parent, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK) {
                Ok(()) => Finding::ok(format!("{shown} will be made when it is needed")),
                Err(errno) => Finding::failed(format!("{shown} cannot be made in {}: {errno}", parent.display()))
                    .means("no broker can listen there")
                    .fix(format!("make {} writable, {other}", parent.display())),
            }
        }
        Err(why) => match served_by_another(location) {
            Some(owner) => {
                Finding::ok(format!("{shown} belongs to user {owner}, whose broker may serve us (--allow-uid)"))
            }
            None => Finding::failed(format!("{shown}: {why}"))
                .means("another user could reach or replace the broker's socket, so no broker is started there")
                .fix(format!("chmod 700 {} if it is yours, {other}", path.display())),
        },
    }
}

/// Returns the other user to which the socket's directory belongs, if this process would use a broker of that user.
fn served_by_another(location: &Location) -> Option<u32> {
    let owner = rustix::fs::stat(location.directory()).ok()?.st_uid;
    (owner != own_user() && check_foreign(location, owner).is_ok()).then_some(owner)
}

/// Probes the broker that the user's commands would use. Starts none.
pub(super) fn broker(options: &DomainOptions) -> Finding {
    let status = options.clone().start(false).operator(true).connect().and_then(|domain| {
        let socket = domain.socket().display().to_string();
        let lost = domain.names()?.iter().filter(|name| name.lost).count();
        domain.status().map(|status| (status, domain.uid(), lost, socket))
    });
    match status {
        Ok((status, own, lost, socket)) => {
            let user = if status.uid == own { String::new() } else { format!(" as user {}", status.uid) };
            let what = format!(
                "process {} runs release {}{user} at {socket}: {} names, {} members",
                status.pid, status.version, status.names, status.members
            );
            match status.supervisor {
                Some(_) if lost > 0 => Finding::warning(format!("{what}; {lost} names have lost their memory"))
                    .means("the GPU was reset or has failed, and processes still have them open")
                    .fix("restart these processes, which `partywall show NAME` lists, and commit the names again"),
                Some(_) => Finding::ok(what),
                None => Finding::warning(format!("{what}; it has no supervisor, or its supervisor is dead"))
                    .means("all names are lost if this process dies")
                    .fix("end it with `partywall stop` when its names are not needed any more, and start it again"),
            }
        }
        Err(Error::Unreachable(Unreachable::NoAnswer { socket, .. })) => {
            Finding::ok(format!("none runs at {}; the first command that needs one starts it", socket.display()))
        }
        Err(error) => {
            let advice = error.advice();
            Finding::failed(error.to_string()).means("commands of this domain do not work").fix(advice)
        }
    }
}
