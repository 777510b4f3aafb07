//! Progress bars, on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use crate::output::{Output, is_screen};

/// Returns a bar of `total` bytes.
pub fn of_bytes(output: Output, what: &str, total: u64) -> ProgressBar {
    let template = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    bar(output, total, template).with_message(what.to_owned())
}

/// Returns a bar on standard error. Dropping it removes it from the screen. The bar is hidden if standard error is not
/// a terminal, with `--json`, or with `--quiet`.
pub fn bar(output: Output, total: u64, template: &str) -> ProgressBar {
    let is_shown = output.shows_progress() && is_screen(&std::io::stderr());
    let target = if is_shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(total), target).with_style(style).with_finish(ProgressFinish::AndClear)
}
