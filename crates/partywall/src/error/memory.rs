//! Which limit of memory this process has reached.

use std::{fmt, fs};

use rustix::process::{Resource, getrlimit};

use super::bytes;

/// Why the kernel has no memory for a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// The process's address space is limited to this many bytes (`RLIMIT_AS`).
    AddressSpace(u64),
    /// The files of the process, which host memory consists of, are limited to this many bytes (`RLIMIT_FSIZE`).
    FileSize(u64),
    /// The memory of the process's container is limited to this many bytes, and nearly all are in use.
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
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let [current, limit] = files_of(&groups)
            .map(|files| files.map(|file| fs::read_to_string(file).ok()?.trim().parse().ok()))
            .unwrap_or_default();
        Self::of_container(current, limit)
    }

    fn of_container(current: Option<u64>, limit: Option<u64>) -> Self {
        match (current, limit) {
            (Some(current), Some(limit)) if current >= limit / 10 * 9 => Self::Container(limit),
            _ => Self::Unknown,
        }
    }
}

/// Returns the files with the memory usage and limit of a process's control group, given its `/proc/self/cgroup`.
fn files_of(groups: &str) -> Option<[String; 2]> {
    // Version 1 has a line for memory. Without that line, the group of version 2 applies.
    let v1 = groups.lines().find_map(|line| line.split_once(":memory:"));
    let v2 = || groups.lines().find_map(|line| line.strip_prefix("0::"));
    match v1 {
        Some((_, path)) => {
            let file = |name| format!("/sys/fs/cgroup/memory{}/memory.{name}_in_bytes", path.trim_end_matches('/'));
            Some(["usage", "limit"].map(file))
        }
        None => {
            let path = v2()?.trim_end_matches('/');
            Some(["current", "max"].map(|name| format!("/sys/fs/cgroup{path}/memory.{name}")))
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressSpace(limit) => {
                write!(f, "the address space of this process is limited to {}", bytes(*limit))
            }
            Self::FileSize(limit) => {
                write!(f, "the size of this process's files, and so of host memory, is limited to {}", bytes(*limit))
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

    #[test]
    fn both_versions_of_control_groups_are_read() {
        let v1 = files_of("3:cpuset:/\n4:memory:/pod/a\n0::/\n").unwrap();
        assert_eq!(v1[1], "/sys/fs/cgroup/memory/pod/a/memory.limit_in_bytes");
        assert_eq!(files_of("0::/\n").unwrap()[0], "/sys/fs/cgroup/memory.current");
        assert_eq!(files_of(""), None);
    }
}
