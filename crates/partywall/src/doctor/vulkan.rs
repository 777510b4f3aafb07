//! The probe of Vulkan.

use std::os::fd::{AsFd, BorrowedFd};

use partywall_cuda::{Device, DeviceUuid, Driver};

use super::{
    Doctor, exchange,
    finding::{Finding, Outcome},
    gpu::{self, Trouble},
};

/// Tries to import host memory, or the memory of a GPU, into Vulkan. Returns what it did, as the rest of a line.
pub type TryVulkan = fn(Option<Exported<'_>>) -> Result<String, NotUsable>;

/// Memory of a GPU with the test pattern.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Exported<'a> {
    /// The GPU.
    pub uuid: DeviceUuid,
    /// The file descriptor that the driver exported.
    pub fd: BorrowedFd<'a>,
    /// The length in bytes.
    pub bytes: u64,
}

impl Exported<'_> {
    /// Checks that these bytes are the memory's.
    ///
    /// # Errors
    /// The first wrong word, in words.
    pub fn check(&self, bytes: &[u8]) -> Result<(), String> {
        exchange::check(bytes)
    }
}

/// Why Vulkan cannot use memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotUsable {
    /// There is nothing to try it with: no loader, no device, no extension.
    Missing(String),
    /// It was tried and failed.
    Failed(String),
}

/// The answer of a program that contains no Vulkan.
const WITHOUT: &str = "`partywall doctor` tries it where the program partywall-lab is installed";

/// Probes whether Vulkan uses the memory that Partywall shares.
pub(super) fn vulkan(doctor: &Doctor) -> Finding {
    let Some(try_it) = doctor.vulkan else { return Finding::skipped(WITHOUT) };
    let mut tried = vec![try_it(None)];
    // A GPU that CUDA cannot use has a probe of its own, and memory of a simulated one is no GPU's.
    let is_real = Driver::load().is_ok_and(|driver| !driver.is_simulated());
    let devices = if is_real { gpu::chosen(doctor.scope).unwrap_or_default() } else { Vec::new() };
    tried.extend(devices.into_iter().map(|device| on_gpu(device, try_it)));
    judge(&tried)
}

fn on_gpu(device: Device, try_it: TryVulkan) -> Result<String, NotUsable> {
    let ordinal = device.ordinal();
    let failed = |trouble: Trouble| NotUsable::Failed(format!("cuda:{ordinal} {trouble}"));
    let uuid = device.uuid().map_err(|error| failed(error.into()))?;
    let (mapping, fd) = gpu::sharing::exported(device).map_err(failed)?;
    try_it(Some(Exported { uuid, fd: fd.as_fd(), bytes: mapping.as_slice().len() }))
        .map(|line| format!("cuda:{ordinal} {line}"))
        .map_err(|why| match why {
            NotUsable::Missing(why) => NotUsable::Missing(format!("cuda:{ordinal} {why}")),
            NotUsable::Failed(why) => NotUsable::Failed(format!("cuda:{ordinal} {why}")),
        })
}

fn judge(tried: &[Result<String, NotUsable>]) -> Finding {
    let lines: Vec<&str> = tried
        .iter()
        .map(|tried| match tried {
            Ok(line) | Err(NotUsable::Missing(line) | NotUsable::Failed(line)) => line.as_str(),
        })
        .collect();
    let found = |outcome| Finding::new(outcome, lines.join("\n"));
    if tried.iter().any(|tried| matches!(tried, Err(NotUsable::Failed(_)))) {
        return found(Outcome::Failed)
            .means("programs that use Vulkan cannot use that memory in place; CUDA and host memory are not concerned")
            .fix("update the driver, or copy the data through host memory");
    }
    match tried.iter().filter(|tried| tried.is_ok()).count() {
        0 => Finding::skipped(lines[0]),
        all if all == tried.len() => found(Outcome::Ok),
        _ => found(Outcome::Warning).means("programs that use Vulkan can use only the other memory in place"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 231.
    #[test]
    fn missing_vulkan_is_one_line_and_no_error() {
        let missing = |why: &str| Err(NotUsable::Missing(why.to_owned()));
        let found = judge(&[missing("no loader"), missing("cuda:0 no loader")]);
        assert_eq!((found.outcome, found.detail.as_str(), found.meaning.as_str()), (Outcome::Skipped, "no loader", ""));
        let found = judge(&[Ok("host memory".to_owned()), missing("cuda:0 has no VK_KHR_external_memory_fd")]);
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(found.detail.contains("VK_KHR_external_memory_fd") && !found.meaning.is_empty(), "{found:?}");
        assert_eq!(judge(&[Ok("host memory".to_owned())]).outcome, Outcome::Ok);
        let found = judge(&[Ok("host memory".to_owned()), Err(NotUsable::Failed("cuda:0 word 0 is 1".to_owned()))]);
        assert_eq!(found.outcome, Outcome::Failed);
    }
}
