//! The chart of `docs/ordering.md` shows the numbers of the committed measurements. `UPDATE_CHARTS=1` draws it anew.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

use std::{fs, path::PathBuf};

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use serde_json::Value;

/// The report that has the numbers.
const REPORT: &str = "measurements/2026-11-22-h200-ordering.json";

/// The names of the cases in the report, and what the chart calls them.
const CASES: [(&str, &str); 3] = [
    ("kernel to kernel, enqueued ahead", "kernel to kernel, enqueued ahead"),
    ("kernel to kernel, an announced wake each", "… with a message and a wake each"),
    ("kernel to a host that waits for its end", "short kernel to a waiting host"),
];

/// One case: medians in microseconds.
struct Row {
    label: &'static str,
    time_sliced: f64,
    mps: f64,
}

// Holds 337.
#[test]
fn chart_of_hand_offs_shows_the_committed_measurements() {
    let (rows, machine) = measured();
    let drawn = draw(&rows, &machine);
    for row in &rows {
        for value in [row.time_sliced, row.mps] {
            assert!(drawn.contains(&label(value)), "{} lacks {}", row.label, label(value));
        }
    }
    let path = docs().join("h200-handoffs.svg");
    if std::env::var_os("UPDATE_CHARTS").is_some() {
        fs::write(&path, &drawn).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == drawn, "{} is another chart: UPDATE_CHARTS=1 draws it anew", path.display());
}

/// Returns the rows, and one line about the machine.
fn measured() -> (Vec<Row>, String) {
    let report: Value = serde_json::from_slice(&fs::read(docs().join(REPORT)).unwrap()).unwrap();
    let median = |case: &str, gpu: &str| {
        let all = report["comparisons"].as_array().unwrap();
        let found = all.iter().map(|comparison| &comparison["measured"]).find(|measured| {
            let parameters = &measured["parameters"];
            let is_short = matches!(parameters["kernel"].as_str(), None | Some("short"));
            measured["name"] == case && parameters["gpu"] == gpu && is_short
        });
        let found = found.unwrap_or_else(|| panic!("the report has no {case:?}, {gpu}"));
        assert_eq!(found["unit"], "us");
        found["percentiles"]["p50"].as_f64().unwrap()
    };
    let row = |(case, label)| Row { label, time_sliced: median(case, "time-sliced"), mps: median(case, "MPS") };
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let machine = &report["machine"];
    let machine = format!("{}, driver {}, {}", text(&machine["gpu"]), text(&machine["driver"]), text(&report["date"]));
    (CASES.map(row).into(), machine)
}

fn draw(rows: &[Row], machine: &str) -> String {
    let mut drawn = String::new();
    let height = TOP + rows.len() as i32 * PITCH + 34;
    {
        let root = SVGBackend::with_string(&mut drawn, (WIDTH as u32, height as u32)).into_drawing_area();
        root.fill(&WHITE).unwrap();
        let style = |size: i32, color: &RGBColor| ("sans-serif", size).into_font().color(color);
        let left = |size, color| style(size, color).pos(Pos::new(HPos::Left, VPos::Center));
        let right = |size, color| style(size, color).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(
            "One hand-off between two processes on one GPU, microseconds",
            (12, 20),
            left(20, &BLACK),
        ))
        .unwrap();
        for (x, name, color) in [(LEFT, "time-sliced", &SLICED), (LEFT + 130, "under MPS", &MPS)] {
            root.draw(&Rectangle::new([(x, 38), (x + 12, 50)], color.filled())).unwrap();
            root.draw(&Text::new(name, (x + 18, 44), left(16, &BLACK))).unwrap();
        }
        let longest = rows.iter().map(|row| row.time_sliced.max(row.mps)).fold(1.0, f64::max);
        let bottom = TOP + rows.len() as i32 * PITCH;
        for (index, row) in rows.iter().enumerate() {
            let y = TOP + index as i32 * PITCH;
            root.draw(&Text::new(row.label, (LEFT - 12, y + BAR), right(16, &BLACK))).unwrap();
            for (y, value, color) in [(y, row.time_sliced, &SLICED), (y + BAR, row.mps, &MPS)] {
                let end = LEFT + (value / longest * f64::from(LONGEST)).round() as i32;
                root.draw(&Rectangle::new([(LEFT, y), (end, y + BAR - 2)], color.filled())).unwrap();
                root.draw(&Text::new(label(value), (end + 6, y + BAR / 2), left(15, &BLACK))).unwrap();
            }
        }
        root.draw(&PathElement::new([(LEFT, TOP - 6), (LEFT, bottom - 6)], BLACK)).unwrap();
        let note = format!("Medians. {machine}. Drawn from docs/measurements");
        root.draw(&Text::new(note, (12, height - 14), left(14, &GREY))).unwrap();
        root.present().unwrap();
    }
    drawn
}

fn label(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}

fn docs() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"))
}

const WIDTH: i32 = 760;
const TOP: i32 = 66;
const LEFT: i32 = 262;
const LONGEST: i32 = 420;
const BAR: i32 = 18;
const PITCH: i32 = 50;
const SLICED: RGBColor = RGBColor(196, 78, 82);
const MPS: RGBColor = RGBColor(76, 114, 176);
const GREY: RGBColor = RGBColor(90, 90, 90);
