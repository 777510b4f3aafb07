//! Numbers and times as people read and write them.

use std::{
    fmt::Display,
    num::{IntErrorKind, ParseIntError},
    ops::RangeInclusive,
    str::FromStr,
    time::Duration,
};

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
pub fn counted(n: u64, noun: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_follow_their_number() {
        assert_eq!([counted(0, "name"), counted(1, "name"), counted(2, "name")], ["0 names", "1 name", "2 names"]);
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
