//! Processes: pidfds, daemons, limits.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command},
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{self, Mode, OFlags},
    io::{self, Errno},
    process::{self, Pid, PidfdFlags, Resource, Rlimit, Signal},
};

use crate::thread;

/// Opens a pidfd of this process.
///
/// # Errors
/// `EMFILE`, `ENFILE`; `ENOSYS` in a sandbox without pidfds.
pub fn own_pidfd() -> io::Result<OwnedFd> {
    process::pidfd_open(process::getpid(), PidfdFlags::empty())
}

/// Opens a pidfd of the process `pid`.
///
/// # Errors
/// `ESRCH` if there is none.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    process::pidfd_open(pid, PidfdFlags::empty())
}

/// The kernel's information about a pidfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PidfdInfo {
    /// The pid in our PID namespace.
    Process(u32),
    /// Its process is not visible in our PID namespace.
    Elsewhere,
    /// Its process has been reaped.
    Gone,
}

/// Returns the process of a pidfd, or `None` if `fd` is not a pidfd.
pub fn pidfd_info(fd: impl AsFd) -> Option<PidfdInfo> {
    // Only pidfds have a `Pid:` line (proc_pid_fdinfo(5)). The pid is that in the PID namespace of the mounted /proc.
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())).ok()?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    match pid.trim().parse::<i64>().ok()? {
        0 => Some(PidfdInfo::Elsewhere),
        pid => Some(u32::try_from(pid).map_or(PidfdInfo::Gone, PidfdInfo::Process)),
    }
}

/// Sends `signal` to the process behind a pidfd.
///
/// # Errors
/// `ESRCH` if it has exited, `EPERM`.
pub fn kill(pidfd: impl AsFd, signal: Signal) -> io::Result<()> {
    process::pidfd_send_signal(pidfd, signal)
}

/// Returns whether a process is in the PID namespace and in the user namespace of this process. A process in a
/// container is not. Its mount namespace may be another one: service managers give one to each service.
///
/// # Errors
/// As stat(2): `EACCES` if it has more privileges than this process, `ENOENT` without /proc.
pub fn shares_namespaces(pid: u32) -> io::Result<bool> {
    let identity = |process: &str, name: &str| {
        fs::stat(format!("/proc/{process}/ns/{name}")).map(|stat| (stat.st_dev, stat.st_ino))
    };
    let pid = pid.to_string();
    let shares = |name: &str| Ok(identity("self", name)? == identity(&pid, name)?);
    Ok(shares("pid")? && shares("user")?)
}

/// Returns the credentials that the kernel recorded when the peer of a Unix socket connected.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `credentials`, which are plain integers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(credentials) } else { Err(last_errno()) }
}

/// Returns the supplementary groups of the process that connected.
pub(crate) fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut len = libc::socklen_t::try_from(groups.len() * mem::size_of::<libc::gid_t>()).unwrap_or(0);
        // SAFETY: the kernel writes at most `len` bytes to `groups`, which has that many and consists of plain
        // integers.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let needed = len as usize / mem::size_of::<libc::gid_t>();
        match if result == 0 { Ok(()) } else { Err(last_errno()) } {
            // The kernel reports how many there are: at most 65,536 (NGROUPS_MAX).
            Err(Errno::RANGE) if needed > groups.len() => groups.resize(needed, 0),
            Err(errno) => return Err(errno),
            Ok(()) => {
                groups.truncate(needed);
                return Ok(groups);
            }
        }
    }
}

/// Returns a pidfd of the process that connected, made by the kernel. `None` before Linux 6.5.
pub fn peer_pidfd(socket: impl AsFd) -> Option<OwnedFd> {
    const SO_PEERPIDFD: c_int = 77;
    let mut fd: c_int = -1;
    let mut len = mem::size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `fd`, a plain integer.
    let result = unsafe {
        libc::getsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut fd).cast(), &raw mut len)
    };
    // SAFETY: on success the kernel has installed a new file descriptor for this process, which nothing else owns.
    (result == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns a number that all pidfds of one process share and no other process of this boot has. `None` before Linux
/// 6.9, because pidfds of older kernels have no inodes of their own.
pub fn pidfd_inode(pidfd: impl AsFd) -> Option<u64> {
    const PID_FS_MAGIC: u64 = 0x5049_4446;
    let pidfd = pidfd.as_fd();
    let of_pidfs = fs::fstatfs(pidfd).is_ok_and(|found| found.f_type as u64 == PID_FS_MAGIC);
    of_pidfs.then(|| fs::fstat(pidfd).ok().map(|stat| stat.st_ino)).flatten()
}

/// Returns the bytes of kernel memory that a Unix socket has sent and its peer has not read (`SIOCOUTQ`, unix(7)).
pub(crate) fn unread_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: c_int = 0;
    // SAFETY: for this request the kernel writes one int to `bytes`.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(u64::try_from(bytes).unwrap_or(0)),
        _ => Err(last_errno()),
    }
}

/// Returns the number of forks between this process and the one that first called this. A number from before a fork
/// differs from the child's. Unlike `getpid`, the call costs no system call.
///
/// A child made by the system call alone, without the C library's `fork`, is not noticed.
pub fn fork_generation() -> u64 {
    static GENERATION: AtomicU64 = AtomicU64::new(0);
    static COUNTING: Once = Once::new();

    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }

    COUNTING.call_once(|| {
        // SAFETY: the handler touches one atomic, which is allowed in the child of a process with threads; it lives as
        // long as the program. If there is no memory to register it, no fork is noticed.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

/// Starts a program that blocks no signal, whatever the calling thread blocks.
///
/// # Errors
/// As [`Command::spawn`]: `EAGAIN` if a limit of processes is reached.
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    // SAFETY: between fork and exec the closure makes one system call. It takes no lock and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            thread::unblock_all();
            Ok(())
        });
    }
    command.spawn()
}

/// Lets the process that `command` starts inherit duplicates of file descriptors. Returns their numbers, which are
/// above 2. The duplicates close on exec in this process, so that no other child inherits them, and live as long as
/// `command`.
///
/// # Errors
/// `EMFILE`.
pub fn inherit(command: &mut Command, fds: &[BorrowedFd<'_>]) -> io::Result<Vec<RawFd>> {
    let duplicates: Vec<OwnedFd> = fds.iter().map(|fd| io::fcntl_dupfd_cloexec(fd, 3)).collect::<io::Result<_>>()?;
    let numbers = duplicates.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec the closure only makes system calls on descriptors that it owns. It takes no lock
    // and allocates nothing: an errno becomes an error without a heap allocation.
    unsafe {
        command.pre_exec(move || {
            for fd in &duplicates {
                io::fcntl_setfd(fd, io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
    Ok(numbers)
}

/// Returns the most bytes that a file of this process may have (`RLIMIT_FSIZE`), if that is limited. Memory files
/// count. Where a write or a change of length exceeds it, the kernel also sends SIGXFSZ, which ends a process that does
/// not ignore it.
pub fn file_size_limit() -> Option<u64> {
    process::getrlimit(Resource::Fsize).current
}

/// Returns whether /proc is mounted, and shows this process.
pub fn has_proc() -> bool {
    fs::stat("/proc/self/fd").is_ok()
}

/// Returns a duplicate of a file descriptor that this process has inherited, and makes both close-on-exec.
///
/// # Errors
/// `EBADF` if it is not open.
pub fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is not -1. The descriptor is only duplicated and marked, neither read, written nor closed, so
    // an owner elsewhere in this process is not disturbed; if no file is open under the number, both calls fail.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    io::fcntl_setfd(borrowed, io::FdFlags::CLOEXEC)?;
    io::fcntl_dupfd_cloexec(borrowed, 3)
}

/// Raises the soft limit of open files to the hard limit, and returns the limit now in force.
pub fn raise_fd_limit() -> u64 {
    let limit = process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match process::setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
    .unwrap_or(u64::MAX)
}

/// Makes the caller a daemon: a new session, `/` as working directory, `/dev/null` as standard streams, every other
/// inherited file descriptor closed. The function returns in the daemon, with a handle that reports to the waiting
/// starter whether the start succeeded.
///
/// # Safety
/// The process has one thread, and nothing in it uses a file descriptor above 2, because this call closes them all.
///
/// # Errors
/// As fork(2), setsid(2), open(2).
pub unsafe fn daemonize() -> io::Result<Starter> {
    // SAFETY: the caller guarantees that nothing in this process owns one of these.
    unsafe { close_from(3) }?;
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: the process has one thread, so the child inherits no lock that another thread holds.
    match unsafe { libc::fork() } {
        -1 => Err(last_errno()),
        0 => {
            drop(read);
            // The starter, or one of its parents, may block signals that are to end the daemon.
            thread::unblock_all();
            process::setsid()?;
            process::chdir("/")?;
            let null = fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
            rustix::stdio::dup2_stdin(&null)?;
            rustix::stdio::dup2_stdout(&null)?;
            rustix::stdio::dup2_stderr(&null)?;
            Ok(Starter { pipe: write })
        }
        _ => {
            drop(write);
            let mut outcome = Vec::new();
            let file = std::fs::File::from(read);
            // Returns on the daemon's report or death. A daemon that hangs must be ended by the process that started
            // this one.
            let _ = std::io::Read::read_to_end(&mut std::io::BufReader::new(file), &mut outcome);
            match outcome.split_first() {
                Some((0, message)) => {
                    let _ = std::io::Write::write_all(&mut std::io::stdout(), message);
                    std::process::exit(0)
                }
                Some((code, message)) => {
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), message);
                    std::process::exit(i32::from(*code))
                }
                None => {
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), b"the daemon died while starting\n");
                    std::process::exit(1)
                }
            }
        }
    }
}

/// Forks this process, which must have one thread. The child runs `child` and exits with its result, or with 101 if it
/// panics. Returns the child's pid; the caller has to wait for its end.
///
/// # Errors
/// `EBUSY` if the process has more threads: the child could wait for a lock that another thread holds. As fork(2).
pub fn fork_alone(child: impl FnOnce() -> u8) -> io::Result<Pid> {
    let threads =
        std::fs::read_dir("/proc/self/task").map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    if threads.count() != 1 {
        return Err(Errno::BUSY);
    }
    // SAFETY: the process has one thread, so the child inherits no lock that another thread holds.
    match unsafe { libc::fork() } {
        -1 => Err(last_errno()),
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
            std::process::exit(i32::from(code))
        }
        pid => Pid::from_raw(pid).ok_or(Errno::SRCH),
    }
}

/// Runs `child` in a forked child and returns its result.
///
/// # Safety
/// If this process has other threads, `child` takes no lock that they may hold: it is as limited as a signal handler.
///
/// # Errors
/// As fork(2) and waitpid(2). `ECHILD` if the child did not end by itself.
pub unsafe fn in_fork(child: impl FnOnce() -> u8) -> io::Result<u8> {
    // SAFETY: the caller's promise; the child neither returns nor unwinds, because it ends below or aborts.
    match unsafe { libc::fork() } {
        -1 => Err(last_errno()),
        0 => {
            let code = child();
            // SAFETY: ends the child without running the parent's handlers.
            unsafe { libc::_exit(i32::from(code)) }
        }
        pid => {
            let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
            let ended = io::retry_on_intr(|| process::waitpid(Some(pid), process::WaitOptions::empty()))?;
            let code = ended.and_then(|(_, status)| status.exit_status());
            code.and_then(|code| u8::try_from(code).ok()).ok_or(Errno::CHILD)
        }
    }
}

/// The process that waits for a daemon's start.
#[derive(Debug)]
pub struct Starter {
    pipe: OwnedFd,
}

impl AsFd for Starter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

impl Starter {
    /// Reports that the daemon is ready: the starter prints `message` on standard output and exits with 0.
    pub fn ready(self, message: &str) {
        self.report(0, message);
    }

    /// Reports that the daemon gives up: the starter prints `message` on standard error and exits with `code`.
    pub fn failed(self, code: u8, message: &str) {
        self.report(code.max(1), message);
    }

    fn report(self, code: u8, message: &str) {
        let mut bytes = vec![code];
        bytes.extend_from_slice(message.as_bytes());
        // Fails if the starter was killed meanwhile; then nothing waits for the report.
        let _ = io::retry_on_intr(|| io::write(&self.pipe, &bytes));
    }
}

/// Closes every file descriptor from `first` on.
///
/// # Safety
/// Nothing in this process owns one of them.
///
/// # Errors
/// `ENOSYS` before Linux 5.9.
pub(crate) unsafe fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: the caller guarantees that nothing in this process owns such a file descriptor.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::{self, Ready};
    use std::time::{Duration, Instant};

    #[test]
    fn process_with_threads_is_not_forked_alone() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || ended.recv());
        assert_eq!(fork_alone(|| 0), Err(Errno::BUSY));
        drop(end);
        let _ = other.join();
    }

    #[test]
    fn forked_child_returns_its_code() {
        // SAFETY: the child takes no lock.
        assert_eq!(unsafe { in_fork(|| 42) }, Ok(42));
    }

    #[test]
    fn pidfd_names_its_process() {
        let own = own_pidfd().unwrap();
        assert_eq!(pidfd_info(&own), Some(PidfdInfo::Process(std::process::id())));
        assert_eq!(pidfd_info(crate::memfd::frozen("partywall:test", b"x").unwrap()), None);
    }

    #[test]
    fn killed_child_makes_its_pidfd_readable() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let fd = pidfd(child.id()).unwrap();
        assert_eq!(socket::wait(&fd, Ready::Read, Some(Instant::now())), Ok(false));
        kill(&fd, Signal::KILL).unwrap();
        assert_eq!(socket::wait(&fd, Ready::Read, Some(Instant::now() + Duration::from_secs(60))), Ok(true));
        child.wait().unwrap();
        assert_eq!(kill(&fd, Signal::KILL), Err(Errno::SRCH));
        assert!(matches!(pidfd_info(&fd), Some(PidfdInfo::Gone)));
    }

    #[test]
    fn forked_child_knows_that_it_is_one() {
        let before = fork_generation();
        assert_eq!(fork_generation(), before);
        // SAFETY: the child only looks at an atomic and leaves without running anything of this process.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(fork_generation() != before + 1)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child made above; the status is a plain integer of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(fork_generation(), before);
    }

    #[test]
    fn kernel_names_the_peer_of_a_pair() {
        let (a, _b) = socket::pair().unwrap();
        if let Some(fd) = peer_pidfd(&a) {
            assert_eq!(pidfd_info(&fd), Some(PidfdInfo::Process(std::process::id())));
        }
    }

    #[test]
    fn pidfds_of_one_process_have_one_inode() {
        let ours = pidfd_inode(own_pidfd().unwrap());
        assert_eq!(ours, pidfd_inode(own_pidfd().unwrap()));
        let parent = rustix::process::getppid().expect("tests have a parent");
        let parent = pidfd(u32::try_from(parent.as_raw_nonzero().get()).unwrap()).unwrap();
        // Absent before Linux 6.9.
        assert!(ours.is_none() || ours != pidfd_inode(parent));
        assert_eq!(pidfd_inode(std::io::stdin()), None);
    }

    #[test]
    fn fd_limit_is_raised_to_the_hard_limit() {
        let raised = raise_fd_limit();
        let now = process::getrlimit(Resource::Nofile);
        assert_eq!(Some(raised), now.current);
        assert_eq!(now.current, now.maximum);
    }
}
