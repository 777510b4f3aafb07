//! Formats numbers and times for people.

use std::time::Duration;

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

/// Formats a duration in whole microseconds: `1,234 µs`.
#[must_use]
pub fn micros(duration: Duration) -> String {
    format!("{} µs", grouped(duration.as_micros() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (262_144, "262,144"), (1_048_576, "1,048,576")]
        {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(micros(Duration::from_millis(12)), "12,000 µs");
    }
}
