//! What has to wait and is nobody's call: done beside the service thread, which never waits.

use std::{
    collections::VecDeque,
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

type Job = Box<dyn FnOnce() + Send>;

/// Runs background jobs one after another, on a thread that exists only while there are any, and for as long as it lingers.
#[derive(Default)]
pub(crate) struct Worker {
    state: Mutex<State>,
    more: Condvar,
    linger: Duration,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    running: bool,
    thread: Option<JoinHandle<()>>,
}

/// Does what may be the user's. Its panic, which has been reported, ends nothing else that this thread is to do.
pub(crate) fn contained(act: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(act));
}

impl Worker {
    /// Those that come again and again: the thread stays for a while when it has nothing to do.
    pub(crate) fn lingering() -> Self {
        Self { linger: LINGER, ..Self::default() }
    }

    /// Has it done soon. Where no thread can be had it is done here.
    pub(crate) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.queue.push_back(Box::new(job));
        if state.running {
            self.more.notify_one();
            return;
        }
        state.running = true;
        let runner = self.clone();
        match thread::Builder::new().name("partywall-call".into()).spawn(move || runner.work(runner.linger)) {
            // The one before has ended, or is about to without touching anything.
            Ok(thread) => state.thread = Some(thread),
            Err(error) => {
                drop(state);
                tracing::warn!(%error, "no thread can be had; the service thread does its work");
                self.work(Duration::ZERO);
            }
        }
    }

    /// Waits until everything is done.
    pub(crate) fn finish(&self) {
        let thread = self.lock().thread.take();
        if let Some(thread) = thread {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }

    /// Lets the thread be forgotten in a forked child, where it does not exist.
    pub(crate) fn forget(&self) {
        // In a child the lock may be held by nobody who is still there.
        if let Ok(mut state) = self.state.try_lock() {
            std::mem::forget(state.thread.take());
        }
    }

    fn work(&self, linger: Duration) {
        loop {
            let mut state = self.lock();
            if state.queue.is_empty() && !linger.is_zero() {
                let waited = self.more.wait_timeout_while(state, linger, |state| state.queue.is_empty());
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            let Some(job) = state.queue.pop_front() else {
                state.running = false;
                return;
            };
            drop(state);
            contained(job);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

/// How long a thread lingers: longer than streams take from one of their points to the next.
const LINGER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn each_is_run_once_in_order() {
        let worker = Arc::new(Worker::default());
        let (sender, receiver) = mpsc::channel();
        for round in 0..50 {
            for number in 0..4 {
                let sender = sender.clone();
                worker.run(move || sender.send(round * 4 + number).unwrap());
            }
            if round % 2 == 0 {
                worker.finish();
            }
        }
        worker.finish();
        assert!(receiver.try_iter().eq(0..200));
    }

    #[test]
    fn one_that_panics_keeps_no_other_from_being_run() {
        for worker in [Worker::default(), Worker::lingering()] {
            let worker = Arc::new(worker);
            let (sender, receiver) = mpsc::channel();
            for number in 0..10 {
                let sender = sender.clone();
                worker.run(|| panic!("as it is meant"));
                worker.run(move || sender.send(number).unwrap());
            }
            worker.finish();
            assert!(receiver.try_iter().eq(0..10));
        }
    }

    #[test]
    fn a_thread_that_lingers_runs_what_comes_later() {
        let worker = Arc::new(Worker::lingering());
        let (sender, receiver) = mpsc::channel();
        for _ in 0..50 {
            let sender = sender.clone();
            worker.run(move || sender.send(()).unwrap());
            receiver.recv().unwrap();
        }
        worker.finish();
        assert!(!worker.lock().running, "it ends at last");
    }
}
