//! Order between processes: timelines and semaphores, against the driver, futexes and cache lines alone.
//!
//! What runs on a GPU runs in processes of its own, and so does whatever may have to be killed.

pub(crate) mod deaths;
mod messages;
pub(crate) mod pair;
pub(crate) mod semaphore;
pub(crate) mod streams;
mod tasks;
pub(crate) mod wakes;
