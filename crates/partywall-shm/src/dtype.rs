//! Element types.

use std::{fmt, str::FromStr};

use partywall_wire::near::did_you_mean;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $bits:literal, $name:literal $(, $alias:literal)*;)*) => {
        /// The type of a tensor's elements.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum DType {
            $($(#[$doc])* $variant = $code,)*
        }

        impl DType {
            /// Every element type.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the number that stands for the type in a table.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// Returns the type with this number.
            pub fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// Returns the name, as torch and NumPy spell it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the bits of one element. Elements of less than eight bits are packed without gaps.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }

        impl FromStr for DType {
            type Err = UnknownDType;

            fn from_str(text: &str) -> Result<Self, UnknownDType> {
                match text.to_ascii_lowercase().as_str() {
                    $($name $(| $alias)* => Ok(Self::$variant),)*
                    _ => Err(UnknownDType(text.to_owned())),
                }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = 1, 8, "bool", "boolean";
    /// Unsigned, 8 bits.
    U8 = 2, 8, "uint8", "u8", "byte";
    /// Signed, 8 bits.
    I8 = 3, 8, "int8", "i8";
    /// Unsigned, 16 bits.
    U16 = 4, 16, "uint16", "u16";
    /// Signed, 16 bits.
    I16 = 5, 16, "int16", "i16", "short";
    /// Unsigned, 32 bits.
    U32 = 6, 32, "uint32", "u32";
    /// Signed, 32 bits.
    I32 = 7, 32, "int32", "i32", "int";
    /// Unsigned, 64 bits.
    U64 = 8, 64, "uint64", "u64";
    /// Signed, 64 bits.
    I64 = 9, 64, "int64", "i64", "long";
    /// IEEE binary16.
    F16 = 10, 16, "float16", "f16", "fp16", "half";
    /// The upper half of a binary32.
    BF16 = 11, 16, "bfloat16", "bf16";
    /// IEEE binary32.
    F32 = 12, 32, "float32", "f32", "fp32", "float";
    /// IEEE binary64.
    F64 = 13, 64, "float64", "f64", "fp64", "double";
    /// Four exponent bits, three of mantissa, finite (OCP 8-bit floating point).
    F8E4M3 = 14, 8, "float8_e4m3fn", "f8_e4m3", "f8_e4m3fn", "fp8_e4m3", "e4m3";
    /// Five exponent bits, two of mantissa (OCP 8-bit floating point).
    F8E5M2 = 15, 8, "float8_e5m2", "f8_e5m2", "fp8_e5m2", "e5m2";
    /// Four exponent bits, three of mantissa, no negative zero.
    F8E4M3Fnuz = 16, 8, "float8_e4m3fnuz", "f8_e4m3fnuz";
    /// Five exponent bits, two of mantissa, no negative zero.
    F8E5M2Fnuz = 17, 8, "float8_e5m2fnuz", "f8_e5m2fnuz";
    /// Eight exponent bits, the scale of a block (OCP microscaling).
    F8E8M0 = 18, 8, "float8_e8m0fnu", "f8_e8m0", "e8m0";
    /// Three exponent bits, two of mantissa, packed (OCP microscaling).
    F6E3M2 = 19, 6, "float6_e3m2fn", "f6_e3m2", "e3m2";
    /// Two exponent bits, three of mantissa, packed (OCP microscaling).
    F6E2M3 = 20, 6, "float6_e2m3fn", "f6_e2m3", "e2m3";
    /// Two exponent bits, one of mantissa, packed (OCP microscaling).
    F4 = 21, 4, "float4_e2m1fn", "f4", "e2m1";
    /// Two binary32: real and imaginary part.
    C64 = 22, 64, "complex64", "c64";
    /// Two binary64: real and imaginary part.
    C128 = 23, 128, "complex128", "c128";
}

/// No element type has this name.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype {0:?}{near} known are {known}", near = near(.0), known = names().collect::<Vec<_>>().join(", "))]
pub struct UnknownDType(pub String);

/// As `Display`, for a `main` that returns the error.
impl fmt::Debug for UnknownDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    DType::ALL.iter().map(|dtype| dtype.name())
}

/// Returns which dtype may be meant, up to the list of all.
fn near(text: &str) -> String {
    match did_you_mean(names(), text) {
        near if near.is_empty() => ";".to_owned(),
        near => near,
    }
}

impl DType {
    /// Returns the bytes that `elements` elements take without gaps, or `None` if they do not fill whole bytes or the
    /// number exceeds 2⁶³.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        let bits = elements.checked_mul(self.bits())?;
        (bits % 8 == 0 && bits / 8 <= i64::MAX as u64).then_some(bits / 8)
    }

    /// Returns the number of bytes at whose multiples elements begin.
    pub fn alignment(self) -> u64 {
        match (self, self.item_bytes()) {
            (_, None) => 1,
            // Two numbers of half the size.
            (Self::C64 | Self::C128, Some(bytes)) => bytes / 2,
            (_, Some(bytes)) => bytes,
        }
    }

    /// Returns the bytes of one element, or `None` if it has less than eight bits.
    pub fn item_bytes(self) -> Option<u64> {
        (self.bits() >= 8).then_some(self.bits() / 8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(*dtype));
            assert_eq!(dtype.name().parse(), Ok(*dtype));
            assert_eq!(dtype.name().to_uppercase().parse(), Ok(*dtype));
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!("bf16".parse(), Ok(DType::BF16));
        assert!("float3".parse::<DType>().unwrap_err().to_string().contains("bfloat16"));
    }

    #[test]
    fn packed_elements_fill_whole_bytes() {
        assert_eq!(DType::F4.bytes_for(2), Some(1));
        assert_eq!(DType::F4.bytes_for(3), None);
        assert_eq!(DType::F6E2M3.bytes_for(4), Some(3));
        assert_eq!(DType::F64.bytes_for(u64::MAX / 8), None);
        assert_eq!(DType::U8.bytes_for(0), Some(0));
    }
}
