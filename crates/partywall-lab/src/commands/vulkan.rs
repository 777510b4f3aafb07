//! How the doctor tries Vulkan. Its loader is opened at run time; a machine without one has nothing to try.

use partywall::doctor::{Exported, NotUsable};
use partywall_vulkan::{Error, probe};

/// Imports host memory, or memory of a GPU, and lets Vulkan copy it.
pub(crate) fn try_it(memory: Option<Exported<'_>>) -> Result<String, NotUsable> {
    let Some(memory) = memory else {
        return probe::host_memory().map(|device| format!("host memory, read and written by {device}")).map_err(why);
    };
    let bytes = probe::gpu_memory(memory.uuid, memory.fd, memory.bytes).map_err(why)?;
    let line = format!("{} MiB exported by CUDA, imported by Vulkan: every word right", memory.bytes >> 20);
    memory.check(&bytes).map(|()| line).map_err(NotUsable::Failed)
}

fn why(error: Error) -> NotUsable {
    match error {
        Error::NoLoader(_) | Error::NoDevice { .. } | Error::Unsupported { .. } => {
            NotUsable::Missing(error.to_string())
        }
        _ => NotUsable::Failed(error.to_string()),
    }
}
