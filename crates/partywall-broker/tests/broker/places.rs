//! Where a broker listens, what it replaces, and how it ends.

use std::{
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use partywall_broker::{Broker, Config, Exit, StartError};
use partywall_os::{dir::PrivateDir, socket};
use partywall_wire::{Answer, BrokerHello, Call, Refusal, handshake};

use crate::common::{Framed, TestBroker, called};

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pw/d.sock");
    PrivateDir::open(socket.parent().unwrap(), true).unwrap();
    (dir, socket)
}

fn bind(socket: &Path) -> Result<Broker, StartError> {
    Broker::bind(Config::new(socket, "test", "0.0.0-test"))
}

// Holds 120.
#[test]
fn socket_of_a_dead_broker_is_replaced() {
    let (_dir, socket) = place();
    drop(UnixListener::bind(&socket).unwrap());
    let broker = bind(&socket).unwrap();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    drop(broker);
    bind(&socket).unwrap();
}

// Holds 120.
#[test]
fn live_broker_is_named_and_kept() {
    let broker = TestBroker::start();
    match bind(&broker.socket) {
        Err(error @ StartError::AlreadyRunning { pid, .. }) => {
            assert_eq!(pid, Some(std::process::id()));
            assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
        }
        other => panic!("{other:?}"),
    }
    broker.client();
}

#[test]
fn file_that_is_not_a_socket_is_not_touched() {
    let (_dir, socket) = place();
    std::fs::write(&socket, "precious").unwrap();
    assert!(matches!(bind(&socket), Err(StartError::NotASocket { .. })));
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
    std::fs::remove_file(&socket).unwrap();
    std::os::unix::fs::symlink("/dev/null", &socket).unwrap();
    assert!(matches!(bind(&socket), Err(StartError::NotASocket { .. })));
    assert!(std::fs::symlink_metadata(&socket).is_ok());
}

#[test]
fn directory_open_to_others_is_refused() {
    let (_dir, socket) = place();
    std::fs::set_permissions(socket.parent().unwrap(), PermissionsExt::from_mode(0o755)).unwrap();
    assert!(matches!(bind(&socket), Err(StartError::Directory { .. })));
    assert!(matches!(bind(Path::new("/nonexistent/a/b.sock")), Err(StartError::Directory { .. })));
}

#[test]
fn too_long_path_is_refused_by_name() {
    let (dir, _) = place();
    let socket = dir.path().join("pw").join("x".repeat(108));
    assert!(matches!(bind(&socket), Err(StartError::PathTooLong { .. })));
}

#[test]
fn starter_may_hold_the_lock() {
    let (_dir, socket) = place();
    let directory = PrivateDir::open(socket.parent().unwrap(), false).unwrap();
    let _lock = directory.lock(Instant::now()).unwrap().unwrap();
    let config = Config { starter_holds_lock: true, ..Config::new(&socket, "test", "0.0.0-test") };
    Broker::bind(config).unwrap();
}

#[test]
fn one_of_many_concurrent_starts_wins() {
    let (_dir, socket) = place();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let socket = socket.clone();
            std::thread::spawn(move || bind(&socket))
        })
        .collect();
    let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    assert!(outcomes.iter().all(|o| matches!(o, Ok(_) | Err(StartError::AlreadyRunning { .. }))));
}

#[test]
fn idle_broker_exits() {
    let (mut broker, lock) = TestBroker::with_idle_exit(Duration::from_millis(50));
    let mut client = broker.client();
    drop(lock);
    client.commit("kept", b"x", true);
    client.ask(Call::Bye).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let mut client = broker.client();
    client.ask(Call::Remove { name: called("kept"), deadline: None }).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(client.ask(Call::Ping), Ok(Answer::Done), "a member is there");
    client.ask(Call::Bye).unwrap();
    assert_eq!(broker.exit(), Exit::Idle);
    assert!(!broker.socket.exists());
}

#[test]
fn idle_broker_exits_after_its_directory_was_removed() {
    let (mut broker, _lock) = TestBroker::with_idle_exit(Duration::from_millis(20));
    std::fs::remove_dir_all(broker.socket.parent().unwrap()).unwrap();
    assert_eq!(broker.exit(), Exit::Idle);
}

#[test]
fn broker_does_not_exit_while_a_client_looks_for_it() {
    let (mut broker, lock) = TestBroker::with_idle_exit(Duration::from_millis(20));
    std::thread::sleep(Duration::from_millis(200));
    let mut client = broker.client();
    drop(lock);
    assert_eq!(client.ask(Call::Ping), Ok(Answer::Done));
    client.ask(Call::Bye).unwrap();
    assert_eq!(broker.exit(), Exit::Idle);
}

#[test]
fn stop_is_refused_while_in_use_and_leaves_nothing_when_forced() {
    let mut broker = TestBroker::start();
    let mut a = broker.client();
    let mut b = broker.client();
    b.commit("x", b"x", true);
    assert_eq!(a.ask(Call::Stop { force: false }), Err(Refusal::InUse { names: 1, members: 1 }));
    assert_eq!(a.ask(Call::Stop { force: true }), Ok(Answer::Done));
    assert!(!broker.socket.exists(), "the next broker may start at once");
    assert!(a.call.receive().is_none() && b.events.receive().is_none());
    assert_eq!(broker.exit(), Exit::Stopped);
}

#[test]
fn signal_ends_a_broker_in_use() {
    let mut broker = TestBroker::start();
    broker.client().commit("x", b"x", true);
    broker.stop();
    assert_eq!(broker.exit(), Exit::Signalled);
    assert!(!broker.socket.exists());
}

#[test]
fn socket_of_another_broker_is_not_removed() {
    let mut broker = TestBroker::start();
    std::fs::remove_file(&broker.socket).unwrap();
    let _other = UnixListener::bind(&broker.socket).unwrap();
    broker.stop();
    broker.exit();
    assert!(broker.socket.exists());
}

#[test]
fn ending_broker_refuses_unfinished_handshakes() {
    let mut broker = TestBroker::start();
    let mut connection = Framed::new(socket::connect(&broker.socket).unwrap());
    broker.client();
    broker.stop();
    broker.exit();
    let (body, _) = connection.receive().expect("an answer, not the end");
    let hello: BrokerHello = handshake::decode(&body).unwrap().decode().unwrap();
    assert_eq!(hello.outcome, Err(Refusal::ShuttingDown));
}
