//! Requirements of tests on the machine.

use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use partywall_harness::mps;

use super::vulkan;
use super::world::{ROLE, error_text};
use crate::gpu::{Found, GpuFacts};
use crate::runner::PROBE;
use crate::vulkan::show_driver;

/// The requirement of a test on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// At least this many GPUs that the driver shows to this process.
    Gpu(usize),
    /// A real GPU, and the reason why a simulated one does not suffice.
    RealGpu(&'static str),
    /// A real GPU, and the programs of MPS.
    Mps,
    /// A GPU, and permission to create namespaces.
    Namespaces,
    /// A real GPU, and permission to hide its device nodes.
    HiddenNodes,
    /// A GPU that another user may use, and permission to become that user.
    OtherUser,
    /// This many real GPUs that Vulkan shows, too.
    Vulkan(usize),
    /// A device of Vulkan that imports host memory.
    VulkanOnHost,
}

impl Needs {
    /// Returns why a machine with these GPUs cannot run the test, if it cannot.
    pub(crate) fn missing(self, found: &GpuFacts) -> Option<String> {
        match self {
            Self::Gpu(needed) if found.count < needed => {
                Some(format!("needs {self}, this machine shows {}", found.count))
            }
            Self::RealGpu(why) if found.simulated => Some(format!("needs {self}: {why}")),
            Self::Mps if found.simulated => Some(format!("needs {self}: a simulated GPU has no MPS")),
            Self::Mps => mps::missing().map(|program| format!("needs {self}: there is no {program}")),
            Self::HiddenNodes if found.simulated => Some(format!("needs {self}: a simulated GPU has no device nodes")),
            Self::Namespaces | Self::HiddenNodes if own_namespaces().is_none() => {
                Some(format!("needs {self}, this machine does not permit that"))
            }
            Self::OtherUser => other_user_has_a_gpu().err().map(|reason| format!("needs {self}: {reason}")),
            Self::Vulkan(_) if found.simulated => Some(format!(
                "needs {self}: memory of a simulated GPU is a memfd, which no Vulkan driver takes for a GPU's"
            )),
            Self::Vulkan(needed) if found.count < needed => {
                Some(format!("needs {self}, this machine shows {}", found.count))
            }
            Self::Vulkan(needed) => vulkan_lacks(needed).map(|reason| format!("needs {self}: {reason}")),
            Self::VulkanOnHost => vulkan_lacks(0).map(|reason| format!("needs {self}: {reason}")),
            _ => None,
        }
    }
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(1) => write!(f, "1 GPU"),
            Self::Gpu(number) => write!(f, "{number} GPUs"),
            Self::RealGpu(_) => write!(f, "a real GPU"),
            Self::Mps => write!(f, "a real GPU with MPS"),
            Self::Namespaces => write!(f, "a GPU and permission to create namespaces"),
            Self::HiddenNodes => write!(f, "a real GPU and permission to create namespaces"),
            Self::OtherUser => write!(f, "a GPU and permission to become another user who may use it"),
            Self::Vulkan(1) => write!(f, "a real GPU with Vulkan"),
            Self::Vulkan(number) => write!(f, "{number} real GPUs with Vulkan"),
            Self::VulkanOnHost => write!(f, "a Vulkan device that imports host memory"),
        }
    }
}

pub(crate) const FREE_MEMORY: Needs = Needs::RealGpu("each process on a simulated GPU has its own free memory");

/// Returns a command that runs the program appended to it in its own PID, IPC and mount namespaces: as root, or
/// otherwise as root of a user namespace.
pub(crate) fn own_namespaces() -> Option<Command> {
    let unshare = |user: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(user).args(["--pid", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]);
        command
    };
    [&[][..], &["--user", "--map-root-user"]].into_iter().find_map(|user| {
        let tried = unshare(user).arg("true").stdin(Stdio::null()).output();
        tried.is_ok_and(|output| output.status.success()).then(|| unshare(user))
    })
}

/// A user without privileges.
pub(crate) const NOBODY: u32 = 65534;

/// Returns a command that runs this program as [`NOBODY`], without capabilities.
pub(crate) fn other_user() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.uid(NOBODY).gid(NOBODY);
    command
}

fn other_user_has_a_gpu() -> Result<(), String> {
    let output = other_user().arg(PROBE).stdin(Stdio::null()).output().map_err(error_text)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match serde_json::from_str(text(&output.stdout).lines().last().unwrap_or_default()) {
        Ok(Found::Gpu(_)) => Ok(()),
        Ok(Found::Nothing(reason)) => Err(reason),
        Err(_) => Err(format!("{} {}", output.status, text(&output.stderr))),
    }
}

/// Asks a child process, because a driver may crash, which this number of GPUs Vulkan lacks, or, for none, a device for
/// host memory. A driver that fails otherwise is not missing: the tests run and report it.
fn vulkan_lacks(gpus: usize) -> Option<String> {
    let mut command = Command::new("/proc/self/exe");
    command.args([ROLE, vulkan::PROBE, &gpus.to_string()]).stdin(Stdio::null());
    show_driver(&mut command);
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find_map(|line| line.strip_prefix(vulkan::LACKS)).map(str::to_owned)
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn need_names_the_missing_part() {
        let facts = |simulated| GpuFacts { name: "Some GPU".to_owned(), count: 1, driver: "1".to_owned(), simulated };
        assert_eq!(Needs::Gpu(1).missing(&facts(false)), None);
        assert_eq!(Needs::Gpu(2).missing(&facts(false)).unwrap(), "needs 2 GPUs, this machine shows 1");
        assert_eq!(FREE_MEMORY.missing(&facts(false)), None);
        assert_eq!(
            FREE_MEMORY.missing(&facts(true)).unwrap(),
            "needs a real GPU: each process on a simulated GPU has its own free memory"
        );
        assert_eq!(Needs::Mps.missing(&facts(true)).unwrap(), "needs a real GPU with MPS: a simulated GPU has no MPS");
        assert_eq!(
            Needs::HiddenNodes.missing(&facts(true)).unwrap(),
            "needs a real GPU and permission to create namespaces: a simulated GPU has no device nodes"
        );
    }
}
