//! `--device`: where memory is allocated.

use partywall::{DeviceChoice, ErrorKind, Place, gpu};

use crate::{failure::Failure, output::Output};

/// Returns the place that a choice means on this machine. Prints a remark if it is host memory only because no GPU
/// exists.
///
/// # Errors
/// As [`gpu::resolve`].
pub fn place(output: Output, choice: DeviceChoice) -> partywall::Result<Place> {
    let (place, why) = gpu::resolve(choice)?;
    if why.is_some() {
        output.remark(
            "no GPU was found, so the memory is on the host, as with --device host; `partywall doctor` says what is missing",
        );
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
