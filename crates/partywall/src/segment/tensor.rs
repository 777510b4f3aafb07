//! One tensor of an open segment.

use std::fmt;

use bytemuck::{Pod, PodCastError};
use partywall_os::map::SharedSlice;
use partywall_shm::{DType, Tensor as Entry};

use super::Segment;
use crate::{
    error::{Denied, Error, InvalidArgument, Mismatch, Result},
    gpu::DeviceRange,
};

/// A Rust type that stands for elements of a [`DType`]: the integers, `f32` and `f64`. With the feature `half` also the
/// `f16` and `bf16` of the crate half.
pub trait Element: Pod {
    /// The type of element that it stands for.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64,
}

#[cfg(feature = "half")]
elements! {
    half::f16 => F16, half::bf16 => BF16,
}

/// Bytes as the elements that they are. Where there are none, they lie nowhere, and need no alignment.
pub(crate) fn elements<T: Element>(bytes: &[u8]) -> Result<&[T], PodCastError> {
    if bytes.is_empty() { Ok(&[]) } else { bytemuck::try_cast_slice(bytes) }
}

/// The same, to be written.
pub(crate) fn elements_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T], PodCastError> {
    if bytes.is_empty() { Ok(&mut []) } else { bytemuck::try_cast_slice_mut(bytes) }
}

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

    /// Its name.
    pub fn name(&self) -> &'a str {
        self.entry.name()
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.entry.dtype()
    }

    /// Elements along each dimension.
    pub fn shape(&self) -> Vec<u64> {
        self.entry.shape().collect()
    }

    /// Elements from one index to the next along each dimension.
    pub fn strides(&self) -> Vec<u64> {
        self.entry.strides().collect()
    }

    /// How many elements.
    pub fn elements(&self) -> u64 {
        self.entry.elements()
    }

    /// Bytes from its first element to the end of its last.
    pub fn bytes(&self) -> u64 {
        self.entry.bytes()
    }

    /// Whether its elements follow each other without gaps, last dimension fastest.
    pub fn is_contiguous(&self) -> bool {
        self.entry.is_contiguous()
    }

    /// Its elements in frozen host memory, in the order of memory.
    ///
    /// # Errors
    /// [`Mismatch::DType`]; [`Mismatch::Kind`] for memory that is mutable or on a GPU.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        self.check::<T>()?;
        let bytes = self.as_bytes()?;
        elements(bytes).map_err(|e| self.range(format!("cannot use its bytes as elements: {e}")))
    }

    /// Its bytes in frozen host memory.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for memory that is mutable or on a GPU.
    pub fn as_bytes(&self) -> Result<&'a [u8]> {
        if self.entry.bytes() == 0 {
            return Ok(&[]);
        }
        let bytes = self.segment.memory().bytes(self.entry.chunk(), self.entry.offset(), self.entry.bytes());
        bytes.map_err(|e| self.segment.named(e))
    }

    /// Its elements in mutable host memory, which any process may change at any time.
    ///
    /// # Errors
    /// [`Mismatch::DType`]; [`Mismatch::Kind`] for memory that is frozen or on a GPU; [`InvalidArgument::Range`] for a
    /// tensor without bytes.
    pub fn shared<T: Element>(&self) -> Result<SharedSlice<'a, T>> {
        self.check::<T>()?;
        if self.entry.bytes() == 0 {
            return Err(self.range("it has no bytes to share".into()));
        }
        let map = self.segment.memory().shared(self.entry.chunk()).map_err(|e| self.segment.named(e))?;
        let count = self.entry.bytes() as usize / size_of::<T>();
        map.slice(self.entry.offset() as usize, count)
            .ok_or_else(|| self.range("it lies outside its chunk or is not aligned".into()))
    }

    /// Its first address in host memory, for code in other languages. Valid while the segment lives; written only where
    /// [`Segment::is_writable`] says so, else the process ends; null for a tensor without bytes.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for memory on a GPU.
    pub fn as_ptr(&self) -> Result<*mut u8> {
        if self.entry.bytes() == 0 {
            return Ok(std::ptr::null_mut());
        }
        if !self.segment.facts.mutable {
            return self.as_bytes().map(|bytes| bytes.as_ptr().cast_mut());
        }
        let map = self.segment.memory().shared(self.entry.chunk()).map_err(|e| self.segment.named(e))?;
        // Inside: tables are checked when they are opened.
        Ok(map.as_ptr().wrapping_add(self.entry.offset() as usize))
    }

    /// Where it is on its GPU: for kernels of the caller's, on streams of the caller's.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for host memory; [`InvalidArgument::Range`] for a tensor without bytes.
    pub fn device(&self) -> Result<DeviceRange<'a>> {
        if self.entry.bytes() == 0 {
            return Err(self.range("it has no bytes, so it is nowhere".into()));
        }
        let range = self.segment.memory().device(self.entry.chunk(), self.entry.offset(), self.entry.bytes());
        range.map_err(|e| self.segment.named(e))
    }

    /// Its elements on its GPU, in the order of memory, as cudarc takes them; `stream` is any of cudarc's of that GPU.
    ///
    /// # Errors
    /// As for [`Tensor::device`] and [`DeviceRange::to_cudarc`]; [`Mismatch::DType`].
    ///
    /// # Panics
    /// As for [`DeviceRange::to_cudarc`].
    #[cfg(feature = "cudarc")]
    pub fn to_cudarc<T: Element + cudarc::driver::DeviceRepr>(
        &self,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    ) -> Result<partywall_cuda::CudarcSlice<'a, T>> {
        self.check::<T>()?;
        self.device()?.to_cudarc(stream)
    }

    /// Copies its bytes from `offset` on into `out`, wherever they are. Host-synchronous: returns when they are there.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`], [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let start = self.inside(offset, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        self.segment.memory().read(self.entry.chunk(), start, out).map_err(|e| self.segment.named(e))
    }

    /// A copy of all its bytes. Host-synchronous.
    ///
    /// # Errors
    /// As [`Tensor::read_at`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.entry.bytes() as usize];
        self.read_at(0, &mut out)?;
        Ok(out)
    }

    /// Copies `bytes` into it from `offset` on. Host-synchronous. Nothing orders this with what other processes do.
    ///
    /// # Errors
    /// [`Denied::ReadOnly`] unless the segment was opened for writing; [`InvalidArgument::Range`], [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let facts = &self.segment.facts;
        if !facts.writable {
            return Err(Denied::ReadOnly { name: facts.name.clone(), version: facts.version }.into());
        }
        let start = self.inside(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.segment.memory().write(self.entry.chunk(), start, bytes).map_err(|e| self.segment.named(e))
    }

    /// Where `len` bytes from `offset` on begin in the chunk.
    fn inside(&self, offset: u64, len: usize) -> Result<u64> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.entry.bytes() => Ok(self.entry.offset() + offset),
            _ => Err(self.range(format!("bytes {offset} + {len} are not among its {}", self.entry.bytes()))),
        }
    }

    /// Returns the segment.
    pub(crate) fn segment(&self) -> &'a Segment {
        self.segment
    }

    /// Returns where it begins in the segment's memory, and how many bytes it has.
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
