//! Which limit of memory this process has reached.

use std::{fmt, fs};

use rustix::process::{Resource, getrlimit};

use super::bytes;

/// Why the kernel has no memory for a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// The process's addresses are limited to so many bytes (`RLIMIT_AS`).
    AddressSpace(u64),
    /// The memory of the process's container is limited to so many bytes, and nearly all are in use.
    Container(u64),
    /// Neither is known to be the reason.
    Unknown,
}

impl MemoryLimit {
    /// Returns the limit that this process has most likely just reached.
    pub(super) fn reached() -> Self {
        if let Some(limit) = getrlimit(Resource::As).current {
            return Self::AddressSpace(limit);
        }
        let number = |file: &str| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
        let (current, limit) = (number("/sys/fs/cgroup/memory.current"), number("/sys/fs/cgroup/memory.max"));
        Self::of_container(current, limit)
    }

    fn of_container(current: Option<u64>, limit: Option<u64>) -> Self {
        match (current, limit) {
            (Some(current), Some(limit)) if current >= limit / 10 * 9 => Self::Container(limit),
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressSpace(limit) => {
                write!(f, "the address space of this process is limited to {}", bytes(*limit))
            }
            Self::Container(limit) => {
                write!(f, "the memory of this container is limited to {}, and nearly all is in use", bytes(*limit))
            }
            Self::Unknown => f.write_str("the kernel has no memory or addresses left for it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_is_blamed_only_near_its_limit() {
        let of = MemoryLimit::of_container;
        assert_eq!(of(Some(95 << 20), Some(100 << 20)), MemoryLimit::Container(100 << 20));
        assert_eq!(of(Some(50 << 20), Some(100 << 20)), MemoryLimit::Unknown);
        assert_eq!(of(Some(50 << 20), None), MemoryLimit::Unknown, "`max` is no number");
    }
}
