//! The header of a `.npy` file: a magic number, a version, a length, and a dictionary as Python writes it.
//!
//! NumPy describes the format under `numpy.lib.format`. The dictionary has exactly the keys `descr`, `fortran_order`
//! and `shape`; this module reads the few kinds of literals that their values are made of, in one pass and without
//! recursion, and refuses everything else.

use std::fmt;

use partywall_shm::DType;

use crate::{
    error::FileProblem,
    format::Format,
    storage::{FileReader, read_exact_at, read_vec_at},
    tensor::{Order, SINGLE_TENSOR, TensorInfo},
};

/// Reads the header of a file, which has `length` bytes, and checks it against that length. Returns the tensor and the
/// offset of its first byte.
pub(crate) fn read_header(reader: &mut dyn FileReader, length: u64) -> Result<(TensorInfo, u64), FileProblem> {
    let truncated = |expected| FileProblem::Truncated { expected, found: length };
    let mut prefix = [0; 12];
    let have = length.min(12) as usize;
    read_exact_at(reader, &mut prefix[..have], 0)?;
    if prefix[..MAGIC.len()] != *MAGIC {
        let why = "it does not begin as a .npy file does";
        return Err(if MAGIC.starts_with(&prefix[..have]) { truncated(12) } else { FileProblem::malformed(why) });
    }
    if have < 12 {
        return Err(truncated(12));
    }
    let (text_at, text_bytes) = match (prefix[6], prefix[7]) {
        (1, 0) => (10, u64::from(u16::from_le_bytes([prefix[8], prefix[9]]))),
        (2 | 3, 0) => (12, u64::from(u32::from_le_bytes([prefix[8], prefix[9], prefix[10], prefix[11]]))),
        (major, minor) => return Err(FileProblem::UnknownVersion { version: format!("{major}.{minor}") }),
    };
    let start = text_at + text_bytes;
    if start > MAX_HEADER {
        return Err(FileProblem::HeaderTooLarge { bytes: start, limit: MAX_HEADER });
    }
    if length < start {
        return Err(truncated(start));
    }
    let tensor = parse(&read_vec_at(reader, text_bytes, text_at)?)?;
    match start.checked_add(tensor.bytes) {
        Some(expected) if expected == length => Ok((tensor, start)),
        Some(expected) if expected < length => Err(FileProblem::TrailingBytes { expected, found: length }),
        expected => Err(truncated(expected.unwrap_or(u64::MAX))),
    }
}

/// Returns the header for `tensor`, byte for byte as `numpy.save` writes it.
pub(crate) fn header(tensor: &TensorInfo) -> Result<Vec<u8>, FileProblem> {
    let format = Format::Npy;
    let Some(order) = [Order::C, Order::Fortran].into_iter().find(|order| tensor.lies_in(*order)) else {
        return Err(FileProblem::FormatLacksStrides {
            tensor: tensor.name.clone(),
            shape: tensor.shape.clone(),
            strides: tensor.strides.clone(),
            format,
        });
    };
    let Some((code, _)) = TYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype) else {
        let name = tensor.name.clone();
        return Err(FileProblem::FormatLacksElements { tensor: name, dtype: tensor.dtype, format });
    };
    let byte_order = if tensor.dtype.bits() == 8 { '|' } else { '<' };
    let (fortran, growing) = match order {
        Order::C => ("False", tensor.shape.first()),
        Order::Fortran => ("True", tensor.shape.last()),
    };
    let shape = match &tensor.shape[..] {
        [only] => format!("({only},)"),
        several => format!("({})", several.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
    };
    let mut text = format!("{{'descr': '{byte_order}{code}', 'fortran_order': {fortran}, 'shape': {shape}, }}");
    // NumPy leaves room for a longer number of rows, so that more can be appended to the file in place.
    let spare = growing.map_or(0, |rows| GROWTH_DIGITS.saturating_sub(rows.to_string().len()));
    let unpadded = TEXT_AT + text.len() + spare + 1;
    let padding = ALIGNMENT - unpadded % ALIGNMENT;
    text.extend(std::iter::repeat_n(' ', spare + padding));
    text.push('\n');
    let bytes = (TEXT_AT + text.len()) as u64;
    match u16::try_from(text.len()) {
        Ok(length) if bytes <= MAX_HEADER => Ok([MAGIC, &[1, 0], &length.to_le_bytes()[..], text.as_bytes()].concat()),
        _ => Err(FileProblem::HeaderTooLarge { bytes, limit: MAX_HEADER }),
    }
}

/// Returns the tensor that the dictionary `text` describes.
fn parse(text: &[u8]) -> Result<TensorInfo, FileProblem> {
    let Dictionary { elements, order, shape } = Literal { text, at: 0 }.dictionary().map_err(FileProblem::malformed)?;
    let dtype = match elements {
        Elements::Plain(code) => dtype(code),
        Elements::Fields => Err("elements with fields are not supported"),
    };
    let dtype = dtype.map_err(|why| FileProblem::UnsupportedElements { dtype: elements.to_string(), why })?;
    // As in NumPy, also the dimensions of a tensor without elements have a product.
    let fits = shape.iter().try_fold(1_u64, |product, dimension| product.checked_mul((*dimension).max(1))).is_some();
    let large = || FileProblem::malformed(format!("its shape {shape:?} is too large"));
    fits.then(|| TensorInfo::dense(SINGLE_TENSOR, dtype, shape.clone(), order)).flatten().ok_or_else(large)
}

/// The contents of a header.
struct Dictionary<'a> {
    elements: Elements<'a>,
    order: Order,
    shape: Vec<u64>,
}

/// The value of `descr`.
#[derive(Clone, Copy)]
enum Elements<'a> {
    /// NumPy's code for one type.
    Plain(&'a str),
    /// A list of fields, each with a type of its own.
    Fields,
}

impl fmt::Display for Elements<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(code) => write!(f, "'{code}'"),
            Self::Fields => f.write_str("a structure"),
        }
    }
}

/// Parses a Python literal from its beginning to its end.
struct Literal<'a> {
    text: &'a [u8],
    /// The byte that is next.
    at: usize,
}

impl<'a> Literal<'a> {
    /// Reads the whole text.
    fn dictionary(mut self) -> Result<Dictionary<'a>, String> {
        let mut elements = None;
        let mut order = None;
        let mut shape = None;
        self.expect(b'{')?;
        while !self.take(b'}') {
            let key = self.string()?;
            self.expect(b':')?;
            let again = match key {
                "descr" => elements.replace(self.elements()?).is_some(),
                "fortran_order" => order.replace(self.order()?).is_some(),
                "shape" => shape.replace(self.shape()?).is_some(),
                _ => return Err(format!("its header has the key {key:?}, which the format does not have")),
            };
            if again {
                return Err(format!("its header has the key {key:?} twice"));
            }
            if !self.take(b',') {
                self.expect(b'}')?;
                break;
            }
        }
        if self.peek().is_some() {
            return Err(self.expected("its end"));
        }
        let missing = |key| format!("its header has no key {key:?}");
        Ok(Dictionary {
            elements: elements.ok_or_else(|| missing("descr"))?,
            order: order.ok_or_else(|| missing("fortran_order"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
        })
    }

    /// Reads a code, or passes over a list of fields.
    fn elements(&mut self) -> Result<Elements<'a>, String> {
        match self.peek() {
            Some(b'\'' | b'"' | b'u' | b'b') => self.string().map(Elements::Plain),
            Some(b'[') => self.pass_list().map(|()| Elements::Fields),
            _ => Err(self.expected("a string or a list")),
        }
    }

    fn order(&mut self) -> Result<Order, String> {
        self.peek();
        for (word, order) in [("False", Order::C), ("True", Order::Fortran)] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(order);
            }
        }
        Err(self.expected("True or False"))
    }

    /// Reads a tuple of numbers. With one number it has a comma, as Python demands.
    fn shape(&mut self) -> Result<Vec<u64>, String> {
        let mut shape = Vec::new();
        self.expect(b'(')?;
        while !self.take(b')') {
            shape.push(self.number()?);
            if !self.take(b',') {
                if shape.len() == 1 {
                    return Err(self.expected("a comma"));
                }
                self.expect(b')')?;
                break;
            }
        }
        Ok(shape)
    }

    fn number(&mut self) -> Result<u64, String> {
        self.peek();
        let rest = &self.text[self.at..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = str::from_utf8(&rest[..digits]).unwrap_or_default();
        if number.is_empty() {
            return Err(self.expected("a number"));
        }
        // Python 2 writes a long number as `10L`.
        self.at += digits + usize::from(rest.get(digits) == Some(&b'L'));
        number.parse().map_err(|_| format!("its header has the dimension {number}, which is too large"))
    }

    /// Reads a string without escape sequences, which NumPy never needs here. Python 2 may write it as `u'…'`.
    fn string(&mut self) -> Result<&'a str, String> {
        self.peek();
        if let [b'u' | b'b', b'\'' | b'"', ..] = self.text[self.at..] {
            self.at += 1;
        }
        let quote = match self.peek() {
            Some(quote @ (b'\'' | b'"')) => quote,
            _ => return Err(self.expected("a string")),
        };
        let rest = &self.text[self.at + 1..];
        let length = rest.iter().position(|byte| *byte == quote).ok_or("its header has a string without end")?;
        let inside = &rest[..length];
        if inside.contains(&b'\\') {
            return Err("its header has an escape sequence".to_owned());
        }
        self.at += length + 2;
        str::from_utf8(inside).map_err(|_| "its header has a string that is no text".to_owned())
    }

    /// Passes over a list, whatever is in it.
    fn pass_list(&mut self) -> Result<(), String> {
        let mut open = 0_usize;
        loop {
            match self.peek() {
                Some(b'\'' | b'"') => {
                    self.string()?;
                    continue;
                }
                Some(b'[' | b'(') => open += 1,
                Some(b']' | b')') => open -= 1,
                Some(_) => {}
                None => return Err(self.expected("the end of a list")),
            }
            self.at += 1;
            if open == 0 {
                return Ok(());
            }
        }
    }

    /// Passes over blanks and returns the byte after them.
    fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\t' | b'\r' | b'\n') = self.text.get(self.at) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    /// Passes over `byte` if it is next.
    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), String> {
        if self.take(byte) { Ok(()) } else { Err(self.expected(&format!("{:?}", char::from(byte)))) }
    }

    /// Returns the error that the next byte does not begin `what`.
    fn expected(&self, what: &str) -> String {
        let found = match self.text.get(self.at) {
            Some(byte) => format!("{:?}", char::from(*byte)),
            None => "nothing".to_owned(),
        };
        format!("its header has {found} at byte {} in place of {what}", self.at)
    }
}

/// Returns the type of the elements with this code, or why such elements are not supported.
fn dtype(code: &str) -> Result<DType, &'static str> {
    let (byte_order, kind) = match code.chars().next() {
        Some(first @ ('<' | '>' | '|' | '=')) => (first, &code[1..]),
        // NumPy reads a code without one as the machine's own, like `=`, and only there also a name.
        _ => match DType::ALL.iter().find(|dtype| dtype.name() == code) {
            Some(dtype) => return Ok(*dtype),
            None => ('=', code),
        },
    };
    match TYPES.iter().chain(NAMES).find(|(known, _)| *known == kind) {
        Some((_, dtype)) if byte_order == '>' && dtype.bits() > 8 => Err("they are big-endian"),
        Some((_, dtype)) => Ok(*dtype),
        None => Err(match kind.chars().next() {
            Some('O') => "they are pickled Python objects",
            Some('V') => "the file does not say what they are (so NumPy writes types of others)",
            Some('S' | 'a' | 'U') => "they are texts",
            Some('m' | 'M') => "they are times",
            _ => "no tensor has such elements",
        }),
    }
}

/// NumPy's codes, without the byte order.
const TYPES: &[(&str, DType)] = &[
    ("b1", DType::Bool),
    ("u1", DType::U8),
    ("u2", DType::U16),
    ("u4", DType::U32),
    ("u8", DType::U64),
    ("i1", DType::I8),
    ("i2", DType::I16),
    ("i4", DType::I32),
    ("i8", DType::I64),
    ("f2", DType::F16),
    ("f4", DType::F32),
    ("f8", DType::F64),
    ("c8", DType::C64),
    ("c16", DType::C128),
];

/// NumPy's other names on 64-bit Linux, which it reads and does not write.
const NAMES: &[(&str, DType)] = &[
    ("?", DType::Bool),
    ("b", DType::I8),
    ("B", DType::U8),
    ("h", DType::I16),
    ("H", DType::U16),
    ("i", DType::I32),
    ("I", DType::U32),
    ("l", DType::I64),
    ("L", DType::U64),
    ("q", DType::I64),
    ("Q", DType::U64),
    ("e", DType::F16),
    ("f", DType::F32),
    ("d", DType::F64),
    ("F", DType::C64),
    ("D", DType::C128),
    ("p", DType::I64),
    ("P", DType::U64),
    ("bool_", DType::Bool),
    ("byte", DType::I8),
    ("ubyte", DType::U8),
    ("short", DType::I16),
    ("ushort", DType::U16),
    ("intc", DType::I32),
    ("uintc", DType::U32),
    ("int", DType::I64),
    ("int_", DType::I64),
    ("uint", DType::U64),
    ("intp", DType::I64),
    ("uintp", DType::U64),
    ("long", DType::I64),
    ("ulong", DType::U64),
    ("longlong", DType::I64),
    ("ulonglong", DType::U64),
    ("half", DType::F16),
    ("single", DType::F32),
    ("float", DType::F64),
    ("double", DType::F64),
    ("csingle", DType::C64),
    ("complex", DType::C128),
    ("cdouble", DType::C128),
];

const MAGIC: &[u8] = b"\x93NUMPY";

/// Where the text begins in a header of version 1.0.
const TEXT_AT: usize = 10;

/// NumPy pads a header to a multiple of this, so that the data can be mapped.
const ALIGNMENT: usize = 64;

/// Characters that NumPy keeps for the dimension that grows when rows are appended.
const GROWTH_DIGITS: usize = 21;

/// The longest header that is read and written. NumPy itself reads 10,000 bytes unless told to trust the file.
const MAX_HEADER: u64 = 1 << 14;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<TensorInfo, FileProblem> {
        parse(text.as_bytes())
    }

    fn why(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn files_of_numpy_are_read() {
        for (text, dtype, shape, strides) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n", DType::F32, &[2, 3][..], &[3, 1][..]),
            ("{'descr': '<i8', 'fortran_order': True, 'shape': (2, 3), }\n", DType::I64, &[2, 3], &[1, 2]),
            ("{'descr': '|b1', 'fortran_order': False, 'shape': (), }\n", DType::Bool, &[], &[]),
            ("{'descr': '<c16', 'fortran_order': False, 'shape': (0, 5), }\n", DType::C128, &[0, 5], &[5, 1]),
            // Other programs write less, or in another order; NumPy reads that too.
            ("{\"shape\":(7,),\"fortran_order\":False,\"descr\":\"f8\"}", DType::F64, &[7], &[1]),
            ("{'descr': '=u2', 'fortran_order': False, 'shape': (2,3)}", DType::U16, &[2, 3], &[3, 1]),
            ("{'descr': 'float32', 'fortran_order': False,\t'shape': (2,)}\r\n", DType::F32, &[2], &[1]),
            ("{'descr': '?', 'fortran_order': False, 'shape': (2,)}", DType::Bool, &[2], &[1]),
            ("{'descr': '<d', 'fortran_order': False, 'shape': (2,)}", DType::F64, &[2], &[1]),
            ("{'descr': 'bool', 'fortran_order': False, 'shape': (2,)}", DType::Bool, &[2], &[1]),
            ("{'descr': 'float', 'fortran_order': False, 'shape': (2,)}", DType::F64, &[2], &[1]),
            ("{'descr': 'intc', 'fortran_order': False, 'shape': (2,)}", DType::I32, &[2], &[1]),
            // The name of a type is not one of NumPy's codes: `u8` has eight bytes.
            ("{'descr': 'u8', 'fortran_order': False, 'shape': (2,)}", DType::U64, &[2], &[1]),
            ("{'descr': 'uint8', 'fortran_order': False, 'shape': (2,)}", DType::U8, &[2], &[1]),
            // Python 2 wrote these.
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }", DType::F32, &[2, 3], &[3, 1]),
            ("{u'descr': u'<f4', 'fortran_order': False, u'shape': (10L,), }\n", DType::F32, &[10], &[1]),
            ("{'shape': (0L,), 'fortran_order': True, 'descr': b'|i1'}", DType::I8, &[0], &[1]),
        ] {
            let tensor = read(text).unwrap();
            assert_eq!((tensor.dtype, &tensor.shape[..], &tensor.strides[..]), (dtype, shape, strides));
        }
    }

    /// The headers are what `numpy.save` of NumPy 2.4 wrote.
    #[test]
    fn headers_are_numpys_byte_for_byte() {
        let long = format!("{{'descr': '<c16', 'fortran_order': False, 'shape': (1{}), }}", ", 1".repeat(19));
        for (dtype, shape, order, text, bytes) in [
            (DType::F32, &[2, 3][..], Order::C, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", 128),
            (DType::U8, &[], Order::C, "{'descr': '|u1', 'fortran_order': False, 'shape': (), }", 128),
            (DType::I64, &[9], Order::C, "{'descr': '<i8', 'fortran_order': False, 'shape': (9,), }", 128),
            (DType::F16, &[4, 5], Order::Fortran, "{'descr': '<f2', 'fortran_order': True, 'shape': (4, 5), }", 128),
            // Without the room for more rows this would be 128.
            (DType::C128, &[1; 20], Order::C, &long, 192),
        ] {
            let tensor = TensorInfo::dense("t", dtype, shape.to_vec(), order).unwrap();
            let header = header(&tensor).unwrap();
            let length = ((bytes - 10) as u16).to_le_bytes();
            let padding = " ".repeat(bytes - 11 - text.len());
            assert_eq!(header, [b"\x93NUMPY\x01\0", &length[..], format!("{text}{padding}\n").as_bytes()].concat());
        }
    }

    #[test]
    fn every_type_round_trips() {
        for ours in DType::ALL {
            let tensor = TensorInfo::dense(SINGLE_TENSOR, *ours, vec![4, 3, 8], Order::Fortran).unwrap();
            match header(&tensor) {
                Ok(bytes) => assert_eq!(parse(&bytes[TEXT_AT..]).unwrap(), tensor),
                Err(error) => assert!(matches!(error, FileProblem::FormatLacksElements { .. }), "{error}"),
            }
        }
    }

    #[test]
    fn errors_list_what_exists() {
        for (text, says) in [
            ("", "its header has nothing at byte 0 in place of '{'"),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "has '0' at byte 34 in place of True or False"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3)}", "has ')' at byte 52 in place of a comma"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}", "has '-' at byte 51 in place of a number"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} x", "has 'x' at byte 56 in place of its end"),
            ("{'descr': '<f4', 'fortran_order': False}", "has no key \"shape\""),
            ("{'descr': '<f4', 'descr': '<f4'}", "has the key \"descr\" twice"),
            ("{'shape': (1,), 'extra': 1}", "has the key \"extra\", which"),
            ("{'descr': [('a', '<f4'}", "has nothing at byte 23 in place of the end of a list"),
            ("{'descr': ('<f4',)}", "has '(' at byte 10 in place of a string or a list"),
            ("{'descr': 'f4", "has a string without end"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3LL,)}", "has 'L' at byte 53 in place of a comma"),
            ("{'descr': unsigned}", "has 'u' at byte 10 in place of a string"),
        ] {
            assert!(why(text).contains(says), "{text}: {}", why(text));
        }
        let fields = why("{'descr': [('a\"[', '<f4', (2,))], 'fortran_order': False, 'shape': (1,)}");
        assert!(fields.ends_with("contains elements of type a structure: elements with fields are not supported"));
    }

    #[test]
    fn more_dimensions_than_a_header_holds_are_refused() {
        let tensor = TensorInfo::dense("t", DType::U8, vec![1; 10_000], Order::C).unwrap();
        assert!(matches!(header(&tensor), Err(FileProblem::HeaderTooLarge { .. })));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[-\\[\\](){}'\",:.+0-9a-zA-Z\\\\ \n_|<>]{0,80}") {
            let _ = read(&text);
        }

        #[test]
        fn no_bytes_make_the_parser_panic(
            at in any::<prop::sample::Index>(),
            damage in proptest::collection::vec(any::<u8>(), 1..4),
        ) {
            let mut text = b"{'descr': [('a', '<f4', (2, 3))], 'fortran_order': False, 'shape': (20, 3), }\n".to_vec();
            let at = at.index(text.len());
            text.splice(at..at + 1, damage);
            let _ = parse(&text);
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
