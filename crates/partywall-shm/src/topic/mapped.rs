//! A topic in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

#[cfg(doc)]
use partywall_os::map::SharedMap;

use super::{
    Topic, TopicHeader, TopicLimits,
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
    /// `InvalidInput` unless the limits [are possible](TopicLimits::is_possible); otherwise as memfd_create(2) and mmap(2).
    pub fn create(limits: TopicLimits) -> io::Result<OwnedFd> {
        control::create::<Self>(limits)
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
    type Shape = TopicLimits;

    fn check(limits: TopicLimits) -> Result<(), String> {
        limits.is_possible().then_some(()).ok_or_else(|| format!("a topic cannot have {limits:?}"))
    }

    numbers!(TopicLimits { blocks, depth, publishers, loans, subscribers, held });

    parts!(|limits| {
        header: TopicHeader = 1,
        ring: RingEntry = limits.depth,
        publishers: Publishing = limits.publishers,
        subscribers: Subscribing = limits.subscribers,
        // Each subscriber's begin with a struct of their own.
        holds: Holds = limits.subscribers * limits.held.div_ceil(HOLDS as u32),
        ages: Histogram = limits.subscribers,
        descriptors: Descriptor = limits.blocks,
    } => Self { limits, header, ring, publishers, subscribers, holds, ages, descriptors });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TopicLimits = TopicLimits { blocks: 30, depth: 8, publishers: 3, loans: 2, subscribers: 4, held: 4 };

    #[test]
    fn mapped_topic_has_its_shape() {
        let topic = Topic::map(Topic::create(LIMITS).unwrap()).unwrap();
        assert_eq!((topic.limits(), topic.published()), (LIMITS, 0));
        assert!(topic.publishers().is_empty() && topic.subscribers().is_empty());
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let impossible = [
            TopicLimits { depth: 6, ..LIMITS },
            TopicLimits { depth: 0, ..LIMITS },
            TopicLimits { blocks: 29, ..LIMITS },
            TopicLimits { publishers: 0, ..LIMITS },
            TopicLimits { loans: 0, ..LIMITS },
            TopicLimits { loans: 3, ..LIMITS },
            TopicLimits { subscribers: crate::topic::MAX_SUBSCRIBERS + 1, held: 1, blocks: 1000, ..LIMITS },
            TopicLimits { blocks: u32::MAX, ..LIMITS },
        ];
        for limits in impossible {
            assert_eq!(Topic::create(limits).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{limits:?}");
        }
    }
}
