//! The master: submits arrays, verifies every element of the results, and kills workers meanwhile.

use std::hash::{BuildHasher, RandomState};

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut order: Order = session.options()?;
    let under_mps = session.gpu_if_any()?.as_ref().map_or(Ok(false), |gpu| device::under_mps(gpu))?;
    let spared = spared(&order, under_mps);
    order.kill &= spared.is_none();
    let blocks = WINDOW + SPARE + u32::from(order.workers);
    let queue = session.domain().queue(QUEUE).tasks(blocks).inputs(blocks, BYTES).outputs(blocks, BYTES);
    let queue = queue.place(session.place).create()?;
    let stream = queue.gpu().map(|gpu| Stream::new(gpu.context()).doing("creating a stream")).transpose()?;
    if let Some(stream) = &stream {
        broker::prepare(session.domain(), stream);
    }
    let first = session.partner();
    let mut master = Master {
        session,
        queue,
        stream,
        workers: Vec::new(),
        doomed: None,
        tasks: order.tasks,
        submitted: 0,
        tickets: Vec::new(),
        count: Count::default(),
    };
    let time = master.run(first, order.kill, order.workers)?;
    let Master { count, .. } = master;
    session.report(count.step(order.tasks, time, order.kill))?;
    let textbook = textbook::run(session, &order)?;
    session.report(textbook.step())?;
    if let Some(why) = spared {
        let step =
            Step::new("killed", "Workers are killed in the middle of tasks", "Other workers repeat their tasks.");
        session.report(step.untried(&[LOST, TWICE, HALF], why))?;
    }
    session.result(count.to_json(order.tasks));
    session.result(json!({ "textbook": textbook }));
    Ok(())
}

/// Returns why no worker is killed, if none is.
///
/// Under MPS the death of a client with work on the GPU may end the server, and with it the other clients. A death
/// there does not prove that the GPU has finished, either, so each one would leave blocks in quarantine until none are
/// left.
fn spared(order: &Order, under_mps: bool) -> Option<&'static str> {
    match (order.kill, under_mps) {
        (false, _) => Some("nothing was killed: --kill does it"),
        (true, true) => Some(
            "nothing was killed: under MPS a killed worker may end the MPS server, and its blocks would stay in \
             quarantine; stop the daemon, or run with --device host",
        ),
        (true, false) => None,
    }
}

struct Master<'a> {
    session: &'a Session,
    queue: Queue,
    /// The stream that fills inputs on a GPU.
    stream: Option<Stream>,
    workers: Vec<Peer>,
    /// The worker that will be killed when it has written half of the output of its next task.
    doomed: Option<usize>,
    tasks: u32,
    submitted: u32,
    /// Tasks whose results have not been taken, with the times of their submission.
    tickets: Vec<(u32, Ticket, Instant)>,
    count: Count,
}

/// The outcomes of the tasks.
#[derive(Debug, Default)]
struct Count {
    right: u32,
    wrong: u32,
    lost: u32,
    /// Results beyond one for each task.
    twice: u64,
    kills: u32,
    /// Attempts beyond the first of each task that has a result.
    redelivered: u32,
    /// The longest time from the submission of a task to its result.
    longest: Duration,
}

impl Master<'_> {
    /// Runs all tasks. Returns how long that took.
    fn run(&mut self, first: Peer, kill: bool, workers: u8) -> Result<Duration, Failure> {
        let start = Instant::now();
        self.submit()?;
        if kill {
            self.kill_in_the_middle()?;
        }
        first.say(Job::Work { reports: true })?;
        self.workers.push(first);
        while self.workers.len() < usize::from(workers) {
            self.workers.push(self.start(Job::Work { reports: false })?);
        }
        let every = if self.stream.is_some() { KILL_EVERY_ON_GPU } else { KILL_EVERY };
        let mut kills = 0;
        let mut killed_at = Instant::now();
        let mut answered = 0;
        while self.count.answered() < self.tasks {
            self.submit()?;
            self.take()?;
            self.kill_doomed()?;
            if self.count.kills > kills {
                (kills, killed_at, answered) = (self.count.kills, Instant::now(), self.count.answered());
            }
            // Waits for a result between kills, so that even a single worker makes progress.
            let is_time = killed_at.elapsed() >= every && self.count.answered() > answered;
            if kill && self.doomed.is_none() && is_time {
                self.kill_any()?;
            }
        }
        let time = start.elapsed();
        // A worker that should be killed in the middle of a task may not have found a task.
        self.doomed.take().map(|worker| self.workers.remove(worker));
        let results = self.count.right + self.count.wrong;
        self.count.twice = self.queue.stats().completed.saturating_sub(results.into());
        let last = self.workers.iter().map(|_| Task::new(LAST));
        let _last = self.queue.submit_all(last, TIMEOUT).map_err(|refused| refused.error)?;
        for worker in &mut self.workers {
            worker.hear::<()>()?;
        }
        self.workers.drain(..).for_each(Peer::end);
        Ok(time)
    }

    fn start(&self, job: Job) -> Result<Peer, Failure> {
        let worker = self.session.spawn("worker")?;
        worker.say(job)?;
        Ok(worker)
    }

    /// Submits tasks while there is room for them.
    fn submit(&mut self) -> Result<(), Failure> {
        while self.submitted < self.tasks && self.tickets.len() < WINDOW as usize {
            let number = self.submitted;
            let numbers = (0..ELEMENTS).map(|index| element(number, index));
            let mut input = self.queue.inputs().alloc(TIMEOUT)?;
            let task = |input| Task::new(ROOTS).input(input).output(BYTES).max_attempts(MAX_ATTEMPTS);
            let ticket = match &self.stream {
                None => {
                    input.as_mut_slice::<f32>()?.iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
                    self.queue.submit(task(input), TIMEOUT)
                }
                Some(stream) => {
                    let bytes: Vec<u8> = numbers.flat_map(f32::to_ne_bytes).collect();
                    input.device()?.copy_from_host(stream.as_ref(), &bytes)?;
                    self.queue.submit_on(task(input), stream.as_ref(), TIMEOUT)
                }
            };
            self.tickets.push((number, ticket.map_err(|refused| refused.error)?, Instant::now()));
            self.submitted += 1;
        }
        Ok(())
    }

    /// Takes the available results, and waits a moment for the oldest task.
    fn take(&mut self) -> Result<(), Failure> {
        for (number, ticket, submitted) in std::mem::take(&mut self.tickets) {
            let wait = if self.tickets.is_empty() { TURN } else { Duration::ZERO };
            match ticket.wait(wait) {
                Ok(result) => {
                    self.count.redelivered += u32::from(result.attempt()) - 1;
                    self.count.longest = self.count.longest.max(submitted.elapsed());
                    let output = result.output().ok_or_else(|| unexpected("a result has no output"))?;
                    let is_right = has_roots(output, self.session.place, number)?;
                    *if is_right { &mut self.count.right } else { &mut self.count.wrong } += 1;
                }
                Err(Error::Timeout { .. }) if submitted.elapsed() < TIMEOUT => {
                    self.tickets.push((number, ticket, submitted));
                }
                Err(Error::Timeout { .. } | Error::InvalidData(_) | Error::Gone(_)) => self.count.lost += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Kills a worker that has written half of the output of a task, before other workers start.
    fn kill_in_the_middle(&mut self) -> Result<(), Failure> {
        let mut worker = self.start(Job::Half)?;
        worker.hear::<()>()?;
        worker.kill();
        self.count.kills += 1;
        Ok(())
    }

    /// Kills a random worker, and starts one that will be killed in the middle of a task. Never kills a worker in
    /// another terminal.
    fn kill_any(&mut self) -> Result<(), Failure> {
        let victims: Vec<_> = (0..self.workers.len()).filter(|worker| self.workers[*worker].is_child()).collect();
        if victims.is_empty() {
            return Ok(());
        }
        let victim = victims[RandomState::new().hash_one(()) as usize % victims.len()];
        self.replace(victim, Job::Half)?;
        self.doomed = Some(victim);
        Ok(())
    }

    /// Kills the doomed worker once it is in the middle of a task, and starts another one.
    fn kill_doomed(&mut self) -> Result<(), Failure> {
        match self.doomed {
            Some(worker) if self.workers[worker].has_spoken()? => {
                self.workers[worker].hear::<()>()?;
                self.doomed = None;
                self.replace(worker, Job::Work { reports: worker == 0 })
            }
            _ => Ok(()),
        }
    }

    fn replace(&mut self, worker: usize, job: Job) -> Result<(), Failure> {
        self.workers[worker].kill();
        self.count.kills += 1;
        self.workers[worker] = self.start(job)?;
        Ok(())
    }
}

impl Count {
    fn answered(&self) -> u32 {
        self.right + self.wrong + self.lost
    }

    fn is_right(&self, tasks: u32) -> bool {
        self.right == tasks && self.twice == 0
    }

    fn to_json(&self, tasks: u32) -> Value {
        let Self { right, wrong, lost, twice, kills, redelivered, .. } = self;
        json!({
            "tasks": tasks, "right": right, "wrong": wrong, "lost": lost, "twice": twice, "kills": kills,
            "redelivered": redelivered,
        })
    }

    fn step(&self, tasks: u32, time: Duration, kill: bool) -> Step {
        let Self { right, wrong, lost, twice, kills, redelivered, longest } = self;
        let step = Step::new(
            "results",
            format!("{tasks} arrays of {ELEMENTS} numbers, and their square roots"),
            "A claim belongs to one worker and one attempt. When the broker has proved the death of a worker (100 ms), \
             other workers repeat its tasks and write to their own outputs. The output of the dead attempt reaches no \
             result.",
        )
        .value("results", format!("{right} right in every element, {wrong} wrong, {lost} lost, {twice} twice"))
        .value("workers killed", kills.to_string())
        .value("repeated attempts", redelivered.to_string())
        .value("longest time from submission to result", millis(*longest))
        .value("tasks a second", format!("{:.0}", f64::from(tasks) / time.as_secs_f64()));
        let step = match redelivered {
            _ if !kill => step,
            0 => step.leaves_open(&[LOST, TWICE, HALF]),
            _ => step.says(LOST, *lost > 0).says(TWICE, *twice > 0).says(HALF, *wrong > 0),
        };
        step.judge(
            self.is_right(tasks),
            "every task has one result, and it is right",
            "results are wrong, lost or duplicated",
        )
    }
}

/// Returns whether every element of a result is the square root of its number.
fn has_roots(output: &Block, place: Place, task: u32) -> Result<bool, Failure> {
    let is_root = |(index, root): (usize, f32)| root.to_bits() == element(task, index).sqrt().to_bits();
    if place == Place::Host {
        return Ok(output.as_slice::<f32>()?.iter().copied().enumerate().all(is_root));
    }
    let range = output.device()?;
    let bytes = device::bytes_of(range.gpu(), range.as_slice()).doing("reading a result")?;
    let roots = bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().expect("4 bytes")));
    Ok(roots.enumerate().all(is_root))
}

/// How long the master waits for a result before it checks its workers.
const TURN: Duration = Duration::from_millis(10);

/// The interval at which a random worker is killed, and its successor in the middle of a task. On a GPU a worker takes
/// longer to start.
const KILL_EVERY: Duration = Duration::from_millis(50);
const KILL_EVERY_ON_GPU: Duration = Duration::from_secs(1);

/// The maximum number of attempts: so large that a task survives even if every worker that claims it is killed.
const MAX_ATTEMPTS: u8 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_worker_is_killed_under_mps() {
        let order = |kill| Order { workers: 1, tasks: 1, kill };
        assert_eq!(spared(&order(true), false), None);
        assert!(spared(&order(true), true).is_some_and(|why| why.contains("MPS")));
        for under_mps in [false, true] {
            assert!(spared(&order(false), under_mps).is_some_and(|why| why.contains("--kill")));
        }
    }
}
