//! Thin wrappers over rustix for the Linux system calls that Partywall uses. Each function does one thing and reports
//! errno.
//!
//! | module | contains |
//! |---|---|
//! | [`memfd`] | anonymous files with seals: creation, sealing, checking |
//! | [`map`] | mappings of memfds: private while building, sealed for readers, shared for `mutable` memory |
//! | [`borrow`] | blocks of mappings as plain bytes: one writer or many readers |
//! | [`clock`] | a clock that processes in all time namespaces share |
//! | [`cpu`] | hints to the processor |
//! | [`futex`] | sleeping on a word of shared memory, and waking its sleepers |
//! | [`lock`] | locks whose data stays valid when a thread panics |
//! | [`spare`] | a place for a value that may keep the place alive |
//! | [`socket`] | Unix stream sockets that carry file descriptors and identify their peer |
//! | [`process`] | pidfds, daemons, resource limits |
//! | [`supervision`] | processes that share their file descriptors, and signals to wait for |
//! | [`numa`] | the machine's NUMA nodes |
//! | [`thread`] | threads that no signal of the program reaches |
//! | [`timer_slack`] | short sleeps that end in time |
//! | [`per_process`] | global state that a forked child begins anew |
//! | [`fd`] | what a received file descriptor really is |
//! | [`dir`] | directories that only this user can enter, and locks on them |
//! | [`environment`] | variables that name places, and processes that must not trust them |
//!
//! The oldest supported kernel is Linux 5.10 on x86-64. A function that uses something newer says so and works without
//! it. Every file descriptor is close-on-exec, and every interrupted call is repeated.

pub mod borrow;
pub mod clock;
pub mod cpu;
pub mod dir;
pub mod environment;
pub mod fd;
pub mod futex;
pub mod lock;
pub mod map;
pub mod memfd;
pub mod numa;
pub mod per_process;
pub mod process;
pub mod socket;
pub mod spare;
pub mod supervision;
pub mod thread;
pub mod timer_slack;

pub use rustix::io::Errno;
