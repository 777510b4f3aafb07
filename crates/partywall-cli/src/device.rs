//! Where `--device` leads.

use partywall::{DeviceChoice, Place, gpu};

use crate::{Context, failure::Failure};

/// The place that a choice means here. If it is host memory only for want of a GPU, one line on standard error says so.
pub(crate) fn place(context: &Context, choice: DeviceChoice) -> Result<Place, Failure> {
    let (place, why) = gpu::resolve(choice)?;
    if why.is_some() {
        context.output().remark(
            "no GPU was found, so this is host memory: --device host asks for it, `partywall doctor` says what is missing",
        );
    }
    Ok(place)
}
