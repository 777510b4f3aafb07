//! The meaning of the 64 bits of a value. No other module knows the numbers.
//!
//! | number | means |
//! |---|---|
//! | 0 … 2⁶¹ | that value has been signalled, and each below it |
//! | 2⁶² + 1 + n, with n in 0 … 2⁶¹ | poison: n was the last one, and none will follow |
//! | any other | invalid: no process may write it |
//!
//! A stream waits for `(int64_t)(word - v) >= 0`. Every poison is larger than every value by less than 2⁶³, so poison
//! ends the wait for any value.

/// The largest value of a timeline.
pub const MAX_VALUE: u64 = 1 << 61;

/// The meaning of a value word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// The timeline has this value.
    Live(u64),
    /// It has ended at this value.
    Poisoned(u64),
    /// Neither a signal nor an end writes this.
    Invalid,
}

/// Reads a value word.
pub(super) fn read(word: u64) -> Reading {
    match word.checked_sub(POISON) {
        None if word <= MAX_VALUE => Reading::Live(word),
        Some(last) if last <= MAX_VALUE => Reading::Poisoned(last),
        _ => Reading::Invalid,
    }
}

/// Returns the poison for a timeline that ended at `last`, at most [`MAX_VALUE`].
pub(super) const fn poison(last: u64) -> u64 {
    debug_assert!(last <= MAX_VALUE);
    POISON + last
}

/// Added to the last value: larger than any value, and odd, so that the low half of a word changes when it is poisoned.
const POISON: u64 = (1 << 62) + 1;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As a stream compares (`CU_STREAM_WAIT_VALUE_GEQ`).
    fn a_stream_passes(word: u64, v: u64) -> bool {
        word.wrapping_sub(v) as i64 >= 0
    }

    #[test]
    fn values_at_the_limits() {
        assert_eq!(read(0), Reading::Live(0));
        assert_eq!(read(MAX_VALUE), Reading::Live(MAX_VALUE));
        assert_eq!(read(MAX_VALUE + 1), Reading::Invalid);
        assert_eq!(read(1 << 62), Reading::Invalid);
        assert_eq!(read(poison(0)), Reading::Poisoned(0));
        assert_eq!(read(poison(MAX_VALUE)), Reading::Poisoned(MAX_VALUE));
        assert_eq!(read(poison(MAX_VALUE) + 1), Reading::Invalid);
        assert_eq!(read(u64::MAX), Reading::Invalid);
        assert!(a_stream_passes(poison(0), MAX_VALUE) && a_stream_passes(poison(MAX_VALUE), 0));
    }

    proptest! {
        #[test]
        fn poison_ends_every_wait_and_remembers(last in 0..=MAX_VALUE, v in 0..=MAX_VALUE) {
            prop_assert_eq!(read(poison(last)), Reading::Poisoned(last));
            prop_assert!(a_stream_passes(poison(last), v));
            prop_assert_ne!(poison(last) as u32, last as u32);
            prop_assert_eq!(a_stream_passes(last, v), last >= v);
        }
    }
}
