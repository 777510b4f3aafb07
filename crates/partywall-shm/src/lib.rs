//! Structures in memory that processes share, and their audit. Knows no GPU, no sockets, no names of segments.
//!
//! | module | contains |
//! |---|---|
//! | [`dtype`] | element types and their names |
//! | [`table`] | the tensor table of a version: name → dtype, shape, strides, place |
//!
//! Whatever is read here was written by another process and is believed only as far as it has been checked: reading
//! never panics, allocates in proportion to what is there, and ends.
#![forbid(unsafe_code)]

pub mod dtype;
pub mod table;

pub use dtype::DType;
pub use table::{Layout, Table, TableBuilder, TableError, Tensor};
