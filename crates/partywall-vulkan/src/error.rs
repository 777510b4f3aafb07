//! The errors of this crate.

use ash::vk;
use partywall::DeviceUuid;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong with Vulkan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The Vulkan loader cannot be opened.
    #[error(
        "cannot load Vulkan: {0}; install a loader and a driver: apt-get install libvulkan1, and mesa-vulkan-drivers where \
         there is no driver of a GPU"
    )]
    NoLoader(String),
    /// No device is the wanted one.
    #[error(
        "no Vulkan device is {wanted}; there is {}; a GPU hidden from Vulkan, or a MIG instance, has none",
        list(there)
    )]
    NoDevice {
        /// The wanted device.
        wanted: String,
        /// Names and UUIDs of the devices.
        there: Vec<String>,
    },
    /// The device lacks an extension or a feature that the call needs.
    #[error(
        "{device} has no {missing}, which {what} needs; use another device or driver, or enable it when you create the device"
    )]
    Unsupported {
        /// The device.
        device: String,
        /// The extension or feature.
        missing: &'static str,
        /// The operation that needs it.
        what: &'static str,
    },
    /// The memory is on another GPU than the device.
    #[error("{name:?} is on GPU {owner}, but {device} is {uuid}; import it on the GPU that has it")]
    WrongGpu {
        /// The segment.
        name: String,
        /// The GPU that has the memory.
        owner: DeviceUuid,
        /// The Vulkan device.
        device: String,
        /// Its UUID.
        uuid: DeviceUuid,
    },
    /// A buffer for writing was requested of a frozen version or of a sample.
    #[error(
        "{name:?} is frozen or a sample of it is only read, and a buffer as a target of transfers is written; leave TRANSFER_DST \
         and transform feedback out, commit the version as mutable, or use a loan"
    )]
    ReadOnly {
        /// The segment or topic.
        name: String,
    },
    /// A buffer cannot be at the requested place.
    #[error("cannot make a buffer of {name:?}: {why}")]
    Buffer {
        /// The segment.
        name: String,
        /// Why.
        why: String,
    },
    /// The value is not one that the timeline can take.
    #[error("cannot use value {value} of timeline {name:?}: {why}")]
    Value {
        /// The timeline.
        name: String,
        /// The value.
        value: u64,
        /// Why.
        why: String,
    },
    /// A call of Vulkan failed.
    #[error("{what}: {code:?} ({code})")]
    Vulkan {
        /// The operation.
        what: String,
        /// Vulkan's result.
        code: vk::Result,
    },
    /// A probe found wrong bytes.
    #[error("{what}, on {device}; its driver must not be used for shared memory")]
    Wrong {
        /// The device.
        device: String,
        /// The difference.
        what: String,
    },
    /// A call of the operating system failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A call of Partywall failed.
    #[error(transparent)]
    Partywall(#[from] partywall::Error),
}

/// Returns a function that adds the operation to a result of Vulkan.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(vk::Result) -> Error {
    move |code| Error::Vulkan { what: what.into(), code }
}

/// Returns the error for a device that lacks what an operation needs.
pub(crate) fn unsupported(device: &str, missing: &'static str, what: &'static str) -> Error {
    Error::Unsupported { device: device.to_owned(), missing, what }
}

fn list(devices: &[String]) -> String {
    if devices.is_empty() { "none at all".to_owned() } else { devices.join(", ") }
}
