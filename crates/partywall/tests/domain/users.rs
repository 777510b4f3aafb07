//! Processes of two users on one host: what they share, and what they are refused.

use std::{
    fs::Permissions,
    os::{
        fd::{AsFd, AsRawFd},
        unix::{fs::PermissionsExt, process::CommandExt},
    },
    path::PathBuf,
    process::Command,
    time::Duration,
};

use partywall::{
    DType, Domain, Error, OtherUsers, Place, Policy, Task, Then, TimelineEnding,
    error::{Denied, Gone, LimitReached},
};
use partywall_broker::UserLimits;
use partywall_harness::{copy_program, next_order, say};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::{
    TIMEOUT,
    world::{Actor, World, eventually},
};

/// A user without any rights.
const GUEST: u32 = 65_533;

/// A broker of this user that admits another one, and a copy of this program that the other may run.
struct TwoUsers {
    world: World,
    program: PathBuf,
    _directory: tempfile::TempDir,
}

impl TwoUsers {
    fn new() -> Self {
        Self::with(UserLimits::default())
    }

    fn with(per_uid: UserLimits) -> Self {
        assert!(rustix::process::geteuid().is_root(), "only root starts processes of other users");
        let world = World::with(|config| {
            config.admission.uids = [GUEST].into();
            config.limits.per_uid = per_uid;
        });
        std::fs::set_permissions(world.directory(), Permissions::from_mode(0o711)).unwrap();
        // The other user may not be allowed to read the directory of this program.
        let directory = tempfile::Builder::new().prefix("pw-").tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let program = directory.path().join("test");
        copy_program(&std::env::current_exe().unwrap(), &program);
        Self { world, program, _directory: directory }
    }

    /// Starts a process of the other user, which does what [`play`] says.
    fn guest(&self) -> Actor {
        let program = &self.program;
        self.world.play_with("users guest", |command| {
            *command = Command::new(program);
            command.uid(GUEST).gid(GUEST).current_dir("/").env("TMPDIR", "/tmp").env_remove("HOME");
        })
    }
}

/// Obeys orders, and reports the outcome of each in one line.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    say("ready");
    let mut kept = Kept::default();
    while let Some(order) = next_order() {
        let (what, name) = order.split_once(' ').unwrap();
        let outcome = obey(&domain, &mut kept, what, name);
        say(&format!("outcome {}", outcome.unwrap_or_else(|error| format!("{error}"))));
    }
}

/// What a guest keeps until it ends.
#[derive(Default)]
struct Kept(Vec<Box<dyn std::any::Any>>);

impl Kept {
    fn keep(&mut self, kept: impl std::any::Any) {
        self.0.push(Box::new(kept));
    }
}

fn obey(domain: &Domain, kept: &mut Kept, what: &str, name: &str) -> partywall::Result<String> {
    match what {
        "open" => {
            let segment = domain.open(name, Duration::ZERO)?;
            let text = format!("{} of {}", super::world::value(&segment), segment.owner());
            kept.keep(segment);
            return Ok(text);
        }
        "reopen" => {
            let descriptors = domain.descriptors(name, Duration::ZERO)?;
            let path = format!("/proc/self/fd/{}", descriptors.chunks()[0].as_fd().as_raw_fd());
            let ways = [OFlags::RDWR, OFlags::WRONLY, OFlags::RDONLY];
            let reopened = ways.map(|way| rustix::fs::open(&path, way, Mode::empty()).err());
            return Ok(format!("{:?}", reopened.iter().all(|errno| *errno == Some(Errno::ACCESS))));
        }
        "commit" => {
            let builder = domain.create(name, Place::Host).tensor("x", DType::U32, &[4]).kept(true).shared(true);
            let mut build = builder.allocate()?;
            build.write("x", &7_u32.to_ne_bytes().repeat(4))?;
            kept.keep(build.commit()?);
        }
        "remove" => drop(domain.remove(name)?),
        "evict" => drop(domain.evict(name.parse::<u32>().unwrap(), true)?),
        "stop" => domain.stop_broker(true)?,
        "abandon" => domain.abandon_timeline(name)?,
        "signal" => {
            let writer = domain.timeline_options(name).shared(true).writer()?;
            writer.signal(1)?;
            kept.keep(writer);
        }
        "wait" => domain.timeline(name)?.wait(1, TIMEOUT)?,
        "permit" => kept.keep(domain.semaphore(name, 1)?.acquire(TIMEOUT)?),
        "publish" => {
            let publisher = domain.topic(name).open()?.publisher()?;
            let mut loan = publisher.loan(DType::U32, &[1], TIMEOUT)?;
            loan.as_mut_slice::<u32>()?.fill(7);
            loan.filled().publish(TIMEOUT)?;
            kept.keep(publisher);
        }
        "receive" => drop(domain.topic(name).open()?.subscriber(Policy::Block)?.recv(TIMEOUT)?),
        "await" => drop(domain.open(name, Duration::from_secs(60))?),
        "semaphore" => kept.keep(domain.semaphore(name, 1)?),
        "work" => {
            let queue = domain.queue(name).open()?;
            let task = queue.claim(TIMEOUT)?;
            let reference = task.task();
            task.complete()?;
            queue.retry(&reference)?;
        }
        "join" => kept.keep(Domain::options().start(false).connect()?),
        "operate" => {
            let operator = Domain::options().start(false).operator(true).connect()?;
            // One that is idle has to go.
            std::thread::spawn(move || {
                while operator.status().is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        }
        "names" => {
            let names = domain.names()?.into_iter().map(|name| name.name);
            return Ok(names
                .chain(domain.objects()?.iter().map(|object| object.name().to_owned()))
                .collect::<Vec<_>>()
                .join(","));
        }
        "members" => return Ok(format!("{:?}", domain.members()?.iter().map(|member| member.uid).collect::<Vec<_>>())),
        other => panic!("{other}"),
    }
    Ok("done".into())
}

fn order(guest: &mut Actor, order: &str) -> String {
    guest.send(order);
    guest.expect("outcome")
}

/// Commits one small tensor `x` in host memory.
fn commit(domain: &Domain, name: &str, shared: bool) -> partywall::Segment {
    let builder = domain.create(name, Place::Host).tensor("x", DType::U32, &[4]).shared(shared);
    let mut build = builder.allocate().unwrap();
    build.write("x", &5_u32.to_ne_bytes().repeat(4)).unwrap();
    build.commit().unwrap()
}

// Holds 36.
#[test]
fn needs_root_other_user_reads_what_is_shared_and_writes_nothing_in_host_memory() {
    let users = TwoUsers::new();
    let domain = users.world.connect();
    let _private = commit(&domain, "private", false);
    let shared = commit(&domain, "shared", true);
    assert!(shared.is_shared() && shared.owner() == 0);
    let mut guest = users.guest();
    assert_eq!(order(&mut guest, "open shared"), "5 of 0");
    assert_eq!(order(&mut guest, "reopen shared"), "true", "no way of opening the file again is allowed");
    let refused = order(&mut guest, "open private");
    assert!(
        refused.contains("user 0") && refused.contains("user 65533") && refused.contains("not shared"),
        "{refused}"
    );
    for command in ["commit shared", "commit private", "commit shared/x", "remove shared", "remove private", "stop now"]
    {
        let refused = order(&mut guest, command);
        assert!(refused.contains("user 0, and this process runs as user 65533"), "{command}: {refused}");
    }
    let own = std::process::id();
    assert!(order(&mut guest, &format!("evict {own}")).contains("belongs to user 0"));
    assert_eq!(order(&mut guest, "names all"), "shared");
    assert_eq!(order(&mut guest, "members all"), "[65533]");
    assert_eq!(domain.members().unwrap().iter().map(|member| member.uid).collect::<Vec<_>>(), [0, GUEST]);

    // The other way round.
    assert_eq!(order(&mut guest, "commit theirs"), "done");
    assert_eq!(super::world::value(&domain.open("theirs", TIMEOUT).unwrap()), 7);
    let Err(Error::Denied(Denied::OtherUser { what, owner, uid })) = domain.remove("theirs") else { panic!() };
    assert_eq!((what, owner, uid), (OtherUsers::Remove { name: "theirs".into() }, GUEST, 0));
    // A mutable segment would be written by its readers.
    let mutable = domain.create("m", Place::Host).tensor("x", DType::U8, &[1]).mutable(true).shared(true).allocate();
    assert!(matches!(mutable, Err(Error::Denied(Denied::Sharing { .. }))), "{mutable:?}");
}

// Holds 149.
#[test]
fn needs_root_objects_are_used_by_two_users_in_host_memory() {
    let users = TwoUsers::new();
    let domain = users.world.connect();
    let topic = |name: &str, shared| {
        let options = domain.topic(name).max_bytes(64).place(Place::Host).shared(shared);
        options.create().unwrap()
    };
    let private = topic("private", false);
    let shared = topic("shared", true);
    let subscriber = shared.subscriber(Policy::Block).unwrap();
    let queue = |name: &str, shared| {
        domain.queue(name).tasks(2).inputs(2, 8).outputs(2, 8).place(Place::Host).shared(shared).create().unwrap()
    };
    let work = queue("work", true);
    let hidden = queue("hidden", false);
    let clock = domain.timeline_options("clock").shared(true).writer().unwrap();
    let _own = domain.timeline_writer("own").unwrap();
    let seats = domain.semaphore_options("seats", 1).shared(true).open().unwrap();
    let _own_seats = domain.semaphore("own", 1).unwrap();

    let mut guest = users.guest();
    for command in ["publish private", "work hidden", "wait own", "signal own", "permit own"] {
        let refused = order(&mut guest, command);
        assert!(refused.contains("not shared") && refused.contains("user 65533"), "{command}: {refused}");
    }
    for command in ["abandon own", "abandon clock"] {
        assert!(order(&mut guest, command).contains("cannot abandon"), "{command}");
    }
    assert_eq!(order(&mut guest, "publish shared"), "done");
    assert_eq!(subscriber.recv(TIMEOUT).unwrap().as_slice::<u32>().unwrap(), [7]);
    let brief = topic("brief", true);
    guest.send("receive brief");
    eventually("it is joined", || brief.stats().subscribers.len() == 1);
    domain.withdraw("brief", Duration::ZERO, Then::Evict).unwrap();
    let ended = guest.expect("outcome");
    assert!(ended.contains("was withdrawn by pid"), "no user evicts processes of another: {ended}");
    let ticket = work.submit(Task::new("x"), TIMEOUT).unwrap();
    let refused = order(&mut guest, "work work");
    assert!(refused.contains("cannot retry or purge"), "{refused}");
    ticket.wait(TIMEOUT).unwrap();
    clock.signal(1).unwrap();
    assert_eq!(order(&mut guest, "wait clock"), "done");
    assert_eq!(order(&mut guest, "permit seats"), "done");
    assert_eq!(seats.available(), 0);
    assert_eq!(order(&mut guest, "signal theirs"), "done");
    let theirs = domain.timeline("theirs").unwrap();
    theirs.wait(1, TIMEOUT).unwrap();

    // Its death is noticed as any other.
    guest.kill();
    let ended = theirs.wait(2, TIMEOUT);
    let is_dead = matches!(&ended, Err(Error::Gone(Gone::Timeline { ending: TimelineEnding::OwnerDied, .. })));
    assert!(is_dead, "{ended:?}");
    eventually("its permit is back", || seats.available() == 1);
    eventually("its place in the topic is free", || shared.stats().publishers.is_empty());
    drop((private, hidden));
}

#[test]
fn needs_root_quota_of_a_user_binds_it_and_no_other_in_host_memory() {
    let users = TwoUsers::with(UserLimits { names: Some(2), clients: Some(2), ..UserLimits::default() });
    let domain = users.world.connect();
    let mut guest = users.guest();
    assert_eq!(order(&mut guest, "commit a"), "done");
    assert_eq!(order(&mut guest, "signal b"), "done");
    let refused = order(&mut guest, "commit c");
    assert!(refused.contains("user 65533 has a share of 2 of the broker's names"), "{refused}");
    assert!(
        refused.contains(&format!("the largest holders are pid {} of user 65533 (2 names)", guest.pid())),
        "{refused}"
    );
    let _own = (commit(&domain, "d", false), commit(&domain, "e", false));
    let failed = domain.semaphore("f", 1).unwrap_err();
    let Error::LimitReached(LimitReached::User { uid: 0, allowed: 2, needed: 3, .. }) = failed else {
        panic!("{failed}")
    };
    assert!(failed.advice().contains("--max-names-per-uid"), "{}", failed.advice());
    let status = domain.status().unwrap();
    assert_eq!(status.users.iter().map(|user| (user.uid, user.names)).collect::<Vec<_>>(), [(0, 2), (GUEST, 2)]);
}

// Holds 152.
#[test]
fn needs_root_each_share_of_a_user_is_refused_with_the_processes_that_have_it_in_host_memory() {
    let shares = UserLimits { timelines: Some(1), semaphores: Some(1), waits: Some(1), ..UserLimits::default() };
    let users = TwoUsers::with(UserLimits { clients: Some(4), operators: Some(1), ..shares });
    let domain = users.world.connect();
    let (mut first, mut second, mut waiting) = (users.guest(), users.guest(), users.guest());
    assert_eq!(order(&mut first, "signal t"), "done");
    assert_eq!(order(&mut first, "semaphore s"), "done");
    waiting.send("await later");
    let of_guest = || domain.status().unwrap().users.into_iter().find(|user| user.uid == GUEST).unwrap();
    eventually("it waits", || of_guest().waits == 1);
    let named =
        |actor: &Actor, what: &str| format!("the largest holders are pid {} of user {GUEST} ({what})", actor.pid());
    for (command, what, holder) in [
        ("signal t2", "a share of 1 of the broker's timelines, and 1 in use", named(&first, "1 timeline")),
        ("semaphore s2", "a share of 1 of the broker's semaphores, and 1 in use", named(&first, "1 semaphore")),
        (
            "await other",
            "a share of 1 of the broker's waiting requests, and 1 in use",
            named(&waiting, "1 waiting request"),
        ),
    ] {
        let refused = order(&mut second, command);
        assert!(refused.contains(what) && refused.contains(&holder), "{command}: {refused}");
    }
    let guest = of_guest();
    assert_eq!((guest.timelines, guest.semaphores, guest.limits.waits), (1, 1, 1));

    // A process that may not join, as a member or as an operator, is told who is in its way.
    second.send("join 1");
    assert_eq!(second.expect("outcome"), "done");
    let refused = order(&mut second, "join 2");
    assert!(refused.contains("a share of 4 of the broker's members, and 4 in use"), "{refused}");
    assert!(refused.contains(&format!("pid {} of user {GUEST} (2 members)", second.pid())), "{refused}");
    assert_eq!(order(&mut first, "operate 1"), "done");
    let refused = order(&mut second, "operate 2");
    assert!(refused.contains(&named(&first, "1 connection")), "{refused}");
}

// Holds 150, 152.
#[test]
fn needs_root_share_of_leases_binds_a_user_and_its_error_names_who_has_them_in_host_memory() {
    let users = TwoUsers::with(UserLimits { leases: Some(2), ..UserLimits::default() });
    let domain = users.world.connect();
    let _shared = commit(&domain, "shared", true);
    let (mut first, mut second) = (users.guest(), users.guest());
    assert_eq!(order(&mut first, "open shared"), "5 of 0");
    assert_eq!(order(&mut first, "open shared"), "5 of 0");
    let refused = order(&mut second, "open shared");
    assert!(refused.contains("user 65533 has a share of 2 of the broker's leases, and 2 in use"), "{refused}");
    assert!(
        refused.contains(&format!("the largest holders are pid {} of user 65533 (2 leases)", first.pid())),
        "{refused}"
    );
    drop(domain.open("shared", Duration::ZERO).unwrap());
    let status = domain.status().unwrap();
    assert_eq!(status.users.iter().map(|user| (user.uid, user.leases)).collect::<Vec<_>>(), [(0, 1), (GUEST, 2)]);
}
