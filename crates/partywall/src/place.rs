//! Places of memory: host memory or a GPU.

use std::{fmt, str::FromStr};

use partywall_cuda::DeviceUuid;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Main memory.
    Host,
    /// The GPU with this UUID. Ordinals differ between processes, UUIDs do not.
    Gpu(DeviceUuid),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(uuid) => uuid.fmt(f),
        }
    }
}

impl From<partywall_wire::Place> for Place {
    fn from(place: partywall_wire::Place) -> Self {
        match place {
            partywall_wire::Place::Host => Self::Host,
            partywall_wire::Place::Gpu(uuid) => Self::Gpu(DeviceUuid(uuid)),
        }
    }
}

impl From<Place> for partywall_wire::Place {
    fn from(place: Place) -> Self {
        match place {
            Place::Host => Self::Host,
            Place::Gpu(uuid) => Self::Gpu(uuid.0),
        }
    }
}

/// A place as users name it: `auto`, `host`, `cuda`, `cuda:1`, or a GPU's UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceChoice {
    /// The GPU whose context is current on the calling thread; otherwise the first GPU, or host memory if there is no GPU.
    #[default]
    Auto,
    /// Host memory.
    Host,
    /// The GPU with this ordinal in this process.
    Cuda(u32),
    /// The GPU with this UUID.
    Uuid(DeviceUuid),
}

/// The error that a text does not name a place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: use auto, host, cuda, cuda:N or a GPU's UUID (GPU-…)")]
pub struct UnknownDevice(String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(text.to_owned());
        Ok(match text {
            "auto" => Self::Auto,
            "host" | "cpu" => Self::Host,
            "cuda" | "gpu" => Self::Cuda(0),
            _ => match text.strip_prefix("cuda:") {
                Some(ordinal) => Self::Cuda(ordinal.parse().map_err(|_| unknown())?),
                None => Self::Uuid(text.parse().map_err(|_| unknown())?),
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
        }
    }
}
