//! `partywall topic hz` and `bw`: measure how many samples and bytes arrive. With `--json` each line is an object:
//!
//! - `event` (`window`, or `end` in the last line, which covers all samples), `samples`, `missed`, `seconds`, `rate`
//!   (samples per second), `bytes`, `bytes_per_second`;
//! - `gap` (seconds between two samples) and `size` (bytes of a sample), each with `min`, `mean`, `max` and `std` (the
//!   standard deviation), or null if there are no values.

use std::time::{Duration, Instant};

use partywall::{Sample, Subscriber, bytes};
use serde_json::{Value, json};

use super::{Receiver, Receiving};
use crate::{Context, failure::Failure, output::Output, text::parse_seconds};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    receiving: Receiving,
    /// Print a line about the last SECONDS, repeatedly
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_window)]
    window: Duration,
}

/// The quantity that the table shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quantity {
    /// Samples per second, and the gaps between them.
    Gaps,
    /// Bytes per second, and the sizes of samples.
    Sizes,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments, quantity: Quantity) -> Result<(), Failure> {
    let topic = arguments.receiving.open(context)?;
    let receiving = arguments.receiving.subscribe(&topic)?;
    let now = Instant::now();
    let output = context.output();
    let window = arguments.window;
    let last = None;
    let mut meter = Meter { output, quantity, window, last, current: Tally::new(now), all: Tally::new(now), lines: 0 };
    arguments.receiving.receive(context, &topic, &receiving, &mut meter)?;
    meter.all.ended = Instant::now();
    let Meter { all, lines, .. } = meter;
    if lines == 0 {
        quantity.heading(output);
    }
    output.line(quantity.line("all", &all));
    output.value(&all.value("end"));
    Ok(())
}

/// Counts the received samples.
struct Meter {
    output: Output,
    quantity: Quantity,
    window: Duration,
    /// When the last sample arrived.
    last: Option<Instant>,
    current: Tally,
    all: Tally,
    lines: u64,
}

impl Receiver for Meter {
    fn sample(&mut self, sample: Sample, _: &Subscriber) -> Result<(), Failure> {
        let now = Instant::now();
        let gap = self.last.replace(now).map(|last| (now - last).as_secs_f64());
        for tally in [&mut self.current, &mut self.all] {
            tally.samples += 1;
            tally.missed += sample.missed();
            tally.bytes += sample.len();
            tally.sizes.add(sample.len() as f64);
            gap.into_iter().for_each(|gap| tally.gaps.add(gap));
        }
        Ok(sample.release()?)
    }

    fn idle(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if now - self.current.began < self.window {
            return Ok(());
        }
        let mut whole = std::mem::replace(&mut self.current, Tally::new(now));
        whole.ended = now;
        if self.lines.is_multiple_of(HEADINGS) {
            self.quantity.heading(self.output);
        }
        self.lines += 1;
        self.output.line(self.quantity.line("", &whole));
        self.output.value(&whole.value("window"));
        Ok(())
    }

    fn moment(&self) -> Duration {
        self.window.saturating_sub(self.current.began.elapsed())
    }
}

/// The samples received within some time.
struct Tally {
    began: Instant,
    ended: Instant,
    samples: u64,
    missed: u64,
    bytes: u64,
    gaps: Spread,
    sizes: Spread,
}

impl Tally {
    fn new(began: Instant) -> Self {
        let gaps = Spread::default();
        let sizes = Spread::default();
        Self { began, ended: began, samples: 0, missed: 0, bytes: 0, gaps, sizes }
    }

    fn per_second(&self, number: u64) -> f64 {
        number as f64 / (self.ended - self.began).as_secs_f64().max(1e-9)
    }

    fn value(&self, event: &str) -> Value {
        json!({
            "event": event,
            "samples": self.samples,
            "missed": self.missed,
            "seconds": (self.ended - self.began).as_secs_f64(),
            "rate": self.per_second(self.samples),
            "bytes": self.bytes,
            "bytes_per_second": self.per_second(self.bytes),
            "gap": self.gaps.value(),
            "size": self.sizes.value(),
        })
    }
}

/// The minimum, maximum, mean and standard deviation of numbers, by Welford's method.
#[derive(Debug, Default, Clone, Copy)]
struct Spread {
    count: u64,
    min: f64,
    max: f64,
    mean: f64,
    squares: f64,
}

impl Spread {
    fn add(&mut self, number: f64) {
        self.count += 1;
        (self.min, self.max) =
            if self.count == 1 { (number, number) } else { (self.min.min(number), self.max.max(number)) };
        let off = number - self.mean;
        self.mean += off / self.count as f64;
        self.squares += off * (number - self.mean);
    }

    /// Returns the smallest, mean and largest value and the standard deviation.
    fn numbers(&self) -> Option<[f64; 4]> {
        let std = (self.squares / self.count as f64).sqrt();
        (self.count > 0).then_some([self.min, self.mean, self.max, std])
    }

    fn value(&self) -> Value {
        self.numbers()
            .map_or(Value::Null, |[min, mean, max, std]| json!({ "min": min, "mean": mean, "max": max, "std": std }))
    }
}

impl Quantity {
    fn heading(self, output: Output) {
        let (rate, of) = match self {
            Self::Gaps => ("RATE", "GAP"),
            Self::Sizes => ("BYTES/S", "SIZE"),
        };
        let names = ["MIN", "MEAN", "MAX", "STD"].map(|name| format!("{of} {name}"));
        output.line(row("", rate, &names, "SAMPLES", "MISSED"));
    }

    fn line(self, label: &str, tally: &Tally) -> String {
        let (rate, spread) = match self {
            Self::Gaps => (format!("{:.2}/s", tally.per_second(tally.samples)), tally.gaps),
            Self::Sizes => (format!("{}/s", bytes(tally.per_second(tally.bytes) as u64)), tally.sizes),
        };
        let show = |number: f64| match self {
            Self::Gaps if number >= 1.0 => format!("{number:.2} s"),
            Self::Gaps => format!("{:.2} ms", number * 1e3),
            Self::Sizes => bytes(number.round() as u64),
        };
        let numbers = spread.numbers().map_or_else(|| std::array::from_fn(|_| "-".to_owned()), |all| all.map(show));
        row(label, &rate, &numbers, &tally.samples.to_string(), &tally.missed.to_string())
    }
}

/// Returns a line of at most 80 columns.
fn row(label: &str, rate: &str, [min, mean, max, std]: &[String; 4], samples: &str, missed: &str) -> String {
    format!("{label:<3} {rate:>12} {min:>11} {mean:>11} {max:>11} {std:>11} {samples:>7} {missed:>6}")
        .trim_end()
        .to_owned()
}

fn parse_window(text: &str) -> Result<Duration, String> {
    let window = parse_seconds(text)?;
    if window < SHORTEST { Err("use a window of at least 0.05 seconds".into()) } else { Ok(window) }
}

/// The number of lines between two headings.
const HEADINGS: u64 = 20;

/// The shortest window.
const SHORTEST: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_that_of_its_numbers() {
        let mut spread = Spread::default();
        assert_eq!((spread.numbers(), spread.value()), (None, Value::Null));
        for number in [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0] {
            spread.add(number);
        }
        assert_eq!(spread.numbers(), Some([2.0, 5.0, 9.0, 2.0]));
    }

    #[test]
    fn lines_fit_into_80_columns() {
        let began = Instant::now();
        let mut tally = Tally::new(began);
        tally.ended = began + Duration::from_secs(1);
        tally.samples = 9_999_999;
        tally.bytes = 1 << 40;
        for number in [1.0, 1023.9] {
            tally.gaps.add(number);
            tally.sizes.add(number * f64::from(1 << 30));
        }
        for quantity in [Quantity::Gaps, Quantity::Sizes] {
            let line = quantity.line("all", &tally);
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(parse_window("0.01").is_err() && parse_window("0.05").is_ok());
    }
}
