//! Hand-offs: how long one process takes to notify another, in each available way.
//!
//! Two processes notify each other in turns. A sample is the time of many turns, divided by their number. Each way
//! waits as it does by default: Partywall polls for some microseconds before it sleeps; a futex and a socket sleep
//! immediately.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::Ordering,
};

use partywall::{Permit, Semaphore};
use partywall_measure::{Case, Comparison, Failure as Sampled, Sampler, Unit};

use super::{
    Setting,
    blocks::{BlockRelay, Blocks},
    failed,
    group::{Group, MAKING, Meeting, Sharing, Words, in_each_sharing},
    peer::Order,
    relay::{Relay, Samples, Signals, Tasks},
    turns::{self, Turn, same},
};
use crate::prelude::*;

/// How two processes notify each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// A shared word and the kernel's futex: the floor for a sleeping receiver.
    Futex,
    /// A byte through a pair of Unix sockets, the most common way.
    Socket,
    /// A value of a timeline.
    Timeline,
    /// A sample of a topic, in place.
    Topic,
    /// A task of a queue, completed.
    Queue,
    /// A block of a pool, offered and accepted. Its reference goes through a Unix socket.
    Pool,
    /// A permit that one process gives back and the other takes, and a word of memory that it guards.
    Semaphore,
    /// Streams that wait for each other.
    Streams(Behind),
}

/// What a stream waits for from the stream of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Behind {
    /// A value of a timeline. The hosts only enqueue.
    Timeline,
    /// A record of an interprocess event. One host has to notify the other that it is enqueued.
    Event,
    /// A sample of a topic in GPU memory, which says what to wait for.
    Topic,
    /// A task of a queue on the way there and its output on the way back, both in GPU memory. Hosts wait until these
    /// are enqueued, not until they are written.
    Queue,
    /// A block of a pool in GPU memory, offered while a stream still writes it. Its reference goes through a Unix
    /// socket, and the other stream waits for a timeline.
    Pool,
    /// A permit that a stream gives back after its work. The host of the other stream waits for it.
    Semaphore,
    /// Both hosts: one waits for its GPU and notifies the other.
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
            Self::Pool => "block of a pool, and its reference through a Unix socket",
            Self::Semaphore => "semaphore",
            Self::Streams(Behind::Timeline) => "timeline, from stream to stream",
            Self::Streams(Behind::Topic) => "topic in GPU memory, from stream to stream",
            Self::Streams(Behind::Queue) => "queue in GPU memory, from stream to stream",
            Self::Streams(Behind::Pool) => "block of a pool in GPU memory, from stream to stream",
            Self::Streams(Behind::Semaphore) => "semaphore, from a stream to the host of the other one",
            Self::Streams(Behind::Event) => {
                "IPC event (cuIpcOpenEventHandle), and a timeline that announces its record"
            }
            Self::Streams(Behind::Hosts) => "from stream to stream by both hosts: synchronise, and signal a timeline",
        }
    }
}

pub(crate) fn run(setting: &Setting<'_>) -> Result<(), Failure> {
    in_each_sharing(setting, "hand-offs", 2, |group, sharing| hand_over(setting, group, sharing))
}

fn hand_over(setting: &Setting<'_>, group: &Group, sharing: Sharing) -> Result<(), Failure> {
    let case = |way| case(way, "one process notifies another", sharing);
    for way in [Way::Timeline, Way::Topic, Way::Queue, Way::Pool, Way::Semaphore] {
        let ours = meet(group, way)?;
        let futex = meet(group, Way::Futex)?;
        let socket = meet(group, Way::Socket)?;
        let comparison = Comparison::new(case(way), one_way(group, &ours))
            .floor(case(Way::Futex), one_way(group, &futex))
            .rival(case(Way::Socket), one_way(group, &socket));
        setting.run(comparison)?;
    }
    if sharing == Sharing::None { Ok(()) } else { streams(setting, group, sharing) }
}

fn streams(setting: &Setting<'_>, group: &Group, sharing: Sharing) -> Result<(), Failure> {
    let case = |way| case(way, "a stream of one process notifies a stream of another", sharing);
    let [events, hosts] = [Behind::Event, Behind::Hosts].map(Way::Streams);
    // A process whose event is refused ends, so each way has processes of its own.
    let others = Group::start(setting, 2, sharing)?;
    let by_events = meet(&others, events);
    if let Err(failure) = &by_events {
        setting.note(format!("hand-offs by IPC events{} were refused: {}", sharing.suffix(), failure.message));
    }
    let by_hosts = meet(group, hosts)?;
    for way in [Behind::Timeline, Behind::Topic, Behind::Queue, Behind::Pool, Behind::Semaphore].map(Way::Streams) {
        let ours = meet(group, way)?;
        let mut comparison = Comparison::new(case(way), one_way(group, &ours));
        if let Ok(by_events) = &by_events {
            comparison = comparison.rival(case(events), one_way(&others, by_events));
        }
        setting.run(comparison.rival(case(hosts), one_way(group, &by_hosts)))?;
    }
    Ok(())
}

fn case(way: Way, of: &str, sharing: Sharing) -> Case {
    Case::new(way.name(), Unit::Microseconds).parameter("of", format!("{of}{}", sharing.suffix()))
}

fn meet(group: &Group, way: Way) -> Result<Meeting, Failure> {
    let words = Words::files(2)?;
    let (one, other) = UnixStream::pair().doing(MAKING)?;
    let files = words.into_iter().zip([one.into(), other.into()]).map(<[OwnedFd; 2]>::from);
    group.meet(files.collect(), |meeting| Order::Meet { way, meeting })
}

/// Returns a sampler of the microseconds of a hand-off, half a turn.
fn one_way<'a>(group: &'a Group, meeting: &'a Meeting) -> Sampler<'a> {
    let mut turn = group.sampler(meeting);
    Box::new(move || Ok(turn()? / 2.0))
}

/// The objects by which one of two processes sends and receives.
pub(crate) struct Ends {
    first: bool,
    /// The last value that was sent. Values increase, so that a stale value is detected.
    last: u64,
    by: By,
}

enum By {
    Futex(Words),
    Socket(UnixStream),
    Timeline { ours: TimelineWriter, theirs: Timeline },
    Topics(turns::Topics),
    Queues(Box<turns::Queues>),
    Blocks(Blocks),
    Semaphores { permits: Permits, words: Words },
    Streams(Box<Relay>),
    Samples(Samples),
    Tasks(Box<Tasks>),
    BlockRelay(Box<BlockRelay>),
}

impl Ends {
    /// Returns the objects of one side. Each side opens what the other one creates.
    pub(crate) fn new(
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
            Way::Futex => By::Futex(Words::map(&words)?),
            Way::Socket => By::Socket(socket.into()),
            Way::Timeline => {
                let (ours, theirs) = timelines()?;
                By::Timeline { ours, theirs }
            }
            Way::Topic => By::Topics(turns::Topics::new(domain, names, Place::Host, 1, 8).map_err(failed)?),
            Way::Queue => By::Queues(Box::new(turns::Queues::new(domain, names).map_err(failed)?)),
            Way::Pool => By::Blocks(Blocks::new(domain, Place::Host, &meeting.name, socket.into())?),
            Way::Semaphore => {
                By::Semaphores { permits: Permits::new(domain, &meeting.name, first)?, words: Words::map(&words)? }
            }
            Way::Streams(Behind::Topic) => By::Samples(Samples::new(domain, place, names)?),
            Way::Streams(Behind::Queue) => By::Tasks(Box::new(Tasks::new(domain, place, &meeting.name, first)?)),
            Way::Streams(Behind::Pool) => {
                By::BlockRelay(Box::new(BlockRelay::new(domain, place, &meeting.name, names, socket.into())?))
            }
            Way::Streams(behind) => {
                let signals = match behind {
                    Behind::Semaphore => Signals::Permits(Permits::new(domain, &meeting.name, first)?),
                    _ => {
                        let (ours, theirs) = timelines()?;
                        Signals::Timelines { ours, theirs }
                    }
                };
                By::Streams(Box::new(Relay::new(domain, place, names, behind, signals, socket.into())?))
            }
        };
        Ok(Self { first, last: 0, by })
    }

    /// Sends and receives `turns` times. Returns how long it took.
    pub(crate) fn exchange(&mut self, turns: u64) -> Result<Duration, Sampled> {
        if let By::Streams(relay) = &self.by {
            relay.begin()?;
        }
        let start = Instant::now();
        let values = self.last + 1..=self.last + turns;
        self.last += turns;
        turns::in_turn(self.first, values, |turn, value| match turn {
            Turn::Send => self.by.send(value, self.first),
            Turn::Receive => self.by.receive(value, self.first),
        })?;
        match &mut self.by {
            By::Streams(relay) => relay.finish()?,
            By::Samples(samples) => samples.finish()?,
            By::Tasks(tasks) => tasks.finish()?,
            By::BlockRelay(relay) => relay.finish()?,
            _ => {}
        }
        let time = start.elapsed();
        match &mut self.by {
            By::Streams(relay) if self.first => relay.check(self.last)?,
            By::Samples(samples) if self.first => samples.check(self.last)?,
            By::Tasks(tasks) if self.first => tasks.check(self.last)?,
            By::BlockRelay(relay) if self.first => relay.check(self.last)?,
            _ => {}
        }
        Ok(time)
    }
}

impl By {
    fn send(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        match self {
            Self::Futex(words) => words.write(usize::from(!first), value),
            Self::Socket(socket) => (&*socket).write_all(&value.to_ne_bytes())?,
            Self::Timeline { ours, .. } => ours.signal(value)?,
            Self::Topics(topics) => topics.send(value)?,
            Self::Queues(queues) => queues.send(value)?,
            Self::Blocks(blocks) => blocks.send(value)?,
            Self::Semaphores { permits, words } => {
                // The permit orders this write before the other side's read.
                words.of(usize::from(!first)).store(value as u32, Ordering::Relaxed);
                permits.give(value, first)?.release()?;
            }
            Self::Streams(relay) => relay.send(value, first)?,
            Self::Samples(samples) => samples.send(value)?,
            Self::Tasks(tasks) => tasks.send(value)?,
            Self::BlockRelay(relay) => relay.send(value)?,
        }
        Ok(())
    }

    fn receive(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        let found = match self {
            Self::Futex(words) => words.wait(usize::from(first), value),
            Self::Socket(socket) => {
                let mut bytes = [0; 8];
                socket.read_exact(&mut bytes)?;
                u64::from_ne_bytes(bytes)
            }
            Self::Timeline { theirs, .. } => theirs.wait(value, TIMEOUT).map(|()| value)?,
            Self::Topics(topics) => return topics.receive(value),
            Self::Queues(queues) => return queues.receive(value),
            Self::Blocks(blocks) => blocks.receive()?,
            Self::Semaphores { permits, words } => {
                permits.take(value, first)?;
                words.of(usize::from(first)).load(Ordering::Relaxed).into()
            }
            Self::Streams(relay) => return relay.receive(value, first),
            Self::Samples(samples) => return samples.receive(),
            Self::Tasks(tasks) => return tasks.receive(value),
            Self::BlockRelay(relay) => return relay.receive(value),
        };
        same(found, value)
    }
}

/// Hand-offs by semaphores of one permit each. A side sends by giving back the permit that the other side waits for.
///
/// With three semaphores, a side that has received already holds the permit for its next send: hand-off `n` uses the
/// permit of hand-off `n - 3`, by which the sender of `n` has received. With two semaphores it would not.
pub(crate) struct Permits {
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

    /// Returns the semaphore of a hand-off. Each value has two hand-offs: first by the first side, then by the second.
    fn index(value: u64, of_the_first: bool) -> usize {
        ((2 * (value - 1) + u64::from(!of_the_first)) % 3) as usize
    }

    /// Returns the permit that the other side waits for, to be given back.
    pub(crate) fn give(&mut self, value: u64, first: bool) -> Result<Permit, Sampled> {
        Ok(self.held[Self::index(value, first)].take().ok_or("the permit is not here")?)
    }

    /// Waits for the permit that the other side gives back.
    pub(crate) fn take(&mut self, value: u64, first: bool) -> Result<(), Sampled> {
        let index = Self::index(value, !first);
        self.held[index] = Some(self.semaphores[index].acquire(TIMEOUT)?);
        Ok(())
    }
}
