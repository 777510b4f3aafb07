//! Words of host memory that processes share, as programs without Partywall share them.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// A mapping of such words. At first all are 0.
pub(super) struct Words {
    start: ptr::NonNull<AtomicU64>,
    count: usize,
}

impl Words {
    /// Creates the file of so many words, which other processes [open](Self::open).
    pub(super) fn create(count: usize) -> io::Result<OwnedFd> {
        let file = memfd_create("partywall:textbook", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, (count * size_of::<AtomicU64>()) as u64)?;
        Ok(file)
    }

    /// Maps the words of a file.
    pub(super) fn open(file: impl AsFd, count: usize) -> io::Result<Self> {
        let bytes = count * size_of::<AtomicU64>();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so nothing else is mapped there.
        let start = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }?;
        // The kernel maps nothing at 0 unless it is asked to.
        let start = ptr::NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, count })
    }

    pub(super) fn get(&self, word: usize) -> u64 {
        self.all()[word].load(Ordering::Acquire)
    }

    pub(super) fn set(&self, word: usize, value: u64) {
        self.all()[word].store(value, Ordering::Release);
    }

    fn all(&self) -> &[AtomicU64] {
        // SAFETY: the pages are mapped until the drop, and aligned. No process shortens the file, whose length `create`
        // has set. Other processes write the words, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, unmapped once; references to it borrow `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.count * size_of::<AtomicU64>()) };
    }
}
