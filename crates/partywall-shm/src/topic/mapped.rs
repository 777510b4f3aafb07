//! A topic in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use partywall_os::{map::SharedMap, memfd};

use super::{
    Header, Shape, Topic,
    ages::Histogram,
    descriptor::Descriptor,
    entry::RingEntry,
    members::{HOLDS, Holds, Publishing, Subscribing},
};
use crate::invalid;

impl Topic {
    /// Creates a memfd with an empty topic.
    ///
    /// # Errors
    /// `InvalidInput` unless the shape [is possible](Shape::is_possible); otherwise as memfd_create(2).
    pub fn create(shape: Shape) -> io::Result<OwnedFd> {
        if !shape.is_possible() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a topic cannot have {shape:?}")));
        }
        let mut draft = memfd::Draft::create("partywall:topic", Places::of(&shape).end as u64)?;
        let header = draft.writer();
        header.write_all_at(&MAGIC.to_le_bytes(), 0)?;
        header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
        let Shape { blocks, depth, publishers, loans, subscribers, held } = shape;
        let words = [blocks, depth, publishers, subscribers, held, loans];
        for (word, at) in words.into_iter().zip((16..).step_by(4)) {
            header.write_all_at(&word.to_le_bytes(), at)?;
        }
        Ok(draft.share()?)
    }

    /// Maps a topic that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a topic's, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = Arc::new(SharedMap::writable(fd)?);
        let len = memory.len();
        let Some([header]) = memory.atomics::<Header>(0, 1) else {
            return Err(invalid(format!("{len} bytes are too few for a topic")));
        };
        let found = (header.magic.load(Ordering::Relaxed), header.layout.load(Ordering::Relaxed));
        crate::check_layout("topic", found, (MAGIC, LAYOUT_HASH))?;
        let shape = Shape {
            blocks: header.blocks.load(Ordering::Relaxed),
            depth: header.depth.load(Ordering::Relaxed),
            publishers: header.publishers.load(Ordering::Relaxed),
            subscribers: header.subscribers.load(Ordering::Relaxed),
            held: header.held.load(Ordering::Relaxed),
            loans: header.loans.load(Ordering::Relaxed),
        };
        if !shape.is_possible() || len != Places::of(&shape).end {
            return Err(invalid(format!("a topic of {shape:?} and {len} bytes is invalid")));
        }
        Ok(Self::of(&memory, shape).expect("the length is that of the parts"))
    }

    fn of(memory: &Arc<SharedMap>, shape: Shape) -> Option<Self> {
        let places = Places::of(&shape);
        Some(Self {
            shape,
            header: memory.part(0, 1)?,
            ring: memory.part(size_of::<Header>(), shape.depth as usize)?,
            publishers: memory.part(places.publishers, shape.publishers as usize)?,
            subscribers: memory.part(places.subscribers, shape.subscribers as usize)?,
            holds: memory.part(places.holds, Places::holds(&shape))?,
            ages: memory.part(places.ages, shape.subscribers as usize)?,
            descriptors: memory.part(places.descriptors, shape.blocks as usize)?,
        })
    }
}

/// Byte offsets of the parts.
#[derive(Debug)]
struct Places {
    publishers: usize,
    subscribers: usize,
    holds: usize,
    ages: usize,
    descriptors: usize,
    end: usize,
}

impl Places {
    fn of(shape: &Shape) -> Self {
        let publishers = size_of::<Header>() + shape.depth as usize * size_of::<RingEntry>();
        let subscribers = publishers + shape.publishers as usize * size_of::<Publishing>();
        let holds = subscribers + shape.subscribers as usize * size_of::<Subscribing>();
        let ages = holds + Self::holds(shape) * size_of::<Holds>();
        let descriptors = ages + shape.subscribers as usize * size_of::<Histogram>();
        let end = descriptors + shape.blocks as usize * size_of::<Descriptor>();
        Self { publishers, subscribers, holds, ages, descriptors, end }
    }

    fn holds(shape: &Shape) -> usize {
        shape.subscribers as usize * (shape.held as usize).div_ceil(HOLDS)
    }
}

const MAGIC: u64 = u64::from_le_bytes(*b"PWTOPIC1");

/// Change the text whenever the bytes change, and never for a name alone: `bell` is the eventcount, `seat` the port
/// slot.
pub(crate) const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header 256: magic8 hash8 blocks4 depth4 publishers4 subscribers4 held4 loans4 0:24 tail8 samples:bell8 0:48 \
    space:bell8 0:56 joins8 ids8 publishers_joined8 ages_until8 0:32; bell: rings4 sleepers4; ring128: block16 lap48 0:120; \
    publisher640: seat8 published8 blocked_since8 blocked_by8 0:96 lanes32x16: cell8 incarnation8; \
    subscriber128: seat8 cursor8 queue8 received8 dropped8 0:88; seat: state2 row16 id46; holds128; \
    ages2560: count8 sum8 max8 0:104 buckets304x8:8_per_octave_to_40; \
    descriptor384: generation8 position8 status8 place:16 row:16 dtype:8 rank:4 header:12 lane:8 publisher8 sequence8 bytes8 value8 stamp8 \
    shape64 header256; status: state3 ending4 0:11 generation46",
);

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

    // Holds 159.
    #[test]
    fn impossible_layouts_are_refused() {
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
        // Not a topic, another layout, another length, and numbers that do not fit the length.
        let len = Places::of(&SHAPE).end;
        for (bytes, what, why) in [
            (len, (0, 1), "not the control memory of a topic"),
            (len, (8, 1), "another layout"),
            (len + 64, (0, 0), "is invalid"),
            (100, (0, 0), "too few"),
            (len, (20, 5), "is invalid"),
            (len, (18, 255), "is invalid"),
        ] {
            let mut draft = memfd::Draft::create("topic", bytes as u64).unwrap();
            let mut header = [MAGIC.to_le_bytes(), LAYOUT_HASH.to_le_bytes()].concat();
            for word in [30_u32, 8, 3, 4, 4, 2] {
                header.extend(word.to_le_bytes());
            }
            header[what.0] ^= what.1;
            draft.writer().write_all_at(&header[..header.len().min(bytes)], 0).unwrap();
            let error = Topic::map(draft.share().unwrap()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes} {what:?}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
