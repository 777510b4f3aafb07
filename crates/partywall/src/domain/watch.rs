//! Events of names.

use std::{collections::VecDeque, time::Duration};

use partywall_wire::{Answer, Call, Gap, Happened, NameEvent, Pattern};

use super::{Domain, answered};
use crate::{
    error::{InvalidArgument, Result, Unreachable},
    info::Point,
    wait::Wait,
};

/// The events of names that match a pattern: names of segments, pools, topics, timelines and semaphores.
///
/// A watch loses no event while it reads them fast enough, even if the connection is lost and renewed. A broker keeps 1
/// MiB of events, which are several thousand. A slower watch, or one that continues from an older point, gets a
/// [`WatchEvent::Missed`] in place of the lost events.
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
    /// Events from the broker that the caller has not taken yet, each with the point after it.
    ready: VecDeque<(Point, WatchEvent)>,
    /// The point after the events that were taken from the broker.
    asked: Point,
    /// The point after the events that the caller has taken.
    taken: Point,
}

/// An event of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchEvent {
    /// A change of a name.
    Name(NameEvent),
    /// Some events are lost. To maintain a list of names, rebuild it ([`Domain::names`], [`Domain::objects`]) and
    /// continue with the following events.
    Missed {
        /// The number of lost events, of all names. Unknown if the point belongs to another broker, whose names are
        /// gone.
        events: Option<u64>,
    },
}

impl Domain {
    /// Watches names that match `pattern`, in which `*` stands for any characters, also `/`, and `?` for one. The watch
    /// begins with the first event after this call.
    ///
    /// # Errors
    /// [`InvalidArgument::Pattern`].
    pub fn watch(&self, pattern: &str) -> Result<Watch> {
        let mut watch = self.watch_after(pattern, Point { instance: 0, sequence: 0 })?;
        // The present point.
        let Happened { next, .. } = happened(self.link().call(watch.question(None))?)?;
        watch.asked = next;
        watch.taken = next;
        Ok(watch)
    }

    /// Watches names as [`Domain::watch`] does, but continues from the [point](Watch::point) of another watch, of this
    /// or another process.
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
    /// Waits for the next event and returns it; `None` if none comes in time.
    ///
    /// Blocks the thread for as long as `wait` says, and up to 10 s more while the broker is stopped. With the feature
    /// `tokio`, `next_async` blocks none.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled); [`Unreachable::Gone`]: the names are gone too, and the last
    /// events may be missing.
    pub fn next<'w>(&mut self, wait: impl Into<Wait<'w>>) -> Result<Option<WatchEvent>> {
        let waiting = wait.into().begin();
        loop {
            if let Some(event) = self.take_next() {
                return Ok(Some(event));
            }
            let question = || self.question(Some(self.asked));
            match self.domain.link().call_waiting(question, &waiting)? {
                Some((answer, _)) => self.take(happened(answer)?)?,
                None if waiting.was_cancelled() => {
                    return Err(waiting.error(format!("no name that matches {:?} changed", self.pattern.as_str())));
                }
                None => return Ok(None),
            }
        }
    }

    /// Returns an iterator over all events, which waits for each one and ends with the first error.
    pub fn events(&mut self) -> impl Iterator<Item = Result<WatchEvent>> {
        let mut failed = false;
        std::iter::from_fn(move || {
            let next = if failed { return None } else { self.next(Duration::MAX).transpose() };
            failed = matches!(next, Some(Err(_)));
            next
        })
    }

    /// Returns the next event, and waits for it without blocking a thread; needs the runtime of tokio.
    ///
    /// A future that is dropped has taken no event: the next call returns it.
    ///
    /// ```no_run
    /// # async fn watch(domain: &partywall::Domain) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let mut watch = domain.watch("llm/*")?;
    /// let event = tokio::time::timeout(Duration::from_secs(60), watch.next_async()).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`next`](Self::next), except [`Error::Cancelled`](crate::Error::Cancelled), which says that the runtime ends.
    #[cfg(feature = "tokio")]
    pub async fn next_async(&mut self) -> Result<WatchEvent> {
        loop {
            if let Some(event) = self.take_next() {
                return Ok(event);
            }
            let question = self.question(Some(self.asked));
            let answer = self.domain.call_async(question, |(answer, _)| happened(answer)).await?;
            self.take(answer)?;
        }
    }

    /// Returns the point after the events that this watch has returned, for [`Domain::watch_after`].
    pub fn point(&self) -> Point {
        self.taken
    }

    /// Returns whether the next event is here already.
    pub(crate) fn has_next(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the next event that is here already.
    fn take_next(&mut self) -> Option<WatchEvent> {
        let Some((point, event)) = self.ready.pop_front() else {
            self.taken = self.asked;
            return None;
        };
        self.taken = point;
        Some(event)
    }

    fn question(&self, after: Option<Point>) -> Call {
        Call::Watch { pattern: self.pattern.as_str().to_owned(), after }
    }

    fn take(&mut self, Happened { gap, events, next }: Happened) -> Result<()> {
        // A point of another instance does not belong to this broker.
        let begins_anew = gap == Some(Gap::OtherBroker) || next.instance != self.asked.instance;
        let goes_on = begins_anew || next.sequence >= self.asked.sequence;
        if !goes_on || !events.is_sorted_by_key(|event| event.sequence) {
            return Err(Unreachable::protocol("its list of events does not advance"));
        }
        let before = |sequence: u64| Point { instance: next.instance, sequence };
        if let Some(gap) = gap {
            let events_missed = match gap {
                Gap::Behind { events } => Some(events),
                _ => None,
            };
            // Uses the point after the missing events, so that they are not reported again.
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
