//! The streamed numbers: Fibonacci numbers, or a list of the user.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The sequence of numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Pattern {
    /// 0, 1, and then each the sum of the two before it, modulo 2⁶⁴.
    Fibonacci,
    /// These numbers, repeated. The list is not empty.
    Repeated(Vec<u64>),
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "fibonacci" {
            return Ok(Self::Fibonacci);
        }
        let numbers = text.split(',').map(|number| number.trim().parse()).collect::<Result<_, _>>();
        numbers.map(Self::Repeated).map_err(|_| "use fibonacci, or comma-separated numbers: 3,1,4,1,5".to_owned())
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fibonacci => f.write_str("Fibonacci numbers"),
            Self::Repeated(numbers) => {
                let numbers: Vec<_> = numbers.iter().map(ToString::to_string).collect();
                write!(f, "{}, repeated", numbers.join(", "))
            }
        }
    }
}

/// An iterator over the numbers of a pattern.
#[derive(Debug, Clone)]
pub(super) struct Numbers {
    pattern: Pattern,
    /// The index of the next number.
    at: u64,
    next: [u64; 2],
}

impl Numbers {
    pub(super) fn of(pattern: &Pattern) -> Self {
        Self { pattern: pattern.clone(), at: 0, next: [0, 1] }
    }

    /// Returns the index of the next number.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Moves to this index.
    pub(super) fn from(&mut self, index: u64) -> &mut Self {
        if index < self.at {
            *self = Self::of(&self.pattern);
        }
        while self.at < index {
            self.next();
        }
        self
    }
}

impl Iterator for Numbers {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let number = match &self.pattern {
            Pattern::Fibonacci => {
                let [number, next] = self.next;
                self.next = [next, number.wrapping_add(next)];
                number
            }
            Pattern::Repeated(numbers) => numbers[(self.at % numbers.len() as u64) as usize],
        };
        self.at += 1;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_fibonacci_or_the_given_numbers() {
        let mut numbers = Numbers::of(&Pattern::Fibonacci);
        assert_eq!(numbers.by_ref().take(8).collect::<Vec<_>>(), [0, 1, 1, 2, 3, 5, 8, 13]);
        assert_eq!(numbers.from(6).next(), Some(8), "back");
        assert_eq!(numbers.from(94).next(), Some(1_293_530_146_158_671_551), "beyond 64 bits");
        let own: Pattern = "3, 1,4".parse().unwrap();
        assert_eq!(Numbers::of(&own).take(5).collect::<Vec<_>>(), [3, 1, 4, 3, 1]);
        assert_eq!("fibonacci".parse(), Ok(Pattern::Fibonacci));
        assert!("".parse::<Pattern>().is_err() && "1,x".parse::<Pattern>().is_err());
    }
}
