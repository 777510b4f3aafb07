//! Cases, units and plans: what is measured, in which unit, and how often.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value},
};

use crate::{Error, Failure};

/// A case: something that is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The name, a few words; goals refer to rivals by name.
    pub name: String,
    /// The unit of its samples.
    pub unit: Unit,
    /// The varied parameters, such as sizes and numbers of readers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
}

impl Case {
    /// Returns a case without parameters.
    pub fn new(name: impl Into<String>, unit: Unit) -> Self {
        Self { name: name.into(), unit, parameters: BTreeMap::new() }
    }

    /// Sets a parameter.
    #[must_use]
    pub fn parameter(mut self, key: impl Into<String>, value: impl fmt::Display) -> Self {
        self.parameters.insert(key.into(), value.to_string());
        self
    }
}

/// Formats as `name [key=value, key=value]`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if !self.parameters.is_empty() {
            let list: Vec<_> = self.parameters.iter().map(|(key, value)| format!("{key}={value}")).collect();
            write!(f, " [{}]", list.join(", "))?;
        }
        Ok(())
    }
}

/// The unit of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Unit {
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// Microseconds.
    #[serde(rename = "us")]
    Microseconds,
    /// Milliseconds.
    #[serde(rename = "ms")]
    Milliseconds,
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// 10⁹ bytes per second.
    #[serde(rename = "GB/s")]
    GigabytesPerSecond,
    /// Operations per second.
    #[serde(rename = "1/s")]
    PerSecond,
    /// Bytes.
    #[serde(rename = "B")]
    Bytes,
    /// A number of things.
    #[serde(rename = "count")]
    Count,
}

impl Unit {
    /// Returns the symbol of the unit.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
            Self::GigabytesPerSecond => "GB/s",
            Self::PerSecond => "1/s",
            Self::Bytes => "B",
            Self::Count => "count",
        }
    }

    /// Returns a duration in this unit, or `None` if this is not a unit of time.
    pub fn of_duration(self, duration: Duration) -> Option<f64> {
        Some(duration.as_secs_f64() / self.seconds()?)
    }

    /// Converts a value from this unit to the unit `to`.
    pub fn convert(self, value: f64, to: Self) -> Result<f64, Error> {
        if self == to {
            return Ok(value);
        }
        match (self.seconds(), to.seconds()) {
            (Some(from), Some(to)) => Ok(value * from / to),
            _ => Err(Error::Units { from: self, to }),
        }
    }

    /// Returns how many seconds one of this unit is.
    fn seconds(self) -> Option<f64> {
        match self {
            Self::Nanoseconds => Some(1e-9),
            Self::Microseconds => Some(1e-6),
            Self::Milliseconds => Some(1e-3),
            Self::Seconds => Some(1.0),
            _ => None,
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.symbol())
    }
}

impl FromStr for Unit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let symbol = if text == "µs" { "us" } else { text };
        let unit: Result<_, value::Error> = Self::deserialize(symbol.into_deserializer());
        unit.map_err(|_| Error::UnitSyntax(text.to_owned()))
    }
}

/// How often, and in which turns, the cases of a comparison are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Calls of each case before counting starts.
    pub warm_up: usize,
    /// Samples taken of each case.
    pub samples: usize,
    /// Samples taken of one case before the turn of the next case. Small blocks spread a drift of the
    /// machine evenly over all cases; larger blocks let each case run with warm caches.
    pub block: usize,
}

impl Plan {
    /// Returns a plan with `samples` samples of each case, a tenth as many calls to warm up, and at
    /// least ten turns of at most 50 samples.
    pub fn new(samples: usize) -> Self {
        Self { warm_up: samples.div_ceil(10), samples, block: samples.div_ceil(10).clamp(1, 50) }
    }

    /// Sets how many calls of each case come before counting starts.
    #[must_use]
    pub fn warm_up(mut self, calls: usize) -> Self {
        self.warm_up = calls;
        self
    }

    /// Sets how many samples of one case are taken before the next has its turn.
    #[must_use]
    pub fn block(mut self, samples: usize) -> Self {
        self.block = samples.max(1);
        self
    }
}

/// Returns one sample for each call, in the unit of its case.
///
/// It may do any work outside of the measured part: prepare, clean up, read a GPU's clock. Samplers
/// of one comparison can share state through a [`std::cell::RefCell`], because they are called in
/// turns, never at the same time.
pub type Sampler<'a> = Box<dyn FnMut() -> Result<f64, Failure> + 'a>;

/// Returns a sampler whose samples are the time that `work` takes, in `unit`.
///
/// The two clock readings cost about 50 ns, which is part of each sample. For work of less than a
/// few microseconds, write a sampler that repeats the work and divides.
pub fn timed<'a>(unit: Unit, mut work: impl FnMut() -> Result<(), Failure> + 'a) -> Sampler<'a> {
    Box::new(move || {
        let start = Instant::now();
        work()?;
        let elapsed = start.elapsed();
        unit.of_duration(elapsed).ok_or_else(|| format!("{unit} is not a unit of time; use ns, us, ms or s").into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_time_convert_and_others_do_not() {
        let us = Unit::Microseconds;
        assert!((us.convert(1500.0, Unit::Milliseconds).unwrap() - 1.5).abs() < 1e-12);
        assert_eq!(us.convert(7.0, us).unwrap(), 7.0);
        let refused = Unit::GigabytesPerSecond.convert(1.0, us).unwrap_err();
        assert!(refused.to_string().contains("GB/s"), "{refused}");
    }

    #[test]
    fn units_are_read_as_they_are_written() {
        for symbol in ["ns", "us", "ms", "s", "GB/s", "1/s", "B", "count"] {
            assert_eq!(symbol.parse::<Unit>().unwrap().symbol(), symbol);
            let json = serde_json::to_string(&symbol.parse::<Unit>().unwrap()).unwrap();
            assert_eq!(json, format!("\"{symbol}\""));
        }
        assert_eq!("µs".parse::<Unit>().unwrap(), Unit::Microseconds);
        assert!("fortnight".parse::<Unit>().is_err());
    }

    #[test]
    fn a_case_prints_its_parameters_in_order() {
        let case = Case::new("open", Unit::Microseconds).parameter("size", "2 MiB").parameter("readers", 4);
        assert_eq!(case.to_string(), "open [readers=4, size=2 MiB]");
    }

    #[test]
    fn timing_in_a_unit_without_time_fails() {
        let failure = timed(Unit::Count, || Ok(()))().unwrap_err();
        assert!(failure.to_string().contains("not a unit of time"));
    }

    #[test]
    fn timing_counts_at_least_the_time_slept() {
        let mut sampler = timed(Unit::Milliseconds, || {
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        });
        assert!(sampler().unwrap() >= 2.0);
    }
}
