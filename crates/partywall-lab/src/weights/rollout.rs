//! The rollout: starts readers, kills trainers half-way, restarts readers, and reports which beliefs are refuted.

use super::{file::Cached, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    let mib = order.mib.map_or_else(|| default_mib(session), Ok)?;
    let trainer = session.partner();
    let mut rollout = Rollout { session, mib, readers: Vec::new(), total: Total::default() };
    rollout.serve(trainer, &order)?;
    let outlived = rollout.outlived()?;
    let ready = rollout.restarts()?;
    for mut reader in std::mem::take(&mut rollout.readers) {
        rollout.total.add(reader.ask(())?);
        reader.end();
    }
    let Rollout { session, total, .. } = rollout;
    session.report(total.read())?;
    session.report(total.half())?;
    session.report(outlived)?;
    session.report(ready.step(mib))?;
    session.result(total.to_json());
    session.result(ready.to_json());
    Ok(())
}

/// Returns the default size of a version: that of a model on a GPU, and one that a CPU checks in a moment elsewhere.
fn default_mib(session: &Session) -> Result<u64, Failure> {
    Ok(match session.gpu_if_any()? {
        None => 64,
        Some(gpu) if gpu.context().driver().is_simulated() => 1,
        Some(_) => 2048,
    })
}

struct Rollout<'a> {
    session: &'a mut Session,
    mib: u64,
    readers: Vec<Peer>,
    total: Total,
}

/// The counts of all processes.
#[derive(Debug, Default)]
struct Total {
    /// Versions of the first trainer.
    versions: u64,
    kills: u32,
    broker_kills: u32,
    /// Kills before which every reader had checked the weights while the victim was in the middle of a version.
    undisturbed: u32,
    /// The version that was the newest one at the last kill.
    at_kill: u64,
    readers: u64,
    checks: u64,
    mixed: u64,
    changes: u64,
    slowest: Duration,
}

/// The times from the start of a process until it has the addresses of all weights, and the part that is not the start
/// of the process and the driver.
#[derive(Debug, Default)]
struct Restarts {
    opened: Vec<(Duration, Duration)>,
    loaded: Vec<(Duration, Duration)>,
    /// Why there is no file.
    without_file: Option<String>,
}

impl Rollout<'_> {
    /// Lets the trainer commit its versions, kills other trainers, and restarts readers.
    fn serve(&mut self, mut trainer: Peer, order: &Order) -> Result<(), Failure> {
        trainer.say(Job::Serve { first: 0, mib: self.mib })?;
        self.committed(&mut trainer)?;
        for _ in 0..order.readers {
            let (reader, _) = self.start(Reading::Name)?;
            self.readers.push(reader);
        }
        while self.total.versions < order.versions {
            if u64::from(self.total.kills) < KILLS {
                let and_broker = match order.kill {
                    None => u64::from(self.total.kills) + 1 == KILLS,
                    Some(victim) => victim == Victim::Broker,
                };
                self.kill_half_way(and_broker)?;
                self.replace_reader()?;
            }
            self.committed(&mut trainer)?;
        }
        // It may have committed more meanwhile, up to the message that is `None`.
        trainer.say(())?;
        while let Some(committed) = trainer.hear::<Option<Committed>>()? {
            self.total.versions = committed.number + 1;
        }
        trainer.end();
        Ok(())
    }

    /// Waits for the next version.
    fn committed(&mut self, trainer: &mut Peer) -> Result<(), Failure> {
        self.total.versions = trainer.hear::<Committed>()?.number + 1;
        Ok(())
    }

    /// Kills a trainer that has written half of a version, once every reader has checked the weights again; before that
    /// the broker, if `and_broker` is set.
    fn kill_half_way(&mut self, and_broker: bool) -> Result<(), Failure> {
        let mut victim = self.session.spawn("trainer")?;
        victim.say(Job::Half { number: self.total.versions + 1, mib: self.mib })?;
        victim.hear::<()>()?;
        if and_broker {
            let domain = self.session.domain().clone();
            self.session.broker().kill_worker(&domain)?;
            self.total.broker_kills += 1;
        }
        let mut undisturbed = true;
        for reader in &mut self.readers {
            let before: Progress = reader.ask(())?;
            // The first of the two may have begun before the victim was half-way.
            let has_checked = || Ok(reader.ask::<Progress>(())?.checks >= before.checks + 2);
            undisturbed = undisturbed && until(TIMEOUT, Duration::ZERO, has_checked)?;
        }
        victim.kill();
        self.total.kills += 1;
        self.total.at_kill = self.total.versions;
        self.total.undisturbed += u32::from(undisturbed);
        Ok(())
    }

    /// Ends the first reader, and starts another one.
    fn replace_reader(&mut self) -> Result<(), Failure> {
        let mut reader = self.readers.remove(0);
        self.total.add(reader.ask(())?);
        reader.end();
        let (reader, _) = self.start(Reading::Name)?;
        self.readers.push(reader);
        Ok(())
    }

    /// Starts a reader, and waits until it has the addresses of all weights. Returns how long that took, and the part
    /// of it that is not the start of the process and the driver.
    fn start(&mut self, what: Reading) -> Result<(Peer, (Duration, Duration)), Failure> {
        let start = Moment::now();
        let mut reader = self.session.spawn("reader")?;
        self.total.readers += u64::from(matches!(what, Reading::Name));
        reader.say(what)?;
        let ReaderReady { at, after } = reader.hear()?;
        Ok((reader, (at.since(start), after)))
    }

    /// Opens the weights in a new process after the trainer has ended, and lets a successor commit the next version.
    fn outlived(&mut self) -> Result<Step, Failure> {
        let last = self.total.versions - 1;
        let (mut reader, _) = self.start(Reading::Name)?;
        let found: Progress = reader.ask(())?;
        self.readers.push(reader);
        let mut successor = self.session.spawn("trainer")?;
        successor.say(Job::Serve { first: last + 1, mib: self.mib })?;
        successor.hear::<Committed>()?;
        let mut newest = Vec::new();
        for reader in &mut self.readers {
            let mut seen = Progress::default();
            until(TIMEOUT, Duration::ZERO, || {
                seen = reader.ask(())?;
                Ok(seen.newest > last)
            })?;
            newest.push(seen.newest);
        }
        // No other process waits for it. Dropping it kills it.
        drop(successor);
        let is_there = found.newest == last && found.mixed == 0;
        let goes_on = newest.iter().all(|newest| *newest > last);
        Ok(Step::new(
            "outlived",
            "The trainer has ended; a new reader opens the weights, and another trainer commits the next version",
            "The name is `kept`: the broker holds the memory, and no process has to run for it. Any process may commit the \
             next version.",
        )
        .value("the last version", last.to_string())
        .value("the new reader found", format!("version {}, {} of its checks wrong", found.newest, found.mixed))
        .value("readers that got the successor's version", format!("{} of {}", count(&newest, last), newest.len()))
        .says(LOST, !is_there)
        .judge(is_there && goes_on, "the weights are there, and the name goes on", "the weights are not there"))
    }

    /// Starts readers that open the name, and processes that load a file with the same bytes, in turns.
    fn restarts(&mut self) -> Result<Restarts, Failure> {
        let mut ready = Restarts::default();
        let file = Cached::write(self.session);
        for _ in 0..RESTARTS {
            let (mut reader, times) = self.start(Reading::Name)?;
            ready.opened.push(times);
            self.total.add(reader.ask(())?);
            reader.end();
            match &file {
                Err(failure) => ready.without_file = Some(failure.message.clone()),
                Ok(file) => {
                    let (loader, times) = self.start(Reading::File(file.path()))?;
                    ready.loaded.push(times);
                    loader.end();
                }
            }
        }
        Ok(ready)
    }
}

/// Returns how many of the versions are newer than `last`.
fn count(newest: &[u64], last: u64) -> usize {
    newest.iter().filter(|newest| **newest > last).count()
}

impl Total {
    fn add(&mut self, seen: Progress) {
        let Progress { checks, mixed, changes, slowest, newest: _ } = seen;
        self.checks += checks;
        self.mixed += mixed;
        self.changes += changes;
        self.slowest = self.slowest.max(slowest);
    }

    fn read(&self) -> Step {
        Step::new(
            "read",
            "Readers open the latest version and check every word, again and again",
            "A version cannot change once it is committed, and an open gives one version. A reader keeps it for as long as \
             it likes, whatever is committed meanwhile.",
        )
        .value("readers", format!("{}, one after the other or at the same time", self.readers))
        .value("versions opened and checked", format!("{}, a newer one {} times", self.checks, self.changes))
        .value("with words of another version", self.mixed.to_string())
        .value("slowest open", millis(self.slowest))
        .says(MIX, self.mixed > 0)
        .judge(self.mixed == 0, "each reader saw one version at a time", "a reader saw a mix of versions")
    }

    fn half(&self) -> Step {
        let Self { versions, kills, broker_kills, undisturbed, at_kill, .. } = self;
        Step::new(
            "half-way",
            "Trainers that have written half of a version, and are killed",
            "The half-written version has no name, so no process waits for it or sees it. Its memory goes with its process.",
        )
        .value("killed", kills.to_string())
        .value("the broker killed meanwhile", broker_kills.to_string())
        .value("while every reader went on", undisturbed.to_string())
        .value("versions committed after the last death", (versions - at_kill).to_string())
        .says(WAIT, undisturbed < kills)
        .says(HALF, versions == at_kill)
        .judge(undisturbed == kills && versions > at_kill, "no reader waited, and the name goes on", "a reader waited for a writer")
    }

    fn to_json(&self) -> Value {
        let Self { versions, kills, broker_kills, readers, checks, mixed, slowest, .. } = self;
        json!({
            "versions": versions, "kills": kills, "broker_kills": broker_kills, "readers": readers, "checks": checks,
            "mixed": mixed, "slowest_open_us": slowest.as_micros() as u64,
        })
    }
}

impl Restarts {
    fn step(&self, mib: u64) -> Step {
        let times = |times: &[(Duration, Duration)], part: fn(&(Duration, Duration)) -> Duration| {
            spread(&times.iter().map(part).collect::<Vec<_>>())
        };
        let step = Step::new(
            "restart",
            format!("A process starts, until it has {} of weights", bytes(mib << 20)),
            "A restarted reader maps what is there. The alternative reads the same bytes from a file in the page cache, \
             by several threads, into memory of its own. Both start the process and the driver.",
        )
        .value("ready by the name", times(&self.opened, |times| times.0))
        .value("… opening alone", times(&self.opened, |times| times.1));
        match &self.without_file {
            Some(why) => step.untried(&[FILE], format!("there is no file to compare with: {why}")),
            None => step
                .value("ready by the file", times(&self.loaded, |times| times.0))
                .value("… loading alone", times(&self.loaded, |times| times.1))
                .says(FILE, median(&self.loaded) <= median(&self.opened))
                .judge(true, "measured", ""),
        }
    }

    fn to_json(&self) -> Value {
        let [opened, loaded] = [&self.opened, &self.loaded].map(|times| {
            median(times).map(|(ready, alone)| {
                json!({ "ready_ms": ready.as_secs_f64() * 1e3, "alone_ms": alone.as_secs_f64() * 1e3 })
            })
        });
        json!({ "by_name": opened, "by_file": loaded })
    }
}

/// Returns the median by the whole time.
fn median(times: &[(Duration, Duration)]) -> Option<(Duration, Duration)> {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied()
}

/// How many trainers are killed.
const KILLS: u64 = 2;

/// How often a reader is restarted, in either way.
const RESTARTS: usize = 3;
