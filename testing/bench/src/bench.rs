//! Tools that each subject gets from the program: plans, the report, a stopwatch.

use std::{
    fs,
    time::{Duration, Instant},
};

use partywall_measure::{Comparison, Failure, Plan, Report};

/// The options of a run, and the report that it writes.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) quick: bool,
    /// True if rivals are measured too.
    pub(crate) peers: bool,
    pub(crate) report: Report,
}

impl Bench {
    /// Returns a plan of `samples` samples, or a tenth of them.
    pub(crate) fn plan(&self, samples: usize) -> Plan {
        Plan::new(self.fewer(samples))
    }

    /// Returns `number`, or a tenth of it for a quick run.
    pub(crate) fn fewer(&self, number: usize) -> usize {
        if self.quick { number.div_ceil(10) } else { number }
    }

    /// Prints a failure and notes it in the report; the run continues without the failed part.
    pub(crate) fn leave_out(&mut self, failure: &Failure) {
        eprintln!("  left out: {failure}");
        self.report.note(format!("left out: {failure}"));
    }

    /// Takes the samples, prints the median and stores the result in the report.
    pub(crate) fn run(&mut self, comparison: Comparison<'_>, plan: Plan) -> Result<(), Failure> {
        let result = comparison.run(plan)?;
        let measured = &result.measured;
        let unit = result.measured.case.unit;
        let ratio = result.ratio.map_or(String::new(), |ratio| format!(", {ratio:.2}x its floor"));
        eprintln!("  {}: p50 {:.2} {unit}{ratio}", measured.case, measured.percentiles.p50);
        self.report.push(result);
        Ok(())
    }
}

/// Returns how long `work` took, and its result. Dropping the result later is not counted.
pub(crate) fn clocked<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(Duration, T), Failure>
where
    Failure: From<E>,
{
    let start = Instant::now();
    let result = work();
    let elapsed = start.elapsed();
    Ok((elapsed, result?))
}

/// Returns a duration in microseconds.
pub(crate) fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Returns a duration in milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Returns the kernel's load average of the last minute.
pub(crate) fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("unknown").to_owned()
}

/// Returns a size for people: in the largest unit of which it is a multiple.
pub(crate) fn size(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}
