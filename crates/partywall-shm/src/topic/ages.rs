//! The ages of samples: a stamp in each sample, and for each subscriber a histogram for observers.
//!
//! A publisher stamps each sample with the time ([`now_ns`](crate::members::now_ns)) at which it puts the sample into
//! the ring. The stamp is a word of the sample's [descriptor](super::descriptor), so rules 1 to 3 of those words hold
//! for it: a reader that holds the sample has its stamp. The age of a sample is the time from its stamp until a
//! subscriber has received it.
//!
//! A subscriber reads the clock only if an age is wanted: if it measures on its own account, or if an observer has
//! asked. An observer asks by storing the end of a lease in `ages_until` of the topic's header, which subscribers read
//! at each sample. The subscriber that first finds the lease expired clears the word. An observer that is killed
//! therefore costs subscribers a read of the clock for each sample until the lease has expired, and nothing afterwards.
//!
//! | offset | word of a histogram | |
//! |---|---|---|
//! | 0 | `count` | of the ages |
//! | 8 | `sum` | of the ages, in nanoseconds |
//! | 16 | `max` | the greatest age, in nanoseconds |
//! | 128 | `buckets` | how many ages fell into each of 304 buckets: 8 for each power of two, up to 2⁴⁰ ns |
//!
//! Rules:
//! 1. Only the owner of the subscriber's port writes a histogram, one thread at a time. It adds by a load and a store.
//! 2. A subscriber that joins clears the histogram before it opens its port.
//! 3. Observers read at any time. The words that they see do not belong to a single moment.
//!
//! If the owner is killed between any two steps, the last age counts in some words and not in others. The words are
//! only for people, and no process decides anything by them.
//!
//! A clock cannot make an age negative: a stamp later than the time of receipt counts as age 0. That happens if another
//! process breaks the rules. The [clock](partywall_os::clock) is that of the machine in all time namespaces, and
//! restarts only with the machine, which ends the memory, too.

use partywall_wire::Ages;

use super::{HeldSample, SubscriberHandle, Topic};
use crate::{
    crash::point,
    sync::{AtomicU64, Ordering},
};

/// How long an observer's question lasts, in nanoseconds: subscribers measure ages for one minute.
pub const AGES_LEASE: u64 = 60_000_000_000;

/// The stamp of a sample that has none. The clock has left it behind when the machine starts.
pub const NO_STAMP: u64 = 0;

/// See the head of this file.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Histogram {
    count: AtomicU64,
    sum: AtomicU64,
    max: AtomicU64,
    zero: [AtomicU64; 13],
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    /// Adds an age.
    fn add(&self, age: u64) {
        let add = |word: &AtomicU64, more| {
            word.store(word.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        };
        // First: a histogram whose count is 0 is empty, whenever its owner was killed.
        add(&self.count, 1);
        point("topic: age counted, not in its bucket");
        add(&self.buckets[bucket(age)], 1);
        add(&self.sum, age);
        if age > self.max.load(Ordering::Relaxed) {
            self.max.store(age, Ordering::Relaxed);
        }
    }

    /// Removes all ages.
    pub(super) fn clear(&self) {
        // The memory of the buckets is not allocated before their first use.
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        for word in [&self.count, &self.sum, &self.max].into_iter().chain(&self.buckets) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Returns a summary. Terminates without a panic for any contents.
    pub(super) fn read(&self) -> Ages {
        let count = self.count.load(Ordering::Relaxed);
        if count == 0 {
            return Ages::default();
        }
        let buckets = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        let max = self.max.load(Ordering::Relaxed);
        let mut ages = Ages { count, sum: self.sum.load(Ordering::Relaxed), max, ..Ages::default() };
        for (bound, younger) in ages.younger.iter_mut().enumerate() {
            *younger = total(&buckets[..bucket(Ages::bound(bound))]);
        }
        let total = total(&buckets);
        ages.p50 = percentile(&buckets, total, 50).min(max);
        ages.p99 = percentile(&buckets, total, 99).min(max);
        ages
    }
}

impl Topic {
    /// Asks all subscribers to measure the ages of samples for [`AGES_LEASE`] from `now`
    /// ([`now_ns`](crate::members::now_ns)).
    pub fn ask_for_ages(&self, now: u64) {
        self.control().ages_until.store(now.saturating_add(AGES_LEASE), Ordering::Relaxed);
    }

    /// Returns whether an observer has asked for ages.
    #[inline]
    pub fn ages_are_wanted(&self) -> bool {
        self.control().ages_until.load(Ordering::Relaxed) != 0
    }

    /// Adds the age of a stamped sample that `handle` received at `now` ([`now_ns`](crate::members::now_ns)). Ends an
    /// observer's question that has expired.
    pub fn add_age(&self, handle: &SubscriberHandle, taken: &HeldSample, now: u64) {
        let stamp = self.descriptors[taken.block() as usize].stamp();
        if stamp != NO_STAMP {
            self.ages[handle.index].add(now.saturating_sub(stamp));
        }
        let until = &self.control().ages_until;
        let seen = until.load(Ordering::Relaxed);
        // A later end than an observer can have asked for was written by a process that breaks the rules.
        if seen != 0 && !(now..=now.saturating_add(AGES_LEASE)).contains(&seen) {
            // Fails if an observer has just asked again.
            let _ = until.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Returns the bucket of an age.
fn bucket(age: u64) -> usize {
    let age = age.min((1 << MAX_OCTAVE) - 1);
    let Some(octave) = age.checked_ilog2().filter(|octave| *octave >= STEPS.ilog2()) else { return age as usize };
    let above = octave - STEPS.ilog2();
    (u64::from(above) * STEPS + (age >> above)) as usize
}

/// Returns the greatest age in a bucket.
fn last_of(bucket: usize) -> u64 {
    let next = bucket as u64 + 1;
    if next <= STEPS {
        return next - 1;
    }
    let above = next / STEPS - 1;
    ((next % STEPS + STEPS) << above) - 1
}

fn total(buckets: &[u64]) -> u64 {
    buckets.iter().fold(0, |sum, more| sum.saturating_add(*more))
}

/// Returns the greatest age of the bucket that contains a percentile.
fn percentile(buckets: &[u64], total: u64, percent: u64) -> u64 {
    let rank = (u128::from(total) * u128::from(percent)).div_ceil(100) as u64;
    let mut counted = 0_u64;
    let found = buckets.iter().position(|bucket| {
        counted = counted.saturating_add(*bucket);
        counted >= rank
    });
    found.map_or(0, last_of)
}

#[cfg(test)]
impl Histogram {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            count: zero(),
            sum: zero(),
            max: zero(),
            zero: std::array::from_fn(|_| zero()),
            buckets: std::array::from_fn(|_| zero()),
        }
    }
}

shared!(Histogram { count, sum, max, zero, buckets } bits { STEPS, MAX_OCTAVE });

/// Ages from 2⁴⁰ ns (18 minutes) on fall into the last bucket.
const MAX_OCTAVE: u32 = 40;
/// Buckets for each power of two: a percentile is at most an eighth too large.
const STEPS: u64 = 8;
/// Models do without them.
const BUCKETS: usize = if cfg!(loom) { 0 } else { (MAX_OCTAVE as usize - 2) * STEPS as usize };

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_ages_in_order_and_an_eighth_each() {
        assert_eq!((bucket(0), bucket(7), bucket(8), bucket(u64::MAX)), (0, 7, 8, BUCKETS - 1));
        for at in 0..BUCKETS {
            let last = last_of(at);
            assert_eq!(bucket(last), at);
            let first = if at == 0 { 0 } else { last_of(at - 1) + 1 };
            assert_eq!(bucket(first), at);
            assert!((last - first) * STEPS <= last, "{first} to {last}");
        }
        assert_eq!(last_of(BUCKETS - 1), (1 << MAX_OCTAVE) - 1);
        // Bounds of the summary are bounds of buckets.
        assert!((0..Ages::BOUNDS).all(|bound| last_of(bucket(Ages::bound(bound)) - 1) == Ages::bound(bound) - 1));
    }

    #[test]
    fn percentiles_are_at_most_an_eighth_too_large() {
        let mut buckets = [0; BUCKETS];
        (1..=1000_u64).for_each(|age| buckets[bucket(age * 1_000)] += 1);
        for (percent, exact) in [(1, 10_000), (50, 500_000), (99, 990_000), (100, 1_000_000)] {
            let found = percentile(&buckets, 1000, percent);
            assert!((exact..=exact * 9 / 8).contains(&found), "p{percent}: {found} instead of {exact}");
        }
        assert_eq!(percentile(&[0; BUCKETS], 0, 99), 0);
    }

    // Holds 200.
    #[test]
    fn histogram_of_any_contents_is_summarised() {
        let histogram = Histogram::new();
        let words = || [&histogram.count, &histogram.sum, &histogram.max].into_iter().chain(&histogram.buckets);
        words().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        let ages = histogram.read();
        assert_eq!((ages.count, ages.younger), (u64::MAX, [u64::MAX; Ages::BOUNDS]));
        histogram.add(u64::MAX);
        histogram.add(5);
        // As if its owner had been killed before it had counted the age in a bucket.
        histogram.clear();
        words().for_each(|word| word.store(0, Ordering::Relaxed));
        histogram.count.store(1, Ordering::Relaxed);
        assert_eq!(histogram.read(), Ages { count: 1, ..Ages::default() });
        histogram.clear();
        assert_eq!(histogram.read(), Ages::default());
    }
}
