//! What tensors keep: a build, a segment or a block, until nothing uses it any more.
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{
    Block, Build, Error, Segment,
    cuda::{Context, CuResult},
};
use pyo3::prelude::*;

use crate::{
    dlpack::{CUDA, Device},
    errors::Raise,
    reaper,
    tensor::HOST,
    wait,
};

/// How long to wait before a context is asked again that cannot be waited for while a graph is captured in it.
const CAPTURE: Duration = Duration::from_millis(10);

/// A build or a segment, and what it becomes; or a block. Shared by the Python object and by every tensor and capsule of it.
///
/// Its lock is waited for without the GIL, because it is held during commits and while a build is copied.
pub(crate) struct Owner {
    state: Mutex<State>,
    writable: AtomicBool,
    /// Whether anybody was told where the memory is: nothing runs in what nobody could name.
    named: AtomicBool,
    /// Of GPU memory: who lets go of it waits for the work in it first.
    context: Option<Context>,
}

/// What an owner has.
pub(crate) enum Memory<'a> {
    Build(&'a mut Build),
    Segment(&'a Segment),
    Block(&'a mut Block),
}

enum State {
    /// Addresses that were given out stay valid when it becomes a segment, and when it fails to.
    Building(Box<Build>),
    /// Used by several threads at once, and by ones that wait. Whoever has a clone has the owner, too: the owner's last
    /// user finds the last clone here.
    Committed(Arc<Segment>),
    Taken(Block),
    Closed,
}

impl Owner {
    /// Of a build, on a GPU if it has a context.
    pub(crate) fn of_build(build: Build, context: Option<Context>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::Building(Box::new(build))),
            writable: true.into(),
            named: false.into(),
            context,
        })
    }

    /// Of a segment.
    pub(crate) fn of_segment(segment: Segment) -> Arc<Self> {
        let context = segment.gpu().map(|gpu| gpu.context().clone());
        let writable = segment.is_writable().into();
        Arc::new(Self {
            state: Mutex::new(State::Committed(Arc::new(segment))),
            writable,
            named: false.into(),
            context,
        })
    }

    /// Of a block of a pool, on a GPU if it has a context.
    pub(crate) fn of_block(block: Block, context: Option<Context>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Taken(block)), writable: true.into(), named: false.into(), context })
    }

    /// The block, if nobody else keeps it; else whoever keeps it last gives it back.
    pub(crate) fn into_block(self: Arc<Self>) -> Result<Block, Arc<Self>> {
        let mut owner = Arc::try_unwrap(self)?;
        match std::mem::replace(owner.state.get_mut().unwrap_or_else(PoisonError::into_inner), State::Closed) {
            State::Taken(block) => Ok(block),
            other => {
                *owner.state.get_mut().unwrap_or_else(PoisonError::into_inner) = other;
                Err(Arc::new(owner))
            }
        }
    }

    /// The segment, if it is one.
    pub(crate) fn segment(&self) -> Option<Arc<Segment>> {
        match &*self.lock() {
            State::Committed(segment) => Some(segment.clone()),
            State::Building(_) | State::Taken(_) | State::Closed => None,
        }
    }

    /// Looks at the build, if it is one.
    pub(crate) fn with_build<T>(&self, look: impl FnOnce(&mut Build) -> T) -> Option<T> {
        match &mut *self.lock() {
            State::Building(build) => Some(look(build)),
            State::Committed(_) | State::Taken(_) | State::Closed => None,
        }
    }

    /// Looks at whichever it is.
    pub(crate) fn with<T>(&self, look: impl FnOnce(Memory<'_>) -> partywall::Result<T>) -> partywall::Result<T> {
        let committed = match &mut *self.lock() {
            State::Building(build) => return look(Memory::Build(build)),
            State::Taken(block) => return look(Memory::Block(block)),
            State::Committed(segment) => segment.clone(),
            // Cannot be met: who asks keeps it from being closed.
            State::Closed => return Err(Error::Refused("its memory was closed".into())),
        };
        look(Memory::Segment(&committed))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between taking a state and putting the next one leaves `Closed`.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
            let segment =
                match std::mem::replace(owner.state.get_mut().unwrap_or_else(PoisonError::into_inner), State::Closed) {
                    State::Committed(segment) => Arc::into_inner(segment),
                    State::Building(_) | State::Taken(_) | State::Closed => None,
                };
            match segment.map_or(Ok(()), Segment::release) {
                // In a forked child the lease is the parent's, and without the broker it is nobody's.
                Err(Error::Forked { .. } | Error::BrokerGone { .. }) => Ok(()),
                released => released,
            }
        });
        released.or_raise(py)
    }

    /// Waits for all work of this process on the GPU that has the memory, until a signal comes. False if that cannot be done now.
    pub(crate) fn drain(&self, py: Python<'_>) -> PyResult<bool> {
        self.context.as_ref().map_or(Ok(true), |context| drain(py, context))
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

impl Drop for Owner {
    /// A tensor may go in the middle of anything: in another library's deleter, while kernels still read it.
    fn drop(&mut self) {
        let state = std::mem::replace(self.state.get_mut().unwrap_or_else(PoisonError::into_inner), State::Closed);
        if matches!(state, State::Closed) {
            return;
        }
        // A block knows by itself what is to be waited for.
        let waits = *self.named.get_mut() && !matches!(state, State::Taken(_));
        let context = self.context.take().filter(|_| waits);
        reaper::later(move || {
            while !context.as_ref().is_none_or(is_drained) {
                std::thread::sleep(CAPTURE);
            }
            drop(state);
        });
    }
}

/// As [`is_drained`], until a signal ends the wait: the driver's cannot be ended, and goes on in a thread of its own.
pub(crate) fn drain(py: Python<'_>, context: &Context) -> PyResult<bool> {
    let context = context.clone();
    wait::aside(py, move || is_drained(&context))
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
