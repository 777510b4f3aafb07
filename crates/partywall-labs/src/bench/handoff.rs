//! Hand-offs: how long one process takes to tell another, by each way there is.
//!
//! Two processes tell each other in turns. A sample is the time of many turns, divided by their number. Both wait as each way
//! waits by itself: Partywall polls for some microseconds before it sleeps, a futex and a socket sleep at once.

use std::{
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::atomic::Ordering,
};

use partywall::{
    DType, IpcEvent, IpcEventHandle, Permit, Policy, Publisher, Queue, Segment, Semaphore, Subscriber, Task, Timeline,
    TimelineWriter,
};
use partywall_measure::{Case, Comparison, Failure as Sampled, Sampler, Unit};

use super::{
    Bench,
    copies::SPOILT,
    group::{Group, MAKING, Meeting, Sharing, TURNS, Words, in_each_sharing, same},
    peer::{Order, TENSOR},
    system,
};
use crate::prelude::*;

/// How two processes tell each other something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Way {
    /// A word that both map, and the kernel's futex: the least that a sleeper costs.
    Futex,
    /// A byte through a pair of Unix sockets: what most do.
    Socket,
    /// A value of a timeline.
    Timeline,
    /// A sample of a topic, in place.
    Topic,
    /// A task of a queue, completed.
    Queue,
    /// A permit, given back by one and taken by the other, and a word of memory that it guards.
    Semaphore,
    /// Streams that wait for each other.
    Streams(Behind),
}

/// What one stream waits for, of another process's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Behind {
    /// A value of a timeline: no host takes part but to enqueue.
    Timeline,
    /// A record of an interprocess event. Its host has to tell the other one that the record is there.
    Event,
    /// Both hosts: one waits for its GPU and tells the other.
    Hosts,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Futex => "futex",
            Self::Socket => "Unix socket",
            Self::Timeline => "timeline",
            Self::Topic => "topic",
            Self::Queue => "queue",
            Self::Semaphore => "semaphore",
            Self::Streams(Behind::Timeline) => "timeline, from stream to stream",
            Self::Streams(Behind::Event) => "IPC event (cuIpcOpenEventHandle), and a timeline to tell of its record",
            Self::Streams(Behind::Hosts) => "from stream to stream by both hosts: synchronise, and tell by a timeline",
        }
    }
}

pub(super) fn run(bench: &Bench<'_>) -> Result<(), Failure> {
    in_each_sharing(bench, "hand-offs", 2, |group, sharing| hand_over(bench, group, sharing))
}

fn hand_over(bench: &Bench<'_>, group: &Group, sharing: Sharing) -> Result<(), Failure> {
    let case = |way: Way| {
        let of = format!("one process tells another{}", sharing.suffix());
        Case::new(way.name(), Unit::Microseconds).parameter("of", of)
    };
    for way in [Way::Timeline, Way::Topic, Way::Queue, Way::Semaphore] {
        let (ours, futex, socket) = (meet(group, way)?, meet(group, Way::Futex)?, meet(group, Way::Socket)?);
        let comparison = Comparison::new(case(way), one_way(group, &ours))
            .floor(case(Way::Futex), one_way(group, &futex))
            .rival(case(Way::Socket), one_way(group, &socket));
        bench.run("hand-offs", comparison)?;
    }
    if sharing == Sharing::None { Ok(()) } else { streams(bench, group, sharing) }
}

fn streams(bench: &Bench<'_>, group: &Group, sharing: Sharing) -> Result<(), Failure> {
    let case = |way: Way| {
        let of = format!("a stream of one process tells one of another{}", sharing.suffix());
        Case::new(way.name(), Unit::Microseconds).parameter("of", of)
    };
    let [timeline, events, hosts] = [Behind::Timeline, Behind::Event, Behind::Hosts].map(Way::Streams);
    let (ours, by_hosts) = (meet(group, timeline)?, meet(group, hosts)?);
    // A process whose event is refused ends, so these are processes of their own.
    let others = Group::start(bench, 2, sharing)?;
    let met = meet(&others, events);
    let mut comparison = Comparison::new(case(timeline), one_way(group, &ours));
    match &met {
        Ok(met) => comparison = comparison.rival(case(events), one_way(&others, met)),
        Err(failure) => {
            bench.note(format!("hand-offs by IPC events{} were refused: {}", sharing.suffix(), failure.message()));
        }
    }
    bench.run("hand-offs of streams", comparison.rival(case(hosts), one_way(group, &by_hosts)))
}

fn meet(group: &Group, way: Way) -> Result<Meeting, Failure> {
    let words = Words::files(2)?;
    let (one, other) = UnixStream::pair().map_err(system(MAKING))?;
    let files = words.into_iter().zip([one.into(), other.into()]).map(<[OwnedFd; 2]>::from);
    group.meet(files.collect(), |meeting| Order::Meet { way, meeting })
}

/// Returns microseconds of a hand-off: half a turn.
fn one_way<'a>(group: &'a Group, meeting: &'a Meeting) -> Sampler<'a> {
    let mut turn = group.sampler(meeting);
    Box::new(move || Ok(turn()? / 2.0))
}

/// What one of two processes tells the other by, and is told by.
pub(super) struct Ends {
    first: bool,
    /// The last value that was told. Values grow, so that a stale one is found.
    last: u64,
    by: By,
}

enum By {
    Futex(Words),
    Socket(UnixStream),
    Timeline { ours: TimelineWriter, theirs: Timeline },
    Topic { ours: Publisher, theirs: Subscriber },
    Queue { ours: Queue, theirs: Queue },
    Semaphores(Permits),
    Streams(Box<Relay>),
}

impl Ends {
    /// Returns those of one side. What each side makes, the other one opens.
    pub(super) fn new(
        domain: &Domain,
        place: Place,
        way: Way,
        meeting: &Meeting,
        [words, socket]: [OwnedFd; 2],
    ) -> Result<Self, Failure> {
        let first = meeting.index == 0;
        let name = |first: bool| format!("{}/{}", meeting.name, if first { "first" } else { "second" });
        let timelines =
            || -> Result<_, Failure> { Ok((domain.timeline_writer(&name(first))?, domain.timeline(&name(!first))?)) };
        let by = match way {
            Way::Futex => By::Futex(Words::map(words)?),
            Way::Socket => By::Socket(socket.into()),
            Way::Timeline => {
                let (ours, theirs) = timelines()?;
                By::Timeline { ours, theirs }
            }
            Way::Topic => {
                let topic = |first| {
                    domain.topic(&name(first)).dtype(DType::U64).shape(&[1]).place(Place::Host).open_or_create()
                };
                By::Topic { theirs: topic(!first)?.subscribe(Policy::Block).join()?, ours: topic(first)?.publisher()? }
            }
            Way::Queue => {
                let queue = |first| domain.queue(&name(first)).tasks(8).place(Place::Host).open_or_create();
                By::Queue { ours: queue(first)?, theirs: queue(!first)? }
            }
            Way::Semaphore => By::Semaphores(Permits::new(domain, &meeting.name, first, Words::map(words)?)?),
            Way::Streams(behind) => {
                let (ours, theirs) = timelines()?;
                let names = [name(first), name(!first)];
                By::Streams(Box::new(Relay::new(domain, place, names, behind, ours, theirs, socket.into())?))
            }
        };
        Ok(Self { first, last: 0, by })
    }

    /// Tells and is told so many times. Returns how long it took.
    pub(super) fn exchange(&mut self, turns: u64) -> Result<Duration, Sampled> {
        if let By::Streams(relay) = &self.by {
            relay.begin()?;
        }
        let start = Instant::now();
        for _ in 0..turns {
            self.last += 1;
            if self.first {
                self.by.tell(self.last, self.first)?;
                self.by.hear(self.last, self.first)?;
            } else {
                self.by.hear(self.last, self.first)?;
                self.by.tell(self.last, self.first)?;
            }
        }
        let By::Streams(relay) = &self.by else { return Ok(start.elapsed()) };
        relay.stream.synchronize()?;
        let time = start.elapsed();
        relay.theirs.check()?;
        if self.first {
            relay.check(self.last)?;
        }
        Ok(time)
    }
}

impl By {
    fn tell(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        match self {
            Self::Futex(words) => words.tell(usize::from(!first), value),
            Self::Socket(socket) => (&*socket).write_all(&value.to_ne_bytes())?,
            Self::Timeline { ours, .. } => ours.signal(value)?,
            Self::Topic { ours, .. } => {
                let mut loan = ours.loan(DType::U64, &[1], TIMEOUT)?;
                loan.as_mut_slice::<u64>()?[0] = value;
                loan.filled().publish(TIMEOUT)?;
            }
            Self::Queue { ours, .. } => {
                let task = Task::new("count").arguments(&value.to_ne_bytes()).cancel_with_submitter(true);
                let ticket = ours.submit(task, TIMEOUT).map_err(|refused| refused.error)?;
                ticket.wait(TIMEOUT)?;
            }
            Self::Semaphores(permits) => permits.tell(value, first)?,
            Self::Streams(relay) => relay.tell(value, first)?,
        }
        Ok(())
    }

    fn hear(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        let found = match self {
            Self::Futex(words) => words.hear(usize::from(first), value),
            Self::Socket(socket) => {
                let mut bytes = [0; 8];
                socket.read_exact(&mut bytes)?;
                u64::from_ne_bytes(bytes)
            }
            Self::Timeline { theirs, .. } => theirs.wait(value, TIMEOUT).map(|()| value)?,
            Self::Topic { theirs, .. } => theirs.recv(TIMEOUT)?.as_slice::<u64>()?[0],
            Self::Queue { theirs, .. } => {
                let task = theirs.claim(TIMEOUT)?;
                let found = task.arguments().try_into().map_or(0, u64::from_ne_bytes);
                task.complete()?;
                found
            }
            Self::Semaphores(permits) => permits.hear(value, first)?,
            Self::Streams(relay) => return relay.hear(value),
        };
        same(found, value)
    }
}

/// Hand-offs by semaphores of one permit each, in turn: to tell is to give the permit back that the other one waits for.
///
/// Three are the fewest with which each side has, when it is told, the permit that it tells by next: hand-off `n` is by the one
/// of hand-off `n - 3`, which the side that tells now was told by.
struct Permits {
    semaphores: [Semaphore; 3],
    held: [Option<Permit>; 3],
    words: Words,
}

impl Permits {
    fn new(domain: &Domain, name: &str, first: bool, words: Words) -> Result<Self, Failure> {
        let open = |index| domain.semaphore(&format!("{name}/{index}"), 1);
        let semaphores = [open(0)?, open(1)?, open(2)?];
        let held = [first, !first, first];
        let take = |index: usize| held[index].then(|| semaphores[index].acquire(TIMEOUT)).transpose();
        let held = [take(0)?, take(1)?, take(2)?];
        Ok(Self { semaphores, held, words })
    }

    /// Returns which semaphore a hand-off is by. There are two for each value: of the first, then of the second.
    fn index(value: u64, of_the_first: bool) -> usize {
        ((2 * (value - 1) + u64::from(!of_the_first)) % 3) as usize
    }

    fn tell(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        // The permit orders this word for the other one.
        self.words.of(usize::from(!first)).store(value as u32, Ordering::Relaxed);
        let permit = self.held[Self::index(value, first)].take().ok_or("the permit is not here")?;
        Ok(permit.release()?)
    }

    fn hear(&mut self, value: u64, first: bool) -> Result<u64, Sampled> {
        let index = Self::index(value, !first);
        self.held[index] = Some(self.semaphores[index].acquire(TIMEOUT)?);
        Ok(self.words.of(usize::from(first)).load(Ordering::Relaxed).into())
    }
}

/// Streams that pass a byte on: each copies, once it may, what the other one has copied. One that came too early would pass on
/// [`SPOILT`], up to the end.
struct Relay {
    behind: Behind,
    ours: TimelineWriter,
    theirs: Timeline,
    /// Of this process, and of the other one.
    events: Option<[IpcEvent; 2]>,
    stream: Stream,
    /// One slot for each turn of an exchange, of this process and of the other one.
    slots: [Segment; 2],
}

/// Bytes of a slot.
const SLOT: u64 = 8;

impl Relay {
    fn new(
        domain: &Domain,
        place: Place,
        [name, other]: [String; 2],
        behind: Behind,
        ours: TimelineWriter,
        theirs: Timeline,
        mut socket: UnixStream,
    ) -> Result<Self, Failure> {
        let Place::Gpu(uuid) = place else { return Err(unexpected("host memory has no streams")) };
        let gpu = domain.gpu(uuid)?;
        let stream = Stream::new(gpu.context()).doing("making a stream")?;
        broker::prepare(domain, &stream);
        let events = match behind {
            Behind::Event => {
                let event = IpcEvent::create(&gpu)?;
                let mut handle = event.export()?;
                socket.write_all(&handle.0).and_then(|()| socket.read_exact(&mut handle.0)).map_err(system(MAKING))?;
                Some([event, IpcEvent::open(&gpu, &IpcEventHandle(handle.0))?])
            }
            Behind::Timeline | Behind::Hosts => None,
        };
        let build = domain.create(&name, place).mutable(true).tensor(TENSOR, DType::U8, &[SLOT * TURNS]).allocate()?;
        let slots = [build.commit()?, domain.opener(&other).timeout(TIMEOUT).open()?];
        Ok(Self { behind, ours, theirs, events, stream, slots })
    }

    /// Spoils the slots of this process.
    fn begin(&self) -> Result<(), Sampled> {
        self.stream.as_ref().enqueue_set(self.slots[0].tensor(TENSOR)?.device()?.as_slice(), SPOILT)?;
        Ok(self.stream.synchronize()?)
    }

    fn tell(&self, value: u64, first: bool) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        let [ours, theirs] = [self.slots[0].tensor(TENSOR)?.device()?, self.slots[1].tensor(TENSOR)?.device()?];
        let turn = (value - 1) % TURNS;
        let slot = ours.as_slice().slice(turn * SLOT, SLOT)?;
        match (first, turn) {
            (true, 0) => stream.enqueue_set(slot, Self::byte(value))?,
            (true, turn) => stream.enqueue_copy(slot, theirs.as_slice().slice((turn - 1) * SLOT, SLOT)?)?,
            (false, turn) => stream.enqueue_copy(slot, theirs.as_slice().slice(turn * SLOT, SLOT)?)?,
        }
        match &self.events {
            None if self.behind == Behind::Timeline => return Ok(self.ours.signal_on(stream, value)?),
            None => self.stream.synchronize()?,
            Some([event, _]) => event.record(stream)?,
        }
        Ok(self.ours.signal(value)?)
    }

    fn hear(&self, value: u64) -> Result<(), Sampled> {
        if self.behind == Behind::Timeline {
            return Ok(self.theirs.wait_on(self.stream.as_ref(), value)?);
        }
        self.theirs.wait(value, TIMEOUT)?;
        match &self.events {
            Some([_, event]) => Ok(event.wait(self.stream.as_ref())?),
            None => Ok(()),
        }
    }

    /// Refuses another byte than the first stream has sent on its way.
    fn check(&self, last: u64) -> Result<(), Sampled> {
        let mut slot = [0; SLOT as usize];
        let theirs = self.slots[1].tensor(TENSOR)?.device()?;
        self.stream.as_ref().copy_to_host(&mut slot, theirs.as_slice().slice((TURNS - 1) * SLOT, SLOT)?)?;
        same(slot[0].into(), Self::byte(last).into())
    }

    /// Returns the byte of an exchange. It differs from that of the exchange before.
    fn byte(value: u64) -> u8 {
        ((value - 1) / TURNS % u64::from(SPOILT)) as u8
    }
}
