//! The broker's life as a user of the command sees it: `serve`, `status`, `stop`.

use std::{
    fs,
    os::unix::{
        fs::{DirBuilderExt, PermissionsExt},
        net::UnixListener,
    },
    time::Duration,
};

use partywall_harness::{Running, Sandbox, Signal, eventually, pidfd_of};
use partywall_os::process;
use serde_json::{Value, json};

#[test]
fn foreground_broker_prints_its_socket_and_ends_at_sigterm() {
    let sandbox = Sandbox::new();
    for signal in [Signal::TERM, Signal::INT] {
        let mut serve = sandbox.spawn(["serve"]);
        let line = serve.line();
        let socket = sandbox.socket();
        assert!(line.contains(&format!("pid {}", serve.pid())), "{line}");
        assert!(line.contains(socket.to_str().unwrap()) && line.contains(sandbox.log().to_str().unwrap()), "{line}");
        assert_eq!(fs::symlink_metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(socket.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);

        let status = sandbox.json(["status"]);
        assert_eq!(status["supervisor"], serve.pid());
        assert_eq!(status["socket"], socket.to_str().unwrap());
        assert_eq!(status["log"], sandbox.log().to_str().unwrap());
        assert_eq!((&status["members"], &status["names"]), (&json!([]), &json!(0)));
        assert_eq!(status["domain"], "default");
        assert!(status["limits"]["bytes"].as_u64().unwrap() > 0 && status["uptime_seconds"].is_u64());

        serve.signal(signal);
        let output = serve.wait().expect(0);
        assert_eq!(output.text().lines().count(), 1, "{output:?}");
        assert_eq!(output.stderr, "");
        assert!(!socket.exists());
        assert!(fs::read_to_string(sandbox.log()).unwrap().contains("listening"));
    }
}

#[test]
fn foreground_broker_prints_json() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve", "--json"]);
    let ready: Value = serde_json::from_str(&serve.line()).unwrap();
    assert_eq!(ready["supervisor"], serve.pid());
    assert_eq!(ready["pid"], sandbox.json(["status"])["pid"]);
    assert_eq!(ready["socket"], sandbox.socket().to_str().unwrap());
    assert_eq!(ready["log"], sandbox.log().to_str().unwrap());
    assert_eq!((&ready["domain"], &ready["version"]), (&json!("default"), &json!(env!("CARGO_PKG_VERSION"))));
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

#[test]
fn closed_pipe_does_not_end_the_broker() {
    let sandbox = Sandbox::new();
    let shell = format!("exec {} serve >&-", partywall_harness::binary().display());
    let serve = Running::spawn(sandbox.program("sh").args(["-c", &shell]));
    eventually("the broker listens", || sandbox.run(["status"]).code == Some(0));
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

#[test]
fn second_broker_is_refused_with_the_pid_of_the_first() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let pid = sandbox.json(["status"])["supervisor"].as_u64().unwrap();
    for arguments in [&["serve"][..], &["serve", "--background"]] {
        let refused = sandbox.run(arguments).expect(5);
        let stderr = &refused.stderr;
        assert!(stderr.contains(&format!("pid {pid}")) && stderr.contains("partywall stop"), "{refused:?}");
        let refused = sandbox.run([arguments, &["--json"]].concat()).expect(5).json();
        assert_eq!(refused["error"]["code"], 5);
        assert!(refused["error"]["message"].as_str().unwrap().contains(&format!("pid {pid}")), "{refused}");
        assert!(refused["error"]["advice"].as_str().unwrap().contains("stop"), "{refused}");
    }
    assert_eq!(sandbox.json(["status"])["supervisor"], pid);
}

#[test]
fn daemon_is_ready_when_its_starter_returns() {
    let sandbox = Sandbox::new();
    let started = sandbox.json(["serve", "--background"]);
    let pid = started["supervisor"].as_u64().unwrap();
    assert_eq!(sandbox.json(["status"])["supervisor"], pid);
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session: u64 = stat.rsplit(')').next().unwrap().split_whitespace().nth(3).unwrap().parse().unwrap();
    assert_eq!(session, pid, "a session of its own");
    assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap().to_str(), Some("/"));
    for fd in 0..3 {
        assert_eq!(fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap().to_str(), Some("/dev/null"));
    }
    let stopped = sandbox.json(["stop"]);
    assert_eq!((&stopped["stopped"], &stopped["pid"], &stopped["how"]), (&json!(true), &json!(pid), &json!("asked")));
}

#[test]
fn idle_daemon_ends_and_idle_foreground_broker_does_only_on_request() {
    let sandbox = Sandbox::new();
    sandbox.run(["serve", "--background", "--idle-exit", "0.1"]).expect(0);
    eventually("the daemon leaves", || !sandbox.socket().exists() && sandbox.processes().is_empty());
    let mut serve = sandbox.spawn(["serve", "--idle-exit", "0.1"]);
    serve.line();
    serve.wait().expect(0);
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!serve.has_ended());
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
    sandbox.run(["serve", "--idle-exit", "soon"]).expect(2);
}

#[test]
fn unsafe_directory_is_named() {
    let sandbox = Sandbox::new();
    let directory = sandbox.path().join("run/partywall");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    for arguments in [&["serve"][..], &["serve", "--background"], &["put", "/etc/hostname", "x", "--device", "host"]] {
        let refused = sandbox.run(arguments).expect(4);
        assert!(refused.stderr.contains("0755") && refused.stderr.contains("chmod 700"), "{refused:?}");
    }
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
    // A file that is not a socket is left unchanged.
    let precious = sandbox.file("run/partywall/default.sock", "precious");
    let refused = sandbox.run(["serve"]).expect(5);
    assert!(refused.stderr.contains("not a socket"), "{refused:?}");
    let refused = sandbox.run(["stop"]).expect(5);
    assert!(refused.stderr.contains("is not a socket; it was not changed"), "{refused:?}");
    assert_eq!(fs::read(&precious).unwrap(), b"precious");
    fs::remove_file(precious).unwrap();
    let long = sandbox.path().join("x".repeat(100));
    let refused = sandbox.run(["serve", "--socket", long.to_str().unwrap()]);
    assert!(matches!(refused.code, Some(2 | 4)), "{refused:?}");
}

#[test]
fn broker_that_cannot_log_in_one_place_logs_beside_its_socket_or_serves_without_a_log() {
    let sandbox = Sandbox::new();
    let directory = sandbox.socket().parent().unwrap().to_owned();
    fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
    let beside = directory.join(sandbox.log().file_name().unwrap());
    let blocked = sandbox.file("blocked", "");
    let mut serve = Running::spawn(sandbox.command(["serve"]).env("XDG_STATE_HOME", &blocked));
    assert!(serve.line().contains(&format!("log in {}", beside.display())));
    assert_eq!(sandbox.json(["status"])["log"], beside.to_str().unwrap());
    serve.signal(Signal::TERM);
    let said = serve.wait().expect(0).stderr;
    assert!(said.contains(&format!("the log is in {}", beside.display())), "{said}");
    let log = Running::spawn(sandbox.command(["logs"]).env("XDG_STATE_HOME", &blocked)).wait().expect(0);
    assert!(log.text().contains("listening"), "{log:?}");

    fs::remove_file(&beside).unwrap();
    fs::create_dir(&beside).unwrap();
    let mut serve = Running::spawn(sandbox.command(["serve"]).env("XDG_STATE_HOME", blocked));
    assert!(serve.line().contains("no log"));
    assert_eq!(sandbox.json(["status"])["log"], Value::Null);
    assert!(sandbox.run(["status"]).expect(0).text().contains("log      none"));
    serve.signal(Signal::TERM);
    assert!(serve.wait().expect(0).stderr.contains("no log is written"));
    fs::remove_dir(beside).unwrap();
}

// Holds 131.
#[test]
fn brokers_at_two_sockets_write_two_logs_and_name_them() {
    let sandbox = Sandbox::new();
    let socket = |directory: &str| {
        let directory = sandbox.path().join(directory);
        fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
        directory.join("x.sock").to_str().unwrap().to_owned()
    };
    let by_hand = socket("a");
    let in_background = socket("b");
    let automatic = socket("c");
    let serve = ["serve", "--socket", &by_hand, "--json"];
    let mut serve = sandbox.spawn(serve);
    let ready: Value = serde_json::from_str(&serve.line()).unwrap();
    let background = sandbox.json(["serve", "--background", "--socket", &in_background]);
    sandbox.file("f", "x");
    sandbox.run(["put", "f", "x", "--device", "host", "--socket", &automatic]).expect(0);

    let said = |socket: &str| sandbox.json(["status", "--socket", socket])["log"].as_str().unwrap().to_owned();
    assert_eq!(ready["log"], said(&by_hand));
    assert_eq!(background["log"], said(&in_background));
    for socket in [&by_hand, &in_background, &automatic] {
        let log = fs::read_to_string(said(socket)).unwrap();
        let listening: Vec<_> = log.lines().filter(|line| line.contains("listening")).collect();
        assert!(matches!(listening[..], [line] if line.contains(socket.as_str())), "{socket}: {log}");
    }
    assert!(!sandbox.log().exists());
    for socket in [&by_hand, &in_background, &automatic] {
        sandbox.run(["stop", "--force", "--socket", socket]).expect(0);
    }
    serve.wait().expect(0);
}

#[test]
fn daemon_without_a_place_for_its_log_names_none() {
    let sandbox = Sandbox::new();
    fs::create_dir_all(sandbox.log()).unwrap(); // a directory where the file would be
    let directory = sandbox.socket().parent().unwrap().to_owned();
    fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
    let beside = directory.join(sandbox.log().file_name().unwrap());
    fs::create_dir(&beside).unwrap();
    let ready = sandbox.json(["serve", "--background"]);
    assert_eq!((&ready["log"], &sandbox.json(["status"])["log"]), (&Value::Null, &Value::Null));
    fs::remove_dir(beside).unwrap();
}

#[test]
fn log_level_is_chosen_by_the_environment() {
    let sandbox = Sandbox::new();
    let mut serve = Running::spawn(sandbox.command(["serve"]).env("PARTYWALL_LOG", "error"));
    serve.line();
    sandbox.run(["status"]).expect(0);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
    assert_eq!(fs::read_to_string(sandbox.log()).unwrap(), "");
}

#[test]
fn level_that_does_not_exist_is_reported_and_info_is_logged() {
    let sandbox = Sandbox::new();
    let mut serve = Running::spawn(sandbox.command(["serve"]).env("PARTYWALL_LOG", "partywall=loud"));
    serve.line();
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
    let log = fs::read_to_string(sandbox.log()).unwrap();
    assert!(log.contains("PARTYWALL_LOG is not a level") && log.contains("partywall=loud"), "{log}");
    assert!(log.contains(" INFO ") && !log.contains("DEBUG"), "{log}");
}

#[test]
fn readers_start_no_broker_and_name_the_socket() {
    let sandbox = Sandbox::new();
    let socket = sandbox.socket().to_str().unwrap().to_owned();
    for arguments in [&["status"][..], &["ls"], &["show", "x"], &["rm", "x"], &["abandon", "x"], &["get", "x", "out"]] {
        let refused = sandbox.run(arguments).expect(4);
        assert!(refused.stderr.contains(&socket) && refused.stderr.contains("partywall serve"), "{refused:?}");
        assert!(refused.stderr.contains("nothing is shared there yet"), "{refused:?}");
        assert_eq!(refused.text(), "");
        let refused = sandbox.run([arguments, &["--json"]].concat()).expect(4).json();
        assert_eq!(refused["error"]["code"], 4);
        assert_eq!(refused["error"]["kind"], "broker unreachable");
        assert!(refused["error"]["message"].as_str().unwrap().contains(&socket));
    }
    assert!(sandbox.processes().is_empty());
}

// Holds 155.
#[test]
fn directories_of_the_environment_are_absolute_paths_or_unset() {
    let sandbox = Sandbox::new();
    let own = format!("partywall-{}", rustix::process::geteuid().as_raw());
    let status = |runtime: &str, temporary: &str| {
        let mut command = sandbox.command(["status", "--domain", "nobody"]);
        Running::spawn(command.env("XDG_RUNTIME_DIR", runtime).env("TMPDIR", temporary)).wait().expect(4).stderr
    };
    let place = sandbox.path().to_str().unwrap();
    for (runtime, temporary, directory) in
        [("", "", "/tmp"), ("", "relative", "/tmp"), ("", place, place), ("relative", place, place)]
    {
        let refused = status(runtime, temporary);
        assert!(
            refused.contains(&format!(" at {directory}/{own}/nobody.sock: ")),
            "{runtime:?} {temporary:?} {refused}"
        );
    }
    assert!(status(place, "").contains(&format!(" at {place}/partywall/nobody.sock: ")));
}

#[test]
fn stopping_nothing_is_no_failure() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["stop"]).expect(0);
    assert!(output.text().contains("no broker runs at") && output.text().contains("default.sock"), "{output:?}");
    assert_eq!(sandbox.json(["stop"])["stopped"], false);
}

#[test]
fn socket_of_a_killed_broker_is_removed_by_stop() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    sandbox.kill_broker();
    assert!(sandbox.socket().exists());
    let refused = sandbox.run(["status"]).expect(4);
    assert!(refused.stderr.contains("no process listens"), "{refused:?}");
    let output = sandbox.run(["stop"]).expect(0);
    assert!(output.text().contains("a stale socket was removed"), "{output:?}");
    assert!(!sandbox.socket().exists());
    // A new broker also replaces a stale socket.
    drop(UnixListener::bind(sandbox.socket()).unwrap());
    sandbox.run(["serve", "--background"]).expect(0);
}

#[test]
fn stop_refuses_and_lists_names_and_members() {
    let sandbox = Sandbox::new();
    sandbox.file("weights.bin", [1; 5000]);
    sandbox.run(["put", "weights.bin", "kept/one", "--device", "host"]).expect(0);
    let mut holder = sandbox.spawn(["put", "weights.bin", "held", "--device", "host", "--hold"]);
    holder.line();

    let refused = sandbox.run(["stop"]).expect(5);
    for part in ["2 names", "1 member", "kept/one@1", "held@1", &format!("pid {}", holder.pid()), "--hold", "--force"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
    let refused = sandbox.run(["stop", "--json"]).expect(5).json();
    let names: Vec<_> = refused["names"].as_array().unwrap().iter().map(|name| &name["name"]).collect();
    assert_eq!(names, ["held", "kept/one"]);
    assert_eq!(refused["members"][0]["pid"], holder.pid());
    assert_eq!((&refused["members"][0]["state"], &refused["error"]["code"]), (&json!("alive"), &json!(5)));

    let stopped = sandbox.run(["stop", "--force"]).expect(0);
    assert!(stopped.text().contains("has ended"), "{stopped:?}");
    assert!(!sandbox.socket().exists());
    // The holder notices that its broker is gone, and reports it.
    let ended = holder.wait().expect(4);
    assert!(ended.stderr.contains("is gone"), "{ended:?}");
    sandbox.run(["status"]).expect(4);
}

// Holds 121.
#[test]
fn stop_refuses_for_a_member_alone() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let refused = sandbox.run(["stop"]).expect(5);
    assert!(refused.stderr.contains("0 names and 1 member\n"), "{refused:?}");
    assert!(refused.stderr.contains(&format!("pid {}", std::process::id())), "{refused:?}");
    let status = sandbox.json(["status"]);
    assert_eq!(status["members"].as_array().unwrap().len(), 1);
    assert!(sandbox.run(["status"]).expect(0).text().contains("1 member\n"));
    drop(domain);
    sandbox.run(["stop"]).expect(0);
}

// Holds 121.
#[test]
fn unresponsive_broker_is_named_and_survives() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["--json", "serve"]);
    let ready: Value = serde_json::from_str(&serve.line()).unwrap();
    let pid = serve.pid();
    assert_eq!(ready["supervisor"], pid);
    // A stopped worker answers no handshake and does not react to SIGTERM.
    let worker = pidfd_of(u32::try_from(ready["pid"].as_u64().unwrap()).unwrap());
    process::kill(&worker, Signal::STOP).unwrap();
    // At the same time, because the supervisor replaces a worker that has been silent for long enough.
    for stop in [&["stop"][..], &["stop", "--force"]].map(|arguments| sandbox.spawn(arguments)) {
        let refused = stop.wait().expect(4);
        for part in ["did not answer", &format!("(pid {pid})"), &format!("`kill {pid}`"), "loses all its names"] {
            assert!(refused.stderr.contains(part), "{part}: {refused:?}");
        }
        assert!(!serve.has_ended());
    }
    process::kill(&worker, Signal::CONT).unwrap();
    eventually("it answers again", || sandbox.run(["status"]).code == Some(0));
    assert_eq!(sandbox.json(["stop", "--force"])["pid"], pid);
    serve.wait().expect(0);
    assert!(!sandbox.socket().exists());
}

/// A broker with another protocol; its first message is readable in every version.
const OTHER_RELEASE: &str = r#"
import os, socket, struct, sys
os.makedirs(os.path.dirname(sys.argv[1]), mode=0o700, exist_ok=True)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
version = b"99.0.0"
body = b"PARTYWAL" + struct.pack("<II", 4242, os.getpid()) + bytes([len(version)]) + version
connections = []
while True:
    connection, _ = listener.accept()
    connections.append(connection)
    try:
        connection.sendall(struct.pack("<II", len(body), 0) + body)
    except OSError:
        pass  # it only wanted to know who listens
"#;

#[test]
fn needs_python_broker_of_another_release_is_named_and_ended_by_force() {
    let sandbox = Sandbox::new();
    let mut other = Running::spawn(sandbox.program("python3").args(["-c", OTHER_RELEASE]).arg(sandbox.socket()));
    assert_eq!(other.line(), "ready");
    let pid = format!("pid {}", other.pid());
    for arguments in [&["status"][..], &["stop"], &["put", "/etc/hostname", "x"]] {
        let refused = sandbox.run(arguments).expect(4);
        for part in ["99.0.0", "4242", env!("CARGO_PKG_VERSION"), &pid, "partywall stop --force"] {
            assert!(refused.stderr.contains(part), "{part}: {refused:?}");
        }
    }
    let stopped = sandbox.json(["stop", "--force"]);
    assert_eq!((&stopped["how"], &stopped["stale_socket_removed"]), (&json!("terminated"), &json!(true)));
    assert_eq!(other.wait().code, None, "ended by the signal");
    assert!(!sandbox.socket().exists());
}

/// A member without the library: it joins, forks, and exits, while its child keeps the connection.
const FORKY: &str = r#"
import array, os, socket, struct, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
pidfd = os.pidfd_open(os.getpid())
version = b"test"
body = b"PARTYWAL" + struct.pack("<II", int(sys.argv[2]), os.getpid()) + bytes([len(version)]) + version
body += bytes([5]) + b"forky" + b"\0\0\0\0"  # no operator, not simulated, nothing to resume or to repeat
s.sendmsg([struct.pack("<II", len(body), 1) + body],
          [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))])
hello = s.recvmsg(4096, socket.CMSG_SPACE(16))
os.close(pidfd)
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    time.sleep(600)
print(child, flush=True)
os._exit(0)
"#;

#[test]
fn needs_python_member_held_by_a_forked_child_is_shown_so() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let mut command = sandbox.program("python3");
    command.args(["-c", FORKY]).arg(sandbox.socket()).arg(partywall_wire::limits::PROTOCOL.to_string());
    let mut parent = Running::spawn(&mut command);
    let pid = parent.pid();
    let child: u32 = parent.line().parse().unwrap();
    parent.wait().expect(0);
    eventually("the state is seen", || {
        let status = sandbox.json(["status"]);
        status["members"].as_array().unwrap().iter().any(|m| m["pid"] == pid && m["state"] == "held_by_child")
    });
    let text = sandbox.run(["status"]).expect(0).text();
    assert!(text.contains("held by child") && text.contains("forky"), "{text}");
    process::kill(pidfd_of(child), Signal::KILL).unwrap();
    eventually("it is proved dead", || sandbox.json(["status"])["members"] == json!([]));
}

#[test]
fn limits_are_set_and_each_is_refused_by_name() {
    let sandbox = Sandbox::new();
    let flags = ["--max-bytes", "1MiB", "--max-names", "2", "--max-fds", "3", "--max-clients", "2"];
    let flags =
        [&flags[..], &["--max-timelines", "5", "--max-semaphores", "6", "--max-leases", "7", "--max-waits", "9"]]
            .concat();
    let mut serve = sandbox.spawn([&["serve"], &flags[..]].concat());
    serve.line();
    let limits = sandbox.json(["status"])["limits"].clone();
    for (key, value) in [
        ("bytes", 1 << 20),
        ("names", 2),
        ("fds", 3),
        ("clients", 2),
        ("timelines", 5),
        ("semaphores", 6),
        ("leases", 7),
        ("waits", 9),
        ("waits_per_member", 1024),
    ] {
        assert_eq!(limits[key], value, "{key}");
    }
    sandbox.file("small", [0; 10]);
    sandbox.file("large", vec![0; 2 << 20]);
    let put = |file, name| sandbox.run(["put", file, name, "--device", "host"]);
    let refused = put("large", "a").expect(5);
    assert!(refused.stderr.contains("limit on bytes is 1048576"), "{refused:?}");
    put("small", "a").expect(0);
    put("small", "b").expect(0);
    let refused = put("small", "c").expect(5);
    assert!(refused.stderr.contains("limit on names is 2"), "{refused:?}");
    assert!(refused.stderr.contains("the largest holders are pid"), "{refused:?}");
    let domains: Vec<_> = (0..2).map(|_| sandbox.domain_of_running()).collect();
    let refused = sandbox.run(["watch", "x"]).expect(5);
    assert!(refused.stderr.contains("limit on members is 2"), "{refused:?}");
    let holder = format!("the largest holders are pid {} of user", std::process::id());
    assert!(refused.stderr.contains(&holder) && refused.stderr.contains("(2 members)"), "{refused:?}");
    sandbox.run(["ls"]).expect(0);
    drop(domains);
    sandbox.run(["serve", "--max-bytes", "1KB"]).expect(2);
    sandbox.run(["stop", "--force"]).expect(0);
    serve.wait().expect(0);
}

// Holds 119.
#[test]
fn broker_with_too_few_files_for_memory_does_not_start_and_names_the_numbers() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    let limited = |files: u32, arguments: &str| {
        let shell = format!("ulimit -n {files}; exec {} {arguments}", partywall_harness::binary().display());
        Running::spawn(sandbox.program("sh").args(["-c", &shell])).wait()
    };
    // A put starts the broker by itself.
    for (files, arguments, numbers) in [
        (10_000, "serve --max-clients 6000", &["6000 members", "10000 open files", "25521", "--max-clients 2119"][..]),
        (10_000, "serve --background --max-clients 6000", &["10000 open files", "--max-clients 2119"]),
        (32, "serve", &["32 open files", "ulimit -Hn", "826"]),
        (32, "put f x --device host", &["could not be started", "32 open files", "ulimit -Hn", "826"]),
    ] {
        let refused = limited(files, arguments);
        assert!(matches!(refused.code, Some(4 | 5)), "{arguments}: {refused:?}");
        for number in numbers {
            assert!(refused.stderr.contains(number), "{arguments}: no {number:?} in {refused:?}");
        }
    }
    assert!(!sandbox.socket().exists());
    limited(826, "put f x --device host").expect(0);
}

#[test]
fn usage_errors_are_json_too() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["--json", "frob"]).expect(2).json();
    assert_eq!((&output["error"]["code"], &output["error"]["kind"]), (&json!(2), &json!("usage")));
    assert!(output["error"]["message"].as_str().unwrap().contains("frob"), "{output}");
    let output = sandbox.run(["put", "--json"]).expect(2).json();
    assert!(output["error"]["message"].as_str().unwrap().contains("NAME"), "{output}");
    let output = sandbox.run(["ls", "--frob"]).expect(2);
    assert!(output.stdout.is_empty() && output.stderr.contains("--frob"), "{output:?}");
    assert!(sandbox.run(["--help"]).expect(0).text().contains("Exit codes"));
    assert!(sandbox.run(["--json", "--version"]).expect(0).text().contains(env!("CARGO_PKG_VERSION")));
    sandbox.run(["--domain", "a/b", "ls"]).expect(2);
}

#[test]
fn domains_do_not_meet() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    sandbox.run(["--domain", "other", "put", "f", "a", "--device", "host"]).expect(0);
    sandbox.run(["ls"]).expect(4);
    let status = sandbox.json(["--domain", "other", "status"]);
    assert!(status["socket"].as_str().unwrap().ends_with("other.sock"), "{status}");
    assert!(status["log"].as_str().unwrap().contains("other.sock@"), "{status}");
    sandbox.run(["--domain", "other", "stop", "--force"]).expect(0);
}

#[test]
fn missing_directory_and_long_path_say_what_to_change() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    let missing = sandbox.path().join("not/there/x.sock");
    let private = sandbox.path().join("run"); // mode 0700
    let long = private.join("l".repeat(120));
    for command in [&["serve"][..], &["serve", "--background"], &["put", "f", "x", "--device", "host"]] {
        let run =
            |socket: &std::path::Path| sandbox.run([command, &["--socket", socket.to_str().unwrap()]].concat()).stderr;
        let parent = sandbox.path().join("not");
        let said = run(&missing);
        for part in [&format!("parent directory {} does not exist", parent.display()), "mkdir -p"] {
            assert!(said.contains(part), "{command:?}: {said}");
        }
        assert!(!said.contains("chmod"), "{said}");
        let said = run(&long);
        for part in [&format!("has {} bytes, and the limit is 107", long.as_os_str().len()), "shorter"] {
            assert!(said.contains(part), "{command:?}: {said}");
        }
        assert!(!said.contains("letters, digits"), "{said}");
    }
}

// Holds 114.
#[test]
fn daemon_blocks_no_signal_that_its_starter_blocks() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["serve", "--background"]);
    // As a thread of a library does that starts a broker.
    let started = partywall_os::thread::spawn("starter", move || command.output().unwrap()).unwrap();
    assert!(started.join().unwrap().status.success());
    let pid = sandbox.broker();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a status has SigBlk");
    let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
    // It blocks signals that would end it without a reason, but the starter blocked all.
    for signal in [Signal::INT, Signal::TERM, Signal::CHILD, Signal::TSTP, Signal::CONT] {
        assert_eq!(blocked >> (signal.as_raw() - 1) & 1, 0, "{signal:?} of {blocked:x}");
    }
}
