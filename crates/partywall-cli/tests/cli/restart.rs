//! The broker dies, and its supervisor starts it again; or another program continues for it (`serve --replace`). Names,
//! memory, waits and connections go on.
#![allow(unsafe_code)] // a process of another user

use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use partywall::{
    Domain, Error, NoReplacement, Place, Policy, Task, WatchEvent,
    error::{Denied, Unreachable},
    info::{Change, NameEvent, StatusInfo},
};
use partywall_harness::{
    Running, Sandbox, Signal, WATCHDOG, assert_contains, binary, commit, copy_program, eventually, kill, pidfd_of,
    send, wire::Framed,
};
use partywall_os::{process, socket};
use partywall_wire::{BrokerHello, Refusal, handshake};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::Value;

/// The worker of a supervisor, without asking the broker.
fn worker_of(supervisor: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Has another file of the program continue for the broker.
fn replace(sandbox: &Sandbox) {
    let copy = sandbox.path().join("partywall-copy");
    if !copy.exists() {
        copy_program(&binary(), &copy);
    }
    let before = sandbox.json(["status"]);
    let replaced =
        Running::spawn(sandbox.program(&copy).args(["--json", "serve", "--replace"])).wait().expect(0).json();
    assert_eq!(replaced["supervisor"], before["supervisor"]);
    assert_ne!(replaced["pid"], before["pid"]);
    let program = fs::read_link(format!("/proc/{}/exe", replaced["pid"])).unwrap();
    assert_eq!(program, copy);
}

/// What exists, apart from the process that serves, and from waits: members ask for these again.
fn contents(domain: &Domain) -> StatusInfo {
    let mut status = domain.status().unwrap();
    status.users.iter_mut().for_each(|user| user.waits = 0);
    StatusInfo { pid: 0, restarts: 0, ..status }
}

/// Interrupts the service while all kinds of objects are in use. `interrupt` is called once.
fn everything_goes_on(sandbox: &Sandbox, restarts: u64, interrupt: impl FnOnce(&StatusInfo)) {
    let domain = sandbox.domain();
    let other = sandbox.domain();
    let old = commit(&domain, "weights", 1);
    let new = commit(&domain, "weights", 2);
    let writer = domain.timeline_writer("line").unwrap();
    let line = other.timeline("line").unwrap();
    writer.signal(1).unwrap();
    let semaphore = domain.semaphore("s", 1).unwrap();
    let permit = semaphore.acquire(WATCHDOG).unwrap();
    let theirs = other.semaphore("s", 1).unwrap();
    let pool = domain.pool("blocks").blocks(2).block_bytes(64).place(Place::Host).create().unwrap();
    let block = pool.alloc(WATCHDOG).unwrap();
    let topic = domain.topic("frames").max_bytes(64).depth(2).place(Place::Host).create().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let publisher = other.topic("frames").timeout(WATCHDOG).open().unwrap().publisher().unwrap();
    send(&publisher, 1);
    let queue = domain.queue("work").tasks(4).inputs(2, 64).outputs(2, 64).place(Place::Host).create().unwrap();
    let attached = queue.attach(&new).unwrap();
    let ticket = queue.submit(Task::new("sum").part(attached.part(..64).unwrap()).output(8), WATCHDOG).unwrap();
    let mut watch = other.watch("later").unwrap();
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
    let before = contents(&domain);
    let status = domain.status().unwrap();

    thread::scope(|scope| {
        let waits_for_value = scope.spawn(|| line.wait(2, WATCHDOG));
        let waits_for_permit = scope.spawn(|| theirs.acquire(WATCHDOG).map(drop));
        let waits_for_name = scope.spawn(|| other.open("later", WATCHDOG).map(|segment| assert_contains(&segment, 3)));
        eventually("all wait", || semaphore.waiting() == 1);

        interrupt(&status);
        // These do not ask the broker.
        send(&publisher, 2);
        for expected in [1, 2] {
            assert_eq!(subscriber.recv(WATCHDOG).unwrap().bytes().unwrap(), [expected; 8]);
        }
        drop(block);
        let now = domain.status().unwrap();
        assert_eq!((now.instance, now.supervisor, now.restarts), (status.instance, status.supervisor, restarts));
        assert_ne!(now.pid, status.pid);
        assert_eq!(contents(&domain), before);

        writer.signal(2).unwrap();
        drop(permit);
        drop(commit(&domain, "later", 3));
        waits_for_value.join().unwrap().unwrap();
        waits_for_permit.join().unwrap().unwrap();
        waits_for_name.join().unwrap().unwrap();
    });
    match watch.next(WATCHDOG).unwrap() {
        Some(WatchEvent::Name(NameEvent { change: Change::Created { .. } | Change::Committed { .. }, .. })) => {}
        unexpected => panic!("{unexpected:?}"),
    }
    assert_contains(&old, 1);
    assert_contains(&domain.open("weights", WATCHDOG).unwrap(), 2);
    assert_eq!(commit(&domain, "weights", 4).version(), 3);
    assert_eq!(pool.stats().free, 2);
    let mut task = queue.claim(WATCHDOG).unwrap();
    task.output_mut().unwrap().as_mut_slice::<u64>().unwrap()[0] = 7;
    task.complete().unwrap();
    drop(ticket.wait(WATCHDOG).unwrap());
    queue.detach(&attached, WATCHDOG).unwrap();
    let json = sandbox.json(["status"]);
    assert_eq!((&json["restarts"], &json["supervisor"]), (&restarts.into(), &status.supervisor.into()));
    for name in ["weights", "later"] {
        domain.remove(name).unwrap();
    }
}

// Holds 132.
#[test]
fn killed_broker_is_restarted_and_everything_goes_on() {
    let sandbox = Sandbox::new();
    everything_goes_on(&sandbox, 1, |status| kill(status.pid));
    assert!(sandbox.run(["status"]).expect(0).text().contains("restarted 1 time by its supervisor"));
    let log = fs::read_to_string(sandbox.log()).unwrap();
    assert!(log.contains("was killed by signal 9"), "{log}");
}

// Holds 134.
#[test]
fn dead_members_are_found_dead_by_the_next_worker() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    sandbox.file("f", "contents");
    let mut holder = sandbox.spawn(["put", "f", "owned", "--hold", "--device", "host"]);
    holder.line();
    let status = domain.status().unwrap();
    // The holder dies while no worker runs.
    let supervisor = pidfd_of(status.supervisor.unwrap());
    process::kill(&supervisor, Signal::STOP).unwrap();
    kill(status.pid);
    holder.kill();
    process::kill(&supervisor, Signal::CONT).unwrap();
    eventually("its name is withdrawn", || domain.names().unwrap().is_empty());
    eventually("it is gone", || domain.members().unwrap().len() == 1);
    assert_eq!(domain.status().unwrap().deaths, 1);
}

// Holds 135.
#[test]
fn broker_that_dies_with_all_descriptors_in_use_is_restarted() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let kept = commit(&domain, "kept", 1);
    let status = domain.status().unwrap();
    let supervisor = status.supervisor.unwrap();
    let numbers = || {
        let entries = fs::read_dir(format!("/proc/{supervisor}/fd")).unwrap();
        let numbers = entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap());
        numbers.collect::<BTreeSet<_>>()
    };
    // Connections that say nothing take the numbers that are free, and no larger one is allowed.
    let mut silent = Vec::new();
    while numbers().len() as u64 <= *numbers().last().unwrap() {
        let before = numbers().len();
        silent.push(socket::connect(&sandbox.socket()).unwrap());
        eventually("it is accepted", || numbers().len() > before);
    }
    let all = numbers().len();
    let limit = |pid: u32, files: Option<u64>| {
        let pid = Pid::from_raw(i32::try_from(pid).unwrap());
        let maximum = getrlimit(Resource::Nofile).maximum;
        prlimit(pid, Resource::Nofile, Rlimit { current: files.or(maximum), maximum }).unwrap();
    };
    limit(supervisor, Some(all as u64));
    kill(status.pid);
    eventually("the next worker has closed the silent connections", || numbers().len() < all);
    limit(supervisor, None);
    limit(worker_of(supervisor).unwrap(), None);
    assert_eq!(domain.status().unwrap().restarts, 1);
    assert_contains(&kept, 1);
}

// Holds 13.
#[test]
fn replaced_broker_goes_on_with_everything() {
    let sandbox = Sandbox::new();
    everything_goes_on(&sandbox, 0, |_| replace(&sandbox));
    let log = fs::read_to_string(sandbox.log()).unwrap();
    assert!(log.contains("handing over to another program") && log.contains("continuing for another program"), "{log}");
    // The program that continues is one that can be killed and replaced, too.
    everything_goes_on(&sandbox, 0, |_| replace(&sandbox));
    everything_goes_on(&sandbox, 1, |status| kill(status.pid));
}

// Holds 132.
#[test]
fn calls_take_effect_once_however_often_the_broker_is_killed() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    calls_take_effect_once(&sandbox, 20, |supervisor| {
        eventually("a worker runs", || worker_of(supervisor).is_some());
        let worker = domain.status().unwrap().pid;
        kill(worker);
    });
    assert_eq!(domain.status().unwrap().restarts, 20);
}

// Holds 13.
#[test]
fn calls_take_effect_once_however_often_the_broker_is_replaced() {
    let sandbox = Sandbox::new();
    calls_take_effect_once(&sandbox, 10, |_| replace(&sandbox));
    assert_eq!(sandbox.json(["status"])["restarts"], 0);
}

/// Each call is made while the service may be interrupted at any moment, and has the result that it has otherwise.
/// `interrupt` is called so many times, with the pid of the supervisor.
fn calls_take_effect_once(sandbox: &Sandbox, times: u32, interrupt: impl Fn(u32)) {
    const THREADS: usize = 4;
    let domain = sandbox.domain();
    let before = contents(&domain);
    let supervisor = domain.status().unwrap().supervisor.unwrap();
    let descriptors = || fs::read_dir(format!("/proc/{supervisor}/fd")).unwrap().count();
    let open = descriptors();
    let over = AtomicBool::new(false);
    // Two threads share a connection, so a call of one may come between those of the other.
    let domains = [sandbox.domain(), sandbox.domain()];
    // How many calls of each thread were answered.
    let answered: [AtomicUsize; THREADS] = std::array::from_fn(|_| AtomicUsize::new(0));
    let calls: usize = thread::scope(|scope| {
        let threads: Vec<_> = answered
            .iter()
            .zip(0_u8..)
            .map(|(answered, number)| {
                let domain = &domains[usize::from(number) % domains.len()];
                let over = &over;
                scope.spawn(move || {
                    let name = format!("name/{number}");
                    let mut calls = 0;
                    while !over.load(Ordering::Relaxed) {
                        // A member that joins and leaves.
                        drop(sandbox.domain_of_running());
                        let segment = commit(domain, &name, number);
                        assert_eq!(segment.version(), 1, "a commit was repeated");
                        answered.fetch_add(1, Ordering::Relaxed);
                        let second = commit(domain, &name, number + 100);
                        assert_eq!(second.version(), 2, "a commit was repeated");
                        answered.fetch_add(1, Ordering::Relaxed);
                        assert_contains(&domain.open(&name, WATCHDOG).unwrap(), number + 100);
                        drop(segment);
                        answered.fetch_add(1, Ordering::Relaxed);
                        let semaphore = domain.semaphore("all", 1).unwrap();
                        let permit = semaphore.acquire(WATCHDOG).unwrap();
                        drop((permit, semaphore));
                        answered.fetch_add(1, Ordering::Relaxed);
                        let writer = domain.timeline_writer(&format!("line/{number}")).unwrap();
                        writer.signal(1).unwrap();
                        drop(writer);
                        answered.fetch_add(1, Ordering::Relaxed);
                        assert_eq!(domain.remove(&name).unwrap().version, 2);
                        drop(second);
                        answered.fetch_add(1, Ordering::Relaxed);
                        calls += 1;
                    }
                    calls
                })
            })
            .collect();
        for _ in 0..times {
            let before: Vec<_> = answered.iter().map(|calls| calls.load(Ordering::Relaxed)).collect();
            thread::sleep(Duration::from_millis(30));
            // The broker refuses a call during which it has died twice. On a busy machine one may still be going on.
            let go_on = || answered.iter().zip(&before).all(|(calls, before)| calls.load(Ordering::Relaxed) > *before);
            eventually("a call of each thread was answered", || go_on() || threads.iter().any(|t| t.is_finished()));
            interrupt(supervisor);
        }
        over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    drop(domains);
    assert!(calls > 0);
    let counts = |status: &StatusInfo| {
        let StatusInfo { names, versions, leases, timelines, semaphores, members, .. } = *status;
        [names, versions, leases, timelines, semaphores, members]
    };
    let deadline = Instant::now() + WATCHDOG;
    while counts(&contents(&domain)) != counts(&before) {
        let (status, members) = (domain.status().unwrap(), domain.members().unwrap());
        assert!(Instant::now() < deadline, "not all is given back: {status:?} {members:?}");
        thread::sleep(Duration::from_millis(5));
    }
    eventually("no descriptor is left open", || descriptors() <= open + 2);
}

// Holds 135, 138.
#[test]
fn broker_goes_on_without_its_supervisor_and_ends_when_it_dies_too() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let kept = commit(&domain, "kept", 1);
    let status = domain.status().unwrap();
    kill(status.supervisor.unwrap());
    eventually("the supervisor is gone", || domain.status().unwrap().supervisor.is_none());
    assert_eq!(sandbox.json(["status"])["supervisor"], Value::Null);
    assert!(sandbox.run(["status"]).expect(0).text().contains("without a supervisor"));
    let doctor = sandbox.run(["doctor"]);
    assert!(doctor.text().contains("supervisor is dead"), "{doctor:?}");
    assert_eq!(commit(&domain, "kept", 2).version(), 2);

    kill(status.pid);
    eventually("members know that it is gone", || {
        matches!(domain.status(), Err(Error::Unreachable(Unreachable::Gone { .. })))
    });
    // What was mapped stays valid.
    assert_contains(&kept, 1);
    drop(kept);
}

/// The pids behind the pidfds that the broker has sent to an operator.
fn processes_of_broker(sandbox: &Sandbox) -> Vec<u32> {
    let operator = Domain::options().socket(sandbox.socket()).start(false).operator(true).connect().unwrap();
    let pid_of = |pidfd: &OwnedFd| {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap();
        info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok()).unwrap()
    };
    operator.broker_processes().iter().map(pid_of).collect()
}

// Holds 121.
#[test]
fn broker_tells_operators_which_processes_it_is_and_stop_ends_it_without_a_supervisor() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let status = domain.status().unwrap();
    assert!(domain.broker_processes().is_empty(), "a member may not signal the broker");
    assert_eq!(processes_of_broker(&sandbox), [status.pid, status.supervisor.unwrap()]);
    kill(status.supervisor.unwrap());
    eventually("the supervisor is gone", || domain.status().unwrap().supervisor.is_none());
    assert_eq!(processes_of_broker(&sandbox), [status.pid]);
    // The kernel still names the dead one, whose pid may belong to any process by now.
    let stopped = sandbox.json(["stop", "--force"]);
    assert_eq!((&stopped["how"], &stopped["pid"]), (&"asked".into(), &status.pid.into()));
    assert!(domain.status().is_err());
}

// Holds 136.
#[test]
fn five_deaths_in_a_row_end_the_domain() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["--json", "serve"]);
    let ready: Value = serde_json::from_str(&serve.line()).unwrap();
    let mut killed = BTreeSet::new();
    let mut worker = u32::try_from(ready["pid"].as_u64().unwrap()).unwrap();
    loop {
        killed.insert(worker);
        kill(worker);
        let mut next = None;
        eventually("it is replaced, or the domain ends", || {
            next = worker_of(serve.pid()).filter(|pid| !killed.contains(pid));
            next.is_some() || serve.has_ended()
        });
        match next {
            Some(pid) => worker = pid,
            None => break,
        }
    }
    // A slow machine may have let one of them serve.
    assert!(killed.len() >= 5, "{killed:?}");
    let ended = serve.wait().expect(5);
    assert!(ended.text().contains("5 workers of the broker died in a row"), "{ended:?}");
    let log = fs::read_to_string(sandbox.log()).unwrap();
    assert!(log.contains("5 workers of the broker died in a row"), "{log}");
    assert!(!sandbox.socket().exists());
}

// Holds 135.
#[test]
fn needs_minutes_broker_that_is_stopped_is_replaced() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let kept = commit(&domain, "kept", 1);
    let status = domain.status().unwrap();
    process::kill(pidfd_of(status.pid), Signal::STOP).unwrap();
    eventually("it is replaced", || domain.status().is_ok_and(|now| now.restarts == 1));
    assert_contains(&sandbox.domain().open("kept", WATCHDOG).unwrap(), 1);
    drop(kept);
}

/// The reason for which the broker goes on as it was.
fn refusal(error: Error) -> NoReplacement {
    match error {
        Error::Denied(Denied::Replacement { why }) => why,
        other => panic!("{other:?}"),
    }
}

fn program_said(domain: &Domain, program: &str) -> String {
    let refused = domain.replace_broker(File::open(program).unwrap().as_fd()).unwrap_err();
    match refusal(refused) {
        NoReplacement::Program { said } => said,
        other => panic!("{other:?}"),
    }
}

// Holds 140.
#[test]
fn program_that_cannot_continue_changes_nothing() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let kept = commit(&domain, "kept", 1);
    let before = domain.status().unwrap();
    assert!(program_said(&domain, "/bin/true").contains("not a program that can be a broker"));
    assert!(program_said(&domain, "/etc/hostname").contains("could not be executed"));
    // The worker is served by what it has open, and a broker could not start.
    let worker = Pid::from_raw(i32::try_from(before.pid).unwrap());
    let few = Rlimit { current: Some(200), maximum: Some(200) };
    prlimit(worker, Resource::Nofile, few).unwrap();
    let refused = sandbox.run(["serve", "--replace"]).expect(5);
    assert!(refused.stderr.contains("the new program cannot continue: cannot serve"), "{refused:?}");
    assert!(refused.stderr.contains("not-replaced"), "{refused:?}");
    assert_eq!(domain.status().unwrap(), before);
    assert_contains(&kept, 1);
}

// Holds 140.
#[test]
fn one_program_at_a_time_is_checked_and_a_silent_one_is_refused() {
    let sandbox = Sandbox::new();
    // `yes serve` writes to nobody, without end.
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    let domain = sandbox.domain_of_running();
    let before = domain.status().unwrap();
    thread::scope(|scope| {
        let silent = scope.spawn(|| program_said(&domain, "/usr/bin/yes"));
        eventually("it is checked", || worker_of(before.pid).is_some());
        let other = sandbox.domain_of_running();
        let refused = other.replace_broker(File::open(binary()).unwrap().as_fd()).unwrap_err();
        assert_eq!(refusal(refused), NoReplacement::InProgress);
        assert!(silent.join().unwrap().contains("did not answer within"));
    });
    eventually("it is killed", || worker_of(before.pid).is_none());
    assert_eq!(domain.status().unwrap(), before);
    drop(domain);
    replace(&sandbox);
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

// Holds 141.
#[test]
fn kills_during_a_check_change_nothing() {
    let sandbox = Sandbox::new();
    let mut serve = sandbox.spawn(["serve"]);
    serve.line();
    let domain = sandbox.domain_of_running();
    let kept = commit(&domain, "kept", 1);
    let other = sandbox.domain_of_running();
    thread::scope(|scope| {
        let asking = scope.spawn(|| program_said(&other, "/usr/bin/yes"));
        let first = domain.status().unwrap().pid;
        let mut checked = None;
        eventually("it is checked", || {
            checked = worker_of(first);
            checked.is_some()
        });
        let orphan = pidfd_of(checked.unwrap());
        kill(first);
        assert_eq!(socket::wait(&orphan, socket::Ready::Read, Some(Instant::now() + WATCHDOG)), Ok(true));
        // The request is repeated.
        let second = domain.status().unwrap().pid;
        eventually("it is checked again", || {
            checked = worker_of(second);
            checked.is_some()
        });
        kill(checked.unwrap());
        assert!(asking.join().unwrap().contains("crashed"));
        assert_eq!(domain.status().unwrap().pid, second);
    });
    assert_eq!(domain.status().unwrap().restarts, 1);
    assert_contains(&kept, 1);
    drop((domain, other));
    serve.signal(Signal::TERM);
    serve.wait().expect(0);
}

#[test]
fn replacing_needs_a_broker_with_a_supervisor() {
    let sandbox = Sandbox::new();
    let refused = sandbox.run(["serve", "--replace"]).expect(4);
    assert!(
        refused.stderr.contains("no broker answers") && refused.stderr.contains("`partywall serve`"),
        "{refused:?}"
    );
    assert!(!sandbox.socket().exists());
    sandbox.run(["serve", "--replace", "--max-names", "5"]).expect(2);
    let domain = sandbox.domain();
    kill(domain.status().unwrap().supervisor.unwrap());
    eventually("the supervisor is gone", || domain.status().unwrap().supervisor.is_none());
    let refused = sandbox.run(["serve", "--replace"]).expect(5);
    assert!(refused.stderr.contains("it has no supervisor"), "{refused:?}");
}

// Holds 140.
#[test]
fn needs_namespaces_process_in_a_container_cannot_replace_the_broker() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let before = domain.status().unwrap();
    for kinds in [&["--pid", "--fork", "--kill-child", "--mount-proc"][..], &["--user", "--map-root-user"]] {
        let mut unshare = sandbox.program("unshare");
        unshare.args(["--user", "--map-root-user"]).args(kinds).arg(binary()).args(["serve", "--replace"]);
        let refused = Running::spawn(&mut unshare).wait().expect(5);
        assert!(refused.stderr.contains("namespace"), "{kinds:?}: {refused:?}");
    }
    assert_eq!(domain.status().unwrap(), before);
}

// Holds 140.
#[test]
fn needs_root_process_of_another_user_is_refused_before_it_is_heard() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let socket = sandbox.socket();
    for path in socket.ancestors().take(4) {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let refused = || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let (body, _) = Framed::new(socket::connect(&socket).unwrap()).receive().unwrap();
        let hello: BrokerHello = handshake::decode(&body).unwrap().decode().unwrap();
        u8::from(!matches!(hello.outcome, Err(Refusal::WrongUser { broker: 0, peer: 65534 })))
    };
    // SAFETY: the child allocates, which the C library permits after its own fork, and takes no other lock.
    assert_eq!(unsafe { process::in_fork(refused) }, Ok(0));
    fs::set_permissions(socket.parent().unwrap(), Permissions::from_mode(0o700)).unwrap();
    domain.ping().unwrap();
}
