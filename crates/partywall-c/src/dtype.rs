//! The numbers of element types. They are those of `partywall::DType`, which a test compares.

use std::{
    ffi::{CString, c_char},
    sync::LazyLock,
};

use partywall::DType;

/// One byte, 0 or 1.
pub const PW_DTYPE_BOOL: u32 = 1;
/// Unsigned, 8 bits.
pub const PW_DTYPE_U8: u32 = 2;
/// Signed, 8 bits.
pub const PW_DTYPE_I8: u32 = 3;
/// Unsigned, 16 bits.
pub const PW_DTYPE_U16: u32 = 4;
/// Signed, 16 bits.
pub const PW_DTYPE_I16: u32 = 5;
/// Unsigned, 32 bits.
pub const PW_DTYPE_U32: u32 = 6;
/// Signed, 32 bits.
pub const PW_DTYPE_I32: u32 = 7;
/// Unsigned, 64 bits.
pub const PW_DTYPE_U64: u32 = 8;
/// Signed, 64 bits.
pub const PW_DTYPE_I64: u32 = 9;
/// IEEE binary16.
pub const PW_DTYPE_F16: u32 = 10;
/// The upper half of a binary32.
pub const PW_DTYPE_BF16: u32 = 11;
/// IEEE binary32.
pub const PW_DTYPE_F32: u32 = 12;
/// IEEE binary64.
pub const PW_DTYPE_F64: u32 = 13;
/// Four exponent bits, three of mantissa, finite (OCP 8-bit floating point).
pub const PW_DTYPE_F8E4M3: u32 = 14;
/// Five exponent bits, two of mantissa (OCP 8-bit floating point).
pub const PW_DTYPE_F8E5M2: u32 = 15;
/// Four exponent bits, three of mantissa, no negative zero.
pub const PW_DTYPE_F8E4M3FNUZ: u32 = 16;
/// Five exponent bits, two of mantissa, no negative zero.
pub const PW_DTYPE_F8E5M2FNUZ: u32 = 17;
/// Eight exponent bits, the scale of a block (OCP microscaling).
pub const PW_DTYPE_F8E8M0: u32 = 18;
/// Three exponent bits, two of mantissa, packed (OCP microscaling).
pub const PW_DTYPE_F6E3M2: u32 = 19;
/// Two exponent bits, three of mantissa, packed (OCP microscaling).
pub const PW_DTYPE_F6E2M3: u32 = 20;
/// Two exponent bits, one of mantissa, packed (OCP microscaling).
pub const PW_DTYPE_F4: u32 = 21;
/// Two binary32: real and imaginary part.
pub const PW_DTYPE_C64: u32 = 22;
/// Two binary64: real and imaginary part.
pub const PW_DTYPE_C128: u32 = 23;

/// Returns the name of an element type, such as "float32"; empty for a number that is none. It stays for ever. Does not
/// block. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn pw_dtype_name(dtype: u32) -> *const c_char {
    static NAMES: LazyLock<Vec<CString>> = LazyLock::new(|| {
        let name = |code| CString::new(DType::from_code(code).map_or("", DType::name)).unwrap_or_default();
        (0..=u8::MAX).map(name).collect()
    });
    NAMES.get(dtype as usize).map_or(c"", |name| name).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn numbers_are_those_of_the_library() {
        let source = include_str!("dtype.rs");
        let constants = source.lines().filter_map(|line| line.strip_prefix("pub const PW_DTYPE_"));
        let constants: Vec<_> =
            constants.filter_map(|line| line.trim_end_matches(';').split_once(": u32 = ")).collect();
        let known: Vec<_> = (0..=u8::MAX).filter_map(DType::from_code).collect();
        assert_eq!(constants.len(), known.len());
        for ((name, code), dtype) in constants.into_iter().zip(known) {
            assert_eq!(code.parse(), Ok(dtype.code()));
            assert_eq!(name, format!("{dtype:?}").to_uppercase());
        }
    }

    #[test]
    fn each_number_has_a_name() {
        // SAFETY: the function returns texts that stay.
        let name = |code| unsafe { CStr::from_ptr(pw_dtype_name(code)) };
        assert_eq!(name(PW_DTYPE_F32), c"float32");
        assert_eq!([name(0), name(255), name(u32::MAX)], [c"", c"", c""]);
    }
}
