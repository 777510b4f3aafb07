//! A clock that all processes of the machine share, and the format of times in steps.

use std::{
    thread,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use partywall_cli::text::micros;

use crate::failure::Failure;

/// A moment, in nanoseconds since the machine started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(u64);

impl Moment {
    /// Returns this moment.
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        // Neither value is negative, because the clock starts at 0.
        Self(Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32).as_nanos() as u64)
    }

    /// Returns the nanoseconds since the machine started.
    pub fn nanos(self) -> u64 {
        self.0
    }

    /// Returns the moment this many nanoseconds after the machine started.
    pub fn at(nanoseconds: u64) -> Self {
        Self(nanoseconds)
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Polls until a condition holds, and pauses in between. Returns false if it does not hold within the limit.
pub(super) fn until(
    limit: Duration,
    pause: Duration,
    mut holds: impl FnMut() -> Result<bool, Failure>,
) -> Result<bool, Failure> {
    let deadline = Instant::now() + limit;
    loop {
        let held = holds()?;
        if held || Instant::now() > deadline {
            return Ok(held);
        }
        thread::sleep(pause);
    }
}

/// Formats the median, the shortest and the longest of some times: `2,240 µs (1,970 to 4,410 µs)`.
pub fn spread(times: &[Duration]) -> String {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    match sorted.as_slice() {
        [] => "never".into(),
        [one] => short(*one),
        [first, .., last] => {
            let first = short(*first);
            format!("{} ({} to {})", short(sorted[sorted.len() / 2]), first.trim_end_matches(" µs"), short(*last))
        }
    }
}

/// Formats a short time; below 100 µs with one decimal.
pub fn short(time: Duration) -> String {
    if time < Duration::from_micros(100) { format!("{:.1} µs", time.as_nanos() as f64 / 1000.0) } else { micros(time) }
}

/// Formats a time in milliseconds.
pub fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

/// The limit of a wait that must succeed: far longer than it takes, even on a slow machine.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// How long to wait for something that must not happen.
pub const MOMENT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_summarised_by_their_median() {
        let text =
            |nanoseconds: &[u64]| spread(&nanoseconds.iter().copied().map(Duration::from_nanos).collect::<Vec<_>>());
        assert_eq!(text(&[]), "never");
        assert_eq!(text(&[1_500]), "1.5 µs");
        assert_eq!(text(&[4_410_000, 2_240_000, 99_000]), "2,240 µs (99.0 to 4,410 µs)");
        assert_eq!(millis(Duration::from_micros(1_550)), "1.6 ms");
    }

    #[test]
    fn moments_follow_each_other() {
        let first = Moment::now();
        let second = Moment::now();
        assert!(second >= first);
        assert_eq!(Moment(5).since(Moment(3)), Duration::from_nanos(2));
        assert_eq!(Moment(3).since(Moment(5)), Duration::ZERO);
    }
}
