//! Builds tables. Tensors are laid out in chunks in the order in which they were added.

use std::{
    collections::{BTreeMap, HashMap, hash_map},
    mem::offset_of,
};

use super::{
    ALIGNMENT, LAYOUT, MAGIC, MAX_METADATA, MAX_RANK, MAX_TENSOR_NAME, MAX_TENSORS, Pair, Table, TableError,
    TableHeader, TensorEntry, Text,
};
use crate::dtype::DType;

/// Builds a table from tensors and metadata.
#[derive(Debug, Clone, Default)]
pub struct TableBuilder {
    tensors: Vec<Spec>,
    /// The index of each name in `tensors`.
    names: HashMap<String, usize>,
    metadata: Vec<(String, String)>,
    /// The index of each key in `metadata`.
    keys: HashMap<String, usize>,
    metadata_bytes: usize,
}

#[derive(Debug, Clone)]
struct Spec {
    name: String,
    dtype: DType,
    dims: Vec<u64>,
    bytes: u64,
    /// For a view: the index of the tensor whose memory it shows, which is no view, and the offset in it in bytes.
    within: Option<(usize, u64)>,
}

/// A finished table and the memory that it describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The table.
    pub table: Vec<u8>,
    /// Bytes that the tensors use of each chunk; none is 0.
    pub chunks: Vec<u64>,
}

impl TableBuilder {
    /// Returns a builder of an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a builder with the tensors and metadata of a table. The tensors keep their offsets if they are laid out
    /// again in one chunk, with or without further tensors behind them. A tensor that lies within an earlier one is a
    /// view of it.
    pub fn from_table<B: AsRef<[u8]>>(table: &Table<B>) -> Self {
        let mut builder = Self::default();
        // The tensors that are no views, by their chunks and offsets.
        let mut placed = BTreeMap::<(usize, u64), (usize, u64)>::new();
        for (index, tensor) in table.in_given_order().into_iter().enumerate() {
            let at = (tensor.chunk(), tensor.offset());
            let before = placed.range(..=at).next_back().filter(|((chunk, start), (_, bytes))| {
                *chunk == at.0 && at.1 - start + tensor.bytes() <= *bytes && tensor.bytes() > 0
            });
            let within = before.map(|((_, start), (of, _))| (*of, at.1 - start));
            if within.is_none() && tensor.bytes() > 0 {
                placed.insert(at, (index, tensor.bytes()));
            }
            builder.names.insert(tensor.name().to_owned(), index);
            builder.tensors.push(Spec {
                name: tensor.name().to_owned(),
                dtype: tensor.dtype(),
                dims: tensor.shape().chain(tensor.strides()).collect(),
                bytes: tensor.bytes(),
                within,
            });
        }
        for (key, value) in table.metadata() {
            builder.keys.insert(key.to_owned(), builder.metadata.len());
            builder.metadata_bytes += key.len() + value.len();
            builder.metadata.push((key.to_owned(), value.to_owned()));
        }
        builder
    }

    /// Extends the first axis of the last tensor, which must be `name` and without gaps.
    ///
    /// # Errors
    /// [`TableError::BadShape`] if the last tensor has another name, has no axis, or would become shorter or larger
    /// than 2⁶³ bytes.
    pub fn extend_last(&mut self, name: &str, first_axis: u64) -> Result<(), TableError> {
        let bad = |why: String| TableError::BadShape { name: shorten(name), why };
        let Some(last) = self.tensors.last_mut().filter(|last| last.name == name) else {
            let last = self.tensors.last().map_or("there is none".into(), |last| format!("{:?}", shorten(&last.name)));
            return Err(bad(format!("only the last tensor, {last}, can be extended")));
        };
        let (shape, strides) = last.dims.split_at(last.dims.len() / 2);
        let Some(before) = shape.first() else { return Err(bad("it has no axis that could be extended".into())) };
        if first_axis < *before {
            return Err(bad(format!("it has {before} along its first axis and cannot become shorter")));
        }
        if !is_contiguous(shape, strides) {
            return Err(bad("it has gaps: only a tensor without gaps can be extended".into()));
        }
        if last.within.is_some() {
            return Err(bad("it lies within another tensor, and so cannot be extended".into()));
        }
        let grown = [&[first_axis], &shape[1..]].concat();
        let bytes = extent(last.dtype, &grown, strides).map_err(bad)?;
        last.dims[0] = first_axis;
        last.bytes = bytes;
        Ok(())
    }

    /// Adds a tensor whose elements follow each other without gaps, last dimension fastest.
    ///
    /// # Errors
    /// [`TableError`] if the name is taken, empty or too long, or the size exceeds 2⁶³ bytes.
    pub fn add(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<(), TableError> {
        let bad = |why: String| TableError::BadShape { name: shorten(name), why };
        let mut strides = vec![1; shape.len()];
        for i in (1..shape.len()).rev() {
            strides[i - 1] =
                shape[i].max(1).checked_mul(strides[i]).ok_or_else(|| bad(format!("{shape:?} is too large")))?;
        }
        self.add_strided(name, dtype, shape, &strides)
    }

    /// Adds a tensor with the given strides, in elements.
    ///
    /// # Errors
    /// As [`TableBuilder::add`]; also if shape and strides differ in length, or elements of less than eight bits are
    /// not without gaps.
    pub fn add_strided(&mut self, name: &str, dtype: DType, shape: &[u64], strides: &[u64]) -> Result<(), TableError> {
        self.push(name, dtype, shape, strides, None)
    }

    /// Adds a tensor with the given strides that shows memory of the tensor `of`, from `offset` bytes on. Both names
    /// may describe the same elements, as tied weights of a model do. A tensor without elements has no memory, of any
    /// tensor.
    ///
    /// # Errors
    /// As [`TableBuilder::add_strided`]; [`TableError::BadShape`] if `of` was not added before, if the tensor does not
    /// lie within it, or if its first element is not aligned.
    pub fn add_view(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[u64],
        strides: &[u64],
        of: &str,
        offset: u64,
    ) -> Result<(), TableError> {
        let bad = |why: String| Err(TableError::BadShape { name: shorten(name), why });
        let Some(&index) = self.names.get(of) else {
            return bad(format!("it is to lie within {:?}, which was not added before", shorten(of)));
        };
        let whole = &self.tensors[index];
        let bytes = extent(dtype, shape, strides).map_err(|why| TableError::BadShape { name: shorten(name), why })?;
        if bytes > 0 && offset.checked_add(bytes).is_none_or(|end| end > whole.bytes) {
            return bad(format!("bytes {offset} + {bytes} are outside the {} bytes of {:?}", whole.bytes, shorten(of)));
        }
        if bytes == 0 {
            return self.push(name, dtype, shape, strides, None);
        }
        let (root, start) = whole.within.unwrap_or((index, 0));
        let offset = start + offset;
        if !offset.is_multiple_of(dtype.item_bytes().unwrap_or(1)) {
            return bad(format!("elements of {dtype} cannot begin at byte {offset}"));
        }
        self.push(name, dtype, shape, strides, Some((root, offset)))
    }

    fn push(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[u64],
        strides: &[u64],
        within: Option<(usize, u64)>,
    ) -> Result<(), TableError> {
        if name.is_empty() || name.len() > MAX_TENSOR_NAME {
            let why = format!("it has {} bytes; 1 to {MAX_TENSOR_NAME} are allowed", name.len());
            return Err(TableError::BadName { name: shorten(name), why });
        }
        let bytes = extent(dtype, shape, strides).map_err(|why| TableError::BadShape { name: shorten(name), why })?;
        limit("tensors", self.tensors.len() + 1, MAX_TENSORS)?;
        match self.names.entry(name.to_owned()) {
            hash_map::Entry::Occupied(_) => return Err(TableError::Duplicate(shorten(name))),
            hash_map::Entry::Vacant(vacant) => vacant.insert(self.tensors.len()),
        };
        let dims = [shape, strides].concat();
        self.tensors.push(Spec { name: name.to_owned(), dtype, dims, bytes, within });
        Ok(())
    }

    /// Sets a pair of metadata; a later value replaces an earlier one.
    ///
    /// # Errors
    /// [`TableError::Limit`] beyond [`MAX_METADATA`] bytes.
    pub fn set_metadata(&mut self, key: &str, value: &str) -> Result<(), TableError> {
        let at = self.keys.get(key).copied();
        let replaced = at.map_or(0, |at| key.len() + self.metadata[at].1.len());
        let bytes = self.metadata_bytes - replaced + key.len() + value.len();
        limit("bytes of metadata", bytes, MAX_METADATA)?;
        self.metadata_bytes = bytes;
        match at {
            Some(at) => value.clone_into(&mut self.metadata[at].1),
            None => {
                self.keys.insert(key.to_owned(), self.metadata.len());
                self.metadata.push((key.to_owned(), value.to_owned()));
            }
        }
        Ok(())
    }

    /// Returns for each tensor, in the order in which they were added, whose memory it shows and from which byte on;
    /// none for one that has memory of its own. Tensors that show memory of another come after that.
    pub fn views(&self) -> impl Iterator<Item = Option<(usize, u64)>> {
        self.tensors.iter().map(|tensor| tensor.within)
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Lays the tensors out in chunks of at most `chunk_bytes`. A larger tensor gets its own chunk. Views take no
    /// memory. The limit is raised if more than `max_chunks` would be needed.
    ///
    /// # Errors
    /// [`TableError::Limit`] if the sizes add up to more than 2⁶³.
    pub fn layout(self, chunk_bytes: u64, max_chunks: usize) -> Result<Layout, TableError> {
        let mut roots = self.tensors.iter().filter(|tensor| tensor.within.is_none());
        let total = roots.try_fold(0_u64, |sum, t| sum.checked_add(t.bytes)?.checked_add(ALIGNMENT));
        let total = total.filter(|t| *t <= i64::MAX as u64);
        limit("bytes", total.map_or(usize::MAX, |t| t as usize), i64::MAX as usize)?;
        let mut chunk_bytes = chunk_bytes.max(ALIGNMENT);
        loop {
            let (offsets, chunks) = self.lay_out(chunk_bytes);
            if chunks.len() <= max_chunks {
                return Ok(Layout { table: self.encode(&offsets, &chunks), chunks });
            }
            chunk_bytes = chunk_bytes.saturating_mul(2);
        }
    }

    /// Returns the table for tensors with known offsets. `offsets` are the chunk and offset of each tensor, in the order
    /// in which the tensors were added; `chunks` are the lengths of the chunks. [`Table::parse`](super::Table::parse)
    /// checks that they fit.
    ///
    /// # Panics
    /// If the numbers of offsets and tensors differ.
    pub fn placed(self, offsets: &[(u32, u64)], chunks: &[u64]) -> Vec<u8> {
        assert_eq!(offsets.len(), self.tensors.len(), "each tensor has an offset");
        // An empty tensor has no offset.
        let at = |(tensor, at): (&Spec, &(u32, u64))| if tensor.bytes == 0 { (0, 0) } else { *at };
        let offsets: Vec<_> = self.tensors.iter().zip(offsets).map(at).collect();
        self.encode(&offsets, chunks)
    }

    /// Returns the tensors' names, in the order in which they were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// Returns the bytes of each tensor from its first element to the end of its last, in the order in which they were
    /// added.
    pub fn tensor_bytes(&self) -> impl Iterator<Item = u64> {
        self.tensors.iter().map(|tensor| tensor.bytes)
    }

    /// Returns chunk and offset of each tensor, and the used length of each chunk.
    fn lay_out(&self, chunk_bytes: u64) -> (Vec<(u32, u64)>, Vec<u64>) {
        let mut chunks: Vec<u64> = Vec::new();
        let mut offsets: Vec<(u32, u64)> = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            if let Some((root, offset)) = tensor.within {
                let (chunk, start) = offsets[root];
                offsets.push((chunk, start + offset));
                continue;
            }
            if tensor.bytes == 0 {
                offsets.push((0, 0));
                continue;
            }
            let offset = chunks.last().map(|used| used.next_multiple_of(ALIGNMENT));
            match offset {
                Some(offset) if offset + tensor.bytes <= chunk_bytes => {
                    offsets.push((chunks.len() as u32 - 1, offset));
                    if let Some(used) = chunks.last_mut() {
                        *used = offset + tensor.bytes;
                    }
                }
                _ => {
                    offsets.push((chunks.len() as u32, 0));
                    chunks.push(tensor.bytes);
                }
            }
        }
        (offsets, chunks)
    }

    fn encode(&self, offsets: &[(u32, u64)], chunks: &[u64]) -> Vec<u8> {
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_unstable_by(|a, b| self.tensors[*a].name.cmp(&self.tensors[*b].name));

        let mut entries = Vec::new();
        let mut dims = Vec::new();
        let mut pairs = Vec::new();
        let mut texts = Vec::new();
        let mut text = |bytes: &str| {
            let mut text = [0; size_of::<Text>()];
            put(&mut text, offset_of!(Text, offset), (texts.len() as u32).to_le_bytes());
            put(&mut text, offset_of!(Text, bytes), (bytes.len() as u32).to_le_bytes());
            texts.extend_from_slice(bytes.as_bytes());
            text
        };
        for position in order {
            let tensor = &self.tensors[position];
            let (chunk, offset) = offsets[position];
            let mut entry = [0; size_of::<TensorEntry>()];
            put(&mut entry, offset_of!(TensorEntry, name), text(&tensor.name));
            put(&mut entry, offset_of!(TensorEntry, dtype), [tensor.dtype.code()]);
            put(&mut entry, offset_of!(TensorEntry, rank), [(tensor.dims.len() / 2) as u8]);
            put(&mut entry, offset_of!(TensorEntry, chunk), chunk.to_le_bytes());
            put(&mut entry, offset_of!(TensorEntry, dim), ((dims.len() / 8) as u64).to_le_bytes());
            put(&mut entry, offset_of!(TensorEntry, offset), offset.to_le_bytes());
            put(&mut entry, offset_of!(TensorEntry, bytes), tensor.bytes.to_le_bytes());
            put(&mut entry, offset_of!(TensorEntry, position), (position as u32).to_le_bytes());
            entries.extend_from_slice(&entry);
            dims.extend(tensor.dims.iter().flat_map(|d| d.to_le_bytes()));
        }
        for (key, value) in &self.metadata {
            let mut pair = [0; size_of::<Pair>()];
            put(&mut pair, offset_of!(Pair, key), text(key));
            put(&mut pair, offset_of!(Pair, value), text(value));
            pairs.extend_from_slice(&pair);
        }

        let length =
            size_of::<TableHeader>() + entries.len() + chunks.len() * 8 + dims.len() + pairs.len() + texts.len();
        let mut table = Vec::with_capacity(length);
        table.resize(size_of::<TableHeader>(), 0);
        put(&mut table, offset_of!(TableHeader, magic), MAGIC);
        put(&mut table, offset_of!(TableHeader, layout), LAYOUT.to_le_bytes());
        put(&mut table, offset_of!(TableHeader, tensors), (self.tensors.len() as u32).to_le_bytes());
        put(&mut table, offset_of!(TableHeader, chunks), (chunks.len() as u32).to_le_bytes());
        put(&mut table, offset_of!(TableHeader, dims), ((dims.len() / 8) as u64).to_le_bytes());
        put(&mut table, offset_of!(TableHeader, texts), (texts.len() as u64).to_le_bytes());
        put(&mut table, offset_of!(TableHeader, pairs), (self.metadata.len() as u64).to_le_bytes());
        put(&mut table, offset_of!(TableHeader, bytes), (length as u64).to_le_bytes());
        table.extend_from_slice(&entries);
        table.extend(chunks.iter().flat_map(|c| c.to_le_bytes()));
        table.extend_from_slice(&dims);
        table.extend_from_slice(&pairs);
        table.extend_from_slice(&texts);
        table
    }
}

/// Writes a little-endian number, or other bytes, from byte `at` on.
fn put<const N: usize>(to: &mut [u8], at: usize, bytes: [u8; N]) {
    to[at..at + N].copy_from_slice(&bytes);
}

/// Returns whether elements follow each other without gaps, last dimension fastest.
pub(super) fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1_u64;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(n, stride)| {
            let fits = *n == 1 || *stride == expected;
            expected = expected.saturating_mul(*n);
            fits
        })
}

/// Returns the bytes from a tensor's first element to the end of its last.
pub(super) fn extent(dtype: DType, shape: &[u64], strides: &[u64]) -> Result<u64, String> {
    if shape.len() != strides.len() {
        return Err(format!("{} dimensions but {} strides", shape.len(), strides.len()));
    }
    if shape.len() > MAX_RANK {
        return Err(format!("{} dimensions; at most {MAX_RANK} are supported", shape.len()));
    }
    let large = || format!("shape {shape:?} with strides {strides:?} of {dtype} exceeds 2^63 bytes");
    let elements = shape.iter().try_fold(1_u64, |product, n| product.checked_mul(*n));
    if shape.contains(&0) {
        return Ok(0);
    }
    let elements = elements.ok_or_else(large)?;
    let last =
        shape.iter().zip(strides).try_fold(0_u64, |sum, (n, stride)| sum.checked_add((n - 1).checked_mul(*stride)?));
    let span = last.and_then(|l| l.checked_add(1)).ok_or_else(large)?;
    if dtype.item_bytes().is_none() && span != elements {
        return Err(format!("{dtype} elements must follow each other without gaps"));
    }
    match dtype.bytes_for(span) {
        Some(bytes) => Ok(bytes),
        None if dtype.item_bytes().is_none() && span.checked_mul(8).is_some() => {
            Err(format!("{elements} elements of {dtype} do not fill whole bytes"))
        }
        None => Err(large()),
    }
}

fn limit(what: &'static str, found: usize, limit: usize) -> Result<(), TableError> {
    if found <= limit { Ok(()) } else { Err(TableError::Limit { what, found: found as u64, limit: limit as u64 }) }
}

/// Returns a name that is short enough for an error message.
fn shorten(name: &str) -> String {
    if name.chars().count() <= 80 { name.to_owned() } else { name.chars().take(77).chain("...".chars()).collect() }
}
