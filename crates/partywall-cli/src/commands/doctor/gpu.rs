//! Probes of GPUs, from the driver's library to memory in two processes.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use partywall::{
    DeviceUuid, bytes,
    cuda::{
        Access, AccessError, ComputeMode, Context, CuResult, CudaError, Device, DeviceBuffer, Driver, DriverVersion,
        Kernels, LoadError, Mapping, PhysicalMemory, Stream, round_up,
    },
};

use super::{
    Probe,
    exchange::{self, Parcel},
    finding::{Finding, Outcome},
};

/// What the oldest supported driver, 550, offers.
const OLDEST: DriverVersion = DriverVersion { major: 12, minor: 4 };

/// The oldest supported compute capability.
const CAPABILITY: (u32, u32) = (7, 0);

/// Bytes that the tests use.
const BYTES: u64 = 1 << 20;

const INSTALL: &str = "install the NVIDIA driver 550 or newer; start a container with --gpus all";

/// Whether there is a driver, and a new one.
pub(super) fn driver() -> Finding {
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
    let release = fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let release =
        if release.trim().is_empty() { "release unknown".into() } else { format!("release {}", release.trim()) };
    let detail = format!("{}: {release}, CUDA {version}", driver.library());
    let detail = if driver.is_simulated() { format!("{detail}, simulated") } else { detail };
    if version < OLDEST {
        return Finding::failed(detail)
            .means(format!("Partywall needs driver 550, which offers CUDA {OLDEST}, or a newer one"))
            .fix("update the driver");
    }
    Finding::ok(detail)
}

/// Without the library: is that right, or is something missing?
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

/// Which GPUs there are.
pub(super) fn devices() -> Finding {
    let all = match all() {
        Ok(all) if all.is_empty() => return none_visible("it shows none"),
        Ok(all) => all,
        Err(Trouble::Cuda(error)) if error.code == CuResult::NO_DEVICE => return none_visible(&error.to_string()),
        Err(trouble) => {
            return Finding::failed(trouble.to_string())
                .means("the driver is there and does not start")
                .fix("`nvidia-smi` must work first; library and kernel module must be of one release (restart after updates)");
        }
    };
    let (mut lines, mut outcome, mut means, mut fix) = (Vec::new(), Outcome::Ok, "", "");
    for device in &all {
        match describe(device) {
            Ok((line, mode, capability)) => {
                lines.push(line);
                if capability < CAPABILITY {
                    (outcome, means, fix) = (
                        Outcome::Failed,
                        "a GPU of compute capability below 7.0 is not supported",
                        "hide it with CUDA_VISIBLE_DEVICES",
                    );
                } else if mode == ComputeMode::PROHIBITED {
                    (outcome, means, fix) =
                        (Outcome::Failed, "no process may use that GPU", "nvidia-smi -c DEFAULT, as root");
                } else if mode == ComputeMode::EXCLUSIVE_PROCESS && outcome == Outcome::Ok {
                    (outcome, means, fix) = (
                        Outcome::Warning,
                        "one process at a time may use that GPU, so sharing its memory needs MPS",
                        "nvidia-smi -c DEFAULT, as root; or start MPS",
                    );
                }
            }
            Err(error) => {
                lines.push(format!("{}: {error}", device.ordinal()));
                (outcome, means, fix) =
                    (Outcome::Failed, "that GPU does not answer", "look into the kernel's log (dmesg)");
            }
        }
    }
    Finding::new(outcome, lines.join("\n")).means(means).fix(fix)
}

fn none_visible(why: &str) -> Finding {
    let mask = std::env::var("CUDA_VISIBLE_DEVICES").map(|mask| format!("; CUDA_VISIBLE_DEVICES={mask}"));
    Finding::skipped(format!("{why}{}", mask.unwrap_or_default()))
        .means("the driver shows this process no GPU: GPU memory cannot be shared here; host memory can")
        .fix("look at CUDA_VISIBLE_DEVICES, and start a container with --gpus all, if there should be one")
}

fn describe(device: &Device) -> Result<(String, ComputeMode, (u32, u32)), CudaError> {
    let (mode, capability) = (device.compute_mode()?, device.compute_capability()?);
    let line = format!(
        "cuda:{} {} {}, compute capability {}.{}, {}, compute mode {}",
        device.ordinal(),
        device.uuid()?,
        device.name()?,
        capability.0,
        capability.1,
        bytes(device.total_memory()?),
        match mode {
            ComputeMode::DEFAULT => "default".to_owned(),
            ComputeMode::PROHIBITED => "prohibited".to_owned(),
            ComputeMode::EXCLUSIVE_PROCESS => "exclusive".to_owned(),
            ComputeMode(other) => other.to_string(),
        }
    );
    Ok((line, mode, capability))
}

/// Whether the embedded kernels run.
pub(super) fn kernels() -> Finding {
    let try_it = |device: Device| -> Result<String, Trouble> {
        let context = Context::retain(device)?;
        let kernels = Kernels::load(&context)?;
        let stream = Stream::new(&context)?;
        let buffer = DeviceBuffer::new(&context, BYTES)?;
        kernels.enqueue_fill(stream.as_ref(), buffer.as_slice())?;
        match kernels.verify(stream.as_ref(), buffer.as_slice(), 1)? {
            None => Ok("PTX loaded, written and checked by kernels".into()),
            Some(index) => Err(Trouble::Wrong(format!("word {index} is wrong"))),
        }
    };
    on_all(try_it).unwrap_or_else(|trouble| Finding::failed(trouble.to_string())).or(
        "kernels cannot run on that GPU",
        "the driver must be 550 or newer, and no other process may have hung the GPU",
    )
}

/// Whether memory of one process can be used by another.
pub(super) fn vmm() -> Finding {
    let try_it = |device: Device| -> Result<String, Trouble> {
        if !device.supports_vmm()? || !device.supports_posix_fd()? {
            return Err(Trouble::Wrong("it says that it cannot export memory as file descriptors".into()));
        }
        let context = Context::retain(device)?;
        let kernels = Kernels::load(&context)?;
        let stream = Stream::new(&context)?;
        let granularity = PhysicalMemory::granularity(&context)?;
        let size = round_up(BYTES, granularity).ok_or_else(|| Trouble::Wrong("its granularity is 0".into()))?;
        let mapping = Mapping::new(PhysicalMemory::create(&context, size)?, Access::ReadWrite)?;
        kernels.enqueue_fill(stream.as_ref(), mapping.as_slice())?;
        stream.synchronize()?;
        let descriptor = mapping.memory().export()?;
        let parcel = Parcel { bytes: size, gpu: Some(device.uuid()?.to_string()) };
        let seen = exchange::hand_over(Probe::TakeGpuMemory, &parcel, descriptor.as_fd()).map_err(Trouble::Wrong)?;
        Ok(format!("{} exported, imported by another process: {seen}", bytes(size)))
    };
    on_all(try_it).unwrap_or_else(|trouble| Finding::failed(trouble.to_string())).or(
        "memory of that GPU cannot be shared between processes",
        "a virtual GPU (vGPU) and WSL lack this; else update the driver",
    )
}

/// The other side of [`vmm`].
pub(super) fn take(parcel: &Parcel, memory: OwnedFd) -> Result<String, String> {
    let uuid: DeviceUuid = parcel.gpu.as_deref().unwrap_or_default().parse().map_err(|_| "no GPU was named")?;
    let look = || -> Result<String, Trouble> {
        let driver = Driver::load()?;
        let device = Device::by_uuid(driver, uuid)?.ok_or_else(|| Trouble::Wrong(format!("{uuid} is not visible")))?;
        let context = Context::retain(device)?;
        let kernels = Kernels::load(&context)?;
        let stream = Stream::new(&context)?;
        let imported = PhysicalMemory::import(&context, memory.as_fd(), parcel.bytes)?;
        let mapping = Mapping::new(imported, Access::ReadOnly)?;
        if let Some(index) = kernels.verify(stream.as_ref(), mapping.as_slice(), 1)? {
            return Err(Trouble::Wrong(format!("a kernel there found word {index} wrong")));
        }
        let mut copy = vec![0; parcel.bytes as usize];
        stream.as_ref().copy_to_host(&mut copy, mapping.as_slice())?;
        exchange::check(&copy).map_err(Trouble::Wrong)?;
        Ok("every word right, by kernel and in a host copy".into())
    };
    look().map_err(|trouble| trouble.to_string())
}

/// Tries something on every GPU.
fn on_all(try_it: impl Fn(Device) -> Result<String, Trouble>) -> Result<Finding, Trouble> {
    let (mut lines, mut outcome) = (Vec::new(), Outcome::Ok);
    for device in all()? {
        let ordinal = device.ordinal();
        lines.push(match try_it(device) {
            Ok(line) => format!("cuda:{ordinal} {line}"),
            Err(trouble) => {
                outcome = Outcome::Failed;
                format!("cuda:{ordinal} {trouble}")
            }
        });
    }
    Ok(Finding::new(outcome, lines.join("\n")))
}

fn all() -> Result<Vec<Device>, Trouble> {
    Ok(Device::all(Driver::load()?)?)
}

/// What can stand in the way.
#[derive(Debug)]
enum Trouble {
    Load(LoadError),
    Cuda(CudaError),
    Wrong(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Load(error) => error.fmt(f),
            Self::Cuda(error) => error.fmt(f),
            Self::Wrong(what) => f.write_str(what),
        }
    }
}

impl From<LoadError> for Trouble {
    fn from(error: LoadError) -> Self {
        Self::Load(error)
    }
}

impl From<CudaError> for Trouble {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl From<AccessError> for Trouble {
    fn from(error: AccessError) -> Self {
        match error {
            AccessError::Driver(error) => Self::Cuda(error),
            other => Self::Wrong(other.to_string()),
        }
    }
}
