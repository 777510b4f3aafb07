//! How long commands try to reach bridges and hosts that do not answer now: they may be starting, stopped for a moment,
//! or behind a link that is cut.

use std::{
    cell::{Cell, RefCell},
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use partywall::Error;
use partywall_cli::Failure;

/// The attempts of a command, whose time begins when they are created.
pub(crate) struct Attempts<'a> {
    start: Instant,
    timeout: Duration,
    /// The time for what nobody knows, and since when that is so.
    unknown: Duration,
    unknown_since: Cell<Option<Instant>>,
    cancel: &'a AtomicBool,
    /// Takes what is waited for, once.
    note: RefCell<Option<&'a dyn Fn(String)>>,
}

/// Why an attempt has failed.
#[derive(Debug)]
pub(crate) enum Unreached {
    /// Another attempt would fail, too.
    Final(Failure),
    /// The bridge or the host is not known: it may be starting, or does not exist.
    Unknown(Failure),
    /// The bridge or the host is known, and does not answer.
    Silent(Failure),
}

impl<'a> Attempts<'a> {
    /// Begins. Attempts go on for `given`, else for `default`, and only for [`UNKNOWN`] as long as nobody knows what is
    /// to be reached.
    pub(crate) fn new(given: Option<Duration>, default: Duration, cancel: &'a AtomicBool) -> Self {
        Self {
            start: Instant::now(),
            timeout: given.unwrap_or(default),
            unknown: given.unwrap_or(UNKNOWN.min(default)),
            unknown_since: Cell::new(None),
            cancel,
            note: RefCell::new(None),
        }
    }

    /// Says what is waited for, unless it comes soon.
    pub(crate) fn with_note(self, note: &'a dyn Fn(String)) -> Self {
        Self { note: RefCell::new(Some(note)), ..self }
    }

    /// Returns how much of the time is left.
    pub(crate) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed())
    }

    /// Returns for how long what nobody knows is waited for.
    pub(crate) fn unknown(&self) -> Duration {
        self.unknown
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Repeats an attempt until it succeeds.
    ///
    /// # Errors
    /// What the last attempt says, if it is final or the time is over. [`Error::Cancelled`].
    pub(crate) fn until<T>(&self, mut attempt: impl FnMut() -> Result<T, Unreached>) -> Result<T, Failure> {
        let mut before = None;
        loop {
            let (failure, is_over) = match attempt() {
                Ok(found) => return Ok(found),
                Err(Unreached::Final(failure)) => return Err(failure),
                Err(Unreached::Unknown(failure)) => {
                    let since = self.unknown_since.get().unwrap_or(self.start);
                    self.unknown_since.set(Some(since));
                    (failure, since.elapsed() >= self.unknown)
                }
                Err(Unreached::Silent(failure)) => {
                    self.unknown_since.set(Some(Instant::now()));
                    (failure, false)
                }
            };
            if self.is_cancelled() {
                return Err(Error::Cancelled { what: "no other host was reached".into() }.into());
            }
            if is_over {
                return Err(failure);
            }
            if self.left().is_zero() {
                // The last attempt was cut short, so that it may know less.
                return Err(before.unwrap_or(failure));
            }
            if self.start.elapsed() >= QUIET
                && let Some(note) = self.note.take()
            {
                note(format!("{}; waiting for it", failure.message));
            }
            before = Some(failure);
            std::thread::sleep(PAUSE);
        }
    }
}

impl fmt::Debug for Attempts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempts")
            .field("timeout", &self.timeout)
            .field("unknown", &self.unknown)
            .finish_non_exhaustive()
    }
}

impl From<Failure> for Unreached {
    fn from(failure: Failure) -> Self {
        Self::Final(failure)
    }
}

/// How long a command waits by default for a bridge or a host that nobody knows, which may be starting.
const UNKNOWN: Duration = Duration::from_secs(10);

/// The time after which a command says that it waits.
const QUIET: Duration = Duration::from_secs(1);

/// The pause before the next attempt.
const PAUSE: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use partywall::ErrorKind;

    use super::*;

    static NEVER: AtomicBool = AtomicBool::new(false);

    fn failure(text: &str) -> Failure {
        Failure::new(ErrorKind::NotFound, text, "")
    }

    /// Returns how often was tried, and the result.
    fn tried(attempts: &Attempts<'_>, fails: impl Fn(u32) -> Option<Unreached>) -> (u32, Result<(), String>) {
        let mut number = 0;
        let result = attempts.until(|| {
            number += 1;
            fails(number).map_or(Ok(()), Err)
        });
        (number, result.map_err(|failure| failure.message))
    }

    #[test]
    fn what_is_not_there_yet_is_tried_again_and_what_is_final_is_not() {
        let forever = Attempts::new(Some(Duration::MAX), Duration::ZERO, &NEVER);
        let comes = |number| match number {
            1 => Some(Unreached::Unknown(failure("unknown"))),
            2 => Some(Unreached::Silent(failure("silent"))),
            3 => Some(Unreached::Unknown(failure("unknown"))),
            _ => None,
        };
        assert_eq!(tried(&forever, comes), (4, Ok(())));
        let ends = |number| (number == 2).then(|| failure("no such name").into()).or_else(|| comes(number));
        assert_eq!(tried(&forever, ends), (2, Err("no such name".into())));
    }

    #[test]
    fn attempts_end_with_their_time_or_when_they_are_cancelled() {
        let once = Attempts::new(Some(Duration::ZERO), Duration::MAX, &NEVER);
        assert_eq!(tried(&once, |_| Some(Unreached::Silent(failure("silent")))), (1, Err("silent".into())));
        // By default, what nobody knows is given up before what is known.
        let default = Attempts { unknown: Duration::ZERO, ..Attempts::new(None, Duration::MAX, &NEVER) };
        let lost = |number| match number {
            1 => Some(Unreached::Silent(failure("silent"))),
            _ => Some(Unreached::Unknown(failure("unknown"))),
        };
        assert_eq!(tried(&default, lost), (2, Err("unknown".into())));
        let short = Attempts::new(Some(Duration::from_millis(500)), Duration::MAX, &NEVER);
        let ends = |number| match number {
            1 => Some(Unreached::Silent(failure("the first"))),
            _ => {
                std::thread::sleep(short.left());
                Some(Unreached::Silent(failure("cut short")))
            }
        };
        assert_eq!(tried(&short, ends), (2, Err("the first".into())));
        let cancel = AtomicBool::new(true);
        let cancelled = Attempts::new(None, Duration::MAX, &cancel);
        let (number, ended) = tried(&cancelled, |_| Some(Unreached::Silent(failure("silent"))));
        assert!(number == 1 && ended.unwrap_err().contains("cancelled"));
    }
}
