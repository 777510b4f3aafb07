//! Claims of tasks, and the memory of their inputs and outputs.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use partywall::{
    Domain, Error, Queue, Result, Segment, TaskMemory,
    cuda::{RawStream, StreamRef},
    error::{Denied, Gone},
};
use partywall_os::lock::IgnorePoison;

use crate::{
    memory::{Memory, Work},
    reaper::Late,
};

/// What a task and its tensors share. The queue stays mapped for tensors that outlive the task.
pub(crate) struct TaskClaim {
    /// `None` once the task is over. Declared before the queue, because dropping the task needs the queue.
    task: Mutex<Option<partywall::ClaimedTask>>,
    /// The last stream that `wait_inputs_on` ordered behind the inputs.
    stream: Mutex<Option<RawStream>>,
    pub(crate) queue: Late<Queue>,
}

impl TaskClaim {
    pub(crate) fn new(queue: Arc<Queue>, task: partywall::ClaimedTask) -> Arc<Self> {
        Arc::new(Self { task: Mutex::new(Some(task)), stream: Mutex::default(), queue: Late::new(queue) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<partywall::ClaimedTask>> {
        self.task.lock().ignore_poison()
    }

    /// Returns the last stream that waits for the inputs.
    pub(crate) fn stream(&self) -> Option<RawStream> {
        *self.stream.lock().ignore_poison()
    }

    /// Records the last stream that waits for the inputs.
    pub(crate) fn note_stream(&self, stream: RawStream) {
        *self.stream.lock().ignore_poison() = Some(stream);
    }

    /// Waits until the submitter's stream has completed the inputs, unless the task is over.
    pub(crate) fn wait_inputs(&self, timeout: Duration) -> Result<()> {
        self.lock().as_ref().map_or(Ok(()), |task| task.wait_inputs(timeout))
    }
}

/// The memory of an input or the output of a claimed task.
pub(crate) struct Part {
    /// Keeps the blocks from other tasks. Dropped before the queue.
    _memory: TaskMemory,
    claim: Arc<TaskClaim>,
    /// The index of the input; `None` for the output.
    input: Option<usize>,
    /// The segment that an input is a part of. It stays mapped for tensors that outlive the task.
    _segment: Option<Late<Segment>>,
}

impl Part {
    /// Returns an input; with `None` for `input`, the output.
    pub(crate) fn new(
        memory: TaskMemory,
        claim: Arc<TaskClaim>,
        input: Option<usize>,
        segment: Option<Arc<Segment>>,
    ) -> Self {
        Self { _memory: memory, claim, input, _segment: segment.map(Late::new) }
    }

    pub(crate) fn domain(&self) -> &Domain {
        self.claim.queue.domain()
    }

    /// Returns the claim of an input, which a stream of the submitter may still write; `None` for the output.
    pub(crate) fn of_input(&self) -> Option<&Arc<TaskClaim>> {
        self.input.map(|_| &self.claim)
    }

    fn with<T>(&self, action: impl FnOnce(&mut partywall::ClaimedTask) -> Result<T>) -> Result<T> {
        let over = || Error::Gone(Gone::HeldBlock { pool: self.claim.queue.name().to_owned() });
        self.claim.lock().as_mut().map_or_else(|| Err(over()), action)
    }
}

impl Memory for Part {
    /// Has the stream wait first until the submitter's stream has completed the inputs.
    fn on_device(&mut self, name: &str, bytes: u64, stream: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        self.with(|task| match self.input {
            Some(index) => {
                task.wait_inputs_on(stream)?;
                work(task.inputs()[index].device()?.slice(0, bytes)?)
            }
            None => task.output_mut()?.on_device(name, bytes, stream, work),
        })
    }

    fn allow_cpu(&mut self, name: &str) -> Result<()> {
        self.with(|task| match self.input {
            Some(index) => task.inputs()[index].as_ptr().map(drop),
            None => task.output_mut()?.allow_cpu(name),
        })
    }

    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        self.with(|task| match self.input {
            Some(index) => task.inputs()[index].read_at(0, out),
            None => task.output_mut()?.read(name, out),
        })
    }

    fn write(&mut self, name: &str, bytes: &[u8], on_host: bool) -> Result<()> {
        self.with(|task| match self.input {
            Some(_) => Err(Denied::ReadOnly { name: name.to_owned(), version: self.claim.queue.version() }.into()),
            None => Memory::write(task.output_mut()?, name, bytes, on_host),
        })
    }
}
