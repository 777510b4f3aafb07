//! Places of memory: host memory, a GPU, or pinned host memory.

use std::{fmt, str::FromStr};

use partywall_cuda::DeviceUuid;
use partywall_wire::near::did_you_mean;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Main memory.
    Host,
    /// The GPU with this UUID. Ordinals differ between processes, UUIDs do not.
    Gpu(DeviceUuid),
    /// Main memory of this NUMA node that the driver has allocated and pinned: the CPU reaches it, and every GPU at the
    /// speed of its bus, without registering it in each process. Processes need the driver to map it.
    Pinned(u32),
}

impl Place {
    /// Returns whether the CPU reaches memory there.
    pub fn is_cpu_reachable(self) -> bool {
        self.gpu().is_none()
    }

    /// Returns the GPU that has memory there; `None` for main memory.
    pub fn gpu(self) -> Option<DeviceUuid> {
        match self {
            Self::Gpu(uuid) => Some(uuid),
            Self::Host | Self::Pinned(_) => None,
        }
    }
}

/// What needs access to pinned memory from the start; see [`OpenOptions::access`](crate::OpenOptions::access).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// The CPU alone: no CUDA context is made. 15 to 24 ms a GiB (measured on H200).
    Cpu,
    /// A GPU alone. 10 ms a GiB.
    Gpu,
    /// The CPU and a GPU. 24 to 31 ms a GiB.
    Both,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(uuid) => uuid.fmt(f),
            Self::Pinned(node) => write!(f, "pinned:{node}"),
        }
    }
}

impl From<partywall_wire::Place> for Place {
    fn from(place: partywall_wire::Place) -> Self {
        match place {
            partywall_wire::Place::Host => Self::Host,
            partywall_wire::Place::Gpu(uuid) => Self::Gpu(DeviceUuid(uuid)),
            partywall_wire::Place::Pinned(node) => Self::Pinned(node),
        }
    }
}

impl From<Place> for partywall_wire::Place {
    fn from(place: Place) -> Self {
        match place {
            Place::Host => Self::Host,
            Place::Gpu(uuid) => Self::Gpu(uuid.0),
            Place::Pinned(node) => Self::Pinned(node),
        }
    }
}

/// A place as users name it: `auto`, `host`, `pinned`, `pinned:1`, `cuda`, `cuda:1`, or a GPU's UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceChoice {
    /// The GPU whose context is current on the calling thread; otherwise the first GPU, or host memory if there is no
    /// GPU.
    #[default]
    Auto,
    /// Host memory.
    Host,
    /// The GPU with this ordinal in this process.
    Cuda(u32),
    /// The GPU with this UUID.
    Uuid(DeviceUuid),
    /// Pinned host memory on this NUMA node; `None` for the node of the GPU that [`Auto`](Self::Auto) stands for.
    Pinned(Option<u32>),
}

/// The error that a text does not name a place.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: use auto, host, pinned, pinned:N, cuda, cuda:N or a GPU's UUID (GPU-…){near}", near = near(.0))]
pub struct UnknownDevice(String);

/// As `Display`, for a `main` that returns the error.
impl fmt::Debug for UnknownDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn near(text: &str) -> String {
    did_you_mean(["auto", "host", "pinned", "cuda"], text.split(':').next().unwrap_or_default())
}

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(text.to_owned());
        Ok(match text {
            "auto" => Self::Auto,
            "host" | "cpu" => Self::Host,
            "cuda" | "gpu" => Self::Cuda(0),
            "pinned" => Self::Pinned(None),
            _ => match text.split_once(':') {
                Some(("cuda", ordinal)) => Self::Cuda(ordinal.parse().map_err(|_| unknown())?),
                Some(("pinned", node)) => Self::Pinned(Some(node.parse().map_err(|_| unknown())?)),
                _ => Self::Uuid(text.parse().map_err(|_| unknown())?),
            },
        })
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Pinned(None) => f.write_str("pinned"),
            Self::Pinned(Some(node)) => write!(f, "pinned:{node}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_choice_is_parsed_again() {
        for text in ["auto", "host", "cuda:0", "cuda:12", "pinned", "pinned:0", "pinned:31"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for text in ["", "pinned:", "pinned:x", "pinned:-1", "pinned 1", "cuda:", "cpu:0"] {
            assert_eq!(text.parse::<DeviceChoice>(), Err(UnknownDevice(text.to_owned())));
        }
    }

    #[test]
    fn misspelt_device_is_suggested() {
        for (text, meant) in [("hots", "host"), ("Cuda", "cuda"), ("pined:1", "pinned"), ("cuba:0", "cuda")] {
            let said = text.parse::<DeviceChoice>().unwrap_err();
            assert!(said.to_string().ends_with(&format!("; did you mean {meant:?}?")), "{said}");
            assert_eq!(format!("{said:?}"), said.to_string());
        }
        assert!(!"disk".parse::<DeviceChoice>().unwrap_err().to_string().contains("mean"));
    }

    #[test]
    fn place_is_the_same_in_the_protocol() {
        for place in [Place::Host, Place::Gpu(DeviceUuid([7; 16])), Place::Pinned(3)] {
            assert_eq!(Place::from(partywall_wire::Place::from(place)), place);
        }
    }
}
