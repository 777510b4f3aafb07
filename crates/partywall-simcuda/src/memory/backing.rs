//! The bytes behind an address: a memfd for what lives on a device or a NUMA node, or memory of the host.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::abi::Code;
use crate::budget::Budget;

/// Memory, and the mapping through which the simulation reads and writes it. A user of the mapping holds the `Arc`, so
/// memory that is freed while a stream works on it stays until the stream is done.
pub(crate) struct Backing {
    map: *mut u8,
    bytes: usize,
    /// False for the caller's memory if it could not be mapped a second time.
    owned: bool,
    file: Option<OwnedFd>,
    /// The budget that it counts against.
    charged: Option<&'static Budget>,
}

// SAFETY: a pointer to memory that stays mapped for the lifetime of the value. All accesses are byte by
// byte or by atomics, through raw pointers; races between streams are the program's, as on a GPU.
unsafe impl Send for Backing {}
// SAFETY: as for `Send`.
unsafe impl Sync for Backing {}

impl Backing {
    /// Creates zeroed memory. `name` is the name of its memfd.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the budget does not hold it.
    pub(crate) fn create(budget: &'static Budget, bytes: usize, name: &str) -> Result<Arc<Self>, Code> {
        budget.take(bytes as u64)?;
        Self::new_file(bytes, name).and_then(|file| Self::map_file(file, bytes, Some(budget))).inspect_err(|_| {
            budget.give_back(bytes as u64);
        })
    }

    /// Returns memory that another process, or this one, has exported.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the file is no memory of the simulation.
    pub(crate) fn import(file: OwnedFd) -> Result<Arc<Self>, Code> {
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        let stat = rustix::fs::fstat(&file).map_err(|_| Code::INVALID_VALUE)?;
        if !sealed || stat.st_size <= 0 {
            return Err(Code::INVALID_VALUE);
        }
        Self::map_file(file, stat.st_size as usize, None)
    }

    /// Creates host memory that the CPU may use.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn host(bytes: usize) -> Result<Arc<Self>, Code> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, READ_WRITE, MapFlags::SHARED) };
        let map = map.map_err(|_| Code::OUT_OF_MEMORY)?.cast();
        Ok(Arc::new(Self { map, bytes, owned: true, file: None, charged: None }))
    }

    /// Returns memory that the caller has mapped. `shared` memory is mapped a second time, so that streams can use it
    /// even if the caller unmaps it early; private memory has no second mapping.
    ///
    /// # Safety
    /// The range is mapped, and if it is not shared stays so for as long as the value lives.
    pub(crate) unsafe fn of_caller(pointer: *mut c_void, bytes: usize, shared: bool) -> Arc<Self> {
        let again = if shared && (pointer as usize).is_multiple_of(rustix::param::page_size()) {
            // SAFETY: an old size of 0 makes a second mapping of the same shared pages and leaves the first.
            unsafe { libc::mremap(pointer, 0, bytes, libc::MREMAP_MAYMOVE) }
        } else {
            libc::MAP_FAILED
        };
        let owned = again != libc::MAP_FAILED;
        let map = if owned { again.cast() } else { pointer.cast() };
        Arc::new(Self { map, bytes, owned, file: None, charged: None })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first byte of the simulation's own mapping.
    pub(crate) fn map(&self) -> *mut u8 {
        self.map
    }

    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Creates a file that no process can shorten under a mapping.
    fn new_file(bytes: usize, name: &str) -> Result<OwnedFd, Code> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|_| Code::OPERATING_SYSTEM)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
        rustix::fs::fcntl_add_seals(&file, SEALS).map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(file)
    }

    fn map_file(file: OwnedFd, bytes: usize, charged: Option<&'static Budget>) -> Result<Arc<Self>, Code> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, READ_WRITE, MapFlags::SHARED, &file, 0) };
        let map = map.map_err(|_| Code::OUT_OF_MEMORY)?.cast();
        Ok(Arc::new(Self { map, bytes, owned: true, file: Some(file), charged }))
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: mapped by this value, and users of the mapping keep the value.
            let unmapped = unsafe { rustix::mm::munmap(self.map.cast(), self.bytes) };
            unmapped.expect("a mapping of ours can be unmapped");
        }
        if let Some(budget) = self.charged {
            budget.give_back(self.bytes as u64);
        }
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
