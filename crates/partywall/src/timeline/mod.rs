//! Timelines: how the work of several processes is ordered.

mod enqueue;
mod event;
#[cfg(feature = "tokio")]
mod future;
mod graph;
mod inputs;
mod lanes;
mod limited;
mod order;
mod waiting;
mod writer;

use std::{
    sync::{Arc, RwLock},
    time::Duration,
};

use partywall_cuda::StreamRef;
use partywall_os::lock::IgnorePoison;
pub use partywall_shm::timeline::MAX_VALUE;
use partywall_shm::timeline::Progress;
use partywall_wire::TimelineEnding;

pub use self::{
    event::TimelineEvent,
    graph::{GraphLaunch, GraphSignal, GraphWait},
    limited::LimitedWait,
    writer::TimelineWriter,
};
pub(crate) use self::{
    lanes::{Lanes, OpenLanes, StreamSignal},
    order::Order,
};
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::{Domain, LeaseGuard, Word},
    error::{Error, Gone, InvalidArgument, InvalidData, Result},
    gpu::Gpu,
    recorder::{Action, timeline_object},
    wait::Wait,
};

/// A named 64-bit value that only grows, from 0 to [`MAX_VALUE`]. One process writes it; any number of processes wait
/// for it, on the host and on streams.
///
/// A value stands for work: the timeline reaches `v` when the work that `v` stands for is done. A waiter for `v` may
/// then use the results. `docs/ordering.md` has the memory-ordering argument of each hand-off, between CPUs and GPUs.
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
/// // Any other process waits, here on the host; `wait_on(stream, 1)` makes a stream wait.
/// let frames = domain.timeline("frames/ready")?;
/// frames.wait(1, Duration::from_secs(10))?;
/// assert_eq!(frames.value(), 1);
///
/// ready.close(); // no more frames: waits for them end
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
/// A wait ends when the timeline reaches the value. It also ends when the writer closes the timeline, is evicted, loses
/// its CUDA context or is proved dead, by [`abandon`](Self::abandon), and when the broker is gone. A wait on the host
/// then returns [`Gone::Timeline`]. **A stream simply continues**, because a stream takes no errors: work enqueued
/// behind the wait may run on garbage, and [`check`](Self::check) says afterwards whether it did. One waiter alone
/// cannot take back a wait on a stream; [`wait_on_for`](Self::wait_on_for) has a time limit, at a price.
///
/// A new writer continues a timeline from the last value that was really signalled. Handles stay with the old writer
/// until they [`follow`](Self::follow).
///
/// # Behind a wait
///
/// Some calls of CUDA wait for a whole device, and so for every wait on its streams: loading a module, the first launch
/// of a kernel, freeing memory, copies of pageable memory. Load and warm up kernels ([`Gpu::kernels`] too), and
/// allocate, before a stream waits. Timelines launch no kernels; they prepare the driver in a connection's first call
/// that takes a stream. A thread that blocks nevertheless delays no signal of another thread, because ending a wait
/// needs no driver call.
///
/// May be used from any thread. Processes share a timeline by its name, threads share a handle by reference.
#[derive(Debug)]
pub struct Timeline {
    at: Arc<At>,
    spin: AdaptiveSpin,
    /// After the lease, since the connection may end with it.
    domain: Domain,
}

/// Keeps a word readable after its handle is dropped.
#[derive(Debug)]
struct Hold {
    at: Arc<At>,
    word: Arc<Word>,
    /// `None` once this is dropped.
    keep: Option<Arc<LeaseGuard>>,
    /// As in [`Timeline`].
    _domain: Domain,
}

/// A timeline's name, and the incarnation that a handle is at.
#[derive(Debug)]
pub(crate) struct At {
    name: String,
    now: RwLock<Incarnation>,
}

/// A word, with the lease that keeps it this timeline's.
#[derive(Debug)]
struct Incarnation {
    word: Arc<Word>,
    /// `None` once it is given back.
    keep: Option<Arc<LeaseGuard>>,
}

impl Domain {
    /// Opens a timeline to wait for it. Creates it at 0 if it does not exist, so that a waiter may come before the
    /// writer. The name ends with the last handle.
    ///
    /// # Errors
    /// [`InvalidArgument::Name`], [`LimitReached::Broker`](crate::error::LimitReached::Broker); those of every call.
    pub fn timeline(&self, name: &str) -> Result<Timeline> {
        self.timeline_options(name).open()
    }

    /// Opens a timeline to signal it. The writer continues from the timeline's present value.
    ///
    /// # Errors
    /// [`Busy::Writer`](crate::error::Busy::Writer) while it has another writer, in any process; as
    /// [`timeline`](Self::timeline).
    pub fn timeline_writer(&self, name: &str) -> Result<TimelineWriter> {
        self.timeline_options(name).writer()
    }

    /// Begins to open a timeline with options.
    pub fn timeline_options(&self, name: &str) -> TimelineOptions {
        TimelineOptions { domain: self.clone(), name: name.to_owned(), shared: false }
    }
}

/// Options to open a timeline; see [`Domain::timeline_options`].
#[derive(Debug, Clone)]
#[must_use = "options do nothing until open() or writer()"]
pub struct TimelineOptions {
    domain: Domain,
    name: String,
    shared: bool,
}

impl TimelineOptions {
    /// Lets processes of other users open the timeline, if this call creates it and the broker admits them. All that
    /// have it open can write its word, so each of their users can break this timeline for all; and no other, because a
    /// shared timeline has memory of its own.
    pub fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Opens it as [`Domain::timeline`] does.
    ///
    /// # Errors
    /// As there.
    pub fn open(&self) -> Result<Timeline> {
        Timeline::open(&self.domain, &self.name, false, self.shared)
    }

    /// Opens it as [`Domain::timeline_writer`] does.
    ///
    /// # Errors
    /// As there.
    pub fn writer(&self) -> Result<TimelineWriter> {
        Timeline::open(&self.domain, &self.name, true, self.shared).map(TimelineWriter::new)
    }
}

impl Timeline {
    fn open(domain: &Domain, name: &str, writer: bool, shared: bool) -> Result<Self> {
        let now = RwLock::new(Incarnation::open(domain, name, writer, shared)?);
        let at = Arc::new(At { name: name.to_owned(), now });
        Ok(Self { at, spin: AdaptiveSpin::on_memory(), domain: domain.clone() })
    }

    /// Waits until the timeline has reached `v`: the work that `v` stands for is done.
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
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `wait_async` blocks none.
    ///
    /// # Errors
    /// [`Gone::Timeline`] as soon as the timeline has ended before `v`; [`Error::Timeout`], [`Error::Cancelled`];
    /// [`InvalidArgument::Value`] for a value above [`MAX_VALUE`];
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn wait<'w>(&self, v: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        let _span = tracing::trace_span!("wait", timeline = self.name(), value = v).entered();
        let recorder = self.domain.recorder();
        let since = recorder.begin();
        self.wait_for(v, Progress::Reached, wait.into())?;
        recorder.record_since(Action::Wait, || timeline_object(self.name()), v, since);
        Ok(())
    }

    /// Waits until `v` is promised: the work that `v` stands for is enqueued. Call [`wait_on`](Self::wait_on) or
    /// [`wait`](Self::wait) next, which then have little to wait for.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_announced<'w>(&self, v: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        let _span = tracing::trace_span!("wait", timeline = self.name(), value = v, announced = true).entered();
        self.wait_for(v, Progress::Announced, wait.into())
    }

    /// Makes `stream` wait until the timeline has reached `v`, before any work enqueued from now on. Returns
    /// immediately, and enqueues nothing if `v` is reached already. The value need not be promised yet, and the
    /// timeline needs no writer.
    ///
    /// # Errors
    /// [`Gone::Timeline`] if the timeline has ended before `v`: nothing is enqueued. If it ends later, the stream
    /// continues, and [`check`](Self::check) says so.
    /// [`DeviceFault::LaunchBlocking`](crate::error::DeviceFault::LaunchBlocking),
    /// [`DeviceFault::Captured`](crate::error::DeviceFault::Captured),
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda); [`InvalidArgument::Value`],
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn wait_on(&self, stream: StreamRef<'_>, v: u64) -> Result<()> {
        let _span = tracing::trace_span!("wait", timeline = self.name(), value = v, on_stream = true).entered();
        enqueue::wait(self, stream, v)?;
        self.domain.recorder().record(Action::WaitOn, || timeline_object(self.name()), v);
        Ok(())
    }

    /// Makes `stream` wait as [`wait_on`](Self::wait_on) does, but for at most `limit`.
    ///
    /// The stream waits for a private word of this process. The connection's service thread writes that word when the
    /// timeline has reached `v` or the time is over. The wait ends up to 1 ms later than a plain one, and costs polling
    /// by the service thread. The returned value says how the wait ended; dropping it changes nothing.
    ///
    /// # Errors
    /// As [`wait_on`](Self::wait_on).
    pub fn wait_on_for(&self, stream: StreamRef<'_>, v: u64, limit: Duration) -> Result<LimitedWait> {
        limited::wait(self, stream, v, limit)
    }

    /// Returns a file descriptor for event loops, which becomes readable once the timeline has reached `v` or ended
    /// before.
    ///
    /// # Errors
    /// [`LimitReached::FileDescriptors`](crate::error::LimitReached::FileDescriptors), [`InvalidArgument::Value`],
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn event(&self, v: u64) -> Result<TimelineEvent> {
        event::watch(self, v)
    }

    /// Returns the last value that was signalled.
    pub fn value(&self) -> u64 {
        self.at.word().cell().value()
    }

    /// Returns the highest value that was promised, which is at least [`value`](Self::value).
    pub fn announced(&self) -> u64 {
        self.at.word().cell().announced()
    }

    /// Returns how the timeline ended, if it has.
    pub fn ending(&self) -> Option<TimelineEnding> {
        self.at.word().ending()
    }

    /// Checks that all values that this handle has waited for are valid, as far as is known. Call it when the work
    /// behind a wait on a stream is done, before you use its results.
    ///
    /// # Errors
    /// [`Gone::Timeline`] if the timeline ended before a value that a stream waited for (waits on the host return that
    /// themselves). [`InvalidData::Tainted`] if such a value rests on another timeline, which has failed. After
    /// [`device_ptr`](Self::device_ptr), kernels may have waited for any value, so all values count.
    pub fn check(&self) -> Result<()> {
        let word = self.at.word();
        // Kernels may have waited for any value.
        self.at.check(&word, if word.is_polled() { MAX_VALUE } else { word.waited() })
    }

    /// Makes the handle follow the next writer, if there is one. Returns `false` if there is none. Later waits and
    /// [`check`](Self::check) then refer to the values of that writer.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn follow(&self) -> Result<bool> {
        let (word, keep) = self.at.now();
        let (present, _) = self.domain.follow_timeline(keep.lease())?;
        if present.incarnation == word.incarnation {
            return Ok(false);
        }
        // Takes a lease of its own: the former one must keep every cell that a stream may still wait for. The timeline
        // exists, so whether it is shared is decided.
        let next = Incarnation::open(&self.domain, self.name(), false, false)?;
        *self.at.now.write().ignore_poison() = next;
        drop(word);
        keep.release();
        Ok(true)
    }

    /// Ends all waits, of all processes, for values that the timeline has not reached. To signal further values, its
    /// writer must open the timeline again.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn abandon(&self) -> Result<()> {
        self.domain.abandon_timeline(&self.at.name)
    }

    /// Returns the address at which kernels on `gpu` find the value: 8 bytes, valid for as long as this handle. It is
    /// the word of the incarnation that the handle follows now.
    ///
    /// A kernel reads it with `ld.acquire.sys.u64` (`cuda::atomic_ref<uint64_t, cuda::thread_scope_system>`), or
    /// through a `volatile` pointer followed by `__threadfence_system()`, and compares as streams do:
    /// `(int64_t)(word - v) >= 0`. A word larger than [`MAX_VALUE`] means that the timeline has ended, at
    /// `word - (1 << 62) - 1`: **a kernel that polls must end then**, and should also have a timeout of its own.
    ///
    /// A kernel of the writer stores with `st.release.sys.u64`, or with `__threadfence_system()` before a `volatile`
    /// store. It stores only values that its host has promised ([`TimelineWriter::promise_on`]), and none once the word
    /// is larger than [`MAX_VALUE`].
    ///
    /// Without MPS, a kernel that polls occupies the whole GPU during its time slices; a stream that waits does not.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda),
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn device_ptr(&self, gpu: &Gpu) -> Result<u64> {
        enqueue::device_ptr(self, gpu)
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.at.name
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Returns the present incarnation, with its lease.
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
        // In a forked child, a thread that does not exist there may hold the lock.
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
    /// Opens the present incarnation.
    fn open(domain: &Domain, name: &str, writer: bool, shared: bool) -> Result<Self> {
        let (opened, slab) = domain.open_timeline(name, writer, shared)?;
        // Dropping it gives the lease back if the mapping fails.
        let keep = Some(Arc::new(domain.keep(opened.lease)));
        Ok(Self { word: domain.timeline_memory().take_in(&opened, slab)?, keep })
    }
}

impl At {
    /// Returns the incarnation.
    pub(crate) fn word(&self) -> Arc<Word> {
        self.now.read().ignore_poison().word.clone()
    }

    /// Returns the incarnation with its lease, without which the cell may become another timeline's.
    fn now(&self) -> (Arc<Word>, Arc<LeaseGuard>) {
        let now = self.now.read().ignore_poison();
        // Only the last owner takes the lease away.
        (now.word.clone(), now.keep.clone().expect("a handle has its lease until it is dropped"))
    }

    /// Gives the lease back immediately if this is the last owner.
    fn release(this: &mut Arc<Self>) {
        let now = Arc::get_mut(this).map(|at| at.now.get_mut().ignore_poison());
        if let Some(keep) = now.and_then(|now| now.keep.take()) {
            keep.release();
        }
    }

    /// Checks that all values up to `v` are valid or may still become so.
    fn check(&self, word: &Word, v: u64) -> Result<()> {
        if let Progress::Ended(ending) = word.progress(v) {
            return Err(self.ended(word, ending, v));
        }
        match word.cell().tainted() {
            Some(from) if from <= v => Err(InvalidData::Tainted { name: self.name.clone(), from }.into()),
            _ => Ok(()),
        }
    }

    fn ended(&self, word: &Word, ending: TimelineEnding, wanted: u64) -> Error {
        Error::Gone(Gone::Timeline { name: self.name.clone(), ending, wanted, last: word.cell().value() })
    }

    fn check_value(&self, v: u64) -> Result<()> {
        if v <= MAX_VALUE {
            return Ok(());
        }
        Err(InvalidArgument::Value { name: self.name.clone(), value: v, last: self.word().cell().announced() }.into())
    }
}
