//! Where `--device` leads.

use partywall::{DeviceChoice, Place, gpu};

use crate::{Context, failure::Failure};

/// The place that a choice means here. If it is host memory only for want of a GPU, one line on standard error says so.
pub(crate) fn place(context: &Context, choice: DeviceChoice) -> Result<Place, Failure> {
    let (place, why) = gpu::resolve(choice)?;
    if let Some(why) = why {
        context.output().remark(format!("no GPU can be used here, so this is host memory ({why})"));
    }
    Ok(place)
}
