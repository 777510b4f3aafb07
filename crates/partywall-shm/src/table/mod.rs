//! The tensor table of a version: name → dtype, shape, strides, offset. Written once by the builder, then immutable.
//!
//! ```text
//!   0  magic         "PWTABLE\0"
//!   8  layout hash   a table of any other layout is refused, never guessed
//!  16  tensors: u32, chunks: u32
//!  24  dims: u64     words of the dimension section
//!  32  texts: u64    bytes of the text section
//!  40  pairs: u64    pairs of metadata
//!  48  bytes: u64    length of the whole table, then 8 zero bytes
//!  64  entries       tensors × 56 bytes, in ascending order of the names' bytes
//!      chunk lengths chunks × u64: bytes that the tensors use of each chunk
//!      dimensions    for each tensor its shape, then its strides in elements, each rank × u64
//!      pairs         key offset, key length, value offset, value length: u32 each, into the texts
//!      texts         UTF-8
//! ```
//!
//! An entry: name offset `u32`, name length `u32` (into the texts); dtype `u8`, rank `u8`, two zero bytes, chunk `u32`;
//! index of its first dimension `u64`; offset in the chunk `u64`; bytes `u64`; position in the order given by the
//! builder `u32`, four zero bytes; eight zero bytes. All numbers are little-endian.
//!
//! [`Table::parse`] checks the whole table once, in time proportional to its length. Every later access is in bounds.

mod builder;
mod view;

use crate::{
    DType,
    layout::{Described, Hash},
};

pub use builder::{Layout, TableBuilder};
pub use view::{Table, Tensor};

/// The alignment of a tensor in its chunk, in bytes. GPU libraries expect it of allocations, and vector loads need it.
pub const ALIGNMENT: u64 = 256;

/// The maximum length of a tensor's name, in bytes.
pub const MAX_TENSOR_NAME: usize = 1024;

/// The maximum number of dimensions of a tensor, as in torch and NumPy.
pub const MAX_RANK: usize = 64;

/// The maximum number of tensors in one table.
pub const MAX_TENSORS: usize = 1 << 22;

/// The maximum length of all keys and values of the metadata together, in bytes.
pub const MAX_METADATA: usize = 1 << 20;

const MAGIC: [u8; 8] = *b"PWTABLE\0";

/// What a table begins with. As the structs below it is never in memory: it says where the numbers are.
#[repr(C)]
struct TableHeader {
    magic: [u8; 8],
    layout: u64,
    tensors: u32,
    chunks: u32,
    dims: u64,
    texts: u64,
    pairs: u64,
    bytes: u64,
    zero: u64,
}

/// A tensor.
#[repr(C)]
struct TensorEntry {
    name: Text,
    dtype: u8,
    rank: u8,
    zero_10: [u8; 2],
    chunk: u32,
    dim: u64,
    offset: u64,
    bytes: u64,
    position: u32,
    zero_44: u32,
    zero_48: u64,
}

/// A pair of metadata.
#[repr(C)]
struct Pair {
    key: Text,
    value: Text,
}

/// A range of the texts.
#[repr(C)]
struct Text {
    offset: u32,
    bytes: u32,
}

described!(TableHeader { magic, layout, tensors, chunks, dims, texts, pairs, bytes, zero });
described! {
    TensorEntry { name, dtype, rank, zero_10, chunk, dim, offset, bytes, position, zero_44, zero_48 }
    bits { ALIGNMENT, DTYPES }
}
described!(Pair { key, value });
described!(Text { offset, bytes });

/// A hash of the names of all element types and their numbers.
const DTYPES: u64 = {
    let mut hash = Hash::new();
    let mut i = 0;
    while i < DType::ALL.len() {
        hash = hash.text(DType::ALL[i].name()).number(DType::ALL[i].code() as u64);
        i += 1;
    }
    hash.end()
};

/// The hash of the layout.
const LAYOUT: u64 = Hash::new().number(TableHeader::LAYOUT).number(TensorEntry::LAYOUT).number(Pair::LAYOUT).end();

/// Why a table cannot be built or is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The tensor's name is not usable.
    #[error("tensor name {name:?}: {why}")]
    BadName {
        /// The name, shortened.
        name: String,
        /// The rule.
        why: String,
    },
    /// Two tensors have one name.
    #[error("two tensors are named {0:?}")]
    Duplicate(String),
    /// Shape, strides or dtype do not describe memory.
    #[error("tensor {name:?}: {why}")]
    BadShape {
        /// The tensor.
        name: String,
        /// The reason.
        why: String,
    },
    /// A limit is exceeded.
    #[error("{what}: {found} exceed the limit of {limit}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The number that was found.
        found: u64,
        /// The largest number that is allowed.
        limit: u64,
    },
    /// The table was made by a build of Partywall with another layout.
    #[error("the tensor table has another layout ({found:016x}, not {expected:016x})")]
    ForeignLayout {
        /// The layout hash in the table.
        found: u64,
        /// The layout hash of this build.
        expected: u64,
    },
    /// The bytes are not a valid table.
    #[error("the tensor table is damaged: {0}")]
    Damaged(&'static str),
}
