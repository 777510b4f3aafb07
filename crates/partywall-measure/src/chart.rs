//! Plots of a report, as SVG.
//!
//! Cases with the same name that differ only in one parameter, `bytes` or a count such as `subscribers`, are the points
//! of a line. The measured case, its floor and its rivals are the lines of one plot. The parameter `of` is the title of
//! the plot. Both axes are logarithmic; zero bytes are drawn as one byte. A line connects the medians; the bar at each
//! of them reaches from p25 to p75.

use std::borrow::Cow;

use plotters::{
    coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged},
    coord::types::RangedCoordf64,
    prelude::*,
};

use textwrap::{WordSeparator, WordSplitter, core::Word};

use crate::{Case, ComparisonResult, Error, Measurement, Report, Unit};

/// A plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The title.
    pub title: String,
    /// The parameter that varies.
    pub varied: &'static str,
    /// The unit of the samples.
    pub unit: Unit,
    /// The lines: the measured case, then its floor, then its rivals.
    pub lines: Vec<Line>,
}

/// The line of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The name of the case.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<Point>,
}

/// A point of a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The value of the parameter.
    pub x: f64,
    /// A quarter of the samples are at most this.
    pub p25: f64,
    /// The median.
    pub p50: f64,
    /// Three quarters of the samples are at most this.
    pub p75: f64,
}

impl Point {
    /// Returns the percentiles of a measurement in another unit, and at least `least`. `None` if a logarithmic axis
    /// cannot show them.
    fn of(x: f64, Measurement { case, percentiles }: &Measurement, unit: Unit, least: f64) -> Option<Self> {
        let shown =
            |value| case.unit.convert(value, unit).ok().map(|value| value.max(least)).filter(|value| *value > 0.0);
        Some(Self { x, p25: shown(percentiles.p25)?, p50: shown(percentiles.p50)?, p75: shown(percentiles.p75)? })
    }
}

/// Parameters that are the horizontal axis of a plot.
const VARIED: [&str; 4] = ["bytes", "subscribers", "processes", "tensors"];

/// The parameter that names the question which a case answers, and the title of its plot.
pub(crate) const OF: &str = "of";

fn singular(name: &str) -> &str {
    if name == "processes" { "process" } else { name.strip_suffix('s').unwrap_or(name) }
}

impl Case {
    /// Returns the name without the parameters that vary from one point of a plot to the next, and without the
    /// question.
    pub fn line(&self) -> String {
        let mut rest = self.clone();
        rest.parameters.retain(|name, _| name != OF && !VARIED.contains(&name.as_str()));
        rest.to_string()
    }

    /// Returns the value of the parameter that varies, for people: `4 KiB`, `8 processes`. It is empty if there is
    /// none.
    pub fn point(&self) -> String {
        let found = VARIED.iter().find_map(|name| Some((*name, self.parameters.get(*name)?)));
        match found {
            None => String::new(),
            Some(("bytes", count)) => count.parse().map_or_else(|_| count.clone(), bytes),
            Some((name, count)) if count == "1" => format!("1 {}", singular(name)),
            Some((name, count)) => format!("{count} {name}"),
        }
    }
}

impl Report {
    /// Returns the plots of the report, in the order in which their cases were measured. A case without a varying
    /// parameter has no plot.
    pub fn charts(&self) -> Vec<Chart> {
        let mut charts: Vec<(String, Chart)> = Vec::new();
        for result in &self.comparisons {
            let Some((varied, x, key)) = varied(&result.measured.case) else { continue };
            let at = charts.iter().position(|(known, chart)| *known == key && chart.varied == varied);
            let at = at.unwrap_or_else(|| {
                let unit = result.measured.case.unit;
                charts.push((key.clone(), Chart { title: key, varied, unit, lines: Vec::new() }));
                charts.len() - 1
            });
            let chart = &mut charts[at].1;
            for measurement in [&result.measured].into_iter().chain(&result.floor).chain(&result.rivals) {
                chart.add(x, measurement);
            }
        }
        charts.into_iter().map(|(_, chart)| chart).filter(Chart::is_worth_drawing).collect()
    }
}

/// Returns the varying parameter of a case, its value, and the name that all points of a line share.
fn varied(case: &Case) -> Option<(&'static str, f64, String)> {
    let (name, value) = VARIED.iter().find_map(|name| Some((*name, case.parameters.get(*name)?)))?;
    let mut rest = case.clone();
    rest.parameters.remove(name);
    // Some cases name the title of their plot in the parameter `of`.
    let what = rest.parameters.remove(OF);
    if let Some(what) = what.filter(|_| rest.parameters.is_empty()) {
        return Some((name, value.parse().ok()?, what));
    }
    Some((name, value.parse().ok()?, rest.to_string()))
}

impl Chart {
    fn add(&mut self, x: f64, measurement: &Measurement) {
        // A plot has one unit. A logarithmic axis cannot show zero bytes, so they are drawn as one.
        let least = if self.unit == Unit::Bytes { 1.0 } else { 0.0 };
        let Some(point) = Point::of(x, measurement, self.unit, least) else { return };
        let name = &measurement.case.name;
        match self.lines.iter_mut().find(|line| line.name == *name) {
            Some(line) => line.points.push(point),
            None => self.lines.push(Line { name: name.clone(), points: vec![point] }),
        }
        for line in &mut self.lines {
            line.points.sort_by(|one, other| one.x.total_cmp(&other.x));
        }
    }

    fn is_worth_drawing(&self) -> bool {
        self.lines.iter().any(|line| line.points.len() > 1)
    }

    /// Draws the plot with its legend, in black on white: the measured case as a solid line, its floor and rivals as
    /// dashed lines. A page may restyle black, white and the colour of the grid, which no line uses.
    ///
    /// # Errors
    /// [`Error::Plot`] if it cannot be drawn: a value is not finite.
    pub fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|why| Error::Plot { title: self.title.clone(), why: why.to_string() })?;
        // A page does not need the namespace, and a page without any address evidently loads nothing.
        Ok(svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", ""))
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let xs: Vec<_> = points().map(|point| point.x).collect();
        let ys: Vec<_> = points().flat_map(|point| [point.p25, point.p75]).collect();
        let is_bytes = self.varied == "bytes";
        // Sizes grow by factors of 16 from 4 KiB, so that each has its label.
        let counts_bytes = self.unit == Unit::Bytes;
        let x = Log::around(&xs, if is_bytes { 16.0 } else { 2.0 }, 1.1);
        let y = Log::around(&ys, if counts_bytes { 1024.0 } else { 10.0 }, 1.3);
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (plot, legend) = root.split_horizontally(SIZE.0 - LEGEND);
        let mut chart = ChartBuilder::on(&plot)
            .caption(&self.title, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .label_style(("sans-serif", LETTER_SIZE))
            .x_desc(if is_bytes { "size" } else { self.varied })
            .y_desc(if counts_bytes { "bytes (none: at 1 B)" } else { self.unit.symbol() })
            .x_labels(8)
            .y_labels(8)
            .x_label_formatter(&|value| if is_bytes { bytes(*value) } else { short(*value) })
            .y_label_formatter(&|value| if counts_bytes { bytes(*value) } else { short(*value) })
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .draw()?;
        for (index, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            // A range belongs to its point: an area between two points would show values that were not measured.
            let ranges = line.points.iter().map(|point| [(point.x, point.p25), (point.x, point.p75)]);
            chart.draw_series(ranges.map(|range| PathElement::new(range, colour.mix(0.4).stroke_width(6))))?;
            let medians = line.points.iter().map(|point| (point.x, point.p50));
            let style = colour.stroke_width(2);
            // Lines that agree cover each other: the gaps of the later ones show the first.
            match dash(index) {
                None => chart.draw_series(LineSeries::new(medians, style))?,
                Some(dash) => chart.draw_series(DashedLineSeries::new(medians, dash, dash, style))?,
            };
            chart.draw_series(line.points.iter().map(|point| Circle::new((point.x, point.p50), 3, colour.filled())))?;
            let top = 44 + 40 * index as i32;
            // Dashed as the line is.
            let length = dash(index).map_or(KEY, |dash| dash as i32);
            for from in (0..KEY).step_by(2 * length as usize) {
                let to = (from + length).min(KEY);
                legend.draw(&PathElement::new([(4 + from, top), (4 + to, top)], style))?;
            }
            for (row, words) in wrapped(&line.name, LETTERS).into_iter().enumerate() {
                let style = ("sans-serif", LETTER_SIZE).into_font().color(&BLACK);
                legend.draw(&Text::new(words, (KEY + 12, top - 7 + 14 * row as i32), style))?;
            }
        }
        root.present()?;
        Ok(())
    }
}

/// Returns the length of the dashes of a line, and of the gaps between them. The first line has none.
fn dash(index: usize) -> Option<u32> {
    (index > 0).then_some(4 + 4 * index as u32)
}

/// A plot of cases that vary in nothing: a row for each, with its median and the range from p25 to p75 on a logarithmic
/// axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// The unit of the samples.
    pub unit: Unit,
    /// The rows, from top to bottom: each measured case, then its floor and its rivals. The number of a point is 0 for
    /// the measured case, 1 for a floor and 2 for a rival.
    pub lines: Vec<Line>,
}

impl Rows {
    /// Returns the plot of some results, unless one of them varies, has another kind of unit, or stands alone.
    pub fn of(results: &[&ComparisonResult]) -> Option<Self> {
        let unit = results.first()?.measured.case.unit;
        let mut lines = Vec::new();
        for result in results {
            let beside = result.floor.iter().map(|floor| (1.0, floor));
            let beside = beside.chain(result.rivals.iter().map(|rival| (2.0, rival)));
            for (x, measurement) in [(0.0, &result.measured)].into_iter().chain(beside) {
                let point = Point::of(x, measurement, unit, 0.0)?;
                lines.push(Line { name: measurement.case.line(), points: vec![point] });
            }
        }
        let varies = results.iter().any(|result| varied(&result.measured.case).is_some());
        (results.len() > 1 && !varies).then_some(Self { unit, lines })
    }

    /// Draws the plot: measured cases in the first colour, floors in the second, rivals in the third.
    ///
    /// # Errors
    /// [`Error::Plot`] if it cannot be drawn: a value is not finite.
    pub fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        let failed = |why: Box<dyn std::error::Error>| Error::Plot { title: "rows".to_owned(), why: why.to_string() };
        self.draw(&mut svg).map_err(failed)?;
        Ok(svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", ""))
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let values: Vec<_> = points().flat_map(|point| [point.p25, point.p75]).collect();
        let rows = self.lines.len() as f64;
        let height = 60 + ROW * self.lines.len() as u32;
        let root = SVGBackend::with_string(svg, (SIZE.0, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let (names, plot) = root.split_horizontally(NAMES);
        let mut chart = ChartBuilder::on(&plot)
            .margin(12)
            .x_label_area_size(40)
            .build_cartesian_2d(Log::around(&values, 10.0, 1.3), rows..0.0)?;
        chart
            .configure_mesh()
            .label_style(("sans-serif", LETTER_SIZE))
            .x_desc(self.unit.symbol())
            .x_labels(8)
            .y_labels(0)
            .x_label_formatter(&|value| short(*value))
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .draw()?;
        for (row, line) in self.lines.iter().enumerate() {
            let middle = row as f64 + 0.5;
            for point in &line.points {
                let colour = COLOURS[point.x as usize % COLOURS.len()];
                let range = [(point.p25, middle), (point.p75, middle)];
                chart.draw_series([PathElement::new(range, colour.mix(0.4).stroke_width(6))])?;
                chart.draw_series([Circle::new((point.p50, middle), 4, colour.filled())])?;
                let at = chart.backend_coord(&(point.p50, middle)).1;
                let role = ["", "floor: ", "beside it: "][point.x as usize % 3];
                let name = format!("{role}{}", line.name);
                let style = ("sans-serif", LETTER_SIZE).into_font().color(&BLACK);
                names.draw(&Text::new(name, (if role.is_empty() { 8 } else { 20 }, at - 6), style))?;
            }
        }
        root.present()?;
        Ok(())
    }
}

/// A logarithmic axis, with its labels at powers of a number.
struct Log {
    linear: RangedCoordf64,
    base: f64,
}

impl Log {
    /// Returns an axis with some room around these values.
    fn around(values: &[f64], base: f64, room: f64) -> Self {
        let (least, most) = values.iter().fold((f64::MAX, f64::MIN), |(least, most), v| (least.min(*v), most.max(*v)));
        let logarithm = |value: f64| value.log(base);
        Self { linear: (logarithm(least / room)..logarithm(most * room)).into(), base }
    }
}

impl Ranged for Log {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.linear.map(&value.log(self.base), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let range = self.linear.range();
        let first = range.start.ceil() as i32;
        let last = range.end.floor() as i32;
        if self.base == 10.0 && last - first < 1 {
            return even(self.range());
        }
        let step = (last - first + 1).max(1) as usize / hint.max_num_points().max(1) + 1;
        (first..=last).step_by(step).map(|power| self.base.powi(power)).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        let range = self.linear.range();
        self.base.powf(range.start)..self.base.powf(range.end)
    }
}

impl plotters::coord::ranged1d::ValueFormatter<f64> for Log {
    fn format(value: &f64) -> String {
        short(*value)
    }
}

/// Returns round numbers of a range, in even steps, for a range that may contain no power of ten.
fn even(range: std::ops::Range<f64>) -> Vec<f64> {
    let rough = (range.end - range.start) / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let first = (range.start / step).ceil() as i64;
    (first..).map(|number| number as f64 * step).take_while(|value| *value <= range.end).collect()
}

/// Returns a number of bytes for people: `4 KiB`.
pub fn bytes(value: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (value.max(1.0).log2() / 10.0).floor().clamp(0.0, 4.0);
    format!("{} {}", short(value / 1024_f64.powf(power)), units[power as usize])
}

/// Formats a number with three digits, or with all digits before the decimal point.
fn short(value: f64) -> String {
    let digits = 2 - value.abs().max(1e-9).log10().floor().clamp(-9.0, 2.0) as i32;
    let text = format!("{value:.*}", digits.max(0) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Breaks a text into lines of at most `letters` letters: between words and behind dots, otherwise within a word.
fn wrapped(text: &str, letters: usize) -> Vec<Cow<'_, str>> {
    let parts: fn(&str) -> Box<dyn Iterator<Item = Word<'_>> + '_> =
        |text| Box::new(text.split_inclusive([' ', '.']).map(Word::from));
    let options = textwrap::Options::new(letters).word_splitter(WordSplitter::NoHyphenation);
    textwrap::wrap(text, options.word_separator(WordSeparator::Custom(parts)))
}

/// Width and height, in pixels.
const SIZE: (u32, u32) = (900, 380);

/// The length of a line in the legend: at least a dash, its gap, and the beginning of the next dash.
const KEY: i32 = 60;

/// The width of the legend, which is beside the plot so that it hides no points.
const LEGEND: u32 = 255;

/// The height of a row, and the width of the names of rows.
const ROW: u32 = 22;
const NAMES: u32 = 530;

/// The size of letters; plotters writes four fifths of it into the SVG.
const LETTER_SIZE: i32 = 15;

/// The most letters in a line of the legend: as many as fit beside a dash in a wide font, 7.5 pixels each.
const LETTERS: usize = 24;

/// The colour of the grid, which `page.rs` also names.
const GRID: RGBColor = RGBColor(229, 231, 235);

/// The colours of Okabe and Ito, which people with colour vision deficiency can distinguish, and a grey.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Comparison, Machine, Plan};

    fn report() -> Report {
        let mut report = Report::new("an example", Machine::detect(None, None));
        for power in 12..20 {
            let value = 3.0 + f64::from(power * power);
            let case = |name: &str| Case::new(name, Unit::GigabytesPerSecond).parameter("bytes", 1_u64 << power);
            let result = Comparison::new(case("copy"), Box::new(move || Ok(value)))
                .floor(case("memcpy"), Box::new(move || Ok(value * 1.5)))
                .rival(case("a file"), Box::new(move || Ok(value / 10.0)));
            report.push(result.run(Plan::new(3)).unwrap());
        }
        report
    }

    /// Returns the middles of the circles of a colour, in pixels.
    fn circles(svg: &str, colour: RGBColor) -> Vec<(f64, f64)> {
        let fill = format!("fill=\"#{:02X}{:02X}{:02X}\"", colour.0, colour.1, colour.2);
        let number = |circle: &str, name: &str| {
            let (_, rest) = circle.split_once(&format!("{name}=\"")).unwrap();
            rest.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        let circles = svg.split("<circle ").skip(1).filter(|circle| circle.split('>').next().unwrap().contains(&fill));
        circles.map(|circle| (number(circle, "cx"), number(circle, "cy"))).collect()
    }

    /// Returns how far values are from a line that leads from the first to the last, if a pixel is a step of their
    /// logarithm.
    fn furthest_from_a_line(values: &[(f64, f64)]) -> f64 {
        let (first, last) = (values[0], values[values.len() - 1]);
        let slope = (last.1 - first.1) / (last.0.ln() - first.0.ln());
        values.iter().map(|(v, pixel)| (first.1 + slope * (v.ln() - first.0.ln()) - pixel).abs()).fold(0.0, f64::max)
    }

    // Holds 333.
    #[test]
    fn points_of_a_plot_are_those_of_the_report() {
        let charts = report().charts();
        let [chart] = charts.as_slice() else { panic!("{charts:?}") };
        assert_eq!(chart.lines.iter().map(|line| line.name.as_str()).collect::<Vec<_>>(), ["copy", "memcpy", "a file"]);
        let svg = chart.svg().unwrap();
        let (mut xs, mut ys) = (Vec::new(), Vec::new());
        for (line, colour) in chart.lines.iter().zip(COLOURS) {
            let found = circles(&svg, colour);
            assert_eq!(found.len(), 8, "{}", line.name);
            xs.extend(line.points.iter().zip(&found).map(|(point, pixel)| (point.x, pixel.0)));
            ys.extend(line.points.iter().zip(&found).map(|(point, pixel)| (point.p50, pixel.1)));
        }
        // A point may lie a pixel beside its place.
        ys.sort_by(|one, other| one.0.total_cmp(&other.0));
        xs.sort_by(|one, other| one.0.total_cmp(&other.0));
        assert!(furthest_from_a_line(&xs) <= 1.5 && furthest_from_a_line(&ys) <= 1.5, "{xs:?} {ys:?}");
        assert!(xs[0].1 < xs[xs.len() - 1].1 && ys[0].1 > ys[ys.len() - 1].1, "to the right and upwards");
        assert!(svg.contains("GB/s") && !svg.contains("http"), "{svg}");
        let labels: Vec<_> = svg.lines().filter(|line| line.ends_with("iB")).collect();
        assert_eq!(labels, ["4 KiB", "64 KiB"], "by factors of 16");
    }

    /// Returns the ends of the lines of a colour and a width, as `[x, y]` each.
    fn lines(svg: &str, colour: RGBColor, width: u32) -> Vec<Vec<[f64; 2]>> {
        let colour = format!("stroke=\"#{:02X}{:02X}{:02X}\" stroke-width=\"{width}\"", colour.0, colour.1, colour.2);
        let lines = svg.split("<polyline ").skip(1).filter(|line| line.split('>').next().unwrap().contains(&colour));
        let number = |text: &str| text.parse::<f64>().unwrap();
        let ends = |line: &str| {
            let (_, points) = line.split_once("points=\"").unwrap();
            let points = points.split('"').next().unwrap().split_whitespace();
            points.map(|point| point.split_once(',').map(|(x, y)| [number(x), number(y)]).unwrap()).collect()
        };
        lines.map(ends).collect()
    }

    /// Three lines, of which each point has a range from 2 to 4 except one, which has a larger one.
    fn with_ranges() -> String {
        let point = |x: u64| Point { x: x as f64, p25: if x == 65536 { 0.5 } else { 2.0 }, p50: 3.0, p75: 4.0 };
        let points = || [4096, 65536, 1 << 20].map(point).to_vec();
        let lines = ["one", "two", "three"].map(|name| Line { name: name.into(), points: points() });
        let lines = lines.to_vec();
        Chart { title: "t".into(), varied: "bytes", unit: Unit::Microseconds, lines }.svg().unwrap()
    }

    // Holds 333.
    #[test]
    fn range_of_a_point_is_drawn_at_that_point_alone() {
        let svg = with_ranges();
        assert!(!svg.contains("<polygon"), "an area between points shows what was not measured");
        let bars = lines(&svg, COLOURS[0], 6);
        let circles = circles(&svg, COLOURS[0]);
        assert_eq!((bars.len(), circles.len()), (3, 3));
        let height = |bar: &[[f64; 2]]| bar[0][1] - bar[1][1];
        for (bar, circle) in bars.iter().zip(&circles) {
            assert!(bar.iter().all(|[x, _]| *x == circle.0), "{bar:?} is beside {circle:?}");
            assert!(bar[0][1] > circle.1 && circle.1 > bar[1][1], "{bar:?} is not around {circle:?}");
        }
        assert!(height(&bars[1]) > 2.0 * height(&bars[0]), "{bars:?}");
    }

    // Holds 333.
    #[test]
    fn legend_is_dashed_as_its_lines_are() {
        let svg = with_ranges();
        let keys = f64::from(SIZE.0 - LEGEND);
        for (index, colour) in COLOURS.into_iter().take(3).enumerate() {
            let (key, drawn): (Vec<_>, Vec<_>) =
                lines(&svg, colour, 2).into_iter().partition(|line| line[0][0] >= keys);
            let length = |line: &Vec<[f64; 2]>| line[line.len() - 1][0] - line[0][0];
            let (in_key, in_plot) = (length(&key[0]), length(&drawn[0]));
            match index {
                0 => assert_eq!((key.len(), drawn.len()), (1, 1), "solid"),
                _ => assert!(key.len() > 1 && (in_key - in_plot).abs() <= 1.5, "{index}: {in_key} and {in_plot}"),
            }
        }
    }

    #[test]
    fn memory_that_is_none_is_drawn_as_one_byte() {
        let mut report = Report::new("an example", Machine::detect(None, None));
        for size in [4096_u64, 1 << 20] {
            for (name, value) in [("a mapping", 0.0), ("a process", 1_048_576.0)] {
                let case = Case::new(name, Unit::Bytes).parameter("bytes", size).parameter("of", "memory");
                report.push(Comparison::new(case, Box::new(move || Ok(value))).run(Plan::new(3)).unwrap());
            }
        }
        let charts = report.charts();
        let [chart] = charts.as_slice() else { panic!("{charts:?}") };
        let svg = chart.svg().unwrap();
        let heights = |colour: usize| circles(&svg, COLOURS[colour]).into_iter().map(|(_, y)| y).collect::<Vec<_>>();
        let (none, some) = (heights(0), heights(1));
        assert!(none.len() == 2 && some.len() == 2 && none[0] == none[1] && none[0] > some[0], "{none:?} {some:?}");
        let labels: Vec<_> = svg.lines().filter(|line| line.ends_with(" B") || line.ends_with("iB")).collect();
        assert_eq!(labels, ["1 B", "1 KiB", "1 MiB", "4 KiB", "64 KiB", "1 MiB"]);
        assert!(svg.contains("bytes (none: at 1 B)"));
    }

    #[test]
    fn case_without_a_parameter_that_varies_has_no_plot() {
        let mut report = Report::new("an example", Machine::detect(None, None));
        let case = Case::new("copy", Unit::Microseconds).parameter("bytes", 4096);
        report.push(Comparison::new(case, Box::new(|| Ok(1.0))).run(Plan::new(1)).unwrap());
        assert_eq!(report.charts(), [], "one point is no line");
    }

    #[test]
    fn cases_that_do_not_vary_are_rows() {
        let case = |name: &str| Case::new(name, Unit::Microseconds).parameter(OF, "hand-offs");
        let result = |name: &str, value: f64| {
            let result = Comparison::new(case(name), Box::new(move || Ok(value)));
            result.floor(case("futex"), Box::new(|| Ok(10.0))).run(Plan::new(3)).unwrap()
        };
        let one = result("timeline", 100.0);
        let other = result("topic", 1000.0);
        let rows = Rows::of(&[&one, &other]).unwrap();
        assert_eq!(
            rows.lines.iter().map(|line| line.name.as_str()).collect::<Vec<_>>(),
            ["timeline", "futex", "topic", "futex"]
        );
        let svg = rows.svg().unwrap();
        let measured = circles(&svg, COLOURS[0]);
        let floors = circles(&svg, COLOURS[1]);
        assert_eq!((measured.len(), floors.len()), (2, 2));
        let decade = measured[1].0 - measured[0].0;
        assert!((measured[0].0 - floors[0].0 - decade).abs() <= 1.5, "as far for each factor of ten");
        assert!(measured[0].1 < floors[0].1 && floors[0].1 < measured[1].1, "from top to bottom");
        assert_eq!(Rows::of(&[&one]), None, "one result is told by its table");
        let varying = Case::new("copy", Unit::Microseconds).parameter("bytes", 4096);
        let varying = Comparison::new(varying, Box::new(|| Ok(1.0))).run(Plan::new(1)).unwrap();
        assert_eq!(Rows::of(&[&one, &varying]), None);
    }

    #[test]
    fn case_has_a_name_and_a_point_for_people() {
        let case = |name: &str, value: u64| {
            let case = Case::new("a topic", Unit::Microseconds).parameter(OF, "fan-out").parameter("gpu", "none");
            case.parameter(name, value)
        };
        assert_eq!(case("bytes", 4096).line(), "a topic [gpu=none]");
        for (name, value, text) in [
            ("bytes", 4096, "4 KiB"),
            ("processes", 1, "1 process"),
            ("processes", 8, "8 processes"),
            ("subscribers", 1, "1 subscriber"),
            ("other", 7, ""),
        ] {
            assert_eq!(case(name, value).point(), text);
        }
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.012_34, "0.0123"), (1.0, "1"), (1.234, "1.23"), (12.34, "12.3"), (123_456.0, "123456")]
        {
            assert_eq!(short(value), text);
        }
        for (value, text) in [(1.0, "1 B"), (4096.0, "4 KiB"), (1_572_864.0, "1.5 MiB"), (f64::from(1 << 30), "1 GiB")]
        {
            assert_eq!(bytes(value), text);
        }
    }

    #[test]
    fn narrow_ranges_have_round_numbers() {
        assert_eq!(even(2.4..4.1), [2.5, 3.0, 3.5, 4.0]);
        assert_eq!(even(40.0..130.0), [40.0, 60.0, 80.0, 100.0, 120.0]);
    }

    #[test]
    fn names_are_broken_where_they_fit() {
        assert_eq!(wrapped("one two three", 8), ["one two", "three"]);
        assert_eq!(wrapped("multiprocessing.shared_memory", LETTERS), ["multiprocessing.", "shared_memory"]);
        assert_eq!(wrapped("the multiprocessing.Pipe", LETTERS), ["the multiprocessing.Pipe"], "if it has to be");
        assert_eq!(wrapped("incomprehensibility", 8), ["incompre", "hensibil", "ity"]);
    }
}
