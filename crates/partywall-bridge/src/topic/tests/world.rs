//! The world of a stream: a ring at the origin, a topic at the receiving host, two bridges, and a network that loses,
//! doubles, reorders and delays. All invariants are checked after each step.

use std::{collections::BTreeMap, time::Duration};

use crate::topic::{
    PIECE_BYTES, Time,
    receiver::{LoanId, Payload, Receiver, ReceiverCounts, ReceiverEffect, ReceiverEvent, ReceiverOptions, StreamEnd},
    sender::{BATCH_BYTES, Sender, SenderEffect, SenderEvent, SentPiece},
    wire::{
        Bounded, EndReason, Instance, Message, RingId, SampleHead, SampleKind, StreamId, StreamPolicy, Text, ToOrigin,
        ToReceiver, TopicInfo, Window,
    },
};

pub(super) const DEPTH: u64 = 4;
/// What a hostile receiver gets, whatever it asks for.
const MOST_HELD: u32 = 64;

/// What was published at the origin, at each position.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingEntry {
    pub(super) bytes: u64,
    pub(super) failed: bool,
    /// Of the origin's bridge, so it does not cross.
    pub(super) own: bool,
}

impl RingEntry {
    /// A failed sample has no bytes to send.
    fn crossing_bytes(self) -> u64 {
        if self.failed { 0 } else { self.bytes }
    }
}

/// Stands for the bytes of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) position: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Stands for the bytes of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tags(pub(super) Vec<Tag>);

impl Payload for Tags {
    fn bytes(&self) -> u64 {
        self.0.iter().map(|tag| tag.bytes).sum()
    }

    fn part(&self, offset: u64, bytes: u64) -> Self {
        let mut start = 0;
        let parts = self.0.iter().filter_map(|tag| {
            let end = start + tag.bytes;
            let from = offset.clamp(start, end);
            let bytes = (offset + bytes).clamp(from, end.max(from)) - from;
            let part = Tag { offset: tag.offset + (from - start), bytes, ..*tag };
            start = end;
            (bytes > 0).then_some(part)
        });
        Self(parts.collect())
    }
}

#[derive(Debug)]
struct RingCursor {
    stream: StreamId,
    policy: StreamPolicy,
    next: u64,
    missed: u64,
    /// What was taken last says that the topic is idle.
    is_idle: bool,
}

#[derive(Debug)]
struct ModelLoan {
    sample: SampleHead,
    state: ModelLoanState,
    written: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum ModelLoanState {
    Asked,
    Granted,
    Publishing,
}

/// A sample in the topic of the receiving host.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalSample {
    pub(super) position: u64,
    pub(super) sequence: u64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct WorldOptions {
    pub(super) policy: StreamPolicy,
    pub(super) window: Window,
    pub(super) timeout: Duration,
    /// Whether a peer may send anything. Then only bounds and ends are checked.
    pub(super) hostile: bool,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) options: WorldOptions,
    pub(super) now: Time,
    pub(super) ring: Vec<RingEntry>,
    /// Whether the topic has a publisher at the origin.
    has_publisher: bool,
    cursor: Option<RingCursor>,
    pub(super) sender: Sender,
    /// The positions of the samples that the origin's bridge holds, by number; `None` for what is no sample.
    kept: BTreeMap<u64, Option<u64>>,
    origin: Instance,
    pub(super) receiver: Receiver<Tags>,
    receiving: Instance,
    loans: BTreeMap<LoanId, ModelLoan>,
    pub(super) local: Vec<LocalSample>,
    sequence: u64,
    publisher_is_open: bool,
    pub(super) end: Option<StreamEnd>,
    /// The position at which the present receiver began.
    pub(super) start: Option<u64>,
    pub(super) up: Vec<ToOrigin>,
    pub(super) down: Vec<(ToReceiver, Option<Tags>)>,
    /// Whether messages get through, up and down.
    pub(super) open: (bool, bool),
    pub(super) is_connected: bool,
    /// How often a stream has been resumed, or begun anew.
    pub(super) joins: u32,
    /// Loans and publishings that the topic refused.
    pub(super) refused: u64,
    instances: u128,
}

impl World {
    pub(super) fn new(options: WorldOptions) -> Self {
        let origin = Instance(1);
        let receiving = Instance(2);
        let mut world = Self {
            options,
            now: Time::ZERO,
            ring: Vec::new(),
            has_publisher: true,
            cursor: None,
            sender: new_sender(origin, options),
            kept: BTreeMap::new(),
            origin,
            receiver: new_receiver(receiving, options),
            receiving,
            loans: BTreeMap::new(),
            local: Vec::new(),
            sequence: 0,
            publisher_is_open: false,
            end: None,
            start: None,
            up: Vec::new(),
            down: Vec::new(),
            open: (true, true),
            is_connected: false,
            joins: 0,
            refused: 0,
            instances: 2,
        };
        world.connect();
        world
    }

    /// Publishes at the origin. Does nothing if the publisher has to wait for the export.
    pub(super) fn publish(&mut self, entry: RingEntry) {
        let head = self.ring.len() as u64;
        let waits = |cursor: &RingCursor| cursor.policy == StreamPolicy::Block && head - cursor.next >= DEPTH;
        if self.cursor.as_ref().is_some_and(waits) {
            return;
        }
        self.has_publisher = true;
        self.ring.push(entry);
        let head = head + 1;
        if let Some(cursor) = &mut self.cursor {
            let most = if cursor.policy == StreamPolicy::Latest { 1 } else { DEPTH };
            let least = head.saturating_sub(most).max(cursor.next);
            cursor.missed += least - cursor.next;
            cursor.next = least;
        }
    }

    /// A publisher joins at the origin, or all leave.
    pub(super) fn set_publisher(&mut self, has_publisher: bool) {
        self.has_publisher = has_publisher;
    }

    /// Takes the next sample from the ring, if there is credit. Returns whether it did.
    pub(super) fn take(&mut self) -> bool {
        self.take_up_to(1)
    }

    /// Takes as many samples at once, or fewer if there is no more credit.
    pub(super) fn take_up_to(&mut self, most: u32) -> bool {
        let Some(Window { samples, bytes }) = self.sender.credit() else { return false };
        let cursor = self.cursor.as_mut().expect("there is credit only for a stream");
        let mut heads: Vec<SampleHead> = Vec::new();
        let mut taken = Vec::new();
        let has_room = |heads: &[SampleHead]| {
            heads.len() < most.min(samples) as usize && heads.iter().map(|head| head.bytes).sum::<u64>() < bytes
        };
        while has_room(&heads) {
            let position = cursor.next;
            let change = if self.has_publisher { SampleKind::Busy } else { SampleKind::Idle };
            match self.ring.get(position as usize) {
                Some(RingEntry { own: true, .. }) if heads.is_empty() => {
                    cursor.next += 1;
                    let missed = std::mem::take(&mut cursor.missed);
                    self.sender_event(SenderEvent::Skipped { position, missed }, Vec::new());
                    return true;
                }
                Some(RingEntry { own: true, .. }) => break,
                Some(&entry) => {
                    cursor.next += 1;
                    cursor.is_idle = false;
                    heads.push(head(position, entry, std::mem::take(&mut cursor.missed)));
                    taken.push(Some(position));
                }
                None if cursor.is_idle == self.has_publisher => {
                    cursor.is_idle = !self.has_publisher;
                    heads.push(SampleHead::change(change, position, std::mem::take(&mut cursor.missed)));
                    taken.push(None);
                }
                None => break,
            }
        }
        let did = !heads.is_empty();
        if did {
            self.sender_event(SenderEvent::Taken(heads), taken);
        }
        did
    }

    /// Applies an event. `taken` are the positions of what was taken.
    pub(super) fn sender_event(&mut self, event: SenderEvent, taken: Vec<Option<u64>>) {
        let mut taken: Vec<_> = taken.into_iter().map(Some).collect();
        let mut effects = Vec::new();
        self.sender.apply(event, self.now, &mut effects);
        for effect in effects {
            match effect {
                SenderEffect::Subscribe { stream, join } => {
                    assert!(self.cursor.is_none(), "the ring is joined twice");
                    self.joins += 1;
                    let head = self.ring.len() as u64;
                    let history = if join.resume.is_some() { DEPTH - 1 } else { join.history.unwrap_or(0).into() };
                    let next = head.saturating_sub(history);
                    self.cursor = Some(RingCursor { stream, policy: join.policy, next, missed: 0, is_idle: false });
                    self.sender_event(
                        SenderEvent::Subscribed {
                            stream,
                            ring: RingId(7),
                            position: next,
                            topic: TopicInfo::default(),
                        },
                        Vec::new(),
                    );
                }
                SenderEffect::Unsubscribe { stream } => {
                    if self.cursor.as_ref().is_some_and(|cursor| cursor.stream == stream) {
                        self.cursor = None;
                    }
                    assert!(self.kept.is_empty(), "a sample is held without a stream");
                }
                SenderEffect::Keep { taken: which, number } => {
                    let kept = taken[which].take().expect("what was taken is kept once");
                    assert_eq!(self.kept.insert(number, kept), None);
                }
                SenderEffect::Release { number } => assert!(self.kept.remove(&number).is_some(), "released twice"),
                SenderEffect::Send(message) => self.send_down(message, None),
                SenderEffect::SendPieces { pieces, message } => {
                    let is_batch = pieces.len() > 1;
                    let tags = pieces.iter().filter_map(|piece| {
                        let SentPiece { number, offset, bytes } = *piece;
                        let Some(position) = self.kept[&number] else {
                            assert_eq!((offset, bytes), (0, 0), "what is no sample has bytes");
                            return None;
                        };
                        let has = self.ring[position as usize].crossing_bytes();
                        assert!(if is_batch { (offset, bytes) == (0, has) } else { offset + bytes <= has });
                        Some(Tag { position, offset, bytes })
                    });
                    let tags = Tags(tags.collect());
                    assert!(!is_batch || tags.bytes() <= BATCH_BYTES);
                    self.send_down(message, Some(tags));
                }
            }
        }
        self.check();
    }

    pub(super) fn receiver_event(&mut self, event: ReceiverEvent<Tags>) {
        let mut effects = Vec::new();
        self.receiver.apply(event, self.now, &mut effects);
        for effect in effects {
            match effect {
                ReceiverEffect::Send(message) => self.send_up(message),
                ReceiverEffect::Open(topic) => assert_eq!(topic, TopicInfo::default()),
                ReceiverEffect::OpenPublisher => self.publisher_is_open = true,
                ReceiverEffect::Borrow { loan, sample } => {
                    self.publisher_is_open = true;
                    let asked = ModelLoan { sample, state: ModelLoanState::Asked, written: 0 };
                    assert!(self.loans.insert(loan, asked).is_none(), "a loan is asked for twice");
                }
                ReceiverEffect::Write { loan, offset, payload } => {
                    let loan = self.loans.get_mut(&loan).expect("only what is lent is written");
                    assert_eq!(loan.state, ModelLoanState::Granted);
                    assert_eq!(offset, loan.written * PIECE_BYTES);
                    assert!(offset + payload.bytes() <= loan.sample.bytes);
                    loan.written += 1;
                    let tags = payload.0.iter().map(|tag| (tag.position, tag.offset));
                    if !self.options.hostile && payload.bytes() > 0 {
                        assert!(tags.eq([(loan.sample.position, offset)]), "other bytes");
                    }
                }
                ReceiverEffect::Publish { loan, skip } => {
                    let loan = self.loans.get_mut(&loan).expect("only what is lent is published");
                    assert_eq!(loan.state, ModelLoanState::Granted);
                    assert_eq!(loan.written, loan.sample.pieces(), "half a sample is published");
                    loan.state = ModelLoanState::Publishing;
                    self.sequence = self.sequence.saturating_add(skip);
                }
                ReceiverEffect::GiveBack { loan } => {
                    let loan = self.loans.remove(&loan).expect("only what is lent is given back");
                    assert_eq!(loan.state, ModelLoanState::Granted);
                }
                ReceiverEffect::ClosePublisher => {
                    assert!(self.loans.is_empty(), "the publisher is closed while it has loans");
                    self.publisher_is_open = false;
                }
                ReceiverEffect::Ended(end) => self.end = Some(end),
            }
        }
        if self.start.is_none() {
            self.start = self.receiver.ring_position();
        }
        self.check();
    }

    /// Answers the oldest request for a loan.
    pub(super) fn grant(&mut self, grants: bool) -> bool {
        let asked = |(loan, state): (&LoanId, &ModelLoan)| (state.state == ModelLoanState::Asked).then_some(*loan);
        let Some(loan) = self.loans.iter().find_map(asked) else { return false };
        if grants {
            self.loans.get_mut(&loan).expect("it was found").state = ModelLoanState::Granted;
            self.receiver_event(ReceiverEvent::Borrowed(loan));
        } else {
            self.refused += 1;
            self.loans.remove(&loan);
            self.receiver_event(ReceiverEvent::NotBorrowed(loan));
        }
        true
    }

    /// Ends a publishing.
    pub(super) fn finish(&mut self, succeeds: bool) -> bool {
        let ready = |(loan, state): (&LoanId, &ModelLoan)| (state.state == ModelLoanState::Publishing).then_some(*loan);
        let Some(loan) = self.loans.iter().find_map(ready) else { return false };
        let ModelLoan { sample, .. } = self.loans.remove(&loan).expect("it was found");
        if succeeds {
            self.local.push(LocalSample { position: sample.position, sequence: self.sequence });
            self.sequence = self.sequence.saturating_add(1);
            self.receiver_event(ReceiverEvent::Published(loan));
        } else {
            self.refused += 1;
            self.receiver_event(ReceiverEvent::NotPublished(loan));
        }
        true
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.sender_event(SenderEvent::Tick, Vec::new());
        self.receiver_event(ReceiverEvent::Tick);
    }

    /// Both hosts lose sight of each other.
    pub(super) fn disconnect(&mut self) {
        self.is_connected = false;
        self.sender_event(SenderEvent::HostLost(self.receiving), Vec::new());
        self.receiver_event(ReceiverEvent::HostLost(self.origin));
    }

    pub(super) fn connect(&mut self) {
        self.is_connected = true;
        self.sender_event(SenderEvent::HostUp(self.receiving), Vec::new());
        self.receiver_event(ReceiverEvent::HostUp(self.origin));
    }

    /// The origin's bridge is killed and started again.
    pub(super) fn kill_origin(&mut self) {
        self.origin = self.new_instance();
        self.cursor = None;
        self.kept.clear();
        self.sender = new_sender(self.origin, self.options);
        self.connect();
    }

    /// The receiving bridge is killed and started again. Its loans come back by the proof of its death.
    pub(super) fn kill_receiver(&mut self) {
        self.receiving = self.new_instance();
        self.loans.clear();
        self.publisher_is_open = false;
        self.local.clear();
        self.sequence = 0;
        self.start = None;
        self.end = None;
        self.receiver = new_receiver(self.receiving, self.options);
        self.connect();
    }

    pub(super) fn deliver_up(&mut self, index: usize, doubles: bool) -> bool {
        if self.up.is_empty() || !self.is_connected {
            return false;
        }
        let index = index % self.up.len();
        let message = if doubles { self.up[index].clone() } else { self.up.remove(index) };
        self.sender_event(SenderEvent::Message(message), Vec::new());
        true
    }

    pub(super) fn deliver_down(&mut self, index: usize, doubles: bool) -> bool {
        if self.down.is_empty() || !self.is_connected {
            return false;
        }
        let index = index % self.down.len();
        let (message, payload) = if doubles { self.down[index].clone() } else { self.down.remove(index) };
        self.receiver_event(ReceiverEvent::Message(message, payload));
        true
    }

    /// Everything works from now on, until nothing changes any more.
    ///
    /// # Panics
    /// If something waits for ever.
    pub(super) fn settle(&mut self) {
        self.open = (true, true);
        self.connect();
        for _ in 0..10_000 {
            let mut changed = false;
            while self.deliver_up(0, false)
                || self.deliver_down(0, false)
                || self.grant(true)
                || self.finish(true)
                || self.take()
            {
                changed = true;
            }
            if !changed && self.is_quiet() {
                let is_joined = self.receiver.stream().is_some();
                let is_open = is_joined && self.has_publisher;
                assert!(self.options.hostile || self.publisher_is_open == is_open, "the topic here ends otherwise");
                return;
            }
            self.pass(Duration::from_millis(500));
        }
        panic!("something waits for ever: {self:#?}");
    }

    /// Returns whether everything published has been taken and is published or missed, or the stream has ended.
    fn is_quiet(&self) -> bool {
        let is_idle = self.kept.is_empty() && self.loans.is_empty() && self.receiver.pending_bytes() == 0;
        let is_joined = self.receiver.stream().is_some() && self.receiver.stream() == self.sender.stream();
        let is_through = self
            .cursor
            .as_ref()
            .is_some_and(|cursor| cursor.next == self.ring.len() as u64 && cursor.is_idle != self.has_publisher);
        let is_over = self.receiver.stream().is_none() && self.sender.stream().is_none() && self.end.is_some();
        is_idle && (is_joined && is_through || is_over)
    }

    pub(super) fn counts(&self) -> ReceiverCounts {
        self.receiver.counts()
    }

    /// Returns the entries from a position on that are to cross.
    pub(super) fn crossing(&self, from: u64) -> impl Iterator<Item = (u64, RingEntry)> + '_ {
        let entries = self.ring.iter().enumerate().skip(from as usize);
        entries.map(|(position, entry)| (position as u64, *entry)).filter(|(_, entry)| !entry.own)
    }

    /// Returns how many loans there are.
    pub(super) fn loans(&self) -> usize {
        self.loans.len()
    }

    /// Returns how many samples the origin's bridge holds.
    pub(super) fn kept(&self) -> usize {
        self.kept.len()
    }

    pub(super) fn publisher_is_open(&self) -> bool {
        self.publisher_is_open
    }

    fn check(&self) {
        let Window { samples, bytes } = self.options.window;
        assert!(self.kept.len() <= MOST_HELD as usize, "more samples are held than any receiver may ask for");
        if !self.options.hostile {
            assert!(self.kept.len() <= samples as usize, "more samples are held than there is credit");
            let positions = self.kept.values().flatten();
            let sizes: Vec<u64> = positions.map(|position| self.ring[*position as usize].crossing_bytes()).collect();
            let largest = sizes.iter().max().copied().unwrap_or(0);
            // The first one may be written as good as whole.
            assert!(sizes.iter().sum::<u64>() < bytes + 2 * largest.max(1), "more bytes are held than there is credit");
        }
        assert!(self.receiver.pending_bytes() < bytes + PIECE_BYTES, "more waits than there is credit");
        // A peer may well lie about its own samples.
        let is_sorted = self.local.is_sorted_by(|one, next| one.position < next.position);
        assert!(self.options.hostile || is_sorted, "samples doubled, or out of order");
        assert!(self.loans.len() <= 1 + self.unwanted(), "more than one loan");
    }

    fn unwanted(&self) -> usize {
        self.loans.values().filter(|loan| loan.state == ModelLoanState::Asked).count()
    }

    fn send_up(&mut self, message: ToOrigin) {
        assert_eq!(ToOrigin::decode(&message.encode()).as_ref(), Ok(&message));
        if self.open.0 && self.is_connected {
            self.up.push(message);
        }
    }

    fn send_down(&mut self, message: ToReceiver, payload: Option<Tags>) {
        assert_eq!(ToReceiver::decode(&message.encode()).as_ref(), Ok(&message));
        if self.open.1 && self.is_connected {
            self.down.push((message, payload));
        }
    }

    fn new_instance(&mut self) -> Instance {
        self.instances += 1;
        Instance(self.instances)
    }

    /// Ends the topic after what has been taken from it.
    pub(super) fn end_topic(&mut self) {
        let head = self.ring.len() as u64;
        let missed = self.cursor.as_ref().map_or(0, |cursor| head - cursor.next + cursor.missed);
        self.sender_event(SenderEvent::TopicOver { missed }, Vec::new());
    }

    /// The topic is exported again.
    pub(super) fn offer(&mut self) {
        self.end = None;
        self.receiver_event(ReceiverEvent::Offered);
    }

    pub(super) fn stop_export(&mut self) {
        self.sender_event(SenderEvent::Stop(EndReason::NotExported), Vec::new());
    }
}

fn new_sender(us: Instance, options: WorldOptions) -> Sender {
    let any = Window { samples: MOST_HELD, bytes: 1 << 40 };
    Sender::new(us, if options.hostile { any } else { options.window }, options.timeout)
}

fn new_receiver(us: Instance, options: WorldOptions) -> Receiver<Tags> {
    let WorldOptions { policy, window, timeout, .. } = options;
    Receiver::new(us, 0, ReceiverOptions { policy, history: Some(2), window, timeout })
}

fn head(position: u64, entry: RingEntry, missed: u64) -> SampleHead {
    SampleHead {
        kind: if entry.failed { SampleKind::Failed } else { SampleKind::Whole },
        position,
        publisher: 5,
        sequence: position,
        missed,
        dtype: Text::new("u8").expect("it is short"),
        shape: Bounded::new(vec![entry.bytes]).expect("it is short"),
        bytes: entry.bytes,
        header: Bounded::default(),
    }
}
