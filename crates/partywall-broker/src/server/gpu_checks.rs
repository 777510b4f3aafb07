//! Has a child process check a GPU that may have lost its memory, and ends what is lost.
//!
//! See [`crate::gpu_check`]. Nothing waits for the child: it may be blocked in the driver, where even SIGKILL does not end it
//! at once. The next child is therefore started only when the former one has ended.

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
    gpu_check::Found,
    registry::{Event, FdId},
    replacement::{Purpose, VARIABLE, this_program},
    server::{event_loop::Server, reactor::Source, timers::Timer},
};

/// The checks of GPUs. There is one at a time.
#[derive(Debug, Default)]
pub(super) struct GpuChecks {
    running: Option<Check>,
    /// The child of the last check, until it has ended. A timer is set meanwhile.
    ending: Option<Child>,
    /// GPUs to check, each with the chunks.
    waiting: VecDeque<(Gpu, Vec<FdId>)>,
    /// When GPUs were checked.
    checked: BTreeMap<Gpu, Instant>,
    /// GPUs of which nothing was found out: when to check them again, and how often after that. A GPU that is just being
    /// reset cannot be used.
    again: BTreeMap<Gpu, (Instant, u32)>,
}

type Gpu = [u8; 16];

#[derive(Debug)]
struct Check {
    gpu: Gpu,
    child: Child,
    /// The pipe through which it answers.
    answer: OwnedFd,
    said: Vec<u8>,
    /// The chunks that it tries to import.
    chunks: Vec<FdId>,
    /// More chunks of the GPU, for the next child.
    rest: Vec<FdId>,
    until: Instant,
}

impl GpuChecks {
    fn includes(&self, gpu: Gpu) -> bool {
        self.running.as_ref().is_some_and(|check| check.gpu == gpu) || self.waiting.iter().any(|(of, _)| *of == gpu)
    }
}

impl Server {
    /// Has a GPU checked that a member suspects, unless it was checked a moment ago. Returns whether a check runs.
    pub(super) fn suspect_gpu(&mut self, gpu: Gpu) -> bool {
        if self.gpu_checks.includes(gpu) {
            return true;
        }
        let now = Instant::now();
        self.gpu_checks.checked.retain(|_, at| now.saturating_duration_since(*at) < PAUSE);
        if !self.checks_gpus || self.gpu_checks.checked.contains_key(&gpu) {
            return false;
        }
        let chunks = self.registry.chunks_on(gpu);
        if chunks.is_empty() {
            return false;
        }
        self.gpu_checks.checked.insert(gpu, now);
        self.gpu_checks.waiting.push_back((gpu, chunks));
        self.next_gpu_check();
        self.gpu_checks.includes(gpu)
    }

    /// Starts the next check, if none runs and the child of the last one has ended.
    fn next_gpu_check(&mut self) {
        if self.gpu_checks.running.is_some() {
            return;
        }
        self.gpu_checks.ending.take_if(|child| !matches!(child.try_wait(), Ok(None)));
        if self.gpu_checks.ending.is_some() {
            return self.reactor.set_timer(REAP, Timer::GpuCheck);
        }
        let Some((gpu, chunks)) = self.gpu_checks.waiting.pop_front().or_else(|| self.due_gpu_check()) else { return };
        match self.start_gpu_check(gpu, chunks) {
            Ok(check) => {
                tracing::info!(gpu = %text(gpu), chunks = check.chunks.len(), "checking whether a GPU has lost its memory");
                self.reactor.set_timer(MAX_CHECK, Timer::GpuCheck);
                self.gpu_checks.running = Some(check);
            }
            Err(error) => {
                tracing::warn!(gpu = %text(gpu), %error, "a GPU could not be checked");
                self.check_gpu_again(gpu);
                // Others may wait.
                self.reactor.set_timer(REAP, Timer::GpuCheck);
            }
        }
    }

    /// Returns a GPU that is to be checked again by now.
    fn due_gpu_check(&mut self) -> Option<(Gpu, Vec<FdId>)> {
        let now = Instant::now();
        let gpu = self.gpu_checks.again.iter().find(|(_, (at, _))| *at <= now).map(|(gpu, _)| *gpu)?;
        let chunks = self.registry.chunks_on(gpu);
        if chunks.is_empty() {
            self.gpu_checks.again.remove(&gpu);
            return None;
        }
        self.gpu_checks.checked.insert(gpu, now);
        Some((gpu, chunks))
    }

    /// Has a GPU checked again of which nothing was found out, a few times.
    fn check_gpu_again(&mut self, gpu: Gpu) {
        let left = self.gpu_checks.again.remove(&gpu).map_or(MAX_AGAIN, |(_, left)| left);
        if let Some(left) = left.checked_sub(1) {
            self.gpu_checks.again.insert(gpu, (Instant::now() + PAUSE, left));
            self.reactor.set_timer(PAUSE, Timer::GpuCheck);
        }
    }

    fn start_gpu_check(&self, gpu: Gpu, mut chunks: Vec<FdId>) -> std::io::Result<Check> {
        let rest = chunks.split_off(chunks.len().min(MAX_CHUNKS));
        // Some may have been closed since.
        chunks.retain(|chunk| !self.runner.store.share(&[*chunk]).is_empty());
        let shared = self.runner.store.share(&chunks);
        let (answer, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&answer, true)?;
        self.reactor.watch(&answer, Source::GpuCheck, EventFlags::IN)?;
        let fds: Vec<_> = std::iter::once(theirs.as_fd()).chain(shared.iter().filter_map(|fd| fd.fd())).collect();
        let child = start_program(this_program()?, &fds, VARIABLE, |numbers| Purpose::check_gpu(gpu, numbers))?;
        Ok(Check { gpu, child, answer, said: Vec::new(), chunks, rest, until: Instant::now() + MAX_CHECK })
    }

    /// Reads what the child has said so far.
    pub(super) fn on_gpu_answer(&mut self) {
        let Some(check) = &mut self.gpu_checks.running else { return };
        let mut bytes = [0; 4096];
        match retry_on_intr(|| read(&check.answer, &mut bytes)) {
            Ok(0) => self.end_gpu_check(None),
            Ok(count) => {
                check.said.extend_from_slice(&bytes[..count]);
                // The child may take long to end, because the driver does.
                if Found::decode(&check.said).is_some() {
                    self.end_gpu_check(None);
                } else if check.said.len() > MAX_ANSWER {
                    self.end_gpu_check(Some("the child writes without end"));
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.end_gpu_check(Some("its answer cannot be read")),
        }
    }

    /// Ends a check that has taken too long, or starts the next one if the last child has ended.
    pub(super) fn on_gpu_timer(&mut self) {
        match &self.gpu_checks.running {
            Some(check) if check.until <= Instant::now() => {
                self.end_gpu_check(Some("the child did not answer in time"))
            }
            Some(_) => {}
            None => self.next_gpu_check(),
        }
    }

    /// Ends the child, and what it has found lost. `failed` says why it has found nothing.
    fn end_gpu_check(&mut self, failed: Option<&str>) {
        let Some(Check { gpu, mut child, answer, said, chunks, rest, .. }) = self.gpu_checks.running.take() else {
            return;
        };
        self.reactor.unwatch(&answer);
        let _ = child.kill();
        self.gpu_checks.ending = Some(child);
        let found = match failed {
            Some(why) => Err(why.to_owned()),
            None => Found::decode(&said).map_or_else(|| Err("the child has crashed".into()), |Found(found)| found),
        };
        match found {
            Ok(found) => {
                self.gpu_checks.again.remove(&gpu);
                let is_lost = |(chunk, lost): (&FdId, bool)| lost.then_some(*chunk);
                let lost: Vec<_> = chunks.iter().zip(found).filter_map(is_lost).collect();
                if lost.is_empty() {
                    tracing::info!(gpu = %text(gpu), "the GPU has not lost memory");
                } else {
                    tracing::error!(gpu = %text(gpu), lost = lost.len(), "a GPU has lost memory: the names there have ended");
                    self.apply(Event::DeviceLost { gpu, chunks: lost });
                    if !rest.is_empty() {
                        self.gpu_checks.waiting.push_front((gpu, rest));
                    }
                }
            }
            Err(why) => {
                tracing::warn!(gpu = %text(gpu), why, "whether a GPU has lost memory cannot be found out: no name has ended");
                self.check_gpu_again(gpu);
            }
        }
        self.next_gpu_check();
    }
}

/// Returns a UUID as `nvidia-smi -L` prints it.
fn text(gpu: Gpu) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(gpu));
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// How long after a check begins before the GPU is checked again: members that report without end start no more children.
const PAUSE: Duration = Duration::from_secs(10);

/// How often a GPU is checked again if nothing is found out.
const MAX_AGAIN: u32 = 6;

/// How long a child may take: a start of CUDA takes half a second, and longer on a machine that is busy.
const MAX_CHECK: Duration = Duration::from_secs(30);

/// How often to ask whether a child has ended.
const REAP: Duration = Duration::from_millis(100);

/// The most chunks of one child, which gets a descriptor for each.
const MAX_CHUNKS: usize = 1024;

/// The longest answer.
const MAX_ANSWER: usize = 64 * 1024;
