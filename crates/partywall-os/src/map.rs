//! Mappings of memfds, one type for each thing that may be assumed of the bytes.
//!
//! | type | who may write the bytes | what it gives |
//! |---|---|---|
//! | [`Draft`](crate::memfd::Draft) | its owner alone: the file has been given to nobody yet | `&mut [u8]` |
//! | [`SealedMap`] | nobody, the kernel refuses | `&[u8]` |
//! | [`SharedMap`] | any process, at any time | [`SharedSlice`], by volatile accesses |
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    marker::PhantomData,
    mem::ManuallyDrop,
    os::fd::AsFd,
    ptr::{self, NonNull},
};

use bytemuck::Pod;
use rustix::{
    io::{self, Errno},
    mm::{self, Advice, MapFlags, ProtFlags},
};

use crate::{
    memfd::{self, Seals},
    process::fork_generation,
};

/// An owned range of address space.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; `Region` itself reads and writes nothing.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; the types around it decide who may access the bytes.
unsafe impl Sync for Region {}

impl Region {
    fn new(fd: impl AsFd, prot: ProtFlags) -> io::Result<Self> {
        let len = usize::try_from(memfd::len(&fd)?).map_err(|_| Errno::OVERFLOW)?;
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        // SAFETY: a null hint asks for a range that nothing else occupies.
        let start = unsafe { mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, len })
    }

    fn as_ptr(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the range was mapped by `new` and every borrow of it ends before `self`.
            // It cannot fail for a whole mapping; if it ever did, the range would stay mapped, which is harmless.
            let _ = unsafe { mm::munmap(self.as_ptr(), self.len) };
        }
    }
}

/// A writable mapping of a file that this process has given to nobody; [`crate::memfd::Draft`] sees to that.
#[derive(Debug)]
pub(crate) struct PrivateMap {
    /// Mapped in one process alone. In a forked child of it something else may lie there by now.
    region: ManuallyDrop<Region>,
    /// The [`fork_generation`] of that process.
    generation: u64,
}

impl PrivateMap {
    /// Maps all of `fd`. A forked child does not inherit the mapping, so that it can neither write nor keep the file
    /// from being frozen.
    ///
    /// # Safety
    /// Only this process has the file, and nothing writes it while a borrow of the bytes lives.
    pub(crate) unsafe fn new(fd: impl AsFd) -> io::Result<Self> {
        let region = Region::new(fd, ProtFlags::READ | ProtFlags::WRITE)?;
        if region.len > 0 {
            // SAFETY: the advice changes what fork does with this range, nothing about the bytes.
            unsafe { mm::madvise(region.as_ptr(), region.len, Advice::LinuxDontFork) }?;
        }
        Ok(Self { region: ManuallyDrop::new(region), generation: fork_generation() })
    }

    /// Whether the bytes are there: not in a forked child.
    fn is_here(&self) -> bool {
        self.generation == fork_generation()
    }

    /// The bytes; `None` in a forked child.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        // SAFETY: the range is mapped in this process for as long as `self` lives, and by the contract of `new` nothing
        // but `bytes_mut`, which borrows `self` exclusively, writes it meanwhile.
        self.is_here().then(|| unsafe { std::slice::from_raw_parts(self.region.start.as_ptr(), self.region.len) })
    }

    /// The bytes; `None` in a forked child.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: as in `bytes`; `&mut self` makes this the only access.
        self.is_here().then(|| unsafe { std::slice::from_raw_parts_mut(self.region.start.as_ptr(), self.region.len) })
    }
}

impl Drop for PrivateMap {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: nothing uses it after this.
            unsafe { ManuallyDrop::drop(&mut self.region) };
        }
    }
}

/// A mapping of a frozen file.
#[derive(Debug)]
pub struct SealedMap(Region);

impl SealedMap {
    /// Maps all of `fd`.
    ///
    /// # Errors
    /// `EPERM` unless the file is sealed against shrinking, growing and writing; else as mmap(2).
    pub fn new(fd: impl AsFd) -> io::Result<Self> {
        if !Seals::of(&fd)?.frozen() {
            return Err(Errno::PERM);
        }
        Region::new(fd, ProtFlags::READ).map(Self)
    }

    /// The bytes, which can never change.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped for as long as `self` lives. `new` has seen the seals, which cannot be taken
        // off: no process can write the file, map it writable, or change its length.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}

/// A mapping that any process may write behind our back.
#[derive(Debug)]
pub struct SharedMap {
    region: Region,
    writable: bool,
}

impl SharedMap {
    /// Maps all of `fd` for reading and writing.
    ///
    /// # Errors
    /// `EPERM` unless the file is sealed against shrinking and growing, or if it is frozen; else as mmap(2).
    pub fn writable(fd: impl AsFd) -> io::Result<Self> {
        Self::new(fd, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Maps all of `fd` for reading.
    ///
    /// # Errors
    /// `EPERM` unless the file is sealed against shrinking and growing; else as mmap(2).
    pub fn readable(fd: impl AsFd) -> io::Result<Self> {
        Self::new(fd, ProtFlags::READ)
    }

    fn new(fd: impl AsFd, prot: ProtFlags) -> io::Result<Self> {
        if !Seals::of(&fd)?.fixed_length() {
            return Err(Errno::PERM);
        }
        Ok(Self { region: Region::new(fd, prot)?, writable: prot.contains(ProtFlags::WRITE) })
    }

    /// Its first address, for handing it to a device driver. Nothing but volatile accesses may go there.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.start.as_ptr()
    }

    /// Whether it was mapped for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.region.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.region.len == 0
    }

    /// `count` values of type `T` from byte `offset` on, or `None` if they do not fit or are not aligned.
    pub fn slice<T: Pod>(&self, offset: usize, count: usize) -> Option<SharedSlice<'_, T>> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if offset.checked_add(bytes)? > self.region.len || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: `offset` lies within the mapping or at its end.
        let start = unsafe { self.region.start.add(offset) };
        Some(SharedSlice { start: start.cast(), count, writable: self.writable, map: PhantomData })
    }
}

/// Values in memory that any process may write at any time.
///
/// Every access is one volatile load or store of a value: what is read may be torn between processes if nothing
/// orders them, but it is never undefined. There is no way to get a reference into it.
#[derive(Debug, Clone, Copy)]
pub struct SharedSlice<'a, T> {
    start: NonNull<T>,
    count: usize,
    writable: bool,
    map: PhantomData<&'a SharedMap>,
}

// SAFETY: accesses are volatile and of plain values, from whatever thread.
unsafe impl<T: Pod + Send> Send for SharedSlice<'_, T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Pod + Sync> Sync for SharedSlice<'_, T> {}

impl<T: Pod> SharedSlice<'_, T> {
    /// How many values.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether [`SharedSlice::set`] may be called.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The value at `index` now.
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn get(&self, index: usize) -> T {
        assert!(index < self.count, "index {index} of {} shared values", self.count);
        // SAFETY: in range, aligned (checked by `SharedMap::slice`), mapped for the lifetime `'a`, and every bit
        // pattern is a `T`.
        unsafe { self.start.add(index).read_volatile() }
    }

    /// Stores `value` at `index`.
    ///
    /// # Panics
    /// If `index` is out of range or the mapping is read-only.
    pub fn set(&self, index: usize, value: T) {
        assert!(index < self.count, "index {index} of {} shared values", self.count);
        assert!(self.writable, "this segment was opened for reading");
        // SAFETY: as in `get`, and the mapping is writable.
        unsafe { self.start.add(index).write_volatile(value) }
    }

    /// Loads all values into `out`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to_slice(&self, out: &mut [T]) {
        assert_eq!(out.len(), self.count, "lengths differ");
        for (index, value) in out.iter_mut().enumerate() {
            *value = self.get(index);
        }
    }

    /// Stores all of `values`.
    ///
    /// # Panics
    /// If the lengths differ or the mapping is read-only.
    pub fn copy_from_slice(&self, values: &[T]) {
        assert_eq!(values.len(), self.count, "lengths differ");
        for (index, value) in values.iter().enumerate() {
            self.set(index, *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_slices_stay_inside_and_aligned() {
        let fd = memfd::Draft::create("partywall:test", 64).unwrap().share().unwrap();
        let map = SharedMap::writable(&fd).unwrap();
        assert!(map.slice::<u64>(0, 8).is_some());
        assert!(map.slice::<u64>(0, 9).is_none());
        assert!(map.slice::<u64>(4, 1).is_none(), "unaligned");
        assert!(map.slice::<u64>(64, 0).is_some());
        assert!(map.slice::<u64>(72, 0).is_none());
        assert!(map.slice::<u64>(8, usize::MAX).is_none());
    }

    #[test]
    fn two_mappings_see_each_other() {
        let fd = memfd::Draft::create("partywall:test", 64).unwrap().share().unwrap();
        let (a, b) = (SharedMap::writable(&fd).unwrap(), SharedMap::readable(&fd).unwrap());
        a.slice::<u32>(16, 4).unwrap().copy_from_slice(&[1, 2, 3, 4]);
        let mut seen = [0; 4];
        b.slice::<u32>(16, 4).unwrap().copy_to_slice(&mut seen);
        assert_eq!(seen, [1, 2, 3, 4]);
    }

    #[test]
    #[should_panic(expected = "opened for reading")]
    fn a_read_only_mapping_is_not_written() {
        let fd = memfd::Draft::create("partywall:test", 64).unwrap().share().unwrap();
        SharedMap::readable(&fd).unwrap().slice::<u8>(0, 1).unwrap().set(0, 1);
    }

    #[test]
    fn files_that_could_shrink_are_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(SharedMap::readable(&file).is_err());
        assert!(SealedMap::new(&file).is_err());
    }
}
