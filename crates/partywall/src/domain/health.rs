//! Detects the loss of CUDA contexts of this process.
//!
//! A fault in a kernel ends the context, and with it all work that other processes wait for. A process that makes no
//! calls does not notice, so a thread asks the driver periodically. This is not the service thread, which must
//! not block: the driver may block a call while another thread waits in the driver.

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use partywall_cuda::{CudaError, DeviceUuid};
use partywall_os::{lock::IgnorePoison, thread::spawn};

use crate::{
    error::{DeviceFault, Error, Result},
    gpu::Gpu,
};

/// The thread's name. Tests exempt it from the calls that the simulated driver counts and fails.
const THREAD: &str = "partywall-gpu";

/// How often to query.
const ASK: Duration = Duration::from_millis(250);

/// How long to wait for the thread to end. A thread that is blocked in the driver ends later.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Checks the context of each GPU that a connection has opened.
pub(crate) struct Health {
    shared: Arc<HealthShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct HealthShared {
    watched: Mutex<Vec<Arc<Gpu>>>,
    lost: Arc<OnceLock<Lost>>,
    /// Called once, with the lost context.
    notify: Box<dyn Fn(&Lost) + Send + Sync>,
    stop: AtomicBool,
}

/// A context that is lost for good.
#[derive(Debug, Clone)]
pub(crate) struct Lost {
    /// Its GPU.
    pub(crate) gpu: DeviceUuid,
    /// The error that a call returned.
    pub(crate) error: CudaError,
}

impl Health {
    /// Creates a checker. When a context is found lost, it sets `lost` and calls `notify` once, on any thread.
    pub(crate) fn new(lost: Arc<OnceLock<Lost>>, notify: impl Fn(&Lost) + Send + Sync + 'static) -> Self {
        let shared =
            HealthShared { watched: Mutex::default(), lost, notify: Box::new(notify), stop: AtomicBool::new(false) };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// Checks this GPU from now on.
    pub(crate) fn watch(&self, gpu: &Arc<Gpu>) -> Result<()> {
        self.shared.watched.lock().ignore_poison().push(gpu.clone());
        let mut thread = self.thread.lock().ignore_poison();
        if thread.is_none() {
            let shared = self.shared.clone();
            let started = spawn(THREAD, move || shared.run());
            let started = started.map_err(|source| Error::starting("the thread that checks CUDA contexts", source))?;
            *thread = Some(started);
        }
        Ok(())
    }

    /// Fails if a context of this process is lost.
    ///
    /// # Errors
    /// [`DeviceFault::ContextLost`].
    pub(crate) fn check(&self) -> Result<()> {
        match self.shared.lost.get() {
            None => Ok(()),
            Some(Lost { gpu, error }) => {
                Err(DeviceFault::ContextLost { what: format!("GPU {gpu}"), source: error.clone() }.into())
            }
        }
    }

    /// Records an error of a driver call, which may show that the context is lost.
    pub(crate) fn note(&self, gpu: DeviceUuid, error: &CudaError) {
        self.shared.note(gpu, error);
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        let thread = self.thread.lock().ignore_poison().take();
        let Some(thread) = thread else { return };
        thread.thread().unpark();
        let deadline = Instant::now() + TIMEOUT;
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_micros(100));
        }
        if thread.is_finished() {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }

    /// Forgets the thread in a forked child, where it does not exist.
    pub(crate) fn forget(&self) {
        // In a child the lock may be held by a thread that does not exist there.
        if let Ok(mut thread) = self.thread.try_lock() {
            std::mem::forget(thread.take());
        }
    }
}

impl HealthShared {
    fn run(&self) {
        loop {
            thread::park_timeout(ASK);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let watched = self.watched.lock().ignore_poison().clone();
            for gpu in watched {
                if let Err(error) = gpu.context().check() {
                    self.note(gpu.uuid(), &error);
                }
            }
        }
    }

    fn note(&self, gpu: DeviceUuid, error: &CudaError) {
        if error.is_sticky() && self.lost.set(Lost { gpu, error: error.clone() }).is_ok() {
            tracing::error!(%gpu, %error, "a CUDA context of this process is lost");
            if let Some(lost) = self.lost.get() {
                (self.notify)(lost);
            }
        }
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("lost", &self.shared.lost.get()).finish_non_exhaustive()
    }
}
