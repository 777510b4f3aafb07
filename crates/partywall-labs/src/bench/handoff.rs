//! Hand-offs: how long one process takes to tell another, by each way there is, and to several subscribers at once.
//!
//! Two processes tell each other in turns. A sample is the time of many turns, divided by their number. Both wait as each way
//! waits by itself: Partywall polls for some microseconds before it sleeps, a futex and a socket sleep at once.

use std::{
    cell::RefCell,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::atomic::{AtomicU32, Ordering},
};

use partywall::{DType, Policy, Publisher, Queue, Subscriber, Task, Timeline, TimelineWriter, cuda::DeviceBuffer};
use partywall_measure::{Case, Comparison, Sampler, Unit};
use partywall_os::{futex, map::SharedMap, memfd};

use super::{Bench, memory::asked, peer::Order, system};
use crate::{peer::Peer, prelude::*};

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
    /// A value of a timeline, by a stream for a stream: no host takes part but to enqueue.
    Streams,
    /// The same with a host between the streams: it waits for its GPU and tells the other host.
    StreamsByHosts,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Futex => "futex",
            Self::Socket => "Unix socket",
            Self::Timeline => "timeline",
            Self::Topic => "topic",
            Self::Queue => "queue",
            Self::Streams => "timeline, from stream to stream",
            Self::StreamsByHosts => "from stream to stream by both hosts: synchronise, and tell by a timeline",
        }
    }
}

/// What both processes hand over by.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Options {
    way: Way,
    /// Names of timelines, topics and queues begin with it.
    name: String,
    /// Subscribers of the process that is told, of a topic.
    subscribers: usize,
    /// Whether the process that gets this tells first.
    first: bool,
}

/// For errors.
const MAKING: &str = "making what processes hand over by";

/// Turns of one sample.
const TURNS: u64 = 100;

pub(super) fn run(bench: &Bench<'_>) -> Result<(), Failure> {
    let rivals = [Way::Futex, Way::Socket];
    let case = |way: Way| Case::new(way.name(), Unit::Microseconds).parameter("of", "one process tells another");
    for way in [Way::Timeline, Way::Topic, Way::Queue] {
        let ours = Pair::new(bench, way, 1)?;
        let others = rivals.map(|way| Pair::new(bench, way, 1));
        let [futex, socket] = others;
        let (futex, socket) = (futex?, socket?);
        let comparison = Comparison::new(case(way), ours.sampler(1.0))
            .floor(case(Way::Futex), futex.sampler(1.0))
            .rival(case(Way::Socket), socket.sampler(1.0));
        bench.run("hand-offs", comparison)?;
    }
    match &bench.gpu {
        Some(gpu) => streams(bench, gpu),
        None => Ok(()),
    }
}

/// From stream to stream, between two other processes: time-sliced, and under MPS if this process is a client of a server.
fn streams(bench: &Bench<'_>, gpu: &Gpu) -> Result<(), Failure> {
    // A driver that does not know the question has no server.
    if device::under_mps(gpu).unwrap_or(false) {
        between_streams(bench, "under MPS", &[])?;
    } else {
        bench.note("hand-offs of streams under MPS are left out: this process is no client of an MPS server");
    }
    let name = "time-sliced";
    if let Err(failure) = between_streams(bench, name, &[("CUDA_MPS_PIPE_DIRECTORY", device::NO_DAEMON)]) {
        bench.note(format!("hand-offs of streams, {name}, were refused: {}", failure.message()));
    }
    Ok(())
}

fn between_streams(bench: &Bench<'_>, how: &str, environment: &[(&str, &str)]) -> Result<(), Failure> {
    let pair = |way| Others::new(bench, way, environment);
    let (streams, hosts) = (pair(Way::Streams)?, pair(Way::StreamsByHosts)?);
    let case = |way: Way| {
        let what = format!("a stream of one process tells one of another, {how}");
        Case::new(way.name(), Unit::Microseconds).parameter("of", what)
    };
    let comparison =
        Comparison::new(case(Way::Streams), streams.sampler()).rival(case(Way::StreamsByHosts), hosts.sampler());
    bench.run("hand-offs of streams", comparison)
}

/// One process publishes, all subscribers of another receive, and that one answers.
pub(super) fn fan_out(bench: &Bench<'_>) -> Result<(), Failure> {
    for subscribers in [1, 2, 4, 8] {
        let case = |name: &str| {
            Case::new(name, Unit::Microseconds)
                .parameter("subscribers", subscribers)
                .parameter("of", "one process to all subscribers of another, and its answer")
        };
        let ours = Pair::new(bench, Way::Topic, subscribers)?;
        let futex = Pair::new(bench, Way::Futex, 1)?;
        let comparison = Comparison::new(case("a topic, to all subscribers"), ours.sampler(2.0))
            .floor(case("futex, to one process"), futex.sampler(2.0));
        bench.run("fan-out", comparison)?;
    }
    Ok(())
}

/// This process and another, which tell each other.
struct Pair {
    peer: RefCell<Peer>,
    ends: RefCell<Ends>,
}

impl Pair {
    fn new(bench: &Bench<'_>, way: Way, subscribers: usize) -> Result<Self, Failure> {
        let mut peer = bench.peer()?;
        let options = Options { way, name: format!("hand-off/{}", peer.pid), subscribers, first: false };
        let [ours, theirs] = files()?;
        meet(&mut peer, &options, &theirs)?;
        let ends = Ends::new(&bench.domain, bench.place, &Options { first: true, ..options }, ours)?;
        peer.hear::<()>()?;
        Ok(Self { peer: RefCell::new(peer), ends: RefCell::new(ends) })
    }

    /// Returns microseconds of so many hand-offs.
    fn sampler(&self, hand_offs: f64) -> Sampler<'_> {
        Box::new(move || {
            let mut peer = self.peer.borrow_mut();
            asked(peer.say(Order::HandOff(TURNS)))?;
            let time = self.ends.borrow_mut().exchange(TURNS)?;
            asked(peer.hear::<Duration>())?;
            Ok(hand_offs * time.as_secs_f64() * 1e6 / (2 * TURNS) as f64)
        })
    }
}

/// Two other processes, which tell each other.
struct Others([RefCell<Peer>; 2]);

impl Others {
    fn new(bench: &Bench<'_>, way: Way, environment: &[(&str, &str)]) -> Result<Self, Failure> {
        let start = || bench.peer_on(bench.place, environment);
        let mut peers = [start()?, start()?];
        let options = Options { way, name: format!("hand-off/{}", peers[0].pid), subscribers: 1, first: false };
        // Each opens what the other one makes, so both are told before either is heard.
        for ((peer, files), first) in peers.iter_mut().zip(files()?).zip([true, false]) {
            meet(peer, &Options { first, ..options.clone() }, &files)?;
        }
        for peer in &mut peers {
            peer.hear::<()>()?;
        }
        Ok(Self(peers.map(RefCell::new)))
    }

    /// Returns microseconds of a hand-off, by the clock of the process that tells first.
    fn sampler(&self) -> Sampler<'_> {
        Box::new(|| {
            let [mut first, mut second] = self.0.each_ref().map(RefCell::borrow_mut);
            // The second one waits already when the clock of the first one starts.
            asked(second.say(Order::HandOff(TURNS)))?;
            asked(first.say(Order::HandOff(TURNS)))?;
            let time: Duration = asked(first.hear())?;
            asked(second.hear::<Duration>())?;
            Ok(time.as_secs_f64() * 1e6 / (2 * TURNS) as f64)
        })
    }
}

/// Returns the files of both sides: words that both map, and a pair of sockets.
fn files() -> Result<[[OwnedFd; 2]; 2], Failure> {
    let words =
        memfd::Draft::create("partywall-bench:words", 4096).and_then(memfd::Draft::share).map_err(system(MAKING))?;
    let copy = words.try_clone().map_err(system(MAKING))?;
    let (one, other) = UnixStream::pair().map_err(system(MAKING))?;
    Ok([[words, one.into()], [copy, other.into()]])
}

fn meet(peer: &mut Peer, options: &Options, [words, socket]: &[OwnedFd; 2]) -> Result<(), Failure> {
    peer.say_with(Order::Meet(options.clone()), &[words.as_fd(), socket.as_fd()])
}

/// What one of two processes tells the other by, and is told by.
pub(super) struct Ends {
    first: bool,
    /// The last value that was told. Values grow, so that a stale one is found.
    last: u64,
    by: By,
}

enum By {
    Futex(SharedMap),
    Socket(UnixStream),
    Timeline {
        ours: TimelineWriter,
        theirs: Timeline,
    },
    Topic {
        ours: Publisher,
        theirs: Vec<Subscriber>,
    },
    Queue {
        ours: Queue,
        theirs: Queue,
    },
    Streams {
        ours: TimelineWriter,
        theirs: Timeline,
        stream: Stream,
        /// What a stream writes in each turn: a stream without work would have nothing to tell of.
        work: DeviceBuffer,
        by_hosts: bool,
    },
}

impl Ends {
    /// Of one side. What each side makes, the other one opens.
    pub(super) fn new(
        domain: &Domain,
        place: Place,
        options: &Options,
        [words, socket]: [OwnedFd; 2],
    ) -> Result<Self, Failure> {
        let Options { way, name, subscribers, first } = options;
        let first = *first;
        let name = |first: bool| format!("{name}/{}", if first { "first" } else { "second" });
        let timelines =
            || -> Result<_, Failure> { Ok((domain.timeline_writer(&name(first))?, domain.timeline(&name(!first))?)) };
        let by = match way {
            Way::Futex => By::Futex(SharedMap::writable(words).map_err(system(MAKING))?),
            Way::Socket => By::Socket(socket.into()),
            Way::Timeline => {
                let (ours, theirs) = timelines()?;
                By::Timeline { ours, theirs }
            }
            Way::Topic => {
                let topic = |first| {
                    let topic = domain.topic(&name(first)).dtype(DType::U64).shape(&[1]).place(Place::Host);
                    topic.subscribers(8).open_or_create()
                };
                // Only the process that is told first has several.
                let count = if first { 1 } else { *subscribers };
                let theirs = topic(!first)?;
                let theirs = (0..count).map(|_| theirs.subscribe(Policy::Block).join());
                By::Topic { theirs: theirs.collect::<Result<_, _>>()?, ours: topic(first)?.publisher()? }
            }
            Way::Queue => {
                let queue = |first| domain.queue(&name(first)).tasks(8).place(Place::Host).open_or_create();
                By::Queue { ours: queue(first)?, theirs: queue(!first)? }
            }
            Way::Streams | Way::StreamsByHosts => {
                let Place::Gpu(uuid) = place else { return Err(unexpected("host memory has no streams")) };
                let gpu = domain.gpu(uuid)?;
                let stream = Stream::new(gpu.context()).doing("making a stream")?;
                broker::prepare(domain, &stream);
                let (ours, theirs) = timelines()?;
                let work = DeviceBuffer::new(gpu.context(), 8).doing("allocating memory")?;
                By::Streams { ours, theirs, stream, work, by_hosts: *way == Way::StreamsByHosts }
            }
        };
        Ok(Self { first, last: 0, by })
    }

    /// Tells and is told so many times. Returns how long it took.
    pub(super) fn exchange(&mut self, turns: u64) -> Result<Duration, partywall_measure::Failure> {
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
        if let By::Streams { stream, theirs, by_hosts: false, .. } = &self.by {
            stream.synchronize()?;
            theirs.check()?;
        }
        Ok(start.elapsed())
    }
}

impl By {
    fn tell(&self, value: u64, first: bool) -> Result<(), partywall_measure::Failure> {
        match self {
            Self::Futex(words) => {
                let word = word(words, first);
                word.store(value as u32, Ordering::Release);
                futex::wake(word, 1);
            }
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
            Self::Streams { ours, stream, work, by_hosts, .. } => {
                stream.as_ref().enqueue_set(work.as_slice(), value as u8)?;
                if !by_hosts {
                    return Ok(ours.signal_on(stream.as_ref(), value)?);
                }
                stream.synchronize()?;
                ours.signal(value)?;
            }
        }
        Ok(())
    }

    fn hear(&mut self, value: u64, first: bool) -> Result<(), partywall_measure::Failure> {
        let found = match self {
            Self::Futex(words) => {
                let word = word(words, !first);
                let deadline = Instant::now() + TIMEOUT;
                loop {
                    let found = word.load(Ordering::Acquire);
                    if found == value as u32 || Instant::now() > deadline {
                        break u64::from(found);
                    }
                    futex::wait(word, found, TIMEOUT);
                }
            }
            Self::Socket(socket) => {
                let mut bytes = [0; 8];
                socket.read_exact(&mut bytes)?;
                u64::from_ne_bytes(bytes)
            }
            Self::Timeline { theirs, .. } => theirs.wait(value, TIMEOUT).map(|()| value)?,
            Self::Topic { theirs, .. } => {
                let mut found = value;
                for subscriber in theirs {
                    let sample = subscriber.recv(TIMEOUT)?;
                    found = found.min(sample.as_slice::<u64>()?[0]);
                }
                found
            }
            Self::Queue { theirs, .. } => {
                let task = theirs.claim(TIMEOUT)?;
                let found = task.arguments().try_into().map_or(0, u64::from_ne_bytes);
                task.complete()?;
                found
            }
            Self::Streams { theirs, stream, by_hosts: false, .. } => {
                theirs.wait_on(stream.as_ref(), value).map(|()| value)?
            }
            Self::Streams { theirs, .. } => theirs.wait(value, TIMEOUT).map(|()| value)?,
        };
        if found == value { Ok(()) } else { Err(format!("{found} was told instead of {value}").into()) }
    }
}

/// Returns the word of a side, each in a cache line of its own.
fn word(words: &SharedMap, first: bool) -> &AtomicU32 {
    let words: &[AtomicU32] = words.atomics(0, 64).expect("a page has room for 64 words");
    &words[if first { 0 } else { 32 }]
}
