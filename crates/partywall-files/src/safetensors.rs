//! The header of a safetensors file: eight bytes with its length, then JSON.
//!
//! Written by the safetensors crate, apart from the metadata, whose order the crate does not keep. Read here: of a key
//! that is there twice, the crate does not say which, and of a type that it does not know, not of which tensor.

use std::cmp::Reverse;

use partywall_shm::DType;
use safetensors::tensor::{Dtype as FileDType, Metadata, TensorInfo as FileTensor};
use serde::{Deserialize, de::MapAccess};
use serde_json::{Map, Value};

use crate::{
    error::FileProblem,
    format::Format,
    json::{Member, Members},
    storage::{FileReader, read_exact_at, read_vec_at},
    tensor::{Order, TensorInfo},
};

/// A parsed header.
#[derive(Debug, Default)]
pub(crate) struct Header {
    /// The tensors in the order of their bytes, each with its offset in the file.
    pub(crate) tensors: Vec<(TensorInfo, u64)>,
    /// The pairs in the order of the file.
    pub(crate) metadata: Vec<(String, String)>,
}

/// Reads the header of a file, which has `length` bytes, and checks it against that length.
pub(crate) fn read_header(reader: &mut dyn FileReader, length: u64) -> Result<Header, FileProblem> {
    let truncated = |expected| FileProblem::Truncated { expected, found: length };
    if length < PREFIX {
        return Err(truncated(PREFIX));
    }
    let mut prefix = [0; PREFIX as usize];
    read_exact_at(reader, &mut prefix, 0)?;
    let bytes = u64::from_le_bytes(prefix);
    if bytes > MAX_HEADER {
        return Err(FileProblem::HeaderTooLarge { bytes, limit: MAX_HEADER });
    }
    let start = PREFIX + bytes;
    if length < start {
        return Err(truncated(start));
    }
    whole(&read_vec_at(reader, bytes, PREFIX)?, start, length)
}

/// Reads the header of a file that is in memory as a whole, and checks it against the file's length.
pub(crate) fn parse_bytes(bytes: &[u8]) -> Result<Header, FileProblem> {
    let length = bytes.len() as u64;
    let truncated = |expected| FileProblem::Truncated { expected, found: length };
    let Some((prefix, rest)) = bytes.split_first_chunk::<{ PREFIX as usize }>() else {
        return Err(truncated(PREFIX));
    };
    let json = u64::from_le_bytes(*prefix);
    if json > MAX_HEADER {
        return Err(FileProblem::HeaderTooLarge { bytes: json, limit: MAX_HEADER });
    }
    let start = PREFIX + json;
    let json = rest.get(..json as usize).ok_or_else(|| truncated(start))?;
    whole(json, start, length)
}

/// Parses the JSON of a header, for a file of `length` bytes whose tensors begin at `start`.
fn whole(json: &[u8], start: u64, length: u64) -> Result<Header, FileProblem> {
    let (header, data) = parse(json, start)?;
    match start.checked_add(data) {
        Some(expected) if expected == length => Ok(header),
        Some(expected) if expected < length => Err(FileProblem::TrailingBytes { expected, found: length }),
        expected => Err(FileProblem::Truncated { expected: expected.unwrap_or(u64::MAX), found: length }),
    }
}

/// Returns the header that the safetensors crate writes for these tensors, and the order of their bytes.
pub(crate) fn header(
    tensors: &[&TensorInfo],
    metadata: &[(String, String)],
) -> Result<(Vec<u8>, Vec<usize>), FileProblem> {
    let format = Format::SafeTensors;
    let mut types = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let name = tensor.name.clone();
        if tensor.name == METADATA {
            return Err(FileProblem::ReservedName { tensor: name, format });
        }
        if !tensor.is_contiguous() {
            let shape = tensor.shape.clone();
            let strides = tensor.strides.clone();
            return Err(FileProblem::FormatLacksStrides { tensor: name, shape, strides, format });
        }
        let Some(dtype) = file_dtype(tensor.dtype) else {
            return Err(FileProblem::FormatLacksElements { tensor: name, dtype: tensor.dtype, format });
        };
        types.push(dtype);
    }
    // As the crate orders them: by descending alignment, so that every tensor is aligned, then by name.
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|i| (Reverse(types[*i]), &tensors[*i].name));

    let mut end = 0;
    let entries = order.iter().map(|i| {
        let tensor = tensors[*i];
        let start = end;
        end += tensor.bytes as usize;
        let shape = tensor.shape.iter().map(|n| *n as usize).collect();
        (tensor.name.clone(), FileTensor { dtype: types[*i], shape, data_offsets: (start, end) })
    });
    let written = Metadata::new(None, entries.collect()).map_err(FileProblem::malformed)?;
    let mut json = serde_json::to_vec(&written).map_err(FileProblem::malformed)?;
    if !metadata.is_empty() {
        let pairs: Map<_, _> = metadata.iter().map(|(k, v)| (k.clone(), Value::String(v.clone()))).collect();
        let mut with = format!("{{\"{METADATA}\":").into_bytes();
        serde_json::to_writer(&mut with, &pairs).map_err(FileProblem::malformed)?;
        with.extend_from_slice(if tensors.is_empty() { b"" } else { b"," });
        with.extend_from_slice(&json[1..]);
        json = with;
    }
    json.resize(json.len().next_multiple_of(PREFIX as usize), b' ');
    let bytes = json.len() as u64;
    if bytes > MAX_HEADER {
        return Err(FileProblem::HeaderTooLarge { bytes, limit: MAX_HEADER });
    }
    Ok(([&bytes.to_le_bytes(), &json[..]].concat(), order))
}

/// Parses the JSON of a header. Returns it with the number of bytes that follow it from `start` on.
fn parse(json: &[u8], start: u64) -> Result<(Header, u64), FileProblem> {
    let Members(members) = serde_json::from_slice(json).map_err(FileProblem::malformed)?;
    let mut header = Header::default();
    let mut entries = Vec::with_capacity(members.len());
    for (name, entry) in members {
        match entry {
            Entry::Metadata(None) => {}
            Entry::Metadata(Some(Members(pairs))) => header.metadata = pairs,
            Entry::Tensor(described) => entries.push((name, described)),
        }
    }
    // The names decide among tensors without bytes, which may be at the same place.
    entries.sort_by(|(a, a_is), (b, b_is)| (a_is.data_offsets, a).cmp(&(b_is.data_offsets, b)));
    let mut end = 0;
    for (name, Described { dtype: code, shape, data_offsets: (from, to) }) in entries {
        let damaged = |why: String| FileProblem::malformed(format!("tensor {name:?} {why}"));
        let Some(dtype) = dtype(&code) else {
            return Err(FileProblem::UnknownElements { tensor: name, dtype: code });
        };
        if from != end || to < from {
            return Err(damaged(format!("is at {from} to {to}, and the tensors before it end at {end}")));
        }
        let impossible = || damaged(format!("has the shape {shape:?}, which is impossible for {code}"));
        let tensor = TensorInfo::dense(&name, dtype, shape.clone(), Order::C).ok_or_else(impossible)?;
        if tensor.bytes != to - from {
            let (has, needs) = (to - from, tensor.bytes);
            return Err(damaged(format!("has {has} bytes, and its shape {shape:?} of {code} needs {needs}")));
        }
        let at = start.checked_add(from).ok_or_else(|| damaged(format!("is at {from}, which is too far")))?;
        header.tensors.push((tensor, at));
        end = to;
    }
    Ok((header, end))
}

/// A member of the header.
enum Entry {
    /// The metadata, which may be `null`.
    Metadata(Option<Members<String>>),
    Tensor(Described),
}

/// A tensor as the header describes it.
#[derive(Deserialize)]
struct Described {
    dtype: String,
    shape: Vec<u64>,
    /// Where its bytes begin and end, after the header.
    data_offsets: (u64, u64),
}

impl Member for Entry {
    fn read<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error> {
        if key == METADATA { map.next_value().map(Self::Metadata) } else { map.next_value().map(Self::Tensor) }
    }
}

macro_rules! dtypes {
    ($($ours:ident = $theirs:ident,)*) => {
        fn dtype(theirs: &str) -> Option<DType> {
            match theirs { $(stringify!($theirs) => Some(DType::$ours),)* _ => None }
        }

        fn file_dtype(ours: DType) -> Option<FileDType> {
            match ours { $(DType::$ours => Some(FileDType::$theirs),)* _ => None }
        }
    };
}

dtypes! {
    Bool = BOOL,
    U8 = U8,
    I8 = I8,
    U16 = U16,
    I16 = I16,
    U32 = U32,
    I32 = I32,
    U64 = U64,
    I64 = I64,
    F16 = F16,
    BF16 = BF16,
    F32 = F32,
    F64 = F64,
    F8E4M3 = F8_E4M3,
    F8E5M2 = F8_E5M2,
    F8E4M3Fnuz = F8_E4M3FNUZ,
    F8E5M2Fnuz = F8_E5M2FNUZ,
    F8E8M0 = F8_E8M0,
    F6E3M2 = F6_E3M2,
    F6E2M3 = F6_E2M3,
    F4 = F4,
    C64 = C64,
}

/// Bytes before the JSON.
const PREFIX: u64 = 8;

/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// The only entry of a header that is not a tensor.
const METADATA: &str = "__metadata__";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_of_the_format_is_ours_too() {
        let known = DType::ALL.iter().filter_map(|ours| Some((*ours, file_dtype(*ours)?)));
        let known: Vec<_> = known.collect();
        assert_eq!(known.len(), 22);
        for (ours, theirs) in known {
            assert_eq!(dtype(&theirs.to_string()), Some(ours));
            assert_eq!(theirs.bitsize() as u64, ours.bits());
            let parsed: FileDType = serde_json::from_str(&format!("\"{theirs}\"")).unwrap();
            assert_eq!(parsed, theirs);
        }
        assert_eq!(file_dtype(DType::C128), None);
    }

    #[test]
    fn metadata_keeps_its_order() {
        let pairs: Vec<_> = (0..40).map(|i| (format!("k{}", i * 7 % 40), i.to_string())).collect();
        let (bytes, _) = header(&[], &pairs).unwrap();
        let (read, data) = parse(&bytes[8..], bytes.len() as u64).unwrap();
        assert_eq!(read.metadata, pairs);
        assert_eq!(data, 0);
    }
}
