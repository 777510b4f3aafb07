//! Probes of GPUs, from the driver's library to memory in two processes.

pub(super) mod devices;
pub(super) mod driver;
pub(super) mod sharing;
pub(super) mod work;

use std::fmt;

use partywall_cuda::{AccessError, CudaError, Device, Driver, LoadError, memop};

use super::{
    Scope,
    finding::{Finding, Outcome},
};
use crate::{error::Error, gpu, place::DeviceChoice};

/// Bytes that the tests of a GPU use, rounded up to what it can allocate.
const BYTES: u64 = 1 << 20;

/// Tries something on every GPU of the scope; one that fails does not keep the others from being tried.
fn on_each(scope: Scope, try_it: impl Fn(Device) -> Result<String, Trouble>) -> Finding {
    let devices = match chosen(scope) {
        Ok(devices) => devices,
        Err(trouble) => return Finding::failed(trouble.to_string()),
    };
    let mut lines = Vec::new();
    let mut outcome = Outcome::Ok;
    for device in devices {
        let ordinal = device.ordinal();
        lines.push(match try_it(device) {
            Ok(line) => format!("cuda:{ordinal} {line}"),
            Err(trouble) => {
                outcome = Outcome::Failed;
                format!("cuda:{ordinal} {trouble}")
            }
        });
    }
    Finding::new(outcome, lines.join("\n"))
}

/// The GPUs of the scope.
fn chosen(scope: Scope) -> Result<Vec<Device>, Trouble> {
    let mut all = Device::all(Driver::load()?)?;
    match scope {
        Scope::All => {}
        Scope::First | Scope::One(DeviceChoice::Auto | DeviceChoice::Host) => all.truncate(1),
        Scope::One(DeviceChoice::Cuda(ordinal)) => {
            all.retain(|device| device.ordinal() == ordinal);
            if all.is_empty() {
                return Err(Trouble::Wrong(format!("this process sees no cuda:{ordinal}")));
            }
        }
        Scope::One(DeviceChoice::Uuid(uuid)) => all = vec![gpu::find(uuid)?],
    }
    Ok(all)
}

/// What can stand in the way.
#[derive(Debug)]
enum Trouble {
    Load(LoadError),
    Cuda(CudaError),
    Wrong(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Wrong(error.to_string())
    }
}

impl From<memop::ProbeError> for Trouble {
    fn from(error: memop::ProbeError) -> Self {
        Self::Wrong(error.to_string())
    }
}
