//! CUDA's interprocess events, for code that already uses them.

use std::{thread, time::Instant};

use partywall_cuda::{self as cuda, CudaError, DeviceUuid, StreamRef};

pub use cuda::IpcEventHandle;

use crate::{
    backoff::Backoff,
    error::{Error, Result},
    gpu::{Gpu, failed_call},
    wait::Wait,
};

/// A CUDA event that several processes share: one process records it on a stream, and a stream of another process waits
/// for it.
///
/// An adapter for code that already passes such events around. For new code a timeline is better, because an event
/// - **cannot be rescued**: if the process that records it is killed, a stream that waits for it may wait for ever, and
///   no call ends that wait (measured: still blocked after 3 s, when the test ended);
/// - **must be recorded before the other process waits**: a wait refers to the latest record at the time of the call,
///   and does nothing if there is none. The recording process must therefore send a message first, and one event cannot
///   stand for two rounds;
/// - **needs the same `/dev/shm` and the same user** on both sides; shared memory does not. Killed processes leave
///   files in `/dev/shm`;
/// - ends with the process that created it: using it in another process after that is undefined (vendor's
///   documentation);
/// - can only be opened in a process other than its creator, on the same GPU, and records no time.
///
/// The 64 bytes of the handle can be sent by any channel, such as the metadata of a segment or a socket.
///
/// May be used from any thread. Dropping it does not wait.
#[derive(Debug)]
pub struct IpcEvent {
    gpu: DeviceUuid,
    event: cuda::IpcEvent,
}

impl IpcEvent {
    /// Creates an event that has no record yet.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn create(gpu: &Gpu) -> Result<Self> {
        Self::on(gpu, "making an event for other processes", cuda::IpcEvent::new(gpu.context()))
    }

    /// Opens an event that another process has created on this GPU.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) if the other process has dropped the event, has another
    /// `/dev/shm` or another user, or is this process.
    pub fn open(gpu: &Gpu, handle: &IpcEventHandle) -> Result<Self> {
        Self::on(gpu, "opening the event of another process", cuda::IpcEvent::open(gpu.context(), handle))
    }

    /// Returns the handle with which another process opens the event. Only the process that created the event can call
    /// this.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) if this process has opened the event instead of creating
    /// it, or `/dev/shm` cannot be used.
    pub fn export(&self) -> Result<IpcEventHandle> {
        self.event.export().map_err(|source| failed("sharing an event with other processes", self.gpu, source))
    }

    /// Records the point after all work that is on the stream now. Later waits, by any process, refer to this record.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda), for instance if the stream belongs to another GPU.
    pub fn record(&self, stream: StreamRef<'_>) -> Result<()> {
        self.event.record(stream).map_err(|source| failed("recording an event", self.gpu, source))
    }

    /// Makes the stream wait for the latest record, by any process. Without a record the stream does not wait.
    ///
    /// **No call ends this wait** if the recording process dies before its work is done.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn wait(&self, stream: StreamRef<'_>) -> Result<()> {
        self.event.enqueue_wait(stream).map_err(|source| failed("waiting on a stream for an event", self.gpu, source))
    }

    /// Returns whether the latest record is reached; true if there is none. Does not wait.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) if the work before the record has failed.
    pub fn query(&self) -> Result<bool> {
        self.event.is_done().map_err(|source| failed("asking for the work before an event", self.gpu, source))
    }

    /// Waits on the host until the latest record is reached. Returns immediately if there is none.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) as for
    /// [`query`](Self::query).
    pub fn synchronize<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        // The driver's own wait has no timeout, and the recording process may be dead.
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
