//! How long tiles and frames took.

use super::*;

/// Returns how long each tile took, sorted, in the order of the tiles.
fn tile_times(job: &Job, frames: &[Written]) -> Vec<Vec<Duration>> {
    let times = |tile: usize| {
        let drawn = frames.iter().filter_map(|frame| frame.tiles.get(tile)).filter(|drawn| drawn.nanos > 0);
        let mut times: Vec<_> = drawn.map(|drawn| Duration::from_nanos(drawn.nanos.into())).collect();
        times.sort_unstable();
        times
    };
    (0..job.renderers as usize).map(times).collect()
}

pub(super) fn tiles_step(job: &Job, frames: &[Written]) -> Step {
    let why = match job.brush {
        Brush::Cuda => {
            "The header of a tile has its frame, number and process, and the time of its renderer's kernels, by events around \
             them. A tile is published before its kernels have run, so the time is that of the last finished tile before it."
        }
        Brush::Cpu | Brush::Vulkan => {
            "The header of a tile has its frame, number and process, and the time in which its renderer has drawn it."
        }
    };
    let step = Step::new("tiles", "How long renderers draw a tile", why);
    let times = tile_times(job, frames);
    let step = times.iter().enumerate().fold(step, |step, (tile, times)| {
        let percentiles = [50, 99].map(|percent| short(percentile(times, percent))).join(", ");
        step.value(format!("tile {tile}: p50, p99"), if times.is_empty() { "unknown".to_owned() } else { percentiles })
    });
    step.judge(true, "measured", "")
}

pub(super) fn tiles_json(job: &Job, frames: &[Written]) -> Value {
    let by = if job.brush == Brush::Cuda { "gpu" } else { "host" };
    let times = tile_times(job, frames).into_iter().enumerate().map(|(tile, times)| {
        let micros = |percent| rounded(percentile(&times, percent).as_secs_f64() * 1e6);
        json!({ "tile": tile, "time_of": by, "samples": times.len(), "p50_us": micros(50), "p99_us": micros(99) })
    });
    times.collect()
}

/// Returns the times from the publication of a scene to its written frame, sorted.
fn latencies(frames: &[Written]) -> Vec<Duration> {
    let mut times: Vec<_> = frames.iter().map(|frame| frame.at.since(frame.published)).collect();
    times.sort_unstable();
    times
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}

/// Returns how many times are below each power of two, in microseconds.
fn histogram(sorted: &[Duration]) -> Vec<(u64, usize)> {
    let mut bins: Vec<(u64, usize)> = Vec::new();
    for time in sorted {
        let below = (time.as_micros() as u64 + 1).next_power_of_two();
        match bins.last_mut() {
            Some((bound, count)) if *bound == below => *count += 1,
            _ => bins.push((below, 1)),
        }
    }
    bins
}

pub(super) fn latency(frames: &[Written]) -> Step {
    let sorted = latencies(frames);
    let bins = histogram(&sorted);
    let bins = bins.iter().map(|(below, count)| format!("{count} below {}", short(Duration::from_micros(*below))));
    Step::new(
        "latency",
        "From the publication of a scene to its written frame",
        "It includes the waits behind the frames before, of which up to seven are in flight.",
    )
    .value("p50, p99", format!("{}, {}", millis(percentile(&sorted, 50)), millis(percentile(&sorted, 99))))
    .value("histogram", bins.collect::<Vec<_>>().join(", "))
    .judge(true, "measured", "")
}

pub(super) fn latency_json(frames: &[Written]) -> Value {
    let sorted = latencies(frames);
    let micros = |percent| percentile(&sorted, percent).as_micros() as u64;
    let bins: Vec<Value> =
        histogram(&sorted).into_iter().map(|(below, count)| json!({ "below": below, "frames": count })).collect();
    json!({ "p50": micros(50), "p99": micros(99), "max": micros(100), "histogram": bins })
}

/// Rounds to one decimal.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
