//! What tensors keep: a build, a segment, a block, a loan or a sample, until nothing uses it any more.
use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{
    Block, Build, EnqueuedResult, Error, Loan, Queue, Sample, Segment, Subscriber, Topic,
    cuda::{Context, CuResult, RawStream},
    error::{Gone, Unreachable},
};
use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{
    dlpack::{CUDA, Device},
    errors::Raise,
    memory::Memory,
    part::Part,
    reaper,
    task::Claim,
    tensor::HOST,
    wait,
};

/// How long to wait before a context is asked again that cannot be waited for while a graph is captured in it.
const CAPTURE: Duration = Duration::from_millis(10);

/// A build or a segment, and what it becomes; a block; a loan, and what it becomes; or a sample. Shared by the Python object
/// and by every tensor and capsule of it.
///
/// Its lock is waited for without the GIL, because it is held during commits and while a build is copied.
pub(crate) struct Owner {
    state: Mutex<State>,
    writable: AtomicBool,
    /// Whether anybody was told where the memory is: nothing runs in what nobody could name.
    named: AtomicBool,
    /// Of a segment: it was closed, and takes the name that it has committed with it. One that is only dropped leaves the
    /// name to the connection.
    closed: AtomicBool,
    /// Of GPU memory: who lets go of it waits for the work in it first.
    context: Option<Context>,
}

enum State {
    /// Addresses that were given out stay valid when it becomes a segment, and when it fails to.
    Building(Box<Build>),
    /// Used by several threads at once, and by ones that wait. Whoever has a clone has the owner, too: the owner's last
    /// user finds the last clone here.
    Committed(Arc<Segment>),
    Taken(Block),
    Lent(Box<Loan>, Arc<Topic>),
    /// A loan that was published, or given back: addresses that were given out stay mapped.
    Spent(Arc<Topic>),
    /// Used as segments are.
    Received(Received),
    /// An input or the output of a claimed task, which ends by itself.
    Claimed(Part),
    /// The output of a task whose result was not taken: nothing but the mapping. A block once it was.
    Enqueued(Enqueued),
    Closed,
}

/// A sample, with what the last of its subscriber's samples would let go of, which may have to wait for the broker.
struct Received {
    sample: Arc<Sample>,
    subscriber: Arc<Subscriber>,
    /// The last stream that waits for it.
    stream: Option<RawStream>,
}

/// The output of an enqueued task, with the queue, whose end may have to wait for the broker.
struct Enqueued {
    result: Arc<EnqueuedResult>,
    queue: Arc<Queue>,
    /// The stream that was the first to wait for it.
    stream: RawStream,
}

impl Owner {
    /// The owner of a build, on a GPU if it has a context.
    pub(crate) fn of_build(build: Build, context: Option<Context>) -> Arc<Self> {
        Self::of(State::Building(Box::new(build)), true, context)
    }

    /// The owner of a segment.
    pub(crate) fn of_segment(segment: Segment) -> Arc<Self> {
        let context = segment.gpu().map(|gpu| gpu.context().clone());
        let writable = segment.is_writable();
        Self::of(State::Committed(Arc::new(segment)), writable, context)
    }

    /// The owner of a block of a pool, on a GPU if it has a context.
    pub(crate) fn of_block(block: Block, context: Option<Context>) -> Arc<Self> {
        Self::of(State::Taken(block), true, context)
    }

    /// The owner of a loan.
    pub(crate) fn of_loan(loan: Loan, topic: Arc<Topic>) -> Arc<Self> {
        let context = topic.gpu().map(|gpu| gpu.context().clone());
        Self::of(State::Lent(Box::new(loan), topic), true, context)
    }

    /// The owner of a sample, and of its subscriber.
    pub(crate) fn of_sample(sample: Sample, subscriber: Arc<Subscriber>) -> Arc<Self> {
        let context = sample.gpu().map(|gpu| gpu.context().clone());
        Self::of(State::Received(Received { sample: Arc::new(sample), subscriber, stream: None }), false, context)
    }

    /// The owner of a part of a claimed task; the output is writable.
    pub(crate) fn of_part(part: Part, writable: bool, context: Option<Context>) -> Arc<Self> {
        Self::of(State::Claimed(part), writable, context)
    }

    /// The owner of the output of an enqueued task, which `stream` waits for.
    pub(crate) fn of_enqueued(result: &Arc<EnqueuedResult>, queue: &Arc<Queue>, stream: RawStream) -> Arc<Self> {
        let context = queue.gpu().map(|gpu| gpu.context().clone());
        Self::of(State::Enqueued(Enqueued { result: result.clone(), queue: queue.clone(), stream }), false, context)
    }

    /// Of an enqueued task: its result was taken, and tensors that were made before keep the block from now on.
    pub(crate) fn keep_result(&self, block: Block) {
        let former = std::mem::replace(&mut *self.lock(), State::Taken(block));
        self.writable.store(true, Ordering::Release);
        if let State::Enqueued(enqueued) = former {
            enqueued.let_go();
        }
    }

    /// Of a task that is over: addresses that were given out stay mapped, and are not to be written any more.
    pub(crate) fn end_writing(&self) {
        self.writable.store(false, Ordering::Release);
    }

    /// Of a task that was to be over, and is not.
    pub(crate) fn allow_writing(&self) {
        self.writable.store(true, Ordering::Release);
    }

    fn of(state: State, writable: bool, context: Option<Context>) -> Arc<Self> {
        let [named, closed] = [(); 2].map(|()| AtomicBool::new(false));
        Arc::new(Self { state: Mutex::new(state), writable: writable.into(), named, closed, context })
    }

    /// The loan, unless it was taken before. Whoever keeps this keeps no more than the mapping from now on.
    pub(crate) fn take_loan(&self) -> Option<Loan> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Closed) {
            State::Lent(loan, topic) => {
                self.writable.store(false, Ordering::Release);
                *state = State::Spent(topic);
                Some(*loan)
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// The sample, if it is one.
    pub(crate) fn sample(&self) -> Option<Arc<Sample>> {
        match &*self.lock() {
            State::Received(Received { sample, .. }) => Some(sample.clone()),
            _ => None,
        }
    }

    /// Of a sample: this stream waits until it is complete.
    pub(crate) fn note_stream(&self, stream: RawStream) {
        if let State::Received(received) = &mut *self.lock() {
            received.stream = Some(stream);
        }
    }

    /// A stream that waits for the sample, the inputs of the task or its output: the last one that was noted.
    pub(crate) fn stream(&self) -> Option<RawStream> {
        match &*self.lock() {
            State::Received(received) => received.stream,
            State::Claimed(part) => part.of_input().and_then(|claim| claim.stream()),
            State::Enqueued(enqueued) => Some(enqueued.stream),
            _ => None,
        }
    }

    /// Of an input: the claim of its task.
    pub(crate) fn claim(&self) -> Option<Arc<Claim>> {
        match &*self.lock() {
            State::Claimed(part) => part.of_input().cloned(),
            _ => None,
        }
    }

    /// Whether a stream that reads it has to wait for the stream that writes it: a sample, an input, or the output of an enqueued
    /// task. These are read-only.
    pub(crate) fn is_awaited(&self) -> bool {
        match &*self.lock() {
            State::Received(_) | State::Enqueued(_) => true,
            State::Claimed(part) => part.of_input().is_some(),
            _ => false,
        }
    }

    /// The sample and its subscriber, if nobody else keeps them; else whoever keeps them last lets go.
    pub(crate) fn into_sample(self: Arc<Self>) -> Option<(Sample, Arc<Subscriber>)> {
        let mut owner = Arc::into_inner(self)?;
        match std::mem::replace(owner.state.get_mut().ignore_poison(), State::Closed) {
            State::Received(Received { sample, subscriber, .. }) => Some((Arc::into_inner(sample)?, subscriber)),
            _ => None,
        }
    }

    /// The block, if nobody else keeps it; else whoever keeps it last gives it back.
    pub(crate) fn into_block(self: Arc<Self>) -> Result<Block, Arc<Self>> {
        let mut owner = Arc::try_unwrap(self)?;
        match std::mem::replace(owner.state.get_mut().ignore_poison(), State::Closed) {
            State::Taken(block) => Ok(block),
            other => {
                *owner.state.get_mut().ignore_poison() = other;
                Err(Arc::new(owner))
            }
        }
    }

    /// The segment, if it is one.
    pub(crate) fn segment(&self) -> Option<Arc<Segment>> {
        match &*self.lock() {
            State::Committed(segment) => Some(segment.clone()),
            _ => None,
        }
    }

    /// Looks at the build, if it is one.
    pub(crate) fn with_build<T>(&self, look: impl FnOnce(&mut Build) -> T) -> Option<T> {
        match &mut *self.lock() {
            State::Building(build) => Some(look(build)),
            _ => None,
        }
    }

    /// Looks at the loan, if it is one.
    pub(crate) fn with_loan<T>(&self, look: impl FnOnce(&mut Loan) -> T) -> Option<T> {
        match &mut *self.lock() {
            State::Lent(loan, _) => Some(look(loan)),
            _ => None,
        }
    }

    /// Looks at the block, if it is one.
    pub(crate) fn with_block<T>(&self, look: impl FnOnce(&mut Block) -> T) -> Option<T> {
        match &mut *self.lock() {
            State::Taken(block) => Some(look(block)),
            _ => None,
        }
    }

    /// Looks at its memory, whatever has it.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut dyn Memory) -> partywall::Result<T>) -> partywall::Result<T> {
        let mut state = self.lock();
        match &mut *state {
            State::Building(build) => look(&mut **build),
            State::Taken(block) => look(block),
            State::Lent(loan, _) => look(&mut **loan),
            State::Committed(segment) => {
                let mut segment = segment.clone();
                drop(state);
                look(&mut segment)
            }
            State::Received(Received { sample, .. }) => {
                let mut sample = sample.clone();
                drop(state);
                look(&mut sample)
            }
            State::Claimed(part) => look(part),
            State::Enqueued(Enqueued { result, .. }) => {
                let mut result = result.clone();
                drop(state);
                look(&mut result)
            }
            State::Spent(topic) => Err(Error::Gone(Gone::HeldBlock { pool: topic.name().to_owned() })),
            // Not met: a caller keeps the owner from being closed.
            State::Closed => Err(Error::Unreachable(Unreachable::Refused("its memory was closed".into()))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between taking a state and putting the next one leaves `Closed`.
        self.state.lock().ignore_poison()
    }

    /// Where its memory is, for DLPack.
    pub(crate) fn device(&self) -> Device {
        let device = |context: &Context| Device { device_type: CUDA, device_id: context.device().ordinal() as i32 };
        self.context.as_ref().map_or(HOST, device)
    }

    /// Whether this process may write the memory now.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Acquire)
    }

    /// Commits a build; a failed one is as it was.
    pub(crate) fn commit(&self) -> Option<partywall::Result<()>> {
        let mut state = self.lock();
        let build = match std::mem::replace(&mut *state, State::Closed) {
            State::Building(build) => build,
            other => {
                *state = other;
                return None;
            }
        };
        match build.commit_or_keep() {
            Ok(segment) => {
                self.writable.store(segment.is_writable(), Ordering::Release);
                *state = State::Committed(Arc::new(segment));
                Some(Ok(()))
            }
            Err(failed) => {
                *state = State::Building(failed.build);
                Some(Err(failed.error))
            }
        }
    }

    /// Lets go of it at once, if nobody else keeps it; else the last one will. Waits for the work of this process in the
    /// memory, which a signal ends and leaves to the reaper, and for the broker.
    pub(crate) fn close(self: Arc<Self>, py: Python<'_>) -> PyResult<()> {
        let Some(mut owner) = Arc::into_inner(self) else { return Ok(()) };
        if *owner.named.get_mut() && !owner.drain(py)? {
            return Ok(());
        }
        let released = py.detach(move || {
            let segment = match std::mem::replace(owner.state.get_mut().ignore_poison(), State::Closed) {
                State::Committed(segment) => Arc::into_inner(segment),
                _ => None,
            };
            match segment.map_or(Ok(()), Segment::release) {
                // In a forked child the lease is the parent's, and without the broker it is nobody's.
                Err(Error::Unreachable(Unreachable::Forked { .. } | Unreachable::Gone { .. })) => Ok(()),
                released => released,
            }
        });
        released.or_raise(py)
    }

    /// Waits for all work of this process on the GPU that has the memory, until a signal comes. False if that cannot be done now.
    pub(crate) fn drain(&self, py: Python<'_>) -> PyResult<bool> {
        self.context.as_ref().map_or(Ok(true), |context| drain(py, context))
    }

    /// The segment was closed: its end takes the name with it.
    pub(crate) fn note_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Somebody is told where the memory is.
    pub(crate) fn note_named(&self) {
        self.named.store(true, Ordering::Release);
    }

    /// Whether anybody was told where the memory is.
    pub(crate) fn is_named(&self) -> bool {
        self.named.load(Ordering::Acquire)
    }

    /// Of memory on a GPU.
    pub(crate) fn context(&self) -> Option<&Context> {
        self.context.as_ref()
    }
}

impl Enqueued {
    /// Leaves the end of the queue to the reaper.
    fn let_go(self) {
        drop(self.result);
        let_go(self.queue);
    }
}

/// Lets go of what others may have, too; the last who does has the reaper do it, and nobody before wakes that.
pub(crate) fn let_go<T: Send + 'static>(shared: Arc<T>) {
    if let Some(last) = Arc::into_inner(shared) {
        reaper::later(move || drop(last));
    }
}

impl Drop for Owner {
    /// A tensor may go in the middle of anything: in another library's deleter, while kernels still read it.
    fn drop(&mut self) {
        let state = std::mem::replace(self.state.get_mut().ignore_poison(), State::Closed);
        let state = match state {
            State::Closed => return,
            // At once, so that there is room for the next one. It knows by itself what is to be waited for, and who does.
            State::Received(Received { sample, subscriber, .. }) => {
                drop(sample);
                return let_go(subscriber);
            }
            State::Spent(topic) => return let_go(topic),
            State::Claimed(part) => return part.let_go(),
            State::Enqueued(enqueued) => return enqueued.let_go(),
            state => state,
        };
        // So does a block.
        let waits = *self.named.get_mut() && matches!(state, State::Building(_) | State::Committed(_));
        let context = self.context.take().filter(|_| waits);
        let leaves_name = !*self.closed.get_mut();
        reaper::later(move || {
            while !context.as_ref().is_none_or(is_drained) {
                std::thread::sleep(CAPTURE);
            }
            match state {
                State::Committed(segment) if leaves_name => {
                    // In a forked child the lease is the parent's, and without the broker it is nobody's.
                    _ = Arc::into_inner(segment).map(Segment::leave_name);
                }
                state => drop(state),
            }
        });
    }
}

/// As [`is_drained`], until a signal ends the wait: the driver's cannot be ended, and goes on in a thread of its own.
pub(crate) fn drain(py: Python<'_>, context: &Context) -> PyResult<bool> {
    let context = context.clone();
    wait::on_helper_thread(py, move || is_drained(&context))
}

/// Waits for all work of this process on the GPU. False if that cannot be done now, because a graph is being captured.
fn is_drained(context: &Context) -> bool {
    // Relaxed, so that asking spoils no capture of another thread.
    let drained = context.guard_relaxed().and_then(|_guard| context.synchronize());
    // With any other error the context is lost, and nothing runs in it any more.
    !drained.is_err_and(|error| {
        matches!(error.code, CuResult::STREAM_CAPTURE_UNSUPPORTED | CuResult::STREAM_CAPTURE_IMPLICIT)
    })
}
