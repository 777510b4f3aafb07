//! The watcher: starts workers, takes permits away from them, kills two, and says which claims held.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let Workers { workers } = session.options()?;
    let mut watcher = Watcher {
        semaphore: session.domain().semaphore(SEMAPHORE, PERMITS)?,
        workers: vec![session.partner()],
        obstacle: device::streams_cannot_wait(&session.gpu()),
    };
    for _ in 1..workers {
        watcher.workers.push(session.spawn("worker")?);
    }
    for worker in &mut watcher.workers {
        worker.hear::<()>()?;
    }
    for experiment in [
        Watcher::maximum,
        Watcher::order,
        Watcher::limit,
        Watcher::killed_holder,
        Watcher::killed_waiter,
        Watcher::stream,
        Watcher::whole,
    ] {
        session.tell(experiment(&mut watcher)?)?;
    }
    watcher.workers.into_iter().for_each(Peer::end);
    Ok(())
}

struct Watcher {
    semaphore: Semaphore,
    /// The first one may have a terminal of its own; those at the end are killed.
    workers: Vec<Peer>,
    /// Why streams cannot write words that others see here.
    obstacle: Option<String>,
}

/// Asks a worker for one turn.
fn ask(worker: &Peer) -> Result<(), Failure> {
    worker.say(Command::Turns(1, false))
}

/// Returns the turn that a worker was asked for, if a permit came.
fn turn(worker: &mut Peer) -> Result<Option<Turn>, Failure> {
    Ok(worker.hear::<Vec<Turn>>()?.pop())
}

impl Watcher {
    /// All work at once.
    fn maximum(&mut self) -> Result<Step, Failure> {
        for (index, worker) in self.workers.iter().enumerate() {
            worker.say(Command::Turns(TURNS, index == 0))?;
        }
        let mut turns: Vec<Turn> = Vec::new();
        for worker in &mut self.workers {
            turns.append(&mut worker.hear()?);
        }
        let most = most_at_once(&turns);
        let waited: Vec<_> = turns.iter().map(|turn| turn.got.since(turn.asked)).collect();
        let right = most <= PERMITS as usize;
        Ok(Step::new(
            "maximum",
            format!("{} workers and {PERMITS} permits", self.workers.len()),
            "Each permit is a word of its own, with its holder and a number; it changes by one compare-and-swap. There is \
             no count that two processes could both find large enough.",
        )
        .value("turns of all workers", turns.len().to_string())
        .value("most at the same time", format!("{most}, of {PERMITS} permits"))
        .value("waited for a permit", spread(&waited))
        .says(NEVER_MORE, right)
        .judge(
            right && turns.len() == TURNS * self.workers.len(),
            "never more than there are permits, and everybody had all turns",
            "more at the same time than there are permits, or turns were lost",
        ))
    }

    /// Each worker asks when the one before it waits.
    fn order(&mut self) -> Result<Step, Failure> {
        let mut all = self.take_all()?;
        for (index, worker) in self.workers.iter().enumerate() {
            ask(worker)?;
            self.wait_for_waiters(index + 1)?;
        }
        // One permit goes round, so that no two workers get one at the same moment.
        drop(all.pop());
        let mut got = Vec::new();
        for (index, worker) in self.workers.iter_mut().enumerate() {
            got.extend(turn(worker)?.map(|turn| (turn.got, index + 1)));
        }
        drop(all);
        got.sort_unstable();
        let order: Vec<_> = got.iter().map(|(_, worker)| *worker).collect();
        let asked: Vec<_> = (1..=self.workers.len()).collect();
        let right = order == asked;
        Ok(Step::new(
            "order",
            "The workers ask one after the other, while no permit is free",
            "A process that does not find a free permit takes the next place of a queue, and a permit that comes back is handed to \
             the first place. Only a process that was looking for a free permit at the very moment may come in between.",
        )
        .value("asked", list(&asked))
        .value("got a permit", list(&order))
        .says(IN_TURN, right)
        .judge(right, "in the order in which they asked", "in another order"))
    }

    /// No process waits longer than its timeout.
    fn limit(&mut self) -> Result<Step, Failure> {
        let all = self.take_all()?;
        let tried = self.semaphore.try_acquire()?;
        let began = Moment::now();
        let waited = self.semaphore.acquire(MOMENT);
        let after = Moment::now().since(began);
        let waiting = self.semaphore.waiting();
        let none = tried.is_none();
        let timed_out = matches!(waited, Err(Error::Timeout { .. }));
        drop(all);
        let answer = waited.map_or_else(|error| error.to_string(), |_| "a permit".into());
        Ok(Step::new(
            "limit",
            "A worker that does not want to wait, or not for long",
            "try_acquire never waits. acquire gives its place in the queue up when its time is over, and those behind it \
             move up.",
        )
        .value("try_acquire", if none { "none" } else { "a permit" })
        .value("acquire, limit 100 ms", format!("{answer}, after {}", millis(after)))
        .value("waiting afterwards", waiting.to_string())
        .judge(none && timed_out && waiting == 0, "both came back without a permit", "not both came back without one"))
    }

    /// The last worker is killed while it has a permit.
    fn killed_holder(&mut self) -> Result<Step, Failure> {
        let mut victim = self.workers.pop().ok_or_else(|| unexpected("there is no worker to be killed"))?;
        victim.ask::<()>(Command::Keep)?;
        let others = self.take_all_but(1)?;
        ask(self.last()?)?;
        self.wait_for_waiters(1)?;
        let killed = Moment::now();
        victim.kill();
        let turn = turn(self.last()?)?;
        drop(others);
        Ok(Step::new(
            "killed",
            "A worker with a permit is killed (SIGKILL), and another one waits",
            "The broker holds the dead process's pidfd. When that, the end of its connection and a settle time of 100 ms \
             prove the death, it frees the words that name the process, and hands the permit on.",
        )
        .value(format!("process {}", victim.pid), "killed with its permit")
        .value("from the kill to the next holder", got_after(turn, killed))
        .says(LOST, turn.is_none())
        .judge(turn.is_some(), "the permit came back, and went to the process that waited", "no process has got it"))
    }

    /// The last worker is killed while it waits, in front of another one.
    fn killed_waiter(&mut self) -> Result<Step, Failure> {
        let mut all = self.take_all()?;
        let mut victim = self.workers.pop().ok_or_else(|| unexpected("there is no worker to be killed"))?;
        victim.say(Command::Keep)?;
        self.wait_for_waiters(1)?;
        ask(self.last()?)?;
        self.wait_for_waiters(2)?;
        victim.kill();
        let freed = Moment::now();
        // One, which is for the first place.
        drop(all.pop());
        let turn = turn(self.last()?)?;
        drop(all);
        Ok(Step::new(
            "killed-waiting",
            "A worker that waits in front of another one is killed",
            "The permit may be handed to a place whose owner is dead: nobody else can know that yet. After the proof the \
             broker takes it back, and hands it to the next place.",
        )
        .value(format!("process {}", victim.pid), "killed at the first place of the queue")
        .value("from the release to the one behind it", got_after(turn, freed))
        .says(STUCK, turn.is_none())
        .judge(turn.is_some(), "the one behind it got a permit", "the one behind it has got none"))
    }

    /// A permit that comes back when a kernel has ended.
    fn stream(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "stream",
            "A permit that a stream gives back",
            "release_on has the stream write a word behind the kernel; the worker's service thread sees it, and gives the \
             permit back. The worker's host does not wait, and the GPU is not used by more than is allowed.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(Some(HOST_GIVES), why));
        }
        let others = self.take_all_but(1)?;
        let worker = self.workers.first_mut().ok_or_else(|| unexpected("there is no worker"))?;
        let handed: Handed = worker.ask(Command::OnStream)?;
        let permit = self.semaphore.acquire(TIMEOUT)?;
        let got = Moment::now();
        drop((permit, others));
        self.workers[0].hear::<()>()?;
        let waited = got.since(handed.after);
        let right = waited > SLOW / 4;
        Ok(step
            .value("release_on", short(handed.after.since(handed.before)))
            .value("kernel", millis(SLOW))
            .value("from release_on to the next holder", millis(waited))
            .says(HOST_GIVES, !right)
            .judge(right, "it came back when the kernel had ended", "it came back before the kernel can have ended"))
    }

    /// Nothing was lost.
    fn whole(&mut self) -> Result<Step, Failure> {
        let free = self.semaphore.available();
        let waiting = self.semaphore.waiting();
        let step = Step::new(
            "whole",
            "What is left after all this",
            "Two workers are dead, one of them with a permit, one with a place in the queue.",
        );
        let step = step.value("free permits", format!("{free}, of {PERMITS}")).value("waiting", waiting.to_string());
        let right = free == PERMITS && waiting == 0;
        Ok(step.judge(right, "all permits are there, and nobody waits", "something was lost"))
    }

    fn take_all(&self) -> Result<Vec<Permit>, Failure> {
        self.take_all_but(0)
    }

    /// Takes permits, so that so many are left.
    fn take_all_but(&self, left: u32) -> Result<Vec<Permit>, Failure> {
        (left..PERMITS).map(|_| Ok(self.semaphore.acquire(TIMEOUT)?)).collect()
    }

    /// Waits until so many are in the queue.
    fn wait_for_waiters(&self, count: usize) -> Result<(), Failure> {
        let deadline = Instant::now() + TIMEOUT;
        while (self.semaphore.waiting() as usize) < count {
            if Instant::now() > deadline {
                return Err(unexpected("a worker did not ask for a permit"));
            }
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    fn last(&mut self) -> Result<&mut Peer, Failure> {
        self.workers.last_mut().ok_or_else(|| unexpected("there is no worker"))
    }
}

fn got_after(turn: Option<Turn>, since: Moment) -> String {
    turn.map_or_else(|| format!("never, within {} s", TIMEOUT.as_secs()), |turn| millis(turn.got.since(since)))
}

/// How many of the turns were at the same time, at most.
fn most_at_once(turns: &[Turn]) -> usize {
    // At equal times a release comes before an acquisition.
    let mut changes: Vec<_> = turns.iter().flat_map(|turn| [(turn.got, true), (turn.gave, false)]).collect();
    changes.sort_unstable();
    let mut now = 0_usize;
    let mut most = 0;
    for (_, begins) in changes {
        now = if begins { now + 1 } else { now.saturating_sub(1) };
        most = most.max(now);
    }
    most
}

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_turns_are_counted() {
        let turn = |got, gave| Turn { asked: Moment::at(0), got: Moment::at(got), gave: Moment::at(gave) };
        assert_eq!(most_at_once(&[]), 0);
        assert_eq!(most_at_once(&[turn(1, 3), turn(3, 5), turn(5, 6)]), 1);
        assert_eq!(most_at_once(&[turn(1, 9), turn(2, 4), turn(5, 8), turn(6, 7)]), 3);
    }
}
