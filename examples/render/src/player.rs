//! What all roles have in common: a job, frames that they count, and an end that the watcher announces.

use std::{fs::File, io::Write};

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

/// A process that plays a role.
pub(super) struct Player<'a> {
    session: &'a mut Session,
    pub(super) job: Job,
    /// How long the host took for each frame that is done.
    times: Vec<Duration>,
    since: Instant,
}

impl<'a> Player<'a> {
    pub(super) fn new(session: &'a mut Session) -> Result<Self, Failure> {
        let job = session.parent().hear()?;
        Ok(Self { session, job, times: Vec::new(), since: Instant::now() })
    }

    pub(super) fn domain(&self) -> Domain {
        self.session.domain().clone()
    }

    /// Reports to the watcher.
    pub(super) fn say(&mut self, report: Report) -> Result<(), Failure> {
        self.session.parent().say(report)
    }

    /// Waits until all roles are ready.
    pub(super) fn await_start(&mut self) -> Result<(), Failure> {
        self.session.parent().hear()
    }

    /// Returns whether the watcher wants the role to end.
    pub(super) fn is_over(&mut self) -> Result<bool, Failure> {
        self.session.parent().has_spoken()
    }

    /// Returns the next sample, or `None` if the role must end.
    pub(super) fn next(&mut self, subscriber: &Subscriber) -> Result<Option<Sample>, Failure> {
        while !self.is_over()? {
            if let Some(sample) = within(subscriber, TURN)? {
                return Ok(Some(sample));
            }
        }
        Ok(None)
    }

    /// Begins to work on a frame.
    pub(super) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// Is in the middle of a frame: the place where the watcher kills this process, if it does.
    pub(super) fn middle(&mut self) -> Result<(), Failure> {
        self.middle_of(self.frames())
    }

    /// As [`Player::middle`], in the frame with this number: with `--live` a renderer leaves frames out.
    pub(super) fn middle_of(&mut self, frame: u64) -> Result<(), Failure> {
        if self.job.strike.is_none_or(|strike| frame < strike) {
            return Ok(());
        }
        self.say(Report::Struck)?;
        thread::sleep(TIMEOUT);
        Err(unexpected("the watcher did not kill this process"))
    }

    /// Has finished a frame.
    pub(super) fn end(&mut self) {
        self.times.push(self.since.elapsed());
    }

    /// Reports a frame of the writer, and waits until the watcher has its part of the movie, if there is one.
    pub(super) fn written(&mut self, written: Written, part: Option<Vec<u8>>) -> Result<(), Failure> {
        let part = part.map(|part| in_memory(&part)).transpose().doing("passing on a part of the movie")?;
        let fds: Vec<_> = part.iter().map(AsFd::as_fd).collect();
        let watcher = self.session.parent();
        watcher.say_with(Report::Written(written), &fds)?;
        if part.is_some() { watcher.hear() } else { Ok(()) }
    }

    /// Returns how many frames are done.
    pub(super) fn frames(&self) -> u64 {
        self.times.len() as u64
    }

    /// Ends the role with its step.
    pub(super) fn finish(self, title: &str, why: &str, describe: impl FnOnce(Step) -> Step) -> Result<(), Failure> {
        let step = Step::new(self.session.role(), title, why).value("frames", self.times.len().to_string());
        let step = describe(step.value("host time per frame", spread(&self.times)));
        self.session.report(step.judge(true, "finished", ""))?;
        self.session.parent().say(Report::Done)
    }
}

/// Returns a file in memory with these bytes.
fn in_memory(bytes: &[u8]) -> std::io::Result<File> {
    let mut file = File::from(memfd_create("partywall:movie", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// Returns the next sample if it comes in time.
pub(super) fn within(subscriber: &Subscriber, limit: Duration) -> Result<Option<Sample>, Failure> {
    match subscriber.recv(limit) {
        Ok(sample) => Ok(Some(sample)),
        Err(Error::Timeout { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Keeps a rate.
pub(super) struct Pace {
    next: Instant,
    interval: Duration,
}

impl Pace {
    pub(super) fn new(rate: u32) -> Self {
        Self { next: Instant::now(), interval: Duration::from_secs(1) / rate }
    }

    /// Returns when the next frame is due. A frame that is late does not hasten those after it.
    pub(super) fn due(&mut self) -> Instant {
        self.next = (self.next + self.interval).max(Instant::now());
        self.next
    }
}

/// How often a role checks whether it must end.
pub(super) const TURN: Duration = Duration::from_millis(100);
