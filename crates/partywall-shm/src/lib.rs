//! The structures in shared memory, and their audit. This crate is independent of GPUs, sockets and segment names.
//!
//! | module | contains |
//! |---|---|
//! | [`dtype`] | element types and their names |
//! | [`members`] | a row for each member: its heartbeat |
//! | [`pool`] | blocks of memory: which members hold them, and wait for one |
//! | [`queue`] | tasks: which are pending, which member has one, and the result of each |
//! | [`semaphore`] | permits: which members hold them, and wait for one |
//! | [`slots`] | what a block and a permit have in common: taking, waiting, handing over and freeing |
//! | [`table`] | the tensor table of a version: name → dtype, shape, strides, offset |
//! | [`timeline`] | a value that only grows: signalling it, sleeping until it does, its end |
//! | [`trace`] | what members publish, receive, signal and wait for, while an observer asks |
//! | [`topic`] | the blocks of a topic: which are in its ring, what they contain, which members read them |
//!
//! Shared words are atomics from `sync`, which are those of a model checker with `--cfg loom`. A process may be killed,
//! or stopped for good, between any two instructions. Each module documents what other processes see then.
//!
//! Other processes write all of this memory, so it is trusted only as far as it has been checked. Reading never panics,
//! always terminates, and allocates in proportion to the size of the memory.
//!
//! # Control memory
//!
//! The memory is in memfds that the broker creates. A *slab* has [1,023 cells](timeline::CELLS) for timelines. A
//! semaphore has a file of its own, and so has each part of a pool, topic or queue. One file for each user has the rows
//! of that user's members and the rings of their traces. The broker maps all of it, too, because it ends the waits for
//! a dead process and takes back that process's permits and blocks. Its registry knows which member has which object
//! open. It does not know what the words say, and never asks.
//!
//! A process sleeps on a counter beside a value, not on the low half of the value itself: a value that grows by 2³²
//! would leave that half unchanged, and its sleepers asleep. Every sleep ends after [`MAX_SLEEP`], and the sleeper
//! checks again. A process that is stopped between a change and its notification therefore delays others by no more
//! than that.

#[cfg(not(loom))]
#[macro_use]
mod layout;
/// Models have no mapped memory.
#[cfg(loom)]
macro_rules! shared {
    ($($description:tt)*) => {};
}

#[cfg(not(loom))]
mod control;
pub mod crash;
pub mod dtype;
mod eventcount;
pub mod members;
pub mod pool;
pub mod queue;
pub mod semaphore;
pub mod slots;
mod sync;
#[cfg(not(loom))]
pub mod table;
mod task;
pub mod timeline;
pub mod topic;
#[cfg_attr(loom, allow(dead_code, reason = "a model does what processes do at the same time, and no more"))]
pub mod trace;

pub use dtype::DType;
pub use eventcount::EventKey;
#[cfg(not(loom))]
pub use table::{Layout, Table, TableBuilder, TableError, Tensor};

/// The longest sleep of a waiter before it checks its condition again. The process that had to wake it may have been
/// killed or stopped between the change and the wake.
pub const MAX_SLEEP: std::time::Duration = std::time::Duration::from_millis(100);

/// A hash of the layouts of all control memory. Builds with the same number map each other's control memory.
#[cfg(not(loom))]
pub const LAYOUTS: u64 = {
    let layouts = [
        control::layout_of::<members::Members>(),
        control::layout_of::<semaphore::Semaphore>(),
        control::layout_of::<pool::Pool>(),
        control::layout_of::<timeline::Slab>(),
        control::layout_of::<topic::Topic>(),
        control::layout_of::<queue::Queue>(),
    ];
    let mut hash = layout::Hash::new();
    let mut i = 0;
    while i < layouts.len() {
        hash = hash.number(layouts[i]);
        i += 1;
    }
    hash.end()
};
