//! Partywall for C and C++: the exported functions of `libpartywall.so`, and the source of `partywall/partywall.h`.
//!
//! Everything here translates: texts, arrays, options and handles from C, results and errors to C. What a function
//! does is the business of the crate `partywall`.
//!
//! - C holds objects by handles (`handle`), which are checked at each call.
//! - Each exported function runs in `error::call`, which keeps the failure for `pw_last_error` and lets no panic out.
//! - Structs that C passes begin with their size, so that they may grow (`argument::options`,
//!   `argument::store_info`).
//! - No exported item comes out of a macro: cbindgen could not see it.
#![allow(unsafe_code)] // C's pointers
#![allow(non_camel_case_types)] // C's types
#![allow(clippy::result_large_err)] // a call that fails gives the object back to the table it came from

pub mod argument;
pub mod block;
pub mod build;
pub mod claim;
pub mod descriptors;
pub mod dlpack;
pub mod doctor;
pub mod domain;
pub mod dtype;
pub mod error;
pub mod growth;
mod handle;
pub mod members;
pub mod names;
pub mod pool;
pub mod publication;
pub mod publisher;
pub mod queue;
pub mod segment;
pub mod semaphore;
pub mod subscriber;
pub mod timeline;
pub mod topic;
pub mod watch;
