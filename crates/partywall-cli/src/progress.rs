//! A progress bar, on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// A bar of bytes. Dropping it removes it from the screen.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Returns a bar of `total` bytes on standard error. The bar is hidden if standard error is not a terminal, with
    /// `--json`, or with `--quiet`.
    pub(crate) fn new(output: Output, what: &str, total: u64) -> Self {
        // `ProgressDrawTarget::stderr` draws nothing if standard error is not a terminal.
        let target = if output.shows_progress() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(total), target).with_style(style);
        Self(bar.with_message(what.to_owned()))
    }

    /// Advances the bar by `bytes`.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

const TEMPLATE: &str = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
