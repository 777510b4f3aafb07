//! `--device`: where memory is allocated.

use partywall::{DeviceChoice, ErrorKind, Place, cuda::Driver, gpu};

use crate::{failure::Failure, output::Output};

/// Returns the place that a choice means on this machine. Prints a remark if `auto` means host memory although there is
/// a driver. Without one, host memory is what `auto` promises, and the command's result names it.
///
/// # Errors
/// As [`gpu::resolve`].
pub fn place(output: Output, choice: DeviceChoice) -> partywall::Result<Place> {
    let (place, why) = gpu::resolve(choice)?;
    if let Some(why) = why
        && Driver::load().is_ok()
    {
        output.remark(format!("in host memory, because no GPU can be used: {why}; `partywall doctor` says more"));
    }
    Ok(place)
}

/// Refuses pinned memory for what works in host memory or on a GPU only.
///
/// # Errors
/// A usage error for pinned memory.
pub fn require_unpinned(choice: DeviceChoice) -> Result<(), Failure> {
    match choice {
        DeviceChoice::Pinned(_) => {
            let message = "this command works in host memory or on a GPU, not in pinned memory";
            Err(Failure::new(ErrorKind::Usage, message, "choose --device host, cuda or cuda:N"))
        }
        _ => Ok(()),
    }
}
