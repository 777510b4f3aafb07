//! Probes of the environment of the process, read from files: containers, namespaces, WSL, Jetson.
//!
//! The root of the file system is an argument, for tests.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::finding::Finding;
use crate::error::bytes;

/// With less free memory in `/dev/shm`, events between processes and torch's data loaders fail.
const LITTLE: u64 = 16 << 20;

/// Probes the environment of this process.
pub(super) fn platform() -> Finding {
    Platform::read(Path::new("/")).finding()
}

/// Probes which namespaces separate this process from the rest of the machine.
pub(super) fn namespaces() -> Finding {
    separate(Path::new("/proc"))
}

/// Probes the memory behind `/dev/shm`.
pub(super) fn shared_memory() -> Finding {
    shm(Path::new("/dev/shm"))
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Platform {
    wsl: bool,
    jetson: bool,
    container: bool,
}

impl Platform {
    /// Reads the environment from the file system under `root`.
    fn read(root: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let exists = |path: &str| root.join(path).exists();
        let control_group = read("proc/1/cgroup");
        Self {
            // WSL 2 has a device of its own for the GPU; WSL 1 has none.
            wsl: exists("dev/dxg") || read("proc/sys/kernel/osrelease").to_lowercase().contains("microsoft"),
            jetson: exists("etc/nv_tegra_release") || read("proc/device-tree/compatible").contains("nvidia,tegra"),
            container: exists(".dockerenv")
                || exists("run/.containerenv")
                || ["docker", "kubepods", "containerd", "libpod"].iter().any(|word| control_group.contains(word)),
        }
    }

    fn finding(&self) -> Finding {
        let mut seen = Vec::new();
        let mut means = Vec::new();
        let mut fix = "";
        if self.wsl {
            seen.push("Windows Subsystem for Linux (WSL)");
            means.push(
                "its driver says that GPU memory can be shared and then refuses file descriptors and legacy handles; \
                 host memory works, and is what falls back",
            );
            fix = "use Linux itself for GPU memory";
        }
        if self.jetson {
            seen.push("NVIDIA Jetson (Tegra)");
            means.push(
                "it shares no legacy memory between processes, only legacy events; `GPU memory` below says whether \
                 file descriptors work; if not, host memory, which the GPU shares anyway, is what falls back",
            );
        }
        if self.container {
            seen.push("a container");
            means.push(
                "a broker started here ends with this container; share its socket's directory to reach it from others",
            );
        }
        let detail = if seen.is_empty() { "no container, WSL or Jetson".to_owned() } else { seen.join(", ") };
        let finding = if self.wsl || self.jetson { Finding::warning(detail) } else { Finding::ok(detail) };
        finding.means(means.join("\n")).fix(fix)
    }
}

/// For each namespace: its number at boot, if the kernel fixes it (`include/linux/proc_ns.h`), and its meaning for
/// processes that share memory.
const NAMESPACES: [(&str, Option<u64>, &str); 5] = [
    ("pid", Some(0xEFFF_FFFC), "pids differ outside; deaths are proved by pidfds, which cross"),
    ("ipc", Some(0xEFFF_FFFF), "Partywall needs none of it, but /dev/shm is often separate with it"),
    ("user", Some(0xEFFF_FFFD), "the broker must see the same user on both sides"),
    ("mnt", None, "both sides must see the directory of the broker's socket"),
    ("net", None, "Partywall's sockets are files and cross it"),
];

/// Compares the namespaces of this process with the first ones of the machine.
fn separate(proc: &Path) -> Finding {
    let number = |path: PathBuf| -> Option<u64> {
        let link = fs::read_link(path).ok()?;
        link.to_str()?.split_once('[')?.1.strip_suffix(']')?.parse().ok()
    };
    let mut own = Vec::new();
    let mut unknown = Vec::new();
    let mut means = Vec::new();
    for (name, first, meaning) in NAMESPACES {
        let mine = number(proc.join("self/ns").join(name));
        // Only the owner of the first process may read it. In another PID namespace the first process is a different
        // one.
        let first = first.or_else(|| number(proc.join("1/ns").join(name)));
        match (mine, first) {
            (Some(mine), Some(first)) if mine == first => {}
            (Some(_), Some(_)) => {
                own.push(name);
                means.push(format!("{name}: {meaning}"));
            }
            _ => unknown.push(name),
        }
    }
    let mut detail =
        if own.is_empty() { "the machine's own".to_owned() } else { format!("separate: {}", own.join(", ")) };
    if !unknown.is_empty() {
        detail.push_str(&format!("; not visible: {}", unknown.join(", ")));
    }
    Finding::ok(detail).means(means.join("\n"))
}

/// Examines a directory of shared memory.
fn shm(directory: &Path) -> Finding {
    let means = "events between processes (legacy IPC) and torch's data loaders need it; Partywall itself does not";
    let fix = "mount it: --ipc=host, or --shm-size=1g, or a shared volume for containers that exchange events";
    let shown = directory.display();
    let space = match rustix::fs::statvfs(directory) {
        Ok(space) => space,
        Err(errno) => return Finding::warning(format!("{shown}: {errno}")).means(means).fix(fix),
    };
    let total = space.f_blocks * space.f_frsize;
    let free = space.f_bavail * space.f_frsize;
    let left = fs::read_dir(directory).into_iter().flatten().flatten();
    let left = left.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"cuda.shm.")).count();
    let mut detail = format!("{} free of {}", bytes(free), bytes(total));
    if left > 0 {
        // A running process may need them, so the finding does not advise removing them.
        detail.push_str(&format!("; {left} files of CUDA processes, living or killed"));
    }
    if let Err(errno) = rustix::fs::access(directory, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK) {
        return Finding::warning(format!("{detail}; {shown} cannot be written: {errno}")).means(means).fix(fix);
    }
    if free < LITTLE {
        return Finding::warning(detail).means(means).fix(fix);
    }
    Finding::ok(detail)
}

#[cfg(test)]
mod tests {
    use super::{super::finding::Outcome, *};

    /// A file system with these files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, contents) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }
        root
    }

    fn platform_of(files: &[(&str, &str)]) -> Finding {
        Platform::read(machine(files).path()).finding()
    }

    #[test]
    fn wsl_is_known_by_its_device_or_its_kernel() {
        let release = ("proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n");
        for files in [&[("dev/dxg", "")][..], &[release]] {
            let found = platform_of(files);
            assert_eq!((found.outcome, found.detail.as_str()), (Outcome::Warning, "Windows Subsystem for Linux (WSL)"));
            assert!(found.meaning.contains("host memory works"), "{found:?}");
            assert!(!found.fix.is_empty());
        }
    }

    #[test]
    fn jetson_is_known_by_its_release_or_its_device_tree() {
        let tree = ("proc/device-tree/compatible", "nvidia,p3737-0000\0nvidia,tegra234\0");
        for files in [&[("etc/nv_tegra_release", "# R36")][..], &[tree]] {
            let found = platform_of(files);
            assert_eq!((found.outcome, found.detail.as_str()), (Outcome::Warning, "NVIDIA Jetson (Tegra)"));
            assert!(found.meaning.contains("only legacy events"), "{found:?}");
        }
    }

    #[test]
    fn container_is_noted() {
        let found = platform_of(&[("proc/1/cgroup", "0::/kubepods/burstable/x\n")]);
        assert_eq!((found.outcome, found.detail.as_str()), (Outcome::Ok, "a container"));
        assert!(found.meaning.contains("ends with this container"));
        let found = platform_of(&[("proc/1/cgroup", "0::/init.scope\n"), ("proc/sys/kernel/osrelease", "6.8.0\n")]);
        assert_eq!((found.outcome, found.meaning.as_str()), (Outcome::Ok, ""));
    }

    #[test]
    fn separate_namespaces_are_named_and_explained() {
        let root = tempfile::tempdir().unwrap();
        let link = |process: &str, name: &str, number: u64| {
            let directory = root.path().join(process).join("ns");
            fs::create_dir_all(&directory).unwrap();
            std::os::unix::fs::symlink(format!("{name}:[{number}]"), directory.join(name)).unwrap();
        };
        link("self", "pid", 0xEFFF_FFFC);
        link("self", "ipc", 4_026_532_999);
        link("self", "user", 0xEFFF_FFFD);
        link("self", "mnt", 7);
        link("1", "mnt", 7);
        link("self", "net", 8);
        let found = separate(root.path());
        assert_eq!((found.outcome, found.detail.as_str()), (Outcome::Ok, "separate: ipc; not visible: net"));
        assert!(found.meaning.starts_with("ipc: ") && !found.meaning.contains("pid"), "{found:?}");
    }

    #[test]
    fn missing_or_read_only_shared_memory_is_a_warning() {
        let directory = tempfile::tempdir().unwrap();
        let found = shm(&directory.path().join("none"));
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(found.meaning.contains("events between processes") && found.fix.contains("--shm-size"));
        fs::write(directory.path().join("cuda.shm.0.1.1"), "").unwrap();
        let found = shm(directory.path());
        assert!(found.detail.contains("; 1 files of CUDA processes"), "{found:?}");
    }
}
