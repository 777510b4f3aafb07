//! The textbook queue, for comparison: a ring of volatile words in shared memory, without fences and owners.
//!
//! | words | field | written by |
//! |---|---|---|
//! | 0 | head: the next task | workers that take it |
//! | 1 | tail: the end of the tasks | the master |
//! | 2 … | how often each task was done | workers |
//! | then | the square roots of each task | workers |

use partywall_os::{
    map::{SharedMap, SharedSlice},
    memfd::Draft,
};

use super::*;

/// The maximum number of tasks. The outputs of all tasks exist at the same time.
const MOST_TASKS: u32 = 2_000;

const HEAD: usize = 0;
const TAIL: usize = 1;
const DONE: usize = 2;

const SHARING: &str = "sharing the textbook queue";

/// The outcomes of its tasks.
#[derive(Debug, Default, Serialize)]
pub(super) struct Count {
    tasks: u32,
    right: u32,
    wrong: u32,
    lost: u32,
    twice: u32,
    kills: u32,
}

/// One process's mapping of the ring.
struct Ring(SharedMap);

impl Ring {
    fn words(&self) -> SharedSlice<'_, u32> {
        self.0.slice(0, self.0.len() / 4).expect("words are aligned at the beginning of a mapping")
    }

    /// Returns the index of the first output word of a task.
    fn roots(&self, task: u32) -> usize {
        DONE + self.words().get(TAIL) as usize + task as usize * ELEMENTS
    }
}

/// Runs the workers. With `--kill` one of them is killed in the middle of its first task.
pub(super) fn run(session: &Session, order: &Order) -> Result<Count, Failure> {
    let tasks = order.tasks.min(MOST_TASKS);
    let words = DONE + tasks as usize * (1 + ELEMENTS);
    let fd = Draft::create("partywall:textbook", words as u64 * 4).and_then(Draft::share).doing(SHARING)?;
    let ring = Ring(SharedMap::writable(&fd).doing(SHARING)?);
    ring.words().set(TAIL, tasks);
    let start = |job| {
        let worker = session.spawn("textbook")?;
        worker.say_with(job, &[fd.as_fd()])?;
        Ok::<_, Failure>(worker)
    };
    let mut count = Count { tasks, ..Count::default() };
    if order.kill {
        let mut worker = start(Job::Half)?;
        worker.hear::<()>()?;
        worker.kill();
        count.kills = 1;
    }
    let mut workers = (0..order.workers).map(|_| start(Job::Work { reports: false })).collect::<Result<Vec<_>, _>>()?;
    for worker in &mut workers {
        worker.hear::<()>()?;
    }
    workers.into_iter().for_each(Peer::end);
    for task in 0..tasks {
        let first = ring.roots(task);
        let is_root = |index| ring.words().get(first + index) == element(task, index).sqrt().to_bits();
        *match ring.words().get(DONE + task as usize) {
            0 => &mut count.lost,
            _ if !(0..ELEMENTS).all(is_root) => &mut count.wrong,
            1 => &mut count.right,
            _ => &mut count.twice,
        } += 1;
    }
    Ok(count)
}

/// Plays one of its workers.
pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let job: Job = session.parent().hear()?;
    let ring = Ring(SharedMap::writable(session.parent().take_fd()?).doing(SHARING)?);
    let words = ring.words();
    loop {
        let task = words.get(HEAD);
        if task >= words.get(TAIL) {
            break;
        }
        // If another worker reads the head before this write, both take the task.
        words.set(HEAD, task + 1);
        let first = ring.roots(task);
        for index in 0..ELEMENTS {
            if job == Job::Half && index == ELEMENTS / 2 {
                session.await_kill("the master did not kill this worker in the middle of a task")?;
            }
            words.set(first + index, element(task, index).sqrt().to_bits());
        }
        let done = DONE + task as usize;
        words.set(done, words.get(done) + 1);
    }
    session.finish(())
}

impl Count {
    pub(super) fn step(&self) -> Step {
        let Self { tasks, right, wrong, lost, twice, kills } = self;
        let fails = lost + wrong + twice;
        let step = Step::new(
            "textbook",
            format!("{tasks} of the same arrays through the textbook queue, a ring of volatile words"),
            "A worker reads the head and writes it back, incremented. Two workers that read it before either has \
             written take the same task. A task has no owner: when its worker dies, no other process knows that the \
             task is not done.",
        )
        .value("results", format!("{right} right and done once, {wrong} wrong, {lost} lost, {twice} done twice"))
        .value("workers killed", kills.to_string());
        let step = if fails > 0 { step.says(TEXTBOOK, false) } else { step.leaves_open(&[TEXTBOOK]) };
        step.judge(
            *kills == 0 || *lost > 0,
            if fails > 0 { "tasks are lost or done twice" } else { "no error this time" },
            "the task of the killed worker is done",
        )
    }
}
