//! Limits that both sides of a connection enforce.

/// The version of the protocol. Two processes with different numbers refuse each other in the handshake.
pub const PROTOCOL: u32 = 20;

/// The farthest deadline of a withdrawal, in milliseconds: a year.
pub const MAX_DEADLINE: u64 = 365 * 24 * 3_600_000;

/// File descriptors in one message: the limit of Linux for one `SCM_RIGHTS` (`SCM_MAX_FD`, unix(7)).
pub const MAX_FDS: usize = 253;

/// File descriptors that a broker sends at once. The rest of a message's descriptors follow when these have been read.
/// The kernel counts descriptors in flight per user, and refuses all of the user's processes once there are too many
/// (unix(7), `ETOOMANYREFS`).
pub const FDS_AT_ONCE: usize = 16;

/// Chunks of one version. Below [`MAX_FDS`], so that a version with its table always fits one message.
pub const MAX_CHUNKS: usize = 128;

/// Growths of one version. A member that opened it early keeps a table for each growth, so each should be large.
pub const MAX_GROWTHS: u64 = 1024;

/// Permits of one semaphore.
pub const MAX_PERMITS: u32 = 65_536;

/// Blocks of one pool or topic.
pub const MAX_BLOCKS: u32 = 65_536;

/// Slabs of one user's own timelines, each with 1,023 cells. A shared timeline has a slab of its own besides.
pub const MAX_SLABS: u32 = 128;

/// Bytes of one message's body, unless the broker was started with another limit.
pub const MAX_MESSAGE: usize = 256 * 1024;

/// The smallest message limit of a broker. A commit with an inline table and all chunks fits.
pub const MIN_MESSAGE: usize = 64 * 1024;

/// Bytes of a name.
pub const MAX_NAME: usize = 255;

/// The largest table that travels inside the message and costs the broker no file descriptor. A larger one is a sealed
/// memfd. File descriptors are the scarcest resource: with one for each table and a hard limit of 20,000 open files,
/// 10,000 small segments would not fit.
pub const MAX_INLINE_TABLE: usize = 16 * 1024;

/// Bytes of a table in a memfd: 70,000 tensors with long names take about 20 MiB.
pub const MAX_TABLE: u64 = 1 << 30;

/// Bytes of the command line that a member reports for `show` and `ps`.
pub const MAX_COMMAND: usize = 256;
