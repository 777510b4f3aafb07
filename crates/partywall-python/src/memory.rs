//! Reading and writing the memory that tensors belong to.
#![allow(unsafe_code)] // streams of others

use std::sync::Arc;

use partywall::{
    Block, Build, DeviceRange, EnqueuedResult, Error, Loan, Result, Sample, Segment,
    cuda::{RawStream, StreamRef},
    error::{Denied, Gone},
};

/// A callback that uses a range of device memory.
pub(crate) type Work<'a> = &'a mut dyn FnMut(DeviceRange<'_>) -> Result<()>;

/// A build, segment, block, loan, sample, part of a claimed task or output of an enqueued one. All but builds and segments have
/// one tensor, and ignore its name.
pub(crate) trait Memory {
    /// Has `work` use the tensor `name` on its GPU, of `bytes` bytes, for work on `stream`.
    fn on_device(&self, name: &str, bytes: u64, stream: RawStream, work: Work<'_>) -> Result<()>;

    /// Copies the tensor `name` out of host memory.
    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()>;

    /// Copies bytes into the tensor `name`, in host memory or on a GPU.
    fn write(&mut self, name: &str, bytes: &[u8], on_host: bool) -> Result<()>;
}

impl Memory for Build {
    fn on_device(&self, name: &str, _: u64, _: RawStream, work: Work<'_>) -> Result<()> {
        work(self.device(name)?)
    }

    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        self.as_mut_bytes(name).map(|bytes| out.copy_from_slice(bytes))
    }

    fn write(&mut self, name: &str, bytes: &[u8], _: bool) -> Result<()> {
        self.write(name, bytes)
    }
}

impl Memory for Arc<Segment> {
    fn on_device(&self, name: &str, bytes: u64, _: RawStream, work: Work<'_>) -> Result<()> {
        // The tensor may have grown, and have more bytes than are asked for.
        work(self.tensor(name)?.device()?.slice(0, bytes)?)
    }

    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        self.tensor(name)?.read_at(0, out)
    }

    fn write(&mut self, name: &str, bytes: &[u8], _: bool) -> Result<()> {
        self.tensor(name)?.write_at(0, bytes)
    }
}

impl Memory for Block {
    fn on_device(&self, _: &str, bytes: u64, _: RawStream, work: Work<'_>) -> Result<()> {
        work(self.device()?.slice(0, bytes)?)
    }

    fn read(&mut self, _: &str, out: &mut [u8]) -> Result<()> {
        self.bytes().map(|bytes| out.copy_from_slice(&bytes[..out.len()]))
    }

    fn write(&mut self, _: &str, bytes: &[u8], on_host: bool) -> Result<()> {
        match on_host {
            true => self.bytes_mut().map(|all| all[..bytes.len()].copy_from_slice(bytes)),
            false => copy(self.device()?.slice(0, bytes.len() as u64)?, bytes),
        }
    }
}

impl Memory for Loan {
    fn on_device(&self, _: &str, _: u64, _: RawStream, work: Work<'_>) -> Result<()> {
        work(self.device()?)
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
    fn on_device(&self, name: &str, _: u64, stream: RawStream, work: Work<'_>) -> Result<()> {
        let gpu = self.gpu().ok_or_else(|| Error::Gone(Gone::HeldBlock { pool: name.to_owned() }))?;
        // SAFETY: the caller's promise: a stream of the primary context of the tensor's GPU that lives for as long as this
        // call, as DLPack's consumers are promised too.
        work(self.device_on(unsafe { StreamRef::borrow(gpu.context(), stream) })?)
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
    fn on_device(&self, _: &str, bytes: u64, stream: RawStream, work: Work<'_>) -> Result<()> {
        let range = self.device()?;
        // SAFETY: the caller's promise: a stream of the primary context of the tensor's GPU that lives for as long as this
        // call, as DLPack's consumers are promised too.
        self.wait_on(unsafe { StreamRef::borrow(range.gpu().context(), stream) })?;
        work(range.slice(0, bytes)?)
    }

    /// Fails: an enqueued result is on a GPU.
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
