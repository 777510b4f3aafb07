//! The GPU that a lab runs on, and what labs do with its memory.

use std::time::Duration;

use partywall::{
    DeviceChoice, DeviceUuid, Error, Place,
    cuda::{Access, AccessError, Context, CudaError, DeviceSlice, PointerInfo, PointerKind, memop},
    error::{DeviceFault, InvalidArgument},
    gpu,
};

use crate::failure::Failure;

/// The GPU of a lab.
pub(super) use partywall::Gpu;

/// A GPU as labs name it: its number here, or its UUID.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chosen {
    Ordinal(u32),
    Uuid(DeviceUuid),
}

impl std::str::FromStr for Chosen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("cuda:").unwrap_or(text);
        number.parse().map(Self::Ordinal).or_else(|_| text.parse().map(Self::Uuid)).map_err(|_| {
            "use the number of a GPU in this process (0), or its UUID (GPU-…): labs run on GPUs only".to_owned()
        })
    }
}

/// Opens a GPU.
pub(super) fn open(chosen: Chosen) -> Result<Gpu, Failure> {
    let choice = match chosen {
        Chosen::Ordinal(ordinal) => DeviceChoice::Cuda(ordinal),
        Chosen::Uuid(uuid) => DeviceChoice::Uuid(uuid),
    };
    let uuid = match gpu::resolve(choice) {
        Ok((Place::Gpu(uuid), _)) => uuid,
        Ok((Place::Host, _)) => unreachable!("a GPU was chosen"),
        Err(error @ Error::DeviceFault(DeviceFault::NoDevice { .. })) => {
            return Err(Failure::Library { error, advice: Some(WITHOUT_A_GPU) });
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Gpu::open(uuid)?)
}

const WITHOUT_A_GPU: &str = "a lab is about a GPU's driver and needs a GPU: `partywall doctor --device all` lists those that are \
    here, `partywall doctor` says what is missing; where there is none, add --simulated to run it on GPUs simulated in \
    software";

/// An error of the driver in something that is not the experiment itself.
pub(super) fn failed(what: &str) -> impl Fn(CudaError) -> Failure + '_ {
    move |source| Error::DeviceFault(DeviceFault::Cuda { what: what.to_owned(), source }).into()
}

/// The same for copies.
pub(super) fn copy_failed(what: &str) -> impl Fn(AccessError) -> Failure + '_ {
    move |error| match error {
        AccessError::Driver(source) => failed(what)(source),
        other => {
            Error::InvalidArgument(InvalidArgument::Range { tensor: what.to_owned(), why: other.to_string() }).into()
        }
    }
}

/// Sets every byte, and waits until it is done.
pub(super) fn set(gpu: &Gpu, slice: DeviceSlice<'_>, value: u8) -> Result<(), Failure> {
    gpu.stream().enqueue_set(slice, value).map_err(copy_failed("filling memory"))?;
    gpu.stream().synchronize().map_err(failed("filling memory"))
}

/// Why streams of this GPU cannot wait for words of memory, if they cannot.
pub(super) fn streams_cannot_wait(gpu: &Gpu) -> Option<String> {
    let obstacle = memop::probe_device_word(gpu.context(), Duration::from_secs(5)).err()?;
    Some(format!("streams cannot wait for words of memory here: {obstacle}"))
}

/// The first byte.
pub(super) fn first_byte(gpu: &Gpu, slice: DeviceSlice<'_>) -> Result<u8, AccessError> {
    let mut byte = [0];
    gpu.stream().copy_to_host(&mut byte, slice.slice(0, 1)?)?;
    Ok(byte[0])
}

/// What the driver says an address is.
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

/// As it is written in steps.
pub(super) fn access_name(access: Access) -> &'static str {
    match access {
        Access::ReadOnly => "read-only",
        Access::ReadWrite => "read-write",
    }
}
