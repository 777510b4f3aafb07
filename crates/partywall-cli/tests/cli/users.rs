//! Several users of one broker, with the real binary: who is admitted, and what each may do.
#![allow(unsafe_code, reason = "a process in two groups")]

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
};

use partywall_harness::{Output, Running, Sandbox, Signal, binary, copy_program, eventually};
use rustix::process::{Gid, Uid};
use serde_json::Value;

/// Users and groups without any rights. No account has these numbers.
const ALICE: u32 = 65_531;
const BOB: u32 = 65_532;
const CAROL: u32 = 65_533;
const TEAM: u32 = 65_534;

/// A directory that every user can enter, with a copy of the program and a directory of Alice's for sockets.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "only root starts processes of other users");
        let directory = tempfile::Builder::new().prefix("pw-").tempdir_in("/tmp").unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        copy_program(&binary(), &directory.path().join("partywall"));
        let host = Self { directory };
        host.make_directory("run", ALICE, 0o711);
        for user in [ALICE, BOB, CAROL] {
            host.make_directory(&user.to_string(), user, 0o700);
        }
        host
    }

    fn make_directory(&self, name: &str, user: u32, mode: u32) -> PathBuf {
        let path = self.directory.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        chown(&path, Some(user), Some(user)).unwrap();
        path
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("run/s.sock")
    }

    fn log(&self) -> String {
        let state = self.directory.path().join(format!("{ALICE}/.local/state/partywall"));
        fs::read_dir(state).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect()
    }

    fn command(&self, user: u32, group: u32, socket: &Path, arguments: &[&str]) -> Command {
        let mut command = self.command_as_root(user, socket, arguments);
        command.uid(user).gid(group);
        command
    }

    /// Returns a command of a user that also belongs to the group `other`.
    fn command_in_two_groups(&self, user: u32, other: u32, arguments: &[&str]) -> Command {
        let mut command = self.command_as_root(user, &self.socket(), arguments);
        let [uid, gid, other] = [user, user, other];
        let become_user = move || {
            rustix::thread::set_thread_groups(&[Gid::from_raw(other)])?;
            let gid = Gid::from_raw(gid);
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            let uid = Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            Ok(())
        };
        // SAFETY: the closure only makes system calls on numbers that it owns. It takes no lock and allocates nothing:
        // an errno becomes an error without a heap allocation.
        unsafe { command.pre_exec(become_user) };
        command
    }

    /// Returns a command in a user's directory, which must become that user.
    fn command_as_root(&self, user: u32, socket: &Path, arguments: &[&str]) -> Command {
        let home = self.directory.path().join(user.to_string());
        let mut command = Command::new(self.directory.path().join("partywall"));
        command.env_clear().env("HOME", &home).env("TMPDIR", &home).env("PARTYWALL_SOCKET", socket);
        command.args(arguments).current_dir("/");
        command
    }

    fn run(&self, user: u32, arguments: &[&str]) -> Output {
        Running::spawn(&mut self.command(user, user, &self.socket(), arguments)).wait()
    }

    fn json(&self, user: u32, arguments: &[&str]) -> Value {
        self.run(user, &[&["--json"], arguments].concat()).expect(0).json()
    }

    /// Starts Alice's broker.
    fn serve(&self, arguments: &[&str]) -> Running {
        let mut serve =
            Running::spawn(&mut self.command(ALICE, ALICE, &self.socket(), &[&["serve"], arguments].concat()));
        serve.line();
        serve
    }

    /// Writes a file that a user can put.
    fn file(&self, user: u32, bytes: usize) -> String {
        let path = self.directory.path().join(format!("{user}/x.bin"));
        fs::write(&path, vec![7; bytes]).unwrap();
        chown(&path, Some(user), Some(user)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn put(&self, user: u32, name: &str, more: &[&str]) -> Output {
        let file = self.file(user, 64);
        self.run(user, &[&["put", &file, name, "--device", "host"], more].concat())
    }
}

/// Fails unless the message names both users and contains these words.
#[track_caller]
fn refused(output: Output, users: [u32; 2], words: &[&str]) {
    let users = users.map(|user| user.to_string());
    let stderr = &output.stderr;
    assert_ne!(output.code, Some(0), "{output:?}");
    let words = users.iter().map(String::as_str).chain(words.iter().copied());
    words.for_each(|word| assert!(stderr.contains(word), "{word:?} in {stderr}"));
}

// Holds 147, 153.
#[test]
fn needs_root_admitted_user_gets_what_is_shared_and_nothing_else() {
    let host = Host::new();
    let serve = host.serve(&["--allow-uid", &BOB.to_string()]);
    assert_eq!(fs::metadata(host.socket()).unwrap().mode() & 0o777, 0o666);
    refused(host.run(CAROL, &["ls"]), [ALICE, CAROL], &["does not admit", "--allow-uid 65533"]);

    host.put(ALICE, "private", &[]).expect(0);
    host.put(ALICE, "shared", &["--shared"]).expect(0);
    host.put(BOB, "theirs", &["--shared"]).expect(0);
    let get = |user, name: &str| {
        let to = host.directory.path().join(format!("{user}/got.bin"));
        let output = host.run(user, &["get", name, to.to_str().unwrap(), "--force"]);
        (output, fs::read(to).ok())
    };
    assert_eq!(get(BOB, "shared").1, Some(vec![7; 64]));
    assert_eq!(get(ALICE, "theirs").1, Some(vec![7; 64]));
    refused(get(BOB, "private").0, [ALICE, BOB], &["not shared", "--shared"]);
    refused(host.run(BOB, &["show", "private"]), [ALICE, BOB], &["not shared"]);
    for name in ["private", "shared"] {
        refused(host.put(BOB, name, &[]), [ALICE, BOB], &["cannot create"]);
        refused(host.run(BOB, &["rm", name]), [ALICE, BOB], &["cannot remove"]);
    }
    refused(host.run(ALICE, &["rm", "theirs"]), [BOB, ALICE], &["cannot remove"]);
    refused(host.run(BOB, &["stop", "--force"]), [ALICE, BOB], &["cannot end the broker"]);
    let advice = format!("run this as user {ALICE}");
    refused(host.run(BOB, &["serve", "--replace"]), [ALICE, BOB], &["cannot replace the broker", &advice]);

    let names = |user| {
        let listed = host.json(user, &["ls"]);
        let names = listed["names"].as_array().unwrap().clone();
        let row = |name: &Value| {
            let latest = &name["latest"];
            (name["name"].as_str().unwrap().to_owned(), latest["uid"].as_u64(), latest["shared"].as_bool())
        };
        names.iter().map(row).collect::<Vec<_>>()
    };
    let row = |name: &str, user: u32, shared| (name.to_owned(), Some(u64::from(user)), Some(shared));
    let seen_by_bob = vec![row("shared", ALICE, true), row("theirs", BOB, true)];
    assert_eq!(names(BOB), seen_by_bob);
    assert_eq!(names(ALICE), [vec![row("private", ALICE, false)], seen_by_bob.clone()].concat());
    let table = host.run(ALICE, &["ls"]).expect(0).text();
    assert!(table.contains("USER") && table.contains("65532, shared"), "{table}");
    let shown = host.run(BOB, &["show", "shared"]).expect(0).text();
    assert!(shown.contains("65531; shared"), "{shown}");
    let status = host.json(ALICE, &["status"]);
    assert_eq!(status["uid"], ALICE);
    assert_eq!(status["users"][1]["uid"], BOB);
    assert_eq!(status["users"][1]["names"], 1);
    assert_eq!((&status["users"][1]["seats"], &status["users"][1]["limits"]["seats"]), (&0.into(), &4.into()));
    let text = host.run(ALICE, &["status"]).expect(0).text();
    assert!(text.contains("user     65532: 0 members of ") && text.contains("0 seats of 4"), "{text}");

    // The next worker knows the same.
    let worker = status["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
    eventually("another worker serves", || {
        host.run(ALICE, &["--json", "status"]).code == Some(0) && host.json(ALICE, &["status"])["restarts"] == 1
    });
    assert_eq!(names(BOB), seen_by_bob);
    refused(get(BOB, "private").0, [ALICE, BOB], &["not shared"]);
    refused(host.run(BOB, &["rm", "shared"]), [ALICE, BOB], &["cannot remove"]);
    refused(host.run(CAROL, &["ls"]), [ALICE, CAROL], &["does not admit"]);

    let log = host.log();
    let audited =
        |words: &[&str]| log.lines().any(|line| line.contains("audit") && words.iter().all(|word| line.contains(word)));
    assert!(audited(&["not admitted", "uid=65533", "broker=65531"]), "{log}");
    assert!(audited(&["audit: admitted", "uid=65532", "broker=65531"]), "{log}");
    assert!(audited(&["refused", "uid=65532", "owner=65531", "Replace"]), "{log}");
    assert!(audited(&["granted", "uid=65532", "owner=65531", "shared"]), "{log}");
    assert!(audited(&["granted", "uid=65531", "owner=65532", "theirs"]), "{log}");
    assert!(audited(&["refused", "uid=65532", "owner=65531", "Remove"]), "{log}");
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
    assert!(!host.socket().exists());
}

// Holds 147.
#[test]
fn needs_root_members_of_a_group_are_admitted() {
    let host = Host::new();
    // Only a member may give a file to a group, or root.
    chown(host.directory.path().join("run"), Some(0), Some(0)).unwrap();
    let home = host.make_directory("0", 0, 0o700);
    let mut command = Command::new(host.directory.path().join("partywall"));
    command.env_clear().env("HOME", home).args(["serve", "--group", &TEAM.to_string(), "--socket"]).arg(host.socket());
    let mut serve = Running::spawn(&mut command);
    serve.line();
    let socket = fs::metadata(host.socket()).unwrap();
    assert_eq!((socket.mode() & 0o777, socket.gid()), (0o660, TEAM));
    let ls = |user, group| Running::spawn(&mut host.command(user, group, &host.socket(), &["ls"])).wait();
    ls(BOB, TEAM).expect(0);
    Running::spawn(&mut host.command_in_two_groups(BOB, TEAM, &["ls"])).wait().expect(0);
    // The kernel refuses before the broker can.
    refused(ls(BOB, BOB), [0, BOB], &["may not use", "run/s.sock", "--allow-uid 65532", "--group"]);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 148.
#[test]
fn needs_root_broker_of_another_user_is_used_only_at_a_safe_place_that_was_named() {
    let host = Host::new();
    let serve = host.serve(&["--allow-uid", &BOB.to_string(), "--allow-uid", &CAROL.to_string()]);
    host.run(BOB, &["ls"]).expect(0);
    // A domain's name leads to a socket that could be anybody's.
    let runtime = host.make_directory("runtime", BOB, 0o755);
    std::os::unix::fs::symlink(host.socket().parent().unwrap(), runtime.join("partywall")).unwrap();
    let derived = |command: &mut Command| {
        Running::spawn(command.env_remove("PARTYWALL_SOCKET").env("XDG_RUNTIME_DIR", &runtime)).wait()
    };
    let output = derived(&mut host.command(BOB, BOB, &host.socket(), &["--domain", "s", "ls"]));
    refused(output, [ALICE, BOB], &["did not name the socket", "--socket"]);
    // Carol could put another socket there.
    let run = host.directory.path().join("run");
    chown(&run, Some(CAROL), None).unwrap();
    refused(host.run(BOB, &["ls"]), [ALICE, BOB], &["directory belongs to user 65533"]);
    chown(&run, Some(0), None).unwrap();
    host.run(BOB, &["ls"]).expect(0);
    fs::set_permissions(&run, Permissions::from_mode(0o1777)).unwrap();
    refused(host.run(BOB, &["ls"]), [ALICE, BOB], &["others may write", "1777"]);
    chown(&run, Some(ALICE), None).unwrap();
    fs::set_permissions(&run, Permissions::from_mode(0o711)).unwrap();
    host.run(BOB, &["ls"]).expect(0);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 386.
#[test]
fn needs_root_directory_of_a_claim_is_refused_if_it_is_another_users() {
    let host = Host::new();
    let claim = host.make_directory("claim", BOB, 0o777);
    let here = |user| {
        let mut command = host.command(user, user, &host.socket(), &["status"]);
        Running::spawn(command.env_remove("PARTYWALL_SOCKET").env("NVIDIA_DRA_LOCAL_IPC_DIR", &claim)).wait()
    };
    refused(here(ALICE), [BOB, BOB], &["cannot use the directory", "claim", "chmod 700"]);
    // Root's is everybody's, each user's sockets are in a directory of its own, and who may not write there goes on
    // without it.
    chown(&claim, Some(0), None).unwrap();
    for (mode, place) in [(0o777, format!(" at {}/partywall-{ALICE}/", claim.display())), (0o755, " at ".to_owned())] {
        fs::set_permissions(&claim, Permissions::from_mode(mode)).unwrap();
        let output = here(ALICE);
        assert_eq!(output.code, Some(4), "{output:?}");
        assert!(output.stderr.contains(&place), "{output:?}");
        assert_eq!(output.stderr.contains("claim"), mode == 0o777, "{output:?}");
    }
}

// Holds 148.
#[test]
fn needs_root_broker_that_admits_others_needs_a_directory_that_they_can_only_pass() {
    let host = Host::new();
    let run = host.directory.path().join("run");
    for mode in [0o700, 0o755, 0o777] {
        fs::set_permissions(&run, Permissions::from_mode(mode)).unwrap();
        let output = host.run(ALICE, &["serve", "--allow-uid", &BOB.to_string()]);
        assert_eq!(output.code, Some(4), "{output:?}");
        assert!(output.stderr.contains("0711") && output.stderr.contains("chmod 711"), "{output:?}");
    }
    let output = host.run(BOB, &["serve", "--allow-uid", &ALICE.to_string()]);
    assert!(
        output.stderr.contains(&format!("belongs to user {ALICE}")) && !output.stderr.contains("chmod"),
        "{output:?}"
    );
    // Without others it stays private.
    fs::set_permissions(&run, Permissions::from_mode(0o711)).unwrap();
    let output = host.run(ALICE, &["serve", "--allow-uid", &ALICE.to_string()]);
    assert!(output.stderr.contains("0700"), "{output:?}");
}

// Holds 150.
#[test]
fn needs_root_quotas_of_users_hold_after_a_restart_of_the_broker() {
    let host = Host::new();
    let bob = BOB.to_string();
    let limits = ["--max-names-per-uid", "1", "--max-seats-per-uid", "1"];
    let serve = host.serve(&[&["--allow-uid", &bob], &limits[..]].concat());
    host.put(BOB, "a", &[]).expect(0);
    let worker = host.json(ALICE, &["status"])["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
    eventually("another worker serves", || host.run(ALICE, &["ls"]).code == Some(0));
    let output = host.put(BOB, "b", &[]);
    refused(output, [BOB, BOB], &["a share of 1 of the broker's names", "--max-names-per-uid"]);
    host.put(ALICE, "b", &[]).expect(0);
    eventually("the line is written", || {
        let is_of_bob = |line: &&str| line.contains("quota") && line.contains("uid=65532");
        host.log().lines().find(is_of_bob).is_some_and(|line| line.contains("broker=65531"))
    });
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

/// A process in a user namespace has another number for its user than the broker outside.
// Holds 36.
#[test]
fn needs_namespaces_process_in_a_user_namespace_owns_its_names() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    sandbox.broker();
    let inside = |arguments: &[&str]| {
        let mut command = sandbox.program("unshare");
        command.args(["--user", "--map-user=4711"]).arg(binary()).args(arguments);
        Running::spawn(&mut command).wait().expect(0)
    };
    inside(&["put", "f", "x", "--device", "host"]);
    let listed = |output: Output| output.text().lines().next().unwrap().to_owned();
    let headings = listed(sandbox.run(["ls"]).expect(0));
    assert!(!headings.contains("USER"), "{headings}");
    assert_eq!(listed(inside(&["ls"])), headings, "no name belongs to another user");
}

/// Runs the program in this sandbox where /proc is not mounted, perhaps on a clock that is a day ahead.
fn without_proc(sandbox: &Sandbox, kinds: &[&str], arguments: &[&str]) -> Output {
    let mut command = sandbox.program("unshare");
    command.args(["--user", "--map-root-user", "--mount"]).args(kinds);
    command.args(["sh", "-ec", "mount -t tmpfs none /proc; exec \"$PARTYWALL_BIN\" \"$@\"", "sh"]).args(arguments);
    Running::spawn(&mut command).wait()
}

// Holds 311.
#[test]
fn needs_namespaces_missing_proc_is_named() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    // The broker that this starts has none either.
    let put = ["put", "f", "x", "--device", "host"];
    let refused = without_proc(&sandbox, &[], &put);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("mount /proc") && !refused.stderr.contains("bug"), "{refused:?}");
    // `stop` cannot reach it either.
    eventually("its end", || {
        for pidfd in sandbox.processes().into_iter().filter_map(|pid| partywall_os::process::pidfd(pid).ok()) {
            let _ = partywall_os::process::kill(&pidfd, Signal::KILL);
        }
        sandbox.processes().is_empty()
    });

    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    sandbox.broker();
    let refused = without_proc(&sandbox, &[], &put).expect(5);
    assert!(refused.stderr.contains("mount /proc"), "{refused:?}");
    let refused = without_proc(&sandbox, &[], &["serve", "--background"]);
    assert!(refused.stderr.contains("mount /proc") || refused.stderr.contains("listens already"), "{refused:?}");
}

// Holds 115.
#[test]
fn needs_namespaces_member_on_an_unknown_clock_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    sandbox.run(["put", "f", "x", "--device", "host"]).expect(0);
    let day = ["--time", "--monotonic", "86400", "--fork", "--kill-child"];
    let refused = without_proc(&sandbox, &day, &["get", "x", "-"]).expect(4);
    assert!(refused.stderr.contains("the clock of this process is 86400."), "{refused:?}");
    assert!(refused.stderr.contains("s ahead of that of the broker"), "{refused:?}");
    assert_eq!(without_proc(&sandbox, &[], &["get", "x", "-"]).expect(0).stdout, b"hello", "its clock is the host's");
}
