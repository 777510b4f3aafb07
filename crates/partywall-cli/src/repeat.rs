//! `--watch`: repeats the output of a command.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant, SystemTime},
};

use crate::{
    failure::Failure,
    output::{Output, is_screen},
    signals, text,
};

/// Shows the output once, or after each interval until Ctrl-C, SIGTERM or the end of its reader. On a terminal each
/// output replaces the one before; elsewhere they follow each other.
pub(crate) fn repeat(
    output: Output,
    every: Option<Duration>,
    mut show: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let Some(every) = every else { return show() };
    let stop = signals::cancel_flag()?;
    let mut separator = if is_screen(&std::io::stdout()) { CLEAR } else { "" };
    loop {
        output.line(format!("{separator}{}, every {} s", now(), every.as_secs_f64()));
        show()?;
        if separator.is_empty() {
            separator = "\n";
        }
        if !pause(output, every, &stop) {
            return Ok(());
        }
    }
}

/// Waits for the interval. Returns false if the command should end.
pub(crate) fn pause(output: Output, length: Duration, stop: &AtomicBool) -> bool {
    let deadline = Instant::now() + length;
    loop {
        if stop.load(Ordering::Relaxed) || !output.is_read() {
            return false;
        }
        // Neither a signal nor a closed pipe ends a sleep, so both are polled.
        match deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => return true,
            left => std::thread::sleep(left.min(POLL)),
        }
    }
}

/// Parses an interval in seconds.
pub(crate) fn parse_interval(argument: &str) -> Result<Duration, String> {
    let interval = text::parse_seconds(argument)?;
    if interval < POLL {
        return Err(format!("{argument:?} is too short: use 0.1 seconds or more"));
    }
    if interval > LONGEST {
        return Err(format!("{argument:?} is too long: use {} seconds or less", LONGEST.as_secs()));
    }
    Ok(interval)
}

fn now() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    text::moment(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// The default interval, in seconds.
pub(crate) const INTERVAL: &str = "2";

/// How often the end conditions are polled.
const POLL: Duration = Duration::from_millis(100);

/// The longest interval, a day. Far longer ones would be beyond what the clock counts.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Moves to the upper left corner of a terminal and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[J";
