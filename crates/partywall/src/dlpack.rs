//! DLPack's C structs, filled in for this library's tensors and read from those of others.
//!
//! The structs are those of `dlpack.h` 1.1; later 1.x versions only add flags and codes. They are written out here
//! because the crates that bind them change their interfaces with every release, for six structs. The
//! Python package and the C library, which exchange them, bring the unsafe code: a deleter, and reading the arrays of
//! others.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use partywall_shm::DType;

/// Memory that the CPU accesses.
pub const CPU: i32 = 1;
/// Memory of a CUDA device. Managed memory (13) is never used: jax and torch refuse it.
pub const CUDA: i32 = 2;
/// Page-locked host memory.
pub const CUDA_HOST: i32 = 3;

/// Says that the consumer must not write.
const FLAG_READ_ONLY: u64 = 1;
const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// Where a tensor's memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// [`CPU`], [`CUDA`], [`CUDA_HOST`] or another number.
    pub device_type: i32,
    /// The ordinal of the device.
    pub device_id: i32,
}

/// An element type.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DLDataType {
    /// Returns whether the elements are complex numbers.
    pub fn is_complex(self) -> bool {
        self.code == COMPLEX
    }
}

/// A tensor, in memory that something else keeps.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    /// The address of its memory.
    pub data: *mut c_void,
    /// Where that is.
    pub device: DLDevice,
    /// How many dimensions it has.
    pub ndim: i32,
    /// The element type.
    pub dtype: DLDataType,
    /// The elements along each dimension.
    pub shape: *mut i64,
    /// The strides, in elements; null if the tensor is contiguous.
    pub strides: *mut i64,
    /// Where its first element is, from `data` on.
    pub byte_offset: u64,
}

/// The content of a capsule named `dltensor`.
#[repr(C)]
#[derive(Debug)]
pub struct Managed {
    /// The tensor.
    pub tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The version of the structs.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLPackVersion {
    /// Structs of another major version have another layout.
    pub major: u32,
    minor: u32,
}

/// The content of a capsule named `dltensor_versioned`.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedVersioned {
    /// The version, to be read before anything else.
    pub version: DLPackVersion,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    /// The tensor.
    pub tensor: DLTensor,
}

/// The content of a capsule, of either version.
pub trait Exchanged: Sized + 'static {
    /// The name of a capsule.
    const NAME: &'static CStr;
    /// The name of a capsule whose content was taken.
    const USED: &'static CStr;

    /// Returns the content for a tensor.
    fn new(tensor: DLTensor, read_only: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self;
    /// Returns the tensor.
    fn tensor(&self) -> &DLTensor;
    /// Returns the function that its consumer calls once it is not used any more.
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
}

impl Exchanged for Managed {
    const NAME: &'static CStr = c"dltensor";
    const USED: &'static CStr = c"used_dltensor";

    fn new(tensor: DLTensor, _: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self { tensor, context: ptr::null_mut(), deleter: Some(deleter) }
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
        Self { version: VERSION, context: ptr::null_mut(), deleter: Some(deleter), flags, tensor }
    }

    fn tensor(&self) -> &DLTensor {
        &self.tensor
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

/// A tensor of this library, to be exchanged.
#[derive(Debug)]
pub struct Export<'a> {
    /// The address of its first element.
    pub address: usize,
    /// Where that is.
    pub device: DLDevice,
    /// The element type.
    pub dtype: DLDataType,
    /// The elements along each dimension.
    pub shape: &'a [i64],
    /// The strides, in elements.
    pub strides: &'a [i64],
    /// Whether its consumer must not write.
    pub read_only: bool,
}

/// What a consumer gets, with what it needs. The first field is what the consumer sees, so that its address is that of
/// the whole.
#[repr(C)]
#[derive(Debug)]
pub struct Kept<M, O> {
    managed: M,
    _shape_and_strides: Box<[i64]>,
    _owner: O,
}

impl Export<'_> {
    /// Returns the content of a capsule together with the owner of the memory. The deleter gets the address and drops
    /// the whole.
    pub fn keep<M: Exchanged, O>(&self, owner: O, deleter: unsafe extern "C" fn(*mut M)) -> Box<Kept<M, O>> {
        let mut shape_and_strides = [self.shape, self.strides].concat().into_boxed_slice();
        let (shape, strides) = shape_and_strides.split_at_mut(self.shape.len());
        let tensor = DLTensor {
            data: ptr::without_provenance_mut(self.address),
            device: self.device,
            // Tables limit tensors to 64 dimensions.
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let managed = M::new(tensor, self.read_only, deleter);
        Box::new(Kept { managed, _shape_and_strides: shape_and_strides, _owner: owner })
    }
}

/// Returns the shape and the strides, in elements, of another library's tensor; `None` if they are invalid. `read`
/// returns as many numbers as it is asked for, from the address on, which is not null.
pub fn extents<'a>(tensor: &DLTensor, read: impl Fn(*const i64, usize) -> &'a [i64]) -> Option<(Vec<u64>, Vec<i64>)> {
    let ndim = usize::try_from(tensor.ndim).ok().filter(|ndim| *ndim <= MOST_DIMENSIONS)?;
    if ndim > 0 && tensor.shape.is_null() {
        return None;
    }
    let numbers = |pointer: *mut i64| if ndim == 0 { &[] } else { read(pointer, ndim) };
    let shape: Vec<u64> = numbers(tensor.shape).iter().map(|n| u64::try_from(*n).ok()).collect::<Option<_>>()?;
    let strides = match tensor.strides.is_null() {
        true => contiguous(&shape).into_iter().map(|stride| stride as i64).collect(),
        false => numbers(tensor.strides).to_vec(),
    };
    Some((shape, strides))
}

/// Returns the strides, in elements, of a tensor without gaps. Saturates: a table refuses such a tensor if it has
/// elements.
pub fn contiguous(shape: &[u64]) -> Vec<u64> {
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
pub fn data_type(dtype: DType) -> Option<DLDataType> {
    let bits = dtype.item_bytes()? as u8 * 8;
    CODES.iter().find(|(known, _)| *known == dtype).map(|(_, code)| DLDataType { code: *code, bits, lanes: 1 })
}

/// Returns the type that has this form in DLPack.
pub fn dtype(written: DLDataType) -> Option<DType> {
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
