//! Connects to the broker at a location and performs the handshake. Starts a broker if none runs.

use std::{
    io::Read,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use partywall_cuda::Driver;
use partywall_os::{
    Errno,
    dir::{DirAccess, PrivateDir, Unsafe},
    environment, process,
    socket::{self, Ready},
};
use partywall_wire::{
    BrokerHello, ClientHello, Refusal, Resume, Welcome, WireError,
    handshake::{self, Speaker},
    limits::{MAX_COMMAND, PROTOCOL},
};

use super::{
    inbox::Inbox,
    locate::{ChosenBy, Location, broker_binary},
};
use crate::error::{Error, ForeignBroker, InvalidArgument, LimitReached, NO_SOCKET, Result, Unreachable};

/// The release of this library, sent in the handshake.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How long a broker may take to answer the handshake, and to start.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often to look for a broker that has to bind its socket again.
const REBIND_RETRY: Duration = Duration::from_millis(50);

/// How long to wait for processes of this user to read file descriptors, and how often to retry.
const IN_FLIGHT: Duration = Duration::from_secs(1);
const IN_FLIGHT_RETRY: Duration = Duration::from_millis(2);

/// A broker's answer to the first message.
#[derive(Debug)]
pub(super) struct Greeting {
    /// The number of the broker.
    pub(super) instance: u64,
    pub(super) outcome: Result<Greeted>,
}

/// A connection after the handshake.
#[derive(Debug)]
pub(super) struct Greeted {
    pub(super) call: OwnedFd,
    pub(super) events: OwnedFd,
    /// The rows of all members.
    pub(super) members: OwnedFd,
    /// For an operator: the broker's processes.
    pub(super) processes: Vec<OwnedFd>,
    pub(super) welcome: Welcome,
}

/// The role in which a process connects.
#[derive(Debug)]
pub(super) enum Role {
    /// As a member, to share memory.
    Member { attempt: u64 },
    /// As an operator, to list and to tidy up.
    Operator { attempt: u64 },
    /// As the member that it was.
    Resumed(Resume),
}

/// Connects to the broker at `location`. Returns its number and the connection. With `start`, starts one if none runs,
/// preferably `program`.
pub(super) fn connect(
    location: &Location,
    start: bool,
    program: Option<&Path>,
    operator: bool,
) -> Result<(u64, Greeted)> {
    // A broker that ends because it is idle may close this connection, and the next attempt then starts a new broker. A
    // broker that is killed closes it, too, and its supervisor has started the next one by then. More than a few such
    // coincidences in a row have another cause.
    let attempt = attempt()?;
    for _ in 0..4 {
        let call = match open(location) {
            Ok(call) => call,
            Err(error) if start && is_absent(&error) && may_start(location) => start_broker(location, program)?,
            Err(error) => return Err(error),
        };
        let role = if operator { Role::Operator { attempt } } else { Role::Member { attempt } };
        let answered = greet(call, &location.socket, role);
        match answered.and_then(|answered| Ok((answered.instance, answered.outcome?))) {
            Err(Error::Unreachable(Unreachable::Gone { .. })) => {}
            other => return other,
        }
    }
    Err(Unreachable::NoAnswer { socket: location.socket.clone(), why: "it closed the connection".into() }.into())
}

/// Draws a number by which the broker recognises this attempt to join, if it has to be repeated.
fn attempt() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Error::system("drawing a random number", errno))?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

fn is_absent(error: &Error) -> bool {
    matches!(error, Error::Unreachable(Unreachable::NoAnswer { .. }))
}

/// Returns whether a broker for this user may be started at a location. A directory of another user that others can
/// only pass is for the broker of that user.
fn may_start(location: &Location) -> bool {
    let stat = rustix::fs::stat(location.directory());
    stat.map_or(true, |stat| stat.st_uid == own_user() || stat.st_mode & 0o777 != 0o711)
}

/// Connects, without the handshake.
pub(super) fn open(location: &Location) -> Result<OwnedFd> {
    let path = &location.socket;
    let unreachable = |why: String| Error::Unreachable(Unreachable::NoAnswer { socket: path.clone(), why });
    let ours = own_user();
    let foreign = |broker, why| Error::Unreachable(Unreachable::User { socket: path.clone(), broker, ours, why });
    let call = socket::connect_within(path, TIMEOUT).map_err(|errno| match errno {
        Errno::AGAIN => unreachable("it does not accept connections; is it stopped?".into()),
        Errno::MFILE | Errno::NFILE => Error::system("connecting to the broker", errno),
        Errno::NOENT => unbound(location).unwrap_or_else(|| unreachable(NO_SOCKET.into())),
        Errno::ACCESS => match deepest_visible(path) {
            Some((path, owner)) if owner != ours => Unreachable::Barred { path, owner, ours }.into(),
            _ => unreachable(errno.to_string()),
        },
        Errno::CONNREFUSED => unreachable("connection refused, no process listens".into()),
        Errno::NAMETOOLONG | Errno::INVAL => Error::InvalidArgument(InvalidArgument::SocketPath { path: path.clone() }),
        errno => unreachable(errno.to_string()),
    })?;
    match socket::peer(&call).map_err(|e| Error::system("asking who the broker is", e))?.uid {
        broker if broker != ours => check_foreign(location, broker).map(|()| call).map_err(|why| foreign(broker, why)),
        _ => Ok(call),
    }
}

/// Returns the error that a broker lives whose socket has no file, if it cannot bind the socket again in the directory
/// as that is now: a cleaner has removed the parent, too, or something else is in its place.
fn unbound(location: &Location) -> Option<Error> {
    let path = location.directory();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let why = match PrivateDir::open(path, false) {
        Err(Unsafe::Errno(Errno::NOENT)) if !parent.exists() => Unsafe::NoParent(parent.to_owned()),
        Err(why @ (Unsafe::NotADirectory | Unsafe::Owner(_))) => why,
        // Its broker may admit other users.
        Err(why @ Unsafe::Mode { .. }) if PrivateDir::open_for(path, false, DirAccess::Passable).is_err() => why,
        _ => return None,
    };
    let pid = socket::listener_of(&location.socket)?;
    let parent = matches!(why, Unsafe::NoParent(_)).then(|| parent.to_owned());
    let socket = location.socket.clone();
    Some(Unreachable::Unbound { socket, pid, directory: path.to_owned(), why: why.to_string(), parent }.into())
}

/// Returns the user that this process runs as.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Refuses the broker of another user unless its socket was named, in a directory where no third user can put another
/// socket.
pub(crate) fn check_foreign(location: &Location, broker: u32) -> Result<(), ForeignBroker> {
    if location.chosen_by != ChosenBy::Caller {
        return Err(ForeignBroker::NotNamed);
    }
    // A directory that is gone by now has no owner that could be trusted.
    let Ok(stat) = rustix::fs::stat(location.directory()) else { return Err(ForeignBroker::NotNamed) };
    match (stat.st_uid, stat.st_mode & 0o7777) {
        (owner, _) if owner != 0 && owner != broker => Err(ForeignBroker::Directory { owner }),
        (_, mode) if mode & 0o022 != 0 => Err(ForeignBroker::Writable { mode }),
        _ => Ok(()),
    }
}

/// Returns what this process may not use on the way to a socket, and its owner: the socket, or else the deepest
/// directory that is visible.
fn deepest_visible(path: &Path) -> Option<(PathBuf, u32)> {
    path.ancestors().find_map(|part| Some((part.to_owned(), rustix::fs::stat(part).ok()?.st_uid)))
}

/// Performs the handshake.
pub(super) fn greet(call: OwnedFd, path: &Path, role: Role) -> Result<Greeting> {
    let pidfd = match process::own_pidfd() {
        Ok(pidfd) => Some(pidfd),
        // The sandbox has no pidfds, or does not permit them. The broker may get a pidfd from its kernel; otherwise it
        // knows that the death of this process cannot be proved.
        Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => None,
        Err(errno) => return Err(Error::system("opening a pidfd of this process", errno)),
    };
    let pidfds: Vec<_> = pidfd.iter().map(AsFd::as_fd).collect();
    let (operator, resume, attempt) = match role {
        Role::Member { attempt } => (false, None, attempt),
        Role::Operator { attempt } => (true, None, attempt),
        Role::Resumed(resume) => (false, Some(resume), 0),
    };
    let hello = ClientHello { command: command_line(), operator, simulated: is_simulated(), resume, attempt };
    let hello = handshake::encode(&Speaker::new(VERSION), &hello, pidfds.len()).map_err(protocol)?;
    let gone = |_| Error::Unreachable(Unreachable::Gone { socket: path.to_owned() });
    match send(&call, &hello, &pidfds) {
        // A broker that refuses a connection at once closes it without reading. The reason waits to be read.
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(Errno::TOOMANYREFS) => return Err(Error::descriptors_in_flight()),
        Err(errno) => return Err(gone(errno)),
    }

    let deadline = Instant::now() + TIMEOUT;
    let mut inbox = Inbox::new();
    let (frame, fds) = loop {
        if let Some(message) = inbox.next().map_err(Unreachable::Protocol)? {
            break message;
        }
        if !socket::wait(&call, Ready::Read, Some(deadline)).map_err(gone)? {
            let why = format!("it did not answer within {} s", TIMEOUT.as_secs());
            return Err(Unreachable::NoAnswer { socket: path.to_owned(), why }.into());
        }
        if !inbox.read(&call).map_err(gone)? {
            return Err(Unreachable::Gone { socket: path.to_owned() }.into());
        }
    };
    let greeting = handshake::decode(&frame.body).map_err(protocol)?;
    let theirs = &greeting.speaker;
    if theirs.protocol != PROTOCOL {
        return Err(Unreachable::Version {
            socket: path.to_owned(),
            ours: VERSION.into(),
            our_protocol: PROTOCOL,
            theirs: theirs.version.clone(),
            their_protocol: theirs.protocol,
            pid: theirs.pid,
        }
        .into());
    }
    let BrokerHello { instance, outcome } = greeting.decode().map_err(protocol)?;
    let outcome = match outcome {
        Ok(welcome) => admitted(call, fds, welcome),
        Err(Refusal::ShuttingDown) => Err(Unreachable::Gone { socket: path.to_owned() }.into()),
        // Another broker, or one that has dropped this member, so a retry would not help.
        Err(Refusal::CannotResume) => Err(Unreachable::Refused("it does not know this member".into()).into()),
        Err(refusal) => Err(Error::refused(refusal, path)),
    };
    Ok(Greeting { instance, outcome })
}

/// Takes what comes with a welcome.
fn admitted(call: OwnedFd, fds: Vec<OwnedFd>, welcome: Welcome) -> Result<Greeted> {
    let mut fds = fds.into_iter();
    let mut next =
        |what: &str| fds.next().ok_or_else(|| Error::LimitReached(LimitReached::FileDescriptors(what.into())));
    let events = next("the events socket of a connection")?;
    let members = next("the memory of the members' rows")?;
    Ok(Greeted { call, events, members, processes: fds.collect(), welcome })
}

/// Sends as [`socket::send`] does. If too many file descriptors of this user are unread, retries for a while: other
/// processes may read theirs at any moment, which the kernel does not report.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::result::Result<usize, Errno> {
    let deadline = Instant::now() + IN_FLIGHT;
    loop {
        match socket::send(&socket, bytes, fds) {
            Err(Errno::TOOMANYREFS) if Instant::now() < deadline => std::thread::sleep(IN_FLIGHT_RETRY),
            other => return other,
        }
    }
}

fn protocol(error: WireError) -> Error {
    Unreachable::protocol(error.to_string())
}

/// Returns whether this process runs on the simulated driver. The driver is loaded for this only if the environment
/// chooses another driver than the vendor's, because host memory needs no driver.
fn is_simulated() -> bool {
    environment::place(Driver::LIBRARY_VARIABLE).is_some() && Driver::load().is_ok_and(Driver::is_simulated)
}

/// Returns the command line that `show` and `ps` print for this process, to users that may not read it in `/proc`, and
/// after its death.
fn command_line() -> String {
    let line = std::env::args_os().map(|word| without_secrets(&word.to_string_lossy())).collect::<Vec<_>>().join(" ");
    let mut end = line.len().min(MAX_COMMAND);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].to_owned()
}

/// Returns a word without the user, the password and the query of each URL in it.
fn without_secrets(word: &str) -> String {
    let mut parts = word.split("://");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (authority, path) = part.split_at(part.find(['/', '?', '#']).unwrap_or(part.len()));
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        shown += &format!("://{host}{path}");
        if query.is_some() {
            break;
        }
    }
    shown
}

/// Starts a broker, unless another process was faster, and connects to it.
fn start_broker(location: &Location, program: Option<&Path>) -> Result<OwnedFd> {
    let binary = broker_binary(program)?;
    let path = location.directory();
    let deadline = Instant::now() + TIMEOUT;
    let lock = loop {
        match open(location) {
            Err(error) if is_absent(&error) => {}
            other => return other,
        }
        // The file of a living broker's socket may have been removed. The broker binds the socket again, which takes
        // the lock; a second broker would hide the names of the first.
        if let Some(pid) = socket::listener_of(&location.socket) {
            if Instant::now() >= deadline {
                let why =
                    format!("process {pid} serves this socket, whose file was removed, and does not bind it again");
                let advice = format!("see `partywall logs`; `kill {pid}` ends that broker, which loses all its names");
                return Err(Unreachable::NotStarted { why, advice: Some(advice) }.into());
            }
            std::thread::sleep(REBIND_RETRY);
            continue;
        }
        let directory = PrivateDir::open(path, true).map_err(|why| Error::directory(path, why))?;
        let lock = directory.lock(deadline).map_err(|e| Error::system("locking the socket's directory", e))?;
        let Some(lock) = lock else {
            let why = "another process has been starting one for too long".into();
            return Err(Unreachable::NotStarted { why, advice: None }.into());
        };
        match open(location) {
            Err(error) if is_absent(&error) => {}
            other => return other,
        }
        // Under the lock no broker starts or binds again.
        if socket::listener_of(&location.socket).is_none() {
            break lock;
        }
    };
    // The started process holds the lock as its standard input until its daemon is ready. If this process is killed
    // meanwhile, the next starter then does not take the socket away from that broker.
    let shared = lock.share().map_err(|e| Error::system("sharing the lock on the socket's directory", e))?;
    let mut command = Command::new(&binary);
    environment::shield(&mut command);
    command.args(["serve", "--background", "--starter-holds-lock", "--domain", &location.domain]);
    if location.chosen_by == ChosenBy::Caller {
        command.arg("--socket").arg(&location.socket);
    }
    run_starter(command.stdin(shared), TIMEOUT).map_err(|StarterFailed { why, advice, .. }| {
        Error::Unreachable(Unreachable::NotStarted { why: format!("{} serve: {why}", binary.display()), advice })
    })?;
    open(location)
}

/// Why a starter failed: the first line that it wrote to standard error, the others, and its exit code.
#[derive(Debug)]
pub(crate) struct StarterFailed {
    pub(crate) why: String,
    pub(crate) advice: Option<String>,
    pub(crate) code: Option<i32>,
}

/// Runs a starter, which exits when its daemon is ready.
pub(crate) fn run_starter(command: &mut Command, timeout: Duration) -> Result<(), StarterFailed> {
    let without_code = |why: String| StarterFailed { why, advice: None, code: None };
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = process::spawn(command).map_err(|source| {
        let error = Error::starting("it", source);
        StarterFailed { why: error.to_string(), advice: Some(error.advice()), code: None }
    })?;
    let deadline = Instant::now() + timeout;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(without_code(format!("it was not ready within {} s", timeout.as_secs())));
            }
            // This process ignores SIGCHLD, so the exit status is unknown. The caller finds out whether the start
            // succeeded.
            Err(_) => return Ok(()),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut said);
    }
    let said = said.trim();
    let (why, advice) = said.split_once('\n').unwrap_or((said, ""));
    let why = if why.is_empty() { status.to_string() } else { why.to_owned() };
    Err(StarterFailed { why, advice: Some(advice.to_owned()).filter(|it| !it.is_empty()), code: status.code() })
}

#[cfg(test)]
mod tests {
    use partywall_wire::{BrokerHello, Limit};

    use super::*;

    #[test]
    fn broker_of_another_user_is_used_only_by_its_name_in_a_directory_that_no_third_user_writes() {
        let directory = tempfile::tempdir().unwrap();
        let mut location = Location {
            socket: directory.path().join("broker.sock"),
            domain: "test".into(),
            chosen_by: ChosenBy::Caller,
        };
        let ours = own_user();
        let chmod = |mode| rustix::fs::chmod(directory.path(), rustix::fs::Mode::from_raw_mode(mode)).unwrap();
        chmod(0o711);
        assert_eq!(check_foreign(&location, ours), Ok(()));
        chmod(0o731);
        assert_eq!(check_foreign(&location, ours), Err(ForeignBroker::Writable { mode: 0o731 }));
        location.chosen_by = ChosenBy::Default;
        assert_eq!(check_foreign(&location, ours), Err(ForeignBroker::NotNamed));
    }

    // Holds 432.
    #[test]
    fn command_line_shows_no_secret_of_a_url() {
        for (word, shown) in [
            ("https://user:pw@h:1/a/b.bin?sig=SECRET", "https://h:1/a/b.bin"),
            ("--url=https://token@h?sig=SECRET", "--url=https://h"),
            ("https://user:p@w@h/a@b", "https://h/a@b"),
            ("curl https://a:b@h/x; curl s3://c:d@e", "curl https://h/x; curl s3://e"),
            ("https://h/x?to=https://user:pw@i/", "https://h/x"),
            ("hf://org/model@v1", "hf://org/model@v1"),
            ("user:pw@h?", "user:pw@h?"),
            ("://", "://"),
        ] {
            assert_eq!(without_secrets(word), shown);
        }
    }

    #[test]
    fn refusal_reaches_a_client_that_had_not_yet_sent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("broker.sock");
        let listener = socket::listen(&path).unwrap();
        let location = Location { socket: path.clone(), domain: "test".into(), chosen_by: ChosenBy::Caller };
        let call = open(&location).unwrap();
        let theirs = socket::accept(&listener).unwrap().unwrap();
        let refusal = Refusal::Limit { limit: Limit::Fds, allowed: 7, needed: 8, holders: Vec::new() };
        let hello = BrokerHello { instance: 1, outcome: Err(refusal) };
        socket::send(&theirs, &handshake::encode(&Speaker::new(VERSION), &hello, 0).unwrap(), &[]).unwrap();
        drop(theirs);

        let error = greet(call, &path, Role::Operator { attempt: 0 }).unwrap().outcome.unwrap_err();
        assert!(matches!(error, Error::LimitReached(LimitReached::Broker { .. })), "{error}");
    }
}
