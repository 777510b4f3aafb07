//! Checked ranges of device memory, and the errors of requests that do not fit one.
#![allow(unsafe_code)] // trusts the caller's addresses

use std::marker::PhantomData;

use crate::{Access, CudaError};

/// A range of device memory that was checked against its owner: `len` bytes from `device_ptr`.
///
/// A pair of numbers with a lifetime: `Copy`, `Send` and `Sync`. It gives the host no access to the bytes, and it is
/// not exclusive: other processes and other slices may read and write the same memory at any time. Streams, events and
/// timelines create order; borrows do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice<'a> {
    device_ptr: u64,
    len: u64,
    access: Access,
    owner: PhantomData<&'a ()>,
}

/// A request on device memory that was refused or failed. Every variant except [`AccessError::Driver`] is a mistake of
/// the caller that is found before anything is enqueued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The range is not inside the memory.
    #[error("bytes {offset} to {offset} + {len} are not inside {available} bytes of device memory")]
    OutOfRange {
        /// First byte of the request.
        offset: u64,
        /// Length of the request.
        len: u64,
        /// Size of the memory in bytes.
        available: u64,
    },
    /// The two sides of a copy have different lengths.
    #[error("the source of a copy has {source_len} bytes and its destination {destination_len}")]
    LengthMismatch {
        /// Bytes of the source.
        source_len: u64,
        /// Bytes of the destination.
        destination_len: u64,
    },
    /// The operation works on elements, and the range does not begin and end at element boundaries.
    #[error("{len} bytes at {device_ptr:#x} are not a range of {element}-byte elements")]
    Misaligned {
        /// First address.
        device_ptr: u64,
        /// Length in bytes.
        len: u64,
        /// Bytes of one element.
        element: u64,
    },
    /// A write to memory that is mapped read-only in this process. On the GPU such a write would end the context.
    #[error("the device memory is mapped read-only in this process")]
    ReadOnly,
    /// Memory of a NUMA node that the device has not been given access to.
    #[error("device {device} has no access to this memory of a NUMA node yet")]
    NoAccess {
        /// The ordinal of the device.
        device: u32,
    },
    /// A stream that is being captured into a graph, in an operation that waits for the stream or whose host address
    /// would stay in the graph.
    #[error("the stream is being captured into a CUDA graph, which this call cannot be part of")]
    Capturing,
    /// A stream that is not being captured into a graph, or whose capture was invalidated, in an operation for graphs.
    #[error("the stream is not being captured into a CUDA graph")]
    NotCapturing,
    /// A node that was captured into another graph.
    #[error("the node was captured into another CUDA graph")]
    OtherGraph,
    /// A stream of a CUDA context other than the memory's.
    #[error("the stream is of another CUDA context than the memory, which is of its device's primary one")]
    OtherContext,
    /// The driver refused the call, or an earlier operation failed.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

impl<'a> DeviceSlice<'a> {
    /// Returns a range that the caller vouches for, such as memory of another CUDA library.
    ///
    /// # Safety
    /// For the lifetime `'a` the `len` bytes at `device_ptr` are device memory that stays allocated and mapped with
    /// at least this access on the devices whose streams it is used with.
    #[must_use]
    pub const unsafe fn from_raw(device_ptr: u64, len: u64, access: Access) -> Self {
        Self { device_ptr, len, access, owner: PhantomData }
    }

    /// Returns a part of the range.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self, AccessError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Self { device_ptr: self.device_ptr + offset, len, ..*self }),
            _ => Err(AccessError::OutOfRange { offset, len, available: self.len }),
        }
    }

    /// Returns the same range, which this library's calls only read.
    #[must_use]
    pub const fn read_only(self) -> Self {
        Self { access: Access::ReadOnly, ..self }
    }

    /// Returns its first address on the device.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.device_ptr
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the access that the GPU has.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the number of elements of `element` bytes, as a kernel needs them: whole, and at an aligned address.
    ///
    /// # Errors
    /// [`AccessError::Misaligned`].
    pub fn elements(&self, element: u64) -> Result<u64, AccessError> {
        if self.device_ptr.is_multiple_of(element) && self.len.is_multiple_of(element) {
            Ok(self.len / element)
        } else {
            Err(AccessError::Misaligned { device_ptr: self.device_ptr, len: self.len, element })
        }
    }

    /// Checks that a kernel may write the range.
    ///
    /// # Errors
    /// [`AccessError::ReadOnly`].
    pub fn require_writable(&self) -> Result<(), AccessError> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => Err(AccessError::ReadOnly),
        }
    }

    /// Returns the length as the driver takes it. Device addresses have 64 bits, and so has `usize` on every platform
    /// of the driver.
    pub(crate) fn size(&self) -> usize {
        self.len as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slice(device_ptr: u64, len: u64) -> DeviceSlice<'static> {
        // SAFETY: the address is used only in calculations.
        unsafe { DeviceSlice::from_raw(device_ptr, len, Access::ReadOnly) }
    }

    #[test]
    fn elements_must_be_whole_and_aligned() {
        assert_eq!(slice(4096, 64).elements(16), Ok(4));
        assert_eq!(slice(4096, 0).elements(16), Ok(0));
        assert!(slice(4100, 64).elements(16).is_err());
        assert!(slice(4096, 60).elements(16).is_err());
        assert_eq!(slice(0, 4).require_writable(), Err(AccessError::ReadOnly));
    }

    #[test]
    fn refusal_names_the_requested_range() {
        assert_eq!(
            slice(4096, 8).slice(4, 8).unwrap_err().to_string(),
            "bytes 4 to 4 + 8 are not inside 8 bytes of device memory"
        );
    }

    proptest! {
        #[test]
        fn part_out_of_bounds_is_refused(len in 0..1_u64 << 50, offset: u64, part: u64) {
            let whole = slice(1 << 40, len);
            match whole.slice(offset, part) {
                Ok(inner) => {
                    prop_assert!(inner.device_ptr() >= whole.device_ptr());
                    prop_assert!(inner.device_ptr() + inner.len() <= whole.device_ptr() + whole.len());
                    prop_assert_eq!(inner.len(), part);
                }
                Err(AccessError::OutOfRange { .. }) => {
                    prop_assert!(u128::from(offset) + u128::from(part) > u128::from(len));
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}
