//! A queue in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

#[cfg(doc)]
use partywall_os::map::SharedMap;

use super::{Queue, QueueHeader, QueueLimits, body::Body, word::TaskSlot};
use crate::control::{self, ControlMemory, numbers, parts};

impl Queue {
    /// Creates a memfd with an empty queue.
    ///
    /// # Errors
    /// `InvalidInput` unless the limits [are possible](QueueLimits::is_possible); otherwise as memfd_create(2) and mmap(2).
    pub fn create(limits: QueueLimits) -> io::Result<OwnedFd> {
        control::create::<Self>(limits)
    }

    /// Maps a queue that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a queue's, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        control::map(fd)
    }
}

impl QueueLimits {
    /// Returns the bytes of the control memory.
    pub fn bytes(&self) -> u64 {
        control::bytes::<Queue>(*self) as u64
    }
}

impl ControlMemory for Queue {
    const MAGIC: [u8; 8] = *b"PWQUEUE1";
    const NAME: &'static str = "queue";
    type Shape = QueueLimits;

    fn check(limits: QueueLimits) -> Result<(), String> {
        limits.is_possible().then_some(()).ok_or_else(|| format!("a queue cannot have {limits:?}"))
    }

    numbers!(QueueLimits { tasks, inputs, outputs, lease });

    parts!(|limits| {
        header: QueueHeader = 1,
        tasks: TaskSlot = limits.tasks,
        bodies: Body = limits.tasks,
    } => Self { limits, header, tasks, bodies });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QueueLimits = QueueLimits { tasks: 30, inputs: 8, outputs: 4, lease: 5 };

    #[test]
    fn mapped_queue_has_its_shape() {
        let queue = Queue::map(Queue::create(LIMITS).unwrap()).unwrap();
        assert_eq!((queue.limits(), queue.audit().free), (LIMITS, 30));
        assert_eq!(queue.next(), None);
    }

    // Holds 214.
    #[test]
    fn control_memory_of_a_task_is_less_than_two_kibibytes() {
        let with = |tasks| QueueLimits { tasks, ..LIMITS }.bytes();
        assert!(with(100_000) - with(1) <= 100_000 * 2048);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let impossible = [
            QueueLimits { tasks: 0, ..LIMITS },
            QueueLimits { tasks: crate::queue::MAX_TASKS + 1, ..LIMITS },
            QueueLimits { inputs: (1 << 16) + 1, ..LIMITS },
            QueueLimits { lease: u64::MAX, ..LIMITS },
        ];
        for limits in impossible {
            assert_eq!(Queue::create(limits).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{limits:?}");
        }
    }
}
