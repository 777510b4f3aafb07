//! A clock that all processes of a machine share, also those in time namespaces of their own.
//!
//! A container may have a time namespace (time_namespaces(7)), which shifts `CLOCK_MONOTONIC`: containers that were
//! moved between machines have one. `CLOCK_REALTIME` is the same in all, but an administrator or NTP may set it. The
//! kernel tells a process its shift, so the shift is taken off here.

use std::{
    fs,
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
};

use rustix::time::{ClockId, clock_gettime};

use crate::process::fork_generation;

/// Returns `CLOCK_MONOTONIC` of the machine's first time namespace, in nanoseconds.
///
/// The first call of a process reads `/proc`; if that cannot be read, or if the process has made a time namespace for
/// its children and is not in it, the shift counts as zero. A caller that compares the times of two processes checks
/// once that they agree.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // 2⁶³ ns are 292 years.
    let now = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
    u64::try_from(now.saturating_sub(shift())).unwrap_or(0)
}

/// Returns the nanoseconds by which this process's clock is ahead of the machine's.
fn shift() -> i64 {
    static SHIFT: AtomicI64 = AtomicI64::new(0);
    /// The generation of forks in which `SHIFT` was read, plus one: a child may be in another time namespace.
    static READ_IN: AtomicU64 = AtomicU64::new(0);

    let generation = fork_generation() + 1;
    // Acquire: pairs with the release below, so that the shift is of this generation. All threads store the same.
    if READ_IN.load(Ordering::Acquire) != generation {
        SHIFT.store(read_shift().unwrap_or(0), Ordering::Relaxed);
        READ_IN.store(generation, Ordering::Release);
    }
    SHIFT.load(Ordering::Relaxed)
}

fn read_shift() -> Option<i64> {
    // The file is about the namespace of this process's children.
    let namespace = |name| fs::read_link(format!("/proc/self/ns/{name}")).ok();
    if namespace("time")? != namespace("time_for_children")? {
        return None;
    }
    parsed(&fs::read_to_string("/proc/self/timens_offsets").ok()?)
}

/// Returns the shift of `CLOCK_MONOTONIC` in nanoseconds, from a line such as `monotonic  86400  0`: seconds and
/// nanoseconds.
fn parsed(offsets: &str) -> Option<i64> {
    let mut words = offsets.lines().find_map(|line| line.strip_prefix("monotonic"))?.split_whitespace();
    let mut number = || words.next()?.parse::<i64>().ok();
    number()?.checked_mul(1_000_000_000)?.checked_add(number()?)
}

/// Returns the ISO date of a day counted from 1970-01-01, in the proleptic Gregorian calendar.
///
/// Years are counted from 1 March, which puts the leap day last: the days before a month are then
/// a linear function of the month, and 400 years always have 146,097 days.
pub fn iso_date(days_since_1970: u64) -> String {
    let day = days_since_1970 + 719_468; // 0000-03-01 to 1970-01-01
    let era = day / 146_097;
    let day_of_era = day % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day_of_month:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shift_is_read_as_the_kernel_writes_it() {
        assert_eq!(parsed("monotonic           0         0\nboottime            0         0\n"), Some(0));
        assert_eq!(
            parsed("monotonic      86400         7\nboottime            5         0\n"),
            Some(86_400_000_000_007)
        );
        assert_eq!(parsed("monotonic         -2 500000000\n"), Some(-1_500_000_000));
        for damaged in ["", "boottime 1 2\n", "monotonic\n", "monotonic 1\n", "monotonic x 0\n"] {
            assert_eq!(parsed(damaged), None, "{damaged:?}");
        }
    }

    #[test]
    fn clock_goes_on() {
        let before = monotonic_ns();
        let after = monotonic_ns();
        assert!(0 < before && before <= after, "{before} {after}");
    }

    #[test]
    fn leap_days_and_year_ends_are_right() {
        for (days, date) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (10_956, "1999-12-31"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (19_782, "2024-02-29"),
            (20_777, "2026-11-20"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(iso_date(days), date, "day {days}");
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        // 401 years hold every kind of century; text of this form sorts as dates do.
        let mut before = iso_date(0);
        for day in 1..401 * 366 {
            let date = iso_date(day);
            assert!(date > before, "{before} then {date}");
            before = date;
        }
    }
}
