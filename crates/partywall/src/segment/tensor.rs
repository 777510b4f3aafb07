//! Tensors of an open segment.

use std::fmt;

use partywall_os::map::SharedSlice;
use partywall_shm::{DType, Tensor as Entry};

use super::{IpcHandle, Segment};
use crate::{
    element::{Element, elements},
    error::{Denied, Error, InvalidArgument, Mismatch, Result},
    gpu::DeviceRange,
    kind::wrong_kind,
};

/// A tensor, borrowed from its segment.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    segment: &'a Segment,
    entry: Entry<'a>,
}

impl<'a> Tensor<'a> {
    pub(super) fn new(segment: &'a Segment, entry: Entry<'a>) -> Self {
        Self { segment, entry }
    }

    /// Returns the name.
    pub fn name(&self) -> &'a str {
        self.entry.name()
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.entry.dtype()
    }

    /// Returns the number of elements along each dimension.
    pub fn shape(&self) -> Vec<u64> {
        self.entry.shape().collect()
    }

    /// Returns the distance from one index to the next along each dimension, in elements.
    pub fn strides(&self) -> Vec<u64> {
        self.entry.strides().collect()
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.entry.elements()
    }

    /// Returns the number of bytes from the first element to the end of the last.
    pub fn bytes(&self) -> u64 {
        self.entry.bytes()
    }

    /// Returns whether the elements follow each other without gaps, last dimension fastest.
    pub fn is_contiguous(&self) -> bool {
        self.entry.is_contiguous()
    }

    /// Returns the elements in frozen host or pinned memory, in memory order. Gives the CPU access to pinned memory, if
    /// it has none.
    ///
    /// # Errors
    /// [`Mismatch::DType`]; [`Mismatch::Kind`] for memory that is mutable or on a GPU, and for pinned memory that
    /// another user has committed: its process could have kept it writable.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        self.check::<T>()?;
        let bytes = self.as_bytes()?;
        elements(bytes).map_err(|e| self.range(format!("cannot use its bytes as elements: {e}")))
    }

    /// Returns the bytes in frozen host or pinned memory. Gives the CPU access to pinned memory, if it has none.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice), except for the type.
    pub fn as_bytes(&self) -> Result<&'a [u8]> {
        if self.entry.bytes() == 0 {
            return Ok(&[]);
        }
        let bytes = self.segment.view()?.bytes(self.entry.chunk(), self.entry.offset(), self.entry.bytes());
        bytes.map_err(|e| self.segment.named(e))
    }

    /// Returns the elements in mutable host or pinned memory, which any process, and in pinned memory any GPU, may
    /// change at any time.
    ///
    /// # Errors
    /// [`Mismatch::DType`]; [`Mismatch::Kind`] for memory that is frozen or on a GPU, except pinned memory that another
    /// user has committed; [`InvalidArgument::Range`] for a tensor without bytes.
    pub fn shared<T: Element>(&self) -> Result<SharedSlice<'a, T>> {
        self.check::<T>()?;
        if self.entry.bytes() == 0 {
            return Err(self.range("it has no bytes to share".into()));
        }
        let map = self.segment.view()?.shared(self.entry.chunk()).map_err(|e| self.segment.named(e))?;
        let count = self.entry.bytes() as usize / size_of::<T>();
        map.slice(self.entry.offset() as usize, count)
            .ok_or_else(|| self.range("it lies outside its chunk or is not aligned".into()))
    }

    /// Returns the first address in host or pinned memory, for code in other languages; null for a tensor without
    /// bytes. Valid while the segment lives. A write is allowed only if [`Segment::is_writable`]; otherwise it ends the
    /// process.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for memory on a GPU.
    pub fn as_ptr(&self) -> Result<*mut u8> {
        if self.entry.bytes() == 0 {
            return Ok(std::ptr::null_mut());
        }
        if !self.segment.facts.chosen.mutable {
            return self.as_bytes().map(|bytes| bytes.as_ptr().cast_mut());
        }
        let map = self.segment.view()?.shared(self.entry.chunk()).map_err(|e| self.segment.named(e))?;
        // In bounds: the table was checked when the segment was opened.
        Ok(map.as_ptr().wrapping_add(self.entry.offset() as usize))
    }

    /// Returns the range on its GPU, for the caller's kernels and copies on the caller's streams. Gives the GPU access
    /// to pinned memory, if it has none; [`OpenOptions::access`](crate::OpenOptions::access) says which GPU.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for host memory; [`InvalidArgument::Range`] for a tensor without bytes.
    pub fn device(&self) -> Result<DeviceRange<'a>> {
        if self.entry.bytes() == 0 {
            return Err(self.range("it has no bytes, and so no address".into()));
        }
        let range = self.segment.view()?.device(self.entry.chunk(), self.entry.offset(), self.entry.bytes());
        range.map_err(|e| self.segment.named(e))
    }

    /// Returns the driver's 64-byte handle of the allocation that contains the tensor, and the tensor's place in it. See
    /// [`IpcHandle`].
    ///
    /// # Errors
    /// [`Mismatch::Kind`] unless the memory is of kind `legacy` and was published by this process, whose segment keeps it
    /// alive; [`InvalidArgument::Range`] for a tensor without bytes.
    pub fn ipc_handle(&self) -> Result<IpcHandle<'a>> {
        let memory = self.segment.view()?;
        let Some(handle) = memory.ipc_handle(self.entry.chunk()) else {
            let has = if self.segment.kind() == "legacy" { "opened legacy" } else { self.segment.kind() };
            return Err(self.segment.named(wrong_kind(has, "published legacy", "an IPC handle")));
        };
        let DeviceRange { gpu, .. } = self.device()?;
        Ok(IpcHandle { handle, gpu, offset: self.entry.offset(), bytes: self.entry.bytes() })
    }

    /// Returns a cudarc view of the elements on their GPU, in memory order. `stream` may be any cudarc stream of that
    /// GPU.
    ///
    /// # Errors
    /// As [`Tensor::device`] and [`DeviceRange::to_cudarc`]; [`Mismatch::DType`].
    ///
    /// # Panics
    /// As [`DeviceRange::to_cudarc`].
    #[cfg(feature = "cudarc")]
    pub fn to_cudarc<T: Element + cudarc::driver::DeviceRepr>(
        &self,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    ) -> Result<partywall_cuda::CudarcSlice<'a, T>> {
        self.check::<T>()?;
        self.device()?.to_cudarc(stream)
    }

    /// Copies bytes of the tensor, from `offset` on, into `out`. Works for host and GPU memory. Host-synchronous.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`], [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let start = self.inside(offset, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        self.segment.view()?.read(self.entry.chunk(), start, out).map_err(|e| self.segment.named(e))
    }

    /// Returns a copy of all bytes. Host-synchronous.
    ///
    /// # Errors
    /// As [`Tensor::read_at`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.entry.bytes() as usize];
        self.read_at(0, &mut out)?;
        Ok(out)
    }

    /// Copies `bytes` into the tensor, from `offset` on. Host-synchronous. Not ordered with accesses of other
    /// processes.
    ///
    /// # Errors
    /// [`Denied::ReadOnly`] unless the segment was opened for writing; [`InvalidArgument::Range`],
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let facts = &self.segment.facts;
        if !facts.writable {
            return Err(Denied::ReadOnly { name: facts.name.clone(), version: facts.version }.into());
        }
        let start = self.inside(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.segment.view()?.write(self.entry.chunk(), start, bytes).map_err(|e| self.segment.named(e))
    }

    /// Returns where `len` bytes, from `offset` on, begin in the chunk.
    fn inside(&self, offset: u64, len: usize) -> Result<u64> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.entry.bytes() => Ok(self.entry.offset() + offset),
            _ => Err(self.range(format!("bytes {offset} + {len} are outside its {} bytes", self.entry.bytes()))),
        }
    }

    /// Returns the segment.
    pub(crate) fn segment(&self) -> &'a Segment {
        self.segment
    }

    /// Returns the tensor's offset in the segment's memory, and its length in bytes.
    pub(crate) fn place(&self) -> Result<(u64, u64)> {
        let before: u64 = self.segment.ranges()?.iter().take(self.entry.chunk()).sum();
        Ok((before + self.entry.offset(), self.entry.bytes()))
    }

    fn check<T: Element>(&self) -> Result<()> {
        if T::DTYPE == self.dtype() {
            return Ok(());
        }
        Err(Mismatch::DType { what: format!("tensor {:?}", self.name()), has: self.dtype(), wanted: T::DTYPE.name() }
            .into())
    }

    fn range(&self, why: String) -> Error {
        InvalidArgument::range(self.name(), why)
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entry.fmt(f)
    }
}

#[cfg(all(test, feature = "half"))]
mod tests {
    use super::*;

    #[test]
    fn half_precision_is_read_where_it_lies() {
        let words = [0x3c00_u16, 0xc000];
        let halves: &[half::f16] = elements(bytemuck::bytes_of(&words)).unwrap();
        assert_eq!(halves, [1.0, -2.0].map(half::f16::from_f32));
        assert_eq!(half::bf16::DTYPE, DType::BF16);
    }
}
