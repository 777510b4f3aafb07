//! A report as one HTML page, which loads no resources and runs no script.

use std::fmt::Write as _;

use crate::{Chart, ComparisonResult, Error, Measurement, Report, Rows, Unit, bytes, report::figure};

impl Report {
    /// Returns the report as a page: the machine, the plots, all numbers, and the JSON. The page has no script and no
    /// address, so that it looks the same as a mail attachment and from a server.
    ///
    /// # Errors
    /// [`Error::Plot`].
    pub fn page(&self) -> Result<String, Error> {
        let mut page = String::new();
        let title = text(&self.title);
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n{STYLE}</head>\n<body>\n<h1>{title}</h1>\n"
        );
        self.machine_of_the_page(&mut page);
        for note in &self.notes {
            let _ = writeln!(page, "<p class=\"note\">{}</p>", text(note));
        }
        page.push_str(
            "<p>In a plot over sizes or processes, a line connects the medians, and the bar at each of them contains half of its samples. The measured case \
             is a solid line, its floor and rivals are dashed lines. Both axes are logarithmic. All cases of a plot were \
             measured in turns. In a plot of rows, a point is a median and its bar contains half of all samples.</p>\n\
             <p>In a table, n is the number of samples; p25 and p75 enclose half of them, p50 is the median. <i>Of floor</i>: the \
             median of the case over that of its floor, the least that achieves the same. <i>Of case</i>: the median of a floor, or of \
             what stands beside a case, over that of the case.</p>\n",
        );
        let charts = self.charts();
        let questions = self.questions();
        let is_asked = |chart: &Chart| questions.iter().any(|(question, _)| *question == Some(chart.title.as_str()));
        for chart in charts.iter().filter(|chart| !is_asked(chart)) {
            figure_of_the_page(&mut page, &chart.svg()?);
        }
        for (question, results) in &questions {
            if let Some(question) = question {
                let _ = writeln!(page, "<h2>{}</h2>", text(&capital(question)));
            }
            for chart in charts.iter().filter(|chart| Some(chart.title.as_str()) == *question) {
                figure_of_the_page(&mut page, &chart.svg()?);
            }
            if let Some(rows) = question.and_then(|_| Rows::of(results)) {
                figure_of_the_page(&mut page, &rows.svg()?);
            }
            numbers_of_the_page(&mut page, results, question.is_some());
        }
        let json = serde_json::to_string_pretty(self).unwrap_or_default();
        let _ = write!(
            page,
            "<details><summary>The report as JSON</summary>\n<pre>{}</pre></details>\n</body>\n</html>\n",
            text(&json)
        );
        Ok(page)
    }

    fn machine_of_the_page(&self, page: &mut String) {
        let machine = &self.machine;
        let memory = format!("{:.1} GiB", machine.memory as f64 / f64::from(1 << 30));
        let cores = machine.cores.to_string();
        let rows = [
            ("date", Some(&self.date)),
            ("commit", self.commit.as_ref()),
            ("GPU", machine.gpu.as_ref()),
            ("driver", machine.driver.as_ref()),
            ("processor", Some(&machine.cpu)),
            ("cores", Some(&cores)),
            ("memory", Some(&memory)),
            ("Linux", Some(&machine.kernel)),
        ];
        page.push_str("<table class=\"machine\">\n");
        for (name, value) in rows {
            if let Some(value) = value {
                let _ = writeln!(page, "<tr><th>{name}</th><td>{}</td></tr>", text(value));
            }
        }
        page.push_str("</table>\n");
    }
}

fn figure_of_the_page(page: &mut String, svg: &str) {
    let _ = writeln!(page, "<figure>\n{svg}</figure>");
}

/// Appends the table of some results; `for` has a column of its own if they answer one question.
fn numbers_of_the_page(page: &mut String, results: &[&ComparisonResult], of_a_question: bool) {
    page.push_str("<table>\n<tr><th>case</th>");
    let headings = ["for", "n", "min", "p25", "p50", "p75", "p90", "p99", "max", "unit", "of case", "of floor"];
    for heading in headings.iter().skip(usize::from(!of_a_question)) {
        let _ = write!(page, "<th>{heading}</th>");
    }
    if results.iter().any(|result| result.verdict.is_some()) {
        page.push_str("<th>goal for p50</th>");
    }
    page.push_str("</tr>\n");
    for result in results {
        row(page, "", &result.measured, [None, result.ratio], of_a_question);
        if let Some(judgement) = result.judgement() {
            let _ = write!(page, "<td>{}</td>", text(&judgement));
        }
        page.push_str("</tr>\n");
        if let Some(floor) = &result.floor {
            row(page, "floor: ", floor, [result.of_case(floor), None], of_a_question);
            page.push_str("</tr>\n");
        }
        for rival in &result.rivals {
            row(page, "beside it: ", rival, [result.of_case(rival), None], of_a_question);
            page.push_str("</tr>\n");
        }
    }
    page.push_str("</table>\n");
}

fn row(page: &mut String, role: &str, measurement: &Measurement, ratios: [Option<f64>; 2], of_a_question: bool) {
    let Measurement { case, percentiles: p } = measurement;
    let class = if role.is_empty() { "" } else { " class=\"beside\"" };
    let name = if of_a_question { case.line() } else { case.to_string() };
    let _ = write!(page, "<tr{class}><td>{role}{}</td>", text(&name));
    if of_a_question {
        let _ = write!(page, "<td>{}</td>", text(&case.point()));
    }
    let _ = write!(page, "<td>{}</td>", p.n);
    // Bytes have a unit by their number.
    let in_bytes = case.unit == Unit::Bytes;
    for value in [p.min, p.p25, p.p50, p.p75, p.p90, p.p99, p.max] {
        let _ = write!(page, "<td>{}</td>", if in_bytes { bytes(value) } else { figure(value) });
    }
    let unit = if in_bytes { "" } else { case.unit.symbol() };
    let of_case = ratios[0].map_or(String::new(), figure);
    let of_floor = ratios[1].map_or(String::new(), |ratio| format!("{ratio:.3}"));
    let _ = write!(page, "<td>{unit}</td><td>{of_case}</td><td>{of_floor}</td>");
}

/// Returns a text with a capital letter at its beginning.
pub fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Returns a text with HTML's special characters escaped.
fn text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// In the dark the plots keep the colours of their lines except the blue, which would be too dark; white, black and the
/// grid become those of the page.
const STYLE: &str = "<style>
:root { color-scheme: light dark; --line: #d1d5db; --dim: #6b7280; --card: #ffffff }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
figure { margin: 1.5rem 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; overflow-x: auto }
svg { display: block; width: 100%; height: auto }
h2 { margin-top: 2.5rem; font-size: 1.2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: 2px 10px 2px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 15em }
.machine { font-size: 15px } .machine td { text-align: left; border: 0 } .machine tr > th { font-weight: normal; color: var(--dim); border: 0; min-width: 0 }
.beside td { color: var(--dim) } .note { color: var(--dim); margin: 0 }
@media (prefers-color-scheme: dark) {
:root { --line: #3f3f46; --dim: #a1a1aa; --card: #1c1c1f }
svg [fill=\"#FFFFFF\"] { fill: var(--card) } svg [fill=\"#000000\"] { fill: #e4e4e7 }
svg [stroke=\"#000000\"] { stroke: #a1a1aa } svg [stroke=\"#E5E7EB\"] { stroke: var(--line) }
svg [fill=\"#0072B2\"] { fill: #4aa8e0 } svg [stroke=\"#0072B2\"] { stroke: #4aa8e0 }
}
</style>
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Case, Comparison, Machine, Plan, Unit};

    /// More cases than all subjects together have.
    // Holds 333.
    #[test]
    fn large_report_is_a_page_of_less_than_a_megabyte() {
        let mut report = Report::new("an example", Machine::detect(None, None));
        for subject in 0..30 {
            for power in [12, 16, 20, 24, 28, 32] {
                let case = |name: String| Case::new(name, Unit::Microseconds).parameter("bytes", 1_u64 << power);
                let measured = Comparison::new(case(format!("subject {subject}")), Box::new(|| Ok(1.0 / 3.0)));
                let result = measured.floor(case("floor".to_owned()), Box::new(|| Ok(1.0 / 7.0)));
                let result = result.rival(case("rival".to_owned()), Box::new(|| Ok(1.0 / 11.0)));
                report.push(result.run(Plan::new(10)).unwrap());
            }
        }
        assert_eq!(report.charts().len(), 30);
        let bytes = report.page().unwrap().len();
        assert!(bytes < 1_000_000, "{bytes}");
    }

    // Holds 333.
    #[test]
    fn page_has_everything_and_loads_nothing() {
        let mut report = Report::new("<an example>", Machine::detect(Some("Some & GPU".to_owned()), None));
        for bytes in [4096, 8192] {
            let case = |name: &str| Case::new(name, Unit::Microseconds).parameter("bytes", bytes);
            let result = Comparison::new(case("open"), Box::new(|| Ok(7.5))).floor(case("mmap"), Box::new(|| Ok(2.5)));
            let result = result.goal("<= 4x floor".parse().unwrap());
            report.push(result.run(Plan::new(4)).unwrap());
        }
        for name in ["timeline", "topic"] {
            let case = |name: &str| Case::new(name, Unit::Microseconds).parameter("of", "from stream to stream");
            let result = Comparison::new(case(name), Box::new(|| Ok(7.5))).floor(case("futex"), Box::new(|| Ok(2.5)));
            report.push(result.run(Plan::new(4)).unwrap());
        }
        report.note("a \"note\"");
        let page = report.page().unwrap();
        for part in [
            "&lt;an example&gt;",
            "Some &amp; GPU",
            "a &quot;note&quot;",
            "<svg",
            "floor: mmap",
            "7.50",
            "3.000",
            "<td>&lt;= 4x floor (here 10.00 us): met</td></tr>",
            "<h2>From stream to stream</h2>\n<figure>",
            "<td>topic</td>",
            "0.3333",
            "&quot;p25&quot;: 7.5",
        ] {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
        for part in ["http", "<script", "src=", "href="] {
            assert!(!page.contains(part), "{part} is in {page}");
        }
        // Each rule of the dark colours matches an element.
        let rules = page.split("svg [").skip(1).filter_map(|rule| rule.split(']').next());
        assert!(rules.clone().count() > 0);
        for rule in rules {
            assert!(page.contains(&format!(" {rule}")), "nothing in a plot has {rule}");
        }
        // Every tag that needs an end has one.
        for tag in ["html", "body", "figure", "svg", "table", "tr", "td", "th", "details", "pre", "p"] {
            let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }
}
