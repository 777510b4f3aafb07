//! Keeps the memory of tensors alive until no Python object, tensor or capsule uses it any more.
use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use partywall::{
    Block, Build, DeviceUuid, Domain, Drain, EnqueuedResult, Error, Gpu, Loan, LoanMemory, Place, Queue, Sample,
    Segment, Subscriber, TaskMemory, Topic, check_suspended,
    cuda::{Context, CuResult, RawStream},
    error::{Gone, Unreachable},
};
use partywall_os::{lock::IgnorePoison, per_process::PerProcess};
use pyo3::prelude::*;

use crate::{
    dlpack::{CUDA, DLDevice, HOST},
    errors::Raise,
    memory::Memory,
    part::{Part, TaskClaim},
    reaper::{self, Late},
    wait,
};

/// Pause before the driver is asked again while a graph capture prevents waiting for the context.
const CAPTURE: Duration = Duration::from_millis(10);

/// How long an advance waits for calls of other threads that use the segment.
const CALLS: Duration = Duration::from_secs(10);

/// What a Python object, its tensors and its capsules share: a build, segment, block, loan, sample, part of a claimed
/// task or output of an enqueued one. A build can become a segment, a loan a published sample, and an output the block
/// of a result.
///
/// Lock it without the GIL: the lock is held during commits, while a build is copied, and while an advance waits for
/// the GPU.
pub(crate) struct Owner {
    state: Mutex<OwnerState>,
    /// False for builds and segments: what tells whether readers wait for a stream then answers without the lock,
    /// because exports of tensors ask with the GIL.
    may_be_awaited: bool,
    writable: AtomicBool,
    /// True if an address was handed out. If not, no work can use the memory, so its release need not wait for the GPU.
    exposed: AtomicBool,
    /// Segments only: `close` was called, so the end of the segment also removes the name that it committed. A segment
    /// that is only dropped leaves its name to the connection.
    closed: AtomicBool,
    place: Place,
    /// True if new tensors of pinned memory are on the GPU, because a stream writes the memory or waits for it.
    on_stream: AtomicBool,
    /// The context in which this process uses the memory on a GPU, once it does. The release waits for the work there.
    context: OnceLock<Context>,
}

enum OwnerState {
    /// Addresses that were handed out stay valid when the commit succeeds and when it fails.
    Building(Box<Build>),
    /// Several threads use it at once, and some of them wait. A thread that has a clone also has the owner, so the last
    /// user of the owner finds the last clone here.
    Committed(Arc<Segment>),
    Taken(Block),
    Lent(Box<Loan>, Late<Topic>),
    /// A loan that was published or given back. Until the last array is gone, this keeps the block from other loans.
    Spent {
        _memory: LoanMemory,
        topic: Late<Topic>,
    },
    /// Cloned for each use, as segments are.
    Received(Received),
    /// An input or the output of a claimed task. It becomes unusable when the task ends.
    Claimed(Part),
    /// The output of a task whose result was not taken: it keeps the mapping only. It becomes `Taken` with the result.
    Enqueued(Enqueued),
    Closed,
}

/// A sample and its subscriber. The end of the subscriber may have to wait for the broker.
struct Received {
    sample: Arc<Sample>,
    subscriber: Late<Subscriber>,
    /// The last stream that was ordered behind the sample.
    stream: Option<RawStream>,
}

/// The output of an enqueued task and its queue. The end of the queue may have to wait for the broker.
struct Enqueued {
    result: Arc<EnqueuedResult>,
    queue: Late<Queue>,
    /// The stream that `Ticket.wait_on` ordered behind the worker's.
    stream: RawStream,
}

impl Owner {
    /// Returns the owner of a build.
    pub(crate) fn of_build(build: Build) -> Arc<Self> {
        let place = build.place();
        let context = build.gpu().map(|gpu| gpu.context().clone());
        let owner = Self::of(OwnerState::Building(Box::new(build)), true, place, false, context);
        note_segment(&owner);
        owner
    }

    /// Returns the owner of a segment.
    pub(crate) fn of_segment(segment: Arc<Segment>) -> Arc<Self> {
        let place = segment.place();
        let context = segment.gpu().map(|gpu| gpu.context().clone());
        let writable = segment.is_writable();
        let owner = Self::of(OwnerState::Committed(segment), writable, place, false, context);
        note_segment(&owner);
        owner
    }

    /// Returns the owner of a block, whose pool is at `place`. `context` is that of the GPU that uses the block.
    pub(crate) fn of_block(block: Block, place: Place, context: Option<Context>) -> Arc<Self> {
        Self::of(OwnerState::Taken(block), true, place, false, context)
    }

    /// Returns the owner of a loan. With `streams` a stream fills it on the GPU that uses the topic.
    pub(crate) fn of_loan(loan: Loan, topic: Arc<Topic>, streams: Option<&Gpu>) -> Arc<Self> {
        let place = topic.place();
        // A loan of pinned memory for the CPU is not on the GPU that uses the topic.
        let gpu = streams.or_else(|| topic.gpu().filter(|_| !place.is_cpu_reachable()));
        let context = gpu.map(|gpu| gpu.context().clone());
        Self::of(OwnerState::Lent(Box::new(loan), Late::new(topic)), true, place, streams.is_some(), context)
    }

    /// Returns the owner of a sample of a topic at `place`, and its subscriber.
    pub(crate) fn of_sample(sample: Sample, place: Place, subscriber: Arc<Subscriber>) -> Arc<Self> {
        let context = sample.gpu().map(|gpu| gpu.context().clone());
        let received = Received { sample: Arc::new(sample), subscriber: Late::new(subscriber), stream: None };
        Self::of(OwnerState::Received(received), false, place, false, context)
    }

    /// Returns the owner of an input of a claimed task; with `None` for `input`, of its output, which alone is writable.
    pub(crate) fn of_part(
        memory: TaskMemory,
        claim: &Arc<TaskClaim>,
        input: Option<usize>,
        segment: Option<Arc<Segment>>,
    ) -> Arc<Self> {
        let queue = &claim.queue;
        let (place, gpu) =
            segment.as_ref().map_or_else(|| (queue.place(), queue.gpu()), |segment| (segment.place(), segment.gpu()));
        let context = gpu.map(|gpu| gpu.context().clone());
        let on_stream = input.is_some() && claim.stream().is_some();
        let part = Part::new(memory, claim.clone(), input, segment);
        Self::of(OwnerState::Claimed(part), input.is_none(), place, on_stream, context)
    }

    /// Returns the owner of the output of an enqueued task, which `stream` waits for.
    pub(crate) fn of_enqueued(result: &Arc<EnqueuedResult>, queue: &Arc<Queue>, stream: RawStream) -> Arc<Self> {
        let place = queue.place();
        let context = queue.gpu().map(|gpu| gpu.context().clone());
        let enqueued = Enqueued { result: result.clone(), queue: Late::new(queue.clone()), stream };
        Self::of(OwnerState::Enqueued(enqueued), false, place, true, context)
    }

    /// Replaces the output of an enqueued task by the result's block: tensors that were made before keep the block from
    /// now on.
    pub(crate) fn keep_result(&self, block: Block) {
        let former = std::mem::replace(&mut *self.lock(), OwnerState::Taken(block));
        self.writable.store(true, Ordering::Release);
        drop(former);
    }

    /// Makes the output of a task that has ended read-only. Addresses that were handed out stay mapped.
    pub(crate) fn end_writing(&self) {
        self.writable.store(false, Ordering::Release);
    }

    /// Reverts [`end_writing`](Self::end_writing) after a completion that was refused.
    pub(crate) fn allow_writing(&self) {
        self.writable.store(true, Ordering::Release);
    }

    fn of(state: OwnerState, writable: bool, place: Place, on_stream: bool, context: Option<Context>) -> Arc<Self> {
        let may_be_awaited =
            matches!(state, OwnerState::Received(_) | OwnerState::Claimed(_) | OwnerState::Enqueued(_));
        let state = Mutex::new(state);
        let exposed = AtomicBool::new(false);
        let closed = AtomicBool::new(false);
        let on_stream = on_stream.into();
        let context = context.map_or_else(OnceLock::new, OnceLock::from);
        let writable = writable.into();
        Arc::new(Self { state, may_be_awaited, writable, exposed, closed, place, on_stream, context })
    }

    /// Takes the loan, unless it was taken before. From then on this keeps only the memory.
    pub(crate) fn take_loan(&self) -> Option<Loan> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, OwnerState::Closed) {
            OwnerState::Lent(mut loan, topic) => {
                self.writable.store(false, Ordering::Release);
                *state = OwnerState::Spent { _memory: loan.keep_memory(), topic };
                Some(*loan)
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// Returns the sample, if this is one.
    pub(crate) fn sample(&self) -> Option<Arc<Sample>> {
        match &*self.lock() {
            OwnerState::Received(Received { sample, .. }) => Some(sample.clone()),
            _ => None,
        }
    }

    /// Records that `stream` of `gpu` waits for the sample: from now on its tensors are on that GPU.
    pub(crate) fn note_stream(&self, gpu: &Gpu, stream: RawStream) {
        if let OwnerState::Received(received) = &mut *self.lock() {
            received.stream = Some(stream);
        }
        self.note_gpu(gpu);
        self.on_stream.store(true, Ordering::Release);
    }

    /// Records that work on a GPU may use the memory: the release waits for it.
    pub(crate) fn note_gpu(&self, gpu: &Gpu) {
        self.context.get_or_init(|| gpu.context().clone());
        self.expose();
    }

    /// Has a GPU use pinned memory: `bytes` bytes of the tensor `name`. Returns the device for DLPack; `None` if this
    /// process uses the memory on another GPU.
    pub(crate) fn use_on(&self, uuid: DeviceUuid, name: &str, bytes: u64) -> partywall::Result<Option<DLDevice>> {
        let gpu = self.domain()?.gpu(uuid)?;
        let mut is_there =
            self.context.get().is_none_or(|context| context.device().ordinal() == gpu.context().device().ordinal());
        if is_there && bytes > 0 {
            self.with(|memory| {
                memory.on_device(name, bytes, gpu.stream(), &mut |range| {
                    is_there = range.gpu().uuid() == uuid;
                    Ok(())
                })
            })?;
        }
        if !is_there {
            return Ok(None);
        }
        self.note_gpu(&gpu);
        Ok(Some(device(gpu.context())))
    }

    /// Returns the recorded stream that waits for the sample, for the inputs of the task or for its output.
    pub(crate) fn stream(&self) -> Option<RawStream> {
        match &*self.awaited()? {
            OwnerState::Received(received) => received.stream,
            OwnerState::Claimed(part) => part.of_input().and_then(|claim| claim.stream()),
            OwnerState::Enqueued(enqueued) => Some(enqueued.stream),
            _ => None,
        }
    }

    /// Returns the claim of the task that this is an input of.
    pub(crate) fn claim(&self) -> Option<Arc<TaskClaim>> {
        match &*self.awaited()? {
            OwnerState::Claimed(part) => part.of_input().cloned(),
            _ => None,
        }
    }

    /// Returns whether a reading stream must first wait for the stream that writes: true for samples, inputs and
    /// enqueued outputs, all of which are read-only.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited().is_some_and(|state| match &*state {
            OwnerState::Received(_) | OwnerState::Enqueued(_) => true,
            OwnerState::Claimed(part) => part.of_input().is_some(),
            _ => false,
        })
    }

    /// Locks the state, if it may be one that readers wait for.
    fn awaited(&self) -> Option<MutexGuard<'_, OwnerState>> {
        self.may_be_awaited.then(|| self.lock())
    }

    /// Returns the sample and its subscriber if this is their last user. Otherwise the last user releases them.
    pub(crate) fn into_sample(self: Arc<Self>) -> Option<(Sample, Late<Subscriber>)> {
        let mut owner = Arc::into_inner(self)?;
        match std::mem::replace(owner.state.get_mut().ignore_poison(), OwnerState::Closed) {
            OwnerState::Received(Received { sample, subscriber, .. }) => Some((Arc::into_inner(sample)?, subscriber)),
            _ => None,
        }
    }

    /// Returns the block if this is its last user. Otherwise the last user gives it back.
    pub(crate) fn into_block(self: Arc<Self>) -> Result<Block, Arc<Self>> {
        let mut owner = Arc::try_unwrap(self)?;
        match std::mem::replace(owner.state.get_mut().ignore_poison(), OwnerState::Closed) {
            OwnerState::Taken(block) => Ok(block),
            other => {
                *owner.state.get_mut().ignore_poison() = other;
                Err(Arc::new(owner))
            }
        }
    }

    /// Returns the segment if this is one and this is its last user. Otherwise the last user releases it.
    pub(crate) fn into_segment(self: Arc<Self>) -> Option<Segment> {
        Arc::into_inner(self)?.end()
    }

    /// Ends the use of the memory. Returns the segment, if this is one.
    fn end(&mut self) -> Option<Segment> {
        match std::mem::replace(self.state.get_mut().ignore_poison(), OwnerState::Closed) {
            OwnerState::Committed(segment) => Arc::into_inner(segment),
            _ => None,
        }
    }

    /// Makes the segment the version that `next` is, at the same addresses, for all tensors that have them.
    pub(crate) fn advance(&self, next: Segment, drain: Drain<'_>) -> partywall::Result<()> {
        self.change("advance", |segment| Ok(segment.advance(next, drain)?)).ok_or_else(closed)?
    }

    /// Calls `change` with the segment, if this is one, while no call of another thread uses it. `operation` is a verb.
    fn change(
        &self,
        operation: &str,
        change: impl FnOnce(&mut Segment) -> partywall::Result<()>,
    ) -> Option<partywall::Result<()>> {
        let mut state = self.lock();
        let OwnerState::Committed(segment) = &mut *state else { return None };
        // New calls of the segment wait for the lock. Calls that other threads have begun end without it, and waits
        // give the segment up every 100 ms.
        let start = Instant::now();
        while Arc::get_mut(segment).is_none() {
            if start.elapsed() >= CALLS {
                let what = format!("cannot {operation} {:?}: another thread uses it", segment.name());
                return Some(Err(Error::Timeout { what, after: CALLS }));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(change(Arc::get_mut(segment).expect("clones are made under the lock only")))
    }

    /// Returns the segment, if this is one.
    pub(crate) fn segment(&self) -> Option<Arc<Segment>> {
        match &*self.lock() {
            OwnerState::Committed(segment) => Some(segment.clone()),
            _ => None,
        }
    }

    /// Calls `action` with the build, if this is one.
    pub(crate) fn with_build<T>(&self, action: impl FnOnce(&mut Build) -> T) -> Option<T> {
        match &mut *self.lock() {
            OwnerState::Building(build) => Some(action(build)),
            _ => None,
        }
    }

    /// Calls `action` with the loan, if this is one.
    pub(crate) fn with_loan<T>(&self, action: impl FnOnce(&mut Loan) -> T) -> Option<T> {
        match &mut *self.lock() {
            OwnerState::Lent(loan, _) => Some(action(loan)),
            _ => None,
        }
    }

    /// Calls `action` with the block, if this is one.
    pub(crate) fn with_block<T>(&self, action: impl FnOnce(&mut Block) -> T) -> Option<T> {
        match &mut *self.lock() {
            OwnerState::Taken(block) => Some(action(block)),
            _ => None,
        }
    }

    /// Calls `action` with the memory, whatever its kind.
    pub(crate) fn with<T>(&self, action: impl FnOnce(&mut dyn Memory) -> partywall::Result<T>) -> partywall::Result<T> {
        let mut state = self.lock();
        match &mut *state {
            OwnerState::Building(build) => action(&mut **build),
            OwnerState::Taken(block) => action(block),
            OwnerState::Lent(loan, _) => action(&mut **loan),
            OwnerState::Committed(segment) => {
                let mut segment = segment.clone();
                drop(state);
                action(&mut segment)
            }
            OwnerState::Received(Received { sample, .. }) => {
                let mut sample = sample.clone();
                drop(state);
                action(&mut sample)
            }
            OwnerState::Claimed(part) => action(part),
            OwnerState::Enqueued(Enqueued { result, .. }) => {
                let mut result = result.clone();
                drop(state);
                action(&mut result)
            }
            OwnerState::Spent { topic, .. } => Err(Error::Gone(Gone::HeldBlock { pool: topic.name().to_owned() })),
            OwnerState::Closed => Err(closed()),
        }
    }

    fn domain(&self) -> partywall::Result<Domain> {
        Ok(match &*self.lock() {
            OwnerState::Building(build) => build.domain(),
            OwnerState::Committed(segment) => segment.domain(),
            OwnerState::Taken(block) => block.domain(),
            OwnerState::Lent(_, topic) | OwnerState::Spent { topic, .. } => topic.domain(),
            OwnerState::Received(received) => received.sample.domain(),
            OwnerState::Claimed(part) => part.domain(),
            OwnerState::Enqueued(enqueued) => enqueued.queue.domain(),
            OwnerState::Closed => return Err(closed()),
        }
        .clone())
    }

    fn lock(&self) -> MutexGuard<'_, OwnerState> {
        // A panic between taking a state and storing the next one leaves `Closed`.
        self.state.lock().ignore_poison()
    }

    /// Returns the device of new tensors, for DLPack.
    pub(crate) fn device(&self) -> DLDevice {
        if self.is_on_host() { HOST } else { self.context.get().map_or(HOST, device) }
    }

    /// Returns whether new tensors are on the host.
    pub(crate) fn is_on_host(&self) -> bool {
        self.place == Place::Host || self.place.is_cpu_reachable() && !self.on_stream.load(Ordering::Acquire)
    }

    /// Returns whether the memory is pinned, which both the host and GPUs use.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.place, Place::Pinned(_))
    }

    /// Returns whether new tensors take their address from the GPU: the only address of a GPU's memory. Pinned memory
    /// has the same address for the CPU, which so gets no access before it is used there.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.place != Place::Host && self.context.get().is_some()
    }

    /// Returns whether this process may write the memory now.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Acquire)
    }

    /// Commits a build. A build whose commit fails stays as it was; `None` if this is not a build.
    pub(crate) fn commit(&self) -> Option<partywall::Result<()>> {
        let mut state = self.lock();
        let build = match std::mem::replace(&mut *state, OwnerState::Closed) {
            OwnerState::Building(build) => build,
            other => {
                *state = other;
                return None;
            }
        };
        match build.commit_or_keep() {
            Ok(segment) => {
                self.writable.store(segment.is_writable(), Ordering::Release);
                *state = OwnerState::Committed(Arc::new(segment));
                Some(Ok(()))
            }
            Err(failed) => {
                *state = OwnerState::Building(failed.value);
                Some(Err(failed.error))
            }
        }
    }

    /// Releases the memory now if this is its last user; otherwise the last user does. Waits for this process's work in
    /// the memory, and for the broker. A signal ends the wait and leaves the release to the reaper.
    pub(crate) fn close(self: Arc<Self>, py: Python<'_>) -> PyResult<()> {
        let Some(mut owner) = Arc::into_inner(self) else { return Ok(()) };
        if *owner.exposed.get_mut() && !owner.drain(py)? {
            return Ok(());
        }
        let released = py.detach(move || {
            match owner.end().map_or(Ok(()), Segment::release) {
                // In a forked child the lease belongs to the parent. Without a broker there is no lease.
                Err(Error::Unreachable(Unreachable::Forked { .. } | Unreachable::Gone { .. })) => Ok(()),
                released => released,
            }
        });
        released.or_raise(py)
    }

    /// Waits for all work of this process on the memory's GPU, until a signal comes. Returns false if a graph capture
    /// prevents that.
    pub(crate) fn drain(&self, py: Python<'_>) -> PyResult<bool> {
        self.context.get().map_or(Ok(true), |context| drain(py, context))
    }

    /// Records that the segment was closed, so that its end removes its name.
    pub(crate) fn note_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Records that an address is handed out.
    pub(crate) fn expose(&self) {
        self.exposed.store(true, Ordering::Release);
    }

    /// Returns whether an address was handed out.
    pub(crate) fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Acquire)
    }

    /// Returns the context in which this process uses the memory on a GPU, if it does.
    pub(crate) fn context(&self) -> Option<&Context> {
        self.context.get()
    }
}

/// The builds and segments of this process that the driver has a part in. Entries of dropped ones go when the list
/// doubles.
static SEGMENTS: PerProcess<Vec<Weak<Owner>>> = PerProcess::new();

fn note_segment(owner: &Arc<Owner>) {
    if owner.place == Place::Host {
        return;
    }
    let mut segments = SEGMENTS.lock();
    if segments.len() == segments.capacity() {
        segments.retain(|segment| segment.strong_count() > 0);
    }
    segments.push(Arc::downgrade(owner));
}

/// Held while segments are suspended or resumed.
static SUSPENDING: PerProcess<()> = PerProcess::new();

/// Suspends all segments of this process, also those of which only tensors are left. After an error all are as they
/// were, unless it comes from resuming them.
pub(crate) fn suspend() -> partywall::Result<()> {
    let _turn = SUSPENDING.lock();
    let suspended =
        live_segments().iter().try_for_each(|owner| owner.change("suspend", Segment::suspend).unwrap_or(Ok(())));
    suspended.and_then(|()| check_suspended()).or_else(|error| resume_all().and(Err(error)))
}

/// Resumes all segments that are suspended. Returns the first error; the others are resumed.
pub(crate) fn resume() -> partywall::Result<()> {
    let _turn = SUSPENDING.lock();
    resume_all()
}

fn resume_all() -> partywall::Result<()> {
    live_segments().iter().filter_map(|owner| owner.change("resume", Segment::resume)).fold(Ok(()), Result::and)
}

fn live_segments() -> Vec<Arc<Owner>> {
    SEGMENTS.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Returns a GPU in DLPack's form.
fn device(context: &Context) -> DLDevice {
    DLDevice { device_type: CUDA, device_id: context.device().ordinal() as i32 }
}

/// Returns the error of using memory that was closed. Unreachable in practice: a caller has the owner, so it is not
/// closed.
fn closed() -> Error {
    Error::Unreachable(Unreachable::Refused("its memory was closed".into()))
}

impl Drop for Owner {
    /// A tensor can be dropped at any point: in another library's deleter, or while kernels still read it.
    fn drop(&mut self) {
        let state = std::mem::replace(self.state.get_mut().ignore_poison(), OwnerState::Closed);
        let state = match state {
            // Dropped at once: a sample to free its block for the next one. The sample itself waits for whatever still
            // uses it.
            OwnerState::Closed
            | OwnerState::Received(_)
            | OwnerState::Spent { .. }
            | OwnerState::Claimed(_)
            | OwnerState::Enqueued(_) => return,
            state => state,
        };
        // A block also waits for its users by itself.
        let waits = *self.exposed.get_mut() && matches!(state, OwnerState::Building(_) | OwnerState::Committed(_));
        let context = self.context.take().filter(|_| waits);
        let leaves_name = !*self.closed.get_mut();
        reaper::later(move || {
            while !context.as_ref().is_none_or(is_drained) {
                std::thread::sleep(CAPTURE);
            }
            match state {
                OwnerState::Committed(segment) if leaves_name => {
                    // In a forked child the lease belongs to the parent. Without a broker there is no lease.
                    _ = Arc::into_inner(segment).map(Segment::leave_name);
                }
                state => drop(state),
            }
        });
    }
}

/// Waits as [`is_drained`] does, until a signal ends the wait. The driver's own wait cannot be ended and continues on a
/// helper thread.
pub(crate) fn drain(py: Python<'_>, context: &Context) -> PyResult<bool> {
    let context = context.clone();
    wait::on_helper_thread(py, move || is_drained(&context))
}

/// Waits for all work of this process on the GPU. Returns false if a graph capture prevents that.
fn is_drained(context: &Context) -> bool {
    // In relaxed mode, so that the call does not invalidate a capture of another thread.
    let drained = context.guard_relaxed().and_then(|_guard| context.synchronize());
    // After any other error the context is lost, so nothing runs in it any more.
    !drained.is_err_and(|error| {
        matches!(error.code, CuResult::STREAM_CAPTURE_UNSUPPORTED | CuResult::STREAM_CAPTURE_IMPLICIT)
    })
}
