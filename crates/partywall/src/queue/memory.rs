//! Memory of tasks that is used after the attempt is over.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use partywall_os::{lock::IgnorePoison, process::fork_generation};
use partywall_shm::{
    queue::{Claimed, TaskId, Views},
    slots::HeldSlot,
};

use super::{OpenQueue, QueueControl};
use crate::completion::{Completion, Fence};

/// Keeps the inputs or the output of a claimed task for views that outlive it, such as arrays of another language:
/// until the last clone is dropped, no other task uses the blocks, also after the attempt is over.
///
/// The output of a completed task is delivered all the same. Its block is free again once the result was given back
/// *and* the last clone was dropped. The task keeps its slot in the queue until then.
///
/// In a forked child the blocks belong to the parent, and dropping it does nothing.
#[derive(Debug, Clone)]
pub struct TaskMemory {
    _viewed: Viewed,
    /// Declared last: the last view needs the queue.
    _open: Arc<OpenQueue>,
}

#[derive(Debug, Clone)]
enum Viewed {
    Inputs { _kept: Arc<KeptInputs> },
    Output { _kept: Arc<KeptOutput> },
}

/// Counts what views of attempts that are over keep, in this process.
#[derive(Debug, Default)]
pub(super) struct KeptByViews {
    /// How many attempts of a task are viewed, and how many input blocks each of them keeps.
    tasks: Mutex<HashMap<TaskId, (u32, u32)>>,
    outputs: AtomicU32,
}

impl KeptByViews {
    /// Returns the number of tasks, each of which keeps a slot, and of their input blocks.
    pub(super) fn inputs(&self) -> (u32, u32) {
        let tasks = self.tasks.lock().ignore_poison();
        (tasks.len() as u32, tasks.values().map(|(_, blocks)| blocks).sum())
    }

    /// Returns the number of output blocks.
    pub(super) fn outputs(&self) -> u32 {
        self.outputs.load(Ordering::Relaxed)
    }

    fn add(&self, task: TaskId, blocks: u32) {
        self.tasks.lock().ignore_poison().entry(task).or_insert((0, blocks)).0 += 1;
    }

    fn remove(&self, task: TaskId) {
        let mut tasks = self.tasks.lock().ignore_poison();
        if let Some((attempts, _)) = tasks.get_mut(&task) {
            *attempts -= 1;
            if *attempts == 0 {
                tasks.remove(&task);
            }
        }
    }
}

/// What an attempt shares with its views. If the attempt is over, the last user gives the blocks back.
#[derive(Debug)]
pub(super) struct KeptBlocks {
    inputs: Arc<KeptInputs>,
    output: Arc<KeptOutput>,
}

#[derive(Debug)]
struct KeptInputs {
    control: Arc<QueueControl>,
    /// Weak, because a callback on the service thread may be the last user.
    open: Weak<OpenQueue>,
    /// The number of input blocks of the queue.
    blocks: u32,
    ended: Mutex<Option<EndedAttempt>>,
}

#[derive(Debug)]
struct KeptOutput {
    /// The block of an attempt that is over, unless it was delivered.
    held: Mutex<Option<HeldSlot>>,
    /// Whether the task has an output.
    has_block: bool,
    inputs: Arc<KeptInputs>,
}

/// An attempt that is over, and was recorded as open.
#[derive(Debug, Clone, Copy)]
struct EndedAttempt {
    claimed: Claimed,
    /// Whether enqueued work of this process may use the blocks.
    is_exposed: bool,
}

impl KeptBlocks {
    /// Returns it for an attempt with this many input blocks, and with an output or none.
    pub(super) fn new(open: &Arc<OpenQueue>, blocks: u32, has_block: bool) -> Self {
        let ended = Mutex::default();
        let inputs = KeptInputs { control: open.control.clone(), open: Arc::downgrade(open), blocks, ended };
        let inputs = Arc::new(inputs);
        let output = Arc::new(KeptOutput { held: Mutex::default(), has_block, inputs: inputs.clone() });
        Self { inputs, output }
    }

    pub(super) fn view_inputs(&self, open: &Arc<OpenQueue>) -> TaskMemory {
        TaskMemory { _viewed: Viewed::Inputs { _kept: self.inputs.clone() }, _open: open.clone() }
    }

    pub(super) fn view_output(&self, open: &Arc<OpenQueue>) -> TaskMemory {
        TaskMemory { _viewed: Viewed::Output { _kept: self.output.clone() }, _open: open.clone() }
    }

    /// Returns what is viewed. Once the task makes no further views, it can only become less.
    pub(super) fn views(&self) -> Views {
        // The attempt has one reference to each, and the output one to the inputs.
        if Arc::strong_count(&self.output) > 1 {
            Views::Output
        } else if Arc::strong_count(&self.inputs) > 2 {
            Views::Inputs
        } else {
            Views::None
        }
    }

    pub(super) fn is_viewed(&self) -> bool {
        self.views() != Views::None
    }

    /// Leaves the blocks of an attempt that was recorded as open to the last view. `output` is `None` if it was
    /// delivered.
    pub(super) fn leave(self, claimed: Claimed, output: Option<HeldSlot>, is_exposed: bool) {
        let kept = &self.inputs.control.kept;
        kept.add(claimed.id(), self.inputs.blocks);
        kept.outputs.fetch_add(self.output.has_block.into(), Ordering::Relaxed);
        *self.output.held.lock().ignore_poison() = output;
        *self.inputs.ended.lock().ignore_poison() = Some(EndedAttempt { claimed, is_exposed });
    }
}

impl KeptInputs {
    /// Returns the task if the attempt is over.
    fn ended_task(&self) -> Option<TaskId> {
        self.ended.lock().ignore_poison().map(|ended| ended.claimed.id())
    }

    /// Calls `give_back` once no work uses the blocks of an attempt that is over.
    fn after_work(&self, give_back: impl FnOnce(&QueueControl, &Claimed) + Send + 'static) {
        let ended = *self.ended.lock().ignore_poison();
        let Some(EndedAttempt { claimed, is_exposed }) = ended.filter(|_| self.control.generation == fork_generation())
        else {
            return;
        };
        if !is_exposed {
            return give_back(&self.control, &claimed);
        }
        // Without the queue the broker gives the blocks back.
        let Some(open) = self.open.upgrade() else { return };
        let control = self.control.clone();
        open.domain().completions().on(Fence::DeviceIdle(open.inputs.clone()), move |completion| {
            if completion == Completion::Done {
                give_back(&control, &claimed);
            }
        });
    }
}

impl Drop for KeptInputs {
    fn drop(&mut self) {
        // Uncounted first: a thread that finds no free block then counts none that is free by now.
        if let Some(task) = self.ended_task() {
            self.control.kept.remove(task);
        }
        self.after_work(|control, claimed| control.queue.drain(control.pools(), claimed));
    }
}

impl Drop for KeptOutput {
    fn drop(&mut self) {
        if self.has_block && self.inputs.ended_task().is_some() {
            self.inputs.control.kept.outputs.fetch_sub(1, Ordering::Relaxed);
        }
        let held = self.held.get_mut().ignore_poison().take();
        self.inputs.after_work(|control, claimed| match held {
            Some(held) => _ = control.outputs.free(&held),
            None => control.queue.leave_output(control.pools(), claimed),
        });
    }
}
