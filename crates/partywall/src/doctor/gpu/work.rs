//! Probes of work on a GPU: kernels, and streams that wait for words.

use std::{sync::Arc, time::Duration};

use partywall_cuda::{Context, DeviceBuffer, Kernels, Stream, memop};
use partywall_os::{map::SharedMap, memfd};
use rustix::process::{Resource, getrlimit};

use super::{BYTES, Trouble, on_each};
use crate::{
    doctor::{Scope, finding::Finding},
    error::bytes,
};

/// The timeout for a stream to see a word. A wait ends within 20 µs (measured on H200).
const TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes of registered host memory: more than 8 MiB, the usual limit of locked memory, to find out whether the limit
/// applies.
const REGISTERED: u64 = 16 << 20;

/// Probes whether the embedded kernels run.
pub(in crate::doctor) fn kernels(scope: Scope) -> Finding {
    on_each(scope, |device| {
        let context = Context::retain(device)?;
        let kernels = Kernels::load(&context)?;
        let stream = Stream::new(&context)?;
        let buffer = DeviceBuffer::new(&context, BYTES)?;
        kernels.enqueue_fill(stream.as_ref(), buffer.as_slice())?;
        match kernels.verify(stream.as_ref(), buffer.as_slice(), 1)? {
            None => Ok("PTX loaded, written and checked by kernels".into()),
            Some(index) => Err(Trouble::Wrong(format!("word {index} is wrong"))),
        }
    })
    .or("kernels cannot run on that GPU", "the driver must be 550 or newer, and no other process may have hung the GPU")
}

/// Probes whether streams wait for words in GPU memory.
pub(in crate::doctor) fn device_words(scope: Scope) -> Finding {
    on_each(scope, |device| {
        memop::probe_device_word(&Context::retain(device)?, TIMEOUT)?;
        let said = if device.supports_memory_operations()? { "" } else { ", though its attribute says no" };
        Ok(format!("a stream waited for a word in GPU memory until another wrote it, 32 and 64 bits{said}"))
    })
    .or(WAITS_MEAN, WAITS_FIX)
}

/// Probes whether streams wait for words in registered host memory, and whether the host can release them.
pub(in crate::doctor) fn host_words(scope: Scope) -> Finding {
    let finding = on_each(scope, |device| {
        let context = Context::retain(device)?;
        let memory = memfd::Draft::create("partywall:doctor", REGISTERED).and_then(memfd::Draft::share);
        let map = memory.and_then(SharedMap::writable);
        let map = map.map_err(|errno| Trouble::Wrong(format!("making shared memory: {errno}")))?;
        memop::probe_host_word(&context, &Arc::new(map), TIMEOUT)?;
        Ok(format!(
            "{} of shared memory registered; a stream waited for a word there until another or the host wrote it",
            bytes(REGISTERED)
        ))
    });
    let locked = getrlimit(Resource::Memlock).current.map_or_else(|| "unlimited".to_owned(), bytes);
    finding.or(
        &format!(
            "{WAITS_MEAN}\nhost memory that cannot be registered is copied more slowly, and not asynchronously (locked \
             memory: {locked})"
        ),
        &format!(
            "{WAITS_FIX}; if memory cannot be locked, raise the limit (ulimit -l, LimitMEMLOCK=, --ulimit memlock=-1)"
        ),
    )
}

const WAITS_MEAN: &str = "streams of different processes cannot wait for each other; what falls back is the host: \
    synchronize the stream, then notify the other process";

const WAITS_FIX: &str = "update the driver to 550 or newer; WSL and some virtual GPUs (vGPU) lack it";
