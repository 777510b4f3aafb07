//! Has a child process check whether the memory at a place is lost, and ends what is lost.
//!
//! See [`crate::memory_check`]. Nothing waits for the child: it may be blocked in the driver, where even SIGKILL does
//! not end it at once. The next child is therefore started only when the former one has ended.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, OwnedFd},
    process::Child,
    time::{Duration, Instant},
};

use partywall_os::supervision::start_program;
use rustix::{
    event::epoll::EventFlags,
    io::{Errno, read, retry_on_intr},
    pipe::{PipeFlags, pipe_with},
};

use crate::{
    memory_check::Found,
    registry::{Event, FdId, types::Place},
    replacement::{Purpose, VARIABLE, this_program},
    server::{event_loop::Server, reactor::EventSource, timers::Timer},
};

/// The checks of places. There is one at a time.
#[derive(Debug, Default)]
pub(super) struct MemoryChecks {
    running: Option<RunningCheck>,
    /// The child of the last check, until it has ended. A timer is set meanwhile.
    ending: Option<Child>,
    /// Places to check, each with the chunks.
    waiting: VecDeque<(Place, Vec<FdId>)>,
    /// When places were checked.
    checked: BTreeMap<Place, Instant>,
    /// Places of which nothing was found out: when to check them again, and how often after that. A GPU that is just
    /// being reset cannot be used.
    again: BTreeMap<Place, (Instant, u32)>,
}

#[derive(Debug)]
struct RunningCheck {
    place: Place,
    child: Child,
    /// The pipe through which it answers.
    answer: OwnedFd,
    said: Vec<u8>,
    /// The chunks that it tries to import.
    chunks: Vec<FdId>,
    /// More chunks of the place, for the next child.
    rest: Vec<FdId>,
    until: Instant,
}

impl MemoryChecks {
    fn includes(&self, place: Place) -> bool {
        self.running.as_ref().is_some_and(|check| check.place == place)
            || self.waiting.iter().any(|(of, _)| *of == place)
    }
}

impl Server {
    /// Has a place checked that a member suspects, unless it was checked a moment ago. Returns whether a check runs.
    pub(super) fn suspect_memory(&mut self, place: Place) -> bool {
        if self.memory_checks.includes(place) {
            return true;
        }
        let now = Instant::now();
        self.memory_checks.checked.retain(|_, at| now.saturating_duration_since(*at) < PAUSE);
        if !self.checks_memory || self.memory_checks.checked.contains_key(&place) {
            return false;
        }
        let chunks = self.registry.chunks_at(place);
        if chunks.is_empty() {
            return false;
        }
        self.memory_checks.checked.insert(place, now);
        self.memory_checks.waiting.push_back((place, chunks));
        self.next_memory_check();
        self.memory_checks.includes(place)
    }

    /// Starts the next check, if none runs and the child of the last one has ended.
    fn next_memory_check(&mut self) {
        if self.memory_checks.running.is_some() {
            return;
        }
        self.memory_checks.ending.take_if(|child| !matches!(child.try_wait(), Ok(None)));
        if self.memory_checks.ending.is_some() {
            return self.reactor.set_timer(REAP, Timer::MemoryCheck);
        }
        let Some((place, chunks)) = self.memory_checks.waiting.pop_front().or_else(|| self.due_memory_check()) else {
            return;
        };
        match self.start_memory_check(place, chunks) {
            Ok(check) => {
                tracing::info!(place = %text(place), chunks = check.chunks.len(), "checking whether memory is lost");
                self.reactor.set_timer(MAX_CHECK, Timer::MemoryCheck);
                self.memory_checks.running = Some(check);
            }
            Err(error) => {
                tracing::warn!(place = %text(place), %error, "memory could not be checked");
                self.check_memory_again(place);
                // Others may wait.
                self.reactor.set_timer(REAP, Timer::MemoryCheck);
            }
        }
    }

    /// Returns a place that is to be checked again by now.
    fn due_memory_check(&mut self) -> Option<(Place, Vec<FdId>)> {
        let now = Instant::now();
        let place = self.memory_checks.again.iter().find(|(_, (at, _))| *at <= now).map(|(place, _)| *place)?;
        let chunks = self.registry.chunks_at(place);
        if chunks.is_empty() {
            self.memory_checks.again.remove(&place);
            return None;
        }
        self.memory_checks.checked.insert(place, now);
        Some((place, chunks))
    }

    /// Has a place checked again of which nothing was found out, a few times.
    fn check_memory_again(&mut self, place: Place) {
        let left = self.memory_checks.again.remove(&place).map_or(MAX_AGAIN, |(_, left)| left);
        if let Some(left) = left.checked_sub(1) {
            self.memory_checks.again.insert(place, (Instant::now() + PAUSE, left));
            self.reactor.set_timer(PAUSE, Timer::MemoryCheck);
        }
    }

    fn start_memory_check(&self, place: Place, mut chunks: Vec<FdId>) -> std::io::Result<RunningCheck> {
        let rest = chunks.split_off(chunks.len().min(MAX_CHUNKS));
        // Some may have been closed since.
        chunks.retain(|chunk| !self.runner.store.share(&[*chunk]).is_empty());
        let shared = self.runner.store.share(&chunks);
        let (answer, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&answer, true)?;
        self.reactor.watch(&answer, EventSource::MemoryCheck, EventFlags::IN)?;
        let fds: Vec<_> = std::iter::once(theirs.as_fd()).chain(shared.iter().filter_map(|fd| fd.fd())).collect();
        let child = start_program(this_program()?, &fds, VARIABLE, |numbers| Purpose::check_memory(place, numbers))?;
        Ok(RunningCheck { place, child, answer, said: Vec::new(), chunks, rest, until: Instant::now() + MAX_CHECK })
    }

    /// Reads what the child has said so far.
    pub(super) fn on_memory_answer(&mut self) {
        let Some(check) = &mut self.memory_checks.running else { return };
        let mut bytes = [0; 4096];
        match retry_on_intr(|| read(&check.answer, &mut bytes)) {
            Ok(0) => self.end_memory_check(None),
            Ok(count) => {
                check.said.extend_from_slice(&bytes[..count]);
                // The child may take long to end, because the driver does.
                if Found::decode(&check.said).is_some() {
                    self.end_memory_check(None);
                } else if check.said.len() > MAX_ANSWER {
                    self.end_memory_check(Some("the child writes without end"));
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.end_memory_check(Some("its answer cannot be read")),
        }
    }

    /// Ends a check that has taken too long, or starts the next one if the last child has ended.
    pub(super) fn on_memory_timer(&mut self) {
        match &self.memory_checks.running {
            Some(check) if check.until <= Instant::now() => {
                self.end_memory_check(Some("the child did not answer in time"))
            }
            Some(_) => {}
            None => self.next_memory_check(),
        }
    }

    /// Ends the child, and what it has found lost. `failed` says why it has found nothing.
    fn end_memory_check(&mut self, failed: Option<&str>) {
        let Some(RunningCheck { place, mut child, answer, said, chunks, rest, .. }) = self.memory_checks.running.take()
        else {
            return;
        };
        self.reactor.unwatch(&answer);
        let _ = child.kill();
        self.memory_checks.ending = Some(child);
        let found = match failed {
            Some(why) => Err(why.to_owned()),
            None => Found::decode(&said).map_or_else(|| Err("the child has crashed".into()), |Found(found)| found),
        };
        match found {
            Ok(found) => {
                self.memory_checks.again.remove(&place);
                let is_lost = |(chunk, lost): (&FdId, bool)| lost.then_some(*chunk);
                let lost: Vec<_> = chunks.iter().zip(found).filter_map(is_lost).collect();
                if lost.is_empty() {
                    tracing::info!(place = %text(place), "no memory is lost there");
                } else {
                    tracing::error!(place = %text(place), lost = lost.len(), "memory is lost: its names have ended");
                    self.apply(Event::DeviceLost { place, chunks: lost });
                }
                // Chunks that were committed since then are not lost, and say nothing about the others.
                if !rest.is_empty() {
                    self.memory_checks.waiting.push_front((place, rest));
                }
            }
            Err(why) => {
                tracing::warn!(place = %text(place), why, "whether memory is lost cannot be found out: no name has ended");
                self.check_memory_again(place);
            }
        }
        self.next_memory_check();
    }
}

/// Returns a place as the command prints it: a GPU's UUID as `nvidia-smi -L` does.
fn text(place: Place) -> String {
    let gpu = match place {
        Place::Gpu(gpu) => gpu,
        Place::Pinned(node) => return format!("pinned:{node}"),
        Place::Host => return "host".into(),
    };
    let hex = format!("{:032x}", u128::from_be_bytes(gpu));
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// How long after a check begins before the place is checked again: members that report without end start no more
/// children.
const PAUSE: Duration = Duration::from_secs(10);

/// How often a place is checked again if nothing is found out.
const MAX_AGAIN: u32 = 6;

/// How long a child may take: a start of CUDA takes half a second, and longer on a machine that is busy.
const MAX_CHECK: Duration = Duration::from_secs(30);

/// How often to ask whether a child has ended.
const REAP: Duration = Duration::from_millis(100);

/// The most chunks of one child, which gets a descriptor for each.
const MAX_CHUNKS: usize = 1024;

/// The longest answer.
const MAX_ANSWER: usize = 64 * 1024;
