//! Heaps: GPU memory for the allocators of torch and cupy, shareable from its birth.
//!
//! torch calls C functions by their addresses, without data of the caller, on any thread and without the GIL. Each pool
//! of torch therefore has a *slot*, and each slot an allocating function of its own, which looks up the slot's heap. An
//! address is enough to free a block, so one function does that for all pools. None of them takes the GIL or asks the
//! broker.
#![allow(unsafe_code)] // symbols that torch finds by their names

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{Arc, Mutex},
};

use partywall::Place;
use partywall_os::{lock::IgnorePoison, per_process::PerProcess};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::errors::{Raise, too_many_torch_pools};

/// GPU memory for an allocator of another library.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Heap {
    inner: partywall::Heap,
    /// Why torch's last allocation was refused.
    refusal: Arc<Mutex<Option<String>>>,
    /// The slot, once torch allocates here.
    slot: Mutex<Option<usize>>,
}

/// A heap from which a pool of torch allocates.
#[derive(Clone)]
struct Slot {
    heap: partywall::Heap,
    refusal: Arc<Mutex<Option<String>>>,
}

/// The slots that are taken. A forked child has none, because CUDA does not work there.
static SLOTS: PerProcess<[Option<Slot>; NAMES.len()]> = PerProcess::new();

/// torch's object for the functions of each slot, once the slot was used. Never dropped: torch frees blocks through it
/// after its pool is gone, also at the end of the interpreter.
static ALLOCATORS: PerProcess<[Option<Py<PyAny>>; NAMES.len()]> = PerProcess::new();

impl Heap {
    /// Creates a heap on a GPU.
    pub(crate) fn create(
        py: Python<'_>,
        domain: &partywall::Domain,
        name: &str,
        place: Place,
        limit: u64,
    ) -> PyResult<Self> {
        let gpu = place.gpu().ok_or_else(|| PyValueError::new_err(format!("a pool is on a GPU, not on {place}")))?;
        let inner = py.detach(|| domain.heap(name, gpu, limit)).or_raise(py)?;
        Ok(Self { inner, refusal: Arc::default(), slot: Mutex::default() })
    }

    /// Returns the heap's slot. Takes one if it has none.
    fn slot(&self, py: Python<'_>) -> PyResult<usize> {
        let mut slot = self.slot.lock().ignore_poison();
        if let Some(taken) = *slot {
            return Ok(taken);
        }
        *slot = take_slot(Slot { heap: self.inner.clone(), refusal: self.refusal.clone() });
        // No Python runs under the lock of the slots, for which torch waits under locks of its own.
        slot.ok_or_else(|| too_many_torch_pools(py, NAMES.len()))
    }
}

/// Puts a heap into a free slot, if there is one.
fn take_slot(slot: Slot) -> Option<usize> {
    let mut slots = SLOTS.lock();
    let free = slots.iter().position(Option::is_none)?;
    slots[free] = Some(slot);
    Some(free)
}

#[pymethods]
impl Heap {
    /// The most bytes that it takes from the GPU.
    #[getter]
    fn limit(&self) -> u64 {
        self.inner.limit()
    }

    /// The bytes that it has taken from the GPU.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> u64 {
        // An allocation on another thread may wait for the GPU under the lock.
        py.detach(|| self.inner.bytes())
    }

    /// Allocates a block, and returns its address.
    fn allocate(&self, py: Python<'_>, nbytes: u64) -> PyResult<u64> {
        py.detach(|| self.inner.allocate(nbytes)).or_raise(py)
    }

    /// Frees a block of any heap.
    #[staticmethod]
    fn free(py: Python<'_>, address: u64) {
        py.detach(|| _ = partywall::Heap::free(address));
    }

    /// Returns whether an address lies in a block of any heap.
    #[staticmethod]
    fn contains(address: u64) -> bool {
        partywall::Heap::contains(address)
    }

    /// Returns torch's object for the functions that allocate here. `make` makes it from their names in this module's
    /// file.
    fn torch_allocator(&self, py: Python<'_>, make: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let slot = self.slot(py)?;
        let known = ALLOCATORS.lock()[slot].as_ref().map(|known| known.clone_ref(py));
        if let Some(known) = known {
            return Ok(known);
        }
        // Only this heap has the slot. torch's code runs without the lock.
        let made = make.call1((NAMES[slot], "partywall_torch_free"))?.unbind();
        ALLOCATORS.lock()[slot] = Some(made.clone_ref(py));
        Ok(made)
    }

    /// Returns why torch's last allocation was refused, once.
    fn take_refusal(&self) -> Option<String> {
        self.refusal.lock().ignore_poison().take()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.get_mut().ignore_poison().take() {
            // The lock is released before the heap is dropped.
            let taken = SLOTS.lock()[slot].take();
            drop(taken);
        }
    }
}

/// Allocates a block for torch. Returns null if that fails, which torch raises as `OutOfMemoryError`.
fn allocate(slot: usize, bytes: isize, device: c_int) -> *mut c_void {
    let Some(Slot { heap, refusal }) = SLOTS.lock()[slot].clone() else { return ptr::null_mut() };
    let ordinal = heap.gpu().context().device().ordinal();
    let allocated = match (u32::try_from(device), u64::try_from(bytes)) {
        (Ok(device), Ok(bytes)) if device == ordinal => heap.allocate(bytes).map_err(|error| {
            let advice = error.advice_in(partywall::Language::Python);
            format!("{error}\n{advice}")
        }),
        _ => Err(format!(
            "pool {:?} is on cuda:{ordinal}, and cannot allocate on cuda:{device}\ncreate a pool there",
            heap.name()
        )),
    };
    match allocated {
        Ok(address) => address as *mut c_void,
        Err(why) => {
            *refusal.lock().ignore_poison() = Some(why);
            ptr::null_mut()
        }
    }
}

/// Frees a block of any pool of torch. torch has finished with it, but the GPU need not have.
#[unsafe(no_mangle)]
extern "C" fn partywall_torch_free(block: *mut c_void, _bytes: isize, _device: c_int, _stream: *mut c_void) {
    let _ = partywall::Heap::free(block as u64);
}

/// Defines the allocating functions of the slots.
macro_rules! allocating_functions {
    ($($slot:literal $name:ident)*) => {
        /// The names of the functions, by slot.
        const NAMES: [&str; [$($slot),*].len()] = [$(stringify!($name)),*];

        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(bytes: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
                allocate($slot, bytes, device)
            }
        )*
    };
}

allocating_functions! {
    0 partywall_torch_allocate_0
    1 partywall_torch_allocate_1
    2 partywall_torch_allocate_2
    3 partywall_torch_allocate_3
    4 partywall_torch_allocate_4
    5 partywall_torch_allocate_5
    6 partywall_torch_allocate_6
    7 partywall_torch_allocate_7
    8 partywall_torch_allocate_8
    9 partywall_torch_allocate_9
    10 partywall_torch_allocate_10
    11 partywall_torch_allocate_11
    12 partywall_torch_allocate_12
    13 partywall_torch_allocate_13
    14 partywall_torch_allocate_14
    15 partywall_torch_allocate_15
}
