//! What tensors keep: a build or a segment, until nothing uses it any more.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{
    Build, Error, Segment,
    cuda::{Context, CuResult},
};

use crate::{
    dlpack::{CUDA, Device},
    reaper,
    tensor::HOST,
};

/// How long to wait before a context is asked again that cannot be waited for while a graph is captured in it.
const CAPTURE: Duration = Duration::from_millis(10);

/// A build or a segment, and what it becomes. Shared by the Python object and by every tensor and capsule of it.
///
/// Its lock is waited for without the GIL, because it is held during copies and commits.
pub(crate) struct Owner {
    state: Mutex<State>,
    writable: AtomicBool,
    /// Of GPU memory: who lets go of it waits for the work in it first.
    context: Option<Context>,
}

pub(crate) enum State {
    /// Addresses that were given out stay valid when it becomes a segment, and when it fails to.
    Building(Box<Build>),
    Committed(Segment),
    Closed,
}

impl Owner {
    pub(crate) fn new(state: State, context: Option<Context>) -> Arc<Self> {
        let writable = match &state {
            State::Building(_) => true,
            State::Committed(segment) => segment.is_writable(),
            State::Closed => false,
        };
        Arc::new(Self { state: Mutex::new(state), writable: writable.into(), context })
    }

    /// Of a segment.
    pub(crate) fn of(segment: Segment) -> Arc<Self> {
        let context = segment.gpu().map(|gpu| gpu.context().clone());
        Self::new(State::Committed(segment), context)
    }

    /// Looks at a segment.
    pub(crate) fn with_segment<T>(&self, look: impl FnOnce(&Segment) -> partywall::Result<T>) -> partywall::Result<T> {
        match &*self.lock() {
            State::Committed(segment) => look(segment),
            State::Building(_) | State::Closed => Err(Error::Refused("it is not committed".into())),
        }
    }

    /// As [`Owner::with_segment`], for what may still be a build.
    pub(crate) fn with_state<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.lock())
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
                *state = State::Committed(segment);
                Some(Ok(()))
            }
            Err(failed) => {
                *state = State::Building(failed.build);
                Some(Err(failed.error))
            }
        }
    }

    /// Lets go of it at once, if nobody else keeps it; else the last one will. Waits for the work of this process in the
    /// memory, and for the broker.
    pub(crate) fn close(self: Arc<Self>) -> partywall::Result<()> {
        let Some(mut owner) = Arc::into_inner(self) else { return Ok(()) };
        if !owner.context.as_ref().is_none_or(is_drained) {
            return Ok(());
        }
        match std::mem::replace(owner.state.get_mut().unwrap_or_else(PoisonError::into_inner), State::Closed) {
            // In a forked child the lease is the parent's, and without the broker it is nobody's.
            State::Committed(segment) => match segment.release() {
                Err(Error::Forked { .. } | Error::BrokerGone { .. }) => Ok(()),
                released => released,
            },
            State::Building(_) | State::Closed => Ok(()),
        }
    }
}

impl Drop for Owner {
    /// A tensor may go in the middle of anything: in another library's deleter, while kernels still read it.
    fn drop(&mut self) {
        let state = std::mem::replace(self.state.get_mut().unwrap_or_else(PoisonError::into_inner), State::Closed);
        if matches!(state, State::Closed) {
            return;
        }
        let context = self.context.take();
        reaper::later(move || {
            while !context.as_ref().is_none_or(is_drained) {
                std::thread::sleep(CAPTURE);
            }
            drop(state);
        });
    }
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
