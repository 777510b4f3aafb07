//! Random steps against a simple model, and arbitrary contents of the memory.

use std::collections::BTreeSet;

use partywall_os::map::SharedMap;
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::slots::HeldSlot;

#[derive(Debug, Clone)]
enum Step {
    Submit(u16, bool, u8),
    Reserve(u16),
    SubmitReserved,
    Claim(u16),
    Complete(usize),
    Fail(usize, bool),
    Drain(usize),
    Take(usize),
    Cancel(usize),
    Purge(usize),
    Retry(usize),
    Detach(u16),
    Die(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let submitter = 1..3_u16;
    let worker = 10..13_u16;
    prop_oneof![
        6 => (submitter.clone(), any::<bool>(), 1..4_u8).prop_map(|(row, cancel, most)| Step::Submit(row, cancel, most)),
        1 => submitter.clone().prop_map(Step::Reserve),
        1 => Just(Step::SubmitReserved),
        6 => worker.clone().prop_map(Step::Claim),
        4 => any::<usize>().prop_map(Step::Complete),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, drained)| Step::Fail(which, drained)),
        2 => any::<usize>().prop_map(Step::Drain),
        3 => any::<usize>().prop_map(Step::Take),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => any::<usize>().prop_map(Step::Purge),
        3 => any::<usize>().prop_map(Step::Retry),
        2 => worker.clone().prop_map(Step::Detach),
        1 => prop_oneof![submitter, worker].prop_map(Step::Die),
    ]
}

/// A simple model of a task.
#[derive(Debug, Clone)]
struct Modelled {
    state: TaskState,
    submitter: u16,
    cancel: bool,
    unwanted: bool,
    /// The number of the last attempt.
    attempt: u8,
    /// How many more there may be.
    left: u8,
    /// How many more there may be after a retry.
    most: u8,
    has_block: bool,
}

impl Modelled {
    fn new(submitter: u16, cancel: bool, most: u8, has_block: bool) -> Self {
        let state = TaskState::Pending;
        Self { state, submitter, cancel, unwanted: false, attempt: 0, left: most, most, has_block }
    }

    fn is_claimed(&self) -> bool {
        matches!(self.state, TaskState::Claimed { .. })
    }

    fn end_attempt(&mut self) {
        self.state = match (self.unwanted, self.left) {
            (true, _) => TaskState::Gone,
            (false, 0) => TaskState::Dead,
            (false, _) => TaskState::Pending,
        };
    }

    fn detach(&mut self, row: u16) {
        if matches!(self.state, TaskState::Claimed { row: worker, .. } if worker == row) {
            self.end_attempt();
        }
        if self.cancel && self.submitter == row {
            match self.state {
                TaskState::Pending | TaskState::Done | TaskState::Dead => self.state = TaskState::Gone,
                _ => self.unwanted = true,
            }
        }
    }
}

proptest! {
    /// Rows 1 and 2 submit, rows 10 to 12 work, row 20 reads.
    // Holds 26, 210.
    #[test]
    fn queue_agrees_with_its_model(steps in vec(step(), 1..150)) {
        let world = World::new(QueueLimits { tasks: 5, inputs: 8, outputs: 16, lease: 0 });
        let mut tasks: BTreeMap<TaskId, Modelled> = BTreeMap::new();
        let mut order: Vec<TaskId> = Vec::new();
        let mut late = BTreeSet::new();
        // Each with the serial number of its attempt, among all of all tasks; also those that were taken back, whose
        // workers do not know it.
        let mut claims: Vec<(Claimed, usize)> = Vec::new();
        let mut serials: BTreeMap<TaskId, usize> = BTreeMap::new();
        let mut attempts = 0;
        let mut reserved: Option<(u16, Reserved, usize)> = None;
        let pick = |claims: &Vec<(Claimed, usize)>, which: usize| (!claims.is_empty()).then(|| which % claims.len());
        for step in steps {
            match step {
                Step::Submit(row, cancel, most) => {
                    let Some(slot) = world.queue.reserve(row) else {
                        // Nothing is refused while a slot is free, but behind a pending task.
                        let pending = order.iter().any(|id| tasks[id].state == TaskState::Pending);
                        prop_assert!(pending || world.queue.audit().free == 0);
                        continue;
                    };
                    let Some(block) = world.inputs.try_take(row) else {
                        world.queue.give_back(slot);
                        continue;
                    };
                    let task = NewTask { cancel, max_attempts: most, ..TASK };
                    let id = world.queue.submit(&world.inputs, slot, &task, &[NewInput::Block(&block, 0, Contents::of_bytes(1))]).unwrap();
                    prop_assert!(tasks.insert(id, Modelled::new(row, cancel, most, true)).is_none());
                    order.push(id);
                }
                Step::Reserve(row) => if reserved.is_none() {
                    reserved = world.queue.reserve(row).map(|slot| (row, slot, order.len()));
                },
                Step::SubmitReserved => if let Some((row, slot, at)) = reserved.take() {
                    let id = world.queue.submit(&world.inputs, slot, &TASK, &[]).unwrap();
                    prop_assert!(tasks.insert(id, Modelled::new(row, false, TASK.max_attempts, false)).is_none());
                    order.insert(at, id);
                    late.insert(id);
                },
                Step::Claim(row) => {
                    let claimed = world.claim(row);
                    let pending = |id: &&TaskId| tasks[id].state == TaskState::Pending;
                    let Some(claimed) = claimed else {
                        // Only tasks whose records are all open may be left.
                        let open = world.queue.audit().open;
                        prop_assert!(order.iter().find(pending).is_none() || open > 0);
                        continue;
                    };
                    let id = claimed.id();
                    prop_assert_eq!(tasks[&id].state, TaskState::Pending);
                    if tasks[&id].attempt == 0 && !late.contains(&id) {
                        let mut earlier = order.iter().take_while(|other| **other != id).filter(pending);
                        prop_assert!(earlier.all(|other| tasks[other].attempt > 0 || late.contains(other)));
                    }
                    let task = tasks.get_mut(&id).unwrap();
                    prop_assert!(claimed.attempt() > task.attempt, "no number is used again");
                    task.attempt = claimed.attempt();
                    task.left -= 1;
                    task.state = TaskState::Claimed { row, attempt: task.attempt };
                    attempts += 1;
                    serials.insert(id, attempts);
                    claims.push((claimed, attempts));
                }
                Step::Complete(which) => if let Some(which) = pick(&claims, which) {
                    if world.outputs.audit().free == 0 {
                        continue;
                    }
                    let (claimed, serial) = claims.remove(which);
                    let task = tasks.get_mut(&claimed.id()).unwrap();
                    let stands = task.is_claimed() && serials[&claimed.id()] == serial;
                    prop_assert_eq!(world.complete(&claimed).is_ok(), stands);
                    if stands {
                        task.state = if task.unwanted { TaskState::Gone } else { TaskState::Done };
                    }
                },
                Step::Fail(which, drained) => if let Some(which) = pick(&claims, which) {
                    let (claimed, serial) = claims.remove(which);
                    let task = tasks.get_mut(&claimed.id()).unwrap();
                    let stands = task.is_claimed() && serials[&claimed.id()] == serial;
                    let failed = world.queue.fail(world.pools(), &claimed, Reason::Failed, "", drained);
                    prop_assert_eq!(failed.is_ok(), stands);
                    if stands {
                        task.end_attempt();
                    }
                    if !drained {
                        claims.push((claimed, serial));
                    }
                },
                Step::Drain(which) => if let Some(which) = pick(&claims, which)
                    && !world.queue.is_claimed(&claims[which].0)
                {
                    world.queue.drain(world.pools(), &claims.remove(which).0);
                },
                Step::Take(which) => if !order.is_empty() {
                    let id = order[which % order.len()];
                    let task = tasks.get_mut(&id).unwrap();
                    match world.take(20, id) {
                        Ok(attempt) => {
                            prop_assert_eq!((task.state, task.attempt), (TaskState::Done, attempt));
                            task.state = TaskState::Gone;
                        }
                        Err(state) => prop_assert_eq!(state, task.state),
                    }
                },
                Step::Cancel(which) | Step::Purge(which) => if !order.is_empty() {
                    let id = order[which % order.len()];
                    let of = |state| (state == TaskState::Pending) == matches!(step, Step::Cancel(_));
                    let task = tasks.get_mut(&id).unwrap();
                    let can = matches!(task.state, TaskState::Pending | TaskState::Done | TaskState::Dead) && of(task.state);
                    prop_assert_eq!(world.queue.dispose(world.pools(), 20, id, of).is_ok(), can);
                    if can {
                        task.state = TaskState::Gone;
                    }
                },
                Step::Retry(which) => if !order.is_empty() {
                    let id = order[which % order.len()];
                    let task = tasks.get_mut(&id).unwrap();
                    prop_assert_eq!(world.queue.retry(id).is_ok(), task.state == TaskState::Dead);
                    if task.state == TaskState::Dead {
                        (task.state, task.left) = (TaskState::Pending, task.most);
                        late.insert(id);
                    }
                },
                Step::Detach(row) => {
                    world.queue.detach(world.pools(), |gone| gone == row, Reason::Detached, |_| None);
                    tasks.values_mut().for_each(|task| task.detach(row));
                }
                Step::Die(row) => {
                    world.queue.recover(world.pools(), |dead| dead == row);
                    tasks.values_mut().for_each(|task| task.detach(row));
                    claims.retain(|(claimed, _)| claimed.word.row() != row);
                    if reserved.as_ref().is_some_and(|(submitter, ..)| *submitter == row) {
                        reserved = None;
                    }
                }
            }
            for (id, task) in &tasks {
                prop_assert_eq!(world.queue.state(*id), task.state);
            }
            let audit = world.queue.audit();
            prop_assert_eq!(audit.invalid, 0);
            // Each claim stands or is fenced. A fenced one is open until its worker, which does not know it, drains it.
            let mut fenced = BTreeSet::new();
            for (claimed, serial) in &claims {
                let id = claimed.id();
                let stands = tasks[&id].is_claimed() && serials[&id] == *serial;
                prop_assert_eq!(world.queue.is_claimed(claimed), stands, "attempt {} of {:?}", claimed.attempt(), id);
                if !stands {
                    prop_assert!(fenced.insert((id, *serial)));
                }
            }
            prop_assert_eq!(audit.open as usize, fenced.len());
            // Inputs are held exactly as long as an attempt may read them.
            let is_fenced = |id: &TaskId| fenced.range((*id, 0)..=(*id, usize::MAX)).next().is_some();
            let reads = |(id, task): &(&TaskId, &Modelled)| {
                task.has_block && (!matches!(task.state, TaskState::Done | TaskState::Gone) || is_fenced(id))
            };
            prop_assert_eq!(world.inputs.audit().published as usize, tasks.iter().filter(reads).count());
            let results = tasks.values().filter(|task| task.state == TaskState::Done).count() as u32;
            prop_assert_eq!(world.outputs.audit().published, results);
        }
        for (claimed, _) in claims {
            if world.queue.fail(world.pools(), &claimed, Reason::Dropped, "", true).is_err() {
                world.queue.drain(world.pools(), &claimed);
            }
        }
        world.queue.recover(world.pools(), |_| true);
        for id in order {
            let _ = world.queue.dispose(world.pools(), 20, id, |_| true);
        }
        world.assert_left(NOTHING, 0, 0);
    }

    /// For arbitrary memory, every call returns without a panic, and no block is lost once all are dead.
    // Holds 158.
    #[test]
    fn arbitrary_bytes_are_not_trusted(words in vec((any::<prop::sample::Index>(), any::<u64>(), 0..4_u8, 0..3_usize), 0..200)) {
        let shape = QueueLimits { lease: 10, ..SHAPE };
        let queue = Queue::create(shape).unwrap();
        let pools = [Pool::create(shape.inputs).unwrap(), Pool::create(shape.outputs).unwrap()];
        let maps = [&queue, &pools[0], &pools[1]].map(|fd| SharedMap::writable(fd).unwrap());
        let [inputs, outputs] = pools.each_ref().map(|fd| Pool::map(fd).unwrap());
        let world = World { queue: Queue::map(&queue).unwrap(), inputs, outputs };
        let id = world.submit().unwrap();
        let claimed = world.claim(WORKER).unwrap();
        // Behind what is only looked at when it is mapped.
        let all = maps.each_ref().map(|map| map.atomics::<AtomicU64>(64, map.len() / 8 - 8).unwrap());
        for (index, word, sort, part) in words {
            let word = match sort {
                0 => word,
                1 => word & 0xff,
                2 => word & 0x1ff | 1 << 29,
                _ => u64::MAX << (word & 63),
            };
            all[part][index.index(all[part].len())].store(word, Ordering::Relaxed);
        }
        let use_all = |claimed: &Claimed, id: TaskId| {
            world.queue.state(id);
            world.queue.describe(id);
            world.queue.failures(id);
            if let Some(reserved) = world.queue.reserve(SUBMITTER) {
                let blocks: Vec<HeldSlot> = world.inputs.try_take(SUBMITTER).into_iter().collect();
                let mut inputs: Vec<_> = blocks.iter().map(|block| NewInput::Block(block, 0, Contents::of_bytes(1))).collect();
                inputs.push(NewInput::Part(PART));
                let _ = world.queue.submit(&world.inputs, reserved, &TASK, &inputs);
            }
            if let Some(candidate) = world.queue.next() {
                world.queue.claim(WORKER, &candidate);
            }
            let _ = world.queue.extend(claimed, now());
            let _ = world.queue.complete(world.pools(), claimed, None, Views::None);
            let output = world.queue.output(id);
            let _ = output.map(|output| world.queue.take_output(world.pools(), OTHER, &output));
            let _ = world.queue.take(world.pools(), OTHER, id);
            let _ = world.queue.retry(id);
            let _ = world.queue.dispose(world.pools(), OTHER, id, |_| true);
            world.queue.attach(PART.attachment);
            world.queue.all_uses();
            world.queue.begin_detach(PART.attachment);
            world.queue.tend(world.pools());
        };
        use_all(&claimed, id);
        world.queue.audit();
        world.queue.tasks(0, 100, |_| true);
        world.queue.tend_at(world.pools(), u64::MAX >> 1);
        world.queue.detach(world.pools(), |row| row % 2 == 0, Reason::Detached, |_| Some(u64::MAX));
        world.queue.recover(world.pools(), |row| row % 2 == 0);
        world.queue.recover(world.pools(), |_| true);
        for task in world.queue.tasks(0, 100, |_| true) {
            let _ = world.queue.dispose(world.pools(), OTHER, task.id, |_| true);
        }
        world.queue.recover(world.pools(), |_| true);
        for pool in [&world.inputs, &world.outputs] {
            let audit = pool.audit();
            prop_assert_eq!((audit.held, audit.handed, audit.published), (0, 0, 0));
        }
        prop_assert_eq!(world.queue.audit().invalid, 0);
        use_all(&claimed, id);
    }
}
