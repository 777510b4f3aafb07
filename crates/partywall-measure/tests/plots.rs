//! The plots of the pages show the numbers of committed reports. `UPDATE_CHARTS=1` draws them anew.

use std::{fs, path::PathBuf};

use partywall_measure::Report;

/// The report that has the numbers of a file, and the title of its plot there.
const PLOTS: [(&str, &str, &str); 4] = [
    ("h200-latency.svg", "2026-11-23-h200-bench.json", "latency of a dependent load, one thread"),
    ("h200-bandwidth.svg", "2026-11-23-h200-bench.json", "bandwidth of a kernel that reads"),
    ("h100-sharing.svg", "2026-11-26-h100-peer-table.json", "sharing GPU memory, until its first byte is read"),
    ("h100-opening.svg", "2026-11-26-h100-peer-table.json", "opening and closing GPU memory that is shared"),
];

// Holds 337.
#[test]
fn plots_of_the_pages_show_the_committed_reports() {
    for (file, report, title) in PLOTS {
        let report: Report =
            serde_json::from_slice(&fs::read(docs().join("measurements").join(report)).unwrap()).unwrap();
        let charts = report.charts();
        let titles: Vec<_> = charts.iter().map(|chart| &chart.title).collect();
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
