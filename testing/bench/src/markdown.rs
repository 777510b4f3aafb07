//! The report as a page for `docs/measurements/`.

use partywall_measure::{ComparisonResult, Measurement, Report};

/// Returns the report as a page.
pub(crate) fn page(report: &Report) -> String {
    let machine = &report.machine;
    let commit = report.commit.as_deref().unwrap_or("unknown");
    let mut lines = vec![
        format!("# {}", report.title),
        String::new(),
        format!("{}, commit `{commit}`.", report.date),
        format!(
            "{}, {} cores, {:.0} GiB, Linux {}.",
            machine.cpu,
            machine.cores,
            machine.memory as f64 / f64::from(1 << 30),
            machine.kernel
        ),
    ];
    if let Some(gpu) = &machine.gpu {
        lines.push(format!("{gpu}, driver {}.", machine.driver.as_deref().unwrap_or("unknown")));
    }
    lines.push(String::new());
    lines.push(
        "The floor is the least that this machine could take, measured in turns with the case above it. *Of case* is the \
         median of a floor or rival over that of the case. Goals are held against p50."
            .to_owned(),
    );
    lines.push(String::new());
    lines.push("| case | n | min | p50 | p90 | p99 | p99.9 | max | unit | of case | of floor | goal | |".to_owned());
    lines.push("|---|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|---|---|".to_owned());
    for result in &report.comparisons {
        lines.push(measured(result));
        let beside = |role, other| {
            let of_case =
                result.of_case(other).map_or(String::new(), |ratio| format!("{}x", partywall_measure::figure(ratio)));
            row(role, other, [&of_case, "", "", ""])
        };
        lines.extend(result.floor.iter().map(|floor| beside("floor: ", floor)));
        lines.extend(result.rivals.iter().map(|rival| beside("rival: ", rival)));
    }
    if !report.notes.is_empty() {
        lines.push(String::new());
        lines.extend(report.notes.iter().map(|note| format!("- {note}")));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn measured(result: &ComparisonResult) -> String {
    let ratio = result.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}x"));
    let (goal, outcome) = match &result.verdict {
        Some(verdict) => {
            let limit = figure(verdict.limit);
            (format!("{} ({limit})", verdict.goal), if verdict.met { "met" } else { "**missed**" })
        }
        None => (String::new(), ""),
    };
    row("", &result.measured, ["", &ratio, &goal, outcome])
}

fn row(role: &str, measurement: &Measurement, judged: [&str; 4]) -> String {
    let p = &measurement.percentiles;
    let figures = [p.min, p.p50, p.p90, p.p99, p.p999, p.max].map(figure).join(" | ");
    let case = &measurement.case;
    let unit = measurement.case.unit;
    format!("| {role}{case} | {} | {figures} | {unit} | {} |", p.n, judged.join(" | "))
}

/// Formats a number with about three significant digits.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use partywall_measure::{Case, Comparison, Machine, Plan, Unit};

    use super::*;

    #[test]
    fn a_missed_goal_stands_out() {
        let result = Comparison::new(Case::new("open", Unit::Microseconds), Box::new(|| Ok(130.0)))
            .floor(Case::new("raw", Unit::Microseconds), Box::new(|| Ok(65.0)))
            .goal("<= floor + 60 us".parse().unwrap())
            .run(Plan::new(4))
            .unwrap();
        let mut report = Report::new("an example", Machine::detect(None, None));
        report.push(result);
        report.note("made up");
        let page = page(&report);
        assert!(
            page.contains(
                "| open | 4 | 130 | 130 | 130 | 130 | 130 | 130 | us |  | 2.00x | <= floor + 60 us (125) | **missed** |"
            ),
            "{page}"
        );
        assert!(page.contains("\n| floor: raw | 4 | 65.0 |") && page.contains("| us | 0.5000x |"), "{page}");
        assert!(page.ends_with("- made up\n"), "{page}");
    }
}
