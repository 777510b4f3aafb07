//! Child processes: this test binary again, with an environment variable that selects the role.

use std::{
    io::Read,
    os::fd::OwnedFd,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use partywall_broker::{Broker, Config};
use partywall_harness::{Actor, copy_program, hostile::Hostile};
use partywall_os::{memfd, process};
use partywall_shm::pool::Pool;
use partywall_wire::{Answer, Call, ObjectInfo, ObjectKind, limits::MAX_FDS};
use rustix::process::{Resource, Rlimit, Signal};

use crate::{
    admission, attachments,
    common::{Client, called, open},
    hostile, pools, semaphores,
    timelines::User,
    unread,
};

/// A user without any files or privileges.
const NOBODY: u32 = 65_534;

const ROLE: &str = "PARTYWALL_TEST_ROLE";
const SOCKET: &str = "PARTYWALL_TEST_SOCKET";
/// The members of a broker with 1,024 open files that has room for a segment of many chunks.
pub(crate) const FEW_MEMBERS: u64 = 32;

const OPEN_FILES: &str = "PARTYWALL_TEST_OPEN_FILES";

/// What the lines of a role for its test begin with.
pub(crate) const SAYS: &str = "@";

/// Starts a process that plays a role, killed at the end of the test. What it says follows [`SAYS`].
pub(crate) fn start(role: &str, socket: &Path) -> Actor {
    spawn(this_program().env(ROLE, role).env(SOCKET, socket))
}

/// Starts a process to which the kernel applies the limits that it waives for root: as another user, if this one is
/// root.
pub(crate) fn start_unprivileged(role: &str) -> Actor {
    use std::os::unix::{fs::PermissionsExt, process::CommandExt};

    if !rustix::process::geteuid().is_root() {
        return start(role, Path::new(""));
    }
    // The other user may not be allowed to read the directory of this program.
    let directory = tempfile::Builder::new().prefix("pw-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("test");
    copy_program(&std::env::current_exe().unwrap(), &program);
    let mut command = Command::new(program);
    command.env(ROLE, role).env(SOCKET, "").env("TMPDIR", "/tmp").current_dir("/tmp").uid(NOBODY).gid(NOBODY);
    // The process keeps running when the directory is removed.
    spawn(&mut command)
}

/// Starts a broker with a limit of open files.
pub(crate) fn start_broker(socket: &Path, open_files: u64) -> Actor {
    let mut command = this_program();
    spawn(command.env(ROLE, "broker").env(SOCKET, socket).env(OPEN_FILES, open_files.to_string()))
}

/// Starts a broker whose limits follow from this limit of open files.
pub(crate) fn start_small_broker(socket: &Path, open_files: u64) -> Actor {
    let mut command = this_program();
    spawn(command.env(ROLE, "small broker").env(SOCKET, socket).env(OPEN_FILES, open_files.to_string()))
}

/// Starts a broker in its own PID namespace. Returns `None` if that is not allowed.
pub(crate) fn start_broker_elsewhere(socket: &Path) -> Option<Actor> {
    let unshare = |program: &Path| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program);
        command
    };
    let allowed = unshare(Path::new("true")).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !allowed {
        return None;
    }
    let mut command = unshare(&std::env::current_exe().unwrap());
    Some(spawn(command.env(ROLE, "broker").env(SOCKET, socket).env(OPEN_FILES, "1024")))
}

fn spawn(command: &mut Command) -> Actor {
    Actor::spawn(as_role(command))
}

/// A process that outlives its parent, killed at the end of the test.
pub(crate) struct Orphan(OwnedFd);

impl Orphan {
    pub(crate) fn of(pid: &str) -> Self {
        Self(process::pidfd(pid.parse().unwrap()).unwrap())
    }

    pub(crate) fn kill(&self) {
        process::kill(&self.0, Signal::KILL).unwrap();
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = process::kill(&self.0, Signal::KILL);
    }
}

/// Runs a child process of the tests. It is no test itself.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = std::path::PathBuf::from(std::env::var(SOCKET).unwrap());
    match role.as_str() {
        "holder" => holder(&socket, false),
        "holder under MPS" => holder(&socket, true),
        "idler under MPS" => idler(&socket),
        "faulty" => faulty(&socket),
        "parent" => parent(&socket),
        "leaver" => leaver(&socket),
        "publisher" => publisher(&socket),
        "writer" => writer(&socket),
        "signaller" => signaller(&socket),
        "waiter" => waiter(&socket),
        "forked writer" => forked_writer(&socket),
        "permit holder" => permit_holder(&socket),
        "attacher" => attacher(&socket),
        "block holder" => block_holder(&socket, false),
        "forked block holder" => block_holder(&socket, true),
        "forked permit holder" => forked_permit_holder(&socket),
        "acquirer" => acquirer(&socket),
        "acquirer once" => acquirer_once(&socket),
        "joiner" => admission::joiner(&socket, |what| say(what)),
        "operators" => admission::operators(&socket, |what| say(what), wait_to_proceed),
        "hog" => unread::hog(&socket, |what| say(what), wait_to_proceed),
        "deserter" => unread::deserter(&socket, |what| say(what), wait_to_proceed),
        "one connection" => {
            limit_open_files(1024);
            unread::others_are_served_beside_unread_answers();
            say("done");
        }
        "unfinished" => unfinished(&socket),
        "broker" => broker(&socket),
        "small broker" => small_broker(&socket),
        role => match role.split_once(' ').map(|(who, way)| (who, Hostile::named(way))) {
            Some(("beside", Some(way))) => {
                hostile::others_are_served_beside(way);
                say("done");
            }
            Some(("hostile", Some(way))) => {
                limit_open_files(1024);
                way.play(&socket, || say("begun"), again)
            }
            _ => panic!("{role}"),
        },
    }
}

/// Returns this program, which may have been deleted since it started.
fn this_program() -> Command {
    Command::new("/proc/self/exe")
}

/// Returns the command of another process in the same role.
fn again() -> Command {
    let mut command = this_program();
    as_role(&mut command);
    command
}

/// Has a command play the role that its environment names.
fn as_role(program: &mut Command) -> &mut Command {
    program.args(["--exact", "roles::role", "--nocapture", "--test-threads=1"])
}

fn say(what: impl std::fmt::Display) {
    partywall_harness::say(&format!("{SAYS}{what}"));
}

/// Waits for a line from the parent, or for its end.
fn wait_to_proceed() {
    if std::io::stdin().read(&mut [0]).unwrap() == 0 {
        std::process::exit(0);
    }
}

/// Holds one of every kind of object.
fn holder(socket: &Path, mps: bool) {
    let mut client = Client::join(socket);
    client.ask(Call::UsesGpu { mps: mps.then(|| "/pipe".into()) }).unwrap();
    client.commit("owned", b"owned", false);
    client.commit("kept", b"kept", true);
    client.open("theirs").0.unwrap();
    client.ask(Call::OpenOrBuild { name: called("building") }).unwrap();
    client.ask(open("never", true)).unwrap();
    say(client.welcome.member);
    wait_to_proceed();
}

/// Has opened a GPU and holds nothing.
fn idler(socket: &Path) {
    let mut client = Client::join(socket);
    client.ask(Call::UsesGpu { mps: Some("/pipe".into()) }).unwrap();
    say(client.welcome.member);
    wait_to_proceed();
}

/// Loses its context, and then releases its leases.
fn faulty(socket: &Path) {
    let mut client = Client::join(socket);
    let (_, lease) = client.commit("owned", b"owned", false);
    say(client.welcome.member);
    wait_to_proceed();
    client.ask(Call::ContextLost { gpu: None }).unwrap();
    client.ask(Call::Release { lease }).unwrap();
    say("released");
    wait_to_proceed();
    client.ask(Call::Bye).unwrap();
    drop(client);
    say("left");
    wait_to_proceed();
}

/// Has a child that holds its connection.
fn parent(socket: &Path) {
    let mut client = Client::join(socket);
    client.commit("owned", b"owned", false);
    client.ask(Call::OpenOrBuild { name: called("building") }).unwrap();
    let child = child_that_holds(&client);
    say(client.welcome.member);
    say(child);
    wait_to_proceed();
}

/// Closes its connection and keeps running.
fn leaver(socket: &Path) {
    let mut client = Client::join(socket);
    client.commit("owned", b"owned", false);
    say(client.welcome.member);
    wait_to_proceed();
    drop(client);
    say("hung up");
    wait_to_proceed();
}

/// Publishes legacy memory, which only this process keeps.
fn publisher(socket: &Path) {
    let mut client = Client::join(socket);
    client.ask(Call::Commit(crate::legacy::commit("theirs"))).unwrap();
    say("published");
    wait_to_proceed();
}

/// Signals the next value at each line.
fn writer(socket: &Path) {
    let mut user = User::join(socket);
    let opened = user.open("t", true).unwrap();
    say(opened.cell().value());
    loop {
        wait_to_proceed();
        opened.cell().signal(opened.cell().value() + 1).unwrap();
    }
}

/// Signals as fast as it can.
fn signaller(socket: &Path) {
    let mut user = User::join(socket);
    let opened = user.open("t", true).unwrap();
    say(opened.cell().value());
    loop {
        opened.cell().signal(opened.cell().value() + 1).unwrap();
    }
}

/// Waits for a value that is never signalled.
fn waiter(socket: &Path) {
    let mut user = User::join(socket);
    let opened = user.open("t", false).unwrap();
    say("waiting");
    panic!("{:?}", opened.wait(u64::MAX >> 4));
}

/// Signals once, and has a child that holds its connection.
fn forked_writer(socket: &Path) {
    let mut user = User::join(socket);
    user.open("t", true).unwrap().cell().signal(1).unwrap();
    let child = child_that_holds(&user.client);
    say(user.client.welcome.member);
    say(child);
    wait_to_proceed();
}

/// Takes all permits of a semaphore.
fn permit_holder(socket: &Path) {
    let user = semaphores::User::open(socket, "s", 3);
    (0..3).for_each(|_| drop(user.acquire()));
    say("held");
    wait_to_proceed();
}

/// Takes a permit, and has a child that holds its connection.
fn forked_permit_holder(socket: &Path) {
    let user = semaphores::User::open(socket, "s", 3);
    let _held = user.acquire();
    let child = child_that_holds(&user.client);
    say(user.client.welcome.member);
    say(child);
    wait_to_proceed();
}

/// Attaches a segment to the queue `q`.
fn attacher(socket: &Path) {
    let mut client = Client::join(socket);
    say(attachments::attach_weights(&mut client));
    wait_to_proceed();
}

/// Takes three blocks of a pool. If `forks`, has a child that holds its connection.
fn block_holder(socket: &Path, forks: bool) {
    let mut client = Client::join(socket);
    let (_, words) = pools::open(&mut client, "p").unwrap();
    let pool = Pool::map(&words[0]).unwrap();
    for _ in 0..3 {
        assert!(pool.try_take(client.welcome.row).is_some());
    }
    if forks {
        let child = child_that_holds(&client);
        say(client.welcome.member);
        say(child);
    } else {
        say("held");
    }
    wait_to_proceed();
}

/// Takes and gives back permits as fast as it can.
fn acquirer(socket: &Path) {
    let user = semaphores::User::open(socket, "s", 4);
    say("ready");
    loop {
        let held = [user.acquire(), user.acquire()];
        assert!(held.iter().all(|held| user.semaphore.free(held).is_ok()));
    }
}

/// Takes one permit of an existing semaphore.
fn acquirer_once(socket: &Path) {
    let mut client = Client::join(socket);
    let maximum = match client.ask(Call::InspectObject { kind: ObjectKind::Semaphore, name: called("s") }) {
        Ok(Answer::Object(detail)) => match detail.info {
            ObjectInfo::Semaphore(info) => info.maximum,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    let user = semaphores::User::open(socket, "s", maximum);
    let _held = user.acquire();
    say("held");
    wait_to_proceed();
}

/// Starts a process that outlives this one and keeps its connection open.
fn child_that_holds(client: &Client) -> u32 {
    rustix::io::fcntl_setfd(&client.call.socket, rustix::io::FdFlags::empty()).unwrap();
    #[expect(clippy::zombie_processes, reason = "it must outlive this process")]
    let child = Command::new("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    child.id()
}

fn limit_open_files(files: u64) {
    let limit = Rlimit { current: Some(files), maximum: Some(files) };
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
}

fn broker(socket: &Path) {
    let mut config = Config::new(socket, "test", "0.0.0-test");
    (config.limits.clients, config.limits.fds) = (Some(1000), Some(10_000));
    // Set after the start, because the broker would not start with so few files.
    serve(config, |config| {
        let broker = Broker::bind(config).unwrap();
        limit_open_files(open_files());
        broker
    });
}

/// Begins a message with as many descriptors as one may have.
fn unfinished(socket: &Path) {
    let mut client = Client::join(socket);
    let file = memfd::frozen("partywall:test", &[1; 8]).unwrap();
    let head = client.request(Call::Ping, MAX_FDS)[0];
    assert!(client.call.send(&[head], &[&file; MAX_FDS]));
    say("begun");
    wait_to_proceed();
}

fn small_broker(socket: &Path) {
    limit_open_files(open_files());
    let mut config = Config::new(socket, "test", "0.0.0-test");
    config.limits.clients = Some(FEW_MEMBERS);
    serve(config, |config| Broker::bind(config).unwrap());
}

fn open_files() -> u64 {
    std::env::var(OPEN_FILES).unwrap().parse().unwrap()
}

fn serve(mut config: Config, bind: impl FnOnce(Config) -> Broker) {
    config.settle = Duration::from_millis(20);
    config.handshake_timeout = Duration::from_secs(30);
    let broker = bind(config);
    let stop = broker.stop_handle().unwrap();
    // Ends with the test.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        stop.stop();
    });
    say("ready");
    broker.run().unwrap();
}
