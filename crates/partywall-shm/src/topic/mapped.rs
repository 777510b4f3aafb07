//! A topic in memory.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::Ordering,
};

use partywall_os::{map::SharedMap, memfd};

use super::{
    Header, PublisherState, Shape, SubscriberState, TimelineCell,
    core::Core,
    descriptor::Descriptor,
    entry::Entry,
    members::{Holds, Publishing, Subscribing},
};
use crate::timeline::Ending;

/// A mapped topic.
#[derive(Debug)]
pub struct Topic {
    memory: SharedMap,
    /// As it was when it was mapped; others may write to the words.
    shape: Shape,
    places: Places,
}

/// For the broker.
impl Topic {
    /// A new memfd, with an empty topic.
    ///
    /// # Errors
    /// `InvalidInput` unless the shape [is possible](Shape::is_possible); else as memfd_create(2).
    pub fn create(shape: Shape) -> io::Result<OwnedFd> {
        if !shape.is_possible() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a topic cannot have {shape:?}")));
        }
        let mut draft = memfd::Draft::create("partywall:topic", Places::of(&shape).end as u64)?;
        let header = draft.writer();
        header.write_all_at(&MAGIC.to_le_bytes(), 0)?;
        header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
        let words = [shape.blocks, shape.depth, shape.publishers, shape.subscribers, shape.held];
        for (word, at) in words.into_iter().zip((16..).step_by(4)) {
            header.write_all_at(&word.to_le_bytes(), at)?;
        }
        Ok(draft.share()?)
    }

    /// Takes the rows that are `gone` out of the topic, because they ended as `ending` says: nobody waits for their
    /// subscribers any more, and of their publishers' samples it is decided which are complete. `reached` says how far an
    /// incarnation of a timeline, which has ended, really came.
    ///
    /// What they hold stays theirs. Ends, whatever the bytes are, and may be repeated. Returns how many seats were parted.
    pub fn part(
        &self,
        gone: impl Fn(u16) -> bool,
        ending: Ending,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> u32 {
        self.core().part(gone, ending, reached)
    }
}

/// For all.
impl Topic {
    /// Maps a topic that a broker has made.
    ///
    /// # Errors
    /// `InvalidData` if it is none, or of another layout; else as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = SharedMap::writable(fd)?;
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        let Some([header]) = memory.atomics::<Header>(0, 1) else {
            return refuse(format!("{} bytes are too few for a topic", memory.len()));
        };
        let (magic, layout) = (header.magic.load(Ordering::Relaxed), header.layout.load(Ordering::Relaxed));
        if magic != MAGIC || layout != LAYOUT_HASH {
            return refuse(format!("no topic of the layout {LAYOUT_HASH:016x}: {magic:016x} {layout:016x}"));
        }
        let shape = Shape {
            blocks: header.blocks.load(Ordering::Relaxed),
            depth: header.depth.load(Ordering::Relaxed),
            publishers: header.publishers.load(Ordering::Relaxed),
            subscribers: header.subscribers.load(Ordering::Relaxed),
            held: header.held.load(Ordering::Relaxed),
        };
        if !shape.is_possible() || memory.len() != Places::of(&shape).end {
            return refuse(format!("a topic of {shape:?} and {} bytes cannot be", memory.len()));
        }
        Ok(Self { memory, shape, places: Places::of(&shape) })
    }

    /// What it has room for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many samples have been published.
    pub fn published(&self) -> u64 {
        self.core().tail()
    }

    /// The publishers that there are.
    pub fn publishers(&self) -> Vec<PublisherState> {
        self.core().publishers()
    }

    /// The subscribers that there are.
    pub fn subscribers(&self) -> Vec<SubscriberState> {
        self.core().subscribers()
    }
}

impl Topic {
    fn core(&self) -> Core<'_> {
        const PROOF: &str = "`map` has found the file to be as long as it has to be";
        let (shape, places) = (&self.shape, &self.places);
        Core {
            header: self.memory.atomics(0, 1).and_then(<[_]>::first).expect(PROOF),
            ring: self.memory.atomics(size_of::<Header>(), shape.depth as usize).expect(PROOF),
            publishers: self.memory.atomics(places.publishers, shape.publishers as usize).expect(PROOF),
            subscribers: self.memory.atomics(places.subscribers, shape.subscribers as usize).expect(PROOF),
            holds: self.memory.atomics(places.holds, Places::hold_lines(shape)).expect(PROOF),
            descriptors: self.memory.atomics(places.descriptors, shape.blocks as usize).expect(PROOF),
        }
    }
}

/// Where the parts begin.
#[derive(Debug)]
struct Places {
    publishers: usize,
    subscribers: usize,
    holds: usize,
    descriptors: usize,
    end: usize,
}

impl Places {
    fn of(shape: &Shape) -> Self {
        let publishers = size_of::<Header>() + shape.depth as usize * size_of::<Entry>();
        let subscribers = publishers + shape.publishers as usize * size_of::<Publishing>();
        let holds = subscribers + shape.subscribers as usize * size_of::<Subscribing>();
        let descriptors = holds + Self::hold_lines(shape) * size_of::<Holds>();
        let descriptors = descriptors.next_multiple_of(align_of::<Descriptor>());
        let end = descriptors + shape.blocks as usize * size_of::<Descriptor>();
        Self { publishers, subscribers, holds, descriptors, end }
    }

    fn hold_lines(shape: &Shape) -> usize {
        shape.subscribers as usize * shape.held.div_ceil(8) as usize
    }
}

const MAGIC: u64 = u64::from_le_bytes(*b"PWTOPIC1");

/// Change the text whenever the bytes change.
const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header 256: magic8 hash8 blocks4 depth4 publishers4 subscribers4 held4 0:28 tail8 samples:bell8 0:48 \
    space:bell8 0:56 joins8 ids8 0:48; bell: rings4 sleepers4; ring64: block16 lap48 0:56; \
    publisher64: seat8 published8 cell8 incarnation8 blocked_since8 blocked_by8 0:16; \
    subscriber64: seat8 cursor8 queue8 received8 dropped8 0:24; seat: state2 row16 id46; holds 64; \
    descriptor384: generation8 position8 status8 place2 row2 dtype1 rank1 header2 publisher8 sequence8 bytes8 value8 \
    shape64 header256; status: state3 ending4 0:11 generation46",
);

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { blocks: 30, depth: 8, publishers: 3, subscribers: 4, held: 4 };

    #[test]
    fn a_topic_is_what_it_was_made_as() {
        let topic = Topic::map(Topic::create(SHAPE).unwrap()).unwrap();
        assert_eq!((topic.shape(), topic.published()), (SHAPE, 0));
        assert!(topic.publishers().is_empty() && topic.subscribers().is_empty());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let impossible = [
            Shape { depth: 6, ..SHAPE },
            Shape { depth: 0, ..SHAPE },
            Shape { blocks: 29, ..SHAPE },
            Shape { publishers: 0, ..SHAPE },
            Shape { subscribers: crate::topic::MAX_SUBSCRIBERS + 1, held: 1, blocks: 1000, ..SHAPE },
            Shape { blocks: u32::MAX, ..SHAPE },
        ];
        for shape in impossible {
            assert_eq!(Topic::create(shape).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{shape:?}");
        }
        // No topic, another layout, another length, and numbers that do not fit it.
        let len = Places::of(&SHAPE).end;
        for (bytes, what) in
            [(len, (0, 1)), (len, (8, 1)), (len + 64, (0, 0)), (100, (0, 0)), (len, (20, 5)), (len, (18, 255))]
        {
            let mut draft = memfd::Draft::create("topic", bytes as u64).unwrap();
            let mut header = [MAGIC.to_le_bytes(), LAYOUT_HASH.to_le_bytes()].concat();
            for word in [30_u32, 8, 3, 4, 4] {
                header.extend(word.to_le_bytes());
            }
            header[what.0] ^= what.1;
            draft.writer().write_all_at(&header[..header.len().min(bytes)], 0).unwrap();
            let error = Topic::map(draft.share().unwrap()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes} {what:?}");
        }
    }
}
