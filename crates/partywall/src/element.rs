//! The Rust types of elements.

use bytemuck::{Pod, PodCastError};
use partywall_shm::DType;

/// A Rust type for the elements of a [`DType`]: the integers, `f32` and `f64`; with the feature `half` also `f16` and
/// `bf16` of the crate half.
pub trait Element: Pod {
    /// The type of element that this Rust type is for.
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

/// Returns bytes as elements. An empty slice needs no alignment.
pub(crate) fn elements<T: Element>(bytes: &[u8]) -> Result<&[T], PodCastError> {
    if bytes.is_empty() { Ok(&[]) } else { bytemuck::try_cast_slice(bytes) }
}

/// Returns bytes as elements for writing. An empty slice needs no alignment.
pub(crate) fn elements_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T], PodCastError> {
    if bytes.is_empty() { Ok(&mut []) } else { bytemuck::try_cast_slice_mut(bytes) }
}
