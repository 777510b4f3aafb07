//! The driver's own errors, as `docs/troubleshooting.md` quotes them.

use std::{ffi::c_int, os::fd::AsFd};

use partywall::{
    cuda::{Access, Context, CudaError, Device, Driver, Mapping, PhysicalMemory},
    cuda_anchor,
};

use super::world::{ensure, error_text};
use crate::gpu;

const DOCUMENT: &str = include_str!("../../../../docs/troubleshooting.md");

fn quoted(anchor: &str) -> Result<&'static str, String> {
    let (_, entry) = DOCUMENT.split_once(&format!("\n### {anchor}\n")).ok_or(format!("no entry {anchor}"))?;
    entry.lines().find_map(|line| line.strip_prefix("    ")).ok_or(format!("{anchor} quotes nothing"))
}

fn expect(anchor: &str, outcome: Result<(), CudaError>) -> Result<(), String> {
    let error = outcome.err().ok_or(format!("{anchor}: it worked"))?;
    let message = error.to_string();
    ensure(cuda_anchor(&error) == anchor, || format!("{message:?} points to {}", cuda_anchor(&error)))?;
    ensure(message.starts_with(quoted(anchor)?), || format!("{anchor}: {message:?}"))
}

/// Provokes the errors: an unaligned size, a part of an allocation, the wrong function to free.
pub(crate) fn driver_errors_are_as_documented() -> Result<(), String> {
    let driver = Driver::load().map_err(error_text)?;
    let context = Context::retain(Device::by_ordinal(driver, 0).map_err(error_text)?).map_err(error_text)?;
    expect("size-not-aligned", PhysicalMemory::create(&context, 4096).map(drop))?;

    let granularity = PhysicalMemory::granularity(&context).map_err(error_text)?;
    let memory = PhysicalMemory::create(&context, 2 * granularity).map_err(error_text)?;
    let exported = memory.export().map_err(error_text)?;
    let part = PhysicalMemory::import(&context, exported.as_fd(), granularity);
    expect("not-supported", part.and_then(|part| Mapping::new(part, Access::ReadOnly)).map(drop))?;

    let mapping = Mapping::new(memory, Access::ReadWrite).map_err(error_text)?;
    let _guard = context.guard().map_err(error_text)?;
    let code = free(mapping.device_ptr())?;
    let message = format!("cuMemFree failed: {}", partywall::cuda::CuResult(code as u32));
    ensure(message == quoted("wrong-clean-up")?, || message)
}

/// Calls `cuMemFree` with an address that `cuMemAlloc` did not return.
#[allow(unsafe_code)]
fn free(address: u64) -> Result<c_int, String> {
    let library = gpu::open_driver()?;
    // SAFETY: the signature is that of the driver's documentation; the driver checks the address, which is mapped.
    unsafe {
        let free: libloading::Symbol<'_, unsafe extern "C" fn(u64) -> c_int> =
            library.get(c"cuMemFree_v2").map_err(error_text)?;
        Ok(free(address))
    }
}
