//! Probes of GPUs, from the driver's library to memory in two processes.

pub(super) mod devices;
pub(super) mod driver;
pub(super) mod hand_off;
pub(super) mod pinned;
pub(super) mod sharing;
pub(super) mod work;

use partywall_cuda::{AccessError, CudaError, Device, Driver, LoadError, memop};

use super::{
    Scope,
    finding::{Finding, Outcome},
};
use crate::{error::Error, gpu, place::DeviceChoice};

/// Bytes that the tests of a GPU use, rounded up to what it can allocate.
pub(super) const BYTES: u64 = 1 << 20;

/// Runs a probe on every GPU of the scope, also after a failure.
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

/// Returns the GPUs of the scope.
pub(super) fn chosen(scope: Scope) -> Result<Vec<Device>, Trouble> {
    let mut all = Device::all(Driver::load()?)?;
    match scope {
        Scope::All => {}
        Scope::First | Scope::One(DeviceChoice::Auto | DeviceChoice::Host | DeviceChoice::Pinned(_)) => all.truncate(1),
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

/// The reason why a GPU cannot be examined.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Probe(#[from] memop::ProbeError),
    #[error(transparent)]
    Library(#[from] Error),
    #[error("{0}")]
    Wrong(String),
}
