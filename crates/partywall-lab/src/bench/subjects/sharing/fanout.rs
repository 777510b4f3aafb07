//! Fan-out: one process notifies several others, each of which answers.
//!
//! All answers use a futex, so that the ways differ only in how the value is sent.

use partywall_measure::{Case, Comparison, Failure as Sampled, Unit};

use super::{
    Setting,
    group::{Group, Meeting, Sharing, Words, in_each_sharing},
    peer::Order,
    turns::{publish, same},
};
use crate::prelude::*;

/// How one process notifies several others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// A shared word and the kernel's futex: the floor for sleeping receivers.
    Futex,
    /// A value of a timeline.
    Timeline,
    /// A sample of a topic, in place.
    Topic,
}

/// The largest number of receivers.
const MAX_RECEIVERS: usize = 8;

pub(crate) fn run(setting: &Setting<'_>) -> Result<(), Failure> {
    in_each_sharing(setting, "fan-outs", MAX_RECEIVERS + 1, |group, sharing| fan_out(setting, group, sharing))
}

fn fan_out(setting: &Setting<'_>, group: &Group, sharing: Sharing) -> Result<(), Failure> {
    for receivers in 1..=MAX_RECEIVERS {
        let meet = |way| {
            let files = Words::files(receivers + 1)?.into_iter().map(|file| [file]).collect();
            group.meet(files, |meeting| Order::FanOut { way, meeting })
        };
        for (way, name) in [(Way::Topic, "a topic"), (Way::Timeline, "a timeline")] {
            let case = |by: &str| {
                let of = format!("one process notifies several by {name}, and each answers{}", sharing.suffix());
                Case::new(by, Unit::Microseconds).parameter("processes", receivers).parameter("of", of)
            };
            let ours = meet(way)?;
            let futex = meet(Way::Futex)?;
            let comparison =
                Comparison::new(case(name), group.sampler(&ours)).floor(case("a futex"), group.sampler(&futex));
            setting.run(comparison)?;
        }
    }
    Ok(())
}

/// The objects by which one process sends to all others, or by which one of them receives.
pub(crate) struct Ends {
    index: usize,
    members: usize,
    /// The last value that was sent. Values increase, so that a stale value is detected.
    last: u64,
    words: Words,
    by: By,
}

enum By {
    Futex,
    Writer(TimelineWriter),
    Reader(Timeline),
    Publisher(Publisher),
    Subscriber(Subscriber),
}

impl Ends {
    /// Returns the ends of one member. The first member creates the objects, and the others open them.
    pub(crate) fn new(domain: &Domain, way: Way, meeting: &Meeting, words: OwnedFd) -> Result<Self, Failure> {
        let Meeting { name, members, index } = meeting;
        let sends = *index == 0;
        let topic = || {
            let topic = domain.topic(name).dtype(DType::U64).shape(&[1]).place(Place::Host);
            topic.subscribers(MAX_RECEIVERS as u32).open_or_create()
        };
        let by = match way {
            Way::Futex => By::Futex,
            Way::Timeline if sends => By::Writer(domain.timeline_writer(name)?),
            Way::Timeline => By::Reader(domain.timeline(name)?),
            Way::Topic if sends => By::Publisher(topic()?.publisher()?),
            Way::Topic => By::Subscriber(topic()?.subscribe(Policy::Block).join()?),
        };
        Ok(Self { index: *index, members: *members, last: 0, words: Words::map(&words)?, by })
    }

    /// Sends to all and waits for all answers, or receives and answers, `turns` times. Returns how long it took.
    pub(crate) fn exchange(&mut self, turns: u64) -> Result<Duration, Sampled> {
        let start = Instant::now();
        for _ in 0..turns {
            self.last += 1;
            self.turn(self.last)?;
        }
        Ok(start.elapsed())
    }

    fn turn(&self, value: u64) -> Result<(), Sampled> {
        let found = match &self.by {
            By::Futex if self.index == 0 => {
                self.words.write(0, value);
                return self.answers(value);
            }
            By::Writer(timeline) => {
                timeline.signal(value)?;
                return self.answers(value);
            }
            By::Publisher(publisher) => {
                publish(publisher, value)?;
                return self.answers(value);
            }
            By::Futex => self.words.wait(0, value),
            By::Reader(timeline) => timeline.wait(value, TIMEOUT).map(|()| value)?,
            By::Subscriber(subscriber) => subscriber.recv(TIMEOUT)?.as_slice::<u64>()?[0],
        };
        same(found, value)?;
        self.words.write(self.index, value);
        Ok(())
    }

    /// Waits for the answers of all.
    fn answers(&self, value: u64) -> Result<(), Sampled> {
        (1..self.members).try_for_each(|member| same(self.words.wait(member, value), value))
    }
}
