//! DLPack: capsules of this library's tensors, and of others.
#![allow(unsafe_code)] // memory that other libraries are told of, and tell us of

use std::ptr::NonNull;

use partywall::dlpack::{self, Kept};
pub(crate) use partywall::dlpack::{
    CPU, CUDA, CUDA_HOST, DLDataType, DLDevice, DLPackVersion, DLTensor, Exchanged, Export, Managed, ManagedVersioned,
    contiguous, data_type, dtype,
};
use pyo3::{ffi, prelude::*, types::PyCapsule};

/// Returns a capsule, which keeps the owner until its consumer releases it.
pub(crate) fn capsule<'py, M: Exchanged, O: Send + 'static>(
    py: Python<'py>,
    export: &Export<'_>,
    owner: O,
) -> PyResult<Bound<'py, PyCapsule>> {
    let kept = export.keep(owner, delete::<M, O>);
    let pointer = NonNull::from(Box::leak(kept)).cast();
    // SAFETY: the pointer stays valid until `delete`, which the consumer calls, or `destroy` if there is none; that may
    // be called on any thread that has the GIL, as Python does.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, M::NAME, Some(destroy::<M, O>)) }
}

/// Called once by the consumer, on any thread, with or without the GIL, perhaps after the end of the interpreter.
unsafe extern "C" fn delete<M: Exchanged, O>(managed: *mut M) {
    // SAFETY: `managed` is the first field of a `Kept` that `capsule` has leaked. Its owner may be dropped on any thread.
    drop(unsafe { Box::from_raw(managed.cast::<Kept<M, O>>()) });
}

/// Called by Python when a capsule is freed. Frees the content too, unless a consumer has taken it.
unsafe extern "C" fn destroy<M: Exchanged, O>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule; a consumer that has taken the content has renamed it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            delete::<M, O>(ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>());
        }
    }
}

/// Another library's tensor, taken out of its capsule.
pub(crate) struct Taken<M: Exchanged>(NonNull<M>);

// SAFETY: by DLPack's rules the holder of a managed tensor may use and delete it on any thread; `drop` takes the GIL.
unsafe impl<M: Exchanged> Send for Taken<M> {}
// SAFETY: a shared reference only reads it.
unsafe impl<M: Exchanged> Sync for Taken<M> {}

impl<M: Exchanged> Taken<M> {
    /// Takes the content out of a capsule, if the capsule has this version.
    pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> Option<Self> {
        let object = capsule.as_ptr();
        // SAFETY: the object is alive. A valid capsule of this name has a managed tensor, which is ours once it is
        // renamed; a static name outlives it.
        unsafe {
            if ffi::PyCapsule_IsValid(object, M::NAME.as_ptr()) != 1 {
                return None;
            }
            let pointer = NonNull::new(ffi::PyCapsule_GetPointer(object, M::NAME.as_ptr()).cast::<M>())?;
            (ffi::PyCapsule_SetName(object, M::USED.as_ptr()) == 0).then_some(Self(pointer))
        }
    }

    /// Wraps a tensor that was given away without a capsule.
    ///
    /// # Safety
    /// The caller owns the tensor, and nothing else deletes it.
    pub(crate) unsafe fn from_raw(managed: NonNull<M>) -> Self {
        Self(managed)
    }

    /// Returns the content.
    pub(crate) fn get(&self) -> &M {
        // SAFETY: alive until it is deleted, which `drop` does.
        unsafe { self.0.as_ref() }
    }
}

impl<M: Exchanged> Drop for Taken<M> {
    fn drop(&mut self) {
        let Some(deleter) = self.get().deleter() else { return };
        // Deleters should take the GIL themselves, but some forget to. At the end of the interpreter there is no GIL,
        // and nothing to give the memory back to.
        Python::try_attach(|_| {
            // SAFETY: called once, and `self` is not used afterwards.
            unsafe { deleter(self.0.as_ptr()) }
        });
    }
}

/// Returns the shape and the strides, in elements, of another library's tensor; `None` if they are invalid.
pub(crate) fn extents(tensor: &DLTensor) -> Option<(Vec<u64>, Vec<i64>)> {
    // SAFETY: DLPack's rule: `shape`, and `strides` unless null, have `ndim` numbers.
    dlpack::extents(tensor, |numbers, count| unsafe { std::slice::from_raw_parts(numbers, count) })
}

/// Host memory.
pub(crate) const HOST: DLDevice = DLDevice { device_type: CPU, device_id: 0 };
