//! Unix stream sockets that carry file descriptors.

use std::{
    collections::VecDeque,
    ffi::OsStr,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{self, Errno},
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
    },
};

/// The most file descriptors in one message (`SCM_MAX_FD` of the kernel; unix(7)).
pub const MAX_FDS: usize = 253;

/// The most connections that wait to be accepted.
pub const BACKLOG: i32 = 1024;

/// The users that the kernel lets connect to a socket, by the mode of its file. Root always may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connecting {
    /// Only this user: mode 0600.
    User,
    /// This user and a group: mode 0660.
    Group(u32),
    /// Every user: mode 0666. The listener has to refuse those that it does not serve.
    Everybody,
}

/// Listens at `path`, which must not exist. The socket file gets mode 0600.
///
/// # Errors
/// `EADDRINUSE` if the path exists, `ENAMETOOLONG` beyond 107 bytes; else as bind(2).
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    listen_for(path, Connecting::User)
}

/// Listens at `path` as [`listen`] does, for the users that may connect. Only this user may create files in the
/// directory: otherwise the mode of another file could be changed.
///
/// # Errors
/// As [`listen`]; `EPERM` for a group that this process may not give files to.
pub fn listen_for(path: &Path, connecting: Connecting) -> io::Result<OwnedFd> {
    let socket = stream(SocketFlags::NONBLOCK)?;
    // The file takes the mode of the socket's inode at bind time, so users that may not connect never can, not even
    // briefly.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from(0o600))?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let (group, mode) = match connecting {
        Connecting::User => (None, 0o600),
        Connecting::Group(group) => (Some(group), 0o660),
        Connecting::Everybody => (None, 0o666),
    };
    let admit = || {
        if let Some(group) = group {
            rustix::fs::chown(path, None, Some(rustix::fs::Gid::from_raw(group)))?;
        }
        // The umask may have taken bits away, even those of this user.
        rustix::fs::chmod(path, rustix::fs::Mode::from(mode))
    };
    if let Err(errno) = admit().and_then(|()| net::listen(&socket, BACKLOG)) {
        let _ = rustix::fs::unlink(path);
        return Err(errno);
    }
    Ok(socket)
}

/// Returns whether it is certain that no process listens at `path`. A file that is missing or refuses is no proof
/// alone.
pub fn nobody_listens(path: &Path) -> bool {
    let refuses = || {
        let connected = connect_within(path, Duration::from_millis(20));
        matches!(connected, Err(Errno::NOENT | Errno::NOTDIR | Errno::CONNREFUSED))
    };
    // The process may have bound its socket again while it was looked for. A file that refuses may be another one in
    // its place.
    refuses() && listener_of(path).is_none() && refuses()
}

/// Returns the process of this user that listens at `path`, whether or not the socket's file exists. `None` if there is
/// none, or if the kernel does not say: without /proc, and across network namespaces.
///
/// A cleaner of temporary files may remove the file of a living process. The kernel still knows the address.
pub fn listener_of(path: &Path) -> Option<u32> {
    let sockets = std::fs::read("/proc/net/unix").ok()?;
    let names: Vec<_> = sockets.split(|byte| *byte == b'\n').filter_map(|line| listening_at(line, path)).collect();
    if names.is_empty() {
        return None;
    }
    let ours = rustix::process::geteuid().as_raw();
    let directory = path.parent().unwrap_or(Path::new("/"));
    let pids = std::fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let listens = |pid: &u32| {
        let process = Path::new("/proc").join(pid.to_string());
        // A service manager that listens for a broker is none.
        let is_manager = std::fs::read(process.join("comm")).is_ok_and(|name| name == b"systemd\n");
        if is_manager || !rustix::fs::stat(&process).is_ok_and(|stat| stat.st_uid == ours) {
            return false;
        }
        let Ok(files) = std::fs::read_dir(process.join("fd")) else { return false };
        let is_it = |file: &Path| std::fs::read_link(file).is_ok_and(|link| names.contains(&link));
        files.flatten().any(|file| is_it(&file.path())) && sees_same(&process, directory)
    };
    // The one that has bound the socket has started the others that have it.
    pids.filter(listens).min()
}

/// Returns the name under /proc/PID/fd of a socket that listens at `path`, from a line of /proc/net/unix (proc(5)).
fn listening_at(line: &[u8], path: &Path) -> Option<PathBuf> {
    const ACCEPTS: u32 = 1 << 16;
    let mut rest = line;
    let mut field = || {
        rest = rest.trim_ascii_start();
        let end = rest.iter().position(|byte| *byte == b' ')?;
        let (field, after) = rest.split_at(end);
        rest = after;
        std::str::from_utf8(field).ok()
    };
    // Number, references, protocol, flags, type, state, inode, path.
    let [_, _, _, flags, _, _, inode] = [field()?, field()?, field()?, field()?, field()?, field()?, field()?];
    let accepts = u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & ACCEPTS != 0);
    let is_it =
        accepts && rest.strip_prefix(b" ").is_some_and(|bound| is_same(Path::new(OsStr::from_bytes(bound)), path));
    is_it.then(|| PathBuf::from(format!("socket:[{inode}]")))
}

/// Returns whether two paths name the same file, which need not exist. Its directory may have several paths.
fn is_same(bound: &Path, path: &Path) -> bool {
    let identity = |path: &Path| rustix::fs::stat(path.parent()?).ok().map(|stat| (stat.st_dev, stat.st_ino));
    let is_same_directory = || identity(path).is_some_and(|directory| identity(bound) == Some(directory));
    bound == path || bound.file_name() == path.file_name() && is_same_directory()
}

/// Returns whether a process finds the same directory under this path: in another mount namespace it may be another
/// one, or not exist.
fn sees_same(process: &Path, directory: &Path) -> bool {
    let identity = |path: &Path| rustix::fs::stat(path).map(|stat| (stat.st_dev, stat.st_ino));
    let theirs = process.join("root").join(directory.strip_prefix("/").unwrap_or(directory));
    match (identity(directory), identity(&theirs)) {
        (Ok(ours), Ok(theirs)) => ours == theirs,
        _ => identity(&process.join("ns/mnt")) == identity(Path::new("/proc/self/ns/mnt")),
    }
}

/// Connects to `path`.
///
/// # Errors
/// `ENOENT` without a socket file, `ECONNREFUSED` if no process listens on it; otherwise as connect(2).
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    connect_socket(stream(SocketFlags::empty())?, path)
}

/// Connects as [`connect`] does. Connecting, and each later read or write, ends with `EAGAIN` after `timeout`.
/// Connecting takes that long if too many connections wait to be accepted.
///
/// # Errors
/// As [`connect`].
pub fn connect_within(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = stream(SocketFlags::empty())?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(timeout))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    connect_socket(socket, path)
}

fn connect_socket(socket: OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    io::retry_on_intr(|| net::connect(&socket, &address))?;
    Ok(socket)
}

/// Accepts the next connection, non-blocking. Returns `None` if none waits.
///
/// # Errors
/// `EMFILE` or `ENFILE` without a free file descriptor; else as accept(2).
pub fn accept(listener: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match io::retry_on_intr(|| net::accept_with(&listener, flags)) {
        Ok(socket) => Ok(Some(socket)),
        Err(Errno::AGAIN | Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Creates two connected sockets; the first is non-blocking.
///
/// # Errors
/// `EMFILE` or `ENFILE`.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    io::ioctl_fionbio(&a, true)?;
    Ok((a, b))
}

fn stream(flags: SocketFlags) -> io::Result<OwnedFd> {
    net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)
}

/// Sends `bytes`, and `fds` with the first of them. Returns the number of bytes sent; all of `fds` were sent with them.
///
/// # Errors
/// `EAGAIN` if the socket is non-blocking and full, `EPIPE` or `ECONNRESET` if the peer is gone, `EINVAL` if there are
/// more than [`MAX_FDS`] file descriptors, `ETOOMANYREFS` if too many are in flight (unix(7)).
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > MAX_FDS {
        return Err(Errno::INVAL);
    }
    if fds.is_empty() {
        return io::retry_on_intr(|| net::send(&socket, bytes, SendFlags::NOSIGNAL));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    io::retry_on_intr(|| {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })
}

/// Returns whether the peer of a Unix socket has read everything that was sent, or has closed its end.
///
/// Also true if the kernel cannot say (a sandbox without `SIOCOUTQ`).
pub fn is_drained(socket: impl AsFd) -> bool {
    // The kernel counts the memory of each message, at least some hundred bytes. While it frees the last message it
    // still counts one byte, and reports no event when that byte is gone.
    !crate::process::unread_bytes(socket.as_fd()).is_ok_and(|bytes| bytes >= 64)
}

/// The result of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes; 0 at the end of the connection.
    pub bytes: usize,
    /// True if file descriptors were lost because this process has none free.
    pub fds_lost: bool,
}

/// Reads into `buffer` and appends the file descriptors that came along, close-on-exec.
///
/// # Errors
/// `EAGAIN` if the socket is non-blocking and empty, `ECONNRESET` if the peer died; else as recvmsg(2).
pub fn recv(socket: impl AsFd, buffer: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<Received> {
    recv_with(socket, buffer, fds, RecvFlags::empty())
}

/// Reads as [`recv`] does, but never waits, even if the socket blocks.
///
/// # Errors
/// As [`recv`].
pub fn recv_now(socket: impl AsFd, buffer: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<Received> {
    recv_with(socket, buffer, fds, RecvFlags::DONTWAIT)
}

fn recv_with(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut VecDeque<OwnedFd>,
    flags: RecvFlags,
) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        match net::recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = ancillary {
            fds.extend(received);
        }
    }
    Ok(Received { bytes: message.bytes, fds_lost: message.flags.contains(ReturnFlags::CTRUNC) })
}

/// The direction to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// Something can be read, or the connection has ended.
    Read,
    /// Something can be written.
    Write,
}

/// Waits until `fd` is ready. Returns `false` if `deadline` came first; without a deadline the wait has no limit.
///
/// # Errors
/// As poll(2).
pub fn wait(fd: impl AsFd, ready: Ready, deadline: Option<Instant>) -> io::Result<bool> {
    let events = match ready {
        Ready::Read => PollFlags::IN,
        Ready::Write => PollFlags::OUT,
    };
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeout = left.map(timespec);
        match poll(&mut [PollFd::new(&fd, events)], timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Ok(0) if left.is_some_and(|l| !l.is_zero()) => {}
            Ok(n) => return Ok(n > 0),
            Err(e) => return Err(e),
        }
    }
}

/// Converts a duration into a timeout for poll(2).
pub fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().min(i64::MAX as u64) as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// The process that called `connect` (or made the pair), as this process sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its pid, or `None` if it has none in our PID namespace.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Returns the process and user at the other end.
///
/// # Errors
/// As getsockopt(2).
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    // rustix holds the pid in a type that cannot be zero, which the kernel reports for a peer of another PID namespace.
    let credentials = crate::process::peer_credentials(socket.as_fd())?;
    let pid = u32::try_from(credentials.pid).ok().filter(|p| *p > 0);
    Ok(Peer { pid, uid: credentials.uid, gid: credentials.gid })
}

/// Returns the supplementary groups of the process at the other end, as they were when it connected.
///
/// # Errors
/// As getsockopt(2).
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    crate::process::peer_groups(socket.as_fd())
}

/// Makes reads and writes of `socket` return at once with `EAGAIN` instead of waiting.
///
/// # Errors
/// As ioctl(2).
pub fn set_nonblocking(socket: impl AsFd) -> io::Result<()> {
    io::ioctl_fionbio(socket, true)
}

/// Waits until one of `fds` can be read or its connection has ended. Returns `None` if `deadline` came first.
///
/// # Errors
/// As poll(2).
pub fn wait_any<const N: usize>(fds: [BorrowedFd<'_>; N], deadline: Option<Instant>) -> io::Result<Option<[bool; N]>> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(&mut polled, left.map(timespec).as_ref()) {
            Err(Errno::INTR) => {}
            Ok(0) if left.is_some_and(|l| l.is_zero()) => return Ok(None),
            Ok(0) => {}
            Ok(_) => return Ok(Some(polled.map(|p| !p.revents().is_empty()))),
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dup_many(fd: &OwnedFd, count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| fd.try_clone().unwrap()).collect()
    }

    #[test]
    fn socket_is_drained_when_all_is_read_or_the_peer_is_gone() {
        let (a, b) = pair().unwrap();
        assert!(is_drained(&a));
        assert_eq!(send(&a, b"xyz", &[b.as_fd()]), Ok(3));
        assert!(!is_drained(&a));
        let mut received = VecDeque::new();
        assert_eq!(recv(&b, &mut [0; 2], &mut received).unwrap().bytes, 2);
        assert!(!is_drained(&a), "one byte is left");
        assert_eq!(recv(&b, &mut [0; 2], &mut received).unwrap().bytes, 1);
        assert!(is_drained(&a));
        assert_eq!(send(&a, b"x", &[b.as_fd()]), Ok(1));
        assert!(!is_drained(&a));
        // Descriptors that were received or are still in flight keep the other end open until they are dropped.
        assert_eq!(recv(&b, &mut [0; 1], &mut received).unwrap().bytes, 1);
        assert_eq!(send(&a, b"x", &[]), Ok(1));
        drop((received, b));
        // A child that another test has forked keeps the other end open, too, until it ends.
        let watchdog = Instant::now() + Duration::from_secs(60);
        while !is_drained(&a) {
            assert!(Instant::now() < watchdog, "no process reads it any more");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn max_fds_arrive_and_one_more_is_refused() {
        let (a, b) = pair().unwrap();
        let fds = dup_many(&b, MAX_FDS + 1);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        assert_eq!(send(&a, b"x", &borrowed), Err(Errno::INVAL));
        assert_eq!(send(&a, b"xyz", &borrowed[..MAX_FDS]), Ok(3));
        let mut buffer = [0; 16];
        let mut received = VecDeque::new();
        assert_eq!(recv(&b, &mut buffer, &mut received), Ok(Received { bytes: 3, fds_lost: false }));
        assert_eq!(received.len(), MAX_FDS);
        for fd in &received {
            assert!(io::fcntl_getfd(fd).unwrap().contains(io::FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn dead_peer_is_an_error_without_a_signal() {
        let (a, b) = pair().unwrap();
        drop(b);
        assert_eq!(send(&a, b"x", &[]), Err(Errno::PIPE));
        assert_eq!(recv(&a, &mut [0; 4], &mut VecDeque::new()).unwrap().bytes, 0);
    }

    #[test]
    fn waiting_ends_at_the_deadline() {
        let (a, b) = pair().unwrap();
        assert_eq!(wait(&a, Ready::Read, Some(Instant::now() + Duration::from_millis(5))), Ok(false));
        send(&b, b"x", &[]).unwrap();
        assert_eq!(wait(&a, Ready::Read, None), Ok(true));
    }

    // Holds 147.
    #[test]
    fn listener_has_mode_0600_and_reports_the_peer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let listener = listen(&path).unwrap();
        assert_eq!(rustix::fs::stat(&path).unwrap().st_mode & 0o777, 0o600);
        assert_eq!(listen(&path).err(), Some(Errno::ADDRINUSE));
        assert!(accept(&listener).unwrap().is_none());
        let client = connect(&path).unwrap();
        let server = accept(&listener).unwrap().expect("a connection waits");
        for end in [&client, &server] {
            let peer = peer(end).unwrap();
            assert_eq!(peer.pid, Some(std::process::id()));
            assert_eq!(peer.uid, rustix::process::getuid().as_raw());
            assert_eq!(peer.gid, rustix::process::getgid().as_raw());
            let groups = rustix::process::getgroups().unwrap();
            let groups: Vec<_> = groups.into_iter().map(|group| group.as_raw()).collect();
            assert_eq!(peer_groups(end).unwrap(), groups);
        }
    }

    // Holds 144.
    #[test]
    fn listener_is_found_after_its_file_was_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a name");
        assert_eq!(listener_of(&path), None);
        let listener = listen(&path).unwrap();
        let client = connect(&path).unwrap();
        let server = accept(&listener).unwrap().expect("a connection waits");
        assert_eq!(listener_of(&path), Some(std::process::id()));
        assert_eq!(listener_of(&dir.path().join("a")), None);
        assert_eq!(listener_of(&dir.path().join("name")), None);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(listener_of(&path), Some(std::process::id()));
        std::fs::remove_dir(dir.path()).unwrap();
        assert_eq!(listener_of(&path), Some(std::process::id()));
        drop(listener);
        // A child that another test has forked keeps the listener open, too, until it ends.
        let watchdog = Instant::now() + Duration::from_secs(60);
        while listener_of(&path).is_some() {
            assert!(Instant::now() < watchdog, "connections are no listeners");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop((client, server));
    }

    #[test]
    fn mode_of_the_socket_follows_the_users_that_may_connect() {
        let dir = tempfile::tempdir().unwrap();
        let ours = rustix::process::getgid().as_raw();
        for (name, connecting, mode) in [
            ("user", Connecting::User, 0o600),
            ("group", Connecting::Group(ours), 0o660),
            ("all", Connecting::Everybody, 0o666),
        ] {
            let path = dir.path().join(name);
            let _listener = listen_for(&path, connecting).unwrap();
            let stat = rustix::fs::stat(&path).unwrap();
            assert_eq!((stat.st_mode & 0o777, stat.st_gid), (mode, ours), "{name}");
        }
    }
}
