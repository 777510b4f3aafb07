//! Timelines: how the work of several processes is ordered.

mod enqueue;
mod event;
mod inputs;
mod limited;
mod waiting;
mod writer;

use std::{
    sync::{Arc, RwLock},
    time::Duration,
};

use partywall_cuda::StreamRef;
use partywall_os::lock::IgnorePoison;
pub use partywall_shm::timeline::MAX_VALUE;
use partywall_shm::timeline::{Ending, Progress};
use partywall_wire::TimelineEnding;

pub use self::{event::TimelineEvent, limited::LimitedWait, writer::TimelineWriter};
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::{Domain, LeaseGuard, Word},
    error::{Error, Gone, InvalidArgument, InvalidData, Result},
    gpu::Gpu,
    wait::Wait,
};

/// A named 64-bit value that only grows, from 0 to [`MAX_VALUE`]: one process writes it, any number of them wait for it,
/// on hosts and on streams.
///
/// A value is a promise about work: the timeline stands at `v` when what `v` stands for is done. Who waits for `v` may then
/// use that. The memory-ordering argument of each hand-off, CPU and GPU, is in `docs/ordering.md`.
///
/// ```
/// use std::time::Duration;
/// use partywall::{Error, error::Gone};
///
/// # let directory = tempfile::tempdir()?;
/// # let socket = directory.path().join("sockets/doc.sock");
/// # let broker = partywall_broker::Broker::bind(partywall_broker::Config::new(&socket, "doc", partywall::VERSION))?;
/// # let stop = broker.stop_handle()?;
/// # let broker = std::thread::spawn(move || broker.run());
/// # let domain = partywall::Domain::options().socket(&socket).connect()?;
/// // One process writes. `domain` is `Domain::connect()?`.
/// let ready = domain.timeline_writer("frames/ready")?;
/// ready.signal(1)?; // frame 1 is complete; `signal_on(stream, 1)` says so behind the work of a stream
///
/// // Any other waits, on the host here; `wait_on(stream, 1)` lets a stream wait.
/// let frames = domain.timeline("frames/ready")?;
/// frames.wait(1, Duration::from_secs(10))?;
/// assert_eq!(frames.value(), 1);
///
/// ready.close(); // no more frames: whoever waits for one hears so
/// match frames.wait(2, Duration::from_secs(10)) {
///     Err(Error::Gone(Gone::Timeline { last, .. })) => assert_eq!(last, 1),
///     other => panic!("{other:?}"),
/// }
/// # drop((frames, domain));
/// # stop.stop();
/// # broker.join().expect("the broker does not panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Every wait ends
///
/// By the value, or with the writer: when its process is proved dead, its CUDA context is lost, it is evicted, or closes
/// the timeline before the value; by [`abandon`](Self::abandon); or when the broker is gone. A host's wait then returns
/// [`Gone::Timeline`], and **a stream simply goes on**, for nobody can tell a stream. So what is enqueued behind a
/// wait may run on garbage, and [`check`](Self::check) says afterwards whether it did. A wait on a stream cannot be taken
/// back by one waiter alone; [`wait_on_for`](Self::wait_on_for) has a time limit, at a price.
///
/// A timeline goes on under a new writer, from the last value that was really signalled. Handles stay with the old one
/// until they [`follow`](Self::follow).
///
/// # Behind a wait
///
/// Some calls of CUDA wait for a whole device, and so for whatever a stream of it waits for: loading a module, a kernel's
/// first launch, freeing memory, copies of pageable memory. Load and warm up kernels, Partywall's own
/// ([`Gpu::kernels`]) among them, and allocate, before a stream waits. Timelines themselves launch no kernels, and what
/// they need of the driver they get with the first call of a connection that takes a stream. A thread that is held up
/// all the same holds up no signal of another: nothing that ends a wait needs the driver.
///
/// May be used from any thread. Processes share a timeline by its name, threads share a handle by reference.
#[derive(Debug)]
pub struct Timeline {
    at: Arc<At>,
    spin: AdaptiveSpin,
    /// After the lease, since the connection may end with it.
    domain: Domain,
}

/// What somebody needs who looks at a word later than the handle may live.
#[derive(Debug)]
struct Hold {
    at: Arc<At>,
    word: Arc<Word>,
    /// `None` once this is dropped.
    keep: Option<Arc<LeaseGuard>>,
    /// As in [`Timeline`].
    _domain: Domain,
}

/// Where a handle is.
#[derive(Debug)]
pub(crate) struct At {
    name: String,
    now: RwLock<Incarnation>,
}

/// A word with the lease that has led to it, and to no other.
#[derive(Debug)]
struct Incarnation {
    word: Arc<Word>,
    /// `None` once it is given back.
    keep: Option<Arc<LeaseGuard>>,
}

impl Domain {
    /// Opens a timeline to wait for it. If there is none of this name it is made, at 0: who waits may come before who
    /// writes. The name goes with the last handle on it.
    ///
    /// # Errors
    /// [`InvalidArgument::Name`], [`LimitReached::Broker`](crate::error::LimitReached::Broker); those of every call.
    pub fn timeline(&self, name: &str) -> Result<Timeline> {
        Timeline::open(self, name, false)
    }

    /// Opens a timeline to signal it, from the value on at which it stands.
    ///
    /// # Errors
    /// [`Busy::Writer`](crate::error::Busy::Writer) while it has another writer, in whatever process; as [`timeline`](Self::timeline).
    pub fn timeline_writer(&self, name: &str) -> Result<TimelineWriter> {
        Timeline::open(self, name, true).map(TimelineWriter::new)
    }
}

impl Timeline {
    fn open(domain: &Domain, name: &str, writer: bool) -> Result<Self> {
        let now = RwLock::new(Incarnation::open(domain, name, writer)?);
        let at = Arc::new(At { name: name.to_owned(), now });
        Ok(Self { at, spin: AdaptiveSpin::on_memory(), domain: domain.clone() })
    }

    /// Waits until the timeline has reached `v`: until the work is done that `v` stands for.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Error, Result, Timeline, error::Gone};
    /// # fn wait(frames: &Timeline) -> Result<()> {
    /// match frames.wait(7, Duration::from_secs(1)) {
    ///     Ok(()) => println!("frame 7 is complete"),
    ///     Err(Error::Timeout { .. }) => println!("not yet"),
    ///     Err(Error::Gone(Gone::Timeline { last, .. })) => println!("no frame follows frame {last}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Gone::Timeline`] as soon as it is known that it will not; [`Error::Timeout`], [`Error::Cancelled`];
    /// [`InvalidArgument::Value`] for one that no timeline reaches; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn wait<'w>(&self, v: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.wait_for(v, Progress::Reached, wait.into())
    }

    /// Waits until `v` is promised: until the work that it stands for is enqueued. To be followed by
    /// [`wait_on`](Self::wait_on) or [`wait`](Self::wait), which then have not long to wait.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_announced<'w>(&self, v: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.wait_for(v, Progress::Announced, wait.into())
    }

    /// Has what is enqueued on `stream` from now on wait until the timeline has reached `v`. Returns at once, and enqueues
    /// nothing if it has. The value need not be promised yet, and there need not be a writer.
    ///
    /// # Errors
    /// Nothing is enqueued if the timeline has ended before `v`: [`Gone::Timeline`]. If it ends later the stream goes
    /// on, and [`check`](Self::check) says so. [`DeviceFault::LaunchBlocking`](crate::error::DeviceFault::LaunchBlocking), [`DeviceFault::Captured`](crate::error::DeviceFault::Captured), [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda); [`InvalidArgument::Value`], [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn wait_on(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        enqueue::wait(self, stream, v)
    }

    /// As [`wait_on`](Self::wait_on), but the stream goes on after `limit` at the latest.
    ///
    /// It waits for a word of this process alone, which the connection's service thread writes when the timeline has come
    /// to `v`, or when the time is over: that is up to 1 ms later than a plain wait, and costs a thread that looks again
    /// and again. What is returned says how it ended; dropping that changes nothing.
    ///
    /// # Errors
    /// As [`wait_on`](Self::wait_on).
    pub fn wait_on_for(&self, stream: StreamRef<'_>, v: u64, limit: Duration) -> Result<LimitedWait> {
        limited::wait(self, stream, v, limit)
    }

    /// A file descriptor for event loops: readable once the timeline has reached `v`, or is known not to.
    ///
    /// # Errors
    /// [`LimitReached::FileDescriptors`](crate::error::LimitReached::FileDescriptors), [`InvalidArgument::Value`], [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn event(&self, v: u64) -> Result<TimelineEvent> {
        event::watch(self, v)
    }

    /// The last value that was really signalled.
    pub fn value(&self) -> u64 {
        self.at.word().cell().value()
    }

    /// The highest value that was promised: not less than [`value`](Self::value).
    pub fn announced(&self) -> u64 {
        self.at.word().cell().announced()
    }

    /// Why no further value will come, if so.
    pub fn ending(&self) -> Option<TimelineEnding> {
        self.at.word().ending().map(ending)
    }

    /// Whether what was waited for through this handle is valid, as far as is known: to be asked when the work behind a
    /// wait on a stream is done, before its results are used.
    ///
    /// # Errors
    /// [`Gone::Timeline`] if the timeline ended before a value that a stream waited for (a wait of the host says so
    /// itself); [`InvalidData::Tainted`] if a value that was waited for was signalled by work that rested on another timeline,
    /// which has failed. Once kernels were told [where the value is](Self::device_ptr), for any value.
    pub fn check(&self) -> Result<()> {
        let word = self.at.word();
        // Nobody knows what kernels have waited for.
        self.at.check(&word, if word.is_polled() { MAX_VALUE } else { word.waited() })
    }

    /// Goes over to the next writer's incarnation, if there is one; `false` if there is not. Waits from then on are for
    /// what that one signals, and so is [`check`](Self::check).
    ///
    /// # Errors
    /// Those of every call.
    pub fn follow(&self) -> Result<bool> {
        let (word, keep) = self.at.now();
        let (present, _) = self.domain.follow_timeline(keep.lease(), u32::MAX)?;
        if present.incarnation == word.incarnation {
            return Ok(false);
        }
        // By a lease of its own: the former keeps every cell that it has led to, as long as a stream may wait there.
        let next = Incarnation::open(&self.domain, self.name(), false)?;
        *self.at.now.write().ignore_poison() = next;
        drop(word);
        keep.release();
        Ok(true)
    }

    /// Ends all waits for what the timeline has not reached, for everybody. Its writer has to open it anew to signal it.
    ///
    /// # Errors
    /// Those of every call.
    pub fn abandon(&self) -> Result<()> {
        self.domain.abandon_timeline(&self.at.name)
    }

    /// Where kernels on `gpu` find the value: an address of 8 bytes, valid as long as this handle. It is the word of the
    /// incarnation that the handle is at now.
    ///
    /// A kernel reads it with `ld.acquire.sys.u64` (`cuda::atomic_ref<uint64_t, cuda::thread_scope_system>`), or through a
    /// `volatile` pointer followed by `__threadfence_system()`, and compares as streams do: `(int64_t)(word - v) >= 0`. A
    /// word larger than [`MAX_VALUE`] says that the timeline has ended, at `word - (1 << 62) - 1`: **a kernel that polls
    /// has to end then**, and after a time of its own choice.
    ///
    /// A kernel of the writer's stores with `st.release.sys.u64`, or with `__threadfence_system()` before a `volatile`
    /// store: only values that its host has promised ([`TimelineWriter::promise_on`]), and none once the word is larger
    /// than [`MAX_VALUE`].
    ///
    /// Unless MPS is on, a kernel that polls keeps everybody else from the GPU for its slices of time; a stream that waits
    /// does not.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda), [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn device_ptr(&self, gpu: &Gpu) -> Result<u64> {
        enqueue::device_ptr(self, gpu)
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.at.name
    }

    /// The domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// The present incarnation, with its lease.
    pub(crate) fn present(&self) -> (Arc<Word>, Arc<LeaseGuard>) {
        self.at.now()
    }

    fn hold(&self) -> Hold {
        let (word, keep) = self.at.now();
        Hold { at: self.at.clone(), word, keep: Some(keep), _domain: self.domain.clone() }
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // In a forked child a lock may be held by nobody who is still there.
        if self.domain.link().require_ours().is_ok() {
            self.domain.stream_waits().forget_passed();
        }
        At::release(&mut self.at);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            keep.release();
        }
        At::release(&mut self.at);
    }
}

impl Incarnation {
    /// The present one.
    fn open(domain: &Domain, name: &str, writer: bool) -> Result<Self> {
        let known = domain.timeline_memory().mapped();
        let (opened, fds) = domain.open_timeline(name, writer, known)?;
        // Goes back if what follows fails.
        let keep = Some(Arc::new(domain.keep(opened.lease)));
        Ok(Self { word: domain.timeline_memory().take_in(&opened, known, fds)?, keep })
    }
}

impl At {
    /// The incarnation.
    pub(crate) fn word(&self) -> Arc<Word> {
        self.now.read().ignore_poison().word.clone()
    }

    /// The same, with its lease: without that the cell may become another timeline's.
    fn now(&self) -> (Arc<Word>, Arc<LeaseGuard>) {
        let now = self.now.read().ignore_poison();
        // Only the last who has this takes it.
        (now.word.clone(), now.keep.clone().expect("a handle has its lease until it is dropped"))
    }

    /// Gives the lease back at once, if nobody else has this.
    fn release(this: &mut Arc<Self>) {
        let now = Arc::get_mut(this).map(|at| at.now.get_mut().ignore_poison());
        if let Some(keep) = now.and_then(|now| now.keep.take()) {
            keep.release();
        }
    }

    /// Whether all up to `v` is valid or may still become so.
    fn check(&self, word: &Word, v: u64) -> Result<()> {
        if let Progress::Ended(ending) = word.progress(v) {
            return Err(self.ended(word, ending, v));
        }
        match word.cell().tainted() {
            Some(from) if from <= v => Err(InvalidData::Tainted { name: self.name.clone(), from }.into()),
            _ => Ok(()),
        }
    }

    fn ended(&self, word: &Word, how: Ending, wanted: u64) -> Error {
        Error::Gone(Gone::Timeline { name: self.name.clone(), ending: ending(how), wanted, last: word.cell().value() })
    }

    fn check_value(&self, v: u64) -> Result<()> {
        if v <= MAX_VALUE {
            return Ok(());
        }
        Err(InvalidArgument::Value { name: self.name.clone(), value: v, last: self.word().cell().announced() }.into())
    }
}

pub(crate) fn ending(ending: Ending) -> TimelineEnding {
    match ending {
        Ending::OwnerDied => TimelineEnding::OwnerDied,
        Ending::OwnerFaulted => TimelineEnding::OwnerFaulted,
        Ending::Closed => TimelineEnding::Closed,
        Ending::Abandoned => TimelineEnding::Abandoned,
        Ending::BrokerGone => TimelineEnding::BrokerGone,
        Ending::Evicted => TimelineEnding::Evicted,
    }
}
