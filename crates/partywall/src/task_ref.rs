//! References of tasks.

use std::{fmt, str::FromStr};

use partywall_shm::queue::TaskId;
use serde::{Deserialize, Serialize};

use crate::error::{Error, InvalidArgument, Result};

/// The reference of a task, for any process. It can be sent through any channel, as text or as bytes. It keeps nothing
/// alive.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TaskRef {
    pub(crate) queue: String,
    pub(crate) version: u64,
    pub(crate) index: u32,
    pub(crate) generation: u64,
}

impl TaskRef {
    pub(crate) fn new(queue: &str, version: u64, id: TaskId) -> Self {
        Self { queue: queue.to_owned(), version, index: id.index, generation: id.generation }
    }

    /// Returns the queue's name.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// Returns the queue's version, which differs between queues that were created under one name after each other.
    pub fn version(&self) -> u64 {
        self.version
    }
}

/// `NAME@VERSION#PLACE.GENERATION`
impl fmt::Display for TaskRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, version, index, generation } = self;
        write!(f, "{queue}@{version}#{index}.{generation}")
    }
}

impl FromStr for TaskRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (name, task) = text.rsplit_once('#')?;
            let (queue, version) = name.rsplit_once('@')?;
            let (index, generation) = task.split_once('.')?;
            let version = version.parse().ok()?;
            let index = index.parse().ok()?;
            let generation = generation.parse().ok()?;
            Some(Self { queue: queue.to_owned(), version, index, generation })
        };
        parse().ok_or_else(|| InvalidArgument::name(text, "a task of a queue is NAME@VERSION#PLACE.GENERATION"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_reference_round_trips_as_text() {
        let task = TaskRef::new("render/tiles.0", 3, TaskId { index: 131_071, generation: 1 << 34 });
        assert_eq!(task.to_string(), "render/tiles.0@3#131071.17179869184");
        assert_eq!(task.to_string().parse::<TaskRef>().unwrap(), task);
        for text in ["", "tasks", "tasks@1", "tasks#1.2", "tasks@1#2", "tasks@x#1.2", "t@1#-1.2", "t@1#1.x"] {
            let parsed = text.parse::<TaskRef>();
            assert!(matches!(parsed, Err(Error::InvalidArgument(InvalidArgument::Name { .. }))), "{text}");
        }
    }
}
