//! Fan-out: one process tells several others, each of which answers.
//!
//! Answers go by a futex, whatever the way out is, so that two ways differ in nothing else.

use std::os::fd::OwnedFd;

use partywall::{DType, Policy, Publisher, Subscriber, Timeline, TimelineWriter};
use partywall_measure::{Case, Comparison, Failure as Sampled, Unit};

use super::{
    Bench,
    group::{Group, Meeting, Sharing, Words, in_each_sharing},
    peer::Order,
    turns::same,
};
use crate::prelude::*;

/// How one process tells several others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Way {
    /// A word that all map, and the kernel's futex: the least that sleepers cost.
    Futex,
    /// A value of a timeline.
    Timeline,
    /// A sample of a topic, in place.
    Topic,
}

/// Processes that are told, at most.
const MOST: usize = 8;

pub(super) fn run(bench: &Bench<'_>) -> Result<(), Failure> {
    in_each_sharing(bench, "fan-outs", MOST + 1, |group, sharing| fan_out(bench, group, sharing))
}

fn fan_out(bench: &Bench<'_>, group: &Group, sharing: Sharing) -> Result<(), Failure> {
    for hearers in 1..=MOST {
        let meet = |way| {
            let files = Words::files(hearers + 1)?.into_iter().map(|file| [file]).collect();
            group.meet(files, |meeting| Order::FanOut { way, meeting })
        };
        for (way, name) in [(Way::Topic, "a topic"), (Way::Timeline, "a timeline")] {
            let case = |by: &str| {
                let of = format!("one process tells several by {name}, and each answers{}", sharing.suffix());
                Case::new(by, Unit::Microseconds).parameter("processes", hearers).parameter("of", of)
            };
            let (ours, futex) = (meet(way)?, meet(Way::Futex)?);
            let comparison =
                Comparison::new(case(name), group.sampler(&ours)).floor(case("a futex"), group.sampler(&futex));
            bench.run("fan-out", comparison)?;
        }
    }
    Ok(())
}

/// What a process tells all others by, or one of them is told by.
pub(super) struct Ends {
    index: usize,
    members: usize,
    /// The last value that was told. Values grow, so that a stale one is found.
    last: u64,
    words: Words,
    by: By,
}

enum By {
    Futex,
    Tells(TimelineWriter),
    Told(Timeline),
    Publishes(Publisher),
    Receives(Subscriber),
}

impl Ends {
    /// Returns those of one member. What the first one makes, the others open.
    pub(super) fn new(domain: &Domain, way: Way, meeting: &Meeting, words: OwnedFd) -> Result<Self, Failure> {
        let Meeting { name, members, index } = meeting;
        let tells = *index == 0;
        let topic = || {
            let topic = domain.topic(name).dtype(DType::U64).shape(&[1]).place(Place::Host);
            topic.subscribers(MOST as u32).open_or_create()
        };
        let by = match way {
            Way::Futex => By::Futex,
            Way::Timeline if tells => By::Tells(domain.timeline_writer(name)?),
            Way::Timeline => By::Told(domain.timeline(name)?),
            Way::Topic if tells => By::Publishes(topic()?.publisher()?),
            Way::Topic => By::Receives(topic()?.subscribe(Policy::Block).join()?),
        };
        Ok(Self { index: *index, members: *members, last: 0, words: Words::map(words)?, by })
    }

    /// Tells all and hears all answers, or is told and answers, so many times. Returns how long it took.
    pub(super) fn exchange(&mut self, turns: u64) -> Result<Duration, Sampled> {
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
                self.words.tell(0, value);
                return self.answers(value);
            }
            By::Tells(timeline) => {
                timeline.signal(value)?;
                return self.answers(value);
            }
            By::Publishes(publisher) => {
                let mut loan = publisher.loan(DType::U64, &[1], TIMEOUT)?;
                loan.as_mut_slice::<u64>()?[0] = value;
                loan.filled().publish(TIMEOUT)?;
                return self.answers(value);
            }
            By::Futex => self.words.hear(0, value),
            By::Told(timeline) => timeline.wait(value, TIMEOUT).map(|()| value)?,
            By::Receives(subscriber) => subscriber.recv(TIMEOUT)?.as_slice::<u64>()?[0],
        };
        same(found, value)?;
        self.words.tell(self.index, value);
        Ok(())
    }

    /// Waits for the answers of all.
    fn answers(&self, value: u64) -> Result<(), Sampled> {
        (1..self.members).try_for_each(|member| same(self.words.hear(member, value), value))
    }
}
