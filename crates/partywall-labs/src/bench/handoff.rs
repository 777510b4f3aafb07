//! Hand-offs: how long one process takes to tell another, by each way there is.
//!
//! Two processes tell each other in turns. A sample is the time of many turns, divided by their number. Both wait as each way
//! waits by itself: Partywall polls for some microseconds before it sleeps, a futex and a socket sleep at once.

use std::{
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::atomic::Ordering,
};

use partywall::{Permit, Semaphore, Timeline, TimelineWriter};
use partywall_measure::{Case, Comparison, Failure as Sampled, Sampler, Unit};

use super::{
    Bench, failed,
    group::{Group, MAKING, Meeting, Sharing, Words, in_each_sharing},
    peer::Order,
    relay::{Relay, Samples, Tasks, Told},
    system,
    turns::{self, Turn, same},
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
    /// A sample of a topic, in memory of the GPU. It says what to wait for.
    Topic,
    /// A task of a queue, there, and its output, back, both in memory of the GPU. Hosts wait until they are enqueued, not until
    /// they are written.
    Queue,
    /// A permit that a stream gives back behind its work. The host of the other stream waits for it.
    Semaphore,
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
            Self::Streams(Behind::Topic) => "topic in GPU memory, from stream to stream",
            Self::Streams(Behind::Queue) => "queue in GPU memory, from stream to stream",
            Self::Streams(Behind::Semaphore) => "semaphore, from a stream to the host of the other one",
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
    let [events, hosts] = [Behind::Event, Behind::Hosts].map(Way::Streams);
    // A process whose event is refused ends, so these are processes of their own.
    let others = Group::start(bench, 2, sharing)?;
    let by_events = meet(&others, events);
    if let Err(failure) = &by_events {
        bench.note(format!("hand-offs by IPC events{} were refused: {}", sharing.suffix(), failure.message()));
    }
    let by_hosts = meet(group, hosts)?;
    for way in [Behind::Timeline, Behind::Topic, Behind::Queue, Behind::Semaphore].map(Way::Streams) {
        let ours = meet(group, way)?;
        let mut comparison = Comparison::new(case(way), one_way(group, &ours));
        if let Ok(by_events) = &by_events {
            comparison = comparison.rival(case(events), one_way(&others, by_events));
        }
        bench.run("hand-offs of streams", comparison.rival(case(hosts), one_way(group, &by_hosts)))?;
    }
    Ok(())
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
    Topics(turns::Topics),
    Queues(turns::Queues),
    Semaphores { permits: Permits, words: Words },
    Streams(Box<Relay>),
    Samples(Samples),
    Tasks(Box<Tasks>),
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
        let names = [name(first), name(!first)];
        let names = names.each_ref().map(String::as_str);
        let timelines =
            || -> Result<_, Failure> { Ok((domain.timeline_writer(names[0])?, domain.timeline(names[1])?)) };
        let by = match way {
            Way::Futex => By::Futex(Words::map(words)?),
            Way::Socket => By::Socket(socket.into()),
            Way::Timeline => {
                let (ours, theirs) = timelines()?;
                By::Timeline { ours, theirs }
            }
            Way::Topic => By::Topics(turns::Topics::new(domain, names, Place::Host, 1, 8).map_err(failed)?),
            Way::Queue => By::Queues(turns::Queues::new(domain, names).map_err(failed)?),
            Way::Semaphore => {
                By::Semaphores { permits: Permits::new(domain, &meeting.name, first)?, words: Words::map(words)? }
            }
            Way::Streams(Behind::Topic) => By::Samples(Samples::new(domain, place, names)?),
            Way::Streams(Behind::Queue) => By::Tasks(Box::new(Tasks::new(domain, place, &meeting.name, first)?)),
            Way::Streams(behind) => {
                let told = match behind {
                    Behind::Semaphore => Told::Permits(Permits::new(domain, &meeting.name, first)?),
                    _ => {
                        let (ours, theirs) = timelines()?;
                        Told::Timelines { ours, theirs }
                    }
                };
                By::Streams(Box::new(Relay::new(domain, place, names, behind, told, socket.into())?))
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
        let values = self.last + 1..=self.last + turns;
        self.last += turns;
        turns::in_turn(self.first, values, |turn, value| match turn {
            Turn::Tell => self.by.tell(value, self.first),
            Turn::Hear => self.by.hear(value, self.first),
        })?;
        match &mut self.by {
            By::Streams(relay) => relay.finish()?,
            By::Samples(samples) => samples.finish()?,
            By::Tasks(tasks) => tasks.finish()?,
            _ => {}
        }
        let time = start.elapsed();
        match &mut self.by {
            By::Streams(relay) if self.first => relay.check(self.last)?,
            By::Samples(samples) if self.first => samples.check(self.last)?,
            By::Tasks(tasks) if self.first => tasks.check(self.last)?,
            _ => {}
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
            Self::Topics(topics) => topics.tell(value)?,
            Self::Queues(queues) => queues.tell(value)?,
            Self::Semaphores { permits, words } => {
                // The permit orders this word for the other one.
                words.of(usize::from(!first)).store(value as u32, Ordering::Relaxed);
                permits.give(value, first)?.release()?;
            }
            Self::Streams(relay) => relay.tell(value, first)?,
            Self::Samples(samples) => samples.tell(value)?,
            Self::Tasks(tasks) => tasks.tell(value)?,
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
            Self::Topics(topics) => return topics.hear(value),
            Self::Queues(queues) => return queues.hear(value),
            Self::Semaphores { permits, words } => {
                permits.take(value, first)?;
                words.of(usize::from(first)).load(Ordering::Relaxed).into()
            }
            Self::Streams(relay) => return relay.hear(value, first),
            Self::Samples(samples) => return samples.hear(),
            Self::Tasks(tasks) => return tasks.hear(value),
        };
        same(found, value)
    }
}

/// Hand-offs by semaphores of one permit each, in turn: to tell is to give the permit back that the other one waits for.
///
/// Three are the fewest with which each side has, when it is told, the permit that it tells by next: hand-off `n` is by the one
/// of hand-off `n - 3`, which the side that tells now was told by.
pub(super) struct Permits {
    semaphores: [Semaphore; 3],
    held: [Option<Permit>; 3],
}

impl Permits {
    fn new(domain: &Domain, name: &str, first: bool) -> Result<Self, Failure> {
        let open = |index| domain.semaphore(&format!("{name}/{index}"), 1);
        let semaphores = [open(0)?, open(1)?, open(2)?];
        let held = [first, !first, first];
        let take = |index: usize| held[index].then(|| semaphores[index].acquire(TIMEOUT)).transpose();
        let held = [take(0)?, take(1)?, take(2)?];
        Ok(Self { semaphores, held })
    }

    /// Returns which semaphore a hand-off is by. There are two for each value: of the first, then of the second.
    fn index(value: u64, of_the_first: bool) -> usize {
        ((2 * (value - 1) + u64::from(!of_the_first)) % 3) as usize
    }

    /// Returns the permit that the other side waits for, to be given back.
    pub(super) fn give(&mut self, value: u64, first: bool) -> Result<Permit, Sampled> {
        Ok(self.held[Self::index(value, first)].take().ok_or("the permit is not here")?)
    }

    /// Waits for the permit that the other side gives back.
    pub(super) fn take(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        let index = Self::index(value, !first);
        self.held[index] = Some(self.semaphores[index].acquire(TIMEOUT)?);
        Ok(())
    }
}
