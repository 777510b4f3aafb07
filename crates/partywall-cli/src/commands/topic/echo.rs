//! `partywall topic echo`. With `--json` each line is an object:
//!
//! - for a sample `event` (`sample`), `position`, `publisher`, `sequence`, `age_ns`, `missed`, `lag`, `dtype`, `shape`,
//!   `bytes`, `header` (in hexadecimal digits), `values` (the first ones; bytes if JSON has no numbers for the type),
//!   `values_left_out` (how many more there are), `error` (why the sample is not complete, or null), `rate` (recent
//!   samples per second);
//! - at the end `event` (`end`), `samples`, `missed`, `failed`, `bytes`, `seconds`, `rate`, `ages` (of the samples, see
//!   [`describe::control::ages`]).

use std::{
    collections::VecDeque,
    fmt::Write,
    time::{Duration, Instant},
};

use partywall::{Sample, Subscriber, bytes};
use serde_json::{Value, json};

use super::{Receiver, Receiving, bytes_of, is_lost, values};
use crate::{
    Context, describe,
    failure::Failure,
    output::Output,
    text::{count, short_time},
};

/// Runs the command.
pub(super) fn run(context: &Context, receiving: &Receiving) -> Result<(), Failure> {
    let topic = receiving.open(context)?;
    let subscribed = receiving.subscribe(&topic)?;
    let output = context.output();
    let mut echo = Echo { output, lately: VecDeque::new(), samples: 0, missed: 0, failed: 0, bytes: 0 };
    let took = receiving.receive(context, &topic, &subscribed, &mut echo)?.as_secs_f64();
    let ages = subscribed.0.stats().ages;
    let Echo { samples, missed, failed, bytes: total, .. } = echo;
    let rate = samples as f64 / took.max(1e-9);
    output.value(&json!({
        "event": "end",
        "samples": samples,
        "missed": missed,
        "failed": failed,
        "bytes": total,
        "seconds": took,
        "rate": rate,
        "ages": describe::control::ages(&ages),
    }));
    let samples = count(samples, "sample");
    let each_second = bytes((total as f64 / took.max(1e-9)) as u64);
    if ages.count > 0 {
        let [p50, p99, max] = [ages.p50, ages.p99, ages.max].map(short_time);
        output.note(format!("age when received: median {p50}, p99 {p99}, at most {max}"));
    }
    output.note(format!("{samples} in {took:.1} s: {rate:.1}/s, {each_second}/s; {missed} missed, {failed} failed"));
    Ok(())
}

struct Echo {
    output: Output,
    /// The arrival times of the samples within [`LATELY`].
    lately: VecDeque<Instant>,
    samples: u64,
    missed: u64,
    failed: u64,
    bytes: u64,
}

impl Receiver for Echo {
    fn sample(&mut self, sample: Sample, subscriber: &Subscriber) -> Result<(), Failure> {
        let age = sample.age();
        let mut head = Vec::new();
        let error = match bytes_of(&sample, values::head(sample.dtype()), &mut head) {
            Ok(()) => None,
            Err(error) if is_lost(&error) => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        self.samples += 1;
        self.missed += sample.missed();
        self.failed += u64::from(error.is_some());
        self.bytes += sample.len();
        let values = if error.is_some() { Vec::new() } else { values::first(sample.dtype(), &head) };
        let details = Details {
            age,
            lag: subscriber.stats().lag,
            header: sample.header(),
            left_out: values::left_out(sample.dtype(), sample.len(), &values),
            values,
            rate: self.rate(),
            error,
        };
        self.output.line(line(&sample, &details));
        self.output.value(&value(&sample, &details));
        Ok(sample.release()?)
    }
}

impl Echo {
    /// Returns the recent number of samples per second.
    fn rate(&mut self) -> f64 {
        let now = Instant::now();
        self.lately.push_back(now);
        while self.lately.front().is_some_and(|first| now - *first > LATELY) {
            self.lately.pop_front();
        }
        match (self.lately.front(), self.lately.len()) {
            (Some(first), n) if n > 1 => (n - 1) as f64 / (now - *first).as_secs_f64().max(1e-9),
            _ => 0.0,
        }
    }
}

/// The facts of a sample beyond its own fields.
struct Details {
    age: Option<Duration>,
    lag: u64,
    header: Vec<u8>,
    values: Vec<Value>,
    /// How many values there are beyond these.
    left_out: u64,
    error: Option<String>,
    rate: f64,
}

fn line(sample: &Sample, details: &Details) -> String {
    let mut line = format!(
        "{:>8}  publisher {} #{}  {} {:?}  {:>5.1}/s  lag {}  age {}",
        sample.position(),
        sample.publisher(),
        sample.sequence(),
        sample.dtype(),
        sample.shape(),
        details.rate,
        details.lag,
        details.age.map_or("unknown".to_owned(), |age| short_time(age.as_nanos() as u64)),
    );
    // Writing to a string cannot fail.
    if sample.missed() > 0 {
        let _ = write!(line, "  {} missed", sample.missed());
    }
    if !details.header.is_empty() {
        let _ = write!(line, "  header {:?}", String::from_utf8_lossy(&details.header));
    }
    let rest = details.error.clone().unwrap_or_else(|| values::line(&details.values, details.left_out));
    let _ = write!(line, "  {rest}");
    line
}

fn value(sample: &Sample, details: &Details) -> Value {
    json!({
        "event": "sample",
        "position": sample.position(),
        "publisher": sample.publisher(),
        "sequence": sample.sequence(),
        "age_ns": details.age.map(|age| age.as_nanos() as u64),
        "missed": sample.missed(),
        "lag": details.lag,
        "dtype": sample.dtype().name(),
        "shape": sample.shape(),
        "bytes": sample.len(),
        "header": super::file::hex(&details.header),
        "values": details.values,
        "values_left_out": details.left_out,
        "error": details.error,
        "rate": details.rate,
    })
}

/// The period over which a rate is measured.
const LATELY: Duration = Duration::from_secs(1);
