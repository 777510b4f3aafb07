//! Options to create a queue, or to open an existing one.

use std::time::Duration;

use partywall_cuda::{DeviceUuid, ForeignMemory};
use partywall_shm::{pool::MAX_BLOCKS, queue::MAX_TASKS};
use partywall_wire::{Control, Named, QueueShape};

use super::{OpenQueue, Queue};
use crate::{
    domain::Domain,
    error::Result,
    place::Place,
    pool::{Wanted, wanted_setters},
};

/// The name and the options of a queue; see [`Domain::queue`].
///
/// An existing queue must agree with the options that are set. It may have any value for the others.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until create(), open() or open_or_create()"]
pub struct QueueOptions {
    pub(super) wanted: Wanted,
    tasks: Option<u32>,
    inputs: Option<(u32, u64)>,
    outputs: Option<(u32, u64)>,
    lease: Option<Duration>,
}

impl QueueOptions {
    pub(super) fn new(domain: Domain, name: &str) -> Self {
        let wanted = Wanted::new(domain, Named::Queue, name, OpenQueue::map);
        Self { wanted, tasks: None, inputs: None, outputs: None, lease: None }
    }

    /// Sets the maximum number of tasks at a time, including those with a result that was not taken: 1 to 131,072. By
    /// default 1024.
    pub fn tasks(mut self, tasks: u32) -> Self {
        self.tasks = Some(tasks);
        self
    }

    /// Sets the number of input blocks, and the bytes of each. By default the queue has none, and its tasks have only
    /// arguments.
    pub fn inputs(mut self, blocks: u32, block_bytes: u64) -> Self {
        self.inputs = Some((blocks, block_bytes));
        self
    }

    /// Sets the number of output blocks, and the bytes of each. Each attempt takes one, and each result keeps one until
    /// it is taken. By default the queue has none.
    pub fn outputs(mut self, blocks: u32, block_bytes: u64) -> Self {
        self.outputs = Some((blocks, block_bytes));
        self
    }

    /// Sets how long an attempt may take before its task goes to another worker, at least 1 ms. This is for workers
    /// that may hang; a worker that needs longer [extends](super::ClaimedTask::extend) its lease. By default an attempt
    /// has no time limit, and ends only with its worker.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    wanted_setters!("queue", "blocks");

    /// Creates the queue.
    ///
    /// # Errors
    /// [`Denied::NameExists`](crate::error::Denied::NameExists);
    /// [`InvalidArgument::Options`](crate::error::InvalidArgument::Options); as
    /// [`Builder::allocate`](crate::Builder::allocate) and [`Build::commit`](crate::Build::commit).
    pub fn create(&self) -> Result<Queue> {
        self.wanted.create(self.control()?).and_then(Queue::new)
    }

    /// Creates the queue in memory that other code has allocated, as
    /// [`PoolOptions::create_in`](crate::PoolOptions::create_in).
    ///
    /// # Errors
    /// As [`PoolOptions::create_in`](crate::PoolOptions::create_in).
    pub fn create_in(&self, memory: &ForeignMemory) -> Result<Queue> {
        self.wanted.create_in(memory, self.control()?).and_then(Queue::new)
    }

    /// Opens the queue.
    ///
    /// # Errors
    /// As [`PoolOptions::open`](crate::PoolOptions::open).
    pub fn open(&self) -> Result<Queue> {
        self.wanted.open(|control| self.check(control)).and_then(Queue::new)
    }

    /// Opens the queue, or creates it if it does not exist. If several processes call this at once, one of them creates
    /// the queue; if it dies, another does.
    ///
    /// # Errors
    /// As [`PoolOptions::open_or_create`](crate::PoolOptions::open_or_create).
    pub fn open_or_create(&self) -> Result<Queue> {
        self.wanted.open_or_create(self.control()?, |control| self.check(control)).and_then(Queue::new)
    }

    /// Returns the shape of the queue to create.
    fn control(&self) -> Result<Control> {
        let invalid = |why: String| self.wanted.invalid(why);
        if self.wanted.name.len() > MAX_NAME {
            let why = "for the timelines of its submitters and workers have longer ones";
            return Err(invalid(format!("its name has at most {MAX_NAME} bytes, {why}")));
        }
        let tasks = self.tasks.unwrap_or(TASKS);
        if !(1..=MAX_TASKS).contains(&tasks) {
            return Err(invalid(format!("it has room for 1 to {MAX_TASKS} tasks, not {tasks}")));
        }
        // A pool has at least one block, even if it is not used.
        let pool = |what: &str, asked: Option<(u32, u64)>| match asked.unwrap_or((1, 1)) {
            (blocks, _) if !(1..=MAX_BLOCKS).contains(&blocks) => {
                Err(invalid(format!("it has 1 to {MAX_BLOCKS} blocks of {what}, not {blocks}")))
            }
            (_, 0) => Err(invalid(format!("a block of {what} has at least one byte"))),
            pool => Ok(pool),
        };
        let (blocks, block_bytes) = pool("inputs", self.inputs)?;
        let (outputs, output_bytes) = pool("outputs", self.outputs)?;
        let lease = self.lease.map_or(Ok(0), |lease| match lease.as_millis() {
            0 => Err(invalid("its lease has at least a millisecond".into())),
            millis => Ok(u64::try_from(millis).unwrap_or(u64::MAX)),
        })?;
        if lease > partywall_shm::queue::MAX_LEASE {
            return Err(invalid("its lease has at most a year; leave it out for one that never ends".into()));
        }
        let queue = QueueShape { tasks, outputs, output_bytes, lease };
        let control = Control { blocks, block_bytes, zeroed: false, topic: None, queue: Some(queue) };
        // No more bytes than a file can have.
        match control.data_bytes().filter(|bytes| i64::try_from(*bytes).is_ok()) {
            Some(_) => Ok(control),
            None => Err(invalid("its blocks have more than 2^63 bytes together".into())),
        }
    }

    /// Refuses a queue that differs from the options.
    pub(super) fn check(&self, control: &Control) -> Result<()> {
        let Some(queue) = &control.queue else { return Ok(()) };
        let numbers = [
            ("room for", "tasks", self.tasks.map(u64::from), queue.tasks.into()),
            ("", "blocks of inputs", self.inputs.map(|(blocks, _)| blocks.into()), control.blocks.into()),
            ("inputs of", "bytes", self.inputs.map(|(_, bytes)| bytes), control.block_bytes),
            ("", "blocks of outputs", self.outputs.map(|(blocks, _)| blocks.into()), queue.outputs.into()),
            ("outputs of", "bytes", self.outputs.map(|(_, bytes)| bytes), queue.output_bytes),
            ("a lease of", "ms", self.lease.map(|lease| lease.as_millis() as u64), queue.lease),
        ];
        for (what, unit, asked, has) in numbers {
            if let Some(asked) = asked.filter(|asked| *asked != has) {
                return Err(self.wanted.differs(format!("it has {what} {has} {unit}, not {asked}").replace("  ", " ")));
            }
        }
        Ok(())
    }
}

/// The most bytes of a name. The names of [`signals`](super::signals) are longer, but still within the limit of all
/// names.
const MAX_NAME: usize = 200;
const TASKS: u32 = 1024;
