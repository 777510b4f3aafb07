//! A queue in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

#[cfg(doc)]
use partywall_os::map::SharedMap;

use super::{Header, Queue, Shape, body::Body, word::PlaceWord};
use crate::control::{self, ControlMemory, numbers, parts};

impl Queue {
    /// Creates a memfd with an empty queue.
    ///
    /// # Errors
    /// `InvalidInput` unless the shape [is possible](Shape::is_possible); otherwise as memfd_create(2) and mmap(2).
    pub fn create(shape: Shape) -> io::Result<OwnedFd> {
        control::create::<Self>(shape)
    }

    /// Maps a queue that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a queue's, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        control::map(fd)
    }
}

impl Shape {
    /// Returns the bytes of the control memory.
    pub fn bytes(&self) -> u64 {
        control::bytes::<Queue>(*self) as u64
    }
}

impl ControlMemory for Queue {
    const MAGIC: [u8; 8] = *b"PWQUEUE1";
    const NAME: &'static str = "queue";
    type Shape = Shape;

    fn check(shape: Shape) -> Result<(), String> {
        shape.is_possible().then_some(()).ok_or_else(|| format!("a queue cannot have {shape:?}"))
    }

    numbers!(Shape { tasks, inputs, outputs, lease });

    parts!(|shape| {
        header: Header = 1,
        places: PlaceWord = shape.tasks,
        bodies: Body = shape.tasks,
    } => Self { shape, header, places, bodies });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { tasks: 30, inputs: 8, outputs: 4, lease: 5 };

    #[test]
    fn mapped_queue_has_its_shape() {
        let queue = Queue::map(Queue::create(SHAPE).unwrap()).unwrap();
        assert_eq!((queue.shape(), queue.audit().free), (SHAPE, 30));
        assert_eq!(queue.next(), None);
    }

    // Holds 214.
    #[test]
    fn control_memory_of_a_task_is_less_than_two_kibibytes() {
        let with = |tasks| Shape { tasks, ..SHAPE }.bytes();
        assert!(with(100_000) - with(1) <= 100_000 * 2048);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let impossible = [
            Shape { tasks: 0, ..SHAPE },
            Shape { tasks: crate::queue::MAX_TASKS + 1, ..SHAPE },
            Shape { inputs: (1 << 16) + 1, ..SHAPE },
            Shape { lease: u64::MAX, ..SHAPE },
        ];
        for shape in impossible {
            assert_eq!(Queue::create(shape).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{shape:?}");
        }
    }
}
