//! The Linux system calls that Partywall stands on, thin over rustix: each function does one thing and reports errno.
//!
//! | module | contains |
//! |---|---|
//! | [`memfd`] | anonymous files with seals: creation, sealing, checking |
//! | [`map`] | mappings of them: private while building, sealed for readers, shared for `mutable` memory |
//! | [`lent`] | parts of mappings that belong to one holder at a time |
//! | [`cpu`] | hints to the processor |
//! | [`futex`] | sleeping on a word of shared memory, and waking who sleeps there |
//! | [`socket`] | Unix stream sockets that carry file descriptors and tell who is at the other end |
//! | [`process`] | pidfds, daemons, resource limits |
//! | [`punctual`] | short sleeps that end when they should |
//! | [`per_process`] | global state that a forked child begins anew |
//! | [`fd`] | what a received file descriptor really is |
//! | [`dir`] | directories that only we can enter, and locks on them |
//!
//! Linux 5.10 on x86-64 is the least that is supported; where a newer kernel offers more, the function says so and
//! works without. Every file descriptor is close-on-exec, every interrupted call is repeated.

pub mod cpu;
pub mod dir;
pub mod fd;
pub mod futex;
pub mod lent;
pub mod map;
pub mod memfd;
pub mod per_process;
pub mod process;
pub mod punctual;
pub mod socket;

pub use rustix::io::Errno;
