//! Compares two reports of one machine: which cases have changed beyond noise.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::{Measurement, Percentiles, Report, Unit, bytes};

/// What differs between two reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Differences {
    /// Cases that have changed: their ranges from p25 to p75, which contain half of the samples, do not overlap.
    pub changed: Vec<Change>,
    /// How many cases have not changed.
    pub unchanged: usize,
    /// Cases that are in only one of the reports.
    pub missing: Vec<String>,
}

/// A case that has changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The case.
    pub case: String,
    /// The unit of the medians.
    pub unit: Unit,
    /// The median of the earlier report.
    pub before: f64,
    /// The median of the later report.
    pub after: f64,
}

impl Report {
    /// Returns how this report, the later one, differs from an earlier one.
    pub fn differences(&self, earlier: &Self) -> Differences {
        let before = earlier.measurements();
        let after = self.measurements();
        let mut differences = Differences { changed: Vec::new(), unchanged: 0, missing: Vec::new() };
        for (case, now) in &after {
            match before.get(case) {
                None => differences.missing.push(case.clone()),
                Some(then) if overlap(&then.percentiles, &now.percentiles) => differences.unchanged += 1,
                Some(then) => differences.changed.push(Change {
                    case: case.clone(),
                    unit: now.case.unit,
                    before: then.percentiles.p50,
                    after: now.percentiles.p50,
                }),
            }
        }
        differences.missing.extend(before.keys().filter(|case| !after.contains_key(*case)).cloned());
        differences
    }

    /// Returns why two reports are not comparable, if they are of two machines. The driver and the kernel may differ,
    /// because users compare those.
    pub fn other_machine(&self, other: &Self) -> Option<String> {
        let described = |report: &Self| {
            let machine = &report.machine;
            let gpu = machine.gpu.as_deref().unwrap_or("no GPU");
            // Rounded, because the amount of memory that the kernel reserves varies.
            let memory = (machine.memory as f64 / f64::from(1 << 30)).round();
            format!("{}, {} cores, {memory} GiB, {gpu}", machine.cpu, machine.cores)
        };
        let one = described(self);
        let two = described(other);
        (one != two).then(|| format!("one is of {one}, the other of {two}"))
    }

    /// Returns each case once, by a unique name.
    fn measurements(&self) -> BTreeMap<String, &Measurement> {
        let mut all = BTreeMap::new();
        for result in &self.comparisons {
            let measured = result.measured.case.to_string();
            for beside in result.floor.iter().chain(&result.rivals) {
                all.insert(format!("{measured}: {}", beside.case), beside);
            }
            all.insert(measured, &result.measured);
        }
        all
    }
}

fn overlap(one: &Percentiles, two: &Percentiles) -> bool {
    one.p25 <= two.p75 && two.p25 <= one.p75
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Change { case, unit, before, after } in &self.changed {
            let value = |value: f64| match unit {
                Unit::Bytes => bytes(value),
                _ => format!("{value:.2} {unit}"),
            };
            write!(f, "{case}: {} -> {}", value(*before), value(*after))?;
            // Nothing is a percentage of zero bytes.
            if *before > 0.0 {
                write!(f, " ({:+.1} %)", (after / before - 1.0) * 100.0)?;
            }
            writeln!(f)?;
        }
        for case in &self.missing {
            writeln!(f, "{case}: only in one of the reports")?;
        }
        write!(f, "{} changed, {} not", self.changed.len(), self.unchanged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Case, Comparison, Machine, Plan};

    fn report(of: &[(&str, [f64; 4])]) -> Report {
        let mut report = Report::new("an example", Machine::detect(None, None));
        for (name, samples) in of {
            let mut samples = samples.iter().copied().cycle();
            let sampler = Box::new(move || Ok(samples.next().unwrap()));
            let comparison = Comparison::new(Case::new(*name, Unit::Microseconds), sampler);
            report.push(comparison.run(Plan::new(4).warm_up(0)).unwrap());
        }
        report
    }

    // Holds 334.
    #[test]
    fn only_ranges_that_do_not_overlap_have_changed() {
        let before = report(&[("a", [1.0, 2.0, 3.0, 4.0]), ("b", [1.0, 2.0, 3.0, 4.0]), ("c", [1.0; 4])]);
        let after = report(&[("a", [2.0, 3.0, 4.0, 90.0]), ("b", [5.0, 6.0, 7.0, 8.0]), ("d", [1.0; 4])]);
        let differences = after.differences(&before);
        let changed = Change { case: "b".to_owned(), unit: Unit::Microseconds, before: 2.0, after: 6.0 };
        assert_eq!((&differences.changed, differences.unchanged), (&vec![changed], 1));
        assert_eq!(differences.missing, ["d", "c"]);
        assert!(differences.to_string().starts_with("b: 2.00 us -> 6.00 us (+200.0 %)\n"), "{differences}");
        assert_eq!(before.differences(&before).changed, []);
    }

    #[test]
    fn bytes_have_their_unit_and_zero_has_no_percentage() {
        let change = |before, after| Change { case: "a".to_owned(), unit: Unit::Bytes, before, after };
        let changed = vec![change(4096.0, 6144.0), change(0.0, 128.0)];
        let text = Differences { changed, unchanged: 0, missing: Vec::new() }.to_string();
        assert_eq!(text, "a: 4 KiB -> 6 KiB (+50.0 %)\na: 0 B -> 128 B\n2 changed, 0 not");
    }

    #[test]
    fn machines_are_distinguished_by_what_makes_them_fast() {
        let one = report(&[]);
        let mut other = one.clone();
        other.machine.driver = Some("590.1".to_owned());
        other.machine.kernel = "7.0".to_owned();
        assert_eq!(one.other_machine(&other), None);
        other.machine.gpu = Some("Some GPU".to_owned());
        assert!(one.other_machine(&other).is_some_and(|why| why.contains("no GPU") && why.contains("Some GPU")));
    }
}
