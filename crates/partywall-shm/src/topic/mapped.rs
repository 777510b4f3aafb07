//! A topic in memory.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use partywall_os::{
    map::{Part, SharedMap},
    memfd,
};

use super::{
    Ahead, Audit, Description, Header, MAX_HEADER, MAX_RANK, Message, PortId, PublisherPlace, PublisherState, Received,
    Shape, Status, SubscriberPlace, SubscriberState, Taken, TimelineCell, Unpublished,
    core::Core,
    descriptor::Descriptor,
    entry::Entry,
    members::{HOLDS, Holds, Publishing, Subscribing},
};
use crate::{
    EventKey,
    pool::{Held, Pool},
    timeline::Ending,
};

/// A mapped topic.
#[derive(Debug)]
pub struct Topic {
    /// As it was when it was mapped; others may write to the words.
    shape: Shape,
    parts: Parts,
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
        let Shape { blocks, depth, publishers, loans, subscribers, held } = shape;
        let words = [blocks, depth, publishers, subscribers, held, loans];
        for (word, at) in words.into_iter().zip((16..).step_by(4)) {
            header.write_all_at(&word.to_le_bytes(), at)?;
        }
        Ok(draft.share()?)
    }

    /// Takes the rows that are `gone` out of the topic, because they ended as `ending` says: nobody waits for their
    /// subscribers any more, and of their publishers' samples it is decided which are complete. `reached` says how far an
    /// incarnation of a timeline, which has ended, really came.
    ///
    /// What they hold stays theirs. Ends, whatever the bytes are, and may be repeated. Returns how many ports were detached.
    pub fn detach(
        &self,
        gone: impl Fn(u16) -> bool,
        ending: Ending,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> u32 {
        self.core().detach(gone, ending, reached)
    }

    /// Takes everything of the rows that are `dead` back: their ports, holds and blocks, and their places among those who
    /// wait for a block. Returns how many blocks they held. To be called instead of [`Pool::recover`].
    ///
    /// To be called once the rows' processes are proved dead. Ends, whatever the bytes are, and may be repeated.
    pub fn recover(&self, pool: &Pool, dead: impl Fn(u16) -> bool) -> u32 {
        self.core().recover(pool.core(), dead)
    }

    /// Counts where the blocks are. While others use it the numbers are of no single moment.
    pub fn audit(&self, pool: &Pool) -> Audit {
        self.core().audit(pool.core())
    }
}

/// For all.
impl Topic {
    /// Maps a topic that a broker has made.
    ///
    /// # Errors
    /// `InvalidData` if it is none, or of another layout; else as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = Arc::new(SharedMap::writable(fd)?);
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        let Some([header]) = memory.atomics::<Header>(0, 1) else {
            return refuse(format!("{} bytes are too few for a topic", memory.len()));
        };
        let magic = header.magic.load(Ordering::Relaxed);
        let layout = header.layout.load(Ordering::Relaxed);
        crate::check_layout("topic", (magic, layout), (MAGIC, LAYOUT_HASH))?;
        let shape = Shape {
            blocks: header.blocks.load(Ordering::Relaxed),
            depth: header.depth.load(Ordering::Relaxed),
            publishers: header.publishers.load(Ordering::Relaxed),
            subscribers: header.subscribers.load(Ordering::Relaxed),
            held: header.held.load(Ordering::Relaxed),
            loans: header.loans.load(Ordering::Relaxed),
        };
        if !shape.is_possible() || memory.len() != Places::of(&shape).end {
            return refuse(format!("a topic of {shape:?} and {} bytes cannot be", memory.len()));
        }
        let parts = Parts::of(&memory, &shape).expect("its length is that of its parts");
        Ok(Self { shape, parts })
    }

    /// What it has room for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many samples have been published.
    pub fn published(&self) -> u64 {
        self.core().tail()
    }

    /// Frees the blocks that nobody uses any more, and returns how many. To be called by those who find no free block,
    /// once they wait for one and now and then while they do.
    pub fn sweep(&self, pool: &Pool) -> u32 {
        self.core().sweep(pool.core())
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

/// For publishers.
impl Topic {
    /// Makes a member's row a publisher. `None` if there are as many as there can be, or the row was detached meanwhile.
    pub fn join_as_publisher(&self, row: u16) -> Option<PublisherPlace> {
        self.core().join_as_publisher(row)
    }

    /// Says which timeline a publisher's samples are complete by. To be called before the first of them.
    pub fn set_timeline(&self, place: &PublisherPlace, cell: TimelineCell) {
        self.core().set_timeline(place, cell);
    }

    /// Has the processor fetch what [`Topic::publish`] is going to write of a block.
    pub fn prefetch_to_write(&self, block: u32) {
        if let Some(descriptor) = self.parts.descriptors.get(block as usize) {
            descriptor.prefetch_to_write();
        }
    }

    /// Publishes a block that its member holds, and returns its position. If the message's status is final it is the topic's
    /// then; otherwise it is still held and has to be [retired](Topic::retire).
    ///
    /// # Errors
    /// As [`Unpublished`] says. The block is then as it was.
    ///
    /// # Panics
    /// If the shape or the header is too long, or the block is of another pool.
    pub fn publish(
        &self,
        pool: &Pool,
        place: &mut PublisherPlace,
        held: &Held,
        message: &Message<'_>,
    ) -> Result<u64, Unpublished> {
        assert!(message.shape.len() <= MAX_RANK && message.header.len() <= MAX_HEADER, "the caller has looked");
        self.core().publish(pool.core(), place, held, message)
    }

    /// Samples that a publisher has published, also for those who do not have its place.
    pub fn published_by(&self, place: PortId) -> u64 {
        self.core().publishers[place.index].published.load(Ordering::Relaxed)
    }

    /// Makes the status of a sample that was published final. Nothing happens if it is, or if the block is another
    /// sample's by now.
    pub fn settle(&self, block: u32, generation: u64, status: Status) {
        let Some(descriptor) = self.core().descriptors.get(block as usize) else { return };
        let seen = descriptor.status();
        if seen.generation() == generation && !seen.status().is_final() {
            descriptor.settle(seen, status);
        }
    }

    /// Lets go of a block that was published, once no stream writes it any more.
    pub fn retire(&self, pool: &Pool, held: &Held) {
        self.core().retire(pool.core(), held);
    }

    /// Says for which subscriber a publisher waits, and since when, for those who look.
    pub fn set_blocked(&self, place: PortId, blocked: Option<(u64, u64)>) {
        self.core().set_blocked(place, blocked);
    }

    /// Announces that the caller may sleep until there is room. To be called before [`Topic::publish`].
    pub fn prepare_for_space(&self) -> EventKey {
        self.core().header.space.prepare()
    }

    /// Sleeps until there may be room; not longer than `limit` and [`MAX_SLEEP`](crate::MAX_SLEEP). May return early.
    pub fn sleep_for_space(&self, key: EventKey, limit: Duration) {
        self.core().header.space.sleep(key, limit);
    }

    /// A publisher publishes no more.
    pub fn detach_publisher(&self, place: PortId) {
        self.core().detach_publisher(place);
    }

    /// Gives a publisher's port back, once all that it has published is final.
    pub fn leave_as_publisher(&self, place: PortId) {
        self.core().leave_as_publisher(place);
    }
}

/// For subscribers.
impl Topic {
    /// Makes a member's row a subscriber, which may be `queue` samples behind, or which publishers wait for, if that is
    /// `None`. It begins with the last `history` samples, or with as many as the ring keeps. `None` if there are as many
    /// subscribers as there can be, or the row was detached meanwhile.
    pub fn join_as_subscriber(&self, row: u16, queue: Option<u32>, history: u32) -> Option<SubscriberPlace> {
        self.core().join_as_subscriber(row, queue, history)
    }

    /// Takes the next sample.
    pub fn receive(&self, pool: &Pool, place: &mut SubscriberPlace) -> Received {
        self.core().receive(pool.core(), place)
    }

    /// What [`Topic::receive`] would find for a subscriber whose [`SubscriberPlace::next`] is, or was, that; for those who look
    /// again and again. Has the processor fetch what is said of the sample.
    #[inline]
    pub fn look(&self, place: PortId, next: u64) -> Ahead {
        self.core().look(place, next)
    }

    /// Whether all publishers have left and the subscriber whose [`SubscriberPlace::next`] is `next` has received everything.
    /// False as long as the topic has never had a publisher.
    pub fn is_idle(&self, next: u64) -> bool {
        self.core().is_idle(next)
    }

    /// What is said of a sample. It stays so while the sample is held.
    pub fn describe(&self, taken: &Taken) -> Description {
        self.core().descriptors[taken.block() as usize].describe()
    }

    /// The user's header of a sample.
    pub fn header(&self, taken: &Taken) -> Vec<u8> {
        self.core().descriptors[taken.block() as usize].header()
    }

    /// Whether a sample may be believed, as far as it is known now.
    pub fn status(&self, taken: &Taken) -> Status {
        self.core().descriptors[taken.block() as usize].status().status()
    }

    /// The timeline of a sample's publisher, as long as that has not left the topic. It does not as long as it has samples
    /// whose status is not final.
    pub fn timeline_of(&self, taken: &Taken) -> Option<TimelineCell> {
        self.core().timeline_of(taken.block() as usize)
    }

    /// Lets go of a sample.
    pub fn release(&self, pool: &Pool, taken: &Taken) {
        self.core().release(pool.core(), taken);
    }

    /// Announces that the caller may sleep until there is a sample. To be called before [`Topic::receive`].
    pub fn prepare_for_sample(&self) -> EventKey {
        self.core().header.samples.prepare()
    }

    /// Sleeps until there may be a sample; not longer than `limit` and [`MAX_SLEEP`](crate::MAX_SLEEP). May return early.
    pub fn sleep_for_sample(&self, key: EventKey, limit: Duration) {
        self.core().header.samples.sleep(key, limit);
    }

    /// Nobody waits for a subscriber any more. What it holds it keeps.
    pub fn detach_subscriber(&self, place: PortId) {
        self.core().detach_subscriber(place);
    }

    /// Gives a subscriber's port back, once it holds nothing.
    pub fn leave_as_subscriber(&self, place: PortId) {
        self.core().leave_as_subscriber(place);
    }
}

impl Topic {
    #[inline]
    fn core(&self) -> Core<'_> {
        let Self { shape, parts } = self;
        Core {
            header: &parts.header[0],
            ring: &parts.ring,
            publishers: &parts.publishers,
            subscribers: &parts.subscribers,
            holds: &parts.holds,
            descriptors: &parts.descriptors,
            held: shape.held as usize,
        }
    }
}

/// The parts of its memory.
#[derive(Debug)]
struct Parts {
    header: Part<Header>,
    ring: Part<Entry>,
    publishers: Part<Publishing>,
    subscribers: Part<Subscribing>,
    holds: Part<Holds>,
    descriptors: Part<Descriptor>,
}

impl Parts {
    fn of(memory: &Arc<SharedMap>, shape: &Shape) -> Option<Self> {
        let places = Places::of(shape);
        Some(Self {
            header: memory.part(0, 1)?,
            ring: memory.part(size_of::<Header>(), shape.depth as usize)?,
            publishers: memory.part(places.publishers, shape.publishers as usize)?,
            subscribers: memory.part(places.subscribers, shape.subscribers as usize)?,
            holds: memory.part(places.holds, Places::holds(shape))?,
            descriptors: memory.part(places.descriptors, shape.blocks as usize)?,
        })
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
        let descriptors = holds + Self::holds(shape) * size_of::<Holds>();
        let end = descriptors + shape.blocks as usize * size_of::<Descriptor>();
        Self { publishers, subscribers, holds, descriptors, end }
    }

    fn holds(shape: &Shape) -> usize {
        shape.subscribers as usize * (shape.held as usize).div_ceil(HOLDS)
    }
}

const MAGIC: u64 = u64::from_le_bytes(*b"PWTOPIC1");

/// Hash of the text below: change the text whenever the bytes change, and never for a name alone.
const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header 256: magic8 hash8 blocks4 depth4 publishers4 subscribers4 held4 loans4 0:24 tail8 samples:bell8 0:48 \
    space:bell8 0:56 joins8 ids8 publishers_joined8 0:40; bell: rings4 sleepers4; ring128: block16 lap48 0:120; \
    publisher128: seat8 published8 cell8 incarnation8 blocked_since8 blocked_by8 0:80; \
    subscriber128: seat8 cursor8 queue8 received8 dropped8 0:88; seat: state2 row16 id46; holds128; \
    descriptor384: generation8 position8 status8 place2 row2 dtype1 rank1 header2 publisher8 sequence8 bytes8 value8 \
    shape64 header256; status: state3 ending4 0:11 generation46",
);

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { blocks: 30, depth: 8, publishers: 3, loans: 2, subscribers: 4, held: 4 };

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
            Shape { loans: 0, ..SHAPE },
            Shape { loans: 3, ..SHAPE },
            Shape { subscribers: crate::topic::MAX_SUBSCRIBERS + 1, held: 1, blocks: 1000, ..SHAPE },
            Shape { blocks: u32::MAX, ..SHAPE },
        ];
        for shape in impossible {
            assert_eq!(Topic::create(shape).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{shape:?}");
        }
        // No topic, another layout, another length, and numbers that do not fit it.
        let len = Places::of(&SHAPE).end;
        for (bytes, what, why) in [
            (len, (0, 1), "no words of a topic"),
            (len, (8, 1), "another layout"),
            (len + 64, (0, 0), "cannot be"),
            (100, (0, 0), "too few"),
            (len, (20, 5), "cannot be"),
            (len, (18, 255), "cannot be"),
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
