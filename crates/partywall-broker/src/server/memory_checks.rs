//! Has a child process check whether the memory at a place is lost.
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
    registry::{Event, FdId, Registry, types::Place},
    replacement::{Purpose, VARIABLE, this_program},
    server::{
        fds::FdStore,
        reactor::{EventSource, Reactor},
        timers::Timer,
    },
};

/// The checks of places. There is one at a time.
#[derive(Debug, Default)]
pub(super) struct MemoryChecks {
    /// Whether the program of this process can check memory.
    is_possible: bool,
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

impl RunningCheck {
    /// Starts a child that checks as many chunks as it can get.
    fn start(place: Place, mut chunks: Vec<FdId>, memory: &Memory<'_>) -> std::io::Result<Self> {
        let rest = chunks.split_off(chunks.len().min(MAX_CHUNKS));
        // Some may have been closed since.
        chunks.retain(|chunk| !memory.store.share(&[*chunk]).is_empty());
        let shared = memory.store.share(&chunks);
        let (answer, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&answer, true)?;
        memory.reactor.watch(&answer, EventSource::MemoryCheck, EventFlags::IN)?;
        let fds: Vec<_> = std::iter::once(theirs.as_fd()).chain(shared.iter().filter_map(|fd| fd.fd())).collect();
        let child = start_program(this_program()?, &fds, VARIABLE, |numbers| Purpose::check_memory(place, numbers))?;
        Ok(Self { place, child, answer, said: Vec::new(), chunks, rest, until: Instant::now() + MAX_CHECK })
    }
}

/// What a check needs of the server.
pub(super) struct Memory<'a> {
    pub(super) reactor: &'a mut Reactor,
    pub(super) registry: &'a Registry,
    pub(super) store: &'a FdStore,
}

impl MemoryChecks {
    /// `is_possible` says whether the program of this process can check memory.
    pub(super) fn new(is_possible: bool) -> Self {
        Self { is_possible, ..Self::default() }
    }

    fn includes(&self, place: Place) -> bool {
        self.running.as_ref().is_some_and(|check| check.place == place)
            || self.waiting.iter().any(|(of, _)| *of == place)
    }

    /// Has a place checked that a member suspects, unless it was checked a moment ago. Returns whether a check runs.
    pub(super) fn suspect(&mut self, place: Place, memory: Memory<'_>) -> bool {
        if self.includes(place) {
            return true;
        }
        let now = Instant::now();
        self.checked.retain(|_, at| now.saturating_duration_since(*at) < PAUSE);
        if !self.is_possible || self.checked.contains_key(&place) {
            return false;
        }
        let chunks = memory.registry.chunks_at(place);
        if chunks.is_empty() {
            return false;
        }
        self.checked.insert(place, now);
        self.waiting.push_back((place, chunks));
        self.go_on(memory);
        self.includes(place)
    }

    /// Starts the next check, if none runs and the child of the last one has ended.
    pub(super) fn go_on(&mut self, memory: Memory<'_>) {
        if self.running.is_some() {
            return;
        }
        self.ending.take_if(|child| !matches!(child.try_wait(), Ok(None)));
        if self.ending.is_some() {
            return memory.reactor.set_timer(REAP, Timer::MemoryCheck);
        }
        let Some((place, chunks)) = self.waiting.pop_front().or_else(|| self.due(memory.registry)) else {
            return;
        };
        match RunningCheck::start(place, chunks, &memory) {
            Ok(check) => {
                tracing::info!(place = %text(place), chunks = check.chunks.len(), "checking whether memory is lost");
                memory.reactor.set_timer(MAX_CHECK, Timer::MemoryCheck);
                self.running = Some(check);
            }
            Err(error) => {
                tracing::warn!(place = %text(place), %error, "memory could not be checked");
                self.check_again(place, memory.reactor);
                // Others may wait.
                memory.reactor.set_timer(REAP, Timer::MemoryCheck);
            }
        }
    }

    /// Returns a place that is to be checked again by now.
    fn due(&mut self, registry: &Registry) -> Option<(Place, Vec<FdId>)> {
        let now = Instant::now();
        let place = self.again.iter().find(|(_, (at, _))| *at <= now).map(|(place, _)| *place)?;
        let chunks = registry.chunks_at(place);
        if chunks.is_empty() {
            self.again.remove(&place);
            return None;
        }
        self.checked.insert(place, now);
        Some((place, chunks))
    }

    /// Has a place checked again of which nothing was found out, a few times.
    fn check_again(&mut self, place: Place, reactor: &mut Reactor) {
        let left = self.again.remove(&place).map_or(MAX_AGAIN, |(_, left)| left);
        if let Some(left) = left.checked_sub(1) {
            self.again.insert(place, (Instant::now() + PAUSE, left));
            reactor.set_timer(PAUSE, Timer::MemoryCheck);
        }
    }

    /// Reads what the child has said so far. Returns the event of memory that is lost.
    pub(super) fn on_answer(&mut self, reactor: &mut Reactor) -> Option<Event> {
        let check = self.running.as_mut()?;
        let mut bytes = [0; 4096];
        match retry_on_intr(|| read(&check.answer, &mut bytes)) {
            Ok(0) => self.end(reactor, None),
            Ok(count) => {
                check.said.extend_from_slice(&bytes[..count]);
                // The child may take long to end, because the driver does.
                if Found::decode(&check.said).is_some() {
                    self.end(reactor, None)
                } else if check.said.len() > MAX_ANSWER {
                    self.end(reactor, Some("the child writes without end"))
                } else {
                    None
                }
            }
            Err(Errno::AGAIN) => None,
            Err(_) => self.end(reactor, Some("its answer cannot be read")),
        }
    }

    /// Ends a check that has taken too long. Returns the event of memory that is lost.
    pub(super) fn on_timer(&mut self, reactor: &mut Reactor) -> Option<Event> {
        self.running.as_ref().filter(|check| check.until <= Instant::now())?;
        self.end(reactor, Some("the child did not answer in time"))
    }

    /// Ends the child. Returns the event of what it has found lost; `failed` says why it has found nothing.
    fn end(&mut self, reactor: &mut Reactor, failed: Option<&str>) -> Option<Event> {
        let RunningCheck { place, mut child, answer, said, chunks, rest, .. } = self.running.take()?;
        reactor.unwatch(&answer);
        let _ = child.kill();
        self.ending = Some(child);
        let found = match failed {
            Some(why) => Err(why.to_owned()),
            None => Found::decode(&said).map_or_else(|| Err("the child has crashed".into()), |Found(found)| found),
        };
        match found {
            Ok(found) => {
                self.again.remove(&place);
                let is_lost = |(chunk, lost): (&FdId, bool)| lost.then_some(*chunk);
                let lost: Vec<_> = chunks.iter().zip(found).filter_map(is_lost).collect();
                // Chunks that were committed since then are not lost, and say nothing about the others.
                if !rest.is_empty() {
                    self.waiting.push_front((place, rest));
                }
                if lost.is_empty() {
                    tracing::info!(place = %text(place), "no memory is lost there");
                    return None;
                }
                tracing::error!(place = %text(place), lost = lost.len(), "memory is lost: its names have ended");
                Some(Event::DeviceLost { place, chunks: lost })
            }
            Err(why) => {
                tracing::warn!(place = %text(place), why, "whether memory is lost cannot be found out: no name has ended");
                self.check_again(place, reactor);
                None
            }
        }
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
