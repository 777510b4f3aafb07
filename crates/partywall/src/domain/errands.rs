//! What has to wait for the broker and is nobody's call: done beside the service thread, which never waits.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

type Errand = Box<dyn FnOnce() + Send>;

/// Runs errands one after the other, on a thread that exists only while there are any. Each is over within the time that
/// a broker has for its answer.
#[derive(Default)]
pub(crate) struct Errands {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Errand>,
    running: bool,
    thread: Option<JoinHandle<()>>,
}

impl Errands {
    /// Has it done soon. Where no thread can be had it is done here.
    pub(crate) fn run(self: &Arc<Self>, errand: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.queue.push_back(Box::new(errand));
        if state.running {
            return;
        }
        state.running = true;
        let runner = self.clone();
        match thread::Builder::new().name("partywall-call".into()).spawn(move || runner.work()) {
            // The one before has ended, or is about to without touching anything.
            Ok(thread) => state.thread = Some(thread),
            Err(error) => {
                drop(state);
                tracing::warn!(%error, "no thread can be had; the service thread does its work");
                self.work();
            }
        }
    }

    /// Waits until everything is done.
    pub(super) fn finish(&self) {
        let thread = self.lock().thread.take();
        if let Some(thread) = thread {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }

    /// Lets the thread be forgotten in a forked child, where it does not exist.
    pub(super) fn forget(&self) {
        // In a child the lock may be held by nobody who is still there.
        if let Ok(mut state) = self.state.try_lock() {
            std::mem::forget(state.thread.take());
        }
    }

    fn work(&self) {
        loop {
            let mut state = self.lock();
            let Some(errand) = state.queue.pop_front() else {
                state.running = false;
                return;
            };
            drop(state);
            errand();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Errands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Errands").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn each_is_run_once_in_order() {
        let errands = Arc::new(Errands::default());
        let (sender, receiver) = mpsc::channel();
        for round in 0..50 {
            for number in 0..4 {
                let sender = sender.clone();
                errands.run(move || sender.send(round * 4 + number).unwrap());
            }
            if round % 2 == 0 {
                errands.finish();
            }
        }
        errands.finish();
        assert!(receiver.try_iter().eq(0..200));
    }
}
