//! Plans of reading tensors from files, made from the headers alone, before memory is allocated.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet, hash_map::Entry},
    fmt,
    fs::File,
    io::{self, Read, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use partywall_shm::{DType, Table, TableBuilder};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::{
    error::{FileError, FileProblem},
    format::{has_suffix, is_safetensors},
    local::{LocalFiles, Spool, check_size},
    npy,
    safetensors::{self, Header},
    shards::{Folder, Index, is_index},
    storage::{BUFFER_BYTES, FileReader, Storage, StoredFile, never, read_exact_at, read_vec_at},
    tensor::{Order, SINGLE_TENSOR, TensorInfo},
};

/// The tensors of one or more files, and the places of their bytes.
///
/// Keeps no file open, except the bytes that [`Plan::from_reader`] has read. [`Plan::copy_to`] detects files that have
/// changed since.
pub struct Plan {
    pub(crate) sources: Vec<Source>,
    tensors: Vec<TensorInfo>,
    /// The offset of each tensor in its file. Starts and ends ascend within a file.
    pub(crate) starts: Vec<u64>,
    metadata: Vec<(String, String)>,
    /// The tensors that show memory of another one, by index: the index of that, and the offset in it.
    views: HashMap<usize, (usize, u64)>,
}

/// A file, and a range of its tensors that follow each other without gaps.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<dyn StoredFile>,
    pub(crate) tensors: Range<usize>,
}

impl Plan {
    /// Reads the headers of a file, or of all shards of a folder or an index.
    ///
    /// A folder with a `*.safetensors.index.json` is read by this index: tensors that are only in the index or only in
    /// its shards are errors; files that it does not name are ignored. Of a tensor that is in several of its shards,
    /// the one in the shard that the index names is meant. A folder without an index is the set of all its
    /// `*.safetensors` that are not hidden. Metadata of all shards is merged; in a conflict, the first shard by name
    /// wins.
    ///
    /// # Errors
    /// [`FileError`]: the file cannot be read, is not a regular file, is damaged or truncated, or shards and index do
    /// not belong together.
    pub fn from_path(path: &Path) -> Result<Self, FileError> {
        Self::from_storage(&LocalFiles, path)
    }

    /// Reads the headers of a file, or of all shards of a folder or an index, in a storage; as [`Plan::from_path`] does
    /// in the file system.
    ///
    /// # Errors
    /// As [`Plan::from_path`], and those of the storage.
    pub fn from_storage(storage: &dyn Storage, path: &Path) -> Result<Self, FileError> {
        if let Some(files) = storage.folder(path).map_err(|problem| problem.of(path))? {
            return match Folder::of(path, files)? {
                Folder::Index(index) => Self::from_index(storage, &index),
                Folder::Shards(shards) => Self::from_shards(storage, &shards, None),
            };
        }
        if is_index(path) {
            return Self::from_index(storage, path);
        }
        if is_safetensors(path) {
            return Self::from_shards(storage, &[path.to_owned()], None);
        }
        let model = Model::open(storage, path)?;
        let (tensor, start) = if has_suffix(path, ".npy") {
            model.read(npy::read_header).map_err(|problem| problem.of(path))?
        } else {
            (raw(path, model.0.length())?, 0)
        };
        Ok(Self::single(path, model.0, tensor, start))
    }

    /// Reads a stream to its end as raw bytes: one tensor, [`SINGLE_TENSOR`], of `uint8`.
    ///
    /// The length of a segment must be known before it is filled. The stream is therefore kept in a memfd until the
    /// plan is dropped, and its bytes are in memory twice at the end of [`Plan::copy_to`]. To avoid that, write it to a
    /// file first.
    ///
    /// # Errors
    /// [`FileProblem::TooLong`] as soon as there are more than `limit` bytes; [`FileProblem::Read`];
    /// [`FileProblem::Full`], [`FileProblem::SizeLimit`] and [`FileProblem::Write`] if the memfd cannot take them.
    pub fn from_reader(mut reader: impl Read, limit: u64) -> Result<Self, FileError> {
        let path = Path::new("-");
        let spool = memfd_create("partywall:-", MemfdFlags::CLOEXEC);
        let mut spool = File::from(spool.map_err(|e| FileProblem::write(e.into()).of(path))?);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut length = 0_u64;
        loop {
            let read = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(FileProblem::Read(source).of(path)),
            };
            length += read as u64;
            if length > limit {
                return Err(FileProblem::TooLong { limit }.of(path));
            }
            check_size(length).map_err(|problem| problem.of(path))?;
            spool.write_all(&buffer[..read]).map_err(|e| FileProblem::write(e).of(path))?;
        }
        Ok(Self::single(path, Arc::new(Spool::new(spool, length)), raw(path, length)?, 0))
    }

    /// Makes a plan of a table and the *content* of its version: a file of the bytes of its tensors, one tensor after
    /// the other in the order of the table. Tensors that show memory of another one have no bytes of their own there.
    /// `path` names the file in errors. The table's metadata is replaced by `metadata`.
    ///
    /// # Errors
    /// [`FileProblem::Truncated`] or [`FileProblem::TrailingBytes`] if the file has another length.
    pub fn from_content<B: AsRef<[u8]>>(
        path: &Path,
        file: Arc<dyn StoredFile>,
        table: &Table<B>,
        metadata: Vec<(String, String)>,
    ) -> Result<Self, FileError> {
        let mut plan =
            Self { sources: Vec::new(), tensors: Vec::new(), starts: Vec::new(), metadata, views: HashMap::new() };
        let mut end = 0_u64;
        for (index, (entry, view)) in
            table.in_given_order().into_iter().zip(TableBuilder::from_table(table).views()).enumerate()
        {
            let bytes = if view.is_some() { 0 } else { entry.bytes() };
            let (shape, strides) = (entry.shape().collect(), entry.strides().collect());
            let name = entry.name().to_owned();
            plan.tensors.push(TensorInfo { name, dtype: entry.dtype(), shape, strides, bytes });
            plan.starts.push(end);
            plan.views.extend(view.map(|view| (index, view)));
            end = end.checked_add(bytes).ok_or_else(|| FileProblem::malformed("it is too large").of(path))?;
        }
        let found = file.length();
        match found.cmp(&end) {
            Ordering::Less => return Err(FileProblem::Truncated { expected: end, found }.of(path)),
            Ordering::Greater => return Err(FileProblem::TrailingBytes { expected: end, found }.of(path)),
            Ordering::Equal => {}
        }
        plan.sources.push(Source { path: path.to_owned(), file, tensors: 0..plan.tensors.len() });
        Ok(plan)
    }

    /// Returns the tensors, in the order of their bytes: shard after shard.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the metadata of the files.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// Returns the number of bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
    }

    /// Adds the tensors and the metadata to a table.
    ///
    /// # Errors
    /// [`FileProblem::Table`], for example if a name is too long or taken.
    pub fn add_to(&self, table: &mut TableBuilder) -> Result<(), FileError> {
        for source in &self.sources {
            let failed = |error| FileProblem::Table(error).of(&source.path);
            for index in source.tensors.clone() {
                let TensorInfo { name, dtype, shape, strides, .. } = &self.tensors[index];
                let added = match self.views.get(&index) {
                    None => table.add_strided(name, *dtype, shape, strides),
                    Some((of, offset)) => {
                        table.add_view(name, *dtype, shape, strides, &self.tensors[*of].name, *offset)
                    }
                };
                added.map_err(failed)?;
            }
        }
        for (key, value) in &self.metadata {
            let failed = |error| FileProblem::Table(error).of(self.first_path());
            table.set_metadata(key, value).map_err(failed)?;
        }
        Ok(())
    }

    /// Reads the bytes of one tensor, given its index in [`Plan::tensors`], into memory of its own.
    ///
    /// # Errors
    /// [`FileProblem::Changed`] if the file has changed since the plan was made; [`FileProblem::Memory`];
    /// [`FileProblem::Read`].
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn read_tensor(&self, index: usize) -> Result<Vec<u8>, FileError> {
        let source = self.sources.iter().find(|source| source.tensors.contains(&index));
        let source = source.expect("the index is in range, and each tensor is in one file");
        let read = || {
            let mut reader = source.file.reader(&never)?;
            let bytes = read_vec_at(&mut *reader, self.tensors[index].bytes, self.starts[index])?;
            source.file.check()?;
            Ok(bytes)
        };
        read().map_err(|problem: FileProblem| problem.of(&source.path))
    }

    /// Returns the path for an error that is about no particular file.
    fn first_path(&self) -> &Path {
        self.sources.first().map_or(Path::new(""), |source| &source.path)
    }

    fn from_index(storage: &dyn Storage, path: &Path) -> Result<Self, FileError> {
        let model = Model::open(storage, path)?;
        let index = model.read(|reader, length| Index::read(path, reader, length));
        let index = index.map_err(|problem| problem.of(path))?;
        Self::from_shards(storage, index.shards(), Some(&index))
    }

    /// Reads the headers of shards. `index` is the index that names them, if there is one.
    fn from_shards(storage: &dyn Storage, paths: &[PathBuf], index: Option<&Index>) -> Result<Self, FileError> {
        let mut sources = Vec::with_capacity(paths.len());
        let mut tensors = Vec::new();
        let mut starts = Vec::new();
        let mut metadata = Vec::new();
        let mut keys = HashSet::new();
        let mut shard_of = Vec::new();
        for (shard, path) in paths.iter().enumerate() {
            let model = Model::open(storage, path).map_err(|error| match index {
                Some(index) => index.shard_error(shard, error),
                None => error,
            })?;
            let header = model.read(safetensors::read_header);
            let header: Header = header.map_err(|problem| problem.of(path))?;
            let source = |range| Source { path: path.clone(), file: model.0.clone(), tensors: range };
            let mut first = tensors.len();
            let mut is_gap = false;
            for (tensor, start) in header.tensors {
                if index.is_some_and(|index| index.is_elsewhere(shard, &tensor.name)) {
                    is_gap = tensors.len() > first;
                    continue;
                }
                // A source has no gaps between its tensors, so the file is several sources.
                if std::mem::take(&mut is_gap) {
                    sources.push(source(first..tensors.len()));
                    first = tensors.len();
                }
                tensors.push(tensor);
                starts.push(start);
                shard_of.push(shard);
            }
            metadata.extend(header.metadata.into_iter().filter(|(key, _)| keys.insert(key.clone())));
            sources.push(source(first..tensors.len()));
        }
        let plan = Self { sources, tensors, starts, metadata, views: HashMap::new() };
        plan.check_names()?;
        if let Some(index) = index {
            let names = plan.tensors.iter().map(|tensor| tensor.name.as_str());
            index.check(&names.zip(shard_of).collect())?;
        }
        Ok(plan)
    }

    fn single(path: &Path, file: Arc<dyn StoredFile>, tensor: TensorInfo, start: u64) -> Self {
        let source = Source { path: path.to_owned(), file, tensors: 0..1 };
        Self {
            sources: vec![source],
            tensors: vec![tensor],
            starts: vec![start],
            metadata: Vec::new(),
            views: HashMap::new(),
        }
    }

    /// Refuses a tensor that is in two shards. Within one shard, names differ.
    fn check_names(&self) -> Result<(), FileError> {
        let mut seen = HashMap::with_capacity(self.tensors.len());
        for source in &self.sources {
            for tensor in &self.tensors[source.tensors.clone()] {
                match seen.entry(tensor.name.as_str()) {
                    Entry::Vacant(entry) => drop(entry.insert(&source.path)),
                    Entry::Occupied(entry) => {
                        let first = (*entry.get()).clone();
                        let twice = FileProblem::DuplicateTensor { tensor: tensor.name.clone(), first };
                        return Err(twice.of(&source.path));
                    }
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<_> = self.sources.iter().map(|source| &source.path).collect();
        f.debug_struct("Plan").field("files", &files).field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

/// A file whose header is read.
struct Model(Arc<dyn StoredFile>);

impl Model {
    /// Opens a file. Refuses a pointer of Git LFS in its place.
    fn open(storage: &dyn Storage, path: &Path) -> Result<Self, FileError> {
        let model = storage.open(path).map(Self).map_err(|problem| problem.of(path))?;
        let is_pointer = model.read(|reader, length| {
            let mut beginning = [0; LFS.len()];
            let may_be = (LFS.len() as u64..LFS_LIMIT).contains(&length);
            if may_be {
                read_exact_at(reader, &mut beginning, 0)?;
            }
            Ok(may_be && beginning == *LFS)
        });
        if is_pointer.map_err(|problem| problem.of(path))? { Err(FileProblem::LfsPointer.of(path)) } else { Ok(model) }
    }

    /// Reads a part by `read`, which takes the file and its length.
    fn read<T>(&self, read: impl FnOnce(&mut dyn FileReader, u64) -> Result<T, FileProblem>) -> Result<T, FileProblem> {
        read(&mut *self.0.reader(&never)?, self.0.length())
    }
}

fn raw(path: &Path, length: u64) -> Result<TensorInfo, FileError> {
    TensorInfo::dense(SINGLE_TENSOR, DType::U8, vec![length], Order::C)
        .ok_or_else(|| FileProblem::malformed("it is too large").of(path))
}

/// The beginning of a pointer of Git LFS.
const LFS: &[u8; 40] = b"version https://git-lfs.github.com/spec/";

/// A pointer of Git LFS is shorter than this.
const LFS_LIMIT: u64 = 1024;
