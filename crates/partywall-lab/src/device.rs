//! The GPU of a lab, and operations on its memory.

use std::{borrow::Cow, time::Duration};

use partywall::{
    DeviceChoice, DeviceUuid, Element, Error, Gpu, Loan, Place, Sample,
    cuda::{
        Access, AccessError, Context, CudaError, DeviceAttribute, DeviceBuffer, DeviceSlice, Driver, PointerInfo,
        PointerKind, Stream, StreamRef, memop,
    },
    error::DeviceFault,
    gpu,
};

use crate::{
    clock::until,
    failure::{Doing, Failure},
};

/// Parses a GPU as labs name it: its number here, or its UUID.
pub fn parse_gpu(text: &str) -> Result<DeviceChoice, String> {
    let number = text.strip_prefix("cuda:").unwrap_or(text);
    number.parse().map(DeviceChoice::Cuda).or_else(|_| text.parse().map(DeviceChoice::Uuid)).map_err(|_| {
        format!(
            "{text:?} is not a GPU, and labs run on GPUs only: use the number of one in this process (0) or its UUID \
             (GPU-…), or --simulated for GPUs that are simulated in software"
        )
    })
}

/// Opens a GPU.
pub fn open(choice: DeviceChoice) -> Result<Gpu, Failure> {
    match gpu::resolve(choice) {
        Ok((Place::Gpu(uuid), _)) => Ok(Gpu::open(uuid)?),
        Ok(_) => unreachable!("a GPU was chosen"),
        Err(error @ Error::DeviceFault(DeviceFault::NoDevice { .. }))
            if !Driver::load().is_ok_and(Driver::is_simulated) =>
        {
            Err(Failure::from(error).with_advice(WITHOUT_A_GPU))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the GPU that uses memory at a place: for pinned memory the first GPU, for host memory none.
pub(super) fn that_uses(place: Place) -> Result<Option<DeviceUuid>, Failure> {
    Ok(match place {
        Place::Host => None,
        Place::Gpu(uuid) => Some(uuid),
        Place::Pinned(_) => gpu::resolve(DeviceChoice::Cuda(0))?.0.gpu(),
    })
}

const WITHOUT_A_GPU: &str = "a lab is about a GPU's driver and needs a GPU: `partywall doctor --device all` lists the \
    GPUs of this machine, `partywall doctor` reports what is missing; without a GPU, add --simulated to run the lab on \
    simulated GPUs";

/// Sets every byte and waits for completion.
pub(super) fn set(gpu: &Gpu, slice: DeviceSlice<'_>, value: u8) -> Result<(), Failure> {
    gpu.stream().enqueue_set(slice, value).doing("filling memory")?;
    gpu.stream().synchronize().doing("filling memory")
}

/// Returns why streams of this GPU cannot wait for words of memory, or `None` if they can.
pub(super) fn streams_cannot_wait(gpu: &Gpu) -> Option<String> {
    let obstacle = memop::probe_device_word(gpu.context(), Duration::from_secs(5)).err()?;
    Some(format!("streams cannot wait for words of memory here: {obstacle}"))
}

/// A directory in which no MPS daemon answers.
pub(super) const NO_DAEMON: &str = "/nonexistent/partywall";

/// The reason why a step is not tried in host memory.
pub(super) const NEEDS_A_GPU: &str = "it needs a GPU: --device cuda";

/// Returns whether this process is a client of an MPS server.
pub fn under_mps(gpu: &Gpu) -> Result<bool, Failure> {
    let device = gpu.context().device();
    Ok(device.attribute(DeviceAttribute::MPS_ENABLED).doing("asking about MPS")? != 0)
}

/// Waits until everything on a stream is done. Returns false if `limit` ran out.
pub(super) fn ends(stream: StreamRef<'_>, limit: Duration) -> Result<bool, Failure> {
    until(limit, Duration::from_micros(20), || stream.is_done().doing("working on a stream"))
}

/// A stream of a role, and the kernels that it runs there. Both exist before the stream waits for anything.
pub(super) struct Working<K> {
    pub(super) stream: Stream,
    pub(super) kernels: K,
}

impl<K> Working<K> {
    pub(super) fn new(gpu: &Gpu, load: fn(&Context) -> Result<K, CudaError>) -> Result<Self, Failure> {
        let stream = Stream::new(gpu.context()).doing("creating a stream")?;
        Ok(Self { stream, kernels: load(gpu.context()).doing("loading kernels")? })
    }
}

/// A word of GPU memory that blocks streams until it is written. Dropping the gate opens it first, because freeing
/// memory waits for streams.
pub(super) struct Gate {
    word: DeviceBuffer,
    /// Writes the word; created before any stream waits.
    opening: Stream,
}

impl Gate {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, Failure> {
        let word = DeviceBuffer::new(gpu.context(), 8).doing("allocating")?;
        set(gpu, word.as_slice(), 0)?;
        Ok(Self { word, opening: Stream::new(gpu.context()).doing("creating a stream")? })
    }

    /// Makes a stream wait until the gate opens.
    pub(super) fn hold(&self, stream: StreamRef<'_>) -> Result<(), Failure> {
        stream.enqueue_wait_u64(self.word.as_slice(), 1).doing("waiting on a stream")
    }

    /// Lets the waiting streams continue.
    pub(super) fn open(&self) -> Result<(), Failure> {
        let written = self.opening.as_ref().enqueue_write_u64(self.word.as_slice(), 1);
        written.doing("writing a word by a stream")
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.open();
    }
}

/// Returns the bytes of a slice.
pub(super) fn bytes_of(gpu: &Gpu, slice: DeviceSlice<'_>) -> Result<Vec<u8>, AccessError> {
    let mut bytes = vec![0; slice.len() as usize];
    gpu.stream().copy_to_host(&mut bytes, slice)?;
    Ok(bytes)
}

/// Returns the elements of a sample once they are there. Those on a GPU are copied.
pub(super) fn elements<'a, T: Element>(sample: &'a Sample, what: &str) -> Result<Cow<'a, [T]>, Failure> {
    let Some(gpu) = sample.gpu() else { return Ok(sample.as_slice()?.into()) };
    let range = sample.device_on(gpu.stream())?;
    let bytes = bytes_of(gpu, range.as_slice()).doing(what)?;
    sample.check()?;
    Ok(bytemuck::pod_collect_to_vec(&bytes).into())
}

/// Fills a loan: in place in host memory, by a copy on a GPU.
pub(super) fn fill<T: Element>(
    loan: &mut Loan,
    what: &str,
    make: impl FnOnce(&mut [T]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if loan.device().is_err() {
        return make(loan.as_mut_slice()?);
    }
    let mut elements = vec![T::zeroed(); loan.shape().iter().product::<u64>() as usize];
    make(&mut elements)?;
    let range = loan.device()?;
    let copied = range.gpu().stream().copy_from_host(range.as_slice(), bytemuck::cast_slice(&elements));
    copied.doing(what)
}

/// Returns the first byte of a slice.
pub(super) fn first_byte(gpu: &Gpu, slice: DeviceSlice<'_>) -> Result<u8, AccessError> {
    Ok(bytes_of(gpu, slice.slice(0, 1)?)?[0])
}

/// Returns the kind of memory at an address, as the driver reports it.
pub(super) fn kind_of(context: &Context, address: u64) -> String {
    match PointerInfo::of(context, address).map(|info| info.kind) {
        Ok(PointerKind::Device) => "device memory of cuMemAlloc".into(),
        Ok(PointerKind::Imported) => "memory of another process".into(),
        Ok(PointerKind::Pool) => "memory of a pool".into(),
        Ok(PointerKind::Vmm) => "a mapping of cuMemCreate memory".into(),
        Ok(PointerKind::Managed) => "managed memory".into(),
        Ok(PointerKind::Pinned) => "page-locked host memory of the driver".into(),
        Ok(PointerKind::Registered) => "registered host memory".into(),
        Ok(_) => "unknown to the driver".into(),
        Err(error) => error.to_string(),
    }
}

/// Returns the name of an access right in steps.
pub(super) fn access_name(access: Access) -> &'static str {
    match access {
        Access::ReadOnly => "read-only",
        Access::ReadWrite => "read-write",
    }
}
