//! Rates: the differences between two snapshots.

use std::{collections::HashMap, time::Instant};

use partywall::info::{NameInfo, ObjectInfo, TimelineInfo};

use crate::snapshot::Snapshot;

/// A number that only grows. It names everything that distinguishes it from a number that starts at 0 again, such as
/// that of a topic that was removed and created again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Counter {
    /// Samples of a topic, or results of a queue.
    Name(String, u64),
    /// Samples that the publisher or subscriber with a number has published or received.
    Participant(String, u64, u64),
    /// The value of a timeline.
    Timeline(String, u32),
}

/// Numbers per second.
#[derive(Debug, Default)]
pub(super) struct Rates {
    taken: Option<Instant>,
    counts: HashMap<Counter, u64>,
    rates: HashMap<Counter, f64>,
}

impl Rates {
    /// Returns the rates between the snapshot of these rates and a later one.
    pub(super) fn next(&self, snapshot: &Snapshot) -> Self {
        let counts = counts(snapshot);
        let seconds = self.taken.map(|taken| snapshot.taken.saturating_duration_since(taken).as_secs_f64());
        let per_second = |(counter, count): (&Counter, &u64)| {
            let more = count.checked_sub(*self.counts.get(counter)?)?;
            Some((counter.clone(), more as f64 / seconds.filter(|seconds| *seconds > 0.0)?))
        };
        let rates = counts.iter().filter_map(per_second).collect();
        Self { taken: Some(snapshot.taken), counts, rates }
    }

    /// Returns how fast a number grows, per second; `None` if it was not in the snapshot before.
    pub(super) fn of(&self, counter: &Counter) -> Option<f64> {
        self.rates.get(counter).copied()
    }

    /// Returns the samples of a topic or the results of a queue per second.
    pub(super) fn of_name(&self, info: &NameInfo) -> Option<f64> {
        self.of(&Counter::Name(info.name.clone(), info.latest.as_ref()?.version))
    }

    /// Returns how fast the value of a timeline grows.
    pub(super) fn of_timeline(&self, info: &TimelineInfo) -> Option<f64> {
        self.of(&Counter::Timeline(info.name.clone(), info.incarnation))
    }
}

fn counts(snapshot: &Snapshot) -> HashMap<Counter, u64> {
    let mut counts = HashMap::new();
    for name in &snapshot.names {
        let (Some(latest), Some(usage)) = (&name.latest, &name.usage) else { continue };
        let topic = usage.topic.map(|topic| topic.published);
        let count = topic.or_else(|| usage.queue.map(|queue| queue.completed));
        counts.extend(count.map(|count| (Counter::Name(name.name.clone(), latest.version), count)));
    }
    for (name, used) in &snapshot.used {
        let Some(topic) = &used.info.topic else { continue };
        let published = topic.publishers.iter().map(|publisher| (publisher.who.id, publisher.published));
        let received = topic.subscribers.iter().map(|subscriber| (subscriber.who.id, subscriber.received));
        for (id, count) in published.chain(received) {
            counts.insert(Counter::Participant(name.clone(), used.version, id), count);
        }
    }
    for object in &snapshot.objects {
        if let ObjectInfo::Timeline(timeline) = object {
            counts.insert(Counter::Timeline(timeline.name.clone(), timeline.incarnation), timeline.value);
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::example, *};

    #[test]
    fn rates_are_differences_of_the_same_counter() {
        let first = example::snapshot();
        let name = |version| Counter::Name("frames".to_owned(), version);
        let rates = Rates::default().next(&first);
        assert_eq!(rates.of(&name(1)), None, "there is nothing to compare with");

        let mut second = example::snapshot();
        second.taken = first.taken + Duration::from_millis(500);
        for name in &mut second.names {
            if let Some(topic) = name.usage.as_mut().and_then(|usage| usage.topic.as_mut()) {
                topic.published += 100;
            }
        }
        assert_eq!(rates.next(&second).of(&name(1)), Some(200.0));

        // A topic that was created again counts from 0.
        for name in &mut second.names {
            name.latest.iter_mut().for_each(|latest| latest.version += 1);
        }
        let again = rates.next(&second);
        assert_eq!((again.of(&name(1)), again.of(&name(2))), (None, None));

        let mut back = example::snapshot();
        back.taken = first.taken + Duration::from_secs(1);
        for name in &mut back.names {
            if let Some(topic) = name.usage.as_mut().and_then(|usage| usage.topic.as_mut()) {
                topic.published = 0;
            }
        }
        assert_eq!(rates.next(&back).of(&name(1)), None, "a number that fell has no rate");
        assert_eq!(rates.next(&first).of(&name(1)), None, "no time has passed");
    }
}
