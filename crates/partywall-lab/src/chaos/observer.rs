//! The observer: starts the members, strikes them by the plan, counts the resources that are left, and runs the
//! checker.

use std::os::unix::process::ExitStatusExt;

use partywall::WhenSome;
use rustix::process::Signal;

use super::{
    check::{Check, check},
    history::Record,
    plan::{Action, Strike},
    strikes::{ResourceLimit, Victim},
    *,
};
use crate::weights::tensors;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    let path = match &order.check {
        Some(path) => path.clone(),
        None => {
            let default = || {
                partywall_os::environment::temporary_directory()
                    .join(format!("partywall-chaos-{}.jsonl", std::process::id()))
            };
            let path = order.history.clone().unwrap_or_else(default);
            let history = History::create(&path)?;
            // A reader of the report may have another working directory.
            let path = fs::canonicalize(&path).unwrap_or(path);
            run(session, &order, history, &path)?;
            path
        }
    };
    let records = history::read(&path)?;
    let checks = check(&records);
    let violations: usize = checks.iter().map(|check| check.violations.len()).sum();
    let mut step = Step::new(
        "killed",
        "At random moments members of every kind, and the broker, are killed (SIGKILL); members are stopped (SIGSTOP) \
         or evicted, their connections shut down, and they get no further descriptors or memory for a while",
        "The plan follows from the seed: the same seed strikes the same members in the same order. How far a run gets \
         depends on the machine.",
    );
    for (label, key, is_counted) in STRIKES {
        let count = records.iter().filter(|record| is_counted(&record.what)).count();
        step = step.value(label, count.to_string());
        session.result(json!({ key: count }));
    }
    let step = step.value("history", path.display().to_string());
    session.report(step.judge(true, "the history is whole", ""))?;
    for check in checks {
        session.report(check.step())?;
    }
    session.result(json!({ "violations": violations, "history": path }));
    Ok(())
}

/// Whether a line of the history counts.
type Counts = fn(&What) -> bool;

/// What is counted: the names for people and for programs, and which lines of the history count.
const STRIKES: [(&str, &str, Counts); 8] = [
    ("kills", "kills", |what| matches!(what, What::Killed)),
    ("kills of the broker", "broker_kills", |what| matches!(what, What::BrokerKilled)),
    ("stopped for a while", "stops", |what| matches!(what, What::Stopped { until: None })),
    ("stopped until others went on", "outlasted", |what| matches!(what, What::Stopped { until: Some(_) })),
    ("evicted", "evictions", |what| matches!(what, What::Evicted)),
    ("connections shut down", "sockets_closed", |what| matches!(what, What::SocketsClosed)),
    ("descriptor tables filled", "descriptors_filled", |what| {
        matches!(what, What::Limited { of: Resource::Descriptors })
    }),
    ("left without memory", "memory_taken", |what| matches!(what, What::Limited { of: Resource::Memory })),
];

/// A member of the population.
struct Individual {
    role: &'static str,
    number: u32,
    peer: Peer,
    /// True once it has opened its object. Before, it could not even report that it lacks something.
    has_begun: bool,
    /// When a stopped member continues.
    continues: Option<Instant>,
    outlasted: Option<Outlasted>,
    limits: Vec<ResourceLimit>,
    /// When it first got no further memory.
    starved: Option<Moment>,
}

/// A member that is stopped until another one has gone on.
struct Outlasted {
    began: Instant,
    since: Moment,
    until: Progress,
    /// Where the records of that time begin in the history.
    offset: u64,
    /// Whether it is killed then, and does not continue.
    killed: bool,
}

struct Observer<'a> {
    session: &'a mut Session,
    history: History,
    path: &'a Path,
    population: Vec<Individual>,
    started: u32,
    kills: u64,
}

/// The resources of a broker, as it and the kernel count them.
struct Resources {
    leases: u64,
    descriptors: u64,
    kib: u64,
}

fn run(session: &mut Session, order: &Order, history: History, path: &Path) -> Result<(), Failure> {
    history.add(What::Plan { seed: order.seed, seconds: order.duration })?;
    // The death of a client with work on the GPU may end the MPS server, and with it the other clients.
    let kills = !session.gpu_if_any()?.as_ref().map_or(Ok(false), |gpu| device::under_mps(gpu))?;
    let domain = session.domain().clone();
    let place = session.place;
    let bytes = WORDS * 8;
    let topic = domain.topic(MESSAGES).max_bytes(bytes).dtype(DType::U64).depth(16).publishers(4).subscribers(6);
    let topic = topic.place(place).create()?;
    let queue = domain.queue(TASKS).tasks(TASKS_MOST).inputs(TASKS_MOST, bytes).outputs(TASKS_MOST, bytes);
    let queue = queue.lease(LEASE).place(place).create()?;
    let permits = domain.semaphore(PERMITS, PERMITS_MOST)?;
    let pool = domain.pool(BLOCKS).blocks(BLOCKS_MOST).block_bytes(bytes).place(place).create()?;
    let mut constants = domain.create(CONSTANTS, place).tensor("x", DType::U64, &[WORDS]).kept(true).allocate()?;
    constants.write("x", &CONSTANT.to_le_bytes().repeat(WORDS as usize))?;
    let constants = constants.commit()?;
    let mail = domain.create(MAIL, partywall::Place::Host).tensor("x", DType::U64, &[MAIL_WORDS]).mutable(true);
    let _mail = mail.allocate()?.commit()?;
    history.add(What::Writing { number: 0 })?;
    let mut build = tensors::create(session, 0, 1).allocate()?;
    tensors::Patterns::default().write(&mut build, 0, tensors::TENSORS)?;
    let began = Moment::now();
    let first = build.commit()?;
    history.add(What::Committed { number: 0, version: first.version(), began })?;
    first.release()?;
    // The broker keeps the memory of timelines, with which streams wait for each other's messages.
    drop(domain.timeline_writer("first")?);
    let blocks = u64::from(topic.stats().free);
    // Connections that are about to end, and memory about to go, would count as if they were to stay.
    let mut before = Resources::of_broker(&domain)?;
    until(SETTLES, MOMENT, || {
        let earlier = std::mem::replace(&mut before, Resources::of_broker(&domain)?);
        Ok(earlier.descriptors == before.descriptors)
    })?;

    let mut observer = Observer { session, history, path, population: Vec::new(), started: 0, kills: 0 };
    for role in POPULATION {
        let member = observer.start(role)?;
        observer.population.push(member);
    }
    // Each message is owed to the spared subscriber, and the topic is not idle while there is the spared publisher.
    let mut spared = observer.population[SPARED].iter_mut();
    spared.try_for_each(|member| until(TIMEOUT, MOMENT / 10, || member.has_begun()).map(drop))?;
    let mut plan = SplitMix::new(order.seed);
    let end = Instant::now() + Duration::from_secs(order.duration);
    while Instant::now() < end && order.kills.is_none_or(|kills| observer.kills < kills) {
        observer.strike(plan.next(POPULATION.len()), kills)?;
    }
    observer.end()?;
    let Observer { history, kills, .. } = observer;
    // No task names it any more. Members that were killed have left it attached.
    let _ = queue.detach(&queue.attach(&constants)?, SETTLES);

    // The broker proves deaths, and reclaims the resources of the dead, within moments.
    let count = || -> Result<_, Failure> {
        let topic = topic.stats();
        let queue = queue.stats();
        let pool = pool.stats();
        let unfinished = queue.pending + queue.claimed + queue.enqueued + queue.done + queue.dead;
        let older: u32 = domain.names()?.iter().map(|name| name.older).sum();
        let after = Resources::of_broker(&domain)?;
        let held = topic.held + topic.read;
        let exactly = |of, count: u64, found: u64| (of, count, count, found);
        Ok(vec![
            exactly("members", 1, domain.members()?.len() as u64),
            exactly("names", 6, domain.names()?.len() as u64),
            exactly("leases", before.leases, after.leases),
            exactly("old versions", 0, older.into()),
            exactly("permits", PERMITS_MOST.into(), permits.available().into()),
            exactly("waiters for permits", 0, permits.waiting().into()),
            exactly("waiters for blocks", 0, pool.waiting.into()),
            exactly("free blocks of the pool", BLOCKS_MOST.into(), pool.free.into()),
            exactly("blocks of the topic, free or in the ring", blocks, u64::from(topic.free + topic.in_ring)),
            exactly("samples that are held or read", 0, held.into()),
            exactly("publishers", 0, topic.publishers.len() as u64),
            exactly("subscribers", 0, topic.subscribers.len() as u64),
            exactly("unfinished tasks", 0, unfinished.into()),
            exactly("attached segments", 0, queue.attached.into()),
            exactly("free inputs", TASKS_MOST.into(), queue.free_inputs.into()),
            exactly("free outputs", TASKS_MOST.into(), queue.free_outputs.into()),
            ("descriptors of the broker", 0, before.descriptors, after.descriptors),
            ("KiB of the broker", 0, before.kib + GROWTH_KIB, after.kib),
        ])
    };
    let mut found = Vec::new();
    until(SETTLES, MOMENT, || {
        found = count()?;
        Ok(found.iter().all(|(_, least, most, found)| (least..=most).contains(&found)))
    })?;
    for (of, least, most, found) in found {
        history.add(What::Counted { of: of.into(), least, most, found })?;
    }
    history.add(What::End { kills })
}

impl Observer<'_> {
    fn start(&mut self, role: &'static str) -> Result<Individual, Failure> {
        self.started += 1;
        let number = self.started;
        self.history.add_about(number, What::Started { role: role.into() })?;
        let peer = self.session.spawn(role)?;
        peer.say(Job { number, history: self.path.to_owned() })?;
        let limits = Vec::new();
        Ok(Individual { role, number, peer, has_begun: false, continues: None, outlasted: None, limits, starved: None })
    }

    /// Kills a member, and starts another one in its place.
    fn replace(&mut self, index: usize) -> Result<(), Failure> {
        self.history.add_about(self.population[index].number, What::Killed)?;
        self.note_end(index)?;
        self.population[index].peer.kill();
        self.kills += 1;
        self.population[index] = self.start(POPULATION[index])?;
        Ok(())
    }

    /// Ends what strikes have begun, where its time has come.
    fn relieve(&mut self, now: Instant) -> Result<(), Failure> {
        for index in 0..self.population.len() {
            let member = &mut self.population[index];
            if member.is_outlasted(self.path)? {
                // A member that aborted meanwhile is replaced below.
                let killed = member.outlasted.take().is_some_and(|outlasted| outlasted.killed);
                if killed && member.victim().is_some() {
                    self.replace(index)?;
                } else {
                    member.continues = Some(now);
                }
            }
            self.population[index].relieve(&self.history, now)?;
            self.replace_if_aborted(index)?;
        }
        Ok(())
    }

    fn strike(&mut self, strike: Strike, kills: bool) -> Result<(), Failure> {
        thread::sleep(strike.pause);
        let now = Instant::now();
        self.relieve(now)?;
        let index = strike.member;
        let is_spared = SPARED.contains(&index);
        match strike.action {
            // What the others do in spite of it is to be seen.
            action if self.population[index].outlasted.is_some() && action != Action::KillBroker => {}
            Action::Kill if kills && !is_spared => {
                self.replace(index)?;
            }
            Action::Evict { kill } if kills && !is_spared && self.population[index].has_begun()? => {
                let member = &mut self.population[index];
                if member.victim().is_some() {
                    self.history.add_about(member.number, What::Evicted)?;
                    // Fails for a member that has died meanwhile.
                    let _ = self.session.domain().evict(member.peer.pid, kill);
                    self.replace(index)?;
                }
            }
            Action::Outlast { killed } if self.may_be_outlasted(index) && self.population[index].has_begun()? => {
                let until = progress(POPULATION[index]);
                let offset = self.history.len()?;
                let member = &mut self.population[index];
                if let Some(until) = until
                    && let Some(victim) = member.victim()
                {
                    let since = Moment::now();
                    self.history.add_at(since, member.number, What::Stopped { until: Some(until) })?;
                    victim.signal(Signal::STOP);
                    member.continues = None;
                    let killed = killed && kills && !is_spared;
                    member.outlasted = Some(Outlasted { began: now, since, until, offset, killed });
                }
            }
            Action::KillBroker => {
                self.history.add(What::BrokerKilled)?;
                let domain = self.session.domain().clone();
                self.session.broker().kill_worker(&domain)?;
            }
            Action::Stop(time) => {
                let member = &mut self.population[index];
                if let Some(victim) = member.victim() {
                    self.history.add_about(member.number, What::Stopped { until: None })?;
                    victim.signal(Signal::STOP);
                    member.continues = Some(now + time);
                }
            }
            Action::CloseSockets if kills && self.population[index].has_begun()? => {
                let member = &mut self.population[index];
                if member.victim().is_some_and(Victim::close_sockets) {
                    self.history.add_about(member.number, What::SocketsClosed)?;
                }
            }
            Action::FillDescriptors(time) if kills && self.population[index].has_begun()? => {
                self.population[index].limit(&self.history, Resource::Descriptors, time)?;
            }
            // A driver without address space may never return.
            Action::TakeMemory(time)
                if kills
                    && !is_spared
                    && self.session.place == partywall::Place::Host
                    && self.population[index].has_begun()? =>
            {
                self.population[index].limit(&self.history, Resource::Memory, time)?;
            }
            Action::Kill
            | Action::Evict { .. }
            | Action::Outlast { .. }
            | Action::CloseSockets
            | Action::FillDescriptors(_)
            | Action::TakeMemory(_) => {}
        }
        Ok(())
    }

    /// Returns whether others of its role can go on while it is stopped, too. Publishers can as long as one is left.
    /// Holders that are stopped keep their permits, and the other roles are few.
    fn may_be_outlasted(&self, index: usize) -> bool {
        let role = POPULATION[index];
        // A simulated GPU stops with the process that uses it, and a message may never be complete.
        if role == "publisher" && matches!(self.session.place, partywall::Place::Gpu(_)) {
            return false;
        }
        let stopped = self.population.iter().filter(|member| member.role == role && member.outlasted.is_some()).count();
        stopped < if role == "publisher" { 2 } else { 1 }
    }

    /// Replaces a member that could not continue without memory. It counts as killed since it got no more of it.
    fn replace_if_aborted(&mut self, index: usize) -> Result<(), Failure> {
        let member = &mut self.population[index];
        if let Some(starved) = member.starved
            && member.peer.ending().is_some_and(|ending| matches!(ending.signal(), Some(ABORTED | NO_STACK)))
        {
            self.history.add_at(starved, member.number, What::Killed)?;
            self.kills += 1;
            self.population[index] = self.start(POPULATION[index])?;
        }
        Ok(())
    }

    /// Ends all members: those that make something before those that wait for it.
    fn end(&mut self) -> Result<(), Failure> {
        until(2 * TIMEOUT, MOMENT / 10, || {
            self.relieve(Instant::now())?;
            Ok(self.population.iter().all(|member| member.outlasted.is_none()))
        })?;
        for index in 0..self.population.len() {
            let member = &mut self.population[index];
            let end = Instant::now() + Duration::from_secs(3600);
            member.relieve(&self.history, end)?;
            self.replace_if_aborted(index)?;
        }
        for role in ENDING {
            for index in (0..self.population.len()).rev().filter(|index| POPULATION[*index] == role).collect::<Vec<_>>()
            {
                self.note_end(index)?;
            }
            let (ending, others) =
                std::mem::take(&mut self.population).into_iter().partition(|member| member.role == role);
            self.population = others;
            let ending: Vec<Individual> = ending;
            ending.into_iter().for_each(|member| member.peer.end());
        }
        Ok(())
    }

    /// Records that a member has ended by itself, which is an error.
    fn note_end(&mut self, index: usize) -> Result<(), Failure> {
        let member = &mut self.population[index];
        member.has_begun()?;
        if member.peer.has_spoken()? {
            let why = member.peer.next::<()>().err().map_or_else(|| "it speaks".to_owned(), |failure| failure.message);
            let what = What::Failed { call: "the process".into(), why: history::shortened(&why) };
            self.history.add_about(member.number, what)?;
        }
        Ok(())
    }
}

/// Returns what others of its role, or those that depend on it, must do while a member is stopped. The others may wait:
/// publishers for `block` subscribers, and users of a name for the process that is creating it.
fn progress(role: &str) -> Option<Progress> {
    match role {
        "writer" | "watcher" => Some(Progress::Committed),
        "reader" => Some(Progress::Read),
        "publisher" | "viewer" => Some(Progress::Published),
        "submitter" | "worker" => Some(Progress::Result),
        "holder" => Some(Progress::Acquired),
        "taker" => Some(Progress::Took),
        _ => None,
    }
}

impl Individual {
    /// Returns whether it is stopped and another member has gone on, or has not for too long.
    fn is_outlasted(&mut self, path: &Path) -> Result<bool, Failure> {
        let Some(outlasted) = &mut self.outlasted else { return Ok(false) };
        let records = history::read_from(path, &mut outlasted.offset)?;
        // A line may come later than the moment of which it tells.
        let shows = |record: &Record| record.at > outlasted.since && outlasted.until.is_shown_by(record, self.number);
        let goes_on = records.iter().any(shows);
        Ok(goes_on || outlasted.began.elapsed() > TIMEOUT)
    }

    /// Returns its process, unless that has ended: once its end was waited for, its pid may be another process's.
    fn victim(&mut self) -> Option<Victim> {
        self.peer.ending().is_none().then_some(Victim(self.peer.pid))
    }

    /// Returns whether it has said that it begins.
    fn has_begun(&mut self) -> Result<bool, Failure> {
        if !self.has_begun && self.peer.has_spoken()? {
            // An error stays until `note_end` records it.
            self.has_begun = matches!(self.peer.next::<()>(), Ok(Some(())));
        }
        Ok(self.has_begun)
    }

    fn limit(&mut self, history: &History, of: Resource, time: Duration) -> Result<(), Failure> {
        if self.limits.iter().any(|limit| limit.of == of) {
            return Ok(());
        }
        if of == Resource::Memory {
            self.starved.get_or_insert_with(Moment::now);
        }
        history.add_about(self.number, What::Limited { of })?;
        let limit = self.victim().and_then(|victim| victim.limit(of, time));
        self.limits.extend(limit);
        Ok(())
    }

    /// Lets it continue, and ends its limits, if their time has come.
    fn relieve(&mut self, history: &History, now: Instant) -> Result<(), Failure> {
        if self.continues.is_some_and(|at| at <= now) {
            self.continues = None;
            if let Some(victim) = self.victim() {
                victim.signal(Signal::CONT);
                history.add_about(self.number, What::Continued)?;
            }
        }
        for limit in self.limits.extract_if(.., |limit| limit.until <= now).collect::<Vec<_>>() {
            if let Some(victim) = self.victim() {
                victim.set(limit.of, limit.was);
            }
            history.add_about(self.number, What::Lifted { of: limit.of })?;
        }
        Ok(())
    }
}

impl Resources {
    fn of_broker(domain: &Domain) -> Result<Self, Failure> {
        let status = domain.status()?;
        let pid = status.pid;
        let inspecting = format!("inspecting the broker, pid {pid}");
        let kernels = fs::read_to_string(format!("/proc/{pid}/status")).doing(&inspecting)?;
        let kib =
            kernels.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse().ok());
        let kib = kib.ok_or_else(|| unexpected("the kernel does not say how much memory the broker has"))?;
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).doing(&inspecting)?.count() as u64;
        Ok(Self { leases: status.leases, descriptors, kib })
    }
}

impl Check {
    fn step(self) -> Step {
        let Self { id, title, why, belief, counted, violations } = self;
        let step = Step::new(id, title, why).value("checked", counted);
        let step = violations.iter().take(SHOWN).fold(step, |step, violation| step.value("violation", violation));
        let step = if violations.is_empty() { step } else { step.value("violations", violations.len().to_string()) };
        let step = step.when_some(belief, |step, belief| step.says(belief, !violations.is_empty()));
        step.judge(violations.is_empty(), "as promised", "a promise was broken")
    }
}

/// The members, by their index.
const POPULATION: [&str; 26] = [
    "submitter",
    "subscriber",
    "watcher",
    "publisher",
    "writer",
    "writer",
    "reader",
    "reader",
    "builder",
    "builder",
    "publisher",
    "publisher",
    "subscriber",
    "viewer",
    "viewer",
    "submitter",
    "worker",
    "worker",
    "holder",
    "holder",
    "holder",
    "taker",
    "taker",
    "taker",
    "maker",
    "maker",
];

/// The roles in the order in which they end.
const ENDING: [&str; 12] = [
    "writer",
    "publisher",
    "submitter",
    "worker",
    "subscriber",
    "viewer",
    "reader",
    "holder",
    "taker",
    "builder",
    "maker",
    "watcher",
];

/// How a process ends that gets no memory for its heap, or for its stack: SIGABRT and SIGSEGV.
const ABORTED: i32 = Signal::ABORT.as_raw();
const NO_STACK: i32 = Signal::SEGV.as_raw();

/// The indices of members that are stopped, but never killed, so that they must receive
/// everything, and the topic always has a publisher.
const SPARED: std::ops::Range<usize> = 0..4;

/// How much the broker's own memory may grow, in KiB: allocators keep some of what is freed.
const GROWTH_KIB: u64 = 4096;

/// How long the broker may take to reclaim the resources of the last members.
const SETTLES: Duration = Duration::from_secs(5);

/// How many violations a step shows.
const SHOWN: usize = 5;
