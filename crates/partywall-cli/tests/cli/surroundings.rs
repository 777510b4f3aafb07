//! What people, cleaners, logrotate and limits do to a broker: signals, removed files, umasks, and a home that does not
//! exist.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    process::Command,
};

use partywall_harness::{
    Running, Sandbox, Signal, WATCHDOG, assert_contains, binary, commit, eventually, kill, pidfd_of,
};
use partywall_os::process;
use rustix::fs::FlockOperation;
use serde_json::{Value, json};

fn mode(path: impl AsRef<Path>) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

/// A shell that sets something for the rest of its command line, which is `partywall` with these arguments.
fn after(sandbox: &Sandbox, setting: &str, arguments: &[&str]) -> Command {
    let mut shell = sandbox.program("bash");
    shell.args(["-c", &format!("{setting}; exec \"$0\" \"$@\"")]).arg(binary()).args(arguments);
    shell
}

/// The worker of a supervisor, without asking the broker.
fn worker_of(supervisor: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// How often a process has waited for something.
fn waits(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or_default()
}

// Holds 136.
#[test]
fn deaths_after_idle_service_do_not_end_the_domain() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "weights");
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    sandbox.run(["put", "f", "kept", "--device", "host"]).expect(0);
    let supervisor = serve.pid();
    let mut killed = BTreeSet::new();
    for _ in 0..6 {
        let mut worker = None;
        eventually("a worker runs", || {
            worker = worker_of(supervisor).filter(|pid| !killed.contains(pid));
            worker.is_some()
        });
        // Between these waits the supervisor has looked twice, and nobody has asked the worker anything.
        let before = waits(supervisor);
        eventually("the supervisor has looked", || waits(supervisor) >= before + 3);
        let worker = worker.unwrap();
        killed.insert(worker);
        kill(worker);
    }
    sandbox.run(["get", "kept", "copy"]).expect(0);
    assert_eq!(fs::read(sandbox.path().join("copy")).unwrap(), b"weights");
    assert_eq!(sandbox.json(["status"])["restarts"], 6);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 143.
#[test]
fn stray_signals_end_neither_supervisor_nor_worker_and_are_logged() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let kept = commit(&domain, "kept", 1);
    let status = domain.status().unwrap();
    let processes = [status.supervisor.unwrap(), status.pid];
    let signals = [
        Signal::HUP,
        Signal::QUIT,
        Signal::USR1,
        Signal::USR2,
        Signal::ALARM,
        Signal::VTALARM,
        Signal::PROF,
        Signal::IO,
        Signal::POWER,
        Signal::STKFLT,
        Signal::XCPU,
    ];
    for process in processes {
        for signal in signals {
            process::kill(pidfd_of(process), signal).unwrap();
        }
        // Nothing depends on these two.
        for signal in [Signal::PIPE, Signal::XFSZ] {
            process::kill(pidfd_of(process), signal).unwrap();
        }
        let log = || fs::read_to_string(sandbox.log()).unwrap();
        let is_logged = |signal: &Signal| {
            let number = format!("signal={} ", signal.as_raw());
            log().contains(if *signal == Signal::HUP { "SIGHUP: the log" } else { &number })
        };
        eventually("all are in the log", || signals.iter().all(is_logged));
        fs::remove_file(sandbox.log()).unwrap();
        // Whatever was noted late is noted now, too.
        process::kill(pidfd_of(processes[0]), Signal::HUP).unwrap();
        eventually("the next log has begun", || sandbox.log().exists());
    }
    let now = domain.status().unwrap();
    assert_eq!((now.supervisor, now.pid, now.restarts), (status.supervisor, status.pid, 0));
    kill(status.pid);
    assert_eq!(domain.status().unwrap().restarts, 1, "its supervisor still looks after it");
    assert_contains(&kept, 1);
}

// Holds 144.
#[test]
fn removed_socket_is_bound_again_and_no_second_broker_starts() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    let domain = sandbox.domain();
    let kept = commit(&domain, "kept", 1);
    let before = domain.status().unwrap();
    let socket = sandbox.socket();
    let remove_file = || fs::remove_file(&socket).unwrap();
    let remove_directory = || fs::remove_dir_all(socket.parent().unwrap()).unwrap();
    let mut restarts = 0;
    for (number, remove) in [&remove_file as &dyn Fn(), &remove_directory].into_iter().enumerate() {
        for dies in [false, true] {
            let pid = domain.status().unwrap().pid;
            remove();
            if dies {
                kill(pid);
                restarts += 1;
            }
            let put = |n: u32| sandbox.spawn(["put", "f", &format!("new/{number}/{dies}/{n}"), "--device", "host"]);
            // Each of them would start a broker if there was none.
            for starter in [put(1), put(2), put(3)] {
                starter.wait().expect(0);
            }
            let now = domain.status().unwrap();
            assert_eq!((now.instance, now.supervisor, now.restarts), (before.instance, before.supervisor, restarts));
            assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
        }
    }
    assert_eq!(domain.names().unwrap().len(), 1 + 12);
    let listening = partywall_os::socket::listener_of(&socket);
    assert_eq!(listening, before.supervisor);
    // Another worker listens at the same socket, too.
    kill(domain.status().unwrap().pid);
    sandbox.run(["ls"]).expect(0);
    let log = fs::read_to_string(sandbox.log()).unwrap();
    assert!(log.contains("the socket is bound again"), "{log}");
    drop(kept);
    drop(domain);
    sandbox.run(["stop", "--force"]).expect(0);
    assert!(!socket.exists(), "the file that was bound again is removed at the end");
}

// Holds 144.
#[test]
fn broker_whose_socket_was_removed_is_not_joined_by_a_second_one() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    // A stopped supervisor does not bind it again.
    serve.signal(Signal::STOP);
    eventually("it is stopped", || serve.is_stopped());
    fs::remove_file(sandbox.socket()).unwrap();
    let refused = sandbox.run(["serve"]).expect(5);
    assert!(refused.stderr.contains(&format!("pid {} listens already", serve.pid())), "{refused:?}");
    assert!(refused.stderr.ends_with("more: partywall explain socket-exists\n"), "{refused:?}");
    // Nor by one that comes by another path to the same directory.
    let link = sandbox.path().join("link");
    let directory = sandbox.socket().parent().unwrap().to_owned();
    std::os::unix::fs::symlink(directory.parent().unwrap(), &link).unwrap();
    let beside = link.join(directory.file_name().unwrap()).join(sandbox.socket().file_name().unwrap());
    let refused = Running::spawn(sandbox.command(["serve", "--socket"]).arg(&beside)).wait().expect(5);
    assert!(refused.stderr.contains(&format!("pid {} listens already", serve.pid())), "{refused:?}");
    assert!(!sandbox.socket().exists());
    serve.signal(Signal::CONT);
    eventually("it is bound again", || sandbox.socket().exists());
    sandbox.run(["status"]).expect(0);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 144.
#[test]
fn socket_is_bound_again_in_place_of_a_dead_one_and_beside_signals() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    // A stopped supervisor leaves time for that.
    serve.signal(Signal::STOP);
    eventually("it is stopped", || serve.is_stopped());
    fs::remove_file(sandbox.socket()).unwrap();
    // As another broker leaves it that is killed.
    drop(UnixListener::bind(sandbox.socket()).unwrap());
    assert!(UnixStream::connect(sandbox.socket()).is_err());
    serve.signal(Signal::CONT);
    eventually("it is bound again", || {
        // More often than the supervisor polls.
        serve.signal(Signal::USR1);
        UnixStream::connect(sandbox.socket()).is_ok()
    });
    sandbox.run(["status"]).expect(0);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 131.
#[test]
fn log_goes_on_after_it_was_rotated_by_another_program() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    let log = sandbox.log();
    let mut follower = sandbox.spawn(["logs", "-f"]);
    assert!(follower.line().contains("listening"));
    fs::rename(&log, log.with_extension("log.1")).unwrap();
    serve.signal(Signal::HUP);
    while !follower.line().contains("SIGHUP: the log goes on in this file") {}
    assert!(fs::read_to_string(&log).unwrap().contains("SIGHUP"));
    let all = sandbox.run(["logs"]).expect(0).text();
    assert!(all.contains("listening") && all.contains("SIGHUP"), "{all}");
    // Without a signal, and with its directory.
    fs::remove_dir_all(log.parent().unwrap()).unwrap();
    while !follower.line().contains("renamed or removed") {}
    assert_eq!((mode(&log), mode(log.parent().unwrap())), (0o600, 0o700));
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
    assert!(follower.wait().expect(0).text().contains("has ended exit="));
}

// Holds 131.
#[test]
fn log_that_another_broker_writes_is_left_to_it() {
    let sandbox = Sandbox::new();
    let log = sandbox.log();
    fs::create_dir_all(log.parent().unwrap()).unwrap();
    let of_another = fs::File::create(&log).unwrap();
    let lock = |file: &fs::File| rustix::fs::fcntl_lock(file, FlockOperation::NonBlockingLockExclusive);
    lock(&of_another).unwrap();
    let mut serve = sandbox.spawn(["serve", "--json"]);
    let ready: Value = serde_json::from_str(&serve.line()).unwrap();
    let beside = sandbox.socket().parent().unwrap().join(log.file_name().unwrap());
    let status = sandbox.json(["status"]);
    assert_eq!([&ready["log"], &status["log"]], [beside.to_str().unwrap(); 2]);
    assert!(sandbox.run(["logs"]).expect(0).text().contains("listening"));

    // Its own log is its alone, with each worker and after a rotation.
    let is_free = || lock(&fs::File::options().append(true).open(&beside).unwrap()).is_ok();
    assert!(!is_free());
    kill(u32::try_from(status["pid"].as_u64().unwrap()).unwrap());
    eventually("the next worker serves", || sandbox.json(["status"])["restarts"] == 1);
    serve.signal(Signal::HUP);
    let says = |what: &str| fs::read_to_string(&beside).is_ok_and(|log| log.contains(what));
    eventually("it has noted the signal", || says("SIGHUP"));
    assert!(!is_free());
    fs::rename(&beside, beside.with_extension("log.1")).unwrap();
    serve.signal(Signal::USR1);
    eventually("the next log has begun", || says("signal=10"));
    assert!(!is_free());
    serve.signal(Signal::TERM);
    let ended = serve.wait().expect(0);
    assert!(ended.stderr.contains("another broker writes this file"), "{ended:?}");
    assert!(is_free());
    assert_eq!(fs::read(&log).unwrap(), b"");
    // Without a broker, what was written last is shown.
    assert!(sandbox.run(["logs"]).expect(0).text().contains("has ended exit="));
    drop(of_another);
    sandbox.broker();
    assert_eq!(sandbox.json(["status"])["log"], log.to_str().unwrap());
    for file in [&beside, &beside.with_extension("log.1")] {
        fs::remove_file(file).unwrap();
    }
}

// Holds 131.
#[test]
fn needs_namespaces_brokers_at_one_path_in_two_mount_namespaces_write_two_logs() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let directory = sandbox.socket().parent().unwrap().to_owned();
    let script =
        format!("mount -t tmpfs -o mode=700 none {}; exec \"$PARTYWALL_BIN\" serve --json", directory.display());
    let mut inside = sandbox.program("unshare");
    inside.args(["--user", "--map-root-user", "--mount", "sh", "-ec", &script]);
    let mut inside = Running::spawn(&mut inside);
    let ready: Value = serde_json::from_str(&inside.line()).unwrap();
    let beside = directory.join(sandbox.log().file_name().unwrap());
    assert_eq!((&ready["log"], &sandbox.json(["status"])["log"]), (&json!(beside), &json!(sandbox.log())));
    inside.signal(Signal::TERM);
    inside.wait().expect(0);
    assert!(!beside.exists(), "it was in the other directory");
    assert_eq!(fs::read_to_string(sandbox.log()).unwrap().matches("listening").count(), 1);
}

// Holds 145.
#[test]
fn socket_whose_directory_cannot_be_made_again_is_named_to_all_who_look_for_it() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    let above = sandbox.path().join("above");
    fs::create_dir(&above).unwrap();
    let socket = above.join("pw").join("x.sock");
    let at = ["--socket", socket.to_str().unwrap()];
    let mut serve = sandbox.spawn([&["serve", "--json"], &at[..]].concat());
    let ready: Value = serde_json::from_str(&serve.line()).unwrap();
    fs::remove_dir_all(&above).unwrap();
    let missing = format!("its parent directory {} does not exist", above.display());
    for arguments in [&["put", "f", "x", "--device", "host"][..], &["ls"], &["status"]] {
        let refused = sandbox.run([arguments, &at[..]].concat()).expect(4);
        let broker = format!("the broker with pid {} cannot be reached", serve.pid());
        assert!(refused.stderr.contains(&broker) && refused.stderr.contains(&missing), "{refused:?}");
    }
    let log = || fs::read_to_string(ready["log"].as_str().unwrap()).unwrap();
    eventually("the log has the reason", || log().contains(&missing));
    // Another poll of the supervisor says nothing new.
    serve.signal(Signal::USR1);
    eventually("it is poked", || log().contains("signal=10"));
    assert_eq!(log().matches(&missing).count(), 1);
    fs::create_dir(&above).unwrap();
    eventually("it is bound again", || socket.exists());
    sandbox.run([&["put", "f", "x", "--device", "host"], &at[..]].concat()).expect(0);

    // A directory that others may enter is not taken back.
    let directory = socket.parent().unwrap();
    fs::remove_file(&socket).unwrap();
    fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = sandbox.run([&["ls"], &at[..]].concat()).expect(4);
    assert!(refused.stderr.contains("its mode is 0777"), "{refused:?}");
    eventually("the log has the reason", || log().contains("its mode is 0777"));
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).unwrap();
    eventually("it is bound again", || socket.exists());
    sandbox.run([&["get", "x", "-"], &at[..]].concat()).expect(0);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 130.
#[test]
fn umask_of_the_starter_changes_no_mode() {
    for umask in ["0000", "0177", "0277", "0777"] {
        for arguments in [&["put", "f", "x", "--device", "host"][..], &["serve", "--background"]] {
            let sandbox = Sandbox::new();
            sandbox.file("f", "x");
            let mut started = after(&sandbox, &format!("umask {umask}"), arguments);
            Running::spawn(started.env_remove("XDG_STATE_HOME")).wait().expect(0);
            let socket = sandbox.socket();
            let status = sandbox.json(["status"]);
            let log = Path::new(status["log"].as_str().unwrap());
            let home = sandbox.path().join("home");
            assert!(log.starts_with(home.join(".local/state/partywall")), "{status}");
            assert_eq!((mode(&socket), mode(log)), (0o600, 0o600), "{umask}");
            let made = [socket.parent(), log.parent(), Some(&home.join(".local/state")), Some(&home.join(".local"))];
            for directory in made.into_iter().flatten() {
                assert_eq!(mode(directory), 0o700, "{umask}: {}", directory.display());
            }
        }
    }
}

// Holds 131.
#[test]
fn log_is_beside_the_socket_if_the_home_does_not_exist() {
    let sandbox = Sandbox::new();
    let home = sandbox.path().join("no/home");
    let homeless = |arguments: &[&str]| {
        let mut command = sandbox.command(arguments);
        command.env("HOME", &home).env_remove("XDG_STATE_HOME");
        Running::spawn(&mut command).wait()
    };
    let said = homeless(&["serve", "--background"]).expect(0).text();
    let log = sandbox.socket().parent().unwrap().join(sandbox.log().file_name().unwrap());
    assert!(said.contains(&format!("log in {}", log.display())), "{said}");
    assert_eq!(mode(&log), 0o600);
    sandbox.run(["stop"]).expect(0);
    assert!(homeless(&["logs"]).expect(0).text().contains("listening"));
    assert!(!sandbox.path().join("no").exists());
    fs::remove_file(log).unwrap();
}

// Holds 126.
#[test]
fn broker_that_cannot_start_says_why_where_it_was_started() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    let foreground = &["serve"][..];
    for arguments in [foreground, &["serve", "--background"], &["put", "f", "x", "--device", "host"]] {
        let refused = Running::spawn(&mut after(&sandbox, "ulimit -f 2000", arguments)).wait();
        assert!(matches!(refused.code, Some(4 | 5)), "{refused:?}");
        for part in ["cannot start", "File too large", "ulimit -f", "2000"] {
            assert!(refused.stderr.contains(part), "{part}: {refused:?}");
        }
        assert!(!refused.stderr.contains("lost,") && !refused.stderr.contains("its log"), "{refused:?}");
        assert!(!sandbox.socket().exists());
    }
    // Nothing of that is left.
    let domain = sandbox.domain();
    assert_contains(&commit(&domain, "x", 1), 1);
    assert_eq!(domain.open("x", WATCHDOG).unwrap().version(), 1);
}
