//! Structures in memory that processes share, and their audit. Knows no GPU, no sockets, no names of segments.
//!
//! | module | contains |
//! |---|---|
//! | [`dtype`] | element types and their names |
//! | [`members`] | a row for each member: its heartbeat |
//! | [`table`] | the tensor table of a version: name → dtype, shape, strides, place |
//! | [`timeline`] | the words that say how far a writer is: a value that only grows, sleeping until it does, its end |
//!
//! Words that several processes change are atomics, which come from `sync` alone: there they are those of a model
//! checker when it is built with `--cfg loom`. A process may be killed, or stopped for ever, between any two
//! instructions; each module says what the others see then.
//!
//! Whatever is read here was written by another process and is believed only as far as it has been checked: reading
//! never panics, allocates in proportion to what is there, and ends.

pub mod dtype;
pub mod members;
mod sync;
pub mod table;
pub mod timeline;

pub use dtype::DType;
pub use table::{Layout, Table, TableBuilder, TableError, Tensor};
