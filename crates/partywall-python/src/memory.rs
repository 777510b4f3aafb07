//! Reading and writing the memory that tensors belong to.

use std::sync::Arc;

use partywall::{
    Block, Build, DeviceRange, EnqueuedResult, Error, Loan, Result, Sample, Segment,
    cuda::StreamRef,
    error::{Denied, Gone},
};

/// A callback that uses a range of device memory.
pub(crate) type Work<'a> = &'a mut dyn FnMut(DeviceRange<'_>) -> Result<()>;

/// A build, segment, block, loan, sample, part of a claimed task or output of an enqueued one. All but builds and
/// segments have one tensor, and ignore its name.
pub(crate) trait Memory {
    /// Has `work` use the tensor `name` on its GPU, of `bytes` bytes, for work on `stream`.
    fn on_device(&mut self, name: &str, bytes: u64, stream: StreamRef<'_>, work: Work<'_>) -> Result<()>;

    /// Gives the CPU access to the tensor `name`, if it has none yet: that of pinned memory which a GPU used first.
    fn allow_cpu(&mut self, name: &str) -> Result<()>;

    /// Copies the tensor `name` out of host memory.
    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()>;

    /// Copies bytes into the tensor `name`, in host memory or on a GPU.
    fn write(&mut self, name: &str, bytes: &[u8], on_host: bool) -> Result<()>;
}

impl Memory for Build {
    fn on_device(&mut self, name: &str, _: u64, _: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        work(self.device(name)?)
    }

    fn allow_cpu(&mut self, name: &str) -> Result<()> {
        self.as_mut_bytes(name).map(drop)
    }

    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        self.as_mut_bytes(name).map(|bytes| out.copy_from_slice(bytes))
    }

    fn write(&mut self, name: &str, bytes: &[u8], _: bool) -> Result<()> {
        self.write(name, bytes)
    }
}

impl Memory for Arc<Segment> {
    fn on_device(&mut self, name: &str, bytes: u64, _: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        // The tensor may have grown, and have more bytes than are asked for.
        work(self.tensor(name)?.device()?.slice(0, bytes)?)
    }

    fn allow_cpu(&mut self, name: &str) -> Result<()> {
        self.tensor(name)?.as_ptr().map(drop)
    }

    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        self.tensor(name)?.read_at(0, out)
    }

    fn write(&mut self, name: &str, bytes: &[u8], _: bool) -> Result<()> {
        self.tensor(name)?.write_at(0, bytes)
    }
}

impl Memory for Block {
    fn on_device(&mut self, _: &str, bytes: u64, _: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        work(self.device_mut()?.slice(0, bytes)?)
    }

    fn allow_cpu(&mut self, _: &str) -> Result<()> {
        self.as_ptr().map(drop)
    }

    fn read(&mut self, _: &str, out: &mut [u8]) -> Result<()> {
        self.bytes().map(|bytes| out.copy_from_slice(&bytes[..out.len()]))
    }

    fn write(&mut self, _: &str, bytes: &[u8], on_host: bool) -> Result<()> {
        match on_host {
            true => self.bytes_mut().map(|all| all[..bytes.len()].copy_from_slice(bytes)),
            false => copy(self.device_mut()?.slice(0, bytes.len() as u64)?, bytes),
        }
    }
}

impl Memory for Loan {
    fn on_device(&mut self, _: &str, _: u64, _: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        work(self.device()?)
    }

    fn allow_cpu(&mut self, _: &str) -> Result<()> {
        self.bytes_mut().map(drop)
    }

    fn read(&mut self, _: &str, out: &mut [u8]) -> Result<()> {
        self.bytes_mut().map(|bytes| out.copy_from_slice(bytes))
    }

    fn write(&mut self, _: &str, bytes: &[u8], on_host: bool) -> Result<()> {
        match on_host {
            true => self.bytes_mut().map(|all| all.copy_from_slice(bytes)),
            false => copy(self.device()?, bytes),
        }
    }
}

impl Memory for Arc<Sample> {
    fn on_device(&mut self, _: &str, _: u64, stream: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        work(self.device_on(stream)?)
    }

    fn allow_cpu(&mut self, _: &str) -> Result<()> {
        self.bytes().map(drop)
    }

    fn read(&mut self, _: &str, out: &mut [u8]) -> Result<()> {
        self.bytes().map(|bytes| out.copy_from_slice(bytes))
    }

    fn write(&mut self, _: &str, _: &[u8], _: bool) -> Result<()> {
        Err(read_only(self))
    }
}

impl Memory for Arc<EnqueuedResult> {
    /// The stream waits first until the worker's stream has completed the output.
    fn on_device(&mut self, _: &str, bytes: u64, stream: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        let range = self.device()?;
        self.wait_on(stream)?;
        work(range.slice(0, bytes)?)
    }

    /// Fails, as `read` does.
    fn allow_cpu(&mut self, name: &str) -> Result<()> {
        self.read(name, &mut [])
    }

    /// Fails: tensors of an enqueued result are on a GPU.
    fn read(&mut self, _: &str, _: &mut [u8]) -> Result<()> {
        Err(Error::Gone(Gone::Task { task: self.task().to_string() }))
    }

    fn write(&mut self, name: &str, _: &[u8], _: bool) -> Result<()> {
        Err(Error::Denied(Denied::ReadOnly { name: name.to_owned(), version: self.task().version() }))
    }
}

/// Returns the error of writing a sample.
pub(crate) fn read_only(sample: &Sample) -> Error {
    Error::Denied(Denied::ReadOnly { name: sample.topic().to_owned(), version: sample.version() })
}

fn copy(range: DeviceRange<'_>, bytes: &[u8]) -> Result<()> {
    range.copy_from_host(range.gpu().stream(), bytes)
}
