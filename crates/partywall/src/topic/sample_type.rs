//! The type and shape that all samples of a topic have in common.

use std::fmt;

use partywall_shm::{DType, topic::MAX_RANK};
use partywall_wire::{SampleShape, TopicShape};

/// The element type and the shape of all samples of a topic. Either may be unrestricted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SampleType {
    /// The type of the elements; `None` allows any type.
    pub dtype: Option<DType>,
    /// The shape; `None` allows any shape.
    pub shape: Option<SampleShape>,
}

impl SampleType {
    /// Returns the type of the samples of a topic in a listing.
    pub fn of(topic: &TopicShape) -> Self {
        Self { dtype: topic.dtype.and_then(DType::from_code), shape: topic.shape }
    }

    /// Returns whether a sample may have this type and shape.
    pub fn accepts(&self, dtype: DType, shape: &[u64]) -> bool {
        self.dtype.is_none_or(|has| has == dtype) && self.shape.as_ref().is_none_or(|has| has.accepts(shape))
    }

    /// Bytes of each sample, if type and shape leave no choice; `None` inside if that is no number of bytes.
    pub(super) fn bytes(&self) -> Option<Option<u64>> {
        let dtype = self.dtype?;
        let shape = self.shape?;
        let extents: Vec<u64> = shape.extents().iter().copied().collect::<Option<_>>()?;
        let elements = extents.iter().try_fold(1_u64, |all, extent| all.checked_mul(*extent));
        Some(elements.and_then(|elements| dtype.bytes_for(elements)))
    }
}

impl fmt::Display for SampleType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.dtype, self.shape) {
            (Some(dtype), Some(shape)) => write!(f, "{dtype} {shape}"),
            (Some(dtype), None) => write!(f, "{dtype} of any shape"),
            (None, Some(shape)) => write!(f, "any dtype {shape}"),
            (None, None) => f.write_str("any dtype and shape"),
        }
    }
}

const _: () = assert!(MAX_RANK == partywall_wire::MAX_RANK);
