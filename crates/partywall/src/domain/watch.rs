//! What happens to names, as it happens.

use std::{collections::VecDeque, time::Duration};

use partywall_wire::{Answer, Call, Gap, Happened, NameEvent, Pattern};

use super::{Domain, answered};
use crate::{
    error::{InvalidArgument, Result, Unreachable},
    info::Point,
    wait::Wait,
};

/// What happens to the names of a domain that are like a pattern: those of segments, timelines and semaphores.
///
/// Nothing is lost while events are taken as fast as they come, and nothing when the connection is lost and renewed. A
/// broker keeps a mebibyte of events, some thousand: who takes them more slowly, or goes on from an older point, gets a
/// [`WatchEvent::Missed`] in place of what is gone.
///
/// ```
/// # use std::time::Duration;
/// # use partywall::{DType, Domain, Place, WatchEvent};
/// # fn watch(domain: &Domain) -> partywall::Result<()> {
/// let mut watch = domain.watch("llm/*")?;
/// while let Some(event) = watch.next(Duration::from_secs(60))? {
///     match event {
///         WatchEvent::Name(event) => println!("{}: {:?}", event.name, event.change),
///         WatchEvent::Missed { .. } => println!("some events are missing: look at all names again"),
///         _ => {}
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Watch {
    domain: Domain,
    pattern: Pattern,
    /// Taken from the broker and not from here yet, each with the point behind it.
    ready: VecDeque<(Point, WatchEvent)>,
    /// Behind what was taken from the broker.
    asked: Point,
    /// Behind what was taken from here.
    taken: Point,
}

/// Something that happened to a name, or that was missed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchEvent {
    /// It happened.
    Name(NameEvent),
    /// Some of what happened cannot be told any more. Whoever keeps a list of names makes it anew
    /// ([`Domain::names`], [`Domain::objects`]) and goes on with the events that follow.
    Missed {
        /// How many events, whatever their names; unknown if the point was of another broker, which also means that its
        /// names are gone.
        events: Option<u64>,
    },
}

impl Domain {
    /// Watches names that are like `pattern`, in which `*` stands for any characters, also `/`, and `?` for one. Begins
    /// with what happens after this call.
    ///
    /// # Errors
    /// [`InvalidArgument::Pattern`].
    pub fn watch(&self, pattern: &str) -> Result<Watch> {
        let mut watch = self.watch_after(pattern, Point { instance: 0, sequence: 0 })?;
        // Where it stands now.
        let Happened { next, .. } = happened(self.link().call(watch.question(None))?)?;
        (watch.asked, watch.taken) = (next, next);
        Ok(watch)
    }

    /// As [`Domain::watch`], from a point on that another watch came to ([`Watch::point`]), of this or another process.
    ///
    /// # Errors
    /// [`InvalidArgument::Pattern`].
    pub fn watch_after(&self, pattern: &str, point: Point) -> Result<Watch> {
        let pattern = Pattern::new(pattern)
            .map_err(|why| InvalidArgument::Pattern { pattern: pattern.chars().take(256).collect(), why })?;
        Ok(Watch { domain: self.clone(), pattern, ready: VecDeque::new(), asked: point, taken: point })
    }
}

impl Watch {
    /// Returns the next event, and waits for one; `None` if there is none in time.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled); [`Unreachable::Gone`]: with it are its names, and what happened last may not have been told.
    pub fn next<'w>(&mut self, wait: impl Into<Wait<'w>>) -> Result<Option<WatchEvent>> {
        let waiting = wait.into().begin();
        loop {
            if let Some((point, event)) = self.ready.pop_front() {
                self.taken = point;
                return Ok(Some(event));
            }
            self.taken = self.asked;
            let question = || self.question(Some(self.asked));
            match self.domain.link().call_waiting(question, &waiting)? {
                Some((answer, _)) => self.take(happened(answer)?)?,
                None if waiting.was_cancelled() => {
                    return Err(waiting.error(format!("no name that is like {:?} changed", self.pattern.as_str())));
                }
                None => return Ok(None),
            }
        }
    }

    /// All events, as long as there is a broker; waits for each. Ends with the first error.
    pub fn events(&mut self) -> impl Iterator<Item = Result<WatchEvent>> {
        let mut failed = false;
        std::iter::from_fn(move || {
            let next = if failed { return None } else { self.next(Duration::MAX).transpose() };
            failed = matches!(next, Some(Err(_)));
            next
        })
    }

    /// Where another watch is to go on that is to get the events behind those which this one has returned.
    pub fn point(&self) -> Point {
        self.taken
    }

    fn question(&self, after: Option<Point>) -> Call {
        Call::Watch { pattern: self.pattern.as_str().to_owned(), after }
    }

    fn take(&mut self, Happened { gap, events, next }: Happened) -> Result<()> {
        // A point that this broker never was at is not of its making, whatever it is made of.
        let begins_anew = gap == Some(Gap::OtherBroker) || next.instance != self.asked.instance;
        let goes_on = begins_anew || next.sequence >= self.asked.sequence;
        if !goes_on || !events.is_sorted_by_key(|event| event.sequence) {
            return Err(Unreachable::protocol("its list of events does not go on"));
        }
        let before = |sequence: u64| Point { instance: next.instance, sequence };
        if let Some(gap) = gap {
            let events_missed = match gap {
                Gap::Behind { events } => Some(events),
                _ => None,
            };
            // Behind what is missing, so that it is not told again.
            let point = before(events.first().map_or(next.sequence, |event| event.sequence.saturating_sub(1)));
            self.ready.push_back((point, WatchEvent::Missed { events: events_missed }));
        }
        let named = events.into_iter().map(|event| (before(event.sequence), WatchEvent::Name(event)));
        self.ready.extend(named);
        self.asked = next;
        Ok(())
    }
}

fn happened(answer: Answer) -> Result<Happened> {
    answered!(answer, Answer::Happened(happened) => happened)
}
