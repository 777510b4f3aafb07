//! How long timelines have stood still, as seen from one page to the next.
//!
//! A timeline's word has no time stamp: most are written by GPUs. A server of metrics remembers what it showed before.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use partywall::info::{ObjectInfo, TimelineInfo};

/// The last value of each timeline, and when a page first had it.
#[derive(Debug, Default)]
pub(super) struct Idle(BTreeMap<(String, u32), (u64, Instant)>);

impl Idle {
    /// Takes the timelines of a page, and forgets all others.
    pub(super) fn note(&mut self, objects: &[ObjectInfo], now: Instant) {
        let mut before = std::mem::take(&mut self.0);
        self.0 = objects
            .iter()
            .filter_map(|object| match object {
                ObjectInfo::Timeline(timeline) => Some(timeline),
                _ => None,
            })
            .map(|timeline| {
                let key = (timeline.name.clone(), timeline.incarnation);
                let known = before.remove(&key).filter(|(value, _)| *value == timeline.value);
                (key, known.unwrap_or((timeline.value, now)))
            })
            .collect();
    }

    /// Returns how long a timeline of the last page has had its value, as far as pages show; `None` for other
    /// timelines.
    pub(super) fn of(&self, timeline: &TimelineInfo, now: Instant) -> Option<Duration> {
        let (_, since) = self.0.get(&(timeline.name.clone(), timeline.incarnation))?;
        Some(now.saturating_duration_since(*since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(incarnation: u32, value: u64) -> [ObjectInfo; 1] {
        let name = "steps".to_owned();
        [ObjectInfo::Timeline(TimelineInfo {
            name,
            incarnation,
            writer: None,
            value,
            announced: value,
            ending: None,
            leases: 1,
            uid: 1000,
            shared: false,
        })]
    }

    // Holds 321.
    #[test]
    fn idle_time_begins_again_with_a_value_and_with_an_incarnation() {
        let start = Instant::now();
        let mut idle = Idle::default();
        let mut page = |seconds, objects: &[ObjectInfo]| {
            let now = start + Duration::from_secs(seconds);
            idle.note(objects, now);
            let [ObjectInfo::Timeline(timeline)] = objects else { panic!("it is a timeline") };
            idle.of(timeline, now).unwrap().as_secs()
        };
        assert_eq!(page(0, &timeline(1, 7)), 0);
        assert_eq!(page(5, &timeline(1, 7)), 5);
        assert_eq!(page(6, &timeline(1, 8)), 0);
        assert_eq!(page(9, &timeline(1, 8)), 3);
        assert_eq!(page(10, &timeline(2, 8)), 0);
        idle.note(&[], start);
        let [ObjectInfo::Timeline(gone)] = timeline(2, 8) else { panic!("it is a timeline") };
        assert_eq!(idle.of(&gone, start), None);
        assert!(idle.0.is_empty(), "timelines that are gone take no memory");
    }
}
