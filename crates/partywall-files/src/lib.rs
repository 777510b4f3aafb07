//! Model files: their tensors, and copying these into memory and back into files.
//!
//! This crate knows no broker, no segment and no GPU: [`Plan::copy_to`] writes through a [`Sink`], [`write_to`] and
//! [`write_to_path`] read from a [`Content`]. The crate `partywall` contains it as `partywall::files`.
//!
//! | file | read as | written from |
//! |---|---|---|
//! | `.safetensors` | its tensors and its metadata | all tensors or one, and the metadata |
//! | a folder, or `*.safetensors.index.json` | the tensors of all shards as one set; hidden files are left out | – |
//! | `.npy` | one tensor, [`SINGLE_TENSOR`], in C or Fortran order | one tensor |
//! | anything else, or a stream | its bytes: one tensor, [`SINGLE_TENSOR`], of `uint8` | the bytes of one tensor, as they lie in memory |
//!
//! The files are those of the file system ([`Plan::from_path`]) or of another [`Storage`] ([`Plan::from_storage`]): the
//! formats, the copy and its checks are the same.
//!
//! A pointer of Git LFS in place of a file is an error in each format.
//!
//! Files are read by positioned reads, never mapped: a file that is truncated while it is mapped kills the reader with
//! `SIGBUS`. Apart from the headers, reading and writing use a constant amount of memory: one buffer for each thread.
//!
//! ```
//! use std::sync::atomic::AtomicBool;
//! use partywall_files::{Lane, Piece, Plan, Sink, SinkError};
//!
//! /// Counts the bytes that it is given.
//! struct Count;
//! struct CountLane(Vec<u8>);
//!
//! impl Sink for Count {
//!     type Lane<'a> = CountLane;
//!     fn lane(&self) -> Result<CountLane, SinkError> {
//!         Ok(CountLane(vec![0; partywall_files::BUFFER_BYTES]))
//!     }
//! }
//!
//! impl Lane for CountLane {
//!     fn buffer(&mut self) -> Result<&mut [u8], SinkError> {
//!         Ok(&mut self.0)
//!     }
//!     fn submit(&mut self, pieces: &[Piece]) -> Result<(), SinkError> {
//!         for piece in pieces {
//!             let bytes = &self.0[piece.start..piece.start + piece.len];
//!             assert!(bytes.iter().all(|b| *b == 7), "belongs at {} of tensor {}", piece.offset, piece.tensor);
//!         }
//!         Ok(())
//!     }
//!     fn finish(self) -> Result<(), SinkError> {
//!         Ok(())
//!     }
//! }
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("weights.bin");
//! std::fs::write(&path, [7; 1000])?;
//!
//! let plan = Plan::from_path(&path)?;
//! assert_eq!(plan.tensors()[0].shape, [1000]);
//! plan.copy_to(&Count, 2, &|_bytes| (), &AtomicBool::new(false))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod copy;
mod draft;
mod error;
mod format;
mod json;
mod local;
mod message;
mod npy;
mod plan;
mod safetensors;
mod shards;
mod storage;
mod tensor;
mod write;

pub use copy::{Lane, Piece, Sink, default_threads};
pub use draft::{Draft, is_in_place, write_file};
pub use error::{FileError, FileProblem, SinkError};
pub use format::Format;
pub use message::{Message, safetensors_header, safetensors_message};
pub use plan::Plan;
pub use storage::{BUFFER_BYTES, FileReader, Storage, StoredFile};
pub use tensor::{SINGLE_TENSOR, TensorInfo};
pub use write::{Content, write_to, write_to_path};
