//! The header of a `.npy` file, read and written by the npyz crate.

use std::{fs::File, path::Path};

use npyz::{DType as FileDType, Endianness, NpyHeader, Order as FileOrder, TypeChar, TypeStr, WriterBuilder};
use partywall_shm::DType;

use super::{
    SINGLE_TENSOR,
    error::FileError,
    plan::read_exact_at,
    tensor::{Order, TensorInfo},
    write::Format,
};

/// Reads the header of `file`, which has `length` bytes, and checks it against that length. Returns the tensor and the
/// place of its first byte.
pub(super) fn read_header(path: &Path, file: &File, length: u64) -> Result<(TensorInfo, u64), FileError> {
    let truncated = |expected| FileError::Truncated { file: path.to_owned(), expected, found: length };
    let mut prefix = [0; 12];
    let have = length.min(12) as usize;
    read_exact_at(path, file, &mut prefix[..have], 0)?;
    if prefix[..MAGIC.len()] != *MAGIC {
        let why = "it does not begin as a .npy file does";
        return Err(if MAGIC.starts_with(&prefix[..have]) { truncated(12) } else { FileError::malformed(path, why) });
    }
    if have < 12 {
        return Err(truncated(12));
    }
    let (text_at, text_bytes) = match prefix[6] {
        1 => (10, u64::from(u16::from_le_bytes([prefix[8], prefix[9]]))),
        _ => (12, u64::from(u32::from_le_bytes([prefix[8], prefix[9], prefix[10], prefix[11]]))),
    };
    let start = text_at + text_bytes;
    if start > MAX_HEADER {
        return Err(FileError::HeaderTooLarge { file: path.to_owned(), bytes: start, limit: MAX_HEADER });
    }
    if length < start {
        return Err(truncated(start));
    }
    let mut header = vec![0; start as usize];
    read_exact_at(path, file, &mut header, 0)?;
    let tensor = parse(path, &header, text_at as usize)?;
    match start.checked_add(tensor.bytes) {
        Some(expected) if expected == length => Ok((tensor, start)),
        Some(expected) if expected < length => {
            Err(FileError::TrailingBytes { file: path.to_owned(), expected, found: length })
        }
        expected => Err(truncated(expected.unwrap_or(u64::MAX))),
    }
}

/// The header for `tensor`.
pub(super) fn header(path: &Path, tensor: &TensorInfo) -> Result<Vec<u8>, FileError> {
    let format = Format::Npy;
    let order = [(Order::C, FileOrder::C), (Order::Fortran, FileOrder::Fortran)];
    let Some((_, order)) = order.into_iter().find(|(order, _)| tensor.lies_in(*order)) else {
        return Err(FileError::FormatLacksStrides {
            file: path.to_owned(),
            tensor: tensor.name.clone(),
            shape: tensor.shape.clone(),
            strides: tensor.strides.clone(),
            format,
        });
    };
    let descr = descr(tensor.dtype).and_then(|text| text.parse::<TypeStr>().ok());
    let Some(descr) = descr else {
        let (file, name) = (path.to_owned(), tensor.name.clone());
        return Err(FileError::FormatLacksElements { file, tensor: name, dtype: tensor.dtype, format });
    };
    npyz::WriteOptions::new_header_only()
        .dtype(FileDType::Plain(descr))
        .shape(&tensor.shape)
        .order(order)
        .writer(Vec::new())
        .write_header_only()
        .map_err(|e| FileError::malformed(path, e))
}

/// What a whole header says; its text begins at `text_at`.
fn parse(path: &Path, header: &[u8], text_at: usize) -> Result<TensorInfo, FileError> {
    check_text(&header[text_at..]).map_err(|why| FileError::malformed(path, why))?;
    let parsed = NpyHeader::from_reader(header).map_err(|e| FileError::malformed(path, e))?;
    let dtype = dtype(&parsed.dtype()).map_err(|why| FileError::UnsupportedElements {
        file: path.to_owned(),
        dtype: parsed.dtype().descr(),
        why,
    })?;
    let order = match parsed.order() {
        FileOrder::C => Order::C,
        FileOrder::Fortran => Order::Fortran,
    };
    TensorInfo::dense(SINGLE_TENSOR, dtype, parsed.shape().to_vec(), order)
        .ok_or_else(|| FileError::malformed(path, format!("its shape {:?} is too large", parsed.shape())))
}

/// Refuses texts that NumPy does not write and that the parser would overflow on: it multiplies the dimensions
/// unchecked, recurses for every bracket, and tries what is in it several times.
fn check_text(text: &[u8]) -> Result<(), &'static str> {
    let (mut depth, mut product, mut quote, mut i) = (0_usize, 1_u64, None, 0);
    while let Some(byte) = text.get(i) {
        i += 1;
        match (quote, byte) {
            (_, b'\\') => return Err("its header has an escape sequence"),
            (Some(open), byte) if open == *byte => quote = None,
            (Some(_), _) => {}
            (None, b'\'' | b'"') => quote = Some(*byte),
            (None, b'{') if depth > 0 => return Err("its header has a dictionary in another"),
            (None, b'(' | b'[' | b'{') if depth == MAX_DEPTH => {
                return Err("its header is nested too deeply");
            }
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            (None, b'0'..=b'9') => {
                let mut number = u64::from(byte - b'0');
                while let Some(digit @ b'0'..=b'9') = text.get(i) {
                    number =
                        number.checked_mul(10).and_then(|n| n.checked_add(u64::from(digit - b'0'))).ok_or(LARGE)?;
                    i += 1;
                }
                // A letter, a sign or a point would make another number of it.
                if !matches!(text.get(i), Some(b',' | b')' | b']' | b' ')) {
                    return Err("its header has a number that is no dimension");
                }
                product = product.checked_mul(number.max(1)).ok_or(LARGE)?;
            }
            (None, b'a'..=b'z' | b'A'..=b'Z' | b',' | b':' | b' ' | b'\n') => {}
            (None, _) => return Err("its header has a character that does not belong there"),
        }
    }
    Ok(())
}

/// The type of the elements, or why they cannot be taken as they are.
fn dtype(descr: &FileDType) -> Result<DType, &'static str> {
    let FileDType::Plain(plain) = descr else {
        return Err("elements with fields are not supported");
    };
    if plain.endianness() == Endianness::Big && plain.size_field() > 1 {
        return Err("they are big-endian");
    }
    let known = match (plain.type_char(), plain.size_field()) {
        (TypeChar::Bool, 1) => DType::Bool,
        (TypeChar::Uint, 1) => DType::U8,
        (TypeChar::Uint, 2) => DType::U16,
        (TypeChar::Uint, 4) => DType::U32,
        (TypeChar::Uint, 8) => DType::U64,
        (TypeChar::Int, 1) => DType::I8,
        (TypeChar::Int, 2) => DType::I16,
        (TypeChar::Int, 4) => DType::I32,
        (TypeChar::Int, 8) => DType::I64,
        (TypeChar::Float, 2) => DType::F16,
        (TypeChar::Float, 4) => DType::F32,
        (TypeChar::Float, 8) => DType::F64,
        (TypeChar::Complex, 8) => DType::C64,
        (TypeChar::Complex, 16) => DType::C128,
        (TypeChar::Object, _) => return Err("they are pickled Python objects"),
        (TypeChar::RawData, _) => {
            return Err("the file does not say what they are (so NumPy writes types of others)");
        }
        (TypeChar::ByteStr | TypeChar::UnicodeStr, _) => return Err("they are texts"),
        (TypeChar::TimeDelta | TypeChar::DateTime, _) => return Err("they are times"),
        _ => return Err("no tensor has such elements"),
    };
    Ok(known)
}

/// NumPy's name for the type, if it has one.
fn descr(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::Bool => "|b1",
        DType::U8 => "|u1",
        DType::U16 => "<u2",
        DType::U32 => "<u4",
        DType::U64 => "<u8",
        DType::I8 => "|i1",
        DType::I16 => "<i2",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
        DType::F16 => "<f2",
        DType::F32 => "<f4",
        DType::F64 => "<f8",
        DType::C64 => "<c8",
        DType::C128 => "<c16",
        _ => return None,
    })
}

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The longest header that is read. NumPy itself reads 10,000 bytes unless told to trust the file.
const MAX_HEADER: u64 = 1 << 14;

/// Brackets in brackets: an array of plain elements has two, one of elements with fields that have fields has six. The
/// parser takes time exponential in them.
const MAX_DEPTH: usize = 6;

const LARGE: &str = "its shape is too large";

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<TensorInfo, FileError> {
        let length = (text.len() as u16).to_le_bytes();
        parse(Path::new("f.npy"), &[b"\x93NUMPY\x01\0", &length[..], text.as_bytes()].concat(), 10)
    }

    #[test]
    fn what_numpy_writes_is_read() {
        for (text, dtype, shape, strides) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n", DType::F32, &[2, 3][..], &[3, 1][..]),
            ("{'descr': '<i8', 'fortran_order': True, 'shape': (2, 3), }\n", DType::I64, &[2, 3], &[1, 2]),
            ("{'descr': '|b1', 'fortran_order': False, 'shape': (), }\n", DType::Bool, &[], &[]),
            ("{'descr': '<c16', 'fortran_order': False, 'shape': (0, 5), }\n", DType::C128, &[0, 5], &[5, 1]),
        ] {
            let tensor = read(text).unwrap();
            assert_eq!((tensor.dtype, &tensor.shape[..], &tensor.strides[..]), (dtype, shape, strides));
        }
    }

    #[test]
    fn every_type_goes_there_and_back() {
        for ours in DType::ALL {
            let tensor = TensorInfo::dense(SINGLE_TENSOR, *ours, vec![4, 3, 8], Order::Fortran).unwrap();
            match header(Path::new("f"), &tensor) {
                Ok(bytes) => assert_eq!(parse(Path::new("f"), &bytes, 10).unwrap(), tensor),
                Err(error) => assert!(matches!(error, FileError::FormatLacksElements { .. }), "{error}"),
            }
        }
    }

    /// A watchdog, not a measurement: without the check this takes over a minute.
    #[test]
    fn deep_nesting_takes_no_time() {
        let begun = Instant::now();
        for (open, close) in [("[", "]"), ("(", ",)"), ("{", "}")] {
            let deep = format!("{}None{}", open.repeat(MAX_DEPTH - 1), close.repeat(MAX_DEPTH - 1));
            for (between, last) in [(", ", ""), (",", "x"), (": None,", ""), (":", "")] {
                let many = vec![deep.as_str(); 4_000 / (deep.len() + between.len())].join(between);
                assert!(read(&format!("{{{many}{last}}}")).is_err());
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[-\\[\\](){}'\",:.+0-9a-zA-Z\\\\ \n_|<>]{0,80}") {
            let _ = read(&text);
        }

        #[test]
        fn no_value_makes_the_parser_panic(
            descr in "('[|<>=]?[a-zA-Z][0-9]{0,20}'|\\[\\('a', '[<>|][a-zA-Z][0-9]{0,20}', \\([0-9]{0,20},\\)\\)\\])",
            order in "(True|False|None|0)",
            shape in proptest::collection::vec("[-+]?[0-9]{0,21}[Lx.e_]?", 0..5),
        ) {
            let shape = shape.join(", ");
            let _ = read(&format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': ({shape}), }}\n"));
        }
    }
}
