//! The broker as a service: sockets and notifications of a service manager, and the check before a start.

use std::{
    fs,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::{DirBuilderExt, PermissionsExt},
            net::{SocketAddr, UnixDatagram, UnixListener},
        },
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use partywall_harness::{Output, Running, Sandbox, Signal, binary, eventually};
use partywall_os::process;
use rustix::net::{AddressFamily, SocketType};
use serde_json::json;

/// A socket on which a test listens as systemd does. Its file is removed at the end.
struct Socket {
    listener: OwnedFd,
    path: PathBuf,
}

impl Socket {
    fn listen(path: PathBuf) -> Self {
        create_directory(path.parent().unwrap());
        let listener = UnixListener::bind(&path).unwrap().into();
        Self { listener, path }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        fs::remove_file(&self.path).unwrap();
    }
}

fn create_directory(path: &Path) {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).unwrap();
}

/// Returns the command that serves with `file` as descriptor 3, as systemd starts it.
fn activated(sandbox: &Sandbox, file: &OwnedFd, pid: &str, count: &str) -> Command {
    // The shell keeps its pid when it becomes the broker.
    let mut command = sandbox.program("bash");
    // By this command alone: while another test starts a process, that must not have the socket, too.
    let number = process::inherit(&mut command, &[file.as_fd()]).unwrap()[0];
    let script = format!("exec 3<&{number}; export LISTEN_PID={pid} LISTEN_FDS={count}; exec \"$0\" serve");
    command.args(["-c", &script]).arg(binary());
    command
}

#[test]
fn activated_brokers_serve_the_managers_socket_and_leave_it() {
    let sandbox = Sandbox::new();
    let socket = Socket::listen(sandbox.socket());
    let early = sandbox.spawn(["status"]);
    let mut serve = Running::spawn(&mut activated(&sandbox, &socket.listener, "$$", "1"));
    assert!(serve.line().contains(&format!("pid {}", serve.pid())));
    early.wait().expect(0);
    assert_eq!(sandbox.json(["status"])["supervisor"], serve.pid());
    sandbox.run(["serve", "--replace"]).expect(0);
    assert_eq!(sandbox.json(["status"])["supervisor"], serve.pid());
    let refused = sandbox.run(["serve"]).expect(5);
    assert!(refused.stderr.contains(&format!("pid {}", serve.pid())), "{refused:?}");

    let stopped = sandbox.json(["stop"]);
    assert_eq!((&stopped["pid"], &stopped["how"]), (&json!(serve.pid()), &json!("asked")));
    assert_eq!(stopped["stale_socket_removed"], false);
    serve.wait().expect(0);
    assert!(socket.path.exists());

    let mut next = Running::spawn(&mut activated(&sandbox, &socket.listener, "$$", "1"));
    next.line();
    assert_eq!(sandbox.json(["status"])["supervisor"], next.pid());
    next.signal(Signal::TERM);
    next.wait().expect(0);
    assert!(socket.path.exists());
}

// Holds 144.
#[test]
fn socket_of_the_manager_whose_file_is_removed_is_replaced_by_one_of_the_broker() {
    let sandbox = Sandbox::new();
    let socket = Socket::listen(sandbox.socket());
    let mut serve = Running::spawn(&mut activated(&sandbox, &socket.listener, "$$", "1"));
    serve.line();
    fs::remove_file(&socket.path).unwrap();
    eventually("it is bound again", || socket.path.exists());
    let status = sandbox.json(["status"]);
    assert_eq!((&status["supervisor"], &status["restarts"]), (&json!(serve.pid()), &json!(0)));
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
    assert!(!socket.path.exists(), "this file is the broker's");
    fs::write(&socket.path, "for the end of the test").unwrap();
}

#[test]
fn sockets_that_cannot_be_served_are_refused_with_the_reason() {
    let sandbox = Sandbox::new();
    let socket = Socket::listen(sandbox.socket());
    let other = Socket::listen(sandbox.path().join("other/s.sock"));
    let file = OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let datagram = OwnedFd::from(UnixDatagram::unbound().unwrap());
    let silent = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let cases = [
        (&socket.listener, "some", "1", "LISTEN_PID is \"some\""),
        (&socket.listener, "$$", "two", "LISTEN_FDS is \"two\""),
        (&socket.listener, "$$", "2", "has passed 2 sockets"),
        (&other.listener, "$$", "1", "it listens at"),
        (&file, "$$", "1", "it is not a socket"),
        (&datagram, "$$", "1", "it is not a Unix stream socket"),
        (&silent, "$$", "1", "it does not listen"),
    ];
    for (file, pid, count, reason) in cases {
        let refused = Running::spawn(&mut activated(&sandbox, file, pid, count)).wait().expect(5);
        assert!(refused.stderr.contains(reason), "{reason}: {refused:?}");
    }
    let closed = "exec 3<&-; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" serve";
    let mut command = sandbox.program("bash");
    let refused = Running::spawn(command.args(["-c", closed]).arg(binary())).wait().expect(5);
    assert!(refused.stderr.contains("no socket as descriptor 3"), "{refused:?}");
}

#[test]
fn sockets_for_another_process_are_not_taken() {
    let sandbox = Sandbox::new();
    let other = Socket::listen(sandbox.path().join("other/s.sock"));
    let mut serve = Running::spawn(&mut activated(&sandbox, &other.listener, "1", "1"));
    serve.line();
    sandbox.run(["status"]).expect(0);
    serve.signal(Signal::TERM);
    let output = serve.wait().expect(0);
    assert!(output.stderr.contains("LISTEN_PID names process 1, not this one"), "{output:?}");
    assert!(!sandbox.socket().exists());
}

// Holds 13.
#[test]
fn broker_notifies_its_manager() {
    let sandbox = Sandbox::new();
    let path = sandbox.path().join("notify");
    let name = format!("partywall-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let sockets = [
        (UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap().to_owned()),
        (UnixDatagram::bind_addr(&address).unwrap(), format!("@{name}")),
    ];
    for (manager, variable) in sockets {
        manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let receive = || {
            let mut message = [0; 4096];
            let length = manager.recv(&mut message).expect("watchdog: no notification comes");
            String::from_utf8_lossy(&message[..length]).into_owned()
        };
        let serve = Running::spawn(sandbox.command(["serve"]).env("NOTIFY_SOCKET", &variable));
        let ready = receive();
        assert!(ready.starts_with("READY=1\nSTATUS=broker of domain \"default\""), "{ready}");
        // A worker may die, and the status stays.
        let worker = sandbox.json(["status"])["pid"].to_string();
        assert!(!ready.contains(&worker), "pid {worker} in {ready}");
        // A program that continues is ready again, as the same process.
        sandbox.run(["serve", "--replace"]).expect(0);
        let ready = receive();
        assert!(ready.starts_with("READY=1\n") && ready.contains(&format!("pid {}", serve.pid())), "{ready}");
        assert_eq!(fs::read_to_string(format!("/proc/{}/comm", serve.pid())).unwrap(), "partywall\n");
        serve.signal(Signal::TERM);
        assert_eq!(receive(), "STOPPING=1");
        serve.wait().expect(0);
    }
}

#[test]
fn broker_serves_without_a_manager_that_listens() {
    let sandbox = Sandbox::new();
    let missing = sandbox.path().join("missing");
    let mut serve = Running::spawn(sandbox.command(["serve"]).env("NOTIFY_SOCKET", &missing));
    serve.line();
    sandbox.run(["status"]).expect(0);
    serve.signal(Signal::TERM);
    let output = serve.wait().expect(0);
    assert!(output.stderr.contains("the service manager was not notified"), "{output:?}");
}

// Holds 128.
#[test]
fn check_reports_what_prevents_a_start_and_changes_nothing() {
    let sandbox = Sandbox::new();
    let directory = sandbox.socket().parent().unwrap().to_owned();
    let check = |more: &[&str]| sandbox.run([&["serve", "--check"], more].concat());
    let fine = check(&[]).expect(0);
    assert!(fine.text().contains("can listen at") && !directory.exists(), "{fine:?}");
    assert_eq!(sandbox.json(["serve", "--check"])["socket"], sandbox.socket().to_str().unwrap());
    let orphan = sandbox.path().join("no/such/s.sock");
    assert!(check(&["--socket", orphan.to_str().unwrap()]).expect(4).stderr.contains("does not exist"));
    let long = sandbox.path().join("x".repeat(120));
    assert!(check(&["--socket", long.to_str().unwrap()]).expect(2).stderr.contains("the limit is 107"));
    let few = check(&["--max-fds", "1000000000000"]).expect(5).stderr;
    assert!(few.contains("open files") && few.ends_with("more: partywall explain too-few-files\n"), "{few}");
    for (limits, why) in [
        (&["--max-message", "10"][..], "cannot serve with --max-message 10: the least is 65536"),
        (&["--max-seats-per-uid", "0"], "cannot serve with --max-seats-per-uid 0: the least is 1"),
        (&["--max-seats-per-uid", "9"], "cannot serve with --max-seats-per-uid 9: the most here is 8"),
        (&["--max-names", "5", "--max-names-per-uid", "9"], "--max-names-per-uid 9: the most here is 5"),
    ] {
        for mode in [&["serve", "--check"][..], &["serve"], &["serve", "--background"]] {
            let refused = sandbox.run([mode, limits].concat()).expect(2);
            assert!(refused.stderr.contains(why), "{refused:?}");
            // A broker in the background tells its starter its message and its advice.
            assert!(
                mode.contains(&"--background") || refused.stderr.contains("more: partywall explain bad-limit"),
                "{refused:?}"
            );
        }
    }

    create_directory(&directory);
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(check(&[]).expect(4).stderr.contains("mode is 0755"));
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(sandbox.socket(), "").unwrap();
    assert!(check(&[]).expect(5).stderr.contains("not a socket"));
    fs::remove_file(sandbox.socket()).unwrap();
    drop(UnixListener::bind(sandbox.socket()).unwrap());
    check(&[]).expect(0);
    assert!(sandbox.socket().exists(), "the socket of a dead broker is left for `serve`");

    sandbox.broker();
    let pid = sandbox.json(["status"])["supervisor"].as_u64().unwrap();
    assert!(check(&[]).expect(5).stderr.contains(&format!("pid {pid}")));
    sandbox.run(["serve", "--check", "--background"]).expect(2);
}

#[test]
fn stop_advises_no_signal_to_systemd() {
    let sandbox = Sandbox::new();
    let _socket = Socket::listen(sandbox.socket());
    let name = format!("/proc/{}/comm", std::process::id());
    let before = fs::read(&name).unwrap();
    fs::write(&name, "systemd").unwrap();
    let refused = sandbox.run(["stop"]).expect(4);
    fs::write(&name, before).unwrap();
    assert!(refused.stderr.contains("systemctl stop") && !refused.stderr.contains("kill"), "{refused:?}");
}

/// The units as they are installed, in a directory of the sandbox: `ExecStart=` names the program that was built.
fn installed_units(sandbox: &Sandbox) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd");
    let units = fs::read_dir(folder).unwrap().map(|unit| unit.unwrap().path());
    let install = |unit: PathBuf| {
        let text = fs::read_to_string(&unit).unwrap();
        let text = text.replace("/usr/local/bin/partywall", binary().to_str().unwrap());
        sandbox.file(unit.file_name().unwrap().to_str().unwrap(), text)
    };
    units.map(install).collect()
}

fn analyze(sandbox: &Sandbox, words: &[&str], units: &[&Path]) -> Output {
    Running::spawn(sandbox.program("systemd-analyze").args(words).args(units)).wait()
}

// Holds 127.
#[test]
fn needs_systemd_units_are_verified_by_systemd_itself() {
    let sandbox = Sandbox::new();
    let units = installed_units(&sandbox);
    assert_eq!(units.len(), 3);
    let verify = |unit: &Path| {
        let manager = if unit.ends_with("partywall-system.service") { "--system" } else { "--user" };
        // The manual pages are those of an installation.
        analyze(&sandbox, &[manager, "verify", "--man=no", "--recursive-errors=no"], &[unit])
    };
    for unit in &units {
        let verified = verify(unit).expect(0);
        assert_eq!((verified.text().as_str(), verified.stderr.as_str()), ("", ""), "{}", unit.display());
    }
    let text = fs::read_to_string(sandbox.path().join("partywall.service")).unwrap();
    let damaged = sandbox.file("damaged.service", text.replace("LimitNOFILE=524288", "LimitNOFILE=many"));
    assert!(verify(&damaged).stderr.contains("Failed to parse"));
}

/// Most of what this judges is possible for the system manager alone, so the user manager's unit has no limit.
// Holds 127.
#[test]
fn needs_systemd_system_unit_is_exposed_little() {
    let sandbox = Sandbox::new();
    installed_units(&sandbox);
    let unit = sandbox.path().join("partywall-system.service");
    // In tenths: systemd calls 4.0 and less "OK".
    let judge =
        |unit: &Path| analyze(&sandbox, &["security", "--offline=true", "--threshold=40", "--no-pager"], &[unit]);
    judge(&unit).expect(0);
    let text = fs::read_to_string(unit).unwrap();
    let exposed = sandbox.file("exposed.service", text.replace("CapabilityBoundingSet=\n", ""));
    judge(&exposed).expect(1);
}
