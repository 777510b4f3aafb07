// Holds 106, 107.
//! Members as a user of the command sees them: `ps`, `evict`, `rm --unproven`.

use partywall::{
    Error,
    error::{Gone, InvalidArgument},
    info::MemberState,
};
use partywall_harness::{Running, Sandbox, Signal, device, eventually, place};
use serde_json::{Value, json};

/// A process that holds `name`, 1 MiB, which it owns.
fn holder(sandbox: &Sandbox, name: &str) -> Running {
    sandbox.file("f", vec![7; 1 << 20]);
    let mut holder = sandbox.spawn(["put", "f", name, "--hold", "--device", device()]);
    assert!(holder.line().contains("holding it"));
    holder
}

/// Starts such a process on a simulated GPU, whose driver reports that the process is a client of MPS.
fn client_of_mps(sandbox: &Sandbox, name: &str) -> Running {
    sandbox.file("f", vec![7; 1 << 20]);
    let mut command = sandbox.command(["put", "f", name, "--hold", "--device", "cuda"]);
    let mut holder = Running::spawn(command.env("SIMCUDA_MPS", "1"));
    assert!(holder.line().contains("holding it"));
    holder
}

fn members(sandbox: &Sandbox) -> Vec<Value> {
    sandbox.json(["ps"])["members"].as_array().unwrap().clone()
}

fn member(sandbox: &Sandbox, pid: u32) -> Option<Value> {
    members(sandbox).into_iter().find(|member| member["pid"] == pid)
}

fn state(sandbox: &Sandbox, pid: u32) -> Option<String> {
    Some(member(sandbox, pid)?["state"].as_str().unwrap().to_owned())
}

#[test]
fn ps_lists_members_and_what_they_hold() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let nobody = sandbox.run(["ps"]).expect(0);
    assert!(nobody.stdout.is_empty() && nobody.stderr.contains("no process has joined the domain"), "{nobody:?}");
    assert_eq!(members(&sandbox), [Value::Null; 0]);

    let holder = holder(&sandbox, "held");
    eventually("it is well", || state(&sandbox, holder.pid()).as_deref() == Some("alive"));
    let list = sandbox.json(["ps"]);
    assert_eq!(list["socket"], sandbox.socket().to_str().unwrap());
    let member = &list["members"][0];
    for (key, value) in [
        ("pid", json!(holder.pid())),
        ("uid", json!(rustix::process::getuid().as_raw())),
        ("state", json!("alive")),
        ("doubt", Value::Null),
        ("mps", Value::Null),
        ("leases", json!(1)),
        ("timelines", json!(0)),
        ("permits", json!(0)),
        ("simulated", json!(device() != "host")),
    ] {
        assert_eq!(member[key], value, "{key}");
    }
    assert!(member["quiet_ms"].is_u64(), "it gives signs of life: {member}");
    assert!(member["bytes"].as_u64().unwrap() >= 1 << 20 && member["since_ms"].as_u64().unwrap() > 1 << 40);
    assert!(member["command"].as_str().unwrap().contains("put f held"), "{member}");

    let text = sandbox.run(["ps"]).expect(0).text();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "no remarks: {text}");
    // A value in a right-aligned column ends where its heading ends; in a left-aligned column it begins where it
    // begins.
    let column = |heading: &str| lines[0].find(heading).unwrap();
    assert!(lines[1][..column("PID") + 3].ends_with(&holder.pid().to_string()), "{text}");
    assert!(lines[1][column("STATE")..].starts_with("alive"), "{text}");
    assert!(lines[1][..column("HOLDS") + 5].ends_with("MiB"), "{text}");
    assert!(lines[1][column("COMMAND")..].contains("put f held"), "{text}");
}

// Holds 111.
#[test]
fn stopped_process_counts_as_hung_without_consequences() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "held");
    let pid = holder.pid();
    holder.signal(Signal::STOP);
    eventually("it is hung", || state(&sandbox, pid).as_deref() == Some("hung"));
    let row = member(&sandbox, pid).unwrap();
    assert!(row["quiet_ms"].as_u64().unwrap() > 2000 && row["leases"] == 1, "{row}");
    let text = sandbox.run(["ps"]).expect(0).text();
    assert!(text.contains("\nhung: it has sent no heartbeat"), "{text}");
    sandbox.run(["get", "held", "out"]).expect(0);
    holder.signal(Signal::CONT);
    eventually("it is well again", || state(&sandbox, pid).as_deref() == Some("alive"));
}

#[test]
fn evicted_member_loses_its_names_and_is_notified() {
    let sandbox = Sandbox::new();
    let victim = sandbox.domain();
    let segment = victim
        .create("theirs", partywall_harness::place())
        .tensor("x", partywall::DType::U8, &[1 << 20])
        .allocate()
        .unwrap()
        .commit()
        .unwrap();
    let pid = std::process::id();
    let evicted = sandbox.json(["evict", &pid.to_string()]);
    let row = &evicted["evicted"][0];
    for (key, value) in [
        ("pid", json!(pid)),
        ("member", json!(victim.member())),
        ("leases", json!(1)),
        ("bytes", json!(segment.bytes())),
        ("kill", json!("not_asked")),
        ("errno", Value::Null),
    ] {
        assert_eq!(row[key], value, "{key}");
    }
    sandbox.run(["get", "theirs", "out"]).expect(3);
    let printed = victim.ping().unwrap_err();
    assert!(matches!(printed, Error::Gone(Gone::Evicted { .. })) && printed.advice().contains("restart"), "{printed}");
    assert_eq!(segment.tensor("x").unwrap().to_vec().unwrap(), vec![0; 1 << 20], "what is mapped stays");

    assert_eq!(state(&sandbox, pid).as_deref(), Some("evicted"));
    let text = sandbox.run(["ps"]).expect(0).text();
    assert!(text.contains("\nevicted: the broker refuses its requests"), "{text}");
    let status = sandbox.run(["status"]).expect(0).text();
    assert!(status.contains("evicted"), "{status}");

    // A new connection of the same process is a new member.
    let again = sandbox.domain_of_running();
    assert_eq!(again.members().unwrap()[0].state, MemberState::Evicted);
    assert!(matches!(again.evict(pid, true), Err(Error::InvalidArgument(InvalidArgument::Yourself))));
    let only = sandbox.json(["evict", "--member", &victim.member().to_string()]);
    assert_eq!(only["evicted"].as_array().unwrap().len(), 1);
    again.ping().unwrap();
    drop((segment, victim));
    assert_eq!(again.status().unwrap().leases, 1, "only a proof gives it back");
}

#[test]
fn evicted_holder_ends_with_an_error() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "held");
    let pid = holder.pid();
    let text = sandbox.run(["evict", &pid.to_string()]).expect(0).text();
    assert!(text.starts_with(&format!("evicted pid {pid} (partywall put f held")), "{text}");
    assert!(text.contains("(1 lease) in quarantine until it is dead"), "{text}");
    let ended = holder.wait().expect(5);
    assert!(
        ended.stderr.contains("was evicted by pid") && ended.stderr.contains("partywall explain evicted"),
        "{ended:?}"
    );
    eventually("its death is proved", || members(&sandbox).is_empty());
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
}

#[test]
fn evicting_can_kill() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "held");
    // A stopped process cannot react.
    holder.signal(Signal::STOP);
    let pid = holder.pid();
    let text = sandbox.run(["evict", "--kill", &pid.to_string()]).expect(0).text();
    assert!(text.contains("SIGKILL is sent"), "{text}");
    assert_eq!(holder.wait().code, None, "a signal ended it");
    eventually("its death is proved", || members(&sandbox).is_empty());
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
}

#[test]
fn evicting_an_unknown_pid_lists_the_members() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "held");
    // The pid has a digit too many.
    let typed = format!("{}0", holder.pid());
    let missing = sandbox.run(["evict", &typed]).expect(3);
    assert!(missing.stderr.contains(&format!("no member has pid {typed}")), "{missing:?}");
    if holder.pid() > 99 {
        assert!(missing.stderr.contains(&format!("did you mean {}?", holder.pid())), "{missing:?}");
    }
    assert!(missing.stderr.contains("partywall ps"), "{missing:?}");
    let missing = sandbox.run(["evict", "--member", "999", "--json"]).expect(3).json();
    assert_eq!((&missing["error"]["code"], &missing["error"]["entry"]), (&json!(3), &json!("no-such-member")));
    for wrong in [&["evict"][..], &["evict", "x"], &["evict", "1", "--member", "1"], &["evict", "-1"]] {
        sandbox.run(wrong).expect(2);
    }
    eventually("it is well", || state(&sandbox, holder.pid()).as_deref() == Some("alive"));
}

// Holds 237.
#[test]
fn under_mps_resources_of_killed_processes_are_unproven_until_released() {
    let sandbox = Sandbox::simulated(1);
    sandbox.broker();
    let holder = client_of_mps(&sandbox, "held");
    let pid = holder.pid();
    assert_eq!(member(&sandbox, pid).unwrap()["doubt"], "mps");
    let text = sandbox.run(["ps"]).expect(0).text();
    let price =
        "under MPS a fault, or a kill in a long kernel, can end CUDA in all clients of a daemon; a client's death";
    assert!(text.contains(price), "{text}");
    for asked in [&["show", "held"][..], &["top", "--once"]] {
        let text = sandbox.run(asked).expect(0).text();
        assert!(text.contains(price), "{asked:?}: {text}");
    }
    // Its driver says that it is a client, and it has looked where the environment says.
    let pipes = std::env::var("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|_| "/tmp/nvidia-mps".into());
    assert_eq!(member(&sandbox, pid).unwrap()["mps"], pipes);
    assert_eq!(sandbox.json(["show", "held"])["mps"], json!([{ "pipes": pipes, "pids": [pid] }]));
    let line = format!("under the MPS daemon at {pipes}: pid {pid}");
    for text in [text, sandbox.run(["show", "held"]).expect(0).text()] {
        assert!(text.lines().any(|it| it == line), "{text}");
    }
    let alive = sandbox.run(["rm", "--unproven", &pid.to_string()]).expect(5);
    assert!(alive.stderr.contains("it is alive") && alive.stderr.contains("partywall evict"), "{alive:?}");

    holder.kill();
    eventually("it is unproven", || state(&sandbox, pid).as_deref() == Some("unproven"));
    sandbox.run(["show", "held"]).expect(0);
    let show = sandbox.json(["show", "held"]);
    assert_eq!((&show["latest"], &show["holders"][0]["unproven"]), (&json!(false), &json!(true)));
    let text = sandbox.run(["show", "held"]).expect(0).text();
    assert!(text.contains(&format!("{pid} (unproven)")) && text.contains("removed"), "{text}");
    sandbox.run(["get", "held", "out"]).expect(3);
    let text = sandbox.run(["ps"]).expect(0).text();
    assert!(text.contains("\nunproven: it is dead, but its GPU work may still run"), "{text}");
    let status = sandbox.json(["status"]);
    assert_eq!(status["unproven"], json!({ "members": 1, "bytes": 2 << 20 }));
    let text = sandbox.run(["status"]).expect(0).text();
    assert!(text.contains("unproven 2 MiB of 1 dead member"), "{text}");
    let gone = sandbox.run(["evict", &pid.to_string()]).expect(5);
    assert!(gone.stderr.contains("is already dead") && gone.stderr.contains("rm --unproven"), "{gone:?}");

    let freed = sandbox.run(["rm", "--unproven", &pid.to_string()]).expect(0).text();
    assert!(freed.contains(&format!("freed what pid {pid} (")) && freed.contains("1 lease on 2 MiB"), "{freed}");
    eventually("it is given back", || members(&sandbox).is_empty());
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));

    sandbox.run(["rm", "--unproven", &pid.to_string()]).expect(3);
    let nothing = sandbox.run(["rm", "--unproven"]).expect(0);
    assert!(nothing.stderr.contains("nothing is in quarantine"), "{nothing:?}");
    assert_eq!(sandbox.json(["rm", "--unproven"])["freed"], json!([]));
    sandbox.run(["rm", "--unproven", "held"]).expect(2);
    sandbox.run(["rm", "--unproven", "1", "held"]).expect(2);
}

#[test]
fn all_unproven_memory_is_freed_at_once() {
    let sandbox = Sandbox::simulated(1);
    sandbox.broker();
    let holders = ["a", "b"].map(|name| client_of_mps(&sandbox, name));
    let pids = holders.each_ref().map(Running::pid);
    holders.into_iter().for_each(|holder| drop(holder.kill()));
    eventually("both are unproven", || pids.iter().all(|pid| state(&sandbox, *pid).as_deref() == Some("unproven")));
    sandbox.run(["rm", "a"]).expect(3);
    let freed = sandbox.json(["rm", "--unproven"]);
    let mut freed: Vec<_> = freed["freed"].as_array().unwrap().iter().map(|row| row["pid"].clone()).collect();
    freed.sort_by_key(Value::as_u64);
    let mut expected = pids.map(Value::from);
    expected.sort_by_key(Value::as_u64);
    assert_eq!(freed, expected);
    eventually("it is given back", || members(&sandbox).is_empty());
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
}

#[test]
fn clean_disconnect_counts_as_proof_under_mps() {
    let sandbox = Sandbox::simulated(1);
    sandbox.broker();
    let holder = client_of_mps(&sandbox, "held");
    holder.signal(Signal::TERM);
    holder.wait().expect(0);
    assert_eq!(members(&sandbox), [Value::Null; 0]);
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
}

#[test]
fn broker_frees_unproven_memory_after_the_time_limit() {
    let sandbox = Sandbox::simulated(1);
    let mut broker = sandbox.spawn(["serve", "--unproven-after", "0.05"]);
    broker.line();
    let holder = client_of_mps(&sandbox, "held");
    holder.kill();
    eventually("it is given back", || members(&sandbox).is_empty());
    assert_eq!(sandbox.json(["status"])["bytes"], json!([]));
    sandbox.run(["stop", "--force"]).expect(0);
    broker.wait().expect(0);
    sandbox.run(["serve", "--unproven-after", "soon"]).expect(2);
    sandbox.broker();
}

#[test]
fn removing_a_name_says_what_is_in_quarantine() {
    let sandbox = Sandbox::simulated(1);
    sandbox.broker();
    let holder = client_of_mps(&sandbox, "both");
    sandbox.run(["put", "f", "both", "--device", "cuda"]).expect(0);
    let pid = holder.pid();
    holder.kill();
    eventually("it is unproven", || state(&sandbox, pid).as_deref() == Some("unproven"));
    sandbox.run(["get", "both", "out"]).expect(0);
    let removed = sandbox.run(["rm", "both"]).expect(0).text();
    assert!(
        removed.contains("2 MiB stay in quarantine") && removed.contains(&format!("--unproven {pid}")),
        "{removed}"
    );
    sandbox.run(["rm", "--unproven"]).expect(0);
    eventually("it is given back", || sandbox.json(["status"])["bytes"] == json!([]));
}

// Holds 124.
#[test]
fn operators_are_served_at_the_member_limit() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve", "--max-clients", "4"]);
    serve.line();
    let seats: Vec<_> = (0..4).map(|_| sandbox.domain_of_running()).collect();
    let build =
        seats[0].create("kept", place()).kept(true).tensor("x", partywall::DType::U8, &[16]).allocate().unwrap();
    drop(build.commit().unwrap());
    let refused = sandbox.run(["watch", "*"]).expect(5);
    assert!(refused.stderr.contains("members is 4") && refused.stderr.contains("partywall ps"), "{refused:?}");
    let pid = std::process::id();
    assert_eq!(members(&sandbox).len(), 4);
    for command in [&["status"][..], &["ls"], &["show", "kept"], &["rm", "kept"], &["evict", &pid.to_string()]] {
        sandbox.run(command).expect(0);
    }
    let worker = sandbox.json(["status"])["pid"].as_u64().unwrap();
    let doctor = sandbox.run(["doctor"]).text();
    assert!(doctor.contains(&format!("process {worker} runs release")), "{doctor}");
    sandbox.run(["stop", "--force"]).expect(0);
    serve.wait().expect(0);
}

// Holds 57.
#[test]
fn readers_of_a_withdrawn_name_have_until_the_deadline() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    sandbox.file("f", vec![7; 1 << 20]);
    sandbox.run(["put", "f", "held", "--device", device()]).expect(0);
    let domain = sandbox.domain_of_running();
    let reader = domain.open("held", std::time::Duration::ZERO).unwrap();
    for (wrong, why) in [
        (&["--deadline=-1"][..], "not a number of seconds"),
        (&["--deadline", "soon"], "not a number of seconds"),
        (&["--then", "stale"], "--deadline"),
        (&["--deadline", "1", "--then", "die"], "not wait, stale or evict"),
        (&["--deadline", "1e9"], "is longer than a year"),
    ] {
        let refused = sandbox.run([&["rm", "held"], wrong].concat()).expect(2);
        assert!(refused.stderr.contains(why), "{refused:?}");
    }
    let removed = sandbox.run(["rm", "held", "--deadline", "3600", "--then", "stale"]).expect(0).text();
    assert!(removed.contains("min") && removed.contains("no new view"), "{removed}");
    let again = sandbox.run(["rm", "held", "--deadline", "1"]).expect(5);
    assert!(again.stderr.contains("is being withdrawn by pid"), "{again:?}");
    let shown = sandbox.run(["show", "held"]).expect(0).text();
    assert!(shown.contains("withdrawn") && shown.contains("no new view"), "{shown}");
    let listed = sandbox.run(["ls"]).expect(0).text();
    assert!(listed.contains("removed") && listed.contains("stale in"), "{listed}");
    let notice = &sandbox.json(["ls"])["names"][0]["notice"];
    assert_eq!((&notice["then"], &notice["pid"]), (&json!("stale"), &sandbox.json(["show", "held"])["notice"]["pid"]));
    let top = sandbox.run(["top", "--once"]).text();
    assert!(top.contains("no new view"), "{top}");
    assert!(reader.check().is_ok(), "the deadline is far away");
}

#[test]
fn own_user_is_served_beyond_a_share_of_seats() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve", "--max-seats-per-uid", "1"]);
    serve.line();
    sandbox.file("f", "x");
    sandbox.run(["put", "f", "x", "--device", "host"]).expect(0);
    let _tracers =
        [1, 2].map(|number| sandbox.spawn(["trace", "--seconds", "600", "--out", &format!("{number}.json")]));
    eventually("both have a seat", || sandbox.json(["status"])["users"][0]["seats"] == 2);
    sandbox.run(["stop", "--force"]).expect(0);
    serve.wait().expect(0);
}
