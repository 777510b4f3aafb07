//! iceoryx2's functions for C, as a shared library.

pub use iceoryx2_ffi::*;
