//! A topic in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

#[cfg(doc)]
use partywall_os::map::SharedMap;

use super::{
    Header, Shape, Topic,
    ages::Histogram,
    descriptor::Descriptor,
    entry::RingEntry,
    members::{HOLDS, Holds, Publishing, Subscribing},
};
use crate::control::{self, ControlMemory, numbers, parts};

impl Topic {
    /// Creates a memfd with an empty topic.
    ///
    /// # Errors
    /// `InvalidInput` unless the shape [is possible](Shape::is_possible); otherwise as memfd_create(2) and mmap(2).
    pub fn create(shape: Shape) -> io::Result<OwnedFd> {
        control::create::<Self>(shape)
    }

    /// Maps a topic that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a topic's, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        control::map(fd)
    }
}

impl ControlMemory for Topic {
    const MAGIC: [u8; 8] = *b"PWTOPIC1";
    const NAME: &'static str = "topic";
    type Shape = Shape;

    fn check(shape: Shape) -> Result<(), String> {
        shape.is_possible().then_some(()).ok_or_else(|| format!("a topic cannot have {shape:?}"))
    }

    numbers!(Shape { blocks, depth, publishers, loans, subscribers, held });

    parts!(|shape| {
        header: Header = 1,
        ring: RingEntry = shape.depth,
        publishers: Publishing = shape.publishers,
        subscribers: Subscribing = shape.subscribers,
        // Each subscriber's begin with a struct of their own.
        holds: Holds = shape.subscribers * shape.held.div_ceil(HOLDS as u32),
        ages: Histogram = shape.subscribers,
        descriptors: Descriptor = shape.blocks,
    } => Self { shape, header, ring, publishers, subscribers, holds, ages, descriptors });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { blocks: 30, depth: 8, publishers: 3, loans: 2, subscribers: 4, held: 4 };

    #[test]
    fn mapped_topic_has_its_shape() {
        let topic = Topic::map(Topic::create(SHAPE).unwrap()).unwrap();
        assert_eq!((topic.shape(), topic.published()), (SHAPE, 0));
        assert!(topic.publishers().is_empty() && topic.subscribers().is_empty());
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let impossible = [
            Shape { depth: 6, ..SHAPE },
            Shape { depth: 0, ..SHAPE },
            Shape { blocks: 29, ..SHAPE },
            Shape { publishers: 0, ..SHAPE },
            Shape { loans: 0, ..SHAPE },
            Shape { loans: 3, ..SHAPE },
            Shape { subscribers: crate::topic::MAX_SUBSCRIBERS + 1, held: 1, blocks: 1000, ..SHAPE },
            Shape { blocks: u32::MAX, ..SHAPE },
        ];
        for shape in impossible {
            assert_eq!(Topic::create(shape).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{shape:?}");
        }
    }
}
