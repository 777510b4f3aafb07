//! Goals: bounds for the median of a measured case.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Unit};

/// A bound on the median of a measured case.
///
/// Written as `<=` or `>=` and then, joined by `+`, at most one reference and at most one
/// constant: `<= 1.3x floor`, `<= floor + 60 us`, `>= 0.99x floor`, `<= 20 ms`,
/// `<= 0.5x torch.multiprocessing`. A reference is `floor` or the name of a rival.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    bound: Bound,
    /// A factor and the name of the case whose median it multiplies. At least one of this and
    /// `constant` is set; parsing ensures that.
    reference: Option<(f64, String)>,
    constant: Option<(f64, Unit)>,
}

/// The side of the limit on which a median must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
    /// Smaller is better, as with times.
    AtMost,
    /// Larger is better, as with rates.
    AtLeast,
}

/// Whether a goal was met.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The goal as it was written.
    pub goal: String,
    /// The limit in this run, in the unit of the measured case.
    pub limit: f64,
    /// True if the median is within the limit.
    pub met: bool,
}

impl Goal {
    /// Returns the name to which the goal refers: `floor`, or that of a rival.
    pub fn reference(&self) -> Option<&str> {
        self.reference.as_ref().map(|(_, name)| name.as_str())
    }

    /// Checks the median `p50`, measured in `unit`, against this goal. `median_of` returns the median
    /// and the unit of the floor or of a rival by name.
    pub fn judge(
        &self,
        p50: f64,
        unit: Unit,
        median_of: impl FnOnce(&str) -> Result<(f64, Unit), Error>,
    ) -> Result<Verdict, Error> {
        let mut limit = 0.0;
        if let Some((factor, name)) = &self.reference {
            let (median, its_unit) = median_of(name)?;
            limit += factor * its_unit.convert(median, unit)?;
        }
        if let Some((value, its_unit)) = self.constant {
            limit += its_unit.convert(value, unit)?;
        }
        Ok(Verdict {
            goal: self.to_string(),
            limit,
            met: match self.bound {
                Bound::AtMost => p50 <= limit,
                Bound::AtLeast => p50 >= limit,
            },
        })
    }
}

impl FromStr for Goal {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |reason: String| Error::GoalSyntax { text: text.to_owned(), reason };
        let trimmed = text.trim();
        let (bound, terms) = if let Some(rest) = trimmed.strip_prefix("<=") {
            (Bound::AtMost, rest)
        } else if let Some(rest) = trimmed.strip_prefix(">=") {
            (Bound::AtLeast, rest)
        } else {
            return Err(wrong("it does not start with <= or >=".to_owned()));
        };
        let mut goal = Self { bound, reference: None, constant: None };
        for term in terms.split('+').map(str::trim) {
            match parse_term(term).map_err(wrong)? {
                Term::Reference(..) if goal.reference.is_some() => {
                    return Err(wrong("it names more than one case".to_owned()));
                }
                Term::Constant(..) if goal.constant.is_some() => {
                    return Err(wrong("it has more than one constant".to_owned()));
                }
                Term::Reference(factor, name) => goal.reference = Some((factor, name)),
                Term::Constant(value, unit) => goal.constant = Some((value, unit)),
            }
        }
        Ok(goal)
    }
}

enum Term {
    Reference(f64, String),
    Constant(f64, Unit),
}

fn parse_term(term: &str) -> Result<Term, String> {
    let (first, rest) = match term.split_once(char::is_whitespace) {
        Some((first, rest)) => (first, rest.trim()),
        None => (term, ""),
    };
    if first.is_empty() {
        return Err("a term is empty".to_owned());
    }
    let factor = first.strip_suffix(['x', '×']).map(str::parse::<f64>);
    match (factor, first.parse::<f64>()) {
        (Some(Ok(factor)), _) if factor.is_finite() => match rest {
            "" => Err(format!("nothing follows '{first}'")),
            name => Ok(Term::Reference(factor, name.to_owned())),
        },
        (_, Ok(value)) if value.is_finite() => match rest.parse::<Unit>() {
            Ok(unit) => Ok(Term::Constant(value, unit)),
            Err(error) => Err(format!("after '{first}': {error}")),
        },
        _ => Ok(Term::Reference(1.0, term.to_owned())),
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.bound {
            Bound::AtMost => "<=",
            Bound::AtLeast => ">=",
        })?;
        match &self.reference {
            Some((factor, name)) if *factor == 1.0 => write!(f, " {name}")?,
            Some((factor, name)) => write!(f, " {factor}x {name}")?,
            None => {}
        }
        if let Some((value, unit)) = self.constant {
            if self.reference.is_some() {
                f.write_str(" +")?;
            }
            write!(f, " {value} {unit}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(goal: &str, p50: f64, floor: f64) -> Verdict {
        let goal: Goal = goal.parse().unwrap();
        goal.judge(p50, Unit::Microseconds, |name| {
            assert_eq!(name, "floor");
            Ok((floor, Unit::Microseconds))
        })
        .unwrap()
    }

    #[test]
    fn goals_are_printed_as_they_are_written() {
        for text in [
            "<= 1.3x floor",
            "<= floor + 60 us",
            ">= 0.99x floor",
            "<= 20 ms",
            "<= 0.5x torch.multiprocessing, fresh",
            "<= 1.25x floor + 2 ms",
        ] {
            assert_eq!(text.parse::<Goal>().unwrap().to_string(), text);
        }
        let goal: Goal = "<=1.3× floor+60 µs".parse().unwrap();
        assert_eq!(goal.to_string(), "<= 1.3x floor + 60 us");
    }

    #[test]
    fn a_limit_is_met_by_the_value_itself() {
        let verdict = judge("<= 2x floor", 20.0, 10.0);
        assert!(verdict.met);
        assert_eq!(verdict.limit, 20.0);
        assert!(!judge("<= 2x floor", 20.1, 10.0).met);
        assert!(judge(">= 0.5x floor", 5.0, 10.0).met);
        assert!(!judge(">= 0.5x floor", 4.9, 10.0).met);
    }

    #[test]
    fn constants_are_converted_to_the_unit_of_the_case() {
        let verdict = judge("<= floor + 1 ms", 1009.0, 10.0);
        assert!(verdict.met);
        assert!((verdict.limit - 1010.0).abs() < 1e-9);
        let absolute: Goal = "<= 20 ms".parse().unwrap();
        let verdict = absolute.judge(19_999.0, Unit::Microseconds, |_| unreachable!()).unwrap();
        assert!(verdict.met);
    }

    #[test]
    fn a_goal_in_another_kind_of_unit_is_an_error() {
        let goal: Goal = "<= 3 GB/s".parse().unwrap();
        let refused = goal.judge(1.0, Unit::Microseconds, |_| unreachable!());
        assert!(matches!(refused, Err(Error::Units { .. })));
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        for (text, reason) in [
            ("floor", "does not start"),
            ("<= ", "empty"),
            ("<= 1.3x", "nothing follows"),
            ("<= 60 parsecs", "not a unit"),
            ("<= 60", "not a unit"),
            ("<= floor + rival", "more than one case"),
            ("<= 1 us + 2 us", "more than one constant"),
        ] {
            let error = text.parse::<Goal>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
