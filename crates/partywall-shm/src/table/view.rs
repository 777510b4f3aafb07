//! Reads tables that another process wrote.

use std::{fmt, mem::offset_of};

use super::{
    LAYOUT, MAGIC, MAX_METADATA, MAX_RANK, MAX_TENSOR_NAME, MAX_TENSORS, Pair, TableError, TableHeader, TensorEntry,
    Text,
    builder::{extent, is_contiguous},
};
use crate::dtype::DType;

/// A checked table over bytes that do not change.
#[derive(Clone)]
pub struct Table<B> {
    bytes: B,
    tensors: usize,
    chunks: usize,
    pairs: usize,
    chunks_at: usize,
    dims_at: usize,
    pairs_at: usize,
    texts_at: usize,
}

/// One tensor of a table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Tensor<'a> {
    name: &'a str,
    dtype: DType,
    chunk: usize,
    offset: u64,
    bytes: u64,
    position: u32,
    dims: &'a [u8],
}

impl<B: AsRef<[u8]>> Table<B> {
    /// Checks a table against the lengths of its version's chunks. `bytes` must not change afterwards. There may be
    /// more chunks than the table uses.
    ///
    /// # Errors
    /// [`TableError::ForeignLayout`] or [`TableError::Damaged`].
    pub fn parse(bytes: B, chunks: &[u64]) -> Result<Self, TableError> {
        let table = Self::sections(bytes)?;
        let used: Vec<u64> = table.chunk_bytes().collect();
        if used.len() > chunks.len() || used.iter().zip(chunks).any(|(used, there)| used > there) {
            return Err(TableError::Damaged("its chunks are not those of the version"));
        }
        table.check_texts()?;
        let mut previous = None;
        let mut positions = vec![false; table.tensors];
        for index in 0..table.tensors {
            let tensor = table.check_entry(index, &used)?;
            if std::mem::replace(&mut positions[tensor.position as usize], true) {
                return Err(TableError::Damaged("two tensors have the same position"));
            }
            if previous.is_some_and(|p| p >= tensor.name) {
                return Err(TableError::Damaged("its names are not in order"));
            }
            previous = Some(tensor.name);
        }
        Ok(table)
    }

    /// Reads the header and finds the sections.
    fn sections(bytes: B) -> Result<Self, TableError> {
        const SHORT: TableError = TableError::Damaged("it is shorter than it says");
        let b = bytes.as_ref();
        if b.len() < size_of::<TableHeader>() || b[..8] != MAGIC {
            return Err(TableError::Damaged("it does not begin like one"));
        }
        let found = word(b, offset_of!(TableHeader, layout));
        if found != LAYOUT {
            return Err(TableError::ForeignLayout { found, expected: LAYOUT });
        }
        let tensors = half(b, offset_of!(TableHeader, tensors)) as usize;
        let chunks = half(b, offset_of!(TableHeader, chunks)) as usize;
        let dims = word(b, offset_of!(TableHeader, dims));
        let texts = word(b, offset_of!(TableHeader, texts));
        let pairs = word(b, offset_of!(TableHeader, pairs));
        let length = word(b, offset_of!(TableHeader, bytes));
        let size = |count: u64, each: usize| usize::try_from(count).ok()?.checked_mul(each);
        let ends = (|| {
            let chunks_at = size_of::<TableHeader>().checked_add(tensors.checked_mul(size_of::<TensorEntry>())?)?;
            let dims_at = chunks_at.checked_add(chunks.checked_mul(8)?)?;
            let pairs_at = dims_at.checked_add(size(dims, 8)?)?;
            let texts_at = pairs_at.checked_add(size(pairs, size_of::<Pair>())?)?;
            Some((chunks_at, dims_at, pairs_at, texts_at, texts_at.checked_add(size(texts, 1)?)?))
        })();
        let (chunks_at, dims_at, pairs_at, texts_at, end) = ends.ok_or(SHORT)?;
        if end != b.len() || length != b.len() as u64 {
            return Err(SHORT);
        }
        if tensors > MAX_TENSORS {
            return Err(TableError::Damaged("it has too many tensors"));
        }
        let pairs = (texts_at - pairs_at) / size_of::<Pair>();
        Ok(Self { tensors, chunks, pairs, chunks_at, dims_at, pairs_at, texts_at, bytes })
    }

    fn check_texts(&self) -> Result<(), TableError> {
        let mut sum = 0;
        for index in 0..self.pairs {
            let [key, value] = self.pair(index);
            let (Some(key), Some(value)) = (key, value) else {
                return Err(TableError::Damaged("its metadata are no texts"));
            };
            sum += key.len() + value.len();
        }
        if sum > MAX_METADATA { Err(TableError::Damaged("its metadata are too long")) } else { Ok(()) }
    }

    fn check_entry(&self, index: usize, used: &[u64]) -> Result<Tensor<'_>, TableError> {
        let b = self.bytes.as_ref();
        let at = entry_at(index);
        let name =
            self.text(at + offset_of!(TensorEntry, name)).ok_or(TableError::Damaged("a tensor's name is no text"))?;
        if name.is_empty() || name.len() > MAX_TENSOR_NAME {
            return Err(TableError::Damaged("a tensor's name has a forbidden length"));
        }
        let dtype = DType::from_code(b[at + offset_of!(TensorEntry, dtype)])
            .ok_or(TableError::Damaged("a tensor has an unknown dtype"))?;
        let rank = usize::from(b[at + offset_of!(TensorEntry, rank)]);
        let first = word(b, at + offset_of!(TensorEntry, dim));
        let words = (self.pairs_at - self.dims_at) / 8;
        if rank > MAX_RANK || first > words as u64 || words - (first as usize) < 2 * rank {
            return Err(TableError::Damaged("a tensor's shape lies outside"));
        }
        let tensor = self.entry(index, name, dtype);
        let shape: Vec<u64> = tensor.shape().collect();
        let strides: Vec<u64> = tensor.strides().collect();
        if extent(dtype, &shape, &strides) != Ok(tensor.bytes) {
            return Err(TableError::Damaged("a tensor's size is not that of its shape"));
        }
        let inside = match used.get(tensor.chunk) {
            // So that no reader adds a made-up offset to an address.
            _ if tensor.bytes == 0 => (tensor.chunk, tensor.offset) == (0, 0),
            Some(used) => tensor.offset.checked_add(tensor.bytes).is_some_and(|end| end <= *used),
            None => false,
        };
        // A tensor that this library has placed starts at a multiple of 256 bytes; a tensor of foreign memory starts at
        // any element.
        if !inside || !tensor.offset.is_multiple_of(dtype.item_bytes().unwrap_or(1)) {
            return Err(TableError::Damaged("a tensor lies outside its chunk or is not aligned"));
        }
        if tensor.position as usize >= self.tensors {
            return Err(TableError::Damaged("a tensor's position is none"));
        }
        Ok(tensor)
    }

    /// Checks that this table is `before` after growth: it has the same metadata, and the same tensors at the same
    /// offsets. The last tensor of `before` may be longer along its first axis, and further tensors may follow.
    ///
    /// # Errors
    /// [`TableError::Damaged`] if it is not.
    pub fn check_growth_of<C: AsRef<[u8]>>(&self, before: &Table<C>) -> Result<(), TableError> {
        let old = before.in_given_order();
        let new = self.in_given_order();
        let last = old.len().saturating_sub(1);
        let kept = old.len() <= new.len()
            && old.iter().zip(&new).enumerate().all(|(i, (old, new))| new.continues(old, i == last))
            && self.metadata().eq(before.metadata());
        if kept { Ok(()) } else { Err(TableError::Damaged("what was there before it grew has changed")) }
    }

    /// Returns the bytes that the table was parsed from.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.tensors
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors == 0
    }

    /// Returns the tensor named `name`.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        let mut low = 0;
        let mut high = self.tensors;
        while low < high {
            let middle = low + (high - low) / 2;
            let tensor = self.at(middle);
            match tensor.name.cmp(name) {
                std::cmp::Ordering::Equal => return Some(tensor),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    /// Returns the tensor at `index` in the order of the names.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn at(&self, index: usize) -> Tensor<'_> {
        assert!(index < self.tensors, "tensor {index} of {}", self.tensors);
        let at = entry_at(index);
        // `parse` has checked both, so the fallbacks are never used.
        let name = self.text(at + offset_of!(TensorEntry, name)).unwrap_or_default();
        let dtype = DType::from_code(self.bytes.as_ref()[at + offset_of!(TensorEntry, dtype)]).unwrap_or(DType::U8);
        self.entry(index, name, dtype)
    }

    /// Returns all tensors in the order of their names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        (0..self.tensors).map(|index| self.at(index))
    }

    /// Returns all tensors in the order in which the builder added them.
    pub fn in_given_order(&self) -> Vec<Tensor<'_>> {
        let mut tensors: Vec<_> = self.iter().collect();
        tensors.sort_by_key(|t| t.position);
        tensors
    }

    /// Returns the pairs of metadata.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        (0..self.pairs).map(|index| {
            let [key, value] = self.pair(index);
            (key.unwrap_or_default(), value.unwrap_or_default())
        })
    }

    /// Returns the bytes that the tensors use of each chunk.
    pub fn chunk_bytes(&self) -> impl ExactSizeIterator<Item = u64> {
        (0..self.chunks).map(|index| word(self.bytes.as_ref(), self.chunks_at + index * 8))
    }

    /// Returns the bytes of all tensors. Bytes that several tensors share count once.
    pub fn tensor_bytes(&self) -> u64 {
        let range = |tensor: Tensor<'_>| (tensor.chunk, tensor.offset, tensor.offset.saturating_add(tensor.bytes));
        let mut ranges: Vec<_> = self.iter().map(range).collect();
        ranges.sort_unstable();
        let mut sum = 0_u64;
        // How far the bytes of a chunk have been counted.
        let mut counted = (0, 0);
        for (chunk, start, end) in ranges {
            let from = if counted.0 == chunk { start.max(counted.1) } else { start };
            if end > from {
                sum = sum.saturating_add(end - from);
                counted = (chunk, end);
            }
        }
        sum
    }

    fn entry<'a>(&'a self, index: usize, name: &'a str, dtype: DType) -> Tensor<'a> {
        let b = self.bytes.as_ref();
        let at = entry_at(index);
        let rank = usize::from(b[at + offset_of!(TensorEntry, rank)]);
        let first = word(b, at + offset_of!(TensorEntry, dim)) as usize;
        let dims_at = self.dims_at + first * 8;
        Tensor {
            name,
            dtype,
            chunk: half(b, at + offset_of!(TensorEntry, chunk)) as usize,
            offset: word(b, at + offset_of!(TensorEntry, offset)),
            bytes: word(b, at + offset_of!(TensorEntry, bytes)),
            position: half(b, at + offset_of!(TensorEntry, position)),
            dims: &b[dims_at..dims_at + rank * 16],
        }
    }

    /// Returns key and value of a pair of metadata.
    fn pair(&self, index: usize) -> [Option<&str>; 2] {
        let at = self.pairs_at + index * size_of::<Pair>();
        [offset_of!(Pair, key), offset_of!(Pair, value)].map(|text| self.text(at + text))
    }

    /// Returns the text whose offset and length are at `at`.
    fn text(&self, at: usize) -> Option<&str> {
        let b = self.bytes.as_ref();
        let start = self.texts_at.checked_add(half(b, at + offset_of!(Text, offset)) as usize)?;
        let end = start.checked_add(half(b, at + offset_of!(Text, bytes)) as usize)?;
        std::str::from_utf8(b.get(start..end)?).ok()
    }
}

impl<B: AsRef<[u8]>> fmt::Debug for Table<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("tensors", &self.tensors).field("chunks", &self.chunks).finish_non_exhaustive()
    }
}

impl<'a> Tensor<'a> {
    /// Returns its name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the elements along each dimension.
    pub fn shape(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.words(0)
    }

    /// Returns the strides: elements from one index to the next along each dimension.
    pub fn strides(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.words(self.rank())
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len() / 16
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        // With a dimension of 0 the other dimensions may be arbitrarily large, and their product may overflow.
        if self.shape().any(|n| n == 0) { 0 } else { self.shape().product() }
    }

    /// Returns the index of its chunk; meaningless for a tensor without bytes.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns its offset in its chunk, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the bytes from its first element to the end of its last.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether its elements follow each other without gaps, last dimension fastest.
    pub fn is_contiguous(&self) -> bool {
        let (shape, strides): (Vec<_>, Vec<_>) = self.shape().zip(self.strides()).unzip();
        is_contiguous(&shape, &strides)
    }

    /// Returns whether users of `before` can continue with this tensor.
    fn continues(&self, before: &Self, may_be_longer: bool) -> bool {
        let at = |tensor: &Self| (tensor.bytes > 0).then_some((tensor.chunk, tensor.offset));
        let shape = self.shape();
        let old = before.shape();
        (self.name, self.dtype, self.rank()) == (before.name, before.dtype, before.rank())
            && self.strides().eq(before.strides())
            && (before.bytes == 0 || at(self) == at(before))
            && shape.zip(old).enumerate().all(|(axis, (n, old))| n == old || (may_be_longer && axis == 0 && n > old))
    }

    fn words(&self, skip: usize) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        let dims = self.dims;
        let rank = self.rank();
        (0..rank).map(move |i| word(dims, (skip + i) * 8))
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}: {} {:?})", self.name, self.dtype, self.shape().collect::<Vec<_>>())
    }
}

/// Returns the little-endian `u64` at `at`, which is in bounds because `sections` has checked it.
fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Returns where the entry at `index` begins.
fn entry_at(index: usize) -> usize {
    size_of::<TableHeader>() + index * size_of::<TensorEntry>()
}

/// Returns the little-endian `u32` at `at`, which is in bounds because `sections` has checked it.
fn half(bytes: &[u8], at: usize) -> u32 {
    let mut half = [0; 4];
    half.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(half)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

    use super::super::{Layout, TableBuilder};
    use super::*;
    use proptest::prelude::*;

    fn model() -> TableBuilder {
        let mut table = TableBuilder::new();
        table.add("weight", DType::BF16, &[3, 5]).unwrap();
        table.add("bias", DType::F32, &[5]).unwrap();
        table.add("empty", DType::F32, &[0, 7]).unwrap();
        table.add("scalar", DType::I64, &[]).unwrap();
        table.add_strided("fortran", DType::U8, &[2, 3], &[1, 2]).unwrap();
        table.set_metadata("format", "np").unwrap();
        table.set_metadata("format", "pt").unwrap();
        table
    }

    #[test]
    fn table_round_trips() {
        let Layout { table, chunks } = model().layout(1 << 20, 8).unwrap();
        let table = Table::parse(table, &chunks).unwrap();
        assert_eq!(table.len(), 5);
        let weight = table.find("weight").unwrap();
        assert_eq!(weight.dtype(), DType::BF16);
        assert_eq!(weight.shape().collect::<Vec<_>>(), [3, 5]);
        assert_eq!(weight.strides().collect::<Vec<_>>(), [5, 1]);
        assert_eq!((weight.offset(), weight.bytes()), (0, 30));
        assert!(weight.is_contiguous());
        assert_eq!(table.find("bias").unwrap().offset(), 256);
        assert_eq!(table.find("empty").unwrap().bytes(), 0);
        assert_eq!(table.find("scalar").unwrap().elements(), 1);
        assert!(!table.find("fortran").unwrap().is_contiguous());
        assert_eq!(table.find("wei"), None);
        assert_eq!(table.metadata().collect::<Vec<_>>(), [("format", "pt")]);
        let order: Vec<_> = table.in_given_order().iter().map(|t| t.name()).collect();
        assert_eq!(order, ["weight", "bias", "empty", "scalar", "fortran"]);
    }

    #[test]
    fn chunks_are_split_and_their_number_is_kept() {
        let mut table = TableBuilder::new();
        for i in 0..100 {
            table.add(&format!("t{i}"), DType::U8, &[1000]).unwrap();
        }
        assert_eq!(table.clone().layout(2048, 128).unwrap().chunks.len(), 50);
        let few = table.layout(2048, 10).unwrap();
        assert!(few.chunks.len() <= 10);
        assert!(Table::parse(few.table, &few.chunks).is_ok());
    }

    // Holds 44.
    #[test]
    fn alignment_wastes_at_most_a_hundredth_of_large_tensors() {
        let mut table = TableBuilder::new();
        let mut payload = 0;
        for i in 0..500 {
            let bytes = 32 * 1024 + i * 37;
            table.add(&format!("t{i}"), DType::U8, &[bytes]).unwrap();
            payload += bytes;
        }
        let used: u64 = table.layout(1 << 20, 128).unwrap().chunks.iter().sum();
        assert!(used >= payload && used - payload <= payload / 100, "{used} bytes for {payload}");
    }

    #[test]
    fn impossible_tensors_are_refused() {
        let mut table = model();
        assert_eq!(table.add("bias", DType::U8, &[1]), Err(TableError::Duplicate("bias".into())));
        assert!(matches!(table.add("", DType::U8, &[1]), Err(TableError::BadName { .. })));
        assert!(matches!(table.add(&"x".repeat(1025), DType::U8, &[1]), Err(TableError::BadName { .. })));
        assert!(table.add(&"ä".repeat(512), DType::U8, &[1]).is_ok());
        for shape in [&[u64::MAX, 2][..], &[1 << 62, 2], &[1; 65], &[u64::MAX, u64::MAX, u64::MAX]] {
            assert!(matches!(table.add("big", DType::F64, shape), Err(TableError::BadShape { .. })), "{shape:?}");
        }
        assert!(table.add_strided("s", DType::F64, &[2, 2], &[u64::MAX, 1]).is_err());
        assert!(table.add_strided("s", DType::F64, &[2, 2], &[1]).is_err());
        assert!(table.add("odd", DType::F4, &[3]).unwrap_err().to_string().contains("whole bytes"));
    }

    // Holds 156.
    #[test]
    fn tensors_have_positions_of_their_own_and_empty_ones_no_offset() {
        let Layout { table, chunks } = model().layout(1 << 20, 8).unwrap();
        let entry = |name: &str| {
            let table = Table::parse(&table[..], &chunks).unwrap();
            entry_at(table.iter().position(|tensor| tensor.name() == name).unwrap())
        };
        // Offsets in an entry: the chunk at 12, the offset in it at 24, the position at 40.
        for (name, at, value, why) in [
            ("bias", 40, 0, "same position"),
            ("bias", 40, 5, "position is none"),
            ("empty", 24, 512, "outside its chunk"),
            ("empty", 12, 1, "outside its chunk"),
        ] {
            let mut table = table.clone();
            table[entry(name) + at..][..4].copy_from_slice(&u32::to_le_bytes(value));
            let error = Table::parse(table, &chunks).unwrap_err();
            assert!(error.to_string().contains(why), "{name}: {error}");
        }
    }

    // Holds 45.
    #[test]
    fn views_take_no_memory_and_stay_views_in_a_copy_of_the_table() {
        let mut table = model();
        let roots = table.clone().layout(1 << 20, 8).unwrap().chunks;
        table.add_view("tied", DType::BF16, &[3, 5], &[5, 1], "weight", 0).unwrap();
        table.add_view("rows", DType::BF16, &[2, 5], &[5, 1], "tied", 10).unwrap();
        table.add_view("turned", DType::BF16, &[5, 2], &[1, 5], "rows", 0).unwrap();
        table.add_view("raw", DType::U8, &[20], &[1], "bias", 0).unwrap();
        table.add_view("none", DType::F64, &[0], &[1], "bias", 3).unwrap();
        table.add_view("nowhere", DType::U8, &[0], &[1], "rows", u64::MAX).unwrap();
        let Layout { table, chunks } = table.layout(1 << 20, 8).unwrap();
        assert_eq!(chunks, roots);
        let table = Table::parse(table, &chunks).unwrap();
        let at = |name: &str| (table.find(name).unwrap().chunk(), table.find(name).unwrap().offset());
        assert_eq!(at("tied"), at("weight"));
        assert_eq!(at("rows"), (at("weight").0, at("weight").1 + 10));
        assert_eq!(at("turned"), at("rows"));
        assert_eq!(at("raw"), at("bias"));
        assert_eq!(table.tensor_bytes(), 30 + 20 + 8 + 6);
        // Laid out anew in small chunks: still views of the same tensors.
        let Layout { table: copy, chunks } = TableBuilder::from_table(&table).layout(1, 8).unwrap();
        let copy = Table::parse(copy, &chunks).unwrap();
        assert_eq!(chunks.iter().sum::<u64>(), 30 + 20 + 8 + 6);
        let at = |name: &str| (copy.find(name).unwrap().chunk(), copy.find(name).unwrap().offset());
        assert_eq!(at("tied"), at("weight"));
        assert_eq!(at("turned"), (at("weight").0, at("weight").1 + 10));
        let same = |tensor: &str| table.find(tensor).unwrap().strides().eq(copy.find(tensor).unwrap().strides());
        assert!(same("turned") && same("rows"));
    }

    // Holds 45.
    #[test]
    fn views_outside_their_tensor_are_refused() {
        let mut table = model();
        for (shape, strides, of, offset, why) in [
            (&[3, 5][..], &[5, 1][..], "weight", 2, "outside the 30 bytes"),
            (&[3, 5], &[6, 1], "weight", 0, "outside the 30 bytes"),
            (&[1], &[1], "weight", u64::MAX, "outside the 30 bytes"),
            (&[1], &[1], "weight", 1, "cannot begin at byte 1"),
            (&[1], &[1], "nowhere", 0, "not added before"),
            (&[1], &[1], "empty", 0, "outside the 0 bytes"),
        ] {
            let error = table.add_view("view", DType::BF16, shape, strides, of, offset).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        table.add_view("view", DType::BF16, &[1], &[1], "weight", 28).unwrap();
        assert!(table.clone().extend_last("view", 2).unwrap_err().to_string().contains("within another"));
        let taken = table.add_view("view", DType::BF16, &[1], &[1], "weight", 0);
        assert_eq!(taken, Err(TableError::Duplicate("view".into())));
    }

    #[test]
    fn another_layout_is_named() {
        let Layout { mut table, chunks } = model().layout(1 << 20, 8).unwrap();
        table[9] ^= 1;
        assert!(matches!(Table::parse(table, &chunks), Err(TableError::ForeignLayout { .. })));
    }

    #[test]
    fn too_small_chunks_are_refused() {
        let Layout { table, chunks } = model().layout(1 << 20, 8).unwrap();
        assert!(Table::parse(&table, &[chunks[0] - 1]).is_err());
        assert!(Table::parse(&table, &[]).is_err());
        assert!(Table::parse(&table, &[chunks[0] + 4096]).is_ok());
    }

    #[test]
    fn grown_table_keeps_its_tensors() {
        let parse = |builder: TableBuilder| {
            let Layout { table, chunks } = builder.layout(u64::MAX, 1).unwrap();
            Table::parse(table, &chunks).unwrap()
        };
        let mut builder = TableBuilder::new();
        builder.add("fixed", DType::U8, &[10]).unwrap();
        builder.add("rows", DType::F32, &[3, 50]).unwrap();
        builder.set_metadata("k", "v").unwrap();
        let before = parse(builder);

        let mut longer = TableBuilder::from_table(&before);
        longer.extend_last("rows", 9).unwrap();
        longer.add("next", DType::I8, &[0, 5]).unwrap();
        longer.add("more", DType::I8, &[5]).unwrap();
        let longer = parse(longer);
        longer.check_growth_of(&before).unwrap();
        let rows = longer.find("rows").unwrap();
        assert_eq!((rows.offset(), rows.shape().collect::<Vec<_>>(), rows.bytes()), (256, vec![9, 50], 1800));
        assert_eq!(longer.find("more").unwrap().offset(), 2304);
        assert_eq!(longer.metadata().collect::<Vec<_>>(), [("k", "v")]);
        before.check_growth_of(&before).unwrap();

        // A hostile builder may state these values.
        let rebuilt = |change: fn(&mut TableBuilder)| {
            let mut builder = TableBuilder::new();
            change(&mut builder);
            parse(builder)
        };
        let forged = [
            rebuilt(|t| t.add("fixed", DType::U8, &[10]).unwrap()),
            rebuilt(|t| {
                t.add("fixed", DType::U8, &[11]).unwrap();
                t.add("rows", DType::F32, &[3, 50]).unwrap();
                t.set_metadata("k", "v").unwrap();
            }),
            rebuilt(|t| {
                t.add("fixed", DType::U8, &[10]).unwrap();
                t.add("rows", DType::F32, &[2, 50]).unwrap();
                t.set_metadata("k", "v").unwrap();
            }),
            rebuilt(|t| {
                t.add("fixed", DType::U8, &[10]).unwrap();
                t.add("rows", DType::F32, &[3, 51]).unwrap();
                t.set_metadata("k", "v").unwrap();
            }),
            rebuilt(|t| {
                t.add("fixed", DType::U8, &[10]).unwrap();
                t.add("rows", DType::U32, &[3, 50]).unwrap();
                t.set_metadata("k", "v").unwrap();
            }),
            rebuilt(|t| {
                t.add("rows", DType::F32, &[3, 50]).unwrap();
                t.add("fixed", DType::U8, &[10]).unwrap();
                t.set_metadata("k", "v").unwrap();
            }),
            rebuilt(|t| {
                t.add("fixed", DType::U8, &[10]).unwrap();
                t.add("rows", DType::F32, &[3, 50]).unwrap();
                t.set_metadata("k", "w").unwrap();
            }),
        ];
        for (index, forged) in forged.iter().enumerate() {
            assert!(forged.check_growth_of(&before).is_err(), "{index}");
        }
    }

    #[test]
    fn only_the_last_tensor_grows_and_only_without_gaps() {
        let mut table = model();
        let message = |result: Result<(), TableError>| result.unwrap_err().to_string();
        assert!(message(table.extend_last("weight", 9)).contains("only the last tensor, \"fortran\""));
        assert!(message(table.extend_last("fortran", 9)).contains("gaps"));
        table.add("log", DType::U16, &[4]).unwrap();
        assert!(message(table.extend_last("log", 3)).contains("shorter"));
        assert!(message(table.extend_last("log", u64::MAX)).contains("exceeds"));
        table.extend_last("log", 4).unwrap();
        table.add("scalar2", DType::U16, &[]).unwrap();
        assert!(message(table.extend_last("scalar2", 3)).contains("no axis"));
    }

    proptest! {
        /// A table of a hostile builder is refused, or all accesses stay in bounds.
        // Holds 156.
        #[test]
        fn damaged_tables_never_panic(
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let Layout { mut table, chunks } = model().layout(1 << 20, 8).unwrap();
            for (index, byte) in edits {
                let at = 16 + index.index(table.len() - 16);
                table[at] = byte;
            }
            if cut.index(4) == 0 {
                table.truncate(cut.index(table.len()));
            }
            if let Ok(table) = Table::parse(table, &chunks) {
                for tensor in table.iter() {
                    prop_assert!(tensor.bytes() == 0 || tensor.offset() + tensor.bytes() <= chunks[tensor.chunk()]);
                    prop_assert!(table.find(tensor.name()).is_some());
                }
                prop_assert!(table.metadata().count() < 1 << 20);
            }
        }
    }
}
