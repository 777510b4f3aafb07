//! The watcher: starts workers, takes permits away from them, kills two, and reports which beliefs are refuted.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let Workers { workers } = session.options()?;
    let mut watcher = Watcher {
        semaphore: session.domain().semaphore(SEMAPHORE, PERMITS)?,
        workers: vec![session.partner()],
        obstacle: match session.gpu_if_any()? {
            Some(gpu) => device::streams_cannot_wait(&gpu),
            None => Some(device::NEEDS_A_GPU.into()),
        },
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
        session.report(experiment(&mut watcher)?)?;
    }
    watcher.workers.into_iter().for_each(Peer::end);
    Ok(())
}

struct Watcher {
    semaphore: Semaphore,
    /// The first worker may run in its own terminal; the last ones are killed.
    workers: Vec<Peer>,
    /// Why no stream can write words of shared memory here.
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
    /// All workers work at the same time.
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
            "Each permit has its own word, with its holder and a number, which changes by one compare-and-swap. There \
             is no counter that two processes could both find large enough.",
        )
        .value("turns of all workers", turns.len().to_string())
        .value("most at the same time", format!("{most}, of {PERMITS} permits"))
        .value("waited for a permit", spread(&waited))
        .says(NEVER_MORE, right)
        .judge(
            right && turns.len() == TURNS * self.workers.len(),
            "never more than there are permits, and every worker had all turns",
            "more at the same time than there are permits, or turns were lost",
        ))
    }

    /// Each worker requests a permit once the previous one waits.
    fn order(&mut self) -> Result<Step, Failure> {
        let mut all = self.take_all()?;
        for (index, worker) in self.workers.iter().enumerate() {
            ask(worker)?;
            self.wait_for_waiters(index + 1)?;
        }
        // A single permit circulates, so that no two workers get one at the same moment.
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
            "The workers request permits one after the other, while none is free",
            "A process that finds no free permit takes the last place of a queue. A released permit is handed to the \
             first place. Only a process that searches for a free permit at that very moment can come in between.",
        )
        .value("requested", list(&asked))
        .value("got a permit", list(&order))
        .says(IN_TURN, right)
        .judge(right, "in the order of the requests", "in another order"))
    }

    /// A wait ends at its timeout.
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
            "A worker that does not wait, or not for long",
            "try_acquire never waits. acquire leaves the queue when its timeout is over, and the processes behind it \
             move up.",
        )
        .value("try_acquire", if none { "none" } else { "a permit" })
        .value("acquire, limit 100 ms", format!("{answer}, after {}", millis(after)))
        .value("waiting afterwards", waiting.to_string())
        .judge(
            none && timed_out && waiting == 0,
            "both returned without a permit",
            "not both returned without a permit",
        ))
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
            "The broker has a pidfd of the process. Once that, the end of its connection and a settle time of 100 ms \
             prove the death, the broker frees the words that name the process, and hands the permit to the next \
             waiter.",
        )
        .value(format!("process {}", victim.pid), "killed with its permit")
        .value("from the kill to the next holder", got_after(turn, killed))
        .says(LOST, turn.is_none())
        .judge(turn.is_some(), "the permit was handed to the waiting process", "no process got it"))
    }

    /// The last worker is killed while it waits before another one.
    fn killed_waiter(&mut self) -> Result<Step, Failure> {
        let mut all = self.take_all()?;
        let mut victim = self.workers.pop().ok_or_else(|| unexpected("there is no worker to be killed"))?;
        victim.say(Command::Keep)?;
        self.wait_for_waiters(1)?;
        ask(self.last()?)?;
        self.wait_for_waiters(2)?;
        victim.kill();
        let freed = Moment::now();
        // One permit, for the first place.
        drop(all.pop());
        let turn = turn(self.last()?)?;
        drop(all);
        Ok(Step::new(
            "killed-waiting",
            "A worker that waits before another one is killed",
            "The permit may be handed to a dead process, because no other process knows of the death yet. After the \
             proof the broker takes the permit back, and hands it to the next place.",
        )
        .value(format!("process {}", victim.pid), "killed at the first place of the queue")
        .value("from the release to the next worker", got_after(turn, freed))
        .says(STUCK, turn.is_none())
        .judge(turn.is_some(), "the next worker got a permit", "the next worker got none"))
    }

    /// A permit is released when a kernel has ended.
    fn stream(&mut self) -> Result<Step, Failure> {
        let step = Step::new(
            "stream",
            "A permit that a stream releases",
            "release_on makes the stream write a word behind the kernel. The worker's service thread sees the word and \
             releases the permit. The worker's host does not wait, and the GPU never has more users than permits.",
        );
        if let Some(why) = &self.obstacle {
            return Ok(step.untried(&[HOST_GIVES], why));
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
            .judge(
                right,
                "it was released after the kernel had ended",
                "it was released before the kernel can have ended",
            ))
    }

    /// Nothing was lost.
    fn whole(&mut self) -> Result<Step, Failure> {
        let free = self.semaphore.available();
        let waiting = self.semaphore.waiting();
        let step = Step::new(
            "whole",
            "What is left after all this",
            "Two workers are dead: one had a permit, the other a place in the queue.",
        );
        let step = step.value("free permits", format!("{free}, of {PERMITS}")).value("waiting", waiting.to_string());
        let right = free == PERMITS && waiting == 0;
        Ok(step.judge(right, "all permits are free, and no process waits", "something was lost"))
    }

    fn take_all(&self) -> Result<Vec<Permit>, Failure> {
        self.take_all_but(0)
    }

    /// Takes permits until this many are left.
    fn take_all_but(&self, left: u32) -> Result<Vec<Permit>, Failure> {
        (left..PERMITS).map(|_| Ok(self.semaphore.acquire(TIMEOUT)?)).collect()
    }

    /// Waits until this many processes are in the queue.
    fn wait_for_waiters(&self, count: usize) -> Result<(), Failure> {
        let waits = || Ok(self.semaphore.waiting() as usize >= count);
        match until(TIMEOUT, Duration::from_micros(200), waits)? {
            true => Ok(()),
            false => Err(unexpected("a worker did not request a permit")),
        }
    }

    fn last(&mut self) -> Result<&mut Peer, Failure> {
        self.workers.last_mut().ok_or_else(|| unexpected("there is no worker"))
    }
}

fn got_after(turn: Option<Turn>, since: Moment) -> String {
    turn.map_or_else(|| format!("never, within {} s", TIMEOUT.as_secs()), |turn| millis(turn.got.since(since)))
}

/// Returns the maximum number of simultaneous turns.
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
    fn overlapping_turns_are_count() {
        let turn = |got, gave| Turn { asked: Moment::at(0), got: Moment::at(got), gave: Moment::at(gave) };
        assert_eq!(most_at_once(&[]), 0);
        assert_eq!(most_at_once(&[turn(1, 3), turn(3, 5), turn(5, 6)]), 1);
        assert_eq!(most_at_once(&[turn(1, 9), turn(2, 4), turn(5, 8), turn(6, 7)]), 3);
    }
}
