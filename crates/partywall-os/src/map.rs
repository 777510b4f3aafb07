//! Mappings of memfds. Each type makes a different assumption about the bytes.
//!
//! | type | who may write the bytes | access |
//! |---|---|---|
//! | [`Draft`](crate::memfd::Draft) | its owner alone: no other process has the file yet | `&mut [u8]` |
//! | [`SealedMap`] | no process: the kernel refuses | `&[u8]` |
//! | [`SharedMap`] | any process, at any time | [`SharedSlice`], by volatile accesses; [`Atomics`], by atomic accesses |
//! | [`BorrowedBlock`](crate::borrow::BorrowedBlock), [`BorrowedBlockMut`](crate::borrow::BorrowedBlockMut) | by agreement, no process; the holder | `&[u8]`; `&mut [u8]` |
#![allow(unsafe_code)]

use std::{
    any::Any,
    ffi::c_void,
    marker::PhantomData,
    mem::ManuallyDrop,
    ops::{Deref, Range},
    os::fd::{AsFd, BorrowedFd},
    panic::AssertUnwindSafe,
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use bytemuck::Pod;
use rustix::{
    io::{self, Errno},
    mm::{self, Advice, MapFlags, ProtFlags},
};

use crate::{
    lock::IgnorePoison,
    memfd::{self, Seals},
    process::fork_generation,
};

/// A range of address space: our own, or that of an owner.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the addresses mapped, if they are not our own. Nothing but a drop uses it, so a panic leaves it as it was.
    owner: Option<AssertUnwindSafe<Arc<dyn Any + Send + Sync>>>,
}

// SAFETY: a mapping belongs to the process, not to a thread; `Region` itself reads and writes nothing.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; the types around it decide who may access the bytes.
unsafe impl Sync for Region {}

impl Region {
    fn new(fd: impl AsFd, prot: ProtFlags) -> io::Result<Self> {
        let len = usize::try_from(memfd::len(&fd)?).map_err(|_| Errno::OVERFLOW)?;
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len, owner: None });
        }
        // SAFETY: a null hint asks for a range that nothing else occupies.
        let start = unsafe { mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, len, owner: None })
    }

    /// Reserves addresses without memory, so that nothing else in the process gets them. Every access ends the process.
    fn reserve(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len, owner: None });
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a null hint asks for a range that nothing else occupies.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, len, owner: None })
    }

    fn as_ptr(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len > 0 && self.owner.is_none() {
            // SAFETY: the range was mapped by `new` or `reserve` and every borrow of it ends before `self`. Unmapping a
            // whole mapping cannot fail; if it ever did, the range would stay mapped, which is harmless.
            let _ = unsafe { mm::munmap(self.as_ptr(), self.len) };
        }
    }
}

/// Returns the lengths of files whose lengths cannot change.
///
/// # Errors
/// `EPERM` unless each file is sealed against shrinking and growing.
fn fixed_lengths(files: &[impl AsFd]) -> io::Result<Vec<usize>> {
    let fixed = |file| match Seals::of(file)?.fixed_length() {
        true => usize::try_from(memfd::len(file)?).map_err(|_| Errno::OVERFLOW),
        false => Err(Errno::PERM),
    };
    files.iter().map(fixed).collect()
}

fn protection(writable: bool) -> ProtFlags {
    if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ }
}

/// A writable mapping of a file that no other process has, which [`crate::memfd::Draft`] guarantees.
#[derive(Debug)]
pub(crate) struct PrivateMap {
    /// Mapped only in the process that made it. In a forked child the addresses may hold something else.
    region: ManuallyDrop<Region>,
    /// The [`fork_generation`] of that process.
    generation: u64,
}

impl PrivateMap {
    /// Maps all of `fd`. A forked child does not inherit the mapping, so it can neither write the file nor keep it from
    /// being frozen.
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

    /// Returns whether this process made the mapping. A forked child does not have it.
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

impl PrivateMap {
    /// Calls `seal` to freeze the file, and keeps the mapping at its address, read-only. Any thread that knows the
    /// addresses can read the bytes at any time; from now on a write faults. `readable` is the same file, opened for
    /// reading.
    ///
    /// # Errors
    /// `EFAULT` in a forked child; as mmap(2); the error of `seal`. The map then stays writable.
    pub(crate) fn freeze(
        self,
        fd: impl AsFd,
        readable: impl AsFd,
        seal: impl FnOnce() -> io::Result<()>,
    ) -> Result<SealedMap, (Option<Self>, Errno)> {
        if !self.is_here() {
            return Err((Some(self), Errno::FAULT));
        }
        if self.region.len == 0 {
            return match seal() {
                Ok(()) => Ok(SealedMap(Region { start: self.region.start, len: 0, owner: None })),
                Err(errno) => Err((Some(self), errno)),
            };
        }
        // SAFETY: the range is one whole mapping of ours, which shows the same bytes of the file before and after.
        // `self` was passed by value, so no borrow of the bytes lives.
        let replace = |prot, fd: BorrowedFd<'_>| unsafe {
            mm::mmap(self.region.as_ptr(), self.region.len, prot, MapFlags::SHARED | MapFlags::FIXED, fd, 0)
        };
        // A mapping through the read-only descriptor does not keep the kernel from sealing the file.
        if let Err(errno) = replace(ProtFlags::READ, readable.as_fd()) {
            return Err((Some(self), errno));
        }
        if let Err(errno) = seal() {
            let restored = replace(ProtFlags::READ | ProtFlags::WRITE, fd.as_fd()).and_then(|at| {
                // SAFETY: as in `new`.
                unsafe { mm::madvise(at, self.region.len, Advice::LinuxDontFork) }
            });
            if restored.is_err() {
                // The range stays mapped, because other code may still use its addresses; nothing owns it any more.
                std::mem::forget(self);
                return Err((None, errno));
            }
            return Err((Some(self), errno));
        }
        let map = SealedMap(Region { start: self.region.start, len: self.region.len, owner: None });
        std::mem::forget(self);
        Ok(map)
    }
}

impl Drop for PrivateMap {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: nothing uses the region after this.
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

    /// Returns the bytes, which can never change.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped for as long as `self` lives. `new` has checked the seals, which cannot be
        // removed: no process can write the file, map it writable, or change its length.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}

/// Files that other processes may write at any time, mapped one after the other in one range of addresses; or memory
/// that an owner has mapped so.
///
/// The range may be longer than the files. Its rest is reserved, and [`SharedMap::extend`] maps further files there. A
/// mapped file keeps its address until the map is dropped.
#[derive(Debug)]
pub struct SharedMap {
    region: Region,
    /// Number of mapped bytes from the start of the region; only grows. Stored (release) by [`Extension::publish`] when
    /// the files are mapped, loaded (acquire) by [`SharedMap::len`] before they are used.
    len: AtomicUsize,
    /// Held by the thread that maps files behind `len`.
    extending: Mutex<()>,
    writable: bool,
    /// The bytes that belong to [`BlockBorrows`](crate::borrow::BlockBorrows).
    reserved: Mutex<Vec<Range<usize>>>,
}

impl SharedMap {
    /// Maps all of `fd` for reading and writing.
    ///
    /// # Errors
    /// As [`SharedMap::extend`].
    pub fn writable(fd: impl AsFd) -> io::Result<Self> {
        Self::whole(fd, true)
    }

    /// Maps all of `fd` for reading.
    ///
    /// # Errors
    /// As [`SharedMap::extend`].
    pub fn readable(fd: impl AsFd) -> io::Result<Self> {
        Self::whole(fd, false)
    }

    /// Maps one file, without room for others: half the system calls of [`SharedMap::new`].
    fn whole(file: impl AsFd, writable: bool) -> io::Result<Self> {
        if !Seals::of(&file)?.fixed_length() {
            return Err(Errno::PERM);
        }
        let region = Region::new(file, protection(writable))?;
        let len = AtomicUsize::new(region.len);
        Ok(Self { region, len, extending: Mutex::new(()), writable, reserved: Mutex::default() })
    }

    /// Maps `files` one after the other, at the beginning of a range of `reserved` bytes. The range is only as long as
    /// the files if they are longer than `reserved`, or if the process lacks the address space for `reserved` bytes.
    ///
    /// # Errors
    /// As [`SharedMap::extend`]; `ENOMEM` if the address space lacks room for the files.
    pub fn new<F: AsFd>(files: impl AsRef<[F]>, reserved: usize, writable: bool) -> io::Result<Self> {
        let files = files.as_ref();
        let lengths = fixed_lengths(files)?;
        let bytes = lengths.iter().try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes)).ok_or(Errno::OVERFLOW)?;
        let region = Region::reserve(reserved.max(bytes)).or_else(|_| Region::reserve(bytes))?;
        let len = AtomicUsize::new(0);
        let map = Self { region, len, extending: Mutex::new(()), writable, reserved: Mutex::default() };
        map.extend_by(files, &lengths)?.publish();
        Ok(map)
    }

    /// Returns memory that `owner` has mapped: `len` bytes from `start` on, in a range of `reserved` bytes.
    ///
    /// # Safety
    /// For as long as `owner` lives, the `len` bytes stay mapped, for writing if `writable`, and no reference to them
    /// exists but those that this crate makes. `start` is aligned to a page, and `len` is at most `reserved`.
    pub unsafe fn of_owner(
        owner: Arc<dyn Any + Send + Sync>,
        start: NonNull<u8>,
        len: usize,
        reserved: usize,
        writable: bool,
    ) -> Self {
        let region = Region { start, len: reserved, owner: Some(AssertUnwindSafe(owner)) };
        Self { region, len: len.into(), extending: Mutex::default(), writable, reserved: Mutex::default() }
    }

    /// Makes further memory that the owner has mapped visible: the map has `len` bytes now.
    ///
    /// # Safety
    /// The map is one of [`SharedMap::of_owner`], whose conditions hold for `len` bytes, and is not longer already.
    pub unsafe fn grow_to(&self, len: usize) {
        self.len.store(len, Ordering::Release);
    }

    /// Returns the first address, to be passed to a device driver. Only volatile accesses may use it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.start.as_ptr()
    }

    /// Returns whether the map is writable.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Maps `files` behind those that are mapped already. They become visible with [`Extension::publish`].
    ///
    /// # Errors
    /// `ENOMEM` if the files do not fit into the reserved range; `EINVAL` if the mapped files end within a page, or a
    /// file other than the last does; `EPERM` unless each file is sealed against shrinking and growing; `EACCES` or
    /// `EPERM` if a file is frozen and the map is writable; `EOPNOTSUPP` if the addresses have an owner; otherwise as
    /// mmap(2). The map is then unchanged.
    pub fn extend<F: AsFd>(&self, files: impl AsRef<[F]>) -> io::Result<Extension<'_>> {
        if self.region.owner.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        let files = files.as_ref();
        self.extend_by(files, &fixed_lengths(files)?)
    }

    /// Maps files of these lengths, which never change, behind those that are mapped already.
    fn extend_by<F: AsFd>(&self, files: &[F], lengths: &[usize]) -> io::Result<Extension<'_>> {
        // A panic under this lock leaves pages behind `len` mapped, which the next extension replaces.
        let turn = self.extending.lock().ignore_poison();
        let prot = protection(self.writable);
        let start = self.len();
        let mut extension = Extension { map: self, start, end: start, _turn: turn };
        for (file, bytes) in files.iter().zip(lengths.iter().copied()) {
            let end = extension.end.checked_add(bytes).filter(|end| *end <= self.region.len).ok_or(Errno::NOMEM)?;
            if bytes > 0 {
                // SAFETY: the addresses belong to our region, by the check above, and lie behind `len`, so no reference
                // to them exists. The kernel refuses an address within a page.
                unsafe {
                    let at = self.region.as_ptr().byte_add(extension.end);
                    mm::mmap(at, bytes, prot, MapFlags::SHARED | MapFlags::FIXED, file, 0)
                }?;
            }
            extension.end = end;
        }
        Ok(extension)
    }

    /// Reserves bytes for a `BlockBorrows` until [`take_back`](Self::take_back). Returns false if another
    /// `BlockBorrows` has some of them.
    pub(crate) fn lend(&self, bytes: Range<usize>) -> bool {
        let mut reserved = self.reserved.lock().ignore_poison();
        let is_free = reserved.iter().all(|other| bytes.end <= other.start || other.end <= bytes.start);
        if is_free {
            reserved.push(bytes);
        }
        is_free
    }

    /// Ends a reservation made by [`lend`](Self::lend).
    pub(crate) fn take_back(&self, bytes: &Range<usize>) {
        self.reserved.lock().ignore_poison().retain(|other| other != bytes);
    }

    /// Returns the current length in bytes.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Returns whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the length in bytes that the map can grow to.
    pub fn reserved(&self) -> usize {
        self.region.len
    }

    /// Returns `count` values of type `T` from byte `offset` on, or `None` if they do not fit or are not aligned.
    pub fn slice<T: Pod>(&self, offset: usize, count: usize) -> Option<SharedSlice<'_, T>> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if offset.checked_add(bytes)? > self.len() || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: `offset` lies within the mapping or at its end, and the mapping does not shrink while `self` lives.
        let start = unsafe { self.region.start.add(offset) };
        Some(SharedSlice { start: start.cast(), count, writable: self.writable, map: PhantomData })
    }

    /// Copies bytes into the map from byte `offset` on, by stores of whole words where the addresses are aligned;
    /// `None` if they do not fit.
    ///
    /// # Panics
    /// If the map is read-only.
    pub fn write_bytes(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let (head, words, tail) = self.words(offset, bytes.len())?;
        let (first, rest) = bytes.split_at(head.len());
        let (middle, last) = rest.as_chunks();
        head.copy_from_slice(first);
        for (index, word) in middle.iter().enumerate() {
            words.set(index, u64::from_ne_bytes(*word));
        }
        tail.copy_from_slice(last);
        Some(())
    }

    /// Copies bytes out of the map from byte `offset` on, by loads of whole words where the addresses are aligned;
    /// `None` if the map has not as many.
    pub fn read_bytes(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        let (head, words, tail) = self.words(offset, out.len())?;
        let (first, rest) = out.split_at_mut(head.len());
        let (middle, last) = rest.as_chunks_mut();
        head.copy_to_slice(first);
        for (index, word) in middle.iter_mut().enumerate() {
            *word = words.get(index).to_ne_bytes();
        }
        tail.copy_to_slice(last);
        Some(())
    }

    /// Returns `len` bytes from byte `offset` on as the bytes before the first aligned address, whole words, and the
    /// bytes after them.
    fn words(
        &self,
        offset: usize,
        len: usize,
    ) -> Option<(SharedSlice<'_, u8>, SharedSlice<'_, u64>, SharedSlice<'_, u8>)> {
        const WORD: usize = size_of::<u64>();
        let aligned = offset.checked_next_multiple_of(WORD)?;
        let head = len.min(aligned - offset);
        let words = (len - head) / WORD;
        let tail = (len - head) % WORD;
        self.slice::<u8>(offset, len)?;
        let start = if words == 0 { 0 } else { aligned };
        Some((self.slice(offset, head)?, self.slice(start, words)?, self.slice(offset + len - tail, tail)?))
    }

    /// Returns `count` values of type `T` from byte `offset` on, which several processes may use at once; `None` if
    /// they do not fit, are not aligned, or the map is read-only.
    pub fn atomics<T: Atomics>(&self, offset: usize, count: usize) -> Option<&[T]> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if !self.writable || offset.checked_add(bytes)? > self.len() || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        if bytes == 0 {
            return Some(&[]); // An empty map has no address.
        }
        // A region begins at a page, so a type with a larger alignment than a page would not be aligned.
        const { assert!(align_of::<T>() <= 4096) };
        // SAFETY: in range and aligned, by the checks above; mapped for writing while `self` lives. By the contract of
        // `Atomics` any bytes are a valid `T`, and it consists of atomics alone, so it may change at any time.
        Some(unsafe { std::slice::from_raw_parts(self.region.start.add(offset).cast().as_ptr(), count) })
    }
}

/// An array in a map, which keeps the map alive. Checked once, unlike the slices of [`SharedMap::atomics`].
#[derive(Debug)]
pub struct SharedArray<T> {
    start: NonNull<T>,
    count: usize,
    map: Arc<SharedMap>,
}

// SAFETY: it is a `&[T]` that keeps the map it points into alive, and any thread may use a `T` at any time.
unsafe impl<T: Atomics> Send for SharedArray<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Atomics> Sync for SharedArray<T> {}

impl SharedMap {
    /// Returns `count` values of type `T` from byte `offset` on; `None` in the same cases as [`SharedMap::atomics`].
    pub fn array<T: Atomics>(self: &Arc<Self>, offset: usize, count: usize) -> Option<SharedArray<T>> {
        let start = NonNull::from(self.atomics::<T>(offset, count)?).cast();
        Some(SharedArray { start, count, map: self.clone() })
    }
}

impl<T> SharedArray<T> {
    /// Returns the map that the values are in.
    pub fn memory(&self) -> &Arc<SharedMap> {
        &self.map
    }
}

/// The same values, not copies of them.
impl<T> Clone for SharedArray<T> {
    fn clone(&self) -> Self {
        Self { start: self.start, count: self.count, map: self.map.clone() }
    }
}

impl<T: Atomics> Deref for SharedArray<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `atomics` returned this slice, and its map is still alive; a map neither moves nor shrinks.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

/// A type that consists of integer atomics alone, and may therefore be borrowed while any process writes to it.
///
/// # Safety
/// The type has no other fields, no padding and no drop glue, and its `repr` fixes the layout.
pub unsafe trait Atomics: Sync {}

// SAFETY: it is an integer atomic.
unsafe impl Atomics for AtomicU32 {}
// SAFETY: it is an integer atomic.
unsafe impl Atomics for AtomicU64 {}
// SAFETY: an array has no padding.
unsafe impl<T: Atomics, const N: usize> Atomics for [T; N] {}

/// Files that are mapped behind the others and are not visible yet. Dropping it unmaps them.
#[derive(Debug)]
pub struct Extension<'a> {
    map: &'a SharedMap,
    start: usize,
    end: usize,
    _turn: MutexGuard<'a, ()>,
}

impl Extension<'_> {
    /// Makes the files part of the map.
    pub fn publish(mut self) {
        self.map.len.store(self.end, Ordering::Release);
        self.start = self.end;
    }
}

impl Drop for Extension<'_> {
    fn drop(&mut self) {
        if self.start < self.end {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: these pages of our region lie behind `len`, so no reference to them exists. They become a mere
            // reservation again. If the kernel lacks memory even for that, the files stay mapped until the region is
            // dropped.
            let _ = unsafe {
                let at = self.map.region.as_ptr().byte_add(self.start);
                mm::mmap_anonymous(at, self.end - self.start, ProtFlags::empty(), flags)
            };
        }
    }
}

/// Values in memory that any process may write at any time.
///
/// Every access is one volatile load or store of a value. Without an order between processes a value may be torn, but
/// an access is never undefined behaviour. No reference into the memory exists.
#[derive(Debug, Clone, Copy)]
pub struct SharedSlice<'a, T> {
    start: NonNull<T>,
    count: usize,
    writable: bool,
    map: PhantomData<&'a SharedMap>,
}

// SAFETY: accesses are volatile and of plain values, which any thread may make.
unsafe impl<T: Pod + Send> Send for SharedSlice<'_, T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Pod + Sync> Sync for SharedSlice<'_, T> {}

impl<T: Pod> SharedSlice<'_, T> {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether the slice is empty.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether [`SharedSlice::set`] may be called.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Loads the value at `index`.
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
    fn memory_of_an_owner_stays_and_grows_with_it() {
        let page = rustix::param::page_size();
        let owner = Arc::new(SharedMap::new([shared(page as u64)], 4 * page, true).unwrap());
        let start = NonNull::new(owner.as_ptr()).unwrap();
        // SAFETY: the owner keeps its map, which nothing else uses.
        let map = unsafe { SharedMap::of_owner(owner.clone(), start, page, 4 * page, true) };
        assert_eq!(map.extend([shared(page as u64)]).unwrap_err(), Errno::OPNOTSUPP);
        owner.extend([shared(page as u64)]).unwrap().publish();
        // SAFETY: the owner has just mapped as much.
        unsafe { map.grow_to(2 * page) };
        map.slice::<u32>(page - 4, 2).unwrap().copy_from_slice(&[1, 2]);
        assert_eq!((map.len(), map.reserved()), (2 * page, 4 * page));
        let again = Arc::downgrade(&owner);
        drop(owner);
        assert_eq!(again.upgrade().unwrap().slice::<u32>(page, 1).unwrap().get(0), 2);
        drop(map);
        assert!(again.upgrade().is_none());
    }

    #[test]
    fn bytes_are_written_and_read_at_any_offset() {
        let map = SharedMap::writable(shared(64)).unwrap();
        let bytes: Vec<u8> = (1..=64).collect();
        for offset in 0..=64 {
            for len in 0..=64 - offset {
                map.slice(0, 64).unwrap().copy_from_slice(&[0_u8; 64]);
                map.write_bytes(offset, &bytes[..len]).unwrap();
                let mut seen = [0; 64];
                map.slice(0, 64).unwrap().copy_to_slice(&mut seen);
                let expected = |at| if at >= offset && at < offset + len { bytes[at - offset] } else { 0 };
                assert_eq!(seen, std::array::from_fn(expected), "{len} bytes at {offset}");
                let mut read = [0; 64];
                map.read_bytes(offset, &mut read[..len]).unwrap();
                assert_eq!(read[..len], bytes[..len], "{len} bytes at {offset}");
            }
            assert_eq!(map.write_bytes(offset, &[1; 65][offset..]), None);
            assert_eq!(map.read_bytes(offset, &mut [0; 65][offset..]), None);
        }
        assert_eq!(map.write_bytes(usize::MAX, &[1]), None);
        assert_eq!(map.read_bytes(usize::MAX, &mut [0]), None);
    }

    #[test]
    fn two_mappings_see_each_other() {
        let fd = memfd::Draft::create("partywall:test", 64).unwrap().share().unwrap();
        let a = SharedMap::writable(&fd).unwrap();
        let b = SharedMap::readable(&fd).unwrap();
        a.slice::<u32>(16, 4).unwrap().copy_from_slice(&[1, 2, 3, 4]);
        let mut seen = [0; 4];
        b.slice::<u32>(16, 4).unwrap().copy_to_slice(&mut seen);
        assert_eq!(seen, [1, 2, 3, 4]);
    }

    fn shared(bytes: u64) -> std::os::fd::OwnedFd {
        memfd::Draft::create("partywall:test", bytes).unwrap().share().unwrap()
    }

    #[test]
    fn extension_appends_files_and_keeps_addresses() {
        let page = rustix::param::page_size();
        let first = shared(page as u64);
        let second = shared(2 * page as u64);
        let map = SharedMap::new([&first], 8 * page, true).unwrap();
        let before = map.slice::<u32>(0, page / 4).unwrap();
        before.set(0, 7);
        assert!(map.slice::<u32>(page, 1).is_none());
        map.extend([&second]).unwrap().publish();
        assert_eq!((map.len(), map.reserved(), before.get(0)), (3 * page, 8 * page, 7));
        // One slice over both.
        map.slice::<u32>(page - 4, 2).unwrap().copy_from_slice(&[1, 2]);
        assert_eq!(SharedMap::readable(&first).unwrap().slice::<u32>(page - 4, 1).unwrap().get(0), 1);
        assert_eq!(SharedMap::readable(&second).unwrap().slice::<u32>(0, 1).unwrap().get(0), 2);
    }

    #[test]
    fn unpublished_extension_leaves_nothing() {
        let page = rustix::param::page_size();
        let map = SharedMap::new([shared(page as u64)], 4 * page, true).unwrap();
        let other = shared(page as u64);
        let frozen = memfd::frozen("partywall:test", &vec![0; page]).unwrap();
        drop(map.extend([&other]).unwrap());
        assert_eq!(map.len(), page);
        // The second of two files is refused, so the first is unmapped again.
        assert_eq!(map.extend([&other, &frozen]).unwrap_err(), Errno::ACCESS);
        assert_eq!(map.extend([shared(4 * page as u64)]).unwrap_err(), Errno::NOMEM);
        assert_eq!(map.len(), page);
        map.extend([&other]).unwrap().publish();
        map.slice::<u8>(page, 1).unwrap().set(0, 9);
        assert_eq!(SharedMap::readable(&other).unwrap().slice::<u8>(0, 1).unwrap().get(0), 9);
        // Nothing can follow a file that ends within a page.
        map.extend([shared(10)]).unwrap().publish();
        assert_eq!(map.extend([shared(10)]).unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn map_works_without_a_reservation() {
        let map = SharedMap::new([shared(10)], usize::MAX / 2, false).unwrap();
        assert_eq!((map.len(), map.reserved()), (10, 10));
    }

    #[test]
    #[should_panic(expected = "opened for reading")]
    fn read_only_mapping_is_not_written() {
        let fd = memfd::Draft::create("partywall:test", 64).unwrap().share().unwrap();
        SharedMap::readable(&fd).unwrap().slice::<u8>(0, 1).unwrap().set(0, 1);
    }

    #[test]
    fn part_keeps_its_mapping() {
        let file = shared(64);
        let map = Arc::new(SharedMap::writable(&file).unwrap());
        let array = map.array::<AtomicU64>(8, 7).unwrap();
        assert!(map.array::<AtomicU64>(8, 8).is_none() && map.array::<AtomicU64>(4, 1).is_none());
        assert!(map.array::<AtomicU64>(64, 0).unwrap().is_empty());
        assert!(Arc::new(SharedMap::readable(&file).unwrap()).array::<AtomicU64>(8, 7).is_none());
        drop(map);
        array[6].store(7, Ordering::Relaxed);
        let other = SharedMap::writable(&file).unwrap();
        assert_eq!(other.atomics::<AtomicU64>(56, 1).unwrap()[0].load(Ordering::Relaxed), 7);
    }

    #[test]
    fn atomics_are_borrowed_only_from_writable_memory() {
        let fd = memfd::Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        let map = SharedMap::writable(&fd).unwrap();
        let words = map.atomics::<[AtomicU64; 8]>(64, 63).unwrap();
        words[62][7].store(9, Ordering::Relaxed);
        assert_eq!(map.slice::<u64>(4088, 1).unwrap().get(0), 9);
        assert!(map.atomics::<AtomicU64>(4, 1).is_none(), "not aligned");
        assert!(map.atomics::<[AtomicU64; 8]>(64, 64).is_none(), "past the end");
        assert!(map.atomics::<[AtomicU64; 8]>(64, usize::MAX / 8).is_none());
        assert_eq!(map.atomics::<AtomicU64>(4096, 0).unwrap().len(), 0);
        assert!(SharedMap::readable(&fd).unwrap().atomics::<AtomicU32>(0, 1).is_none(), "not writable");
    }

    #[test]
    fn files_that_could_shrink_are_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(SharedMap::readable(&file).is_err());
        assert!(SealedMap::new(&file).is_err());
    }
}
