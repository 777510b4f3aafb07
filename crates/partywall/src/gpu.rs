//! GPUs as this process sees them.

use std::{
    fmt, fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use partywall_cuda::{
    Access as CudaAccess, AccessError, Context, CuResult, CudaError, Device, DeviceSlice, DeviceUuid, Driver, Kernels,
    NodeImportError, NodeMemory, PhysicalMemory, Stream, StreamRef,
};
use partywall_os::lock::IgnorePoison;

use partywall_wire::Call;

use crate::{
    domain::{Health, Link},
    error::{DeviceFault, Error, InvalidArgument, LimitReached, Result, Unreachable},
    mps,
    place::{DeviceChoice, Place},
};

/// One GPU: its primary context, a stream for host-synchronous copies, and Partywall's kernels.
///
/// A [`Domain`](crate::Domain) opens each GPU once and keeps it; creating a context takes 290 ms (measured on H200).
pub struct Gpu {
    uuid: DeviceUuid,
    context: Context,
    stream: Stream,
    kernels: OnceLock<Kernels>,
    /// The directory of the MPS daemon through whose server this process uses the GPU.
    mps: Option<PathBuf>,
}

impl Gpu {
    /// Opens the GPU with this UUID.
    ///
    /// # Errors
    /// [`DeviceFault::NoDevice`] without a driver, or if this process does not see the GPU; [`DeviceFault::Cuda`].
    pub fn open(uuid: DeviceUuid) -> Result<Self> {
        let device = find(uuid)?;
        let cuda = |what: &str| cuda_error(format!("{what} on GPU {uuid}"));
        let context = Context::retain(device).map_err(cuda("making a context"))?;
        let stream = Stream::new(&context).map_err(cuda("making a stream"))?;
        // Asked last: the driver becomes an MPS client when it creates its first context.
        Ok(Self { uuid, context, stream, kernels: OnceLock::new(), mps: mps::serves(&device).then(mps::pipes) })
    }

    /// Returns the UUID.
    pub fn uuid(&self) -> DeviceUuid {
        self.uuid
    }

    /// Returns the primary context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the stream for host-synchronous copies. It does not synchronize with the default stream.
    pub fn stream(&self) -> StreamRef<'_> {
        self.stream.as_ref()
    }

    /// Returns for each of these descriptors why the memory behind it is lost, if it is: a reset of its GPU, or a fault
    /// that needs one, ends the memory and leaves the descriptors open. Call it in a process that has not used the GPU
    /// before, because the contexts of others end with the memory.
    ///
    /// # Errors
    /// If this process cannot find out, because it cannot allocate, export and import other memory on the GPU.
    pub fn find_lost(&self, descriptors: &[impl AsFd]) -> Result<Vec<Option<Error>>> {
        let memory = format!("memory of GPU {}", self.uuid);
        let bytes = PhysicalMemory::granularity(&self.context).map_err(no_trial(&memory))?;
        let create = || PhysicalMemory::create(&self.context, bytes)?.export();
        find_lost(&memory, descriptors, create, |fd| PhysicalMemory::import(&self.context, fd, bytes).map(drop))
    }

    /// Converts a cudarc stream for the calls of this library.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] for a stream of another GPU, or of a context that is not the primary one.
    #[cfg(feature = "cudarc")]
    pub fn cudarc_stream<'a>(&'a self, stream: &'a cudarc::driver::CudaStream) -> Result<StreamRef<'a>> {
        StreamRef::from_cudarc(&self.context, stream).map_err(access_error("taking cudarc's stream"))
    }

    /// Returns Partywall's kernels, which are loaded and warmed up on first use. Call this before a stream of this GPU
    /// waits for the first time: while a stream waits, loading blocks until the wait ends.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`].
    pub fn kernels(&self) -> Result<&Kernels> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let loaded =
            Kernels::load(&self.context).map_err(cuda_error(format!("loading kernels on GPU {}", self.uuid)))?;
        Ok(self.kernels.get_or_init(|| loaded))
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.uuid)
    }
}

/// The GPUs that a connection has opened.
#[derive(Debug)]
pub(crate) struct Gpus {
    link: Arc<Link>,
    pub(crate) health: Health,
    open: Mutex<OpenGpus>,
}

#[derive(Debug, Default)]
struct OpenGpus {
    gpus: Vec<Arc<Gpu>>,
    /// True once the broker knows that this process uses GPUs.
    reported: bool,
}

impl Gpus {
    pub(crate) fn new(link: Arc<Link>, health: Health) -> Self {
        Self { link, health, open: Mutex::default() }
    }

    /// Returns the GPU with this UUID, opened on first use.
    pub(crate) fn get(&self, uuid: DeviceUuid) -> Result<Arc<Gpu>> {
        let mut open = self.open.lock().ignore_poison();
        if let Some(gpu) = open.gpus.iter().find(|gpu| gpu.uuid == uuid) {
            return Ok(gpu.clone());
        }
        let gpu = Arc::new(Gpu::open(uuid)?);
        // Before this process uses memory of other processes on this GPU: from then on the death of this process may
        // not prove that its GPU work is over.
        if !open.reported {
            let mps = gpu.mps.as_ref().map(|pipes| pipes.display().to_string());
            match self.link.call(Call::UsesGpu { mps }) {
                // Without a broker no proof is needed.
                Ok(_) | Err(Error::Unreachable(Unreachable::Gone { .. })) => open.reported = true,
                Err(error) => return Err(error),
            }
        }
        self.health.watch(&gpu)?;
        open.gpus.push(gpu.clone());
        Ok(gpu)
    }

    /// Returns whether the GPU with this UUID is open.
    pub(crate) fn has(&self, uuid: DeviceUuid) -> bool {
        self.open.lock().ignore_poison().gpus.iter().any(|gpu| gpu.uuid == uuid)
    }

    /// Returns the GPU for memory that every GPU reaches: the one that was opened first, else the one of the calling
    /// thread's current context, else the first.
    pub(crate) fn preferred(&self) -> Result<Arc<Gpu>> {
        if let Some(gpu) = self.open.lock().ignore_poison().gpus.first() {
            return Ok(gpu.clone());
        }
        let current = current().and_then(Place::gpu);
        let first = || uuids()?.first().copied().ok_or_else(|| no_device(None, visible(&[])));
        self.get(current.map_or_else(first, Ok)?)
    }
}

/// Part of a segment on a GPU: an address, valid on that GPU's primary context for as long as the borrow lives.
#[derive(Clone, Copy)]
pub struct DeviceRange<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) slice: DeviceSlice<'a>,
}

impl<'a> DeviceRange<'a> {
    /// Returns the first address.
    pub fn device_ptr(&self) -> u64 {
        self.slice.device_ptr()
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.slice.len()
    }

    /// Returns whether this process's GPU work may write the range. Otherwise a write ends the process's CUDA context.
    pub fn is_writable(&self) -> bool {
        self.slice.access() == CudaAccess::ReadWrite
    }

    /// Returns part of the range.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] if the part is not inside the range.
    pub fn slice(&self, offset: u64, bytes: u64) -> Result<Self> {
        let slice = self.slice.slice(offset, bytes).map_err(access_error("part of a tensor"))?;
        Ok(Self { gpu: self.gpu, slice })
    }

    /// Returns the same range, which this library's calls only read.
    pub(crate) fn read_only(self) -> Self {
        Self { slice: self.slice.read_only(), ..self }
    }

    /// Returns the range as a [`DeviceSlice`], for streams and kernels.
    pub fn as_slice(&self) -> DeviceSlice<'a> {
        self.slice
    }

    /// Returns a cudarc view of the range, for cudarc's copies and launches. Writing through it is allowed only if
    /// [`is_writable`](Self::is_writable). `stream` may be any cudarc stream of this GPU.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] if the range does not consist of whole aligned elements, or the stream belongs to
    /// another context.
    ///
    /// # Panics
    /// If cudarc cannot create its events, because the context is lost.
    #[cfg(feature = "cudarc")]
    pub fn to_cudarc<T>(&self, stream: &Arc<cudarc::driver::CudaStream>) -> Result<partywall_cuda::CudarcSlice<'a, T>>
    where
        T: crate::element::Element + cudarc::driver::DeviceRepr,
    {
        let slice = partywall_cuda::CudarcSlice::new(&self.gpu.context, self.slice, stream);
        slice.map_err(access_error("viewing it through cudarc"))
    }

    /// Returns the GPU on which the range can be used.
    pub fn gpu(&self) -> &'a Gpu {
        self.gpu
    }

    /// Copies `source` into the range on `stream`, and waits for the copy.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] if the lengths differ or the range is read-only; [`DeviceFault::Cuda`].
    pub fn copy_from_host(&self, stream: StreamRef<'_>, source: &[u8]) -> Result<()> {
        stream.copy_from_host(self.slice, source).map_err(access_error("copying to the GPU"))
    }

    /// Copies the range to `destination` on `stream`, and waits for the copy.
    ///
    /// # Errors
    /// [`InvalidArgument::Range`] if the lengths differ; [`DeviceFault::Cuda`].
    pub fn copy_to_host(&self, stream: StreamRef<'_>, destination: &mut [u8]) -> Result<()> {
        stream.copy_to_host(destination, self.slice).map_err(access_error("copying from the GPU"))
    }
}

impl fmt::Debug for DeviceRange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRange({:#x}, {} bytes on {})", self.device_ptr(), self.bytes(), self.gpu.uuid)
    }
}

/// Returns all GPUs that this process sees. Loads the driver.
///
/// # Errors
/// [`DeviceFault::NoDevice`] without a driver; [`DeviceFault::Cuda`].
pub fn devices() -> Result<Vec<Device>> {
    let driver = Driver::load().map_err(|e| no_device(None, e.to_string()))?;
    Device::all(driver).map_err(|error| no_device(None, unusable(driver, &error)))
}

/// Returns why the driver shows no GPUs: its answer, and the device nodes that this process lacks.
pub(crate) fn unusable(driver: &Driver, answer: &CudaError) -> String {
    // A simulated driver needs no nodes.
    let missing = if driver.is_simulated() { Vec::new() } else { missing_nodes(Path::new("/dev")) };
    match missing.as_slice() {
        [] => answer.to_string(),
        _ => format!("{answer}; this process has no {}", missing.join(", no ")),
    }
}

/// Returns which of the nodes that every use of a GPU needs are not in a directory.
fn missing_nodes(dev: &Path) -> Vec<&'static str> {
    let entries = fs::read_dir(dev).into_iter().flatten().flatten();
    let names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let of_a_gpu = names.iter().any(|name| name.strip_prefix("nvidia").is_some_and(is_number));
    let has = |node: &str| names.iter().any(|name| name == node);
    let nodes =
        [("/dev/nvidiactl", has("nvidiactl")), ("/dev/nvidia-uvm", has("nvidia-uvm")), ("/dev/nvidiaN", of_a_gpu)];
    nodes.into_iter().filter(|(_, is_there)| !is_there).map(|(node, _)| node).collect()
}

/// Returns the place that a choice stands for on the calling thread. [`DeviceChoice::Auto`] never fails: without a
/// usable GPU it is host memory, and the second value is the reason.
///
/// # Errors
/// [`DeviceFault::NoDevice`] if this process does not see the GPU; [`DeviceFault::NoPinned`] for pinned memory where
/// there is none.
pub fn resolve(choice: DeviceChoice) -> Result<(Place, Option<String>)> {
    let by_ordinal = |ordinal: u32| -> Result<Place> {
        let wanted = format!("cuda:{ordinal}");
        let all = devices().map_err(|error| match error {
            Error::DeviceFault(DeviceFault::NoDevice { why, .. }) => no_device(Some(&wanted), why),
            other => other,
        })?;
        let device = all.get(ordinal as usize).ok_or_else(|| no_device(Some(&wanted), visible(&all)))?;
        Ok(Place::Gpu(device.uuid().map_err(cuda_error(format!("asking for the UUID of {wanted}")))?))
    };
    match choice {
        DeviceChoice::Host => Ok((Place::Host, None)),
        DeviceChoice::Cuda(ordinal) => Ok((by_ordinal(ordinal)?, None)),
        DeviceChoice::Uuid(uuid) => find(uuid).map(|_| (Place::Gpu(uuid), None)),
        DeviceChoice::Pinned(node) => Ok((pinned(node)?, None)),
        DeviceChoice::Auto => Ok(match current().map_or_else(|| by_ordinal(0), Ok) {
            Ok(place) => (place, None),
            Err(Error::DeviceFault(DeviceFault::NoDevice { why, .. })) => (Place::Host, Some(why)),
            Err(error) => (Place::Host, Some(error.to_string())),
        }),
    }
}

/// Returns for each of these descriptors why the pinned memory of a NUMA node behind it is lost, if it is. Only other
/// memory of that node tells, so the loss of a GPU does not count. Needs no CUDA context.
///
/// # Errors
/// If this process cannot find out, because it cannot allocate, export and import other memory on the node.
pub fn find_lost_on_node(node: u32, descriptors: &[impl AsFd]) -> Result<Vec<Option<Error>>> {
    let driver = node_driver()?;
    let memory = format!("pinned memory of NUMA node {node}");
    let bytes = NodeMemory::granularity(driver).map_err(no_trial(&memory))?;
    let create = || NodeMemory::create(driver, node, bytes)?.export();
    find_lost(&memory, descriptors, create, |fd| match NodeMemory::import(driver, node, fd, bytes) {
        Err(NodeImportError::Driver(error)) => Err(error),
        // Memory that is elsewhere is there.
        _ => Ok(()),
    })
}

/// Returns the place of pinned memory on a node; by default on the node that is closest to the GPU of
/// [`DeviceChoice::Auto`]. Only an allocation proves that a node exists.
fn pinned(node: Option<u32>) -> Result<Place> {
    let driver = node_driver()?;
    let gpus = Device::all(driver).map_err(not_pinned)?;
    let current = Device::current(driver).ok().flatten();
    let gpu = current.or_else(|| gpus.first().copied()).ok_or_else(|| no_pinned(visible(&gpus)))?;
    if !gpu.supports_node_memory().map_err(not_pinned)? {
        return Err(no_pinned(format!("the driver of cuda:{} cannot allocate it", gpu.ordinal())));
    }
    Ok(Place::Pinned(match node {
        Some(node) => node,
        None => gpu.numa_node().map_err(not_pinned)?,
    }))
}

/// Returns the driver for pinned memory.
pub(crate) fn node_driver() -> Result<&'static Driver> {
    Driver::load().map_err(|error| no_pinned(error.to_string()))
}

/// Returns the error that the driver cannot provide pinned memory to this process.
pub(crate) fn not_pinned(error: CudaError) -> Error {
    match error.code {
        // `cuInit` succeeds or fails for other reasons in a process that was not forked.
        CuResult::NOT_INITIALIZED => no_pinned(
            "it was forked after its parent had initialised CUDA; start it with exec (Python: the spawn start method)",
        ),
        _ => no_pinned(error.to_string()),
    }
}

/// Returns the GPU of the calling thread's current CUDA context, if there is one: CUDA code of the thread allocates
/// there.
fn current() -> Option<Place> {
    let device = Device::current(Driver::load().ok()?).ok()??;
    Some(Place::Gpu(device.uuid().ok()?))
}

/// Returns the device with this UUID.
pub(crate) fn find(uuid: DeviceUuid) -> Result<Device> {
    let all = devices()?;
    let found = uuids_of(&all)?.iter().position(|other| *other == uuid);
    found.map(|ordinal| all[ordinal]).ok_or_else(|| no_device(Some(&uuid.to_string()), visible(&all)))
}

/// Returns the UUIDs of all devices, in their order.
pub(crate) fn uuids() -> Result<Vec<DeviceUuid>> {
    uuids_of(&devices()?)
}

fn uuids_of(devices: &[Device]) -> Result<Vec<DeviceUuid>> {
    devices.iter().map(|device| device.uuid().map_err(cuda_error("asking for the UUID of a GPU"))).collect()
}

fn visible(devices: &[Device]) -> String {
    let mask = std::env::var("CUDA_VISIBLE_DEVICES").map(|m| format!(" (CUDA_VISIBLE_DEVICES={m})"));
    format!("this process sees {} GPUs{}", devices.len(), mask.unwrap_or_default())
}

fn no_device(wanted: Option<&str>, why: String) -> Error {
    Error::DeviceFault(DeviceFault::NoDevice { wanted: wanted.map(str::to_owned), why })
}

/// Returns the error that this process cannot use pinned memory.
pub(crate) fn no_pinned(why: impl Into<String>) -> Error {
    Error::DeviceFault(DeviceFault::NoPinned { name: None, why: why.into() })
}

pub(crate) fn cuda_error(what: impl Into<String>) -> impl Fn(CudaError) -> Error {
    let what = what.into();
    move |source| failed_call(&what, source)
}

/// Finds the descriptors that cannot be imported, although what `create` makes can be, before and after.
fn find_lost(
    memory: &str,
    descriptors: &[impl AsFd],
    create: impl Fn() -> Result<OwnedFd, CudaError>,
    import: impl Fn(BorrowedFd<'_>) -> Result<(), CudaError>,
) -> Result<Vec<Option<Error>>> {
    let try_out = || import(create()?.as_fd());
    try_out().map_err(no_trial(memory))?;
    // Other codes are about this process: it lacks memory, or may not use the GPU that the memory is on.
    let is_lost = |error: &CudaError| {
        matches!(error.code, CuResult::INVALID_VALUE | CuResult::INVALID_HANDLE | CuResult::UNKNOWN)
    };
    let refused = cuda_error(format!("importing {memory}"));
    let lost = |descriptor| import(descriptor).err().filter(is_lost).map(&refused);
    let lost = descriptors.iter().map(|descriptor| lost(descriptor.as_fd())).collect();
    // The driver may have failed meanwhile.
    try_out().map_err(no_trial(memory))?;
    Ok(lost)
}

fn no_trial(memory: &str) -> impl Fn(CudaError) -> Error + use<> {
    cuda_error(format!("trying out {memory}"))
}

/// Returns the error of a failed driver call, which may mean that the context is lost or that no file descriptor is
/// free.
pub(crate) fn failed_call(what: &str, source: CudaError) -> Error {
    let what = what.to_owned();
    match (source.call, source.code) {
        _ if source.is_sticky() => Error::DeviceFault(DeviceFault::ContextLost { what, source }),
        ("cuMemExportToShareableHandle", CuResult::OPERATING_SYSTEM) => {
            Error::LimitReached(LimitReached::FileDescriptors(what))
        }
        _ => Error::DeviceFault(DeviceFault::Cuda { what, source }),
    }
}

pub(crate) fn access_error(what: &'static str) -> impl Fn(AccessError) -> Error {
    move |error| match error {
        AccessError::Driver(source) => failed_call(what, source),
        other => InvalidArgument::range(what, other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 64.
    #[test]
    fn missing_device_nodes_are_named() {
        let dev = tempfile::tempdir().unwrap();
        assert_eq!(missing_nodes(dev.path()), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidiaN"]);
        for node in ["nvidiactl", "nvidia-modeset", "nvidia-uvm-tools", "nvidia"] {
            fs::write(dev.path().join(node), "").unwrap();
        }
        assert_eq!(missing_nodes(dev.path()), ["/dev/nvidia-uvm", "/dev/nvidiaN"]);
        for node in ["nvidia-uvm", "nvidia12"] {
            fs::write(dev.path().join(node), "").unwrap();
        }
        assert!(missing_nodes(dev.path()).is_empty());
        assert_eq!(missing_nodes(&dev.path().join("none")).len(), 3, "no directory has no nodes");
    }
}
