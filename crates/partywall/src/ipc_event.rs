//! CUDA's interprocess events, for code that uses them already.

use std::{thread, time::Instant};

use partywall_cuda::{self as cuda, CudaError, DeviceUuid, StreamRef};

pub use cuda::IpcEventHandle;

use crate::{
    backoff::Backoff,
    error::{Error, Result},
    gpu::{Gpu, failed_call},
    wait::Wait,
};

/// An event of CUDA's that several processes share: one records it on a stream, the stream of another waits for it.
///
/// An adapter for code that passes such events around. Between processes of your own use a timeline, because an event
/// - **cannot be rescued**: a stream that waits for the event of a process that was killed may wait for ever, and nobody
///   can release it (measured: still blocked when we stopped looking, after 3 s);
/// - **has to be recorded before the other process waits**: a wait is for the record that there is at the time of the
///   call, and without one for nothing. A message "I have recorded" has to come first, and one event cannot stand for
///   two rounds;
/// - **needs the same `/dev/shm` and the same user** on both sides, where memory does not. Killed processes leave files
///   there;
/// - lives as long as the process that made it keeps it: what happens to others that have it open is undefined (vendor's
///   documentation);
/// - is opened in another process than the one that made it, on the same GPU, and keeps no time.
///
/// The 64 bytes of the handle travel by whatever means the processes have: the metadata of a segment, a socket.
///
/// May be used from any thread. Dropping it does not wait.
#[derive(Debug)]
pub struct IpcEvent {
    gpu: DeviceUuid,
    event: cuda::IpcEvent,
}

impl IpcEvent {
    /// A new event, which nothing was recorded in.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn create(gpu: &Gpu) -> Result<Self> {
        Self::on(gpu, "making an event for other processes", cuda::IpcEvent::new(gpu.context()))
    }

    /// The event that another process has made on this GPU.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): the other process has dropped it, has another `/dev/shm` or is of another user, or is this one.
    pub fn open(gpu: &Gpu, handle: &IpcEventHandle) -> Result<Self> {
        Self::on(gpu, "opening the event of another process", cuda::IpcEvent::open(gpu.context(), handle))
    }

    /// What another process needs to open it. Only the process that made it can say.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): it was opened here, or `/dev/shm` cannot be used.
    pub fn export(&self) -> Result<IpcEventHandle> {
        self.event.export().map_err(|source| failed("sharing an event with other processes", self.gpu, source))
    }

    /// Records the point after everything that is on the stream now. Later waits, by any process, are for this one.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda), if the stream is of another GPU for instance.
    pub fn record(&self, stream: StreamRef<'_>) -> Result<()> {
        self.event.record(stream).map_err(|source| failed("recording an event", self.gpu, source))
    }

    /// Has the stream wait for the record that there is now, by whichever process. Without a record it does not wait.
    ///
    /// **Nobody can end this wait** if the process that recorded dies before its work is done.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn wait(&self, stream: StreamRef<'_>) -> Result<()> {
        self.event.enqueue_wait(stream).map_err(|source| failed("waiting on a stream for an event", self.gpu, source))
    }

    /// Whether the last record is reached, or there is none. Does not wait.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): what the work before it failed with.
    pub fn query(&self) -> Result<bool> {
        self.event.is_done().map_err(|source| failed("asking for the work before an event", self.gpu, source))
    }

    /// Waits on the host until the last record is reached; at once if there is none.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) as for [`query`](Self::query).
    pub fn synchronize<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        // The driver's own wait has no limit, and the process that recorded may be dead.
        let waiting = wait.into().begin();
        let mut backoff = Backoff::new();
        while !self.query()? {
            let Some(left) = waiting.left(Instant::now()) else {
                return Err(waiting.error("the work that the event records was not done".into()));
            };
            thread::sleep(backoff.next().min(left));
        }
        Ok(())
    }

    fn on(gpu: &Gpu, what: &str, event: Result<cuda::IpcEvent, CudaError>) -> Result<Self> {
        let gpu = gpu.uuid();
        event.map(|event| Self { gpu, event }).map_err(|source| failed(what, gpu, source))
    }
}

fn failed(what: &str, gpu: DeviceUuid, source: CudaError) -> Error {
    failed_call(&format!("{what} on GPU {gpu}"), source)
}
