//! The driver's library.

use std::{fs, path::Path};

use partywall_cuda::{CuResult, Driver, DriverVersion, LoadError};

use crate::{doctor::finding::Finding, gpu};

/// The CUDA version of the oldest supported driver, 550.
const OLDEST: DriverVersion = DriverVersion { major: 12, minor: 4 };

/// The CUDA version of the first driver, 570, with calls that checkpoint a process.
const CHECKPOINTS: DriverVersion = DriverVersion { major: 12, minor: 8 };

const INSTALL: &str = "install the NVIDIA driver 550 or newer; start a container with --gpus all";

/// Checks that a driver exists, is new enough, and starts.
pub(in crate::doctor) fn driver() -> Finding {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(error @ LoadError::MissingSymbol { .. }) => {
            return Finding::failed(error.to_string()).means("the driver is too old, or a stub").fix(INSTALL);
        }
        Err(error) => return no_driver(&error),
    };
    let version = match driver.version() {
        Ok(version) => version,
        Err(error) => return Finding::failed(error.to_string()).means("the driver does not work").fix(INSTALL),
    };
    // A driver that shows no GPU works; the next probe says so.
    if let Err(error) = driver.initialize()
        && error.code != CuResult::NO_DEVICE
    {
        return Finding::failed(gpu::unusable(driver, &error))
            .means("the driver's library is there, and CUDA does not start in this process")
            .fix(
                "`nvidia-smi` must work first; a container needs the device nodes (--gpus all); library and kernel \
                 module must be of one release (restart after updates)",
            );
    }
    let release = fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let release =
        if release.trim().is_empty() { "release unknown".into() } else { format!("release {}", release.trim()) };
    let detail = format!("{}: {release}, CUDA {version}", driver.library());
    if driver.is_simulated() {
        return Finding::ok(format!("SIMULATED: {detail}"))
            .means("a test tool stands in for the driver: nothing below says anything about a GPU")
            .fix(format!("unset {} to use the real driver", Driver::LIBRARY_VARIABLE))
            .simulated();
    }
    if version < OLDEST {
        return Finding::failed(detail)
            .means(format!("Partywall needs driver 550, which offers CUDA {OLDEST}, or a newer one"))
            .fix("update the driver");
    }
    Finding::ok(detail)
}

/// Says whether a process can be checkpointed. Does not try it: a process that fails at its restoration is lost, and the
/// end of a restored one has hung a host (driver 595, a field report).
pub(in crate::doctor) fn checkpoints() -> Finding {
    let version = Driver::load().ok().and_then(|driver| Some((driver, driver.version().ok()?)));
    let Some((driver, version)) = version else { return Finding::skipped("the driver's version is unknown") };
    if driver.is_simulated() {
        return Finding::skipped("the simulated driver takes none");
    }
    if version < CHECKPOINTS {
        return Finding::skipped(format!("CUDA {version} has no calls for them; CUDA {CHECKPOINTS} has (driver 570)"));
    }
    let detail = "cuCheckpointProcess*: of a process that has suspended its segments (Domain.suspend); not tried here";
    Finding::ok(detail).means("a process that has shared memory mapped cannot be restored: docs/checkpoints.md")
}

/// Returns the finding for a missing library, which is normal on a machine without a GPU.
fn no_driver(error: &LoadError) -> Finding {
    let detail = error.to_string();
    if Path::new("/dev/nvidiactl").exists() {
        return Finding::failed(format!("{detail}; but /dev/nvidiactl is there"))
            .means("this machine has a GPU, and this process lacks the library that belongs to its driver")
            .fix("install the driver's libraries (libcuda1, or the NVIDIA Container Toolkit)");
    }
    if has_nvidia_display() {
        return Finding::warning(format!("{detail}; an NVIDIA GPU is on the PCI bus"))
            .means("GPU memory cannot be shared here; host memory can")
            .fix(INSTALL);
    }
    Finding::skipped(detail).means("this machine shows no GPU: GPU memory cannot be shared here; host memory can")
}

fn has_nvidia_display() -> bool {
    let read = |path: &Path, file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
    let devices = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    devices
        .map(|entry| entry.path())
        .any(|path| read(&path, "vendor").trim() == "0x10de" && read(&path, "class").starts_with("0x03"))
}
