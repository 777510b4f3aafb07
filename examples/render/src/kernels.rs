//! The stream of a role, and its kernels.

use super::{rasteriser::Rasteriser, *};

pub(super) struct Kernels {
    stream: Stream,
    pub(super) rasteriser: Rasteriser,
}

impl Kernels {
    /// Loads the kernels before the stream waits for another process.
    pub(super) fn new(domain: &Domain, gpu: &Gpu) -> Result<Self, Failure> {
        let stream = Stream::new(gpu.context()).doing("creating a stream")?;
        prepare(domain, &stream);
        Ok(Self { stream, rasteriser: Rasteriser::load(gpu.context()).doing("loading kernels")? })
    }

    /// Returns the kernels for objects at this place, if it is a GPU.
    pub(super) fn of(domain: &Domain, place: Place) -> Result<Option<Self>, Failure> {
        match place.gpu() {
            Some(uuid) => Self::new(domain, &*domain.gpu(uuid)?).map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn stream(&self) -> StreamRef<'_> {
        self.stream.as_ref()
    }
}

/// Prepares what the library needs for waits of streams for timelines. Before a stream waits for anything: registering
/// memory with the driver might otherwise wait for that stream. An error is ignored here; the first real use reports
/// it.
fn prepare(domain: &Domain, stream: &Stream) {
    let Ok(writer) = domain.timeline_writer(&format!("ready/{}", std::process::id())) else { return };
    if writer.signal_on(stream.as_ref(), 1).is_ok() {
        let _ = stream.synchronize();
    }
    writer.close();
}

/// Publishes a loan that is filled, or that the stream of the kernels fills. No host waits for that.
pub(super) fn publish(kernels: Option<&Kernels>, loan: Loan) -> Result<(), Failure> {
    let published = match kernels {
        None => loan.filled().publish(TIMEOUT),
        Some(kernels) => loan.filled().publish_on(kernels.stream(), TIMEOUT),
    };
    published.map_err(|refused| refused.error)?;
    Ok(())
}

/// Releases a sample, on a GPU once the stream has done what was enqueued.
pub(super) fn release(kernels: Option<&Kernels>, sample: Sample) -> Result<(), Failure> {
    match kernels {
        None => drop(sample),
        Some(kernels) => sample.release_on(kernels.stream()).map_err(|refused| refused.error)?,
    }
    Ok(())
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Buffers that belong to a role may be in use. A failure is that of work that has failed before.
        let _ = self.stream.synchronize();
    }
}
