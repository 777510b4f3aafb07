//! Numbers, times and patterns in the form that people write and read.

use std::{
    fmt::Display,
    num::{IntErrorKind, ParseIntError},
    ops::RangeInclusive,
    str::FromStr,
    time::{Duration, SystemTime},
};

use partywall_os::clock::iso_date;

/// Formats a number with thousands separators: `262,144`.
#[must_use]
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a number with its noun: `1 name`, `2 names`.
#[must_use]
pub fn count(n: u64, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

/// Formats a duration in whole microseconds: `1,234 µs`.
#[must_use]
pub fn micros(duration: Duration) -> String {
    format!("{} µs", grouped(duration.as_micros() as u64))
}

/// Returns a parser of whole numbers in a range, for an option.
pub fn number_in<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr<Err = ParseIntError> + PartialOrd + Display + Clone,
{
    move |text| {
        let is_larger = match text.parse::<T>() {
            Ok(number) if range.contains(&number) => return Ok(number),
            Ok(number) => number > *range.end(),
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => true,
            Err(_) => {
                return Err(format!("{text:?} is not a whole number: write digits only, as in {}", range.start()));
            }
        };
        Err(match is_larger {
            true => format!("{text} is too large: use {} or less", range.end()),
            false => format!("{text} is too small: use {} or more", range.start()),
        })
    }
}

/// Returns the time since a point in time, which is given in milliseconds since 1970.
pub(crate) fn since(ms: u64) -> Duration {
    let then = SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
    // The clock may have been set back since.
    SystemTime::now().duration_since(then).unwrap_or_default()
}

/// Returns the time from now until a point in time, which is given in milliseconds since 1970.
pub(crate) fn until(ms: u64) -> Duration {
    between(SystemTime::now(), SystemTime::UNIX_EPOCH + Duration::from_millis(ms))
}

/// Returns the time from `now` until `then` in whole seconds, rounded up; zero once `then` has passed.
fn between(now: SystemTime, then: SystemTime) -> Duration {
    let left = then.duration_since(now).unwrap_or_default();
    Duration::from_secs(left.as_millis().div_ceil(1000) as u64)
}

/// Formats a duration in its two largest units: `3 h 12 min`.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, m, s) => format!("{m} min {s} s"),
        (0, h, m, _) => format!("{h} h {m} min"),
        (d, h, _, _) => format!("{d} d {h} h"),
    }
}

/// Returns milliseconds as seconds: `1.2 s`.
pub(crate) fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

/// Formats a time in nanoseconds with three digits or so: `950 ns`, `31.2 µs`, `4.0 ms`, `1.5 s`.
pub(crate) fn short_time(ns: u64) -> String {
    let time = ns as f64;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", time / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", time / 1e6),
        _ => format!("{:.1} s", time / 1e9),
    }
}

/// Formats a point in time, given in milliseconds since 1970: `2026-11-20 11:32:05 UTC`.
pub(crate) fn moment(ms: u64) -> String {
    let date = iso_date(ms / 86_400_000);
    let seconds = ms / 1000 % 86_400;
    let h = seconds / 3600;
    let m = seconds / 60 % 60;
    let s = seconds % 60;
    format!("{date} {h:02}:{m:02}:{s:02} UTC")
}

/// Parses a number of bytes: `4096`, `64KiB`, `1.5 GiB`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a number of bytes: write 4096, 64KiB, 512MiB, 1.5GiB or 2TiB");
    let text_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(text_end);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" | "bytes" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        _ => return Err(bad()),
    };
    if let Ok(number) = number.parse::<u64>() {
        return number.checked_mul(factor).ok_or_else(bad);
    }
    let number: f64 = number.parse().map_err(|_| bad())?;
    let bytes = number * factor as f64;
    // A fraction of a byte, or a number too large for an exact float, is an error.
    if bytes.fract() == 0.0 && bytes < (1_u64 << 53) as f64 { Ok(bytes as u64) } else { Err(bad()) }
}

/// Parses a number of seconds that is not negative, and at most a year, so that a clock can add it: `3`, `0.5`.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a number of seconds: give 0 or more, as in 2.5");
    let seconds: f64 = text.parse().map_err(|_| bad())?;
    if seconds > YEAR.as_secs_f64() {
        return Err(format!("{text:?} is longer than a year: give {} seconds or less", YEAR.as_secs()));
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Parses a number of threads.
pub(crate) fn parse_threads(text: &str) -> Result<u16, String> {
    let threads = text.parse().ok().filter(|threads| (1..=256).contains(threads));
    threads.ok_or_else(|| format!("{text:?} is not a number of threads: use 1 to 256"))
}

/// Parses a process id, as `partywall ps` shows it.
pub(crate) fn parse_pid(text: &str) -> Result<u32, String> {
    let pid = text.parse().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| format!("{text:?} is not a process id: give a number, as `partywall ps` shows it"))
}

/// Parses a number that is not negative.
pub(crate) fn parse_number<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => format!("{text:?} is too large: write a smaller number, as in 4096"),
        _ => format!("{text:?} is not a whole number: write digits only, as in 4096"),
    })
}

/// Parses a number of at least 1.
pub(crate) fn parse_count(text: &str) -> Result<u64, String> {
    number_in(1..=u64::MAX)(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 64 << 10),
            ("64 KiB", 64 << 10),
            ("1.5GiB", 3 << 29),
            ("2t", 2 << 40),
            ("7 bytes", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "x", "-1", "1.5", "1KB", "KiB", "1..5KiB", "99999999999TiB"] {
            assert!(parse_size(text).unwrap_err().contains("GiB"), "{text}");
        }
    }

    #[test]
    fn numbers_and_process_ids_are_digits() {
        assert_eq!((parse_number("0"), parse_pid("7")), (Ok(0_u64), Ok(7)));
        assert!(parse_number::<u32>("4294967296").unwrap_err().contains("too large"));
        for text in ["", "x", "-1", "1.5", "4k", "99999999999999999999"] {
            assert!(parse_number::<u64>(text).unwrap_err().contains("4096"), "{text}");
            assert!(parse_pid(text).unwrap_err().contains("partywall ps"), "{text}");
        }
        assert!(parse_pid("0").is_err());
    }

    #[test]
    fn moments_are_dates() {
        assert!(moment(0).starts_with("1970-01-01 00:00:00 UTC"));
        assert!(moment(951_782_400_000).starts_with("2000-02-29 00:00:00"));
        assert!(moment(1_795_174_325_123).starts_with("2026-11-20 11:32:05"));
    }

    #[test]
    fn durations_have_two_units() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(60);
        for (then, left) in [(59_999, 0), (60_000, 0), (60_001, 1), (61_000, 1), (61_001, 2)] {
            let then = SystemTime::UNIX_EPOCH + Duration::from_millis(then);
            assert_eq!(between(now, then), Duration::from_secs(left), "{then:?}");
        }
        let texts = [5, 65, 3700, 90_000].map(|s| duration(Duration::from_secs(s)));
        assert_eq!(texts, ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]);
        assert!(parse_seconds("-1").is_err() && parse_seconds("1e30").is_err() && parse_seconds("x").is_err());
        assert!(parse_seconds("nan").is_err() && parse_seconds("-inf").is_err());
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_seconds("31536000"), Ok(YEAR));
        for long in ["31536001", "1e19", "inf"] {
            assert!(parse_seconds(long).unwrap_err().ends_with("give 31536000 seconds or less"), "{long}");
        }
    }

    #[test]
    fn nouns_follow_their_number() {
        assert_eq!([count(0, "name"), count(1, "name"), count(2, "name")], ["0 names", "1 name", "2 names"]);
    }

    #[test]
    fn numbers_beyond_a_range_are_refused_by_a_sentence() {
        let parse = number_in(3..=40_u8);
        assert_eq!((parse("3"), parse("40")), (Ok(3), Ok(40)));
        for (text, why) in [
            ("2", "2 is too small: use 3 or more"),
            ("41", "41 is too large: use 40 or less"),
            ("999", "999 is too large: use 40 or less"),
            ("-1", "\"-1\" is not a whole number: write digits only, as in 3"),
            ("5s", "\"5s\" is not a whole number: write digits only, as in 3"),
        ] {
            assert_eq!(parse(text), Err(why.to_owned()));
        }
    }

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (262_144, "262,144"), (1_048_576, "1,048,576")]
        {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(micros(Duration::from_millis(12)), "12,000 µs");
    }
}
