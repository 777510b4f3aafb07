//! The memory of both roles: a page of GPU memory that travels as a file descriptor, and a memfd that both register.

use std::os::fd::BorrowedFd;

use partywall::cuda::{
    HostRegistration,
    experiment::{Coherency, WORDS_BYTES},
};
use partywall_os::{map::SharedMap, memfd::Draft};

use super::*;

/// The memory, and the kernels that use it.
pub(super) struct Shared<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) kernels: Coherency,
    /// Declared before the map, so that it is unregistered before the map is unmapped.
    host: HostRegistration,
    map: Arc<SharedMap>,
    mapping: Mapping,
}

impl<'a> Shared<'a> {
    /// Creates the memory. The descriptors are for the other role, in this order.
    pub(super) fn make(gpu: &'a Gpu) -> Result<(Self, [OwnedFd; 2]), Failure> {
        let granularity = PhysicalMemory::granularity(gpu.context()).doing("asking for the granularity")?;
        let memory = PhysicalMemory::create(gpu.context(), granularity).doing("creating memory")?;
        let descriptor = memory.export().doing("exporting memory")?;
        let file = Draft::create("partywall:lab", HOST_BYTES).and_then(Draft::share).doing(CREATING)?;
        Ok((Self::new(gpu, memory, file.as_fd())?, [descriptor, file]))
    }

    /// Opens the memory that the other role has created.
    pub(super) fn take(gpu: &'a Gpu, bytes: u64, [memory, file]: &[OwnedFd; 2]) -> Result<Self, Failure> {
        let memory = PhysicalMemory::import(gpu.context(), memory.as_fd(), bytes).doing("importing memory")?;
        Self::new(gpu, memory, file.as_fd())
    }

    fn new(gpu: &'a Gpu, memory: PhysicalMemory, file: BorrowedFd<'_>) -> Result<Self, Failure> {
        let map = Arc::new(SharedMap::writable(file).doing(CREATING)?);
        Ok(Self {
            gpu,
            kernels: Coherency::load(gpu.context()).doing("loading kernels")?,
            host: HostRegistration::shared(gpu.context(), Arc::clone(&map)).doing("registering memory")?,
            map,
            mapping: Mapping::new(memory, Access::ReadWrite).doing("mapping memory")?,
        })
    }

    /// Returns the kernels, the words that they use, and the word that a kernel writes when it has started.
    pub(super) fn parts(
        &mut self,
        memory: Memory,
    ) -> Result<(&mut Coherency, DeviceSlice<'_>, DeviceSlice<'_>), Failure> {
        let words = match memory {
            Memory::Gpu => self.mapping.as_slice(),
            Memory::Host => self.host.as_slice(),
        };
        let started = self.host.slice(STARTED, 8).doing("using shared memory")?;
        Ok((&mut self.kernels, words, started))
    }

    /// Returns a handle that waits for the start of a kernel of this process.
    pub(super) fn starts(&self) -> Starts {
        Starts(Arc::clone(&self.map))
    }

    /// Sets all words to 0. No kernel of either role may run.
    pub(super) fn clear(&self, memory: Memory) -> Result<(), Failure> {
        match memory {
            Memory::Gpu => device::set(self.gpu, self.mapping.as_slice(), 0),
            Memory::Host => {
                let words = self.map.slice::<u64>(0, (WORDS_BYTES / 8) as usize);
                words.map_or(Ok(()), |words| {
                    (0..words.len()).for_each(|index| words.set(index, 0));
                    Ok(())
                })
            }
        }
    }

    /// Describes where the words are.
    pub(super) fn describe(&self) -> Step {
        let gpu = self.mapping.device_ptr();
        let host = self.host.device_ptr();
        Step::new(
            "words",
            "The words that kernels of both processes use",
            "Both processes map the same memory, at different addresses: a page of GPU memory, and pages of host memory that the GPU can access. Each word has its own 128 bytes, so that no two words share a cache line.",
        )
        .value("cuMemCreate, exported", format!("{gpu:#x}, {}", bytes(self.mapping.len())))
        .value("memfd, cuMemHostRegister", format!("{host:#x}, {}", bytes(self.host.len())))
        .judge(true, "shared", "")
    }

    /// Returns the length of the GPU memory in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.mapping.len()
    }
}

/// The word that a kernel of the reader writes when it starts.
pub(super) struct Starts(Arc<SharedMap>);

impl Starts {
    /// Waits until the kernel that polls for `value` has started. Returns false if `limit` ran out.
    pub(super) fn wait(&self, value: u64, limit: Duration) -> Result<bool, Failure> {
        let word = self.0.slice::<u64>(STARTED as usize, 1);
        let started = || word.as_ref().is_some_and(|word| word.get(0) == value);
        until(limit, Duration::from_micros(20), || Ok(started()))
    }
}

const CREATING: &str = "creating shared host memory";

const HOST_BYTES: u64 = 64 << 10;
const STARTED: u64 = HOST_BYTES - 128;
const _: () = assert!(WORDS_BYTES <= STARTED);
