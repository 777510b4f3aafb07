//! `--device`: where memory is allocated.

use partywall::{DeviceChoice, Place, gpu};

use crate::output::Output;

/// Returns the place that a choice means on this machine. Prints a remark if it is host memory only because no GPU
/// exists.
pub(crate) fn place(output: Output, choice: DeviceChoice) -> partywall::Result<Place> {
    let (place, why) = gpu::resolve(choice)?;
    if why.is_some() {
        output.remark(
            "no GPU was found, so the memory is on the host, as with --device host; `partywall doctor` says what is missing",
        );
    }
    Ok(place)
}
