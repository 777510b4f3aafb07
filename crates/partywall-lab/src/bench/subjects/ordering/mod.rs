//! Order between processes: timelines and semaphores, against the driver, futexes and cache lines alone.
//!
//! Work on a GPU, and anything that may have to be killed, runs in separate processes.

pub(crate) mod deaths;
mod messages;
pub(crate) mod pair;
pub(crate) mod semaphore;
pub(crate) mod streams;
mod tasks;
pub(crate) mod wakes;
