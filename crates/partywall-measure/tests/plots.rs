//! The plots of README.md show the numbers of the committed report. `UPDATE_CHARTS=1` draws them anew.

use std::{fs, path::PathBuf};

use partywall_measure::Report;

/// The report that has the numbers.
const REPORT: &str = "measurements/2026-11-23-h200-bench.json";

/// The files, and the titles of their plots in the report.
const PLOTS: [(&str, &str); 2] = [
    ("h200-latency.svg", "latency of a dependent load, one thread"),
    ("h200-bandwidth.svg", "bandwidth of a kernel that reads"),
];

#[test]
fn plots_of_latency_and_bandwidth_show_the_committed_report() {
    let report: Report = serde_json::from_slice(&fs::read(docs().join(REPORT)).unwrap()).unwrap();
    let charts = report.charts();
    let titles: Vec<_> = charts.iter().map(|chart| &chart.title).collect();
    for (file, title) in PLOTS {
        let chart = charts.iter().find(|chart| chart.title == title);
        let drawn = chart.unwrap_or_else(|| panic!("no plot {title:?} in {titles:?}")).svg().unwrap();
        // A file needs the namespace, which a page implies.
        let drawn = drawn.replacen("<svg ", "<svg xmlns=\"http://www.w3.org/2000/svg\" ", 1);
        let path = docs().join(file);
        if std::env::var_os("UPDATE_CHARTS").is_some() {
            fs::write(&path, &drawn).unwrap();
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == drawn, "{} is another plot: UPDATE_CHARTS=1 draws it anew", path.display());
    }
}

fn docs() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"))
}
