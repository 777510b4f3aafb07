//! Background jobs: work that blocks and is not part of a call. They run beside the service thread, which never blocks.
//!
//! One thread for everything would deadlock: it could block in the driver behind a wait with a limit that only it can
//! end. No job of the broker's queue waits for the renewal of a lost connection, which may be a later job of the same
//! queue.

use std::{
    collections::VecDeque,
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::JoinHandle,
    time::Duration,
};

use partywall_os::{lock::IgnorePoison, thread::spawn};

type Job = Box<dyn FnOnce() + Send>;

/// The workers of a connection: one queue for each thing that a job may wait for, so that one kind does not delay
/// another.
#[derive(Debug)]
pub(crate) struct Workers {
    /// Calls of the broker. None of these jobs has a handle of the connection.
    pub(crate) broker: Arc<Worker>,
    /// Waits for a GPU, without a limit. A job keeps its connection, which may end on this thread. A process that
    /// returns from `main` before that ends without leaving the domain.
    pub(crate) gpu: Arc<Worker>,
    /// Drops values of the user. Such a drop may block, panic, or end the connection.
    pub(crate) user: Arc<Worker>,
}

/// Runs jobs one after another, on a thread that exists only while there are jobs and for the linger time after them.
pub(crate) struct Worker {
    name: &'static str,
    state: Mutex<WorkerState>,
    more: Condvar,
    /// How long the thread stays without a job.
    linger: Duration,
}

#[derive(Default)]
struct WorkerState {
    queue: VecDeque<Job>,
    is_running: bool,
    thread: Option<JoinHandle<()>>,
}

/// Runs code that may be the user's, and catches a panic, which the panic hook has reported.
pub(crate) fn contained(act: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(act));
}

impl Workers {
    pub(crate) fn new() -> Self {
        let worker = |name, linger| Arc::new(Worker::new(name, linger));
        Self {
            broker: worker("partywall-call", Duration::ZERO),
            gpu: worker("partywall-idle", Duration::ZERO),
            // Lingers, because values come repeatedly.
            user: worker("partywall-user", LINGER),
        }
    }

    /// Forgets the threads in a forked child, where they do not exist.
    pub(crate) fn forget(&self) {
        for worker in [&self.broker, &self.gpu, &self.user] {
            // In a child the lock may be held by a thread that does not exist there, so it is only tried.
            if let Ok(mut state) = worker.state.try_lock() {
                std::mem::forget(state.thread.take());
            }
        }
    }
}

impl Worker {
    pub(crate) fn new(name: &'static str, linger: Duration) -> Self {
        Self { name, state: Mutex::default(), more: Condvar::new(), linger }
    }

    /// Runs `job` in the background, after earlier jobs. If no thread can be started, runs it here.
    pub(crate) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.queue.push_back(Box::new(job));
        if state.is_running {
            self.more.notify_one();
            return;
        }
        state.is_running = true;
        let worker = self.clone();
        match spawn(self.name, move || worker.work(worker.linger)) {
            // The former thread has ended, or is about to end without touching anything.
            Ok(thread) => state.thread = Some(thread),
            Err(error) => {
                drop(state);
                tracing::warn!(%error, worker = self.name, "cannot start a thread: this one runs the job");
                self.work(Duration::ZERO);
            }
        }
    }

    /// Waits until every job has run.
    pub(crate) fn finish(&self) {
        let thread = self.lock().thread.take();
        if let Some(thread) = thread {
            // The thread itself has reported a panic.
            let _ = thread.join();
        }
    }

    fn work(&self, linger: Duration) {
        loop {
            let mut state = self.lock();
            if state.queue.is_empty() && !linger.is_zero() {
                let waited = self.more.wait_timeout_while(state, linger, |state| state.queue.is_empty());
                state = waited.ignore_poison().0;
            }
            let Some(job) = state.queue.pop_front() else {
                state.is_running = false;
                return;
            };
            drop(state);
            contained(job);
        }
    }

    fn lock(&self) -> MutexGuard<'_, WorkerState> {
        self.state.lock().ignore_poison()
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How long a thread lingers: longer than the usual interval between two fences of a stream.
const LINGER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn worker(linger: Duration) -> Arc<Worker> {
        Arc::new(Worker::new("partywall-test", linger))
    }

    #[test]
    fn each_job_runs_once_in_order() {
        let worker = worker(Duration::ZERO);
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
    fn panicking_job_does_not_stop_other_jobs() {
        for worker in [worker(Duration::ZERO), worker(LINGER)] {
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
    fn idle_thread_runs_later_jobs() {
        let worker = worker(LINGER);
        let (sender, receiver) = mpsc::channel();
        for _ in 0..50 {
            let sender = sender.clone();
            worker.run(move || sender.send(()).unwrap());
            receiver.recv().unwrap();
        }
        worker.finish();
        assert!(!worker.lock().is_running, "it ends at last");
    }
}
