//! Order between enqueued work of Vulkan and other processes.
//!
//! A semaphore of Vulkan stays in its process. A thread carries values from a timeline to a semaphore, or back: hosts
//! can wait for both, and a wait for a timeline ends with its writer, while nothing would end a wait for the semaphore
//! of a dead process. An exported semaphore would also be slower: a hand-off took 155 µs by it, and 12 to 14 by a
//! thread (H200).

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::JoinHandle,
    time::Duration,
};

use ash::vk;
use partywall::{Error as PartywallError, MAX_VALUE, Timeline, TimelineWriter, Wait};
use partywall_os::{lock::IgnorePoison, thread};

use crate::{
    error::{Error, Result, failed},
    gpu::Gpu,
};

/// The longest wait of a thread before it checks whether it should end.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// A timeline semaphore of this process that follows a [`Timeline`]: [`Gpu::follow`] returns one.
///
/// A thread waits for the timeline while values are wanted, and signals the semaphore. A wait also ends when the
/// timeline ends before its value: its writer died, closed it, was evicted. **Vulkan simply continues then**, because a
/// queue takes no errors; [`check`](Self::check) says so. Dropping this ends all waits; the semaphore itself stays
/// until the [`Gpu`] is dropped.
#[derive(Debug)]
pub struct FollowedTimeline {
    shared: Arc<Followed>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Followed {
    timeline: Timeline,
    semaphore: Semaphore,
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Wanted {
    /// The highest value that is wanted.
    highest: u64,
    /// The value of the semaphore.
    signalled: u64,
    stop: bool,
    /// The timeline has ended, and the semaphore has all values that were wanted.
    ended: bool,
}

/// A timeline of other processes that is signalled once enqueued work of Vulkan is done: [`Gpu::signaller`] returns
/// one.
///
/// A thread waits for the semaphore and signals the timeline. If the device is lost, the timeline is closed, so that
/// waits for it end. Dropping this closes the timeline without the values that were not reached;
/// [`finish`](Self::finish) waits for them.
#[derive(Debug)]
pub struct SignalledTimeline {
    shared: Arc<Signalled>,
    thread: Option<JoinHandle<Option<Error>>>,
}

#[derive(Debug)]
struct Signalled {
    name: String,
    semaphore: Semaphore,
    promised: Mutex<Promised>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Promised {
    /// The highest value that a submission was given.
    highest: u64,
    /// The promised values that the timeline does not have yet, in order.
    pending: VecDeque<u64>,
    /// The value of the timeline.
    signalled: u64,
    stop: bool,
}

/// A timeline semaphore, which is destroyed with its device.
#[derive(Debug)]
struct Semaphore {
    handle: vk::Semaphore,
    gpu: Arc<Gpu>,
}

impl Gpu {
    /// Makes a semaphore that follows a timeline.
    ///
    /// # Errors
    /// [`Error::Vulkan`]; [`partywall::Error::LimitReached`] if there is no thread for it.
    pub fn follow(self: &Arc<Self>, timeline: Timeline) -> Result<FollowedTimeline> {
        let value = timeline.value();
        let semaphore = Semaphore::new(self, value)?;
        let wanted = Mutex::new(Wanted { highest: value, signalled: value, ..Wanted::default() });
        let shared = Arc::new(Followed { timeline, semaphore, wanted, changed: Condvar::new() });
        let followed = shared.clone();
        let thread = start("partywall-vk-wait", move || followed.run())?;
        Ok(FollowedTimeline { shared, thread: Some(thread) })
    }

    /// Makes a semaphore whose values a writer signals to other processes. No other code may use the writer.
    ///
    /// # Errors
    /// As [`follow`](Self::follow).
    pub fn signaller(self: &Arc<Self>, writer: TimelineWriter) -> Result<SignalledTimeline> {
        let value = writer.timeline().value();
        let semaphore = Semaphore::new(self, value)?;
        let promised = Mutex::new(Promised { highest: value, signalled: value, ..Promised::default() });
        let name = writer.timeline().name().to_owned();
        let shared = Arc::new(Signalled { name, semaphore, promised, changed: Condvar::new() });
        let signalled = shared.clone();
        let thread = start("partywall-vk-signal", move || signalled.run(&writer).err())?;
        Ok(SignalledTimeline { shared, thread: Some(thread) })
    }
}

impl FollowedTimeline {
    /// Returns the semaphore and the value for which a submission waits, so that it runs once the timeline has reached
    /// `v`. Returns immediately; the value need not be promised yet.
    ///
    /// # Errors
    /// [`Gone::Timeline`](partywall::error::Gone::Timeline) if the timeline has ended before `v`; [`Error::Value`] for
    /// a value that the device's semaphores cannot wait for yet.
    pub fn wait(&self, v: u64) -> Result<(vk::Semaphore, u64)> {
        let Followed { timeline, semaphore, changed, .. } = &*self.shared;
        let mut wanted = self.shared.lock();
        if v > wanted.signalled {
            if wanted.ended || timeline.ending().is_some() {
                timeline.wait(v, Duration::ZERO)?;
                // The timeline had reached it before it ended. No thread signals the semaphore any more.
                return Ok((semaphore.handle, wanted.signalled));
            }
            let most = wanted.signalled.saturating_add(semaphore.gpu.max_difference).min(MAX_VALUE);
            if v > most {
                let why = format!("the semaphore is at {}, and can wait for at most {most}", wanted.signalled);
                return Err(Error::Value { name: timeline.name().to_owned(), value: v, why });
            }
            wanted.highest = wanted.highest.max(v);
            changed.notify_one();
        }
        Ok((semaphore.handle, v))
    }

    /// Checks that the timeline has really reached `v`. Call it when work that waited for `v` is done, before you use
    /// its results.
    ///
    /// # Errors
    /// [`Gone::Timeline`](partywall::error::Gone::Timeline) if the timeline ended before `v`;
    /// [`InvalidData::Tainted`](partywall::error::InvalidData::Tainted) if `v` rests on another timeline that has
    /// failed.
    pub fn check(&self, v: u64) -> Result<()> {
        let timeline = &self.shared.timeline;
        timeline.wait(v, Duration::ZERO)?;
        Ok(timeline.check()?)
    }

    /// Returns the timeline.
    pub fn timeline(&self) -> &Timeline {
        &self.shared.timeline
    }
}

impl Followed {
    /// Runs the thread: as long as a value is wanted, waits for the next one.
    fn run(&self) {
        let mut wanted = self.lock();
        while !wanted.stop {
            if wanted.highest <= wanted.signalled {
                wanted = self.changed.wait(wanted).ignore_poison();
                continue;
            }
            let next = wanted.signalled + 1;
            drop(wanted);
            let stopped = || self.lock().stop;
            let waited = self.timeline.wait(next, Wait::from(Duration::MAX).cancelled_by(&stopped));
            wanted = self.lock();
            match waited {
                Ok(()) => {
                    // A value that is far ahead is signalled in steps that the device takes.
                    let most = wanted.signalled.saturating_add(self.semaphore.gpu.max_difference);
                    wanted.signalled = self.timeline.value().clamp(next, most.max(next));
                    self.semaphore.signal(wanted.signalled);
                }
                Err(PartywallError::Cancelled { .. }) => {}
                Err(error) => {
                    tracing::debug!(timeline = self.timeline.name(), %error, "waits of Vulkan end with their timeline");
                    wanted.ended = true;
                    break;
                }
            }
        }
        // Otherwise work that waits would keep the device busy for ever.
        if wanted.highest > wanted.signalled {
            self.semaphore.signal(wanted.highest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().ignore_poison()
    }
}

impl Drop for FollowedTimeline {
    fn drop(&mut self) {
        if !self.shared.semaphore.gpu.is_ours() {
            return;
        }
        self.shared.lock().stop = true;
        self.shared.changed.notify_one();
        // Ends within `MAX_SLEEP`.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl SignalledTimeline {
    /// Returns the semaphore and the value that a submission signals, so that the timeline reaches `v` when its work is
    /// done.
    ///
    /// # Errors
    /// [`Error::Value`] unless `v` is larger than every value before, and no larger than [`MAX_VALUE`] or than the
    /// device's semaphores can jump.
    pub fn signal(&self, v: u64) -> Result<(vk::Semaphore, u64)> {
        let Signalled { name, semaphore, changed, .. } = &*self.shared;
        let mut promised = self.shared.lock();
        let most = promised.signalled.saturating_add(semaphore.gpu.max_difference).min(MAX_VALUE);
        if promised.stop {
            let why = "the device is lost, or the timeline was ended by others".to_owned();
            return Err(Error::Value { name: name.clone(), value: v, why });
        }
        if v <= promised.highest || v > most {
            let why = format!("it must be greater than {} and at most {most}", promised.highest);
            return Err(Error::Value { name: name.clone(), value: v, why });
        }
        promised.highest = v;
        promised.pending.push_back(v);
        changed.notify_all();
        Ok((semaphore.handle, v))
    }

    /// Waits until the timeline has every value that a submission was given, and closes it. Only call it once these
    /// submissions are enqueued.
    ///
    /// # Errors
    /// [`Error::Vulkan`] if the device is lost or does not get there within `timeout`; those of
    /// [`TimelineWriter::signal`].
    pub fn finish(mut self, timeout: Duration) -> Result<()> {
        let promised = self.shared.lock();
        let is_behind = |promised: &mut Promised| !promised.pending.is_empty() && !promised.stop;
        let waited = self.shared.changed.wait_timeout_while(promised, timeout, is_behind);
        let (promised, waited) = waited.ignore_poison();
        drop(promised);
        match self.end() {
            Some(error) => Err(error),
            None if waited.timed_out() => Err(failed("waiting for enqueued work")(vk::Result::TIMEOUT)),
            None => Ok(()),
        }
    }

    /// Ends the thread, and with it the writer. Returns why the thread has ended by itself.
    fn end(&mut self) -> Option<Error> {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        self.thread.take()?.join().ok().flatten()
    }
}

impl Signalled {
    /// Runs the thread: as long as a value is promised, waits for the next one.
    fn run(&self, writer: &TimelineWriter) -> Result<()> {
        let mut promised = self.lock();
        while !promised.stop {
            // The very values of submissions: version 1.3.239 of the validation layer waits for no other.
            let Some(next) = promised.pending.front().copied() else {
                promised = self.changed.wait(promised).ignore_poison();
                continue;
            };
            drop(promised);
            let reached = self.semaphore.wait(next).and_then(|reached| match reached {
                Some(value) => writer.signal(value).map(|()| reached).map_err(Error::from),
                None => Ok(None),
            });
            promised = self.lock();
            match reached {
                Ok(None) => {}
                Ok(Some(value)) => {
                    promised.signalled = value;
                    promised.pending.retain(|pending| *pending > value);
                }
                Err(error) => {
                    tracing::warn!(timeline = self.name, %error, "a timeline of Vulkan ends");
                    promised.stop = true;
                    self.changed.notify_all();
                    return Err(error);
                }
            }
            self.changed.notify_all();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Promised> {
        self.promised.lock().ignore_poison()
    }
}

impl Drop for SignalledTimeline {
    fn drop(&mut self) {
        if self.shared.semaphore.gpu.is_ours() {
            let _ = self.end();
        }
    }
}

impl Semaphore {
    fn new(gpu: &Arc<Gpu>, value: u64) -> Result<Self> {
        let timeline = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let mut timeline = timeline.initial_value(value);
        let create = vk::SemaphoreCreateInfo::default().push_next(&mut timeline);
        // SAFETY: the device is alive and has timeline semaphores.
        let handle = unsafe { gpu.device().create_semaphore(&create, None) };
        Ok(Self { handle: handle.map_err(failed("creating a semaphore"))?, gpu: gpu.clone() })
    }

    /// Signals a value. Only the thread that follows a timeline calls this, with growing values.
    fn signal(&self, value: u64) {
        let signal = vk::SemaphoreSignalInfo::default().semaphore(self.handle).value(value);
        // SAFETY: the semaphore is alive, and no submission signals it, so the value is larger than its present one.
        if let Err(code) = unsafe { self.gpu.device().signal_semaphore(&signal) } {
            // A lost device waits for nothing.
            tracing::warn!(?code, "a semaphore of Vulkan cannot be signalled");
        }
    }

    /// Waits for a value for at most [`MAX_SLEEP`]. Returns the semaphore's value, or `None` after a timeout.
    fn wait(&self, value: u64) -> Result<Option<u64>> {
        let semaphores = [self.handle];
        let values = [value];
        let wait = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore is alive; neither call needs synchronisation.
        unsafe {
            match self.gpu.device().wait_semaphores(&wait, MAX_SLEEP.as_nanos() as u64) {
                Ok(()) => self.gpu.device().get_semaphore_counter_value(self.handle).map(Some),
                Err(vk::Result::TIMEOUT) => Ok(None),
                Err(code) => Err(code),
            }
        }
        .map_err(failed("waiting for enqueued work"))
    }
}

impl Drop for Semaphore {
    fn drop(&mut self) {
        if self.gpu.is_ours() {
            self.gpu.retire(self.handle);
        }
    }
}

fn start<T: Send + 'static>(name: &str, run: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    thread::spawn(name, run).map_err(|source| PartywallError::starting(format!("the thread {name}"), source).into())
}
