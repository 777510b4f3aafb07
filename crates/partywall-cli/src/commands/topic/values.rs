//! The first values of a sample, for people and programs.

use half::{bf16, f16};
use partywall::DType;
use serde_json::{Value, json};

/// How many values are printed.
pub(super) const VALUES: usize = 8;

/// Returns the size in bytes of the printed values of a type: [`VALUES`] elements, or as many bytes for a type that
/// JSON has no numbers for.
pub(super) fn head(dtype: DType) -> u64 {
    VALUES as u64 * if is_number(dtype) { dtype.item_bytes().unwrap_or(1) } else { 1 }
}

/// Returns the values at the beginning of `bytes`: numbers, or the bytes themselves for a type that JSON has no numbers
/// for.
pub(super) fn first(dtype: DType, bytes: &[u8]) -> Vec<Value> {
    let item = if is_number(dtype) { dtype.item_bytes().unwrap_or(1) as usize } else { 1 };
    bytes.chunks_exact(item).take(VALUES).map(|item| value(dtype, item)).collect()
}

/// Returns how many values a sample has beyond the `first` ones: elements, or bytes for a type that JSON has no numbers
/// for.
pub(super) fn left_out(dtype: DType, bytes: u64, first: &[Value]) -> u64 {
    let item = if is_number(dtype) { dtype.item_bytes().unwrap_or(1) } else { 1 };
    (bytes / item).saturating_sub(first.len() as u64)
}

/// Returns the values in one line: `0, 1.5, 2 and 4 more`.
pub(super) fn line(values: &[Value], left_out: u64) -> String {
    let texts: Vec<_> = values.iter().map(Value::to_string).collect();
    let texts = texts.join(", ");
    if left_out > 0 { format!("{texts} and {left_out} more") } else { texts }
}

fn value(dtype: DType, item: &[u8]) -> Value {
    macro_rules! number {
        ($type:ty) => {
            <[u8; size_of::<$type>()]>::try_from(item).map_or(Value::Null, |bytes| json!(<$type>::from_le_bytes(bytes)))
        };
    }
    let float = |number: f64| if number.is_finite() { json!(number) } else { json!(number.to_string()) };
    match dtype {
        DType::Bool => json!(item.first().is_some_and(|byte| *byte != 0)),
        DType::I8 => number!(i8),
        DType::U16 => number!(u16),
        DType::I16 => number!(i16),
        DType::U32 => number!(u32),
        DType::I32 => number!(i32),
        DType::U64 => number!(u64),
        DType::I64 => number!(i64),
        DType::F16 => item.try_into().map_or(Value::Null, |bytes| float(f16::from_le_bytes(bytes).into())),
        DType::BF16 => item.try_into().map_or(Value::Null, |bytes| float(bf16::from_le_bytes(bytes).into())),
        DType::F32 => item.try_into().map_or(Value::Null, |bytes| shortest(f32::from_le_bytes(bytes))),
        DType::F64 => item.try_into().map_or(Value::Null, |bytes| float(f64::from_le_bytes(bytes))),
        _ => json!(item.first()),
    }
}

/// Returns the bytes of an element with this value, or one byte of the value for a type that has no numbers. A value
/// that is too large for the type wraps around to 0.
pub(super) fn element(dtype: DType, number: u64) -> Vec<u8> {
    match dtype {
        DType::Bool => vec![(number % 2) as u8],
        DType::U16 | DType::I16 => (number as u16).to_le_bytes().into(),
        DType::U32 | DType::I32 => (number as u32).to_le_bytes().into(),
        DType::U64 | DType::I64 => number.to_le_bytes().into(),
        DType::F16 => f16::from_f64(number as f64).to_le_bytes().into(),
        DType::BF16 => bf16::from_f64(number as f64).to_le_bytes().into(),
        DType::F32 => (number as f32).to_le_bytes().into(),
        DType::F64 => (number as f64).to_le_bytes().into(),
        _ => vec![number as u8],
    }
}

/// Returns the shortest decimal number that is read back as the same `f32`: 0.1, not 0.10000000149011612.
fn shortest(number: f32) -> Value {
    let text = number.to_string();
    text.parse::<f64>().ok().filter(|number| number.is_finite()).map_or_else(|| json!(text), |number| json!(number))
}

fn is_number(dtype: DType) -> bool {
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    matches!(dtype, Bool | U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64 | F16 | BF16 | F32 | F64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_have_their_values() {
        for dtype in [DType::U8, DType::I16, DType::U32, DType::I64] {
            assert_eq!(first(dtype, &element(dtype, 100)), [json!(100)], "{dtype}");
        }
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            assert_eq!(first(dtype, &element(dtype, 100)), [json!(100.0)], "{dtype}");
        }
        assert_eq!(
            (element(DType::Bool, 3), element(DType::U8, 257), element(DType::F8E4M3, 9)),
            (vec![1], vec![1], vec![9])
        );
    }

    #[test]
    fn values_are_printed_as_numbers() {
        let f32s: Vec<u8> = [0.1_f32, -2.0, f32::NAN, f32::INFINITY].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(first(DType::F32, &f32s), [json!(0.1), json!(-2.0), json!("NaN"), json!("inf")]);
        assert_eq!(first(DType::I16, &[0xff, 0xff, 1, 0, 7]), [json!(-1), json!(1)]);
        assert_eq!(first(DType::F16, &[0, 0x3c]), [json!(1.0)]);
        assert_eq!(first(DType::BF16, &[0x80, 0x3f]), [json!(1.0)]);
        assert_eq!(first(DType::Bool, &[0, 1, 2]), [json!(false), json!(true), json!(true)]);
        assert_eq!(first(DType::F8E4M3, &[9; 20]), vec![json!(9); VALUES], "as bytes");
        assert_eq!((head(DType::F64), head(DType::U8), head(DType::F4)), (64, 8, 8));
        assert_eq!(line(&[json!(1), json!(2)], 0), "1, 2");
        assert_eq!(line(&[json!(1)], 4), "1 and 4 more");
        let eight = vec![json!(0); VALUES];
        assert_eq!(left_out(DType::F32, 36, &eight), 1);
        assert_eq!(left_out(DType::F32, 32, &eight), 0);
        assert_eq!(left_out(DType::C64, 16, &eight), 8, "bytes");
    }
}
