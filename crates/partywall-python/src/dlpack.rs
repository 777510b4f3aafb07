//! DLPack: its C structs, and capsules of this library's tensors.
//!
//! The structs are those of `dlpack.h` 1.1; later 1.x versions only add flags and codes. They are written out here
//! because the crates that bind them change their interfaces with every release, for six structs.
#![allow(unsafe_code)] // memory that other libraries are told of, and tell us of

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
    sync::Arc,
};

use partywall::DType;
use pyo3::{ffi, prelude::*, types::PyCapsule};

use crate::owner::Owner;

/// Memory that the CPU accesses.
pub(crate) const CPU: i32 = 1;
/// Memory of a CUDA device. Managed memory (13) is never used: jax and torch refuse it.
pub(crate) const CUDA: i32 = 2;
/// Page-locked host memory.
pub(crate) const CUDA_HOST: i32 = 3;

/// Says that the consumer must not write.
const FLAG_READ_ONLY: u64 = 1;
const VERSION: Version = Version { major: 1, minor: 1 };

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DLDevice {
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DLDataType {
    /// Returns whether the elements are complex numbers.
    pub(crate) fn is_complex(self) -> bool {
        self.code == COMPLEX
    }
}

#[repr(C)]
pub(crate) struct DLTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DLDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: *mut i64,
    /// Counted in elements; null if the tensor is contiguous.
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// The content of a capsule named `dltensor`.
#[repr(C)]
pub(crate) struct Managed {
    pub(crate) tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Version {
    pub(crate) major: u32,
    minor: u32,
}

/// The content of a capsule named `dltensor_versioned`.
#[repr(C)]
pub(crate) struct ManagedVersioned {
    pub(crate) version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    pub(crate) tensor: DLTensor,
}

/// The content of a capsule, of either version.
pub(crate) trait Exchanged: Sized + 'static {
    /// The name of a capsule.
    const NAME: &'static CStr;
    /// The name of a capsule whose content was taken.
    const USED: &'static CStr;

    fn new(tensor: DLTensor, read_only: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self;
    fn tensor(&self) -> &DLTensor;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
}

impl Exchanged for Managed {
    const NAME: &'static CStr = c"dltensor";
    const USED: &'static CStr = c"used_dltensor";

    fn new(tensor: DLTensor, _: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self { tensor, context: std::ptr::null_mut(), deleter: Some(deleter) }
    }

    fn tensor(&self) -> &DLTensor {
        &self.tensor
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

impl Exchanged for ManagedVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";
    const USED: &'static CStr = c"used_dltensor_versioned";

    fn new(tensor: DLTensor, read_only: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        let flags = if read_only { FLAG_READ_ONLY } else { 0 };
        Self { version: VERSION, context: std::ptr::null_mut(), deleter: Some(deleter), flags, tensor }
    }

    fn tensor(&self) -> &DLTensor {
        &self.tensor
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

/// A tensor of this library, to be put into a capsule.
pub(crate) struct TensorExport<'a> {
    pub(crate) owner: &'a Arc<Owner>,
    pub(crate) address: usize,
    pub(crate) device: DLDevice,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: &'a [i64],
    pub(crate) strides: &'a [i64],
}

impl TensorExport<'_> {
    /// Returns a capsule, which keeps the owner until its consumer releases it.
    pub(crate) fn capsule<'py, M: Exchanged>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let mut shape_and_strides = [self.shape, self.strides].concat().into_boxed_slice();
        let (shape, strides) = shape_and_strides.split_at_mut(self.shape.len());
        let tensor = DLTensor {
            data: self.address as *mut c_void,
            device: self.device,
            // Tables limit tensors to 64 dimensions.
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let managed = M::new(tensor, !self.owner.is_writable(), delete::<M>);
        let kept = Box::new(Kept { managed, _shape_and_strides: shape_and_strides, _owner: self.owner.clone() });
        let pointer = NonNull::from(Box::leak(kept)).cast();
        // SAFETY: the pointer stays valid until `delete`, which the consumer calls, or `destroy` if there is none; that
        // may be called on any thread that has the GIL, as Python does.
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, M::NAME, Some(destroy::<M>)) }
    }
}

/// The target of a capsule's pointer; its first field is what the consumer sees.
#[repr(C)]
struct Kept<M> {
    managed: M,
    _shape_and_strides: Box<[i64]>,
    _owner: Arc<Owner>,
}

/// Called once by the consumer, on any thread, with or without the GIL, perhaps after the end of the interpreter.
unsafe extern "C" fn delete<M: Exchanged>(managed: *mut M) {
    // SAFETY: `managed` is the first field of a `Kept<M>` that `capsule` has leaked.
    drop(unsafe { Box::from_raw(managed.cast::<Kept<M>>()) });
}

/// Called by Python when a capsule is freed. Frees the content too, unless a consumer has taken it.
unsafe extern "C" fn destroy<M: Exchanged>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule; a consumer that has taken the content has renamed it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>());
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
    let ndim = usize::try_from(tensor.ndim).ok().filter(|ndim| *ndim <= MOST_DIMENSIONS)?;
    if ndim > 0 && tensor.shape.is_null() {
        return None;
    }
    let numbers = |pointer: *mut i64| {
        // SAFETY: DLPack's rule: `shape`, and `strides` unless null, have `ndim` numbers.
        if ndim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, ndim) } }
    };
    let shape: Vec<u64> = numbers(tensor.shape).iter().map(|n| u64::try_from(*n).ok()).collect::<Option<_>>()?;
    let strides = match tensor.strides.is_null() {
        true => contiguous(&shape).into_iter().map(|stride| stride as i64).collect(),
        false => numbers(tensor.strides).to_vec(),
    };
    Some((shape, strides))
}

/// Returns the strides, in elements, of a tensor without gaps. Saturates: a table refuses such a tensor if it has
/// elements.
pub(crate) fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = u64::saturating_mul(strides[axis], shape[axis].max(1));
    }
    strides
}

/// More dimensions than any library has. The arrays of a tensor with a number beyond that are not read.
const MOST_DIMENSIONS: usize = 1024;

const COMPLEX: u8 = 5;

/// DLPack's type codes, with the widths that this library supports.
const CODES: [(DType, u8); 20] = [
    (DType::I8, 0),
    (DType::I16, 0),
    (DType::I32, 0),
    (DType::I64, 0),
    (DType::U8, 1),
    (DType::U16, 1),
    (DType::U32, 1),
    (DType::U64, 1),
    (DType::F16, 2),
    (DType::F32, 2),
    (DType::F64, 2),
    (DType::BF16, 4),
    (DType::C64, COMPLEX),
    (DType::C128, COMPLEX),
    (DType::Bool, 6),
    (DType::F8E4M3, 10),
    (DType::F8E4M3Fnuz, 11),
    (DType::F8E5M2, 12),
    (DType::F8E5M2Fnuz, 13),
    (DType::F8E8M0, 14),
];

/// Returns DLPack's form of a type; `None` for types with several elements a byte, which consumers read in different
/// ways.
pub(crate) fn data_type(dtype: DType) -> Option<DLDataType> {
    let bits = dtype.item_bytes()? as u8 * 8;
    CODES.iter().find(|(known, _)| *known == dtype).map(|(_, code)| DLDataType { code: *code, bits, lanes: 1 })
}

/// Returns the type that has this form in DLPack.
pub(crate) fn dtype(written: DLDataType) -> Option<DType> {
    let is_it = |(dtype, code): &&(DType, u8)| *code == written.code && dtype.bits() == u64::from(written.bits);
    CODES.iter().filter(|_| written.lanes == 1).find(is_it).map(|(dtype, _)| *dtype)
}

const _: () = {
    // The layouts of dlpack.h on 64-bit machines.
    assert!(size_of::<DLTensor>() == 48);
    assert!(size_of::<Managed>() == 64);
    assert!(size_of::<ManagedVersioned>() == 80);
    assert!(std::mem::offset_of!(ManagedVersioned, tensor) == 32);
};
