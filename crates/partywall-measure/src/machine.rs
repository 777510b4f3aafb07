//! The machine, the date and the commit of a measurement.

use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use partywall_os::clock::iso_date;
use serde::{Deserialize, Serialize};

/// The measured machine. Facts that cannot be determined are `unknown` or zero, never guessed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The release of the running kernel.
    pub kernel: String,
    /// The name of the processor.
    pub cpu: String,
    /// The number of logical processors that this process may use, within a container's limit.
    pub cores: usize,
    /// Bytes of main memory.
    pub memory: u64,
    /// The name of the GPU, if one was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// The version of the GPU's driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

impl Machine {
    /// Returns the description of this machine. The caller names the GPU and the driver, because this crate loads no
    /// driver.
    pub fn detect(gpu: Option<String>, driver: Option<String>) -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            kernel: kernel_release(),
            cpu: cpu_model(&read("/proc/cpuinfo")).unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory: total_memory(&read("/proc/meminfo")).unwrap_or(0),
            gpu,
            driver,
        }
    }
}

/// Returns the release of the running kernel, such as `6.1.0-28-amd64`.
pub fn kernel_release() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(text) => text.trim().to_owned(),
        Err(_) => unknown(),
    }
}

/// Returns today's date in UTC, such as `2026-11-20`.
pub fn today() -> String {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    iso_date(since_1970 / 86_400)
}

/// Returns the measured commit: `PARTYWALL_COMMIT` if it is set, as in a bundle without a repository,
/// else the commit of the current directory according to git, with `-modified` appended if tracked
/// files differ from it. `None` if neither is available.
pub fn commit() -> Option<String> {
    if let Ok(named) = std::env::var("PARTYWALL_COMMIT")
        && !named.is_empty()
    {
        return Some(named);
    }
    // Tags are excluded, so that the name of a commit is always its hash.
    let output = Command::new("git")
        .args(["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=-modified"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// Returns the first `model name` of `/proc/cpuinfo`.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    })
}

/// Returns `MemTotal` of `/proc/meminfo`, in bytes.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read_as_the_kernel_writes_them() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Example CPU @ 2.00GHz\nmodel name\t: other\n";
        assert_eq!(cpu_model(cpuinfo).unwrap(), "Example CPU @ 2.00GHz");
        assert_eq!(cpu_model("processor\t: 0\n"), None);
        let meminfo = "MemTotal:       24576000 kB\nMemFree:  1 kB\n";
        assert_eq!(total_memory(meminfo), Some(24_576_000 * 1024));
        assert_eq!(total_memory("MemTotal: many kB\n"), None);
    }

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::detect(None, None);
        assert!(machine.cores > 0 && machine.memory > 0);
        assert_ne!(machine.kernel, "unknown");
        assert!(today().as_str() > "2026-01-01");
    }
}
