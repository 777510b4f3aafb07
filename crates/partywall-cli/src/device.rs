//! Where memory is made: `--device`.

use partywall::{DeviceChoice, Place, gpu};

use crate::output::Output;

/// Returns the place that a choice means here. If it is host memory only because there is no GPU, a remark says so.
pub(crate) fn place(output: Output, choice: DeviceChoice) -> partywall::Result<Place> {
    let (place, why) = gpu::resolve(choice)?;
    if why.is_some() {
        output.remark(
            "no GPU was found, so this is host memory: --device host asks for it, `partywall doctor` says what is missing",
        );
    }
    Ok(place)
}
