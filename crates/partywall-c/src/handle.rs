//! What C holds in place of pointers.
//!
//! A handle has the type of a pointer, so that the compiler of the caller keeps the kinds of handles apart, but it is a
//! number: the kind (8 bits), a generation (32 bits) and the index of a cell (24 bits) in a table of that kind. A cell
//! contains the number of the handle of its object; its generation changes when the object is closed. Cells are never
//! freed. So a null handle, a closed one, one of another kind and any other number are found out by reading memory of
//! this library alone.
//!
//! Generations begin at a number that differs between copies of the library in one process, so that a handle of
//! another copy is found out, too.

use std::{
    cell::{Cell, UnsafeCell},
    collections::BTreeSet,
    marker::PhantomData,
    mem::MaybeUninit,
    ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicPtr, AtomicU64, Ordering},
    },
};

use crate::{argument, error::Failure};

const INDEX_BITS: u32 = 24;
const KIND_SHIFT: u32 = 56;
/// The cells in the table itself, whose addresses are found without a load. Each chunk of further cells doubles them.
const FIRST: usize = 32;
const CHUNKS: usize = (INDEX_BITS - FIRST.trailing_zeros()) as usize;
/// A bit of the index. A cell without an object contains the number of its last handle with this bit inverted, which
/// leads to another cell, so no handle that leads to this one is equal to it.
const CLOSED: u64 = 1;

/// An object that C holds by a handle.
pub(crate) trait Object: Send + Sized + 'static {
    /// What messages call it.
    const NAME: &'static str;
    /// The kind in the handle; never 0.
    const KIND: u8;
    /// The type of the handle in C.
    type Handle;

    /// Returns the table of its kind.
    fn table() -> &'static Table<Self>;

    /// Returns the index of a free cell that this thread keeps for its next object, plus one; 0 for none.
    fn spare() -> &'static std::thread::LocalKey<Spare<Self>>;
}

/// Makes a type an [`Object`].
macro_rules! object {
    ($type:ty, $handle:ty, $kind:literal, $name:literal) => {
        impl $crate::handle::Object for $type {
            const NAME: &'static str = $name;
            const KIND: u8 = $kind;
            type Handle = $handle;

            #[inline]
            fn table() -> &'static $crate::handle::Table<Self> {
                static TABLE: $crate::handle::Table<$type> = $crate::handle::Table::new();
                &TABLE
            }

            #[inline]
            fn spare() -> &'static std::thread::LocalKey<$crate::handle::Spare<Self>> {
                thread_local! {
                    static SPARE: $crate::handle::Spare<$type> = const { $crate::handle::Spare::none() };
                }
                &SPARE
            }
        }
    };
}
pub(crate) use object;

/// The cells of one kind.
pub(crate) struct Table<T> {
    first: [Slot<T>; FIRST],
    chunks: [AtomicPtr<Slot<T>>; CHUNKS],
    free: Free,
}

/// The free cells of a table. Its functions are the same for all kinds.
struct Free(Mutex<FreeCells>);

struct FreeCells {
    /// In a set, which begins as zero bytes: otherwise the cells of the table would take room in the library's file.
    put_back: BTreeSet<u32>,
    /// How many cells were ever used.
    used: u32,
}

struct Slot<T> {
    /// The handle of the object; without one that of the last object, with [`CLOSED`] inverted; 0 before the first.
    handle: AtomicU64,
    object: UnsafeCell<MaybeUninit<T>>,
}

/// A free cell that a thread keeps, so that objects that come and go take no lock.
pub(crate) struct Spare<T: Object> {
    /// The index plus one.
    cell: Cell<u32>,
    of: PhantomData<fn(T)>,
}

// SAFETY: an object is only reached through its handle, and `T` is `Send`. What several threads may do with one handle
// at a time is part of the contract of each function in the header.
unsafe impl<T: Send> Sync for Table<T> {}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self {
            first: [const { Slot::new() }; FIRST],
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            free: Free(Mutex::new(FreeCells { put_back: BTreeSet::new(), used: 0 })),
        }
    }

    #[inline]
    fn slot(&self, index: u32) -> Option<&Slot<T>> {
        self.first.get(index as usize).or_else(|| self.further(index))
    }

    /// Returns a cell of a chunk.
    #[cold]
    fn further(&self, index: u32) -> Option<&Slot<T>> {
        let (chunk, offset) = position(index);
        let cells = self.chunks.get(chunk)?.load(Ordering::Acquire);
        // SAFETY: a chunk that is stored has `FIRST << chunk` initialised cells and is never freed; `position` returns
        // an offset below that.
        (!cells.is_null()).then(|| unsafe { &*cells.add(offset) })
    }

    /// Makes the chunk of a cell if it is the first there.
    fn make_room(&self, index: u32) -> Result<(), Failure> {
        if (index as usize) < FIRST {
            return Ok(());
        }
        let (chunk, _) = position(index);
        let Some(cells) = self.chunks.get(chunk) else { return Err(Failure::too_many_handles()) };
        if cells.load(Ordering::Relaxed).is_null() {
            let made: Box<[Slot<T>]> = (0..FIRST << chunk).map(|_| Slot::new()).collect();
            // Never freed, so that a handle that is not valid any more can be found out.
            cells.store(Box::leak(made).as_mut_ptr(), Ordering::Release);
        }
        Ok(())
    }
}

impl Free {
    /// Returns a free cell. Calls `make_room` under the lock for one that was never used.
    #[cold]
    fn take(&self, make_room: &dyn Fn(u32) -> Result<(), Failure>) -> Result<u32, Failure> {
        let mut cells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = cells.put_back.pop_first() {
            return Ok(index);
        }
        make_room(cells.used)?;
        cells.used += 1;
        Ok(cells.used - 1)
    }

    #[cold]
    fn put_back(&self, index: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).put_back.insert(index);
    }
}

impl<T> Slot<T> {
    const fn new() -> Self {
        Self { handle: AtomicU64::new(0), object: UnsafeCell::new(MaybeUninit::uninit()) }
    }
}

/// Returns the chunk of a cell that is not among the first, and its offset in it.
fn position(index: u32) -> (usize, usize) {
    let chunk = (index.ilog2() - FIRST.ilog2()) as usize;
    (chunk, index as usize - (FIRST << chunk))
}

/// Returns the generation before the first, which differs between copies of the library in one process. It is far from
/// those of other copies, so that the generations of a cell that is used again and again do not reach them soon.
#[cold]
fn first_generation() -> u32 {
    static HERE: u8 = 0;
    ((&raw const HERE as usize >> 4) as u32).wrapping_mul(0x9E37_79B1)
}

impl<T: Object> Spare<T> {
    pub(crate) const fn none() -> Self {
        Self { cell: Cell::new(0), of: PhantomData }
    }
}

impl<T: Object> Drop for Spare<T> {
    fn drop(&mut self) {
        if let Some(index) = self.cell.get().checked_sub(1) {
            T::table().free.put_back(index);
        }
    }
}

/// Stores an object and returns its handle.
#[inline]
pub(crate) fn insert<T: Object>(object: T) -> Result<*mut T::Handle, Failure> {
    // The thread may be ending, after its spare cell was given back.
    let spare = T::spare().try_with(|spare| spare.cell.replace(0)).unwrap_or(0);
    let index = match spare.checked_sub(1) {
        Some(index) => index,
        None => T::table().free.take(&|index| T::table().make_room(index))?,
    };
    let slot = T::table().slot(index).expect("a vacant cell exists");
    // SAFETY: the cell is vacant and this thread alone has its index.
    unsafe { (*slot.object.get()).write(object) };
    let before = match slot.handle.load(Ordering::Relaxed) {
        0 => first_generation(),
        closed => (closed >> INDEX_BITS) as u32,
    };
    let generation = u64::from(before.wrapping_add(1));
    let number = u64::from(T::KIND) << KIND_SHIFT | generation << INDEX_BITS | u64::from(index);
    slot.handle.store(number, Ordering::Release);
    Ok(ptr::without_provenance_mut(number as usize))
}

/// Makes an object and stores its handle, after a check that there is a place for it.
///
/// # Safety
/// `out` is null or may be written.
#[inline]
pub(crate) unsafe fn give<T: Object>(
    out: *mut *mut T::Handle,
    make: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe { give_some(out, || make().map(Some)) }
}

/// As [`give`]; stores null for `None`.
///
/// # Safety
/// As [`give`].
#[inline]
pub(crate) unsafe fn give_some<T: Object>(
    out: *mut *mut T::Handle,
    make: impl FnOnce() -> Result<Option<T>, Failure>,
) -> Result<(), Failure> {
    argument::check_out(out, T::NAME)?;
    let handle = make()?.map_or(Ok(ptr::null_mut()), insert)?;
    // SAFETY: the caller's promise.
    unsafe { argument::store(out, handle, T::NAME) }
}

/// Returns the cell of a handle, its number and the index of the cell, if it has the right kind and its object is not
/// closed.
#[inline]
fn find<T: Object>(handle: *const T::Handle) -> Result<(&'static Slot<T>, u64, u32), Failure> {
    let number = handle.addr() as u64;
    let index = (number & ((1 << INDEX_BITS) - 1)) as u32;
    // The kind and the generation are parts of the number.
    if let Some(slot) = T::table().slot(index)
        && slot.handle.load(Ordering::Acquire) == number
        && number != 0
    {
        return Ok((slot, number, index));
    }
    Err(Failure::handle::<T>(handle.is_null()))
}

/// Returns the object of a handle.
///
/// # Safety
/// No other thread closes the handle during `'a`, or has the object by [`get_mut`].
#[inline]
pub(crate) unsafe fn get<'a, T: Object>(handle: *const T::Handle) -> Result<&'a T, Failure> {
    let (slot, ..) = find::<T>(handle)?;
    // SAFETY: the cell contains the handle, and so an object; the caller's promise keeps it there.
    Ok(unsafe { (*slot.object.get()).assume_init_ref() })
}

/// Returns the object of a handle for a change.
///
/// # Safety
/// No other thread uses the handle during `'a`.
#[inline]
pub(crate) unsafe fn get_mut<'a, T: Object>(handle: *mut T::Handle) -> Result<&'a mut T, Failure> {
    let (slot, ..) = find::<T>(handle)?;
    // SAFETY: as in `get`, and by the caller's promise nobody else refers to the object.
    Ok(unsafe { (*slot.object.get()).assume_init_mut() })
}

/// Closes a handle for the caller, who alone uses the object from then on and then makes the cell free. Of several
/// threads one gets it.
#[inline]
fn claim<T: Object>(handle: *mut T::Handle) -> Result<(&'static Slot<T>, u64, u32), Failure> {
    let (slot, number, index) = find::<T>(handle)?;
    match slot.handle.compare_exchange(number, number ^ CLOSED, Ordering::Acquire, Ordering::Relaxed) {
        Ok(_) => Ok((slot, number, index)),
        Err(_) => Err(Failure::handle::<T>(false)),
    }
}

/// Takes the object of a handle, which is closed from then on.
#[inline]
pub(crate) fn take<T: Object>(handle: *mut T::Handle) -> Result<T, Failure> {
    let (slot, _, index) = claim::<T>(handle)?;
    // SAFETY: the cell contained the handle, and so an object, and this thread alone has closed it.
    let object = unsafe { (*slot.object.get()).assume_init_read() };
    free::<T>(index);
    Ok(object)
}

/// Closes a handle and hands its object to `consumer`. If that returns it with a failure, the handle is open again.
#[inline]
pub(crate) fn consume<T: Object, R>(
    handle: *mut T::Handle,
    consumer: impl FnOnce(T) -> Result<R, (Failure, T)>,
) -> Result<R, Failure> {
    let (slot, number, index) = claim::<T>(handle)?;
    // SAFETY: as in `take`. Nobody else has the index of the cell until it is free, which it does not become if
    // `consumer` panics.
    let object = unsafe { (*slot.object.get()).assume_init_read() };
    match consumer(object) {
        Ok(result) => {
            free::<T>(index);
            Ok(result)
        }
        Err((failure, object)) => {
            // SAFETY: as above; the object was moved out.
            unsafe { (*slot.object.get()).write(object) };
            slot.handle.store(number, Ordering::Release);
            Err(failure)
        }
    }
}

/// Closes a handle: uses its object a last time and drops it, both in its cell, because large objects take longer to
/// move than to release. Null is no handle, and nothing happens.
#[inline]
pub(crate) fn finish<T: Object>(
    handle: *mut T::Handle,
    last: impl FnOnce(&mut T) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if handle.is_null() {
        return Ok(());
    }
    let (slot, _, index) = claim::<T>(handle)?;
    // SAFETY: as in `take`. Nobody else has the index of the cell until it is free, which it does not become if `last`
    // or the drop panics.
    let object = unsafe { (*slot.object.get()).assume_init_mut() };
    let done = last(object);
    // SAFETY: as above; nothing uses the object after this.
    unsafe { ptr::drop_in_place(object) };
    free::<T>(index);
    done
}

/// Drops the object of a handle; null is no handle, and nothing happens.
pub(crate) fn close<T: Object>(handle: *mut T::Handle) -> Result<(), Failure> {
    finish::<T>(handle, |_| Ok(()))
}

/// Makes a cell free for the next object.
#[inline]
fn free<T: Object>(index: u32) {
    let is_spare = T::spare().try_with(|spare| {
        let has_none = spare.cell.get() == 0;
        if has_none {
            spare.cell.set(index + 1);
        }
        has_none
    });
    if !is_spare.unwrap_or(false) {
        T::table().free.put_back(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing(u64);
    struct Other;
    object!(Thing, u8, 200, "thing");
    object!(Other, u16, 201, "other");

    // Holds 368.
    #[test]
    fn closed_and_foreign_handles_are_found_out() {
        let handle = insert(Thing(7)).unwrap();
        // SAFETY: no other thread has the handle.
        unsafe {
            assert_eq!(get::<Thing>(handle).map(|thing| thing.0).ok(), Some(7));
            get_mut::<Thing>(handle).ok().unwrap().0 = 8;
        }
        assert_eq!(take::<Thing>(handle).ok().map(|thing| thing.0), Some(8));
        assert!(take::<Thing>(handle).is_err(), "it is closed");
        let again = insert(Thing(9)).unwrap();
        assert_ne!(handle, again, "the cell is used again, with another generation");
        // SAFETY: as above.
        unsafe { assert!(get::<Thing>(handle).is_err() && get::<Thing>(again).is_ok()) };
        assert!(take::<Other>(again.cast()).is_err(), "it is of another kind");
        assert!(take::<Thing>(ptr::without_provenance_mut(1)).is_err());
        assert!(take::<Thing>(&raw mut *Box::new(1_u8)).is_err());
        assert!(take::<Thing>(ptr::null_mut()).is_err());
        assert!(close::<Thing>(ptr::null_mut()).is_ok(), "as free() does");
        assert!(close::<Thing>(again).is_ok());
    }

    #[test]
    fn many_handles_are_distinct() {
        let all: Vec<_> = (0..1000).map(|n| insert(Thing(n)).unwrap()).collect();
        for (n, handle) in (0..).zip(all) {
            assert_eq!(take::<Thing>(handle).ok().map(|thing| thing.0), Some(n));
        }
        std::thread::spawn(|| close::<Thing>(insert(Thing(1)).unwrap())).join().unwrap().unwrap();
    }

    #[test]
    fn cells_have_one_position_each() {
        assert_eq!(position(32), (0, 0));
        assert_eq!(position(63), (0, 31));
        assert_eq!(position(64), (1, 0));
        assert_eq!(position((1 << INDEX_BITS) - 1).0, CHUNKS - 1);
    }
}
