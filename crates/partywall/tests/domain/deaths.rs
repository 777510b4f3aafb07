// Holds 9.
//! Processes that die, with what they held.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use partywall::{Domain, Error, OpenOrBuild, error::NotFound, info::MemberState};
use partywall_harness::place;

use super::{
    TIMEOUT,
    world::{Actor, World, commit, eventually, value},
};

/// The roles of the other processes.
#[allow(clippy::print_stdout)] // it is how they talk to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let wait = || {
        println!("ready");
        let _ = std::io::stdin().read(&mut [0]);
    };
    match role {
        "owner" => {
            let _segment = commit(&domain, "owned", 1, false);
            let _kept = commit(&domain, "kept", 2, true);
            wait();
        }
        "reader" => {
            let segment = domain.open("kept", TIMEOUT).unwrap();
            assert_eq!(value(&segment), 2);
            wait();
        }
        "builder" => {
            let OpenOrBuild::Build(claim) = domain.open_or_build("model", TIMEOUT).unwrap() else {
                panic!("another process builds");
            };
            let _build = claim.create(place()).allocate().unwrap();
            wait();
        }
        "forker" => {
            let _segment = commit(&domain, "owned", 1, false);
            let child = leave_child();
            println!("child {child}");
            wait();
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Starts a process that inherits this one's connection, as a forked child would, and lives on.
fn leave_child() -> u32 {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let fd: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
        if link.to_str().is_some_and(|link| link.starts_with("socket:")) {
            inherit(fd);
        }
    }
    Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap().id()
}

#[allow(unsafe_code)]
fn inherit(fd: i32) {
    // SAFETY: the file descriptor was open a moment ago and is only looked at; if it has been closed since, the call
    // fails.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::empty()).unwrap();
}

/// Runs what follows in PID, mount and user namespaces of its own, and kills it when the launcher is killed.
pub(crate) const NAMESPACE: [&str; 6] = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"];

/// Returns whether this machine allows namespaces; some machines refuse them to ordinary users.
pub(crate) fn can_make_namespaces() -> bool {
    let mut command = Command::new(NAMESPACE[0]);
    command.args(&NAMESPACE[1..]).arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn is_member(domain: &Domain, actor: &Actor) -> bool {
    domain.members().unwrap().iter().any(|member| member.pid == actor.pid())
}

// Holds 6.
#[test]
fn owned_names_of_a_killed_process_end_and_kept_ones_stay() {
    let world = World::new();
    let domain = world.connect();
    let mut owner = world.play("owner");
    let reader = domain.open("owned", TIMEOUT).unwrap();
    assert_eq!(domain.names().unwrap().len(), 2);
    owner.kill();
    reader.wait_withdrawn(TIMEOUT).unwrap();
    eventually("the end of the owner", || !is_member(&domain, &owner));
    assert!(matches!(domain.open("owned", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    assert_eq!(value(&reader), 1, "a reader keeps what it has");
    assert_eq!(value(&domain.open("kept", Duration::ZERO).unwrap()), 2);
}

#[test]
fn leases_of_a_killed_reader_are_released() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "kept", 2, true));
    let mut reader = world.play("reader");
    domain.remove("kept").unwrap();
    assert_eq!(domain.status().unwrap().versions, 1);
    reader.kill();
    eventually("the return of the lease", || domain.status().unwrap().versions == 0);
}

// Holds 5.
#[test]
fn waiter_takes_over_from_a_killed_builder() {
    let world = World::new();
    let domain = world.connect();
    let mut builder = world.play("builder");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| domain.open_or_build("model", TIMEOUT).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        builder.kill();
        assert!(matches!(waiter.join().unwrap(), OpenOrBuild::Build(_)));
    });
}

// Holds 99.
#[test]
fn surviving_forked_child_delays_the_proof_of_death() {
    let world = World::new();
    let domain = world.connect();
    let (mut forker, child) = world.play_after("forker", "child ");
    let child: u32 = child.parse().unwrap();
    forker.kill();
    let state = || domain.members().unwrap().into_iter().find(|m| m.pid == forker.pid()).map(|m| m.state);
    eventually("the discovery of the child", || state() == Some(MemberState::HeldByChild));
    assert_eq!(value(&domain.open("owned", Duration::ZERO).unwrap()), 1, "no proof, no reclaim");
    let pidfd = partywall_os::process::pidfd(child).unwrap();
    partywall_os::process::kill(&pidfd, rustix::process::Signal::KILL).unwrap();
    eventually("the proof of death", || state().is_none());
    assert!(matches!(domain.open("owned", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
}

// Holds 100.
#[test]
fn needs_namespaces_a_process_of_another_one_is_proved_dead_too() {
    assert!(can_make_namespaces(), "this machine does not let us make namespaces");
    let world = World::new();
    let domain = world.connect();
    let mut owner = world.play_through("owner", &NAMESPACE);
    let members = domain.members().unwrap();
    let theirs = members.iter().find(|member| member.member != domain.member()).unwrap();
    assert!(theirs.pid > 0 && theirs.pid != owner.pid() && theirs.pid != std::process::id());
    let reader = domain.open("owned", TIMEOUT).unwrap();
    owner.kill();
    reader.wait_withdrawn(TIMEOUT).unwrap();
    eventually("the end of the owner", || domain.members().unwrap().len() == 1);
}

/// What `unshare` makes anew for a process, besides the user namespace that permits it.
const KINDS: [&[&str]; 6] = [
    &[],
    &["--pid", "--fork", "--kill-child"],
    &["--ipc"],
    &["--mount"],
    &["--net"],
    &["--pid", "--ipc", "--mount", "--net", "--fork", "--kill-child"],
];

// Holds 129.
#[test]
fn needs_namespaces_readers_of_each_kind_are_served_and_their_leases_return() {
    assert!(can_make_namespaces(), "this machine does not let us make namespaces");
    for kinds in KINDS {
        let world = World::new();
        let domain = world.connect();
        drop(commit(&domain, "kept", 2, true));
        let launcher = [&["unshare", "--user", "--map-root-user"], kinds].concat();
        let mut reader = world.play_through("reader", &launcher);
        domain.remove("kept").unwrap();
        assert_eq!(domain.status().unwrap().versions, 1, "{kinds:?}: the reader holds it");
        reader.kill();
        eventually("the return of the lease", || domain.status().unwrap().versions == 0);
        eventually("the end of the reader", || domain.members().unwrap().len() == 1);
    }
}
